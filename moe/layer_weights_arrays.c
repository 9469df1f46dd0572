#include "moe/layer_weights.h"

#include "base/device.h"
#include "base/dtype.h"
#include "comm/comm.h"

#include <string.h>

typedef struct arrays_t {
    const epmoe_layer_t *layer;
    epmoe_layer_weights_t weights;
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

/* Views of expert `e` of stacked matrices (and biases, when given). */
static void view_expert(epmoei_expert_source_t *out, int64_t e, int64_t d, int64_t f, epmoe_layout_t layout,
                        const epmoe_weight_t *gate_up, const epmoe_weight_t *down, const float *gate_up_bias,
                        const float *down_bias)
{
    bool interleaved = layout == EPMOE_LAYOUT_INTERLEAVED;
    int64_t step = interleaved ? 2 : 1, up = interleaved ? 1 : f; /* first up row, and rows from gate to gate */
    epmoe_dtype_t gate_up_dtype = epmoei_dtype_of_format(gate_up->format);
    memset(out, 0, sizeof *out);
    out->gate = view_of(gate_up->data, gate_up_dtype, e * 2 * f * d, f, d, step);
    out->up = view_of(gate_up->data, gate_up_dtype, (e * 2 * f + up) * d, f, d, step);
    out->down = view_of(down->data, epmoei_dtype_of_format(down->format), e * d * f, d, f, 1);
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
    view_expert(&out->shared, 0, config->hidden, config->shared_intermediate, weights->layout, &weights->shared_gate_up,
                &weights->shared_down, NULL, NULL);
    return EPMOE_OK;
}

static epmoe_status_t arrays_expert(const void *ctx, int32_t local_expert, epmoei_expert_source_t *out)
{
    const arrays_t *arrays = ctx;
    const epmoe_layer_config_t *config = &arrays->layer->config;
    const epmoe_layer_weights_t *weights = &arrays->weights;
    view_expert(out, local_expert, config->hidden, config->intermediate, weights->layout, &weights->gate_up,
                &weights->down, weights->gate_up_bias, weights->down_bias);
    return EPMOE_OK;
}

static epmoe_status_t check_format(const char *name, const epmoe_weight_t *weight, bool used)
{
    if (!used || epmoei_dtype_of_format(weight->format) != EPMOE_DTYPE_NONE) return EPMOE_OK;
    if (weight->format > EPMOE_FORMAT_F16 && weight->format <= EPMOE_FORMAT_MXFP4)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "%s.format is %s: this version computes bf16, fp16, fp32", name,
                           epmoe_format_string(weight->format));
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s.format is %d: expected an epmoe_format_t", name,
                       (int)weight->format);
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
        const void *data = borrowed[i].weight->data;
        if (!data) continue;
        if (!epmoei_memory_is_device(data) || (uintptr_t)data % 16)
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                               "weights.%s.data is %p: borrowed on CUDA it must be device memory aligned to 16 bytes",
                               borrowed[i].name, data);
        if (borrowed[i].weight->format != epmoei_format_of_dtype(layer->config.dtype))
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "weights.%s.format is %s: borrowed on CUDA it must be %s",
                               borrowed[i].name, epmoe_format_string(borrowed[i].weight->format),
                               epmoe_dtype_string(layer->config.dtype));
    }
    return EPMOE_OK;
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
    bool routed = layer->local_experts > 0, shared = layer->config.shared_intermediate > 0;
    EPMOEI_CHECK(check_format("weights.gate_up", &own->gate_up, routed));
    EPMOEI_CHECK(check_format("weights.down", &own->down, routed));
    EPMOEI_CHECK(check_format("weights.shared_gate_up", &own->shared_gate_up, shared));
    EPMOEI_CHECK(check_format("weights.shared_down", &own->shared_down, shared));

    bool borrow = own->layout == EPMOE_LAYOUT_PACKED;
    if (borrow) EPMOEI_CHECK(check_borrowed(layer, own));
    /* What packed means for the rows that are copied all the same: the biases. */
    if (borrow) own->layout = layer->backend == EPMOE_BACKEND_CUDA ? EPMOE_LAYOUT_INTERLEAVED : EPMOE_LAYOUT_GATE_FIRST;
    const epmoei_weights_source_t source = {arrays_layer, arrays_expert, NULL, &arrays, NULL};
    epmoe_status_t status = epmoei_layer_build_weights(layer, &source, borrow);
    if (status != EPMOE_OK) return status;
    if (borrow) {
        /* Only ever read; the packed struct's pointers are writable for the builder's sake. */
        epmoei_packed_weights_t *packed = &layer->weights;
        packed->formats.gate_up = own->gate_up.format;
        packed->formats.down = own->down.format;
        packed->formats.shared_gate_up = own->shared_gate_up.format;
        packed->formats.shared_down = own->shared_down.format;
        packed->gate_up = (void *)(uintptr_t)own->gate_up.data;
        packed->down = (void *)(uintptr_t)own->down.data;
        packed->shared_gate_up = (void *)(uintptr_t)own->shared_gate_up.data;
        packed->shared_down = (void *)(uintptr_t)own->shared_down.data;
    }
    return EPMOE_OK;
}
