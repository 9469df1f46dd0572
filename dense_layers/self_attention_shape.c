#include "dense_layers/self_attention.h"

#include "base/device.h"
#include "base/dtype.h"
#include "dense_layers/attention_plan.h"
#include "kernels/op_check.h"

#include <math.h>

/* --------------------------------------------------------------------------------------------------------- shape */

static epmoe_status_t check_flags(const epmoe_decoder_config_t *config)
{
    EPMOEI_CHECK(epmoei_check_range("in_bias", config->in_bias, 0, 1));
    EPMOEI_CHECK(epmoei_check_range("out_bias", config->out_bias, 0, 1));
    EPMOEI_CHECK(
        epmoei_check_range("qk_norm", (int32_t)config->qk_norm, EPMOE_QK_NORM_NONE, EPMOE_QK_NORM_HEAD_UNWEIGHTED));
    EPMOEI_CHECK(epmoei_check_range("has_sinks", config->has_sinks, 0, 1));
    EPMOEI_CHECK(epmoei_check_range("no_rope", config->no_rope, 0, 1));
    EPMOEI_CHECK(epmoei_check_range("window", config->window, 0, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_range("rope_style", config->rope_style, EPMOE_ROPE_NEOX, EPMOE_ROPE_GPTJ));
    return epmoei_check_range("cache_layout", config->cache_layout, EPMOE_CACHE_LAYOUT_V1, EPMOE_CACHE_LAYOUT_HND);
}

/* A field that the other kind of attention has. */
static epmoe_status_t check_unused(const char *name, int32_t value, const char *kind)
{
    if (value == 0) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s is %d: expected 0 with %s attention", name, value, kind);
}

static epmoe_status_t check_gqa(epmoe_decoder_config_t *config)
{
    if (config->no_rope && (config->qk_norm == EPMOE_QK_NORM_HEAD || config->qk_norm == EPMOE_QK_NORM_HEAD_UNWEIGHTED))
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "qk_norm is %d with no_rope: expected none, or that of all heads",
                           (int)config->qk_norm);
    if (config->num_kv_heads == 0) config->num_kv_heads = config->num_heads;
    EPMOEI_CHECK(epmoei_check_range("num_kv_heads", config->num_kv_heads, 1, config->num_heads));
    if (config->num_heads % config->num_kv_heads)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "num_kv_heads is %d: expected a divisor of num_heads %d",
                           config->num_kv_heads, config->num_heads);
    EPMOEI_CHECK(epmoei_check_range("head_dim", config->head_dim, 2, EPMOE_MAX_HEAD_DIM));
    EPMOEI_CHECK(check_unused("q_latent", config->q_latent, "GQA"));
    EPMOEI_CHECK(check_unused("kv_latent", config->kv_latent, "GQA"));
    EPMOEI_CHECK(check_unused("nope_dim", config->nope_dim, "GQA"));
    EPMOEI_CHECK(check_unused("rope_dim", config->rope_dim, "GQA"));
    return check_unused("value_dim", config->value_dim, "GQA");
}

static epmoe_status_t check_mla(epmoe_decoder_config_t *config)
{
    EPMOEI_CHECK(epmoei_check_range("q_latent", config->q_latent, 0, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_range("kv_latent", config->kv_latent, 1, EPMOE_MAX_HEAD_DIM));
    EPMOEI_CHECK(epmoei_check_range("nope_dim", config->nope_dim, 1, 1 << 16));
    EPMOEI_CHECK(epmoei_check_range("rope_dim", config->rope_dim, 2, EPMOE_MAX_HEAD_DIM - config->kv_latent));
    EPMOEI_CHECK(epmoei_check_range("value_dim", config->value_dim, 1, 1 << 16));
    EPMOEI_CHECK(check_unused("num_kv_heads", config->num_kv_heads, "MLA"));
    EPMOEI_CHECK(check_unused("head_dim", config->head_dim, "MLA"));
    EPMOEI_CHECK(check_unused("no_rope", config->no_rope, "MLA"));
    return check_unused("qk_norm", (int32_t)config->qk_norm, "MLA");
}

static epmoe_status_t check_rope(epmoe_decoder_config_t *config)
{
    int32_t columns = config->attention == EPMOE_ATTENTION_MLA ? config->rope_dim : config->head_dim;
    epmoe_rope_table_args_t *rope = &config->rope;
    rope->struct_size = sizeof *rope;
    /* epmoe_rope_table's defaults, so that configs can be compared. */
    if (rope->base == 0) rope->base = 10000;
    if (rope->factor == 0) rope->factor = 1;
    if (rope->low_freq_factor == 0) rope->low_freq_factor = 1;
    if (rope->high_freq_factor == 0) rope->high_freq_factor = 4;
    if (rope->beta_fast == 0) rope->beta_fast = 32;
    if (rope->beta_slow == 0) rope->beta_slow = 1;
    if (rope->rotary_dim == 0) rope->rotary_dim = columns;
    EPMOEI_CHECK(epmoei_check_range("rope.rotary_dim", rope->rotary_dim, 2, columns));
    if (rope->rotary_dim % 2)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "rope.rotary_dim is %d: expected an even number",
                           rope->rotary_dim);
    return epmoei_check_range("rope.num_positions", rope->num_positions, 1, INT32_MAX);
}

static epmoe_status_t check_cache(epmoe_decoder_config_t *config, epmoe_dtype_t dtype)
{
    if (config->cache_dtype == EPMOE_DTYPE_NONE) config->cache_dtype = dtype;
    if (config->cache_dtype != dtype && config->cache_dtype != EPMOE_F8_E4M3)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "cache_dtype is %s: expected dtype %s or f8_e4m3",
                           epmoe_dtype_string(config->cache_dtype), epmoe_dtype_string(dtype));
    if (config->block_size == 0) config->block_size = 16;
    EPMOEI_CHECK(epmoei_check_range("block_size", config->block_size, 1, 1 << 20));
    EPMOEI_CHECK(epmoei_check_range("num_blocks", config->num_blocks, 0, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_volume("the key cache", epmoei_attention_key_columns(config), config->block_size,
                                     config->num_blocks));
    EPMOEI_CHECK(epmoei_check_range("key_pack", config->key_pack, 0, INT32_MAX));
    if (config->key_pack == 0) config->key_pack = 16 / epmoe_dtype_size(config->cache_dtype);
    int32_t columns =
        config->attention == EPMOE_ATTENTION_MLA ? config->kv_latent + config->rope_dim : config->head_dim;
    if (config->cache_layout == EPMOE_CACHE_LAYOUT_V1 && columns % config->key_pack)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                           "key_pack is %d: expected a divisor of the key's %d columns with V1", config->key_pack,
                           columns);
    return EPMOE_OK;
}

/* Products read rows of 16 bytes at a time, and parts of a row are tensors of their own. */
static epmoe_status_t check_cuda(const epmoe_decoder_config_t *config, int32_t hidden, epmoe_dtype_t dtype)
{
    bool mla = config->attention == EPMOE_ATTENTION_MLA;
    const struct {
        const char *name;
        int64_t columns;
    } widths[] = {{"hidden", hidden},
                  {"num_kv_heads * head_dim", mla ? 0 : (int64_t)config->num_kv_heads * config->head_dim},
                  {"q_latent", config->q_latent},
                  {"kv_latent", config->kv_latent},
                  {"nope_dim", config->nope_dim},
                  {"num_heads * value_dim", (int64_t)config->num_heads * config->value_dim}};
    if (dtype == EPMOE_F32)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "dtype is f32: on CUDA a decoder layer computes bf16 and f16");
    for (size_t i = 0; i < sizeof widths / sizeof widths[0]; i++)
        if (widths[i].columns % 8)
            return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "%s is %lld: on CUDA it must be a multiple of 8",
                               widths[i].name, (long long)widths[i].columns);
    return EPMOE_OK;
}

static epmoe_status_t check_eps(const char *name, float *eps)
{
    if (*eps == 0) *eps = 1e-6f;
    if (*eps > 0 && *eps < 1) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s is %g: expected 0 to 1", name, (double)*eps);
}

epmoe_status_t epmoei_attention_shape_check(const epmoe_decoder_config_t *config, int32_t hidden, int32_t max_tokens,
                                            epmoe_dtype_t dtype, epmoe_backend_t backend,
                                            epmoei_attention_shape_t *shape)
{
    *shape = (epmoei_attention_shape_t){.backend = backend, .hidden = hidden, .max_tokens = max_tokens, .dtype = dtype};
    epmoe_decoder_config_t *own = &shape->config;
    EPMOEI_CHECK(epmoei_copy_sized(own, sizeof *own, config, "epmoe_decoder_config_t"));
    EPMOEI_CHECK(epmoei_check_range("attention", own->attention, EPMOE_ATTENTION_GQA, EPMOE_ATTENTION_MLA));
    EPMOEI_CHECK(epmoei_check_range("num_heads", own->num_heads, 1, EPMOE_MAX_EXPERTS));
    EPMOEI_CHECK(check_flags(own));
    EPMOEI_CHECK(own->attention == EPMOE_ATTENTION_MLA ? check_mla(own) : check_gqa(own));
    EPMOEI_CHECK(check_rope(own));
    EPMOEI_CHECK(check_cache(own, dtype));
    if (backend == EPMOE_BACKEND_CUDA) EPMOEI_CHECK(check_cuda(own, hidden, dtype));
    EPMOEI_CHECK(check_eps("norm_eps", &own->norm_eps));
    EPMOEI_CHECK(check_eps("latent_eps", &own->latent_eps));
    bool mla = own->attention == EPMOE_ATTENTION_MLA;
    if (own->scale == 0) own->scale = 1 / sqrtf((float)(mla ? own->nope_dim + own->rope_dim : own->head_dim));
    if (!(own->scale > 0 && own->scale < 1e30f))
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "scale is %g: expected a positive number", (double)own->scale);
    if (own->max_seqs == 0) own->max_seqs = max_tokens;
    EPMOEI_CHECK(epmoei_check_range("max_seqs", own->max_seqs, 1, INT32_MAX));
    /* The slots of a product per head are counted in int32. */
    if (mla)
        EPMOEI_CHECK(
            epmoei_check_range("max_tokens * num_heads", (int64_t)max_tokens * own->num_heads, 1, INT32_MAX - 1));
    int64_t widest = mla ? (int64_t)own->num_heads * (own->kv_latent + own->rope_dim + own->nope_dim + own->value_dim)
                         : ((int64_t)own->num_heads + 2 * own->num_kv_heads) * own->head_dim;
    return epmoei_check_range("the width of all heads", widest, 1, INT32_MAX);
}

epmoei_qk_norm_columns_t epmoei_qk_norm_columns(const epmoe_decoder_config_t *config)
{
    int64_t head = config->head_dim;
    switch (config->qk_norm) {
    case EPMOE_QK_NORM_NONE: return (epmoei_qk_norm_columns_t){0, 0};
    case EPMOE_QK_NORM_ALL_HEADS:
        return (epmoei_qk_norm_columns_t){config->num_heads * head, config->num_kv_heads * head};
    default: return (epmoei_qk_norm_columns_t){head, head};
    }
}

int64_t epmoei_attention_key_columns(const epmoe_decoder_config_t *config)
{
    if (config->attention == EPMOE_ATTENTION_MLA) return (int64_t)config->kv_latent + config->rope_dim;
    return (int64_t)config->num_kv_heads * config->head_dim;
}

/* -------------------------------------------------------------------------------------------------------- layouts */

static float *carve_floats(epmoei_arena_t *arena, bool present, int64_t count)
{
    return present ? epmoei_carve(arena, count * 4) : NULL;
}

static epmoei_linear_t carve_linear(epmoei_arena_t *arena, epmoe_format_t format, int64_t n, int32_t k, int32_t heads,
                                    bool has_bias)
{
    int64_t size = epmoe_dtype_size(epmoei_dtype_of_format(format));
    epmoei_linear_t linear = {.n = (int32_t)n, .k = k, .heads = heads, .format = format};
    if (n == 0 || k == 0) return linear;
    linear.weight = epmoei_carve(arena, heads * n * k * size);
    linear.bias = carve_floats(arena, has_bias, n);
    return linear;
}

int64_t epmoei_attention_weights_layout(char *base, const epmoei_attention_shape_t *shape, epmoe_format_t format,
                                        epmoei_attention_weights_t *out)
{
    const epmoe_decoder_config_t *config = &shape->config;
    epmoei_arena_t arena = {base, 0};
    int32_t d = shape->hidden, heads = config->num_heads;
    *out = (epmoei_attention_weights_t){0};
    out->input_norm = carve_floats(&arena, true, d);
    out->post_norm = carve_floats(&arena, true, d);
    out->sinks = carve_floats(&arena, config->has_sinks, heads);
    if (config->attention == EPMOE_ATTENTION_GQA) {
        int64_t rows = ((int64_t)heads + 2 * config->num_kv_heads) * config->head_dim;
        out->qkv = carve_linear(&arena, format, rows, d, 1, config->in_bias);
        const epmoei_qk_norm_columns_t norm = epmoei_qk_norm_columns(config);
        out->q_norm = carve_floats(&arena, norm.q > 0, norm.q);
        out->k_norm = carve_floats(&arena, norm.k > 0, norm.k);
        out->out = carve_linear(&arena, format, d, heads * config->head_dim, 1, config->out_bias);
        return arena.used;
    }
    int32_t c = config->kv_latent, q_in = config->q_latent ? config->q_latent : d;
    out->q_down = carve_linear(&arena, format, config->q_latent, d, 1, config->in_bias);
    out->q_down_norm = carve_floats(&arena, config->q_latent > 0, config->q_latent);
    out->q_nope = carve_linear(&arena, format, (int64_t)heads * config->nope_dim, q_in, 1, false);
    out->q_rope = carve_linear(&arena, format, (int64_t)heads * config->rope_dim, q_in, 1, false);
    out->kv_down = carve_linear(&arena, format, (int64_t)c + config->rope_dim, d, 1, config->in_bias);
    out->kv_down_norm = carve_floats(&arena, true, c);
    out->key_up = carve_linear(&arena, format, c, config->nope_dim, heads, false);
    out->value_up = carve_linear(&arena, format, config->value_dim, c, heads, false);
    out->out = carve_linear(&arena, format, d, heads * config->value_dim, 1, config->out_bias);
    return arena.used;
}

epmoe_status_t epmoei_attention_workspace_layout(char *base, const epmoei_attention_shape_t *shape,
                                                 epmoei_attention_workspace_t *out)
{
    const epmoe_decoder_config_t *config = &shape->config;
    epmoei_arena_t arena = {base, 0};
    epmoei_attention_weights_t w;
    *out = (epmoei_attention_workspace_t){0};
    bool cuda = shape->backend == EPMOE_BACKEND_CUDA;
    epmoei_attention_weights_layout(NULL, shape, cuda ? epmoei_format_of_dtype(shape->dtype) : EPMOE_FORMAT_F32, &w);
    const epmoei_linear_t *const linears[] = {&w.qkv,     &w.q_down, &w.q_nope,   &w.q_rope,
                                              &w.kv_down, &w.key_up, &w.value_up, &w.out};
    for (size_t i = 0; i < sizeof linears / sizeof linears[0]; i++) {
        int64_t bytes = 0;
        if (linears[i]->n)
            EPMOEI_CHECK(epmoei_linear_workspace(linears[i], shape->backend, shape->dtype, shape->max_tokens, &bytes));
        out->gemm_bytes = epmoei_max64(out->gemm_bytes, bytes);
    }
    int64_t tokens = shape->max_tokens, row = tokens * epmoe_dtype_size(shape->dtype), heads = config->num_heads;
    out->residual = epmoei_carve(&arena, row * shape->hidden);
    out->rows = epmoei_carve(&arena, row * shape->hidden);
    out->heads = epmoei_carve(&arena, row * w.out.k);
    out->positions = epmoei_carve(&arena, tokens * 8);
    out->slots = epmoei_carve(&arena, tokens * 8);
    out->gemm = epmoei_carve(&arena, out->gemm_bytes);
    const epmoei_device_info_t *device = epmoei_device_current();
    if (cuda && device) {
        int32_t columns = config->attention == EPMOE_ATTENTION_MLA ? config->kv_latent : config->head_dim;
        out->parts_bytes = epmoei_attention_most_workspace(columns, device->num_sms);
        out->parts = epmoei_carve(&arena, out->parts_bytes);
    }
    if (config->attention == EPMOE_ATTENTION_GQA) {
        out->qkv = epmoei_carve(&arena, row * w.qkv.n);
    } else {
        out->q_latent = epmoei_carve(&arena, row * config->q_latent);
        out->q_nope = epmoei_carve(&arena, row * w.q_nope.n);
        out->q_rope = epmoei_carve(&arena, tokens * 4 * w.q_rope.n);
        out->latents = epmoei_carve(&arena, tokens * 4 * epmoei_max64(config->q_latent, w.kv_down.n));
        out->key = epmoei_carve(&arena, row * w.kv_down.n);
        out->absorbed = epmoei_carve(&arena, row * heads * config->kv_latent);
        out->q = epmoei_carve(&arena, row * heads * w.kv_down.n);
        out->o_latent = epmoei_carve(&arena, row * heads * config->kv_latent);
        out->head_offsets = epmoei_carve(&arena, (heads + 1) * 4);
        out->head_rows = epmoei_carve(&arena, heads * tokens * 4);
    }
    out->bytes = arena.used;
    return EPMOE_OK;
}
