#include "moe/model_config.h"

#include <stdio.h>
#include <string.h>

static const epmoei_config_word_t scoring_words[] = {
    {"softmax", EPMOE_SCORING_SOFTMAX},
    {"sigmoid", EPMOE_SCORING_SIGMOID},
    {"sqrtsoftplus", EPMOE_SCORING_SQRT_SOFTPLUS},
    {"noaux_tc", EPMOE_SCORING_SIGMOID}, /* what dots1 files say */
    {NULL, 0},
};
static const epmoei_config_word_t method_words[] = {
    {"greedy", EPMOEI_TOPK_GREEDY},
    {"group_limited_greedy", EPMOEI_TOPK_GROUP_LIMITED},
    {"noaux_tc", EPMOEI_TOPK_NOAUX_TC},
    {NULL, 0},
};
static const epmoei_config_word_t activation_words[] = {
    {"silu", EPMOE_ACTIVATION_SILU},
    {"swish", EPMOE_ACTIVATION_SILU},
    {"gelu", EPMOE_ACTIVATION_GELU},
    {"gelu_new", EPMOE_ACTIVATION_GELU_TANH},
    {"gelu_pytorch_tanh", EPMOE_ACTIVATION_GELU_TANH},
    {NULL, 0},
};

static epmoe_status_t read_router(epmoei_config_section_t section, epmoei_model_config_t *config)
{
    const epmoei_family_rule_t *rule = &config->family->rule;
    epmoe_layer_config_t *layer = &config->layer;
    int32_t scoring = (int32_t)rule->scoring, method = (int32_t)rule->topk_method;
    EPMOEI_CHECK(epmoei_config_get_word(section, "scoring_func", scoring_words, &scoring));
    EPMOEI_CHECK(epmoei_config_get_word(section, "topk_method", method_words, &method));
    layer->scoring = (epmoe_scoring_t)scoring;
    layer->renormalize = rule->renormalize;
    EPMOEI_CHECK(epmoei_config_get_bool(section, "norm_topk_prob", &layer->renormalize));
    layer->routed_scale = rule->routed_scale;
    EPMOEI_CHECK(epmoei_config_get_float(section, "routed_scaling_factor", &layer->routed_scale));
    layer->n_group = (int32_t)epmoei_max64(rule->n_group, 1); /* a row that says nothing has one group */
    EPMOEI_CHECK(epmoei_config_get_int32(section, "n_group", 1, &layer->n_group));
    layer->topk_group = (int32_t)epmoei_min64(epmoei_max64(rule->topk_group, 1), layer->n_group);
    EPMOEI_CHECK(epmoei_config_get_int32(section, "topk_group", 1, &layer->topk_group));
    layer->weight_on_input = rule->weight_on_input;
    if (layer->scoring == EPMOE_SCORING_SPARSE_MIXER)
        EPMOEI_CHECK(epmoei_config_get_float(section, "router_jitter_noise", &layer->router_jitter));
    if (method == EPMOEI_TOPK_GREEDY) layer->n_group = layer->topk_group = 1;
    layer->group_score = method == EPMOEI_TOPK_GROUP_LIMITED ? EPMOE_GROUP_SCORE_MAX : EPMOE_GROUP_SCORE_TOP2;
    layer->has_selection_bias = method == EPMOEI_TOPK_NOAUX_TC;
    layer->router_has_bias = config->family->names->router_bias != NULL;
    if (layer->has_selection_bias && !config->family->names->selection_bias)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED,
                           "%s: topk_method is \"noaux_tc\", but the row of %s in moe/families.c has no tensor for its "
                           "bias",
                           section.path, config->model_type);
    return EPMOE_OK;
}

/* The router against the number of experts. */
static epmoe_status_t check_router(epmoei_config_section_t section, const epmoei_model_config_t *config)
{
    const epmoe_layer_config_t *layer = &config->layer;
    int32_t experts = layer->num_experts;
    if (experts > EPMOE_MAX_EXPERTS)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "%s: %s: expected at most %d", section.path,
                           config->num_experts.text, EPMOE_MAX_EXPERTS);
    if (experts % layer->n_group)
        return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: n_group is %d: expected a divisor of the number of experts (%s)",
                           section.path, layer->n_group, config->num_experts.text);
    if (layer->topk_group > layer->n_group)
        return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: topk_group is %d: expected 1..n_group, which is %d", section.path,
                           layer->topk_group, layer->n_group);
    int32_t candidates = layer->topk_group * (experts / layer->n_group);
    if (layer->top_k > candidates)
        return epmoei_fail(
            EPMOE_ERROR_FORMAT, "%s: num_experts_per_tok is %d: expected at most %d (%s, n_group %d, topk_group %d)",
            section.path, layer->top_k, candidates, config->num_experts.text, layer->n_group, layer->topk_group);
    if (layer->top_k > EPMOE_MAX_TOP_K)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "%s: num_experts_per_tok is %d: expected at most %d",
                           section.path, layer->top_k, EPMOE_MAX_TOP_K);
    return EPMOE_OK;
}

static epmoe_status_t read_activation(epmoei_config_section_t section, epmoei_model_config_t *config)
{
    const epmoei_family_rule_t *rule = &config->family->rule;
    int32_t activation = (int32_t)rule->activation;
    if (rule->activation != EPMOE_ACTIVATION_SWIGLU_OAI)
        EPMOEI_CHECK(epmoei_config_get_word(section, "hidden_act", activation_words, &activation));
    config->layer.activation = (epmoe_activation_t)activation;
    config->layer.alpha = rule->alpha;
    config->layer.limit = rule->limit;
    return epmoei_config_get_float(section, "swiglu_limit", &config->layer.limit);
}

static epmoe_status_t read_sizes(epmoei_config_section_t section, epmoei_model_config_t *config)
{
    const epmoei_family_t *family = config->family;
    static const char *const layers[] = {"num_hidden_layers", NULL}, *const hidden[] = {"hidden_size", NULL},
                             *const experts[] = {"num_experts", "num_local_experts", "n_routed_experts",
                                                 "moe_num_experts", NULL},
                             *const own[] = {"moe_intermediate_size", NULL}, *const any[] = {"intermediate_size", NULL},
                             *const top_k[] = {"num_experts_per_tok", "experts_per_token", "moe_k", NULL};
    static const char *const either[] = {"moe_intermediate_size", "intermediate_size", NULL};
    epmoei_config_size_t size;
    EPMOEI_CHECK(epmoei_config_get_size(section, layers, 1, true, &size));
    config->num_layers = (int32_t)size.value;
    EPMOEI_CHECK(epmoei_config_get_int32(section, "num_nextn_predict_layers", 0, &config->num_nextn_layers));
    EPMOEI_CHECK(epmoei_config_get_size(section, hidden, 1, true, &config->hidden));
    EPMOEI_CHECK(epmoei_config_get_size(section, experts, 1, true, &config->num_experts));
    EPMOEI_CHECK(epmoei_config_get_size(section, own, 1, false, &config->intermediate));
    if (config->intermediate.value < 0) {
        EPMOEI_CHECK(epmoei_config_get_size(section, any, 1, false, &config->intermediate));
        if (config->intermediate.value < 0) return epmoei_config_missing(section, either);
    }
    EPMOEI_CHECK(epmoei_config_get_size(section, top_k, 1, true, &size));
    config->layer.hidden = (int32_t)config->hidden.value;
    config->layer.num_experts = (int32_t)config->num_experts.value;
    config->layer.intermediate = (int32_t)config->intermediate.value;
    config->layer.top_k = (int32_t)size.value;
    config->layer.expert_has_bias = family->expert_has_bias;

    const char *dense[] = {family->dense_intermediate, NULL}, *shared[] = {family->shared_intermediate, NULL},
               *num_shared[] = {family->num_shared, NULL};
    EPMOEI_CHECK(epmoei_config_get_size(section, dense, 1, false, &config->dense_intermediate));
    EPMOEI_CHECK(epmoei_config_get_size(section, shared, 0, false, &config->shared_intermediate));
    EPMOEI_CHECK(epmoei_config_get_size(section, num_shared, 0, false, &size));
    if (size.value >= 0) {
        epmoei_config_size_t *out = &config->shared_intermediate;
        out->value = size.value * config->intermediate.value;
        snprintf(out->text, sizeof out->text, "%.60s and %.60s", size.text, config->intermediate.text);
    }
    return EPMOE_OK;
}

static epmoe_status_t find_family(epmoei_config_section_t section, epmoei_model_config_t *config)
{
    const json_t *value = epmoei_config_key(section, "model_type");
    const char *model_type = json_string_value(value);
    if (!model_type)
        return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: model_type is %s", section.path,
                           value ? "not a string" : "missing");
    config->family = epmoei_family_find(model_type);
    if (!config->family) {
        char known[512];
        epmoei_family_list(known, sizeof known);
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED,
                           "%s: model_type is \"%.64s\", a family without a row in the table of moe/families.c; known "
                           "are %s",
                           section.path, model_type, known);
    }
    snprintf(config->model_type, sizeof config->model_type, "%s", model_type);
    return EPMOE_OK;
}

static epmoe_status_t read_all(epmoei_config_section_t section, epmoei_model_config_t *config)
{
    EPMOEI_CHECK(find_family(section, config));
    EPMOEI_CHECK(
        epmoei_quant_config_read(epmoei_config_key(section, "quantization_config"), section.path, &config->quant));
    const char *name = config->family->config_section;
    if (name) {
        section.object = epmoei_config_key(section, name);
        if (!json_is_object(section.object))
            return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: %s is not an object", section.path, name);
    }
    EPMOEI_CHECK(read_sizes(section, config));
    EPMOEI_CHECK(read_router(section, config));
    EPMOEI_CHECK(check_router(section, config));
    EPMOEI_CHECK(read_activation(section, config));
    epmoei_attention_config_read(section, config->family, config->num_layers, config->layer.hidden, &config->attention);
    return EPMOE_OK;
}

epmoe_status_t epmoei_model_config_read(const char *path, epmoei_model_config_t *config)
{
    json_t *root = NULL;
    EPMOEI_CHECK(epmoei_json_read(path, &root));
    *config = (epmoei_model_config_t){.layer = EPMOE_LAYER_CONFIG_INIT};
    epmoe_status_t status = read_all((epmoei_config_section_t){root, path}, config);
    json_decref(root);
    if (status != EPMOE_OK) epmoei_model_config_free(config);
    return status;
}

void epmoei_model_config_free(epmoei_model_config_t *config) { epmoei_quant_config_free(&config->quant); }
