#include "kernels/pack_tiles.h"
#include "tests/checkcuda/check.h"

static epmoe_status_t run(const void *args, epmoe_stream_t stream) { return epmoe_pack_tiles(args, stream); }

static epmoe_status_t reference(const void *args)
{
    epmoe_pack_tiles_args_t checked;
    EPMOEI_CHECK(epmoei_pack_tiles_check(args, &checked, false));
    return epmoei_pack_tiles_cpu(&checked, NULL);
}

static const check_op_t op = {"pack_tiles", sizeof(epmoe_pack_tiles_args_t), run, reference};

typedef struct shape_t {
    epmoe_format_t format;
    int32_t experts, n, k, group;
    epmoe_dtype_t scales_dtype;
    int32_t zero_convention;
    bool zeros, gated;
} shape_t;

/* Any bits but those of NaN scales: which of the NaNs a copy through fp32 makes is not said. */
static void fill_scales(testing_rng_t *rng, void *scales, epmoe_dtype_t dtype, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        if (dtype == EPMOE_F8_E8M0)
            ((uint8_t *)scales)[i] = (uint8_t)testing_range(rng, testing_range(rng, 0, 90) ? 100 : 126, 128);
        else
            epmoei_store(scales, dtype, i, testing_uniform(rng, -3.0f, 3.0f));
}

static void make(check_case_t *c, testing_rng_t *rng, const shape_t *shape)
{
    int64_t experts = shape->experts, n = shape->n, k = shape->k;
    check_case(c, &op, "%s E %d N %d K %d group %d scales %s zeros %d convention %d gated %d",
               epmoe_format_string(shape->format), shape->experts, shape->n, shape->k, shape->group,
               epmoe_dtype_string(shape->scales_dtype), shape->zeros, shape->zero_convention, shape->gated);
    c->tolerance = 0;
    c->compare = check_compare_bits;
    epmoe_pack_tiles_args_t args = EPMOE_PACK_TILES_ARGS_INIT;
    args.backend = EPMOE_BACKEND_CUDA;
    args.num_experts = shape->experts, args.n = shape->n, args.k = shape->k, args.gated = shape->gated;
    args.weight = (epmoe_weight_t)EPMOE_WEIGHT_INIT;
    args.weight.format = shape->format, args.weight.group_size = shape->group;
    args.weight.scales_dtype = shape->scales_dtype, args.weight.zero_convention = shape->zero_convention;
    memcpy(c->args, &args, sizeof args);
    epmoe_weight_t filled = args.weight;
    if (epmoei_quant_check_weight(&filled, "weight", k) != EPMOE_OK) check_fail(c, "%s", epmoe_last_error());
    const epmoei_quant_sizes_t rows = epmoei_quant_sizes(shape->format, n, k, filled.group_size, 0);
    epmoe_pack_tiles_size_t size = EPMOE_PACK_TILES_SIZE_INIT;
    args.weight.zeros = shape->zeros ? c : NULL; /* whether there are any */
    if (epmoe_pack_tiles_size(&args, &size) != EPMOE_OK) check_fail(c, "%s", epmoe_last_error());

    uint8_t *data = CHECK_ADD(c, epmoe_pack_tiles_args_t, weight.data, CHECK_IN, EPMOE_U8, experts, rows.data_bytes, 4);
    for (int64_t i = 0; i < experts * rows.data_bytes; i++) data[i] = (uint8_t)testing_next(rng);
    const int64_t scale_bytes = rows.scales * epmoe_dtype_size(filled.scales_dtype);
    void *scales = CHECK_ADD(c, epmoe_pack_tiles_args_t, weight.scales, CHECK_IN, EPMOE_U8, experts, scale_bytes, 4);
    fill_scales(rng, scales, filled.scales_dtype, experts * rows.scales);
    if (shape->zeros) {
        uint8_t *zeros =
            CHECK_ADD(c, epmoe_pack_tiles_args_t, weight.zeros, CHECK_IN, EPMOE_U8, experts, rows.zeros_bytes, 4);
        for (int64_t i = 0; i < experts * rows.zeros_bytes; i++)
            zeros[i] = (uint8_t)(testing_next(rng) & (shape->format == EPMOE_FORMAT_W4 ? 15 : 255));
    }
    CHECK_ADD(c, epmoe_pack_tiles_args_t, data, CHECK_OUT, EPMOE_U8, 1, size.data_bytes, 16);
    CHECK_ADD(c, epmoe_pack_tiles_args_t, scales, CHECK_OUT, EPMOE_U8, 1, size.scales_bytes, 16);
    if (size.zeros_bytes) CHECK_ADD(c, epmoe_pack_tiles_args_t, zeros, CHECK_OUT, EPMOE_U8, 1, size.zeros_bytes, 16);
}

/* Of 16 bits: any bits. */
static void check_plain(testing_rng_t *rng)
{
    static const int32_t ns[] = {1, 16, 100, 128, 144, 257, 400};
    check_begin("pack_tiles", "bf16 and fp16");
    for (int32_t i = 0; i < 28; i++) {
        const bool gated = i / 7 % 2;
        const int32_t n = gated ? (ns[i % 7] + 15) / 16 * 16 : ns[i % 7], k = 64 * testing_range(rng, 1, 5);
        check_case_t c;
        epmoe_pack_tiles_args_t args = EPMOE_PACK_TILES_ARGS_INIT;
        args.backend = EPMOE_BACKEND_CUDA;
        args.num_experts = testing_range(rng, 1, 4), args.n = n, args.k = k, args.gated = gated;
        args.weight = (epmoe_weight_t)EPMOE_WEIGHT_INIT;
        args.weight.format = i / 14 ? EPMOE_FORMAT_BF16 : EPMOE_FORMAT_F16;
        check_case(&c, &op, "%s E %d N %d K %d gated %d", epmoe_format_string(args.weight.format), args.num_experts, n,
                   k, gated);
        c.tolerance = 0;
        c.compare = check_compare_bits;
        memcpy(c.args, &args, sizeof args);
        const int64_t bytes = (int64_t)args.num_experts * n * k * 2;
        uint8_t *data = CHECK_ADD(&c, epmoe_pack_tiles_args_t, weight.data, CHECK_IN, EPMOE_U8, 1, bytes, 16);
        for (int64_t b = 0; b < bytes; b++) data[b] = (uint8_t)testing_next(rng);
        CHECK_ADD(&c, epmoe_pack_tiles_args_t, data, CHECK_OUT, EPMOE_U8, 1, bytes, 16);
        check_run(&c);
        if (i % 7 == 0) check_misaligned(&c);
        check_free(&c);
    }
    check_end();
}

static const epmoe_format_t formats[] = {EPMOE_FORMAT_GPTQ, EPMOE_FORMAT_AWQ, EPMOE_FORMAT_CT_W4, EPMOE_FORMAT_W4,
                                         EPMOE_FORMAT_MXFP4};
static const epmoe_dtype_t scales_dtypes[] = {EPMOE_F32, EPMOE_BF16, EPMOE_F16, EPMOE_F8_E8M0};

static shape_t random_shape(testing_rng_t *rng, epmoe_format_t format, int32_t n, int32_t k)
{
    static const int32_t groups[] = {16, 32, 64, 0, 192, -1};
    const bool mxfp4 = format == EPMOE_FORMAT_MXFP4;
    shape_t shape = {.format = format, .experts = testing_range(rng, 1, 3), .n = n};
    shape.gated = testing_range(rng, 0, 1);
    if (shape.gated) shape.n = (n + 1) / 2 * 2;
    shape.k = mxfp4 ? (k + 31) / 32 * 32 : (k + 7) / 8 * 8;
    shape.group = mxfp4 ? 0 : groups[testing_range(rng, 0, 5)];
    shape.scales_dtype = mxfp4 ? EPMOE_DTYPE_NONE : scales_dtypes[testing_range(rng, 0, 3)];
    shape.zeros = format == EPMOE_FORMAT_GPTQ || format == EPMOE_FORMAT_AWQ || (!mxfp4 && testing_range(rng, 0, 1));
    shape.zero_convention = testing_range(rng, 0, 2);
    return shape;
}

void check_pack_tiles(testing_rng_t *rng)
{
    check_plain(rng);
    static const int32_t ns[] = {1, 8, 63, 64, 65, 130, 257}, ks[] = {8, 63, 64, 65, 128, 200, 520};
    check_begin("pack_tiles", "every format, odd sizes");
    for (size_t f = 0; f < sizeof formats / sizeof *formats; f++)
        for (size_t i = 0; i < 7; i++)
            for (size_t j = 0; j < 7; j += (size_t)check_step(3)) {
                shape_t shape = random_shape(rng, formats[f], ns[i], ks[j]);
                if (check_skips((int64_t)shape.experts * shape.n * shape.k)) continue;
                check_case_t c;
                make(&c, rng, &shape);
                check_run(&c);
                check_free(&c);
            }
    check_end();

    check_begin("pack_tiles", "a large matrix of each format, alignment");
    for (size_t f = 0; f < sizeof formats / sizeof *formats; f++) {
        shape_t shape = random_shape(rng, formats[f], check_small ? 64 : 1536, check_small ? 64 : 1024);
        shape.group = formats[f] == EPMOE_FORMAT_MXFP4 ? 0 : 64;
        check_case_t c;
        make(&c, rng, &shape);
        check_run(&c);
        check_misaligned(&c);
        check_free(&c);
    }
    check_end();
}
