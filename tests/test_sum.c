/* The slot sum: hand-worked order and rounding, a double-precision oracle, slots that must not be read. */
#include "kernels/sum.h"
#include "tests/op_testing.h"

#include <math.h>
#include <stdlib.h>

/* Runs the public entry into `out` and compares both kernels with it, bit for bit. With residual == out each call gets
 * its own copy of the residual. */
static void run(const epmoe_sum_args_t *args)
{
    epmoe_dtype_t dtype = args->out_dtype ? args->out_dtype : args->y_dtype;
    int64_t n = (int64_t)args->num_tokens * args->hidden, bytes = n * epmoe_dtype_size(dtype);
    epmoe_status_t (*const kernels[])(const epmoe_sum_args_t *, epmoe_stream_t) = {epmoei_sum_ref, epmoei_sum_cpu};
    void *out[2];
    for (int i = 0; i < 2; i++) {
        epmoe_sum_args_t checked;
        cr_assert_eq(epmoei_sum_check(args, &checked), EPMOE_OK, "%s", epmoe_last_error());
        out[i] = testing_buffer(bytes, epmoe_dtype_size(dtype));
        if (args->residual == args->out) {
            memcpy(out[i], args->residual, (size_t)bytes);
            checked.residual = out[i];
        }
        checked.out = out[i];
        cr_assert_eq(kernels[i](&checked, NULL), EPMOE_OK);
        cr_assert(testing_guards_intact(out[i]));
    }
    cr_assert_eq(epmoe_sum(args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    for (int i = 0; i < 2; i++) {
        cr_assert(op_same_bits(out[i], args->out, dtype, n), "kernel %d differs", i);
        testing_buffer_free(out[i]);
    }
}

static epmoe_sum_args_t make(int32_t num_tokens, int32_t top_k, int32_t hidden, epmoe_dtype_t dtype, const void *y,
                             void *out)
{
    epmoe_sum_args_t args = EPMOE_SUM_ARGS_INIT;
    args.num_tokens = num_tokens;
    args.top_k = top_k;
    args.hidden = hidden;
    args.y_dtype = dtype;
    args.y = y;
    args.out = out;
    return args;
}

Test(sum, by_hand)
{
    const float y[] = {1, 2, 10, 20, 100, 200, /* token 1 */ 3, 4, 30, 40, 300, 400};
    const float weights[] = {1, 0.5f, 0.25f, 2, -1, 0.125f}, residual[] = {1000, 2000, 3000, 4000};
    float out[4];
    epmoe_sum_args_t args = make(2, 3, 2, EPMOE_F32, y, out);
    run(&args);
    cr_assert(out[0] == 111 && out[1] == 222 && out[2] == 333 && out[3] == 444);
    args.weights = weights;
    run(&args);
    cr_assert(out[0] == 31 && out[1] == 62 && out[2] == 13.5f && out[3] == 18);
    args.residual = residual;
    run(&args);
    cr_assert(out[0] == 1031 && out[1] == 2062 && out[2] == 3013.5f && out[3] == 4018);
    const int32_t ids[] = {0, -1, 7, -1, -1, -1};
    args.ids = ids;
    run(&args);
    cr_assert(out[0] == 1026 && out[1] == 2052 && out[2] == 3000 && out[3] == 4000);
    args.residual = NULL;
    run(&args);
    cr_assert(out[0] == 26 && out[1] == 52 && out[2] == 0 && out[3] == 0, "a token without a slot gets zeros");
}

Test(sum, slots_ascend_and_the_residual_comes_last)
{
    const float y[] = {1e8f, 1, -1e8f}, residual[] = {1};
    float out[1];
    epmoe_sum_args_t args = make(1, 3, 1, EPMOE_F32, y, out);
    run(&args);
    cr_assert_eq(out[0], 0, "(1e8 + 1) - 1e8 is 0 in fp32");
    args.residual = residual;
    run(&args);
    cr_assert_eq(out[0], 1);
    const float other[] = {1e8f, -1e8f, 1};
    args.y = other;
    run(&args);
    cr_assert_eq(out[0], 2);
}

Test(sum, rounds_once)
{
    /* 1 + 2^-8 is a tie in bf16 and would fall back to 1 after each addition; 1 + 2^-11 likewise in fp16. */
    for (int d = 1; d < OP_NUM_DTYPES; d++) {
        epmoe_dtype_t dtype = op_dtypes[d].dtype;
        char y[4 * 3], out[4];
        epmoei_store(y, dtype, 0, 1);
        epmoei_store(y, dtype, 1, (float)op_dtypes[d].half_ulp);
        epmoei_store(y, dtype, 2, (float)op_dtypes[d].half_ulp);
        epmoe_sum_args_t args = make(1, 3, 1, dtype, y, out);
        run(&args);
        cr_assert_eq(epmoei_load(out, dtype, 0), 1 + 2 * (float)op_dtypes[d].half_ulp);
    }
}

Test(sum, a_weight_brings_large_fp32_rows_back_into_fp16)
{
    const float y[] = {131072, 131072, -131072, 131072}, weights[] = {0.25f, 0, 0.5f, 0.5f};
    char out[4 * 2];
    epmoe_sum_args_t args = make(2, 2, 1, EPMOE_F32, y, out);
    args.weights = weights;
    args.out_dtype = EPMOE_F16;
    run(&args);
    cr_assert_eq(epmoei_load(out, EPMOE_F16, 0), 32768);
    cr_assert_eq(epmoei_load(out, EPMOE_F16, 1), 0);
}

Test(sum, unused_slots_are_never_read_and_nan_stays_in_its_token)
{
    enum { T = 5, K = 3, D = 40 };
    for (int d = 0; d < OP_NUM_DTYPES; d++) {
        epmoe_dtype_t dtype = op_dtypes[d].dtype;
        char y[4 * T * K * D];
        float weights[T * K];
        int32_t ids[T * K];
        for (int32_t s = 0; s < T * K; s++) {
            bool unused = s % 4 == 1;
            ids[s] = unused ? -1 : s;
            weights[s] = unused ? NAN : 1;
            for (int32_t i = 0; i < D; i++) epmoei_store(y, dtype, s * D + i, unused ? NAN : 1);
        }
        epmoei_store(y, dtype, (3 * K + 2) * D + 7, NAN); /* a used slot of token 3 */
        void *out = testing_buffer(epmoe_dtype_size(dtype) * T * D, epmoe_dtype_size(dtype));
        epmoe_sum_args_t args = make(T, K, D, dtype, y, out);
        args.weights = weights;
        args.ids = ids;
        run(&args);
        for (int32_t t = 0; t < T; t++) {
            int32_t used = 0;
            for (int32_t j = 0; j < K; j++) used += ids[t * K + j] >= 0;
            for (int32_t i = 0; i < D; i++) {
                float value = epmoei_load(out, dtype, t * D + i);
                if (t == 3 && i == 7)
                    cr_assert(isnan(value));
                else
                    cr_assert_eq(value, (float)used, "out[%d,%d] is %g", t, i, (double)value);
            }
        }
        cr_assert(testing_guards_intact(out));
        testing_buffer_free(out);
    }
}

Test(sum, random_shapes_against_double)
{
    testing_rng_t rng = testing_rng(testing_seed());
    const int32_t widths[] = {1, 3, 60, 96, 1023, 1024, 1025, 1440, 2880}, slots[] = {1, 2, 3, 8, 32};
    const int32_t tokens[] = {1, 3, 63, 127};
    for (int round = 0; round < 90; round++) {
        int32_t hidden = widths[testing_range(&rng, 0, 8)], top_k = slots[testing_range(&rng, 0, 4)];
        int32_t num_tokens = hidden * top_k > 20000 ? 3 : tokens[testing_range(&rng, 0, 3)];
        epmoe_dtype_t y_dtype = op_dtypes[testing_range(&rng, 0, 2)].dtype;
        int out_index = testing_range(&rng, 0, 2);
        epmoe_dtype_t out_dtype = op_dtypes[out_index].dtype;
        int64_t rows = (int64_t)num_tokens * top_k, n = (int64_t)num_tokens * hidden;
        /* One element off every wider alignment. */
        void *y = testing_buffer(rows * hidden * epmoe_dtype_size(y_dtype), epmoe_dtype_size(y_dtype));
        void *residual = testing_buffer(n * epmoe_dtype_size(out_dtype), epmoe_dtype_size(out_dtype));
        void *out = testing_buffer(n * epmoe_dtype_size(out_dtype), epmoe_dtype_size(out_dtype));
        float *weights = malloc(4 * (size_t)rows);
        int32_t *ids = malloc(4 * (size_t)rows);
        testing_fill_normal(&rng, y, y_dtype, rows * hidden, 1);
        testing_fill_normal(&rng, residual, out_dtype, n, 1);
        for (int64_t s = 0; s < rows; s++) {
            weights[s] = testing_uniform(&rng, 0, 1);
            ids[s] = testing_range(&rng, -1, 3);
        }
        epmoe_sum_args_t args = make(num_tokens, top_k, hidden, y_dtype, y, out);
        args.out_dtype = out_dtype;
        if (round & 1) args.weights = weights;
        if (round & 2) args.ids = ids;
        if (round & 4) args.residual = residual;
        double *expected = calloc((size_t)n, sizeof *expected), *size = calloc((size_t)n, sizeof *size);
        for (int64_t s = 0; s < rows; s++)
            for (int64_t i = 0; i < hidden && (!args.ids || ids[s] >= 0); i++) {
                double part = (args.weights ? (double)weights[s] : 1) * (double)epmoei_load(y, y_dtype, s * hidden + i);
                expected[s / top_k * hidden + i] += part;
                size[s / top_k * hidden + i] += fabs(part);
            }
        for (int64_t i = 0; args.residual && i < n; i++) {
            expected[i] += (double)epmoei_load(residual, out_dtype, i);
            size[i] += fabs((double)epmoei_load(residual, out_dtype, i));
        }
        if ((round & 12) == 12) { /* out may alias the residual */
            memcpy(out, residual, (size_t)(n * epmoe_dtype_size(out_dtype)));
            args.residual = out;
        }
        run(&args);
        for (int64_t i = 0; i < n; i++) {
            double value = (double)epmoei_load(out, out_dtype, i);
            double bound = op_dtypes[out_index].half_ulp * 1.001 * fabs(expected[i]) + size[i] * top_k * 0x1p-23 + 1e-7;
            cr_assert(fabs(value - expected[i]) <= bound, "element %lld is %.9g, expected %.9g", (long long)i, value,
                      expected[i]);
        }
        cr_assert(testing_guards_intact(out) && testing_guards_intact(y) && testing_guards_intact(residual));
        testing_buffer_free(y), testing_buffer_free(residual), testing_buffer_free(out);
        free(weights), free(ids), free(expected), free(size);
    }
}

Test(sum, addend_comes_before_the_residual)
{
    const float y[] = {1, 2, 4, 8}, addend[] = {1e8f, 0.25f}, residual[] = {-1e8f, 0.5f};
    float out[2];
    epmoe_sum_args_t args = make(2, 2, 1, EPMOE_F32, y, out);
    args.addend = addend;
    run(&args);
    cr_assert(out[0] == 1e8f && out[1] == 12.25f, "1e8 + 3 is 1e8 in fp32");
    args.residual = residual;
    run(&args);
    cr_assert(out[0] == 0 && out[1] == 12.75f);
    const int32_t ids[] = {-1, -1, -1, 0};
    args.ids = ids;
    args.residual = NULL;
    run(&args);
    cr_assert(out[0] == 1e8f && out[1] == 8.25f, "a token without a slot gets the addend");

    /* The addend is fp32 whatever the rows are: 1 + 2^-8 would be lost in bf16 on its own. */
    char rows[4], rounded[4];
    const float fine[] = {0x1p-8f + 0x1p-9f};
    epmoei_store(rows, EPMOE_BF16, 0, 1);
    epmoe_sum_args_t half = make(1, 1, 1, EPMOE_BF16, rows, rounded);
    half.addend = fine;
    run(&half);
    cr_assert_eq(epmoei_load(rounded, EPMOE_BF16, 0), 1 + 0x1p-7f);
}

Test(sum, device_count_limits_the_rows)
{
    enum { T = 3, D = 2 };
    const float y[T * D] = {1, 2, 3, 4, 5, 6};
    int32_t ids[T] = {0, 0, 0};
    for (int32_t actual = 0; actual <= T; actual++) {
        float *out = testing_buffer(4 * T * D, 4);
        epmoe_sum_args_t args = make(T, 1, D, EPMOE_F32, y, out);
        args.num_tokens_dev = &actual;
        args.ids = ids;
        if (actual < T) ids[T - 1] = -9; /* past the count: never looked at */
        run(&args);
        cr_assert_eq(memcmp(out, y, 4 * D * (size_t)actual), 0);
        cr_assert(testing_is_poison(out, 4 * D * actual, 4 * D * (T - actual)));
        cr_assert(testing_guards_intact(out));
        ids[T - 1] = 0;
        testing_buffer_free(out);
    }
}

Test(sum, no_tokens)
{
    epmoe_sum_args_t args = make(0, 2, 8, EPMOE_BF16, NULL, NULL);
    cr_assert_eq(epmoe_sum(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
}

Test(sum, errors_name_the_argument_and_leave_the_output)
{
    const float y[8] = {0};
    float *out = testing_buffer(16, 0);
    epmoe_sum_args_t base = make(2, 2, 2, EPMOE_F32, y, out);
#define REJECTS(needle, statement) OP_INVALID(epmoe_sum, base, needle, testing_is_poison(out, 0, 16), statement)
    REJECTS("num_tokens is -1", bad.num_tokens = -1);
    REJECTS("top_k is 0", bad.top_k = 0);
    REJECTS("hidden is 0", bad.hidden = 0);
    REJECTS("y_dtype", bad.y_dtype = EPMOE_DTYPE_NONE);
    REJECTS("y_dtype", bad.y_dtype = EPMOE_U8);
    REJECTS("out_dtype", bad.out_dtype = EPMOE_I32);
    REJECTS("overflows", bad.num_tokens = bad.top_k = bad.hidden = INT32_MAX);
    REJECTS("y is NULL", bad.y = NULL);
    REJECTS("out is NULL", bad.out = NULL);
    const int32_t ids[] = {0, 1, -1, -2};
    REJECTS("ids[1,1] is -2", bad.ids = ids);
    int32_t count = 3;
    REJECTS("num_tokens_dev", bad.num_tokens_dev = &count);
    count = -1;
    REJECTS("num_tokens_dev", bad.num_tokens_dev = &count);
    REJECTS("backend is 3", bad.backend = (epmoe_backend_t)3);
#undef REJECTS
    testing_buffer_free(out);
}

Test(sum, struct_sizes)
{
    const float y[] = {1, 2};
    float *out = testing_buffer(4, 0);
    epmoe_sum_args_t base = make(1, 2, 1, EPMOE_F32, y, out);
    OP_STRUCT_SIZES(epmoe_sum, base, offsetof(epmoe_sum_args_t, addend), testing_is_poison(out, 0, 4), out[0] == 3);
    base.struct_size = offsetof(epmoe_sum_args_t, out);
    cr_assert_eq(epmoe_sum(&base, NULL), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert(strstr(epmoe_last_error(), "out is NULL"), "a field past struct_size was read");
    testing_buffer_free(out);
}

Test(sum, floor_counts_each_byte_once)
{
    const float residual = 0;
    epmoe_sum_args_t args = {
        .num_tokens = 3, .top_k = 2, .hidden = 8, .y_dtype = EPMOE_F32, .out_dtype = EPMOE_BF16, .residual = &residual};
    cr_assert_eq(epmoei_sum_floor(&args).bytes, 3 * 2 * 8 * 4 + 2 * 3 * 8 * 2);
    cr_assert_eq(epmoei_sum_floor(&args).flops, 2 * 3 * 2 * 8);
    args.addend = &residual;
    cr_assert_eq(epmoei_sum_floor(&args).bytes, 3 * 2 * 8 * 4 + 2 * 3 * 8 * 2 + 3 * 8 * 4);
}
