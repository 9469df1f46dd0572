/* Stable counting sort of routing slots by expert with padding; the layout stands at epmoe_align_args_t.
 *
 * Contract of every kernel:
 *   order       experts ascend by their global id (also with expert_map), slots t*k + j ascend within one
 *   edges       T = 0 is a call like any other: num_post_padded 0, offsets 0, everything else filled; only then may
 *               every pointer be NULL. k and E need no divisibility
 *   alignment   element
 *   aliasing    none
 *   padding     sorted_ids T*k with the host's num_tokens (also with num_tokens_dev), expert_ids -1, both up to the
 *               worst case P; expert_offsets include each expert's own padding
 *   errors      CPU: an id outside [-1,E) or a map entry below -1 fails before anything is written; CUDA: both count
 *               as -1 and add to the error word
 */
#ifndef EPMOEI_ALIGN_H
#define EPMOEI_ALIGN_H

#include "kernels/kernel_table.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Checks and normalises: after it every default of `out` is filled in. */
epmoe_status_t epmoei_align_check(const epmoe_align_args_t *args, epmoe_align_args_t *out);

/* The least work: the ids once, every output once. */
epmoei_floor_t epmoei_align_floor(const epmoe_align_args_t *args);

epmoe_status_t epmoei_align_ref(const epmoe_align_args_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_align_sm80(const epmoe_align_args_t *args, epmoe_stream_t stream);
int64_t epmoei_align_workspace_ref(const epmoe_align_args_t *args);
int64_t epmoei_align_workspace_sm80(const epmoe_align_args_t *args);

#ifdef __cplusplus
}
#endif

#endif
