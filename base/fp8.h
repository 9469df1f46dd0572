/* E4M3 (OCP 8-bit floating point, the variant without infinities): sign, 4 exponent bits of bias 7, 3 mantissa bits.
 * The largest value is 448 = 0x7E, the smallest 2^-9 = 0x01. */
#ifndef EPMOEI_FP8_H
#define EPMOEI_FP8_H

#include "base/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

#define EPMOEI_E4M3_MAX 448.0f

/* Nearest, ties to even. Saturating: what rounds above 448, infinities included, is +-448. NaN is 0x7F, -0 is 0x80. */
static inline uint8_t epmoei_f32_to_e4m3(float value)
{
    uint32_t bits = epmoei_f32_bits(value), magnitude = bits & 0x7FFFFFFFu;
    /* Exponent bias 127 becomes 7; a carry out of the mantissa is the next exponent. */
    uint32_t normal = ((magnitude + 0x7FFFFu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
    /* Below 2^-6: next to 2^14 a float's last bit is 2^-9, so that the addition itself rounds. */
    uint32_t tiny = epmoei_f32_bits(epmoei_f32_from_bits(magnitude) + 0x1p14f) - 0x46800000u;
    uint32_t code = magnitude < 0x3C800000u ? tiny : normal;
    code = magnitude >= 0x43E00000u ? 0x7Eu : code;
    code |= (bits >> 24) & 0x80u;
    return (uint8_t)(magnitude > 0x7F800000u ? 0x7Fu : code);
}

static inline float epmoei_e4m3_to_f32(uint8_t code)
{
    uint32_t sign = (uint32_t)(code & 0x80u) << 24, magnitude = code & 0x7Fu;
    /* Read as a float the shifted bits are 2^-120 of the value, subnormals included. */
    float value = epmoei_f32_from_bits(magnitude << 20) * 0x1p120f;
    uint32_t nan = magnitude == 0x7Fu ? 0x7FC00000u : 0u;
    return epmoei_f32_from_bits(sign | nan | epmoei_f32_bits(value));
}

/* The scale of values up to amax: never zero, and finite also when amax is infinite. */
static inline float epmoei_e4m3_scale(float amax)
{
    float scale = (amax < 0x1.fffffep127f ? amax : 0x1.fffffep127f) / EPMOEI_E4M3_MAX;
    return scale > 0x1p-126f ? scale : 0x1p-126f;
}

/* max(amax, |value|), where a NaN counts as 0. */
static inline float epmoei_amax(float amax, float value)
{
    float magnitude = epmoei_f32_from_bits(epmoei_f32_bits(value) & 0x7FFFFFFFu);
    return magnitude > amax ? magnitude : amax;
}

#ifdef __cplusplus
}
#endif

#endif
