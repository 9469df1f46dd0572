/* Configs of layers: what is refused, defaults, presets; creating and failing to create. */
#include "moe/layer.h"
#include "tests/layer_case.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static epmoe_layer_config_t good_config(void)
{
    epmoe_layer_config_t c = EPMOE_LAYER_CONFIG_INIT;
    c.hidden = 16, c.intermediate = 12, c.num_experts = 8, c.top_k = 2;
    c.shared_intermediate = 4;
    c.max_tokens = 6;
    return c;
}

Test(layer_config, what_is_refused)
{
#define REFUSED(change, expected_status, word)                                                                         \
    do {                                                                                                               \
        epmoe_layer_config_t c = good_config();                                                                        \
        epmoe_layer_memory_t memory = EPMOE_LAYER_MEMORY_INIT;                                                         \
        epmoe_layer_t *layer = (epmoe_layer_t *)&c;                                                                    \
        change;                                                                                                        \
        epmoe_set_last_error(EPMOE_OK, "");                                                                            \
        epmoe_status_t status = epmoe_layer_create(&c, NULL, &layer);                                                  \
        cr_expect_eq(status, expected_status, "%s gave %s", #change, epmoe_status_string(status));                     \
        cr_expect(strstr(epmoe_last_error(), word), "%s: '%s' lacks '%s'", #change, epmoe_last_error(), word);         \
        cr_expect_null(layer, #change);                                                                                \
        cr_expect_eq(epmoe_layer_memory(&c, 1, 0, &memory), expected_status, #change);                                 \
    } while (0)
    int64_t live = epmoei_alloc_live();
    REFUSED(c.hidden = 0, EPMOE_ERROR_INVALID_ARGUMENT, "config.hidden is 0");
    REFUSED(c.hidden = -5, EPMOE_ERROR_INVALID_ARGUMENT, "config.hidden is -5");
    REFUSED(c.hidden = INT32_MAX, EPMOE_ERROR_INVALID_ARGUMENT, "config.hidden is 2147483647");
    REFUSED(c.intermediate = 0, EPMOE_ERROR_INVALID_ARGUMENT, "config.intermediate is 0");
    REFUSED(c.intermediate = INT32_MAX, EPMOE_ERROR_INVALID_ARGUMENT, "config.intermediate");
    REFUSED(c.num_experts = -1, EPMOE_ERROR_INVALID_ARGUMENT, "config.num_experts is -1");
    REFUSED(c.num_experts = 4097, EPMOE_ERROR_INVALID_ARGUMENT, "config.num_experts is 4097");
    REFUSED(c.top_k = 0, EPMOE_ERROR_INVALID_ARGUMENT, "config.top_k is 0: expected 1..8");
    REFUSED(c.top_k = 9, EPMOE_ERROR_INVALID_ARGUMENT, "config.top_k is 9");
    REFUSED((c.num_experts = 64, c.top_k = 33), EPMOE_ERROR_INVALID_ARGUMENT, "config.top_k is 33");
    REFUSED(c.scoring = (epmoe_scoring_t)5, EPMOE_ERROR_INVALID_ARGUMENT, "config.scoring is 5");
    REFUSED((c.scoring = EPMOE_SCORING_SPARSE_MIXER, c.n_group = 2), EPMOE_ERROR_INVALID_ARGUMENT,
            "SPARSE_MIXER with groups");
    REFUSED((c.scoring = EPMOE_SCORING_SPARSE_MIXER, c.has_selection_bias = 1), EPMOE_ERROR_INVALID_ARGUMENT,
            "SPARSE_MIXER with a selection bias");
    REFUSED(c.router_jitter = -0.5f, EPMOE_ERROR_INVALID_ARGUMENT, "config.router_jitter is -0.5");
    REFUSED(c.group_score = (epmoe_group_score_t)2, EPMOE_ERROR_INVALID_ARGUMENT, "config.group_score is 2");
    REFUSED(c.renormalize = 2, EPMOE_ERROR_INVALID_ARGUMENT, "config.renormalize is 2");
    REFUSED(c.routed_scale = -1, EPMOE_ERROR_INVALID_ARGUMENT, "config.routed_scale is -1");
    REFUSED(c.routed_scale = NAN, EPMOE_ERROR_INVALID_ARGUMENT, "config.routed_scale is nan");
    REFUSED(c.routed_scale = INFINITY, EPMOE_ERROR_INVALID_ARGUMENT, "config.routed_scale is inf");
    REFUSED(c.n_group = 3, EPMOE_ERROR_INVALID_ARGUMENT, "multiple of n_group (3)");
    REFUSED(c.n_group = 9, EPMOE_ERROR_INVALID_ARGUMENT, "config.n_group is 9");
    REFUSED(c.n_group = -1, EPMOE_ERROR_INVALID_ARGUMENT, "config.n_group is -1");
    REFUSED((c.n_group = 4, c.topk_group = 5), EPMOE_ERROR_INVALID_ARGUMENT, "config.topk_group is 5");
    REFUSED((c.n_group = 8, c.topk_group = 1), EPMOE_ERROR_INVALID_ARGUMENT, "config.top_k is 2: expected at most 1");
    REFUSED(c.router_has_bias = -1, EPMOE_ERROR_INVALID_ARGUMENT, "config.router_has_bias is -1");
    REFUSED(c.has_selection_bias = 3, EPMOE_ERROR_INVALID_ARGUMENT, "config.has_selection_bias is 3");
    REFUSED(c.weight_on_input = 2, EPMOE_ERROR_INVALID_ARGUMENT, "config.weight_on_input is 2");
    REFUSED(c.expert_has_bias = 2, EPMOE_ERROR_INVALID_ARGUMENT, "config.expert_has_bias is 2");
    REFUSED(c.shared_gated = 2, EPMOE_ERROR_INVALID_ARGUMENT, "config.shared_gated is 2");
    REFUSED((c.shared_intermediate = 0, c.shared_gated = 1), EPMOE_ERROR_INVALID_ARGUMENT, "shared_gated");
    REFUSED(c.shared_intermediate = -1, EPMOE_ERROR_INVALID_ARGUMENT, "config.shared_intermediate is -1");
    REFUSED((c.shared_intermediate = 0, c.num_experts = 0), EPMOE_ERROR_INVALID_ARGUMENT, "neither");
    REFUSED(c.activation = EPMOE_ACTIVATION_NONE, EPMOE_ERROR_INVALID_ARGUMENT, "activation is 4");
    REFUSED(c.alpha = INFINITY, EPMOE_ERROR_INVALID_ARGUMENT, "alpha is inf");
    REFUSED(c.limit = -2, EPMOE_ERROR_INVALID_ARGUMENT, "limit is -2");
    REFUSED(c.dtype = EPMOE_F8_E4M3, EPMOE_ERROR_INVALID_ARGUMENT, "config.dtype is 4");
    REFUSED(c.weight_format = (epmoe_format_t)10, EPMOE_ERROR_INVALID_ARGUMENT, "weight_format is 10");
    REFUSED(c.weight_group = -2, EPMOE_ERROR_INVALID_ARGUMENT, "weight_group is -2");
    REFUSED(c.fp8_activations = 2, EPMOE_ERROR_INVALID_ARGUMENT, "fp8_activations is 2");
    REFUSED(c.max_tokens = -1, EPMOE_ERROR_INVALID_ARGUMENT, "config.max_tokens is -1");
    REFUSED(c.max_tokens = INT32_MAX, EPMOE_ERROR_INVALID_ARGUMENT, "config.max_tokens is 2147483647");
    REFUSED(c.capacity = -1, EPMOE_ERROR_INVALID_ARGUMENT, "config.capacity is -1");
    REFUSED(c.capacity = (int64_t)1 << 40, EPMOE_ERROR_INVALID_ARGUMENT, "config.capacity");
    REFUSED(c.comm_sms = -1, EPMOE_ERROR_INVALID_ARGUMENT, "config.comm_sms is -1");
    REFUSED(c.struct_size = 0, EPMOE_ERROR_INVALID_ARGUMENT, "struct_size is 0");
    /* Products beyond 64 bits. */
    REFUSED((c.num_experts = 4096, c.hidden = c.intermediate = 1 << 26), EPMOE_ERROR_INVALID_ARGUMENT, "64 bits");
#undef REFUSED
    epmoe_layer_config_t c = good_config();
    epmoe_layer_t *layer;
    cr_expect_eq(epmoe_layer_create(&c, NULL, NULL), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_expect(strstr(epmoe_last_error(), "layer is NULL"), "%s", epmoe_last_error());
    cr_expect_eq(epmoe_layer_create(NULL, NULL, &layer), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_expect_null(layer);
    epmoe_layer_destroy(NULL);
    cr_assert_eq(epmoei_alloc_live(), live);
}

/* Sizes near the limits are counted, not refused and not wrapped around. */
Test(layer_config, memory_of_huge_layers)
{
    epmoe_layer_config_t c = EPMOE_LAYER_CONFIG_INIT;
    epmoe_layer_memory_t memory = EPMOE_LAYER_MEMORY_INIT;
    c.hidden = 1 << 22, c.intermediate = 1 << 22, c.num_experts = 4096, c.top_k = 32;
    c.weight_format = EPMOE_FORMAT_F32;
    c.max_tokens = (1 << 20) - 1;
    cr_assert_eq(epmoe_layer_memory(&c, 64, 63, &memory), EPMOE_OK, "%s", epmoe_last_error());
    double rows = 64.0 * (1 << 20), matrices = 64.0 * 3 * 0x1p44 * 4 + 4096 * 0x1p22 * 4;
    cr_assert_float_eq((double)memory.weight_bytes, matrices, 1e-6 * matrices);
    cr_assert((double)memory.comm_bytes > rows * 0x1p22 * 2 * 2, "%lld", (long long)memory.comm_bytes);
    cr_assert((double)memory.comm_bytes < rows * 0x1p22 * 2 * 4, "%lld", (long long)memory.comm_bytes);
    cr_assert_gt(memory.workspace_bytes, 0);
    /* More rows than slots can be numbered. */
    c.max_tokens = 1 << 25;
    cr_assert_eq(epmoe_layer_memory(&c, 64, 63, &memory), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert(strstr(epmoe_last_error(), "set capacity"), "%s", epmoe_last_error());
    c.capacity = 1 << 20;
    cr_assert_eq(epmoe_layer_memory(&c, 64, 63, &memory), EPMOE_OK, "%s", epmoe_last_error());
}

Test(layer_config, defaults)
{
    epmoe_layer_config_t c = good_config(), out;
    c.max_tokens = 0;
    cr_assert_eq(epmoei_layer_config_check(&c, &out), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert(out.routed_scale == 1 && out.n_group == 1 && out.topk_group == 1);
    cr_assert(out.dtype == EPMOE_BF16 && out.weight_format == EPMOE_FORMAT_BF16 && out.max_tokens == 4096);
    cr_assert(out.alpha == 0 && out.limit == 0);
    c.activation = EPMOE_ACTIVATION_SWIGLU_OAI, c.dtype = EPMOE_F16, c.n_group = 4;
    cr_assert_eq(epmoei_layer_config_check(&c, &out), EPMOE_OK);
    cr_assert(out.alpha == 1.702f && out.limit == 7 && out.weight_format == EPMOE_FORMAT_F16 && out.topk_group == 4);
}

/* num_experts 0: whatever the router's fields hold. */
Test(layer_config, a_dense_mlp_ignores_the_router)
{
    epmoe_layer_config_t c = good_config();
    c.num_experts = 0;
    c.intermediate = -1, c.top_k = -7, c.scoring = (epmoe_scoring_t)44, c.renormalize = 9, c.routed_scale = NAN;
    c.n_group = -3, c.topk_group = 99, c.router_has_bias = c.has_selection_bias = c.weight_on_input = 5;
    c.expert_has_bias = 1, c.capacity = -1;
    c.group_score = (epmoe_group_score_t)-1;
    c.max_tokens = 5;
    testing_rng_t rng = testing_rng(testing_seed());
    epmoe_layer_config_t plain = EPMOE_LAYER_CONFIG_INIT;
    plain.hidden = c.hidden, plain.shared_intermediate = c.shared_intermediate, plain.dtype = EPMOE_BF16;
    plain.max_tokens = 5;
    oracle_formats_t formats = {EPMOE_F32, EPMOE_F32, EPMOE_F32, EPMOE_BF16, EPMOE_BF16, EPMOE_LAYOUT_PACKED};
    oracle_model_t model = oracle_model(&rng, &plain, &formats);
    epmoe_layer_t *layer;
    cr_assert_eq(epmoe_layer_create(&c, NULL, &layer), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(epmoe_layer_set_weights(layer, &model.weights), EPMOE_OK, "%s", epmoe_last_error());
    layer_forward_t forward = {.num_tokens = 5, .residual = true, .y = Y_IS_X};
    cr_assert(layer_case_check(layer, &model, &forward, &rng));
    epmoe_layer_destroy(layer);
    oracle_model_free(&model);
}

/* The public models, written out once more. */
Test(layer_config, presets)
{
    enum { SOFTMAX = EPMOE_SCORING_SOFTMAX, SIGMOID = EPMOE_SCORING_SIGMOID, TOPK = EPMOE_SCORING_TOPK_SOFTMAX };
    static const struct {
        const char *name;
        int32_t d, f, e, k, shared, gated, scoring, renormalize, selection_bias, n_group, topk_group;
        float scale;
        int32_t biases, on_input, activation;
    } table[] = {
        {"mixtral-8x7b", 4096, 14336, 8, 2, 0, 0, SOFTMAX, 1, 0, 1, 1, 1, 0, 0, EPMOE_ACTIVATION_SILU},
        {"mixtral-8x22b", 6144, 16384, 8, 2, 0, 0, SOFTMAX, 1, 0, 1, 1, 1, 0, 0, EPMOE_ACTIVATION_SILU},
        {"qwen3-30b-a3b", 2048, 768, 128, 8, 0, 0, SOFTMAX, 1, 0, 1, 1, 1, 0, 0, EPMOE_ACTIVATION_SILU},
        {"qwen3-235b-a22b", 4096, 1536, 128, 8, 0, 0, SOFTMAX, 1, 0, 1, 1, 1, 0, 0, EPMOE_ACTIVATION_SILU},
        {"deepseek-v3", 7168, 2048, 256, 8, 2048, 0, SIGMOID, 1, 1, 8, 4, 2.5f, 0, 0, EPMOE_ACTIVATION_SILU},
        {"kimi-k2", 7168, 2048, 384, 8, 2048, 0, SIGMOID, 1, 1, 1, 1, 2.827f, 0, 0, EPMOE_ACTIVATION_SILU},
        {"gpt-oss-20b", 2880, 2880, 32, 4, 0, 0, TOPK, -1, 0, 1, 1, 1, 1, 0, EPMOE_ACTIVATION_SWIGLU_OAI},
        {"gpt-oss-120b", 2880, 2880, 128, 4, 0, 0, TOPK, -1, 0, 1, 1, 1, 1, 0, EPMOE_ACTIVATION_SWIGLU_OAI},
        {"glm-4.5", 5120, 1536, 160, 8, 1536, 0, SIGMOID, 1, 1, 1, 1, 2.5f, 0, 0, EPMOE_ACTIVATION_SILU},
        {"olmoe-1b-7b", 2048, 1024, 64, 8, 0, 0, SOFTMAX, 0, 0, 1, 1, 1, 0, 0, EPMOE_ACTIVATION_SILU},
        {"qwen2-57b-a14b", 3584, 2560, 64, 8, 20480, 1, SOFTMAX, 0, 0, 1, 1, 1, 0, 0, EPMOE_ACTIVATION_SILU},
        {"llama4-scout", 5120, 8192, 16, 1, 8192, 0, SIGMOID, 0, 0, 1, 1, 1, 0, 1, EPMOE_ACTIVATION_SILU},
    };
    enum { kCount = sizeof table / sizeof table[0] };
    for (int32_t i = 0; i < kCount; i++) {
        epmoe_layer_config_t preset = EPMOE_LAYER_CONFIG_INIT, c;
        const char *name = table[i].name;
        cr_assert_str_eq(epmoe_preset_name(i), name);
        cr_assert_eq(epmoe_preset_config(name, &preset), EPMOE_OK, "%s", epmoe_last_error());
        cr_expect(preset.dtype == EPMOE_DTYPE_NONE && preset.max_tokens == 0, "%s", name);
        cr_assert_eq(epmoei_layer_config_check(&preset, &c), EPMOE_OK, "%s: %s", name, epmoe_last_error());
        cr_expect(c.hidden == table[i].d && c.intermediate == table[i].f && c.num_experts == table[i].e, "%s", name);
        cr_expect(c.top_k == table[i].k && c.shared_intermediate == table[i].shared, "%s", name);
        cr_expect(c.shared_gated == table[i].gated && (int32_t)c.scoring == table[i].scoring, "%s", name);
        /* What topk_softmax does not read may be anything. */
        cr_expect(table[i].renormalize < 0 || c.renormalize == table[i].renormalize, "%s", name);
        cr_expect_eq(c.has_selection_bias, table[i].selection_bias, "%s", name);
        cr_expect(c.n_group == table[i].n_group && c.topk_group == table[i].topk_group, "%s", name);
        cr_expect(c.n_group == 1 || c.group_score == EPMOE_GROUP_SCORE_TOP2, "%s", name);
        cr_expect_eq(c.routed_scale, table[i].scale, "%s", name);
        cr_expect(c.router_has_bias == table[i].biases && c.expert_has_bias == table[i].biases, "%s", name);
        cr_expect_eq(c.weight_on_input, table[i].on_input, "%s", name);
        cr_expect_eq((int32_t)c.activation, table[i].activation, "%s", name);
        bool oai = c.activation == EPMOE_ACTIVATION_SWIGLU_OAI;
        cr_expect(c.alpha == (oai ? 1.702f : 0) && c.limit == (oai ? 7 : 0), "%s", name);
    }
    cr_expect_null(epmoe_preset_name(kCount));
    cr_expect_null(epmoe_preset_name(-1));
    epmoe_layer_config_t c = EPMOE_LAYER_CONFIG_INIT;
    cr_expect_eq(epmoe_preset_config("mixtral", &c), EPMOE_ERROR_INVALID_ARGUMENT);
    for (int32_t i = 0; i < kCount; i++)
        cr_expect(strstr(epmoe_last_error(), table[i].name), "'%s' lacks %s", epmoe_last_error(), table[i].name);
    cr_expect_eq(c.hidden, 0);
    cr_expect_eq(epmoe_preset_config(NULL, &c), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_expect_eq(epmoe_preset_config("olmoe-1b-7b", NULL), EPMOE_ERROR_INVALID_ARGUMENT);
}

/* Every allocation fails once: the status says so, nothing leaks, and the next try works. */
Test(layer_config, out_of_memory_in_create)
{
    epmoe_layer_config_t c = good_config();
    int64_t live = epmoei_alloc_live();
    int32_t failures = 0;
    for (int32_t n = 1;; n++) {
        epmoe_layer_t *layer = (epmoe_layer_t *)&c;
        epmoei_alloc_fail_at(n);
        epmoe_status_t status = epmoe_layer_create(&c, NULL, &layer);
        epmoei_alloc_fail_at(0);
        if (status == EPMOE_OK) {
            epmoe_layer_destroy(layer);
            cr_assert_eq(epmoei_alloc_live(), live, "destroy leaves %lld", (long long)(epmoei_alloc_live() - live));
            break;
        }
        failures++;
        cr_assert_eq(status, EPMOE_ERROR_OUT_OF_MEMORY, "allocation %d: %s", n, epmoe_last_error());
        cr_assert_null(layer);
        cr_assert(strstr(epmoe_last_error(), "no memory for"), "%s", epmoe_last_error());
        cr_assert_eq(epmoei_alloc_live(), live, "allocation %d leaks", n);
    }
    /* The layer, its workspace, the dispatch buffers at least. */
    cr_assert_geq(failures, 3);
}

Test(layer_config, out_of_memory_for_weights)
{
    epmoe_layer_config_t c = good_config();
    testing_rng_t rng = testing_rng(testing_seed());
    c.dtype = EPMOE_F32;
    oracle_formats_t formats = {EPMOE_F32, EPMOE_F32, EPMOE_F32, EPMOE_F32, EPMOE_F32, EPMOE_LAYOUT_GATE_FIRST};
    oracle_model_t model = oracle_model(&rng, &c, &formats);
    epmoe_layer_t *layer;
    float x[16] = {1, 2, 3}, y[16], first[16];
    cr_assert_eq(epmoe_layer_create(&c, NULL, &layer), EPMOE_OK);
    cr_assert_eq(epmoe_layer_set_weights(layer, &model.weights), EPMOE_OK);
    cr_assert_eq(epmoe_layer_forward(layer, x, first, 1, NULL), EPMOE_OK);
    int64_t live = epmoei_alloc_live();
    for (int32_t random = 0; random < 2; random++) {
        int32_t failures = 0;
        for (int32_t n = 1;; n++) {
            epmoei_alloc_fail_at(n);
            epmoe_status_t status =
                random ? epmoe_layer_set_random_weights(layer, 1) : epmoe_layer_set_weights(layer, &model.weights);
            epmoei_alloc_fail_at(0);
            if (status == EPMOE_OK) break;
            failures++;
            cr_assert_eq(status, EPMOE_ERROR_OUT_OF_MEMORY, "%s", epmoe_last_error());
            cr_assert_leq(epmoei_alloc_live(), live);
            /* The old weights have gone: never half of the new ones. */
            cr_assert_eq(epmoe_layer_forward(layer, x, y, 1, NULL), EPMOE_ERROR_BAD_STATE);
        }
        cr_assert_geq(failures, 1);
        cr_assert_eq(epmoei_alloc_live(), live);
        cr_assert_eq(epmoe_layer_set_weights(layer, &model.weights), EPMOE_OK);
        cr_assert_eq(epmoe_layer_forward(layer, x, y, 1, NULL), EPMOE_OK);
        cr_assert_arr_eq(y, first, sizeof y);
    }
    epmoe_layer_destroy(layer);
    oracle_model_free(&model);
}
