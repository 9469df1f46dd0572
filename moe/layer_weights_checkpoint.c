#include "moe/layer_weights.h"

#include "comm/comm.h"
#include "moe/checkpoint_internal.h"
#include "moe/expert_slice.h"

#include <stdio.h>

/* A rank that loads meets the others after this part of timeout_s and the step in progress, so that those who wait for
 * it at the end know it alive: what is left of timeout_s bounds one step, not the whole load. */
#define MEETING_SHARE 0.1

typedef struct loading_t {
    const epmoe_layer_t *layer;
    const epmoe_checkpoint_t *checkpoint;
    int32_t layer_index;
    int32_t tp_rank, tp_size;
    double last_meeting; /* seconds */
    bool ended;          /* by a meeting that failed: the same on all ranks, which meet no more */
} loading_t;

static epmoe_status_t loading_layer(const void *ctx, epmoei_layer_source_t *out)
{
    const loading_t *loading = ctx;
    EPMOEI_CHECK(epmoei_checkpoint_layer_source(loading->checkpoint, loading->layer_index, out));
    return epmoei_slice_expert(&out->shared, loading->tp_rank, loading->tp_size, "shared expert");
}

static epmoe_status_t loading_expert(const void *ctx, int32_t local_expert, epmoei_expert_source_t *out)
{
    const loading_t *loading = ctx;
    const int32_t expert = epmoei_layer_expert(loading->layer, local_expert);
    char name[32];
    snprintf(name, sizeof name, "expert %d", expert);
    EPMOEI_CHECK(epmoei_checkpoint_expert_source(loading->checkpoint, loading->layer_index, expert, out));
    return epmoei_slice_expert(out, loading->tp_rank, loading->tp_size, name);
}

/* Collective: the other ranks' failures, and whether all have loaded everything. */
static epmoe_status_t meet(loading_t *loading, epmoe_status_t local, bool done, bool *all_done)
{
    epmoe_comm_t *comm = loading->layer->comm;
    const epmoei_agreed_t own[] = {
        {NULL, done}, {"options.tp_rank", loading->tp_rank}, {"options.tp_size", loading->tp_size}};
    epmoe_status_t status = epmoei_comm_agree_on(comm, "load_checkpoint", local, own, 3);
    loading->last_meeting = epmoei_now_seconds();
    loading->ended = status != EPMOE_OK;
    *all_done = true;
    for (int32_t r = 0; r < epmoe_comm_size(comm) && status == EPMOE_OK; r++)
        *all_done &= epmoei_comm_agreed_value(comm, r, 0) != 0;
    return status;
}

static epmoe_status_t loading_step(void *ctx)
{
    loading_t *loading = ctx;
    bool all_done;
    double working_s = epmoei_now_seconds() - loading->last_meeting;
    if (working_s < MEETING_SHARE * loading->layer->comm->timeout_s) return EPMOE_OK;
    return meet(loading, EPMOE_OK, false, &all_done);
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
        {"router_jitter", (double)have->router_jitter, (double)file->router_jitter},
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

static epmoe_status_t load_local(epmoe_layer_t *layer, loading_t *loading, const epmoe_load_options_t *options)
{
    epmoe_load_options_t own = EPMOE_LOAD_OPTIONS_INIT;
    epmoe_layer_config_t raw = EPMOE_LAYER_CONFIG_INIT, file;
    EPMOEI_CHECK(epmoei_comm_check_device(layer->comm));
    if (!loading->checkpoint) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "checkpoint is NULL");
    if (options) EPMOEI_CHECK(epmoei_copy_sized(&own, sizeof own, options, "options"));
    loading->tp_rank = own.tp_rank;
    loading->tp_size = own.tp_size ? own.tp_size : 1;
    EPMOEI_CHECK(epmoei_check_slice(loading->tp_rank, loading->tp_size));
    EPMOEI_CHECK(epmoe_checkpoint_layer_config(loading->checkpoint, loading->layer_index, &raw));
    EPMOEI_CHECK(epmoei_layer_config_check(&raw, &file));
    EPMOEI_CHECK(epmoei_slice_width("intermediate", loading->tp_size, &file.intermediate));
    EPMOEI_CHECK(epmoei_slice_width("shared_intermediate", loading->tp_size, &file.shared_intermediate));
    EPMOEI_CHECK(check_config(&layer->config, &file));
    char place[512];
    snprintf(place, sizeof place, "%.400s: layer %d", loading->checkpoint->dir, loading->layer_index);
    const epmoei_weights_source_t source = {loading_layer, loading_expert, loading_step, loading, &own, place};
    return epmoei_layer_build_weights(layer, &source, false);
}

epmoe_status_t epmoe_layer_load_checkpoint(epmoe_layer_t *layer, const epmoe_checkpoint_t *checkpoint,
                                           int32_t layer_index, const epmoe_load_options_t *options)
{
    if (!layer) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "layer is NULL");
    loading_t loading = {
        .layer = layer, .checkpoint = checkpoint, .layer_index = layer_index, .last_meeting = epmoei_now_seconds()};
    epmoe_status_t status = load_local(layer, &loading, options);
    for (bool all_done = false; !all_done && !loading.ended;) status = meet(&loading, status, true, &all_done);
    if (status != EPMOE_OK) epmoei_layer_drop_weights(layer);
    return status;
}
