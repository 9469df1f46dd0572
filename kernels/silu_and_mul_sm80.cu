#include "kernels/launch_cuda.cuh"
#include "kernels/silu_and_mul_cuda.cuh"

static const int kRun = EPMOEI_SILU_RUN;

/* y may be x: a thread writes only what it alone has read before. */
template <typename T, int kCount>
static __global__ void __launch_bounds__(256) silu_and_mul_kernel(const epmoe_silu_and_mul_args_t args)
{
    const int64_t col = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * kCount;
    epmoei_begin_dependent();
    if (col >= args.width) return;
    for (int64_t row = blockIdx.y; row < args.num_tokens; row += gridDim.y) {
        float y[kCount];
        epmoei_silu_run<T>(y, args, row, col);
        epmoei_store_run((T *)args.y + row * args.y_stride + col, y);
    }
}

template <typename T> static epmoe_status_t launch(const epmoe_silu_and_mul_args_t *args, epmoe_stream_t stream)
{
    /* The up half starts at `width`: it is aligned only where the width is a multiple too. */
    int64_t granule = 16 / (int64_t)sizeof(T);
    bool aligned = args->width % kRun == 0 && args->x_stride % granule == 0 && args->y_stride % granule == 0;
    epmoei_row_grid_t grid = epmoei_row_grid(args->num_tokens, aligned ? args->width / kRun : args->width);
    const auto kernel = aligned ? silu_and_mul_kernel<T, kRun> : silu_and_mul_kernel<T, 1>;
    return epmoei_cuda_status((int32_t)epmoei_launch_dependent(kernel, grid.blocks, grid.threads, 0, stream, *args),
                              "epmoe_silu_and_mul");
}

extern "C" epmoe_status_t epmoei_silu_and_mul_sm80(const epmoe_silu_and_mul_args_t *args, epmoe_stream_t stream)
{
    EPMOEI_CHECK_ALIGNED(args->x, 16);
    EPMOEI_CHECK_ALIGNED(args->y, 16);
    EPMOEI_CHECK_ALIGNED(args->scale, 4);
    EPMOEI_CHECK_ALIGNED(args->static_scale, 4);
    if (args->quant) return epmoei_silu_and_mul_quant_sm80(args, stream);
    switch (args->dtype) {
    case EPMOE_BF16: return launch<__nv_bfloat16>(args, stream);
    case EPMOE_F16: return launch<__half>(args, stream);
    default: return launch<float>(args, stream);
    }
}
