/* moe_layer_bench --decoder on the CPU: prefill and decode of every family, alone and on two ranks, against the
 * reference; what it prints. */
#include "tests/testing.h"

#include <criterion/criterion.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BENCH EPMOE_TEST_BIN "/moe_layer_bench --backend cpu --decoder"

enum { kLimit = 120 };

static testing_process_t run_bench(int32_t ranks, const char *arguments)
{
    if (ranks == 0) return testing_run(kLimit, "%s %s", BENCH, arguments);
    return testing_run(kLimit, "%s %s %s", testing_mpirun(ranks), BENCH, arguments);
}

static double number(const json_t *object, const char *name)
{
    const json_t *value = json_object_get(object, name);
    cr_assert(json_is_number(value), "%s is missing or no number", name);
    return json_number_value(value);
}

static json_t *only_line(const testing_process_t *process, const char *what)
{
    json_error_t error;
    cr_assert_eq(process->exit_code, 0, "%s: exit %d: %s", what, process->exit_code, process->errors);
    json_t *object = json_loads(process->output, JSON_REJECT_DUPLICATES, &error);
    cr_assert(object, "%s: not one JSON object: %s", what, process->output);
    return object;
}

/* One case in JSON; returns it after the fields that every case must have. */
static json_t *run_case(int32_t ranks, const char *arguments)
{
    char text[1024];
    snprintf(text, sizeof text, "%s --iters 2 --warmup 1 --format json", arguments);
    testing_process_t process = run_bench(ranks, text);
    json_t *object = only_line(&process, arguments);
    cr_assert_eq(number(object, "wrong"), 0, "%s", arguments);
    cr_assert(number(object, "checked_rows") > 0 && number(object, "max_rel_err") >= 0);
    cr_assert(number(object, "us_median") > 0 && number(object, "floor_us") > 0);
    cr_assert(number(json_object_get(object, "stages_us"), "attention") > 0);
    cr_assert_eq(number(object, "ranks"), ranks ? ranks : 1);
    testing_process_free(&process);
    return object;
}

static const char *const families[] = {"mixtral", "qwen3_moe",   "qwen2_moe",  "glm4_moe",
                                       "gpt_oss", "deepseek_v2", "deepseek_v3"};
enum { kFamilies = sizeof families / sizeof families[0] };

/* gpt_oss: layer 0 has a window, layer 1 none. In fp32 a single missing key would show. */
Test(bench_decoder, every_family_in_fp32)
{
    for (int f = 0; f < kFamilies; f++)
        for (int32_t i = 0; i < 4; i++) {
            char arguments[512];
            snprintf(arguments, sizeof arguments, "--checkpoint %s/golden/%s --layer 1 --dtype fp32 --tokens 21%s",
                     EPMOE_TEST_DATA, families[f], i % 2 ? " --context 37" : "");
            json_t *object = run_case(i / 2 * 2, arguments);
            cr_assert_leq(number(object, "max_rel_err"), 1e-5, "%s", arguments);
            cr_assert_str_eq(json_string_value(json_object_get(object, "layer")), i % 2 ? "decode" : "prefill");
            if (i % 2) cr_assert_eq(number(object, "context"), 37);
            json_decref(object);
        }
}

/* Single outputs then exceed what other types are held to. */
Test(bench_decoder, quantised_activations)
{
    static const char *const checkpoints[] = {"deepseek_v3_fp8", "qwen3_moe_fp8"};
    for (int32_t i = 0; i < 8; i++) {
        char arguments[512];
        snprintf(arguments, sizeof arguments, "--checkpoint %s/golden/%s --act fp8 --tokens 9 --seed %d%s",
                 EPMOE_TEST_DATA, checkpoints[i % 2], i, i / 2 % 2 ? " --context 37" : "");
        json_t *object = run_case(i / 4 * 2, arguments);
        cr_assert_gt(number(object, "max_rel_err"), 2e-2, "%s: nothing was quantised", arguments);
        json_decref(object);
    }
}

Test(bench_decoder, sixteen_bits_and_windows)
{
    static const char *const cases[] = {
        "mixtral --dtype bf16 --tokens 300",
        "deepseek_v3 --dtype bf16 --tokens 70 --context 20",
        "deepseek_v2 --dtype fp16 --tokens 70",
        "gpt_oss --layer 0 --dtype fp32 --tokens 40",
        "gpt_oss --layer 0 --dtype fp32 --tokens 5 --context 40",
        "gpt_oss --layer 0 --dtype bf16 --tokens 40 --routing one-expert",
        "qwen3_moe --dtype fp32 --tokens 3 --context 1",
        "deepseek_v3_fp8 --dtype fp32 --tokens 9 --routing uniform",
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char arguments[512];
        snprintf(arguments, sizeof arguments, "--checkpoint %s/golden/%s", EPMOE_TEST_DATA, cases[i]);
        json_decref(run_case(i % 2 * 2, arguments));
    }
}

Test(bench_decoder, ranks_with_different_tokens)
{
    static const char *const cases[] = {"--tokens-per-rank 0,9", "--tokens-per-rank 30,3",
                                        "--tokens-per-rank 2,0 --context 8"};
    for (int i = 0; i < 3; i++) {
        char arguments[512];
        snprintf(arguments, sizeof arguments, "--checkpoint %s/golden/deepseek_v3 --dtype fp32 %s", EPMOE_TEST_DATA,
                 cases[i]);
        json_decref(run_case(2, arguments));
    }
}

/* The floor of a prefill and of a step, by hand from the shape of olmoe-1b-7b: 16 heads of 128, d 2048, bf16. */
Test(bench_decoder, random_weights_and_the_floor)
{
    const double d = 2048, f = 1024, attention = 4 * d * d, experts = 64 * 3 * d * f, router = 64 * d;
    json_t *prefill = run_case(0, "--model olmoe-1b-7b --tokens 40 --routing uniform");
    double flops = 2 * 40 * (attention + 8 * 3 * d * f + router) + 2 * 16 * 256 * (40 * 41 / 2);
    cr_assert_float_eq(number(prefill, "tflops") * number(prefill, "us_median") * 1e6 / flops, 1, 1e-6);
    json_decref(prefill);
    json_t *step = run_case(0, "--model olmoe-1b-7b --tokens 40 --context 64 --routing uniform");
    /* Norms in fp32, 40 * 8 slots reach every expert or nearly; the cache is read and 40 rows are written. */
    double cache = (40 * 64 + 40) * 2 * d * 2;
    double bytes = number(step, "memory_gbps") * 1e3 * number(step, "us_median");
    double most = 2 * (attention + experts + router) + cache + 4 * 40 * d + 4 * 320 * f + 1e6;
    cr_assert(bytes <= most && bytes >= 0.9 * most, "%g bytes, expected up to %g", bytes, most);
    json_decref(step);
}

Test(bench_decoder, quantised_experts)
{
    json_decref(run_case(2, "--model olmoe-1b-7b --tokens 3 --dtype fp8"));
    json_decref(run_case(0, "--model olmoe-1b-7b --tokens 3 --context 33 --dtype w4"));
}

Test(bench_decoder, nan_is_wrong_and_the_table_says_what_ran)
{
    char arguments[512];
    snprintf(arguments, sizeof arguments, "--checkpoint %s/golden/mixtral --tokens 4 --iters 1 --inject-nan",
             EPMOE_TEST_DATA);
    testing_process_t process = run_bench(0, arguments);
    cr_assert_eq(process.exit_code, 1);
    cr_assert(strstr(process.output, "FAIL"), "%s", process.output);
    testing_process_free(&process);
    snprintf(arguments, sizeof arguments, "--checkpoint %s/golden/mixtral --tokens 4 --context 9 --iters 1",
             EPMOE_TEST_DATA);
    process = run_bench(0, arguments);
    cr_assert_eq(process.exit_code, 0, "%s", process.errors);
    cr_assert(strstr(process.output, "one decoder layer") && strstr(process.output, "attention") &&
                  strstr(process.output, "one step of T sequences of 9 tokens each") && strstr(process.output, "PASS"),
              "%s", process.output);
    testing_process_free(&process);
}
