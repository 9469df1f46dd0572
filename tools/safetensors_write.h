/* Writing .safetensors files: all of a file or none of it. */
#ifndef EPMOE_TOOLS_SAFETENSORS_WRITE_H
#define EPMOE_TOOLS_SAFETENSORS_WRITE_H

#include "moe/safetensors.h"

typedef struct safetensors_output_t {
    const char *name;
    epmoe_dtype_t dtype;
    int32_t num_dims;
    int64_t shape[EPMOEI_MAX_DIMS];
    const void *data;
} safetensors_output_t;

/* Writes beside `path` and renames, so that `path` is never seen half written. Wider types come first in the file, so
 * that every tensor is aligned to its type; otherwise the order is the given one. INVALID_ARGUMENT when no file can be
 * made there, or a tensor has no name or dtype; IO when it cannot be written. */
epmoe_status_t safetensors_write(const char *path, const safetensors_output_t *tensors, int32_t count);

#endif
