/* RMSNorm: cases worked by hand, an oracle in double precision, the residual sum, E4M3 against the unfused chain. */
#include "dense_layers/rms_norm.h"
#include "tests/e4m3_oracle.h"
#include "tests/op_testing.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

static epmoe_rms_norm_args_t make(int32_t num_tokens, int32_t hidden, epmoe_dtype_t dtype, const void *x,
                                  const void *weight, void *y)
{
    epmoe_rms_norm_args_t args = EPMOE_RMS_NORM_ARGS_INIT;
    args.num_tokens = num_tokens;
    args.hidden = hidden;
    args.dtype = dtype;
    args.x = x;
    args.weight = weight;
    args.y = y;
    return args;
}

static void *copy_of(const void *data, int64_t bytes)
{
    void *copy = testing_buffer(bytes, 0);
    if (data) memcpy(copy, data, (size_t)bytes);
    return copy;
}

static void expect_same(const void *a, const void *b, epmoe_dtype_t dtype, int64_t n, const char *what)
{
    if (dtype == EPMOE_F8_E4M3)
        cr_assert_eq(memcmp(a, b, (size_t)n), 0, "%s differs between kernels", what);
    else
        cr_assert(op_same_bits(a, b, dtype, n), "%s differs between kernels", what);
    cr_assert(testing_guards_intact(a), "%s", what);
}

/* Runs the public entry on the caller's buffers and both kernels on copies, which must give the same bits, between the
 * rows too. y is either x or a buffer of its own. */
static void run(const epmoe_rms_norm_args_t *args)
{
    epmoe_status_t (*const kernels[])(const epmoe_rms_norm_args_t *, epmoe_stream_t) = {epmoei_rms_norm_ref,
                                                                                        epmoei_rms_norm_cpu};
    epmoe_rms_norm_args_t checked[2];
    int32_t size = epmoe_dtype_size(args->dtype);
    epmoe_dtype_t y_dtype = args->y_dtype ? args->y_dtype : args->quant == 0 ? args->dtype : EPMOE_F8_E4M3;
    int64_t x_count = 0, y_count = 0, r_count = 0, scales = 0;
    for (int i = 0; i < 2; i++) {
        epmoe_rms_norm_args_t *own = &checked[i];
        cr_assert_eq(epmoei_rms_norm_check(args, own), EPMOE_OK, "%s", epmoe_last_error());
        x_count = (own->num_tokens - 1) * own->x_stride + own->hidden;
        y_count = (own->num_tokens - 1) * own->y_stride + own->hidden;
        r_count = (own->num_tokens - 1) * own->residual_stride + own->hidden;
        scales = own->num_tokens * epmoei_rms_norm_scales(own);
        own->x = copy_of(args->x, x_count * size);
        own->y = args->y == args->x ? (void *)(uintptr_t)own->x : copy_of(args->y, y_count * epmoe_dtype_size(y_dtype));
        own->residual = args->residual ? copy_of(args->residual, r_count * size) : NULL;
        own->scale = scales ? copy_of(NULL, scales * 4) : NULL;
        cr_assert_eq(kernels[i](own, NULL), EPMOE_OK, "%s", epmoe_last_error());
    }
    cr_assert_eq(epmoe_rms_norm(args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    for (int i = 0; i < 2; i++) {
        expect_same(checked[i].y, args->y, y_dtype, y_count, "y");
        if (args->residual) expect_same(checked[i].residual, args->residual, args->dtype, r_count, "residual");
        if (scales) expect_same(checked[i].scale, args->scale, EPMOE_F32, scales, "scale");
        if (args->y != args->x) testing_buffer_free(checked[i].y);
        testing_buffer_free((void *)(uintptr_t)checked[i].x);
        testing_buffer_free(checked[i].residual);
        testing_buffer_free(checked[i].scale);
    }
}

/* A row of `hidden` values that repeat `pattern`, with weight w, in dtype; returns the first normalised value. */
static double first_of(epmoe_dtype_t dtype, int32_t hidden, const float *pattern, int32_t period, float w, float eps,
                       int32_t offset)
{
    int32_t size = epmoe_dtype_size(dtype);
    void *x = testing_buffer(hidden * size, 0), *weight = testing_buffer(hidden * size, 0),
         *y = testing_buffer(hidden * size, 0);
    for (int32_t i = 0; i < hidden; i++) {
        epmoei_store(x, dtype, i, pattern[i % period]);
        epmoei_store(weight, dtype, i, w);
    }
    epmoe_rms_norm_args_t args = make(1, hidden, dtype, x, weight, y);
    args.eps = eps;
    args.weight_offset = offset;
    run(&args);
    double first = (double)epmoei_load(y, dtype, 0);
    cr_assert(testing_guards_intact(y));
    testing_buffer_free(x), testing_buffer_free(weight), testing_buffer_free(y);
    return first;
}

Test(rms_norm, by_hand)
{
    /* Squares that overflow fp16, and fp32. */
    cr_assert_eq(first_of(EPMOE_F16, 4096, (float[]){1000}, 1, 1, 1e-6f, 0), 1.0);
    cr_assert_eq(first_of(EPMOE_BF16, 64, (float[]){1e25f}, 1, 1, 1e-6f, 0), 1.0);
    cr_assert(fabs(first_of(EPMOE_F32, 64, (float[]){-FLT_MAX}, 1, 2, 1e-6f, 0) + 2.0) < 1e-6);
    /* An eps as large as bf16's own would give 0.49. */
    cr_assert_eq(first_of(EPMOE_BF16, 32, (float[]){0.05f, -0.05f}, 2, 1, 1e-6f, 0), 1.0);
    cr_assert(fabs(first_of(EPMOE_F32, 32, (float[]){0.05f, -0.05f}, 2, 1, 1e-6f, 0) - 0.99980006) < 1e-6);
    cr_assert(fabs(first_of(EPMOE_F32, 2, (float[]){1, 0}, 2, 1, 0.5f, 0) - 1.0) < 1e-6);
    cr_assert(fabs(first_of(EPMOE_F32, 2, (float[]){3, 4}, 2, 5, 0, 0) - 15 / sqrt(12.5)) < 4e-6);
    /* 1.7320505 * 16.8125 = 29.12; with 1 + w rounded to bf16 first it would be 29.0. */
    cr_assert_eq(first_of(EPMOE_BF16, 64, (float[]){3, 1, 1, 1}, 4, 15.8125f, 1e-6f, 1), 29.125);
    cr_assert_eq(first_of(EPMOE_BF16, 64, (float[]){0}, 1, 3, 1e-6f, 0), 0.0);
    cr_assert(fabs(first_of(EPMOE_F32, 1, (float[]){-7}, 1, 1, 0, 0) + 1.0) < 1e-6);
}

typedef struct rows_t {
    epmoe_rms_norm_args_t args;
    void *x, *weight, *residual, *y;
    int64_t x_count;
} rows_t;

/* Random rows whose gaps are NaN, so that a kernel that reads them shows it. */
static rows_t make_rows(testing_rng_t *rng, int32_t num_tokens, int32_t hidden, epmoe_dtype_t dtype, bool residual,
                        int32_t gap)
{
    rows_t rows = {.args = make(num_tokens, hidden, dtype, NULL, NULL, NULL)};
    int64_t size = epmoe_dtype_size(dtype), x_stride = hidden + gap, r_stride = hidden + (gap ? gap + 2 : 0);
    rows.x_count = (num_tokens - 1) * x_stride + hidden;
    rows.args.x = rows.x = testing_buffer(rows.x_count * size, (int32_t)size);
    rows.args.weight = rows.weight = testing_buffer(hidden * size, (int32_t)size);
    rows.args.x_stride = x_stride;
    testing_fill_normal(rng, rows.weight, dtype, hidden, 1);
    float scale = testing_range(rng, 0, 1) ? 1.0f : 0.01f;
    for (int64_t t = 0; t < num_tokens; t++)
        testing_fill_normal(rng, (char *)rows.x + t * x_stride * size, dtype, hidden, scale);
    if (!residual) return rows;
    rows.args.residual = rows.residual = testing_buffer(((num_tokens - 1) * r_stride + hidden) * size, (int32_t)size);
    rows.args.residual_stride = r_stride;
    for (int64_t t = 0; t < num_tokens; t++)
        testing_fill_normal(rng, (char *)rows.residual + t * r_stride * size, dtype, hidden, 3 * scale);
    return rows;
}

static void free_rows(rows_t *rows)
{
    testing_buffer_free(rows->x), testing_buffer_free(rows->weight), testing_buffer_free(rows->residual);
    testing_buffer_free(rows->y);
}

/* The row that is normalised: x, or the sum rounded to dtype. */
static void summed_row(const epmoe_rms_norm_args_t *args, const void *residual, int64_t t, double *row)
{
    for (int64_t i = 0; i < args->hidden; i++) {
        double x = (double)epmoei_load(args->x, args->dtype, t * args->x_stride + i);
        if (residual) x += (double)epmoei_load(residual, args->dtype, t * args->residual_stride + i);
        row[i] = (double)epmoei_round_to((float)x, args->dtype);
    }
}

Test(rms_norm, random_rows_against_double_precision)
{
    testing_rng_t rng = testing_rng(testing_seed());
    const int32_t widths[] = {1, 7, 64, 769, 1024, 1030, 3584, 8, 2049};
    for (int round = 0; round < 54; round++) {
        int d = round % 3;
        bool residual = round / 3 % 2;
        epmoe_dtype_t dtype = op_dtypes[d].dtype;
        int32_t size = epmoe_dtype_size(dtype), hidden = widths[round / 6];
        int32_t num_tokens = testing_range(&rng, 1, hidden > 1000 ? 3 : 9), gap = testing_range(&rng, 0, 1) * 5;
        rows_t rows = make_rows(&rng, num_tokens, hidden, dtype, residual, gap);
        epmoe_rms_norm_args_t *args = &rows.args;
        args->weight_offset = testing_range(&rng, 0, 1);
        args->eps = testing_range(&rng, 0, 1) ? 1e-5f : 0;
        args->y_stride = hidden + 3;
        args->y = rows.y = testing_buffer((num_tokens - 1) * args->y_stride * size + hidden * size, size);
        int64_t r_bytes = residual ? ((num_tokens - 1) * args->residual_stride + hidden) * size : 0;
        void *before = residual ? copy_of(args->residual, r_bytes) : NULL;
        double *row = malloc((size_t)hidden * sizeof *row), eps = args->eps > 0 ? (double)args->eps : 1e-6;
        run(args);
        for (int64_t t = 0; t < num_tokens; t++) {
            summed_row(args, before, t, row);
            long double mean = 0;
            for (int64_t i = 0; i < hidden; i++) mean += (long double)row[i] * (long double)row[i] / hidden;
            for (int64_t i = 0; i < hidden; i++) {
                double w = (double)epmoei_load(args->weight, dtype, i) + args->weight_offset;
                double expected = row[i] / sqrt((double)mean + eps) * w;
                double value = (double)epmoei_load(args->y, dtype, t * args->y_stride + i);
                double bound = (op_dtypes[d].half_ulp * 1.01 + 4e-7) * fabs(expected) + 0x1p-24 * (d == 2) + 1e-12;
                cr_assert(fabs(value - expected) <= bound, "d %d [%lld,%lld] is %.9g, expected %.9g", hidden,
                          (long long)t, (long long)i, value, expected);
                if (residual)
                    cr_assert_eq((double)epmoei_load(args->residual, dtype, t * args->residual_stride + i), row[i]);
            }
            if (t + 1 < num_tokens)
                cr_assert(testing_is_poison(args->y, (t * args->y_stride + hidden) * size, 3 * size));
        }
        cr_assert(testing_guards_intact(args->y) && testing_guards_intact(rows.x));
        cr_assert(!residual || testing_guards_intact(rows.residual));
        testing_buffer_free(before);
        free(row), free_rows(&rows);
    }
}

/* One row r holds r + 1 everywhere, of a width that no vector divides: a write into the next row would show. */
Test(rms_norm, rows_do_not_reach_their_neighbours)
{
    enum { T = 3, D = 769 };
    uint16_t *x = testing_buffer(T * D * 2, 0), *w = testing_buffer(D * 2, 0), *y = testing_buffer(T * D * 2, 0);
    for (int64_t i = 0; i < T * D; i++) epmoei_store(x, EPMOE_F16, i, (float)(i / D + 1));
    for (int64_t i = 0; i < D; i++) epmoei_store(w, EPMOE_F16, i, 1);
    epmoe_rms_norm_args_t args = make(T, D, EPMOE_F16, x, w, y);
    for (int repeat = 0; repeat < 50; repeat++) {
        memset(y, 0xFF, T * D * 2);
        cr_assert_eq(epmoe_rms_norm(&args, NULL), EPMOE_OK);
        for (int64_t i = 0; i < T * D; i++) cr_assert_eq(epmoei_load(y, EPMOE_F16, i), 1.0f);
        cr_assert(testing_guards_intact(y));
    }
    testing_buffer_free(x), testing_buffer_free(w), testing_buffer_free(y);
}

/* Three strides of their own: columns of a wider buffer, a dense residual, padded output rows. */
Test(rms_norm, strides_equal_a_contiguous_copy)
{
    enum { T = 4, D = 1536, WIDE = 2112, OUT = 1600 };
    testing_rng_t rng = testing_rng(testing_seed());
    uint16_t *wide = testing_buffer(T * WIDE * 2, 2), *dense = testing_buffer(T * D * 2, 0);
    uint16_t *w = testing_buffer(D * 2, 0), *y = testing_buffer(T * OUT * 2, 0), *z = testing_buffer(T * D * 2, 0);
    uint16_t *r1 = testing_buffer(T * D * 2, 0), *r2 = testing_buffer(T * D * 2, 0);
    testing_fill_normal(&rng, w, EPMOE_BF16, D, 1);
    testing_fill_normal(&rng, r1, EPMOE_BF16, T * D, 1);
    memcpy(r2, r1, T * D * 2);
    for (int64_t t = 0; t < T; t++) {
        testing_fill_normal(&rng, wide + t * WIDE, EPMOE_BF16, D, 1);
        memcpy(dense + t * D, wide + t * WIDE, D * 2);
    }
    epmoe_rms_norm_args_t args = make(T, D, EPMOE_BF16, wide, w, y);
    args.x_stride = WIDE, args.y_stride = OUT, args.residual = r1;
    run(&args);
    args = make(T, D, EPMOE_BF16, dense, w, z);
    args.residual = r2;
    run(&args);
    cr_assert_eq(memcmp(r1, r2, T * D * 2), 0);
    for (int64_t t = 0; t < T; t++) {
        cr_assert_eq(memcmp(y + t * OUT, z + t * D, D * 2), 0, "row %lld", (long long)t);
        cr_assert(testing_is_poison(y, (t * OUT + D) * 2, (OUT - D) * 2));
        cr_assert(testing_is_poison(wide, (t * WIDE + D) * 2, (WIDE - D) * 2));
    }
    testing_buffer_free(wide), testing_buffer_free(dense), testing_buffer_free(w), testing_buffer_free(y);
    testing_buffer_free(z), testing_buffer_free(r1), testing_buffer_free(r2);
}

Test(rms_norm, in_place)
{
    testing_rng_t rng = testing_rng(testing_seed());
    for (int d = 0; d < OP_NUM_DTYPES; d++)
        for (int residual = 0; residual < 2; residual++) {
            enum { T = 5, D = 1100 };
            int32_t size = epmoe_dtype_size(op_dtypes[d].dtype);
            rows_t rows = make_rows(&rng, T, D, op_dtypes[d].dtype, residual, 0);
            void *residual_before = residual ? copy_of(rows.residual, T * D * size) : NULL;
            rows.args.y = rows.y = testing_buffer(T * D * size, 0);
            run(&rows.args);
            if (residual) memcpy(rows.residual, residual_before, T * D * (size_t)size);
            rows.args.y = rows.x;
            run(&rows.args);
            cr_assert(op_same_bits(rows.x, rows.y, op_dtypes[d].dtype, T * D));
            testing_buffer_free(residual_before);
            free_rows(&rows);
        }
}

/* The fused op has the bits of an addition, rounded, and a norm after it; a sum left unrounded would not. */
Test(rms_norm, the_residual_sum_is_rounded_first)
{
    enum { T = 4, D = 1024 };
    testing_rng_t rng = testing_rng(testing_seed());
    for (int d = 1; d < OP_NUM_DTYPES; d++) {
        epmoe_dtype_t dtype = op_dtypes[d].dtype;
        rows_t rows = make_rows(&rng, T, D, dtype, true, 0);
        uint16_t *sum = testing_buffer(T * D * 2, 0), *y = testing_buffer(T * D * 2, 0);
        float *exact = testing_buffer(T * D * 4, 0), *exact_y = testing_buffer(T * D * 4, 0);
        for (int64_t i = 0; i < T * D; i++) {
            exact[i] = epmoei_load(rows.x, dtype, i) + epmoei_load(rows.residual, dtype, i);
            epmoei_store(sum, dtype, i, exact[i]);
        }
        rows.args.y = rows.y = testing_buffer(T * D * 2, 0);
        run(&rows.args);
        cr_assert_eq(memcmp(rows.residual, sum, T * D * 2), 0);
        epmoe_rms_norm_args_t plain = make(T, D, dtype, sum, rows.weight, y);
        run(&plain);
        cr_assert_eq(memcmp(rows.y, y, T * D * 2), 0);
        epmoe_rms_norm_args_t unrounded = make(T, D, EPMOE_F32, exact, rows.weight, exact_y);
        unrounded.weight_dtype = dtype;
        run(&unrounded);
        int64_t different = 0;
        for (int64_t i = 0; i < T * D; i++) different += epmoei_round_to(exact_y[i], dtype) != epmoei_load(y, dtype, i);
        cr_assert(different > 0, "the data does not tell the two apart");
        testing_buffer_free(sum), testing_buffer_free(y), testing_buffer_free(exact), testing_buffer_free(exact_y);
        free_rows(&rows);
    }
}

/* ---------------------------------------------------------------------------------------------------------- E4M3 */

/* Rows in fp32 to 16 bits: what the fp32 output would be rounded to, and a residual that stays fp32. */
Test(rms_norm, a_narrower_output_is_the_wide_one_rounded)
{
    testing_rng_t rng = testing_rng(testing_seed());
    static const epmoe_dtype_t narrow[] = {EPMOE_BF16, EPMOE_F16};
    for (int i = 0; i < 24; i++) {
        int32_t tokens = testing_range(&rng, 1, 9), hidden = testing_range(&rng, 1, 700), gap = i % 3;
        bool residual = i % 2;
        rows_t rows = make_rows(&rng, tokens, hidden, EPMOE_F32, residual, gap);
        int64_t stride = hidden + gap, count = (tokens - 1) * stride + hidden, sums = 0;
        if (residual) sums = (tokens - 1) * rows.args.residual_stride + hidden;
        void *before = copy_of(rows.residual, sums * 4);
        float *wide = testing_buffer(count * 4, 4);
        void *y = testing_buffer(count * 2, 2);
        rows.args.y_stride = stride;
        rows.args.y = wide;
        run(&rows.args);
        void *after = copy_of(rows.residual, sums * 4);
        if (residual) memcpy(rows.residual, before, (size_t)sums * 4);
        rows.args.y = y;
        rows.args.y_dtype = narrow[i / 2 % 2];
        run(&rows.args);
        if (residual) cr_assert_eq(memcmp(rows.residual, after, (size_t)sums * 4), 0);
        for (int64_t t = 0; t < tokens; t++) {
            for (int64_t c = 0; c < hidden; c++) {
                float want = epmoei_round_to(wide[t * stride + c], rows.args.y_dtype);
                cr_assert_eq(epmoei_load(y, rows.args.y_dtype, t * stride + c), want, "row %d column %d", (int)t,
                             (int)c);
            }
            if (t + 1 < tokens) cr_assert(testing_is_poison(y, (t * stride + hidden) * 2, gap * 2));
        }
        cr_assert(testing_guards_intact(y));
        testing_buffer_free(before), testing_buffer_free(after), testing_buffer_free(wide), testing_buffer_free(y);
        free_rows(&rows);
    }
}

Test(rms_norm, quantised_bits_are_those_of_the_unfused_chain)
{
    testing_rng_t rng = testing_rng(testing_seed());
    const int32_t widths[] = {130, 1024, 1, 2880, 128};
    for (int round = 0; round < 90; round++) {
        epmoe_dtype_t dtype = op_dtypes[round % 3].dtype;
        epmoe_granularity_t quant = (epmoe_granularity_t)(EPMOE_GRANULARITY_TENSOR + round / 3 % 3);
        bool residual = round / 9 % 2;
        int32_t hidden = widths[round / 18], num_tokens = testing_range(&rng, 1, 5), size = epmoe_dtype_size(dtype);
        float fixed = 0.01f;
        rows_t rows = make_rows(&rng, num_tokens, hidden, dtype, residual, 0);
        int64_t count = (int64_t)num_tokens * hidden, group = quant == EPMOE_GRANULARITY_BLOCK128 ? 128 : hidden;
        int64_t per_row = (hidden + group - 1) / group;
        /* A row with outliers, a row of zeros. */
        epmoei_store(rows.x, dtype, hidden / 2, 100);
        for (int64_t i = 0; i < hidden && num_tokens > 2; i++) {
            epmoei_store(rows.x, dtype, hidden + i, 0);
            if (residual) epmoei_store(rows.residual, dtype, hidden + i, 0);
        }
        void *residual_before = residual ? copy_of(rows.residual, count * size) : NULL;
        rows.args.y = rows.y = testing_buffer(count * size, 0);
        run(&rows.args);
        uint8_t *codes = testing_buffer(count + num_tokens * 3, 1);
        float *scales = testing_buffer(num_tokens * per_row * 4, 4);
        epmoe_rms_norm_args_t args = rows.args;
        if (residual) memcpy(rows.residual, residual_before, (size_t)(count * size));
        args.quant = quant;
        args.y = codes;
        args.y_stride = hidden + 3;
        if (quant == EPMOE_GRANULARITY_TENSOR)
            args.static_scale = &fixed;
        else
            args.scale = scales;
        run(&args);
        for (int64_t t = 0; t < num_tokens; t++)
            for (int64_t first = 0; first < hidden; first += group) {
                int64_t last = epmoei_min64(first + group, hidden);
                float amax = 0, scale = fixed;
                for (int64_t i = first; i < last; i++)
                    amax = fmaxf(amax, fabsf(epmoei_load(rows.y, dtype, t * hidden + i)));
                if (quant != EPMOE_GRANULARITY_TENSOR) {
                    scale = fmaxf(amax / 448, 0x1p-126f);
                    cr_assert_eq(scales[t * per_row + first / group], scale);
                }
                for (int64_t i = first; i < last; i++) {
                    float n = epmoei_load(rows.y, dtype, t * hidden + i);
                    cr_assert_eq(codes[t * (hidden + 3) + i], e4m3_nearest((double)(n / scale)), "[%lld,%lld]",
                                 (long long)t, (long long)i);
                }
            }
        for (int64_t t = 0; t < num_tokens; t++) cr_assert(testing_is_poison(codes, t * (hidden + 3) + hidden, 3));
        cr_assert(testing_guards_intact(codes) && testing_guards_intact(scales));
        testing_buffer_free(codes), testing_buffer_free(scales), testing_buffer_free(residual_before);
        free_rows(&rows);
    }
}

Test(rms_norm, quantised_by_hand)
{
    /* One block of ones and a tail of zeros: 0 has the smallest scale and code 0, never NaN. */
    enum { D = 130 };
    float x[D], w[D], scale[2] = {NAN, NAN};
    uint8_t y[D];
    for (int i = 0; i < D; i++) x[i] = i < 128 ? 1 : 0, w[i] = sqrtf(128.0f / D);
    epmoe_rms_norm_args_t args = make(1, D, EPMOE_F32, x, w, y);
    args.eps = 1e-30f;
    args.quant = EPMOE_GRANULARITY_BLOCK128;
    args.scale = scale;
    run(&args);
    cr_assert(fabsf(scale[0] * 448 - 1) < 1e-6f, "scale %g", (double)scale[0]);
    cr_assert_eq(scale[1], 0x1p-126f);
    for (int i = 0; i < D; i++) cr_assert_eq(y[i], i < 128 ? 0x7E : 0x00, "%d: %02x", i, y[i]);
    /* A static scale saturates. */
    const float fixed = 1.0f / 1024;
    args.quant = EPMOE_GRANULARITY_TENSOR;
    args.static_scale = &fixed;
    run(&args);
    for (int i = 0; i < D; i++) cr_assert_eq(y[i], i < 128 ? 0x7E : 0x00);
}

/* ---------------------------------------------------------------------------------------------------------- edges */

Test(rms_norm, nan_and_infinity_stay_in_their_row)
{
    enum { T = 4, D = 40 };
    float x[T * D], w[D], y[T * D], scale[T];
    uint8_t codes[T * D];
    for (int i = 0; i < T * D; i++) x[i] = 1;
    for (int i = 0; i < D; i++) w[i] = 1;
    x[D + 3] = NAN;
    x[2 * D] = INFINITY;
    epmoe_rms_norm_args_t args = make(T, D, EPMOE_F32, x, w, y);
    run(&args);
    for (int i = 0; i < D; i++) {
        cr_assert(fabsf(y[i] - 1) < 1e-5f && fabsf(y[3 * D + i] - 1) < 1e-5f);
        cr_assert(isnan(y[D + i]));
        cr_assert(i == 0 ? isnan(y[2 * D]) : y[2 * D + i] == 0);
    }
    args.y = codes;
    args.quant = EPMOE_GRANULARITY_TOKEN;
    args.scale = scale;
    run(&args);
    for (int i = 0; i < D; i++) cr_assert(codes[i] == 0x7E && codes[D + i] == 0x7F && codes[3 * D + i] == 0x7E);
    for (int t = 0; t < T; t++) cr_assert(isfinite(scale[t]) && scale[t] > 0);
}

Test(rms_norm, no_tokens)
{
    epmoe_rms_norm_args_t args = make(0, 8, EPMOE_BF16, NULL, NULL, NULL);
    for (int quant = 0; quant < 4; quant++) {
        args.quant = (epmoe_granularity_t)quant;
        cr_assert_eq(epmoe_rms_norm(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    }
}

Test(rms_norm, errors_name_the_argument_and_leave_the_output)
{
    float x[16] = {1}, w[8] = {1}, residual[16] = {0}, bad_scale[] = {0, -1, NAN, INFINITY};
    float *y = testing_buffer(64, 0), *scale = testing_buffer(8, 0);
    epmoe_rms_norm_args_t base = make(2, 8, EPMOE_F32, x, w, y);
#define REJECTS(needle, statement)                                                                                     \
    OP_INVALID(epmoe_rms_norm, base, needle, testing_is_poison(y, 0, 64) && testing_is_poison(scale, 0, 8), statement)
    REJECTS("num_tokens is -1", bad.num_tokens = -1);
    REJECTS("hidden is 0", bad.hidden = 0);
    REJECTS("dtype", bad.dtype = EPMOE_DTYPE_NONE);
    REJECTS("dtype", bad.dtype = EPMOE_F8_E4M3);
    REJECTS("weight_dtype", bad.weight_dtype = EPMOE_I32);
    REJECTS("x_stride is 7", bad.x_stride = 7);
    REJECTS("y_stride is 7", bad.y_stride = 7);
    REJECTS("residual_stride is 7", bad.residual_stride = 7);
    REJECTS("x_stride", bad.x_stride = INT64_MAX);
    REJECTS("eps is -1", bad.eps = -1);
    REJECTS("eps is", bad.eps = NAN);
    REJECTS("eps is inf", bad.eps = INFINITY);
    REJECTS("weight_offset is 2", bad.weight_offset = 2);
    REJECTS("quant is 4", bad.quant = (epmoe_granularity_t)4);
    REJECTS("quant is -1", bad.quant = (epmoe_granularity_t)-1);
    REJECTS("x is NULL", bad.x = NULL);
    REJECTS("weight is NULL", bad.weight = NULL);
    REJECTS("y is NULL", bad.y = NULL);
    REJECTS("residual == x", bad.residual = x);
    REJECTS("residual == y", bad.residual = y);
    REJECTS("y == x", (bad.y = x, bad.y_stride = 9));
    REJECTS("y == x with quant", (bad.y = x, bad.quant = EPMOE_GRANULARITY_TOKEN, bad.scale = scale));
    REJECTS("y == x with y_dtype bf16", (bad.y = x, bad.y_dtype = EPMOE_BF16));
    REJECTS("y_dtype is 4 (f8_e4m3): with dtype f32 and quant 0 expected f32, bf16 or f16",
            bad.y_dtype = EPMOE_F8_E4M3);
    REJECTS("y_dtype is", (bad.dtype = EPMOE_BF16, bad.y_dtype = EPMOE_F32));
    REJECTS("y_dtype is", (bad.dtype = EPMOE_BF16, bad.y_dtype = EPMOE_F16));
    REJECTS("y_dtype is", (bad.y_dtype = EPMOE_BF16, bad.quant = EPMOE_GRANULARITY_TOKEN, bad.scale = scale));
    REJECTS("scale is NULL", bad.quant = EPMOE_GRANULARITY_TOKEN);
    REJECTS("scale is NULL", bad.quant = EPMOE_GRANULARITY_BLOCK128);
    REJECTS("static_scale is NULL", bad.quant = EPMOE_GRANULARITY_TENSOR);
    REJECTS("static_scale is given", bad.static_scale = bad_scale);
    for (int i = 0; i < 4; i++) {
        REJECTS("static_scale is", (bad.quant = EPMOE_GRANULARITY_TENSOR, bad.static_scale = &bad_scale[i]));
        cr_assert_eq(residual[0], 0);
    }
    REJECTS("backend is 7", bad.backend = (epmoe_backend_t)7);
#undef REJECTS
    testing_buffer_free(y), testing_buffer_free(scale);
}

Test(rms_norm, struct_sizes)
{
    const float x[] = {3, 3}, w[] = {1, 1};
    float *y = testing_buffer(8, 0);
    epmoe_rms_norm_args_t base = make(1, 2, EPMOE_F32, x, w, y);
    OP_STRUCT_SIZES(epmoe_rms_norm, base, offsetof(epmoe_rms_norm_args_t, y_stride), testing_is_poison(y, 0, 8),
                    fabsf(y[0] - 1) < 1e-6f);
    testing_buffer_free(y);
}

/* 4, 8, 3 and 7 bytes per element, and what belongs to the row and to all rows. */
Test(rms_norm, floor_counts_each_byte_once)
{
    float residual = 0;
    epmoe_rms_norm_args_t args = {
        .num_tokens = 3, .hidden = 256, .dtype = EPMOE_BF16, .weight_dtype = EPMOE_BF16, .y_dtype = EPMOE_BF16};
    cr_assert_eq(epmoei_rms_norm_floor(&args).bytes, 3 * 256 * 4 + 512);
    args.residual = &residual;
    cr_assert_eq(epmoei_rms_norm_floor(&args).bytes, 3 * 256 * 8 + 512);
    args.quant = EPMOE_GRANULARITY_BLOCK128;
    args.y_dtype = EPMOE_F8_E4M3;
    cr_assert_eq(epmoei_rms_norm_floor(&args).bytes, 3 * 256 * 7 + 512 + 3 * 2 * 4);
    args.residual = NULL;
    args.quant = EPMOE_GRANULARITY_TENSOR;
    cr_assert_eq(epmoei_rms_norm_floor(&args).bytes, 3 * 256 * 3 + 512 + 4);
}
