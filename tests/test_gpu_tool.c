/* moe_tool on a device, as a user runs it: what it writes against the CPU's, exit codes, checkpoints. */
#include "tests/gpu_testing.h"
#include "tests/testing_tool.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>

TestSuite(gpu_tool, .init = testing_folder_make, .fini = testing_folder_remove, .timeout = 600);

#define GOLDEN EPMOE_TEST_DATA "/golden/"

static void runs(const char *op, const char *settings, const char *backend)
{
    testing_process_t process =
        testing_tool("op %s --in in.safetensors --out %s.safetensors %s --backend %s", op, backend, settings, backend);
    cr_assert_eq(process.exit_code, 0, "op %s %s on %s: exit %d: %s", op, settings, backend, process.exit_code,
                 process.errors);
    cr_assert_str_empty(process.output);
    cr_assert_str_empty(process.errors, "op %s on %s: %s", op, backend, process.errors);
    testing_process_free(&process);
}

static void run_both(const char *op, const char *settings)
{
    runs(op, settings, "cpu");
    runs(op, settings, "cuda");
}

/* The same bits in both files. */
static void expect_same(const char *tensor, epmoe_dtype_t dtype, int64_t rows, int64_t cols)
{
    void *cpu = testing_read("cpu", tensor, dtype, rows * cols),
         *cuda = testing_read("cuda", tensor, dtype, rows * cols);
    cr_expect(gpu_same(tensor, cuda, cpu, rows * cols, epmoe_dtype_size(dtype), cols));
    free(cpu), free(cuda);
}

static void expect_close(const char *tensor, epmoe_dtype_t dtype, int64_t rows, int64_t cols, double tolerance)
{
    void *cpu = testing_read("cpu", tensor, dtype, rows * cols),
         *cuda = testing_read("cuda", tensor, dtype, rows * cols);
    double *ref = malloc((size_t)(rows * cols) * sizeof *ref);
    for (int64_t i = 0; i < rows * cols; i++) ref[i] = (double)epmoei_load(cpu, dtype, i);
    double error = testing_row_error(cuda, dtype, ref, rows, cols);
    cr_expect(error <= tolerance, "%s in %s is off by %g", tensor, epmoe_dtype_string(dtype), error);
    free(cpu), free(cuda), free(ref);
}

static void fails(const char *op, const char *settings, int code, const char *needle)
{
    testing_process_t process = testing_tool("op %s --in in.safetensors --out out.safetensors %s", op, settings);
    cr_expect_eq(process.exit_code, code, "op %s %s: exit %d, expected %d: %s", op, settings, process.exit_code, code,
                 process.errors);
    cr_expect(strstr(process.errors, needle), "op %s %s: stderr lacks '%s': %s", op, settings, needle, process.errors);
    if (code == 3) cr_expect(!strncmp(process.errors, "not supported:", 14), "op %s: %s", op, process.errors);
    cr_expect(!testing_exists("out.safetensors"), "op %s %s: the output file is there", op, settings);
    testing_process_free(&process);
}

static void *normal(testing_rng_t *rng, epmoe_dtype_t dtype, int64_t n, float scale)
{
    void *data = malloc((size_t)n * 4 + 1);
    testing_fill_normal(rng, data, dtype, n, scale);
    return data;
}

Test(gpu_tool, topk_and_align)
{
    GPU_TEST_NEEDS_DEVICE();
    /* Always the same numbers: scores that are one rounding apart may change places between backends. */
    testing_rng_t rng = testing_rng(11);
    static const epmoe_dtype_t dtypes[] = {EPMOE_F32, EPMOE_BF16, EPMOE_F16};
    static const char *const settings[] = {"--set k=6", "--set k=6 scoring=sigmoid renormalize=1 scale=2.5",
                                           "--set k=6 scoring=sqrtsoftplus n_group=6 topk_group=2",
                                           "--set k=6 scoring=topk_softmax"};
    for (int i = 0; i < 12; i++) {
        void *logits = normal(&rng, dtypes[i % 3], 50 * 60, 1), *bias = normal(&rng, EPMOE_F32, 60, 0.1f);
        if (i / 3 == 1)
            TESTING_WRITE("in", {"logits", dtypes[i % 3], 2, {50, 60}, logits}, {"bias", EPMOE_F32, 1, {60}, bias});
        else
            TESTING_WRITE("in", {"logits", dtypes[i % 3], 2, {50, 60}, logits});
        run_both("topk", settings[i / 3]);
        expect_same("ids", EPMOE_I32, 50, 6);
        expect_close("weights", EPMOE_F32, 50, 6, 1e-5);
        free(logits), free(bias);
    }
    int32_t ids[50 * 6];
    for (int i = 0; i < 300; i++) ids[i] = testing_range(&rng, -1, 59);
    TESTING_WRITE("in", {"ids", EPMOE_I32, 2, {50, 6}, ids});
    run_both("align", "--set num_experts=60 block=16");
    int64_t padded = epmoe_align_max_padded(50, 6, 60, 16);
    expect_same("sorted_ids", EPMOE_I32, 1, padded);
    expect_same("expert_ids", EPMOE_I32, 1, padded / 16);
    expect_same("num_post_padded", EPMOE_I32, 1, 1);
}

Test(gpu_tool, grouped_gemm_and_experts)
{
    GPU_TEST_NEEDS_DEVICE();
    enum { kD = 40, kF = 24, kE = 5, kRows = 60, kTokens = 20, kK = 3 };
    for (int i = 0; i < 2; i++) {
        testing_rng_t rng = testing_rng(testing_seed() + (uint64_t)i);
        epmoe_dtype_t dtype = i ? EPMOE_F16 : EPMOE_BF16;
        double tolerance = i ? 2e-3 : 1.6e-2;
        void *x = normal(&rng, dtype, kRows * kD, 1), *w13 = normal(&rng, dtype, kE * 2 * kF * kD, 0.16f);
        void *w2 = normal(&rng, dtype, kE * kD * kF, 0.2f), *b13 = normal(&rng, EPMOE_F32, kE * 2 * kF, 0.3f);
        const int32_t counts[kE] = {7, 0, 31, 1, 8}; /* 13 rows are nobody's */
        TESTING_WRITE("in", {"x", dtype, 2, {kRows, kD}, x}, {"counts", EPMOE_I32, 1, {kE}, counts},
                      {"w", dtype, 3, {kE, 2 * kF, kD}, w13});
        run_both("grouped_gemm", "");
        expect_close("y", dtype, kRows, 2 * kF, tolerance);
        uint16_t *y = testing_read("cuda", "y", dtype, kRows * 2 * kF);
        for (int32_t j = 47 * 2 * kF; j < kRows * 2 * kF; j++) cr_assert_eq(y[j], 0, "row %d", j / (2 * kF));
        free(y);

        int32_t ids[kTokens * kK];
        float weights[kTokens * kK];
        for (int32_t s = 0; s < kTokens * kK; s++) {
            ids[s] = s / kK == 4 ? -1 : testing_range(&rng, -1, kE - 1);
            weights[s] = ids[s] < 0 ? NAN : testing_uniform(&rng, 0, 1);
        }
        TESTING_WRITE("in", {"x", dtype, 2, {kTokens, kD}, x}, {"ids", EPMOE_I32, 2, {kTokens, kK}, ids},
                      {"weights", EPMOE_F32, 2, {kTokens, kK}, weights}, {"w13", dtype, 3, {kE, 2 * kF, kD}, w13},
                      {"w2", dtype, 3, {kE, kD, kF}, w2}, {"b13", EPMOE_F32, 2, {kE, 2 * kF}, b13});
        run_both("experts", "--set activation=swiglu_oai");
        expect_close("y", dtype, kTokens, kD, tolerance);
        run_both("experts", "--set activation=gelu limit=0.5");
        expect_close("y", dtype, kTokens, kD, tolerance);

        static const int32_t bad[] = {kE, -2, INT32_MAX};
        for (int b = 0; b < 3; b++) {
            ids[7] = bad[b];
            TESTING_WRITE("in", {"x", dtype, 2, {kTokens, kD}, x}, {"ids", EPMOE_I32, 2, {kTokens, kK}, ids},
                          {"weights", EPMOE_F32, 2, {kTokens, kK}, weights}, {"w13", dtype, 3, {kE, 2 * kF, kD}, w13},
                          {"w2", dtype, 3, {kE, kD, kF}, w2});
            fails("experts", "", 2, "out of range");
            fails("experts", "--backend cpu", 2, "ids[");
            TESTING_WRITE("in", {"ids", EPMOE_I32, 2, {kTokens, kK}, ids});
            fails("align", "--set num_experts=5", 2, "out of range");
        }
        free(x), free(w13), free(w2), free(b13);
    }
}

Test(gpu_tool, elementwise)
{
    GPU_TEST_NEEDS_DEVICE();
    static const epmoe_dtype_t dtypes[] = {EPMOE_F32, EPMOE_BF16, EPMOE_F16};
    static const double tolerances[] = {1e-5, 8e-3, 1e-3};
    static const char *const settings[] = {"", "--set activation=gelu", "--set activation=gelu_tanh limit=1",
                                           "--set activation=swiglu_oai alpha=1.2 limit=2"};
    testing_rng_t rng = testing_rng(testing_seed());
    for (int i = 0; i < 12; i++) {
        void *x = normal(&rng, dtypes[i % 3], 9 * 2 * 77, 1);
        TESTING_WRITE("in", {"x", dtypes[i % 3], 2, {9, 2 * 77}, x});
        run_both("silu_and_mul", settings[i / 3]);
        expect_close("y", dtypes[i % 3], 9, 77, tolerances[i % 3]);
        free(x);
    }
    for (int i = 0; i < 3; i++) {
        void *y = normal(&rng, dtypes[i], 9 * 3 * 77, 1), *weights = normal(&rng, EPMOE_F32, 9 * 3, 1);
        TESTING_WRITE("in", {"y", dtypes[i], 3, {9, 3, 77}, y}, {"weights", EPMOE_F32, 2, {9, 3}, weights});
        run_both("sum", "");
        expect_same("out", dtypes[i], 9, 77);
        free(y), free(weights);
    }
}

/* What a device does not compute is refused, and auto is the device. */
Test(gpu_tool, not_supported)
{
    GPU_TEST_NEEDS_DEVICE();
    static const float ones[64] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    uint16_t halves[64];
    const int32_t counts[] = {1, 1};
    for (int i = 0; i < 64; i++) halves[i] = epmoei_f32_to_bf16(1);
    TESTING_WRITE("in", {"x", EPMOE_F32, 2, {2, 8}, ones}, {"counts", EPMOE_I32, 1, {2}, counts},
                  {"w", EPMOE_F32, 3, {2, 3, 8}, ones});
    fails("grouped_gemm", "", 3, "f32");
    fails("grouped_gemm", "--backend cuda", 3, "f32");
    runs("grouped_gemm", "", "cpu");
    TESTING_WRITE("in", {"x", EPMOE_BF16, 2, {2, 4}, halves}, {"counts", EPMOE_I32, 1, {2}, counts},
                  {"w", EPMOE_BF16, 3, {2, 8, 4}, halves});
    fails("grouped_gemm", "", 3, "multiple of 8");
    const int32_t too_many[] = {1, 2};
    TESTING_WRITE("in", {"x", EPMOE_BF16, 2, {2, 8}, halves}, {"counts", EPMOE_I32, 1, {2}, too_many},
                  {"w", EPMOE_BF16, 3, {2, 3, 8}, halves});
    fails("grouped_gemm", "", 2, "counts sum to 3");
}

/* Tokens of no row, at every op. */
Test(gpu_tool, no_tokens)
{
    GPU_TEST_NEEDS_DEVICE();
    TESTING_WRITE("in", {"logits", EPMOE_BF16, 2, {0, 4}, NULL});
    run_both("topk", "--set k=2");
    expect_same("ids", EPMOE_I32, 0, 2);
    TESTING_WRITE("in", {"x", EPMOE_BF16, 2, {0, 4}, NULL});
    run_both("silu_and_mul", "");
    TESTING_WRITE("in", {"ids", EPMOE_I32, 2, {0, 2}, NULL});
    run_both("align", "--set num_experts=2 block=2");
    expect_same("num_post_padded", EPMOE_I32, 1, 1);
    expect_same("sorted_ids", EPMOE_I32, 1, 2);
    expect_same("expert_ids", EPMOE_I32, 1, 1);
}

/* ---------------------------------------------------------------------------------------------- checkpoints */

static const char *const names[] = {"mixtral",     "qwen3_moe", "qwen2_moe", "deepseek_v2",
                                    "deepseek_v3", "glm4_moe",  "gpt_oss"};

static void expect_exit(testing_process_t process, const char *what, int code, const char *needle)
{
    cr_expect_eq(process.exit_code, code, "%s: exit %d, expected %d\n%s%s", what, process.exit_code, code,
                 process.output, process.errors);
    cr_expect(strstr(process.output, needle) || strstr(process.errors, needle), "%s lacks '%s':\n%s%s", what, needle,
              process.output, process.errors);
    testing_process_free(&process);
}

Test(gpu_tool, check)
{
    GPU_TEST_NEEDS_DEVICE();
    for (int i = 0; i < 7; i++) {
        char what[64];
        snprintf(what, sizeof what, "check %s", names[i]);
        testing_process_t process = testing_tool("check '" GOLDEN "%s' --format json", names[i]);
        cr_expect(!strstr(process.output, "false"), "%s: %s", what, process.output);
        cr_expect(strstr(process.output, "layers.0.moe") && strstr(process.output, "layers.1.router"), "%s: %s", what,
                  process.output);
        cr_expect(strstr(process.output, "\"layers.1\"") && strstr(process.output, "\"logits\""), "%s: %s", what,
                  process.output);
        expect_exit(process, what, 0, "\"ok\":true");
        expect_exit(testing_tool("check '" GOLDEN "%s' --backend cuda --dtype fp16", names[i]), what, 0,
                    "layers.1.moe");
    }
    /* bf16 is what it computes in: fp32's tolerance is out of reach. */
    expect_exit(testing_tool("check '" GOLDEN "mixtral' --tol 1e-5"), "a tolerance too small", 1,
                "layers.0.moe differs");
    testing_process_t process = testing_tool("check '" GOLDEN "mixtral' --dtype fp32");
    cr_expect(!strncmp(process.errors, "not supported:", 14), "%s", process.errors);
    expect_exit(process, "fp32", 3, "fp32");
    expect_exit(testing_tool("check '" GOLDEN "mixtral' --backend cpu --dtype fp32"), "fp32 on the CPU", 0, "yes");
}

Test(gpu_tool, info)
{
    GPU_TEST_NEEDS_DEVICE();
    expect_exit(testing_tool("info '" GOLDEN "qwen2_moe' --ranks 2"), "info", 0, "qwen2_moe");
}

#if EPMOE_HAVE_MPI
/* Ranks that share a device; more ranks than some blocks have tokens to give. */
Test(gpu_tool, check_over_ranks)
{
    GPU_TEST_NEEDS_DEVICE();
    for (int32_t ranks = 2; ranks <= 3; ranks++)
        for (int i = 0; i < 7; i += 2) {
            char what[64];
            snprintf(what, sizeof what, "check %s over %d ranks", names[i], ranks);
            expect_exit(testing_run(240, "%s '" EPMOE_TEST_BIN "/moe_tool' check '" GOLDEN "%s'", testing_mpirun(ranks),
                                    names[i]),
                        what, 0, "layers.1.moe");
        }
}
#endif
