#include "dense_layers/self_attention.h"

static char *element(void *base, epmoe_dtype_t dtype, int64_t index)
{
    return (char *)base + index * epmoe_dtype_size(dtype);
}

/* q and k heads in place in the rows of the projection. */
static epmoe_rope_args_t rope_args(const epmoei_attention_run_t *run, void *qkv, int64_t stride)
{
    const epmoe_decoder_config_t *config = &run->shape->config;
    epmoe_rope_args_t rope = EPMOE_ROPE_ARGS_INIT;
    rope.backend = run->shape->backend;
    rope.num_tokens = run->batch->num_tokens;
    rope.num_heads = config->num_heads;
    rope.num_kv_heads = config->num_kv_heads;
    rope.head_dim = config->head_dim;
    rope.rotary_dim = config->rope.rotary_dim;
    rope.style = config->rope_style;
    rope.dtype = run->shape->dtype;
    rope.q = qkv;
    rope.q_stride = stride;
    rope.k = element(qkv, rope.dtype, (int64_t)config->num_heads * config->head_dim);
    rope.k_stride = stride;
    rope.positions = run->batch->positions;
    rope.cos_sin = run->cos_sin;
    rope.num_positions = config->rope.num_positions;
    return rope;
}

static epmoe_status_t normalise_all_heads(const epmoei_attention_run_t *run, void *qkv, int64_t stride)
{
    const epmoe_decoder_config_t *config = &run->shape->config;
    int32_t q_columns = config->num_heads * config->head_dim, k_columns = config->num_kv_heads * config->head_dim;
    epmoe_dtype_t dtype = run->shape->dtype;
    void *k = element(qkv, dtype, q_columns);
    EPMOEI_CHECK(
        epmoei_attention_norm(run, dtype, qkv, stride, q_columns, run->weights->q_norm, config->norm_eps, NULL, qkv));
    return epmoei_attention_norm(run, dtype, k, stride, k_columns, run->weights->k_norm, config->norm_eps, NULL, k);
}

static epmoe_status_t normalise_heads_and_rotate(const epmoei_attention_run_t *run, void *qkv, int64_t stride)
{
    const epmoe_decoder_config_t *config = &run->shape->config;
    epmoe_qk_norm_rope_args_t args = EPMOE_QK_NORM_ROPE_ARGS_INIT;
    args.backend = run->shape->backend;
    args.num_tokens = run->batch->num_tokens;
    args.num_heads = config->num_heads;
    args.num_kv_heads = config->num_kv_heads;
    args.head_dim = config->head_dim;
    args.rotary_dim = config->rope.rotary_dim;
    args.style = config->rope_style;
    args.dtype = run->shape->dtype;
    args.weight_dtype = EPMOE_F32;
    args.qkv = qkv;
    args.qkv_stride = stride;
    args.q_weight = run->weights->q_norm;
    args.k_weight = run->weights->k_norm;
    args.eps = config->norm_eps;
    args.positions = run->batch->positions;
    args.cos_sin = run->cos_sin;
    args.num_positions = config->rope.num_positions;
    return epmoe_qk_norm_rope(&args, run->stream);
}

epmoe_status_t epmoei_self_attention_gqa(const epmoei_attention_run_t *run)
{
    const epmoe_decoder_config_t *config = &run->shape->config;
    const epmoei_attention_workspace_t *workspace = run->workspace;
    epmoe_dtype_t dtype = run->shape->dtype;
    int64_t q_columns = (int64_t)config->num_heads * config->head_dim;
    int64_t kv_columns = (int64_t)config->num_kv_heads * config->head_dim, stride = q_columns + 2 * kv_columns;
    void *qkv = workspace->qkv;
    const void *key = element(qkv, dtype, q_columns), *value = element(qkv, dtype, q_columns + kv_columns);
    epmoei_linear_run_t linear = epmoei_attention_linear_run(run);
    EPMOEI_CHECK(epmoei_linear(&linear, &run->weights->qkv, run->batch->num_tokens, workspace->rows, dtype, qkv));
    const epmoe_cache_write_args_t write = epmoei_attention_cache_args(run, key, value, stride);
    const epmoe_rope_args_t rope = rope_args(run, qkv, stride);
    bool by_head = config->qk_norm == EPMOE_QK_NORM_HEAD || config->qk_norm == EPMOE_QK_NORM_HEAD_UNWEIGHTED;
    if (by_head) EPMOEI_CHECK(normalise_heads_and_rotate(run, qkv, stride));
    if (config->qk_norm == EPMOE_QK_NORM_ALL_HEADS) EPMOEI_CHECK(normalise_all_heads(run, qkv, stride));
    EPMOEI_CHECK(by_head || config->no_rope ? epmoe_cache_write(&write, run->stream)
                                            : epmoe_rope_cache_write(&rope, &write, run->stream));
    return epmoei_attention_heads(run, qkv, stride, workspace->heads);
}
