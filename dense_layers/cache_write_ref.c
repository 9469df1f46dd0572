#include "base/fp8.h"
#include "dense_layers/cache_write.h"
#include "dense_layers/dense_check.h"

/* Where column i of head h at place `place` lies in its block. */
static int64_t key_element(const epmoe_cache_write_args_t *args, int64_t h, int64_t place, int64_t i)
{
    int64_t heads = args->num_kv_heads, d = args->head_dim, s = args->block_size, x = args->key_pack;
    switch (args->layout) {
    case EPMOE_CACHE_LAYOUT_NHD: return (place * heads + h) * d + i;
    case EPMOE_CACHE_LAYOUT_HND: return (h * s + place) * d + i;
    default: return ((h * (d / x) + i / x) * s + place) * x + i % x;
    }
}

static int64_t value_element(const epmoe_cache_write_args_t *args, int64_t h, int64_t place, int64_t i)
{
    if (args->layout == EPMOE_CACHE_LAYOUT_V1) return (h * args->head_dim + i) * args->block_size + place;
    return key_element(args, h, place, i);
}

/* Element `from` of source to element `to` of the cache. */
static void write(const epmoe_cache_write_args_t *args, void *cache, int64_t to, const void *source, int64_t from,
                  const float *scale)
{
    int32_t size = epmoe_dtype_size(args->dtype);
    if (args->cache_dtype != EPMOE_F8_E4M3)
        memcpy((char *)cache + to * size, (const char *)source + from * size, (size_t)size);
    else
        ((uint8_t *)cache)[to] = epmoei_f32_to_e4m3(epmoei_load(source, args->dtype, from) /
                                                    (scale ? epmoei_load(scale, EPMOE_F32, 0) : 1.0f));
}

epmoe_status_t epmoei_cache_write_ref(const epmoe_cache_write_args_t *args, epmoe_stream_t stream)
{
    (void)stream;
    EPMOEI_CHECK(epmoei_cache_write_check_values(args));
    for (int64_t t = 0; t < args->num_tokens; t++) {
        int64_t slot = epmoei_index(args->slots, args->slots_dtype, t);
        if (slot < 0) continue;
        int64_t block = slot / args->block_size, place = slot % args->block_size;
        for (int64_t h = 0; h < args->num_kv_heads; h++)
            for (int64_t i = 0; i < args->head_dim; i++) {
                int64_t column = h * args->head_dim + i;
                write(args, args->key_cache, block * args->key_block_stride + key_element(args, h, place, i), args->key,
                      t * args->key_stride + column, args->k_scale);
                if (!args->value) continue;
                write(args, args->value_cache, block * args->value_block_stride + value_element(args, h, place, i),
                      args->value, t * args->value_stride + column, args->v_scale);
            }
    }
    return EPMOE_OK;
}
