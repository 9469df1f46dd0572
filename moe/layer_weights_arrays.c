#include "moe/layer_weights.h"

#include "base/device.h"
#include "base/dtype.h"
#include "comm/comm.h"

#include <string.h>

typedef struct arrays_t {
    const epmoe_layer_t *layer;
    epmoe_layer_weights_t weights;
    bool packed; /* the caller's layout */
} arrays_t;

static epmoei_view_t view_of(const void *data, epmoe_dtype_t dtype, int64_t first, int64_t rows, int64_t cols,
                             int64_t row_step)
{
    return (epmoei_view_t){.data = data ? (const char *)data + first * epmoe_dtype_size(dtype) : NULL,
                           .dtype = dtype,
                           .rows = rows,
                           .cols = cols,
                           .row_stride = row_step * cols,
                           .col_stride = 1};
}

/* `rows` rows of expert e of a quantised weight [E,stored_rows,cols], the first being first_row; half 1 = up rows. */
static epmoei_quant_source_t quant_of(const epmoe_weight_t *weight, int64_t e, int64_t stored_rows, int64_t cols,
                                      int64_t second_half, int half, int64_t rows, int64_t first_row, int64_t row_step)
{
    epmoei_quant_source_t source = {0};
    if (!epmoei_format_is_quantised(weight->format)) return source;
    epmoei_quant_t *quant = &source.quant;
    *quant = epmoei_quant_of_weight(weight, stored_rows, cols, e, second_half);
    quant->rows = rows;
    quant->first_row = first_row;
    quant->row_step = row_step;
    /* Gate and up rows of W4 each have their order. */
    if (quant->g_idx && weight->format == EPMOE_FORMAT_W4) quant->g_idx = (const int32_t *)quant->g_idx + half * cols;
    return source;
}

/* A quantised matrix is where it is; its view says how large it is. */
static void drop_dtype(epmoei_view_t *view, const epmoei_quant_source_t *source)
{
    if (source->quant.format == EPMOE_FORMAT_NONE) return;
    *view = (epmoei_view_t){.data = source->quant.data, .rows = view->rows, .cols = view->cols};
}

/* Views of expert `e` of stacked matrices (and biases, when given). */
static void view_expert(epmoei_expert_source_t *out, int64_t e, int64_t d, int64_t f, epmoe_layout_t layout,
                        bool packed, const epmoe_weight_t *gate_up, const epmoe_weight_t *down,
                        const float *gate_up_bias, const float *down_bias)
{
    bool interleaved = layout == EPMOE_LAYOUT_INTERLEAVED;
    int64_t step = interleaved ? 2 : 1, up = interleaved ? 1 : f; /* first up row, and rows from gate to gate */
    epmoe_dtype_t gate_up_dtype = epmoei_dtype_of_format(gate_up->format);
    memset(out, 0, sizeof *out);
    out->gate = view_of(gate_up->data, gate_up_dtype, e * 2 * f * d, f, d, step);
    out->up = view_of(gate_up->data, gate_up_dtype, (e * 2 * f + up) * d, f, d, step);
    out->down = view_of(down->data, epmoei_dtype_of_format(down->format), e * d * f, d, f, 1);
    /* FP8's blocks begin anew at the up rows where the caller has them packed; W4's orders always are two. */
    int64_t half = packed || gate_up->format == EPMOE_FORMAT_W4 ? f : 0;
    out->gate_quant = quant_of(gate_up, e, 2 * f, d, half, 0, f, 0, step);
    out->up_quant = quant_of(gate_up, e, 2 * f, d, half, 1, f, up, step);
    out->down_quant = quant_of(down, e, d, f, 0, 0, d, 0, 1);
    drop_dtype(&out->gate, &out->gate_quant);
    drop_dtype(&out->up, &out->up_quant);
    drop_dtype(&out->down, &out->down_quant);
    out->gate_bias = (epmoei_view_t){gate_up_bias ? gate_up_bias + e * 2 * f : NULL, EPMOE_F32, 1, f, 2 * f, step};
    out->up_bias = (epmoei_view_t){gate_up_bias ? gate_up_bias + e * 2 * f + up : NULL, EPMOE_F32, 1, f, 2 * f, step};
    out->down_bias = (epmoei_view_t){down_bias ? down_bias + e * d : NULL, EPMOE_F32, 1, d, d, 1};
}

static epmoe_status_t arrays_layer(const void *ctx, epmoei_layer_source_t *out)
{
    const arrays_t *arrays = ctx;
    const epmoe_layer_config_t *config = &arrays->layer->config;
    const epmoe_layer_weights_t *weights = &arrays->weights;
    memset(out, 0, sizeof *out);
    out->router = view_of(weights->router, weights->router_dtype, 0, config->num_experts, config->hidden, 1);
    out->router_bias = view_of(weights->router_bias, EPMOE_F32, 0, 1, config->num_experts, 1);
    out->selection_bias = view_of(weights->selection_bias, EPMOE_F32, 0, 1, config->num_experts, 1);
    out->shared_gate = view_of(weights->shared_gate, weights->router_dtype, 0, 1, config->hidden, 1);
    view_expert(&out->shared, 0, config->hidden, config->shared_intermediate, weights->layout, arrays->packed,
                &weights->shared_gate_up, &weights->shared_down, NULL, NULL);
    return EPMOE_OK;
}

static epmoe_status_t arrays_expert(const void *ctx, int32_t local_expert, epmoei_expert_source_t *out)
{
    const arrays_t *arrays = ctx;
    const epmoe_layer_config_t *config = &arrays->layer->config;
    const epmoe_layer_weights_t *weights = &arrays->weights;
    view_expert(out, local_expert, config->hidden, config->intermediate, weights->layout, arrays->packed,
                &weights->gate_up, &weights->down, weights->gate_up_bias, weights->down_bias);
    return EPMOE_OK;
}

/* Fills in the defaults of a quantised weight. */
static epmoe_status_t check_weight(const arrays_t *arrays, const char *name, epmoe_weight_t *weight, int64_t cols,
                                   bool used)
{
    if (used) EPMOEI_CHECK(epmoei_weight_check_rows(weight, name));
    if (!used || epmoei_dtype_of_format(weight->format) != EPMOE_DTYPE_NONE) return EPMOE_OK;
    if (!epmoei_format_is_quantised(weight->format))
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s.format is %d: expected an epmoe_format_t", name,
                           (int)weight->format);
    if (arrays->packed && arrays->layer->backend == EPMOE_BACKEND_CUDA && weight->format != EPMOE_FORMAT_FP8_BLOCK)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "%s.format is %s: packed on CUDA it must be %s or fp8_block",
                           name, epmoe_format_string(weight->format), epmoe_dtype_string(arrays->layer->config.dtype));
    bool packs = weight->format == EPMOE_FORMAT_FP8_BLOCK || weight->format == EPMOE_FORMAT_MXFP4 ||
                 weight->format == EPMOE_FORMAT_W4;
    if (arrays->packed && !packs)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s.format is %s: packed it must be fp8_block, mxfp4 or w4",
                           name, epmoe_format_string(weight->format));
    EPMOEI_CHECK(epmoei_quant_check_weight(weight, name, cols));
    return epmoei_weight_check_pointers(weight, name);
}

static epmoe_status_t check_weights(arrays_t *arrays)
{
    const epmoe_layer_config_t *config = &arrays->layer->config;
    epmoe_layer_weights_t *weights = &arrays->weights;
    bool routed = arrays->layer->local_experts > 0, shared = config->shared_intermediate > 0;
    EPMOEI_CHECK(check_weight(arrays, "weights.gate_up", &weights->gate_up, config->hidden, routed));
    EPMOEI_CHECK(check_weight(arrays, "weights.down", &weights->down, config->intermediate, routed));
    EPMOEI_CHECK(check_weight(arrays, "weights.shared_gate_up", &weights->shared_gate_up, config->hidden, shared));
    return check_weight(arrays, "weights.shared_down", &weights->shared_down, config->shared_intermediate, shared);
}

/* Borrowed matrices are computed on as they are. */
static epmoe_status_t check_borrowed(const epmoe_layer_t *layer, const epmoe_layer_weights_t *weights)
{
    if (layer->backend != EPMOE_BACKEND_CUDA) return EPMOE_OK;
    const struct {
        const char *name;
        const epmoe_weight_t *weight;
    } borrowed[] = {{"gate_up", &weights->gate_up},
                    {"down", &weights->down},
                    {"shared_gate_up", &weights->shared_gate_up},
                    {"shared_down", &weights->shared_down}};
    for (size_t i = 0; i < sizeof borrowed / sizeof borrowed[0]; i++) {
        const epmoe_weight_t *weight = borrowed[i].weight;
        const bool quantised = epmoei_format_is_quantised(weight->format);
        if (!weight->data) continue;
        for (int scales = 0; scales < (quantised ? 2 : 1); scales++) {
            const void *data = scales ? weight->scales : weight->data;
            if (!epmoei_memory_is_device(data) || (uintptr_t)data % 16)
                return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                                   "weights.%s.%s is %p: borrowed on CUDA it must be device memory aligned to 16 bytes",
                                   borrowed[i].name, scales ? "scales" : "data", data);
        }
        if (!quantised && weight->format != epmoei_format_of_dtype(layer->config.dtype))
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "weights.%s.format is %s: borrowed on CUDA it must be %s",
                               borrowed[i].name, epmoe_format_string(weight->format),
                               epmoe_dtype_string(layer->config.dtype));
    }
    return EPMOE_OK;
}

/* Only ever read; the packed struct's pointers are writable for the builder's sake. */
static void borrow_weight(const epmoe_weight_t *own, epmoe_format_t *format, epmoei_pack_shape_t *pack, void **data,
                          epmoei_pack_arrays_t *arrays)
{
    *format = own->format;
    *pack = (epmoei_pack_shape_t){.format = own->format,
                                  .group = own->group_size,
                                  .scales_dtype = own->scales_dtype,
                                  .zeros = own->zeros != NULL,
                                  .order = own->g_idx != NULL,
                                  .row_group = own->group_rows};
    *data = (void *)(uintptr_t)own->data;
    arrays->scales = (void *)(uintptr_t)own->scales;
    arrays->zeros = (uint8_t *)(uintptr_t)own->zeros;
    arrays->order = (int32_t *)(uintptr_t)own->g_idx;
}

epmoe_status_t epmoe_layer_set_weights(epmoe_layer_t *layer, const epmoe_layer_weights_t *weights)
{
    if (!layer) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "layer is NULL");
    EPMOEI_CHECK(epmoei_comm_check_device(layer->comm));
    arrays_t arrays = {.layer = layer};
    epmoe_layer_weights_t *own = &arrays.weights;
    EPMOEI_CHECK(epmoei_copy_sized(own, sizeof *own, weights, "weights"));
    if ((int)own->layout < EPMOE_LAYOUT_GATE_FIRST || own->layout > EPMOE_LAYOUT_PACKED)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "weights.layout is %d: expected an epmoe_layout_t",
                           (int)own->layout);
    if ((layer->config.num_experts || layer->config.shared_gated) && !epmoei_dtype_is_float(own->router_dtype))
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "weights.router_dtype is %d: expected F32, BF16 or F16",
                           (int)own->router_dtype);
    arrays.packed = own->layout == EPMOE_LAYOUT_PACKED;
    EPMOEI_CHECK(check_weights(&arrays));

    bool borrow = arrays.packed;
    if (borrow) EPMOEI_CHECK(check_borrowed(layer, own));
    /* What packed means for the rows that are copied all the same: the biases. */
    if (borrow) own->layout = layer->backend == EPMOE_BACKEND_CUDA ? EPMOE_LAYOUT_INTERLEAVED : EPMOE_LAYOUT_GATE_FIRST;
    const epmoei_weights_source_t source = {arrays_layer, arrays_expert, NULL, &arrays, NULL, "weights"};
    epmoe_status_t status = epmoei_layer_build_weights(layer, &source, borrow);
    if (status != EPMOE_OK) return status;
    if (borrow) {
        epmoei_packed_weights_t *packed = &layer->weights;
        epmoei_layer_formats_t *formats = &packed->formats;
        borrow_weight(&own->gate_up, &formats->gate_up, &formats->gate_up_pack, &packed->gate_up,
                      &packed->gate_up_arrays);
        borrow_weight(&own->down, &formats->down, &formats->down_pack, &packed->down, &packed->down_arrays);
        borrow_weight(&own->shared_gate_up, &formats->shared_gate_up, &formats->shared_gate_up_pack,
                      &packed->shared_gate_up, &packed->shared_gate_up_arrays);
        borrow_weight(&own->shared_down, &formats->shared_down, &formats->shared_down_pack, &packed->shared_down,
                      &packed->shared_down_arrays);
        status = epmoei_layer_fit_workspace(layer);
        if (status != EPMOE_OK) epmoei_layer_drop_weights(layer);
    }
    return status;
}
