/* Projections of every type and granularity: cuBLASLt where it multiplies, the grouped GEMM for the rest. */
#include "base/device.h"
#include "base/dtype.h"
#include "dense_layers/linear_op.h"
#include "tests/checkcuda/check.h"
#include "tests/checkcuda/check_fp8.h"
#include "tests/e4m3_oracle.h"

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
    bool codes;                  /* x is E4M3 */
    bool by_row;                 /* scales of w, with TENSOR and TOKEN */
    epmoe_dtype_t scales_dtype;
    bool bias;
} shape_t;

static bool outside(const shape_t *shape)
{
    return shape->x_quant == EPMOE_GRANULARITY_TENSOR || shape->x_quant == EPMOE_GRANULARITY_TOKEN;
}

static void fill_codes(testing_rng_t *rng, uint8_t *codes, int64_t count)
{
    for (int64_t i = 0; i < count; i++) codes[i] = e4m3_nearest(16.0 * (double)testing_normal(rng));
}

static void add_weight(check_case_t *c, testing_rng_t *rng, const shape_t *shape)
{
    int64_t n = shape->n, k = shape->k;
    if (shape->x_quant == 0) {
        void *w = CHECK_ADD(c, epmoe_linear_args_t, weight.data, CHECK_IN, shape->dtype, n, k, 16);
        check_fill_normal(rng, w, shape->dtype, n * k, 1.0f / sqrtf((float)k));
        return;
    }
    int64_t scales = !outside(shape) ? check_fp8_scales(128, n, k, false) : shape->by_row ? n : 1;
    void *w = CHECK_ADD(c, epmoe_linear_args_t, weight.data, CHECK_IN, EPMOE_F8_E4M3, n, k, 16);
    void *of = CHECK_ADD(c, epmoe_linear_args_t, weight.scales, CHECK_IN, shape->scales_dtype, 1, scales, 16);
    check_fp8_weight(rng, w, n * k, of, shape->scales_dtype, scales, shape->k);
}

static void make(check_case_t *c, testing_rng_t *rng, const shape_t *shape)
{
    check_case(c, &op, "T %d N %d K %d %s to %s x_quant %d codes %d by row %d scales %s bias %d", shape->tokens,
               shape->n, shape->k, epmoe_dtype_string(shape->dtype), epmoe_dtype_string(shape->y_dtype),
               (int)shape->x_quant, shape->codes, shape->by_row, epmoe_dtype_string(shape->scales_dtype), shape->bias);
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
    if (shape->x_quant) args.weight.scales_dtype = shape->scales_dtype;
    if (outside(shape)) {
        args.weight.group_size = -1;
        args.weight.group_rows = shape->by_row ? 1 : -1;
    }
    const float some = 1;
    args.bias = shape->bias ? &some : NULL;
    if (epmoe_linear_workspace_size(&args, &args.workspace_bytes) != EPMOE_OK) check_fail(c, "%s", epmoe_last_error());
    args.bias = NULL;
    memcpy(c->args, &args, sizeof args);
    int64_t tokens = shape->tokens, k = shape->k;
    void *x = CHECK_ADD(c, epmoe_linear_args_t, x, CHECK_IN, args.x_dtype, tokens, k, 16);
    if (shape->codes) {
        int64_t scales = shape->x_quant == EPMOE_GRANULARITY_TOKEN ? tokens : 1;
        float *of = CHECK_ADD(c, epmoe_linear_args_t, x_scale, CHECK_IN, EPMOE_F32, 1, scales, 16);
        for (int64_t i = 0; i < scales; i++) of[i] = testing_uniform(rng, 0.02f, 0.2f);
        fill_codes(rng, x, tokens * k);
    } else
        check_fill_normal(rng, x, shape->dtype, tokens * k, 1.0f);
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
static const epmoe_dtype_t y_dtypes[] = {EPMOE_BF16, EPMOE_F32, EPMOE_F16};

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

static void check_codes(testing_rng_t *rng)
{
    const int32_t tokens[] = {1, 2, 15, 64, 130, 257}, widths[][2] = {{16, 16}, {272, 400}, {512, 1024}};
    check_begin(op.name, "E4M3, scales of tensors, rows, both");
    for (int32_t i = 0; i < 6 * 3 * 2 * 2 * 2; i += check_step(7)) {
        shape_t shape = {.tokens = tokens[i % 6],
                         .n = widths[i / 6 % 3][0],
                         .k = widths[i / 6 % 3][1],
                         .dtype = dtypes[i / 3 % 2],
                         .y_dtype = y_dtypes[i % 3],
                         .x_quant = i / 18 % 2 ? EPMOE_GRANULARITY_TENSOR : EPMOE_GRANULARITY_TOKEN,
                         .by_row = i / 36 % 2,
                         .codes = i / 72 % 2,
                         .scales_dtype = i % 4 == 3 ? EPMOE_BF16 : EPMOE_F32,
                         .bias = i % 5 == 0};
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
                                .scales_dtype = EPMOE_F32,
                                .bias = i % 3 == 0});
    check_end();
}

static void refill(check_case_t *c, int32_t round, void *ctx)
{
    const shape_t *shape = ctx;
    testing_rng_t rng = testing_rng((uint64_t)round + 77);
    check_fill_normal(&rng, check_find(c, "x")->host, shape->dtype, (int64_t)shape->tokens * shape->k, 1.0f);
}

static void check_calls(testing_rng_t *rng, bool fp8)
{
    check_begin(op.name, "graphs, alignment");
    for (int32_t i = 0; i < (fp8 ? 3 : 1); i++) {
        shape_t shape = {.tokens = 40, .n = 256, .k = 512, .dtype = EPMOE_BF16, .y_dtype = EPMOE_BF16};
        shape.x_quant = i == 0 ? 0 : i == 1 ? EPMOE_GRANULARITY_TOKEN : EPMOE_GRANULARITY_TENSOR;
        shape.scales_dtype = EPMOE_F32;
        shape.by_row = true;
        shape.bias = i == 2;
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
    /* Scales by row are Hopper's alone, and so is the grouped GEMM of codes, of its tier. */
    bool hopper = epmoei_device_current()->arch == 90;
    check_plain(rng);
    if (hopper) check_codes(rng);
    if (!strcmp(epmoe_backend_arch(EPMOE_BACKEND_CUDA), "sm90")) check_blocks(rng);
    check_calls(rng, hopper);
}
