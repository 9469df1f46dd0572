#include "dense_layers/cache_write_cuda.cuh"
#include "dense_layers/heads_cuda.cuh"
#include "dense_layers/rope_cache_write.h"

/* A thread has two runs of kRun columns of a head, as in heads_cuda.cuh: of q and k heads a run and its partner in the
 * rotation, or two of the columns that do not turn; of v heads two that lie half a head apart. */

/* Heads of which a thread loads its two runs before it stores the first. */
static const int kHeadsInFlight = 2;

struct rope_cache_t {
    void *q;
    void *k;
    int64_t q_stride;
    int64_t k_stride;
    epmoei_positions_t positions;
    float direction; /* of the rotation: 1 or -1 */
    epmoe_rope_style_t style;
    epmoei_cache_side_t key;
    epmoei_cache_side_t value;
    const void *slots;
    int64_t num_slots;
    int64_t num_heads; /* of q */
    int64_t kv_heads;
    int64_t all_heads; /* of q, k and v */
    int32_t block_size;
    epmoe_dtype_t slots_dtype;
    int32_t num_tokens;
    int32_t head_dim;
    int32_t half;
    int32_t units; /* threads' shares of a head */
    int32_t lanes;
    int32_t head_slots;
    int32_t tokens;
};

/* Where a unit's two runs begin; the second may lie past the head's end. */
struct columns_t {
    int64_t a;
    int64_t b;
};

template <int kRun> __device__ __forceinline__ columns_t head_columns(const rope_cache_t &p, int32_t unit, bool turns)
{
    columns_t at;
    if (turns) {
        epmoei_pair_columns<kRun>(at.a, at.b, (int64_t)unit * kRun, p.half, p.style);
    } else {
        at.a = 2 * (int64_t)p.half + 2 * (int64_t)(unit - p.half / kRun) * kRun;
        at.b = at.a + kRun;
    }
    return at;
}

template <int kRun> __device__ __forceinline__ columns_t value_columns(const rope_cache_t &p, int32_t unit)
{
    columns_t at;
    at.a = (int64_t)unit * kRun;
    at.b = at.a + (int64_t)p.units * kRun;
    return at;
}

template <typename T> __device__ __forceinline__ T *head_row(const rope_cache_t &p, int64_t token, int64_t head)
{
    const int64_t k = head - p.num_heads, v = k - p.kv_heads;
    if (k < 0) return (T *)p.q + token * p.q_stride + head * p.head_dim;
    if (v < 0) return (T *)p.k + token * p.k_stride + k * p.head_dim;
    return (T *)p.value.from + token * p.value.stride + v * p.head_dim;
}

template <typename T, int kRun>
__device__ __forceinline__ void unpack(float (&values)[kRun], const epmoei_cache_run_t<T, kRun> &run)
{
    if constexpr (kRun == 1)
        values[0] = epmoei_to_float(run.element);
    else
        epmoei_unpack_part<T>(values, run.part);
}
template <typename T, int kRun>
__device__ __forceinline__ void pack(epmoei_cache_run_t<T, kRun> &run, const float (&values)[kRun])
{
    if constexpr (kRun == 1)
        run.element = epmoei_from_float<T>(values[0]);
    else
        run.part = epmoei_pack_part<T>(values);
}
template <typename T, int kRun> __device__ __forceinline__ void put_back(T *to, const epmoei_cache_run_t<T, kRun> &run)
{
    if constexpr (kRun == 1)
        *to = run.element;
    else
        *(uint4 *)to = run.part;
}

/* A run of kRun columns of a head to the token's slot; without E4M3 as the bits that they are. */
template <typename T, typename Stored, int kRun>
__device__ __forceinline__ void cache_run(const rope_cache_t &p, const epmoei_cache_side_t &side, int64_t slot,
                                          int64_t head, int64_t column, const epmoei_cache_run_t<T, kRun> &run)
{
    const int64_t block = slot / p.block_size, place = slot - block * p.block_size;
    const int64_t to =
        block * side.block_stride + place * side.place_step + epmoei_cache_inside(side, head, (int32_t)column);
    epmoei_divisor_t divisor = {1.0f, 1.0f, 1.0f};
    if (sizeof(Stored) == 1 && side.scale) divisor = epmoei_divisor(*side.scale);
    epmoei_cache_store<T, kRun>((Stored *)side.cache + to, run, side.column_step, divisor);
}

template <typename T, typename Stored, int kRun>
static __global__ void __launch_bounds__(256, 2) rope_cache_kernel(const rope_cache_t p)
{
    epmoei_begin_dependent();
    const epmoei_head_place_t at = epmoei_head_place(p.lanes, p.head_slots, p.tokens, p.num_tokens);
    if (!at.live) return;
    const bool counts = at.head == 0 && at.lane == 0;
    const int64_t position = epmoei_load_index(p.positions.data, p.positions.dtype, at.token);
    int64_t slot = epmoei_load_index(p.slots, p.slots_dtype, at.token);
    const float *row = epmoei_table_row(p.positions, position, counts);
    if (slot < 0 || slot >= p.num_slots) {
        if (slot != -1 && counts) epmoei_count_bad(p.positions.error_word, 1);
        slot = -1;
    }
    const int64_t step = (int64_t)p.head_slots * gridDim.y;
    for (int32_t unit = at.lane; unit < p.units; unit += p.lanes) {
        const bool turns = unit < p.half / kRun;
        const columns_t of_head = head_columns<kRun>(p, unit, turns), of_value = value_columns<kRun>(p, unit);
        epmoei_turn_t<kRun> turn = {};
        if (turns && row) epmoei_load_turn<kRun>(turn, row, (int64_t)unit * kRun, p.half, p.style, p.direction);
        for (int64_t first = at.head; first < p.all_heads; first += kHeadsInFlight * step) {
            epmoei_cache_run_t<T, kRun> a[kHeadsInFlight], b[kHeadsInFlight];
#pragma unroll
            for (int i = 0; i < kHeadsInFlight; i++) {
                const int64_t head = first + i * step;
                const bool valid = head < p.all_heads, is_value = head >= p.num_heads + p.kv_heads;
                const bool read =
                    valid && (head < p.num_heads ? turns && row : slot >= 0 || (turns && row && !is_value));
                const columns_t columns = is_value ? of_value : of_head;
                const T *from = head_row<T>(p, at.token, valid ? head : 0);
                epmoei_cache_load<T, kRun>(a[i], from + columns.a, read && columns.a < p.head_dim, true);
                epmoei_cache_load<T, kRun>(b[i], from + columns.b, read && columns.b < p.head_dim, true);
            }
#pragma unroll
            for (int i = 0; i < kHeadsInFlight; i++) {
                const int64_t head = first + i * step, key = head - p.num_heads, value = key - p.kv_heads;
                if (head >= p.all_heads) break;
                if (value < 0 && turns && row) {
                    float x[kRun], y[kRun];
                    unpack<T, kRun>(x, a[i]);
                    unpack<T, kRun>(y, b[i]);
                    epmoei_rotate<kRun>(x, y, turn, p.style);
                    pack<T, kRun>(a[i], x);
                    pack<T, kRun>(b[i], y);
                    T *to = head_row<T>(p, at.token, head);
                    put_back<T, kRun>(to + of_head.a, a[i]);
                    put_back<T, kRun>(to + of_head.b, b[i]);
                }
                if (key < 0 || slot < 0) continue;
                const epmoei_cache_side_t &side = value < 0 ? p.key : p.value;
                const columns_t columns = value < 0 ? of_head : of_value;
                const int64_t of_cache = value < 0 ? key : value;
                if (columns.a < p.head_dim) cache_run<T, Stored, kRun>(p, side, slot, of_cache, columns.a, a[i]);
                if (columns.b < p.head_dim) cache_run<T, Stored, kRun>(p, side, slot, of_cache, columns.b, b[i]);
            }
        }
    }
}

/* -------------------------------------------------------------------------------------------------------- launchers */

template <typename T, typename Stored, int kRun>
static epmoe_status_t launch_runs(rope_cache_t p, epmoe_stream_t stream)
{
    p.units = (int32_t)epmoei_ceil_div(p.head_dim / kRun, 2);
    const epmoei_head_grid_t grid = epmoei_head_grid(p.num_tokens, p.all_heads, p.units < 256 ? p.units : 256);
    p.lanes = grid.lanes;
    p.head_slots = grid.slots;
    p.tokens = grid.tokens;
    return epmoei_cuda_status(
        (int32_t)epmoei_launch_dependent(rope_cache_kernel<T, Stored, kRun>, grid.blocks, grid.threads, 0, stream, p),
        "epmoe_rope_cache_write");
}

template <typename T, typename Stored>
static epmoe_status_t launch(const rope_cache_t &p, const epmoe_cache_write_args_t *cache, epmoe_stream_t stream)
{
    constexpr int kRun = epmoei_part_size<T>;
    bool whole = p.half % kRun == 0 && p.head_dim % kRun == 0 && p.q_stride % kRun == 0 && p.k_stride % kRun == 0;
    whole = whole && cache->key_block_stride % kRun == 0;
    whole = whole && (!cache->value || (cache->value_stride % kRun == 0 && cache->value_block_stride % kRun == 0));
    whole = whole && (cache->layout != EPMOE_CACHE_LAYOUT_V1 || cache->key_pack % kRun == 0);
    return whole ? launch_runs<T, Stored, kRun>(p, stream) : launch_runs<T, Stored, 1>(p, stream);
}

template <typename T>
static epmoe_status_t launch_stored(const rope_cache_t &p, const epmoe_cache_write_args_t *cache, epmoe_stream_t stream)
{
    return cache->cache_dtype == EPMOE_F8_E4M3 ? launch<T, uint8_t>(p, cache, stream) : launch<T, T>(p, cache, stream);
}

extern "C" epmoe_status_t epmoei_rope_cache_write_sm80(const epmoe_rope_args_t *rope,
                                                       const epmoe_cache_write_args_t *cache, epmoe_stream_t stream)
{
    EPMOEI_CHECK_ALIGNED(rope->q, 16);
    EPMOEI_CHECK_ALIGNED(rope->k, 16);
    EPMOEI_CHECK_ALIGNED(rope->cos_sin, 16);
    EPMOEI_CHECK_ALIGNED(rope->positions, epmoe_dtype_size(rope->positions_dtype));
    EPMOEI_CHECK_ALIGNED(cache->value, 16);
    EPMOEI_CHECK_ALIGNED(cache->slots, epmoe_dtype_size(cache->slots_dtype));
    EPMOEI_CHECK_ALIGNED(cache->key_cache, 16);
    EPMOEI_CHECK_ALIGNED(cache->value_cache, 16);
    EPMOEI_CHECK_ALIGNED(cache->k_scale, 4);
    EPMOEI_CHECK_ALIGNED(cache->v_scale, 4);
    rope_cache_t p = {};
    p.q = rope->q;
    p.k = rope->k;
    p.q_stride = rope->q_stride;
    p.k_stride = rope->k_stride;
    p.positions.data = rope->positions;
    p.positions.cos_sin = rope->cos_sin;
    p.positions.error_word = epmoei_error_word();
    p.positions.num_positions = rope->num_positions;
    p.positions.rotary_dim = rope->rotary_dim;
    p.positions.dtype = rope->positions_dtype;
    p.direction = rope->inverse ? -1.0f : 1.0f;
    p.style = rope->style;
    p.key = epmoei_cache_key_side(cache);
    p.value = epmoei_cache_value_side(cache);
    p.slots = cache->slots;
    p.num_slots = (int64_t)cache->num_blocks * cache->block_size;
    p.num_heads = rope->num_heads;
    p.kv_heads = rope->num_kv_heads;
    p.all_heads = p.num_heads + (cache->value ? 2 : 1) * p.kv_heads;
    p.block_size = cache->block_size;
    p.slots_dtype = cache->slots_dtype;
    p.num_tokens = rope->num_tokens;
    p.head_dim = rope->head_dim;
    p.half = rope->rotary_dim / 2;
    switch (rope->dtype) {
    case EPMOE_BF16: return launch_stored<__nv_bfloat16>(p, cache, stream);
    case EPMOE_F16: return launch_stored<__half>(p, cache, stream);
    default: return launch_stored<float>(p, cache, stream);
    }
}
