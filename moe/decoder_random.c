/* Random norms and attention of a decoder layer, laid out as a checkpoint's. */
#include "moe/decoder.h"

#include "base/dtype.h"
#include "kernels/random_weights.h"
#include "moe/layer_weights.h"

#include <math.h>

/* Around what, and how far, the elements of a tensor lie. */
typedef enum kind_t { MATRIX, NORM, BIAS, SINKS } kind_t;

/* Its place in the list is the tensor's number; without rows or columns the layer does not have it. */
typedef struct entry_t {
    epmoei_view_t *view;
    kind_t kind;
    int64_t rows;
    int64_t cols;
} entry_t;

static float scale_of(const entry_t *entry)
{
    if (entry->kind == MATRIX) return (float)(1 / sqrt((double)entry->cols));
    return entry->kind == SINKS ? 1.0f : 0.1f;
}

static void fill(const entry_t *entry, int32_t number, uint64_t seed)
{
    const epmoei_view_t *view = entry->view;
    int64_t row_bytes = entry->cols * epmoe_dtype_size(view->dtype);
#pragma omp parallel for schedule(static) if (entry->rows * entry->cols >= 1 << 16)
    for (int64_t r = 0; r < entry->rows; r++)
        epmoei_random_fill((char *)(uintptr_t)view->data + r * row_bytes, view->dtype, seed, EPMOEI_RANDOM_ATTENTION,
                           number, r * entry->cols, entry->cols, scale_of(entry));
    if (entry->kind != NORM) return;
    float *norm = (float *)(uintptr_t)view->data;
    for (int64_t i = 0; i < entry->cols; i++) norm[i] += 1;
}

epmoe_status_t epmoei_random_attention(const epmoei_attention_shape_t *shape, epmoe_dtype_t dtype, uint64_t seed,
                                       epmoei_attention_source_t *source, void **memory)
{
    const epmoe_decoder_config_t *config = &shape->config;
    bool mla = config->attention == EPMOE_ATTENTION_MLA, latent = config->q_latent > 0;
    int64_t d = shape->hidden, heads = config->num_heads, head = config->head_dim, c = config->kv_latent;
    int64_t q = mla ? heads * (config->nope_dim + config->rope_dim) : heads * head, kv = config->num_kv_heads * head;
    int64_t up = heads * (config->nope_dim + config->value_dim), out = heads * (mla ? config->value_dim : head);
    int64_t biased = config->in_bias;
    bool weighted = config->qk_norm != EPMOE_QK_NORM_HEAD_UNWEIGHTED;
    const epmoei_qk_norm_columns_t norm = epmoei_qk_norm_columns(config);
    const entry_t entries[] = {
        {&source->input_norm, NORM, 1, d},
        {&source->post_norm, NORM, 1, d},
        {&source->q, MATRIX, mla && latent ? 0 : q, d},
        {&source->k, MATRIX, kv, d},
        {&source->v, MATRIX, kv, d},
        {&source->q_bias, BIAS, 1, mla ? 0 : biased * q},
        {&source->k_bias, BIAS, 1, biased * kv},
        {&source->v_bias, BIAS, 1, biased * kv},
        {&source->q_norm, NORM, weighted, norm.q},
        {&source->k_norm, NORM, weighted, norm.k},
        {&source->q_down, MATRIX, config->q_latent, d},
        {&source->q_down_bias, BIAS, 1, biased * config->q_latent},
        {&source->q_down_norm, NORM, 1, config->q_latent},
        {&source->q_up, MATRIX, latent ? q : 0, config->q_latent},
        {&source->kv_down, MATRIX, mla ? c + config->rope_dim : 0, d},
        {&source->kv_down_bias, BIAS, 1, mla ? biased * (c + config->rope_dim) : 0},
        {&source->kv_down_norm, NORM, 1, c},
        {&source->kv_up, MATRIX, mla ? up : 0, c},
        {&source->out, MATRIX, d, out},
        {&source->out_bias, BIAS, 1, config->out_bias * d},
        {&source->sinks, SINKS, 1, config->has_sinks * heads},
    };
    enum { kEntries = sizeof entries / sizeof entries[0] };
    epmoei_arena_t arena = {0};
    *source = (epmoei_attention_source_t){0};
    *memory = NULL;
    for (int pass = 0; pass < 2; pass++) {
        if (pass == 1) EPMOEI_CHECK(epmoei_alloc_for(memory, arena.used, "random attention weights"));
        arena = (epmoei_arena_t){*memory, 0};
        for (int32_t i = 0; i < kEntries; i++) {
            const entry_t *entry = &entries[i];
            epmoe_dtype_t stored = entry->kind == MATRIX ? dtype : EPMOE_F32;
            if (entry->rows == 0 || entry->cols == 0) continue;
            void *data = epmoei_carve(&arena, entry->rows * entry->cols * epmoe_dtype_size(stored));
            *entry->view = (epmoei_view_t){data, stored, entry->rows, entry->cols, entry->cols, 1};
            if (pass == 1) fill(entry, i, seed);
        }
    }
    return EPMOE_OK;
}

epmoe_status_t epmoei_decoder_random_weights(epmoe_decoder_t *decoder, uint64_t seed,
                                             const epmoe_load_options_t *options)
{
    if (!decoder) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "decoder is NULL");
    epmoei_attention_source_t source;
    void *memory = NULL;
    epmoe_status_t status = epmoei_comm_check_device(decoder->comm);
    if (status == EPMOE_OK)
        status = epmoei_random_attention(&decoder->shape, decoder->shape.dtype, seed, &source, &memory);
    if (status == EPMOE_OK) status = epmoei_decoder_take_source(decoder, &source);
    epmoei_free(memory);
    if (status == EPMOE_OK) status = epmoei_layer_random_weights(decoder->mlp, seed, options);
    if (status != EPMOE_OK) epmoei_decoder_drop_weights(decoder);
    return status;
}

epmoe_status_t epmoe_decoder_set_random_weights(epmoe_decoder_t *decoder, uint64_t seed)
{
    return epmoei_decoder_random_weights(decoder, seed, NULL);
}
