#include "moe/tensor_index.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int by_name(const void *a, const void *b)
{
    return strcmp((*(const epmoei_tensor_t *const *)a)->name, (*(const epmoei_tensor_t *const *)b)->name);
}

void epmoei_tensor_index_sort(epmoei_tensor_index_t *index)
{
    if (index->count > 1) qsort(index->tensors, (size_t)index->count, sizeof *index->tensors, by_name);
}

/* The first tensor whose name is not below `name`. */
static int64_t lower_bound(const epmoei_tensor_index_t *index, const char *name)
{
    int64_t low = 0, high = index->count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (strcmp(index->tensors[middle]->name, name) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

const epmoei_tensor_t *epmoei_tensor_index_find(const epmoei_tensor_index_t *index, const char *name)
{
    int64_t i = lower_bound(index, name);
    return i < index->count && !strcmp(index->tensors[i]->name, name) ? index->tensors[i] : NULL;
}

bool epmoei_tensor_index_has_prefix(const epmoei_tensor_index_t *index, const char *prefix)
{
    int64_t i = lower_bound(index, prefix);
    return i < index->count && !strncmp(index->tensors[i]->name, prefix, strlen(prefix));
}

const char *epmoei_shape_text(char text[EPMOEI_SHAPE_TEXT], int32_t num_dims, const int64_t *shape)
{
    int used = snprintf(text, EPMOEI_SHAPE_TEXT, "[");
    for (int32_t i = 0; i < num_dims; i++)
        used += snprintf(text + used, EPMOEI_SHAPE_TEXT - (size_t)used, "%s%lld", i ? "," : "", (long long)shape[i]);
    snprintf(text + used, EPMOEI_SHAPE_TEXT - (size_t)used, "]");
    return text;
}
