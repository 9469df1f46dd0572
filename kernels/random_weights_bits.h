/* The generator's integers, the same on the host and on the device. */
#ifndef EPMOEI_RANDOM_WEIGHTS_BITS_H
#define EPMOEI_RANDOM_WEIGHTS_BITS_H

#include <stdint.h>

#ifdef __CUDACC__
#define EPMOEI_HOST_DEVICE __host__ __device__
#else
#define EPMOEI_HOST_DEVICE
#endif

/* An avalanche of 32 bits: multiply and xor-shift with constants of low bias. */
static inline EPMOEI_HOST_DEVICE uint32_t epmoei_mix32(uint32_t x)
{
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ (x >> 16);
}

/* Element `index` under `key`: four 16-bit uniforms, an integer of mean 0. The key changes every 2^32 elements. */
static inline EPMOEI_HOST_DEVICE int32_t epmoei_bell(int64_t index, uint64_t key)
{
    uint64_t piece_key = key + (uint64_t)(index >> 32) * 0x9E3779B97F4A7C15u;
    uint32_t a = epmoei_mix32((uint32_t)index + (uint32_t)piece_key);
    uint32_t b = epmoei_mix32(a ^ (uint32_t)(piece_key >> 32));
    return (int32_t)((a & 0xFFFF) + (a >> 16) + (b & 0xFFFF) + (b >> 16)) - 2 * 0xFFFF;
}

/* Its standard deviation: sqrt(4 * (2^32 - 1) / 12). */
#define EPMOEI_BELL_DEVIATION 37837.2270

#endif
