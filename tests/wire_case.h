/* Rows for the tests of comm/ep_wire.h, on the CPU and on a device. */
#ifndef EPMOE_WIRE_CASE_H
#define EPMOE_WIRE_CASE_H

#include "comm/ep_wire.h"
#include "tests/testing.h"

#include <math.h>
#include <stdlib.h>

typedef struct wire_case_t {
    int32_t hidden;
    epmoe_dtype_t dtype;
    int32_t sources; /* rows of x */
    int32_t rows;    /* that travel, with those of the gap */
    int32_t gap_at, gap;
    void *x;        /* [sources,hidden] */
    int32_t *index; /* [rows] */
} wire_case_t;

/* Widths around a scale's 128 columns, a lane's 16 and a vector's 8. */
static const int32_t wire_widths[] = {1, 7, 8, 16, 64, 100, 127, 128, 129, 136, 200, 300, 520, 1440, 2880, 7168};
enum { WIRE_WIDTHS = sizeof wire_widths / sizeof wire_widths[0] };

/* Normal values of any size with NaN, infinities, zeros and denormals among them; whole blocks of zeros too. */
static inline wire_case_t wire_case(testing_rng_t *rng, int32_t hidden, epmoe_dtype_t dtype)
{
    static const float specials[] = {NAN, INFINITY, -INFINITY, -0.0f, 1e-40f, 3e38f, 65504.0f, -448.0f};
    wire_case_t c = {.hidden = hidden, .dtype = dtype};
    c.sources = testing_range(rng, 1, 12), c.rows = testing_range(rng, 1, 20);
    c.gap_at = testing_range(rng, 0, c.rows), c.gap = testing_range(rng, 0, c.rows - c.gap_at);
    c.x = testing_buffer((int64_t)c.sources * hidden * epmoe_dtype_size(dtype), 0);
    c.index = testing_buffer(c.rows * 4, 0);
    for (int32_t r = 0; r < c.sources; r++) {
        float size = powf(10, testing_uniform(rng, -9, 5));
        bool special = testing_range(rng, 0, 2) == 0;
        for (int64_t i = 0; i < hidden; i++) {
            float value = size * testing_normal(rng);
            if (special && testing_range(rng, 0, 40) == 0) value = specials[testing_range(rng, 0, 7)];
            if (special && i / 128 % 3 == 1) value = 0;
            epmoei_store(c.x, dtype, r * (int64_t)hidden + i, value);
        }
    }
    for (int32_t i = 0; i < c.rows; i++) c.index[i] = testing_range(rng, 0, c.sources - 1);
    return c;
}

static inline void wire_case_free(wire_case_t *c)
{
    testing_buffer_free(c->x);
    testing_buffer_free(c->index);
}

/* What row i of those outside the gap reads. */
static inline int32_t wire_source(const wire_case_t *c, int32_t i) { return c->index[i < c->gap_at ? i : i + c->gap]; }

/* Whether element i has the same bits in both, or is NaN in both. */
static inline bool wire_same(const void *a, const void *b, epmoe_dtype_t dtype, int64_t i)
{
    float one = epmoei_load(a, dtype, i), other = epmoei_load(b, dtype, i);
    return (isnan(one) && isnan(other)) || epmoei_f32_bits(one) == epmoei_f32_bits(other);
}

#endif
