/* The largest value of a row. OpenMP's reduction by max will not do: with Clang it begins at -FLT_MAX, which a row of
 * nothing but -inf would then seem to hold. */
#ifndef EPMOEI_ROW_MAX_H
#define EPMOEI_ROW_MAX_H

#include <math.h>
#include <stdint.h>

/* -inf for n = 0; a NaN does not count. */
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

#endif
