/* The sequences of a forward over a paged cache: where their new tokens stand and where their keys and values go. */
#ifndef EPMOEI_PAGED_BATCH_H
#define EPMOEI_PAGED_BATCH_H

#include "base/base.h"

typedef struct epmoei_paged_batch_t {
    int32_t num_tokens;         /* T */
    int32_t num_seqs;           /* B */
    const int32_t *query_start; /* [B+1] */
    const int32_t *seq_lens;    /* [B] */
    const int32_t *block_table; /* [B,M] */
    int32_t max_blocks;         /* M */
    int32_t num_blocks;
    int32_t block_size; /* S */
    void *key_cache;
    void *value_cache; /* NULL with MLA */
    const float *k_scale;
    const float *v_scale;
    int64_t *positions; /* out [T] */
    int64_t *slots;     /* out [T]: -1 in a sequence of length 0 */
} epmoei_paged_batch_t;

/* Host memory. Checks everything that the batch's own arrays say, then fills positions and slots. `num_positions`
 * bounds the lengths; blocks that only hold keys in front of every query's `window` (0 = none) are not looked at.
 * INVALID_ARGUMENT names the entry. */
epmoe_status_t epmoei_paged_batch_fill(const epmoei_paged_batch_t *batch, int32_t num_positions, int32_t window);

#endif
