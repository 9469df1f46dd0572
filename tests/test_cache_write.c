/* Writing into a paged KV cache: layouts by nested loops, padding slots, E4M3, strides, offsets above 2^31. */
#include "dense_layers/cache_write.h"
#include "tests/e4m3_oracle.h"
#include "tests/op_testing.h"

#include <math.h>
#include <stdlib.h>
#include <sys/mman.h>

static epmoe_cache_write_args_t make(int32_t num_tokens, int32_t kv_heads, int32_t head_dim, int32_t num_blocks,
                                     int32_t block_size, epmoe_cache_layout_t layout, epmoe_dtype_t dtype)
{
    epmoe_cache_write_args_t args = EPMOE_CACHE_WRITE_ARGS_INIT;
    args.num_tokens = num_tokens;
    args.num_kv_heads = kv_heads;
    args.head_dim = head_dim;
    args.num_blocks = num_blocks;
    args.block_size = block_size;
    args.layout = layout;
    args.dtype = dtype;
    return args;
}

/* Runs the public entry on the caller's caches of key_bytes and value_bytes and both kernels on copies. */
static void run(const epmoe_cache_write_args_t *args, int64_t key_bytes, int64_t value_bytes)
{
    epmoe_status_t (*const kernels[])(const epmoe_cache_write_args_t *, epmoe_stream_t) = {epmoei_cache_write_ref,
                                                                                           epmoei_cache_write_cpu};
    void *key[2], *value[2];
    for (int i = 0; i < 2; i++) {
        epmoe_cache_write_args_t own;
        cr_assert_eq(epmoei_cache_write_check(args, &own), EPMOE_OK, "%s", epmoe_last_error());
        own.key_cache = memcpy(key[i] = testing_buffer(key_bytes, 0), args->key_cache, (size_t)key_bytes);
        own.value_cache = memcpy(value[i] = testing_buffer(value_bytes, 0), args->value_cache, (size_t)value_bytes);
        cr_assert_eq(kernels[i](&own, NULL), EPMOE_OK, "%s", epmoe_last_error());
        cr_assert(testing_guards_intact(key[i]) && testing_guards_intact(value[i]));
    }
    cr_assert_eq(epmoe_cache_write(args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    for (int i = 0; i < 2; i++) {
        cr_assert_eq(memcmp(key[i], args->key_cache, (size_t)key_bytes), 0, "keys of kernel %d differ", i);
        cr_assert_eq(memcmp(value[i], args->value_cache, (size_t)value_bytes), 0, "values of kernel %d differ", i);
        testing_buffer_free(key[i]), testing_buffer_free(value[i]);
    }
}

/* Without values the keys arrive as with them; one of value and value_cache alone is a mistake. */
Test(cache_write, keys_alone)
{
    enum { D = 8, S = 4, CACHE = 2 * S * D * 4 };
    for (int layout = EPMOE_CACHE_LAYOUT_V1; layout <= EPMOE_CACHE_LAYOUT_HND; layout++) {
        const int64_t slots[] = {6, -1, 1};
        float rows[3 * D], *with = testing_buffer(CACHE, 0), *values = testing_buffer(CACHE, 0);
        for (int i = 0; i < 3 * D; i++) rows[i] = (float)(i + 1);
        epmoe_cache_write_args_t args = make(3, 1, D, 2, S, (epmoe_cache_layout_t)layout, EPMOE_F32);
        args.key = args.value = rows;
        args.slots = slots;
        args.key_cache = with, args.value_cache = values;
        cr_assert_eq(epmoe_cache_write(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
        epmoe_status_t (*const kernels[])(const epmoe_cache_write_args_t *, epmoe_stream_t) = {epmoei_cache_write_ref,
                                                                                               epmoei_cache_write_cpu};
        for (int i = 0; i < 2; i++) {
            float *keys = testing_buffer(CACHE, 0);
            epmoe_cache_write_args_t own;
            args.key_cache = keys;
            args.value = args.value_cache = NULL;
            cr_assert_eq(epmoei_cache_write_check(&args, &own), EPMOE_OK, "%s", epmoe_last_error());
            cr_assert_eq(epmoei_cache_write_floor(&own).bytes, 3 * (D * (4 + 4) + 8));
            cr_assert_eq(kernels[i](&own, NULL), EPMOE_OK, "%s", epmoe_last_error());
            cr_assert_eq(memcmp(keys, with, CACHE), 0, "layout %d, kernel %d", layout, i);
            args.value = rows;
            cr_assert_eq(epmoe_cache_write(&args, NULL), EPMOE_ERROR_INVALID_ARGUMENT);
            testing_buffer_free(keys);
        }
        testing_buffer_free(with);
        testing_buffer_free(values);
    }
}

/* Two blocks of four slots, one head of 8; slot -1 and rows behind the slots are NaN and must not arrive. */
Test(cache_write, padding_slots_and_rows_are_ignored)
{
    enum { D = 8, S = 4, CACHE = 2 * S * D };
    const epmoe_cache_layout_t layouts[] = {EPMOE_CACHE_LAYOUT_V1, EPMOE_CACHE_LAYOUT_NHD, EPMOE_CACHE_LAYOUT_HND};
    const int64_t slots[] = {0, -1, 5};
    const int32_t narrow[] = {0, -1, 5};
    for (int l = 0; l < 3; l++)
        for (int fp8 = 0; fp8 < 2; fp8++)
            for (int wide = 0; wide < 2; wide++) {
                float key[5 * D], value[5 * D];
                for (int i = 0; i < 5 * D; i++) {
                    bool used = i / D == 0 || i / D == 2;
                    key[i] = used ? (float)(i + 1) : NAN, value[i] = used ? (float)-(i + 1) : NAN;
                }
                int64_t size = fp8 ? 1 : 4;
                void *keys = testing_buffer(CACHE * size, 0), *values = testing_buffer(CACHE * size, 0);
                for (int i = 0; i < CACHE; i++) {
                    if (fp8)
                        ((uint8_t *)keys)[i] = ((uint8_t *)values)[i] = 0x55;
                    else
                        ((float *)keys)[i] = ((float *)values)[i] = 777;
                }
                epmoe_cache_write_args_t args = make(3, 1, D, 2, S, layouts[l], EPMOE_F32);
                args.cache_dtype = fp8 ? EPMOE_F8_E4M3 : EPMOE_DTYPE_NONE;
                args.key_pack = 4;
                args.key = key, args.value = value, args.key_cache = keys, args.value_cache = values;
                args.slots = wide ? (const void *)slots : narrow;
                args.slots_dtype = wide ? EPMOE_DTYPE_NONE : EPMOE_I32;
                run(&args, CACHE * size, CACHE * size);
                for (int block = 0; block < 2; block++)
                    for (int place = 0; place < S; place++)
                        for (int i = 0; i < D; i++) {
                            int slot = block * S + place, dense = slot * D + i;
                            int k = l ? dense : ((block * 2 + i / 4) * S + place) * 4 + i % 4;
                            int v = l ? dense : (block * D + i) * S + place;
                            int row = slot == 0 ? 0 : slot == 5 ? 2 : -1;
                            double key_is = fp8 ? e4m3_value(((uint8_t *)keys)[k]) : (double)((float *)keys)[k];
                            double value_is = fp8 ? e4m3_value(((uint8_t *)values)[v]) : (double)((float *)values)[v];
                            double kept = fp8 ? e4m3_value(0x55) : 777;
                            double number = row < 0 ? kept : row * D + i + 1;
                            if (fp8) number = e4m3_value(e4m3_nearest(number));
                            cr_assert_eq(key_is, number, "layout %d slot %d column %d", l, slot, i);
                            cr_assert_eq(value_is, row < 0 ? number : -number, "layout %d slot %d column %d", l, slot,
                                         i);
                        }
                cr_assert(testing_guards_intact(keys) && testing_guards_intact(values));
                testing_buffer_free(keys), testing_buffer_free(values);
            }
}

/* Where an element lies, as a walk over the dimensions of the layout in order, outermost first. */
static int64_t walk(int dims, const int64_t *sizes, const int64_t *at)
{
    int64_t element = 0;
    for (int i = 0; i < dims; i++) element = element * sizes[i] + at[i];
    return element;
}

static int64_t place_of(const epmoe_cache_write_args_t *args, bool is_key, int64_t pack, int64_t slot, int64_t h,
                        int64_t i)
{
    int64_t s = args->block_size, heads = args->num_kv_heads, d = args->head_dim, place = slot % s;
    int64_t stride = is_key ? args->key_block_stride : args->value_block_stride, start = slot / s * stride;
    if (args->layout == EPMOE_CACHE_LAYOUT_NHD)
        return start + walk(3, (const int64_t[]){s, heads, d}, (const int64_t[]){place, h, i});
    if (args->layout == EPMOE_CACHE_LAYOUT_HND)
        return start + walk(3, (const int64_t[]){heads, s, d}, (const int64_t[]){h, place, i});
    if (!is_key) return start + walk(3, (const int64_t[]){heads, d, s}, (const int64_t[]){h, i, place});
    return start +
           walk(4, (const int64_t[]){heads, d / pack, s, pack}, (const int64_t[]){h, i / pack, place, i % pack});
}

Test(cache_write, random_shapes)
{
    testing_rng_t rng = testing_rng(testing_seed());
    const int32_t dims[] = {16, 64, 128, 80, 1056, 2112};
    for (int round = 0; round < 108; round++) {
        epmoe_cache_layout_t layout = (epmoe_cache_layout_t)(round % 3);
        epmoe_dtype_t dtype = op_dtypes[round / 3 % 3].dtype;
        bool fp8 = round / 9 % 2;
        int32_t d = dims[round / 18], heads = testing_range(&rng, 1, 3), tokens = testing_range(&rng, 1, 9);
        int32_t blocks = testing_range(&rng, 2, 4), s = testing_range(&rng, 1, 2) * 8 + testing_range(&rng, 0, 1);
        int32_t size = epmoe_dtype_size(dtype), cache_size = fp8 ? 1 : size;
        int64_t row = (int64_t)heads * d, block = row * s;
        epmoe_cache_write_args_t args = make(tokens, heads, d, blocks, s, layout, dtype);
        args.cache_dtype = fp8 ? EPMOE_F8_E4M3 : EPMOE_DTYPE_NONE;
        args.key_pack = testing_range(&rng, 0, 1) ? 0 : testing_range(&rng, 0, 1) ? d : 8;
        int64_t pack = args.key_pack ? args.key_pack : 16 / cache_size;
        args.key_stride = row + 3, args.value_stride = row;
        args.key_block_stride = block + 11, args.value_block_stride = block;
        /* Distinct slots and some -1. */
        int64_t slots[9];
        for (int t = 0; t < tokens; t++) {
            bool again = true;
            while (again) {
                slots[t] = testing_range(&rng, 0, 4) ? testing_range(&rng, 0, blocks * s - 1) : -1;
                again = false;
                for (int u = 0; u < t; u++) again |= slots[t] >= 0 && slots[u] == slots[t];
            }
        }
        void *key = testing_buffer(tokens * args.key_stride * size, size);
        void *value = testing_buffer(tokens * row * size, size);
        testing_fill_normal(&rng, key, dtype, tokens * args.key_stride, 20);
        testing_fill_normal(&rng, value, dtype, tokens * row, 200);
        int64_t key_bytes = blocks * args.key_block_stride * cache_size, value_bytes = blocks * block * cache_size;
        uint8_t *keys = testing_buffer(key_bytes, cache_size), *values = testing_buffer(value_bytes, cache_size);
        const float k_scale = 0.37f, v_scale = 3.1f;
        args.key = key, args.value = value, args.key_cache = keys, args.value_cache = values, args.slots = slots;
        if (testing_range(&rng, 0, 1)) args.k_scale = &k_scale, args.v_scale = &v_scale;
        run(&args, key_bytes, value_bytes);
        /* What was written is as it should be; marked off, all the rest is poison. */
        uint8_t *seen[2] = {calloc((size_t)key_bytes, 1), calloc((size_t)value_bytes, 1)};
        for (int t = 0; t < tokens; t++)
            for (int64_t e = 0; e < 2 * row && slots[t] >= 0; e++) {
                bool is_key = e < row;
                int64_t h = e % row / d, i = e % row % d, from = t * (is_key ? args.key_stride : row) + e % row;
                int64_t to = place_of(&args, is_key, pack, slots[t], h, i);
                const char *source = is_key ? key : value;
                const uint8_t *cache = is_key ? keys : values;
                if (fp8) {
                    float scale = !args.k_scale ? 1 : is_key ? k_scale : v_scale;
                    cr_assert_eq(cache[to], e4m3_nearest((double)(epmoei_load(source, dtype, from) / scale)));
                } else
                    cr_assert_eq(memcmp(cache + to * size, source + from * size, (size_t)size), 0,
                                 "layout %d %s token %d head %lld column %lld", (int)layout, is_key ? "key" : "value",
                                 t, (long long)h, (long long)i);
                memset(seen[!is_key] + to * cache_size, 1, (size_t)cache_size);
            }
        for (int part = 0; part < 2; part++)
            for (int64_t b = 0; b < (part ? value_bytes : key_bytes); b++)
                cr_assert(seen[part][b] || testing_is_poison(part ? values : keys, b, 1), "byte %lld", (long long)b);
        cr_assert(testing_guards_intact(keys) && testing_guards_intact(values));
        testing_buffer_free(key), testing_buffer_free(value), testing_buffer_free(keys), testing_buffer_free(values);
        free(seen[0]), free(seen[1]);
    }
}

static void encode(const float *values, int32_t n, const float *scale, uint8_t *codes)
{
    epmoe_cache_write_args_t args = make(1, 1, n, 1, 1, EPMOE_CACHE_LAYOUT_NHD, EPMOE_F32);
    uint8_t *unused = testing_buffer(n, 0);
    const int64_t slot = 0;
    args.cache_dtype = EPMOE_F8_E4M3;
    args.key = args.value = values;
    args.key_cache = codes, args.value_cache = unused, args.slots = &slot;
    args.k_scale = scale;
    run(&args, n, n);
    testing_buffer_free(unused);
}

Test(cache_write, e4m3_codes)
{
    const float values[] = {448, 464,     465,      1000,      -1000, INFINITY, NAN,       447.9f, 12,
                            300, 0x1p-9f, 0x1p-10f, 0x1.8p-9f, 0,     -0.0f,    -INFINITY, 240,    -0x1p-6f};
    const uint8_t expected[] = {0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7E, 0x7F, 0x7E, 0x54,
                                0x79, 0x01, 0x00, 0x02, 0x00, 0x80, 0xFE, 0x77, 0x88};
    enum { N = sizeof expected };
    uint8_t codes[N];
    encode(values, N, NULL, codes);
    for (int i = 0; i < N; i++)
        cr_assert_eq(codes[i], expected[i], "%g is %02x, expected %02x", (double)values[i], codes[i], expected[i]);
    const float half = 0.5f;
    encode((const float[]){6, -224, 1}, 3, &half, codes);
    cr_assert(codes[0] == 0x54 && codes[1] == 0xFE && codes[2] == 0x40);
    /* Every code, the values halfway between two, and random bits. */
    enum { M = 4096 };
    static float all[M];
    static uint8_t got[M];
    testing_rng_t rng = testing_rng(testing_seed());
    for (int i = 0; i < M; i++) {
        int code = i % 126;
        all[i] = i < 126   ? (float)e4m3_value(code)
                 : i < 252 ? (float)(e4m3_value(code) + e4m3_value(code + 1)) / -2
                           : epmoei_f32_from_bits(0x38000000u + (testing_next(&rng) & 0x8FFFFFFFu));
    }
    encode(all, M, NULL, got);
    for (int i = 0; i < M; i++)
        cr_assert_eq(got[i], e4m3_nearest((double)all[i]), "%a is %02x, expected %02x", (double)all[i], got[i],
                     e4m3_nearest((double)all[i]));
}

/* Of two tokens for one slot the later wins, whatever the number of threads. */
Test(cache_write, the_later_token_wins)
{
    enum { T = 512, D = 128 };
    static float key[T * D], value[T * D], keys[2 * D], values[2 * D];
    int32_t slots[T];
    for (int i = 0; i < T * D; i++) key[i] = (float)(i / D), value[i] = (float)-(i / D);
    for (int t = 0; t < T; t++) slots[t] = t % 2;
    epmoe_cache_write_args_t args = make(T, 1, D, 2, 1, EPMOE_CACHE_LAYOUT_HND, EPMOE_F32);
    args.key = key, args.value = value, args.key_cache = keys, args.value_cache = values;
    args.slots = slots, args.slots_dtype = EPMOE_I32;
    run(&args, sizeof keys, sizeof values);
    for (int i = 0; i < 2 * D; i++) cr_assert(keys[i] == (float)(T - 2 + i / D) && values[i] == -keys[i]);
}

/* A cache of 4.2e9 elements, of which only the touched pages exist. */
Test(cache_write, offsets_beyond_2_31)
{
    enum { B = 64000, H = 32, D = 128, S = 16, BLOCK = H * D * S };
    int64_t bytes = (int64_t)B * BLOCK * 2;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    uint16_t *cache = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (cache == MAP_FAILED) cr_skip_test("no address space for the cache");
    uint16_t *value_cache = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (value_cache == MAP_FAILED) cr_skip_test("no address space for the cache");
    const int64_t slots[] = {0, 524288, 1023999};
    const int32_t narrow[] = {0, 524288, 1023999};
    uint16_t *key = testing_buffer(3 * H * D * 2, 0), *value = testing_buffer(3 * H * D * 2, 0);
    for (int64_t i = 0; i < 3 * H * D; i++) key[i] = (uint16_t)(i % 9973 + 1), value[i] = (uint16_t)(i % 9967 + 2);
    for (int layout = 0; layout < 3; layout++) {
        epmoe_cache_write_args_t args = make(3, H, D, B, S, (epmoe_cache_layout_t)layout, EPMOE_F16);
        args.key = key, args.value = value, args.key_cache = cache, args.value_cache = value_cache;
        args.slots = layout == 1 ? (const void *)narrow : slots;
        args.slots_dtype = layout == 1 ? EPMOE_I32 : EPMOE_I64;
        args.key_block_stride = args.value_block_stride = BLOCK;
        cr_assert_eq(epmoe_cache_write(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
        for (int t = 0; t < 3; t++)
            for (int64_t e = 0; e < H * D; e++) {
                int64_t k = place_of(&args, true, 8, slots[t], e / D, e % D),
                        v = place_of(&args, false, 8, slots[t], e / D, e % D);
                cr_assert(cache[k] == key[t * H * D + e] && value_cache[v] == value[t * H * D + e]);
                cache[k] = value_cache[v] = 0;
            }
        for (int t = 0; t < 3; t++)
            for (int64_t e = 0; e < BLOCK; e++)
                cr_assert(!cache[slots[t] / S * BLOCK + e] && !value_cache[slots[t] / S * BLOCK + e]);
    }
    munmap(cache, (size_t)bytes), munmap(value_cache, (size_t)bytes);
    testing_buffer_free(key), testing_buffer_free(value);
}

Test(cache_write, no_tokens)
{
    epmoe_cache_write_args_t args = make(0, 2, 8, 4, 16, EPMOE_CACHE_LAYOUT_NHD, EPMOE_BF16);
    cr_assert_eq(epmoe_cache_write(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    args.num_blocks = 0;
    cr_assert_eq(epmoe_cache_write(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
}

/* Tokens for nowhere, with a cache that has no blocks. */
Test(cache_write, only_padding)
{
    const int64_t slots[] = {-1, -1};
    const float rows[8] = {0};
    epmoe_cache_write_args_t args = make(2, 1, 4, 0, 16, EPMOE_CACHE_LAYOUT_NHD, EPMOE_F32);
    args.key = args.value = rows;
    args.slots = slots;
    cr_assert_eq(epmoe_cache_write(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
}

Test(cache_write, errors_name_the_argument_and_leave_the_cache)
{
    enum { D = 8, CACHE = 2 * 4 * D * 4 };
    float rows[2 * D] = {1};
    char *keys = testing_buffer(CACHE, 0), *values = testing_buffer(CACHE, 0);
    int64_t slots[] = {0, 7};
    const float scales[] = {0, -1, NAN, INFINITY};
    epmoe_cache_write_args_t base = make(2, 1, D, 2, 4, EPMOE_CACHE_LAYOUT_V1, EPMOE_F32);
    base.key = base.value = rows, base.slots = slots, base.key_cache = keys, base.value_cache = values;
#define REJECTS(needle, statement)                                                                                     \
    OP_INVALID(epmoe_cache_write, base, needle,                                                                        \
               testing_is_poison(keys, 0, CACHE) && testing_is_poison(values, 0, CACHE), statement)
    REJECTS("num_tokens is -1", bad.num_tokens = -1);
    REJECTS("num_kv_heads is 0", bad.num_kv_heads = 0);
    REJECTS("head_dim is 0", bad.head_dim = 0);
    REJECTS("num_blocks is -1", bad.num_blocks = -1);
    REJECTS("block_size is 0", bad.block_size = 0);
    REJECTS("layout is 3", bad.layout = (epmoe_cache_layout_t)3);
    REJECTS("layout is -1", bad.layout = (epmoe_cache_layout_t)-1);
    REJECTS("key_pack is -1", bad.key_pack = -1);
    REJECTS("head_dim is 8: expected a multiple of key_pack 3", bad.key_pack = 3);
    REJECTS("head_dim is 6: expected a multiple of key_pack 4", bad.head_dim = 6);
    REJECTS("head_dim is 8: expected a multiple of key_pack 16", bad.cache_dtype = EPMOE_F8_E4M3);
    REJECTS("dtype", bad.dtype = EPMOE_F8_E4M3);
    REJECTS("cache_dtype is 2 (bf16)", bad.cache_dtype = EPMOE_BF16);
    REJECTS("slots_dtype", bad.slots_dtype = EPMOE_F32);
    REJECTS("key_stride is 7", bad.key_stride = 7);
    REJECTS("value_stride is 7", bad.value_stride = 7);
    REJECTS("key_block_stride is 31", bad.key_block_stride = 31);
    REJECTS("value_block_stride is 31", bad.value_block_stride = 31);
    REJECTS("overflows", (bad.num_kv_heads = bad.block_size = bad.head_dim = INT32_MAX, bad.layout = 2));
    REJECTS("key is NULL", bad.key = NULL);
    REJECTS("value is NULL", bad.value = NULL);
    REJECTS("slots is NULL", bad.slots = NULL);
    REJECTS("key_cache is NULL", bad.key_cache = NULL);
    REJECTS("value_cache is NULL", bad.value_cache = NULL);
    REJECTS("slots[1] is 7: expected -1 to 3", bad.num_blocks = 1);
    const int64_t bad_slots[] = {8, -2, INT64_C(1) << 32, INT64_MIN};
    for (int i = 0; i < 4; i++) {
        slots[1] = bad_slots[i];
        REJECTS("slots[1] is", (void)0);
        slots[1] = 7;
        REJECTS("k_scale is", bad.k_scale = &scales[i]);
        REJECTS("v_scale is", bad.v_scale = &scales[i]);
    }
    REJECTS("backend is 9", bad.backend = (epmoe_backend_t)9);
#undef REJECTS
    testing_buffer_free(keys), testing_buffer_free(values);
}

Test(cache_write, struct_sizes)
{
    const float rows[4] = {1, 2, 3, 4};
    const int64_t slot = 0;
    float *cache = testing_buffer(16, 0), values[4];
    epmoe_cache_write_args_t base = make(1, 1, 4, 1, 1, EPMOE_CACHE_LAYOUT_NHD, EPMOE_F32);
    base.key = base.value = rows, base.slots = &slot, base.key_cache = cache, base.value_cache = values;
    OP_STRUCT_SIZES(epmoe_cache_write, base, offsetof(epmoe_cache_write_args_t, key_block_stride),
                    testing_is_poison(cache, 0, 16), cache[3] == 4);
    testing_buffer_free(cache);
}

Test(cache_write, floor_counts_each_byte_once)
{
    epmoe_cache_write_args_t args = {.num_tokens = 3,
                                     .num_kv_heads = 4,
                                     .head_dim = 128,
                                     .dtype = EPMOE_BF16,
                                     .cache_dtype = EPMOE_F8_E4M3,
                                     .slots_dtype = EPMOE_I64};
    cr_assert_eq(epmoei_cache_write_floor(&args).bytes, 3 * (2 * 4 * 128 * 3 + 8));
}
