/* The grouped GEMM on 4-bit weights: sizes, widths, epilogues and scales. How a case is made and judged stands in
 * gemm_w4_case.h. */
#include "tests/checkcuda/gemm_w4_case.h"

#include <math.h>

static const epmoe_dtype_t y_dtypes[] = {EPMOE_BF16, EPMOE_F32, EPMOE_F16};

static void check_shapes(testing_rng_t *rng)
{
    const int32_t experts[] = {5, 60, 128}, tokens[] = {0, 1, 3, 17, 63, 127, 257};
    check_begin("gemm_w4", "every format, E 5..128, T 0..257");
    for (int32_t i = 0; i < kW4Kinds * 7; i += check_step(5)) {
        const int32_t t = i / kW4Kinds, e = (i + t) % 3;
        w4_shape_t shape = {.tokens = tokens[t],
                            .top_k = t % 2 ? 4 : 2,
                            .experts = experts[e],
                            .n = e ? 112 : 336,
                            .k = e ? 200 : 456,
                            .dtype = EPMOE_BF16,
                            .y_dtype = y_dtypes[i % 3],
                            .activation = i % 2 ? EPMOE_ACTIVATION_SILU : EPMOE_ACTIVATION_NONE,
                            .route = (w4_route_t)(i / 3 % ROUTE_COUNT),
                            .indexed = t % 3 != 1,
                            .row_weights = t % 2};
        w4_take_kind(&shape, &w4_kinds[i % kW4Kinds]);
        if (!check_skips((int64_t)shape.tokens * shape.top_k * (shape.n + shape.k))) w4_run(rng, &shape);
    }
    check_end();
}

/* Rows an expert from few to more than any tile holds: every width of every cut. */
static void check_widths(testing_rng_t *rng)
{
    check_begin("gemm_w4", "1 to 600 rows an expert");
    for (int32_t rows = 1; rows < 600; rows += rows < 40 ? 3 : rows < 130 ? 9 : 29) {
        if (check_skips(rows * 400)) continue;
        w4_shape_t shape = {.tokens = rows,
                            .top_k = 1,
                            .experts = testing_range(rng, 1, 2),
                            .n = 8 * testing_range(rng, 10, 70),
                            .k = 8 * testing_range(rng, 1, 60),
                            .dtype = EPMOE_BF16,
                            .y_dtype = EPMOE_BF16,
                            .activation = testing_range(rng, 0, 1) ? EPMOE_ACTIVATION_SILU : EPMOE_ACTIVATION_NONE,
                            .indexed = testing_range(rng, 0, 1)};
        if (shape.activation == EPMOE_ACTIVATION_SILU) shape.n = (shape.n + 15) / 16 * 16;
        w4_take_kind(&shape, &w4_kinds[testing_range(rng, 0, kW4Kinds - 1)]);
        w4_run(rng, &shape);
    }
    check_end();
}

/* Every epilogue, N that no tile divides and, gated, f that no group of 8 does. */
static void check_epilogues(testing_rng_t *rng)
{
    check_begin("gemm_w4", "epilogues");
    for (int32_t i = 0; i < 6 * 2 * 2 * 3; i += check_step(7)) {
        const bool tall = testing_range(rng, 0, 3) == 0;
        w4_shape_t shape = {.tokens = testing_range(rng, 1, tall ? 330 : 70),
                            .top_k = testing_range(rng, 1, 3),
                            .experts = testing_range(rng, 1, 9),
                            .n = 2 * testing_range(rng, 1, 150),
                            .k = 8 * testing_range(rng, 1, tall ? 20 : 90),
                            .activation = (epmoe_activation_t)(i % 6),
                            .bias = i / 6 % 2,
                            .row_weights = i / 12 % 2,
                            .dtype = testing_range(rng, 0, 9) ? EPMOE_BF16 : EPMOE_F16,
                            .y_dtype = y_dtypes[i / 24],
                            .weight_on_input = testing_range(rng, 0, 3) == 0,
                            .indexed = testing_range(rng, 0, 1),
                            .x_sorted = testing_range(rng, 0, 2) == 0,
                            .y_sorted = testing_range(rng, 0, 2) == 0,
                            .route = (w4_route_t)testing_range(rng, 0, ROUTE_COUNT - 1),
                            .limit = testing_range(rng, 0, 1) ? 0.7f : 0.0f};
        if (testing_range(rng, 0, 1)) shape.n = (shape.n + 15) / 16 * 16;
        w4_take_kind(&shape, &w4_kinds[testing_range(rng, 0, kW4Kinds - 1)]);
        w4_run(rng, &shape);
    }
    check_end();
}

/* Short tiles, several a block: warpgroups drift apart by more than one, and outputs wait for their storer. */
static void check_short_tiles(testing_rng_t *rng)
{
    static const int32_t columns[] = {256, 768, 640}, tokens[] = {64, 256};
    check_begin("gemm_w4", "several short tiles a block");
    for (int32_t i = 0; i < 12; i += check_step(5)) {
        const bool gated = i % 4 == 3;
        w4_shape_t shape = {.tokens = tokens[i / 6],
                            .top_k = 8,
                            .experts = 128,
                            .n = 1024,
                            .k = columns[i % 3],
                            .dtype = EPMOE_BF16,
                            .y_dtype = EPMOE_BF16,
                            .activation = gated ? EPMOE_ACTIVATION_SILU : EPMOE_ACTIVATION_NONE,
                            .row_weights = !gated,
                            .indexed = true,
                            .x_sorted = !gated,
                            .y_sorted = gated};
        w4_take_kind(&shape, &w4_kinds[i % 2 ? kW4Kinds - 1 : 0]);
        if (!check_skips((int64_t)shape.tokens * shape.top_k * (shape.n + shape.k) / 8)) w4_run(rng, &shape);
    }
    check_end();
}

/* gpt-oss: both products, with biases and the clamped activation. */
static void check_gpt_oss(testing_rng_t *rng)
{
    const int32_t tokens[] = {1, 9, 70, 300};
    check_begin("gemm_w4", "mxfp4 as gpt-oss has it");
    for (int32_t i = 0; i < 8; i += check_step(3)) {
        const bool down = i % 2;
        w4_shape_t shape = {.tokens = tokens[i / 2],
                            .top_k = 4,
                            .experts = 32,
                            .n = down ? 360 : 720,
                            .k = 352,
                            .dtype = EPMOE_BF16,
                            .y_dtype = down ? EPMOE_F32 : EPMOE_BF16,
                            .activation = down ? EPMOE_ACTIVATION_NONE : EPMOE_ACTIVATION_SWIGLU_OAI,
                            .bias = true,
                            .row_weights = down,
                            .indexed = true,
                            .x_sorted = down,
                            .y_sorted = !down};
        w4_take_kind(&shape, &w4_kinds[kW4Kinds - 1]);
        if (!check_skips((int64_t)shape.tokens * shape.top_k * (shape.n + shape.k))) w4_run(rng, &shape);
    }
    check_end();
}

/* One code for all scales, since a larger one in the same row would hide what the smaller ones make; then all of them.
 * Of the small ones x is large, so that sums are no subnormals. */
static void check_scale_sizes(testing_rng_t *rng)
{
    static const uint8_t codes[] = {0, 1, 127, 128, 129, 200};
    static const int32_t rows[] = {3, 24, 90, 200, 300};
    enum { kCodes = sizeof codes };
    check_begin("gemm_w4", "mxfp4 with scales of all sizes");
    for (int32_t i = 0; i < (kCodes + 1) * 5; i++) {
        const int32_t which = i / 5;
        w4_shape_t shape = {.tokens = rows[i % 5],
                            .top_k = 1,
                            .experts = 2,
                            .n = 8 * testing_range(rng, 1, 60),
                            .k = 32 * testing_range(rng, 1, 14),
                            .dtype = EPMOE_BF16,
                            .y_dtype = i % 3 ? EPMOE_F32 : EPMOE_BF16,
                            .activation = EPMOE_ACTIVATION_NONE,
                            .indexed = i % 2,
                            .codes = which < kCodes ? codes + which : codes,
                            .num_codes = which < kCodes ? 1 : kCodes,
                            .x_size = which < 2 ? 4096.0f : 1.0f};
        w4_take_kind(&shape, &w4_kinds[kW4Kinds - 1]);
        if (!check_skips((int64_t)shape.tokens * (shape.n + shape.k))) w4_run(rng, &shape);
    }
    check_end();

    /* A scale of 255 makes its row NaN and leaves the others alone; one tile has it, the others are plain. */
    static const uint8_t with_nan[] = {120, 121, 122, 120, 121, 122, 120, 121, 122, 120, 121, 122, 120, 121, 122, 255};
    check_begin("gemm_w4", "mxfp4 with scales that are NaN");
    for (int32_t i = 0; i < 4; i++) {
        w4_shape_t shape = {.tokens = rows[i],
                            .top_k = 1,
                            .experts = 2,
                            .n = 200,
                            .k = 64,
                            .dtype = EPMOE_BF16,
                            .y_dtype = EPMOE_F32,
                            .activation = EPMOE_ACTIVATION_NONE,
                            .codes = with_nan,
                            .num_codes = sizeof with_nan};
        w4_take_kind(&shape, &w4_kinds[kW4Kinds - 1]);
        check_case_t c;
        w4_make(&c, rng, &shape);
        check_run(&c);
        w4_free(&c);
    }
    check_end();
}

/* W4 beside the bounds at which a loop takes another way, 2^-5 and 2^-1; the smallest are subnormal. One scale for all
 * weights, for the reason above, then all of them, so that the ways change from group to group. K has whole stages of
 * 256 columns and a part of one. */
static void check_w4_scale_sizes(testing_rng_t *rng)
{
    static const float scales[] = {0.0f,        0x1.6p-130f, 0x1p-126f, 0x1.fep-6f, 0x1p-5f,
                                   -0x1.02p-5f, 0x1.fep-2f,  0x1p-1f,   1.25f,      0x1.8p100f};
    static const float usual[] = {0x1.8p-7f, -0x1.24p-6f, 0x1.fep-6f, 0x1p-5f, 0x1.1p-4f, 0x1.fep-2f, 0x1p-1f};
    static const struct {
        int32_t group;
        epmoe_dtype_t dtype;
    } groups[] = {{128, EPMOE_BF16}, {128, EPMOE_F32}, {64, EPMOE_BF16}, {32, EPMOE_BF16}, {256, EPMOE_F32}};
    static const int32_t rows[] = {3, 14, 27, 60, 250};
    enum { kScales = sizeof scales / sizeof *scales, kUsual = sizeof usual / sizeof *usual, kGroups = 5 };
    check_begin("gemm_w4", "w4 with scales of all sizes");
    for (int32_t i = 0; i < (kScales + 2) * 2 * kGroups; i++) {
        const int32_t which = i / (2 * kGroups);
        w4_shape_t shape = {.tokens = rows[(i + which) % 5],
                            .top_k = 1,
                            .experts = 2,
                            .n = 8 * testing_range(rng, 1, 60),
                            .k = 256 * testing_range(rng, 1, 2) + 8 * testing_range(rng, 0, 31),
                            .format = EPMOE_FORMAT_W4,
                            .group = groups[i % kGroups].group,
                            .scales_dtype = groups[i % kGroups].dtype,
                            .zeros = i / kGroups % 2,
                            .dtype = EPMOE_BF16,
                            .y_dtype = EPMOE_F32,
                            .activation = EPMOE_ACTIVATION_NONE,
                            .indexed = i % 2,
                            .scales = which < kScales ? scales + which : usual,
                            .num_scales = which < kScales ? 1 : kUsual,
                            .x_size = which == 1 || which == 2 ? 4096.0f : 1.0f};
        if (!check_skips((int64_t)shape.tokens * (shape.n + shape.k))) w4_run(rng, &shape);
    }
    check_end();

    /* Scales that are NaN or infinite make their rows NaN and leave the others alone. */
    static const float with_nan[] = {0.01f, 0.02f, 0.03f, 0.01f, 0.02f, 0.03f, 0.04f, NAN, 0.01f, 0.02f, INFINITY};
    check_begin("gemm_w4", "w4 with scales that are NaN or infinite");
    for (int32_t i = 0; i < 8; i++) {
        w4_shape_t shape = {.tokens = rows[i % 4],
                            .top_k = 1,
                            .experts = 2,
                            .n = 200,
                            .k = 256,
                            .format = EPMOE_FORMAT_W4,
                            .group = i / 4 ? 256 : 128,
                            .scales_dtype = EPMOE_BF16,
                            .zeros = i % 2,
                            .dtype = EPMOE_BF16,
                            .y_dtype = EPMOE_F32,
                            .activation = EPMOE_ACTIVATION_NONE,
                            .scales = with_nan,
                            .num_scales = sizeof with_nan / sizeof *with_nan};
        check_case_t c;
        w4_make(&c, rng, &shape);
        check_run(&c);
        w4_free(&c);
    }
    check_end();
}

/* One expert without offsets, the rows counted on the device. */
static void check_dense(testing_rng_t *rng)
{
    check_begin("gemm_w4", "one expert without offsets");
    for (int32_t i = 0; i < kW4Kinds; i += check_step(5)) {
        w4_shape_t shape = {.tokens = testing_range(rng, 1, 200),
                            .top_k = 1,
                            .experts = 1,
                            .n = 2 * testing_range(rng, 1, 130),
                            .k = 8 * testing_range(rng, 1, 40),
                            .dtype = EPMOE_BF16,
                            .y_dtype = y_dtypes[i % 3],
                            .activation = i % 2 ? EPMOE_ACTIVATION_SILU : EPMOE_ACTIVATION_NONE,
                            .dense = true};
        w4_take_kind(&shape, &w4_kinds[i]);
        w4_run(rng, &shape);
    }
    check_end();
}

typedef struct refill_t {
    testing_rng_t *rng;
    const w4_shape_t *shape;
} refill_t;

static void refill(check_case_t *c, int32_t round, void *ctx)
{
    const refill_t *how = ctx;
    w4_shape_t shape = *how->shape;
    shape.route = (w4_route_t)(round % ROUTE_COUNT);
    const epmoe_grouped_gemm_args_t *args = (const epmoe_grouped_gemm_args_t *)c->args;
    testing_fill_normal(how->rng, check_find(c, "x")->host, shape.dtype, (int64_t)shape.tokens * shape.k, 1.0f);
    w4_fill_rows(how->rng, c, &shape, args->max_rows);
}

static void check_graphs(testing_rng_t *rng)
{
    check_begin("gemm_w4", "graphs");
    for (int32_t i = 0; i < 3; i++) {
        w4_shape_t shape = {.tokens = 33 + 200 * i,
                            .top_k = 3,
                            .experts = 8,
                            .n = 144,
                            .k = 96,
                            .dtype = EPMOE_BF16,
                            .y_dtype = EPMOE_BF16,
                            .activation = EPMOE_ACTIVATION_SWIGLU_OAI,
                            .bias = true,
                            .row_weights = true,
                            .indexed = true};
        w4_take_kind(&shape, &w4_kinds[i == 0 ? kW4Kinds - 1 : i]);
        check_case_t c;
        w4_make(&c, rng, &shape);
        refill_t how = {rng, &shape};
        check_graph(&c, refill, &how);
        w4_free(&c);
    }
    check_end();
}

void check_gemm_w4(testing_rng_t *rng)
{
    check_shapes(rng);
    check_widths(rng);
    check_short_tiles(rng);
    check_epilogues(rng);
    check_gpt_oss(rng);
    check_scale_sizes(rng);
    check_w4_scale_sizes(rng);
    check_dense(rng);
    check_graphs(rng);
}
