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
    bool gate_up_bias, down_bias, alias;
    int32_t weight_on_input;
    int32_t offset; /* elements that x, y and the weights are off their alignment */
    enum { IDS_ANY, IDS_ONE_EXPERT, IDS_HALF_OF_EXPERTS, IDS_SPARSE } routing;
} case_t;

typedef struct problem_t {
    epmoe_experts_args_t args;
    void *x, *gate_up, *down, *y, *workspace;
    float *weights, *gate_up_bias, *down_bias;
    int32_t *ids;
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
    p.y = c->alias ? p.x : testing_buffer(c->tokens * d * epmoe_dtype_size(c->y_dtype), c->offset * 2);

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
    args->activation = c->activation, args->alpha = c->alpha, args->limit = c->limit;
    args->weight_on_input = c->weight_on_input;
    cr_assert_eq(epmoe_experts_workspace_size(args, &args->workspace_bytes), EPMOE_OK, "%s", epmoe_last_error());
    args->workspace = p.workspace = testing_buffer(args->workspace_bytes, 0);
    return p;
}

static void release(problem_t *p, const case_t *c)
{
    void *all[] = {p->gate_up, p->down, p->workspace, p->weights, p->gate_up_bias, p->down_bias, p->ids, p->x};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) testing_buffer_free(all[i]);
    if (!c->alias) testing_buffer_free(p->y);
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

/* y[d] and bound[d] of token t; x is not that of the args where y has overwritten it. */
static void oracle_of_token(const epmoe_experts_args_t *args, const void *x, int64_t t, double *y, double *bound)
{
    oracle_experts_t experts = oracle_of(args);
    double *row = malloc((size_t)args->hidden * sizeof *row);
    oracle_row(x, args->dtype, t, args->hidden, row);
    for (int32_t i = 0; i < args->hidden; i++) y[i] = bound[i] = 0;
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

static void check(const case_t *c, const char *label)
{
    testing_rng_t rng = testing_rng(testing_seed() + (uint64_t)c->hidden * 31 + (uint64_t)c->tokens);
    problem_t p = make(c, &rng);
    int64_t d = c->hidden, x_bytes = c->tokens * d * epmoe_dtype_size(c->dtype);
    void *x = malloc((size_t)x_bytes + 1);
    memcpy(x, p.x, (size_t)x_bytes);
    cr_assert_eq(epmoe_experts(&p.args, NULL), EPMOE_OK, "%s: %s", label, epmoe_last_error());

    double *ref = malloc((size_t)d * sizeof *ref), *bound = malloc((size_t)d * sizeof *bound);
    for (int64_t t = 0; t < c->tokens; t++) {
        bool used = false;
        for (int64_t s = t * c->top_k; s < (t + 1) * c->top_k; s++) used |= p.ids[s] >= 0;
        oracle_of_token(&p.args, x, t, ref, bound);
        const char *row = (const char *)p.y + t * d * epmoe_dtype_size(c->y_dtype);
        double error = oracle_error(row, c->y_dtype, ref, bound, d);
        cr_assert(error <= 1, "%s: token %lld is off by %g times what fp32 allows", label, (long long)t, error);
        cr_assert(used || is_zero_row(p.y, c->y_dtype, t, c->hidden), "%s: token %lld has no slot", label,
                  (long long)t);
    }
    cr_assert(c->alias || !memcmp(x, p.x, (size_t)x_bytes), "%s: x was written", label);
    cr_assert(testing_guards_intact(p.y) && testing_guards_intact(p.workspace) && testing_guards_intact(p.x), "%s",
              label);
    free(x), free(ref), free(bound);
    release(&p, c);
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
                    .alias = testing_range(&rng, 0, 2) == 0,
                    .weight_on_input = testing_range(&rng, 0, 2) == 0,
                    .offset = testing_range(&rng, 0, 3),
                    .routing = testing_range(&rng, 0, 3)};
        if (c.alias) c.y_dtype = c.dtype;
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
                    .alias = true};
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
                .alias = true};
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
        oracle_of_token(&p.args, x, t, ref, bound);
        double error = oracle_error((float *)p.y + t * kD, EPMOE_F32, ref, bound, kD);
        cr_assert(error <= 1, "token %lld is off by %g times what fp32 allows", (long long)t, error);
    }
    cr_assert(testing_guards_intact(p.y) && testing_guards_intact(p.workspace));
    free(x);
    release(&p, &c);
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
    release(&p, &c);
}

/* One expert of the given number is `factor` times the identity: silu(gate) * up with gate = 0 x + bias, silu(bias) =
 * 1, which takes bias = 1.2784645. */
typedef struct scaling_t {
    int32_t num_experts, d;
    float *gate_up, *gate_up_bias, *down;
} scaling_t;

static const float kUnitGate = 1.27846454276107f; /* silu of it is 1 */

static scaling_t scaling_experts(int32_t num_experts, int32_t d)
{
    size_t matrix = (size_t)d * (size_t)d;
    scaling_t s = {num_experts, d, calloc((size_t)num_experts * 2 * matrix, 4),
                   calloc((size_t)num_experts * 2 * (size_t)d, 4), calloc((size_t)num_experts * matrix, 4)};
    for (int32_t e = 0; e < num_experts; e++)
        for (int32_t i = 0; i < d; i++) {
            s.gate_up_bias[(e * 2) * d + i] = kUnitGate;
            s.gate_up[((int64_t)(e * 2 + 1) * d + i) * d + i] = 1;
            s.down[((int64_t)e * d + i) * d + i] = (float)(e + 1);
        }
    return s;
}

static void scaling_free(scaling_t *s) { free(s->gate_up), free(s->gate_up_bias), free(s->down); }

static epmoe_experts_args_t scaling_args(const scaling_t *s, int32_t tokens, int32_t top_k, epmoe_dtype_t dtype)
{
    epmoe_experts_args_t args = EPMOE_EXPERTS_ARGS_INIT;
    args.backend = EPMOE_BACKEND_CPU;
    args.num_tokens = tokens, args.top_k = top_k, args.num_experts = s->num_experts;
    args.hidden = args.intermediate = s->d;
    args.dtype = dtype;
    args.gate_up.format = args.down.format = EPMOE_FORMAT_F32;
    args.gate_up.data = s->gate_up, args.down.data = s->down;
    args.gate_up_bias = s->gate_up_bias;
    return args;
}

static void run(epmoe_experts_args_t *args)
{
    cr_assert_eq(epmoe_experts_workspace_size(args, &args->workspace_bytes), EPMOE_OK, "%s", epmoe_last_error());
    args->workspace = testing_buffer(args->workspace_bytes, 0);
    cr_assert_eq(epmoe_experts(args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert(testing_guards_intact(args->workspace));
    testing_buffer_free(args->workspace);
}

/* Expert parallelism seen from one rank: tokens of which it owns nothing are 0, whatever lies in the scratch. */
Test(experts, tokens_without_local_experts_are_exactly_zero)
{
    enum { kD = 8 };
    scaling_t s = scaling_experts(4, kD); /* experts 4..7 of 8: local 0..3 */
    int32_t ids[] = {-1, 0, -1, -1, 3, -1};
    float weights[] = {NAN, 0.5f, NAN, NAN, 0.25f, NAN}, x[3 * kD];
    for (int32_t i = 0; i < 3 * kD; i++) x[i] = (float)(i / kD + 1);
    float *y = testing_buffer(sizeof x, 0);
    epmoe_experts_args_t args = scaling_args(&s, 3, 2, EPMOE_F32);
    args.x = x, args.ids = ids, args.weights = weights, args.y = y;
    run(&args);
    for (int32_t i = 0; i < kD; i++) {
        cr_assert_float_eq(y[i], 0.5f * 1 * 1, 1e-6f);
        cr_assert_eq(epmoei_f32_bits(y[kD + i]), 0, "token 1 is %g", (double)y[kD + i]);
        cr_assert_float_eq(y[2 * kD + i], 0.25f * 4 * 3, 3e-6f);
    }
    cr_assert(testing_guards_intact(y));
    testing_buffer_free(y);
    scaling_free(&s);
}

/* .25*4x + .25*4x + .3*2x + .2*1x = 2.8x. */
Test(experts, the_same_expert_twice_counts_twice)
{
    enum { kD = 5, kTokens = 9 };
    scaling_t s = scaling_experts(4, kD);
    int32_t ids[kTokens * 4];
    float weights[kTokens * 4], x[kTokens * kD], y[kTokens * kD];
    for (int32_t i = 0; i < kTokens * 4; i++) {
        ids[i] = (int32_t[]){3, 3, 1, 0}[i % 4];
        weights[i] = (float[]){.25f, .25f, .3f, .2f}[i % 4];
    }
    for (int32_t i = 0; i < kTokens * kD; i++) x[i] = (float)(i - 20) / 8;
    epmoe_experts_args_t args = scaling_args(&s, kTokens, 4, EPMOE_F32);
    args.x = x, args.ids = ids, args.weights = weights, args.y = y;
    run(&args);
    for (int32_t i = 0; i < kTokens * kD; i++)
        cr_assert(fabs((double)y[i] - 2.8 * (double)x[i]) <= 1e-5 * fabs(2.8 * (double)x[i]), "%g of %g", (double)y[i],
                  (double)x[i]);
    scaling_free(&s);
}

/* fp16 rows of +-131072 (twice the largest fp16) that their weights bring back. One expert each; the down projection
 * is 128 times 32 * 32. */
Test(experts, fp16_does_not_overflow_before_the_weight)
{
    enum { kD = 2, kF = 128 };
    uint16_t x[2 * kD], *y = testing_buffer(2 * kD * 2, 0);
    float gate_up[2 * 2 * kF * kD] = {0}, bias[2 * 2 * kF], down[2 * kD * kF];
    for (int32_t e = 0; e < 2; e++)
        for (int32_t i = 0; i < kF; i++) {
            /* h = silu(unit) * 32, which fp16 holds exactly. */
            bias[e * 2 * kF + i] = kUnitGate;
            bias[e * 2 * kF + kF + i] = 32;
            for (int32_t n = 0; n < kD; n++) down[(e * kD + n) * kF + i] = e ? -32 : 32;
        }
    memset(x, 0, sizeof x);
    int32_t ids[] = {0, -1, 0, 1};
    float weights[] = {0.25f, NAN, 0.5f, 0.5f};
    epmoe_experts_args_t args = EPMOE_EXPERTS_ARGS_INIT;
    args.backend = EPMOE_BACKEND_CPU;
    args.num_tokens = 2, args.top_k = 2, args.num_experts = 2, args.hidden = kD, args.intermediate = kF;
    args.dtype = EPMOE_F16;
    args.gate_up.format = args.down.format = EPMOE_FORMAT_F32;
    args.gate_up.data = gate_up, args.down.data = down, args.gate_up_bias = bias;
    args.x = x, args.ids = ids, args.weights = weights, args.y = y;
    run(&args);
    for (int32_t i = 0; i < kD; i++) {
        cr_assert_eq(epmoei_f16_to_f32(y[i]), 32768.0f, "%g", (double)epmoei_f16_to_f32(y[i]));
        cr_assert_eq(epmoei_f16_to_f32(y[kD + i]), 0.0f, "%g", (double)epmoei_f16_to_f32(y[kD + i]));
    }
    testing_buffer_free(y);
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
        oracle_of_token(&p.args, p.args.x, 0, ref, bound);
        cr_assert_leq(oracle_error(alone, dtype, ref, bound, kD), 1.0);
        release(&p, &c);
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
    REFUSED(args.gate_up.format = EPMOE_FORMAT_GPTQ, EPMOE_ERROR_NOT_SUPPORTED, "gate_up");
    REFUSED(args.down.format = EPMOE_FORMAT_MXFP4, EPMOE_ERROR_NOT_SUPPORTED, "down");
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
    int32_t at = 5;
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
    release(&p, &c);
}

/* A caller built against a later version, and one against an earlier one. */
Test(experts, structs_of_other_versions)
{
    scaling_t s = scaling_experts(1, 4);
    int32_t ids[] = {0};
    float weights[] = {1}, x[] = {1, 2, 3, 4}, y[4];
    struct {
        epmoe_experts_args_t args;
        char more[32];
    } later = {.args = scaling_args(&s, 1, 1, EPMOE_F32)};
    later.args.x = x, later.args.ids = ids, later.args.weights = weights, later.args.y = y;
    later.args.struct_size = sizeof later;
    run(&later.args);
    cr_assert_float_eq(y[3], 4, 1e-5f);
    later.more[31] = 1;
    cr_assert_eq(epmoe_experts(&later.args, NULL), EPMOE_ERROR_NOT_SUPPORTED);
    cr_assert(strstr(epmoe_last_error(), "does not know"), "%s", epmoe_last_error());

    /* Without workspace_bytes there is no workspace. */
    epmoe_experts_args_t earlier = later.args;
    earlier.struct_size = offsetof(epmoe_experts_args_t, workspace_bytes);
    cr_assert_eq(epmoe_experts(&earlier, NULL), EPMOE_ERROR_INVALID_ARGUMENT);
    scaling_free(&s);
}
