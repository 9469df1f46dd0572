#include "tests/checkcuda/check_fp8.h"

#include "base/dtype.h"
#include "tests/e4m3_oracle.h"

#include <math.h>

void check_fp8_weight(testing_rng_t *rng, uint8_t *codes, int64_t count, void *scales, epmoe_dtype_t dtype,
                      int64_t num_scales, int32_t k)
{
    enum { kDrawn = 65521 };
    static uint8_t drawn[kDrawn];
    for (int32_t i = 0; i < kDrawn; i++) drawn[i] = e4m3_nearest(64.0 * (double)testing_normal(rng));
    for (int64_t i = 0; i < count; i++) codes[i] = drawn[i % kDrawn];
    float unit = 1.0f / (64.0f * sqrtf((float)k));
    for (int64_t i = 0; i < num_scales; i++) {
        float scale = unit * testing_uniform(rng, 0.5f, 2.0f);
        if (dtype == EPMOE_F8_E8M0)
            ((uint8_t *)scales)[i] = (uint8_t)(127 + (int)lrintf(log2f(unit)) + testing_range(rng, -1, 1));
        else
            epmoei_store(scales, dtype, i, scale);
    }
}

int64_t check_fp8_scales(int32_t group_size, int32_t group_rows, int64_t rows, int64_t cols, bool packed)
{
    int64_t group = group_size == 0 ? 128 : group_size == -1 ? INT32_MAX : group_size;
    int64_t high = group_rows == 0 ? group : group_rows == -1 ? INT32_MAX : group_rows;
    int64_t blocks = packed ? 2 * ((rows / 2 + high - 1) / high) : (rows + high - 1) / high;
    return blocks * ((cols + group - 1) / group);
}
