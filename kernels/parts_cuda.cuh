/* Parts: 16 bytes of a row in four registers, and their elements as fp32. */
#ifndef EPMOEI_PARTS_CUDA_CUH
#define EPMOEI_PARTS_CUDA_CUH

#include "kernels/cuda_common.cuh"

#include <string.h>

template <typename T> static constexpr int epmoei_part_size = 16 / (int)sizeof(T);

/* By whole words: elements of 16 bits would each take a register. */
__device__ __forceinline__ void epmoei_unpack_pair(float &low, float &high, uint32_t word, __nv_bfloat16)
{
    low = __uint_as_float(word << 16);
    high = __uint_as_float(word & 0xFFFF0000u);
}
__device__ __forceinline__ void epmoei_unpack_pair(float &low, float &high, uint32_t word, __half)
{
    __half2 pair;
    memcpy(&pair, &word, 4);
    const float2 both = __half22float2(pair);
    low = both.x, high = both.y;
}
__device__ __forceinline__ uint32_t epmoei_pack_pair(float low, float high, __nv_bfloat16)
{
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t word;
    memcpy(&word, &pair, 4);
    return word;
}
__device__ __forceinline__ uint32_t epmoei_pack_pair(float low, float high, __half)
{
    const __half2 pair = __floats2half2_rn(low, high);
    uint32_t word;
    memcpy(&word, &pair, 4);
    return word;
}

template <typename T>
__device__ __forceinline__ void epmoei_unpack_part(float (&values)[epmoei_part_size<T>], const uint4 &part)
{
    const uint32_t words[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (sizeof(T) == 4)
            values[i] = __uint_as_float(words[i]);
        else
            epmoei_unpack_pair(values[2 * i], values[2 * i + 1], words[i], T());
    }
}

template <typename T> __device__ __forceinline__ uint4 epmoei_pack_part(const float (&values)[epmoei_part_size<T>])
{
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (sizeof(T) == 4)
            words[i] = __float_as_uint(values[i]);
        else
            words[i] = epmoei_pack_pair(values[2 * i], values[2 * i + 1], T());
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

/* kCount consecutive elements, the first at an address aligned to 16 bytes, or to all of them where they are less. */
template <typename T, int kCount>
__device__ __forceinline__ void epmoei_load_floats_of(float (&values)[kCount], const T *from)
{
    if constexpr (kCount % epmoei_part_size<T> == 0) {
#pragma unroll
        for (int first = 0; first < kCount; first += epmoei_part_size<T>) {
            float part[epmoei_part_size<T>];
            epmoei_unpack_part<T>(part, *(const uint4 *)(from + first));
#pragma unroll
            for (int i = 0; i < epmoei_part_size<T>; i++) values[first + i] = part[i];
        }
    } else {
        struct alignas(kCount * sizeof(T)) run_t {
            T element[kCount];
        };
        const run_t run = *(const run_t *)from;
#pragma unroll
        for (int i = 0; i < kCount; i++) values[i] = epmoei_to_float(run.element[i]);
    }
}

/* The same from element `first` of an array of a dtype known at run time. */
template <int kCount>
__device__ __forceinline__ void epmoei_load_floats(float (&values)[kCount], const void *from, epmoe_dtype_t dtype,
                                                   int64_t first)
{
    switch (dtype) {
    case EPMOE_BF16: epmoei_load_floats_of(values, (const __nv_bfloat16 *)from + first); break;
    case EPMOE_F16: epmoei_load_floats_of(values, (const __half *)from + first); break;
    default: epmoei_load_floats_of(values, (const float *)from + first);
    }
}

__device__ __forceinline__ float epmoei_load_float(const void *from, epmoe_dtype_t dtype, int64_t i)
{
    float value[1];
    epmoei_load_floats(value, from, dtype, i);
    return value[0];
}

#endif
