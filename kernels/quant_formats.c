#include "kernels/quant_formats.h"

#include "base/fp8.h"

const uint8_t epmoei_awq_nibble[8] = {0, 4, 1, 5, 2, 6, 3, 7}; /* the inverse of the order 0 2 4 6 1 3 5 7 */

float epmoei_e8m0_to_f32(uint8_t code)
{
    if (code == 255) return epmoei_f32_from_bits(0x7FC00000u);
    return epmoei_f32_from_bits(code ? (uint32_t)code << 23 : 0x00400000u); /* 2^-127 is subnormal */
}

float epmoei_e2m1_to_f32(uint8_t code)
{
    static const float values[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6};
    return values[code & 15];
}

bool epmoei_format_is_quantised(epmoe_format_t format)
{
    return format >= EPMOE_FORMAT_FP8_BLOCK && format <= EPMOE_FORMAT_W4;
}

bool epmoei_is_scales_dtype(epmoe_dtype_t dtype) { return epmoei_dtype_is_float(dtype) || dtype == EPMOE_F8_E8M0; }

epmoei_quant_sizes_t epmoei_quant_sizes(epmoe_format_t format, int64_t rows, int64_t cols, int32_t group,
                                        int64_t second_half)
{
    return epmoei_quant_sizes_rows(format, rows, cols, group, group, second_half);
}

epmoei_quant_sizes_t epmoei_quant_sizes_rows(epmoe_format_t format, int64_t rows, int64_t cols, int32_t group,
                                             int32_t row_group, int64_t second_half)
{
    if (row_group == 0) row_group = group;
    epmoei_quant_sizes_t sizes = {.groups = epmoei_ceil_div(cols, group)};
    int64_t row_words = epmoei_ceil_div(rows, 8), col_words = epmoei_ceil_div(cols, 8);
    sizes.scales = rows * sizes.groups;
    switch (format) {
    case EPMOE_FORMAT_FP8_BLOCK:
        sizes.data_bytes = rows * cols;
        sizes.scales =
            (epmoei_ceil_div(second_half, row_group) + epmoei_ceil_div(rows - second_half, row_group)) * sizes.groups;
        break;
    case EPMOE_FORMAT_GPTQ:
        sizes.data_bytes = col_words * rows * 4;
        sizes.zeros_bytes = sizes.groups * row_words * 4;
        break;
    case EPMOE_FORMAT_AWQ:
        sizes.data_bytes = cols * row_words * 4;
        sizes.zeros_bytes = sizes.groups * row_words * 4;
        break;
    case EPMOE_FORMAT_CT_W4:
        sizes.data_bytes = rows * col_words * 4;
        sizes.zeros_bytes = row_words * sizes.groups * 4;
        break;
    case EPMOE_FORMAT_W4:
        sizes.data_bytes = rows * col_words * 4;
        sizes.zeros_bytes = rows * sizes.groups;
        break;
    case EPMOE_FORMAT_MXFP4: sizes.data_bytes = rows * sizes.groups * (EPMOEI_MXFP4_GROUP / 2); break;
    default: break;
    }
    return sizes;
}

epmoei_quant_t epmoei_quant_of_weight(const epmoe_weight_t *weight, int64_t rows, int64_t cols, int64_t expert,
                                      int64_t second_half)
{
    epmoei_quant_sizes_t sizes =
        epmoei_quant_sizes_rows(weight->format, rows, cols, weight->group_size, weight->group_rows, second_half);
    int64_t orders = weight->format == EPMOE_FORMAT_W4 && second_half ? 2 : 1;
    return (epmoei_quant_t){
        .format = weight->format,
        .scales_dtype = weight->scales_dtype,
        .group = weight->group_size,
        .row_group = weight->group_rows,
        .zero_convention = weight->zero_convention,
        .rows = rows,
        .cols = cols,
        .stored_rows = rows,
        .row_step = 1,
        .second_half = weight->format == EPMOE_FORMAT_FP8_BLOCK ? second_half : 0,
        .data = (const char *)weight->data + expert * sizes.data_bytes,
        .scales = (const char *)weight->scales + expert * sizes.scales * epmoe_dtype_size(weight->scales_dtype),
        .zeros = weight->zeros ? (const char *)weight->zeros + expert * sizes.zeros_bytes : NULL,
        .g_idx = weight->g_idx ? weight->g_idx + expert * orders * cols : NULL,
    };
}

static epmoe_status_t check_storage_known(const epmoe_weight_t *weight, const char *name)
{
    if (weight->storage == EPMOE_STORAGE_ROWS || weight->storage == EPMOE_STORAGE_TILES) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s.storage is %d: expected an epmoe_storage_t", name,
                       (int)weight->storage);
}

epmoe_status_t epmoei_weight_check_rows(const epmoe_weight_t *weight, const char *name)
{
    if (weight->storage == EPMOE_STORAGE_ROWS) return EPMOE_OK;
    EPMOEI_CHECK(check_storage_known(weight, name));
    return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED,
                       "%s.storage is %d: expected EPMOE_STORAGE_ROWS (0): tiles are for products on CUDA alone", name,
                       (int)weight->storage);
}

epmoe_status_t epmoei_weight_check_storage(const epmoe_weight_t *weight, const char *name)
{
    static const epmoe_format_t tiled[] = {EPMOE_FORMAT_BF16, EPMOE_FORMAT_F16, EPMOE_FORMAT_W4, EPMOE_FORMAT_MXFP4};
    EPMOEI_CHECK(check_storage_known(weight, name));
    if (weight->storage == EPMOE_STORAGE_ROWS) return EPMOE_OK;
    for (size_t i = 0; i < sizeof tiled / sizeof tiled[0]; i++)
        if (weight->format == tiled[i]) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                       "%s.storage is 1 (TILES) and its format %s: expected bf16, fp16, w4 or mxfp4", name,
                       epmoe_format_string(weight->format));
}

/* FP8_BLOCK's group_size is known. */
static epmoe_status_t check_group_rows(epmoe_weight_t *weight, const char *name)
{
    if (weight->format != EPMOE_FORMAT_FP8_BLOCK) {
        if (weight->group_rows == 0) return EPMOE_OK;
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s.group_rows is %d and its format %s: expected 0", name,
                           weight->group_rows, epmoe_format_string(weight->format));
    }
    if (weight->group_rows < -1)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s.group_rows is %d: expected at least 1, 0 or -1", name,
                           weight->group_rows);
    if (weight->group_rows == 0) weight->group_rows = weight->group_size;
    if (weight->group_rows == -1) weight->group_rows = INT32_MAX;
    return EPMOE_OK;
}

epmoe_status_t epmoei_quant_check_weight(epmoe_weight_t *weight, const char *name, int64_t cols)
{
    EPMOEI_CHECK(epmoei_weight_check_storage(weight, name));
    if (weight->format == EPMOE_FORMAT_MXFP4) {
        if (weight->group_size != 0 && weight->group_size != EPMOEI_MXFP4_GROUP)
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s.group_size is %d: of mxfp4 expected %d or 0", name,
                               weight->group_size, EPMOEI_MXFP4_GROUP);
        if (weight->scales_dtype != EPMOE_DTYPE_NONE && weight->scales_dtype != EPMOE_F8_E8M0)
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s.scales_dtype is %d: of mxfp4 expected F8_E8M0 or 0",
                               name, (int)weight->scales_dtype);
        weight->group_size = EPMOEI_MXFP4_GROUP;
        weight->scales_dtype = EPMOE_F8_E8M0;
        if (cols % EPMOEI_MXFP4_GROUP)
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s is mxfp4 with %lld columns: expected a multiple of %d",
                               name, (long long)cols, EPMOEI_MXFP4_GROUP);
    }
    if (weight->group_size == 0) weight->group_size = 128;
    if (weight->group_size < -1)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s.group_size is %d: expected at least 1, 0 or -1", name,
                           weight->group_size);
    /* One group: FP8's block has to cover the rows too. */
    if (weight->group_size == -1)
        weight->group_size = weight->format == EPMOE_FORMAT_FP8_BLOCK ? INT32_MAX : (int32_t)cols;
    EPMOEI_CHECK(check_group_rows(weight, name));
    if (weight->scales_dtype == EPMOE_DTYPE_NONE) weight->scales_dtype = EPMOE_F32;
    if (!epmoei_is_scales_dtype(weight->scales_dtype))
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s.scales_dtype is %d: expected F32, BF16, F16 or F8_E8M0",
                           name, (int)weight->scales_dtype);
    if (weight->zero_convention == 0) weight->zero_convention = 1;
    if (weight->zero_convention != 1 && weight->zero_convention != 2)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s.zero_convention is %d: expected 1 or 2", name,
                           weight->zero_convention);
    bool indexed = weight->format == EPMOE_FORMAT_GPTQ || weight->format == EPMOE_FORMAT_CT_W4 ||
                   weight->format == EPMOE_FORMAT_W4;
    if (weight->g_idx && !indexed)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s.g_idx is not NULL: format %s has none", name,
                           epmoe_format_string(weight->format));
    return EPMOE_OK;
}

epmoe_status_t epmoei_weight_check_pointers(const epmoe_weight_t *weight, const char *name)
{
    bool quantised = epmoei_format_is_quantised(weight->format);
    bool zeros = weight->format == EPMOE_FORMAT_GPTQ || weight->format == EPMOE_FORMAT_AWQ;
    const char *missing = !weight->data                  ? "data"
                          : quantised && !weight->scales ? "scales"
                          : zeros && !weight->zeros      ? "zeros"
                                                         : NULL;
    if (!missing) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s.%s is NULL", name, missing);
}

static uint32_t load_word(const void *base, int64_t i)
{
    uint32_t word;
    memcpy(&word, (const char *)base + 4 * i, 4);
    return word;
}

static uint32_t nibble(uint32_t word, int64_t i) { return word >> (4 * (i & 7)) & 15; }

float epmoei_quant_scale(const epmoei_quant_t *quant, int64_t i)
{
    if (quant->scales_dtype == EPMOE_F8_E8M0) return epmoei_e8m0_to_f32(((const uint8_t *)quant->scales)[i]);
    return epmoei_load(quant->scales, quant->scales_dtype, i);
}

int32_t epmoei_quant_index(const epmoei_quant_t *quant, int64_t i) { return (int32_t)load_word(quant->g_idx, i); }

uint32_t epmoei_quant_code(const epmoei_quant_t *quant, int64_t row, int64_t col)
{
    switch (quant->format) {
    case EPMOE_FORMAT_GPTQ: return nibble(load_word(quant->data, col / 8 * quant->stored_rows + row), col);
    case EPMOE_FORMAT_AWQ:
        return nibble(load_word(quant->data, col * epmoei_ceil_div(quant->stored_rows, 8) + row / 8),
                      epmoei_awq_nibble[row & 7]);
    case EPMOE_FORMAT_MXFP4: {
        uint8_t pair = ((const uint8_t *)quant->data)[(row * epmoei_quant_stored_cols(quant) + col) / 2];
        return col & 1 ? pair >> 4 : pair & 15;
    }
    default:
        return nibble(load_word(quant->data, row * epmoei_ceil_div(epmoei_quant_stored_cols(quant), 8) + col / 8), col);
    }
}

/* Scales along a stored row. */
static int64_t stored_groups(const epmoei_quant_t *quant)
{
    return epmoei_ceil_div(epmoei_quant_stored_cols(quant), quant->group);
}

int32_t epmoei_quant_zero(const epmoei_quant_t *quant, int64_t row, int64_t group)
{
    int64_t row_words = epmoei_ceil_div(quant->stored_rows, 8), groups = stored_groups(quant);
    if (!quant->zeros) return 8;
    switch (quant->format) {
    case EPMOE_FORMAT_GPTQ: {
        uint32_t stored = nibble(load_word(quant->zeros, group * row_words + row / 8), row);
        return (int32_t)(quant->zero_convention == 1 ? (stored + 1) & 15 : stored);
    }
    case EPMOE_FORMAT_AWQ:
        return (int32_t)nibble(load_word(quant->zeros, group * row_words + row / 8), epmoei_awq_nibble[row & 7]);
    case EPMOE_FORMAT_CT_W4: return (int32_t)nibble(load_word(quant->zeros, row / 8 * groups + group), row);
    default: return ((const uint8_t *)quant->zeros)[row * groups + group];
    }
}

int64_t epmoei_quant_scale_at(const epmoei_quant_t *quant, int64_t row, int64_t group)
{
    int64_t groups = stored_groups(quant), half = quant->second_half;
    switch (quant->format) {
    case EPMOE_FORMAT_FP8_BLOCK: {
        int32_t high = epmoei_quant_row_group(quant);
        if (quant->transposed) return group * epmoei_ceil_div(quant->stored_rows, high) + row / high;
        int64_t block = half && row >= half ? epmoei_ceil_div(half, high) + (row - half) / high : row / high;
        return block * groups + group;
    }
    case EPMOE_FORMAT_GPTQ:
    case EPMOE_FORMAT_AWQ: return group * quant->stored_rows + row;
    default: return row * groups + group;
    }
}

/* GPTQ and CT choose the group of each column; W4 has sorted them. */
static bool has_group_index(const epmoei_quant_t *quant) { return quant->g_idx && quant->format != EPMOE_FORMAT_W4; }

float epmoei_quant_at(const epmoei_quant_t *quant, int64_t row, int64_t col)
{
    int64_t stored = quant->first_row + row * quant->row_step;
    int64_t group = has_group_index(quant) ? epmoei_quant_index(quant, col) : col / quant->group;
    float scale = epmoei_quant_scale(quant, epmoei_quant_scale_at(quant, stored, group));
    if (quant->format == EPMOE_FORMAT_FP8_BLOCK) {
        int64_t at =
            quant->transposed ? col * quant->stored_rows + stored : stored * epmoei_quant_stored_cols(quant) + col;
        return epmoei_e4m3_to_f32(((const uint8_t *)quant->data)[at]) * scale;
    }
    uint32_t code = epmoei_quant_code(quant, stored, col);
    if (quant->format == EPMOE_FORMAT_MXFP4) return epmoei_e2m1_to_f32((uint8_t)code) * scale;
    return (float)((int32_t)code - epmoei_quant_zero(quant, stored, group)) * scale;
}

/* Columns of one group, [first, end), in a row whose columns lie side by side. */
static void widen_run(const epmoei_quant_t *quant, int64_t stored, int64_t first, int64_t end, float *out)
{
    int64_t group = first / quant->group, cols = epmoei_quant_stored_cols(quant);
    float scale = epmoei_quant_scale(quant, epmoei_quant_scale_at(quant, stored, group));
    if (quant->format == EPMOE_FORMAT_FP8_BLOCK) {
        const uint8_t *codes = (const uint8_t *)quant->data + stored * cols;
        for (int64_t c = first; c < end; c++) *out++ = epmoei_e4m3_to_f32(codes[c]) * scale;
        return;
    }
    if (quant->format == EPMOE_FORMAT_MXFP4) {
        const uint8_t *pairs = (const uint8_t *)quant->data + stored * cols / 2;
        for (int64_t c = first; c < end; c++)
            *out++ = epmoei_e2m1_to_f32((uint8_t)(pairs[c / 2] >> (4 * (c & 1)))) * scale;
        return;
    }
    int32_t zero = epmoei_quant_zero(quant, stored, group);
    const char *row = (const char *)quant->data;
    int64_t word_step = 4; /* bytes from 8 columns to the next 8 */
    if (quant->format == EPMOE_FORMAT_GPTQ) {
        row += stored * 4;
        word_step = quant->stored_rows * 4;
    } else {
        row += stored * epmoei_ceil_div(cols, 8) * 4;
    }
    for (int64_t c = first; c < end;) {
        uint32_t word;
        memcpy(&word, row + c / 8 * word_step, 4);
        int64_t stop = epmoei_min64(end, (c | 7) + 1);
        for (word >>= 4 * (c & 7); c < stop; c++, word >>= 4) *out++ = (float)((int32_t)(word & 15) - zero) * scale;
    }
}

static void widen_awq(const epmoei_quant_t *quant, int64_t stored, int64_t first, int64_t end, float *out)
{
    int64_t group = first / quant->group, words = epmoei_ceil_div(quant->stored_rows, 8);
    float scale = epmoei_quant_scale(quant, epmoei_quant_scale_at(quant, stored, group));
    int32_t zero = epmoei_quant_zero(quant, stored, group);
    int shift = 4 * epmoei_awq_nibble[stored & 7];
    for (int64_t c = first; c < end; c++)
        *out++ = (float)((int32_t)(load_word(quant->data, c * words + stored / 8) >> shift & 15) - zero) * scale;
}

void epmoei_quant_row(const epmoei_quant_t *quant, int64_t row, int64_t first, int64_t count, float *out)
{
    if (has_group_index(quant) || quant->transposed) {
        for (int64_t c = first; c < first + count; c++) *out++ = epmoei_quant_at(quant, row, c);
        return;
    }
    int64_t stored = quant->first_row + row * quant->row_step, end = first + count;
    for (int64_t c = first, stop; c < end; out += stop - c, c = stop) {
        stop = epmoei_min64(end, (c / quant->group + 1) * quant->group);
        if (quant->format == EPMOE_FORMAT_AWQ)
            widen_awq(quant, stored, c, stop, out);
        else
            widen_run(quant, stored, c, stop, out);
    }
}

/* W4's order: no column twice, so that every one is there. Columns are looked for in windows that fit the stack. */
static epmoe_status_t check_permutation(const epmoei_quant_t *quant, const char *name)
{
    enum { kWindow = 1 << 16 };
    uint8_t seen[kWindow / 8];
    for (int64_t base = 0; base < quant->cols; base += kWindow) {
        int64_t width = epmoei_min64(kWindow, quant->cols - base);
        memset(seen, 0, (size_t)epmoei_ceil_div(width, 8));
        for (int64_t c = 0; c < quant->cols; c++) {
            int64_t column = epmoei_quant_index(quant, c) - base;
            if (column < 0 || column >= width) continue;
            uint8_t bit = (uint8_t)(1u << (column & 7));
            if (seen[column / 8] & bit)
                return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                                   "%s[%lld] is %lld again: expected a permutation of 0..%lld", name, (long long)c,
                                   (long long)(base + column), (long long)quant->cols - 1);
            seen[column / 8] |= bit;
        }
    }
    return EPMOE_OK;
}

epmoe_status_t epmoei_quant_check_groups(const epmoei_quant_t *quant, const char *name)
{
    /* W4 holds columns where the others hold groups. */
    int64_t limit = quant->format == EPMOE_FORMAT_W4 ? quant->cols : epmoei_ceil_div(quant->cols, quant->group);
    for (int64_t c = 0; quant->g_idx && c < quant->cols; c++) {
        int32_t index = epmoei_quant_index(quant, c);
        if (index < 0 || index >= limit)
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s[%lld] is %d: expected 0..%lld", name, (long long)c,
                               index, (long long)limit - 1);
    }
    return quant->g_idx && quant->format == EPMOE_FORMAT_W4 ? check_permutation(quant, name) : EPMOE_OK;
}
