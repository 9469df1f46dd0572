/* The weighted sum of rows behind sum and unpermute on CUDA. */
#ifndef EPMOEI_ROW_SUM_CUDA_H
#define EPMOEI_ROW_SUM_CUDA_H

#include "base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* out[t,:] = sum over j ascending of weights[t,j] * y[row(t*k+j),:], + addend[t,:] + residual[t,:]; optional pointers
 * may be NULL. select[s] says of slot s: -1 unused; otherwise used, and with `gather` it is the row, which is s
 * itself without. Values outside [-1,bound) count as -1 and add to the error word. */
typedef struct epmoei_row_sum_t {
    const void *y;
    const int32_t *select;
    const float *weights;
    const float *addend;
    const void *residual;
    void *out;
    const int32_t *num_tokens_dev;
    int32_t *error_word;
    int32_t gather;
    int32_t bound;
    int32_t num_tokens;
    int32_t top_k;
    int32_t hidden;
    epmoe_dtype_t y_dtype;
    epmoe_dtype_t out_dtype; /* of residual too */
} epmoei_row_sum_t;

/* By whichever kernel of the tier suits; all of them give the same bits. */
epmoe_status_t epmoei_row_sum(const epmoei_row_sum_t *sum, const char *op, epmoe_stream_t stream);

epmoe_status_t epmoei_row_sum_sm80(const epmoei_row_sum_t *sum, const char *op, epmoe_stream_t stream);
epmoe_status_t epmoei_row_sum_sm90(const epmoei_row_sum_t *sum, const char *op, epmoe_stream_t stream);
bool epmoei_row_sum_fits_sm90(const epmoei_row_sum_t *sum);

#ifdef __cplusplus
}
#endif

#endif
