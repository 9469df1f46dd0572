/* What is said of times and of errors. */
#ifndef EPMOE_BENCH_STATS_H
#define EPMOE_BENCH_STATS_H

#include "base/base.h"

/* Sorts values [count >= 1] and returns their median. */
double stats_median(double *values, int32_t count);

/* What error, relative to |ref| plus the rms of the ref row, an output of this dtype may have. */
double stats_tolerance(epmoe_dtype_t dtype);

/* How many of a row's n values are wrong: |out-ref| > tolerance * (|ref| + rms of ref). A NaN is wrong and its error
 * infinite. The largest error goes to *worst if it is larger; worst NULL = not wanted. */
int64_t stats_count_wrong(const double *out, const double *ref, int64_t n, double tolerance, double *worst);

/* Squares of many rows: of out - ref, and of ref. */
typedef struct stats_squares_t {
    double error, ref;
} stats_squares_t;
void stats_add_row(stats_squares_t *squares, const double *out, const double *ref, int64_t n);
/* Whether the error's norm is more than `most` of the reference's. A NaN is. */
bool stats_is_far(const stats_squares_t *squares, double most);

/* The one of `num` transports that the others' times are held against: nccl, or where it is not there the slowest, the
 * first of equals. */
int32_t stats_base(const epmoe_transport_t *transports, const double *times, int32_t num);

/* How long each stage took, from when it ended [EPMOE_STAGE_COUNT] after the run began. Stages follow one another in
 * the order of their ends, whatever that is; one that did not run has a negative end and takes 0. */
void stats_stages(const double *ends, double *times);

#endif
