#include "base/dtype.h"
#include "kernels/grouped_gemm_quant.h"
#include "kernels/quant_formats.h"
#include "tests/checkcuda/quant_weight.h"

#include <math.h>
#include <stdlib.h>

typedef enum route_t { ROUTE_UNIFORM, ROUTE_ONE_EXPERT, ROUTE_FEW_EXPERTS, ROUTE_COUNT } route_t;

typedef struct shape_t {
    quant_weight_t weight; /* n of it counts gate and up rows */
    int32_t tokens, top_k;
    epmoe_dtype_t dtype, y_dtype;
    epmoe_activation_t activation;
    route_t route;
    bool bias, row_weights, weight_on_input, indexed, x_sorted, y_sorted, dense, batch_invariant;
    float limit;
} shape_t;

/* What the reference needs to know of the case in hand beyond its args. */
static const shape_t *current;

static epmoe_status_t run(const void *args, epmoe_stream_t stream) { return epmoe_grouped_gemm(args, stream); }

/* The product with the values as fp32 weights, gate rows first; rows [first,end) of expert_offsets. */
static void reference_rows(const epmoe_grouped_gemm_args_t *all, int32_t first, int32_t end)
{
    for (int64_t e = 0; e < all->num_experts; e++) {
        int32_t from = all->expert_offsets[e], to = all->expert_offsets[e + 1];
        const int32_t rows[] = {from > first ? from : first, to < end ? to : end};
        if (rows[0] >= rows[1]) continue;
        epmoe_grouped_gemm_args_t one = *all;
        one.num_experts = 1;
        one.expert_offsets = rows;
        one.weight.data = (const float *)all->weight.data + e * all->n * all->k;
        if (all->bias) one.bias = all->bias + e * all->n;
        epmoei_grouped_gemm_ref(&one, NULL);
    }
}

static epmoe_status_t reference(const void *args)
{
    enum { kRows = 16 };
    epmoe_grouped_gemm_args_t checked;
    EPMOEI_CHECK(epmoei_grouped_gemm_check(args, &checked));
    const int32_t all_rows[] = {0, checked.num_rows_dev ? *checked.num_rows_dev : checked.max_rows};
    if (!checked.expert_offsets) checked.expert_offsets = all_rows;
    float *values = quant_weight_values(&checked.weight, &current->weight);
    float *bias = quant_weight_bias(checked.bias, &current->weight);
    checked.weight = (epmoe_weight_t)EPMOE_WEIGHT_INIT;
    checked.weight.format = EPMOE_FORMAT_F32;
    checked.weight.data = values;
    checked.layout = EPMOE_LAYOUT_GATE_FIRST;
    checked.bias = bias;
#pragma omp parallel for schedule(dynamic)
    for (int32_t first = 0; first < checked.max_rows; first += kRows) reference_rows(&checked, first, first + kRows);
    free(values), free(bias);
    return EPMOE_OK;
}

static const check_op_t op = {"gemm_quant", sizeof(epmoe_grouped_gemm_args_t), run, reference};

/* Every slot but about one in nine goes to an expert by the route. With an index, slots of an expert come in a random
 * order with padding between; the last rows of max_rows belong to nobody. */
static void fill_rows(testing_rng_t *rng, check_case_t *c, const shape_t *shape, int32_t max_rows)
{
    if (shape->dense) {
        *(int32_t *)(void *)check_find(c, "num_rows_dev")->host = testing_range(rng, max_rows / 2, max_rows);
        return;
    }
    int32_t *offsets = (int32_t *)(void *)check_find(c, "expert_offsets")->host;
    check_field_t *field = shape->indexed ? check_find(c, "row_index") : NULL;
    int32_t *index = field ? (int32_t *)(void *)field->host : NULL;
    int32_t slots = shape->tokens * shape->top_k, rows = 0, experts = shape->weight.experts;
    int32_t one = testing_range(rng, 0, experts - 1);
    int32_t *order = malloc(sizeof(int32_t) * (size_t)slots + 1), *expert = malloc(sizeof(int32_t) * (size_t)slots + 1);
    for (int32_t i = 0; i < slots; i++) {
        int32_t j = testing_range(rng, 0, i);
        order[i] = order[j], order[j] = i;
        expert[i] = shape->route == ROUTE_ONE_EXPERT    ? one
                    : shape->route == ROUTE_FEW_EXPERTS ? (one + 7 * testing_range(rng, 0, 3)) % experts
                                                        : testing_range(rng, 0, experts - 1);
        if (testing_range(rng, 0, 8) == 0) expert[i] = -1;
    }
    for (int32_t e = 0; e < experts; e++) {
        offsets[e] = rows;
        for (int32_t i = 0; i < slots; i++) {
            if (expert[i] != e) continue;
            if (index && rows + slots - i < max_rows && testing_range(rng, 0, 9) == 0)
                index[rows++] = slots + testing_range(rng, 0, 5);
            if (index) index[rows] = order[i];
            rows++;
        }
    }
    offsets[experts] = rows;
    free(order), free(expert);
}

static void make(check_case_t *c, testing_rng_t *rng, const shape_t *shape)
{
    static const char *const routes[] = {"uniform", "one expert", "few experts"};
    static const char *const names[] = {"weight.data", "weight.scales", "weight.zeros", "weight.g_idx"};
    const quant_weight_t *w = &shape->weight;
    current = shape;
    check_case(
        c, &op,
        "%s scales %s group %d rows %d zeros %d order %d T %d k %d E %d N %d K %d %s to %s act %d layout %d %s bias %d "
        "weights %d on input %d index %d sorted %d%d",
        epmoe_format_string(w->format), epmoe_dtype_string(w->scales_dtype), w->group, w->group_rows, w->zeros,
        w->order, shape->tokens, shape->top_k, w->experts, w->n, w->k, epmoe_dtype_string(shape->dtype),
        epmoe_dtype_string(shape->y_dtype), (int)shape->activation, (int)w->layout, routes[shape->route], shape->bias,
        shape->row_weights, shape->weight_on_input, shape->indexed, shape->x_sorted, shape->y_sorted);
    /* The order of an fp32 sum over K. */
    c->tolerance = 6e-6 + 0x1p-20 * sqrt((double)w->k) + quant_weight_rounding(w->format, shape->dtype);
    int32_t slots = shape->tokens * shape->top_k, max_rows = slots ? slots + (shape->indexed ? 40 : 0) : 0;
    epmoe_grouped_gemm_args_t args = EPMOE_GROUPED_GEMM_ARGS_INIT;
    args.backend = EPMOE_BACKEND_CUDA;
    args.num_experts = w->experts, args.n = w->n, args.k = w->k;
    args.max_rows = max_rows, args.num_slots = slots;
    args.x_row_divisor = shape->top_k;
    args.x_dtype = shape->dtype, args.y_dtype = shape->y_dtype;
    args.weight = quant_weight_fields(w);
    args.layout = w->format == EPMOE_FORMAT_FP8_BLOCK ? w->layout : EPMOE_LAYOUT_PACKED;
    args.activation = shape->activation;
    args.limit = shape->limit;
    args.weight_on_input = shape->weight_on_input;
    args.batch_invariant = shape->batch_invariant;
    args.x_sorted = shape->x_sorted, args.y_sorted = shape->y_sorted;
    epmoe_grouped_gemm_args_t query = args;
    query.weight.g_idx = w->order ? (const int32_t *)c : NULL; /* whether there is one decides */
    if (epmoe_grouped_gemm_workspace_size(&query, &args.workspace_bytes) != EPMOE_OK)
        check_fail(c, "%s", epmoe_last_error());
    memcpy(c->args, &args, sizeof args);

    int64_t n_out = w->gated ? w->n / 2 : w->n, k = w->k;
    if (shape->dense)
        CHECK_ADD(c, epmoe_grouped_gemm_args_t, num_rows_dev, CHECK_IN, EPMOE_I32, 1, 1, 4);
    else
        CHECK_ADD(c, epmoe_grouped_gemm_args_t, expert_offsets, CHECK_IN, EPMOE_I32, 1, w->experts + 1, 4);
    if (shape->indexed) {
        int32_t *index = CHECK_ADD(c, epmoe_grouped_gemm_args_t, row_index, CHECK_IN, EPMOE_I32, 1, max_rows, 4);
        for (int32_t i = 0; i < max_rows; i++) index[i] = slots + i;
    }
    int64_t x_rows = shape->x_sorted ? max_rows : shape->tokens, y_rows = shape->y_sorted ? max_rows : slots;
    void *x = CHECK_ADD(c, epmoe_grouped_gemm_args_t, x, CHECK_IN, shape->dtype, x_rows, k, 16);
    check_fill_normal(rng, x, shape->dtype, x_rows * k, 1.0f / sqrtf((float)k));
    quant_weight_add(c, rng, offsetof(epmoe_grouped_gemm_args_t, weight), names, w);
    if (shape->bias) {
        void *bias = CHECK_ADD(c, epmoe_grouped_gemm_args_t, bias, CHECK_IN, EPMOE_F32, w->experts, w->n, 4);
        check_fill_normal(rng, bias, EPMOE_F32, (int64_t)w->experts * w->n, 0.5f);
    }
    if (shape->row_weights || shape->weight_on_input) {
        void *weights = CHECK_ADD(c, epmoe_grouped_gemm_args_t, row_weights, CHECK_IN, EPMOE_F32, 1, slots, 4);
        check_fill_normal(rng, weights, EPMOE_F32, slots, 1.0f);
    }
    if (args.workspace_bytes)
        CHECK_ADD(c, epmoe_grouped_gemm_args_t, workspace, CHECK_SCRATCH, EPMOE_U8, 1, args.workspace_bytes, 16);
    CHECK_ADD(c, epmoe_grouped_gemm_args_t, y, CHECK_OUT, shape->y_dtype, y_rows, n_out, 16);
    fill_rows(rng, c, shape, max_rows);
}

static void run_one(testing_rng_t *rng, const shape_t *shape)
{
    check_case_t c;
    if (check_skips((int64_t)shape->weight.experts * shape->weight.n * shape->weight.k)) return;
    make(&c, rng, shape);
    check_run(&c);
    check_free(&c);
}

static const epmoe_format_t formats[] = {EPMOE_FORMAT_FP8_BLOCK, EPMOE_FORMAT_W4, EPMOE_FORMAT_MXFP4};
static const epmoe_dtype_t dtypes[] = {EPMOE_BF16, EPMOE_F16}, y_dtypes[] = {EPMOE_BF16, EPMOE_F16, EPMOE_F32};
static const epmoe_dtype_t scales_dtypes[] = {EPMOE_F32, EPMOE_F16, EPMOE_BF16, EPMOE_F8_E8M0};

/* A weight of about these sizes with a random choice of what its format has. */
static quant_weight_t random_weight(testing_rng_t *rng, epmoe_format_t format, int32_t experts, int32_t n, int32_t k,
                                    bool gated)
{
    static const int32_t groups[] = {0, 64, 192, -1, 16, 32};
    bool fp8 = format == EPMOE_FORMAT_FP8_BLOCK, w4 = format == EPMOE_FORMAT_W4;
    int32_t step = fp8 ? 16 : w4 ? 8 : 32;
    quant_weight_t weight = {.format = format, .experts = experts, .gated = gated};
    weight.n = gated ? (n + 1) / 2 * 2 : n;
    weight.k = (k + step - 1) / step * step;
    weight.group = fp8 ? groups[testing_range(rng, 0, 3)] : w4 ? groups[testing_range(rng, 0, 5)] : 0;
    weight.scales_dtype = format == EPMOE_FORMAT_MXFP4 ? EPMOE_F8_E8M0 : scales_dtypes[testing_range(rng, 0, 3)];
    static const int32_t group_rows[] = {0, 0, 1, 7, 128, -1};
    weight.group_rows = fp8 ? group_rows[testing_range(rng, 0, 5)] : 0;
    weight.zeros = !fp8 && testing_range(rng, 0, 1);
    weight.order = w4 && testing_range(rng, 0, 2) == 0;
    weight.layout = fp8 ? (epmoe_layout_t)testing_range(rng, 0, 2) : EPMOE_LAYOUT_PACKED;
    return weight;
}

static bool is_gated(epmoe_activation_t activation) { return activation < EPMOE_ACTIVATION_NONE; }

static void check_shapes(testing_rng_t *rng)
{
    static const int32_t tokens[] = {0, 1, 3, 17, 63, 127, 257}, experts[] = {1, 5, 64, 300};
    check_begin("gemm_quant", "E 1..300, T 0..257, every format");
    for (size_t f = 0; f < 3; f++)
        for (size_t e = 0; e < 4; e++)
            for (size_t t = 0; t < 7; t++) {
                epmoe_activation_t activation = (e + t) % 2 ? EPMOE_ACTIVATION_SILU : EPMOE_ACTIVATION_NONE;
                int32_t n = experts[e] > 64 ? 48 : 272, k = experts[e] > 64 ? 72 : 328;
                shape_t shape = {.weight = random_weight(rng, formats[f], experts[e], n, k, is_gated(activation)),
                                 .tokens = tokens[t],
                                 .top_k = t % 2 ? 4 : 1,
                                 .dtype = dtypes[(e + t) % 2],
                                 .y_dtype = y_dtypes[(e + t) % 3],
                                 .activation = activation,
                                 .route = (route_t)((e + 2 * t) % ROUTE_COUNT),
                                 .indexed = t % 3 != 1,
                                 .row_weights = t % 2};
                run_one(rng, &shape);
            }
    check_end();
}

/* Widths around the tiles, K from one step to many; every epilogue, group size and kind of scales. */
static void check_epilogues(testing_rng_t *rng)
{
    static const int32_t ns[] = {1, 2, 16, 63, 64, 66, 130, 272}, ks[] = {8, 24, 64, 72, 120, 264, 1032};
    check_begin("gemm_quant", "epilogues, groups, scales, odd N and K");
    for (int32_t i = 0; i < 3 * 6 * 24; i += check_step(7)) {
        epmoe_activation_t activation = (epmoe_activation_t)(i / 3 % 6);
        const bool tall = testing_range(rng, 0, 2) == 0; /* the widest tiles */
        shape_t shape = {.weight =
                             random_weight(rng, formats[i % 3], testing_range(rng, 1, 9), ns[testing_range(rng, 0, 7)],
                                           ks[testing_range(rng, 0, tall ? 5 : 6)], is_gated(activation)),
                         .tokens = testing_range(rng, 1, tall ? 330 : 70),
                         .top_k = testing_range(rng, 1, 3),
                         .dtype = dtypes[testing_range(rng, 0, 1)],
                         .y_dtype = y_dtypes[testing_range(rng, 0, 2)],
                         .activation = activation,
                         .route = (route_t)testing_range(rng, 0, ROUTE_COUNT - 1),
                         .bias = testing_range(rng, 0, 1),
                         .row_weights = testing_range(rng, 0, 1),
                         .weight_on_input = testing_range(rng, 0, 3) == 0,
                         .indexed = testing_range(rng, 0, 1),
                         .x_sorted = testing_range(rng, 0, 2) == 0,
                         .y_sorted = testing_range(rng, 0, 2) == 0,
                         .limit = testing_range(rng, 0, 1) ? 0.7f : 0.0f};
        run_one(rng, &shape);
    }
    check_end();
}

/* As a layer calls it for the shared expert: one expert, the rows counted on the device. */
static void check_dense(testing_rng_t *rng)
{
    check_begin("gemm_quant", "one expert without offsets");
    for (int32_t i = 0; i < 3 * 6 * 2; i++) {
        epmoe_activation_t activation = (epmoe_activation_t)(i / 3 % 6);
        shape_t shape = {.weight = random_weight(rng, formats[i % 3], 1, testing_range(rng, 2, 200),
                                                 8 * testing_range(rng, 1, 40), is_gated(activation)),
                         .tokens = testing_range(rng, 1, 200),
                         .top_k = 1,
                         .dtype = dtypes[testing_range(rng, 0, 1)],
                         .y_dtype = y_dtypes[testing_range(rng, 0, 2)],
                         .activation = activation,
                         .bias = testing_range(rng, 0, 1),
                         .x_sorted = testing_range(rng, 0, 1),
                         .dense = true};
        run_one(rng, &shape);
    }
    check_end();
}

/* A NaN of x stays in its row of y, one of the weights, E4M3 codes and scales, in its column. */
static void check_nan(testing_rng_t *rng)
{
    check_begin("gemm_quant", "NaN and infinite rows, codes and scales");
    for (int32_t i = 0; i < 12; i++) {
        epmoe_activation_t activation = i / 3 % 2 ? EPMOE_ACTIVATION_SILU : EPMOE_ACTIVATION_NONE;
        shape_t shape = {.weight = random_weight(rng, formats[i % 3], 3 + 20 * (i / 6), 144, 192, is_gated(activation)),
                         .tokens = 80,
                         .top_k = 2,
                         .dtype = dtypes[i / 3 % 2],
                         .y_dtype = EPMOE_F32,
                         .activation = activation,
                         .indexed = true};
        shape.weight.group = formats[i % 3] == EPMOE_FORMAT_MXFP4 ? 0 : 64;
        shape.weight.scales_dtype = formats[i % 3] == EPMOE_FORMAT_MXFP4 ? EPMOE_F8_E8M0 : EPMOE_F32;
        check_case_t c;
        make(&c, rng, &shape);
        char *x = check_find(&c, "x")->host, *data = check_find(&c, "weight.data")->host;
        char *scales = check_find(&c, "weight.scales")->host;
        epmoei_store(x, shape.dtype, 7 * shape.weight.k + 77, NAN);
        epmoei_store(x, shape.dtype, 30 * shape.weight.k + 5, INFINITY);
        if (formats[i % 3] == EPMOE_FORMAT_FP8_BLOCK) data[(144 + 9) * 192 + 3] = 0x7F, data[20 * 192 + 100] = -1;
        if (formats[i % 3] == EPMOE_FORMAT_MXFP4) scales[11] = -1;
        if (formats[i % 3] == EPMOE_FORMAT_W4) epmoei_store(scales, EPMOE_F32, 70, NAN);
        check_run(&c);
        check_free(&c);
    }
    check_end();
}

/* A row's bits alone are its bits among others, whatever tile the call takes. */
static void check_batch_invariance(testing_rng_t *rng)
{
    check_begin("gemm_quant", "batch invariance");
    for (int32_t i = 0; i < 6; i++) {
        shape_t shape = {.weight = random_weight(rng, formats[i % 3], i < 3 ? 2 : 20, 272, 512, false),
                         .tokens = i < 3 ? 200 : 90,
                         .top_k = 1,
                         .dtype = EPMOE_BF16,
                         .y_dtype = EPMOE_F32,
                         .activation = EPMOE_ACTIVATION_NONE,
                         .batch_invariant = true};
        shape.weight.order = false;
        check_case_t c;
        make(&c, rng, &shape);
        epmoe_grouped_gemm_args_t *args = (epmoe_grouped_gemm_args_t *)(void *)c.args;
        check_field_t *y = check_find(&c, "y");
        int32_t *offsets = (int32_t *)(void *)check_find(&c, "expert_offsets")->host;
        int32_t experts = shape.weight.experts, rows = offsets[experts];
        if (check_run(&c)) /* leaves in expected what the device gave */
            for (int32_t expert = 0, r = 0; r < rows; r += 23) {
                while (offsets[expert + 1] <= r) expert++;
                check_case_t one = c;
                int32_t *alone = testing_buffer(4 * ((int64_t)experts + 1), 0);
                for (int32_t e = 0; e <= experts; e++) alone[e] = e > expert ? r + 1 : r;
                ((epmoe_grouped_gemm_args_t *)(void *)one.args)->max_rows = r + 1;
                check_send(check_find(&one, "y"), y->host);
                check_send(check_find(&one, "expert_offsets"), (char *)alone);
                epmoei_stream_wait(EPMOE_BACKEND_CUDA, check_stream);
                epmoe_status_t status = check_launch(&one);
                if (status != EPMOE_OK) check_fail(&c, "one row: %s", epmoe_last_error());
                epmoei_memory_copy(EPMOE_BACKEND_CUDA, y->got, y->device, y->bytes, check_stream);
                epmoei_stream_wait(EPMOE_BACKEND_CUDA, check_stream);
                int64_t row_bytes = 4 * y->cols;
                if (memcmp(y->got + r * row_bytes, y->expected + r * row_bytes, (size_t)row_bytes))
                    check_fail(&c, "row %d alone differs", r);
                testing_buffer_free(alone);
            }
        (void)args;
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
    const epmoe_grouped_gemm_args_t *args = (const epmoe_grouped_gemm_args_t *)(const void *)c->args;
    check_fill_normal(how->rng, check_find(c, "x")->host, shape.dtype, (int64_t)shape.tokens * shape.weight.k, 0.05f);
    fill_rows(how->rng, c, &shape, args->max_rows);
}

static void check_refusals(check_case_t *c, const shape_t *shape)
{
    epmoe_grouped_gemm_args_t *args = (epmoe_grouped_gemm_args_t *)(void *)c->args, good = *args;
    bool fp8 = shape->weight.format == EPMOE_FORMAT_FP8_BLOCK;
    for (int32_t wrong = 0; wrong < 7; wrong++) {
        if (wrong == 0) args->k = fp8 ? 136 : 140;
        if (wrong == 1) args->x_dtype = EPMOE_F32;
        if (wrong == 2) args->weight.format = EPMOE_FORMAT_GPTQ;
        if (wrong == 3) args->weight.format = EPMOE_FORMAT_AWQ;
        if (wrong == 4 && !fp8) args->layout = EPMOE_LAYOUT_GATE_FIRST;
        if (wrong == 5 && shape->weight.format != EPMOE_FORMAT_MXFP4) args->weight.group_size = 24;
        if (wrong == 6 && !fp8) args->weight.storage = EPMOE_STORAGE_ROWS;
        if (memcmp(args, &good, sizeof good) == 0) continue;
        epmoe_status_t status = check_launch(c);
        /* MXFP4's K is checked before anything of CUDA, and what GPTQ needs. */
        bool ok = status == EPMOE_ERROR_NOT_SUPPORTED || (status == EPMOE_ERROR_INVALID_ARGUMENT && wrong < 4);
        if (!ok) check_fail(c, "refusal %d gave status %d", wrong, (int)status);
        if (wrong == 6 && !strstr(epmoe_last_error(), "weight.storage")) check_fail(c, "%s", epmoe_last_error());
        *args = good;
    }
}

static void check_calls(testing_rng_t *rng)
{
    check_begin("gemm_quant", "graphs, alignment, refusals");
    for (int32_t i = 0; i < 6; i++) {
        shape_t shape = {.weight = random_weight(rng, formats[i % 3], 8, 144, 192, true),
                         .tokens = 33 + 100 * (i / 3),
                         .top_k = 3,
                         .dtype = EPMOE_BF16,
                         .y_dtype = EPMOE_BF16,
                         .activation = EPMOE_ACTIVATION_SWIGLU_OAI,
                         .bias = true,
                         .row_weights = true,
                         .indexed = true};
        if (formats[i % 3] == EPMOE_FORMAT_W4) shape.weight.zeros = shape.weight.order = true;
        check_case_t c;
        make(&c, rng, &shape);
        refill_t how = {rng, &shape};
        check_graph(&c, refill, &how);
        /* Index arrays, bias and row weights are read by element, and their alignment is not checked. */
        check_find(&c, "expert_offsets")->alignment = check_find(&c, "row_index")->alignment = 1;
        check_find(&c, "bias")->alignment = check_find(&c, "row_weights")->alignment = 1;
        check_misaligned(&c);
        check_refusals(&c, &shape);
        check_free(&c);
    }
    check_end();
}

void check_gemm_quant(testing_rng_t *rng)
{
    check_shapes(rng);
    check_epilogues(rng);
    check_dense(rng);
    check_nan(rng);
    check_batch_invariance(rng);
    check_calls(rng);
}
