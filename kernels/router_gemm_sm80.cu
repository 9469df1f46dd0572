/* The router's product on mma.sync, every device from Ampere on. Two forms, with the same bits:
 *   direct   few tokens or few experts. A warp holds one chain of a small tile, its operands loaded from global memory
 *            straight into registers with every load of an 8x8 tile in flight at once; the warps of a block, a chain
 *            each, meet in shared memory once, to add. Many blocks pull a few rows of w each, so that w streams from
 * all SMs: the floor is one latency of the memory plus bytes over its bandwidth tiled    many tokens: cp.async into a
 * ring of stages, a block walks the chains of its part. The floor is the tensor cores' rate through mma.sync (about 0.6
 * of their peak on Hopper) Which k sits where in an mma follows from 16-byte loads, the same in both: of 32
 * neighbouring k, lane%4 = j holds 8j..8j+7, whose first four are its share of one mma and whose last four that of the
 * next. */
#include "kernels/launch_cuda.cuh"
#include "kernels/router_gemm.h"

namespace
{

constexpr int kGroup = 32;      /* k of two mma */
constexpr int kDirectWarps = 4; /* chains at a time */
constexpr int kBlockK = 64;     /* tiled: k of a stage, 128 bytes of a row */
constexpr int kChunks = kBlockK / 8;

struct router_params_t {
    const void *x;
    const void *w;
    float *partials;
    uint32_t *counter;
    const int32_t *num_tokens_dev;
    int32_t num_tokens;
    int32_t first_token;
    int32_t num_experts;
    int32_t hidden;
    int32_t expert_tiles;
    epmoei_router_parts_t parts;
};

/* Expert tiles run fastest, so that blocks that run together share rows of x. */
struct router_block_t {
    int32_t tokens; /* actual T of these rows */
    int32_t token;  /* first of the tile */
    int32_t expert;
    int32_t part;
    int32_t begin; /* of k */
    int32_t end;
};

__device__ __forceinline__ router_block_t find_block(const router_params_t &p, int32_t tile_tokens,
                                                     int32_t tile_experts)
{
    router_block_t block;
    int32_t index = (int32_t)blockIdx.x, rest = index / p.expert_tiles;
    block.tokens = epmoei_device_tokens(p.num_tokens_dev, p.first_token + p.num_tokens) - p.first_token;
    block.expert = index % p.expert_tiles * tile_experts;
    block.part = rest % p.parts.num_parts;
    block.token = rest / p.parts.num_parts * tile_tokens;
    block.begin = block.part * p.parts.part;
    block.end = min(block.begin + p.parts.part, p.hidden);
    return block;
}

__device__ __forceinline__ float *partial_row(const router_params_t &p, int32_t part, int32_t token)
{
    return p.partials + ((int64_t)part * p.num_tokens + token) * p.parts.row_stride;
}

/* What every block does first. */
__device__ __forceinline__ void begin_kernel(const router_params_t &p)
{
    epmoei_begin_dependent();
    if (p.counter && blockIdx.x == 0 && threadIdx.x == 0) *p.counter = 0;
}

/* d[i][j] += the 32 k that a lane's 16 bytes stand for: rows of x lo and hi (8 apart), rows of w b. */
template <typename T, int kFragsN>
__device__ __forceinline__ void mma_group(float (&d)[kFragsN][4], const uint4 &lo, const uint4 &hi,
                                          const uint4 (&b)[kFragsN])
{
    const uint32_t first[4] = {lo.x, hi.x, lo.y, hi.y}, second[4] = {lo.z, hi.z, lo.w, hi.w};
#pragma unroll
    for (int j = 0; j < kFragsN; j++) ptx_mma_16816(d[j], first, b[j].x, b[j].y, T());
#pragma unroll
    for (int j = 0; j < kFragsN; j++) ptx_mma_16816(d[j], second, b[j].z, b[j].w, T());
}

/* -------------------------------------------------------------------------------------------------------- direct */

template <int kTokens_, int kExperts_, int kDepth_> struct direct_shape {
    static constexpr int kTokens = kTokens_, kExperts = kExperts_;
    static constexpr int kDepth = kDepth_; /* groups of loads in flight */
};
using direct_8 = direct_shape<8, 8, 8>;
using direct_32 = direct_shape<32, 32, 2>;

__device__ __forceinline__ uint4 load_16(const void *from, bool valid)
{
    return valid ? *(const uint4 *)from : make_uint4(0, 0, 0, 0);
}

/* The chain [begin,end) of the tile, left in acc. */
template <typename T, typename Shape, int kFragsM, int kFragsN>
__device__ __forceinline__ void direct_chain(const router_params_t &p, const router_block_t &block, int32_t begin,
                                             int32_t end, float (&acc)[kFragsM][kFragsN][4])
{
    constexpr int kDepth = Shape::kDepth, kHalves = Shape::kTokens / 8;
    const int32_t lane = threadIdx.x % 32, row = lane / 4;
    const T *x = (const T *)p.x + (int64_t)(block.token + row) * p.hidden;
    const T *w = (const T *)p.w + (int64_t)(block.expert + row) * p.hidden;
    uint4 xs[kDepth][kHalves], ws[kDepth][kFragsN];
    auto load = [&](int slot, int32_t group) {
        int32_t k = group + lane % 4 * 8;
#pragma unroll
        for (int j = 0; j < kFragsN; j++)
            ws[slot][j] =
                load_16(w + (int64_t)j * 8 * p.hidden + k, k < end && block.expert + row + j * 8 < p.num_experts);
#pragma unroll
        for (int i = 0; i < kHalves; i++)
            xs[slot][i] =
                load_16(x + (int64_t)i * 8 * p.hidden + k, k < end && block.token + row + i * 8 < block.tokens);
    };
#pragma unroll
    for (int i = 0; i < kFragsM; i++)
#pragma unroll
        for (int j = 0; j < kFragsN; j++)
#pragma unroll
            for (int c = 0; c < 4; c++) acc[i][j][c] = 0.0f;
#pragma unroll
    for (int slot = 0; slot < kDepth; slot++) load(slot, begin + slot * kGroup);
#pragma unroll 1
    for (int32_t base = begin; base < end; base += kDepth * kGroup)
#pragma unroll
        for (int slot = 0; slot < kDepth; slot++) {
            int32_t group = base + slot * kGroup;
            if (group >= end) break;
#pragma unroll
            for (int i = 0; i < kFragsM; i++) {
                uint4 hi = make_uint4(0, 0, 0, 0);
                if constexpr (kHalves > 1) hi = xs[slot][2 * i + 1];
                mma_group<T>(acc[i], xs[slot][2 * i], hi, ws[slot]);
            }
            load(slot, group + kDepth * kGroup);
        }
}

template <typename T, typename Shape>
__global__ void __launch_bounds__(kDirectWarps * 32) router_direct_kernel(const router_params_t p)
{
    constexpr int kTokens = Shape::kTokens, kExperts = Shape::kExperts, kThreads = kDirectWarps * 32;
    constexpr int kFragsM = (kTokens + 15) / 16, kFragsN = kExperts / 8;
    constexpr int kRow = kExperts + 4; /* the padding spreads rows over the banks */
    constexpr int kQuads = kTokens * kExperts / 4, kOwnQuads = (kQuads + kThreads - 1) / kThreads;
    __shared__ __align__(16) float tiles[kDirectWarps][kTokens][kRow];

    begin_kernel(p);
    const router_block_t block = find_block(p, kTokens, kExperts);
    if (block.token >= block.tokens) return;
    const int32_t tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    float4 sums[kOwnQuads];
#pragma unroll
    for (int q = 0; q < kOwnQuads; q++) sums[q] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

    for (int32_t round = block.begin; round < block.end; round += kDirectWarps * p.parts.chain) {
        const int32_t begin = round + warp * p.parts.chain;
        if (begin < block.end) {
            float acc[kFragsM][kFragsN][4];
            direct_chain<T, Shape>(p, block, begin, min(begin + p.parts.chain, block.end), acc);
#pragma unroll
            for (int i = 0; i < kFragsM; i++)
#pragma unroll
                for (int half = 0; half < (kTokens > 8 ? 2 : 1); half++)
#pragma unroll
                    for (int j = 0; j < kFragsN; j++)
                        *(float2 *)&tiles[warp][i * 16 + half * 8 + lane / 4][j * 8 + lane % 4 * 2] =
                            make_float2(acc[i][j][half * 2], acc[i][j][half * 2 + 1]);
        }
        __syncthreads();
        const int32_t chains = min(kDirectWarps, (block.end - round + p.parts.chain - 1) / p.parts.chain);
#pragma unroll
        for (int q = 0; q < kOwnQuads; q++) {
            const int32_t quad = tid + q * kThreads;
            if (quad >= kQuads) break;
            for (int32_t chain = 0; chain < chains; chain++) {
                float4 add = *(const float4 *)&tiles[chain][quad / (kExperts / 4)][quad % (kExperts / 4) * 4];
                sums[q].x += add.x;
                sums[q].y += add.y;
                sums[q].z += add.z;
                sums[q].w += add.w;
            }
        }
        if (round + kDirectWarps * p.parts.chain < block.end) __syncthreads();
    }
#pragma unroll
    for (int q = 0; q < kOwnQuads; q++) {
        const int32_t quad = tid + q * kThreads, col = block.expert + quad % (kExperts / 4) * 4;
        const int32_t token = block.token + quad / (kExperts / 4);
        if (quad < kQuads && token < block.tokens && col < p.parts.row_stride)
            *(float4 *)(partial_row(p, block.part, token) + col) = sums[q];
    }
}

/* --------------------------------------------------------------------------------------------------------- tiled */

template <int kBlockM_, int kBlockN_, int kWarpsM_, int kWarpsN_, int kStages_> struct tile_shape {
    static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_, kWarpsM = kWarpsM_, kWarpsN = kWarpsN_;
    static constexpr int kStages = kStages_, kThreads = kWarpsM * kWarpsN * 32;
    static constexpr int kStageBytes = (kBlockM + kBlockN) * kBlockK * 2;
    static constexpr int kSharedBytes = kStages * kStageBytes;
};
using tile_64 = tile_shape<64, 64, 2, 2, 4>;
using tile_128 = tile_shape<128, 128, 2, 4, 3>; /* fits the 99 KB of the smaller devices */

/* Byte offset of 16-byte chunk `chunk` of row `row` of 128 bytes. The two rows that eight lanes read at once lie in
 * different halves of the banks. */
__device__ __forceinline__ int32_t tile_offset(int32_t row, int32_t chunk)
{
    return row * 128 + ((chunk ^ ((row & 1) << 2)) << 4);
}

template <typename T, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads) router_tiled_kernel(const router_params_t p)
{
    constexpr int kBlockM = Shape::kBlockM, kBlockN = Shape::kBlockN, kStages = Shape::kStages;
    constexpr int kWarpM = kBlockM / Shape::kWarpsM, kWarpN = kBlockN / Shape::kWarpsN;
    constexpr int kFragsM = kWarpM / 16, kFragsN = kWarpN / 8;
    constexpr int kRowsPerCopy = Shape::kThreads / kChunks;
    constexpr int kCopiesM = kBlockM / kRowsPerCopy, kCopiesN = kBlockN / kRowsPerCopy;
    extern __shared__ __align__(128) char shared[];

    begin_kernel(p);
    const router_block_t block = find_block(p, kBlockM, kBlockN);
    if (block.token >= block.tokens) return;
    const int32_t tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const int32_t warp_m = warp / Shape::kWarpsN * kWarpM, warp_n = warp % Shape::kWarpsN * kWarpN;
    const int32_t copy_row = tid / kChunks, copy_chunk = tid % kChunks;
    const int32_t steps = (block.end - block.begin + kBlockK - 1) / kBlockK;
    const T *x = (const T *)p.x + (int64_t)(block.token + copy_row) * p.hidden;
    const T *w = (const T *)p.w + (int64_t)(block.expert + copy_row) * p.hidden;

    auto copy_stage = [&](int32_t step) {
        char *stage = shared + step % kStages * Shape::kStageBytes;
        const int32_t k = block.begin + step * kBlockK + copy_chunk * 8;
#pragma unroll
        for (int i = 0; i < kCopiesM; i++) {
            bool valid = k < block.end && block.token + copy_row + i * kRowsPerCopy < block.tokens;
            ptx_cp_async_16(ptx_shared_address(stage + tile_offset(copy_row + i * kRowsPerCopy, copy_chunk)),
                            valid ? x + (int64_t)i * kRowsPerCopy * p.hidden + k : (const T *)p.x, valid ? 16 : 0);
        }
        stage += kBlockM * 128;
#pragma unroll
        for (int i = 0; i < kCopiesN; i++) {
            bool valid = k < block.end && block.expert + copy_row + i * kRowsPerCopy < p.num_experts;
            ptx_cp_async_16(ptx_shared_address(stage + tile_offset(copy_row + i * kRowsPerCopy, copy_chunk)),
                            valid ? w + (int64_t)i * kRowsPerCopy * p.hidden + k : (const T *)p.w, valid ? 16 : 0);
        }
    };

    float acc[kFragsM][kFragsN][4], sum[kFragsM][kFragsN][4];
#pragma unroll
    for (int i = 0; i < kFragsM; i++)
#pragma unroll
        for (int j = 0; j < kFragsN; j++)
#pragma unroll
            for (int c = 0; c < 4; c++) acc[i][j][c] = sum[i][j][c] = 0.0f;

#pragma unroll
    for (int s = 0; s < kStages - 1; s++) {
        if (s < steps) copy_stage(s);
        ptx_cp_async_commit();
    }
    const int32_t last_of_chain = p.parts.chain / kBlockK - 1;
    for (int32_t step = 0; step < steps; step++) {
        ptx_cp_async_wait<kStages - 2>();
        __syncthreads();
        if (step + kStages - 1 < steps) copy_stage(step + kStages - 1);
        ptx_cp_async_commit();
        const char *a_tile = shared + step % kStages * Shape::kStageBytes, *b_tile = a_tile + kBlockM * 128;
#pragma unroll
        for (int group = 0; group < kBlockK / kGroup; group++) {
            if (block.begin + step * kBlockK + group * kGroup >= block.end) break;
            const int32_t chunk = group * 4 + lane % 4;
            uint4 b[kFragsN];
#pragma unroll
            for (int j = 0; j < kFragsN; j++)
                b[j] = *(const uint4 *)(b_tile + tile_offset(warp_n + j * 8 + lane / 4, chunk));
#pragma unroll
            for (int i = 0; i < kFragsM; i++) {
                uint4 lo = *(const uint4 *)(a_tile + tile_offset(warp_m + i * 16 + lane / 4, chunk));
                uint4 hi = *(const uint4 *)(a_tile + tile_offset(warp_m + i * 16 + 8 + lane / 4, chunk));
                mma_group<T>(acc[i], lo, hi, b);
            }
        }
        if ((step & last_of_chain) != last_of_chain && step + 1 < steps) continue;
#pragma unroll
        for (int i = 0; i < kFragsM; i++)
#pragma unroll
            for (int j = 0; j < kFragsN; j++)
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    sum[i][j][c] += acc[i][j][c];
                    acc[i][j][c] = 0.0f;
                }
    }
    ptx_cp_async_wait<0>();

#pragma unroll
    for (int i = 0; i < kFragsM; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int32_t token = block.token + warp_m + i * 16 + half * 8 + lane / 4;
            if (token >= block.tokens) continue;
            float *row = partial_row(p, block.part, token);
#pragma unroll
            for (int j = 0; j < kFragsN; j++) {
                const int32_t col = block.expert + warp_n + j * 8 + lane % 4 * 2;
                if (col < p.parts.row_stride)
                    *(float2 *)(row + col) = make_float2(sum[i][j][half * 2], sum[i][j][half * 2 + 1]);
            }
        }
}

/* -------------------------------------------------------------------------------------------------------- launch */

/* Also sets p.expert_tiles. */
unsigned count_blocks(router_params_t *p, int32_t tile_tokens, int32_t tile_experts)
{
    p->expert_tiles = (int32_t)epmoei_ceil_div(p->num_experts, tile_experts);
    return (unsigned)(epmoei_ceil_div(p->num_tokens, tile_tokens) * p->parts.num_parts * p->expert_tiles);
}

template <typename T, typename Shape> epmoe_status_t launch_direct(router_params_t p, epmoe_stream_t stream)
{
    unsigned blocks = count_blocks(&p, Shape::kTokens, Shape::kExperts);
    cudaError_t error =
        epmoei_launch_dependent(router_direct_kernel<T, Shape>, blocks, kDirectWarps * 32, 0, stream, p);
    return epmoei_cuda_status((int32_t)error, "the router's product");
}

template <typename T, typename Shape> epmoe_status_t launch_tiled(router_params_t p, epmoe_stream_t stream)
{
    unsigned blocks = count_blocks(&p, Shape::kBlockM, Shape::kBlockN);
    EPMOEI_CUDA(cudaFuncSetAttribute(router_tiled_kernel<T, Shape>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     Shape::kSharedBytes));
    cudaError_t error =
        epmoei_launch_dependent(router_tiled_kernel<T, Shape>, blocks, Shape::kThreads, Shape::kSharedBytes, stream, p);
    return epmoei_cuda_status((int32_t)error, "the router's product");
}

template <typename T> epmoe_status_t launch(const router_params_t &p, epmoe_stream_t stream)
{
    enum { kFewTokens = 8, kSomeTokens = 64, kFewExperts = 32 };
    const epmoei_device_info_t *device = epmoei_device_current();
    if (p.num_tokens <= kFewTokens) return launch_direct<T, direct_8>(p, stream);
    if (p.num_tokens <= kSomeTokens || p.num_experts <= kFewExperts) return launch_direct<T, direct_32>(p, stream);
    /* The tall tile reads half as much, once it keeps most of the device busy. */
    router_params_t tall = p;
    return 4 * (int64_t)count_blocks(&tall, tile_128::kBlockM, tile_128::kBlockN) >= 3 * (int64_t)device->num_sms
               ? launch_tiled<T, tile_128>(p, stream)
               : launch_tiled<T, tile_64>(p, stream);
}

} // namespace

extern "C" epmoe_status_t epmoei_router_gemm_sm80(const epmoei_router_gemm_args_t *args, epmoe_stream_t stream)
{
    router_params_t p = {};
    p.x = args->x;
    p.w = args->weight;
    p.partials = args->partials;
    p.counter = args->counter;
    p.num_tokens_dev = args->num_tokens_dev;
    p.num_tokens = args->num_tokens;
    p.first_token = args->first_token;
    p.num_experts = args->num_experts;
    p.hidden = args->hidden;
    p.parts = epmoei_router_parts(args->hidden, args->num_experts);
    return args->dtype == EPMOE_BF16 ? launch<__nv_bfloat16>(p, stream) : launch<__half>(p, stream);
}
