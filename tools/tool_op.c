#include "tools/tool_op_read.h"
#include "tools/tool_util.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const tool_option_t options[] = {
    {"in", "FILE", "the op's tensors (.safetensors)"},
    {"out", "FILE", "where its outputs go; on an error there is no such file"},
    {"set", "KEY=VALUE ...", "settings of the op"},
    {"backend", TOOL_BACKENDS, "default auto"},
    {0},
};
static const char usage[] = "op NAME --in FILE --out FILE [--set KEY=VALUE ...] [--backend B]";

typedef struct op_arguments_t {
    const program_t *program;
    const char *name;
    const char *in;
    const char *out;
    const char **settings;
    int32_t num_settings;
    bool after_set; /* further KEY=VALUE may follow */
    int32_t backend;
} op_arguments_t;

static int take(void *ctx, const char *option, const char *value)
{
    op_arguments_t *arguments = ctx;
    if (!option && arguments->after_set && strchr(value, '=')) {
        arguments->settings[arguments->num_settings++] = value;
        return PROGRAM_OK;
    }
    arguments->after_set = false;
    if (!option) {
        if (arguments->name)
            return program_error_once(arguments->program, PROGRAM_BAD_INPUT, "argument '%s' is unknown: usage: %s",
                                      value, usage);
        arguments->name = value;
        return PROGRAM_OK;
    }
    if (!strcmp(option, "backend"))
        return tool_take_choice(arguments->program, option, TOOL_BACKENDS, value, &arguments->backend);
    if (!strcmp(option, "set")) {
        arguments->settings[arguments->num_settings++] = value;
        arguments->after_set = true;
    } else if (!strcmp(option, "in")) {
        arguments->in = value;
    } else {
        arguments->out = value;
    }
    return PROGRAM_OK;
}

static void print_help(const program_t *program)
{
    tool_print_help(program, usage, options);
    if (program->rank) return;
    for (const op_t *op = tool_ops; op->name; op++) {
        printf("\n%s%s\n", op->name, op->run ? "" : "   (not supported by this version)");
        if (!op->run) continue;
        printf("  in ");
        for (const op_tensor_t *tensor = op->tensors; tensor->name; tensor++)
            printf(" %s [%s]%s", tensor->name, tensor->shape, tensor->optional ? "?" : "");
        printf("\n  set");
        for (const op_key_t *key = op->keys; key->name; key++)
            printf(" %s=%s%s%s%s", key->name,
                   key->choices   ? key->choices
                   : key->initial ? key->initial
                                  : "...",
                   key->choices && key->initial ? " (" : "", key->choices && key->initial ? key->initial : "",
                   key->choices && key->initial ? ")" : "");
        printf("\n  out %s\n", op->outputs);
    }
}

static const op_t *find_op(const char *name)
{
    for (const op_t *op = tool_ops; op->name; op++)
        if (!strcmp(op->name, name)) return op;
    return NULL;
}

static epmoe_status_t unknown_op(const char *name)
{
    char known[512];
    size_t used = 0;
    for (const op_t *op = tool_ops; op->name && used < sizeof known; op++)
        used += (size_t)snprintf(known + used, sizeof known - used, "%s%s", op == tool_ops ? "" : ", ", op->name);
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "op '%s' is unknown: expected one of %s", name, known);
}

/* Removes what --out names, so that no old result can be taken for this run's. Only a regular file is ever removed, and
 * never the input. */
static epmoe_status_t remove_output(const op_arguments_t *arguments)
{
    struct stat in, out, link;
    if (lstat(arguments->out, &link)) return EPMOE_OK;
    if (!stat(arguments->out, &out)) {
        if (!S_ISREG(out.st_mode))
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "--out is '%s': expected a regular file", arguments->out);
        if (arguments->in && !stat(arguments->in, &in) && in.st_dev == out.st_dev && in.st_ino == out.st_ino)
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "--out is '%s': expected another file than --in",
                               arguments->out);
    }
    if (unlink(arguments->out))
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "--out is '%s', which cannot be replaced: %s", arguments->out,
                           strerror(errno));
    return EPMOE_OK;
}

static epmoe_status_t run_op(const op_arguments_t *arguments, op_context_t *context)
{
    epmoe_status_t status;
    epmoei_safetensors_t *file = NULL;
    for (int32_t i = 0; i < arguments->num_settings; i++) EPMOEI_CHECK(op_set_key(context, arguments->settings[i]));
    EPMOEI_CHECK(op_finish_keys(context));
    if (context->op->check) EPMOEI_CHECK(context->op->check(context));

    EPMOEI_CHECK(epmoei_safetensors_open(arguments->in, &file));
    status = op_read_tensors(context, file);
    if (status == EPMOE_OK) status = context->op->run(context);
    if (status == EPMOE_OK) status = op_finish(context);
    epmoei_safetensors_close(file);
    return status;
}

static int work(const program_t *program, const op_arguments_t *arguments)
{
    if (!arguments->name)
        return program_error_once(program, PROGRAM_BAD_INPUT, "the op's NAME is missing: usage: moe_tool %s", usage);
    const op_t *op = find_op(arguments->name);
    if (!op) return program_report(program, unknown_op(arguments->name));
    if (!arguments->in || !arguments->out)
        return program_error_once(program, PROGRAM_BAD_INPUT, "%s is missing: usage: moe_tool %s",
                                  arguments->in ? "--out" : "--in", usage);
    epmoe_backend_t backend;
    epmoe_status_t status = epmoe_backend_resolve((epmoe_backend_t)arguments->backend, &backend);
    if (status != EPMOE_OK) return program_report(program, status);

    op_context_t context;
    op_context_init(&context, op, backend);
    status = run_op(arguments, &context);
    int code = program_report(program, status);
    if (!code) {
        status = safetensors_write(arguments->out, context.outputs, context.num_outputs);
        program_report(program, status);
        /* A full disk is a failure of this run, not of its input. */
        code = status == EPMOE_ERROR_IO ? PROGRAM_FAILED : program_exit_code(status);
    }
    op_context_free(&context);
    return code;
}

int tool_op(program_t *program, int argc, char **argv)
{
    op_arguments_t arguments = {.program = program};
    arguments.settings = calloc((size_t)argc, sizeof *arguments.settings);
    if (!arguments.settings) return program_error(program, PROGRAM_FAILED, "no memory for the arguments");
    int code = tool_parse(program, argc, argv, options, take, &arguments);
    if (code == TOOL_HELP) {
        print_help(program);
        free(arguments.settings);
        return PROGRAM_OK;
    }
    if (arguments.out) {
        epmoe_status_t removed = remove_output(&arguments);
        if (!code) code = program_report(program, removed);
    }
    if (!code) code = work(program, &arguments);
    free(arguments.settings);
    return code;
}
