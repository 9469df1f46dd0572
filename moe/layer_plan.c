#include "moe/layer_joined.h"

#include "base/dtype.h"
#include "comm/comm.h"
#include "kernels/activation.h"
#include "kernels/experts_few.h"
#include "kernels/grouped_gemm_fp8.h"
#include "kernels/op_check.h"
#include "kernels/quant_tiles.h"
#include "kernels/route.h"
#include "moe/experts.h"

#include <string.h>

/* Of rows of x, h and the expert matrices. With at most INT32_MAX slots, every size in bytes then fits int64. */
enum { kMaxWidth = 1 << 26 };

static epmoe_status_t check_range(const char *name, int64_t value, int64_t lo, int64_t hi)
{
    if (value >= lo && value <= hi) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "config.%s is %lld: expected %lld..%lld", name, (long long)value,
                       (long long)lo, (long long)hi);
}

static epmoe_status_t check_router(epmoe_layer_config_t *config)
{
    EPMOEI_CHECK(check_range("top_k", config->top_k, 1, epmoei_min64(config->num_experts, EPMOE_MAX_TOP_K)));
    EPMOEI_CHECK(check_range("intermediate", config->intermediate, 1, kMaxWidth));
    EPMOEI_CHECK(epmoei_placement_check(config->placement, config->num_experts, &config->num_physical));
    EPMOEI_CHECK(epmoei_check_volume("gate_up", config->num_physical, 2 * config->intermediate, config->hidden));
    EPMOEI_CHECK(check_range("scoring", config->scoring, EPMOE_SCORING_SOFTMAX, EPMOE_SCORING_SPARSE_MIXER));
    EPMOEI_CHECK(check_range("group_score", config->group_score, EPMOE_GROUP_SCORE_TOP2, EPMOE_GROUP_SCORE_MAX));
    if (config->routed_scale == 0.0f) config->routed_scale = 1.0f;
    if (!(config->routed_scale > 0.0f && config->routed_scale < 3e38f))
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "config.routed_scale is %g: expected a positive number",
                           (double)config->routed_scale);
    if (config->router_jitter == 0.0f) config->router_jitter = 0.01f;
    if (!(config->router_jitter > 0.0f && config->router_jitter < 1.0f))
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "config.router_jitter is %g: expected 0 to below 1",
                           (double)config->router_jitter);
    if (config->n_group == 0) config->n_group = 1;
    EPMOEI_CHECK(check_range("n_group", config->n_group, 1, config->num_experts));
    if (config->topk_group == 0) config->topk_group = config->n_group;
    EPMOEI_CHECK(check_range("topk_group", config->topk_group, 1, config->n_group));
    if (config->num_experts % config->n_group)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                           "config.num_experts is %d: expected a multiple of n_group (%d)", config->num_experts,
                           config->n_group);
    if (config->scoring == EPMOE_SCORING_SPARSE_MIXER && (config->n_group > 1 || config->has_selection_bias))
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "config.scoring is SPARSE_MIXER with %s: expected none",
                           config->n_group > 1 ? "groups" : "a selection bias");
    int32_t candidates = config->num_experts / config->n_group * config->topk_group;
    if (config->top_k > candidates)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                           "config.top_k is %d: expected at most %d, the experts of topk_group groups", config->top_k,
                           candidates);
    return EPMOE_OK;
}

/* What a dense MLP has no use for must not make two configs of it differ. */
static void drop_routed(epmoe_layer_config_t *config)
{
    config->intermediate = config->top_k = config->renormalize = config->n_group = config->topk_group = 0;
    config->scoring = EPMOE_SCORING_SOFTMAX;
    config->group_score = EPMOE_GROUP_SCORE_TOP2;
    config->routed_scale = config->router_jitter = 0;
    config->router_has_bias = config->has_selection_bias = config->weight_on_input = config->expert_has_bias = 0;
    config->capacity = 0;
    config->wire_dtype = EPMOE_DTYPE_NONE;
    config->placement = NULL;
    config->num_physical = 0;
    config->transport = EPMOE_TRANSPORT_AUTO;
    config->comm_sms = 0;
}

epmoe_status_t epmoei_layer_config_check(const epmoe_layer_config_t *config, epmoe_layer_config_t *out)
{
    EPMOEI_CHECK(epmoei_copy_sized(out, sizeof *out, config, "config"));
    EPMOEI_CHECK(check_range("hidden", out->hidden, 1, kMaxWidth));
    EPMOEI_CHECK(check_range("num_experts", out->num_experts, 0, EPMOE_MAX_EXPERTS));
    EPMOEI_CHECK(check_range("shared_intermediate", out->shared_intermediate, 0, kMaxWidth));
    if (!out->num_experts) drop_routed(out);
    const struct {
        const char *name;
        int32_t value;
    } flags[] = {{"renormalize", out->renormalize},
                 {"router_has_bias", out->router_has_bias},
                 {"has_selection_bias", out->has_selection_bias},
                 {"weight_on_input", out->weight_on_input},
                 {"expert_has_bias", out->expert_has_bias},
                 {"shared_gated", out->shared_gated}};
    for (size_t i = 0; i < sizeof flags / sizeof flags[0]; i++)
        EPMOEI_CHECK(check_range(flags[i].name, flags[i].value, 0, 1));
    if (out->num_experts) EPMOEI_CHECK(check_router(out));
    if (!out->num_experts && !out->shared_intermediate)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                           "config has neither num_experts nor shared_intermediate: expected at least one");
    if (out->shared_gated && !out->shared_intermediate)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "config.shared_gated is 1 without shared_intermediate");
    EPMOEI_CHECK(epmoei_activation_check(out->activation, false, &out->alpha, &out->limit));
    if (out->dtype == EPMOE_DTYPE_NONE) out->dtype = EPMOE_BF16;
    if (!epmoei_dtype_is_float(out->dtype))
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "config.dtype is %d: expected F32, BF16 or F16",
                           (int)out->dtype);
    if (out->wire_dtype == EPMOE_DTYPE_NONE) out->wire_dtype = out->dtype;
    if (out->wire_dtype != out->dtype && out->wire_dtype != EPMOE_F8_E4M3)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "config.wire_dtype is %s (%d): expected dtype (%s) or f8_e4m3",
                           epmoe_dtype_string(out->wire_dtype), (int)out->wire_dtype, epmoe_dtype_string(out->dtype));
    if (out->weight_format == EPMOE_FORMAT_NONE) out->weight_format = epmoei_format_of_dtype(out->dtype);
    if (epmoei_dtype_of_format(out->weight_format) == EPMOE_DTYPE_NONE &&
        !epmoei_format_is_quantised(out->weight_format))
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "config.weight_format is %d: expected an epmoe_format_t",
                           (int)out->weight_format);
    if (out->weight_group == 0) out->weight_group = 128;
    if (out->weight_group < -1)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "config.weight_group is %d: expected at least 1, 0 or -1",
                           out->weight_group);
    if (out->max_tokens == 0) out->max_tokens = 4096;
    EPMOEI_CHECK(check_range("fp8_activations", out->fp8_activations, -1, 1));
    EPMOEI_CHECK(check_range("max_tokens", out->max_tokens, 1, INT32_MAX / epmoei_max64(out->top_k, 1)));
    EPMOEI_CHECK(check_range("comm_sms", out->comm_sms, 0, INT32_MAX));
    EPMOEI_CHECK(check_range("transport", (int32_t)out->transport, EPMOE_TRANSPORT_AUTO, EPMOE_TRANSPORT_P2P));
    return check_range("capacity", out->capacity, 0, INT32_MAX / epmoei_max64(out->top_k, 1));
}

/* On the CPU the workspace does not depend on how weights are stored: loaded ones may turn out to be quantised. */
static epmoe_format_t plain_format(const epmoe_layer_config_t *config)
{
    return epmoei_format_is_quantised(config->weight_format) ? epmoei_format_of_dtype(config->dtype)
                                                             : config->weight_format;
}

/* What stands for experts that are not there yet: plain weights; on the CPU, which sizes its workspace but once, those
 * beside which x is quantised where the config asks for it, since that takes a copy of x. */
static epmoe_weight_t assumed_weight(const epmoe_layer_config_t *config, epmoe_backend_t backend)
{
    const epmoei_pack_shape_t pack = {.format = EPMOE_FORMAT_FP8_BLOCK, .scales_dtype = EPMOE_F32};
    const epmoei_pack_arrays_t arrays = {0};
    if (backend == EPMOE_BACKEND_CPU && config->fp8_activations == 1)
        return epmoei_layer_weight(backend, pack.format, &pack, NULL, &arrays);
    return epmoei_layer_weight(backend, plain_format(config), NULL, NULL, NULL);
}

/* The largest workspace of the grouped GEMMs that see all of this rank's tokens: router (on CUDA a kernel of its own),
 * shared expert and its gate. */
static epmoe_status_t dense_gemm_bytes(const epmoe_layer_config_t *config, epmoe_backend_t backend,
                                       const epmoei_packed_weights_t *weights, int64_t *bytes)
{
    const epmoe_weight_t plain = epmoei_layer_weight(backend, plain_format(config), NULL, NULL, NULL);
    const epmoe_weight_t assumed = assumed_weight(config, backend);
    const bool shared =
        config->shared_intermediate && !(weights && epmoei_layer_joins_always(weights, config->max_tokens));
    const struct {
        int32_t n;
        int32_t k;
        epmoe_activation_t activation;
        epmoe_weight_t weight;
        int32_t fs; /* of the shared expert's products */
    } shapes[] = {
        {backend == EPMOE_BACKEND_CUDA ? 0 : config->num_experts, config->hidden, EPMOE_ACTIVATION_NONE, plain, 0},
        {shared ? 2 * config->shared_intermediate : 0, config->hidden, config->activation,
         weights ? epmoei_layer_weight(backend, weights->formats.shared_gate_up, &weights->formats.shared_gate_up_pack,
                                       weights->shared_gate_up, &weights->shared_gate_up_arrays)
                 : assumed,
         config->shared_intermediate},
        {shared ? config->hidden : 0, config->shared_intermediate, EPMOE_ACTIVATION_NONE,
         weights ? epmoei_layer_weight(backend, weights->formats.shared_down, &weights->formats.shared_down_pack,
                                       weights->shared_down, &weights->shared_down_arrays)
                 : assumed,
         config->shared_intermediate},
        {config->shared_gated, config->hidden, EPMOE_ACTIVATION_SIGMOID, plain, 0},
    };
    *bytes = 0;
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        if (!shapes[i].n) continue;
        epmoe_grouped_gemm_args_t gemm = EPMOE_GROUPED_GEMM_ARGS_INIT;
        gemm.backend = backend;
        gemm.num_experts = 1;
        gemm.n = shapes[i].n;
        gemm.k = shapes[i].k;
        gemm.max_rows = config->max_tokens;
        gemm.x_sorted = 1;
        gemm.x_dtype = config->dtype;
        gemm.y_dtype = EPMOE_F32;
        gemm.weight = shapes[i].weight;
        if (shapes[i].fs)
            gemm.fp8_activations =
                epmoei_layer_fp8_activations(config, backend, &shapes[1].weight, &shapes[2].weight, shapes[i].fs);
        gemm.layout = EPMOE_LAYOUT_PACKED;
        gemm.activation = shapes[i].activation;
        gemm.alpha = config->alpha;
        gemm.limit = config->limit;
        int64_t needed;
        EPMOEI_CHECK(epmoe_grouped_gemm_workspace_size(&gemm, &needed));
        *bytes = epmoei_max64(*bytes, needed);
    }
    return EPMOE_OK;
}

int64_t epmoei_layer_max_rows(const epmoe_layer_config_t *config, int64_t all_tokens)
{
    return config->capacity ? epmoei_min64(config->capacity, all_tokens) : all_tokens;
}

epmoe_status_t epmoei_layer_workspace_layout(char *base, const epmoe_layer_config_t *config, epmoe_backend_t backend,
                                             int32_t local_experts, int64_t max_rows,
                                             const epmoei_packed_weights_t *weights, epmoei_layer_workspace_t *out)
{
    epmoei_layer_workspace_t workspace = {0};
    const bool joins = weights && weights->joins_shared;
    if (config->num_experts && max_rows > INT32_MAX / config->top_k)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                           "a dispatch may bring %lld rows here: expected at most %d; lower max_tokens or set capacity",
                           (long long)max_rows, INT32_MAX / config->top_k);
    EPMOEI_CHECK(dense_gemm_bytes(config, backend, weights, &workspace.gemm_bytes));
    if (config->num_experts && backend == EPMOE_BACKEND_CUDA)
        workspace.route_bytes = epmoei_route_workspace(config->max_tokens, config->num_experts, config->hidden);
    if (local_experts) {
        epmoe_experts_args_t experts = EPMOE_EXPERTS_ARGS_INIT;
        experts.backend = backend;
        experts.num_tokens = (int32_t)max_rows;
        experts.top_k = config->top_k + joins;
        experts.num_experts = local_experts + joins;
        experts.hidden = config->hidden;
        experts.intermediate = config->intermediate;
        experts.dtype = config->dtype;
        experts.gate_up = experts.down = assumed_weight(config, backend);
        if (weights) {
            experts.gate_up = epmoei_layer_weight(backend, weights->formats.gate_up, &weights->formats.gate_up_pack,
                                                  weights->gate_up, &weights->gate_up_arrays);
            experts.down = epmoei_layer_weight(backend, weights->formats.down, &weights->formats.down_pack,
                                               weights->down, &weights->down_arrays);
        }
        experts.layout = EPMOE_LAYOUT_PACKED;
        experts.fp8_activations =
            epmoei_layer_fp8_activations(config, backend, &experts.gate_up, &experts.down, config->intermediate);
        experts.activation = config->activation;
        EPMOEI_CHECK(epmoe_experts_workspace_size(&experts, &workspace.experts_bytes));
        if (experts.fp8_activations) { /* which few tokens may do without */
            int64_t few_bytes;
            experts.fp8_activations = 0;
            experts.num_tokens = (int32_t)epmoei_min64(max_rows, EPMOEI_EXPERTS_FEW_QUANT_MOST_TOKENS);
            EPMOEI_CHECK(epmoe_experts_workspace_size(&experts, &few_bytes));
            workspace.experts_bytes = epmoei_max64(workspace.experts_bytes, few_bytes);
        }
    }

    epmoei_arena_t arena = {base, 0};
    int64_t tokens = config->max_tokens;
    workspace.logits = epmoei_carve(&arena, tokens * config->num_experts * 4);
    workspace.ids = epmoei_carve(&arena, tokens * config->top_k * 4);
    workspace.weights = epmoei_carve(&arena, tokens * config->top_k * 4);
    const bool places = config->placement && local_experts == config->num_physical;
    workspace.physical_ids = epmoei_carve(&arena, places ? tokens * config->top_k * 4 : 0);
    const bool rounds = config->wire_dtype != config->dtype && local_experts == config->num_physical;
    workspace.rounded = epmoei_carve(&arena, rounds ? tokens * config->hidden * epmoe_dtype_size(config->dtype) : 0);
    workspace.joined_ids = epmoei_carve(&arena, joins ? tokens * (config->top_k + 1) * 4 : 0);
    workspace.joined_weights = epmoei_carve(&arena, joins ? tokens * (config->top_k + 1) * 4 : 0);
    const bool always = joins && epmoei_layer_joins_always(weights, config->max_tokens);
    const int64_t fs = always ? 0 : config->shared_intermediate;
    workspace.shared = epmoei_carve(&arena, fs ? tokens * config->hidden * 4 : 0);
    workspace.shared_h = epmoei_carve(&arena, tokens * fs * epmoe_dtype_size(config->dtype));
    workspace.shared_gate = epmoei_carve(&arena, config->shared_gated ? tokens * 4 : 0);
    const bool few = backend == EPMOE_BACKEND_CUDA && fs;
    workspace.shared_ids = epmoei_carve(&arena, few ? EPMOEI_EXPERTS_FEW_MOST_TOKENS * 4 : 0);
    workspace.shared_ones = epmoei_carve(&arena, few ? EPMOEI_EXPERTS_FEW_MOST_TOKENS * 4 : 0);
    workspace.experts_workspace = epmoei_carve(&arena, workspace.experts_bytes);
    workspace.gemm_workspace = epmoei_carve(&arena, workspace.gemm_bytes);
    workspace.route_workspace = epmoei_carve(&arena, workspace.route_bytes);
    workspace.bytes = arena.used;
    *out = workspace;
    return EPMOE_OK;
}

static bool is_tiled(epmoe_backend_t backend, epmoe_format_t format)
{
    return backend == EPMOE_BACKEND_CUDA && (format == EPMOE_FORMAT_W4 || format == EPMOE_FORMAT_MXFP4);
}

epmoe_weight_t epmoei_layer_weight(epmoe_backend_t backend, epmoe_format_t format, const epmoei_pack_shape_t *pack,
                                   const void *data, const epmoei_pack_arrays_t *arrays)
{
    epmoe_weight_t weight = EPMOE_WEIGHT_INIT;
    weight.format = format;
    weight.data = data;
    if (!epmoei_format_is_quantised(format)) {
        if (pack && pack->tiles) weight.storage = EPMOE_STORAGE_TILES;
        return weight;
    }
    weight.group_size = pack->group;
    if (format == EPMOE_FORMAT_FP8_BLOCK) weight.group_rows = pack->row_group;
    if (is_tiled(backend, format)) weight.storage = EPMOE_STORAGE_TILES;
    weight.scales_dtype = pack->scales_dtype;
    weight.scales = arrays->scales;
    weight.zeros = arrays->zeros;
    weight.g_idx = arrays->order;
    return weight;
}

static bool takes_fp8(const epmoe_weight_t *weight, int32_t n, int32_t k, epmoe_activation_t activation)
{
    epmoe_grouped_gemm_args_t gemm = EPMOE_GROUPED_GEMM_ARGS_INIT;
    gemm.n = n;
    gemm.k = k;
    gemm.weight = *weight;
    gemm.layout = EPMOE_LAYOUT_PACKED;
    gemm.activation = activation;
    gemm.fp8_activations = 1;
    return epmoei_grouped_gemm_fp8_takes_sm90(&gemm);
}

int32_t epmoei_layer_fp8_activations(const epmoe_layer_config_t *config, epmoe_backend_t backend,
                                     const epmoe_weight_t *gate_up, const epmoe_weight_t *down, int32_t f)
{
    if (gate_up->format != EPMOE_FORMAT_FP8_BLOCK || down->format != EPMOE_FORMAT_FP8_BLOCK) return 0;
    if (config->fp8_activations) return config->fp8_activations == 1;
    return backend == EPMOE_BACKEND_CUDA && epmoei_cuda_tier() == 90 &&
           takes_fp8(gate_up, 2 * f, config->hidden, config->activation) &&
           takes_fp8(down, config->hidden, f, EPMOE_ACTIVATION_NONE);
}

epmoei_matrix_sizes_t epmoei_matrix_sizes(epmoe_backend_t backend, epmoe_format_t format,
                                          const epmoei_pack_shape_t *pack, int64_t rows, int64_t cols, bool halves)
{
    epmoei_matrix_sizes_t sizes = {.data = rows * cols * epmoe_dtype_size(epmoei_dtype_of_format(format))};
    if (is_tiled(backend, format)) {
        epmoei_quant_tiles_t tiles = epmoei_quant_tiles(format, pack->scales_dtype, rows, cols, pack->group, halves);
        sizes.data = tiles.data_bytes;
        sizes.scales = tiles.scales_bytes;
        sizes.zeros = pack->zeros ? tiles.zeros_bytes : 0;
        sizes.order = pack->order ? cols * 4 : 0;
    } else if (epmoei_format_is_quantised(format)) {
        epmoei_quant_sizes_t quant = epmoei_quant_sizes_rows(format, rows, cols, pack->group, pack->row_group,
                                                             halves && format == EPMOE_FORMAT_FP8_BLOCK ? rows / 2 : 0);
        sizes.data = quant.data_bytes;
        sizes.scales = quant.scales * epmoe_dtype_size(pack->scales_dtype);
        sizes.zeros = pack->zeros ? quant.zeros_bytes : 0;
        sizes.order = pack->order ? (halves ? 2 : 1) * cols * 4 : 0;
    }
    sizes.total = sizes.data + sizes.scales + sizes.zeros + sizes.order;
    return sizes;
}

epmoei_layer_formats_t epmoei_layer_config_formats(const epmoe_layer_config_t *config)
{
    epmoe_format_t format = config->weight_format;
    epmoei_layer_formats_t formats = {.router = epmoei_dtype_of_format(plain_format(config))};
    epmoei_pack_shape_t pack = {.format = format, .group = config->weight_group};
    if (epmoei_format_is_quantised(format)) {
        bool zeros = format == EPMOE_FORMAT_GPTQ || format == EPMOE_FORMAT_AWQ;
        bool fp8 = format == EPMOE_FORMAT_FP8_BLOCK, mxfp4 = format == EPMOE_FORMAT_MXFP4;
        format = fp8 || mxfp4 ? format : EPMOE_FORMAT_W4;
        pack.format = format;
        pack.zeros = zeros;
        pack.scales_dtype = fp8 ? EPMOE_F32 : mxfp4 ? EPMOE_F8_E8M0 : EPMOE_F16;
        if (mxfp4) pack.group = EPMOEI_MXFP4_GROUP;
        if (pack.group < 0) pack.group = INT32_MAX;
    }
    formats.gate_up = formats.down = format;
    formats.gate_up_pack = formats.down_pack = pack;
    if (config->shared_intermediate) {
        formats.shared_gate_up = formats.shared_down = format;
        formats.shared_gate_up_pack = formats.shared_down_pack = pack;
    }
    return formats;
}

/* Of `experts` experts; *data stays NULL for what is not there. */
static void carve_weight(epmoei_arena_t *arena, epmoe_backend_t backend, epmoe_format_t format,
                         const epmoei_pack_shape_t *pack, int64_t experts, int64_t rows, int64_t cols, bool halves,
                         void **data, epmoei_pack_arrays_t *arrays)
{
    if (format == EPMOE_FORMAT_NONE || experts * rows * cols == 0) return;
    epmoei_matrix_sizes_t sizes = epmoei_matrix_sizes(backend, format, pack, rows, cols, halves);
    *data = epmoei_carve(arena, experts * sizes.data);
    if (sizes.scales) arrays->scales = epmoei_carve(arena, experts * sizes.scales);
    if (sizes.zeros) arrays->zeros = epmoei_carve(arena, experts * sizes.zeros);
    if (sizes.order) arrays->order = epmoei_carve(arena, experts * sizes.order);
}

static float *carve_bias(epmoei_arena_t *arena, int32_t present, int64_t elements)
{
    return present ? epmoei_carve(arena, elements * 4) : NULL;
}

int64_t epmoei_layer_weights_layout(char *base, const epmoe_layer_config_t *config, epmoe_backend_t backend,
                                    int32_t local_experts, const epmoei_layer_formats_t *formats,
                                    epmoei_packed_weights_t *out)
{
    epmoei_arena_t arena = {base, 0};
    int64_t d = config->hidden, f = config->intermediate, fs = config->shared_intermediate;
    int64_t num_experts = config->num_experts;
    int64_t router_size = epmoe_dtype_size(formats->router);
    memset(out, 0, sizeof *out);
    out->formats = *formats;
    out->joins_shared = epmoei_layer_joins_shared(config, backend, local_experts, formats);
    const int64_t experts = local_experts + out->joins_shared;
    if (num_experts) {
        out->router = epmoei_carve(&arena, num_experts * d * router_size);
        out->router_bias = carve_bias(&arena, config->router_has_bias, num_experts);
        out->selection_bias = carve_bias(&arena, config->has_selection_bias, num_experts);
        carve_weight(&arena, backend, formats->gate_up, &formats->gate_up_pack, experts, 2 * f, d, true, &out->gate_up,
                     &out->gate_up_arrays);
        carve_weight(&arena, backend, formats->down, &formats->down_pack, experts, d, f, false, &out->down,
                     &out->down_arrays);
        out->gate_up_bias = carve_bias(&arena, config->expert_has_bias, local_experts * 2 * f);
        out->down_bias = carve_bias(&arena, config->expert_has_bias, local_experts * d);
    }
    if (out->joins_shared) {
        epmoei_layer_join_weights(config, backend, local_experts, out);
    } else {
        carve_weight(&arena, backend, formats->shared_gate_up, &formats->shared_gate_up_pack, 1, 2 * fs, d, true,
                     &out->shared_gate_up, &out->shared_gate_up_arrays);
        carve_weight(&arena, backend, formats->shared_down, &formats->shared_down_pack, 1, d, fs, false,
                     &out->shared_down, &out->shared_down_arrays);
    }
    if (config->shared_gated) out->shared_gate = epmoei_carve(&arena, d * router_size);
    return arena.used;
}

epmoe_ep_config_t epmoei_layer_ep_config(const epmoe_layer_config_t *config)
{
    epmoe_ep_config_t ep = EPMOE_EP_CONFIG_INIT;
    ep.num_experts = config->num_experts;
    ep.top_k = config->top_k;
    ep.hidden = config->hidden;
    ep.max_tokens = config->max_tokens;
    ep.dtype = config->dtype;
    ep.wire_dtype = config->wire_dtype;
    ep.capacity = config->capacity;
    ep.placement = config->placement;
    ep.num_physical = config->num_physical;
    ep.transport = config->transport;
    ep.comm_sms = config->comm_sms;
    return ep;
}

/* The largest workspace that a layer may come to have: that of its creation, of weights that it owns (counted in
 * `owned`), and of the same borrowed, among which no shared expert is. On the CPU the three are one. */
static epmoe_status_t most_workspace(const epmoe_layer_config_t *config, epmoe_backend_t backend, int32_t local_experts,
                                     int64_t max_rows, const epmoei_packed_weights_t *owned, int64_t *bytes)
{
    epmoei_packed_weights_t borrowed = *owned;
    borrowed.joins_shared = false;
    const epmoei_packed_weights_t *const weights[] = {NULL, owned, &borrowed};
    *bytes = 0;
    for (int i = 0; i < (backend == EPMOE_BACKEND_CUDA ? 3 : 1); i++) {
        epmoei_layer_workspace_t workspace;
        EPMOEI_CHECK(
            epmoei_layer_workspace_layout(NULL, config, backend, local_experts, max_rows, weights[i], &workspace));
        *bytes = epmoei_max64(*bytes, workspace.bytes);
    }
    return EPMOE_OK;
}

epmoe_status_t epmoe_layer_memory(const epmoe_layer_config_t *config, int32_t size, int32_t rank,
                                  epmoe_layer_memory_t *memory)
{
    epmoe_layer_config_t checked;
    epmoe_backend_t backend;
    epmoei_packed_weights_t weights;
    epmoe_layer_memory_t result = EPMOE_LAYER_MEMORY_INIT;
    EPMOEI_CHECK(epmoei_layer_config_check(config, &checked));
    EPMOEI_CHECK(epmoe_backend_resolve(EPMOE_BACKEND_AUTO, &backend));
    EPMOEI_CHECK(epmoe_expert_range(checked.num_physical, size, rank, &result.first_expert, &result.local_experts));
    epmoei_layer_formats_t formats = epmoei_layer_config_formats(&checked);
    int64_t max_rows = epmoei_layer_max_rows(&checked, (int64_t)checked.max_tokens * size);
    result.weight_bytes =
        epmoei_layer_weights_layout(NULL, &checked, backend, result.local_experts, &formats, &weights);
    EPMOEI_CHECK(most_workspace(&checked, backend, result.local_experts, max_rows, &weights, &result.workspace_bytes));
    if (checked.num_experts && size > 1) {
        epmoe_ep_config_t ep = epmoei_layer_ep_config(&checked);
        EPMOEI_CHECK(epmoe_ep_buffer_size(&ep, size, max_rows, &result.comm_bytes));
    }
    return epmoei_return_sized(memory, &result, sizeof result, "memory");
}
