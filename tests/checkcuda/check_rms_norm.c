#include "base/fp8.h"
#include "dense_layers/rms_norm.h"
#include "tests/checkcuda/check.h"

#include <math.h>

static epmoe_status_t run(const void *args, epmoe_stream_t stream) { return epmoe_rms_norm(args, stream); }

static epmoe_status_t reference(const void *args)
{
    epmoe_rms_norm_args_t checked;
    EPMOEI_CHECK(epmoei_rms_norm_check(args, &checked));
    return checked.num_tokens ? epmoei_rms_norm_ref(&checked, NULL) : EPMOE_OK;
}

static const check_op_t op = {"rms_norm", sizeof(epmoe_rms_norm_args_t), run, reference};

static const epmoe_dtype_t dtypes[] = {EPMOE_BF16, EPMOE_F16, EPMOE_F32};
static const epmoe_granularity_t quants[] = {0, EPMOE_GRANULARITY_TENSOR, EPMOE_GRANULARITY_TOKEN,
                                             EPMOE_GRANULARITY_BLOCK128};

typedef struct shape_t {
    int32_t tokens, hidden, pad; /* pad: columns between the rows */
    epmoe_dtype_t dtype, weight_dtype;
    epmoe_granularity_t quant;
    bool residual, offset, in_place;
    float scale;           /* static */
    epmoe_dtype_t y_dtype; /* 0: the usual one */
} shape_t;

/* Rows of very different size, among them zeros, subnormals and the largest finite values, whose squares overflow. */
static void fill_rows(testing_rng_t *rng, const check_field_t *field, const shape_t *shape)
{
    static const float sizes[] = {1, 1, 1e-3f, 3e4f, 0, 1e-38f, 3e38f, 1e-20f};
    int64_t size = epmoe_dtype_size(shape->dtype), stride = field->cols;
    for (int64_t t = 0; t < field->rows; t++) {
        char *row = field->host + t * stride * size;
        float scale = sizes[t % 8] * (t % 8 == 6 ? 0.2f : 1.0f);
        if (shape->dtype == EPMOE_F16) scale = fminf(scale, 8e3f);
        check_fill_normal(rng, row, shape->dtype, shape->hidden, scale);
        if (t % 4 == 1) epmoei_store(row, shape->dtype, testing_range(rng, 0, shape->hidden - 1), 100 * scale);
    }
}

static void fill(testing_rng_t *rng, check_case_t *c, const shape_t *shape)
{
    fill_rows(rng, check_find(c, shape->in_place ? "y" : "x"), shape);
    if (shape->residual) fill_rows(rng, check_find(c, "residual"), shape);
    testing_fill_normal(rng, check_find(c, "weight")->host, shape->weight_dtype, shape->hidden, 1.0f);
}

static void make(check_case_t *c, testing_rng_t *rng, const shape_t *shape)
{
    epmoe_dtype_t y_dtype = shape->quant ? EPMOE_F8_E4M3 : shape->y_dtype ? shape->y_dtype : shape->dtype;
    check_case(c, &op, "T %d d %d pad %d %s to %s weights %s quant %d residual %d offset %d in place %d", shape->tokens,
               shape->hidden, shape->pad, epmoe_dtype_string(shape->dtype), epmoe_dtype_string(y_dtype),
               epmoe_dtype_string(shape->weight_dtype), (int)shape->quant, shape->residual, shape->offset,
               shape->in_place);
    epmoe_rms_norm_args_t args = EPMOE_RMS_NORM_ARGS_INIT;
    int64_t tokens = shape->tokens, stride = (int64_t)shape->hidden + shape->pad, cols = shape->hidden;
    args.num_tokens = shape->tokens;
    args.hidden = shape->hidden;
    args.dtype = shape->dtype;
    args.weight_dtype = shape->weight_dtype;
    args.x_stride = args.residual_stride = args.y_stride = stride;
    args.weight_offset = shape->offset;
    args.quant = shape->quant;
    args.y_dtype = shape->y_dtype;
    memcpy(c->args, &args, sizeof args);
    if (shape->in_place)
        c->alias_offset = offsetof(epmoe_rms_norm_args_t, x);
    else
        CHECK_ADD(c, epmoe_rms_norm_args_t, x, CHECK_IN, shape->dtype, tokens, stride, 16);
    CHECK_ADD(c, epmoe_rms_norm_args_t, weight, CHECK_IN, shape->weight_dtype, 1, cols, 16);
    CHECK_ADD(c, epmoe_rms_norm_args_t, y, shape->in_place ? CHECK_INOUT : CHECK_OUT, y_dtype, tokens, stride, 16);
    /* Read too, but no alias of another pointer, which INOUT would make it. */
    if (shape->residual) CHECK_ADD(c, epmoe_rms_norm_args_t, residual, CHECK_OUT, shape->dtype, tokens, stride, 16);
    if (shape->quant == EPMOE_GRANULARITY_TENSOR)
        *(float *)CHECK_ADD(c, epmoe_rms_norm_args_t, static_scale, CHECK_IN, EPMOE_F32, 1, 1, 4) = shape->scale;
    if (shape->quant == EPMOE_GRANULARITY_TOKEN || shape->quant == EPMOE_GRANULARITY_BLOCK128)
        CHECK_ADD(c, epmoe_rms_norm_args_t, scale, CHECK_OUT, EPMOE_F32, tokens,
                  shape->quant == EPMOE_GRANULARITY_TOKEN ? 1 : epmoei_ceil_div(cols, 128), 4);
    if (tokens) fill(rng, c, shape);
}

static void run_one(testing_rng_t *rng, const shape_t *shape)
{
    check_case_t c;
    make(&c, rng, shape);
    check_run(&c);
    check_free(&c);
}

static shape_t random_shape(testing_rng_t *rng, int32_t tokens, int32_t hidden, int32_t variant)
{
    shape_t shape = {.tokens = tokens,
                     .hidden = hidden,
                     .dtype = dtypes[variant % 3],
                     .weight_dtype = dtypes[variant % 5 ? variant % 3 : variant / 5 % 3],
                     .quant = quants[variant / 3 % 4],
                     .residual = testing_range(rng, 0, 1),
                     .offset = testing_range(rng, 0, 1),
                     .scale = ldexpf(testing_uniform(rng, 1, 2), testing_range(rng, -8, 2))};
    if (!shape.quant && shape.dtype == EPMOE_F32) shape.y_dtype = dtypes[testing_range(rng, 0, 2)];
    shape.in_place = !shape.quant && (!shape.y_dtype || shape.y_dtype == shape.dtype) && !testing_range(rng, 0, 2);
    return shape;
}

/* Every number of 16-byte parts of a thread, rows beside one another in a block, and rows that no block holds. */
static void check_shapes(testing_rng_t *rng)
{
    const int32_t widths[] = {1, 5, 8, 64, 96, 129, 512, 769, 1024, 2052, 2880, 4096, 7168, 8200, 16384, 32768, 33000};
    const int32_t tokens[] = {0, 1, 3, 16, 131, 2049};
    check_begin("rms_norm", "d 1..33000, T 0..2049");
    int32_t variant = 0;
    for (size_t w = 0; w < sizeof widths / sizeof *widths; w++)
        for (size_t t = 0; t < sizeof tokens / sizeof *tokens; t++)
            for (int32_t repeat = 0; repeat < 2; repeat++, variant++) {
                int64_t elements = (int64_t)widths[w] * tokens[t];
                if (elements > 2 << 20 || check_skips(elements)) continue;
                shape_t shape = random_shape(rng, tokens[t], widths[w], variant);
                run_one(rng, &shape);
            }
    check_end();
}

static void check_options(testing_rng_t *rng)
{
    check_begin("rms_norm", "every dtype, weight dtype, quant, residual, stride");
    for (int32_t i = 0; i < 3 * 3 * 4 * 2 * 3; i += check_step(7)) {
        shape_t shape = random_shape(rng, testing_range(rng, 1, 20), i % 2 ? 1160 : 392, i);
        shape.dtype = dtypes[i % 3];
        shape.weight_dtype = dtypes[i / 3 % 3];
        shape.quant = quants[i / 9 % 4];
        shape.residual = i / 36 % 2;
        shape.pad = i / 72 == 0 ? 0 : i / 72 == 1 ? 16 : testing_range(rng, 1, 7);
        shape.y_dtype = 0;
        shape.in_place = !shape.quant && testing_range(rng, 0, 1);
        run_one(rng, &shape);
        if (shape.dtype != EPMOE_F32 || shape.quant) continue;
        shape.y_dtype = dtypes[testing_range(rng, 0, 1)];
        shape.in_place = false;
        run_one(rng, &shape);
    }
    check_end();
}

/* Static scales at the ends of fp32's range, where a quotient from an inverse would underflow or overflow. */
static void check_scales(testing_rng_t *rng)
{
    static const float scales[] = {1e-45f, 0x1p-126f, 0x1p-61f, 0x1p-60f, 1.0f, 0x1p60f, 0x1.1p60f, 0x1.fffffep127f};
    check_begin("rms_norm", "scales from the smallest to the largest");
    for (size_t i = 0; i < sizeof scales / sizeof *scales; i++) {
        shape_t shape = {.tokens = 9,
                         .hidden = 264,
                         .quant = EPMOE_GRANULARITY_TENSOR,
                         .scale = scales[i],
                         .dtype = EPMOE_F32,
                         .weight_dtype = EPMOE_F32};
        check_case_t c;
        make(&c, rng, &shape);
        /* n in the scale's neighbourhood, so that not all codes are 0 or saturated. */
        testing_fill_normal(rng, check_find(&c, "weight")->host, EPMOE_F32, 264, 20 * fminf(scales[i], 1e37f));
        check_run(&c);
        check_free(&c);
    }
    check_end();
}

/* The codes and scales that quantising the device's own rounded rows gives, bit by bit. */
static void expect_chain(check_case_t *c, const shape_t *shape, const char *rows)
{
    const check_field_t *y = check_find(c, "y");
    const bool is_static = shape->quant == EPMOE_GRANULARITY_TENSOR;
    int64_t group = shape->quant == EPMOE_GRANULARITY_BLOCK128 ? 128 : shape->hidden;
    int64_t groups = epmoei_ceil_div(shape->hidden, group);
    for (int64_t t = 0; t < shape->tokens; t++)
        for (int64_t g = 0; g < groups; g++) {
            int64_t last = epmoei_min64(shape->hidden, (g + 1) * group);
            float amax = 0, scale = shape->scale;
            for (int64_t i = g * group; i < last; i++)
                amax = epmoei_amax(amax, epmoei_load(rows, shape->dtype, t * y->cols + i));
            if (!is_static) {
                scale = epmoei_e4m3_scale(amax);
                float got = epmoei_load(check_find(c, "scale")->got, EPMOE_F32, t * groups + g);
                if (epmoei_f32_bits(got) != epmoei_f32_bits(scale))
                    check_fail(c, "scale[%lld,%lld] is %.9g, of the unfused rows %.9g", (long long)t, (long long)g,
                               (double)got, (double)scale);
            }
            for (int64_t i = g * group; i < last; i++) {
                float value = epmoei_load(rows, shape->dtype, t * y->cols + i);
                int32_t want = epmoei_f32_to_e4m3(value / scale), got = (unsigned char)y->got[t * y->cols + i];
                if (want == got) continue;
                check_fail(c, "y[%lld,%lld] is 0x%02x, of the unfused rows 0x%02x", (long long)t, (long long)i, got,
                           want);
                return;
            }
        }
}

static bool run_once(check_case_t *c)
{
    check_upload(c);
    epmoe_status_t status = check_launch(c);
    if (status != EPMOE_OK) check_fail(c, "status %d: %s", (int)status, epmoe_last_error());
    return status == EPMOE_OK && check_download(c);
}

static void check_fused(testing_rng_t *rng)
{
    check_begin("rms_norm", "fused bits are those of the unfused chain");
    const int32_t widths[] = {65, 512, 4096, 7168, 9216, 33000};
    for (int32_t i = 0; i < 6 * 3 * 3; i += check_step(5)) {
        shape_t plain = {.tokens = 40, .hidden = widths[i % 6], .dtype = dtypes[i / 6 % 3], .residual = i % 2};
        plain.weight_dtype = plain.dtype;
        plain.scale = 0.03f;
        shape_t fused = plain;
        fused.quant = quants[1 + i / 18];
        if (check_skips((int64_t)plain.tokens * plain.hidden)) plain.tokens = fused.tokens = 3;
        check_case_t one, two;
        make(&one, rng, &plain);
        make(&two, rng, &fused);
        static const char *const inputs[] = {"x", "weight", "residual"};
        for (int32_t k = 0; k < 2 + plain.residual; k++) {
            check_field_t *from = check_find(&one, inputs[k]), *to = check_find(&two, inputs[k]);
            memcpy(to->host, from->host, (size_t)from->bytes);
        }
        if (run_once(&one) && run_once(&two)) expect_chain(&two, &fused, check_find(&one, "y")->got);
        check_free(&one);
        check_free(&two);
    }
    check_end();
}

static void refill(check_case_t *c, int32_t round, void *ctx)
{
    const shape_t *shape = ctx;
    testing_rng_t rng = testing_rng((uint64_t)round + 77);
    fill(&rng, c, shape);
}

static void check_calls(testing_rng_t *rng)
{
    check_begin("rms_norm", "NaN rows, graphs, alignment");
    for (int32_t i = 0; i < 8; i++) {
        shape_t shape = {.tokens = 30, .hidden = i % 2 ? 1025 : 1024, .dtype = EPMOE_BF16, .weight_dtype = EPMOE_BF16};
        shape.quant = quants[i / 2];
        shape.residual = true;
        shape.scale = 0.5f;
        check_case_t c;
        make(&c, rng, &shape);
        char *x = check_find(&c, "x")->host;
        int64_t d = shape.hidden;
        epmoei_store(x, EPMOE_BF16, 11 * d + 3, NAN);
        epmoei_store(x, EPMOE_BF16, 13 * d + d - 1, INFINITY);
        epmoei_store(x, EPMOE_BF16, 14 * d, -INFINITY);
        for (int64_t col = 0; col < d; col++) epmoei_store(x, EPMOE_BF16, 17 * d + col, NAN);
        check_run(&c);
        check_misaligned(&c);
        check_graph(&c, refill, &shape);
        check_free(&c);
    }
    check_end();
}

void check_rms_norm(testing_rng_t *rng)
{
    check_shapes(rng);
    check_options(rng);
    check_scales(rng);
    check_fused(rng);
    check_calls(rng);
}
