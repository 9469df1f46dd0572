/* epmoe_experts on experts that are worked out by hand: what other libraries got wrong. */
#include "tests/testing.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>

/* Expert e is e + 1 times the identity: gate is its bias alone, of which silu is 1, and up is x. */
typedef struct scaling_t {
    int32_t num_experts, d;
    float *gate_up, *gate_up_bias, *down;
} scaling_t;

static const float kUnitGate = 1.27846454276107f; /* silu of it is 1 */

static scaling_t scaling_experts(int32_t num_experts, int32_t d)
{
    size_t matrix = (size_t)d * (size_t)d;
    scaling_t s = {num_experts, d, calloc((size_t)num_experts * 2 * matrix, 4),
                   calloc((size_t)num_experts * 2 * (size_t)d, 4), calloc((size_t)num_experts * matrix, 4)};
    for (int32_t e = 0; e < num_experts; e++)
        for (int32_t i = 0; i < d; i++) {
            s.gate_up_bias[(e * 2) * d + i] = kUnitGate;
            s.gate_up[((int64_t)(e * 2 + 1) * d + i) * d + i] = 1;
            s.down[((int64_t)e * d + i) * d + i] = (float)(e + 1);
        }
    return s;
}

static void scaling_free(scaling_t *s) { free(s->gate_up), free(s->gate_up_bias), free(s->down); }

static epmoe_experts_args_t scaling_args(const scaling_t *s, int32_t tokens, int32_t top_k, epmoe_dtype_t dtype)
{
    epmoe_experts_args_t args = EPMOE_EXPERTS_ARGS_INIT;
    args.backend = EPMOE_BACKEND_CPU;
    args.num_tokens = tokens, args.top_k = top_k, args.num_experts = s->num_experts;
    args.hidden = args.intermediate = s->d;
    args.dtype = dtype;
    args.gate_up.format = args.down.format = EPMOE_FORMAT_F32;
    args.gate_up.data = s->gate_up, args.down.data = s->down;
    args.gate_up_bias = s->gate_up_bias;
    return args;
}

static void run(epmoe_experts_args_t *args)
{
    cr_assert_eq(epmoe_experts_workspace_size(args, &args->workspace_bytes), EPMOE_OK, "%s", epmoe_last_error());
    args->workspace = testing_buffer(args->workspace_bytes, 0);
    cr_assert_eq(epmoe_experts(args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert(testing_guards_intact(args->workspace));
    testing_buffer_free(args->workspace);
}

/* Expert parallelism seen from one rank: tokens of which it owns nothing are 0, whatever lies in the scratch. */
Test(experts, tokens_without_local_experts_are_exactly_zero)
{
    enum { kD = 8 };
    scaling_t s = scaling_experts(4, kD); /* experts 4..7 of 8: local 0..3 */
    int32_t ids[] = {-1, 0, -1, -1, 3, -1};
    float weights[] = {NAN, 0.5f, NAN, NAN, 0.25f, NAN}, x[3 * kD];
    for (int32_t i = 0; i < 3 * kD; i++) x[i] = (float)(i / kD + 1);
    float *y = testing_buffer(sizeof x, 0);
    epmoe_experts_args_t args = scaling_args(&s, 3, 2, EPMOE_F32);
    args.x = x, args.ids = ids, args.weights = weights, args.y = y;
    run(&args);
    for (int32_t i = 0; i < kD; i++) {
        cr_assert_float_eq(y[i], 0.5f * 1 * 1, 1e-6f);
        cr_assert_eq(epmoei_f32_bits(y[kD + i]), 0, "token 1 is %g", (double)y[kD + i]);
        cr_assert_float_eq(y[2 * kD + i], 0.25f * 4 * 3, 3e-6f);
    }
    cr_assert(testing_guards_intact(y));
    testing_buffer_free(y);
    scaling_free(&s);
}

/* .25*4x + .25*4x + .3*2x + .2*1x = 2.8x. */
Test(experts, the_same_expert_twice_counts_twice)
{
    enum { kD = 5, kTokens = 9 };
    scaling_t s = scaling_experts(4, kD);
    int32_t ids[kTokens * 4];
    float weights[kTokens * 4], x[kTokens * kD], y[kTokens * kD];
    for (int32_t i = 0; i < kTokens * 4; i++) {
        ids[i] = (int32_t[]){3, 3, 1, 0}[i % 4];
        weights[i] = (float[]){.25f, .25f, .3f, .2f}[i % 4];
    }
    for (int32_t i = 0; i < kTokens * kD; i++) x[i] = (float)(i - 20) / 8;
    epmoe_experts_args_t args = scaling_args(&s, kTokens, 4, EPMOE_F32);
    args.x = x, args.ids = ids, args.weights = weights, args.y = y;
    run(&args);
    for (int32_t i = 0; i < kTokens * kD; i++)
        cr_assert(fabs((double)y[i] - 2.8 * (double)x[i]) <= 1e-5 * fabs(2.8 * (double)x[i]), "%g of %g", (double)y[i],
                  (double)x[i]);
    scaling_free(&s);
}

/* fp16 rows of +-131072 (twice the largest fp16) that their weights bring back. One expert each; the down projection
 * is 128 times 32 * 32. */
Test(experts, fp16_does_not_overflow_before_the_weight)
{
    enum { kD = 2, kF = 128 };
    uint16_t x[2 * kD], *y = testing_buffer(2 * kD * 2, 0);
    float gate_up[2 * 2 * kF * kD] = {0}, bias[2 * 2 * kF], down[2 * kD * kF];
    for (int32_t e = 0; e < 2; e++)
        for (int32_t i = 0; i < kF; i++) {
            /* h = silu(unit) * 32, which fp16 holds exactly. */
            bias[e * 2 * kF + i] = kUnitGate;
            bias[e * 2 * kF + kF + i] = 32;
            for (int32_t n = 0; n < kD; n++) down[(e * kD + n) * kF + i] = e ? -32 : 32;
        }
    memset(x, 0, sizeof x);
    int32_t ids[] = {0, -1, 0, 1};
    float weights[] = {0.25f, NAN, 0.5f, 0.5f};
    epmoe_experts_args_t args = EPMOE_EXPERTS_ARGS_INIT;
    args.backend = EPMOE_BACKEND_CPU;
    args.num_tokens = 2, args.top_k = 2, args.num_experts = 2, args.hidden = kD, args.intermediate = kF;
    args.dtype = EPMOE_F16;
    args.gate_up.format = args.down.format = EPMOE_FORMAT_F32;
    args.gate_up.data = gate_up, args.down.data = down, args.gate_up_bias = bias;
    args.x = x, args.ids = ids, args.weights = weights, args.y = y;
    run(&args);
    for (int32_t i = 0; i < kD; i++) {
        cr_assert_eq(epmoei_f16_to_f32(y[i]), 32768.0f, "%g", (double)epmoei_f16_to_f32(y[i]));
        cr_assert_eq(epmoei_f16_to_f32(y[kD + i]), 0.0f, "%g", (double)epmoei_f16_to_f32(y[kD + i]));
    }
    testing_buffer_free(y);
}

/* A caller built against a later version, and one against an earlier one. */
Test(experts, structs_of_other_versions)
{
    scaling_t s = scaling_experts(1, 4);
    int32_t ids[] = {0};
    float weights[] = {1}, x[] = {1, 2, 3, 4}, y[4];
    struct {
        epmoe_experts_args_t args;
        char more[32];
    } later = {.args = scaling_args(&s, 1, 1, EPMOE_F32)};
    later.args.x = x, later.args.ids = ids, later.args.weights = weights, later.args.y = y;
    later.args.struct_size = sizeof later;
    run(&later.args);
    cr_assert_float_eq(y[3], 4, 1e-5f);
    later.more[31] = 1;
    cr_assert_eq(epmoe_experts(&later.args, NULL), EPMOE_ERROR_NOT_SUPPORTED);
    cr_assert(strstr(epmoe_last_error(), "does not know"), "%s", epmoe_last_error());

    /* Without workspace_bytes there is no workspace. */
    epmoe_experts_args_t earlier = later.args;
    earlier.struct_size = offsetof(epmoe_experts_args_t, workspace_bytes);
    cr_assert_eq(epmoe_experts(&earlier, NULL), EPMOE_ERROR_INVALID_ARGUMENT);
    scaling_free(&s);
}
