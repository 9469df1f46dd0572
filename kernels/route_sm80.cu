/* Routing in two or three launches: the router's product in parts (router_gemm_sm80.cu); the choice, which adds a row's
 * parts while it loads the row (topk_cuda.cuh); and the slots' order by expert. SPARSE_MIXER has one more behind the
 * choice.
 *
 * The order: a token takes an expert once at most, so that a bit per token and expert says everything. Bits are set in
 * shared memory in any order; a slot's rank within its expert is the number of set bits before its own, and the slots
 * stand in order whatever the threads did first. A few tokens have one block, which chooses and orders. More are cut
 * into groups: the choice counts each group's slots per expert, and a block per group then knows from the counts where
 * its slots begin. Sums of integers do not depend on their order.
 *
 * What a few tokens cost is latency, a good part of it that of fetching code that has left the caches. So the choice
 * goes through its code once, for no row, while the product is still under way. */
#include "kernels/launch_cuda.cuh"
#include "kernels/route.h"
#include "kernels/router_gemm.h"
#include "kernels/topk_cuda.cuh"
#include "kernels/topk_mixer_cuda.cuh"

/* The most threads of a block that chooses and orders: a warp per row, a thread per expert. Beyond 256 experts a thread
 * needs more registers. */
static const int kSingleThreads = 512;
static const int kWideSingleThreads = 384;
static const int kRowThreads = 128; /* of a block that only chooses */
static const int kPlaceThreads = 512;
static const int kCountLanes = 32; /* the most threads that share an expert's counts */
static_assert(kPlaceThreads >= EPMOEI_ROUTE_ALIGN_EXPERTS, "the order has a thread per expert");
static_assert(kSingleThreads <= 32 * 32, "one word of tokens");

struct route_params_t {
    epmoe_topk_args_t topk; /* of these rows; logits: what replaces the router's, or NULL */
    int32_t slots;          /* of a token: k, or k+1 with the shared expert's */
    int32_t *joined_ids;    /* [T,k+1] or NULL */
    float *joined_weights;
    int32_t first_token;   /* of these rows among those that num_tokens_dev counts */
    const float *partials; /* [num_parts,T,row_stride] */
    epmoei_router_parts_t parts;
    const float *bias;
    float *logits;
    bool rehearses;   /* goes through the code before the product has ended; reads no more than the
                       * selection bias, which was there before the product began */
    uint32_t *counts; /* NULL = none; [groups,stride]: two experts a word; 0 before */
    epmoei_route_groups_t groups;
    bool single; /* the one block orders too */
    int32_t *sorted_ids;
    int32_t *num_post_padded;
    int32_t *expert_offsets;
    int32_t *places; /* NULL = not wanted */
};

/* ---------------------------------------------------------------------------------------------------------- rows */

__device__ __forceinline__ int32_t route_tokens(const route_params_t &p)
{
    return epmoei_device_tokens(p.topk.num_tokens_dev, p.first_token + p.topk.num_tokens) - p.first_token;
}

/* The router's own logits of a thread's `count` experts from `first` on; 0 beyond. Here and below a count may be
 * negative, which is none. */
template <int kValues>
__device__ __forceinline__ void add_parts(const route_params_t &p, int64_t row, int32_t first, int32_t count,
                                          float (&logits)[kValues])
{
    constexpr int kWidth = kValues < 4 ? kValues : 4, kVectors = kValues / kWidth;
    constexpr int kBatch = kValues == 4 || kValues == 16 ? 4 : 8; /* loads under way at a time */
    using vector_t = part_t<float, kWidth>;
    static_assert(EPMOEI_ROUTER_MAX_PARTS % kBatch == 0, "batches cover the parts");
    const int64_t stride = (int64_t)p.topk.num_tokens * p.parts.row_stride;
    const float *from = p.partials + row * p.parts.row_stride + first;
#pragma unroll
    for (int i = 0; i < kValues; i++) logits[i] = 0.0f;
    const int32_t parts = count > 0 ? p.parts.num_parts : 0; /* not a branch: the rehearsal is to pass here too */
#pragma unroll 1
    for (int32_t base = 0; base < p.parts.num_parts; base += kBatch) {
        vector_t vectors[kBatch][kVectors];
        /* A part that does not exist adds 0, which changes nothing: no sum that began at 0 is -0. */
#pragma unroll
        for (int i = 0; i < kBatch; i++)
#pragma unroll
            for (int v = 0; v < kVectors; v++)
                vectors[i][v] =
                    base + i < parts ? *(const vector_t *)(from + (base + i) * stride + v * kWidth) : vector_t{};
#pragma unroll
        for (int i = 0; i < kBatch; i++)
#pragma unroll
            for (int j = 0; j < kValues; j++)
                logits[j] = __fadd_rn(logits[j], vectors[i][j / kWidth].element[j % kWidth]);
    }
    if (!p.bias) return;
    float biases[kValues];
    load_run(p.bias + first, count, 0.0f, biases);
#pragma unroll
    for (int i = 0; i < kValues; i++) logits[i] = __fadd_rn(logits[i], biases[i]);
}

template <int kValues>
__device__ __forceinline__ void store_logits(float *to, int32_t count, const float (&logits)[kValues])
{
    /* Not ==: for a count clamped to 0..kValues ptxas 13.0 takes that from a predicate of VIMNMX.RELU, which is also
     * set where 0 won. */
    if (kValues % 4 == 0 && count >= kValues && ((uintptr_t)to & 15) == 0) {
#pragma unroll
        for (int i = 0; i + 3 < kValues; i += 4)
            *(float4 *)(to + i) = make_float4(logits[i], logits[i + 1], logits[i + 2], logits[i + 3]);
        return;
    }
#pragma unroll
    for (int i = 0; i < kValues; i++)
        if (i < count) to[i] = logits[i];
}

/* The logits of a thread's `count` experts as topk_cuda.cuh wants them, also left in stash[first..]. A row that is not
 * valid is neither read nor written, and counts as 0 throughout. */
template <int kValues>
__device__ __forceinline__ void load_row(const route_params_t &p, int64_t row, bool valid, int32_t first, int32_t count,
                                         float *stash, float (&logits)[kValues])
{
    const int64_t at = row * p.topk.num_experts + first;
    const int32_t present = valid ? count : 0;
    add_parts(p, row, first, present, logits);
    if (p.logits) store_logits(p.logits + at, present, logits);
    if (p.topk.logits) load_run((const float *)p.topk.logits + at, present, 0.0f, logits);
#pragma unroll
    for (int i = 0; i < kValues; i++) logits[i] = i < count ? tame(logits[i]) : -INFINITY;
#pragma unroll
    for (int i = 0; i < kValues; i++) stash[first + i] = logits[i];
}

/* The slots of a row as the experts take them, the shared expert's the last; a lane each. */
__device__ __forceinline__ void join(const route_params_t &p, int64_t row, int32_t rank, int32_t id, float weight)
{
    p.joined_ids[row * p.slots + rank] = id;
    p.joined_weights[row * p.slots + rank] = weight;
}

/* A warp's chosen ids and their logits to all outputs: lane is rank. */
__device__ __forceinline__ void weigh_row(const route_params_t &p, int64_t row, bool valid, int32_t lane,
                                          softmax_t softmax, const int32_t (&ids)[1], const float (&chosen)[1])
{
    const int32_t top_k = p.topk.top_k;
    weigh<32>(p.topk, valid, lane, softmax, ids, chosen, [&](int32_t rank, int32_t id, float weight) {
        p.topk.ids[row * top_k + rank] = id;
        p.topk.weights[row * top_k + rank] = weight;
        if (p.joined_ids) join(p, row, rank, id, weight);
    });
    if (p.joined_ids && valid && lane == top_k) join(p, row, lane, p.topk.num_experts, 1.0f);
}

/* A warp's row, or none: ids[0] is the expert of rank `lane`. stash: team_floats of shared memory. */
template <int kValues>
__device__ __forceinline__ void choose_row(const route_params_t &p, int64_t row, bool valid, int32_t lane, float *stash,
                                           int32_t (&ids)[1])
{
    float *values = stash + 32 * kValues;
    float logits[kValues];
    uint32_t keys[kValues], best_keys[1];
    int32_t count = min(kValues, p.topk.num_experts - lane * kValues);
    load_row(p, row, valid, lane * kValues, count, stash, logits);
    softmax_t softmax = prepare<32>(p.topk, logits, count, lane, 32, values, values + 32 * kValues, keys);
    select_best<32>(keys, lane, p.topk.top_k, ids, best_keys);
    __syncwarp();
    float chosen[1] = {lane < p.topk.top_k ? stash[ids[0]] : -INFINITY};
    weigh_row(p, row, valid, lane, softmax, ids, chosen);
    __syncwarp();
}

/* --------------------------------------------------------------------------------------------------------- order */

/* Slots, places and what a loop over them steps beyond are int32 here: epmoei_route_aligns takes no group above 2^14
 * tokens, and there are 2^7 groups at most. So there are 2^21 tokens and, of EPMOE_MAX_TOP_K slots each, 2^26 slots at
 * most, and 2^16 threads in all. */

/* Sum over the threads below. All threads call; *total is the sum over all. */
__device__ __forceinline__ int32_t scan_block(int32_t own, int32_t *total)
{
    __shared__ int32_t warp_sums[32];
    int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        int32_t other = __shfl_up_sync(kAll, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    int32_t warp_sum = lane < (int32_t)blockDim.x / 32 ? warp_sums[lane] : 0;
    *total = __reduce_add_sync(kAll, warp_sum);
    return __reduce_add_sync(kAll, lane < warp ? warp_sum : 0) + sum - own;
}

/* The shared expert comes behind all others and has every token once, so that its places need no counts. */
__device__ __forceinline__ bool is_joined(const route_params_t &p) { return p.slots > p.topk.top_k; }

/* Where the thread's expert begins among all slots, from its number of slots; one block leaves that as the outputs. */
__device__ __forceinline__ int32_t begin_expert(const route_params_t &p, int32_t count, int32_t tokens)
{
    const int32_t thread = threadIdx.x, experts = p.topk.num_experts;
    int32_t total, begin = scan_block(count, &total);
    if (blockIdx.x > 0) return begin;
    if (thread < experts) p.expert_offsets[thread] = begin;
    if (thread == 0) {
        p.expert_offsets[experts] = total;
        if (is_joined(p)) p.expert_offsets[experts + 1] = total += tokens;
        *p.num_post_padded = total;
    }
    return begin;
}

__device__ __forceinline__ void place_slot(const route_params_t &p, int32_t slot, int32_t place)
{
    p.sorted_ids[place] = slot;
    if (p.places) p.places[slot] = place;
}

/* The places of slots that do not exist; all blocks together. */
__device__ __forceinline__ void pad_order(const route_params_t &p, int32_t tokens)
{
    const int32_t worst = p.topk.num_tokens * p.slots, threads = gridDim.x * blockDim.x;
    for (int32_t at = tokens * p.slots + blockIdx.x * blockDim.x + threadIdx.x; at < worst; at += threads)
        p.sorted_ids[at] = worst;
}

/* The only block: a thread holds one slot, if any, whose bits are set behind a barrier. places: one per expert. */
__device__ __forceinline__ void order_single(const route_params_t &p, const uint32_t *bits, int32_t *places,
                                             int32_t tokens, int32_t token, int32_t expert)
{
    const int32_t thread = threadIdx.x, experts = p.topk.num_experts, rank = thread % 32, top_k = p.topk.top_k;
    int32_t begin = begin_expert(p, thread < experts ? __popc(bits[thread]) : 0, tokens);
    if (thread < experts) places[thread] = begin;
    __syncthreads();
    if (token < tokens && rank < top_k)
        place_slot(p, token * p.slots + rank, places[expert] + __popc(bits[expert] & ((1u << token) - 1)));
    if (token < tokens && rank == top_k && is_joined(p)) place_slot(p, token * p.slots + rank, tokens * top_k + token);
    pad_order(p, tokens);
}

struct place_shared_t {
    uint32_t *bits;  /* [words,E]: bit t%32 of word t/32 says that token t of the group takes the expert */
    int32_t *totals; /* [lanes,stride*2]: slots of some groups; then the same of those before the own */
    int32_t *places; /* [E]: where the group's slots of an expert begin */
    int32_t columns; /* of eight experts */
    int32_t lanes;
    int32_t words;
};

static __host__ __device__ __forceinline__ place_shared_t place_shared(const epmoei_route_groups_t &groups,
                                                                       int32_t num_experts, char *base)
{
    place_shared_t shared;
    shared.columns = groups.stride / 4;
    shared.lanes = kPlaceThreads / shared.columns < kCountLanes ? kPlaceThreads / shared.columns : kCountLanes;
    shared.words = 1 << (groups.shift - 5);
    shared.totals = (int32_t *)base;
    shared.places = shared.totals + 2 * shared.lanes * shared.columns * 8;
    shared.bits = (uint32_t *)(shared.places + num_experts);
    return shared;
}

static int64_t place_shared_bytes(const epmoei_route_groups_t &groups, int32_t num_experts)
{
    place_shared_t shared = place_shared(groups, num_experts, NULL);
    return ((int64_t)2 * shared.lanes * shared.columns * 8 + num_experts + (int64_t)shared.words * num_experts) * 4;
}

/* A thread's share of the counts into shared.totals: of all groups, and of those before `group`. */
__device__ __forceinline__ void add_counts(const route_params_t &p, const place_shared_t &shared, int32_t num_groups,
                                           int32_t group)
{
    const int32_t column = threadIdx.x % shared.columns, first = threadIdx.x / shared.columns;
    if (first >= shared.lanes) return;
    int32_t total[8] = {}, before[8] = {};
#pragma unroll 4
    for (int32_t g = first; g < num_groups; g += shared.lanes) {
        uint4 words = *(const uint4 *)(p.counts + g * p.groups.stride + column * 4);
        const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int32_t count = (int32_t)(pairs[i / 2] >> i % 2 * 16 & 0xFFFF);
            total[i] += count;
            before[i] += g < group ? count : 0;
        }
    }
    int4 *to = (int4 *)(shared.totals + (first * shared.columns + column) * 8);
    to[0] = make_int4(total[0], total[1], total[2], total[3]);
    to[1] = make_int4(total[4], total[5], total[6], total[7]);
    to += shared.lanes * shared.columns * 2;
    to[0] = make_int4(before[0], before[1], before[2], before[3]);
    to[1] = make_int4(before[4], before[5], before[6], before[7]);
}

/* A block per group of tokens. */
static __global__ void __launch_bounds__(kPlaceThreads) route_place_kernel(const route_params_t p)
{
    extern __shared__ __align__(16) char base[];
    const int32_t thread = threadIdx.x, experts = p.topk.num_experts, top_k = p.topk.top_k, group = blockIdx.x;
    const place_shared_t shared = place_shared(p.groups, experts, base);
    for (int32_t i = thread; i < shared.words * experts; i += kPlaceThreads) shared.bits[i] = 0;
    epmoei_begin_dependent();
    __syncthreads();

    const int32_t tokens = route_tokens(p), rows = 1 << p.groups.shift;
    const int32_t first_token = min(group * rows, tokens), end_token = min((group + 1) * rows, tokens);
    const int32_t slots = (end_token - first_token) * top_k, joined = is_joined(p);
    const int32_t *ids = p.topk.ids + first_token * top_k;
    const int32_t own = thread < slots ? ids[thread] : 0; /* under way together with the counts */
    add_counts(p, shared, (tokens + rows - 1) / rows, group);
    for (int32_t slot = thread; slot < slots; slot += kPlaceThreads) {
        int32_t expert = slot == thread ? own : ids[slot], token = slot / top_k;
        atomicOr(&shared.bits[token / 32 * experts + expert], 1u << token % 32);
    }
    __syncthreads();

    int32_t total = 0, before = 0;
    if (thread < experts)
#pragma unroll 8
        for (int32_t lane = 0; lane < shared.lanes; lane++) {
            total += shared.totals[lane * shared.columns * 8 + thread];
            before += shared.totals[(shared.lanes + lane) * shared.columns * 8 + thread];
        }
    int32_t begin = begin_expert(p, total, tokens);
    if (thread < experts) shared.places[thread] = begin + before;
    __syncthreads();

    for (int32_t slot = thread; slot < slots; slot += kPlaceThreads) {
        int32_t expert = slot == thread ? own : ids[slot], token = slot / top_k, word = token / 32;
        int32_t place = shared.places[expert];
        for (int32_t i = 0; i < word; i++) place += __popc(shared.bits[i * experts + expert]);
        place += __popc(shared.bits[word * experts + expert] & ((1u << token % 32) - 1));
        place_slot(p, first_token * top_k + slot + (first_token + token) * joined, place);
    }
    if (joined)
        for (int32_t token = first_token + thread; token < end_token; token += kPlaceThreads)
            place_slot(p, token * p.slots + top_k, tokens * top_k + token);
    pad_order(p, tokens);
}

/* -------------------------------------------------------------------------------------------------------- choice */

/* The most common rules: softmax over all experts, nothing added to logits or scores, logits not written out. */
static bool is_plain(const route_params_t &p)
{
    return p.topk.scoring == EPMOE_SCORING_SOFTMAX && !p.topk.selection_bias && p.topk.topk_group >= p.topk.n_group &&
           !p.bias && !p.logits;
}

/* 32 * kValues experts at most, a warp per row; team_floats of shared memory per warp. kPlain: code of these rules
 * alone, of which there is less than half as much to come from the memory. */
template <int kValues, bool kPlain>
static __global__ void __launch_bounds__(kValues <= 8 ? kSingleThreads : kWideSingleThreads, kValues <= 4 ? 2 : 1)
    route_rows_kernel(const route_params_t params, int32_t team_floats)
{
    route_params_t p = params;
    if constexpr (kPlain) {
        p.topk.scoring = EPMOE_SCORING_SOFTMAX;
        p.topk.selection_bias = nullptr;
        p.topk.n_group = p.topk.topk_group = 1;
        p.bias = nullptr;
        p.logits = nullptr;
    }
    extern __shared__ __align__(16) float teams[];
    const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int32_t step = gridDim.x * warps, first_row = blockIdx.x * warps + warp;
    uint32_t *bits = (uint32_t *)(teams + warps * team_floats); /* p.single: [E], then as many places */
    int32_t ids[1], tokens = 0;
    if (p.single)
        for (int32_t i = threadIdx.x; i < p.topk.num_experts; i += blockDim.x) bits[i] = 0;
    if (p.single) __syncthreads();
#pragma unroll 1
    for (int32_t pass = p.rehearses ? 0 : 1; pass < 2; pass++) {
        if (pass == 1) {
            epmoei_begin_dependent();
            tokens = route_tokens(p);
        }
        int32_t row = first_row;
#pragma unroll 1
        do {
            const bool valid = row < tokens;
            choose_row<kValues>(p, row, valid, lane, teams + warp * team_floats, ids);
            if (valid && lane < p.topk.top_k) {
                const int32_t group = (p.first_token + row) >> p.groups.shift;
                if (p.single) atomicOr(&bits[ids[0]], 1u << row);
                if (p.counts) atomicAdd(&p.counts[group * p.groups.stride + ids[0] / 2], 1u << ids[0] % 2 * 16);
            }
            row += step;
        } while (row < tokens);
    }
    if (!p.single) return;
    __syncthreads();
    order_single(p, bits, (int32_t *)(bits + p.topk.num_experts), tokens, first_row, ids[0]);
}

/* A block per row. */
static __global__ void __launch_bounds__(32 * kMaxWarps) route_block_kernel(const route_params_t p)
{
    extern __shared__ __align__(16) float shared[];
    epmoei_begin_dependent();
    const int32_t thread = threadIdx.x, places = blockDim.x * kBlockValues;
    const int64_t row = blockIdx.x;
    if (row >= route_tokens(p)) return;

    float *stash = shared, *values = shared + places;
    float logits[kBlockValues];
    uint32_t keys[kBlockValues];
    int32_t ids[1] = {};
    int32_t count = min(kBlockValues, p.topk.num_experts - thread * kBlockValues);
    load_row(p, row, true, thread * kBlockValues, count, stash, logits);
    softmax_t softmax = prepare<0>(p.topk, logits, count, thread, blockDim.x, values, values + places, keys);
    /* prepare ends behind a barrier after its last use of `values`, unless it did not use them. */
    select_in_block(keys, p.topk.top_k, (uint32_t *)values, ids);
    if (thread >= 32) return;
    float chosen[1] = {thread < p.topk.top_k ? stash[ids[0]] : -INFINITY};
    weigh_row(p, row, true, thread, softmax, ids, chosen);
}

/* The weights of SPARSE_MIXER: a warp per row, which adds its parts again. The joined ones get the weights that their
 * own thread has just written. */
static __global__ void __launch_bounds__(kMixerThreads) route_mixer_kernel(const route_params_t p)
{
    __shared__ mixer_terms_t terms[kMixerThreads / 32];
    const int64_t row = ((int64_t)blockIdx.x * kMixerThreads + threadIdx.x) / 32;
    epmoei_begin_dependent();
    if (row >= route_tokens(p)) return;
    mix_row(p.topk, row, &terms[threadIdx.x / 32], [&](int32_t e) {
        if (p.topk.logits) return tame(((const float *)p.topk.logits)[row * p.topk.num_experts + e]);
        float logit[1];
        add_parts(p, row, e, 1, logit);
        return tame(logit[0]);
    });
    const int32_t lane = threadIdx.x % 32;
    if (p.joined_ids && lane < p.topk.top_k)
        p.joined_weights[row * p.slots + lane] = p.topk.weights[row * p.topk.top_k + lane];
}

/* -------------------------------------------------------------------------------------------------------- launch */

/* Floats of shared memory that the steps of a row share beyond one per expert; 0 = they need none of both. */
static int32_t tail_floats(const epmoe_topk_args_t *topk)
{
    int32_t groups = topk->topk_group < topk->n_group ? (int32_t)epmoei_round_up(topk->n_group, 4) : 0;
    int32_t sums = topk->scoring == EPMOE_SCORING_SOFTMAX ? kSumLanes : 0;
    return groups > sums ? groups : sums;
}

/* Whether one block chooses and orders: what it reads must cost less than another launch. */
static bool is_single(const route_params_t &p)
{
    const int64_t most_bytes = 128 * 1024;
    const int32_t most_threads = p.topk.num_experts <= 256 ? kSingleThreads : kWideSingleThreads;
    int64_t row_bytes = (int64_t)p.parts.num_parts * p.parts.row_stride * (int64_t)sizeof(float);
    return (int64_t)p.topk.num_tokens * 32 <= most_threads && p.topk.num_experts <= most_threads &&
           p.topk.num_tokens * row_bytes <= most_bytes;
}

template <int kValues, bool kPlain> static epmoe_status_t launch_rows(route_params_t p, epmoe_stream_t stream)
{
    const int32_t kBlocksPerSm = kValues <= 4 ? 8 : 4;
    const epmoei_device_info_t *device = epmoei_device_current();
    const int32_t tail = tail_floats(&p.topk), team_floats = 32 * kValues + (tail ? 32 * kValues + tail : 0);
    int64_t threads = kRowThreads;
    if (p.single) threads = epmoei_round_up(epmoei_max64(p.topk.num_tokens * 32, p.topk.num_experts), 32);
    int64_t blocks = epmoei_min64(epmoei_ceil_div(p.topk.num_tokens, threads / 32), kBlocksPerSm * device->num_sms);
    size_t shared_bytes = ((size_t)(threads / 32 * team_floats) + (p.single ? 2 * (size_t)p.topk.num_experts : 0)) * 4;
    /* Many blocks would take the issue slots of the product that they wait for. */
    p.rehearses = p.single && device->arch == 90;
    void (*kernel)(route_params_t, int32_t) = route_rows_kernel<kValues, kPlain>;
    EPMOEI_CHECK(epmoei_allow_shared(kernel, shared_bytes, "the choice of experts"));
    cudaError_t error =
        epmoei_launch_dependent(kernel, (unsigned)blocks, (unsigned)threads, shared_bytes, stream, p, team_floats);
    return epmoei_cuda_status((int32_t)error, "the choice of experts");
}

static epmoe_status_t launch_blocks(const route_params_t &p, epmoe_stream_t stream)
{
    unsigned threads = (unsigned)(32 * epmoei_ceil_div(p.topk.num_experts, 32 * kBlockValues));
    size_t shared_bytes = (2 * threads * kBlockValues + (size_t)tail_floats(&p.topk)) * sizeof(float);
    EPMOEI_CHECK(epmoei_allow_shared(route_block_kernel, shared_bytes, "the choice of experts"));
    cudaError_t error =
        epmoei_launch_dependent(route_block_kernel, (unsigned)p.topk.num_tokens, threads, shared_bytes, stream, p);
    return epmoei_cuda_status((int32_t)error, "the choice of experts");
}

static epmoe_status_t launch_choice(const route_params_t &p, epmoe_stream_t stream)
{
    const bool plain = is_plain(p);
    if (p.topk.num_experts <= 32) return plain ? launch_rows<1, true>(p, stream) : launch_rows<1, false>(p, stream);
    if (p.topk.num_experts <= 64) return plain ? launch_rows<2, true>(p, stream) : launch_rows<2, false>(p, stream);
    if (p.topk.num_experts <= 128) return plain ? launch_rows<4, true>(p, stream) : launch_rows<4, false>(p, stream);
    if (p.topk.num_experts <= 256) return launch_rows<8, false>(p, stream);
    if (p.topk.num_experts <= 512) return launch_rows<16, false>(p, stream);
    return launch_blocks(p, stream);
}

static epmoe_status_t launch_mixer(const route_params_t &p, epmoe_stream_t stream)
{
    const unsigned blocks = (unsigned)epmoei_ceil_div(p.topk.num_tokens, kMixerThreads / 32);
    cudaError_t error = epmoei_launch_dependent(route_mixer_kernel, blocks, kMixerThreads, 0, stream, p);
    return epmoei_cuda_status((int32_t)error, "the weights of the chosen experts");
}

static epmoe_status_t launch_place(const route_params_t &p, epmoe_stream_t stream)
{
    size_t shared_bytes = (size_t)place_shared_bytes(p.groups, p.topk.num_experts);
    EPMOEI_CHECK(epmoei_allow_shared(route_place_kernel, shared_bytes, "the order of slots"));
    cudaError_t error =
        epmoei_launch_dependent(route_place_kernel, (unsigned)p.groups.count, kPlaceThreads, shared_bytes, stream, p);
    return epmoei_cuda_status((int32_t)error, "the order of slots");
}

extern "C" epmoe_status_t epmoei_route_sm80(const epmoei_route_args_t *args, epmoe_stream_t stream)
{
    const struct {
        const char *name;
        const void *pointer;
        uintptr_t alignment;
    } pointers[] = {{"x", args->x, 16},
                    {"weight", args->weight, 16},
                    {"bias", args->bias, 16},
                    {"logits", args->logits, 16},
                    {"topk.logits", args->topk.logits, 16},
                    {"topk.selection_bias", args->topk.selection_bias, 16},
                    {"workspace", args->workspace, EPMOEI_ALIGNMENT},
                    {"topk.ids", args->topk.ids, 4},
                    {"topk.weights", args->topk.weights, 4},
                    {"topk.num_tokens_dev", args->topk.num_tokens_dev, 4},
                    {"joined_ids", args->joined_ids, 4},
                    {"joined_weights", args->joined_weights, 4},
                    {"sorted_ids", args->sorted_ids, 4},
                    {"num_post_padded", args->num_post_padded, 4},
                    {"expert_offsets", args->expert_offsets, 4},
                    {"places", args->places, 4}};
    for (const auto &at : pointers) EPMOEI_CHECK(epmoei_check_aligned(at.name, at.pointer, (int32_t)at.alignment));

    const int32_t num_tokens = args->topk.num_tokens, num_experts = args->topk.num_experts, top_k = args->topk.top_k;
    const int32_t chunk = epmoei_route_chunk(num_tokens, num_experts, args->hidden);
    route_params_t all = {};
    all.topk = args->topk;
    all.topk.scoring = choice_scoring(args->topk.scoring);
    all.partials = (const float *)((const char *)args->workspace + epmoei_route_counts_bytes(num_experts));
    all.parts = epmoei_router_parts(args->hidden, num_experts);
    all.bias = args->bias;
    all.slots = args->joined_ids ? top_k + 1 : top_k;
    all.joined_ids = args->joined_ids;
    all.joined_weights = args->joined_weights;
    all.groups = epmoei_route_groups(num_tokens, num_experts);
    if (args->sorted_ids && epmoei_route_aligns(num_tokens, num_experts, all.slots)) {
        all.sorted_ids = args->sorted_ids;
        all.num_post_padded = args->num_post_padded;
        all.expert_offsets = args->expert_offsets;
        all.places = args->places;
        all.single = is_single(all);
        if (!all.single) all.counts = (uint32_t *)args->workspace;
    }
    for (int32_t first = 0; first < num_tokens; first += chunk) {
        route_params_t p = all;
        p.topk.num_tokens = (int32_t)epmoei_min64(chunk, num_tokens - first);
        if (p.topk.logits) p.topk.logits = (const float *)args->topk.logits + (int64_t)first * num_experts;
        p.topk.ids += (int64_t)first * top_k;
        p.topk.weights += (int64_t)first * top_k;
        if (p.joined_ids) {
            p.joined_ids += (int64_t)first * p.slots;
            p.joined_weights += (int64_t)first * p.slots;
        }
        p.first_token = first;
        if (args->logits) p.logits = args->logits + (int64_t)first * num_experts;

        epmoei_router_gemm_args_t gemm = {};
        gemm.num_tokens = p.topk.num_tokens;
        gemm.first_token = first;
        gemm.num_tokens_dev = args->topk.num_tokens_dev;
        gemm.num_experts = num_experts;
        gemm.hidden = args->hidden;
        gemm.dtype = args->dtype;
        gemm.x = (const char *)args->x + (int64_t)first * args->hidden * epmoe_dtype_size(args->dtype);
        gemm.weight = args->weight;
        gemm.partials = (float *)((char *)args->workspace + epmoei_route_counts_bytes(num_experts));
        gemm.zeros = first == 0 ? all.counts : NULL;
        gemm.num_zeros = gemm.zeros ? all.groups.count * all.groups.stride : 0;
        EPMOEI_CHECK(epmoei_router_gemm_sm80(&gemm, stream));
        EPMOEI_CHECK(launch_choice(p, stream));
        if (args->topk.scoring == EPMOE_SCORING_SPARSE_MIXER) EPMOEI_CHECK(launch_mixer(p, stream));
    }
    return all.counts ? launch_place(all, stream) : EPMOE_OK;
}
