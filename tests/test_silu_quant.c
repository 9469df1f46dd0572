/* silu_and_mul with E4M3 output: the bits of the two ops in a row, hand-worked codes, what is refused. */
#include "kernels/quantize_fp8.h"
#include "kernels/row_blocks.h"
#include "kernels/silu_and_mul.h"
#include "tests/op_testing.h"

#include <math.h>
#include <stdlib.h>
#include <sys/mman.h>

static const epmoe_granularity_t granularities[] = {EPMOE_GRANULARITY_TENSOR, EPMOE_GRANULARITY_TOKEN,
                                                    EPMOE_GRANULARITY_BLOCK128};

static epmoe_status_t (*const kernels[])(const epmoe_silu_and_mul_args_t *, epmoe_stream_t) = {epmoei_silu_and_mul_ref,
                                                                                               epmoei_silu_and_mul_cpu};

static int64_t scales_of(const epmoe_silu_and_mul_args_t *args)
{
    if (args->quant == EPMOE_GRANULARITY_TENSOR) return 0;
    return args->num_tokens * (args->quant == EPMOE_GRANULARITY_TOKEN ? 1 : epmoei_ceil_div(args->width, 128));
}

/* The reference kernel without quant, then the reference quantisation. */
static void chain(const epmoe_silu_and_mul_args_t *args, uint8_t *codes, float *scale)
{
    int64_t n = (int64_t)args->num_tokens * args->width;
    void *rows = malloc((size_t)n * 4);
    float one_scale;
    epmoe_silu_and_mul_args_t plain = *args, checked;
    plain.quant = 0, plain.static_scale = NULL, plain.y = rows, plain.y_stride = 0;
    cr_assert_eq(epmoei_silu_and_mul_check(&plain, &checked), EPMOE_OK);
    cr_assert_eq(epmoei_silu_and_mul_ref(&checked, NULL), EPMOE_OK);
    epmoe_quantize_fp8_args_t quant = EPMOE_QUANTIZE_FP8_ARGS_INIT, own;
    quant.num_tokens = args->num_tokens, quant.hidden = args->width, quant.dtype = args->dtype;
    quant.granularity = args->quant, quant.x = rows, quant.q = codes;
    quant.static_scale = args->static_scale;
    quant.scale = args->static_scale ? &one_scale : scale;
    cr_assert_eq(epmoei_quantize_fp8_check(&quant, &own), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(epmoei_quantize_fp8_ref(&own, NULL), EPMOE_OK);
    free(rows);
}

Test(silu_quant, bits_are_those_of_the_unfused_chain)
{
    testing_rng_t rng = testing_rng(testing_seed());
    const int32_t widths[] = {1, 12, 100, 128, 129, 704, 1234, 3420, 2304};
    const float given = 0.037f;
    for (int32_t i = 0; i < 9 * 3 * OP_NUM_DTYPES; i++) {
        epmoe_silu_and_mul_args_t args = EPMOE_SILU_AND_MUL_ARGS_INIT;
        args.width = widths[i % 9];
        args.quant = granularities[i / 9 % 3];
        args.dtype = op_dtypes[i / 27].dtype;
        args.num_tokens = testing_range(&rng, 1, 5);
        args.activation = (epmoe_activation_t)testing_range(&rng, 0, 3);
        args.x_stride = 2 * args.width + testing_range(&rng, 0, 3);
        args.y_stride = args.width + testing_range(&rng, 0, 3);
        int64_t size = epmoe_dtype_size(args.dtype), n = args.num_tokens * args.x_stride;
        if (args.quant == EPMOE_GRANULARITY_TENSOR) args.static_scale = &given;
        char *x = testing_buffer(n * size, (int32_t)size);
        testing_fill_normal(&rng, x, args.dtype, n, 20);
        /* A NaN, an infinity, and a row of zeros. */
        epmoei_store(x, args.dtype, testing_range(&rng, 0, args.width - 1), NAN);
        if (args.num_tokens > 1) epmoei_store(x, args.dtype, args.x_stride, INFINITY);
        if (args.num_tokens > 2) memset(x + 2 * args.x_stride * size, 0, (size_t)(args.x_stride * size));
        args.x = x;
        uint8_t *codes = malloc((size_t)args.num_tokens * (size_t)args.width);
        float *scale = malloc((size_t)(scales_of(&args) + 1) * 4);
        chain(&args, codes, scale);
        for (int k = 0; k < 3; k++) {
            epmoe_silu_and_mul_args_t checked;
            uint8_t *y = args.y = testing_buffer(args.num_tokens * args.y_stride, 1);
            args.scale = testing_buffer(scales_of(&args) * 4, 4);
            if (k == 2) {
                cr_assert_eq(epmoe_silu_and_mul(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
            } else {
                cr_assert_eq(epmoei_silu_and_mul_check(&args, &checked), EPMOE_OK, "%s", epmoe_last_error());
                cr_assert_eq(kernels[k](&checked, NULL), EPMOE_OK);
            }
            for (int64_t t = 0; t < args.num_tokens; t++) {
                cr_assert_eq(memcmp(y + t * args.y_stride, codes + t * args.width, (size_t)args.width), 0,
                             "width %d, quant %d, kernel %d, row %lld", args.width, (int)args.quant, k, (long long)t);
                cr_assert(testing_is_poison(y, t * args.y_stride + args.width, args.y_stride - args.width));
            }
            cr_assert_eq(memcmp(args.scale, scale, (size_t)scales_of(&args) * 4), 0);
            cr_assert(testing_guards_intact(y) && testing_guards_intact(args.scale));
            testing_buffer_free(y);
            testing_buffer_free(args.scale);
        }
        free(scale);
        free(codes);
        testing_buffer_free(x);
    }
}

/* silu(x) * up with gate 100: 100 * up. Scale 448 / 448 = 1 for the first group, amax 0 for the second. */
Test(silu_quant, by_hand)
{
    enum { kWidth = 130 };
    float x[2 * kWidth] = {0}, scale[2];
    uint8_t *y = testing_buffer(kWidth, 0);
    for (int i = 0; i < kWidth; i++) x[i] = 100;
    x[kWidth] = 4.48f, x[kWidth + 1] = -2.56f, x[kWidth + 2] = 0.01f;
    epmoe_silu_and_mul_args_t args = EPMOE_SILU_AND_MUL_ARGS_INIT;
    args.num_tokens = 1, args.width = kWidth, args.dtype = EPMOE_F32, args.x = x, args.y = y, args.scale = scale;
    args.quant = EPMOE_GRANULARITY_BLOCK128;
    cr_assert_eq(epmoe_silu_and_mul(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert(fabsf(scale[0] - 1) < 1e-6f && scale[1] == 0x1p-126f);
    cr_assert(y[0] == 0x7E && y[1] == 0xF8 && y[2] == 0x38 && y[3] == 0 && y[129] == 0, "%x %x %x", y[0], y[1], y[2]);
    const float half = 0.5f;
    args.quant = EPMOE_GRANULARITY_TENSOR, args.static_scale = &half, args.scale = NULL;
    cr_assert_eq(epmoe_silu_and_mul(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert(y[0] == 0x7E && y[1] == 0xFE && y[2] == 0x40, "saturates: %x %x %x", y[0], y[1], y[2]);
    epmoe_silu_and_mul_args_t checked;
    cr_assert_eq(epmoei_silu_and_mul_check(&args, &checked), EPMOE_OK);
    cr_assert_eq(epmoei_silu_and_mul_floor(&checked).bytes, kWidth * (2 * 4 + 1));
    testing_buffer_free(y);
}

/* The second row begins 2^31 + 16 elements, and as many bytes of codes, behind the first. */
Test(silu_quant, offsets_beyond_2_31)
{
    enum { kWidth = 300 };
    const int64_t stride = (1ll << 31) + 16, bytes = 2 * (stride + 2 * kWidth);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    uint16_t *x = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    uint8_t *y = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (x == MAP_FAILED || y == MAP_FAILED) cr_skip_test("no address space");
    testing_rng_t rng = testing_rng(testing_seed());
    uint8_t near[2 * kWidth];
    float scale[2][6], first[2 * 2 * kWidth];
    for (int q = 0; q < 3; q++) {
        epmoe_silu_and_mul_args_t args = EPMOE_SILU_AND_MUL_ARGS_INIT;
        testing_fill_normal(&rng, first, EPMOE_BF16, 4 * kWidth, 2);
        memcpy(x, first, 4 * kWidth), memcpy(x + stride, (char *)first + 4 * kWidth, 4 * kWidth);
        args.num_tokens = 2, args.width = kWidth, args.dtype = EPMOE_BF16, args.quant = granularities[q];
        const float given = 0.02f;
        if (args.quant == EPMOE_GRANULARITY_TENSOR) args.static_scale = &given;
        args.x = first, args.y = near, args.scale = scale[0];
        cr_assert_eq(epmoe_silu_and_mul(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
        args.x = x, args.y = y, args.x_stride = args.y_stride = stride, args.scale = scale[1];
        cr_assert_eq(epmoe_silu_and_mul(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
        for (int t = 0; t < 2; t++)
            cr_assert_eq(memcmp(y + t * stride, near + t * kWidth, kWidth), 0, "quant %d, row %d", (int)args.quant, t);
        cr_assert_eq(memcmp(scale[0], scale[1], (size_t)scales_of(&args) * 4), 0);
    }
    munmap(x, (size_t)bytes), munmap(y, (size_t)bytes);
}

/* The largest widths, of which no sum fits int32: what is counted and where pieces lie, by hand. */
Test(silu_quant, widths_near_2_31)
{
    static const int32_t widths[] = {INT32_MAX, INT32_MAX - 126, INT32_MAX - 127};
    static const int64_t groups[] = {1 << 24, 1 << 24, (1 << 24) - 1};
    for (int i = 0; i < 3; i++) {
        const int64_t width = widths[i], last = epmoei_blocks_per_row(width) - 1;
        epmoe_silu_and_mul_args_t args = EPMOE_SILU_AND_MUL_ARGS_INIT, checked;
        float scale;
        args.num_tokens = 3, args.width = widths[i], args.dtype = EPMOE_BF16;
        args.x = &args, args.y = &checked, args.scale = &scale, args.quant = EPMOE_GRANULARITY_BLOCK128;
        cr_assert_eq(epmoei_silu_and_mul_check(&args, &checked), EPMOE_OK, "%s", epmoe_last_error());
        cr_expect_eq(checked.x_stride, 2 * width);
        cr_expect_eq(epmoei_silu_and_mul_floor(&checked).bytes, 3.0 * (double)(width * 5 + 4 * groups[i]), "width %d",
                     widths[i]);
        cr_expect_eq(epmoei_scale_steps(args.quant, width).row, groups[i]);
        cr_expect_eq(last, (1 << 21) - 1);
        const epmoei_block_t block = epmoei_block(3 * (last + 1) - 1, width);
        cr_expect(block.row == 2 && block.first == last * 1024 && block.first + block.cols == width,
                  "width %d: row %lld, columns %lld and %lld more", widths[i], (long long)block.row,
                  (long long)block.first, (long long)block.cols);
    }
}

Test(silu_quant, errors_leave_the_output)
{
    float x[32] = {0}, scale[2] = {7, 7};
    const float bad_scales[] = {0, -1, NAN, INFINITY}, good = 1;
    uint8_t *y = testing_buffer(16, 0);
    epmoe_silu_and_mul_args_t base = EPMOE_SILU_AND_MUL_ARGS_INIT;
    base.num_tokens = 2, base.width = 8, base.dtype = EPMOE_F32, base.x = x, base.y = y, base.scale = scale;
    base.quant = EPMOE_GRANULARITY_TOKEN;
#define REJECTS(needle, statement)                                                                                     \
    OP_INVALID(epmoe_silu_and_mul, base, needle, testing_is_poison(y, 0, 16) && scale[0] == 7, statement)
    REJECTS("quant is 4", bad.quant = (epmoe_granularity_t)4);
    REJECTS("scale is NULL", bad.scale = NULL);
    REJECTS("static_scale is given", bad.static_scale = &good);
    REJECTS("static_scale is NULL", bad.quant = EPMOE_GRANULARITY_TENSOR);
    REJECTS("static_scale is given", (bad.quant = 0, bad.static_scale = &good));
    REJECTS("y is x", bad.x = bad.y);
    for (int i = 0; i < 4; i++)
        REJECTS("*static_scale is", (bad.quant = EPMOE_GRANULARITY_TENSOR, bad.static_scale = &bad_scales[i]));
#undef REJECTS
    base.num_tokens = 0, base.x = NULL, base.y = NULL, base.scale = NULL;
    cr_assert_eq(epmoe_silu_and_mul(&base, NULL), EPMOE_OK);
    testing_buffer_free(y);
}
