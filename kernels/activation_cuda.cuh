/* The gated activations on the device; the definitions stand at epmoe_activation_t. */
#ifndef EPMOEI_ACTIVATION_CUDA_CUH
#define EPMOEI_ACTIVATION_CUDA_CUH

#include <epmoe/epmoe.h>

#include <cuda_runtime.h>
#include <math.h>

/* Within 4 ulp; overflow of exp gives 1 / inf = 0, so that no clamp is needed. */
__device__ __forceinline__ float epmoei_sigmoid_device(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

/* gate * fraction, with the limit 0 at gate = -inf that the product itself (-inf * 0) misses. */
__device__ __forceinline__ float epmoei_gate_device(float gate, float fraction)
{
    return gate == -INFINITY ? 0.0f : gate * fraction;
}

/* alpha and limit as epmoei_activation_check leaves them; limit 0 = none. Comparisons keep a NaN, which fminf drops. */
__device__ __forceinline__ float epmoei_activate_device(epmoe_activation_t activation, float gate, float up,
                                                        float alpha, float limit)
{
    if (limit > 0.0f) {
        gate = gate > limit ? limit : gate;
        up = up > limit ? limit : up < -limit ? -limit : up;
    }
    switch (activation) {
    case EPMOE_ACTIVATION_GELU: return epmoei_gate_device(gate, 0.5f * erfcf(gate * -0.70710678f)) * up;
    case EPMOE_ACTIVATION_GELU_TANH:
        /* (1 + tanh(z)) / 2 = sigmoid(2 z), with z = sqrt(2/pi) * (gate + 0.044715 gate^3) */
        return epmoei_gate_device(gate, epmoei_sigmoid_device(1.5957691f * (gate + 0.044715f * gate * gate * gate))) *
               up;
    case EPMOE_ACTIVATION_SWIGLU_OAI:
        return epmoei_gate_device(gate, epmoei_sigmoid_device(alpha * gate)) * (up + 1.0f);
    default: return epmoei_gate_device(gate, epmoei_sigmoid_device(gate)) * up;
    }
}

#endif
