#include "bench/op_job.h"

#include "bench/random.h"
#include "bench/selection.h"
#include "bench/stats.h"

#include "base/dtype.h"
#include "kernels/align.h"
#include "kernels/grouped_gemm.h"
#include "kernels/permute.h"
#include "kernels/silu_and_mul.h"
#include "kernels/sum.h"
#include "kernels/topk.h"
#include "kernels/random_weights.h"

#include <string.h>

/* The reference GEMM is a plain loop: of a large product it computes as many rows as this allows. */
#define REFERENCE_FLOPS 4e9
#define REFERENCE_ROWS  256

/* Memory of the job, freed with it; the library finds it where `twin` says. */
static epmoe_status_t take(op_job_t *job, void **pointer, int64_t bytes)
{
    buffer_t *buffer = &job->memory[job->num_memory++];
    EPMOEI_CHECK(buffer_create(buffer, job->bench->backend, bytes, "the op's data"));
    *pointer = buffer->host;
    return EPMOE_OK;
}

/* For the reference alone. */
static epmoe_status_t take_host(op_job_t *job, void **pointer, int64_t bytes)
{
    buffer_t *buffer = &job->memory[job->num_memory++];
    EPMOEI_CHECK(buffer_create(buffer, EPMOE_BACKEND_CPU, bytes, "the reference's data"));
    *pointer = buffer->host;
    return EPMOE_OK;
}

/* Where the library finds what the bench has at `host`. */
static void *twin(const op_job_t *job, const void *host)
{
    for (int32_t i = 0; i < job->num_memory && host; i++)
        if (job->memory[i].host == host) return job->memory[i].run;
    return NULL;
}

/* `stream` keeps the arrays of a job apart. */
static epmoe_status_t take_random(op_job_t *job, void **pointer, epmoe_dtype_t dtype, int64_t count, int32_t stream,
                                  float scale)
{
    enum { kPiece = 1 << 16 };
    int64_t size = epmoe_dtype_size(dtype);
    EPMOEI_CHECK(take(job, pointer, count * size));
    char *data = *pointer;
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < count; first += kPiece)
        epmoei_random_fill(data + first * size, dtype, job->bench->options->seed + RANDOM_OP, EPMOEI_RANDOM_ROUTER,
                           stream, first, epmoei_min64(kPiece, count - first), scale);
    return EPMOE_OK;
}

/* The library's output goes to *out; run_reference finds its own in outputs[].ref. */
static epmoe_status_t take_output(op_job_t *job, void **out, epmoe_dtype_t dtype, int64_t rows, int64_t cols)
{
    op_output_t *output = &job->outputs[job->num_outputs++];
    *output = (op_output_t){.out = &job->memory[job->num_memory], .dtype = dtype, .rows = rows, .cols = cols};
    EPMOEI_CHECK(take(job, out, rows * cols * epmoe_dtype_size(dtype)));
    return job->kind->judge ? EPMOE_OK : take_host(job, &output->ref, rows * cols * epmoe_dtype_size(dtype));
}

static epmoe_status_t take_ids(op_job_t *job, int32_t **ids)
{
    EPMOEI_CHECK(take(job, (void **)ids, (int64_t)job->num_tokens * job->bench->config.top_k * 4));
    return routing_draw(&job->bench->routing, job->num_tokens, 0, job->num_tokens, *ids);
}

static epmoe_status_t run_topk(const op_args_t *args, epmoe_stream_t stream) { return epmoe_topk(&args->topk, stream); }

/* By the rules in double precision: two correct kernels may differ in a last bit of a score, and so in a choice. */
static int64_t judge_topk(const op_job_t *job, double *worst)
{
    const epmoe_topk_args_t *args = &job->args.topk;
    const epmoe_layer_config_t *config = &job->bench->config;
    int64_t k = args->top_k, wrong = 0;
    for (int64_t t = 0; t < args->num_tokens; t++) {
        const float *logits = (const float *)args->logits + t * args->num_experts;
        double expected[EPMOE_MAX_TOP_K], weights[EPMOE_MAX_TOP_K];
        int32_t bad = selection_count_wrong(config, args->selection_bias, logits, args->ids + t * k);
        wrong += bad;
        if (bad) continue;
        selection_weights(config, logits, args->ids + t * k, expected);
        for (int64_t j = 0; j < k; j++) weights[j] = (double)args->weights[t * k + j];
        wrong += stats_count_wrong(weights, expected, k, stats_tolerance(EPMOE_F32), worst);
    }
    return wrong;
}

static void place_topk(const op_job_t *job, op_args_t *args)
{
    args->topk.logits = twin(job, args->topk.logits);
    args->topk.selection_bias = twin(job, args->topk.selection_bias);
    args->topk.ids = twin(job, args->topk.ids);
    args->topk.weights = twin(job, args->topk.weights);
}

static epmoe_status_t make_topk(op_job_t *job)
{
    const epmoe_layer_config_t *config = &job->bench->config;
    epmoe_topk_args_t *args = &job->args.topk;
    *args = (epmoe_topk_args_t)EPMOE_TOPK_ARGS_INIT;
    args->backend = job->bench->backend;
    args->num_tokens = job->num_tokens;
    args->num_experts = config->num_experts;
    args->top_k = config->top_k;
    if (job->bench->selection_bias) {
        EPMOEI_CHECK(take(job, (void **)&args->selection_bias, (int64_t)config->num_experts * 4));
        memcpy((float *)(uintptr_t)args->selection_bias, job->bench->selection_bias, (size_t)config->num_experts * 4);
    }
    args->scoring = config->scoring;
    args->renormalize = config->renormalize;
    args->scale = config->routed_scale;
    args->n_group = config->n_group;
    args->topk_group = config->topk_group;
    args->group_score = config->group_score;
    EPMOEI_CHECK(
        take_random(job, (void **)&args->logits, EPMOE_F32, (int64_t)job->num_tokens * config->num_experts, 0, 1));
    EPMOEI_CHECK(take_output(job, (void **)&args->ids, EPMOE_I32, job->num_tokens, config->top_k));
    EPMOEI_CHECK(take_output(job, (void **)&args->weights, EPMOE_F32, job->num_tokens, config->top_k));
    epmoe_topk_args_t checked;
    EPMOEI_CHECK(epmoei_topk_check(args, &checked));
    job->floor = epmoei_topk_floor(&checked);
    return EPMOE_OK;
}

static epmoe_status_t run_align(const op_args_t *args, epmoe_stream_t stream)
{
    return epmoe_align_block_size(&args->align, stream);
}

static void place_align(const op_job_t *job, op_args_t *args)
{
    args->align.ids = twin(job, args->align.ids);
    args->align.sorted_ids = twin(job, args->align.sorted_ids);
    args->align.expert_ids = twin(job, args->align.expert_ids);
    args->align.num_post_padded = twin(job, args->align.num_post_padded);
    args->align.expert_offsets = twin(job, args->align.expert_offsets);
    args->align.workspace = twin(job, args->align.workspace);
}

static epmoe_status_t reference_align(op_job_t *job)
{
    epmoe_align_args_t args;
    EPMOEI_CHECK(epmoei_align_check(&job->args.align, &args));
    args.sorted_ids = job->outputs[0].ref;
    args.num_post_padded = job->outputs[1].ref;
    args.expert_offsets = job->outputs[2].ref;
    args.expert_ids = job->outputs[3].ref;
    return epmoei_align_ref(&args, NULL);
}

static epmoe_status_t make_align(op_job_t *job)
{
    enum { kBlock = 16 };
    const epmoe_layer_config_t *config = &job->bench->config;
    epmoe_align_args_t *args = &job->args.align;
    int64_t padded = epmoe_align_max_padded(job->num_tokens, config->top_k, config->num_experts, kBlock);
    if (padded < 0)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%d tokens are too many to align", job->num_tokens);
    *args = (epmoe_align_args_t)EPMOE_ALIGN_ARGS_INIT;
    args->backend = job->bench->backend;
    args->num_tokens = job->num_tokens;
    args->top_k = config->top_k;
    args->num_experts = config->num_experts;
    args->block_size = kBlock;
    EPMOEI_CHECK(take_ids(job, (int32_t **)&args->ids));
    EPMOEI_CHECK(take_output(job, (void **)&args->sorted_ids, EPMOE_I32, 1, padded));
    EPMOEI_CHECK(take_output(job, (void **)&args->num_post_padded, EPMOE_I32, 1, 1));
    EPMOEI_CHECK(take_output(job, (void **)&args->expert_offsets, EPMOE_I32, 1, config->num_experts + 1));
    EPMOEI_CHECK(take_output(job, (void **)&args->expert_ids, EPMOE_I32, 1, padded / kBlock));
    EPMOEI_CHECK(epmoe_align_workspace_size(args, &args->workspace_bytes));
    args->workspace_bytes = epmoei_max64(args->workspace_bytes, epmoei_align_workspace_ref(args));
    EPMOEI_CHECK(take(job, &args->workspace, args->workspace_bytes));
    epmoe_align_args_t checked;
    EPMOEI_CHECK(epmoei_align_check(args, &checked));
    job->floor = epmoei_align_floor(&checked);
    return EPMOE_OK;
}

/* The slots in expert order without padding, for the ops that follow align. */
typedef struct order_t {
    int32_t *sorted_ids; /* [T*k] */
    int32_t *num_rows;   /* [1] */
    int32_t *offsets;    /* [E+1] */
} order_t;

static epmoe_status_t take_order(op_job_t *job, order_t *order)
{
    const epmoe_layer_config_t *config = &job->bench->config;
    epmoe_align_args_t args = EPMOE_ALIGN_ARGS_INIT;
    int64_t slots = epmoe_align_max_padded(job->num_tokens, config->top_k, config->num_experts, 1);
    if (slots < 0) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%d tokens are too many to align", job->num_tokens);
    EPMOEI_CHECK(take(job, (void **)&order->sorted_ids, slots * 4));
    EPMOEI_CHECK(take(job, (void **)&order->num_rows, 4));
    EPMOEI_CHECK(take(job, (void **)&order->offsets, ((int64_t)config->num_experts + 1) * 4));
    EPMOEI_CHECK(take_ids(job, (int32_t **)&args.ids));
    args.backend = EPMOE_BACKEND_CPU;
    args.num_tokens = job->num_tokens;
    args.top_k = config->top_k;
    args.num_experts = config->num_experts;
    args.block_size = 1;
    args.sorted_ids = order->sorted_ids;
    args.num_post_padded = order->num_rows;
    args.expert_offsets = order->offsets;
    EPMOEI_CHECK(epmoe_align_workspace_size(&args, &args.workspace_bytes));
    EPMOEI_CHECK(take(job, &args.workspace, args.workspace_bytes));
    return epmoe_align_block_size(&args, NULL);
}

static epmoe_status_t run_permute(const op_args_t *args, epmoe_stream_t stream)
{
    return epmoe_permute(&args->permute, stream);
}

static void place_permute(const op_job_t *job, op_args_t *args)
{
    args->permute.x = twin(job, args->permute.x);
    args->permute.sorted_ids = twin(job, args->permute.sorted_ids);
    args->permute.num_rows = twin(job, args->permute.num_rows);
    args->permute.y = twin(job, args->permute.y);
    args->permute.inverse = twin(job, args->permute.inverse);
}

static epmoe_status_t reference_permute(op_job_t *job)
{
    epmoe_permute_args_t args;
    EPMOEI_CHECK(epmoei_permute_check(&job->args.permute, &args));
    args.y = job->outputs[0].ref;
    args.inverse = job->outputs[1].ref;
    return epmoei_permute_ref(&args, NULL);
}

static epmoe_status_t make_permute(op_job_t *job)
{
    const epmoe_layer_config_t *config = &job->bench->config;
    epmoe_permute_args_t *args = &job->args.permute;
    order_t order;
    EPMOEI_CHECK(take_order(job, &order));
    *args = (epmoe_permute_args_t)EPMOE_PERMUTE_ARGS_INIT;
    args->backend = job->bench->backend;
    args->num_tokens = job->num_tokens;
    args->top_k = config->top_k;
    args->hidden = config->hidden;
    args->dtype = config->dtype;
    args->sorted_ids = order.sorted_ids;
    args->num_rows = order.num_rows;
    args->max_rows = job->num_tokens * config->top_k;
    EPMOEI_CHECK(take_random(job, (void **)&args->x, config->dtype, (int64_t)job->num_tokens * config->hidden, 0, 1));
    EPMOEI_CHECK(take_output(job, &args->y, config->dtype, args->max_rows, config->hidden));
    EPMOEI_CHECK(take_output(job, (void **)&args->inverse, EPMOE_I32, job->num_tokens, config->top_k));
    epmoe_permute_args_t checked;
    EPMOEI_CHECK(epmoei_permute_check(args, &checked));
    job->floor = epmoei_permute_floor(&checked);
    return EPMOE_OK;
}

static epmoe_status_t run_unpermute(const op_args_t *args, epmoe_stream_t stream)
{
    return epmoe_unpermute(&args->unpermute, stream);
}

static void place_unpermute(const op_job_t *job, op_args_t *args)
{
    args->unpermute.y = twin(job, args->unpermute.y);
    args->unpermute.inverse = twin(job, args->unpermute.inverse);
    args->unpermute.weights = twin(job, args->unpermute.weights);
    args->unpermute.out = twin(job, args->unpermute.out);
}

static epmoe_status_t reference_unpermute(op_job_t *job)
{
    epmoe_unpermute_args_t args;
    EPMOEI_CHECK(epmoei_unpermute_check(&job->args.unpermute, &args));
    args.out = job->outputs[0].ref;
    return epmoei_unpermute_ref(&args, NULL);
}

static epmoe_status_t make_unpermute(op_job_t *job)
{
    const epmoe_layer_config_t *config = &job->bench->config;
    epmoe_unpermute_args_t *args = &job->args.unpermute;
    int64_t slots = (int64_t)job->num_tokens * config->top_k;
    int32_t *inverse;
    order_t order;
    EPMOEI_CHECK(take_order(job, &order));
    EPMOEI_CHECK(take(job, (void **)&inverse, slots * 4));
    for (int32_t p = 0; p < *order.num_rows; p++) inverse[order.sorted_ids[p]] = p;
    *args = (epmoe_unpermute_args_t)EPMOE_UNPERMUTE_ARGS_INIT;
    args->backend = job->bench->backend;
    args->num_tokens = job->num_tokens;
    args->top_k = config->top_k;
    args->hidden = config->hidden;
    args->dtype = config->dtype;
    args->max_rows = (int32_t)slots;
    args->inverse = inverse;
    EPMOEI_CHECK(take_random(job, (void **)&args->y, config->dtype, slots * config->hidden, 0, 1));
    EPMOEI_CHECK(take_random(job, (void **)&args->weights, EPMOE_F32, slots, 1, 1));
    EPMOEI_CHECK(take_output(job, &args->out, config->dtype, job->num_tokens, config->hidden));
    epmoe_unpermute_args_t checked;
    EPMOEI_CHECK(epmoei_unpermute_check(args, &checked));
    job->floor = epmoei_unpermute_floor(&checked);
    return EPMOE_OK;
}

static epmoe_status_t run_gemm(const op_args_t *args, epmoe_stream_t stream)
{
    return epmoe_grouped_gemm(&args->gemm, stream);
}

static void place_gemm(const op_job_t *job, op_args_t *args)
{
    args->gemm.expert_offsets = twin(job, args->gemm.expert_offsets);
    args->gemm.row_index = twin(job, args->gemm.row_index);
    args->gemm.x = twin(job, args->gemm.x);
    args->gemm.weight.data = twin(job, args->gemm.weight.data);
    args->gemm.y = twin(job, args->gemm.y);
    args->gemm.workspace = twin(job, args->gemm.workspace);
    args->gemm.layout = EPMOE_LAYOUT_PACKED;
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
    EPMOEI_CHECK(take_host(job, (void **)&job->reference_offsets, ((int64_t)args->num_experts + 1) * 4));
    EPMOEI_CHECK(take_host(job, (void **)&job->reference_index, rows * 4));
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

/* GEMM 1 of the model with its activation: the weights of every expert, a row of x for each token. */
static epmoe_status_t make_gemm(op_job_t *job)
{
    const epmoe_layer_config_t *config = &job->bench->config;
    epmoe_grouped_gemm_args_t *args = &job->args.gemm;
    int64_t slots = (int64_t)job->num_tokens * config->top_k, d = config->hidden, f = config->intermediate;
    int32_t active = 0;
    order_t order;
    EPMOEI_CHECK(take_order(job, &order));
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
    EPMOEI_CHECK(take_random(job, (void **)&args->x, config->dtype, job->num_tokens * d, 0, 1));
    EPMOEI_CHECK(take_random(job, (void **)&args->weight.data, config->dtype, config->num_experts * 2 * f * d, 1,
                             epmoei_random_scale(EPMOEI_RANDOM_GATE, d)));
    EPMOEI_CHECK(take_output(job, &args->y, config->dtype, slots, f));
    EPMOEI_CHECK(choose_reference_rows(job));
    EPMOEI_CHECK(epmoe_grouped_gemm_workspace_size(args, &args->workspace_bytes));
    args->workspace_bytes = epmoei_max64(args->workspace_bytes, epmoei_grouped_gemm_workspace_ref(args));
    EPMOEI_CHECK(take(job, &args->workspace, args->workspace_bytes));
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

static void place_silu(const op_job_t *job, op_args_t *args)
{
    args->silu.x = twin(job, args->silu.x);
    args->silu.y = twin(job, args->silu.y);
}

static epmoe_status_t reference_silu(op_job_t *job)
{
    epmoe_silu_and_mul_args_t args;
    EPMOEI_CHECK(epmoei_silu_and_mul_check(&job->args.silu, &args));
    args.y = job->outputs[0].ref;
    return epmoei_silu_and_mul_ref(&args, NULL);
}

static epmoe_status_t make_silu(op_job_t *job)
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
    EPMOEI_CHECK(take_random(job, (void **)&args->x, config->dtype, rows * 2 * f, 0, 1));
    EPMOEI_CHECK(take_output(job, &args->y, config->dtype, rows, f));
    epmoe_silu_and_mul_args_t checked;
    EPMOEI_CHECK(epmoei_silu_and_mul_check(args, &checked));
    job->floor = epmoei_silu_and_mul_floor(&checked);
    return EPMOE_OK;
}

static epmoe_status_t run_sum(const op_args_t *args, epmoe_stream_t stream) { return epmoe_sum(&args->sum, stream); }

static void place_sum(const op_job_t *job, op_args_t *args)
{
    args->sum.y = twin(job, args->sum.y);
    args->sum.weights = twin(job, args->sum.weights);
    args->sum.out = twin(job, args->sum.out);
}

static epmoe_status_t reference_sum(op_job_t *job)
{
    epmoe_sum_args_t args;
    EPMOEI_CHECK(epmoei_sum_check(&job->args.sum, &args));
    args.out = job->outputs[0].ref;
    return epmoei_sum_ref(&args, NULL);
}

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
    EPMOEI_CHECK(take_random(job, (void **)&args->y, config->dtype, slots * config->hidden, 0, 1));
    EPMOEI_CHECK(take_random(job, (void **)&args->weights, EPMOE_F32, slots, 1, 1));
    EPMOEI_CHECK(take_output(job, &args->out, config->dtype, job->num_tokens, config->hidden));
    epmoe_sum_args_t checked;
    EPMOEI_CHECK(epmoei_sum_check(args, &checked));
    job->floor = epmoei_sum_floor(&checked);
    return EPMOE_OK;
}

static const op_kind_t k_ops[] = {
    {"topk", make_topk, place_topk, run_topk, NULL, judge_topk},
    {"align", make_align, place_align, run_align, reference_align, NULL},
    {"permute", make_permute, place_permute, run_permute, reference_permute, NULL},
    {"unpermute", make_unpermute, place_unpermute, run_unpermute, reference_unpermute, NULL},
    {"grouped_gemm", make_gemm, place_gemm, run_gemm, reference_gemm, NULL},
    {"silu_and_mul", make_silu, place_silu, run_silu, reference_silu, NULL},
    {"sum", make_sum, place_sum, run_sum, reference_sum, NULL},
};

epmoe_status_t op_job_create(op_job_t *job, const bench_t *bench, int32_t num_tokens)
{
    *job = (op_job_t){.bench = bench, .num_tokens = num_tokens};
    for (size_t i = 0; i < sizeof k_ops / sizeof k_ops[0]; i++)
        if (!strcmp(k_ops[i].name, bench->options->op)) job->kind = &k_ops[i];
    if (!job->kind) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "op '%s' is unknown", bench->options->op);
    EPMOEI_CHECK(job->kind->make(job));
    for (int32_t i = 0; i < job->num_memory; i++) EPMOEI_CHECK(buffer_upload(&job->memory[i]));
    job->run_args = job->args;
    job->kind->place(job, &job->run_args);
    return EPMOE_OK;
}

epmoe_status_t op_job_run(void *ctx, epmoe_stream_t stream, void *const *events)
{
    const op_job_t *job = ctx;
    (void)events;
    return job->kind->run(&job->run_args, stream);
}

void op_job_destroy(op_job_t *job)
{
    for (int32_t i = 0; i < job->num_memory; i++) buffer_destroy(&job->memory[i]);
    *job = (op_job_t){0};
}
