#include "moe/layer_joined.h"

#include "kernels/route.h"

static bool same_pack(epmoe_format_t format, const epmoei_pack_shape_t *a, const epmoei_pack_shape_t *b)
{
    if (!epmoei_format_is_quantised(format)) return true;
    return a->format == b->format && a->group == b->group && a->scales_dtype == b->scales_dtype &&
           a->zeros == b->zeros && a->order == b->order && epmoei_pack_row_group(a) == epmoei_pack_row_group(b);
}

bool epmoei_layer_joins_shared(const epmoe_layer_config_t *config, epmoe_backend_t backend, int32_t local_experts,
                               const epmoei_layer_formats_t *formats)
{
    /* Of one expert a rank among several may have all. */
    const bool alone = config->num_experts > 1 && local_experts == config->num_experts;
    const bool alike = formats->gate_up != EPMOE_FORMAT_NONE && formats->gate_up == formats->shared_gate_up &&
                       formats->down == formats->shared_down &&
                       same_pack(formats->gate_up, &formats->gate_up_pack, &formats->shared_gate_up_pack) &&
                       same_pack(formats->down, &formats->down_pack, &formats->shared_down_pack);
    return backend == EPMOE_BACKEND_CUDA && alone && alike && !config->placement &&
           config->wire_dtype == config->dtype && config->shared_intermediate == config->intermediate &&
           !config->shared_gated && !config->expert_has_bias && config->top_k < EPMOE_MAX_TOP_K &&
           config->num_experts < EPMOEI_ROUTE_ALIGN_EXPERTS && config->max_tokens <= INT32_MAX / (config->top_k + 1);
}

/* 4-bit weights run apart in calls of more tokens than the first number, up to the second: as measured. */
enum { kNarrowTokens = 64, kWideTokens = 256 };

static bool has_4_bits(const epmoei_packed_weights_t *weights)
{
    return weights->formats.gate_up == EPMOE_FORMAT_W4 || weights->formats.gate_up == EPMOE_FORMAT_MXFP4;
}

bool epmoei_layer_joins_tokens(const epmoei_packed_weights_t *weights, int32_t num_tokens)
{
    const bool apart = has_4_bits(weights) && num_tokens > kNarrowTokens && num_tokens <= kWideTokens;
    return weights->joins_shared && !apart;
}

bool epmoei_layer_joins_always(const epmoei_packed_weights_t *weights, int32_t max_tokens)
{
    return weights->joins_shared && (!has_4_bits(weights) || max_tokens <= kNarrowTokens);
}

/* The one of expert `e` in the arrays of all, where they are. */
static void *behind(void *data, int64_t e, int64_t bytes) { return data ? (char *)data + e * bytes : NULL; }

/* The shared expert's matrix behind those of all others. */
static void join_weight(epmoe_backend_t backend, epmoe_format_t format, const epmoei_pack_shape_t *pack,
                        int64_t experts, int64_t rows, int64_t cols, bool halves, void *data,
                        const epmoei_pack_arrays_t *arrays, void **shared, epmoei_pack_arrays_t *shared_arrays)
{
    const epmoei_matrix_sizes_t sizes = epmoei_matrix_sizes(backend, format, pack, rows, cols, halves);
    *shared = behind(data, experts, sizes.data);
    shared_arrays->scales = behind(arrays->scales, experts, sizes.scales);
    shared_arrays->zeros = behind(arrays->zeros, experts, sizes.zeros);
    shared_arrays->order = behind(arrays->order, experts, sizes.order);
}

void epmoei_layer_join_weights(const epmoe_layer_config_t *config, epmoe_backend_t backend, int32_t local_experts,
                               epmoei_packed_weights_t *weights)
{
    const epmoei_layer_formats_t *formats = &weights->formats;
    const int64_t d = config->hidden, f = config->intermediate;
    join_weight(backend, formats->gate_up, &formats->gate_up_pack, local_experts, 2 * f, d, true, weights->gate_up,
                &weights->gate_up_arrays, &weights->shared_gate_up, &weights->shared_gate_up_arrays);
    join_weight(backend, formats->down, &formats->down_pack, local_experts, d, f, false, weights->down,
                &weights->down_arrays, &weights->shared_down, &weights->shared_down_arrays);
}

void epmoei_layer_join_experts(const epmoe_layer_t *layer, epmoe_experts_args_t *experts)
{
    experts->top_k++;
    experts->num_experts++;
    experts->ids = layer->workspace.joined_ids;
    experts->weights = layer->workspace.joined_weights;
}
