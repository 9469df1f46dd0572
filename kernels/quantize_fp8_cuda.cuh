/* Values to E4M3 on the device, bit for bit as base/fp8.h and kernels/quantize_fp8.c have them. */
#ifndef EPMOEI_QUANTIZE_FP8_CUDA_CUH
#define EPMOEI_QUANTIZE_FP8_CUDA_CUH

#include "kernels/cuda_common.cuh"
#include "kernels/ptx.cuh"

/* epmoei_f32_to_e4m3. */
__device__ __forceinline__ uint32_t epmoei_e4m3_code(float value)
{
    const uint32_t bits = __float_as_uint(value), magnitude = bits & 0x7FFFFFFFu;
    const uint32_t normal = ((magnitude + 0x7FFFFu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
    const uint32_t tiny = __float_as_uint(__uint_as_float(magnitude) + 0x1p14f) - 0x46800000u;
    uint32_t code = magnitude < 0x3C800000u ? tiny : normal;
    code = magnitude >= 0x43E00000u ? 0x7Eu : code;
    return magnitude > 0x7F800000u ? 0x7Fu : code | (bits >> 24 & 0x80u);
}

/* Two codes, `low` in the lower byte. */
__device__ __forceinline__ uint32_t epmoei_e4m3_codes(float low, float high)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    return ptx_cvt_e4m3x2(high, low);
#else
    return epmoei_e4m3_code(low) | epmoei_e4m3_code(high) << 8;
#endif
}

/* The scale for this amax; scale_ub NULL = none. */
__device__ __forceinline__ float epmoei_e4m3_scale_device(float amax, const float *scale_ub, bool pow2)
{
    if (scale_ub && amax > *scale_ub) amax = *scale_ub;
    amax = amax < 0x1.fffffep127f ? amax : 0x1.fffffep127f;
    if (!pow2) {
        const float scale = __fdiv_rn(amax, 448.0f);
        return scale > 0x1p-126f ? scale : 0x1p-126f;
    }
    /* The quotient of a float and 448 is a power of two in double precision only where it is one. */
    const double exact = __ddiv_rn((double)amax, 448.0);
    const long long bits = __double_as_longlong(exact > 0x1p-126 ? exact : 0x1p-126);
    const int exponent = (int)(bits >> 52) - 1023 + ((bits & 0xFFFFFFFFFFFFFll) != 0);
    return __uint_as_float((uint32_t)(exponent + 127) << 23);
}

/* x / scale as IEEE 754 rounds it, for many x. Where all quotients have one code, 0 or +-448, the quotient may
 * be off in its last bits. */
struct epmoei_divisor_t {
    float scale;
    float inverse; /* 0: the scale is so small or large that remainders would lose bits */
};

__device__ __forceinline__ epmoei_divisor_t epmoei_divisor(float scale)
{
    const bool moderate = scale > 0x1p-80f && scale < 0x1p80f;
    return epmoei_divisor_t{scale, moderate ? __frcp_rn(scale) : 0.0f};
}

__device__ __forceinline__ float epmoei_divide(float x, epmoei_divisor_t by)
{
    if (by.inverse == 0.0f) return __fdiv_rn(x, by.scale);
    /* Markstein: after the first step the quotient is one of the two nearest, after the second it is rounded. Small
     * ones, which would lose the sign of a zero, and large ones, for which remainders could overflow, all have one
     * code. */
    const float estimate = x * by.inverse;
    float quotient = fmaf(fmaf(-estimate, by.scale, x), by.inverse, estimate);
    quotient = fmaf(fmaf(-quotient, by.scale, x), by.inverse, quotient);
    const float magnitude = fabsf(estimate);
    return magnitude > 0x1p-12f && magnitude < 1024.0f ? quotient : estimate;
}

#endif
