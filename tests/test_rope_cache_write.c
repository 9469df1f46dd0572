/* RoPE and cache write in one pass: the bits of the two ops in a row, and that an error of either writes nothing. */
#include "dense_layers/rope_cache_write.h"
#include "tests/op_testing.h"

#include <stdlib.h>

enum { kTokens = 7, kHeads = 3, kKvHeads = 2, kPositions = 16, kBlocks = 3, kBlock = 4 };

typedef struct both_t {
    epmoe_rope_args_t rope;
    epmoe_cache_write_args_t cache;
    int64_t positions[kTokens];
    int64_t slots[kTokens];
    float *table;
    int64_t qkv_bytes, cache_bytes;
} both_t;

/* Packed rows of q, k and v heads. */
static both_t make(testing_rng_t *rng, epmoe_dtype_t dtype, epmoe_cache_layout_t layout, int32_t head, int32_t rotary,
                   bool fp8)
{
    static const float scales[] = {0.05f, 0.11f};
    both_t b = {.rope = EPMOE_ROPE_ARGS_INIT, .cache = EPMOE_CACHE_WRITE_ARGS_INIT};
    int64_t size = epmoe_dtype_size(dtype), width = (kHeads + 2 * kKvHeads) * head;
    b.qkv_bytes = kTokens * width * size;
    b.cache_bytes = (int64_t)kBlocks * kBlock * kKvHeads * head * (fp8 ? 1 : size);
    char *qkv = testing_buffer(b.qkv_bytes, (int32_t)size);
    testing_fill_normal(rng, qkv, dtype, kTokens * width, 1);
    b.table = malloc((size_t)kPositions * (size_t)rotary * 4);
    epmoe_rope_table_args_t table = EPMOE_ROPE_TABLE_ARGS_INIT;
    table.num_positions = kPositions, table.rotary_dim = rotary, table.cos_sin = b.table;
    cr_assert_eq(epmoe_rope_table(&table), EPMOE_OK);
    for (int t = 0; t < kTokens; t++) b.positions[t] = testing_range(rng, 0, kPositions - 1);
    for (int t = 0; t < kTokens; t++) b.slots[t] = t == 3 ? -1 : (t * 5 + 2) % (kBlocks * kBlock);
    epmoe_rope_args_t *rope = &b.rope;
    rope->num_tokens = kTokens, rope->num_heads = kHeads, rope->num_kv_heads = kKvHeads;
    rope->head_dim = head, rope->rotary_dim = rotary, rope->dtype = dtype;
    rope->style = (epmoe_rope_style_t)testing_range(rng, 0, 1);
    rope->q = qkv, rope->q_stride = width;
    rope->k = qkv + kHeads * head * size, rope->k_stride = width;
    rope->cos_sin = b.table, rope->num_positions = kPositions;
    epmoe_cache_write_args_t *cache = &b.cache;
    cache->num_tokens = kTokens, cache->num_kv_heads = kKvHeads, cache->head_dim = head;
    cache->num_blocks = kBlocks, cache->block_size = kBlock, cache->layout = layout;
    cache->key_pack = 2;
    cache->dtype = dtype, cache->cache_dtype = fp8 ? EPMOE_F8_E4M3 : dtype;
    cache->value = qkv + (kHeads + kKvHeads) * head * size, cache->value_stride = width;
    cache->key_cache = testing_buffer(b.cache_bytes, 4), cache->value_cache = testing_buffer(b.cache_bytes, 4);
    cache->k_scale = fp8 ? &scales[0] : NULL, cache->v_scale = fp8 ? &scales[1] : NULL;
    return b;
}

/* Where the struct has come to rest. */
static void point(both_t *b) { b->rope.positions = b->positions, b->cache.slots = b->slots; }

static void destroy(both_t *b)
{
    cr_assert(testing_guards_intact(b->rope.q) && testing_guards_intact(b->cache.key_cache) &&
              testing_guards_intact(b->cache.value_cache));
    testing_buffer_free(b->rope.q);
    testing_buffer_free(b->cache.key_cache);
    testing_buffer_free(b->cache.value_cache);
    free(b->table);
}

Test(rope_cache_write, bits_are_those_of_the_two_ops)
{
    uint64_t seed = testing_seed();
    for (int32_t i = 0; i < 3 * 3 * 2 * 2; i++) {
        const int32_t rotary = i / 18 ? 4 : 10;
        both_t pair[2];
        for (int j = 0; j < 2; j++) {
            testing_rng_t rng = testing_rng(seed + (uint64_t)i);
            pair[j] = make(&rng, op_dtypes[i % 3].dtype, (epmoe_cache_layout_t)(i / 3 % 3), 10, rotary, i / 9 % 2);
            point(&pair[j]);
        }
        epmoe_cache_write_args_t write = pair[0].cache;
        write.key = pair[0].rope.k, write.key_stride = pair[0].rope.k_stride;
        cr_assert_eq(epmoe_rope(&pair[0].rope, NULL), EPMOE_OK, "%s", epmoe_last_error());
        cr_assert_eq(epmoe_cache_write(&write, NULL), EPMOE_OK, "%s", epmoe_last_error());
        cr_assert_eq(epmoe_rope_cache_write(&pair[1].rope, &pair[1].cache, NULL), EPMOE_OK, "%s", epmoe_last_error());
        cr_assert_eq(memcmp(pair[0].rope.q, pair[1].rope.q, (size_t)pair[0].qkv_bytes), 0);
        cr_assert_eq(memcmp(pair[0].cache.key_cache, pair[1].cache.key_cache, (size_t)pair[0].cache_bytes), 0);
        cr_assert_eq(memcmp(pair[0].cache.value_cache, pair[1].cache.value_cache, (size_t)pair[0].cache_bytes), 0);
        destroy(&pair[0]);
        destroy(&pair[1]);
    }
}

/* One head of 4 columns of which 2 turn by 1 radian: the cache gets them turned, and the two that do not. */
Test(rope_cache_write, by_hand)
{
    float q[] = {1, 0, 5, 6}, k[] = {0, 1, 7, 8}, key[8], value[8], v[] = {9, 10, 11, 12};
    const float table[] = {1, 0, 0.54030231f, 0.84147098f};
    const int32_t position = 1, slot = 1;
    epmoe_rope_args_t rope = EPMOE_ROPE_ARGS_INIT;
    epmoe_cache_write_args_t cache = EPMOE_CACHE_WRITE_ARGS_INIT;
    for (int i = 0; i < 8; i++) key[i] = value[i] = 777;
    rope.num_tokens = 1, rope.num_heads = 1, rope.num_kv_heads = 1, rope.head_dim = 4, rope.rotary_dim = 2;
    rope.dtype = EPMOE_F32, rope.q = q, rope.k = k, rope.positions = &position, rope.positions_dtype = EPMOE_I32;
    rope.cos_sin = table, rope.num_positions = 2;
    cache.num_tokens = 1, cache.num_kv_heads = 1, cache.head_dim = 4, cache.num_blocks = 1, cache.block_size = 2;
    cache.layout = EPMOE_CACHE_LAYOUT_NHD, cache.dtype = EPMOE_F32, cache.value = v;
    cache.slots = &slot, cache.slots_dtype = EPMOE_I32, cache.key_cache = key, cache.value_cache = value;
    cr_assert_eq(epmoe_rope_cache_write(&rope, &cache, NULL), EPMOE_OK, "%s", epmoe_last_error());
    const float turned_q[] = {0.54030231f, 0.84147098f, 5, 6}, turned_k[] = {-0.84147098f, 0.54030231f, 7, 8};
    cr_assert_eq(memcmp(q, turned_q, 16), 0);
    cr_assert_eq(memcmp(k, turned_k, 16), 0);
    cr_assert_eq(memcmp(key + 4, turned_k, 16), 0);
    cr_assert_eq(memcmp(value + 4, v, 16), 0);
    for (int i = 0; i < 4; i++) cr_assert(key[i] == 777 && value[i] == 777);
}

Test(rope_cache_write, errors_write_nothing)
{
    testing_rng_t rng = testing_rng(testing_seed());
    both_t b = make(&rng, EPMOE_F32, EPMOE_CACHE_LAYOUT_NHD, 10, 10, false);
    const float zero = 0;
    point(&b);
    char *before = malloc((size_t)b.qkv_bytes);
    memcpy(before, b.rope.q, (size_t)b.qkv_bytes);
#define REJECTS(needle, statement)                                                                                     \
    do {                                                                                                               \
        both_t bad = b;                                                                                                \
        point(&bad);                                                                                                   \
        statement;                                                                                                     \
        cr_assert_eq(epmoe_rope_cache_write(&bad.rope, &bad.cache, NULL), EPMOE_ERROR_INVALID_ARGUMENT, #statement);   \
        cr_assert(strstr(epmoe_last_error(), needle), "%s: '%s' lacks '%s'", #statement, epmoe_last_error(), needle);  \
        cr_assert_eq(memcmp(before, b.rope.q, (size_t)b.qkv_bytes), 0, #statement);                                    \
        cr_assert(testing_is_poison(b.cache.key_cache, 0, b.cache_bytes) &&                                            \
                  testing_is_poison(b.cache.value_cache, 0, b.cache_bytes));                                           \
    } while (0)
    REJECTS("cache.num_tokens is 6", bad.cache.num_tokens = 6);
    REJECTS("cache.num_kv_heads is 1", bad.cache.num_kv_heads = 1);
    REJECTS("cache.head_dim is 8", bad.cache.head_dim = 8);
    REJECTS("cache.dtype is", bad.cache.dtype = EPMOE_BF16);
    REJECTS("cache.backend is", bad.cache.backend = EPMOE_BACKEND_CPU);
    REJECTS("cache.key is", bad.cache.key = bad.rope.q);
    REJECTS("rope.head_stride is 12", bad.rope.head_stride = 12);
    REJECTS("rope.num_kv_heads is 0", (bad.rope.num_kv_heads = 0, bad.rope.k = NULL));
    REJECTS("positions[2] is 16", bad.positions[2] = kPositions);
    REJECTS("slots[6] is 12", bad.slots[6] = kBlocks * kBlock);
    REJECTS("k_scale", bad.cache.k_scale = &zero);
    REJECTS("rotary_dim is 7", bad.rope.rotary_dim = 7);
    REJECTS("value_cache is NULL", bad.cache.value_cache = NULL);
#undef REJECTS
    cr_assert_eq(epmoe_rope_cache_write(NULL, &b.cache, NULL), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert_eq(epmoe_rope_cache_write(&b.rope, NULL, NULL), EPMOE_ERROR_INVALID_ARGUMENT);
    both_t none = b;
    none.rope.num_tokens = none.cache.num_tokens = 0;
    none.rope.q = none.rope.k = NULL, none.cache.value = NULL, none.rope.positions = none.cache.slots = NULL;
    cr_assert_eq(epmoe_rope_cache_write(&none.rope, &none.cache, NULL), EPMOE_OK, "%s", epmoe_last_error());
    free(before);
    destroy(&b);
}
