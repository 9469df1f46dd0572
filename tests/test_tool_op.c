/* moe_tool op, as a user runs it: values worked by hand, from file to file. */
#include "tests/testing_tool.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

TestSuite(tool_op, .init = testing_folder_make, .fini = testing_folder_remove, .timeout = 300);

/* Runs an op from in.safetensors to out.safetensors and expects success and silence. */
static void run(const char *op, const char *settings)
{
    testing_process_t process = testing_tool("op %s --in in.safetensors --out out.safetensors %s", op, settings);
    cr_assert_eq(process.exit_code, 0, "op %s %s: exit %d: %s", op, settings, process.exit_code, process.errors);
    cr_assert_str_empty(process.output);
    cr_assert_str_empty(process.errors);
    testing_process_free(&process);
}

static void expect_ints(const char *tensor, int64_t count, const int32_t *expected)
{
    int32_t *got = testing_read("out", tensor, EPMOE_I32, count);
    for (int64_t i = 0; i < count; i++)
        cr_assert_eq(got[i], expected[i], "%s[%lld] is %d: expected %d", tensor, (long long)i, got[i], expected[i]);
    free(got);
}

/* |got - expected| <= tolerance * |expected|, so that 0 must be exact and a NaN fails. */
static void expect_floats(const char *tensor, epmoe_dtype_t dtype, int64_t count, const double *expected,
                          double tolerance)
{
    void *got = testing_read("out", tensor, dtype, count);
    for (int64_t i = 0; i < count; i++) {
        double value = (double)epmoei_load(got, dtype, i);
        cr_assert(fabs(value - expected[i]) <= tolerance * fabs(expected[i]), "%s[%lld] is %.9g: expected %.9g", tensor,
                  (long long)i, value, expected[i]);
    }
    free(got);
}

#define INTS(tensor, ...)                                                                                              \
    expect_ints(tensor, sizeof((int32_t[]){__VA_ARGS__}) / sizeof(int32_t), (int32_t[]){__VA_ARGS__})
#define FLOATS(tensor, dtype, tolerance, ...)                                                                          \
    expect_floats(tensor, dtype, sizeof((double[]){__VA_ARGS__}) / sizeof(double), (double[]){__VA_ARGS__}, tolerance)

static const epmoe_dtype_t dtypes[] = {EPMOE_F32, EPMOE_BF16, EPMOE_F16};
static double ulp(epmoe_dtype_t dtype) { return dtype == EPMOE_F32 ? 1e-6 : dtype == EPMOE_BF16 ? 0x1p-8 : 0x1p-11; }

/* values rounded to dtype, to be freed. */
static void *packed(epmoe_dtype_t dtype, const float *values, int64_t count)
{
    void *data = calloc((size_t)count + 1, 4);
    epmoei_from_f32(data, values, dtype, count);
    return data;
}

/* --------------------------------------------------------------------------------------------------------- router */

Test(tool_op, topk_scale_and_renormalise)
{
    /* Probabilities .1 .2 .3 .4. */
    const float logits[] = {0, 0.693147181f, 1.09861229f, 1.38629436f};
    TESTING_WRITE("in", {"logits", EPMOE_F32, 2, {1, 4}, logits});
    run("topk", "--set k=2");
    INTS("ids", 3, 2);
    FLOATS("weights", EPMOE_F32, 1e-6, .4, .3);
    run("topk", "--set k=2 scale=2.5 renormalize=0");
    FLOATS("weights", EPMOE_F32, 1e-6, 1., .75);
    run("topk", "--set k=2 --set renormalize=1");
    FLOATS("weights", EPMOE_F32, 1e-6, 4. / 7, 3. / 7);
    run("topk", "--set k=2 renormalize=1 --set scale=2.5");
    INTS("ids", 3, 2);
    FLOATS("weights", EPMOE_F32, 1e-6, 10. / 7, 7.5 / 7);
    run("topk", "--set scoring=topk_softmax k=2 scale=2.5 --backend cpu");
    FLOATS("weights", EPMOE_F32, 1e-6, 10. / 7, 7.5 / 7);
    run("topk", "--set scoring=sigmoid k=2"); /* sigmoid(ln n) = n / (n + 1) */
    FLOATS("weights", EPMOE_F32, 1e-6, .8, .75);
    run("topk", "--set scoring=sqrtsoftplus k=2"); /* softplus(ln n) = ln(n + 1) */
    FLOATS("weights", EPMOE_F32, 1e-6, sqrt(log(5)), sqrt(log(4)));
}

Test(tool_op, topk_groups)
{
    const float zeros[8] = {0};
    const float bias[] = {-2, -3, -5, -5, -5, -5, -5, -5};
    TESTING_WRITE("in", {"logits", EPMOE_F32, 2, {1, 8}, zeros}, {"bias", EPMOE_F32, 1, {8}, bias});
    run("topk", "--set k=2 n_group=4 topk_group=1 scoring=sigmoid renormalize=1");
    INTS("ids", 0, 1);
    FLOATS("weights", EPMOE_F32, 1e-6, .5, .5);

    /* By the sum of two the second group is best (1.2), by the largest the first (1.0). */
    const float scores[] = {1.0f, 0, 0.6f, 0.6f};
    TESTING_WRITE("in", {"logits", EPMOE_F32, 2, {1, 4}, zeros}, {"bias", EPMOE_F32, 1, {4}, scores});
    run("topk", "--set k=1 n_group=2 topk_group=1 scoring=sigmoid");
    INTS("ids", 2);
    run("topk", "--set k=1 n_group=2 topk_group=1 scoring=sigmoid group_score=max");
    INTS("ids", 0);
}

Test(tool_op, topk_ties_take_the_lower_id)
{
    static const int32_t sizes[] = {384, 60}, ones[2][3] = {{7, 100, 383}, {7, 30, 59}};
    for (int s = 0; s < 2; s++)
        for (int d = 0; d < 3; d++) {
            float values[2 * 384] = {0};
            for (int i = 0; i < 3; i++) values[sizes[s] + ones[s][i]] = 1;
            void *logits = packed(dtypes[d], values, 2 * sizes[s]);
            TESTING_WRITE("in", {"logits", dtypes[d], 2, {2, sizes[s]}, logits});
            run("topk", "--set k=8");
            INTS("ids", 0, 1, 2, 3, 4, 5, 6, 7, ones[s][0], ones[s][1], ones[s][2], 0, 1, 2, 3, 4);
            free(logits);
        }
    /* 1 and 1 + 2^-10 are one number in bf16 and two in fp32. */
    float values[60] = {0};
    values[3] = 1;
    values[50] = 1 + 0x1p-10f;
    for (int d = 0; d < 2; d++) {
        void *logits = packed(dtypes[d], values, 60);
        TESTING_WRITE("in", {"logits", dtypes[d], 2, {1, 60}, logits});
        run("topk", "--set k=2");
        if (dtypes[d] == EPMOE_F32)
            INTS("ids", 50, 3);
        else
            INTS("ids", 3, 50);
        free(logits);
    }
}

static const int32_t expert_counts[] = {5, 60, 72, 96, 160, 192, 320, 384, 576, 1000, 1024, 1025, 2048, 4096};
#define EXPERT_COUNTS ((int32_t)(sizeof expert_counts / sizeof expert_counts[0]))

Test(tool_op, topk_expert_counts)
{
    for (int32_t c = 0; c < EXPERT_COUNTS; c++) {
        int32_t e = expert_counts[c];
        epmoe_dtype_t dtype = dtypes[c % 3];
        float *values = calloc((size_t)e * 2, sizeof *values);
        values[e - 1] = 5, values[e - 2] = 4, values[e / 2] = 3, values[0] = 2;
        for (int32_t i = 0; i < e; i++) values[e + i] = -INFINITY;
        values[e + 1] = -7, values[e + e - 1] = 7;
        void *logits = packed(dtype, values, 2 * e);
        TESTING_WRITE("in", {"logits", dtype, 2, {2, e}, logits});
        run("topk", "--set k=4");
        int32_t *ids = testing_read("out", "ids", EPMOE_I32, 8);
        const int32_t expected[] = {e - 1, e - 2, e / 2, 0, e - 1, 1};
        for (int i = 0; i < 6; i++) cr_assert_eq(ids[i], expected[i], "E %d: ids[%d] is %d", e, i, ids[i]);
        for (int i = 6; i < 8; i++) {
            cr_assert(ids[i] >= 0 && ids[i] < e);
            for (int j = 4; j < i; j++) cr_assert_neq(ids[i], ids[j]);
        }
        free(ids), free(logits), free(values);
    }
}

Test(tool_op, topk_not_a_number)
{
    const float logits[] = {NAN, NAN, NAN, -INFINITY, 1, NAN, 3, 2};
    TESTING_WRITE("in", {"logits", EPMOE_F32, 2, {2, 4}, logits});
    run("topk", "--set k=2 renormalize=1");
    INTS("ids", 0, 1, 2, 3);
    FLOATS("weights", EPMOE_F32, 1e-6, 0, 0, 1 / (1 + exp(-1)), 1 / (1 + exp(1)));
}

Test(tool_op, no_tokens)
{
    TESTING_WRITE("in", {"logits", EPMOE_BF16, 2, {0, 4}, NULL});
    run("topk", "--set k=2");
    free(testing_read("out", "ids", EPMOE_I32, 0));
    free(testing_read("out", "weights", EPMOE_F32, 0));
    TESTING_WRITE("in", {"x", EPMOE_BF16, 2, {0, 4}, NULL});
    run("silu_and_mul", "");
    free(testing_read("out", "y", EPMOE_BF16, 0));
    TESTING_WRITE("in", {"ids", EPMOE_I32, 2, {0, 2}, NULL});
    run("align", "--set num_experts=2 block=2");
    INTS("num_post_padded", 0);
    INTS("sorted_ids", 0, 0);
    INTS("expert_ids", -1);
}

/* ---------------------------------------------------------------------------------------------------------- align */

Test(tool_op, align_with_a_map)
{
    const int64_t ids[] = {0, 4, 1, 2, 7, -1}; /* I64 here, I32 elsewhere */
    const int32_t map[] = {-1, -1, -1, -1, 0, 1, 2, 3};
    TESTING_WRITE("in", {"ids", EPMOE_I64, 2, {3, 2}, ids}, {"expert_map", EPMOE_I32, 1, {8}, map});
    run("align", "--set num_experts=8 block=2");
    /* P = round_up(6 + 8 * 1, 2) = 14. */
    INTS("sorted_ids", 1, 6, 4, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6);
    INTS("expert_ids", 0, 3, -1, -1, -1, -1, -1);
    INTS("num_post_padded", 4);
}

Test(tool_op, align_is_stable)
{
    int32_t ids[19], at = 0;
    const int32_t counts[] = {2, 3, 0, 6, 8};
    for (int32_t e = 0; e < 5; e++)
        for (int32_t i = 0; i < counts[e]; i++) ids[at++] = e;
    TESTING_WRITE("in", {"ids", EPMOE_I32, 2, {19, 1}, ids});
    run("align", "--set num_experts=5 block=4");
    /* P = round_up(19 + 5 * 3, 4) = 36. */
    INTS("sorted_ids", 0, 1, 19, 19, 2, 3, 4, 19, 5, 6, 7, 8, 9, 10, 19, 19, 11, 12, 13, 14, 15, 16, 17, 18, 19, 19, 19,
         19, 19, 19, 19, 19, 19, 19, 19, 19);
    INTS("expert_ids", 0, 1, 3, 3, 4, 4, -1, -1, -1);
    INTS("num_post_padded", 24);

    const int32_t mixed[] = {1, 0, 1, 0};
    TESTING_WRITE("in", {"ids", EPMOE_I32, 2, {2, 2}, mixed});
    run("align", "--set num_experts=2");
    INTS("sorted_ids", 1, 3, 0, 2);
    INTS("expert_ids", 0, 0, 1, 1);
}

Test(tool_op, align_expert_counts)
{
    for (int32_t c = 0; c < EXPERT_COUNTS; c++) {
        int32_t e = expert_counts[c], *ids = calloc((size_t)e, sizeof *ids);
        for (int32_t i = 0; i < e; i++) ids[i] = e - 1 - i;
        TESTING_WRITE("in", {"ids", EPMOE_I32, 2, {e, 1}, ids});
        char settings[64];
        snprintf(settings, sizeof settings, "--set num_experts=%d block=16", e);
        run("align", settings);
        INTS("num_post_padded", 16 * e);
        int32_t *sorted = testing_read("out", "sorted_ids", EPMOE_I32, 16 * e);
        int32_t *experts = testing_read("out", "expert_ids", EPMOE_I32, e);
        for (int32_t i = 0; i < 16 * e; i++) cr_assert_eq(sorted[i], i % 16 ? e : e - 1 - i / 16);
        for (int32_t i = 0; i < e; i++) cr_assert_eq(experts[i], i);
        free(sorted), free(experts), free(ids);
    }
}

/* ----------------------------------------------------------------------------------------------------------- GEMM */

Test(tool_op, grouped_gemm_groups)
{
    /* x rows (1,2), (3,4), (5,6), (7,8); expert 0 has two rows, 1 none, 2 one: row 3 is nobody's. */
    const float x[] = {1, 2, 3, 4, 5, 6, 7, 8};
    const float w[] = {1, 0, 0, 1, 1, 1, /**/ 9, 9, 9, 9, 9, 9, /**/ 2, 0, 0, 2, -1, 1};
    const int32_t counts[] = {2, 0, 1};
    for (int d = 0; d < 3; d++) {
        void *xs = packed(dtypes[d], x, 8), *ws = packed(dtypes[d], w, 18);
        const char *format = dtypes[d] == EPMOE_F32    ? "--set format=fp32"
                             : dtypes[d] == EPMOE_BF16 ? "--set format=bf16 act=none"
                                                       : "";
        TESTING_WRITE("in", {"x", dtypes[d], 2, {4, 2}, xs}, {"counts", EPMOE_I32, 1, {3}, counts},
                      {d == 1 ? "weight" : "w", dtypes[d], 3, {3, 3, 2}, ws});
        run("grouped_gemm", format);
        FLOATS("y", dtypes[d], 0, 1, 2, 3, 3, 4, 7, 10, 12, 1, 0, 0, 0);
        free(xs), free(ws);
    }
}

/* Experts that compute (e+1) * x: the gate is the constant 32, whose silu is 32, and w2 divides by it. */
static void write_scaling_experts(epmoe_dtype_t dtype, int32_t tokens, int32_t k, const float *x, const int32_t *ids,
                                  const float *weights, epmoe_dtype_t weights_dtype)
{
    float w13[4 * 4 * 2] = {0}, w2[4 * 2 * 2] = {0}, b13[4 * 4] = {0};
    for (int e = 0; e < 4; e++)
        for (int i = 0; i < 2; i++) {
            w13[e * 8 + (2 + i) * 2 + i] = 1;
            w2[e * 4 + i * 2 + i] = (float)(e + 1) / 32;
            b13[e * 4 + i] = 32;
        }
    void *xs = packed(dtype, x, tokens * 2), *w13s = packed(dtype, w13, 32), *w2s = packed(dtype, w2, 16);
    void *b13s = packed(dtype, b13, 16), *ws = packed(weights_dtype, weights, tokens * k);
    TESTING_WRITE("in", {"x", dtype, 2, {tokens, 2}, xs}, {"ids", EPMOE_I32, 2, {tokens, k}, ids},
                  {"weights", weights_dtype, 2, {tokens, k}, ws}, {"w13", dtype, 3, {4, 4, 2}, w13s},
                  {"w2", dtype, 3, {4, 2, 2}, w2s}, {"b13", dtype, 2, {4, 4}, b13s});
    free(xs), free(w13s), free(w2s), free(b13s), free(ws);
}

Test(tool_op, experts_same_expert_twice)
{
    enum { T = 9, K = 4 };
    float x[T * 2], weights[T * K];
    int32_t ids[T * K];
    double expected[T * 2];
    for (int t = 0; t < T; t++) {
        memcpy(ids + t * K, (int32_t[]){3, 3, 1, 0}, sizeof(int32_t[K]));
        memcpy(weights + t * K, (float[]){.25f, .25f, .3f, .2f}, sizeof(float[K]));
        for (int i = 0; i < 2; i++) {
            x[t * 2 + i] = (float)(t + 1) * (i ? -1 : 1);
            expected[t * 2 + i] = 2.8 * (double)x[t * 2 + i];
        }
    }
    for (int d = 0; d < 3; d++) {
        write_scaling_experts(dtypes[d], T, K, x, ids, weights, EPMOE_F32);
        run("experts", "--set activation=silu");
        expect_floats("y", dtypes[d], T * 2, expected, ulp(dtypes[d]));
    }
}

Test(tool_op, experts_unused_slots)
{
    /* A slot that is not used: its weight is not read. A token without any slot: zeros. */
    const float x[] = {1, 2, 3, 4, 5, 6}, weights[] = {NAN, .5f, NAN, NAN, 2, NAN};
    const int32_t ids[] = {-1, 3, -1, -1, 1, -1};
    write_scaling_experts(EPMOE_F32, 3, 2, x, ids, weights, EPMOE_F32);
    run("experts", "");
    FLOATS("y", EPMOE_F32, 1e-6, 2, 4, 0, 0, 20, 24);
    const float halves[] = {0, .5f, 0, 0, 2, 0};
    write_scaling_experts(EPMOE_F32, 3, 2, x, ids, halves, EPMOE_BF16);
    run("experts", "");
    FLOATS("y", EPMOE_F32, 1e-6, 2, 4, 0, 0, 20, 24);
}

/* ---------------------------------------------------------------------------------------------------- elementwise */

Test(tool_op, activations)
{
    const float x[] = {1, -INFINITY, -2, 2, 3, 0.5f}; /* gates 1, -inf, -2; ups 2, 3, 0.5 */
    TESTING_WRITE("in", {"x", EPMOE_F32, 2, {1, 6}, x});
    run("silu_and_mul", "");
    FLOATS("y", EPMOE_F32, 1e-6, 2 / (1 + exp(-1)), 0, -1 / (1 + exp(2)));
    run("silu_and_mul", "--set limit=0.75"); /* gate .75 and up .75; up .75; up .5 */
    FLOATS("y", EPMOE_F32, 1e-6, .5625 / (1 + exp(-.75)), 0, -1 / (1 + exp(2)));
    run("silu_and_mul", "--set activation=gelu");
    FLOATS("y", EPMOE_F32, 2e-6, 2 * .841344746, 0, -.5 * 2 * .0227501319);
    run("silu_and_mul", "--set activation=gelu_tanh");
    FLOATS("y", EPMOE_F32, 2e-6, 2 * .841191990608, 0, .5 * -.045402305912);
    run("silu_and_mul", "--set activation=swiglu_oai");
    FLOATS("y", EPMOE_F32, 2e-6, 3 / (1 + exp(-1.702)), 0, -3 / (1 + exp(3.404)));
    run("silu_and_mul", "--set activation=swiglu_oai alpha=1 limit=0.25"); /* gate .25, ups .25 */
    FLOATS("y", EPMOE_F32, 2e-6, .3125 / (1 + exp(-.25)), 0, -2.5 / (1 + exp(2)));
}

Test(tool_op, activation_of_any_width)
{
    static const int32_t widths[] = {1, 4, 12, 352, 1234};
    for (int d = 1; d < 3; d++)
        for (size_t w = 0; w < sizeof widths / sizeof widths[0]; w++) {
            int32_t width = widths[w], rows = 3;
            float *values = calloc((size_t)rows * 2 * width, sizeof *values);
            double *expected = calloc((size_t)rows * width, sizeof *expected);
            for (int32_t i = 0; i < rows * 2 * width; i++) values[i] = i / width % 2 ? 2 : 1;
            /* 1.4621172: the nearest numbers of each type. */
            for (int32_t i = 0; i < rows * width; i++) expected[i] = dtypes[d] == EPMOE_BF16 ? 1.4609375 : 1.4619140625;
            void *x = packed(dtypes[d], values, rows * 2 * width);
            TESTING_WRITE("in", {"x", dtypes[d], 2, {rows, 2 * width}, x});
            run("silu_and_mul", "");
            expect_floats("y", dtypes[d], rows * width, expected, 0);
            free(x), free(expected), free(values);
        }
}

Test(tool_op, sum_of_slots)
{
    const float y[] = {1, 2, 10, 20, 100, 200, /**/ -1, -2, -10, -20, -100, -200}, weights[] = {1, .5f, 2, 0, 1, .25f};
    TESTING_WRITE("in", {"y", EPMOE_F32, 3, {2, 3, 2}, y});
    run("sum", "");
    FLOATS("out", EPMOE_F32, 0, 111, 222, -111, -222);
    void *halves = packed(EPMOE_BF16, weights, 6), *rows = packed(EPMOE_F16, y, 12);
    TESTING_WRITE("in", {"y", EPMOE_F16, 3, {2, 3, 2}, rows}, {"weights", EPMOE_BF16, 2, {2, 3}, halves});
    run("sum", "");
    FLOATS("out", EPMOE_F16, 0, 206, 412, -35, -70);
    free(halves), free(rows);
}

/* ----------------------------------------------------------------------------------------------------------- files */

Test(tool_op, tensors_at_any_address)
{
    const float logits[] = {0, 1, 3, 2}, bias[] = {0, 0, -9, 0};
    for (int32_t shift = 1; shift < 8; shift += 2) {
        TESTING_WRITE("in", {"logits", EPMOE_F32, 2, {1, 4}, logits}, {"bias", EPMOE_F32, 1, {4}, bias});
        testing_shift("in", shift);
        run("topk", "--set k=2");
        INTS("ids", 3, 1);
    }
}

Test(tool_op, an_old_output_is_replaced)
{
    const float y[] = {1, 2};
    TESTING_WRITE("in", {"y", EPMOE_F32, 3, {1, 1, 2}, y});
    TESTING_WRITE("out", {"stale", EPMOE_F32, 1, {2}, y});
    run("sum", "");
    FLOATS("out", EPMOE_F32, 0, 1, 2);
    testing_process_t process = testing_run(10, "ls '%s'", testing_path(""));
    cr_assert_str_eq(process.output, "in.safetensors\nout.safetensors\n"); /* no temporary file is left */
    testing_process_free(&process);
}
