#include "kernels/random_weights.h"

#include "base/dtype.h"
#include "kernels/random_weights_bits.h"

#include <math.h>

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

uint64_t epmoei_random_key(uint64_t seed, epmoei_random_tensor_t tensor, int32_t expert)
{
    return mix64(mix64(mix64(seed) ^ (uint64_t)tensor) ^ (uint64_t)(uint32_t)expert);
}

float epmoei_random_unit(float scale) { return (float)((double)scale / EPMOEI_BELL_DEVIATION); }

enum { kPiece = 1024 };

void epmoei_random_fill(void *dst, epmoe_dtype_t dtype, uint64_t seed, epmoei_random_tensor_t tensor, int32_t expert,
                        int64_t first, int64_t count, float scale)
{
    uint64_t key = epmoei_random_key(seed, tensor, expert);
    float unit = epmoei_random_unit(scale);
    int64_t size = epmoe_dtype_size(dtype);
    for (int64_t done = 0; done < count; done += kPiece) {
        int32_t n = (int32_t)epmoei_min64(kPiece, count - done);
        float values[kPiece];
        for (int32_t i = 0; i < n; i++) values[i] = (float)epmoei_bell(first + done + i, key) * unit;
        epmoei_from_f32((char *)dst + done * size, values, dtype, n);
    }
}
