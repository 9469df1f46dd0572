/* RMSNorm of each q and k head, then rotary position embedding, in place; the maths stand at
 * epmoe_qk_norm_rope_args_t.
 *
 * Contract of every kernel:
 *   order       r as that of rms_norm.h, over the head_dim columns; (x * r) * w; then as epmoe_rope
 *   rounding    once, to dtype, at the end
 *   edges       any head_dim, any even rotary_dim up to it; T = 0 is a no-op
 *   alignment   CPU: element; CUDA: 16 bytes at the bases, the positions as their dtype. Strides, rotary halves and
 *               halves of a head of whole 16 bytes, and heads up to 1 KiB, are the fast way
 *   padding     the v heads and what lies between tokens are untouched
 *   positions   outside [0,P): an error on the CPU, nothing is written; on CUDA counted, and the token is left as it
 *               is, not normalised either
 *   NaN         spreads over its head
 */
#ifndef EPMOEI_QK_NORM_ROPE_H
#define EPMOEI_QK_NORM_ROPE_H

#include "dense_layers/dense_table.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Checks and normalises: after it every default of `out` is filled in. */
epmoe_status_t epmoei_qk_norm_rope_check(const epmoe_qk_norm_rope_args_t *args, epmoe_qk_norm_rope_args_t *out);

/* The least work: the q and k heads once in and out, a row of the table for each token. */
epmoei_floor_t epmoei_qk_norm_rope_floor(const epmoe_qk_norm_rope_args_t *args);

epmoe_status_t epmoei_qk_norm_rope_ref(const epmoe_qk_norm_rope_args_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_qk_norm_rope_cpu(const epmoe_qk_norm_rope_args_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_qk_norm_rope_sm80(const epmoe_qk_norm_rope_args_t *args, epmoe_stream_t stream);

#ifdef __cplusplus
}
#endif

#endif
