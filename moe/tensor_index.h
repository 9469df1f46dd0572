/* Tensors by name. Sorted rather than hashed: a hostile file cannot make it slow, and everything below one prefix
 * (a layer, its experts) is one run of neighbours. */
#ifndef EPMOEI_TENSOR_INDEX_H
#define EPMOEI_TENSOR_INDEX_H

#include "moe/safetensors.h"

typedef struct epmoei_tensor_index_t {
    const epmoei_tensor_t **tensors; /* owned; the tensors are not */
    int64_t count;
} epmoei_tensor_index_t;

void epmoei_tensor_index_sort(epmoei_tensor_index_t *index);
/* NULL when there is none. */
const epmoei_tensor_t *epmoei_tensor_index_find(const epmoei_tensor_index_t *index, const char *name);
/* Whether a tensor's name starts with `prefix`. */
bool epmoei_tensor_index_has_prefix(const epmoei_tensor_index_t *index, const char *prefix);

/* "[2,3]" for messages. */
#define EPMOEI_SHAPE_TEXT 192
const char *epmoei_shape_text(char text[EPMOEI_SHAPE_TEXT], int32_t num_dims, const int64_t *shape);

#endif
