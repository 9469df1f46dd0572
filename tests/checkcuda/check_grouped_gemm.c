#include "base/dtype.h"
#include "kernels/grouped_gemm.h"
#include "kernels/kernel_table.h"
#include "tests/checkcuda/check.h"
#include "tests/checkcuda/plain_tiles.h"

#include <math.h>
#include <stdlib.h>

static epmoe_status_t run(const void *args, epmoe_stream_t stream) { return epmoe_grouped_gemm(args, stream); }

/* The rows [first,end) of expert_offsets. */
static void reference_rows(const epmoe_grouped_gemm_args_t *all, int32_t first, int32_t end)
{
    int64_t row_bytes = all->k * epmoe_dtype_size(epmoei_dtype_of_format(all->weight.format));
    for (int64_t e = 0; e < all->num_experts; e++) {
        int32_t from = all->expert_offsets[e], to = all->expert_offsets[e + 1];
        const int32_t rows[] = {from > first ? from : first, to < end ? to : end};
        if (rows[0] >= rows[1]) continue;
        epmoe_grouped_gemm_args_t one = *all;
        one.num_experts = 1;
        one.expert_offsets = rows;
        one.weight.data = (const char *)all->weight.data + e * all->n * row_bytes;
        if (all->bias) one.bias = all->bias + e * all->n;
        epmoei_grouped_gemm_ref(&one, NULL);
    }
}

/* The product of a large shape takes one core seconds. */
static epmoe_status_t reference(const void *args)
{
    enum { kRows = 32 };
    epmoe_grouped_gemm_args_t checked;
    EPMOEI_CHECK(epmoei_grouped_gemm_check(args, &checked));
    const int32_t all_rows[] = {0, checked.num_rows_dev ? *checked.num_rows_dev : checked.max_rows};
    if (!checked.expert_offsets) checked.expert_offsets = all_rows;
#pragma omp parallel for schedule(dynamic)
    for (int32_t first = 0; first < checked.max_rows; first += kRows) reference_rows(&checked, first, first + kRows);
    return EPMOE_OK;
}

/* The same with weights in tiles. */
static epmoe_status_t run_tiled(const void *args, epmoe_stream_t stream)
{
    epmoe_grouped_gemm_args_t tiled = *(const epmoe_grouped_gemm_args_t *)args;
    const bool gated = tiled.activation < EPMOE_ACTIVATION_NONE;
    tiled.layout = EPMOE_LAYOUT_PACKED;
    epmoe_status_t status = check_make_tiles(&tiled.weight, tiled.num_experts, tiled.n, tiled.k, gated, stream);
    if (status == EPMOE_OK) status = epmoe_grouped_gemm(&tiled, stream);
    const epmoe_status_t dropped = check_drop_tiles(&tiled.weight, stream);
    return status == EPMOE_OK ? dropped : status;
}

static const check_op_t op = {"grouped_gemm", sizeof(epmoe_grouped_gemm_args_t), run, reference};
static const check_op_t tiled_op = {"grouped_gemm", sizeof(epmoe_grouped_gemm_args_t), run_tiled, reference};

/* ROUTE_ALL: every slot to the same expert, none left out. */
typedef enum route_t {
    ROUTE_UNIFORM,
    ROUTE_ONE_EXPERT,
    ROUTE_FEW_EXPERTS,
    ROUTE_COUNT,
    ROUTE_ALL = ROUTE_COUNT,
} route_t;

typedef struct shape_t {
    int32_t tokens, top_k, experts, n, k;
    epmoe_dtype_t dtype, y_dtype;
    epmoe_activation_t activation;
    epmoe_layout_t layout;
    route_t route;
    bool bias, row_weights, weight_on_input, indexed, batch_invariant, x_sorted, y_sorted;
    bool dense; /* without offsets */
    bool tiled; /* weights in tiles */
    float limit;
} shape_t;

/* But for ROUTE_ALL every slot but about one in nine goes to an expert by the route. With an index, slots of an expert
 * come in a random order with padding between; the last rows of max_rows belong to nobody. */
static void fill_rows(testing_rng_t *rng, check_case_t *c, const shape_t *shape, int32_t max_rows)
{
    if (shape->dense) {
        *(int32_t *)(void *)check_find(c, "num_rows_dev")->host = testing_range(rng, max_rows / 2, max_rows);
        return;
    }
    int32_t *offsets = (int32_t *)(void *)check_find(c, "expert_offsets")->host;
    int32_t *index = shape->indexed ? (int32_t *)(void *)check_find(c, "row_index")->host : NULL;
    int32_t slots = shape->tokens * shape->top_k, rows = 0, one = testing_range(rng, 0, shape->experts - 1);
    int32_t *order = malloc(sizeof(int32_t) * (size_t)slots), *expert = malloc(sizeof(int32_t) * (size_t)slots);
    for (int32_t i = 0; i < slots; i++) {
        int32_t j = testing_range(rng, 0, i);
        order[i] = order[j], order[j] = i;
        expert[i] = shape->route == ROUTE_ONE_EXPERT || shape->route == ROUTE_ALL ? one
                    : shape->route == ROUTE_FEW_EXPERTS ? (one + 7 * testing_range(rng, 0, 3)) % shape->experts
                                                        : testing_range(rng, 0, shape->experts - 1);
        if (shape->route != ROUTE_ALL && testing_range(rng, 0, 8) == 0) expert[i] = -1;
    }
    for (int32_t e = 0; e < shape->experts; e++) {
        offsets[e] = rows;
        for (int32_t i = 0; i < slots; i++) {
            if (expert[i] != e) continue;
            if (index && rows + slots - i < max_rows && testing_range(rng, 0, 9) == 0)
                index[rows++] = slots + testing_range(rng, 0, 5);
            if (index) index[rows] = order[i];
            rows++;
        }
    }
    offsets[shape->experts] = rows;
    free(order), free(expert);
}

static void make(check_case_t *c, testing_rng_t *rng, const shape_t *shape)
{
    static const char *const routes[] = {"uniform", "one expert", "few experts", "all to one"};
    check_case(
        c, shape->tiled ? &tiled_op : &op,
        "T %d k %d E %d N %d K %d %s to %s act %d layout %d %s bias %d weights %d on input %d index %d sorted %d%d",
        shape->tokens, shape->top_k, shape->experts, shape->n, shape->k, epmoe_dtype_string(shape->dtype),
        epmoe_dtype_string(shape->y_dtype), (int)shape->activation, (int)shape->layout, routes[shape->route],
        shape->bias, shape->row_weights, shape->weight_on_input, shape->indexed, shape->x_sorted, shape->y_sorted);
    /* The order of an fp32 sum over K. */
    c->tolerance = 4e-6 + 0x1p-21 * sqrt((double)shape->k);
    int32_t slots = shape->tokens * shape->top_k, max_rows = slots ? slots + (shape->indexed ? 40 : 0) : 0;
    epmoe_grouped_gemm_args_t args = EPMOE_GROUPED_GEMM_ARGS_INIT;
    args.backend = EPMOE_BACKEND_CUDA;
    args.num_experts = shape->experts;
    args.n = shape->n;
    args.k = shape->k;
    args.max_rows = max_rows;
    args.num_slots = slots;
    args.x_row_divisor = shape->top_k;
    args.x_dtype = shape->dtype;
    args.weight.struct_size = sizeof args.weight;
    args.weight.format = epmoei_format_of_dtype(shape->dtype);
    args.layout = shape->layout;
    args.activation = shape->activation;
    args.limit = shape->limit;
    args.weight_on_input = shape->weight_on_input;
    args.batch_invariant = shape->batch_invariant;
    args.x_sorted = shape->x_sorted;
    args.y_sorted = shape->y_sorted;
    args.y_dtype = shape->y_dtype;
    if (epmoe_grouped_gemm_workspace_size(&args, &args.workspace_bytes) != EPMOE_OK)
        check_fail(c, "%s", epmoe_last_error());
    memcpy(c->args, &args, sizeof args);

    int64_t experts = shape->experts, n = shape->n, k = shape->k;
    int64_t n_out = shape->activation >= EPMOE_ACTIVATION_NONE ? n : n / 2;
    if (shape->dense)
        CHECK_ADD(c, epmoe_grouped_gemm_args_t, num_rows_dev, CHECK_IN, EPMOE_I32, 1, 1, 4);
    else
        CHECK_ADD(c, epmoe_grouped_gemm_args_t, expert_offsets, CHECK_IN, EPMOE_I32, 1, experts + 1, 4);
    if (shape->indexed) {
        int32_t *index = CHECK_ADD(c, epmoe_grouped_gemm_args_t, row_index, CHECK_IN, EPMOE_I32, 1, max_rows, 4);
        for (int32_t i = 0; i < max_rows; i++) index[i] = slots + i;
    }
    int64_t x_rows = shape->x_sorted ? max_rows : shape->tokens, y_rows = shape->y_sorted ? max_rows : slots;
    void *x = CHECK_ADD(c, epmoe_grouped_gemm_args_t, x, CHECK_IN, shape->dtype, x_rows, k, 16);
    void *w = CHECK_ADD(c, epmoe_grouped_gemm_args_t, weight.data, CHECK_IN, shape->dtype, experts * n, k, 16);
    check_fill_normal(rng, x, shape->dtype, x_rows * k, 1.0f);
    check_fill_normal(rng, w, shape->dtype, experts * n * k, 1.0f / sqrtf((float)k));
    if (shape->bias) {
        void *bias = CHECK_ADD(c, epmoe_grouped_gemm_args_t, bias, CHECK_IN, EPMOE_F32, experts, n, 4);
        testing_fill_normal(rng, bias, EPMOE_F32, experts * n, 0.5f);
    }
    if (shape->row_weights || shape->weight_on_input) {
        float *weights = CHECK_ADD(c, epmoe_grouped_gemm_args_t, row_weights, CHECK_IN, EPMOE_F32, 1, slots, 4);
        for (int32_t s = 0; s < slots; s++)
            weights[s] = testing_uniform(rng, 0.2f, 2.0f) * (testing_range(rng, 0, 1) ? 1.0f : -1.0f);
    }
    CHECK_ADD(c, epmoe_grouped_gemm_args_t, y, CHECK_OUT, shape->y_dtype, y_rows, n_out, 16);
    CHECK_ADD(c, epmoe_grouped_gemm_args_t, workspace, CHECK_SCRATCH, EPMOE_U8, 1, args.workspace_bytes, 16);
    fill_rows(rng, c, shape, max_rows);
}

static void run_one(testing_rng_t *rng, const shape_t *shape)
{
    check_case_t c;
    make(&c, rng, shape);
    check_run(&c);
    check_free(&c);
}

static const epmoe_dtype_t x_dtypes[] = {EPMOE_BF16, EPMOE_F16};
static const epmoe_dtype_t y_dtypes[] = {EPMOE_BF16, EPMOE_F16, EPMOE_F32};

static void check_shapes(testing_rng_t *rng)
{
    const int32_t experts[] = {1, 5, 60, 72, 160, 384, 576, 1025, 4096};
    const int32_t tokens[] = {0, 1, 3, 63, 127, 257, 4096};
    check_begin("grouped_gemm", "E 1..4096, T 0..4096");
    for (size_t e = 0; e < sizeof experts / sizeof *experts; e++)
        for (size_t t = 0; t < sizeof tokens / sizeof *tokens; t++) {
            shape_t shape = {.tokens = tokens[t],
                             .top_k = t % 2 ? 4 : 1,
                             .experts = experts[e],
                             .n = tokens[t] > 1000 || experts[e] > 1000 ? 48 : 272,
                             .k = tokens[t] > 1000 || experts[e] > 1000 ? 40 : 136,
                             .dtype = x_dtypes[(e + t) % 2],
                             .y_dtype = y_dtypes[(e + t) % 3],
                             .activation = (e + t) % 2 ? EPMOE_ACTIVATION_SILU : EPMOE_ACTIVATION_NONE,
                             .layout = e % 2 ? EPMOE_LAYOUT_INTERLEAVED : EPMOE_LAYOUT_GATE_FIRST,
                             .route = (route_t)((e + 2 * t) % ROUTE_COUNT),
                             .indexed = t % 3 != 1,
                             .row_weights = t % 2};
            if (!check_skips((int64_t)shape.tokens * shape.top_k * (shape.n + shape.k))) run_one(rng, &shape);
        }
    check_end();
}

/* Widths around the tiles, K from one step to many, all odd multiples of 8; every epilogue. */
static void check_epilogues(testing_rng_t *rng)
{
    const int32_t ns[] = {16, 48, 112, 144, 272, 304, 528}, ks[] = {8, 24, 56, 72, 120, 264, 1032};
    check_begin("grouped_gemm", "epilogues, N and K odd multiples of 8");
    for (int32_t i = 0; i < 6 * 2 * 2 * 2 * 2 * 3; i += check_step(7)) {
        const bool tall = testing_range(rng, 0, 2) == 0; /* the widest tiles */
        shape_t shape = {.tokens = testing_range(rng, 1, tall ? 330 : 70),
                         .top_k = testing_range(rng, 1, 3),
                         .experts = testing_range(rng, 1, 9),
                         .n = ns[testing_range(rng, 0, 6)],
                         .k = ks[testing_range(rng, 0, tall ? 3 : 6)],
                         .activation = (epmoe_activation_t)(i % 6),
                         .layout = (epmoe_layout_t)(i / 6 % 2),
                         .bias = i / 12 % 2,
                         .row_weights = i / 24 % 2,
                         .dtype = x_dtypes[i / 48 % 2],
                         .y_dtype = y_dtypes[i / 96],
                         .weight_on_input = testing_range(rng, 0, 3) == 0,
                         .indexed = testing_range(rng, 0, 1),
                         .x_sorted = testing_range(rng, 0, 2) == 0,
                         .y_sorted = testing_range(rng, 0, 2) == 0,
                         .route = (route_t)testing_range(rng, 0, ROUTE_COUNT - 1),
                         .limit = testing_range(rng, 0, 1) ? 0.7f : 0.0f};
        if (shape.activation >= EPMOE_ACTIVATION_NONE) shape.n -= 8 * testing_range(rng, 0, 1);
        run_one(rng, &shape);
    }
    check_end();
}

/* Many rows per expert, cut into tiles of up to 256: rows around the blocks of 16 and the tiles, and lists of so many
 * tiles that every SM of a large device takes several. */
static void check_tall(testing_rng_t *rng)
{
    const int32_t rows[] = {257, 272, 384, 500, 513, 1040};
    check_begin("grouped_gemm", "many rows per expert");
    for (int32_t i = 0; i < 6; i++) {
        shape_t shape = {.tokens = rows[i],
                         .top_k = 1,
                         .experts = 4,
                         .n = 4400 - 16 * i,
                         .k = (const int32_t[]){8, 72, 136, 264, 64, 200}[i],
                         .activation = i % 2 ? EPMOE_ACTIVATION_SILU : EPMOE_ACTIVATION_NONE,
                         .layout = i % 4 == 1 ? EPMOE_LAYOUT_INTERLEAVED : EPMOE_LAYOUT_GATE_FIRST,
                         .bias = i % 3 == 0,
                         .row_weights = i % 3 != 1,
                         .weight_on_input = i == 3,
                         .dtype = x_dtypes[i % 2],
                         .y_dtype = y_dtypes[(i + i / 3) % 3],
                         .indexed = i % 2 || i == 4,
                         .x_sorted = i == 2,
                         .y_sorted = i == 2 || i == 5,
                         .route = ROUTE_ALL};
        run_one(rng, &shape);
    }
    for (int32_t i = 0; i < 4; i++) {
        shape_t shape = {.tokens = i < 2 ? 560 : 1900,
                         .top_k = 3,
                         .experts = i < 2 ? 20 : 12,
                         .n = i < 2 ? 2576 : 2056,
                         .k = i % 2 ? 328 : 40,
                         .activation = i % 2 ? EPMOE_ACTIVATION_NONE : EPMOE_ACTIVATION_SILU,
                         .layout = EPMOE_LAYOUT_INTERLEAVED,
                         .row_weights = i % 2,
                         .dtype = x_dtypes[i / 2],
                         .y_dtype = x_dtypes[i / 2],
                         .indexed = true,
                         .route = i == 2 ? ROUTE_FEW_EXPERTS : ROUTE_UNIFORM};
        if (!check_small || i == 0) run_one(rng, &shape);
    }
    check_end();
}

/* Weights in tiles: N around the blocks of 128 rows, K of whole steps, every epilogue, tiles of every width and
 * clusters whose last block has few rows or none. */
static void check_tiles(testing_rng_t *rng)
{
    const int32_t ns[] = {16, 48, 112, 128, 144, 256, 272, 528}, ks[] = {64, 128, 192, 768};
    if (epmoei_cuda_tier() != 90) return;
    check_begin("grouped_gemm", "weights in tiles");
    for (int32_t i = 0; i < 6 * 24; i += check_step(5)) {
        const bool tall = testing_range(rng, 0, 2) == 0;
        shape_t shape = {.tokens = testing_range(rng, 1, tall ? 330 : 70),
                         .top_k = testing_range(rng, 1, 3),
                         .experts = testing_range(rng, 1, 9),
                         .n = ns[testing_range(rng, 0, 7)],
                         .k = ks[testing_range(rng, 0, tall ? 2 : 3)],
                         .activation = (epmoe_activation_t)(i % 6),
                         .layout = EPMOE_LAYOUT_INTERLEAVED,
                         .bias = testing_range(rng, 0, 1),
                         .row_weights = testing_range(rng, 0, 1),
                         .dtype = x_dtypes[i / 6 % 2],
                         .y_dtype = y_dtypes[testing_range(rng, 0, 2)],
                         .weight_on_input = testing_range(rng, 0, 3) == 0,
                         .indexed = testing_range(rng, 0, 1),
                         .x_sorted = testing_range(rng, 0, 2) == 0,
                         .y_sorted = testing_range(rng, 0, 2) == 0,
                         .route = (route_t)testing_range(rng, 0, ROUTE_COUNT - 1),
                         .tiled = true,
                         .limit = testing_range(rng, 0, 1) ? 0.7f : 0.0f};
        if (shape.activation >= EPMOE_ACTIVATION_NONE) shape.n -= testing_range(rng, 0, 9);
        run_one(rng, &shape);
    }
    for (int32_t i = 0; i < 4; i++) {
        shape_t shape = {.tokens = (const int32_t[]){257, 513, 1040, 600}[i],
                         .top_k = i == 3 ? 3 : 1,
                         .experts = i == 3 ? 20 : 4,
                         .n = 4400 - 16 * i,
                         .k = 64 + 64 * (i % 2),
                         .activation = i % 2 ? EPMOE_ACTIVATION_SILU : EPMOE_ACTIVATION_NONE,
                         .layout = EPMOE_LAYOUT_INTERLEAVED,
                         .row_weights = i % 2,
                         .dtype = x_dtypes[i / 2],
                         .y_dtype = x_dtypes[i / 2],
                         .indexed = i % 2,
                         .tiled = true,
                         .route = i == 3 ? ROUTE_UNIFORM : ROUTE_ALL};
        if (!check_small || i == 0) run_one(rng, &shape);
    }
    for (int32_t i = 0; i < 6; i++) {
        shape_t shape = {.tokens = testing_range(rng, 1, 200),
                         .top_k = 1,
                         .experts = 1,
                         .n = (const int32_t[]){2, 130, 64, 160, 1, 240}[i],
                         .k = 64 * testing_range(rng, 1, 6),
                         .activation = i % 2 ? EPMOE_ACTIVATION_NONE : EPMOE_ACTIVATION_SILU,
                         .layout = EPMOE_LAYOUT_INTERLEAVED,
                         .dtype = x_dtypes[i % 2],
                         .y_dtype = EPMOE_F32,
                         .tiled = true,
                         .dense = true};
        if (shape.activation < EPMOE_ACTIVATION_NONE) shape.n = (shape.n + 15) / 16 * 16;
        run_one(rng, &shape);
    }
    check_end();
}

/* As a layer calls it for the shared expert: one expert, any N, the rows counted on the device. */
static void check_dense(testing_rng_t *rng)
{
    const int32_t ns[] = {1, 2, 10, 63, 65, 128, 250};
    check_begin("grouped_gemm", "one expert without offsets, any N");
    for (int32_t i = 0; i < 7 * 6; i++) {
        shape_t shape = {.tokens = testing_range(rng, ns[i % 7] < 16 ? 20 : 1, 200),
                         .top_k = 1,
                         .experts = 1,
                         .n = ns[i % 7],
                         .k = 8 * testing_range(rng, 1, 40),
                         .activation = (epmoe_activation_t)(i / 7),
                         .layout = (epmoe_layout_t)(i % 2),
                         .dtype = x_dtypes[testing_range(rng, 0, 1)],
                         .y_dtype = y_dtypes[testing_range(rng, 0, 2)],
                         .bias = testing_range(rng, 0, 1),
                         .dense = true};
        if (shape.activation < EPMOE_ACTIVATION_NONE) shape.n += shape.n % 2;
        run_one(rng, &shape);
    }
    check_end();
}

static void check_nan(testing_rng_t *rng)
{
    check_begin("grouped_gemm", "NaN and infinite rows and weights");
    for (int32_t i = 0; i < 4; i++) {
        shape_t shape = {.tokens = 80,
                         .top_k = 2,
                         .experts = 3 + 20 * (i / 2),
                         .n = 144,
                         .k = 136,
                         .dtype = x_dtypes[i % 2],
                         .y_dtype = EPMOE_F32,
                         .activation = i % 2 ? EPMOE_ACTIVATION_SILU : EPMOE_ACTIVATION_NONE,
                         .indexed = true};
        check_case_t c;
        make(&c, rng, &shape);
        char *x = check_find(&c, "x")->host, *w = check_find(&c, "weight.data")->host;
        epmoei_store(x, shape.dtype, 7 * shape.k + 77, NAN);
        epmoei_store(x, shape.dtype, 30 * shape.k + 5, INFINITY);
        epmoei_store(w, shape.dtype, (int64_t)(shape.n + 9) * shape.k + 3, NAN);
        check_run(&c);
        check_free(&c);
    }
    check_end();
}

/* A row's bits alone are its bits among others, whatever tile the call takes. */
static void check_batch_invariance(testing_rng_t *rng)
{
    check_begin("grouped_gemm", "batch invariance");
    for (int32_t i = 0; i < 4; i++) {
        shape_t shape = {.tokens = i % 2 ? 300 : 90,
                         .top_k = 2,
                         .experts = i < 2 ? 4 : 40,
                         .n = 272,
                         .k = 520,
                         .dtype = EPMOE_BF16,
                         .y_dtype = EPMOE_F32,
                         .activation = i % 2 ? EPMOE_ACTIVATION_SILU : EPMOE_ACTIVATION_NONE,
                         .bias = true,
                         .row_weights = i % 2,
                         .indexed = true,
                         .batch_invariant = true};
        check_case_t c;
        make(&c, rng, &shape);
        epmoe_grouped_gemm_args_t *args = (epmoe_grouped_gemm_args_t *)c.args;
        check_field_t *y = check_find(&c, "y");
        int32_t *offsets = (int32_t *)(void *)check_find(&c, "expert_offsets")->host;
        int32_t *index = (int32_t *)(void *)check_find(&c, "row_index")->host, rows = offsets[shape.experts];
        if (check_run(&c)) /* leaves in expected what the device gave */
            for (int32_t expert = 0, r = 0; r < rows; r += 37) {
                while (offsets[expert + 1] <= r) expert++;
                int32_t slot = index[r];
                if (slot >= args->num_slots) continue;
                check_case_t one = c;
                int32_t *alone = testing_buffer(4 * ((int64_t)shape.experts + 1), 0), *first = testing_buffer(4, 0);
                for (int32_t e = 0; e <= shape.experts; e++) alone[e] = e > expert;
                *first = slot;
                ((epmoe_grouped_gemm_args_t *)one.args)->max_rows = 1;
                check_send(check_find(&one, "y"), y->host);
                check_send(check_find(&one, "expert_offsets"), (char *)alone);
                epmoei_memory_copy(EPMOE_BACKEND_CUDA, check_find(&one, "row_index")->device, first, 4, check_stream);
                epmoei_stream_wait(EPMOE_BACKEND_CUDA, check_stream);
                epmoe_status_t status = check_launch(&one);
                if (status != EPMOE_OK) check_fail(&c, "one row: %s", epmoe_last_error());
                epmoei_memory_copy(EPMOE_BACKEND_CUDA, y->got, y->device, y->bytes, check_stream);
                epmoei_stream_wait(EPMOE_BACKEND_CUDA, check_stream);
                int64_t row_bytes = 4 * y->cols;
                if (memcmp(y->got + slot * row_bytes, y->expected + slot * row_bytes, (size_t)row_bytes))
                    check_fail(&c, "row %d alone differs", r);
                testing_buffer_free(alone), testing_buffer_free(first);
            }
        check_free(&c);
    }
    check_end();
}

typedef struct refill_t {
    testing_rng_t *rng;
    const shape_t *shape;
} refill_t;

static void refill(check_case_t *c, int32_t round, void *ctx)
{
    const refill_t *how = ctx;
    shape_t shape = *how->shape;
    shape.route = (route_t)(round % ROUTE_COUNT);
    const epmoe_grouped_gemm_args_t *args = (const epmoe_grouped_gemm_args_t *)c->args;
    testing_fill_normal(how->rng, check_find(c, "x")->host, shape.dtype, (int64_t)shape.tokens * shape.k, 1.0f);
    fill_rows(how->rng, c, &shape, args->max_rows);
}

static void check_calls(testing_rng_t *rng)
{
    check_begin("grouped_gemm", "graphs, alignment, refusals");
    for (int32_t i = 0; i < 3; i++) {
        shape_t shape = {.tokens = 33 + 200 * i,
                         .top_k = 3,
                         .experts = 8,
                         .n = 144,
                         .k = 72,
                         .dtype = EPMOE_BF16,
                         .y_dtype = EPMOE_BF16,
                         .activation = EPMOE_ACTIVATION_SWIGLU_OAI,
                         .layout = EPMOE_LAYOUT_INTERLEAVED,
                         .bias = true,
                         .row_weights = true,
                         .indexed = true};
        check_case_t c;
        make(&c, rng, &shape);
        refill_t how = {rng, &shape};
        check_graph(&c, refill, &how);
        /* The index arrays are read by element and their alignment is not checked. */
        check_find(&c, "expert_offsets")->alignment = check_find(&c, "row_index")->alignment = 1;
        check_find(&c, "bias")->alignment = check_find(&c, "row_weights")->alignment = 1;
        check_misaligned(&c);

        epmoe_grouped_gemm_args_t *args = (epmoe_grouped_gemm_args_t *)c.args, good = *args;
        for (int32_t wrong = 0; wrong < 3; wrong++) {
            if (wrong == 0) args->k = 71;
            if (wrong == 1) args->x_dtype = EPMOE_F32;
            if (wrong == 2) args->weight.format = EPMOE_FORMAT_F16;
            epmoe_status_t status = check_launch(&c);
            if (status != EPMOE_ERROR_NOT_SUPPORTED) check_fail(&c, "refusal %d gave status %d", wrong, (int)status);
            *args = good;
        }
        check_free(&c);
    }
    check_end();
}

void check_grouped_gemm(testing_rng_t *rng)
{
    check_shapes(rng);
    check_epilogues(rng);
    check_tall(rng);
    check_tiles(rng);
    check_dense(rng);
    check_nan(rng);
    check_batch_invariance(rng);
    check_calls(rng);
}
