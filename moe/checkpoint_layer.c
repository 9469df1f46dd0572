#include "moe/checkpoint_internal.h"
#include "base/dtype.h"

#include <stdio.h>
#include <string.h>

const char *const epmoei_quantised_suffixes[] = {
    ".weight_scale_inv", ".weight_scale", ".scale", ".input_scale",   ".qweight",
    ".qzeros",           ".scales",       ".g_idx", ".weight_packed", ".weight_zero_point",
    ".weight_shape",     ".weight_g_idx", NULL};
const char *const epmoei_quantised_stacked_suffixes[] = {"_blocks", "_scales", "_scale_inv", "_scale", NULL};

/* One layer being read: the views, or the first weight that this version cannot compute with. */
typedef struct reader_t {
    const epmoe_checkpoint_t *checkpoint;
    const epmoei_tensor_names_t *names;
    int32_t layer;
    const char *module;
    const epmoei_tensor_t *refused;
    const char *refused_format;
} reader_t;

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

static const epmoei_tensor_t *find(const reader_t *reader, const char *pattern, int32_t expert, const char *suffix)
{
    char name[EPMOEI_NAME_BYTES];
    return epmoei_tensor_index_find(
        &reader->checkpoint->index,
        epmoei_checkpoint_name(name, reader->checkpoint, reader->layer, reader->module, pattern, expert, suffix));
}

static bool has_prefix(const reader_t *reader, const char *pattern)
{
    char name[EPMOEI_NAME_BYTES];
    return epmoei_tensor_index_has_prefix(
        &reader->checkpoint->index,
        epmoei_checkpoint_name(name, reader->checkpoint, reader->layer, reader->module, pattern, 0, ""));
}

static epmoe_status_t missing(const reader_t *reader, const char *pattern, int32_t expert, const char *suffix)
{
    char name[EPMOEI_NAME_BYTES];
    epmoei_checkpoint_name(name, reader->checkpoint, reader->layer, reader->module, pattern, expert, suffix);
    return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: tensor %s is missing", reader->checkpoint->dir, name);
}

static void refuse(reader_t *reader, const epmoei_tensor_t *tensor, const char *format)
{
    if (reader->refused) return;
    reader->refused = tensor;
    reader->refused_format = format;
}

/* expected[i] < 0 = any; `reason` says what the others come from. */
static epmoe_status_t check_shape(const epmoei_tensor_t *tensor, int32_t num_dims, const int64_t *expected,
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

/* A plain tensor of one dimension as a row; NOT plain is refused. */
static epmoe_status_t read_row(reader_t *reader, const char *pattern, const epmoei_config_size_t *cols,
                               epmoei_view_t *view)
{
    const epmoei_tensor_t *tensor = find(reader, pattern, 0, "");
    if (!tensor) return missing(reader, pattern, 0, "");
    EPMOEI_CHECK(check_shape(tensor, 1, &cols->value, cols->text));
    if (!epmoei_dtype_is_float(tensor->dtype)) {
        refuse(reader, tensor, tensor->dtype_name);
        return EPMOE_OK;
    }
    *view = view_of(tensor, 0, 1, cols->value, cols->value, 1);
    return EPMOE_OK;
}

/* The quantised format whose tensors a projection has instead of a plain weight; NULL when it has none. */
static const char *quantised_format(const reader_t *reader, const char *pattern, int32_t expert,
                                    const epmoei_tensor_t **tensor)
{
    if ((*tensor = find(reader, pattern, expert, ".qweight")))
        return epmoe_format_string(strcmp(reader->checkpoint->config.quant_method, "awq") ? EPMOE_FORMAT_GPTQ
                                                                                          : EPMOE_FORMAT_AWQ);
    if ((*tensor = find(reader, pattern, expert, ".weight_packed"))) return epmoe_format_string(EPMOE_FORMAT_CT_W4);
    return NULL;
}

/* One projection [rows,cols]; rows->value or cols->value < 0 = any. A quantised one is noted as refused and leaves the
 * view absent. */
static epmoe_status_t read_projection(reader_t *reader, const char *pattern, int32_t expert,
                                      const epmoei_config_size_t *rows, const epmoei_config_size_t *cols,
                                      epmoei_view_t *view)
{
    const epmoei_tensor_t *tensor = find(reader, pattern, expert, ".weight"), *quantised;
    const char *format = quantised_format(reader, pattern, expert, &quantised);
    if (tensor && format)
        return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: tensor %s: the same weight is also stored as %s", tensor->path,
                           tensor->name, quantised->name);
    if (format) {
        refuse(reader, quantised, format);
        return EPMOE_OK;
    }
    if (!tensor) return missing(reader, pattern, expert, ".weight");
    int64_t shape[2] = {rows->value, cols->value};
    char reason[280];
    snprintf(reason, sizeof reason, "%s%s%s", rows->text, rows->text[0] && cols->text[0] ? " and " : "", cols->text);
    EPMOEI_CHECK(check_shape(tensor, 2, shape, reason));
    if (tensor->dtype == EPMOE_F8_E4M3) {
        /* A code without its scale is not a weight. */
        if (!find(reader, pattern, expert, ".weight_scale_inv") && !find(reader, pattern, expert, ".weight_scale") &&
            !find(reader, pattern, expert, ".scale"))
            return missing(reader, pattern, expert, ".weight_scale_inv");
        refuse(reader, tensor, epmoe_format_string(EPMOE_FORMAT_FP8_BLOCK));
        return EPMOE_OK;
    }
    if (!epmoei_dtype_is_float(tensor->dtype)) {
        refuse(reader, tensor, tensor->dtype_name);
        return EPMOE_OK;
    }
    *view = view_of(tensor, 0, tensor->shape[0], tensor->shape[1], tensor->shape[1], 1);
    return EPMOE_OK;
}

/* The three projections of an MLP whose width only its gate knows; `known` is what config.json says of it. */
static epmoe_status_t read_mlp(reader_t *reader, const char *gate, const char *up, const char *down,
                               const epmoei_config_size_t *known, epmoei_expert_source_t *source)
{
    const epmoei_config_size_t *hidden = &reader->checkpoint->config.hidden;
    EPMOEI_CHECK(read_projection(reader, gate, 0, known, hidden, &source->gate));
    epmoei_config_size_t width = *known;
    if (width.value < 0 && source->gate.data) {
        width.value = source->gate.rows;
        snprintf(width.text, sizeof width.text, "the gate has %lld rows", (long long)width.value);
        if (width.value < 1 || width.value > INT32_MAX)
            return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: tensor %s has %lld rows: expected 1..%d",
                               find(reader, gate, 0, ".weight")->path, find(reader, gate, 0, ".weight")->name,
                               (long long)width.value, INT32_MAX);
    }
    EPMOEI_CHECK(read_projection(reader, up, 0, &width, hidden, &source->up));
    return read_projection(reader, down, 0, hidden, &width, &source->down);
}

/* A tensor that holds one projection of all experts, or NULL when it is quantised (then it is refused). */
static epmoe_status_t find_stacked(reader_t *reader, const char *pattern, int64_t rows, int64_t cols,
                                   const char *reason, const epmoei_tensor_t **tensor)
{
    const epmoei_family_t *family = reader->checkpoint->config.family;
    const epmoei_config_size_t *experts = &reader->checkpoint->config.num_experts;
    const epmoei_tensor_t *plain = find(reader, pattern, 0, ""), *blocks = find(reader, pattern, 0, "_blocks");
    *tensor = NULL;
    if (plain && blocks)
        return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: tensor %s: the same weight is also stored as %s", plain->path,
                           plain->name, blocks->name);
    if (blocks) {
        if (!find(reader, pattern, 0, "_scales")) return missing(reader, pattern, 0, "_scales");
        refuse(reader, blocks, epmoe_format_string(EPMOE_FORMAT_MXFP4));
        return EPMOE_OK;
    }
    if (!plain) return missing(reader, pattern, 0, "");
    bool transposed = family->stacked_transposed;
    int64_t shape[3] = {experts->value, transposed ? cols : rows, transposed ? rows : cols};
    EPMOEI_CHECK(check_shape(plain, 3, shape, reason));
    if (!epmoei_dtype_is_float(plain->dtype)) {
        refuse(reader, plain, plain->dtype_name);
        return EPMOE_OK;
    }
    *tensor = plain;
    return EPMOE_OK;
}

static epmoe_status_t find_stacked_bias(reader_t *reader, const char *pattern, int64_t cols, const char *reason,
                                        const epmoei_tensor_t **tensor)
{
    const epmoei_tensor_t *bias = find(reader, pattern, 0, "_bias");
    *tensor = NULL;
    if (!bias) return missing(reader, pattern, 0, "_bias");
    int64_t shape[2] = {reader->checkpoint->config.num_experts.value, cols};
    EPMOEI_CHECK(check_shape(bias, 2, shape, reason));
    if (epmoei_dtype_is_float(bias->dtype))
        *tensor = bias;
    else
        refuse(reader, bias, bias->dtype_name);
    return EPMOE_OK;
}

/* In a stacked gate/up weight of an expert, row n of gate is row n*step of the 2f, row n of up the same past `skip`. */
static epmoe_status_t read_stacked_expert(reader_t *reader, int32_t expert, epmoei_expert_source_t *source)
{
    const epmoei_model_config_t *config = &reader->checkpoint->config;
    const epmoei_family_t *family = config->family;
    int64_t d = config->hidden.value, f = config->intermediate.value;
    char reason[420];
    snprintf(reason, sizeof reason, "%s, %s and %s", config->num_experts.text, config->intermediate.text,
             config->hidden.text);
    int64_t step = family->stacked_interleaved ? 2 : 1, skip = family->stacked_interleaved ? 1 : f;
    const epmoei_tensor_t *gate_up, *down;
    EPMOEI_CHECK(find_stacked(reader, reader->names->stacked_gate_up, 2 * f, d, reason, &gate_up));
    EPMOEI_CHECK(find_stacked(reader, reader->names->stacked_down, d, f, reason, &down));
    if (gate_up) {
        int64_t row = family->stacked_transposed ? 1 : d, col = family->stacked_transposed ? 2 * f : 1;
        int64_t first = expert * (2 * f * d);
        source->gate = view_of(gate_up, first, f, d, step * row, col);
        source->up = view_of(gate_up, first + skip * row, f, d, step * row, col);
    }
    if (down) {
        int64_t row = family->stacked_transposed ? 1 : f, col = family->stacked_transposed ? d : 1;
        source->down = view_of(down, expert * (d * f), d, f, row, col);
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

static epmoe_status_t read_expert(reader_t *reader, bool stacked, int32_t expert, epmoei_expert_source_t *source)
{
    const epmoei_model_config_t *config = &reader->checkpoint->config;
    const epmoei_tensor_names_t *names = reader->names;
    *source = (epmoei_expert_source_t){0};
    if (stacked) return read_stacked_expert(reader, expert, source);
    EPMOEI_CHECK(
        read_projection(reader, names->expert_gate, expert, &config->intermediate, &config->hidden, &source->gate));
    EPMOEI_CHECK(
        read_projection(reader, names->expert_up, expert, &config->intermediate, &config->hidden, &source->up));
    return read_projection(reader, names->expert_down, expert, &config->hidden, &config->intermediate, &source->down);
}

static epmoe_status_t read_layer(reader_t *reader, bool dense, epmoei_layer_source_t *source)
{
    static const epmoei_config_size_t one = {.value = 1};
    const epmoei_model_config_t *config = &reader->checkpoint->config;
    const epmoei_tensor_names_t *names = reader->names;
    *source = (epmoei_layer_source_t){0};
    if (dense)
        return read_mlp(reader, names->dense_gate, names->dense_up, names->dense_down, &config->dense_intermediate,
                        &source->shared);
    EPMOEI_CHECK(read_projection(reader, names->router, 0, &config->num_experts, &config->hidden, &source->router));
    if (config->layer.router_has_bias)
        EPMOEI_CHECK(read_row(reader, names->router_bias, &config->num_experts, &source->router_bias));
    if (config->layer.has_selection_bias)
        EPMOEI_CHECK(read_row(reader, names->selection_bias, &config->num_experts, &source->selection_bias));
    if (!names->shared || !(config->shared_intermediate.value > 0 || has_prefix(reader, names->shared)))
        return EPMOE_OK;
    EPMOEI_CHECK(read_mlp(reader, names->shared_gate_proj, names->shared_up_proj, names->shared_down_proj,
                          &config->shared_intermediate, &source->shared));
    if (names->shared_gate)
        EPMOEI_CHECK(read_projection(reader, names->shared_gate, 0, &one, &config->hidden, &source->shared_gate));
    return EPMOE_OK;
}

/* Whether a projection is there in any format. */
static bool has_projection(const reader_t *reader, const char *pattern)
{
    const epmoei_tensor_t *quantised;
    return find(reader, pattern, 0, ".weight") || quantised_format(reader, pattern, 0, &quantised);
}

static bool has_stacked(const reader_t *reader)
{
    const char *name = reader->names->stacked_gate_up;
    return name && (find(reader, name, 0, "") || find(reader, name, 0, "_blocks"));
}

static epmoe_status_t find_place(reader_t *reader, epmoei_layer_place_t *place)
{
    const epmoei_tensor_names_t *names = reader->names;
    for (int32_t i = 0; i < EPMOEI_FAMILY_LIST && names->modules[i]; i++) {
        reader->module = names->modules[i];
        if (!has_projection(reader, names->router) && !has_prefix(reader, names->experts)) continue;
        place->module = reader->module;
        place->stacked = !names->expert_gate || has_stacked(reader);
        return EPMOE_OK;
    }
    if (names->dense_module) {
        reader->module = names->dense_module;
        if (has_projection(reader, names->dense_gate)) {
            place->module = reader->module;
            place->dense = true;
            return EPMOE_OK;
        }
    }
    reader->module = names->modules[0];
    char router[EPMOEI_NAME_BYTES], dense[EPMOEI_NAME_BYTES] = "";
    epmoei_checkpoint_name(router, reader->checkpoint, reader->layer, names->modules[0], names->router, 0, ".weight");
    if (names->dense_module)
        epmoei_checkpoint_name(dense, reader->checkpoint, reader->layer, names->dense_module, names->dense_gate, 0,
                               ".weight");
    return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: layer %d has no MLP: tensor %s%s%s is missing", reader->checkpoint->dir,
                       reader->layer, router, dense[0] ? " or " : "", dense);
}

static reader_t reader_of(const epmoe_checkpoint_t *checkpoint, int32_t layer)
{
    return (reader_t){.checkpoint = checkpoint,
                      .names = checkpoint->config.family->names,
                      .layer = layer,
                      .module = checkpoint->layers[layer].module};
}

epmoe_status_t epmoei_checkpoint_check_layer(epmoe_checkpoint_t *checkpoint, int32_t layer)
{
    epmoei_layer_place_t *place = &checkpoint->layers[layer];
    epmoei_layer_source_t source;
    epmoei_expert_source_t expert;
    reader_t reader = reader_of(checkpoint, layer);
    EPMOEI_CHECK(find_place(&reader, place));
    EPMOEI_CHECK(read_layer(&reader, place->dense, &source));
    int32_t num_experts = place->dense ? 0 : checkpoint->config.layer.num_experts;
    for (int32_t e = 0; e < num_experts; e++) EPMOEI_CHECK(read_expert(&reader, place->stacked, e, &expert));
    place->shared_intermediate = (int32_t)source.shared.gate.rows;
    place->refused = reader.refused;
    place->refused_format = reader.refused_format;
    return EPMOE_OK;
}

/* Arguments of a public call that names a layer; NOT_SUPPORTED when the layer is in a format that cannot run. */
static epmoe_status_t check_call(const epmoe_checkpoint_t *checkpoint, int32_t layer)
{
    if (!checkpoint) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "checkpoint is NULL");
    if (layer < 0 || layer >= checkpoint->config.num_layers)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "layer is %d: expected 0..%d", layer,
                           checkpoint->config.num_layers - 1);
    const epmoei_layer_place_t *place = &checkpoint->layers[layer];
    if (place->refused)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED,
                           "%s: tensor %s is stored in format %s: this version computes with bf16, fp16 and fp32",
                           place->refused->path, place->refused->name, place->refused_format);
    return EPMOE_OK;
}

epmoe_status_t epmoe_checkpoint_layer_config(const epmoe_checkpoint_t *checkpoint, int32_t layer,
                                             epmoe_layer_config_t *config)
{
    EPMOEI_CHECK(check_call(checkpoint, layer));
    const epmoei_layer_place_t *place = &checkpoint->layers[layer];
    const epmoe_layer_config_t *moe = &checkpoint->config.layer;
    epmoe_layer_config_t result = *moe;
    if (place->dense)
        result = (epmoe_layer_config_t){.struct_size = sizeof result,
                                        .hidden = moe->hidden,
                                        .activation = moe->activation,
                                        .alpha = moe->alpha,
                                        .limit = moe->limit};
    result.shared_intermediate = place->shared_intermediate;
    result.shared_gated =
        !place->dense && place->shared_intermediate > 0 && checkpoint->config.family->names->shared_gate != NULL;
    return epmoei_return_sized(config, &result, sizeof result, "config");
}

epmoe_status_t epmoei_checkpoint_layer_source(const epmoe_checkpoint_t *checkpoint, int32_t layer,
                                              epmoei_layer_source_t *source)
{
    EPMOEI_CHECK(check_call(checkpoint, layer));
    reader_t reader = reader_of(checkpoint, layer);
    epmoei_layer_source_t result;
    EPMOEI_CHECK(read_layer(&reader, checkpoint->layers[layer].dense, &result));
    *source = result;
    return EPMOE_OK;
}

epmoe_status_t epmoei_checkpoint_expert_source(const epmoe_checkpoint_t *checkpoint, int32_t layer, int32_t expert,
                                               epmoei_expert_source_t *source)
{
    EPMOEI_CHECK(check_call(checkpoint, layer));
    const epmoei_layer_place_t *place = &checkpoint->layers[layer];
    int32_t num_experts = place->dense ? 0 : checkpoint->config.layer.num_experts;
    if (expert < 0 || expert >= num_experts)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "expert is %d: expected one of the %d of layer %d", expert,
                           num_experts, layer);
    reader_t reader = reader_of(checkpoint, layer);
    epmoei_expert_source_t result;
    EPMOEI_CHECK(read_expert(&reader, place->stacked, expert, &result));
    *source = result;
    return EPMOE_OK;
}
