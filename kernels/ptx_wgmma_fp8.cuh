/* wgmma m64n64k32 of E4M3 operands, the first in registers and the second in shared memory, K-major, with fp32
 * accumulators that lie as kernels/ptx_wgmma.cuh says. Of the first, thread t of the warpgroup holds row 16*(t/32) +
 * (t%32)/4 and the one eight rows below, 4 bytes of each from 4*(t%4) on and 4 from 16 bytes further: what ldmatrix
 * gives of four blocks of 8 rows by 16 bytes. */
#ifndef EPMOEI_PTX_WGMMA_FP8_CUH
#define EPMOEI_PTX_WGMMA_FP8_CUH

#include "kernels/ptx_wgmma.cuh"

/* d = a b^T, or with kAdd d += a b^T. */
template <bool kAdd>
__device__ __forceinline__ void ptx_wgmma_e4m3_n64(float (&d)[32], const uint32_t (&a)[4], uint64_t b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" EPMOEI_NAMES_32
                 "}, {%32, %33, %34, %35}, %36, %37, 1, 1;\n"
                 : EPMOEI_REGS_32
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"((int)kAdd));
}

#endif
