/* E4M3 on devices, with the bits of base/fp8.h and kernels/quantize_fp8.c: codes, scales, and quotients that are about
 * to become codes. */
#ifndef EPMOEI_FP8_CUDA_CUH
#define EPMOEI_FP8_CUDA_CUH

#include "kernels/cuda_common.cuh"
#include "kernels/ptx.cuh"

/* epmoei_f32_to_e4m3. */
__device__ __forceinline__ uint32_t epmoei_to_e4m3(float value)
{
    const uint32_t bits = __float_as_uint(value), magnitude = bits & 0x7FFFFFFFu;
    /* Exponent bias 127 becomes 7; a carry out of the mantissa is the next exponent. */
    const uint32_t normal = ((magnitude + 0x7FFFFu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
    /* Below 2^-6: next to 2^14 a float's last bit is 2^-9, so that the addition itself rounds. */
    const uint32_t tiny = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), 16384.0f)) - 0x46800000u;
    uint32_t code = magnitude < 0x3C800000u ? tiny : normal;
    code = magnitude >= 0x43E00000u ? 0x7Eu : code;
    code |= (bits >> 24) & 0x80u;
    return magnitude > 0x7F800000u ? 0x7Fu : code;
}

__device__ __forceinline__ uint32_t epmoei_to_e4m3x2(float low, float high)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    return ptx_e4m3x2(low, high);
#else
    return epmoei_to_e4m3(low) | epmoei_to_e4m3(high) << 8;
#endif
}

/* The two codes in the low 16 bits as fp16, exactly; 0x7F and 0xFF are NaN. */
__device__ __forceinline__ uint32_t epmoei_e4m3x2_to_f16x2(uint32_t codes)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    return ptx_f16x2_of_e4m3x2(codes);
#else
    const uint32_t spread = (codes & 0xFFu) | (codes & 0xFF00u) << 8;
    /* As fp16 the shifted codes are 2^-8 of the values, subnormals included. */
    const uint32_t small = (spread & 0x00800080u) << 8 | (spread & 0x007F007Fu) << 7;
    const uint32_t nan = __vcmpeq2(spread & 0x007F007Fu, 0x007F007Fu) & 0x7E007E00u;
    __half2 pair;
    memcpy(&pair, &small, 4);
    pair = __hmul2(pair, __float2half2_rn(256.0f));
    uint32_t word;
    memcpy(&word, &pair, 4);
    return word | nan;
#endif
}

/* The largest value of a block's threads, for each of them; may be called again at once. */
template <int kThreads> __device__ __forceinline__ float epmoei_block_max(float value)
{
    __shared__ float warp_max[kThreads / 32];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, step));
    __syncthreads();
    if (threadIdx.x % 32 == 0) warp_max[threadIdx.x / 32] = value;
    __syncthreads();
    value = warp_max[0];
#pragma unroll
    for (int i = 1; i < kThreads / 32; i++) value = fmaxf(value, warp_max[i]);
    return value;
}

/* One code at any address, or 4 or 8 at an address aligned to as many bytes. */
template <int kCount> __device__ __forceinline__ void epmoei_store_e4m3(uint8_t *codes, const float (&values)[kCount])
{
    static_assert(kCount == 1 || kCount == 4 || kCount == 8, "one store");
    if constexpr (kCount == 1)
        *codes = (uint8_t)epmoei_to_e4m3(values[0]);
    else {
        uint32_t words[kCount / 4];
#pragma unroll
        for (int i = 0; i < kCount / 4; i++)
            words[i] = epmoei_to_e4m3x2(values[4 * i], values[4 * i + 1]) |
                       epmoei_to_e4m3x2(values[4 * i + 2], values[4 * i + 3]) << 16;
        if constexpr (kCount == 4)
            *(uint32_t *)codes = words[0];
        else
            *(uint2 *)codes = make_uint2(words[0], words[1]);
    }
}

/* epmoei_e4m3_scale of an amax that is no NaN. */
__device__ __forceinline__ float epmoei_scale_of_amax(float amax)
{
    return fmaxf(__fdiv_rn(fminf(amax, 3.402823466e38f), 448.0f), 1.175494351e-38f);
}

/* The next power of two. The quotient of a float and 448 is one in double precision only where it is one. */
__device__ __forceinline__ float epmoei_pow2_scale_of_amax(float amax)
{
    const double exact = __ddiv_rn((double)fminf(amax, 3.402823466e38f), 448.0);
    const long long bits = __double_as_longlong(exact > 0x1p-126 ? exact : 0x1p-126);
    const int exponent = (int)(bits >> 52) - 1023 + ((bits & 0xFFFFFFFFFFFFFll) != 0);
    return __uint_as_float((uint32_t)(exponent + 127) << 23);
}

/* A divisor of many values, which are multiplied by `factor` first: value * factor lies between 2^-60 and 2^60, where
 * no remainder of a quotient underflows that has a code above 0. */
struct epmoei_divisor_t {
    float factor; /* mostly 1 */
    float value;
    float inverse;
};

__device__ __forceinline__ epmoei_divisor_t epmoei_divisor(float value)
{
    const float magnitude = fabsf(value);
    epmoei_divisor_t divisor;
    divisor.factor = magnitude < 0x1p-60f ? 0x1p100f : magnitude > 0x1p60f ? 0x1p-100f : 1.0f;
    divisor.value = __fmul_rn(value, divisor.factor);
    divisor.inverse = __frcp_rn(divisor.value);
    return divisor;
}

/* values[i] / divisor, rounded as IEEE 754 says wherever the E4M3 code depends on it. A quotient from the rounded
 * inverse is at most two bits off; two steps with exact remainders make it the nearest (Markstein 1990), for half the
 * instructions of a division. The remainder is that of the negated value, so that a quotient of -0 keeps its sign.
 * kBounded: no quotient exceeds 1024, nor is a value infinite where the factor is 1. */
template <bool kBounded, int kCount>
__device__ __forceinline__ void epmoei_divide_run(float (&values)[kCount], const epmoei_divisor_t &divisor)
{
    if (divisor.factor != 1.0f) {
#pragma unroll
        for (int i = 0; i < kCount; i++) {
            const float scaled = __fmul_rn(values[i], divisor.factor);
            /* An infinity saturates, but has no remainder. */
            values[i] = isinf(scaled) ? copysignf(1024.0f * divisor.value, scaled) : scaled;
        }
    }
#pragma unroll
    for (int i = 0; i < kCount; i++) {
        const float first = __fmul_rn(values[i], divisor.inverse);
        float quotient = first;
#pragma unroll
        for (int step = 0; step < 2; step++)
            quotient = __fmaf_rn(__fmaf_rn(quotient, divisor.value, -values[i]), -divisor.inverse, quotient);
        values[i] = kBounded || fabsf(first) < 1024.0f ? quotient : first;
    }
}

#endif
