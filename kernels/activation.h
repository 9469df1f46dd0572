/* The gated activations on two fp32 numbers; the definitions stand at epmoe_activation_t.
 *
 * Everything but exact GELU is free of branches and library calls, so that a loop over it vectorises; where the
 * compiler forms no FMAs, scalar and vector code give the same bits. A NaN operand gives a NaN. */
#ifndef EPMOEI_ACTIVATION_H
#define EPMOEI_ACTIVATION_H

#include "base/dtype.h"

#include <math.h>

/* condition ? a : b on the bits: GCC turns a chain of plain conditionals into branches, and then the loop around them
 * stays scalar. */
static inline float epmoei_select(bool condition, float a, float b)
{
    uint32_t mask = 0u - (uint32_t)condition;
    return epmoei_f32_from_bits((epmoei_f32_bits(a) & mask) | (epmoei_f32_bits(b) & ~mask));
}

/* x clamped to [lo, hi]; a NaN stays one, which fminf would drop. */
static inline float epmoei_clamp(float x, float lo, float hi)
{
    x = epmoei_select(x > hi, hi, x);
    return epmoei_select(x < lo, lo, x);
}

/* 2^n for n in -126..127; the bits of anything else mean nothing. */
static inline float epmoei_exp2_int(int32_t n) { return epmoei_f32_from_bits(((uint32_t)n + 127u) << 23); }

/* e^x within 1.1 ulp over the whole range: subnormal results, 0 at -inf, inf from 88.73 on, NaN for NaN.
 * x = n ln2 + r with |r| <= ln2 / 2; e^r by its Taylor series, whose first term left out is below 0.1 ulp. */
static inline float epmoei_exp(float x)
{
    x = epmoei_clamp(x, -104.0f, 89.0f);
    /* Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits. */
    float shifted = x * 1.44269504f + 12582912.0f;
    int32_t n = (int32_t)(epmoei_f32_bits(shifted) - 0x4B400000u);
    float rounded = shifted - 12582912.0f;
    /* ln2 in two parts; the first has 9 bits, so that its product with n is exact. */
    float r = (x - rounded * 0.693359375f) + rounded * 2.12194440e-4f;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * (r * r) + r + 1.0f;
    /* In two factors, as n reaches -150 and 128. */
    int32_t half = n >> 1;
    return p * epmoei_exp2_int(half) * epmoei_exp2_int(n - half);
}

static inline float epmoei_sigmoid(float x) { return 1.0f / (1.0f + epmoei_exp(-x)); }

/* gate * fraction, with the limit 0 at gate = -inf that the product itself (-inf * 0) misses. */
static inline float epmoei_gate(float gate, float fraction)
{
    return epmoei_select(gate == -INFINITY, 0.0f, gate * fraction);
}

static inline float epmoei_silu(float x) { return epmoei_gate(x, epmoei_sigmoid(x)); }

/* Whether two columns of the product make one output. */
static inline bool epmoei_activation_is_gated(epmoe_activation_t activation)
{
    return activation < EPMOE_ACTIVATION_NONE;
}

/* alpha and limit as epmoei_activation_check leaves them; limit 0 = none. */
static inline float epmoei_activate(epmoe_activation_t activation, float gate, float up, float alpha, float limit)
{
    float bound = limit > 0.0f ? limit : INFINITY;
    gate = epmoei_select(gate > bound, bound, gate);
    up = epmoei_clamp(up, -bound, bound);
    switch (activation) {
    case EPMOE_ACTIVATION_GELU: return epmoei_gate(gate, 0.5f * erfcf(gate * -0.70710678f)) * up;
    case EPMOE_ACTIVATION_GELU_TANH:
        /* (1 + tanh(z)) / 2 = sigmoid(2 z), with z = sqrt(2/pi) * (gate + 0.044715 gate^3) */
        return epmoei_gate(gate, epmoei_sigmoid(1.5957691f * (gate + 0.044715f * gate * gate * gate))) * up;
    case EPMOE_ACTIVATION_SWIGLU_OAI: return epmoei_gate(gate, epmoei_sigmoid(alpha * gate)) * (up + 1.0f);
    default: return epmoei_silu(gate) * up;
    }
}

#ifdef __cplusplus
extern "C" {
#endif

/* Fills the defaults of alpha and limit; INVALID_ARGUMENT for an unknown activation, or an alpha or limit that is
 * negative or no number. alpha must be finite; limit infinity = none. */
epmoe_status_t epmoei_activation_check(epmoe_activation_t activation, bool allow_ungated, float *alpha, float *limit);

#ifdef __cplusplus
}
#endif

#endif
