#include "moe/model_config.h"
#include "moe/json_file.h"

#include <float.h>
#include <stdio.h>
#include <string.h>

/* The object that holds the keys, and the file's name for messages. */
typedef struct section_t {
    const json_t *object;
    const char *path;
} section_t;

/* A key set to null is a key that is not there. */
static const json_t *get(section_t section, const char *key)
{
    const json_t *value = key ? json_object_get(section.object, key) : NULL;
    return json_is_null(value) ? NULL : value;
}

/* The value of the first of `keys` that is there: *found is that key, NULL when none is. Others must not differ. */
static epmoe_status_t get_int(section_t section, const char *const *keys, int64_t least, int64_t *out,
                              const char **found)
{
    *found = NULL;
    for (; *keys; keys++) {
        const json_t *value = get(section, *keys);
        if (!value) continue;
        if (!json_is_integer(value))
            return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: %s is not an integer", section.path, *keys);
        int64_t number = (int64_t)json_integer_value(value);
        if (number < least || number > INT32_MAX)
            return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: %s is %lld: expected %lld..%d", section.path, *keys,
                               (long long)number, (long long)least, INT32_MAX);
        if (*found && number != *out)
            return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: %s is %lld, but %s is %lld", section.path, *found,
                               (long long)*out, *keys, (long long)number);
        if (!*found) *found = *keys;
        *out = number;
    }
    return EPMOE_OK;
}

static epmoe_status_t missing(section_t section, const char *const *keys)
{
    char text[256];
    size_t used = 0;
    for (int i = 0; keys[i] && used < sizeof text; i++)
        used += (size_t)snprintf(text + used, sizeof text - used, "%s%s", i ? " or " : "", keys[i]);
    return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: %s is missing", section.path, text);
}

static epmoe_status_t get_size(section_t section, const char *const *keys, int64_t least, bool required,
                               epmoei_config_size_t *size)
{
    const char *found;
    *size = (epmoei_config_size_t){.value = -1};
    EPMOEI_CHECK(get_int(section, keys, least, &size->value, &found));
    if (!found) return required ? missing(section, keys) : EPMOE_OK;
    snprintf(size->text, sizeof size->text, "%s is %lld", found, (long long)size->value);
    return EPMOE_OK;
}

static epmoe_status_t get_int32(section_t section, const char *key, int64_t least, int32_t *out)
{
    const char *keys[] = {key, NULL}, *found;
    int64_t value = 0;
    EPMOEI_CHECK(get_int(section, keys, least, &value, &found));
    if (found) *out = (int32_t)value;
    return EPMOE_OK;
}

/* A positive number that a float can hold. */
static epmoe_status_t get_float(section_t section, const char *key, float *out)
{
    const json_t *value = get(section, key);
    if (!value) return EPMOE_OK;
    double number = json_is_number(value) ? json_number_value(value) : 0;
    if (!(number >= FLT_MIN && number <= FLT_MAX))
        return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: %s is not a positive number", section.path, key);
    *out = (float)number;
    return EPMOE_OK;
}

static epmoe_status_t get_bool(section_t section, const char *key, int32_t *out)
{
    const json_t *value = get(section, key);
    if (!value) return EPMOE_OK;
    if (!json_is_boolean(value)) return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: %s is not a boolean", section.path, key);
    *out = json_is_true(value);
    return EPMOE_OK;
}

typedef struct word_t {
    const char *word;
    int32_t value;
} word_t;

/* A string that must be one of a list: NOT_SUPPORTED otherwise. */
static epmoe_status_t get_word(section_t section, const char *key, const word_t *words, int32_t *out)
{
    const json_t *value = get(section, key);
    if (!value) return EPMOE_OK;
    const char *text = json_string_value(value);
    if (!text) return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: %s is not a string", section.path, key);
    char known[256];
    size_t used = 0;
    for (; words->word; words++) {
        if (!strcmp(words->word, text)) {
            *out = words->value;
            return EPMOE_OK;
        }
        if (used < sizeof known)
            used += (size_t)snprintf(known + used, sizeof known - used, "%s%s", used ? ", " : "", words->word);
    }
    return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "%s: %s is \"%.64s\": expected one of %s", section.path, key, text,
                       known);
}

static const word_t scoring_words[] = {
    {"softmax", EPMOE_SCORING_SOFTMAX},
    {"sigmoid", EPMOE_SCORING_SIGMOID},
    {"sqrtsoftplus", EPMOE_SCORING_SQRT_SOFTPLUS},
    {"noaux_tc", EPMOE_SCORING_SIGMOID}, /* what dots1 files say */
    {NULL, 0},
};
static const word_t method_words[] = {
    {"greedy", EPMOEI_TOPK_GREEDY},
    {"group_limited_greedy", EPMOEI_TOPK_GROUP_LIMITED},
    {"noaux_tc", EPMOEI_TOPK_NOAUX_TC},
    {NULL, 0},
};
static const word_t activation_words[] = {
    {"silu", EPMOE_ACTIVATION_SILU},
    {"swish", EPMOE_ACTIVATION_SILU},
    {"gelu", EPMOE_ACTIVATION_GELU},
    {"gelu_new", EPMOE_ACTIVATION_GELU_TANH},
    {"gelu_pytorch_tanh", EPMOE_ACTIVATION_GELU_TANH},
    {NULL, 0},
};

static epmoe_status_t read_router(section_t section, epmoei_model_config_t *config)
{
    const epmoei_family_rule_t *rule = &config->family->rule;
    epmoe_layer_config_t *layer = &config->layer;
    int32_t scoring = (int32_t)rule->scoring, method = (int32_t)rule->topk_method;
    EPMOEI_CHECK(get_word(section, "scoring_func", scoring_words, &scoring));
    EPMOEI_CHECK(get_word(section, "topk_method", method_words, &method));
    layer->scoring = (epmoe_scoring_t)scoring;
    layer->renormalize = rule->renormalize;
    EPMOEI_CHECK(get_bool(section, "norm_topk_prob", &layer->renormalize));
    layer->routed_scale = rule->routed_scale;
    EPMOEI_CHECK(get_float(section, "routed_scaling_factor", &layer->routed_scale));
    layer->n_group = rule->n_group;
    EPMOEI_CHECK(get_int32(section, "n_group", 1, &layer->n_group));
    layer->topk_group = (int32_t)epmoei_min64(rule->topk_group, layer->n_group);
    EPMOEI_CHECK(get_int32(section, "topk_group", 1, &layer->topk_group));
    layer->weight_on_input = rule->weight_on_input;
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
static epmoe_status_t check_router(section_t section, const epmoei_model_config_t *config)
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

static epmoe_status_t read_activation(section_t section, epmoei_model_config_t *config)
{
    const epmoei_family_rule_t *rule = &config->family->rule;
    int32_t activation = (int32_t)rule->activation;
    if (rule->activation != EPMOE_ACTIVATION_SWIGLU_OAI)
        EPMOEI_CHECK(get_word(section, "hidden_act", activation_words, &activation));
    config->layer.activation = (epmoe_activation_t)activation;
    config->layer.alpha = rule->alpha;
    config->layer.limit = rule->limit;
    return get_float(section, "swiglu_limit", &config->layer.limit);
}

static epmoe_status_t read_sizes(section_t section, epmoei_model_config_t *config)
{
    const epmoei_family_t *family = config->family;
    static const char *const layers[] = {"num_hidden_layers", NULL}, *const hidden[] = {"hidden_size", NULL},
                             *const experts[] = {"num_experts", "num_local_experts", "n_routed_experts",
                                                 "moe_num_experts", NULL},
                             *const own[] = {"moe_intermediate_size", NULL}, *const any[] = {"intermediate_size", NULL},
                             *const top_k[] = {"num_experts_per_tok", "experts_per_token", NULL};
    static const char *const either[] = {"moe_intermediate_size", "intermediate_size", NULL};
    epmoei_config_size_t size;
    EPMOEI_CHECK(get_size(section, layers, 1, true, &size));
    config->num_layers = (int32_t)size.value;
    EPMOEI_CHECK(get_int32(section, "num_nextn_predict_layers", 0, &config->num_nextn_layers));
    EPMOEI_CHECK(get_size(section, hidden, 1, true, &config->hidden));
    EPMOEI_CHECK(get_size(section, experts, 1, true, &config->num_experts));
    EPMOEI_CHECK(get_size(section, own, 1, false, &config->intermediate));
    if (config->intermediate.value < 0) {
        EPMOEI_CHECK(get_size(section, any, 1, false, &config->intermediate));
        if (config->intermediate.value < 0) return missing(section, either);
    }
    EPMOEI_CHECK(get_size(section, top_k, 1, true, &size));
    config->layer.hidden = (int32_t)config->hidden.value;
    config->layer.num_experts = (int32_t)config->num_experts.value;
    config->layer.intermediate = (int32_t)config->intermediate.value;
    config->layer.top_k = (int32_t)size.value;
    config->layer.expert_has_bias = family->expert_has_bias;

    const char *dense[] = {family->dense_intermediate, NULL}, *shared[] = {family->shared_intermediate, NULL},
               *num_shared[] = {family->num_shared, NULL};
    EPMOEI_CHECK(get_size(section, dense, 1, false, &config->dense_intermediate));
    EPMOEI_CHECK(get_size(section, shared, 0, false, &config->shared_intermediate));
    EPMOEI_CHECK(get_size(section, num_shared, 0, false, &size));
    if (size.value >= 0) {
        epmoei_config_size_t *out = &config->shared_intermediate;
        out->value = size.value * config->intermediate.value;
        snprintf(out->text, sizeof out->text, "%.60s and %.60s", size.text, config->intermediate.text);
    }
    return EPMOE_OK;
}

static epmoe_status_t find_family(section_t section, epmoei_model_config_t *config)
{
    const json_t *value = get(section, "model_type");
    const char *model_type = json_string_value(value);
    if (!model_type)
        return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: model_type is %s", section.path,
                           value ? "not a string" : "missing");
    config->family = epmoei_family_find(model_type);
    if (!config->family) {
        char known[256];
        epmoei_family_list(known, sizeof known);
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED,
                           "%s: model_type is \"%.64s\", a family without a row in the table of moe/families.c; known "
                           "are %s",
                           section.path, model_type, known);
    }
    snprintf(config->model_type, sizeof config->model_type, "%s", model_type);
    return EPMOE_OK;
}

static epmoe_status_t read_all(section_t section, epmoei_model_config_t *config)
{
    EPMOEI_CHECK(find_family(section, config));
    EPMOEI_CHECK(epmoei_quant_config_read(get(section, "quantization_config"), section.path, &config->quant));
    const char *name = config->family->config_section;
    if (name) {
        section.object = get(section, name);
        if (!json_is_object(section.object))
            return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: %s is not an object", section.path, name);
    }
    EPMOEI_CHECK(read_sizes(section, config));
    EPMOEI_CHECK(read_router(section, config));
    EPMOEI_CHECK(check_router(section, config));
    return read_activation(section, config);
}

epmoe_status_t epmoei_model_config_read(const char *path, epmoei_model_config_t *config)
{
    json_t *root = NULL;
    EPMOEI_CHECK(epmoei_json_read(path, &root));
    *config = (epmoei_model_config_t){.layer = EPMOE_LAYER_CONFIG_INIT};
    epmoe_status_t status = read_all((section_t){root, path}, config);
    json_decref(root);
    if (status != EPMOE_OK) epmoei_model_config_free(config);
    return status;
}

void epmoei_model_config_free(epmoei_model_config_t *config) { epmoei_quant_config_free(&config->quant); }
