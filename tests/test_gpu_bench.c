/* moe_layer_bench on a device: right results in graphs and outside, and times that mean what they say. */
#include "base/device.h"
#include "tests/testing.h"

#include <criterion/criterion.h>
#include <jansson.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#define BENCH EPMOE_TEST_BIN "/moe_layer_bench"

enum { kLimit = 300 };

static const char *const k_golden[] = {"deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss",
                                       "mixtral",     "qwen2_moe",   "qwen3_moe"};
enum { kNumGolden = sizeof k_golden / sizeof k_golden[0] };

static void need_device(void)
{
    if (epmoei_device_count() == 0) cr_skip_test("no device: %s", epmoei_device_absence());
}

static testing_process_t run_bench(const char *format, ...)
{
    char arguments[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(arguments, sizeof arguments, format, args);
    va_end(args);
    return testing_run(kLimit, "%s %s", BENCH, arguments);
}

/* Line `index` of stdout as JSON. */
static json_t *json_line(const testing_process_t *process, int32_t index)
{
    json_error_t error;
    const char *line = process->output;
    for (int32_t i = 0; i < index && line; i++) {
        line = strchr(line, '\n');
        if (line) line++;
    }
    json_t *object = line ? json_loads(line, JSON_REJECT_DUPLICATES | JSON_DISABLE_EOF_CHECK, &error) : NULL;
    cr_assert(json_is_object(object), "no line %d in '%s': %s", index, process->output, process->errors);
    return object;
}

static double number(const json_t *object, const char *name)
{
    const json_t *value = json_object_get(object, name);
    cr_assert(json_is_number(value), "%s is missing or no number", name);
    return json_number_value(value);
}

static double stage(const json_t *object, const char *name)
{
    return number(json_object_get(object, "stages_us"), name);
}

static void assert_right(const testing_process_t *process, int32_t cases, bool graph)
{
    cr_assert_eq(process->exit_code, 0, "exit %d: %s", process->exit_code, process->errors);
    for (int32_t i = 0; i < cases; i++) {
        json_t *object = json_line(process, i);
        cr_assert_eq(number(object, "wrong"), 0);
        cr_assert_str_eq(json_string_value(json_object_get(object, "backend")), "cuda");
        cr_assert_str_eq(json_string_value(json_object_get(object, "device")), epmoei_device_info(0)->name);
        cr_assert_eq(json_is_true(json_object_get(object, "graph")), graph);
        cr_assert_gt(number(object, "empty_graph_us"), 0);
        cr_assert(number(object, "us_min") > 0 && number(object, "us_min") <= number(object, "us_median") &&
                  number(object, "us_median") <= number(object, "us_max"));
        cr_assert(number(object, "read_ceiling_gbps") > 0 && number(object, "floor_us") > 0);
        /* What is read and written at once, of a memory that does one thing at a time. */
        double copy = number(object, "copy_ceiling_gbps") / number(object, "read_ceiling_gbps");
        cr_assert(copy > 0.3 && copy < 1.1, "a copy at %g of the read bandwidth", copy);
        json_decref(object);
    }
}

Test(gpu_bench, every_checkpoint_with_and_without_a_graph)
{
    need_device();
    for (int32_t i = 0; i < kNumGolden; i++)
        for (int32_t graph = 0; graph < 2; graph++) {
            testing_process_t process =
                run_bench("--checkpoint %s/golden/%s --tokens 1,12 --graph %d --iters 3 "
                          "--dtype %s --routing %s --format json",
                          EPMOE_TEST_DATA, k_golden[i], graph, i % 2 ? "fp16" : "bf16", graph ? "uniform" : "router");
            assert_right(&process, 2, graph == 1);
            for (int32_t line = 0; line < 2; line++) {
                json_t *object = json_line(&process, line);
                cr_assert(stage(object, "router") > 0 && stage(object, "align") > 0 && stage(object, "gemm1") > 0 &&
                          stage(object, "gemm2") > 0 && stage(object, "combine") > 0);
                cr_assert_eq(stage(object, "dispatch"), 0);
                cr_assert_eq(number(object, "checked_rows"), line ? 12 : 1);
                json_decref(object);
            }
            testing_process_free(&process);
        }
}

/* Whole decoder layers: prefill and a step, as a graph and without one, of the golden attentions and of the others. */
Test(gpu_bench, decoder_layers)
{
    need_device();
    for (int32_t i = 0; i < kNumGolden + 2; i++)
        for (int32_t kind = 0; kind < 4; kind++) {
            static const char *const models[] = {"olmoe-1b-7b", "llama4-scout"};
            const int32_t graph = kind % 2;
            char what[512];
            if (i < kNumGolden)
                snprintf(what, sizeof what, "--checkpoint %s/golden/%s", EPMOE_TEST_DATA, k_golden[i]);
            else
                snprintf(what, sizeof what, "--model %s", models[i - kNumGolden]);
            testing_process_t process =
                run_bench("%s --decoder --tokens 3,70 %s --graph %d --iters 3 --dtype %s --format json", what,
                          kind / 2 ? "--context 130" : "", graph, i % 2 ? "fp16" : "bf16");
            assert_right(&process, 2, graph == 1);
            for (int32_t line = 0; line < 2; line++) {
                json_t *object = json_line(&process, line);
                cr_assert(stage(object, "attention") > 0 && stage(object, "router") > 0 && stage(object, "gemm1") > 0);
                cr_assert_lt(stage(object, "attention"), number(object, "us_max") + 1000);
                json_decref(object);
            }
            testing_process_free(&process);
        }
}

/* A model that does not fit into a cache: nothing runs faster than the floor, or the flush or the clock is at fault. */
Test(gpu_bench, a_public_model_against_its_floor)
{
    need_device();
    const double tokens[] = {1, 16, 256};
    for (int32_t graph = 0; graph < 2; graph++) {
        testing_process_t process =
            run_bench("--model qwen3-30b-a3b --tokens 1,16,256 --graph %d --format json", graph);
        assert_right(&process, 3, graph == 1);
        for (int32_t line = 0; line < 3; line++) {
            json_t *object = json_line(&process, line);
            cr_assert_eq(number(object, "checked_rows"), tokens[line]);
            cr_assert_eq(number(object, "iters"), 20);
            cr_assert_eq(number(object, "warmup"), 5);
            cr_assert_lt(number(object, "floor_fraction"), 1.02, "%g us, floor %g us", number(object, "us_median"),
                         number(object, "floor_us"));
            double sum = 0;
            static const char *const stages[] = {"router", "align", "gemm1", "gemm2", "combine", "shared"};
            for (size_t i = 0; i < sizeof stages / sizeof stages[0]; i++) sum += stage(object, stages[i]);
            cr_assert_geq(sum, 0.5 * number(object, "us_min"), "the stages take %g us", sum);
            json_decref(object);
        }
        testing_process_free(&process);
    }
}

/* Counted by hand: mixtral's golden layer has d 64, f 96, E 8, k 2, and the device stores bf16. */
Test(gpu_bench, floor_counts_what_the_device_reads)
{
    need_device();
    testing_process_t process = run_bench(
        "--checkpoint %s/golden/mixtral --routing one-expert --tokens 5 --iters 1 --format json", EPMOE_TEST_DATA);
    assert_right(&process, 1, true);
    json_t *object = json_line(&process, 0);
    double bytes = 2 * (2 * 3 * 64 * 96 + 8 * 64) + 2 * 5 * 64 * 2 + 2 * 10 * 96 * 2;
    double flops = 6.0 * 10 * 64 * 96 + 2.0 * 5 * 8 * 64, seconds = bytes / (1e9 * number(object, "read_ceiling_gbps"));
    if (json_is_number(json_object_get(object, "gemm_ceiling_tflops")))
        seconds = fmax(seconds, flops / (1e12 * number(object, "gemm_ceiling_tflops")));
    json_t *sustained = json_object_get(object, "gemm_sustained_tflops");
    cr_assert_eq(json_is_number(sustained), json_is_number(json_object_get(object, "gemm_ceiling_tflops")));
    if (json_is_number(sustained))
        cr_assert(json_number_value(sustained) > 0 &&
                  json_number_value(sustained) < 1.05 * number(object, "gemm_ceiling_tflops"));
    cr_assert(fabs(number(object, "floor_us") * 1e-6 / seconds - 1) < 1e-6);
    cr_assert_eq(number(object, "ranks_per_device"), 1);
    json_decref(object);
    testing_process_free(&process);
}

Test(gpu_bench, sleep_is_timed_and_nan_is_wrong)
{
    need_device();
    for (int32_t graph = 0; graph < 2; graph++) {
        testing_process_t process =
            run_bench("--checkpoint %s/golden/qwen3_moe --tokens 4 --iters 3 --graph %d --inject-sleep 0:50 "
                      "--format json",
                      EPMOE_TEST_DATA, graph);
        assert_right(&process, 1, graph == 1);
        json_t *object = json_line(&process, 0);
        cr_assert(number(object, "us_min") >= 50000 && number(object, "us_median") < 5e6);
        json_decref(object);
        testing_process_free(&process);

        process = run_bench("--checkpoint %s/golden/qwen3_moe --tokens 4 --iters 1 --graph %d --inject-nan "
                            "--format json",
                            EPMOE_TEST_DATA, graph);
        cr_assert_eq(process.exit_code, 1, "%s", process.errors);
        object = json_line(&process, 0);
        cr_assert_gt(number(object, "wrong"), 0);
        json_decref(object);
        testing_process_free(&process);
    }
}

Test(gpu_bench, no_tokens)
{
    need_device();
    testing_process_t process =
        run_bench("--checkpoint %s/golden/deepseek_v3 --tokens 0 --iters 2 --format json", EPMOE_TEST_DATA);
    cr_assert_eq(process.exit_code, 0, "%s", process.errors);
    json_t *object = json_line(&process, 0);
    cr_assert_eq(number(object, "wrong"), 0);
    json_decref(object);
    testing_process_free(&process);
}

/* Random experts in each quantised format, against the reference. */
Test(gpu_bench, quantised_random_weights)
{
    need_device();
    static const char *const dtypes[] = {"fp8", "w4", "mxfp4"};
    for (int i = 0; i < 3; i++) {
        testing_process_t process =
            run_bench("--model olmoe-1b-7b --tokens 1,40 --iters 3 --format json --dtype %s", dtypes[i]);
        cr_assert_eq(process.exit_code, 0, "%s: exit %d: %s", dtypes[i], process.exit_code, process.errors);
        assert_right(&process, 2, true);
        testing_process_free(&process);
    }
}

Test(gpu_bench, single_ops)
{
    need_device();
    static const char *const ops[] = {"topk",         "align", "permute", "unpermute",    "grouped_gemm",
                                      "silu_and_mul", "sum",   "router",  "quantize_fp8", "dequant"};
    static const char *const options[] = {"--model olmoe-1b-7b --graph 0", "--model deepseek-v3", "--dtype fp16"};
    for (size_t i = 0; i < sizeof ops / sizeof ops[0]; i++)
        for (size_t j = 0; j < sizeof options / sizeof options[0]; j++) {
            /* That model's weights alone take longer to make than all the rest. */
            if (!strcmp(ops[i], "grouped_gemm") && strstr(options[j], "deepseek")) continue;
            testing_process_t process =
                run_bench("--op %s %s --tokens 1,33,300 --iters 3 --format json", ops[i], options[j]);
            cr_assert_eq(process.exit_code, 0, "%s %s: %s", ops[i], options[j], process.errors);
            assert_right(&process, 3, strstr(options[j], "--graph 0") == NULL);
            for (int32_t line = 0; line < 3; line++) {
                json_t *object = json_line(&process, line);
                cr_assert_str_eq(json_string_value(json_object_get(object, "op")), ops[i]);
                cr_assert(number(object, "gbps") > 0);
                double calls = number(object, "calls");
                cr_assert(strstr(options[j], "--graph 0") ? calls == 1 : calls >= 1 && calls <= 20);
                json_decref(object);
            }
            testing_process_free(&process);
        }
}

/* Several ops of one start, at a shape that no model has: chains of calls, each with the results of a call alone. */
Test(gpu_bench, ops_in_a_chain)
{
    need_device();
    static const char *const ops[] = {
        "rms_norm_alone", "rms_norm",          "rms_norm_fp8", "silu_and_mul", "silu_and_mul_fp8", "rope",
        "qk_norm_rope",   "rope_cache_write",  "cache_write",  "attention",    "prefill",          "linear",
        "linear_fp8",     "linear_fp8_blocks", "sample",       "spec_verify"};
    enum { kOps = sizeof ops / sizeof ops[0], kCases = 2 };
    char list[512] = "";
    for (size_t i = 0; i < kOps; i++) snprintf(list + strlen(list), sizeof list - strlen(list), ",%s", ops[i]);
    testing_process_t process =
        run_bench("--model mixtral-8x7b --op %s --top-k 1 --hidden 7168 --intermediate 14336 --heads 56:8:128 "
                  "--tokens 1,16 --iters 3 --format json",
                  list + 1);
    assert_right(&process, kOps * kCases, true);
    for (int32_t line = 0; line < kOps * kCases; line++) {
        json_t *object = json_line(&process, line);
        const char *op = json_string_value(json_object_get(object, "op"));
        cr_assert_str_eq(op, ops[line / kCases]);
        cr_assert_eq(number(object, "tokens"), line % kCases ? 16 : 1);
        cr_assert_eq(number(object, "hidden"), 7168);
        bool large = !strcmp(op, "attention") || !strncmp(op, "linear", 6) || !strcmp(op, "sample") ||
                     !strcmp(op, "spec_verify");
        if (!large) cr_assert_eq(number(object, "calls"), 20, "%s: %g calls", op, number(object, "calls"));
        cr_assert_geq(number(object, "calls"), 1);
        /* Memory bounds all of them here. */
        cr_assert_gt(number(object, "copy_fraction"), 0);
        json_decref(object);
    }
    testing_process_free(&process);
}

/* A call in a chain cannot be faster than memory, or its data were not cold; and it is not billed for the graph. */
Test(gpu_bench, a_chain_is_cold)
{
    need_device();
    testing_process_t process = run_bench("--model mixtral-8x7b --op rms_norm_alone,cache_write --tokens 1,8192 "
                                          "--check=0 --format json");
    cr_assert_eq(process.exit_code, 0, "%s", process.errors);
    for (int32_t line = 0; line < 4; line++) {
        json_t *object = json_line(&process, line);
        cr_assert_lt(number(object, "floor_fraction"), 1.02);
        if (line % 2 == 0) cr_assert_lt(number(object, "us_median"), number(object, "empty_graph_us") + 4);
        json_decref(object);
    }
    testing_process_free(&process);
}

Test(gpu_bench, table_names_the_device)
{
    need_device();
    testing_process_t process = run_bench("--checkpoint %s/golden/mixtral --tokens 4 --iters 1", EPMOE_TEST_DATA);
    cr_assert_eq(process.exit_code, 0, "%s", process.errors);
    const char *const parts[] = {
        epmoei_device_info(0)->name, "SMs",         "1 rank per device", "memory read", "copy", "empty graph",
        "replay of a graph",         "PASS: 1 case"};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        cr_assert(strstr(process.output, parts[i]), "no '%s' in:\n%s", parts[i], process.output);
    testing_process_free(&process);
}

Test(gpu_bench, refusals)
{
    need_device();
    testing_process_t process = run_bench("--dtype fp32");
    cr_assert_eq(process.exit_code, 3);
    cr_assert(strstr(process.errors, "not supported: --dtype fp32"), "%s", process.errors);
    testing_process_free(&process);
    /* The CPU is there for who asks for it. */
    process =
        run_bench("--backend cpu --dtype fp32 --checkpoint %s/golden/mixtral --iters 1 --format json", EPMOE_TEST_DATA);
    cr_assert_eq(process.exit_code, 0, "%s", process.errors);
    json_t *object = json_line(&process, 0);
    cr_assert_str_eq(json_string_value(json_object_get(object, "backend")), "cpu");
    cr_assert(json_is_null(json_object_get(object, "device")));
    json_decref(object);
    testing_process_free(&process);
}

#if defined(EPMOE_HAVE_MPI) && EPMOE_HAVE_MPI

/* Through the host, so that the ranks may share a device. */
Test(gpu_bench, several_ranks)
{
    need_device();
    const int32_t ranks[] = {2, 3};
    for (int32_t i = 0; i < 2; i++) {
        testing_process_t process = testing_run(
            kLimit, "%s %s --transport mpi --checkpoint %s/golden/deepseek_v3 --tokens 1,12 --iters 3 --format json",
            testing_mpirun(ranks[i]), BENCH, EPMOE_TEST_DATA);
        assert_right(&process, 2, false);
        json_t *object = json_line(&process, 1);
        cr_assert_eq(number(object, "ranks"), ranks[i]);
        bool shared = ranks[i] > epmoei_device_count();
        cr_assert_eq(number(object, "ranks_per_device") > 1, shared);
        cr_assert_eq(strstr(process.errors, "ranks share devices") != NULL, shared, "%s", process.errors);
        cr_assert(stage(object, "dispatch") > 0 && stage(object, "combine") > 0);
        json_decref(object);
        testing_process_free(&process);
    }
    testing_process_t process =
        testing_run(kLimit,
                    "%s %s --transport mpi --checkpoint %s/golden/mixtral --tokens-per-rank 0,7 --iters 2 "
                    "--format json",
                    testing_mpirun(2), BENCH, EPMOE_TEST_DATA);
    assert_right(&process, 1, false);
    testing_process_free(&process);
    process = testing_run(kLimit, "%s %s --transport mpi --graph 1 --checkpoint %s/golden/mixtral", testing_mpirun(2),
                          BENCH, EPMOE_TEST_DATA);
    cr_assert_eq(process.exit_code, 3, "exit %d: %s", process.exit_code, process.errors);
    cr_assert(strstr(process.errors, "--graph 1: the mpi transport cannot be captured"), "%s", process.errors);
    cr_assert_str_empty(process.output);
    testing_process_free(&process);
}

/* Replays of a graph over p2p, with ranks on one device or on several, and the exchange alone. */
Test(gpu_bench, several_ranks_over_p2p)
{
    need_device();
    static const char *const k_tokens[] = {
        "--tokens 1,12",           "--tokens 600",         "--tokens-per-rank 0,7",      "--tokens 3,200 --wire fp8",
        "--tokens 600 --wire fp8", "--tokens 3 --graph 0", "--tokens 1,600 --comm-sms 2"};
    static const int32_t k_cases[] = {2, 1, 1, 2, 1, 1, 2};
    for (size_t i = 0; i < sizeof k_tokens / sizeof k_tokens[0]; i++) {
        testing_process_t process = testing_run(
            kLimit, "%s %s --transport p2p --checkpoint %s/golden/deepseek_v3 %s --iters 3 --warmup 1 --format json",
            testing_mpirun(2), BENCH, EPMOE_TEST_DATA, k_tokens[i]);
        assert_right(&process, k_cases[i], i != 5);
        testing_process_free(&process);
    }
    double bytes[2] = {0, 0};
    for (int32_t coded = 0; coded < 2; coded++) {
        testing_process_t process = testing_run(
            kLimit,
            "%s %s --transport p2p --op exchange --model olmoe-1b-7b --tokens 1,600 --wire %s --iters 2 --warmup 1 "
            "--format json",
            testing_mpirun(2), BENCH, coded ? "fp8" : "dtype");
        cr_assert_eq(process.exit_code, 0, "exit %d: %s", process.exit_code, process.errors);
        int32_t lines = 0;
        for (const char *at = process.output; (at = strchr(at, '\n')); at++) lines++;
        for (int32_t i = 0; i < lines; i++) {
            json_t *object = json_line(&process, i);
            cr_expect_eq(number(object, "wrong"), 0);
            cr_expect_gt(number(object, "dispatch_us"), 0);
            const char *base = json_string_value(json_object_get(object, "base"));
            const char *transport = json_string_value(json_object_get(object, "transport"));
            cr_expect(base && transport, "%s", process.output);
            cr_expect_float_eq(number(object, "pair_us"), number(object, "dispatch_us") + number(object, "combine_us"),
                               0.002);
            if (base && transport && !strcmp(base, transport)) cr_expect_eq(number(object, "pair_speedup"), 1);
            bytes[coded] += number(object, "dispatch_wire_bytes");
            json_decref(object);
        }
        cr_expect_geq(lines, 4, "p2p and mpi, two sizes: %s", process.output);
        testing_process_free(&process);
    }
    /* Rows of 2048 columns: bf16, or codes and 16 scales; 8 ids and weights with either. */
    cr_expect_float_eq(bytes[1] / bytes[0], (2048 + 64 + 64) / (4096 + 64.0), 1e-6);
}

#endif
