/* Attention over a paged cache: hand-worked values, a double-precision oracle on dense keys and values that the test
 * scatters itself, all layouts and dtypes, MLA, NaN, padding, 64-bit offsets. What no query sees is NaN, and table
 * entries that must not be read are out of range. */
#include "dense_layers/attention.h"
#include "dense_layers/attention_tile.h"
#include "tests/op_testing.h"

#include <math.h>
#include <stdlib.h>
#include <sys/mman.h>

#define MAX_SEQS 8

typedef struct shape_t {
    int32_t heads, kv_heads, dim, value_dim, block_size, window, pack;
    epmoe_cache_layout_t layout;
    epmoe_dtype_t dtype, cache_dtype;
    bool sinks, mla, strided;
    float scale; /* 0 = default */
    int32_t num_seqs, lens[MAX_SEQS], queries[MAX_SEQS];
} shape_t;

typedef struct problem_t {
    shape_t shape;
    epmoe_attention_args_t args;
    double *keys[MAX_SEQS], *values[MAX_SEQS]; /* [len,Hk,D], as the cache represents them */
    double *expected;                          /* [T,H,Dv] */
    double *magnitude;                         /* of the terms that sum to it */
    void *q, *o, *key_cache, *value_cache;
    int32_t *table, *lens, *start;
    float *sinks, scales[2];
    int64_t o_bytes;
} problem_t;

/* E4M3 by its definition. */
static double decode_e4m3(uint8_t code)
{
    int exponent = code >> 3 & 15, mantissa = code & 7;
    if ((code & 0x7F) == 0x7F) return NAN;
    double value = exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
    return code & 0x80 ? -value : value;
}

static double store_random(testing_rng_t *rng, void *cache, epmoe_dtype_t dtype, int64_t i, double scale)
{
    if (dtype == EPMOE_F8_E4M3) {
        uint8_t code = (uint8_t)(testing_range(rng, 0, 1) << 7 | testing_range(rng, 0, 0x48));
        ((uint8_t *)cache)[i] = code;
        return decode_e4m3(code) * scale;
    }
    epmoei_store(cache, dtype, i, testing_normal(rng));
    return (double)epmoei_load(cache, dtype, i);
}

/* Element offsets as the header's shapes say, as mixed-radix numbers. */
static int64_t key_at(const shape_t *s, int64_t stride, int64_t block, int64_t slot, int64_t h, int64_t d)
{
    int64_t S = s->block_size, Hk = s->kv_heads, D = s->dim, x = s->pack;
    if (s->layout == EPMOE_CACHE_LAYOUT_NHD) return block * stride + slot * Hk * D + h * D + d;
    if (s->layout == EPMOE_CACHE_LAYOUT_HND) return block * stride + h * S * D + slot * D + d;
    return block * stride + h * (D / x) * S * x + (d / x) * S * x + slot * x + d % x;
}

static int64_t value_at(const shape_t *s, int64_t stride, int64_t block, int64_t slot, int64_t h, int64_t d)
{
    int64_t S = s->block_size, Hk = s->kv_heads, D = s->value_dim;
    if (s->layout == EPMOE_CACHE_LAYOUT_NHD) return block * stride + slot * Hk * D + h * D + d;
    if (s->layout == EPMOE_CACHE_LAYOUT_HND) return block * stride + h * S * D + slot * D + d;
    return block * stride + h * D * S + d * S + slot;
}

static void attend(problem_t *p, int32_t seq, int64_t token, int32_t position, double scale)
{
    const shape_t *s = &p->shape;
    for (int64_t h = 0; h < s->heads; h++) {
        int64_t kv = h * s->kv_heads / s->heads;
        double *weights = calloc((size_t)position + 1, sizeof *weights), top = -INFINITY;
        int32_t first = s->window && position - s->window + 1 > 0 ? position - s->window + 1 : 0;
        for (int32_t j = first; j <= position; j++) {
            for (int64_t d = 0; d < s->dim; d++)
                weights[j] += scale * (double)epmoei_load(p->q, s->dtype, token * p->args.q_stride + h * s->dim + d) *
                              p->keys[seq][(j * s->kv_heads + kv) * s->dim + d];
            top = fmax(top, weights[j]);
        }
        double sum = s->sinks ? exp((double)p->sinks[h] - top) : 0;
        for (int32_t j = first; j <= position; j++) sum += weights[j] = exp(weights[j] - top);
        for (int64_t d = 0; d < s->value_dim; d++) {
            double out = 0, magnitude = 0;
            for (int32_t j = first; j <= position; j++) {
                double term = weights[j] * p->values[seq][(j * s->kv_heads + kv) * s->value_dim + d];
                out += term, magnitude += fabs(term);
            }
            p->expected[(token * s->heads + h) * s->value_dim + d] = out / sum;
            p->magnitude[(token * s->heads + h) * s->value_dim + d] = magnitude / sum;
        }
        free(weights);
    }
}

static void fill_sequence(testing_rng_t *rng, problem_t *p, int32_t seq, int32_t *next_block, int32_t num_blocks)
{
    const shape_t *s = &p->shape;
    int32_t *table = p->table + (int64_t)seq * p->args.max_blocks, len = s->lens[seq];
    p->keys[seq] = calloc((size_t)len * (size_t)(s->kv_heads * s->dim) + 1, sizeof(double));
    p->values[seq] = calloc((size_t)len * (size_t)(s->kv_heads * s->value_dim) + 1, sizeof(double));
    int32_t seen = s->window ? len - s->queries[seq] - s->window + 1 : 0; /* the first key that a query sees */
    for (int32_t j = seen > 0 ? seen : 0; j < len && s->queries[seq] > 0; j++) {
        int32_t *block = &table[j / s->block_size];
        if (*block < 0 || *block >= num_blocks) *block = (int32_t)(*next_block += 7) % num_blocks;
        for (int32_t h = 0; h < s->kv_heads; h++) {
            for (int32_t d = 0; d < s->dim; d++)
                p->keys[seq][((int64_t)j * s->kv_heads + h) * s->dim + d] = store_random(
                    rng, p->key_cache, s->cache_dtype,
                    key_at(s, p->args.key_block_stride, *block, j % s->block_size, h, d), (double)p->scales[0]);
            for (int32_t d = 0; d < s->value_dim; d++) {
                double *value = &p->values[seq][((int64_t)j * s->kv_heads + h) * s->value_dim + d];
                if (s->mla)
                    *value = p->keys[seq][((int64_t)j * s->kv_heads + h) * s->dim + d];
                else
                    *value = store_random(rng, p->value_cache, s->cache_dtype,
                                          value_at(s, p->args.value_block_stride, *block, j % s->block_size, h, d),
                                          (double)p->scales[1]);
            }
        }
    }
}

static problem_t problem_make(testing_rng_t *rng, shape_t shape)
{
    problem_t p = {.shape = shape, .args = EPMOE_ATTENTION_ARGS_INIT};
    shape_t *s = &p.shape;
    if (!s->value_dim) s->value_dim = s->dim;
    if (!s->pack) s->pack = 16 / epmoe_dtype_size(s->cache_dtype);
    bool fp8 = s->cache_dtype == EPMOE_F8_E4M3;
    p.scales[0] = fp8 ? 0.037f : 1, p.scales[1] = fp8 ? 0.61f : 1;

    int32_t blocks = 0, columns = 1;
    p.start = testing_buffer(4 * (s->num_seqs + 1), 0), p.start[0] = 0;
    p.lens = testing_buffer(4 * s->num_seqs, 0);
    for (int32_t b = 0; b < s->num_seqs; b++) {
        int32_t used = (s->lens[b] + s->block_size - 1) / s->block_size;
        blocks += used;
        if (used > columns) columns = used;
        p.lens[b] = s->lens[b];
        p.start[b + 1] = p.start[b] + s->queries[b];
    }
    int32_t num_blocks = blocks + 2;
    while (num_blocks % 7 == 0) num_blocks++; /* steps of 7 then visit every block */
    int32_t tokens = p.start[s->num_seqs];
    epmoe_attention_args_t *a = &p.args;
    a->num_tokens = tokens, a->num_seqs = s->num_seqs;
    a->num_heads = s->heads, a->num_kv_heads = s->kv_heads, a->head_dim = s->dim, a->value_dim = s->value_dim;
    a->num_blocks = num_blocks, a->block_size = s->block_size, a->max_blocks = columns + 1;
    a->dtype = s->dtype, a->cache_dtype = s->cache_dtype, a->layout = s->layout;
    a->key_pack = s->pack, a->window = s->window, a->scale = s->scale;
    int64_t slots = (int64_t)s->block_size * s->kv_heads, gap = s->strided ? 5 : 0;
    a->key_block_stride = slots * s->dim + gap, a->value_block_stride = slots * s->value_dim + 2 * gap;
    a->q_stride = (int64_t)s->heads * s->dim + gap;

    int32_t size = epmoe_dtype_size(s->dtype), cache_size = epmoe_dtype_size(s->cache_dtype);
    p.q = testing_buffer(tokens * a->q_stride * size, size);
    for (int64_t t = 0; t < tokens; t++)
        testing_fill_normal(rng, (char *)p.q + t * a->q_stride * size, s->dtype, (int64_t)s->heads * s->dim, 1);
    p.key_cache = testing_buffer(num_blocks * a->key_block_stride * cache_size, cache_size);
    p.value_cache = testing_buffer(num_blocks * a->value_block_stride * cache_size, cache_size);
    p.table = testing_buffer(4 * (int64_t)s->num_seqs * a->max_blocks, 0);
    p.sinks = testing_buffer(4 * s->heads, 4);
    for (int32_t h = 0; h < s->heads; h++) p.sinks[h] = testing_normal(rng);
    p.o_bytes = (int64_t)tokens * s->heads * s->value_dim * size;
    p.o = testing_buffer(p.o_bytes, size);
    p.expected = calloc((size_t)tokens * (size_t)(s->heads * s->value_dim) + 1, sizeof(double));
    p.magnitude = calloc((size_t)tokens * (size_t)(s->heads * s->value_dim) + 1, sizeof(double));

    int32_t next_block = 0;
    double scale = s->scale != 0 ? (double)s->scale : 1 / sqrt(s->dim);
    for (int32_t b = 0; b < s->num_seqs; b++) {
        fill_sequence(rng, &p, b, &next_block, num_blocks);
        for (int32_t i = 0; i < s->queries[b] && s->lens[b]; i++)
            attend(&p, b, p.start[b] + i, s->lens[b] - s->queries[b] + i, scale);
    }
    a->q = p.q, a->o = p.o, a->key_cache = p.key_cache, a->value_cache = s->mla ? NULL : p.value_cache;
    a->block_table = p.table, a->seq_lens = p.lens, a->query_start = p.start, a->sinks = s->sinks ? p.sinks : NULL;
    return p;
}

static void problem_free(problem_t *p)
{
    cr_assert(testing_guards_intact(p->o));
    for (int32_t b = 0; b < p->shape.num_seqs; b++) free(p->keys[b]), free(p->values[b]);
    free(p->expected), free(p->magnitude);
    testing_buffer_free(p->q), testing_buffer_free(p->o), testing_buffer_free(p->key_cache);
    testing_buffer_free(p->value_cache), testing_buffer_free(p->table), testing_buffer_free(p->lens);
    testing_buffer_free(p->start), testing_buffer_free(p->sinks);
}

/* The scales lie in the problem, which moves when it is returned. */
static void set_scales(problem_t *p)
{
    if (p->shape.cache_dtype != EPMOE_F8_E4M3) return;
    p->args.k_scale = &p->scales[0];
    p->args.v_scale = p->shape.mla ? NULL : &p->scales[1];
}

/* The instruction sets of this machine, best first. */
static epmoe_status_t run_isa(const epmoe_attention_args_t *args, int lower)
{
    int tier = (int)epmoei_cpu_tier() - lower;
    if (tier < EPMOEI_CPU_GENERIC) tier = EPMOEI_CPU_GENERIC;
    return epmoei_attention_cpu_isa(args, epmoei_attention_isa((epmoei_cpu_tier_t)tier));
}

static epmoe_status_t run_kernel(const epmoe_attention_args_t *args, int kernel)
{
    if (kernel == 0) return epmoe_attention(args, NULL);
    return kernel == 1 ? epmoei_attention_ref(args, NULL) : run_isa(args, kernel - 2);
}
enum { NUM_KERNELS = 5 };

/* The public entry, the reference and the kernel of each instruction set against the oracle. */
static void problem_check(problem_t *p)
{
    const shape_t *s = &p->shape;
    int64_t rows = (int64_t)p->args.num_tokens * s->heads;
    double half_ulp = s->dtype == EPMOE_F32 ? 0x1p-24 : s->dtype == EPMOE_BF16 ? 0x1p-8 : 0x1p-11;
    set_scales(p);
    for (int i = 0; i < NUM_KERNELS; i++) {
        epmoe_attention_args_t args;
        cr_assert_eq(epmoei_attention_check(&p->args, &args), EPMOE_OK, "%s", epmoe_last_error());
        void *o = args.o = testing_buffer(p->o_bytes, epmoe_dtype_size(s->dtype));
        if (args.num_tokens) cr_assert_eq(run_kernel(&args, i), EPMOE_OK, "%s", epmoe_last_error());
        /* The weights are as good as scores that reach ten are in fp32. */
        for (int64_t e = 0; e < rows * s->value_dim; e++) {
            double got = (double)epmoei_load(o, s->dtype, e), expected = p->expected[e];
            cr_assert(fabs(got - expected) <= half_ulp * 1.01 * fabs(expected) + 3e-6 * p->magnitude[e] +
                                                  (s->dtype == EPMOE_F16 ? 0x1p-24 : 0),
                      "kernel %d: o[%lld] is %.9g, expected %.9g; D %d/%d H %d/%d S %d window %d layout %d dtype %d/%d",
                      i, (long long)e, got, expected, s->dim, s->value_dim, s->heads, s->kv_heads, s->block_size,
                      s->window, s->layout, s->dtype, s->cache_dtype);
        }
        cr_assert(testing_guards_intact(o));
        if (i == 0) memcpy(p->o, o, (size_t)p->o_bytes);
        testing_buffer_free(o);
    }
}

/* ------------------------------------------------------------------------------------------------------- by hand */

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

/* ------------------------------------------------------------------------------------------------------ by oracle */

static const epmoe_dtype_t cache_dtypes[][2] = {{EPMOE_F32, EPMOE_F32},      {EPMOE_BF16, EPMOE_BF16},
                                                {EPMOE_F16, EPMOE_F16},      {EPMOE_F32, EPMOE_F8_E4M3},
                                                {EPMOE_BF16, EPMOE_F8_E4M3}, {EPMOE_F16, EPMOE_F8_E4M3}};

static shape_t random_shape(testing_rng_t *rng)
{
    static const int32_t dims[] = {1, 3, 8, 16, 24, 63, 64, 80, 96, 128, 256}, groups[] = {1, 2, 4, 5, 8, 20};
    static const int32_t sizes[] = {1, 2, 3, 8, 16, 17, 32, 64}, windows[] = {0, 0, 1, 5, 31, 32, 33, 100};
    int d = testing_range(rng, 0, 5);
    shape_t s = {.dtype = cache_dtypes[d][0], .cache_dtype = cache_dtypes[d][1]};
    s.kv_heads = testing_range(rng, 1, 3);
    s.heads = s.kv_heads * groups[testing_range(rng, 0, 5)];
    s.dim = dims[testing_range(rng, 0, 10)];
    s.value_dim = testing_range(rng, 0, 2) ? s.dim : dims[testing_range(rng, 0, 10)];
    s.layout = (epmoe_cache_layout_t)testing_range(rng, 0, 2);
    s.pack = 16 / epmoe_dtype_size(s.cache_dtype);
    if (s.dim % s.pack) s.pack = 1;
    s.block_size = sizes[testing_range(rng, 0, 7)];
    s.window = windows[testing_range(rng, 0, 7)];
    s.sinks = testing_range(rng, 0, 1), s.strided = testing_range(rng, 0, 1);
    s.mla = testing_range(rng, 0, 3) == 0 && s.value_dim <= s.dim;
    s.num_seqs = testing_range(rng, 1, 5);
    for (int32_t b = 0; b < s.num_seqs; b++) {
        s.lens[b] = testing_range(rng, 0, 3) ? testing_range(rng, 0, 150) : testing_range(rng, 0, 2);
        int32_t most = s.lens[b] < 20 ? s.lens[b] : 20;
        s.queries[b] = testing_range(rng, 0, 2) ? testing_range(rng, 0, 1) : testing_range(rng, 0, most);
    }
    return s;
}

Test(attention, random_shapes_against_double, .timeout = 300)
{
    testing_rng_t rng = testing_rng(testing_seed());
    for (int round = 0; round < 150; round++) {
        problem_t p = problem_make(&rng, random_shape(&rng));
        problem_check(&p);
        problem_free(&p);
    }
}

Test(attention, every_layout_and_dtype, .timeout = 300)
{
    testing_rng_t rng = testing_rng(testing_seed());
    for (int layout = 0; layout < 3; layout++)
        for (size_t d = 0; d < sizeof cache_dtypes / sizeof *cache_dtypes; d++)
            for (int prefill = 0; prefill < 2; prefill++) {
                shape_t s = {.heads = 8, .kv_heads = 2, .dim = 64, .block_size = 16, .num_seqs = 3};
                s.layout = (epmoe_cache_layout_t)layout, s.dtype = cache_dtypes[d][0],
                s.cache_dtype = cache_dtypes[d][1];
                s.lens[0] = 77, s.lens[1] = 1, s.lens[2] = 32;
                for (int b = 0; b < 3; b++) s.queries[b] = prefill ? s.lens[b] : 1;
                problem_t p = problem_make(&rng, s);
                problem_check(&p);
                problem_free(&p);
            }
}

Test(attention, long_context, .timeout = 300)
{
    testing_rng_t rng = testing_rng(testing_seed());
    for (int window = 0; window <= 128; window += 128) {
        shape_t s = {.heads = 8, .kv_heads = 1, .dim = 64, .block_size = 16, .num_seqs = 2, .window = window};
        s.dtype = s.cache_dtype = EPMOE_F32, s.layout = EPMOE_CACHE_LAYOUT_NHD, s.sinks = true;
        s.lens[0] = 5000, s.lens[1] = 4097, s.queries[0] = 1, s.queries[1] = 3;
        problem_t p = problem_make(&rng, s);
        problem_check(&p);
        problem_free(&p);
    }
}

Test(attention, mla_values_are_the_first_columns_of_the_keys, .timeout = 300)
{
    testing_rng_t rng = testing_rng(testing_seed());
    for (int prefill = 0; prefill < 2; prefill++)
        for (int fp8 = 0; fp8 < 2; fp8++) {
            shape_t s = {.heads = 16, .kv_heads = 1, .dim = 576, .value_dim = 512, .block_size = 64, .mla = true};
            s.layout = EPMOE_CACHE_LAYOUT_NHD, s.dtype = EPMOE_BF16, s.cache_dtype = fp8 ? EPMOE_F8_E4M3 : EPMOE_BF16;
            s.num_seqs = 3, s.lens[0] = 130, s.lens[1] = 1, s.lens[2] = 64;
            s.scale = 0.0721687836f; /* 192^-0.5: of the head before absorption */
            for (int b = 0; b < 3; b++) s.queries[b] = prefill ? (s.lens[b] < 5 ? s.lens[b] : 5) : 1;
            problem_t p = problem_make(&rng, s);
            problem_check(&p);
            problem_free(&p);
        }
}

/* ----------------------------------------------------------------------------------------------------- the bounds */

/* A batch of prefill and decode: each sequence alone gives the same bits, and so does a second run. */
Test(attention, a_row_does_not_depend_on_the_others)
{
    testing_rng_t rng = testing_rng(testing_seed());
    for (int d = 0; d < 2; d++) {
        shape_t s = {.heads = 12, .kv_heads = 2, .dim = 72, .block_size = 16, .window = 45, .sinks = true};
        s.dtype = d ? EPMOE_BF16 : EPMOE_F32, s.cache_dtype = s.dtype, s.layout = EPMOE_CACHE_LAYOUT_HND;
        s.num_seqs = 4, s.lens[0] = 100, s.lens[1] = 37, s.lens[2] = 66, s.lens[3] = 5;
        s.queries[0] = 1, s.queries[1] = 37, s.queries[2] = 9, s.queries[3] = 2;
        problem_t p = problem_make(&rng, s);
        problem_check(&p);
        int32_t size = epmoe_dtype_size(s.dtype), row = s.heads * s.dim;
        for (int32_t b = 0; b < s.num_seqs; b++)
            for (int32_t i = s.queries[b] - 1; i >= 0; i -= 3) {
                epmoe_attention_args_t args = p.args;
                int32_t start[] = {0, 1}, length = s.lens[b] - i, token = p.start[b + 1] - 1 - i;
                char *o = testing_buffer(row * size, size);
                args.num_tokens = args.num_seqs = 1, args.query_start = start, args.seq_lens = &length, args.o = o;
                args.q = (char *)p.q + token * args.q_stride * size;
                args.block_table = p.table + b * args.max_blocks;
                cr_assert_eq(epmoe_attention(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
                cr_assert(op_same_bits(o, (char *)p.o + (int64_t)token * row * size, s.dtype, row), "seq %d row %d", b,
                          i);
                testing_buffer_free(o);
            }
        problem_free(&p);
    }
}

Test(attention, nan_reaches_only_the_rows_that_see_it)
{
    testing_rng_t rng = testing_rng(testing_seed());
    enum { H = 6, D = 16, LEN = 50, Q = 40, WINDOW = 12, BAD = 30 };
    for (int where = 0; where < 3; where++) {
        shape_t s = {.heads = H, .kv_heads = 2, .dim = D, .block_size = 4, .window = WINDOW, .num_seqs = 2};
        s.dtype = s.cache_dtype = EPMOE_F32, s.layout = EPMOE_CACHE_LAYOUT_NHD;
        s.lens[0] = s.lens[1] = LEN, s.queries[0] = s.queries[1] = Q;
        problem_t p = problem_make(&rng, s);
        problem_check(&p);
        float *clean = p.o;
        float *o = p.args.o = testing_buffer(p.o_bytes, 0);
        int64_t block = p.table[BAD / 4];
        if (where == 0) ((float *)p.q)[(20 * H + 4) * D + 3] = NAN;
        if (where == 1) ((float *)p.key_cache)[key_at(&p.shape, p.args.key_block_stride, block, BAD % 4, 1, 5)] = NAN;
        if (where == 2)
            ((float *)p.value_cache)[value_at(&p.shape, p.args.value_block_stride, block, BAD % 4, 1, 5)] = NAN;
        cr_assert_eq(epmoe_attention(&p.args, NULL), EPMOE_OK);
        for (int64_t t = 0; t < 2 * Q; t++)
            for (int64_t h = 0; h < H; h++)
                for (int64_t d = 0; d < D; d++) {
                    int64_t position = LEN - Q + t, i = (t * H + h) * D + d;
                    bool sees = t < Q && position >= BAD && position < BAD + WINDOW && h >= H / 2;
                    bool bad = where == 0 ? t == 20 && h == 4 : where == 1 ? sees : sees && d == 5;
                    cr_assert(bad ? isnan(o[i]) : o[i] == clean[i], "where %d t %lld h %lld d %lld: %g for %g", where,
                              (long long)t, (long long)h, (long long)d, (double)o[i], (double)clean[i]);
                }
        testing_buffer_free(o);
        problem_free(&p);
    }
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
