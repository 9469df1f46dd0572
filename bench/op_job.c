#include "bench/op_job.h"

#include "bench/random.h"

#include "kernels/random_weights.h"

#include <string.h>

static const op_kind_t *const k_kinds[] = {&op_topk,
                                           &op_align,
                                           &op_permute,
                                           &op_unpermute,
                                           &op_grouped_gemm,
                                           &op_silu_and_mul,
                                           &op_silu_fp8,
                                           &op_sum,
                                           &op_quantize_fp8,
                                           &op_dequant,
                                           &op_router,
                                           &op_rms_norm,
                                           &op_norm_alone,
                                           &op_norm_fp8,
                                           &op_rope,
                                           &op_qk_norm_rope,
                                           &op_cache_write,
                                           &op_rope_cache_write,
                                           &op_attention,
                                           &op_prefill,
                                           &op_sample,
                                           &op_spec_verify,
                                           &op_linear,
                                           &op_linear_fp8,
                                           &op_linear_fp8_blocks};

epmoe_status_t op_take(op_job_t *job, void **pointer, int64_t bytes)
{
    buffer_t *buffer = &job->memory[job->num_memory++];
    EPMOEI_CHECK(buffer_create(buffer, job->bench->backend, bytes, "the op's data"));
    *pointer = buffer->host;
    return EPMOE_OK;
}

epmoe_status_t op_take_host(op_job_t *job, void **pointer, int64_t bytes)
{
    buffer_t *buffer = &job->memory[job->num_memory++];
    EPMOEI_CHECK(buffer_create(buffer, EPMOE_BACKEND_CPU, bytes, "the reference's data"));
    *pointer = buffer->host;
    return EPMOE_OK;
}

epmoe_status_t op_take_random(op_job_t *job, void **pointer, epmoe_dtype_t dtype, int64_t count, int32_t stream,
                              float scale)
{
    enum { kPiece = 1 << 16 };
    int64_t size = epmoe_dtype_size(dtype);
    EPMOEI_CHECK(op_take(job, pointer, count * size));
    char *data = *pointer;
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < count; first += kPiece)
        epmoei_random_fill(data + first * size, dtype, job->bench->options->seed + RANDOM_OP, EPMOEI_RANDOM_ROUTER,
                           stream, first, epmoei_min64(kPiece, count - first), scale);
    return EPMOE_OK;
}

epmoe_status_t op_take_output(op_job_t *job, void **out, epmoe_dtype_t dtype, int64_t rows, int64_t cols)
{
    op_output_t *output = &job->outputs[job->num_outputs++];
    *output = (op_output_t){.out = &job->memory[job->num_memory], .dtype = dtype, .rows = rows, .cols = cols};
    EPMOEI_CHECK(op_take(job, out, rows * cols * epmoe_dtype_size(dtype)));
    return job->kind->judge ? EPMOE_OK : op_take_host(job, &output->ref, rows * cols * epmoe_dtype_size(dtype));
}

epmoe_status_t op_take_ids(op_job_t *job, int32_t **ids)
{
    EPMOEI_CHECK(op_take(job, (void **)ids, (int64_t)job->num_tokens * job->bench->config.top_k * 4));
    return routing_draw(&job->bench->routing, job->num_tokens, 0, job->num_tokens, *ids);
}

epmoe_status_t op_take_order(op_job_t *job, op_order_t *order)
{
    const epmoe_layer_config_t *config = &job->bench->config;
    epmoe_align_args_t args = EPMOE_ALIGN_ARGS_INIT;
    int64_t slots = epmoe_align_max_padded(job->num_tokens, config->top_k, config->num_experts, 1);
    if (slots < 0) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%d tokens are too many to align", job->num_tokens);
    EPMOEI_CHECK(op_take(job, (void **)&order->sorted_ids, slots * 4));
    EPMOEI_CHECK(op_take(job, (void **)&order->num_rows, 4));
    EPMOEI_CHECK(op_take(job, (void **)&order->offsets, ((int64_t)config->num_experts + 1) * 4));
    EPMOEI_CHECK(op_take_ids(job, (int32_t **)&args.ids));
    args.backend = EPMOE_BACKEND_CPU;
    args.num_tokens = job->num_tokens;
    args.top_k = config->top_k;
    args.num_experts = config->num_experts;
    args.block_size = 1;
    args.sorted_ids = order->sorted_ids;
    args.num_post_padded = order->num_rows;
    args.expert_offsets = order->offsets;
    EPMOEI_CHECK(epmoe_align_workspace_size(&args, &args.workspace_bytes));
    EPMOEI_CHECK(op_take(job, &args.workspace, args.workspace_bytes));
    return epmoe_align_block_size(&args, NULL);
}

void op_job_args(const op_job_t *job, void *const places[OP_MAX_MEMORY], op_args_t *args)
{
    *args = job->args;
    for (const size_t *at = job->kind->pointers; *at; at++) {
        char *field = (char *)args + *at;
        void *host;
        memcpy(&host, field, sizeof host);
        for (int32_t i = 0; i < job->num_memory && host; i++)
            if (job->memory[i].host == host) memcpy(field, &places[i], sizeof host);
    }
}

epmoe_status_t op_job_create(op_job_t *job, const bench_t *bench, const char *op, int32_t num_tokens)
{
    void *places[OP_MAX_MEMORY] = {NULL};
    *job = (op_job_t){.bench = bench, .num_tokens = num_tokens};
    for (size_t i = 0; i < sizeof k_kinds / sizeof k_kinds[0]; i++)
        if (!strcmp(k_kinds[i]->name, op)) job->kind = k_kinds[i];
    if (!job->kind) return epmoei_fail(EPMOE_ERROR_INTERNAL, "op '%s' has no entry in k_kinds of bench/op_job.c", op);
    EPMOEI_CHECK(job->kind->make(job));
    for (int32_t i = 0; i < job->num_memory; i++) {
        EPMOEI_CHECK(buffer_upload(&job->memory[i]));
        places[i] = job->memory[i].run;
    }
    op_job_args(job, places, &job->run_args);
    return EPMOE_OK;
}

epmoe_status_t op_job_run(const op_job_t *job) { return job->kind->run(&job->run_args, NULL); }

void op_job_destroy(op_job_t *job)
{
    for (int32_t i = 0; i < job->num_memory; i++) buffer_destroy(&job->memory[i]);
    *job = (op_job_t){0};
}
