/* A thread's share of a row of silu_and_mul. */
#ifndef EPMOEI_SILU_AND_MUL_CUDA_CUH
#define EPMOEI_SILU_AND_MUL_CUDA_CUH

#include "kernels/ptx.cuh"
#include "kernels/rows_cuda.cuh"
#include "kernels/silu_and_mul.h"

#include <math.h>

#define EPMOEI_SILU_RUN 8 /* elements of one thread where everything is aligned */

/* The product with the limit 0 at gate = -inf, where it would be -inf * 0. */
__device__ __forceinline__ float epmoei_gate_times(float gate, float fraction)
{
    return gate == -INFINITY ? 0.0f : gate * fraction;
}

/* gate / (1 + exp(-x)) * up. Of results that are rounded to 16 bits: a few units of fp32 off, in half of the
 * instructions. A sixteenth of the denominator has a normal reciprocal whenever it is finite, and what that makes too
 * large by 16 is taken off the gate; beyond, the fraction is 0, as it is in the exact form. */
template <typename T> __device__ __forceinline__ float epmoei_gate_sigmoid(float gate, float x, float up)
{
    if constexpr (sizeof(T) == 4) return epmoei_gate_times(gate, 1.0f / (1.0f + expf(-x))) * up;
    constexpr float kSmall = 0.0625f;
    const float inverse = ptx_reciprocal(fmaf(ptx_exp2(x * -1.44269504f), kSmall, kSmall));
    return epmoei_gate_times(gate * kSmall, inverse) * up;
}

/* epmoei_activate of kernels/activation.h, but for the limit. */
template <typename T, epmoe_activation_t kActivation>
__device__ __forceinline__ float epmoei_activate_one(float gate, float up, float alpha)
{
    if (kActivation == EPMOE_ACTIVATION_GELU) return epmoei_gate_times(gate, 0.5f * erfcf(gate * -0.70710678f)) * up;
    if (kActivation == EPMOE_ACTIVATION_GELU_TANH)
        return epmoei_gate_sigmoid<T>(gate, 1.5957691f * (gate + 0.044715f * gate * gate * gate), up);
    if (kActivation == EPMOE_ACTIVATION_SWIGLU_OAI) return epmoei_gate_sigmoid<T>(gate, alpha * gate, up + 1.0f);
    return epmoei_gate_sigmoid<T>(gate, gate, up);
}

/* By comparisons, since fminf and fmaxf drop a NaN. */
template <int kCount>
__device__ __forceinline__ void epmoei_clamp_run(float (&gate)[kCount], float (&up)[kCount], float limit)
{
#pragma unroll
    for (int i = 0; i < kCount; i++) {
        gate[i] = gate[i] > limit ? limit : gate[i];
        up[i] = up[i] > limit ? limit : up[i] < -limit ? -limit : up[i];
    }
}

template <typename T, epmoe_activation_t kActivation, int kCount>
__device__ __forceinline__ void epmoei_activate_run(float (&gate)[kCount], const float (&up)[kCount], float alpha)
{
#pragma unroll
    for (int i = 0; i < kCount; i++) gate[i] = epmoei_activate_one<T, kActivation>(gate[i], up[i], alpha);
}

/* Outputs of gates y and ups of T in fp32, not yet rounded, in place of the gates. */
template <typename T, int kCount>
__device__ __forceinline__ void epmoei_activate_pairs(float (&y)[kCount], float (&up)[kCount],
                                                      const epmoe_silu_and_mul_args_t &args)
{
    if (args.limit > 0.0f) epmoei_clamp_run(y, up, args.limit);
    switch (args.activation) {
    case EPMOE_ACTIVATION_GELU: epmoei_activate_run<T, EPMOE_ACTIVATION_GELU>(y, up, args.alpha); break;
    case EPMOE_ACTIVATION_GELU_TANH: epmoei_activate_run<T, EPMOE_ACTIVATION_GELU_TANH>(y, up, args.alpha); break;
    case EPMOE_ACTIVATION_SWIGLU_OAI: epmoei_activate_run<T, EPMOE_ACTIVATION_SWIGLU_OAI>(y, up, args.alpha); break;
    default: epmoei_activate_run<T, EPMOE_ACTIVATION_SILU>(y, up, args.alpha);
    }
}

/* Columns [col, col + kCount) of a row. */
template <typename T, int kCount>
__device__ __forceinline__ void epmoei_silu_run(float (&y)[kCount], const epmoe_silu_and_mul_args_t &args, int64_t row,
                                                int64_t col)
{
    const T *x = (const T *)args.x + row * args.x_stride + col;
    float up[kCount];
    epmoei_load_run(y, x);
    epmoei_load_run(up, x + args.width);
    epmoei_activate_pairs<T>(y, up, args);
}

#endif
