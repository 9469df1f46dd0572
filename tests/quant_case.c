#include "tests/quant_case.h"

#include "base/dtype.h"

#include <criterion/criterion.h>
#include <math.h>

static void fill_index(testing_rng_t *rng, quant_case_t *made, int64_t experts, int64_t k, int64_t groups,
                       int32_t group, quant_index_t index, int64_t orders)
{
    int64_t rows = experts * orders;
    made->g_idx = testing_buffer(rows * k * 4, 4);
    for (int64_t e = 0; e < rows; e++) {
        int32_t *row = made->g_idx + e * k;
        for (int64_t i = 0; i < k; i++) {
            if (made->weight.format == EPMOE_FORMAT_W4)
                row[i] = (int32_t)((i * 7 + e) % k);
            else if (index == QUANT_INDEX_ANY)
                row[i] = (int32_t)(testing_next(rng) % (uint32_t)groups);
            else
                row[i] = (int32_t)(i / group);
        }
        for (int64_t i = k - 1; i > 0 && index == QUANT_INDEX_EVEN && made->weight.format != EPMOE_FORMAT_W4; i--) {
            int64_t j = (int64_t)(testing_next(rng) % (uint32_t)(i + 1));
            int32_t kept = row[i];
            row[i] = row[j], row[j] = kept;
        }
    }
}

quant_case_t quant_case_make(testing_rng_t *rng, epmoe_format_t format, int64_t experts, int64_t n, int64_t k,
                             int32_t group, quant_index_t index, int64_t second_half)
{
    return quant_case_make_rows(rng, format, experts, n, k, group, 0, index, second_half);
}

quant_case_t quant_case_make_rows(testing_rng_t *rng, epmoe_format_t format, int64_t experts, int64_t n, int64_t k,
                                  int32_t group, int32_t group_rows, quant_index_t index, int64_t second_half)
{
    quant_case_t made = {.weight = EPMOE_WEIGHT_INIT};
    made.weight.group_rows = group_rows;
    made.weight.format = format, made.weight.group_size = group, made.weight.scales_dtype = EPMOE_BF16;
    if (format == EPMOE_FORMAT_MXFP4) made.weight.group_size = 0, made.weight.scales_dtype = EPMOE_DTYPE_NONE;
    epmoe_weight_t filled = made.weight;
    cr_assert_eq(epmoei_quant_check_weight(&filled, "weight", k), EPMOE_OK, "%s", epmoe_last_error());
    bool fp8 = format == EPMOE_FORMAT_FP8_BLOCK;
    epmoei_quant_sizes_t sizes =
        epmoei_quant_sizes_rows(format, n, k, filled.group_size, filled.group_rows, fp8 ? second_half : 0);
    int64_t data_bytes = experts * sizes.data_bytes, scales = experts * sizes.scales;
    uint8_t *data = testing_buffer(data_bytes, 1), *zeros = testing_buffer(experts * sizes.zeros_bytes + 1, 1);
    for (int64_t i = 0; i < data_bytes; i++) {
        data[i] = (uint8_t)testing_next(rng);
        if (fp8 && (data[i] & 0x7F) == 0x7F) data[i] = 0x38;
    }
    for (int64_t i = 0; i < experts * sizes.zeros_bytes; i++)
        zeros[i] = (uint8_t)(testing_next(rng) & (format == EPMOE_FORMAT_W4 ? 15 : 255));
    if (format == EPMOE_FORMAT_MXFP4) {
        uint8_t *bytes = testing_buffer(scales, 1);
        for (int64_t i = 0; i < scales; i++) bytes[i] = (uint8_t)(120 + testing_next(rng) % 16);
        made.scales = bytes;
    } else {
        uint16_t *halves = testing_buffer(scales * 2, 2);
        for (int64_t i = 0; i < scales; i++) halves[i] = (uint16_t)(0x3F80 | (testing_next(rng) & 0x7F));
        made.scales = halves;
    }
    if (index != QUANT_INDEX_NONE)
        fill_index(rng, &made, experts, k, sizes.groups, filled.group_size, index,
                   format == EPMOE_FORMAT_W4 && second_half ? 2 : 1);
    made.data = data, made.zeros = zeros;
    made.weight.data = data, made.weight.scales = made.scales, made.weight.g_idx = made.g_idx;
    made.weight.zeros = sizes.zeros_bytes ? zeros : NULL;
    return made;
}

/* Codes of 1 and -1; half a byte of a 4-bit one twice. */
static uint8_t code_of(epmoe_format_t format, bool negative)
{
    if (format == EPMOE_FORMAT_FP8_BLOCK) return negative ? 0xB8 : 0x38;
    if (format == EPMOE_FORMAT_MXFP4) return negative ? 0xAA : 0x22;
    return negative ? 0x77 : 0x99; /* about a zero point of 8 */
}

quant_case_t quant_case_constant(epmoe_format_t format, int64_t experts, int64_t n, int64_t k, const float *values)
{
    quant_case_t made = {.weight = EPMOE_WEIGHT_INIT};
    made.weight.format = format;
    if (!epmoei_format_is_quantised(format)) {
        epmoe_dtype_t dtype = epmoei_dtype_of_format(format);
        made.weight.data = made.data = testing_buffer(experts * n * k * epmoe_dtype_size(dtype), 0);
        made.scales = testing_buffer(0, 0), made.zeros = testing_buffer(0, 0);
        for (int64_t i = 0; i < experts * n * k; i++) epmoei_store(made.data, dtype, i, values[2 * i / (n * k)]);
        return made;
    }
    testing_rng_t rng = testing_rng(1);
    made = quant_case_make(&rng, format, experts, n, k, 128, QUANT_INDEX_NONE, 0);
    epmoe_weight_t filled = made.weight;
    cr_assert_eq(epmoei_quant_check_weight(&filled, "weight", k), EPMOE_OK, "%s", epmoe_last_error());
    epmoei_quant_sizes_t sizes = epmoei_quant_sizes(format, n, k, filled.group_size, 0);
    /* One group each, so that scales lie by rows. */
    cr_assert(k == 128 && (n % 256 == 0 || format != EPMOE_FORMAT_FP8_BLOCK || values[0] == values[1]));
    for (int64_t e = 0; e < experts; e++) {
        memset((uint8_t *)made.data + e * sizes.data_bytes, code_of(format, values[2 * e] < 0),
               (size_t)sizes.data_bytes);
        for (int64_t i = 0; i < sizes.scales; i++) {
            float size = fabsf(values[2 * e + 2 * i / sizes.scales]);
            if (format == EPMOE_FORMAT_MXFP4)
                ((uint8_t *)made.scales)[e * sizes.scales + i] = (uint8_t)(127 + ilogbf(size));
            else
                epmoei_store(made.scales, EPMOE_BF16, e * sizes.scales + i, size);
        }
    }
    memset(made.zeros, format == EPMOE_FORMAT_GPTQ ? 0x77 : 0x88, (size_t)(experts * sizes.zeros_bytes));
    if (format == EPMOE_FORMAT_W4) made.weight.zeros = NULL; /* a byte each; none is 8 */
    return made;
}

void quant_case_free(quant_case_t *made)
{
    cr_assert(testing_guards_intact(made->data) && testing_guards_intact(made->scales));
    testing_buffer_free(made->data), testing_buffer_free(made->scales), testing_buffer_free(made->zeros);
    if (made->g_idx) testing_buffer_free(made->g_idx);
}
