/* One rank's layer on a device: against double precision, against the CPU's layer, and its forward's promises. */
#include "tests/gpu_layer_case.h"

#include "moe/layer.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

TestSuite(gpu_layer, .timeout = 300);

static const epmoe_dtype_t types[] = {EPMOE_BF16, EPMOE_F16};

static epmoe_layer_config_t base_config(int32_t d, int32_t f, int32_t experts, int32_t k, int32_t max_tokens)
{
    epmoe_layer_config_t c = EPMOE_LAYER_CONFIG_INIT;
    c.hidden = d, c.intermediate = f, c.num_experts = experts, c.top_k = k;
    c.dtype = EPMOE_BF16;
    c.max_tokens = max_tokens;
    return c;
}

/* A model of this config with random weights, one layer, some forwards. */
static void check_forwards(const epmoe_layer_config_t *config, testing_rng_t *rng, const gpu_forward_t *forwards,
                           int32_t count)
{
    oracle_model_t model = gpu_model(rng, config);
    epmoe_layer_t *layer = gpu_layer_with(&model);
    cr_assert_not_null(layer);
    for (int32_t i = 0; i < count; i++)
        cr_expect(gpu_layer_check(layer, &model, &forwards[i], rng), "forward %d: %s", i, gpu_config_text(config));
    epmoe_layer_destroy(layer);
    oracle_model_free(&model);
}

/* Each router rule by itself, so that no random run leaves one out. */
Test(gpu_layer, every_scoring_with_groups_and_biases)
{
    GPU_TEST_NEEDS_DEVICE();
    for (int i = 0; i < 4 * 2 * 2 * 2 * 2; i++) {
        testing_rng_t rng = testing_rng(testing_seed() + (uint64_t)i);
        epmoe_layer_config_t config = base_config(40, 24, 24, 5, 17);
        config.scoring = (epmoe_scoring_t)(i / 16);
        config.has_selection_bias = i / 8 % 2;
        config.renormalize = i / 4 % 2;
        config.n_group = i / 2 % 2 ? 6 : 1;
        config.topk_group = i / 2 % 2 ? 2 : 1;
        config.group_score = i % 2 ? EPMOE_GROUP_SCORE_MAX : EPMOE_GROUP_SCORE_TOP2;
        config.router_has_bias = i % 2;
        config.routed_scale = 1.5f;
        config.dtype = types[i % 2];
        const gpu_forward_t forwards[] = {{.num_tokens = 17}, {.num_tokens = 17, .forced_logits = true}};
        check_forwards(&config, &rng, forwards, 2);
    }
}

/* Given logits: of a product's last bits could depend what is close to a choice. */
Test(gpu_layer, sparse_mixer)
{
    GPU_TEST_NEEDS_DEVICE();
    for (int i = 0; i < 8; i++) {
        testing_rng_t rng = testing_rng(testing_seed() + (uint64_t)i);
        epmoe_layer_config_t config = base_config(64, 32, i / 4 ? 16 : 40, i / 4 ? 2 : 7, 80);
        config.scoring = EPMOE_SCORING_SPARSE_MIXER;
        config.router_jitter = i / 2 % 2 ? 0.3f : 0.01f;
        config.renormalize = i % 2;
        config.dtype = types[i % 2];
        const gpu_forward_t forwards[] = {
            {.num_tokens = 1, .tokens = 1, .forced_logits = true},
            {.num_tokens = 17, .tokens = 17, .forced_logits = true},
            {.num_tokens = 80, .tokens = 61, .forced_logits = true, .by_num_tokens_dev = true}};
        check_forwards(&config, &rng, forwards, 3);
    }
}

Test(gpu_layer, every_activation_with_biases_and_weight_on_input)
{
    GPU_TEST_NEEDS_DEVICE();
    for (int i = 0; i < 4 * 2 * 2 * 2; i++) {
        testing_rng_t rng = testing_rng(testing_seed() + (uint64_t)i);
        epmoe_layer_config_t config = base_config(56, 40, 9, 3, 33);
        config.activation = (epmoe_activation_t)(i / 8);
        config.expert_has_bias = i / 4 % 2;
        config.weight_on_input = i / 2 % 2;
        config.limit = i % 2 ? 0.8f : 0;
        config.alpha = i % 2 ? 1.3f : 0;
        config.shared_intermediate = 24, config.shared_gated = i % 2;
        config.dtype = types[(i + i / 8) % 2];
        const gpu_forward_t forwards[] = {{.num_tokens = 33, .residual = true}};
        check_forwards(&config, &rng, forwards, 1);
    }
}

static void check_shapes(int32_t experts, int32_t k, int32_t d, int32_t f)
{
    for (int i = 0; i < 2; i++) {
        testing_rng_t rng = testing_rng(testing_seed() + (uint64_t)i);
        epmoe_layer_config_t config = base_config(d, f, experts, k, 257);
        config.dtype = types[i];
        config.renormalize = 1;
        config.shared_intermediate = i ? 0 : f + 8;
        const gpu_forward_t forwards[] = {{.num_tokens = 1},
                                          {.num_tokens = 3, .residual = true},
                                          {.num_tokens = 17, .y = GPU_Y_IS_X},
                                          {.num_tokens = 63, .y = GPU_Y_IS_RESIDUAL},
                                          {.num_tokens = 127, .by_num_tokens_dev = true, .tokens = 70},
                                          {.num_tokens = 257}};
        check_forwards(&config, &rng, forwards, 6);
    }
}

Test(gpu_layer, five_experts)
{
    GPU_TEST_NEEDS_DEVICE();
    check_shapes(5, 2, 264, 152);
    check_shapes(5, 5, 8, 8);
    check_shapes(1, 1, 24, 56);
}

Test(gpu_layer, sixty_experts)
{
    GPU_TEST_NEEDS_DEVICE();
    check_shapes(60, 4, 136, 88);
}

Test(gpu_layer, one_hundred_and_twenty_eight_experts)
{
    GPU_TEST_NEEDS_DEVICE();
    check_shapes(128, 8, 72, 40);
}

Test(gpu_layer, three_hundred_and_eighty_four_experts)
{
    GPU_TEST_NEEDS_DEVICE();
    check_shapes(384, 8, 56, 24);
}

Test(gpu_layer, random_layers)
{
    GPU_TEST_NEEDS_DEVICE();
    for (int i = 0; i < 80; i++) {
        testing_rng_t rng = testing_rng(testing_seed() + (uint64_t)i);
        epmoe_layer_config_t config = gpu_random_config(&rng, 70);
        gpu_forward_t forwards[3];
        for (int j = 0; j < 3; j++) {
            forwards[j] = (gpu_forward_t){.num_tokens = testing_range(&rng, 1, j ? 70 : 8),
                                          .forced_logits = config.num_experts && testing_range(&rng, 0, 1),
                                          .residual = testing_range(&rng, 0, 1),
                                          .by_num_tokens_dev = testing_range(&rng, 0, 2) == 0,
                                          .y = testing_range(&rng, 0, 2)};
            forwards[j].tokens = testing_range(&rng, 0, forwards[j].num_tokens);
        }
        check_forwards(&config, &rng, forwards, 3);
    }
}

Test(gpu_layer, dense_mlp)
{
    GPU_TEST_NEEDS_DEVICE();
    for (int i = 0; i < 8; i++) {
        testing_rng_t rng = testing_rng(testing_seed() + (uint64_t)i);
        epmoe_layer_config_t config = base_config(72, 0, 0, 0, 130);
        config.activation = (epmoe_activation_t)(i / 2);
        config.shared_intermediate = 104, config.shared_gated = i % 2;
        config.dtype = types[(i / 2 + i) % 2];
        const gpu_forward_t forwards[] = {{.num_tokens = 1},
                                          {.num_tokens = 130, .residual = true},
                                          {.num_tokens = 130, .y = GPU_Y_IS_X},
                                          {.num_tokens = 65, .y = GPU_Y_IS_RESIDUAL},
                                          {.num_tokens = 65, .by_num_tokens_dev = true, .tokens = 64}};
        check_forwards(&config, &rng, forwards, 5);
    }
}

/* All tokens go to the same k experts, and what an expert that nobody draws has is NaN; k is 1, 2 or all there are.
 * Sizes of weights in rows and in tiles. */
Test(gpu_layer, all_tokens_to_the_same_experts)
{
    GPU_TEST_NEEDS_DEVICE();
    enum { kExperts = 6 };
    static const int32_t widths[][2] = {{72, 40}, {256, 192}}, ks[] = {1, 2, kExperts};
    const gpu_forward_t forwards[] = {{.num_tokens = 1},
                                      {.num_tokens = 9, .residual = true},
                                      {.num_tokens = 33, .by_num_tokens_dev = true, .tokens = 0},
                                      {.num_tokens = 257}};
    for (int i = 0; i < 2 * 3 * 2; i++) {
        testing_rng_t rng = testing_rng(testing_seed() + (uint64_t)i);
        const int32_t d = widths[i % 2][0], f = widths[i % 2][1], k = ks[i / 2 % 3], first = i % (kExperts - k + 1);
        epmoe_layer_config_t config = base_config(d, f, kExperts, k, 257);
        config.dtype = types[i / 6];
        config.has_selection_bias = 1;
        oracle_model_t model = gpu_model(&rng, &config);
        float *bias = (float *)(uintptr_t)model.weights.selection_bias;
        uint16_t *gate_up = (uint16_t *)(uintptr_t)model.weights.gate_up.data;
        uint16_t *down = (uint16_t *)(uintptr_t)model.weights.down.data;
        for (int32_t e = 0; e < kExperts; e++) {
            const bool drawn = e >= first && e < first + k;
            bias[e] = drawn ? 10 : 0;
            for (int64_t j = 0; j < 2 * (int64_t)f * d && !drawn; j++) gate_up[e * 2 * (int64_t)f * d + j] = 0x7FFF;
            for (int64_t j = 0; j < (int64_t)d * f && !drawn; j++) down[e * (int64_t)d * f + j] = 0x7FFF;
        }
        epmoe_layer_t *layer = gpu_layer_with(&model);
        cr_assert_not_null(layer);
        for (int j = 0; j < 4; j++)
            cr_expect(gpu_layer_check(layer, &model, &forwards[j], &rng), "forward %d: %s", j,
                      gpu_config_text(&config));
        epmoe_layer_destroy(layer);
        oracle_model_free(&model);
    }
}

/* ---------------------------------------------------------------------------------------------- against the CPU */

/* The same random weights on both backends, sizes of a real model, the device's routing on both. */
static void check_against_cpu(const char *preset, int32_t num_tokens)
{
    epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
    cr_assert_eq(epmoe_preset_config(preset, &config), EPMOE_OK, "%s", epmoe_last_error());
    config.max_tokens = num_tokens;
    config.dtype = EPMOE_BF16;
    testing_rng_t rng = testing_rng(testing_seed());
    epmoe_comm_t *comm = NULL;
    epmoe_layer_t *layer = gpu_layer(&config), *reference = gpu_layer_on_cpu(&config, &comm);
    cr_assert(layer && reference);
    cr_assert_eq(epmoe_layer_set_random_weights(layer, 7), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(epmoe_layer_set_random_weights(reference, 7), EPMOE_OK, "%s", epmoe_last_error());

    int64_t n = (int64_t)num_tokens * config.hidden;
    gpu_tokens_t tokens = gpu_tokens(&rng, &config, num_tokens);
    epmoe_forward_args_t args = EPMOE_FORWARD_ARGS_INIT;
    args.num_tokens = num_tokens;
    args.x = tokens.x, args.y = tokens.y, args.logits_out = tokens.logits_out, args.ids_out = tokens.ids_out;
    cr_assert_eq(epmoe_layer_forward_args(layer, &args, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert(gpu_wait());
    void *x = gpu_get_new(tokens.x, n * 2), *y = gpu_get_new(tokens.y, n * 2);
    float *logits = gpu_get_new(tokens.logits_out, (int64_t)num_tokens * config.num_experts * 4);
    int32_t *ids = gpu_get_new(tokens.ids_out, (int64_t)num_tokens * config.top_k * 4);

    uint16_t *cpu_y = calloc((size_t)n, sizeof *cpu_y);
    int32_t *cpu_ids = calloc((size_t)num_tokens * (size_t)config.top_k, sizeof *cpu_ids);
    float *cpu_logits = calloc((size_t)num_tokens * (size_t)config.num_experts, sizeof *cpu_logits);
    args.x = x, args.y = cpu_y, args.logits = logits, args.logits_out = cpu_logits, args.ids_out = cpu_ids;
    cr_assert_eq(epmoe_layer_forward_args(reference, &args, NULL), EPMOE_OK, "%s", epmoe_last_error());

    cr_expect(gpu_same("ids", ids, cpu_ids, (int64_t)num_tokens * config.top_k, 4, config.top_k), "%s", preset);
    double *expected = calloc((size_t)n, sizeof *expected);
    int64_t num_logits = (int64_t)num_tokens * config.num_experts;
    double *expected_logits = calloc((size_t)num_logits, sizeof *expected_logits);
    for (int64_t i = 0; i < n; i++) expected[i] = (double)epmoei_load(cpu_y, EPMOE_BF16, i);
    for (int64_t i = 0; i < num_logits; i++) expected_logits[i] = (double)cpu_logits[i];
    double error = testing_row_error(y, EPMOE_BF16, expected, num_tokens, config.hidden);
    cr_expect(error <= 1.6e-2, "%s: y is off by %g", preset, error);
    error = testing_rel_error(y, EPMOE_BF16, expected, n);
    cr_expect(error <= 6e-3, "%s: |y - cpu| / |cpu| is %g", preset, error);
    error = testing_row_error(logits, EPMOE_F32, expected_logits, num_tokens, config.num_experts);
    cr_expect(error <= 1e-5, "%s: logits are off by %g", preset, error);
    cr_expect(gpu_tokens_free(&tokens));
    free(x), free(y), free(logits), free(ids), free(cpu_y), free(cpu_ids), free(cpu_logits);
    free(expected), free(expected_logits);
    epmoe_layer_destroy(layer), epmoe_layer_destroy(reference);
    epmoe_comm_destroy(comm);
}

Test(gpu_layer, the_cpu_agrees_on_qwen3_30b)
{
    GPU_TEST_NEEDS_DEVICE();
    check_against_cpu("qwen3-30b-a3b", 48);
}

Test(gpu_layer, the_cpu_agrees_on_gpt_oss_20b)
{
    GPU_TEST_NEEDS_DEVICE();
    check_against_cpu("gpt-oss-20b", 5);
}

/* ------------------------------------------------------------------------------------------------------- promises */

static epmoe_layer_config_t some_config(void)
{
    epmoe_layer_config_t config = base_config(72, 40, 9, 3, 150);
    config.shared_intermediate = 24, config.shared_gated = 1;
    return config;
}

Test(gpu_layer, forward_is_deterministic_and_never_allocates)
{
    GPU_TEST_NEEDS_DEVICE();
    enum { kTokens = 150, kBytes = kTokens * 72 * 2 };
    testing_rng_t rng = testing_rng(testing_seed());
    epmoe_layer_config_t config = some_config();
    oracle_model_t model = gpu_model(&rng, &config);
    epmoe_layer_t *layer = gpu_layer_with(&model);
    cr_assert_not_null(layer);
    gpu_tokens_t tokens = gpu_tokens(&rng, &config, kTokens);
    void *other = gpu_buffer(kBytes, 0), *first = NULL;
    int64_t live = epmoei_alloc_live();
    for (int32_t i = 0; i < 100; i++) {
        gpu_poison(tokens.y, kBytes);
        epmoei_alloc_fail_at(1);
        cr_assert_eq(epmoe_layer_forward(layer, tokens.x, tokens.y, kTokens, gpu_stream()), EPMOE_OK, "run %d: %s", i,
                     epmoe_last_error());
        cr_assert_eq(epmoe_layer_forward(layer, tokens.x, other, testing_range(&rng, 0, kTokens), gpu_stream()),
                     EPMOE_OK);
        /* The failure is still waiting for an allocation. */
        cr_assert_null(epmoei_alloc(1), "run %d allocated", i);
        epmoei_alloc_fail_at(0);
        cr_assert(gpu_wait());
        void *y = gpu_get_new(tokens.y, kBytes);
        if (first) cr_assert(gpu_same("y", y, first, kBytes / 2, 2, 72), "run %d", i);
        if (!first) first = gpu_get_new(tokens.y, kBytes);
        free(y);
    }
    cr_assert_eq(epmoei_alloc_live(), live);
    free(first), gpu_buffer_free(other);
    cr_expect(gpu_tokens_free(&tokens));
    epmoe_layer_destroy(layer);
    oracle_model_free(&model);
}

Test(gpu_layer, routing_is_the_same_alone_and_among_others)
{
    GPU_TEST_NEEDS_DEVICE();
    enum { kTokens = 150 };
    testing_rng_t rng = testing_rng(testing_seed());
    epmoe_layer_config_t config = some_config();
    oracle_model_t model = gpu_model(&rng, &config);
    epmoe_layer_t *layer = gpu_layer_with(&model);
    cr_assert_not_null(layer);
    gpu_tokens_t tokens = gpu_tokens(&rng, &config, kTokens);
    epmoe_forward_args_t args = EPMOE_FORWARD_ARGS_INIT;
    args.num_tokens = kTokens, args.x = tokens.x, args.y = tokens.y;
    args.logits_out = tokens.logits_out, args.ids_out = tokens.ids_out, args.weights_out = tokens.weights_out;
    cr_assert_eq(epmoe_layer_forward_args(layer, &args, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
    float *logits = gpu_get_new(tokens.logits_out, kTokens * 9 * 4), one_logits[9];
    float *weights = gpu_get_new(tokens.weights_out, kTokens * 3 * 4), one_weights[3];
    int32_t *ids = gpu_get_new(tokens.ids_out, kTokens * 3 * 4), one_ids[3];
    args.num_tokens = 1;
    for (int32_t t = 0; t < kTokens; t++) {
        args.x = (char *)tokens.x + t * 72 * 2;
        cr_assert_eq(epmoe_layer_forward_args(layer, &args, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
        gpu_get(one_logits, tokens.logits_out, sizeof one_logits);
        gpu_get(one_weights, tokens.weights_out, sizeof one_weights);
        gpu_get(one_ids, tokens.ids_out, sizeof one_ids);
        cr_assert(gpu_same("logits", one_logits, logits + t * 9, 9, 4, 9), "token %d", t);
        cr_assert(gpu_same("ids", one_ids, ids + t * 3, 3, 4, 3), "token %d", t);
        cr_assert(gpu_same("weights", one_weights, weights + t * 3, 3, 4, 3), "token %d", t);
    }
    free(logits), free(weights), free(ids);
    cr_expect(gpu_tokens_free(&tokens));
    epmoe_layer_destroy(layer);
    oracle_model_free(&model);
}

Test(gpu_layer, configs_that_a_device_cannot_run)
{
    GPU_TEST_NEEDS_DEVICE();
    int64_t live = epmoei_alloc_live();
#define REFUSED(change, word)                                                                                          \
    do {                                                                                                               \
        epmoe_layer_config_t config = some_config();                                                                   \
        epmoe_layer_t *none = (epmoe_layer_t *)&config;                                                                \
        change;                                                                                                        \
        epmoe_set_last_error(EPMOE_OK, "");                                                                            \
        epmoe_status_t status = epmoe_layer_create(&config, NULL, &none);                                              \
        cr_expect_eq(status, EPMOE_ERROR_NOT_SUPPORTED, "%s gave %s", #change, epmoe_status_string(status));           \
        cr_expect_null(none, "%s", #change);                                                                           \
        cr_expect(strstr(epmoe_last_error(), word), "%s: '%s' lacks '%s'", #change, epmoe_last_error(), word);         \
    } while (0)
    REFUSED(config.hidden = 20, "hidden is 20");
    REFUSED(config.intermediate = 12, "intermediate is 12");
    REFUSED(config.shared_intermediate = 4, "shared_intermediate is 4");
    REFUSED(config.dtype = EPMOE_F32, "f32");
    REFUSED(config.weight_format = EPMOE_FORMAT_F32, "fp32");
#undef REFUSED
    cr_assert_eq(epmoei_alloc_live(), live);
}

/* Bad calls say what is wrong, leave y alone, and the layer as it was. */
Test(gpu_layer, bad_forwards)
{
    GPU_TEST_NEEDS_DEVICE();
    enum { kTokens = 5, kBytes = kTokens * 72 * 2 };
    testing_rng_t rng = testing_rng(testing_seed());
    epmoe_layer_config_t config = some_config();
    oracle_model_t model = gpu_model(&rng, &config);
    epmoe_layer_t *layer = gpu_layer_with(&model), *empty = gpu_layer(&config);
    cr_assert(layer && empty);
    gpu_tokens_t tokens = gpu_tokens(&rng, &config, kTokens);
    epmoe_forward_args_t good = EPMOE_FORWARD_ARGS_INIT;
    double stage_us[EPMOE_STAGE_COUNT];
    good.num_tokens = kTokens, good.x = tokens.x, good.y = tokens.y;
    cr_assert_eq(epmoe_layer_forward_args(layer, &good, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
    void *first = gpu_get_new(tokens.y, kBytes);
#define REFUSED(which, change, expected_status, word)                                                                  \
    do {                                                                                                               \
        epmoe_forward_args_t args = good;                                                                              \
        change;                                                                                                        \
        gpu_poison(tokens.y, kBytes);                                                                                  \
        epmoe_set_last_error(EPMOE_OK, "");                                                                            \
        epmoe_status_t status = epmoe_layer_forward_args(which, &args, gpu_stream());                                  \
        cr_expect_eq(status, expected_status, "%s gave %s", #change, epmoe_status_string(status));                     \
        cr_expect(strstr(epmoe_last_error(), word), "%s: '%s' lacks '%s'", #change, epmoe_last_error(), word);         \
        cr_expect(gpu_wait(), "%s", #change);                                                                          \
        cr_expect(gpu_is_poison(tokens.y, 0, kBytes), "%s: y was written", #change);                                   \
        cr_assert_eq(epmoe_layer_forward_args(layer, &good, gpu_stream()), EPMOE_OK, "after %s: %s", #change,          \
                     epmoe_last_error());                                                                              \
        void *y = gpu_get_new(tokens.y, kBytes);                                                                       \
        cr_expect(gpu_same("y", y, first, kBytes / 2, 2, 72), "after %s", #change);                                    \
        free(y);                                                                                                       \
    } while (0)
    REFUSED(layer, args.num_tokens = 151, EPMOE_ERROR_INVALID_ARGUMENT, "num_tokens is 151");
    REFUSED(layer, args.num_tokens = -1, EPMOE_ERROR_INVALID_ARGUMENT, "num_tokens is -1");
    REFUSED(layer, args.x = NULL, EPMOE_ERROR_INVALID_ARGUMENT, "x is NULL");
    REFUSED(layer, args.y = NULL, EPMOE_ERROR_INVALID_ARGUMENT, "y is NULL");
    REFUSED(layer, args.stage_us = stage_us, EPMOE_ERROR_NOT_SUPPORTED, "stage_us");
    REFUSED(layer, args.x = (char *)tokens.x + 2, EPMOE_ERROR_INVALID_ARGUMENT, "16 bytes");
    REFUSED(layer, args.x = (char *)tokens.x + 8, EPMOE_ERROR_INVALID_ARGUMENT, "x is");
    REFUSED(layer, args.y = (char *)tokens.y + 8, EPMOE_ERROR_INVALID_ARGUMENT, "16 bytes");
    REFUSED(layer, args.residual = (char *)tokens.residual + 2, EPMOE_ERROR_INVALID_ARGUMENT, "residual is");
    REFUSED(empty, (void)args, EPMOE_ERROR_BAD_STATE, "no weights");
#undef REFUSED
    free(first);
    cr_expect(gpu_tokens_free(&tokens));
    epmoe_layer_destroy(layer), epmoe_layer_destroy(empty);
    oracle_model_free(&model);
}

Test(gpu_layer, no_tokens)
{
    GPU_TEST_NEEDS_DEVICE();
    testing_rng_t rng = testing_rng(testing_seed());
    for (int dense = 0; dense < 2; dense++) {
        epmoe_layer_config_t config = some_config();
        if (dense) config.num_experts = 0;
        oracle_model_t model = gpu_model(&rng, &config);
        epmoe_layer_t *layer = gpu_layer_with(&model);
        cr_assert_not_null(layer);
        cr_expect_eq(epmoe_layer_forward(layer, NULL, NULL, 0, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
        epmoe_forward_args_t args = EPMOE_FORWARD_ARGS_INIT;
        cr_expect_eq(epmoe_layer_forward_args(layer, &args, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
        gpu_tokens_t tokens = gpu_tokens(&rng, &config, 3);
        args.x = tokens.x, args.y = tokens.y, args.ids_out = tokens.ids_out, args.logits_out = tokens.logits_out;
        cr_expect_eq(epmoe_layer_forward_args(layer, &args, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
        cr_expect(gpu_wait() && gpu_is_poison(tokens.y, 0, 3 * (int64_t)config.hidden * 2));
        if (!dense) cr_expect(gpu_is_poison(tokens.ids_out, 0, 3 * (int64_t)config.top_k * 4));
        cr_expect(gpu_tokens_free(&tokens));
        epmoe_layer_destroy(layer);
        oracle_model_free(&model);
    }
}
