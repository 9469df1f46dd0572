#include "moe/layer_weights.h"

#include "base/dtype.h"
#include "moe/weight_writer.h"

#include <stdio.h>
#include <string.h>

static epmoe_status_t check_view(const epmoei_view_t *view, const char *what, int64_t rows, int64_t cols)
{
    if (!view->data && rows > 0 && cols > 0) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s is missing", what);
    if (view->rows != rows || view->cols != cols)
        return epmoei_fail(EPMOE_ERROR_MISMATCH, "%s is [%lld,%lld]: expected [%lld,%lld]", what, (long long)view->rows,
                           (long long)view->cols, (long long)rows, (long long)cols);
    if (!epmoei_dtype_is_float(view->dtype))
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "%s is %s: this version computes bf16, fp16, fp32", what,
                           epmoe_dtype_string(view->dtype));
    return EPMOE_OK;
}

static epmoe_status_t check_expert(const epmoe_layer_config_t *config, const epmoei_expert_source_t *expert, int64_t f,
                                   bool has_bias, const char *name)
{
    const struct {
        const char *what;
        const epmoei_view_t *view;
        int64_t rows;
        int64_t cols;
    } views[] = {
        {"gate", &expert->gate, f, config->hidden}, {"up", &expert->up, f, config->hidden},
        {"down", &expert->down, config->hidden, f}, {"gate bias", &expert->gate_bias, 1, f},
        {"up bias", &expert->up_bias, 1, f},        {"down bias", &expert->down_bias, 1, config->hidden},
    };
    for (size_t i = 0; i < (has_bias ? 6 : 3); i++) {
        char what[96];
        snprintf(what, sizeof what, "%s %s", name, views[i].what);
        EPMOEI_CHECK(check_view(views[i].view, what, views[i].rows, views[i].cols));
    }
    return EPMOE_OK;
}

/* The common format of what has been seen so far and one more: F32 holds any mixture. */
static epmoe_format_t merge_format(epmoe_format_t so_far, epmoe_dtype_t dtype)
{
    epmoe_format_t format = epmoei_format_of_dtype(dtype);
    return so_far == EPMOE_FORMAT_NONE || so_far == format ? format : EPMOE_FORMAT_F32;
}

/* Tensor cores multiply two matrices of one type: weights take the activations'. A router that would lose significant
 * bits could choose other experts, so it is refused; bf16's eight fit into fp16. */
static epmoe_status_t fit_cuda_formats(const epmoe_layer_t *layer, epmoei_layer_formats_t *formats)
{
    epmoe_format_t format = epmoei_format_of_dtype(layer->config.dtype);
    epmoe_format_t *const matrices[] = {&formats->gate_up, &formats->down, &formats->shared_gate_up,
                                        &formats->shared_down};
    for (size_t i = 0; i < sizeof matrices / sizeof matrices[0]; i++)
        if (*matrices[i] != EPMOE_FORMAT_NONE) *matrices[i] = format;
    epmoe_dtype_t dtype = layer->config.dtype;
    bool has_router = layer->config.num_experts > 0 || layer->config.shared_gated;
    if (has_router && formats->router != EPMOE_BF16 && formats->router != dtype)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED,
                           "the router is %s and config.dtype %s: on CUDA it must be bf16%s, since rounding it could "
                           "choose other experts",
                           epmoe_dtype_string(formats->router), epmoe_dtype_string(dtype),
                           dtype == EPMOE_F16 ? " or f16" : "");
    formats->router = dtype;
    return EPMOE_OK;
}

/* Looks at every view before anything is copied. */
static epmoe_status_t check_source(const epmoe_layer_t *layer, const epmoei_weights_source_t *source,
                                   const epmoei_layer_source_t *common, epmoei_layer_formats_t *formats)
{
    const epmoe_layer_config_t *config = &layer->config;
    memset(formats, 0, sizeof *formats);
    formats->router = EPMOE_F32;
    if (config->num_experts) {
        EPMOEI_CHECK(check_view(&common->router, "router", config->num_experts, config->hidden));
        formats->router = common->router.dtype;
        if (config->router_has_bias)
            EPMOEI_CHECK(check_view(&common->router_bias, "router bias", 1, config->num_experts));
        if (config->has_selection_bias)
            EPMOEI_CHECK(check_view(&common->selection_bias, "selection bias", 1, config->num_experts));
        for (int32_t e = 0; e < layer->local_experts; e++) {
            epmoei_expert_source_t expert;
            char name[32];
            snprintf(name, sizeof name, "expert %d", layer->first_expert + e);
            EPMOEI_CHECK(source->expert(source->ctx, e, &expert));
            EPMOEI_CHECK(check_expert(config, &expert, config->intermediate, config->expert_has_bias, name));
            formats->gate_up = merge_format(formats->gate_up, expert.gate.dtype);
            formats->gate_up = merge_format(formats->gate_up, expert.up.dtype);
            formats->down = merge_format(formats->down, expert.down.dtype);
        }
    }
    if (config->shared_intermediate) {
        EPMOEI_CHECK(check_expert(config, &common->shared, config->shared_intermediate, false, "shared expert"));
        formats->shared_gate_up =
            merge_format(epmoei_format_of_dtype(common->shared.gate.dtype), common->shared.up.dtype);
        formats->shared_down = epmoei_format_of_dtype(common->shared.down.dtype);
    }
    if (config->shared_gated) {
        EPMOEI_CHECK(check_view(&common->shared_gate, "shared expert gate", 1, config->hidden));
        /* One type for both: the router's product computes the gate too. */
        formats->router = epmoei_dtype_of_format(
            merge_format(config->num_experts ? epmoei_format_of_dtype(formats->router) : EPMOE_FORMAT_NONE,
                         common->shared_gate.dtype));
    }
    return layer->backend == EPMOE_BACKEND_CUDA ? fit_cuda_formats(layer, formats) : EPMOE_OK;
}

void epmoei_layer_drop_weights(epmoe_layer_t *layer)
{
    epmoei_memory_free(layer->backend, layer->weights_memory);
    layer->weights_memory = NULL;
    memset(&layer->weights, 0, sizeof layer->weights);
    layer->has_weights = false;
}

epmoe_status_t epmoei_layer_make_weights(epmoe_layer_t *layer, const epmoei_layer_formats_t *formats)
{
    epmoei_layer_drop_weights(layer);
    int64_t bytes = epmoei_layer_weights_layout(NULL, &layer->config, layer->local_experts, formats, &layer->weights);
    EPMOEI_CHECK(epmoei_memory_alloc(layer->backend, &layer->weights_memory, bytes, "this rank's weights"));
    epmoei_layer_weights_layout(layer->weights_memory, &layer->config, layer->local_experts, formats, &layer->weights);
    return EPMOE_OK;
}

char *epmoei_weight_element(void *base, epmoe_format_t format, int64_t index)
{
    return base ? (char *)base + index * epmoe_dtype_size(epmoei_dtype_of_format(format)) : NULL;
}

void epmoei_packed_rows(const epmoe_layer_t *layer, int64_t f, bool up, int64_t *first_row, int64_t *row_step)
{
    bool interleaved = layer->backend == EPMOE_BACKEND_CUDA;
    *first_row = !up ? 0 : interleaved ? 1 : f;
    *row_step = interleaved ? 2 : 1;
}

/* Rows of gate and up of one expert, whatever they are rows of: weights (cols = d) or single biases (cols = 1). */
static epmoe_status_t put_gate_up(epmoe_layer_t *layer, epmoei_weight_writer_t *writer, void *dst, epmoe_dtype_t dtype,
                                  const epmoei_view_t *gate, const epmoei_view_t *up)
{
    const epmoei_view_t *const views[] = {gate, up};
    for (int half = 0; half < 2; half++) {
        int64_t first_row, row_step;
        epmoei_packed_rows(layer, gate->rows, half == 1, &first_row, &row_step);
        EPMOEI_CHECK(epmoei_writer_put(writer, views[half], dst, dtype, first_row, row_step));
    }
    return EPMOE_OK;
}

/* A bias [1,n] as n rows of one column. */
static epmoei_view_t as_column(epmoei_view_t bias)
{
    return (epmoei_view_t){bias.data, bias.dtype, bias.cols, 1, bias.col_stride, 1};
}

static epmoe_status_t put_expert(epmoe_layer_t *layer, epmoei_weight_writer_t *writer, void *gate_up,
                                 epmoe_format_t gate_up_format, void *down, epmoe_format_t down_format,
                                 const epmoei_expert_source_t *expert)
{
    EPMOEI_CHECK(
        put_gate_up(layer, writer, gate_up, epmoei_dtype_of_format(gate_up_format), &expert->gate, &expert->up));
    return epmoei_writer_put(writer, &expert->down, down, epmoei_dtype_of_format(down_format), 0, 1);
}

static epmoe_status_t put_common(epmoe_layer_t *layer, epmoei_weight_writer_t *writer,
                                 const epmoei_layer_source_t *common)
{
    const epmoei_packed_weights_t *weights = &layer->weights;
    const epmoei_layer_formats_t *formats = &weights->formats;
    EPMOEI_CHECK(epmoei_writer_put(writer, &common->router, weights->router, formats->router, 0, 1));
    EPMOEI_CHECK(epmoei_writer_put(writer, &common->router_bias, weights->router_bias, EPMOE_F32, 0, 1));
    EPMOEI_CHECK(epmoei_writer_put(writer, &common->selection_bias, weights->selection_bias, EPMOE_F32, 0, 1));
    EPMOEI_CHECK(epmoei_writer_put(writer, &common->shared_gate, weights->shared_gate, formats->router, 0, 1));
    return put_expert(layer, writer, weights->shared_gate_up, formats->shared_gate_up, weights->shared_down,
                      formats->shared_down, &common->shared);
}

static epmoe_status_t put_routed(epmoe_layer_t *layer, epmoei_weight_writer_t *writer, int32_t e,
                                 const epmoei_expert_source_t *expert)
{
    const epmoei_packed_weights_t *weights = &layer->weights;
    const epmoei_layer_formats_t *formats = &weights->formats;
    int64_t d = layer->config.hidden, f = layer->config.intermediate;
    EPMOEI_CHECK(put_expert(layer, writer, epmoei_weight_element(weights->gate_up, formats->gate_up, e * 2 * f * d),
                            formats->gate_up, epmoei_weight_element(weights->down, formats->down, e * d * f),
                            formats->down, expert));
    if (!weights->gate_up_bias) return EPMOE_OK;
    epmoei_view_t gate = as_column(expert->gate_bias), up = as_column(expert->up_bias);
    EPMOEI_CHECK(put_gate_up(layer, writer, weights->gate_up_bias + e * 2 * f, EPMOE_F32, &gate, &up));
    return epmoei_writer_put(writer, &expert->down_bias, weights->down_bias + e * d, EPMOE_F32, 0, 1);
}

static epmoe_status_t put_all(epmoe_layer_t *layer, epmoei_weight_writer_t *writer,
                              const epmoei_weights_source_t *source, const epmoei_layer_source_t *common,
                              const epmoei_layer_formats_t *formats)
{
    EPMOEI_CHECK(put_common(layer, writer, common));
    if (source->step) EPMOEI_CHECK(source->step(source->ctx));
    int64_t matrix = (int64_t)layer->config.hidden * layer->config.intermediate;
    int64_t expert_bytes = matrix * (2 * epmoe_dtype_size(epmoei_dtype_of_format(formats->gate_up)) +
                                     epmoe_dtype_size(epmoei_dtype_of_format(formats->down)));
    for (int32_t e = 0; e < layer->local_experts; e++) {
        epmoei_expert_source_t expert;
        EPMOEI_CHECK(source->expert(source->ctx, e, &expert));
        EPMOEI_CHECK(put_routed(layer, writer, e, &expert));
        const epmoe_load_options_t *options = source->options;
        if (options && options->progress) {
            EPMOEI_CHECK(epmoei_writer_wait(writer));
            if (options->progress(options->progress_ctx, (e + 1) * expert_bytes, layer->local_experts * expert_bytes))
                return epmoei_fail(EPMOE_ERROR_BAD_STATE, "loading was cancelled by the progress callback");
        }
        if (source->step) EPMOEI_CHECK(source->step(source->ctx));
    }
    return epmoei_writer_wait(writer);
}

epmoe_status_t epmoei_layer_build_weights(epmoe_layer_t *layer, const epmoei_weights_source_t *source,
                                          bool borrow_matrices)
{
    epmoei_layer_source_t common;
    epmoei_layer_formats_t formats;
    EPMOEI_CHECK(source->layer(source->ctx, &common));
    EPMOEI_CHECK(check_source(layer, source, &common, &formats));
    epmoei_layer_formats_t copied = formats;
    if (borrow_matrices) copied.gate_up = copied.down = copied.shared_gate_up = copied.shared_down = EPMOE_FORMAT_NONE;
    EPMOEI_CHECK(epmoei_layer_make_weights(layer, &copied));

    epmoei_weight_writer_t writer;
    EPMOEI_CHECK(epmoei_writer_open(&writer, layer->backend));
    epmoe_status_t status = put_all(layer, &writer, source, &common, &formats);
    /* Nothing may be under way when the staging buffer and the sources go. */
    epmoe_status_t last = epmoei_writer_wait(&writer);
    epmoei_writer_close(&writer);
    if (status == EPMOE_OK) status = last;
    layer->has_weights = status == EPMOE_OK;
    return status;
}
