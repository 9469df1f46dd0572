#include "dense_layers/cache_write.h"
#include "tests/checkcuda/check.h"

#include <math.h>
#include <stdlib.h>

static epmoe_status_t run(const void *args, epmoe_stream_t stream) { return epmoe_cache_write(args, stream); }

static epmoe_status_t reference(const void *args)
{
    epmoe_cache_write_args_t checked;
    EPMOEI_CHECK(epmoei_cache_write_check(args, &checked));
    return checked.num_tokens ? epmoei_cache_write_ref(&checked, NULL) : EPMOE_OK;
}

static const check_op_t op = {"cache_write", sizeof(epmoe_cache_write_args_t), run, reference};

static const epmoe_dtype_t dtypes[] = {EPMOE_BF16, EPMOE_F16, EPMOE_F32};

typedef struct shape_t {
    int32_t tokens, heads, dim, block_size, blocks, pack, pad; /* pad: columns behind tokens and blocks */
    epmoe_cache_layout_t layout;
    epmoe_dtype_t dtype, slots_dtype;
    bool codes;    /* the cache is E4M3 */
    float k_scale; /* 0 = NULL */
    int32_t unused_of_4;
    bool ascending; /* slots one after another, as in a prefill */
    bool keys_alone;
} shape_t;

static void set_slot(char *slots, epmoe_dtype_t dtype, int64_t t, int64_t slot)
{
    if (dtype == EPMOE_I64)
        ((int64_t *)(void *)slots)[t] = slot;
    else
        ((int32_t *)(void *)slots)[t] = (int32_t)slot;
}

/* Distinct slots. The rows of unused ones stay poison, NaNs, so that writing one shows. */
static void fill(testing_rng_t *rng, check_case_t *c, const shape_t *shape)
{
    static const float edges[] = {NAN, -INFINITY, INFINITY, -0.0f, 3e38f, 1e-40f};
    check_field_t *key = check_find(c, "key"), *slots = check_find(c, "slots");
    check_field_t *value = shape->keys_alone ? NULL : check_find(c, "value");
    int64_t size = epmoe_dtype_size(shape->dtype), n = (int64_t)shape->heads * shape->dim;
    int32_t num_slots = shape->blocks * shape->block_size, *order = malloc((size_t)num_slots * sizeof *order);
    if (!order) abort();
    for (int32_t i = 0; i < num_slots; i++) order[i] = i;
    for (int32_t i = num_slots - 1; i > 0 && !shape->ascending; i--) {
        int32_t j = testing_range(rng, 0, i), other = order[j];
        order[j] = order[i], order[i] = other;
    }
    for (int64_t t = 0; t < shape->tokens; t++) {
        bool used = testing_range(rng, 0, 3) >= shape->unused_of_4;
        set_slot(slots->host, shape->slots_dtype, t, used ? order[t] : -1);
        for (int32_t side = 0; side < (shape->keys_alone ? 1 : 2); side++) {
            char *row = side ? value->host + t * value->cols * size : key->host + t * key->cols * size;
            memset(row, 0x7F, (size_t)(n * size));
            if (!used) continue;
            testing_fill_normal(rng, row, shape->dtype, n, 2.0f);
            for (int64_t i = testing_range(rng, 0, 40); i < n; i += testing_range(rng, 20, 90))
                epmoei_store(row, shape->dtype, i, edges[testing_range(rng, 0, 5)]);
        }
    }
    free(order);
}

static void make(check_case_t *c, testing_rng_t *rng, const shape_t *shape)
{
    check_case(c, &op,
               "T %d heads %d D %d S %d B %d layout %d pack %d pad %d %s %s codes %d scale %g unused %d/4 asc %d keys "
               "alone %d",
               shape->tokens, shape->heads, shape->dim, shape->block_size, shape->blocks, (int)shape->layout,
               shape->pack, shape->pad, epmoe_dtype_string(shape->dtype), epmoe_dtype_string(shape->slots_dtype),
               shape->codes, (double)shape->k_scale, shape->unused_of_4, shape->ascending, shape->keys_alone);
    c->compare = check_compare_bits;
    epmoe_cache_write_args_t args = EPMOE_CACHE_WRITE_ARGS_INIT;
    int64_t tokens = shape->tokens, row = (int64_t)shape->heads * shape->dim;
    epmoe_dtype_t cache = shape->codes ? EPMOE_F8_E4M3 : shape->dtype;
    args.num_tokens = shape->tokens;
    args.num_kv_heads = shape->heads;
    args.head_dim = shape->dim;
    args.num_blocks = shape->blocks;
    args.block_size = shape->block_size;
    args.layout = shape->layout;
    args.key_pack = shape->pack;
    args.dtype = shape->dtype;
    args.cache_dtype = cache;
    args.key_stride = row + shape->pad;
    args.value_stride = row + 2 * shape->pad;
    args.slots_dtype = shape->slots_dtype;
    args.key_block_stride = row * shape->block_size + shape->pad;
    args.value_block_stride = row * shape->block_size + 3 * shape->pad;
    memcpy(c->args, &args, sizeof args);
    CHECK_ADD(c, epmoe_cache_write_args_t, key, CHECK_IN, shape->dtype, tokens, args.key_stride, 16);
    if (!shape->keys_alone)
        CHECK_ADD(c, epmoe_cache_write_args_t, value, CHECK_IN, shape->dtype, tokens, args.value_stride, 16);
    CHECK_ADD(c, epmoe_cache_write_args_t, slots, CHECK_IN, shape->slots_dtype, 1, tokens,
              epmoe_dtype_size(shape->slots_dtype));
    CHECK_ADD(c, epmoe_cache_write_args_t, key_cache, CHECK_OUT, cache, shape->blocks, args.key_block_stride, 16);
    if (!shape->keys_alone)
        CHECK_ADD(c, epmoe_cache_write_args_t, value_cache, CHECK_OUT, cache, shape->blocks, args.value_block_stride,
                  16);
    if (shape->codes && shape->k_scale > 0) {
        *(float *)CHECK_ADD(c, epmoe_cache_write_args_t, k_scale, CHECK_IN, EPMOE_F32, 1, 1, 4) = shape->k_scale;
        *(float *)CHECK_ADD(c, epmoe_cache_write_args_t, v_scale, CHECK_IN, EPMOE_F32, 1, 1, 4) = 3 * shape->k_scale;
    }
    if (tokens) fill(rng, c, shape);
}

static void run_one(testing_rng_t *rng, const shape_t *shape)
{
    check_case_t c;
    make(&c, rng, shape);
    check_run(&c);
    check_free(&c);
}

/* The smallest whole number of packs from `dim` on, so that V1 takes it. */
static void fit_pack(shape_t *shape)
{
    int32_t pack = shape->pack ? shape->pack : 16 / (shape->codes ? 1 : epmoe_dtype_size(shape->dtype));
    if (shape->layout == EPMOE_CACHE_LAYOUT_V1) shape->dim = (int32_t)epmoei_round_up(shape->dim, pack);
}

static void check_shapes(testing_rng_t *rng)
{
    static const int32_t kinds[][3] = {{4, 128, 16}, {8, 64, 32}, {1, 576, 64}, {8, 128, 1},
                                       {3, 40, 7},   {1, 1, 16},  {2, 37, 5}};
    static const int32_t tokens[] = {0, 1, 5, 16, 33, 300, 2100};
    check_begin("cache_write", "1 to 8 heads, D 1..576, T 0..2100");
    int32_t variant = 0;
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
        for (size_t t = 0; t < sizeof tokens / sizeof *tokens; t++)
            for (int32_t layout = 0; layout < 3; layout++, variant++) {
                shape_t shape = {.tokens = tokens[t],
                                 .heads = kinds[k][0],
                                 .dim = kinds[k][1],
                                 .block_size = kinds[k][2],
                                 .blocks = 1 + (tokens[t] + tokens[t] / 4) / kinds[k][2],
                                 .layout = (epmoe_cache_layout_t)layout,
                                 .dtype = dtypes[variant / 3 % 3],
                                 .slots_dtype = variant % 2 ? EPMOE_I64 : EPMOE_I32,
                                 .codes = variant / 2 % 2,
                                 .k_scale = variant / 4 % 2 ? 0.37f : 0,
                                 .unused_of_4 = (int32_t)(t + k) % 3,
                                 .ascending = variant / 5 % 2,
                                 .keys_alone = variant % 4 == 3};
                fit_pack(&shape);
                int64_t elements = (int64_t)shape.tokens * shape.heads * shape.dim;
                if (elements > 1 << 20 || check_skips(elements)) continue;
                run_one(rng, &shape);
            }
    check_end();
}

static void check_options(testing_rng_t *rng)
{
    check_begin("cache_write", "every layout, dtype, cache, pack, stride");
    for (int32_t i = 0; i < 3 * 3 * 2 * 2 * 4; i += check_step(7)) {
        static const int32_t packs[] = {0, 4, 3, 32};
        shape_t shape = {.tokens = testing_range(rng, 1, 70),
                         .heads = testing_range(rng, 1, 3),
                         .dim = i / 18 % 2 ? 48 : 30,
                         .block_size = testing_range(rng, 1, 20),
                         .pack = packs[i / 36],
                         .pad = i / 36 == 0   ? 16
                                : i / 36 == 1 ? 3
                                              : 0,
                         .layout = (epmoe_cache_layout_t)(i % 3),
                         .dtype = dtypes[i / 3 % 3],
                         .codes = i / 9 % 2,
                         .slots_dtype = testing_range(rng, 0, 1) ? EPMOE_I64 : EPMOE_I32,
                         .k_scale = ldexpf(1.3f, testing_range(rng, -3, 3)),
                         .unused_of_4 = testing_range(rng, 0, 2),
                         .ascending = testing_range(rng, 0, 1),
                         .keys_alone = testing_range(rng, 0, 2) == 0};
        fit_pack(&shape);
        shape.blocks = 2 + shape.tokens / shape.block_size;
        run_one(rng, &shape);
    }
    check_end();
}

static void refill(check_case_t *c, int32_t round, void *ctx)
{
    const shape_t *shape = ctx;
    testing_rng_t rng = testing_rng((uint64_t)round + 33);
    fill(&rng, c, shape);
}

static void check_bad_slots(check_case_t *c, const shape_t *shape)
{
    check_field_t *slots = check_find(c, "slots");
    char *bad = testing_buffer(slots->bytes, 0);
    int64_t num_slots = (int64_t)shape->blocks * shape->block_size;
    int32_t count = 0;
    memcpy(bad, slots->host, (size_t)slots->bytes);
    for (int64_t t = 1; t < shape->tokens; t += 6, count++) {
        set_slot(slots->host, shape->slots_dtype, t, -1);
        int64_t slot = count % 3 == 0 ? num_slots : count % 3 == 1 ? -2 - t : INT32_MAX;
        if (shape->slots_dtype == EPMOE_I64 && t == 7) slot = (int64_t)1 << 32; /* 0 in 32 bits */
        set_slot(bad, shape->slots_dtype, t, slot);
    }
    check_bad_ids(c, "slots", bad, count);
    testing_buffer_free(bad);
}

static void check_calls(testing_rng_t *rng)
{
    check_begin("cache_write", "no blocks, graphs, alignment, bad slots");
    for (int32_t i = 0; i < 12; i++) {
        shape_t shape = {.tokens = 45,
                         .heads = 2,
                         .dim = i / 6 ? 33 : 64,
                         .block_size = 8,
                         .blocks = 7,
                         .pack = i / 6 ? 11 : 0,
                         .layout = (epmoe_cache_layout_t)(i % 3),
                         .dtype = EPMOE_BF16,
                         .slots_dtype = i / 3 % 2 ? EPMOE_I64 : EPMOE_I32,
                         .codes = i / 3 % 2,
                         .k_scale = 0.5f,
                         .unused_of_4 = 1,
                         .keys_alone = i % 4 == 3};
        check_case_t c;
        make(&c, rng, &shape);
        check_misaligned(&c);
        check_graph(&c, refill, &shape);
        check_bad_slots(&c, &shape);
        check_free(&c);
    }
    shape_t none = {.tokens = 9, .heads = 2, .dim = 64, .block_size = 8, .blocks = 0, .dtype = EPMOE_BF16};
    none.slots_dtype = EPMOE_I64;
    none.unused_of_4 = 4;
    none.layout = EPMOE_CACHE_LAYOUT_NHD;
    run_one(rng, &none);
    check_end();
}

void check_cache_write(testing_rng_t *rng)
{
    check_shapes(rng);
    check_options(rng);
    check_calls(rng);
}
