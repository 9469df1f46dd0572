#include "moe/decoder.h"

#include "base/device.h"
#include "comm/comm.h"
#include "dense_layers/self_attention_cuda.h"
#include "kernels/op_check.h"

#include <string.h>

void epmoei_decoder_block_bytes(const epmoe_decoder_config_t *config, int64_t *key_bytes, int64_t *value_bytes)
{
    *key_bytes = epmoei_attention_key_columns(config) * config->block_size * epmoe_dtype_size(config->cache_dtype);
    *value_bytes = config->attention == EPMOE_ATTENTION_MLA ? 0 : *key_bytes;
}

epmoe_status_t epmoe_decoder_block_bytes(const epmoe_decoder_config_t *config, epmoe_dtype_t dtype, int64_t *key_bytes,
                                         int64_t *value_bytes)
{
    epmoei_attention_shape_t shape;
    if (dtype == EPMOE_DTYPE_NONE) dtype = EPMOE_BF16;
    EPMOEI_CHECK(epmoei_attention_shape_check(config, 1, 1, dtype, EPMOE_BACKEND_CPU, &shape));
    if (!key_bytes || !value_bytes)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s is NULL", key_bytes ? "value_bytes" : "key_bytes");
    epmoei_decoder_block_bytes(&shape.config, key_bytes, value_bytes);
    return EPMOE_OK;
}

void epmoei_decoder_fields(const epmoe_decoder_config_t *config, epmoei_agreed_t out[EPMOEI_DECODER_FIELDS])
{
    const epmoe_rope_table_args_t *rope = &config->rope;
    const epmoei_agreed_t fields[EPMOEI_DECODER_FIELDS] = {
        {"attention", config->attention},
        {"num_heads", config->num_heads},
        {"num_kv_heads", config->num_kv_heads},
        {"head_dim", config->head_dim},
        {"q_latent", config->q_latent},
        {"kv_latent", config->kv_latent},
        {"nope_dim", config->nope_dim},
        {"rope_dim", config->rope_dim},
        {"value_dim", config->value_dim},
        {"in_bias", config->in_bias},
        {"out_bias", config->out_bias},
        {"qk_norm", config->qk_norm},
        {"has_sinks", config->has_sinks},
        {"window", config->window},
        {"scale", (double)config->scale},
        {"norm_eps", (double)config->norm_eps},
        {"latent_eps", (double)config->latent_eps},
        {"no_rope", config->no_rope},
        {"rope_style", config->rope_style},
        {"rope.rotary_dim", rope->rotary_dim},
        {"rope.base", rope->base},
        {"rope.scaling", rope->scaling},
        {"rope.factor", rope->factor},
        {"rope.original_positions", rope->original_positions},
        {"rope.low_freq_factor", rope->low_freq_factor},
        {"rope.high_freq_factor", rope->high_freq_factor},
        {"rope.beta_fast", rope->beta_fast},
        {"rope.beta_slow", rope->beta_slow},
        {"rope.attention_factor", rope->attention_factor},
        {"rope.mscale", rope->mscale},
        {"rope.mscale_all_dim", rope->mscale_all_dim},
        {"rope.no_truncate", rope->no_truncate},
    };
    memcpy(out, fields, sizeof fields);
}

/* What must be the same on all ranks; the MLP's config is agreed on by the layer. */
static epmoe_status_t agree(epmoe_comm_t *comm, epmoe_status_t local, const epmoe_decoder_config_t *config)
{
    const epmoei_agreed_t own[] = {
        {"rope.num_positions", config->rope.num_positions},
        {"cache_layout", config->cache_layout},
        {"cache_dtype", config->cache_dtype}, /* in front of key_pack, whose default follows from it */
        {"key_pack", config->key_pack},
        {"block_size", config->block_size},
    };
    enum { kOwn = sizeof own / sizeof own[0] };
    epmoei_agreed_t fields[EPMOEI_DECODER_FIELDS + kOwn];
    epmoei_decoder_fields(config, fields);
    memcpy(fields + EPMOEI_DECODER_FIELDS, own, sizeof own);
    return epmoei_comm_agree_on(comm, "decoder config", local, fields, EPMOEI_DECODER_FIELDS + kOwn);
}

static epmoe_status_t check_config(const epmoe_decoder_config_t *config, const epmoe_layer_config_t *mlp,
                                   epmoe_backend_t backend, epmoei_attention_shape_t *shape)
{
    epmoe_layer_config_t layer;
    EPMOEI_CHECK(epmoei_layer_config_check(mlp, &layer));
    return epmoei_attention_shape_check(config, layer.hidden, layer.max_tokens, layer.dtype, backend, shape);
}

/* On a stream of their own, which no other work waits for; done when they return. */
static epmoe_status_t copy_to_device(void *dst, const void *src, int64_t bytes)
{
    epmoe_stream_t stream;
    EPMOEI_CHECK(epmoei_stream_create(&stream));
    epmoe_status_t status = epmoei_memory_copy(EPMOE_BACKEND_CUDA, dst, src, bytes, stream);
    if (status == EPMOE_OK) status = epmoei_stream_wait(EPMOE_BACKEND_CUDA, stream);
    epmoei_stream_destroy(stream);
    return status;
}

static epmoe_status_t make_zeros(epmoe_backend_t backend, void **memory, int64_t bytes, const char *what)
{
    EPMOEI_CHECK(epmoei_memory_alloc(backend, memory, bytes, what));
    epmoe_stream_t stream = NULL;
    if (backend == EPMOE_BACKEND_CUDA) EPMOEI_CHECK(epmoei_stream_create(&stream));
    epmoe_status_t status = epmoei_memory_set(backend, *memory, 0, bytes, stream);
    if (status == EPMOE_OK) status = epmoei_stream_wait(backend, stream);
    epmoei_stream_destroy(stream);
    return status;
}

static epmoe_status_t make_table(epmoe_decoder_t *decoder)
{
    epmoe_rope_table_args_t rope = decoder->shape.config.rope;
    decoder->cos_sin = rope.cos_sin;
    if (decoder->cos_sin || decoder->shape.config.no_rope) return EPMOE_OK;
    int64_t bytes = (int64_t)rope.num_positions * rope.rotary_dim * 4;
    static const char what[] = "the table of rotary positions";
    epmoe_backend_t backend = decoder->shape.backend;
    EPMOEI_CHECK(epmoei_memory_alloc(backend, (void **)&decoder->own_cos_sin, bytes, what));
    decoder->cos_sin = decoder->own_cos_sin;
    rope.cos_sin = decoder->own_cos_sin;
    if (backend == EPMOE_BACKEND_CPU) return epmoe_rope_table(&rope);
    EPMOEI_CHECK(epmoei_alloc_for((void **)&rope.cos_sin, bytes, what));
    epmoe_status_t status = epmoe_rope_table(&rope);
    if (status == EPMOE_OK) status = copy_to_device(decoder->own_cos_sin, rope.cos_sin, bytes);
    epmoei_free(rope.cos_sin);
    return status;
}

static epmoe_status_t make_cache(epmoe_decoder_t *decoder)
{
    const epmoe_decoder_config_t *config = &decoder->shape.config;
    int64_t key_bytes, value_bytes;
    epmoei_decoder_block_bytes(config, &key_bytes, &value_bytes);
    if (!config->num_blocks) return EPMOE_OK;
    key_bytes *= config->num_blocks;
    value_bytes *= config->num_blocks;
    EPMOEI_CHECK(make_zeros(decoder->shape.backend, &decoder->key_cache, key_bytes, "the key cache"));
    if (!value_bytes) return EPMOE_OK;
    return make_zeros(decoder->shape.backend, &decoder->value_cache, value_bytes, "the value cache");
}

static epmoe_status_t make_memory(epmoe_decoder_t *decoder)
{
    epmoei_attention_workspace_t *workspace = &decoder->workspace;
    EPMOEI_CHECK(epmoei_attention_workspace_layout(NULL, &decoder->shape, workspace));
    EPMOEI_CHECK(epmoei_memory_alloc(decoder->shape.backend, &decoder->workspace_memory, workspace->bytes,
                                     "the decoder's workspace"));
    EPMOEI_CHECK(epmoei_attention_workspace_layout(decoder->workspace_memory, &decoder->shape, workspace));
    EPMOEI_CHECK(make_table(decoder));
    return make_cache(decoder);
}

static void destroy(epmoe_decoder_t *decoder)
{
    epmoe_layer_destroy(decoder->mlp);
    epmoei_decoder_drop_weights(decoder);
    epmoe_backend_t backend = decoder->shape.backend;
    epmoei_memory_free(backend, decoder->workspace_memory);
    epmoei_memory_free(backend, decoder->own_cos_sin);
    epmoei_memory_free(backend, decoder->key_cache);
    epmoei_memory_free(backend, decoder->value_cache);
    epmoe_comm_destroy(decoder->own_comm);
    epmoei_free(decoder);
}

epmoe_status_t epmoe_decoder_create(const epmoe_decoder_config_t *config, const epmoe_layer_config_t *mlp,
                                    epmoe_comm_t *comm, epmoe_decoder_t **out)
{
    if (out) *out = NULL;
    epmoe_comm_t *own_comm = NULL;
    if (!comm) {
        EPMOEI_CHECK(epmoe_comm_create(NULL, NULL, &own_comm));
        comm = own_comm;
    }
    /* From here on every rank goes through the same collectives, whatever fails locally. */
    epmoei_attention_shape_t shape = {0};
    epmoe_decoder_t *decoder = epmoei_calloc((int64_t)sizeof *decoder);
    epmoe_status_t status = decoder ? check_config(config, mlp, comm->backend, &shape)
                                    : epmoei_fail(EPMOE_ERROR_OUT_OF_MEMORY, "no memory for a decoder layer");
    if (status == EPMOE_OK && !out) status = epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "decoder is NULL");
    status = agree(comm, status, &shape.config);
    if (status != EPMOE_OK || !decoder) goto fail;

    decoder->shape = shape;
    decoder->comm = comm;
    EPMOEI_CHECK_GOTO(epmoe_comm_agree(comm, make_memory(decoder)), fail);
    EPMOEI_CHECK_GOTO(epmoe_layer_create(mlp, comm, &decoder->mlp), fail);
    decoder->own_comm = own_comm;
    *out = decoder;
    return EPMOE_OK;

fail:
    if (decoder) destroy(decoder);
    epmoe_comm_destroy(own_comm);
    return status;
}

void epmoe_decoder_destroy(epmoe_decoder_t *decoder)
{
    if (decoder) destroy(decoder);
}

/* ---------------------------------------------------------------------------------------------------------- forward */

static epmoe_status_t take_batch(const epmoe_decoder_t *decoder, const epmoe_decoder_forward_args_t *args,
                                 epmoei_paged_batch_t *batch)
{
    const epmoe_decoder_config_t *config = &decoder->shape.config;
    bool own_cache = config->num_blocks > 0, mla = config->attention == EPMOE_ATTENTION_MLA;
    *batch = (epmoei_paged_batch_t){
        .num_tokens = args->num_tokens,
        .num_seqs = args->num_seqs,
        .query_start = args->query_start,
        .seq_lens = args->seq_lens,
        .block_table = args->block_table,
        .max_blocks = args->max_blocks,
        .num_blocks = own_cache ? config->num_blocks : args->num_blocks,
        .block_size = config->block_size,
        .key_cache = own_cache ? decoder->key_cache : args->key_cache,
        .value_cache = own_cache ? decoder->value_cache : args->value_cache,
        .k_scale = args->k_scale,
        .v_scale = args->v_scale,
        .positions = decoder->workspace.positions,
        .slots = decoder->workspace.slots,
    };
    if (mla) batch->value_cache = NULL;
    if (!decoder->has_weights) return epmoei_fail(EPMOE_ERROR_BAD_STATE, "the layer has no weights: load them");
    if (args->num_tokens < 0 || args->num_tokens > decoder->shape.max_tokens)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "num_tokens is %d: expected 0..%d (max_tokens)",
                           args->num_tokens, decoder->shape.max_tokens);
    if (args->num_seqs < 0 || args->num_seqs > config->max_seqs)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "num_seqs is %d: expected 0..%d (max_seqs)", args->num_seqs,
                           config->max_seqs);
    if (args->num_tokens == 0) return EPMOE_OK;
    const struct {
        const char *name;
        const void *pointer;
    } needed[] = {{"x", args->x},
                  {"y", args->y},
                  {"key_cache", batch->key_cache},
                  {"value_cache", mla ? batch->key_cache : batch->value_cache}};
    for (size_t i = 0; i < sizeof needed / sizeof needed[0]; i++)
        if (!needed[i].pointer)
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s is NULL with num_tokens %d", needed[i].name,
                               args->num_tokens);
    if (decoder->shape.backend == EPMOE_BACKEND_CPU)
        return epmoei_paged_batch_fill(batch, config->rope.num_positions, config->window);
    EPMOEI_CHECK(epmoei_check_range("num_seqs", batch->num_seqs, 1, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_range("max_blocks", batch->max_blocks, 1, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_range("num_blocks", batch->num_blocks, 1, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_pointer("query_start", batch->query_start));
    EPMOEI_CHECK(epmoei_check_pointer("seq_lens", batch->seq_lens));
    return epmoei_check_pointer("block_table", batch->block_table);
}

static epmoe_forward_args_t mlp_args(const epmoe_decoder_t *decoder, const epmoe_decoder_forward_args_t *args)
{
    epmoe_forward_args_t mlp = EPMOE_FORWARD_ARGS_INIT;
    mlp.num_tokens = args->num_tokens;
    mlp.max_rank_tokens = args->max_rank_tokens;
    mlp.x = decoder->workspace.rows;
    mlp.residual = decoder->workspace.residual;
    mlp.y = args->y;
    mlp.stage_us = args->stage_us;
    mlp.stage_events = args->stage_events;
    if (decoder->mlp->config.num_experts == 0) return mlp;
    mlp.logits = args->logits;
    mlp.logits_out = args->logits_out;
    mlp.ids_out = args->ids_out;
    mlp.weights_out = args->weights_out;
    mlp.expert_load = args->expert_load;
    return mlp;
}

/* All arguments are judged before any work. */
static epmoe_status_t run_attention(const epmoe_decoder_t *decoder, const epmoe_decoder_forward_args_t *args,
                                    epmoei_stages_t *stages, epmoe_stream_t stream)
{
    epmoei_paged_batch_t batch;
    const epmoe_forward_args_t mlp = mlp_args(decoder, args);
    EPMOEI_CHECK(take_batch(decoder, args, &batch));
    EPMOEI_CHECK(epmoei_layer_check_forward(decoder->mlp, &mlp));
    EPMOEI_CHECK(epmoei_stages_begin(stages, stream, args->stage_events));
    const epmoei_attention_run_t run = {.shape = &decoder->shape,
                                        .weights = &decoder->weights,
                                        .workspace = &decoder->workspace,
                                        .cos_sin = decoder->cos_sin,
                                        .batch = &batch,
                                        .stream = stream};
#if EPMOE_HAVE_CUDA
    if (decoder->shape.backend == EPMOE_BACKEND_CUDA && batch.num_tokens > 0)
        EPMOEI_CHECK(epmoei_paged_batch_fill_sm80(&batch, stream));
#endif
    EPMOEI_CHECK(epmoei_self_attention(&run, args->x));
    return epmoei_stages_end(stages, EPMOE_STAGE_ATTENTION);
}

/* Bad ids of earlier calls are reported before any work, not between two of its steps. */
static epmoe_status_t run_attention_at_once(const epmoe_decoder_t *decoder, const epmoe_decoder_forward_args_t *args,
                                            epmoei_stages_t *stages, epmoe_stream_t stream)
{
    if (decoder->shape.backend == EPMOE_BACKEND_CPU) return run_attention(decoder, args, stages, stream);
    EPMOEI_CHECK(epmoei_comm_check_device(decoder->comm));
    EPMOEI_CHECK(epmoei_error_word_check());
    epmoei_error_word_hold(1);
    epmoe_status_t status = run_attention(decoder, args, stages, stream);
    epmoei_error_word_hold(-1);
    return status;
}

epmoe_status_t epmoe_decoder_forward(epmoe_decoder_t *decoder, const epmoe_decoder_forward_args_t *args,
                                     epmoe_stream_t stream)
{
    if (!decoder) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "decoder is NULL");
    epmoe_decoder_forward_args_t own = EPMOE_DECODER_FORWARD_ARGS_INIT;
    epmoei_stages_t stages = {0};
    epmoe_status_t status = epmoei_copy_sized(&own, sizeof own, args, "epmoe_decoder_forward_args_t");
    if (status == EPMOE_OK) status = run_attention_at_once(decoder, &own, &stages, stream);
    epmoe_forward_args_t mlp = mlp_args(decoder, &own);
    return epmoei_layer_forward_after(decoder->mlp, status, &stages, &mlp, stream);
}
