/* Attention over a paged cache, prefill and decode in one op; the maths and the layouts stand at
 * epmoe_attention_args_t.
 *
 * Contract of every kernel:
 *   order       scores fp32; the softmax may be online, over blocks of keys in ascending order that begin at fixed
 *               positions; on the CPU a row's bits do not depend on which other rows are in the call, on CUDA on
 *               their number alone. There weights are rounded to 16 bits before they meet the values (not in F32)
 *   edges       any sizes in range, no divisibility but that of heads and of V1's x; sequences without queries, without
 *               tokens, one token, window 1; T = 0 is a no-op
 *   alignment   CPU: element; CUDA: 16 bytes at the bases of tensors and workspace, 4 at the others. Rows (NHD, HND)
 *               and strides of whole 16 bytes in 16-bit dtypes are the fast way
 *   aliasing    none; key_cache == value_cache only as value_cache NULL
 *   padding     what no query of the call sees is not used: block table entries, slots, rows of q and o from
 *               query_start[B] on
 *   NaN         stays in the rows that see it: a NaN of q in its row, of a key or value in the rows of its cache head
 *               whose window holds it. Scores of -inf weigh 0; nothing but those: zeros
 */
#ifndef EPMOEI_ATTENTION_H
#define EPMOEI_ATTENTION_H

#include "dense_layers/dense_table.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Checks and normalises: after it every default of `out` is filled in. */
epmoe_status_t epmoei_attention_check(const epmoe_attention_args_t *args, epmoe_attention_args_t *out);
/* Host memory only: the scales, the lengths and the blocks that will be read. */
epmoe_status_t epmoei_attention_check_data(const epmoe_attention_args_t *args);

/* The least work: q and o once, each cached token that some query sees once per cache head. Host memory only. */
epmoei_floor_t epmoei_attention_floor(const epmoe_attention_args_t *args);

epmoe_status_t epmoei_attention_ref(const epmoe_attention_args_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_attention_cpu(const epmoe_attention_args_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_attention_sm80(const epmoe_attention_args_t *args, epmoe_stream_t stream);

/* The keys [first,end) that the query at position `position` sees. */
typedef struct epmoei_key_range_t {
    int32_t first;
    int32_t end;
} epmoei_key_range_t;
static inline epmoei_key_range_t epmoei_visible_keys(const epmoe_attention_args_t *args, int32_t position)
{
    int32_t first = args->window > 0 && position >= args->window ? position - args->window + 1 : 0;
    return (epmoei_key_range_t){first, position + 1};
}

/* The position of query row `token` of sequence `seq`; not below 0 but in a sequence of length 0. */
static inline int32_t epmoei_query_position(const epmoe_attention_args_t *args, int32_t seq, int32_t token)
{
    return args->seq_lens[seq] - (args->query_start[seq + 1] - token);
}

#ifdef __cplusplus
}
#endif

#endif
