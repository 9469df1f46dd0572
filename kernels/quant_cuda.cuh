/* Codes of quantised weights to pairs of bf16 or fp16 in registers, exactly. A pair's lower half is the lower column.
 * The layouts stand at kernels/grouped_gemm_quant.h. */
#ifndef EPMOEI_QUANT_CUDA_CUH
#define EPMOEI_QUANT_CUDA_CUH

#include "kernels/cuda_common.cuh"
#include "kernels/ptx.cuh"

/* Pairs as 32 bits. */
__device__ __forceinline__ uint32_t quant_mul2(uint32_t a, uint32_t b, __nv_bfloat16)
{
    __nv_bfloat162 r = __hmul2(*(__nv_bfloat162 *)&a, *(__nv_bfloat162 *)&b);
    return *(uint32_t *)&r;
}
__device__ __forceinline__ uint32_t quant_mul2(uint32_t a, uint32_t b, __half)
{
    __half2 r = __hmul2(*(__half2 *)&a, *(__half2 *)&b);
    return *(uint32_t *)&r;
}
__device__ __forceinline__ uint32_t quant_sub2(uint32_t a, uint32_t b, __nv_bfloat16)
{
    __nv_bfloat162 r = __hsub2(*(__nv_bfloat162 *)&a, *(__nv_bfloat162 *)&b);
    return *(uint32_t *)&r;
}
__device__ __forceinline__ uint32_t quant_sub2(uint32_t a, uint32_t b, __half)
{
    __half2 r = __hsub2(*(__half2 *)&a, *(__half2 *)&b);
    return *(uint32_t *)&r;
}

/* a b + c, rounded once. */
__device__ __forceinline__ uint32_t quant_fma2(uint32_t a, uint32_t b, uint32_t c, __nv_bfloat16)
{
    __nv_bfloat162 r = __hfma2(*(__nv_bfloat162 *)&a, *(__nv_bfloat162 *)&b, *(__nv_bfloat162 *)&c);
    return *(uint32_t *)&r;
}

/* What the bits of a type are put into, and what they are then short of. */
template <typename T> struct quant_type;
template <> struct quant_type<__nv_bfloat16> {
    static constexpr uint32_t kW4Base = 0x43004300u;      /* 128: the four lowest bits of the mantissa count ones */
    static constexpr uint32_t kMxfp4Factor = 0x7E807E80u; /* 2^126 */
    static constexpr int kE4m3Shift = 4;                  /* from the upper byte of 16 bits */
    static constexpr uint32_t kE4m3Mask = 0x07F007F0u;
    static constexpr uint32_t kE4m3Factor = 0x7B807B80u; /* 2^120 */
};
template <> struct quant_type<__half> {
    static constexpr uint32_t kW4Base = 0x64006400u;      /* 1024 */
    static constexpr uint32_t kMxfp4Factor = 0x74007400u; /* 2^14 */
    static constexpr int kE4m3Shift = 1;
    static constexpr uint32_t kE4m3Mask = 0x3F803F80u;
    static constexpr uint32_t kE4m3Factor = 0x5C005C00u; /* 2^8 */
};

/* A zero point 0..15 as quant_w4_fragment wants it. */
template <typename T> __device__ __forceinline__ uint32_t quant_w4_zero(uint32_t zero)
{
    return zero * 0x00010001u | quant_type<T>::kW4Base;
}

/* A word of W4 to operand A of m16n8k16: code - zero. zeros[0] of row lane/4, zeros[1] of row lane/4 + 8. */
template <typename T>
__device__ __forceinline__ void quant_w4_fragment(uint32_t (&a)[4], uint32_t word, const uint32_t (&zeros)[2])
{
#pragma unroll
    for (int j = 0; j < 4; j++)
        a[j] = quant_sub2(ptx_and_or(word >> (4 * j), 0x000F000Fu, quant_type<T>::kW4Base), zeros[j & 1], T());
}

/* A word of MXFP4 to operand A of m16n8k16 as bf16: 2^-126 times the code's value, so some of them subnormal. */
__device__ __forceinline__ void quant_mxfp4_bits(uint32_t (&a)[4], uint32_t word)
{
    constexpr uint32_t kMask = 0x81C081C0u;
    a[0] = word << 6 & kMask;
    a[1] = word << 2 & kMask;
    a[2] = __funnelshift_r(word, word, 4) & kMask;
    a[3] = (word & 0x81808180u) | (word >> 8 & 0x00400040u);
}

/* A word of MXFP4 to operand A of m16n8k16: the code's value, without the scale. */
template <typename T> __device__ __forceinline__ void quant_mxfp4_fragment(uint32_t (&a)[4], uint32_t word)
{
    quant_mxfp4_bits(a, word);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        /* fp16's exponent and mantissa meet three bits further up. */
        if (sizeof(T) == 2 && quant_type<T>::kMxfp4Factor == 0x74007400u)
            a[j] = (a[j] & 0x80008000u) | (a[j] << 3 & 0x0E000E00u);
        a[j] = quant_mul2(a[j], quant_type<T>::kMxfp4Factor, T());
    }
}

/* Four E4M3 codes, bytes 0..3 of `word`, to the pairs (byte 0, byte 2) and (byte 1, byte 3). The two NaN codes become
 * +-480: who multiplies them looks for them by quant_e4m3_nan. */
template <typename T> __device__ __forceinline__ void quant_e4m3_pairs(uint32_t (&pair)[2], uint32_t word)
{
    using Q = quant_type<T>;
    uint32_t low = (word << 8 & 0x80008000u) | (word << (8 - Q::kE4m3Shift) & Q::kE4m3Mask);
    uint32_t high = (word & 0x80008000u) | (word >> Q::kE4m3Shift & Q::kE4m3Mask);
    pair[0] = quant_mul2(low, Q::kE4m3Factor, T());
    pair[1] = quant_mul2(high, Q::kE4m3Factor, T());
}

/* Not 0 if a byte of `word` is one of E4M3's NaN codes, 0x7F and 0xFF. */
__device__ __forceinline__ uint32_t quant_e4m3_nan(uint32_t word)
{
    return ((word & 0x7F7F7F7Fu) + 0x01010101u) & 0x80808080u;
}

/* A scale of any type. */
__device__ __forceinline__ float quant_scale(uint32_t bits, epmoe_dtype_t dtype)
{
    switch (dtype) {
    case EPMOE_F32: return __uint_as_float(bits);
    case EPMOE_BF16: return __uint_as_float(bits << 16);
    case EPMOE_F16: return __half2float(__ushort_as_half((unsigned short)bits));
    default: /* E8M0: 2^(code - 127), 2^-127 subnormal, 255 a NaN */
        return __uint_as_float(bits == 255 ? 0x7FC00000u : bits ? bits << 23 : 0x00400000u);
    }
}

#endif
