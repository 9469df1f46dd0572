#include "moe/quant_config.h"

#include <fnmatch.h>
#include <regex.h>
#include <stdio.h>
#include <string.h>

static const json_t *get(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    return json_is_null(value) ? NULL : value;
}

static epmoe_status_t wrong(const char *path, const char *key, const char *expected)
{
    return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: quantization_config.%s is not %s", path, key, expected);
}

static void refuse(epmoei_quant_config_t *config, const char *key, const char *value, const char *expected)
{
    if (!config->refusal[0])
        snprintf(config->refusal, sizeof config->refusal, "quantization_config.%.40s is %.40s: expected %.60s", key,
                 value, expected);
}

/* Codes of another width cannot be read. */
static epmoe_status_t read_bits(const json_t *object, const char *key, const char *path, epmoei_quant_config_t *config)
{
    const json_t *value = get(object, key);
    char text[32];
    if (!value) return EPMOE_OK;
    if (!json_is_integer(value)) return wrong(path, key, "an integer");
    snprintf(text, sizeof text, "%lld", (long long)json_integer_value(value));
    if (json_integer_value(value) != 4) refuse(config, key, text, "4");
    return EPMOE_OK;
}

static epmoe_status_t read_word(const json_t *object, const char *key, const char *path, const char **word)
{
    const json_t *value = get(object, key);
    if (value && !json_is_string(value)) return wrong(path, key, "a string");
    *word = json_string_value(value);
    return EPMOE_OK;
}

static epmoe_status_t read_group(const json_t *object, const char *path, epmoei_quant_config_t *config)
{
    const json_t *value = get(object, "group_size");
    if (!value) return EPMOE_OK;
    json_int_t group = json_integer_value(value);
    if (!json_is_integer(value) || (group < 1 && group != -1) || group > INT32_MAX)
        return wrong(path, "group_size", "an integer of at least 1, or -1");
    config->group = (int32_t)group;
    snprintf(config->group_text, sizeof config->group_text, "group_size is %d", config->group);
    return EPMOE_OK;
}

static epmoe_status_t read_flag(const json_t *object, const char *key, const char *path, bool *flag)
{
    const json_t *value = get(object, key);
    if (value && !json_is_boolean(value)) return wrong(path, key, "a boolean");
    if (value) *flag = json_is_true(value);
    return EPMOE_OK;
}

static epmoe_status_t read_gptq(const json_t *object, const char *path, epmoei_quant_config_t *config)
{
    const char *format = NULL;
    EPMOEI_CHECK(read_word(object, "checkpoint_format", path, &format));
    if (format && strcmp(format, "gptq") && strcmp(format, "gptq_v2"))
        refuse(config, "checkpoint_format", format, "gptq or gptq_v2");
    config->zero_convention = format && !strcmp(format, "gptq_v2") ? 2 : 1;
    EPMOEI_CHECK(read_flag(object, "desc_act", path, &config->needs_g_idx));
    EPMOEI_CHECK(read_bits(object, "bits", path, config));
    return read_group(object, path, config);
}

static epmoe_status_t read_awq(const json_t *object, const char *path, epmoei_quant_config_t *config)
{
    const char *version = NULL;
    EPMOEI_CHECK(read_word(object, "version", path, &version));
    if (version && strcasecmp(version, "gemm")) refuse(config, "version", version, "gemm");
    EPMOEI_CHECK(read_bits(object, "bits", path, config));
    return read_group(object, path, config);
}

/* The order in which columns were quantised: a flag, or a word. Only "group" leaves a g_idx behind; "dynamic" and
 * "static" are other names of "group" and "weight". */
static epmoe_status_t read_actorder(const json_t *weights, const char *path, epmoei_quant_config_t *config)
{
    const json_t *value = get(weights, "actorder");
    if (!value) return EPMOE_OK;
    if (json_is_boolean(value)) {
        config->needs_g_idx = json_is_true(value);
        return EPMOE_OK;
    }
    const char *order = json_string_value(value);
    if (!order) return wrong(path, "actorder", "a string or a boolean");
    config->needs_g_idx = !strcasecmp(order, "group") || !strcasecmp(order, "dynamic");
    if (!config->needs_g_idx && strcasecmp(order, "weight") && strcasecmp(order, "static"))
        refuse(config, "actorder", order, "group or weight");
    return EPMOE_OK;
}

/* Two equal numbers of rows and columns per scale. */
static epmoe_status_t read_block(const json_t *object, const char *key, const char *path, epmoei_quant_config_t *config)
{
    const json_t *block = get(object, key);
    if (!block) return EPMOE_OK;
    json_int_t rows = json_integer_value(json_array_get(block, 0)), cols = json_integer_value(json_array_get(block, 1));
    if (!json_is_array(block) || json_array_size(block) != 2 || rows < 1 || cols < 1 || rows > INT32_MAX ||
        cols > INT32_MAX)
        return wrong(path, key, "a list of two integers of at least 1");
    if (rows != cols) {
        char text[64];
        snprintf(text, sizeof text, "[%lld,%lld]", (long long)rows, (long long)cols);
        refuse(config, key, text, "two equal numbers");
    }
    config->block = (int32_t)rows;
    return EPMOE_OK;
}

/* FP8 of compressed-tensors: a scale for the matrix, for each row or for each block. */
static epmoe_status_t read_float8(const json_t *weights, const char *path, epmoei_quant_config_t *config)
{
    const json_t *bits = get(weights, "num_bits");
    const char *type = NULL, *strategy = NULL;
    config->float8 = true;
    EPMOEI_CHECK(read_word(weights, "type", path, &type));
    EPMOEI_CHECK(read_word(weights, "strategy", path, &strategy));
    if (bits && json_integer_value(bits) != 8)
        return wrong(path, "config_groups...num_bits", "8, as float-quantized is");
    if (type && strcmp(type, "float")) refuse(config, "type", type, "float");
    config->per_row = strategy && !strcmp(strategy, "channel");
    if (strategy && !strcmp(strategy, "block")) {
        EPMOEI_CHECK(read_block(weights, "block_structure", path, config));
        if (!config->block) return wrong(path, "config_groups...block_structure", "there, as strategy is block");
    } else if (strategy && !config->per_row && strcmp(strategy, "tensor")) {
        refuse(config, "strategy", strategy, "tensor, channel or block");
    }
    return EPMOE_OK;
}

/* config_groups with one entry, whose weights are 4-bit integers in groups along K or one per row, or FP8. */
static epmoe_status_t read_compressed(const json_t *object, const char *path, epmoei_quant_config_t *config)
{
    const char *format = NULL, *type = NULL, *strategy = NULL;
    EPMOEI_CHECK(read_word(object, "format", path, &format));
    const bool float8 = format && !strcmp(format, "float-quantized");
    if (!float8 && (!format || strcmp(format, "pack-quantized")))
        refuse(config, "format", format ? format : "missing", "pack-quantized or float-quantized");
    const json_t *groups = get(object, "config_groups");
    if (!json_is_object(groups) || json_object_size(groups) == 0) return wrong(path, "config_groups", "an object");
    if (json_object_size(groups) > 1) refuse(config, "config_groups", "of several groups", "one group");
    const json_t *weights = get(json_object_iter_value(json_object_iter((json_t *)(uintptr_t)groups)), "weights");
    if (!json_is_object(weights)) return wrong(path, "config_groups...weights", "an object");
    if (float8) return read_float8(weights, path, config);
    EPMOEI_CHECK(read_bits(weights, "num_bits", path, config));
    EPMOEI_CHECK(read_word(weights, "type", path, &type));
    if (type && strcmp(type, "int")) refuse(config, "type", type, "int");
    EPMOEI_CHECK(read_word(weights, "strategy", path, &strategy));
    if (strategy && strcmp(strategy, "group") && strcmp(strategy, "channel"))
        refuse(config, "strategy", strategy, "group or channel");
    bool symmetric = true;
    EPMOEI_CHECK(read_flag(weights, "symmetric", path, &symmetric));
    config->needs_zeros = !symmetric;
    EPMOEI_CHECK(read_actorder(weights, path, config));
    EPMOEI_CHECK(read_group(weights, path, config));
    if (strategy && !strcmp(strategy, "channel")) {
        config->group = -1;
        snprintf(config->group_text, sizeof config->group_text, "strategy is channel");
    }
    return EPMOE_OK;
}

static epmoe_status_t read_fp8(const json_t *object, const char *path, epmoei_quant_config_t *config)
{
    const char *format = NULL;
    EPMOEI_CHECK(read_word(object, "fmt", path, &format));
    if (format && strcmp(format, "e4m3")) refuse(config, "fmt", format, "e4m3");
    return read_block(object, "weight_block_size", path, config);
}

static epmoe_status_t read_list(const json_t *object, const char *key, const char *path, epmoei_quant_config_t *config)
{
    const json_t *list = get(object, key);
    if (!list) return EPMOE_OK;
    if (!json_is_array(list)) return wrong(path, key, "a list of strings");
    int64_t count = (int64_t)json_array_size(list);
    EPMOEI_CHECK(epmoei_alloc_for((void **)&config->left_out, count * (int64_t)sizeof *config->left_out, key));
    for (int64_t i = 0; i < count; i++) {
        const char *text = json_string_value(json_array_get(list, (size_t)i));
        if (!text) return wrong(path, key, "a list of strings");
        EPMOEI_CHECK(epmoei_alloc_for((void **)&config->left_out[i], (int64_t)strlen(text) + 1, key));
        strcpy(config->left_out[i], text);
        config->num_left_out++;
    }
    return EPMOE_OK;
}

static epmoe_status_t read_all(const json_t *object, const char *path, epmoei_quant_config_t *config)
{
    const char *method = NULL;
    if (!json_is_object(object))
        return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: quantization_config is not an object", path);
    EPMOEI_CHECK(read_word(object, "quant_method", path, &method));
    snprintf(config->method, sizeof config->method, "%s", method ? method : "unknown");
    EPMOEI_CHECK(read_list(object, get(object, "ignore") ? "ignore" : "modules_to_not_convert", path, config));
    if (!strcmp(config->method, "gptq")) return read_gptq(object, path, config);
    if (!strcmp(config->method, "awq")) return read_awq(object, path, config);
    if (!strcmp(config->method, "compressed-tensors")) return read_compressed(object, path, config);
    if (!strcmp(config->method, "fp8")) return read_fp8(object, path, config);
    return EPMOE_OK;
}

epmoe_status_t epmoei_quant_config_read(const json_t *object, const char *path, epmoei_quant_config_t *config)
{
    *config = (epmoei_quant_config_t){.group = 128, .group_text = "group_size is 128 by default", .zero_convention = 1};
    if (!object) return EPMOE_OK;
    epmoe_status_t status = read_all(object, path, config);
    if (status != EPMOE_OK) epmoei_quant_config_free(config);
    return status;
}

void epmoei_quant_config_free(epmoei_quant_config_t *config)
{
    for (int32_t i = 0; i < config->num_left_out; i++) epmoei_free(config->left_out[i]);
    epmoei_free(config->left_out);
    config->left_out = NULL;
    config->num_left_out = 0;
}

/* The expressions are Python's: of what POSIX lacks only \d occurs in such lists. */
static bool matches_regex(const char *expression, const char *name)
{
    char posix[512] = "^(";
    size_t used = 2;
    for (; *expression && used + 8 < sizeof posix; expression++) {
        if (expression[0] == '\\' && expression[1] == 'd') {
            memcpy(posix + used, "[0-9]", 5);
            used += 5;
            expression++;
        } else {
            posix[used++] = *expression;
            if (expression[0] == '\\' && expression[1]) posix[used++] = *++expression;
        }
    }
    if (*expression) return false;
    posix[used++] = ')';
    posix[used] = 0;
    regex_t regex;
    if (regcomp(&regex, posix, REG_EXTENDED | REG_NOSUB)) return false;
    bool found = regexec(&regex, name, 0, NULL, 0) == 0;
    regfree(&regex);
    return found;
}

/* Whether the components of `entry` are the next ones of `name`. */
static bool matches_here(const char *entry, const char *name)
{
    for (;;) {
        char pattern[128], part[128];
        size_t pattern_length = strcspn(entry, "."), part_length = strcspn(name, ".");
        if (pattern_length >= sizeof pattern || part_length >= sizeof part) return false;
        snprintf(pattern, sizeof pattern, "%.*s", (int)pattern_length, entry);
        snprintf(part, sizeof part, "%.*s", (int)part_length, name);
        if (fnmatch(pattern, part, 0)) return false;
        if (!entry[pattern_length]) return true;
        if (!name[part_length]) return false;
        entry += pattern_length + 1;
        name += part_length + 1;
    }
}

bool epmoei_quant_config_leaves_out(const epmoei_quant_config_t *config, const char *name)
{
    for (int32_t i = 0; i < config->num_left_out; i++) {
        const char *entry = config->left_out[i];
        if (!strncmp(entry, "re:", 3)) {
            if (matches_regex(entry + 3, name)) return true;
            continue;
        }
        for (const char *at = name; at; at = strchr(at, '.') ? strchr(at, '.') + 1 : NULL)
            if (*entry && matches_here(entry, at)) return true;
    }
    return false;
}
