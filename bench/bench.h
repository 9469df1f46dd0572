/* One run of moe_layer_bench, and one case of it: a number of tokens on each rank. */
#ifndef EPMOE_BENCH_BENCH_H
#define EPMOE_BENCH_BENCH_H

#include "bench/buffer.h"
#include "bench/ceilings.h"
#include "bench/decoder.h"
#include "bench/options.h"
#include "bench/reference.h"
#include "bench/routing.h"
#include "comm/placement.h"

#include <stdio.h>

typedef struct bench_t {
    program_t *program;
    const options_t *options;
    const char *model; /* the preset's or the checkpoint's name */
    epmoe_backend_t backend;
    cuda_t cuda; /* of the CUDA backend */
    bool graph;
    int32_t iters;
    int32_t warmup;
    epmoe_checkpoint_t *checkpoint; /* NULL: random weights */
    epmoe_layer_config_t config;
    epmoe_layer_t *layer; /* of run.decoder with --decoder */
    decoder_run_t run;
    epmoe_ep_t *barrier; /* see cuda_timing_t; NULL where the transport has none */
    reference_t reference;
    float *selection_bias; /* [E] or NULL */
    routing_t routing;
    int32_t *placement;         /* [config.num_physical] or NULL: contiguous; this and the next see placement.h */
    epmoei_placement_t *placed; /* as this rank's tokens use it */
    ceilings_t ceilings;
    int64_t weight_bytes; /* of this rank */
    FILE *plot;           /* the cases' lines in JSON, or NULL; see plot.h */
} bench_t;

/* As --backend and --dtype spell them. */
static inline const char *bench_backend_name(const bench_t *bench)
{
    return bench->backend == EPMOE_BACKEND_CUDA ? "cuda" : "cpu";
}

static inline const char *bench_dtype_name(const bench_t *bench)
{
    epmoe_dtype_t dtype = bench->config.dtype;
    switch (bench->options->weight_format) {
    case EPMOE_FORMAT_FP8_BLOCK: return "fp8";
    case EPMOE_FORMAT_W4: return "w4";
    case EPMOE_FORMAT_MXFP4: return "mxfp4";
    default: break;
    }
    return dtype == EPMOE_F32 ? "fp32" : dtype == EPMOE_F16 ? "fp16" : "bf16";
}

/* Bytes of a row of x on its way to another rank. */
static inline double bench_wire_row(const epmoe_layer_config_t *config)
{
    double d = config->hidden;
    return config->wire_dtype == EPMOE_F8_E4M3 ? d + 4.0 * ((config->hidden + 127) / 128)
                                               : d * epmoe_dtype_size(config->dtype);
}

/* As --wire spells it. */
static inline const char *bench_wire_name(const bench_t *bench)
{
    return bench->options->wire_dtype == EPMOE_F8_E4M3 ? "fp8" : "dtype";
}

/* What one rank has of a case. */
typedef struct bench_case_t {
    int32_t *tokens; /* [size] */
    int32_t num_tokens;
    int64_t first_token; /* global index of this rank's first */
    int64_t total_tokens;
    int32_t *forced_ids;   /* [T,k] or NULL */
    buffer_t x;            /* [T,d] */
    buffer_t y;            /* [T,d] */
    buffer_t logits;       /* [T,E] forced, not made otherwise */
    buffer_t logits_out;   /* [T,E] */
    buffer_t ids;          /* [T,k] that the layer chose */
    buffer_t weights;      /* [T,k] */
    decoder_batch_t batch; /* with --decoder */
    void *y_checked;       /* [T,d]: y of the run that is checked */
    double *times;         /* [iters]: us, of the slowest rank after case_run */
    double *stage_times;   /* [iters,EPMOE_STAGE_COUNT] */
} bench_case_t;

typedef struct case_result_t {
    double us_median, us_min, us_max;
    double stages_us[EPMOE_STAGE_COUNT];
    double floor_us, floor_fraction;
    double copy_fraction; /* of an op that memory bounds: the same bytes at the speed of a copy; otherwise NaN */
    int32_t calls;        /* of an op, in one timed run; the times are of one */
    double tokens_per_s;
    double tflops;
    double wire_gbps, logical_gbps; /* dispatch and combine, the busiest rank */
    double wire_bytes;              /* what the busiest rank sends to others */
    double memory_gbps;             /* what the floor counts, all ranks, over the whole time */
    double load_max_over_mean;      /* slots per physical expert */
    double rank_load_max_over_mean; /* slots per rank */
    bool checked;
    int64_t checked_rows;
    int64_t wrong;
    double max_rel_err;
} case_result_t;

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
/* How many guard bytes around its buffers changed. */
int64_t case_guards_changed(const bench_case_t *made);

#endif
