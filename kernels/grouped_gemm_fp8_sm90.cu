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
 *                  ahead into the next tiles
 *   scout          a warp that looks up, some tiles ahead, where the rows of a tile go and what they weigh
 *   consumers      two warpgroups. Tiles above 64 tokens are shared, 64 tokens each, and the two take turns in issuing
 *                  products, so that one multiplies while the other promotes. Smaller tiles they take by turns, so
 *                  that one multiplies while the other stores.
 * A consumer thread has 128 accumulators, of 64 tokens by 256 weight rows, and 64 more for the product of 128 columns
 * and 128 weight rows, which is scaled and added when it is complete: the most that fits 232 registers.
 * Two blocks of a cluster take neighbouring weight rows and the same tokens: each fetches half of them for both.
 * Gate and up rows arrive regrouped, 8 gate rows and then their 8 up rows, by two more dimensions of the tensor map:
 * 256 of them are the 128 outputs under one scale of the quantised h.
 * What bounds a step of 128 tokens: 1024 clocks of tensor cores, 768 of shared memory for their operands and 384 for
 * the copies; of 64 tokens or less: 1660 clocks of the memory's bandwidth for 32 KB of weights. */
#include "kernels/grouped_gemm_fp8_pipeline_sm90.cuh"
#include "kernels/launch_cuda.cuh"
#include "kernels/ptx_wgmma_fp8.cuh"

namespace
{

/* One warp. Scales come by the copy that takes bytes: a tile begins at any row, and a box of theirs would then begin
 * off the 16 bytes to which the innermost coordinate of a tensor of floats has to be aligned. */
__device__ __forceinline__ void produce(const gemm_params_t &p, const block_t &b, const epmoei_fp8_rows_t &x,
                                        const CUtensorMap *w_map, const x_maps_t *x_maps)
{
    const uint32_t full = ptx_shared_address(b.barriers->full), empty = ptx_shared_address(b.barriers->empty);
    const uint32_t scales = ptx_shared_address(b.x_scales);
    ring_t ring = {0, 0};
    walk_t at;
    at.index = b.first_tile;
    for (bool more = at.enter(p, b); more; more = at.advance(p, b), ring.advance(b.line.stages)) {
        const uint32_t to = b.base + ring.stage * b.stage_bytes, done = full + 8 * ring.stage;
        const int32_t k = at.step * kTileK, block = b.w_block(at.tile);
        const int32_t skipped = first_scale(at.tile);
        const uint32_t scale_bytes = (skipped + at.tile.rows + kScaleRun - 1) / kScaleRun * kScaleRun * 4;
        wait_barrier(empty + 8 * ring.stage, ring.parity ^ 1);
        if (!ptx_elect_one()) continue;
        ptx_mbarrier_arrive_expect(done, kWeightBytes + at.tile.width * kTileK + scale_bytes);
        ptx_tma_load_5d(to, w_map, done, k, p.gated ? 0 : block * kTileW, 0, p.gated ? block * (kTileW / 16) : 0,
                        at.tile.expert);
        ptx_bulk_load(scales + ring.stage * b.scales_each * 4, x.scales + at.step * x.stride + at.tile.row - skipped,
                      scale_bytes, done);
        const uint32_t x_to = to + kWeightBytes + at.first * kTileK;
        if (at.part == 0) continue; /* 8 tokens: all of them are the other block's */
        const CUtensorMap *x_map = &x_maps->map[at.part / 8 - 1];
        if (b.line.cluster == 1)
            ptx_tma_load_2d(x_to, x_map, done, k, at.tile.row);
        else
            ptx_tma_load_2d_multicast(x_to, x_map, done, k, at.tile.row + at.first, 3);
    }
}

/* One warp. */
__device__ __forceinline__ void scout(const gemm_params_t &p, const block_t &b)
{
    const int lane = threadIdx.x % 32;
    const uint32_t full = ptx_shared_address(b.barriers->notes_full),
                   empty = ptx_shared_address(b.barriers->notes_empty);
    ring_t ring = {0, 0};
    for (int64_t index = b.first_tile;; index += b.tile_step) {
        tile_t tile = {};
        if (index < b.tiles) tile = find_tile(p, b, index);
        wait_barrier(empty + 8 * ring.stage, ring.parity ^ 1);
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

__device__ __forceinline__ float load_scale(const weight_scales_t &w, int64_t at)
{
    switch (w.dtype) {
    case EPMOE_BF16: return __bfloat162float(((const __nv_bfloat16 *)w.data)[at]);
    case EPMOE_F16: return __half2float(((const __half *)w.data)[at]);
    case EPMOE_F8_E8M0: {
        const uint32_t code = ((const uint8_t *)w.data)[at];
        return __uint_as_float(code == 255 ? 0x7FC00000u : code ? code << 23 : 0x00400000u);
    }
    default: return ((const float *)w.data)[at];
    }
}

/* A tile's two scales of weights under each of 32 steps, those of step i with lane i. */
__device__ __forceinline__ float2 load_weight_scales(const weight_scales_t &w, const block_t &b, const tile_t *tile,
                                                     int32_t step)
{
    const int32_t row = b.w_block(*tile) * (w.by_half ? kTileW : kHalfW);
    /* A cluster's last block may have no rows. */
    const int32_t first = min(row / w.group_rows, w.blocks - 1);
    const int32_t second = min((row + w.second_first) / w.group_rows, w.blocks - 1);
    const int32_t group = min((step + (int32_t)threadIdx.x % 32) / w.group_steps, w.groups - 1);
    const int64_t at = (int64_t)tile->expert * w.blocks * w.groups + group;
    return make_float2(load_scale(w, at + (int64_t)first * w.groups), load_scale(w, at + (int64_t)second * w.groups));
}

/* This warp has read the stage, for `groups` warpgroups: to the barriers of every block whose copies will overwrite it.
 */
__device__ __forceinline__ void release(const block_t &b, uint32_t empty, int32_t groups)
{
    const int32_t lane = threadIdx.x % 32;
    __syncwarp(); /* other lanes' loads of scales, for which one arrives */
    if (b.line.cluster == 1) {
        if (lane < groups) ptx_mbarrier_arrive(empty);
    } else if (lane < 2 * groups)
        ptx_mbarrier_arrive_at(empty, lane % 2);
}

/* The turns of the two warpgroups of a shared tile: each waits for its own before it issues products, then passes on.
 * The first turn is that of group 0, the last one is not passed on. */
enum { kAlone = 2 };
template <int kGroup> __device__ __forceinline__ void await_turn()
{
    if constexpr (kGroup != kAlone) ptx_named_barrier<2 + kGroup>(2 * kWarpgroup);
}
template <int kGroup> __device__ __forceinline__ void pass_turn()
{
    if constexpr (kGroup != kAlone) ptx_named_barrier_arrive<3 - kGroup>(2 * kWarpgroup);
}

/* acc = x w^T over all of K, of the warpgroup kGroup's 64 tokens of the tile, or of all if kAlone. */
template <int kGroup>
__device__ __forceinline__ void multiply(const block_t &b, const weight_scales_t &w, const tile_t *tile, ring_t &ring,
                                         float (&acc)[128])
{
    constexpr int kFirst = kGroup == 1 ? 64 : 0;
    const uint32_t full = ptx_shared_address(b.barriers->full), empty = ptx_shared_address(b.barriers->empty);
    const float *x_scales =
        b.x_scales + first_scale(*tile) + kFirst + threadIdx.x % kWarpgroup / 32 * 16 + threadIdx.x % 32 / 4;
    float part[64];
    float2 w_scales = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 64; i++) part[i] = 0.0f;
    if (kGroup == 1) pass_turn<kGroup>();
#pragma unroll 1
    for (int step = 0; step < b.k_steps; step++) {
        const uint32_t from = b.base + ring.stage * b.stage_bytes;
        if (step % 32 == 0) w_scales = load_weight_scales(w, b, tile, step);
        wait_barrier(full + 8 * ring.stage, ring.parity);
        const float x0 = x_scales[ring.stage * b.scales_each], x1 = x_scales[ring.stage * b.scales_each + 8];
        const uint64_t x_at = wgmma_descriptor(descriptor_start(from + kWeightBytes + kFirst * kTileK));
        const uint64_t w_at = wgmma_descriptor(descriptor_start(from));
        float w0 = 0.0f, w1 = 0.0f;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint64_t w_half = w_at + half * (kHalfW * kTileK / 16);
            await_turn<kGroup>();
            ptx_wgmma_fence();
            ptx_wgmma_e4m3_n128<false>(part, x_at, w_half);
#pragma unroll
            for (int kk = 1; kk < kTileK / 32; kk++) /* 32 bytes, 2 in the descriptor's units */
                ptx_wgmma_e4m3_n128<true>(part, x_at + 2 * kk, w_half + 2 * kk);
            ptx_wgmma_commit();
            if (kGroup != 1 || half == 0 || step + 1 < b.k_steps) pass_turn<kGroup>();
            ptx_wgmma_wait<0>();
            ptx_wgmma_hold(part);
            if (half == 0) { /* where waiting for them costs nothing */
                w0 = __shfl_sync(0xFFFFFFFFu, w_scales.x, step % 32);
                w1 = __shfl_sync(0xFFFFFFFFu, w_scales.y, step % 32);
            }
            if (half == 1) release(b, empty + 8 * ring.stage, kGroup == kAlone ? 2 : 1);

            /* [token][columns 8j of even and of odd j] */
            const float even = w.by_half && half == 1 ? w1 : w0, odd = w.by_half && half == 0 ? w0 : w1;
            const float scale[2][2] = {{x0 * even, x0 * odd}, {x1 * even, x1 * odd}};
#pragma unroll
            for (int i = 0; i < 64; i++)
                acc[64 * half + i] = fmaf(part[i], scale[i / 2 % 2][i / 4 % 2], acc[64 * half + i]);
        }
        ring.advance(b.line.stages);
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

__device__ __forceinline__ void consume(const gemm_params_t &p, const epmoei_fp8_rows_t &y, const weight_scales_t &w,
                                        const block_t &b)
{
    const uint32_t notes_full = ptx_shared_address(b.barriers->notes_full);
    const uint32_t notes_empty = ptx_shared_address(b.barriers->notes_empty);
    const int32_t group = threadIdx.x / kWarpgroup - 1, warp = threadIdx.x % kWarpgroup / 32;
    ring_t ring = {0, 0}, notes = {0, 0};
    int32_t turn = 0; /* whose the next tile of at most 64 tokens is */
    for (;; notes.advance(kNotes)) {
        wait_barrier(notes_full + 8 * notes.stage, notes.parity);
        const int32_t rows = b.notes_of(notes.stage)->tile.rows;
        if (rows == 0) return;
        const bool shared = rows > 64, mine = shared || turn == group;
        if (!shared) turn ^= 1;
        if (mine) {
            const tile_t *tile = &b.notes_of(notes.stage)->tile;
            float acc[128];
#pragma unroll
            for (int i = 0; i < 128; i++) acc[i] = 0.0f;
            if (!shared) {
                multiply<kAlone>(b, w, tile, ring, acc);
                end_alone(group);
            } else if (group == 0)
                multiply<0>(b, w, tile, ring, acc);
            else
                multiply<1>(b, w, tile, ring, acc);
            const int32_t first = (shared ? 64 * group : 0) + 16 * warp;
            fp8_epilogue_t e;
            e.staging = b.shared + shared_layout(b.line).staging + (group * 4 + warp) * kFp8StagingBytes;
            e.rows = b.rows_of(notes.stage) + first;
            e.scales = b.scales_of(notes.stage) + first;
            e.num_rows = tile->rows - first;
            e.expert = tile->expert;
            e.col = b.w_block(*tile) * (p.gated ? kTileW / 2 : kTileW);
            store_tile(p, y, b.line.way, e, acc);
        } else {
            await_other(group);
            skip_steps(ring, b.k_steps, b.line.stages);
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) ptx_mbarrier_arrive(notes_empty + 8 * notes.stage);
    }
}

__global__ void __launch_bounds__(kThreads, 1)
    grouped_gemm_fp8_kernel(const gemm_params_t p, const pipeline_t line, const weight_scales_t w,
                            const epmoei_fp8_rows_t x, const epmoei_fp8_rows_t y,
                            const __grid_constant__ CUtensorMap w_map, const __grid_constant__ x_maps_t x_maps)
{
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
    b.x_scales = (const float *)(shared + layout.scales);
    b.scales_each = layout.scales_each;
    if (threadIdx.x == 0) {
        ptx_tma_prefetch_map(&w_map);
        for (int i = 0; i < line.stages; i++) {
            ptx_mbarrier_init(ptx_shared_address(&b.barriers->full[i]), 1);
            ptx_mbarrier_init(ptx_shared_address(&b.barriers->empty[i]), kConsumerWarps * line.cluster);
        }
        for (int i = 0; i < kNotes; i++) {
            ptx_mbarrier_init(ptx_shared_address(&b.barriers->notes_full[i]), 1);
            ptx_mbarrier_init(ptx_shared_address(&b.barriers->notes_empty[i]), kConsumerWarps);
        }
        ptx_fence_barrier_init();
    }
    epmoei_wait_for_predecessor();
    epmoei_allow_dependent();
    int32_t *cumulative = (int32_t *)(shared + layout.cumulative);
    b.cumulative = cumulative;
    b.rank = line.cluster == 1 ? 0 : (int32_t)ptx_cluster_block_rank();
    b.clusters = (p.n + kTileW * line.cluster - 1) / (kTileW * line.cluster);
    b.first_tile = blockIdx.x / line.cluster;
    b.tile_step = gridDim.x / line.cluster;
    b.k_steps = (p.k + kTileK - 1) / kTileK;
    b.tiles = (int64_t)gemm_count_tiles<kThreads>(p, line.tokens, cumulative, b.barriers->warp_sums) * b.clusters;
    __syncthreads();
    if (line.cluster > 1) ptx_cluster_sync(); /* the other block's barriers exist */

    if (threadIdx.x < kWarpgroup) {
        ptx_setmaxnreg_dec<40>();
        if (threadIdx.x / 32 == 0)
            produce(p, b, x, &w_map, &x_maps);
        else if (threadIdx.x / 32 == 1)
            scout(p, b);
    } else {
        ptx_setmaxnreg_inc<232>();
        consume(p, y, w, b);
    }
    if (line.cluster > 1) ptx_cluster_sync(); /* nothing arrives in a block that has ended */
}

weight_scales_t weight_scales(const epmoe_grouped_gemm_args_t *args, const gemm_params_t *p)
{
    const int32_t f = args->n / 2;
    const bool packed = p->gated && args->layout == EPMOE_LAYOUT_PACKED;
    weight_scales_t w = {};
    w.data = args->weight.scales;
    w.dtype = args->weight.scales_dtype;
    w.by_half = !p->gated || args->layout == EPMOE_LAYOUT_INTERLEAVED;
    /* One larger than the matrix is as good as one of its size. */
    const int64_t most = epmoei_round_up(epmoei_max64(args->n, args->k), kTileK);
    const int32_t group = (int32_t)epmoei_min64(args->weight.group_size, most);
    w.group_rows = group;
    w.group_steps = (int32_t)epmoei_ceil_div(group, kTileK);
    w.groups = (int32_t)epmoei_ceil_div(args->k, group);
    w.blocks = (int32_t)(packed ? 2 * epmoei_ceil_div(f, group) : epmoei_ceil_div(args->n, group));
    w.second_first = w.by_half ? kHalfW : packed ? w.blocks / 2 * group : f;
    return w;
}

/* As many stages as fit. */
epmoe_status_t choose_pipeline(const epmoe_grouped_gemm_args_t *args, pipeline_t *line, int32_t *bytes)
{
    const int32_t limit = epmoei_device_current()->shared_bytes_per_block;
    const epmoei_fp8_tile_t tile = epmoei_fp8_tile_sm90(args->num_experts, args->max_rows);
    line->tokens = tile.tokens;
    line->cluster = tile.cluster;
    for (line->stages = kMostStages; line->stages > 1; line->stages--) {
        *bytes = shared_layout(*line).cumulative + (args->num_experts + 1) * 4;
        if (*bytes <= limit) return EPMOE_OK;
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
    EPMOEI_CUDA(cudaFuncSetAttribute(grouped_gemm_fp8_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
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
    EPMOEI_CHECK(epmoei_quantize_rows_sm90(args, &own, stream));
    return launch(args, &own, y, stream);
}

extern "C" epmoe_status_t epmoei_grouped_gemm_fp8_sm90(const epmoe_grouped_gemm_args_t *args, epmoe_stream_t stream)
{
    if (epmoei_grouped_gemm_fp8_takes_sm90(args))
        return epmoei_grouped_gemm_fp8_rows_sm90(args, nullptr, nullptr, stream);
    if (!args->fp8_activations) return epmoei_grouped_gemm_quant_sm80(args, stream);
    return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED,
                       "fp8_activations is 1 with n %d, layout %d, weight.group_size %d and group_rows %d: on CUDA 8 "
                       "columns of gates and 8 of ups must be whole, and groups square multiples of 128 that do not "
                       "begin inside a tile",
                       args->n, (int)args->layout, args->weight.group_size, args->weight.group_rows);
}
