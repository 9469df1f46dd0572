/* What stored values mean, format by format: expected values are worked by hand from the definition of each. */
#include "base/fp8.h"
#include "kernels/quant_formats.h"
#include "tests/testing.h"

#include <criterion/criterion.h>
#include <math.h>

/* A matrix of its own, whose arrays the test fills in. */
static epmoei_quant_t matrix(epmoe_format_t format, int64_t rows, int64_t cols, int32_t group)
{
    return (epmoei_quant_t){.format = format,
                            .scales_dtype = format == EPMOE_FORMAT_MXFP4 ? EPMOE_F8_E8M0 : EPMOE_F32,
                            .group = group,
                            .zero_convention = 1,
                            .rows = rows,
                            .cols = cols,
                            .stored_rows = rows,
                            .row_step = 1};
}

/* Row `row` is `expected`, element by element and as a whole and from any column on. */
static void expect_row(const epmoei_quant_t *quant, int64_t row, const double *expected)
{
    float out[512];
    cr_assert(quant->cols <= 512);
    for (int64_t c = 0; c < quant->cols; c++) {
        double got = (double)epmoei_quant_at(quant, row, c);
        cr_assert(got == expected[c], "row %d column %d is %g: expected %g", (int)row, (int)c, got, expected[c]);
    }
    for (int64_t first = 0; first < quant->cols; first += 3) {
        memset(out, 0xFF, sizeof out);
        epmoei_quant_row(quant, row, first, quant->cols - first, out);
        for (int64_t c = first; c < quant->cols; c++)
            cr_assert(epmoei_f32_bits(out[c - first]) == epmoei_f32_bits(epmoei_quant_at(quant, row, c)));
        cr_assert(quant->cols == 512 || epmoei_f32_bits(out[quant->cols - first]) == 0xFFFFFFFFu);
    }
}
#define ROW(quant, row, ...)                                                                                           \
    do {                                                                                                               \
        cr_assert_eq((quant).cols, (int64_t)(sizeof((double[]){__VA_ARGS__}) / sizeof(double)));                       \
        expect_row(&(quant), row, (double[]){__VA_ARGS__});                                                            \
    } while (0)

Test(quant_formats, e4m3_both_ways)
{
    for (int code = 0; code < 256; code++) {
        int exponent = code >> 3 & 15, mantissa = code & 7;
        double value = exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
        if ((code & 0x7F) == 0x7F) {
            cr_assert(isnan(epmoei_e4m3_to_f32((uint8_t)code)));
            continue;
        }
        float got = epmoei_e4m3_to_f32((uint8_t)code);
        cr_assert((double)fabsf(got) == value && !signbit(got) == !(code & 0x80), "code 0x%02x is %g", (unsigned)code,
                  (double)got);
        cr_assert_eq(epmoei_f32_to_e4m3(got), code);
    }
    const struct {
        float value;
        uint8_t code;
    } cases[] = {{448, 0x7E},        {464, 0x7E},       {465, 0x7E},      {1000, 0x7E},      {-1000, 0xFE},
                 {INFINITY, 0x7E},   {-INFINITY, 0xFE}, {NAN, 0x7F},      {447.9f, 0x7E},    {0x1p-9f, 0x01},
                 {0x1p-10f, 0x00},   {0x1.8p-9f, 0x02}, {12, 0x54},       {300, 0x79},       {-0.0f, 0x80},
                 {0x1.8p-10f, 0x01}, {17, 0x58},        {19, 0x5A},       {0x1.fp-7f, 0x08}, {-0x1p-10f, 0x80},
                 {432, 0x7E},        {431.9f, 0x7D},    {0x1p-149f, 0x00}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        cr_assert_eq(epmoei_f32_to_e4m3(cases[i].value), cases[i].code, "%g is 0x%02x: expected 0x%02x",
                     (double)cases[i].value, epmoei_f32_to_e4m3(cases[i].value), cases[i].code);
    /* Every float between two codes goes to the nearer one, to the even one half way. */
    for (int code = 0; code < 0x7E; code++) {
        float low = epmoei_e4m3_to_f32((uint8_t)code), high = epmoei_e4m3_to_f32((uint8_t)(code + 1));
        float middle = low + (high - low) / 2;
        cr_assert_eq(epmoei_f32_to_e4m3(middle), code & 1 ? code + 1 : code);
        cr_assert_eq(epmoei_f32_to_e4m3(nextafterf(middle, 0)), code);
        cr_assert_eq(epmoei_f32_to_e4m3(nextafterf(middle, 500)), code + 1);
    }
}

Test(quant_formats, e8m0_and_e2m1)
{
    for (int code = 0; code < 255; code++)
        cr_assert((double)epmoei_e8m0_to_f32((uint8_t)code) == ldexp(1, code - 127), "code %d", code);
    cr_assert(isnan(epmoei_e8m0_to_f32(255)));
    const double values[] = {0, .5, 1, 1.5, 2, 3, 4, 6};
    for (int code = 0; code < 16; code++) {
        float got = epmoei_e2m1_to_f32((uint8_t)code);
        cr_assert((double)fabsf(got) == values[code & 7] && !signbit(got) == (code < 8));
        cr_assert(epmoei_f32_bits(epmoei_e2m1_to_f32((uint8_t)(code | 0xF0))) == epmoei_f32_bits(got));
    }
}

/* The zero point stored minus one (v1), as it is (v2), and a real zero of 0, which v1 stores as 15. */
Test(quant_formats, gptq_zero_conventions)
{
    uint32_t words[8], zeros[1];
    float scales[8];
    for (int i = 0; i < 8; i++) words[i] = 0x99999999u, scales[i] = 0.5f;
    epmoei_quant_t quant = matrix(EPMOE_FORMAT_GPTQ, 8, 8, 8);
    quant.data = words, quant.scales = scales, quant.zeros = zeros;
    zeros[0] = 0x77777777u;
    for (int row = 0; row < 8; row++) ROW(quant, row, .5, .5, .5, .5, .5, .5, .5, .5);
    quant.zero_convention = 2;
    ROW(quant, 7, 1, 1, 1, 1, 1, 1, 1, 1); /* a v1 file whose label says v2 follows the label */
    zeros[0] = 0x88888888u;
    ROW(quant, 0, .5, .5, .5, .5, .5, .5, .5, .5);
    quant.zero_convention = 1;
    zeros[0] = 0xFFFFFFFFu;
    ROW(quant, 3, 4.5, 4.5, 4.5, 4.5, 4.5, 4.5, 4.5, 4.5);
    quant.format = EPMOE_FORMAT_AWQ;
    zeros[0] = 0;
    ROW(quant, 0, 4.5, 4.5, 4.5, 4.5, 4.5, 4.5, 4.5, 4.5);
}

Test(quant_formats, nibble_orders)
{
    /* GPTQ: eight k of one n in a word, the lowest bits first. */
    const uint32_t gptq[] = {0x76543210u}, no_zero[] = {0};
    const float ones[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    epmoei_quant_t quant = matrix(EPMOE_FORMAT_GPTQ, 1, 8, 8);
    quant.zero_convention = 2;
    quant.data = gptq, quant.zeros = no_zero, quant.scales = ones;
    ROW(quant, 0, 0, 1, 2, 3, 4, 5, 6, 7);
    /* AWQ: eight n of one k in a word, nibbles in the order 0 2 4 6 1 3 5 7. */
    const uint32_t awq[] = {0x75316420u}, sevens[] = {0x77777777u};
    quant = matrix(EPMOE_FORMAT_AWQ, 8, 1, 1);
    quant.data = awq, quant.zeros = no_zero, quant.scales = ones;
    for (int n = 0; n < 8; n++) ROW(quant, n, n);
    quant.data = sevens, quant.zeros = awq;
    for (int n = 0; n < 8; n++) ROW(quant, n, 7 - n);
}

/* Two words along k, two rows, K = 12: the last word is half used, and with groups of 8 the last group is short. */
Test(quant_formats, gptq_short_last_group_and_layout)
{
    const uint32_t words[] = {0x76543210u, 0xFEDCBA98u, 0xAAAA3210u, 0xBBBB7654u}; /* [k/8][n] */
    const float scales[] = {1, 2, 4, 8};                                           /* [g][n] */
    const uint32_t zeros[] = {0x00000020u, 0x00000001u};                           /* [g]: rows 0,1 = 0,2 then 1,0 */
    epmoei_quant_t quant = matrix(EPMOE_FORMAT_GPTQ, 2, 12, 8);
    quant.data = words, quant.scales = scales, quant.zeros = zeros;
    quant.zero_convention = 2;
    ROW(quant, 0, 0, 1, 2, 3, 4, 5, 6, 7, -4, 0, 4, 8);
    ROW(quant, 1, 12, 14, 16, 18, 20, 22, 24, 26, 32, 40, 48, 56);
    /* The group of each column by g_idx. */
    const int32_t g_idx[] = {1, 0, 1, 0, 1, 0, 1, 0, 0, 0, 0, 0};
    quant.g_idx = g_idx;
    ROW(quant, 0, -4, 1, 4, 3, 12, 5, 20, 7, 0, 1, 2, 3);
    cr_assert_eq(epmoei_quant_check_groups(&quant, "g_idx"), EPMOE_OK);
    const int32_t bad[] = {1, 0, 1, 0, 1, 0, 2, 0, 0, 0, 0, -1};
    quant.g_idx = bad;
    cr_assert_eq(epmoei_quant_check_groups(&quant, "g_idx"), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert_str_eq(epmoe_last_error(), "g_idx[6] is 2: expected 0..1");
}

Test(quant_formats, compressed_tensors)
{
    const uint32_t words[] = {0x76543210u, 0x00000F98u, 0xFEDCBA98u, 0x00000210u}; /* [n][k/8] */
    const uint16_t scales[] = {0x3F80, 0x4000, 0x4080, 0x4100};                    /* bf16 1 2 4 8, [n][g] */
    const uint32_t zeros[] = {0x00000031u, 0x00000042u};                           /* [n/8][g] */
    epmoei_quant_t quant = matrix(EPMOE_FORMAT_CT_W4, 2, 11, 8);
    quant.scales_dtype = EPMOE_BF16;
    quant.data = words, quant.scales = scales;
    ROW(quant, 0, -8, -7, -6, -5, -4, -3, -2, -1, 0, 2, 14);
    ROW(quant, 1, 0, 4, 8, 12, 16, 20, 24, 28, -64, -56, -48);
    quant.zeros = zeros; /* row 0: 1 and 2, row 1: 3 and 4 */
    ROW(quant, 0, -1, 0, 1, 2, 3, 4, 5, 6, 12, 14, 26);
    ROW(quant, 1, 20, 24, 28, 32, 36, 40, 44, 48, -32, -24, -16);
    const int32_t g_idx[] = {0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 1};
    quant.g_idx = g_idx;
    ROW(quant, 0, -1, 0, 1, 2, 3, 4, 5, 10, 7, 14, 26);
}

Test(quant_formats, w4_has_byte_zeros_and_its_own_order)
{
    const uint32_t words[] = {0x76543210u, 0x00000098u};
    const uint16_t scales[] = {0x3800, 0x4000}; /* fp16 .5 and 2 */
    const uint8_t zeros[] = {1, 15};
    const int32_t order[] = {9, 8, 7, 6, 5, 4, 3, 2, 1, 0};
    epmoei_quant_t quant = matrix(EPMOE_FORMAT_W4, 1, 10, 8);
    quant.scales_dtype = EPMOE_F16;
    quant.data = words, quant.scales = scales, quant.zeros = zeros, quant.g_idx = order;
    ROW(quant, 0, -.5, 0, .5, 1, 1.5, 2, 2.5, 3, -14, -12); /* in the stored order */
    quant.zeros = NULL;
    ROW(quant, 0, -4, -3.5, -3, -2.5, -2, -1.5, -1, -.5, 0, 2);
}

/* Not a permutation: some column would be written twice and another never. Also where columns are checked in parts. */
Test(quant_formats, w4_order_is_a_permutation)
{
    enum { K = 70000 };
    static int32_t order[K];
    epmoei_quant_t quant = matrix(EPMOE_FORMAT_W4, 1, K, 8);
    quant.g_idx = order;
    for (int i = 0; i < K; i++) order[i] = K - 1 - i;
    cr_assert_eq(epmoei_quant_check_groups(&quant, "g_idx"), EPMOE_OK);
    order[5] = K - 3;
    cr_assert_eq(epmoei_quant_check_groups(&quant, "g_idx"), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert_str_eq(epmoe_last_error(), "g_idx[5] is 69997 again: expected a permutation of 0..69999");
    order[5] = K - 6, order[K - 1] = 1;
    cr_assert_eq(epmoei_quant_check_groups(&quant, "g_idx"), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert_str_eq(epmoe_last_error(), "g_idx[69999] is 1 again: expected a permutation of 0..69999");
    order[K - 1] = K;
    cr_assert_eq(epmoei_quant_check_groups(&quant, "g_idx"), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert_str_eq(epmoe_last_error(), "g_idx[69999] is 70000: expected 0..69999");
}

Test(quant_formats, mxfp4)
{
    uint8_t pairs[64], scales[] = {127, 129, 0, 254};
    double expected[64];
    const double values[] = {0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6};
    /* Byte b holds elements 2b (low) and 2b + 1 (high). */
    for (int b = 0; b < 64; b++) pairs[b] = (uint8_t)((b + 3) % 16 << 4 | b % 16);
    epmoei_quant_t quant = matrix(EPMOE_FORMAT_MXFP4, 2, 64, 32);
    quant.data = pairs, quant.scales = scales;
    for (int i = 0; i < 64; i++) expected[i] = values[i % 2 ? (i / 2 + 3) % 16 : i / 2 % 16] * (i < 32 ? 1 : 4);
    expect_row(&quant, 0, expected);
    for (int i = 0; i < 64; i++) {
        double value = values[i % 2 ? (i / 2 + 3) % 16 : i / 2 % 16];
        expected[i] = i < 32 ? ldexp(value, -127) : value * 0x1p127;
        if (fabs(expected[i]) > 0x1p128) expected[i] = copysign(INFINITY, expected[i]);
        if (fabs(expected[i]) == 0x1p128) expected[i] = copysign(INFINITY, expected[i]);
    }
    expect_row(&quant, 1, expected);
}

/* [576,256] in 128x128 blocks: the last block row is 64 high. */
Test(quant_formats, fp8_blocks)
{
    enum { N = 576, K = 256 };
    uint8_t *codes = testing_buffer(N * K, 1);
    float scales[10];
    memset(codes, 0x38, N * K); /* 1.0 */
    for (int r = 0; r < 5; r++) scales[2 * r] = (float)(r + 1), scales[2 * r + 1] = (float)(r + 1) * 16;
    epmoei_quant_t quant = matrix(EPMOE_FORMAT_FP8_BLOCK, N, K, 128);
    quant.data = codes, quant.scales = scales;
    double expected[K];
    for (int64_t r = 0; r < N; r++) {
        for (int c = 0; c < K; c++) expected[c] = (double)(r / 128 + 1) * (c < 128 ? 1 : 16);
        if (r % 64 == 0 || r % 64 == 63) expect_row(&quant, r, expected);
    }
    /* A second half of rows that begins blocks of its own: rows 192.. of 384 start with block row 2. */
    quant.rows = quant.stored_rows = 384, quant.second_half = 192;
    cr_assert((double)epmoei_quant_at(&quant, 127, 0) == 1 && (double)epmoei_quant_at(&quant, 191, 0) == 2);
    cr_assert((double)epmoei_quant_at(&quant, 192, 0) == 3 && (double)epmoei_quant_at(&quant, 319, 0) == 3);
    cr_assert((double)epmoei_quant_at(&quant, 320, 0) == 4);
    /* Every second row, as gate and up of an interleaved matrix. */
    quant.second_half = 0, quant.rows = 192, quant.first_row = 1, quant.row_step = 2;
    cr_assert((double)epmoei_quant_at(&quant, 63, 0) == 1 && (double)epmoei_quant_at(&quant, 64, 0) == 2);
    testing_buffer_free(codes);
    /* E8M0 as a scale: byte 127 is 1. */
    const uint8_t ones[] = {0x7E, 0xFE, 0x01}, e8m0[] = {127, 128};
    quant = matrix(EPMOE_FORMAT_FP8_BLOCK, 1, 3, 2);
    quant.scales_dtype = EPMOE_F8_E8M0;
    quant.data = ones, quant.scales = e8m0;
    ROW(quant, 0, 448, -448, 0x1p-8);
}

/* group_size -1: one scale for all columns (FP8_BLOCK: for the whole matrix), and the other defaults. */
Test(quant_formats, weight_fields)
{
    epmoe_weight_t weight = EPMOE_WEIGHT_INIT;
    weight.format = EPMOE_FORMAT_GPTQ;
    cr_assert_eq(epmoei_quant_check_weight(&weight, "weight", 300), EPMOE_OK);
    cr_assert(weight.group_size == 128 && weight.zero_convention == 1 && weight.scales_dtype == EPMOE_F32);
    weight.group_size = -1;
    cr_assert_eq(epmoei_quant_check_weight(&weight, "weight", 300), EPMOE_OK);
    cr_assert_eq(weight.group_size, 300);
    cr_assert_eq(epmoei_quant_sizes(EPMOE_FORMAT_GPTQ, 20, 300, 300, 0).groups, 1);
    /* ceil, never floor: K = 300 in groups of 128 has three; 20 rows take three words of zeros. */
    epmoei_quant_sizes_t sizes = epmoei_quant_sizes(EPMOE_FORMAT_GPTQ, 20, 300, 128, 0);
    cr_assert(sizes.groups == 3 && sizes.scales == 60 && sizes.zeros_bytes == 3 * 3 * 4);
    cr_assert_eq(sizes.data_bytes, 38 * 20 * 4);
    sizes = epmoei_quant_sizes(EPMOE_FORMAT_FP8_BLOCK, 384, 300, 128, 192);
    cr_assert(sizes.scales == 4 * 3 && sizes.data_bytes == 384 * 300);
    weight.format = EPMOE_FORMAT_FP8_BLOCK, weight.group_size = -1;
    cr_assert_eq(epmoei_quant_check_weight(&weight, "weight", 300), EPMOE_OK);
    cr_assert_eq(epmoei_quant_sizes(EPMOE_FORMAT_FP8_BLOCK, 999, 300, weight.group_size, 0).scales, 1);

    epmoe_weight_t mxfp4 = {.format = EPMOE_FORMAT_MXFP4};
    for (int i = 0; i < 2; i++) { /* with the defaults, then with what they stand for */
        cr_assert_eq(epmoei_quant_check_weight(&mxfp4, "weight", 64), EPMOE_OK);
        cr_assert(mxfp4.group_size == 32 && mxfp4.scales_dtype == EPMOE_F8_E8M0);
    }

    const struct {
        epmoe_weight_t weight;
        const char *message;
    } bad[] = {
        {{.format = EPMOE_FORMAT_AWQ, .group_size = -2}, "w.group_size is -2"},
        {{.format = EPMOE_FORMAT_GPTQ, .zero_convention = 3}, "w.zero_convention is 3"},
        {{.format = EPMOE_FORMAT_GPTQ, .scales_dtype = EPMOE_I32}, "w.scales_dtype is 7"},
        {{.format = EPMOE_FORMAT_AWQ, .g_idx = &(int32_t){0}}, "w.g_idx is not NULL: format awq has none"},
        {{.format = EPMOE_FORMAT_MXFP4, .group_size = 64}, "w.group_size is 64: of mxfp4 expected 32 or 0"},
        {{.format = EPMOE_FORMAT_MXFP4, .group_size = -1}, "w.group_size is -1: of mxfp4 expected 32 or 0"},
        {{.format = EPMOE_FORMAT_MXFP4, .scales_dtype = EPMOE_F32}, "w.scales_dtype is"},
        {{.format = EPMOE_FORMAT_MXFP4}, "w is mxfp4 with 300 columns: expected a multiple of 32"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        weight = bad[i].weight;
        cr_assert_eq(epmoei_quant_check_weight(&weight, "w", 300), EPMOE_ERROR_INVALID_ARGUMENT);
        cr_assert(strstr(epmoe_last_error(), bad[i].message), "%s", epmoe_last_error());
    }
}
