/* RoPE: cases worked by hand, rotation by complex numbers in double precision, strides, positions, tables. */
#include "dense_layers/rope.h"
#include "tests/op_testing.h"

#include <complex.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static void make_table(float *table, int32_t positions, int32_t rot, double base)
{
    for (int64_t p = 0; p < positions; p++)
        for (int64_t i = 0; i < rot / 2; i++) {
            double angle = (double)p * pow(base, -2.0 * (double)i / rot);
            table[p * rot + i] = (float)cos(angle);
            table[p * rot + rot / 2 + i] = (float)sin(angle);
        }
}

/* Runs the public entry on the caller's buffers and both kernels on copies of the `q_count` and `k_count` elements. */
static void run(const epmoe_rope_args_t *args, int64_t q_count, int64_t k_count)
{
    epmoe_status_t (*const kernels[])(const epmoe_rope_args_t *, epmoe_stream_t) = {epmoei_rope_ref, epmoei_rope_cpu};
    int64_t size = epmoe_dtype_size(args->dtype);
    void *q[2], *k[2];
    for (int i = 0; i < 2; i++) {
        epmoe_rope_args_t own;
        cr_assert_eq(epmoei_rope_check(args, &own), EPMOE_OK, "%s", epmoe_last_error());
        own.q = memcpy(q[i] = testing_buffer(q_count * size, 0), args->q, (size_t)(q_count * size));
        own.k = k[i] = testing_buffer(k_count * size, 0);
        if (k_count) memcpy(k[i], args->k, (size_t)(k_count * size));
        cr_assert_eq(kernels[i](&own, NULL), EPMOE_OK, "%s", epmoe_last_error());
        cr_assert(testing_guards_intact(q[i]) && testing_guards_intact(k[i]));
    }
    cr_assert_eq(epmoe_rope(args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    for (int i = 0; i < 2; i++) {
        cr_assert(op_same_bits(q[i], args->q, args->dtype, q_count), "q of kernel %d differs", i);
        cr_assert(!k_count || op_same_bits(k[i], args->k, args->dtype, k_count), "k of kernel %d differs", i);
        testing_buffer_free(q[i]), testing_buffer_free(k[i]);
    }
}

static epmoe_rope_args_t make(int32_t num_tokens, int32_t num_heads, int32_t head_dim, epmoe_dtype_t dtype, void *q,
                              const int64_t *positions, const float *table, int32_t num_positions)
{
    epmoe_rope_args_t args = EPMOE_ROPE_ARGS_INIT;
    args.num_tokens = num_tokens;
    args.num_heads = num_heads;
    args.head_dim = head_dim;
    args.dtype = dtype;
    args.q = q;
    args.positions = positions;
    args.cos_sin = table;
    args.num_positions = num_positions;
    return args;
}

static void expect_row(const float *got, const double *expected, int32_t n)
{
    for (int32_t i = 0; i < n; i++)
        cr_assert(fabs((double)got[i] - expected[i]) <= 1e-6, "[%d] is %.9g, expected %.9g", i, (double)got[i],
                  expected[i]);
}

/* Head 8, rotary 4: frequencies and pairs come from the rotary width, and the tail stays. */
Test(rope, by_hand)
{
    enum { D = 8, ROT = 4 };
    float table[2 * ROT];
    make_table(table, 2, ROT, 10000);
    const float start[D] = {1, 0, 0, 0, 5, 6, 7, 8}, second[D] = {0, 2, 0, 3, 5, 6, 7, 8};
    const double c1 = 0.54030230586814, s1 = 0.84147098480790, c2 = 0.99995000041667, s2 = 0.00999983333417;
    for (int64_t position = 0; position < 2; position++) {
        double c = position ? c1 : 1, s = position ? s1 : 0, cc = position ? c2 : 1, ss = position ? s2 : 0;
        float q[D];
        epmoe_rope_args_t args = make(1, 1, D, EPMOE_F32, q, &position, table, 2);
        args.rotary_dim = ROT;
        memcpy(q, start, sizeof q);
        run(&args, D, 0);
        expect_row(q, (double[]){c, 0, s, 0, 5, 6, 7, 8}, D);
        memcpy(q, second, sizeof q); /* the second pair turns by 0.01 */
        run(&args, D, 0);
        expect_row(q, (double[]){0, 2 * cc - 3 * ss, 0, 3 * cc + 2 * ss, 5, 6, 7, 8}, D);
        args.style = EPMOE_ROPE_GPTJ;
        memcpy(q, start, sizeof q);
        run(&args, D, 0);
        expect_row(q, (double[]){c, s, 0, 0, 5, 6, 7, 8}, D);
        memcpy(q, second, sizeof q);
        run(&args, D, 0);
        expect_row(q, (double[]){-2 * s, 2 * c, -3 * ss, 3 * cc, 5, 6, 7, 8}, D);
        args.inverse = 1;
        run(&args, D, 0);
        expect_row(q, (double[]){0, 2, 0, 3, 5, 6, 7, 8}, D);
    }
}

Test(rope, random_heads_against_complex_rotation)
{
    enum { P = 700 };
    testing_rng_t rng = testing_rng(testing_seed());
    const int32_t dims[] = {2, 8, 64, 96, 128, 130, 2600};
    for (int round = 0; round < 84; round++) {
        int d = round % 3;
        epmoe_dtype_t dtype = op_dtypes[d].dtype;
        int32_t size = epmoe_dtype_size(dtype), dim = dims[round / 12];
        int32_t rot = testing_range(&rng, 0, 1) ? dim : 2 * testing_range(&rng, 1, dim / 2);
        int32_t tokens = testing_range(&rng, 1, dim > 1000 ? 3 : 9), heads = testing_range(&rng, 1, 5),
                kv_heads = testing_range(&rng, 0, 2);
        float *table = testing_buffer(P * (int64_t)rot * 4, 0);
        make_table(table, P, rot, 10000);
        int64_t head_stride = dim + testing_range(&rng, 0, 1) * 3, q_stride = heads * head_stride + 5,
                k_stride = (kv_heads ? kv_heads : 1) * head_stride;
        int64_t q_count = tokens * q_stride, k_count = kv_heads ? tokens * k_stride : 0;
        void *q = testing_buffer(q_count * size, size), *k = testing_buffer(k_count * size, size);
        testing_fill_normal(&rng, q, dtype, q_count, 1), testing_fill_normal(&rng, k, dtype, k_count, 1);
        float *before[2] = {malloc((size_t)q_count * 4), malloc((size_t)k_count * 4 + 4)};
        epmoei_to_f32(before[0], q, dtype, q_count), epmoei_to_f32(before[1], k, dtype, k_count);
        int64_t positions[9];
        int32_t narrow[9];
        for (int t = 0; t < tokens; t++) narrow[t] = (int32_t)(positions[t] = testing_range(&rng, 0, P - 1));
        epmoe_rope_args_t args = make(tokens, heads, dim, dtype, q, positions, table, P);
        if (testing_range(&rng, 0, 1)) args.positions = narrow, args.positions_dtype = EPMOE_I32;
        args.num_kv_heads = kv_heads, args.k = kv_heads ? k : NULL;
        args.q_stride = q_stride, args.k_stride = k_stride, args.head_stride = head_stride;
        args.rotary_dim = rot == dim && testing_range(&rng, 0, 1) ? 0 : rot;
        args.style = (epmoe_rope_style_t)testing_range(&rng, 0, 1);
        args.inverse = testing_range(&rng, 0, 1);
        run(&args, q_count, k_count);
        for (int part = 0; part < 2; part++) {
            int64_t stride = part ? k_stride : q_stride, count = part ? k_count : q_count;
            for (int64_t e = 0; e < count; e++) {
                int64_t t = e / stride, h = e % stride / head_stride, i = e % stride % head_stride;
                double value = (double)epmoei_load(part ? k : q, dtype, e), expected = (double)before[part][e];
                if (h < (part ? kv_heads : heads) && i < rot) {
                    bool neox = args.style == EPMOE_ROPE_NEOX;
                    int64_t pair = neox ? i % (rot / 2) : i / 2, base = e - i;
                    double re = (double)before[part][base + (neox ? pair : 2 * pair)];
                    double im = (double)before[part][base + (neox ? pair + rot / 2 : 2 * pair + 1)];
                    double angle = (double)positions[t] * pow(10000, -2.0 * (double)pair / rot);
                    double complex turned = (re + im * I) * cexp((args.inverse ? -I : I) * angle);
                    expected = (neox ? i < rot / 2 : i % 2 == 0) ? creal(turned) : cimag(turned);
                    double magnitude = fabs(re) + fabs(im);
                    cr_assert(fabs(value - expected) <=
                                  op_dtypes[d].half_ulp * 1.01 * fabs(expected) + 3e-7 * magnitude + 0x1p-24 * (d == 2),
                              "dim %d rot %d part %d [%lld,%lld,%lld] is %.9g, expected %.9g", dim, rot, part,
                              (long long)t, (long long)h, (long long)i, value, expected);
                } else
                    cr_assert_eq(value, expected, "element %lld changed", (long long)e);
            }
        }
        cr_assert(testing_guards_intact(q) && testing_guards_intact(k) && testing_guards_intact(table));
        testing_buffer_free(q), testing_buffer_free(k), testing_buffer_free(table);
        free(before[0]), free(before[1]);
    }
}

/* q and k as columns of one packed row, v behind them. */
Test(rope, packed_rows)
{
    enum { T = 3, H = 4, K = 2, D = 16, ROW = (H + 2 * K) * D };
    testing_rng_t rng = testing_rng(testing_seed());
    float table[8 * D], packed[T * ROW], q[T * H * D], k[T * K * D], v[T * K * D];
    const int64_t positions[T] = {0, 7, 3};
    make_table(table, 8, D, 10000);
    testing_fill_normal(&rng, packed, EPMOE_F32, T * ROW, 1);
    for (int t = 0; t < T; t++) {
        memcpy(q + t * H * D, packed + t * ROW, sizeof(float) * H * D);
        memcpy(k + t * K * D, packed + t * ROW + H * D, sizeof(float) * K * D);
        memcpy(v + t * K * D, packed + t * ROW + (H + K) * D, sizeof(float) * K * D);
    }
    epmoe_rope_args_t args = make(T, H, D, EPMOE_F32, q, positions, table, 8);
    args.num_kv_heads = K, args.k = k;
    run(&args, T * H * D, T * K * D);
    args.q = packed, args.k = packed + H * D;
    args.q_stride = args.k_stride = ROW;
    cr_assert_eq(epmoe_rope(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    for (int t = 0; t < T; t++) {
        cr_assert_eq(memcmp(q + t * H * D, packed + t * ROW, sizeof(float) * H * D), 0);
        cr_assert_eq(memcmp(k + t * K * D, packed + t * ROW + H * D, sizeof(float) * K * D), 0);
        cr_assert_eq(memcmp(v + t * K * D, packed + t * ROW + (H + K) * D, sizeof(float) * K * D), 0);
    }
}

/* Either width of position; outside the table nothing is written, and nothing is read behind it. */
Test(rope, positions_outside_the_table)
{
    enum { P = 16, T = 5, D = 8 };
    float *table = testing_buffer(P * D * 4, 0), q[T * D], before[T * D];
    make_table(table, P, D, 10000);
    for (int i = 0; i < T * D; i++) before[i] = (float)(i + 1);
    for (int wide = 0; wide < 2; wide++) {
        int64_t positions[T] = {0, 15, 7, 1, 15};
        int32_t narrow[T] = {0, 15, 7, 1, 15};
        epmoe_rope_args_t args = make(T, 1, D, EPMOE_F32, q, positions, table, P);
        if (!wide) args.positions = narrow, args.positions_dtype = EPMOE_I32;
        memcpy(q, before, sizeof q);
        run(&args, T * D, 0);
        for (int i = 0; i < T * D; i++) cr_assert(isfinite(q[i]));
        for (int i = 0; i < D; i++) cr_assert_eq(q[i], before[i], "position 0 turns nothing");
        const int64_t bad[] = {16, -1, INT32_MAX, INT32_MIN};
        for (int b = 0; b < 4; b++) {
            positions[3] = bad[b], narrow[3] = (int32_t)bad[b];
            memcpy(q, before, sizeof q);
            epmoe_rope_args_t checked;
            cr_assert_eq(epmoei_rope_check(&args, &checked), EPMOE_OK);
            cr_assert_eq(epmoei_rope_ref(&checked, NULL), EPMOE_ERROR_INVALID_ARGUMENT);
            cr_assert_eq(epmoe_rope(&args, NULL), EPMOE_ERROR_INVALID_ARGUMENT);
            char expected[64];
            snprintf(expected, sizeof expected, "positions[3] is %lld: expected 0 to 15", (long long)bad[b]);
            cr_assert_str_eq(epmoe_last_error(), expected);
            cr_assert_eq(memcmp(q, before, sizeof q), 0);
        }
        positions[3] = INT64_C(1) << 32; /* 0 if it were cut to 32 bits */
        if (wide) cr_assert_eq(epmoe_rope(&args, NULL), EPMOE_ERROR_INVALID_ARGUMENT);
    }
    testing_buffer_free(table);
}

Test(rope, no_tokens)
{
    epmoe_rope_args_t args = make(0, 2, 8, EPMOE_BF16, NULL, NULL, NULL, 4);
    args.num_kv_heads = 1;
    cr_assert_eq(epmoe_rope(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
}

Test(rope, errors_name_the_argument_and_leave_the_output)
{
    float table[16] = {1}, *q = testing_buffer(64, 0);
    const int64_t positions[2] = {0, 1};
    epmoe_rope_args_t base = make(2, 1, 8, EPMOE_F32, q, positions, table, 2);
#define REJECTS(needle, statement) OP_INVALID(epmoe_rope, base, needle, testing_is_poison(q, 0, 64), statement)
    REJECTS("num_tokens is -1", bad.num_tokens = -1);
    REJECTS("num_heads is 0", bad.num_heads = 0);
    REJECTS("num_kv_heads is -1", bad.num_kv_heads = -1);
    REJECTS("head_dim is 1", bad.head_dim = 1);
    REJECTS("rotary_dim is 7", bad.head_dim = 7);
    REJECTS("rotary_dim is 3", bad.rotary_dim = 3);
    REJECTS("rotary_dim is 10", bad.rotary_dim = 10);
    REJECTS("rotary_dim is -2", bad.rotary_dim = -2);
    REJECTS("style is 2", bad.style = (epmoe_rope_style_t)2);
    REJECTS("style is -1", bad.style = (epmoe_rope_style_t)-1);
    REJECTS("inverse is 2", bad.inverse = 2);
    REJECTS("dtype", bad.dtype = EPMOE_F8_E4M3);
    REJECTS("head_stride is 7", bad.head_stride = 7);
    REJECTS("q_stride is 7", bad.q_stride = 7);
    REJECTS("q_stride is 15", (bad.num_heads = 2, bad.q_stride = 15));
    REJECTS("q_stride", (bad.num_heads = INT32_MAX, bad.head_stride = INT64_MAX / 16));
    REJECTS("k_stride is 1", bad.k_stride = 1);
    REJECTS("positions_dtype", bad.positions_dtype = EPMOE_U8);
    REJECTS("num_positions is 0", bad.num_positions = 0);
    REJECTS("q is NULL", bad.q = NULL);
    REJECTS("k is NULL", bad.num_kv_heads = 1);
    REJECTS("positions is NULL", bad.positions = NULL);
    REJECTS("cos_sin is NULL", bad.cos_sin = NULL);
    REJECTS("backend is -1", bad.backend = (epmoe_backend_t)-1);
#undef REJECTS
    testing_buffer_free(q);
}

Test(rope, struct_sizes)
{
    /* The last field is needed, so that no shorter struct can work. */
    const float table[2] = {1, 0};
    float *q = testing_buffer(8, 0);
    const int64_t position = 0;
    epmoe_rope_args_t base = make(1, 1, 2, EPMOE_F32, q, &position, table, 1);
    OP_STRUCT_SIZES(epmoe_rope, base, sizeof base, testing_is_poison(q, 0, 8), true);
    testing_buffer_free(q);
}

Test(rope, floor_counts_each_byte_once)
{
    epmoe_rope_args_t args = {.num_tokens = 3,
                              .num_heads = 4,
                              .num_kv_heads = 2,
                              .head_dim = 128,
                              .rotary_dim = 64,
                              .dtype = EPMOE_BF16,
                              .positions_dtype = EPMOE_I64};
    cr_assert_eq(epmoei_rope_floor(&args).bytes, 3 * (6 * 64 * 2 * 2 + 64 * 4 + 8));
}

/* --------------------------------------------------------------------------------------------------------- tables */

static epmoe_rope_table_args_t make_table_args(int32_t positions, int32_t rot, float *table)
{
    epmoe_rope_table_args_t args = EPMOE_ROPE_TABLE_ARGS_INIT;
    args.num_positions = positions;
    args.rotary_dim = rot;
    args.cos_sin = table;
    return args;
}

/* frequencies[i] as the angle per position, all entries times `magnitude`. */
static void expect_table(const epmoe_rope_table_args_t *args, const double *frequencies, double magnitude)
{
    cr_assert_eq(epmoe_rope_table(args), EPMOE_OK, "%s", epmoe_last_error());
    int64_t half = args->rotary_dim / 2;
    for (int64_t p = 0; p < args->num_positions; p++)
        for (int64_t i = 0; i < half; i++) {
            double c = magnitude * cos((double)p * frequencies[i]), s = magnitude * sin((double)p * frequencies[i]);
            double got_c = (double)args->cos_sin[p * 2 * half + i];
            double got_s = (double)args->cos_sin[p * 2 * half + half + i];
            cr_assert(fabs(got_c - c) < 2e-7 * magnitude && fabs(got_s - s) < 2e-7 * magnitude,
                      "position %lld pair %lld: %.9g %.9g, expected %.9g %.9g", (long long)p, (long long)i, got_c,
                      got_s, c, s);
        }
    cr_assert(testing_guards_intact(args->cos_sin));
}

Test(rope, plain_and_linear_tables)
{
    enum { P = 33, ROT = 6 };
    float *table = testing_buffer(P * ROT * 4, 0);
    epmoe_rope_table_args_t args = make_table_args(P, ROT, table);
    args.base = 1e6;
    const double plain[] = {1, 0.01, 0.0001}, slowed[] = {0.25, 0.0025, 0.000025};
    expect_table(&args, plain, 1);
    args.factor = 4; /* ignored without a scaling */
    expect_table(&args, plain, 1);
    args.scaling = EPMOE_ROPE_SCALING_LINEAR;
    expect_table(&args, slowed, 1);
    args.base = 0;
    args.scaling = EPMOE_ROPE_SCALING_NONE;
    expect_table(&args, (double[]){1, pow(10000, -1.0 / 3), pow(10000, -2.0 / 3)}, 1);
    testing_buffer_free(table);
}

/* Far out in a long context: single precision angles would be off in the third digit. */
Test(rope, tables_are_exact_at_large_positions)
{
    enum { P = 1000001 };
    float *table = malloc((size_t)P * 2 * sizeof *table);
    epmoe_rope_table_args_t args = make_table_args(P, 2, table);
    cr_assert_eq(epmoe_rope_table(&args), EPMOE_OK);
    cr_assert(fabs((double)table[2 * 1000000] - 0.93675212753314) < 1e-7);
    cr_assert(fabs((double)table[2 * 1000000 + 1] + 0.34999350217129) < 1e-7);
    free(table);
}

/* Base 10^4, rotary 8: frequencies 1, .1, .01, .001, wavelengths 6.28, 62.8, 628, 6283 against L = 512: bounds 128 and
 * 512, so that 1 and .1 stay, .01 and .001 are divided; with L = 2048 (512 and 2048) .01 lies between. */
Test(rope, llama3_table)
{
    enum { P = 40, ROT = 8 };
    float *table = testing_buffer(P * ROT * 4, 0);
    epmoe_rope_table_args_t args = make_table_args(P, ROT, table);
    args.scaling = EPMOE_ROPE_SCALING_LLAMA3;
    args.factor = 8;
    args.original_positions = 512;
    expect_table(&args, (double[]){1, 0.1, 0.00125, 0.000125}, 1);
    args.original_positions = 2048;
    args.low_freq_factor = 1, args.high_freq_factor = 4;
    double smooth = (2048 / (200 * M_PI) - 1) / 3;
    expect_table(&args, (double[]){1, 0.1, (1 - smooth) * 0.00125 + smooth * 0.01, 0.000125}, 1);
    /* Llama 4: a step. The third pair turns 3.26 times. */
    args.low_freq_factor = args.high_freq_factor = 4;
    expect_table(&args, (double[]){1, 0.1, 0.00125, 0.000125}, 1);
    args.low_freq_factor = args.high_freq_factor = 3;
    expect_table(&args, (double[]){1, 0.1, 0.01, 0.000125}, 1);
    testing_buffer_free(table);
}

/* gpt-oss: base 150000, factor 32, L 4096, betas 32 and 1, head 64, the ramp's ends left as they are. Pair i turns
 * L f[i] / 2 pi times; the ramp is linear in i between 32 turns and 1 turn. */
Test(rope, yarn_table)
{
    enum { P = 50, ROT = 64 };
    float *table = testing_buffer(P * ROT * 4, 0);
    epmoe_rope_table_args_t args = make_table_args(P, ROT, table);
    double frequencies[ROT / 2];
    args.scaling = EPMOE_ROPE_SCALING_YARN;
    args.base = 150000, args.factor = 32, args.original_positions = 4096, args.no_truncate = 1;
    /* f = base^(-i/32) = turns * 2 pi / L solved for i. */
    const double low = 8.092779115512402, high = 17.39802450158856;
    cr_assert(fabs(32 * log(4096 / (32 * 2 * M_PI)) / log(150000) - low) < 1e-9);
    for (int i = 0; i < ROT / 2; i++) {
        double f = pow(150000, -i / 32.0), kept = i <= low ? 1 : i >= high ? 0 : (high - i) / (high - low);
        frequencies[i] = f * kept + f / 32 * (1 - kept);
    }
    const double magnitude = 1.3465735902799727; /* 0.1 ln 32 + 1 */
    expect_table(&args, frequencies, magnitude);
    args.no_truncate = 0; /* 8 and 18 */
    for (int i = 0; i < ROT / 2; i++) {
        double f = pow(150000, -i / 32.0), kept = i <= 8 ? 1 : i >= 18 ? 0 : (18 - i) / 10.0;
        frequencies[i] = f * kept + f / 32 * (1 - kept);
    }
    expect_table(&args, frequencies, magnitude);
    args.attention_factor = 2;
    expect_table(&args, frequencies, 2);
    args.attention_factor = 0; /* as DeepSeek-V3 has it: the softmax scale carries the factor */
    args.mscale = args.mscale_all_dim = 1;
    expect_table(&args, frequencies, 1);
    args.mscale = 0.707;
    expect_table(&args, frequencies, (0.0707 * log(32) + 1) / magnitude);
    testing_buffer_free(table);
}

Test(rope, table_errors)
{
    float *table = testing_buffer(64, 0);
    epmoe_rope_table_args_t base = make_table_args(2, 8, table);
#define REJECTS(needle, statement)                                                                                     \
    do {                                                                                                               \
        epmoe_rope_table_args_t bad = base;                                                                            \
        statement;                                                                                                     \
        cr_assert_eq(epmoe_rope_table(&bad), EPMOE_ERROR_INVALID_ARGUMENT, "%s", #statement);                          \
        cr_assert(strstr(epmoe_last_error(), needle), "%s: '%s'", #statement, epmoe_last_error());                     \
        cr_assert(testing_is_poison(table, 0, 64));                                                                    \
    } while (0)
    REJECTS("num_positions is 0", bad.num_positions = 0);
    REJECTS("rotary_dim is 7", bad.rotary_dim = 7);
    REJECTS("rotary_dim is 0", bad.rotary_dim = 0);
    REJECTS("base is 1", bad.base = 1);
    REJECTS("base is nan", bad.base = (double)NAN);
    REJECTS("factor is 0.5", bad.factor = 0.5);
    REJECTS("factor is inf", bad.factor = (double)INFINITY);
    REJECTS("scaling is 4", bad.scaling = (epmoe_rope_scaling_t)4);
    REJECTS("original_positions is 0", bad.scaling = EPMOE_ROPE_SCALING_YARN);
    REJECTS("original_positions is 0", bad.scaling = EPMOE_ROPE_SCALING_LLAMA3);
    REJECTS("high_freq_factor is 4", (bad.scaling = EPMOE_ROPE_SCALING_LLAMA3, bad.low_freq_factor = 4.5));
    REJECTS("attention_factor is -1", bad.attention_factor = -1);
    REJECTS("no_truncate is 2", bad.no_truncate = 2);
    REJECTS("cos_sin is NULL", bad.cos_sin = NULL);
    REJECTS("struct_size", bad.struct_size = 1);
#undef REJECTS
    testing_buffer_free(table);
}
