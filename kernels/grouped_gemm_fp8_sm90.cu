/* Grouped GEMM of E4M3 weights and activations on wgmma and TMA for Hopper, with fp32 promotion every 128 of K.
 *
 * Tokens take wgmma's 64-row side and weights its column side. A scale of an activation then belongs to a row of the
 * accumulator, of which a thread has two: two loads a step of 128 columns. With tokens on the column side it would be a
 * load for each of a thread's 32 or more columns, in every warp again, and shared memory, which feeds the tensor cores
 * too, is the tightest of all here. What that costs is tensor time for tokens that are not there, and there is enough
 * of it where tokens are few: 64 of them take a third of the time in which their weights come from memory.
 *
 * A block holds 256 weight rows and up to 128 tokens in each of its stages of 128 columns. Roles by warp:
 *   producer       one thread starts the copies of weights, codes of tokens and their scales into the stages, running
 *                  ahead into the next tiles; another warp puts the weights' scales beside them
 *   dealer         gives its cluster the next tile when that is near the end of one (kernels/deal_tiles_sm90.cuh)
 *   scout          a warp that looks up, as soon as a tile is known, where its rows go and what they weigh
 *   consumers      two warpgroups. Tiles above 64 tokens are shared, 64 tokens each; smaller ones they take by turns.
 *                  One stores while the other multiplies: in a shared tile one of them is some steps ahead.
 * A consumer thread has 128 accumulators, of 64 tokens by 256 weight rows, and twice 32 for the products of 128 columns
 * and 64 weight rows, one of which is scaled and added while the tensor cores make the other: a warpgroup alone keeps
 * them busy. Its tokens of a step are in registers, 16 of a thread, so that shared memory gives them once and not to
 * each product: all together that is the most that fits 232 registers.
 * Two blocks of a cluster take neighbouring weight rows and the same tokens: each fetches half of them for both.
 * Gate and up rows arrive regrouped, 8 gate rows and then their 8 up rows, by two more dimensions of the tensor map:
 * 256 of them are the 128 outputs under one scale of the quantised h.
 * What bounds a step of 128 tokens: 1024 clocks of tensor cores, and of shared memory 512 for the weights that they
 * read, 128 for tokens and 384 for the copies; of 64 tokens or less: 1660 clocks of the memory's bandwidth for 32 KB of
 * weights. */
#include "kernels/grouped_gemm_fp8_scales_sm90.cuh"
#include "kernels/launch_cuda.cuh"
#include "kernels/ptx_wgmma_fp8.cuh"

namespace
{

/* The weights of a step into its stage, whose barrier then also waits for the tokens. */
__device__ __forceinline__ void load_weights(const gemm_params_t &p, const block_t &b, const walk_t &at,
                                             const ring_t &ring, const CUtensorMap *w_map)
{
    const uint32_t done = ptx_shared_address(b.barriers->full) + 8 * ring.stage;
    ptx_mbarrier_arrive_expect(done, kWeightBytes + at.tile.width * kTileK + scale_bytes(at.tile));
    const uint32_t to = b.base + ring.stage * b.stage_bytes;
    const int32_t row = p.gated ? 0 : at.block * kTileW, group = p.gated ? at.block * (kTileW / 16) : 0;
    if (at.tile.alone)
        ptx_tma_load_once_5d(to, w_map, done, at.step * kTileK, row, 0, group, at.tile.expert);
    else
        ptx_tma_load_5d(to, w_map, done, at.step * kTileK, row, 0, group, at.tile.expert);
}

/* Scales come by the copy that takes bytes: a tile begins at any row, and a box of theirs would then begin off the 16
 * bytes to which the innermost coordinate of a tensor of floats has to be aligned. */
__device__ __forceinline__ void load_tokens(const block_t &b, const epmoei_fp8_rows_t &x, const walk_t &at,
                                            const ring_t &ring, const x_maps_t *x_maps)
{
    const uint32_t done = ptx_shared_address(b.barriers->full) + 8 * ring.stage;
    ptx_bulk_load(ptx_shared_address(b.scales) + ring.stage * b.scales_each * 4,
                  x.scales + at.step * x.stride + at.tile.row - first_scale(at.tile), scale_bytes(at.tile), done);
    if (at.part == 0) return; /* 8 tokens: all of them are the other block's */
    const int32_t first = at.block & (b.line.cluster - 1) ? at.tile.width - at.part : 0;
    const uint32_t to = b.base + ring.stage * b.stage_bytes + kWeightBytes + first * kTileK;
    const CUtensorMap *map = &x_maps->map[at.part / 8 - 1];
    if (b.line.cluster == 1)
        ptx_tma_load_2d(to, map, done, at.step * kTileK, at.tile.row);
    else
        ptx_tma_load_2d_multicast(to, map, done, at.step * kTileK, at.tile.row + first, 3);
}

/* One warp. Only x comes from the kernel before this one: the first stages' weights are on their way while that one
 * ends. */
__device__ __forceinline__ void produce(const gemm_params_t &p, const block_t &b, const epmoei_fp8_rows_t &x,
                                        const CUtensorMap *w_map, const x_maps_t *x_maps)
{
    const uint32_t empty = ptx_shared_address(b.barriers->empty);
    const int32_t early = min(b.line.stages, b.line.k_steps); /* of the first tile */
    ring_t ring = {0, 0};
    walk_t at = {};
    if (!at.enter(p, b)) return;
    for (; at.step < early; at.step++, ring.advance(b.line.stages))
        if (ptx_elect_one()) load_weights(p, b, at, ring, w_map);
    ring = {0, 0};
    epmoei_begin_dependent();
    for (at.step = 0; at.step < early; at.step++, ring.advance(b.line.stages))
        if (ptx_elect_one()) {
            load_tokens(b, x, at, ring, x_maps);
            b.ask_at(at.step);
        }
    at.step--;
    for (; at.advance(p, b); ring.advance(b.line.stages)) {
        wait_barrier(empty + 8 * ring.stage, ring.parity ^ 1);
        if (ptx_elect_one()) {
            load_weights(p, b, at, ring, w_map);
            load_tokens(b, x, at, ring, x_maps);
            b.ask_at(at.step);
        }
    }
}

/* One warp. */
__device__ __forceinline__ void scout(const gemm_params_t &p, const block_t &b)
{
    const int lane = threadIdx.x % 32;
    const uint32_t full = ptx_shared_address(b.barriers->notes_full),
                   empty = ptx_shared_address(b.barriers->notes_empty);
    ring_t ring = {0, 0};
    for (int32_t count = 0;; count++) {
        const int64_t index = b.tile_number(count);
        tile_t tile = {};
        if (index < b.tiles) tile = find_tile(p, b, index);
        wait_barrier(empty + 8 * ring.stage, ring.parity ^ 1);
#pragma unroll 1
        for (int i = lane; i < tile.rows; i += 32) {
            int32_t row = tile.row + i, slot = p.row_index ? p.row_index[row] : row;
            if (slot >= p.num_slots) slot = -1;
            b.rows_of(ring.stage)[i] = slot < 0 ? -1 : p.y_sorted ? row : slot;
            const float weight = p.row_weights && slot >= 0 ? p.row_weights[slot] : 1.0f;
            b.scales_of(ring.stage)[i] = p.weight_on_input ? make_float2(weight, 1.0f) : make_float2(1.0f, weight);
        }
        if (lane == 0) b.notes_of(ring.stage)->tile = tile;
        __syncwarp();
        if (lane == 0) ptx_mbarrier_arrive(full + 8 * ring.stage);
        if (tile.width == 0) return;
        ring.advance(kNotes);
    }
}

/* One warp: deals tiles, and zeroes the word by which the product that reads y will. */
__device__ __forceinline__ void deal(const block_t &b, const epmoei_fp8_rows_t &y)
{
    if (threadIdx.x % 32) return;
    epmoei_wait_for_predecessor(); /* which may have zeroed the one, and still use the other */
    if (blockIdx.x == 0 && y.dealt) *y.dealt = 0;
    if (!b.dealt || b.rank() != 0 || b.first_tile >= b.tiles) return;
    for (int32_t count = 1;; count++)
        if (b.barriers->deal.deal(count, b.dealt, b.tile_step, b.tiles, b.line.cluster) == b.tiles) return;
}

/* This warp has read the stage, for `groups` warpgroups: to the barriers of every block whose copies overwrite it. */
__device__ __forceinline__ void release(const block_t &b, uint32_t empty, int32_t groups)
{
    const int32_t lane = threadIdx.x % 32;
    __syncwarp(); /* other lanes' loads, for which one arrives */
    if (b.line.cluster == 1) {
        if (lane < groups) ptx_mbarrier_arrive(empty);
    } else if (lane < 2 * groups)
        ptx_mbarrier_arrive_at(empty, lane % 2);
}

/* What a consumer thread holds of a step, apart from accumulators. */
struct step_t {
    uint32_t x[kTileK / 32][4]; /* its part of the tokens' codes, of wgmma's 32 columns each */
    float x_scale[2];           /* of tokens lane/4 and lane/4 + 8 of the warp's */
};

/* Waits for the stage. x_at: bytes from its beginning to what the lane gives ldmatrix of the first 32 columns;
 * scales_at: address of the lane's first scale in stage 0. */
__device__ __forceinline__ void load_step(const block_t &b, const ring_t &ring, uint32_t full, uint32_t x_at,
                                          uint32_t scales_at, step_t &s)
{
    const uint32_t x = b.base + ring.stage * b.stage_bytes + x_at, scales = scales_at + ring.stage * b.scales_each * 4;
    wait_barrier(full + 8 * ring.stage, ring.parity);
#pragma unroll
    for (int kk = 0; kk < kTileK / 32; kk++) ptx_ldmatrix_x4(s.x[kk], x ^ kk << 5);
    s.x_scale[0] = __uint_as_float(ptx_load_shared_4(scales));
    s.x_scale[1] = __uint_as_float(ptx_load_shared_4(scales + 32));
}

/* part = x w^T over a step, of 64 weight rows from the descriptor w on. */
__device__ __forceinline__ void start_part(float (&part)[32], const step_t &s, uint32_t w)
{
    ptx_wgmma_fence();
    ptx_wgmma_e4m3_n64<false>(part, s.x[0], wgmma_descriptor(w));
#pragma unroll
    for (int kk = 1; kk < kTileK / 32; kk++) /* 32 bytes, 2 in the descriptor's units */
        ptx_wgmma_e4m3_n64<true>(part, s.x[kk], wgmma_descriptor(w + 2 * kk));
    ptx_wgmma_commit();
}

/* Until kLater parts that were started after this one, and no more, are under way. */
template <int kLater> __device__ __forceinline__ void await_part(float (&part)[32])
{
    ptx_wgmma_wait<kLater>();
    ptx_wgmma_hold(part);
}

/* What multiplies products: [token][blocks of 8 weight rows at even and at odd places]. */
typedef float scales_t[2][2];

template <int kPart>
__device__ __forceinline__ void add_part(float (&acc)[128], const float (&part)[32], const scales_t &scale)
{
#pragma unroll
    for (int i = 0; i < 32; i++) acc[32 * kPart + i] = fmaf(part[i], scale[i / 2 % 2][i / 4 % 2], acc[32 * kPart + i]);
}

__device__ __forceinline__ void load_scales(scales_t &scale, const step_t &s, uint32_t weight_scales)
{
    uint32_t w[2];
    ptx_load_shared_8(w, weight_scales);
#pragma unroll
    for (int i = 0; i < 4; i++) scale[i / 2][i % 2] = s.x_scale[i / 2] * __uint_as_float(w[i % 2]);
}

/* What a warpgroup multiplies of a tile. */
struct share_t {
    int32_t first;  /* of its 64 tokens */
    int32_t groups; /* warpgroups for which it gives stages back */
    bool leads;     /* tells the other one that it is ahead */
};

/* acc = x w^T over all of K, of 64 tokens. The products of 64 weight rows alternate between two parts, so that one is
 * scaled and added while the tensor cores make the other, whatever the other warpgroup does. The last part of a step is
 * added while the first one of the next step is made. */
__device__ __forceinline__ void multiply(const block_t &b, const tile_t *tile, const share_t &share, ring_t &ring,
                                         float (&acc)[128])
{
    constexpr int kPartStart = 64 * kTileK / 16;
    const int32_t lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
    const uint32_t full = ptx_shared_address(b.barriers->full), empty = ptx_shared_address(b.barriers->empty);
    const uint32_t x_at = kWeightBytes + (share.first + 16 * warp + lane % 16) * kTileK + ((lane / 16 ^ lane % 8) << 4);
    const uint32_t scales_at =
        ptx_shared_address(b.scales) + 4 * (first_scale(*tile) + share.first + 16 * warp + lane / 4);
    float part[2][32];
    step_t s;
    scales_t scale;
#pragma unroll
    for (int i = 0; i < 32; i++) part[0][i] = part[1][i] = 0.0f;
    load_step(b, ring, full, x_at, scales_at, s);
#pragma unroll 1
    for (int step = 0; step < b.line.k_steps; step++) {
        const uint32_t w = descriptor_start(b.base + ring.stage * b.stage_bytes);
        const uint32_t w_scales = ptx_shared_address(b.weight_scales_of(ring.stage));
        start_part(part[0], s, w);
        start_part(part[1], s, w + kPartStart);
        load_scales(scale, s, w_scales);
        await_part<1>(part[0]);
        add_part<0>(acc, part[0], scale);
        start_part(part[0], s, w + 2 * kPartStart);
        await_part<1>(part[1]);
        add_part<1>(acc, part[1], scale);
        start_part(part[1], s, w + 3 * kPartStart);
        load_scales(scale, s, w_scales + 8);
        await_part<1>(part[0]);
        add_part<2>(acc, part[0], scale);
        await_part<0>(part[1]);
        release(b, empty + 8 * ring.stage, share.groups);
        if (share.leads && step + 1 == b.line.lead) ptx_named_barrier_arrive<2>(2 * kWarpgroup);
        ring.advance(b.line.stages);
        if (step + 1 < b.line.k_steps) load_step(b, ring, full, x_at, scales_at, s);
        add_part<3>(acc, part[1], scale);
    }
}

/* A tile of one warpgroup: its product is done, and the other, which waits for that, may go on to later stages. Without
 * the wait it could come to a stage two rounds before its turn, where the parity that it waits for is an old one's. */
__device__ __forceinline__ void end_alone(int32_t group)
{
    if (group == 0)
        ptx_named_barrier_arrive<4>(2 * kWarpgroup);
    else
        ptx_named_barrier_arrive<5>(2 * kWarpgroup);
}
__device__ __forceinline__ void await_other(int32_t group)
{
    if (group == 0)
        ptx_named_barrier<5>(2 * kWarpgroup);
    else
        ptx_named_barrier<4>(2 * kWarpgroup);
}

/* After the product, of which it keeps nothing in registers. */
__device__ __forceinline__ fp8_epilogue_t fp8_epilogue(const gemm_params_t &p, const block_t &b, uint32_t note)
{
    const int32_t thread = ptx_thread_index(), warp = thread / 32 - 4;
    const tile_t &tile = b.notes_of(note)->tile;
    const int32_t first = 16 * (tile.rows > 64 ? warp : warp % 4);
    fp8_epilogue_t e;
    e.lane = thread % 32;
    e.staging = b.shared + shared_layout(b.line).staging + warp * kFp8StagingBytes;
    e.rows = b.rows_of(note) + first;
    e.scales = b.scales_of(note) + first;
    e.num_rows = tile.rows - first;
    e.expert = tile.expert;
    e.col = b.w_block(tile) * (p.gated ? kTileW / 2 : kTileW);
    return e;
}

__device__ __forceinline__ void consume(const gemm_params_t &p, const weight_scales_t &w, const epmoei_fp8_rows_t &y,
                                        const block_t &b)
{
    const uint32_t notes_full = ptx_shared_address(b.barriers->notes_full);
    const uint32_t notes_empty = ptx_shared_address(b.barriers->notes_empty);
    const int32_t group = threadIdx.x / kWarpgroup - 1;
    ring_t ring = {0, 0};
    int32_t turn = 0; /* whose the next tile of at most 64 tokens is, and who leads: who is free first */
    for (uint32_t count = 0;; count++) {
        const uint32_t note = count % kNotes;
        wait_barrier(notes_full + 8 * note, count / kNotes % 2);
        const tile_t *tile = &b.notes_of(note)->tile;
        const int32_t rows = tile->rows;
        if (rows == 0) return;
        const bool shared = rows > 64, mine = shared || turn == group;
        if (mine) {
            const share_t share = {shared ? 64 * group : 0, shared ? 1 : 2, shared && turn == group};
            float acc[128];
#pragma unroll
            for (int i = 0; i < 128; i++) acc[i] = 0.0f;
            if (shared && b.line.lead && turn != group) ptx_named_barrier<2>(2 * kWarpgroup);
            multiply(b, tile, share, ring, acc);
            if (!shared) end_alone(group);
            const fp8_epilogue_t e = fp8_epilogue(p, b, note);
            if (w.of_rows && e.num_rows > 0) scale_rows(p, w, e, acc);
            store_tile(p, y, b.line.way, e, acc);
        } else {
            await_other(group);
            skip_steps(ring, b.line.k_steps, b.line.stages);
        }
        if (!shared) turn ^= 1;
        __syncwarp();
        if (threadIdx.x % 32 == 0) ptx_mbarrier_arrive(notes_empty + 8 * note);
    }
}

__global__ void __launch_bounds__(kThreads, 1)
    grouped_gemm_fp8_kernel(const gemm_params_t p, const pipeline_t line, const weight_scales_t w,
                            const epmoei_fp8_rows_t x, const epmoei_fp8_rows_t y,
                            const __grid_constant__ CUtensorMap w_map, const __grid_constant__ x_maps_t x_maps)
{
    constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
    static_assert(ptx_registers_do(kThreads, 1, kProducerRegisters, kConsumerRegisters), "too many");
    extern __shared__ __align__(1024) char shared[];
    const shared_layout layout(line);
    block_t b;
    b.line = line;
    b.shared = shared;
    b.base = ptx_shared_address(shared);
    b.stage_bytes = layout.stage;
    b.notes = shared + layout.notes;
    b.notes_bytes = layout.notes_bytes;
    b.barriers = (barriers_t *)(shared + layout.barriers);
    b.scales = (float *)(shared + layout.scales);
    b.scales_each = layout.scales_each;
    if (threadIdx.x == 0) {
        ptx_tma_prefetch_map(&w_map);
        for (int i = 0; i < line.stages; i++) {
            ptx_mbarrier_init(ptx_shared_address(&b.barriers->full[i]), 2); /* codes, scales of weights */
            ptx_mbarrier_init(ptx_shared_address(&b.barriers->empty[i]), kConsumerWarps * line.cluster);
        }
        for (int i = 0; i < kNotes; i++) {
            ptx_mbarrier_init(ptx_shared_address(&b.barriers->notes_full[i]), 1);
            ptx_mbarrier_init(ptx_shared_address(&b.barriers->notes_empty[i]), kConsumerWarps);
        }
        b.barriers->deal.init();
        ptx_fence_barrier_init();
    }
    int32_t *cumulative = (int32_t *)(shared + layout.cumulative);
    b.cumulative = cumulative;
    b.clusters = (p.n + kTileW * line.cluster - 1) / kTileW >> (line.cluster - 1);
    b.first_tile = blockIdx.x >> (line.cluster - 1);
    b.tile_step = gridDim.x >> (line.cluster - 1);
    b.dealt = x.dealt;
    b.tiles = (int64_t)gemm_count_tiles<kThreads>(p, line.tokens, cumulative, b.barriers->warp_sums) * b.clusters;
    __syncthreads();
    if (line.cluster > 1) ptx_cluster_sync(); /* the other block's barriers exist */

    if (threadIdx.x < kWarpgroup) {
        ptx_setmaxnreg_dec<kProducerRegisters>();
        if (threadIdx.x / 32 == 0)
            produce(p, b, x, &w_map, &x_maps);
        else if (threadIdx.x / 32 == 1)
            scout(p, b);
        else if (threadIdx.x / 32 == 2)
            produce_weight_scales(p, b, w);
        else
            deal(b, y);
    } else {
        ptx_setmaxnreg_inc<kConsumerRegisters>();
        consume(p, w, y, b);
    }
    if (line.cluster > 1) ptx_cluster_sync(); /* nothing arrives in a block that has ended */
    epmoei_wait_for_predecessor();            /* nor does this kernel end before the one before it */
}

/* As many stages as fit. Ahead by two, a warpgroup leaves two stages to the copies that are under way. */
constexpr int kLead = 2;
epmoe_status_t choose_pipeline(const epmoe_grouped_gemm_args_t *args, pipeline_t *line, int32_t *bytes)
{
    const int32_t limit = epmoei_device_current()->shared_bytes_per_block;
    const epmoei_fp8_tile_t tile = epmoei_fp8_tile_sm90(args->num_experts, args->max_rows);
    line->tokens = tile.tokens;
    line->cluster = tile.cluster;
    line->k_steps = (int32_t)epmoei_ceil_div(args->k, kTileK);
    for (line->stages = kMostStages; line->stages > 1; line->stages--) {
        *bytes = shared_layout(*line).cumulative + (args->num_experts + 1) * 4;
        if (*bytes > limit) continue;
        /* In fewer steps than stages a leader could come a second time before the other came once. */
        line->lead = line->stages > kLead && line->k_steps >= line->stages ? kLead : 0;
        return EPMOE_OK;
    }
    return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "num_experts is %d: their tiles do not fit shared memory",
                       args->num_experts);
}

epmoe_status_t launch(const epmoe_grouped_gemm_args_t *args, const epmoei_fp8_rows_t *x, const epmoei_fp8_rows_t *y,
                      epmoe_stream_t stream)
{
    const gemm_params_t p = gemm_params(args);
    pipeline_t line = {};
    int32_t bytes = 0;
    CUtensorMap w_map;
    x_maps_t x_maps;
    EPMOEI_CHECK(choose_pipeline(args, &line, &bytes));
    line.way = fp8_way(args, y != nullptr);
    EPMOEI_CHECK(encode_weights(&w_map, args, &p, EPMOE_F8_E4M3, 1, kTileW));
    EPMOEI_CHECK(encode_rows(&x_maps, EPMOE_F8_E4M3, 1, x->codes, args->max_rows, args->k, line.tokens / line.cluster));
    const weight_scales_t w = weight_scales(args, &p);
    const epmoei_fp8_rows_t no_rows = {};
    EPMOEI_CHECK(epmoei_allow_shared(grouped_gemm_fp8_kernel, (size_t)bytes, "grouped_gemm_fp8_sm90"));
    const int64_t tiles = gemm_max_row_tiles(args, line.tokens) * epmoei_ceil_div(args->n, kTileW * line.cluster);
    const int64_t clusters = epmoei_min64(tiles, epmoei_device_current()->num_sms / line.cluster);
    return epmoei_cuda_status((int32_t)epmoei_launch_clusters(grouped_gemm_fp8_kernel, line.cluster,
                                                              dim3((unsigned)(clusters * line.cluster)), dim3(kThreads),
                                                              (size_t)bytes, stream, p, line, w, *x, y ? *y : no_rows,
                                                              w_map, x_maps),
                              "grouped_gemm_fp8_sm90");
}

} // namespace

extern "C" int64_t epmoei_grouped_gemm_fp8_workspace_sm90(const epmoe_grouped_gemm_args_t *args)
{
    epmoei_fp8_rows_t x;
    if (!epmoei_grouped_gemm_fp8_takes_sm90(args)) return epmoei_grouped_gemm_quant_workspace_sm80(args);
    return epmoei_fp8_rows_layout(nullptr, args->max_rows, args->k, &x);
}

extern "C" epmoe_status_t epmoei_grouped_gemm_fp8_rows_sm90(const epmoe_grouped_gemm_args_t *args,
                                                            const epmoei_fp8_rows_t *x, const epmoei_fp8_rows_t *y,
                                                            epmoe_stream_t stream)
{
    if (x) return launch(args, x, y, stream);
    epmoei_fp8_rows_t own;
    const int64_t bytes = epmoei_fp8_rows_layout(args->workspace, args->max_rows, args->k, &own);
    if (!args->workspace || args->workspace_bytes < bytes)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "workspace is %p with workspace_bytes %lld: expected %lld",
                           args->workspace, (long long)args->workspace_bytes, (long long)bytes);
    EPMOEI_CHECK(args->x_quant ? epmoei_sort_codes_sm90(args, &own, stream)
                               : epmoei_quantize_rows_sm90(args, &own, stream));
    return launch(args, &own, y, stream);
}

extern "C" epmoe_status_t epmoei_grouped_gemm_fp8_sm90(const epmoe_grouped_gemm_args_t *args, epmoe_stream_t stream)
{
    if (epmoei_grouped_gemm_fp8_takes_sm90(args))
        return epmoei_grouped_gemm_fp8_rows_sm90(args, nullptr, nullptr, stream);
    if (!args->fp8_activations) return epmoei_grouped_gemm_quant_sm80(args, stream);
    return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED,
                       "fp8_activations is 1 with n %d, layout %d, weight.group_size %d and group_rows %d: on CUDA 8 "
                       "columns of gates and 8 of ups must be whole, and groups cover k, or be square multiples of 128 "
                       "that do not begin inside a tile",
                       args->n, (int)args->layout, args->weight.group_size, args->weight.group_rows);
}
