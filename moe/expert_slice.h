/* The slice of an expert that one rank of a tensor-parallel group holds: of its intermediate width f, part `rank` of
 * `size` equal ones. Gate and up are cut each by itself, however the two are stored together; down is cut along its
 * columns. */
#ifndef EPMOEI_EXPERT_SLICE_H
#define EPMOEI_EXPERT_SLICE_H

#include "moe/checkpoint.h"

/* Whether f has such parts; names the field `what`. */
epmoe_status_t epmoei_check_slice(int32_t rank, int32_t size);
epmoe_status_t epmoei_slice_width(const char *what, int32_t size, int32_t *width);
/* In place: only views change. The down bias is rank 0's: of others it is zeros, so that the ranks' sum has it once.
 * NOT_SUPPORTED, for every rank, when the storage of a quantised matrix cannot be cut somewhere; `name` is the
 * expert's, for messages. */
epmoe_status_t epmoei_slice_expert(epmoei_expert_source_t *expert, int32_t rank, int32_t size, const char *name);

#endif
