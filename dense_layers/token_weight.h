/* Probabilities of tokens as fixed-point numbers: integer sums are exact, so they do not depend on order, blocking or
 * the number of threads, and every kernel draws the same token. EPMOE_MAX_VOCAB of them stay below 2^63. */
#ifndef EPMOEI_TOKEN_WEIGHT_H
#define EPMOEI_TOKEN_WEIGHT_H

#include "kernels/activation.h"

#include <float.h>

#define EPMOEI_TOKEN_ONE 0x1p40f

/* NaN counts as -inf, +inf as the largest finite number, -0 as 0. */
static inline float epmoei_tame_logit(float logit)
{
    logit = epmoei_select(logit == logit, logit, -INFINITY);
    return epmoei_select(logit > FLT_MAX, FLT_MAX, logit) + 0.0f;
}

/* `top` is the largest logit, above -inf; temperature above 0. Without FMAs in any form, so that all have these bits.
 */
static inline int64_t epmoei_logit_weight(float logit, float top, float temperature)
{
    return (int64_t)(epmoei_exp((logit - top) / temperature) * EPMOEI_TOKEN_ONE);
}

/* A probability as it counts in a draw. */
static inline float epmoei_tame_probability(float p)
{
    p = epmoei_select(p > 0.0f, p, 0.0f);
    return epmoei_select(p > 1.0f, 1.0f, p);
}

/* What a token counts where `taken` of its probability p is to be left out. */
static inline int64_t epmoei_probability_weight(float p, float taken)
{
    float rest = epmoei_tame_probability(p) - epmoei_tame_probability(taken);
    return (int64_t)(epmoei_select(rest > 0.0f, rest, 0.0f) * EPMOEI_TOKEN_ONE);
}

/* The smallest whole number from `fraction` (in [0,1]) of `total` on, at least 1. */
static inline int64_t epmoei_share_up(float fraction, int64_t total)
{
    double share = ceil((double)fraction * (double)total);
    return share < 1 ? 1 : share > (double)total ? total : (int64_t)share;
}

/* The token drawn is the first whose running sum exceeds this; total above 0, uniform in [0,1]. */
static inline int64_t epmoei_draw_target(float uniform, int64_t total)
{
    int64_t target = (int64_t)((double)uniform * (double)total);
    return target < total ? target : total - 1;
}

#endif
