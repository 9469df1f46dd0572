/* Weighted sum of the k slot rows of each token; the maths stand at epmoe_sum_args_t.
 *
 * Contract of every kernel:
 *   order       acc = 0, then acc += weight * y for j ascending, then the addend, then the residual, fp32; rounded once
 *   edges       any hidden >= 1, any k >= 1; a token without any slot gets addend + residual, or zeros; T = 0 is a
 *               no-op
 *   alignment   CPU: element; CUDA: y, out, addend and residual 16 bytes at their base, the rest 4
 *   aliasing    out == residual; nothing else
 *   padding     ids -1: neither the row nor the weight is read;
 *               rows from *num_tokens_dev on are neither read nor written
 *   NaN         flows through, to its own token only
 *   errors      CPU: an id below -1 fails before anything is written (the op does not know E); CUDA: it counts as -1
 *               and adds to the error word
 */
#ifndef EPMOEI_SUM_H
#define EPMOEI_SUM_H

#include "kernels/kernel_table.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Checks and normalises: after it every default of `out` is filled in. */
epmoe_status_t epmoei_sum_check(const epmoe_sum_args_t *args, epmoe_sum_args_t *out);

/* The least work: every slot row once, out and the residual once. */
epmoei_floor_t epmoei_sum_floor(const epmoe_sum_args_t *args);

epmoe_status_t epmoei_sum_ref(const epmoe_sum_args_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_sum_cpu(const epmoe_sum_args_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_sum_sm80(const epmoe_sum_args_t *args, epmoe_stream_t stream);

/* epmoe_sum of the slots of `num_experts` experts whose ids an align has seen before: on CUDA an id outside
 * [-1,num_experts) counts as -1, as it did there, and is not reported a second time. */
epmoe_status_t epmoei_sum_aligned(const epmoe_sum_args_t *args, int32_t num_experts, epmoe_stream_t stream);
epmoe_status_t epmoei_sum_aligned_sm80(const epmoe_sum_args_t *args, int32_t num_experts, epmoe_stream_t stream);

/* Host memory only: checks what the first rows of ids hold. */
epmoe_status_t epmoei_sum_check_ids(const epmoe_sum_args_t *args, int32_t num_tokens);

#ifdef __cplusplus
}
#endif

#endif
