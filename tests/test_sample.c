/* Sampling: hand-worked filters and draws, an oracle that sorts in double precision, ties, NaN, frequencies. */
#include "dense_layers/sample.h"
#include "tests/op_testing.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

static epmoe_sample_args_t make(int32_t num_rows, int32_t vocab_size, epmoe_dtype_t dtype, const void *logits,
                                const float *uniform, int32_t *tokens)
{
    epmoe_sample_args_t args = EPMOE_SAMPLE_ARGS_INIT;
    args.num_rows = num_rows, args.vocab_size = vocab_size;
    args.logits_dtype = dtype, args.logits = logits;
    args.uniform = uniform, args.tokens = tokens;
    args.temperature = 1;
    return args;
}

/* Runs the public entry and compares both kernels with it. */
static void run(const epmoe_sample_args_t *args)
{
    epmoe_status_t (*const kernels[])(const epmoe_sample_args_t *, epmoe_stream_t) = {epmoei_sample_ref,
                                                                                      epmoei_sample_cpu};
    cr_assert_eq(epmoe_sample(args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    for (int i = 0; i < 2; i++) {
        epmoe_sample_args_t checked;
        cr_assert_eq(epmoei_sample_check(args, &checked), EPMOE_OK);
        checked.tokens = testing_buffer(4 * (int64_t)args->num_rows, 4);
        cr_assert_eq(kernels[i](&checked, NULL), EPMOE_OK);
        for (int32_t r = 0; r < args->num_rows; r++)
            cr_assert_eq(checked.tokens[r], args->tokens[r], "row %d: kernel %d draws %d, the op %d", r, i,
                         checked.tokens[r], args->tokens[r]);
        cr_assert(testing_guards_intact(checked.tokens));
        testing_buffer_free(checked.tokens);
    }
}

static int32_t draw(epmoe_sample_args_t args, float uniform)
{
    int32_t token = 0x7FFFFFFF;
    args.uniform = &uniform, args.tokens = &token;
    run(&args);
    return token;
}
#define DRAWS(args, uniform, token)                                                                                    \
    do {                                                                                                               \
        int32_t got_ = draw(args, uniform);                                                                            \
        cr_assert_eq(got_, token, "%s at %g is %d, expected %d", #args, (double)(uniform), got_, token);               \
    } while (0)

/* Probabilities .1 .2 .3 .4. */
static const float tenths[] = {0, 0.693147181f, 1.09861229f, 1.38629436f};

Test(sample, by_hand)
{
    epmoe_sample_args_t all = make(1, 4, EPMOE_F32, tenths, NULL, NULL);
    DRAWS(all, 0, 0);
    DRAWS(all, 0.0999f, 0);
    DRAWS(all, 0.1001f, 1);
    DRAWS(all, 0.2999f, 1);
    DRAWS(all, 0.3001f, 2);
    DRAWS(all, 0.5999f, 2);
    DRAWS(all, 0.6001f, 3);
    DRAWS(all, 0.99999994f, 3);
    DRAWS(all, 1, 3);

    epmoe_sample_args_t hot = all; /* temperature 1/2: squares, 1 4 9 16 of 30 */
    hot.temperature = 0.5f;
    DRAWS(hot, 0.0333f, 0);
    DRAWS(hot, 0.0334f, 1);
    DRAWS(hot, 0.1666f, 1);
    DRAWS(hot, 0.1667f, 2);
    DRAWS(hot, 0.4666f, 2);
    DRAWS(hot, 0.4667f, 3);

    epmoe_sample_args_t two = all; /* 3/7, 4/7 */
    two.top_k = 2;
    DRAWS(two, 0, 2);
    DRAWS(two, 0.4285f, 2);
    DRAWS(two, 0.4286f, 3);
    two.top_k = 1;
    DRAWS(two, 0, 3);
    DRAWS(two, 1, 3);
    two.top_k = 4;
    DRAWS(two, 0, 0);
    two.top_k = -1;
    DRAWS(two, 0, 0);

    epmoe_sample_args_t nucleus = all; /* .4 + .3 reach .65, so that two stay */
    nucleus.top_p = 0.65f;
    DRAWS(nucleus, 0, 2);
    DRAWS(nucleus, 0.4285f, 2);
    DRAWS(nucleus, 0.4286f, 3);
    nucleus.top_p = 0.75f; /* three: .2 .3 .4 of .9 */
    DRAWS(nucleus, 0, 1);
    DRAWS(nucleus, 0.2223f, 2);
    DRAWS(nucleus, 0.5556f, 3);
    nucleus.top_p = 0.3f;
    DRAWS(nucleus, 0, 3);
    nucleus.top_p = 1e-30f; /* the likeliest always stays */
    DRAWS(nucleus, 0, 3);
    nucleus.top_p = 1;
    DRAWS(nucleus, 0, 0);

    epmoe_sample_args_t least = all; /* at least .6 times .4 */
    least.min_p = 0.6f;
    DRAWS(least, 0, 2);
    least.min_p = 0.45f;
    DRAWS(least, 0, 1);
    least.min_p = 1;
    DRAWS(least, 0, 3);
}

Test(sample, filters_work_on_what_the_one_before_left)
{
    /* top-k 3 leaves .2 .3 .4 of .9; of these .4 + .3 = 7/9 reach 0.7, which they would not of the whole. */
    epmoe_sample_args_t args = make(1, 4, EPMOE_F32, tenths, NULL, NULL);
    args.top_p = 0.72f;
    DRAWS(args, 0, 1);
    args.top_k = 3;
    DRAWS(args, 0, 2);
    args.min_p = 0.8f; /* .3 is less than .8 * .4 */
    DRAWS(args, 0, 3);
    args.min_p = 0.7f;
    DRAWS(args, 0, 2);
    /* The temperature comes before all: 4 9 16 of 29, where 16/29 alone is above one half. */
    args = make(1, 4, EPMOE_F32, tenths, NULL, NULL);
    args.top_p = 0.52f;
    DRAWS(args, 0, 2);
    args.temperature = 0.5f;
    DRAWS(args, 0, 3);
}

Test(sample, ties_keep_the_lower_ids)
{
    const float logits[] = {1, 2, 2, 0, 2, 2, 1};
    epmoe_sample_args_t args = make(1, 7, EPMOE_F32, logits, NULL, NULL);
    args.top_k = 3; /* ids 1, 2, 4 */
    DRAWS(args, 0, 1);
    DRAWS(args, 0.34f, 2);
    DRAWS(args, 0.67f, 4);
    DRAWS(args, 1, 4);
    args.top_k = 5; /* and 0 of the two ones */
    DRAWS(args, 0, 0);
    DRAWS(args, 1, 5);
    args.top_k = 0, args.min_p = 1; /* all of the largest */
    DRAWS(args, 0, 1);
    DRAWS(args, 1, 5);

    /* Eight equal tokens: as many as reach the share. */
    const float equal[8] = {-3, -3, -3, -3, -3, -3, -3, -3};
    args = make(1, 8, EPMOE_F32, equal, NULL, NULL);
    args.top_p = 0.25f;
    DRAWS(args, 1, 1);
    args.top_p = 0.251f;
    DRAWS(args, 1, 2);
    args.top_k = 2, args.top_p = 0.5f;
    DRAWS(args, 1, 0);
    args.temperature = 0;
    DRAWS(args, 1, 0);

    const float zeros[] = {-0.0f, 0.0f, -0.0f}; /* equal */
    args = make(1, 3, EPMOE_F32, zeros, NULL, NULL);
    args.top_k = 1;
    DRAWS(args, 1, 0);
    args.top_k = 2;
    DRAWS(args, 1, 1);
}

Test(sample, greedy_reads_no_uniform)
{
    const float logits[] = {1, NAN, 3, INFINITY, 3, -1, 2, 7, 7};
    int32_t tokens[3];
    epmoe_sample_args_t args = make(3, 3, EPMOE_F32, logits, NULL, tokens);
    args.temperature = 0;
    run(&args);
    cr_assert(tokens[0] == 2 && tokens[1] == 0 && tokens[2] == 1, "%d %d %d", tokens[0], tokens[1], tokens[2]);
}

Test(sample, nan_and_infinity)
{
    const float none[] = {-INFINITY, NAN, -INFINITY};
    epmoe_sample_args_t args = make(1, 3, EPMOE_F32, none, NULL, NULL);
    for (int i = 0; i < 4; i++) {
        args.top_k = i & 1 ? 2 : 0, args.top_p = i & 2 ? 0.5f : 0;
        DRAWS(args, 0, -1);
        DRAWS(args, 1, -1);
    }
    args.temperature = 0;
    DRAWS(args, 0, -1);

    /* NaN is -inf, and neither is ever drawn. */
    const float some[] = {-INFINITY, 5, NAN, 5, -INFINITY};
    args = make(1, 5, EPMOE_F32, some, NULL, NULL);
    for (int i = 0; i < 4; i++) {
        args.top_k = i & 1 ? 4 : 0, args.top_p = i & 2 ? 0.9f : 0;
        DRAWS(args, 0, 1);
        DRAWS(args, 0.51f, 3);
        DRAWS(args, 1, 3);
    }

    /* +inf is the largest finite number: here that is the same. */
    const float large[] = {3, INFINITY, 0x1.fffffep127f, -0x1.fffffep127f};
    args = make(1, 4, EPMOE_F32, large, NULL, NULL);
    args.temperature = 1e-6f;
    DRAWS(args, 0, 1);
    DRAWS(args, 0.51f, 2);
    DRAWS(args, 1, 2);
    args.temperature = FLT_MAX; /* e^-1, 1, 1, and 0, as that difference is above FLT_MAX */
    DRAWS(args, 0.15f, 0);
    DRAWS(args, 0.16f, 1);
    DRAWS(args, 1, 2);
}

/* ------------------------------------------------------------------------------------------------------ by oracle */

typedef struct token_t {
    double p;
    int32_t id;
    bool kept;
} token_t;

static int by_order(const void *a, const void *b)
{
    const token_t *x = a, *y = b;
    if (x->p != y->p) return x->p > y->p ? -1 : 1;
    return x->id - y->id;
}

static int by_id(const void *a, const void *b) { return ((const token_t *)a)->id - ((const token_t *)b)->id; }

/* Whether the token may be right: its stretch of the cumulative distribution holds uniform, within what rounding can
 * move an edge. A filter whose edge is that close is tried both ways by the caller. */
static bool oracle_accepts(const void *logits, epmoe_dtype_t dtype, int32_t vocab_size, epmoei_sample_rule_t rule,
                           double uniform, int32_t drawn, double slack)
{
    token_t *tokens = malloc((size_t)vocab_size * sizeof *tokens);
    double sum = 0, before = 0, largest = -INFINITY, total = 0, cumulative = 0;
    for (int32_t i = 0; i < vocab_size; i++) largest = fmax(largest, (double)epmoei_load(logits, dtype, i));
    for (int32_t i = 0; i < vocab_size; i++)
        tokens[i] =
            (token_t){exp(((double)epmoei_load(logits, dtype, i) - largest) / (double)rule.temperature), i, false};
    qsort(tokens, (size_t)vocab_size, sizeof *tokens, by_order);
    for (int32_t i = 0; i < rule.top_k; i++) sum += tokens[i].p;
    for (int32_t i = 0; i < rule.top_k; i++) {
        tokens[i].kept =
            before < (double)rule.top_p * (1 + slack) * sum && tokens[i].p >= (double)rule.min_p * (1 + slack);
        if (rule.min_p == 1) tokens[i].kept = tokens[i].p == 1 && before < (double)rule.top_p * sum;
        before += tokens[i].p;
    }
    qsort(tokens, (size_t)vocab_size, sizeof *tokens, by_id);
    for (int32_t i = 0; i < vocab_size; i++) total += tokens[i].kept ? tokens[i].p : 0;
    for (int32_t i = 0; i < drawn; i++) cumulative += tokens[i].kept ? tokens[i].p : 0;
    bool good = tokens[drawn].kept && cumulative <= uniform * total + 3e-6 * total &&
                cumulative + tokens[drawn].p >= uniform * total - 3e-6 * total;
    free(tokens);
    return good;
}

Test(sample, random_rows_against_a_sort, .timeout = 300)
{
    testing_rng_t rng = testing_rng(testing_seed());
    const int32_t sizes[] = {1, 2, 7, 100, 1023, 1024, 1025, 3000, 9001};
    for (int round = 0; round < 300; round++) {
        enum { ROWS = 3 };
        int d = testing_range(&rng, 0, 2);
        epmoe_dtype_t dtype = op_dtypes[d].dtype;
        int32_t size = epmoe_dtype_size(dtype), vocab_size = sizes[testing_range(&rng, 0, round % 10 ? 6 : 8)];
        int64_t stride = vocab_size + testing_range(&rng, 0, 3);
        char *logits = testing_buffer(ROWS * stride * size, size);
        float uniform[ROWS], temperature[ROWS], top_p[ROWS], min_p[ROWS];
        int32_t tokens[ROWS], top_k[ROWS];
        for (int r = 0; r < ROWS; r++) {
            testing_fill_normal(&rng, logits + r * stride * size, dtype, vocab_size, testing_uniform(&rng, 0.2f, 4));
            uniform[r] = testing_uniform(&rng, 0, 1);
            temperature[r] = testing_uniform(&rng, 0.3f, 2);
            top_k[r] = testing_range(&rng, 0, 1) ? 0 : testing_range(&rng, 1, vocab_size < 50 ? vocab_size : 50);
            top_p[r] = testing_range(&rng, 0, 1) ? 0 : testing_uniform(&rng, 0.05f, 0.6f);
            min_p[r] = testing_range(&rng, 0, 1) ? 0 : testing_uniform(&rng, 0.001f, 0.5f);
        }
        epmoe_sample_args_t args = make(ROWS, vocab_size, dtype, logits, uniform, tokens);
        args.logits_stride = stride;
        args.temperature_rows = temperature, args.top_k_rows = top_k, args.top_p_rows = top_p, args.min_p_rows = min_p;
        run(&args);
        for (int r = 0; r < ROWS; r++) {
            epmoei_sample_rule_t rule = epmoei_sample_rule(&args, r);
            cr_assert(tokens[r] >= 0 && tokens[r] < vocab_size);
            bool good = false;
            for (int s = -1; s <= 1; s++)
                good |= oracle_accepts(logits + r * stride * size, dtype, vocab_size, rule, (double)uniform[r],
                                       tokens[r], s * 1e-6);
            cr_assert(good, "V %d T %g k %d p %g min %g u %.9g: token %d", vocab_size, (double)rule.temperature,
                      rule.top_k, (double)rule.top_p, (double)rule.min_p, (double)uniform[r], tokens[r]);
        }
        testing_buffer_free(logits);
    }
}

/* A vocabulary of real size: more equal logits than the kernel's list and blocks hold, and cuts inside of them. */
Test(sample, cuts_inside_many_ties)
{
    enum { V = 150001 };
    float *logits = malloc(V * sizeof *logits);
    for (int32_t i = 0; i < V; i++) logits[i] = i % 3 == 1 ? 4 : -4;
    logits[V - 1] = 5;
    int32_t token;
    float one = 1, zero = 0;
    epmoe_sample_args_t args = make(1, V, EPMOE_F32, logits, &one, &token);
    args.top_k = 30001;                                     /* V-1 and the first 30000 of the fours */
    cr_assert_eq(epmoei_sample_cpu(&args, NULL), EPMOE_OK); /* the reference would take its time */
    cr_assert_eq(token, V - 1);
    logits[V - 1] = -9;
    cr_assert_eq(epmoei_sample_cpu(&args, NULL), EPMOE_OK);
    cr_assert_eq(token, 3 * 30000 + 1, "%d", token);
    args.top_k = 4096;
    cr_assert_eq(epmoei_sample_cpu(&args, NULL), EPMOE_OK);
    cr_assert_eq(token, 3 * 4095 + 1);
    args.top_p = 0.5f;
    cr_assert_eq(epmoei_sample_cpu(&args, NULL), EPMOE_OK);
    cr_assert_eq(token, 3 * 2047 + 1);
    args.uniform = &zero;
    cr_assert_eq(epmoei_sample_cpu(&args, NULL), EPMOE_OK);
    cr_assert_eq(token, 1);
    free(logits);
}

/* 2^16 evenly spaced numbers draw each token as often as its probability says, to one in 2^16. */
Test(sample, frequencies_are_the_distribution)
{
    enum { V = 12, N = 1 << 16 };
    testing_rng_t rng = testing_rng(testing_seed());
    float row[V], *logits = malloc(sizeof(float) * N * V), *uniform = malloc(sizeof(float) * N);
    int32_t *tokens = malloc(sizeof(int32_t) * N), counts[V] = {0};
    double sum = 0;
    for (int i = 0; i < V; i++) row[i] = 2 * testing_normal(&rng), sum += exp((double)row[i]);
    for (int32_t n = 0; n < N; n++) {
        memcpy(logits + (int64_t)n * V, row, sizeof row);
        uniform[n] = ((float)n + 0.5f) / N;
    }
    epmoe_sample_args_t args = make(N, V, EPMOE_F32, logits, uniform, tokens);
    cr_assert_eq(epmoe_sample(&args, NULL), EPMOE_OK);
    for (int32_t n = 0; n < N; n++) counts[tokens[n]]++;
    for (int i = 0; i < V; i++)
        cr_assert(fabs(counts[i] - N * exp((double)row[i]) / sum) <= 1.2, "token %d: %d times, expected %g", i,
                  counts[i], N * exp((double)row[i]) / sum);
    free(logits), free(uniform), free(tokens);
}

Test(sample, no_rows)
{
    epmoe_sample_args_t args = make(0, 8, EPMOE_BF16, NULL, NULL, NULL);
    cr_assert_eq(epmoe_sample(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
}

Test(sample, errors_name_the_argument_and_leave_the_output)
{
    const float logits[8] = {0}, uniform[] = {0, 0.5f}, bad_rows[] = {0.5f, 1.5f}, nan_row[] = {0, NAN};
    const int32_t bad_k[] = {1, -2};
    int32_t *tokens = testing_buffer(8, 0);
    epmoe_sample_args_t base = make(2, 4, EPMOE_F32, logits, uniform, tokens);
#define REJECTS(needle, statement) OP_INVALID(epmoe_sample, base, needle, testing_is_poison(tokens, 0, 8), statement)
    REJECTS("num_rows is -1", bad.num_rows = -1);
    REJECTS("vocab_size is 0", bad.vocab_size = 0);
    REJECTS("vocab_size is 4194305", bad.vocab_size = EPMOE_MAX_VOCAB + 1);
    REJECTS("logits_dtype", bad.logits_dtype = EPMOE_I32);
    REJECTS("logits_stride is 3", bad.logits_stride = 3);
    REJECTS("temperature is -1", bad.temperature = -1);
    REJECTS("temperature is nan", bad.temperature = NAN);
    REJECTS("temperature is inf", bad.temperature = INFINITY);
    REJECTS("top_k is -2", bad.top_k = -2);
    REJECTS("top_p is 1.5", bad.top_p = 1.5f);
    REJECTS("top_p is -0.5", bad.top_p = -0.5f);
    REJECTS("top_p is nan", bad.top_p = NAN);
    REJECTS("min_p is 2", bad.min_p = 2);
    REJECTS("min_p is nan", bad.min_p = NAN);
    REJECTS("logits is NULL", bad.logits = NULL);
    REJECTS("tokens is NULL", bad.tokens = NULL);
    REJECTS("uniform is NULL", bad.uniform = NULL);
    REJECTS("uniform[1] is 1.5", bad.uniform = bad_rows);
    REJECTS("uniform[1] is nan", bad.uniform = nan_row);
    REJECTS("temperature_rows[1] is nan", bad.temperature_rows = nan_row);
    REJECTS("top_k_rows[1] is -2", bad.top_k_rows = bad_k);
    REJECTS("top_p_rows[1] is 1.5", bad.top_p_rows = bad_rows);
    REJECTS("min_p_rows[1] is 1.5", bad.min_p_rows = bad_rows);
    REJECTS("backend is -1", bad.backend = (epmoe_backend_t)-1);
#undef REJECTS
    testing_buffer_free(tokens);
}

Test(sample, struct_sizes)
{
    const float uniform[] = {0.65f};
    int32_t *tokens = testing_buffer(4, 0);
    epmoe_sample_args_t base = make(1, 4, EPMOE_F32, tenths, uniform, tokens);
    OP_STRUCT_SIZES(epmoe_sample, base, sizeof base, testing_is_poison(tokens, 0, 4), tokens[0] == 3);
    testing_buffer_free(tokens);
}

Test(sample, floor_counts_the_logits_once)
{
    epmoe_sample_args_t args = {.num_rows = 3, .vocab_size = 100, .logits_dtype = EPMOE_BF16};
    cr_assert_eq(epmoei_sample_floor(&args).bytes, 600);
}
