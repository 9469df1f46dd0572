/* Verification of drafted tokens for speculative decoding; the rules stand at epmoe_spec_verify_args_t.
 *
 * Contract of every kernel:
 *   order       accept tests exact (a product of two floats in double); the draw by epmoei_probability_weight, all sums
 *               in 64-bit integers: the same tokens from every kernel
 *   edges       G = 0 draws a token from target_probs[0]; B = 0 is a no-op
 *   alignment   CPU: element; CUDA: 16 bytes for probabilities, 4 for the others
 *   ids         outside [-1,V) in front of the first -1: an error on the CPU; on CUDA counted, and as -1
 *   aliasing    none
 *   padding     probabilities behind the place where a row ends are not read
 *   NaN         rejects in an accept test, counts as 0 in a draw
 */
#ifndef EPMOEI_SPEC_VERIFY_H
#define EPMOEI_SPEC_VERIFY_H

#include "dense_layers/dense_table.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Checks and normalises. */
epmoe_status_t epmoei_spec_verify_check(const epmoe_spec_verify_args_t *args, epmoe_spec_verify_args_t *out);
/* Host memory only: draft ids and uniform. */
epmoe_status_t epmoei_spec_verify_check_data(const epmoe_spec_verify_args_t *args);

/* The least work: one draw per row, of which `num_rejected` read two distributions. */
epmoei_floor_t epmoei_spec_verify_floor(const epmoe_spec_verify_args_t *args, int64_t num_rejected);

epmoe_status_t epmoei_spec_verify_ref(const epmoe_spec_verify_args_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_spec_verify_cpu(const epmoe_spec_verify_args_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_spec_verify_sm80(const epmoe_spec_verify_args_t *args, epmoe_stream_t stream);

/* The distributions at place g of a row, and q of its draft; draft NULL where there is none. */
static inline const float *epmoei_spec_target(const epmoe_spec_verify_args_t *args, int64_t row, int64_t g)
{
    return args->target_probs + (row * (args->num_drafts + 1) + g) * args->vocab_size;
}
static inline const float *epmoei_spec_draft(const epmoe_spec_verify_args_t *args, int64_t row, int64_t g)
{
    return args->draft_probs ? args->draft_probs + (row * args->num_drafts + g) * args->vocab_size : NULL;
}

/* The accept tests of a row: how many drafts stand. *rejected: whether the next one was turned down. */
static inline int32_t epmoei_spec_accept(const epmoe_spec_verify_args_t *args, int64_t row, bool *rejected)
{
    const int32_t *ids = args->num_drafts ? args->draft_ids + row * args->num_drafts : NULL;
    const float *uniform = args->uniform + row * (args->num_drafts + 1);
    *rejected = false;
    for (int32_t g = 0; g < args->num_drafts; g++) {
        if (ids[g] < 0) return g;
        const float *draft = epmoei_spec_draft(args, row, g);
        double q = draft ? (double)draft[ids[g]] : 1.0, p = (double)epmoei_spec_target(args, row, g)[ids[g]];
        if ((double)uniform[g] * q < p) continue;
        *rejected = true;
        return g;
    }
    return args->num_drafts;
}

#ifdef __cplusplus
}
#endif

#endif
