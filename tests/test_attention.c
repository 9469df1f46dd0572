/* Attention over a paged cache: hand-worked values, infinities, padding, 64-bit offsets, errors. */
#include "tests/attention_testing.h"

#include <math.h>
#include <sys/mman.h>

/* One head, blocks of one slot, key j in block j. */
static epmoe_attention_args_t small(int32_t keys, int32_t queries, const float *q, const float *key, const float *value,
                                    float *o)
{
    static const int32_t table[] = {0, 1, 2, 3, 4, 5, 6, 7};
    static int32_t len, start[2];
    len = keys, start[1] = queries;
    epmoe_attention_args_t args = EPMOE_ATTENTION_ARGS_INIT;
    args.num_tokens = queries, args.num_seqs = 1, args.num_heads = 1, args.head_dim = 1;
    args.num_blocks = 8, args.block_size = 1, args.max_blocks = 8;
    args.dtype = EPMOE_F32, args.layout = EPMOE_CACHE_LAYOUT_NHD, args.scale = 1;
    args.q = q, args.key_cache = key, args.value_cache = value, args.o = o;
    args.block_table = table, args.seq_lens = &len, args.query_start = start;
    return args;
}

static void expect(const epmoe_attention_args_t *args, int32_t count, const double *expected)
{
    cr_assert_eq(epmoe_attention(args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    for (int32_t i = 0; i < count; i++) {
        double value = (double)((float *)args->o)[i];
        cr_assert(fabs(value - expected[i]) <= 1e-6 * fabs(expected[i]), "o[%d] is %.9g, expected %.9g", i, value,
                  expected[i]);
    }
}
#define EXPECT(args, ...) expect(args, sizeof((double[]){__VA_ARGS__}) / sizeof(double), (const double[]){__VA_ARGS__})

Test(attention, by_hand)
{
    /* Scores 0 and ln 3: weights 1/4 and 3/4. */
    float o[4];
    const float key[] = {0, 1.09861229f}, value[] = {4, 8};
    epmoe_attention_args_t args = small(2, 1, (float[]){1}, key, value, o);
    EXPECT(&args, 7);
    args.scale = 2; /* ln 9 */
    EXPECT(&args, 7.6);
    args.k_scale = args.v_scale = (float[]){NAN}; /* for an FP8 cache alone */
    EXPECT(&args, 7.6);
    args = small(2, 1, (float[]){0}, key, value, o);
    args.sinks = (float[]){0.693147181f}; /* 1 + 1 + 2 */
    EXPECT(&args, 3);
    args.sinks = (float[]){-INFINITY};
    EXPECT(&args, 6);
    args = small(2, 1, (float[]){1}, key, value, o);
    args.window = 1;
    EXPECT(&args, 8);
    args.window = INT32_MAX;
    EXPECT(&args, 7);
}

Test(attention, queries_are_the_last_tokens_and_causal)
{
    float o[3];
    const float key[] = {1, 2, 3, 4}, value[] = {2, 4, 9, 1};
    epmoe_attention_args_t args = small(3, 3, (float[]){0, 0, 0}, key, value, o);
    EXPECT(&args, 2, 3, 5); /* running means */
    args = small(4, 2, (float[]){0, 0}, key, value, o);
    EXPECT(&args, 5, 4);
    args = small(4, 3, (float[]){0, 0, 0}, key, value, o);
    args.window = 2;
    EXPECT(&args, 3, 6.5, 5);
}

Test(attention, query_heads_share_cache_heads_in_groups)
{
    float o[6];
    const float key[] = {1, 1}, value[] = {10, 20};
    epmoe_attention_args_t args = small(1, 1, (float[]){1, 2, 3, 4, 5, 6}, key, value, o);
    args.num_heads = 6, args.num_kv_heads = 2;
    EXPECT(&args, 10, 10, 10, 20, 20, 20);
}

Test(attention, a_default_scale_is_that_of_the_head_width)
{
    float o[4], q[] = {1, 0, 0, 0}, key[] = {0, 9, 9, 9, 2.19722458f, 0, 0, 0}, value[] = {4, 0, 0, 0, 8, 0, 0, 0};
    epmoe_attention_args_t args = small(2, 1, q, key, value, o);
    args.head_dim = 4, args.scale = 0; /* 1/2 */
    EXPECT(&args, 7, 0, 0, 0);
    args.value_dim = 2;
    const float narrow[] = {4, 12, 8, 16};
    args.value_cache = narrow;
    EXPECT(&args, 7, 15);
    args.value_cache = NULL;                /* the first two columns of the keys: (0, 9) and (2.197, 0) */
    EXPECT(&args, 0.75 * 2.19722458, 2.25); /* MLA */
}

Test(attention, scores_that_are_large_do_not_overflow)
{
    float o[2];
    const float key[] = {1000, 999.306853f}, value[] = {3, 6}; /* ln 2 apart */
    epmoe_attention_args_t args = small(2, 1, (float[]){1}, key, value, o);
    cr_assert_eq(epmoe_attention(&args, NULL), EPMOE_OK);
    cr_assert(fabsf(o[0] - 4) < 1e-4f, "%g", (double)o[0]);
    args.q = (float[]){-1};
    cr_assert_eq(epmoe_attention(&args, NULL), EPMOE_OK);
    cr_assert(fabsf(o[0] - 5) < 1e-4f, "%g", (double)o[0]);
}

Test(attention, minus_infinity_weighs_nothing)
{
    float o[2];
    const float key[] = {-INFINITY, 0, -INFINITY}, value[] = {5, 7, 9};
    epmoe_attention_args_t args = small(3, 1, (float[]){1}, key, value, o);
    EXPECT(&args, 7);
    args = small(1, 1, (float[]){1}, key, value, o);
    EXPECT(&args, 0);
    args.sinks = (float[]){2};
    EXPECT(&args, 0);
    args.sinks = (float[]){NAN};
    cr_assert_eq(epmoe_attention(&args, NULL), EPMOE_OK);
    cr_assert(isnan(o[0]));
    args = small(1, 1, (float[]){-1}, key, value, o); /* +inf is no weight */
    cr_assert_eq(epmoe_attention(&args, NULL), EPMOE_OK);
    cr_assert(isnan(o[0]));
}

/* The padding of a captured batch: sequences of length 0, rows past the last query. */
Test(attention, empty_sequences_give_zeros_and_rows_past_the_end_stay)
{
    enum { T = 6, H = 2 };
    const float q[T * H] = {0}, key[2] = {1, 1}, value[2] = {3, 5};
    const int32_t start[] = {0, 1, 2, 2, 4}, lens[] = {0, 1, 0, 0}, table[] = {-7, 1, 1 << 30, -1};
    for (int i = 0; i < NUM_KERNELS; i++) {
        float *o = testing_buffer(T * H * 4, 4);
        epmoe_attention_args_t args = small(1, 1, q, key, value, o), checked;
        args.num_tokens = T, args.num_heads = H, args.num_kv_heads = 1, args.num_seqs = 4, args.num_blocks = 2;
        args.max_blocks = 1, args.block_table = table, args.seq_lens = lens, args.query_start = start;
        args.sinks = (float[]){1, INFINITY};
        cr_assert_eq(epmoei_attention_check(&args, &checked), EPMOE_OK);
        cr_assert_eq(run_kernel(&checked, i), EPMOE_OK, "%s", epmoe_last_error());
        cr_assert(fabsf(o[2] - 5 / (1 + expf(1))) < 1e-6f);
        for (int r = 0; r < 8; r++) cr_assert(r == 2 || r == 3 || o[r] == 0, "row %d is %g", r, (double)o[r]);
        cr_assert(testing_is_poison(o, 8 * 4, 4 * 4) && testing_guards_intact(o));
        testing_buffer_free(o);
    }
}

Test(attention, no_tokens)
{
    epmoe_attention_args_t args = EPMOE_ATTENTION_ARGS_INIT;
    args.num_heads = 1, args.head_dim = 8, args.block_size = 16, args.dtype = EPMOE_BF16;
    cr_assert_eq(epmoe_attention(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    args.num_seqs = 3, args.num_blocks = 9, args.max_blocks = 3;
    cr_assert_eq(epmoe_attention(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    /* Rows, but no sequence. */
    float *o = testing_buffer(32, 0), q[8] = {0};
    const int32_t start[] = {0};
    args.dtype = EPMOE_F32, args.num_tokens = 1, args.num_seqs = 0, args.q = q, args.o = o, args.query_start = start;
    cr_assert_eq(epmoe_attention(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert(testing_is_poison(o, 0, 32));
    testing_buffer_free(o);
}

/* Three blocks 2^31 elements apart: only pages that are touched take memory. */
Test(attention, offsets_beyond_2_31)
{
    size_t stride = (size_t)1 << 31, bytes = 2 * stride + 4096;
    uint8_t *cache = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    cr_assert(cache != MAP_FAILED);
    const int32_t table[] = {2, 0, 1};
    float o[16];
    cache[0] = 0x38, cache[1] = 0x40;                           /* 1; value 2 */
    cache[stride] = 0x38, cache[stride + 1] = 0x48;             /* 1; value 4 */
    cache[2 * stride] = 0x38, cache[2 * stride + 1] = 0x50;     /* 1; value 8 */
    cache[2 * stride + 1024] = 0x38, cache[stride + 1024] = 64; /* what nobody reads */
    for (int layout = 0; layout < 3; layout++) {
        epmoe_attention_args_t args = small(3, 1, (float[]){1}, (float *)cache, (float *)(cache + 1), o);
        args.cache_dtype = EPMOE_F8_E4M3, args.block_table = table, args.num_blocks = 3, args.max_blocks = 3;
        args.layout = (epmoe_cache_layout_t)layout, args.key_pack = 1;
        args.key_block_stride = args.value_block_stride = (int64_t)stride;
        EXPECT(&args, 14. / 3);
        args.v_scale = (float[]){0.5f};
        args.k_scale = (float[]){3};
        EXPECT(&args, 7. / 3);
    }
    munmap(cache, bytes);
}

Test(attention, errors_name_the_argument_and_leave_the_output)
{
    const float q[8] = {0}, key[8] = {0};
    float *o = testing_buffer(32, 0);
    epmoe_attention_args_t base = small(3, 2, q, key, key, o);
    const int32_t *len = base.seq_lens;
#define REJECTS(needle, statement) OP_INVALID(epmoe_attention, base, needle, testing_is_poison(o, 0, 32), statement)
    REJECTS("num_tokens is -1", bad.num_tokens = -1);
    REJECTS("num_seqs is -1", bad.num_seqs = -1);
    REJECTS("num_heads is 0", bad.num_heads = 0);
    REJECTS("num_kv_heads is 2", bad.num_kv_heads = 2);
    REJECTS("num_kv_heads is 2", (bad.num_heads = 3, bad.num_kv_heads = 2));
    REJECTS("head_dim is 0", bad.head_dim = 0);
    REJECTS("head_dim is 577", bad.head_dim = 577);
    REJECTS("value_dim is -1", bad.value_dim = -1);
    REJECTS("value_dim is 2", (bad.value_dim = 2, bad.value_cache = NULL));
    REJECTS("num_blocks is -1", bad.num_blocks = -1);
    REJECTS("block_size is 0", bad.block_size = 0);
    REJECTS("max_blocks is -1", bad.max_blocks = -1);
    REJECTS("dtype", bad.dtype = EPMOE_F8_E4M3);
    REJECTS("cache_dtype is 2 (bf16)", bad.cache_dtype = EPMOE_BF16);
    REJECTS("layout is 3", bad.layout = (epmoe_cache_layout_t)3);
    REJECTS("key_pack is 4", (bad.layout = EPMOE_CACHE_LAYOUT_V1, bad.head_dim = 6));
    REJECTS("key_pack is 2", (bad.layout = EPMOE_CACHE_LAYOUT_V1, bad.key_pack = 2));
    REJECTS("window is -1", bad.window = -1);
    REJECTS("scale is", bad.scale = NAN);
    REJECTS("q_stride is -3", bad.q_stride = -3);
    REJECTS("key_block_stride is 1", (bad.block_size = 2, bad.key_block_stride = 1));
    REJECTS("value_block_stride is 1", (bad.block_size = 2, bad.value_block_stride = 1));
    REJECTS("key_block_stride", bad.key_block_stride = INT64_MAX);
    REJECTS("k_scale is 0", (bad.cache_dtype = EPMOE_F8_E4M3, bad.k_scale = (float[]){0}));
    REJECTS("k_scale is -1", (bad.cache_dtype = EPMOE_F8_E4M3, bad.k_scale = (float[]){-1}));
    REJECTS("v_scale is nan", (bad.cache_dtype = EPMOE_F8_E4M3, bad.v_scale = (float[]){NAN}));
    REJECTS("q is NULL", bad.q = NULL);
    REJECTS("key_cache is NULL", bad.key_cache = NULL);
    REJECTS("value_cache is NULL", bad.value_cache = NULL);
    REJECTS("block_table is NULL", bad.block_table = NULL);
    REJECTS("seq_lens is NULL", bad.seq_lens = NULL);
    REJECTS("query_start is NULL", bad.query_start = NULL);
    REJECTS("o is NULL", bad.o = NULL);
    REJECTS("backend is -1", bad.backend = (epmoe_backend_t)-1);
    REJECTS("query_start[0] is 1", bad.query_start = ((const int32_t[]){1, 2}));
    REJECTS("query_start[1] is 3", bad.query_start = ((const int32_t[]){0, 3}));
    REJECTS("query_start[1] is -1", bad.query_start = ((const int32_t[]){0, -1}));
    REJECTS("seq_lens[0] is 1", bad.seq_lens = ((const int32_t[]){1}));
    REJECTS("seq_lens[0] is 9", bad.seq_lens = ((const int32_t[]){9}));
    REJECTS("seq_lens[0] is -1", bad.seq_lens = ((const int32_t[]){-1}));
    REJECTS("block_table[0,2] is 8", bad.block_table = ((const int32_t[]){0, 1, 8, 0, 0, 0, 0, 0}));
    REJECTS("block_table[0,0] is -1", bad.block_table = ((const int32_t[]){-1, 1, 2, 0, 0, 0, 0, 0}));
#undef REJECTS
    cr_assert_eq(*len, 3);
    testing_buffer_free(o);
}

Test(attention, struct_sizes)
{
    const float q[] = {1}, key[] = {0, 1.09861229f}, value[] = {4, 8};
    float *o = testing_buffer(4, 0);
    epmoe_attention_args_t base = small(2, 1, q, key, value, o);
    OP_STRUCT_SIZES(epmoe_attention, base, sizeof base, testing_is_poison(o, 0, 4), fabsf(o[0] - 7) < 1e-5f);
    testing_buffer_free(o);
}

Test(attention, floor_counts_what_is_seen)
{
    /* 3 queries at positions 7..9 and one at 4; windows of 4: keys 4..9 and 1..4, and 4 visible pairs per query. */
    const int32_t start[] = {0, 3, 4, 4}, lens[] = {10, 5, 9};
    epmoe_attention_args_t args = {.num_tokens = 4, .num_seqs = 3, .num_heads = 8, .num_kv_heads = 2, .head_dim = 16};
    args.value_dim = 32, args.dtype = EPMOE_BF16, args.cache_dtype = EPMOE_F8_E4M3, args.window = 4;
    args.query_start = start, args.seq_lens = lens, args.value_cache = &args;
    cr_assert_eq(epmoei_attention_floor(&args).bytes, 4 * 8 * 48 * 2 + (6 + 4) * 2 * 48);
    cr_assert_eq(epmoei_attention_floor(&args).flops, 2 * 48 * 8 * (4 * 4));
    args.value_cache = NULL;
    cr_assert_eq(epmoei_attention_floor(&args).bytes, 4 * 8 * 48 * 2 + (6 + 4) * 2 * 16);
}
