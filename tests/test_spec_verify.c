/* Verification of drafted tokens: chains worked by hand, ends, ties, NaN, and that the tokens have the target's
 * distribution, by a chi-square test. */
#include "dense_layers/spec_verify.h"
#include "tests/op_testing.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static epmoe_spec_verify_args_t make(int32_t num_rows, int32_t num_drafts, int32_t vocab_size, const int32_t *ids,
                                     const float *draft, const float *target, const float *uniform)
{
    epmoe_spec_verify_args_t args = EPMOE_SPEC_VERIFY_ARGS_INIT;
    args.num_rows = num_rows, args.num_drafts = num_drafts, args.vocab_size = vocab_size;
    args.draft_ids = ids, args.draft_probs = draft, args.target_probs = target, args.uniform = uniform;
    args.tokens = testing_buffer(4 * (int64_t)num_rows * (num_drafts + 1), 4);
    args.accepted = testing_buffer(4 * (int64_t)num_rows, 4);
    return args;
}

static void release(epmoe_spec_verify_args_t *args)
{
    cr_assert(testing_guards_intact(args->tokens) && testing_guards_intact(args->accepted));
    testing_buffer_free(args->tokens), testing_buffer_free(args->accepted);
}

/* Runs the public entry and compares both kernels with it. */
static void run(const epmoe_spec_verify_args_t *args)
{
    epmoe_status_t (*const kernels[])(const epmoe_spec_verify_args_t *, epmoe_stream_t) = {epmoei_spec_verify_ref,
                                                                                           epmoei_spec_verify_cpu};
    int64_t n = (int64_t)args->num_rows * (args->num_drafts + 1);
    cr_assert_eq(epmoe_spec_verify(args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    for (int i = 0; i < 2; i++) {
        epmoe_spec_verify_args_t own = make(args->num_rows, args->num_drafts, args->vocab_size, args->draft_ids,
                                            args->draft_probs, args->target_probs, args->uniform);
        cr_assert_eq(kernels[i](&own, NULL), EPMOE_OK);
        cr_assert_eq(memcmp(own.tokens, args->tokens, 4 * (size_t)n), 0, "tokens of kernel %d differ", i);
        cr_assert_eq(memcmp(own.accepted, args->accepted, 4 * (size_t)args->num_rows), 0);
        release(&own);
    }
}

#define TOKENS(args, stands, ...)                                                                                      \
    do {                                                                                                               \
        const int32_t expected_[] = {__VA_ARGS__};                                                                     \
        run(&args);                                                                                                    \
        cr_assert_eq(args.accepted[0], stands, "accepted is %d", args.accepted[0]);                                    \
        for (int t_ = 0; t_ <= args.num_drafts; t_++)                                                                  \
            cr_assert_eq(args.tokens[t_], expected_[t_], "token %d is %d, expected %d", t_, args.tokens[t_],           \
                         expected_[t_]);                                                                               \
    } while (0)

/* Two drafts of four tokens. Token 1: p/q = .5/.8; token 2: p/q = .3/.2 > 1. */
static const float draft2[] = {.1f, .8f, .1f, 0, .25f, .25f, .2f, .3f};
static const float target2[] = {.2f, .5f, .1f, .2f, .1f, .4f, .3f, .2f, .25f, .25f, .25f, .25f};
static const int32_t ids2[] = {1, 2};

Test(spec_verify, by_hand)
{
    float uniform[] = {.6249f, .99f, .6f};
    epmoe_spec_verify_args_t args = make(1, 2, 4, ids2, draft2, target2, uniform);
    TOKENS(args, 2, 1, 2, 2); /* the bonus at .6 of quarters */
    uniform[2] = 0;
    TOKENS(args, 2, 1, 2, 0);
    uniform[2] = 1;
    TOKENS(args, 2, 1, 2, 3);
    uniform[0] = .6251f; /* rejected: the difference is .1 0 0 .2 */
    uniform[2] = .3333f;
    TOKENS(args, 0, 0, -1, -1);
    uniform[2] = .3334f;
    TOKENS(args, 0, 3, -1, -1);
    uniform[0] = 0; /* the second rejected: token 0 with q = .25, p = .1; difference 0 .15 .1 0 */
    args.draft_ids = (const int32_t[]){1, 0};
    uniform[1] = .4001f, uniform[2] = .5999f;
    TOKENS(args, 1, 1, 1, -1);
    uniform[2] = .6001f;
    TOKENS(args, 1, 1, 2, -1);
    uniform[1] = .3999f, uniform[2] = .1f;
    TOKENS(args, 2, 1, 0, 0);
    release(&args);
}

Test(spec_verify, the_accept_test_is_exact)
{
    /* p = q: u < 1 accepts, 1 does not. p a bit below q: the largest float below 1 does not. */
    float draft[] = {.3f, .7f}, target[] = {.3f, .7f, .5f, .5f}, uniform[] = {0x1.fffffep-1f, 0};
    const int32_t id[] = {0};
    epmoe_spec_verify_args_t args = make(1, 1, 2, id, draft, target, uniform);
    TOKENS(args, 1, 0, 0);
    uniform[0] = 1;
    TOKENS(args, 0, 0, -1); /* no difference is positive: drawn from the target */
    uniform[1] = .31f;
    TOKENS(args, 0, 1, -1);
    uniform[0] = 0x1.fffffep-1f, target[0] = nextafterf(nextafterf(.3f, 0), 0);
    TOKENS(args, 0, 1, -1);
    /* q = 0: whatever the target allows; p = 0: nothing. */
    draft[0] = 0, target[0] = 1e-30f, uniform[0] = 1;
    TOKENS(args, 1, 0, 0);
    target[0] = 0, uniform[0] = 0;
    TOKENS(args, 0, 1, -1);
    /* p is u * q as fp32 rounds it: accepted when that went up. */
    testing_rng_t rng = testing_rng(testing_seed());
    int32_t outcomes[2] = {0};
    for (int i = 0; i < 200; i++) {
        uniform[0] = testing_uniform(&rng, 0.01f, 1), draft[0] = testing_uniform(&rng, 0.01f, 1);
        double product = (double)uniform[0] * (double)draft[0]; /* 48 bits */
        target[0] = (float)product;
        run(&args);
        cr_assert_eq(args.accepted[0], product < (double)target[0], "%a * %a", (double)uniform[0], (double)draft[0]);
        outcomes[args.accepted[0]]++;
    }
    cr_assert(outcomes[0] && outcomes[1]);
    release(&args);
}

Test(spec_verify, drafts_of_different_lengths)
{
    /* -1 ends the drafts: the bonus comes from the target at that place, and nothing behind it is read. */
    float draft[] = {.1f, .8f, .1f, 0, NAN, NAN, NAN, NAN}, uniform[] = {.5f, .5f, .65f};
    const int32_t one[] = {1, -1}, none[] = {-1, 77};
    epmoe_spec_verify_args_t args = make(1, 2, 4, one, draft, target2, uniform);
    TOKENS(args, 1, 1, 2, -1);
    args.draft_ids = none;
    TOKENS(args, 0, 1, -1, -1);
    release(&args);
    /* No drafts at all: a draw. */
    args = make(1, 0, 4, NULL, NULL, target2, uniform);
    TOKENS(args, 0, 1);
    release(&args);
}

Test(spec_verify, without_draft_probabilities_the_draft_was_certain)
{
    float uniform[] = {.4999f, .2999f, .99f};
    epmoe_spec_verify_args_t args = make(1, 2, 4, ids2, NULL, target2, uniform);
    TOKENS(args, 2, 1, 2, 3);
    uniform[1] = .3001f; /* .1 .4 . .2 of .7 */
    TOKENS(args, 1, 1, 3, -1);
    uniform[2] = .7f;
    TOKENS(args, 1, 1, 1, -1);
    uniform[0] = .5001f, uniform[2] = .41f; /* .2 . .1 .2 of .5 */
    TOKENS(args, 0, 2, -1, -1);
    /* The target gives all to another token. */
    const float sure[] = {0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0};
    args.target_probs = sure;
    TOKENS(args, 0, 2, -1, -1);
    /* The target gives nothing to any token. */
    args.target_probs = sure + 4;
    float nothing[12] = {0};
    args.target_probs = nothing;
    TOKENS(args, 0, -1, -1, -1);
    release(&args);
}

Test(spec_verify, nan_rejects_and_counts_as_nothing)
{
    float draft[] = {NAN, .5f, .5f}, target[] = {.5f, .5f, NAN, NAN, -1, 7}, uniform[] = {0, 0};
    const int32_t id[] = {0};
    epmoe_spec_verify_args_t args = make(1, 1, 3, id, draft, target, uniform);
    TOKENS(args, 0, 0, -1);
    uniform[1] = 1; /* .5 of token 0, none of token 1 */
    TOKENS(args, 0, 0, -1);
    draft[0] = .1f, uniform[1] = 0;
    TOKENS(args, 1, 0, 2); /* a bonus from NaN, -1 and 7: the last */
    args.draft_ids = (const int32_t[]){2};
    TOKENS(args, 0, 0, -1);
    release(&args);
}

Test(spec_verify, vocabularies_of_all_sizes)
{
    testing_rng_t rng = testing_rng(testing_seed());
    const int32_t sizes[] = {1, 2, 1023, 1024, 1025, 5000};
    for (size_t v = 0; v < sizeof sizes / sizeof *sizes; v++)
        for (int round = 0; round < 6; round++) {
            enum { B = 5, G = 3 };
            int32_t V = sizes[v], ids[B * G];
            int64_t nd = (int64_t)B * G * V, nt = (int64_t)B * (G + 1) * V;
            float *draft = testing_buffer(4 * nd, 4), *target = testing_buffer(4 * nt, 4), uniform[B * (G + 1)];
            for (int64_t i = 0; i < nd; i++) draft[i] = testing_uniform(&rng, 0, 2.0f / (float)V);
            for (int64_t i = 0; i < nt; i++) target[i] = testing_uniform(&rng, 0, 2.0f / (float)V);
            for (int i = 0; i < B * G; i++) ids[i] = testing_range(&rng, 0, V - 1);
            for (int i = 0; i < B * (G + 1); i++) uniform[i] = testing_uniform(&rng, 0, 1);
            epmoe_spec_verify_args_t args = make(B, G, V, ids, round % 3 ? draft : NULL, target, uniform);
            run(&args);
            for (int64_t b = 0; b < B; b++) {
                int32_t g = 0;
                bool rejected = false;
                for (; g < G && !rejected; g += !rejected) {
                    double q = args.draft_probs ? (double)draft[(b * G + g) * V + ids[b * G + g]] : 1;
                    rejected = !((double)uniform[b * (G + 1) + g] <
                                 (double)target[(b * (G + 1) + g) * V + ids[b * G + g]] / q);
                }
                cr_assert_eq(args.accepted[b], g);
                /* The drawn token's stretch of the distribution holds the number. */
                double total = 0, before = 0, own = 0;
                int32_t drawn = args.tokens[b * (G + 1) + g];
                for (int32_t i = 0; i < V; i++) {
                    double q = !rejected          ? 0
                               : args.draft_probs ? (double)draft[(b * G + g) * V + i]
                                                  : i == ids[b * G + g];
                    double w = fmax((double)target[(b * (G + 1) + g) * V + i] - q, 0);
                    total += w, before += i < drawn ? w : 0, own = i == drawn ? w : own;
                }
                double at = (double)uniform[b * (G + 1) + G] * total;
                if (total > 1e-6)
                    cr_assert(before <= at + 1e-6 * total && before + own >= at - 1e-6 * total && own > 0,
                              "V %d row %lld", V, (long long)b);
            }
            release(&args);
            testing_buffer_free(draft), testing_buffer_free(target);
        }
}

/* Lossless: over many rounds in which the draft is drawn from q, the tokens that come out are distributed as p.
 * Position 1 counts whenever the first draft stood. The seed is fixed, so that a bound which chance passes once in 10^6
 * runs either holds or does not. */
Test(spec_verify, tokens_have_the_targets_distribution, .timeout = 300)
{
    enum { V = 8, G = 2, N = 200000, SEED = 20240607 };
    printf("seed %d\n", SEED);
    testing_rng_t rng = testing_rng(SEED);
    double p[G + 1][V], q[G][V];
    for (int g = 0; g <= G; g++) {
        double sum_p = 0, sum_q = 0;
        for (int i = 0; i < V; i++) {
            sum_p += p[g][i] = exp((double)testing_normal(&rng));
            if (g < G) sum_q += q[g][i] = i == 5 ? 0 : exp((double)testing_normal(&rng));
        }
        for (int i = 0; i < V; i++) {
            p[g][i] /= sum_p;
            if (g < G) q[g][i] /= sum_q;
        }
    }
    float *draft = malloc(sizeof(float) * N * G * V), *target = malloc(sizeof(float) * N * (G + 1) * V);
    float *uniform = malloc(sizeof(float) * N * (G + 1));
    int32_t *ids = malloc(sizeof(int32_t) * N * G);
    for (int n = 0; n < N; n++) {
        for (int g = 0; g <= G; g++) {
            for (int i = 0; i < V; i++) {
                target[((int64_t)n * (G + 1) + g) * V + i] = (float)p[g][i];
                if (g < G) draft[((int64_t)n * G + g) * V + i] = (float)q[g][i];
            }
            uniform[n * (G + 1) + g] = testing_uniform(&rng, 0, 1);
        }
        for (int g = 0; g < G; g++) {
            double u = (double)testing_uniform(&rng, 0, 1), sum = q[g][0];
            int32_t id = 0;
            while (sum <= u && id < V - 1) sum += q[g][++id];
            ids[n * G + g] = id;
        }
    }
    epmoe_spec_verify_args_t args = make(N, G, V, ids, draft, target, uniform);
    cr_assert_eq(epmoe_spec_verify(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    int64_t counts[G + 1][V] = {{0}}, reached[G + 1] = {0};
    for (int n = 0; n < N; n++)
        for (int g = 0; g <= args.accepted[n]; g++) {
            counts[g][args.tokens[n * (G + 1) + g]]++;
            reached[g]++;
        }
    for (int g = 0; g <= G; g++) {
        double chi_square = 0;
        for (int i = 0; i < V; i++) {
            double expected = p[g][i] * (double)reached[g], difference = (double)counts[g][i] - expected;
            chi_square += difference * difference / expected;
        }
        /* 7 degrees of freedom: P(chi^2 > 40.5) = 1e-6. */
        cr_assert(chi_square < 40.5, "place %d, reached %lld times: chi^2 is %g", g, (long long)reached[g], chi_square);
        cr_assert(reached[g] > N / 10);
    }
    /* A draft stands as often as the two distributions overlap. */
    double overlap = 0;
    for (int i = 0; i < V; i++) overlap += fmin(p[0][i], q[0][i]);
    double deviation = sqrt(N * overlap * (1 - overlap));
    cr_assert(fabs((double)reached[1] - N * overlap) < 5 * deviation);
    release(&args);
    free(draft), free(target), free(uniform), free(ids);
}

Test(spec_verify, no_rows)
{
    epmoe_spec_verify_args_t args = EPMOE_SPEC_VERIFY_ARGS_INIT;
    args.num_drafts = 3, args.vocab_size = 10;
    cr_assert_eq(epmoe_spec_verify(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
}

Test(spec_verify, errors_name_the_argument_and_leave_the_output)
{
    const float uniform[] = {.5f, .5f, .5f};
    epmoe_spec_verify_args_t base = make(1, 2, 4, ids2, draft2, target2, uniform);
#define REJECTS(needle, statement)                                                                                     \
    OP_INVALID(epmoe_spec_verify, base, needle,                                                                        \
               testing_is_poison(base.tokens, 0, 12) && testing_is_poison(base.accepted, 0, 4), statement)
    REJECTS("num_rows is -1", bad.num_rows = -1);
    REJECTS("num_drafts is -1", bad.num_drafts = -1);
    REJECTS("vocab_size is 0", bad.vocab_size = 0);
    REJECTS("vocab_size is 4194305", bad.vocab_size = EPMOE_MAX_VOCAB + 1);
    REJECTS("target_probs is", (bad.num_rows = INT32_MAX, bad.num_drafts = 1 << 30, bad.vocab_size = 1 << 20));
    REJECTS("draft_ids is NULL", bad.draft_ids = NULL);
    REJECTS("target_probs is NULL", bad.target_probs = NULL);
    REJECTS("uniform is NULL", bad.uniform = NULL);
    REJECTS("tokens is NULL", bad.tokens = NULL);
    REJECTS("accepted is NULL", bad.accepted = NULL);
    REJECTS("draft_ids[0,1] is 4", bad.draft_ids = ((const int32_t[]){0, 4}));
    REJECTS("draft_ids[0,0] is -2", bad.draft_ids = ((const int32_t[]){-2, 0}));
    REJECTS("uniform[0,2] is nan", bad.uniform = ((const float[]){0, 0, NAN}));
    REJECTS("uniform[0,0] is -0.5", bad.uniform = ((const float[]){-.5f, 0, 0}));
    REJECTS("uniform[0,1] is 1.5", bad.uniform = ((const float[]){0, 1.5f, 0}));
    REJECTS("backend is -1", bad.backend = (epmoe_backend_t)-1);
#undef REJECTS
    release(&base);
}

Test(spec_verify, struct_sizes)
{
    const float uniform[] = {.5f, .5f, .6f};
    epmoe_spec_verify_args_t base = make(1, 2, 4, ids2, draft2, target2, uniform);
    OP_STRUCT_SIZES(epmoe_spec_verify, base, sizeof base, testing_is_poison(base.tokens, 0, 12),
                    base.accepted[0] == 2 && base.tokens[2] == 2);
    release(&base);
}

Test(spec_verify, floor_counts_one_draw_per_row)
{
    const float probability = 1;
    epmoe_spec_verify_args_t args = {.num_rows = 10, .num_drafts = 3, .vocab_size = 100};
    cr_assert_eq(epmoei_spec_verify_floor(&args, 4).bytes, 10 * 100 * 4 + 20 * 10 * 4);
    args.draft_probs = &probability;
    cr_assert_eq(epmoei_spec_verify_floor(&args, 4).bytes, 14 * 100 * 4 + 20 * 10 * 4);
}
