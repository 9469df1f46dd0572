/* Rows in FP8 on the CPU: the codes of epmoe_quantize_fp8, what E4M3's definition says of them, and rows that stay. */
#include "tests/e4m3_oracle.h"
#include "tests/wire_case.h"

#include <criterion/criterion.h>

static const epmoe_dtype_t dtypes[] = {EPMOE_BF16, EPMOE_F16, EPMOE_F32};

/* Every row of x by the op. */
static void quantize(const wire_case_t *c, uint8_t *codes, float *scales)
{
    epmoe_quantize_fp8_args_t args = EPMOE_QUANTIZE_FP8_ARGS_INIT;
    args.backend = EPMOE_BACKEND_CPU;
    args.num_tokens = c->sources, args.hidden = c->hidden, args.dtype = c->dtype;
    args.granularity = EPMOE_GRANULARITY_BLOCK128;
    args.x = c->x, args.q = codes, args.scale = scales;
    cr_assert_eq(epmoe_quantize_fp8(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
}

static void check(const wire_case_t *c)
{
    int64_t d = c->hidden, blocks = (d + 127) / 128, size = epmoe_dtype_size(c->dtype), sent = c->rows - c->gap;
    int64_t row_bytes = epmoei_coded_row_bytes(d), codes_room = (d + 15) / 16 * 16;
    cr_assert_eq(row_bytes, codes_room + (blocks + 3) / 4 * 16);
    uint8_t *codes = malloc((size_t)(c->sources * d));
    float *scales = malloc((size_t)(c->sources * blocks) * 4);
    char *wire = testing_buffer(c->rows * row_bytes, 0), *back = testing_buffer(c->rows * d * size, 0);
    char *stays = testing_buffer(c->rows * d * size, 0);
    quantize(c, codes, scales);

    epmoei_encode_rows_t encode = {.src = c->x, .dtype = c->dtype, .hidden = c->hidden, .index = c->index};
    encode.dst = epmoei_coded_rows_packed(wire, d);
    encode.num_rows = sent, encode.gap_at = c->gap_at, encode.gap = c->gap;
    cr_assert_eq(epmoei_encode_rows_cpu(&encode), EPMOE_OK);
    static const char zeros[16];
    for (int64_t i = 0; i < sent; i++) {
        int64_t from = wire_source(c, (int32_t)i);
        const char *row = wire + i * row_bytes;
        cr_assert(!memcmp(row, codes + from * d, (size_t)d), "codes of row %lld, d %lld", (long long)i, (long long)d);
        cr_assert(!memcmp(row + codes_room, scales + from * blocks, (size_t)blocks * 4), "scales, d %lld",
                  (long long)d);
        cr_assert(!memcmp(row + d, zeros, (size_t)(codes_room - d)));
        cr_assert(!memcmp(row + codes_room + 4 * blocks, zeros, (size_t)(row_bytes - codes_room - 4 * blocks)));
    }
    cr_assert(testing_is_poison(wire, sent * row_bytes, c->gap * row_bytes));

    /* The rows behind the gap have their places behind it here. */
    encode.num_rows = c->rows, encode.gap = 0;
    cr_assert_eq(epmoei_encode_rows_cpu(&encode), EPMOE_OK);
    epmoei_decode_rows_t decode = {.dst = back, .dtype = c->dtype, .hidden = c->hidden, .src = encode.dst};
    decode.num_rows = c->rows, decode.gap_at = c->gap_at, decode.gap = c->gap;
    cr_assert_eq(epmoei_decode_rows_cpu(&decode), EPMOE_OK);
    cr_assert(testing_is_poison(back, c->gap_at * d * size, c->gap * d * size), "a row of the gap was written");
    const epmoei_round_rows_t round = {
        .dst = stays, .src = c->x, .dtype = c->dtype, .hidden = c->hidden, .index = c->index, .num_rows = c->rows};
    cr_assert_eq(epmoei_round_rows_cpu(&round), EPMOE_OK);
    for (int64_t i = 0; i < c->rows * d; i++) {
        int64_t row = i / d, from = c->index[row], column = i % d;
        double exact = e4m3_value(codes[from * d + column]) * (double)scales[from * blocks + column / 128];
        float due;
        epmoei_store(&due, c->dtype, 0, (float)exact);
        bool in_gap = row >= c->gap_at && row < c->gap_at + c->gap;
        cr_assert(in_gap || wire_same(back + i * size, &due, c->dtype, 0), "[%lld,%lld] of d %lld", (long long)row,
                  (long long)column, (long long)d);
        cr_assert(wire_same(stays + i * size, &due, c->dtype, 0), "[%lld,%lld] of d %lld stays", (long long)row,
                  (long long)column, (long long)d);
    }
    cr_assert(testing_guards_intact(wire) && testing_guards_intact(back) && testing_guards_intact(stays));
    testing_buffer_free(wire), testing_buffer_free(back), testing_buffer_free(stays);
    free(codes), free(scales);
}

Test(ep_wire, codes_of_the_op_and_back)
{
    testing_rng_t rng = testing_rng(testing_seed());
    for (int32_t round = 0; round < 4; round++)
        for (int32_t w = 0; w < WIRE_WIDTHS; w++)
            for (int32_t t = 0; t < 3; t++) {
                wire_case_t c = wire_case(&rng, wire_widths[w], dtypes[t]);
                check(&c);
                wire_case_free(&c);
            }
}

/* By hand: amax 448 makes the scale 1, so that values are their codes' or fall between two of them. */
Test(ep_wire, worked_row)
{
    const float x[6] = {448, 17, 1.05f, -0.001f, NAN, -INFINITY};
    const float due[6] = {448, 16, 1, 0, NAN, -448};
    float y[6];
    epmoei_round_rows_t round = {.dst = y, .src = x, .dtype = EPMOE_F32, .hidden = 4, .num_rows = 1};
    cr_assert_eq(epmoei_round_rows_cpu(&round), EPMOE_OK);
    /* 17 lies between 16 and 18: the even one; 0.001 is half of the smallest code and a bit. */
    cr_assert(y[0] == due[0] && y[1] == due[1] && y[2] == due[2]);
    cr_assert_eq(y[3], -0x1p-9f);
    round.hidden = 6;
    cr_assert_eq(epmoei_round_rows_cpu(&round), EPMOE_OK);
    /* The infinity makes the scale FLT_MAX / 448, beside which all else is 0. */
    cr_assert(y[0] == 0 && y[1] == 0 && y[3] == 0 && signbit(y[3]));
    cr_assert(isnan(y[4]));
    cr_assert_float_eq(y[5], -0x1.fffffep127f, 0x1p104f);
    round.num_rows = 0, round.dst = NULL, round.src = NULL;
    cr_assert_eq(epmoei_round_rows_cpu(&round), EPMOE_OK);
}
