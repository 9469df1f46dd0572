/* How kernels are launched: with more shared memory than they have unasked, and as dependents.
 *
 * Programmatic dependent launch: a kernel is put on the device while the one before it in the stream still runs, and
 * waits there for it, which hides most of the gap between two kernels; also between nodes of a captured graph.
 *
 * A kernel that epmoei_launch_dependent starts
 *   - calls epmoei_wait_for_predecessor in every thread before it reads what another kernel wrote, writes what another
 *     kernel may still read, or returns: only then is it sure that everything before it in the stream has ended;
 *   - may call epmoei_allow_dependent at any time, after which the next such kernel may come to the device. */
#ifndef EPMOEI_LAUNCH_CUDA_CUH
#define EPMOEI_LAUNCH_CUDA_CUH

#include "kernels/cuda_common.cuh"
#include "kernels/ptx.cuh"

__device__ __forceinline__ void epmoei_wait_for_predecessor()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    ptx_griddepcontrol_wait();
#endif
}

__device__ __forceinline__ void epmoei_allow_dependent()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    ptx_griddepcontrol_launch_dependents();
#endif
}

/* How most kernels begin. */
__device__ __forceinline__ void epmoei_begin_dependent()
{
    epmoei_wait_for_predecessor();
    epmoei_allow_dependent();
}

/* Before a launch with `bytes` of dynamic shared memory: lets `kernel` have all that the current device gives a block.
 * What a kernel may have holds for every thread of the process, and so must not depend on what one of them launches: it
 * only ever goes from the default to the most. A launch still takes no more than its own bytes. */
template <typename... Params>
static inline epmoe_status_t epmoei_allow_shared(void (*kernel)(Params...), size_t bytes, const char *name)
{
    /* Of the 48 KB without asking a kernel's own __shared__ arrays have a part. */
    const size_t unasked = 32 * 1024;
    if (bytes <= unasked) return EPMOE_OK;
    cudaFuncAttributes now;
    EPMOEI_CHECK(epmoei_cuda_status((int32_t)cudaFuncGetAttributes(&now, kernel), name));
    if ((size_t)now.maxDynamicSharedSizeBytes >= bytes) return EPMOE_OK;
    int64_t most = epmoei_device_current()->shared_bytes_per_block - (int64_t)now.sharedSizeBytes;
    most = epmoei_max64(most, (int64_t)bytes); /* what the device does not have is refused here */
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)most);
    return epmoei_cuda_status((int32_t)error, name);
}

/* The machine code for 9.0 has the two instructions; what the driver makes of the PTX for anything newer has not, and
 * is launched in plain stream order. */
template <typename... Params, typename... Args>
static inline cudaError_t epmoei_launch_clusters(void (*kernel)(Params...), int32_t blocks_per_cluster, dim3 blocks,
                                                 dim3 threads, size_t shared_bytes, epmoe_stream_t stream, Args... args)
{
    const epmoei_device_info_t *device = epmoei_device_current();
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config = {};
    config.gridDim = blocks;
    config.blockDim = threads;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    if (device && device->arch == 90) {
        attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (blocks_per_cluster > 1) {
        attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
        attributes[config.numAttrs++].val.clusterDim = {(unsigned)blocks_per_cluster, 1, 1};
    }
    return cudaLaunchKernelEx(&config, kernel, Params(args)...);
}

template <typename... Params, typename... Args>
static inline cudaError_t epmoei_launch_dependent(void (*kernel)(Params...), dim3 blocks, dim3 threads,
                                                  size_t shared_bytes, epmoe_stream_t stream, Args... args)
{
    return epmoei_launch_clusters(kernel, 1, blocks, threads, shared_bytes, stream, args...);
}

#endif
