/* What the attention half of a decoder layer does on a device besides the dense ops; only enqueues. */
#ifndef EPMOEI_SELF_ATTENTION_CUDA_H
#define EPMOEI_SELF_ATTENTION_CUDA_H

#include "dense_layers/paged_batch.h"

#ifdef __cplusplus
extern "C" {
#endif

/* epmoei_paged_batch_fill where the batch's arrays lie in device memory. Nothing is checked: a token whose block does
 * not exist, or that lies in front of its sequence, gets a slot that cache_write counts as a bad one. */
epmoe_status_t epmoei_paged_batch_fill_sm80(const epmoei_paged_batch_t *batch, epmoe_stream_t stream);

/* Row r of head h is slot r * heads + h: offsets [heads+1], index [heads*rows]. */
epmoe_status_t epmoei_head_rows_fill_sm80(int32_t heads, int32_t rows, int32_t *offsets, int32_t *index,
                                          epmoe_stream_t stream);

/* to [rows,left+right] of 16-bit elements: the rows of a [rows,left], and behind them those of b [rows,right]. */
epmoe_status_t epmoei_join_columns_sm80(void *to, const void *a, int32_t left, const void *b, int32_t right,
                                        int64_t rows, epmoe_stream_t stream);

#ifdef __cplusplus
}
#endif

#endif
