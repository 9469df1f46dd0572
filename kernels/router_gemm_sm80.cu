/* The router's product on mma.sync, every device from Ampere on. Two forms, with the same bits:
 *
 *   direct   few tokens or few experts. A warp holds one chain of a small tile and loads all its operands from global
 *            memory straight into registers before the first use; the warps of a block, a chain each, meet in shared
 *            memory once, to add. Many blocks pull a few rows of w each, so that w streams from all SMs: the floor is
 *            one latency of the memory plus bytes over its bandwidth.
 *   tiled    many tokens: cp.async into a ring of stages, a block walks the chains of its part. The floor is that of
 *            x's bytes, or the tensor cores' rate through mma.sync (about 0.6 of their peak on Hopper).
 *
 * Which k sits where in an mma follows from 16-byte loads, the same in both: of 32 neighbouring k, lane%4 = j holds
 * 8j..8j+7, whose first four are its share of one mma and whose last four that of the next. */
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
    uint32_t *zeros;
    int32_t num_zeros;
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
    for (int32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < p.num_zeros; i += gridDim.x * blockDim.x)
        p.zeros[i] = 0;
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

constexpr int kDirectExperts = 8; /* of a tile */
constexpr int kDirectGroups = EPMOEI_ROUTER_MAX_CHAIN / kGroup;

__device__ __forceinline__ uint4 load_16(const void *from, bool valid)
{
    return valid ? *(const uint4 *)from : make_uint4(0, 0, 0, 0);
}

/* The chain [begin,end) of the tile, left in acc. */
template <typename T, int kTokens>
__device__ __forceinline__ void direct_chain(const router_params_t &p, const router_block_t &block, int32_t begin,
                                             int32_t end, float (&acc)[1][4])
{
    constexpr int kHalves = kTokens / 8;
    const int32_t lane = threadIdx.x % 32, row = lane / 4, first = begin + lane % 4 * 8;
    const T *x = (const T *)p.x + (int64_t)(block.token + row) * p.hidden + first;
    const T *w = (const T *)p.w + (int64_t)(block.expert + row) * p.hidden + first;
    const int32_t left_w = block.expert + row < p.num_experts ? end - first : 0;
    uint4 xs[kDirectGroups][kHalves], ws[kDirectGroups][1];
#pragma unroll
    for (int g = 0; g < kDirectGroups; g++) ws[g][0] = load_16(w + g * kGroup, g * kGroup < left_w);
#pragma unroll
    for (int i = 0; i < kHalves; i++) {
        const int32_t left_x = block.token + row + i * 8 < block.tokens ? end - first : 0;
#pragma unroll
        for (int g = 0; g < kDirectGroups; g++)
            xs[g][i] = load_16(x + (int64_t)i * 8 * p.hidden + g * kGroup, g * kGroup < left_x);
    }
#pragma unroll
    for (int c = 0; c < 4; c++) acc[0][c] = 0.0f;
#pragma unroll
    for (int g = 0; g < kDirectGroups; g++) {
        if (begin + g * kGroup >= end) break;
        uint4 hi = make_uint4(0, 0, 0, 0);
        if constexpr (kHalves > 1) hi = xs[g][1];
        mma_group<T>(acc, xs[g][0], hi, ws[g]);
    }
}

template <typename T, int kTokens>
__global__ void __launch_bounds__(kDirectWarps * 32) router_direct_kernel(const router_params_t p)
{
    constexpr int kRow = kDirectExperts + 4; /* the padding spreads rows over the banks */
    constexpr int kRowQuads = kDirectExperts / 4;
    static_assert(kTokens * kRowQuads <= kDirectWarps * 32, "a thread adds four columns at most");
    __shared__ __align__(16) float tiles[kDirectWarps][kTokens][kRow];

    begin_kernel(p);
    const router_block_t block = find_block(p, kTokens, kDirectExperts);
    if (block.token >= block.tokens) return;
    const int32_t tid = threadIdx.x, lane = tid % 32, warp = tid / 32, row = tid / kRowQuads, quad = tid % kRowQuads;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

#pragma unroll 1
    for (int32_t round = block.begin; round < block.end; round += kDirectWarps * p.parts.chain) {
        const int32_t begin = round + warp * p.parts.chain;
        if (begin < block.end) {
            float acc[1][4];
            direct_chain<T, kTokens>(p, block, begin, min(begin + p.parts.chain, block.end), acc);
#pragma unroll
            for (int half = 0; half < kTokens / 8; half++)
                *(float2 *)&tiles[warp][half * 8 + lane / 4][lane % 4 * 2] =
                    make_float2(acc[0][half * 2], acc[0][half * 2 + 1]);
        }
        __syncthreads();
        const int32_t chains = min(kDirectWarps, (block.end - round + p.parts.chain - 1) / p.parts.chain);
        if (row < kTokens)
#pragma unroll
            for (int chain = 0; chain < kDirectWarps; chain++) {
                if (chain >= chains) break;
                float4 add = *(const float4 *)&tiles[chain][row][quad * 4];
                sum.x += add.x;
                sum.y += add.y;
                sum.z += add.z;
                sum.w += add.w;
            }
        if (round + kDirectWarps * p.parts.chain < block.end) __syncthreads();
    }
    const int32_t col = block.expert + quad * 4;
    if (row < kTokens && block.token + row < block.tokens && col < p.parts.row_stride)
        *(float4 *)(partial_row(p, block.part, block.token + row) + col) = sum;
}

/* --------------------------------------------------------------------------------------------------------- tiled */

template <int kBlockM_, int kBlockN_, int kWarpsM_, int kWarpsN_, int kStages_> struct tile_shape {
    static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_, kWarpsM = kWarpsM_, kWarpsN = kWarpsN_;
    static constexpr int kStages = kStages_, kThreads = kWarpsM * kWarpsN * 32;
    static constexpr int kStageBytes = (kBlockM + kBlockN) * kBlockK * 2;
    static constexpr int kSharedBytes = kStages * kStageBytes;
};
/* All within the 99 KB of the smaller devices; the small ones with most of a part under way at once. */
using tile_32 = tile_shape<32, 32, 2, 2, 8>;
using tile_64 = tile_shape<64, 64, 2, 2, 6>;
using tile_128 = tile_shape<128, 128, 2, 4, 3>;

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
int64_t count_blocks(router_params_t *p, int32_t tile_tokens, int32_t tile_experts)
{
    p->expert_tiles = (int32_t)epmoei_ceil_div(p->num_experts, tile_experts);
    return epmoei_ceil_div(p->num_tokens, tile_tokens) * p->parts.num_parts * p->expert_tiles;
}

template <typename T, int kTokens> epmoe_status_t launch_direct(router_params_t p, epmoe_stream_t stream)
{
    unsigned blocks = (unsigned)count_blocks(&p, kTokens, kDirectExperts);
    cudaError_t error =
        epmoei_launch_dependent(router_direct_kernel<T, kTokens>, blocks, kDirectWarps * 32, 0, stream, p);
    return epmoei_cuda_status((int32_t)error, "the router's product");
}

template <typename T, typename Shape> epmoe_status_t launch_tiled(router_params_t p, epmoe_stream_t stream)
{
    unsigned blocks = (unsigned)count_blocks(&p, Shape::kBlockM, Shape::kBlockN);
    EPMOEI_CHECK(epmoei_allow_shared(router_tiled_kernel<T, Shape>, Shape::kSharedBytes, "the router's product"));
    cudaError_t error =
        epmoei_launch_dependent(router_tiled_kernel<T, Shape>, blocks, Shape::kThreads, Shape::kSharedBytes, stream, p);
    return epmoei_cuda_status((int32_t)error, "the router's product");
}

/* Whether a tile's blocks keep most of the device busy. */
template <typename Shape> bool fills(router_params_t p)
{
    return 4 * count_blocks(&p, Shape::kBlockM, Shape::kBlockN) >= 3 * (int64_t)epmoei_device_current()->num_sms;
}

template <typename T> epmoe_status_t launch(const router_params_t &p, epmoe_stream_t stream)
{
    /* Direct tiles share nothing between blocks: beyond a block per SM a tiled form loads much less. */
    const int32_t kFewTokens = 8, kFewExperts = 16, kSomeExperts = 32;
    router_params_t direct = p;
    if (p.num_tokens <= kFewTokens) return launch_direct<T, 8>(p, stream);
    if (p.num_experts <= kFewExperts || count_blocks(&direct, 16, kDirectExperts) <= epmoei_device_current()->num_sms)
        return launch_direct<T, 16>(p, stream);
    if (p.num_experts > kSomeExperts && fills<tile_128>(p)) return launch_tiled<T, tile_128>(p, stream);
    if (p.num_experts > kSomeExperts && fills<tile_64>(p)) return launch_tiled<T, tile_64>(p, stream);
    return launch_tiled<T, tile_32>(p, stream);
}

} // namespace

extern "C" epmoe_status_t epmoei_router_gemm_sm80(const epmoei_router_gemm_args_t *args, epmoe_stream_t stream)
{
    router_params_t p = {};
    p.x = args->x;
    p.w = args->weight;
    p.partials = args->partials;
    p.zeros = args->zeros;
    p.num_zeros = args->num_zeros;
    p.num_tokens_dev = args->num_tokens_dev;
    p.num_tokens = args->num_tokens;
    p.first_token = args->first_token;
    p.num_experts = args->num_experts;
    p.hidden = args->hidden;
    p.parts = epmoei_router_parts(args->hidden, args->num_experts);
    return args->dtype == EPMOE_BF16 ? launch<__nv_bfloat16>(p, stream) : launch<__half>(p, stream);
}
