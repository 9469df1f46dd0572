/* A projection of a decoder layer: y = x w^T + bias on rows that lie side by side, or the same with a matrix per head.
 * On the CPU it is the grouped GEMM of kernels/, whose many-row path is BLAS; on CUDA cuBLASLt, or where that is not
 * there the grouped GEMM again. */
#ifndef EPMOEI_LINEAR_H
#define EPMOEI_LINEAR_H

#include "base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct epmoei_linear_t {
    int32_t n;
    int32_t k;
    int32_t heads; /* matrices: 1, or one per head */
    epmoe_format_t format;
    const void *weight; /* [heads,n,k] */
    const float *bias;  /* [n] or NULL; with one matrix alone */
} epmoei_linear_t;

/* How a call runs. */
typedef struct epmoei_linear_run_t {
    epmoe_backend_t backend;
    epmoe_stream_t stream;
    epmoe_dtype_t dtype; /* of x and, but for logits, y */
    void *workspace;
    int64_t workspace_bytes;
    /* With a matrix per head: scratch of heads + 1 and heads * rows entries. */
    int32_t *head_offsets;
    int32_t *head_rows;
} epmoei_linear_run_t;

/* The workspace of `rows` rows of x per matrix; `linear` needs n, k and heads. */
epmoe_status_t epmoei_linear_workspace(const epmoei_linear_t *linear, epmoe_backend_t backend, epmoe_dtype_t dtype,
                                       int32_t rows, int64_t *bytes);

/* x [rows,k], y [rows,n] of y_dtype. */
epmoe_status_t epmoei_linear(const epmoei_linear_run_t *run, const epmoei_linear_t *linear, int32_t rows, const void *x,
                             epmoe_dtype_t y_dtype, void *y);
/* x [rows,heads,k], y [rows,heads,n]: y[t,h] = weight[h] x[t,h]. */
epmoe_status_t epmoei_linear_heads(const epmoei_linear_run_t *run, const epmoei_linear_t *linear, int32_t rows,
                                   const void *x, void *y);

#ifdef __cplusplus
}
#endif

#endif
