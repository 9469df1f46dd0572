/* Element types on the host: conversions to and from fp32 as IEEE 754 rounds (nearest, ties to even), and access by
 * element that needs no alignment. */
#ifndef EPMOEI_DTYPE_H
#define EPMOEI_DTYPE_H

#include "base/base.h"

#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

static inline float epmoei_f32_from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t epmoei_f32_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float epmoei_bf16_to_f32(uint16_t bits) { return epmoei_f32_from_bits((uint32_t)bits << 16); }

static inline uint16_t epmoei_f32_to_bf16(float value)
{
    uint32_t bits = epmoei_f32_bits(value);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return (uint16_t)((bits >> 16) | 0x40u); /* NaN stays NaN, quiet */
    return (uint16_t)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

float epmoei_f16_to_f32(uint16_t bits);
uint16_t epmoei_f32_to_f16(float value); /* overflow gives infinity */

static inline bool epmoei_dtype_is_float(epmoe_dtype_t dtype)
{
    return dtype == EPMOE_F32 || dtype == EPMOE_BF16 || dtype == EPMOE_F16;
}

/* Element i of an array of F32, BF16 or F16 at any address. */
static inline float epmoei_load(const void *base, epmoe_dtype_t dtype, int64_t i)
{
    if (dtype == EPMOE_F32) {
        float value;
        memcpy(&value, (const char *)base + 4 * i, 4);
        return value;
    }
    uint16_t bits;
    memcpy(&bits, (const char *)base + 2 * i, 2);
    return dtype == EPMOE_BF16 ? epmoei_bf16_to_f32(bits) : epmoei_f16_to_f32(bits);
}

static inline void epmoei_store(void *base, epmoe_dtype_t dtype, int64_t i, float value)
{
    if (dtype == EPMOE_F32) {
        memcpy((char *)base + 4 * i, &value, 4);
        return;
    }
    uint16_t bits = dtype == EPMOE_BF16 ? epmoei_f32_to_bf16(value) : epmoei_f32_to_f16(value);
    memcpy((char *)base + 2 * i, &bits, 2);
}

/* value rounded to dtype and back. */
float epmoei_round_to(float value, epmoe_dtype_t dtype);

/* n elements; src and dst must not overlap unless they are the same F32 array. Unaligned addresses are fine. */
void epmoei_to_f32(float *dst, const void *src, epmoe_dtype_t dtype, int64_t n);
void epmoei_from_f32(void *dst, const float *src, epmoe_dtype_t dtype, int64_t n);

/* The plain format of a dtype and back; NONE when there is none. */
epmoe_format_t epmoei_format_of_dtype(epmoe_dtype_t dtype);
epmoe_dtype_t epmoei_dtype_of_format(epmoe_format_t format);

#ifdef __cplusplus
}
#endif

#endif
