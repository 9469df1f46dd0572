#include "kernels/fp8_cuda.cuh"
#include "kernels/launch_cuda.cuh"
#include "kernels/quantize_fp8.h"
#include "kernels/rows_cuda.cuh"

namespace
{

constexpr int kThreads = 256;
constexpr int kRun = 8;                           /* elements of a thread at a time, where rows are aligned */
constexpr int kLanes = EPMOEI_FP8_COLUMNS / kRun; /* of a block of 128 columns */
constexpr uint32_t kAll = 0xFFFFFFFFu;

/* kCount elements at a time: kRun, or 1 where rows are not aligned. */
template <int kCount> __device__ __forceinline__ float amax_of(float amax, const float (&value)[kCount])
{
#pragma unroll
    for (int i = 0; i < kCount; i++) amax = fmaxf(amax, fabsf(value[i])); /* fmaxf drops a NaN */
    return amax;
}

__device__ __forceinline__ float scale_of(const epmoe_quantize_fp8_args_t &args, float amax)
{
    if (args.scale_ub && amax > *args.scale_ub) amax = *args.scale_ub;
    return args.pow2 ? epmoei_pow2_scale_of_amax(amax) : epmoei_scale_of_amax(amax);
}

/* A scale_ub or a static scale may be far below the values. */
template <int kCount>
__device__ __forceinline__ void store_codes(uint8_t *q, float (&value)[kCount], const epmoei_divisor_t &by)
{
    epmoei_divide_run<false>(value, by);
    epmoei_store_e4m3(q, value);
}

/* ------------------------------------------------------------------------------------------------------- kernels */

/* Half a warp a block of 128 columns. */
template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads) quantize_blocks_kernel(const epmoe_quantize_fp8_args_t args)
{
    constexpr int kRounds = kRun / kCount;
    epmoei_begin_dependent();
    const int32_t lane = threadIdx.x % kLanes;
    const int64_t parts = (args.hidden + EPMOEI_FP8_COLUMNS - 1) / EPMOEI_FP8_COLUMNS;
    const int64_t step = (int64_t)gridDim.x * (kThreads / kLanes), all = parts * args.num_tokens;
    /* Both halves of a warp take part in the shuffles of either. */
    const int64_t rounds = (all + step - 1) / step;
    int64_t part = (int64_t)blockIdx.x * (kThreads / kLanes) + threadIdx.x / kLanes;
    for (int64_t round = 0; round < rounds; round++, part += step) {
        const int64_t token = part / parts, first = (part - token * parts) * EPMOEI_FP8_COLUMNS + lane * kCount;
        const T *x = (const T *)args.x + token * args.x_stride + first;
        float value[kRounds][kCount], amax = 0.0f;
#pragma unroll
        for (int r = 0; r < kRounds; r++) {
#pragma unroll
            for (int i = 0; i < kCount; i++) value[r][i] = 0.0f;
            if (part < all && first + r * kLanes * kCount < args.hidden)
                epmoei_load_run(value[r], x + r * kLanes * kCount);
            amax = amax_of(amax, value[r]);
        }
#pragma unroll
        for (int i = kLanes / 2; i > 0; i /= 2) amax = fmaxf(amax, __shfl_xor_sync(kAll, amax, i));
        if (part >= all) continue;
        const float scale = scale_of(args, amax);
        const epmoei_divisor_t by = epmoei_divisor(scale);
        if (lane == 0) args.scale[part] = scale;
        uint8_t *q = (uint8_t *)args.q + token * args.hidden + first;
#pragma unroll
        for (int r = 0; r < kRounds; r++)
            if (first + r * kLanes * kCount < args.hidden) store_codes(q + r * kLanes * kCount, value[r], by);
    }
}

/* A block a row, read twice: the second time from a cache. */
template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads) quantize_rows_kernel(const epmoe_quantize_fp8_args_t args)
{
    epmoei_begin_dependent();
    for (int64_t token = blockIdx.x; token < args.num_tokens; token += gridDim.x) {
        const T *x = (const T *)args.x + token * args.x_stride;
        uint8_t *q = (uint8_t *)args.q + token * args.hidden;
        float value[kCount], amax = 0.0f;
        for (int64_t c = (int64_t)threadIdx.x * kCount; c < args.hidden; c += kThreads * kCount) {
            epmoei_load_run(value, x + c);
            amax = amax_of(amax, value);
        }
        const float scale = scale_of(args, epmoei_block_max<kThreads>(amax));
        const epmoei_divisor_t by = epmoei_divisor(scale);
        if (threadIdx.x == 0) args.scale[token] = scale;
        for (int64_t c = (int64_t)threadIdx.x * kCount; c < args.hidden; c += kThreads * kCount) {
            epmoei_load_run(value, x + c);
            store_codes(q + c, value, by);
        }
    }
}

/* Into *scale, which is 0 before: bits of floats that are not negative are in the floats' order, and a maximum is the
 * same in whatever order it is taken. */
template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads) tensor_amax_kernel(const epmoe_quantize_fp8_args_t args)
{
    const int64_t first = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * kCount;
    float value[kCount], amax = 0.0f;
    if (first < args.hidden)
        for (int64_t token = blockIdx.y; token < args.num_tokens; token += gridDim.y) {
            epmoei_load_run(value, (const T *)args.x + token * args.x_stride + first);
            amax = amax_of(amax, value);
        }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) amax = fmaxf(amax, __shfl_xor_sync(kAll, amax, step));
    if (threadIdx.x % 32 == 0) atomicMax((int *)args.scale, __float_as_int(amax));
}

__global__ void tensor_scale_kernel(const epmoe_quantize_fp8_args_t args)
{
    *args.scale = args.static_scale ? *args.static_scale : scale_of(args, *args.scale);
}

template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads) quantize_tensor_kernel(const epmoe_quantize_fp8_args_t args)
{
    const int64_t first = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * kCount;
    if (first >= args.hidden) return;
    const epmoei_divisor_t by = epmoei_divisor(*args.scale);
    for (int64_t token = blockIdx.y; token < args.num_tokens; token += gridDim.y) {
        float value[kCount];
        epmoei_load_run(value, (const T *)args.x + token * args.x_stride + first);
        store_codes((uint8_t *)args.q + token * args.hidden + first, value, by);
    }
}

/* -------------------------------------------------------------------------------------------------------- launch */

template <typename T, int kCount>
epmoe_status_t launch_tensor(const epmoe_quantize_fp8_args_t *args, epmoe_stream_t stream)
{
    const epmoei_row_grid_t grid = epmoei_row_grid(args->num_tokens, epmoei_ceil_div(args->hidden, kCount));
    if (!args->static_scale) {
        EPMOEI_CUDA(cudaMemsetAsync(args->scale, 0, sizeof(float), stream));
        tensor_amax_kernel<T, kCount><<<grid.blocks, grid.threads, 0, stream>>>(*args);
        EPMOEI_CHECK(EPMOEI_LAUNCH_CHECK("quantize_fp8 amax"));
    }
    tensor_scale_kernel<<<1, 1, 0, stream>>>(*args);
    EPMOEI_CHECK(EPMOEI_LAUNCH_CHECK("quantize_fp8 scale"));
    quantize_tensor_kernel<T, kCount><<<grid.blocks, grid.threads, 0, stream>>>(*args);
    return EPMOEI_LAUNCH_CHECK("quantize_fp8");
}

template <typename T, int kCount> epmoe_status_t launch(const epmoe_quantize_fp8_args_t *args, epmoe_stream_t stream)
{
    const int64_t most_blocks = 16 * (int64_t)epmoei_device_current()->num_sms;
    if (args->granularity == EPMOE_GRANULARITY_TENSOR) return launch_tensor<T, kCount>(args, stream);
    const bool rows = args->granularity == EPMOE_GRANULARITY_TOKEN;
    const int64_t parts = args->num_tokens * epmoei_ceil_div(args->hidden, EPMOEI_FP8_COLUMNS);
    const int64_t work = rows ? args->num_tokens : epmoei_ceil_div(parts, kThreads / kLanes);
    return epmoei_cuda_status(
        (int32_t)epmoei_launch_dependent(rows ? quantize_rows_kernel<T, kCount> : quantize_blocks_kernel<T, kCount>,
                                         (unsigned)epmoei_min64(work, most_blocks), kThreads, 0, stream, *args),
        "quantize_fp8");
}

template <typename T> epmoe_status_t launch_aligned(const epmoe_quantize_fp8_args_t *args, epmoe_stream_t stream)
{
    const bool aligned = args->hidden % kRun == 0 && args->x_stride % (16 / (int64_t)sizeof(T)) == 0;
    return aligned ? launch<T, kRun>(args, stream) : launch<T, 1>(args, stream);
}

} // namespace

extern "C" epmoe_status_t epmoei_quantize_fp8_sm80(const epmoe_quantize_fp8_args_t *args, epmoe_stream_t stream)
{
    EPMOEI_CHECK_ALIGNED(args->x, 16);
    EPMOEI_CHECK_ALIGNED(args->q, 16);
    EPMOEI_CHECK_ALIGNED(args->scale, 4);
    EPMOEI_CHECK_ALIGNED(args->static_scale, 4);
    EPMOEI_CHECK_ALIGNED(args->scale_ub, 4);
    switch (args->dtype) {
    case EPMOE_BF16: return launch_aligned<__nv_bfloat16>(args, stream);
    case EPMOE_F16: return launch_aligned<__half>(args, stream);
    default: return launch_aligned<float>(args, stream);
    }
}
