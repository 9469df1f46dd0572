/* The layer's routing at once, which only CUDA has: product, choice and, for a moderate number of tokens, order. */
#include "bench/op_job.h"

#include "bench/selection.h"
#include "bench/stats.h"

#include "base/dtype.h"
#include "kernels/align.h"
#include "kernels/random_weights.h"
#include "kernels/router_gemm.h"
#include "kernels/topk.h"

#include <string.h>

/* Multiplications that the host spends on the logits of an even choice of tokens. */
#define REFERENCE_MULTIPLICATIONS 5e8

static epmoe_status_t run_router(const op_args_t *args, epmoe_stream_t stream)
{
    return epmoei_route(&args->route, stream);
}

/* The product in double precision, the choice by the rules from the logits that the library found. */
static void judge_token(const op_job_t *job, int64_t t, float *expected, int64_t *wrong, double *worst)
{
    const epmoei_route_args_t *args = &job->args.route;
    int64_t num_experts = args->topk.num_experts, top_k = args->topk.top_k;
    const int32_t *ids = args->topk.ids + t * top_k;
    const float *logits = args->logits + t * num_experts;
    double ref[EPMOE_MAX_EXPERTS], got[EPMOE_MAX_EXPERTS];
    epmoei_router_gemm_args_t gemm = {.num_tokens = 1,
                                      .num_experts = args->topk.num_experts,
                                      .hidden = args->hidden,
                                      .dtype = args->dtype,
                                      .x = (const char *)args->x + t * args->hidden * epmoe_dtype_size(args->dtype),
                                      .weight = args->weight};
    epmoei_router_gemm_ref(&gemm, args->bias, expected);
    for (int64_t e = 0; e < num_experts; e++) ref[e] = (double)expected[e], got[e] = (double)logits[e];
    *wrong += stats_count_wrong(got, ref, num_experts, stats_tolerance(EPMOE_F32), worst);
    int32_t bad = selection_count_wrong(&job->bench->config, args->topk.selection_bias, logits, ids);
    *wrong += bad;
    if (bad) return;
    selection_weights(&job->bench->config, logits, ids, ref);
    for (int64_t j = 0; j < top_k; j++) got[j] = (double)args->topk.weights[t * top_k + j];
    *wrong += stats_count_wrong(got, ref, top_k, stats_tolerance(EPMOE_F32), worst);
}

static int64_t judge_order(const op_job_t *job)
{
    const epmoei_route_args_t *args = &job->args.route;
    int64_t slots = (int64_t)args->topk.num_tokens * args->topk.top_k, experts = args->topk.num_experts, wrong = 0;
    int32_t *sorted = NULL, *offsets = NULL, total = 0;
    if (epmoei_alloc_for((void **)&sorted, slots * 4, "slots") == EPMOE_OK &&
        epmoei_alloc_for((void **)&offsets, (experts + 1) * 4, "offsets") == EPMOE_OK) {
        epmoe_align_args_t align = EPMOE_ALIGN_ARGS_INIT;
        align.num_tokens = args->topk.num_tokens;
        align.top_k = args->topk.top_k;
        align.num_experts = args->topk.num_experts;
        align.block_size = 1;
        align.ids = args->topk.ids;
        align.sorted_ids = sorted;
        align.num_post_padded = &total;
        align.expert_offsets = offsets;
        wrong += epmoei_align_ref(&align, NULL) != EPMOE_OK || total != *args->num_post_padded;
        for (int64_t s = 0; s < slots; s++) wrong += sorted[s] != args->sorted_ids[s];
        for (int64_t e = 0; e <= experts; e++) wrong += offsets[e] != args->expert_offsets[e];
    } else
        wrong++;
    epmoei_free(sorted);
    epmoei_free(offsets);
    return wrong;
}

static int64_t judge_router(const op_job_t *job, double *worst)
{
    const epmoei_route_args_t *args = &job->args.route;
    int64_t tokens = args->topk.num_tokens, wrong = 0;
    double affordable = REFERENCE_MULTIPLICATIONS / ((double)args->hidden * args->topk.num_experts);
    int64_t judged = epmoei_min64(tokens, epmoei_max64(1, (int64_t)affordable));
    float expected[EPMOE_MAX_EXPERTS];
    for (int64_t i = 0; i < judged; i++) judge_token(job, i * tokens / judged, expected, &wrong, worst);
    bool aligns = epmoei_route_aligns(args->topk.num_tokens, args->topk.num_experts, args->topk.top_k);
    return aligns && !wrong ? judge_order(job) : wrong;
}

static const size_t router_pointers[] = {OP_AT(route.x),
                                         OP_AT(route.weight),
                                         OP_AT(route.bias),
                                         OP_AT(route.logits),
                                         OP_AT(route.topk.selection_bias),
                                         OP_AT(route.topk.ids),
                                         OP_AT(route.topk.weights),
                                         OP_AT(route.sorted_ids),
                                         OP_AT(route.num_post_padded),
                                         OP_AT(route.expert_offsets),
                                         OP_AT(route.workspace),
                                         0};

static epmoe_status_t make_router(op_job_t *job)
{
    const epmoe_layer_config_t *config = &job->bench->config;
    if (job->bench->backend != EPMOE_BACKEND_CUDA)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "op router: the backend %s routes by grouped_gemm and topk",
                           epmoe_backend_arch(job->bench->backend));
    int64_t tokens = job->num_tokens, experts = config->num_experts, d = config->hidden, slots = tokens * config->top_k;
    epmoei_route_args_t *args = &job->args.route;
    *args = (epmoei_route_args_t){.struct_size = sizeof *args};
    args->backend = job->bench->backend;
    args->hidden = config->hidden;
    args->dtype = config->dtype;
    args->topk = op_topk_args(job);
    if (job->bench->selection_bias) {
        EPMOEI_CHECK(op_take(job, (void **)&args->topk.selection_bias, experts * 4));
        memcpy((float *)(uintptr_t)args->topk.selection_bias, job->bench->selection_bias, (size_t)experts * 4);
    }
    EPMOEI_CHECK(op_take_random(job, (void **)&args->x, config->dtype, tokens * d, 0, 1));
    EPMOEI_CHECK(op_take_random(job, (void **)&args->weight, config->dtype, experts * d, 1,
                                epmoei_random_scale(EPMOEI_RANDOM_ROUTER, d)));
    if (config->router_has_bias)
        EPMOEI_CHECK(op_take_random(job, (void **)&args->bias, EPMOE_F32, experts, 2,
                                    epmoei_random_scale(EPMOEI_RANDOM_ROUTER_BIAS, d)));
    EPMOEI_CHECK(op_take_output(job, (void **)&args->logits, EPMOE_F32, tokens, experts));
    EPMOEI_CHECK(op_take_output(job, (void **)&args->topk.ids, EPMOE_I32, tokens, config->top_k));
    EPMOEI_CHECK(op_take_output(job, (void **)&args->topk.weights, EPMOE_F32, tokens, config->top_k));
    EPMOEI_CHECK(op_take_output(job, (void **)&args->sorted_ids, EPMOE_I32, 1, slots));
    EPMOEI_CHECK(op_take_output(job, (void **)&args->num_post_padded, EPMOE_I32, 1, 1));
    EPMOEI_CHECK(op_take_output(job, (void **)&args->expert_offsets, EPMOE_I32, 1, experts + 1));
    args->workspace_bytes = epmoei_route_workspace(job->num_tokens, config->num_experts, config->hidden);
    EPMOEI_CHECK(op_take(job, &args->workspace, args->workspace_bytes));
    job->floor.bytes = (double)epmoe_dtype_size(config->dtype) * (double)d * (double)(tokens + experts) +
                       4.0 * (double)(tokens * experts + 3 * slots + experts);
    job->floor.flops = 2.0 * (double)d * (double)tokens * (double)experts;
    return EPMOE_OK;
}

const op_kind_t op_router = {"router", make_router, router_pointers, run_router, NULL, judge_router};
