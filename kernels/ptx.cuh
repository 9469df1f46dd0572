/* Inline PTX of the library, but for wgmma (kernels/ptx_wgmma*.cuh): one function per instruction, no logic. */
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

/* ------------------------------------------------------------------------------------------------------- sm_90 */

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

/* Until every kernel that this one depends on has ended and what it wrote is visible. */
__device__ __forceinline__ void ptx_griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
/* Kernels that depend on this one may come to the device, once every block has said so or ended. */
__device__ __forceinline__ void ptx_griddepcontrol_launch_dependents()
{
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ void ptx_mbarrier_init(uint32_t barrier, uint32_t count)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

/* Makes initialised barriers visible to the copy engine. */
__device__ __forceinline__ void ptx_fence_barrier_init()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void ptx_mbarrier_arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* Arrives, and lets the phase wait for `bytes` of copies too. */
__device__ __forceinline__ void ptx_mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

/* Arrives when all copies that this thread has started by ptx_cp_async_16 have landed, as one of the barrier's own
 * count. */
__device__ __forceinline__ void ptx_mbarrier_arrive_after_copies(uint32_t barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

/* One try of the hardware's own length; true when the phase with this parity has completed. */
__device__ __forceinline__ bool ptx_mbarrier_try_wait(uint32_t barrier, uint32_t parity)
{
    uint32_t done;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return done != 0;
}

/* Ordinary writes to shared memory by this thread before, the tensor cores' and copy engine's accesses after. */
__device__ __forceinline__ void ptx_fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/* A box of a tensor into shared memory; its bytes count on `barrier`. */
__device__ __forceinline__ void ptx_tma_load_2d(uint32_t shared, const void *map, uint32_t barrier, int32_t c0,
                                                int32_t c1)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
                 "[%2];" ::"r"(shared),
                 "l"(map), "r"(barrier), "r"(c0), "r"(c1)
                 : "memory");
}

__device__ __forceinline__ void ptx_tma_load_5d(uint32_t shared, const void *map, uint32_t barrier, int32_t c0,
                                                int32_t c1, int32_t c2, int32_t c3, int32_t c4)
{
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
                 "%6, %7}], [%2];" ::"r"(shared),
                 "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
                 : "memory");
}

/* The same into the same place of every block of the cluster whose bit is set in `blocks`, and onto its barrier. */
__device__ __forceinline__ void ptx_tma_load_2d_multicast(uint32_t shared, const void *map, uint32_t barrier,
                                                          int32_t c0, int32_t c1, uint16_t blocks)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
                 "[%1, {%3, %4}], [%2], %5;" ::"r"(shared),
                 "l"(map), "r"(barrier), "r"(c0), "r"(c1), "h"(blocks)
                 : "memory");
}

/* True in one thread of the warp. The compiler knows that it is one, and so passes what a copy needs to the unit that
 * starts it without a loop over threads. */
__device__ __forceinline__ bool ptx_elect_one()
{
    uint32_t elected;
    asm volatile("{\n.reg .pred one;\nelect.sync _|one, 0xFFFFFFFF;\nselp.u32 %0, 1, 0, one;\n}" : "=r"(elected));
    return elected;
}

__device__ __forceinline__ uint32_t ptx_cluster_block_rank()
{
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

/* All threads of the cluster that have not ended. */
__device__ __forceinline__ void ptx_cluster_sync()
{
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

/* Arrives at the barrier in the same place of block `block` of the cluster. */
__device__ __forceinline__ void ptx_mbarrier_arrive_at(uint32_t barrier, uint32_t block)
{
    asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
                 "r"(block)
                 : "memory");
}

/* The address in the cluster of the same place in block `block`. */
__device__ __forceinline__ uint32_t ptx_cluster_address(uint32_t shared, uint32_t block)
{
    uint32_t address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(block));
    return address;
}

/* Arrives, if `really`, at a barrier of any block of the cluster; an address in this block is one of the cluster too.
 */
__device__ __forceinline__ void ptx_mbarrier_arrive_if(uint32_t barrier, bool really)
{
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %1, 0;\n@p mbarrier.arrive.shared::cluster.b64 _, [%0];\n}" ::"r"(barrier),
        "r"((uint32_t)really)
        : "memory");
}

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

/* `bytes` into shared memory; they count on `barrier`. Both addresses and `bytes` are multiples of 16. */
__device__ __forceinline__ void ptx_bulk_load(uint32_t shared, const void *global, uint32_t bytes, uint32_t barrier)
{
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
        "l"(global), "r"(bytes), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void ptx_tma_prefetch_map(const void *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void ptx_wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void ptx_wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending> __device__ __forceinline__ void ptx_wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/* Whether the registers that a block starts with do for one warpgroup that keeps `fewer` a thread and others that take
 * `more`: a warpgroup that finds too few of them free waits for ever. In a kernel with setmaxnreg ptxas gives a thread
 * all that __launch_bounds__ leaves it; tests/registers_check.sh watches that it does. */
__host__ __device__ constexpr bool ptx_registers_do(int threads, int blocks_per_sm, int fewer, int more)
{
    return fewer + (threads / 128 - 1) * more <= threads / 128 * (65536 / (threads * blocks_per_sm) / 8 * 8);
}
template <int kRegisters> __device__ __forceinline__ void ptx_setmaxnreg_inc()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters> __device__ __forceinline__ void ptx_setmaxnreg_dec()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/* 16 bytes, if `really`: a predicate where the compiler may make a branch. */
__device__ __forceinline__ void ptx_store_16_if(void *to, const uint4 &value, bool really)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n@p st.global.v4.b32 [%0], {%1, %2, %3, %4};\n}" ::"l"(to),
                 "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"((uint32_t)really)
                 : "memory");
}

/* Barrier kId (1..15) among `threads` threads. */
template <int kId> __device__ __forceinline__ void ptx_named_barrier(int32_t threads)
{
    asm volatile("bar.sync %0, %1;" ::"n"(kId), "r"(threads) : "memory");
}
/* Arrives there without waiting. */
template <int kId> __device__ __forceinline__ void ptx_named_barrier_arrive(int32_t threads)
{
    asm volatile("bar.arrive %0, %1;" ::"n"(kId), "r"(threads) : "memory");
}

#endif

#endif
