#include "kernels/quantize_fp8.h"
#include "tests/checkcuda/check.h"

#include <math.h>

static epmoe_status_t run(const void *args, epmoe_stream_t stream) { return epmoe_quantize_fp8(args, stream); }

static epmoe_status_t reference(const void *args)
{
    epmoe_quantize_fp8_args_t checked;
    EPMOEI_CHECK(epmoei_quantize_fp8_check(args, &checked));
    return checked.num_tokens ? epmoei_quantize_fp8_ref(&checked, NULL) : EPMOE_OK;
}

static const check_op_t op = {"quantize_fp8", sizeof(epmoe_quantize_fp8_args_t), run, reference};

typedef enum values_t { VALUES_NORMAL, VALUES_TINY, VALUES_HUGE, VALUES_BITS, VALUES_ZERO, VALUES_COUNT } values_t;

/* Values whose quotients are near codes' borders, denormal, saturated; NaN and infinities here and there. */
static void fill(testing_rng_t *rng, const check_field_t *field, values_t values)
{
    static const float edges[] = {NAN, -INFINITY, INFINITY, -0.0f, 448.0f, -1e-42f};
    static const float scales[] = {1.0f, 1e-39f, 1e36f, 0.0f, 0.0f};
    int64_t n = field->rows * field->cols, size = epmoe_dtype_size(field->dtype);
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = testing_next(rng);
        float value = (float)(testing_range(rng, -900, 900)) * 0.5f * scales[values];
        if (values == VALUES_BITS)
            memcpy(field->host + i * size, &bits, (size_t)size);
        else
            epmoei_store(field->host, field->dtype, i, value);
        if (values != VALUES_ZERO && bits % 300 == 0) epmoei_store(field->host, field->dtype, i, edges[bits / 300 % 6]);
    }
}

typedef struct shape_t {
    int32_t tokens, hidden, stride_more;
    epmoe_dtype_t dtype;
    epmoe_granularity_t granularity;
    bool pow2, is_static, bounded;
    values_t values;
    float given; /* the static scale or the bound */
} shape_t;

static void make(check_case_t *c, testing_rng_t *rng, const shape_t *shape)
{
    check_case(c, &op, "T %d d %d stride +%d %s granularity %d pow2 %d static %d bound %d (%g) values %d",
               shape->tokens, shape->hidden, shape->stride_more, epmoe_dtype_string(shape->dtype),
               (int)shape->granularity, shape->pow2, shape->is_static, shape->bounded, (double)shape->given,
               (int)shape->values);
    c->tolerance = 0;
    epmoe_quantize_fp8_args_t args = EPMOE_QUANTIZE_FP8_ARGS_INIT;
    args.num_tokens = shape->tokens, args.hidden = shape->hidden, args.dtype = shape->dtype;
    args.granularity = shape->granularity;
    args.pow2 = shape->pow2;
    args.x_stride = shape->stride_more ? shape->hidden + shape->stride_more : 0;
    memcpy(c->args, &args, sizeof args);
    int64_t parts = shape->granularity == EPMOE_GRANULARITY_BLOCK128 ? (shape->hidden + 127) / 128 : 1;
    int64_t rows = shape->granularity == EPMOE_GRANULARITY_TENSOR ? shape->tokens > 0 : shape->tokens;
    CHECK_ADD(c, epmoe_quantize_fp8_args_t, x, CHECK_IN, shape->dtype, shape->tokens,
              shape->hidden + shape->stride_more, 16);
    if (shape->tokens) fill(rng, &c->fields[0], shape->values);
    if (shape->is_static || shape->bounded) {
        float *given = shape->is_static
                           ? CHECK_ADD(c, epmoe_quantize_fp8_args_t, static_scale, CHECK_IN, EPMOE_F32, 1, 1, 4)
                           : CHECK_ADD(c, epmoe_quantize_fp8_args_t, scale_ub, CHECK_IN, EPMOE_F32, 1, 1, 4);
        *given = shape->given;
    }
    CHECK_ADD(c, epmoe_quantize_fp8_args_t, q, CHECK_OUT, EPMOE_F8_E4M3, shape->tokens, shape->hidden, 16);
    CHECK_ADD(c, epmoe_quantize_fp8_args_t, scale, CHECK_OUT, EPMOE_F32, rows, parts, 4);
}

static void refill(check_case_t *c, int32_t round, void *ctx)
{
    fill(ctx, check_find(c, "x"), (values_t)(round % VALUES_COUNT));
}

void check_quantize_fp8(testing_rng_t *rng)
{
    static const epmoe_dtype_t dtypes[] = {EPMOE_BF16, EPMOE_F16, EPMOE_F32};
    static const float given[] = {0.3f, 1.0f, 2.5f, 1e-30f, 1e30f};
    static const int32_t tokens[] = {0, 1, 3, 17, 63, 127, 257};
    static const int32_t hiddens[] = {1, 7, 8, 100, 128, 136, 129, 720, 1025, 2880, 7168};
    check_begin("quantize_fp8", "T 0..257, d 1..7168, bit for bit");
    for (size_t t = 0; t < 7; t++)
        for (size_t h = 0; h < 11; h++)
            for (int32_t i = 0; i < 6; i += check_step(5)) {
                shape_t shape = {.tokens = tokens[t],
                                 .hidden = hiddens[h],
                                 .stride_more = testing_range(rng, 0, 2) ? 0 : testing_range(rng, 1, 16),
                                 .dtype = dtypes[testing_range(rng, 0, 2)],
                                 .granularity = (epmoe_granularity_t)(1 + i % 3),
                                 .values = (values_t)testing_range(rng, 0, VALUES_COUNT - 1),
                                 .given = given[testing_range(rng, 0, 4)]};
                shape.is_static = i == 0 && testing_range(rng, 0, 1);
                shape.pow2 = !shape.is_static && testing_range(rng, 0, 1);
                shape.bounded = !shape.is_static && testing_range(rng, 0, 2) == 0;
                if (check_skips((int64_t)shape.tokens * shape.hidden)) continue;
                check_case_t c;
                make(&c, rng, &shape);
                check_run(&c);
                check_free(&c);
            }
    check_end();

    check_begin("quantize_fp8", "graphs, alignment");
    for (int32_t i = 0; i < 3; i++) {
        shape_t shape = {.tokens = 33,
                         .hidden = 264 + i,
                         .dtype = dtypes[i],
                         .granularity = (epmoe_granularity_t)(1 + i),
                         .bounded = true,
                         .given = 300.0f};
        check_case_t c;
        make(&c, rng, &shape);
        check_misaligned(&c);
        check_graph(&c, refill, rng);
        check_free(&c);
    }
    check_end();
}
