/* QK-norm with RoPE on packed rows: double precision, and the bits of norm and rotation one after the other. */
#include "dense_layers/qk_norm_rope.h"
#include "tests/op_testing.h"

#include <math.h>
#include <stdlib.h>

enum { P = 50 };

static void make_table(float *table, int32_t rot)
{
    for (int64_t p = 0; p < P; p++)
        for (int64_t i = 0; i < rot / 2; i++) {
            double angle = (double)p * pow(10000, -2.0 * (double)i / rot);
            table[p * rot + i] = (float)cos(angle);
            table[p * rot + rot / 2 + i] = (float)sin(angle);
        }
}

static void run(const epmoe_qk_norm_rope_args_t *args, int64_t count)
{
    epmoe_status_t (*const kernels[])(const epmoe_qk_norm_rope_args_t *, epmoe_stream_t) = {epmoei_qk_norm_rope_ref,
                                                                                            epmoei_qk_norm_rope_cpu};
    int64_t bytes = count * epmoe_dtype_size(args->dtype);
    void *qkv[2];
    for (int i = 0; i < 2; i++) {
        epmoe_qk_norm_rope_args_t own;
        cr_assert_eq(epmoei_qk_norm_rope_check(args, &own), EPMOE_OK, "%s", epmoe_last_error());
        own.qkv = memcpy(qkv[i] = testing_buffer(bytes, 0), args->qkv, (size_t)bytes);
        cr_assert_eq(kernels[i](&own, NULL), EPMOE_OK, "%s", epmoe_last_error());
        cr_assert(testing_guards_intact(qkv[i]));
    }
    cr_assert_eq(epmoe_qk_norm_rope(args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    for (int i = 0; i < 2; i++) {
        cr_assert(op_same_bits(qkv[i], args->qkv, args->dtype, count), "kernel %d differs", i);
        testing_buffer_free(qkv[i]);
    }
}

static epmoe_qk_norm_rope_args_t make(int32_t num_tokens, int32_t heads, int32_t kv_heads, int32_t head_dim,
                                      epmoe_dtype_t dtype, void *qkv, const void *q_weight, const void *k_weight,
                                      const int64_t *positions, const float *table)
{
    epmoe_qk_norm_rope_args_t args = EPMOE_QK_NORM_ROPE_ARGS_INIT;
    args.num_tokens = num_tokens;
    args.num_heads = heads;
    args.num_kv_heads = kv_heads;
    args.head_dim = head_dim;
    args.dtype = dtype;
    args.qkv = qkv;
    args.q_weight = q_weight;
    args.k_weight = k_weight;
    args.positions = positions;
    args.cos_sin = table;
    args.num_positions = P;
    return args;
}

/* Heads [3,4] and [-6,8] with weights [1,2]: normalised by sqrt(12.5) and sqrt(50), then a quarter turn. */
Test(qk_norm_rope, by_hand)
{
    float table[2 * P] = {0}, qkv[6] = {3, 4, -6, 8, 9, 10};
    const float q_weight[] = {1, 2}, k_weight[] = {1, 0.5f};
    const int64_t position = 7;
    table[15] = 1; /* at 7: cos 0, sin 1 */
    epmoe_qk_norm_rope_args_t args = make(1, 1, 1, 2, EPMOE_F32, qkv, q_weight, k_weight, &position, table);
    args.eps = 1e-20f;
    run(&args, 6);
    const double expected[] = {-8 / sqrt(12.5), 3 / sqrt(12.5), -4 / sqrt(50), -6 / sqrt(50), 9, 10};
    for (int i = 0; i < 6; i++)
        cr_assert(fabs((double)qkv[i] - expected[i]) < 1e-6, "[%d] is %.9g, expected %.9g", i, (double)qkv[i],
                  expected[i]);
}

Test(qk_norm_rope, random_rows_against_double_precision)
{
    testing_rng_t rng = testing_rng(testing_seed());
    const int32_t dims[] = {2, 12, 64, 128, 1100};
    for (int round = 0; round < 60; round++) {
        int d = round % 3;
        epmoe_dtype_t dtype = op_dtypes[d].dtype;
        int32_t size = epmoe_dtype_size(dtype), dim = dims[round / 12], tokens = testing_range(&rng, 1, 4);
        int32_t rot = testing_range(&rng, 0, 1) ? dim : 2 * testing_range(&rng, 1, dim / 2);
        int32_t heads = testing_range(&rng, 1, 4), kv_heads = testing_range(&rng, 1, 2);
        int64_t used = (heads + 2 * kv_heads) * (int64_t)dim, stride = used + testing_range(&rng, 0, 1) * 7;
        int64_t count = (tokens - 1) * stride + used;
        char *qkv = testing_buffer(count * size, size), *weights = testing_buffer(2 * dim * size, size);
        float *table = testing_buffer(P * (int64_t)rot * 4, 0), *before = malloc((size_t)count * 4);
        make_table(table, rot);
        testing_fill_normal(&rng, qkv, dtype, count, 2), testing_fill_normal(&rng, weights, dtype, 2 * dim, 1);
        epmoei_to_f32(before, qkv, dtype, count);
        int64_t positions[4];
        for (int t = 0; t < 4; t++) positions[t] = testing_range(&rng, 0, P - 1);
        epmoe_qk_norm_rope_args_t args =
            make(tokens, heads, kv_heads, dim, dtype, qkv, weights, weights + dim * size, positions, table);
        args.qkv_stride = stride, args.rotary_dim = rot;
        args.style = (epmoe_rope_style_t)testing_range(&rng, 0, 1);
        args.weight_offset = testing_range(&rng, 0, 1);
        run(&args, count);
        for (int64_t e = 0; e < count; e++) {
            int64_t t = e / stride, h = e % stride / dim, i = e % stride % dim, base = e - i;
            double value = (double)epmoei_load(qkv, dtype, e), expected = (double)before[e], magnitude = 0;
            if (h < heads + kv_heads) {
                double mean = 0;
                for (int64_t j = 0; j < dim; j++) mean += (double)before[base + j] * (double)before[base + j] / dim;
                bool neox = args.style == EPMOE_ROPE_NEOX;
                int64_t pair = neox ? i % (rot / 2) : i / 2,
                        at[2] = {neox ? pair : 2 * pair, neox ? pair + rot / 2 : 2 * pair + 1};
                if (i >= rot) at[0] = at[1] = i;
                double n[2], angle = (double)positions[t] * pow(10000, -2.0 * (double)pair / rot);
                for (int j = 0; j < 2; j++)
                    n[j] = (double)before[base + at[j]] / sqrt(mean + 1e-6) *
                           ((double)epmoei_load(weights, dtype, (h < heads ? 0 : dim) + at[j]) + args.weight_offset);
                magnitude = fabs(n[0]) + fabs(n[1]);
                expected = i >= rot     ? n[0]
                           : i == at[0] ? n[0] * cos(angle) - n[1] * sin(angle)
                                        : n[1] * cos(angle) + n[0] * sin(angle);
            }
            cr_assert(fabs(value - expected) <=
                          op_dtypes[d].half_ulp * 1.01 * fabs(expected) + 6e-7 * magnitude + 0x1p-24 * (d == 2),
                      "dim %d rot %d [%lld,%lld,%lld] is %.9g, expected %.9g", dim, rot, (long long)t, (long long)h,
                      (long long)i, value, expected);
            if (h >= heads + kv_heads) cr_assert_eq(value, (double)before[e], "v or a gap changed");
        }
        cr_assert(testing_guards_intact(qkv) && testing_guards_intact(weights) && testing_guards_intact(table));
        testing_buffer_free(qkv), testing_buffer_free(weights), testing_buffer_free(table), free(before);
    }
}

/* In fp32 nothing is lost between the two ops, so that fused and unfused have the same bits. */
Test(qk_norm_rope, bits_of_norm_then_rope)
{
    enum { T = 5, H = 6, K = 2, D = 72, ROT = 32, ROW = (H + 2 * K) * D };
    testing_rng_t rng = testing_rng(testing_seed());
    float table[P * ROT], weights[2][D], fused[T * ROW], chain[T * ROW];
    const int64_t positions[T] = {0, 49, 3, 3, 20};
    make_table(table, ROT);
    testing_fill_normal(&rng, fused, EPMOE_F32, T * ROW, 1), testing_fill_normal(&rng, weights, EPMOE_F32, 2 * D, 1);
    memcpy(chain, fused, sizeof chain);
    epmoe_qk_norm_rope_args_t args = make(T, H, K, D, EPMOE_F32, fused, weights[0], weights[1], positions, table);
    args.rotary_dim = ROT;
    run(&args, T * ROW);
    for (int t = 0; t < T; t++)
        for (int part = 0; part < 2; part++) {
            epmoe_rms_norm_args_t norm = EPMOE_RMS_NORM_ARGS_INIT;
            norm.num_tokens = part ? K : H;
            norm.hidden = D;
            norm.dtype = EPMOE_F32;
            norm.x = norm.y = chain + t * ROW + part * H * D;
            norm.weight = weights[part];
            cr_assert_eq(epmoe_rms_norm(&norm, NULL), EPMOE_OK, "%s", epmoe_last_error());
        }
    epmoe_rope_args_t rope = EPMOE_ROPE_ARGS_INIT;
    rope.num_tokens = T, rope.num_heads = H, rope.num_kv_heads = K, rope.head_dim = D, rope.rotary_dim = ROT;
    rope.dtype = EPMOE_F32, rope.q = chain, rope.k = chain + H * D, rope.q_stride = rope.k_stride = ROW;
    rope.positions = positions, rope.cos_sin = table, rope.num_positions = P;
    cr_assert_eq(epmoe_rope(&rope, NULL), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(memcmp(fused, chain, sizeof fused), 0);
}

Test(qk_norm_rope, nan_stays_in_its_head)
{
    enum { D = 8, ROW = 4 * D };
    float table[P * D], qkv[ROW], weight[D];
    const int64_t position = 3;
    make_table(table, D);
    for (int i = 0; i < ROW; i++) qkv[i] = 1;
    for (int i = 0; i < D; i++) weight[i] = 1;
    qkv[D + 2] = NAN;
    epmoe_qk_norm_rope_args_t args = make(1, 2, 1, D, EPMOE_F32, qkv, weight, weight, &position, table);
    run(&args, ROW);
    for (int i = 0; i < ROW; i++) cr_assert(isnan(qkv[i]) == (i / D == 1), "[%d]", i);
}

Test(qk_norm_rope, no_tokens)
{
    epmoe_qk_norm_rope_args_t args = make(0, 2, 1, 8, EPMOE_BF16, NULL, NULL, NULL, NULL, NULL);
    cr_assert_eq(epmoe_qk_norm_rope(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
}

Test(qk_norm_rope, errors_name_the_argument_and_leave_the_output)
{
    float table[P * 8] = {1}, weight[8] = {1}, *qkv = testing_buffer(2 * 4 * 8 * 4, 0);
    const int64_t positions[2] = {0, 1}, outside[2] = {0, P};
    epmoe_qk_norm_rope_args_t base = make(2, 2, 1, 8, EPMOE_F32, qkv, weight, weight, positions, table);
#define REJECTS(needle, statement)                                                                                     \
    OP_INVALID(epmoe_qk_norm_rope, base, needle, testing_is_poison(qkv, 0, 256), statement)
    REJECTS("num_tokens is -1", bad.num_tokens = -1);
    REJECTS("num_heads is 0", bad.num_heads = 0);
    REJECTS("num_kv_heads is 0", bad.num_kv_heads = 0);
    REJECTS("head_dim is 0", bad.head_dim = 0);
    REJECTS("rotary_dim is 3", bad.rotary_dim = 3);
    REJECTS("rotary_dim is 10", bad.rotary_dim = 10);
    REJECTS("style is 2", bad.style = (epmoe_rope_style_t)2);
    REJECTS("dtype", bad.dtype = EPMOE_I32);
    REJECTS("weight_dtype", bad.weight_dtype = EPMOE_I32);
    REJECTS("qkv_stride is 31", bad.qkv_stride = 31);
    REJECTS("eps is -1", bad.eps = -1);
    REJECTS("weight_offset is -1", bad.weight_offset = -1);
    REJECTS("positions_dtype", bad.positions_dtype = EPMOE_F32);
    REJECTS("num_positions is -5", bad.num_positions = -5);
    REJECTS("qkv is NULL", bad.qkv = NULL);
    REJECTS("q_weight is NULL", bad.q_weight = NULL);
    REJECTS("k_weight is NULL", bad.k_weight = NULL);
    REJECTS("positions is NULL", bad.positions = NULL);
    REJECTS("cos_sin is NULL", bad.cos_sin = NULL);
    REJECTS("positions[1] is 50", bad.positions = outside);
#undef REJECTS
    testing_buffer_free(qkv);
}

Test(qk_norm_rope, struct_sizes)
{
    const float table[2 * P] = {1, 0}, weight[] = {1, 1};
    float *qkv = testing_buffer(6 * 4, 0);
    const int64_t position = 0;
    epmoe_qk_norm_rope_args_t base = make(1, 1, 1, 2, EPMOE_F32, qkv, weight, weight, &position, table);
    OP_STRUCT_SIZES(epmoe_qk_norm_rope, base, sizeof base, testing_is_poison(qkv, 0, 24), true);
    testing_buffer_free(qkv);
}

Test(qk_norm_rope, floor_counts_each_byte_once)
{
    epmoe_qk_norm_rope_args_t args = {.num_tokens = 3,
                                      .num_heads = 4,
                                      .num_kv_heads = 2,
                                      .head_dim = 128,
                                      .rotary_dim = 64,
                                      .dtype = EPMOE_BF16,
                                      .positions_dtype = EPMOE_I32};
    cr_assert_eq(epmoei_qk_norm_rope_floor(&args).bytes, 3 * (6 * 128 * 2 * 2 + 64 * 4 + 4));
}
