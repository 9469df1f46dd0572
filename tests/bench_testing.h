/* What the tests of moe_layer_bench share: how it is started on the CPU, and its lines of JSON. */
#ifndef EPMOE_TESTS_BENCH_TESTING_H
#define EPMOE_TESTS_BENCH_TESTING_H

#include "tests/testing.h"

#include <criterion/criterion.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#define BENCH EPMOE_TEST_BIN "/moe_layer_bench"

enum { kLimit = 120 };

static inline testing_process_t run_bench(int32_t ranks, const char *format, ...)
{
    char arguments[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(arguments, sizeof arguments, format, args);
    va_end(args);
    /* These are tests of the CPU backend, also where there is a device; an option given again replaces the first. */
    if (ranks == 0) return testing_run(kLimit, "%s --backend cpu %s", BENCH, arguments);
    return testing_run(kLimit, "%s %s --backend cpu %s", testing_mpirun(ranks), BENCH, arguments);
}

static inline const char *golden(const char *name)
{
    static char text[512];
    snprintf(text, sizeof text, "--checkpoint %s/golden/%s", EPMOE_TEST_DATA, name);
    return text;
}

/* Line `index` of stdout as JSON; every line must be an object. */
static inline json_t *json_line(const testing_process_t *process, int32_t index)
{
    json_t *found = NULL;
    char *copy = strdup(process->output), *save = NULL;
    int32_t i = 0;
    for (char *line = strtok_r(copy, "\n", &save); line; line = strtok_r(NULL, "\n", &save), i++) {
        json_error_t error;
        json_t *object = json_loads(line, JSON_REJECT_DUPLICATES, &error);
        cr_assert(json_is_object(object), "not a JSON object: %s", line);
        if (i == index)
            found = object;
        else
            json_decref(object);
    }
    free(copy);
    cr_assert(found, "stdout has %d lines\n%s", i, process->errors);
    return found;
}

static inline double number(const json_t *object, const char *name)
{
    const json_t *value = json_object_get(object, name);
    cr_assert(json_is_number(value), "%s is missing or no number", name);
    return json_number_value(value);
}

static inline void assert_text(const json_t *object, const char *name, const char *expected)
{
    cr_assert_str_eq(json_string_value(json_object_get(object, name)), expected, "%s", name);
}

static inline void assert_good(const testing_process_t *process, int32_t cases)
{
    cr_assert_eq(process->exit_code, 0, "exit %d: %s", process->exit_code, process->errors);
    for (int32_t i = 0; i < cases; i++) {
        json_t *object = json_line(process, i);
        cr_assert_eq(number(object, "wrong"), 0);
        cr_assert(json_is_integer(json_object_get(object, "wrong")));
        cr_assert(number(object, "max_rel_err") >= 0 && number(object, "checked_rows") > 0);
        json_decref(object);
    }
}

#endif
