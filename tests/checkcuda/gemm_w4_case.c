#include "tests/checkcuda/gemm_w4_case.h"

#include "base/dtype.h"
#include "kernels/grouped_gemm.h"
#include "kernels/quant_formats.h"
#include "kernels/quant_tiles.h"

#include <math.h>
#include <stdlib.h>

const w4_kind_t w4_kinds[] = {
    {EPMOE_FORMAT_W4, 128, EPMOE_BF16, false, false}, {EPMOE_FORMAT_W4, 128, EPMOE_F16, true, false},
    {EPMOE_FORMAT_W4, 64, EPMOE_F32, false, false},   {EPMOE_FORMAT_W4, 64, EPMOE_BF16, true, true},
    {EPMOE_FORMAT_W4, 32, EPMOE_F16, false, false},   {EPMOE_FORMAT_W4, 32, EPMOE_BF16, true, false},
    {EPMOE_FORMAT_W4, 0, EPMOE_BF16, false, false},   {EPMOE_FORMAT_W4, 0, EPMOE_F16, true, false},
    {EPMOE_FORMAT_W4, 128, EPMOE_BF16, false, true},  {EPMOE_FORMAT_W4, 192, EPMOE_F8_E8M0, true, false},
    {EPMOE_FORMAT_W4, 16, EPMOE_BF16, true, false},   {EPMOE_FORMAT_MXFP4, 32, EPMOE_F8_E8M0, false, false},
};

void w4_take_kind(w4_shape_t *shape, const w4_kind_t *kind)
{
    shape->format = kind->format;
    shape->scales_dtype = kind->scales_dtype;
    shape->zeros = kind->zeros;
    shape->order = kind->order;
    if (kind->format == EPMOE_FORMAT_MXFP4) shape->k = (shape->k + 31) / 32 * 32;
    shape->group = kind->group ? kind->group : shape->k;
}

/* Of the case that runs: rows in the order of the outputs, gate and up in turns. */
static float *kernel_weights, *exact_weights;

static epmoe_status_t run(const void *args, epmoe_stream_t stream) { return epmoe_grouped_gemm(args, stream); }

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

static epmoe_status_t reference_with(const epmoe_grouped_gemm_args_t *args, const float *weights)
{
    enum { kRows = 8 };
    epmoe_grouped_gemm_args_t checked, plain = *args;
    plain.weight = (epmoe_weight_t)EPMOE_WEIGHT_INIT;
    plain.weight.format = EPMOE_FORMAT_F32;
    plain.weight.data = weights;
    plain.layout = EPMOE_LAYOUT_INTERLEAVED;
    EPMOEI_CHECK(epmoei_grouped_gemm_check(&plain, &checked));
    const int32_t all_rows[] = {0, checked.num_rows_dev ? *checked.num_rows_dev : checked.max_rows};
    if (!checked.expert_offsets) checked.expert_offsets = all_rows;
#pragma omp parallel for schedule(dynamic)
    for (int32_t first = 0; first < checked.max_rows; first += kRows) reference_rows(&checked, first, first + kRows);
    return EPMOE_OK;
}

static epmoe_status_t reference(const void *args) { return reference_with(args, kernel_weights); }

static const check_op_t op = {"gemm_w4", sizeof(epmoe_grouped_gemm_args_t), run, reference};

static bool on_wgmma(const w4_shape_t *shape)
{
    return epmoei_cuda_tier() >= 90 && shape->dtype == EPMOE_BF16 &&
           (shape->group % 32 == 0 || shape->group >= shape->k);
}

static float bf16(float value) { return epmoei_bf16_to_f32(epmoei_f32_to_bf16(value)); }

/* One expert's packed matrix, gate rows first, as the CPU has it. */
typedef struct packed_t {
    epmoei_quant_t quant;
    uint8_t *data, *scales, *zeros;
} packed_t;

static packed_t draw_expert(testing_rng_t *rng, const w4_shape_t *shape)
{
    const int64_t n = shape->n, k = shape->k;
    const epmoei_quant_sizes_t sizes = epmoei_quant_sizes(shape->format, n, k, shape->group, 0);
    packed_t p = {.data = malloc((size_t)sizes.data_bytes),
                  .scales = malloc((size_t)sizes.scales * 4),
                  .zeros = shape->zeros ? malloc((size_t)sizes.zeros_bytes) : NULL};
    for (int64_t i = 0; i < sizes.data_bytes; i++) p.data[i] = (uint8_t)testing_next(rng);
    for (int64_t i = 0; i < sizes.scales; i++) {
        if (shape->codes)
            p.scales[i] = shape->codes[testing_range(rng, 0, shape->num_codes - 1)];
        else if (shape->scales)
            epmoei_store(p.scales, shape->scales_dtype, i, shape->scales[testing_range(rng, 0, shape->num_scales - 1)]);
        else if (shape->scales_dtype == EPMOE_F8_E8M0)
            p.scales[i] = (uint8_t)testing_range(rng, 119, 124);
        else
            epmoei_store(p.scales, shape->scales_dtype, i, testing_uniform(rng, 0.1f, 0.4f) / sqrtf((float)k));
    }
    for (int64_t i = 0; shape->zeros && i < sizes.zeros_bytes; i++) p.zeros[i] = (uint8_t)testing_range(rng, 0, 15);
    p.quant = (epmoei_quant_t){.format = shape->format,
                               .scales_dtype = shape->scales_dtype,
                               .group = shape->group,
                               .rows = n,
                               .cols = k,
                               .stored_rows = n,
                               .row_step = 1,
                               .data = p.data,
                               .scales = p.scales,
                               .zeros = p.zeros};
    return p;
}

/* Row r of the outputs' order, column c as stored. */
static void widen_expert(const w4_shape_t *shape, const packed_t *p, const int32_t *order, float *rounded, float *exact)
{
    const bool gated = shape->activation < EPMOE_ACTIVATION_NONE, wgmma = on_wgmma(shape);
    for (int64_t r = 0; r < shape->n; r++)
        for (int64_t c = 0; c < shape->k; c++) {
            const int64_t row = gated ? r % 2 * (shape->n / 2) + r / 2 : r, g = c / shape->group;
            const int64_t to = r * shape->k + (order ? order[c] : c);
            const float scale = epmoei_quant_scale(&p->quant, epmoei_quant_scale_at(&p->quant, row, g));
            exact[to] = rounded[to] = epmoei_quant_at(&p->quant, row, c);
            if (wgmma && shape->format == EPMOE_FORMAT_W4) {
                const int32_t value =
                    (int32_t)epmoei_quant_code(&p->quant, row, c) - epmoei_quant_zero(&p->quant, row, g);
                rounded[to] = bf16((float)value * bf16(scale));
            }
        }
}

static void fill_weights(testing_rng_t *rng, check_case_t *c, const w4_shape_t *shape)
{
    const int64_t k = shape->k, elements = (int64_t)shape->n * k;
    const epmoei_quant_tiles_t tiles = epmoei_quant_tiles(shape->format, shape->scales_dtype, shape->n, k, shape->group,
                                                          shape->activation < EPMOE_ACTIVATION_NONE);
    char *data =
        CHECK_ADD(c, epmoe_grouped_gemm_args_t, weight.data, CHECK_IN, EPMOE_U8, shape->experts, tiles.data_bytes, 16);
    char *scales = CHECK_ADD(c, epmoe_grouped_gemm_args_t, weight.scales, CHECK_IN, shape->scales_dtype, shape->experts,
                             tiles.scales, 16);
    uint8_t *zeros = NULL;
    int32_t *order = NULL;
    if (shape->zeros)
        zeros = CHECK_ADD(c, epmoe_grouped_gemm_args_t, weight.zeros, CHECK_IN, EPMOE_U8, shape->experts,
                          tiles.zeros_bytes, 16);
    if (shape->order)
        order = CHECK_ADD(c, epmoe_grouped_gemm_args_t, weight.g_idx, CHECK_IN, EPMOE_I32, shape->experts, k, 16);
    kernel_weights = malloc(sizeof(float) * (size_t)(shape->experts * elements));
    exact_weights = malloc(sizeof(float) * (size_t)(shape->experts * elements));
    for (int64_t e = 0; e < shape->experts; e++) {
        packed_t p = draw_expert(rng, shape);
        const epmoei_tile_arrays_t to = {data + e * tiles.data_bytes, scales + e * tiles.scales_bytes,
                                         zeros ? zeros + e * tiles.zeros_bytes : NULL};
        epmoei_tiles_pack(&tiles, &p.quant, &to);
        int32_t *own = order ? order + e * k : NULL;
        for (int32_t i = 0; own && i < k; i++) {
            const int32_t j = testing_range(rng, 0, i);
            own[i] = own[j], own[j] = i;
        }
        widen_expert(shape, &p, own, kernel_weights + e * elements, exact_weights + e * elements);
        free(p.data), free(p.scales), free(p.zeros);
    }
}

/* As check_grouped_gemm.c's: about one slot in nine goes nowhere, with an index there is padding between. */
void w4_fill_rows(testing_rng_t *rng, check_case_t *c, const w4_shape_t *shape, int32_t max_rows)
{
    if (shape->dense) {
        *(int32_t *)(void *)check_find(c, "num_rows_dev")->host = testing_range(rng, max_rows / 2, max_rows);
        return;
    }
    int32_t *offsets = (int32_t *)(void *)check_find(c, "expert_offsets")->host;
    int32_t *index = shape->indexed && max_rows ? (int32_t *)(void *)check_find(c, "row_index")->host : NULL;
    int32_t slots = shape->tokens * shape->top_k, rows = 0, one = testing_range(rng, 0, shape->experts - 1);
    int32_t *order = malloc(sizeof(int32_t) * (size_t)(slots + 1)),
            *expert = malloc(sizeof(int32_t) * (size_t)(slots + 1));
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

void w4_make(check_case_t *c, testing_rng_t *rng, const w4_shape_t *shape)
{
    static const char *const routes[] = {"uniform", "one expert", "few experts"};
    check_case(
        c, &op,
        "T %d k %d E %d N %d K %d %s g %d scales %s zeros %d order %d x %s y %s act %d limit %g %s bias %d weights "
        "%d on input %d index %d sorted %d%d",
        shape->tokens, shape->top_k, shape->experts, shape->n, shape->k, epmoe_format_string(shape->format),
        shape->group, epmoe_dtype_string(shape->scales_dtype), shape->zeros, shape->order,
        epmoe_dtype_string(shape->dtype), epmoe_dtype_string(shape->y_dtype), (int)shape->activation,
        (double)shape->limit, routes[shape->route], shape->bias, shape->row_weights, shape->weight_on_input,
        shape->indexed, shape->x_sorted, shape->y_sorted);
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
    args.weight.format = shape->format;
    args.weight.group_size = shape->group;
    args.weight.scales_dtype = shape->scales_dtype;
    args.weight.storage = EPMOE_STORAGE_TILES;
    args.layout = EPMOE_LAYOUT_PACKED;
    args.activation = shape->activation;
    args.limit = shape->limit;
    args.weight_on_input = shape->weight_on_input;
    args.x_sorted = shape->x_sorted;
    args.y_sorted = shape->y_sorted;
    args.y_dtype = shape->y_dtype;
    /* The query wants to know whether there is an order, not which. */
    int32_t some_order[4] __attribute__((aligned(16))) = {0};
    args.weight.g_idx = shape->order ? some_order : NULL;
    if (epmoe_grouped_gemm_workspace_size(&args, &args.workspace_bytes) != EPMOE_OK)
        check_fail(c, "%s", epmoe_last_error());
    args.weight.g_idx = NULL;
    memcpy(c->args, &args, sizeof args);

    int64_t experts = shape->experts, n = shape->n, k = shape->k;
    int64_t n_out = shape->activation >= EPMOE_ACTIVATION_NONE ? n : n / 2;
    if (shape->dense) {
        CHECK_ADD(c, epmoe_grouped_gemm_args_t, num_rows_dev, CHECK_IN, EPMOE_I32, 1, 1, 4);
    } else {
        CHECK_ADD(c, epmoe_grouped_gemm_args_t, expert_offsets, CHECK_IN, EPMOE_I32, 1, experts + 1, 4);
        int32_t *index = NULL;
        if (shape->indexed)
            index = CHECK_ADD(c, epmoe_grouped_gemm_args_t, row_index, CHECK_IN, EPMOE_I32, 1, max_rows, 4);
        for (int32_t i = 0; index && i < max_rows; i++) index[i] = slots + i;
    }
    int64_t x_rows = shape->x_sorted ? max_rows : shape->tokens, y_rows = shape->y_sorted ? max_rows : slots;
    void *x = CHECK_ADD(c, epmoe_grouped_gemm_args_t, x, CHECK_IN, shape->dtype, x_rows, k, 16);
    if (x) check_fill_normal(rng, x, shape->dtype, x_rows * k, shape->x_size > 0 ? shape->x_size : 1.0f);
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
    fill_weights(rng, c, shape);
    w4_fill_rows(rng, c, shape, max_rows);
}

/* |y - exact| / |exact| over what was written. */
static double distance(check_case_t *c)
{
    const check_field_t *y = check_find(c, "y");
    epmoe_grouped_gemm_args_t args;
    memcpy(&args, c->args, sizeof args);
    for (int32_t i = 0; i < c->num_fields; i++)
        if (c->fields[i].kind == CHECK_IN)
            memcpy((char *)&args + c->fields[i].offset, &c->fields[i].host, sizeof(void *));
    const int64_t count = y->rows * y->cols;
    float *exact = malloc(sizeof(float) * (size_t)count);
    for (int64_t i = 0; i < count; i++) exact[i] = NAN;
    args.backend = EPMOE_BACKEND_CPU;
    args.y = exact;
    args.y_dtype = EPMOE_F32;
    args.workspace = NULL;
    double squares = 0, errors = 0;
    if (reference_with(&args, exact_weights) != EPMOE_OK) check_fail(c, "%s", epmoe_last_error());
    for (int64_t i = 0; i < count; i++) {
        if (isnan(exact[i])) continue;
        const double error = (double)epmoei_load(y->got, y->dtype, i) - (double)exact[i];
        squares += (double)exact[i] * (double)exact[i], errors += error * error;
    }
    free(exact);
    return squares > 0 ? sqrt(errors / squares) : 0;
}

void w4_free(check_case_t *c)
{
    check_free(c);
    free(kernel_weights), free(exact_weights);
}

void w4_run(testing_rng_t *rng, const w4_shape_t *shape)
{
    /* Scales, weights and outputs in bf16 are off by a thousandth each, in the root mean square, which an activation
     * may double; and among few outputs all may happen to be small. */
    const double most = 6e-3;
    const int64_t few = 256;
    check_case_t c;
    w4_make(&c, rng, shape);
    const check_field_t *y = check_find(&c, "y");
    if (check_run(&c) && y->rows * y->cols >= few) {
        const double away = distance(&c);
        if (!(away <= most)) check_fail(&c, "relative error %.3g to exact weights: at most %g", away, most);
    }
    w4_free(&c);
}
