/* What the commands of moe_tool share: options, numbers, choices. */
#ifndef EPMOE_TOOLS_TOOL_UTIL_H
#define EPMOE_TOOLS_TOOL_UTIL_H

#include "tools/program.h"

/* Each takes argv from its own name on, reports its errors and returns an exit code. */
int tool_op(program_t *program, int argc, char **argv);
int tool_check(program_t *program, int argc, char **argv);
int tool_info(program_t *program, int argc, char **argv);

/* An option that takes a value; a list ends with name NULL. */
typedef struct tool_option_t {
    const char *name;
    const char *value; /* what the help calls the value */
    const char *help;
} tool_option_t;

/* What a command does with an option's value, or with an argument that is no option (option NULL). Returns 0 or an exit
 * code after reporting. */
typedef int (*tool_take_fn)(void *ctx, const char *option, const char *value);

#define TOOL_HELP (-1) /* --help was asked for */

/* Goes through all of argv even after an error, so that the caller knows every option that was given. Returns 0,
 * TOOL_HELP or an exit code after reporting. */
int tool_parse(const program_t *program, int argc, char **argv, const tool_option_t *options, tool_take_fn take,
               void *ctx);
/* Usage line and options on stdout, rank 0 only. */
void tool_print_help(const program_t *program, const char *usage, const tool_option_t *options);

/* The whole text must be a number; false otherwise, and out of [min,max] or not finite. */
bool tool_number(const char *text, int64_t min, int64_t max, int64_t *value);
bool tool_real(const char *text, double *value);
/* Index of text in "a,b,c", -1 when it is not there. */
int32_t tool_choice(const char *choices, const char *text);

/* Readers of one option's value, for tool_take_fn: 0, or an exit code after reporting. */
int tool_take_choice(const program_t *program, const char *option, const char *choices, const char *text,
                     int32_t *index);
int tool_take_number(const program_t *program, const char *option, int64_t min, int64_t max, const char *text,
                     int64_t *value);
int tool_take_positive(const program_t *program, const char *option, const char *text, double *value);

/* The choices of --backend, --dtype and --format, in the order of their index. */
#define TOOL_BACKENDS "auto,cpu,cuda" /* = epmoe_backend_t */
#define TOOL_FORMATS  "table,json"
enum { TOOL_FORMAT_TABLE = 0, TOOL_FORMAT_JSON = 1 };

#endif
