/* Stable counting sort of slots by expert. A tile of slots is ranked by a block: each warp owns a run of the tile and
 * walks it 32 slots at a time, ballots giving every slot the number of equal experts before it; prefixes over the warps
 * then make a rank in the tile. No atomic decides an order.
 *   one tile    one launch; every block ranks the tile, and writes its own share of the outputs
 *   more tiles  count slots per expert and chunk; prefix over the chunks; rank and scatter each chunk */
#include "kernels/align.h"
#include "kernels/launch_cuda.cuh"

static const int kThreads = 1024;
static const int kMaxWarps = kThreads / 32;
static const int kMaxSteps = 8;            /* of a warp in a tile */
static const int kMaxCounters = 32768;     /* 16-bit, of all warps: 64 KiB of shared memory */
static const int kMaxChunks = 512;         /* bounds the workspace */
static const int64_t kFillPerBlock = 8192; /* positions that one block fills in the one-tile form */
static const int kMaxFillBlocks = 64;
static const uint32_t kAll = 0xFFFFFFFFu;

/* How one call is cut; a function of its sizes alone. */
struct align_plan_t {
    int32_t num_slots; /* the host's bound T*k, also the pad value */
    int32_t worst;     /* P */
    int32_t warps;     /* that rank slots */
    int32_t steps;     /* of 32 slots per warp and tile */
    int32_t chunks;    /* 0: one tile */
    int64_t chunk_slots;
    int32_t id_bits;
    size_t shared_bytes;
};

struct align_params_t {
    epmoe_align_args_t args;
    align_plan_t plan;
    int32_t *histogram; /* [E,chunks]: slots of the expert in the chunk, then in the chunks before it */
    int32_t *totals;    /* [E] */
    int32_t *error_word;
};

static align_plan_t align_plan(const epmoe_align_args_t *args)
{
    align_plan_t plan = {};
    int32_t experts = args->num_experts;
    plan.num_slots = args->num_tokens * args->top_k;
    plan.worst = (int32_t)epmoe_align_max_padded(args->num_tokens, args->top_k, experts, args->block_size);
    while ((1 << plan.id_bits) < experts) plan.id_bits++;
    plan.warps = (int32_t)epmoei_min64(kMaxWarps, kMaxCounters / experts);
    if (plan.num_slots <= plan.warps * 32 * kMaxSteps) {
        plan.warps = (int32_t)epmoei_max64(1, epmoei_min64(plan.warps, epmoei_ceil_div(plan.num_slots, 32)));
        plan.steps = (int32_t)epmoei_ceil_div(plan.num_slots, 32 * plan.warps);
    } else {
        int64_t least = epmoei_ceil_div(plan.num_slots, kMaxChunks);
        plan.steps = (int32_t)epmoei_min64(kMaxSteps, epmoei_max64(2, epmoei_ceil_div(least, 32 * plan.warps)));
        plan.chunk_slots = epmoei_round_up(least, 32 * plan.warps * plan.steps);
        plan.chunks = (int32_t)epmoei_ceil_div(plan.num_slots, plan.chunk_slots);
    }
    size_t counters = (size_t)epmoei_round_up((int64_t)plan.warps * experts * 2, 16);
    plan.shared_bytes = counters + (2 * (size_t)experts + 1 + kMaxWarps) * sizeof(int32_t);
    return plan;
}

/* ------------------------------------------------------------------------------------------------- device helpers */

/* Shared memory of a block that ranks. */
struct align_shared_t {
    uint16_t *counters; /* [warps,E]: slots of the expert in the warp's run, then in the runs before it */
    int32_t *offsets;   /* [E+1] */
    int32_t *counts;    /* [E] */
    int32_t *warp_sums; /* [kMaxWarps] */
};

__device__ __forceinline__ align_shared_t align_shared(const align_params_t &p, unsigned char *base)
{
    align_shared_t shared;
    int32_t experts = p.args.num_experts;
    shared.counters = (uint16_t *)base;
    shared.offsets = (int32_t *)(base + (p.plan.warps * experts * 2 + 15) / 16 * 16);
    shared.counts = shared.offsets + experts + 1;
    shared.warp_sums = shared.counts + experts;
    return shared;
}

__device__ __forceinline__ int64_t actual_slots(const align_params_t &p)
{
    return (int64_t)epmoei_device_tokens(p.args.num_tokens_dev, p.args.num_tokens) * p.args.top_k;
}

__device__ __forceinline__ bool is_bad_id(const align_params_t &p, int32_t id)
{
    return id < -1 || id >= p.args.num_experts;
}

/* The expert under which an id takes part in the sort, or -1. */
__device__ __forceinline__ int32_t expert_of(const align_params_t &p, int32_t id)
{
    if (id < 0 || id >= p.args.num_experts) return -1;
    return p.args.expert_map && p.args.expert_map[id] < 0 ? -1 : id;
}

/* Lanes of the warp with the same expert; meaningless for -1. */
__device__ __forceinline__ uint32_t peers_of(int32_t expert, int32_t id_bits)
{
    uint32_t peers = __ballot_sync(kAll, expert >= 0);
    for (int32_t bit = 0; bit < id_bits; bit++) {
        bool set = expert >> bit & 1;
        uint32_t others = __ballot_sync(kAll, set);
        peers &= set ? others : ~others;
    }
    return peers;
}

/* One addition per warp. All lanes call. */
__device__ __forceinline__ void count_bad(const align_params_t &p, bool bad)
{
    uint32_t bads = __ballot_sync(kAll, bad);
    if (bads && threadIdx.x % 32 == 0) epmoei_count_bad(p.error_word, __popc(bads));
}

/* An expert_map entry below -1 is as bad as such an id. All threads of one block call. */
__device__ __forceinline__ void count_bad_map(const align_params_t &p)
{
    if (!p.args.expert_map) return;
    for (int32_t first = 0; first < p.args.num_experts; first += kThreads) {
        int32_t e = first + (int32_t)threadIdx.x;
        count_bad(p, e < p.args.num_experts && p.args.expert_map[e] < -1);
    }
}

/* What a thread knows of its slots of a tile: expert in the low 16 bits, 0xFFFF for none; rank in the warp's run above.
 * The loops over it are unrolled, so that it stays in registers. */
struct ranked_t {
    uint32_t step[kMaxSteps];
};

__device__ __forceinline__ void zero_counters(const align_params_t &p, align_shared_t shared)
{
    uint4 *words = (uint4 *)shared.counters;
    int32_t count = (p.plan.warps * p.args.num_experts * 2 + 15) / 16;
    for (int32_t i = threadIdx.x; i < count; i += kThreads) words[i] = make_uint4(0, 0, 0, 0);
}

/* Slots [first,end), at most a tile. Counters are zero before, and all threads of the block call. */
__device__ __forceinline__ ranked_t rank_tile(const align_params_t &p, align_shared_t shared, int64_t first,
                                              int64_t end, bool counts_bad)
{
    int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, steps = p.plan.steps;
    ranked_t ranked = {};
    if (warp >= p.plan.warps) return ranked;
    uint16_t *counters = shared.counters + warp * p.args.num_experts;
    int64_t run = first + (int64_t)warp * steps * 32 + lane;
    int32_t experts[kMaxSteps];
#pragma unroll
    for (int i = 0; i < kMaxSteps; i++) {
        int64_t slot = run + i * 32;
        experts[i] = i < steps && slot < end ? p.args.ids[slot] : -1;
    }
#pragma unroll
    for (int i = 0; i < kMaxSteps; i++) {
        if (i >= steps) break;
        if (counts_bad) count_bad(p, is_bad_id(p, experts[i]));
        int32_t expert = expert_of(p, experts[i]);
        uint32_t peers = peers_of(expert, p.plan.id_bits);
        uint32_t before = expert >= 0 ? counters[expert] : 0;
        __syncwarp();
        uint32_t rank = before + __popc(peers & ((1u << lane) - 1));
        if (expert >= 0 && peers >> lane == 1) counters[expert] = (uint16_t)(rank + 1); /* the last of its peers */
        __syncwarp();
        ranked.step[i] = (expert >= 0 ? (uint32_t)expert : 0xFFFFu) | rank << 16;
    }
    return ranked;
}

/* Counters become the slots of earlier runs, counts the tile's total. Behind a barrier. */
__device__ __forceinline__ void prefix_warps(const align_params_t &p, align_shared_t shared)
{
    int32_t experts = p.args.num_experts;
    for (int32_t e = threadIdx.x; e < experts; e += kThreads) {
        int32_t sum = 0;
#pragma unroll 8
        for (int32_t warp = 0; warp < p.plan.warps; warp++) {
            uint16_t *counter = &shared.counters[warp * experts + e];
            int32_t count = *counter;
            *counter = (uint16_t)sum;
            sum += count;
        }
        shared.counts[e] = sum;
    }
}

__device__ __forceinline__ int32_t padded(int32_t count, int32_t block_size)
{
    return block_size == 1 ? count : (count + block_size - 1) / block_size * block_size;
}

/* offsets[e] = padded counts of the experts below e. Each thread reads counts that it wrote itself, or behind a
 * barrier; ends with one. */
__device__ __forceinline__ void scan_offsets(const align_params_t &p, align_shared_t shared)
{
    int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, experts = p.args.num_experts, base = 0;
    for (int32_t first = 0; first < experts; first += kThreads) {
        int32_t e = first + (int32_t)threadIdx.x;
        int32_t own = e < experts ? padded(shared.counts[e], p.args.block_size) : 0, sum = own;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            int32_t other = __shfl_up_sync(kAll, sum, step);
            if (lane >= step) sum += other;
        }
        if (lane == 31) shared.warp_sums[warp] = sum;
        __syncthreads();
        int32_t warp_sum = shared.warp_sums[lane];
        int32_t below = __reduce_add_sync(kAll, lane < warp ? warp_sum : 0);
        if (e < experts) shared.offsets[e] = base + below + sum - own;
        base += __reduce_add_sync(kAll, warp_sum);
        __syncthreads();
    }
    if (threadIdx.x == 0) shared.offsets[experts] = base;
    __syncthreads();
}

/* This block's share of all that is not a slot: padding, expert ids, offsets, the tail. */
__device__ __forceinline__ void fill(const align_params_t &p, align_shared_t shared)
{
    const epmoe_align_args_t &args = p.args;
    int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, experts = args.num_experts;
    int32_t block_size = args.block_size, total = shared.offsets[experts];
    if (blockIdx.x == 0) {
        if (threadIdx.x == 0 && args.num_post_padded) *args.num_post_padded = total;
        if (args.expert_offsets)
            for (int32_t e = threadIdx.x; e <= experts; e += kThreads) args.expert_offsets[e] = shared.offsets[e];
    }
    for (int32_t e = (int32_t)blockIdx.x * kMaxWarps + warp; e < experts; e += (int32_t)gridDim.x * kMaxWarps) {
        int32_t begin = shared.offsets[e], end = shared.offsets[e + 1];
        if (args.sorted_ids)
            for (int64_t i = begin + (int64_t)shared.counts[e] + lane; i < end; i += 32)
                args.sorted_ids[i] = p.plan.num_slots;
        if (args.expert_ids && begin < end) {
            int32_t id = args.expert_map ? args.expert_map[e] : e;
            for (int64_t i = begin / block_size + (int64_t)lane; i < end / block_size; i += 32) args.expert_ids[i] = id;
        }
    }
    int64_t thread = (int64_t)blockIdx.x * kThreads + threadIdx.x, threads = (int64_t)gridDim.x * kThreads;
    if (args.sorted_ids)
        for (int64_t i = total + thread; i < p.plan.worst; i += threads) args.sorted_ids[i] = p.plan.num_slots;
    if (args.expert_ids)
        for (int64_t i = total / block_size + thread; i < p.plan.worst / block_size; i += threads)
            args.expert_ids[i] = -1;
}

/* offsets are where each expert's slots of this tile begin. */
__device__ __forceinline__ void scatter_tile(const align_params_t &p, align_shared_t shared, const ranked_t &ranked,
                                             int64_t first)
{
    int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (warp >= p.plan.warps) return;
    const uint16_t *counters = shared.counters + warp * p.args.num_experts;
    int64_t run = first + (int64_t)warp * p.plan.steps * 32 + lane;
#pragma unroll
    for (int i = 0; i < kMaxSteps; i++) {
        if (i >= p.plan.steps) break;
        uint32_t expert = ranked.step[i] & 0xFFFFu;
        if (expert == 0xFFFFu) continue;
        int64_t position = (int64_t)shared.offsets[expert] + counters[expert] + (ranked.step[i] >> 16);
        p.args.sorted_ids[position] = (int32_t)(run + i * 32);
    }
}

/* ------------------------------------------------------------------------------------------------------- kernels */

static __global__ void __launch_bounds__(kThreads) align_one_tile_kernel(align_params_t p)
{
    extern __shared__ __align__(16) unsigned char base[];
    align_shared_t shared = align_shared(p, base);
    zero_counters(p, shared);
    epmoei_begin_dependent();
    int64_t num_slots = actual_slots(p);
    __syncthreads();
    ranked_t ranked = rank_tile(p, shared, 0, num_slots, blockIdx.x == 0);
    if (blockIdx.x == 0) count_bad_map(p);
    __syncthreads();
    prefix_warps(p, shared);
    scan_offsets(p, shared);
    if (threadIdx.x / 32 % gridDim.x == blockIdx.x) scatter_tile(p, shared, ranked, 0);
    fill(p, shared);
}

/* histogram[e,chunk] = slots of e in the chunk. */
static __global__ void __launch_bounds__(kThreads) align_count_kernel(align_params_t p)
{
    extern __shared__ __align__(16) int32_t histogram[];
    int32_t lane = threadIdx.x % 32, experts = p.args.num_experts;
    for (int32_t e = threadIdx.x; e < experts; e += kThreads) histogram[e] = 0;
    epmoei_begin_dependent();
    if (blockIdx.x == 0) count_bad_map(p);
    __syncthreads();
    int64_t begin = blockIdx.x * p.plan.chunk_slots, end = min(begin + p.plan.chunk_slots, actual_slots(p));
    /* Whole warps go round together: chunks are multiples of 32. */
    for (int64_t slot = begin + threadIdx.x; slot - lane < end; slot += kThreads) {
        int32_t id = slot < end ? p.args.ids[slot] : -1;
        count_bad(p, is_bad_id(p, id));
        int32_t expert = expert_of(p, id);
        uint32_t peers = peers_of(expert, p.plan.id_bits);
        if (expert >= 0 && peers >> lane == 1) atomicAdd(&histogram[expert], __popc(peers));
    }
    __syncthreads();
    for (int32_t e = threadIdx.x; e < experts; e += kThreads)
        p.histogram[(int64_t)e * p.plan.chunks + blockIdx.x] = histogram[e];
}

/* A warp per expert: histogram[e,chunk] becomes the slots of e in earlier chunks. */
static __global__ void __launch_bounds__(128) align_prefix_kernel(align_params_t p)
{
    int32_t lane = threadIdx.x % 32, e = (int32_t)(blockIdx.x * 4 + threadIdx.x / 32), base = 0;
    epmoei_begin_dependent();
    if (e >= p.args.num_experts) return;
    int32_t *histogram = p.histogram + (int64_t)e * p.plan.chunks;
    for (int32_t first = 0; first < p.plan.chunks; first += 32) {
        bool inside = first + lane < p.plan.chunks;
        int32_t own = inside ? histogram[first + lane] : 0, sum = own;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            int32_t other = __shfl_up_sync(kAll, sum, step);
            if (lane >= step) sum += other;
        }
        if (inside) histogram[first + lane] = base + sum - own;
        base += __shfl_sync(kAll, sum, 31);
    }
    if (lane == 0) p.totals[e] = base;
}

static __global__ void __launch_bounds__(kThreads) align_scatter_kernel(align_params_t p)
{
    extern __shared__ __align__(16) unsigned char base[];
    align_shared_t shared = align_shared(p, base);
    int32_t experts = p.args.num_experts;
    epmoei_begin_dependent();
    for (int32_t e = threadIdx.x; e < experts; e += kThreads) shared.counts[e] = p.totals[e];
    scan_offsets(p, shared);
    fill(p, shared);
    __syncthreads();
    for (int32_t e = threadIdx.x; e < experts; e += kThreads)
        shared.offsets[e] += p.histogram[(int64_t)e * p.plan.chunks + blockIdx.x];

    int64_t tile = (int64_t)p.plan.warps * p.plan.steps * 32;
    int64_t begin = blockIdx.x * p.plan.chunk_slots, end = min(begin + p.plan.chunk_slots, actual_slots(p));
    for (int64_t first = begin; first < end; first += tile) {
        zero_counters(p, shared);
        __syncthreads();
        ranked_t ranked = rank_tile(p, shared, first, min(first + tile, end), false);
        __syncthreads();
        prefix_warps(p, shared);
        __syncthreads();
        scatter_tile(p, shared, ranked, first);
        __syncthreads();
        for (int32_t e = threadIdx.x; e < experts; e += kThreads) shared.offsets[e] += shared.counts[e];
    }
}

/* ------------------------------------------------------------------------------------------------------- launch */

extern "C" int64_t epmoei_align_workspace_sm80(const epmoe_align_args_t *args)
{
    align_plan_t plan = align_plan(args);
    /* For the most chunks, not for plan.chunks, which does not grow with the number of slots: a workspace for many
     * tokens must do for fewer. */
    return plan.chunks ? (int64_t)args->num_experts * (kMaxChunks + 1) * (int64_t)sizeof(int32_t) : 0;
}

static epmoe_status_t launch(void (*kernel)(align_params_t), int64_t blocks, int threads, size_t shared_bytes,
                             epmoe_stream_t stream, const align_params_t &p)
{
    cudaError_t error = epmoei_launch_dependent(kernel, (unsigned)blocks, (unsigned)threads, shared_bytes, stream, p);
    return epmoei_cuda_status((int32_t)error, "epmoe_align_block_size");
}

extern "C" epmoe_status_t epmoei_align_sm80(const epmoe_align_args_t *args, epmoe_stream_t stream)
{
    const void *const arrays[] = {args->ids,        args->expert_map,      args->sorted_ids,
                                  args->expert_ids, args->num_post_padded, args->expert_offsets,
                                  args->workspace,  args->num_tokens_dev};
    static const char *const names[] = {"ids",        "expert_map",      "sorted_ids",
                                        "expert_ids", "num_post_padded", "expert_offsets",
                                        "workspace",  "num_tokens_dev"};
    for (int i = 0; i < 8; i++) EPMOEI_CHECK(epmoei_check_aligned(names[i], arrays[i], 4));
    align_params_t p = {};
    p.args = *args;
    p.plan = align_plan(args);
    p.error_word = epmoei_error_word();
    if (!p.plan.chunks) {
        EPMOEI_CHECK(epmoei_allow_shared(align_one_tile_kernel, p.plan.shared_bytes, "epmoe_align_block_size"));
        int64_t blocks = epmoei_min64(kMaxFillBlocks, epmoei_max64(1, epmoei_ceil_div(p.plan.worst, kFillPerBlock)));
        return launch(align_one_tile_kernel, blocks, kThreads, p.plan.shared_bytes, stream, p);
    }
    p.histogram = (int32_t *)args->workspace;
    p.totals = p.histogram + (int64_t)args->num_experts * p.plan.chunks;
    EPMOEI_CHECK(epmoei_allow_shared(align_scatter_kernel, p.plan.shared_bytes, "epmoe_align_block_size"));
    EPMOEI_CHECK(launch(align_count_kernel, p.plan.chunks, kThreads, args->num_experts * sizeof(int32_t), stream, p));
    EPMOEI_CHECK(launch(align_prefix_kernel, epmoei_ceil_div(args->num_experts, 4), 128, 0, stream, p));
    return launch(align_scatter_kernel, p.plan.chunks, kThreads, p.plan.shared_bytes, stream, p);
}
