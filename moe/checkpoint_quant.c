/* Quantised projections: which tensors they are made of, and that config.json and the tensors agree. */
#include "moe/checkpoint_internal.h"

#include <stdio.h>
#include <string.h>

/* The spellings of FP8's scale: it multiplies, whatever the name says. */
static const char *const scale_suffixes[] = {".weight_scale_inv", ".weight_scale", ".scale", NULL};

epmoe_format_t epmoei_reader_quantised(const epmoei_reader_t *reader, const char *pattern, int32_t expert,
                                       const epmoei_tensor_t **tensor)
{
    const epmoei_tensor_t *weight = epmoei_reader_find(reader, pattern, expert, ".weight");
    *tensor = weight;
    /* Tensors of a quantised format beside it are found when the names are checked. */
    if (weight) return weight->dtype == EPMOE_F8_E4M3 ? EPMOE_FORMAT_FP8_BLOCK : EPMOE_FORMAT_NONE;
    if ((*tensor = epmoei_reader_find(reader, pattern, expert, ".qweight")))
        return strcmp(reader->checkpoint->config.quant.method, "awq") ? EPMOE_FORMAT_GPTQ : EPMOE_FORMAT_AWQ;
    *tensor = epmoei_reader_find(reader, pattern, expert, ".weight_packed");
    return *tensor ? EPMOE_FORMAT_CT_W4 : EPMOE_FORMAT_NONE;
}

void epmoei_reader_note(const epmoei_reader_t *reader, const char *pattern, int32_t expert, bool quantised)
{
    const epmoei_quant_config_t *config = &reader->checkpoint->config.quant;
    char name[EPMOEI_NAME_BYTES];
    if (!reader->notes || !config->method[0]) return;
    char *note = quantised ? reader->notes->quantised : reader->notes->plain;
    if (note[0]) return;
    epmoei_checkpoint_name(name, reader->checkpoint, reader->layer, reader->module, pattern, expert, "");
    if (epmoei_quant_config_leaves_out(config, name) == quantised) memcpy(note, name, sizeof name);
}

/* What the tensors need from the config must be there. FP8 and MXFP4 say everything themselves. */
static epmoe_status_t check_method(const epmoei_reader_t *reader, const epmoei_tensor_t *tensor, epmoe_format_t format)
{
    static const struct {
        epmoe_format_t format;
        const char *method;
    } methods[] = {{EPMOE_FORMAT_FP8_BLOCK, "fp8"},
                   {EPMOE_FORMAT_GPTQ, "gptq"},
                   {EPMOE_FORMAT_AWQ, "awq"},
                   {EPMOE_FORMAT_CT_W4, "compressed-tensors"},
                   {EPMOE_FORMAT_MXFP4, "mxfp4"}};
    const epmoei_quant_config_t *config = &reader->checkpoint->config.quant;
    size_t i = 0;
    while (methods[i].format != format) i++;
    bool fp8 = format == EPMOE_FORMAT_FP8_BLOCK, says_all = fp8 || format == EPMOE_FORMAT_MXFP4;
    const char *method = fp8 && config->float8 ? "compressed-tensors" : methods[i].method;
    if ((!strcmp(config->method, method) && config->float8 <= fp8) || (says_all && !config->method[0]) ||
        config->refusal[0])
        return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: tensor %s is of a weight in format %s, but in config.json %s%s%s",
                       tensor->path, tensor->name, epmoe_format_string(format),
                       config->method[0] ? "quant_method is \"" : "there is no quantization_config", config->method,
                       config->method[0] ? "\"" : "");
}

static epmoe_status_t check_dtype(const epmoei_tensor_t *tensor, bool ok, const char *expected)
{
    if (ok) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: tensor %s is %s: expected %s", tensor->path, tensor->name,
                       tensor->dtype_name, expected);
}

/* One tensor of a projection being read. */
typedef struct parts_t {
    epmoei_reader_t *reader;
    const char *pattern;
    int32_t expert;
    const char *reason; /* where the expected sizes are from */
} parts_t;

/* *tensor stays NULL when it is optional and not there. */
static epmoe_status_t take(const parts_t *parts, const char *suffix, bool optional, int32_t num_dims,
                           const int64_t *shape, const epmoei_tensor_t **tensor)
{
    *tensor = epmoei_reader_find(parts->reader, parts->pattern, parts->expert, suffix);
    if (!*tensor)
        return optional ? EPMOE_OK : epmoei_reader_missing(parts->reader, parts->pattern, parts->expert, suffix);
    return epmoei_reader_check_shape(*tensor, num_dims, shape, parts->reason);
}

static epmoe_status_t take_words(const parts_t *parts, const char *suffix, bool optional, int64_t dim0, int64_t dim1,
                                 const void **data)
{
    const epmoei_tensor_t *tensor;
    const int64_t shape[] = {dim0, dim1};
    EPMOEI_CHECK(take(parts, suffix, optional, 2, shape, &tensor));
    *data = tensor ? tensor->data : NULL;
    return tensor ? check_dtype(tensor, tensor->dtype == EPMOE_I32, "I32") : EPMOE_OK;
}

static epmoe_status_t take_scales(const parts_t *parts, const char *suffix, int64_t dim0, int64_t dim1,
                                  epmoei_quant_t *quant)
{
    const epmoei_tensor_t *tensor;
    const int64_t shape[] = {dim0, dim1};
    EPMOEI_CHECK(take(parts, suffix, false, 2, shape, &tensor));
    EPMOEI_CHECK(check_dtype(tensor, epmoei_is_scales_dtype(tensor->dtype), "F32, BF16, F16 or F8_E8M0"));
    quant->scales = tensor->data;
    quant->scales_dtype = tensor->dtype;
    return EPMOE_OK;
}

static epmoe_status_t take_indices(const parts_t *parts, const char *suffix, bool needed, epmoei_quant_source_t *source)
{
    const epmoei_tensor_t *tensor;
    EPMOEI_CHECK(take(parts, suffix, !needed, 1, &source->quant.cols, &tensor));
    if (!tensor) return EPMOE_OK;
    EPMOEI_CHECK(check_dtype(tensor, tensor->dtype == EPMOE_I32, "I32"));
    source->quant.g_idx = tensor->data;
    source->indices = tensor;
    return EPMOE_OK;
}

static epmoe_status_t take_weight_shape(const parts_t *parts, const epmoei_quant_t *quant)
{
    static const int64_t two = 2;
    const int64_t want[] = {quant->rows, quant->cols};
    const epmoei_tensor_t *tensor;
    int64_t have[2];
    EPMOEI_CHECK(take(parts, ".weight_shape", false, 1, &two, &tensor));
    EPMOEI_CHECK(check_dtype(tensor, tensor->dtype == EPMOE_I64 || tensor->dtype == EPMOE_I32, "I64 or I32"));
    for (int i = 0; i < 2; i++) {
        int32_t narrow;
        memcpy(&narrow, (const char *)tensor->data + 4 * i, 4);
        have[i] = narrow;
    }
    if (tensor->dtype == EPMOE_I64) memcpy(have, tensor->data, sizeof have);
    if (have[0] == want[0] && have[1] == want[1]) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: tensor %s holds [%lld,%lld]: expected [%lld,%lld] by config.json (%s)",
                       tensor->path, tensor->name, (long long)have[0], (long long)have[1], (long long)want[0],
                       (long long)want[1], parts->reason);
}

static epmoe_status_t take_w4(const parts_t *parts, const epmoei_tensor_t *data, epmoei_quant_source_t *source)
{
    epmoei_quant_t *quant = &source->quant;
    const epmoei_quant_config_t *config = &parts->reader->checkpoint->config.quant;
    int64_t n = quant->rows, k = quant->cols, n8 = epmoei_ceil_div(n, 8), k8 = epmoei_ceil_div(k, 8);
    int64_t groups = epmoei_ceil_div(k, quant->group);
    EPMOEI_CHECK(check_dtype(data, data->dtype == EPMOE_I32, "I32"));
    switch (quant->format) {
    case EPMOE_FORMAT_GPTQ:
        EPMOEI_CHECK(epmoei_reader_check_shape(data, 2, (const int64_t[]){k8, n}, parts->reason));
        EPMOEI_CHECK(take_words(parts, ".qzeros", false, groups, n8, &quant->zeros));
        EPMOEI_CHECK(take_scales(parts, ".scales", groups, n, quant));
        return take_indices(parts, ".g_idx", config->needs_g_idx, source);
    case EPMOE_FORMAT_AWQ:
        EPMOEI_CHECK(epmoei_reader_check_shape(data, 2, (const int64_t[]){k, n8}, parts->reason));
        EPMOEI_CHECK(take_words(parts, ".qzeros", false, groups, n8, &quant->zeros));
        return take_scales(parts, ".scales", groups, n, quant);
    default:
        EPMOEI_CHECK(epmoei_reader_check_shape(data, 2, (const int64_t[]){n, k8}, parts->reason));
        EPMOEI_CHECK(take_words(parts, ".weight_zero_point", !config->needs_zeros, n8, groups, &quant->zeros));
        EPMOEI_CHECK(take_scales(parts, ".weight_scale", n, groups, quant));
        EPMOEI_CHECK(take_weight_shape(parts, quant));
        return take_indices(parts, ".weight_g_idx", config->needs_g_idx, source);
    }
}

static epmoe_status_t take_fp8(const parts_t *parts, const epmoei_tensor_t *data, epmoei_quant_t *quant)
{
    const char *const *suffix = scale_suffixes;
    const epmoei_tensor_t *scale = NULL;
    for (; *suffix; suffix++)
        if ((scale = epmoei_reader_find(parts->reader, parts->pattern, parts->expert, *suffix))) break;
    /* A code without its scale is not a weight. */
    if (!scale) return epmoei_reader_missing(parts->reader, parts->pattern, parts->expert, scale_suffixes[0]);
    EPMOEI_CHECK(epmoei_reader_check_shape(data, 2, (const int64_t[]){quant->rows, quant->cols}, parts->reason));
    const epmoei_quant_config_t *config = &parts->reader->checkpoint->config.quant;
    if (config->per_row) {
        quant->group = INT32_MAX;
        quant->row_group = 1;
        return take_scales(parts, *suffix, quant->rows, 1, quant);
    }
    if (config->float8 && !config->block && scale->num_elements != 1)
        return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: tensor %s has %lld elements: expected 1, as strategy is tensor",
                           scale->path, scale->name, (long long)scale->num_elements);
    if (!config->block && scale->num_elements == 1) {
        quant->group = INT32_MAX; /* one scale for the matrix, of any shape */
        EPMOEI_CHECK(check_dtype(scale, epmoei_is_scales_dtype(scale->dtype), "F32, BF16, F16 or F8_E8M0"));
        quant->scales = scale->data;
        quant->scales_dtype = scale->dtype;
        return EPMOE_OK;
    }
    return take_scales(parts, *suffix, epmoei_ceil_div(quant->rows, quant->group),
                       epmoei_ceil_div(quant->cols, quant->group), quant);
}

/* Rows of a projection whose width only its tensors know. */
static int64_t rows_of(const epmoei_reader_t *reader, const char *pattern, int32_t expert, epmoe_format_t format,
                       const epmoei_tensor_t *data)
{
    if (data->num_dims != 2) return 0;
    if (format == EPMOE_FORMAT_GPTQ) return data->shape[1];
    if (format != EPMOE_FORMAT_AWQ) return data->shape[0];
    const epmoei_tensor_t *scales = epmoei_reader_find(reader, pattern, expert, ".scales");
    return scales && scales->num_dims == 2 ? scales->shape[1] : 8 * data->shape[1];
}

epmoe_status_t epmoei_reader_quant_projection(epmoei_reader_t *reader, const char *pattern, int32_t expert,
                                              const epmoei_config_size_t *rows, const epmoei_config_size_t *cols,
                                              epmoe_format_t format, epmoei_view_t *view, epmoei_quant_source_t *source)
{
    const epmoei_quant_config_t *config = &reader->checkpoint->config.quant;
    const epmoei_tensor_t *data;
    epmoei_reader_quantised(reader, pattern, expert, &data);
    EPMOEI_CHECK(check_method(reader, data, format));
    if (config->refusal[0]) {
        epmoei_reader_refuse(reader, data, config->refusal);
        return EPMOE_OK;
    }
    bool fp8 = format == EPMOE_FORMAT_FP8_BLOCK;
    char reason[420];
    snprintf(reason, sizeof reason, "%s%s%s%s%s", rows->text, rows->text[0] && cols->text[0] ? ", " : "", cols->text,
             fp8 ? "" : ", ", fp8 ? "" : config->group_text);
    parts_t parts = {reader, pattern, expert, reason};
    int64_t n = rows->value < 0 ? rows_of(reader, pattern, expert, format, data) : rows->value;
    int64_t group = fp8 ? (config->block ? config->block : 128) : config->group < 0 ? cols->value : config->group;
    if (n < 1 || n > INT32_MAX)
        return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: tensor %s is of a projection with %lld rows: expected 1..%d",
                           data->path, data->name, (long long)n, INT32_MAX);
    epmoei_quant_source_t result = {.quant = {.format = format,
                                              .group = (int32_t)group,
                                              .zero_convention = config->zero_convention,
                                              .rows = n,
                                              .cols = cols->value,
                                              .stored_rows = n,
                                              .row_step = 1,
                                              .data = data->data}};
    EPMOEI_CHECK(fp8 ? take_fp8(&parts, data, &result.quant) : take_w4(&parts, data, &result));
    *source = result;
    *view = (epmoei_view_t){.data = data->data, .rows = n, .cols = cols->value};
    return EPMOE_OK;
}

/* [E,rows,cols/32,16] of codes and [E,rows,cols/32] of scales. */
static epmoe_status_t stacked_mxfp4(epmoei_reader_t *reader, const char *pattern, const epmoei_tensor_t *blocks,
                                    const char *reason, epmoei_quant_t *quant, int32_t expert)
{
    const epmoei_config_size_t *experts = &reader->checkpoint->config.num_experts;
    const epmoei_tensor_t *scales = epmoei_reader_find(reader, pattern, 0, "_scales");
    int64_t n = quant->rows, groups = quant->cols / EPMOEI_MXFP4_GROUP;
    if (!scales) return epmoei_reader_missing(reader, pattern, 0, "_scales");
    if (quant->cols % EPMOEI_MXFP4_GROUP)
        return epmoei_fail(EPMOE_ERROR_FORMAT,
                           "%s: tensor %s is of a projection with %lld columns: expected a multiple "
                           "of %d",
                           blocks->path, blocks->name, (long long)quant->cols, EPMOEI_MXFP4_GROUP);
    EPMOEI_CHECK(check_dtype(blocks, blocks->dtype == EPMOE_U8, "U8"));
    EPMOEI_CHECK(check_dtype(scales, scales->dtype == EPMOE_U8 || scales->dtype == EPMOE_F8_E8M0, "U8"));
    const int64_t block_shape[] = {experts->value, n, groups, EPMOEI_MXFP4_GROUP / 2};
    EPMOEI_CHECK(epmoei_reader_check_shape(blocks, 4, block_shape, reason));
    EPMOEI_CHECK(epmoei_reader_check_shape(scales, 3, block_shape, reason));
    quant->group = EPMOEI_MXFP4_GROUP;
    quant->scales_dtype = EPMOE_F8_E8M0;
    quant->data = (const char *)blocks->data + expert * (n * quant->cols / 2);
    quant->scales = (const char *)scales->data + expert * (n * groups);
    return EPMOE_OK;
}

/* [E,rows,cols] of codes and a scale per block of each expert's matrix. */
static epmoe_status_t stacked_fp8(epmoei_reader_t *reader, const char *pattern, const epmoei_tensor_t *codes,
                                  const char *reason, epmoei_quant_t *quant, int32_t expert)
{
    const epmoei_model_config_t *config = &reader->checkpoint->config;
    const epmoei_tensor_t *scales = epmoei_reader_find(reader, pattern, 0, "_scale_inv");
    if (!scales) scales = epmoei_reader_find(reader, pattern, 0, "_scale");
    if (!scales) return epmoei_reader_missing(reader, pattern, 0, "_scale_inv");
    const bool block = config->quant.block || !config->quant.float8;
    quant->group = !block ? INT32_MAX : config->quant.block ? config->quant.block : 128;
    quant->row_group = config->quant.per_row ? 1 : quant->group;
    epmoei_quant_sizes_t sizes =
        epmoei_quant_sizes_rows(quant->format, quant->rows, quant->cols, quant->group, quant->row_group, 0);
    /* Blocks of a transposed matrix lie along the other dimension too. */
    quant->transposed = config->family->stacked_transposed;
    const int64_t high = epmoei_ceil_div(quant->rows, quant->row_group), wide = sizes.groups;
    const int64_t shape[] = {config->num_experts.value, quant->transposed ? quant->cols : quant->rows,
                             quant->transposed ? quant->rows : quant->cols};
    const int64_t scale_shape[] = {shape[0], quant->transposed ? wide : high, quant->transposed ? high : wide};
    EPMOEI_CHECK(epmoei_reader_check_shape(codes, 3, shape, reason));
    EPMOEI_CHECK(epmoei_reader_check_shape(scales, 3, scale_shape, reason));
    EPMOEI_CHECK(check_dtype(scales, epmoei_is_scales_dtype(scales->dtype), "F32, BF16, F16 or F8_E8M0"));
    quant->scales_dtype = scales->dtype;
    quant->data = (const char *)codes->data + expert * sizes.data_bytes;
    quant->scales = (const char *)scales->data + expert * sizes.scales * epmoe_dtype_size(scales->dtype);
    return EPMOE_OK;
}

epmoe_status_t epmoei_reader_quant_stacked(epmoei_reader_t *reader, const char *pattern, int64_t rows, int64_t cols,
                                           const char *reason, int32_t expert, bool *found, epmoei_quant_t *quant)
{
    const epmoei_model_config_t *config = &reader->checkpoint->config;
    const epmoei_tensor_t *plain = epmoei_reader_find(reader, pattern, 0, "");
    const epmoei_tensor_t *blocks = plain ? NULL : epmoei_reader_find(reader, pattern, 0, "_blocks");
    bool fp8 = plain && plain->dtype == EPMOE_F8_E4M3;
    epmoei_quant_t result = {.rows = rows, .cols = cols, .stored_rows = rows, .row_step = 1};
    *quant = (epmoei_quant_t){0};
    *found = blocks || fp8;
    if (!*found) return EPMOE_OK;
    result.format = fp8 ? EPMOE_FORMAT_FP8_BLOCK : EPMOE_FORMAT_MXFP4;
    const epmoei_tensor_t *data = fp8 ? plain : blocks;
    EPMOEI_CHECK(check_method(reader, data, result.format));
    epmoei_reader_note(reader, pattern, 0, true);
    if (config->quant.refusal[0]) {
        epmoei_reader_refuse(reader, data, config->quant.refusal);
        return EPMOE_OK;
    }
    EPMOEI_CHECK(fp8 ? stacked_fp8(reader, pattern, data, reason, &result, expert)
                     : stacked_mxfp4(reader, pattern, data, reason, &result, expert));
    *quant = result;
    return EPMOE_OK;
}
