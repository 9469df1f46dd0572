/* One run of moe_layer_bench, and one case of it: a number of tokens on each rank. */
#ifndef EPMOE_BENCH_BENCH_H
#define EPMOE_BENCH_BENCH_H

#include "bench/ceilings.h"
#include "bench/options.h"
#include "bench/reference.h"
#include "bench/routing.h"

typedef struct bench_t {
    program_t *program;
    const options_t *options;
    const char *model; /* the preset's or the checkpoint's name */
    epmoe_backend_t backend;
    epmoe_checkpoint_t *checkpoint; /* NULL: random weights */
    epmoe_layer_config_t config;
    epmoe_layer_t *layer;
    reference_t reference;
    float *selection_bias; /* [E] or NULL */
    routing_t routing;
    ceilings_t ceilings;
    int64_t weight_bytes; /* of this rank */
} bench_t;

/* Buffers of this rank. */
typedef struct bench_case_t {
    int32_t *tokens; /* [size] */
    int32_t num_tokens;
    int64_t first_token; /* global index of this rank's first */
    int64_t total_tokens;
    void *x;             /* [T,d] */
    char *y_guarded;     /* a guard band, y, a guard band */
    char *y;             /* [T,d] */
    void *y_checked;     /* [T,d]: y of the run that is checked */
    int32_t *forced_ids; /* [T,k] or NULL */
    float *logits;       /* [T,E] forced, or NULL */
    float *logits_out;   /* [T,E] */
    int32_t *ids;        /* [T,k] that the layer chose */
    float *weights;      /* [T,k] */
    double *times;       /* [iters]: us, of the slowest rank after case_run */
    double *stage_times; /* [iters,EPMOE_STAGE_COUNT] */
} bench_case_t;

typedef struct case_result_t {
    double us_median, us_min, us_max;
    double stages_us[EPMOE_STAGE_COUNT];
    double floor_us, floor_fraction;
    double tokens_per_s;
    double tflops;
    double wire_gbps, logical_gbps; /* dispatch and combine, the busiest rank */
    double wire_bytes;              /* what the busiest rank sends to others */
    double memory_gbps;             /* what the floor counts, all ranks, over the whole time */
    double load_max_over_mean;      /* slots per expert */
    double rank_load_max_over_mean; /* slots per rank */
    bool checked;
    int64_t checked_rows;
    int64_t wrong;
    double max_rel_err;
} case_result_t;

#define BENCH_GUARD_BYTES 4096

/* Collective, as everything below: all ranks succeed or all get an error. */
epmoe_status_t case_create(bench_case_t *made, const bench_t *bench, int32_t index);
void case_destroy(bench_case_t *made);
/* The run that is checked, into poisoned buffers, then the timed ones; fills the times of `result`. */
epmoe_status_t case_run(bench_case_t *made, const bench_t *bench, case_result_t *result);
/* What the routing drawn asks of each rank; fills the floor, the rates and the loads of `result`. */
epmoe_status_t case_rate(const bench_case_t *made, const bench_t *bench, case_result_t *result);
/* Compares with the reference; fills the check's fields of `result`. */
epmoe_status_t case_verify(const bench_case_t *made, const bench_t *bench, case_result_t *result);

/* Row [d] of x of a global token, whichever rank has it, as rounded to the layer's dtype. */
void case_input_row(const bench_t *bench, int64_t token, double *row);
/* How many of the checked buffer's guard bytes changed. */
int64_t case_guards_changed(const bench_case_t *made, const bench_t *bench);

#endif
