#include "tools/tool_op_dense.h"

#include "base/device.h"

#include <stdio.h>
#include <string.h>

#define STYLES  "neox,gptj" /* = epmoe_rope_style_t */
#define BOOLEAN "0,1"

/* ------------------------------------------------------------------------------------------------------- rms_norm */

const op_tensor_t op_rms_norm_tensors[] = {
    {.name = "x", .shape = "T,d", .kind = OP_FLOAT},
    {.name = "weight", .shape = "d", .kind = OP_FLOAT},
    {.name = "residual", .shape = "T,d", .kind = OP_FLOAT, .optional = true},
    {.name = "scale", .shape = "1", .kind = OP_F32, .optional = true},
    {0},
};
const op_key_t op_rms_norm_keys[] = {
    {.name = "eps", .kind = OP_POSITIVE, .initial = "1e-6"},
    {.name = "offset", .kind = OP_CHOICE, .choices = BOOLEAN, .initial = "0"},
    {.name = "quant", .kind = OP_CHOICE, .choices = OP_QUANTS, .initial = "none"},
    {0},
};

epmoe_status_t op_static_scale(const op_context_t *context, epmoe_granularity_t quant, const float **out)
{
    const op_value_t *scale = op_tensor(context, "scale");
    bool wanted = quant == EPMOE_GRANULARITY_TENSOR;
    if (scale->present != wanted)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "tensor 'scale' is %s: expected it with quant=tensor only",
                           scale->present ? "given" : "missing");
    *out = scale->data;
    return EPMOE_OK;
}

epmoe_status_t op_output_scale(op_context_t *context, epmoe_granularity_t quant, int64_t rows, int64_t cols,
                               float **out)
{
    if (quant == 0) return EPMOE_OK;
    if (quant == EPMOE_GRANULARITY_TENSOR)
        return op_output_copy(context, "scale", op_tensor(context, "scale")) ? EPMOE_OK : OP_NO_MEMORY;
    int64_t scales = quant == EPMOE_GRANULARITY_BLOCK128 ? epmoei_ceil_div(cols, 128) : 1;
    *out = op_output(context, "scale", EPMOE_F32, OP_SHAPE(rows, scales));
    return *out ? EPMOE_OK : OP_NO_MEMORY;
}

epmoe_status_t op_rms_norm_run(op_context_t *context)
{
    const op_value_t *x = op_tensor(context, "x"), *residual = op_tensor(context, "residual");
    epmoe_rms_norm_args_t args = EPMOE_RMS_NORM_ARGS_INIT;
    args.backend = op_backend(context);
    args.num_tokens = op_dim(context, 'T');
    args.hidden = op_dim(context, 'd');
    args.dtype = x->dtype;
    args.weight_dtype = op_tensor(context, "weight")->dtype;
    args.x = x->data;
    args.weight = op_tensor(context, "weight")->data;
    args.eps = op_real(context, "eps");
    args.weight_offset = op_number(context, "offset");
    args.quant = (epmoe_granularity_t)op_number(context, "quant");
    if (residual->present && residual->dtype != x->dtype)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "tensor 'residual' has dtype %s: expected that of x, %s",
                           epmoe_dtype_string(residual->dtype), epmoe_dtype_string(x->dtype));
    EPMOEI_CHECK(op_static_scale(context, args.quant, &args.static_scale));
    epmoe_dtype_t y_dtype = args.quant == 0 ? x->dtype : EPMOE_F8_E4M3;
    args.y = op_output(context, "y", y_dtype, OP_SHAPE(args.num_tokens, args.hidden));
    if (!args.y) return OP_NO_MEMORY;
    if (residual->present && !(args.residual = op_output_copy(context, "residual", residual))) return OP_NO_MEMORY;
    EPMOEI_CHECK(op_output_scale(context, args.quant, args.num_tokens, args.hidden, &args.scale));
    return epmoe_rms_norm(&args, NULL);
}

/* ----------------------------------------------------------------------------------------------------------- rope */

/* Of the table's width, which is what rotary_dim means when it is not given. */
static epmoe_status_t take_rotary_dim(const op_context_t *context, int32_t head_dim, int32_t *rotary_dim)
{
    int32_t width = op_dim(context, 'R'), wanted = op_number(context, "rotary_dim");
    *rotary_dim = width;
    if (op_has(context, "rotary_dim") && (wanted > head_dim || wanted % 2))
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                           "rotary_dim is %d: expected an even number from 2 to head_dim %d", wanted, head_dim);
    if (width == 0 || (op_has(context, "rotary_dim") && wanted != width))
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "rotary_dim is %d: expected the width %d of cos_sin, above 0",
                           wanted, width);
    return EPMOE_OK;
}

const op_tensor_t op_rope_tensors[] = {
    {.name = "q", .shape = "T,H,D", .kind = OP_FLOAT},
    {.name = "k", .shape = "T,K,D", .kind = OP_FLOAT},
    {.name = "positions", .shape = "T", .kind = OP_WIDE},
    {.name = "cos_sin", .shape = "P,R", .kind = OP_F32},
    {0},
};
const op_key_t op_rope_keys[] = {
    {.name = "style", .kind = OP_CHOICE, .choices = STYLES, .initial = "neox"},
    {.name = "rotary_dim", .kind = OP_COUNT},
    {.name = "inverse", .kind = OP_CHOICE, .choices = BOOLEAN, .initial = "0"},
    {0},
};

epmoe_status_t op_rope_run(op_context_t *context)
{
    const op_value_t *q = op_tensor(context, "q"), *k = op_tensor(context, "k");
    const op_value_t *positions = op_tensor(context, "positions");
    epmoe_rope_args_t args = EPMOE_ROPE_ARGS_INIT;
    args.backend = op_backend(context);
    args.num_tokens = op_dim(context, 'T');
    args.num_heads = op_dim(context, 'H');
    args.num_kv_heads = op_dim(context, 'K');
    args.head_dim = op_dim(context, 'D');
    args.style = (epmoe_rope_style_t)op_number(context, "style");
    args.inverse = op_number(context, "inverse");
    args.dtype = q->dtype;
    args.positions_dtype = positions->dtype;
    args.positions = positions->data;
    args.cos_sin = op_tensor(context, "cos_sin")->data;
    args.num_positions = op_dim(context, 'P');
    if (k->dtype != q->dtype)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "tensor 'k' has dtype %s: expected that of q, %s",
                           epmoe_dtype_string(k->dtype), epmoe_dtype_string(q->dtype));
    EPMOEI_CHECK(take_rotary_dim(context, args.head_dim, &args.rotary_dim));
    args.q = op_output_copy(context, "q", q);
    args.k = op_output_copy(context, "k", k);
    return args.q && args.k ? epmoe_rope(&args, NULL) : OP_NO_MEMORY;
}

const op_tensor_t op_qk_norm_rope_tensors[] = {
    {.name = "qkv", .shape = "T,N,D", .kind = OP_FLOAT},  {.name = "q_weight", .shape = "D", .kind = OP_FLOAT},
    {.name = "k_weight", .shape = "D", .kind = OP_FLOAT}, {.name = "positions", .shape = "T", .kind = OP_WIDE},
    {.name = "cos_sin", .shape = "P,R", .kind = OP_F32},  {0},
};
const op_key_t op_qk_norm_rope_keys[] = {
    {.name = "eps", .kind = OP_POSITIVE, .initial = "1e-6"},
    {.name = "style", .kind = OP_CHOICE, .choices = STYLES, .initial = "neox"},
    {.name = "heads", .kind = OP_COUNT, .required = true},
    {.name = "kv_heads", .kind = OP_COUNT, .required = true},
    {.name = "rotary_dim", .kind = OP_COUNT},
    {0},
};

epmoe_status_t op_qk_norm_rope_run(op_context_t *context)
{
    const op_value_t *qkv = op_tensor(context, "qkv"), *positions = op_tensor(context, "positions");
    const op_value_t *q_weight = op_tensor(context, "q_weight"), *k_weight = op_tensor(context, "k_weight");
    epmoe_qk_norm_rope_args_t args = EPMOE_QK_NORM_ROPE_ARGS_INIT;
    args.backend = op_backend(context);
    args.num_tokens = op_dim(context, 'T');
    args.num_heads = op_number(context, "heads");
    args.num_kv_heads = op_number(context, "kv_heads");
    args.head_dim = op_dim(context, 'D');
    args.style = (epmoe_rope_style_t)op_number(context, "style");
    args.dtype = qkv->dtype;
    args.weight_dtype = q_weight->dtype;
    args.q_weight = q_weight->data;
    args.k_weight = k_weight->data;
    args.eps = op_real(context, "eps");
    args.positions_dtype = positions->dtype;
    args.positions = positions->data;
    args.cos_sin = op_tensor(context, "cos_sin")->data;
    args.num_positions = op_dim(context, 'P');
    if ((int64_t)args.num_heads + 2 * (int64_t)args.num_kv_heads != op_dim(context, 'N'))
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                           "heads is %d, kv_heads is %d: expected heads + 2 * kv_heads = %d, the heads of qkv",
                           args.num_heads, args.num_kv_heads, op_dim(context, 'N'));
    if (k_weight->dtype != q_weight->dtype)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                           "tensor 'k_weight' has dtype %s: expected that of q_weight, %s",
                           epmoe_dtype_string(k_weight->dtype), epmoe_dtype_string(q_weight->dtype));
    EPMOEI_CHECK(take_rotary_dim(context, args.head_dim, &args.rotary_dim));
    args.qkv = op_output_copy(context, "qkv", qkv);
    return args.qkv ? epmoe_qk_norm_rope(&args, NULL) : OP_NO_MEMORY;
}

/* ---------------------------------------------------------------------------------------------------- cache_write */

const op_tensor_t op_cache_write_tensors[] = {
    {.name = "key", .shape = "T,K,D", .kind = OP_FLOAT},
    {.name = "value", .shape = "T,K,D", .kind = OP_FLOAT},
    {.name = "key_cache", .shape = "as layout says", .kind = OP_NUMBERS, .any_shape = true},
    {.name = "value_cache", .shape = "as layout says", .kind = OP_NUMBERS, .any_shape = true},
    {.name = "slots", .shape = "N", .kind = OP_WIDE},
    {.name = "k_scale", .shape = "1", .kind = OP_F32, .optional = true},
    {.name = "v_scale", .shape = "1", .kind = OP_F32, .optional = true},
    {0},
};
const op_key_t op_cache_write_keys[] = {
    {.name = "layout", .kind = OP_CHOICE, .choices = OP_CACHE_LAYOUTS, .initial = "v1"},
    {.name = "kv", .kind = OP_CHOICE, .choices = "auto,fp8", .initial = "auto"},
    {0},
};

epmoe_status_t op_match_cache(const char *name, const op_value_t *tensor, int32_t num_dims, int64_t *const *shape,
                              const char *expected)
{
    bool ok = tensor->num_dims == num_dims;
    for (int32_t i = 0; i < num_dims && ok; i++) {
        if (*shape[i] < 0) *shape[i] = tensor->shape[i];
        ok = *shape[i] == tensor->shape[i] && tensor->shape[i] <= INT32_MAX;
    }
    if (ok) return EPMOE_OK;
    char got[160] = "";
    size_t used = 0;
    for (int32_t i = 0; i < tensor->num_dims && used < sizeof got; i++)
        used += (size_t)snprintf(got + used, sizeof got - used, "%s%lld", i ? "," : "", (long long)tensor->shape[i]);
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "tensor '%s' has shape [%s]: expected %s", name, got, expected);
}

/* Number and size of the blocks, and key_pack, from the shapes of the two caches. */
static epmoe_status_t take_cache_shape(const op_context_t *context, epmoe_cache_write_args_t *args)
{
    const op_value_t *key = op_tensor(context, "key_cache"), *value = op_tensor(context, "value_cache");
    int64_t heads = args->num_kv_heads, d = args->head_dim, blocks = -1, size = -1, packs = -1, pack = -1;
    if (args->layout == EPMOE_CACHE_LAYOUT_V1) {
        EPMOEI_CHECK(op_match_cache("key_cache", key, 5, (int64_t *const[]){&blocks, &heads, &packs, &size, &pack},
                                    "[B,Hk,D/x,bs,x]"));
        if (packs * pack != d)
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                               "tensor 'key_cache' has %lld packs of %lld: expected the head's %lld columns",
                               (long long)packs, (long long)pack, (long long)d);
        EPMOEI_CHECK(
            op_match_cache("value_cache", value, 4, (int64_t *const[]){&blocks, &heads, &d, &size}, "[B,Hk,D,bs]"));
        args->key_pack = (int32_t)pack;
    } else {
        bool nhd = args->layout == EPMOE_CACHE_LAYOUT_NHD;
        int64_t *const shape[] = {&blocks, nhd ? &size : &heads, nhd ? &heads : &size, &d};
        const char *expected = nhd ? "[B,bs,Hk,D]" : "[B,Hk,bs,D]";
        EPMOEI_CHECK(op_match_cache("key_cache", key, 4, shape, expected));
        EPMOEI_CHECK(op_match_cache("value_cache", value, 4, shape, expected));
    }
    args->num_blocks = (int32_t)blocks;
    args->block_size = (int32_t)size;
    return EPMOE_OK;
}

static epmoe_status_t check_cache_dtype(const op_context_t *context, const char *name, epmoe_dtype_t dtype,
                                        epmoe_dtype_t expected)
{
    if (dtype == expected) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "tensor '%s' has dtype %s: expected %s with kv=%s", name,
                       epmoe_dtype_string(dtype), epmoe_dtype_string(expected),
                       op_number(context, "kv") ? "fp8" : "auto");
}

epmoe_status_t op_cache_write_run(op_context_t *context)
{
    const op_value_t *key = op_tensor(context, "key"), *slots = op_tensor(context, "slots");
    const op_value_t *key_cache = op_tensor(context, "key_cache"), *value_cache = op_tensor(context, "value_cache");
    epmoe_cache_write_args_t args = EPMOE_CACHE_WRITE_ARGS_INIT;
    args.backend = op_backend(context);
    args.num_tokens = op_dim(context, 'N');
    args.num_kv_heads = op_dim(context, 'K');
    args.head_dim = op_dim(context, 'D');
    args.layout = (epmoe_cache_layout_t)op_number(context, "layout");
    args.dtype = key->dtype;
    args.cache_dtype = op_number(context, "kv") ? EPMOE_F8_E4M3 : key->dtype;
    args.key = key->data;
    args.value = op_tensor(context, "value")->data;
    args.slots_dtype = slots->dtype;
    args.slots = slots->data;
    args.k_scale = op_tensor(context, "k_scale")->data;
    args.v_scale = op_tensor(context, "v_scale")->data;
    if (args.num_tokens > op_dim(context, 'T'))
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "tensor 'slots' has %d elements: expected at most the %d rows",
                           args.num_tokens, op_dim(context, 'T'));
    EPMOEI_CHECK(check_cache_dtype(context, "value", op_tensor(context, "value")->dtype, key->dtype));
    EPMOEI_CHECK(check_cache_dtype(context, "key_cache", key_cache->dtype, args.cache_dtype));
    EPMOEI_CHECK(check_cache_dtype(context, "value_cache", value_cache->dtype, args.cache_dtype));
    EPMOEI_CHECK(take_cache_shape(context, &args));
    args.key_cache = op_output_copy(context, "key_cache", key_cache);
    args.value_cache = op_output_copy(context, "value_cache", value_cache);
    return args.key_cache && args.value_cache ? epmoe_cache_write(&args, NULL) : OP_NO_MEMORY;
}
