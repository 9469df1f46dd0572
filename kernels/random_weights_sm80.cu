#include "kernels/cuda_common.cuh"
#include "kernels/random_weights.h"
#include "kernels/random_weights_bits.h"

namespace
{

constexpr int kThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kThreads)
    random_kernel(T *dst, uint64_t key, int64_t count, int64_t cols, int64_t first_row, int64_t row_step, float unit)
{
    const int64_t step = (int64_t)gridDim.x * kThreads;
    for (int64_t i = (int64_t)blockIdx.x * kThreads + threadIdx.x; i < count; i += step)
        dst[(first_row + i / cols * row_step) * cols + i % cols] =
            epmoei_from_float<T>((float)epmoei_bell(i, key) * unit);
}

template <typename T>
void launch(void *dst, uint64_t key, int64_t rows, int64_t cols, int64_t first_row, int64_t row_step, float unit,
            epmoe_stream_t stream)
{
    int64_t blocks = epmoei_min64(epmoei_ceil_div(rows * cols, kThreads), 4096);
    random_kernel<T>
        <<<(unsigned)blocks, kThreads, 0, stream>>>((T *)dst, key, rows * cols, cols, first_row, row_step, unit);
}

} // namespace

extern "C" epmoe_status_t epmoei_random_fill_sm80(void *dst, epmoe_dtype_t dtype, uint64_t seed,
                                                  epmoei_random_tensor_t tensor, int32_t expert, int64_t rows,
                                                  int64_t cols, int64_t first_row, int64_t row_step, float scale,
                                                  epmoe_stream_t stream)
{
    if (rows == 0 || cols == 0) return EPMOE_OK;
    uint64_t key = epmoei_random_key(seed, tensor, expert);
    float unit = epmoei_random_unit(scale);
    switch (dtype) {
    case EPMOE_F32: launch<float>(dst, key, rows, cols, first_row, row_step, unit, stream); break;
    case EPMOE_BF16: launch<__nv_bfloat16>(dst, key, rows, cols, first_row, row_step, unit, stream); break;
    default: launch<__half>(dst, key, rows, cols, first_row, row_step, unit, stream); break;
    }
    return EPMOEI_LAUNCH_CHECK("random_fill");
}
