/* The ops that move rows or say where they go: topk, align, permute, unpermute. */
#include "bench/op_job.h"

#include "bench/selection.h"
#include "bench/stats.h"

#include "kernels/align.h"
#include "kernels/permute.h"
#include "kernels/topk.h"

#include <string.h>

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

static const size_t topk_pointers[] = {OP_AT(topk.logits), OP_AT(topk.selection_bias), OP_AT(topk.ids),
                                       OP_AT(topk.weights), 0};

epmoe_topk_args_t op_topk_args(const op_job_t *job)
{
    const epmoe_layer_config_t *config = &job->bench->config;
    epmoe_topk_args_t args = EPMOE_TOPK_ARGS_INIT;
    args.backend = job->bench->backend;
    args.num_tokens = job->num_tokens;
    args.num_experts = config->num_experts;
    args.top_k = config->top_k;
    args.scoring = config->scoring;
    args.renormalize = config->renormalize;
    args.scale = config->routed_scale;
    args.n_group = config->n_group;
    args.topk_group = config->topk_group;
    args.group_score = config->group_score;
    args.jitter = config->router_jitter;
    return args;
}

static epmoe_status_t make_topk(op_job_t *job)
{
    const epmoe_layer_config_t *config = &job->bench->config;
    epmoe_topk_args_t *args = &job->args.topk;
    *args = op_topk_args(job);
    if (job->bench->selection_bias) {
        EPMOEI_CHECK(op_take(job, (void **)&args->selection_bias, (int64_t)config->num_experts * 4));
        memcpy((float *)(uintptr_t)args->selection_bias, job->bench->selection_bias, (size_t)config->num_experts * 4);
    }
    EPMOEI_CHECK(
        op_take_random(job, (void **)&args->logits, EPMOE_F32, (int64_t)job->num_tokens * config->num_experts, 0, 1));
    EPMOEI_CHECK(op_take_output(job, (void **)&args->ids, EPMOE_I32, job->num_tokens, config->top_k));
    EPMOEI_CHECK(op_take_output(job, (void **)&args->weights, EPMOE_F32, job->num_tokens, config->top_k));
    epmoe_topk_args_t checked;
    EPMOEI_CHECK(epmoei_topk_check(args, &checked));
    job->floor = epmoei_topk_floor(&checked);
    return EPMOE_OK;
}

static epmoe_status_t run_align(const op_args_t *args, epmoe_stream_t stream)
{
    return epmoe_align_block_size(&args->align, stream);
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

static const size_t align_pointers[] = {OP_AT(align.ids),
                                        OP_AT(align.sorted_ids),
                                        OP_AT(align.expert_ids),
                                        OP_AT(align.num_post_padded),
                                        OP_AT(align.expert_offsets),
                                        OP_AT(align.workspace),
                                        0};

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
    EPMOEI_CHECK(op_take_ids(job, (int32_t **)&args->ids));
    EPMOEI_CHECK(op_take_output(job, (void **)&args->sorted_ids, EPMOE_I32, 1, padded));
    EPMOEI_CHECK(op_take_output(job, (void **)&args->num_post_padded, EPMOE_I32, 1, 1));
    EPMOEI_CHECK(op_take_output(job, (void **)&args->expert_offsets, EPMOE_I32, 1, config->num_experts + 1));
    EPMOEI_CHECK(op_take_output(job, (void **)&args->expert_ids, EPMOE_I32, 1, padded / kBlock));
    EPMOEI_CHECK(epmoe_align_workspace_size(args, &args->workspace_bytes));
    args->workspace_bytes = epmoei_max64(args->workspace_bytes, epmoei_align_workspace_ref(args));
    EPMOEI_CHECK(op_take(job, &args->workspace, args->workspace_bytes));
    epmoe_align_args_t checked;
    EPMOEI_CHECK(epmoei_align_check(args, &checked));
    job->floor = epmoei_align_floor(&checked);
    return EPMOE_OK;
}

static epmoe_status_t run_permute(const op_args_t *args, epmoe_stream_t stream)
{
    return epmoe_permute(&args->permute, stream);
}

static epmoe_status_t reference_permute(op_job_t *job)
{
    epmoe_permute_args_t args;
    EPMOEI_CHECK(epmoei_permute_check(&job->args.permute, &args));
    args.y = job->outputs[0].ref;
    args.inverse = job->outputs[1].ref;
    return epmoei_permute_ref(&args, NULL);
}

static const size_t permute_pointers[] = {OP_AT(permute.x), OP_AT(permute.sorted_ids), OP_AT(permute.num_rows),
                                          OP_AT(permute.y), OP_AT(permute.inverse),    0};

static epmoe_status_t make_permute(op_job_t *job)
{
    const epmoe_layer_config_t *config = &job->bench->config;
    epmoe_permute_args_t *args = &job->args.permute;
    op_order_t order;
    EPMOEI_CHECK(op_take_order(job, &order));
    *args = (epmoe_permute_args_t)EPMOE_PERMUTE_ARGS_INIT;
    args->backend = job->bench->backend;
    args->num_tokens = job->num_tokens;
    args->top_k = config->top_k;
    args->hidden = config->hidden;
    args->dtype = config->dtype;
    args->sorted_ids = order.sorted_ids;
    args->num_rows = order.num_rows;
    args->max_rows = (int32_t)((int64_t)job->num_tokens * config->top_k); /* op_take_order has it fit */
    EPMOEI_CHECK(
        op_take_random(job, (void **)&args->x, config->dtype, (int64_t)job->num_tokens * config->hidden, 0, 1));
    EPMOEI_CHECK(op_take_output(job, &args->y, config->dtype, args->max_rows, config->hidden));
    EPMOEI_CHECK(op_take_output(job, (void **)&args->inverse, EPMOE_I32, job->num_tokens, config->top_k));
    epmoe_permute_args_t checked;
    EPMOEI_CHECK(epmoei_permute_check(args, &checked));
    job->floor = epmoei_permute_floor(&checked);
    return EPMOE_OK;
}

static epmoe_status_t run_unpermute(const op_args_t *args, epmoe_stream_t stream)
{
    return epmoe_unpermute(&args->unpermute, stream);
}

static epmoe_status_t reference_unpermute(op_job_t *job)
{
    epmoe_unpermute_args_t args;
    EPMOEI_CHECK(epmoei_unpermute_check(&job->args.unpermute, &args));
    args.out = job->outputs[0].ref;
    return epmoei_unpermute_ref(&args, NULL);
}

static const size_t unpermute_pointers[] = {OP_AT(unpermute.y), OP_AT(unpermute.inverse), OP_AT(unpermute.weights),
                                            OP_AT(unpermute.out), 0};

static epmoe_status_t make_unpermute(op_job_t *job)
{
    const epmoe_layer_config_t *config = &job->bench->config;
    epmoe_unpermute_args_t *args = &job->args.unpermute;
    int64_t slots = (int64_t)job->num_tokens * config->top_k;
    int32_t *inverse;
    op_order_t order;
    EPMOEI_CHECK(op_take_order(job, &order));
    EPMOEI_CHECK(op_take(job, (void **)&inverse, slots * 4));
    for (int32_t p = 0; p < *order.num_rows; p++) inverse[order.sorted_ids[p]] = p;
    *args = (epmoe_unpermute_args_t)EPMOE_UNPERMUTE_ARGS_INIT;
    args->backend = job->bench->backend;
    args->num_tokens = job->num_tokens;
    args->top_k = config->top_k;
    args->hidden = config->hidden;
    args->dtype = config->dtype;
    args->max_rows = (int32_t)slots;
    args->inverse = inverse;
    EPMOEI_CHECK(op_take_random(job, (void **)&args->y, config->dtype, slots * config->hidden, 0, 1));
    EPMOEI_CHECK(op_take_random(job, (void **)&args->weights, EPMOE_F32, slots, 1, 1));
    EPMOEI_CHECK(op_take_output(job, &args->out, config->dtype, job->num_tokens, config->hidden));
    epmoe_unpermute_args_t checked;
    EPMOEI_CHECK(epmoei_unpermute_check(args, &checked));
    job->floor = epmoei_unpermute_floor(&checked);
    return EPMOE_OK;
}

const op_kind_t op_topk = {"topk", make_topk, topk_pointers, run_topk, NULL, judge_topk};
const op_kind_t op_align = {"align", make_align, align_pointers, run_align, reference_align, NULL};
const op_kind_t op_permute = {"permute", make_permute, permute_pointers, run_permute, reference_permute, NULL};
const op_kind_t op_unpermute = {"unpermute",   make_unpermute,      unpermute_pointers,
                                run_unpermute, reference_unpermute, NULL};
