#include "moe/layer_weights.h"

#include "base/device.h"
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

/* A column's group must be one of the groups there are. */
static epmoe_status_t check_indices(const epmoei_quant_source_t *source, const char *what)
{
    const epmoei_tensor_t *tensor = source->indices;
    epmoe_status_t status = epmoei_quant_check_groups(&source->quant, tensor ? tensor->name : what);
    if (status == EPMOE_OK || !tensor) return status;
    return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: tensor %s", tensor->path, epmoe_last_error());
}

static epmoe_status_t check_matrix(const epmoei_view_t *view, const epmoei_quant_source_t *source, const char *what,
                                   int64_t rows, int64_t cols)
{
    if (source->quant.format == EPMOE_FORMAT_NONE) return check_view(view, what, rows, cols);
    epmoei_view_t sizes = *view;
    sizes.dtype = EPMOE_F32; /* what a view says of a quantised matrix is its size */
    EPMOEI_CHECK(check_view(&sizes, what, rows, cols));
    char indices[112];
    snprintf(indices, sizeof indices, "%s g_idx", what);
    return check_indices(source, indices);
}

static epmoe_status_t check_expert(const epmoe_layer_config_t *config, const epmoei_expert_source_t *expert, int64_t f,
                                   bool has_bias, const char *name)
{
    const struct {
        const char *what;
        const epmoei_view_t *view;
        const epmoei_quant_source_t *quant;
        int64_t rows;
        int64_t cols;
    } views[] = {
        {"gate", &expert->gate, &expert->gate_quant, f, config->hidden},
        {"up", &expert->up, &expert->up_quant, f, config->hidden},
        {"down", &expert->down, &expert->down_quant, config->hidden, f},
        {"gate bias", &expert->gate_bias, NULL, 1, f},
        {"up bias", &expert->up_bias, NULL, 1, f},
        {"down bias", &expert->down_bias, NULL, 1, config->hidden},
    };
    for (size_t i = 0; i < (has_bias ? 6 : 3); i++) {
        char what[96];
        snprintf(what, sizeof what, "%s %s", name, views[i].what);
        EPMOEI_CHECK(views[i].quant ? check_matrix(views[i].view, views[i].quant, what, views[i].rows, views[i].cols)
                                    : check_view(views[i].view, what, views[i].rows, views[i].cols));
    }
    return EPMOE_OK;
}

/* The common format of what has been seen so far and one more: F32 holds any mixture, exactly. */
static epmoe_format_t merge_format(epmoe_format_t so_far, epmoe_dtype_t dtype)
{
    epmoe_format_t format = epmoei_format_of_dtype(dtype);
    return so_far == EPMOE_FORMAT_NONE || so_far == format ? format : EPMOE_FORMAT_F32;
}

/* What is known of one packed matrix of all experts. */
typedef struct merged_t {
    const char *place; /* of the weights, for messages */
    const char *matrix;
    epmoe_format_t *format;
    epmoei_pack_shape_t *pack;
    const char *widened; /* what they are kept as otherwise: fp32, on CUDA the layer's dtype */
    bool cuda;
    bool quantised; /* some source so far is */
    bool warned;
} merged_t;

/* Plain weights take two to eight times the memory: nobody should have to guess where that went. */
static void warn_widened(merged_t *merged, const char *name, const char *why)
{
    if (!merged->warned)
        epmoei_log(EPMOE_LOG_WARNING, "%s: quantised weights %s are kept as %s: %s: %s", merged->place, merged->matrix,
                   merged->widened, name, why);
    merged->warned = true;
}

static void merge_source(merged_t *merged, const epmoei_view_t *view, const epmoei_quant_source_t *source,
                         const char *name)
{
    static const char *const mixture = "plain and quantised projections are mixed";
    epmoe_format_t so_far = *merged->format, own = source->quant.format;
    if (own == EPMOE_FORMAT_NONE) {
        if (merged->quantised) warn_widened(merged, name, mixture);
        *merged->format = merge_format(so_far, view->dtype);
        return;
    }
    epmoei_pack_shape_t shape = epmoei_pack_shape(&source->quant);
    const char *why = NULL;
    if (shape.format == EPMOE_FORMAT_NONE)
        why = own == EPMOE_FORMAT_FP8_BLOCK ? "its rows cut blocks of fp8_block that have one scale"
                                            : "the groups of its g_idx are not all of group_size columns";
    if (!why && merged->cuda) why = epmoei_quant_cuda_obstacle(&shape, source->quant.cols);
    if (why) shape.format = EPMOE_FORMAT_NONE;
    if (so_far != EPMOE_FORMAT_NONE) shape = epmoei_pack_merge(merged->pack, &shape);
    bool fits = shape.format != EPMOE_FORMAT_NONE && (so_far == EPMOE_FORMAT_NONE || so_far == shape.format);
    if (!why && !fits) why = merged->quantised ? "its format or group_size is not that of the others" : mixture;
    if (why) warn_widened(merged, name, why);
    *merged->format = fits ? shape.format : EPMOE_FORMAT_F32;
    *merged->pack = shape;
    merged->quantised = true;
}

/* CUDA permutes the columns of x once for gate and up rows. */
static bool same_order(const epmoei_quant_t *gate, const epmoei_quant_t *up)
{
    if (!gate->g_idx || !up->g_idx) return !gate->g_idx && !up->g_idx;
    if (gate->format != up->format || gate->cols != up->cols) return false;
    for (int64_t c = 0; c < gate->cols; c++)
        if (epmoei_quant_index(gate, c) != epmoei_quant_index(up, c)) return false;
    return true;
}

static void merge_expert(merged_t *gate_up, merged_t *down, const epmoei_expert_source_t *expert, const char *name)
{
    char what[48];
    snprintf(what, sizeof what, "%s gate", name);
    merge_source(gate_up, &expert->gate, &expert->gate_quant, what);
    snprintf(what, sizeof what, "%s up", name);
    merge_source(gate_up, &expert->up, &expert->up_quant, what);
    snprintf(what, sizeof what, "%s down", name);
    merge_source(down, &expert->down, &expert->down_quant, what);
    if (!gate_up->cuda || *gate_up->format != EPMOE_FORMAT_W4 || !gate_up->pack->order ||
        same_order(&expert->gate_quant.quant, &expert->up_quant.quant))
        return;
    warn_widened(gate_up, name, "its gate and up rows have different orders of columns");
    *gate_up->format = EPMOE_FORMAT_F32;
}

/* Quantised weights are packed by the host. */
static epmoe_status_t check_cuda_source(const epmoe_layer_t *layer, const epmoei_expert_source_t *expert, bool borrowed,
                                        const char *name)
{
    const epmoei_quant_source_t *const sources[] = {&expert->gate_quant, &expert->up_quant, &expert->down_quant};
    if (layer->backend != EPMOE_BACKEND_CUDA || borrowed) return EPMOE_OK;
    for (int i = 0; i < 3; i++) {
        const epmoei_quant_t *quant = &sources[i]->quant;
        if (quant->format != EPMOE_FORMAT_NONE && epmoei_memory_is_device(quant->data))
            return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED,
                               "%s is %s in device memory: expected quantised weights in host memory", name,
                               epmoe_format_string(quant->format));
    }
    return EPMOE_OK;
}

/* Tensor cores multiply two matrices of one type: weights take the activations'. A router that would lose significant
 * bits could choose other experts, so it is refused; bf16's eight fit into fp16. */
static epmoe_status_t fit_cuda_formats(const epmoe_layer_t *layer, epmoei_layer_formats_t *formats)
{
    epmoe_format_t format = epmoei_format_of_dtype(layer->config.dtype);
    epmoe_format_t *const matrices[] = {&formats->gate_up, &formats->down, &formats->shared_gate_up,
                                        &formats->shared_down};
    for (size_t i = 0; i < sizeof matrices / sizeof matrices[0]; i++)
        if (*matrices[i] != EPMOE_FORMAT_NONE && !epmoei_format_is_quantised(*matrices[i])) *matrices[i] = format;
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
static epmoe_status_t check_source(const epmoe_layer_t *layer, const epmoei_weights_source_t *source, bool borrowed,
                                   const epmoei_layer_source_t *common, epmoei_layer_formats_t *formats)
{
    const epmoe_layer_config_t *config = &layer->config;
    memset(formats, 0, sizeof *formats);
    formats->router = EPMOE_F32;
    const bool cuda = layer->backend == EPMOE_BACKEND_CUDA;
    const merged_t none = {.place = source->place,
                           .cuda = cuda,
                           .widened = cuda ? epmoe_dtype_string(config->dtype) : "fp32",
                           .warned = borrowed}; /* those are kept as they are */
    if (config->num_experts) {
        merged_t gate_up = none, down = none;
        gate_up.matrix = "gate_up", gate_up.format = &formats->gate_up, gate_up.pack = &formats->gate_up_pack;
        down.matrix = "down", down.format = &formats->down, down.pack = &formats->down_pack;
        EPMOEI_CHECK(check_view(&common->router, "router", config->num_experts, config->hidden));
        formats->router = common->router.dtype;
        if (config->router_has_bias)
            EPMOEI_CHECK(check_view(&common->router_bias, "router bias", 1, config->num_experts));
        if (config->has_selection_bias)
            EPMOEI_CHECK(check_view(&common->selection_bias, "selection bias", 1, config->num_experts));
        for (int32_t e = 0; e < layer->local_experts; e++) {
            epmoei_expert_source_t expert;
            char name[32];
            snprintf(name, sizeof name, "expert %d", epmoei_layer_expert(layer, e));
            EPMOEI_CHECK(source->expert(source->ctx, e, &expert));
            EPMOEI_CHECK(check_expert(config, &expert, config->intermediate, config->expert_has_bias, name));
            EPMOEI_CHECK(check_cuda_source(layer, &expert, borrowed, name));
            merge_expert(&gate_up, &down, &expert, name);
        }
    }
    if (config->shared_intermediate) {
        EPMOEI_CHECK(check_expert(config, &common->shared, config->shared_intermediate, false, "shared expert"));
        merged_t gate_up = none, down = none;
        gate_up.matrix = "shared_gate_up", gate_up.format = &formats->shared_gate_up;
        gate_up.pack = &formats->shared_gate_up_pack;
        down.matrix = "shared_down", down.format = &formats->shared_down, down.pack = &formats->shared_down_pack;
        EPMOEI_CHECK(check_cuda_source(layer, &common->shared, borrowed, "shared expert"));
        merge_expert(&gate_up, &down, &common->shared, "shared expert");
    }
    if (config->shared_gated) {
        EPMOEI_CHECK(check_view(&common->shared_gate, "shared expert gate", 1, config->hidden));
        /* One type for both: the router's product computes the gate too. */
        formats->router = epmoei_dtype_of_format(
            merge_format(config->num_experts ? epmoei_format_of_dtype(formats->router) : EPMOE_FORMAT_NONE,
                         common->shared_gate.dtype));
    }
    return cuda ? fit_cuda_formats(layer, formats) : EPMOE_OK;
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
    int64_t bytes = epmoei_layer_weights_layout(NULL, &layer->config, layer->backend, layer->local_experts, formats,
                                                &layer->weights);
    EPMOEI_CHECK(epmoei_memory_alloc(layer->backend, &layer->weights_memory, bytes, "this rank's weights"));
    epmoei_layer_weights_layout(layer->weights_memory, &layer->config, layer->backend, layer->local_experts, formats,
                                &layer->weights);
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

/* One expert's matrix in the packed memory. */
typedef struct matrix_t {
    epmoe_format_t format;
    epmoei_matrix_sizes_t sizes;
    epmoei_quant_matrix_t at; /* data alone where it is plain */
} matrix_t;

static matrix_t matrix_of(const epmoe_layer_t *layer, epmoe_format_t format, const epmoei_pack_shape_t *pack,
                          void *data, const epmoei_pack_arrays_t *arrays, int64_t rows, int64_t cols, bool halves,
                          int64_t e)
{
    epmoei_matrix_sizes_t sizes = epmoei_matrix_sizes(layer->backend, format, pack, rows, cols, halves);
    matrix_t matrix = {format, sizes, {.pack = pack, .rows = rows, .cols = cols, .halves = halves}};
    if (data) matrix.at.data = (char *)data + e * sizes.data;
    if (arrays->scales) matrix.at.arrays.scales = (char *)arrays->scales + e * sizes.scales;
    if (arrays->zeros) matrix.at.arrays.zeros = arrays->zeros + e * sizes.zeros;
    if (arrays->order) matrix.at.arrays.order = arrays->order + e * (sizes.order / 4);
    return matrix;
}

/* Row r becomes row first_row + r * row_step of dst. */
static void widen(const epmoei_quant_t *quant, float *dst, int64_t first_row, int64_t row_step)
{
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < quant->rows; r++) {
        float *row = dst + (first_row + r * row_step) * quant->cols;
        if (quant->format != EPMOE_FORMAT_W4 || !quant->g_idx)
            epmoei_quant_row(quant, r, 0, quant->cols, row);
        else
            for (int64_t c = 0; c < quant->cols; c++) row[epmoei_quant_index(quant, c)] = epmoei_quant_at(quant, r, c);
    }
}

/* A quantised source that does not fit the packed layout of the others. */
static epmoe_status_t put_widened(const epmoe_layer_t *layer, epmoei_weight_writer_t *writer, const matrix_t *matrix,
                                  const epmoei_quant_t *quant, int64_t first_row, int64_t row_step)
{
    if (layer->backend != EPMOE_BACKEND_CUDA) {
        widen(quant, matrix->at.data, first_row, row_step);
        return EPMOE_OK;
    }
    void *values;
    EPMOEI_CHECK(epmoei_alloc_for(&values, quant->rows * quant->cols * 4, "widening a quantised matrix"));
    widen(quant, values, 0, 1);
    const epmoei_view_t view = {values, EPMOE_F32, quant->rows, quant->cols, quant->cols, 1};
    epmoe_status_t status =
        epmoei_writer_put(writer, &view, matrix->at.data, epmoei_dtype_of_format(matrix->format), first_row, row_step);
    epmoe_status_t waited = epmoei_writer_wait(writer);
    epmoei_free(values);
    return status != EPMOE_OK ? status : waited;
}

/* Where matrices are put, whatever their format. */
typedef struct writers_t {
    epmoei_weight_writer_t plain;
    epmoei_quant_writer_t quant;
} writers_t;

/* Rows of a source, which are the matrix's own or, with halves, its gate (half 0) or up rows (half 1). */
static epmoe_status_t put_rows(const epmoe_layer_t *layer, writers_t *writers, const matrix_t *matrix,
                               const epmoei_view_t *view, const epmoei_quant_source_t *source, int half)
{
    const epmoei_quant_t *quant = &source->quant;
    int64_t first_row = 0, row_step = 1;
    if (epmoei_format_is_quantised(matrix->format)) {
        epmoei_pack_target_t target = epmoei_quant_writer_target(&writers->quant, half);
        epmoei_quant_pack(quant, &target);
        return EPMOE_OK;
    }
    if (matrix->at.halves) epmoei_packed_rows(layer, view->rows, half == 1, &first_row, &row_step);
    if (quant->format == EPMOE_FORMAT_NONE)
        return epmoei_writer_put(&writers->plain, view, matrix->at.data, epmoei_dtype_of_format(matrix->format),
                                 first_row, row_step);
    return put_widened(layer, &writers->plain, matrix, quant, first_row, row_step);
}

/* second NULL: the matrix has one half. */
static epmoe_status_t put_matrix(const epmoe_layer_t *layer, writers_t *writers, const matrix_t *matrix,
                                 const epmoei_view_t *view, const epmoei_quant_source_t *source,
                                 const epmoei_view_t *second, const epmoei_quant_source_t *second_source)
{
    bool quantised = epmoei_format_is_quantised(matrix->format);
    if (!matrix->at.data || !view->data) return EPMOE_OK;
    if (quantised) EPMOEI_CHECK(epmoei_quant_writer_begin(&writers->quant, &matrix->at));
    EPMOEI_CHECK(put_rows(layer, writers, matrix, view, source, 0));
    if (second) EPMOEI_CHECK(put_rows(layer, writers, matrix, second, second_source, 1));
    return quantised ? epmoei_quant_writer_end(&writers->quant) : EPMOE_OK;
}

static epmoe_status_t put_expert(const epmoe_layer_t *layer, writers_t *writers, const matrix_t *gate_up,
                                 const matrix_t *down, const epmoei_expert_source_t *expert)
{
    EPMOEI_CHECK(
        put_matrix(layer, writers, gate_up, &expert->gate, &expert->gate_quant, &expert->up, &expert->up_quant));
    return put_matrix(layer, writers, down, &expert->down, &expert->down_quant, NULL, NULL);
}

static matrix_t gate_up_of(const epmoe_layer_t *layer, int64_t e)
{
    const epmoei_packed_weights_t *weights = &layer->weights;
    return matrix_of(layer, weights->formats.gate_up, &weights->formats.gate_up_pack, weights->gate_up,
                     &weights->gate_up_arrays, 2 * (int64_t)layer->config.intermediate, layer->config.hidden, true, e);
}

static matrix_t down_of(const epmoe_layer_t *layer, int64_t e)
{
    const epmoei_packed_weights_t *weights = &layer->weights;
    return matrix_of(layer, weights->formats.down, &weights->formats.down_pack, weights->down, &weights->down_arrays,
                     layer->config.hidden, layer->config.intermediate, false, e);
}

static epmoe_status_t put_common(epmoe_layer_t *layer, writers_t *writers, const epmoei_layer_source_t *common)
{
    epmoei_weight_writer_t *writer = &writers->plain;
    const epmoei_packed_weights_t *weights = &layer->weights;
    const epmoei_layer_formats_t *formats = &weights->formats;
    EPMOEI_CHECK(epmoei_writer_put(writer, &common->router, weights->router, formats->router, 0, 1));
    EPMOEI_CHECK(epmoei_writer_put(writer, &common->router_bias, weights->router_bias, EPMOE_F32, 0, 1));
    EPMOEI_CHECK(epmoei_writer_put(writer, &common->selection_bias, weights->selection_bias, EPMOE_F32, 0, 1));
    EPMOEI_CHECK(epmoei_writer_put(writer, &common->shared_gate, weights->shared_gate, formats->router, 0, 1));
    int64_t d = layer->config.hidden, fs = layer->config.shared_intermediate;
    matrix_t gate_up = matrix_of(layer, formats->shared_gate_up, &formats->shared_gate_up_pack, weights->shared_gate_up,
                                 &weights->shared_gate_up_arrays, 2 * fs, d, true, 0);
    matrix_t down = matrix_of(layer, formats->shared_down, &formats->shared_down_pack, weights->shared_down,
                              &weights->shared_down_arrays, d, fs, false, 0);
    return put_expert(layer, writers, &gate_up, &down, &common->shared);
}

static epmoe_status_t put_routed(epmoe_layer_t *layer, writers_t *writers, int32_t e,
                                 const epmoei_expert_source_t *expert)
{
    epmoei_weight_writer_t *writer = &writers->plain;
    const epmoei_packed_weights_t *weights = &layer->weights;
    int64_t d = layer->config.hidden, f = layer->config.intermediate;
    matrix_t gate_up = gate_up_of(layer, e), down = down_of(layer, e);
    EPMOEI_CHECK(put_expert(layer, writers, &gate_up, &down, expert));
    if (!weights->gate_up_bias) return EPMOE_OK;
    epmoei_view_t gate = as_column(expert->gate_bias), up = as_column(expert->up_bias);
    EPMOEI_CHECK(put_gate_up(layer, writer, weights->gate_up_bias + e * 2 * f, EPMOE_F32, &gate, &up));
    return epmoei_writer_put(writer, &expert->down_bias, weights->down_bias + e * d, EPMOE_F32, 0, 1);
}

static epmoe_status_t put_all(epmoe_layer_t *layer, writers_t *writers, const epmoei_weights_source_t *source,
                              const epmoei_layer_source_t *common)
{
    EPMOEI_CHECK(put_common(layer, writers, common));
    if (source->step) EPMOEI_CHECK(source->step(source->ctx));
    int64_t expert_bytes = gate_up_of(layer, 0).sizes.total + down_of(layer, 0).sizes.total;
    for (int32_t e = 0; e < layer->local_experts; e++) {
        epmoei_expert_source_t expert;
        EPMOEI_CHECK(source->expert(source->ctx, e, &expert));
        EPMOEI_CHECK(put_routed(layer, writers, e, &expert));
        const epmoe_load_options_t *options = source->options;
        if (options && options->progress) {
            EPMOEI_CHECK(epmoei_writer_wait(&writers->plain));
            if (options->progress(options->progress_ctx, (e + 1) * expert_bytes, layer->local_experts * expert_bytes))
                return epmoei_fail(EPMOE_ERROR_BAD_STATE, "loading was cancelled by the progress callback");
        }
        if (source->step) EPMOEI_CHECK(source->step(source->ctx));
    }
    return epmoei_writer_wait(&writers->plain);
}

epmoe_status_t epmoei_layer_build_weights(epmoe_layer_t *layer, const epmoei_weights_source_t *source,
                                          bool borrow_matrices)
{
    epmoei_layer_source_t common;
    epmoei_layer_formats_t formats;
    EPMOEI_CHECK(source->layer(source->ctx, &common));
    EPMOEI_CHECK(check_source(layer, source, borrow_matrices, &common, &formats));
    epmoei_layer_formats_t copied = formats;
    if (borrow_matrices) copied.gate_up = copied.down = copied.shared_gate_up = copied.shared_down = EPMOE_FORMAT_NONE;
    EPMOEI_CHECK(epmoei_layer_make_weights(layer, &copied));
    /* Borrowed ones are not there yet. */
    if (!borrow_matrices) EPMOEI_CHECK(epmoei_layer_fit_workspace(layer));

    writers_t writers;
    EPMOEI_CHECK(epmoei_writer_open(&writers.plain, layer->backend));
    epmoei_quant_writer_open(&writers.quant, layer->backend, writers.plain.stream);
    epmoe_status_t status = put_all(layer, &writers, source, &common);
    /* Nothing may be under way when the staging buffers and the sources go. */
    epmoe_status_t last = epmoei_writer_wait(&writers.plain);
    epmoei_quant_writer_close(&writers.quant);
    epmoei_writer_close(&writers.plain);
    if (status == EPMOE_OK) status = last;
    if (status == EPMOE_OK) status = epmoei_layer_tile_weights(layer);
    layer->has_weights = status == EPMOE_OK;
    return status;
}
