/* Reading .safetensors files: the header is checked whole before any tensor is handed out; data is mapped, never copied
 * here. Format: 8 bytes little-endian header length, JSON {name: {dtype, shape, data_offsets}}, data. */
#ifndef EPMOEI_SAFETENSORS_H
#define EPMOEI_SAFETENSORS_H

#include "base/base.h"

#define EPMOEI_MAX_DIMS 8

typedef struct epmoei_tensor_t {
    const char *name;
    epmoe_dtype_t dtype;    /* DTYPE_NONE for a type the library does not compute with (BOOL, F64, ...) */
    const char *dtype_name; /* as the file spells it */
    int32_t num_dims;
    int64_t shape[EPMOEI_MAX_DIMS];
    int64_t num_elements;
    int64_t bytes;
    const void *data; /* in the mapping; aligned to nothing in particular */
    const char *path; /* of its file */
} epmoei_tensor_t;

typedef struct epmoei_safetensors epmoei_safetensors_t;

/* Opens, checks and maps a file, which must not shrink until close. IO or FORMAT, naming the file and the tensor. A
 * header of more than 100 MB is refused. */
epmoe_status_t epmoei_safetensors_open(const char *path, epmoei_safetensors_t **file);
void epmoei_safetensors_close(epmoei_safetensors_t *file); /* NULL is legal */
int64_t epmoei_safetensors_count(const epmoei_safetensors_t *file);
/* In the order of the header. Valid until close. */
const epmoei_tensor_t *epmoei_safetensors_at(const epmoei_safetensors_t *file, int64_t i);
/* NULL when there is none. */
const epmoei_tensor_t *epmoei_safetensors_find(const epmoei_safetensors_t *file, const char *name);
const char *epmoei_safetensors_path(const epmoei_safetensors_t *file);

#endif
