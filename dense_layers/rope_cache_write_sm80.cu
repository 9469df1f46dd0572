#include "dense_layers/cache_write_cuda.cuh"
#include "dense_layers/heads_cuda.cuh"
#include "dense_layers/rope_cache_write.h"

/* A thread has two runs of kRun columns of a head, as in heads_cuda.cuh: of q and k heads a run and its partner in the
 * rotation, or two of the columns that do not turn; of v heads two that lie half a head apart. */

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
    epmoei_head_steps_t steps; /* of the walk */
    bool narrow;               /* slots fit into 32 bits */
};

/* Where a unit's two runs begin; the second may lie past the head's end. */
struct columns_t {
    int32_t a;
    int32_t b;
};

template <int kRun> __device__ __forceinline__ columns_t head_columns(const rope_cache_t &p, int32_t unit, bool turns)
{
    int64_t a, b;
    if (turns) {
        epmoei_pair_columns<kRun>(a, b, (int64_t)unit * kRun, p.half, p.style);
    } else {
        a = 2 * (int64_t)p.half + 2 * (int64_t)(unit - p.half / kRun) * kRun;
        b = a + kRun;
    }
    return {(int32_t)a, (int32_t)b};
}

template <int kRun> __device__ __forceinline__ columns_t value_columns(const rope_cache_t &p, int32_t unit)
{
    columns_t at;
    at.a = unit * kRun;
    at.b = at.a + p.units * kRun;
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

/* The slot, or -1 for one outside [-1, num_slots), which is `counted` unless it is -1. */
__device__ __forceinline__ int64_t good_slot(const rope_cache_t &p, int64_t slot, bool counted)
{
    if (slot >= 0 && slot < p.num_slots) return slot;
    if (slot != -1 && counted) epmoei_count_bad(p.positions.error_word, 1);
    return -1;
}

/* Elements from the start of the cache to place 0 of a slot. */
__device__ __forceinline__ int64_t slot_element(const rope_cache_t &p, const epmoei_cache_side_t &side, int64_t slot)
{
    const int64_t block = p.narrow ? (uint32_t)slot / (uint32_t)p.block_size : slot / p.block_size;
    return block * side.block_stride + (slot - block * p.block_size) * side.place_step;
}

/* The two runs of a head to the token's slot; without E4M3 as the bits that they are. */
template <typename T, typename Stored, int kRun>
__device__ __forceinline__ void cache_runs(const rope_cache_t &p, const epmoei_cache_side_t &side, int64_t slot,
                                           int64_t head, const columns_t &columns, const epmoei_cache_run_t<T, kRun> &a,
                                           const epmoei_cache_run_t<T, kRun> &b)
{
    Stored *to = (Stored *)side.cache + slot_element(p, side, slot);
    epmoei_divisor_t divisor = {1.0f, 1.0f, 1.0f};
    if (sizeof(Stored) == 1 && side.scale) divisor = epmoei_divisor(*side.scale);
    if (columns.a < p.head_dim)
        epmoei_cache_store<T, kRun>(to + epmoei_cache_inside(side, head, columns.a), a, side.column_step, divisor);
    if (columns.b < p.head_dim)
        epmoei_cache_store<T, kRun>(to + epmoei_cache_inside(side, head, columns.b), b, side.column_step, divisor);
}

template <typename T, int kRun>
__device__ __forceinline__ void turn_runs(T *to, const columns_t &columns, epmoei_cache_run_t<T, kRun> &a,
                                          epmoei_cache_run_t<T, kRun> &b, const epmoei_turn_t<kRun> &turn,
                                          epmoe_rope_style_t style)
{
    float x[kRun], y[kRun];
    unpack<T, kRun>(x, a);
    unpack<T, kRun>(y, b);
    epmoei_rotate<kRun>(x, y, turn, style);
    pack<T, kRun>(a, x);
    pack<T, kRun>(b, y);
    put_back<T, kRun>(to + columns.a, a);
    put_back<T, kRun>(to + columns.b, b);
}

/* Runs of 16 bytes, a unit of a head for each lane. */
template <typename T, typename Stored, epmoe_rope_style_t kStyle>
static __global__ void __launch_bounds__(kHeadWalkThreads, kHeadWalkBlocks) rope_cache_kernel(const rope_cache_t p)
{
    constexpr int kRun = epmoei_part_size<T>;
    extern __shared__ uint4 stages[];
    epmoei_head_thread_t own(p.steps, stages);
    epmoei_head_walk_t &at = own.at, &ahead = own.ahead;
    const uint32_t num_tokens = (uint32_t)p.num_tokens;
    const int32_t lane = own.lane;
    const bool turns = lane < p.half / kRun;
    const columns_t of_head = head_columns<kRun>(p, lane, turns), of_value = value_columns<kRun>(p, lane);
    const int32_t first_key = (int32_t)p.num_heads, first_value = (int32_t)(p.num_heads + p.kv_heads);
    epmoei_begin_dependent();
    const auto position_at = [&](uint32_t token) {
        return epmoei_load_token_index(p.positions.data, p.positions.dtype, token, num_tokens);
    };
    const auto slot_at = [&](uint32_t token) {
        return epmoei_load_token_index(p.slots, p.slots_dtype, token, num_tokens);
    };
    /* Rows of v whose token has no slot are not read. */
    const auto copy_ahead = [&](uint32_t stage, const epmoei_raw_index_t &raw) {
        const int32_t head = ahead.head();
        const bool is_value = head >= first_value;
        bool valid = ahead.token < num_tokens && head < p.all_heads && (turns || head >= first_key);
        if (is_value) valid = valid && (uint64_t)epmoei_index_of(raw, p.slots_dtype) < (uint64_t)p.num_slots;
        const columns_t columns = is_value ? of_value : of_head;
        const T *from = head_row<T>(p, ahead.token, head);
        own.ring.copy(stage, from + columns.a, valid && columns.a < p.head_dim, from + columns.b,
                      valid && columns.b < p.head_dim);
        ahead.step(p.steps);
    };
    epmoei_raw_index_t position = position_at(at.token), first_slots[kHeadStages];
    epmoei_head_walk_t next = at;
#pragma unroll
    for (uint32_t i = 0; i < kHeadStages; i++) {
        first_slots[i] = slot_at(next.token);
        next.step(p.steps);
    }
#pragma unroll
    for (uint32_t i = 0; i < kHeadStages - 1; i++) copy_ahead(i, first_slots[i]);
    epmoei_raw_index_t slot = first_slots[0], ahead_slot = first_slots[kHeadStages - 1];
    for (uint32_t stage = 0; at.first < num_tokens; stage = (stage + 1) % kHeadStages) {
        const uint32_t token = at.token;
        const int32_t head = at.head();
        const bool works = token < num_tokens && head < p.all_heads, is_value = head >= first_value;
        const bool counts = works && head == 0 && lane == 0;
        const int64_t cached = good_slot(p, epmoei_index_of(slot, p.slots_dtype), counts);
        const float *row = works && !is_value ? epmoei_table_row(p.positions, position, counts) : NULL;
        epmoei_turn_t<kRun> turn;
        if (turns && row) epmoei_load_turn<kRun>(turn, row, (int64_t)lane * kRun, p.half, kStyle, p.direction);
        at.step(p.steps);
        position = position_at(at.token);
        slot = slot_at(at.token);
        epmoei_cache_run_t<T, kRun> a, b;
        own.ring.take(a.part, b.part, stage);
        copy_ahead((stage + kHeadStages - 1) % kHeadStages, ahead_slot);
        ahead_slot = slot_at(ahead.token);
        if (!works) continue;
        if (turns && row) turn_runs<T, kRun>(head_row<T>(p, token, head), of_head, a, b, turn, kStyle);
        if (head < first_key || cached < 0) continue;
        if (is_value)
            cache_runs<T, Stored, kRun>(p, p.value, cached, head - first_value, of_value, a, b);
        else
            cache_runs<T, Stored, kRun>(p, p.key, cached, head - first_key, of_head, a, b);
    }
}

/* Element by element. */
template <typename T, typename Stored>
static __global__ void __launch_bounds__(256) rope_cache_any_kernel(const rope_cache_t p)
{
    epmoei_begin_dependent();
    const epmoei_head_place_t at = epmoei_head_place(p.lanes, p.head_slots, p.tokens, p.num_tokens);
    if (!at.live) return;
    const bool counts = at.head == 0 && at.lane == 0;
    const int64_t position = epmoei_load_index(p.positions.data, p.positions.dtype, at.token);
    const int64_t slot = good_slot(p, epmoei_load_index(p.slots, p.slots_dtype, at.token), counts);
    const float *row = epmoei_table_row(p.positions, position, counts);
    for (int32_t unit = at.lane; unit < p.units; unit += p.lanes) {
        const bool turns = unit < p.half && row;
        const columns_t of_head = head_columns<1>(p, unit, unit < p.half), of_value = value_columns<1>(p, unit);
        epmoei_turn_t<1> turn = {};
        if (turns) epmoei_load_turn<1>(turn, row, unit, p.half, p.style, p.direction);
        for (int64_t head = at.head; head < p.all_heads; head += (int64_t)p.head_slots * gridDim.y) {
            const int64_t key = head - p.num_heads, value = key - p.kv_heads;
            const bool is_value = value >= 0, caches = key >= 0 && slot >= 0;
            const bool reads = caches || (turns && !is_value);
            const columns_t columns = is_value ? of_value : of_head;
            T *data = head_row<T>(p, at.token, head);
            epmoei_cache_run_t<T, 1> a, b;
            epmoei_cache_load<T, 1>(a, data + columns.a, reads && columns.a < p.head_dim, true);
            epmoei_cache_load<T, 1>(b, data + columns.b, reads && columns.b < p.head_dim, true);
            if (turns && !is_value) turn_runs<T, 1>(data, of_head, a, b, turn, p.style);
            if (!caches) continue;
            if (is_value)
                cache_runs<T, Stored, 1>(p, p.value, slot, value, of_value, a, b);
            else
                cache_runs<T, Stored, 1>(p, p.key, slot, key, of_head, a, b);
        }
    }
}

/* -------------------------------------------------------------------------------------------------------- launchers */

template <typename T, typename Stored> static cudaError_t launch_any(rope_cache_t p, epmoe_stream_t stream)
{
    p.units = (int32_t)epmoei_ceil_div(p.head_dim, 2);
    const epmoei_head_grid_t grid = epmoei_head_grid(p.num_tokens, p.all_heads, p.units < 256 ? p.units : 256);
    p.lanes = grid.lanes;
    p.head_slots = grid.slots;
    p.tokens = grid.tokens;
    return epmoei_launch_dependent(rope_cache_any_kernel<T, Stored>, grid.blocks, grid.threads, 0, stream, p);
}

template <typename T, typename Stored> static cudaError_t launch_whole(rope_cache_t p, epmoe_stream_t stream)
{
    p.units = (int32_t)epmoei_ceil_div(p.head_dim / epmoei_part_size<T>, 2);
    const epmoei_head_walk_grid_t grid = epmoei_head_walk_grid(p.num_tokens, p.all_heads, p.units);
    p.steps = grid.steps;
    const auto kernel = p.style == EPMOE_ROPE_GPTJ ? rope_cache_kernel<T, Stored, EPMOE_ROPE_GPTJ>
                                                   : rope_cache_kernel<T, Stored, EPMOE_ROPE_NEOX>;
    return epmoei_launch_dependent(kernel, grid.blocks, grid.threads, grid.shared_bytes, stream, p);
}

template <typename T, typename Stored>
static epmoe_status_t launch(const rope_cache_t &p, const epmoe_cache_write_args_t *cache, epmoe_stream_t stream)
{
    constexpr int kRun = epmoei_part_size<T>;
    bool whole = p.half % kRun == 0 && p.head_dim % kRun == 0 && p.q_stride % kRun == 0 && p.k_stride % kRun == 0;
    whole = whole && p.head_dim / (2 * kRun) < kHeadWalkThreads && p.all_heads <= kHeadWalkHeads;
    whole = whole && cache->key_block_stride % kRun == 0;
    whole = whole && (!cache->value || (cache->value_stride % kRun == 0 && cache->value_block_stride % kRun == 0));
    whole = whole && (cache->layout != EPMOE_CACHE_LAYOUT_V1 || cache->key_pack % kRun == 0);
    return epmoei_cuda_status((int32_t)(whole ? launch_whole<T, Stored>(p, stream) : launch_any<T, Stored>(p, stream)),
                              "epmoe_rope_cache_write");
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
    p.narrow = p.num_slots <= UINT32_MAX;
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
