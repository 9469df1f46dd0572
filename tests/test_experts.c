/* epmoe_experts against fp64, its edges, and the cases that other libraries got wrong. */
#include "tests/moe_oracle.h"

#include <criterion/criterion.h>
#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct case_t {
    int32_t tokens, top_k, num_experts, hidden, intermediate;
    epmoe_dtype_t dtype, y_dtype, gate_up_dtype, down_dtype;
    epmoe_activation_t activation;
    float alpha, limit;
    epmoe_layout_t layout;
    bool gate_up_bias, down_bias, addend, residual, by_num_tokens_dev;
    enum { Y_APART, Y_IS_X, Y_IS_RESIDUAL } out;
    int32_t weight_on_input;
    int32_t offset; /* elements that x, y and the weights are off their alignment */
    enum { IDS_ANY, IDS_ONE_EXPERT, IDS_HALF_OF_EXPERTS, IDS_SPARSE } routing;
} case_t;

typedef struct problem_t {
    epmoe_experts_args_t args;
    void *x, *gate_up, *down, *residual, *apart, *y, *workspace;
    float *weights, *gate_up_bias, *down_bias, *addend;
    int32_t *ids, tokens; /* the actual number */
} problem_t;

static void *normal(testing_rng_t *rng, epmoe_dtype_t dtype, int64_t n, double scale, int32_t offset)
{
    int32_t size = epmoe_dtype_size(dtype);
    void *data = testing_buffer(n * size, offset * size);
    testing_fill_normal(rng, data, dtype, n, (float)scale);
    return data;
}

static int32_t draw_id(testing_rng_t *rng, const case_t *c)
{
    switch (c->routing) {
    case IDS_ONE_EXPERT: return c->num_experts - 1;
    case IDS_HALF_OF_EXPERTS: return testing_range(rng, 0, (c->num_experts - 1) / 2) * 2;
    case IDS_SPARSE: return testing_range(rng, 0, 3) ? -1 : testing_range(rng, 0, c->num_experts - 1);
    default: return testing_range(rng, -1, c->num_experts - 1);
    }
}

static problem_t make(const case_t *c, testing_rng_t *rng)
{
    problem_t p = {.args = EPMOE_EXPERTS_ARGS_INIT};
    int64_t slots = (int64_t)c->tokens * c->top_k, n = c->num_experts, d = c->hidden, f = c->intermediate;
    p.x = normal(rng, c->dtype, c->tokens * d, 1, c->offset);
    p.gate_up = normal(rng, c->gate_up_dtype, n * 2 * f * d, 1 / sqrt((double)d), c->offset);
    p.down = normal(rng, c->down_dtype, n * d * f, 1 / sqrt((double)f), c->offset);
    p.gate_up_bias = normal(rng, EPMOE_F32, n * 2 * f, 0.3, 0);
    p.down_bias = normal(rng, EPMOE_F32, n * d, 0.3, 0);
    p.weights = normal(rng, EPMOE_F32, slots, 0.5, 0);
    p.ids = testing_buffer(slots * 4, 0);
    for (int64_t s = 0; s < slots; s++) {
        p.ids[s] = draw_id(rng, c);
        /* The weight of an unused slot is not read. */
        if (p.ids[s] < 0) p.weights[s] = NAN;
    }
    p.addend = normal(rng, EPMOE_F32, c->tokens * d, 1, 0);
    p.residual = normal(rng, c->y_dtype, c->tokens * d, 1, c->offset);
    p.apart = testing_buffer(c->tokens * d * epmoe_dtype_size(c->y_dtype), c->offset * 2);
    p.y = c->out == Y_IS_X ? p.x : c->out == Y_IS_RESIDUAL ? p.residual : p.apart;
    p.tokens = c->by_num_tokens_dev ? testing_range(rng, 0, c->tokens) : c->tokens;
    /* Nothing past them is read. */
    for (int64_t s = (int64_t)p.tokens * c->top_k; s < slots; s++) p.ids[s] = -77;

    epmoe_experts_args_t *args = &p.args;
    args->backend = EPMOE_BACKEND_CPU;
    args->num_tokens = c->tokens, args->top_k = c->top_k, args->num_experts = c->num_experts;
    args->hidden = c->hidden, args->intermediate = c->intermediate;
    args->dtype = c->dtype;
    args->y_dtype = c->y_dtype == c->dtype ? EPMOE_DTYPE_NONE : c->y_dtype;
    args->x = p.x, args->ids = p.ids, args->weights = p.weights, args->y = p.y;
    args->gate_up = (epmoe_weight_t)EPMOE_WEIGHT_INIT, args->down = args->gate_up;
    args->gate_up.format = epmoei_format_of_dtype(c->gate_up_dtype), args->gate_up.data = p.gate_up;
    args->down.format = epmoei_format_of_dtype(c->down_dtype), args->down.data = p.down;
    args->layout = c->layout;
    args->gate_up_bias = c->gate_up_bias ? p.gate_up_bias : NULL;
    args->down_bias = c->down_bias ? p.down_bias : NULL;
    args->addend = c->addend ? p.addend : NULL;
    args->residual = c->residual || c->out == Y_IS_RESIDUAL ? p.residual : NULL;
    args->activation = c->activation, args->alpha = c->alpha, args->limit = c->limit;
    args->weight_on_input = c->weight_on_input;
    cr_assert_eq(epmoe_experts_workspace_size(args, &args->workspace_bytes), EPMOE_OK, "%s", epmoe_last_error());
    args->workspace = p.workspace = testing_buffer(args->workspace_bytes, 0);
    return p;
}

static void release(problem_t *p)
{
    void *all[] = {p->gate_up, p->down,  p->workspace, p->weights, p->gate_up_bias, p->down_bias, p->residual,
                   p->addend,  p->apart, p->ids,       p->x};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) testing_buffer_free(all[i]);
}

static oracle_experts_t oracle_of(const epmoe_experts_args_t *args)
{
    return (oracle_experts_t){.hidden = args->hidden,
                              .intermediate = args->intermediate,
                              .dtype = args->dtype,
                              .activation = args->activation,
                              .alpha = args->alpha,
                              .limit = args->limit,
                              .layout = args->layout,
                              .weight_on_input = args->weight_on_input,
                              .gate_up = args->gate_up,
                              .down = args->down,
                              .gate_up_bias = args->gate_up_bias,
                              .down_bias = args->down_bias};
}

/* y[d] and bound[d] of token t; x and residual are not those of the args where y has overwritten them. */
static void oracle_of_token(const epmoe_experts_args_t *args, const void *x, const void *residual, int64_t t, double *y,
                            double *bound)
{
    oracle_experts_t experts = oracle_of(args);
    int32_t d = args->hidden;
    double *row = malloc((size_t)d * sizeof *row);
    oracle_row(x, args->dtype, t, d, row);
    for (int32_t i = 0; i < d; i++) {
        double addend = args->addend ? (double)args->addend[t * d + i] : 0;
        epmoe_dtype_t y_dtype = args->y_dtype ? args->y_dtype : args->dtype;
        double added = args->residual ? (double)epmoei_load(residual, y_dtype, t * d + i) : 0;
        y[i] = addend + added;
        bound[i] = 0x1p-22 * (fabs(addend) + fabs(added));
    }
    for (int64_t s = t * args->top_k; s < (t + 1) * args->top_k; s++)
        if (args->ids[s] >= 0) oracle_slot(&experts, args->ids[s], row, (double)args->weights[s], 0, y, bound);
    free(row);
}

static bool is_zero_row(const void *y, epmoe_dtype_t dtype, int64_t t, int32_t d)
{
    for (int32_t i = 0; i < d; i++)
        if (epmoei_load(y, dtype, t * d + i) != 0) return false;
    return true;
}

static void *copy_of(const void *data, int64_t bytes)
{
    void *copy = malloc((size_t)bytes + 1);
    memcpy(copy, data, (size_t)bytes);
    return copy;
}

static void check(const case_t *c, const char *label)
{
    testing_rng_t rng = testing_rng(testing_seed() + (uint64_t)c->hidden * 31 + (uint64_t)c->tokens);
    problem_t p = make(c, &rng);
    int64_t d = c->hidden, y_size = epmoe_dtype_size(c->y_dtype);
    int64_t x_bytes = c->tokens * d * epmoe_dtype_size(c->dtype), y_bytes = c->tokens * d * y_size;
    void *x = copy_of(p.x, x_bytes), *residual = copy_of(p.residual, y_bytes), *y = copy_of(p.y, y_bytes);
    if (c->by_num_tokens_dev) p.args.num_tokens_dev = &p.tokens;
    cr_assert_eq(epmoe_experts(&p.args, NULL), EPMOE_OK, "%s: %s", label, epmoe_last_error());

    double *ref = malloc((size_t)d * sizeof *ref), *bound = malloc((size_t)d * sizeof *bound);
    for (int64_t t = 0; t < p.tokens; t++) {
        bool used = p.args.addend || p.args.residual;
        for (int64_t s = t * c->top_k; s < (t + 1) * c->top_k; s++) used |= p.ids[s] >= 0;
        oracle_of_token(&p.args, x, residual, t, ref, bound);
        double error = oracle_error((char *)p.y + t * d * y_size, c->y_dtype, ref, bound, d);
        cr_assert(error <= 1, "%s: token %lld is off by %g times what fp32 allows", label, (long long)t, error);
        cr_assert(used || is_zero_row(p.y, c->y_dtype, t, c->hidden), "%s: token %lld has no slot", label,
                  (long long)t);
    }
    int64_t written = p.tokens * d * y_size;
    cr_assert(!memcmp((char *)p.y + written, (char *)y + written, (size_t)(y_bytes - written)), "%s: past the tokens",
              label);
    cr_assert(c->out == Y_IS_X || !memcmp(x, p.x, (size_t)x_bytes), "%s: x was written", label);
    cr_assert(c->out == Y_IS_RESIDUAL || !memcmp(residual, p.residual, (size_t)y_bytes), "%s: residual", label);
    cr_assert(testing_guards_intact(p.y) && testing_guards_intact(p.workspace) && testing_guards_intact(p.x), "%s",
              label);
    free(x), free(residual), free(y), free(ref), free(bound);
    release(&p);
}

Test(experts, random_shapes_types_and_rules)
{
    testing_rng_t rng = testing_rng(testing_seed());
    const epmoe_dtype_t types[] = {EPMOE_F32, EPMOE_BF16, EPMOE_F16};
    for (int i = 0; i < 150; i++) {
        case_t c = {.tokens = testing_range(&rng, 1, 24),
                    .top_k = testing_range(&rng, 1, 5),
                    .num_experts = testing_range(&rng, 1, 11),
                    .hidden = testing_range(&rng, 1, 70),
                    .intermediate = testing_range(&rng, 1, 70),
                    .dtype = types[testing_range(&rng, 0, 2)],
                    .y_dtype = types[testing_range(&rng, 0, 2)],
                    .gate_up_dtype = types[testing_range(&rng, 0, 2)],
                    .down_dtype = types[testing_range(&rng, 0, 2)],
                    .activation = (epmoe_activation_t)testing_range(&rng, 0, 3),
                    .alpha = testing_range(&rng, 0, 1) ? 1.3f : 0,
                    .limit = testing_range(&rng, 0, 1) ? 0.7f : 0,
                    .layout = (epmoe_layout_t)testing_range(&rng, 0, 2),
                    .gate_up_bias = testing_range(&rng, 0, 1),
                    .down_bias = testing_range(&rng, 0, 1),
                    .addend = testing_range(&rng, 0, 1),
                    .residual = testing_range(&rng, 0, 1),
                    .by_num_tokens_dev = testing_range(&rng, 0, 2) == 0,
                    .out = testing_range(&rng, 0, 2),
                    .weight_on_input = testing_range(&rng, 0, 2) == 0,
                    .offset = testing_range(&rng, 0, 3),
                    .routing = testing_range(&rng, 0, 3)};
        if (c.out == Y_IS_X) c.y_dtype = c.dtype;
        char label[256];
        snprintf(label, sizeof label, "case %d: T %d k %d E %d d %d f %d types %d %d %d %d act %d limit %g layout %d",
                 i, c.tokens, c.top_k, c.num_experts, c.hidden, c.intermediate, (int)c.dtype, (int)c.y_dtype,
                 (int)c.gate_up_dtype, (int)c.down_dtype, (int)c.activation, (double)c.limit, (int)c.layout);
        check(&c, label);
    }
}

/* Token counts around the kernels' ways of working, and every expert count that is no power of two; y over x. */
Test(experts, token_counts)
{
    const int32_t tokens[] = {1, 3, 63, 127, 300};
    for (size_t i = 0; i < sizeof tokens / sizeof tokens[0]; i++) {
        case_t c = {.tokens = tokens[i],
                    .top_k = 3,
                    .num_experts = i % 2 ? 5 : 1,
                    .hidden = 40,
                    .intermediate = 72,
                    .dtype = EPMOE_BF16,
                    .y_dtype = EPMOE_BF16,
                    .gate_up_dtype = EPMOE_BF16,
                    .down_dtype = EPMOE_BF16,
                    .out = Y_IS_X};
        char label[64];
        snprintf(label, sizeof label, "%d tokens", tokens[i]);
        check(&c, label);
    }
    case_t many = {.tokens = 20,
                   .top_k = 8,
                   .num_experts = 384,
                   .hidden = 24,
                   .intermediate = 8,
                   .dtype = EPMOE_F32,
                   .y_dtype = EPMOE_F32,
                   .gate_up_dtype = EPMOE_BF16,
                   .down_dtype = EPMOE_BF16};
    check(&many, "384 experts");
}

Test(experts, no_tokens_and_null_pointers)
{
    epmoe_experts_args_t args = EPMOE_EXPERTS_ARGS_INIT;
    int64_t bytes = -1;
    args.backend = EPMOE_BACKEND_CPU;
    args.top_k = 2, args.num_experts = 4, args.hidden = 8, args.intermediate = 8;
    args.dtype = EPMOE_BF16;
    args.gate_up.format = args.down.format = EPMOE_FORMAT_BF16;
    cr_assert_eq(epmoe_experts_workspace_size(&args, &bytes), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(bytes, 0);
    cr_assert_eq(epmoe_experts(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
}

/* More than one chunk of intermediates: what the workspace holds is less than all of them. Outputs over inputs, so that
 * a chunk that reads what another wrote is seen. */
Test(experts, a_long_prefill_goes_in_chunks)
{
    enum { kTokens = 70000, kD = 16 };
    case_t c = {.tokens = kTokens,
                .top_k = 32,
                .num_experts = 3,
                .hidden = kD,
                .intermediate = 16,
                .dtype = EPMOE_F32,
                .y_dtype = EPMOE_F32,
                .gate_up_dtype = EPMOE_F32,
                .down_dtype = EPMOE_F32,
                .addend = true,
                .residual = true,
                .out = Y_IS_X};
    testing_rng_t rng = testing_rng(testing_seed());
    problem_t p = make(&c, &rng);
    int64_t all_bytes = (int64_t)kTokens * c.top_k * (c.intermediate + c.hidden) * 4;
    cr_assert_lt(p.args.workspace_bytes, all_bytes, "one chunk: the test tests nothing");
    float *x = malloc((size_t)kTokens * kD * 4);
    memcpy(x, p.x, (size_t)kTokens * kD * 4);
    cr_assert_eq(epmoe_experts(&p.args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    int64_t border = ((int64_t)256 << 20) / (c.top_k * (c.intermediate + c.hidden) * 4);
    for (int32_t i = 0; i < 300; i++) {
        int64_t t = i < 100 ? testing_range(&rng, 0, kTokens - 1) : i < 200 ? border - 150 + i : kTokens - 300 + i;
        double ref[kD], bound[kD];
        oracle_of_token(&p.args, x, p.residual, t, ref, bound);
        double error = oracle_error((float *)p.y + t * kD, EPMOE_F32, ref, bound, kD);
        cr_assert(error <= 1, "token %lld is off by %g times what fp32 allows", (long long)t, error);
    }
    cr_assert(testing_guards_intact(p.y) && testing_guards_intact(p.workspace));
    free(x);
    release(&p);
}

/* The result does not depend on what was in the workspace, nor on the number of threads; 20 runs give the same bits. */
Test(experts, same_bits_on_every_run)
{
    case_t c = {.tokens = 150,
                .top_k = 2,
                .num_experts = 3,
                .hidden = 50,
                .intermediate = 66,
                .dtype = EPMOE_BF16,
                .y_dtype = EPMOE_F32,
                .gate_up_dtype = EPMOE_BF16,
                .down_dtype = EPMOE_BF16};
    testing_rng_t rng = testing_rng(testing_seed());
    problem_t p = make(&c, &rng);
    size_t bytes = (size_t)c.tokens * (size_t)c.hidden * 4;
    float *first = malloc(bytes);
    for (int32_t run = 0; run < 20; run++) {
        memset(p.workspace, run % 2 ? 0xFF : run, (size_t)p.args.workspace_bytes);
        omp_set_num_threads(run % 3 == 2 ? 1 : omp_get_num_procs());
        cr_assert_eq(epmoe_experts(&p.args, NULL), EPMOE_OK, "%s", epmoe_last_error());
        if (run == 0) memcpy(first, p.y, bytes);
        cr_assert_arr_eq(p.y, first, bytes, "run %d", run);
    }
    free(first);
    release(&p);
}

/* Rows of NaN and infinite logits go through router and experts and leave the row between them alone, to the bit. */
Test(experts, nan_rows_do_not_reach_their_neighbours)
{
    enum { kE = 128, kK = 8, kD = 48, kF = 40, kT = 4 };
    testing_rng_t rng = testing_rng(testing_seed());
    const epmoe_dtype_t types[] = {EPMOE_F32, EPMOE_BF16};
    for (int32_t type = 0; type < 2; type++) {
        char logits[kT * kE * 4], alone_logits[kE * 4];
        epmoe_dtype_t dtype = types[type];
        for (int32_t e = 0; e < kE; e++) {
            float value = 0.01f * (float)e;
            epmoei_store(logits, dtype, e, NAN);
            epmoei_store(logits, dtype, kE + e, value);
            epmoei_store(alone_logits, dtype, e, value);
            epmoei_store(logits, dtype, 2 * kE + e, INFINITY);
            epmoei_store(logits, dtype, 3 * kE + e, e == 5 ? NAN : value);
        }
        int32_t ids[kT * kK], alone_ids[kK];
        float weights[kT * kK], alone_weights[kK];
        epmoe_topk_args_t topk = EPMOE_TOPK_ARGS_INIT;
        topk.backend = EPMOE_BACKEND_CPU;
        topk.num_tokens = kT, topk.num_experts = kE, topk.top_k = kK;
        topk.logits_dtype = dtype, topk.logits = logits;
        topk.ids = ids, topk.weights = weights;
        cr_assert_eq(epmoe_topk(&topk, NULL), EPMOE_OK, "%s", epmoe_last_error());
        topk.num_tokens = 1, topk.logits = alone_logits, topk.ids = alone_ids, topk.weights = alone_weights;
        cr_assert_eq(epmoe_topk(&topk, NULL), EPMOE_OK);
        for (int32_t i = 0; i < kT * kK; i++) {
            cr_assert(ids[i] >= 0 && ids[i] < kE && isfinite(weights[i]), "slot %d: %d, %g", i, ids[i],
                      (double)weights[i]);
            for (int32_t j = i / kK * kK; j < i; j++) cr_assert_neq(ids[i], ids[j]);
        }

        case_t c = {.tokens = kT,
                    .top_k = kK,
                    .num_experts = kE,
                    .hidden = kD,
                    .intermediate = kF,
                    .dtype = dtype,
                    .y_dtype = dtype,
                    .gate_up_dtype = dtype,
                    .down_dtype = dtype};
        problem_t p = make(&c, &rng);
        int64_t row = kD * epmoe_dtype_size(dtype);
        for (int32_t i = 0; i < kD; i++) {
            epmoei_store(p.x, dtype, i, NAN);
            epmoei_store(p.x, dtype, 2 * kD + i, INFINITY);
        }
        p.args.ids = ids, p.args.weights = weights;
        cr_assert_eq(epmoe_experts(&p.args, NULL), EPMOE_OK, "%s", epmoe_last_error());
        char with[kD * 4], alone[kD * 4];
        memcpy(with, (char *)p.y + row, (size_t)row);

        p.args.num_tokens = 1;
        p.args.x = (char *)p.x + row, p.args.y = alone;
        p.args.ids = alone_ids, p.args.weights = alone_weights;
        cr_assert_eq(epmoe_experts(&p.args, NULL), EPMOE_OK, "%s", epmoe_last_error());
        cr_assert_arr_eq(with, alone, (size_t)row);
        double ref[kD], bound[kD];
        oracle_of_token(&p.args, p.args.x, NULL, 0, ref, bound);
        cr_assert_leq(oracle_error(alone, dtype, ref, bound, kD), 1.0);
        release(&p);
    }
}

Test(experts, bad_arguments_name_themselves_and_write_nothing)
{
    case_t c = {.tokens = 4,
                .top_k = 2,
                .num_experts = 3,
                .hidden = 6,
                .intermediate = 4,
                .dtype = EPMOE_BF16,
                .y_dtype = EPMOE_F32,
                .gate_up_dtype = EPMOE_BF16,
                .down_dtype = EPMOE_BF16,
                .routing = IDS_ONE_EXPERT};
    testing_rng_t rng = testing_rng(testing_seed());
    problem_t p = make(&c, &rng);
    int64_t bytes = 4 * 6 * 4;
#define REFUSED(change, expected_status, word)                                                                         \
    do {                                                                                                               \
        epmoe_experts_args_t args = p.args;                                                                            \
        change;                                                                                                        \
        epmoe_set_last_error(EPMOE_OK, "");                                                                            \
        epmoe_status_t status = epmoe_experts(&args, NULL);                                                            \
        cr_expect_eq(status, expected_status, "%s gave %s", #change, epmoe_status_string(status));                     \
        cr_expect(strstr(epmoe_last_error(), word), "%s: '%s' lacks '%s'", #change, epmoe_last_error(), word);         \
        cr_expect(testing_is_poison(p.y, 0, bytes), "%s wrote to y", #change);                                         \
    } while (0)
    REFUSED(args.num_tokens = -1, EPMOE_ERROR_INVALID_ARGUMENT, "num_tokens is -1");
    REFUSED(args.top_k = 0, EPMOE_ERROR_INVALID_ARGUMENT, "top_k is 0");
    REFUSED(args.top_k = 33, EPMOE_ERROR_INVALID_ARGUMENT, "top_k is 33");
    REFUSED(args.num_experts = 0, EPMOE_ERROR_INVALID_ARGUMENT, "num_experts is 0");
    REFUSED(args.num_experts = 4097, EPMOE_ERROR_INVALID_ARGUMENT, "num_experts is 4097");
    REFUSED(args.hidden = 0, EPMOE_ERROR_INVALID_ARGUMENT, "hidden is 0");
    REFUSED(args.intermediate = -3, EPMOE_ERROR_INVALID_ARGUMENT, "intermediate is -3");
    REFUSED(args.intermediate = INT32_MAX, EPMOE_ERROR_INVALID_ARGUMENT, "intermediate is 2147483647");
    REFUSED(args.dtype = EPMOE_I32, EPMOE_ERROR_INVALID_ARGUMENT, "dtype");
    REFUSED(args.dtype = EPMOE_DTYPE_NONE, EPMOE_ERROR_INVALID_ARGUMENT, "dtype is 0");
    REFUSED(args.y_dtype = EPMOE_F8_E4M3, EPMOE_ERROR_INVALID_ARGUMENT, "y_dtype");
    REFUSED(args.x = NULL, EPMOE_ERROR_INVALID_ARGUMENT, "x is NULL");
    REFUSED(args.ids = NULL, EPMOE_ERROR_INVALID_ARGUMENT, "ids is NULL");
    REFUSED(args.weights = NULL, EPMOE_ERROR_INVALID_ARGUMENT, "weights is NULL");
    REFUSED(args.y = NULL, EPMOE_ERROR_INVALID_ARGUMENT, "y is NULL");
    REFUSED(args.gate_up.data = NULL, EPMOE_ERROR_INVALID_ARGUMENT, "gate_up.data is NULL");
    REFUSED(args.down.data = NULL, EPMOE_ERROR_INVALID_ARGUMENT, "down.data is NULL");
    REFUSED(args.gate_up.format = EPMOE_FORMAT_GPTQ, EPMOE_ERROR_INVALID_ARGUMENT, "gate_up.scales is NULL");
    REFUSED(args.down.format = EPMOE_FORMAT_FP8_BLOCK, EPMOE_ERROR_INVALID_ARGUMENT, "down.scales is NULL");
    REFUSED(args.down.format = (epmoe_format_t)99, EPMOE_ERROR_INVALID_ARGUMENT, "99");
    REFUSED(args.layout = (epmoe_layout_t)3, EPMOE_ERROR_INVALID_ARGUMENT, "layout is 3");
    REFUSED(args.activation = EPMOE_ACTIVATION_NONE, EPMOE_ERROR_INVALID_ARGUMENT, "activation is 4");
    REFUSED(args.limit = -1, EPMOE_ERROR_INVALID_ARGUMENT, "limit is -1");
    REFUSED(args.alpha = NAN, EPMOE_ERROR_INVALID_ARGUMENT, "alpha is nan");
    REFUSED(args.weight_on_input = 2, EPMOE_ERROR_INVALID_ARGUMENT, "weight_on_input is 2");
    REFUSED(args.workspace = NULL, EPMOE_ERROR_INVALID_ARGUMENT, "workspace");
    REFUSED(args.workspace_bytes -= 1, EPMOE_ERROR_INVALID_ARGUMENT, "workspace_bytes");
    REFUSED(args.workspace_bytes = 0, EPMOE_ERROR_INVALID_ARGUMENT, "workspace_bytes 0");
    REFUSED(args.struct_size = 0, EPMOE_ERROR_INVALID_ARGUMENT, "struct_size is 0");
    REFUSED(args.struct_size = (size_t)1 << 40, EPMOE_ERROR_INVALID_ARGUMENT, "struct_size");
    REFUSED(args.backend = EPMOE_BACKEND_CUDA, EPMOE_ERROR_NOT_SUPPORTED, "cuda");
    REFUSED(args.backend = (epmoe_backend_t)7, EPMOE_ERROR_INVALID_ARGUMENT, "backend is 7");
    REFUSED(args.y = (void *)(uintptr_t)args.x, EPMOE_ERROR_INVALID_ARGUMENT, "y aliases x");
    int32_t too_many = 5, negative = -1, at = 5;
    REFUSED(args.num_tokens_dev = &too_many, EPMOE_ERROR_INVALID_ARGUMENT, "*num_tokens_dev is 5");
    REFUSED(args.num_tokens_dev = &negative, EPMOE_ERROR_INVALID_ARGUMENT, "*num_tokens_dev is -1");
    p.ids[at] = 3;
    REFUSED((void)args, EPMOE_ERROR_INVALID_ARGUMENT, "ids[2,1] is 3");
    p.ids[at] = -2;
    REFUSED((void)args, EPMOE_ERROR_INVALID_ARGUMENT, "ids[2,1] is -2");
    p.ids[at] = INT32_MIN;
    REFUSED((void)args, EPMOE_ERROR_INVALID_ARGUMENT, "ids[2,1] is -2147483648");
    p.ids[at] = 2;
#undef REFUSED
    cr_expect_eq(epmoe_experts(NULL, NULL), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_expect_eq(epmoe_experts_workspace_size(&p.args, NULL), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_expect_eq(epmoe_experts_workspace_size(NULL, &bytes), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert(testing_guards_intact(p.y) && testing_guards_intact(p.x));
    cr_assert_eq(epmoe_experts(&p.args, NULL), EPMOE_OK, "the good call: %s", epmoe_last_error());
    release(&p);
}
