/* Attention over a paged cache against a double-precision oracle on dense keys and values that the test scatters
 * itself: all layouts and dtypes, MLA, batches, NaN. What no query sees is NaN, and table entries that must not be read
 * are out of range. */
#include "tests/attention_testing.h"

#include <math.h>
#include <stdlib.h>

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

Test(attention_oracle, random_shapes_against_double, .timeout = 300)
{
    testing_rng_t rng = testing_rng(testing_seed());
    for (int round = 0; round < 150; round++) {
        problem_t p = problem_make(&rng, random_shape(&rng));
        problem_check(&p);
        problem_free(&p);
    }
}

Test(attention_oracle, every_layout_and_dtype, .timeout = 300)
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

Test(attention_oracle, long_context, .timeout = 300)
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

Test(attention_oracle, mla_values_are_the_first_columns_of_the_keys, .timeout = 300)
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

/* A batch of prefill and decode: each sequence alone gives the same bits, and so does a second run. */
Test(attention_oracle, a_row_does_not_depend_on_the_others)
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

Test(attention_oracle, nan_reaches_only_the_rows_that_see_it)
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
