/* Router: scores, grouped selection and top-k of each row of logits; the maths stand at epmoe_topk_args_t.
 *
 * Contract of every kernel:
 *   order       ids descend by selection value, equal values by ascending id; fp32 throughout. The selection value is
 *               the logit for SOFTMAX without a selection bias, score + bias otherwise, where TOPK_SOFTMAX and
 *               SPARSE_MIXER, which have no scores before the choice, take the logit as their score
 *   groups      the group score is taken over score + bias (SOFTMAX without a bias and MAX: over the logits, so that
 *               underflow cannot make ties; TOP2: over the scores); a group of one scores its one; equal groups: the
 *               lower one. Ids come from the kept groups only, even when their values are -inf
 *   softmax     over all E, not only over the kept groups
 *   edges       E 1..4096 and k 1..min(E,32), no divisibility; T = 0 is a no-op
 *   alignment   CPU: element; CUDA: logits and selection_bias 16 bytes at their base, rows at any stride; the rest 4
 *   aliasing    none
 *   NaN         a NaN logit counts as -inf, +inf as FLT_MAX, a NaN in the bias as -inf; a -inf stays -inf after the
 *               bias and its score is 0. All -inf: ids 0..k-1, weights 0
 *   mixer       the sum behind the j-th choice runs by ascending expert
 *   weights     j ascending: s / sum * scale, no epsilon; sum below 2^-126 gives 0; a product that overflows is
 *               +-FLT_MAX, so weights are always finite
 *   padding     rows from *num_tokens_dev on are neither read nor written
 */
#ifndef EPMOEI_TOPK_H
#define EPMOEI_TOPK_H

#include "kernels/kernel_table.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Checks and normalises: after it every default of `out` is filled in. */
epmoe_status_t epmoei_topk_check(const epmoe_topk_args_t *args, epmoe_topk_args_t *out);
/* The same without a look at the pointers. */
epmoe_status_t epmoei_topk_check_sizes(const epmoe_topk_args_t *args, epmoe_topk_args_t *out);

/* The least work: the logits once, ids and weights once. */
epmoei_floor_t epmoei_topk_floor(const epmoe_topk_args_t *args);

epmoe_status_t epmoei_topk_ref(const epmoe_topk_args_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_topk_cpu(const epmoe_topk_args_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_topk_sm80(const epmoe_topk_args_t *args, epmoe_stream_t stream);

/* One row of the reference in its three steps; the CPU kernel differs only in how it picks the ids between the second
 * and the third. */
typedef struct epmoei_topk_row_t {
    float logits[EPMOE_MAX_EXPERTS]; /* never NaN or +inf */
    float scores[EPMOE_MAX_EXPERTS]; /* finite; the logit itself for TOPK_SOFTMAX and SPARSE_MIXER */
    float values[EPMOE_MAX_EXPERTS]; /* what selects: never NaN or +inf */
    bool kept[EPMOE_MAX_EXPERTS];    /* per group */
} epmoei_topk_row_t;
void epmoei_topk_row_score(const epmoe_topk_args_t *args, int64_t token, epmoei_topk_row_t *row);
void epmoei_topk_row_keep_groups(const epmoe_topk_args_t *args, epmoei_topk_row_t *row);
void epmoei_topk_row_weigh(const epmoe_topk_args_t *args, const epmoei_topk_row_t *row, const int32_t *ids,
                           float *weights);

#ifdef __cplusplus
}
#endif

#endif
