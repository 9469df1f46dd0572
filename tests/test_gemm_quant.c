/* The grouped GEMM on quantised weights against fp64 sums over the dequantised values, whatever the format, the number
 * of rows and the tier; and packed weights against what they were packed from. */
#include "base/fp8.h"
#include "kernels/grouped_gemm.h"
#include "kernels/grouped_gemm_cpu_rows.h"
#include "kernels/quant_pack.h"
#include "kernels/random_quant.h"
#include "tests/quant_case.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>

typedef struct case_t {
    epmoe_format_t format;
    int32_t n, k, group;
    quant_index_t index;
    bool gated;
    epmoe_layout_t layout;
    bool fp8_activations;
    int32_t group_rows;
} case_t;

enum { E = 3 };

static const case_t cases[] = {
    {EPMOE_FORMAT_FP8_BLOCK, 140, 200, 128, QUANT_INDEX_NONE, false, EPMOE_LAYOUT_GATE_FIRST, false, 0},
    {EPMOE_FORMAT_FP8_BLOCK, 84, 1100, 0, QUANT_INDEX_NONE, true, EPMOE_LAYOUT_PACKED, false, 0},
    {EPMOE_FORMAT_FP8_BLOCK, 384, 130, 0, QUANT_INDEX_NONE, true, EPMOE_LAYOUT_PACKED, false, 0},
    {EPMOE_FORMAT_FP8_BLOCK, 384, 130, 0, QUANT_INDEX_NONE, true, EPMOE_LAYOUT_GATE_FIRST, false, 0},
    {EPMOE_FORMAT_FP8_BLOCK, 60, 300, 32, QUANT_INDEX_NONE, true, EPMOE_LAYOUT_INTERLEAVED, false, 0},
    {EPMOE_FORMAT_FP8_BLOCK, 70, 1300, 0, QUANT_INDEX_NONE, true, EPMOE_LAYOUT_GATE_FIRST, true, 0},
    {EPMOE_FORMAT_FP8_BLOCK, 33, 129, 0, QUANT_INDEX_NONE, false, EPMOE_LAYOUT_GATE_FIRST, true, 0},
    /* A scale for each row, for all of them, and blocks that are not square. */
    {EPMOE_FORMAT_FP8_BLOCK, 70, 300, -1, QUANT_INDEX_NONE, true, EPMOE_LAYOUT_GATE_FIRST, false, 1},
    {EPMOE_FORMAT_FP8_BLOCK, 70, 304, -1, QUANT_INDEX_NONE, true, EPMOE_LAYOUT_INTERLEAVED, true, 1},
    {EPMOE_FORMAT_FP8_BLOCK, 70, 304, -1, QUANT_INDEX_NONE, true, EPMOE_LAYOUT_PACKED, false, 1},
    {EPMOE_FORMAT_FP8_BLOCK, 33, 144, -1, QUANT_INDEX_NONE, false, EPMOE_LAYOUT_GATE_FIRST, false, -1},
    {EPMOE_FORMAT_FP8_BLOCK, 38, 144, -1, QUANT_INDEX_NONE, true, EPMOE_LAYOUT_PACKED, false, -1},
    {EPMOE_FORMAT_FP8_BLOCK, 84, 400, 64, QUANT_INDEX_NONE, true, EPMOE_LAYOUT_PACKED, false, 5},
    {EPMOE_FORMAT_GPTQ, 72, 192, 128, QUANT_INDEX_NONE, false, EPMOE_LAYOUT_GATE_FIRST, false, 0},
    {EPMOE_FORMAT_GPTQ, 34, 1200, 64, QUANT_INDEX_EVEN, true, EPMOE_LAYOUT_GATE_FIRST, false, 0},
    {EPMOE_FORMAT_GPTQ, 34, 150, 32, QUANT_INDEX_ANY, true, EPMOE_LAYOUT_INTERLEAVED, false, 0},
    {EPMOE_FORMAT_AWQ, 48, 260, 64, QUANT_INDEX_NONE, true, EPMOE_LAYOUT_GATE_FIRST, false, 0},
    {EPMOE_FORMAT_CT_W4, 66, 270, -1, QUANT_INDEX_NONE, false, EPMOE_LAYOUT_GATE_FIRST, false, 0},
    {EPMOE_FORMAT_CT_W4, 34, 300, 32, QUANT_INDEX_ANY, true, EPMOE_LAYOUT_PACKED, false, 0},
    {EPMOE_FORMAT_MXFP4, 74, 1120, 0, QUANT_INDEX_NONE, true, EPMOE_LAYOUT_INTERLEAVED, false, 0},
    {EPMOE_FORMAT_MXFP4, 74, 64, 0, QUANT_INDEX_NONE, false, EPMOE_LAYOUT_GATE_FIRST, false, 0},
    {EPMOE_FORMAT_W4, 80, 1300, 128, QUANT_INDEX_NONE, true, EPMOE_LAYOUT_PACKED, false, 0},
    {EPMOE_FORMAT_W4, 80, 1090, 64, QUANT_INDEX_EVEN, true, EPMOE_LAYOUT_PACKED, false, 0},
    {EPMOE_FORMAT_W4, 37, 205, 24, QUANT_INDEX_EVEN, false, EPMOE_LAYOUT_PACKED, false, 0},
    {EPMOE_FORMAT_W4, 37, 100, 32, QUANT_INDEX_NONE, false, EPMOE_LAYOUT_GATE_FIRST, false, 0},
    /* Of widths that are widened in registers. */
    {EPMOE_FORMAT_FP8_BLOCK, 140, 1152, 0, QUANT_INDEX_NONE, true, EPMOE_LAYOUT_PACKED, false, 0},
    {EPMOE_FORMAT_FP8_BLOCK, 19, 1056, 96, QUANT_INDEX_NONE, false, EPMOE_LAYOUT_GATE_FIRST, true, 0},
    {EPMOE_FORMAT_FP8_BLOCK, 38, 2064, -1, QUANT_INDEX_NONE, true, EPMOE_LAYOUT_INTERLEAVED, false, 0},
    {EPMOE_FORMAT_CT_W4, 34, 272, 64, QUANT_INDEX_NONE, true, EPMOE_LAYOUT_GATE_FIRST, false, 0},
    {EPMOE_FORMAT_W4, 80, 1328, 128, QUANT_INDEX_NONE, true, EPMOE_LAYOUT_PACKED, false, 0},
    {EPMOE_FORMAT_W4, 66, 1104, 16, QUANT_INDEX_EVEN, true, EPMOE_LAYOUT_PACKED, false, 0},
    {EPMOE_FORMAT_W4, 21, 2096, -1, QUANT_INDEX_EVEN, false, EPMOE_LAYOUT_PACKED, false, 0},
};
#define NUM_CASES (sizeof cases / sizeof cases[0])

/* x as the product sees it. */
static double x_at(const case_t *c, const float *x, int64_t k)
{
    if (!c->fp8_activations) return (double)x[k];
    int64_t first = k / 128 * 128, end = first + 128 < c->k ? first + 128 : c->k;
    double amax = 0;
    for (int64_t i = first; i < end; i++) amax = fmax(amax, fabs((double)x[i]));
    float scale = (float)amax / 448;
    return (double)epmoei_e4m3_to_f32(epmoei_f32_to_e4m3(x[k] / scale)) * (double)scale;
}

static double dot(const case_t *c, const epmoei_quant_t *quant, int64_t row, bool up, const float *x)
{
    double sum = 0;
    bool ordered = c->format == EPMOE_FORMAT_W4 && quant->g_idx;
    for (int64_t k = 0; k < c->k; k++)
        sum += (double)epmoei_quant_at(quant, row, k) *
               x_at(c, x, ordered ? epmoei_quant_index(quant, up ? c->k + k : k) : k);
    return sum;
}

/* [rows, n_out] for rows[e] rows of each expert. */
static void reference(const case_t *c, const epmoe_weight_t *weight, const int32_t *offsets, const float *x,
                      double *ref)
{
    int64_t n_out = c->gated ? c->n / 2 : c->n;
    bool interleaved = c->layout == EPMOE_LAYOUT_INTERLEAVED;
    epmoe_weight_t filled = *weight;
    cr_assert_eq(epmoei_quant_check_weight(&filled, "weight", c->k), EPMOE_OK);
    int64_t half = c->gated && (c->format == EPMOE_FORMAT_W4 || c->layout == EPMOE_LAYOUT_PACKED) ? n_out : 0;
    for (int32_t e = 0; e < E; e++) {
        epmoei_quant_t quant = epmoei_quant_of_weight(&filled, c->n, c->k, e, half);
        for (int32_t r = offsets[e]; r < offsets[e + 1]; r++)
            for (int64_t i = 0; i < n_out; i++) {
                const float *row = x + (int64_t)r * c->k;
                double value = dot(c, &quant, interleaved ? 2 * i : i, false, row);
                if (c->gated) {
                    double up = dot(c, &quant, interleaved ? 2 * i + 1 : n_out + i, true, row);
                    value = value / (1 + exp(-value)) * up;
                }
                ref[r * n_out + i] = value;
            }
    }
}

static void run_case(const case_t *c, testing_rng_t *rng, const int32_t *counts, bool batch_invariant)
{
    int32_t offsets[E + 1] = {0};
    for (int e = 0; e < E; e++) offsets[e + 1] = offsets[e] + counts[e];
    int64_t rows = offsets[E], n_out = c->gated ? c->n / 2 : c->n;
    int64_t half = c->gated && (c->format == EPMOE_FORMAT_W4 || c->layout == EPMOE_LAYOUT_PACKED) ? n_out : 0;
    quant_case_t made = quant_case_make_rows(rng, c->format, E, c->n, c->k, c->group, c->group_rows, c->index, half);
    float *x = testing_buffer(rows * c->k * 4, 4), *y = testing_buffer(rows * n_out * 4, 4);
    double *ref = malloc((size_t)(rows * n_out) * sizeof *ref);
    testing_fill_normal(rng, x, EPMOE_F32, rows * c->k, 0.05f / sqrtf((float)c->k));
    reference(c, &made.weight, offsets, x, ref);

    epmoe_grouped_gemm_args_t args = EPMOE_GROUPED_GEMM_ARGS_INIT;
    args.backend = EPMOE_BACKEND_CPU;
    args.num_experts = E, args.n = c->n, args.k = c->k, args.max_rows = (int32_t)rows;
    args.expert_offsets = offsets;
    args.x_dtype = args.y_dtype = EPMOE_F32;
    args.x = x, args.y = y;
    args.weight = made.weight;
    args.layout = c->layout;
    args.activation = c->gated ? EPMOE_ACTIVATION_SILU : EPMOE_ACTIVATION_NONE;
    args.batch_invariant = batch_invariant;
    args.fp8_activations = c->fp8_activations;
    cr_assert_eq(epmoe_grouped_gemm_workspace_size(&args, &args.workspace_bytes), EPMOE_OK, "%s", epmoe_last_error());
    args.workspace = testing_buffer(args.workspace_bytes + 8, 0);
    cr_assert_eq(epmoe_grouped_gemm(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    double error = testing_row_error(y, EPMOE_F32, ref, rows, n_out);
    /* The reference adds one product after the other. */
    cr_assert(error <= 1e-5 + 0x1p-26 * c->k, "case %d (%s, n %d, k %d, rows %d): error %g", (int)(c - cases),
              epmoe_format_string(c->format), c->n, c->k, (int)rows, error);
    cr_assert(testing_guards_intact(y) && testing_guards_intact(args.workspace));

    /* The same bits again, from a workspace that held something else. */
    float *again = malloc((size_t)(rows * n_out) * 4);
    args.y = again;
    cr_assert_eq(epmoe_grouped_gemm(&args, NULL), EPMOE_OK);
    cr_assert_eq(memcmp(again, y, (size_t)(rows * n_out) * 4), 0);
    free(again), free(ref);
    testing_buffer_free(args.workspace), testing_buffer_free(x), testing_buffer_free(y);
    quant_case_free(&made);
}

Test(gemm_quant, few_rows)
{
    testing_rng_t rng = testing_rng(testing_seed());
    for (size_t i = 0; i < NUM_CASES; i++) {
        run_case(&cases[i], &rng, (const int32_t[]){1, 0, 2}, false);
        run_case(&cases[i], &rng, (const int32_t[]){3, 7, 0}, i % 2);
    }
}

Test(gemm_quant, many_rows)
{
    testing_rng_t rng = testing_rng(testing_seed());
    for (size_t i = 0; i < NUM_CASES; i++) run_case(&cases[i], &rng, (const int32_t[]){70, 0, 5}, i % 3 == 0);
}

/* A row's bits do not depend on the others. */
Test(gemm_quant, batch_invariant)
{
    testing_rng_t rng = testing_rng(testing_seed());
    for (size_t i = 0; i < NUM_CASES; i++) {
        const case_t *c = &cases[i];
        int64_t n_out = c->gated ? c->n / 2 : c->n;
        int64_t half = c->gated && (c->format == EPMOE_FORMAT_W4 || c->layout == EPMOE_LAYOUT_PACKED) ? n_out : 0;
        quant_case_t made = quant_case_make(&rng, c->format, 1, c->n, c->k, c->group, c->index, half);
        enum { ROWS = 67 };
        float *x = malloc(sizeof(float) * ROWS * (size_t)c->k), *y = malloc(sizeof(float) * ROWS * (size_t)n_out);
        float *one = malloc(sizeof(float) * (size_t)n_out);
        testing_fill_normal(&rng, x, EPMOE_F32, ROWS * (int64_t)c->k, 0.01f);
        epmoe_grouped_gemm_args_t args = EPMOE_GROUPED_GEMM_ARGS_INIT;
        args.backend = EPMOE_BACKEND_CPU;
        args.num_experts = 1, args.n = c->n, args.k = c->k, args.max_rows = ROWS;
        args.x_dtype = args.y_dtype = EPMOE_F32;
        args.x = x, args.y = y, args.weight = made.weight, args.layout = c->layout;
        args.activation = c->gated ? EPMOE_ACTIVATION_SILU : EPMOE_ACTIVATION_NONE;
        args.batch_invariant = 1, args.fp8_activations = c->fp8_activations;
        cr_assert_eq(epmoe_grouped_gemm_workspace_size(&args, &args.workspace_bytes), EPMOE_OK);
        args.workspace = malloc((size_t)args.workspace_bytes + 1);
        cr_assert_eq(epmoe_grouped_gemm(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
        args.max_rows = 1, args.num_slots = 1;
        args.y = one;
        for (int r = 0; r < ROWS; r += 11) {
            args.x = x + (int64_t)r * c->k;
            cr_assert_eq(epmoe_grouped_gemm(&args, NULL), EPMOE_OK);
            cr_assert_eq(memcmp(one, y + r * n_out, (size_t)n_out * 4), 0, "case %d row %d", (int)i, r);
        }
        free(x), free(y), free(one), free(args.workspace);
        quant_case_free(&made);
    }
}

/* Every instruction set that this processor has, all numbers of x rows, and a NaN that stays in its weight row. */
Test(gemm_quant, rows_of_every_instruction_set)
{
    const epmoei_rows_table_t *tables[3] = {&epmoei_rows_generic};
    int num_tables = 1;
#if defined(__x86_64__)
    if (epmoei_cpu_tier() >= EPMOEI_CPU_AVX2) tables[num_tables++] = &epmoei_rows_avx2;
    if (epmoei_cpu_tier() >= EPMOEI_CPU_AVX512) tables[num_tables++] = &epmoei_rows_avx512;
#endif
    enum { N = 7, K = 288, M = 19, GROUP = 96, FIRST = 48, DEPTH = K - FIRST };
    static const epmoe_format_t formats[] = {EPMOE_FORMAT_FP8_BLOCK, EPMOE_FORMAT_W4, EPMOE_FORMAT_MXFP4};
    testing_rng_t rng = testing_rng(testing_seed());
    for (int f = 0; f < 3; f++) {
        quant_case_t made = quant_case_make(&rng, formats[f], 1, N, K, GROUP, QUANT_INDEX_NONE, 0);
        epmoe_weight_t filled = made.weight;
        cr_assert_eq(epmoei_quant_check_weight(&filled, "weight", K), EPMOE_OK);
        if (f == 0) ((uint8_t *)made.data)[4 * K + 100] = 0x7F, ((uint8_t *)made.data)[5 * K + 3] = 0xFF;
        epmoei_quant_t quant = epmoei_quant_of_weight(&filled, N, K, 0, 0);
        int32_t group = quant.group, bits = f == 0 ? 8 : 4;
        float x[M][DEPTH], scales[N][16], zeros[N][16], out[N][M];
        const float *x_rows[M];
        epmoei_coded_row_t rows[N];
        testing_fill_normal(&rng, x, EPMOE_F32, M * DEPTH, 1);
        for (int m = 0; m < M; m++) x_rows[m] = x[m];
        for (int n = 0; n < N; n++) {
            for (int g = FIRST / group; g * group < K; g++) {
                scales[n][g - FIRST / group] = epmoei_quant_scale(&quant, epmoei_quant_scale_at(&quant, n, g));
                zeros[n][g - FIRST / group] = f == 1 ? (float)epmoei_quant_zero(&quant, n, g) : NAN;
            }
            rows[n] = (epmoei_coded_row_t){(const char *)made.data + (n * K + FIRST) * bits / 8, scales[n], zeros[n]};
        }
        for (int t = 0; t < num_tables; t++)
            for (int m = 1; m <= M; m++) {
                epmoei_coded_rows_fn fn = f == 0 ? tables[t]->e4m3 : f == 1 ? tables[t]->w4 : tables[t]->e2m1;
                memset(out, 0xFF, sizeof out);
                fn(rows, N, x_rows, m, FIRST, DEPTH, group, out[0], M);
                for (int n = 0; n < N; n++)
                    for (int i = 0; i < M; i++) {
                        double sum = 0, size = 0;
                        for (int c = 0; c < DEPTH; c++) {
                            double product = (double)epmoei_quant_at(&quant, n, FIRST + c) * (double)x[i][c];
                            sum += product, size += fabs(product);
                        }
                        if (i >= m)
                            cr_assert_eq(epmoei_f32_bits(out[n][i]), 0xFFFFFFFFu);
                        else if (f == 0 && n == 4) /* the other NaN is before the piece */
                            cr_assert(isnan(out[n][i]) && isnan(sum));
                        else
                            cr_assert(fabs((double)out[n][i] - sum) <= 1e-5 * size,
                                      "format %d table %d: %g, expected %g", f, t, (double)out[n][i], sum);
                    }
            }
        quant_case_free(&made);
    }
}

/* ----------------------------------------------------------------------------------------------------------- repack */

/* Gate and up of one expert go into one packed [2f,k], and every value comes back bit for bit. */
static void pack_and_compare(const quant_case_t *gate, const quant_case_t *up, int64_t f, int64_t k, bool expect_order)
{
    const quant_case_t *const halves[] = {gate, up};
    epmoei_quant_t source[2];
    epmoei_pack_shape_t shape[2];
    for (int h = 0; h < 2; h++) {
        epmoe_weight_t filled = halves[h]->weight;
        cr_assert_eq(epmoei_quant_check_weight(&filled, "weight", k), EPMOE_OK);
        source[h] = epmoei_quant_of_weight(&filled, f, k, 0, 0);
        shape[h] = epmoei_pack_shape(&source[h]);
    }
    epmoei_pack_shape_t merged = epmoei_pack_merge(&shape[0], &shape[1]);
    cr_assert(merged.format != EPMOE_FORMAT_NONE && merged.order == expect_order);
    bool fp8 = merged.format == EPMOE_FORMAT_FP8_BLOCK;
    epmoei_quant_sizes_t sizes = epmoei_quant_sizes(merged.format, 2 * f, k, merged.group, fp8 ? f : 0);
    epmoe_weight_t packed = EPMOE_WEIGHT_INIT;
    void *data = testing_buffer(sizes.data_bytes, 4), *zeros = testing_buffer(sizes.zeros_bytes + 1, 1);
    void *scales = testing_buffer(sizes.scales * epmoe_dtype_size(merged.scales_dtype), 4);
    int32_t *order = testing_buffer(2 * k * 4, 4);
    packed.format = merged.format, packed.group_size = merged.group, packed.scales_dtype = merged.scales_dtype;
    packed.data = data, packed.scales = scales;
    packed.zeros = merged.zeros ? zeros : NULL, packed.g_idx = merged.order ? order : NULL;
    for (int h = 0; h < 2; h++) {
        epmoei_pack_target_t target = {.shape = merged,
                                       .data = data,
                                       .scales = scales,
                                       .zeros = merged.zeros ? zeros : NULL,
                                       .order = merged.order ? order + h * k : NULL,
                                       .first_row = h * f,
                                       .row_step = 1,
                                       .first_block = h * epmoei_ceil_div(f, merged.group)};
        epmoei_quant_pack(&source[h], &target);
    }
    cr_assert(testing_guards_intact(data) && testing_guards_intact(scales) && testing_guards_intact(zeros));
    cr_assert(testing_guards_intact(order));
    epmoei_quant_t unpack = epmoei_quant_of_weight(&packed, 2 * f, k, 0, f);
    float *row = malloc((size_t)k * 4);
    for (int64_t r = 0; r < 2 * f; r++) {
        epmoei_quant_row(&unpack, r, 0, k, row);
        for (int64_t c = 0; c < k; c++) {
            int64_t from = merged.order ? order[r / f * k + c] : c;
            float expected = epmoei_quant_at(&source[r / f], r % f, from);
            cr_assert(epmoei_f32_bits(row[c]) == epmoei_f32_bits(expected), "%s row %d column %d: %g, expected %g",
                      epmoe_format_string(merged.format), (int)r, (int)c, (double)row[c], (double)expected);
        }
    }
    /* An order holds each column once. */
    for (int h = 0; h < 2 && merged.order; h++)
        for (int64_t c = 0; c < k; c++) {
            int64_t count = 0;
            for (int64_t i = 0; i < k; i++) count += order[h * k + i] == c;
            cr_assert_eq(count, 1);
        }
    free(row);
    testing_buffer_free(data), testing_buffer_free(scales), testing_buffer_free(zeros), testing_buffer_free(order);
}

Test(gemm_quant, packing_preserves_every_value)
{
    static const struct {
        epmoe_format_t format;
        int32_t f, k, group;
        quant_index_t gate, up;
    } packs[] = {
        {EPMOE_FORMAT_FP8_BLOCK, 192, 200, 128, QUANT_INDEX_NONE, QUANT_INDEX_NONE},
        {EPMOE_FORMAT_FP8_BLOCK, 3, 5, -1, QUANT_INDEX_NONE, QUANT_INDEX_NONE},
        {EPMOE_FORMAT_GPTQ, 72, 192, 128, QUANT_INDEX_NONE, QUANT_INDEX_NONE},
        {EPMOE_FORMAT_GPTQ, 70, 196, 64, QUANT_INDEX_EVEN, QUANT_INDEX_EVEN},
        {EPMOE_FORMAT_GPTQ, 9, 61, 16, QUANT_INDEX_NONE, QUANT_INDEX_EVEN},
        {EPMOE_FORMAT_AWQ, 70, 75, 32, QUANT_INDEX_NONE, QUANT_INDEX_NONE},
        {EPMOE_FORMAT_CT_W4, 11, 53, 16, QUANT_INDEX_NONE, QUANT_INDEX_NONE},
        {EPMOE_FORMAT_CT_W4, 66, 64, 24, QUANT_INDEX_EVEN, QUANT_INDEX_NONE},
        {EPMOE_FORMAT_MXFP4, 7, 96, 0, QUANT_INDEX_NONE, QUANT_INDEX_NONE},
        {EPMOE_FORMAT_W4, 7, 96, 32, QUANT_INDEX_NONE, QUANT_INDEX_NONE},
    };
    testing_rng_t rng = testing_rng(testing_seed());
    for (size_t i = 0; i < sizeof packs / sizeof packs[0]; i++) {
        quant_case_t gate =
            quant_case_make(&rng, packs[i].format, 1, packs[i].f, packs[i].k, packs[i].group, packs[i].gate, 0);
        quant_case_t up =
            quant_case_make(&rng, packs[i].format, 1, packs[i].f, packs[i].k, packs[i].group, packs[i].up, 0);
        pack_and_compare(&gate, &up, packs[i].f, packs[i].k,
                         packs[i].gate != QUANT_INDEX_NONE || packs[i].up != QUANT_INDEX_NONE);
        quant_case_free(&gate), quant_case_free(&up);
    }
}

/* Random weights: what lies in memory is what the generator says, near the plain random weight, and scales differ. */
Test(gemm_quant, random_weights)
{
    static const struct {
        epmoe_format_t format;
        int32_t group;
        int32_t k; /* of W4 no multiple of 8 */
        epmoe_dtype_t scales;
        double error; /* of a weight, in its standard deviations: half a step of the coarser scale */
    } kinds[] = {{EPMOE_FORMAT_FP8_BLOCK, 128, 352, EPMOE_F32, 0.13},
                 {EPMOE_FORMAT_W4, 128, 347, EPMOE_F16, 0.5},
                 {EPMOE_FORMAT_MXFP4, 32, 352, EPMOE_F8_E8M0, 0.6}};
    enum { ROWS = 200, MAX_K = 352 };
    for (int i = 0; i < 3; i++) {
        int32_t k = kinds[i].k;
        epmoei_quant_sizes_t sizes = epmoei_quant_sizes(kinds[i].format, 2 * ROWS, k, kinds[i].group, i ? 0 : ROWS);
        void *data = testing_buffer(sizes.data_bytes, 4), *zeros = testing_buffer(sizes.zeros_bytes + 1, 1);
        void *scales = testing_buffer(sizes.scales * epmoe_dtype_size(kinds[i].scales), 4);
        epmoei_random_quant_t random = {kinds[i].format, kinds[i].group, 7, EPMOEI_RANDOM_UP, 3, k};
        epmoei_pack_target_t target = {.shape = {kinds[i].format, kinds[i].group, kinds[i].scales, i == 1, false},
                                       .data = data,
                                       .scales = scales,
                                       .zeros = i == 1 ? zeros : NULL,
                                       .first_row = ROWS,
                                       .row_step = 1,
                                       .first_block = 2};
        epmoei_random_quant_fill(&random, ROWS, &target);
        cr_assert(testing_guards_intact(data) && testing_guards_intact(scales) && testing_guards_intact(zeros));
        epmoe_weight_t weight = EPMOE_WEIGHT_INIT;
        weight.format = kinds[i].format, weight.group_size = kinds[i].group, weight.scales_dtype = kinds[i].scales;
        weight.data = data, weight.scales = scales, weight.zeros = i == 1 ? zeros : NULL;
        epmoei_quant_t quant = epmoei_quant_of_weight(&weight, 2 * ROWS, k, 0, ROWS);
        float values[MAX_K], plain[MAX_K];
        double deviation = 1 / sqrt(k);
        for (int r = 0; r < ROWS; r++) {
            uint8_t *row_end = (uint8_t *)data + (ROWS + r + 1) * 44 * 4;
            /* The last word holds three columns. */
            if (i == 1) cr_assert(row_end[-1] == 0 && row_end[-2] == 0 && row_end[-3] < 16);
            epmoei_random_quant_values(&random, r, 0, k, values);
            epmoei_random_fill(plain, EPMOE_F32, 7, EPMOEI_RANDOM_UP, 3, (int64_t)r * k, k, (float)deviation);
            for (int c = 0; c < k; c++) {
                cr_assert(epmoei_f32_bits(epmoei_quant_at(&quant, ROWS + r, c)) == epmoei_f32_bits(values[c]));
                cr_assert(fabs((double)values[c] - (double)plain[c]) <= kinds[i].error * deviation);
            }
        }
        int larger = 0, all = 0;
        for (int r = 0; r < ROWS; r++)
            for (int g = 0; g < 2; g++, all++)
                larger += epmoei_random_quant_scale(&random, r, g) > epmoei_random_quant_scale(&random, 0, 0) ||
                          epmoei_random_quant_scale(&random, r, g) < epmoei_random_quant_scale(&random, 0, 0);
        cr_assert(larger > 0 && larger < all);
        testing_buffer_free(data), testing_buffer_free(scales), testing_buffer_free(zeros);
    }
}

Test(gemm_quant, what_cannot_be_packed)
{
    testing_rng_t rng = testing_rng(testing_seed());
    quant_case_t gptq = quant_case_make(&rng, EPMOE_FORMAT_GPTQ, 1, 8, 64, 16, QUANT_INDEX_EVEN, 0);
    epmoei_quant_t source = epmoei_quant_of_weight(&gptq.weight, 8, 64, 0, 0);
    source.zero_convention = 1;
    cr_assert_eq(epmoei_pack_shape(&source).format, EPMOE_FORMAT_W4);
    /* One column moved to another group: the groups are 15 and 17 columns wide. */
    gptq.g_idx[0] = gptq.g_idx[0] ? 0 : 1;
    cr_assert_eq(epmoei_pack_shape(&source).format, EPMOE_FORMAT_NONE);
    quant_case_free(&gptq);
    /* The up half of a fused [2f,k] whose blocks do not begin at row f. */
    quant_case_t fp8 = quant_case_make(&rng, EPMOE_FORMAT_FP8_BLOCK, 1, 384, 64, 128, QUANT_INDEX_NONE, 0);
    source = epmoei_quant_of_weight(&fp8.weight, 384, 64, 0, 0);
    source.rows = 192;
    cr_assert_eq(epmoei_pack_shape(&source).format, EPMOE_FORMAT_FP8_BLOCK);
    source.first_row = 192;
    cr_assert_eq(epmoei_pack_shape(&source).format, EPMOE_FORMAT_NONE);
    source.second_half = 192;
    cr_assert_eq(epmoei_pack_shape(&source).format, EPMOE_FORMAT_FP8_BLOCK);
    source.first_row = 0, source.row_step = 2;
    cr_assert_eq(epmoei_pack_shape(&source).format, EPMOE_FORMAT_NONE);
    quant_case_free(&fp8);
    /* Two shapes: other scales become fp32, other groups do not fit. */
    epmoei_pack_shape_t a = {.format = EPMOE_FORMAT_W4, .group = 64, .scales_dtype = EPMOE_F16, .zeros = true}, b = a;
    b.scales_dtype = EPMOE_BF16, b.zeros = false, b.order = true;
    epmoei_pack_shape_t merged = epmoei_pack_merge(&a, &b);
    cr_assert(merged.format == EPMOE_FORMAT_W4 && merged.scales_dtype == EPMOE_F32 && merged.zeros && merged.order);
    b.group = 128;
    cr_assert_eq(epmoei_pack_merge(&a, &b).format, EPMOE_FORMAT_NONE);
}

Test(gemm_quant, bad_indices_are_errors)
{
    testing_rng_t rng = testing_rng(testing_seed());
    quant_case_t made = quant_case_make(&rng, EPMOE_FORMAT_GPTQ, 2, 8, 32, 8, QUANT_INDEX_EVEN, 0);
    float x[2 * 32] = {0}, *y = testing_buffer(2 * 8 * 4, 0);
    const int32_t offsets[] = {0, 1, 2}, first_only[] = {0, 2, 2};
    epmoe_grouped_gemm_args_t args = EPMOE_GROUPED_GEMM_ARGS_INIT;
    args.backend = EPMOE_BACKEND_CPU;
    args.num_experts = 2, args.n = 8, args.k = 32, args.max_rows = 2, args.expert_offsets = offsets;
    args.x_dtype = args.y_dtype = EPMOE_F32;
    args.x = x, args.y = y, args.weight = made.weight, args.activation = EPMOE_ACTIVATION_NONE;
    cr_assert_eq(epmoe_grouped_gemm_workspace_size(&args, &args.workspace_bytes), EPMOE_OK);
    args.workspace = malloc((size_t)args.workspace_bytes + 1);
    made.g_idx[32 + 5] = 4;
    cr_assert_eq(epmoe_grouped_gemm(&args, NULL), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert_str_eq(epmoe_last_error(), "expert 1: weight.g_idx[5] is 4: expected 0..3");
    cr_assert(testing_is_poison(y, 0, 64));
    args.expert_offsets = first_only; /* the second expert is not read */
    cr_assert_eq(epmoe_grouped_gemm(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    free(args.workspace);
    testing_buffer_free(y);
    quant_case_free(&made);
}

/* Groups of zeros, of x as of weights, make no NaN: rows 0 and 1 of x are 0 in the first 128 columns or all over. */
Test(gemm_quant, groups_of_zeros)
{
    enum { N = 16, K = 256, ROWS = 4 };
    static uint8_t codes[N * K];
    static float x[ROWS * K], y[ROWS * N];
    float scales[2] = {0.5f, 0.25f};
    memset(codes, 0x38, sizeof codes);
    for (int i = 128; i < K; i++) x[i] = 1.0f;
    x[2 * K + 5] = -0.0f;
    x[3 * K + 200] = 1e-30f;
    epmoe_grouped_gemm_args_t args = EPMOE_GROUPED_GEMM_ARGS_INIT;
    args.backend = EPMOE_BACKEND_CPU;
    args.num_experts = 1, args.n = N, args.k = K, args.max_rows = ROWS;
    args.x_dtype = args.y_dtype = EPMOE_F32, args.x = x, args.y = y;
    args.weight.format = EPMOE_FORMAT_FP8_BLOCK, args.weight.data = codes, args.weight.scales = scales;
    args.activation = EPMOE_ACTIVATION_NONE, args.fp8_activations = 1;
    cr_assert_eq(epmoe_grouped_gemm_workspace_size(&args, &args.workspace_bytes), EPMOE_OK, "%s", epmoe_last_error());
    args.workspace = testing_buffer(args.workspace_bytes + 8, 0);
    cr_assert_eq(epmoe_grouped_gemm(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    for (int n = 0; n < N; n++) {
        cr_assert(fabsf(y[n] - 32.0f) <= 1e-4f, "row 0: %g", (double)y[n]); /* 128 times 1 times 0.25 */
        cr_assert(y[N + n] == 0.0f && y[2 * N + n] == 0.0f);
        cr_assert(fabsf(y[3 * N + n] - 0.25e-30f) <= 0.02e-30f, "row 3: %g", (double)y[3 * N + n]);
    }
    testing_buffer_free(args.workspace);
}
