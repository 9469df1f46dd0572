#include "base/dtype.h"

static const struct {
    const char *name;
    int32_t size;
} dtype_table[] = {
    [EPMOE_DTYPE_NONE] = {"none", 0}, [EPMOE_F32] = {"f32", 4},         [EPMOE_BF16] = {"bf16", 2},
    [EPMOE_F16] = {"f16", 2},         [EPMOE_F8_E4M3] = {"f8_e4m3", 1}, [EPMOE_F8_E8M0] = {"f8_e8m0", 1},
    [EPMOE_U8] = {"u8", 1},           [EPMOE_I32] = {"i32", 4},         [EPMOE_I64] = {"i64", 8},
};
#define DTYPE_COUNT ((int32_t)(sizeof dtype_table / sizeof dtype_table[0]))

const char *epmoe_dtype_string(epmoe_dtype_t dtype)
{
    return (int32_t)dtype >= 0 && (int32_t)dtype < DTYPE_COUNT ? dtype_table[dtype].name : "none";
}

int32_t epmoe_dtype_size(epmoe_dtype_t dtype)
{
    return (int32_t)dtype >= 0 && (int32_t)dtype < DTYPE_COUNT ? dtype_table[dtype].size : 0;
}

const char *epmoe_format_string(epmoe_format_t format)
{
    static const char *const names[] = {"none", "fp32", "bf16", "fp16",  "fp8_block",
                                        "gptq", "awq",  "ct",   "mxfp4", "w4"};
    return (int32_t)format >= 0 && (int32_t)format < (int32_t)(sizeof names / sizeof names[0]) ? names[format] : "none";
}

epmoe_format_t epmoei_format_of_dtype(epmoe_dtype_t dtype)
{
    switch (dtype) {
    case EPMOE_F32: return EPMOE_FORMAT_F32;
    case EPMOE_BF16: return EPMOE_FORMAT_BF16;
    case EPMOE_F16: return EPMOE_FORMAT_F16;
    default: return EPMOE_FORMAT_NONE;
    }
}

epmoe_dtype_t epmoei_dtype_of_format(epmoe_format_t format)
{
    switch (format) {
    case EPMOE_FORMAT_F32: return EPMOE_F32;
    case EPMOE_FORMAT_BF16: return EPMOE_BF16;
    case EPMOE_FORMAT_F16: return EPMOE_F16;
    default: return EPMOE_DTYPE_NONE;
    }
}

float epmoei_f16_to_f32(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000u) << 16;
    uint32_t magnitude = bits & 0x7FFFu;
    /* Read as a float the shifted bits are 2^-112 of the value, subnormals included. */
    float value = epmoei_f32_from_bits(magnitude << 13) * 0x1p112f;
    uint32_t special = magnitude >= 0x7C00u ? 0x7F800000u : 0u;
    return epmoei_f32_from_bits(sign | special | epmoei_f32_bits(value));
}

uint16_t epmoei_f32_to_f16(float value)
{
    uint32_t bits = epmoei_f32_bits(value);
    uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return (uint16_t)(sign | 0x7E00u);
    if (magnitude >= 0x477FF000u) return (uint16_t)(sign | 0x7C00u); /* 65520 and above round to infinity */
    if (magnitude < 0x38800000u) {
        /* Below 2^-14: adding 0.5 leaves a multiple of 2^-24 in the low bits, rounded by the addition itself. */
        float shifted = epmoei_f32_from_bits(magnitude) + 0.5f;
        return (uint16_t)(sign | (epmoei_f32_bits(shifted) - 0x3F000000u));
    }
    uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
    return (uint16_t)(sign | ((rounded - 0x38000000u) >> 13));
}

float epmoei_round_to(float value, epmoe_dtype_t dtype)
{
    if (dtype == EPMOE_BF16) return epmoei_bf16_to_f32(epmoei_f32_to_bf16(value));
    if (dtype == EPMOE_F16) return epmoei_f16_to_f32(epmoei_f32_to_f16(value));
    return value;
}

void epmoei_to_f32(float *dst, const void *src, epmoe_dtype_t dtype, int64_t n)
{
    if (dtype == EPMOE_F32) {
        if (dst != src) memcpy(dst, src, (size_t)n * 4);
        return;
    }
    if (dtype == EPMOE_BF16) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) dst[i] = epmoei_load(src, EPMOE_BF16, i);
        return;
    }
#pragma omp simd
    for (int64_t i = 0; i < n; i++) dst[i] = epmoei_load(src, EPMOE_F16, i);
}

void epmoei_from_f32(void *dst, const float *src, epmoe_dtype_t dtype, int64_t n)
{
    if (dtype == EPMOE_F32) {
        if (dst != src) memcpy(dst, src, (size_t)n * 4);
        return;
    }
    if (dtype == EPMOE_BF16) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) epmoei_store(dst, EPMOE_BF16, i, src[i]);
        return;
    }
    for (int64_t i = 0; i < n; i++) epmoei_store(dst, EPMOE_F16, i, src[i]);
}
