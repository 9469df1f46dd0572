/* The gated activations on two fp32 numbers; the definitions stand at epmoe_activation_t. */
#ifndef EPMOEI_ACTIVATION_H
#define EPMOEI_ACTIVATION_H

#include "base/base.h"

#include <math.h>

static inline float epmoei_sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

/* x * sigmoid(x), with the limit 0 at -inf that the product itself (-inf * 0) misses. */
static inline float epmoei_silu(float x) { return x == -INFINITY ? 0.0f : x * epmoei_sigmoid(x); }

static inline float epmoei_activate(epmoe_activation_t activation, float gate, float up, float alpha, float limit)
{
    if (activation == EPMOE_ACTIVATION_SWIGLU_OAI) {
        /* Written so that a NaN stays one: fminf would drop it. */
        gate = gate > limit ? limit : gate;
        up = up > limit ? limit : up < -limit ? -limit : up;
        float scaled = gate == -INFINITY ? 0.0f : gate * epmoei_sigmoid(alpha * gate);
        return scaled * (up + 1.0f);
    }
    if (limit > 0.0f) {
        gate = gate > limit ? limit : gate;
        up = up > limit ? limit : up < -limit ? -limit : up;
    }
    switch (activation) {
    case EPMOE_ACTIVATION_GELU:
        return (gate == -INFINITY ? 0.0f : 0.5f * gate * (1.0f + erff(gate * 0.70710678f))) * up;
    case EPMOE_ACTIVATION_GELU_TANH: {
        if (gate == -INFINITY) return 0.0f * up;
        float inner = 0.79788456f * (gate + 0.044715f * gate * gate * gate);
        return 0.5f * gate * (1.0f + tanhf(inner)) * up;
    }
    default: return epmoei_silu(gate) * up;
    }
}

/* Fills the defaults of alpha and limit; INVALID_ARGUMENT for an unknown activation or a limit that is no number. */
epmoe_status_t epmoei_activation_check(epmoe_activation_t activation, bool allow_none, float *alpha, float *limit);

#endif
