/* The layer in double precision, from the weights' origin (the seed or the checkpoint's files) and never from the
 * library's copies. It follows the contract without its roundings, but for those to FP8, of activations and on the
 * wire: h stays double. */
#ifndef EPMOE_BENCH_REFERENCE_H
#define EPMOE_BENCH_REFERENCE_H

#include "base/base.h"
#include "moe/checkpoint.h"

/* Where the weights come from. */
typedef struct reference_t {
    const epmoe_layer_config_t *config;
    epmoe_dtype_t weight_dtype; /* what random weights are rounded to */
    bool rounds_checkpoint;     /* so are a checkpoint's: a backend that stores matrices in this type alone */
    uint64_t seed;
    const epmoe_checkpoint_t *checkpoint; /* NULL: random */
    int32_t layer;
    /* The products quantise their activations: then h is rounded too, since its codes depend on that. */
    bool fp8_experts;
    bool fp8_shared;
} reference_t;

/* The expert of that number in the functions below. */
#define REFERENCE_SHARED (-1)

/* bias [E]; zeros where the model has none. */
epmoe_status_t reference_selection_bias(const reference_t *reference, float *bias);

/* y [rows,n] = x [rows,k] weight^T + bias (no data = none), a weight [n,k] or bias [1,n] in host memory. */
epmoe_status_t reference_multiply(const reference_t *reference, const epmoei_view_t *weight, const epmoei_view_t *bias,
                                  const double *x, int32_t rows, double *y);

/* logits [rows,E] of x [rows,d]. */
epmoe_status_t reference_router(const reference_t *reference, const double *x, int32_t rows, double *logits);

/* y [rows,d] = weights[row] * expert(x [rows,d]); weights NULL = 1. Of the shared expert: times its gate, if any. */
epmoe_status_t reference_expert(const reference_t *reference, int32_t expert, const double *x, const double *weights,
                                int32_t rows, double *y);

#endif
