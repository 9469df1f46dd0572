/* Grouped GEMM against fp64, tier against tier, and its edges. */
#include "base/dtype.h"
#include "kernels/grouped_gemm.h"
#include "kernels/grouped_gemm_tile.h"
#include "tests/testing.h"

#include <criterion/criterion.h>
#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct case_t {
    int32_t num_experts, n, k, top_k, tokens;
    epmoe_dtype_t x_dtype, w_dtype, y_dtype;
    epmoe_activation_t activation;
    epmoe_layout_t layout;
    bool bias, row_weights, weight_on_input, indexed;
    float limit;
} case_t;

typedef struct problem_t {
    epmoe_grouped_gemm_args_t args;
    void *x, *w, *workspace;
    float *bias, *row_weights;
    int32_t *offsets, *row_index;
    double *ref; /* [slots, n_out]; rows without a group are NaN */
    int64_t slots;
    int32_t n_out;
} problem_t;

static void *fill(testing_rng_t *rng, epmoe_dtype_t dtype, int64_t n, float scale)
{
    void *data = malloc((size_t)(n ? n : 1) * (size_t)epmoe_dtype_size(dtype));
    testing_fill_normal(rng, data, dtype, n, scale);
    return data;
}

static double act(const case_t *c, double gate, double up)
{
    double limit = (double)c->limit;
    if (c->activation == EPMOE_ACTIVATION_SWIGLU_OAI) {
        if (limit == 0) limit = 7;
        gate = fmin(gate, limit), up = fmax(fmin(up, limit), -limit);
        return gate / (1 + exp(-1.702 * gate)) * (up + 1);
    }
    if (limit > 0) gate = fmin(gate, limit), up = fmax(fmin(up, limit), -limit);
    if (c->activation == EPMOE_ACTIVATION_GELU) return 0.5 * gate * erfc(-gate / sqrt(2.0)) * up;
    if (c->activation == EPMOE_ACTIVATION_GELU_TANH)
        return 0.5 * gate * (1 + tanh(sqrt(2 / M_PI) * (gate + 0.044715 * pow(gate, 3)))) * up;
    return gate / (1 + exp(-gate)) * up;
}

static problem_t make(const case_t *c, testing_rng_t *rng)
{
    problem_t p = {.slots = (int64_t)c->tokens * c->top_k};
    bool gated = c->activation != EPMOE_ACTIVATION_NONE;
    p.n_out = gated ? c->n / 2 : c->n;
    p.x = fill(rng, c->x_dtype, (int64_t)c->tokens * c->k, 1.0f);
    p.w = fill(rng, c->w_dtype, (int64_t)c->num_experts * c->n * c->k, 1.0f / sqrtf((float)c->k));
    p.bias = fill(rng, EPMOE_F32, (int64_t)c->num_experts * c->n, 0.5f);
    p.row_weights = fill(rng, EPMOE_F32, p.slots, 1.0f);
    /* Away from zero: a tiny weight would push fp16 outputs into subnormals, which the tolerance does not speak of. */
    for (int64_t i = 0; i < p.slots; i++) p.row_weights[i] += p.row_weights[i] < 0 ? -0.2f : 0.2f;
    p.offsets = calloc((size_t)c->num_experts + 1, 4);
    p.row_index = malloc((size_t)(p.slots + 8) * 4);

    /* Slots in a random order, cut at random places; three padding entries when they are indexed. */
    int32_t rows = (int32_t)p.slots;
    for (int32_t i = 0; i < rows; i++) p.row_index[i] = i;
    for (int32_t i = rows - 1; i > 0; i--) {
        int32_t j = testing_range(rng, 0, i), t = p.row_index[i];
        p.row_index[i] = p.row_index[j], p.row_index[j] = t;
    }
    if (c->indexed)
        for (int32_t i = 0; i < 3; i++) {
            int32_t at = testing_range(rng, 0, rows);
            memmove(p.row_index + at + 1, p.row_index + at, (size_t)(rows - at) * 4);
            p.row_index[at] = (int32_t)p.slots + i * 1000;
            rows++;
        }
    const int32_t end = rows - (rows > 4 ? 1 : 0); /* the last row belongs to nobody */
    for (int32_t e = 1; e < c->num_experts; e++) p.offsets[e] = testing_range(rng, 0, end);
    for (int32_t e = 1; e < c->num_experts; e++)
        for (int32_t i = e; i > 1 && p.offsets[i] < p.offsets[i - 1]; i--) {
            int32_t t = p.offsets[i];
            p.offsets[i] = p.offsets[i - 1], p.offsets[i - 1] = t;
        }
    p.offsets[c->num_experts] = end;

    p.args = (epmoe_grouped_gemm_args_t)EPMOE_GROUPED_GEMM_ARGS_INIT;
    p.args.backend = EPMOE_BACKEND_CPU;
    p.args.num_experts = c->num_experts;
    p.args.n = c->n;
    p.args.k = c->k;
    p.args.max_rows = rows;
    p.args.num_slots = (int32_t)p.slots;
    p.args.expert_offsets = p.offsets;
    p.args.row_index = c->indexed ? p.row_index : NULL;
    p.args.x_row_divisor = c->top_k;
    p.args.x_dtype = c->x_dtype;
    p.args.x = p.x;
    p.args.weight.struct_size = sizeof p.args.weight;
    p.args.weight.format = epmoei_format_of_dtype(c->w_dtype);
    p.args.weight.data = p.w;
    p.args.layout = c->layout;
    p.args.bias = c->bias ? p.bias : NULL;
    p.args.activation = c->activation;
    p.args.limit = c->limit;
    p.args.row_weights = c->row_weights || c->weight_on_input ? p.row_weights : NULL;
    p.args.weight_on_input = c->weight_on_input;
    p.args.y_dtype = c->y_dtype;

    p.ref = malloc((size_t)(p.slots * p.n_out) * sizeof(double));
    for (int64_t i = 0; i < p.slots * p.n_out; i++) p.ref[i] = NAN;
    for (int32_t e = 0; e < c->num_experts; e++)
        for (int32_t r = p.offsets[e]; r < p.offsets[e + 1]; r++) {
            int32_t s = c->indexed ? p.row_index[r] : r;
            if (s >= p.slots) continue;
            for (int32_t i = 0; i < p.n_out; i++) {
                double v[2] = {0, 0};
                for (int half = 0; half < (gated ? 2 : 1); half++) {
                    int64_t row = !gated                                  ? i
                                  : c->layout == EPMOE_LAYOUT_INTERLEAVED ? 2 * i + half
                                                                          : i + half * p.n_out;
                    int64_t w0 = ((int64_t)e * c->n + row) * c->k;
                    for (int32_t k = 0; k < c->k; k++)
                        v[half] += (double)epmoei_load(p.w, c->w_dtype, w0 + k) *
                                   (double)epmoei_load(p.x, c->x_dtype, (int64_t)(s / c->top_k) * c->k + k);
                    if (c->weight_on_input) v[half] *= (double)p.row_weights[s];
                    if (c->bias) v[half] += (double)p.bias[(int64_t)e * c->n + row];
                }
                double out = gated ? act(c, v[0], v[1]) : v[0];
                if (c->row_weights && !c->weight_on_input) out *= (double)p.row_weights[s];
                p.ref[(int64_t)s * p.n_out + i] = out;
            }
        }
    return p;
}

static void release(problem_t *p)
{
    free(p->x), free(p->w), free(p->bias), free(p->row_weights), free(p->offsets), free(p->row_index), free(p->ref);
}

/* Runs one tier into a poisoned buffer at an odd address; compares what has a reference, and that the rest is
 * untouched. */
static void run(const case_t *c, problem_t *p, bool reference, int32_t batch_invariant, const char *label)
{
    int64_t size = epmoe_dtype_size(c->y_dtype), bytes = p->slots * p->n_out * size;
    void *y = testing_buffer(bytes, (int32_t)size);
    epmoe_grouped_gemm_args_t checked;
    p->args.y = y;
    p->args.batch_invariant = batch_invariant;
    cr_assert_eq(epmoei_grouped_gemm_check(&p->args, &checked), EPMOE_OK, "%s", epmoe_last_error());
    int64_t ws_bytes = epmoei_grouped_gemm_workspace_cpu(&checked);
    void *workspace = testing_buffer(ws_bytes, 0);
    checked.workspace = workspace;
    checked.workspace_bytes = ws_bytes;
    epmoe_status_t status =
        reference ? epmoei_grouped_gemm_ref(&checked, NULL) : epmoei_grouped_gemm_cpu(&checked, NULL);
    cr_assert_eq(status, EPMOE_OK, "%s", epmoe_last_error());
    cr_assert(testing_guards_intact(y) && testing_guards_intact(workspace), "%s", label);
    /* Half an ulp of the output where it is rounded to 16 bits (2^-25 where that is subnormal), and the fp32 sums' own
     * error. The latter grows with sqrt(K) and belongs to the size of the terms, which may cancel, and of the factors
     * that follow, not to the result: the largest output stands for them. */
    const double half_ulp = c->y_dtype == EPMOE_F32 ? 0 : c->y_dtype == EPMOE_F16 ? 0x1p-11 : 0x1p-8;
    const double sum_error = 1e-6 + 0x1p-23 * sqrt((double)c->k);
    double largest = 0;
    for (int64_t i = 0; i < p->slots * p->n_out; i++)
        if (!isnan(p->ref[i])) largest = fmax(largest, fabs(p->ref[i]));
    for (int64_t s = 0; s < p->slots; s++) {
        if (isnan(p->ref[s * p->n_out])) {
            cr_assert(testing_is_poison(y, s * p->n_out * size, p->n_out * size), "%s: slot %lld was written", label,
                      (long long)s);
            continue;
        }
        for (int64_t i = s * p->n_out; i < (s + 1) * p->n_out; i++) {
            double out = (double)epmoei_load(y, c->y_dtype, i);
            double bound = half_ulp * fabs(p->ref[i]) + sum_error * (fabs(p->ref[i]) + largest) + 0x1p-25;
            cr_assert(fabs(out - p->ref[i]) <= bound, "%s: slot %lld: %.9g, expected %.9g", label, (long long)s, out,
                      p->ref[i]);
        }
    }
    testing_buffer_free(y);
    testing_buffer_free(workspace);
}

static void check(case_t c, const char *label)
{
    testing_rng_t rng = testing_rng(testing_seed() + (uint64_t)c.n * 31 + (uint64_t)c.k * 7 + (uint64_t)c.tokens);
    problem_t p = make(&c, &rng);
    run(&c, &p, true, 0, label);
    run(&c, &p, false, 0, label);
    run(&c, &p, false, 1, label);
    release(&p);
}

Test(grouped_gemm, random_shapes_types_and_epilogues)
{
    testing_rng_t rng = testing_rng(testing_seed());
    const epmoe_dtype_t types[] = {EPMOE_F32, EPMOE_BF16, EPMOE_F16};
    for (int i = 0; i < 60; i++) {
        case_t c = {.num_experts = testing_range(&rng, 1, 9),
                    .k = testing_range(&rng, 1, 150),
                    .n = 2 * testing_range(&rng, 1, 60),
                    .top_k = testing_range(&rng, 1, 4),
                    .tokens = testing_range(&rng, 1, 40),
                    .x_dtype = types[testing_range(&rng, 0, 2)],
                    .w_dtype = types[testing_range(&rng, 0, 2)],
                    .y_dtype = types[testing_range(&rng, 0, 2)],
                    .activation = (epmoe_activation_t)testing_range(&rng, 0, 4),
                    .layout = (epmoe_layout_t)testing_range(&rng, 0, 1),
                    .bias = testing_range(&rng, 0, 1),
                    .row_weights = testing_range(&rng, 0, 1),
                    .weight_on_input = testing_range(&rng, 0, 3) == 0,
                    .indexed = testing_range(&rng, 0, 1),
                    .limit = testing_range(&rng, 0, 1) ? 0.7f : 0.0f};
        if (c.activation == EPMOE_ACTIVATION_NONE && i % 3) c.n -= 1;
        char label[200];
        snprintf(label, sizeof label, "case %d: E %d n %d k %d top_k %d T %d act %d layout %d types %d %d %d", i,
                 c.num_experts, c.n, c.k, c.top_k, c.tokens, (int)c.activation, (int)c.layout, (int)c.x_dtype,
                 (int)c.w_dtype, (int)c.y_dtype);
        check(c, label);
    }
}

/* Row counts around the block sizes of both paths, K beyond one BLAS depth, N beyond a tile. */
Test(grouped_gemm, both_paths_at_their_edges)
{
    const int32_t rows[] = {1, 2, 3, 5, 7, 8, 15, 16, 17, 63, 64, 65, 127, 255, 256, 257, 300};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        case_t c = {.num_experts = 1,
                    .k = 1030,
                    .n = 134,
                    .top_k = 1,
                    .tokens = rows[i],
                    .x_dtype = EPMOE_BF16,
                    .w_dtype = EPMOE_BF16,
                    .y_dtype = EPMOE_BF16,
                    .activation = EPMOE_ACTIVATION_SILU};
        char label[64];
        snprintf(label, sizeof label, "%d rows", rows[i]);
        check(c, label);
    }
    case_t wide = {.num_experts = 3,
                   .k = 2051,
                   .n = 520,
                   .top_k = 2,
                   .tokens = 200,
                   .x_dtype = EPMOE_F16,
                   .w_dtype = EPMOE_F16,
                   .y_dtype = EPMOE_F32,
                   .activation = EPMOE_ACTIVATION_NONE,
                   .indexed = true,
                   .row_weights = true};
    check(wide, "wide");
}

/* A row's bits do not depend on the others of the call, nor on the number of threads. */
Test(grouped_gemm, batch_invariant_rows_and_thread_independence)
{
    testing_rng_t rng = testing_rng(testing_seed());
    enum { kN = 96, kK = 517, kRows = 150 };
    uint16_t *w = fill(&rng, EPMOE_BF16, kN * kK, 0.05f), *x = fill(&rng, EPMOE_BF16, (int64_t)kRows * kK, 1.0f);
    float *all = malloc(sizeof(float) * kRows * kN), *one = malloc(sizeof(float) * kRows * kN);
    epmoe_grouped_gemm_args_t args = EPMOE_GROUPED_GEMM_ARGS_INIT;
    args.backend = EPMOE_BACKEND_CPU;
    args.num_experts = 1, args.n = kN, args.k = kK;
    args.x_dtype = EPMOE_BF16, args.y_dtype = EPMOE_F32;
    args.weight.format = EPMOE_FORMAT_BF16, args.weight.data = w;
    args.activation = EPMOE_ACTIVATION_NONE;
    args.max_rows = kRows;
    int64_t bytes;
    cr_assert_eq(epmoe_grouped_gemm_workspace_size(&args, &bytes), EPMOE_OK);
    args.workspace = malloc((size_t)bytes), args.workspace_bytes = bytes;

    int32_t offsets[2] = {0, kRows};
    args.expert_offsets = offsets;
    for (int invariant = 0; invariant < 2; invariant++) {
        args.batch_invariant = invariant;
        args.x = x, args.y = all;
        cr_assert_eq(epmoe_grouped_gemm(&args, NULL), EPMOE_OK);
        omp_set_num_threads(1);
        args.y = one;
        cr_assert_eq(epmoe_grouped_gemm(&args, NULL), EPMOE_OK);
        omp_set_num_threads(omp_get_num_procs());
        cr_assert_arr_eq(all, one, sizeof(float) * kRows * kN);
    }
    for (int32_t r = 0; r < kRows; r++) {
        int32_t single[2] = {0, 1};
        args.expert_offsets = single, args.max_rows = 1;
        args.x = x + (int64_t)r * kK, args.y = one;
        cr_assert_eq(epmoe_grouped_gemm(&args, NULL), EPMOE_OK);
        cr_assert_arr_eq(one, all + (int64_t)r * kN, sizeof(float) * kN);
        args.max_rows = kRows;
    }
    free(w), free(x), free(all), free(one), free(args.workspace);
}

/* fp16 weights of every class, through the vector path: normal, subnormal, zero, infinite, NaN. */
/* y of one tier; freed by the caller. */
static char *run_tier(epmoe_grouped_gemm_args_t args, bool reference, int64_t y_bytes)
{
    args.y = testing_buffer(y_bytes, 0);
    epmoe_grouped_gemm_args_t checked;
    cr_assert_eq(epmoei_grouped_gemm_check(&args, &checked), EPMOE_OK, "%s", epmoe_last_error());
    checked.workspace_bytes = epmoei_grouped_gemm_workspace_cpu(&checked);
    checked.workspace = testing_buffer(checked.workspace_bytes, 0);
    epmoe_status_t status =
        reference ? epmoei_grouped_gemm_ref(&checked, NULL) : epmoei_grouped_gemm_cpu(&checked, NULL);
    cr_assert_eq(status, EPMOE_OK, "%s", epmoe_last_error());
    cr_assert(testing_guards_intact(args.y) && testing_guards_intact(checked.workspace));
    testing_buffer_free(checked.workspace);
    return args.y;
}

/* x and y in the sorted order: row r has the bits of its slot, and rows of padding stay as they are. */
Test(grouped_gemm, sorted_rows_have_the_bits_of_their_slots)
{
    for (int activation = EPMOE_ACTIVATION_SILU; activation <= EPMOE_ACTIVATION_NONE; activation += 4)
        for (int tier = 0; tier < 2; tier++) {
            case_t c = {.num_experts = 4,
                        .k = 72,
                        .n = 46,
                        .top_k = 3,
                        .tokens = 90,
                        .x_dtype = EPMOE_BF16,
                        .w_dtype = EPMOE_BF16,
                        .y_dtype = EPMOE_F32,
                        .activation = (epmoe_activation_t)activation,
                        .row_weights = true,
                        .indexed = true};
            testing_rng_t rng = testing_rng(testing_seed() + (uint64_t)activation);
            problem_t p = make(&c, &rng);
            const int64_t row_bytes = p.n_out * 4, x_bytes = c.k * 2;
            char *by_slot = run_tier(p.args, tier == 0, p.slots * row_bytes);

            char *sorted_x = testing_buffer(p.args.max_rows * x_bytes, 0);
            for (int32_t r = 0; r < p.args.max_rows; r++)
                if (p.row_index[r] < p.slots)
                    memcpy(sorted_x + r * x_bytes, (char *)p.x + p.row_index[r] / c.top_k * x_bytes, (size_t)x_bytes);
            epmoe_grouped_gemm_args_t args = p.args;
            args.x = sorted_x;
            args.x_sorted = args.y_sorted = 1;
            char *by_row = run_tier(args, tier == 0, args.max_rows * row_bytes);
            for (int32_t r = 0; r < args.max_rows; r++) {
                if (r >= p.offsets[c.num_experts] || p.row_index[r] >= p.slots)
                    cr_assert(testing_is_poison(by_row, r * row_bytes, row_bytes), "row %d was written", r);
                else
                    cr_assert_arr_eq(by_row + r * row_bytes, by_slot + p.row_index[r] * row_bytes, (size_t)row_bytes,
                                     "tier %d row %d", tier, r);
            }
            testing_buffer_free(by_slot), testing_buffer_free(by_row), testing_buffer_free(sorted_x);
            release(&p);
        }
}

/* Tiles of the CUDA kernels from the mean of rows per expert: by hand, then what the kernels count on. */
Test(grouped_gemm, tile_choice)
{
    static const struct {
        int32_t experts, rows, sm80, small, large; /* small: of an expert below 4 Mi weights on sm90 */
    } cases[] = {{128, 8, 16, 64, 64},       {8, 128, 16, 64, 64},     {8, 172, 32, 64, 128},
                 {128, 2048, 16, 64, 64},    {128, 3072, 32, 64, 128}, {128, 4096, 256, 64, 128},
                 {128, 8192, 256, 128, 192}, {8, 1024, 256, 192, 256}, {256, 32768, 256, 192, 256},
                 {8, 16384, 256, 256, 256},  {1, 1, 16, 64, 64},       {4096, 4096, 16, 64, 64},
                 {1, 48, 256, 64, 64},       {1, 100, 256, 128, 128}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const int32_t experts = cases[i].experts, rows = cases[i].rows;
        cr_expect_eq(epmoei_grouped_gemm_tile_sm80(experts, rows), cases[i].sm80, "case %zu", i);
        cr_expect_eq(epmoei_grouped_gemm_width_sm90(experts, rows, 4096, 1023), cases[i].small, "case %zu: %d", i,
                     epmoei_grouped_gemm_width_sm90(experts, rows, 4096, 1023));
        cr_expect_eq(epmoei_grouped_gemm_width_sm90(experts, rows, 4096, 1024), cases[i].large, "case %zu: %d", i,
                     epmoei_grouped_gemm_width_sm90(experts, rows, 4096, 1024));
        cr_expect_eq(epmoei_grouped_gemm_width_sm90(experts, rows, INT32_MAX, INT32_MAX), cases[i].large);
    }
    static const struct {
        int32_t experts, rows, height;
    } quant[] = {{128, 8, 16}, {8, 128, 16}, {8, 129, 32}, {8, 256, 32}, {8, 257, 64}, {8, 16384, 64}};
    for (size_t i = 0; i < sizeof quant / sizeof quant[0]; i++)
        cr_expect_eq(epmoei_grouped_gemm_tile_quant_sm80(quant[i].experts, quant[i].rows), quant[i].height, "case %zu",
                     i);
    /* The wide kernel: whole tiles where every one of 132 SMs gets one. */
    static const struct {
        int32_t experts, rows, n, most;
    } tall[] = {{8, 8192, 4096, 256}, {8, 2048, 4096, 256}, {1, 1024, 4096, 128}, {1, 200, 4096, 64},
                {1, 8192, 128, 64},   {1, 8192, 640, 256},  {4, 400, 4400, 256},  {256, 32768, 64, 256}};
    for (size_t i = 0; i < sizeof tall / sizeof tall[0]; i++)
        cr_expect_eq(epmoei_grouped_gemm_rows_sm80(tall[i].experts, tall[i].rows, tall[i].n, 132), tall[i].most,
                     "case %zu", i);
    cr_expect(epmoei_grouped_gemm_deals_sm90(8, 16384, 4096) && epmoei_grouped_gemm_deals_sm90(1, INT32_MAX, 14336));
    cr_expect(!epmoei_grouped_gemm_deals_sm90(8, 16383, 4096) && !epmoei_grouped_gemm_deals_sm90(8, 16384, 4088));
    for (int64_t rows = 1, last = 0; rows < INT32_MAX; rows += rows / 3 + 1) {
        int32_t width = epmoei_grouped_gemm_width_sm90(60, rows, 64, 64);
        cr_expect(width >= 64 && width <= 256 && width % 64 == 0 && width >= last, "%lld rows: %d", (long long)rows,
                  width);
        last = width;
    }
    static const struct {
        int32_t experts, rows, width;
    } w4[] = {{128, 8, 16},    {8, 128, 32},      {128, 2048, 32},   {128, 4096, 48}, {128, 8192, 96},
              {60, 6000, 144}, {256, 32768, 176}, {128, 32768, 256}, {1, 1, 16}};
    for (size_t i = 0; i < sizeof w4 / sizeof w4[0]; i++)
        cr_expect_eq(epmoei_grouped_gemm_width_w4_sm90(w4[i].experts, w4[i].rows), w4[i].width, "w4 case %zu: %d", i,
                     epmoei_grouped_gemm_width_w4_sm90(w4[i].experts, w4[i].rows));
}

Test(grouped_gemm, every_fp16_pattern_is_widened_exactly)
{
    enum { kK = 64 };
    uint16_t *w = calloc(65536, kK * 2);
    float x[kK] = {0}, *y = malloc(65536 * 4);
    x[17] = 1.0f;
    for (int32_t bits = 0; bits < 65536; bits++) w[(int64_t)bits * kK + 17] = (uint16_t)bits;
    epmoe_grouped_gemm_args_t args = EPMOE_GROUPED_GEMM_ARGS_INIT;
    int32_t offsets[2] = {0, 1};
    args.backend = EPMOE_BACKEND_CPU;
    args.num_experts = 1, args.n = 65536, args.k = kK, args.max_rows = 1;
    args.expert_offsets = offsets;
    args.x_dtype = args.y_dtype = EPMOE_F32;
    args.x = x, args.y = y;
    args.weight.format = EPMOE_FORMAT_F16, args.weight.data = w;
    args.activation = EPMOE_ACTIVATION_NONE;
    cr_assert_eq(epmoe_grouped_gemm_workspace_size(&args, &args.workspace_bytes), EPMOE_OK);
    args.workspace = malloc((size_t)args.workspace_bytes);
    cr_assert_eq(epmoe_grouped_gemm(&args, NULL), EPMOE_OK);
    for (int32_t bits = 0; bits < 65536; bits++) {
        int32_t exponent = bits >> 10 & 31, mantissa = bits & 1023;
        double magnitude = exponent == 31  ? mantissa ? NAN : INFINITY
                           : exponent == 0 ? ldexp(mantissa, -24)
                                           : ldexp(1024 + mantissa, exponent - 25);
        double expected = bits & 0x8000 ? -magnitude : magnitude;
        bool equal = isnan(expected) ? isnan(y[bits]) : (double)y[bits] == expected;
        cr_assert(equal, "0x%04x gave %g", (unsigned)bits, (double)y[bits]);
        if (exponent < 31)
            cr_assert_eq(epmoei_f32_to_f16((float)expected), bits == 0x8000 ? 0x8000 : bits, "0x%04x", (unsigned)bits);
    }
    free(w), free(y), free(args.workspace);
}

Test(grouped_gemm, bad_arguments_name_themselves_and_write_nothing)
{
    float x[8] = {0}, w[8] = {0};
    int32_t offsets[3] = {0, 1, 2};
    void *y = testing_buffer(64, 0);
    epmoe_grouped_gemm_args_t good = EPMOE_GROUPED_GEMM_ARGS_INIT;
    good.backend = EPMOE_BACKEND_CPU;
    good.num_experts = 2, good.n = 2, good.k = 2, good.max_rows = 2;
    good.expert_offsets = offsets;
    good.x_dtype = good.y_dtype = EPMOE_F32;
    good.x = x, good.y = y;
    good.weight.format = EPMOE_FORMAT_F32, good.weight.data = w;
    cr_assert_eq(epmoe_grouped_gemm_workspace_size(&good, &good.workspace_bytes), EPMOE_OK);
    good.workspace = malloc((size_t)good.workspace_bytes);
#define REFUSED(change, expected_status, word)                                                                         \
    do {                                                                                                               \
        epmoe_grouped_gemm_args_t args = good;                                                                         \
        change;                                                                                                        \
        cr_expect_eq(epmoe_grouped_gemm(&args, NULL), expected_status, #change);                                       \
        cr_expect(strstr(epmoe_last_error(), word), "%s: '%s' lacks '%s'", #change, epmoe_last_error(), word);         \
    } while (0)
    REFUSED(args.num_experts = 0, EPMOE_ERROR_INVALID_ARGUMENT, "num_experts is 0");
    REFUSED(args.num_experts = 4097, EPMOE_ERROR_INVALID_ARGUMENT, "4097");
    REFUSED(args.k = 0, EPMOE_ERROR_INVALID_ARGUMENT, "k is 0");
    REFUSED(args.n = 3, EPMOE_ERROR_INVALID_ARGUMENT, "n is 3");
    REFUSED(args.n = args.k = INT32_MAX - 1, EPMOE_ERROR_INVALID_ARGUMENT, "weight is [");
    REFUSED(args.max_rows = args.k = INT32_MAX, EPMOE_ERROR_INVALID_ARGUMENT, "x is [");
    REFUSED(args.max_rows = args.n = INT32_MAX - 1, EPMOE_ERROR_INVALID_ARGUMENT, "y is [");
    REFUSED(args.max_rows = -1, EPMOE_ERROR_INVALID_ARGUMENT, "max_rows is -1");
    REFUSED(args.x = NULL, EPMOE_ERROR_INVALID_ARGUMENT, "x is NULL");
    REFUSED(args.y = NULL, EPMOE_ERROR_INVALID_ARGUMENT, "y is NULL");
    REFUSED(args.weight.data = NULL, EPMOE_ERROR_INVALID_ARGUMENT, "weight.data is NULL");
    REFUSED(args.expert_offsets = NULL, EPMOE_ERROR_INVALID_ARGUMENT, "expert_offsets is NULL");
    REFUSED(args.workspace = NULL, EPMOE_ERROR_INVALID_ARGUMENT, "workspace");
    REFUSED(args.workspace_bytes = 64, EPMOE_ERROR_INVALID_ARGUMENT, "workspace_bytes 64");
    REFUSED(args.weight.format = EPMOE_FORMAT_AWQ, EPMOE_ERROR_INVALID_ARGUMENT, "weight.scales is NULL");
    REFUSED(args.fp8_activations = 2, EPMOE_ERROR_INVALID_ARGUMENT, "fp8_activations is 2");
    REFUSED(args.fp8_activations = 1, EPMOE_ERROR_INVALID_ARGUMENT, "weight.format fp32: expected fp8_block");
    REFUSED(args.x_dtype = EPMOE_F8_E4M3, EPMOE_ERROR_INVALID_ARGUMENT, "weight.format fp32: expected fp8_block");
    REFUSED(args.x_quant = EPMOE_GRANULARITY_TOKEN, EPMOE_ERROR_INVALID_ARGUMENT, "x_quant is 2");
    const float scale = 1;
    REFUSED(args.x_scale = &scale, EPMOE_ERROR_INVALID_ARGUMENT, "x_scale is given");
    REFUSED((args.x_dtype = EPMOE_F8_E4M3, args.weight.format = EPMOE_FORMAT_FP8_BLOCK), EPMOE_ERROR_INVALID_ARGUMENT,
            "x_quant is 0");
    REFUSED((args.x_dtype = EPMOE_F8_E4M3, args.weight.format = EPMOE_FORMAT_FP8_BLOCK,
             args.x_quant = EPMOE_GRANULARITY_TOKEN, args.weight.scales = &scale, args.weight.scales_dtype = EPMOE_F32),
            EPMOE_ERROR_INVALID_ARGUMENT, "x_scale is NULL");
    REFUSED(args.weight.format = (epmoe_format_t)77, EPMOE_ERROR_INVALID_ARGUMENT, "77");
    REFUSED(args.activation = (epmoe_activation_t)9, EPMOE_ERROR_INVALID_ARGUMENT, "9");
    REFUSED(args.x_dtype = EPMOE_I32, EPMOE_ERROR_INVALID_ARGUMENT, "x_dtype");
    REFUSED(args.weight_on_input = 1, EPMOE_ERROR_INVALID_ARGUMENT, "row_weights");
    REFUSED(args.batch_invariant = 2, EPMOE_ERROR_INVALID_ARGUMENT, "batch_invariant is 2");
    REFUSED(args.struct_size = 0, EPMOE_ERROR_INVALID_ARGUMENT, "struct_size");
    REFUSED(args.backend = EPMOE_BACKEND_CUDA, EPMOE_ERROR_NOT_SUPPORTED, "cuda");
    int32_t decreasing[3] = {0, 2, 1}, beyond[3] = {0, 1, 3}, negative[3] = {-1, 1, 2}, index[2] = {0, -2};
    REFUSED(args.expert_offsets = decreasing, EPMOE_ERROR_INVALID_ARGUMENT, "expert_offsets[2] is 1");
    REFUSED(args.expert_offsets = beyond, EPMOE_ERROR_INVALID_ARGUMENT, "expert_offsets[2] is 3");
    REFUSED(args.expert_offsets = negative, EPMOE_ERROR_INVALID_ARGUMENT, "expert_offsets[0] is -1");
    REFUSED(args.row_index = index, EPMOE_ERROR_INVALID_ARGUMENT, "row_index[1] is -2");
#undef REFUSED
    cr_assert(testing_is_poison(y, 0, 64) && testing_guards_intact(y));
    epmoe_grouped_gemm_args_t empty = EPMOE_GROUPED_GEMM_ARGS_INIT;
    empty.backend = EPMOE_BACKEND_CPU, empty.num_experts = 2, empty.n = 2, empty.k = 2;
    empty.x_dtype = empty.y_dtype = EPMOE_F32;
    empty.weight.format = EPMOE_FORMAT_F32;
    cr_assert_eq(epmoe_grouped_gemm(&empty, NULL), EPMOE_OK, "no rows and NULL pointers must succeed");
    free(good.workspace);
    testing_buffer_free(y);
}

/* Outputs beyond 2^31 elements: 524296 slots of 4096, 4.3 GB. */
Test(grouped_gemm, offsets_beyond_2_31)
{
    enum { kTokens = 65537, kTopK = 8, kK = 64, kN = 4096 };
    int64_t available = 0;
    FILE *file = fopen("/proc/meminfo", "r");
    char line[128];
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "MemAvailable: %lld kB", (long long *)&available) == 1) break;
    if (file) fclose(file);
    if (available < (int64_t)7 << 20)
        cr_skip_test("needs 7 GiB of free memory, %lld KiB are there", (long long)available);

    int64_t slots = (int64_t)kTokens * kTopK;
    uint16_t *x = malloc((size_t)kTokens * kK * 2), *w = malloc((size_t)kTopK * kN * kK * 2);
    uint16_t *y = malloc((size_t)(slots * kN * 2 + 4096));
    int32_t *index = malloc((size_t)slots * 4), offsets[kTopK + 1];
    for (int64_t i = 0; i < (int64_t)kTokens * kK; i++) x[i] = epmoei_f32_to_bf16(1.0f);
    for (int64_t i = 0; i < (int64_t)kTopK * kN * kK; i++) w[i] = epmoei_f32_to_bf16((float)(i / (kN * kK) + 1) / kK);
    for (int32_t e = 0; e <= kTopK; e++) offsets[e] = e * kTokens;
    for (int32_t e = 0; e < kTopK; e++)
        for (int32_t t = 0; t < kTokens; t++) index[(int64_t)e * kTokens + t] = t * kTopK + e;
    memset(y, 0xFF, (size_t)(slots * kN * 2 + 4096));

    epmoe_grouped_gemm_args_t args = EPMOE_GROUPED_GEMM_ARGS_INIT;
    args.backend = EPMOE_BACKEND_CPU;
    args.num_experts = kTopK, args.n = kN, args.k = kK;
    args.max_rows = (int32_t)slots;
    args.expert_offsets = offsets, args.row_index = index, args.x_row_divisor = kTopK;
    args.x_dtype = args.y_dtype = EPMOE_BF16;
    args.x = x, args.y = y;
    args.weight.format = EPMOE_FORMAT_BF16, args.weight.data = w;
    args.activation = EPMOE_ACTIVATION_NONE;
    cr_assert_eq(epmoe_grouped_gemm_workspace_size(&args, &args.workspace_bytes), EPMOE_OK);
    args.workspace = malloc((size_t)args.workspace_bytes);
    cr_assert_eq(epmoe_grouped_gemm(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    testing_rng_t rng = testing_rng(testing_seed());
    int64_t random_row = testing_range(&rng, 0, (int32_t)slots - 1);
    const int64_t rows[] = {0, slots / 2, slots - 8, random_row};
    for (int i = 0; i < 4; i++)
        for (int64_t s = rows[i]; s < epmoei_min64(rows[i] + 8, slots); s++)
            for (int32_t n = 0; n < kN; n++)
                cr_assert_eq(y[s * kN + n], epmoei_f32_to_bf16((float)(s % kTopK + 1)), "slot %lld column %d",
                             (long long)s, n);
    for (int64_t i = slots * kN; i < slots * kN + 2048; i++) cr_assert_eq(y[i], 0xFFFF);
    free(x), free(w), free(y), free(index), free(args.workspace);
}
