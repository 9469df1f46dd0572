#include "moe/config_keys.h"

#include <float.h>
#include <stdio.h>
#include <string.h>

const json_t *epmoei_config_key(epmoei_config_section_t section, const char *key)
{
    const json_t *value = key ? json_object_get(section.object, key) : NULL;
    return json_is_null(value) ? NULL : value;
}

/* *found is the key that is there, NULL when none is. */
static epmoe_status_t get_int(epmoei_config_section_t section, const char *const *keys, int64_t least, int64_t *out,
                              const char **found)
{
    *found = NULL;
    for (; *keys; keys++) {
        const json_t *value = epmoei_config_key(section, *keys);
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

epmoe_status_t epmoei_config_missing(epmoei_config_section_t section, const char *const *keys)
{
    char text[256];
    size_t used = 0;
    for (int i = 0; keys[i] && used < sizeof text; i++)
        used += (size_t)snprintf(text + used, sizeof text - used, "%s%s", i ? " or " : "", keys[i]);
    return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: %s is missing", section.path, text);
}

epmoe_status_t epmoei_config_get_size(epmoei_config_section_t section, const char *const *keys, int64_t least,
                                      bool required, epmoei_config_size_t *size)
{
    const char *found;
    *size = (epmoei_config_size_t){.value = -1};
    EPMOEI_CHECK(get_int(section, keys, least, &size->value, &found));
    if (!found) return required ? epmoei_config_missing(section, keys) : EPMOE_OK;
    snprintf(size->text, sizeof size->text, "%s is %lld", found, (long long)size->value);
    return EPMOE_OK;
}

epmoe_status_t epmoei_config_get_int32(epmoei_config_section_t section, const char *key, int64_t least, int32_t *out)
{
    const char *keys[] = {key, NULL}, *found;
    int64_t value = 0;
    EPMOEI_CHECK(get_int(section, keys, least, &value, &found));
    if (found) *out = (int32_t)value;
    return EPMOE_OK;
}

epmoe_status_t epmoei_config_get_double(epmoei_config_section_t section, const char *key, double *out)
{
    const json_t *value = epmoei_config_key(section, key);
    if (!value) return EPMOE_OK;
    double number = json_is_number(value) ? json_number_value(value) : 0;
    if (!(number >= (double)FLT_MIN && number <= (double)FLT_MAX))
        return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: %s is not a positive number", section.path, key);
    *out = number;
    return EPMOE_OK;
}

epmoe_status_t epmoei_config_get_float(epmoei_config_section_t section, const char *key, float *out)
{
    double value = (double)*out;
    EPMOEI_CHECK(epmoei_config_get_double(section, key, &value));
    *out = (float)value;
    return EPMOE_OK;
}

epmoe_status_t epmoei_config_get_bool(epmoei_config_section_t section, const char *key, int32_t *out)
{
    const json_t *value = epmoei_config_key(section, key);
    if (!value) return EPMOE_OK;
    if (!json_is_boolean(value)) return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: %s is not a boolean", section.path, key);
    *out = json_is_true(value);
    return EPMOE_OK;
}

epmoe_status_t epmoei_config_get_word(epmoei_config_section_t section, const char *key,
                                      const epmoei_config_word_t *words, int32_t *out)
{
    const json_t *value = epmoei_config_key(section, key);
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
