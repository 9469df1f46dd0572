#include "tools/tool_util.h"

#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_OPTIONS 32

static void list_options(const tool_option_t *options, char *text, size_t size)
{
    size_t used = 0;
    text[0] = 0;
    for (; options->name && used < size; options++)
        used += (size_t)snprintf(text + used, size - used, "--%s, ", options->name);
    if (used < size) snprintf(text + used, size - used, "--help");
}

static int refuse_option(const program_t *program, const tool_option_t *options, char **argv, int result)
{
    char letter[] = {'-', (char)optopt, 0};
    const char *given = optopt ? letter : argv[optind - 1];
    if (result == ':') return program_error_once(program, PROGRAM_BAD_INPUT, "option '%s' needs a value", given);
    char known[512];
    list_options(options, known, sizeof known);
    return program_error_once(program, PROGRAM_BAD_INPUT, "option '%s' is unknown: expected %s", given, known);
}

int tool_parse(const program_t *program, int argc, char **argv, const tool_option_t *options, tool_take_fn take,
               void *ctx)
{
    struct option table[MAX_OPTIONS] = {0};
    int32_t count = 0;
    for (; options[count].name && count < MAX_OPTIONS - 2; count++)
        table[count] = (struct option){options[count].name, required_argument, NULL, 0};
    table[count] = (struct option){"help", no_argument, NULL, 'h'};

    /* "-" hands out other arguments in their place, ":" tells a missing value from an unknown option. */
    int code = PROGRAM_OK, index = 0, result;
    optind = 0;
    opterr = 0;
    while ((result = getopt_long(argc, argv, "-:h", table, &index)) != -1) {
        int one = PROGRAM_OK;
        if (result == 'h')
            one = TOOL_HELP;
        else if (result == '?' || result == ':')
            one = refuse_option(program, options, argv, result);
        else
            one = take(ctx, result ? NULL : options[index].name, optarg);
        if (!code) code = one;
    }
    for (; optind < argc; optind++) { /* what follows "--" */
        int one = take(ctx, NULL, argv[optind]);
        if (!code) code = one;
    }
    return code;
}

void tool_print_help(const program_t *program, const char *usage, const tool_option_t *options)
{
    if (program->rank) return;
    printf("usage: moe_tool %s\n", usage);
    for (; options->name; options++) {
        char left[64];
        snprintf(left, sizeof left, "--%s %s", options->name, options->value);
        printf("  %-24s %s\n", left, options->help);
    }
}

bool tool_number(const char *text, int64_t min, int64_t max, int64_t *value)
{
    char *end;
    errno = 0;
    long long number = strtoll(text, &end, 10);
    if (end == text || *end || errno || number < min || number > max) return false;
    *value = number;
    return true;
}

bool tool_real(const char *text, double *value)
{
    char *end;
    double number = strtod(text, &end);
    if (end == text || *end || !isfinite(number)) return false;
    *value = number;
    return true;
}

int32_t tool_choice(const char *choices, const char *text)
{
    size_t length = strlen(text);
    for (int32_t i = 0;; i++) {
        size_t piece = strcspn(choices, ",");
        if (piece == length && !memcmp(choices, text, length)) return i;
        if (!choices[piece]) return -1;
        choices += piece + 1;
    }
}

int tool_take_choice(const program_t *program, const char *option, const char *choices, const char *text,
                     int32_t *index)
{
    *index = tool_choice(choices, text);
    if (*index >= 0) return PROGRAM_OK;
    *index = 0;
    return program_error_once(program, PROGRAM_BAD_INPUT, "--%s is '%s': expected one of %s", option, text, choices);
}

int tool_take_number(const program_t *program, const char *option, int64_t min, int64_t max, const char *text,
                     int64_t *value)
{
    if (tool_number(text, min, max, value)) return PROGRAM_OK;
    return program_error_once(program, PROGRAM_BAD_INPUT, "--%s is '%s': expected a whole number from %lld to %lld",
                              option, text, (long long)min, (long long)max);
}

int tool_take_positive(const program_t *program, const char *option, const char *text, double *value)
{
    if (tool_real(text, value) && *value > 0) return PROGRAM_OK;
    return program_error_once(program, PROGRAM_BAD_INPUT, "--%s is '%s': expected a number above 0", option, text);
}
