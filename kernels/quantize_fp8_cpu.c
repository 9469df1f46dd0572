#include "kernels/quantize_fp8.h"

#include "base/fp8.h"
#include "kernels/row_max.h"

enum { kStrip = 512 }; /* columns widened at a time */

static const void *row_of(const epmoe_quantize_fp8_args_t *args, int64_t t, int64_t c)
{
    return (const char *)args->x + (t * args->x_stride + c) * epmoe_dtype_size(args->dtype);
}

static float amax_of(const epmoe_quantize_fp8_args_t *args, int64_t t, int64_t first, int64_t end)
{
    float strip[kStrip], amax = 0;
    for (int64_t c = first; c < end; c += kStrip) {
        int64_t count = epmoei_min64(kStrip, end - c);
        epmoei_to_f32(strip, row_of(args, t, c), args->dtype, count);
        float most = epmoei_row_amax(strip, count);
        amax = most > amax ? most : amax;
    }
    return amax;
}

static void quantize(const epmoe_quantize_fp8_args_t *args, int64_t t, int64_t first, int64_t end, float scale)
{
    float strip[kStrip];
    for (int64_t c = first; c < end; c += kStrip) {
        int64_t count = epmoei_min64(kStrip, end - c);
        uint8_t *q = (uint8_t *)args->q + t * args->hidden + c;
        epmoei_to_f32(strip, row_of(args, t, c), args->dtype, count);
#pragma omp simd
        for (int64_t i = 0; i < count; i++) q[i] = epmoei_f32_to_e4m3(strip[i] / scale);
    }
}

epmoe_status_t epmoei_quantize_fp8_cpu(const epmoe_quantize_fp8_args_t *args, epmoe_stream_t stream)
{
    (void)stream;
    int64_t tokens = args->num_tokens, hidden = args->hidden;
    if (args->granularity == EPMOE_GRANULARITY_TENSOR) {
        float amax = 0;
        if (!args->static_scale) {
#pragma omp parallel for schedule(static) reduction(max : amax)
            for (int64_t t = 0; t < tokens; t++) {
                float row = amax_of(args, t, 0, hidden);
                amax = row > amax ? row : amax;
            }
        }
        float scale = epmoei_quantize_fp8_scale(args, amax);
#pragma omp parallel for schedule(static)
        for (int64_t t = 0; t < tokens; t++) quantize(args, t, 0, hidden, scale);
        *args->scale = scale;
        return EPMOE_OK;
    }
    int64_t cols = args->granularity == EPMOE_GRANULARITY_BLOCK128 ? EPMOEI_FP8_COLUMNS : hidden;
    int64_t parts = epmoei_ceil_div(hidden, cols);
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t p = 0; p < parts; p++) {
            int64_t first = p * cols, end = epmoei_min64(first + cols, hidden);
            float scale = epmoei_quantize_fp8_scale(args, amax_of(args, t, first, end));
            args->scale[t * parts + p] = scale;
            quantize(args, t, first, end, scale);
        }
    return EPMOE_OK;
}
