/* Grouped GEMM on mma.sync and cp.async: every device from Ampere on. Many rows per expert are the wide kernel's
 * (kernels/grouped_gemm_wide_sm80.cu) where it fits: not on devices with 99 KB of shared memory a block, nor where its
 * offsets of 32 bits are too short. Those take the tiles of 64 and 128 rows here.
 *
 * A persistent block walks a tile list that it derives from expert_offsets itself, so that the host needs no counts.
 * Rows of x are gathered by the row index while they are copied to shared memory; gate and up columns lie side by side,
 * whatever their order in w. The accumulators of a tile go to shared memory, where the epilogue walks along the rows of
 * y. Each output's sum runs over K in steps of 16 whatever the tile height: results do not depend on the tile choice or
 * on other rows. */
#include "kernels/grouped_gemm_cuda.cuh"
#include "kernels/grouped_gemm_tile.h"
#include "kernels/grouped_gemm_wide_sm80.h"
#include "kernels/launch_cuda.cuh"
#include "kernels/plain_tiles.h"
#include "kernels/ptx.cuh"

namespace
{

constexpr int kThreads = 128;
constexpr int kBlockN = 128;
constexpr int kBlockK = 64;              /* 128 bytes: one row of the swizzle */
constexpr int kChunks = kBlockK / 8;     /* 16-byte chunks of a row */
constexpr int kStagingRow = kBlockN + 4; /* floats; the padding avoids bank conflicts */

template <int kBlockM_, int kWarpsM_, int kWarpsN_, int kStages_> struct tile_shape {
    static constexpr int kBlockM = kBlockM_, kWarpsM = kWarpsM_, kWarpsN = kWarpsN_, kStages = kStages_;
    static constexpr int kStageBytes = (kBlockM + kBlockN) * kBlockK * 2;
    /* The pipeline's memory holds the accumulators at the end. */
    static constexpr int kStagingBytes = kBlockM * kStagingRow * 4;
    static constexpr int kBufferBytes = kStages * kStageBytes > kStagingBytes ? kStages *kStageBytes : kStagingBytes;
};
using tile_16 = tile_shape<16, 1, 4, 4>;
using tile_32 = tile_shape<32, 1, 4, 4>;
using tile_64 = tile_shape<64, 2, 2, 3>;
using tile_128 = tile_shape<128, 2, 2, 3>;

/* Byte offset of 16-byte chunk `chunk` of row `row` in a swizzled tile of 128-byte rows. */
__device__ __forceinline__ uint32_t swizzle(int row, int chunk)
{
    return (uint32_t)(row * 128 + ((chunk ^ (row & 7)) << 4));
}

template <typename T, typename Tile>
__global__ void __launch_bounds__(kThreads, 2) grouped_gemm_kernel(const gemm_params_t p)
{
    constexpr int kBlockM = Tile::kBlockM, kStages = Tile::kStages;
    constexpr int kWarpM = kBlockM / Tile::kWarpsM, kWarpN = kBlockN / Tile::kWarpsN;
    constexpr int kFragsM = kWarpM / 16, kFragsN = kWarpN / 8;
    constexpr int kCopiesA = kBlockM * kChunks / kThreads, kCopiesB = kBlockN * kChunks / kThreads;
    constexpr int kRowsPerCopy = kThreads / kChunks; /* 16 */

    extern __shared__ __align__(128) char shared[];
    __shared__ int32_t slots[kBlockM]; /* -1 = no row */
    __shared__ int32_t x_rows[kBlockM];
    __shared__ int32_t warp_sums[kThreads / 32];
    int32_t *cumulative = (int32_t *)(shared + Tile::kBufferBytes);

    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const int warp_m = warp / Tile::kWarpsN * kWarpM, warp_n = warp % Tile::kWarpsN * kWarpN;
    const int copy_row = tid / kChunks, copy_chunk = tid % kChunks;

    const int32_t col_tiles = (p.n + kBlockN - 1) / kBlockN;
    const int64_t tiles = (int64_t)gemm_count_tiles<kThreads>(p, kBlockM, cumulative, warp_sums) * col_tiles;
    const int k_steps = (p.k + kBlockK - 1) / kBlockK;

    for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
        const gemm_tile_t tile = gemm_find_tile(p, cumulative, index, col_tiles, kBlockM, kBlockN);

        /* Also the barrier after which the previous tile's staging and slots are free. */
        __syncthreads();
        gemm_find_rows<kBlockM, kThreads>(p, tile, slots, x_rows);
        __syncthreads();

        /* A thread copies every 16th row of both tiles: rows of x through the index, rows of w at a fixed step. */
        uint32_t a_valid = 0, b_valid = 0;
#pragma unroll
        for (int i = 0; i < kCopiesA; i++)
            if (slots[copy_row + i * kRowsPerCopy] >= 0) a_valid |= 1u << i;
#pragma unroll
        for (int i = 0; i < kCopiesB; i++)
            if (tile.col + copy_row + i * kRowsPerCopy < p.n) b_valid |= 1u << i;
        const T *x = (const T *)p.x;
        const T *w = (const T *)p.w + ((int64_t)tile.expert * p.n + gemm_weight_row(p, tile.col + copy_row)) * p.k;
        const int64_t w_step = (int64_t)(p.interleaved ? kRowsPerCopy : kRowsPerCopy / 2) * p.k;

        auto copy_stage = [&](int step) {
            uint32_t stage = ptx_shared_address(shared) + (uint32_t)(step % kStages * Tile::kStageBytes);
            int32_t k = step * kBlockK + copy_chunk * 8;
            bool k_valid = k < p.k;
            int32_t k_read = k_valid ? k : 0;
#pragma unroll
            for (int i = 0; i < kCopiesA; i++)
                ptx_cp_async_16(stage + swizzle(copy_row + i * kRowsPerCopy, copy_chunk),
                                x + (int64_t)x_rows[copy_row + i * kRowsPerCopy] * p.k + k_read,
                                k_valid && (a_valid >> i & 1) ? 16 : 0);
            stage += kBlockM * 128;
#pragma unroll
            for (int i = 0; i < kCopiesB; i++)
                ptx_cp_async_16(stage + swizzle(copy_row + i * kRowsPerCopy, copy_chunk),
                                b_valid >> i & 1 ? w + i * w_step + k_read : (const T *)p.w,
                                k_valid && (b_valid >> i & 1) ? 16 : 0);
        };

        float acc[kFragsM][kFragsN][4];
#pragma unroll
        for (int i = 0; i < kFragsM; i++)
#pragma unroll
            for (int j = 0; j < kFragsN; j++)
#pragma unroll
                for (int c = 0; c < 4; c++) acc[i][j][c] = 0.0f;

#pragma unroll
        for (int s = 0; s < kStages - 1; s++) {
            if (s < k_steps) copy_stage(s);
            ptx_cp_async_commit();
        }
        const bool warp_has_rows = warp_m < tile.rows;
        for (int step = 0; step < k_steps; step++) {
            ptx_cp_async_wait<kStages - 2>();
            __syncthreads();
            if (step + kStages - 1 < k_steps) copy_stage(step + kStages - 1);
            ptx_cp_async_commit();
            if (!warp_has_rows) continue;
            uint32_t a_tile = ptx_shared_address(shared) + (uint32_t)(step % kStages * Tile::kStageBytes);
            uint32_t b_tile = a_tile + kBlockM * 128;
#pragma unroll
            for (int kk = 0; kk < kBlockK / 16; kk++) {
                uint32_t a[kFragsM][4], b[kFragsN / 2][4];
#pragma unroll
                for (int i = 0; i < kFragsM; i++)
                    ptx_ldmatrix_x4(a[i], a_tile + swizzle(warp_m + i * 16 + (lane & 15), kk * 2 + (lane >> 4)));
#pragma unroll
                for (int j = 0; j < kFragsN / 2; j++)
                    ptx_ldmatrix_x4(b[j], b_tile + swizzle(warp_n + j * 16 + (lane & 7) + ((lane >> 4) << 3),
                                                           kk * 2 + ((lane >> 3) & 1)));
#pragma unroll
                for (int i = 0; i < kFragsM; i++)
#pragma unroll
                    for (int j = 0; j < kFragsN; j++)
                        ptx_mma_16816(acc[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1], T());
            }
        }
        ptx_cp_async_wait<0>();
        __syncthreads(); /* the pipeline's memory becomes the staging area */

        float *staging = (float *)shared;
#pragma unroll
        for (int i = 0; i < kFragsM; i++)
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int j = 0; j < kFragsN; j++)
                    *(float2 *)(staging + (warp_m + i * 16 + lane / 4 + half * 8) * kStagingRow + warp_n + j * 8 +
                                lane % 4 * 2) = make_float2(acc[i][j][half * 2], acc[i][j][half * 2 + 1]);
        __syncthreads();
        gemm_store_tile<kThreads>(p, tile, staging, kStagingRow, kBlockN, slots);
    }
}

template <typename T, typename Tile>
epmoe_status_t launch(const epmoe_grouped_gemm_args_t *args, const epmoei_device_info_t *device, epmoe_stream_t stream)
{
    const int bytes = Tile::kBufferBytes + (args->num_experts + 1) * 4;
    EPMOEI_CHECK(epmoei_allow_shared(grouped_gemm_kernel<T, Tile>, (size_t)bytes, "grouped_gemm_sm80"));
    int blocks_per_sm = 0;
    EPMOEI_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_per_sm, grouped_gemm_kernel<T, Tile>, kThreads,
                                                              (size_t)bytes));
    if (blocks_per_sm < 1)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "num_experts is %d: %d bytes of shared memory do not fit",
                           args->num_experts, bytes);
    int64_t tiles = gemm_max_row_tiles(args, Tile::kBlockM) * epmoei_ceil_div(args->n, kBlockN);
    int64_t blocks = epmoei_min64(tiles, (int64_t)device->num_sms * blocks_per_sm);
    grouped_gemm_kernel<T, Tile><<<(unsigned)blocks, kThreads, bytes, stream>>>(gemm_params(args));
    return EPMOEI_LAUNCH_CHECK("grouped_gemm_sm80");
}

template <typename T>
epmoe_status_t launch_tile(const epmoe_grouped_gemm_args_t *args, const epmoei_device_info_t *device,
                           epmoe_stream_t stream)
{
    switch (epmoei_grouped_gemm_tile_sm80(args->num_experts, args->max_rows)) {
    case 16: return launch<T, tile_16>(args, device, stream);
    case 32: return launch<T, tile_32>(args, device, stream);
    default:
        if (epmoei_grouped_gemm_wide_fits_sm80(args, device)) return epmoei_grouped_gemm_wide_sm80(args, stream);
        /* Devices with 99 KB of shared memory a block hold the list of few experts only beside the tallest tile. */
        if (args->max_rows <= 64 * (int64_t)args->num_experts ||
            tile_128::kBufferBytes + (args->num_experts + 1) * 4 + 2048 > device->shared_bytes_per_block)
            return launch<T, tile_64>(args, device, stream);
        return launch<T, tile_128>(args, device, stream);
    }
}

} // namespace

extern "C" int64_t epmoei_grouped_gemm_workspace_sm80(const epmoe_grouped_gemm_args_t *) { return 0; }

extern "C" epmoe_status_t epmoei_grouped_gemm_check_cuda(const epmoe_grouped_gemm_args_t *args)
{
    if (epmoei_format_of_dtype(args->x_dtype) != args->weight.format || args->x_dtype == EPMOE_F32)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED,
                           "x_dtype is %s and weight.format is %s: on CUDA both must be bf16, "
                           "or both fp16",
                           epmoe_dtype_string(args->x_dtype), epmoe_format_string(args->weight.format));
    if (args->k % 8)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "k is %d: on CUDA it must be a multiple of 8", args->k);
    EPMOEI_CHECK(epmoei_plain_tiles_check(&args->weight, "weight", args->n, args->k,
                                          args->activation < EPMOE_ACTIVATION_NONE, args->layout));
    EPMOEI_CHECK_ALIGNED(args->x, 16);
    EPMOEI_CHECK_ALIGNED(args->weight.data, 16);
    EPMOEI_CHECK_ALIGNED(args->y, 16);
    return EPMOE_OK;
}

extern "C" epmoe_status_t epmoei_grouped_gemm_sm80(const epmoe_grouped_gemm_args_t *args, epmoe_stream_t stream)
{
    EPMOEI_CHECK(epmoei_grouped_gemm_check_cuda(args));
    if (args->weight.storage == EPMOE_STORAGE_TILES)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED,
                           "weight.storage is EPMOE_STORAGE_TILES and weight.format %s: expected rows on this tier",
                           epmoe_format_string(args->weight.format));
    const epmoei_device_info_t *device = epmoei_device_current();
    return args->x_dtype == EPMOE_BF16 ? launch_tile<__nv_bfloat16>(args, device, stream)
                                       : launch_tile<__half>(args, device, stream);
}
