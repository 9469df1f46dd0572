/* All inline PTX of the library: one function per instruction, no logic. */
#ifndef EPMOEI_PTX_CUH
#define EPMOEI_PTX_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

__device__ __forceinline__ uint32_t ptx_shared_address(const void *pointer)
{
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

/* ------------------------------------------------------------------------------------------------------- sm_80 */

/* 16 bytes from global to shared memory past the first-level cache; bytes 0 writes zeros and reads nothing. */
__device__ __forceinline__ void ptx_cp_async_16(uint32_t shared, const void *global, uint32_t bytes)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void ptx_cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/* Until at most kPending of this thread's groups are under way. */
template <int kPending> __device__ __forceinline__ void ptx_cp_async_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/* Four 8x8 matrices of 16-bit elements; lane i gives the row address i%8 of matrix i/8. */
__device__ __forceinline__ void ptx_ldmatrix_x4(uint32_t (&r)[4], uint32_t shared)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
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

#endif
