/* epmoe_dequant: every format through the public call, several experts, and rejected calls. What the values mean is
 * tested in test_quant_formats. */
#include "tests/op_testing.h"
#include "tests/quant_case.h"

#include "kernels/dequant.h"
#include "kernels/quant_formats.h"

#include <math.h>
#include <stdlib.h>

Test(dequant, all_formats_and_experts)
{
    static const struct {
        epmoe_format_t format;
        int32_t n, k, group;
        bool g_idx;
    } cases[] = {
        {EPMOE_FORMAT_FP8_BLOCK, 300, 200, 128, false},
        {EPMOE_FORMAT_FP8_BLOCK, 5, 9, -1, false},
        {EPMOE_FORMAT_GPTQ, 24, 100, 64, false},
        {EPMOE_FORMAT_GPTQ, 9, 96, 32, true},
        {EPMOE_FORMAT_GPTQ, 16, 40, -1, false},
        {EPMOE_FORMAT_AWQ, 20, 75, 32, false},
        {EPMOE_FORMAT_CT_W4, 11, 53, 16, false},
        {EPMOE_FORMAT_CT_W4, 8, 64, 24, true},
        {EPMOE_FORMAT_MXFP4, 7, 96, 0, false},
        {EPMOE_FORMAT_W4, 6, 50, 16, false},
        {EPMOE_FORMAT_W4, 6, 50, 16, true},
    };
    testing_rng_t rng = testing_rng(testing_seed());
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        enum { E = 3 };
        int64_t n = cases[i].n, k = cases[i].k, total = E * n * k;
        quant_case_t made = quant_case_make(&rng, cases[i].format, E, n, k, cases[i].group,
                                            cases[i].g_idx ? QUANT_INDEX_ANY : QUANT_INDEX_NONE, 0);
        epmoe_dequant_args_t args = EPMOE_DEQUANT_ARGS_INIT, checked;
        args.backend = EPMOE_BACKEND_CPU;
        args.num_experts = E, args.n = cases[i].n, args.k = cases[i].k;
        args.weight = made.weight;
        float *w = testing_buffer(total * 4, 4), *ref = testing_buffer(total * 4, 0);
        args.w = w;
        cr_assert_eq(epmoe_dequant(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
        cr_assert(testing_guards_intact(w));
        cr_assert_eq(epmoei_dequant_check(&args, &checked), EPMOE_OK);
        checked.w = ref;
        cr_assert_eq(epmoei_dequant_ref(&checked, NULL), EPMOE_OK);
        for (int64_t e = 0; e < E; e++)
            for (int64_t r = 0; r < n; r++)
                for (int64_t c = 0; c < k; c++) {
                    epmoei_quant_t quant = epmoei_quant_of_weight(&checked.weight, n, k, e, 0);
                    bool ordered = cases[i].format == EPMOE_FORMAT_W4 && cases[i].g_idx;
                    int64_t to = (e * n + r) * k + (ordered ? (c * 7 + e) % k : c);
                    float value = epmoei_quant_at(&quant, r, c);
                    cr_assert(isfinite(value));
                    cr_assert(epmoei_f32_bits(w[to]) == epmoei_f32_bits(value) &&
                              epmoei_f32_bits(ref[to]) == epmoei_f32_bits(value));
                }
        testing_buffer_free(w), testing_buffer_free(ref);
        quant_case_free(&made);
    }
}

Test(dequant, plain_formats)
{
    const uint16_t bf16[] = {0x3F80, 0xC000, 0x7F80, 0x0001}, f16[] = {0x3C00, 0xC000, 0x7C00, 0x0001};
    float w[4];
    epmoe_dequant_args_t args = EPMOE_DEQUANT_ARGS_INIT;
    args.backend = EPMOE_BACKEND_CPU;
    args.n = 2, args.k = 2, args.w = w;
    args.weight.format = EPMOE_FORMAT_BF16, args.weight.data = bf16;
    cr_assert_eq(epmoe_dequant(&args, NULL), EPMOE_OK);
    cr_assert((double)w[0] == 1 && (double)w[1] == -2 && isinf(w[2]) && (double)w[3] == 0x1p-133);
    args.weight.format = EPMOE_FORMAT_F16, args.weight.data = f16;
    cr_assert_eq(epmoe_dequant(&args, NULL), EPMOE_OK);
    cr_assert((double)w[0] == 1 && (double)w[1] == -2 && isinf(w[2]) && (double)w[3] == 0x1p-24);
}

Test(dequant, rejected_calls)
{
    testing_rng_t rng = testing_rng(testing_seed());
    quant_case_t made = quant_case_make(&rng, EPMOE_FORMAT_GPTQ, 2, 8, 16, 8, QUANT_INDEX_ANY, 0);
    float *w = testing_buffer(2 * 8 * 16 * 4, 0);
    epmoe_dequant_args_t args = EPMOE_DEQUANT_ARGS_INIT;
    args.backend = EPMOE_BACKEND_CPU;
    args.num_experts = 2, args.n = 8, args.k = 16, args.weight = made.weight, args.w = w;
#define REFUSES(needle, statement)                                                                                     \
    OP_INVALID(epmoe_dequant, args, needle, testing_is_poison(w, 0, 2 * 8 * 16 * 4), statement)
    REFUSES("num_experts is -1", bad.num_experts = -1);
    REFUSES("n is 0", bad.n = 0);
    REFUSES("k is -5", bad.k = -5);
    REFUSES("weight.format is 0", bad.weight.format = EPMOE_FORMAT_NONE);
    REFUSES("weight.format is 10", bad.weight.format = (epmoe_format_t)10);
    REFUSES("weight.group_size is -3", bad.weight.group_size = -3);
    REFUSES("weight.data is NULL", bad.weight.data = NULL);
    REFUSES("weight.scales is NULL", bad.weight.scales = NULL);
    REFUSES("weight.zeros is NULL", bad.weight.zeros = NULL);
    REFUSES("w is NULL", bad.w = NULL);
    made.g_idx[16 + 3] = 2;
    REFUSES("expert 1: weight.g_idx[3] is 2: expected 0..1", (void)bad);
    made.g_idx[16 + 3] = 1;
    OP_STRUCT_SIZES(epmoe_dequant, args, sizeof args, testing_is_poison(w, 0, 64), isfinite(w[255]));
    quant_case_free(&made);
    /* An order that names a column twice would leave another unwritten. */
    made = quant_case_make(&rng, EPMOE_FORMAT_W4, 2, 8, 16, 8, QUANT_INDEX_EVEN, 0);
    args.weight = made.weight;
    made.g_idx[16 + 9] = made.g_idx[16 + 2];
    memset(w, 0x5A, 2 * 8 * 16 * 4);
    cr_assert_eq(epmoe_dequant(&args, NULL), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert(strstr(epmoe_last_error(), "expert 1: weight.g_idx[9] is 15 again"), "%s", epmoe_last_error());
    for (int i = 0; i < 2 * 8 * 16; i++) cr_assert_eq(epmoei_f32_bits(w[i]), 0x5A5A5A5Au);
    testing_buffer_free(w);
    quant_case_free(&made);
}
