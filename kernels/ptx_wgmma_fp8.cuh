/* wgmma m64n128k32 of two E4M3 operands in shared memory, both K-major, with fp32 accumulators that lie as
 * kernels/ptx_wgmma.cuh says. */
#ifndef EPMOEI_PTX_WGMMA_FP8_CUH
#define EPMOEI_PTX_WGMMA_FP8_CUH

#include "kernels/ptx_wgmma.cuh"

/* d = a b^T, or with kAdd d += a b^T. */
template <bool kAdd> __device__ __forceinline__ void ptx_wgmma_e4m3_n128(float (&d)[64], uint64_t a, uint64_t b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" EPMOEI_NAMES_64 "}, %64, %65, %66, 1, 1;\n"
                 : EPMOEI_REGS_64
                 : "l"(a), "l"(b), "n"((int)kAdd));
}

#endif
