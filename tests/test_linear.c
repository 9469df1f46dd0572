/* epmoe_linear on the CPU: cases worked by hand, an oracle in double precision from the definitions of the formats,
 * codes that are given against codes that are made, rejected calls. */
#include "dense_layers/linear_op.h"
#include "tests/e4m3_oracle.h"
#include "tests/op_testing.h"

#include <math.h>
#include <stdlib.h>

static void run(epmoe_linear_args_t *args)
{
    cr_assert_eq(epmoe_linear_workspace_size(args, &args->workspace_bytes), EPMOE_OK, "%s", epmoe_last_error());
    args->workspace = testing_buffer(args->workspace_bytes, 0);
    cr_assert_eq(epmoe_linear(args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert(testing_guards_intact(args->workspace) && testing_guards_intact(args->y));
    testing_buffer_free(args->workspace);
    args->workspace = NULL;
}

static void run_reference(const epmoe_linear_args_t *args, void *y)
{
    epmoe_linear_args_t checked;
    cr_assert_eq(epmoei_linear_check(args, &checked), EPMOE_OK, "%s", epmoe_last_error());
    checked.y = y;
    cr_assert_eq(epmoei_linear_ref(&checked, NULL), EPMOE_OK);
    cr_assert(testing_guards_intact(y));
}

static epmoe_linear_args_t make(int32_t tokens, int32_t n, int32_t k, epmoe_dtype_t x_dtype, const void *x,
                                epmoe_format_t format, const void *weight)
{
    epmoe_linear_args_t args = EPMOE_LINEAR_ARGS_INIT;
    args.backend = EPMOE_BACKEND_CPU;
    args.num_tokens = tokens;
    args.n = n;
    args.k = k;
    args.x_dtype = x_dtype;
    args.x = x;
    args.weight = (epmoe_weight_t)EPMOE_WEIGHT_INIT;
    args.weight.format = format;
    args.weight.data = weight;
    return args;
}

static void expect(epmoe_linear_args_t *args, const double *expected)
{
    int64_t count = (int64_t)args->num_tokens * args->n;
    epmoe_dtype_t dtype = args->y_dtype ? args->y_dtype : args->x_dtype == EPMOE_F8_E4M3 ? EPMOE_BF16 : args->x_dtype;
    void *reference = testing_buffer(count * 4, 0);
    args->y = testing_buffer(count * 4, 0);
    run_reference(args, reference);
    run(args);
    for (int64_t i = 0; i < count; i++) {
        cr_assert_eq((double)epmoei_load(args->y, dtype, i), expected[i], "y[%d] is %g", (int)i,
                     (double)epmoei_load(args->y, dtype, i));
        cr_assert_eq((double)epmoei_load(reference, dtype, i), expected[i], "ref[%d]", (int)i);
    }
    testing_buffer_free(args->y), testing_buffer_free(reference);
}

Test(linear, plain_by_hand)
{
    const float x[] = {1, 2, 3, -1, 0.5f, 4}, w[] = {1, 0, -1, 2, 2, 0.5f}, bias[] = {10, -1};
    epmoe_linear_args_t args = make(2, 2, 3, EPMOE_F32, x, EPMOE_FORMAT_F32, w);
    expect(&args, (double[]){-2, 7.5, -5, 1});
    args.bias = bias;
    expect(&args, (double[]){8, 6.5, 5, 0});
    /* Rounded once, behind the bias: 257 is not a bf16, and rounded first it would be 256. */
    const uint16_t one[] = {0x3F80, 0x3F80}, large[] = {0x4380, 0x3F80}; /* 1 1, 256 1 */
    const float half[] = {1};
    args = make(1, 1, 2, EPMOE_BF16, one, EPMOE_FORMAT_BF16, large);
    args.bias = half;
    expect(&args, (double[]){258});
    args.y_dtype = EPMOE_F32;
    expect(&args, (double[]){258});
    args.bias = NULL;
    expect(&args, (double[]){257});
}

/* 448 is 0x7E, 224 0x76, 1 0x38, 2 0x40, -1 0xB8. */
Test(linear, e4m3_by_hand)
{
    const uint8_t w[] = {0x38, 0x40, 0x40, 0xB8};
    const float by_row[] = {0.5f, 2}, whole[] = {4};
    /* Codes 448 and 224 with scales 2 / 448 and 64 / 448. */
    const float x[] = {2, 1, -32, 64};
    epmoe_linear_args_t args = make(2, 2, 2, EPMOE_F32, x, EPMOE_FORMAT_FP8_BLOCK, w);
    args.weight.group_size = -1;
    args.weight.group_rows = 1;
    args.weight.scales = by_row;
    args.x_quant = EPMOE_GRANULARITY_TOKEN;
    args.y_dtype = EPMOE_BF16; /* 2 / 448 is no float */
    expect(&args, (double[]){2, 6, 48, -256});
    args.weight.group_rows = -1;
    args.weight.scales = whole;
    expect(&args, (double[]){16, 12, 384, -512});
    /* One scale for both rows, 64 / 448: 2 and 1 are then codes 14 and 7. */
    args.x_quant = EPMOE_GRANULARITY_TENSOR;
    expect(&args, (double[]){16, 12, 384, -512});
    /* A scale of 1/8: 64 saturates at 448 / 8. */
    const float eighth[] = {0.125f};
    args.x_scale = eighth;
    expect(&args, (double[]){16, 12, 4 * (-32 + 2 * 56), 4 * (-64 - 56)});
    const uint8_t codes[] = {0x38, 0x40, 0x7E, 0xB8};
    args.x = codes;
    args.x_dtype = EPMOE_F8_E4M3;
    args.y_dtype = EPMOE_DTYPE_NONE;
    expect(&args, (double[]){0.5 * 5, 0.5 * 0, 0.5 * 446, 0.5 * 897 - 0.5});
}

/* -------------------------------------------------------------------------------------- random, in double precision */

typedef struct shape_t {
    int32_t tokens, n, k;
    epmoe_dtype_t x_dtype, y_dtype;
    epmoe_format_t format;
    epmoe_granularity_t x_quant;
    int32_t group_size, group_rows; /* of FP8_BLOCK */
    epmoe_dtype_t scales_dtype;
    bool bias;
} shape_t;

typedef struct case_t {
    epmoe_linear_args_t args;
    void *x, *w, *scales, *y, *reference;
    float *bias;
    double *x_values, *w_values;
} case_t;

static void make_weight(testing_rng_t *rng, case_t *c, const shape_t *s)
{
    int64_t count = (int64_t)s->n * s->k;
    c->w = testing_buffer(count * 4, 0);
    c->w_values = malloc((size_t)count * 8);
    c->args.weight.data = c->w;
    if (s->format == EPMOE_FORMAT_W4) {
        int64_t words = (s->k + 7) / 8, groups = (s->k + 127) / 128;
        float *scales = c->scales = testing_buffer(s->n * groups * 4, 0);
        for (int64_t i = 0; i < s->n * groups; i++) scales[i] = testing_uniform(rng, 0.01f, 0.1f);
        for (int64_t i = 0; i < s->n * words; i++) ((uint32_t *)c->w)[i] = testing_next(rng);
        for (int64_t i = 0; i < count; i++) {
            int64_t row = i / s->k, k = i % s->k;
            uint32_t code = ((uint32_t *)c->w)[row * words + k / 8] >> (4 * (k % 8)) & 15;
            c->w_values[i] = (double)scales[row * groups + k / 128] * ((double)code - 8);
        }
    } else if (s->format == EPMOE_FORMAT_FP8_BLOCK) {
        int64_t columns = s->group_size == -1 ? s->k : s->group_size, rows = s->group_rows == -1 ? s->n : s->group_rows;
        int64_t across = (s->k + columns - 1) / columns, down = (s->n + rows - 1) / rows;
        c->scales = testing_buffer(across * down * 4, 0);
        for (int64_t i = 0; i < across * down; i++)
            epmoei_store(c->scales, s->scales_dtype, i, testing_uniform(rng, 0.01f, 0.1f));
        for (int64_t i = 0; i < count; i++) {
            uint8_t code = ((uint8_t *)c->w)[i] = e4m3_nearest((double)testing_normal(rng));
            int64_t at = i / s->k / rows * across + i % s->k / columns;
            c->w_values[i] = e4m3_value(code) * (double)epmoei_load(c->scales, s->scales_dtype, at);
        }
        c->args.weight.group_size = s->group_size;
        c->args.weight.group_rows = s->group_rows;
        c->args.weight.scales_dtype = s->scales_dtype;
    } else {
        epmoe_dtype_t dtype = epmoei_dtype_of_format(s->format);
        testing_fill_normal(rng, c->w, dtype, count, 0.1f);
        for (int64_t i = 0; i < count; i++) c->w_values[i] = (double)epmoei_load(c->w, dtype, i);
    }
    c->args.weight.scales = c->scales;
}

/* Quantised from the definition: amax of what shares a scale, nearest codes. */
static void make_x(testing_rng_t *rng, case_t *c, const shape_t *s)
{
    int64_t count = (int64_t)s->tokens * s->k;
    c->x = testing_buffer(count * 4, 0);
    c->x_values = malloc((size_t)count * 8);
    c->args.x = c->x;
    testing_fill_normal(rng, c->x, s->x_dtype, count, 2);
    for (int64_t i = 0; i < count; i++) c->x_values[i] = (double)epmoei_load(c->x, s->x_dtype, i);
    if (s->x_quant == 0) return;
    int64_t rows = s->x_quant == EPMOE_GRANULARITY_TENSOR ? s->tokens : 1;
    int64_t columns = s->x_quant == EPMOE_GRANULARITY_BLOCK128 ? 128 : s->k;
    for (int64_t row = 0; row < s->tokens; row += rows)
        for (int64_t first = 0; first < s->k; first += columns) {
            int64_t end = first + columns < s->k ? first + columns : s->k;
            float amax = 0;
            for (int64_t t = row; t < row + rows; t++)
                for (int64_t k = first; k < end; k++) amax = fmaxf(amax, fabsf((float)c->x_values[t * s->k + k]));
            float scale = amax / 448.0f;
            for (int64_t t = row; t < row + rows; t++)
                for (int64_t k = first; k < end; k++) {
                    double *value = &c->x_values[t * s->k + k];
                    *value = e4m3_value(e4m3_nearest((double)((float)*value / scale))) * (double)scale;
                }
        }
}

static case_t make_case(testing_rng_t *rng, const shape_t *s)
{
    case_t c = {.args = make(s->tokens, s->n, s->k, s->x_dtype, NULL, s->format, NULL)};
    make_x(rng, &c, s);
    make_weight(rng, &c, s);
    c.args.x_quant = s->x_quant;
    c.args.y_dtype = s->y_dtype;
    c.args.y = c.y = testing_buffer((int64_t)s->tokens * s->n * 4, 0);
    c.reference = testing_buffer((int64_t)s->tokens * s->n * 4, 0);
    if (!s->bias) return c;
    c.args.bias = c.bias = testing_buffer((int64_t)s->n * 4, 0);
    testing_fill_normal(rng, c.bias, EPMOE_F32, s->n, 1);
    return c;
}

static void free_case(case_t *c)
{
    testing_buffer_free(c->x), testing_buffer_free(c->w), testing_buffer_free(c->scales), testing_buffer_free(c->y);
    testing_buffer_free(c->reference), testing_buffer_free(c->bias);
    free(c->x_values), free(c->w_values);
}

/* One rounding to the dtype, and one per term of the fp32 sum and of the scale's product. */
static void expect_close(const case_t *c, const void *y, const char *what)
{
    const epmoe_linear_args_t *args = &c->args;
    double half_ulp = args->y_dtype == EPMOE_BF16 ? 0x1p-8 : args->y_dtype == EPMOE_F16 ? 0x1p-11 : 0x1p-24;
    for (int64_t t = 0; t < args->num_tokens; t++)
        for (int64_t n = 0; n < args->n; n++) {
            double sum = c->bias ? (double)c->bias[n] : 0, size = fabs(sum);
            for (int64_t k = 0; k < args->k; k++) {
                double term = c->x_values[t * args->k + k] * c->w_values[n * args->k + k];
                sum += term, size += fabs(term);
            }
            double got = (double)epmoei_load(y, args->y_dtype, t * args->n + n);
            double allowed = half_ulp * fabs(sum) + (args->k + 4) * 0x1p-24 * size;
            cr_assert(fabs(got - sum) <= allowed, "%s: T %d N %d K %d format %d x_quant %d: y[%d,%d] is %g, not %g",
                      what, args->num_tokens, args->n, args->k, (int)args->weight.format, (int)args->x_quant, (int)t,
                      (int)n, got, sum);
        }
}

static void check(testing_rng_t *rng, const shape_t *shape)
{
    case_t c = make_case(rng, shape);
    run_reference(&c.args, c.reference);
    run(&c.args);
    expect_close(&c, c.reference, "ref");
    expect_close(&c, c.y, "cpu");
    free_case(&c);
}

static const int32_t sizes[][3] = {{1, 1, 1}, {1, 40, 136}, {3, 7, 129}, {70, 65, 200}, {130, 96, 384}};
enum { kSizes = sizeof sizes / sizeof *sizes };

Test(linear, plain_against_double_precision)
{
    testing_rng_t rng = testing_rng(testing_seed());
    static const epmoe_dtype_t dtypes[] = {EPMOE_F32, EPMOE_BF16, EPMOE_F16};
    for (int i = 0; i < kSizes; i++)
        for (int d = 0; d < 9; d++)
            check(&rng, &(shape_t){.tokens = sizes[i][0],
                                   .n = sizes[i][1],
                                   .k = sizes[i][2],
                                   .x_dtype = dtypes[d % 3],
                                   .y_dtype = dtypes[d / 3],
                                   .format = epmoei_format_of_dtype(dtypes[d % 3]),
                                   .bias = (i + d) % 2});
}

Test(linear, quantised_against_double_precision)
{
    testing_rng_t rng = testing_rng(testing_seed() + 1);
    static const epmoe_dtype_t dtypes[] = {EPMOE_BF16, EPMOE_F32, EPMOE_F16};
    static const int32_t groups[][2] = {{-1, 1}, {-1, -1}, {128, 128}};
    for (int i = 0; i < kSizes; i++)
        for (int quant = 0; quant <= EPMOE_GRANULARITY_BLOCK128; quant++)
            for (int g = 0; g < 3; g++) {
                bool outside = quant == EPMOE_GRANULARITY_TENSOR || quant == EPMOE_GRANULARITY_TOKEN;
                if (outside && g == 2) continue;
                check(&rng, &(shape_t){.tokens = sizes[i][0],
                                       .n = sizes[i][1],
                                       .k = sizes[i][2],
                                       .x_dtype = dtypes[(i + g) % 3],
                                       .y_dtype = dtypes[(i + quant) % 3],
                                       .format = EPMOE_FORMAT_FP8_BLOCK,
                                       .x_quant = (epmoe_granularity_t)quant,
                                       .group_size = groups[g][0],
                                       .group_rows = groups[g][1],
                                       .scales_dtype = dtypes[i % 3],
                                       .bias = (i + quant + g) % 2});
            }
    for (int i = 0; i < kSizes; i++)
        check(&rng, &(shape_t){.tokens = sizes[i][0],
                               .n = sizes[i][1],
                               .k = sizes[i][2],
                               .x_dtype = EPMOE_BF16,
                               .y_dtype = EPMOE_BF16,
                               .format = EPMOE_FORMAT_W4});
}

/* What epmoe_quantize_fp8 makes gives the same bits as x itself, with every granularity. */
Test(linear, given_codes_are_those_that_it_makes)
{
    testing_rng_t rng = testing_rng(testing_seed() + 2);
    for (int quant = EPMOE_GRANULARITY_TENSOR; quant <= EPMOE_GRANULARITY_BLOCK128; quant++) {
        bool block = quant == EPMOE_GRANULARITY_BLOCK128;
        shape_t s = {.tokens = 9, .n = 33, .k = 300, .x_dtype = EPMOE_BF16, .y_dtype = EPMOE_F32, .bias = true};
        s.format = EPMOE_FORMAT_FP8_BLOCK;
        s.x_quant = (epmoe_granularity_t)quant;
        s.group_size = block ? 128 : -1;
        s.group_rows = block ? 128 : 1;
        s.scales_dtype = EPMOE_F32;
        case_t c = make_case(&rng, &s);
        run(&c.args);
        void *codes = testing_buffer(9 * 300, 0);
        float *scales = testing_buffer(9 * 3 * 4, 0);
        epmoe_quantize_fp8_args_t quantize = EPMOE_QUANTIZE_FP8_ARGS_INIT;
        quantize.backend = EPMOE_BACKEND_CPU;
        quantize.num_tokens = 9;
        quantize.hidden = 300;
        quantize.dtype = EPMOE_BF16;
        quantize.granularity = s.x_quant;
        quantize.x = c.x;
        quantize.q = codes;
        quantize.scale = scales;
        cr_assert_eq(epmoe_quantize_fp8(&quantize, NULL), EPMOE_OK, "%s", epmoe_last_error());
        epmoe_linear_args_t given = c.args;
        given.x = codes;
        given.x_dtype = EPMOE_F8_E4M3;
        given.x_scale = scales;
        given.y = c.reference;
        run(&given);
        /* Values of 128 columns are rounded by the product itself, in its own order. */
        if (block)
            expect_close(&c, c.reference, "given codes");
        else
            cr_assert(op_same_bits(c.y, c.reference, EPMOE_F32, 9 * 33), "x_quant %d", quant);
        if (quant == EPMOE_GRANULARITY_TENSOR) { /* and a static scale that is the dynamic one */
            epmoe_linear_args_t fixed = c.args;
            fixed.x_scale = scales;
            fixed.y = c.reference;
            memset(c.reference, 0xFF, 9 * 33 * 4);
            run(&fixed);
            cr_assert(op_same_bits(c.y, c.reference, EPMOE_F32, 9 * 33));
        }
        testing_buffer_free(codes), testing_buffer_free(scales);
        free_case(&c);
    }
}

Test(linear, nan_stays_in_its_row_and_column)
{
    testing_rng_t rng = testing_rng(testing_seed() + 3);
    for (int tokens = 5; tokens <= 80; tokens += 75)
        for (int quant = 0; quant <= EPMOE_GRANULARITY_TOKEN; quant += EPMOE_GRANULARITY_TOKEN) {
            shape_t s = {.tokens = tokens, .n = 6, .k = 40, .x_dtype = EPMOE_BF16, .y_dtype = EPMOE_BF16};
            s.format = quant ? EPMOE_FORMAT_FP8_BLOCK : EPMOE_FORMAT_BF16;
            s.x_quant = (epmoe_granularity_t)quant;
            s.group_size = -1;
            s.group_rows = 1;
            s.scales_dtype = EPMOE_F32;
            case_t c = make_case(&rng, &s);
            epmoei_store(c.x, EPMOE_BF16, 2 * 40 + 7, NAN);
            if (quant)
                ((uint8_t *)c.w)[4 * 40 + 3] = 0x7F;
            else
                epmoei_store(c.w, EPMOE_BF16, 4 * 40 + 3, NAN);
            run_reference(&c.args, c.reference);
            run(&c.args);
            for (int64_t i = 0; i < (int64_t)tokens * 6; i++) {
                bool expected = i / 6 == 2 || i % 6 == 4;
                cr_assert_eq(isnan(epmoei_load(c.y, EPMOE_BF16, i)) != 0, expected, "cpu, T %d [%d]", tokens, (int)i);
                cr_assert_eq(isnan(epmoei_load(c.reference, EPMOE_BF16, i)) != 0, expected, "ref [%d]", (int)i);
            }
            free_case(&c);
        }
}

/* -------------------------------------------------------------------------------------------------------- rejected */

static int64_t poison_bytes;
#define UNTOUCHED testing_is_poison(args.y, 0, poison_bytes)

Test(linear, rejected_calls_write_nothing)
{
    testing_rng_t rng = testing_rng(testing_seed() + 4);
    shape_t s = {.tokens = 3, .n = 4, .k = 256, .x_dtype = EPMOE_BF16, .y_dtype = EPMOE_BF16};
    s.format = EPMOE_FORMAT_FP8_BLOCK;
    s.x_quant = EPMOE_GRANULARITY_TOKEN;
    s.group_size = -1;
    s.group_rows = 1;
    s.scales_dtype = EPMOE_F32;
    case_t c = make_case(&rng, &s);
    epmoe_linear_args_t args = c.args;
    const float one = 1, zero = 0;
    poison_bytes = 3 * 4 * 2;
    cr_assert_eq(epmoe_linear_workspace_size(&args, &args.workspace_bytes), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_geq(args.workspace_bytes, 3 * 256 * 5);
    args.workspace = testing_buffer(args.workspace_bytes, 0);

#define INVALID(needle, statement) OP_INVALID(epmoe_linear, args, needle, UNTOUCHED, statement)
    INVALID("num_tokens", bad.num_tokens = -1);
    INVALID("n is 0", bad.n = 0);
    INVALID("k is 0", bad.k = 0);
    INVALID("x is [2147483647,2147483647,1]: its size overflows", bad.num_tokens = bad.k = INT32_MAX);
    INVALID("x_dtype", bad.x_dtype = EPMOE_I32);
    INVALID("y_dtype", bad.y_dtype = EPMOE_F8_E4M3);
    INVALID("x_quant", bad.x_quant = (epmoe_granularity_t)4);
    INVALID("x_quant", bad.x_quant = 0; bad.x_dtype = EPMOE_F8_E4M3);
    INVALID("x_scale", bad.x_dtype = EPMOE_F8_E4M3);
    INVALID("x_scale", bad.x_scale = &one);
    INVALID("static_scale", bad.x_quant = EPMOE_GRANULARITY_TENSOR; bad.x_scale = &zero);
    INVALID("weight.format", bad.weight.format = (epmoe_format_t)77);
    INVALID("weight.format", bad.weight.format = EPMOE_FORMAT_BF16);
    INVALID("weight.storage is 7", bad.weight.storage = (epmoe_storage_t)7);
    INVALID("weight.storage is 7", bad.weight.format = EPMOE_FORMAT_BF16; bad.weight.storage = (epmoe_storage_t)7);
    INVALID("weight.group_size", bad.weight.group_size = 128);
    INVALID("weight.group_rows", bad.weight.group_rows = 2);
    INVALID("weight.scales_dtype", bad.weight.scales_dtype = EPMOE_F8_E8M0);
    INVALID("weight.data", bad.weight.data = NULL);
    INVALID("weight.scales", bad.weight.scales = NULL);
    INVALID("x is NULL", bad.x = NULL);
    INVALID("y is NULL", bad.y = NULL);
    INVALID("reserved", bad.reserved = 1);
    INVALID("workspace_bytes", bad.workspace_bytes--);
    INVALID("workspace is NULL", bad.workspace = NULL);
    cr_assert_eq(epmoe_linear_workspace_size(&args, NULL), EPMOE_ERROR_INVALID_ARGUMENT);
    int64_t bytes = -7;
    epmoe_linear_args_t wrong = args;
    wrong.n = 0;
    cr_assert_eq(epmoe_linear_workspace_size(&wrong, &bytes), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert_eq(bytes, -7);
    wrong.n = 4;
    wrong.num_tokens = wrong.k = INT32_MAX;
    cr_assert_eq(epmoe_linear_workspace_size(&wrong, &bytes), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert_eq(bytes, -7);

    /* Nothing to do. */
    epmoe_linear_args_t empty = args;
    empty.num_tokens = 0;
    empty.x = empty.y = empty.workspace = NULL;
    empty.weight.data = empty.weight.scales = NULL;
    empty.workspace_bytes = 0;
    cr_assert_eq(epmoe_linear_workspace_size(&empty, &bytes), EPMOE_OK);
    cr_assert_eq(bytes, 0);
    cr_assert_eq(epmoe_linear(&empty, NULL), EPMOE_OK, "%s", epmoe_last_error());

    OP_STRUCT_SIZES(epmoe_linear, args, sizeof args, UNTOUCHED, !UNTOUCHED);
    expect_close(&c, c.y, "cpu");
    testing_buffer_free(args.workspace);
    free_case(&c);
}

Test(linear, floor_by_hand)
{
    const float number = 1;
    epmoe_linear_args_t args = make(10, 3, 8, EPMOE_BF16, &number, EPMOE_FORMAT_BF16, &number), checked;
    args.y_dtype = EPMOE_F32;
    args.y = &checked;
    args.bias = &number;
    cr_assert_eq(epmoei_linear_check(&args, &checked), EPMOE_OK, "%s", epmoe_last_error());
    epmoei_floor_t least = epmoei_linear_floor(&checked);
    cr_assert_eq(least.bytes, 10 * 8 * 2 + 3 * 8 * 2 + 10 * 3 * 4 + 3 * 4);
    cr_assert_eq(least.flops, 2 * 10 * 3 * 8);
    args.weight.format = EPMOE_FORMAT_FP8_BLOCK;
    args.weight.group_size = -1;
    args.weight.group_rows = 1;
    args.weight.scales = &number;
    args.x_quant = EPMOE_GRANULARITY_TOKEN;
    args.x_dtype = EPMOE_F8_E4M3;
    args.x_scale = &number;
    cr_assert_eq(epmoei_linear_check(&args, &checked), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(epmoei_linear_floor(&checked).bytes, 10 * 8 + 10 * 4 + 3 * 8 + 3 * 4 + 10 * 3 * 4 + 3 * 4);
}
