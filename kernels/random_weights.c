#include "kernels/random_weights.h"

#include "base/dtype.h"

#include <math.h>

/* An avalanche of 32 bits: multiply and xor-shift with constants of low bias. */
static inline uint32_t mix32(uint32_t x)
{
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ (x >> 16);
}

static uint64_t mix64(uint64_t z)
{
    z += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

float epmoei_random_scale(epmoei_random_tensor_t tensor, int64_t columns)
{
    switch (tensor) {
    case EPMOEI_RANDOM_ROUTER_BIAS:
    case EPMOEI_RANDOM_GATE_BIAS:
    case EPMOEI_RANDOM_UP_BIAS:
    case EPMOEI_RANDOM_DOWN_BIAS: return 0.1f;
    case EPMOEI_RANDOM_SELECTION_BIAS: return 0.02f;
    default: return (float)(1.0 / sqrt((double)columns));
    }
}

/* Four 16-bit uniforms: an integer of mean 0 and standard deviation sqrt(4 * (2^32 - 1) / 12). */
#define BELL_DEVIATION 37837.2270

static inline int32_t bell(uint32_t index, uint32_t key0, uint32_t key1)
{
    uint32_t a = mix32(index + key0);
    uint32_t b = mix32(a ^ key1);
    return (int32_t)((a & 0xFFFF) + (a >> 16) + (b & 0xFFFF) + (b >> 16)) - 2 * 0xFFFF;
}

enum { kPiece = 1024 };

void epmoei_random_fill(void *dst, epmoe_dtype_t dtype, uint64_t seed, epmoei_random_tensor_t tensor, int32_t expert,
                        int64_t first, int64_t count, float scale)
{
    uint64_t key = mix64(mix64(mix64(seed) ^ (uint64_t)tensor) ^ (uint64_t)(uint32_t)expert);
    float unit = (float)(scale / BELL_DEVIATION);
    int64_t size = epmoe_dtype_size(dtype);
    for (int64_t done = 0; done < count;) {
        /* A piece never crosses a multiple of 2^32, where the key changes. */
        int64_t index = first + done;
        uint64_t piece_key = key + (uint64_t)(index >> 32) * 0x9E3779B97F4A7C15u;
        int64_t n = epmoei_min64(epmoei_min64(kPiece, count - done), ((index >> 32) + 1) * ((int64_t)1 << 32) - index);
        uint32_t base = (uint32_t)index, key0 = (uint32_t)piece_key, key1 = (uint32_t)(piece_key >> 32);
        float values[kPiece];
        for (int32_t i = 0; i < (int32_t)n; i++) values[i] = (float)bell(base + (uint32_t)i, key0, key1) * unit;
        epmoei_from_f32((char *)dst + done * size, values, dtype, n);
        done += n;
    }
}
