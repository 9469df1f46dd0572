#include "moe/decoder.h"

#include "base/dtype.h"
#include "comm/comm.h"
#include "moe/weight_writer.h"

#include <string.h>

void epmoei_decoder_drop_weights(epmoe_decoder_t *decoder)
{
    epmoei_memory_free(decoder->shape.backend, decoder->weights_memory);
    decoder->weights_memory = NULL;
    memset(&decoder->weights, 0, sizeof decoder->weights);
    decoder->has_weights = false;
}

/* A layer made for another model would run and be wrong. */
static epmoe_status_t check_config(const epmoe_decoder_config_t *have, const epmoe_decoder_config_t *file)
{
    epmoei_agreed_t of_decoder[EPMOEI_DECODER_FIELDS], of_file[EPMOEI_DECODER_FIELDS];
    epmoei_decoder_fields(have, of_decoder);
    epmoei_decoder_fields(file, of_file);
    for (int32_t i = 0; i < EPMOEI_DECODER_FIELDS; i++)
        if (of_decoder[i].value != of_file[i].value)
            return epmoei_fail(EPMOE_ERROR_MISMATCH, "the decoder's %s is %g and the checkpoint's is %g",
                               of_decoder[i].name, of_decoder[i].value, of_file[i].value);
    return EPMOE_OK;
}

/* One format for all matrices: what they have in common, F32 for a mixture. */
static epmoe_format_t common_format(const epmoei_attention_source_t *source)
{
    const epmoei_view_t *const views[] = {&source->q,    &source->k,       &source->v,     &source->q_down,
                                          &source->q_up, &source->kv_down, &source->kv_up, &source->out};
    epmoe_format_t format = EPMOE_FORMAT_NONE;
    for (size_t i = 0; i < sizeof views / sizeof views[0]; i++) {
        if (!views[i]->data) continue;
        epmoe_format_t one = epmoei_format_of_dtype(views[i]->dtype);
        format = format == EPMOE_FORMAT_NONE || format == one ? one : EPMOE_FORMAT_F32;
    }
    return format;
}

/* -------------------------------------------------------------------------------------------------------- copying */

static epmoe_status_t put_row(epmoei_weight_writer_t *writer, const epmoei_view_t *row, float *dst)
{
    return row->data ? epmoei_writer_put(writer, row, dst, EPMOE_F32, 0, 1) : EPMOE_OK;
}

static epmoe_status_t put_matrix(epmoei_weight_writer_t *writer, const epmoei_view_t *view,
                                 const epmoei_linear_t *linear, int64_t first_row)
{
    void *dst = (void *)(uintptr_t)linear->weight;
    return view->data ? epmoei_writer_put(writer, view, dst, epmoei_dtype_of_format(linear->format), first_row, 1)
                      : EPMOE_OK;
}

static float *bias_of(const epmoei_linear_t *linear) { return (float *)(uintptr_t)linear->bias; }

/* Rows [first, first + rows) of a matrix. */
static epmoei_view_t rows_of(const epmoei_view_t *view, int64_t first, int64_t rows)
{
    epmoei_view_t part = *view;
    part.data = (const char *)view->data + first * view->row_stride * epmoe_dtype_size(view->dtype);
    part.rows = rows;
    return part;
}

static epmoei_view_t transposed(epmoei_view_t view)
{
    return (epmoei_view_t){view.data, view.dtype, view.cols, view.rows, view.col_stride, view.row_stride};
}

static epmoe_status_t put_ones(epmoei_weight_writer_t *writer, int32_t count, float *dst)
{
    static const float one = 1;
    const epmoei_view_t ones = {&one, EPMOE_F32, 1, count, 0, 0};
    EPMOEI_CHECK(put_row(writer, &ones, dst));
    return epmoei_writer_wait(writer);
}

static epmoe_status_t put_gqa(epmoei_weight_writer_t *writer, const epmoe_decoder_config_t *config,
                              const epmoei_attention_weights_t *weights, const epmoei_attention_source_t *source)
{
    const epmoei_view_t *const parts[] = {&source->q, &source->k, &source->v}, *const biases[] = {&source->q_bias,
                                                                                                  &source->k_bias,
                                                                                                  &source->v_bias};
    int64_t row = 0;
    for (int i = 0; i < 3; i++) {
        EPMOEI_CHECK(put_matrix(writer, parts[i], &weights->qkv, row));
        if (weights->qkv.bias) EPMOEI_CHECK(put_row(writer, biases[i], bias_of(&weights->qkv) + row));
        row += parts[i]->rows;
    }
    if (config->qk_norm == EPMOE_QK_NORM_HEAD_UNWEIGHTED) {
        EPMOEI_CHECK(put_ones(writer, config->head_dim, weights->q_norm));
        return put_ones(writer, config->head_dim, weights->k_norm);
    }
    EPMOEI_CHECK(put_row(writer, &source->q_norm, weights->q_norm));
    return put_row(writer, &source->k_norm, weights->k_norm);
}

/* q's rows stand per head [nope | rope], kv_up's per head [nope | value]; here each part is a matrix of its own. */
static epmoe_status_t put_mla(epmoei_weight_writer_t *writer, const epmoe_decoder_config_t *config,
                              const epmoei_attention_weights_t *weights, const epmoei_attention_source_t *source)
{
    const epmoei_view_t *q = config->q_latent ? &source->q_up : &source->q;
    int64_t nope = config->nope_dim, rope = config->rope_dim, value = config->value_dim;
    EPMOEI_CHECK(put_matrix(writer, &source->q_down, &weights->q_down, 0));
    EPMOEI_CHECK(put_row(writer, &source->q_down_bias, bias_of(&weights->q_down)));
    EPMOEI_CHECK(put_row(writer, &source->q_down_norm, weights->q_down_norm));
    EPMOEI_CHECK(put_matrix(writer, &source->kv_down, &weights->kv_down, 0));
    EPMOEI_CHECK(put_row(writer, &source->kv_down_bias, bias_of(&weights->kv_down)));
    EPMOEI_CHECK(put_row(writer, &source->kv_down_norm, weights->kv_down_norm));
    for (int64_t h = 0; h < config->num_heads; h++) {
        epmoei_view_t q_nope = rows_of(q, h * (nope + rope), nope), q_rope = rows_of(q, h * (nope + rope) + nope, rope);
        epmoei_view_t key = transposed(rows_of(&source->kv_up, h * (nope + value), nope));
        epmoei_view_t values = rows_of(&source->kv_up, h * (nope + value) + nope, value);
        EPMOEI_CHECK(put_matrix(writer, &q_nope, &weights->q_nope, h * nope));
        EPMOEI_CHECK(put_matrix(writer, &q_rope, &weights->q_rope, h * rope));
        EPMOEI_CHECK(put_matrix(writer, &key, &weights->key_up, h * config->kv_latent));
        EPMOEI_CHECK(put_matrix(writer, &values, &weights->value_up, h * value));
    }
    return EPMOE_OK;
}

static epmoe_status_t put_all(const epmoe_decoder_t *decoder, epmoei_weight_writer_t *writer,
                              const epmoei_attention_source_t *source)
{
    const epmoei_attention_weights_t *weights = &decoder->weights;
    const epmoe_decoder_config_t *config = &decoder->shape.config;
    EPMOEI_CHECK(put_row(writer, &source->input_norm, weights->input_norm));
    EPMOEI_CHECK(put_row(writer, &source->post_norm, weights->post_norm));
    EPMOEI_CHECK(put_row(writer, &source->sinks, weights->sinks));
    EPMOEI_CHECK(put_matrix(writer, &source->out, &weights->out, 0));
    EPMOEI_CHECK(put_row(writer, &source->out_bias, bias_of(&weights->out)));
    EPMOEI_CHECK(config->attention == EPMOE_ATTENTION_MLA ? put_mla(writer, config, weights, source)
                                                          : put_gqa(writer, config, weights, source));
    return epmoei_writer_wait(writer);
}

epmoe_status_t epmoei_decoder_take_source(epmoe_decoder_t *decoder, const epmoei_attention_source_t *source)
{
    const epmoei_attention_shape_t *shape = &decoder->shape;
    /* A device multiplies matrices of the rows' dtype alone. */
    epmoe_format_t format =
        shape->backend == EPMOE_BACKEND_CUDA ? epmoei_format_of_dtype(shape->dtype) : common_format(source);
    epmoei_decoder_drop_weights(decoder);
    int64_t bytes = epmoei_attention_weights_layout(NULL, shape, format, &decoder->weights);
    EPMOEI_CHECK(epmoei_memory_alloc(shape->backend, &decoder->weights_memory, bytes, "the attention's weights"));
    epmoei_attention_weights_layout(decoder->weights_memory, shape, format, &decoder->weights);
    epmoei_weight_writer_t writer;
    EPMOEI_CHECK(epmoei_writer_open(&writer, shape->backend));
    epmoe_status_t status = put_all(decoder, &writer, source);
    epmoei_writer_close(&writer);
    decoder->has_weights = status == EPMOE_OK;
    return status;
}

static epmoe_status_t load_attention(epmoe_decoder_t *decoder, const epmoe_checkpoint_t *checkpoint,
                                     int32_t layer_index)
{
    const epmoei_attention_shape_t *shape = &decoder->shape;
    epmoe_decoder_config_t raw = EPMOE_DECODER_CONFIG_INIT;
    epmoei_attention_shape_t file;
    epmoei_attention_source_t source;
    EPMOEI_CHECK(epmoe_checkpoint_decoder_config(checkpoint, layer_index, &raw));
    EPMOEI_CHECK(
        epmoei_attention_shape_check(&raw, shape->hidden, shape->max_tokens, shape->dtype, shape->backend, &file));
    EPMOEI_CHECK(check_config(&shape->config, &file.config));
    void *memory;
    epmoe_status_t status = epmoei_checkpoint_attention_source(checkpoint, layer_index, &raw, &source, &memory);
    if (status == EPMOE_OK && source.out.rows != shape->hidden)
        status = epmoei_fail(EPMOE_ERROR_MISMATCH, "the decoder's hidden is %d and the checkpoint's is %lld",
                             shape->hidden, (long long)source.out.rows);
    if (status == EPMOE_OK) status = epmoei_decoder_take_source(decoder, &source);
    epmoei_free(memory);
    return status;
}

/* Summands of a whole decoder layer would each hold its attention and residual. */
static epmoe_status_t check_options(const epmoe_load_options_t *options)
{
    epmoe_load_options_t own = EPMOE_LOAD_OPTIONS_INIT;
    if (options) EPMOEI_CHECK(epmoei_copy_sized(&own, sizeof own, options, "options"));
    if (own.tp_size <= 1) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "options.tp_size is %d: of a decoder layer expected 0 or 1",
                       own.tp_size);
}

epmoe_status_t epmoe_decoder_load_checkpoint(epmoe_decoder_t *decoder, const epmoe_checkpoint_t *checkpoint,
                                             int32_t layer_index, const epmoe_load_options_t *options)
{
    if (!decoder) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "decoder is NULL");
    epmoe_status_t status = check_options(options);
    if (status == EPMOE_OK) status = load_attention(decoder, checkpoint, layer_index);
    status = epmoe_comm_agree(decoder->comm, status);
    if (status == EPMOE_OK) status = epmoe_layer_load_checkpoint(decoder->mlp, checkpoint, layer_index, options);
    if (status != EPMOE_OK) epmoei_decoder_drop_weights(decoder);
    return status;
}
