/* Rows inside one rank: packing them, and summing them at home. One signature for both backends.
 *
 * Contract of every implementation:
 *   memory      all pointers are the backend's; CUDA: x, y, shared and residual on 16 bytes, the rest carved
 *   sizes       any hidden >= 1; no rows and no tokens are no-ops with any pointers
 *   order       acc = 0, then += row for the token's slots in order, then shared, then residual, fp32; rounded once:
 *               the bits are the same on every backend and transport
 *   aliasing    y == residual; nothing else
 *   NaN         flows through, to its own token only
 *   CUDA        enqueues on the stream, nothing else
 */
#ifndef EPMOEI_EP_ROWS_H
#define EPMOEI_EP_ROWS_H

#include "base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* dst row i = src row index[i + (i < gap_at ? 0 : gap)], for i < num_rows. */
typedef struct epmoei_gather_rows_t {
    void *dst;
    const void *src;
    const int32_t *index;
    int64_t num_rows;
    int64_t gap_at, gap;
    int64_t row_bytes; /* even */
} epmoei_gather_rows_t;

/* y[t,:] = round(sum of the rows of token t + shared[t,:] + residual[t,:]) */
typedef struct epmoei_sum_rows_t {
    int32_t num_tokens;
    int32_t width; /* slots per token */
    int32_t hidden;
    epmoe_dtype_t row_dtype;    /* BF16 or F32 */
    epmoe_dtype_t dtype;        /* of residual and y */
    const int32_t *token_slots; /* [T,width], after the token's slots -1; NULL: token t has row t of `own` alone */
    int64_t first_own, num_own; /* these slots' rows lie in `own`, one after the other; all others in `others` */
    const void *own;
    const void *others;
    const float *shared;  /* [T,hidden] or NULL */
    const void *residual; /* [T,hidden] or NULL */
    void *y;              /* [T,hidden] */
} epmoei_sum_rows_t;

epmoe_status_t epmoei_gather_rows_cpu(const epmoei_gather_rows_t *args);
epmoe_status_t epmoei_sum_rows_cpu(const epmoei_sum_rows_t *args);

epmoe_status_t epmoei_gather_rows_sm80(const epmoei_gather_rows_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_sum_rows_sm80(const epmoei_sum_rows_t *args, epmoe_stream_t stream);
/* *dst = value, in a way that a graph can hold. */
epmoe_status_t epmoei_store_count_sm80(int32_t *dst, int32_t value, epmoe_stream_t stream);

/* By backend. */
epmoe_status_t epmoei_gather_rows(epmoe_backend_t backend, const epmoei_gather_rows_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_sum_rows(epmoe_backend_t backend, const epmoei_sum_rows_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_store_count(epmoe_backend_t backend, int32_t *dst, int32_t value, epmoe_stream_t stream);

#ifdef __cplusplus
}
#endif

#endif
