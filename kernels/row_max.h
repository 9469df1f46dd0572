/* The largest value of a row, and the largest magnitude. */
#ifndef EPMOEI_ROW_MAX_H
#define EPMOEI_ROW_MAX_H

#include "base/fp8.h"

#include <math.h>
#include <stdint.h>

/* -inf for n = 0; a NaN does not count. OpenMP's reduction by max will not do: with Clang it begins at -FLT_MAX, which
 * a row of nothing but -inf would then seem to hold. */
static inline float epmoei_row_max(const float *values, int64_t n)
{
    enum { kLanes = 16 };
    float lanes[kLanes], top = -INFINITY;
    int64_t whole = n - n % kLanes;
    for (int lane = 0; lane < kLanes; lane++) lanes[lane] = -INFINITY;
    for (int64_t first = 0; first < whole; first += kLanes)
#pragma omp simd
        for (int lane = 0; lane < kLanes; lane++)
            lanes[lane] = values[first + lane] > lanes[lane] ? values[first + lane] : lanes[lane];
    for (int lane = 0; lane < kLanes; lane++) top = lanes[lane] > top ? lanes[lane] : top;
    for (int64_t i = whole; i < n; i++) top = values[i] > top ? values[i] : top;
    return top;
}

/* The amax of FP8 scales: as epmoei_amax over the row, from 0 on. */
static inline float epmoei_row_amax(const float *values, int64_t n)
{
    float amax = 0;
#pragma omp simd reduction(max : amax)
    for (int64_t i = 0; i < n; i++) {
        float magnitude = epmoei_amax(0, values[i]);
        amax = magnitude > amax ? magnitude : amax;
    }
    return amax;
}

#endif
