/* The kernels for very few tokens, each against its reference, then as one call of epmoe_experts, also against what
 * epmoe_experts does with many tokens. */
#include "kernels/experts_few.h"
#include "moe/experts.h"
#include "tests/checkcuda/check.h"
#include "tests/checkcuda/plain_tiles.h"

#include <math.h>
#include <stdlib.h>

/* ------------------------------------------------------------------------------------------------------------ ops */

static epmoe_status_t run_gate_up(const void *args, epmoe_stream_t stream)
{
    epmoe_experts_args_t checked;
    EPMOEI_CHECK(epmoei_error_word_check());
    EPMOEI_CHECK(epmoei_experts_check_shape(args, &checked));
    return epmoei_experts_few_gate_up_sm80(&checked, checked.workspace, stream);
}

static epmoe_status_t reference_gate_up(const void *args)
{
    epmoe_experts_args_t checked;
    EPMOEI_CHECK(epmoei_experts_check_shape(args, &checked));
    return epmoei_experts_few_gate_up_ref(&checked, checked.workspace);
}

static epmoe_status_t run_down(const void *args, epmoe_stream_t stream)
{
    epmoe_experts_args_t checked;
    EPMOEI_CHECK(epmoei_error_word_check());
    EPMOEI_CHECK(epmoei_experts_check_shape(args, &checked));
    return epmoei_experts_few_down_sm80(&checked, checked.workspace, stream);
}

static epmoe_status_t reference_down(const void *args)
{
    epmoe_experts_args_t checked;
    EPMOEI_CHECK(epmoei_experts_check_shape(args, &checked));
    return epmoei_experts_few_down_ref(&checked, checked.workspace);
}

static epmoe_status_t run_experts(const void *args, epmoe_stream_t stream) { return epmoe_experts(args, stream); }

static epmoe_status_t reference_experts(const void *args)
{
    epmoe_experts_args_t checked;
    EPMOEI_CHECK(epmoei_experts_check_shape(args, &checked));
    int64_t slots = (int64_t)checked.num_tokens * checked.top_k;
    void *h = malloc((size_t)(slots * checked.intermediate * 2));
    epmoe_status_t status = epmoei_experts_few_gate_up_ref(&checked, h);
    if (status == EPMOE_OK) status = epmoei_experts_few_down_ref(&checked, h);
    free(h);
    return status;
}

/* The same with weights in tiles. */
static epmoe_status_t with_tiles(const void *args, epmoe_stream_t stream,
                                 epmoe_status_t (*call)(const void *args, epmoe_stream_t stream))
{
    epmoe_experts_args_t tiled = *(const epmoe_experts_args_t *)args;
    const int32_t experts = tiled.num_experts, d = tiled.hidden, f = tiled.intermediate;
    epmoe_status_t status = check_make_tiles(&tiled.gate_up, experts, 2 * f, d, true, stream);
    if (status == EPMOE_OK) status = check_make_tiles(&tiled.down, experts, d, f, false, stream);
    if (status == EPMOE_OK) status = call(&tiled, stream);
    epmoe_status_t dropped = check_drop_tiles(&tiled.gate_up, stream);
    if (dropped == EPMOE_OK) dropped = check_drop_tiles(&tiled.down, stream);
    return status == EPMOE_OK ? dropped : status;
}

static epmoe_status_t run_gate_up_tiles(const void *args, epmoe_stream_t stream)
{
    return with_tiles(args, stream, run_gate_up);
}
static epmoe_status_t run_down_tiles(const void *args, epmoe_stream_t stream)
{
    return with_tiles(args, stream, run_down);
}
static epmoe_status_t run_experts_tiles(const void *args, epmoe_stream_t stream)
{
    return with_tiles(args, stream, run_experts);
}

typedef enum step_t { STEP_GATE_UP, STEP_DOWN, STEP_BOTH, STEP_COUNT } step_t;

static const check_op_t ops[] = {
    {"experts_few", sizeof(epmoe_experts_args_t), run_gate_up, reference_gate_up},
    {"experts_few", sizeof(epmoe_experts_args_t), run_down, reference_down},
    {"experts_few", sizeof(epmoe_experts_args_t), run_experts, reference_experts},
    {"experts_few", sizeof(epmoe_experts_args_t), run_gate_up_tiles, reference_gate_up},
    {"experts_few", sizeof(epmoe_experts_args_t), run_down_tiles, reference_down},
    {"experts_few", sizeof(epmoe_experts_args_t), run_experts_tiles, reference_experts},
};

/* ---------------------------------------------------------------------------------------------------------- cases */

typedef enum route_t { ROUTE_UNIFORM, ROUTE_ONE_EXPERT, ROUTE_TWO_EXPERTS, ROUTE_SPARSE, ROUTE_COUNT } route_t;

typedef struct shape_t {
    int32_t tokens, top_k, experts, d, f;
    epmoe_dtype_t dtype, y_dtype;
    epmoe_activation_t activation;
    epmoe_layout_t layout;
    route_t route;
    bool bias, on_input, addend, residual, in_place, counted; /* in_place: y is the residual */
    int32_t actual;                                           /* counted: what num_tokens_dev says */
    bool one_sign;                                            /* of the router weights */
    bool tiled;                                               /* weights in tiles */
    float alpha, limit;
} shape_t;

/* Routes every slot of the tokens that count, and fills their router weights. The rest keeps its poison, NaN, and the
 * ids of what does not count would be reported if anybody read them. */
static void fill_slots(testing_rng_t *rng, check_case_t *c, const shape_t *shape)
{
    int32_t *ids = (int32_t *)(void *)check_find(c, "ids")->host;
    float *weights = (float *)(void *)check_find(c, "weights")->host;
    int32_t one = testing_range(rng, 0, shape->experts - 1), two = testing_range(rng, 0, shape->experts - 1);
    int32_t counting = shape->counted ? shape->actual : shape->tokens;
    for (int32_t s = 0; s < shape->tokens * shape->top_k; s++) {
        ids[s] = shape->route == ROUTE_ONE_EXPERT    ? one
                 : shape->route == ROUTE_TWO_EXPERTS ? (testing_range(rng, 0, 1) ? one : two)
                 : shape->route == ROUTE_SPARSE && testing_range(rng, 0, 3) > 0
                     ? -1
                     : testing_range(rng, 0, shape->experts - 1);
        if (testing_range(rng, 0, 9) == 0) ids[s] = -1;
        if (s / shape->top_k >= counting) ids[s] = -77;
        const bool negative = !shape->one_sign && testing_range(rng, 0, 1);
        weights[s] = ids[s] < 0 ? NAN : testing_uniform(rng, 0.1f, 2.0f) * (negative ? -1.0f : 1.0f);
    }
}

/* Weights of experts that no slot has keep their poison. */
static void fill_experts(testing_rng_t *rng, check_case_t *c, const shape_t *shape, const char *name, int64_t rows,
                         int32_t k)
{
    const int32_t *ids = (const int32_t *)(void *)check_find(c, "ids")->host;
    char *w = check_find(c, name)->host;
    for (int32_t e = 0; e < shape->experts; e++)
        for (int32_t s = 0; s < shape->tokens * shape->top_k; s++)
            if (ids[s] == e) {
                testing_fill_normal(rng, w + e * rows * k * 2, shape->dtype, rows * k, 1 / sqrtf((float)k));
                break;
            }
}

static void fill_rows(testing_rng_t *rng, check_case_t *c, const shape_t *shape, step_t step)
{
    int64_t cells = (int64_t)shape->tokens * shape->d;
    if (step != STEP_DOWN) testing_fill_normal(rng, check_find(c, "x")->host, shape->dtype, cells, 1.0f);
    if (step == STEP_DOWN) {
        const int32_t *ids = (const int32_t *)(void *)check_find(c, "ids")->host;
        char *h = check_find(c, "workspace")->host;
        for (int64_t s = 0; s < (int64_t)shape->tokens * shape->top_k; s++)
            if (ids[s] >= 0) testing_fill_normal(rng, h + s * shape->f * 2, shape->dtype, shape->f, 1.0f);
    }
    if (step == STEP_GATE_UP) return;
    if (shape->addend) testing_fill_normal(rng, check_find(c, "addend")->host, EPMOE_F32, cells, 1.0f);
    if (shape->residual) testing_fill_normal(rng, check_find(c, "residual")->host, shape->y_dtype, cells, 1.0f);
    if (shape->in_place) testing_fill_normal(rng, check_find(c, "y")->host, shape->y_dtype, cells, 1.0f);
}

#define ADD(member, kind, dtype, rows, cols, alignment)                                                                \
    CHECK_ADD(c, epmoe_experts_args_t, member, kind, dtype, rows, cols, alignment)

static void make(check_case_t *c, testing_rng_t *rng, const shape_t *shape, step_t step)
{
    static const char *const steps[] = {"gate_up", "down", "both"};
    static const char *const routes[] = {"uniform", "one expert", "two experts", "sparse"};
    check_case(
        c, &ops[step + (shape->tiled ? STEP_COUNT : 0)],
        "%s T %d (%d) k %d E %d d %d f %d %s to %s act %d layout %d %s bias %d on input %d addend %d residual %d",
        steps[step], shape->tokens, shape->counted ? shape->actual : shape->tokens, shape->top_k, shape->experts,
        shape->d, shape->f, epmoe_dtype_string(shape->dtype), epmoe_dtype_string(shape->y_dtype),
        (int)shape->activation, (int)shape->layout, routes[shape->route], shape->bias, shape->on_input, shape->addend,
        shape->residual + 2 * shape->in_place);
    /* The order of fp32 sums; in both steps also an h that rounds the other way. */
    c->tolerance = 4e-6 + 0x1p-21 * sqrt(step == STEP_GATE_UP ? shape->d : shape->f * (double)shape->top_k);
    if (step == STEP_BOTH) c->tolerance += shape->dtype == EPMOE_BF16 ? 4e-3 : 5e-4;

    epmoe_experts_args_t args = EPMOE_EXPERTS_ARGS_INIT;
    args.backend = EPMOE_BACKEND_CUDA;
    args.num_tokens = shape->tokens;
    args.top_k = shape->top_k;
    args.num_experts = shape->experts;
    args.hidden = shape->d;
    args.intermediate = shape->f;
    args.dtype = shape->dtype;
    args.y_dtype = shape->y_dtype;
    args.gate_up.struct_size = args.down.struct_size = sizeof args.down;
    args.gate_up.format = args.down.format = epmoei_format_of_dtype(shape->dtype);
    args.layout = shape->layout;
    args.activation = shape->activation;
    args.alpha = shape->alpha;
    args.limit = shape->limit;
    args.weight_on_input = shape->on_input;
    if (step == STEP_BOTH && epmoe_experts_workspace_size(&args, &args.workspace_bytes) != EPMOE_OK)
        check_fail(c, "%s", epmoe_last_error());
    memcpy(c->args, &args, sizeof args);

    int64_t tokens = shape->tokens, k = shape->top_k, experts = shape->experts, d = shape->d, f = shape->f;
    ADD(ids, CHECK_IN, EPMOE_I32, tokens, k, 4);
    ADD(weights, CHECK_IN, EPMOE_F32, tokens, k, 4);
    if (shape->counted) *(int32_t *)ADD(num_tokens_dev, CHECK_IN, EPMOE_I32, 1, 1, 4) = shape->actual;
    fill_slots(rng, c, shape);
    if (step != STEP_DOWN) {
        ADD(x, CHECK_IN, shape->dtype, tokens, d, 16);
        ADD(gate_up.data, CHECK_IN, shape->dtype, experts * 2 * f, d, 16);
        fill_experts(rng, c, shape, "gate_up.data", 2 * f, shape->d);
        if (shape->bias)
            testing_fill_normal(rng, ADD(gate_up_bias, CHECK_IN, EPMOE_F32, experts, 2 * f, 4), EPMOE_F32,
                                experts * 2 * f, 0.5f);
    }
    if (step != STEP_GATE_UP) {
        ADD(down.data, CHECK_IN, shape->dtype, experts * d, f, 16);
        fill_experts(rng, c, shape, "down.data", d, shape->f);
        if (shape->bias)
            testing_fill_normal(rng, ADD(down_bias, CHECK_IN, EPMOE_F32, experts, d, 4), EPMOE_F32, experts * d, 0.5f);
        if (shape->addend) ADD(addend, CHECK_IN, EPMOE_F32, tokens, d, 16);
        if (shape->residual) ADD(residual, CHECK_IN, shape->y_dtype, tokens, d, 16);
        if (shape->in_place) c->alias_offset = offsetof(epmoe_experts_args_t, residual);
        ADD(y, shape->in_place ? CHECK_INOUT : CHECK_OUT, shape->y_dtype, tokens, d, 16);
    }
    if (step == STEP_BOTH)
        ADD(workspace, CHECK_SCRATCH, EPMOE_U8, 1, args.workspace_bytes, 1);
    else
        ADD(workspace, step == STEP_GATE_UP ? CHECK_OUT : CHECK_IN, shape->dtype, tokens * k, f, 1);
    fill_rows(rng, c, shape, step);
}

static void run_one(testing_rng_t *rng, const shape_t *shape, step_t step)
{
    check_case_t c;
    make(&c, rng, shape, step);
    check_run(&c);
    check_free(&c);
}

static const epmoe_dtype_t dtypes[] = {EPMOE_BF16, EPMOE_F16};
static const epmoe_dtype_t y_dtypes[] = {EPMOE_F32, EPMOE_BF16, EPMOE_F16};

static shape_t random_shape(testing_rng_t *rng, int32_t i)
{
    static const int32_t tokens[] = {1, 2, 3, 4, 8}, widths[] = {8, 24, 40, 72, 136, 264, 1032, 2056};
    static const int32_t ks[] = {1, 2, 3, 4, 5, 8, 9, 10, 32};
    shape_t shape = {.tokens = tokens[i % 5],
                     .top_k = ks[testing_range(rng, 0, 8)],
                     .experts = testing_range(rng, 1, 12),
                     .d = widths[testing_range(rng, 0, 7)],
                     .f = widths[testing_range(rng, 0, 7)],
                     .dtype = dtypes[i / 5 % 2],
                     .y_dtype = y_dtypes[testing_range(rng, 0, 2)],
                     .activation = (epmoe_activation_t)(i / 10 % 4),
                     .layout = (epmoe_layout_t)(i % 3),
                     .route = (route_t)(testing_range(rng, 0, ROUTE_COUNT - 1)),
                     .bias = testing_range(rng, 0, 1),
                     .on_input = testing_range(rng, 0, 3) == 0,
                     .addend = testing_range(rng, 0, 1),
                     .residual = testing_range(rng, 0, 2) == 0,
                     .counted = testing_range(rng, 0, 2) == 0,
                     .alpha = testing_range(rng, 0, 1) ? 1.3f : 0.0f,
                     .limit = testing_range(rng, 0, 1) ? 0.7f : 0.0f};
    shape.actual = testing_range(rng, 0, shape.tokens);
    shape.in_place = !shape.residual && testing_range(rng, 0, 2) == 0;
    /* Keeps the reference's work and the weights small. */
    while ((int64_t)shape.experts * shape.d * shape.f > 1 << 20) shape.f = (shape.f / 16 + 1) * 8;
    while ((int64_t)shape.tokens * shape.top_k * shape.d * shape.f > 8 << 20) shape.top_k = (shape.top_k + 1) / 2;
    return shape;
}

/* ---------------------------------------------------------------------------------------------------------- checks */

static void check_steps(testing_rng_t *rng)
{
    check_begin("experts_few", "gate_up");
    for (int32_t i = 0; i < 160; i++) {
        shape_t shape = random_shape(rng, i);
        run_one(rng, &shape, STEP_GATE_UP);
    }
    check_end();
    check_begin("experts_few", "down");
    for (int32_t i = 0; i < 160; i++) {
        shape_t shape = random_shape(rng, i);
        run_one(rng, &shape, STEP_DOWN);
    }
    check_end();
}

/* Widths of public models, few experts: rows of several rounds, and of no whole number of them. */
static void check_model_widths(testing_rng_t *rng)
{
    static const int32_t widths[][3] = {{2880, 360, 4}, {360, 2880, 4}, {2048, 768, 8},
                                        {4096, 112, 2}, {32, 14336, 2}, {7168, 64, 8}};
    check_begin("experts_few", "widths of models");
    for (int32_t i = 0; i < 6; i++)
        for (step_t step = STEP_GATE_UP; step <= STEP_BOTH; step++) {
            shape_t shape = {.tokens = 1 + i % 3,
                             .top_k = widths[i][2],
                             .experts = 3,
                             .d = widths[i][0],
                             .f = widths[i][1],
                             .dtype = dtypes[i / 3],
                             .y_dtype = dtypes[i / 3],
                             .layout = EPMOE_LAYOUT_PACKED,
                             .bias = i < 2,
                             .activation = i < 2 ? EPMOE_ACTIVATION_SWIGLU_OAI : EPMOE_ACTIVATION_SILU};
            run_one(rng, &shape, step);
        }
    check_end();
}

static void check_tiles(testing_rng_t *rng)
{
    static const int32_t widths[][2] = {{64, 64}, {128, 192}, {192, 576}, {2880, 64}, {64, 2880}, {1024, 704}};
    check_begin("experts_few", "weights in tiles");
    for (int32_t i = 0; i < 36; i++)
        for (step_t step = STEP_GATE_UP; step <= STEP_BOTH; step++) {
            shape_t shape = random_shape(rng, i);
            shape.d = widths[i % 6][0], shape.f = widths[i % 6][1];
            shape.layout = EPMOE_LAYOUT_PACKED, shape.tiled = true;
            shape.top_k = testing_range(rng, 1, 8), shape.experts = testing_range(rng, 1, 6);
            if (shape.tokens > 4) shape.tokens = 4;
            if (shape.actual > shape.tokens) shape.actual = shape.tokens;
            run_one(rng, &shape, step);
        }
    check_end();
}

static void check_whole(testing_rng_t *rng)
{
    check_begin("experts_few", "epmoe_experts");
    for (int32_t i = 0; i < 80; i++) {
        shape_t shape = random_shape(rng, i);
        if (shape.tokens > 4) shape.tokens = 4, shape.actual = testing_range(rng, 0, 4);
        run_one(rng, &shape, STEP_BOTH);
    }
    check_end();
}

/* What epmoe_experts makes of T tokens when it is told of 64 at most, and of T alone. */
static void check_other_path(testing_rng_t *rng)
{
    check_begin("experts_few", "epmoe_experts of many tokens");
    for (int32_t i = 0; i < 40; i++) {
        shape_t shape = random_shape(rng, i);
        int32_t tokens = 1 + i % 4;
        shape.tokens = 64, shape.counted = true, shape.actual = tokens;
        shape.top_k = 1 + i % 5, shape.one_sign = true;
        check_case_t c;
        make(&c, rng, &shape, STEP_BOTH);
        epmoe_experts_args_t *args = (epmoe_experts_args_t *)c.args;
        /* The other path rounds each slot's row to bf16: one expert's rows with weights of both signs would cancel and
         * leave the rounding. */
        c.tolerance = shape.dtype == EPMOE_BF16 ? 3e-2 : 2e-3;
        if (check_run(&c)) { /* leaves in expected what the device gave */
            args->num_tokens = tokens;
            if (!epmoei_experts_few_takes(args)) check_fail(&c, "few tokens are not taken");
            check_upload(&c);
            epmoe_status_t status = check_launch(&c);
            if (status != EPMOE_OK)
                check_fail(&c, "few tokens: status %d: %s", (int)status, epmoe_last_error());
            else if (check_download(&c))
                check_outputs(&c);
        }
        check_free(&c);
    }
    check_end();
}

/* A token's bits among others are its bits alone. */
static void check_alone(testing_rng_t *rng)
{
    check_begin("experts_few", "a token alone");
    for (int32_t i = 0; i < 12; i++) {
        shape_t shape = random_shape(rng, i);
        shape.tokens = 4, shape.experts = 5, shape.counted = false, shape.in_place = false;
        shape.route = (route_t)(i % ROUTE_COUNT);
        check_case_t c;
        make(&c, rng, &shape, STEP_BOTH);
        check_field_t *y = check_find(&c, "y");
        int64_t row_bytes = y->bytes / shape.tokens;
        if (check_run(&c)) /* leaves in expected what the device gave */
            for (int32_t t = 0; t < shape.tokens; t++) {
                check_case_t one = c;
                ((epmoe_experts_args_t *)one.args)->num_tokens = 1;
                for (int32_t j = 0; j < one.num_fields; j++)
                    if (one.fields[j].rows == shape.tokens && one.fields[j].kind != CHECK_SCRATCH)
                        one.fields[j].device += t * (one.fields[j].bytes / shape.tokens);
                check_send(y, y->host);
                epmoe_status_t status = check_launch(&one);
                if (status != EPMOE_OK) check_fail(&c, "token %d alone: %s", t, epmoe_last_error());
                epmoei_memory_copy(EPMOE_BACKEND_CUDA, y->got, y->device, y->bytes, check_stream);
                epmoei_stream_wait(EPMOE_BACKEND_CUDA, check_stream);
                if (memcmp(y->got + t * row_bytes, y->expected + t * row_bytes, (size_t)row_bytes))
                    check_fail(&c, "token %d alone differs", t);
            }
        check_free(&c);
    }
    check_end();
}

static void check_nan(testing_rng_t *rng)
{
    check_begin("experts_few", "NaN and infinite rows and weights");
    for (int32_t i = 0; i < 8; i++) {
        shape_t shape = {.tokens = 4,
                         .top_k = 3,
                         .experts = i < 4 ? 2 : 9,
                         .d = 136,
                         .f = 72,
                         .dtype = dtypes[i % 2],
                         .y_dtype = EPMOE_F32,
                         .route = i < 4 ? ROUTE_ONE_EXPERT : ROUTE_UNIFORM};
        check_case_t c;
        make(&c, rng, &shape, STEP_BOTH);
        epmoei_store(check_find(&c, "x")->host, shape.dtype, 1 * shape.d + 77, NAN);
        epmoei_store(check_find(&c, "x")->host, shape.dtype, 3 * shape.d + 5, INFINITY);
        if (i / 2 % 2) epmoei_store(check_find(&c, "down.data")->host, shape.dtype, 9 * shape.f + 3, NAN);
        check_run(&c);
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
    shape.actual = shape.tokens - round;
    *(int32_t *)(void *)check_find(c, "num_tokens_dev")->host = shape.actual;
    fill_slots(how->rng, c, &shape);
    fill_experts(how->rng, c, &shape, "gate_up.data", 2 * shape.f, shape.d);
    fill_experts(how->rng, c, &shape, "down.data", shape.d, shape.f);
    fill_rows(how->rng, c, &shape, STEP_BOTH);
}

static void check_calls(testing_rng_t *rng)
{
    check_begin("experts_few", "graphs, alignment, bad ids");
    for (int32_t i = 0; i < 3; i++) {
        shape_t shape = {.tokens = 2 + i,
                         .top_k = i == 2 ? 11 : 3,
                         .experts = 9,
                         .d = 264,
                         .f = 136,
                         .dtype = dtypes[i % 2],
                         .y_dtype = dtypes[i % 2],
                         .activation = EPMOE_ACTIVATION_SWIGLU_OAI,
                         .layout = EPMOE_LAYOUT_PACKED,
                         .bias = true,
                         .addend = true,
                         .residual = true,
                         .counted = true,
                         .actual = 2 + i};
        check_case_t c;
        make(&c, rng, &shape, STEP_BOTH);
        check_misaligned(&c);
        refill_t how = {rng, &shape};
        check_graph(&c, refill, &how);

        *(int32_t *)(void *)check_find(&c, "num_tokens_dev")->host = shape.tokens;
        fill_slots(rng, &c, &shape);
        fill_experts(rng, &c, &shape, "gate_up.data", 2 * shape.f, shape.d);
        fill_experts(rng, &c, &shape, "down.data", shape.d, shape.f);
        check_field_t *ids = check_find(&c, "ids");
        int32_t *bad = testing_buffer(ids->bytes, 0), count = 0;
        static const int32_t values[] = {-2, 9, INT32_MAX, INT32_MIN};
        memcpy(bad, ids->host, (size_t)ids->bytes);
        for (int32_t s = 0; s < shape.tokens * shape.top_k; s += 3, count++) {
            ((int32_t *)(void *)ids->host)[s] = -1;
            bad[s] = values[count % 4];
        }
        check_bad_ids(&c, "ids", bad, count);
        testing_buffer_free(bad);
        check_free(&c);
    }
    check_end();
}

void check_experts_few(testing_rng_t *rng)
{
    check_steps(rng);
    check_model_widths(rng);
    check_tiles(rng);
    check_whole(rng);
    check_other_path(rng);
    check_alone(rng);
    check_nan(rng);
    check_calls(rng);
}
