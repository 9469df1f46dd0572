/* config.json: both generations of its keys, the rule of each family and what overrides it, and what is refused. */
#include "moe/model_config.h"
#include "tests/safetensors_build.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <unistd.h>

static char dir[256];
static char path[300];

static void set_up(void)
{
    build_make_dir(dir);
    snprintf(path, sizeof path, "%s/config.json", dir);
}

static void tear_down(void)
{
    build_remove_dir(dir);
    cr_assert_eq(epmoei_alloc_live(), 0);
}

TestSuite(model_config, .init = set_up, .fini = tear_down);

#define SHAPE                                                                                                          \
    "\"hidden_size\":64,\"num_hidden_layers\":3,\"num_experts\":16,\"moe_intermediate_size\":32,"                      \
    "\"num_experts_per_tok\":4"

static epmoe_status_t read_text(const char *text, epmoei_model_config_t *config)
{
    build_save_text(dir, "config.json", text);
    return epmoei_model_config_read(path, config);
}

static epmoei_model_config_t expect_read(const char *model_type, const char *more)
{
    char text[2048];
    epmoei_model_config_t config;
    snprintf(text, sizeof text, "{\"model_type\":\"%s\",%s%s}", model_type, SHAPE, more);
    cr_assert_eq(read_text(text, &config), EPMOE_OK, "%s", epmoe_last_error());
    return config;
}

static void expect_fail(epmoe_status_t status, const char *text, const char *what, const char *also)
{
    epmoei_model_config_t config;
    epmoe_status_t got = read_text(text, &config);
    cr_assert_eq(got, status, "%s: got %s (%s)", text, epmoe_status_string(got), epmoe_last_error());
    cr_assert(strstr(epmoe_last_error(), path), "%s", epmoe_last_error());
    cr_assert(strstr(epmoe_last_error(), what), "\"%s\" is not in \"%s\"", what, epmoe_last_error());
    cr_assert(strstr(epmoe_last_error(), also), "\"%s\" is not in \"%s\"", also, epmoe_last_error());
}

typedef struct rule_t {
    const char *model_type;
    const char *more; /* behind SHAPE */
    epmoe_scoring_t scoring;
    int32_t renormalize;
    float scale;
    int32_t n_group, topk_group;
    epmoe_group_score_t group_score;
    int32_t selection_bias;
} rule_t;

#define SOFTMAX EPMOE_SCORING_SOFTMAX
#define SIGMOID EPMOE_SCORING_SIGMOID
#define MAXIMUM EPMOE_GROUP_SCORE_MAX

Test(model_config, router_rules)
{
    static const rule_t rules[] = {
        {"mixtral", "", SOFTMAX, 1, 1, 1, 1, 0, 0},
        {"qwen2_moe", "", SOFTMAX, 0, 1, 1, 1, 0, 0},
        {"qwen3_moe", ",\"norm_topk_prob\":true", SOFTMAX, 1, 1, 1, 1, 0, 0},
        {"olmoe", ",\"norm_topk_prob\":false", SOFTMAX, 0, 1, 1, 1, 0, 0},
        {"deepseek_v2", ",\"n_group\":8,\"topk_group\":3,\"routed_scaling_factor\":16", SOFTMAX, 0, 16, 8, 3, MAXIMUM,
         0},
        {"deepseek_v2", ",\"n_group\":8,\"topk_group\":3,\"topk_method\":\"group_limited_greedy\"", SOFTMAX, 0, 1, 8, 3,
         MAXIMUM, 0},
        {"deepseek_v2", ",\"n_group\":8,\"topk_group\":3,\"topk_method\":\"greedy\"", SOFTMAX, 0, 1, 1, 1, 0, 0},
        {"deepseek_v2", ",\"n_group\":null,\"topk_group\":null,\"topk_method\":\"greedy\"", SOFTMAX, 0, 1, 1, 1, 0, 0},
        {"deepseek_v3", "", SIGMOID, 1, 2.5f, 8, 4, 0, 1},
        {"deepseek_v3", ",\"n_group\":2,\"topk_group\":1,\"norm_topk_prob\":false,\"routed_scaling_factor\":1.25",
         SIGMOID, 0, 1.25f, 2, 1, 0, 1},
        {"deepseek_v3", ",\"topk_method\":\"noaux_tc\",\"scoring_func\":\"softmax\",\"n_group\":1", SOFTMAX, 1, 2.5f, 1,
         1, 0, 1},
        {"kimi_k2", ",\"n_group\":1,\"topk_group\":1,\"routed_scaling_factor\":2.827,\"scoring_func\":\"sigmoid\"",
         SIGMOID, 1, 2.827f, 1, 1, 0, 1},
        {"glm4_moe", ",\"norm_topk_prob\":true", SIGMOID, 1, 1, 1, 1, 0, 1},
        {"dots1", ",\"norm_topk_prob\":true,\"scoring_func\":\"noaux_tc\"", SIGMOID, 1, 1, 1, 1, 0, 1},
        {"minimax_m2", ",\"scoring_func\":\"sigmoid\"", SIGMOID, 1, 1, 1, 1, 0, 1},
        {"gpt_oss", "", EPMOE_SCORING_TOPK_SOFTMAX, 0, 1, 1, 1, 0, 0},
        {"llama4_text", "", SIGMOID, 0, 1, 1, 1, 0, 0},
        {"qwen3_moe", ",\"scoring_func\":\"sqrtsoftplus\"", EPMOE_SCORING_SQRT_SOFTPLUS, 0, 1, 1, 1, 0, 0},
    };
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++) {
        const rule_t *rule = &rules[i];
        const epmoei_model_config_t config = expect_read(rule->model_type, rule->more);
        const epmoe_layer_config_t *layer = &config.layer;
        cr_assert_str_eq(config.model_type, rule->model_type);
        cr_assert_eq(layer->scoring, rule->scoring, "%s%s", rule->model_type, rule->more);
        cr_assert_eq(layer->renormalize, rule->renormalize, "%s%s", rule->model_type, rule->more);
        cr_assert_eq(layer->routed_scale, rule->scale, "%s%s", rule->model_type, rule->more);
        cr_assert_eq(layer->n_group, rule->n_group, "%s%s", rule->model_type, rule->more);
        cr_assert_eq(layer->topk_group, rule->topk_group, "%s%s", rule->model_type, rule->more);
        cr_assert_eq(layer->group_score, rule->group_score, "%s%s", rule->model_type, rule->more);
        cr_assert_eq(layer->has_selection_bias, rule->selection_bias, "%s%s", rule->model_type, rule->more);
        cr_assert_eq(layer->weight_on_input, !strcmp(rule->model_type, "llama4_text"));
        cr_assert_eq(layer->router_has_bias, !strcmp(rule->model_type, "gpt_oss"));
        cr_assert_eq(layer->expert_has_bias, !strcmp(rule->model_type, "gpt_oss"));
        cr_assert(layer->hidden == 64 && layer->num_experts == 16 && layer->intermediate == 32 && layer->top_k == 4);
    }
}

Test(model_config, both_generations_of_keys)
{
    static const char *const texts[] = {
        "{\"model_type\":\"deepseek_v3\",\"hidden_size\":64,\"num_hidden_layers\":3,\"n_routed_experts\":16,"
        "\"num_experts_per_tok\":4,\"moe_intermediate_size\":32,\"intermediate_size\":96,\"n_shared_experts\":2,"
        "\"num_nextn_predict_layers\":1,\"dtype\":\"bfloat16\",\"rope_parameters\":{\"rope_theta\":10000.0}}",
        "{\"model_type\":\"deepseek_v3\",\"hidden_size\":64,\"num_hidden_layers\":3,\"num_experts\":16,"
        "\"num_experts_per_tok\":4,\"moe_intermediate_size\":32,\"intermediate_size\":96,\"n_shared_experts\":2,"
        "\"num_nextn_predict_layers\":1,\"torch_dtype\":\"bfloat16\",\"rope_theta\":1e4,\"rope_scaling\":null}",
        "{\"model_type\":\"deepseek_v3\",\"hidden_size\":64,\"num_hidden_layers\":3,\"num_local_experts\":16,"
        "\"num_experts\":16,\"experts_per_token\":4,\"num_experts_per_tok\":4,\"moe_intermediate_size\":32,"
        "\"intermediate_size\":96,\"n_shared_experts\":2,\"num_nextn_predict_layers\":1}",
        "{\"model_type\":\"deepseek_v3\",\"hidden_size\":64,\"num_hidden_layers\":3,\"moe_num_experts\":16,"
        "\"num_experts_per_tok\":4,\"moe_intermediate_size\":32,\"intermediate_size\":96,\"n_shared_experts\":2,"
        "\"num_nextn_predict_layers\":1}",
    };
    for (int i = 0; i < 4; i++) {
        epmoei_model_config_t config;
        cr_assert_eq(read_text(texts[i], &config), EPMOE_OK, "%s", epmoe_last_error());
        cr_assert(config.num_layers == 3 && config.num_nextn_layers == 1 && config.hidden.value == 64);
        cr_assert(config.num_experts.value == 16 && config.layer.top_k == 4 && config.intermediate.value == 32);
        cr_assert(config.dense_intermediate.value == 96 && config.shared_intermediate.value == 64);
        cr_assert_str_eq(config.quant.method, "");
    }
    epmoei_model_config_t config;
    cr_assert_eq(read_text("{\"model_type\":\"mixtral\",\"hidden_size\":64,\"num_hidden_layers\":3,"
                           "\"num_local_experts\":8,\"num_experts_per_tok\":2,\"intermediate_size\":96,"
                           "\"quantization_config\":{\"quant_method\":\"awq\"}}",
                           &config),
                 EPMOE_OK);
    cr_assert(config.intermediate.value == 96 && config.dense_intermediate.value < 0);
    cr_assert_str_eq(config.quant.method, "awq");
    cr_assert_str_eq(config.intermediate.text, "intermediate_size is 96");
    cr_assert_str_eq(config.num_experts.text, "num_local_experts is 8");
    cr_assert(config.quant.group == 128 && config.quant.zero_convention == 1 && !config.quant.refusal[0]);
}

Test(model_config, activations)
{
    cr_assert_eq(expect_read("qwen3_moe", "").layer.activation, EPMOE_ACTIVATION_SILU);
    cr_assert_eq(expect_read("qwen3_moe", ",\"hidden_act\":\"swish\"").layer.activation, EPMOE_ACTIVATION_SILU);
    cr_assert_eq(expect_read("qwen3_moe", ",\"hidden_act\":\"gelu\"").layer.activation, EPMOE_ACTIVATION_GELU);
    cr_assert_eq(expect_read("qwen3_moe", ",\"hidden_act\":\"gelu_new\"").layer.activation, EPMOE_ACTIVATION_GELU_TANH);
    cr_assert_eq(expect_read("qwen3_moe", ",\"hidden_act\":\"gelu_pytorch_tanh\"").layer.activation,
                 EPMOE_ACTIVATION_GELU_TANH);
    epmoei_model_config_t config = expect_read("gpt_oss", ",\"hidden_act\":\"silu\"");
    cr_assert(config.layer.activation == EPMOE_ACTIVATION_SWIGLU_OAI && config.layer.alpha == 1.702f &&
              config.layer.limit == 7);
    config = expect_read("gpt_oss", ",\"swiglu_limit\":5.5");
    cr_assert(config.layer.activation == EPMOE_ACTIVATION_SWIGLU_OAI && config.layer.limit == 5.5f);
}

#define QWEN "{\"model_type\":\"qwen3_moe\"," SHAPE

Test(model_config, refused)
{
    expect_fail(EPMOE_ERROR_NOT_SUPPORTED, "{\"model_type\":\"gpt9\"}", "\"gpt9\"", "moe/families.c");
    expect_fail(EPMOE_ERROR_NOT_SUPPORTED, "{\"model_type\":\"mamba\"}", "\"mamba\"",
                "mixtral, minimax_m2, qwen2_moe, qwen3_moe, olmoe, deepseek_v2, deepseek_v3, kimi_k2, glm4_moe, dots1, "
                "gpt_oss, llama4_text, llama4, phimoe, granitemoe, ernie4_5_moe, qwen3_next");
    expect_fail(EPMOE_ERROR_NOT_SUPPORTED, QWEN ",\"scoring_func\":\"tanh\"}", "scoring_func is \"tanh\"", "sigmoid");
    expect_fail(EPMOE_ERROR_NOT_SUPPORTED, QWEN ",\"topk_method\":\"best\"}", "topk_method is \"best\"", "greedy");
    expect_fail(EPMOE_ERROR_NOT_SUPPORTED, QWEN ",\"topk_method\":\"noaux_tc\"}", "noaux_tc", "qwen3_moe");
    expect_fail(EPMOE_ERROR_NOT_SUPPORTED, QWEN ",\"hidden_act\":\"relu\"}", "hidden_act is \"relu\"", "silu");
    expect_fail(EPMOE_ERROR_FORMAT, "{}", "model_type is missing", "");
    expect_fail(EPMOE_ERROR_FORMAT, "{\"model_type\":7}", "model_type is not a string", "");
    expect_fail(EPMOE_ERROR_FORMAT, "{\"model_type\":\"llama4\"}", "text_config is not an object", "");
    expect_fail(EPMOE_ERROR_FORMAT, QWEN ",\"num_local_experts\":8}", "num_experts is 16", "num_local_experts is 8");
    expect_fail(EPMOE_ERROR_FORMAT, QWEN ",\"norm_topk_prob\":1}", "norm_topk_prob is not a boolean", "");
    expect_fail(EPMOE_ERROR_FORMAT, QWEN ",\"routed_scaling_factor\":0}", "routed_scaling_factor", "positive");
    expect_fail(EPMOE_ERROR_FORMAT, QWEN ",\"routed_scaling_factor\":1e99}", "routed_scaling_factor", "positive");
    expect_fail(EPMOE_ERROR_FORMAT, QWEN ",\"routed_scaling_factor\":\"2\"}", "routed_scaling_factor", "positive");
    expect_fail(EPMOE_ERROR_FORMAT, QWEN ",\"hidden_act\":2}", "hidden_act is not a string", "");
    expect_fail(EPMOE_ERROR_FORMAT, QWEN ",\"num_nextn_predict_layers\":-1}", "num_nextn_predict_layers is -1", "");
    expect_fail(EPMOE_ERROR_FORMAT, QWEN ",\"n_group\":0}", "n_group is 0", "");
    expect_fail(EPMOE_ERROR_FORMAT, "{\"model_type\":\"deepseek_v3\"," SHAPE ",\"n_group\":3}", "n_group is 3",
                "num_experts is 16");
    expect_fail(EPMOE_ERROR_FORMAT, "{\"model_type\":\"deepseek_v3\"," SHAPE ",\"n_group\":4,\"topk_group\":5}",
                "topk_group is 5", "4");
    expect_fail(EPMOE_ERROR_FORMAT, "{\"model_type\":\"deepseek_v3\"," SHAPE ",\"n_group\":8,\"topk_group\":1}",
                "num_experts_per_tok is 4", "at most 2");
}

/* Of a file that is no config.json nothing is read but what it takes to see that. */
Test(model_config, other_files)
{
    epmoei_model_config_t config;
    expect_fail(EPMOE_ERROR_FORMAT, "[{\"model_type\":\"mixtral\"}]", "the JSON is not an object", "");
    cr_assert_eq(read_text("{", &config), EPMOE_ERROR_FORMAT);
    cr_assert_eq(truncate(path, 100000001), 0);
    cr_assert_eq(epmoei_model_config_read(path, &config), EPMOE_ERROR_FORMAT);
    cr_assert(strstr(epmoe_last_error(), path), "%s", epmoe_last_error());
    cr_assert(strstr(epmoe_last_error(), "has 100000001 bytes: expected at most 100000000"), "%s", epmoe_last_error());
}

Test(model_config, sizes_out_of_range)
{
    static const char *const keys[] = {"hidden_size", "num_hidden_layers", "num_experts", "moe_intermediate_size",
                                       "num_experts_per_tok"};
    static const char *const values[] = {"0", "-1", "2147483648", "1.5", "\"4\"", "[]"};
    for (int k = 0; k < 5; k++) {
        char text[1024];
        for (int v = -1; v < 6; v++) {
            /* Every key but one has its right value; that one is missing (-1) or wrong. */
            size_t used = (size_t)snprintf(text, sizeof text, "{\"model_type\":\"qwen3_moe\"");
            for (int i = 0; i < 5; i++)
                if (i != k || v >= 0)
                    used += (size_t)snprintf(text + used, sizeof text - used, ",\"%s\":%s", keys[i],
                                             i == k ? values[v] : "4");
            snprintf(text + used, sizeof text - used, "}");
            expect_fail(EPMOE_ERROR_FORMAT, text, keys[k], v < 0 ? "is missing" : "");
        }
    }
    expect_fail(EPMOE_ERROR_NOT_SUPPORTED,
                "{\"model_type\":\"qwen3_moe\",\"hidden_size\":4,\"num_hidden_layers\":1,\"num_experts\":4097,"
                "\"moe_intermediate_size\":4,\"num_experts_per_tok\":1}",
                "num_experts is 4097", "4096");
    expect_fail(EPMOE_ERROR_NOT_SUPPORTED,
                "{\"model_type\":\"qwen3_moe\",\"hidden_size\":4,\"num_hidden_layers\":1,\"num_experts\":64,"
                "\"moe_intermediate_size\":4,\"num_experts_per_tok\":33}",
                "num_experts_per_tok is 33", "32");
}
