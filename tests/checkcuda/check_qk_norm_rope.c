#include "dense_layers/qk_norm_rope.h"
#include "tests/checkcuda/check.h"

#include <math.h>
#include <stdio.h>

static epmoe_status_t run(const void *args, epmoe_stream_t stream) { return epmoe_qk_norm_rope(args, stream); }

static epmoe_status_t reference(const void *args)
{
    epmoe_qk_norm_rope_args_t checked;
    EPMOEI_CHECK(epmoei_qk_norm_rope_check(args, &checked));
    return checked.num_tokens ? epmoei_qk_norm_rope_ref(&checked, NULL) : EPMOE_OK;
}

static const check_op_t op = {"qk_norm_rope", sizeof(epmoe_qk_norm_rope_args_t), run, reference};

static const epmoe_dtype_t dtypes[] = {EPMOE_BF16, EPMOE_F16, EPMOE_F32};

enum { kPositions = 29 };

typedef struct shape_t {
    int32_t tokens, heads, kv_heads, dim, rotary, pad; /* pad: columns behind each token */
    epmoe_dtype_t dtype, weight_dtype;
    epmoe_rope_style_t style;
    bool offset;
} shape_t;

/* Heads of very different size, among them zeros and such as overflow when squared. The v heads are data as well. */
static void fill(testing_rng_t *rng, check_case_t *c, const shape_t *shape)
{
    static const float sizes[] = {1, 1, 1e-3f, 8e3f, 0, 1, 4e37f};
    const check_field_t *qkv = check_find(c, "qkv");
    int64_t heads = shape->heads + 2 * (int64_t)shape->kv_heads, size = epmoe_dtype_size(shape->dtype);
    for (int64_t t = 0; t < shape->tokens; t++)
        for (int64_t h = 0; h < heads; h++) {
            float scale = sizes[(t + h) % 7];
            if (shape->dtype == EPMOE_F16) scale = fminf(scale, 8e3f);
            testing_fill_normal(rng, qkv->host + (t * qkv->cols + h * shape->dim) * size, shape->dtype, shape->dim,
                                scale);
        }
    testing_fill_normal(rng, check_find(c, "q_weight")->host, shape->weight_dtype, shape->dim, 1.0f);
    testing_fill_normal(rng, check_find(c, "k_weight")->host, shape->weight_dtype, shape->dim, 1.0f);
    int64_t *positions = (int64_t *)(void *)check_find(c, "positions")->host;
    for (int64_t t = 0; t < shape->tokens; t++) positions[t] = testing_range(rng, 0, kPositions - 1);
}

static void make(check_case_t *c, testing_rng_t *rng, const shape_t *shape)
{
    check_case(c, &op, "T %d heads %d+%d D %d rot %d pad %d %s weights %s style %d offset %d", shape->tokens,
               shape->heads, shape->kv_heads, shape->dim, shape->rotary, shape->pad, epmoe_dtype_string(shape->dtype),
               epmoe_dtype_string(shape->weight_dtype), (int)shape->style, shape->offset);
    epmoe_qk_norm_rope_args_t args = EPMOE_QK_NORM_ROPE_ARGS_INIT;
    int64_t tokens = shape->tokens, dim = shape->dim;
    args.num_tokens = shape->tokens;
    args.num_heads = shape->heads;
    args.num_kv_heads = shape->kv_heads;
    args.head_dim = shape->dim;
    args.rotary_dim = shape->rotary;
    args.style = shape->style;
    args.dtype = shape->dtype;
    args.weight_dtype = shape->weight_dtype;
    args.qkv_stride = (shape->heads + 2 * (int64_t)shape->kv_heads) * dim + shape->pad;
    args.weight_offset = shape->offset;
    args.num_positions = kPositions;
    memcpy(c->args, &args, sizeof args);
    CHECK_ADD(c, epmoe_qk_norm_rope_args_t, qkv, CHECK_OUT, shape->dtype, tokens, args.qkv_stride, 16);
    CHECK_ADD(c, epmoe_qk_norm_rope_args_t, q_weight, CHECK_IN, shape->weight_dtype, 1, dim, 16);
    CHECK_ADD(c, epmoe_qk_norm_rope_args_t, k_weight, CHECK_IN, shape->weight_dtype, 1, dim, 16);
    CHECK_ADD(c, epmoe_qk_norm_rope_args_t, positions, CHECK_IN, EPMOE_I64, 1, tokens, 8);
    float *table = CHECK_ADD(c, epmoe_qk_norm_rope_args_t, cos_sin, CHECK_IN, EPMOE_F32, kPositions, shape->rotary, 16);
    int32_t half = shape->rotary / 2;
    for (int64_t p = 0; p < kPositions; p++)
        for (int32_t i = 0; i < half; i++) {
            double angle = 0.3 + (double)p * pow(100, -(double)i / half);
            table[p * shape->rotary + i] = (float)cos(angle);
            table[p * shape->rotary + half + i] = (float)sin(angle);
        }
    if (tokens) fill(rng, c, shape);
}

static void run_one(testing_rng_t *rng, const shape_t *shape)
{
    check_case_t c;
    make(&c, rng, shape);
    check_run(&c);
    check_free(&c);
}

/* Public models' heads, and such as no part of a warp holds in whole 16 bytes. */
static void check_shapes(testing_rng_t *rng)
{
    static const int32_t heads[][4] = {{32, 4, 128, 128}, {64, 8, 64, 64},  {96, 8, 128, 64},   {16, 16, 128, 128},
                                       {3, 1, 192, 64},   {5, 2, 80, 80},   {1, 1, 2, 2},       {7, 1, 6, 4},
                                       {2, 1, 96, 16},    {2, 3, 512, 512}, {1, 1, 1040, 1024}, {40, 8, 256, 256}};
    static const int32_t tokens[] = {0, 1, 5, 16, 300, 4099};
    check_begin("qk_norm_rope", "2 to 104 heads, D 2..1040, T 0..4099");
    int32_t variant = 0;
    for (size_t h = 0; h < sizeof heads / sizeof *heads; h++)
        for (size_t t = 0; t < sizeof tokens / sizeof *tokens; t++)
            for (int32_t style = 0; style < 2; style++, variant++) {
                const int32_t *of = heads[h];
                int64_t elements = (int64_t)tokens[t] * (of[0] + 2 * of[1]) * of[2];
                if (elements > 8 << 20 || check_skips(elements)) continue;
                shape_t shape = {.tokens = tokens[t],
                                 .heads = of[0],
                                 .kv_heads = of[1],
                                 .dim = of[2],
                                 .rotary = of[3],
                                 .dtype = dtypes[variant / 2 % 3],
                                 .weight_dtype = dtypes[variant / 2 % 3],
                                 .style = (epmoe_rope_style_t)style,
                                 .offset = variant / 3 % 2};
                run_one(rng, &shape);
            }
    check_end();
}

static void check_options(testing_rng_t *rng)
{
    check_begin("qk_norm_rope", "every dtype, weight dtype, style, stride");
    for (int32_t i = 0; i < 3 * 3 * 2 * 2 * 3; i += check_step(5)) {
        int32_t pads = i / 36;
        shape_t shape = {.tokens = testing_range(rng, 1, 20),
                         .heads = testing_range(rng, 1, 9),
                         .kv_heads = testing_range(rng, 1, 3),
                         .dim = pads == 2 ? 70 : 96,
                         .rotary = pads == 2    ? 34
                                   : i / 18 % 2 ? 64
                                                : 96,
                         .dtype = dtypes[i % 3],
                         .weight_dtype = dtypes[i / 3 % 3],
                         .style = (epmoe_rope_style_t)(i / 9 % 2),
                         .offset = i / 18 % 2,
                         .pad = pads == 1 ? 24 : pads};
        run_one(rng, &shape);
    }
    check_end();
}

static void refill(check_case_t *c, int32_t round, void *ctx)
{
    const shape_t *shape = ctx;
    testing_rng_t rng = testing_rng((uint64_t)round + 55);
    fill(&rng, c, shape);
}

/* Tokens whose position is outside the table stay as they are, not even normalised. */
static void check_bad_positions(check_case_t *c, const shape_t *shape)
{
    check_field_t *positions = check_find(c, "positions"), *qkv = check_find(c, "qkv");
    int64_t *bad = testing_buffer(positions->bytes, 0);
    int64_t row = qkv->cols * epmoe_dtype_size(shape->dtype);
    int32_t count = 0;
    if (!check_expect(c)) return;
    memcpy(bad, positions->host, (size_t)positions->bytes);
    for (int64_t t = 2; t < shape->tokens; t += 5, count++) {
        bad[t] = t == 7 ? (int64_t)1 << 32 : count % 2 ? -1 : kPositions + t;
        memcpy(qkv->expected + t * row, qkv->host + t * row, (size_t)row);
    }
    check_upload(c);
    check_send(positions, (const char *)bad);
    epmoe_status_t status = check_launch(c);
    if (status != EPMOE_OK)
        check_fail(c, "bad positions: status %d: %s", (int)status, epmoe_last_error());
    else if (check_download(c))
        check_outputs(c);
    char text[32];
    snprintf(text, sizeof text, "%d ids", count);
    status = check_launch(c);
    if (status != EPMOE_ERROR_INVALID_ARGUMENT || strncmp(epmoe_last_error(), text, strlen(text)))
        check_fail(c, "after %d bad positions the next call gave status %d: %s", count, (int)status,
                   epmoe_last_error());
    testing_buffer_free(bad);
}

static void check_calls(testing_rng_t *rng)
{
    check_begin("qk_norm_rope", "NaN heads, graphs, alignment, positions outside the table");
    for (int32_t i = 0; i < 4; i++) {
        shape_t shape = {.tokens = 21,
                         .heads = 6,
                         .kv_heads = 2,
                         .dim = i % 2 ? 128 : 66,
                         .rotary = i % 2 ? 128 : 64,
                         .dtype = EPMOE_BF16,
                         .weight_dtype = i / 2 ? EPMOE_BF16 : EPMOE_F32,
                         .style = (epmoe_rope_style_t)(i / 2)};
        check_case_t c;
        make(&c, rng, &shape);
        char *qkv = check_find(&c, "qkv")->host;
        int64_t stride = check_find(&c, "qkv")->cols;
        epmoei_store(qkv, EPMOE_BF16, 3 * stride + 2 * shape.dim + 1, NAN);
        epmoei_store(qkv, EPMOE_BF16, 4 * stride + 7 * shape.dim - 1, INFINITY);
        check_run(&c);
        check_misaligned(&c);
        check_graph(&c, refill, &shape);
        check_bad_positions(&c, &shape);
        check_free(&c);
    }
    check_end();
}

void check_qk_norm_rope(testing_rng_t *rng)
{
    check_shapes(rng);
    check_options(rng);
    check_calls(rng);
}
