/* What CUDA kernels share: element access by dtype, warp reductions, launch checks. Inline PTX is in ptx*.cuh alone. */
#ifndef EPMOEI_CUDA_COMMON_CUH
#define EPMOEI_CUDA_COMMON_CUH

#include "base/device.h"
#include "base/dtype.h"
#include "kernels/op_check.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

/* After every launch. */
#define EPMOEI_LAUNCH_CHECK(kernel) epmoei_cuda_status((int32_t)cudaGetLastError(), kernel)

#define EPMOEI_CHECK_ALIGNED(pointer, bytes) EPMOEI_CHECK(epmoei_check_aligned(#pointer, pointer, (int32_t)(bytes)))

/* The C++ element type of a dtype; the launchers' one switch. */
template <epmoe_dtype_t kDtype> struct epmoei_element;
template <> struct epmoei_element<EPMOE_F32> {
    using type = float;
};
template <> struct epmoei_element<EPMOE_BF16> {
    using type = __nv_bfloat16;
};
template <> struct epmoei_element<EPMOE_F16> {
    using type = __half;
};

__device__ __forceinline__ float epmoei_to_float(float x) { return x; }
__device__ __forceinline__ float epmoei_to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float epmoei_to_float(__half x) { return __half2float(x); }

template <typename T> __device__ __forceinline__ T epmoei_from_float(float x);
template <> __device__ __forceinline__ float epmoei_from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ __nv_bfloat16 epmoei_from_float<__nv_bfloat16>(float x)
{
    return __float2bfloat16_rn(x);
}
template <> __device__ __forceinline__ __half epmoei_from_float<__half>(float x) { return __float2half_rn(x); }

/* 16 bytes of elements. */
template <typename T> struct __align__(16) epmoei_vec16
{
    static constexpr int kCount = 16 / (int)sizeof(T);
    T element[kCount];
};

/* Adds to epmoei_error_word, which may be NULL. The word lies in host memory but only one device adds to it, so its own
 * scope will do; where the host's memory has no native atomics (PCIe), the system's would not be allowed. */
__device__ __forceinline__ void epmoei_count_bad(int32_t *error_word, int32_t count)
{
    if (error_word) atomicAdd(error_word, count);
}

/* num_tokens, or what the device says, never more. */
__device__ __forceinline__ int32_t epmoei_device_tokens(const int32_t *num_tokens_dev, int32_t num_tokens)
{
    if (!num_tokens_dev) return num_tokens;
    int32_t actual = *num_tokens_dev;
    return actual < 0 ? 0 : actual < num_tokens ? actual : num_tokens;
}

#endif
