/* Of compute capability 9.0 on: dependent launches, barriers in shared memory, copies by the copy engine (TMA),
 * clusters, and what goes around wgmma; included by kernels/ptx.cuh. */
#ifndef EPMOEI_PTX_SM90_CUH
#define EPMOEI_PTX_SM90_CUH

#include <stdint.h>

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

/* The same, behind which what other blocks of the cluster wrote before they arrived is seen. */
__device__ __forceinline__ bool ptx_mbarrier_try_wait_cluster(uint32_t barrier, uint32_t parity)
{
    uint32_t done;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n}\n"
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

/* The same of what nobody reads again: it is the first that the L2 cache gives up. */
__device__ __forceinline__ void ptx_tma_load_once_5d(uint32_t shared, const void *map, uint32_t barrier, int32_t c0,
                                                     int32_t c1, int32_t c2, int32_t c3, int32_t c4)
{
    asm volatile("{\n.reg .b64 once;\ncreatepolicy.fractional.L2::evict_first.b64 once, 1.0;\n"
                 "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
                 "[%1, {%3, %4, %5, %6, %7}], [%2], once;\n}" ::"r"(shared),
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

/* A word into the same place of block `block`, seen by who waits there with ptx_mbarrier_try_wait_cluster for the
 * barrier at which this then arrives. */
__device__ __forceinline__ void ptx_store_and_arrive_at(uint32_t shared, uint32_t word, uint32_t barrier,
                                                        uint32_t block)
{
    asm volatile("{\n.reg .b32 place, remote;\nmapa.shared::cluster.u32 place, %0, %3;\n"
                 "mapa.shared::cluster.u32 remote, %2, %3;\nst.shared::cluster.u32 [place], %1;\n"
                 "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n}" ::"r"(shared),
                 "r"(word), "r"(barrier), "r"(block)
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

/* `bytes` into shared memory; they count on `barrier`. Both addresses and `bytes` are multiples of 16. */
__device__ __forceinline__ void ptx_bulk_load(uint32_t shared, const void *global, uint32_t bytes, uint32_t barrier)
{
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
        "l"(global), "r"(bytes), "r"(barrier)
        : "memory");
}

/* The same of what nobody reads again: it is the first that the L2 cache gives up. */
__device__ __forceinline__ void ptx_bulk_load_once(uint32_t shared, const void *global, uint32_t bytes,
                                                   uint32_t barrier)
{
    asm volatile(
        "{\n.reg .b64 once;\ncreatepolicy.fractional.L2::evict_first.b64 once, 1.0;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], "
        "once;\n}" ::"r"(shared),
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
