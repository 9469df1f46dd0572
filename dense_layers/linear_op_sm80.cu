#include "dense_layers/linear_op.h"
#include "kernels/launch_cuda.cuh"
#include "kernels/parts_cuda.cuh"

static const int kThreads = 256;

static __global__ void __launch_bounds__(kThreads)
    spread_kernel(float *scales, int32_t count, const void *from, epmoe_dtype_t dtype, bool one)
{
    epmoei_begin_dependent();
    const int32_t i = (int32_t)(blockIdx.x * kThreads + threadIdx.x);
    if (i < count) scales[i] = epmoei_load_float(from, dtype, one ? 0 : i);
}

/* Four columns a thread; rows whose width is no multiple of four one by one. */
template <typename T, int kCount>
static __global__ void __launch_bounds__(kThreads)
    add_bias_kernel(const float *sum, const float *bias, int64_t elements, int32_t n, T *y)
{
    struct alignas(kCount * sizeof(T)) run_t {
        T element[kCount];
    };
    epmoei_begin_dependent();
    const int64_t step = (int64_t)gridDim.x * kThreads * kCount;
    for (int64_t i = ((int64_t)blockIdx.x * kThreads + threadIdx.x) * kCount; i < elements; i += step) {
        float terms[kCount], values[kCount];
        run_t run;
        epmoei_load_floats_of(values, sum + i);
        epmoei_load_floats_of(terms, bias + i % n);
#pragma unroll
        for (int j = 0; j < kCount; j++) run.element[j] = epmoei_from_float<T>(values[j] + terms[j]);
        *(run_t *)(y + i) = run;
    }
}

template <typename T>
static epmoe_status_t add_bias(const float *sum, const float *bias, int64_t rows, int32_t n, void *y,
                               epmoe_stream_t stream)
{
    const int64_t kBlocksPerSm = 8, elements = rows * n;
    const bool whole = n % 4 == 0;
    const epmoei_device_info_t *device = epmoei_device_current();
    const int64_t most = kBlocksPerSm * (device ? device->num_sms : 1);
    const dim3 blocks((unsigned)epmoei_min64(epmoei_ceil_div(elements, kThreads * (whole ? 4 : 1)), most));
    const auto kernel = whole ? add_bias_kernel<T, 4> : add_bias_kernel<T, 1>;
    return epmoei_cuda_status(
        (int32_t)epmoei_launch_dependent(kernel, blocks, dim3(kThreads), 0, stream, sum, bias, elements, n, (T *)y),
        "epmoe_linear");
}

extern "C" epmoe_status_t epmoei_linear_spread_sm80(float *scales, int32_t count, const void *from, epmoe_dtype_t dtype,
                                                    bool one, epmoe_stream_t stream)
{
    const dim3 blocks((unsigned)epmoei_ceil_div(count, kThreads));
    return epmoei_cuda_status((int32_t)epmoei_launch_dependent(spread_kernel, blocks, dim3(kThreads), 0, stream, scales,
                                                               count, from, dtype, one),
                              "epmoe_linear");
}

extern "C" epmoe_status_t epmoei_linear_add_bias_sm80(const float *sum, const float *bias, int64_t rows, int32_t n,
                                                      epmoe_dtype_t y_dtype, void *y, epmoe_stream_t stream)
{
    switch (y_dtype) {
    case EPMOE_BF16: return add_bias<__nv_bfloat16>(sum, bias, rows, n, y, stream);
    case EPMOE_F16: return add_bias<__half>(sum, bias, rows, n, y, stream);
    default: return add_bias<float>(sum, bias, rows, n, y, stream);
    }
}
