#include "dense_layers/self_attention.h"

#include "dense_layers/self_attention_cuda.h"

#include <string.h>

/* The rope columns of q, and those of the key, which all heads share. */
static epmoe_status_t rotate(const epmoei_attention_run_t *run)
{
    const epmoe_decoder_config_t *config = &run->shape->config;
    epmoe_rope_args_t rope = EPMOE_ROPE_ARGS_INIT;
    rope.backend = run->shape->backend;
    rope.num_tokens = run->batch->num_tokens;
    rope.num_heads = config->num_heads;
    rope.num_kv_heads = 1;
    rope.head_dim = config->rope_dim;
    rope.rotary_dim = config->rope.rotary_dim;
    rope.style = config->rope_style;
    rope.dtype = run->shape->dtype;
    rope.q = run->workspace->q_rope;
    rope.k = (char *)run->workspace->key + (int64_t)config->kv_latent * epmoe_dtype_size(rope.dtype);
    rope.k_stride = (int64_t)config->kv_latent + config->rope_dim;
    rope.positions = run->batch->positions;
    rope.cos_sin = run->cos_sin;
    rope.num_positions = config->rope.num_positions;
    return epmoe_rope(&rope, run->stream);
}

/* q [T,H,kv_latent + rope_dim]: what has been brought to the latent, then the rotated columns. */
static epmoe_status_t join_q(const epmoei_attention_run_t *run)
{
    const epmoe_decoder_config_t *config = &run->shape->config;
    const epmoei_attention_workspace_t *workspace = run->workspace;
    int64_t size = epmoe_dtype_size(run->shape->dtype), latent = config->kv_latent * size,
            rope = config->rope_dim * size, rows = (int64_t)run->batch->num_tokens * config->num_heads;
#if EPMOE_HAVE_CUDA
    if (run->shape->backend == EPMOE_BACKEND_CUDA)
        return epmoei_join_columns_sm80(workspace->q, workspace->absorbed, config->kv_latent, workspace->q_rope,
                                        config->rope_dim, rows, run->stream);
#endif
#pragma omp parallel for schedule(static) if (rows * (latent + rope) >= 1 << 18)
    for (int64_t r = 0; r < rows; r++) {
        char *to = (char *)workspace->q + r * (latent + rope);
        memcpy(to, (const char *)workspace->absorbed + r * latent, (size_t)latent);
        memcpy(to + latent, (const char *)workspace->q_rope + r * rope, (size_t)rope);
    }
    return EPMOE_OK;
}

static epmoe_status_t project_q(const epmoei_attention_run_t *run, const epmoei_linear_run_t *linear)
{
    const epmoei_attention_workspace_t *workspace = run->workspace;
    const epmoei_attention_weights_t *weights = run->weights;
    const epmoe_decoder_config_t *config = &run->shape->config;
    epmoe_dtype_t dtype = run->shape->dtype;
    int32_t rows = run->batch->num_tokens;
    const void *from = workspace->rows;
    if (config->q_latent) {
        from = workspace->q_latent;
        EPMOEI_CHECK(epmoei_linear(linear, &weights->q_down, rows, workspace->rows, dtype, workspace->q_latent));
        EPMOEI_CHECK(epmoei_attention_norm(run, from, 0, config->q_latent, weights->q_down_norm, config->latent_eps,
                                           NULL, workspace->q_latent));
    }
    EPMOEI_CHECK(epmoei_linear(linear, &weights->q_nope, rows, from, dtype, workspace->q_nope));
    return epmoei_linear(linear, &weights->q_rope, rows, from, dtype, workspace->q_rope);
}

epmoe_status_t epmoei_self_attention_mla(const epmoei_attention_run_t *run)
{
    const epmoe_decoder_config_t *config = &run->shape->config;
    const epmoei_attention_workspace_t *workspace = run->workspace;
    const epmoei_attention_weights_t *weights = run->weights;
    epmoe_dtype_t dtype = run->shape->dtype;
    int32_t rows = run->batch->num_tokens;
    int64_t key_columns = (int64_t)config->kv_latent + config->rope_dim;
    epmoei_linear_run_t linear = epmoei_attention_linear_run(run);
    EPMOEI_CHECK(project_q(run, &linear));
    EPMOEI_CHECK(epmoei_linear(&linear, &weights->kv_down, rows, workspace->rows, dtype, workspace->key));
    EPMOEI_CHECK(epmoei_attention_norm(run, workspace->key, key_columns, config->kv_latent, weights->kv_down_norm,
                                       config->latent_eps, NULL, workspace->key));
    EPMOEI_CHECK(rotate(run));
    const epmoe_cache_write_args_t write = epmoei_attention_cache_args(run, workspace->key, NULL, key_columns);
    EPMOEI_CHECK(epmoe_cache_write(&write, run->stream));
    EPMOEI_CHECK(epmoei_linear_heads(&linear, &weights->key_up, rows, workspace->q_nope, workspace->absorbed));
    EPMOEI_CHECK(join_q(run));
    EPMOEI_CHECK(epmoei_attention_heads(run, workspace->q, 0, workspace->o_latent));
    return epmoei_linear_heads(&linear, &weights->value_up, rows, workspace->o_latent, workspace->heads);
}
