/* Gather of token rows into expert order, and the weighted way back; the maths stand at epmoe_permute_args_t and
 * epmoe_unpermute_args_t.
 *
 * Contract of every kernel, permute:
 *   order       none: a bit-exact copy of elements of 1, 2 or 4 bytes. A slot that sorted_ids names twice leaves its
 *               last position in inverse
 *   edges       any hidden >= 1; max_rows 0 is legal and still writes inverse; T = 0 is a no-op
 *   alignment   CPU: element; CUDA: x and y 16 bytes at their base, the indices 4
 *   aliasing    none
 *   padding     sorted id >= T*k: a row of zeros; rows p >= *num_rows are neither read nor written
 *   errors      CPU: *num_rows outside [0,max_rows] or a negative sorted id fails before anything is written; CUDA: the
 *               one is clamped, the other is a row of zeros, and each adds to the error word
 * unpermute:
 *   order       acc = 0, then acc += weight * y for j ascending, fp32; rounded once
 *   edges       a token without any slot gets zeros; T = 0 is a no-op
 *   alignment   CPU: element; CUDA: y and out 16 bytes at their base, inverse and weights 4
 *   padding     inverse -1: neither the row nor the weight is read
 *   NaN         flows through, to its own token only
 *   errors      CPU: an inverse outside [-1,max_rows) fails before anything is written; CUDA: it counts as -1 and adds
 *               to the error word
 */
#ifndef EPMOEI_PERMUTE_H
#define EPMOEI_PERMUTE_H

#include "kernels/kernel_table.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Check and normalise: after them every default of `out` is filled in. */
epmoe_status_t epmoei_permute_check(const epmoe_permute_args_t *args, epmoe_permute_args_t *out);
epmoe_status_t epmoei_unpermute_check(const epmoe_unpermute_args_t *args, epmoe_unpermute_args_t *out);

/* The least work: each row once in and once out, the indices once. */
epmoei_floor_t epmoei_permute_floor(const epmoe_permute_args_t *args);
epmoei_floor_t epmoei_unpermute_floor(const epmoe_unpermute_args_t *args);

epmoe_status_t epmoei_permute_ref(const epmoe_permute_args_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_permute_cpu(const epmoe_permute_args_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_permute_sm80(const epmoe_permute_args_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_unpermute_ref(const epmoe_unpermute_args_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_unpermute_cpu(const epmoe_unpermute_args_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_unpermute_sm80(const epmoe_unpermute_args_t *args, epmoe_stream_t stream);

/* Host memory only: checks what the indices hold. */
epmoe_status_t epmoei_permute_check_indices(const epmoe_permute_args_t *args);
epmoe_status_t epmoei_unpermute_check_indices(const epmoe_unpermute_args_t *args);
/* Writes inverse, if there is one. */
void epmoei_permute_invert(const epmoe_permute_args_t *args);

#ifdef __cplusplus
}
#endif

#endif
