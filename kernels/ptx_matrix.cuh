/* Matrices of 8x8 between shared memory and the fragments of a warp, and mma; included by kernels/ptx.cuh. */
#ifndef EPMOEI_PTX_MATRIX_CUH
#define EPMOEI_PTX_MATRIX_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

/* Four 8x8 matrices of 16-bit elements; lane i gives the row address i%8 of matrix i/8. */
__device__ __forceinline__ void ptx_ldmatrix_x4(uint32_t (&r)[4], uint32_t shared)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared)
                 : "memory");
}

/* Two of them; lanes 0..15 give the addresses. */
__device__ __forceinline__ void ptx_ldmatrix_x2(uint32_t (&r)[2], uint32_t shared)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared)
                 : "memory");
}

/* The same, transposed: a thread gets two rows of one column. */
__device__ __forceinline__ void ptx_ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t shared)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared)
                 : "memory");
}

/* d += a b, 16x8x16, fp32 accumulators. */
__device__ __forceinline__ void ptx_mma_16816(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                              __nv_bfloat16)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void ptx_mma_16816(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __half)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

/* Four 8x8 matrices of 16-bit elements, held as mma and wgmma hold accumulators (lane: row lane/4, columns 2*(lane%4)
 * and + 1), transposed: lane i gives the address of what was column i%8 of matrix i/8. */
__device__ __forceinline__ void ptx_stmatrix_x4_trans(uint32_t shared, const uint32_t (&r)[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

/* The same as they are: lane i gives the address of row i%8 of matrix i/8. */
__device__ __forceinline__ void ptx_stmatrix_x4(uint32_t shared, const uint32_t *r)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3])
                 : "memory");
}

#endif

#endif
