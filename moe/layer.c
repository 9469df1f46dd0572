#include "moe/layer_joined.h"

#include "base/device.h"
#include "base/dtype.h"
#include "comm/comm.h"
#include "kernels/experts_few.h"
#include "kernels/kernel_table.h"

#include <string.h>

/* Everything but max_tokens, capacity and comm_sms, which may differ per rank. */
static epmoe_status_t agree(epmoe_comm_t *comm, epmoe_status_t local, const epmoe_layer_config_t *config)
{
    const epmoei_agreed_t fields[] = {
        {"hidden", config->hidden},
        {"intermediate", config->intermediate},
        {"num_experts", config->num_experts},
        {"top_k", config->top_k},
        {"scoring", config->scoring},
        {"renormalize", config->renormalize},
        {"routed_scale", (double)config->routed_scale},
        {"n_group", config->n_group},
        {"topk_group", config->topk_group},
        {"group_score", config->group_score},
        {"router_jitter", (double)config->router_jitter},
        {"router_has_bias", config->router_has_bias},
        {"has_selection_bias", config->has_selection_bias},
        {"weight_on_input", config->weight_on_input},
        {"activation", config->activation},
        {"alpha", (double)config->alpha},
        {"limit", (double)config->limit},
        {"expert_has_bias", config->expert_has_bias},
        {"shared_intermediate", config->shared_intermediate},
        {"shared_gated", config->shared_gated},
        {"dtype", config->dtype},
        {"weight_format", config->weight_format},
        {"weight_group", config->weight_group},
        {"fp8_activations", config->fp8_activations},
        {"wire_dtype", config->wire_dtype},
        {"num_physical", config->num_physical},
        {"placement (0 = NULL)", config->placement != NULL},
    };
    return epmoei_comm_agree_on(comm, "layer config", local, fields, (int32_t)(sizeof fields / sizeof fields[0]));
}

/* Sum over ranks of max_tokens, or this rank's capacity. Collective. */
static epmoe_status_t find_max_rows(epmoe_layer_t *layer)
{
    int32_t size = epmoe_comm_size(layer->comm);
    int64_t mine = layer->config.max_tokens, total = 0;
    int64_t *all = epmoei_alloc((int64_t)size * 8);
    epmoe_status_t status = epmoe_comm_agree(
        layer->comm, all ? EPMOE_OK : epmoei_fail(EPMOE_ERROR_OUT_OF_MEMORY, "no memory for %d ranks' sizes", size));
    if (status == EPMOE_OK) status = epmoe_comm_all_gather(layer->comm, &mine, all, sizeof mine);
    for (int32_t r = 0; status == EPMOE_OK && r < size; r++) total += all[r];
    epmoei_free(all);
    layer->max_rows = epmoei_layer_max_rows(&layer->config, total);
    return status;
}

epmoe_status_t epmoei_layer_fit_workspace(epmoe_layer_t *layer)
{
    epmoei_layer_workspace_t workspace;
    /* On the CPU, and before there are weights, that of what the layout assumes. */
    const epmoei_packed_weights_t *weights =
        layer->weights_memory && layer->backend == EPMOE_BACKEND_CUDA ? &layer->weights : NULL;
    EPMOEI_CHECK(epmoei_layer_workspace_layout(NULL, &layer->config, layer->backend, layer->local_experts,
                                               layer->max_rows, weights, &workspace));
    if (!layer->workspace_memory || workspace.bytes > layer->workspace.bytes) {
        void *memory;
        EPMOEI_CHECK(epmoei_memory_alloc(layer->backend, &memory, workspace.bytes, "the layer's workspace"));
        epmoei_memory_free(layer->backend, layer->workspace_memory);
        layer->workspace_memory = memory;
    } else {
        workspace.bytes = layer->workspace.bytes; /* what the memory holds */
    }
    int64_t bytes = workspace.bytes;
    EPMOEI_CHECK(epmoei_layer_workspace_layout(layer->workspace_memory, &layer->config, layer->backend,
                                               layer->local_experts, layer->max_rows, weights, &layer->workspace));
    layer->workspace.bytes = bytes;
    if (layer->backend != EPMOE_BACKEND_CUDA || !layer->config.shared_intermediate ||
        (weights && epmoei_layer_joins_always(weights, layer->config.max_tokens)))
        return EPMOE_OK;
    float ones[EPMOEI_EXPERTS_FEW_MOST_TOKENS];
    for (int32_t i = 0; i < EPMOEI_EXPERTS_FEW_MOST_TOKENS; i++) ones[i] = 1.0f;
    EPMOEI_CHECK(epmoei_memory_set(layer->backend, layer->workspace.shared_ids, 0, (int64_t)sizeof ones, NULL));
    EPMOEI_CHECK(epmoei_memory_copy(layer->backend, layer->workspace.shared_ones, ones, (int64_t)sizeof ones, NULL));
    return epmoei_stream_wait(layer->backend, NULL);
}

/* The caller's array may go. */
static epmoe_status_t copy_placement(epmoe_layer_t *layer)
{
    epmoe_layer_config_t *config = &layer->config;
    if (!config->placement) return EPMOE_OK;
    const int64_t bytes = config->num_physical * 4LL;
    EPMOEI_CHECK(epmoei_alloc_for((void **)&layer->placement_copy, bytes, "a placement"));
    memcpy(layer->placement_copy, config->placement, (size_t)bytes);
    config->placement = layer->placement_copy;
    if (epmoe_comm_size(layer->comm) > 1) return EPMOE_OK;
    return epmoei_placement_create(config->placement, config->num_experts, config->num_physical, 1, 0, layer->backend,
                                   &layer->placement);
}

static epmoe_status_t make_memory(epmoe_layer_t *layer)
{
    EPMOEI_CHECK(copy_placement(layer));
    return epmoei_layer_fit_workspace(layer);
}

static epmoe_status_t make_ep(epmoe_layer_t *layer)
{
    if (!layer->config.num_experts || epmoe_comm_size(layer->comm) == 1) return EPMOE_OK;
    epmoe_ep_config_t ep = epmoei_layer_ep_config(&layer->config);
    return epmoe_ep_create(layer->comm, &ep, &layer->ep);
}

static epmoe_status_t check_cuda(const epmoe_layer_config_t *config)
{
    const struct {
        const char *name;
        int32_t value;
    } multiples[] = {{"hidden", config->hidden},
                     {"intermediate", config->intermediate},
                     {"shared_intermediate", config->shared_intermediate}};
    for (size_t i = 0; i < sizeof multiples / sizeof multiples[0]; i++)
        if (multiples[i].value % 8)
            return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "config.%s is %d: on CUDA it must be a multiple of 8",
                               multiples[i].name, multiples[i].value);
    if (config->dtype == EPMOE_F32 || config->weight_format == EPMOE_FORMAT_F32)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "config.dtype is %s and weight_format %s: on CUDA bf16 or fp16",
                           epmoe_dtype_string(config->dtype), epmoe_format_string(config->weight_format));
    if (!epmoei_format_is_quantised(config->weight_format) &&
        epmoei_format_of_dtype(config->dtype) != config->weight_format)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "config.dtype is %s and weight_format %s: on CUDA the same",
                           epmoe_dtype_string(config->dtype), epmoe_format_string(config->weight_format));
    if (config->fp8_activations == 1 && epmoei_cuda_tier() != 90)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED,
                           "config.fp8_activations is 1: on CUDA it needs compute capability 9.0 and tier sm90");
    return EPMOE_OK;
}

epmoe_status_t epmoe_layer_create(const epmoe_layer_config_t *config, epmoe_comm_t *comm, epmoe_layer_t **out)
{
    if (out) *out = NULL;
    epmoe_comm_t *own_comm = NULL;
    if (!comm) {
        EPMOEI_CHECK(epmoe_comm_create(NULL, NULL, &own_comm));
        comm = own_comm;
    }
    /* From here on every rank goes through the same collectives, whatever fails locally. */
    epmoe_layer_config_t checked = EPMOE_LAYER_CONFIG_INIT;
    epmoe_layer_t *layer = epmoei_calloc((int64_t)sizeof *layer);
    epmoe_status_t status = layer ? epmoei_layer_config_check(config, &checked)
                                  : epmoei_fail(EPMOE_ERROR_OUT_OF_MEMORY, "no memory for a layer");
    if (status == EPMOE_OK && comm->backend == EPMOE_BACKEND_CUDA) status = check_cuda(&checked);
    if (status == EPMOE_OK) status = epmoei_comm_check_device(comm);
    if (status == EPMOE_OK && !out) status = epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "layer is NULL");
    status = agree(comm, status, &checked);
    if (status != EPMOE_OK) goto fail;

    layer->config = checked;
    layer->comm = comm;
    layer->own_comm = own_comm;
    layer->backend = comm->backend;
    EPMOEI_CHECK_GOTO(epmoe_expert_range(checked.num_physical, epmoe_comm_size(comm), epmoe_comm_rank(comm),
                                         &layer->first_expert, &layer->local_experts),
                      fail);
    EPMOEI_CHECK_GOTO(find_max_rows(layer), fail);
    EPMOEI_CHECK_GOTO(epmoe_comm_agree(comm, make_memory(layer)), fail);
    EPMOEI_CHECK_GOTO(make_ep(layer), fail);
    *out = layer;
    return EPMOE_OK;

fail:
    if (layer) {
        epmoei_memory_free(layer->backend, layer->workspace_memory);
        epmoei_placement_destroy(layer->placement);
        epmoei_free(layer->placement_copy);
        epmoei_free(layer);
    }
    epmoe_comm_destroy(own_comm);
    return status;
}

void epmoe_layer_destroy(epmoe_layer_t *layer)
{
    if (!layer) return;
    epmoe_ep_destroy(layer->ep);
    epmoei_memory_free(layer->backend, layer->weights_memory);
    epmoei_memory_free(layer->backend, layer->workspace_memory);
    epmoei_placement_destroy(layer->placement);
    epmoei_free(layer->placement_copy);
    epmoe_comm_destroy(layer->own_comm);
    epmoei_free(layer);
}
