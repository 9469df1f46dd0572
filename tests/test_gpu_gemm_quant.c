/* Products of quantised weights on a device whose results are known without another product of the device: groups of
 * zeros, borders of blocks, zero points and the order of nibbles, what stands beside NaN and outliers, long sums,
 * offsets above 2^31. Random shapes, epilogues and routes are checkcuda's. */
#include "tests/e4m3_oracle.h"
#include "tests/gpu_testing.h"
#include "tests/quant_case.h"

#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdlib.h>

TestSuite(gpu_gemm_quant, .timeout = 300);

/* Host memory; y is fp32. */
typedef struct product_t {
    int32_t experts, n, k;
    const int32_t *offsets; /* [experts + 1] */
    const uint16_t *x;      /* bf16 */
    epmoe_weight_t weight;
    int32_t fp8_activations;
} product_t;

/* How weights may be stored for a device, and what their products do with x. */
typedef struct kind_t {
    epmoe_format_t format;
    int32_t fp8_activations;
} kind_t;
static const kind_t kinds[] = {
    {EPMOE_FORMAT_FP8_BLOCK, 1}, {EPMOE_FORMAT_FP8_BLOCK, 0}, {EPMOE_FORMAT_W4, 0}, {EPMOE_FORMAT_MXFP4, 0}};
enum { kKinds = sizeof kinds / sizeof kinds[0] };

static const char *kind_text(const kind_t *kind)
{
    return kind->fp8_activations ? "fp8 by fp8" : epmoe_format_string(kind->format);
}

/* Only Hopper's tier multiplies quantised activations. */
static bool runs(const kind_t *kind)
{
    return !kind->fp8_activations || !strcmp(epmoe_backend_arch(EPMOE_BACKEND_CUDA), "sm90");
}

static epmoe_weight_t filled(const epmoe_weight_t *weight, int64_t k)
{
    epmoe_weight_t with_defaults = *weight;
    cr_assert_eq(epmoei_quant_check_weight(&with_defaults, "weight", k), EPMOE_OK, "%s", epmoe_last_error());
    return with_defaults;
}

/* The sizes of one expert's arrays: data, scales, zeros. */
static void array_bytes(const epmoe_weight_t *weight, int64_t n, int64_t k, int64_t bytes[3])
{
    const epmoe_weight_t full = filled(weight, k);
    const epmoei_quant_sizes_t sizes = epmoei_quant_sizes(full.format, n, k, full.group_size, 0);
    bytes[0] = sizes.data_bytes;
    bytes[1] = sizes.scales * epmoe_dtype_size(full.scales_dtype);
    bytes[2] = weight->zeros ? sizes.zeros_bytes : 0;
}

/* The weight as a device multiplies it, from host arrays; owned gets what is to be freed. */
static epmoe_weight_t upload(const epmoe_weight_t *weight, int32_t experts, int32_t n, int32_t k, void *owned[6])
{
    int64_t bytes[3];
    epmoe_weight_t rows = *weight;
    array_bytes(weight, n, k, bytes);
    memset(owned, 0, 6 * sizeof owned[0]);
    rows.data = owned[0] = gpu_copy_of(weight->data, experts * bytes[0]);
    rows.scales = owned[1] = gpu_copy_of(weight->scales, experts * bytes[1]);
    rows.zeros = owned[2] = gpu_copy_of(weight->zeros, experts * bytes[2]);
    if (weight->format == EPMOE_FORMAT_FP8_BLOCK) return rows;
    epmoe_pack_tiles_args_t args = EPMOE_PACK_TILES_ARGS_INIT;
    epmoe_pack_tiles_size_t size = EPMOE_PACK_TILES_SIZE_INIT;
    args.backend = EPMOE_BACKEND_CUDA;
    args.num_experts = experts, args.n = n, args.k = k, args.weight = rows;
    cr_assert_eq(epmoe_pack_tiles_size(&args, &size), EPMOE_OK, "%s", epmoe_last_error());
    args.data = owned[3] = gpu_buffer(size.data_bytes, 0);
    args.scales = owned[4] = gpu_buffer(size.scales_bytes, 0);
    args.zeros = owned[5] = size.zeros_bytes ? gpu_buffer(size.zeros_bytes, 0) : NULL;
    cr_assert_eq(epmoe_pack_tiles(&args, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert(gpu_wait());
    epmoe_weight_t tiles = size.tiles;
    tiles.data = args.data, tiles.scales = args.scales, tiles.zeros = args.zeros;
    return tiles;
}

static epmoe_grouped_gemm_args_t arguments(epmoe_backend_t backend, const product_t *p)
{
    epmoe_grouped_gemm_args_t args = EPMOE_GROUPED_GEMM_ARGS_INIT;
    args.backend = backend;
    args.num_experts = p->experts, args.n = p->n, args.k = p->k, args.max_rows = p->offsets[p->experts];
    args.x_dtype = EPMOE_BF16, args.y_dtype = EPMOE_F32;
    args.activation = EPMOE_ACTIVATION_NONE;
    args.fp8_activations = p->fp8_activations;
    return args;
}

/* y [rows,N], malloc'ed. */
static float *on_device(const product_t *p)
{
    const int64_t rows = p->offsets[p->experts], count = rows * p->n;
    void *owned[6];
    epmoe_grouped_gemm_args_t args = arguments(EPMOE_BACKEND_CUDA, p);
    args.weight = upload(&p->weight, p->experts, p->n, p->k, owned);
    args.layout = EPMOE_LAYOUT_PACKED;
    void *x = gpu_copy_of(p->x, rows * p->k * 2), *y = gpu_buffer(count * 4, 0);
    int32_t *offsets = gpu_copy_of(p->offsets, ((int64_t)p->experts + 1) * 4);
    args.x = x, args.y = y, args.expert_offsets = offsets;
    cr_assert_eq(epmoe_grouped_gemm_workspace_size(&args, &args.workspace_bytes), EPMOE_OK, "%s", epmoe_last_error());
    args.workspace = gpu_buffer(args.workspace_bytes, 0);
    cr_assert_eq(epmoe_grouped_gemm(&args, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert(gpu_wait());
    float *got = gpu_get_new(y, count * 4);
    cr_assert(gpu_guards_intact(y) && gpu_guards_intact(args.workspace));
    gpu_buffer_free(x), gpu_buffer_free(y), gpu_buffer_free(offsets), gpu_buffer_free(args.workspace);
    for (int i = 0; i < 6; i++) gpu_buffer_free(owned[i]);
    return got;
}

/* The CPU's, in fp32, as doubles. */
static double *on_cpu(const product_t *p)
{
    const int64_t count = (int64_t)p->offsets[p->experts] * p->n;
    float *y = malloc((size_t)count * sizeof *y);
    double *expected = malloc((size_t)count * sizeof *expected);
    epmoe_grouped_gemm_args_t args = arguments(EPMOE_BACKEND_CPU, p);
    args.weight = p->weight;
    args.x = p->x, args.y = y, args.expert_offsets = p->offsets;
    cr_assert_eq(epmoe_grouped_gemm_workspace_size(&args, &args.workspace_bytes), EPMOE_OK, "%s", epmoe_last_error());
    void *workspace = args.workspace = testing_buffer(args.workspace_bytes + 8, 0);
    cr_assert_eq(epmoe_grouped_gemm(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    for (int64_t i = 0; i < count; i++) expected[i] = (double)y[i];
    testing_buffer_free(workspace), free(y);
    return expected;
}

static uint16_t *bf16_ones(int64_t count)
{
    uint16_t *x = malloc((size_t)count * sizeof *x);
    for (int64_t i = 0; i < count; i++) x[i] = 0x3F80;
    return x;
}

/* ------------------------------------------------------------------------------------------------- worked by hand */

/* All weights are 1. A scale of 0 would make NaN of the rows of zeros; 1e-30 has a scale of its own. */
Test(gpu_gemm_quant, groups_of_zeros)
{
    GPU_TEST_NEEDS_DEVICE();
    enum { kRows = 5, kN = 144, kK = 256 };
    static uint16_t x[kRows * kK];
    static uint8_t codes[kN * kK];
    const float scales[4] = {1, 1, 1, 1};
    const int32_t offsets[] = {0, kRows};
    for (int i = 0; i < kK / 2; i++) x[kK / 2 + i] = 0x3F80; /* row 0: a group of zeros and one of ones */
    x[2 * kK + 9] = 0x8000;                                  /* row 2: -0; row 1 is all zeros */
    x[3 * kK + 5] = epmoei_f32_to_bf16(1e-30f);
    x[4 * kK + 200] = 1; /* 2^-133, the smallest subnormal, below the smallest scale */
    memset(codes, 0x38, sizeof codes);
    const double tiny = (double)epmoei_bf16_to_f32(x[3 * kK + 5]), expected[kRows] = {128, 0, 0, tiny, 0};
    for (int i = 0; i < 2; i++) {
        product_t p = {1, kN, kK, offsets, x, EPMOE_WEIGHT_INIT, kinds[i].fp8_activations};
        p.weight.format = EPMOE_FORMAT_FP8_BLOCK, p.weight.data = codes, p.weight.scales = scales;
        if (!runs(&kinds[i])) continue;
        float *y = on_device(&p);
        for (int r = 0; r < kRows; r++)
            for (int n = 0; n < kN; n++) {
                const double got = (double)y[r * kN + n];
                /* A subnormal may be flushed on its way. */
                cr_assert(fabs(got - expected[r]) <= (r == 4 ? 0x1p-126 : 1e-6 * expected[r]),
                          "%s: y[%d,%d] is %g, expected %g", kind_text(&kinds[i]), r, n, got, expected[r]);
            }
        free(y);
    }
}

/* N that is no whole block, guessed wrongly from the 5 or 8 rows of scales, and K that ends 16 columns into its third
 * group; an expert without rows, whose codes and scales are NaN, and one with a single row. */
Test(gpu_gemm_quant, borders_of_blocks)
{
    GPU_TEST_NEEDS_DEVICE();
    enum { kExperts = 3, kRows = 71, kK = 272, kGroups = 3 };
    static const int32_t offsets[] = {0, 70, 70, 71}, ns[] = {576, 1000};
    uint16_t *x = bf16_ones(kRows * kK);
    for (int i = 0; i < 4; i++) {
        const int32_t n = ns[i / 2], blocks = (n + 127) / 128;
        uint8_t *codes = malloc((size_t)(kExperts * n * kK));
        float *scales = malloc(sizeof(float) * (size_t)(kExperts * blocks * kGroups));
        memset(codes, 0x38, (size_t)(kExperts * n * kK));
        memset(codes + n * kK, 0x7F, (size_t)(n * kK));
        for (int32_t e = 0; e < kExperts; e++)
            for (int32_t b = 0; b < blocks; b++)
                for (int32_t g = 0; g < kGroups; g++)
                    scales[(e * blocks + b) * kGroups + g] = e == 1 ? NAN : (float)((e + 1) * (b + 1) << g);
        product_t p = {kExperts, n, kK, offsets, x, EPMOE_WEIGHT_INIT, kinds[i % 2].fp8_activations};
        p.weight.format = EPMOE_FORMAT_FP8_BLOCK, p.weight.data = codes, p.weight.scales = scales;
        float *y = runs(&kinds[i % 2]) ? on_device(&p) : NULL;
        for (int32_t r = 0; y && r < kRows; r++)
            for (int32_t j = 0; j < n; j++) {
                const double expected = (128 + 2 * 128 + 4 * 16) * (r < 70 ? 1 : 3) * (j / 128 + 1);
                cr_assert(fabs((double)y[r * n + j] - expected) <= 1e-6 * expected, "%s, N %d: y[%d,%d] is %g, not %g",
                          kind_text(&kinds[i % 2]), n, r, j, (double)y[r * n + j], expected);
            }
        free(y), free(codes), free(scales);
    }
    free(x);
}

static float nine_less_one_and_a_half(int n, int k) { return (void)n, (void)k, 0.5f; }
static float nine_halves(int n, int k) { return (void)n, (void)k, 4.5f; }
static float row(int n, int k) { return (void)k, (float)n; }
static float column(int n, int k) { return (void)n, (float)(k % 8); }
static float seven_less_row(int n, int k) { return (void)k, (float)(7 - n); }

/* Zero points as GPTQ stores them, less one, or not, of 0 and of 15, which is 0 after the one; the nibbles of AWQ's
 * rows and of GPTQ's columns, zero points too. */
Test(gpu_gemm_quant, words_of_gptq_and_awq)
{
    GPU_TEST_NEEDS_DEVICE();
    enum { kN = 8, kK = 32, kRows = 9 };
    static const struct {
        epmoe_format_t format;
        int32_t convention;
        uint32_t word, zeros;
        float scale;
        float (*value)(int n, int k);
    } cases[] = {{EPMOE_FORMAT_GPTQ, 1, 0x99999999u, 0x77777777u, 0.5f, nine_less_one_and_a_half},
                 {EPMOE_FORMAT_GPTQ, 0, 0x99999999u, 0x77777777u, 0.5f, nine_less_one_and_a_half},
                 {EPMOE_FORMAT_GPTQ, 2, 0x99999999u, 0x88888888u, 0.5f, nine_less_one_and_a_half},
                 {EPMOE_FORMAT_GPTQ, 1, 0x99999999u, 0xFFFFFFFFu, 0.5f, nine_halves},
                 {EPMOE_FORMAT_AWQ, 0, 0x99999999u, 0, 0.5f, nine_halves},
                 {EPMOE_FORMAT_AWQ, 0, 0x75316420u, 0, 1, row},
                 {EPMOE_FORMAT_GPTQ, 2, 0x76543210u, 0, 1, column},
                 {EPMOE_FORMAT_AWQ, 0, 0x77777777u, 0x75316420u, 1, seven_less_row}};
    static uint16_t x[kRows * kK]; /* ones, then a one in column r + 6 */
    for (int i = 0; i < kK; i++) x[i] = 0x3F80;
    for (int r = 1; r < kRows; r++) x[r * kK + r + 6] = 0x3F80;
    const int32_t offsets[] = {0, kRows};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        uint32_t words[kN * kK / 8], zeros[1] = {cases[i].zeros};
        float scales[kN];
        for (int w = 0; w < kN * kK / 8; w++) words[w] = cases[i].word;
        for (int n = 0; n < kN; n++) scales[n] = cases[i].scale;
        product_t p = {1, kN, kK, offsets, x, EPMOE_WEIGHT_INIT, 0};
        p.weight.format = cases[i].format, p.weight.zero_convention = cases[i].convention;
        p.weight.group_size = kK;
        p.weight.data = words, p.weight.scales = scales, p.weight.zeros = zeros;
        int64_t bytes[3];
        array_bytes(&p.weight, kN, kK, bytes);
        cr_assert(bytes[0] == sizeof words && bytes[1] == sizeof scales && bytes[2] == sizeof zeros);
        float *y = on_device(&p);
        for (int r = 0; r < kRows; r++)
            for (int n = 0; n < kN; n++) {
                float expected = 0;
                for (int k = 0; k < kK; k++)
                    if (x[r * kK + k]) expected += cases[i].value(n, k);
                cr_expect_eq(y[r * kN + n], expected, "case %zu: y[%d,%d] is %g, expected %g", i, r, n,
                             (double)y[r * kN + n], (double)expected);
            }
        free(y);
    }
}

/* --------------------------------------------------------------------------------------------- beside others */

/* Random codes of the kind's format with scales near 2^-7. E4M3's are of a normal distribution: of any bits a few would
 * be all of a sum. */
static quant_case_t random_weight(testing_rng_t *rng, epmoe_format_t format, int64_t experts, int64_t n, int64_t k)
{
    quant_case_t made = quant_case_make(rng, format, experts, n, k, 128, QUANT_INDEX_NONE, 0);
    const bool fp8 = format == EPMOE_FORMAT_FP8_BLOCK;
    for (int64_t i = 0; fp8 && i < experts * n * k; i++)
        ((uint8_t *)made.data)[i] = e4m3_nearest(64 * (double)testing_normal(rng));
    int64_t bytes[3];
    array_bytes(&made.weight, n, k, bytes);
    if (format == EPMOE_FORMAT_MXFP4)
        for (int64_t i = 0; i < experts * bytes[1]; i++) ((uint8_t *)made.scales)[i] = (uint8_t)(119 + i % 5);
    for (int64_t i = 0; format != EPMOE_FORMAT_MXFP4 && i < experts * bytes[1] / 2; i++)
        epmoei_store(made.scales, EPMOE_BF16, i, epmoei_load(made.scales, EPMOE_BF16, i) * 0x1p-7f);
    return made;
}

/* |y - expected| / |expected| over the columns first, first + step, ... of a row. */
static double error_of(const float *y, const double *expected, int64_t n, int64_t first, int64_t step)
{
    double squares = 0, errors = 0;
    for (int64_t i = first; i < n; i += step) {
        const double off = (double)y[i] - expected[i];
        squares += expected[i] * expected[i], errors += off * off;
    }
    return sqrt(errors / squares);
}

/* Code times scale is rounded to bf16 on Hopper, by 2^-8 of it at most, and to nothing elsewhere; sums are fp32. */
static double bound_of(const kind_t *kind) { return kind->format == EPMOE_FORMAT_W4 ? 3e-3 : 1e-4; }

/* A row with a NaN, one with an infinity, one with an element a hundred times the others: the rows beside them keep
 * their bits. In the third one the outputs whose weight for that element is 0 have their usual error, of a sum that the
 * tensor cores cut off 13 bits below its largest product with quantised x. */
Test(gpu_gemm_quant, rows_beside_nan_and_outliers)
{
    GPU_TEST_NEEDS_DEVICE();
    enum { kRows = 150, kN = 144, kK = 512, kNan = 7, kInfinite = 69, kLoud = 100, kColumn = 200 };
    static const int32_t offsets[] = {0, 70, 70, kRows};
    testing_rng_t rng = testing_rng(testing_seed());
    static uint16_t x[kRows * kK];
    for (int i = 0; i < kKinds; i++) {
        if (!runs(&kinds[i])) continue;
        quant_case_t w = random_weight(&rng, kinds[i].format, 3, kN, kK);
        const bool fp8 = kinds[i].format == EPMOE_FORMAT_FP8_BLOCK;
        for (int64_t n = 1; fp8 && n < kN; n += 2) ((uint8_t *)w.data)[(2 * kN + n) * kK + kColumn] = 0;
        product_t p = {3, kN, kK, offsets, x, w.weight, kinds[i].fp8_activations};
        testing_fill_normal(&rng, x, EPMOE_BF16, kRows * kK, 1);
        float *before = on_device(&p);
        epmoei_store(x, EPMOE_BF16, kLoud * kK + kColumn, 350);
        double *expected = on_cpu(&p);
        epmoei_store(x, EPMOE_BF16, kNan * kK + 77, NAN);
        epmoei_store(x, EPMOE_BF16, kInfinite * kK + 5, -INFINITY);
        float *after = on_device(&p);
        for (int64_t r = 0; r < kRows; r++) {
            if (r == kInfinite || r == kLoud) continue;
            if (r != kNan) {
                cr_assert(gpu_same(kind_text(&kinds[i]), after + r * kN, before + r * kN, kN, 4, kN), "row %d", (int)r);
                continue;
            }
            for (int64_t n = 0; n < kN; n++)
                cr_assert(isnan(after[r * kN + n]), "%s: column %d of the row with a NaN is %g", kind_text(&kinds[i]),
                          (int)n, (double)after[r * kN + n]);
        }
        const double bound = kinds[i].fp8_activations ? 1e-2 : bound_of(&kinds[i]);
        for (int first = 0; first < 2; first++) {
            const double error = error_of(after + kLoud * kN, expected + kLoud * kN, kN, first, 2);
            cr_expect(error <= bound, "%s, outputs %d, %d, ... of the loud row: off by %g, at most %g",
                      kind_text(&kinds[i]), first, first + 2, error, bound);
        }
        free(before), free(after), free(expected);
        quant_case_free(&w);
    }
}

/* Of quantised x it is checkcuda's. */
Test(gpu_gemm_quant, sums_of_7168)
{
    GPU_TEST_NEEDS_DEVICE();
    enum { kRows = 90, kN = 256, kK = 7168 };
    static const int32_t offsets[] = {0, 1, kRows};
    testing_rng_t rng = testing_rng(testing_seed());
    uint16_t *x = malloc(kRows * kK * 2);
    testing_fill_normal(&rng, x, EPMOE_BF16, kRows * kK, 1);
    for (int i = 1; i < kKinds; i++) {
        quant_case_t w = random_weight(&rng, kinds[i].format, 2, kN, kK);
        const product_t p = {2, kN, kK, offsets, x, w.weight, 0};
        float *y = on_device(&p);
        double *expected = on_cpu(&p);
        for (int part = 0; part < 2; part++) { /* the row of one expert, those of the other */
            const int64_t from = part * kN, count = part ? (kRows - 1) * kN : kN;
            const double error = error_of(y + from, expected + from, count, 0, 1);
            cr_expect(error <= bound_of(&kinds[i]), "%s, expert %d: off by %g", kind_text(&kinds[i]), part, error);
        }
        free(y), free(expected);
        quant_case_free(&w);
    }
    free(x);
}

/* ------------------------------------------------------------------------------------------------- beyond 2^31 */

#define NEEDS_MEMORY(bytes)                                                                                            \
    do {                                                                                                               \
        size_t free_ = 0, all_ = 0;                                                                                    \
        if (cudaMemGetInfo(&free_, &all_) != cudaSuccess || (int64_t)free_ < (bytes) + ((int64_t)1 << 30))             \
            GPU_TEST_SKIP("fewer than %lld bytes are free on the device", (long long)(bytes));                         \
    } while (0)

/* One expert whose values are 2^(n / 128 % 4) in row n, on the host; k is one group, or 32 columns for MXFP4. */
static epmoe_weight_t stepped_weight(epmoe_format_t format, int64_t n, int64_t k)
{
    epmoe_weight_t weight = EPMOE_WEIGHT_INIT;
    weight.format = format, weight.group_size = format == EPMOE_FORMAT_MXFP4 ? 0 : 128;
    weight.scales_dtype = format == EPMOE_FORMAT_MXFP4 ? EPMOE_DTYPE_NONE : EPMOE_BF16;
    cr_assert(k == 128 && n % 128 == 0);
    int64_t bytes[3];
    array_bytes(&weight, n, k, bytes);
    uint8_t *data = malloc((size_t)bytes[0]), *scales = malloc((size_t)bytes[1]);
    memset(data, format == EPMOE_FORMAT_FP8_BLOCK ? 0x38 : format == EPMOE_FORMAT_W4 ? 0x99 : 0x22, (size_t)bytes[0]);
    const int64_t count = format == EPMOE_FORMAT_MXFP4 ? bytes[1] : bytes[1] / 2;
    for (int64_t i = 0; i < count; i++) {
        const int64_t step = i * n / count / 128 % 4;
        if (format == EPMOE_FORMAT_MXFP4)
            scales[i] = (uint8_t)(127 + step);
        else
            epmoei_store(scales, EPMOE_BF16, i, (float)(1 << step));
    }
    weight.data = data, weight.scales = scales;
    return weight;
}

static void free_weight(epmoe_weight_t *weight)
{
    free((void *)(uintptr_t)weight->data), free((void *)(uintptr_t)weight->scales);
}

/* Row `r` of y [rows,N] in bf16 is `factor` times 128 * 2^(n / 128 % 4). */
static void expect_steps(const char *what, const void *y, int64_t r, int32_t n, float factor)
{
    uint16_t *got = gpu_get_new((const char *)y + r * n * 2, (int64_t)n * 2), *expected = malloc((size_t)n * 2);
    for (int32_t i = 0; i < n; i++) epmoei_store(expected, EPMOE_BF16, i, factor * 128 * (float)(1 << i / 128 % 4));
    cr_expect(gpu_same(what, got, expected, n, 2, n), "%s: row %lld", what, (long long)r);
    free(got), free(expected);
}

static void multiply(const char *what, epmoe_grouped_gemm_args_t *args)
{
    cr_assert_eq(epmoe_grouped_gemm_workspace_size(args, &args->workspace_bytes), EPMOE_OK, "%s: %s", what,
                 epmoe_last_error());
    args->workspace = gpu_buffer(args->workspace_bytes, 0);
    cr_assert_eq(epmoe_grouped_gemm(args, gpu_stream()), EPMOE_OK, "%s: %s", what, epmoe_last_error());
    cr_assert(gpu_wait());
    cr_expect(gpu_guards_intact(args->workspace));
    gpu_buffer_free(args->workspace);
}

/* 1025 experts of 2^22 weights, of which only the last has rows and is no NaN: one row, then many. */
Test(gpu_gemm_quant, weights_of_the_last_expert)
{
    GPU_TEST_NEEDS_DEVICE();
    enum { kExperts = 1025, kN = 1 << 15, kK = 128, kRows = 200 };
    NEEDS_MEMORY((int64_t)kExperts * kN * kK * 5 / 4);
    uint16_t *ones = bf16_ones(kRows * kK);
    void *x = gpu_copy_of(ones, kRows * kK * 2), *y = gpu_buffer((int64_t)kRows * kN * 2, 0);
    int32_t offsets[kExperts + 1] = {0}, *on_device_offsets = gpu_buffer(sizeof offsets, 0);
    for (int i = 0; i < kKinds; i++) {
        if (!runs(&kinds[i])) continue;
        void *one[6], *all[2];
        epmoe_weight_t host = stepped_weight(kinds[i].format, kN, kK);
        epmoe_weight_t weight = upload(&host, 1, kN, kK, one);
        int64_t bytes[3];
        array_bytes(&host, kN, kK, bytes);
        if (one[3]) { /* in tiles */
            epmoe_pack_tiles_args_t pack = EPMOE_PACK_TILES_ARGS_INIT;
            epmoe_pack_tiles_size_t size = EPMOE_PACK_TILES_SIZE_INIT;
            pack.backend = EPMOE_BACKEND_CUDA, pack.n = kN, pack.k = kK, pack.weight = host;
            cr_assert_eq(epmoe_pack_tiles_size(&pack, &size), EPMOE_OK, "%s", epmoe_last_error());
            bytes[0] = size.data_bytes, bytes[1] = size.scales_bytes;
        }
        for (int a = 0; a < 2; a++) {
            const int64_t before = (kExperts - 1) * bytes[a];
            all[a] = gpu_buffer(before + bytes[a], 0);
            cr_assert_eq(epmoei_memory_set(EPMOE_BACKEND_CUDA, all[a], 0xFF, before, gpu_stream()), EPMOE_OK);
            cr_assert_eq(epmoei_memory_copy(EPMOE_BACKEND_CUDA, (char *)all[a] + before,
                                            a ? weight.scales : weight.data, bytes[a], gpu_stream()),
                         EPMOE_OK);
        }
        cr_assert(gpu_wait());
        weight.data = all[0], weight.scales = all[1];
        for (int many = 0; many < 2; many++) {
            offsets[kExperts] = many ? kRows : 1;
            gpu_put(on_device_offsets, offsets, sizeof offsets);
            gpu_poison(y, (int64_t)kRows * kN * 2);
            const product_t p = {kExperts, kN, kK, offsets, NULL, weight, kinds[i].fp8_activations};
            epmoe_grouped_gemm_args_t args = arguments(EPMOE_BACKEND_CUDA, &p);
            args.weight = weight, args.layout = EPMOE_LAYOUT_PACKED, args.y_dtype = EPMOE_BF16;
            args.x = x, args.y = y, args.expert_offsets = on_device_offsets;
            multiply(kind_text(&kinds[i]), &args);
            for (int32_t r = 0; r < offsets[kExperts]; r += 199) expect_steps(kind_text(&kinds[i]), y, r, kN, 1);
            cr_expect(
                gpu_is_poison(y, (int64_t)offsets[kExperts] * kN * 2, (int64_t)(kRows - offsets[kExperts]) * kN * 2));
        }
        cr_expect(gpu_guards_intact(y));
        gpu_buffer_free(all[0]), gpu_buffer_free(all[1]);
        for (int a = 0; a < 6; a++) gpu_buffer_free(one[a]);
        free_weight(&host);
    }
    gpu_buffer_free(x), gpu_buffer_free(y), gpu_buffer_free(on_device_offsets);
    free(ones);
}

/* Row 2^20 of 2048 outputs begins at element 2^31, row 2^24 of 128 columns of x too; quantised codes of x lie in the
 * workspace. The last rows of x are twos. */
Test(gpu_gemm_quant, rows_beyond_2_31)
{
    GPU_TEST_NEEDS_DEVICE();
    enum { kK = 128 };
    static const struct {
        int32_t rows, n;
    } sizes[] = {{(1 << 20) + 77, 2048}, {(1 << 24) + 77, 128}};
    const int64_t bytes = ((int64_t)1 << 32) + (1 << 20);
    NEEDS_MEMORY(3 * bytes);
    for (int s = 0; s < 2; s++) {
        const int32_t rows = sizes[s].rows, n = sizes[s].n, offsets[] = {0, rows};
        const int64_t x_bytes = (int64_t)rows * kK * 2, y_bytes = (int64_t)rows * n * 2;
        char *x = gpu_buffer(x_bytes, 0), *y = gpu_buffer(y_bytes, 0);
        uint16_t *ones = bf16_ones(4096), twos[kK * 8];
        for (int i = 0; i < kK * 8; i++) twos[i] = 0x4000;
        gpu_put(x, ones, 8192), gpu_repeat(x, 8192, x_bytes);
        gpu_put(x + x_bytes - (int64_t)sizeof twos, twos, sizeof twos);
        void *on_device_offsets = gpu_copy_of(offsets, sizeof offsets);
        for (int i = 0; i < kKinds; i++) {
            if (!runs(&kinds[i])) continue;
            void *owned[6];
            epmoe_weight_t host = stepped_weight(kinds[i].format, n, kK);
            const product_t p = {1, n, kK, offsets, NULL, host, kinds[i].fp8_activations};
            epmoe_grouped_gemm_args_t args = arguments(EPMOE_BACKEND_CUDA, &p);
            args.weight = upload(&host, 1, n, kK, owned);
            args.layout = EPMOE_LAYOUT_PACKED, args.y_dtype = EPMOE_BF16;
            args.x = x, args.y = y, args.expert_offsets = on_device_offsets;
            cr_assert_eq(epmoei_memory_set(EPMOE_BACKEND_CUDA, y, 0xFF, y_bytes, gpu_stream()), EPMOE_OK);
            multiply(kind_text(&kinds[i]), &args);
            const int32_t border = rows - 77, places[] = {0, rows / 2, border - 1, border, rows - 9};
            for (int place = 0; place < 5; place++) expect_steps(kind_text(&kinds[i]), y, places[place], n, 1);
            for (int32_t r = rows - 8; r < rows; r++) expect_steps(kind_text(&kinds[i]), y, r, n, 2);
            for (int a = 0; a < 6; a++) gpu_buffer_free(owned[a]);
            free_weight(&host);
        }
        cr_expect(gpu_guards_intact(y));
        gpu_buffer_free(x), gpu_buffer_free(y), gpu_buffer_free(on_device_offsets);
        free(ones);
    }
}
