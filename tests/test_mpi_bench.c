/* moe_layer_bench as its users start it: what it prints, what it refuses, and that its numbers mean what they say. */
#include "tests/bench_testing.h"

#include <math.h>
#include <unistd.h>

Test(bench, json_has_every_field_at_any_rank_count)
{
    static const char *const numbers[] = {"tokens_per_rank", "us_median",          "us_min",     "us_max",
                                          "floor_us",        "floor_fraction",     "tflops",     "gbps",
                                          "wrong",           "load_max_over_mean", "max_rel_err"};
    static const char *const stages[] = {"router", "align", "dispatch", "gemm1", "act", "gemm2", "combine"};
    const int32_t ranks[] = {0, 1, 3, 8};
    for (int32_t i = 0; i < 4; i++) {
        testing_process_t process =
            run_bench(ranks[i], "%s --tokens 1,12 --iters 3 --warmup 1 --format json", golden("qwen3_moe"));
        assert_good(&process, 2);
        for (int32_t line = 0; line < 2; line++) {
            json_t *object = json_line(&process, line);
            for (size_t f = 0; f < sizeof numbers / sizeof numbers[0]; f++) number(object, numbers[f]);
            for (size_t f = 0; f < sizeof stages / sizeof stages[0]; f++)
                cr_assert_geq(number(json_object_get(object, "stages_us"), stages[f]), 0);
            assert_text(object, "dtype", "bf16");
            assert_text(object, "backend", "cpu");
            assert_text(object, "transport", ranks[i] < 2 ? "local" : "mpi");
            cr_assert(json_is_string(json_object_get(object, "arch")));
            cr_assert(json_is_string(json_object_get(object, "model")));
            cr_assert_eq(number(object, "ranks"), ranks[i] ? ranks[i] : 1);
            cr_assert_eq(number(object, "tokens_per_rank"), line ? 12 : 1);
            cr_assert(number(object, "us_min") > 0 && number(object, "us_min") <= number(object, "us_median") &&
                      number(object, "us_median") <= number(object, "us_max"));
            json_decref(object);
        }
        testing_process_free(&process);
    }
}

Test(bench, every_family_dtype_and_routing)
{
    const struct {
        const char *checkpoint;
        const char *options;
        int32_t ranks;
    } cases[] = {
        {"deepseek_v3", "--routing uniform --dtype fp32", 3},
        {"deepseek_v3", "--routing zipf:1.1", 0},
        {"deepseek_v3", "--dtype fp16", 3},
        {"gpt_oss", "--routing zipf:0.5 --dtype fp32", 3},
        {"gpt_oss", "--routing one-expert", 3},
        {"qwen2_moe", "--routing uniform --dtype fp32", 3},
        {"qwen2_moe", "--routing router --dtype fp16", 0},
        {"glm4_moe", "--dtype fp32", 3},
        {"deepseek_v2", "--routing uniform --dtype fp32", 0},
        {"mixtral", "--routing one-expert --dtype fp32", 3},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        testing_process_t process = run_bench(cases[i].ranks, "%s %s --tokens 10 --iters 1 --warmup 1 --format json",
                                              golden(cases[i].checkpoint), cases[i].options);
        assert_good(&process, 1);
        if (strstr(cases[i].options, "fp32")) {
            json_t *object = json_line(&process, 0);
            cr_assert_lt(number(object, "max_rel_err"), 1e-5);
            json_decref(object);
        }
        testing_process_free(&process);
    }
}

/* More tokens than are checked, and weights made from the seed. */
Test(bench, preset_with_random_weights)
{
    testing_process_t process = run_bench(2, "--model olmoe-1b-7b --tokens 150 --iters 1 --warmup 1 --format json");
    assert_good(&process, 1);
    json_t *object = json_line(&process, 0);
    assert_text(object, "model", "olmoe-1b-7b");
    assert_text(object, "routing", "uniform");
    cr_assert_eq(number(object, "checked_rows"), 256);
    json_decref(object);
    testing_process_free(&process);
}

/* Counted by hand: mixtral's golden layer has d 64, f 96, E 8, k 2 and bf16 or fp32 weights of b bytes. */
Test(bench, floor_load_and_wire_bytes)
{
    testing_process_t process =
        run_bench(0, "%s --routing one-expert --tokens 5 --iters 1 --format json", golden("mixtral"));
    assert_good(&process, 1);
    json_t *object = json_line(&process, 0);
    cr_assert_eq(number(object, "load_max_over_mean"), 4); /* 5 on each of 2 experts, 10/8 on average */
    cr_assert_eq(number(object, "wire_bytes"), 0);
    double weights = 2 * 3 * 64 * 96 + 8 * 64, rows = 2 * 5 * 64 * 2 + 2 * 10 * 96 * 2;
    double read = number(object, "read_ceiling_gbps") * 1e9, floor = number(object, "floor_us") * 1e-6;
    double flops = 6.0 * 10 * 64 * 96 + 2.0 * 5 * 8 * 64, peak = number(object, "gemm_ceiling_tflops") * 1e12;
    double of2 = fmax((2 * weights + rows) / read, flops / peak), of4 = fmax((4 * weights + rows) / read, flops / peak);
    cr_assert(fabs(floor / of2 - 1) < 1e-6 || fabs(floor / of4 - 1) < 1e-6, "floor %g, expected %g or %g", floor, of2,
              of4);
    cr_assert_float_eq(number(object, "floor_fraction"), number(object, "floor_us") / number(object, "us_median"),
                       1e-6);
    json_decref(object);
    testing_process_free(&process);

    /* 8 ranks of one expert, 4 tokens each. Rank 0 sends 4 rows to rank 1 (64 bf16, 2 ids, 2 weights), and the partial
     * rows of 7 ranks' 4 tokens home. */
    process = run_bench(8, "%s --routing one-expert --tokens 4 --iters 1 --format json", golden("mixtral"));
    assert_good(&process, 1);
    object = json_line(&process, 0);
    cr_assert_eq(number(object, "wire_bytes"), 4 * (64 * 2 + 2 * 4 + 2 * 4) + 28 * 64 * 2);
    cr_assert_eq(number(object, "rank_load_max_over_mean"), 4);
    cr_assert_str_eq(json_string_value(json_object_get(object, "wire")), "dtype");
    json_decref(object);
    testing_process_free(&process);

    /* In FP8 such a row is 64 codes and one scale. */
    process = run_bench(8, "%s --routing one-expert --tokens 4 --iters 1 --wire fp8 --comm-sms 5 --format json",
                        golden("mixtral"));
    assert_good(&process, 1);
    object = json_line(&process, 0);
    cr_assert_eq(number(object, "wire_bytes"), 4 * (64 + 4 + 2 * 4 + 2 * 4) + 28 * 64 * 2);
    cr_assert_str_eq(json_string_value(json_object_get(object, "wire")), "fp8");
    cr_assert_eq(number(object, "comm_sms"), 5);
    json_decref(object);
    testing_process_free(&process);
}

/* 8 ranks of one expert each, 4 tokens on each, all to experts 0 and 1: 32 slots on each of two ranks. Two more are
 * copies of these, and four ranks share: a rank with a copy keeps its 4 tokens, of those of 6 ranks it gets 2 each. */
Test(bench, balanced_placement)
{
    const char *const formats = "--routing one-expert --tokens 4 --iters 1 --format json";
    testing_process_t process = run_bench(8, "%s %s --placement contiguous", golden("mixtral"), formats);
    assert_good(&process, 1);
    json_t *object = json_line(&process, 0);
    cr_assert_eq(number(object, "rank_load_max_over_mean"), 4);
    cr_assert_eq(number(object, "num_physical"), 8);
    assert_text(object, "placement", "contiguous");
    json_decref(object);
    testing_process_free(&process);
    process = run_bench(8, "%s %s --placement balanced:10", golden("mixtral"), formats);
    assert_good(&process, 1);
    object = json_line(&process, 0);
    cr_assert_eq(number(object, "rank_load_max_over_mean"), 2);
    cr_assert_eq(number(object, "load_max_over_mean"), 2.5); /* 16 on each of 4 copies, 64/10 on average */
    cr_assert_eq(number(object, "num_physical"), 10);
    assert_text(object, "placement", "balanced");
    json_decref(object);
    testing_process_free(&process);

    static const char *const others[] = {"--decoder --routing zipf:1", "--routing zipf:2 --wire fp8",
                                         "--routing uniform --dtype fp32"};
    for (int32_t i = 0; i < 3; i++) {
        process = run_bench(i == 2 ? 0 : 3, "%s %s --tokens 9 --iters 1 --placement balanced --format json",
                            golden("qwen3_moe"), others[i]);
        assert_good(&process, 1);
        testing_process_free(&process);
    }
}

Test(bench, time_is_that_of_the_slowest_rank)
{
    testing_process_t process =
        run_bench(3, "%s --tokens 4 --iters 3 --warmup 1 --inject-sleep 2:50 --format json", golden("mixtral"));
    assert_good(&process, 1);
    json_t *object = json_line(&process, 0);
    cr_assert(number(object, "us_min") >= 50000 && number(object, "us_median") < 5e6);
    json_decref(object);
    testing_process_free(&process);
}

Test(bench, nan_weights_fail)
{
    const int32_t ranks[] = {0, 3};
    for (int32_t i = 0; i < 2; i++) {
        testing_process_t process =
            run_bench(ranks[i], "%s --tokens 4 --iters 1 --inject-nan --format json", golden("qwen3_moe"));
        cr_assert_eq(process.exit_code, 1);
        json_t *object = json_line(&process, 0);
        cr_assert_gt(number(object, "wrong"), 0);
        cr_assert(json_is_null(json_object_get(object, "max_rel_err")), "infinity has no JSON");
        json_decref(object);
        testing_process_free(&process);
    }
    testing_process_t table = run_bench(0, "%s --tokens 4 --iters 1 --inject-nan", golden("qwen3_moe"));
    cr_assert_eq(table.exit_code, 1);
    cr_assert(strstr(table.output, "FAIL:"));
    testing_process_free(&table);
}

Test(bench, ranks_without_tokens)
{
    const char *const tokens[] = {"0,7,0", "1,0,3", "0,0,0"};
    for (int32_t i = 0; i < 3; i++) {
        testing_process_t process = run_bench(3, "%s --tokens-per-rank %s --iters 1 --warmup 1 --format json",
                                              golden("deepseek_v3"), tokens[i]);
        cr_assert_eq(process.exit_code, 0, "%s", process.errors);
        json_t *object = json_line(&process, 0);
        const json_t *list = json_object_get(object, "tokens_per_rank");
        char text[64];
        snprintf(text, sizeof text, "%lld,%lld,%lld", json_integer_value(json_array_get(list, 0)),
                 json_integer_value(json_array_get(list, 1)), json_integer_value(json_array_get(list, 2)));
        cr_assert_str_eq(text, tokens[i]);
        cr_assert_eq(number(object, "wrong"), 0);
        json_decref(object);
        testing_process_free(&process);
    }
}

Test(bench, too_many_rows_for_the_capacity)
{
    testing_process_t process = run_bench(3, "%s --tokens 8 --capacity 2 --iters 1", golden("mixtral"));
    cr_assert_eq(process.exit_code, 1);
    cr_assert(!process.timed_out && strstr(process.errors, "capacity is 2"), "%s", process.errors);
    cr_assert_not(strstr(process.output, "PASS"));
    testing_process_free(&process);
}

Test(bench, routing_file)
{
    char path[] = "/tmp/epmoe_bench_XXXXXX";
    int descriptor = mkstemp(path);
    const char lines[] = "[0,1]\n[7,2]\n[3,4]\n";
    cr_assert(descriptor >= 0 && write(descriptor, lines, sizeof lines - 1) == sizeof lines - 1);
    close(descriptor);
    testing_process_t process =
        run_bench(3, "%s --tokens 1 --iters 1 --routing file:%s --format json", golden("mixtral"), path);
    assert_good(&process, 1);
    json_t *object = json_line(&process, 0);
    /* Ranks own 3, 3, 2 experts: 3, 2 and 1 of the 6 slots. */
    cr_assert_float_eq(number(object, "rank_load_max_over_mean"), 1.5, 1e-9);
    json_decref(object);
    testing_process_free(&process);
    process = run_bench(3, "%s --tokens 2 --iters 1 --routing file:%s", golden("mixtral"), path);
    cr_assert_eq(process.exit_code, 2);
    cr_assert(strstr(process.errors, "has 3 lines: expected 6"), "%s", process.errors);
    testing_process_free(&process);
    unlink(path);
}

Test(bench, refusals)
{
    const struct {
        const char *options;
        int exit_code;
        const char *message;
    } cases[] = {
        {"--model nosuch", 2, "qwen3-30b-a3b"},
        {"--checkpoint /nowhere", 2, "/nowhere"},
        {"--tokens 1,x", 2, "--tokens is '1,x'"},
        {"--tokens -1", 2, "--tokens is '-1'"},
        {"--tokens 99999999999", 2, "--tokens is"},
        {"--tokens", 2, "--tokens"},
        {"--tokens-per-rank 1,2", 2, "has 2 numbers: expected 1"},
        {"--tokens 1 --tokens-per-rank 1", 2, "exclude each other"},
        {"--model mixtral-8x7b --checkpoint x", 2, "exclude each other"},
        {"--layer 1", 2, "--layer needs --checkpoint"},
        {"--capacity 0", 2, "--capacity is '0'"},
        {"--dtype int4", 2, "bf16, fp16, fp32, fp8, w4 or mxfp4"},
        {"--routing random", 2, "uniform, zipf:S, one-expert, file:PATH or router"},
        {"--routing zipf:x", 2, "zipf:S"},
        {"--placement even", 2, "contiguous, balanced or balanced:N"},
        {"--placement balanced:x", 2, "contiguous, balanced or balanced:N"},
        {"--placement balanced:127", 2, "num_physical is 127: expected 128 (num_experts)..4096"},
        {"--placement balanced --routing router", 2, "not router"},
        {"--placement balanced --op topk", 2, "not for --op"},
        {"--routing zipf:nan", 2, "zipf:S"},
        {"--routing file:/nowhere/at/all", 2, "/nowhere/at/all"},
        {"--backend gpu", 2, "auto, cpu or cuda"},
        {"--transport shm", 2, "auto, p2p, nccl or mpi"},
        {"--iters 0", 2, "--iters is '0'"},
        {"--warmup -1", 2, "--warmup is '-1'"},
        {"--format xml", 2, "table or json"},
        {"--check=2", 2, "--check is '2'"},
        {"--seed 1x", 2, "--seed is '1x'"},
        {"--timeout 0", 2, "--timeout is '0'"},
        {"--graph 2", 2, "--graph is '2'"},
        {"--op fft", 2, "grouped_gemm"},
        {"--op sum --tokens 0", 2, "at least one token"},
        {"--op sum,", 2, "--op is 'sum,'"},
        {"--comm-sms 0", 2, "--comm-sms is '0'"},
        {"--op sum --comm-sms 4", 2, "--comm-sms is for the layer and --op exchange"},
        {"--op sum,exchange", 2, "--op exchange runs alone"},
        {"--op sum --top-k 129", 2, "--top-k is '129': expected a number from 1 to 32"},
        {"--op sum --hidden 0", 2, "--hidden is '0'"},
        {"--op sum --intermediate x", 2, "--intermediate is 'x'"},
        {"--op rope --heads 8:2", 2, "--heads is '8:2': expected QUERY:KEY:DIM"},
        {"--op rope --heads 8:2:64:1", 2, "--heads is"},
        {"--hidden 64", 2, "need --op"},
        {"--inject-sleep 1:5", 2, "there are 1 ranks"},
        {"--nosuch", 2, "--nosuch"},
        {"more", 2, "'more'"},
        {"--dtype fp8 --op topk", 3, "--dtype fp8"},
        {"--dtype w4 --checkpoint x", 2, "--dtype w4: a checkpoint's weights"},
        {"--decoder --op topk", 2, "--decoder and --op exclude each other"},
        {"--context 16", 2, "--context needs --decoder"},
        {"--decoder --context 0", 2, "--context is '0'"},
        {"--backend cpu --graph 1", 3, "--graph 1"},
        {"--backend cpu --transport nccl", 3, "--transport nccl"},
        {"--backend cpu --transport p2p", 3, "--transport p2p"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        testing_process_t process = run_bench(0, "%s", cases[i].options);
        cr_assert_eq(process.exit_code, cases[i].exit_code, "%s: exit %d", cases[i].options, process.exit_code);
        cr_assert(strstr(process.errors, cases[i].message), "%s: '%s'", cases[i].options, process.errors);
        if (cases[i].exit_code == 3) cr_assert_eq(strncmp(process.errors, "not supported:", 14), 0);
        cr_assert_str_empty(process.output, "%s printed: %s", cases[i].options, process.output);
        testing_process_free(&process);
    }
}

/* Random experts in each quantised format, against the reference. */
Test(bench, quantised_random_weights)
{
    static const char *const dtypes[] = {"fp8", "w4", "mxfp4"};
    for (int i = 0; i < 6; i++) {
        testing_process_t process = run_bench(
            i % 2 ? 2 : 0, "--backend cpu --model olmoe-1b-7b --tokens 3 --iters 1 --warmup 0 --format json --dtype %s",
            dtypes[i / 2]);
        cr_assert_eq(process.exit_code, 0, "%s: exit %d: %s", dtypes[i / 2], process.exit_code, process.errors);
        char expected[32];
        snprintf(expected, sizeof expected, "\"dtype\":\"%s\"", dtypes[i / 2]);
        cr_assert(strstr(process.output, expected), "%s", process.output);
        cr_assert(strstr(process.output, "\"wrong\":0"), "%s", process.output);
        testing_process_free(&process);
    }
}

Test(bench, a_backend_that_is_not_there)
{
    testing_process_t process = testing_run(kLimit, "EPMOE_ARCH=cpu %s --backend cuda", BENCH);
    cr_assert_eq(process.exit_code, 3, "exit %d", process.exit_code);
    cr_assert_eq(strncmp(process.errors, "not supported: --backend:", 25), 0, "%s", process.errors);
    cr_assert_str_empty(process.output);
    testing_process_free(&process);
}

/* Every rank refuses; one of them says why, once. */
Test(bench, refusals_under_mpirun)
{
    const struct {
        const char *options;
        int exit_code;
        const char *message;
    } cases[] = {
        {"--decoder --context x", 2, "--context is 'x'"},
        {"--checkpoint /nowhere", 2, "/nowhere"},
        {"--tokens-per-rank 1,2", 2, "expected 3, one for each rank"},
        {"--op topk", 2, "--op runs on one rank"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        testing_process_t process = run_bench(3, "%s", cases[i].options);
        cr_assert_eq(process.exit_code, cases[i].exit_code, "%s: exit %d", cases[i].options, process.exit_code);
        const char *said = strstr(process.errors, cases[i].message);
        cr_assert(said && !strstr(said + 1, cases[i].message), "%s", process.errors);
        cr_assert_str_empty(process.output);
        testing_process_free(&process);
    }
}

Test(bench, launcher_of_another_mpi)
{
    testing_process_t process = testing_run(kLimit, "OMPI_COMM_WORLD_SIZE=4 %s %s", BENCH, golden("mixtral"));
    cr_assert_eq(process.exit_code, 2, "exit %d: %s", process.exit_code, process.errors);
    cr_assert(strstr(process.errors, "OMPI_COMM_WORLD_SIZE is 4") && strstr(process.errors, "size is 1"));
    testing_process_free(&process);
}

Test(bench, table_help_and_models)
{
    testing_process_t process = run_bench(3, "%s --tokens 2 --iters 1 --warmup 0", golden("mixtral"));
    cr_assert_eq(process.exit_code, 0);
    static const char *const parts[] = {"PASS:", "no warm-up", "memory read", "GEMM", "transport mpi", "wrong"};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        cr_assert(strstr(process.output, parts[i]), "no '%s' in:\n%s", parts[i], process.output);
    if (sysconf(_SC_NPROCESSORS_ONLN) < 3) cr_assert(strstr(process.output, "ranks share cores"));
    testing_process_free(&process);

    process = run_bench(3, "--help");
    cr_assert_eq(process.exit_code, 0);
    const char *usage = strstr(process.output, "--checkpoint DIR");
    cr_assert(usage && !strstr(usage + 1, "--checkpoint DIR"), "only rank 0 prints");
    testing_process_free(&process);

    process = run_bench(0, "--list-models");
    cr_assert_eq(process.exit_code, 0);
    for (int32_t i = 0; epmoe_preset_name(i); i++) cr_assert(strstr(process.output, epmoe_preset_name(i)));
    testing_process_free(&process);
}

Test(bench, without_a_check_nothing_is_called_right)
{
    testing_process_t process = run_bench(0, "%s --check=0 --iters 1 --format json", golden("mixtral"));
    cr_assert_eq(process.exit_code, 0);
    json_t *object = json_line(&process, 0);
    cr_assert(json_is_null(json_object_get(object, "wrong")));
    json_decref(object);
    testing_process_free(&process);
    process = run_bench(0, "%s --check=0 --iters 1", golden("mixtral"));
    cr_assert(strstr(process.output, "not checked") && !strstr(process.output, "PASS"));
    testing_process_free(&process);
}

/* What a terminal sees of a run that succeeds with so many cases, the end of which must have wiped it; free. */
static char *on_a_terminal(const char *arguments, int32_t cases)
{
    testing_terminal_t terminal = testing_terminal_open();
    testing_process_t process = run_bench(0, "%s --iters 1 --warmup 1 --format json 2>%s", arguments, terminal.name);
    char *text = testing_terminal_close(&terminal);
    const size_t length = strlen(text);
    cr_assert_eq(process.exit_code, 0, "exit %d: %s", process.exit_code, text);
    for (int32_t i = 0; i < cases; i++) json_decref(json_line(&process, i));
    cr_assert(!strchr(process.output, '\r'));
    cr_expect(length > 4 && !strcmp(text + length - 4, "\r\033[K"), "the last line stays: %s", text);
    testing_process_free(&process);
    return text;
}

/* A terminal sees a line of what is being done, which is gone at the end; a file sees nothing, and stdout never does.
 */
Test(bench, progress_on_a_terminal)
{
    char arguments[600];
    snprintf(arguments, sizeof arguments, "%s --tokens 1,2", golden("mixtral"));
    char *text = on_a_terminal(arguments, 2);
    cr_expect(strstr(text, "\r\033[Kloading weights ...\r\033[Kloading weights: "), "%s", text);
    cr_expect(strstr(text, "\r\033[Kcase 2 of 2: "), "%s", text);
    free(text);
    /* 64 experts of 3 * 1024 * 2048 in bf16. */
    for (int32_t decoder = 0; decoder < 2; decoder++) {
        text = on_a_terminal(decoder ? "--decoder --model olmoe-1b-7b --tokens 1 --check=0"
                                     : "--model olmoe-1b-7b --tokens 1 --check=0",
                             1);
        const char *first = strstr(text, "\r\033[Kmaking random weights: 13 of 805 MB\r\033[K");
        cr_expect(strstr(text, "\r\033[Kmaking random weights ...\r\033[K"), "%s", text);
        cr_expect(first && strstr(first, "making random weights: 805 of 805 MB\r\033[K"), "%s", text);
        free(text);
    }
    testing_process_t process = run_bench(0, "%s --tokens 1,2 --iters 1 --format json", golden("mixtral"));
    cr_expect_str_empty(process.errors);
    testing_process_free(&process);
}
