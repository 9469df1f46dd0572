#include "dense_layers/heads_cuda.cuh"
#include "dense_layers/rope.h"

/* Heads of which a thread loads its two runs before it stores the first. */
static const int kHeadsInFlight = 2;

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
    int32_t runs; /* threads' shares of a head */
    int32_t lanes;
    int32_t slots;
    int32_t tokens;
};

/* What a thread holds of a head until it rotates it: as stored, to need few registers. */
template <typename T, int kRun> struct held_t {
    uint4 part;
    __device__ __forceinline__ void load(const T *from, bool valid) { part = ptx_load_once_16(from, valid); }
    __device__ __forceinline__ void unpack(float (&values)[kRun]) const { epmoei_unpack_part<T>(values, part); }
    static __device__ __forceinline__ void store(T *to, const float (&values)[kRun])
    {
        *(uint4 *)to = epmoei_pack_part<T>(values);
    }
};
template <typename T> struct held_t<T, 1> {
    T element;
    __device__ __forceinline__ void load(const T *from, bool valid) { element = valid ? *from : T(); }
    __device__ __forceinline__ void unpack(float (&values)[1]) const { values[0] = epmoei_to_float(element); }
    static __device__ __forceinline__ void store(T *to, const float (&values)[1])
    {
        *to = epmoei_from_float<T>(values[0]);
    }
};

template <typename T> __device__ __forceinline__ T *head_row(const rope_t &p, int64_t token, int64_t head)
{
    if (head < p.num_heads) return (T *)p.q + token * p.q_stride + head * p.head_stride;
    return (T *)p.k + token * p.k_stride + (head - p.num_heads) * p.head_stride;
}

template <typename T, int kRun> static __global__ void __launch_bounds__(256, 3) rope_kernel(rope_t p)
{
    epmoei_begin_dependent();
    const epmoei_head_place_t at = epmoei_head_place(p.lanes, p.slots, p.tokens, p.num_tokens);
    if (!at.live) return;
    const int64_t position = epmoei_load_index(p.positions.data, p.positions.dtype, at.token);
    const int64_t step = (int64_t)p.slots * gridDim.y;
    for (int32_t run = at.lane; run < p.runs; run += p.lanes) {
        const int64_t first = (int64_t)run * kRun;
        int64_t a_col, b_col;
        epmoei_pair_columns<kRun>(a_col, b_col, first, p.half, p.style);
        epmoei_turn_t<kRun> turn = {};
        for (int64_t head = at.head; head < p.all_heads; head += kHeadsInFlight * step) {
            held_t<T, kRun> a[kHeadsInFlight], b[kHeadsInFlight];
            T *rows[kHeadsInFlight];
#pragma unroll
            for (int i = 0; i < kHeadsInFlight; i++) {
                const bool valid = head + i * step < p.all_heads;
                rows[i] = head_row<T>(p, at.token, valid ? head + i * step : 0);
                a[i].load(rows[i] + a_col, valid);
                b[i].load(rows[i] + b_col, valid);
            }
            /* Behind the loads of the first heads, which so wait for no position. */
            if (head == at.head) {
                const float *row = epmoei_table_row(p.positions, position, head == 0 && run == 0);
                if (!row) return;
                epmoei_load_turn<kRun>(turn, row, first, p.half, p.style, p.direction);
            }
#pragma unroll
            for (int i = 0; i < kHeadsInFlight; i++) {
                if (head + i * step >= p.all_heads) break;
                float x[kRun], y[kRun];
                a[i].unpack(x);
                b[i].unpack(y);
                epmoei_rotate<kRun>(x, y, turn, p.style);
                held_t<T, kRun>::store(rows[i] + a_col, x);
                held_t<T, kRun>::store(rows[i] + b_col, y);
            }
        }
    }
}

template <typename T, int kRun> static epmoe_status_t launch_runs(rope_t p, epmoe_stream_t stream)
{
    p.runs = p.half / kRun;
    const epmoei_head_grid_t grid = epmoei_head_grid(p.num_tokens, p.all_heads, p.runs < 256 ? p.runs : 256);
    p.lanes = grid.lanes;
    p.slots = grid.slots;
    p.tokens = grid.tokens;
    return epmoei_cuda_status(
        (int32_t)epmoei_launch_dependent(rope_kernel<T, kRun>, grid.blocks, grid.threads, 0, stream, p), "epmoe_rope");
}

template <typename T> static epmoe_status_t launch(const rope_t &p, epmoe_stream_t stream)
{
    constexpr int kRun = epmoei_part_size<T>;
    const bool whole =
        p.half % kRun == 0 && p.head_stride % kRun == 0 && p.q_stride % kRun == 0 && p.k_stride % kRun == 0;
    return whole ? launch_runs<T, kRun>(p, stream) : launch_runs<T, 1>(p, stream);
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
