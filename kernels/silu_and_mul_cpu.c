#include "base/fp8.h"
#include "kernels/activation.h"
#include "kernels/row_blocks.h"
#include "kernels/row_max.h"
#include "kernels/silu_and_mul.h"

/* gate[i] = act(gate[i], up[i]); the activation is a constant in each loop, so that the loop has no branch. */
static void activate_block(const epmoe_silu_and_mul_args_t *args, float *gate, const float *up, int64_t cols)
{
    float alpha = args->alpha, limit = args->limit;
    switch (args->activation) {
    case EPMOE_ACTIVATION_GELU:
        for (int64_t i = 0; i < cols; i++)
            gate[i] = epmoei_activate(EPMOE_ACTIVATION_GELU, gate[i], up[i], alpha, limit);
        break;
    case EPMOE_ACTIVATION_GELU_TANH:
#pragma omp simd
        for (int64_t i = 0; i < cols; i++)
            gate[i] = epmoei_activate(EPMOE_ACTIVATION_GELU_TANH, gate[i], up[i], alpha, limit);
        break;
    case EPMOE_ACTIVATION_SWIGLU_OAI:
#pragma omp simd
        for (int64_t i = 0; i < cols; i++)
            gate[i] = epmoei_activate(EPMOE_ACTIVATION_SWIGLU_OAI, gate[i], up[i], alpha, limit);
        break;
    default:
#pragma omp simd
        for (int64_t i = 0; i < cols; i++)
            gate[i] = epmoei_activate(EPMOE_ACTIVATION_SILU, gate[i], up[i], alpha, limit);
    }
}

/* A block of a row in `gate`; `up` is scratch. */
static void make_block(const epmoe_silu_and_mul_args_t *args, epmoei_block_t block, float *gate, float *up)
{
    int64_t x = block.row * args->x_stride + block.first;
    epmoei_to_f32(gate, epmoei_at(args->x, args->dtype, x), args->dtype, block.cols);
    epmoei_to_f32(up, epmoei_at(args->x, args->dtype, x + args->width), args->dtype, block.cols);
    activate_block(args, gate, up, block.cols);
}

static void encode(uint8_t *codes, const float *values, int64_t n, float scale)
{
#pragma omp simd
    for (int64_t i = 0; i < n; i++) codes[i] = epmoei_f32_to_e4m3(values[i] / scale);
}

/* Of a row with one scale: its blocks are made twice, once for the scale, so that no row has to be kept. */
static float row_scale(const epmoe_silu_and_mul_args_t *args, int64_t t, float *gate, float *up)
{
    float amax = 0;
    int64_t per_row = epmoei_blocks_per_row(args->width);
    for (int64_t b = t * per_row; b < (t + 1) * per_row; b++) {
        epmoei_block_t block = epmoei_block(b, args->width);
        make_block(args, block, gate, up);
        for (int64_t i = 0; i < block.cols; i++) gate[i] = epmoei_round_to(gate[i], args->dtype);
        float most = epmoei_row_amax(gate, block.cols);
        amax = most > amax ? most : amax;
    }
    return args->scale[t] = epmoei_e4m3_scale(amax);
}

static void quantise_row(const epmoe_silu_and_mul_args_t *args, int64_t t)
{
    float gate[EPMOEI_BLOCK_COLS], up[EPMOEI_BLOCK_COLS];
    int64_t per_row = epmoei_blocks_per_row(args->width), groups = epmoei_ceil_div(args->width, 128);
    float scale = args->static_scale                       ? *args->static_scale
                  : args->quant == EPMOE_GRANULARITY_TOKEN ? row_scale(args, t, gate, up)
                                                           : 0;
    for (int64_t b = t * per_row; b < (t + 1) * per_row; b++) {
        epmoei_block_t block = epmoei_block(b, args->width);
        uint8_t *codes = (uint8_t *)args->y + t * args->y_stride + block.first;
        make_block(args, block, gate, up);
        for (int64_t i = 0; i < block.cols; i++) gate[i] = epmoei_round_to(gate[i], args->dtype);
        if (args->quant != EPMOE_GRANULARITY_BLOCK128) {
            encode(codes, gate, block.cols, scale);
            continue;
        }
        for (int64_t i = 0; i < block.cols; i += 128) {
            int64_t n = epmoei_min64(128, block.cols - i);
            scale = epmoei_e4m3_scale(epmoei_row_amax(gate + i, n));
            args->scale[t * groups + (block.first + i) / 128] = scale;
            encode(codes + i, gate + i, n, scale);
        }
    }
}

epmoe_status_t epmoei_silu_and_mul_cpu(const epmoe_silu_and_mul_args_t *args, epmoe_stream_t stream)
{
    (void)stream;
    int64_t width = args->width, num_blocks = args->num_tokens * epmoei_blocks_per_row(width);
    bool large = args->num_tokens * width >= EPMOEI_MIN_PARALLEL_ELEMENTS / 4;
    EPMOEI_CHECK(epmoei_silu_and_mul_check_values(args));
    if (args->quant) {
#pragma omp parallel for schedule(static) if (large)
        for (int64_t t = 0; t < args->num_tokens; t++) quantise_row(args, t);
        return EPMOE_OK;
    }
#pragma omp parallel for schedule(static) if (large)
    for (int64_t b = 0; b < num_blocks; b++) {
        float gate[EPMOEI_BLOCK_COLS], up[EPMOEI_BLOCK_COLS];
        epmoei_block_t block = epmoei_block(b, width);
        make_block(args, block, gate, up);
        epmoei_from_f32(epmoei_at(args->y, args->dtype, block.row * args->y_stride + block.first), gate, args->dtype,
                        block.cols);
    }
    return EPMOE_OK;
}
