/* moe_tool op for attention, sampling and verification, as a user runs it: hand-worked values from file to file, and
 * what is refused. */
#include "tests/testing_tool.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

TestSuite(tool_op_attention, .init = testing_folder_make, .fini = testing_folder_remove, .timeout = 300);

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
#define FLOATS(tensor, dtype, tolerance, ...)                                                                          \
    expect_floats(tensor, dtype, sizeof((double[]){__VA_ARGS__}) / sizeof(double), (double[]){__VA_ARGS__}, tolerance)

static void expect_ints(const char *tensor, int64_t count, const int32_t *expected)
{
    int32_t *got = testing_read("out", tensor, EPMOE_I32, count);
    for (int64_t i = 0; i < count; i++)
        cr_assert_eq(got[i], expected[i], "%s[%lld] is %d: expected %d", tensor, (long long)i, got[i], expected[i]);
    free(got);
}
#define INTS(tensor, ...)                                                                                              \
    expect_ints(tensor, sizeof((int32_t[]){__VA_ARGS__}) / sizeof(int32_t), (int32_t[]){__VA_ARGS__})

/* One sequence of three tokens in blocks 1 and 0 of two slots; two query heads on one cache head of two columns. The
 * last two tokens ask. Keys (0,0), (ln 3,0), (0,ln 2); values (4,0), (8,4), (1,1); head 0 asks with (1,0), head 1 with
 * (0,1). Query at 1: weights 1/4 3/4 and 1/2 1/2; at 2: 1/5 3/5 1/5 and 1/4 1/4 1/2. */
#define LN2 0.693147181f
#define LN3 1.09861229f
static const float query[] = {1, 0, 0, 1, 1, 0, 0, 1, NAN, NAN, NAN, NAN};
static const int32_t table[] = {1, 0, -99}, start[] = {0, 2}, length[] = {3};
#define SEQUENCE                                                                                                       \
    {"q", EPMOE_F32, 3, {2, 2, 2}, query}, {"block_table", EPMOE_I32, 2, {1, 3}, table},                               \
        {"seq_lens", EPMOE_I32, 1, {1}, length},                                                                       \
    {                                                                                                                  \
        "query_start", EPMOE_I32, 1, {2}, start                                                                        \
    }
#define RESULT 7, 3, 6, 2, 0.8 + 4.8 + 0.2, 2.6, 3.5, 1.5

Test(tool_op_attention, layouts)
{
    const float keys[] = {0, LN2, NAN, NAN, 0, 0, LN3, 0}, values[] = {1, 1, NAN, NAN, 4, 0, 8, 4};
    TESTING_WRITE("in", SEQUENCE, {"key_cache", EPMOE_F32, 4, {2, 2, 1, 2}, keys},
                  {"value_cache", EPMOE_F32, 4, {2, 2, 1, 2}, values});
    run("attention", "--set layout=nhd scale=1");
    FLOATS("o", EPMOE_F32, 1e-6, RESULT);
    run("attention", "--set layout=nhd scale=1 window=0 kv_heads=1 value_dim=2");
    FLOATS("o", EPMOE_F32, 1e-6, RESULT);
    run("attention", "--set layout=nhd scale=1 window=1");
    FLOATS("o", EPMOE_F32, 1e-6, 8, 4, 8, 4, 1, 1, 1, 1);
    TESTING_WRITE("in", SEQUENCE, {"key_cache", EPMOE_F32, 4, {2, 1, 2, 2}, keys},
                  {"value_cache", EPMOE_F32, 4, {2, 1, 2, 2}, values});
    run("attention", "--set layout=hnd scale=1");
    FLOATS("o", EPMOE_F32, 1e-6, RESULT);
    /* v1: one column per pack, so that keys too lie column by column. */
    const float packed[] = {0, NAN, LN2, NAN, 0, LN3, 0, 0}, columns[] = {1, NAN, 1, NAN, 4, 8, 0, 4};
    TESTING_WRITE("in", SEQUENCE, {"key_cache", EPMOE_F32, 5, {2, 1, 2, 2, 1}, packed},
                  {"value_cache", EPMOE_F32, 4, {2, 1, 2, 2}, columns});
    run("attention", "--set scale=1 layout=v1");
    FLOATS("o", EPMOE_F32, 1e-6, RESULT);
    TESTING_WRITE("in", SEQUENCE, {"key_cache", EPMOE_F32, 5, {2, 1, 1, 2, 2}, keys},
                  {"value_cache", EPMOE_F32, 4, {2, 1, 2, 2}, columns});
    run("attention", "--set scale=1");
    FLOATS("o", EPMOE_F32, 1e-6, RESULT);
}

Test(tool_op_attention, sinks_default_scale_and_no_value_cache)
{
    /* The keys are the values; head 0 has a sink of weight 4, head 1 none. Scale 1/sqrt(2). */
    const float keys[] = {0, 0, 1.41421356f * LN3, 0}, sinks[] = {2 * LN2, -INFINITY};
    const int32_t two[] = {2}, blocks[] = {0, 1, 7};
    TESTING_WRITE("in", {"q", EPMOE_F32, 3, {2, 2, 2}, query}, {"block_table", EPMOE_I32, 2, {1, 3}, blocks},
                  {"seq_lens", EPMOE_I32, 1, {1}, two}, {"query_start", EPMOE_I32, 1, {2}, start},
                  {"key_cache", EPMOE_F32, 4, {2, 1, 1, 2}, keys}, {"sinks", EPMOE_F32, 1, {2}, sinks});
    run("attention", "--set layout=nhd value_dim=1");
    double value = 1.41421356 * (double)LN3;
    FLOATS("o", EPMOE_F32, 1e-6, 0, 0, value * 3 / 8, value / 2);
}

Test(tool_op_attention, fp8_cache_and_padding)
{
    /* Keys 0 and 2 * .5 * ln 3 ... 1 = 0x38, 2 = 0x40, 4 = 0x48; a row without a query is zeros. */
    const uint8_t keys[] = {0, 0x40}, values[] = {0x40, 0x48};
    const float k_scale[] = {0.5f * LN3}, v_scale[] = {2}, q[] = {1, NAN};
    const int32_t two[] = {2}, blocks[] = {0, 1}, one[] = {0, 1};
    uint16_t half[2] = {epmoei_f32_to_bf16(q[0]), epmoei_f32_to_bf16(q[1])};
    TESTING_WRITE("in", {"q", EPMOE_BF16, 3, {2, 1, 1}, half}, {"block_table", EPMOE_I32, 2, {1, 2}, blocks},
                  {"seq_lens", EPMOE_I32, 1, {1}, two}, {"query_start", EPMOE_I32, 1, {2}, one},
                  {"key_cache", EPMOE_F8_E4M3, 4, {2, 1, 1, 1}, keys},
                  {"value_cache", EPMOE_F8_E4M3, 4, {2, 1, 1, 1}, values}, {"k_scale", EPMOE_F32, 1, {1}, k_scale},
                  {"v_scale", EPMOE_F32, 1, {1}, v_scale});
    run("attention", "--set layout=hnd");
    FLOATS("o", EPMOE_BF16, 0, 7, 0);
}

Test(tool_op_attention, attention_refuses)
{
    const float keys[16] = {0};
    TESTING_WRITE("in", SEQUENCE, {"key_cache", EPMOE_F32, 4, {2, 2, 1, 2}, keys},
                  {"value_cache", EPMOE_F32, 4, {2, 2, 1, 2}, keys});
    refuses("attention", "", "key_cache|[2,2,1,2]|[N,Hk,D/x,bs,x]");
    refuses("attention", "--set layout=hnd", "block_table[0,2] is -99");
    refuses("attention", "--set layout=nhd kv_heads=2", "key_cache|[N,bs,Hk,D]");
    refuses("attention", "--set layout=nhd value_dim=1", "value_cache|[N,bs,Hk,Dv]");
    refuses("attention", "--set layout=nhd window=-2", "window|-2");
    refuses("attention", "--set layout=flash", "layout|v1,nhd,hnd");
    refuses("attention", "--set layout=nhd scale=nan", "scale");
    refuses("attention", "--set heads=2", "heads|layout, scale, window, kv_heads");
    TESTING_WRITE("in", {"q", EPMOE_F32, 3, {2, 2, 2}, query}, {"block_table", EPMOE_I32, 2, {1, 3}, table},
                  {"seq_lens", EPMOE_I32, 1, {1}, length}, {"query_start", EPMOE_I32, 1, {1}, start},
                  {"key_cache", EPMOE_F32, 4, {2, 2, 1, 2}, keys});
    refuses("attention", "--set layout=nhd", "query_start|1 elements|expected 2");
    TESTING_WRITE("in", SEQUENCE, {"key_cache", EPMOE_F32, 4, {2, 2, 1, 2}, keys});
    refuses("attention", "--set layout=nhd", "value_cache|missing|value_dim");
    refuses("attention", "--set layout=nhd value_dim=3", "value_dim is 3|head_dim 2");
    TESTING_WRITE("in", SEQUENCE, {"key_cache", EPMOE_F32, 4, {2, 2, 1, 2}, keys},
                  {"value_cache", EPMOE_BF16, 4, {2, 2, 1, 2}, keys});
    refuses("attention", "--set layout=nhd", "value_cache|dtype bf16|key_cache, f32");
    TESTING_WRITE("in", SEQUENCE, {"key_cache", EPMOE_F32, 4, {2, 2, 0, 2}, keys});
    refuses("attention", "--set layout=nhd value_dim=2", "key_cache|no heads");
    TESTING_WRITE("in", SEQUENCE, {"key_cache", EPMOE_F32, 4, {2, 2, 1, 2}, keys},
                  {"value_cache", EPMOE_F32, 4, {2, 2, 1, 0}, keys});
    refuses("attention", "--set layout=nhd", "value_cache|no columns");
    TESTING_WRITE("in", SEQUENCE, {"key_cache", EPMOE_F32, 5, {2, 1, 2, 2, 2}, keys});
    refuses("attention", "--set value_dim=2", "key_cache|2 packs of 2|2 columns");
}

/* Probabilities .1 .2 .3 .4, and a row without any. */
static const float rows[] = {0, LN2, LN3, 2 * LN2, -INFINITY, -INFINITY, NAN, -INFINITY};

Test(tool_op_attention, sample)
{
    const float uniform[] = {.29f, .5f};
    TESTING_WRITE("in", {"logits", EPMOE_F32, 2, {2, 4}, rows}, {"uniform", EPMOE_F32, 1, {2}, uniform});
    run("sample", "");
    INTS("token", 1, -1);
    run("sample", "--set top_k=3"); /* 2 3 4 of 9 */
    INTS("token", 2, -1);
    run("sample", "--set top_k=-1 min_p=0.3 temperature=1 top_p=1");
    INTS("token", 2, -1);
    run("sample", "--set top_p=0.35");
    INTS("token", 3, -1);
    run("sample", "--set temperature=0");
    INTS("token", 3, -1);
    run("sample", "--set temperature=0.5"); /* 1 4 9 16 of 30 */
    INTS("token", 2, -1);
    refuses("sample", "--set temperature=-1", "temperature|-1");
    refuses("sample", "--set temperature=nan", "temperature");
    refuses("sample", "--set top_p=0", "top_p");
    refuses("sample", "--set top_p=1.5", "top_p");
    refuses("sample", "--set min_p=1.5", "min_p");
    refuses("sample", "--set top_k=-2", "top_k");
    refuses("sample", "--set k=2", "'k'|temperature, top_k, top_p, min_p");
    const float bad[] = {0, 1.5f};
    TESTING_WRITE("in", {"logits", EPMOE_F32, 2, {2, 4}, rows}, {"uniform", EPMOE_F32, 1, {2}, bad});
    refuses("sample", "", "uniform[1] is 1.5");
    TESTING_WRITE("in", {"logits", EPMOE_F32, 2, {2, 4}, rows});
    refuses("sample", "", "uniform");
}

Test(tool_op_attention, spec_verify)
{
    /* Row 0: .5 < .5/.8 stands, .7 does not < .1/.25; difference 0 .15 .1 0. Row 1: all stand. */
    const int32_t ids[] = {1, 0, 1, 2};
    const float draft[] = {.1f, .8f, .1f, 0, .25f, .25f, .2f, .3f, .1f, .8f, .1f, 0, .25f, .25f, .2f, .3f};
    const float target[] = {.2f, .5f, .1f, .2f, .1f, .4f, .3f, .2f, .25f, .25f, .25f, .25f,
                            .2f, .5f, .1f, .2f, .1f, .4f, .3f, .2f, .25f, .25f, .25f, .25f};
    const float uniform[] = {.5f, .7f, .61f, .5f, .9f, .61f};
    TESTING_WRITE("in", {"draft_ids", EPMOE_I32, 2, {2, 2}, ids}, {"draft_probs", EPMOE_F32, 3, {2, 2, 4}, draft},
                  {"target_probs", EPMOE_F32, 3, {2, 3, 4}, target}, {"uniform", EPMOE_F32, 2, {2, 3}, uniform});
    run("spec_verify", "");
    INTS("tokens", 1, 2, -1, 1, 2, 2);
    INTS("accepted", 1, 2);
    refuses("spec_verify", "--set k=1", "'k'|none");
    TESTING_WRITE("in", {"draft_ids", EPMOE_I32, 2, {2, 2}, ids}, {"draft_probs", EPMOE_F32, 3, {2, 2, 4}, draft},
                  {"target_probs", EPMOE_F32, 3, {2, 2, 4}, target}, {"uniform", EPMOE_F32, 2, {2, 2}, uniform});
    refuses("spec_verify", "", "target_probs|2 places|expected 3");
    const int32_t bad[] = {1, 0, 1, 4};
    TESTING_WRITE("in", {"draft_ids", EPMOE_I32, 2, {2, 2}, bad}, {"draft_probs", EPMOE_F32, 3, {2, 2, 4}, draft},
                  {"target_probs", EPMOE_F32, 3, {2, 3, 4}, target}, {"uniform", EPMOE_F32, 2, {2, 3}, uniform});
    refuses("spec_verify", "", "draft_ids[1,1] is 4");
}
