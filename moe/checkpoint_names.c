#include "moe/checkpoint_internal.h"
#include "base/dtype.h"

#include <stdio.h>
#include <string.h>

#define MAX_WARNINGS 20 /* of unknown tensors, each by its name; the others are counted */

/* What follows `prefix` in text, NULL when text does not start with it. */
static const char *after(const char *text, const char *prefix)
{
    size_t length = strlen(prefix);
    return strncmp(text, prefix, length) ? NULL : text + length;
}

/* Reads a decimal number as names carry it (no sign, no leading zero, at most 9 digits); NULL when there is none. */
static const char *after_number(const char *text, int32_t *number)
{
    int32_t value = 0, digits = 0;
    while (digits < 9 && text[digits] >= '0' && text[digits] <= '9') value = value * 10 + (text[digits++] - '0');
    if (digits == 0 || (digits > 1 && text[0] == '0')) return NULL;
    *number = value;
    return text + digits;
}

/* What follows "<layers>I." of a layer's tensor. */
static const char *after_layer(const epmoe_checkpoint_t *checkpoint, const char *name, int32_t *layer)
{
    const char *rest = after(name, checkpoint->config.family->layers);
    if (rest) rest = after_number(rest, layer);
    return rest && *rest == '.' ? rest + 1 : NULL;
}

static bool in_list(const char *text, const char *const *list)
{
    for (; *list; list++)
        if (!strcmp(text, *list)) return true;
    return false;
}

static bool starts_with_one(const char *text, const char *const *prefixes)
{
    for (; prefixes && *prefixes; prefixes++)
        if (after(text, *prefixes)) return true;
    return false;
}

bool epmoei_checkpoint_is_mlp_tensor(const epmoe_checkpoint_t *checkpoint, const char *name)
{
    const epmoei_tensor_names_t *names = checkpoint->config.family->names;
    int32_t layer = 0;
    const char *rest = after_layer(checkpoint, name, &layer);
    if (!rest || layer >= checkpoint->config.num_layers) return false;
    for (int32_t i = 0; i < EPMOEI_FAMILY_LIST && names->modules[i]; i++)
        if (after(rest, names->modules[i])) return true;
    return names->dense_module && after(rest, names->dense_module);
}

/* What follows a name made from `pattern`, and the expert that stands for its %d. */
static const char *after_pattern(const char *text, const char *pattern, int32_t *expert)
{
    const char *number = pattern ? strstr(pattern, "%d") : NULL;
    if (!pattern) return NULL;
    if (!number) return after(text, pattern);
    if (strncmp(text, pattern, (size_t)(number - pattern))) return NULL;
    const char *rest = after_number(text + (number - pattern), expert);
    return rest ? after(rest, number + 2) : NULL;
}

static epmoe_status_t unknown_below_experts(const epmoe_checkpoint_t *checkpoint, const epmoei_tensor_t *tensor)
{
    return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: tensor %.256s lies below the experts, but no expert of %s has it",
                       tensor->path, tensor->name, checkpoint->config.model_type);
}

/* A tensor of a quantised format beside a plain weight would change the weight if it were read: an error. */
static epmoe_status_t check_not_plain(const epmoe_checkpoint_t *checkpoint, const epmoei_tensor_t *tensor,
                                      const char *plain_name)
{
    const epmoei_tensor_t *plain = epmoei_tensor_index_find(&checkpoint->index, plain_name);
    if (!plain || !epmoei_dtype_is_float(plain->dtype)) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: tensor %s belongs to a quantised weight, but %s is %s", tensor->path,
                       tensor->name, plain_name, plain->dtype_name);
}

/* `rest` is the tensor's name below the module, which starts with the experts' prefix. */
static epmoe_status_t check_expert_name(const epmoe_checkpoint_t *checkpoint, int32_t layer,
                                        const epmoei_tensor_t *tensor, const char *rest)
{
    const epmoei_layer_place_t *place = &checkpoint->layers[layer];
    const epmoei_tensor_names_t *names = checkpoint->config.family->names;
    const char *const stacked[] = {names->stacked_gate_up, names->stacked_down};
    const char *const single[] = {names->expert_gate, names->expert_up, names->expert_down};
    char plain[EPMOEI_NAME_BYTES];
    for (int i = 0; i < 2 && place->stacked; i++) {
        const char *suffix = after_pattern(rest, stacked[i], NULL);
        if (!suffix) continue;
        if (!*suffix || (checkpoint->config.family->expert_has_bias && !strcmp(suffix, "_bias"))) return EPMOE_OK;
        if (!in_list(suffix, epmoei_quantised_stacked_suffixes)) continue;
        epmoei_checkpoint_name(plain, checkpoint, layer, place->module, stacked[i], 0, "");
        return check_not_plain(checkpoint, tensor, plain);
    }
    for (int i = 0; i < 3 && !place->stacked; i++) {
        int32_t expert = 0;
        const char *suffix = after_pattern(rest, single[i], &expert);
        if (!suffix) continue;
        if (expert >= checkpoint->config.layer.num_experts)
            return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: tensor %s is of expert %d, but in config.json %s", tensor->path,
                               tensor->name, expert, checkpoint->config.num_experts.text);
        if (!strcmp(suffix, ".weight")) return EPMOE_OK;
        if (!in_list(suffix, epmoei_quantised_suffixes)) continue;
        epmoei_checkpoint_name(plain, checkpoint, layer, place->module, single[i], expert, ".weight");
        return check_not_plain(checkpoint, tensor, plain);
    }
    return unknown_below_experts(checkpoint, tensor);
}

/* A tensor of the layer's MLP outside its experts; `rest` is its name below the module. */
static epmoe_status_t check_module_name(const epmoe_checkpoint_t *checkpoint, int32_t layer,
                                        const epmoei_tensor_t *tensor, const char *rest, bool *known)
{
    const epmoei_layer_place_t *place = &checkpoint->layers[layer];
    const epmoei_tensor_names_t *names = checkpoint->config.family->names;
    const char *const moe[] = {names->router, names->shared_gate_proj, names->shared_up_proj, names->shared_down_proj,
                               names->shared_gate};
    const char *const dense[] = {names->dense_gate, names->dense_up, names->dense_down};
    const char *const *projections = place->dense ? dense : moe;
    *known = true;
    if (!place->dense && names->router_bias && !strcmp(rest, names->router_bias)) return EPMOE_OK;
    if (!place->dense && checkpoint->config.layer.has_selection_bias && !strcmp(rest, names->selection_bias))
        return EPMOE_OK;
    for (int i = 0; i < (place->dense ? 3 : 5); i++) {
        const char *suffix = after_pattern(rest, projections[i], NULL);
        if (suffix && !strcmp(suffix, ".weight")) return EPMOE_OK;
        if (!suffix || !in_list(suffix, epmoei_quantised_suffixes)) continue;
        char plain[EPMOEI_NAME_BYTES];
        epmoei_checkpoint_name(plain, checkpoint, layer, place->module, projections[i], 0, ".weight");
        return check_not_plain(checkpoint, tensor, plain);
    }
    *known = false;
    return EPMOE_OK;
}

/* `below` is a tensor's name below a module of experts. */
static bool is_expert_tensor(const epmoei_tensor_names_t *names, const char *below)
{
    if (names->experts) return after(below, names->experts) != NULL;
    return after(below, names->stacked_gate_up) || after(below, names->stacked_down);
}

/* *known false asks for a warning. */
static epmoe_status_t check_name(const epmoe_checkpoint_t *checkpoint, const epmoei_tensor_t *tensor, bool *known)
{
    const epmoei_model_config_t *config = &checkpoint->config;
    const epmoei_tensor_names_t *names = config->family->names;
    int32_t layer = 0;
    const char *rest = after_layer(checkpoint, tensor->name, &layer);
    *known = true;
    if (!rest) {
        *known = starts_with_one(tensor->name, names->outside_layers);
        return EPMOE_OK;
    }
    if (layer >= config->num_layers) {
        *known = layer - config->num_layers < config->num_nextn_layers;
        return EPMOE_OK;
    }
    const epmoei_layer_place_t *place = &checkpoint->layers[layer];
    for (int32_t i = 0; i < EPMOEI_FAMILY_LIST && names->modules[i]; i++) {
        const char *below = after(rest, names->modules[i]);
        if (!below || !is_expert_tensor(names, below)) continue;
        if (strcmp(names->modules[i], place->module)) return unknown_below_experts(checkpoint, tensor);
        return check_expert_name(checkpoint, layer, tensor, below);
    }
    const char *below = after(rest, place->module);
    if (below) return check_module_name(checkpoint, layer, tensor, below, known);
    *known = starts_with_one(rest, names->rest_of_layer);
    return EPMOE_OK;
}

epmoe_status_t epmoei_checkpoint_check_names(const epmoe_checkpoint_t *checkpoint)
{
    int64_t unknown = 0;
    for (int64_t i = 0; i < checkpoint->index.count; i++) {
        const epmoei_tensor_t *tensor = checkpoint->index.tensors[i];
        bool known;
        EPMOEI_CHECK(check_name(checkpoint, tensor, &known));
        if (!known && ++unknown <= MAX_WARNINGS)
            epmoei_log(EPMOE_LOG_WARNING, "%s: tensor %.256s is not known for %s and is not read", tensor->path,
                       tensor->name, checkpoint->config.model_type);
    }
    if (unknown > MAX_WARNINGS)
        epmoei_log(EPMOE_LOG_WARNING, "%s: %lld more tensors are not known and are not read", checkpoint->dir,
                   (long long)(unknown - MAX_WARNINGS));
    return EPMOE_OK;
}
