#include "kernels/quantize_fp8.h"

#include "base/fp8.h"

/* Rows [t0,t1), columns [c0,c1) have one scale. */
static void quantize_part(const epmoe_quantize_fp8_args_t *args, int64_t t0, int64_t t1, int64_t c0, int64_t c1,
                          float *scale)
{
    uint8_t *q = args->q;
    float amax = 0;
    for (int64_t t = t0; t < t1; t++)
        for (int64_t c = c0; c < c1; c++)
            amax = epmoei_amax(amax, epmoei_load(args->x, args->dtype, t * args->x_stride + c));
    *scale = epmoei_quantize_fp8_scale(args, amax);
    for (int64_t t = t0; t < t1; t++)
        for (int64_t c = c0; c < c1; c++)
            q[t * args->hidden + c] =
                epmoei_f32_to_e4m3(epmoei_load(args->x, args->dtype, t * args->x_stride + c) / *scale);
}

epmoe_status_t epmoei_quantize_fp8_ref(const epmoe_quantize_fp8_args_t *args, epmoe_stream_t stream)
{
    (void)stream;
    int64_t tokens = args->num_tokens, hidden = args->hidden;
    bool tensor = args->granularity == EPMOE_GRANULARITY_TENSOR;
    int64_t rows = tensor ? tokens : 1;
    int64_t cols = args->granularity == EPMOE_GRANULARITY_BLOCK128 ? EPMOEI_FP8_COLUMNS : hidden;
    float *scale = args->scale;
    for (int64_t t = 0; t < tokens; t += rows)
        for (int64_t c = 0; c < hidden; c += cols)
            quantize_part(args, t, t + rows, c, epmoei_min64(c + cols, hidden), scale++);
    return EPMOE_OK;
}
