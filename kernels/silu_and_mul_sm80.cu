#include "kernels/rows_cuda.cuh"
#include "kernels/silu_and_mul.h"

#include <math.h>

/* Elements of one thread where everything is aligned. */
static const int kRun = 8;

/* The product with the limit 0 at gate = -inf, where it would be -inf * 0. */
__device__ __forceinline__ float gate_times(float gate, float fraction)
{
    return gate == -INFINITY ? 0.0f : gate * fraction;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

/* epmoei_activate of kernels/activation.h, but for the limit. */
template <epmoe_activation_t kActivation> __device__ __forceinline__ float activate(float gate, float up, float alpha)
{
    if (kActivation == EPMOE_ACTIVATION_GELU) return gate_times(gate, 0.5f * erfcf(gate * -0.70710678f)) * up;
    if (kActivation == EPMOE_ACTIVATION_GELU_TANH)
        return gate_times(gate, sigmoid(1.5957691f * (gate + 0.044715f * gate * gate * gate))) * up;
    if (kActivation == EPMOE_ACTIVATION_SWIGLU_OAI) return gate_times(gate, sigmoid(alpha * gate)) * (up + 1.0f);
    return gate_times(gate, sigmoid(gate)) * up;
}

/* By comparisons, since fminf and fmaxf drop a NaN. */
template <int kCount> __device__ __forceinline__ void clamp_run(float (&gate)[kCount], float (&up)[kCount], float limit)
{
#pragma unroll
    for (int i = 0; i < kCount; i++) {
        gate[i] = gate[i] > limit ? limit : gate[i];
        up[i] = up[i] > limit ? limit : up[i] < -limit ? -limit : up[i];
    }
}

template <epmoe_activation_t kActivation, int kCount>
__device__ __forceinline__ void activate_run(float (&gate)[kCount], const float (&up)[kCount], float alpha)
{
#pragma unroll
    for (int i = 0; i < kCount; i++) gate[i] = activate<kActivation>(gate[i], up[i], alpha);
}

/* y may be x: a thread writes only what it alone has read before. */
template <typename T, int kCount>
static __global__ void __launch_bounds__(256) silu_and_mul_kernel(epmoe_silu_and_mul_args_t args)
{
    int64_t col = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * kCount;
    if (col >= args.width) return;
    for (int64_t row = blockIdx.y; row < args.num_tokens; row += gridDim.y) {
        const T *x = (const T *)args.x + row * args.x_stride + col;
        float gate[kCount], up[kCount];
        epmoei_load_run(gate, x);
        epmoei_load_run(up, x + args.width);
        if (args.limit > 0.0f) clamp_run(gate, up, args.limit);
        switch (args.activation) {
        case EPMOE_ACTIVATION_GELU: activate_run<EPMOE_ACTIVATION_GELU>(gate, up, args.alpha); break;
        case EPMOE_ACTIVATION_GELU_TANH: activate_run<EPMOE_ACTIVATION_GELU_TANH>(gate, up, args.alpha); break;
        case EPMOE_ACTIVATION_SWIGLU_OAI: activate_run<EPMOE_ACTIVATION_SWIGLU_OAI>(gate, up, args.alpha); break;
        default: activate_run<EPMOE_ACTIVATION_SILU>(gate, up, args.alpha);
        }
        epmoei_store_run((T *)args.y + row * args.y_stride + col, gate);
    }
}

template <typename T> static epmoe_status_t launch(const epmoe_silu_and_mul_args_t *args, epmoe_stream_t stream)
{
    /* The up half starts at `width`: it is aligned only where the width is a multiple too. */
    int64_t granule = 16 / (int64_t)sizeof(T);
    bool aligned = args->width % kRun == 0 && args->x_stride % granule == 0 && args->y_stride % granule == 0;
    epmoei_row_grid_t grid = epmoei_row_grid(args->num_tokens, aligned ? args->width / kRun : args->width);
    if (aligned)
        silu_and_mul_kernel<T, kRun><<<grid.blocks, grid.threads, 0, stream>>>(*args);
    else
        silu_and_mul_kernel<T, 1><<<grid.blocks, grid.threads, 0, stream>>>(*args);
    return EPMOEI_LAUNCH_CHECK("epmoe_silu_and_mul");
}

extern "C" epmoe_status_t epmoei_silu_and_mul_sm80(const epmoe_silu_and_mul_args_t *args, epmoe_stream_t stream)
{
    EPMOEI_CHECK_ALIGNED(args->x, 16);
    EPMOEI_CHECK_ALIGNED(args->y, 16);
    switch (args->dtype) {
    case EPMOE_BF16: return launch<__nv_bfloat16>(args, stream);
    case EPMOE_F16: return launch<__half>(args, stream);
    default: return launch<float>(args, stream);
    }
}
