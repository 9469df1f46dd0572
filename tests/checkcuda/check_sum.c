#include "kernels/sum.h"
#include "tests/checkcuda/check.h"

#include <math.h>

static epmoe_status_t run(const void *args, epmoe_stream_t stream) { return epmoe_sum(args, stream); }

static epmoe_status_t reference(const void *args)
{
    epmoe_sum_args_t checked;
    EPMOEI_CHECK(epmoei_sum_check(args, &checked));
    return checked.num_tokens ? epmoei_sum_ref(&checked, NULL) : EPMOE_OK;
}

static const check_op_t op = {"sum", sizeof(epmoe_sum_args_t), run, reference};

typedef struct shape_t {
    int32_t tokens, top_k, hidden;
    epmoe_dtype_t y_dtype, out_dtype;
    bool weights, ids, addend, residual, in_place; /* in_place: out is the residual */
} shape_t;

/* Unused slots keep their poison, rows and weights alike: reading one shows as a NaN. */
static void fill(testing_rng_t *rng, check_case_t *c, const shape_t *shape, int32_t unused_of_4)
{
    int32_t *ids = shape->ids ? (int32_t *)(void *)check_find(c, "ids")->host : NULL;
    float *weights = shape->weights ? (float *)(void *)check_find(c, "weights")->host : NULL;
    char *y = check_find(c, "y")->host;
    int64_t row_bytes = (int64_t)shape->hidden * epmoe_dtype_size(shape->y_dtype);
    for (int64_t s = 0; s < (int64_t)shape->tokens * shape->top_k; s++) {
        bool used = !ids || testing_range(rng, 0, 3) >= unused_of_4;
        if (ids) ids[s] = used ? testing_range(rng, 0, 1000) : -1;
        if (used && weights) weights[s] = testing_normal(rng);
        if (used)
            testing_fill_normal(rng, y + s * row_bytes, shape->y_dtype, shape->hidden, 1.0f);
        else
            memset(y + s * row_bytes, 0x7F, (size_t)row_bytes);
    }
    int64_t n = (int64_t)shape->tokens * shape->hidden;
    if (shape->addend) testing_fill_normal(rng, check_find(c, "addend")->host, EPMOE_F32, n, 1.0f);
    if (shape->residual) testing_fill_normal(rng, check_find(c, "residual")->host, shape->out_dtype, n, 1.0f);
    if (shape->in_place) testing_fill_normal(rng, check_find(c, "out")->host, shape->out_dtype, n, 1.0f);
}

static void make(check_case_t *c, testing_rng_t *rng, const shape_t *shape, int32_t unused_of_4)
{
    check_case(c, &op, "T %d k %d d %d %s to %s weights %d ids %d unused %d/4 addend %d residual %d in place %d",
               shape->tokens, shape->top_k, shape->hidden, epmoe_dtype_string(shape->y_dtype),
               epmoe_dtype_string(shape->out_dtype), shape->weights, shape->ids, unused_of_4, shape->addend,
               shape->residual, shape->in_place);
    epmoe_sum_args_t args = EPMOE_SUM_ARGS_INIT;
    args.num_tokens = shape->tokens;
    args.top_k = shape->top_k;
    args.hidden = shape->hidden;
    args.y_dtype = shape->y_dtype;
    args.out_dtype = shape->out_dtype;
    memcpy(c->args, &args, sizeof args);
    int64_t tokens = shape->tokens, top_k = shape->top_k, hidden = shape->hidden;
    CHECK_ADD(c, epmoe_sum_args_t, y, CHECK_IN, shape->y_dtype, tokens * top_k, hidden, 16);
    if (shape->weights) CHECK_ADD(c, epmoe_sum_args_t, weights, CHECK_IN, EPMOE_F32, tokens, top_k, 4);
    if (shape->ids) CHECK_ADD(c, epmoe_sum_args_t, ids, CHECK_IN, EPMOE_I32, tokens, top_k, 4);
    if (shape->addend) CHECK_ADD(c, epmoe_sum_args_t, addend, CHECK_IN, EPMOE_F32, tokens, hidden, 16);
    if (shape->residual) CHECK_ADD(c, epmoe_sum_args_t, residual, CHECK_IN, shape->out_dtype, tokens, hidden, 16);
    if (shape->in_place) c->alias_offset = offsetof(epmoe_sum_args_t, residual);
    CHECK_ADD(c, epmoe_sum_args_t, out, shape->in_place ? CHECK_INOUT : CHECK_OUT, shape->out_dtype, tokens, hidden,
              16);
    fill(rng, c, shape, unused_of_4);
}

static const epmoe_dtype_t dtypes[] = {EPMOE_BF16, EPMOE_F32, EPMOE_F16};

static void run_one(testing_rng_t *rng, const shape_t *shape, int32_t unused_of_4)
{
    check_case_t c;
    make(&c, rng, shape, unused_of_4);
    check_run(&c);
    check_free(&c);
}

static void check_shapes(testing_rng_t *rng)
{
    const int32_t widths[] = {1, 5, 8, 60, 72, 129, 256, 1025, 4104, 7168};
    const int32_t tokens[] = {0, 1, 3, 63, 127, 257, 4096};
    check_begin("sum", "d 1..7168, T 0..4096");
    for (size_t w = 0; w < sizeof widths / sizeof *widths; w++)
        for (size_t t = 0; t < sizeof tokens / sizeof *tokens; t++) {
            shape_t shape = {.tokens = tokens[t],
                             .top_k = (int32_t)(1 + (w + t) % 9),
                             .hidden = widths[w],
                             .y_dtype = dtypes[(w + t) % 3],
                             .out_dtype = dtypes[t % 3],
                             .weights = w % 3 != 1,
                             .ids = t % 2,
                             .addend = w % 2,
                             .residual = t % 3 == 0};
            int64_t elements = (int64_t)shape.tokens * shape.top_k * shape.hidden;
            if (elements > 8 << 20 || check_skips(elements)) continue;
            run_one(rng, &shape, (int32_t)(w % 5));
        }
    check_end();
}

static void check_options(testing_rng_t *rng)
{
    check_begin("sum", "every dtype pair and option");
    for (int32_t i = 0; i < 9 * 16 * 2; i += check_step(7)) {
        shape_t shape = {.tokens = testing_range(rng, 1, 12),
                         .top_k = testing_range(rng, 1, 10),
                         .hidden = i / 144 ? 104 : 53,
                         .y_dtype = dtypes[i % 3],
                         .out_dtype = dtypes[i / 3 % 3],
                         .weights = i / 9 & 1,
                         .ids = i / 18 & 1,
                         .addend = i / 36 & 1,
                         .residual = i / 72 & 1};
        shape.in_place = !shape.residual && testing_range(rng, 0, 1);
        run_one(rng, &shape, testing_range(rng, 0, 4));
    }
    check_end();
}

/* Enough for the form with a ring: pieces of a row, unused slots, what is added, a count on the device. */
static void check_many(testing_rng_t *rng)
{
    const int32_t hiddens[] = {2048, 2880, 7168};
    check_begin("sum", "8 MB and more");
    for (int32_t i = 0; i < 12; i += check_step(5)) {
        int32_t hidden = hiddens[i % 3], top_k = i % 4 == 3 ? 32 : 1 + i % 4 * 4;
        shape_t shape = {.tokens = (int32_t)((5 << 20) / (hidden * top_k)) + 1 + i,
                         .top_k = top_k,
                         .hidden = hidden,
                         .y_dtype = i % 2 ? EPMOE_F16 : EPMOE_BF16,
                         .out_dtype = i % 2 ? EPMOE_F16 : EPMOE_BF16,
                         .weights = i % 3 != 1,
                         .ids = i / 2 % 2,
                         .addend = i / 3 % 2,
                         .residual = i / 4 % 2};
        check_case_t c;
        make(&c, rng, &shape, i % 4);
        int32_t *actual = CHECK_ADD(&c, epmoe_sum_args_t, num_tokens_dev, CHECK_IN, EPMOE_I32, 1, 1, 4);
        *actual = shape.tokens - 3 * (i % 2);
        check_run(&c);
        check_free(&c);
    }
    check_end();
}

typedef struct refill_t {
    testing_rng_t *rng;
    const shape_t *shape;
} refill_t;

static void refill(check_case_t *c, int32_t round, void *ctx)
{
    const refill_t *how = ctx;
    fill(how->rng, c, how->shape, round);
    *(int32_t *)(void *)check_find(c, "num_tokens_dev")->host = how->shape->tokens - 7 * round;
}

static void check_calls(testing_rng_t *rng)
{
    check_begin("sum", "NaN rows, token count, graphs, alignment, bad ids");
    for (int32_t hidden = 64; hidden <= 65; hidden++) {
        shape_t shape = {30, 5, hidden, EPMOE_BF16, EPMOE_BF16, true, true, true, true, false};
        check_case_t c;
        make(&c, rng, &shape, 1);
        int32_t *actual = CHECK_ADD(&c, epmoe_sum_args_t, num_tokens_dev, CHECK_IN, EPMOE_I32, 1, 1, 4);
        *actual = 21;
        for (int32_t col = 0; col < hidden; col++) {
            epmoei_store(check_find(&c, "y")->host, EPMOE_BF16, 11 * hidden + col, NAN);
            epmoei_store(check_find(&c, "y")->host, EPMOE_BF16, 33 * hidden + col, INFINITY);
        }
        check_run(&c);
        check_misaligned(&c);
        refill_t how = {rng, &shape};
        check_graph(&c, refill, &how);

        *actual = 30;
        check_field_t *ids = check_find(&c, "ids");
        int32_t *bad = testing_buffer(ids->bytes, 0), count = 0;
        memcpy(bad, ids->host, (size_t)ids->bytes);
        for (int32_t s = 2; s < 150; s += 17) {
            ((int32_t *)(void *)ids->host)[s] = -1;
            bad[s] = -2 - s;
            count++;
        }
        check_bad_ids(&c, "ids", bad, count);
        testing_buffer_free(bad);
        check_free(&c);
    }
    check_end();
}

void check_sum(testing_rng_t *rng)
{
    check_shapes(rng);
    check_options(rng);
    check_many(rng);
    check_calls(rng);
}
