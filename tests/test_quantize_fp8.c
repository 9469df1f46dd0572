/* epmoe_quantize_fp8: hand-worked codes and scales, an oracle in double precision, and rejected calls. */
#include "tests/op_testing.h"

#include "base/fp8.h"
#include "kernels/quantize_fp8.h"

#include <math.h>
#include <stdlib.h>

static epmoe_quantize_fp8_args_t args_of(const float *x, int32_t tokens, int32_t hidden,
                                         epmoe_granularity_t granularity, uint8_t *q, float *scale)
{
    epmoe_quantize_fp8_args_t args = EPMOE_QUANTIZE_FP8_ARGS_INIT;
    args.backend = EPMOE_BACKEND_CPU;
    args.num_tokens = tokens, args.hidden = hidden;
    args.dtype = EPMOE_F32;
    args.granularity = granularity;
    args.x = x, args.q = q, args.scale = scale;
    return args;
}

Test(quantize_fp8, static_scale_saturates)
{
    const float x[] = {448,    464,     465,      1000,      -1000, INFINITY, -INFINITY, NAN,
                       447.9f, 0x1p-9f, 0x1p-10f, 0x1.8p-9f, 12,    300,      -0.0f,     0};
    const uint8_t codes[] = {0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7E, 0xFE, 0x7F,
                             0x7E, 0x01, 0x00, 0x02, 0x54, 0x79, 0x80, 0x00};
    const float one = 1, two = 2;
    uint8_t *q = testing_buffer(16, 1);
    float scale = NAN;
    epmoe_quantize_fp8_args_t args = args_of(x, 2, 8, EPMOE_GRANULARITY_TENSOR, q, &scale);
    args.static_scale = &one;
    cr_assert_eq(epmoe_quantize_fp8(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert((double)scale == 1);
    for (int i = 0; i < 16; i++) cr_assert_eq(q[i], codes[i], "%g is 0x%02x", (double)x[i], q[i]);
    args.static_scale = &two; /* it divides */
    cr_assert_eq(epmoe_quantize_fp8(&args, NULL), EPMOE_OK);
    cr_assert((double)scale == 2 && q[0] == 0x76 && q[12] == 0x4C); /* 224 and 6 */
    cr_assert(testing_guards_intact(q));
    testing_buffer_free(q);
}

/* Groups of nothing but zeros, -0 and very small values: no scale is 0, no code a NaN. */
Test(quantize_fp8, zero_groups)
{
    enum { K = 256 };
    float x[4][K] = {{0}}, scale[4][2];
    uint8_t q[4][K];
    for (int c = 128; c < K; c++) x[0][c] = 1;
    x[2][5] = -0.0f;
    x[3][0] = 1e-30f;
    epmoe_quantize_fp8_args_t args = args_of(x[0], 4, K, EPMOE_GRANULARITY_BLOCK128, q[0], scale[0]);
    cr_assert_eq(epmoe_quantize_fp8(&args, NULL), EPMOE_OK);
    cr_assert((double)scale[0][0] == 0x1p-126 && scale[0][1] == 1.0f / 448);
    cr_assert((double)scale[1][0] == 0x1p-126 && (double)scale[2][0] == 0x1p-126);
    cr_assert(scale[3][0] == 1e-30f / 448 && scale[3][0] > 0);
    for (int r = 0; r < 4; r++)
        for (int c = 0; c < K; c++) {
            uint8_t expected = r == 0 && c >= 128 ? 0x7E : r == 2 && c == 5 ? 0x80 : r == 3 && c == 0 ? 0x7E : 0;
            cr_assert_eq(q[r][c], expected, "[%d,%d] is 0x%02x", r, c, q[r][c]);
        }
    cr_assert((double)(epmoei_e4m3_to_f32(q[0][200]) * scale[0][1]) == 1);
}

Test(quantize_fp8, powers_of_two_and_bounds)
{
    /* amax / 448 is 1: stays; a float above it: 2; 0.9: 1; 3.5 / 448 = 2^-7: stays. */
    const float x[4][2] = {{448, -1}, {448.00003f, 1}, {400, 0}, {-3.5f, 2}};
    const double expected[] = {1, 2, 1, 0x1p-7};
    float scale[4], bound = 224;
    uint8_t q[4][2];
    epmoe_quantize_fp8_args_t args = args_of(x[0], 4, 2, EPMOE_GRANULARITY_TOKEN, q[0], scale);
    args.pow2 = 1;
    cr_assert_eq(epmoe_quantize_fp8(&args, NULL), EPMOE_OK);
    for (int i = 0; i < 4; i++) cr_assert((double)scale[i] == expected[i], "row %d: %g", i, (double)scale[i]);
    cr_assert(q[0][0] == 0x7E && q[0][1] == 0xB8 && q[1][0] == 0x76 && q[3][0] == 0xFE && q[3][1] == 0x78);
    /* scale_ub bounds amax, so that what is larger saturates. */
    args.pow2 = 0;
    args.scale_ub = &bound;
    cr_assert_eq(epmoe_quantize_fp8(&args, NULL), EPMOE_OK);
    cr_assert((double)scale[0] == .5 && q[0][0] == 0x7E && q[0][1] == 0xC0); /* -1 / .5 = -2 */
    cr_assert(scale[3] == 3.5f / 448);
    /* A NaN does not count, an infinity counts as the largest finite value. */
    const float special[2][2] = {{NAN, -7}, {INFINITY, 1}};
    args = args_of(special[0], 2, 2, EPMOE_GRANULARITY_TOKEN, q[0], scale);
    cr_assert_eq(epmoe_quantize_fp8(&args, NULL), EPMOE_OK);
    cr_assert((double)scale[0] == 0x1p-6 && q[0][0] == 0x7F && q[0][1] == 0xFE);
    cr_assert(isfinite(scale[1]) && q[1][0] == 0x7E && q[1][1] == 0);
}

/* The nearest code, ties to even, found by trying all of them. */
static int nearest(double value)
{
    int best = 0;
    for (int code = 1; code <= 0x7E; code++) {
        double have = fabs((double)epmoei_e4m3_to_f32((uint8_t)best) - value);
        double next = fabs((double)epmoei_e4m3_to_f32((uint8_t)code) - value);
        if (next < have || (next == have && !(code & 1))) best = code;
    }
    return best;
}

Test(quantize_fp8, random_against_an_oracle)
{
    testing_rng_t rng = testing_rng(testing_seed());
    for (int round = 0; round < 12; round++) {
        epmoe_dtype_t dtype = op_dtypes[round % OP_NUM_DTYPES].dtype;
        epmoe_granularity_t granularity = (epmoe_granularity_t)(1 + round / 3 % 3);
        int32_t tokens = testing_range(&rng, 1, 5), hidden = testing_range(&rng, 1, 700);
        int64_t stride = hidden + testing_range(&rng, 0, 9), blocks = (hidden + 127) / 128,
                size = epmoe_dtype_size(dtype);
        int64_t scales = granularity == EPMOE_GRANULARITY_TENSOR  ? 1
                         : granularity == EPMOE_GRANULARITY_TOKEN ? tokens
                                                                  : tokens * blocks;
        char *x = testing_buffer(tokens * stride * size, (int32_t)size);
        for (int32_t t = 0; t < tokens; t++) testing_fill_normal(&rng, x + t * stride * size, dtype, hidden, 3);
        uint8_t *q = testing_buffer((int64_t)tokens * hidden, 1), *ref_q = malloc((size_t)tokens * (size_t)hidden);
        float *scale = testing_buffer(scales * 4, 4), *ref_scale = malloc((size_t)scales * 4);
        epmoe_quantize_fp8_args_t args = args_of((const void *)x, tokens, hidden, granularity, q, scale), checked;
        args.dtype = dtype, args.x_stride = stride, args.pow2 = round & 1;
        cr_assert_eq(epmoe_quantize_fp8(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
        cr_assert(testing_guards_intact(q) && testing_guards_intact(scale) && testing_guards_intact(x));
        for (int64_t t = 0; t < tokens; t++)
            for (int64_t c = 0; c < hidden; c++) {
                int64_t i = granularity == EPMOE_GRANULARITY_TENSOR  ? 0
                            : granularity == EPMOE_GRANULARITY_TOKEN ? t
                                                                     : t * blocks + c / 128;
                double value = (double)epmoei_load(x, dtype, t * stride + c);
                float quotient = (float)(fabs(value) / (double)scale[i]);
                int expected = nearest((double)quotient) | (value < 0 ? 0x80 : 0);
                cr_assert_eq(q[t * hidden + c], expected, "%g / %g is 0x%02x: expected 0x%02x", value, (double)scale[i],
                             q[t * hidden + c], expected);
                double share = fabs(value) / (double)scale[i]; /* some value of each part comes to the top */
                cr_assert(share <= 448 * 1.0000001);
            }
        /* The reference gives the same bits. */
        cr_assert_eq(epmoei_quantize_fp8_check(&args, &checked), EPMOE_OK);
        checked.q = ref_q, checked.scale = ref_scale;
        cr_assert_eq(epmoei_quantize_fp8_ref(&checked, NULL), EPMOE_OK);
        cr_assert_arr_eq(q, ref_q, (size_t)tokens * (size_t)hidden);
        cr_assert_arr_eq(scale, ref_scale, (size_t)scales * 4);
        testing_buffer_free(x), testing_buffer_free(q), testing_buffer_free(scale);
        free(ref_q), free(ref_scale);
    }
}

Test(quantize_fp8, rejected_calls)
{
    const float x[4] = {1, 2, 3, 4}, good = 1, bad_scale = 0, nan = NAN;
    uint8_t *q = testing_buffer(4, 0);
    float *scale = testing_buffer(16, 0);
    epmoe_quantize_fp8_args_t args = args_of(x, 2, 2, EPMOE_GRANULARITY_TENSOR, q, scale);
#define UNTOUCHED                  (testing_is_poison(q, 0, 4) && testing_is_poison(scale, 0, 16))
#define REJECTS(needle, statement) OP_INVALID(epmoe_quantize_fp8, args, needle, UNTOUCHED, statement)
    REJECTS("num_tokens is -1", bad.num_tokens = -1);
    REJECTS("hidden is 0", bad.hidden = 0);
    REJECTS("dtype is", bad.dtype = EPMOE_F8_E4M3);
    REJECTS("granularity is 0", bad.granularity = (epmoe_granularity_t)0);
    REJECTS("granularity is 4", bad.granularity = (epmoe_granularity_t)4);
    REJECTS("pow2 is 2", bad.pow2 = 2);
    REJECTS("x_stride is 1", bad.x_stride = 1);
    REJECTS("x is NULL", bad.x = NULL);
    REJECTS("q is NULL", bad.q = NULL);
    REJECTS("scale is NULL", bad.scale = NULL);
    REJECTS("*static_scale is 0", bad.static_scale = &bad_scale);
    REJECTS("*scale_ub is nan", bad.scale_ub = &nan);
    REJECTS("pow2 is given", (bad.static_scale = &good, bad.pow2 = 1));
    REJECTS("scale_ub is given", (bad.static_scale = &good, bad.scale_ub = &good));
    REJECTS("granularity is 2", (bad.static_scale = &good, bad.granularity = EPMOE_GRANULARITY_TOKEN));
#undef REJECTS
    OP_STRUCT_SIZES(epmoe_quantize_fp8, args, sizeof args, UNTOUCHED, q[3] == 0x7E);
#undef UNTOUCHED
    epmoe_quantize_fp8_args_t none = args_of(NULL, 0, 2, EPMOE_GRANULARITY_TOKEN, NULL, NULL);
    cr_assert_eq(epmoe_quantize_fp8(&none, NULL), EPMOE_OK, "%s", epmoe_last_error());
    testing_buffer_free(q), testing_buffer_free(scale);
}
