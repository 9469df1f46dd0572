#include "kernels/silu_and_mul.h"
#include "tests/checkcuda/check.h"

#include <math.h>

static epmoe_status_t run(const void *args, epmoe_stream_t stream) { return epmoe_silu_and_mul(args, stream); }

static epmoe_status_t reference(const void *args)
{
    epmoe_silu_and_mul_args_t checked;
    EPMOEI_CHECK(epmoei_silu_and_mul_check(args, &checked));
    return checked.num_tokens ? epmoei_silu_and_mul_ref(&checked, NULL) : EPMOE_OK;
}

static const check_op_t op = {"silu_and_mul", sizeof(epmoe_silu_and_mul_args_t), run, reference};

static void fill(testing_rng_t *rng, const check_field_t *field)
{
    static const float edges[] = {NAN, -INFINITY, INFINITY, -0.0f, 100.0f, -100.0f, -88.0f, 1e-40f};
    if (!field->host) return;
    int64_t n = field->rows * field->cols;
    check_fill_normal(rng, field->host, field->dtype, n, 3.0f);
    for (int64_t i = 0; i < n; i += testing_range(rng, 20, 200))
        epmoei_store(field->host, field->dtype, i, edges[testing_range(rng, 0, 7)]);
}

/* Gates of the largest values that the type has, and ups of less than 1. */
static void fill_largest(testing_rng_t *rng, const check_field_t *field, int32_t width)
{
    const float most = field->dtype == EPMOE_F16    ? 65504.0f
                       : field->dtype == EPMOE_BF16 ? 0x1.fep127f
                                                    : 0x1.fffffep127f;
    for (int64_t row = 0; row < field->rows; row++)
        for (int32_t i = 0; i < width; i++) {
            const float gate = (i % 2 ? -most : most) * (i % 4 < 2 ? 1.0f : 0.0625f);
            epmoei_store(field->host, field->dtype, row * field->cols + i, gate);
            epmoei_store(field->host, field->dtype, row * field->cols + width + i, testing_uniform(rng, -1.0f, 0.0f));
        }
}

/* Strides 0 are dense; in_place needs equal ones. */
static void make(check_case_t *c, testing_rng_t *rng, epmoe_silu_and_mul_args_t kind, bool in_place)
{
    static const char *const activations[] = {"silu", "gelu", "gelu_tanh", "swiglu_oai"};
    int64_t x_stride = kind.x_stride ? kind.x_stride : 2 * (int64_t)kind.width;
    int64_t y_stride = kind.y_stride ? kind.y_stride : kind.width;
    check_case(c, &op, "T %d d %d strides %lld %lld %s %s limit %g in place %d", kind.num_tokens, kind.width,
               (long long)kind.x_stride, (long long)kind.y_stride, epmoe_dtype_string(kind.dtype),
               activations[kind.activation], (double)kind.limit, in_place);
    memcpy(c->args, &kind, sizeof kind);
    if (in_place) {
        c->alias_offset = offsetof(epmoe_silu_and_mul_args_t, x);
        CHECK_ADD(c, epmoe_silu_and_mul_args_t, y, CHECK_INOUT, kind.dtype, kind.num_tokens, x_stride, 16);
    } else {
        CHECK_ADD(c, epmoe_silu_and_mul_args_t, x, CHECK_IN, kind.dtype, kind.num_tokens, x_stride, 16);
        CHECK_ADD(c, epmoe_silu_and_mul_args_t, y, CHECK_OUT, kind.dtype, kind.num_tokens, y_stride, 16);
    }
    fill(rng, &c->fields[0]);
}

static void run_one(testing_rng_t *rng, epmoe_silu_and_mul_args_t kind, bool in_place)
{
    check_case_t c;
    make(&c, rng, kind, in_place);
    check_run(&c);
    check_free(&c);
}

static const epmoe_dtype_t dtypes[] = {EPMOE_BF16, EPMOE_F16, EPMOE_F32};

static void refill(check_case_t *c, int32_t round, void *ctx)
{
    (void)round;
    fill(ctx, &c->fields[0]);
}

void check_silu_and_mul(testing_rng_t *rng)
{
    const int32_t widths[] = {1, 2, 3, 4, 5, 8, 60, 72, 100, 129, 768, 1025, 2880, 2052};
    const int32_t tokens[] = {0, 1, 3, 63, 127, 257, 4096};
    check_begin("silu_and_mul", "d 1..2880, T 0..4096");
    for (size_t w = 0; w < sizeof widths / sizeof *widths; w++)
        for (size_t t = 0; t < sizeof tokens / sizeof *tokens; t++) {
            int64_t elements = (int64_t)widths[w] * tokens[t];
            if (elements > 4 << 20 || check_skips(elements)) continue;
            epmoe_silu_and_mul_args_t kind = EPMOE_SILU_AND_MUL_ARGS_INIT;
            kind.num_tokens = tokens[t];
            kind.width = widths[w];
            kind.dtype = dtypes[(w + t) % 3];
            kind.activation = (epmoe_activation_t)((w + 2 * t) % 4);
            kind.limit = t % 2 ? 2.5f : 0.0f;
            run_one(rng, kind, false);
        }
    check_end();

    check_begin("silu_and_mul", "every activation, dtype, stride and alias");
    for (int32_t i = 0; i < 4 * 3 * 3 * 2 * 3; i += check_step(7)) {
        epmoe_silu_and_mul_args_t kind = EPMOE_SILU_AND_MUL_ARGS_INIT;
        kind.activation = (epmoe_activation_t)(i % 4);
        kind.dtype = dtypes[i / 4 % 3];
        kind.width = i / 36 % 2 ? 136 : 61;
        kind.num_tokens = testing_range(rng, 1, 20);
        kind.limit = i / 72 == 0 ? 0.0f : i / 72 == 1 ? 1.5f : INFINITY;
        int32_t strides = i / 12 % 3;
        if (strides) kind.x_stride = 2 * kind.width + (strides == 1 ? 8 : testing_range(rng, 1, 7));
        if (strides == 1) kind.y_stride = kind.width + 16;
        run_one(rng, kind, false);
        kind.y_stride = kind.x_stride = 2 * kind.width + strides * 4;
        run_one(rng, kind, true);
    }
    check_end();

    check_begin("silu_and_mul", "the largest gates");
    for (int32_t i = 0; i < 4 * 3 * 2; i++) {
        epmoe_silu_and_mul_args_t kind = EPMOE_SILU_AND_MUL_ARGS_INIT;
        kind.activation = (epmoe_activation_t)(i % 4);
        kind.dtype = dtypes[i / 4 % 3];
        kind.width = i / 12 ? 61 : 136;
        kind.num_tokens = 5;
        check_case_t c;
        make(&c, rng, kind, false);
        fill_largest(rng, &c.fields[0], kind.width);
        check_run(&c);
        check_free(&c);
    }
    check_end();

    check_begin("silu_and_mul", "graphs, alignment");
    for (int32_t width = 64; width <= 65; width++) {
        epmoe_silu_and_mul_args_t kind = EPMOE_SILU_AND_MUL_ARGS_INIT;
        kind.num_tokens = 33;
        kind.width = width;
        kind.dtype = EPMOE_BF16;
        check_case_t c;
        make(&c, rng, kind, false);
        check_misaligned(&c);
        check_graph(&c, refill, rng);
        check_free(&c);
    }
    check_end();
}
