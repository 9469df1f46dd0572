#include "dense_layers/self_attention.h"

#include "base/device.h"

epmoei_linear_run_t epmoei_attention_linear_run(const epmoei_attention_run_t *run)
{
    const epmoei_attention_workspace_t *workspace = run->workspace;
    return (epmoei_linear_run_t){.backend = run->shape->backend,
                                 .stream = run->stream,
                                 .dtype = run->shape->dtype,
                                 .workspace = workspace->gemm,
                                 .workspace_bytes = workspace->gemm_bytes,
                                 .head_offsets = workspace->head_offsets,
                                 .head_rows = workspace->head_rows};
}

epmoe_status_t epmoei_attention_norm(const epmoei_attention_run_t *run, epmoe_dtype_t dtype, const void *x,
                                     int64_t stride, int32_t columns, const float *weight, float eps, void *residual,
                                     void *y)
{
    epmoe_rms_norm_args_t norm = EPMOE_RMS_NORM_ARGS_INIT;
    norm.backend = run->shape->backend;
    norm.num_tokens = run->batch->num_tokens;
    norm.hidden = columns;
    norm.dtype = dtype;
    norm.weight_dtype = EPMOE_F32;
    norm.x = x;
    norm.x_stride = stride;
    norm.residual = residual;
    norm.weight = weight;
    norm.eps = eps;
    norm.y = y;
    norm.y_stride = stride;
    norm.y_dtype = run->shape->dtype;
    return epmoe_rms_norm(&norm, run->stream);
}

epmoe_cache_write_args_t epmoei_attention_cache_args(const epmoei_attention_run_t *run, const void *key,
                                                     const void *value, int64_t stride)
{
    const epmoe_decoder_config_t *config = &run->shape->config;
    const epmoei_paged_batch_t *batch = run->batch;
    bool mla = config->attention == EPMOE_ATTENTION_MLA;
    epmoe_cache_write_args_t write = EPMOE_CACHE_WRITE_ARGS_INIT;
    write.backend = run->shape->backend;
    write.num_tokens = batch->num_tokens;
    write.num_kv_heads = mla ? 1 : config->num_kv_heads;
    write.head_dim = mla ? config->kv_latent + config->rope_dim : config->head_dim;
    write.num_blocks = batch->num_blocks;
    write.block_size = batch->block_size;
    write.layout = config->cache_layout;
    write.key_pack = config->key_pack;
    write.dtype = run->shape->dtype;
    write.cache_dtype = config->cache_dtype;
    write.key = key;
    write.key_stride = stride;
    write.value = value;
    write.value_stride = stride;
    write.slots = batch->slots;
    write.key_cache = batch->key_cache;
    write.value_cache = batch->value_cache;
    write.k_scale = batch->k_scale;
    write.v_scale = batch->v_scale;
    return write;
}

epmoe_status_t epmoei_attention_heads(const epmoei_attention_run_t *run, const void *q, int64_t q_stride, void *o)
{
    const epmoe_decoder_config_t *config = &run->shape->config;
    const epmoei_paged_batch_t *batch = run->batch;
    bool mla = config->attention == EPMOE_ATTENTION_MLA;
    epmoe_attention_args_t attention = EPMOE_ATTENTION_ARGS_INIT;
    attention.backend = run->shape->backend;
    attention.num_tokens = batch->num_tokens;
    attention.num_seqs = batch->num_seqs;
    attention.num_heads = config->num_heads;
    attention.num_kv_heads = mla ? 1 : config->num_kv_heads;
    attention.head_dim = mla ? config->kv_latent + config->rope_dim : config->head_dim;
    attention.value_dim = mla ? config->kv_latent : config->head_dim;
    attention.num_blocks = batch->num_blocks;
    attention.block_size = batch->block_size;
    attention.max_blocks = batch->max_blocks;
    attention.dtype = run->shape->dtype;
    attention.cache_dtype = config->cache_dtype;
    attention.layout = config->cache_layout;
    attention.key_pack = config->key_pack;
    attention.window = config->window;
    attention.scale = config->scale;
    attention.q = q;
    attention.q_stride = q_stride;
    attention.key_cache = batch->key_cache;
    attention.value_cache = batch->value_cache;
    attention.k_scale = batch->k_scale;
    attention.v_scale = batch->v_scale;
    attention.block_table = batch->block_table;
    attention.seq_lens = batch->seq_lens;
    attention.query_start = batch->query_start;
    attention.sinks = run->weights->sinks;
    attention.o = o;
    attention.workspace = run->workspace->parts;
    attention.workspace_bytes = run->workspace->parts_bytes;
    return epmoe_attention(&attention, run->stream);
}

epmoe_status_t epmoei_self_attention(const epmoei_attention_run_t *run, const void *x)
{
    const epmoei_attention_shape_t *shape = run->shape;
    const epmoei_attention_workspace_t *workspace = run->workspace;
    const epmoei_attention_weights_t *weights = run->weights;
    int32_t rows = run->batch->num_tokens;
    if (rows == 0) return EPMOE_OK;
    float eps = shape->config.norm_eps;
    int64_t bytes = (int64_t)rows * shape->hidden * epmoe_dtype_size(shape->dtype);
    EPMOEI_CHECK(epmoei_memory_copy(shape->backend, workspace->residual, x, bytes, run->stream));
    EPMOEI_CHECK(
        epmoei_attention_norm(run, shape->dtype, x, 0, shape->hidden, weights->input_norm, eps, NULL, workspace->rows));
    EPMOEI_CHECK(shape->config.attention == EPMOE_ATTENTION_MLA ? epmoei_self_attention_mla(run)
                                                                : epmoei_self_attention_gqa(run));
    epmoei_linear_run_t linear = epmoei_attention_linear_run(run);
    EPMOEI_CHECK(epmoei_linear(&linear, &weights->out, rows, workspace->heads, shape->dtype, workspace->rows));
    return epmoei_attention_norm(run, shape->dtype, workspace->rows, 0, shape->hidden, weights->post_norm, eps,
                                 workspace->residual, workspace->rows);
}
