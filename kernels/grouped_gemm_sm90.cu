/* Grouped GEMM on wgmma and TMA for Hopper.
 *
 * Weights take wgmma's 64-row side and tokens its column side, which comes in multiples of 8: an expert with m rows is
 * cut evenly into ceil(m / max_n) tiles, each as wide as its rows need, so that neither 8 rows nor 300 waste much.
 * A block holds 128 rows of w and up to max_n tokens in each of its stages, of which there are more where tiles are
 * narrower. Roles by warp:
 *   producer       a warp, of which one thread starts the copies of both operands into the stages, running ahead into
 *                  the next tile
 *   scout          a warp that looks up, a tile ahead, where the rows of a tile go and what they weigh; in a cluster's
 *                  first block it also deals tiles, where they are dealt (kernels/deal_tiles_sm90.cuh)
 *   consumers      two warpgroups, 64 weight rows each
 *   storers        a warp for each consumer, which takes finished outputs from shared memory to y
 * Two blocks of a cluster take neighbouring weight rows and the same tokens: each fetches half of the tokens' rows for
 * both, which saves the L2 cache a third of its reads.
 * Both operands come by TMA: rows of x in the sorted order (a gather pass before this kernel brings them there when
 * they are not); weights in tiles (kernels/plain_tiles.h) a step in one piece, or rows [E,N,K] with gate and up rows
 * regrouped on the way, 8 gate rows and then their 8 up rows, by two more dimensions of the tensor map. Blocks are
 * persistent and walk the tile list that they derive from expert_offsets. Each output's sum runs over K in steps of 16
 * whatever the tile width: results do not depend on other rows. */
#include "kernels/grouped_gemm_finished_sm90.cuh"
#include "kernels/grouped_gemm_pipeline_sm90.cuh"
#include "kernels/grouped_gemm_tile.h"
#include "kernels/launch_cuda.cuh"
#include "kernels/ptx_wgmma.cuh"

namespace
{

/* The weights of a step into its stage, whose barrier then also waits for the tokens. */
__device__ __forceinline__ void load_weights(const block_t &b, const walk_t &at, const cut_t &cut, const ring_t &ring,
                                             const CUtensorMap *w_map)
{
    const uint32_t done = cut.full + 8 * ring.stage, to = b.base + ring.stage * cut.bytes;
    if (!at.w_tile) {
        ptx_mbarrier_arrive_expect(done, step_bytes(at.tile.width));
        if (at.tile.alone)
            ptx_tma_load_once_5d(to, w_map, done, at.step * kBlockK, at.w_row, 0, at.w_group, at.tile.expert);
        else
            ptx_tma_load_5d(to, w_map, done, at.step * kBlockK, at.w_row, 0, at.w_group, at.tile.expert);
        return;
    }
    const char *const from = at.w_tile + (int64_t)at.step * at.w_bytes;
    ptx_mbarrier_arrive_expect(done, step_bytes(at.tile.width) - kWeightBytes + at.w_bytes);
    if (at.w_bytes == 0) return;
    if (at.tile.alone)
        ptx_bulk_load_once(to, from, at.w_bytes, done);
    else
        ptx_bulk_load(to, from, at.w_bytes, done);
}

__device__ __forceinline__ void load_tokens(const block_t &b, const walk_t &at, const cut_t &cut, const ring_t &ring,
                                            const x_maps_t *x_maps)
{
    const uint32_t done = cut.full + 8 * ring.stage;
    const uint32_t to = b.base + ring.stage * cut.bytes + kWeightBytes;
    if (at.part == 0) return; /* 8 tokens: all of them are the other block's */
    const CUtensorMap *map = &x_maps->map[at.part / 8 - 1];
    if (b.line.cluster == 1)
        ptx_tma_load_2d(to, map, done, at.step * kBlockK, at.tile.row);
    else
        ptx_tma_load_2d_multicast(to + at.first * kBlockK * 2, map, done, at.step * kBlockK, at.tile.row + at.first, 3);
}

/* To the stages of another cut, which lie across these: all of them must have been read. */
__device__ __forceinline__ void change_cut(cut_t &cut, const cut_t &next, ring_t &ring)
{
    for (int32_t i = 0; i < cut.stages; i++, ring.advance(cut.stages))
        wait_barrier(cut.empty() + 8 * ring.stage, ring.parity ^ 1);
    cut = next;
    ring = {0, 0};
}

/* One warp. Where only x comes from the kernel before this one, the first stages' weights are on their way while that
 * one ends. */
__device__ __forceinline__ void produce(const gemm_params_t &p, const block_t &b, const CUtensorMap *w_map,
                                        const x_maps_t *x_maps)
{
    const int32_t ask_at = max(0, b.k_steps - kAskAhead);
    ring_t ring = {0, 0};
    walk_t at = {};
    bool more = at.enter(p, b);
    cut_t cut = {};
    if (more) cut = cut_for(b, at.tile);
    if (p.chained) {
        const int32_t early = more ? min(cut.stages, b.k_steps) : 0; /* of the first tile */
        for (; at.step < early; at.step++, ring.advance(cut.stages))
            if (ptx_elect_one()) load_weights(b, at, cut, ring, w_map);
        ring = {0, 0};
        epmoei_begin_dependent();
        for (at.step = 0; at.step < early; at.step++, ring.advance(cut.stages))
            if (ptx_elect_one()) {
                load_tokens(b, at, cut, ring, x_maps);
                if (at.step == ask_at) b.ask();
            }
        at.step--;
        more = more && at.advance(p, b);
    }
    for (; more; more = at.advance(p, b), ring.advance(cut.stages)) {
        if (at.step == 0) {
            const cut_t next = cut_for(b, at.tile);
            if (next.stages != cut.stages) change_cut(cut, next, ring);
        }
        wait_barrier(cut.empty() + 8 * ring.stage, ring.parity ^ 1);
        if (ptx_elect_one()) {
            load_weights(b, at, cut, ring, w_map);
            load_tokens(b, at, cut, ring, x_maps);
            if (at.step == ask_at) b.ask();
        }
    }
}

/* One warp. That of a cluster's first block also deals its tiles. */
__device__ __forceinline__ void scout(const gemm_params_t &p, const block_t &b)
{
    const int lane = threadIdx.x % 32;
    const uint32_t full = ptx_shared_address(b.barriers->notes_full),
                   empty = ptx_shared_address(b.barriers->notes_empty);
    ring_t ring = {0, 0};
    for (int32_t count = 0;; count++) {
        if (count > 0 && b.dealt && b.rank == 0 && lane == 0) {
            epmoei_wait_for_predecessor(); /* then the word is 0 */
            b.barriers->deal.deal(count, b.dealt, b.tile_step, b.tiles, b.line.cluster);
        }
        __syncwarp();
        const int64_t index = b.tile_number(count);
        tile_t tile = {};
        if (index < b.tiles) {
            tile = find_tile(p, b.cumulative, b.order, index, b.clusters);
            if (tile.rows == 0) continue;
        }
        wait_barrier(empty + 8 * ring.stage, ring.parity ^ 1);
        note_tokens(p, b, ring.stage, tile, lane);
        if (lane == 0) b.notes_of(ring.stage)->tile = tile;
        ptx_mbarrier_arrive(full + 8 * ring.stage);
        if (tile.width == 0) return;
        ring.advance(kNotes);
    }
}

/* This warp has read the stage: to the barriers of every block whose copies will overwrite it. */
__device__ __forceinline__ void release(const block_t &b, uint32_t empty)
{
    if (b.line.cluster == 1) {
        if (threadIdx.x % 32 == 0) ptx_mbarrier_arrive(empty);
    } else if (threadIdx.x % 32 < 2)
        ptx_mbarrier_arrive_at(empty, threadIdx.x % 32);
}

/* acc += w x^T over all of K, for tiles of kN tokens. Meanwhile the outputs of the tile before go to the storer. */
template <typename T, int kN, int kMaxN>
__device__ __forceinline__ void multiply(const block_t &b, const epilogue_t &e, const cut_t &cut, ring_t &ring,
                                         float (&acc)[kMaxN / 2], finished_t<kMaxN> &done, ring_t &parts)
{
    uint32_t previous = 0;
    for (int step = 0; step < b.k_steps; step++) {
        const uint32_t from = b.base + ring.stage * cut.bytes;
        wait_barrier(cut.full + 8 * ring.stage, ring.parity);
        const uint64_t w = wgmma_descriptor(descriptor_start(from + e.group * (kWeightBytes / 2)));
        const uint64_t x = wgmma_descriptor(descriptor_start(from + kWeightBytes));
        ptx_wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < kBlockK / 16; kk++) /* 16 elements are 32 bytes, 2 in the descriptor's units */
            ptx_wgmma<T, kN>::run(acc, w + 2 * kk, x + 2 * kk);
        ptx_wgmma_commit();
        if (step > 0) {
            ptx_wgmma_wait<1>();
            release(b, previous);
        }
        if constexpr (kMaxN > kNarrow) offer_part(e, done, parts);
        previous = cut.empty() + 8 * ring.stage;
        ring.advance(cut.stages);
    }
    if constexpr (kMaxN > kNarrow) give_all(e, done, parts);
    ptx_wgmma_wait<0>();
    release(b, previous);
}

__device__ __forceinline__ void take_staging(const block_t &b, int32_t group, epilogue_t &e)
{
    e.group = group;
    e.staging = b.shared + shared_layout(b.line).staging + group * kStagingBytes;
    e.barriers = &b.barriers->staging[group];
}

__device__ __forceinline__ void read_notes(const gemm_params_t &p, const block_t &b, int32_t stage, epilogue_t &e)
{
    const tile_t tile = b.notes_of(stage)->tile;
    e.rows = b.rows_of(stage);
    e.scales = b.scales_of(stage);
    e.num_rows = tile.rows;
    e.expert = tile.expert;
    e.col = ((tile.cluster * b.line.cluster + b.rank) * kBlockW + e.group * 64) >> (p.gated ? 1 : 0);
}

/* One warp for a warpgroup of consumers. */
template <int kInFlight> __device__ __forceinline__ void store(const gemm_params_t &p, const block_t &b, int32_t group)
{
    epilogue_t e;
    take_staging(b, group, e);
    ring_t notes = {0, 0}, parts = {0, 0};
    for (;; notes.advance(kNotes)) {
        wait_barrier(ptx_shared_address(&b.barriers->notes_full[notes.stage]), notes.parity);
        if (b.notes_of(notes.stage)->tile.width == 0) return;
        read_notes(p, b, notes.stage, e);
        if (p.gated)
            store_parts<4, kInFlight>(p, e, parts);
        else
            store_parts<8, kInFlight>(p, e, parts);
        ptx_mbarrier_arrive(ptx_shared_address(&b.barriers->notes_empty[notes.stage]));
    }
}

template <typename T, int kMaxN> __device__ __forceinline__ void consume(const gemm_params_t &p, const block_t &b)
{
    const uint32_t notes_full = ptx_shared_address(b.barriers->notes_full);
    const uint32_t notes_empty = ptx_shared_address(b.barriers->notes_empty);
    epilogue_t e;
    e.tid = threadIdx.x % kWarpgroup;
    take_staging(b, threadIdx.x / kWarpgroup - 1, e);
    e.gated = p.gated;
    finished_t<kMaxN> done = {};
    cut_t cut = {};
    ring_t ring = {0, 0}, notes = {0, 0}, parts = {0, 0};
    for (;; notes.advance(kNotes)) {
        wait_barrier(notes_full + 8 * notes.stage, notes.parity);
        const int32_t width = b.notes_of(notes.stage)->tile.width;
        if (width == 0) break;
        const int32_t stages = cut.stages;
        cut = cut_for(b, b.notes_of(notes.stage)->tile);
        if (cut.stages != stages) ring = {0, 0};
        read_notes(p, b, notes.stage, e);
        load_bias(p, e);

        /* Zeroed here, not by the first wgmma: an accumulator that is read before it is written would be live in every
         * other width's code too. */
        float acc[kMaxN / 2];
#pragma unroll
        for (int i = 0; i < kMaxN / 2; i++) acc[i] = 0.0f;
        switch (width) {
#define WIDTH(n)                                                                                                       \
    case n:                                                                                                            \
        if constexpr (n <= kMaxN) multiply<T, n>(b, e, cut, ring, acc, done, parts);                                   \
        break
            WIDTH(8);
            WIDTH(16);
            WIDTH(24);
            WIDTH(32);
            WIDTH(40);
            WIDTH(48);
            WIDTH(56);
            WIDTH(64);
            WIDTH(80);
            WIDTH(96);
            WIDTH(112);
            WIDTH(128);
            WIDTH(144);
            WIDTH(160);
            WIDTH(176);
            WIDTH(192);
            WIDTH(208);
            WIDTH(224);
            WIDTH(240);
            WIDTH(256);
#undef WIDTH
        }
        read_notes(p, b, notes.stage, e); /* again: registers are few beside the product */
        pack_tile<T, (kMaxN > kNarrow)>(p, b.line.way, e, acc, done);
        if constexpr (kMaxN <= kNarrow) give_all(e, done, parts);
        ptx_mbarrier_arrive(notes_empty + 8 * notes.stage);
    }
    give_all(e, done, parts);
}

/* Narrow blocks share an SM with another one, of this launch or already of the next: the end of one hides behind the
 * stream of the other. */
template <int kMaxN> constexpr int kBlocksPerSm = kMaxN <= kNarrow ? 2 : 1;

template <typename T, int kMaxN>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<kMaxN>)
    grouped_gemm_kernel(const gemm_params_t p, const pipeline_t line, const __grid_constant__ CUtensorMap w_map,
                        const __grid_constant__ x_maps_t x_maps)
{
    constexpr int kProducerRegisters = kMaxN <= kNarrow ? 48 : 40, kConsumerRegisters = kMaxN <= kNarrow ? 96 : 232;
    static_assert(ptx_registers_do(kThreads, kBlocksPerSm<kMaxN>, kProducerRegisters, kConsumerRegisters), "too many");
    extern __shared__ __align__(1024) char shared[];
    const shared_layout layout(line);
    block_t b;
    b.line = line;
    b.shared = shared;
    b.base = ptx_shared_address(shared);
    b.notes = shared + layout.notes;
    b.notes_bytes = layout.notes_bytes;
    b.barriers = (barriers_t *)(shared + layout.barriers);
    if (threadIdx.x < kCuts * kMostStages) {
        ptx_mbarrier_init(ptx_shared_address(&b.barriers->full[threadIdx.x]), 1);
        ptx_mbarrier_init(ptx_shared_address(&b.barriers->empty[threadIdx.x]), kConsumerWarps * line.cluster);
        ptx_fence_barrier_init();
    }
    if (threadIdx.x == 0) {
        if (!p.tiled) ptx_tma_prefetch_map(&w_map);
        for (int i = 0; i < kNotes; i++) {
            ptx_mbarrier_init(ptx_shared_address(&b.barriers->notes_full[i]), 32);
            ptx_mbarrier_init(ptx_shared_address(&b.barriers->notes_empty[i]),
                              2 * kWarpgroup + (line.way == WAY_ANY ? 0 : 2 * 32));
        }
        for (int i = 0; i < 2; i++) {
            for (int part = 0; part < kStagingParts; part++) {
                ptx_mbarrier_init(ptx_shared_address(&b.barriers->staging[i].full[part]), kWarpgroup);
                ptx_mbarrier_init(ptx_shared_address(&b.barriers->staging[i].empty[part]), 32);
            }
        }
        b.barriers->deal.init();
        ptx_fence_barrier_init();
    }
    if (!p.chained) epmoei_begin_dependent();
    int32_t *cumulative = (int32_t *)(shared + layout.cumulative);
    b.cumulative = cumulative;
    b.rank = line.cluster == 1 ? 0 : (int32_t)ptx_cluster_block_rank();
    b.clusters = (p.n + kBlockW * line.cluster - 1) / (kBlockW * line.cluster);
    b.first_tile = blockIdx.x / line.cluster;
    b.tile_step = gridDim.x / line.cluster;
    b.k_steps = (p.k + kBlockK - 1) / kBlockK;
    b.dealt = p.dealt;
    int16_t *order = line.ordered ? (int16_t *)(cumulative + p.num_experts + 1) : nullptr;
    b.order = order;
    if (order) order_experts(p, line.max_n, order, order + p.num_experts);
    b.tiles = (int64_t)gemm_count_tiles<kThreads>(p, line.max_n, cumulative, b.barriers->warp_sums, order) * b.clusters;
    __syncthreads();
    if (line.cluster > 1) ptx_cluster_sync(); /* the other block's barriers exist */

    if (threadIdx.x < kWarpgroup) {
        ptx_setmaxnreg_dec<kProducerRegisters>();
        if (threadIdx.x / 32 == 0)
            produce(p, b, &w_map, &x_maps);
        else if (threadIdx.x / 32 == 1)
            scout(p, b);
        else if (threadIdx.x / 32 >= 2 && line.way != WAY_ANY)
            store<2>(p, b, threadIdx.x / 32 - 2);
    } else {
        ptx_setmaxnreg_inc<kConsumerRegisters>();
        consume<T, kMaxN>(p, b);
    }
    if (line.cluster > 1) ptx_cluster_sync();     /* nothing arrives in a block that has ended */
    if (p.chained) epmoei_wait_for_predecessor(); /* nor does this kernel end before the one before it */
}

/* As many stages as fit into `limit` bytes of shared memory; false when too few for the product to overlap with the
 * copies. */
bool choose_pipeline(const epmoe_grouped_gemm_args_t *args, int32_t max_n, int32_t limit, pipeline_t *line,
                     int32_t *bytes)
{
    const int32_t each = kWeightBytes + max_n * kBlockK * 2, kSwizzleBytes = 1024;
    line->max_n = max_n;
    line->cluster = max_n > 128 ? 2 : 1; /* few tokens: their rows are few bytes beside the weights */
    line->ordered = max_n > 128 && args->num_experts > 1 && args->num_experts <= 512;
    line->stage_bytes = 0;
    const int32_t list = (args->num_experts + 1) * 4 + (line->ordered ? args->num_experts * 4 : 0);
    const int32_t room = (limit - shared_layout(*line).cumulative - list) / kSwizzleBytes * kSwizzleBytes;
    const int32_t stages = room / each < kMostStages ? room / each : kMostStages;
    line->stage_bytes = line->ordered ? room : stages * each;
    *bytes = shared_layout(*line).cumulative + list;
    return stages >= kFewestStages;
}

bool needs_gather(const epmoe_grouped_gemm_args_t *args)
{
    return !args->x_sorted && (args->row_index || args->x_row_divisor > 1);
}

/* What a call knows of the launch before it. */
struct chain_t {
    bool chained;   /* it wrote x, and waited for all before it */
    int32_t *dealt; /* a word that is 0 when it has ended, or NULL */
};

template <typename T, int kMaxN>
epmoe_status_t launch_kernel(const epmoe_grouped_gemm_args_t *args, chain_t chain, const void *x, int64_t x_rows,
                             const pipeline_t &line, int32_t bytes, epmoe_stream_t stream)
{
    gemm_params_t p = gemm_params(args);
    p.chained = chain.chained;
    if (epmoei_grouped_gemm_deals_sm90(args->num_experts, args->max_rows, args->k)) p.dealt = chain.dealt;
    void (*kernel)(gemm_params_t, pipeline_t, CUtensorMap, x_maps_t) = grouped_gemm_kernel<T, kMaxN>;
    CUtensorMap w_map = {};
    x_maps_t x_maps;
    if (!p.tiled) EPMOEI_CHECK(encode_weights(&w_map, args, &p, args->x_dtype, 2, kBlockW));
    EPMOEI_CHECK(encode_rows(&x_maps, args->x_dtype, 2, x, x_rows, args->k, line.max_n / line.cluster));
    EPMOEI_CHECK(epmoei_allow_shared(kernel, (size_t)bytes, "grouped_gemm_sm90"));
    const int64_t tiles = gemm_max_row_tiles(args, line.max_n) * epmoei_ceil_div(args->n, kBlockW * line.cluster);
    const int64_t resident = (int64_t)epmoei_device_current()->num_sms * kBlocksPerSm<kMaxN>;
    const int64_t clusters = epmoei_min64(tiles, resident / line.cluster);
    return epmoei_cuda_status((int32_t)epmoei_launch_clusters(kernel, line.cluster,
                                                              dim3((unsigned)(clusters * line.cluster)), dim3(kThreads),
                                                              (size_t)bytes, stream, p, line, w_map, x_maps),
                              "grouped_gemm_sm90");
}

template <typename T> epmoe_status_t launch(const epmoe_grouped_gemm_args_t *args, chain_t chain, epmoe_stream_t stream)
{
    const void *x = args->x;
    int64_t x_rows = args->x_sorted ? args->max_rows : args->num_slots;
    if (needs_gather(args)) {
        EPMOEI_CHECK(epmoei_sort_rows_sm80(args, args->workspace, stream));
        x = args->workspace;
        x_rows = args->max_rows;
    }
    /* An SM has 1 KB more than a block may have, and keeps 1 KB for each block. */
    const int32_t whole = epmoei_device_current()->shared_bytes_per_block, half = (whole + 1024) / 2 - 1024;
    int32_t max_n = epmoei_grouped_gemm_width_sm90(args->num_experts, args->max_rows, args->n, args->k), bytes = 0;
    pipeline_t line;
    line.way = epilogue_way(args);
    if (max_n <= kNarrow && line.way != WAY_ANY && choose_pipeline(args, max_n, half, &line, &bytes))
        return launch_kernel<T, kNarrow>(args, chain, x, x_rows, line, bytes, stream);
    while (!choose_pipeline(args, max_n, whole, &line, &bytes)) max_n -= 32;
    return launch_kernel<T, kWide>(args, chain, x, x_rows, line, bytes, stream);
}

/* Groups of 8 gate and 8 up rows must be whole; others are the sm80 kernel's. */
bool is_supported(const epmoe_grouped_gemm_args_t *args)
{
    return args->activation >= EPMOE_ACTIVATION_NONE || args->n % 16 == 0;
}

} // namespace

extern "C" int64_t epmoei_grouped_gemm_workspace_sm90(const epmoe_grouped_gemm_args_t *args)
{
    if (!is_supported(args) || args->x_sorted) return 0; /* a query need not say yet whether there is a row index */
    return (int64_t)args->max_rows * args->k * 2;
}

static epmoe_status_t run(const epmoe_grouped_gemm_args_t *args, chain_t chain, epmoe_stream_t stream)
{
    EPMOEI_CHECK(epmoei_grouped_gemm_check_cuda(args));
    if (!is_supported(args)) return epmoei_grouped_gemm_sm80(args, stream);
    int64_t bytes = needs_gather(args) ? epmoei_grouped_gemm_workspace_sm90(args) : 0;
    if (bytes && (!args->workspace || args->workspace_bytes < bytes))
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "workspace is %p with workspace_bytes %lld: expected %lld",
                           args->workspace, (long long)args->workspace_bytes, (long long)bytes);
    EPMOEI_CHECK_ALIGNED(args->workspace, 16);
    chain.chained |= needs_gather(args); /* the pass that brings x's rows waits for all before it */
    return args->x_dtype == EPMOE_BF16 ? launch<__nv_bfloat16>(args, chain, stream)
                                       : launch<__half>(args, chain, stream);
}

extern "C" epmoe_status_t epmoei_grouped_gemm_sm90(const epmoe_grouped_gemm_args_t *args, epmoe_stream_t stream)
{
    return run(args, {false, nullptr}, stream);
}

extern "C" epmoe_status_t epmoei_grouped_gemm_chained_sm90(const epmoe_grouped_gemm_args_t *args, int32_t *dealt,
                                                           epmoe_stream_t stream)
{
    return run(args, {true, dealt}, stream);
}
