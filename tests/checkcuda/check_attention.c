#include "dense_layers/attention.h"
#include "tests/checkcuda/check.h"

#include <math.h>
#include <stdlib.h>

static epmoe_status_t run(const void *args, epmoe_stream_t stream) { return epmoe_attention(args, stream); }

static epmoe_status_t reference(const void *args)
{
    epmoe_attention_args_t checked;
    EPMOEI_CHECK(epmoei_attention_check(args, &checked));
    return checked.num_tokens ? epmoei_attention_ref(&checked, NULL) : EPMOE_OK;
}

static const check_op_t op = {"attention", sizeof(epmoe_attention_args_t), run, reference};

enum { MAX_SEQS = 70 };

typedef struct shape_t {
    int32_t heads, kv_heads, dim, value_dim; /* value_dim 0 = dim */
    int32_t block_size, window, pack;
    int32_t pad; /* elements behind tokens of q and behind blocks */
    epmoe_cache_layout_t layout;
    epmoe_dtype_t dtype;
    bool codes;    /* the cache is E4M3 */
    float k_scale; /* 0 = NULL */
    float scale;
    bool keys_alone; /* values are columns of the keys */
    bool sinks;
    bool specials;          /* some NaN and infinities */
    int64_t workspace_part; /* 1/n of what the call asks for; 0 = none */
    int32_t spare_rows;     /* of q and o behind the last query */
    int32_t num_seqs;
    int32_t queries[MAX_SEQS], lens[MAX_SEQS];
} shape_t;

static int32_t first_seen(const shape_t *s, int32_t b)
{
    int32_t first = s->window ? s->lens[b] - s->queries[b] - s->window + 1 : 0;
    return first > 0 ? first : 0;
}

static int64_t key_place(const shape_t *s, int64_t slot, int64_t h, int64_t d)
{
    switch (s->layout) {
    case EPMOE_CACHE_LAYOUT_NHD: return (slot * s->kv_heads + h) * s->dim + d;
    case EPMOE_CACHE_LAYOUT_HND: return (h * s->block_size + slot) * s->dim + d;
    default: return ((h * (s->dim / s->pack) + d / s->pack) * s->block_size + slot) * s->pack + d % s->pack;
    }
}

static int64_t value_place(const shape_t *s, int64_t slot, int64_t h, int64_t d)
{
    switch (s->layout) {
    case EPMOE_CACHE_LAYOUT_NHD: return (slot * s->kv_heads + h) * s->value_dim + d;
    case EPMOE_CACHE_LAYOUT_HND: return (h * s->block_size + slot) * s->value_dim + d;
    default: return (h * s->value_dim + d) * s->block_size + slot;
    }
}

/* Codes of magnitudes up to 2. */
static void put(testing_rng_t *rng, char *data, epmoe_dtype_t dtype, int64_t i, bool special)
{
    static const float numbers[] = {NAN, INFINITY, -INFINITY};
    if (dtype == EPMOE_F8_E4M3)
        data[i] = (char)(special ? 0x7F : testing_range(rng, 0, 0x40) | testing_range(rng, 0, 1) << 7);
    else
        epmoei_store(data, dtype, i, special ? numbers[testing_range(rng, 0, 2)] : testing_normal(rng));
}

static bool is_special(testing_rng_t *rng, const shape_t *s, int32_t one_in)
{
    return s->specials && testing_range(rng, 1, one_in) == 1;
}

static void fill_slot(testing_rng_t *rng, check_case_t *c, const shape_t *s, int64_t block, int32_t slot)
{
    epmoe_attention_args_t args;
    memcpy(&args, c->args, sizeof args);
    char *keys = check_find(c, "key_cache")->host;
    char *values = s->keys_alone ? NULL : check_find(c, "value_cache")->host;
    for (int64_t h = 0; h < s->kv_heads; h++) {
        for (int64_t d = 0; d < s->dim; d++)
            put(rng, keys, args.cache_dtype, block * args.key_block_stride + key_place(s, slot, h, d),
                is_special(rng, s, 60000));
        for (int64_t d = 0; d < s->value_dim && values; d++)
            put(rng, values, args.cache_dtype, block * args.value_block_stride + value_place(s, slot, h, d),
                is_special(rng, s, 4000));
    }
}

/* What no query sees stays poison: slots, entries of the table, rows of q; so that reading it shows. */
static void fill(testing_rng_t *rng, check_case_t *c, const shape_t *s)
{
    epmoe_attention_args_t args;
    memcpy(&args, c->args, sizeof args);
    char *q = check_find(c, "q")->host;
    int32_t *table = (int32_t *)(void *)check_find(c, "block_table")->host;
    int32_t *lens = (int32_t *)(void *)check_find(c, "seq_lens")->host;
    int32_t *start = (int32_t *)(void *)check_find(c, "query_start")->host;
    int32_t next = 0;
    start[0] = 0;
    for (int32_t b = 0; b < s->num_seqs; b++) {
        lens[b] = s->lens[b];
        start[b + 1] = start[b] + s->queries[b];
        for (int32_t j = first_seen(s, b); j < s->lens[b] && s->queries[b] > 0; j++) {
            int32_t *entry = &table[(int64_t)b * args.max_blocks + j / s->block_size];
            /* A step that shares no divisor with the number of blocks: every block once, in no order. */
            if (j == first_seen(s, b) || j % s->block_size == 0)
                *entry = (int32_t)((int64_t)next++ * 7 % args.num_blocks);
            fill_slot(rng, c, s, *entry, j % s->block_size);
        }
    }
    for (int64_t t = 0; t < start[s->num_seqs]; t++)
        for (int64_t i = 0; i < (int64_t)s->heads * s->dim; i++)
            epmoei_store(q, s->dtype, t * args.q_stride + i,
                         is_special(rng, s, 20000) ? NAN : testing_normal(rng) * (s->codes ? 0.4f : 1.0f));
    for (int32_t h = 0; h < s->heads && s->sinks; h++)
        ((float *)(void *)check_find(c, "sinks")->host)[h] = 2 * testing_normal(rng);
}

static void make(check_case_t *c, testing_rng_t *rng, shape_t *s)
{
    if (!s->value_dim) s->value_dim = s->dim;
    if (!s->pack) s->pack = s->layout == EPMOE_CACHE_LAYOUT_V1 ? 16 / (s->codes ? 1 : epmoe_dtype_size(s->dtype)) : 1;
    int32_t tokens = s->spare_rows, longest = 0;
    for (int32_t b = 0; b < s->num_seqs; b++) {
        tokens += s->queries[b];
        longest = s->lens[b] > longest ? s->lens[b] : longest;
    }
    check_case(
        c, &op,
        "B %d T %d longest %d heads %d/%d D %d Dv %d S %d window %d layout %d pack %d pad %d %s codes %d scale %g "
        "keys alone %d sinks %d specials %d workspace 1/%lld",
        s->num_seqs, tokens, longest, s->heads, s->kv_heads, s->dim, s->value_dim, s->block_size, s->window,
        (int)s->layout, s->pack, s->pad, epmoe_dtype_string(s->dtype), s->codes, (double)s->scale, s->keys_alone,
        s->sinks, s->specials, (long long)s->workspace_part);
    /* Weights are rounded to 16 bits, which a row of few large ones feels more than one ulp. */
    c->tolerance = s->dtype == EPMOE_BF16 ? 0x1p-7 : s->dtype == EPMOE_F16 ? 0x1p-10 : 2e-5;
    epmoe_attention_args_t args = EPMOE_ATTENTION_ARGS_INIT;
    args.backend = EPMOE_BACKEND_CUDA;
    args.num_tokens = tokens;
    args.num_seqs = s->num_seqs;
    args.num_heads = s->heads;
    args.num_kv_heads = s->kv_heads;
    args.head_dim = s->dim;
    args.value_dim = s->value_dim;
    args.block_size = s->block_size;
    args.max_blocks = (int32_t)epmoei_ceil_div(longest, s->block_size) + 1;
    args.num_blocks = s->num_seqs * args.max_blocks + 1;
    if (args.num_blocks % 7 == 0) args.num_blocks++;
    args.dtype = s->dtype;
    args.cache_dtype = s->codes ? EPMOE_F8_E4M3 : s->dtype;
    args.layout = s->layout;
    args.key_pack = s->pack;
    args.window = s->window;
    args.scale = s->scale;
    args.q_stride = (int64_t)s->heads * s->dim + s->pad;
    args.key_block_stride = (int64_t)s->block_size * s->kv_heads * s->dim + s->pad;
    args.value_block_stride = (int64_t)s->block_size * s->kv_heads * s->value_dim + 2 * s->pad;
    memcpy(c->args, &args, sizeof args);
    CHECK_ADD(c, epmoe_attention_args_t, q, CHECK_IN, s->dtype, tokens, args.q_stride, 16);
    CHECK_ADD(c, epmoe_attention_args_t, key_cache, CHECK_IN, args.cache_dtype, args.num_blocks, args.key_block_stride,
              16);
    if (!s->keys_alone)
        CHECK_ADD(c, epmoe_attention_args_t, value_cache, CHECK_IN, args.cache_dtype, args.num_blocks,
                  args.value_block_stride, 16);
    CHECK_ADD(c, epmoe_attention_args_t, block_table, CHECK_IN, EPMOE_I32, s->num_seqs, args.max_blocks, 4);
    CHECK_ADD(c, epmoe_attention_args_t, seq_lens, CHECK_IN, EPMOE_I32, 1, s->num_seqs, 4);
    CHECK_ADD(c, epmoe_attention_args_t, query_start, CHECK_IN, EPMOE_I32, 1, s->num_seqs + 1, 4);
    if (s->sinks) CHECK_ADD(c, epmoe_attention_args_t, sinks, CHECK_IN, EPMOE_F32, 1, s->heads, 4);
    if (s->codes && s->k_scale > 0) {
        *(float *)CHECK_ADD(c, epmoe_attention_args_t, k_scale, CHECK_IN, EPMOE_F32, 1, 1, 4) = s->k_scale;
        if (!s->keys_alone)
            *(float *)CHECK_ADD(c, epmoe_attention_args_t, v_scale, CHECK_IN, EPMOE_F32, 1, 1, 4) = 3 * s->k_scale;
    }
    CHECK_ADD(c, epmoe_attention_args_t, o, CHECK_OUT, s->dtype, tokens * (int64_t)s->heads, s->value_dim, 16);
    fill(rng, c, s);

    /* The size depends on whether there is a cache of values. */
    memcpy(&args, c->args, sizeof args);
    if (!s->keys_alone) args.value_cache = check_find(c, "value_cache")->device;
    int64_t bytes = 0;
    if (epmoe_attention_workspace_size(&args, &bytes) != EPMOE_OK) check_fail(c, "%s", epmoe_last_error());
    args.workspace_bytes = s->workspace_part ? bytes / s->workspace_part / 16 * 16 : 0;
    args.value_cache = NULL;
    memcpy(c->args, &args, sizeof args);
    CHECK_ADD(c, epmoe_attention_args_t, workspace, CHECK_SCRATCH, EPMOE_U8, 1, args.workspace_bytes, 16);
}

static void run_one(testing_rng_t *rng, shape_t *shape)
{
    check_case_t c;
    make(&c, rng, shape);
    check_run(&c);
    check_free(&c);
}

/* Multiply-adds of the reference, roughly. */
static double work(const shape_t *s)
{
    double pairs = 0;
    for (int32_t b = 0; b < s->num_seqs; b++)
        pairs += (double)s->queries[b] * (s->window && s->window < s->lens[b] ? s->window : s->lens[b]);
    return pairs * s->heads * (s->dim + (s->value_dim ? s->value_dim : s->dim));
}

static bool too_much(const shape_t *s) { return work(s) > (check_small ? 3e6 : 1.5e8); }

/* Query and cache heads. */
static const int32_t groups[][2] = {{32, 8}, {8, 8}, {14, 2}, {16, 1}, {20, 1}, {5, 5}, {12, 4}};
static const int32_t dims[] = {64, 80, 96, 128, 192, 256};

static void choose(testing_rng_t *rng, shape_t *s, int32_t i)
{
    s->heads = groups[i % 7][0];
    s->kv_heads = groups[i % 7][1];
    s->layout = i % 2 ? EPMOE_CACHE_LAYOUT_NHD : EPMOE_CACHE_LAYOUT_HND;
    s->dtype = i % 5 < 3 ? EPMOE_BF16 : EPMOE_F16;
    s->codes = i % 3 == 2;
    s->block_size = i % 4 == 3 ? testing_range(rng, 1, 40) : 16 << testing_range(rng, 0, 2);
    s->k_scale = i % 2 ? 0.6f : 0;
    s->sinks = testing_range(rng, 0, 1);
    s->specials = testing_range(rng, 0, 3) == 0;
    s->pad = testing_range(rng, 0, 1) * 16;
    s->spare_rows = testing_range(rng, 0, 1) * 3;
    s->workspace_part = testing_range(rng, 0, 3);
}

static void check_decode(testing_rng_t *rng)
{
    check_begin("attention", "decode: 1 to 64 sequences, 1 to 5000 tokens");
    static const int32_t seqs[] = {1, 3, 64};
    for (int32_t i = 0; i < 3 * 6 * 4; i += check_step(5)) {
        shape_t s = {.dim = dims[i / 3 % 6], .num_seqs = seqs[i % 3]};
        choose(rng, &s, i);
        if (i / 18 == 1) s.window = testing_range(rng, 1, 700);
        for (int32_t b = 0; b < s.num_seqs; b++) {
            s.queries[b] = i / 18 == 2 ? testing_range(rng, 0, 4) : 1;
            int32_t most = s.num_seqs == 64 ? 150 : i / 18 == 3 ? 5000 : 1200;
            s.lens[b] = testing_range(rng, 0, 7) ? s.queries[b] + testing_range(rng, 0, most) : 0;
        }
        if (!too_much(&s)) run_one(rng, &s);
    }
    check_end();
}

static void check_prefill(testing_rng_t *rng)
{
    check_begin("attention", "prefill and mixtures, 1 to 600 queries");
    for (int32_t i = 0; i < 90; i += check_step(7)) {
        shape_t s = {.dim = dims[i % 6], .num_seqs = 1 + i / 6 % 4};
        choose(rng, &s, i);
        if (i % 4 == 1) s.window = testing_range(rng, 1, 300);
        if (i % 5 == 0) s.value_dim = s.dim == 192 ? 128 : s.dim;
        for (int32_t b = 0; b < s.num_seqs; b++) {
            s.queries[b] =
                testing_range(rng, 0, 2) ? testing_range(rng, 30, i % 3 ? 130 : 600) : testing_range(rng, 0, 2);
            s.lens[b] =
                testing_range(rng, 0, 9) ? s.queries[b] + testing_range(rng, 0, 1) * testing_range(rng, 0, 300) : 0;
        }
        if (!too_much(&s)) run_one(rng, &s);
    }
    check_end();
}

static void check_latent(testing_rng_t *rng)
{
    check_begin("attention", "MLA: keys of 576, values of 512");
    static const int32_t heads[] = {16, 64, 128, 1, 20};
    for (int32_t i = 0; i < 30; i += check_step(7)) {
        shape_t s = {.dim = 576, .value_dim = 512, .num_seqs = testing_range(rng, 1, 4), .keys_alone = true};
        choose(rng, &s, i);
        s.heads = heads[i % 5];
        s.kv_heads = 1;
        s.scale = 0.07f;
        if (i == 8) s.dim = 528, s.value_dim = 496;
        if (i % 6 == 5) s.window = 100;
        for (int32_t b = 0; b < s.num_seqs; b++) {
            s.queries[b] = i % 3 ? 1 : testing_range(rng, 0, 20);
            s.lens[b] = s.queries[b] + testing_range(rng, 0, i % 3 ? 1000 : 100);
        }
        if (!too_much(&s)) run_one(rng, &s);
    }
    check_end();
}

static void check_any(testing_rng_t *rng)
{
    check_begin("attention", "V1, fp32, odd sizes and strides, negative scale");
    for (int32_t i = 0; i < 48; i += check_step(5)) {
        shape_t s = {.dim = 4 * testing_range(rng, 1, 40), .num_seqs = testing_range(rng, 1, 4)};
        choose(rng, &s, i);
        s.heads = s.kv_heads * testing_range(rng, 1, 4);
        s.dtype = i % 3 ? s.dtype : EPMOE_F32;
        s.layout = (epmoe_cache_layout_t)(i / 3 % 3);
        s.pack = s.layout == EPMOE_CACHE_LAYOUT_V1 ? 4 : 1;
        s.pad = testing_range(rng, 0, 5);
        s.value_dim = testing_range(rng, 1, 160);
        if (i % 7 == 0) s.keys_alone = true, s.value_dim = testing_range(rng, 1, s.dim);
        if (i % 5 == 0) s.scale = -0.2f;
        if (i % 4 == 1) s.window = testing_range(rng, 1, 60);
        for (int32_t b = 0; b < s.num_seqs; b++) {
            s.queries[b] = testing_range(rng, 0, 20);
            s.lens[b] = testing_range(rng, 0, 5) ? s.queries[b] + testing_range(rng, 0, 150) : 0;
        }
        if (!too_much(&s)) run_one(rng, &s);
    }
    check_end();
}

static void refill(check_case_t *c, int32_t round, void *ctx)
{
    shape_t *s = ctx;
    testing_rng_t rng = testing_rng((uint64_t)round + 5);
    /* Other lengths under the same bound: what a captured decode meets from step to step. */
    for (int32_t b = 0; b < s->num_seqs; b++) s->lens[b] = s->queries[b] + testing_range(&rng, 0, 500);
    fill(&rng, c, s);
}

/* One block that does not exist counts once for each of its keys that is looked up, and reads as zeros. */
static void check_bad_block(check_case_t *c, const shape_t *s)
{
    epmoe_attention_args_t args;
    memcpy(&args, c->args, sizeof args);
    check_field_t *keys = check_find(c, "key_cache"), *table = check_find(c, "block_table");
    char *bad = testing_buffer(table->bytes, 0);
    int32_t entry;
    memcpy(&entry, table->host, 4);
    int64_t size = epmoe_dtype_size(args.cache_dtype), key = args.key_block_stride * size;
    memset(keys->host + entry * key, 0, (size_t)key);
    if (!s->keys_alone) {
        int64_t value = args.value_block_stride * size;
        memset(check_find(c, "value_cache")->host + entry * value, 0, (size_t)value);
    }
    memcpy(bad, table->host, (size_t)table->bytes);
    entry = args.num_blocks;
    memcpy(bad, &entry, 4);
    check_bad_ids(c, "block_table", bad, s->block_size);
    testing_buffer_free(bad);
}

static void check_calls(testing_rng_t *rng)
{
    check_begin("attention", "graphs, alignment, blocks that do not exist");
    for (int32_t i = 0; i < 8; i++) {
        shape_t s = {.heads = 8, .kv_heads = i / 2 == 2 ? 1 : 2, .dim = 64, .num_seqs = 3, .block_size = 16};
        s.layout = EPMOE_CACHE_LAYOUT_NHD;
        s.dtype = i / 2 == 3 ? EPMOE_F32 : EPMOE_BF16;
        s.codes = i == 1;
        s.k_scale = 0.5f;
        s.sinks = true;
        s.workspace_part = 1;
        if (i / 2 == 2) s.dim = 576, s.value_dim = 512, s.keys_alone = true;
        for (int32_t b = 0; b < s.num_seqs; b++) {
            s.queries[b] = i / 2 == 1 ? 40 : 1;
            s.lens[b] = 600;
        }
        check_case_t c;
        make(&c, rng, &s);
        check_misaligned(&c);
        check_graph(&c, refill, &s);
        check_free(&c);
        if (i / 2 == 1) continue; /* several tiles look a block up */
        s.num_seqs = 1;
        s.lens[0] = 300;
        make(&c, rng, &s);
        check_bad_block(&c, &s);
        check_free(&c);
    }
    check_end();
}

void check_attention(testing_rng_t *rng)
{
    check_decode(rng);
    check_prefill(rng);
    check_latent(rng);
    check_any(rng);
    check_calls(rng);
}
