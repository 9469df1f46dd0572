/* The command line of moe_layer_bench. */
#ifndef EPMOE_BENCH_OPTIONS_H
#define EPMOE_BENCH_OPTIONS_H

#include "bench/routing.h"
#include "tools/program.h"

#include <string.h>

#define OPTIONS_MAX_LIST 4096
#define OPTIONS_MAX_OPS  64

typedef enum options_action_t { ACTION_BENCH, ACTION_HELP, ACTION_LIST_MODELS } options_action_t;

/* Strings point into argv or are constants. */
typedef struct options_t {
    options_action_t action;
    const char *model;      /* NULL with a checkpoint */
    const char *checkpoint; /* NULL with a model */
    int32_t layer;          /* -1: the first with experts */
    int32_t num_cases;
    int32_t tokens[OPTIONS_MAX_LIST];          /* of every rank, case by case */
    int32_t num_per_rank;                      /* 0 without --tokens-per-rank */
    int32_t tokens_per_rank[OPTIONS_MAX_LIST]; /* of the one case */
    int64_t capacity;                          /* 0: the worst case */
    int32_t comm_sms;                          /* 0: all */
    epmoe_dtype_t dtype;
    epmoe_format_t weight_format; /* of random weights; NONE: that of dtype */
    int32_t fp8_activations;      /* 0: the layer chooses */
    epmoe_dtype_t wire_dtype;     /* of the experts' x: NONE = dtype, or F8_E4M3 */
    bool decoder;
    int32_t context; /* of each sequence of a decode step; 0: prefill */
    routing_kind_t routing;
    double zipf_exponent;
    bool balanced;        /* a placement is planned */
    int32_t num_physical; /* of it; 0: one more expert on each rank */
    const char *routing_path;
    epmoe_backend_t backend;
    epmoe_transport_t transport;
    int32_t iters; /* these three: -1 where the backend decides */
    int32_t warmup;
    int32_t graph;
    bool check;
    bool json;
    const char *plot_path; /* or NULL */
    uint64_t seed;
    double timeout_s;
    int32_t num_ops; /* 0: the layer */
    const char *ops[OPTIONS_MAX_OPS];
    int32_t hidden, intermediate, top_k; /* of the ops, in place of the model's; 0: the model's */
    int32_t heads, kv_heads, head_dim;   /* the same; heads 0: the model's */
    int32_t inject_sleep_rank;           /* -1: none */
    int32_t inject_sleep_ms;
    bool inject_nan;
} options_t;

/* Whether it is the exchange that runs, the one op of several ranks. */
static inline bool options_exchange(const options_t *options)
{
    return options->num_ops == 1 && !strcmp(options->ops[0], "exchange");
}

/* Reads and checks the arguments. Every rank finds the same; 0 or an exit code after rank 0 reported. */
int options_parse(options_t *options, const program_t *program, int argc, char **argv);
void options_print_help(void);

#endif
