/* Inline PTX of the library, but for wgmma (kernels/ptx_wgmma*.cuh): one function per instruction, no logic. Here what
 * every device has, copies, loads and arithmetic; ptx_matrix.cuh has the fragments and products of warps, ptx_sm90.cuh
 * what came with Hopper. */
#ifndef EPMOEI_PTX_CUH
#define EPMOEI_PTX_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

__device__ __forceinline__ uint32_t ptx_shared_address(const void *pointer)
{
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

/* 16 bytes from global to shared memory past the first-level cache; bytes 0 writes zeros and reads nothing. */
__device__ __forceinline__ void ptx_cp_async_16(uint32_t shared, const void *global, uint32_t bytes)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes)
                 : "memory");
}

/* The same, if `really`: a predicate where the compiler may make a branch. */
__device__ __forceinline__ void ptx_cp_async_16_if(uint32_t shared, const void *global, uint32_t bytes, bool really)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\n"
                 "@p cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n}" ::"r"(shared),
                 "l"(global), "r"(bytes), "r"((uint32_t)really)
                 : "memory");
}

/* 4 bytes. */
__device__ __forceinline__ void ptx_cp_async_4(uint32_t shared, const void *global)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}

/* The same by way of the first-level cache, of what several warps read. */
__device__ __forceinline__ void ptx_cp_async_ca_16(uint32_t shared, const void *global, uint32_t bytes)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

__device__ __forceinline__ void ptx_cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/* Until at most kPending of this thread's groups are under way. */
template <int kPending> __device__ __forceinline__ void ptx_cp_async_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/* Until all copies that this thread has started have landed. */
__device__ __forceinline__ void ptx_cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/* Barrier `id` (1..15) among `threads` threads. */
__device__ __forceinline__ void ptx_barrier(int32_t id, int32_t threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* A NaN on either side stays, which fminf and fmaxf drop. */
__device__ __forceinline__ float ptx_min_nan(float a, float b)
{
    float r;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
__device__ __forceinline__ float ptx_max_nan(float a, float b)
{
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

/* threadIdx.x, read here and now: what is computed from it in a loop stays there instead of in registers before it. */
__device__ __forceinline__ int32_t ptx_thread_index()
{
    int32_t index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}

/* (a & mask) | b in one instruction; b should be in a register, as there is room for one constant. */
__device__ __forceinline__ uint32_t ptx_select_or(uint32_t a, uint32_t mask, uint32_t b)
{
    uint32_t r;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(a), "r"(mask), "r"(b));
    return r;
}

/* base + 16 * index in one instruction, where the compiler may keep 16 * index in two registers. */
__device__ __forceinline__ const void *ptx_address_of_16(const void *base, uint32_t index)
{
    uint64_t address;
    asm volatile("mad.wide.u32 %0, %1, 16, %2;" : "=l"(address) : "r"(index), "l"(base));
    return (const void *)address;
}

/* One half of a pair twice. What multiplies or adds pairs reads it in place: this takes no instruction there. */
template <int kHalf> __device__ __forceinline__ uint32_t ptx_twice(uint32_t pair)
{
    uint32_t r;
    if (kHalf == 0)
        asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {low, low};\n}" : "=r"(r) : "r"(pair));
    else
        asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {high, high};\n}" : "=r"(r) : "r"(pair));
    return r;
}

/* Within 2 ulp; subnormal results are 0. */
__device__ __forceinline__ float ptx_exp2(float x)
{
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
__device__ __forceinline__ float ptx_reciprocal(float x)
{
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

/* Two E4M3 codes, saturating, NaN = 0x7F; devices from 8.9 on. */
__device__ __forceinline__ uint32_t ptx_e4m3x2(float low, float high)
{
    uint16_t r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
    return r;
}

/* The E4M3 codes in the low 16 bits as fp16; devices from 8.9 on. */
__device__ __forceinline__ uint32_t ptx_f16x2_of_e4m3x2(uint32_t codes)
{
    uint32_t r;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"((uint16_t)codes));
    return r;
}

/* Hides from the compiler where a value came from, so that it does not keep in registers what it has unpacked of it. */
__device__ __forceinline__ void ptx_forget(uint4 &value)
{
    asm volatile("" : "+r"(value.x), "+r"(value.y), "+r"(value.z), "+r"(value.w));
}

/* Brings the line of an address to the second-level cache, where another kernel may still write it. */
__device__ __forceinline__ void ptx_prefetch_l2(const void *global)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

/* 16 bytes that are read once and that nobody writes while the kernel runs, past the first-level cache; zeros and no
 * access where not `valid`. */
__device__ __forceinline__ uint4 ptx_load_stream_16(const void *global, bool valid)
{
    uint4 v;
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\n"
                 "mov.b32 %3, 0;\n@p ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];\n}\n"
                 : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
                 : "l"(global), "r"((uint32_t)valid));
    return v;
}

/* The same of what this thread overwrites later. */
__device__ __forceinline__ uint4 ptx_load_once_16(const void *global, bool valid)
{
    uint4 v;
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\n"
                 "mov.b32 %3, 0;\n@p ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];\n}\n"
                 : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
                 : "l"(global), "r"((uint32_t)valid)
                 : "memory");
    return v;
}

/* The same by way of the first-level cache, of what an earlier kernel or this one wrote. */
__device__ __forceinline__ uint4 ptx_load_16(const void *global, bool valid)
{
    uint4 v;
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\n"
                 "mov.b32 %3, 0;\n@p ld.global.v4.u32 {%0,%1,%2,%3}, [%4];\n}\n"
                 : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
                 : "l"(global), "r"((uint32_t)valid)
                 : "memory");
    return v;
}

/* Words that ranks exchange through memory which both map: of the system's scope. */
__device__ __forceinline__ uint64_t ptx_load_acquire_system(const uint64_t *word)
{
    uint64_t v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(word) : "memory");
    return v;
}
__device__ __forceinline__ uint32_t ptx_load_acquire_system(const uint32_t *word)
{
    uint32_t v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(word) : "memory");
    return v;
}
__device__ __forceinline__ int32_t ptx_load_relaxed_system(const int32_t *word)
{
    int32_t v;
    asm volatile("ld.relaxed.sys.global.s32 %0, [%1];" : "=r"(v) : "l"(word) : "memory");
    return v;
}
__device__ __forceinline__ void ptx_store_relaxed_system(uint64_t *word, uint64_t value)
{
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
/* Two words side by side, aligned to 16 bytes: each of them whole, the two in any order. */
__device__ __forceinline__ void ptx_load_relaxed_system_2(const uint64_t *words, uint64_t *first, uint64_t *second)
{
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(*first), "=l"(*second) : "l"(words) : "memory");
}
__device__ __forceinline__ void ptx_store_relaxed_system_2(uint64_t *words, uint64_t first, uint64_t second)
{
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(words), "l"(first), "l"(second) : "memory");
}
__device__ __forceinline__ void ptx_store_release_system(uint32_t *word, uint32_t value)
{
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

/* Nanoseconds, the same clock for all kernels of a device. */
__device__ __forceinline__ int64_t ptx_global_timer()
{
    int64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

/* Aligned to their size. */
__device__ __forceinline__ void ptx_load_shared_16(uint32_t (&v)[4], uint32_t shared)
{
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(shared)
                 : "memory");
}
__device__ __forceinline__ void ptx_load_shared_8(uint32_t (&v)[2], uint32_t shared)
{
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "r"(shared) : "memory");
}
__device__ __forceinline__ uint32_t ptx_load_shared_4(uint32_t shared)
{
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(shared) : "memory");
    return v;
}
__device__ __forceinline__ uint32_t ptx_load_shared_2(uint32_t shared)
{
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(shared) : "memory");
    return v;
}

/* (a & mask) | base in one operation; the compiler makes two where both are constants. */
__device__ __forceinline__ uint32_t ptx_and_or(uint32_t a, uint32_t mask, uint32_t base)
{
    uint32_t r;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(a), "r"(mask), "r"(base));
    return r;
}

#include "kernels/ptx_matrix.cuh"
#include "kernels/ptx_sm90.cuh"

#endif
