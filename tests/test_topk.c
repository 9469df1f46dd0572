/* The router op: hand-worked rows, ties, NaN and infinities, groups, errors. */
#include "tests/topk_testing.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

static void expect_row(const call_t *call, int32_t token, const int32_t *ids, const double *weights)
{
    int32_t top_k = call->args.top_k;
    for (int32_t j = 0; j < top_k; j++) {
        int32_t id = call->ids[token * top_k + j];
        double weight = (double)call->weights[token * top_k + j];
        cr_assert_eq(id, ids[j], "row %d: ids[%d] is %d, expected %d", token, j, id, ids[j]);
        if (weights)
            cr_assert(fabs(weight - weights[j]) <= 1e-6 * fabs(weights[j]), "row %d: weights[%d] is %.9g, expected %g",
                      token, j, weight, weights[j]);
    }
}

#define EXPECT_ROW(call, token, ids, weights) expect_row(call, token, (const int32_t[])ids, (const double[])weights)
#define LIST(...)                                                                                                      \
    {                                                                                                                  \
        __VA_ARGS__                                                                                                    \
    }

Test(topk, scale_is_applied_once_with_and_without_renormalising)
{
    const float logits[] = {0, 0.693147181f, 1.098612289f, 1.386294361f}; /* softmax .1 .2 .3 .4 */
    const double expected[2][2][2] = {{{.4, .3}, {1.0, .75}}, {{4 / 7.0, 3 / 7.0}, {10 / 7.0, 7.5 / 7.0}}};
    for (int32_t renormalize = 0; renormalize < 2; renormalize++)
        for (int32_t scaled = 0; scaled < 2; scaled++) {
            call_t call = call_make(1, 4, 2, logits);
            call.args.renormalize = renormalize;
            call.args.scale = scaled ? 2.5f : 0.0f;
            call_run(&call);
            expect_row(&call, 0, (const int32_t[]){3, 2}, expected[renormalize][scaled]);
            call_free(&call);
        }
}

Test(topk, each_scoring_by_hand)
{
    const float logits[] = {0, 1, -1, 2};
    const struct {
        epmoe_scoring_t scoring;
        int32_t renormalize;
        double weights[2];
    } cases[] = {
        {EPMOE_SCORING_SIGMOID, 0, {0.880797078, 0.731058579}},
        {EPMOE_SCORING_SIGMOID, 1, {0.546448823, 0.453551177}},
        {EPMOE_SCORING_SQRT_SOFTPLUS, 0, {1.458399126, 1.145976304}}, /* softplus 2.126928, 1.313262 */
        {EPMOE_SCORING_TOPK_SOFTMAX, 0, {0.731058579, 0.268941421}},
        {EPMOE_SCORING_TOPK_SOFTMAX, 1, {0.731058579, 0.268941421}}, /* they already sum to 1 */
        {EPMOE_SCORING_SOFTMAX, 0, {0.643914260, 0.236882818}},
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        call_t call = call_make(1, 4, 2, logits);
        call.args.scoring = cases[c].scoring;
        call.args.renormalize = cases[c].renormalize;
        call_run(&call);
        expect_row(&call, 0, (const int32_t[]){3, 1}, cases[c].weights);
        call_free(&call);
    }
}

/* Liu et al. 2023 with jitter 0.1, so that l is close to m when (m - l) / max(|l|, m) <= 0.2. Worked by hand:
 *   4, 3.5, 3.3, 1   3.5 and 3.3 lie within 0.125 and 0.175 of 4, 1 does not: 1 / (1 + e^-0.5 + e^-0.7) = 0.475485
 *                    behind 4: 3.3 lies within 0.057 of 3.5: 1 / (1 + e^-0.2) = 0.549834
 *   -2, -2.2, -9, 0  of 0 nothing is close, since max(|l|, 0) = |l|: 1
 *                    behind it of -2: -2.2 within 0.2 / 2.2 = 0.091, -9 not: 1 / (1 + e^-0.2) = 0.549834
 *   5, 5, -inf, NaN  5 and 5: 1/2; behind the first: 1
 *   -inf, NaN, ...   nothing: 0 and 0 */
Test(topk, sparse_mixer_by_hand)
{
    const float logits[] = {4, 3.5f, 3.3f, 1, -2, -2.2f, -9, 0, 5, 5, -INFINITY, NAN, -INFINITY, NAN, NAN, -INFINITY};
    call_t call = call_make(4, 4, 2, logits);
    call.args.scoring = EPMOE_SCORING_SPARSE_MIXER;
    call.args.jitter = 0.1f;
    call_run(&call);
    EXPECT_ROW(&call, 0, LIST(0, 1), LIST(0.475485, 0.549834));
    EXPECT_ROW(&call, 1, LIST(3, 0), LIST(1, 0.549834));
    EXPECT_ROW(&call, 2, LIST(0, 1), LIST(0.5, 1));
    EXPECT_ROW(&call, 3, LIST(0, 1), LIST(0, 0));
    /* The default is 0.01: only equals within two percent are close. */
    call.args.jitter = 0;
    call_run(&call);
    EXPECT_ROW(&call, 0, LIST(0, 1), LIST(1, 1));
    EXPECT_ROW(&call, 2, LIST(0, 1), LIST(0.5, 1));
    /* Divided by their sum, and scaled. */
    call.args.renormalize = 1;
    call.args.scale = 3;
    call_run(&call);
    EXPECT_ROW(&call, 2, LIST(0, 1), LIST(1, 2));
    EXPECT_ROW(&call, 3, LIST(0, 1), LIST(0, 0));
    call_free(&call);
}

Test(topk, bias_chooses_and_never_weighs)
{
    const float logits[] = {2, 1, 0, -1}, bias[] = {-1, 0, 0, 1};
    /* sigmoid .880797 .731059 .5 .268941; biased -.119203 .731059 .5 1.268941 */
    call_t call = call_make(1, 4, 3, logits);
    call.args.scoring = EPMOE_SCORING_SIGMOID;
    call.args.selection_bias = bias;
    call_run(&call);
    EXPECT_ROW(&call, 0, LIST(3, 1, 2), LIST(0.268941421, 0.731058579, 0.5));
    /* topk_softmax: the logit is the score; biased 1 1 0 0: ties go to the lower id, weights from the logits alone */
    call.args.scoring = EPMOE_SCORING_TOPK_SOFTMAX;
    call_run(&call);
    EXPECT_ROW(&call, 0, LIST(0, 1, 2), LIST(0.665240956, 0.244728471, 0.090030573));
    call_free(&call);
}

Test(topk, groups_left_out_lose_to_negative_scores)
{
    const float logits[8] = {0}, bias[] = {-2, -3, -5, -5, -5, -5, -5, -5};
    call_t call = call_make(1, 8, 2, logits);
    call.args.scoring = EPMOE_SCORING_SIGMOID;
    call.args.selection_bias = bias;
    call.args.n_group = 4;
    call.args.topk_group = 1;
    call.args.renormalize = 1;
    call_run(&call);
    EXPECT_ROW(&call, 0, LIST(0, 1), LIST(0.5, 0.5));
    call_free(&call);
}

Test(topk, group_scores)
{
    /* sigmoid scores: group 0 .9 .1, group 1 .6 .6: top2 takes group 1, max group 0. */
    const float logits[] = {2.1972246f, -2.1972246f, 0.4054651f, 0.4054651f};
    call_t call = call_make(1, 4, 2, logits);
    call.args.scoring = EPMOE_SCORING_SIGMOID;
    call.args.n_group = 2;
    call.args.topk_group = 1;
    call_run(&call);
    EXPECT_ROW(&call, 0, LIST(2, 3), LIST(0.6, 0.6));
    call.args.group_score = EPMOE_GROUP_SCORE_MAX;
    call_run(&call);
    EXPECT_ROW(&call, 0, LIST(0, 1), LIST(0.9, 0.1));
    /* Softmax: .75 .01 | .4 .4 before division: the sum of scores, not of logits, which would be -2.2 against -1.8. */
    const float softmax_logits[] = {-0.28768207f, -4.6051702f, -0.91629073f, -0.91629073f};
    call.args.logits = softmax_logits;
    call.args.scoring = EPMOE_SCORING_SOFTMAX;
    call.args.group_score = EPMOE_GROUP_SCORE_TOP2;
    call_run(&call);
    EXPECT_ROW(&call, 0, LIST(2, 3), LIST(0.4 / 1.56, 0.4 / 1.56));
    /* Here exp sums to .75 + .01 against .3 + .3, while the logits' sums say the opposite. */
    const float opposed[] = {-0.28768207f, -4.6051702f, -1.2039728f, -1.2039728f};
    call.args.logits = opposed;
    call_run(&call);
    EXPECT_ROW(&call, 0, LIST(0, 1), LIST(0.75 / 1.36, 0.01 / 1.36));
    call_free(&call);

    /* Equal groups: the lower ones; a group of one scores its one. */
    const float flat[6] = {0}, single[] = {1, 5, 2, 4, 3, 0};
    call = call_make(1, 6, 4, flat);
    call.args.n_group = 3;
    call.args.topk_group = 2;
    call_run(&call);
    EXPECT_ROW(&call, 0, LIST(0, 1, 2, 3), LIST(1 / 6.0, 1 / 6.0, 1 / 6.0, 1 / 6.0));
    call.args.logits = single;
    call.args.n_group = 6;
    call.args.topk_group = 4;
    call.args.scoring = EPMOE_SCORING_TOPK_SOFTMAX;
    call_run(&call);
    expect_row(&call, 0, (const int32_t[]){1, 3, 4, 2}, NULL);
    call_free(&call);
}

Test(topk, softmax_covers_all_experts_not_only_the_kept_groups)
{
    const float logits[] = {0, 0.693147181f, 1.098612289f, 1.386294361f};
    call_t call = call_make(1, 4, 2, logits);
    call.args.n_group = 2;
    call.args.topk_group = 1;
    call_run(&call);
    EXPECT_ROW(&call, 0, LIST(3, 2), LIST(.4, .3));
    call_free(&call);
}

Test(topk, a_kept_group_gives_its_minus_infinities_before_others_are_asked)
{
    const float logits[] = {10, -INFINITY, 5, 5};
    call_t call = call_make(1, 4, 2, logits);
    call.args.scoring = EPMOE_SCORING_SIGMOID;
    call.args.n_group = 2;
    call.args.topk_group = 1;
    call.args.group_score = EPMOE_GROUP_SCORE_MAX;
    call_run(&call);
    EXPECT_ROW(&call, 0, LIST(0, 1), LIST(0.9999546021, 0));
    /* As a sum of two, 1 + -inf loses. */
    call.args.group_score = EPMOE_GROUP_SCORE_TOP2;
    call_run(&call);
    EXPECT_ROW(&call, 0, LIST(2, 3), LIST(0.9933071491, 0.9933071491));
    call_free(&call);
}

Test(topk, nan_and_infinity)
{
    enum { E = 128, K = 8, T = 5 };
    for (int d = 0; d < OP_NUM_DTYPES; d++)
        for (int32_t scoring = EPMOE_SCORING_SOFTMAX; scoring <= EPMOE_SCORING_TOPK_SOFTMAX; scoring++)
            for (int32_t renormalize = 0; renormalize < 2; renormalize++) {
                epmoe_dtype_t dtype = op_dtypes[d].dtype;
                char logits[4 * T * E];
                for (int32_t e = 0; e < E; e++) {
                    epmoei_store(logits, dtype, 0 * E + e, NAN);
                    epmoei_store(logits, dtype, 1 * E + e, 0.0625f * (float)e);
                    epmoei_store(logits, dtype, 2 * E + e, INFINITY);
                    epmoei_store(logits, dtype, 3 * E + e, e == 125 ? NAN : 0.0625f * (float)e);
                    epmoei_store(logits, dtype, 4 * E + e, e % 2 ? NAN : -INFINITY);
                }
                call_t call = call_make(T, E, K, logits),
                       alone = call_make(1, E, K, logits + epmoe_dtype_size(dtype) * E);
                call.args.logits_dtype = alone.args.logits_dtype = dtype;
                call.args.scoring = alone.args.scoring = (epmoe_scoring_t)scoring;
                call.args.renormalize = alone.args.renormalize = renormalize;
                call_run(&call);
                call_run(&alone);
                EXPECT_ROW(&call, 0, LIST(0, 1, 2, 3, 4, 5, 6, 7), LIST(0, 0, 0, 0, 0, 0, 0, 0));
                EXPECT_ROW(&call, 4, LIST(0, 1, 2, 3, 4, 5, 6, 7), LIST(0, 0, 0, 0, 0, 0, 0, 0));
                expect_row(&call, 1, (const int32_t[]){127, 126, 125, 124, 123, 122, 121, 120}, NULL);
                /* All of them equal: a share of the 128, or of the 8. */
                double equal = 1.0 / K;
                if (!renormalize && scoring == EPMOE_SCORING_SOFTMAX) equal = 1.0 / E;
                if (!renormalize && scoring == EPMOE_SCORING_SIGMOID) equal = 1;
                if (!renormalize && scoring == EPMOE_SCORING_SQRT_SOFTPLUS) equal = sqrt((double)FLT_MAX);
                expect_row(&call, 2, (const int32_t[]){0, 1, 2, 3, 4, 5, 6, 7},
                           (const double[]){equal, equal, equal, equal, equal, equal, equal, equal});
                expect_row(&call, 3, (const int32_t[]){127, 126, 124, 123, 122, 121, 120, 119}, NULL);
                cr_assert_eq(memcmp(call.weights + K, alone.weights, 4 * K), 0, "the row depends on its neighbours");
                for (int32_t i = 0; i < T * K; i++) {
                    bool dead = i < K || i >= 4 * K;
                    cr_assert(dead ? call.weights[i] == 0 : call.weights[i] > 0 && call.weights[i] <= FLT_MAX,
                              "weight %d is %g", i, (double)call.weights[i]);
                }
                call_free(&call);
                call_free(&alone);
            }
}

Test(topk, infinities_of_the_bias)
{
    const float logits[] = {0, -INFINITY, 0, 0, NAN}, bias[] = {NAN, INFINITY, INFINITY, -INFINITY, 5};
    call_t call = call_make(1, 5, 5, logits);
    call.args.selection_bias = bias;
    for (int32_t scoring = EPMOE_SCORING_SOFTMAX; scoring <= EPMOE_SCORING_TOPK_SOFTMAX; scoring++) {
        call.args.scoring = (epmoe_scoring_t)scoring;
        call_run(&call);
        expect_row(&call, 0, (const int32_t[]){2, 0, 1, 3, 4}, NULL);
        cr_assert(call.weights[0] > 0 && call.weights[0] < 1 && call.weights[1] == call.weights[0]);
        cr_assert(call.weights[2] == 0 && call.weights[4] == 0, "the score of a -inf or NaN logit is 0");
    }
    call_free(&call);
}

Test(topk, underflow_makes_no_ties)
{
    const float logits[] = {-300, -200, -250, 0, -150, -400};
    call_t call = call_make(1, 6, 6, logits);
    call_run(&call);
    EXPECT_ROW(&call, 0, LIST(3, 4, 1, 2, 0, 5), LIST(1, 0, 0, 0, 0, 0));
    call_free(&call);
    /* Best logits of the groups of two: -200, 0, -150. */
    call = call_make(1, 6, 4, logits);
    call.args.n_group = 3;
    call.args.topk_group = 2;
    call.args.group_score = EPMOE_GROUP_SCORE_MAX;
    call_run(&call);
    expect_row(&call, 0, (const int32_t[]){3, 4, 2, 5}, NULL);
    call_free(&call);
}

Test(topk, a_sum_below_the_smallest_normal_counts_as_zero)
{
    const float logits[] = {0, 0, -95, -95}, bias[] = {0, 0, 9, 9};
    call_t call = call_make(1, 4, 2, logits);
    call.args.selection_bias = bias;
    call_run(&call);
    expect_row(&call, 0, (const int32_t[]){2, 3}, NULL);
    cr_assert(call.weights[0] > 0 && call.weights[0] < FLT_MIN, "exp(-95)/2 is %g", (double)call.weights[0]);
    call.args.renormalize = 1;
    call_run(&call);
    EXPECT_ROW(&call, 0, LIST(2, 3), LIST(0, 0));
    call_free(&call);

    /* exp(-87)/2 twice is 1.6e-38, above 2^-126: no epsilon pulls the weights away from one half. */
    const float above[] = {0, 0, -87, -87};
    call = call_make(1, 4, 2, above);
    call.args.selection_bias = bias;
    call.args.renormalize = 1;
    call_run(&call);
    EXPECT_ROW(&call, 0, LIST(2, 3), LIST(0.5, 0.5));
    call_free(&call);
}

Test(topk, weights_stay_finite)
{
    const float logits[] = {INFINITY, FLT_MAX, 1e30f, -FLT_MAX};
    call_t call = call_make(1, 4, 4, logits);
    for (int32_t scoring = EPMOE_SCORING_SOFTMAX; scoring <= EPMOE_SCORING_TOPK_SOFTMAX; scoring++)
        for (int32_t sign = -1; sign <= 1; sign += 2) {
            call.args.scoring = (epmoe_scoring_t)scoring;
            call.args.scale = (float)sign * 3e38f;
            call_run(&call);
            expect_row(&call, 0, (const int32_t[]){0, 1, 2, 3}, NULL);
            for (int32_t j = 0; j < 4; j++) cr_assert(isfinite(call.weights[j]));
            if (scoring == EPMOE_SCORING_SQRT_SOFTPLUS) cr_assert_eq(call.weights[0], (float)sign * FLT_MAX);
        }
    call_free(&call);
}

Test(topk, equal_scores_go_to_the_lower_id)
{
    const struct {
        int32_t num_experts, ones[3];
    } cases[] = {{384, {7, 100, 383}}, {60, {7, 30, 59}}};
    for (int c = 0; c < 2; c++)
        for (int d = 0; d < OP_NUM_DTYPES; d++)
            for (int32_t scoring = EPMOE_SCORING_SOFTMAX; scoring <= EPMOE_SCORING_TOPK_SOFTMAX; scoring++) {
                int32_t num_experts = cases[c].num_experts;
                const int32_t *ones = cases[c].ones;
                char logits[4 * 2 * 384];
                for (int32_t i = 0; i < 2 * num_experts; i++) epmoei_store(logits, op_dtypes[d].dtype, i, 0);
                for (int32_t i = 0; i < 3; i++) epmoei_store(logits, op_dtypes[d].dtype, num_experts + ones[i], 1);
                call_t call = call_make(2, num_experts, 8, logits);
                call.args.logits_dtype = op_dtypes[d].dtype;
                call.args.scoring = (epmoe_scoring_t)scoring;
                call_run(&call);
                expect_row(&call, 0, (const int32_t[]){0, 1, 2, 3, 4, 5, 6, 7}, NULL);
                expect_row(&call, 1, (const int32_t[]){ones[0], ones[1], ones[2], 0, 1, 2, 3, 4}, NULL);
                call_free(&call);
            }
    /* A pair that ties in bf16 and not in fp32. */
    float pair[60] = {0};
    pair[3] = 1.0f, pair[50] = 1.0f + 0x1p-10f;
    uint16_t rounded[60];
    epmoei_from_f32(rounded, pair, EPMOE_BF16, 60);
    call_t call = call_make(1, 60, 2, pair);
    call_run(&call);
    expect_row(&call, 0, (const int32_t[]){50, 3}, NULL);
    call.args.logits = rounded;
    call.args.logits_dtype = EPMOE_BF16;
    call_run(&call);
    expect_row(&call, 0, (const int32_t[]){3, 50}, NULL);
    call_free(&call);
}

Test(topk, repeats_and_batches_give_the_same_bits)
{
    enum { T = 4096, E = 60, K = 8 };
    testing_rng_t rng = testing_rng(testing_seed());
    float *logits = malloc(4 * T * E);
    for (int32_t i = 0; i < T * E; i++) logits[i] = (float)testing_range(&rng, 0, 5); /* many ties */
    memcpy(logits + (T - 1) * E, logits, 4 * E);
    call_t call = call_make(T, E, K, logits), one = call_make(1, E, K, logits);
    call.args.renormalize = one.args.renormalize = 1;
    call_run(&call);
    call_run(&one);
    cr_assert_eq(memcmp(call.ids, one.ids, 4 * K), 0);
    cr_assert_eq(memcmp(call.weights, one.weights, 4 * K), 0);
    cr_assert_eq(memcmp(call.ids + (T - 1) * K, one.ids, 4 * K), 0);
    cr_assert_eq(memcmp(call.weights + (T - 1) * K, one.weights, 4 * K), 0);
    int32_t *ids = malloc(4 * T * K);
    float *weights = malloc(4 * T * K);
    memcpy(ids, call.ids, 4 * T * K);
    memcpy(weights, call.weights, 4 * T * K);
    for (int repeat = 0; repeat < 100; repeat++) {
        cr_assert_eq(epmoe_topk(&call.args, NULL), EPMOE_OK);
        cr_assert_eq(memcmp(ids, call.ids, 4 * T * K), 0);
        cr_assert_eq(memcmp(weights, call.weights, 4 * T * K), 0);
    }
    free(ids), free(weights), free(logits);
    call_free(&call);
    call_free(&one);
}

Test(topk, expert_counts_of_all_kinds)
{
    const int32_t counts[] = {5, 60, 72, 96, 160, 192, 320, 384, 576, 1000, 1024, 1025, 2048, 4096};
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++)
        for (int d = 0; d < OP_NUM_DTYPES; d++) {
            int32_t num_experts = counts[c];
            epmoe_dtype_t dtype = op_dtypes[d].dtype;
            char *logits = malloc(8 * (size_t)num_experts);
            for (int32_t e = 0; e < num_experts; e++) {
                epmoei_store(logits, dtype, e, 0);
                epmoei_store(logits, dtype, num_experts + e, -INFINITY);
            }
            epmoei_store(logits, dtype, num_experts - 1, 5);
            epmoei_store(logits, dtype, num_experts - 2, 4);
            epmoei_store(logits, dtype, num_experts / 2, 3);
            epmoei_store(logits, dtype, 0, 2);
            epmoei_store(logits, dtype, num_experts + num_experts - 1, -3);
            epmoei_store(logits, dtype, num_experts + num_experts / 2, -7);
            call_t call = call_make(2, num_experts, 4, logits);
            call.args.logits_dtype = dtype;
            call_run(&call);
            expect_row(&call, 0, (const int32_t[]){num_experts - 1, num_experts - 2, num_experts / 2, 0}, NULL);
            expect_row(&call, 1, (const int32_t[]){num_experts - 1, num_experts / 2, 0, 1}, NULL);
            cr_assert(call.weights[6] == 0 && call.weights[7] == 0);
            call_free(&call);
            free(logits);
        }
}

Test(topk, no_tokens)
{
    epmoe_topk_args_t args = EPMOE_TOPK_ARGS_INIT;
    args.num_experts = 8;
    args.top_k = 2;
    cr_assert_eq(epmoe_topk(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    args.num_experts = 1;
    cr_assert_eq(epmoe_topk(&args, NULL), EPMOE_ERROR_INVALID_ARGUMENT, "sizes are checked without tokens too");
}

Test(topk, device_count_limits_the_rows)
{
    const float logits[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
    const int32_t all[] = {2, 2, 2};
    for (int32_t actual = 0; actual <= 3; actual++) {
        call_t call = call_make(3, 3, 1, logits);
        call.args.num_tokens_dev = &actual;
        cr_assert_eq(epmoe_topk(&call.args, NULL), EPMOE_OK, "%s", epmoe_last_error());
        cr_assert_eq(memcmp(call.ids, all, 4 * (size_t)actual), 0);
        cr_assert(testing_is_poison(call.ids, 4 * actual, 4 * (3 - actual)));
        cr_assert(testing_is_poison(call.weights, 4 * actual, 4 * (3 - actual)));
        call_free(&call);
    }
    call_t call = call_make(3, 3, 1, logits);
    int32_t wrong = 0;
    call.args.num_tokens_dev = &wrong;
    bool (*const poison)(const void *, int64_t, int64_t) = testing_is_poison;
    OP_INVALID(epmoe_topk, call.args, "num_tokens_dev", poison(call.ids, 0, 12) && poison(call.weights, 0, 12),
               wrong = 4);
    OP_INVALID(epmoe_topk, call.args, "num_tokens_dev", poison(call.ids, 0, 12) && poison(call.weights, 0, 12),
               wrong = -1);
    call_free(&call);
}

Test(topk, errors_name_the_argument_and_leave_the_outputs)
{
    float logits[2 * 24] = {0};
    call_t call = call_make(2, 24, 4, logits);
    call.args.n_group = 4;
    call.args.topk_group = 2;
#define REJECTS(needle, statement)                                                                                     \
    OP_INVALID(epmoe_topk, call.args, needle,                                                                          \
               testing_is_poison(call.ids, 0, 32) && testing_is_poison(call.weights, 0, 32), statement)
    REJECTS("num_tokens is -1", bad.num_tokens = -1);
    REJECTS("num_experts is 0", bad.num_experts = 0);
    REJECTS("num_experts is 4097", bad.num_experts = 4097);
    REJECTS("top_k is 0", bad.top_k = 0);
    REJECTS("top_k is 33", bad.top_k = 33);
    REJECTS("top_k is 25", bad.top_k = 25);
    REJECTS("top_k is 13", bad.top_k = 13); /* two groups of six are kept */
    REJECTS("logits_dtype", bad.logits_dtype = EPMOE_I32);
    REJECTS("logits_stride is 23", bad.logits_stride = 23);
    REJECTS("logits_stride is -24", bad.logits_stride = -24);
    REJECTS("logits_stride", bad.logits_stride = INT64_MAX / 2);
    REJECTS("scoring is 5", bad.scoring = (epmoe_scoring_t)5);
    REJECTS("SPARSE_MIXER with groups", (bad.scoring = EPMOE_SCORING_SPARSE_MIXER, bad.n_group = 2));
    REJECTS("SPARSE_MIXER with a selection bias", (bad.scoring = EPMOE_SCORING_SPARSE_MIXER, bad.n_group = 1,
                                                   bad.topk_group = 1, bad.selection_bias = logits));
    REJECTS("jitter is 1", bad.jitter = 1);
    REJECTS("jitter is -1", bad.jitter = -1);
    REJECTS("jitter is nan", bad.jitter = NAN);
    REJECTS("scoring is -1", bad.scoring = (epmoe_scoring_t)-1);
    REJECTS("renormalize is 2", bad.renormalize = 2);
    REJECTS("scale is", bad.scale = NAN);
    REJECTS("scale is", bad.scale = INFINITY);
    REJECTS("n_group is 5", bad.n_group = 5);
    REJECTS("n_group is 48", bad.n_group = 48);
    REJECTS("n_group is -1", bad.n_group = -1);
    REJECTS("topk_group is 5", bad.topk_group = 5);
    REJECTS("topk_group is -1", bad.topk_group = -1);
    REJECTS("group_score is 2", bad.group_score = (epmoe_group_score_t)2);
    REJECTS("logits is NULL", bad.logits = NULL);
    REJECTS("ids is NULL", bad.ids = NULL);
    REJECTS("weights is NULL", bad.weights = NULL);
    REJECTS("backend is 7", bad.backend = (epmoe_backend_t)7);
#undef REJECTS
    call_free(&call);
}

Test(topk, struct_sizes)
{
    const float logits[] = {1, 3, 2};
    call_t call = call_make(1, 3, 1, logits);
    OP_STRUCT_SIZES(epmoe_topk, call.args, offsetof(epmoe_topk_args_t, num_tokens_dev),
                    testing_is_poison(call.ids, 0, 4) && testing_is_poison(call.weights, 0, 4), call.ids[0] == 1);
    call_free(&call);
}

Test(topk, floor_counts_each_byte_once)
{
    epmoe_topk_args_t args = {.num_tokens = 3, .num_experts = 10, .top_k = 2, .logits_dtype = EPMOE_BF16};
    cr_assert_eq(epmoei_topk_floor(&args).bytes, 3 * (10 * 2 + 2 * 8));
}
