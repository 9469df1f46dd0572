/* Command lines: the first byte chooses the parser, every line of the rest is an argument. Nothing runs but the
 * parsers: those of moe_layer_bench, of moe_tool's commands, and of the settings of its ops. */
#include "bench/options.h"
#include "tests/fuzz/fuzz.h"
#include "tools/tool_op_read.h"
#include "tools/tool_util.h"

#include <getopt.h>
#include <stdlib.h>
#include <string.h>

enum { kMostArguments = 64 };

static const tool_option_t options[] = {
    {"ranks", "R", ""}, {"tol", "X", ""}, {"format", TOOL_FORMATS, ""}, {"set", "KEY=VALUE", ""}, {0},
};

static int take(void *ctx, const char *option, const char *value)
{
    const program_t *program = ctx;
    int64_t number = 0;
    int32_t choice = 0;
    double real = 0;
    fuzz_require(value != NULL, "an option without a value");
    if (!option) return PROGRAM_OK;
    if (!strcmp(option, "ranks")) {
        int code = tool_take_number(program, option, 1, 4096, value, &number);
        fuzz_require(code || (number >= 1 && number <= 4096), "a number out of range");
        return code;
    }
    if (!strcmp(option, "tol")) return tool_take_positive(program, option, value, &real);
    if (!strcmp(option, "format")) return tool_take_choice(program, option, TOOL_FORMATS, value, &choice);
    return PROGRAM_OK;
}

static void parse_settings(int argc, char **argv)
{
    for (const op_t *op = tool_ops; op->name; op++) {
        op_context_t context;
        op_context_init(&context, op, EPMOE_BACKEND_CPU);
        epmoe_status_t status = EPMOE_OK;
        for (int i = 1; i < argc && status == EPMOE_OK; i++) status = op_set_key(&context, argv[i]);
        if (status == EPMOE_OK) status = op_finish_keys(&context);
        if (status == EPMOE_OK && op->check) (void)op->check(&context);
        op_context_free(&context);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static options_t parsed;
    program_t program = {.name = "fuzz", .size = 1 + (size > 0 && data[0] >> 7), .local_size = 1};
    char *text, *argv[kMostArguments + 1] = {"fuzz"};
    int argc = 1;
    if (size < 1) return 0;
    text = malloc(size);
    fuzz_require(text != NULL, "no memory for the arguments");
    memcpy(text, data + 1, size - 1);
    text[size - 1] = 0;
    for (char *rest = text, *line; argc < kMostArguments && (line = strsep(&rest, "\n"));) argv[argc++] = line;

    optind = 0;
    if (data[0] % 3 == 0) {
        if (options_parse(&parsed, &program, argc, argv) == PROGRAM_OK && parsed.action == ACTION_BENCH)
            fuzz_require(parsed.num_cases >= 1 && parsed.num_cases <= OPTIONS_MAX_LIST && parsed.timeout_s > 0,
                         "options out of range");
    } else if (data[0] % 3 == 1) {
        (void)tool_parse(&program, argc, argv, options, take, &program);
    } else {
        parse_settings(argc, argv);
    }
    free(text);
    fuzz_require(epmoei_alloc_live() == 0, "memory is left");
    return 0;
}
