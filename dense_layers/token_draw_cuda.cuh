/* Draws of a token on a device, with the numbers of token_weight.h: a block has the whole row, its warps add up pieces
 * of it, and the piece in which the running sum passes the target is gone through once more. */
#ifndef EPMOEI_TOKEN_DRAW_CUDA_CUH
#define EPMOEI_TOKEN_DRAW_CUDA_CUH

#include "kernels/launch_cuda.cuh"
#include "kernels/parts_cuda.cuh"

namespace
{

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kPiece = 1024; /* tokens */
constexpr int kMostPieces = EPMOE_MAX_VOCAB / kPiece;
constexpr float kTokenOne = 0x1p40f;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

/* ---------------------------------------------------------------------------------------------------------- numbers */

/* epmoei_exp of a number, each operation rounded as on the CPU, which forms no FMAs. */
__device__ __forceinline__ float exp_as_cpu(float x)
{
    x = x > 89.0f ? 89.0f : x;
    x = x < -104.0f ? -104.0f : x;
    const float shifted = __fadd_rn(__fmul_rn(x, 1.44269504f), 12582912.0f);
    const int32_t n = (int32_t)(__float_as_uint(shifted) - 0x4B400000u), half = n >> 1;
    const float rounded = __fsub_rn(shifted, 12582912.0f);
    const float r = __fadd_rn(__fsub_rn(x, __fmul_rn(rounded, 0.693359375f)), __fmul_rn(rounded, 2.12194440e-4f));
    float p = 1.0f / 5040;
    p = __fadd_rn(__fmul_rn(p, r), 1.0f / 720);
    p = __fadd_rn(__fmul_rn(p, r), 1.0f / 120);
    p = __fadd_rn(__fmul_rn(p, r), 1.0f / 24);
    p = __fadd_rn(__fmul_rn(p, r), 1.0f / 6);
    p = __fadd_rn(__fmul_rn(p, r), 0.5f);
    p = __fadd_rn(__fadd_rn(__fmul_rn(p, __fmul_rn(r, r)), r), 1.0f);
    p = __fmul_rn(p, __uint_as_float((uint32_t)(half + 127) << 23));
    return __fmul_rn(p, __uint_as_float((uint32_t)(n - half + 127) << 23));
}

/* epmoei_tame_logit, epmoei_logit_weight, epmoei_probability_weight, epmoei_share_up, epmoei_draw_target. */
__device__ __forceinline__ float tame_logit(float logit)
{
    if (logit != logit) return -INFINITY;
    return __fadd_rn(logit > 3.402823466e38f ? 3.402823466e38f : logit, 0.0f);
}

__device__ __forceinline__ int64_t logit_weight(float logit, float top, float temperature)
{
    return (int64_t)__fmul_rn(exp_as_cpu(__fdiv_rn(__fsub_rn(logit, top), temperature)), kTokenOne);
}

__device__ __forceinline__ float tame_probability(float p) { return p > 1.0f ? 1.0f : p > 0.0f ? p : 0.0f; }

__device__ __forceinline__ int64_t probability_weight(float p, float taken)
{
    const float rest = __fsub_rn(tame_probability(p), tame_probability(taken));
    return (int64_t)__fmul_rn(rest > 0.0f ? rest : 0.0f, kTokenOne);
}

__device__ __forceinline__ int64_t share_up(float fraction, int64_t total)
{
    const double share = ceil(__dmul_rn((double)fraction, (double)total));
    return share < 1 ? 1 : share > (double)total ? total : (int64_t)share;
}

__device__ __forceinline__ int64_t draw_target(float uniform, int64_t total)
{
    const int64_t target = (int64_t)__dmul_rn((double)uniform, (double)total);
    return target < 0 ? 0 : target < total ? target : total - 1;
}

/* ----------------------------------------------------------------------------------------------------- over the block
 */

__device__ __forceinline__ int64_t sum_of_warp(int64_t x)
{
#pragma unroll
    for (int offset = 16; offset; offset /= 2) x += __shfl_xor_sync(kAllLanes, x, offset);
    return x;
}

/* In every thread; every thread of the block calls them. scratch [kWarps]. */
__device__ __forceinline__ int64_t sum_of_block(int64_t x, int64_t *scratch)
{
    x = sum_of_warp(x);
    __syncthreads(); /* the scratch has been read */
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0;
#pragma unroll
    for (int i = 0; i < kWarps; i++) x += scratch[i];
    return x;
}

__device__ __forceinline__ uint64_t max_of_block(uint64_t x, int64_t *scratch)
{
#pragma unroll
    for (int offset = 16; offset; offset /= 2) {
        const uint64_t other = __shfl_xor_sync(kAllLanes, x, offset);
        x = other > x ? other : x;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = (int64_t)x;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kWarps; i++) x = (uint64_t)scratch[i] > x ? (uint64_t)scratch[i] : x;
    return x;
}

/* Shared memory of a draw. */
struct draw_t {
    int64_t sums[kMostPieces];
    int64_t scratch[kWarps];
    int32_t token;
};

/* The sums of all pieces; returns their sum, in every thread. weigh(first, w) gives the weights of tokens first ..
 * first + 3, 0 behind the vocabulary. Every thread of the block calls it. */
template <typename Weigh> __device__ __forceinline__ int64_t add_pieces(draw_t *draw, int32_t vocab, Weigh weigh)
{
    const int32_t lane = threadIdx.x % 32;
    int64_t all = 0;
    for (int32_t piece = threadIdx.x / 32; piece * kPiece < vocab; piece += kWarps) {
        int64_t sum = 0;
#pragma unroll 4
        for (int i = 0; i < kPiece / 128; i++) {
            int64_t w[4];
            weigh(piece * kPiece + i * 128 + lane * 4, w);
            sum += w[0] + w[1] + w[2] + w[3];
        }
        sum = sum_of_warp(sum);
        if (lane == 0) {
            draw->sums[piece] = sum;
            all += sum;
        }
    }
    return sum_of_block(all, draw->scratch); /* which also makes the sums visible */
}

/* Of x over the lanes below. */
__device__ __forceinline__ int64_t sum_below(int64_t x)
{
    const int32_t lane = threadIdx.x % 32;
    int64_t sum = x;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const int64_t other = __shfl_up_sync(kAllLanes, sum, offset);
        if (lane >= offset) sum += other;
    }
    return sum - x;
}

/* The first token at which the running sum exceeds `target`, which is below the sum of all; in every thread. */
template <typename Weigh>
__device__ __forceinline__ int32_t find_token(draw_t *draw, int32_t vocab, int64_t target, Weigh weigh)
{
    if (threadIdx.x < 32) {
        const int32_t lane = threadIdx.x, pieces = (vocab + kPiece - 1) / kPiece, each = (pieces + 31) / 32;
        int64_t own = 0;
        for (int32_t i = 0; i < each && lane * each + i < pieces; i++) own += draw->sums[lane * each + i];
        int64_t before = sum_below(own);
        int32_t piece = 0;
        const bool here = before <= target && before + own > target;
        if (here)
            for (piece = lane * each; before + draw->sums[piece] <= target; piece++) before += draw->sums[piece];
        const int32_t source = __ffs((int)__ballot_sync(kAllLanes, here)) - 1;
        piece = __shfl_sync(kAllLanes, piece, source);
        before = __shfl_sync(kAllLanes, before, source);
        for (int i = 0; i < kPiece / 128; i++) {
            const int32_t first = piece * kPiece + i * 128 + lane * 4;
            int64_t w[4];
            weigh(first, w);
            own = w[0] + w[1] + w[2] + w[3];
            int64_t running = before + sum_below(own);
            if (running <= target && running + own > target) {
                int32_t j = 0;
                for (; j < 3 && running + w[j] <= target; j++) running += w[j];
                draw->token = first + j;
            }
            before += sum_of_warp(own);
        }
    }
    __syncthreads();
    const int32_t token = draw->token;
    __syncthreads();
    return token;
}

/* Four neighbours of a row that has `count`; `rest` behind it. vector: the row is aligned to four elements. */
template <typename T>
__device__ __forceinline__ void load_four(float (&values)[4], const T *row, int32_t first, int32_t count, bool vector,
                                          float rest)
{
    if (vector && first + 4 <= count) {
        epmoei_load_floats_of(values, row + first);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) values[i] = first + i < count ? epmoei_to_float(row[first + i]) : rest;
}

} // namespace

#endif
