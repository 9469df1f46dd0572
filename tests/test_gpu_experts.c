/* The experts as one call on a device, ids that are no experts, and products whose offsets pass 2^31. */
#include "tests/gpu_testing.h"

#include "tests/moe_oracle.h"

#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

TestSuite(gpu_experts, .timeout = 300);

/* ----------------------------------------------------------------------------------------------------- experts op */

enum { kD = 72, kF = 40, kE = 9, kK = 4, kTokens = 37, kSlots = kTokens * kK };

/* Host copies of what the call reads, and the call on device buffers. */
typedef struct case_t {
    epmoe_dtype_t dtype;
    uint16_t x[kTokens * kD], gate_up[kE * 2 * kF * kD], down[kE * kD * kF];
    float weights[kSlots], gate_up_bias[kE * 2 * kF], down_bias[kE * kD];
    int32_t ids[kSlots];
    epmoe_experts_args_t args;
    void *y;
    int32_t *ids_dev;
} case_t;

static void *device_workspace(const epmoe_experts_args_t *args, int64_t *bytes)
{
    cr_assert_eq(epmoe_experts_workspace_size(args, bytes), EPMOE_OK, "%s", epmoe_last_error());
    return gpu_buffer(*bytes, 0);
}

static case_t *make_case(testing_rng_t *rng, epmoe_dtype_t dtype)
{
    case_t *c = calloc(1, sizeof *c);
    c->dtype = dtype;
    testing_fill_normal(rng, c->x, dtype, kTokens * kD, 1);
    testing_fill_normal(rng, c->gate_up, dtype, kE * 2 * kF * kD, 1 / sqrtf(kD));
    testing_fill_normal(rng, c->down, dtype, kE * kD * kF, 1 / sqrtf(kF));
    testing_fill_normal(rng, c->gate_up_bias, EPMOE_F32, kE * 2 * kF, 0.3f);
    testing_fill_normal(rng, c->down_bias, EPMOE_F32, kE * kD, 0.3f);
    for (int32_t i = 0; i < kSlots; i++) {
        c->ids[i] = testing_range(rng, -1, kE - 1);
        c->weights[i] = c->ids[i] < 0 ? NAN : testing_uniform(rng, 0, 1);
    }
    for (int32_t j = 0; j < kK; j++) {
        c->ids[5 * kK + j] = -1; /* a token without any slot */
        c->ids[6 * kK + j] = 3;  /* one expert four times */
        c->weights[5 * kK + j] = NAN, c->weights[6 * kK + j] = 0.25f;
    }
    epmoe_experts_args_t *args = &c->args;
    *args = (epmoe_experts_args_t)EPMOE_EXPERTS_ARGS_INIT;
    args->backend = EPMOE_BACKEND_CUDA;
    args->num_tokens = kTokens, args->top_k = kK, args->num_experts = kE;
    args->hidden = kD, args->intermediate = kF;
    args->dtype = dtype;
    args->x = gpu_copy_of(c->x, sizeof c->x);
    args->ids = c->ids_dev = gpu_copy_of(c->ids, sizeof c->ids);
    args->weights = gpu_copy_of(c->weights, sizeof c->weights);
    args->gate_up.format = args->down.format = epmoei_format_of_dtype(dtype);
    args->gate_up.data = gpu_copy_of(c->gate_up, sizeof c->gate_up);
    args->down.data = gpu_copy_of(c->down, sizeof c->down);
    args->gate_up_bias = gpu_copy_of(c->gate_up_bias, sizeof c->gate_up_bias);
    args->down_bias = gpu_copy_of(c->down_bias, sizeof c->down_bias);
    args->y = c->y = gpu_buffer(kTokens * kD * 2, 0);
    args->workspace = device_workspace(args, &args->workspace_bytes);
    return c;
}

static void free_case(case_t *c)
{
    const epmoe_experts_args_t *args = &c->args;
    const void *all[] = {args->x,    args->weights,      args->gate_up.data, args->down.data, c->y,
                         c->ids_dev, args->gate_up_bias, args->down_bias,    args->workspace};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        cr_expect(gpu_guards_intact(all[i]), "buffer %zu", i);
        gpu_buffer_free((void *)(uintptr_t)all[i]);
    }
    free(c);
}

static void run(case_t *c, uint16_t y[kTokens * kD])
{
    gpu_poison(c->y, kTokens * kD * 2);
    cr_assert_eq(epmoe_experts(&c->args, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert(gpu_wait());
    gpu_get(y, c->y, kTokens * kD * 2);
}

/* Any row order of gate and up, with the loosest of what bf16 and fp16 rounding may do. */
Test(gpu_experts, every_layout_against_fp64)
{
    GPU_TEST_NEEDS_DEVICE();
    for (int i = 0; i < 6; i++) {
        testing_rng_t rng = testing_rng(testing_seed() + (uint64_t)i);
        case_t *c = make_case(&rng, i % 2 ? EPMOE_F16 : EPMOE_BF16);
        c->args.layout = (epmoe_layout_t)(i / 2);
        static uint16_t y[kTokens * kD];
        run(c, y);
        const oracle_experts_t oracle = {.hidden = kD,
                                         .intermediate = kF,
                                         .dtype = c->dtype,
                                         .layout = i / 2 ? EPMOE_LAYOUT_INTERLEAVED : EPMOE_LAYOUT_GATE_FIRST,
                                         .gate_up = {.format = c->args.gate_up.format, .data = c->gate_up},
                                         .down = {.format = c->args.down.format, .data = c->down},
                                         .gate_up_bias = c->gate_up_bias,
                                         .down_bias = c->down_bias};
        for (int32_t t = 0; t < kTokens; t++) {
            double x[kD], ref[kD] = {0}, bound[kD] = {0};
            oracle_row(c->x, c->dtype, t, kD, x);
            for (int32_t j = 0; j < kK; j++) {
                int32_t s = t * kK + j;
                if (c->ids[s] >= 0) oracle_slot(&oracle, c->ids[s], x, (double)c->weights[s], 0, ref, bound);
            }
            double error = testing_row_error(y + t * kD, c->dtype, ref, 1, kD);
            double allowed = c->dtype == EPMOE_BF16 ? 1.6e-2 : 2e-3;
            cr_expect(error <= allowed, "layout %d, %s: token %d is off by %g", i / 2, epmoe_dtype_string(c->dtype), t,
                      error);
        }
        free_case(c);
    }
}

/* A bad id counts as -1, is counted once, and is reported by the next call, once. */
Test(gpu_experts, bad_ids_are_reported_by_the_next_call)
{
    GPU_TEST_NEEDS_DEVICE();
    for (int i = 0; i < 2; i++) {
        testing_rng_t rng = testing_rng(testing_seed() + (uint64_t)i);
        case_t *c = make_case(&rng, i ? EPMOE_F16 : EPMOE_BF16);
        static uint16_t without[kTokens * kD], y[kTokens * kD];
        static const struct {
            int32_t slot, id;
        } bad[] = {{0, kE}, {11, -2}, {12, INT32_MAX}, {13, INT32_MIN}, {kSlots - 1, kE + 100}};
        int32_t ids[kSlots];
        memcpy(ids, c->ids, sizeof ids);
        for (size_t b = 0; b < 5; b++) ids[bad[b].slot] = -1;
        gpu_put(c->ids_dev, ids, sizeof ids);
        run(c, without);
        for (size_t b = 0; b < 5; b++) ids[bad[b].slot] = bad[b].id;
        gpu_put(c->ids_dev, ids, sizeof ids);
        /* Whatever a row of a slot that nobody computes holds must not be seen. */
        gpu_poison(c->args.workspace, c->args.workspace_bytes);
        run(c, y);
        cr_expect(gpu_same("y with bad ids", y, without, kTokens * kD, 2, kD));

        gpu_put(c->ids_dev, c->ids, sizeof c->ids);
        gpu_poison(c->y, kTokens * kD * 2);
        cr_expect_eq(epmoe_experts(&c->args, gpu_stream()), EPMOE_ERROR_INVALID_ARGUMENT);
        cr_expect(strstr(epmoe_last_error(), "5 ids"), "'%s' lacks '5 ids'", epmoe_last_error());
        cr_expect(gpu_wait());
        cr_expect(gpu_is_poison(c->y, 0, kTokens * kD * 2), "the reporting call wrote y");
        run(c, y); /* reported once */
        free_case(c);
    }
}

Test(gpu_experts, refused_calls)
{
    GPU_TEST_NEEDS_DEVICE();
    testing_rng_t rng = testing_rng(testing_seed());
    case_t *c = make_case(&rng, EPMOE_BF16);
    static uint16_t first[kTokens * kD], y[kTokens * kD];
    run(c, first);
    int64_t bytes;
#define REFUSED(change, expected_status, word)                                                                         \
    do {                                                                                                               \
        epmoe_experts_args_t args = c->args;                                                                           \
        change;                                                                                                        \
        gpu_poison(c->y, kTokens *kD * 2);                                                                             \
        epmoe_set_last_error(EPMOE_OK, "");                                                                            \
        epmoe_status_t status = epmoe_experts(&args, gpu_stream());                                                    \
        cr_expect_eq(status, expected_status, "%s gave %s", #change, epmoe_status_string(status));                     \
        cr_expect(strstr(epmoe_last_error(), word), "%s: '%s' lacks '%s'", #change, epmoe_last_error(), word);         \
        cr_expect(gpu_wait(), "%s", #change);                                                                          \
        cr_expect(gpu_is_poison(c->y, 0, kTokens *kD * 2), "%s: y was written", #change);                              \
    } while (0)
    REFUSED(args.x = (const char *)args.x + 2, EPMOE_ERROR_INVALID_ARGUMENT, "16 bytes");
    REFUSED(args.gate_up.data = (const char *)args.gate_up.data + 8, EPMOE_ERROR_INVALID_ARGUMENT, "16 bytes");
    REFUSED(args.y = (char *)args.y + 4, EPMOE_ERROR_INVALID_ARGUMENT, "16 bytes");
    REFUSED(args.workspace_bytes -= 1, EPMOE_ERROR_INVALID_ARGUMENT, "workspace_bytes");
    REFUSED(args.workspace = NULL, EPMOE_ERROR_INVALID_ARGUMENT, "workspace");
    REFUSED(args.ids = NULL, EPMOE_ERROR_INVALID_ARGUMENT, "ids is NULL");
    REFUSED(args.hidden = 68, EPMOE_ERROR_NOT_SUPPORTED, "68");
    REFUSED(args.gate_up.format = EPMOE_FORMAT_F16, EPMOE_ERROR_NOT_SUPPORTED, "f16");
#undef REFUSED
    epmoe_experts_args_t none = c->args;
    none.num_tokens = 0, none.x = none.weights = NULL, none.ids = NULL, none.y = none.workspace = NULL;
    none.workspace_bytes = 0;
    cr_expect_eq(epmoe_experts_workspace_size(&none, &bytes), EPMOE_OK);
    cr_expect_eq(bytes, 0);
    cr_expect_eq(epmoe_experts(&none, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
    run(c, y);
    cr_expect(gpu_same("y after refused calls", y, first, kTokens * kD, 2, kD));
    free_case(c);
}

/* --------------------------------------------------------------------------------------------------- beyond 2^31 */

static bool enough_memory(int64_t bytes)
{
    size_t available = 0, total = 0;
    return cudaMemGetInfo(&available, &total) == cudaSuccess && (int64_t)available > bytes + ((int64_t)1 << 30);
}

#define NEEDS_MEMORY(bytes)                                                                                            \
    do {                                                                                                               \
        if (!enough_memory(bytes)) GPU_TEST_SKIP("fewer than %lld bytes are free on the device", (long long)(bytes));  \
    } while (0)

static void fill(void *device, int64_t bytes, uint16_t value)
{
    uint16_t values[4096];
    for (int32_t i = 0; i < 4096; i++) values[i] = value;
    gpu_put(device, values, epmoei_min64(bytes, (int64_t)sizeof values));
    gpu_repeat(device, (int64_t)sizeof values, bytes);
}

/* Every element of rows [0,rows) of y [rows,cols] is value_of(row); says where not. */
static void expect_rows(const void *y, int64_t rows, int64_t cols, uint16_t (*value_of)(int64_t row))
{
    int64_t row_bytes = cols * 2, piece_rows = ((int64_t)64 << 20) / row_bytes, wrong = 0;
    uint16_t *piece = malloc((size_t)(piece_rows * row_bytes)), *expected = malloc((size_t)row_bytes);
    for (int64_t first = 0; first < rows; first += piece_rows) {
        int64_t count = epmoei_min64(piece_rows, rows - first);
        gpu_get(piece, (const char *)y + first * row_bytes, count * row_bytes);
        for (int64_t r = 0; r < count; r++) {
            uint16_t value = value_of(first + r);
            for (int64_t i = 0; i < cols; i++) expected[i] = value;
            if (!memcmp(piece + r * cols, expected, (size_t)row_bytes)) continue;
            if (wrong++ == 0) {
                fprintf(stderr, "row %lld (element %lld) ", (long long)(first + r), (long long)((first + r) * cols));
                gpu_same("is the first wrong one", piece + r * cols, expected, cols, 2, cols);
            }
        }
    }
    cr_expect_eq(wrong, 0, "%lld of %lld rows are wrong", (long long)wrong, (long long)rows);
    free(piece), free(expected);
}

/* Slot t*8 + e belongs to expert e, whose weights are (e+1)/64: 64 ones give e+1. */
static uint16_t expert_plus_one(int64_t slot) { return epmoei_f32_to_bf16((float)(slot % 8 + 1)); }

Test(gpu_experts, outputs_beyond_2_31)
{
    GPU_TEST_NEEDS_DEVICE();
    enum { kManyTokens = 65537, kExperts = 8, kColumns = 4096, kDepth = 64, kRows = kManyTokens * kExperts };
    const int64_t y_bytes = (int64_t)kRows * kColumns * 2;
    NEEDS_MEMORY(y_bytes);
    uint16_t *w = malloc((size_t)kExperts * kColumns * kDepth * 2);
    int32_t *ids = malloc((size_t)kRows * 4);
    for (int64_t i = 0; i < (int64_t)kExperts * kColumns * kDepth; i++)
        w[i] = epmoei_f32_to_bf16((float)(i / ((int64_t)kColumns * kDepth) + 1) / 64);
    for (int32_t s = 0; s < kRows; s++) ids[s] = s % kExperts;
    void *x = gpu_buffer((int64_t)kManyTokens * kDepth * 2, 0), *y = gpu_buffer(y_bytes, 0);
    fill(x, (int64_t)kManyTokens * kDepth * 2, 0x3F80);

    epmoe_align_args_t align = EPMOE_ALIGN_ARGS_INIT;
    align.backend = EPMOE_BACKEND_CUDA;
    align.num_tokens = kManyTokens, align.top_k = kExperts, align.num_experts = kExperts;
    align.ids = gpu_copy_of(ids, (int64_t)kRows * 4);
    align.sorted_ids = gpu_buffer((int64_t)kRows * 4, 0);
    align.num_post_padded = gpu_buffer(4, 0);
    align.expert_offsets = gpu_buffer((kExperts + 1) * 4, 0);
    cr_assert_eq(epmoe_align_workspace_size(&align, &align.workspace_bytes), EPMOE_OK, "%s", epmoe_last_error());
    align.workspace = gpu_buffer(align.workspace_bytes, 0);
    cr_assert_eq(epmoe_align_block_size(&align, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());

    epmoe_grouped_gemm_args_t gemm = EPMOE_GROUPED_GEMM_ARGS_INIT;
    gemm.backend = EPMOE_BACKEND_CUDA;
    gemm.num_experts = kExperts, gemm.n = kColumns, gemm.k = kDepth, gemm.max_rows = kRows;
    gemm.expert_offsets = align.expert_offsets, gemm.row_index = align.sorted_ids;
    gemm.x_row_divisor = kExperts;
    gemm.x_dtype = gemm.y_dtype = EPMOE_BF16;
    gemm.x = x, gemm.y = y;
    gemm.weight.format = EPMOE_FORMAT_BF16;
    gemm.weight.data = gpu_copy_of(w, (int64_t)kExperts * kColumns * kDepth * 2);
    gemm.activation = EPMOE_ACTIVATION_NONE;
    cr_assert_eq(epmoe_grouped_gemm_workspace_size(&gemm, &gemm.workspace_bytes), EPMOE_OK, "%s", epmoe_last_error());
    gemm.workspace = gpu_buffer(gemm.workspace_bytes, 0);
    cr_assert_eq(epmoe_grouped_gemm(&gemm, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert(gpu_wait());
    expect_rows(y, kRows, kColumns, expert_plus_one);

    const void *all[] = {x,
                         y,
                         align.ids,
                         align.sorted_ids,
                         align.num_post_padded,
                         align.expert_offsets,
                         align.workspace,
                         gemm.weight.data,
                         gemm.workspace};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        cr_expect(gpu_guards_intact(all[i]), "buffer %zu", i);
        gpu_buffer_free((void *)(uintptr_t)all[i]);
    }
    free(w), free(ids);
}

/* 129 experts of 2^24 weights, all (e+1)/4096, one row each. */
static uint16_t row_plus_one(int64_t row) { return epmoei_f32_to_bf16((float)(row + 1)); }

Test(gpu_experts, weights_beyond_2_31)
{
    GPU_TEST_NEEDS_DEVICE();
    enum { kExperts = 129, kSide = 4096 };
    const int64_t expert_bytes = (int64_t)kSide * kSide * 2;
    NEEDS_MEMORY(kExperts * expert_bytes);
    char *w = gpu_buffer(kExperts * expert_bytes, 0);
    int32_t offsets[kExperts + 1];
    for (int32_t e = 0; e <= kExperts; e++) offsets[e] = e;
    for (int32_t e = 0; e < kExperts; e++)
        fill(w + e * expert_bytes, expert_bytes, epmoei_f32_to_bf16((float)(e + 1) / kSide));
    void *x = gpu_buffer(kExperts * kSide * 2, 0), *y = gpu_buffer(kExperts * kSide * 2, 0);
    fill(x, kExperts * kSide * 2, 0x3F80);
    epmoe_grouped_gemm_args_t gemm = EPMOE_GROUPED_GEMM_ARGS_INIT;
    gemm.backend = EPMOE_BACKEND_CUDA;
    gemm.num_experts = kExperts, gemm.n = kSide, gemm.k = kSide, gemm.max_rows = kExperts;
    gemm.expert_offsets = gpu_copy_of(offsets, sizeof offsets);
    gemm.x_dtype = gemm.y_dtype = EPMOE_BF16;
    gemm.x = x, gemm.y = y;
    gemm.weight.format = EPMOE_FORMAT_BF16;
    gemm.weight.data = w;
    gemm.activation = EPMOE_ACTIVATION_NONE;
    cr_assert_eq(epmoe_grouped_gemm_workspace_size(&gemm, &gemm.workspace_bytes), EPMOE_OK, "%s", epmoe_last_error());
    gemm.workspace = gpu_buffer(gemm.workspace_bytes, 0);
    cr_assert_eq(epmoe_grouped_gemm(&gemm, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert(gpu_wait());
    expect_rows(y, kExperts, kSide, row_plus_one);
    cr_expect(gpu_guards_intact(y));
    gpu_buffer_free(w), gpu_buffer_free(x), gpu_buffer_free(y), gpu_buffer_free(gemm.workspace);
    gpu_buffer_free((void *)(uintptr_t)gemm.expert_offsets);
}

/* silu(1) * 2 in bf16. */
static uint16_t silu_of_one_times_two(int64_t row)
{
    (void)row;
    return epmoei_f32_to_bf16(1.4609375f);
}

Test(gpu_experts, activations_beyond_2_31)
{
    GPU_TEST_NEEDS_DEVICE();
    enum { kRows = 61700, kWidth = 17408 };
    const int64_t y_bytes = (int64_t)kRows * kWidth * 2, row_bytes = (int64_t)kWidth * 2 * 2;
    NEEDS_MEMORY(3 * y_bytes);
    char *x = gpu_buffer(2 * y_bytes, 0), *y = gpu_buffer(y_bytes, 0);
    fill(x, row_bytes / 2, 0x3F80), fill(x + row_bytes / 2, row_bytes / 2, 0x4000);
    gpu_repeat(x, row_bytes, 2 * y_bytes);
    epmoe_silu_and_mul_args_t args = EPMOE_SILU_AND_MUL_ARGS_INIT;
    args.backend = EPMOE_BACKEND_CUDA;
    args.num_tokens = kRows, args.width = kWidth;
    args.dtype = EPMOE_BF16;
    args.x = x, args.y = y;
    cr_assert_eq(epmoe_silu_and_mul(&args, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert(gpu_wait());
    expect_rows(y, kRows, kWidth, silu_of_one_times_two);
    cr_expect(gpu_guards_intact(y));
    gpu_buffer_free(x), gpu_buffer_free(y);
}
