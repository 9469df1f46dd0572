/* When the kernels for very few tokens run, and that the reference which defines them is the experts' contract. */
#include "kernels/experts_few.h"
#include "moe/experts.h"
#include "tests/moe_oracle.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>

static epmoe_experts_args_t shape(int32_t tokens, int32_t top_k, int32_t d, int32_t f, epmoe_dtype_t dtype)
{
    epmoe_experts_args_t args = EPMOE_EXPERTS_ARGS_INIT;
    args.num_tokens = tokens, args.top_k = top_k, args.num_experts = 16;
    args.hidden = d, args.intermediate = f;
    args.dtype = args.y_dtype = dtype;
    args.gate_up.format = args.down.format = epmoei_format_of_dtype(dtype);
    return args;
}

Test(experts_few, which_calls)
{
    static const struct {
        int32_t tokens, top_k, d, f;
        epmoe_dtype_t dtype;
        bool can, takes;
    } cases[] = {
        {1, 8, 2048, 768, EPMOE_BF16, true, true},     {4, 2, 4096, 14336, EPMOE_F16, true, true},
        {5, 2, 4096, 14336, EPMOE_BF16, true, false},  {8, 32, 8, 8, EPMOE_BF16, true, false},
        {9, 1, 8, 8, EPMOE_BF16, false, false},        {0, 1, 8, 8, EPMOE_BF16, false, false},
        {1, 33, 8, 8, EPMOE_BF16, false, false},       {1, 1, 8, 8, EPMOE_F32, false, false},
        {1, 1, 12, 8, EPMOE_BF16, false, false},       {1, 1, 8, 12, EPMOE_BF16, false, false},
        {1, 1, 8, 262136, EPMOE_BF16, true, true},     {1, 1, 8, 262144, EPMOE_BF16, false, false},
        {1, 1, 1 << 30, 2880, EPMOE_BF16, true, true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        epmoe_experts_args_t args = shape(cases[i].tokens, cases[i].top_k, cases[i].d, cases[i].f, cases[i].dtype);
        cr_expect_eq(epmoei_experts_few_can(&args), cases[i].can, "case %zu", i);
        cr_expect_eq(epmoei_experts_few_takes(&args), cases[i].takes, "case %zu", i);
    }
    epmoe_experts_args_t args = shape(1, 1, 8, 8, EPMOE_BF16);
    args.down.format = EPMOE_FORMAT_F16;
    cr_expect_not(epmoei_experts_few_can(&args));
    args.down.format = EPMOE_FORMAT_BF16, args.gate_up.format = EPMOE_FORMAT_FP8_BLOCK;
    cr_expect_not(epmoei_experts_few_can(&args));
}

static void *normal(testing_rng_t *rng, epmoe_dtype_t dtype, int64_t n, double scale)
{
    void *data = testing_buffer(n * epmoe_dtype_size(dtype), 0);
    testing_fill_normal(rng, data, dtype, n, (float)scale);
    return data;
}

Test(experts_few, reference_against_fp64)
{
    enum { kMost = 4, kExperts = 5, kD = 40, kF = 24 };
    const epmoe_dtype_t dtypes[] = {EPMOE_BF16, EPMOE_F16}, y_dtypes[] = {EPMOE_F32, EPMOE_BF16, EPMOE_F16};
    for (int i = 0; i < 4 * 2 * 2 * 2 * 2 * 3; i++) {
        testing_rng_t rng = testing_rng(testing_seed() + (uint64_t)i);
        epmoe_dtype_t dtype = dtypes[i / 4 % 2], y_dtype = y_dtypes[i / 64];
        int32_t top_k = testing_range(&rng, 1, 4), tokens = testing_range(&rng, 0, kMost), slots = kMost * top_k;
        epmoe_experts_args_t args = shape(kMost, top_k, kD, kF, dtype);
        args.num_experts = kExperts;
        args.y_dtype = y_dtype;
        args.activation = (epmoe_activation_t)(i % 4);
        args.layout = i / 8 % 2 ? EPMOE_LAYOUT_GATE_FIRST : EPMOE_LAYOUT_PACKED;
        args.weight_on_input = i / 16 % 2;
        args.limit = testing_range(&rng, 0, 1) ? 0.7f : 0;
        void *x = normal(&rng, dtype, kMost * kD, 1), *gate_up = normal(&rng, dtype, kExperts * 2 * kF * kD, 0.2);
        void *down = normal(&rng, dtype, kExperts * kD * kF, 0.2), *residual = normal(&rng, y_dtype, kMost * kD, 1);
        float *gate_up_bias = normal(&rng, EPMOE_F32, kExperts * 2 * kF, 0.3);
        float *down_bias = normal(&rng, EPMOE_F32, kExperts * kD, 0.3),
              *addend = normal(&rng, EPMOE_F32, kMost * kD, 1);
        float *weights = testing_buffer(slots * 4, 0);
        int32_t *ids = testing_buffer(slots * 4, 0);
        bool full = i / 32 % 2; /* biases, addend, residual */
        /* Ids of no expert count as unused, and their weights are poison. */
        for (int32_t s = 0; s < slots; s++) {
            ids[s] = s < tokens * top_k ? testing_range(&rng, -2, kExperts) : 0;
            if (ids[s] >= 0 && ids[s] < kExperts) weights[s] = testing_normal(&rng);
        }
        args.x = x, args.ids = ids, args.weights = weights;
        args.gate_up.data = gate_up, args.down.data = down;
        args.gate_up_bias = full ? gate_up_bias : NULL, args.down_bias = full ? down_bias : NULL;
        args.addend = full ? addend : NULL, args.residual = full ? residual : NULL;
        args.num_tokens_dev = &tokens;
        void *h = testing_buffer((int64_t)slots * kF * 2, 0), *y = testing_buffer(kMost * kD * 4, 0);
        args.y = y;
        epmoe_experts_args_t checked;
        cr_assert_eq(epmoei_experts_check_shape(&args, &checked), EPMOE_OK, "%s", epmoe_last_error());
        cr_assert_eq(epmoei_experts_few_gate_up_ref(&checked, h), EPMOE_OK, "%s", epmoe_last_error());
        cr_assert_eq(epmoei_experts_few_down_ref(&checked, h), EPMOE_OK, "%s", epmoe_last_error());

        oracle_experts_t oracle = {.hidden = kD,
                                   .intermediate = kF,
                                   .dtype = dtype,
                                   .activation = args.activation,
                                   .limit = args.limit,
                                   .layout = i / 8 % 2 ? EPMOE_LAYOUT_GATE_FIRST : EPMOE_LAYOUT_INTERLEAVED,
                                   .weight_on_input = args.weight_on_input,
                                   .gate_up = args.gate_up,
                                   .down = args.down,
                                   .gate_up_bias = args.gate_up_bias,
                                   .down_bias = args.down_bias};
        int64_t row_bytes = kD * epmoe_dtype_size(y_dtype);
        for (int32_t t = 0; t < tokens; t++) {
            double row[kD], ref[kD], bound[kD];
            oracle_row(x, dtype, t, kD, row);
            for (int32_t c = 0; c < kD; c++) {
                double added = full ? (double)addend[t * kD + c] : 0;
                double kept = full ? (double)epmoei_load(residual, y_dtype, t * kD + c) : 0;
                ref[c] = added + kept, bound[c] = 0x1p-22 * (fabs(added) + fabs(kept)); /* they may cancel */
            }
            for (int32_t s = t * top_k; s < (t + 1) * top_k; s++)
                if (ids[s] >= 0 && ids[s] < kExperts)
                    oracle_slot(&oracle, ids[s], row, (double)weights[s], 0, ref, bound);
            double error = oracle_error((char *)y + t * row_bytes, y_dtype, ref, bound, kD);
            cr_expect(error <= 1, "case %d: token %d is off by %g times what fp32 allows", i, t, error);
        }
        int64_t written = tokens * row_bytes, h_written = (int64_t)tokens * top_k * kF * 2;
        cr_expect(testing_is_poison(y, written, kMost * kD * 4 - written), "case %d: y past the tokens", i);
        cr_expect(testing_is_poison(h, h_written, (int64_t)slots * kF * 2 - h_written), "case %d: h past the tokens",
                  i);
        void *all[] = {x, gate_up, down, residual, gate_up_bias, down_bias, addend, weights, ids, h, y};
        for (size_t b = 0; b < sizeof all / sizeof all[0]; b++) {
            cr_expect(testing_guards_intact(all[b]), "case %d: buffer %zu", i, b);
            testing_buffer_free(all[b]);
        }
    }
}
