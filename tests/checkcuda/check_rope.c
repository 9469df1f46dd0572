#include "dense_layers/rope.h"
#include "tests/checkcuda/check.h"

#include <math.h>

static epmoe_status_t run(const void *args, epmoe_stream_t stream) { return epmoe_rope(args, stream); }

static epmoe_status_t reference(const void *args)
{
    epmoe_rope_args_t checked;
    EPMOEI_CHECK(epmoei_rope_check(args, &checked));
    return checked.num_tokens ? epmoei_rope_ref(&checked, NULL) : EPMOE_OK;
}

static const check_op_t op = {"rope", sizeof(epmoe_rope_args_t), run, reference};

static const epmoe_dtype_t dtypes[] = {EPMOE_BF16, EPMOE_F16, EPMOE_F32};

enum { kPositions = 37 };

typedef struct shape_t {
    int32_t tokens, heads, kv_heads, dim, rotary;
    epmoe_dtype_t dtype, positions_dtype;
    epmoe_rope_style_t style;
    bool inverse;
    int32_t head_pad, token_pad; /* columns behind each head, and each token */
} shape_t;

static void set_position(const check_field_t *field, int64_t t, int64_t position)
{
    if (field->dtype == EPMOE_I64)
        ((int64_t *)(void *)field->host)[t] = position;
    else
        ((int32_t *)(void *)field->host)[t] = (int32_t)position;
}

static void fill(testing_rng_t *rng, check_case_t *c, const shape_t *shape)
{
    static const float edges[] = {NAN, -INFINITY, INFINITY, -0.0f, 3e38f, 1e-40f};
    for (int32_t k = 0; k < 1 + (shape->kv_heads > 0); k++) {
        const check_field_t *field = check_find(c, k ? "k" : "q");
        int64_t n = field->rows * field->cols;
        check_fill_normal(rng, field->host, shape->dtype, n, 1.0f);
        for (int64_t i = 7; i < n; i += testing_range(rng, 50, 500))
            epmoei_store(field->host, shape->dtype, i, edges[testing_range(rng, 0, 5)]);
    }
    const check_field_t *positions = check_find(c, "positions");
    for (int64_t t = 0; t < shape->tokens; t++) set_position(positions, t, testing_range(rng, 0, kPositions - 1));
    if (shape->tokens > 1) set_position(positions, 1, kPositions - 1);
}

static void make(check_case_t *c, testing_rng_t *rng, const shape_t *shape)
{
    check_case(c, &op, "T %d heads %d+%d D %d rot %d %s %s style %d inverse %d pads %d %d", shape->tokens, shape->heads,
               shape->kv_heads, shape->dim, shape->rotary, epmoe_dtype_string(shape->dtype),
               epmoe_dtype_string(shape->positions_dtype), (int)shape->style, shape->inverse, shape->head_pad,
               shape->token_pad);
    c->compare = check_compare_bits;
    epmoe_rope_args_t args = EPMOE_ROPE_ARGS_INIT;
    int64_t tokens = shape->tokens, head = shape->dim + shape->head_pad;
    args.num_tokens = shape->tokens;
    args.num_heads = shape->heads;
    args.num_kv_heads = shape->kv_heads;
    args.head_dim = shape->dim;
    args.rotary_dim = shape->rotary;
    args.style = shape->style;
    args.inverse = shape->inverse;
    args.dtype = shape->dtype;
    args.head_stride = head;
    args.q_stride = shape->heads * head + shape->token_pad;
    args.k_stride = shape->kv_heads ? shape->kv_heads * head + shape->token_pad : 0;
    args.positions_dtype = shape->positions_dtype;
    args.num_positions = kPositions;
    memcpy(c->args, &args, sizeof args);
    CHECK_ADD(c, epmoe_rope_args_t, q, CHECK_OUT, shape->dtype, tokens, args.q_stride, 16);
    if (shape->kv_heads) CHECK_ADD(c, epmoe_rope_args_t, k, CHECK_OUT, shape->dtype, tokens, args.k_stride, 16);
    CHECK_ADD(c, epmoe_rope_args_t, positions, CHECK_IN, shape->positions_dtype, 1, tokens,
              epmoe_dtype_size(shape->positions_dtype));
    float *table = CHECK_ADD(c, epmoe_rope_args_t, cos_sin, CHECK_IN, EPMOE_F32, kPositions, shape->rotary, 16);
    int32_t half = shape->rotary / 2;
    for (int64_t p = 0; p < kPositions; p++)
        for (int32_t i = 0; i < half; i++) {
            double angle = (double)p * pow(100, -(double)i / half);
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

/* Public models' heads, and widths that no 16 bytes divide. */
static void check_shapes(testing_rng_t *rng)
{
    static const int32_t heads[][4] = {{32, 4, 128, 128}, {64, 8, 64, 64},   {96, 8, 128, 64},   {128, 1, 64, 64},
                                       {3, 0, 192, 64},   {5, 2, 80, 80},    {1, 1, 2, 2},       {7, 1, 6, 4},
                                       {2, 1, 36, 20},    {1, 1, 1026, 514}, {1, 0, 4096, 4096}, {300, 300, 16, 16}};
    static const int32_t tokens[] = {0, 1, 5, 16, 300, 4099};
    check_begin("rope", "1 to 600 heads, D 2..4096, T 0..4099");
    int32_t variant = 0;
    for (size_t h = 0; h < sizeof heads / sizeof *heads; h++)
        for (size_t t = 0; t < sizeof tokens / sizeof *tokens; t++)
            for (int32_t style = 0; style < 2; style++, variant++) {
                const int32_t *of = heads[h];
                int64_t elements = (int64_t)tokens[t] * (of[0] + of[1]) * of[2];
                if (elements > 8 << 20 || check_skips(elements)) continue;
                shape_t shape = {.tokens = tokens[t],
                                 .heads = of[0],
                                 .kv_heads = of[1],
                                 .dim = of[2],
                                 .rotary = of[3],
                                 .dtype = dtypes[variant / 2 % 3],
                                 .positions_dtype = variant % 4 < 2 ? EPMOE_I64 : EPMOE_I32,
                                 .style = (epmoe_rope_style_t)style,
                                 .inverse = variant / 3 % 2};
                run_one(rng, &shape);
            }
    check_end();
}

static void check_options(testing_rng_t *rng)
{
    check_begin("rope", "every dtype, style, direction, stride");
    for (int32_t i = 0; i < 3 * 2 * 2 * 2 * 3; i += check_step(5)) {
        int32_t pads = i / 24;
        shape_t shape = {.tokens = testing_range(rng, 1, 20),
                         .heads = testing_range(rng, 1, 9),
                         .kv_heads = testing_range(rng, 0, 3),
                         .dim = pads == 2 ? 70 : 96,
                         .rotary = pads == 2 ? 34 : 64,
                         .dtype = dtypes[i % 3],
                         .style = (epmoe_rope_style_t)(i / 3 % 2),
                         .inverse = i / 6 % 2,
                         .positions_dtype = i / 12 % 2 ? EPMOE_I32 : EPMOE_I64,
                         .head_pad = pads == 1 ? 16 : pads,
                         .token_pad = pads == 1 ? 24 : pads};
        run_one(rng, &shape);
    }
    check_end();
}

static void refill(check_case_t *c, int32_t round, void *ctx)
{
    const shape_t *shape = ctx;
    testing_rng_t rng = testing_rng((uint64_t)round + 99);
    fill(&rng, c, shape);
}

/* Row 0 of the table turns nothing: what it gives is what a position outside the table must. */
static void check_bad_positions(check_case_t *c, testing_rng_t *rng, const shape_t *shape)
{
    const check_field_t *positions = check_find(c, "positions");
    char *bad = testing_buffer(positions->bytes, 0);
    int32_t count = 0;
    check_fill_normal(rng, check_find(c, "q")->host, shape->dtype, check_find(c, "q")->rows * check_find(c, "q")->cols,
                      1.0f);
    check_fill_normal(rng, check_find(c, "k")->host, shape->dtype, check_find(c, "k")->rows * check_find(c, "k")->cols,
                      1.0f);
    for (int32_t t = 1; t < shape->tokens; t += 4) set_position(positions, t, 0);
    memcpy(bad, positions->host, (size_t)positions->bytes);
    for (int32_t t = 1; t < shape->tokens; t += 4, count++) {
        int64_t wide = t % 8 == 1 ? -1 - t : (int64_t)kPositions + t / 8 * 1000000;
        if (positions->dtype == EPMOE_I64 && t == 5) wide = (int64_t)1 << 32; /* 0 in 32 bits */
        int32_t narrow = (int32_t)wide;
        memcpy(bad + t * epmoe_dtype_size(positions->dtype),
               positions->dtype == EPMOE_I64 ? (const void *)&wide : (const void *)&narrow,
               (size_t)epmoe_dtype_size(positions->dtype));
    }
    check_bad_ids(c, "positions", bad, count);
    testing_buffer_free(bad);
}

static void check_calls(testing_rng_t *rng)
{
    check_begin("rope", "graphs, alignment, positions outside the table");
    for (int32_t i = 0; i < 4; i++) {
        shape_t shape = {.tokens = 21,
                         .heads = 6,
                         .kv_heads = 2,
                         .dim = i % 2 ? 64 : 66,
                         .rotary = i % 2 ? 64 : 66,
                         .dtype = EPMOE_BF16,
                         .style = (epmoe_rope_style_t)(i / 2),
                         .positions_dtype = i % 2 ? EPMOE_I64 : EPMOE_I32};
        check_case_t c;
        make(&c, rng, &shape);
        check_misaligned(&c);
        check_graph(&c, refill, &shape);
        check_bad_positions(&c, rng, &shape);
        check_free(&c);
    }
    check_end();
}

void check_rope(testing_rng_t *rng)
{
    check_shapes(rng);
    check_options(rng);
    check_calls(rng);
}
