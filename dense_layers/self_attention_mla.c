#include "dense_layers/self_attention.h"

#include "base/dtype.h"
#include "dense_layers/self_attention_cuda.h"

#include <string.h>

/* The rope columns of q, and those of the key, which all heads share, still in fp32. */
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
    rope.dtype = EPMOE_F32;
    rope.q = run->workspace->q_rope;
    rope.k = run->workspace->latents + config->kv_latent;
    rope.k_stride = (int64_t)config->kv_latent + config->rope_dim;
    rope.positions = run->batch->positions;
    rope.cos_sin = run->cos_sin;
    rope.num_positions = config->rope.num_positions;
    return epmoe_rope(&rope, run->stream);
}

/* q [T,H,kv_latent + rope_dim]: what has been brought to the latent, then the rotated columns. The key's rotated
 * columns behind its latent. Here what was rotated is rounded. */
static epmoe_status_t join(const epmoei_attention_run_t *run)
{
    const epmoe_decoder_config_t *config = &run->shape->config;
    const epmoei_attention_workspace_t *workspace = run->workspace;
    epmoe_dtype_t dtype = run->shape->dtype;
    int64_t size = epmoe_dtype_size(dtype), latent = config->kv_latent, rope = config->rope_dim, width = latent + rope;
    int64_t tokens = run->batch->num_tokens, rows = tokens * config->num_heads;
#if EPMOE_HAVE_CUDA
    if (run->shape->backend == EPMOE_BACKEND_CUDA) {
        const epmoei_join_args_t join_args = {.dtype = dtype,
                                              .num_tokens = run->batch->num_tokens,
                                              .num_heads = config->num_heads,
                                              .latent = config->kv_latent,
                                              .rope = config->rope_dim,
                                              .absorbed = workspace->absorbed,
                                              .q_rope = workspace->q_rope,
                                              .key_rows = workspace->latents,
                                              .q = workspace->q,
                                              .key = workspace->key};
        return epmoei_join_rotated_sm80(&join_args, run->stream);
    }
#endif
#pragma omp parallel for schedule(static) if (rows * width * size >= 1 << 18)
    for (int64_t r = 0; r < rows; r++) {
        char *to = (char *)workspace->q + r * width * size;
        memcpy(to, (const char *)workspace->absorbed + r * latent * size, (size_t)(latent * size));
        epmoei_from_f32(to + latent * size, workspace->q_rope + r * rope, dtype, rope);
    }
    for (int64_t t = 0; t < tokens; t++)
        epmoei_from_f32((char *)workspace->key + (t * width + latent) * size, workspace->latents + t * width + latent,
                        dtype, rope);
    return EPMOE_OK;
}

static epmoe_status_t project_q(const epmoei_attention_run_t *run, const epmoei_linear_run_t *linear)
{
    const epmoei_attention_workspace_t *workspace = run->workspace;
    const epmoei_attention_weights_t *weights = run->weights;
    const epmoe_decoder_config_t *config = &run->shape->config;
    int32_t rows = run->batch->num_tokens;
    const void *from = workspace->rows;
    if (config->q_latent) {
        from = workspace->q_latent;
        EPMOEI_CHECK(epmoei_linear(linear, &weights->q_down, rows, workspace->rows, EPMOE_F32, workspace->latents));
        EPMOEI_CHECK(epmoei_attention_norm(run, EPMOE_F32, workspace->latents, 0, config->q_latent,
                                           weights->q_down_norm, config->latent_eps, NULL, workspace->q_latent));
    }
    EPMOEI_CHECK(epmoei_linear(linear, &weights->q_nope, rows, from, run->shape->dtype, workspace->q_nope));
    return epmoei_linear(linear, &weights->q_rope, rows, from, EPMOE_F32, workspace->q_rope);
}

epmoe_status_t epmoei_self_attention_mla(const epmoei_attention_run_t *run)
{
    const epmoe_decoder_config_t *config = &run->shape->config;
    const epmoei_attention_workspace_t *workspace = run->workspace;
    const epmoei_attention_weights_t *weights = run->weights;
    int32_t rows = run->batch->num_tokens;
    int64_t key_columns = (int64_t)config->kv_latent + config->rope_dim;
    epmoei_linear_run_t linear = epmoei_attention_linear_run(run);
    EPMOEI_CHECK(project_q(run, &linear));
    EPMOEI_CHECK(epmoei_linear(&linear, &weights->kv_down, rows, workspace->rows, EPMOE_F32, workspace->latents));
    EPMOEI_CHECK(epmoei_attention_norm(run, EPMOE_F32, workspace->latents, key_columns, config->kv_latent,
                                       weights->kv_down_norm, config->latent_eps, NULL, workspace->key));
    EPMOEI_CHECK(rotate(run));
    EPMOEI_CHECK(epmoei_linear_heads(&linear, &weights->key_up, rows, workspace->q_nope, workspace->absorbed));
    EPMOEI_CHECK(join(run));
    const epmoe_cache_write_args_t write = epmoei_attention_cache_args(run, workspace->key, NULL, key_columns);
    EPMOEI_CHECK(epmoe_cache_write(&write, run->stream));
    EPMOEI_CHECK(epmoei_attention_heads(run, workspace->q, 0, workspace->o_latent));
    return epmoei_linear_heads(&linear, &weights->value_up, rows, workspace->o_latent, workspace->heads);
}
