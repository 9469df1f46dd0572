#include "comm/ep_wire.h"

#include "base/fp8.h"

#include <string.h>

#define PARALLEL_ELEMENTS 16384 /* below this, several threads cost more than they bring */

enum { COLUMNS = EPMOEI_FP8_COLUMNS };

/* The codes of `num` values, and their scale. */
static float encode(const float *values, int64_t num, uint8_t *codes)
{
    float amax = 0;
#pragma omp simd reduction(max : amax)
    for (int64_t i = 0; i < num; i++) {
        float magnitude = epmoei_amax(0, values[i]);
        amax = magnitude > amax ? magnitude : amax;
    }
    float scale = epmoei_e4m3_scale(amax);
#pragma omp simd
    for (int64_t i = 0; i < num; i++) codes[i] = epmoei_f32_to_e4m3(values[i] / scale);
    return scale;
}

static void decode(float *values, const uint8_t *codes, int64_t num, float scale)
{
#pragma omp simd
    for (int64_t i = 0; i < num; i++) values[i] = epmoei_e4m3_to_f32(codes[i]) * scale;
}

epmoe_status_t epmoei_encode_rows_cpu(const epmoei_encode_rows_t *args)
{
    int64_t d = args->hidden, blocks = epmoei_coded_blocks(d), size = epmoe_dtype_size(args->dtype);
    size_t codes_padding = (size_t)(epmoei_coded_codes_bytes(d) - d);
    size_t scales_padding = (size_t)(epmoei_coded_scales_bytes(d) - 4 * blocks);
#pragma omp parallel for schedule(static) if (args->num_rows * d > PARALLEL_ELEMENTS)
    for (int64_t i = 0; i < args->num_rows; i++) {
        int64_t row = args->index[i + (i < args->gap_at ? 0 : args->gap)];
        uint8_t *codes = args->dst.codes + i * args->dst.codes_stride;
        float *scales = args->dst.scales + i * args->dst.scales_stride;
        for (int64_t b = 0; b < blocks; b++) {
            float values[COLUMNS];
            int64_t first = b * COLUMNS, num = epmoei_min64(COLUMNS, d - first);
            epmoei_to_f32(values, (const char *)args->src + (row * d + first) * size, args->dtype, num);
            scales[b] = encode(values, num, codes + first);
        }
        memset(codes + d, 0, codes_padding);
        memset(scales + blocks, 0, scales_padding);
    }
    return EPMOE_OK;
}

epmoe_status_t epmoei_decode_rows_cpu(const epmoei_decode_rows_t *args)
{
    int64_t d = args->hidden, size = epmoe_dtype_size(args->dtype);
#pragma omp parallel for schedule(static) if (args->num_rows * d > PARALLEL_ELEMENTS)
    for (int64_t i = 0; i < args->num_rows; i++) {
        const uint8_t *codes = args->src.codes + i * args->src.codes_stride;
        const float *scales = args->src.scales + i * args->src.scales_stride;
        if (i >= args->gap_at && i < args->gap_at + args->gap) continue;
        for (int64_t first = 0; first < d; first += COLUMNS) {
            float values[COLUMNS];
            int64_t num = epmoei_min64(COLUMNS, d - first);
            decode(values, codes + first, num, scales[first / COLUMNS]);
            epmoei_from_f32((char *)args->dst + (i * d + first) * size, values, args->dtype, num);
        }
    }
    return EPMOE_OK;
}

epmoe_status_t epmoei_round_rows_cpu(const epmoei_round_rows_t *args)
{
    int64_t d = args->hidden, size = epmoe_dtype_size(args->dtype);
#pragma omp parallel for schedule(static) if (args->num_rows * d > PARALLEL_ELEMENTS)
    for (int64_t i = 0; i < args->num_rows; i++) {
        int64_t row = args->index ? args->index[i] : i;
        for (int64_t first = 0; first < d; first += COLUMNS) {
            float values[COLUMNS];
            uint8_t codes[COLUMNS];
            int64_t num = epmoei_min64(COLUMNS, d - first);
            epmoei_to_f32(values, (const char *)args->src + (row * d + first) * size, args->dtype, num);
            float scale = encode(values, num, codes);
            decode(values, codes, num, scale);
            epmoei_from_f32((char *)args->dst + (i * d + first) * size, values, args->dtype, num);
        }
    }
    return EPMOE_OK;
}

epmoe_status_t epmoei_encode_rows(epmoe_backend_t backend, const epmoei_encode_rows_t *args, epmoe_stream_t stream)
{
#if EPMOE_HAVE_CUDA
    if (backend == EPMOE_BACKEND_CUDA) return epmoei_encode_rows_sm80(args, stream);
#endif
    (void)backend, (void)stream;
    return epmoei_encode_rows_cpu(args);
}

epmoe_status_t epmoei_decode_rows(epmoe_backend_t backend, const epmoei_decode_rows_t *args, epmoe_stream_t stream)
{
#if EPMOE_HAVE_CUDA
    if (backend == EPMOE_BACKEND_CUDA) return epmoei_decode_rows_sm80(args, stream);
#endif
    (void)backend, (void)stream;
    return epmoei_decode_rows_cpu(args);
}

epmoe_status_t epmoei_round_rows(epmoe_backend_t backend, const epmoei_round_rows_t *args, epmoe_stream_t stream)
{
#if EPMOE_HAVE_CUDA
    if (backend == EPMOE_BACKEND_CUDA) return epmoei_round_rows_sm80(args, stream);
#endif
    (void)backend, (void)stream;
    return epmoei_round_rows_cpu(args);
}
