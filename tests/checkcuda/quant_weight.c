#include "tests/checkcuda/quant_weight.h"

#include "base/fp8.h"
#include "kernels/kernel_table.h"
#include "kernels/quant_formats.h"
#include "kernels/quant_tiles.h"

#include <stdlib.h>

static bool is_fp8(const quant_weight_t *weight) { return weight->format == EPMOE_FORMAT_FP8_BLOCK; }

epmoe_weight_t quant_weight_fields(const quant_weight_t *weight)
{
    epmoe_weight_t fields = EPMOE_WEIGHT_INIT;
    fields.format = weight->format;
    fields.group_size = weight->group;
    fields.group_rows = weight->group_rows;
    fields.storage = is_fp8(weight) ? EPMOE_STORAGE_ROWS : EPMOE_STORAGE_TILES;
    fields.scales_dtype = weight->format == EPMOE_FORMAT_MXFP4 ? EPMOE_DTYPE_NONE : weight->scales_dtype;
    return fields;
}

/* With every default filled in. */
static epmoe_weight_t filled_fields(const quant_weight_t *weight)
{
    epmoe_weight_t fields = quant_weight_fields(weight);
    if (epmoei_quant_check_weight(&fields, "weight", weight->k) != EPMOE_OK) abort();
    return fields;
}

static bool packed(const quant_weight_t *weight) { return weight->gated && weight->layout == EPMOE_LAYOUT_PACKED; }

/* In elements of scales_dtype, one expert. */
static int64_t fp8_scales(const quant_weight_t *weight, const epmoe_weight_t *fields)
{
    const int64_t high = fields->group_rows;
    int64_t blocks = packed(weight) ? 2 * epmoei_ceil_div(weight->n / 2, high) : epmoei_ceil_div(weight->n, high);
    return blocks * epmoei_ceil_div(weight->k, fields->group_size);
}

static void *add(check_case_t *c, const char *name, size_t offset, epmoe_dtype_t dtype, int64_t rows, int64_t cols)
{
    return check_add(c, name, offset, CHECK_IN, dtype, rows, cols, 16);
}

void quant_weight_add(check_case_t *c, testing_rng_t *rng, size_t offset, const char *const names[4],
                      const quant_weight_t *weight)
{
    epmoe_weight_t fields = filled_fields(weight);
    int64_t experts = weight->experts, k = weight->k;
    epmoei_quant_tiles_t tiles =
        epmoei_quant_tiles(weight->format, fields.scales_dtype, weight->n, k, fields.group_size, weight->gated);
    int64_t bytes = is_fp8(weight) ? weight->n * k : tiles.data_bytes;
    int64_t scales = is_fp8(weight) ? fp8_scales(weight, &fields) : tiles.scales;
    uint8_t *data = add(c, names[0], offset + offsetof(epmoe_weight_t, data), EPMOE_U8, experts, bytes);
    for (int64_t i = 0; i < experts * bytes; i++) {
        data[i] = (uint8_t)testing_next(rng);
        if (is_fp8(weight) && (data[i] & 0x7F) == 0x7F) data[i] ^= 0x15;
    }
    int64_t scale_size = epmoe_dtype_size(fields.scales_dtype);
    char *at = add(c, names[1], offset + offsetof(epmoe_weight_t, scales), EPMOE_U8, experts, scales * scale_size);
    /* Products of about one: E4M3 codes are about 100 at most bits. */
    float size = is_fp8(weight) ? 0.02f : 0.15f;
    for (int64_t i = 0; i < experts * scales; i++)
        if (weight->codes)
            ((uint8_t *)at)[i] = weight->codes[testing_range(rng, 0, weight->num_codes - 1)];
        else if (fields.scales_dtype == EPMOE_F8_E8M0)
            ((uint8_t *)at)[i] = (uint8_t)(is_fp8(weight) ? 119 : 122 + testing_range(rng, 0, 3));
        else
            epmoei_store(at, fields.scales_dtype, i, size * testing_uniform(rng, 0.5f, 1.5f));
    if (weight->zeros && tiles.zeros_bytes) {
        uint8_t *zeros =
            add(c, names[2], offset + offsetof(epmoe_weight_t, zeros), EPMOE_U8, experts, tiles.zeros_bytes);
        for (int64_t i = 0; i < experts * tiles.zeros_bytes; i++) zeros[i] = testing_next(rng) & 15;
    }
    if (!weight->order) return;
    int32_t *order = add(c, names[3], offset + offsetof(epmoe_weight_t, g_idx), EPMOE_I32, experts, k);
    for (int64_t e = 0; e < experts; e++)
        for (int32_t i = 0; i < k; i++) {
            int32_t j = testing_range(rng, 0, i);
            order[e * k + i] = order[e * k + j], order[e * k + j] = i;
        }
}

static float scale_of(const void *scales, epmoe_dtype_t dtype, int64_t i)
{
    return dtype == EPMOE_F8_E8M0 ? epmoei_e8m0_to_f32(((const uint8_t *)scales)[i]) : epmoei_load(scales, dtype, i);
}

/* Row r of the values is row memory_row of FP8's memory. */
static int64_t memory_row(const quant_weight_t *weight, int64_t r)
{
    int64_t f = weight->n / 2;
    if (!weight->gated || weight->layout == EPMOE_LAYOUT_GATE_FIRST) return r;
    return r < f ? 2 * r : 2 * (r - f) + 1;
}

static float fp8_value(const epmoe_weight_t *arrays, const quant_weight_t *weight, const epmoe_weight_t *fields,
                       int64_t e, int64_t r, int64_t c)
{
    int64_t g = fields->group_size, high = fields->group_rows, row = memory_row(weight, r), f = weight->n / 2;
    int64_t block = !packed(weight) ? row / high : r < f ? r / high : epmoei_ceil_div(f, high) + (r - f) / high;
    int64_t at = e * fp8_scales(weight, fields) + block * epmoei_ceil_div(weight->k, g) + c / g;
    uint8_t code = ((const uint8_t *)arrays->data)[(e * weight->n + row) * weight->k + c];
    return epmoei_e4m3_to_f32(code) * scale_of(arrays->scales, fields->scales_dtype, at);
}

float *quant_weight_values(const epmoe_weight_t *arrays, const quant_weight_t *weight)
{
    const epmoe_weight_t fields = filled_fields(weight);
    const epmoei_quant_tiles_t tiles =
        epmoei_quant_tiles(weight->format, fields.scales_dtype, weight->n, weight->k, fields.group_size, weight->gated);
    int64_t n = weight->n, k = weight->k, rows = weight->experts * n;
    float *values = malloc((size_t)(rows * k) * sizeof *values + 1);
    if (!values) abort();
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; i++) {
        int64_t e = i / n, r = i % n;
        for (int64_t c = 0; c < k; c++) {
            if (is_fp8(weight)) {
                values[i * k + c] = fp8_value(arrays, weight, &fields, e, r, c);
                continue;
            }
            int64_t at = e * tiles.scales + epmoei_tiles_scale_at(&tiles, r, c / fields.group_size);
            float scale = scale_of(arrays->scales, fields.scales_dtype, at);
            uint32_t code = epmoei_tiles_code(&tiles, (const char *)arrays->data + e * tiles.data_bytes, r, c);
            const bool mxfp4 = weight->format == EPMOE_FORMAT_MXFP4;
            int32_t zero = arrays->zeros && !mxfp4 ? ((const uint8_t *)arrays->zeros)[at] : 8;
            float value = mxfp4 ? epmoei_e2m1_to_f32((uint8_t)code) : (float)((int32_t)code - zero);
            values[i * k + (arrays->g_idx ? arrays->g_idx[e * k + c] : c)] = value * scale;
        }
    }
    return values;
}

float *quant_weight_bias(const float *bias, const quant_weight_t *weight)
{
    if (!bias) return NULL;
    quant_weight_t rows = *weight;
    if (!is_fp8(weight)) rows.layout = EPMOE_LAYOUT_PACKED;
    int64_t n = weight->n;
    float *ordered = malloc((size_t)(weight->experts * n) * sizeof *ordered);
    if (!ordered) abort();
    for (int64_t e = 0; e < weight->experts; e++)
        for (int64_t r = 0; r < n; r++) ordered[e * n + r] = bias[e * n + memory_row(&rows, r)];
    return ordered;
}

double quant_weight_rounding(epmoe_format_t format, epmoe_dtype_t x_dtype)
{
    bool rounds = epmoei_cuda_tier() == 90 && format == EPMOE_FORMAT_W4 && x_dtype == EPMOE_BF16;
    return rounds ? 4e-2 : 0;
}
