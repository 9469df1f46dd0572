/* moe_tool op for the dense ops, as a user runs it: hand-worked values from file to file, and what is refused. */
#include "tests/testing_tool.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

TestSuite(tool_op_dense, .init = testing_folder_make, .fini = testing_folder_remove, .timeout = 300);

static void run(const char *op, const char *settings)
{
    testing_process_t process =
        testing_tool("op %s --in in.safetensors --out out.safetensors --backend cpu %s", op, settings);
    cr_assert_eq(process.exit_code, 0, "op %s %s: exit %d: %s", op, settings, process.exit_code, process.errors);
    cr_assert_str_empty(process.output);
    cr_assert_str_empty(process.errors);
    testing_process_free(&process);
}

/* Exit code 2, a message with each of the needles (separated by '|'), no output file. */
static void refuses(const char *op, const char *settings, const char *needles)
{
    testing_process_t process =
        testing_tool("op %s --in in.safetensors --out out.safetensors --backend cpu %s", op, settings);
    cr_assert_eq(process.exit_code, 2, "op %s %s: exit %d: %s", op, settings, process.exit_code, process.errors);
    char copy[256], *rest = NULL;
    snprintf(copy, sizeof copy, "%s", needles);
    for (char *needle = strtok_r(copy, "|", &rest); needle; needle = strtok_r(NULL, "|", &rest))
        cr_assert(strstr(process.errors, needle), "op %s %s: stderr lacks '%s': %s", op, settings, needle,
                  process.errors);
    cr_assert(!testing_exists("out.safetensors"));
    testing_process_free(&process);
}

static void expect(const char *tensor, epmoe_dtype_t dtype, int64_t count, const double *expected, double tolerance)
{
    void *got = testing_read("out", tensor, dtype, count);
    for (int64_t i = 0; i < count; i++) {
        double value = (double)epmoei_load(got, dtype, i);
        cr_assert(fabs(value - expected[i]) <= tolerance, "%s[%lld] is %.9g: expected %.9g", tensor, (long long)i,
                  value, expected[i]);
    }
    free(got);
}
#define FLOATS(tensor, dtype, tolerance, ...)                                                                          \
    expect(tensor, dtype, sizeof((double[]){__VA_ARGS__}) / sizeof(double), (double[]){__VA_ARGS__}, tolerance)

static void codes(const char *tensor, int64_t count, const uint8_t *expected)
{
    uint8_t *got = testing_read("out", tensor, EPMOE_F8_E4M3, count);
    for (int64_t i = 0; i < count; i++)
        cr_assert_eq(got[i], expected[i], "%s[%lld] is %02x: expected %02x", tensor, (long long)i, got[i], expected[i]);
    free(got);
}
#define CODES(tensor, ...) codes(tensor, sizeof((uint8_t[]){__VA_ARGS__}), (uint8_t[]){__VA_ARGS__})

/* Row 1, 3 with the weights 1, 2, and a residual that makes it 7, 1: both have mean square 5 or 25. */
Test(tool_op_dense, rms_norm)
{
    const float x[] = {1, 3}, weight[] = {1, 2}, residual[] = {6, -2}, zero[] = {0, 0}, scale = 0.25f;
    TESTING_WRITE("in", {"x", EPMOE_F32, 2, {1, 2}, x}, {"weight", EPMOE_F32, 1, {2}, weight});
    run("rms_norm", "--set eps=1e-12");
    FLOATS("y", EPMOE_F32, 1e-6, 1 / sqrt(5), 6 / sqrt(5));
    run("rms_norm", "--set eps=4 offset=1");
    FLOATS("y", EPMOE_F32, 1e-6, 2. / 3, 3.);
    run("rms_norm", "--set quant=token eps=1e-12");
    FLOATS("scale", EPMOE_F32, 1e-9, 6 / sqrt(5) / 448);
    CODES("y", 0x69, 0x7E); /* 448 / 6 = 74.67 is nearest to 72 */
    refuses("rms_norm", "--set quant=tensor", "scale|missing");
    refuses("rms_norm", "--set eps=-1", "eps");
    refuses("rms_norm", "--set quant=row", "quant|none,tensor,token,block128");

    TESTING_WRITE("in", {"x", EPMOE_F32, 2, {1, 2}, x}, {"weight", EPMOE_F32, 1, {2}, weight},
                  {"residual", EPMOE_F32, 2, {1, 2}, residual}, {"scale", EPMOE_F32, 1, {1}, &scale});
    run("rms_norm", "--set quant=tensor eps=1e-12");
    FLOATS("residual", EPMOE_F32, 0, 7, 1);
    FLOATS("scale", EPMOE_F32, 0, 0.25);
    CODES("y", 0x4B, 0x3D); /* 7 / 5 * 4 = 5.6 is nearest to 5.5, 2 / 5 * 4 = 1.6 to 1.625 */
    refuses("rms_norm", "", "scale|given|quant=tensor");

    TESTING_WRITE("in", {"x", EPMOE_F32, 2, {1, 2}, x}, {"weight", EPMOE_F32, 1, {2}, weight},
                  {"scale", EPMOE_F32, 1, {1}, zero});
    refuses("rms_norm", "--set quant=tensor", "scale is 0");
    TESTING_WRITE("in", {"x", EPMOE_F32, 2, {1, 2}, x}, {"weight", EPMOE_F32, 1, {2}, weight},
                  {"scale", EPMOE_F32, 1, {2}, zero});
    refuses("rms_norm", "--set quant=tensor", "scale|[2]|[1]");
    TESTING_WRITE("in", {"x", EPMOE_F32, 2, {1, 2}, x}, {"weight", EPMOE_F32, 1, {1}, weight});
    refuses("rms_norm", "", "weight|[1]|[d=2]");
    TESTING_WRITE("in", {"x", EPMOE_F32, 2, {1, 2}, x}, {"weight", EPMOE_F32, 1, {2}, weight},
                  {"residual", EPMOE_BF16, 2, {1, 2}, residual});
    refuses("rms_norm", "", "residual|bf16|f32");
    TESTING_WRITE("in", {"x", EPMOE_BF16, 2, {0, 2}, NULL}, {"weight", EPMOE_F32, 1, {2}, weight});
    run("rms_norm", "");
    free(testing_read("out", "y", EPMOE_BF16, 0));
}

static const float rope_table[] = {1, 1, 0, 0, 0.5403023f, 0.99995f, 0.8414710f, 0.009999833f};

static void write_rope(epmoe_dtype_t positions_dtype, int64_t position)
{
    const float q[] = {1, 0, 0, 0, 5, 6, 7, 8}, k[] = {0, 1, 0, 0, 5, 6, 7, 8};
    int32_t narrow = (int32_t)position;
    TESTING_WRITE("in", {"q", EPMOE_F32, 3, {1, 1, 8}, q}, {"k", EPMOE_F32, 3, {1, 1, 8}, k},
                  {"positions", positions_dtype, 1, {1}, positions_dtype == EPMOE_I64 ? (void *)&position : &narrow},
                  {"cos_sin", EPMOE_F32, 2, {2, 4}, rope_table});
}

Test(tool_op_dense, rope)
{
    for (int wide = 0; wide < 2; wide++) {
        epmoe_dtype_t dtype = wide ? EPMOE_I64 : EPMOE_I32;
        write_rope(dtype, 1);
        run("rope", "");
        FLOATS("q", EPMOE_F32, 1e-6, 0.540302, 0, 0.841471, 0, 5, 6, 7, 8);
        FLOATS("k", EPMOE_F32, 1e-6, 0, 0.99995, 0, 0.00999983, 5, 6, 7, 8);
        run("rope", "--set style=gptj rotary_dim=4");
        FLOATS("q", EPMOE_F32, 1e-6, 0.540302, 0.841471, 0, 0, 5, 6, 7, 8);
        run("rope", "--set style=gptj inverse=1");
        FLOATS("q", EPMOE_F32, 1e-6, 0.540302, -0.841471, 0, 0, 5, 6, 7, 8);
        write_rope(dtype, 0);
        run("rope", "");
        FLOATS("q", EPMOE_F32, 0, 1, 0, 0, 0, 5, 6, 7, 8);
        write_rope(dtype, 2);
        refuses("rope", "", "positions[0] is 2|0 to 1");
        write_rope(dtype, -1);
        refuses("rope", "", "positions[0] is -1|0 to 1");
    }
    refuses("rope", "--set rotary_dim=3", "rotary_dim is 3");
    refuses("rope", "--set rotary_dim=10", "rotary_dim is 10");
    refuses("rope", "--set rotary_dim=8", "rotary_dim is 8|width 4");
    refuses("rope", "--set style=llama", "style|neox,gptj");
}

Test(tool_op_dense, qk_norm_rope)
{
    const float qkv[] = {3, 4, -6, 8, 9, 10}, q_weight[] = {1, 2}, k_weight[] = {1, 0.5f};
    const float table[] = {1, 0, 0, 1}; /* position 1: a quarter turn */
    const int64_t position = 1;
    TESTING_WRITE("in", {"qkv", EPMOE_F32, 3, {1, 3, 2}, qkv}, {"q_weight", EPMOE_F32, 1, {2}, q_weight},
                  {"k_weight", EPMOE_F32, 1, {2}, k_weight}, {"positions", EPMOE_I64, 1, {1}, &position},
                  {"cos_sin", EPMOE_F32, 2, {2, 2}, table});
    run("qk_norm_rope", "--set heads=1 kv_heads=1 eps=1e-12");
    FLOATS("qkv", EPMOE_F32, 1e-6, -8 / sqrt(12.5), 3 / sqrt(12.5), -4 / sqrt(50), -6 / sqrt(50), 9, 10);
    refuses("qk_norm_rope", "--set heads=1", "kv_heads");
    refuses("qk_norm_rope", "--set heads=2 kv_heads=1", "heads is 2|kv_heads is 1|3");
}

/* Two blocks of four slots, one head of 8, key packs of 4; slots 0, -1 and 5, two rows of padding. */
static void write_cache(epmoe_dtype_t cache_dtype, bool v1, const float *k_scale, int64_t third)
{
    float rows[5 * 8];
    char cache[2 * 4 * 8 * 4];
    const int64_t slots[] = {0, -1, third};
    for (int i = 0; i < 5 * 8; i++) rows[i] = i / 8 == 0 || i / 8 == 2 ? (float)(i + 1) : NAN;
    memset(cache, 0x41, sizeof cache); /* 12.078431 as F32, 2.25 as E4M3 */
    safetensors_output_t tensors[] = {{"key", EPMOE_F32, 3, {5, 1, 8}, rows},
                                      {"value", EPMOE_F32, 3, {5, 1, 8}, rows},
                                      {"key_cache", cache_dtype, 5, {2, 1, 2, 4, 4}, cache},
                                      {"value_cache", cache_dtype, 4, {2, 1, 8, 4}, cache},
                                      {"slots", EPMOE_I64, 1, {3}, slots},
                                      {"k_scale", EPMOE_F32, 1, {1}, k_scale}};
    if (!v1) {
        tensors[2] = (safetensors_output_t){"key_cache", cache_dtype, 4, {2, 4, 1, 8}, cache};
        tensors[3] = (safetensors_output_t){"value_cache", cache_dtype, 4, {2, 4, 1, 8}, cache};
    }
    testing_write("in", tensors, k_scale ? 6 : 5);
}

Test(tool_op_dense, cache_write)
{
    write_cache(EPMOE_F32, true, NULL, 5);
    run("cache_write", "--set layout=v1");
    float *key = testing_read("out", "key_cache", EPMOE_F32, 64),
          *value = testing_read("out", "value_cache", EPMOE_F32, 64);
    for (int slot = 0; slot < 8; slot++)
        for (int i = 0; i < 8; i++) {
            float expected = slot == 0 ? (float)(i + 1) : slot == 5 ? (float)(17 + i) : 12.078431f;
            cr_assert_eq(key[((slot / 4 * 2 + i / 4) * 4 + slot % 4) * 4 + i % 4], expected);
            cr_assert_eq(value[(slot / 4 * 8 + i) * 4 + slot % 4], expected);
        }
    free(key), free(value);

    const float half = 0.5f, zero = 0, negative = -1, nan = NAN;
    write_cache(EPMOE_F8_E4M3, false, &half, 5);
    run("cache_write", "--set layout=nhd kv=fp8");
    uint8_t *stored = testing_read("out", "key_cache", EPMOE_F8_E4M3, 64);
    const uint8_t first[] = {0x40, 0x48, 0x4C, 0x50, 0x52, 0x54, 0x56, 0x58}; /* 2, 4, 6, ... 16 */
    for (int i = 0; i < 64; i++)
        cr_assert(i < 8 ? stored[i] == first[i] : i / 8 == 5 ? stored[i] != 0x41 : stored[i] == 0x41, "[%d]", i);
    free(stored);
    refuses("cache_write", "--set layout=nhd", "key_cache|f8_e4m3|f32|kv=auto");
    refuses("cache_write", "--set layout=v1 kv=fp8", "key_cache|[2,4,1,8]|[B,Hk,D/x,bs,x]");
    refuses("cache_write", "--set layout=hnd kv=fp8", "key_cache|[2,4,1,8]|[B,Hk,bs,D]");
    write_cache(EPMOE_F8_E4M3, false, &zero, 5);
    refuses("cache_write", "--set layout=nhd kv=fp8", "k_scale is 0");
    write_cache(EPMOE_F8_E4M3, false, &negative, 5);
    refuses("cache_write", "--set layout=nhd kv=fp8", "k_scale is -1");
    write_cache(EPMOE_F8_E4M3, false, &nan, 5);
    refuses("cache_write", "--set layout=nhd kv=fp8", "k_scale is");
    write_cache(EPMOE_F32, false, NULL, 8);
    refuses("cache_write", "--set layout=nhd", "slots[2] is 8|-1 to 7");
    write_cache(EPMOE_F32, false, NULL, -2);
    refuses("cache_write", "--set layout=nhd", "slots[2] is -2");
    refuses("cache_write", "--set layout=paged", "layout|v1,nhd,hnd");
}
