/* Projections of every type and granularity: cuBLASLt where it multiplies, the grouped GEMM for the rest. */
#include "base/device.h"
#include "base/dtype.h"
#include "dense_layers/linear_op.h"
#include "tests/checkcuda/check.h"
#include "tests/checkcuda/check_fp8.h"

#include <math.h>

static epmoe_status_t run(const void *args, epmoe_stream_t stream) { return epmoe_linear(args, stream); }

static epmoe_status_t reference(const void *args)
{
    epmoe_linear_args_t checked;
    EPMOEI_CHECK(epmoei_linear_check(args, &checked));
    return checked.num_tokens ? epmoei_linear_ref(&checked, NULL) : EPMOE_OK;
}

static const check_op_t op = {"linear", sizeof(epmoe_linear_args_t), run, reference};

typedef struct shape_t {
    int32_t tokens, n, k;
    epmoe_dtype_t dtype, y_dtype;
    epmoe_granularity_t x_quant; /* 0: weights of dtype */
    bool bias;
    bool codes;        /* x is E4M3 */
    bool static_scale; /* x is quantised with one that the caller has */
    int32_t group;     /* of the weight's scales: columns; */
    int32_t group_rows;
    epmoe_dtype_t scales_dtype;
} shape_t;

static void add_weight(check_case_t *c, testing_rng_t *rng, const shape_t *shape)
{
    int64_t n = shape->n, k = shape->k;
    if (shape->x_quant == 0) {
        void *w = CHECK_ADD(c, epmoe_linear_args_t, weight.data, CHECK_IN, shape->dtype, n, k, 16);
        check_fill_normal(rng, w, shape->dtype, n * k, 1.0f / sqrtf((float)k));
        return;
    }
    int64_t scales = check_fp8_scales(shape->group, shape->group_rows, n, k, false);
    void *w = CHECK_ADD(c, epmoe_linear_args_t, weight.data, CHECK_IN, EPMOE_F8_E4M3, n, k, 16);
    void *of = CHECK_ADD(c, epmoe_linear_args_t, weight.scales, CHECK_IN, shape->scales_dtype, 1, scales, 16);
    check_fp8_weight(rng, w, n * k, of, shape->scales_dtype, scales, shape->k);
}

/* x of the caller's, as codes with their scales, as values with one scale, or as values. */
static void add_x(check_case_t *c, testing_rng_t *rng, const shape_t *shape)
{
    int64_t tokens = shape->tokens, k = shape->k, scales = 1;
    if (shape->x_quant == EPMOE_GRANULARITY_TOKEN) scales = tokens;
    if (shape->x_quant == EPMOE_GRANULARITY_BLOCK128) scales = tokens * ((k + 127) / 128);
    if (!shape->codes) {
        void *x = CHECK_ADD(c, epmoe_linear_args_t, x, CHECK_IN, shape->dtype, tokens, k, 16);
        check_fill_normal(rng, x, shape->dtype, tokens * k, 1.0f);
    } else
        CHECK_ADD(c, epmoe_linear_args_t, x, CHECK_IN, EPMOE_F8_E4M3, tokens, k, 16);
    if (!shape->codes && !shape->static_scale) return;
    float *scale = CHECK_ADD(c, epmoe_linear_args_t, x_scale, CHECK_IN, EPMOE_F32, 1, scales, 4);
    if (shape->codes)
        check_fp8_weight(rng, (uint8_t *)check_find(c, "x")->host, tokens * k, scale, EPMOE_F32, scales, 1);
    else
        *scale = 0.009f; /* clips what is above 4 */
}

static void make(check_case_t *c, testing_rng_t *rng, const shape_t *shape)
{
    check_case(c, &op, "T %d N %d K %d %s to %s x_quant %d bias %d codes %d static %d group %d rows %d %s",
               shape->tokens, shape->n, shape->k, epmoe_dtype_string(shape->dtype), epmoe_dtype_string(shape->y_dtype),
               (int)shape->x_quant, shape->bias, shape->codes, shape->static_scale, shape->group, shape->group_rows,
               epmoe_dtype_string(shape->scales_dtype));
    /* The tensor cores add products of E4M3 with about 14 bits. */
    c->tolerance = shape->x_quant ? 5e-3 : 4e-6 + 0x1p-21 * sqrt((double)shape->k);
    epmoe_linear_args_t args = EPMOE_LINEAR_ARGS_INIT;
    args.backend = EPMOE_BACKEND_CUDA;
    args.num_tokens = shape->tokens;
    args.n = shape->n;
    args.k = shape->k;
    args.x_dtype = shape->codes ? EPMOE_F8_E4M3 : shape->dtype;
    args.y_dtype = shape->y_dtype;
    args.x_quant = shape->x_quant;
    args.weight.struct_size = sizeof args.weight;
    args.weight.format = shape->x_quant ? EPMOE_FORMAT_FP8_BLOCK : epmoei_format_of_dtype(shape->dtype);
    args.weight.scales_dtype = shape->scales_dtype;
    args.weight.group_size = shape->group;
    args.weight.group_rows = shape->group_rows;
    const float some = 1;
    args.bias = shape->bias ? &some : NULL;
    if (epmoe_linear_workspace_size(&args, &args.workspace_bytes) != EPMOE_OK) check_fail(c, "%s", epmoe_last_error());
    args.bias = NULL;
    memcpy(c->args, &args, sizeof args);
    int64_t tokens = shape->tokens;
    add_x(c, rng, shape);
    add_weight(c, rng, shape);
    if (shape->bias) {
        void *bias = CHECK_ADD(c, epmoe_linear_args_t, bias, CHECK_IN, EPMOE_F32, 1, shape->n, 16);
        testing_fill_normal(rng, bias, EPMOE_F32, shape->n, 0.5f);
    }
    CHECK_ADD(c, epmoe_linear_args_t, y, CHECK_OUT, shape->y_dtype, tokens, shape->n, 16);
    CHECK_ADD(c, epmoe_linear_args_t, workspace, CHECK_SCRATCH, EPMOE_U8, 1, args.workspace_bytes, 16);
}

static void run_one(testing_rng_t *rng, const shape_t *shape)
{
    check_case_t c;
    make(&c, rng, shape);
    check_run(&c);
    check_free(&c);
}

static const epmoe_dtype_t dtypes[] = {EPMOE_BF16, EPMOE_F16};

/* Numbers of rows on both sides of every change of cuBLASLt's ways, and widths that it has none for. */
static void check_plain(testing_rng_t *rng)
{
    const int32_t tokens[] = {0, 1, 2, 16, 63, 129, 300}, widths[][2] = {{8, 8}, {72, 1000}, {512, 256}, {1000, 520}};
    check_begin(op.name, "16 bits, T 0..300, N 8..1000");
    for (size_t t = 0; t < sizeof tokens / sizeof *tokens; t++)
        for (size_t w = 0; w < sizeof widths / sizeof *widths; w++)
            for (int32_t bias = 0; bias < 2; bias++) {
                shape_t shape = {.tokens = tokens[t],
                                 .n = widths[w][0],
                                 .k = widths[w][1],
                                 .dtype = dtypes[(t + w) % 2],
                                 .bias = bias};
                shape.y_dtype = (t + w) % 3 == 1 ? EPMOE_F32 : shape.dtype;
                if (!check_skips((int64_t)shape.tokens * shape.n)) run_one(rng, &shape);
            }
    check_end();
}

/* By one expert of the grouped GEMM. */
static void check_blocks(testing_rng_t *rng)
{
    check_begin(op.name, "E4M3, scales of 128 columns");
    for (int32_t i = 0; i < 6; i++)
        run_one(rng, &(shape_t){.tokens = 1 + 31 * i,
                                .n = 256 + 16 * i,
                                .k = 384,
                                .dtype = dtypes[i % 2],
                                .y_dtype = dtypes[i % 2],
                                .x_quant = EPMOE_GRANULARITY_BLOCK128,
                                .group = 128,
                                .scales_dtype = EPMOE_F32,
                                .bias = i % 3 == 0});
    check_end();
}

/* Whatever x and its scales are by whatever the weight's are: one expert of the grouped GEMM. */
static void check_codes(testing_rng_t *rng)
{
    static const epmoe_dtype_t y_dtypes[] = {EPMOE_BF16, EPMOE_F16, EPMOE_F32},
                               scales[] = {EPMOE_F32, EPMOE_BF16, EPMOE_F16};
    const int32_t tokens[] = {1, 3, 16, 65, 200}, widths[][2] = {{16, 16}, {256, 272}, {1000, 528}, {33, 1040}};
    check_begin(op.name, "E4M3, every granularity");
    for (int32_t i = 0; i < 3 * 2 * 5 * 4 * 2; i += check_step(7)) {
        shape_t shape = {.x_quant = (epmoe_granularity_t)(1 + i % 3),
                         .codes = i / 3 % 2,
                         .tokens = tokens[i / 6 % 5],
                         .n = widths[i / 30 % 4][0],
                         .k = widths[i / 30 % 4][1],
                         .bias = i / 120,
                         .dtype = dtypes[testing_range(rng, 0, 1)],
                         .y_dtype = y_dtypes[testing_range(rng, 0, 2)],
                         .group = -1,
                         .group_rows = testing_range(rng, 0, 1) ? 1 : -1,
                         .scales_dtype = scales[testing_range(rng, 0, 2)]};
        const bool blocks = shape.x_quant == EPMOE_GRANULARITY_BLOCK128;
        if (blocks && testing_range(rng, 0, 1)) shape.group = shape.group_rows = 128;
        shape.static_scale = shape.x_quant == EPMOE_GRANULARITY_TENSOR && !shape.codes && testing_range(rng, 0, 1);
        run_one(rng, &shape);
    }
    check_end();
}

/* A NaN in a scale of x or w stays in its row or column. */
static void check_nan(testing_rng_t *rng)
{
    check_begin(op.name, "NaN in scales");
    for (int32_t i = 0; i < 4; i++) {
        shape_t shape = {.tokens = 20, .n = 272, .k = 144, .dtype = EPMOE_BF16, .y_dtype = EPMOE_BF16, .group = -1};
        shape.x_quant = EPMOE_GRANULARITY_TOKEN;
        shape.group_rows = 1;
        shape.scales_dtype = EPMOE_F32;
        shape.codes = true;
        shape.bias = i / 2;
        check_case_t c;
        make(&c, rng, &shape);
        epmoei_store(check_find(&c, i % 2 ? "x_scale" : "weight.scales")->host, EPMOE_F32, 7, NAN);
        check_run(&c);
        check_free(&c);
    }
    check_end();
}

static void check_refused(testing_rng_t *rng)
{
    static const struct {
        int32_t k, group;
        epmoe_dtype_t x_dtype;
        const char *message;
    } refused[] = {{136, -1, EPMOE_BF16, "k is 136"}, {136, 128, EPMOE_F8_E4M3, "k is 136"}};
    check_begin(op.name, "what has no kernel");
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        shape_t shape = {.tokens = 5, .n = 128, .k = 128, .dtype = EPMOE_BF16, .y_dtype = EPMOE_BF16};
        shape.x_quant = EPMOE_GRANULARITY_BLOCK128;
        shape.group = 128;
        shape.scales_dtype = EPMOE_F32;
        check_case_t c;
        make(&c, rng, &shape);
        epmoe_linear_args_t args = *(const epmoe_linear_args_t *)(const void *)c.args;
        args.k = refused[i].k;
        args.x_dtype = refused[i].x_dtype;
        args.weight.group_size = refused[i].group;
        if (refused[i].group == -1) args.x_quant = EPMOE_GRANULARITY_TOKEN, args.weight.group_rows = 1;
        int64_t bytes;
        epmoe_status_t status = epmoe_linear_workspace_size(&args, &bytes);
        if (status != EPMOE_ERROR_NOT_SUPPORTED || !strstr(epmoe_last_error(), refused[i].message))
            check_fail(&c, "status %d, \"%s\": expected NOT_SUPPORTED, \"%s\"", (int)status, epmoe_last_error(),
                       refused[i].message);
        check_free(&c);
    }
    check_end();
}

static void refill(check_case_t *c, int32_t round, void *ctx)
{
    const shape_t *shape = ctx;
    testing_rng_t rng = testing_rng((uint64_t)round + 77);
    check_fill_normal(&rng, check_find(c, "x")->host, shape->dtype, (int64_t)shape->tokens * shape->k, 1.0f);
}

static void check_calls(testing_rng_t *rng, bool blocks)
{
    check_begin(op.name, "graphs, alignment");
    for (int32_t i = 0; i < (blocks ? 4 : 1); i++) {
        shape_t shape = {.tokens = 40, .n = 256, .k = 512, .dtype = EPMOE_BF16, .y_dtype = EPMOE_BF16};
        if (i > 0) shape.scales_dtype = EPMOE_F32;
        if (i == 1) shape.x_quant = EPMOE_GRANULARITY_BLOCK128, shape.group = 128;
        if (i > 1) shape.x_quant = EPMOE_GRANULARITY_TOKEN, shape.group = -1, shape.group_rows = 1;
        shape.bias = i % 2;
        check_case_t c;
        make(&c, rng, &shape);
        check_run(&c);
        check_misaligned(&c);
        check_graph(&c, refill, &shape);
        check_free(&c);
    }
    check_end();
}

void check_linear(testing_rng_t *rng)
{
    bool blocks = !strcmp(epmoe_backend_arch(EPMOE_BACKEND_CUDA), "sm90"); /* by codes of x, that tier's alone */
    check_plain(rng);
    if (blocks) check_blocks(rng);
    if (blocks) check_codes(rng);
    if (blocks) check_nan(rng);
    if (blocks) check_refused(rng);
    check_calls(rng, blocks);
}
