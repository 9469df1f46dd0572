#include "kernels/align.h"
#include "tests/checkcuda/check.h"

static epmoe_status_t run(const void *args, epmoe_stream_t stream) { return epmoe_align_block_size(args, stream); }

static epmoe_status_t reference(const void *args)
{
    epmoe_align_args_t checked;
    EPMOEI_CHECK(epmoei_align_check(args, &checked));
    return epmoei_align_ref(&checked, NULL);
}

static const check_op_t op = {"align", sizeof(epmoe_align_args_t), run, reference};

typedef enum fill_t { FILL_UNIFORM, FILL_ONE_EXPERT, FILL_FEW_EXPERTS, FILL_UNUSED, FILL_NONE } fill_t;

static void fill_ids(testing_rng_t *rng, const check_field_t *field, int32_t num_experts, fill_t fill)
{
    int32_t *ids = (int32_t *)(void *)field->host;
    int32_t one = testing_range(rng, 0, num_experts - 1);
    for (int64_t s = 0; s < field->rows * field->cols; s++) {
        ids[s] = testing_range(rng, 0, num_experts - 1);
        if (fill == FILL_ONE_EXPERT) ids[s] = one;
        if (fill == FILL_FEW_EXPERTS) ids[s] -= ids[s] % 7 % num_experts;
        if (fill == FILL_NONE || (fill == FILL_UNUSED && testing_range(rng, 0, 2))) ids[s] = -1;
    }
}

typedef struct shape_t {
    int32_t tokens, top_k, experts, block;
} shape_t;

static void make(check_case_t *c, testing_rng_t *rng, shape_t shape, bool map, bool optional, fill_t fill)
{
    check_case(c, &op, "T %d k %d E %d block %d map %d optional %d fill %d", shape.tokens, shape.top_k, shape.experts,
               shape.block, map, optional, (int)fill);
    epmoe_align_args_t args = EPMOE_ALIGN_ARGS_INIT;
    args.num_tokens = shape.tokens;
    args.top_k = shape.top_k;
    args.num_experts = shape.experts;
    args.block_size = shape.block;
    args.backend = EPMOE_BACKEND_CUDA;
    int64_t worst = epmoe_align_max_padded(shape.tokens, shape.top_k, shape.experts, shape.block);
    if (epmoe_align_workspace_size(&args, &args.workspace_bytes) != EPMOE_OK) check_fail(c, "%s", epmoe_last_error());
    memcpy(c->args, &args, sizeof args);

    CHECK_ADD(c, epmoe_align_args_t, ids, CHECK_IN, EPMOE_I32, shape.tokens, shape.top_k, 4);
    fill_ids(rng, &c->fields[0], shape.experts, fill);
    if (map) {
        int32_t *local = CHECK_ADD(c, epmoe_align_args_t, expert_map, CHECK_IN, EPMOE_I32, 1, shape.experts, 4),
                next = 0;
        for (int32_t e = 0; e < shape.experts; e++) local[e] = testing_range(rng, 0, 1) ? next++ : -1;
    }
    CHECK_ADD(c, epmoe_align_args_t, sorted_ids, CHECK_OUT, EPMOE_I32, 1, worst, 4);
    CHECK_ADD(c, epmoe_align_args_t, num_post_padded, CHECK_OUT, EPMOE_I32, 1, 1, 4);
    if (optional) {
        int32_t block = shape.block ? shape.block : 1;
        CHECK_ADD(c, epmoe_align_args_t, expert_ids, CHECK_OUT, EPMOE_I32, 1, worst / block, 4);
        CHECK_ADD(c, epmoe_align_args_t, expert_offsets, CHECK_OUT, EPMOE_I32, 1, shape.experts + 1, 4);
    }
    CHECK_ADD(c, epmoe_align_args_t, workspace, CHECK_SCRATCH, EPMOE_U8, 1, args.workspace_bytes, 4);
}

static void run_one(testing_rng_t *rng, shape_t shape, bool map, bool optional, fill_t fill)
{
    check_case_t c;
    make(&c, rng, shape, map, optional, fill);
    check_run(&c);
    check_free(&c);
}

static void check_shapes(testing_rng_t *rng)
{
    const int32_t experts[] = {1, 5, 60, 72, 160, 256, 384, 576, 1025, 4096};
    const int32_t tokens[] = {0, 1, 3, 63, 127, 257, 4096}, blocks[] = {0, 1, 16, 64, 128, 7};
    check_begin("align", "E 1..4096, T 0..4096");
    for (size_t e = 0; e < sizeof experts / sizeof *experts; e++)
        for (size_t t = 0; t < sizeof tokens / sizeof *tokens; t++) {
            shape_t shape = {tokens[t], (e + t) % 2 ? 8 : 3, experts[e], blocks[(e + t) % 6]};
            if (check_skips((int64_t)shape.tokens * shape.top_k)) continue;
            run_one(rng, shape, t % 2, true, (fill_t)((e + 2 * t) % 5));
        }
    check_end();
}

/* Around the limits of the one-tile form and of a tile of the other, and where chunks hold several tiles. */
static void check_sizes(testing_rng_t *rng)
{
    const shape_t shapes[] = {{8192, 1, 256, 1},  {8193, 1, 256, 1},     {1024, 8, 1024, 16}, {1025, 8, 1024, 16},
                              {2048, 1, 4096, 8}, {2049, 1, 4096, 8},    {10, 32, 1000, 1},   {11, 93, 2000, 3},
                              {8192, 8, 128, 64}, {131072, 8, 256, 128}, {4096, 31, 4096, 1}, {1000003, 1, 5, 1},
                              {999, 9, 3000, 2}};
    check_begin("align", "tile and chunk limits, 10^6 slots");
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int32_t fill = FILL_UNIFORM; fill <= FILL_UNUSED; fill++)
            if (!check_skips((int64_t)shapes[i].tokens * shapes[i].top_k))
                run_one(rng, shapes[i], i % 2, fill % 2, (fill_t)fill);
    check_end();
}

typedef struct refill_t {
    testing_rng_t *rng;
    shape_t shape;
} refill_t;

static void refill(check_case_t *c, int32_t round, void *ctx)
{
    const refill_t *how = ctx;
    fill_ids(how->rng, check_find(c, "ids"), how->shape.experts, (fill_t)round);
    *(int32_t *)(void *)check_find(c, "num_tokens_dev")->host = how->shape.tokens - round * (how->shape.tokens / 3);
}

static void check_calls(testing_rng_t *rng)
{
    const shape_t shapes[] = {{100, 8, 60, 16}, {5000, 4, 256, 64}, {300, 4, 4096, 1}};
    check_begin("align", "device token count, graphs, alignment, bad ids");
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        check_case_t c;
        make(&c, rng, shapes[i], i == 1, true, FILL_UNUSED);
        int32_t *actual = CHECK_ADD(&c, epmoe_align_args_t, num_tokens_dev, CHECK_IN, EPMOE_I32, 1, 1, 4);
        *actual = shapes[i].tokens / 2;
        check_run(&c);
        check_misaligned(&c);
        refill_t how = {rng, shapes[i]};
        check_graph(&c, refill, &how);

        *actual = shapes[i].tokens;
        check_field_t *ids = check_find(&c, "ids");
        int32_t *bad = testing_buffer(ids->bytes, 0), count = 0;
        memcpy(bad, ids->host, (size_t)ids->bytes);
        for (int64_t s = 0; s < ids->cols * ids->rows; s += 1 + s % 13) {
            ((int32_t *)(void *)ids->host)[s] = -1;
            bad[s] = count % 3 == 0 ? -2 : count % 3 == 1 ? shapes[i].experts : INT32_MAX;
            count++;
        }
        check_bad_ids(&c, "ids", bad, count);
        testing_buffer_free(bad);
        check_free(&c);
    }
    check_end();
}

/* An entry of the map below -1 counts as -1. */
static void check_bad_map(testing_rng_t *rng)
{
    const shape_t shapes[] = {{40, 2, 300, 8}, {9000, 2, 300, 8}, {40, 2, 2000, 8}};
    check_begin("align", "bad expert maps");
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        check_case_t c;
        make(&c, rng, shapes[i], true, true, FILL_UNIFORM);
        check_field_t *map = check_find(&c, "expert_map");
        int32_t *bad = testing_buffer(map->bytes, 0), *good = (int32_t *)(void *)map->host;
        memcpy(bad, good, (size_t)map->bytes);
        int32_t at[] = {0, 77, shapes[i].experts - 1};
        for (int j = 0; j < 3; j++) good[at[j]] = -1, bad[at[j]] = -2 - j;
        check_bad_ids(&c, "expert_map", bad, 3);
        testing_buffer_free(bad);
        check_free(&c);
    }
    check_end();
}

void check_align(testing_rng_t *rng)
{
    check_shapes(rng);
    check_sizes(rng);
    check_calls(rng);
    check_bad_map(rng);
}
