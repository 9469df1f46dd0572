#include "bench/cuda.h"
#include "kernels/cuda_common.cuh"

namespace
{

constexpr int kThreads = 256;
constexpr int kUnroll = 8; /* loads of 16 bytes that a thread has under way */

__global__ void __launch_bounds__(kThreads) read_kernel(const uint4 *data, int64_t count, uint32_t *sums)
{
    const int64_t step = (int64_t)gridDim.x * kThreads * kUnroll;
    uint32_t sum = 0;
    for (int64_t base = (int64_t)blockIdx.x * kThreads * kUnroll + threadIdx.x; base < count; base += step) {
        uint4 words[kUnroll];
#pragma unroll
        for (int i = 0; i < kUnroll; i++) {
            int64_t at = base + (int64_t)i * kThreads;
            words[i] = at < count ? __ldcg(data + at) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < kUnroll; i++) sum += words[i].x + words[i].y + words[i].z + words[i].w;
    }
    /* The sum goes somewhere, or the compiler would leave the loads out. */
    sum = __reduce_add_sync(0xFFFFFFFF, sum);
    __shared__ uint32_t of_warp[kThreads / 32];
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x) return;
    for (int i = 1; i < kThreads / 32; i++) sum += of_warp[i];
    sums[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads) copy_kernel(uint4 *dst, const uint4 *src, int64_t count)
{
    const int64_t step = (int64_t)gridDim.x * kThreads * kUnroll;
    for (int64_t base = (int64_t)blockIdx.x * kThreads * kUnroll + threadIdx.x; base < count; base += step) {
        uint4 words[kUnroll];
#pragma unroll
        for (int i = 0; i < kUnroll; i++) {
            int64_t at = base + (int64_t)i * kThreads;
            if (at < count) words[i] = __ldcs(src + at);
        }
#pragma unroll
        for (int i = 0; i < kUnroll; i++) {
            int64_t at = base + (int64_t)i * kThreads;
            if (at < count) __stcs(dst + at, words[i]);
        }
    }
}

__global__ void empty_kernel() {}

} // namespace

extern "C" epmoe_status_t cuda_launch_read(const void *data, int64_t bytes, int32_t num_blocks, uint32_t *sums,
                                           epmoe_stream_t stream)
{
    EPMOEI_CHECK_ALIGNED(data, 16);
    read_kernel<<<(unsigned)num_blocks, kThreads, 0, stream>>>((const uint4 *)data, bytes / 16, sums);
    return EPMOEI_LAUNCH_CHECK("read");
}

extern "C" epmoe_status_t cuda_launch_copy(void *dst, const void *src, int64_t bytes, int32_t num_blocks,
                                           epmoe_stream_t stream)
{
    EPMOEI_CHECK_ALIGNED(dst, 16);
    EPMOEI_CHECK_ALIGNED(src, 16);
    copy_kernel<<<(unsigned)num_blocks, kThreads, 0, stream>>>((uint4 *)dst, (const uint4 *)src, bytes / 16);
    return EPMOEI_LAUNCH_CHECK("copy");
}

extern "C" epmoe_status_t cuda_launch_empty(epmoe_stream_t stream)
{
    empty_kernel<<<1, 32, 0, stream>>>();
    return EPMOEI_LAUNCH_CHECK("empty");
}
