/* One token per row of logits by temperature, top-k, top-p and min-p; the rules stand at epmoe_sample_args_t.
 *
 * Contract of every kernel:
 *   order       weights by epmoei_logit_weight, all sums in 64-bit integers: the same token from every kernel
 *   edges       any V in range; k = 1, k >= V; a row without a finite logit: -1; B = 0 is a no-op
 *   alignment   CPU: element; CUDA: 16 bytes for logits, 4 for the others. Strides of whole fours of logits and a top_k
 *               of up to 1024 are the fast way
 *   aliasing    none
 *   ties        the lower id comes first wherever tokens are counted
 *   NaN         counts as -inf
 */
#ifndef EPMOEI_SAMPLE_H
#define EPMOEI_SAMPLE_H

#include "dense_layers/dense_table.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Checks and normalises: after it every default of `out` is filled in. */
epmoe_status_t epmoei_sample_check(const epmoe_sample_args_t *args, epmoe_sample_args_t *out);
/* Host memory only: the rows' own settings and uniform. */
epmoe_status_t epmoei_sample_check_data(const epmoe_sample_args_t *args);

/* The least work: the logits once. */
epmoei_floor_t epmoei_sample_floor(const epmoe_sample_args_t *args);

epmoe_status_t epmoei_sample_ref(const epmoe_sample_args_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_sample_cpu(const epmoe_sample_args_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_sample_sm80(const epmoe_sample_args_t *args, epmoe_stream_t stream);

/* The settings of one row, with their defaults filled in. */
typedef struct epmoei_sample_rule_t {
    float temperature; /* 0 = greedy */
    int32_t top_k;     /* 1..V */
    float top_p;       /* (0,1] */
    float min_p;
} epmoei_sample_rule_t;
static inline epmoei_sample_rule_t epmoei_sample_rule(const epmoe_sample_args_t *args, int64_t row)
{
    epmoei_sample_rule_t rule = {
        .temperature = args->temperature_rows ? args->temperature_rows[row] : args->temperature,
        .top_k = args->top_k_rows ? args->top_k_rows[row] : args->top_k,
        .top_p = args->top_p_rows ? args->top_p_rows[row] : args->top_p,
        .min_p = args->min_p_rows ? args->min_p_rows[row] : args->min_p,
    };
    if (rule.top_k <= 0 || rule.top_k > args->vocab_size) rule.top_k = args->vocab_size;
    if (rule.top_p == 0.0f) rule.top_p = 1.0f;
    return rule;
}

#ifdef __cplusplus
}
#endif

#endif
