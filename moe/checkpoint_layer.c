#include "moe/checkpoint_internal.h"

#include <stdio.h>
#include <string.h>

/* The three projections of an MLP whose width only its gate knows; `known` is what config.json says of it. */
static epmoe_status_t read_mlp(epmoei_reader_t *reader, const char *gate, const char *up, const char *down,
                               const epmoei_config_size_t *known, epmoei_expert_source_t *source)
{
    const epmoei_config_size_t *hidden = &reader->checkpoint->config.hidden;
    EPMOEI_CHECK(epmoei_reader_projection(reader, gate, 0, known, hidden, &source->gate, &source->gate_quant));
    const epmoei_view_t *view = &source->gate;
    if (view->data && (view->rows < 1 || view->rows > INT32_MAX))
        return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: layer %d: %s has %lld rows: expected 1..%d",
                           reader->checkpoint->dir, reader->layer, gate, (long long)view->rows, INT32_MAX);
    epmoei_config_size_t width = *known;
    if (width.value < 0 && view->data) {
        width.value = view->rows;
        snprintf(width.text, sizeof width.text, "%s has %lld rows", gate, (long long)view->rows);
    }
    EPMOEI_CHECK(epmoei_reader_projection(reader, up, 0, &width, hidden, &source->up, &source->up_quant));
    return epmoei_reader_projection(reader, down, 0, hidden, &width, &source->down, &source->down_quant);
}

static epmoe_status_t read_expert(epmoei_reader_t *reader, bool stacked, int32_t expert, epmoei_expert_source_t *source)
{
    const epmoei_model_config_t *config = &reader->checkpoint->config;
    const epmoei_tensor_names_t *names = reader->names;
    *source = (epmoei_expert_source_t){0};
    if (stacked) return epmoei_reader_stacked_expert(reader, expert, source);
    EPMOEI_CHECK(epmoei_reader_projection(reader, names->expert_gate, expert, &config->intermediate, &config->hidden,
                                          &source->gate, &source->gate_quant));
    EPMOEI_CHECK(epmoei_reader_projection(reader, names->expert_up, expert, &config->intermediate, &config->hidden,
                                          &source->up, &source->up_quant));
    return epmoei_reader_projection(reader, names->expert_down, expert, &config->hidden, &config->intermediate,
                                    &source->down, &source->down_quant);
}

static epmoe_status_t read_layer(epmoei_reader_t *reader, bool dense, epmoei_layer_source_t *source)
{
    static const epmoei_config_size_t one = {.value = 1};
    const epmoei_model_config_t *config = &reader->checkpoint->config;
    const epmoei_tensor_names_t *names = reader->names;
    *source = (epmoei_layer_source_t){0};
    if (dense)
        return read_mlp(reader, names->dense_gate, names->dense_up, names->dense_down, &config->dense_intermediate,
                        &source->shared);
    EPMOEI_CHECK(epmoei_reader_projection(reader, names->router, 0, &config->num_experts, &config->hidden,
                                          &source->router, NULL));
    if (config->layer.router_has_bias)
        EPMOEI_CHECK(epmoei_reader_row(reader, names->router_bias, &config->num_experts, &source->router_bias));
    if (config->layer.has_selection_bias)
        EPMOEI_CHECK(epmoei_reader_row(reader, names->selection_bias, &config->num_experts, &source->selection_bias));
    if (!names->shared || !(config->shared_intermediate.value > 0 || epmoei_reader_has_prefix(reader, names->shared)))
        return EPMOE_OK;
    EPMOEI_CHECK(read_mlp(reader, names->shared_gate_proj, names->shared_up_proj, names->shared_down_proj,
                          &config->shared_intermediate, &source->shared));
    if (names->shared_gate)
        EPMOEI_CHECK(
            epmoei_reader_projection(reader, names->shared_gate, 0, &one, &config->hidden, &source->shared_gate, NULL));
    return EPMOE_OK;
}

static epmoe_status_t find_place(epmoei_reader_t *reader, epmoei_layer_place_t *place)
{
    const epmoei_tensor_names_t *names = reader->names;
    for (int32_t i = 0; i < EPMOEI_FAMILY_LIST && names->modules[i]; i++) {
        reader->module = names->modules[i];
        if (!epmoei_reader_has_projection(reader, names->router) &&
            !(names->experts && epmoei_reader_has_prefix(reader, names->experts)))
            continue;
        place->module = reader->module;
        place->stacked = !names->expert_gate || epmoei_reader_has_stacked(reader);
        return EPMOE_OK;
    }
    if (names->dense_module) {
        reader->module = names->dense_module;
        if (epmoei_reader_has_projection(reader, names->dense_gate)) {
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

static epmoei_reader_t reader_of(const epmoe_checkpoint_t *checkpoint, int32_t layer)
{
    return (epmoei_reader_t){.checkpoint = checkpoint,
                             .names = checkpoint->config.family->names,
                             .layer = layer,
                             .module = checkpoint->layers[layer].module};
}

static epmoe_format_t format_of(const epmoei_expert_source_t *source) { return source->gate_quant.quant.format; }

/* The tensors win over the lists of the config. */
static void warn(const epmoe_checkpoint_t *checkpoint, int32_t layer, const epmoei_list_notes_t *notes)
{
    if (notes->quantised[0])
        epmoei_log(EPMOE_LOG_WARNING,
                   "%s: layer %d: config.json says that %s is not quantised, but it is: read as it "
                   "is stored",
                   checkpoint->dir, layer, notes->quantised);
    if (notes->plain[0])
        epmoei_log(EPMOE_LOG_WARNING,
                   "%s: layer %d: %s is not quantised, though config.json does not list it: read as "
                   "it is stored",
                   checkpoint->dir, layer, notes->plain);
}

epmoe_status_t epmoei_checkpoint_check_layer(epmoe_checkpoint_t *checkpoint, int32_t layer)
{
    epmoei_layer_place_t *place = &checkpoint->layers[layer];
    epmoei_layer_source_t source;
    epmoei_expert_source_t expert;
    epmoei_reader_t reader = reader_of(checkpoint, layer);
    epmoei_list_notes_t notes = {0};
    reader.notes = &notes;
    EPMOEI_CHECK(find_place(&reader, place));
    EPMOEI_CHECK(read_layer(&reader, place->dense, &source));
    place->format = format_of(&source.shared);
    int32_t num_experts = place->dense ? 0 : checkpoint->config.layer.num_experts;
    for (int32_t e = 0; e < num_experts; e++) {
        EPMOEI_CHECK(read_expert(&reader, place->stacked, e, &expert));
        if (e == 0) place->format = format_of(&expert);
    }
    warn(checkpoint, layer, &notes);
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
                           "%s: tensor %s is stored in a format that this version cannot compute with: %s",
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
    result.weight_format = place->format;
    const epmoei_quant_config_t *quant = &checkpoint->config.quant;
    if (place->format != EPMOE_FORMAT_NONE)
        result.weight_group = place->format == EPMOE_FORMAT_FP8_BLOCK ? quant->block : quant->group;
    result.shared_intermediate = place->shared_intermediate;
    result.shared_gated =
        !place->dense && place->shared_intermediate > 0 && checkpoint->config.family->names->shared_gate != NULL;
    return epmoei_return_sized(config, &result, sizeof result, "config");
}

epmoe_status_t epmoei_checkpoint_layer_source(const epmoe_checkpoint_t *checkpoint, int32_t layer,
                                              epmoei_layer_source_t *source)
{
    EPMOEI_CHECK(check_call(checkpoint, layer));
    epmoei_reader_t reader = reader_of(checkpoint, layer);
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
    epmoei_reader_t reader = reader_of(checkpoint, layer);
    epmoei_expert_source_t result;
    EPMOEI_CHECK(read_expert(&reader, place->stacked, expert, &result));
    *source = result;
    return EPMOE_OK;
}
