/* The ops that compute on rows: grouped_gemm, silu_and_mul, sum. */
#include "bench/op_job.h"

#include "base/dtype.h"
#include "kernels/grouped_gemm.h"
#include "kernels/random_weights.h"
#include "kernels/silu_and_mul.h"
#include "kernels/sum.h"

/* The reference GEMM is a plain loop: of a large product it computes as many rows as this allows. */
#define REFERENCE_FLOPS 4e9
#define REFERENCE_ROWS  256

static epmoe_status_t run_gemm(const op_args_t *args, epmoe_stream_t stream)
{
    epmoe_grouped_gemm_args_t own = args->gemm;
    own.layout = EPMOE_LAYOUT_PACKED;
    return epmoe_grouped_gemm(&own, stream);
}

static epmoe_status_t reference_gemm(op_job_t *job)
{
    epmoe_grouped_gemm_args_t args;
    EPMOEI_CHECK(epmoei_grouped_gemm_check(&job->args.gemm, &args));
    args.expert_offsets = job->reference_offsets;
    args.row_index = job->reference_index;
    args.y = job->outputs[0].ref;
    return epmoei_grouped_gemm_ref(&args, NULL);
}

/* An even choice of the rows, expert by expert. */
static epmoe_status_t choose_reference_rows(op_job_t *job)
{
    const epmoe_grouped_gemm_args_t *args = &job->args.gemm;
    double affordable = REFERENCE_FLOPS / (2.0 * args->n * args->k);
    int64_t rows = args->max_rows,
            wanted = affordable < 1 ? 1 : (int64_t)epmoei_min64(REFERENCE_ROWS, (int64_t)affordable);
    int32_t chosen = 0;
    EPMOEI_CHECK(op_take_host(job, (void **)&job->reference_offsets, ((int64_t)args->num_experts + 1) * 4));
    EPMOEI_CHECK(op_take_host(job, (void **)&job->reference_index, rows * 4));
    for (int32_t e = 0; e < args->num_experts; e++) {
        job->reference_offsets[e] = chosen;
        for (int32_t r = args->expert_offsets[e]; r < args->expert_offsets[e + 1]; r++)
            if ((r + 1) * wanted / rows > r * wanted / rows || wanted >= rows)
                job->reference_index[chosen++] = args->row_index[r];
    }
    job->reference_offsets[args->num_experts] = chosen;
    job->reference_rows = chosen;
    return EPMOE_OK;
}

static const size_t gemm_pointers[] = {OP_AT(gemm.expert_offsets),
                                       OP_AT(gemm.row_index),
                                       OP_AT(gemm.x),
                                       OP_AT(gemm.weight.data),
                                       OP_AT(gemm.y),
                                       OP_AT(gemm.workspace),
                                       0};

/* GEMM 1 of the model with its activation: the weights of every expert, a row of x for each token. */
static epmoe_status_t make_gemm(op_job_t *job)
{
    const epmoe_layer_config_t *config = &job->bench->config;
    epmoe_grouped_gemm_args_t *args = &job->args.gemm;
    int64_t slots = (int64_t)job->num_tokens * config->top_k, d = config->hidden, f = config->intermediate;
    int32_t active = 0;
    op_order_t order;
    EPMOEI_CHECK(op_take_order(job, &order));
    *args = (epmoe_grouped_gemm_args_t)EPMOE_GROUPED_GEMM_ARGS_INIT;
    args->backend = job->bench->backend;
    args->num_experts = config->num_experts;
    args->n = 2 * config->intermediate;
    args->k = config->hidden;
    args->max_rows = (int32_t)slots;
    args->expert_offsets = order.offsets;
    args->row_index = order.sorted_ids;
    args->num_slots = (int32_t)slots;
    args->x_row_divisor = config->top_k;
    args->x_dtype = args->y_dtype = config->dtype;
    args->weight = (epmoe_weight_t)EPMOE_WEIGHT_INIT;
    args->weight.format = epmoei_format_of_dtype(config->dtype);
    /* What PACKED means on the backend, for a reference that knows the host's. */
    args->layout = args->backend == EPMOE_BACKEND_CUDA ? EPMOE_LAYOUT_INTERLEAVED : EPMOE_LAYOUT_GATE_FIRST;
    args->activation = config->activation;
    args->alpha = config->alpha;
    args->limit = config->limit;
    EPMOEI_CHECK(op_take_random(job, (void **)&args->x, config->dtype, job->num_tokens * d, 0, 1));
    EPMOEI_CHECK(op_take_random(job, (void **)&args->weight.data, config->dtype, config->num_experts * 2 * f * d, 1,
                                epmoei_random_scale(EPMOEI_RANDOM_GATE, d)));
    EPMOEI_CHECK(op_take_output(job, &args->y, config->dtype, slots, f));
    EPMOEI_CHECK(choose_reference_rows(job));
    EPMOEI_CHECK(epmoe_grouped_gemm_workspace_size(args, &args->workspace_bytes));
    args->workspace_bytes = epmoei_max64(args->workspace_bytes, epmoei_grouped_gemm_workspace_ref(args));
    EPMOEI_CHECK(op_take(job, &args->workspace, args->workspace_bytes));
    for (int32_t e = 0; e < config->num_experts; e++) active += order.offsets[e + 1] > order.offsets[e];
    epmoe_grouped_gemm_args_t checked;
    EPMOEI_CHECK(epmoei_grouped_gemm_check(args, &checked));
    job->floor = epmoei_grouped_gemm_floor(&checked, active, slots);
    return EPMOE_OK;
}

static epmoe_status_t run_silu(const op_args_t *args, epmoe_stream_t stream)
{
    return epmoe_silu_and_mul(&args->silu, stream);
}

static epmoe_status_t reference_silu(op_job_t *job)
{
    epmoe_silu_and_mul_args_t args;
    EPMOEI_CHECK(epmoei_silu_and_mul_check(&job->args.silu, &args));
    args.y = job->outputs[0].ref;
    args.scale = args.quant ? job->outputs[1].ref : NULL;
    return epmoei_silu_and_mul_ref(&args, NULL);
}

static const size_t silu_pointers[] = {OP_AT(silu.x), OP_AT(silu.y), OP_AT(silu.scale), 0};

static epmoe_status_t make_gated(op_job_t *job, epmoe_granularity_t quant)
{
    const epmoe_layer_config_t *config = &job->bench->config;
    epmoe_silu_and_mul_args_t *args = &job->args.silu;
    int64_t rows = (int64_t)job->num_tokens * config->top_k, f = config->intermediate;
    if (rows > INT32_MAX)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%d tokens are too many rows", job->num_tokens);
    *args = (epmoe_silu_and_mul_args_t)EPMOE_SILU_AND_MUL_ARGS_INIT;
    args->backend = job->bench->backend;
    args->num_tokens = (int32_t)rows;
    args->width = config->intermediate;
    args->dtype = config->dtype;
    args->activation = config->activation;
    args->alpha = config->alpha;
    args->limit = config->limit;
    EPMOEI_CHECK(op_take_random(job, (void **)&args->x, config->dtype, rows * 2 * f, 0, 1));
    args->quant = quant;
    EPMOEI_CHECK(op_take_output(job, &args->y, quant ? EPMOE_F8_E4M3 : config->dtype, rows, f));
    if (quant) EPMOEI_CHECK(op_take_output(job, (void **)&args->scale, EPMOE_F32, rows, epmoei_ceil_div(f, 128)));
    epmoe_silu_and_mul_args_t checked;
    EPMOEI_CHECK(epmoei_silu_and_mul_check(args, &checked));
    job->floor = epmoei_silu_and_mul_floor(&checked);
    return EPMOE_OK;
}

static epmoe_status_t make_silu(op_job_t *job) { return make_gated(job, 0); }
static epmoe_status_t make_silu_fp8(op_job_t *job) { return make_gated(job, EPMOE_GRANULARITY_BLOCK128); }

static epmoe_status_t run_sum(const op_args_t *args, epmoe_stream_t stream) { return epmoe_sum(&args->sum, stream); }

static epmoe_status_t reference_sum(op_job_t *job)
{
    epmoe_sum_args_t args;
    EPMOEI_CHECK(epmoei_sum_check(&job->args.sum, &args));
    args.out = job->outputs[0].ref;
    return epmoei_sum_ref(&args, NULL);
}

static const size_t sum_pointers[] = {OP_AT(sum.y), OP_AT(sum.weights), OP_AT(sum.out), 0};

static epmoe_status_t make_sum(op_job_t *job)
{
    const epmoe_layer_config_t *config = &job->bench->config;
    epmoe_sum_args_t *args = &job->args.sum;
    int64_t slots = (int64_t)job->num_tokens * config->top_k;
    *args = (epmoe_sum_args_t)EPMOE_SUM_ARGS_INIT;
    args->backend = job->bench->backend;
    args->num_tokens = job->num_tokens;
    args->top_k = config->top_k;
    args->hidden = config->hidden;
    args->y_dtype = config->dtype;
    EPMOEI_CHECK(op_take_random(job, (void **)&args->y, config->dtype, slots * config->hidden, 0, 1));
    EPMOEI_CHECK(op_take_random(job, (void **)&args->weights, EPMOE_F32, slots, 1, 1));
    EPMOEI_CHECK(op_take_output(job, &args->out, config->dtype, job->num_tokens, config->hidden));
    epmoe_sum_args_t checked;
    EPMOEI_CHECK(epmoei_sum_check(args, &checked));
    job->floor = epmoei_sum_floor(&checked);
    return EPMOE_OK;
}

const op_kind_t op_grouped_gemm = {"grouped_gemm", make_gemm, gemm_pointers, run_gemm, reference_gemm, NULL};
const op_kind_t op_silu_and_mul = {"silu_and_mul", make_silu, silu_pointers, run_silu, reference_silu, NULL};
const op_kind_t op_silu_fp8 = {"silu_and_mul_fp8", make_silu_fp8, silu_pointers, run_silu, reference_silu, NULL};
const op_kind_t op_sum = {"sum", make_sum, sum_pointers, run_sum, reference_sum, NULL};
