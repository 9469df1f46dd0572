/* What the kernels that choose experts share: the steps of one row, from its logits to ids and weights. Up to 512
 * experts a row belongs to a warp or to a part of one, beyond to a block; its values stay in registers, and each round
 * of selection is a maximum over keys that order as the values do.
 *
 * Every step does the CPU's arithmetic operation for operation (no FMAs, the same exponential, sums in the same order),
 * so that both backends choose the same experts with the same weights; only SQRT_SOFTPLUS goes through log1pf, whose
 * last bit is each library's own. */
#ifndef EPMOEI_TOPK_CUDA_CUH
#define EPMOEI_TOPK_CUDA_CUH

#include "kernels/cuda_common.cuh"
#include "kernels/topk.h"

#include <float.h>
#include <math.h>

static const int kBlockValues = 8;  /* experts of one thread when a row has a block */
static const int kMaxWarps = 16;    /* EPMOE_MAX_EXPERTS / (32 * kBlockValues) */
static const int kMergeValues = 16; /* kMaxWarps * EPMOE_MAX_TOP_K / 32 */
static const int kSumLanes = 8;     /* partial sums of a softmax, as on the CPU */
static const uint32_t kAll = 0xFFFFFFFFu;

/* ------------------------------------------------------------------------------------------------------- values */

/* NaN counts as -inf, +inf as the largest finite number. */
__device__ __forceinline__ float tame(float x) { return x > FLT_MAX ? FLT_MAX : x >= -FLT_MAX ? x : -INFINITY; }

/* Keys order as the values do, -0 as 0. Key 0 lies below every value: padding, a dropped group, a taken expert. */
__device__ __forceinline__ uint32_t key_of(float value)
{
    uint32_t bits = __float_as_uint(__fadd_rn(value, 0.0f));
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float value_of(uint32_t key)
{
    return __uint_as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}

__device__ __forceinline__ float exp2_int(int32_t n) { return __uint_as_float(((uint32_t)n + 127u) << 23); }

/* epmoei_exp of kernels/activation.h. */
__device__ __forceinline__ float exp_as_cpu(float x)
{
    x = fmaxf(fminf(x, 89.0f), -104.0f);
    float shifted = __fadd_rn(__fmul_rn(x, 1.44269504f), 12582912.0f);
    int32_t n = (int32_t)(__float_as_uint(shifted) - 0x4B400000u);
    float rounded = __fsub_rn(shifted, 12582912.0f);
    float r = __fadd_rn(__fsub_rn(x, __fmul_rn(rounded, 0.693359375f)), __fmul_rn(rounded, 2.12194440e-4f));
    float p = 1.0f / 5040;
    p = __fadd_rn(__fmul_rn(p, r), 1.0f / 720);
    p = __fadd_rn(__fmul_rn(p, r), 1.0f / 120);
    p = __fadd_rn(__fmul_rn(p, r), 1.0f / 24);
    p = __fadd_rn(__fmul_rn(p, r), 1.0f / 6);
    p = __fadd_rn(__fmul_rn(p, r), 0.5f);
    p = __fadd_rn(__fadd_rn(__fmul_rn(p, __fmul_rn(r, r)), r), 1.0f);
    int32_t half = n >> 1;
    return __fmul_rn(__fmul_rn(p, exp2_int(half)), exp2_int(n - half));
}

/* What a row's softmax needs besides the logit. */
struct softmax_t {
    float top; /* -inf: every score is 0 */
    float sum;
};

__device__ __forceinline__ float softmax_term(float logit, float top)
{
    return top == -INFINITY ? 0.0f : exp_as_cpu(__fsub_rn(logit, top));
}

__device__ __forceinline__ float score_of(epmoe_scoring_t scoring, float logit, softmax_t softmax)
{
    switch (scoring) {
    case EPMOE_SCORING_SOFTMAX:
        return softmax.top == -INFINITY ? 0.0f : __fdiv_rn(softmax_term(logit, softmax.top), softmax.sum);
    case EPMOE_SCORING_SIGMOID: return __fdiv_rn(1.0f, __fadd_rn(1.0f, exp_as_cpu(-logit)));
    case EPMOE_SCORING_SQRT_SOFTPLUS:
        return __fsqrt_rn(__fadd_rn(fmaxf(logit, 0.0f), log1pf(exp_as_cpu(-fabsf(logit)))));
    default: return logit;
    }
}

/* --------------------------------------------------------------------------------------------------------- loads */

template <typename T> __device__ __forceinline__ float load_logit(const void *logits, int64_t at)
{
    return tame(epmoei_to_float(((const T *)logits)[at]));
}

__device__ __forceinline__ float load_logit(const epmoe_topk_args_t &args, int64_t at)
{
    switch (args.logits_dtype) {
    case EPMOE_BF16: return load_logit<__nv_bfloat16>(args.logits, at);
    case EPMOE_F16: return load_logit<__half>(args.logits, at);
    default: return load_logit<float>(args.logits, at);
    }
}

template <typename T, int kCount> struct __align__(kCount * sizeof(T)) part_t { T element[kCount]; };

/* values[i] = run[i] for i < count, `other` beyond; in vectors where the address allows, which a row stride may not. */
template <typename T, int kValues>
__device__ __forceinline__ void load_run(const T *run, int32_t count, float other, float (&values)[kValues])
{
    constexpr int kBytes = kValues * (int)sizeof(T) < 16 ? kValues * (int)sizeof(T) : 16;
    constexpr int kPart = kBytes / (int)sizeof(T);
    if (count >= kValues && ((uintptr_t)run & (kBytes - 1)) == 0) {
#pragma unroll
        for (int first = 0; first < kValues; first += kPart) {
            part_t<T, kPart> part = *(const part_t<T, kPart> *)(run + first);
#pragma unroll
            for (int i = 0; i < kPart; i++) values[first + i] = epmoei_to_float(part.element[i]);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < kValues; i++) values[i] = i < count ? epmoei_to_float(run[i]) : other;
}

template <int kValues>
__device__ __forceinline__ void load_logits(const epmoe_topk_args_t &args, int64_t at, int32_t count,
                                            float (&logits)[kValues])
{
    switch (args.logits_dtype) {
    case EPMOE_BF16: load_run((const __nv_bfloat16 *)args.logits + at, count, -INFINITY, logits); break;
    case EPMOE_F16: load_run((const __half *)args.logits + at, count, -INFINITY, logits); break;
    default: load_run((const float *)args.logits + at, count, -INFINITY, logits);
    }
#pragma unroll
    for (int i = 0; i < kValues; i++) logits[i] = tame(logits[i]);
}

/* ------------------------------------------------------------------------------------------- steps of a row's team */

/* A team is the threads of one row: kLanes of a warp, or the whole block when kLanes is 0. */
template <int kLanes> __device__ __forceinline__ void team_sync()
{
    if (kLanes == 0)
        __syncthreads();
    else
        __syncwarp();
}

/* Over the kLanes of a warp. */
template <int kLanes> __device__ __forceinline__ uint32_t lanes_max(uint32_t key)
{
    if constexpr (kLanes == 32)
        return __reduce_max_sync(kAll, key);
    else {
#pragma unroll
        for (int step = 1; step < kLanes; step *= 2) key = max(key, __shfl_xor_sync(kAll, key, step));
        return key;
    }
}

template <int kLanes> __device__ __forceinline__ uint32_t team_max(uint32_t key)
{
    if constexpr (kLanes > 0)
        return lanes_max<kLanes>(key);
    else {
        __shared__ uint32_t warp_keys[kMaxWarps];
        key = lanes_max<32>(key);
        if (threadIdx.x % 32 == 0) warp_keys[threadIdx.x / 32] = key;
        __syncthreads();
        key = warp_keys[0];
        for (uint32_t warp = 1; warp < blockDim.x / 32; warp++) key = max(key, warp_keys[warp]);
        return key;
    }
}

/* The terms of the softmax in the CPU's order: expert e to sum e mod 8 by ascending e, then those by ascending sum.
 * values: a float per expert of the team; tail: kSumLanes floats. */
template <int kLanes, int kValues>
__device__ __forceinline__ float team_sum(const float (&terms)[kValues], int32_t num_experts, int32_t thread,
                                          int32_t threads, float *values, float *tail)
{
    float sum = 0.0f;
    if constexpr (kLanes == 1 || kLanes == 4) {
        static_assert(kValues == kSumLanes, "value i of each lane belongs to sum i");
#pragma unroll
        for (int i = 0; i < kValues; i++) {
            float part = 0.0f;
#pragma unroll
            for (int lane = 0; lane < kLanes; lane++)
                part = __fadd_rn(part, kLanes == 1 ? terms[i] : __shfl_sync(kAll, terms[i], lane, kLanes));
            sum = __fadd_rn(sum, part);
        }
    } else {
#pragma unroll
        for (int i = 0; i < kValues; i++) values[thread * kValues + i] = terms[i];
        team_sync<kLanes>();
        if (thread < kSumLanes) {
            float part = 0.0f;
#pragma unroll 8
            for (int32_t e = thread; e < num_experts; e += kSumLanes) part = __fadd_rn(part, values[e]);
            tail[thread] = part;
        }
        team_sync<kLanes>();
#pragma unroll
        for (int i = 0; i < kSumLanes; i++) sum = __fadd_rn(sum, tail[i]);
    }
    return sum;
}

/* Drops the experts of all but the topk_group best groups: their keys become 0. `candidates` are what groups are
 * judged by. values: a float per expert of the team; scores: one per group. */
template <int kLanes, int kValues>
__device__ __forceinline__ void keep_groups(const epmoe_topk_args_t &args, const float (&candidates)[kValues],
                                            uint32_t (&keys)[kValues], int32_t thread, int32_t threads, float *values,
                                            float *scores)
{
    int32_t groups = args.n_group, size = args.num_experts / groups, first = thread * kValues;
    bool top2 = args.group_score == EPMOE_GROUP_SCORE_TOP2 && size > 1;
    /* Where a thread's experts share a group, only its two best go through shared memory. */
    bool pairs = kValues > 1 && size % kValues == 0;
    if (pairs) {
        float best = -INFINITY, second = -INFINITY;
#pragma unroll
        for (int i = 0; i < kValues; i++) {
            second = fmaxf(second, fminf(best, candidates[i]));
            best = fmaxf(best, candidates[i]);
        }
        *(float2 *)&values[2 * thread] = make_float2(best, second);
    } else {
#pragma unroll
        for (int i = 0; i < kValues; i++) values[first + i] = candidates[i];
    }
    team_sync<kLanes>();
    int32_t pieces = pairs ? size / kValues : size;
    for (int32_t g = thread; g < groups; g += threads) {
        float best = -INFINITY, second = -INFINITY;
        int32_t at = g % pieces; /* not all from 0, so that threads meet different banks */
        for (int32_t i = 0; i < pieces; i++) {
            int32_t piece = g * pieces + at;
            float2 pair = pairs ? *(const float2 *)&values[2 * piece] : make_float2(values[piece], -INFINITY);
            second = fmaxf(fmaxf(second, pair.y), fminf(best, pair.x));
            best = fmaxf(best, pair.x);
            at = at + 1 == pieces ? 0 : at + 1;
        }
        scores[g] = top2 ? __fadd_rn(best, second) : best;
    }
    team_sync<kLanes>();
    float *kept = values;
    for (int32_t g = thread; g < groups; g += threads) {
        float score = scores[g];
        int32_t better = 0;
        for (int32_t other = 0; other < groups; other++)
            better += scores[other] > score || (scores[other] == score && other < g);
        kept[g] = better < args.topk_group ? 1.0f : 0.0f;
    }
    team_sync<kLanes>();
    int32_t group = first / size, left = size - first % size;
#pragma unroll
    for (int i = 0; i < kValues; i++) {
        if (group < groups && kept[group] == 0.0f) keys[i] = 0;
        if (--left == 0) {
            group++;
            left = size;
        }
    }
    team_sync<kLanes>();
}

/* From the logits of a thread's `count` experts (-inf beyond) to their keys: 0 where there is no expert, or where its
 * group is dropped. */
template <int kLanes, int kValues>
__device__ __forceinline__ softmax_t prepare(const epmoe_topk_args_t &args, const float (&logits)[kValues],
                                             int32_t count, int32_t thread, int32_t threads, float *values, float *tail,
                                             uint32_t (&keys)[kValues])
{
    int32_t first = thread * kValues;
    float scores[kValues], biases[kValues];
    if (args.selection_bias) load_run(args.selection_bias + first, count, 0.0f, biases);

    softmax_t softmax = {};
    if (args.scoring == EPMOE_SCORING_SOFTMAX) {
        uint32_t top = 0;
#pragma unroll
        for (int i = 0; i < kValues; i++) top = max(top, key_of(logits[i]));
        softmax.top = value_of(team_max<kLanes>(top));
#pragma unroll
        for (int i = 0; i < kValues; i++) scores[i] = softmax_term(logits[i], softmax.top);
        softmax.sum = team_sum<kLanes>(scores, args.num_experts, thread, threads, values, tail);
    }
    bool grouped = args.topk_group < args.n_group;
    bool by_logit = args.scoring == EPMOE_SCORING_SOFTMAX && !args.selection_bias;
    bool judge_score = by_logit && args.group_score == EPMOE_GROUP_SCORE_TOP2;
#pragma unroll
    for (int i = 0; i < kValues; i++) {
        float value = logits[i], score = value;
        if (args.scoring != EPMOE_SCORING_SOFTMAX)
            score = score_of(args.scoring, logits[i], softmax);
        else if (!by_logit || (grouped && judge_score))
            score = softmax.top == -INFINITY ? 0.0f : __fdiv_rn(scores[i], softmax.sum);
        if (!by_logit && logits[i] != -INFINITY) value = score;
        if (args.selection_bias) value = tame(__fadd_rn(value, tame(biases[i])));
        keys[i] = i < count ? key_of(value) : 0;
        scores[i] = judge_score && logits[i] != -INFINITY ? score : value;
    }
    if (grouped) keep_groups<kLanes>(args, scores, keys, thread, threads, values, tail);
    return softmax;
}

/* ----------------------------------------------------------------------------------------------- selection in a warp
 */

/* Takes the best of the lanes' keys, the lower place of equals: value i of a lane has place lane * kValues + i. */
template <int kLanes, int kValues>
__device__ __forceinline__ int32_t take_best(uint32_t (&keys)[kValues], int32_t lane, uint32_t *best_key)
{
    int32_t first = lane * kValues, place = INT32_MAX;
    uint32_t best = keys[0];
#pragma unroll
    for (int i = 1; i < kValues; i++) best = max(best, keys[i]);
    best = lanes_max<kLanes>(best);
#pragma unroll
    for (int i = kValues - 1; i >= 0; i--) place = keys[i] == best ? first + i : place;
    if constexpr (kLanes == 32)
        place = __reduce_min_sync(kAll, place);
    else {
#pragma unroll
        for (int step = 1; step < kLanes; step *= 2) place = min(place, __shfl_xor_sync(kAll, place, step));
    }
#pragma unroll
    for (int i = 0; i < kValues; i++) keys[i] = first + i == place ? 0 : keys[i];
    *best_key = best;
    return place;
}

/* Rank j of a selection lies in lane j % kLanes, slot j / kLanes. */
template <int kLanes, int kValues> struct slots_t {
    static constexpr int kMost = kLanes * kValues < EPMOE_MAX_TOP_K ? kLanes * kValues : EPMOE_MAX_TOP_K;
    static constexpr int kCount = (kMost + kLanes - 1) / kLanes;
};

template <int kLanes, int kValues, int kSlots>
__device__ __forceinline__ void select_best(uint32_t (&keys)[kValues], int32_t lane, int32_t top_k,
                                            int32_t (&places)[kSlots], uint32_t (&best_keys)[kSlots])
{
#pragma unroll
    for (int s = 0; s < kSlots; s++) {
        places[s] = 0;
        best_keys[s] = 0;
#pragma unroll 1
        for (int32_t turn = 0; turn < kLanes && s * kLanes + turn < top_k; turn++) {
            uint32_t key;
            int32_t place = take_best<kLanes>(keys, lane, &key);
            if (lane == turn) {
                places[s] = place;
                best_keys[s] = key;
            }
        }
    }
}

/* From the chosen ids and their logits (-inf where there is none) to weights, which put(rank, id, weight) takes where
 * the row is valid; the sum runs by ascending rank, as on the CPU. */
template <int kLanes, int kSlots, typename Put>
__device__ __forceinline__ void weigh(const epmoe_topk_args_t &args, bool valid, int32_t lane, softmax_t softmax,
                                      const int32_t (&ids)[kSlots], const float (&logits)[kSlots], Put put)
{
    int32_t top_k = args.top_k;
    bool over_chosen = args.scoring == EPMOE_SCORING_TOPK_SOFTMAX;
    float weights[kSlots];
#pragma unroll
    for (int s = 0; s < kSlots; s++) weights[s] = over_chosen ? logits[s] : score_of(args.scoring, logits[s], softmax);
    if (over_chosen) {
        uint32_t top = 0;
#pragma unroll
        for (int s = 0; s < kSlots; s++) top = max(top, key_of(weights[s]));
        float top_logit = value_of(lanes_max<kLanes>(top));
#pragma unroll
        for (int s = 0; s < kSlots; s++) weights[s] = softmax_term(weights[s], top_logit);
    }
    float sum = 0.0f;
#pragma unroll
    for (int s = 0; s < kSlots; s++)
        for (int32_t turn = 0; turn < kLanes && s * kLanes + turn < top_k; turn++)
            sum = __fadd_rn(sum, __shfl_sync(kAll, weights[s], turn, kLanes));
    bool divide = args.renormalize || over_chosen;
#pragma unroll
    for (int s = 0; s < kSlots; s++) {
        int32_t rank = s * kLanes + lane;
        if (!valid || rank >= top_k) continue;
        float share = !divide ? weights[s] : sum < FLT_MIN ? 0.0f : __fdiv_rn(weights[s], sum);
        put(rank, ids[s], fmaxf(fminf(__fmul_rn(share, args.scale), FLT_MAX), -FLT_MAX));
    }
}

/* The same to the outputs. */
template <int kLanes, int kSlots>
__device__ __forceinline__ void weigh(const epmoe_topk_args_t &args, int64_t row, bool valid, int32_t lane,
                                      softmax_t softmax, const int32_t (&ids)[kSlots], const float (&logits)[kSlots])
{
    weigh<kLanes>(args, valid, lane, softmax, ids, logits, [&](int32_t rank, int32_t id, float weight) {
        args.ids[row * args.top_k + rank] = id;
        args.weights[row * args.top_k + rank] = weight;
    });
}

/* A block per row: each warp selects its k best, then the first warp the k best of those, one per lane. A lower warp
 * has the lower experts, so that places order equals as ids do. shared: 2 words for each of the warps' candidates. All
 * threads call; the result is the first warp's. */
__device__ __forceinline__ void select_in_block(uint32_t (&keys)[kBlockValues], int32_t top_k, uint32_t *shared,
                                                int32_t (&ids)[1])
{
    int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t best_keys[1];
    int32_t places[1];
    select_best<32>(keys, lane, top_k, places, best_keys);
    uint32_t *candidate_keys = shared;
    int32_t candidates = (int32_t)(blockDim.x / 32) * top_k;
    int32_t *candidate_ids = (int32_t *)shared + candidates;
    if (lane < top_k) {
        candidate_keys[warp * top_k + lane] = best_keys[0];
        candidate_ids[warp * top_k + lane] = warp * 32 * kBlockValues + places[0];
    }
    __syncthreads();
    if (warp > 0) return;

    uint32_t merged[kMergeValues];
#pragma unroll
    for (int i = 0; i < kMergeValues; i++) {
        int32_t place = lane * kMergeValues + i;
        merged[i] = place < candidates ? candidate_keys[place] : 0;
    }
    select_best<32>(merged, lane, top_k, places, best_keys);
    ids[0] = candidate_ids[places[0]];
}

#endif
