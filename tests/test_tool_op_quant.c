/* moe_tool op on quantised weights: hand-worked files, and the failures that users of other libraries met. */
#include "tests/testing_tool.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

TestSuite(tool_op_quant, .init = testing_folder_make, .fini = testing_folder_remove, .timeout = 300);

static void run(const char *op, const char *settings)
{
    testing_process_t process = testing_tool("op %s --in in.safetensors --out out.safetensors %s", op, settings);
    cr_assert_eq(process.exit_code, 0, "op %s %s: exit %d: %s", op, settings, process.exit_code, process.errors);
    cr_assert_str_empty(process.output);
    cr_assert_str_empty(process.errors);
    testing_process_free(&process);
}

/* Exit 2, and each part of `needles` ("a|b") is in stderr. */
static void fails(const char *op, const char *settings, const char *needles)
{
    char part[128];
    testing_process_t process = testing_tool("op %s --in in.safetensors --out out.safetensors %s", op, settings);
    cr_assert_eq(process.exit_code, 2, "op %s %s: exit %d: %s", op, settings, process.exit_code, process.errors);
    while (*needles) {
        size_t length = strcspn(needles, "|");
        snprintf(part, sizeof part, "%.*s", (int)length, needles);
        cr_assert(strstr(process.errors, part), "op %s %s: stderr lacks '%s': %s", op, settings, part, process.errors);
        needles += length + (needles[length] == '|');
    }
    cr_assert(!testing_exists("out.safetensors"));
    testing_process_free(&process);
}

static void expect(const char *tensor, int64_t count, const double *expected)
{
    float *got = testing_read("out", tensor, EPMOE_F32, count);
    for (int64_t i = 0; i < count; i++)
        cr_assert((double)got[i] == expected[i], "%s[%d] is %g: expected %g", tensor, (int)i, (double)got[i],
                  expected[i]);
    free(got);
}
#define EXPECT(tensor, ...) expect(tensor, sizeof((double[]){__VA_ARGS__}) / sizeof(double), (double[]){__VA_ARGS__})

static void expect_all(const char *tensor, int64_t count, double value)
{
    float *got = testing_read("out", tensor, EPMOE_F32, count);
    for (int64_t i = 0; i < count; i++)
        cr_assert((double)got[i] == value, "%s[%d] is %g: expected %g", tensor, (int)i, (double)got[i], value);
    free(got);
}

/* Every code 9, scale .5: a stored zero is one less than the zero (v1), or the zero (v2); AWQ stores the real one. */
Test(tool_op_quant, zero_conventions)
{
    uint32_t words[8], sevens = 0x77777777u, eights = 0x88888888u, none = 0;
    uint16_t scales[8];
    for (int i = 0; i < 8; i++) words[i] = 0x99999999u, scales[i] = 0x3800;
    TESTING_WRITE("in", {"qweight", EPMOE_I32, 2, {1, 8}, words}, {"qzeros", EPMOE_I32, 2, {1, 1}, &sevens},
                  {"scales", EPMOE_F16, 2, {1, 8}, scales});
    run("dequant", "--set format=gptq group=8");
    expect_all("w", 64, .5);
    run("dequant", "--set format=gptq group=-1 zero_convention=v1");
    expect_all("w", 64, .5);
    run("dequant", "--set format=gptq group=8 zero_convention=v2"); /* follows the label */
    expect_all("w", 64, 1);
    TESTING_WRITE("in", {"qweight", EPMOE_I32, 2, {1, 8}, words}, {"qzeros", EPMOE_I32, 2, {1, 1}, &eights},
                  {"scales", EPMOE_F16, 2, {1, 8}, scales});
    run("dequant", "--set format=gptq group=8 zero_convention=v2");
    expect_all("w", 64, .5);
    TESTING_WRITE("in", {"qweight", EPMOE_I32, 2, {8, 1}, words}, {"qzeros", EPMOE_I32, 2, {1, 1}, &none},
                  {"scales", EPMOE_F16, 2, {1, 8}, scales});
    run("dequant", "--set format=awq group=8");
    expect_all("w", 64, 4.5);
}

Test(tool_op_quant, nibble_orders)
{
    const uint32_t awq[] = {0x75316420u}, sevens[] = {0x77777777u}, none[] = {0}, gptq[] = {0x76543210u};
    const float ones[] = {1, 1, 1, 1, 1, 1, 1, 1};
    TESTING_WRITE("in", {"qweight", EPMOE_I32, 2, {1, 1}, awq}, {"qzeros", EPMOE_I32, 2, {1, 1}, none},
                  {"scales", EPMOE_F32, 2, {1, 8}, ones});
    run("dequant", "--set format=awq");
    EXPECT("w", 0, 1, 2, 3, 4, 5, 6, 7); /* [8,1] */
    TESTING_WRITE("in", {"qweight", EPMOE_I32, 2, {1, 1}, sevens}, {"qzeros", EPMOE_I32, 2, {1, 1}, awq},
                  {"scales", EPMOE_F32, 2, {1, 8}, ones});
    run("dequant", "--set format=awq");
    EXPECT("w", 7, 6, 5, 4, 3, 2, 1, 0);
    TESTING_WRITE("in", {"qweight", EPMOE_I32, 2, {1, 1}, gptq}, {"qzeros", EPMOE_I32, 2, {1, 1}, none},
                  {"scales", EPMOE_F32, 2, {1, 1}, ones});
    run("dequant", "--set format=gptq zero_convention=v2");
    EXPECT("w", 0, 1, 2, 3, 4, 5, 6, 7); /* [1,8] */
}

/* weight_scale_inv multiplies, whatever it is called; without it there is no weight. */
Test(tool_op_quant, fp8_scale_names)
{
    enum { N = 128 };
    static uint8_t codes[N * N];
    memset(codes, 0x7E, sizeof codes);
    const float scale[] = {1.0f / 448};
    static const char *const names[] = {"weight_scale_inv", "weight_scale", "scale"};
    for (int i = 0; i < 3; i++) {
        TESTING_WRITE("in", {"weight", EPMOE_F8_E4M3, 2, {N, N}, codes}, {names[i], EPMOE_F32, 2, {1, 1}, scale});
        run("dequant", "--set format=fp8_block");
        expect_all("w", N * N, 1);
    }
    const uint16_t bf16[] = {0x3B12}; /* 0.0022277832..., the bf16 next to 1/448 */
    TESTING_WRITE("in", {"weight", EPMOE_F8_E4M3, 2, {N, N}, codes}, {"weight_scale_inv", EPMOE_BF16, 2, {1, 1}, bf16});
    run("dequant", "--set format=fp8_block");
    expect_all("w", N * N, 448 * 0x1.24p-9);
    TESTING_WRITE("in", {"weight", EPMOE_F8_E4M3, 2, {N, N}, codes});
    fails("dequant", "--set format=fp8_block", "'weight_scale_inv' is missing");
    fails("dequant", "", "'weight'|f8_e4m3|format=fp8_block");
    TESTING_WRITE("in", {"weight", EPMOE_F8_E4M3, 2, {N, N}, codes}, {"weight_amax", EPMOE_F32, 2, {1, 1}, scale});
    fails("dequant", "--set format=fp8_block", "'weight_amax' is unknown|weight_scale_inv");
    TESTING_WRITE("in", {"weight", EPMOE_F8_E4M3, 2, {N, N}, codes}, {"scale", EPMOE_F32, 2, {1, 1}, scale},
                  {"weight_scale", EPMOE_F32, 2, {1, 1}, scale});
    fails("dequant", "--set format=fp8_block", "'weight_scale'|'scale'|expected one");
}

/* [576,256] with scales [5,2]: five blocks of 128 rows, the last 64 high; not 116 rows each. */
Test(tool_op_quant, fp8_blocks_are_not_guessed)
{
    enum { N = 576, K = 256 };
    static uint8_t codes[1000 * K];
    float scales[16];
    memset(codes, 0x38, sizeof codes);
    for (int r = 0; r < 8; r++) scales[2 * r] = scales[2 * r + 1] = (float)(r + 1);
    TESTING_WRITE("in", {"weight", EPMOE_F8_E4M3, 2, {N, K}, codes},
                  {"weight_scale_inv", EPMOE_F32, 2, {5, 2}, scales});
    run("dequant", "--set format=fp8_block");
    float *w = testing_read("out", "w", EPMOE_F32, N * K);
    for (int i = 0; i < N * K; i++) cr_assert((double)w[i] == i / K / 128 + 1);
    free(w);
    TESTING_WRITE("in", {"weight", EPMOE_F8_E4M3, 2, {1000, K}, codes},
                  {"weight_scale_inv", EPMOE_F32, 2, {8, 2}, scales});
    run("dequant", "--set format=fp8_block");
    w = testing_read("out", "w", EPMOE_F32, 1000 * K);
    for (int i = 0; i < 1000 * K; i++) cr_assert((double)w[i] == i / K / 128 + 1);
    free(w);
    TESTING_WRITE("in", {"weight", EPMOE_F8_E4M3, 2, {N, K}, codes},
                  {"weight_scale_inv", EPMOE_F32, 2, {2, 5}, scales});
    fails("dequant", "--set format=fp8_block", "'weight_scale_inv'|[2,5]|expected [5,2]");
    TESTING_WRITE("in", {"weight", EPMOE_F8_E4M3, 2, {N, K}, codes},
                  {"weight_scale_inv", EPMOE_F32, 2, {4, 2}, scales});
    fails("dequant", "--set format=fp8_block", "'weight_scale_inv'|[4,2]|expected [5,2]");
}

Test(tool_op_quant, compressed_tensors_and_mxfp4)
{
    const uint32_t words[] = {0x76543210u, 0x00000F98u};
    const uint16_t scales[] = {0x3F80, 0x4000};
    const int64_t shape[] = {1, 11}, wrong[] = {1, 12};
    TESTING_WRITE("in", {"weight_packed", EPMOE_I32, 2, {1, 2}, words}, {"weight_scale", EPMOE_BF16, 2, {1, 2}, scales},
                  {"weight_shape", EPMOE_I64, 1, {2}, shape});
    run("dequant", "--set format=ct group=8");
    EXPECT("w", -8, -7, -6, -5, -4, -3, -2, -1, 0, 2, 14);
    fails("dequant", "--set format=ct group=4", "'weight_scale'|[1,2]|expected [1,3]");
    TESTING_WRITE("in", {"weight_packed", EPMOE_I32, 2, {1, 2}, words}, {"weight_scale", EPMOE_BF16, 2, {1, 2}, scales},
                  {"weight_shape", EPMOE_I32, 1, {2}, (const int32_t[]){1, 11}});
    run("dequant", "--set format=ct group=8");
    EXPECT("w", -8, -7, -6, -5, -4, -3, -2, -1, 0, 2, 14);
    TESTING_WRITE("in", {"x", EPMOE_F32, 2, {1, 11}, (const float[11]){1}},
                  {"counts", EPMOE_I32, 1, {1}, (int32_t[]){1}}, {"weight_packed", EPMOE_I32, 3, {1, 1, 2}, words},
                  {"weight_scale", EPMOE_BF16, 3, {1, 1, 2}, scales}, {"weight_shape", EPMOE_I64, 2, {0, 2}, shape});
    fails("grouped_gemm", "--set format=ct group=8", "'weight_shape'|[0,2]|expected [1,2]");
    TESTING_WRITE("in", {"x", EPMOE_F32, 2, {1, 11}, (const float[11]){1}},
                  {"counts", EPMOE_I32, 1, {1}, (int32_t[]){1}}, {"weight_packed", EPMOE_I32, 3, {1, 1, 2}, words},
                  {"weight_scale", EPMOE_BF16, 3, {1, 1, 2}, scales}, {"weight_shape", EPMOE_I64, 2, {1, 2}, wrong});
    fails("grouped_gemm", "--set format=ct group=8", "'weight_shape' holds 12: expected [1,11]");

    uint8_t blocks[16], exponent[] = {128, 0};
    for (int b = 0; b < 16; b++) blocks[b] = (uint8_t)(b << 4 | (15 - b));
    TESTING_WRITE("in", {"blocks", EPMOE_U8, 3, {1, 1, 16}, blocks}, {"scales", EPMOE_U8, 2, {1, 1}, exponent});
    run("dequant", "--set format=mxfp4");
    EXPECT("w", -12, 0, -8, 1, -6, 2, -4, 3, -3, 4, -2, 6, -1, 8, 0, 12, /* low nibble 15..8, high 0..7 */
           12, 0, 8, -1, 6, -2, 4, -3, 3, -4, 2, -6, 1, -8, 0, -12);
    TESTING_WRITE("in", {"blocks", EPMOE_U8, 3, {1, 1, 16}, blocks}, {"scales", EPMOE_U8, 2, {1, 2}, exponent});
    fails("dequant", "--set format=mxfp4", "'scales'|[1,2]|expected [1,1]");
}

Test(tool_op_quant, wrong_tensors)
{
    const uint32_t words[16] = {0}, zeros[4] = {0};
    const uint16_t scales[16] = {0};
    const int32_t g_idx[] = {0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 2}, low[16] = {-1};
    const safetensors_output_t qweight = {"qweight", EPMOE_I32, 2, {2, 8}, words},
                               qzeros = {"qzeros", EPMOE_I32, 2, {2, 1}, zeros},
                               scale = {"scales", EPMOE_F16, 2, {2, 8}, scales};
    TESTING_WRITE("in", qweight, qzeros, scale, {"g_idx", EPMOE_I32, 1, {16}, g_idx});
    fails("dequant", "--set format=gptq group=8", "g_idx[15] is 2: expected 0..1");
    TESTING_WRITE("in", qweight, qzeros, scale, {"g_idx", EPMOE_I32, 1, {16}, low});
    fails("dequant", "--set format=gptq group=8", "g_idx[0] is -1: expected 0..1");
    TESTING_WRITE("in", qweight, qzeros, scale, {"g_idx", EPMOE_I32, 1, {7}, low});
    fails("dequant", "--set format=gptq group=8", "'qweight'|[2,8]|expected [1,8]");
    TESTING_WRITE("in", qweight, qzeros, {"scales", EPMOE_F16, 2, {1, 8}, scales});
    fails("dequant", "--set format=gptq group=8", "'scales'|[1,8]|expected [2,8]");
    TESTING_WRITE("in", qweight, scale);
    fails("dequant", "--set format=gptq group=8", "'qzeros' is missing|gptq");
    TESTING_WRITE("in", qweight, qzeros, scale);
    fails("dequant", "--set format=gptq group=0", "group");
    fails("dequant", "", "'qweight'|set format");
    fails("dequant", "--set format=awq group=8", "expected");
    fails("dequant", "--set format=ct group=8", "'qweight' is none of format ct|weight_packed");
    TESTING_WRITE("in", {"qweight", EPMOE_F32, 2, {2, 8}, words}, qzeros, scale);
    fails("dequant", "--set format=gptq group=8", "'qweight' has dtype f32: expected I32");
}

/* Two experts as FP8, with and without FP8 activations: 465 = 448 in a block whose largest is 448 * 1. */
Test(tool_op_quant, grouped_gemm_with_fp8_activations)
{
    enum { K = 128 };
    static uint8_t codes[2 * K];
    static float x[2 * K];
    const float scales[] = {1, 2};
    const int32_t counts[] = {1, 1};
    memset(codes, 0x38, sizeof codes);
    x[0] = 448, x[1] = 17; /* the code next to 17 at scale 1 is 16 */
    x[K] = 17;             /* alone in its block: exact */
    TESTING_WRITE("in", {"x", EPMOE_F32, 2, {2, K}, x}, {"counts", EPMOE_I32, 1, {2}, counts},
                  {"w", EPMOE_F8_E4M3, 3, {2, 1, K}, codes}, {"weight_scale_inv", EPMOE_F32, 3, {2, 1, 1}, scales});
    run("grouped_gemm", "--set format=fp8_block");
    EXPECT("y", 465, 34);
    run("grouped_gemm", "--set format=fp8_block act=fp8");
    EXPECT("y", 464, 34);
}

/* An expert whose gate is 2x, up x and down 1: y = silu(2x) x, from GPTQ tensors stacked along a leading E. */
Test(tool_op_quant, experts_gptq)
{
    enum { D = 8 };
    /* Rows 0-7 gate, 8-15 up; code 8 + value on the diagonal with zero 8: words [k/8,n], nibble k of word n. */
    uint32_t w13[2][2 * D], w2[2][D], zeros13[2][2], zeros2[2];
    uint16_t scales13[2][2 * D], scales2[2][D];
    for (int e = 0; e < 2; e++)
        for (int n = 0; n < 2 * D; n++) {
            w13[e][n] = 0x88888888u + ((n < D ? 2u : 1u) << (4 * (n % D)));
            scales13[e][n] = 0x3C00;
            zeros13[e][n / 8] = 0x77777777u;
            w2[e][n % D] = 0x88888888u + (1u << (4 * (n % D)));
            scales2[e][n % D] = e ? 0x4000 : 0x3C00; /* expert 1's output doubles */
            zeros2[e] = 0x77777777u;
        }
    const float x[D] = {1, -1, 2, .5f, 0, 3, -.5f, 1.5f}, weights[] = {.25f, .5f};
    const int32_t ids[] = {1, 0};
    TESTING_WRITE("in", {"x", EPMOE_F32, 2, {1, D}, x}, {"ids", EPMOE_I32, 2, {1, 2}, ids},
                  {"weights", EPMOE_F32, 2, {1, 2}, weights}, {"w13.qweight", EPMOE_I32, 3, {2, 1, 2 * D}, w13},
                  {"w13.qzeros", EPMOE_I32, 3, {2, 1, 2}, zeros13},
                  {"w13.scales", EPMOE_F16, 3, {2, 1, 2 * D}, scales13}, {"w2.qweight", EPMOE_I32, 3, {2, 1, D}, w2},
                  {"w2.qzeros", EPMOE_I32, 3, {2, 1, 1}, zeros2}, {"w2.scales", EPMOE_F16, 3, {2, 1, D}, scales2});
    run("experts", "--set format=gptq group=-1");
    float *y = testing_read("out", "y", EPMOE_F32, D);
    for (int i = 0; i < D; i++) {
        double v = (double)x[i], h = 2 * v / (1 + exp(-2 * v)) * v, expected = (.25 * 2 + .5) * h;
        cr_assert(fabs((double)y[i] - expected) <= 1e-6 * fabs(expected), "y[%d] is %g: expected %g", i, (double)y[i],
                  expected);
    }
    free(y);
    fails("experts", "--set format=awq", "w13.qweight");
}

/* Gate and up of a fused FP8 projection, f no multiple of 128: blocks over the 2f rows, or anew at the up rows. */
Test(tool_op_quant, experts_fp8_fused_blocks)
{
    enum { F = 192, D = 128 };
    static uint8_t w13[2 * F * D], w2[D * F];
    static float x[D], scales[4] = {1, 2, 3, 4}, ones[4] = {1, 1, 1, 1};
    memset(w13, 0, sizeof w13);
    for (int r = 0; r < 2 * F; r++) w13[r * D] = 0x38; /* every row reads x[0] */
    for (int c = 0; c < F; c++) w2[c] = 0x38;          /* y[0] is the sum over f */
    x[0] = 1;
    const int32_t id = 0;
    const float weight = 1;
    for (int halves = 0; halves < 2; halves++) {
        TESTING_WRITE("in", {"x", EPMOE_F32, 2, {1, D}, x}, {"ids", EPMOE_I32, 2, {1, 1}, &id},
                      {"weights", EPMOE_F32, 2, {1, 1}, &weight}, {"w13.weight", EPMOE_F8_E4M3, 3, {1, 2 * F, D}, w13},
                      {"w13.weight_scale_inv", EPMOE_F32, 3, {1, halves ? 4 : 3, 1}, scales},
                      {"w2.weight", EPMOE_F8_E4M3, 3, {1, D, F}, w2},
                      {"w2.weight_scale_inv", EPMOE_F32, 3, {1, 1, 2}, ones});
        run("experts", "--set format=fp8_block");
        double expected = 0;
        for (int i = 0; i < F; i++) {
            double gate = i / 128 + 1, up = halves ? i / 128 + 3 : (F + i) / 128 + 1;
            expected += gate / (1 + exp(-gate)) * up;
        }
        float *y = testing_read("out", "y", EPMOE_F32, D);
        cr_assert(fabs((double)y[0] - expected) <= 1e-5 * expected, "%g: expected %g", (double)y[0], expected);
        free(y);
    }
}

Test(tool_op_quant, quantize_fp8)
{
    enum { K = 256 };
    static float x[4][K];
    for (int c = 128; c < K; c++) x[0][c] = 1;
    x[2][3] = -0.0f;
    x[3][1] = 1e-30f;
    TESTING_WRITE("in", {"x", EPMOE_F32, 2, {4, K}, x});
    run("quantize_fp8", "--set granularity=block128");
    EXPECT("scale", 0x1p-126, (double)(1.0f / 448), 0x1p-126, 0x1p-126, 0x1p-126, 0x1p-126, (double)(1e-30f / 448),
           0x1p-126);
    uint8_t *q = testing_read("out", "q", EPMOE_F8_E4M3, 4 * K);
    cr_assert(q[0] == 0 && q[128] == 0x7E && q[255] == 0x7E && q[2 * K + 3] == 0x80 && q[3 * K + 1] == 0x7E);
    free(q);
    run("quantize_fp8", "--set granularity=token pow2=1");
    EXPECT("scale", 0x1p-8, 0x1p-126, 0x1p-126, 0x1p-108); /* 1/448 is between 2^-9 and 2^-8 */
    run("quantize_fp8", "");
    EXPECT("scale", (double)(1.0f / 448));
    const float values[] = {448, 464, 465, 1000, -1000, INFINITY, NAN, 447.9f, 0x1p-9f, 0x1p-10f, 0x1.8p-9f, 12, 300},
                one = 1;
    const uint8_t codes[] = {0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7E, 0x7F, 0x7E, 0x01, 0x00, 0x02, 0x54, 0x79};
    TESTING_WRITE("in", {"x", EPMOE_F32, 2, {1, 13}, values}, {"scale", EPMOE_F32, 1, {1}, &one});
    run("quantize_fp8", "--set granularity=tensor");
    q = testing_read("out", "q", EPMOE_F8_E4M3, 13);
    for (int i = 0; i < 13; i++) cr_assert_eq(q[i], codes[i], "%g is 0x%02x", (double)values[i], q[i]);
    free(q);
    EXPECT("scale", 1);
    fails("quantize_fp8", "--set granularity=token", "granularity");
    fails("quantize_fp8", "--set granularity=row", "tensor,token,block128");
    TESTING_WRITE("in", {"x", EPMOE_F32, 2, {1, 13}, values}, {"scale", EPMOE_F32, 1, {2}, values});
    fails("quantize_fp8", "", "'scale'|[2]|expected [1]");
}
