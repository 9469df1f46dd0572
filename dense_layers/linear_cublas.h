/* Products of a decoder layer by cuBLASLt, where the process finds it: it is loaded at run time, so that the library
 * works without it. */
#ifndef EPMOEI_LINEAR_CUBLAS_H
#define EPMOEI_LINEAR_CUBLAS_H

#include "dense_layers/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a product on the current device may use; 0 where cuBLASLt is not there. */
int64_t epmoei_linear_cublas_workspace(void);

/* y = x w^T as in epmoei_linear, or per head as in epmoei_linear_heads. *done false: nothing was enqueued, since
 * cuBLASLt is not there, there is a bias, in front of which it would round, or it has no algorithm for the product. */
epmoe_status_t epmoei_linear_cublas(const epmoei_linear_run_t *run, const epmoei_linear_t *linear, int32_t rows,
                                    const void *x, epmoe_dtype_t y_dtype, void *y, bool *done);

#ifdef __cplusplus
}
#endif

#endif
