#include "dense_layers/heads_cuda.cuh"
#include "dense_layers/qk_norm_rope.h"

static const int kWarps = 8; /* of a block of the kernel for any head */

struct qk_t {
    void *qkv;
    int64_t stride;
    const void *q_weight;
    const void *k_weight;
    epmoei_positions_t positions;
    double inverse_dim;
    int64_t num_heads; /* of q */
    int64_t all_heads; /* of q and k */
    float eps;
    float offset; /* added to every weight */
    epmoe_rope_style_t style;
    epmoe_dtype_t weight_dtype;
    int32_t num_tokens;
    int32_t head_dim;
    int32_t half;
    int32_t shares;            /* of a head: threads with two runs each */
    int32_t rotated;           /* shares that are rotated, the first ones */
    epmoei_head_steps_t steps; /* lanes: shares rounded up to a power of two, at most a warp */
    int64_t step;              /* elements that a step of the walk goes on, */
    int64_t passing;           /* and more where it passes the last unit of its tokens */
};

__device__ __forceinline__ float mean_rsqrt(const qk_t &p, double sum)
{
    return (float)rsqrt(fma(sum, p.inverse_dim, (double)p.eps));
}

/* (x * r) * weight, the offset already in it. */
__device__ __forceinline__ float normalised(float value, float weight, float r)
{
    return __fmul_rn(__fmul_rn(value, r), weight);
}

__device__ __forceinline__ float weight_at(const qk_t &p, const void *weights, int64_t i)
{
    return __fadd_rn(epmoei_load_float(weights, p.weight_dtype, i), p.offset);
}

template <int kRun> __device__ __forceinline__ void normalise_run(float (&values)[kRun], const float *weights, float r)
{
    float w[kRun];
    epmoei_load_floats_of(w, weights);
#pragma unroll
    for (int i = 0; i < kRun; i++) values[i] = normalised(values[i], w[i], r);
}

/* Squares of fp32 values are exact in double, and no finite head overflows it. */
template <int kRun> __device__ __forceinline__ double squares(const float (&values)[kRun])
{
    double sum = 0;
#pragma unroll
    for (int i = 0; i < kRun; i++) sum = fma((double)values[i], (double)values[i], sum);
    return sum;
}

/* Part of a warp per head. Heads of whole runs at aligned addresses, at most kHeadWalkHeads. */
template <typename T, epmoe_rope_style_t kStyle>
static __global__ void __launch_bounds__(kHeadWalkThreads, kHeadWalkBlocks) qk_kernel(const qk_t p)
{
    constexpr int kRun = epmoei_part_size<T>;
    extern __shared__ uint4 stages[];
    float *const weights = (float *)(stages + kHeadStages * 2 * blockDim.x); /* of q heads, then of k heads */
    epmoei_head_thread_t own(p.steps, stages);
    epmoei_head_walk_t &at = own.at, &ahead = own.ahead;
    const uint32_t num_tokens = (uint32_t)p.num_tokens;
    const int32_t lane = own.lane, all_heads = (int32_t)p.all_heads;
    const bool rotates = lane < p.rotated, shares = lane < p.shares;
    /* Behind the rotated columns the rest of the head, as two halves as well. */
    const int32_t a_col = (rotates ? lane : lane + p.rotated) * kRun;
    const int32_t apart = rotates ? p.half : (p.shares - p.rotated) * kRun;
    T *to = (T *)p.qkv + at.token * p.stride + (int64_t)at.head() * p.head_dim + a_col;
    const T *from = to;
    epmoei_begin_dependent();
    const auto copy_ahead = [&](uint32_t stage) {
        const bool valid = shares && ahead.token < num_tokens && ahead.head() < all_heads;
        own.ring.copy(stage, from, valid, from + apart, valid);
        from += p.step + (ahead.step(p.steps) ? p.passing : 0);
    };
    const auto position_at = [&](uint32_t token) {
        return epmoei_load_token_index(p.positions.data, p.positions.dtype, token, num_tokens);
    };
    epmoei_raw_index_t position = position_at(at.token); /* what the table has to wait for comes first */
#pragma unroll
    for (uint32_t i = 0; i < kHeadStages - 1; i++) copy_ahead(i);
    for (int32_t i = threadIdx.x; i < p.head_dim; i += blockDim.x) {
        weights[i] = weight_at(p, p.q_weight, i);
        weights[p.head_dim + i] = weight_at(p, p.k_weight, i);
    }
    __syncthreads();
    /* Whole warps, whose lanes add up their squares. */
    for (uint32_t stage = 0; at.first < num_tokens; stage = (stage + 1) % kHeadStages) {
        const int32_t head = at.head();
        const bool works = shares && at.token < num_tokens && head < all_heads;
        const float *row = works ? epmoei_table_row(p.positions, position, head == 0 && lane == 0) : NULL;
        epmoei_turn_t<kRun> turn;
        if (row && rotates) epmoei_load_turn<kRun>(turn, row, a_col, p.half, kStyle, 1.0f);
        T *const head_at = to;
        to += p.step + (at.step(p.steps) ? p.passing : 0);
        position = position_at(at.token);
        uint4 a, b;
        own.ring.take(a, b, stage);
        copy_ahead((stage + kHeadStages - 1) % kHeadStages);
        float x[kRun], y[kRun];
        epmoei_unpack_part<T>(x, a);
        epmoei_unpack_part<T>(y, b);
        double sum = row ? squares(x) + squares(y) : 0.0;
        for (int32_t offset = p.steps.lanes / 2; offset; offset /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset);
        if (!row) continue;
        const float *w = weights + (head < p.num_heads ? 0 : p.head_dim) + a_col;
        const float r = mean_rsqrt(p, sum);
        normalise_run(x, w, r);
        normalise_run(y, w + apart, r);
        if (rotates) epmoei_rotate<kRun>(x, y, turn, kStyle);
        *(uint4 *)head_at = epmoei_pack_part<T>(x);
        *(uint4 *)(head_at + apart) = epmoei_pack_part<T>(y);
    }
}

/* A warp per head, element by element. Its second pass writes when the first has read everything. */
template <typename T>
__device__ __forceinline__ void norm_and_rotate(const qk_t &p, T *data, const void *weights, const float *row)
{
    const int32_t lane = threadIdx.x;
    double sum = 0;
    for (int64_t i = lane; i < p.head_dim; i += 32) {
        const double value = (double)epmoei_to_float(data[i]);
        sum = fma(value, value, sum);
    }
#pragma unroll
    for (int offset = 16; offset; offset /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset);
    const float r = mean_rsqrt(p, sum);
    for (int64_t i = lane; i < p.half; i += 32) {
        int64_t a_col, b_col;
        epmoei_pair_columns<1>(a_col, b_col, i, p.half, p.style);
        float a = normalised(epmoei_to_float(data[a_col]), weight_at(p, weights, a_col), r);
        float b = normalised(epmoei_to_float(data[b_col]), weight_at(p, weights, b_col), r);
        epmoei_rotate_pair(a, b, row[i], row[p.half + i]);
        data[a_col] = epmoei_from_float<T>(a);
        data[b_col] = epmoei_from_float<T>(b);
    }
    for (int64_t i = 2 * (int64_t)p.half + lane; i < p.head_dim; i += 32)
        data[i] = epmoei_from_float<T>(normalised(epmoei_to_float(data[i]), weight_at(p, weights, i), r));
}

template <typename T> static __global__ void __launch_bounds__(32 * kWarps) qk_any_kernel(qk_t p)
{
    epmoei_begin_dependent();
    const int64_t pieces = p.all_heads * p.num_tokens;
    for (int64_t piece = (int64_t)blockIdx.x * kWarps + threadIdx.y; piece < pieces;
         piece += (int64_t)gridDim.x * kWarps) {
        const int64_t token = piece / p.all_heads, head = piece - token * p.all_heads;
        const float *row = epmoei_table_row(p.positions, epmoei_load_index(p.positions.data, p.positions.dtype, token),
                                            head == 0 && threadIdx.x == 0);
        if (!row) continue;
        norm_and_rotate(p, (T *)p.qkv + token * p.stride + head * p.head_dim,
                        head < p.num_heads ? p.q_weight : p.k_weight, row);
    }
}

template <typename T> static cudaError_t launch_any(const qk_t &p, epmoe_stream_t stream)
{
    const int64_t kBlocksPerSm = 8;
    const epmoei_device_info_t *device = epmoei_device_current();
    const int64_t most = kBlocksPerSm * (device ? device->num_sms : 1);
    const int64_t blocks = epmoei_min64(epmoei_ceil_div(p.all_heads * p.num_tokens, kWarps), most);
    return epmoei_launch_dependent(qk_any_kernel<T>, dim3((unsigned)blocks), dim3(32, kWarps), 0, stream, p);
}

template <typename T> static epmoe_status_t launch(qk_t p, epmoe_stream_t stream)
{
    const int32_t run = epmoei_part_size<T>;
    p.shares = p.head_dim / (2 * run);
    p.rotated = p.half / run;
    const bool whole = p.head_dim % (2 * run) == 0 && p.half % run == 0 && p.stride % run == 0 && p.shares <= 32 &&
                       p.all_heads <= kHeadWalkHeads;
    if (!whole) return epmoei_cuda_status((int32_t)launch_any<T>(p, stream), "epmoe_qk_norm_rope");
    int32_t lanes = 1;
    while (lanes < p.shares) lanes *= 2;
    const epmoei_head_walk_grid_t grid = epmoei_head_walk_grid(p.num_tokens, p.all_heads, lanes);
    p.steps = grid.steps;
    p.step = grid.steps.step_tokens * p.stride + (int64_t)grid.steps.step_heads * p.head_dim;
    p.passing = grid.steps.tokens * p.stride - (int64_t)grid.steps.heads * p.head_dim;
    const auto kernel = p.style == EPMOE_ROPE_GPTJ ? qk_kernel<T, EPMOE_ROPE_GPTJ> : qk_kernel<T, EPMOE_ROPE_NEOX>;
    const size_t bytes = grid.shared_bytes + 2 * (size_t)p.head_dim * sizeof(float);
    return epmoei_cuda_status((int32_t)epmoei_launch_dependent(kernel, grid.blocks, grid.threads, bytes, stream, p),
                              "epmoe_qk_norm_rope");
}

extern "C" epmoe_status_t epmoei_qk_norm_rope_sm80(const epmoe_qk_norm_rope_args_t *args, epmoe_stream_t stream)
{
    EPMOEI_CHECK_ALIGNED(args->qkv, 16);
    EPMOEI_CHECK_ALIGNED(args->q_weight, 16);
    EPMOEI_CHECK_ALIGNED(args->k_weight, 16);
    EPMOEI_CHECK_ALIGNED(args->cos_sin, 16);
    EPMOEI_CHECK_ALIGNED(args->positions, epmoe_dtype_size(args->positions_dtype));
    qk_t p = {};
    p.qkv = args->qkv;
    p.stride = args->qkv_stride;
    p.q_weight = args->q_weight;
    p.k_weight = args->k_weight;
    p.positions.data = args->positions;
    p.positions.cos_sin = args->cos_sin;
    p.positions.error_word = epmoei_error_word();
    p.positions.num_positions = args->num_positions;
    p.positions.rotary_dim = args->rotary_dim;
    p.positions.dtype = args->positions_dtype;
    p.inverse_dim = 1.0 / args->head_dim;
    p.num_heads = args->num_heads;
    p.all_heads = (int64_t)args->num_heads + args->num_kv_heads;
    p.eps = args->eps;
    p.offset = args->weight_offset ? 1.0f : 0.0f;
    p.style = args->style;
    p.weight_dtype = args->weight_dtype;
    p.num_tokens = args->num_tokens;
    p.head_dim = args->head_dim;
    p.half = args->rotary_dim / 2;
    switch (args->dtype) {
    case EPMOE_BF16: return launch<__nv_bfloat16>(p, stream);
    case EPMOE_F16: return launch<__half>(p, stream);
    default: return launch<float>(p, stream);
    }
}
