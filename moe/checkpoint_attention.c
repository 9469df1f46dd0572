/* A layer's norms and attention, and the head, as views. They are checked when they are asked for: a checkpoint whose
 * attention cannot run still has MoE blocks that do. */
#include "moe/checkpoint_internal.h"
#include "base/dtype.h"

#include <stdio.h>
#include <string.h>

static epmoe_status_t check_layer(const epmoe_checkpoint_t *checkpoint, int32_t layer)
{
    if (!checkpoint) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "checkpoint is NULL");
    if (layer >= 0 && layer < checkpoint->config.num_layers) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "layer is %d: expected 0..%d", layer,
                       checkpoint->config.num_layers - 1);
}

epmoe_status_t epmoe_checkpoint_decoder_config(const epmoe_checkpoint_t *checkpoint, int32_t layer,
                                               epmoe_decoder_config_t *config)
{
    epmoe_decoder_config_t result;
    EPMOEI_CHECK(check_layer(checkpoint, layer));
    EPMOEI_CHECK(epmoei_attention_config_of(&checkpoint->config.attention, layer, &result));
    return epmoei_return_sized(config, &result, sizeof result, "config");
}

static epmoe_status_t check_refused(const epmoei_reader_t *reader)
{
    if (!reader->refused) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED,
                       "%s: tensor %s is stored in format %s: this version computes attention and norms in bf16, "
                       "fp16 and fp32",
                       reader->refused->path, reader->refused->name, reader->refused_format);
}

/* count parts of `width` columns each. */
static epmoei_config_size_t size_of(const char *count_name, int64_t count, const char *width_name, int64_t width)
{
    epmoei_config_size_t size = {.value = count * width};
    snprintf(size.text, sizeof size.text, "%s is %lld, %s %lld", count_name, (long long)count, width_name,
             (long long)width);
    return size;
}

typedef struct projection_t {
    const char *name;
    const epmoei_config_size_t *rows;
    const epmoei_config_size_t *cols;
    epmoei_view_t *view;
    epmoei_view_t *bias; /* NULL = none */
} projection_t;

/* The quantised ones among a layer's projections. */
typedef struct quantised_t {
    int32_t count;
    struct {
        const char *name;
        epmoei_view_t *view;
        epmoei_quant_source_t source;
    } list[8];
} quantised_t;

static epmoe_status_t read_projections(epmoei_reader_t *reader, const projection_t *list, int count,
                                       quantised_t *quantised)
{
    for (int i = 0; i < count; i++) {
        char bias[64];
        epmoei_quant_source_t quant;
        EPMOEI_CHECK(
            epmoei_reader_projection(reader, list[i].name, 0, list[i].rows, list[i].cols, list[i].view, &quant));
        if (quant.quant.format != EPMOE_FORMAT_NONE) {
            quantised->list[quantised->count].name = list[i].name;
            quantised->list[quantised->count].view = list[i].view;
            quantised->list[quantised->count++].source = quant;
        }
        if (!list[i].bias) continue;
        snprintf(bias, sizeof bias, "%s.bias", list[i].name);
        EPMOEI_CHECK(epmoei_reader_row(reader, bias, list[i].rows, list[i].bias));
    }
    return EPMOE_OK;
}

static epmoe_status_t read_gqa(epmoei_reader_t *reader, const epmoe_decoder_config_t *config,
                               epmoei_attention_source_t *source, quantised_t *quantised)
{
    const epmoei_config_size_t *hidden = &reader->checkpoint->config.hidden;
    const epmoei_config_size_t q = size_of("num_attention_heads", config->num_heads, "head_dim", config->head_dim),
                               kv = size_of("num_key_value_heads", config->num_kv_heads, "head_dim", config->head_dim),
                               head = size_of("one head", 1, "head_dim", config->head_dim);
    bool in_bias = config->in_bias, out_bias = config->out_bias;
    const projection_t list[] = {
        {"q_proj", &q, hidden, &source->q, in_bias ? &source->q_bias : NULL},
        {"k_proj", &kv, hidden, &source->k, in_bias ? &source->k_bias : NULL},
        {"v_proj", &kv, hidden, &source->v, in_bias ? &source->v_bias : NULL},
        {"o_proj", hidden, &q, &source->out, out_bias ? &source->out_bias : NULL},
    };
    EPMOEI_CHECK(read_projections(reader, list, 4, quantised));
    if (config->qk_norm == EPMOE_QK_NORM_NONE || config->qk_norm == EPMOE_QK_NORM_HEAD_UNWEIGHTED) return EPMOE_OK;
    bool joint = config->qk_norm == EPMOE_QK_NORM_ALL_HEADS;
    EPMOEI_CHECK(epmoei_reader_row(reader, "q_norm.weight", joint ? &q : &head, &source->q_norm));
    return epmoei_reader_row(reader, "k_norm.weight", joint ? &kv : &head, &source->k_norm);
}

static epmoe_status_t read_mla(epmoei_reader_t *reader, const epmoe_decoder_config_t *config,
                               epmoei_attention_source_t *source, quantised_t *quantised)
{
    const epmoei_config_size_t *hidden = &reader->checkpoint->config.hidden;
    int32_t heads = config->num_heads;
    const epmoei_config_size_t q_latent = size_of("one latent", 1, "q_lora_rank", config->q_latent),
                               kv_latent = size_of("one latent", 1, "kv_lora_rank", config->kv_latent),
                               kv_down = size_of("one row", 1, "kv_lora_rank and qk_rope_head_dim are",
                                                 (int64_t)config->kv_latent + config->rope_dim),
                               q = size_of("num_attention_heads", heads, "qk_nope_head_dim and qk_rope_head_dim are",
                                           (int64_t)config->nope_dim + config->rope_dim),
                               kv_up = size_of("num_attention_heads", heads, "qk_nope_head_dim and v_head_dim are",
                                               (int64_t)config->nope_dim + config->value_dim),
                               out = size_of("num_attention_heads", heads, "v_head_dim", config->value_dim);
    bool in_bias = config->in_bias, latent = config->q_latent > 0;
    const projection_t list[] = {
        {"kv_a_proj_with_mqa", &kv_down, hidden, &source->kv_down, in_bias ? &source->kv_down_bias : NULL},
        {"kv_b_proj", &kv_up, &kv_latent, &source->kv_up, NULL},
        {"o_proj", hidden, &out, &source->out, config->out_bias ? &source->out_bias : NULL},
        {latent ? "q_b_proj" : "q_proj", &q, latent ? &q_latent : hidden, latent ? &source->q_up : &source->q, NULL},
        {"q_a_proj", &q_latent, hidden, &source->q_down, in_bias ? &source->q_down_bias : NULL},
    };
    EPMOEI_CHECK(read_projections(reader, list, latent ? 5 : 4, quantised));
    EPMOEI_CHECK(epmoei_reader_row(reader, "kv_a_layernorm.weight", &kv_latent, &source->kv_down_norm));
    return latent ? epmoei_reader_row(reader, "q_a_layernorm.weight", &q_latent, &source->q_down_norm) : EPMOE_OK;
}

/* A column's group must be one of the groups there are. */
static epmoe_status_t check_indices(const epmoei_quant_source_t *source, const char *name)
{
    const epmoei_tensor_t *tensor = source->indices;
    epmoe_status_t status = epmoei_quant_check_groups(&source->quant, tensor ? tensor->name : name);
    if (status == EPMOE_OK || !tensor) return status;
    return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: tensor %s", tensor->path, epmoe_last_error());
}

static epmoe_status_t dequantise(const quantised_t *quantised, void **memory)
{
    int64_t elements = 0;
    for (int32_t i = 0; i < quantised->count; i++) {
        const epmoei_quant_t *quant = &quantised->list[i].source.quant;
        EPMOEI_CHECK(check_indices(&quantised->list[i].source, quantised->list[i].name));
        elements += quant->rows * quant->cols;
    }
    if (elements == 0) return EPMOE_OK;
    EPMOEI_CHECK(epmoei_alloc_for(memory, elements * 4, "dequantised attention weights"));
    float *to = *memory;
    for (int32_t i = 0; i < quantised->count; i++) {
        const epmoei_quant_t *quant = &quantised->list[i].source.quant;
        int64_t rows = quant->rows, cols = quant->cols;
#pragma omp parallel for schedule(static)
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < cols; c++) to[r * cols + c] = epmoei_quant_at(quant, r, c);
        *quantised->list[i].view = (epmoei_view_t){to, EPMOE_F32, rows, cols, cols, 1};
        to += rows * cols;
    }
    return EPMOE_OK;
}

epmoe_status_t epmoei_checkpoint_attention_source(const epmoe_checkpoint_t *checkpoint, int32_t layer,
                                                  const epmoe_decoder_config_t *config,
                                                  epmoei_attention_source_t *source, void **memory)
{
    *memory = NULL;
    EPMOEI_CHECK(check_layer(checkpoint, layer));
    const epmoei_config_size_t *hidden = &checkpoint->config.hidden;
    const epmoei_config_size_t heads = size_of("one sink", 1, "num_attention_heads", config->num_heads);
    *source = (epmoei_attention_source_t){0};
    epmoei_reader_t reader = {.checkpoint = checkpoint, .names = checkpoint->config.family->names, .layer = layer};
    quantised_t quantised = {0};
    reader.module = "";
    EPMOEI_CHECK(epmoei_reader_row(&reader, "input_layernorm.weight", hidden, &source->input_norm));
    EPMOEI_CHECK(epmoei_reader_row(&reader, "post_attention_layernorm.weight", hidden, &source->post_norm));
    reader.module = "self_attn.";
    if (config->has_sinks) EPMOEI_CHECK(epmoei_reader_row(&reader, "sinks", &heads, &source->sinks));
    EPMOEI_CHECK(config->attention == EPMOE_ATTENTION_MLA ? read_mla(&reader, config, source, &quantised)
                                                          : read_gqa(&reader, config, source, &quantised));
    EPMOEI_CHECK(check_refused(&reader));
    return dequantise(&quantised, memory);
}

epmoe_status_t epmoe_checkpoint_head_config(const epmoe_checkpoint_t *checkpoint, epmoe_head_config_t *config)
{
    if (!checkpoint) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "checkpoint is NULL");
    const epmoei_attention_config_t *known = &checkpoint->config.attention;
    epmoe_head_config_t result = EPMOE_HEAD_CONFIG_INIT;
    if (known->head_status != EPMOE_OK) return epmoei_fail(known->head_status, "%s", known->head_message);
    result.hidden = checkpoint->config.layer.hidden;
    result.vocab_size = (int32_t)known->vocab_size.value;
    result.norm_eps = known->norm_eps;
    return epmoei_return_sized(config, &result, sizeof result, "config");
}

/* A tensor outside the layers as a view of `rows` rows. */
static epmoe_status_t read_outside(const epmoe_checkpoint_t *checkpoint, const char *name, int64_t rows,
                                   epmoei_view_t *view)
{
    int64_t cols = checkpoint->config.hidden.value;
    const epmoei_tensor_t *tensor = epmoei_checkpoint_find(checkpoint, name);
    if (!tensor) return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: tensor %s is missing", checkpoint->dir, name);
    int32_t last = tensor->num_dims - 1, want = rows > 1 ? 2 : 1;
    if (tensor->num_dims != want || tensor->shape[last] != cols || tensor->num_elements != rows * cols) {
        char have[EPMOEI_SHAPE_TEXT];
        return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: tensor %s is %s: expected %lld by %lld by config.json (%s and %s)",
                           tensor->path, name, epmoei_shape_text(have, tensor->num_dims, tensor->shape),
                           (long long)rows, (long long)cols, checkpoint->config.attention.vocab_size.text,
                           checkpoint->config.hidden.text);
    }
    if (!epmoei_dtype_is_float(tensor->dtype))
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "%s: tensor %s is %s: expected F32, BF16 or F16", tensor->path,
                           name, tensor->dtype_name);
    *view = (epmoei_view_t){tensor->data, tensor->dtype, rows, cols, cols, 1};
    return EPMOE_OK;
}

epmoe_status_t epmoei_checkpoint_head_source(const epmoe_checkpoint_t *checkpoint, epmoei_view_t *norm,
                                             epmoei_view_t *weight)
{
    const epmoei_attention_config_t *known = &checkpoint->config.attention;
    if (known->head_status != EPMOE_OK) return epmoei_fail(known->head_status, "%s", known->head_message);
    /* The layers lie at "<model>layers.", the head beside <model>'s last part. */
    const char *layers = checkpoint->config.family->layers;
    int model = (int)(strstr(layers, "layers.") - layers), outer = model - (int)strlen("model.");
    char name[EPMOEI_NAME_BYTES];
    snprintf(name, sizeof name, "%.*snorm.weight", model, layers);
    EPMOEI_CHECK(read_outside(checkpoint, name, 1, norm));
    if (known->tied)
        snprintf(name, sizeof name, "%.*sembed_tokens.weight", model, layers);
    else
        snprintf(name, sizeof name, "%.*slm_head.weight", outer, layers);
    return read_outside(checkpoint, name, known->vocab_size.value, weight);
}
