/* moe_tool: one op on tensors from a file, a checkpoint against recorded outputs, what a checkpoint is. */
#include "tools/tool_util.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name;
    int (*run)(program_t *program, int argc, char **argv);
    bool all_ranks; /* otherwise rank 0 works alone */
    const char *help;
} commands[] = {
    {"op", tool_op, false, "run one op on the tensors of a .safetensors file"},
    {"check", tool_check, true, "compare a checkpoint's MoE blocks with recorded outputs"},
    {"info", tool_info, false, "what a checkpoint is, and what it takes per rank"},
};
#define COMMAND_COUNT (sizeof commands / sizeof commands[0])

static void print_usage(FILE *file)
{
    fprintf(file, "usage: moe_tool COMMAND ...   (each has --help)\n");
    for (size_t i = 0; i < COMMAND_COUNT; i++) fprintf(file, "  %-8s %s\n", commands[i].name, commands[i].help);
    fprintf(file, "exit: 0 success, 1 failed or wrong, 2 bad input, 3 not supported\n");
}

static int dispatch(program_t *program, int argc, char **argv)
{
    if (argc < 2) {
        if (!program->rank) print_usage(stderr);
        return PROGRAM_BAD_INPUT;
    }
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h")) {
        if (!program->rank) print_usage(stdout);
        return PROGRAM_OK;
    }
    if (!strcmp(argv[1], "--version")) {
        int32_t version = epmoe_version();
        if (!program->rank) printf("%d.%d.%d\n", version / 10000, version / 100 % 100, version % 100);
        return PROGRAM_OK;
    }
    for (size_t i = 0; i < COMMAND_COUNT; i++) {
        if (strcmp(argv[1], commands[i].name)) continue;
        if (program->rank && !commands[i].all_ranks) return PROGRAM_OK;
        return commands[i].run(program, argc - 1, argv + 1);
    }
    return program_error_once(program, PROGRAM_BAD_INPUT, "command '%s' is unknown: expected op, check or info",
                              argv[1]);
}

/* Warnings wait for the end, so that stderr begins with the error when there is one. */
static void keep_log(void *ctx, epmoe_log_level_t level, const char *message)
{
    if (level == EPMOE_LOG_WARNING) fprintf(ctx, "moe_tool: warning: %s\n", message);
}

int main(int argc, char **argv)
{
    program_t program;
    char *warnings = NULL;
    size_t length = 0;
    int code = program_start(&program, "moe_tool", &argc, &argv);
    FILE *log = program.rank ? NULL : open_memstream(&warnings, &length);
    if (log) epmoe_set_log(keep_log, log);
    if (!code) code = dispatch(&program, argc, argv);
    epmoe_set_log(NULL, NULL);
    if (log && !fclose(log)) fputs(warnings, stderr);
    free(warnings);
    return program_finish(&program, code);
}
