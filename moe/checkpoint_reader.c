#include "moe/checkpoint_internal.h"
#include "base/dtype.h"

#include <stdio.h>
#include <string.h>

const char *const epmoei_quantised_suffixes[] = {
    ".weight_scale_inv", ".weight_scale", ".scale", ".input_scale",   ".qweight",
    ".qzeros",           ".scales",       ".g_idx", ".weight_packed", ".weight_zero_point",
    ".weight_shape",     ".weight_g_idx", NULL};
const char *const epmoei_quantised_stacked_suffixes[] = {"_blocks", "_scales", "_scale_inv", "_scale", NULL};

const char *epmoei_checkpoint_name(char name[EPMOEI_NAME_BYTES], const epmoe_checkpoint_t *checkpoint, int32_t layer,
                                   const char *module, const char *pattern, int32_t expert, const char *suffix)
{
    const char *number = strstr(pattern, "%d");
    const char *layers = checkpoint->config.family->layers;
    if (number)
        snprintf(name, EPMOEI_NAME_BYTES, "%s%d.%s%.*s%d%s%s", layers, layer, module, (int)(number - pattern), pattern,
                 expert, number + 2, suffix);
    else
        snprintf(name, EPMOEI_NAME_BYTES, "%s%d.%s%s%s", layers, layer, module, pattern, suffix);
    return name;
}

const epmoei_tensor_t *epmoei_reader_find(const epmoei_reader_t *reader, const char *pattern, int32_t expert,
                                          const char *suffix)
{
    char name[EPMOEI_NAME_BYTES];
    return epmoei_tensor_index_find(
        &reader->checkpoint->index,
        epmoei_checkpoint_name(name, reader->checkpoint, reader->layer, reader->module, pattern, expert, suffix));
}

bool epmoei_reader_has_prefix(const epmoei_reader_t *reader, const char *pattern)
{
    char name[EPMOEI_NAME_BYTES];
    return epmoei_tensor_index_has_prefix(
        &reader->checkpoint->index,
        epmoei_checkpoint_name(name, reader->checkpoint, reader->layer, reader->module, pattern, 0, ""));
}

epmoe_status_t epmoei_reader_missing(const epmoei_reader_t *reader, const char *pattern, int32_t expert,
                                     const char *suffix)
{
    char name[EPMOEI_NAME_BYTES];
    epmoei_checkpoint_name(name, reader->checkpoint, reader->layer, reader->module, pattern, expert, suffix);
    return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: tensor %s is missing", reader->checkpoint->dir, name);
}

void epmoei_reader_refuse(epmoei_reader_t *reader, const epmoei_tensor_t *tensor, const char *format)
{
    if (reader->refused) return;
    reader->refused = tensor;
    reader->refused_format = format;
}

epmoe_status_t epmoei_reader_check_shape(const epmoei_tensor_t *tensor, int32_t num_dims, const int64_t *expected,
                                         const char *reason)
{
    bool same = tensor->num_dims == num_dims;
    for (int32_t i = 0; same && i < num_dims; i++) same = expected[i] < 0 || tensor->shape[i] == expected[i];
    if (same) return EPMOE_OK;
    char have[EPMOEI_SHAPE_TEXT], want[EPMOEI_SHAPE_TEXT];
    epmoei_shape_text(have, tensor->num_dims, tensor->shape);
    epmoei_shape_text(want, num_dims, expected);
    for (char *any; (any = strstr(want, "-1"));) memcpy(any, " *", 2);
    return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: tensor %s is %s: expected %s by config.json (%s)", tensor->path,
                       tensor->name, have, want, reason);
}

static epmoei_view_t view_of(const epmoei_tensor_t *tensor, int64_t offset, int64_t rows, int64_t cols,
                             int64_t row_stride, int64_t col_stride)
{
    const char *data = (const char *)tensor->data + offset * epmoe_dtype_size(tensor->dtype);
    return (epmoei_view_t){data, tensor->dtype, rows, cols, row_stride, col_stride};
}

epmoe_status_t epmoei_reader_row(epmoei_reader_t *reader, const char *pattern, const epmoei_config_size_t *cols,
                                 epmoei_view_t *view)
{
    const epmoei_tensor_t *tensor = epmoei_reader_find(reader, pattern, 0, "");
    if (!tensor) return epmoei_reader_missing(reader, pattern, 0, "");
    /* Some exports keep a leading dimension of one. */
    const int64_t as_matrix[] = {1, cols->value};
    bool matrix = tensor->num_dims == 2 && tensor->shape[0] == 1;
    EPMOEI_CHECK(epmoei_reader_check_shape(tensor, matrix ? 2 : 1, matrix ? as_matrix : &cols->value, cols->text));
    if (!epmoei_dtype_is_float(tensor->dtype)) {
        epmoei_reader_refuse(reader, tensor, tensor->dtype_name);
        return EPMOE_OK;
    }
    *view = view_of(tensor, 0, 1, cols->value, cols->value, 1);
    return EPMOE_OK;
}

epmoe_status_t epmoei_reader_projection(epmoei_reader_t *reader, const char *pattern, int32_t expert,
                                        const epmoei_config_size_t *rows, const epmoei_config_size_t *cols,
                                        epmoei_view_t *view, epmoei_quant_source_t *quant)
{
    const epmoei_tensor_t *tensor;
    epmoe_format_t format = epmoei_reader_quantised(reader, pattern, expert, &tensor);
    if (quant) *quant = (epmoei_quant_source_t){0};
    if (format != EPMOE_FORMAT_NONE) {
        if (quant) {
            epmoei_reader_note(reader, pattern, expert, true);
            return epmoei_reader_quant_projection(reader, pattern, expert, rows, cols, format, view, quant);
        }
        epmoei_reader_refuse(reader, tensor, epmoe_format_string(format));
        return EPMOE_OK;
    }
    tensor = epmoei_reader_find(reader, pattern, expert, ".weight");
    if (!tensor) return epmoei_reader_missing(reader, pattern, expert, ".weight");
    int64_t shape[2] = {rows->value, cols->value};
    char reason[280];
    snprintf(reason, sizeof reason, "%s%s%s", rows->text, rows->text[0] && cols->text[0] ? " and " : "", cols->text);
    EPMOEI_CHECK(epmoei_reader_check_shape(tensor, 2, shape, reason));
    if (!epmoei_dtype_is_float(tensor->dtype)) {
        epmoei_reader_refuse(reader, tensor, tensor->dtype_name);
        return EPMOE_OK;
    }
    if (quant) epmoei_reader_note(reader, pattern, expert, false);
    *view = view_of(tensor, 0, tensor->shape[0], tensor->shape[1], tensor->shape[1], 1);
    return EPMOE_OK;
}

/* A tensor that holds one plain projection of all experts, or NULL when this version cannot compute with it. */
static epmoe_status_t find_stacked(epmoei_reader_t *reader, const char *pattern, int64_t rows, int64_t cols,
                                   const char *reason, const epmoei_tensor_t **tensor)
{
    const epmoei_family_t *family = reader->checkpoint->config.family;
    const epmoei_config_size_t *experts = &reader->checkpoint->config.num_experts;
    const epmoei_tensor_t *plain = epmoei_reader_find(reader, pattern, 0, "");
    *tensor = NULL;
    if (!plain) return epmoei_reader_missing(reader, pattern, 0, "");
    bool transposed = family->stacked_transposed;
    int64_t shape[3] = {experts->value, transposed ? cols : rows, transposed ? rows : cols};
    EPMOEI_CHECK(epmoei_reader_check_shape(plain, 3, shape, reason));
    if (!epmoei_dtype_is_float(plain->dtype)) {
        epmoei_reader_refuse(reader, plain, plain->dtype_name);
        return EPMOE_OK;
    }
    epmoei_reader_note(reader, pattern, 0, false);
    *tensor = plain;
    return EPMOE_OK;
}

static epmoe_status_t find_stacked_bias(epmoei_reader_t *reader, const char *pattern, int64_t cols, const char *reason,
                                        const epmoei_tensor_t **tensor)
{
    const epmoei_tensor_t *bias = epmoei_reader_find(reader, pattern, 0, "_bias");
    *tensor = NULL;
    if (!bias) return epmoei_reader_missing(reader, pattern, 0, "_bias");
    int64_t shape[2] = {reader->checkpoint->config.num_experts.value, cols};
    EPMOEI_CHECK(epmoei_reader_check_shape(bias, 2, shape, reason));
    if (epmoei_dtype_is_float(bias->dtype))
        *tensor = bias;
    else
        epmoei_reader_refuse(reader, bias, bias->dtype_name);
    return EPMOE_OK;
}

static epmoei_view_t quant_view(const epmoei_quant_t *quant)
{
    return (epmoei_view_t){.data = quant->data, .rows = quant->rows, .cols = quant->cols};
}

/* In a stacked gate/up weight of an expert, row n of gate is row n*step of the 2f, row n of up the same past `skip`. */
epmoe_status_t epmoei_reader_stacked_expert(epmoei_reader_t *reader, int32_t expert, epmoei_expert_source_t *source)
{
    const epmoei_model_config_t *config = &reader->checkpoint->config;
    const epmoei_family_t *family = config->family;
    int64_t d = config->hidden.value, f = config->intermediate.value;
    char reason[420];
    snprintf(reason, sizeof reason, "%s, %s and %s", config->num_experts.text, config->intermediate.text,
             config->hidden.text);
    int64_t step = family->stacked_interleaved ? 2 : 1, skip = family->stacked_interleaved ? 1 : f;
    const epmoei_tensor_t *gate_up, *down;
    bool quantised;
    epmoei_quant_t *gate_quant = &source->gate_quant.quant, *down_quant = &source->down_quant.quant;
    EPMOEI_CHECK(epmoei_reader_quant_stacked(reader, reader->names->stacked_gate_up, 2 * f, d, reason, expert,
                                             &quantised, gate_quant));
    if (quantised) {
        if (gate_quant->format != EPMOE_FORMAT_NONE) {
            gate_quant->rows = f, gate_quant->row_step = step;
            source->up_quant.quant = *gate_quant;
            source->up_quant.quant.first_row = skip;
            source->gate = source->up = quant_view(gate_quant);
        }
    } else {
        EPMOEI_CHECK(find_stacked(reader, reader->names->stacked_gate_up, 2 * f, d, reason, &gate_up));
        int64_t row = family->stacked_transposed ? 1 : d, col = family->stacked_transposed ? 2 * f : 1;
        int64_t first = expert * (2 * f * d);
        if (gate_up) {
            source->gate = view_of(gate_up, first, f, d, step * row, col);
            source->up = view_of(gate_up, first + skip * row, f, d, step * row, col);
        }
    }
    EPMOEI_CHECK(
        epmoei_reader_quant_stacked(reader, reader->names->stacked_down, d, f, reason, expert, &quantised, down_quant));
    if (quantised) {
        if (down_quant->format != EPMOE_FORMAT_NONE) source->down = quant_view(down_quant);
    } else {
        EPMOEI_CHECK(find_stacked(reader, reader->names->stacked_down, d, f, reason, &down));
        int64_t row = family->stacked_transposed ? 1 : f, col = family->stacked_transposed ? d : 1;
        if (down) source->down = view_of(down, expert * (d * f), d, f, row, col);
    }
    if (!family->expert_has_bias) return EPMOE_OK;
    EPMOEI_CHECK(find_stacked_bias(reader, reader->names->stacked_gate_up, 2 * f, reason, &gate_up));
    EPMOEI_CHECK(find_stacked_bias(reader, reader->names->stacked_down, d, reason, &down));
    if (gate_up) {
        source->gate_bias = view_of(gate_up, expert * (2 * f), 1, f, 2 * f, step);
        source->up_bias = view_of(gate_up, expert * (2 * f) + skip, 1, f, 2 * f, step);
    }
    if (down) source->down_bias = view_of(down, expert * d, 1, d, d, 1);
    return EPMOE_OK;
}

bool epmoei_reader_has_projection(const epmoei_reader_t *reader, const char *pattern)
{
    const epmoei_tensor_t *quantised;
    return epmoei_reader_find(reader, pattern, 0, ".weight") ||
           epmoei_reader_quantised(reader, pattern, 0, &quantised) != EPMOE_FORMAT_NONE;
}

bool epmoei_reader_has_stacked(const epmoei_reader_t *reader)
{
    const char *name = reader->names->stacked_gate_up;
    return name && (epmoei_reader_find(reader, name, 0, "") || epmoei_reader_find(reader, name, 0, "_blocks"));
}
