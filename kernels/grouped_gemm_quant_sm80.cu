/* Grouped GEMM on quantised weights with mma.sync and cp.async: every device from Ampere on.
 *
 * Weights are operand A, 128 device rows (kernels/grouped_gemm_quant.h) of a block's four warps; tokens are operand B,
 * so that few of them waste little. Each 16 rows are two fragments' accumulators in one thread: gate and up of the same
 * output, when gated. A warp turns the codes of its rows into bf16 or fp16 in registers, without their scales, and
 * multiplies a group of columns into accumulators of its own; those times the group's scale, fp32, add to the sum. What
 * rows share is the tokens' tile in shared memory; codes pass through it for the pipeline's sake, each read by one
 * warp.
 *
 * The sum over K goes in steps of 16 columns and in groups whatever the tile: results do not depend on the tile choice
 * or on other rows. */
#include "kernels/grouped_gemm_quant_cuda.cuh"
#include "kernels/grouped_gemm_tile.h"
#include "kernels/launch_cuda.cuh"
#include "kernels/ptx.cuh"

namespace
{

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kBlockN = 128; /* device rows */
constexpr int kFrags = 2;    /* of 16 rows, a warp's: part `warp` of either tile of 64 */
constexpr int kBlockK = EPMOEI_TILE_COLS;
constexpr int kSteps = kBlockK / 16;
constexpr int kStagingRow = kBlockN + 4; /* floats; the padding avoids bank conflicts */
constexpr uint32_t kAll = 0xFFFFFFFFu;
static_assert(kBlockN == 2 * EPMOEI_TILE_ROWS && kWarps * 16 == EPMOEI_TILE_ROWS, "a warp has a part of either tile");

/* What a stage of the pipeline holds, in bytes: x, codes, scales, zeros. */
template <epmoe_format_t kFormat, int kTokens_> struct shape {
    static constexpr int kTokens = kTokens_;
    static constexpr bool kTiled = kFormat != EPMOE_FORMAT_FP8_BLOCK;
    static constexpr int kX = kTokens * kBlockK * 2;
    static constexpr int kCodes = kTiled ? 2 * EPMOEI_TILE_BYTES : kBlockN * kBlockK;
    static constexpr int kScales = kFormat == EPMOE_FORMAT_W4 ? 4 * kBlockN * 4 : kTiled ? 2 * kBlockN : 0;
    static constexpr int kZeros = kFormat == EPMOE_FORMAT_W4 ? 4 * kBlockN : 0;
    static constexpr int kStage = kX + kCodes + kScales + kZeros;
    static constexpr int kStages = kTokens > 32 ? (kTiled ? 4 : 3) : kTiled ? 6 : 5;
    static constexpr int kStaging = kTokens * kStagingRow * 4;
    static constexpr int kBuffer = kStages * kStage > kStaging ? kStages *kStage : kStaging;
    static constexpr int kBlocks = kTokens > 32 ? 2 : 3; /* of an SM */
};

/* ------------------------------------------------------------------------------------------------ device helpers */

/* Byte offset of 16-byte chunk `chunk` of row `row` of x: no two of eight rows' chunks share banks, nor the pairs of
 * neighbouring chunks of rows 0..3 or 4..7. */
__device__ __forceinline__ uint32_t swizzle_x(int row, int chunk)
{
    return (uint32_t)(row * 128 + ((chunk ^ ((row & 3) << 1 | (row >> 2 & 1))) << 4));
}

/* The same in a tile of 64-byte rows of FP8. */
__device__ __forceinline__ uint32_t swizzle_fp8(int row, int chunk)
{
    return (uint32_t)(row * 64 + ((chunk ^ (row >> 1 & 3)) << 4));
}

/* -------------------------------------------------------------------------------------------------------- kernel */

/* What a block copies of one tile: where a thread's share of each begins. */
template <typename T> struct sources_t {
    const T *x;
    const char *codes;
    int64_t codes_step; /* bytes from one of a thread's chunks of codes to the next */
    uint32_t codes_valid;
    const char *scales; /* of the first of the two tiles of 64 rows */
    const uint8_t *zeros;
    int32_t tiles; /* 1 or 2: how many there are */
};

template <typename T, epmoe_format_t kFormat, int kTokens>
__device__ __forceinline__ sources_t<T> find_sources(const quant_params_t &p, const gemm_tile_t &tile)
{
    using Shape = shape<kFormat, kTokens>;
    const gemm_params_t &gemm = p.gemm;
    const int tid = threadIdx.x;
    sources_t<T> from = {};
    from.x = (const T *)gemm.x;
    if (Shape::kTiled) {
        const int64_t first = (int64_t)tile.expert * p.tiles + tile.col / EPMOEI_TILE_ROWS;
        const int64_t blocks = (gemm.k + kBlockK - 1) / kBlockK;
        from.codes = (const char *)gemm.w + first * blocks * EPMOEI_TILE_BYTES + tid * 16;
        from.codes_step = blocks * EPMOEI_TILE_BYTES;
        from.tiles = min(2, p.tiles - tile.col / EPMOEI_TILE_ROWS);
        from.codes_valid = (1u << from.tiles) - 1;
        from.scales = (const char *)p.scales + first * p.groups * EPMOEI_TILE_ROWS * p.scale_bytes;
        from.zeros = p.zeros ? p.zeros + first * p.groups * EPMOEI_TILE_ROWS : nullptr;
    } else {
        const int32_t row = tile.col + tid / 4;
        const int32_t step = gemm.gated && !gemm.interleaved ? 16 : 32;
        from.codes =
            (const char *)gemm.w + ((int64_t)tile.expert * gemm.n + quant_fp8_row(gemm, row)) * gemm.k + tid % 4 * 16;
        from.codes_step = (int64_t)step * gemm.k;
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (quant_fp8_row(gemm, row + 32 * i) < gemm.n) from.codes_valid |= 1u << i;
    }
    return from;
}

/* 16-byte chunks of scales or zeros: `bytes` a row and group; from `valid` groups on zeros are written. */
__device__ __forceinline__ void copy_groups(uint32_t shared, const char *from, int64_t tile_bytes, int32_t tiles,
                                            int32_t group_bytes, int32_t in_block, int32_t valid)
{
    const int32_t chunks = in_block * group_bytes / 16;
    const int32_t i = (int32_t)threadIdx.x, tile = i / chunks, chunk = i - tile * chunks;
    if (tile >= 2) return;
    const bool there = tile < tiles && chunk * 16 < valid * group_bytes;
    ptx_cp_async_16(shared + (uint32_t)i * 16, there ? from + tile * tile_bytes + chunk * 16 : from, there ? 16 : 0);
}

template <typename T, epmoe_format_t kFormat, int kTokens>
__device__ __forceinline__ void copy_stage(const quant_params_t &p, const sources_t<T> &from, uint32_t stage, int step,
                                           const int32_t *slots, const int32_t *x_rows)
{
    using Shape = shape<kFormat, kTokens>;
    const gemm_params_t &gemm = p.gemm;
    const int tid = threadIdx.x, chunk = tid % 8;
    const int32_t k = step * kBlockK + chunk * 8;
    const bool k_valid = k < gemm.k;
#pragma unroll
    for (int i = 0; i < kTokens / 16; i++) {
        const int row = tid / 8 + 16 * i;
        const bool valid = k_valid && slots[row] >= 0;
        ptx_cp_async_16(stage + swizzle_x(row, chunk), from.x + (valid ? (int64_t)x_rows[row] * gemm.k + k : 0),
                        valid ? 16 : 0);
    }
    stage += Shape::kX;
    if (Shape::kTiled) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const bool valid = from.codes_valid >> i & 1;
            ptx_cp_async_16(stage + tid * 16 + i * EPMOEI_TILE_BYTES,
                            from.codes + (valid ? i * from.codes_step : 0) + (int64_t)step * EPMOEI_TILE_BYTES,
                            valid ? 16 : 0);
        }
        stage += Shape::kCodes;
        const int32_t in_block = kSteps >> p.group_shift, group_bytes = EPMOEI_TILE_ROWS * p.scale_bytes;
        const int32_t first = in_block > 1 ? step * in_block : step * kBlockK / p.group;
        copy_groups(stage, from.scales + (int64_t)first * group_bytes, (int64_t)p.groups * group_bytes, from.tiles,
                    group_bytes, in_block, p.groups - first);
        if (Shape::kZeros && from.zeros)
            copy_groups(stage + Shape::kScales, (const char *)from.zeros + (int64_t)first * EPMOEI_TILE_ROWS,
                        (int64_t)p.groups * EPMOEI_TILE_ROWS, from.tiles, EPMOEI_TILE_ROWS, in_block, p.groups - first);
    } else {
        const bool code_valid = step * kBlockK + tid % 4 * 16 < gemm.k;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const bool valid = code_valid && (from.codes_valid >> i & 1);
            ptx_cp_async_16(stage + swizzle_fp8(tid / 4 + 32 * i, tid % 4),
                            valid ? from.codes + i * from.codes_step + step * kBlockK : (const char *)gemm.w,
                            valid ? 16 : 0);
        }
    }
}

template <typename T, epmoe_format_t kFormat, int kTokens>
__global__ void __launch_bounds__(kThreads, shape<kFormat, kTokens>::kBlocks)
    grouped_gemm_quant_kernel(const quant_params_t p)
{
    using Shape = shape<kFormat, kTokens>;
    constexpr int kStages = Shape::kStages, kFragsN = kTokens / 8;
    constexpr bool kFp8 = !Shape::kTiled, kW4 = kFormat == EPMOE_FORMAT_W4;

    extern __shared__ __align__(128) char shared[];
    __shared__ int32_t slots[kTokens]; /* -1 = no row */
    __shared__ int32_t x_rows[kTokens];
    __shared__ int32_t warp_sums[kWarps];
    int32_t *cumulative = (int32_t *)(shared + Shape::kBuffer);

    const gemm_params_t &gemm = p.gemm;
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const int32_t col_tiles = ((gemm.gated ? 2 * gemm.n_out : gemm.n) + kBlockN - 1) / kBlockN;
    const int64_t tiles = (int64_t)gemm_count_tiles<kThreads>(gemm, kTokens, cumulative, warp_sums) * col_tiles;
    const int k_steps = (gemm.k + kBlockK - 1) / kBlockK;

    for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
        const gemm_tile_t tile = gemm_find_tile(gemm, cumulative, index, col_tiles, kTokens, kBlockN);

        /* Also the barrier after which the previous tile's staging and slots are free. */
        __syncthreads();
        gemm_find_rows<kTokens, kThreads>(gemm, tile, slots, x_rows);
        __syncthreads();

        const sources_t<T> from = find_sources<T, kFormat, kTokens>(p, tile);
#pragma unroll
        for (int s = 0; s < kStages - 1; s++) {
            if (s < k_steps)
                copy_stage<T, kFormat, kTokens>(p, from, ptx_shared_address(shared) + s * Shape::kStage, s, slots,
                                                x_rows);
            ptx_cp_async_commit();
        }

        float acc[kFrags][kFragsN][4], part[kFrags][kFragsN][4];
#pragma unroll
        for (int f = 0; f < kFrags; f++)
#pragma unroll
            for (int j = 0; j < kFragsN; j++)
#pragma unroll
                for (int c = 0; c < 4; c++) acc[f][j][c] = part[f][j][c] = 0.0f;

        int64_t scale_rows[kFrags][2];  /* FP8 */
        float scales[kFrags][2];        /* FP8: of the group in hand */
        uint32_t nan[kFrags][2] = {};   /* FP8: whether a row has one */
        uint32_t zeros[kFrags][2] = {}; /* W4: of the group in hand */
        if (kFp8)
#pragma unroll
            for (int f = 0; f < kFrags; f++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    scale_rows[f][h] = quant_fp8_scales(p, tile.expert,
                                                        tile.col + f * EPMOEI_TILE_ROWS + warp * 16 + h * 8 + lane / 4);
                    scales[f][h] = quant_load_scale(p, scale_rows[f][h]);
                }
        if (kW4)
#pragma unroll
            for (int f = 0; f < kFrags; f++) zeros[f][0] = zeros[f][1] = quant_w4_zero<T>(8);

        int32_t left = p.group_steps, group = 0;
        for (int step = 0; step < k_steps; step++) {
            ptx_cp_async_wait<kStages - 2>();
            __syncthreads();
            const int ahead = step + kStages - 1;
            if (ahead < k_steps)
                copy_stage<T, kFormat, kTokens>(
                    p, from, ptx_shared_address(shared) + (uint32_t)(ahead % kStages * Shape::kStage), ahead, slots,
                    x_rows);
            ptx_cp_async_commit();

            const char *stage = shared + step % kStages * Shape::kStage;
            const uint32_t x_tile = ptx_shared_address(stage), code_tile = x_tile + Shape::kX;
            const char *group_scales = stage + Shape::kX + Shape::kCodes;
            uint4 words[kFrags];
            if (Shape::kTiled)
#pragma unroll
                for (int f = 0; f < kFrags; f++)
                    words[f] = *(const uint4 *)(stage + Shape::kX + f * EPMOEI_TILE_BYTES + tid * 16);
#pragma unroll
            for (int s = 0; s < kSteps; s++) {
                const int in_block = s >> p.group_shift;
                if (kW4 && p.zeros && left == p.group_steps)
#pragma unroll
                    for (int f = 0; f < kFrags; f++) {
                        const uint16_t *pairs =
                            (const uint16_t *)(group_scales + Shape::kScales +
                                               (f * (kSteps >> p.group_shift) + in_block) * EPMOEI_TILE_ROWS);
                        const uint32_t pair = pairs[warp * 8 + lane / 4];
                        zeros[f][0] = quant_w4_zero<T>(pair & 255);
                        zeros[f][1] = quant_w4_zero<T>(pair >> 8);
                    }

                uint32_t b[kFragsN][2];
                if (kFp8) {
                    /* Columns 4 (lane%4) to + 3 stand where operands want 2 (lane%4), + 1, + 8 and + 9, in A and in B:
                     * a word of codes is one thread's. */
#pragma unroll
                    for (int j = 0; j < kFragsN; j++) {
                        const int row = j * 8 + lane / 4, quad = lane % 4;
                        const uint2 pair = *(const uint2 *)(stage + swizzle_x(row, 2 * s + quad / 2) + quad % 2 * 8);
                        b[j][0] = pair.x;
                        b[j][1] = pair.y;
                    }
                } else {
#pragma unroll
                    for (int j = 0; j < kFragsN; j += 2) {
                        uint32_t r[4];
                        ptx_ldmatrix_x4(
                            r, x_tile + swizzle_x(j * 8 + (lane & 7) + (lane >> 4 << 3), 2 * s + (lane >> 3 & 1)));
                        b[j][0] = r[0], b[j][1] = r[1], b[j + 1][0] = r[2], b[j + 1][1] = r[3];
                    }
                }
#pragma unroll
                for (int f = 0; f < kFrags; f++) {
                    uint32_t a[4];
                    if (kFp8) {
                        /* Lanes 0-15 give the rows' addresses, the others repeat them. */
                        uint32_t codes[2];
                        ptx_ldmatrix_x2(codes,
                                        code_tile + swizzle_fp8(f * EPMOEI_TILE_ROWS + warp * 16 + (lane & 15), s));
#pragma unroll
                        for (int h = 0; h < 2; h++) {
                            uint32_t pairs[2];
                            quant_e4m3_pairs<T>(pairs, __byte_perm(codes[h], 0, 0x3120));
                            a[h] = pairs[0];
                            a[h + 2] = pairs[1];
                            nan[f][h] |= quant_e4m3_nan(codes[h]);
                        }
                    } else if (kW4)
                        quant_w4_fragment<T>(a, quant_word_of(words[f], s), zeros[f]);
                    else
                        quant_mxfp4_fragment<T>(a, quant_word_of(words[f], s));
#pragma unroll
                    for (int j = 0; j < kFragsN; j++) ptx_mma_16816(part[f][j], a, b[j][0], b[j][1], T());
                }

                const bool last = s == kSteps - 1 && step == k_steps - 1;
                if (--left > 0 && !last) continue;
                left = p.group_steps;
                group++;
#pragma unroll
                for (int f = 0; f < kFrags; f++) {
                    float2 scale;
                    if (kFp8) {
                        scale = make_float2(scales[f][0], scales[f][1]);
#pragma unroll
                        for (int h = 0; h < 2; h++)
                            if (group < p.groups) scales[f][h] = quant_load_scale(p, scale_rows[f][h] + group);
                    } else
                        scale = quant_scale_pair(p,
                                                 group_scales + (f * (kSteps >> p.group_shift) + in_block) *
                                                                    EPMOEI_TILE_ROWS * p.scale_bytes,
                                                 warp * 8 + lane / 4);
#pragma unroll
                    for (int j = 0; j < kFragsN; j++)
#pragma unroll
                        for (int c = 0; c < 4; c++) {
                            acc[f][j][c] = fmaf(c < 2 ? scale.x : scale.y, part[f][j][c], acc[f][j][c]);
                            part[f][j][c] = 0.0f;
                        }
                }
            }
        }
        if (kFp8)
#pragma unroll
            for (int f = 0; f < kFrags; f++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    nan[f][h] |= __shfl_xor_sync(kAll, nan[f][h], 1);
                    nan[f][h] |= __shfl_xor_sync(kAll, nan[f][h], 2);
                    if (nan[f][h])
#pragma unroll
                        for (int j = 0; j < kFragsN; j++)
                            acc[f][j][2 * h] = acc[f][j][2 * h + 1] = __uint_as_float(0x7FC00000u);
                }
        ptx_cp_async_wait<0>();
        __syncthreads(); /* the pipeline's memory becomes the staging area */

        /* [token][column of the product], gate and up side by side. */
        float *staging = (float *)shared;
#pragma unroll
        for (int f = 0; f < kFrags; f++) {
            const int row = f * EPMOEI_TILE_ROWS + warp * 16, i = lane / 4;
#pragma unroll
            for (int j = 0; j < kFragsN; j++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    float *to = staging + (j * 8 + lane % 4 * 2 + c) * kStagingRow + row;
                    if (gemm.gated)
                        *(float2 *)(to + 2 * i) = make_float2(acc[f][j][c], acc[f][j][2 + c]);
                    else {
                        to[i] = acc[f][j][c];
                        to[i + 8] = acc[f][j][2 + c];
                    }
                }
        }
        __syncthreads();
        gemm_store_tile<kThreads>(gemm, tile, staging, kStagingRow, kBlockN, slots);
    }
}

/* -------------------------------------------------------------------------------------------------------- launch */

template <typename T, epmoe_format_t kFormat, int kTokens>
epmoe_status_t launch(const epmoe_grouped_gemm_args_t *args, epmoe_stream_t stream)
{
    auto *kernel = grouped_gemm_quant_kernel<T, kFormat, kTokens>;
    const int bytes = shape<kFormat, kTokens>::kBuffer + (args->num_experts + 1) * 4;
    EPMOEI_CHECK(epmoei_allow_shared(kernel, (size_t)bytes, "grouped_gemm_quant_sm80"));
    int blocks_per_sm = 0;
    EPMOEI_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_per_sm, kernel, kThreads, (size_t)bytes));
    if (blocks_per_sm < 1)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "num_experts is %d: %d bytes of shared memory do not fit",
                           args->num_experts, bytes);
    const int64_t tiles = gemm_max_row_tiles(args, kTokens) * epmoei_ceil_div(args->n, kBlockN);
    const int64_t blocks = epmoei_min64(tiles, (int64_t)epmoei_device_current()->num_sms * blocks_per_sm);
    kernel<<<(unsigned)blocks, kThreads, bytes, stream>>>(quant_params(args));
    return EPMOEI_LAUNCH_CHECK("grouped_gemm_quant_sm80");
}

template <typename T, epmoe_format_t kFormat>
epmoe_status_t launch_tokens(const epmoe_grouped_gemm_args_t *args, epmoe_stream_t stream)
{
    switch (epmoei_grouped_gemm_tile_quant_sm80(args->num_experts, args->max_rows)) {
    case 16: return launch<T, kFormat, 16>(args, stream);
    case 32: return launch<T, kFormat, 32>(args, stream);
    default: return launch<T, kFormat, 64>(args, stream);
    }
}

template <typename T> epmoe_status_t launch_format(const epmoe_grouped_gemm_args_t *args, epmoe_stream_t stream)
{
    switch (args->weight.format) {
    case EPMOE_FORMAT_FP8_BLOCK: return launch_tokens<T, EPMOE_FORMAT_FP8_BLOCK>(args, stream);
    case EPMOE_FORMAT_MXFP4: return launch_tokens<T, EPMOE_FORMAT_MXFP4>(args, stream);
    default: return launch_tokens<T, EPMOE_FORMAT_W4>(args, stream);
    }
}

} // namespace

extern "C" int64_t epmoei_grouped_gemm_quant_workspace_sm80(const epmoe_grouped_gemm_args_t *args)
{
    return epmoei_gemm_order_x_bytes(args);
}

extern "C" epmoe_status_t epmoei_grouped_gemm_quant_sm80(const epmoe_grouped_gemm_args_t *args, epmoe_stream_t stream)
{
    if (args->fp8_activations)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED,
                           "fp8_activations is 1: on CUDA it needs compute capability 9.0 and tier sm90");
    const int64_t bytes = epmoei_grouped_gemm_quant_workspace_sm80(args);
    if (args->workspace_bytes < bytes || (bytes && !args->workspace))
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "workspace is %p with workspace_bytes %lld: expected %lld",
                           args->workspace, (long long)args->workspace_bytes, (long long)bytes);
    epmoe_grouped_gemm_args_t ordered = *args;
    if (args->weight.g_idx) {
        EPMOEI_CHECK(epmoei_gemm_order_x_sm80(args, args->workspace, stream));
        ordered.x = args->workspace;
        ordered.x_sorted = 1;
    }
    return args->x_dtype == EPMOE_BF16 ? launch_format<__nv_bfloat16>(&ordered, stream)
                                       : launch_format<__half>(&ordered, stream);
}
