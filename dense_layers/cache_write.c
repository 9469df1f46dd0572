#include "dense_layers/cache_write.h"

#include "dense_layers/dense_check.h"

static epmoe_status_t check_cache_dtype(epmoe_cache_write_args_t *out)
{
    EPMOEI_CHECK(epmoei_check_float_dtype("dtype", out->dtype));
    if (out->cache_dtype == EPMOE_DTYPE_NONE) out->cache_dtype = out->dtype;
    if (out->cache_dtype == out->dtype || out->cache_dtype == EPMOE_F8_E4M3) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "cache_dtype is %d (%s): expected dtype %s or f8_e4m3",
                       (int)out->cache_dtype, epmoe_dtype_string(out->cache_dtype), epmoe_dtype_string(out->dtype));
}

static epmoe_status_t check_layout(epmoe_cache_write_args_t *out)
{
    EPMOEI_CHECK(epmoei_check_range("layout", (int32_t)out->layout, EPMOE_CACHE_LAYOUT_V1, EPMOE_CACHE_LAYOUT_HND));
    EPMOEI_CHECK(epmoei_check_range("key_pack", out->key_pack, 0, INT32_MAX));
    if (out->key_pack == 0) out->key_pack = 16 / epmoe_dtype_size(out->cache_dtype);
    if (out->layout == EPMOE_CACHE_LAYOUT_V1 && out->head_dim % out->key_pack)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "head_dim is %d: expected a multiple of key_pack %d with V1",
                           out->head_dim, out->key_pack);
    return EPMOE_OK;
}

epmoe_status_t epmoei_cache_write_check(const epmoe_cache_write_args_t *args, epmoe_cache_write_args_t *out)
{
    EPMOEI_CHECK(epmoei_copy_sized(out, sizeof *out, args, "epmoe_cache_write_args_t"));
    EPMOEI_CHECK(epmoei_check_range("num_tokens", out->num_tokens, 0, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_range("num_kv_heads", out->num_kv_heads, 1, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_range("head_dim", out->head_dim, 1, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_range("num_blocks", out->num_blocks, 0, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_range("block_size", out->block_size, 1, INT32_MAX));
    EPMOEI_CHECK(check_cache_dtype(out));
    EPMOEI_CHECK(check_layout(out));
    EPMOEI_CHECK(epmoei_check_index_dtype("slots_dtype", &out->slots_dtype));
    EPMOEI_CHECK(epmoei_check_volume("a cache block", out->num_kv_heads, out->block_size, out->head_dim));
    int64_t row = (int64_t)out->num_kv_heads * out->head_dim, block = row * out->block_size;
    EPMOEI_CHECK(epmoei_check_stride("key_stride", &out->key_stride, row, out->num_tokens));
    EPMOEI_CHECK(epmoei_check_stride("value_stride", &out->value_stride, row, out->num_tokens));
    EPMOEI_CHECK(epmoei_check_stride("key_block_stride", &out->key_block_stride, block, out->num_blocks));
    EPMOEI_CHECK(epmoei_check_stride("value_block_stride", &out->value_block_stride, block, out->num_blocks));
    if (out->num_tokens == 0) return EPMOE_OK;
    EPMOEI_CHECK(epmoei_check_pointer("key", out->key));
    if (out->value_cache) EPMOEI_CHECK(epmoei_check_pointer("value", out->value));
    EPMOEI_CHECK(epmoei_check_pointer("slots", out->slots));
    if (out->num_blocks == 0) return EPMOE_OK;
    EPMOEI_CHECK(epmoei_check_pointer("key_cache", out->key_cache));
    return out->value ? epmoei_check_pointer("value_cache", out->value_cache) : EPMOE_OK;
}

epmoe_status_t epmoei_cache_write_check_values(const epmoe_cache_write_args_t *args)
{
    EPMOEI_CHECK(epmoei_check_scale("k_scale", args->k_scale));
    EPMOEI_CHECK(epmoei_check_scale("v_scale", args->v_scale));
    return epmoei_check_indices("slots", args->slots, args->slots_dtype, args->num_tokens, -1,
                                (int64_t)args->num_blocks * args->block_size - 1);
}

epmoei_floor_t epmoei_cache_write_floor(const epmoe_cache_write_args_t *args)
{
    double values = (args->key && !args->value ? 1.0 : 2.0) * args->num_kv_heads * args->head_dim;
    double bytes = values * (epmoe_dtype_size(args->dtype) + epmoe_dtype_size(args->cache_dtype));
    return (epmoei_floor_t){.bytes = args->num_tokens * (bytes + epmoe_dtype_size(args->slots_dtype))};
}

epmoe_status_t epmoe_cache_write(const epmoe_cache_write_args_t *args, epmoe_stream_t stream)
{
    epmoe_cache_write_args_t checked;
    const epmoei_dense_table_t *table;
    EPMOEI_CHECK(epmoei_cache_write_check(args, &checked));
    EPMOEI_CHECK(epmoei_dense_kernels(checked.backend, &table));
    if (checked.num_tokens == 0) return EPMOE_OK;
    if (!table->cache_write)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "epmoe_cache_write has no kernel on this backend");
    return table->cache_write(&checked, stream);
}
