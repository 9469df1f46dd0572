#include "kernels/activation.h"
#include "kernels/row_blocks.h"
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

epmoe_status_t epmoei_silu_and_mul_cpu(const epmoe_silu_and_mul_args_t *args, epmoe_stream_t stream)
{
    (void)stream;
    int64_t width = args->width, num_blocks = args->num_tokens * epmoei_blocks_per_row(width);
#pragma omp parallel for schedule(static) if (args->num_tokens * width >= EPMOEI_MIN_PARALLEL_ELEMENTS / 4)
    for (int64_t b = 0; b < num_blocks; b++) {
        epmoei_block_t block = epmoei_block(b, width);
        float gate[EPMOEI_BLOCK_COLS], up[EPMOEI_BLOCK_COLS];
        int64_t x = block.row * args->x_stride + block.first, y = block.row * args->y_stride + block.first;
        epmoei_to_f32(gate, epmoei_at(args->x, args->dtype, x), args->dtype, block.cols);
        epmoei_to_f32(up, epmoei_at(args->x, args->dtype, x + width), args->dtype, block.cols);
        activate_block(args, gate, up, block.cols);
        epmoei_from_f32(epmoei_at(args->y, args->dtype, y), gate, args->dtype, block.cols);
    }
    return EPMOE_OK;
}
