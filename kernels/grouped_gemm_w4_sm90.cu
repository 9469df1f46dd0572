/* Grouped GEMM on 4-bit weights (W4 and MXFP4) on wgmma for Hopper, x in bf16.
 *
 * Weights take wgmma's 64-row side and come to it from registers: a thread loads the codes of its fragments, 16 bytes
 * for 64 columns, and makes bf16 of them while the tensor cores run on what it made before. Tokens lie in shared memory
 * on the column side, in multiples of 8.
 * Roles by warp, as in grouped_gemm_sm90.cu:
 *   producer       a warp whose lanes start the copies of a stage: contiguous ones of codes, scales and zeros, and
 *                  boxes of x in the sorted order (a pass before this kernel brings them there when they are not)
 *   scout          a warp that looks up, a tile ahead, where the rows of a tile go and what they weigh
 *   consumers      two or four warpgroups of 64 weight rows each, or one of 128
 *   storers        two warps, which take the consumers' finished outputs from shared memory to y
 *
 * Four cuts of it. With few tokens an expert the weights must stream, 40 of them a clock of an SM, and a weight takes
 * more instructions than its products: four warps a scheduler, so that one always has some. Up to 16 tokens in two
 * blocks of 128 weight rows, whose ends hide behind each other's streams; up to 32 in one block of 256, so that x,
 * which weighs four times as much beside 4-bit weights as beside bf16, is fetched seldom. Up to 96 tokens again two
 * blocks, of 128 rows in one warpgroup. With many tokens 128 rows by 256 tokens: what was dequantised meets twice as
 * many, and two blocks of a cluster fetch half of them each for both.
 *
 * Each output's sum runs over K in steps of 16 whatever the cut and the width: results do not depend on other rows. */
#include "kernels/grouped_gemm_quant.h"
#include "kernels/grouped_gemm_tile.h"
#include "kernels/grouped_gemm_w4_loops_sm90.cuh"
#include "kernels/launch_cuda.cuh"

namespace
{

/* What a lane of the producer copies: lanes 0 to 3 codes, 4 to 7 scales, 8 to 11 zeros, of a tile of 64 rows each; from
 * 16 on each a block of x. */
template <kind_t kKind, typename Cut> struct copies_t {
    static_assert(kCutTiles<Cut> <= 4 && Cut::kDepth <= 16, "lanes enough");
    typedef walk_t<Cut, kKind == W4_LONG> at_t;
    const char *source;
    uint32_t unit;   /* unsigned: a sign would be kept beside it */
    uint32_t target; /* in a stage */
    int32_t kind;    /* 0 codes, 1 scales, 2 zeros, above none of the three */
    int32_t w_place; /* which of the tiles of 64 rows */
    int32_t depth;   /* which of the blocks of x, if any */

    __device__ __forceinline__ copies_t(const weights_t &w, const block_t &b)
    {
        const int32_t lane = threadIdx.x % 32;
        kind = lane / 4, w_place = lane % 4, depth = lane - 16;
        source = kind == 0 ? w.data : kind == 1 ? w.scales : w.zeros;
        unit = kind == 0 ? EPMOEI_TILE_BYTES : kind == 1 ? w.scales_bytes : EPMOEI_TILE_ROWS;
        const uint32_t slot = unit * Cut::kDepth * (kind == 0 || kKind == W4_LONG ? 1 : 2);
        target = (kind == 0   ? b.line.layout.codes
                  : kind == 1 ? b.line.layout.scales
                              : b.line.layout.zeros) +
                 w_place * slot;
    }
    /* A stage's weights; its barrier then also waits for the tokens. */
    __device__ __forceinline__ void load_weights(const weights_t &w, const block_t &b, const at_t &at,
                                                 const ring_t &ring) const
    {
        const uint32_t done = ptx_shared_address(b.barriers->full) + 8 * ring.stage;
        if (threadIdx.x % 32 == 0) {
            const int32_t group_bytes = w.scales_bytes + (w.zeros ? EPMOEI_TILE_ROWS : 0);
            ptx_mbarrier_arrive_expect(done, at.w_tiles * (at.blocks * EPMOEI_TILE_BYTES + at.groups * group_bytes) +
                                                 Cut::kDepth * at.tile.width * kBlockK * 2);
        }
        __syncwarp();
        if (kind >= 3) return;
        const int32_t count = kind == 0 ? at.blocks : kind == 1 || w.zeros ? at.groups : 0;
        const uint32_t in_tile = kind == 0 ? w.blocks : w.groups, first = kind == 0 ? at.block : at.group;
        const int64_t from = (at.w_tile + w_place) * in_tile + first;
        const uint32_t to = b.base + ring.stage * b.line.layout.stage_bytes + target;
        if (w_place >= at.w_tiles || count == 0) return;
        if (at.tile.alone)
            ptx_bulk_load_once(to, source + from * unit, count * unit, done);
        else
            ptx_bulk_load(to, source + from * unit, count * unit, done);
    }
    __device__ __forceinline__ void load_tokens(const block_t &b, const at_t &at, const ring_t &ring,
                                                const x_maps_t *x_maps) const
    {
        if (depth < 0 || depth >= Cut::kDepth) return;
        const uint32_t done = ptx_shared_address(b.barriers->full) + 8 * ring.stage;
        const int32_t col = (at.block + depth) * kBlockK, row = at.tile.row + at.first;
        const uint32_t to =
            b.base + ring.stage * b.line.layout.stage_bytes + (depth * b.line.max_n + at.first) * kBlockK * 2;
        const CUtensorMap *map = &x_maps->map[at.part / 8 - 1];
        if (Cut::kCluster == 1)
            ptx_tma_load_2d(to, map, done, col, row);
        else
            ptx_tma_load_2d_multicast(to, map, done, col, row, 3);
    }
};

/* One warp. Where only x comes from the kernel before this one, the first stages' weights are on their way while that
 * one ends. */
template <kind_t kKind, typename Cut>
__device__ __forceinline__ void produce(const gemm_params_t &p, const weights_t &w, const block_t &b,
                                        const x_maps_t *x_maps)
{
    const copies_t<kKind, Cut> copies(w, b);
    const uint32_t empty = ptx_shared_address(b.barriers->empty);
    ring_t ring = {0, 0};
    walk_t<Cut, kKind == W4_LONG> at;
    at.index = b.first_tile;
    bool more = at.enter(p, w, b);
    if (p.chained) {
        int32_t early = 0;
        for (; more && early < b.line.stages; early++, ring.advance(b.line.stages)) {
            copies.load_weights(w, b, at, ring);
            __syncwarp();
            more = at.advance(p, w, b);
        }
        ring = {0, 0};
        at.index = b.first_tile;
        more = at.enter(p, w, b);
        epmoei_begin_dependent();
        for (; early > 0; early--, ring.advance(b.line.stages)) {
            copies.load_tokens(b, at, ring, x_maps);
            more = at.advance(p, w, b);
        }
        __syncwarp();
    }
    for (; more; more = at.advance(p, w, b), ring.advance(b.line.stages)) {
        wait_barrier(empty + 8 * ring.stage, ring.parity ^ 1);
        copies.load_weights(w, b, at, ring);
        copies.load_tokens(b, at, ring, x_maps);
        __syncwarp();
    }
}

/* One warp. */
template <typename Cut> __device__ __forceinline__ void scout(const gemm_params_t &p, const block_t &b)
{
    const int lane = threadIdx.x % 32;
    const uint32_t full = ptx_shared_address(b.barriers->notes_full),
                   empty = ptx_shared_address(b.barriers->notes_empty);
    ring_t ring = {0, 0};
    for (int64_t index = b.first_tile;; index += b.tile_step) {
        tile_t tile = {};
        if (index < b.tiles) {
            tile = find_tile<Cut>(p, b, index);
            if (tile.rows == 0) continue;
        }
        wait_barrier(empty + 8 * ring.stage, ring.parity ^ 1);
        note_tokens(p, b, ring.stage, tile, lane);
        if (lane == 0) b.notes_of(ring.stage)->tile = tile;
        ptx_mbarrier_arrive(full + 8 * ring.stage);
        if (tile.width == 0) return;
        ring.advance(2);
    }
}

__device__ __forceinline__ void take_staging(const block_t &b, int32_t warpgroup, epilogue_t &e)
{
    e.group = warpgroup;
    e.staging = b.shared + b.line.layout.staging + warpgroup * kStagingBytes;
    e.barriers = &b.barriers->staging[warpgroup];
}

__device__ __forceinline__ void read_notes(const block_t &b, int32_t stage, const tile_t &tile, epilogue_t &e)
{
    e.rows = b.rows_of(stage);
    e.scales = b.scales_of(stage);
    e.num_rows = tile.rows;
    e.expert = tile.expert;
}

/* On tile t of the warpgroup's 64 weight rows; false when they are behind the last and the products of whatever the
 * stages held. */
template <typename Cut>
__device__ __forceinline__ bool take_w_tile(const gemm_params_t &p, const weights_t &w, const block_t &b,
                                            const tile_t &tile, int t, epilogue_t &e)
{
    const int32_t w_tile = b.first_w_tile<Cut>(tile) + e.group * Cut::kTiles + t;
    e.col = w_tile * (p.gated ? EPMOEI_TILE_ROWS / 2 : EPMOEI_TILE_ROWS);
    return w_tile < w.tiles;
}

/* One of two warps: for every other warpgroup of consumers. */
template <typename Cut>
__device__ __forceinline__ void store(const gemm_params_t &p, const weights_t &w, const block_t &b, int32_t first_group)
{
    constexpr int kMost = (Cut::kGroups + 1) / 2;
    ring_t notes = {0, 0}, parts[kMost] = {};
    for (;; notes.advance(2)) {
        wait_barrier(ptx_shared_address(&b.barriers->notes_full[notes.stage]), notes.parity);
        const tile_t tile = b.notes_of(notes.stage)->tile;
        if (tile.width == 0) return;
#pragma unroll
        for (int i = 0; i < kMost; i++) {
            if (Cut::kGroups == 1 && first_group > 0) break;
            epilogue_t e;
            take_staging(b, first_group + 2 * i, e);
            read_notes(b, notes.stage, tile, e);
#pragma unroll 1
            for (int t = 0; t < Cut::kTiles; t++) {
                if (!take_w_tile<Cut>(p, w, b, tile, t, e)) break;
                if (p.gated)
                    store_parts<4, 4>(p, e, parts[i]);
                else
                    store_parts<8, 4>(p, e, parts[i]);
            }
        }
        ptx_mbarrier_arrive(ptx_shared_address(&b.barriers->notes_empty[notes.stage]));
    }
}

template <kind_t kKind, typename Cut>
__device__ __forceinline__ void consume(const gemm_params_t &p, const weights_t &w, const block_t &b)
{
    const uint32_t notes_full = ptx_shared_address(b.barriers->notes_full);
    place_t place;
    place.begin(b);
    /* Two rings of two, of notes and of parts of the staging, are in place.bits over the product: registers are few. */
    for (;;) {
        const uint32_t note = place.bits >> 1 & 1;
        wait_barrier(notes_full + 8 * note, place.bits >> 2 & 1);
        const int32_t width = b.notes_of(note)->tile.width;
        if (width == 0) return;
        /* Zeroed here, not by the first wgmma: an accumulator that is read before it is written would be live in every
         * other width's code too. */
        float acc[Cut::kTiles][Cut::kMaxN / 2];
#pragma unroll
        for (int t = 0; t < Cut::kTiles; t++)
#pragma unroll
            for (int i = 0; i < Cut::kMaxN / 2; i++) acc[t][i] = 0.0f;
        switch (width) {
#define WIDTH(n)                                                                                                       \
    case n:                                                                                                            \
        if constexpr (n <= Cut::kMaxN && n % Cut::kStep == 0) {                                                        \
            multiply<kKind, Cut, n>(w, b, place, acc);                                                                 \
        }                                                                                                              \
        break
            WIDTH(8);
            WIDTH(16);
            WIDTH(24);
            WIDTH(32);
            WIDTH(48);
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
        const uint32_t done = place.bits >> 1 & 1;
        const tile_t tile = b.notes_of(done)->tile;
        ring_t parts = {(int32_t)(place.bits >> 3 & 1), place.bits >> 4 & 1};
        const int32_t thread = ptx_thread_index();
        epilogue_t e;
        e.tid = thread % kWarpgroup;
        take_staging(b, thread / kWarpgroup - 1, e);
        read_notes(b, done, tile, e);
#pragma unroll
        for (int t = 0; t < Cut::kTiles; t++) {
            if (!take_w_tile<Cut>(p, w, b, tile, t, e)) break;
            load_bias(p, e);
            finish_tile<__nv_bfloat16>(p, b.line.way, e, acc[t], parts);
        }
        ptx_mbarrier_arrive(notes_full + 8 * done + kNotesEmptyFromFull);
        place.bits = (place.bits & 1) | (place.bits + 2 & 6) | parts.stage << 3 | parts.parity << 4;
    }
}

template <kind_t kKind, typename Cut>
__global__ void __launch_bounds__(kCutThreads<Cut>, Cut::kBlocks)
    grouped_gemm_w4_kernel(const gemm_params_t p, const weights_t w, const pipeline_t line,
                           const __grid_constant__ x_maps_t x_maps)
{
    constexpr int kThreads = kCutThreads<Cut>;
    static_assert(ptx_registers_do(kThreads, Cut::kBlocks, Cut::kProducerRegisters, Cut::kRegisters), "too many");
    extern __shared__ __align__(1024) char shared[];
    block_t b = {line, shared};
    b.base = ptx_shared_address(shared);
    b.barriers = (barriers_t *)(shared + b.line.layout.barriers);
    if (threadIdx.x == 0) {
        for (int i = 0; i < line.stages; i++) {
            ptx_mbarrier_init(ptx_shared_address(&b.barriers->full[i]), 1);
            ptx_mbarrier_init(ptx_shared_address(&b.barriers->empty[i]), 4 * Cut::kGroups * Cut::kCluster);
        }
        for (int i = 0; i < 2; i++) {
            ptx_mbarrier_init(ptx_shared_address(&b.barriers->notes_full[i]), 32);
            ptx_mbarrier_init(ptx_shared_address(&b.barriers->notes_empty[i]),
                              Cut::kGroups * kWarpgroup + (line.way == WAY_ANY ? 0 : 2 * 32));
        }
        for (int i = 0; i < Cut::kGroups; i++)
            for (int part = 0; part < kStagingParts; part++) {
                ptx_mbarrier_init(ptx_shared_address(&b.barriers->staging[i].full[part]), kWarpgroup);
                ptx_mbarrier_init(ptx_shared_address(&b.barriers->staging[i].empty[part]), 32);
            }
        ptx_fence_barrier_init();
    }
    if (!p.chained) epmoei_begin_dependent();
    int32_t *cumulative = (int32_t *)(shared + b.line.layout.cumulative);
    b.cumulative = cumulative;
    b.rank = Cut::kCluster == 1 ? 0 : (int32_t)ptx_cluster_block_rank();
    const int32_t cluster_tiles = kCutTiles<Cut> * Cut::kCluster;
    b.clusters = (w.tiles + cluster_tiles - 1) / cluster_tiles;
    b.first_tile = blockIdx.x / Cut::kCluster;
    b.tile_step = gridDim.x / Cut::kCluster;
    b.tiles = (int64_t)gemm_count_tiles<kThreads>(p, line.max_n, cumulative, b.barriers->warp_sums) * b.clusters;
    __syncthreads();
    if (Cut::kCluster > 1) ptx_cluster_sync(); /* the other block's barriers exist */

    if (threadIdx.x < kWarpgroup) {
        ptx_setmaxnreg_dec<Cut::kProducerRegisters>();
        const int warp = threadIdx.x / 32;
        if (warp == 0)
            produce<kKind, Cut>(p, w, b, &x_maps);
        else if (warp == 1)
            scout<Cut>(p, b);
        else if (line.way != WAY_ANY)
            store<Cut>(p, w, b, warp - 2);
    } else {
        ptx_setmaxnreg_inc<Cut::kRegisters>();
        consume<kKind, Cut>(p, w, b);
    }
    if (Cut::kCluster > 1) ptx_cluster_sync();    /* nothing arrives in a block that has ended */
    if (p.chained) epmoei_wait_for_predecessor(); /* nor does this kernel end before the one before it */
}

weights_t describe_weights(const epmoe_grouped_gemm_args_t *args)
{
    const epmoe_weight_t *weight = &args->weight;
    const epmoei_quant_tiles_t tiles = epmoei_quant_tiles(weight->format, weight->scales_dtype, args->n, args->k,
                                                          weight->group_size, args->activation < EPMOE_ACTIVATION_NONE);
    weights_t w = {};
    w.data = (const char *)weight->data;
    w.scales = (const char *)weight->scales;
    if (weight->format != EPMOE_FORMAT_MXFP4) w.zeros = (const char *)weight->zeros;
    w.tiles = (int32_t)tiles.tiles;
    w.blocks = (int32_t)tiles.blocks;
    w.groups = (int32_t)tiles.groups;
    w.scales_bytes = EPMOEI_TILE_ROWS * (int32_t)epmoe_dtype_size(weight->scales_dtype);
    w.pair_bytes = w.scales_bytes / 32;
    w.scales_dtype = weight->scales_dtype;
    w.base = 0x43004300u;
    if (weight->format != EPMOE_FORMAT_MXFP4 && weight->group_size >= args->k)
        w.group_blocks = w.blocks;
    else if (weight->group_size % kBlockK == 0)
        w.group_blocks = weight->group_size / kBlockK;
    else
        w.group_blocks = 0;
    return w;
}

/* Whether whole_codes_t takes whole rounds of it. */
bool takes_whole(const epmoe_grouped_gemm_args_t *args, const weights_t *w)
{
    if (args->weight.format == EPMOE_FORMAT_MXFP4) return true;
    return w->group_blocks == 2 && (w->scales_dtype == EPMOE_BF16 || w->scales_dtype == EPMOE_F16);
}

/* As many stages as fit into `limit` bytes of shared memory; false when too few for the product to overlap with the
 * copies. */
template <typename Cut>
bool choose_pipeline(const weights_t *w, int32_t num_experts, int32_t limit, pipeline_t *line, int32_t *bytes)
{
    const int32_t fewest = 3;
    line->noted = (int32_t)epmoei_round_up(line->max_n, kSelectTokens);
    for (line->stages = kMostStages; line->stages >= fewest; line->stages--) {
        line->layout = shared_layout<Cut>(line, w);
        *bytes = line->layout.cumulative + (num_experts + 1) * 4;
        if (*bytes <= limit) return true;
    }
    return false;
}

struct call_t {
    const epmoe_grouped_gemm_args_t *args;
    weights_t w;
    const void *x;
    int64_t x_rows;
    bool chained;
    epmoe_stream_t stream;
};

template <kind_t kKind, typename Cut> epmoe_status_t launch_kernel(const call_t *c, int32_t max_n, bool *fits)
{
    const epmoe_grouped_gemm_args_t *args = c->args;
    const int32_t num_sms = epmoei_device_current()->num_sms, whole = epmoei_device_current()->shared_bytes_per_block;
    const int32_t limit = (whole + 1024) / Cut::kBlocks - 1024; /* a block needs 1 KB beside its own */
    pipeline_t line = {};
    int32_t bytes = 0;
    weights_t w = c->w;
    w.whole = takes_whole(args, &w) ? args->k / kBlockK / kWholeBlocks<Cut> * kWholeBlocks<Cut> : 0;
    line.max_n = (int32_t)epmoei_min64(max_n, Cut::kMaxN);
    line.way = epilogue_way(args);
    while (!(*fits = choose_pipeline<Cut>(&w, args->num_experts, limit, &line, &bytes)) && line.max_n > 16)
        line.max_n -= 16;
    if (!*fits) return EPMOE_OK;

    x_maps_t x_maps;
    gemm_params_t p = gemm_params(args);
    p.chained = c->chained;
    EPMOEI_CHECK(encode_rows(&x_maps, EPMOE_BF16, 2, c->x, c->x_rows, args->k, line.max_n / Cut::kCluster));
    void (*kernel)(gemm_params_t, weights_t, pipeline_t, x_maps_t) = grouped_gemm_w4_kernel<kKind, Cut>;
    EPMOEI_CHECK(epmoei_allow_shared(kernel, (size_t)bytes, "grouped_gemm_w4_sm90"));
    const int64_t tiles =
        gemm_max_row_tiles(args, line.max_n) * epmoei_ceil_div(w.tiles, kCutTiles<Cut> * Cut::kCluster);
    const int64_t clusters = epmoei_min64(tiles, (int64_t)num_sms * Cut::kBlocks / Cut::kCluster);
    return epmoei_cuda_status(
        (int32_t)epmoei_launch_clusters(kernel, Cut::kCluster, dim3((unsigned)(clusters * Cut::kCluster)),
                                        dim3(kCutThreads<Cut>), (size_t)bytes, c->stream, p, w, line, x_maps),
        "grouped_gemm_w4_sm90");
}

template <kind_t kKind> epmoe_status_t launch(const call_t *c)
{
    const int32_t max_n = epmoei_grouped_gemm_width_w4_sm90(c->args->num_experts, c->args->max_rows);
    bool fits = false;
    if (max_n <= pair_t::kMaxN) EPMOEI_CHECK((launch_kernel<kKind, pair_t>(c, max_n, &fits)));
    if (!fits && max_n <= narrow_t::kMaxN) EPMOEI_CHECK((launch_kernel<kKind, narrow_t>(c, max_n, &fits)));
    if (!fits && max_n <= middle_t::kMaxN) EPMOEI_CHECK((launch_kernel<kKind, middle_t>(c, max_n, &fits)));
    if (!fits) EPMOEI_CHECK((launch_kernel<kKind, wide_t>(c, max_n, &fits)));
    return fits ? EPMOE_OK
                : epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "num_experts is %d: too many", c->args->num_experts);
}

bool needs_gather(const epmoe_grouped_gemm_args_t *args)
{
    return args->weight.g_idx || (!args->x_sorted && (args->row_index || args->x_row_divisor > 1));
}

/* Others are the sm80 kernel's. */
bool is_supported(const epmoe_grouped_gemm_args_t *args)
{
    const int32_t group = args->weight.group_size;
    return args->x_dtype == EPMOE_BF16 && (group >= args->k || group % (kBlockK / 2) == 0);
}

} // namespace

extern "C" int64_t epmoei_grouped_gemm_w4_workspace_sm90(const epmoe_grouped_gemm_args_t *args)
{
    if (!is_supported(args)) return epmoei_grouped_gemm_quant_workspace_sm80(args);
    /* A query need not say yet whether there is a row index. */
    if (args->x_sorted && !args->weight.g_idx) return 0;
    return (int64_t)args->max_rows * args->k * 2;
}

static epmoe_status_t run(const epmoe_grouped_gemm_args_t *args, bool chained, epmoe_stream_t stream)
{
    if (!is_supported(args)) return epmoei_grouped_gemm_quant_sm80(args, stream);
    int64_t bytes = needs_gather(args) ? epmoei_grouped_gemm_w4_workspace_sm90(args) : 0;
    if (bytes && (!args->workspace || args->workspace_bytes < bytes))
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "workspace is %p with workspace_bytes %lld: expected %lld",
                           args->workspace, (long long)args->workspace_bytes, (long long)bytes);
    call_t c = {args,  describe_weights(args), args->x, args->x_sorted ? args->max_rows : args->num_slots, chained,
                stream};
    if (needs_gather(args)) {
        EPMOEI_CHECK(args->weight.g_idx ? epmoei_gemm_order_x_sm80(args, args->workspace, stream)
                                        : epmoei_sort_rows_sm80(args, args->workspace, stream));
        c.x = args->workspace;
        c.x_rows = args->max_rows;
        c.chained = true; /* that pass waits for all before it */
    }
    if (args->weight.format == EPMOE_FORMAT_MXFP4) return launch<MXFP4>(&c);
    return c.w.group_blocks ? launch<W4_LONG>(&c) : launch<W4_SHORT>(&c);
}

extern "C" epmoe_status_t epmoei_grouped_gemm_w4_sm90(const epmoe_grouped_gemm_args_t *args, epmoe_stream_t stream)
{
    return run(args, false, stream);
}

extern "C" epmoe_status_t epmoei_grouped_gemm_w4_chained_sm90(const epmoe_grouped_gemm_args_t *args, int32_t *,
                                                              epmoe_stream_t stream)
{
    return run(args, true, stream);
}
