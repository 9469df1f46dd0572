/* Attention of many new tokens on wgmma: 128 rows of a block, tokens times the query heads of one cache head.
 *
 *   producer    a warpgroup that brings tiles of 128 keys and of their values from wherever their blocks lie into a
 * ring in shared memory, by cp.async, since a row is a few hundred bytes and a block of the cache often 16 rows
 *   consumers   two warpgroups with 64 rows each: scores from shared memory, an online softmax in registers, whose
 *               weights are the left operand of the second product as they lie; while one is at its softmax the other
 *               has the tensor cores
 *
 * All operands lie as panels of 64 columns in the 128-byte swizzle; values are read with their columns side by side. */
#include "dense_layers/attention_mma_cuda.cuh"
#include "kernels/ptx_wgmma.cuh"

namespace
{

constexpr int kRows = EPMOEI_PREFILL_SM90_ROWS;
constexpr int kKeys = 128;
constexpr int kWarpgroup = 128;
constexpr int kThreads = 3 * kWarpgroup;
constexpr int kConsumerWarps = 8;
constexpr int kPanelBytes = kKeys * 128; /* also of q: as many rows */
constexpr int kStages = 2;
constexpr int kZeroBytes = 16 * 128; /* 16 keys of a panel */

struct barriers_t {
    uint64_t keys_full[kStages];
    uint64_t keys_empty[kStages];
    uint64_t values_full[kStages];
    uint64_t values_empty[kStages];
};

/* Byte offsets in shared memory, behind q: stages of keys, of values, zeros, barriers. */
template <int kCols> struct wgmma_layout {
    static constexpr int kTileBytes = kCols / 64 * kPanelBytes;
    static constexpr int kKeyTiles = kTileBytes;
    static constexpr int kValueTiles = kKeyTiles + kStages * kTileBytes;
    static constexpr int kZeros = kValueTiles + kStages * kTileBytes;
    static constexpr int kBarriers = kZeros + kZeroBytes;
    static constexpr int kBytes = kBarriers + (int)sizeof(barriers_t);
};

__device__ __forceinline__ void wait_barrier(const uint64_t *barrier, uint32_t parity)
{
    const uint32_t address = ptx_shared_address(barrier);
    while (!ptx_mbarrier_try_wait(address, parity)) {
    }
}

/* An operand whose K columns lie side by side: groups of 8 rows 1024 bytes apart. */
__device__ __forceinline__ uint64_t describe_by_k(uint32_t shared)
{
    return (uint64_t)(shared >> 4 & 0x3FFF) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

/* One whose N columns do: panels of 64 columns `panel_bytes` apart, groups of 8 keys 1024 bytes apart. */
__device__ __forceinline__ uint64_t describe_by_n(uint32_t shared, uint32_t panel_bytes)
{
    return (uint64_t)(shared >> 4 & 0x3FFF) | (uint64_t)(panel_bytes >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 |
           (uint64_t)1 << 62;
}

/* Byte offset of a chunk of 8 columns of a row. */
__device__ __forceinline__ uint32_t panel_offset(int32_t row, int32_t chunk)
{
    return (uint32_t)(chunk / 8 * kPanelBytes + row * 128 + ((chunk ^ row) & 7) * 16);
}

template <int kCols>
__device__ __forceinline__ void load_q_panels(const attention_t &p, const tile_t &tile, int32_t head_unit, char *shared)
{
    constexpr int kChunks = kCols / 8;
    for (int i = threadIdx.x; i < kRows * kChunks; i += kThreads) {
        const int32_t r = i / kChunks, chunk = i % kChunks;
        const row_t row = find_row(p, tile, head_unit, r);
        const uint16_t *from = (const uint16_t *)p.q + (int64_t)row.token * p.q_stride + (int64_t)row.head * p.head_dim;
        *(uint4 *)(shared + panel_offset(r, chunk)) = ptx_load_16(from + chunk * 8, row.live);
    }
}

/* --------------------------------------------------------------------------------------------------------- producer */

/* A warp's 32 rows of a tile; `from` is where the lane's own row lies, -1 for zeros. */
template <int kCols> __device__ __forceinline__ void copy_panels(char *shared, const char *data, int64_t from)
{
    constexpr int kChunks = kCols / 8;
    const int32_t lane = threadIdx.x % 32, warp_row = threadIdx.x % kWarpgroup / 32 * 32;
#pragma unroll 4
    for (int i = 0; i < kChunks; i++) {
        const int32_t row = (i * 32 + lane) / kChunks, chunk = lane % kChunks;
        const int64_t at = __shfl_sync(kAllLanes, from, row);
        ptx_cp_async_16(ptx_shared_address(shared) + panel_offset(warp_row + row, chunk),
                        data + (at < 0 ? 0 : at + chunk * 16), at < 0 ? 0 : 16);
    }
}

/* Copies run on while the next ones are started: the barriers learn from the copies themselves that they have landed.
 */
template <int kCols>
__device__ __forceinline__ void produce(const attention_t &p, const tile_t &tile, int32_t head_unit, int32_t begin,
                                        int32_t steps, char *shared, barriers_t *barriers)
{
    using layout = wgmma_layout<kCols>;
    const int32_t kv_head = head_unit / p.head_parts, own = threadIdx.x % kWarpgroup;
    const char *keys = p.keys.data + kv_head * p.keys.head, *values = p.values.data + kv_head * p.values.head;
    const auto look_up = [&](int32_t step) {
        const int32_t key = begin + step * kKeys + own;
        return find_key(p, tile.seq, key, key >= tile.lo && key < tile.hi, head_unit == 0);
    };
    key_place_t at = look_up(0);
    for (int32_t step = 0; step < steps; step++) {
        const int32_t stage = step % kStages;
        const uint32_t parity = step / kStages & 1;
        const int64_t key = at.block < 0 ? -1 : at.block * p.keys.block + at.slot * p.keys.slot;
        const int64_t value = at.block < 0 ? -1 : at.block * p.values.block + at.slot * p.values.slot;
        at = look_up(step + 1);
        wait_barrier(&barriers->keys_empty[stage], parity ^ 1);
        copy_panels<kCols>(shared + layout::kKeyTiles + stage * layout::kTileBytes, keys, key);
        ptx_mbarrier_arrive_after_copies(ptx_shared_address(&barriers->keys_full[stage]));
        wait_barrier(&barriers->values_empty[stage], parity ^ 1);
        copy_panels<kCols>(shared + layout::kValueTiles + stage * layout::kTileBytes, values, value);
        ptx_mbarrier_arrive_after_copies(ptx_shared_address(&barriers->values_full[stage]));
    }
    ptx_cp_async_wait_all();
}

/* -------------------------------------------------------------------------------------------------------- consumers */

/* Of rows r and r + 8: accumulators of wgmma, block j of 8 columns in [4j,4j+4). top is in units of the scores. */
template <int kCols> struct wgmma_rows_t {
    float out[kCols / 2];
    float top[2];
    float sum[2];
};

template <typename T, int kCols>
__device__ __forceinline__ void start_scores(float (&scores)[kKeys / 2], uint32_t q, uint32_t keys)
{
    ptx_wgmma_fence();
#pragma unroll
    for (int k = 0; k < kCols / 16; k++) { /* 16 columns are 32 bytes, 2 in the descriptors' units */
        const uint32_t panel = k / 4 * kPanelBytes;
        const uint64_t of_q = describe_by_k(q + panel) + 2 * (k % 4);
        const uint64_t of_keys = describe_by_k(keys + panel) + 2 * (k % 4);
        if (k == 0)
            ptx_wgmma_pair<T, kKeys>::first(scores, of_q, of_keys);
        else
            ptx_wgmma_pair<T, kKeys>::add(scores, of_q, of_keys);
    }
    ptx_wgmma_commit();
}

/* values: of the first 16 keys, those of the next ones `step` further. */
template <typename T, int kCols>
__device__ __forceinline__ void start_values(wgmma_rows_t<kCols> &rows, const uint32_t (&weights)[kKeys / 16][4],
                                             uint64_t values, uint32_t step)
{
    ptx_wgmma_fence();
#pragma unroll
    for (int k = 0; k < kKeys / 16; k++) ptx_wgmma_pair<T, kCols>::add_rows(rows.out, weights[k], values + k * step);
    ptx_wgmma_commit();
}

__device__ __forceinline__ void mask_scores(float (&scores)[kKeys / 2], int32_t first, const bounds_t &bounds)
{
#pragma unroll
    for (int i = 0; i < kKeys / 2; i++) {
        const int32_t key = first + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2, row = i % 4 / 2;
        scores[i] = key >= bounds.lo[row] && key < bounds.hi[row] ? scores[i] : -INFINITY;
    }
}

/* As weigh() of the kernels on mma.sync, but leaves it to the caller to let the rows decay; the scale is above 0. */
template <int kCols>
__device__ __forceinline__ void weigh_scores(wgmma_rows_t<kCols> &rows, float (&scores)[kKeys / 2], float (&decay)[2],
                                             float scale)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float top = rows.top[i];
#pragma unroll
        for (int j = 0; j < kKeys / 8; j++) top = fmaxf(top, fmaxf(scores[4 * j + 2 * i], scores[4 * j + 2 * i + 1]));
        top = max_of_quad(top);
        const float origin = top == -INFINITY ? 0.0f : top * scale;
        decay[i] = ptx_exp2(fmaf(rows.top[i], scale, -origin));
        rows.top[i] = top;
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < kKeys / 8; j++)
#pragma unroll
            for (int k = 2 * i; k < 2 * i + 2; k++) {
                scores[4 * j + k] = ptx_exp2(fmaf(scores[4 * j + k], scale, -origin));
                sum += scores[4 * j + k];
            }
        rows.sum[i] = rows.sum[i] * decay[i] + sum;
    }
}

/* Whether the rows [first,end) of a tile of values hold an infinity or a NaN: every warp looks at all of them, so that
 * all agree. */
template <typename T, int kCols>
__device__ __forceinline__ bool rows_hold_special(const char *values, int32_t first, int32_t end)
{
    bool special = false;
    for (int32_t row = first + (int32_t)threadIdx.x % 32 / 8; row < end; row += 4) {
#pragma unroll
        for (int panel = 0; panel < kCols / 64; panel++) {
            const uint4 part = *(const uint4 *)(values + panel_offset(row, panel * 8 + threadIdx.x % 8));
            const uint32_t words[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
            for (int j = 0; j < 4; j++) special |= __vcmpeq2(words[j] & exponent_bits<T>, exponent_bits<T>) != 0;
        }
    }
    return __any_sync(kAllLanes, special);
}

/* The second product where rows differ in what they see and a value is no number. */
template <typename T, int kCols>
__device__ __forceinline__ void add_values_seen(wgmma_rows_t<kCols> &rows, const float (&weights)[kKeys / 2],
                                                const char *values, int32_t first, const bounds_t &bounds)
{
#pragma unroll
    for (int n = 0; n < kKeys / 8; n++)
#pragma unroll 1
        for (int j = 0; j < 8; j++) {
            const int32_t key = 8 * n + j, lane = (threadIdx.x % 32 & ~3) + j / 2;
            float own[2];
            bool sees[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                own[i] = __shfl_sync(kAllLanes, j & 1 ? weights[4 * n + 2 * i + 1] : weights[4 * n + 2 * i], lane);
                sees[i] = first + key >= bounds.lo[i] && first + key < bounds.hi[i];
            }
#pragma unroll
            for (int column = 0; column < kCols / 4; column++) {
                const T *chunk = (const T *)(values + panel_offset(key, column / 2));
                const float value = epmoei_to_float(chunk[threadIdx.x % 4 * 2 + column % 2]);
#pragma unroll
                for (int i = 0; i < 2; i++)
                    if (sees[i]) rows.out[column / 2 * 4 + 2 * i + column % 2] += own[i] * value;
            }
        }
}

__device__ __forceinline__ void release(uint64_t *barrier)
{
    if (threadIdx.x % 32 == 0) ptx_mbarrier_arrive(ptx_shared_address(barrier));
}

template <typename T, int kCols>
__device__ __forceinline__ void consume(const attention_t &p, const tile_t &tile, int32_t head_unit, int32_t begin,
                                        int32_t steps, char *shared, barriers_t *barriers)
{
    using layout = wgmma_layout<kCols>;
    const int32_t group = threadIdx.x / kWarpgroup - 1;
    const int32_t r = group * 64 + threadIdx.x % kWarpgroup / 32 * 16 + threadIdx.x % 32 / 4;
    const uint32_t base = ptx_shared_address(shared), q = base + group * 64 * 128;
    const bounds_t bounds = find_bounds(p, tile, r);
    const int32_t last_lo = tile.hi > 0 ? first_key(p, tile.position + tile.end - 1) : 0;
    const int32_t first_hi = tile.position + tile.first + 1;
    const bool ragged = tile.end - tile.first > 1;
    wgmma_rows_t<kCols> rows;
#pragma unroll
    for (int i = 0; i < kCols / 2; i++) rows.out[i] = 0.0f;
    rows.top[0] = rows.top[1] = -INFINITY;
    rows.sum[0] = rows.sum[1] = 0.0f;
    float scores[kKeys / 2], decay[2];
    uint32_t weights[kKeys / 16][4], values_step = 0;
    uint64_t values = 0; /* what the weights meet */

    const auto start_scores_of = [&](int32_t step) {
        const int32_t stage = step % kStages;
        wait_barrier(&barriers->keys_full[stage], step / kStages & 1);
        ptx_fence_proxy_async(); /* what the copies wrote, for wgmma to read */
        start_scores<T, kCols>(scores, q, base + layout::kKeyTiles + stage * layout::kTileBytes);
    };
    const auto weigh_scores_of = [&](int32_t step) {
        const int32_t first = begin + step * kKeys;
        ptx_wgmma_hold(scores);
        release(&barriers->keys_empty[step % kStages]);
        if (first < last_lo || first + kKeys > first_hi) mask_scores(scores, first, bounds);
        weigh_scores(rows, scores, decay, p.scale_log2);
    };
    /* The rows, which nothing adds to at this time, decay, and the weights become an operand. */
    const auto pack_weights_of = [&](int32_t step) {
        const int32_t first = begin + step * kKeys, tile_at = layout::kValueTiles + step % kStages * layout::kTileBytes;
        ptx_wgmma_hold(rows.out);
#pragma unroll
        for (int j = 0; j < kCols / 2; j++) rows.out[j] *= decay[j % 4 / 2];
#pragma unroll
        for (int k = 0; k < kKeys / 16; k++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                weights[k][i] = epmoei_pack_pair(scores[8 * k + 2 * i], scores[8 * k + 2 * i + 1], T());
        values = describe_by_n(base + tile_at, kPanelBytes);
        values_step = 16 * 128 >> 4;
        if ((first >= last_lo && first + kKeys <= first_hi) || !ragged) return;
        wait_barrier(&barriers->values_full[step % kStages], step / kStages & 1);
        /* Of keys that some rows see and others do not, before the window of the last and behind the first token. */
        if (!rows_hold_special<T, kCols>(shared + tile_at, 0, min(last_lo - first, kKeys)) &&
            !rows_hold_special<T, kCols>(shared + tile_at, max(first_hi - first, 0), kKeys))
            return;
        add_values_seen<T, kCols>(rows, scores, shared + tile_at, first, bounds);
        /* The product stays where the compiler pipelines it, but adds nothing. */
        values = describe_by_n(base + layout::kZeros, 0);
        values_step = 0;
    };
    const auto start_values_of = [&](int32_t step) {
        wait_barrier(&barriers->values_full[step % kStages], step / kStages & 1);
        ptx_fence_proxy_async();
        start_values<T, kCols>(rows, weights, values, values_step);
    };

    start_scores_of(0);
    ptx_wgmma_wait<0>();
    weigh_scores_of(0);
    pack_weights_of(0);
    for (int32_t step = 1; step < steps; step++) {
        start_scores_of(step);
        start_values_of(step - 1);
        ptx_wgmma_wait<1>();
        weigh_scores_of(step);
        ptx_wgmma_wait<0>();
        release(&barriers->values_empty[(step - 1) % kStages]);
        pack_weights_of(step);
    }
    start_values_of(steps - 1);
    ptx_wgmma_wait<0>();
    ptx_wgmma_hold(rows.out);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const row_t row = find_row(p, tile, head_unit, r + 8 * i);
        const float sum = sum_of_quad(rows.sum[i]);
        if (!row.live) continue;
        const float factor = row_factor(p, row.head, rows.top[i] * p.scale_log2, sum);
        uint16_t *to = out_row(p, row) + threadIdx.x % 4 * 2;
#pragma unroll
        for (int j = 0; j < kCols / 8; j++)
            *(uint32_t *)(to + 8 * j) =
                pack_out(p, scaled(p, rows.out[4 * j + 2 * i], factor), scaled(p, rows.out[4 * j + 2 * i + 1], factor));
    }
}

template <typename T, int kCols> static __global__ void __launch_bounds__(kThreads, 1) wgmma_kernel(attention_t p)
{
    using layout = wgmma_layout<kCols>;
    extern __shared__ __align__(1024) char shared[];
    barriers_t *barriers = (barriers_t *)(shared + layout::kBarriers);
    epmoei_begin_dependent();
    const int32_t head_unit = blockIdx.x % p.tiling.head_units;
    /* The tiles that see most come first. */
    const tile_t tile = find_tile(p, (int32_t)p.tiling.tiles - 1 - (int32_t)(blockIdx.x / p.tiling.head_units));
    if (tile.first >= tile.end) return;
    /* At least one, of nothing in a sequence of length 0. */
    const int32_t begin = tile.lo / kKeys * kKeys, steps = max(1, (tile.hi - begin + kKeys - 1) / kKeys);
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < kStages; i++) {
            ptx_mbarrier_init(ptx_shared_address(&barriers->keys_full[i]), kWarpgroup);
            ptx_mbarrier_init(ptx_shared_address(&barriers->keys_empty[i]), kConsumerWarps);
            ptx_mbarrier_init(ptx_shared_address(&barriers->values_full[i]), kWarpgroup);
            ptx_mbarrier_init(ptx_shared_address(&barriers->values_empty[i]), kConsumerWarps);
        }
        ptx_fence_barrier_init();
    }
    load_q_panels<kCols>(p, tile, head_unit, shared);
    for (int i = threadIdx.x; i < kZeroBytes / 16; i += kThreads)
        *(uint4 *)(shared + layout::kZeros + i * 16) = make_uint4(0, 0, 0, 0);
    ptx_fence_proxy_async();
    __syncthreads();
    if (threadIdx.x < kWarpgroup) {
        ptx_setmaxnreg_dec<56>();
        produce<kCols>(p, tile, head_unit, begin, steps, shared, barriers);
    } else {
        ptx_setmaxnreg_inc<224>();
        consume<T, kCols>(p, tile, head_unit, begin, steps, shared, barriers);
    }
}

template <typename T, int kCols>
static epmoe_status_t launch(const attention_t &p, int64_t blocks, epmoe_stream_t stream)
{
    const int32_t bytes = wgmma_layout<kCols>::kBytes;
    EPMOEI_CHECK(epmoei_allow_shared(wgmma_kernel<T, kCols>, (size_t)bytes, "epmoe_attention"));
    return epmoei_cuda_status((int32_t)epmoei_launch_dependent(wgmma_kernel<T, kCols>, dim3((unsigned)blocks),
                                                               dim3(kThreads), bytes, stream, p),
                              "epmoe_attention");
}

} // namespace

extern "C" epmoe_status_t epmoei_attention_prefill_sm90(const epmoe_attention_args_t *args,
                                                        const epmoei_attention_plan_t *plan, epmoe_stream_t stream)
{
    attention_t p = attention_params(args, plan->prefill_tiling);
    if (plan->decode) p.least_queries = plan->few_queries + 1;
    const int64_t blocks = p.tiling.tiles * p.tiling.head_units;
    EPMOEI_CHECK(check_blocks(blocks));
    if (args->dtype == EPMOE_BF16)
        return args->head_dim == 64 ? launch<__nv_bfloat16, 64>(p, blocks, stream)
                                    : launch<__nv_bfloat16, 128>(p, blocks, stream);
    return args->head_dim == 64 ? launch<__half, 64>(p, blocks, stream) : launch<__half, 128>(p, blocks, stream);
}
