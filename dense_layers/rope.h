/* Rotary position embedding in place; the maths stand at epmoe_rope_args_t.
 *
 * Contract of every kernel:
 *   order       elementwise, fp32: a*c - b*s and b*c + a*s, each product rounded, then rounded to dtype once
 *   edges       any even rotary_dim up to any head_dim; k may be NULL; T = 0 is a no-op
 *   alignment   CPU: element; CUDA: 16 bytes at the bases, the positions as their dtype. Halves and strides of whole
 *               16 bytes are the fast way
 *   aliasing    q and k may be parts of one buffer that do not overlap
 *   padding     columns from rotary_dim on and what lies between heads and tokens are untouched
 *   positions   outside [0,P): an error on the CPU, nothing is written; on CUDA counted, and the token passes through;
 *               the table is never read outside
 *   NaN         flows through, to its own pair only
 */
#ifndef EPMOEI_ROPE_H
#define EPMOEI_ROPE_H

#include "dense_layers/dense_table.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Checks and normalises: after it every default of `out` is filled in; head counts without a buffer are 0. */
epmoe_status_t epmoei_rope_check(const epmoe_rope_args_t *args, epmoe_rope_args_t *out);

/* The least work: the rotated columns once in and out, a row of the table for each token. */
epmoei_floor_t epmoei_rope_floor(const epmoe_rope_args_t *args);

epmoe_status_t epmoei_rope_ref(const epmoe_rope_args_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_rope_cpu(const epmoe_rope_args_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_rope_sm80(const epmoe_rope_args_t *args, epmoe_stream_t stream);

#ifdef __cplusplus
}
#endif

#endif
