/* The sum of squares under every root mean square. Squares of fp32 values are exact in double and no finite row
 * overflows it. Element i of a row goes to lane i mod 8, ascending, and the lanes are added in a fixed tree, so that
 * every kernel and every block size gives the same bits. */
#ifndef EPMOEI_SQUARE_SUM_H
#define EPMOEI_SQUARE_SUM_H

#include "base/base.h"

#include <math.h>

#define EPMOEI_SQUARE_LANES 8

typedef struct epmoei_square_sum_t {
    double lanes[EPMOEI_SQUARE_LANES]; /* start as zeros */
} epmoei_square_sum_t;

/* Adds the next n values of the row; every call but the last takes a multiple of 8. */
static inline void epmoei_square_sum_add(epmoei_square_sum_t *sum, const float *values, int64_t n)
{
    int64_t i = 0;
    for (; i + EPMOEI_SQUARE_LANES <= n; i += EPMOEI_SQUARE_LANES)
        for (int32_t lane = 0; lane < EPMOEI_SQUARE_LANES; lane++)
            sum->lanes[lane] += (double)values[i + lane] * (double)values[i + lane];
    for (int32_t lane = 0; i + lane < n; lane++)
        sum->lanes[lane] += (double)values[i + lane] * (double)values[i + lane];
}

/* 1 / sqrt(mean + eps) over a row of n values, rounded to fp32 once. */
static inline float epmoei_square_sum_rsqrt(const epmoei_square_sum_t *sum, int64_t n, float eps)
{
    const double *l = sum->lanes;
    double total = ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]));
    return (float)(1 / sqrt(total / (double)n + (double)eps));
}

#endif
