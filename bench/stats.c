#include "bench/stats.h"

#include <math.h>
#include <stdlib.h>

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double stats_median(double *values, int32_t count)
{
    qsort(values, (size_t)count, sizeof *values, compare_doubles);
    return count % 2 ? values[count / 2] : 0.5 * (values[count / 2 - 1] + values[count / 2]);
}

double stats_tolerance(epmoe_dtype_t dtype) { return dtype == EPMOE_BF16 ? 1.6e-2 : dtype == EPMOE_F16 ? 2e-3 : 1e-5; }

int64_t stats_count_wrong(const double *out, const double *ref, int64_t n, double tolerance, double *worst)
{
    int64_t wrong = 0;
    double squares = 0;
    for (int64_t i = 0; i < n; i++) squares += ref[i] * ref[i];
    double rms = sqrt(squares / (double)n);
    for (int64_t i = 0; i < n; i++) {
        double difference = fabs(out[i] - ref[i]), scale = fabs(ref[i]) + rms;
        double error = difference == 0 ? 0 : difference / scale;
        if (isnan(error)) error = INFINITY;
        wrong += !(error <= tolerance);
        if (worst && error > *worst) *worst = error;
    }
    return wrong;
}

void stats_add_row(stats_squares_t *squares, const double *out, const double *ref, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        squares->error += (out[i] - ref[i]) * (out[i] - ref[i]);
        squares->ref += ref[i] * ref[i];
    }
}

bool stats_is_far(const stats_squares_t *squares, double most)
{
    return !(sqrt(squares->error) <= most * sqrt(squares->ref));
}

void stats_stages(const double *ends, double *times)
{
    for (int32_t s = 0; s < EPMOE_STAGE_COUNT; s++) {
        double before = 0;
        for (int32_t other = 0; other < EPMOE_STAGE_COUNT; other++) {
            bool earlier = ends[other] < ends[s] || (ends[other] == ends[s] && other < s);
            if (earlier && ends[other] > before) before = ends[other];
        }
        times[s] = ends[s] >= 0 ? ends[s] - before : 0;
    }
}

int32_t stats_base(const epmoe_transport_t *transports, const double *times, int32_t num)
{
    int32_t base = 0;
    for (int32_t i = 0; i < num; i++) {
        if (transports[i] == EPMOE_TRANSPORT_NCCL) return i;
        if (times[i] > times[base]) base = i;
    }
    return base;
}
