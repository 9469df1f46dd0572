/* The bench's routing generators: what they draw, and that the library's own router then chooses exactly that. */
#include "bench/routing.c"
#include "bench/selection.c"
#include "tests/testing.h"

#include <criterion/criterion.h>
#include <unistd.h>

enum { kTokens = 2000 };

static epmoe_layer_config_t preset(const char *name)
{
    epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
    cr_assert_eq(epmoe_preset_config(name, &config), EPMOE_OK);
    return config;
}

static int32_t *draw(const routing_t *routing, int64_t first, int32_t num_tokens)
{
    int32_t *ids = malloc((size_t)num_tokens * (size_t)routing->config->top_k * sizeof *ids);
    cr_assert_eq(routing_draw(routing, first + num_tokens, first, num_tokens, ids), EPMOE_OK, "%s", epmoe_last_error());
    return ids;
}

static void assert_distinct(const routing_t *routing, const int32_t *ids, int32_t num_tokens)
{
    int32_t k = routing->config->top_k;
    for (int32_t t = 0; t < num_tokens; t++)
        for (int32_t j = 0; j < k; j++) {
            cr_assert(ids[t * k + j] >= 0 && ids[t * k + j] < routing->config->num_experts);
            for (int32_t i = 0; i < j; i++) cr_assert_neq(ids[t * k + i], ids[t * k + j]);
        }
}

/* The library's router, given the forced logits, must choose the ids in some order and give them weights that differ.
 */
static void assert_forced(const routing_t *routing, const int32_t *ids, int64_t first, int32_t num_tokens)
{
    const epmoe_layer_config_t *config = routing->config;
    int32_t k = config->top_k, num_experts = config->num_experts;
    float *logits = malloc((size_t)num_tokens * (size_t)num_experts * sizeof *logits);
    int32_t *chosen = malloc((size_t)num_tokens * (size_t)k * sizeof *chosen);
    float *weights = malloc((size_t)num_tokens * (size_t)k * sizeof *weights);
    cr_assert_eq(routing_logits(routing, first, num_tokens, ids, logits), EPMOE_OK, "%s", epmoe_last_error());
    epmoe_topk_args_t args = EPMOE_TOPK_ARGS_INIT;
    args.backend = EPMOE_BACKEND_CPU;
    args.num_tokens = num_tokens;
    args.num_experts = num_experts;
    args.top_k = k;
    args.logits = logits;
    args.selection_bias = routing->selection_bias;
    args.scoring = config->scoring;
    args.renormalize = config->renormalize;
    args.scale = config->routed_scale;
    args.n_group = config->n_group;
    args.topk_group = config->topk_group;
    args.group_score = config->group_score;
    args.ids = chosen;
    args.weights = weights;
    cr_assert_eq(epmoe_topk(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    for (int32_t t = 0; t < num_tokens; t++) {
        for (int32_t j = 0; j < k; j++) {
            bool found = false;
            for (int32_t i = 0; i < k; i++) found = found || chosen[t * k + i] == ids[t * k + j];
            cr_assert(found, "token %d: expert %d was not chosen", t, ids[t * k + j]);
            cr_assert(weights[t * k + j] > 0);
        }
        cr_assert_eq(
            selection_count_wrong(config, routing->selection_bias, logits + (int64_t)t * num_experts, chosen + t * k),
            0);
        float least = weights[t * k], most = least;
        for (int32_t j = 0; j < k; j++) {
            least = weights[t * k + j] < least ? weights[t * k + j] : least;
            most = weights[t * k + j] > most ? weights[t * k + j] : most;
        }
        cr_assert(k == 1 || (most > least && most < 8 * least), "weights are %g to %g", (double)least, (double)most);
    }
    free(weights);
    free(chosen);
    free(logits);
}

Test(routing, uniform_draws_every_expert_equally_often)
{
    epmoe_layer_config_t config = preset("qwen3-30b-a3b");
    routing_t routing = {.kind = ROUTING_UNIFORM, .seed = testing_seed(), .config = &config};
    int32_t counts[128] = {0}, *ids = draw(&routing, 0, kTokens);
    assert_distinct(&routing, ids, kTokens);
    for (int32_t i = 0; i < kTokens * 8; i++) counts[ids[i]]++;
    /* 125 expected, standard deviation below 11: six of them. */
    for (int32_t e = 0; e < 128; e++) cr_assert(abs(counts[e] - 125) < 66, "expert %d: %d times", e, counts[e]);
    assert_forced(&routing, ids, 0, kTokens);
    free(ids);
}

Test(routing, draws_depend_on_the_global_token_alone)
{
    epmoe_layer_config_t config = preset("deepseek-v3");
    const routing_kind_t kinds[] = {ROUTING_UNIFORM, ROUTING_ZIPF};
    for (int32_t i = 0; i < 2; i++) {
        routing_t routing = {.kind = kinds[i], .exponent = 1, .seed = 7, .config = &config};
        int32_t *all = draw(&routing, 0, 50), *part = draw(&routing, 30, 20);
        cr_assert_arr_eq(all + 30 * 8, part, 20 * 8 * sizeof *all);
        routing.seed = 8;
        int32_t *other = draw(&routing, 0, 50);
        cr_assert(memcmp(all, other, 50 * 8 * sizeof *all));
        free(other);
        free(part);
        free(all);
    }
}

/* Sets of experts in at most topk_group groups, and all of those sets: with 4 of 8 groups each group is used. */
Test(routing, groups_are_respected)
{
    epmoe_layer_config_t config = preset("deepseek-v3");
    float bias[256];
    testing_rng_t rng = testing_rng(testing_seed());
    for (int32_t e = 0; e < 256; e++) bias[e] = testing_uniform(&rng, -0.1f, 0.1f);
    const routing_kind_t kinds[] = {ROUTING_UNIFORM, ROUTING_ZIPF, ROUTING_ONE_EXPERT};
    for (int32_t i = 0; i < 3; i++) {
        routing_t routing = {
            .kind = kinds[i], .exponent = 1, .seed = testing_seed(), .config = &config, .selection_bias = bias};
        int32_t *ids = draw(&routing, 0, kTokens);
        bool used[8] = {false};
        assert_distinct(&routing, ids, kTokens);
        for (int32_t t = 0; t < kTokens; t++) {
            bool here[8] = {false};
            int32_t count = 0;
            for (int32_t j = 0; j < 8; j++) used[ids[t * 8 + j] / 32] = here[ids[t * 8 + j] / 32] = true;
            for (int32_t g = 0; g < 8; g++) count += here[g];
            cr_assert(count <= 4);
        }
        for (int32_t g = 0; g < 8 && kinds[i] != ROUTING_ONE_EXPERT; g++) cr_assert(used[g]);
        assert_forced(&routing, ids, 0, kTokens);
        free(ids);
    }
}

/* A group with one forced expert needs a second finite score, or its sum of two is -inf. */
Test(routing, one_expert_per_group_is_forced)
{
    epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
    config.num_experts = 12;
    config.top_k = 3;
    config.scoring = EPMOE_SCORING_SIGMOID;
    config.n_group = 4;
    config.topk_group = 3;
    const int32_t ids[] = {1, 4, 11, 9, 2, 6, 0, 1, 2};
    const float bias[12] = {0.1f, -0.1f, 0.2f, 0.2f, 0.1f, 0.0f, 0.1f, -0.2f, 0.1f, 0.1f, 0.0f, 0.1f};
    const epmoe_scoring_t scorings[] = {EPMOE_SCORING_SIGMOID, EPMOE_SCORING_SOFTMAX, EPMOE_SCORING_SQRT_SOFTPLUS,
                                        EPMOE_SCORING_TOPK_SOFTMAX};
    for (int32_t i = 0; i < 4; i++) {
        config.scoring = scorings[i];
        routing_t routing = {.kind = ROUTING_FILE, .seed = testing_seed(), .config = &config};
        assert_forced(&routing, ids, 0, 3);
        routing.selection_bias = i == 3 ? NULL : bias;
        config.group_score = EPMOE_GROUP_SCORE_MAX;
        assert_forced(&routing, ids, 0, 3);
        config.group_score = EPMOE_GROUP_SCORE_TOP2;
    }
}

Test(routing, a_bias_that_outweighs_every_score_is_an_error)
{
    epmoe_layer_config_t config = preset("deepseek-v3");
    config.topk_group = 2;
    config.top_k = 2;
    float bias[256];
    for (int32_t e = 0; e < 256; e++) bias[e] = e < 32 ? 50.0f : 0.0f;
    /* Expert 3's group needs a second value, and each of that group's biases exceeds expert 40's best score. */
    const int32_t ids[] = {3, 40};
    float logits[256];
    routing_t routing = {.kind = ROUTING_FILE, .config = &config, .selection_bias = bias};
    cr_assert_eq(routing_logits(&routing, 0, 1, ids, logits), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert(strstr(epmoe_last_error(), "token 0"));
}

Test(routing, every_preset_can_be_forced)
{
    for (int32_t i = 0; epmoe_preset_name(i); i++) {
        epmoe_layer_config_t config = preset(epmoe_preset_name(i));
        routing_t routing = {.kind = ROUTING_UNIFORM, .seed = 3, .config = &config};
        int32_t *ids = draw(&routing, 100, 64);
        assert_distinct(&routing, ids, 64);
        assert_forced(&routing, ids, 100, 64);
        free(ids);
    }
}

/* With one draw per token the frequencies are the normalised weights themselves. */
Test(routing, zipf_frequencies)
{
    epmoe_layer_config_t config = preset("qwen3-30b-a3b");
    config.num_experts = 8;
    config.top_k = 1;
    routing_t routing = {.kind = ROUTING_ZIPF, .exponent = 1, .seed = testing_seed(), .config = &config};
    enum { kDraws = 20000 };
    int32_t counts[8] = {0}, *ids = draw(&routing, 0, kDraws);
    for (int32_t i = 0; i < kDraws; i++) counts[ids[i]]++;
    double harmonic = 0;
    for (int32_t i = 1; i <= 8; i++) harmonic += 1.0 / i;
    for (int32_t i = 0; i < 8; i++) {
        int32_t most = 0;
        for (int32_t e = 1; e < 8; e++) most = counts[e] > counts[most] ? e : most;
        double expected = kDraws / harmonic / (i + 1), deviation = sqrt(expected);
        /* Close neighbours may swap places; six deviations and that. */
        cr_assert(fabs(counts[most] - expected) < 6 * deviation + 40, "place %d: %d, expected %g", i, counts[most],
                  expected);
        counts[most] = -1;
    }
    free(ids);
}

Test(routing, zipf_without_replacement)
{
    epmoe_layer_config_t config = preset("qwen3-30b-a3b");
    routing_t steep = {.kind = ROUTING_ZIPF, .exponent = 3, .seed = testing_seed(), .config = &config};
    int32_t counts[128] = {0}, *ids = draw(&steep, 0, kTokens), most = 0;
    assert_distinct(&steep, ids, kTokens);
    for (int32_t i = 0; i < kTokens * 8; i++) counts[ids[i]]++;
    for (int32_t e = 0; e < 128; e++) most = counts[e] > most ? counts[e] : most;
    /* The first expert has 5 of 6 of the weight: of eight distinct draws it misses almost none. */
    cr_assert(most > kTokens * 99 / 100);
    assert_forced(&steep, ids, 0, kTokens);
    free(ids);
}

Test(routing, one_expert_takes_the_first_k)
{
    epmoe_layer_config_t config = preset("kimi-k2");
    routing_t routing = {.kind = ROUTING_ONE_EXPERT, .seed = 1, .config = &config};
    int32_t *ids = draw(&routing, 0, 5);
    for (int32_t i = 0; i < 40; i++) cr_assert_eq(ids[i], i % 8);
    free(ids);

    epmoe_layer_config_t grouped = preset("deepseek-v3");
    grouped.num_experts = 16; /* experts 0..7 are four groups of two */
    grouped.topk_group = 3;
    routing.config = &grouped;
    int32_t refused[8];
    cr_assert_eq(routing_draw(&routing, 1, 0, 1, refused), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert(strstr(epmoe_last_error(), "4 groups"));
}

static epmoe_status_t draw_file(const char *content, int64_t total, int64_t first, int32_t count, int32_t *ids)
{
    static epmoe_layer_config_t config;
    char path[] = "/tmp/epmoe_routing_XXXXXX";
    int descriptor = mkstemp(path);
    cr_assert(descriptor >= 0 && write(descriptor, content, strlen(content)) == (ssize_t)strlen(content));
    close(descriptor);
    config = preset("deepseek-v3");
    config.num_experts = 8;
    config.top_k = 2;
    config.n_group = 4;
    config.topk_group = 1;
    routing_t routing = {.kind = ROUTING_FILE, .path = path, .config = &config};
    epmoe_status_t status = routing_draw(&routing, total, first, count, ids);
    unlink(path);
    return status;
}

Test(routing, file)
{
    int32_t ids[4] = {-7, -7, -7, -7};
    cr_assert_eq(draw_file("[0,1]\n[ 3, 2 ]\n[6,7]\n", 3, 1, 2, ids), EPMOE_OK, "%s", epmoe_last_error());
    const int32_t expected[] = {3, 2, 6, 7};
    cr_assert_arr_eq(ids, expected, sizeof ids);
    cr_assert_eq(draw_file("[0,1]", 1, 0, 1, ids), EPMOE_OK, "a last line needs no newline");
}

Test(routing, file_errors_name_the_line)
{
    const struct {
        const char *content;
        const char *message;
    } cases[] = {
        {"[0,1]\n[2,3\n[4,5]\n", "line 2: not JSON"},
        {"[0,1]\n[2,3]\n{\"a\":1}\n", "line 3: expected a list of 2"},
        {"[0]\n[2,3]\n[4,5]\n", "line 1: expected a list of 2"},
        {"[0,1,2]\n[2,3]\n[4,5]\n", "line 1: expected a list of 2"},
        {"[0,1]\n[2,8]\n[4,5]\n", "line 2: item 1 is not an expert"},
        {"[0,1]\n[-1,3]\n[4,5]\n", "line 2: item 0 is not an expert"},
        {"[0,1]\n[2,3.0]\n[4,5]\n", "line 2: item 1 is not an expert"},
        {"[0,1]\n[2,\"3\"]\n[4,5]\n", "line 2: item 1 is not an expert"},
        {"[0,1]\n[2,99999999999]\n[4,5]\n", "line 2: item 1 is not an expert"},
        {"[0,1]\n[2,2]\n[4,5]\n", "line 2: expert 2 stands twice"},
        {"[0,1]\n[1,2]\n[4,5]\n", "line 2: the experts lie in 2 groups"},
        {"[0,1]\n\n[4,5]\n", "line 2: not JSON"},
        {"[0,1]\n[2,3] 7\n[4,5]\n", "line 2: not JSON"},
        {"[0,1]\n[2,3]\n", "has 2 lines: expected 3"},
        {"[0,1]\n[2,3]\n[4,5]\n[6,7]\n", "has 4 lines: expected 3"},
        {"", "has 0 lines: expected 3"},
    };
    int32_t ids[2];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        /* Whichever rank asks: also the one whose line is good. */
        for (int32_t token = 0; token < 3; token++) {
            cr_assert_eq(draw_file(cases[i].content, 3, token, 1, ids), EPMOE_ERROR_FORMAT, "case %zu", i);
            cr_assert(strstr(epmoe_last_error(), cases[i].message), "'%s' is not in '%s'", cases[i].message,
                      epmoe_last_error());
        }
    }
    epmoe_layer_config_t config = preset("mixtral-8x7b");
    routing_t routing = {.kind = ROUTING_FILE, .path = "/nowhere/routing", .config = &config};
    cr_assert_eq(routing_draw(&routing, 1, 0, 1, ids), EPMOE_ERROR_IO);
    cr_assert(strstr(epmoe_last_error(), "/nowhere/routing"));
}

/* The judge of the router must itself find faults. */
Test(routing, selection_judge_rejects)
{
    epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
    config.num_experts = 8;
    config.top_k = 2;
    const float logits[8] = {0.5f, 2.0f, 1.0f, 2.0f, -1.0f, NAN, INFINITY, 0.0f};
    const int32_t right[] = {6, 1}, order[] = {1, 6}, tie[] = {6, 3}, worse[] = {6, 2}, twice[] = {6, 6},
                  outside[] = {6, 8}, negative[] = {-1, 1};
    cr_assert_eq(selection_count_wrong(&config, NULL, logits, right), 0);
    cr_assert_gt(selection_count_wrong(&config, NULL, logits, order), 0);
    cr_assert_gt(selection_count_wrong(&config, NULL, logits, tie), 0);
    cr_assert_gt(selection_count_wrong(&config, NULL, logits, worse), 0);
    cr_assert_gt(selection_count_wrong(&config, NULL, logits, twice), 0);
    cr_assert_gt(selection_count_wrong(&config, NULL, logits, outside), 0);
    cr_assert_gt(selection_count_wrong(&config, NULL, logits, negative), 0);

    config.scoring = EPMOE_SCORING_SIGMOID;
    config.n_group = 2;
    config.topk_group = 1;
    const float grouped[8] = {3.0f, -9.0f, -9.0f, -9.0f, 1.0f, 1.5f, 0.0f, 0.0f};
    const int32_t second_group[] = {5, 4}, best_alone[] = {0, 5};
    cr_assert_eq(selection_count_wrong(&config, NULL, grouped, second_group), 0);
    cr_assert_gt(selection_count_wrong(&config, NULL, grouped, best_alone), 0);
}

Test(routing, selection_weights_by_hand)
{
    epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
    config.num_experts = 4;
    config.top_k = 2;
    config.routed_scale = 3.0f;
    const float logits[4] = {0.0f, logf(2.0f), logf(5.0f), -INFINITY};
    const int32_t ids[] = {2, 1};
    double weights[2];
    selection_weights(&config, logits, ids, weights); /* 5/8 and 2/8 */
    cr_assert_float_eq(weights[0], 15.0 / 8, 1e-6);
    cr_assert_float_eq(weights[1], 6.0 / 8, 1e-6);
    config.renormalize = 1;
    selection_weights(&config, logits, ids, weights);
    cr_assert_float_eq(weights[0], 15.0 / 7, 1e-6);
    config.scoring = EPMOE_SCORING_TOPK_SOFTMAX;
    config.renormalize = 0;
    selection_weights(&config, logits, ids, weights);
    cr_assert_float_eq(weights[1], 6.0 / 7, 1e-6);
    config.scoring = EPMOE_SCORING_SIGMOID; /* 5/6 and 2/3 */
    selection_weights(&config, logits, ids, weights);
    cr_assert_float_eq(weights[0], 15.0 / 6, 1e-6);
    cr_assert_float_eq(weights[1], 6.0 / 3, 1e-6);
}
