#include "kernels/permute.h"
#include "tests/checkcuda/check.h"

static epmoe_status_t run(const void *args, epmoe_stream_t stream) { return epmoe_permute(args, stream); }

static epmoe_status_t reference(const void *args)
{
    epmoe_permute_args_t checked;
    EPMOEI_CHECK(epmoei_permute_check(args, &checked));
    if (checked.num_tokens == 0) return EPMOE_OK;
    /* The reference reads num_rows, which a call with max_rows 0 may lack nothing but. */
    return epmoei_permute_ref(&checked, NULL);
}

static epmoe_status_t run_back(const void *args, epmoe_stream_t stream) { return epmoe_unpermute(args, stream); }

static epmoe_status_t reference_back(const void *args)
{
    epmoe_unpermute_args_t checked;
    EPMOEI_CHECK(epmoei_unpermute_check(args, &checked));
    return checked.num_tokens ? epmoei_unpermute_ref(&checked, NULL) : EPMOE_OK;
}

static const check_op_t op = {"permute", sizeof(epmoe_permute_args_t), run, reference};
static const check_op_t op_back = {"unpermute", sizeof(epmoe_unpermute_args_t), run_back, reference_back};

typedef struct shape_t {
    int32_t tokens, top_k, hidden, max_rows;
    epmoe_dtype_t dtype;
} shape_t;

static void fill_bytes(testing_rng_t *rng, const check_field_t *field)
{
    for (int64_t i = 0; i < field->bytes; i++) field->host[i] = (char)testing_next(rng);
}

/* Slots in any order, some twice, some missing, padding between. */
static void fill_sorted(testing_rng_t *rng, const check_field_t *field, int32_t num_slots)
{
    int32_t *sorted = (int32_t *)(void *)field->host;
    for (int64_t p = 0; p < field->cols; p++)
        sorted[p] =
            testing_range(rng, 0, 4) ? testing_range(rng, 0, num_slots - 1) : num_slots + testing_range(rng, 0, 2);
}

static void make(check_case_t *c, testing_rng_t *rng, shape_t shape, int32_t num_rows, bool inverse)
{
    check_case(c, &op, "T %d k %d d %d rows %d of %d %s inverse %d", shape.tokens, shape.top_k, shape.hidden, num_rows,
               shape.max_rows, epmoe_dtype_string(shape.dtype), inverse);
    epmoe_permute_args_t args = EPMOE_PERMUTE_ARGS_INIT;
    args.num_tokens = shape.tokens;
    args.top_k = shape.top_k;
    args.hidden = shape.hidden;
    args.dtype = shape.dtype;
    args.max_rows = shape.max_rows;
    memcpy(c->args, &args, sizeof args);
    CHECK_ADD(c, epmoe_permute_args_t, x, CHECK_IN, shape.dtype, shape.tokens, shape.hidden, 16);
    CHECK_ADD(c, epmoe_permute_args_t, sorted_ids, CHECK_IN, EPMOE_I32, shape.tokens ? 1 : 0, shape.max_rows, 4);
    fill_bytes(rng, &c->fields[0]);
    fill_sorted(rng, &c->fields[1], shape.tokens * shape.top_k);
    int32_t *rows = CHECK_ADD(c, epmoe_permute_args_t, num_rows, CHECK_IN, EPMOE_I32, 1, 1, 4);
    *rows = num_rows;
    CHECK_ADD(c, epmoe_permute_args_t, y, CHECK_OUT, shape.dtype, shape.max_rows, shape.hidden, 16);
    if (inverse) CHECK_ADD(c, epmoe_permute_args_t, inverse, CHECK_OUT, EPMOE_I32, shape.tokens, shape.top_k, 4);
}

static void run_one(testing_rng_t *rng, shape_t shape, int32_t num_rows, bool inverse)
{
    check_case_t c;
    make(&c, rng, shape, num_rows, inverse);
    check_run(&c);
    check_free(&c);
}

static const int32_t widths[] = {1, 5, 8, 60, 72, 129, 256, 1025, 4104};
static const int32_t tokens[] = {0, 1, 3, 63, 127, 257, 4096};

static void refill(check_case_t *c, int32_t round, void *ctx)
{
    const epmoe_permute_args_t *args = (const epmoe_permute_args_t *)c->args;
    fill_bytes(ctx, check_find(c, "x"));
    fill_sorted(ctx, check_find(c, "sorted_ids"), args->num_tokens * args->top_k);
    *(int32_t *)(void *)check_find(c, "num_rows")->host = args->max_rows / (round + 1);
}

static void check_permute_calls(testing_rng_t *rng)
{
    check_begin("permute", "graphs, alignment, bad ids");
    for (int32_t i = 0; i < 2; i++) {
        shape_t shape = {40, 3, i ? 77 : 64, 150, EPMOE_BF16};
        check_case_t c;
        make(&c, rng, shape, 140, true);
        check_misaligned(&c);
        check_graph(&c, refill, rng);
        /* A negative id is a row of zeros, as padding is; too many rows are all rows. */
        check_field_t *sorted = check_find(&c, "sorted_ids"), *rows = check_find(&c, "num_rows");
        int32_t *good = (int32_t *)(void *)sorted->host, *bad = testing_buffer(sorted->bytes, 0), many = 151;
        *(int32_t *)(void *)rows->host = 150;
        memcpy(bad, good, (size_t)sorted->bytes);
        for (int32_t p = 5; p < 150; p += 29) good[p] = shape.tokens * shape.top_k, bad[p] = -1 - p;
        check_bad_ids(&c, "sorted_ids", bad, 5);
        check_bad_ids(&c, "num_rows", &many, 1);
        testing_buffer_free(bad);
        check_free(&c);
    }
    check_end();
}

void check_permute(testing_rng_t *rng)
{
    const epmoe_dtype_t dtypes[] = {EPMOE_BF16, EPMOE_U8, EPMOE_F32, EPMOE_F16, EPMOE_F8_E4M3};
    check_begin("permute", "d 1..4104, T 0..4096");
    for (size_t w = 0; w < sizeof widths / sizeof *widths; w++)
        for (size_t t = 0; t < sizeof tokens / sizeof *tokens; t++) {
            int32_t top_k = (int32_t)(1 + (w + t) % 4);
            int64_t elements = (int64_t)tokens[t] * top_k * widths[w];
            if (elements > 8 << 20 || check_skips(elements)) continue;
            shape_t shape = {tokens[t], top_k, widths[w], tokens[t] * top_k + (int32_t)(t % 3) * 40,
                             dtypes[(w + t) % 5]};
            run_one(rng, shape, shape.max_rows - (int32_t)(w % 2) * (shape.max_rows / 3), t % 3 != 1);
        }
    run_one(rng, (shape_t){5, 2, 16, 0, EPMOE_BF16}, 0, true);
    run_one(rng, (shape_t){5, 2, 16, 12, EPMOE_BF16}, 0, true);
    check_end();
    check_permute_calls(rng);
}

/* ----------------------------------------------------------------------------------------------------- unpermute */

static void fill_inverse(testing_rng_t *rng, const check_field_t *field, int32_t max_rows, int32_t unused_of_4)
{
    int32_t *inverse = (int32_t *)(void *)field->host;
    for (int64_t s = 0; s < field->rows * field->cols; s++)
        inverse[s] = max_rows == 0 || testing_range(rng, 0, 3) < unused_of_4 ? -1 : testing_range(rng, 0, max_rows - 1);
}

static void make_back(check_case_t *c, testing_rng_t *rng, shape_t shape, bool weights, int32_t unused_of_4)
{
    check_case(c, &op_back, "T %d k %d d %d of %d rows %s weights %d unused %d/4", shape.tokens, shape.top_k,
               shape.hidden, shape.max_rows, epmoe_dtype_string(shape.dtype), weights, unused_of_4);
    epmoe_unpermute_args_t args = EPMOE_UNPERMUTE_ARGS_INIT;
    args.num_tokens = shape.tokens;
    args.top_k = shape.top_k;
    args.hidden = shape.hidden;
    args.dtype = shape.dtype;
    args.max_rows = shape.max_rows;
    memcpy(c->args, &args, sizeof args);
    CHECK_ADD(c, epmoe_unpermute_args_t, y, CHECK_IN, shape.dtype, shape.max_rows, shape.hidden, 16);
    check_fill_normal(rng, c->fields[0].host, shape.dtype, (int64_t)shape.max_rows * shape.hidden, 1.0f);
    CHECK_ADD(c, epmoe_unpermute_args_t, inverse, CHECK_IN, EPMOE_I32, shape.tokens, shape.top_k, 4);
    fill_inverse(rng, &c->fields[1], shape.max_rows, unused_of_4);
    /* NaN where the slot is unused: neither row nor weight may be read. */
    if (weights) {
        float *values =
            CHECK_ADD(c, epmoe_unpermute_args_t, weights, CHECK_IN, EPMOE_F32, shape.tokens, shape.top_k, 4);
        for (int32_t s = 0; s < shape.tokens * shape.top_k; s++)
            if (((int32_t *)(void *)c->fields[1].host)[s] >= 0) values[s] = testing_normal(rng);
    }
    CHECK_ADD(c, epmoe_unpermute_args_t, out, CHECK_OUT, shape.dtype, shape.tokens, shape.hidden, 16);
}

static void refill_back(check_case_t *c, int32_t round, void *ctx)
{
    const epmoe_unpermute_args_t *args = (const epmoe_unpermute_args_t *)c->args;
    testing_fill_normal(ctx, check_find(c, "y")->host, args->dtype, (int64_t)args->max_rows * args->hidden, 1.0f);
    fill_inverse(ctx, check_find(c, "inverse"), args->max_rows, round);
}

static void check_unpermute_calls(testing_rng_t *rng)
{
    check_begin("unpermute", "NaN rows, graphs, alignment, bad ids");
    for (int32_t i = 0; i < 2; i++) {
        shape_t shape = {40, 6, i ? 77 : 64, 150, EPMOE_BF16};
        check_case_t c;
        make_back(&c, rng, shape, false, 1);
        for (int32_t col = 0; col < shape.hidden; col++) {
            epmoei_store(check_find(&c, "y")->host, shape.dtype, 7 * shape.hidden + col, 0.0f / 0.0f);
            epmoei_store(check_find(&c, "y")->host, shape.dtype, 8 * shape.hidden + col, 1.0f / 0.0f);
        }
        check_run(&c);
        check_misaligned(&c);
        check_graph(&c, refill_back, rng);
        check_field_t *inverse = check_find(&c, "inverse");
        int32_t *good = (int32_t *)(void *)inverse->host, *bad = testing_buffer(inverse->bytes, 0), count = 0;
        memcpy(bad, good, (size_t)inverse->bytes);
        for (int32_t s = 3; s < 240; s += 31) good[s] = -1, bad[s] = count++ % 2 ? -2 : 150;
        check_bad_ids(&c, "inverse", bad, count);
        testing_buffer_free(bad);
        check_free(&c);
    }
    check_end();
}

void check_unpermute(testing_rng_t *rng)
{
    const epmoe_dtype_t dtypes[] = {EPMOE_BF16, EPMOE_F32, EPMOE_F16};
    check_begin("unpermute", "d 1..4104, T 0..4096");
    for (size_t w = 0; w < sizeof widths / sizeof *widths; w++)
        for (size_t t = 0; t < sizeof tokens / sizeof *tokens; t++) {
            int32_t top_k = (int32_t)(1 + (w + t) % 9);
            int64_t elements = (int64_t)tokens[t] * top_k * widths[w];
            if (elements > 8 << 20 || check_skips(elements)) continue;
            shape_t shape = {tokens[t], top_k, widths[w], tokens[t] * top_k / 2 + 3, dtypes[(w + t) % 3]};
            check_case_t c;
            make_back(&c, rng, shape, w % 3 != 1, (int32_t)(t % 5));
            check_run(&c);
            check_free(&c);
        }
    check_end();
    check_unpermute_calls(rng);
}
