#include "kernels/random_quant.h"

#include "base/fp8.h"
#include "kernels/random_weights_bits.h"

#include <math.h>

enum { kPiece = 512, kZero = 8 };

/* Of the sum of four uniforms, in standard deviations. */
#define LIMIT 3.4642f

float epmoei_random_quant_scale(const epmoei_random_quant_t *random, int64_t row, int64_t group)
{
    float limit = LIMIT * epmoei_random_scale(random->tensor, random->cols);
    bool fp8 = random->format == EPMOE_FORMAT_FP8_BLOCK, mxfp4 = random->format == EPMOE_FORMAT_MXFP4;
    uint32_t at = (uint32_t)(fp8 ? row / random->group : row) * 0x9E3779B1u + (uint32_t)group;
    uint32_t key = (uint32_t)epmoei_random_key(random->seed, random->tensor, random->expert);
    bool larger = epmoei_mix32(at ^ key) & 1;
    if (mxfp4) return exp2f(ceilf(log2f(limit / 6))) * (larger ? 2.0f : 1.0f);
    if (fp8) return epmoei_round_to(limit / EPMOEI_E4M3_MAX, EPMOE_F16) * (larger ? 2.0f : 1.0f);
    /* Twice would be more than trained weights have, and than the fastest kernels are made for. */
    return epmoei_round_to(limit / 7 * (larger ? 1.5f : 1.0f), EPMOE_F16);
}

static uint8_t nearest_e2m1(float value)
{
    uint8_t best = 0;
    for (uint8_t code = 1; code < 8; code++)
        if (fabsf(epmoei_e2m1_to_f32(code) - fabsf(value)) < fabsf(epmoei_e2m1_to_f32(best) - fabsf(value)))
            best = code;
    return (uint8_t)(best | (value < 0 ? 8 : 0));
}

static uint8_t code_of(epmoe_format_t format, float quotient)
{
    if (format == EPMOE_FORMAT_FP8_BLOCK) return epmoei_f32_to_e4m3(quotient);
    if (format == EPMOE_FORMAT_MXFP4) return nearest_e2m1(quotient);
    float code = rintf(quotient) + kZero;
    return (uint8_t)(code < 0 ? 0 : code > 15 ? 15 : code);
}

static float value_of(epmoe_format_t format, uint8_t code)
{
    if (format == EPMOE_FORMAT_FP8_BLOCK) return epmoei_e4m3_to_f32(code);
    if (format == EPMOE_FORMAT_MXFP4) return epmoei_e2m1_to_f32(code);
    return (float)(code - kZero);
}

/* Either of the two may be NULL. */
static void make(const epmoei_random_quant_t *random, int64_t row, int64_t first, int64_t count, uint8_t *codes,
                 float *values)
{
    float piece[kPiece], scale = 0, deviation = epmoei_random_scale(random->tensor, random->cols);
    int64_t group = -1;
    for (int64_t done = 0; done < count; done += kPiece) {
        int64_t n = epmoei_min64(kPiece, count - done);
        epmoei_random_fill(piece, EPMOE_F32, random->seed, random->tensor, random->expert,
                           row * random->cols + first + done, n, deviation);
        for (int64_t i = 0; i < n; i++) {
            int64_t here = (first + done + i) / random->group;
            if (here != group) scale = epmoei_random_quant_scale(random, row, here);
            group = here;
            uint8_t code = code_of(random->format, piece[i] / scale);
            if (codes) codes[done + i] = code;
            if (values) values[done + i] = value_of(random->format, code) * scale;
        }
    }
}

void epmoei_random_quant_codes(const epmoei_random_quant_t *random, int64_t row, int64_t first, int64_t count,
                               uint8_t *codes)
{
    make(random, row, first, count, codes, NULL);
}

void epmoei_random_quant_values(const epmoei_random_quant_t *random, int64_t row, int64_t first, int64_t count,
                                float *values)
{
    make(random, row, first, count, NULL, values);
}

static void put_scale(const epmoei_pack_target_t *target, int64_t at, float scale)
{
    if (target->shape.scales_dtype == EPMOE_F8_E8M0)
        ((uint8_t *)target->scales)[at] = (uint8_t)(epmoei_f32_bits(scale) >> 23);
    else
        epmoei_store(target->scales, target->shape.scales_dtype, at, scale);
}

static void fill_row(const epmoei_random_quant_t *random, int64_t row, const epmoei_pack_target_t *target)
{
    int64_t cols = random->cols, groups = epmoei_ceil_div(cols, random->group);
    int64_t to = target->first_row + row * target->row_step;
    bool fp8 = random->format == EPMOE_FORMAT_FP8_BLOCK;
    uint8_t *data = (uint8_t *)target->data + to * (fp8 ? cols : epmoei_ceil_div(cols, 8) * 4);
    if (!fp8) memset(data + (epmoei_ceil_div(cols, 8) - 1) * 4, 0, 4); /* its last word may be used in part */
    for (int64_t first = 0; first < cols; first += kPiece) {
        uint8_t codes[kPiece + 1] = {0};
        int64_t n = epmoei_min64(kPiece, cols - first);
        epmoei_random_quant_codes(random, row, first, n, codes);
        if (fp8)
            memcpy(data + first, codes, (size_t)n);
        else
            for (int64_t i = 0; i < n; i += 2) data[(first + i) / 2] = (uint8_t)(codes[i] | codes[i + 1] << 4);
    }
    if (!fp8) {
        for (int64_t g = 0; g < groups; g++)
            put_scale(target, to * groups + g, epmoei_random_quant_scale(random, row, g));
        if (target->zeros) memset(target->zeros + to * groups, kZero, (size_t)groups);
    } else if (row % random->group == 0) {
        for (int64_t g = 0; g < groups; g++)
            put_scale(target, (target->first_block + row / random->group) * groups + g,
                      epmoei_random_quant_scale(random, row, g));
    }
}

void epmoei_random_quant_fill(const epmoei_random_quant_t *random, int64_t rows, const epmoei_pack_target_t *target)
{
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) fill_row(random, row, target);
}
