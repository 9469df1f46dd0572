/* One op at one size: its data, how to run it and its reference kernel, and what to compare. */
#ifndef EPMOE_BENCH_OP_JOB_H
#define EPMOE_BENCH_OP_JOB_H

#include "bench/bench.h"
#include "kernels/kernel_table.h"
#include "kernels/route.h"

#include <stddef.h>

#define OP_MAX_OUTPUTS 6
#define OP_MAX_MEMORY  24

/* An output [rows,cols] of the library (out) and of the reference (ref, NULL where `judge` needs none). */
typedef struct op_output_t {
    buffer_t *out; /* one of the job's */
    void *ref;
    const void *initial; /* of an op in place: what its check begins with; NULL otherwise */
    epmoe_dtype_t dtype; /* I32: compared bit by bit */
    int64_t rows;
    int64_t cols;
} op_output_t;

typedef union op_args_t {
    epmoe_topk_args_t topk;
    epmoe_align_args_t align;
    epmoe_permute_args_t permute;
    epmoe_unpermute_args_t unpermute;
    epmoe_grouped_gemm_args_t gemm;
    epmoe_silu_and_mul_args_t silu;
    epmoe_sum_args_t sum;
    epmoei_route_args_t route;
    epmoe_rms_norm_args_t norm;
    epmoe_linear_args_t linear;
    epmoe_rope_args_t rope;
    epmoe_qk_norm_rope_args_t qk;
    epmoe_cache_write_args_t cache;
    struct {
        epmoe_rope_args_t rope;
        epmoe_cache_write_args_t cache;
    } both;
    epmoe_attention_args_t attention;
    epmoe_quantize_fp8_args_t quantize;
    epmoe_dequant_args_t dequant;
    epmoe_sample_args_t sample;
    epmoe_spec_verify_args_t spec;
} op_args_t;

typedef struct op_job_t op_job_t;

typedef struct op_kind_t {
    const char *name;
    epmoe_status_t (*make)(op_job_t *job);
    /* OP_AT of each pointer to the job's memory, then 0: the library gets its own copy's address there. */
    const size_t *pointers;
    epmoe_status_t (*run)(const op_args_t *args, epmoe_stream_t stream);
    epmoe_status_t (*run_reference)(op_job_t *job);
    /* In place of a reference: judges all outputs; counts wrong values, and the largest error. */
    int64_t (*judge)(const op_job_t *job, double *worst);
} op_kind_t;
#define OP_AT(member) offsetof(op_args_t, member)

extern const op_kind_t op_topk, op_align, op_permute, op_unpermute;           /* op_rows.c */
extern const op_kind_t op_grouped_gemm, op_silu_and_mul, op_silu_fp8, op_sum; /* op_math.c */
extern const op_kind_t op_quantize_fp8, op_dequant;                           /* op_quant.c */
extern const op_kind_t op_router;                                             /* op_router.c */
extern const op_kind_t op_rms_norm, op_norm_alone, op_norm_fp8, op_rope;      /* op_dense.c */
extern const op_kind_t op_linear, op_linear_fp8, op_linear_fp8_blocks;        /* op_linear.c */
extern const op_kind_t op_qk_norm_rope, op_cache_write, op_rope_cache_write;
extern const op_kind_t op_attention, op_prefill, op_sample, op_spec_verify; /* op_attention.c */

struct op_job_t {
    const bench_t *bench;
    const op_kind_t *kind;
    int32_t num_tokens;
    op_args_t args;     /* on the host, for the reference */
    op_args_t run_args; /* what the library gets */
    op_output_t outputs[OP_MAX_OUTPUTS];
    int32_t num_outputs;
    epmoei_floor_t floor;
    buffer_t memory[OP_MAX_MEMORY];
    int32_t num_memory;
    /* grouped_gemm, attention, sample: the rows that the reference computes; rows of `out` that it leaves alone are not
     * compared */
    int32_t *reference_offsets;
    int32_t *reference_index;
    int32_t reference_rows;
};

/* Outputs of both kinds start as NaN, or -1. */
epmoe_status_t op_job_create(op_job_t *job, const bench_t *bench, const char *op, int32_t num_tokens);
/* A cuda_timed_fn on a job. */
epmoe_status_t op_job_run(const op_job_t *job);
void op_job_destroy(op_job_t *job);
/* The job's arguments with places[i] for what memory[i] has on the host. */
void op_job_args(const op_job_t *job, void *const places[OP_MAX_MEMORY], op_args_t *args);

/* For the kinds. Memory of the job, freed with it; the library gets its own copy (see op_kind_t). */
epmoe_status_t op_take(op_job_t *job, void **pointer, int64_t bytes);
/* For the reference alone. */
epmoe_status_t op_take_host(op_job_t *job, void **pointer, int64_t bytes);
/* `stream` keeps the arrays of a job apart. */
epmoe_status_t op_take_random(op_job_t *job, void **pointer, epmoe_dtype_t dtype, int64_t count, int32_t stream,
                              float scale);
/* The library's output goes to *out; run_reference finds its own in outputs[].ref. */
epmoe_status_t op_take_output(op_job_t *job, void **out, epmoe_dtype_t dtype, int64_t rows, int64_t cols);
/* [T,k] as the options' routing draws them. */
epmoe_status_t op_take_ids(op_job_t *job, int32_t **ids);
/* The model's rules; without pointers. */
epmoe_topk_args_t op_topk_args(const op_job_t *job);
/* The slots in expert order without padding, for the ops that follow align. */
typedef struct op_order_t {
    int32_t *sorted_ids; /* [T*k] */
    int32_t *num_rows;   /* [1] */
    int32_t *offsets;    /* [E+1] */
} op_order_t;
epmoe_status_t op_take_order(op_job_t *job, op_order_t *order);

#endif
