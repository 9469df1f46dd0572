/* FP8_BLOCK weights by quantised activations. The expected values are made here, in double precision and from the
 * definition of E4M3: quantise a row of x, multiply values, apply the epilogue. */
#include "base/dtype.h"
#include "kernels/activation.h"
#include "kernels/grouped_gemm.h"
#include "tests/checkcuda/check_fp8.h"
#include "tests/e4m3_oracle.h"

#include <math.h>
#include <stdlib.h>

static epmoe_status_t run(const void *args, epmoe_stream_t stream) { return epmoe_grouped_gemm(args, stream); }

static double e4m3_values[256];

static float scale_at(const epmoe_weight_t *weight, int64_t i)
{
    if (weight->scales_dtype == EPMOE_F8_E8M0) return ldexpf(1.0f, ((const uint8_t *)weight->scales)[i] - 127);
    return epmoei_load(weight->scales, weight->scales_dtype, i);
}

/* Row of w of output i, its gate or only one, or its up row, and the row of blocks that it lies in. */
static int64_t row_of_output(const epmoe_grouped_gemm_args_t *a, bool gated, int64_t i, bool up, int64_t *block)
{
    int64_t f = a->n / 2, group = a->weight.group_rows, row = i;
    if (gated) row = a->layout == EPMOE_LAYOUT_GATE_FIRST ? up * f + i : 2 * i + up;
    *block = row / group;
    if (gated && a->layout == EPMOE_LAYOUT_PACKED) *block = up * ((f + group - 1) / group) + i / group;
    return row;
}

static double dot(const epmoe_grouped_gemm_args_t *a, bool gated, int64_t expert, int64_t i, bool up, const double *x)
{
    int64_t group = a->weight.group_size, groups = (a->k + group - 1) / group, block;
    int64_t high = a->weight.group_rows, blocks = (a->n + high - 1) / high;
    if (gated && a->layout == EPMOE_LAYOUT_PACKED) blocks = 2 * ((a->n / 2 + high - 1) / high);
    int64_t row = row_of_output(a, gated, i, up, &block);
    const uint8_t *codes = (const uint8_t *)a->weight.data + (expert * a->n + row) * a->k;
    double sum = 0;
    for (int64_t first = 0; first < a->k; first += 128) { /* group is a multiple of 128 or all */
        double part = 0;
        for (int64_t k = first; k < first + 128 && k < a->k; k++) part += e4m3_values[codes[k]] * x[k];
        sum += part * (double)scale_at(&a->weight, (expert * blocks + block) * groups + first / group);
    }
    if (a->row_weights && a->weight_on_input) sum *= (double)x[a->k];
    return sum + (a->bias ? (double)a->bias[expert * a->n + row] : 0.0);
}

/* x [k+1]: the values that the product sees, and the slot's weight. */
static void make_row(const epmoe_grouped_gemm_args_t *a, int64_t x_row, int32_t slot, double *x)
{
    x[a->k] = a->row_weights ? (double)a->row_weights[slot] : 1.0;
    if (a->x_quant) {
        const int64_t blocks = (a->k + 127) / 128;
        for (int64_t k = 0; k < a->k; k++) {
            const int64_t at = a->x_quant == EPMOE_GRANULARITY_TENSOR  ? 0
                               : a->x_quant == EPMOE_GRANULARITY_TOKEN ? x_row
                                                                       : x_row * blocks + k / 128;
            x[k] = e4m3_values[((const uint8_t *)a->x)[x_row * a->k + k]] * (double)a->x_scale[at];
        }
        return;
    }
    for (int64_t first = 0; first < a->k; first += 128) {
        int64_t end = first + 128 < a->k ? first + 128 : a->k;
        float amax = 0;
        for (int64_t k = first; k < end; k++) {
            float value = fabsf(epmoei_load(a->x, a->x_dtype, x_row * a->k + k));
            if (value > amax) amax = value;
        }
        float scale = fmaxf(amax / 448.0f, 0x1p-126f);
        for (int64_t k = first; k < end; k++)
            x[k] = e4m3_values[e4m3_nearest((double)(epmoei_load(a->x, a->x_dtype, x_row * a->k + k) / scale))] *
                   (double)scale;
    }
}

static epmoe_status_t reference(const void *args)
{
    epmoe_grouped_gemm_args_t a;
    EPMOEI_CHECK(epmoei_grouped_gemm_check(args, &a));
    for (int i = 0; i < 256; i++) e4m3_values[i] = e4m3_value(i);
    bool gated = epmoei_activation_is_gated(a.activation);
    int32_t n_out = gated ? a.n / 2 : a.n, expert = 0;
    if (a.max_rows == 0) return EPMOE_OK;
    double *x = malloc(((size_t)a.k + 1) * 8);
    if (!x) abort();
    for (int32_t r = a.expert_offsets[0]; r < a.expert_offsets[a.num_experts]; r++) {
        while (r >= a.expert_offsets[expert + 1]) expert++;
        int32_t slot = a.row_index ? a.row_index[r] : r;
        if (slot >= a.num_slots) continue;
        make_row(&a, a.x_sorted ? r : slot / a.x_row_divisor, slot, x);
        int64_t y_row = a.y_sorted ? r : slot;
#pragma omp parallel for
        for (int32_t i = 0; i < n_out; i++) {
            double value = dot(&a, gated, expert, i, false, x);
            if (gated)
                value = (double)epmoei_activate(a.activation, (float)value, (float)dot(&a, gated, expert, i, true, x),
                                                a.alpha, a.limit);
            if (a.activation == EPMOE_ACTIVATION_SIGMOID) value = 1 / (1 + exp(-value));
            if (!a.weight_on_input) value *= x[a.k];
            epmoei_store(a.y, a.y_dtype, y_row * n_out + i, (float)value);
        }
    }
    free(x);
    return EPMOE_OK;
}

static const check_op_t op = {"grouped_gemm_fp8", sizeof(epmoe_grouped_gemm_args_t), run, reference};

typedef enum route_t { ROUTE_UNIFORM, ROUTE_ONE_EXPERT, ROUTE_FEW_EXPERTS, ROUTE_COUNT } route_t;

typedef struct shape_t {
    int32_t tokens, top_k, experts, n, k, group, group_rows;
    epmoe_dtype_t dtype, y_dtype, scales_dtype;
    epmoe_activation_t activation;
    epmoe_layout_t layout;
    route_t route;
    bool bias, row_weights, weight_on_input, indexed, x_sorted, y_sorted;
    float limit;
    epmoe_granularity_t x_quant; /* 0: x is of dtype, and quantised by the call */
} shape_t;

/* As in the checks of the other formats: one slot in nine is nobody's, padding lies between an expert's slots. */
static void fill_rows(testing_rng_t *rng, check_case_t *c, const shape_t *shape, int32_t max_rows)
{
    int32_t *offsets = (int32_t *)(void *)check_find(c, "expert_offsets")->host;
    int32_t *index = shape->indexed ? (int32_t *)(void *)check_find(c, "row_index")->host : NULL;
    int32_t slots = shape->tokens * shape->top_k, rows = 0, one = testing_range(rng, 0, shape->experts - 1);
    int32_t *order = malloc(4 * (size_t)slots + 4), *expert = malloc(4 * (size_t)slots + 4);
    if (!order || !expert) abort();
    for (int32_t i = 0; i < slots; i++) {
        int32_t j = testing_range(rng, 0, i);
        order[i] = order[j], order[j] = i;
        expert[i] = shape->route == ROUTE_ONE_EXPERT    ? one
                    : shape->route == ROUTE_FEW_EXPERTS ? (one + 7 * testing_range(rng, 0, 3)) % shape->experts
                                                        : testing_range(rng, 0, shape->experts - 1);
        if (testing_range(rng, 0, 8) == 0) expert[i] = -1;
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
    static const char *const routes[] = {"uniform", "one expert", "few experts"};
    check_case(
        c, &op,
        "T %d k %d E %d N %d K %d group %d rows %d %s %s to %s act %d layout %d %s bias %d weights %d on input %d "
        "index %d sorted %d%d x_quant %d",
        shape->tokens, shape->top_k, shape->experts, shape->n, shape->k, shape->group, shape->group_rows,
        epmoe_dtype_string(shape->scales_dtype), epmoe_dtype_string(shape->dtype), epmoe_dtype_string(shape->y_dtype),
        (int)shape->activation, (int)shape->layout, routes[shape->route], shape->bias, shape->row_weights,
        shape->weight_on_input, shape->indexed, shape->x_sorted, shape->y_sorted, (int)shape->x_quant);
    bool gated = shape->activation < EPMOE_ACTIVATION_NONE;
    /* The tensor cores cut a product off 13 bits below the largest of those that they add at once, all in one
     * direction: some outputs of many are far off, and one of a gate and an up row is so twice. */
    c->tolerance = gated ? 1e-2 : 5e-3;
    int32_t slots = shape->tokens * shape->top_k, max_rows = slots ? slots + (shape->indexed ? 40 : 0) : 0;
    epmoe_grouped_gemm_args_t args = EPMOE_GROUPED_GEMM_ARGS_INIT;
    args.backend = EPMOE_BACKEND_CUDA;
    args.num_experts = shape->experts;
    args.n = shape->n;
    args.k = shape->k;
    args.max_rows = max_rows;
    args.num_slots = slots;
    args.x_row_divisor = shape->top_k;
    args.x_dtype = shape->x_quant ? EPMOE_F8_E4M3 : shape->dtype;
    args.x_quant = shape->x_quant;
    args.weight.struct_size = sizeof args.weight;
    args.weight.format = EPMOE_FORMAT_FP8_BLOCK;
    args.weight.group_size = shape->group;
    args.weight.group_rows = shape->group_rows;
    args.weight.scales_dtype = shape->scales_dtype;
    args.layout = shape->layout;
    args.activation = shape->activation;
    args.limit = shape->limit;
    args.weight_on_input = shape->weight_on_input;
    args.x_sorted = shape->x_sorted;
    args.y_sorted = shape->y_sorted;
    args.y_dtype = shape->y_dtype;
    args.fp8_activations = !shape->x_quant;
    if (epmoe_grouped_gemm_workspace_size(&args, &args.workspace_bytes) != EPMOE_OK)
        check_fail(c, "%s", epmoe_last_error());
    memcpy(c->args, &args, sizeof args);

    int64_t experts = shape->experts, n = shape->n, k = shape->k;
    int64_t scales = experts * check_fp8_scales(shape->group, shape->group_rows, n, k,
                                                gated && shape->layout == EPMOE_LAYOUT_PACKED);
    CHECK_ADD(c, epmoe_grouped_gemm_args_t, expert_offsets, CHECK_IN, EPMOE_I32, 1, experts + 1, 1);
    if (shape->indexed) {
        int32_t *index = CHECK_ADD(c, epmoe_grouped_gemm_args_t, row_index, CHECK_IN, EPMOE_I32, 1, max_rows, 1);
        for (int32_t i = 0; i < max_rows; i++) index[i] = slots + i;
    }
    int64_t x_rows = shape->x_sorted ? max_rows : shape->tokens, y_rows = shape->y_sorted ? max_rows : slots;
    void *x = CHECK_ADD(c, epmoe_grouped_gemm_args_t, x, CHECK_IN, args.x_dtype, x_rows, k, 16);
    void *w = CHECK_ADD(c, epmoe_grouped_gemm_args_t, weight.data, CHECK_IN, EPMOE_F8_E4M3, experts * n, k, 16);
    void *w_scales =
        CHECK_ADD(c, epmoe_grouped_gemm_args_t, weight.scales, CHECK_IN, shape->scales_dtype, 1, scales, 16);
    if (shape->x_quant) {
        const int64_t blocks = shape->x_quant == EPMOE_GRANULARITY_BLOCK128 ? (k + 127) / 128 : 1;
        const int64_t scaled = shape->x_quant == EPMOE_GRANULARITY_TENSOR ? 1 : x_rows * blocks;
        float *scale = CHECK_ADD(c, epmoe_grouped_gemm_args_t, x_scale, CHECK_IN, EPMOE_F32, 1, scaled, 4);
        check_fp8_weight(rng, x, x_rows * k, scale, EPMOE_F32, scaled, 1);
    } else
        check_fill_normal(rng, x, shape->dtype, x_rows * k, 1.0f);
    check_fp8_weight(rng, w, experts * n * k, w_scales, shape->scales_dtype, scales, shape->k);
    if (shape->bias) {
        void *bias = CHECK_ADD(c, epmoe_grouped_gemm_args_t, bias, CHECK_IN, EPMOE_F32, experts, n, 1);
        testing_fill_normal(rng, bias, EPMOE_F32, experts * n, 0.5f);
    }
    if (shape->row_weights || shape->weight_on_input) {
        float *weights = CHECK_ADD(c, epmoe_grouped_gemm_args_t, row_weights, CHECK_IN, EPMOE_F32, 1, slots, 1);
        for (int32_t s = 0; s < slots; s++)
            weights[s] = testing_uniform(rng, 0.2f, 2.0f) * (testing_range(rng, 0, 1) ? 1.0f : -1.0f);
    }
    CHECK_ADD(c, epmoe_grouped_gemm_args_t, y, CHECK_OUT, shape->y_dtype, y_rows, gated ? n / 2 : n, 16);
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
static const epmoe_dtype_t y_dtypes[] = {EPMOE_BF16, EPMOE_F32, EPMOE_F16};
static const epmoe_dtype_t scales_dtypes[] = {EPMOE_F32, EPMOE_BF16, EPMOE_F16, EPMOE_F8_E8M0};

static void check_shapes(testing_rng_t *rng)
{
    const int32_t experts[] = {1, 5, 60, 256}, tokens[] = {0, 1, 3, 17, 63, 127, 257};
    check_begin(op.name, "E 1..256, T 0..257");
    for (size_t e = 0; e < sizeof experts / sizeof *experts; e++)
        for (size_t t = 0; t < sizeof tokens / sizeof *tokens; t++) {
            shape_t shape = {.tokens = tokens[t],
                             .top_k = t % 2 ? 4 : 1,
                             .experts = experts[e],
                             .n = e % 2 ? 272 : 528,
                             .k = e < 2 ? 400 : 144,
                             .dtype = x_dtypes[(e + t) % 2],
                             .y_dtype = y_dtypes[(e + t) % 3],
                             .scales_dtype = EPMOE_F32,
                             .activation = t % 3 ? EPMOE_ACTIVATION_SILU : EPMOE_ACTIVATION_NONE,
                             .layout = EPMOE_LAYOUT_PACKED,
                             .route = (route_t)((e + 2 * t) % ROUTE_COUNT),
                             .indexed = t % 3 != 1,
                             .row_weights = t % 2};
            if (!check_skips((int64_t)shape.tokens * shape.top_k * (shape.n + shape.k))) run_one(rng, &shape);
        }
    check_end();
}

/* Tiles of both sizes that begin at every row of a run of scales. */
static void check_first_rows(testing_rng_t *rng)
{
    check_begin(op.name, "experts that begin at any row");
    for (int32_t i = 0; i < 8; i++) {
        shape_t shape = {.tokens = i % 2 ? 150 + i : 9 + i,
                         .top_k = 1,
                         .experts = 3,
                         .n = 256,
                         .k = 272,
                         .dtype = EPMOE_BF16,
                         .y_dtype = i % 3 ? EPMOE_BF16 : EPMOE_F32,
                         .scales_dtype = EPMOE_F32,
                         .activation = i % 4 < 2 ? EPMOE_ACTIVATION_SILU : EPMOE_ACTIVATION_NONE,
                         .layout = EPMOE_LAYOUT_PACKED,
                         .indexed = true,
                         .row_weights = i % 4 > 1};
        check_case_t c;
        make(&c, rng, &shape);
        int32_t *offsets = (int32_t *)(void *)check_find(&c, "expert_offsets")->host;
        if (offsets[3] > i / 2 + 2) offsets[1] = i / 2 + 1, offsets[2] = offsets[1] + 1;
        check_run(&c);
        check_free(&c);
    }
    check_end();
}

/* More tiles a block than the places through which their numbers pass, each of one step or of few. */
static void check_dealt(testing_rng_t *rng)
{
    check_begin(op.name, "many tiles a block");
    for (int32_t i = 0; i < (check_small ? 1 : 6); i++) {
        const bool wide = i % 3 == 2;
        const int32_t narrow_tokens = check_small ? 2000 : 20000, narrow_experts = check_small ? 700 : 1500;
        shape_t shape = {.tokens = wide ? 90000 : narrow_tokens,
                         .top_k = 1,
                         .experts = wide ? 2 : narrow_experts,
                         .n = i < 3 ? 264 : 272,
                         .k = i % 3 == 1 ? 272 : 64,
                         .dtype = EPMOE_BF16,
                         .y_dtype = EPMOE_BF16,
                         .scales_dtype = EPMOE_F32,
                         .activation = i < 3 ? EPMOE_ACTIVATION_NONE : EPMOE_ACTIVATION_SILU,
                         .layout = EPMOE_LAYOUT_PACKED,
                         .x_sorted = wide,
                         .x_quant = wide ? i == 2 ? EPMOE_GRANULARITY_BLOCK128 : EPMOE_GRANULARITY_TOKEN : 0};
        run_one(rng, &shape);
    }
    check_end();
}

/* The tiles of many tokens, and clusters of two over an odd number of blocks of weight rows. */
static void check_many_rows(testing_rng_t *rng)
{
    check_begin(op.name, "up to 900 rows an expert");
    for (int32_t i = 0; i < (check_small ? 2 : 12); i++) {
        bool gated = i % 2;
        shape_t shape = {.tokens = testing_range(rng, 200, check_small ? 260 : 450),
                         .top_k = 2,
                         .experts = i % 3 + 1,
                         .n = 256 * (i % 4) + (gated ? 144 : 120),
                         .k = 16 * testing_range(rng, 1, 40),
                         .dtype = x_dtypes[i / 2 % 2],
                         .y_dtype = y_dtypes[i % 3],
                         .scales_dtype = EPMOE_F32,
                         .activation = gated ? EPMOE_ACTIVATION_SILU : EPMOE_ACTIVATION_NONE,
                         .layout = EPMOE_LAYOUT_PACKED,
                         .row_weights = !gated,
                         .indexed = i % 4 != 3,
                         .y_sorted = gated};
        run_one(rng, &shape);
    }
    check_end();
}

/* Every epilogue, layout, size of blocks and type of scales; N and K that are no whole blocks. */
static void check_epilogues(testing_rng_t *rng)
{
    const int32_t ns[] = {16, 48, 112, 144, 272, 304, 784}, ks[] = {16, 48, 112, 128, 272, 1040};
    const int32_t groups[] = {0, 256, -1, -1, -1, -1}, group_rows[] = {0, 0, 0, 1, 3, 128};
    check_begin(op.name, "epilogues, layouts, groups, ragged blocks");
    for (int32_t i = 0; i < 6 * 3 * 6 * 4 * 3; i += check_small ? 13 : 5) {
        const bool tall = testing_range(rng, 0, 3) == 0;
        shape_t shape = {.tokens = testing_range(rng, 1, tall ? 300 : 70),
                         .top_k = testing_range(rng, 1, 3),
                         .experts = testing_range(rng, 1, 9),
                         .activation = (epmoe_activation_t)(i % 6),
                         .layout = (epmoe_layout_t)(i / 6 % 3),
                         .group = groups[i / 18 % 6],
                         .group_rows = group_rows[i / 18 % 6],
                         .scales_dtype = scales_dtypes[i / 108 % 4],
                         .y_dtype = y_dtypes[i / 432],
                         .n = ns[testing_range(rng, 0, 6)],
                         .k = ks[testing_range(rng, 0, tall ? 4 : 5)],
                         .bias = testing_range(rng, 0, 1),
                         .row_weights = testing_range(rng, 0, 1),
                         .dtype = x_dtypes[testing_range(rng, 0, 1)],
                         .weight_on_input = testing_range(rng, 0, 3) == 0,
                         .indexed = testing_range(rng, 0, 1),
                         .x_sorted = testing_range(rng, 0, 2) == 0,
                         .y_sorted = testing_range(rng, 0, 2) == 0,
                         .route = (route_t)testing_range(rng, 0, ROUTE_COUNT - 1),
                         .limit = testing_range(rng, 0, 1) ? 0.7f : 0.0f,
                         .x_quant = (epmoe_granularity_t)(testing_range(rng, 0, 1) * testing_range(rng, 1, 3))};
        bool gated = shape.activation < EPMOE_ACTIVATION_NONE;
        if (!gated) shape.n -= testing_range(rng, 0, 9); /* rows of y of any alignment */
        if (gated && shape.layout == EPMOE_LAYOUT_GATE_FIRST && shape.group != -1)
            shape.n = 256 * testing_range(rng, 1, 3);
        run_one(rng, &shape);
    }
    check_end();
}

bool check_fp8_norms(check_case_t *c, const check_field_t *field, double most)
{
    double squares = 0, differences = 0;
    for (int64_t i = 0; i < field->rows * field->cols; i++) {
        double expected = (double)epmoei_load(field->expected, field->dtype, i);
        double difference = (double)epmoei_load(field->got, field->dtype, i) - expected;
        int64_t size = epmoe_dtype_size(field->dtype);
        if (isnan(expected) && !memcmp(field->got + i * size, field->expected + i * size, (size_t)size))
            continue; /* what neither wrote */
        squares += expected * expected, differences += difference * difference;
    }
    double error = sqrt(differences / squares);
    if (!(error <= most)) check_fail(c, "%s has an error of %.3g, expected at most %.3g", field->name, error, most);
    return true;
}

static bool compare_deep(check_case_t *c, const check_field_t *field) { return check_fp8_norms(c, field, 1e-3); }
/* What is cut off in a sum of one sign does not cancel. */
static bool compare_deep_sums(check_case_t *c, const check_field_t *field) { return check_fp8_norms(c, field, 1e-2); }

/* Promotion: the error does not grow with K. */
static void check_depth(testing_rng_t *rng)
{
    check_begin(op.name, "K = 7168");
    for (int32_t i = 0; i < 2; i++) {
        shape_t shape = {.tokens = check_small ? 9 : 100,
                         .top_k = 1,
                         .experts = 1 + i,
                         .n = 256,
                         .k = 7168,
                         .dtype = EPMOE_BF16,
                         .y_dtype = EPMOE_F32,
                         .scales_dtype = EPMOE_F32,
                         .activation = EPMOE_ACTIVATION_NONE,
                         .indexed = true};
        check_case_t c;
        make(&c, rng, &shape);
        c.compare = i ? compare_deep_sums : compare_deep;
        uint16_t *x = (uint16_t *)(void *)check_find(&c, "x")->host;
        uint8_t *w = (uint8_t *)check_find(&c, "weight.data")->host;
        for (int64_t at = 0; i && at < (int64_t)shape.tokens * shape.k; at++) x[at] &= 0x7FFF;
        for (int64_t at = 0; i && at < check_find(&c, "weight.data")->bytes; at++) w[at] &= 0x7F;
        check_run(&c);
        check_free(&c);
    }
    check_end();
}

/* Blocks and clusters that walk over several tiles, some of at most 64 tokens and some above, in more steps than there
 * are stages: warpgroups share tiles, take them in turn and change who is ahead. */
static void check_walks(testing_rng_t *rng)
{
    if (check_small) return;
    check_begin(op.name, "several tiles a block");
    for (int32_t i = 0; i < 4; i++) {
        bool gated = i % 2, wide = i / 2; /* wide: clusters, the last of which has one block of weight rows */
        shape_t shape = {.tokens = wide ? 1500 : 2230,
                         .top_k = 2,
                         .experts = wide ? 8 : 60,
                         .n = wide ? 4112 : 2064,
                         .k = wide ? 656 : 1040,
                         .dtype = EPMOE_BF16,
                         .y_dtype = EPMOE_BF16,
                         .scales_dtype = EPMOE_F32,
                         .activation = gated ? EPMOE_ACTIVATION_SILU : EPMOE_ACTIVATION_NONE,
                         .layout = EPMOE_LAYOUT_PACKED,
                         .row_weights = !gated,
                         .indexed = true,
                         .y_sorted = gated};
        run_one(rng, &shape);
    }
    check_end();
}

static void check_nan(testing_rng_t *rng)
{
    check_begin(op.name, "NaN in rows, weights and scales");
    for (int32_t i = 0; i < 4; i++) {
        shape_t shape = {.tokens = i % 2 ? 80 : 30,
                         .top_k = 2,
                         .experts = 3 + 20 * (i / 2),
                         .n = 400,
                         .k = 272,
                         .dtype = x_dtypes[i % 2],
                         .y_dtype = EPMOE_F32,
                         .scales_dtype = EPMOE_F32,
                         .activation = i % 2 ? EPMOE_ACTIVATION_SILU : EPMOE_ACTIVATION_NONE,
                         .layout = EPMOE_LAYOUT_PACKED,
                         .indexed = true};
        check_case_t c;
        make(&c, rng, &shape);
        epmoei_store(check_find(&c, "x")->host, shape.dtype, 7 * shape.k + 77, NAN);
        check_find(&c, "weight.data")->host[(int64_t)(shape.n + 9) * shape.k + 3] = 0x7F;
        epmoei_store(check_find(&c, "weight.scales")->host, EPMOE_F32, 2, NAN);
        check_run(&c);
        check_free(&c);
    }
    check_end();
}

/* A row's bits alone are its bits among others. */
static void check_batch_invariance(testing_rng_t *rng)
{
    check_begin(op.name, "batch invariance");
    for (int32_t i = 0; i < 4; i++) {
        shape_t shape = {.tokens = i % 2 ? 300 : 90,
                         .top_k = 2,
                         .experts = i < 2 ? 2 : 40,
                         .n = 272,
                         .k = 528,
                         .dtype = EPMOE_BF16,
                         .y_dtype = EPMOE_F32,
                         .scales_dtype = EPMOE_F32,
                         .activation = i % 2 ? EPMOE_ACTIVATION_SILU : EPMOE_ACTIVATION_NONE,
                         .layout = EPMOE_LAYOUT_PACKED,
                         .indexed = true};
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
                if (check_launch(&one) != EPMOE_OK) check_fail(&c, "one row: %s", epmoe_last_error());
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
    check_begin(op.name, "graphs, alignment, refusals");
    for (int32_t i = 0; i < 4; i++) {
        shape_t shape = {.tokens = 33 + 200 * (i % 3),
                         .top_k = 3,
                         .experts = 8,
                         .n = 256,
                         .k = 144,
                         .dtype = EPMOE_BF16,
                         .y_dtype = EPMOE_BF16,
                         .scales_dtype = EPMOE_F32,
                         .activation = EPMOE_ACTIVATION_SWIGLU_OAI,
                         .layout = EPMOE_LAYOUT_GATE_FIRST,
                         .bias = true,
                         .row_weights = true,
                         .indexed = true};
        if (i == 3) shape.x_quant = EPMOE_GRANULARITY_TOKEN;
        check_case_t c;
        make(&c, rng, &shape);
        refill_t how = {rng, &shape};
        if (!shape.x_quant) check_graph(&c, refill, &how);
        check_misaligned(&c);
        epmoe_grouped_gemm_args_t *args = (epmoe_grouped_gemm_args_t *)c.args, good = *args;
        for (int32_t wrong = 0; wrong < 5; wrong++) {
            if (wrong == 1 && shape.x_quant) continue; /* x_scale is then one too many */
            if (wrong == 0) args->k = 136;
            if (wrong == 1) args->x_dtype = EPMOE_F32;
            if (wrong == 2) args->weight.group_size = 64;
            if (wrong == 3) args->n = 240;
            if (wrong == 4) args->n = 264, args->layout = EPMOE_LAYOUT_PACKED; /* 132 gates */
            epmoe_status_t status = check_launch(&c);
            if (status != EPMOE_ERROR_NOT_SUPPORTED) check_fail(&c, "refusal %d gave status %d", wrong, (int)status);
            *args = good;
        }
        check_free(&c);
    }
    check_end();
}

void check_gemm_fp8(testing_rng_t *rng)
{
    if (strcmp(epmoe_backend_arch(EPMOE_BACKEND_CUDA), "sm90")) return; /* no other tier computes this */
    check_shapes(rng);
    check_first_rows(rng);
    check_dealt(rng);
    check_many_rows(rng);
    check_walks(rng);
    check_epilogues(rng);
    check_depth(rng);
    check_nan(rng);
    check_batch_invariance(rng);
    check_calls(rng);
    check_experts_fp8(rng);
}
