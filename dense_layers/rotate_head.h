/* The loops of the CPU kernels over one head: rotation in place, and on demand the normalisation before it. */
#ifndef EPMOEI_ROTATE_HEAD_H
#define EPMOEI_ROTATE_HEAD_H

#include "base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a head's values are multiplied by before they are rotated: (value * r) * (weight + offset). */
typedef struct epmoei_head_norm_t {
    const void *weight; /* [head_dim] */
    epmoe_dtype_t weight_dtype;
    float offset;
    float r;
} epmoei_head_norm_t;

typedef struct epmoei_head_shape_t {
    int32_t head_dim;
    int32_t rotary_dim;
    epmoe_rope_style_t style;
    epmoe_dtype_t dtype;
} epmoei_head_shape_t;

/* head [head_dim] in place; cos_sin the token's row of the table; sin is multiplied by `direction`, 1 or -1. norm NULL:
 * values as they are, and columns from rotary_dim on are untouched. */
void epmoei_rotate_head(const epmoei_head_shape_t *shape, void *head, const float *cos_sin, float direction,
                        const epmoei_head_norm_t *norm);

#ifdef __cplusplus
}
#endif

#endif
