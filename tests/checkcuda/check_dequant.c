#include "kernels/dequant.h"
#include "kernels/quant_formats.h"
#include "tests/checkcuda/check.h"

#include <stdlib.h>

static epmoe_status_t run(const void *args, epmoe_stream_t stream) { return epmoe_dequant(args, stream); }

static epmoe_status_t reference(const void *args)
{
    epmoe_dequant_args_t checked;
    EPMOEI_CHECK(epmoei_dequant_check(args, &checked));
    return epmoei_dequant_ref(&checked, NULL);
}

static const check_op_t op = {"dequant", sizeof(epmoe_dequant_args_t), run, reference};

typedef struct shape_t {
    epmoe_format_t format;
    int32_t experts, n, k, group;
    epmoe_dtype_t scales_dtype;
    int32_t zero_convention;
    bool zeros, indexed;
    int32_t group_rows;
} shape_t;

static void fill_bytes(testing_rng_t *rng, void *data, int64_t bytes, uint8_t mask)
{
    for (int64_t i = 0; i < bytes; i++) ((uint8_t *)data)[i] = (uint8_t)testing_next(rng) & mask;
}

/* Groups at random, of W4 a permutation. */
static void fill_index(testing_rng_t *rng, int32_t *index, const shape_t *shape, int64_t groups)
{
    for (int32_t e = 0; e < shape->experts; e++) {
        int32_t *row = index + (int64_t)e * shape->k;
        for (int32_t c = 0; c < shape->k; c++) {
            if (shape->format != EPMOE_FORMAT_W4) {
                row[c] = testing_range(rng, 0, (int32_t)groups - 1);
                continue;
            }
            int32_t at = testing_range(rng, 0, c);
            row[c] = row[at], row[at] = c;
        }
    }
}

static void make(check_case_t *c, testing_rng_t *rng, const shape_t *shape)
{
    int64_t experts = shape->experts, n = shape->n, k = shape->k;
    check_case(c, &op, "%s E %d N %d K %d group %d rows %d scales %s zeros %d convention %d index %d",
               epmoe_format_string(shape->format), shape->experts, shape->n, shape->k, shape->group, shape->group_rows,
               epmoe_dtype_string(shape->scales_dtype), shape->zeros, shape->zero_convention, shape->indexed);
    c->tolerance = 0;
    epmoe_dequant_args_t args = EPMOE_DEQUANT_ARGS_INIT;
    args.num_experts = shape->experts, args.n = shape->n, args.k = shape->k;
    args.weight = (epmoe_weight_t)EPMOE_WEIGHT_INIT;
    args.weight.format = shape->format;
    args.weight.group_size = shape->group;
    args.weight.group_rows = shape->group_rows;
    args.weight.scales_dtype = shape->scales_dtype;
    args.weight.zero_convention = shape->zero_convention;
    memcpy(c->args, &args, sizeof args);
    epmoe_weight_t filled = args.weight;
    bool quantised = epmoei_format_is_quantised(shape->format);
    epmoei_quant_sizes_t sizes = {0};
    if (quantised) {
        if (epmoei_quant_check_weight(&filled, "weight", k) != EPMOE_OK) check_fail(c, "%s", epmoe_last_error());
        sizes = epmoei_quant_sizes_rows(shape->format, n, k, filled.group_size, filled.group_rows, 0);
    } else {
        sizes.data_bytes = n * k * epmoe_dtype_size(epmoei_dtype_of_format(shape->format));
    }
    /* Any bits, NaN among them. */
    void *data = CHECK_ADD(c, epmoe_dequant_args_t, weight.data, CHECK_IN, EPMOE_U8, experts, sizes.data_bytes, 16);
    fill_bytes(rng, data, experts * sizes.data_bytes, 255);
    if (quantised) {
        int64_t scale_bytes = sizes.scales * epmoe_dtype_size(filled.scales_dtype);
        void *scales = CHECK_ADD(c, epmoe_dequant_args_t, weight.scales, CHECK_IN, EPMOE_U8, experts, scale_bytes, 4);
        fill_bytes(rng, scales, experts * scale_bytes, 255);
    }
    if (shape->zeros && sizes.zeros_bytes) {
        void *zeros =
            CHECK_ADD(c, epmoe_dequant_args_t, weight.zeros, CHECK_IN, EPMOE_U8, experts, sizes.zeros_bytes, 4);
        fill_bytes(rng, zeros, experts * sizes.zeros_bytes, shape->format == EPMOE_FORMAT_W4 ? 15 : 255);
    }
    if (shape->indexed) {
        int32_t *index = CHECK_ADD(c, epmoe_dequant_args_t, weight.g_idx, CHECK_IN, EPMOE_I32, experts, k, 4);
        fill_index(rng, index, shape, sizes.groups);
    }
    CHECK_ADD(c, epmoe_dequant_args_t, w, CHECK_OUT, EPMOE_F32, experts * n, k, 16);
}

static const epmoe_format_t formats[] = {EPMOE_FORMAT_F32,       EPMOE_FORMAT_BF16,  EPMOE_FORMAT_F16,
                                         EPMOE_FORMAT_FP8_BLOCK, EPMOE_FORMAT_GPTQ,  EPMOE_FORMAT_AWQ,
                                         EPMOE_FORMAT_CT_W4,     EPMOE_FORMAT_MXFP4, EPMOE_FORMAT_W4};
static const epmoe_dtype_t scales_dtypes[] = {EPMOE_F32, EPMOE_BF16, EPMOE_F16, EPMOE_F8_E8M0};

static shape_t random_shape(testing_rng_t *rng, epmoe_format_t format, int32_t n, int32_t k)
{
    static const int32_t groups[] = {1, 7, 16, 32, 64, 0, 128, -1};
    shape_t shape = {.format = format, .experts = testing_range(rng, 1, 3), .n = n, .k = k};
    bool mxfp4 = format == EPMOE_FORMAT_MXFP4, w4 = format == EPMOE_FORMAT_CT_W4 || format == EPMOE_FORMAT_W4;
    if (mxfp4) shape.k = 32 * ((k + 31) / 32);
    shape.group = mxfp4 ? 0 : groups[testing_range(rng, 0, 7)];
    shape.scales_dtype = mxfp4 ? EPMOE_DTYPE_NONE : scales_dtypes[testing_range(rng, 0, 3)];
    shape.zeros = !w4 || testing_range(rng, 0, 1);
    shape.group_rows = format == EPMOE_FORMAT_FP8_BLOCK ? groups[testing_range(rng, 0, 7)] : 0;
    shape.zero_convention = testing_range(rng, 0, 2);
    shape.indexed = (w4 || format == EPMOE_FORMAT_GPTQ) && testing_range(rng, 0, 1);
    return shape;
}

void check_dequant(testing_rng_t *rng)
{
    static const int32_t ns[] = {1, 3, 17, 63, 64, 65, 127, 257}, ks[] = {1, 3, 17, 63, 96, 127, 128, 257, 520};
    check_begin("dequant", "every format, odd sizes, any bits");
    for (size_t f = 0; f < sizeof formats / sizeof *formats; f++)
        for (size_t i = 0; i < 8; i++)
            for (size_t j = 0; j < 9; j += (size_t)check_step(4)) {
                shape_t shape = random_shape(rng, formats[f], ns[i], ks[(i + j) % 9]);
                if (check_skips((int64_t)shape.experts * shape.n * shape.k)) continue;
                check_case_t c;
                make(&c, rng, &shape);
                check_run(&c);
                check_free(&c);
            }
    check_end();

    check_begin("dequant", "a large matrix of each format, alignment");
    for (size_t f = 0; f < sizeof formats / sizeof *formats; f++) {
        shape_t shape = random_shape(rng, formats[f], check_small ? 64 : 1536, check_small ? 64 : 1024);
        shape.group = formats[f] == EPMOE_FORMAT_MXFP4 ? 0 : 128;
        check_case_t c;
        make(&c, rng, &shape);
        check_run(&c);
        check_misaligned(&c);
        check_free(&c);
    }
    check_end();
}
