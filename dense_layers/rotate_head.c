#include "dense_layers/rotate_head.h"

#include "kernels/row_blocks.h"

#define PAIRS (EPMOEI_BLOCK_COLS / 2)

/* Pairs [first, first + n) of an array of rotary columns, as two runs. */
static void load_pairs(const epmoei_head_shape_t *shape, const void *from, epmoe_dtype_t dtype, int64_t first,
                       int64_t n, float *a, float *b)
{
    if (shape->style == EPMOE_ROPE_NEOX) {
        epmoei_to_f32(a, epmoei_at(from, dtype, first), dtype, n);
        epmoei_to_f32(b, epmoei_at(from, dtype, first + shape->rotary_dim / 2), dtype, n);
        return;
    }
    float both[2 * PAIRS];
    epmoei_to_f32(both, epmoei_at(from, dtype, 2 * first), dtype, 2 * n);
    for (int64_t i = 0; i < n; i++) {
        a[i] = both[2 * i];
        b[i] = both[2 * i + 1];
    }
}

static void store_pairs(const epmoei_head_shape_t *shape, void *to, int64_t first, int64_t n, const float *a,
                        const float *b)
{
    if (shape->style == EPMOE_ROPE_NEOX) {
        epmoei_from_f32(epmoei_at(to, shape->dtype, first), a, shape->dtype, n);
        epmoei_from_f32(epmoei_at(to, shape->dtype, first + shape->rotary_dim / 2), b, shape->dtype, n);
        return;
    }
    float both[2 * PAIRS];
    for (int64_t i = 0; i < n; i++) {
        both[2 * i] = a[i];
        both[2 * i + 1] = b[i];
    }
    epmoei_from_f32(epmoei_at(to, shape->dtype, 2 * first), both, shape->dtype, 2 * n);
}

static void scale_run(const epmoei_head_norm_t *norm, float *values, const float *weights, int64_t n)
{
    float r = norm->r, offset = norm->offset;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) values[i] = values[i] * r * (weights[i] + offset);
}

static void rotate_pairs(const epmoei_head_shape_t *shape, void *head, int64_t first, int64_t n, const float *cos_sin,
                         float direction, const epmoei_head_norm_t *norm)
{
    float a[PAIRS], b[PAIRS], c[PAIRS], s[PAIRS];
    load_pairs(shape, head, shape->dtype, first, n, a, b);
    if (norm) {
        load_pairs(shape, norm->weight, norm->weight_dtype, first, n, c, s);
        scale_run(norm, a, c, n);
        scale_run(norm, b, s, n);
    }
    epmoei_to_f32(c, cos_sin + first, EPMOE_F32, n);
    epmoei_to_f32(s, cos_sin + shape->rotary_dim / 2 + first, EPMOE_F32, n);
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        float x = a[i], y = b[i], sine = direction * s[i];
        a[i] = x * c[i] - y * sine;
        b[i] = y * c[i] + x * sine;
    }
    store_pairs(shape, head, first, n, a, b);
}

/* The columns that only the normalisation touches. */
static void scale_tail(const epmoei_head_shape_t *shape, void *head, const epmoei_head_norm_t *norm)
{
    float values[EPMOEI_BLOCK_COLS], weights[EPMOEI_BLOCK_COLS];
    for (int64_t i = shape->rotary_dim; i < shape->head_dim; i += EPMOEI_BLOCK_COLS) {
        int64_t n = epmoei_min64(EPMOEI_BLOCK_COLS, shape->head_dim - i);
        epmoei_to_f32(values, epmoei_at(head, shape->dtype, i), shape->dtype, n);
        epmoei_to_f32(weights, epmoei_at(norm->weight, norm->weight_dtype, i), norm->weight_dtype, n);
        scale_run(norm, values, weights, n);
        epmoei_from_f32(epmoei_at(head, shape->dtype, i), values, shape->dtype, n);
    }
}

void epmoei_rotate_head(const epmoei_head_shape_t *shape, void *head, const float *cos_sin, float direction,
                        const epmoei_head_norm_t *norm)
{
    int64_t half = shape->rotary_dim / 2;
    for (int64_t first = 0; first < half; first += PAIRS)
        rotate_pairs(shape, head, first, epmoei_min64(PAIRS, half - first), cos_sin, direction, norm);
    if (norm) scale_tail(shape, head, norm);
}
