#include "kernels/pack_tiles.h"
#include "kernels/quant_rows_cuda.cuh"

namespace
{

constexpr int kThreads = 256;
constexpr int kBlockWords = EPMOEI_TILE_BYTES / 4;

struct pack_tiles_t {
    quant_rows_t rows;
    int32_t gated;
    int32_t tiles;  /* of an expert */
    int32_t blocks; /* of a tile */
    int32_t scale_bytes;
    uint32_t *data;
    void *scales;
    uint8_t *zeros; /* NULL = none */
};

/* epmoei_tiles_row. */
__device__ __forceinline__ int32_t row_of(const pack_tiles_t &p, int64_t device_row)
{
    if (!p.gated) return device_row < p.rows.n ? (int32_t)device_row : -1;
    const int32_t f = p.rows.n / 2;
    const int64_t output = device_row / 16 * 8 + device_row % 8;
    if (output >= f) return -1;
    return (int32_t)output + (device_row % 16 < 8 ? 0 : f);
}

/* epmoei_mxfp4_bits: where bit i of code (j, h) is. */
__device__ __forceinline__ uint32_t spread_mxfp4(uint32_t code, int j, int h)
{
    constexpr uint32_t kPlaces[4] = {0x09020100u, 0x0D060504u, 0x030C0B0Au, 0x0F08070Eu};
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int half = j == 2 && i == 3 ? 1 - h : h;
        word |= (code >> i & 1) << ((kPlaces[j] >> (8 * i) & 255) + 16 * half);
    }
    return word;
}

/* A block for each tile of an expert. */
__global__ void __launch_bounds__(kThreads) pack_tiles_kernel(const pack_tiles_t p)
{
    const quant_rows_t &d = p.rows;
    const bool mxfp4 = d.format == EPMOE_FORMAT_MXFP4;
    const int64_t expert = blockIdx.y, tile = expert * p.tiles + blockIdx.x;
    const int64_t first_row = (int64_t)blockIdx.x * EPMOEI_TILE_ROWS;
    const int64_t words = (int64_t)p.blocks * kBlockWords;
    for (int64_t i = threadIdx.x; i < words; i += kThreads) {
        const int32_t in_block = (int32_t)(i % kBlockWords), part = in_block / 128, lane = in_block % 128 / 4;
        const int32_t first_col = (int32_t)(i / kBlockWords) * EPMOEI_TILE_COLS + in_block % 4 * 16 + lane % 4 * 2;
        uint32_t word = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int32_t row = row_of(p, first_row + part * 16 + lane / 4 + 8 * (j & 1));
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int32_t col = first_col + 8 * (j >> 1) + h;
                const uint32_t code = row >= 0 && col < d.k ? quant_rows_code(d, expert, row, col) : 0;
                word |= mxfp4 ? spread_mxfp4(code, j, h) : code << (4 * j + 16 * h);
            }
        }
        p.data[tile * words + i] = word;
    }
    for (int32_t i = threadIdx.x; i < d.groups * EPMOEI_TILE_ROWS; i += kThreads) {
        const int32_t group = i / EPMOEI_TILE_ROWS, place = i % EPMOEI_TILE_ROWS;
        const int32_t row = row_of(p, first_row + place / 16 * 16 + place % 16 / 2 + 8 * (place & 1));
        const int64_t to = tile * d.groups * EPMOEI_TILE_ROWS + i;
        const int64_t from = row < 0 ? 0 : quant_rows_scale_at(d, expert, row, group);
        uint32_t bits = 0;
        if (row >= 0)
            bits = p.scale_bytes == 4   ? ((const uint32_t *)d.scales)[from]
                   : p.scale_bytes == 2 ? ((const uint16_t *)d.scales)[from]
                                        : ((const uint8_t *)d.scales)[from];
        if (p.scale_bytes == 4)
            ((uint32_t *)p.scales)[to] = bits;
        else if (p.scale_bytes == 2)
            ((uint16_t *)p.scales)[to] = (uint16_t)bits;
        else
            ((uint8_t *)p.scales)[to] = (uint8_t)bits;
        if (p.zeros) p.zeros[to] = (uint8_t)(row < 0 ? 0 : quant_rows_zero(d, expert, row, group));
    }
}

} // namespace

extern "C" epmoe_status_t epmoei_pack_tiles_sm80(const epmoe_pack_tiles_args_t *args, epmoe_stream_t stream)
{
    epmoei_plain_tiles_args_t plain;
    EPMOEI_CHECK_ALIGNED(args->data, 16);
    if (epmoei_pack_tiles_plain(args, &plain)) {
        EPMOEI_CHECK_ALIGNED(args->weight.data, 16);
        return epmoei_plain_tiles_sm80(&plain, stream);
    }
    EPMOEI_CHECK_ALIGNED(args->scales, 16);
    EPMOEI_CHECK_ALIGNED(args->zeros, 16);
    EPMOEI_CHECK_ALIGNED(args->weight.data, 4);
    EPMOEI_CHECK_ALIGNED(args->weight.scales, 4);
    EPMOEI_CHECK_ALIGNED(args->weight.zeros, 4);
    const epmoei_quant_tiles_t tiles = epmoei_pack_tiles_layout(args);
    pack_tiles_t p = {};
    p.rows = quant_rows(&args->weight, args->num_experts, args->n, args->k);
    p.gated = args->gated;
    p.tiles = (int32_t)tiles.tiles;
    p.blocks = (int32_t)tiles.blocks;
    p.scale_bytes = epmoe_dtype_size(args->weight.scales_dtype);
    p.data = (uint32_t *)args->data;
    p.scales = args->scales;
    p.zeros = (uint8_t *)args->zeros;
    pack_tiles_kernel<<<dim3((unsigned)p.tiles, (unsigned)args->num_experts), kThreads, 0, stream>>>(p);
    return EPMOEI_LAUNCH_CHECK("epmoe_pack_tiles");
}
