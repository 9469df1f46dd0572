#include "base/fp8.h"
#include "dense_layers/cache_write.h"
#include "dense_layers/dense_check.h"
#include "kernels/row_blocks.h"

#include <omp.h>

/* Columns [first, first + cols) of a head, as the cache stores them: the source itself, or its codes. */
static const void *stored_columns(const epmoe_cache_write_args_t *args, const void *source, int64_t element,
                                  int64_t cols, const float *scale, uint8_t *codes)
{
    const void *from = epmoei_at(source, args->dtype, element);
    if (args->cache_dtype != EPMOE_F8_E4M3) return from;
    float values[EPMOEI_BLOCK_COLS], divisor = scale ? epmoei_load(scale, EPMOE_F32, 0) : 1.0f;
    epmoei_to_f32(values, from, args->dtype, cols);
#pragma omp simd
    for (int64_t i = 0; i < cols; i++) codes[i] = epmoei_f32_to_e4m3(values[i] / divisor);
    return codes;
}

/* Runs of `run` elements, `stride` elements apart in the cache; the last may be shorter. */
static void scatter_runs(char *to, const char *from, int64_t cols, int64_t run, int64_t stride, int64_t size)
{
    if (run * size == 16 && cols % run == 0) {
        for (int64_t i = 0; i < cols / run; i++) memcpy(to + i * stride * size, from + 16 * i, 16);
        return;
    }
    for (int64_t i = 0; i < cols; i += run)
        memcpy(to + i / run * stride * size, from + i * size, (size_t)(epmoei_min64(run, cols - i) * size));
}

/* The same of single elements. */
static void scatter_elements(char *to, const char *from, int64_t cols, int64_t stride, int64_t size)
{
    switch (size) {
    case 1:
        for (int64_t i = 0; i < cols; i++) to[i * stride] = from[i];
        break;
    case 2:
        for (int64_t i = 0; i < cols; i++) memcpy(to + 2 * i * stride, from + 2 * i, 2);
        break;
    default:
        for (int64_t i = 0; i < cols; i++) memcpy(to + 4 * i * stride, from + 4 * i, 4);
    }
}

/* Head h of a key or value row that begins at element `row`, to place `place` of the block that begins at `block`. */
static void write_head(const epmoe_cache_write_args_t *args, void *cache, int64_t block, const void *source,
                       int64_t row, const float *scale, int64_t h, int64_t place, bool is_key)
{
    uint8_t codes[EPMOEI_BLOCK_COLS];
    int64_t d = args->head_dim, s = args->block_size, x = args->key_pack, size = epmoe_dtype_size(args->cache_dtype);
    bool packed = is_key && args->layout == EPMOE_CACHE_LAYOUT_V1;
    /* A piece of a packed key is whole packs, or lies within one. */
    int64_t most = packed && x <= EPMOEI_BLOCK_COLS ? EPMOEI_BLOCK_COLS / x * x : EPMOEI_BLOCK_COLS;
    for (int64_t first = 0, cols; first < d; first += cols) {
        cols = epmoei_min64(most, d - first);
        if (packed && x > most) cols = epmoei_min64(cols, x - first % x);
        const char *from = stored_columns(args, source, row + h * d + first, cols, scale, codes);
        char *to = (char *)cache + block * size;
        if (args->layout == EPMOE_CACHE_LAYOUT_NHD)
            memcpy(to + ((place * args->num_kv_heads + h) * d + first) * size, from, (size_t)(cols * size));
        else if (args->layout == EPMOE_CACHE_LAYOUT_HND)
            memcpy(to + ((h * s + place) * d + first) * size, from, (size_t)(cols * size));
        else if (!packed)
            scatter_elements(to + ((h * d + first) * s + place) * size, from, cols, s, size);
        else
            scatter_runs(to + ((h * (d / x) + first / x) * s * x + place * x + first % x) * size, from, cols, x, s * x,
                         size);
    }
}

static void write_token(const epmoe_cache_write_args_t *args, int64_t t, int64_t slot)
{
    int64_t block = slot / args->block_size, place = slot % args->block_size;
    for (int64_t h = 0; h < args->num_kv_heads; h++) {
        write_head(args, args->key_cache, block * args->key_block_stride, args->key, t * args->key_stride,
                   args->k_scale, h, place, true);
        if (!args->value) continue;
        write_head(args, args->value_cache, block * args->value_block_stride, args->value, t * args->value_stride,
                   args->v_scale, h, place, false);
    }
}

epmoe_status_t epmoei_cache_write_cpu(const epmoe_cache_write_args_t *args, epmoe_stream_t stream)
{
    (void)stream;
    EPMOEI_CHECK(epmoei_cache_write_check_values(args));
    int64_t elements = 2 * (int64_t)args->num_tokens * args->num_kv_heads * args->head_dim;
    /* A block belongs to one thread, which takes its tokens in order: the later of two tokens for one slot wins. */
#pragma omp parallel if (elements >= EPMOEI_MIN_PARALLEL_ELEMENTS)
    {
        int64_t threads = omp_get_num_threads(), me = omp_get_thread_num();
        for (int64_t t = 0; t < args->num_tokens; t++) {
            int64_t slot = epmoei_index(args->slots, args->slots_dtype, t);
            if (slot >= 0 && slot / args->block_size % threads == me) write_token(args, t, slot);
        }
    }
    return EPMOE_OK;
}
