#include "dense_layers/heads_cuda.cuh"
#include "dense_layers/rope.h"

struct rope_t {
    void *q;
    void *k;
    int64_t q_stride;
    int64_t k_stride;
    int64_t head_stride;
    epmoei_positions_t positions;
    float direction; /* of the rotation: 1 or -1 */
    epmoe_rope_style_t style;
    int64_t num_heads; /* of q */
    int64_t all_heads;
    int32_t num_tokens;
    int32_t half;
    int32_t lanes;
    int32_t slots;
    int32_t tokens;
    epmoei_head_steps_t steps; /* of the walk, which needs none of the three above */
};

template <typename T> __device__ __forceinline__ T *head_row(const rope_t &p, int64_t token, int64_t head)
{
    if (head < p.num_heads) return (T *)p.q + token * p.q_stride + head * p.head_stride;
    return (T *)p.k + token * p.k_stride + (head - p.num_heads) * p.head_stride;
}

/* Runs of 16 bytes, a share of a head for each lane. */
template <typename T, epmoe_rope_style_t kStyle>
static __global__ void __launch_bounds__(kHeadWalkThreads, kHeadWalkBlocks) rope_kernel(const rope_t p)
{
    constexpr int kRun = epmoei_part_size<T>;
    extern __shared__ uint4 stages[];
    epmoei_head_thread_t own(p.steps, stages);
    epmoei_head_walk_t &at = own.at, &ahead = own.ahead;
    const uint32_t num_tokens = (uint32_t)p.num_tokens;
    const int32_t lane = own.lane, first = lane * kRun;
    epmoei_begin_dependent();
    const auto copy_ahead = [&](uint32_t stage) {
        const bool valid = ahead.token < num_tokens && ahead.head() < p.all_heads;
        const T *from = head_row<T>(p, ahead.token, ahead.head()) + first;
        own.ring.copy(stage, from, valid, from + p.half, valid);
        ahead.step(p.steps);
    };
    const auto position_at = [&](uint32_t token) {
        return epmoei_load_token_index(p.positions.data, p.positions.dtype, token, num_tokens);
    };
    epmoei_raw_index_t position = position_at(at.token); /* what the table has to wait for comes first */
#pragma unroll
    for (uint32_t i = 0; i < kHeadStages - 1; i++) copy_ahead(i);
    for (uint32_t stage = 0; at.first < num_tokens; stage = (stage + 1) % kHeadStages) {
        const int32_t head = at.head();
        const bool works = at.token < num_tokens && head < p.all_heads;
        const float *row = works ? epmoei_table_row(p.positions, position, head == 0 && lane == 0) : NULL;
        epmoei_turn_t<kRun> turn;
        if (row) epmoei_load_turn<kRun>(turn, row, first, p.half, kStyle, p.direction);
        T *to = head_row<T>(p, at.token, head) + first;
        at.step(p.steps);
        position = position_at(at.token);
        uint4 a, b;
        own.ring.take(a, b, stage);
        copy_ahead((stage + kHeadStages - 1) % kHeadStages);
        if (!row) continue;
        float x[kRun], y[kRun];
        epmoei_unpack_part<T>(x, a);
        epmoei_unpack_part<T>(y, b);
        epmoei_rotate<kRun>(x, y, turn, kStyle);
        *(uint4 *)to = epmoei_pack_part<T>(x);
        *(uint4 *)(to + p.half) = epmoei_pack_part<T>(y);
    }
}

/* Element by element. */
template <typename T> static __global__ void __launch_bounds__(256) rope_any_kernel(rope_t p)
{
    epmoei_begin_dependent();
    const epmoei_head_place_t at = epmoei_head_place(p.lanes, p.slots, p.tokens, p.num_tokens);
    if (!at.live) return;
    const int64_t position = epmoei_load_index(p.positions.data, p.positions.dtype, at.token);
    const float *row = epmoei_table_row(p.positions, position, at.head == 0 && at.lane == 0);
    if (!row) return;
    for (int32_t pair = at.lane; pair < p.half; pair += p.lanes) {
        int64_t a_col, b_col;
        epmoei_pair_columns<1>(a_col, b_col, pair, p.half, p.style);
        const float cosine = row[pair], sine = p.direction * row[p.half + pair];
        for (int64_t head = at.head; head < p.all_heads; head += (int64_t)p.slots * gridDim.y) {
            T *data = head_row<T>(p, at.token, head);
            float a = epmoei_to_float(data[a_col]), b = epmoei_to_float(data[b_col]);
            epmoei_rotate_pair(a, b, cosine, sine);
            data[a_col] = epmoei_from_float<T>(a);
            data[b_col] = epmoei_from_float<T>(b);
        }
    }
}

template <typename T> static cudaError_t launch_any(rope_t p, epmoe_stream_t stream)
{
    const epmoei_head_grid_t grid = epmoei_head_grid(p.num_tokens, p.all_heads, p.half < 256 ? p.half : 256);
    p.lanes = grid.lanes;
    p.slots = grid.slots;
    p.tokens = grid.tokens;
    return epmoei_launch_dependent(rope_any_kernel<T>, grid.blocks, grid.threads, 0, stream, p);
}

template <typename T> static cudaError_t launch_whole(rope_t p, epmoe_stream_t stream)
{
    const epmoei_head_walk_grid_t grid = epmoei_head_walk_grid(p.num_tokens, p.all_heads, p.half / epmoei_part_size<T>);
    p.steps = grid.steps;
    const auto kernel = p.style == EPMOE_ROPE_GPTJ ? rope_kernel<T, EPMOE_ROPE_GPTJ> : rope_kernel<T, EPMOE_ROPE_NEOX>;
    return epmoei_launch_dependent(kernel, grid.blocks, grid.threads, grid.shared_bytes, stream, p);
}

template <typename T> static epmoe_status_t launch(const rope_t &p, epmoe_stream_t stream)
{
    constexpr int kRun = epmoei_part_size<T>;
    bool whole = p.half % kRun == 0 && p.head_stride % kRun == 0 && p.q_stride % kRun == 0 && p.k_stride % kRun == 0;
    whole = whole && p.half / kRun <= kHeadWalkThreads && p.all_heads <= kHeadWalkHeads;
    return epmoei_cuda_status((int32_t)(whole ? launch_whole<T>(p, stream) : launch_any<T>(p, stream)), "epmoe_rope");
}

extern "C" epmoe_status_t epmoei_rope_sm80(const epmoe_rope_args_t *args, epmoe_stream_t stream)
{
    EPMOEI_CHECK_ALIGNED(args->q, 16);
    EPMOEI_CHECK_ALIGNED(args->k, 16);
    EPMOEI_CHECK_ALIGNED(args->cos_sin, 16);
    EPMOEI_CHECK_ALIGNED(args->positions, epmoe_dtype_size(args->positions_dtype));
    rope_t p = {};
    p.q = args->q;
    p.k = args->k;
    p.q_stride = args->q_stride;
    p.k_stride = args->k_stride;
    p.head_stride = args->head_stride;
    p.positions.data = args->positions;
    p.positions.cos_sin = args->cos_sin;
    p.positions.error_word = epmoei_error_word();
    p.positions.num_positions = args->num_positions;
    p.positions.rotary_dim = args->rotary_dim;
    p.positions.dtype = args->positions_dtype;
    p.direction = args->inverse ? -1.0f : 1.0f;
    p.style = args->style;
    p.num_tokens = args->num_tokens;
    p.num_heads = args->num_heads;
    p.all_heads = (int64_t)args->num_heads + args->num_kv_heads;
    p.half = args->rotary_dim / 2;
    switch (args->dtype) {
    case EPMOE_BF16: return launch<__nv_bfloat16>(p, stream);
    case EPMOE_F16: return launch<__half>(p, stream);
    default: return launch<float>(p, stream);
    }
}
