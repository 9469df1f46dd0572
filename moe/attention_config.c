#include "moe/attention_config.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static epmoe_status_t require_int32(epmoei_config_section_t section, const char *key, int32_t *out)
{
    const char *keys[] = {key, NULL};
    if (!epmoei_config_key(section, key)) return epmoei_config_missing(section, keys);
    return epmoei_config_get_int32(section, key, 1, out);
}

static epmoe_status_t require_double(epmoei_config_section_t section, const char *key, double *out)
{
    const char *keys[] = {key, NULL};
    if (!epmoei_config_key(section, key)) return epmoei_config_missing(section, keys);
    return epmoei_config_get_double(section, key, out);
}

/* MiniMax's ways that this version does not know. */
static epmoe_status_t check_kinds(epmoei_config_section_t section)
{
    static const epmoei_config_word_t norms[] = {{"per_layer", 0}, {NULL, 0}};
    const json_t *kinds = epmoei_config_key(section, "attn_type_list");
    int32_t word;
    for (size_t i = 0; i < json_array_size(kinds); i++)
        if (json_integer_value(json_array_get(kinds, i)) != 1)
            return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED,
                               "%s: attn_type_list[%zu] is not 1: expected softmax attention", section.path, i);
    return epmoei_config_get_word(section, "qk_norm_type", norms, &word);
}

/* What would change the attention and has no place in epmoe_decoder_config_t. */
static epmoe_status_t check_absent(epmoei_config_section_t section)
{
    static const char *const keys[] = {"clip_qkv", "attn_logit_softcapping", "final_logit_softcapping", NULL};
    for (int i = 0; keys[i]; i++) {
        const json_t *value = epmoei_config_key(section, keys[i]);
        if (value && !json_is_false(value))
            return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "%s: %s is there: expected null", section.path, keys[i]);
    }
    return EPMOE_OK;
}

static epmoe_status_t read_flag(epmoei_config_section_t section, const epmoei_flag_rule_t *rule, int32_t *out)
{
    *out = rule->initial;
    return rule->key ? epmoei_config_get_bool(section, rule->key, out) : EPMOE_OK;
}

static epmoe_status_t read_heads(epmoei_config_section_t section, int32_t hidden, epmoe_decoder_config_t *out)
{
    EPMOEI_CHECK(require_int32(section, "num_attention_heads", &out->num_heads));
    if (out->attention == EPMOE_ATTENTION_MLA) {
        EPMOEI_CHECK(epmoei_config_get_int32(section, "q_lora_rank", 1, &out->q_latent));
        EPMOEI_CHECK(require_int32(section, "kv_lora_rank", &out->kv_latent));
        EPMOEI_CHECK(require_int32(section, "qk_nope_head_dim", &out->nope_dim));
        EPMOEI_CHECK(require_int32(section, "qk_rope_head_dim", &out->rope_dim));
        return require_int32(section, "v_head_dim", &out->value_dim);
    }
    out->num_kv_heads = out->num_heads;
    EPMOEI_CHECK(epmoei_config_get_int32(section, "num_key_value_heads", 1, &out->num_kv_heads));
    if (out->num_heads % out->num_kv_heads)
        return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: num_key_value_heads is %d: expected a divisor of %d heads",
                           section.path, out->num_kv_heads, out->num_heads);
    EPMOEI_CHECK(epmoei_config_get_int32(section, "head_dim", 1, &out->head_dim));
    if (out->head_dim) return EPMOE_OK;
    if (hidden % out->num_heads)
        return epmoei_fail(
            EPMOE_ERROR_FORMAT,
            "%s: num_attention_heads is %d and head_dim is missing: expected a divisor of hidden_size %d", section.path,
            out->num_heads, hidden);
    out->head_dim = hidden / out->num_heads;
    return EPMOE_OK;
}

/* The older rope_scaling decides where it is there; `found` has no object when neither key is. */
static epmoe_status_t find_rope_object(epmoei_config_section_t section, epmoei_config_section_t *found)
{
    static const char *const keys[] = {"rope_scaling", "rope_parameters"};
    found->object = NULL;
    for (int i = 0; i < 2 && !found->object; i++) {
        const char *key;
        json_t *value;
        json_t *object = (json_t *)(uintptr_t)epmoei_config_key(section, keys[i]);
        if (object && !json_is_object(object))
            return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: %s is not an object", section.path, keys[i]);
        json_object_foreach(object, key, value)
        {
            if (json_is_object(value))
                return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED,
                                   "%s: %s has an object %.64s: expected the same parameters for all layers",
                                   section.path, keys[i], key);
        }
        found->object = object;
    }
    return EPMOE_OK;
}

static const epmoei_config_word_t rope_words[] = {
    {"default", EPMOE_ROPE_SCALING_NONE},
    {"linear", EPMOE_ROPE_SCALING_LINEAR},
    {"llama3", EPMOE_ROPE_SCALING_LLAMA3},
    {"yarn", EPMOE_ROPE_SCALING_YARN},
    {NULL, 0},
};

static epmoe_status_t read_scaling(epmoei_config_section_t rope, epmoe_rope_table_args_t *out)
{
    static const char *const type_keys[] = {"rope_type", "type", NULL};
    const char *key = epmoei_config_key(rope, "rope_type") ? "rope_type" : "type";
    int32_t scaling = EPMOE_ROPE_SCALING_NONE, truncate = 1;
    if (!epmoei_config_key(rope, key)) return epmoei_config_missing(rope, type_keys);
    EPMOEI_CHECK(epmoei_config_get_word(rope, key, rope_words, &scaling));
    out->scaling = (epmoe_rope_scaling_t)scaling;
    if (scaling == EPMOE_ROPE_SCALING_NONE) return EPMOE_OK;
    EPMOEI_CHECK(require_double(rope, "factor", &out->factor));
    if (out->factor < 1)
        return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: factor is %g: expected at least 1", rope.path, out->factor);
    if (scaling == EPMOE_ROPE_SCALING_LINEAR) return EPMOE_OK;
    if (scaling == EPMOE_ROPE_SCALING_LLAMA3) {
        EPMOEI_CHECK(require_double(rope, "low_freq_factor", &out->low_freq_factor));
        EPMOEI_CHECK(require_double(rope, "high_freq_factor", &out->high_freq_factor));
        return require_int32(rope, "original_max_position_embeddings", &out->original_positions);
    }
    out->original_positions = out->num_positions;
    EPMOEI_CHECK(epmoei_config_get_int32(rope, "original_max_position_embeddings", 1, &out->original_positions));
    EPMOEI_CHECK(epmoei_config_get_double(rope, "beta_fast", &out->beta_fast));
    EPMOEI_CHECK(epmoei_config_get_double(rope, "beta_slow", &out->beta_slow));
    EPMOEI_CHECK(epmoei_config_get_double(rope, "attention_factor", &out->attention_factor));
    EPMOEI_CHECK(epmoei_config_get_double(rope, "mscale", &out->mscale));
    EPMOEI_CHECK(epmoei_config_get_double(rope, "mscale_all_dim", &out->mscale_all_dim));
    EPMOEI_CHECK(epmoei_config_get_bool(rope, "truncate", &truncate));
    out->no_truncate = !truncate;
    return EPMOE_OK;
}

static epmoe_status_t read_rotary_dim(epmoei_config_section_t section, epmoei_config_section_t rope,
                                      const epmoei_attention_rule_t *rule, epmoe_decoder_config_t *out)
{
    static const char key[] = "partial_rotary_factor";
    double part = rule->rotary_part > 0 ? rule->rotary_part : 1;
    int32_t columns = out->attention == EPMOE_ATTENTION_MLA ? out->rope_dim : out->head_dim, rotary_dim = 0;
    EPMOEI_CHECK(epmoei_config_get_int32(section, "rotary_dim", 1, &rotary_dim));
    if (rotary_dim) part = (double)rotary_dim / columns;
    EPMOEI_CHECK(epmoei_config_get_double(rope.object && epmoei_config_key(rope, key) ? rope : section, key, &part));
    if (rule->rotary_part <= 0 && part != 1)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "%s: %s is %g: expected 1 in this family", section.path, key,
                           part);
    if (part > 1) return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: %s is %g: expected at most 1", section.path, key, part);
    out->rope.rotary_dim = (int32_t)(columns * part);
    if (out->rope.rotary_dim >= 2 && out->rope.rotary_dim % 2 == 0) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: %d of a head's %d columns rotate: expected an even number from 2",
                       section.path, out->rope.rotary_dim, columns);
}

static epmoe_status_t read_rope(epmoei_config_section_t section, const epmoei_attention_rule_t *rule,
                                epmoe_decoder_config_t *out)
{
    epmoei_config_section_t rope = {NULL, section.path};
    EPMOEI_CHECK(find_rope_object(section, &rope));
    EPMOEI_CHECK(require_int32(section, "max_position_embeddings", &out->rope.num_positions));
    bool inside = rope.object && epmoei_config_key(rope, "rope_theta");
    EPMOEI_CHECK(require_double(inside ? rope : section, "rope_theta", &out->rope.base));
    if (out->rope.base <= 1)
        return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: rope_theta is %g: expected above 1", section.path, out->rope.base);
    if (rope.object) EPMOEI_CHECK(read_scaling(rope, &out->rope));
    int32_t gptj = rule->gptj_key != NULL;
    if (rule->gptj_key) EPMOEI_CHECK(epmoei_config_get_bool(section, rule->gptj_key, &gptj));
    out->rope_style = gptj ? EPMOE_ROPE_GPTJ : rule->rope_style;
    return read_rotary_dim(section, rope, rule, out);
}

/* MLA's softmax scale makes up for YaRN's longer context too. */
static float mla_scale(const epmoe_decoder_config_t *config)
{
    double scale = 1 / sqrt((double)config->nope_dim + config->rope_dim), m = 1;
    if (config->rope.scaling == EPMOE_ROPE_SCALING_YARN && config->rope.mscale_all_dim > 0)
        m = 0.1 * config->rope.mscale_all_dim * log(config->rope.factor) + 1;
    return (float)(scale * m * m);
}

/* layer_types into config->full; *sliding says whether some layer has a window. */
static epmoe_status_t read_layer_types(epmoei_config_section_t section, int32_t num_layers,
                                       epmoei_attention_config_t *config, bool *sliding)
{
    const json_t *list = epmoei_config_key(section, "layer_types");
    *sliding = false;
    if (!list) return EPMOE_OK;
    if (!json_is_array(list) || json_array_size(list) != (size_t)num_layers)
        return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: layer_types is not a list of %d strings", section.path, num_layers);
    if (num_layers > EPMOEI_MAX_TYPED_LAYERS)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "%s: layer_types has %d entries: expected at most %d",
                           section.path, num_layers, EPMOEI_MAX_TYPED_LAYERS);
    for (int32_t i = 0; i < num_layers; i++) {
        const char *type = json_string_value(json_array_get(list, (size_t)i));
        config->full[i] = type && !strcmp(type, "full_attention");
        if (!config->full[i] && (!type || strcmp(type, "sliding_attention")))
            return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED,
                               "%s: layer_types[%d] is \"%.64s\": expected \"full_attention\" or \"sliding_attention\"",
                               section.path, i, type ? type : "(no string)");
        config->any_full |= config->full[i];
        *sliding |= !config->full[i];
    }
    return EPMOE_OK;
}

static epmoe_status_t read_upper_window(epmoei_config_section_t section, int32_t num_layers,
                                        epmoei_attention_config_t *config)
{
    int32_t first;
    EPMOEI_CHECK(require_int32(section, "max_window_layers", &first));
    if (num_layers > EPMOEI_MAX_TYPED_LAYERS)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "%s: %d layers with windows: expected at most %d", section.path,
                           num_layers, EPMOEI_MAX_TYPED_LAYERS);
    for (int32_t i = 0; i < num_layers; i++) config->full[i] = i < first;
    config->any_full = true;
    return EPMOE_OK;
}

/* no_rope_layers holds 0 for the layers that do not rotate; without it every no_rope_layer_interval-th does not. */
static epmoe_status_t read_unrotated(epmoei_config_section_t section, int32_t num_layers,
                                     epmoei_attention_config_t *config)
{
    const json_t *list = epmoei_config_key(section, "no_rope_layers");
    int32_t interval = 4;
    EPMOEI_CHECK(epmoei_config_get_int32(section, "no_rope_layer_interval", 1, &interval));
    if (num_layers > EPMOEI_MAX_TYPED_LAYERS)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "%s: %d layers: expected at most %d", section.path, num_layers,
                           EPMOEI_MAX_TYPED_LAYERS);
    if (list && (!json_is_array(list) || (json_array_size(list) && json_array_size(list) != (size_t)num_layers)))
        return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: no_rope_layers is not a list of %d numbers", section.path,
                           num_layers);
    for (int32_t i = 0; i < num_layers; i++) {
        const json_t *entry = json_array_get(list, (size_t)i);
        if (entry && !json_is_integer(entry))
            return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: no_rope_layers[%d] is not 0 or 1", section.path, i);
        config->unrotated[i] = entry ? json_integer_value(entry) == 0 : (i + 1) % interval == 0;
        config->any_unrotated |= config->unrotated[i];
    }
    return EPMOE_OK;
}

/* Bounds the positions by what chunks and temperature do not touch. */
static epmoe_status_t read_chunks(epmoei_config_section_t section, int32_t num_layers,
                                  epmoei_attention_config_t *config)
{
    int32_t chunk = 8192, tuned = 1, floor_scale = 8192, *positions = &config->decoder.rope.num_positions;
    const json_t *tuning = epmoei_config_key(section, "attn_temperature_tuning");
    EPMOEI_CHECK(epmoei_config_get_int32(section, "attention_chunk_size", 1, &chunk));
    EPMOEI_CHECK(epmoei_config_get_int32(section, "floor_scale", 2, &floor_scale));
    if (tuning) tuned = json_is_integer(tuning) ? json_integer_value(tuning) != 0 : !json_is_false(tuning);
    if (*positions > chunk) *positions = chunk;
    if (tuned && *positions > floor_scale - 1) *positions = floor_scale - 1;
    return read_unrotated(section, num_layers, config);
}

static epmoe_status_t read_window(epmoei_config_section_t section, epmoei_window_rule_t rule, int32_t num_layers,
                                  epmoei_attention_config_t *config)
{
    if (rule == EPMOEI_WINDOW_CHUNKS) return read_chunks(section, num_layers, config);
    int32_t window = 0, in_use = 0;
    bool sliding, typed = epmoei_config_key(section, "layer_types") != NULL;
    EPMOEI_CHECK(read_layer_types(section, num_layers, config, &sliding));
    if (rule != EPMOEI_WINDOW_NEVER) EPMOEI_CHECK(epmoei_config_get_int32(section, "sliding_window", 0, &window));
    EPMOEI_CHECK(epmoei_config_get_bool(section, "use_sliding_window", &in_use));
    if (rule == EPMOEI_WINDOW_SWITCHED && !in_use) window = 0;
    if (rule == EPMOEI_WINDOW_UPPER && !typed && window) {
        EPMOEI_CHECK(read_upper_window(section, num_layers, config));
        typed = true;
    }
    bool must_be_typed = rule == EPMOEI_WINDOW_BY_TYPE || (rule == EPMOEI_WINDOW_SWITCHED && window > 0);
    if (must_be_typed && !typed)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED,
                           "%s: layer_types is missing: expected it to say which layers have the window of %d",
                           section.path, window);
    if (sliding && window < 1)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED,
                           "%s: layer_types has \"sliding_attention\", but the window is 0 by sliding_window%s",
                           section.path, rule == EPMOEI_WINDOW_SWITCHED ? " and use_sliding_window" : "");
    config->decoder.window = window;
    return EPMOE_OK;
}

static epmoe_status_t read_decoder(epmoei_config_section_t section, const epmoei_family_t *family, int32_t num_layers,
                                   int32_t hidden, epmoei_attention_config_t *config)
{
    const epmoei_attention_rule_t *rule = family->attention;
    epmoe_decoder_config_t *out = &config->decoder;
    if (!rule)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED,
                           "%s: the row of %s in moe/families.c has no rule for attention: this version runs its MoE "
                           "blocks only",
                           section.path, family->model_types[0]);
    out->attention = rule->kind;
    out->has_sinks = rule->has_sinks;
    out->cache_layout = EPMOE_CACHE_LAYOUT_NHD;
    out->norm_eps = config->norm_eps;
    EPMOEI_CHECK(check_absent(section));
    EPMOEI_CHECK(check_kinds(section));
    EPMOEI_CHECK(read_heads(section, hidden, out));
    EPMOEI_CHECK(read_flag(section, &rule->in_bias, &out->in_bias));
    EPMOEI_CHECK(read_flag(section, &rule->out_bias, &out->out_bias));
    int32_t has_qk_norm;
    EPMOEI_CHECK(read_flag(section, &rule->has_qk_norm, &has_qk_norm));
    out->qk_norm = has_qk_norm ? rule->qk_norm : EPMOE_QK_NORM_NONE;
    EPMOEI_CHECK(read_rope(section, rule, out));
    if (out->attention == EPMOE_ATTENTION_MLA) out->scale = mla_scale(out);
    return read_window(section, rule->window, num_layers, config);
}

static epmoe_status_t read_head(epmoei_config_section_t section, epmoei_attention_config_t *config)
{
    static const char *const vocab[] = {"vocab_size", NULL}, *const eps[] = {"rms_norm_eps", NULL};
    int32_t tied = 0;
    if (!epmoei_config_key(section, eps[0])) return epmoei_config_missing(section, eps);
    EPMOEI_CHECK(epmoei_config_get_float(section, eps[0], &config->norm_eps));
    EPMOEI_CHECK(epmoei_config_get_size(section, vocab, 1, true, &config->vocab_size));
    EPMOEI_CHECK(epmoei_config_get_bool(section, "tie_word_embeddings", &tied));
    config->tied = tied;
    return EPMOE_OK;
}

void epmoei_attention_config_read(epmoei_config_section_t section, const epmoei_family_t *family, int32_t num_layers,
                                  int32_t hidden, epmoei_attention_config_t *config)
{
    memset(config, 0, sizeof *config);
    config->decoder = (epmoe_decoder_config_t)EPMOE_DECODER_CONFIG_INIT;
    config->decoder.rope.struct_size = sizeof config->decoder.rope;
    config->head_status = read_head(section, config);
    if (config->head_status != EPMOE_OK)
        snprintf(config->head_message, sizeof config->head_message, "%s", epmoe_last_error());
    /* Where the family has no rule, that is the reason, whatever the file lacks. */
    bool readable = config->norm_eps > 0 || !family->attention;
    config->status = readable ? read_decoder(section, family, num_layers, hidden, config) : config->head_status;
    if (config->status != EPMOE_OK) snprintf(config->message, sizeof config->message, "%s", epmoe_last_error());
}

epmoe_status_t epmoei_attention_config_of(const epmoei_attention_config_t *config, int32_t layer,
                                          epmoe_decoder_config_t *decoder)
{
    if (config->status != EPMOE_OK) return epmoei_fail(config->status, "%s", config->message);
    *decoder = config->decoder;
    if (config->any_full && config->full[layer]) decoder->window = 0;
    if (config->any_unrotated && config->unrotated[layer]) {
        decoder->no_rope = 1;
        decoder->qk_norm = EPMOE_QK_NORM_NONE;
    }
    return EPMOE_OK;
}
