/* Grouped GEMM on wgmma and TMA for Hopper.
 *
 * Weights take wgmma's 64-row side and tokens its column side, which comes in multiples of 8: an expert with m rows is
 * cut evenly into ceil(m / kMaxN) tiles, each as wide as its rows need, so that neither 8 rows nor 300 waste much.
 * A block holds 128 rows of w and up to kMaxN tokens. One warpgroup produces: a thread starts the TMA copy of the
 * weight tile (the expert is the tensor map's third coordinate) and all of them gather rows of x by cp.async. Two
 * warpgroups consume, 64 weight rows each. Blocks are persistent and walk the tile list that they derive from
 * expert_offsets, so that the producer runs ahead into the next tile while the consumers finish this one. Each output's
 * sum runs over K in steps of 16 whatever the tile width: results do not depend on other rows. */
#include "kernels/grouped_gemm_cuda.cuh"
#include "kernels/grouped_gemm_tile.h"
#include "kernels/ptx.cuh"
#include "kernels/ptx_wgmma.cuh"

#include <cuda.h>

namespace
{

constexpr int kBlockW = 128; /* weight rows of a block */
constexpr int kBlockK = 64;  /* 128 bytes: one row of the swizzle */
constexpr int kWarpgroup = 128;
constexpr int kThreads = 3 * kWarpgroup;
constexpr int kWeightBytes = kBlockW * kBlockK * 2;

template <int kMaxN_, int kStages_> struct pipeline {
    static constexpr int kMaxN = kMaxN_, kStages = kStages_;
    static constexpr int kLag = kStages / 2; /* cp.async groups of a thread under way */
    static constexpr int kStageBytes = kWeightBytes + kMaxN * kBlockK * 2;
};

struct shared_tail_t {
    uint64_t full[8];
    uint64_t empty[8];
    int32_t warp_sums[kThreads / 32];
};

/* After the stages: x_rows, slots and weights of each warpgroup, tail, cumulative tiles. */
template <typename Pipeline> struct shared_layout {
    static constexpr int kXRows = Pipeline::kStages * Pipeline::kStageBytes;
    static constexpr int kSlots = kXRows + Pipeline::kMaxN * 4;
    static constexpr int kWeights = kSlots + 2 * Pipeline::kMaxN * 4;
    static constexpr int kTail = kWeights + 2 * Pipeline::kMaxN * 4;
    static constexpr int kCumulative = kTail + (int)sizeof(shared_tail_t);
};

/* Which tokens a tile covers, and the width of wgmma that holds them. */
struct tile_t {
    int32_t expert;
    int32_t row;   /* first row, in the sorted order */
    int32_t rows;  /* 0 = nothing to do */
    int32_t width; /* rows rounded up to a width that is compiled */
    int32_t col;   /* first weight row */
};

/* Every width is a copy of the code: these are few enough to compile and close enough to waste little. */
template <int kMaxN> __device__ __forceinline__ int32_t round_width(int32_t rows)
{
    if (kMaxN > 64) return (rows + 31) / 32 * 32;
    return rows <= 32 ? (rows + 7) / 8 * 8 : (rows + 15) / 16 * 16;
}

/* Tiles of an expert follow each other, its token tiles fastest, so that blocks that run together share weights. */
template <int kMaxN>
__device__ __forceinline__ tile_t find_tile(const gemm_params_t &p, const int32_t *cumulative, int64_t index,
                                            int32_t col_tiles)
{
    int32_t lo = 0, hi = p.num_experts;
    while (hi - lo > 1) {
        int32_t mid = (lo + hi) / 2;
        if ((int64_t)cumulative[mid] * col_tiles <= index)
            lo = mid;
        else
            hi = mid;
    }
    int32_t row_tiles = cumulative[lo + 1] - cumulative[lo];
    int32_t local = (int32_t)(index - (int64_t)cumulative[lo] * col_tiles);
    int32_t first = gemm_expert_offset(p, lo), rows = gemm_expert_offset(p, lo + 1) - first;
    int32_t each = ((rows + row_tiles - 1) / row_tiles + 7) / 8 * 8;
    tile_t tile;
    tile.expert = lo;
    tile.row = first + local % row_tiles * each;
    tile.rows = max(0, min(each, first + rows - tile.row));
    tile.width = round_width<kMaxN>(tile.rows);
    tile.col = local / row_tiles * kBlockW;
    return tile;
}

__device__ __forceinline__ void wait_barrier(uint32_t barrier, uint32_t parity)
{
    while (!ptx_mbarrier_try_wait(barrier, parity)) {
    }
}

/* A K-major operand in the 128-byte swizzle: rows of 128 bytes, groups of 8 rows 1024 bytes apart. */
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t shared)
{
    return (uint64_t)(shared >> 4 & 0x3FFF) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

template <typename T, typename Pipeline>
__device__ __forceinline__ void produce(const gemm_params_t &p, const CUtensorMap *map, char *shared,
                                        const int32_t *cumulative, int64_t tiles, int32_t col_tiles)
{
    using layout = shared_layout<Pipeline>;
    const int tid = threadIdx.x, row_in_copy = tid / 8, chunk = tid % 8;
    shared_tail_t *tail = (shared_tail_t *)(shared + layout::kTail);
    int32_t *x_rows = (int32_t *)(shared + layout::kXRows);
    const uint32_t base = ptx_shared_address(shared);
    const uint32_t full = ptx_shared_address(tail->full), empty = ptx_shared_address(tail->empty);
    const int k_steps = (p.k + kBlockK - 1) / kBlockK;
    uint32_t count = 0; /* stages filled so far */

    for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
        const tile_t tile = find_tile<Pipeline::kMaxN>(p, cumulative, index, col_tiles);
        if (tile.rows == 0) continue;
        ptx_named_barrier<1>(kWarpgroup);
        for (int i = tid; i < tile.width; i += kWarpgroup) {
            int32_t slot = i < tile.rows ? p.row_index ? p.row_index[tile.row + i] : tile.row + i : -1;
            x_rows[i] = slot < 0 || slot >= p.num_slots ? -1 : slot / p.x_row_divisor;
        }
        ptx_named_barrier<1>(kWarpgroup);

        for (int step = 0; step < k_steps; step++, count++) {
            const uint32_t stage = count % Pipeline::kStages;
            const uint32_t to = base + stage * Pipeline::kStageBytes;
            wait_barrier(empty + 8 * stage, count / Pipeline::kStages % 2 ^ 1);
            if (tid == 0) {
                ptx_mbarrier_arrive_expect(full + 8 * stage, kWeightBytes);
                ptx_tma_load_3d(to, map, full + 8 * stage, step * kBlockK, tile.col, tile.expert);
            }
            const int32_t k = step * kBlockK + chunk * 8;
            for (int row = row_in_copy; row < tile.width; row += kWarpgroup / 8) {
                int32_t x_row = x_rows[row];
                bool valid = x_row >= 0 && k < p.k;
                const T *from = (const T *)p.x + (valid ? (int64_t)x_row * p.k + k : 0);
                ptx_cp_async_16(to + kWeightBytes + row * 128 + ((chunk ^ (row & 7)) << 4), from, valid ? 16 : 0);
            }
            ptx_cp_async_commit();
            if (count >= Pipeline::kLag) {
                ptx_cp_async_wait<Pipeline::kLag>();
                ptx_fence_proxy_async();
                __syncwarp();
                if (tid % 32 == 0) ptx_mbarrier_arrive(full + 8 * ((count - Pipeline::kLag) % Pipeline::kStages));
            }
        }
    }
    ptx_cp_async_wait<0>();
    ptx_fence_proxy_async();
    __syncwarp();
    if (tid % 32 == 0)
        for (uint32_t i = count < Pipeline::kLag ? 0 : count - Pipeline::kLag; i < count; i++)
            ptx_mbarrier_arrive(full + 8 * (i % Pipeline::kStages));
}

/* Where consumer warpgroups keep what they share. */
struct consumer_t {
    int32_t *slots;
    float *weights;
    uint32_t base;
    uint32_t full;
    uint32_t empty;
    int32_t group; /* 0 or 1 */
    int32_t tid;   /* in the warpgroup */
};

/* Barrier numbers are immediates: one in a register would reserve all sixteen. */
__device__ __forceinline__ void warpgroup_barrier(const consumer_t &c)
{
    if (c.group == 0)
        ptx_named_barrier<2>(kWarpgroup);
    else
        ptx_named_barrier<3>(kWarpgroup);
}

/* Columns of y that a thread writes for tokens [8 j, 8 j + 8), from its four accumulators of them: weight rows g and
 * g + 8 (g = lane / 4) of the warp's 16 against tokens 2 c and 2 c + 1 (c = lane % 4). */
__device__ __forceinline__ void store_gated(const gemm_params_t &p, const tile_t &tile, const consumer_t &c, int j,
                                            int32_t row, const float *bias, const float (&acc)[4])
{
    /* Gate and up rows alternate, so they are with neighbours in g. Each of a pair finishes one of the two tokens. */
    const int lane = c.tid % 32;
    const bool odd = lane / 4 % 2 != 0;
    const int token = j * 8 + lane % 4 * 2 + odd;
    const int32_t slot = c.slots[token];
    const float weight = c.weights[token];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float mine = odd ? acc[2 * half + 1] : acc[2 * half];
        float other = __shfl_xor_sync(0xFFFFFFFFu, odd ? acc[2 * half] : acc[2 * half + 1], 4);
        int32_t col = (row & ~1) + 8 * half; /* of the gate */
        if (slot < 0 || col >= p.n) continue;
        float value[1] = {gemm_finish(p, bias, weight, col, odd ? other : mine, odd ? mine : other)};
        gemm_store<1>(p, (int64_t)slot * p.n_out + col / 2, value);
    }
}

__device__ __forceinline__ void store_plain(const gemm_params_t &p, const tile_t &tile, const consumer_t &c, int j,
                                            int32_t row, const float *bias, const float (&acc)[4])
{
    const int lane = c.tid % 32;
    const int first = j * 8 + lane % 4 * 2; /* the two tokens of the accumulators */
    const float2 weight = *(const float2 *)(c.weights + first);
    if (p.y_dtype == EPMOE_F32 || p.n % 2) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int32_t slot = c.slots[first + i % 2], col = row + i / 2 * 8;
            if (slot < 0 || col >= p.n) continue;
            float value[1] = {gemm_finish(p, bias, i % 2 ? weight.y : weight.x, col, acc[i], 0.0f)};
            gemm_store<1>(p, (int64_t)slot * p.n_out + col, value);
        }
        return;
    }
    /* 16-bit outputs: an 8x8 transpose turns a weight row of two tokens into a token of two weight rows. */
    const int32_t slot = c.slots[j * 8 + lane / 4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int32_t col = row + 8 * half;
        bool valid = col < p.n;
        float a = valid ? gemm_finish(p, bias, weight.x, col, acc[2 * half], 0.0f) : 0.0f;
        float b = valid ? gemm_finish(p, bias, weight.y, col, acc[2 * half + 1], 0.0f) : 0.0f;
        uint32_t pair = ptx_movmatrix(gemm_pack(p, a, b));
        col = row - lane / 4 + 8 * half + lane % 4 * 2;
        if (slot >= 0 && col < p.n) *(uint32_t *)((uint16_t *)p.y + (int64_t)slot * p.n_out + col) = pair;
    }
}

template <typename T, typename Pipeline, int kN>
__device__ __forceinline__ void consume_tile(const gemm_params_t &p, const tile_t &tile, const consumer_t &c,
                                             uint32_t &count)
{
    const int k_steps = (p.k + kBlockK - 1) / kBlockK;
    /* Read ahead of the product, so that the epilogue does not wait for it. */
    int32_t slots[(kN + kWarpgroup - 1) / kWarpgroup];
#pragma unroll
    for (int i = 0; i < (kN + kWarpgroup - 1) / kWarpgroup; i++) {
        int32_t token = c.tid + i * kWarpgroup;
        slots[i] = token < tile.rows ? p.row_index ? p.row_index[tile.row + token] : tile.row + token : -1;
    }

    /* Zeroed here, not by the first wgmma: an accumulator that is read before it is written would be live in every
     * other width's code too. */
    float acc[kN / 2];
#pragma unroll
    for (int i = 0; i < kN / 2; i++) acc[i] = 0.0f;
    for (int step = 0; step < k_steps; step++, count++) {
        const uint32_t stage = count % Pipeline::kStages;
        const uint32_t from = c.base + stage * Pipeline::kStageBytes;
        wait_barrier(c.full + 8 * stage, count / Pipeline::kStages % 2);
        const uint64_t w = wgmma_descriptor(from + c.group * (kWeightBytes / 2));
        const uint64_t x = wgmma_descriptor(from + kWeightBytes);
        ptx_wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < kBlockK / 16; kk++) /* 16 elements are 32 bytes, 2 in the descriptor's units */
            ptx_wgmma<T, kN>::run(acc, w + 2 * kk, x + 2 * kk);
        ptx_wgmma_commit();
        if (step > 0) {
            ptx_wgmma_wait<1>();
            if (c.tid == 0) ptx_mbarrier_arrive(c.empty + 8 * ((count - 1) % Pipeline::kStages));
        }
    }
    ptx_wgmma_wait<0>();
    if (c.tid == 0) ptx_mbarrier_arrive(c.empty + 8 * ((count - 1) % Pipeline::kStages));

    warpgroup_barrier(c); /* the previous tile's slots have been read */
#pragma unroll
    for (int i = 0; i < (kN + kWarpgroup - 1) / kWarpgroup; i++) {
        int32_t token = c.tid + i * kWarpgroup, slot = slots[i] < p.num_slots ? slots[i] : -1;
        if (token >= kN) continue;
        c.slots[token] = slot;
        c.weights[token] = p.row_weights && slot >= 0 ? p.row_weights[slot] : 1.0f;
    }
    warpgroup_barrier(c);
    const float *bias = p.bias ? p.bias + (int64_t)tile.expert * p.n : nullptr;
    const int32_t row = tile.col + c.group * 64 + c.tid / 32 * 16 + c.tid % 32 / 4;
    /* Registers cannot be indexed: a group of blocks is picked by comparisons, so that the code for it is there once.
     */
    constexpr int kBlocks = kN % 32 == 0 ? 4 : kN % 16 == 0 ? 2 : 1;
#pragma unroll 1
    for (int group = 0; group * kBlocks * 8 < tile.rows; group++) {
        float part[kBlocks][4];
#pragma unroll
        for (int i = 0; i < kN / 8 / kBlocks; i++)
            if (i == group)
#pragma unroll
                for (int r = 0; r < kBlocks * 4; r++) part[r / 4][r % 4] = acc[i * kBlocks * 4 + r];
#pragma unroll
        for (int j = 0; j < kBlocks; j++)
            if (p.gated)
                store_gated(p, tile, c, group * kBlocks + j, row, bias, part[j]);
            else
                store_plain(p, tile, c, group * kBlocks + j, row, bias, part[j]);
    }
}

template <typename T, typename Pipeline>
__device__ __forceinline__ void consume(const gemm_params_t &p, char *shared, const int32_t *cumulative, int64_t tiles,
                                        int32_t col_tiles)
{
    using layout = shared_layout<Pipeline>;
    shared_tail_t *tail = (shared_tail_t *)(shared + layout::kTail);
    consumer_t c;
    c.group = threadIdx.x / kWarpgroup - 1;
    c.tid = threadIdx.x % kWarpgroup;
    c.slots = (int32_t *)(shared + layout::kSlots) + c.group * Pipeline::kMaxN;
    c.weights = (float *)(shared + layout::kWeights) + c.group * Pipeline::kMaxN;
    c.base = ptx_shared_address(shared);
    c.full = ptx_shared_address(tail->full);
    c.empty = ptx_shared_address(tail->empty);
    uint32_t count = 0;
    for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
        const tile_t tile = find_tile<Pipeline::kMaxN>(p, cumulative, index, col_tiles);
#define WIDTH(n)                                                                                                       \
    case n: consume_tile<T, Pipeline, n>(p, tile, c, count); break
        if constexpr (Pipeline::kMaxN == 64) switch (tile.width) {
                WIDTH(8);
                WIDTH(16);
                WIDTH(24);
                WIDTH(32);
                WIDTH(48);
                WIDTH(64);
            }
        else
            switch (tile.width) {
                WIDTH(32);
                WIDTH(64);
                WIDTH(96);
                WIDTH(128);
                WIDTH(160);
                WIDTH(192);
                WIDTH(224);
                WIDTH(256);
            }
#undef WIDTH
    }
}

template <typename T, typename Pipeline>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_gemm_kernel(const gemm_params_t p, const __grid_constant__ CUtensorMap map)
{
    using layout = shared_layout<Pipeline>;
    extern __shared__ __align__(1024) char shared[];
    shared_tail_t *tail = (shared_tail_t *)(shared + layout::kTail);
    int32_t *cumulative = (int32_t *)(shared + layout::kCumulative);
    if (threadIdx.x == 0) {
        ptx_tma_prefetch_map(&map);
        for (int i = 0; i < Pipeline::kStages; i++) {
            ptx_mbarrier_init(ptx_shared_address(&tail->full[i]), 1 + kWarpgroup / 32);
            ptx_mbarrier_init(ptx_shared_address(&tail->empty[i]), 2);
        }
        ptx_fence_barrier_init();
    }
    const int32_t col_tiles = (p.n + kBlockW - 1) / kBlockW;
    const int64_t tiles =
        (int64_t)gemm_count_tiles<kThreads>(p, Pipeline::kMaxN, cumulative, tail->warp_sums) * col_tiles;
    __syncthreads();

    if (threadIdx.x < kWarpgroup) {
        ptx_setmaxnreg_dec<40>();
        produce<T, Pipeline>(p, &map, shared, cumulative, tiles, col_tiles);
    } else {
        ptx_setmaxnreg_inc<232>();
        consume<T, Pipeline>(p, shared, cumulative, tiles, col_tiles);
    }
}

typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                              const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* Weights [E,N,K] with a box of 128 rows by 64 columns; rows and columns past the end read as zeros. */
epmoe_status_t encode_map(const epmoe_grouped_gemm_args_t *args, CUtensorMap *map)
{
    static encode_fn encode; /* the same pointer whichever thread finds it */
    if (!encode) {
        void *function = nullptr;
        cudaDriverEntryPointQueryResult found;
        EPMOEI_CUDA(
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found));
        if (found != cudaDriverEntryPointSuccess || !function)
            return epmoei_fail(EPMOE_ERROR_CUDA, "the driver has no cuTensorMapEncodeTiled");
        encode = (encode_fn)function;
    }
    const cuuint64_t dims[3] = {(cuuint64_t)args->k, (cuuint64_t)args->n, (cuuint64_t)args->num_experts};
    const cuuint64_t strides[2] = {(cuuint64_t)args->k * 2, (cuuint64_t)args->n * (cuuint64_t)args->k * 2};
    const cuuint32_t box[3] = {kBlockK, kBlockW, 1}, steps[3] = {1, 1, 1};
    CUresult result =
        encode(map, args->x_dtype == EPMOE_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 3,
               (void *)(uintptr_t)args->weight.data, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        return epmoei_fail(EPMOE_ERROR_CUDA, "cuTensorMapEncodeTiled failed with %d for weights [%d,%d,%d]",
                           (int)result, args->num_experts, args->n, args->k);
    return EPMOE_OK;
}

template <typename T, typename Pipeline>
epmoe_status_t launch(const epmoe_grouped_gemm_args_t *args, epmoe_stream_t stream)
{
    const epmoei_device_info_t *device = epmoei_device_current();
    const int bytes = shared_layout<Pipeline>::kCumulative + (args->num_experts + 1) * 4;
    CUtensorMap map;
    EPMOEI_CHECK(encode_map(args, &map));
    EPMOEI_CUDA(
        cudaFuncSetAttribute(grouped_gemm_kernel<T, Pipeline>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    int64_t tiles = gemm_max_row_tiles(args, Pipeline::kMaxN) * epmoei_ceil_div(args->n, kBlockW);
    int64_t blocks = epmoei_min64(tiles, device->num_sms);
    grouped_gemm_kernel<T, Pipeline><<<(unsigned)blocks, kThreads, bytes, stream>>>(gemm_params(args), map);
    return EPMOEI_LAUNCH_CHECK("grouped_gemm_sm90");
}

using narrow = pipeline<64, 8>;
using wide = pipeline<256, 4>;

template <typename T> epmoe_status_t launch_width(const epmoe_grouped_gemm_args_t *args, epmoe_stream_t stream)
{
    return epmoei_grouped_gemm_width_sm90(args->num_experts, args->max_rows) == 64 ? launch<T, narrow>(args, stream)
                                                                                   : launch<T, wide>(args, stream);
}

} // namespace

extern "C" epmoe_status_t epmoei_grouped_gemm_sm90(const epmoe_grouped_gemm_args_t *args, epmoe_stream_t stream)
{
    EPMOEI_CHECK(epmoei_grouped_gemm_check_cuda(args));
    /* One box of the tensor map must hold gate and up side by side: other layouts are the sm80 kernel's. */
    if (args->activation < EPMOE_ACTIVATION_NONE && args->layout == EPMOE_LAYOUT_GATE_FIRST)
        return epmoei_grouped_gemm_sm80(args, stream);
    return args->x_dtype == EPMOE_BF16 ? launch_width<__nv_bfloat16>(args, stream) : launch_width<__half>(args, stream);
}
