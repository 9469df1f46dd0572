/* Tensor maps for TMA: made on the host by a function that the driver gives. What lies past the end of a dimension
 * reads as zeros. All maps are of matrices whose boxes are 128 bytes wide, in the 128-byte swizzle. */
#ifndef EPMOEI_TENSOR_MAP_SM90_CUH
#define EPMOEI_TENSOR_MAP_SM90_CUH

#include "kernels/cuda_common.cuh"

#include <cuda.h>

namespace
{

typedef CUresult (*tensor_map_encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                         const cuuint64_t *, const cuuint32_t *, const cuuint32_t *,
                                         CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                         CUtensorMapFloatOOBfill);

inline CUtensorMapDataType tensor_map_type(epmoe_dtype_t dtype)
{
    switch (dtype) {
    case EPMOE_BF16: return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case EPMOE_F16: return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    default: return CU_TENSOR_MAP_DATA_TYPE_UINT8; /* E4M3 */
    }
}

/* dims and box in elements, strides in bytes, of the dimensions from the second on. */
inline epmoe_status_t tensor_map_encode(CUtensorMap *map, epmoe_dtype_t dtype, const void *data, cuuint32_t rank,
                                        const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box)
{
    static tensor_map_encode_fn encode; /* the same pointer whichever thread finds it */
    if (!encode) {
        void *function = nullptr;
        cudaDriverEntryPointQueryResult found;
        EPMOEI_CUDA(
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found));
        if (found != cudaDriverEntryPointSuccess || !function)
            return epmoei_fail(EPMOE_ERROR_CUDA, "the driver has no cuTensorMapEncodeTiled");
        encode = (tensor_map_encode_fn)function;
    }
    const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
    CUresult result = encode(map, tensor_map_type(dtype), rank, (void *)(uintptr_t)data, dims, strides, box, steps,
                             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        return epmoei_fail(EPMOE_ERROR_CUDA, "cuTensorMapEncodeTiled failed with %d for rows of %lld", (int)result,
                           (long long)dims[0]);
    return EPMOE_OK;
}

} // namespace

#endif
