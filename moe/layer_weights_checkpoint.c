#include "moe/layer_weights.h"

#include "comm/comm.h"

typedef struct loading_t {
    const epmoe_layer_t *layer;
    const epmoe_checkpoint_t *checkpoint;
    int32_t layer_index;
} loading_t;

static epmoe_status_t loading_layer(const void *ctx, epmoei_layer_source_t *out)
{
    const loading_t *loading = ctx;
    return epmoei_checkpoint_layer_source(loading->checkpoint, loading->layer_index, out);
}

static epmoe_status_t loading_expert(const void *ctx, int32_t local_expert, epmoei_expert_source_t *out)
{
    const loading_t *loading = ctx;
    return epmoei_checkpoint_expert_source(loading->checkpoint, loading->layer_index,
                                           loading->layer->first_expert + local_expert, out);
}

/* A layer made for another model would run and be wrong. */
static epmoe_status_t check_config(const epmoe_layer_config_t *have, const epmoe_layer_config_t *file)
{
    const struct {
        const char *name;
        double have;
        double file;
    } fields[] = {
        {"hidden", have->hidden, file->hidden},
        {"intermediate", have->intermediate, file->intermediate},
        {"num_experts", have->num_experts, file->num_experts},
        {"top_k", have->top_k, file->top_k},
        {"scoring", have->scoring, file->scoring},
        {"renormalize", have->renormalize, file->renormalize},
        {"routed_scale", (double)have->routed_scale, (double)file->routed_scale},
        {"n_group", have->n_group, file->n_group},
        {"topk_group", have->topk_group, file->topk_group},
        {"group_score", have->group_score, file->group_score},
        {"router_has_bias", have->router_has_bias, file->router_has_bias},
        {"has_selection_bias", have->has_selection_bias, file->has_selection_bias},
        {"weight_on_input", have->weight_on_input, file->weight_on_input},
        {"activation", have->activation, file->activation},
        {"alpha", (double)have->alpha, (double)file->alpha},
        {"limit", (double)have->limit, (double)file->limit},
        {"expert_has_bias", have->expert_has_bias, file->expert_has_bias},
        {"shared_intermediate", have->shared_intermediate, file->shared_intermediate},
        {"shared_gated", have->shared_gated, file->shared_gated},
    };
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++)
        if (fields[i].have != fields[i].file)
            return epmoei_fail(EPMOE_ERROR_MISMATCH, "the layer's %s is %g and the checkpoint's is %g", fields[i].name,
                               fields[i].have, fields[i].file);
    return EPMOE_OK;
}

static epmoe_status_t load_local(epmoe_layer_t *layer, const epmoe_checkpoint_t *checkpoint, int32_t layer_index,
                                 const epmoe_load_options_t *options)
{
    epmoe_load_options_t own = EPMOE_LOAD_OPTIONS_INIT;
    epmoe_layer_config_t raw = EPMOE_LAYER_CONFIG_INIT, file;
    EPMOEI_CHECK(epmoei_comm_check_device(layer->comm));
    if (!checkpoint) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "checkpoint is NULL");
    if (options) EPMOEI_CHECK(epmoei_copy_sized(&own, sizeof own, options, "options"));
    EPMOEI_CHECK(epmoe_checkpoint_layer_config(checkpoint, layer_index, &raw));
    EPMOEI_CHECK(epmoei_layer_config_check(&raw, &file));
    EPMOEI_CHECK(check_config(&layer->config, &file));
    const loading_t loading = {layer, checkpoint, layer_index};
    const epmoei_weights_source_t source = {loading_layer, loading_expert, &loading, &own};
    return epmoei_layer_build_weights(layer, &source, false);
}

epmoe_status_t epmoe_layer_load_checkpoint(epmoe_layer_t *layer, const epmoe_checkpoint_t *checkpoint,
                                           int32_t layer_index, const epmoe_load_options_t *options)
{
    if (!layer) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "layer is NULL");
    epmoe_status_t status = load_local(layer, checkpoint, layer_index, options);
    status = epmoe_comm_agree(layer->comm, status);
    if (status != EPMOE_OK) epmoei_layer_drop_weights(layer);
    return status;
}
