#include "dense_layers/rope_cache_write.h"

#include "dense_layers/cache_write.h"
#include "dense_layers/dense_check.h"
#include "dense_layers/rope.h"

static epmoe_status_t check_same(const char *name, int64_t of_cache, int64_t of_rope)
{
    if (of_cache == of_rope) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "cache.%s is %lld: expected that of rope, %lld", name,
                       (long long)of_cache, (long long)of_rope);
}

epmoe_status_t epmoei_rope_cache_write_check(const epmoe_rope_args_t *rope, const epmoe_cache_write_args_t *cache,
                                             epmoe_rope_args_t *rope_out, epmoe_cache_write_args_t *cache_out)
{
    epmoe_cache_write_args_t own;
    EPMOEI_CHECK(epmoei_rope_check(rope, rope_out));
    EPMOEI_CHECK(epmoei_copy_sized(&own, sizeof own, cache, "epmoe_cache_write_args_t"));
    EPMOEI_CHECK(epmoei_check_range("rope.num_kv_heads", rope_out->num_kv_heads, 1, INT32_MAX));
    EPMOEI_CHECK(check_same("backend", own.backend, rope_out->backend));
    EPMOEI_CHECK(check_same("num_tokens", own.num_tokens, rope_out->num_tokens));
    EPMOEI_CHECK(check_same("num_kv_heads", own.num_kv_heads, rope_out->num_kv_heads));
    EPMOEI_CHECK(check_same("head_dim", own.head_dim, rope_out->head_dim));
    EPMOEI_CHECK(check_same("dtype", own.dtype, rope_out->dtype));
    if (rope_out->head_stride != rope_out->head_dim)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "rope.head_stride is %lld: expected head_dim %d",
                           (long long)rope_out->head_stride, rope_out->head_dim);
    if (own.key && own.key != rope_out->k)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "cache.key is %p: expected NULL or rope.k, %p", own.key,
                           rope_out->k);
    own.key = rope_out->k;
    own.key_stride = rope_out->k_stride;
    return epmoei_cache_write_check(&own, cache_out);
}

epmoei_floor_t epmoei_rope_cache_write_floor(const epmoe_rope_args_t *rope, const epmoe_cache_write_args_t *cache)
{
    epmoei_floor_t floor = epmoei_rope_floor(rope), write = epmoei_cache_write_floor(cache);
    double again = (double)rope->num_tokens * rope->num_kv_heads * rope->rotary_dim * epmoe_dtype_size(rope->dtype);
    return (epmoei_floor_t){.bytes = floor.bytes + write.bytes - again, .flops = floor.flops};
}

epmoe_status_t epmoei_rope_cache_write_ref(const epmoe_rope_args_t *rope, const epmoe_cache_write_args_t *cache,
                                           epmoe_stream_t stream)
{
    EPMOEI_CHECK(epmoei_cache_write_check_values(cache));
    EPMOEI_CHECK(epmoei_rope_ref(rope, stream));
    return epmoei_cache_write_ref(cache, stream);
}

epmoe_status_t epmoei_rope_cache_write_cpu(const epmoe_rope_args_t *rope, const epmoe_cache_write_args_t *cache,
                                           epmoe_stream_t stream)
{
    EPMOEI_CHECK(epmoei_cache_write_check_values(cache));
    EPMOEI_CHECK(epmoei_rope_cpu(rope, stream));
    return epmoei_cache_write_cpu(cache, stream);
}

epmoe_status_t epmoe_rope_cache_write(const epmoe_rope_args_t *rope, const epmoe_cache_write_args_t *cache,
                                      epmoe_stream_t stream)
{
    epmoe_rope_args_t rotation;
    epmoe_cache_write_args_t write;
    const epmoei_dense_table_t *table;
    EPMOEI_CHECK(epmoei_rope_cache_write_check(rope, cache, &rotation, &write));
    EPMOEI_CHECK(epmoei_dense_kernels(rotation.backend, &table));
    if (rotation.num_tokens == 0) return EPMOE_OK;
    if (!table->rope_cache_write)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "epmoe_rope_cache_write has no kernel on this backend");
    return table->rope_cache_write(&rotation, &write, stream);
}
