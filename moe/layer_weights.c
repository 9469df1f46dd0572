#include "moe/layer_weights.h"

#include "base/dtype.h"

#include <stdio.h>
#include <string.h>

enum { kCopyBlock = 64 };

/* dst[r*dst_cols + c] = view(r,c) in dst_dtype. Transposed storage is read in blocks, so that each line of the source
 * is fetched once. */
static void copy_view(void *dst, epmoe_dtype_t dst_dtype, const epmoei_view_t *view)
{
    int64_t dst_size = epmoe_dtype_size(dst_dtype), src_size = epmoe_dtype_size(view->dtype);
    if (view->col_stride == 1) {
#pragma omp parallel for schedule(static)
        for (int64_t r = 0; r < view->rows; r++) {
            char *to = (char *)dst + r * view->cols * dst_size;
            const char *from = (const char *)view->data + r * view->row_stride * src_size;
            if (dst_dtype == view->dtype)
                memcpy(to, from, (size_t)(view->cols * dst_size));
            else /* a source of mixed types is widened */
                for (int64_t c = 0; c < view->cols; c++)
                    epmoei_store(to, dst_dtype, c, epmoei_load(from, view->dtype, c));
        }
        return;
    }
#pragma omp parallel for schedule(static)
    for (int64_t r0 = 0; r0 < view->rows; r0 += kCopyBlock)
        for (int64_t c0 = 0; c0 < view->cols; c0 += kCopyBlock)
            for (int64_t c = c0; c < epmoei_min64(c0 + kCopyBlock, view->cols); c++)
                for (int64_t r = r0; r < epmoei_min64(r0 + kCopyBlock, view->rows); r++)
                    epmoei_store(dst, dst_dtype, r * view->cols + c,
                                 epmoei_load(view->data, view->dtype, r * view->row_stride + c * view->col_stride));
}

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
    return EPMOE_OK;
}

void epmoei_layer_drop_weights(epmoe_layer_t *layer)
{
    epmoei_free(layer->weights_memory);
    layer->weights_memory = NULL;
    memset(&layer->weights, 0, sizeof layer->weights);
    layer->has_weights = false;
}

epmoe_status_t epmoei_layer_make_weights(epmoe_layer_t *layer, const epmoei_layer_formats_t *formats)
{
    epmoei_layer_drop_weights(layer);
    int64_t bytes = epmoei_layer_weights_layout(NULL, &layer->config, layer->local_experts, formats, &layer->weights);
    EPMOEI_CHECK(epmoei_alloc_for(&layer->weights_memory, bytes, "this rank's weights"));
    epmoei_layer_weights_layout(layer->weights_memory, &layer->config, layer->local_experts, formats, &layer->weights);
    return EPMOE_OK;
}

char *epmoei_weight_element(void *base, epmoe_format_t format, int64_t index)
{
    return base ? (char *)base + index * epmoe_dtype_size(epmoei_dtype_of_format(format)) : NULL;
}

/* Gate rows, then up rows, then the down matrix of one expert. */
static void pack_expert(void *gate_up, epmoe_format_t gate_up_format, void *down, epmoe_format_t down_format,
                        const epmoei_expert_source_t *expert)
{
    int64_t gate_elements = expert->gate.rows * expert->gate.cols;
    copy_view(gate_up, epmoei_dtype_of_format(gate_up_format), &expert->gate);
    copy_view(epmoei_weight_element(gate_up, gate_up_format, gate_elements), epmoei_dtype_of_format(gate_up_format),
              &expert->up);
    copy_view(down, epmoei_dtype_of_format(down_format), &expert->down);
}

epmoe_status_t epmoei_layer_build_weights(epmoe_layer_t *layer, const epmoei_weights_source_t *source,
                                          bool borrow_matrices)
{
    const epmoe_layer_config_t *config = &layer->config;
    epmoei_layer_source_t common;
    epmoei_layer_formats_t formats;
    EPMOEI_CHECK(source->layer(source->ctx, &common));
    EPMOEI_CHECK(check_source(layer, source, &common, &formats));
    epmoei_layer_formats_t copied = formats;
    if (borrow_matrices) copied.gate_up = copied.down = copied.shared_gate_up = copied.shared_down = EPMOE_FORMAT_NONE;
    EPMOEI_CHECK(epmoei_layer_make_weights(layer, &copied));

    epmoei_packed_weights_t *weights = &layer->weights;
    if (weights->router) copy_view(weights->router, formats.router, &common.router);
    if (weights->router_bias) copy_view(weights->router_bias, EPMOE_F32, &common.router_bias);
    if (weights->selection_bias) copy_view(weights->selection_bias, EPMOE_F32, &common.selection_bias);
    if (weights->shared_gate) copy_view(weights->shared_gate, formats.router, &common.shared_gate);
    if (weights->shared_gate_up)
        pack_expert(weights->shared_gate_up, formats.shared_gate_up, weights->shared_down, formats.shared_down,
                    &common.shared);

    int64_t d = config->hidden, f = config->intermediate;
    int64_t expert_bytes = 2 * f * d * epmoe_dtype_size(epmoei_dtype_of_format(formats.gate_up)) +
                           d * f * epmoe_dtype_size(epmoei_dtype_of_format(formats.down));
    for (int32_t e = 0; e < layer->local_experts; e++) {
        epmoei_expert_source_t expert;
        EPMOEI_CHECK(source->expert(source->ctx, e, &expert));
        if (!borrow_matrices)
            pack_expert(epmoei_weight_element(weights->gate_up, formats.gate_up, e * 2 * f * d), formats.gate_up,
                        epmoei_weight_element(weights->down, formats.down, e * d * f), formats.down, &expert);
        if (weights->gate_up_bias) {
            copy_view(weights->gate_up_bias + e * 2 * f, EPMOE_F32, &expert.gate_bias);
            copy_view(weights->gate_up_bias + e * 2 * f + f, EPMOE_F32, &expert.up_bias);
            copy_view(weights->down_bias + e * d, EPMOE_F32, &expert.down_bias);
        }
        const epmoe_load_options_t *options = source->options;
        if (options && options->progress &&
            options->progress(options->progress_ctx, (e + 1) * expert_bytes, layer->local_experts * expert_bytes))
            return epmoei_fail(EPMOE_ERROR_BAD_STATE, "loading was cancelled by the progress callback");
    }
    layer->has_weights = true;
    return EPMOE_OK;
}
