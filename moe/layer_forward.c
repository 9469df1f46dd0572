#include "moe/layer.h"

#include "base/dtype.h"
#include "comm/comm.h"
#include "kernels/activation.h"
#include "moe/experts.h"

#include <string.h>

typedef struct forward_t {
    epmoe_layer_t *layer;
    epmoe_forward_args_t args; /* num_tokens is the actual T */
    epmoe_stream_t stream;
    double stage_us[EPMOE_STAGE_COUNT];
    double time; /* start of the running stage */
} forward_t;

static void end_stage(forward_t *forward, epmoe_stage_t stage)
{
    double now = epmoei_now_seconds();
    forward->stage_us[stage] += 1e6 * (now - forward->time);
    forward->time = now;
}

static epmoe_status_t check_args(forward_t *forward, const epmoe_forward_args_t *args)
{
    const epmoe_layer_t *layer = forward->layer;
    EPMOEI_CHECK(epmoei_copy_sized(&forward->args, sizeof forward->args, args, "forward args"));
    epmoe_forward_args_t *own = &forward->args;
    int32_t max_tokens = layer->config.max_tokens;
    if (own->num_tokens < 0 || own->num_tokens > max_tokens)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "num_tokens is %d: expected 0..%d (max_tokens)",
                           own->num_tokens, max_tokens);
    if (own->num_tokens_dev) {
        int32_t actual = *own->num_tokens_dev;
        if (actual < 0 || actual > own->num_tokens)
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "*num_tokens_dev is %d: expected 0..%d (num_tokens)",
                               actual, own->num_tokens);
        own->num_tokens = actual;
    }
    if (!layer->has_weights) return epmoei_fail(EPMOE_ERROR_BAD_STATE, "the layer has no weights: set or load them");
    if (own->num_tokens && (!own->x || !own->y))
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s is NULL with num_tokens %d", own->x ? "y" : "x",
                           own->num_tokens);
    return EPMOE_OK;
}

/* A product over all tokens of this rank: one group. */
static epmoe_grouped_gemm_args_t dense_gemm(const forward_t *forward, int32_t n, int32_t k, const void *x,
                                            epmoe_format_t format, const void *weight, epmoe_dtype_t y_dtype, void *y)
{
    const epmoei_layer_workspace_t *workspace = &forward->layer->workspace;
    epmoe_grouped_gemm_args_t gemm = EPMOE_GROUPED_GEMM_ARGS_INIT;
    gemm.backend = forward->layer->backend;
    gemm.num_experts = 1;
    gemm.n = n;
    gemm.k = k;
    gemm.max_rows = forward->args.num_tokens;
    gemm.expert_offsets = workspace->shared_offsets;
    gemm.x_dtype = forward->layer->config.dtype;
    gemm.x = x;
    gemm.weight.format = format;
    gemm.weight.data = weight;
    gemm.layout = EPMOE_LAYOUT_PACKED;
    gemm.activation = EPMOE_ACTIVATION_NONE;
    gemm.y_dtype = y_dtype;
    gemm.y = y;
    gemm.workspace = workspace->gemm_workspace;
    gemm.workspace_bytes = workspace->gemm_bytes;
    return gemm;
}

static epmoe_status_t route(forward_t *forward)
{
    const epmoe_layer_t *layer = forward->layer;
    const epmoe_layer_config_t *config = &layer->config;
    const epmoe_forward_args_t *args = &forward->args;
    const epmoei_layer_workspace_t *workspace = &layer->workspace;
    if (args->num_tokens == 0) return EPMOE_OK;

    epmoe_grouped_gemm_args_t gemm = dense_gemm(forward, config->num_experts, config->hidden, args->x,
                                                epmoei_format_of_dtype(layer->weights.formats.router),
                                                layer->weights.router, EPMOE_F32, workspace->logits);
    gemm.bias = layer->weights.router_bias;
    gemm.batch_invariant = 1; /* a token's experts must not depend on its batch */
    EPMOEI_CHECK(epmoe_grouped_gemm(&gemm, forward->stream));

    epmoe_topk_args_t topk = EPMOE_TOPK_ARGS_INIT;
    topk.backend = layer->backend;
    topk.num_tokens = args->num_tokens;
    topk.num_experts = config->num_experts;
    topk.top_k = config->top_k;
    topk.logits_dtype = EPMOE_F32;
    topk.logits = args->logits ? args->logits : workspace->logits;
    topk.selection_bias = layer->weights.selection_bias;
    topk.scoring = config->scoring;
    topk.renormalize = config->renormalize;
    topk.scale = config->routed_scale;
    topk.n_group = config->n_group;
    topk.topk_group = config->topk_group;
    topk.group_score = config->group_score;
    topk.ids = workspace->ids;
    topk.weights = workspace->weights;
    return epmoe_topk(&topk, forward->stream);
}

/* workspace->shared = the shared expert's output in fp32, times its gate. */
static epmoe_status_t run_shared(forward_t *forward)
{
    const epmoe_layer_t *layer = forward->layer;
    const epmoe_layer_config_t *config = &layer->config;
    const epmoei_packed_weights_t *weights = &layer->weights;
    const epmoei_layer_workspace_t *workspace = &layer->workspace;
    int32_t tokens = forward->args.num_tokens;
    if (tokens == 0 || config->shared_intermediate == 0) return EPMOE_OK;

    if (config->shared_gated) {
        epmoe_grouped_gemm_args_t gate =
            dense_gemm(forward, 1, config->hidden, forward->args.x, epmoei_format_of_dtype(weights->formats.router),
                       weights->shared_gate, EPMOE_F32, workspace->shared_gate);
        gate.batch_invariant = 1;
        EPMOEI_CHECK(epmoe_grouped_gemm(&gate, forward->stream));
        for (int32_t t = 0; t < tokens; t++) workspace->shared_gate[t] = epmoei_sigmoid(workspace->shared_gate[t]);
    }
    epmoe_grouped_gemm_args_t gemm1 =
        dense_gemm(forward, 2 * config->shared_intermediate, config->hidden, forward->args.x,
                   weights->formats.shared_gate_up, weights->shared_gate_up, config->dtype, workspace->shared_h);
    gemm1.activation = config->activation;
    gemm1.alpha = config->alpha;
    gemm1.limit = config->limit;
    EPMOEI_CHECK(epmoe_grouped_gemm(&gemm1, forward->stream));
    epmoe_grouped_gemm_args_t gemm2 =
        dense_gemm(forward, config->hidden, config->shared_intermediate, workspace->shared_h,
                   weights->formats.shared_down, weights->shared_down, EPMOE_F32, workspace->shared);
    gemm2.row_weights = config->shared_gated ? workspace->shared_gate : NULL;
    return epmoe_grouped_gemm(&gemm2, forward->stream);
}

/* This rank's experts on `tokens` rows. */
static epmoe_experts_args_t experts_args(const epmoe_layer_t *layer, int32_t tokens, const void *x, const int32_t *ids,
                                         const float *weights, epmoe_dtype_t y_dtype, void *y)
{
    const epmoe_layer_config_t *config = &layer->config;
    const epmoei_packed_weights_t *packed = &layer->weights;
    epmoe_experts_args_t experts = EPMOE_EXPERTS_ARGS_INIT;
    experts.backend = layer->backend;
    experts.num_tokens = tokens;
    experts.top_k = config->top_k;
    experts.num_experts = layer->local_experts;
    experts.hidden = config->hidden;
    experts.intermediate = config->intermediate;
    experts.dtype = config->dtype;
    experts.y_dtype = y_dtype;
    experts.x = x;
    experts.ids = ids;
    experts.weights = weights;
    experts.gate_up.format = packed->formats.gate_up;
    experts.gate_up.data = packed->gate_up;
    experts.down.format = packed->formats.down;
    experts.down.data = packed->down;
    experts.layout = EPMOE_LAYOUT_PACKED;
    experts.gate_up_bias = packed->gate_up_bias;
    experts.down_bias = packed->down_bias;
    experts.activation = config->activation;
    experts.alpha = config->alpha;
    experts.limit = config->limit;
    experts.weight_on_input = config->weight_on_input;
    experts.y = y;
    experts.workspace = layer->workspace.experts_workspace;
    experts.workspace_bytes = layer->workspace.experts_bytes;
    return experts;
}

/* y = shared + residual, for a layer that is nothing but its shared expert. */
static epmoe_status_t finish_dense(const forward_t *forward)
{
    const epmoe_layer_config_t *config = &forward->layer->config;
    epmoe_sum_args_t sum = EPMOE_SUM_ARGS_INIT;
    sum.backend = forward->layer->backend;
    sum.num_tokens = forward->args.num_tokens;
    sum.top_k = 1;
    sum.hidden = config->hidden;
    sum.y_dtype = EPMOE_F32;
    sum.out_dtype = config->dtype;
    sum.y = forward->layer->workspace.shared;
    sum.residual = forward->args.residual;
    sum.out = forward->args.y;
    return epmoe_sum(&sum, forward->stream);
}

/* One rank: the experts write y themselves. */
static epmoe_status_t run_local(forward_t *forward)
{
    epmoe_layer_t *layer = forward->layer;
    const epmoe_forward_args_t *args = &forward->args;
    const epmoei_layer_workspace_t *workspace = &layer->workspace;
    if (args->num_tokens > layer->max_rows)
        return epmoei_fail(EPMOE_ERROR_CAPACITY, "num_tokens is %d: the capacity is %lld rows", args->num_tokens,
                           (long long)layer->max_rows);
    EPMOEI_CHECK(route(forward));
    end_stage(forward, EPMOE_STAGE_ROUTER);
    EPMOEI_CHECK(run_shared(forward));
    end_stage(forward, EPMOE_STAGE_SHARED);
    epmoe_experts_args_t experts = experts_args(layer, args->num_tokens, args->x, workspace->ids, workspace->weights,
                                                layer->config.dtype, args->y);
    experts.addend = layer->config.shared_intermediate ? workspace->shared : NULL;
    experts.residual = args->residual;
    return epmoei_experts_run(&experts, forward->stream, forward->stage_us);
}

static void copy_out(void *to, const void *from, int64_t bytes)
{
    if (to && bytes) memcpy(to, from, (size_t)bytes);
}

/* Several ranks. `local` is this rank's status so far: it goes to all ranks with the dispatch, so that an error of
 * one rank is everybody's, and nobody waits for a rank that has given up. */
static epmoe_status_t run_routed(forward_t *forward, epmoe_status_t local)
{
    epmoe_layer_t *layer = forward->layer;
    const epmoe_forward_args_t *args = &forward->args;
    if (local == EPMOE_OK) local = route(forward);
    end_stage(forward, EPMOE_STAGE_ROUTER);

    epmoe_dispatch_args_t dispatch = EPMOE_DISPATCH_ARGS_INIT;
    dispatch.num_tokens = args->num_tokens;
    dispatch.x = args->x;
    dispatch.ids = layer->workspace.ids;
    dispatch.weights = layer->workspace.weights;
    EPMOEI_CHECK(epmoei_dispatch_begin(layer->ep, &dispatch, local));
    end_stage(forward, EPMOE_STAGE_DISPATCH);

    local = run_shared(forward); /* while the rows travel */
    end_stage(forward, EPMOE_STAGE_SHARED);

    epmoe_dispatch_result_t rows = EPMOE_DISPATCH_RESULT_INIT;
    EPMOEI_CHECK(epmoei_dispatch_finish(layer->ep, &rows));
    end_stage(forward, EPMOE_STAGE_DISPATCH);

    if (local == EPMOE_OK && layer->local_experts) {
        epmoe_experts_args_t experts = experts_args(layer, *rows.num_rows, rows.x, rows.ids, rows.weights,
                                                    epmoe_ep_partial_dtype(layer->ep), rows.y);
        local = epmoei_experts_run(&experts, forward->stream, forward->stage_us);
    }
    /* Peers add these rows to their tokens: what was not computed must not look like numbers. */
    if (local != EPMOE_OK)
        memset(rows.y, 0xFF,
               (size_t)((int64_t)*rows.num_rows * layer->config.hidden *
                        epmoe_dtype_size(epmoe_ep_partial_dtype(layer->ep))));
    forward->time = epmoei_now_seconds();

    epmoe_combine_args_t combine = EPMOE_COMBINE_ARGS_INIT;
    combine.shared = layer->config.shared_intermediate ? layer->workspace.shared : NULL;
    combine.residual = args->residual;
    combine.y = args->y;
    epmoe_status_t status = epmoe_combine(layer->ep, &combine, forward->stream);
    end_stage(forward, EPMOE_STAGE_COMBINE);
    return local != EPMOE_OK ? local : status;
}

epmoe_status_t epmoe_layer_forward_args(epmoe_layer_t *layer, const epmoe_forward_args_t *args, epmoe_stream_t stream)
{
    if (!layer) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "layer is NULL");
    forward_t forward = {.layer = layer, .stream = stream, .time = epmoei_now_seconds()};
    epmoe_status_t status = check_args(&forward, args);
    if (status != EPMOE_OK) forward.args.num_tokens = 0;
    int64_t tokens = forward.args.num_tokens;
    layer->workspace.shared_offsets[0] = 0;
    layer->workspace.shared_offsets[1] = (int32_t)tokens;

    if (layer->ep) {
        status = run_routed(&forward, status);
    } else if (layer->config.num_experts) {
        if (status == EPMOE_OK) status = run_local(&forward);
    } else {
        if (status == EPMOE_OK) status = run_shared(&forward);
        end_stage(&forward, EPMOE_STAGE_SHARED);
        if (status == EPMOE_OK) status = finish_dense(&forward);
        end_stage(&forward, EPMOE_STAGE_COMBINE);
    }
    if (status != EPMOE_OK) return status;

    const epmoe_layer_config_t *config = &layer->config;
    copy_out(forward.args.logits_out, layer->workspace.logits, tokens * config->num_experts * 4);
    copy_out(forward.args.ids_out, layer->workspace.ids, tokens * config->top_k * 4);
    copy_out(forward.args.weights_out, layer->workspace.weights, tokens * config->top_k * 4);
    copy_out(forward.args.stage_us, forward.stage_us, (int64_t)sizeof forward.stage_us);
    return EPMOE_OK;
}

epmoe_status_t epmoe_layer_forward(epmoe_layer_t *layer, const void *x, void *y, int32_t num_tokens,
                                   epmoe_stream_t stream)
{
    epmoe_forward_args_t args = EPMOE_FORWARD_ARGS_INIT;
    args.num_tokens = num_tokens;
    args.x = x;
    args.y = y;
    return epmoe_layer_forward_args(layer, &args, stream);
}
