/* The gated activations: hand-worked values, a double-precision oracle by libm, limits, NaN, strides, in place. */
#include "kernels/activation.h"
#include "kernels/silu_and_mul.h"
#include "tests/op_testing.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

#define NUM_ACTIVATIONS 4

static epmoe_silu_and_mul_args_t make(int32_t num_tokens, int32_t width, epmoe_dtype_t dtype, const void *x, void *y)
{
    epmoe_silu_and_mul_args_t args = EPMOE_SILU_AND_MUL_ARGS_INIT;
    args.num_tokens = num_tokens;
    args.width = width;
    args.dtype = dtype;
    args.x = x;
    args.y = y;
    return args;
}

/* Runs the public entry into args->y and compares both kernels with it, bit for bit. */
static void run(const epmoe_silu_and_mul_args_t *args)
{
    epmoe_status_t (*const kernels[])(const epmoe_silu_and_mul_args_t *, epmoe_stream_t) = {epmoei_silu_and_mul_ref,
                                                                                            epmoei_silu_and_mul_cpu};
    int32_t size = epmoe_dtype_size(args->dtype);
    void *y[2];
    for (int i = 0; i < 2; i++) {
        epmoe_silu_and_mul_args_t checked;
        cr_assert_eq(epmoei_silu_and_mul_check(args, &checked), EPMOE_OK, "%s", epmoe_last_error());
        y[i] = checked.y = testing_buffer((int64_t)args->num_tokens * args->width * size, size);
        checked.y_stride = args->width;
        cr_assert_eq(kernels[i](&checked, NULL), EPMOE_OK);
        cr_assert(testing_guards_intact(y[i]));
    }
    cr_assert_eq(epmoe_silu_and_mul(args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    int64_t stride = args->y_stride ? args->y_stride : args->width;
    for (int i = 0; i < 2; i++) {
        for (int64_t t = 0; t < args->num_tokens; t++)
            cr_assert(op_same_bits((char *)y[i] + t * args->width * size, (char *)args->y + t * stride * size,
                                   args->dtype, args->width),
                      "row %lld of kernel %d differs", (long long)t, i);
        testing_buffer_free(y[i]);
    }
}

static double oracle(epmoe_activation_t activation, double gate, double up, double alpha, double limit)
{
    if (limit > 0) {
        gate = fmin(gate, limit);
        up = fmax(fmin(up, limit), -limit);
    }
    switch (activation) {
    case EPMOE_ACTIVATION_GELU: return gate * erfc(-gate / sqrt(2)) / 2 * up;
    case EPMOE_ACTIVATION_GELU_TANH:
        return gate / 2 * (1 + tanh(sqrt(2 / M_PI) * (gate + 0.044715 * pow(gate, 3)))) * up;
    case EPMOE_ACTIVATION_SWIGLU_OAI: return gate / (1 + exp(-alpha * gate)) * (up + 1);
    default: return gate / (1 + exp(-gate)) * up;
    }
}

Test(silu_and_mul, by_hand)
{
    const struct {
        epmoe_activation_t activation;
        float gate, up, alpha, limit;
        double expected;
    } cases[] = {
        {EPMOE_ACTIVATION_SILU, 1, 2, 0, 0, 1.462117157},
        {EPMOE_ACTIVATION_SILU, -1, 2, 0, 0, -0.537882843},
        {EPMOE_ACTIVATION_SILU, 0, 5, 0, 0, 0},
        {EPMOE_ACTIVATION_SILU, 3, -5, 0, 1, -0.731058579}, /* gate and up clamped */
        {EPMOE_ACTIVATION_SILU, -3, 5, 0, 1, -0.142277620}, /* gate from above only */
        {EPMOE_ACTIVATION_GELU, 1, 2, 0, 0, 1.682689492},   /* 2 Phi(1) */
        {EPMOE_ACTIVATION_GELU, -2, 1, 0, 0, -0.045500264},
        {EPMOE_ACTIVATION_GELU, 4, 4, 0, 1, 0.841344746},
        {EPMOE_ACTIVATION_GELU_TANH, 1, 2, 0, 0, 1.682383981},
        {EPMOE_ACTIVATION_GELU_TANH, 4, -4, 0, 1, -0.841191991},
        {EPMOE_ACTIVATION_SWIGLU_OAI, 1, 2, 0, 0, 2.537387298},      /* 3 sigmoid(1.702) */
        {EPMOE_ACTIVATION_SWIGLU_OAI, 9, 9, 0, 0, 55.99962503},      /* both at 7: 7 sigmoid(11.914) * 8 */
        {EPMOE_ACTIVATION_SWIGLU_OAI, -9, -9, 0, 0, 1.201906792e-5}, /* gate not clamped from below, up at -7 */
        {EPMOE_ACTIVATION_SWIGLU_OAI, 1, 2, 1, 0.5f, 0.466844498},   /* .5 sigmoid(.5) * 1.5 */
        {EPMOE_ACTIVATION_SWIGLU_OAI, 1, -1, 0, 0, 0},
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        const float x[] = {cases[c].gate, cases[c].up};
        float y[1];
        epmoe_silu_and_mul_args_t args = make(1, 1, EPMOE_F32, x, y);
        args.activation = cases[c].activation;
        args.alpha = cases[c].alpha;
        args.limit = cases[c].limit;
        run(&args);
        cr_assert(fabs((double)y[0] - cases[c].expected) <= 2e-6 * fabs(cases[c].expected),
                  "case %zu is %.9g, expected %.9g", c, (double)y[0], cases[c].expected);
    }
}

Test(silu_and_mul, widths_that_no_vector_divides)
{
    const int32_t widths[] = {3420, 1234, 12, 4, 352, 704, 1, 3};
    for (size_t w = 0; w < sizeof widths / sizeof *widths; w++)
        for (int d = 0; d < OP_NUM_DTYPES; d++) {
            epmoe_dtype_t dtype = op_dtypes[d].dtype;
            int32_t size = epmoe_dtype_size(dtype);
            int64_t n = 3 * (int64_t)widths[w];
            void *x = testing_buffer(2 * n * size, size), *y = testing_buffer(n * size, size);
            for (int64_t i = 0; i < 2 * n; i++) epmoei_store(x, dtype, i, i / widths[w] % 2 ? 2 : 1);
            epmoe_silu_and_mul_args_t args = make(3, widths[w], dtype, x, y);
            run(&args);
            /* One ulp of 1.46 in each dtype. */
            for (int64_t i = 0; i < n; i++)
                cr_assert(fabs((double)epmoei_load(y, dtype, i) - 1.462117157) <= op_dtypes[d].half_ulp * 1.01,
                          "element %lld is %g", (long long)i, (double)epmoei_load(y, dtype, i));
            cr_assert(testing_guards_intact(x) && testing_guards_intact(y));
            testing_buffer_free(x), testing_buffer_free(y);
        }
}

Test(silu_and_mul, random_shapes_against_double)
{
    testing_rng_t rng = testing_rng(testing_seed());
    const int32_t tokens[] = {1, 3, 63, 127}, widths[] = {1, 7, 96, 769, 1024, 1025, 2880};
    for (int round = 0; round < 120; round++) {
        int d = testing_range(&rng, 0, 2);
        epmoe_dtype_t dtype = op_dtypes[d].dtype;
        int32_t size = epmoe_dtype_size(dtype), width = widths[testing_range(&rng, 0, 6)];
        int32_t num_tokens = tokens[testing_range(&rng, 0, width > 1000 ? 1 : 3)];
        epmoe_activation_t activation = (epmoe_activation_t)testing_range(&rng, 0, NUM_ACTIVATIONS - 1);
        int64_t x_stride = 2 * (int64_t)width + testing_range(&rng, 0, 9), y_stride = width + testing_range(&rng, 0, 9);
        char *x = testing_buffer(num_tokens * x_stride * size, size),
             *y = testing_buffer(num_tokens * y_stride * size, 0);
        for (int32_t t = 0; t < num_tokens; t++) /* what lies between the rows stays NaN */
            testing_fill_normal(&rng, x + t * x_stride * size, dtype, 2 * width, 4);
        epmoe_silu_and_mul_args_t args = make(num_tokens, width, dtype, x, y);
        args.x_stride = x_stride, args.y_stride = y_stride, args.activation = activation;
        args.limit = testing_range(&rng, 0, 1) ? 2.5f : 0.0f;
        args.alpha = testing_range(&rng, 0, 1) ? 1.25f : 0.0f;
        run(&args);
        bool oai = activation == EPMOE_ACTIVATION_SWIGLU_OAI;
        double alpha = args.alpha > 0 ? (double)args.alpha : 1.702;
        double limit = args.limit > 0 ? (double)args.limit : oai ? 7 : 0;
        for (int64_t t = 0; t < num_tokens; t++) {
            for (int64_t i = 0; i < width; i++) {
                double gate = (double)epmoei_load(x, dtype, t * x_stride + i);
                double up = (double)epmoei_load(x, dtype, t * x_stride + width + i);
                double expected = oracle(activation, gate, up, alpha, limit);
                double value = (double)epmoei_load(y, dtype, t * y_stride + i);
                /* fp16 has subnormals of 2^-24; with alpha * gate near -70 a relative bound would ask too much. */
                double bound =
                    (op_dtypes[d].half_ulp * 1.01 + 4e-6) * fabs(expected) + (dtype == EPMOE_F16 ? 0x1p-24 : 1e-12);
                cr_assert(fabs(value - expected) <= bound, "act %d(%g, %g) is %.9g, expected %.9g", (int)activation,
                          gate, up, value, expected);
            }
            cr_assert(testing_is_poison(y, (t * y_stride + width) * size, (y_stride - width) * size), "gap of row %lld",
                      (long long)t);
        }
        cr_assert(testing_guards_intact(x) && testing_guards_intact(y));
        testing_buffer_free(x), testing_buffer_free(y);
    }
}

Test(silu_and_mul, infinities_and_nan)
{
    enum { D = 6 };
    const float x[2 * D] = {-INFINITY, INFINITY, NAN, 1, -FLT_MAX, 2, /* up */ 3, 3, 3, NAN, 3, 1};
    for (int32_t activation = 0; activation < NUM_ACTIVATIONS; activation++) {
        float y[D];
        epmoe_silu_and_mul_args_t args = make(1, D, EPMOE_F32, x, y);
        args.activation = (epmoe_activation_t)activation;
        run(&args);
        cr_assert(y[0] == 0, "activation %d of -inf is %g", activation, (double)y[0]);
        if (activation == EPMOE_ACTIVATION_SWIGLU_OAI)
            cr_assert(fabsf(y[1] - 28.0f) < 1e-3f, "gate is clamped to 7");
        else
            cr_assert(y[1] == INFINITY);
        cr_assert(isnan(y[2]) && isnan(y[3]), "a NaN of gate or up flows through, also past the clamps");
        cr_assert(y[4] == 0, "a large negative gate gives 0, not NaN: %g", (double)y[4]);
        cr_assert(y[5] > 1.7f && y[5] < 4, "a NaN spread");
        args.limit = 4;
        run(&args);
        cr_assert(y[0] == 0 && isnan(y[2]) && isnan(y[3]) && y[4] == 0 && y[1] > 0 && y[1] <= 16);
    }
}

Test(silu_and_mul, in_place)
{
    testing_rng_t rng = testing_rng(testing_seed());
    enum { T = 9, D = 1300 };
    for (int d = 0; d < OP_NUM_DTYPES; d++)
        for (int strided = 0; strided < 2; strided++) {
            epmoe_dtype_t dtype = op_dtypes[d].dtype;
            int32_t size = epmoe_dtype_size(dtype);
            int64_t stride = 2 * D + 5 * strided;
            char *x = testing_buffer(T * stride * size, size), *y = testing_buffer(T * D * size, 0);
            testing_fill_normal(&rng, x, dtype, T * stride, 1);
            epmoe_silu_and_mul_args_t args = make(T, D, dtype, x, y);
            args.x_stride = stride;
            run(&args);
            char *up = malloc((size_t)(T * stride * size));
            memcpy(up, x, (size_t)(T * stride * size));
            args.y = x;
            args.y_stride = stride;
            cr_assert_eq(epmoe_silu_and_mul(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
            for (int64_t t = 0; t < T; t++) {
                cr_assert(op_same_bits(x + t * stride * size, y + t * D * size, dtype, D), "row %lld", (long long)t);
                cr_assert_eq(
                    memcmp(x + (t * stride + D) * size, up + (t * stride + D) * size, (size_t)((stride - D) * size)), 0,
                    "the up half of row %lld changed", (long long)t);
            }
            cr_assert(testing_guards_intact(x));
            free(up);
            testing_buffer_free(x), testing_buffer_free(y);
        }
}

/* The exponential under every score and activation, over all of its range. */
Test(silu_and_mul, exponential)
{
    for (uint64_t bits = 0; bits < UINT64_C(1) << 32; bits += 1009) {
        float x = epmoei_f32_from_bits((uint32_t)bits), value = epmoei_exp(x);
        double expected = exp((double)x);
        if (isnan(x))
            cr_assert(isnan(value));
        else if (expected > 0x1.ffffffp127)
            cr_assert_eq(value, INFINITY, "exp(%a)", (double)x);
        else
            cr_assert(fabs((double)value - expected) <= 1.1 * fmax(0x1p-23 * exp2(floor(log2(expected))), 0x1p-149),
                      "exp(%a) is %a, expected %a", (double)x, (double)value, expected);
    }
    cr_assert_eq(epmoei_exp(0), 1);
    cr_assert_eq(epmoei_exp(-INFINITY), 0);
    cr_assert_eq(epmoei_exp(INFINITY), INFINITY);
    cr_assert_eq(epmoei_sigmoid(-INFINITY), 0);
    cr_assert_eq(epmoei_sigmoid(INFINITY), 1);
}

Test(silu_and_mul, no_tokens)
{
    epmoe_silu_and_mul_args_t args = make(0, 8, EPMOE_BF16, NULL, NULL);
    cr_assert_eq(epmoe_silu_and_mul(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
}

Test(silu_and_mul, errors_name_the_argument_and_leave_the_output)
{
    float x[16] = {0};
    float *y = testing_buffer(32, 0);
    epmoe_silu_and_mul_args_t base = make(2, 4, EPMOE_F32, x, y);
#define REJECTS(needle, statement) OP_INVALID(epmoe_silu_and_mul, base, needle, testing_is_poison(y, 0, 32), statement)
    REJECTS("num_tokens is -1", bad.num_tokens = -1);
    REJECTS("width is 0", bad.width = 0);
    REJECTS("width is -4", bad.width = -4);
    REJECTS("dtype", bad.dtype = EPMOE_DTYPE_NONE);
    REJECTS("dtype", bad.dtype = EPMOE_F8_E4M3);
    REJECTS("x_stride is 7", bad.x_stride = 7);
    REJECTS("y_stride is 3", bad.y_stride = 3);
    REJECTS("y_stride is -4", bad.y_stride = -4);
    REJECTS("x_stride", bad.x_stride = INT64_MAX);
    REJECTS("activation is 4", bad.activation = EPMOE_ACTIVATION_NONE);
    REJECTS("activation is -1", bad.activation = (epmoe_activation_t)-1);
    REJECTS("activation is 9", bad.activation = (epmoe_activation_t)9);
    REJECTS("alpha is", bad.alpha = NAN);
    REJECTS("alpha is -1", bad.alpha = -1);
    REJECTS("alpha is inf", bad.alpha = INFINITY);
    REJECTS("limit is", bad.limit = NAN);
    REJECTS("limit is -1", bad.limit = -1);
    REJECTS("x is NULL", bad.x = NULL);
    REJECTS("y is NULL", bad.y = NULL);
    REJECTS("y == x", bad.y = x);
    REJECTS("backend is -1", bad.backend = (epmoe_backend_t)-1);
#undef REJECTS
    testing_buffer_free(y);
}

Test(silu_and_mul, activation_defaults)
{
    float alpha = 0, limit = 0;
    cr_assert_eq(epmoei_activation_check(EPMOE_ACTIVATION_SWIGLU_OAI, false, &alpha, &limit), EPMOE_OK);
    cr_assert(alpha == 1.702f && limit == 7);
    alpha = 1, limit = 3;
    cr_assert_eq(epmoei_activation_check(EPMOE_ACTIVATION_SWIGLU_OAI, false, &alpha, &limit), EPMOE_OK);
    cr_assert(alpha == 1 && limit == 3);
    alpha = limit = 0;
    cr_assert_eq(epmoei_activation_check(EPMOE_ACTIVATION_SILU, false, &alpha, &limit), EPMOE_OK);
    cr_assert(alpha == 0 && limit == 0);
    cr_assert_eq(epmoei_activation_check(EPMOE_ACTIVATION_NONE, true, &alpha, &limit), EPMOE_OK);
    cr_assert_eq(epmoei_activation_check(EPMOE_ACTIVATION_NONE, false, &alpha, &limit), EPMOE_ERROR_INVALID_ARGUMENT);
}

Test(silu_and_mul, struct_sizes)
{
    const float x[] = {1, 2};
    float *y = testing_buffer(4, 0);
    epmoe_silu_and_mul_args_t base = make(1, 1, EPMOE_F32, x, y);
    OP_STRUCT_SIZES(epmoe_silu_and_mul, base, offsetof(epmoe_silu_and_mul_args_t, y_stride), testing_is_poison(y, 0, 4),
                    fabsf(y[0] - 1.4621172f) < 1e-6f);
    testing_buffer_free(y);
}

Test(silu_and_mul, floor_counts_each_byte_once)
{
    epmoe_silu_and_mul_args_t args = {.num_tokens = 3, .width = 8, .dtype = EPMOE_BF16};
    cr_assert_eq(epmoei_silu_and_mul_floor(&args).bytes, 3 * 3 * 8 * 2);
}
