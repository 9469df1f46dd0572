/* Rows in FP8 on a device: the CPU's bits. */
#include "tests/gpu_testing.h"
#include "tests/wire_case.h"

#include <criterion/criterion.h>

TestSuite(gpu_wire, .timeout = 300);

static const epmoe_dtype_t dtypes[] = {EPMOE_BF16, EPMOE_F16, EPMOE_F32};

static void expect_rows(const wire_case_t *c, const char *what, const void *device, const void *host)
{
    int64_t elements = (int64_t)c->rows * c->hidden, size = epmoe_dtype_size(c->dtype);
    void *got = gpu_get_new(device, elements * size);
    cr_assert(gpu_guards_intact(device), "%s wrote past its rows", what);
    for (int64_t i = 0; i < elements; i++)
        cr_assert(wire_same(got, host, c->dtype, i), "%s: [%lld,%lld] of %s, d %d", what, (long long)(i / c->hidden),
                  (long long)(i % c->hidden), epmoe_dtype_string(c->dtype), c->hidden);
    free(got);
}

static void check(const wire_case_t *c, bool by_device)
{
    int64_t d = c->hidden, size = epmoe_dtype_size(c->dtype), bytes = c->rows * d * size;
    int64_t wire_bytes = c->rows * epmoei_coded_row_bytes(d);
    void *x = gpu_copy_of(c->x, c->sources * d * size), *index = gpu_copy_of(c->index, c->rows * 4);
    char *wire = testing_buffer(wire_bytes, 0), *rows = testing_buffer(bytes, 0);
    char *wire_dev = gpu_buffer(wire_bytes, 0), *rows_dev = gpu_buffer(bytes, 0);
    const int32_t counts[3] = {c->rows, c->gap_at, c->gap};
    int32_t *counts_dev = gpu_copy_of(counts, sizeof counts);

    epmoei_encode_rows_t encode = {.src = c->x, .dtype = c->dtype, .hidden = c->hidden, .index = c->index};
    encode.dst = epmoei_coded_rows_packed(wire, d);
    encode.num_rows = c->rows - c->gap, encode.gap_at = c->gap_at, encode.gap = c->gap;
    epmoei_encode_rows_t encode_dev = encode;
    encode_dev.dst = epmoei_coded_rows_packed(wire_dev, d), encode_dev.src = x, encode_dev.index = index;
    cr_assert_eq(epmoei_encode_rows_cpu(&encode), EPMOE_OK);
    cr_assert_eq(epmoei_encode_rows(EPMOE_BACKEND_CUDA, &encode_dev, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
    char *got = gpu_get_new(wire_dev, wire_bytes);
    cr_assert(gpu_guards_intact(wire_dev));
    cr_assert(gpu_same("codes and scales", got, wire, wire_bytes, 1, epmoei_coded_row_bytes(d)), "%s, d %d",
              epmoe_dtype_string(c->dtype), c->hidden);
    free(got);

    /* Rows of the gap too, which are to be skipped. */
    encode.num_rows = encode_dev.num_rows = c->rows, encode.gap = encode_dev.gap = 0;
    cr_assert_eq(epmoei_encode_rows_cpu(&encode), EPMOE_OK);
    cr_assert_eq(epmoei_encode_rows(EPMOE_BACKEND_CUDA, &encode_dev, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
    epmoei_decode_rows_t decode = {.dst = rows, .dtype = c->dtype, .hidden = c->hidden, .src = encode.dst};
    decode.num_rows = c->rows, decode.gap_at = c->gap_at, decode.gap = c->gap;
    epmoei_decode_rows_t decode_dev = decode;
    decode_dev.dst = rows_dev, decode_dev.src = encode_dev.dst;
    if (by_device) {
        decode_dev.num_rows = c->rows + 50, decode_dev.gap_at = decode_dev.gap = 0;
        decode_dev.num_rows_dev = counts_dev, decode_dev.gap_dev = counts_dev + 1;
    }
    cr_assert_eq(epmoei_decode_rows_cpu(&decode), EPMOE_OK);
    cr_assert_eq(epmoei_decode_rows(EPMOE_BACKEND_CUDA, &decode_dev, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
    expect_rows(c, "decode", rows_dev, rows);

    epmoei_round_rows_t round = {
        .dst = rows, .src = c->x, .dtype = c->dtype, .hidden = c->hidden, .index = c->index, .num_rows = c->rows};
    epmoei_round_rows_t round_dev = round;
    round_dev.dst = rows_dev, round_dev.src = x, round_dev.index = index;
    if (by_device) round_dev.num_rows = c->rows + 50, round_dev.num_rows_dev = counts_dev;
    cr_assert_eq(epmoei_round_rows_cpu(&round), EPMOE_OK);
    cr_assert_eq(epmoei_round_rows(EPMOE_BACKEND_CUDA, &round_dev, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
    expect_rows(c, "round", rows_dev, rows);
    gpu_buffer_free(x), gpu_buffer_free(index), gpu_buffer_free(wire_dev), gpu_buffer_free(rows_dev);
    gpu_buffer_free(counts_dev);
    testing_buffer_free(wire), testing_buffer_free(rows);
}

Test(gpu_wire, gives_the_bits_of_the_cpu)
{
    GPU_TEST_NEEDS_DEVICE();
    testing_rng_t rng = testing_rng(testing_seed());
    for (int32_t round = 0; round < 4; round++)
        for (int32_t w = 0; w < WIRE_WIDTHS; w++)
            for (int32_t t = 0; t < 3; t++) {
                wire_case_t c = wire_case(&rng, wire_widths[w], dtypes[t]);
                check(&c, round % 2);
                wire_case_free(&c);
            }
}
