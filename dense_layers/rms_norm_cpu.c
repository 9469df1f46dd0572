#include "base/fp8.h"
#include "dense_layers/dense_check.h"
#include "dense_layers/rms_norm.h"
#include "dense_layers/square_sum.h"
#include "kernels/row_blocks.h"

#define SCALE_COLS 128

/* values = columns [first, first + cols) of the row that is squared and normalised. */
static void load_sum(const epmoe_rms_norm_args_t *args, int64_t t, int64_t first, int64_t cols, float *values)
{
    const void *from = args->residual ? epmoei_at(args->residual, args->dtype, t * args->residual_stride + first)
                                      : epmoei_at(args->x, args->dtype, t * args->x_stride + first);
    epmoei_to_f32(values, from, args->dtype, cols);
}

static void add_residual(const epmoe_rms_norm_args_t *args, int64_t t, int64_t first, int64_t cols)
{
    float sum[EPMOEI_BLOCK_COLS], x[EPMOEI_BLOCK_COLS];
    void *residual = epmoei_at(args->residual, args->dtype, t * args->residual_stride + first);
    epmoei_to_f32(sum, residual, args->dtype, cols);
    epmoei_to_f32(x, epmoei_at(args->x, args->dtype, t * args->x_stride + first), args->dtype, cols);
#pragma omp simd
    for (int64_t i = 0; i < cols; i++) sum[i] += x[i];
    epmoei_from_f32(residual, sum, args->dtype, cols);
}

/* values = the normalised columns in fp32, not rounded yet. */
static void normalise(const epmoe_rms_norm_args_t *args, int64_t t, int64_t first, int64_t cols, float r, float *values)
{
    float w[EPMOEI_BLOCK_COLS], offset = args->weight_offset ? 1.0f : 0.0f;
    load_sum(args, t, first, cols, values);
    epmoei_to_f32(w, epmoei_at(args->weight, args->weight_dtype, first), args->weight_dtype, cols);
#pragma omp simd
    for (int64_t i = 0; i < cols; i++) values[i] = values[i] * r * (w[i] + offset);
}

static void round_block(float *values, epmoe_dtype_t dtype, int64_t cols)
{
    uint16_t rounded[EPMOEI_BLOCK_COLS];
    if (dtype == EPMOE_F32) return;
    epmoei_from_f32(rounded, values, dtype, cols);
    epmoei_to_f32(values, rounded, dtype, cols);
}

static float block_amax(const float *values, int64_t cols)
{
    float amax = 0;
#pragma omp simd reduction(max : amax)
    for (int64_t i = 0; i < cols; i++) amax = epmoei_amax(amax, values[i]);
    return amax;
}

static void encode(uint8_t *codes, const float *values, int64_t cols, float scale)
{
#pragma omp simd
    for (int64_t i = 0; i < cols; i++) codes[i] = epmoei_f32_to_e4m3(values[i] / scale);
}

/* A block of columns as E4M3. scale is the row's, or the row's first of BLOCK128. */
static void quantise(const epmoe_rms_norm_args_t *args, int64_t t, int64_t first, int64_t cols, float r, float *scale)
{
    float values[EPMOEI_BLOCK_COLS];
    uint8_t *codes = (uint8_t *)args->y + t * args->y_stride + first;
    normalise(args, t, first, cols, r, values);
    round_block(values, args->dtype, cols);
    if (args->quant != EPMOE_GRANULARITY_BLOCK128) {
        encode(codes, values, cols, epmoei_load(scale, EPMOE_F32, 0));
        return;
    }
    for (int64_t i = 0; i < cols; i += SCALE_COLS) {
        int64_t part = epmoei_min64(SCALE_COLS, cols - i);
        float own = epmoei_e4m3_scale(block_amax(values + i, part));
        epmoei_store(scale, EPMOE_F32, (first + i) / SCALE_COLS, own);
        encode(codes + i, values + i, part, own);
    }
}

static float row_scale(const epmoe_rms_norm_args_t *args, int64_t t, float r)
{
    float values[EPMOEI_BLOCK_COLS], amax = 0;
    for (int64_t first = 0; first < args->hidden; first += EPMOEI_BLOCK_COLS) {
        int64_t cols = epmoei_min64(EPMOEI_BLOCK_COLS, args->hidden - first);
        normalise(args, t, first, cols, r, values);
        round_block(values, args->dtype, cols);
        amax = epmoei_amax(amax, block_amax(values, cols));
    }
    return epmoei_e4m3_scale(amax);
}

static void norm_row(const epmoe_rms_norm_args_t *args, int64_t t)
{
    float values[EPMOEI_BLOCK_COLS];
    epmoei_square_sum_t sum = {{0}};
    for (int64_t first = 0; first < args->hidden; first += EPMOEI_BLOCK_COLS) {
        int64_t cols = epmoei_min64(EPMOEI_BLOCK_COLS, args->hidden - first);
        if (args->residual) add_residual(args, t, first, cols);
        load_sum(args, t, first, cols, values);
        epmoei_square_sum_add(&sum, values, cols);
    }
    float r = epmoei_square_sum_rsqrt(&sum, args->hidden, args->eps);
    float *scale = args->scale ? args->scale + t * epmoei_rms_norm_scales(args) : NULL;
    float fixed = args->quant == EPMOE_GRANULARITY_TENSOR ? epmoei_load(args->static_scale, EPMOE_F32, 0) : 0;
    if (args->quant == EPMOE_GRANULARITY_TENSOR) scale = &fixed;
    if (args->quant == EPMOE_GRANULARITY_TOKEN) epmoei_store(scale, EPMOE_F32, 0, row_scale(args, t, r));
    for (int64_t first = 0; first < args->hidden; first += EPMOEI_BLOCK_COLS) {
        int64_t cols = epmoei_min64(EPMOEI_BLOCK_COLS, args->hidden - first);
        if (args->quant != 0) {
            quantise(args, t, first, cols, r, scale);
            continue;
        }
        normalise(args, t, first, cols, r, values);
        epmoei_from_f32(epmoei_at(args->y, args->y_dtype, t * args->y_stride + first), values, args->y_dtype, cols);
    }
}

epmoe_status_t epmoei_rms_norm_cpu(const epmoe_rms_norm_args_t *args, epmoe_stream_t stream)
{
    (void)stream;
    EPMOEI_CHECK(epmoei_check_scale("static_scale", args->static_scale));
    int64_t elements = (int64_t)args->num_tokens * args->hidden;
#pragma omp parallel for schedule(static) if (elements >= EPMOEI_MIN_PARALLEL_ELEMENTS)
    for (int32_t t = 0; t < args->num_tokens; t++) norm_row(args, t);
    return EPMOE_OK;
}
