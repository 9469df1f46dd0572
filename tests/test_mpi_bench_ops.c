/* moe_layer_bench --op on the CPU: ops of one rank, and the exchange of several. */
#include "tests/bench_testing.h"

#include <string.h>

/* Several ops of one start, at a shape of their own. */
Test(bench_ops, ops_at_a_shape)
{
    static const char *const ops[] = {"rms_norm_alone", "silu_and_mul", "rope"};
    /* Of one token, what must move: x, y and the weight; gate, up and y; the turned columns, table row and position. */
    static const double bytes[] = {3 * 192 * 2, 3 * 96 * 2, 2 * (6 + 2) * 32 * 2 + 4 * 32 + 8};
    testing_process_t process = run_bench(
        0, "--op rms_norm_alone,silu_and_mul,rope --model olmoe-1b-7b --hidden 192 --intermediate 96 --top-k 1 "
           "--heads 6:2:32 --tokens 1,5 --iters 1 --warmup 0 --format json");
    cr_assert_eq(process.exit_code, 0, "%s", process.errors);
    for (int32_t line = 0; line < 6; line++) {
        json_t *object = json_line(&process, line);
        assert_text(object, "op", ops[line / 2]);
        cr_assert_eq(number(object, "tokens"), line % 2 ? 5 : 1);
        cr_assert_eq(number(object, "wrong"), 0);
        double moved = number(object, "gbps") * number(object, "us_median") * 1e3;
        if (line % 2 == 0) cr_assert_float_eq(moved, bytes[line / 2], 1, "%s: %g bytes", ops[line / 2], moved);
        json_decref(object);
    }
    testing_process_free(&process);
}

Test(bench_ops, single_ops)
{
    static const char *const ops[] = {"topk",
                                      "align",
                                      "permute",
                                      "unpermute",
                                      "grouped_gemm",
                                      "silu_and_mul",
                                      "sum",
                                      "quantize_fp8",
                                      "dequant",
                                      "rms_norm",
                                      "rope",
                                      "qk_norm_rope",
                                      "cache_write",
                                      "attention",
                                      "prefill",
                                      "sample",
                                      "spec_verify",
                                      "rope_cache_write",
                                      "rms_norm_alone",
                                      "rms_norm_fp8",
                                      "silu_and_mul_fp8",
                                      "linear",
                                      "linear_fp8",
                                      "linear_fp8_blocks"};
    for (size_t i = 0; i < sizeof ops / sizeof ops[0]; i++) {
        testing_process_t process =
            run_bench(0, "--op %s --model olmoe-1b-7b --tokens 1,33 --iters 2 --warmup 1 --format json", ops[i]);
        cr_assert_eq(process.exit_code, 0, "%s: %s", ops[i], process.errors);
        for (int32_t line = 0; line < 2; line++) {
            json_t *object = json_line(&process, line);
            assert_text(object, "op", ops[i]);
            cr_assert_eq(number(object, "calls"), 1);
            cr_assert(json_is_null(json_object_get(object, "copy_fraction")));
            cr_assert_eq(number(object, "tokens"), line ? 33 : 1);
            cr_assert_eq(number(object, "wrong"), 0);
            cr_assert(number(object, "us_median") > 0 && number(object, "gbps") > 0 && number(object, "floor_us") > 0);
            json_decref(object);
        }
        testing_process_free(&process);
    }
}

/* Dispatch and combine alone. All tokens go to experts of rank 0, so that rank 1 sends every row of its own: 5 of 2048
 * columns with 8 ids and weights, and gets 5 back, as fp32 where that is what partial rows travel as. */
Test(bench_ops, exchange)
{
    const struct {
        const char *options;
        double out, home;
    } cases[] = {
        {"--dtype bf16", 5 * (4096 + 64), 5 * 4096},
        {"--dtype fp16", 5 * (4096 + 64), 5 * 8192},
        {"--dtype fp32", 5 * (8192 + 64), 5 * 8192},
        {"--dtype bf16 --wire fp8", 5 * (2048 + 64 + 64), 5 * 4096},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        testing_process_t process = run_bench(2,
                                              "--op exchange --model olmoe-1b-7b --tokens 5 --routing one-expert "
                                              "--iters 2 --warmup 1 --format json %s",
                                              cases[i].options);
        cr_assert_eq(process.exit_code, 0, "%s: exit %d: %s", cases[i].options, process.exit_code, process.errors);
        json_t *object = json_line(&process, 0);
        assert_text(object, "op", "exchange");
        assert_text(object, "transport", "mpi");
        cr_assert_eq(number(object, "wrong"), 0);
        cr_assert_eq(number(object, "dispatch_wire_bytes"), cases[i].out, "%s", cases[i].options);
        cr_assert_eq(number(object, "combine_wire_bytes"), cases[i].home, "%s", cases[i].options);
        cr_assert(number(object, "dispatch_us") > 0 && number(object, "dispatch_gbps") > 0);
        /* Alone it is held against itself; a way home that came out as less than nothing has no speed. */
        cr_assert_float_eq(number(object, "pair_us"), number(object, "dispatch_us") + number(object, "combine_us"),
                           0.002);
        assert_text(object, "base", "mpi");
        cr_assert_eq(number(object, "dispatch_speedup"), 1);
        cr_assert_eq(number(object, "pair_speedup"), 1);
        if (number(object, "combine_us") > 0.001) cr_assert_eq(number(object, "combine_speedup"), 1);
        json_decref(object);
        testing_process_free(&process);
    }
    testing_process_t process = run_bench(3, "--op exchange --model olmoe-1b-7b --tokens 1,33 --iters 2 --warmup 1");
    cr_assert_eq(process.exit_code, 0, "exit %d: %s", process.exit_code, process.errors);
    cr_assert(strstr(process.output, "3 ranks; us of one exchange") && strstr(process.output, "PASS"), "%s",
              process.output);
    cr_assert(strstr(process.output, "pair us") && strstr(process.output, "x pair"), "%s", process.output);
    const char *row = strstr(process.output, "      mpi       33");
    double us[3], faster;
    cr_assert(row && sscanf(row, " mpi 33 %lf %lf %lf %lf", &us[0], &us[1], &us[2], &faster) == 4, "%s",
              process.output);
    cr_assert_float_eq(us[2], us[0] + us[1], 0.02);
    cr_assert_eq(faster, 1);
    testing_process_free(&process);
    process = run_bench(0, "--op exchange");
    cr_assert_eq(process.exit_code, 2);
    cr_assert(strstr(process.errors, "--op exchange needs at least two ranks"), "%s", process.errors);
    testing_process_free(&process);
}

/* What would be drawn wrong, measured wrong or ignored. */
Test(bench_ops, refusals)
{
    static const struct {
        const char *arguments, *words;
    } cases[] = {
        {"--op topk --top-k 33", "--top-k is '33': expected a number from 1 to 32"},
        {"--op align --model mixtral-8x7b --top-k 9", "--top-k is 9: expected at most 8"},
        {"--op linear --heads 1048576:1:4096", "QUERY:KEY:DIM with (QUERY + 2 KEY) * DIM below 2^31"},
        {"--op align --routing router", "--op needs a --routing that is known before it runs, not router"},
        {"--op sum --inject-nan", "--inject-nan and --inject-sleep are for the layer, not for --op"},
        {"--op sum --capacity 4", "--capacity is for the layer, not for --op"},
        {"--op sum --act fp8", "--act is for the layer, not for --op"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        testing_process_t process = run_bench(0, "%s", cases[i].arguments);
        cr_expect_eq(process.exit_code, 2, "%s: exit %d", cases[i].arguments, process.exit_code);
        cr_expect(strstr(process.errors, cases[i].words), "%s: %s", cases[i].arguments, process.errors);
        testing_process_free(&process);
    }
}
