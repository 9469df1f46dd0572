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

/* MLA: q [T,H,latent+rope] = absorbed [T,H,latent] and behind it q_rope [T,H,rope] rounded to dtype, BF16 or F16; the
 * rope columns of key [T,latent+rope] = those of key_rows [T,latent+rope] rounded, its others stay. Every address is
 * aligned to 16 bytes. */
typedef struct epmoei_join_args_t {
    epmoe_dtype_t dtype;
    int32_t num_tokens;
    int32_t num_heads;
    int32_t latent;
    int32_t rope;
    const void *absorbed;
    const float *q_rope;
    const float *key_rows;
    void *q;
    void *key;
} epmoei_join_args_t;
epmoe_status_t epmoei_join_rotated_sm80(const epmoei_join_args_t *args, epmoe_stream_t stream);

#ifdef __cplusplus
}
#endif

#endif
