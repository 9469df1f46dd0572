/* One rank's layer against fp64, and its forward's promises. */
#include "moe/layer.h"
#include "tests/layer_case.h"

#include <criterion/criterion.h>
#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>

static epmoe_layer_t *create(const epmoe_layer_config_t *config)
{
    epmoe_layer_t *layer = NULL;
    cr_assert_eq(epmoe_layer_create(config, NULL, &layer), EPMOE_OK, "%s: %s", layer_case_text(config),
                 epmoe_last_error());
    cr_assert_not_null(layer);
    return layer;
}

static epmoe_layer_t *create_with(const oracle_model_t *model)
{
    epmoe_layer_t *layer = create(&model->config);
    cr_assert_eq(epmoe_layer_set_weights(layer, &model->weights), EPMOE_OK, "%s", epmoe_last_error());
    return layer;
}

Test(layer, every_rule_against_fp64)
{
    for (int i = 0; i < 120; i++) {
        testing_rng_t rng = testing_rng(testing_seed() + (uint64_t)i);
        epmoe_layer_config_t config = layer_case_config(&rng, 24, true);
        oracle_formats_t formats = layer_case_formats(&rng);
        oracle_model_t model = oracle_model(&rng, &config, &formats);
        epmoe_layer_t *layer = create_with(&model);
        for (int j = 0; j < 2; j++) {
            layer_forward_t forward = {.num_tokens = testing_range(&rng, 1, 24),
                                       .forced_logits = testing_range(&rng, 0, 1),
                                       .residual = testing_range(&rng, 0, 1),
                                       .by_num_tokens_dev = testing_range(&rng, 0, 2) == 0,
                                       .y = testing_range(&rng, 0, 2)};
            forward.tokens = testing_range(&rng, 0, forward.num_tokens);
            cr_assert(layer_case_check(layer, &model, &forward, &rng), "case %d.%d: %s", i, j,
                      layer_case_text(&config));
        }
        epmoe_layer_destroy(layer);
        oracle_model_free(&model);
    }
}

/* Each router rule by itself, so that no random run leaves one out. */
Test(layer, every_scoring_with_groups_and_biases)
{
    for (int i = 0; i < 4 * 2 * 2 * 2; i++) {
        testing_rng_t rng = testing_rng(testing_seed() + (uint64_t)i);
        epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
        config.hidden = 33, config.intermediate = 17, config.num_experts = 24, config.top_k = 5;
        config.scoring = (epmoe_scoring_t)(i / 8);
        config.has_selection_bias = i / 4 % 2;
        config.renormalize = i / 2 % 2;
        config.n_group = i % 2 ? 6 : 1;
        config.topk_group = i % 2 ? 2 : 1;
        config.routed_scale = 1.5f;
        config.dtype = EPMOE_F32;
        config.max_tokens = 30;
        oracle_formats_t formats = {EPMOE_F32, EPMOE_F32, EPMOE_F32, EPMOE_F32, EPMOE_F32, EPMOE_LAYOUT_GATE_FIRST};
        oracle_model_t model = oracle_model(&rng, &config, &formats);
        epmoe_layer_t *layer = create_with(&model);
        layer_forward_t forward = {.num_tokens = 30};
        cr_assert(layer_case_check(layer, &model, &forward, &rng), "%s", layer_case_text(&config));
        epmoe_layer_destroy(layer);
        oracle_model_free(&model);
    }
}

/* Tokens beyond what the kernels' small ways take, and odd counts. */
Test(layer, token_counts)
{
    testing_rng_t rng = testing_rng(testing_seed());
    epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
    config.hidden = 40, config.intermediate = 24, config.num_experts = 6, config.top_k = 2;
    config.shared_intermediate = 32;
    config.max_tokens = 300;
    oracle_formats_t formats = {EPMOE_BF16, EPMOE_BF16, EPMOE_BF16, EPMOE_BF16, EPMOE_BF16, EPMOE_LAYOUT_GATE_FIRST};
    config.dtype = EPMOE_BF16;
    oracle_model_t model = oracle_model(&rng, &config, &formats);
    epmoe_layer_t *layer = create_with(&model);
    const int32_t tokens[] = {1, 3, 63, 127, 300, 2};
    for (size_t i = 0; i < sizeof tokens / sizeof tokens[0]; i++) {
        layer_forward_t forward = {.num_tokens = tokens[i]};
        cr_assert(layer_case_check(layer, &model, &forward, &rng), "%d tokens", tokens[i]);
    }
    epmoe_layer_destroy(layer);
    oracle_model_free(&model);
}

/* Layers whose experts are worked out by hand. The last element of every token is 1, and the gate rows read it alone:
 * silu(gate) is then the constant that kGate makes it. */
enum { kD = 4 };
static const float kGate = 1.27846454276107f; /* silu of it is 1 */

typedef struct hand_t {
    epmoe_layer_config_t config;
    epmoe_layer_weights_t weights;
    float router[8 * kD], gate_up[8 * 2 * kD * kD], down[8 * kD * kD], shared_gate_up[2 * kD * kD],
        shared_down[kD * kD];
} hand_t;

/* y = factor * x, as gate/up and down matrices. */
static void scale_expert(float *gate_up, float *down, float factor)
{
    memset(gate_up, 0, 2 * kD * kD * sizeof *gate_up);
    memset(down, 0, kD * kD * sizeof *down);
    for (int32_t i = 0; i < kD; i++) {
        gate_up[i * kD + kD - 1] = kGate;
        gate_up[(kD + i) * kD + i] = 1;
        down[i * kD + i] = factor;
    }
}

static void hand_init(hand_t *hand, int32_t num_experts, int32_t top_k, bool shared)
{
    memset(hand, 0, sizeof *hand);
    hand->config = (epmoe_layer_config_t)EPMOE_LAYER_CONFIG_INIT;
    hand->config.hidden = hand->config.intermediate = kD;
    hand->config.num_experts = num_experts, hand->config.top_k = top_k;
    hand->config.shared_intermediate = shared ? kD : 0;
    hand->config.dtype = EPMOE_F32;
    hand->config.max_tokens = 4;
    hand->weights = (epmoe_layer_weights_t)EPMOE_LAYER_WEIGHTS_INIT;
    hand->weights.router_dtype = EPMOE_F32;
    hand->weights.router = hand->router;
    hand->weights.gate_up.format = hand->weights.down.format = EPMOE_FORMAT_F32;
    hand->weights.shared_gate_up.format = hand->weights.shared_down.format = EPMOE_FORMAT_F32;
    hand->weights.gate_up.data = hand->gate_up, hand->weights.down.data = hand->down;
    hand->weights.shared_gate_up.data = hand->shared_gate_up, hand->weights.shared_down.data = hand->shared_down;
    for (int32_t e = 0; e < num_experts; e++)
        scale_expert(hand->gate_up + e * 2 * kD * kD, hand->down + e * kD * kD, 1);
    scale_expert(hand->shared_gate_up, hand->shared_down, 1);
}

static epmoe_layer_t *hand_layer(const hand_t *hand)
{
    epmoe_layer_t *layer = create(&hand->config);
    cr_assert_eq(epmoe_layer_set_weights(layer, &hand->weights), EPMOE_OK, "%s", epmoe_last_error());
    return layer;
}

/* Probabilities .1 .2 .3 .4, identity experts, identity shared expert: the factor counts once and not for the shared.
 */
Test(layer, the_scale_factor_counts_once)
{
    const struct {
        int32_t renormalize;
        float scale, first, second;
    } cases[] = {{0, 1, .4f, .3f}, {0, 2.5f, 1, .75f}, {1, 1, .571429f, .428571f}, {1, 2.5f, 1.428571f, 1.071429f}};
    const float logits[] = {0, logf(2), logf(3), logf(4)};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        hand_t hand;
        hand_init(&hand, 4, 2, true);
        hand.config.renormalize = cases[i].renormalize, hand.config.routed_scale = cases[i].scale;
        epmoe_layer_t *layer = hand_layer(&hand);
        const float x[kD] = {-3, 0.5f, 7, 1};
        float y[kD], weights[2];
        int32_t ids[2];
        epmoe_forward_args_t args = EPMOE_FORWARD_ARGS_INIT;
        args.num_tokens = 1, args.x = x, args.y = y, args.logits = logits;
        args.ids_out = ids, args.weights_out = weights;
        cr_assert_eq(epmoe_layer_forward_args(layer, &args, NULL), EPMOE_OK, "%s", epmoe_last_error());
        cr_assert(ids[0] == 3 && ids[1] == 2);
        cr_assert_float_eq(weights[0], cases[i].first, 2e-6f);
        cr_assert_float_eq(weights[1], cases[i].second, 2e-6f);
        float factor = cases[i].first + cases[i].second + 1; /* 3.5 in the last case */
        for (int32_t j = 0; j < kD; j++)
            cr_assert(fabsf(y[j] - factor * x[j]) <= 1e-5f * fabsf(factor * x[j]), "%g", (double)y[j]);
        epmoe_layer_destroy(layer);
    }
}

/* R(x) = 2x, S(x) = x^2, y over x: 15 for 3. */
Test(layer, in_place_keeps_the_shared_experts_input)
{
    hand_t hand;
    hand_init(&hand, 1, 1, true);
    scale_expert(hand.gate_up, hand.down, 2);
    memset(hand.shared_gate_up, 0, sizeof hand.shared_gate_up);
    for (int32_t i = 0; i < kD; i++) {
        /* silu(32 x) is 32 x for x >= 1 */
        hand.shared_gate_up[i * kD + i] = 32;
        hand.shared_gate_up[(kD + i) * kD + i] = 1.0f / 32;
    }
    epmoe_layer_t *layer = hand_layer(&hand);
    float x[] = {3, 2, 5, 1};
    const float right[] = {15, 8, 35, 3};
    cr_assert_eq(epmoe_layer_forward(layer, x, x, 1, NULL), EPMOE_OK, "%s", epmoe_last_error());
    for (int32_t i = 0; i < kD; i++) cr_assert_float_eq(x[i], right[i], 1e-5f * right[i], "%g", (double)x[i]);
    epmoe_layer_destroy(layer);
}

/* Every logit NaN: weights 0, so that nothing but the shared expert is left; the next token does not notice. */
Test(layer, a_token_whose_logits_are_nan)
{
    hand_t hand;
    hand_init(&hand, 4, 2, true);
    epmoe_layer_t *layer = hand_layer(&hand);
    const float logits[] = {NAN, NAN, NAN, NAN, 5, 0, 0, 5}, x[2 * kD] = {2, 3, 4, 1, 2, 3, 4, 1};
    float y[2 * kD];
    epmoe_forward_args_t args = EPMOE_FORWARD_ARGS_INIT;
    args.num_tokens = 2, args.x = x, args.y = y, args.logits = logits;
    cr_assert_eq(epmoe_layer_forward_args(layer, &args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    double two = 2 / (2 + 2 * exp(-5.0)); /* softmax, not renormalised */
    for (int32_t i = 0; i < kD; i++) {
        cr_assert_float_eq(y[i], x[i], 1e-5f * x[i]);
        cr_assert_float_eq(y[kD + i], (float)(1 + two) * x[i], 1e-5f * x[i]);
    }
    epmoe_layer_destroy(layer);
}

static oracle_model_t some_model(testing_rng_t *rng, epmoe_layer_config_t *config)
{
    *config = (epmoe_layer_config_t)EPMOE_LAYER_CONFIG_INIT;
    config->hidden = 48, config->intermediate = 40, config->num_experts = 9, config->top_k = 3;
    config->shared_intermediate = 20, config->shared_gated = 1;
    config->dtype = EPMOE_BF16;
    config->max_tokens = 150;
    oracle_formats_t formats = {EPMOE_BF16, EPMOE_BF16, EPMOE_BF16, EPMOE_BF16, EPMOE_BF16, EPMOE_LAYOUT_GATE_FIRST};
    return oracle_model(rng, config, &formats);
}

/* The same bits 100 times, at every number of threads (also more than when the layer was made), whatever other token
 * counts come between; and no allocation. */
Test(layer, forward_is_deterministic_and_never_allocates)
{
    enum { kTokens = 150, kBytes = kTokens * 48 * 2 };
    testing_rng_t rng = testing_rng(testing_seed());
    epmoe_layer_config_t config;
    oracle_model_t model = some_model(&rng, &config);
    omp_set_num_threads(1);
    epmoe_layer_t *layer = create_with(&model);
    uint16_t *x = malloc(kBytes), *y = testing_buffer(kBytes, 0), *first = malloc(kBytes), *other = malloc(kBytes);
    testing_fill_normal(&rng, x, EPMOE_BF16, kTokens * 48, 1);
    int64_t live = epmoei_alloc_live();
    for (int32_t i = 0; i < 100; i++) {
        omp_set_num_threads(1 + i % 3);
        epmoei_alloc_fail_at(1);
        cr_assert_eq(epmoe_layer_forward(layer, x, y, kTokens, NULL), EPMOE_OK, "%s", epmoe_last_error());
        if (i == 0) memcpy(first, y, kBytes);
        cr_assert_arr_eq(y, first, kBytes, "run %d", i);
        cr_assert_eq(epmoe_layer_forward(layer, x, other, testing_range(&rng, 0, kTokens), NULL), EPMOE_OK);
    }
    /* The failure is still waiting for an allocation. */
    cr_assert_null(epmoei_alloc(1));
    epmoei_alloc_fail_at(0);
    cr_assert_eq(epmoei_alloc_live(), live);
    cr_assert(testing_guards_intact(y));
    free(x), free(first), free(other), testing_buffer_free(y);
    epmoe_layer_destroy(layer);
    oracle_model_free(&model);
}

/* A token's experts do not depend on its batch. */
Test(layer, routing_is_the_same_alone_and_among_others)
{
    enum { kTokens = 150 };
    testing_rng_t rng = testing_rng(testing_seed());
    epmoe_layer_config_t config;
    oracle_model_t model = some_model(&rng, &config);
    epmoe_layer_t *layer = create_with(&model);
    uint16_t x[kTokens * 48], y[kTokens * 48];
    float logits[kTokens * 9], one_logits[9], weights[kTokens * 3], one_weights[3];
    int32_t ids[kTokens * 3], one_ids[3];
    testing_fill_normal(&rng, x, EPMOE_BF16, kTokens * 48, 1);
    epmoe_forward_args_t args = EPMOE_FORWARD_ARGS_INIT;
    args.num_tokens = kTokens, args.x = x, args.y = y;
    args.logits_out = logits, args.ids_out = ids, args.weights_out = weights;
    cr_assert_eq(epmoe_layer_forward_args(layer, &args, NULL), EPMOE_OK);
    args.num_tokens = 1, args.logits_out = one_logits, args.ids_out = one_ids, args.weights_out = one_weights;
    for (int32_t t = 0; t < kTokens; t++) {
        args.x = x + t * 48;
        cr_assert_eq(epmoe_layer_forward_args(layer, &args, NULL), EPMOE_OK);
        cr_assert_arr_eq(one_logits, logits + t * 9, sizeof one_logits);
        cr_assert_arr_eq(one_ids, ids + t * 3, sizeof one_ids);
        cr_assert_arr_eq(one_weights, weights + t * 3, sizeof one_weights);
    }
    epmoe_layer_destroy(layer);
    oracle_model_free(&model);
}

/* Bad calls say what is wrong, write nothing, and leave the layer as it was. */
Test(layer, bad_forwards)
{
    enum { kTokens = 5, kBytes = kTokens * 48 * 2 };
    testing_rng_t rng = testing_rng(testing_seed());
    epmoe_layer_config_t config;
    oracle_model_t model = some_model(&rng, &config);
    epmoe_layer_t *layer = create_with(&model), *empty = create(&model.config);
    uint16_t x[kTokens * 48], before[kTokens * 48], *y = testing_buffer(kBytes, 0);
    float *logits = testing_buffer(kTokens * 9 * 4, 0);
    testing_fill_normal(&rng, x, EPMOE_BF16, kTokens * 48, 1);
    cr_assert_eq(epmoe_layer_forward(layer, x, before, kTokens, NULL), EPMOE_OK);
    int32_t too_many = kTokens + 1, negative = -1;
    epmoe_forward_args_t good = EPMOE_FORWARD_ARGS_INIT;
    good.num_tokens = kTokens, good.x = x, good.y = y, good.logits_out = logits;
#define REFUSED(which, change, expected_status, word)                                                                  \
    do {                                                                                                               \
        epmoe_forward_args_t args = good;                                                                              \
        change;                                                                                                        \
        epmoe_set_last_error(EPMOE_OK, "");                                                                            \
        epmoe_status_t status = epmoe_layer_forward_args(which, &args, NULL);                                          \
        cr_expect_eq(status, expected_status, "%s gave %s", #change, epmoe_status_string(status));                     \
        cr_expect(strstr(epmoe_last_error(), word), "%s: '%s' lacks '%s'", #change, epmoe_last_error(), word);         \
    } while (0)
    REFUSED(layer, args.num_tokens = 151, EPMOE_ERROR_INVALID_ARGUMENT, "num_tokens is 151");
    REFUSED(layer, args.num_tokens = -1, EPMOE_ERROR_INVALID_ARGUMENT, "num_tokens is -1");
    REFUSED(layer, args.x = NULL, EPMOE_ERROR_INVALID_ARGUMENT, "x is NULL");
    REFUSED(layer, args.y = NULL, EPMOE_ERROR_INVALID_ARGUMENT, "y is NULL");
    REFUSED(layer, args.num_tokens_dev = &too_many, EPMOE_ERROR_INVALID_ARGUMENT, "*num_tokens_dev is 6");
    REFUSED(layer, args.num_tokens_dev = &negative, EPMOE_ERROR_INVALID_ARGUMENT, "*num_tokens_dev is -1");
    REFUSED(layer, args.struct_size = 0, EPMOE_ERROR_INVALID_ARGUMENT, "struct_size is 0");
    REFUSED(empty, (void)args, EPMOE_ERROR_BAD_STATE, "no weights");
    REFUSED(NULL, (void)args, EPMOE_ERROR_INVALID_ARGUMENT, "layer is NULL");
#undef REFUSED
    cr_expect_eq(epmoe_layer_forward_args(layer, NULL, NULL), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert(testing_is_poison(y, 0, kBytes) && testing_is_poison(logits, 0, kTokens * 9 * 4));
    cr_assert(testing_guards_intact(y) && testing_guards_intact(logits));
    cr_assert_eq(epmoe_layer_forward(layer, x, y, kTokens, NULL), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_arr_eq(y, before, kBytes);
    testing_buffer_free(y), testing_buffer_free(logits);
    epmoe_layer_destroy(layer), epmoe_layer_destroy(empty);
    oracle_model_free(&model);
}

Test(layer, no_tokens_and_null_pointers)
{
    for (int32_t dense = 0; dense < 2; dense++) {
        hand_t hand;
        hand_init(&hand, dense ? 0 : 2, 1, true);
        epmoe_layer_t *layer = hand_layer(&hand);
        cr_assert_eq(epmoe_layer_forward(layer, NULL, NULL, 0, NULL), EPMOE_OK, "%s", epmoe_last_error());
        int32_t none = 0;
        epmoe_forward_args_t args = EPMOE_FORWARD_ARGS_INIT;
        args.num_tokens = 4, args.num_tokens_dev = &none;
        cr_assert_eq(epmoe_layer_forward_args(layer, &args, NULL), EPMOE_OK, "%s", epmoe_last_error());
        epmoe_layer_destroy(layer);
    }
}

/* More tokens than the capacity: an error, and the next forward that fits works. */
Test(layer, capacity)
{
    hand_t hand;
    hand_init(&hand, 2, 1, false);
    hand.config.capacity = 2;
    epmoe_layer_t *layer = hand_layer(&hand);
    float x[3 * kD] = {1, 2, 3, 1, 4, 5, 6, 1, 7, 8, 9, 1}, *y = testing_buffer(sizeof x, 0);
    cr_assert_eq(epmoe_layer_forward(layer, x, y, 3, NULL), EPMOE_ERROR_CAPACITY);
    cr_assert(strstr(epmoe_last_error(), "the capacity is 2"), "%s", epmoe_last_error());
    cr_assert(testing_is_poison(y, 0, sizeof x));
    cr_assert_eq(epmoe_layer_forward(layer, x, y, 2, NULL), EPMOE_OK, "%s", epmoe_last_error());
    /* One of two equal logits: weight 1/2. */
    for (int32_t i = 0; i < 2 * kD; i++) cr_assert_float_eq(y[i], x[i] / 2, 1e-5f * x[i]);
    testing_buffer_free(y);
    epmoe_layer_destroy(layer);
}
