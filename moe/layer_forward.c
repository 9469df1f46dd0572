#include "moe/layer_joined.h"

#include "base/device.h"
#include "base/dtype.h"
#include "comm/comm.h"
#include "comm/ep_wire.h"
#include "kernels/experts_few.h"
#include "kernels/kernel_table.h"
#include "kernels/op_check.h"
#include "kernels/route.h"
#include "moe/experts.h"

#include <string.h>

typedef struct forward_t {
    epmoe_layer_t *layer;
    epmoe_forward_args_t args; /* on the CPU num_tokens is the actual T and num_tokens_dev NULL */
    epmoe_stream_t stream;
    epmoei_stages_t stages;
    /* Where the router's results go: the workspace, or on CUDA at once to the caller, since only the device knows how
     * many rows there are to copy. */
    float *logits;
    int32_t *ids;
    float *weights;
} forward_t;

static epmoe_status_t check_device_args(const epmoe_layer_t *layer, const epmoe_forward_args_t *args)
{
    const struct {
        const char *name;
        const void *pointer;
    } tensors[] = {{"x", args->x},
                   {"y", args->y},
                   {"residual", args->residual},
                   {"logits", args->logits},
                   {"expert_load", args->expert_load}};
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++)
        EPMOEI_CHECK(epmoei_check_aligned(tensors[i].name, tensors[i].pointer, 16));
    return epmoei_comm_check_device(layer->comm);
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
    if (own->max_rank_tokens < 0 || (own->max_rank_tokens && own->max_rank_tokens < own->num_tokens))
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                           "max_rank_tokens is %d: expected 0 or at least num_tokens (%d)", own->max_rank_tokens,
                           own->num_tokens);
    if (own->num_tokens_dev && layer->backend == EPMOE_BACKEND_CPU) {
        int32_t actual = *own->num_tokens_dev;
        if (actual < 0 || actual > own->num_tokens)
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "*num_tokens_dev is %d: expected 0..%d (num_tokens)",
                               actual, own->num_tokens);
        own->num_tokens = actual;
        own->num_tokens_dev = NULL;
    }
    /* A transport that plans on the host cannot know a count that only the device has. */
    if (own->num_tokens_dev && layer->ep && !epmoei_ep_counts_on_device(layer->ep))
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED,
                           "num_tokens_dev is given: over transport %s with several ranks T is num_tokens alone",
                           epmoe_transport_string(layer->comm->transport));
    if (own->stage_us && layer->backend != EPMOE_BACKEND_CPU)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "stage_us is given: on CUDA stages are timed by stage_events");
    if (own->stage_events && layer->backend != EPMOE_BACKEND_CUDA)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "stage_events is given: on the CPU stages are timed by stage_us");
    if (!layer->has_weights) return epmoei_fail(EPMOE_ERROR_BAD_STATE, "the layer has no weights: set or load them");
    if (own->num_tokens && (!own->x || !own->y))
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s is NULL with num_tokens %d", own->x ? "y" : "x",
                           own->num_tokens);
    return layer->backend == EPMOE_BACKEND_CUDA ? check_device_args(layer, own) : EPMOE_OK;
}

static void choose_router_outputs(forward_t *forward)
{
    const epmoe_layer_t *layer = forward->layer;
    const epmoe_forward_args_t *args = &forward->args;
    /* Between ranks a later failure must leave the caller's arrays alone, if this call is to report it. */
    bool direct = layer->backend == EPMOE_BACKEND_CUDA && (!layer->ep || epmoei_ep_counts_on_device(layer->ep));
    forward->logits = direct && args->logits_out ? args->logits_out : layer->workspace.logits;
    forward->ids = direct && args->ids_out ? args->ids_out : layer->workspace.ids;
    forward->weights = direct && args->weights_out ? args->weights_out : layer->workspace.weights;
}

/* A product over all tokens of this rank: one group. */
static epmoe_grouped_gemm_args_t dense_gemm(const forward_t *forward, int32_t n, int32_t k, const void *x,
                                            epmoe_weight_t weight, epmoe_dtype_t y_dtype, void *y)
{
    const epmoei_layer_workspace_t *workspace = &forward->layer->workspace;
    epmoe_grouped_gemm_args_t gemm = EPMOE_GROUPED_GEMM_ARGS_INIT;
    gemm.backend = forward->layer->backend;
    gemm.num_experts = 1;
    gemm.n = n;
    gemm.k = k;
    gemm.max_rows = forward->args.num_tokens;
    gemm.num_rows_dev = forward->args.num_tokens_dev;
    gemm.x_dtype = forward->layer->config.dtype;
    gemm.x = x;
    gemm.x_sorted = 1;
    gemm.weight = weight;
    gemm.layout = EPMOE_LAYOUT_PACKED;
    gemm.activation = EPMOE_ACTIVATION_NONE;
    gemm.y_dtype = y_dtype;
    gemm.y = y;
    gemm.workspace = workspace->gemm_workspace;
    gemm.workspace_bytes = workspace->gemm_bytes;
    return gemm;
}

/* The router, or the shared expert's gate. */
static epmoe_weight_t router_weight(const epmoe_layer_t *layer, const void *data)
{
    return epmoei_layer_weight(layer->backend, epmoei_format_of_dtype(layer->weights.formats.router), NULL, data, NULL);
}

static epmoe_topk_args_t topk_args(const forward_t *forward)
{
    const epmoe_layer_t *layer = forward->layer;
    const epmoe_layer_config_t *config = &layer->config;
    epmoe_topk_args_t topk = EPMOE_TOPK_ARGS_INIT;
    topk.backend = layer->backend;
    topk.num_tokens = forward->args.num_tokens;
    topk.num_experts = config->num_experts;
    topk.top_k = config->top_k;
    topk.logits_dtype = EPMOE_F32;
    topk.selection_bias = layer->weights.selection_bias;
    topk.scoring = config->scoring;
    topk.renormalize = config->renormalize;
    topk.scale = config->routed_scale;
    topk.n_group = config->n_group;
    topk.topk_group = config->topk_group;
    topk.group_score = config->group_score;
    topk.jitter = config->router_jitter;
    topk.ids = forward->ids;
    topk.weights = forward->weights;
    topk.num_tokens_dev = forward->args.num_tokens_dev;
    return topk;
}

/* The product, the choice and, where it is wanted and fits, the slots' order at once. */
static epmoe_status_t route_cuda(forward_t *forward, const epmoei_experts_order_t *order)
{
    const epmoe_layer_t *layer = forward->layer;
    const epmoe_forward_args_t *args = &forward->args;
    epmoei_route_args_t at_once = {.struct_size = sizeof at_once};
    at_once.backend = layer->backend;
    at_once.hidden = layer->config.hidden;
    at_once.dtype = layer->config.dtype;
    at_once.x = args->x;
    at_once.weight = layer->weights.router;
    at_once.bias = layer->weights.router_bias;
    /* Nobody reads the router's own logits otherwise. */
    at_once.logits = args->logits_out || args->logits ? forward->logits : NULL;
    at_once.topk = topk_args(forward);
    at_once.topk.logits = args->logits;
    if (epmoei_layer_joins_tokens(&layer->weights, args->num_tokens)) {
        at_once.joined_ids = layer->workspace.joined_ids;
        at_once.joined_weights = layer->workspace.joined_weights;
    }
    at_once.sorted_ids = order->sorted_ids;
    at_once.num_post_padded = order->num_post_padded;
    at_once.expert_offsets = order->expert_offsets;
    at_once.places = order->places;
    at_once.workspace = layer->workspace.route_workspace;
    at_once.workspace_bytes = layer->workspace.route_bytes;
    return epmoei_route(&at_once, forward->stream);
}

/* `order` is filled on CUDA if epmoei_route_aligns; its pointers may be NULL. */
static epmoe_status_t route(forward_t *forward, const epmoei_experts_order_t *order)
{
    const epmoe_layer_t *layer = forward->layer;
    const epmoe_layer_config_t *config = &layer->config;
    const epmoe_forward_args_t *args = &forward->args;
    if (args->num_tokens == 0) return EPMOE_OK;
    if (layer->backend == EPMOE_BACKEND_CUDA) return route_cuda(forward, order);

    epmoe_grouped_gemm_args_t gemm =
        dense_gemm(forward, config->num_experts, config->hidden, args->x, router_weight(layer, layer->weights.router),
                   EPMOE_F32, forward->logits);
    gemm.bias = layer->weights.router_bias;
    gemm.batch_invariant = 1; /* a token's experts must not depend on its batch */
    EPMOEI_CHECK(epmoe_grouped_gemm(&gemm, forward->stream));
    epmoe_topk_args_t topk = topk_args(forward);
    topk.logits = args->logits ? args->logits : forward->logits;
    return epmoe_topk(&topk, forward->stream);
}

/* Kernels for few tokens read weights alone, and leave activations as they are. */
static void choose_fp8_activations(const epmoe_layer_t *layer, epmoe_experts_args_t *experts)
{
    if (layer->config.fp8_activations == 0 && epmoei_experts_few_takes(experts)) return;
    experts->fp8_activations = epmoei_layer_fp8_activations(&layer->config, layer->backend, &experts->gate_up,
                                                            &experts->down, experts->intermediate);
}

/* The shared expert as the only one there is. */
static epmoe_experts_args_t shared_as_experts(const epmoe_layer_t *layer, const epmoe_forward_args_t *args)
{
    const epmoe_layer_config_t *config = &layer->config;
    const epmoei_packed_weights_t *weights = &layer->weights;
    const epmoei_layer_workspace_t *workspace = &layer->workspace;
    epmoe_experts_args_t experts = EPMOE_EXPERTS_ARGS_INIT;
    experts.backend = layer->backend;
    experts.num_tokens = args->num_tokens;
    experts.num_tokens_dev = args->num_tokens_dev;
    experts.top_k = experts.num_experts = 1;
    experts.hidden = config->hidden;
    experts.intermediate = config->shared_intermediate;
    experts.dtype = config->dtype;
    experts.y_dtype = EPMOE_F32;
    experts.x = args->x;
    experts.ids = workspace->shared_ids;
    experts.weights = config->shared_gated ? workspace->shared_gate : workspace->shared_ones;
    experts.gate_up =
        epmoei_layer_weight(layer->backend, weights->formats.shared_gate_up, &weights->formats.shared_gate_up_pack,
                            weights->shared_gate_up, &weights->shared_gate_up_arrays);
    experts.down = epmoei_layer_weight(layer->backend, weights->formats.shared_down, &weights->formats.shared_down_pack,
                                       weights->shared_down, &weights->shared_down_arrays);
    experts.layout = EPMOE_LAYOUT_PACKED;
    experts.activation = config->activation;
    experts.alpha = config->alpha;
    experts.limit = config->limit;
    choose_fp8_activations(layer, &experts);
    experts.y = workspace->shared;
    return experts;
}

/* workspace->shared = the shared expert's output in fp32, times its gate. */
static epmoe_status_t run_shared(forward_t *forward)
{
    const epmoe_layer_t *layer = forward->layer;
    const epmoe_layer_config_t *config = &layer->config;
    const epmoei_packed_weights_t *weights = &layer->weights;
    const epmoei_layer_workspace_t *workspace = &layer->workspace;
    int32_t tokens = forward->args.num_tokens;
    if (tokens == 0 || config->shared_intermediate == 0 || epmoei_layer_joins_tokens(weights, tokens)) return EPMOE_OK;

    if (config->shared_gated) {
        epmoe_grouped_gemm_args_t gate =
            dense_gemm(forward, 1, config->hidden, forward->args.x, router_weight(layer, weights->shared_gate),
                       EPMOE_F32, workspace->shared_gate);
        gate.batch_invariant = 1;
        gate.activation = EPMOE_ACTIVATION_SIGMOID;
        EPMOEI_CHECK(epmoe_grouped_gemm(&gate, forward->stream));
    }
    const epmoei_kernel_table_t *kernels;
    EPMOEI_CHECK(epmoei_kernels(layer->backend, &kernels));
    const epmoe_experts_args_t experts = shared_as_experts(layer, &forward->args);
    if (kernels->experts_few_gate_up && epmoei_experts_few_takes(&experts)) {
        EPMOEI_CHECK(kernels->experts_few_gate_up(&experts, workspace->shared_h, forward->stream));
        return kernels->experts_few_down(&experts, workspace->shared_h, forward->stream);
    }
    epmoe_grouped_gemm_args_t gemm1 = dense_gemm(forward, 2 * config->shared_intermediate, config->hidden,
                                                 forward->args.x, experts.gate_up, config->dtype, workspace->shared_h);
    gemm1.fp8_activations = experts.fp8_activations;
    gemm1.activation = config->activation;
    gemm1.alpha = config->alpha;
    gemm1.limit = config->limit;
    EPMOEI_CHECK(epmoe_grouped_gemm(&gemm1, forward->stream));
    epmoe_grouped_gemm_args_t gemm2 = dense_gemm(forward, config->hidden, config->shared_intermediate,
                                                 workspace->shared_h, experts.down, EPMOE_F32, workspace->shared);
    gemm2.fp8_activations = experts.fp8_activations;
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
    experts.gate_up = epmoei_layer_weight(layer->backend, packed->formats.gate_up, &packed->formats.gate_up_pack,
                                          packed->gate_up, &packed->gate_up_arrays);
    experts.down = epmoei_layer_weight(layer->backend, packed->formats.down, &packed->formats.down_pack, packed->down,
                                       &packed->down_arrays);
    experts.layout = EPMOE_LAYOUT_PACKED;
    choose_fp8_activations(layer, &experts);
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

bool epmoei_layer_quantises(const epmoe_layer_t *layer, int32_t tokens, bool shared)
{
    const epmoe_forward_args_t args = {.num_tokens = tokens};
    return shared ? shared_as_experts(layer, &args).fp8_activations
                  : experts_args(layer, tokens, NULL, NULL, NULL, layer->config.dtype, NULL).fp8_activations;
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
    sum.num_tokens_dev = forward->args.num_tokens_dev;
    return epmoe_sum(&sum, forward->stream);
}

/* One rank: x as it would arrive from another. */
static epmoe_status_t round_rows(const forward_t *forward, void *rounded)
{
    const epmoe_layer_config_t *config = &forward->layer->config;
    const epmoei_round_rows_t round = {.dst = rounded,
                                       .src = forward->args.x,
                                       .dtype = config->dtype,
                                       .hidden = config->hidden,
                                       .num_rows = forward->args.num_tokens,
                                       .num_rows_dev = forward->args.num_tokens_dev};
    return epmoei_round_rows(forward->layer->backend, &round, forward->stream);
}

/* With one rank: ids become physical experts where there is a placement, and the load is counted. */
static epmoe_status_t place_ids(const forward_t *forward)
{
    const epmoe_layer_t *layer = forward->layer;
    if (!layer->placement && !forward->args.expert_load) return EPMOE_OK;
    epmoei_place_ids_t place = epmoei_placement_args(layer->placement, layer->config.num_experts);
    place.num_tokens = forward->args.num_tokens;
    place.num_tokens_dev = forward->args.num_tokens_dev;
    place.top_k = layer->config.top_k;
    place.ids = forward->ids;
    place.physical_ids = layer->placement ? layer->workspace.physical_ids : NULL;
    place.load = forward->args.expert_load;
    return epmoei_place_ids(layer->backend, &place, forward->stream);
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
    const bool rounds = layer->config.wire_dtype != layer->config.dtype;
    const void *x = rounds ? workspace->rounded : args->x;
    const int32_t *ids = layer->placement ? workspace->physical_ids : forward->ids;
    epmoe_experts_args_t experts =
        experts_args(layer, args->num_tokens, x, ids, forward->weights, layer->config.dtype, args->y);
    if (epmoei_layer_joins_tokens(&layer->weights, args->num_tokens))
        epmoei_layer_join_experts(layer, &experts);
    else if (layer->config.shared_intermediate)
        experts.addend = workspace->shared;
    experts.residual = args->residual;
    experts.num_tokens_dev = args->num_tokens_dev;
    epmoei_experts_order_t order = {0};
    bool aligned = layer->backend == EPMOE_BACKEND_CUDA && !layer->placement && !epmoei_experts_few_takes(&experts) &&
                   epmoei_route_aligns(args->num_tokens, layer->config.num_experts, experts.top_k);
    if (aligned && args->num_tokens) EPMOEI_CHECK(epmoei_experts_order(&experts, &order));
    EPMOEI_CHECK(route(forward, &order));
    EPMOEI_CHECK(place_ids(forward));
    EPMOEI_CHECK(epmoei_stages_end(&forward->stages, EPMOE_STAGE_ROUTER));
    if (rounds) {
        EPMOEI_CHECK(round_rows(forward, workspace->rounded));
        EPMOEI_CHECK(epmoei_stages_end(&forward->stages, EPMOE_STAGE_DISPATCH));
    }
    EPMOEI_CHECK(run_shared(forward));
    EPMOEI_CHECK(epmoei_stages_end(&forward->stages, EPMOE_STAGE_SHARED));
    return epmoei_experts_run(&experts, aligned, forward->stream, &forward->stages);
}

/* Whether the rows of a dispatch go to this rank's experts as they travel, and not as what they stand for. */
static bool keeps_codes(const epmoe_layer_t *layer, int32_t max_rank_tokens)
{
    if (layer->config.wire_dtype == layer->config.dtype || !layer->local_experts) return false;
    if (!epmoei_ep_counts_on_device(layer->ep)) return false;
    const epmoe_experts_args_t experts = experts_args(layer, epmoei_ep_bound_of_rows(layer->ep, max_rank_tokens), NULL,
                                                      NULL, NULL, epmoe_ep_partial_dtype(layer->ep), NULL);
    return epmoei_experts_take_codes(&experts);
}

static epmoe_status_t copy_out(const forward_t *forward, void *to, const void *from, int64_t row_elements)
{
    if (!to || to == from) return EPMOE_OK;
    return epmoei_memory_copy(forward->layer->backend, to, from, forward->args.num_tokens * row_elements * 4,
                              forward->stream);
}

/* Several ranks. `local` is this rank's status so far: it goes to all ranks with the dispatch, so that an error of
 * one rank is everybody's, and nobody waits for a rank that has given up. Whatever fails later, both halves of the
 * dispatch and the combine take place. */
static epmoe_status_t exchange_and_compute(forward_t *forward, epmoe_status_t local)
{
    epmoe_layer_t *layer = forward->layer;
    epmoei_stages_t *stages = &forward->stages;
    const epmoe_forward_args_t *args = &forward->args;
    const epmoei_experts_order_t no_order = {0}; /* the rows to sort are not these */
    if (local == EPMOE_OK) local = route(forward, &no_order);
    if (local == EPMOE_OK) local = epmoei_stages_end(stages, EPMOE_STAGE_ROUTER);

    epmoe_dispatch_args_t dispatch = EPMOE_DISPATCH_ARGS_INIT;
    dispatch.num_tokens = args->num_tokens;
    dispatch.x = args->x;
    dispatch.ids = forward->ids;
    dispatch.weights = forward->weights;
    dispatch.num_tokens_dev = args->num_tokens_dev;
    dispatch.max_rank_tokens = args->max_rank_tokens;
    dispatch.expert_load = args->expert_load;
    epmoei_ep_keep_codes(layer->ep, local == EPMOE_OK && keeps_codes(layer, args->max_rank_tokens));
    EPMOEI_CHECK(epmoei_dispatch_begin(layer->ep, &dispatch, local, forward->stream));
    local = epmoei_stages_end(stages, EPMOE_STAGE_DISPATCH);

    if (local == EPMOE_OK) local = run_shared(forward); /* while the rows travel */
    if (local == EPMOE_OK) local = epmoei_stages_end(stages, EPMOE_STAGE_SHARED);

    epmoe_dispatch_result_t rows = EPMOE_DISPATCH_RESULT_INIT;
    EPMOEI_CHECK(epmoei_dispatch_finish(layer->ep, &rows, forward->stream));
    if (local == EPMOE_OK) local = epmoei_stages_end(stages, EPMOE_STAGE_DISPATCH);

    if (local == EPMOE_OK && layer->local_experts) {
        epmoe_experts_args_t experts = experts_args(layer, epmoei_ep_num_rows(layer->ep), rows.x, rows.ids,
                                                    rows.weights, epmoe_ep_partial_dtype(layer->ep), rows.y);
        if (epmoei_ep_counts_on_device(layer->ep)) experts.num_tokens_dev = rows.num_rows;
        const epmoei_coded_rows_t codes = epmoei_ep_codes(layer->ep);
        local = epmoei_ep_keeps_codes(layer->ep) ? epmoei_experts_run_codes(&experts, &codes, forward->stream, stages)
                                                 : epmoei_experts_run(&experts, false, forward->stream, stages);
    }
    /* Peers add these rows to their tokens: what was not computed must not look like numbers. */
    if (local != EPMOE_OK)
        epmoei_memory_set(layer->backend, rows.y, 0xFF,
                          (int64_t)rows.max_rows * layer->config.hidden *
                              epmoe_dtype_size(epmoe_ep_partial_dtype(layer->ep)),
                          forward->stream);
    epmoei_stages_skip(stages);

    epmoe_combine_args_t combine = EPMOE_COMBINE_ARGS_INIT;
    combine.shared = layer->config.shared_intermediate ? layer->workspace.shared : NULL;
    combine.residual = args->residual;
    combine.y = args->y;
    epmoe_status_t status = epmoe_combine(layer->ep, &combine, forward->stream);
    if (status == EPMOE_OK) status = epmoei_stages_end(stages, EPMOE_STAGE_COMBINE);
    return local != EPMOE_OK ? local : status;
}

static epmoe_status_t run_routed(forward_t *forward, epmoe_status_t local)
{
    /* Bad ids of earlier calls are reported here or by the next call, never between dispatch and combine, where only
     * this rank would fail. */
    if (local == EPMOE_OK && forward->layer->backend == EPMOE_BACKEND_CUDA) local = epmoei_error_word_check();
    epmoei_error_word_hold(1);
    epmoe_status_t status = exchange_and_compute(forward, local);
    epmoei_error_word_hold(-1);
    return status;
}

epmoe_status_t epmoei_layer_check_forward(const epmoe_layer_t *layer, const epmoe_forward_args_t *args)
{
    forward_t forward = {.layer = (epmoe_layer_t *)(uintptr_t)layer};
    return check_args(&forward, args);
}

epmoe_status_t epmoei_layer_forward_after(epmoe_layer_t *layer, epmoe_status_t local, const epmoei_stages_t *begun,
                                          const epmoe_forward_args_t *args, epmoe_stream_t stream)
{
    forward_t forward = {.layer = layer, .stream = stream};
    epmoe_status_t status = local == EPMOE_OK ? check_args(&forward, args) : local;
    if (status != EPMOE_OK) forward.args.num_tokens = 0;
    choose_router_outputs(&forward);
    if (begun)
        forward.stages = *begun;
    else if (status == EPMOE_OK)
        status = epmoei_stages_begin(&forward.stages, stream, forward.args.stage_events);

    if (layer->ep) {
        status = run_routed(&forward, status);
    } else if (layer->config.num_experts) {
        if (status == EPMOE_OK) status = run_local(&forward);
    } else {
        if (status == EPMOE_OK) status = run_shared(&forward);
        if (status == EPMOE_OK) status = epmoei_stages_end(&forward.stages, EPMOE_STAGE_SHARED);
        if (status == EPMOE_OK) status = finish_dense(&forward);
        if (status == EPMOE_OK) status = epmoei_stages_end(&forward.stages, EPMOE_STAGE_COMBINE);
    }
    if (status != EPMOE_OK) return status;

    const epmoe_layer_config_t *config = &layer->config;
    EPMOEI_CHECK(copy_out(&forward, forward.args.logits_out, forward.logits, config->num_experts));
    EPMOEI_CHECK(copy_out(&forward, forward.args.ids_out, forward.ids, config->top_k));
    EPMOEI_CHECK(copy_out(&forward, forward.args.weights_out, forward.weights, config->top_k));
    if (forward.args.stage_us) memcpy(forward.args.stage_us, forward.stages.us, sizeof forward.stages.us);
    return EPMOE_OK;
}

epmoe_status_t epmoe_layer_forward_args(epmoe_layer_t *layer, const epmoe_forward_args_t *args, epmoe_stream_t stream)
{
    if (!layer) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "layer is NULL");
    return epmoei_layer_forward_after(layer, EPMOE_OK, NULL, args, stream);
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
