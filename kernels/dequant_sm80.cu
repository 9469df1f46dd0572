#include "kernels/dequant.h"
#include "kernels/quant_rows_cuda.cuh"
#include "kernels/rows_cuda.cuh"

namespace
{

constexpr int kUnit = 4; /* columns of a thread, in the formats whose rows lie side by side */

constexpr int kThreads = 256;
constexpr int kTileRows = 64;
constexpr int kTileCols = 128;
constexpr int kTileWords = kTileRows * kTileCols / 8;
constexpr int kColsInFlight = kTileCols / 32;

/* Which group a column is in; an index outside of [0,G), which no caller may give, reads no foreign memory. */
__device__ __forceinline__ int32_t group_of(const quant_rows_t &d, int64_t expert, int32_t col)
{
    if (!d.g_idx || d.format == EPMOE_FORMAT_W4) return col / d.group;
    const int32_t group = d.g_idx[expert * d.k + col];
    return group >= 0 && group < d.groups ? group : 0;
}

__device__ __forceinline__ float e4m3_value(uint32_t code)
{
    const uint32_t magnitude = code & 0x7Fu;
    const float value = __uint_as_float(magnitude << 20) * 0x1p120f;
    return __uint_as_float((code & 0x80u) << 24 | (magnitude == 0x7Fu ? 0x7FC00000u : 0u) | __float_as_uint(value));
}

__device__ __forceinline__ float e2m1_value(uint32_t code)
{
    const uint32_t exponent = code >> 1 & 3, mantissa = code & 1;
    const float magnitude = exponent ? (float)((2 + mantissa) << exponent) * 0.25f : 0.5f * (float)mantissa;
    return code & 8 ? -magnitude : magnitude;
}

__device__ __forceinline__ float value_of(const quant_rows_t &d, uint32_t code, float scale, int32_t zero)
{
    if (d.format == EPMOE_FORMAT_FP8_BLOCK) return e4m3_value(code) * scale;
    if (d.format == EPMOE_FORMAT_MXFP4) return e2m1_value(code) * scale;
    return (float)((int32_t)code - zero) * scale;
}

/* The codes of kUnit columns, a byte each; those past the row are 0. */
__device__ __forceinline__ uint32_t load_codes(const quant_rows_t &d, int64_t row, int32_t col)
{
    const uint8_t *data = (const uint8_t *)d.data;
    if (d.format == EPMOE_FORMAT_FP8_BLOCK) {
        const uint8_t *codes = data + row * d.k + col;
        if (d.k % 4 == 0) return *(const uint32_t *)codes;
        uint32_t word = 0;
        for (int i = 0; i < min(kUnit, d.k - col); i++) word |= (uint32_t)codes[i] << (8 * i);
        return word;
    }
    const int64_t row_bytes = d.format == EPMOE_FORMAT_MXFP4 ? d.k / 2 : (d.k + 7) / 8 * 4;
    const uint32_t nibbles = *(const uint16_t *)(data + row * row_bytes + col / 2);
    const uint32_t pairs = (nibbles | nibbles << 8) & 0x00FF00FFu;
    return (pairs | pairs << 4) & 0x0F0F0F0Fu;
}

__device__ __forceinline__ float load_plain(const quant_rows_t &d, int64_t i)
{
    switch (d.format) {
    case EPMOE_FORMAT_BF16: return __bfloat162float(((const __nv_bfloat16 *)d.data)[i]);
    case EPMOE_FORMAT_F16: return __half2float(((const __half *)d.data)[i]);
    default: return ((const float *)d.data)[i];
    }
}

/* ------------------------------------------------------------------------------------------------------- kernels */

/* Formats whose columns lie side by side: the plain ones, FP8_BLOCK, CT_W4, MXFP4, W4. */
__global__ void __launch_bounds__(256) dequant_rows_kernel(const quant_rows_t d, float *w)
{
    const int64_t first = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * kUnit;
    if (first >= d.k) return;
    const int32_t col = (int32_t)first, count = min(kUnit, d.k - col);
    const bool plain = d.format <= EPMOE_FORMAT_F16;
    const bool one_group = !plain && d.group % kUnit == 0 && (!d.g_idx || d.format == EPMOE_FORMAT_W4);
    const bool ordered = !plain && d.g_idx && d.format == EPMOE_FORMAT_W4;
    for (int64_t r = blockIdx.y; r < d.rows; r += gridDim.y) {
        const int64_t expert = r / d.n;
        const int32_t row = (int32_t)(r - expert * d.n);
        float value[kUnit];
        if (plain) {
            for (int i = 0; i < count; i++) value[i] = load_plain(d, r * d.k + col + i);
        } else {
            const uint32_t codes = load_codes(d, r, col);
            float scale = 0.0f;
            int32_t zero = 0;
#pragma unroll
            for (int i = 0; i < kUnit; i++) {
                if (i == 0 || (!one_group && i < count)) {
                    const int32_t group = group_of(d, expert, col + i);
                    scale = quant_rows_scale(d, quant_rows_scale_at(d, expert, row, group));
                    zero = quant_rows_zero(d, expert, row, group);
                }
                value[i] = value_of(d, codes >> (8 * i) & 255, scale, zero);
            }
        }
        float *to = w + r * d.k;
        if (ordered) {
            for (int i = 0; i < count; i++) {
                const int32_t at = d.g_idx[expert * d.k + col + i];
                if (at >= 0 && at < d.k) to[at] = value[i];
            }
        } else if (d.k % kUnit == 0) {
            *(float4 *)(to + col) = make_float4(value[0], value[1], value[2], value[3]);
        } else {
            for (int i = 0; i < count; i++) to[col + i] = value[i];
        }
    }
}

/* GPTQ and AWQ, in which neighbouring rows are neighbours: tiles go through shared memory. */
__global__ void __launch_bounds__(kThreads) quant_rows_tiles_kernel(const quant_rows_t d, float *w)
{
    /* GPTQ: [words of eight columns][rows]; AWQ: [columns][words of eight rows]. A word more a line, against bank
     * conflicts. */
    __shared__ uint32_t words[kTileWords + kTileCols];
    const bool gptq = d.format == EPMOE_FORMAT_GPTQ;
    const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int32_t row_tiles = (d.n + kTileRows - 1) / kTileRows, col_tiles = (d.k + kTileCols - 1) / kTileCols;
    const int32_t stored_cols = gptq ? d.n : (d.n + 7) / 8, stored_rows = gptq ? (d.k + 7) / 8 : d.k;
    const int32_t line = gptq ? kTileRows : kTileRows / 8, lines = kTileWords / line;
    const int64_t tiles = d.rows / d.n * row_tiles * col_tiles;
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int64_t expert = tile / ((int64_t)row_tiles * col_tiles);
        const int64_t local = tile - expert * row_tiles * col_tiles;
        const int32_t row0 = (int32_t)(local / col_tiles) * kTileRows, col0 = (int32_t)(local % col_tiles) * kTileCols;
        const uint32_t *data = (const uint32_t *)d.data + expert * stored_rows * stored_cols;
        const int32_t from_row = gptq ? col0 / 8 : col0, from_col = gptq ? row0 : row0 / 8;
        __syncthreads();
        for (int32_t i = (int32_t)threadIdx.x; i < kTileWords; i += kThreads) {
            const int32_t r = i / line, c = i % line;
            if (r < lines && from_row + r < stored_rows && from_col + c < stored_cols)
                words[r * (line + 1) + c] = data[(int64_t)(from_row + r) * stored_cols + from_col + c];
        }
        __syncthreads();
        int32_t group[kColsInFlight];
#pragma unroll
        for (int i = 0; i < kColsInFlight; i++) {
            const int32_t col = col0 + lane + 32 * i;
            group[i] = col < d.k ? group_of(d, expert, col) : 0;
        }
        for (int32_t r = warp; r < kTileRows && row0 + r < d.n; r += kThreads / 32) {
            const int32_t row = row0 + r;
            float *to = w + (expert * d.n + row) * d.k;
#pragma unroll
            for (int i = 0; i < kColsInFlight; i++) {
                const int32_t c = lane + 32 * i, col = col0 + c;
                if (col >= d.k) continue;
                const uint32_t word = gptq ? words[c / 8 * (line + 1) + r] : words[c * (line + 1) + r / 8];
                const uint32_t code = word >> (gptq ? 4 * (c & 7) : quant_awq_shift(r)) & 15;
                to[col] = value_of(d, code, quant_rows_scale(d, quant_rows_scale_at(d, expert, row, group[i])),
                                   quant_rows_zero(d, expert, row, group[i]));
            }
        }
    }
}

} // namespace

extern "C" epmoe_status_t epmoei_dequant_sm80(const epmoe_dequant_args_t *args, epmoe_stream_t stream)
{
    const epmoe_weight_t *weight = &args->weight;
    EPMOEI_CHECK_ALIGNED(args->w, 16);
    EPMOEI_CHECK_ALIGNED(args->weight.data, 16);
    EPMOEI_CHECK_ALIGNED(args->weight.scales, 4);
    EPMOEI_CHECK_ALIGNED(args->weight.zeros, 4);
    EPMOEI_CHECK_ALIGNED(args->weight.g_idx, 4);
    const quant_rows_t d = quant_rows(weight, args->num_experts, args->n, args->k);
    if (weight->format == EPMOE_FORMAT_GPTQ || weight->format == EPMOE_FORMAT_AWQ) {
        const int64_t tiles =
            args->num_experts * epmoei_ceil_div(args->n, kTileRows) * epmoei_ceil_div(args->k, kTileCols);
        const int64_t blocks = epmoei_min64(tiles, (int64_t)epmoei_device_current()->num_sms * 8);
        quant_rows_tiles_kernel<<<(unsigned)blocks, kThreads, 0, stream>>>(d, args->w);
    } else {
        const epmoei_row_grid_t grid = epmoei_row_grid(d.rows, epmoei_ceil_div(args->k, kUnit));
        dequant_rows_kernel<<<grid.blocks, grid.threads, 0, stream>>>(d, args->w);
    }
    return EPMOEI_LAUNCH_CHECK("epmoe_dequant");
}
