/* Cases of the grouped GEMM on 4-bit weights, judged against the reference on the same weights as fp32: to the order of
 * the sum with what the kernel makes of a weight (bf16 on wgmma), and in the norm with what the format says. */
#ifndef EPMOE_GEMM_W4_CASE_H
#define EPMOE_GEMM_W4_CASE_H

#include "tests/checkcuda/check.h"

typedef enum w4_route_t { ROUTE_UNIFORM, ROUTE_ONE_EXPERT, ROUTE_FEW_EXPERTS, ROUTE_COUNT } w4_route_t;

typedef struct w4_shape_t {
    int32_t tokens, top_k, experts, n, k, group;
    epmoe_format_t format;
    epmoe_dtype_t scales_dtype, dtype, y_dtype;
    epmoe_activation_t activation;
    w4_route_t route;
    bool zeros, order, bias, row_weights, weight_on_input, indexed, x_sorted, y_sorted;
    bool dense; /* without offsets */
    float limit;
    const uint8_t *codes; /* MXFP4: what scales are drawn from; NULL = some below 1 */
    int32_t num_codes;
    const float *scales; /* W4: the same */
    int32_t num_scales;
    float x_size; /* 0 = 1 */
} w4_shape_t;

/* What of a format a case has. */
typedef struct w4_kind_t {
    epmoe_format_t format;
    int32_t group; /* 0 = one */
    epmoe_dtype_t scales_dtype;
    bool zeros, order;
} w4_kind_t;
enum { kW4Kinds = 12 };
extern const w4_kind_t w4_kinds[kW4Kinds];
void w4_take_kind(w4_shape_t *shape, const w4_kind_t *kind);

/* Weights, rows and arguments of a case; w4_free also frees what the reference computes with, of which there is one at
 * a time. */
void w4_make(check_case_t *c, testing_rng_t *rng, const w4_shape_t *shape);
void w4_free(check_case_t *c);
/* About one slot in nine goes nowhere, with an index there is padding between. */
void w4_fill_rows(testing_rng_t *rng, check_case_t *c, const w4_shape_t *shape, int32_t max_rows);
/* Makes it, runs it, judges it. */
void w4_run(testing_rng_t *rng, const w4_shape_t *shape);

#endif
