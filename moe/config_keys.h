/* Keys of config.json, read and checked; a message names the file, the key, its value and what was expected. */
#ifndef EPMOEI_CONFIG_KEYS_H
#define EPMOEI_CONFIG_KEYS_H

#include "moe/json_file.h"

/* The object that holds the keys, and the file's name for messages. */
typedef struct epmoei_config_section_t {
    const json_t *object;
    const char *path;
} epmoei_config_section_t;

/* A size that tensors must agree with, and how to say where it is from: "hidden_size is 64". value < 0 = not there. */
typedef struct epmoei_config_size_t {
    int64_t value;
    char text[128];
} epmoei_config_size_t;

/* A word that a string may be, and what it means; a list ends with word NULL. */
typedef struct epmoei_config_word_t {
    const char *word;
    int32_t value;
} epmoei_config_word_t;

/* A key set to null is a key that is not there: NULL. */
const json_t *epmoei_config_key(epmoei_config_section_t section, const char *key);
/* The FORMAT error for keys of which one has to be there. */
epmoe_status_t epmoei_config_missing(epmoei_config_section_t section, const char *const *keys);

/* The value of the first of `keys` that is there; size->value is -1 when none is. Others must not differ. */
epmoe_status_t epmoei_config_get_size(epmoei_config_section_t section, const char *const *keys, int64_t least,
                                      bool required, epmoei_config_size_t *size);

/* *out stays as it is when the key is not there. */
epmoe_status_t epmoei_config_get_int32(epmoei_config_section_t section, const char *key, int64_t least, int32_t *out);
/* A positive number that a float can hold. */
epmoe_status_t epmoei_config_get_float(epmoei_config_section_t section, const char *key, float *out);
epmoe_status_t epmoei_config_get_double(epmoei_config_section_t section, const char *key, double *out);
epmoe_status_t epmoei_config_get_bool(epmoei_config_section_t section, const char *key, int32_t *out);
/* A string that must be one of a list: NOT_SUPPORTED otherwise. */
epmoe_status_t epmoei_config_get_word(epmoei_config_section_t section, const char *key,
                                      const epmoei_config_word_t *words, int32_t *out);

#endif
