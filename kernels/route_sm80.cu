/* Routing in two launches: the router's product in parts (router_gemm_sm80.cu), then this kernel, which adds a row's
 * parts while it loads the row, chooses its experts (topk_cuda.cuh) and, for a moderate number of tokens, sorts the
 * slots by expert.
 *
 * The sort: a token takes an expert once at most, so that a bit per token and expert says everything. Bits are set in
 * shared memory in any order; a slot's rank within its expert is the number of set bits before its own, and the slots
 * stand in order whatever the threads did first. A few tokens have one block, which knows its ids; beyond that the
 * block that comes last, by a counter that the product's kernel has cleared, reads them all. */
#include "kernels/launch_cuda.cuh"
#include "kernels/route.h"
#include "kernels/router_gemm.h"
#include "kernels/topk_cuda.cuh"

static const int kRowThreads = 128;   /* of a block that only chooses */
static const int kAlignThreads = 512; /* the most of a block that may have to sort */
static const int kSharedByDefault = 48 * 1024;
static_assert(kAlignThreads >= EPMOEI_ROUTE_ALIGN_EXPERTS, "the sort has a thread per expert");

struct route_params_t {
    epmoe_topk_args_t topk; /* of these rows; logits: what replaces the router's, or NULL */
    int32_t first_token;    /* of these rows among those that num_tokens_dev counts */
    const float *partials;  /* [num_parts,T,row_stride] */
    epmoei_router_parts_t parts;
    const float *bias;
    float *logits;
    int32_t rows_per_block;
    /* align; sorted_ids NULL = none */
    int32_t *sorted_ids;
    int32_t *num_post_padded;
    int32_t *expert_offsets;
    uint32_t *counter; /* of blocks that have chosen; 0 before */
    int32_t words;     /* of 32 tokens */
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
    constexpr int kBatch = kValues <= 8 ? 8 : 4, kQuads = kValues / 4; /* loads under way at a time */
    static_assert(EPMOEI_ROUTER_MAX_PARTS % kBatch == 0, "batches cover the parts");
    int64_t stride = (int64_t)p.topk.num_tokens * p.parts.row_stride;
    const float *from = p.partials + row * p.parts.row_stride + first;
#pragma unroll
    for (int i = 0; i < kValues; i++) logits[i] = 0.0f;
    if (count <= 0) return;
#pragma unroll 1
    for (int32_t base = 0; base < p.parts.num_parts; base += kBatch) {
        float4 quads[kBatch][kQuads];
#pragma unroll
        for (int i = 0; i < kBatch; i++)
#pragma unroll
            for (int q = 0; q < kQuads; q++)
                quads[i][q] = base + i < p.parts.num_parts ? *(const float4 *)(from + (base + i) * stride + q * 4)
                                                           : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                /* A part that does not exist adds 0, which changes nothing: no sum that began at 0 is -0. */
#pragma unroll
        for (int i = 0; i < kBatch; i++)
#pragma unroll
            for (int q = 0; q < kQuads; q++) {
                logits[q * 4] = __fadd_rn(logits[q * 4], quads[i][q].x);
                logits[q * 4 + 1] = __fadd_rn(logits[q * 4 + 1], quads[i][q].y);
                logits[q * 4 + 2] = __fadd_rn(logits[q * 4 + 2], quads[i][q].z);
                logits[q * 4 + 3] = __fadd_rn(logits[q * 4 + 3], quads[i][q].w);
            }
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
    if (count >= kValues && ((uintptr_t)to & 15) == 0) {
#pragma unroll
        for (int i = 0; i < kValues; i += 4)
            *(float4 *)(to + i) = make_float4(logits[i], logits[i + 1], logits[i + 2], logits[i + 3]);
        return;
    }
#pragma unroll
    for (int i = 0; i < kValues; i++)
        if (i < count) to[i] = logits[i];
}

/* The logits that choose, as topk_cuda.cuh wants them, also left in stash[first..]. */
template <int kValues>
__device__ __forceinline__ void load_row(const route_params_t &p, int64_t row, int32_t first, int32_t count,
                                         float *stash, float (&logits)[kValues])
{
    int64_t at = row * p.topk.num_experts + first;
    add_parts(p, row, first, count, logits);
    if (p.logits) store_logits(p.logits + at, count, logits);
    if (p.topk.logits) load_run((const float *)p.topk.logits + at, count, -INFINITY, logits);
#pragma unroll
    for (int i = 0; i < kValues; i++) logits[i] = i < count ? tame(logits[i]) : -INFINITY;
#pragma unroll
    for (int i = 0; i < kValues; i += 4)
        *(float4 *)(stash + first + i) = make_float4(logits[i], logits[i + 1], logits[i + 2], logits[i + 3]);
}

/* ---------------------------------------------------------------------------------------------------------- align */

struct route_shared_t {
    uint32_t *bits;   /* [words,E]: bit t%32 of word t/32 says that token t takes the expert */
    uint16_t *places; /* [words,E]: where the slots of the word's tokens begin in the order */
    uint16_t *ids;    /* [T*k] */
    float *teams;     /* what rows need */
};

static __host__ __device__ __forceinline__ int32_t route_align_bytes(int32_t words, int32_t num_experts,
                                                                     int32_t num_slots)
{
    return (words * num_experts * 6 + num_slots * 2 + 15) / 16 * 16;
}

__device__ __forceinline__ route_shared_t route_shared(const route_params_t &p, char *base)
{
    route_shared_t shared = {};
    shared.teams = (float *)base;
    if (!p.sorted_ids) return shared;
    int32_t counters = p.words * p.topk.num_experts, slots = p.topk.num_tokens * p.topk.top_k;
    shared.bits = (uint32_t *)base;
    shared.places = (uint16_t *)(shared.bits + counters);
    shared.ids = shared.places + counters;
    shared.teams = (float *)(base + route_align_bytes(p.words, p.topk.num_experts, slots));
    return shared;
}

/* True in the one block that sorts, once all ids are visible to it. All threads call. */
__device__ __forceinline__ bool is_last_block(const route_params_t &p)
{
    __shared__ bool last;
    __syncthreads();
    if (gridDim.x == 1) return true;
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(p.counter, 1u) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    return last;
}

/* Sum over the threads below. All threads call; *total is the sum over all. */
__device__ __forceinline__ int32_t scan_block(int32_t own, int32_t *total)
{
    __shared__ int32_t warp_sums[kAlignThreads / 32];
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

/* The bits are 0, and with one block the ids are in shared memory, both behind a barrier. */
__device__ __forceinline__ void align_slots(const route_params_t &p, route_shared_t shared, int32_t tokens)
{
    const int32_t experts = p.topk.num_experts, top_k = p.topk.top_k, slots = tokens * top_k;
    const int32_t thread = threadIdx.x, threads = blockDim.x, worst = p.topk.num_tokens * top_k;
    const bool known = gridDim.x == 1;
#pragma unroll 4
    for (int32_t slot = thread; slot < slots; slot += threads) {
        int32_t expert = known ? shared.ids[slot] : __ldcg(p.topk.ids + slot), token = slot / top_k;
        if (!known) shared.ids[slot] = (uint16_t)expert;
        atomicOr(&shared.bits[token / 32 * experts + expert], 1u << token % 32);
    }
    __syncthreads();

    const int32_t words = (tokens + 31) / 32;
    int32_t count = 0, total;
    if (thread < experts)
#pragma unroll 4
        for (int32_t word = 0; word < words; word++) count += __popc(shared.bits[word * experts + thread]);
    int32_t place = scan_block(count, &total);
    if (thread < experts) {
        p.expert_offsets[thread] = place;
#pragma unroll 4
        for (int32_t word = 0; word < words; word++) {
            shared.places[word * experts + thread] = (uint16_t)place;
            place += __popc(shared.bits[word * experts + thread]);
        }
    }
    if (thread == 0) {
        p.expert_offsets[experts] = total;
        *p.num_post_padded = total;
    }
    __syncthreads();

    for (int32_t slot = thread; slot < slots; slot += threads) {
        int32_t token = slot / top_k, at = token / 32 * experts + shared.ids[slot];
        uint32_t before = shared.bits[at] & ((1u << token % 32) - 1);
        p.sorted_ids[shared.places[at] + __popc(before)] = slot;
    }
    for (int32_t slot = slots + thread; slot < worst; slot += threads) p.sorted_ids[slot] = worst;
}

/* -------------------------------------------------------------------------------------------------------- kernels */

/* kLanes * kValues experts at most; team_floats of shared memory per row. */
template <int kLanes, int kValues>
static __global__ void __launch_bounds__(kAlignThreads, 1)
    route_rows_kernel(const route_params_t p, int32_t team_floats)
{
    extern __shared__ __align__(16) char base[];
    constexpr int kSlots = slots_t<kLanes, kValues>::kCount;
    const route_shared_t shared = route_shared(p, base);
    if (p.sorted_ids)
        for (int32_t i = threadIdx.x; i < p.words * p.topk.num_experts; i += blockDim.x) shared.bits[i] = 0;
    epmoei_begin_dependent();

    const int32_t lane = threadIdx.x % kLanes, team = threadIdx.x / kLanes, top_k = p.topk.top_k;
    const int32_t tokens = route_tokens(p);
    const int64_t row = (int64_t)blockIdx.x * p.rows_per_block + team;
    const bool valid = team < p.rows_per_block && row < tokens;
    if (__any_sync(kAll, valid)) {
        float *stash = shared.teams + team * team_floats;
        float *values = stash + kLanes * kValues;
        float logits[kValues], chosen[kSlots];
        uint32_t keys[kValues], best_keys[kSlots];
        int32_t ids[kSlots];
        int32_t count = valid ? min(kValues, p.topk.num_experts - lane * kValues) : 0;
        load_row(p, row, lane * kValues, count, stash, logits);
        softmax_t softmax =
            prepare<kLanes>(p.topk, logits, count, lane, kLanes, values, values + kLanes * kValues, keys);
        select_best<kLanes>(keys, lane, top_k, ids, best_keys);
        __syncwarp();
#pragma unroll
        for (int s = 0; s < kSlots; s++) chosen[s] = valid && s * kLanes + lane < top_k ? stash[ids[s]] : -INFINITY;
        weigh<kLanes>(p.topk, row, valid, lane, softmax, ids, chosen);
        if (p.sorted_ids && gridDim.x == 1)
#pragma unroll
            for (int s = 0; s < kSlots; s++)
                if (valid && s * kLanes + lane < top_k) shared.ids[row * top_k + s * kLanes + lane] = (uint16_t)ids[s];
    }
    if (p.sorted_ids && is_last_block(p)) align_slots(p, shared, tokens);
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
    load_row(p, row, thread * kBlockValues, count, stash, logits);
    softmax_t softmax = prepare<0>(p.topk, logits, count, thread, blockDim.x, values, values + places, keys);
    /* prepare ends behind a barrier after its last use of `values`, unless it did not use them. */
    select_in_block(keys, p.topk.top_k, (uint32_t *)values, ids);
    if (thread >= 32) return;
    float chosen[1] = {thread < p.topk.top_k ? stash[ids[0]] : -INFINITY};
    weigh<32>(p.topk, row, true, thread, softmax, ids, chosen);
}

/* -------------------------------------------------------------------------------------------------------- launch */

static epmoe_status_t allow_shared(const void *kernel, size_t bytes)
{
    if (bytes <= (size_t)kSharedByDefault) return EPMOE_OK;
    EPMOEI_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    return EPMOE_OK;
}

/* Floats of shared memory that the steps of a row share beyond one per expert; 0 = they need none of both. */
static int32_t tail_floats(const epmoe_topk_args_t *topk)
{
    int32_t groups = topk->topk_group < topk->n_group ? (int32_t)epmoei_round_up(topk->n_group, 4) : 0;
    int32_t sums = topk->scoring == EPMOE_SCORING_SOFTMAX ? kSumLanes : 0;
    return groups > sums ? groups : sums;
}

template <int kLanes, int kValues> static epmoe_status_t launch_rows(route_params_t p, epmoe_stream_t stream)
{
    /* Rows of a single block: what it reads and computes must cost less than the meeting of many blocks. */
    const int32_t kSingleRows = 8 * 32 / kLanes, kFewSlots = 1024;
    const int64_t kSingleBytes = 96 * 1024;
    const epmoei_device_info_t *device = epmoei_device_current();
    const int32_t tokens = p.topk.num_tokens, tail = tail_floats(&p.topk);
    int32_t threads = kRowThreads, team_floats = kLanes * kValues + (tail ? kLanes * kValues + tail : 0);
    size_t shared_bytes = 0;
    p.rows_per_block = kRowThreads / kLanes;
    if (p.sorted_ids) {
        int32_t slots = tokens * p.topk.top_k, per_warp = 32 / kLanes;
        int64_t bytes = (int64_t)tokens * p.parts.num_parts * p.parts.row_stride * (int64_t)sizeof(float);
        int64_t spread = epmoei_round_up(epmoei_ceil_div(tokens, device->num_sms), per_warp);
        p.rows_per_block = tokens <= kSingleRows && bytes <= kSingleBytes
                               ? tokens
                               : (int32_t)epmoei_min64(spread, kAlignThreads / kLanes);
        int64_t busy = epmoei_max64(p.topk.num_experts, (int64_t)p.rows_per_block * kLanes);
        threads = slots > kFewSlots ? kAlignThreads : (int32_t)epmoei_round_up(busy, 128);
        p.words = (int32_t)epmoei_ceil_div(tokens, 32);
        shared_bytes = (size_t)route_align_bytes(p.words, p.topk.num_experts, slots);
    }
    /* Whole warps: those of their teams that have no row write their part of shared memory too. */
    int64_t teams = epmoei_round_up(p.rows_per_block, 32 / kLanes);
    shared_bytes += (size_t)(teams * team_floats) * sizeof(float);
    EPMOEI_CHECK(allow_shared((const void *)route_rows_kernel<kLanes, kValues>, shared_bytes));
    unsigned blocks = (unsigned)epmoei_ceil_div(tokens, p.rows_per_block);
    cudaError_t error = epmoei_launch_dependent(route_rows_kernel<kLanes, kValues>, blocks, threads, shared_bytes,
                                                stream, p, team_floats);
    return epmoei_cuda_status((int32_t)error, "the choice of experts");
}

static epmoe_status_t launch_blocks(const route_params_t &p, epmoe_stream_t stream)
{
    unsigned threads = (unsigned)(32 * epmoei_ceil_div(p.topk.num_experts, 32 * kBlockValues));
    size_t shared_bytes = (2 * threads * kBlockValues + (size_t)tail_floats(&p.topk)) * sizeof(float);
    EPMOEI_CHECK(allow_shared((const void *)route_block_kernel, shared_bytes));
    cudaError_t error =
        epmoei_launch_dependent(route_block_kernel, (unsigned)p.topk.num_tokens, threads, shared_bytes, stream, p);
    return epmoei_cuda_status((int32_t)error, "the choice of experts");
}

static epmoe_status_t launch_choice(const route_params_t &p, epmoe_stream_t stream)
{
    if (p.topk.num_experts <= 32) return launch_rows<4, 8>(p, stream);
    if (p.topk.num_experts <= 128) return launch_rows<32, 4>(p, stream);
    if (p.topk.num_experts <= 256) return launch_rows<32, 8>(p, stream);
    if (p.topk.num_experts <= 512) return launch_rows<32, 16>(p, stream);
    return launch_blocks(p, stream);
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
                    {"sorted_ids", args->sorted_ids, 4},
                    {"num_post_padded", args->num_post_padded, 4},
                    {"expert_offsets", args->expert_offsets, 4}};
    for (const auto &at : pointers)
        if (!epmoei_is_aligned(at.pointer, at.alignment))
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s is %p: expected an address aligned to %d bytes",
                               at.name, at.pointer, (int)at.alignment);

    const int32_t num_tokens = args->topk.num_tokens, num_experts = args->topk.num_experts, top_k = args->topk.top_k;
    const bool aligns = args->sorted_ids && epmoei_route_aligns(num_tokens, num_experts, top_k);
    const int32_t chunk = epmoei_route_chunk(num_tokens, num_experts, args->hidden);
    uint32_t *counter = (uint32_t *)args->workspace;
    float *partials = (float *)((char *)args->workspace + EPMOEI_ALIGNMENT);
    for (int32_t first = 0; first < num_tokens; first += chunk) {
        epmoei_router_gemm_args_t gemm = {};
        gemm.num_tokens = (int32_t)epmoei_min64(chunk, num_tokens - first);
        gemm.first_token = first;
        gemm.num_tokens_dev = args->topk.num_tokens_dev;
        gemm.num_experts = num_experts;
        gemm.hidden = args->hidden;
        gemm.dtype = args->dtype;
        gemm.x = (const char *)args->x + (int64_t)first * args->hidden * epmoe_dtype_size(args->dtype);
        gemm.weight = args->weight;
        gemm.partials = partials;
        gemm.counter = counter;
        EPMOEI_CHECK(epmoei_router_gemm_sm80(&gemm, stream));

        route_params_t p = {};
        p.topk = args->topk;
        p.topk.num_tokens = gemm.num_tokens;
        if (p.topk.logits) p.topk.logits = (const float *)args->topk.logits + (int64_t)first * num_experts;
        p.topk.ids += (int64_t)first * top_k;
        p.topk.weights += (int64_t)first * top_k;
        p.first_token = first;
        p.partials = partials;
        p.parts = epmoei_router_parts(args->hidden, num_experts);
        p.bias = args->bias;
        if (args->logits) p.logits = args->logits + (int64_t)first * num_experts;
        if (aligns) {
            /* One chunk: what one block sorts is far less. */
            p.sorted_ids = args->sorted_ids;
            p.num_post_padded = args->num_post_padded;
            p.expert_offsets = args->expert_offsets;
            p.counter = counter;
        }
        EPMOEI_CHECK(launch_choice(p, stream));
    }
    return EPMOE_OK;
}
