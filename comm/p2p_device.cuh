/* What the kernels of transport p2p share: faults, bounded waits, and what a block knows of all ranks. */
#ifndef EPMOEI_P2P_DEVICE_CUH
#define EPMOEI_P2P_DEVICE_CUH

#include "comm/p2p.h"
#include "kernels/launch_cuda.cuh"

static constexpr int kP2pThreads = 512; /* two blocks of different kernels fit on a multiprocessor */
static constexpr int kP2pWarp = 32;
static constexpr int kP2pPollsPerLook = 128; /* polls between two looks at the clock and at the host's memory */
static constexpr uint32_t kP2pAll = 0xFFFFFFFFu;
static_assert(EPMOEI_P2P_MAX_RANKS <= kP2pWarp && EPMOEI_P2P_GROUP == kP2pWarp,
              "a lane for every rank, and for every token of a group");

/* ------------------------------------------------------------------------------------------------------- waiting */

/* The first one counts. Not inlined: what hardly ever runs does not lie between what always does, as the code of a
 * kernel comes from memory too. */
static __device__ __noinline__ void p2p_raise(const epmoei_p2p_args_t &args, epmoe_status_t status,
                                              epmoei_p2p_phase_t phase, int32_t peer, uint32_t epoch, int64_t value,
                                              int64_t bound, int32_t field, int64_t waited_ns)
{
    if (atomicCAS(args.failed, 0, 1) != 0) return;
    volatile epmoei_p2p_fault_t *fault = args.fault;
    fault->phase = phase;
    fault->peer = peer;
    fault->epoch = epoch;
    fault->value = value;
    fault->bound = bound;
    fault->field = field;
    fault->waited_ns = waited_ns;
    __threadfence_system();
    fault->status = status;
    __threadfence_system();
}

/* One thread of a block asks, so that a fault in between does not part the block. */
static __device__ __forceinline__ bool p2p_has_failed(const epmoei_p2p_args_t &args)
{
    return *(volatile const int32_t *)args.failed != 0;
}

/* Whether a wait that began at `start` has to end; raises the fault if it is the time that is over. */
static __device__ bool p2p_gives_up(const epmoei_p2p_args_t &args, int64_t start, epmoei_p2p_phase_t phase,
                                    int32_t peer, uint32_t epoch)
{
    if (p2p_has_failed(args)) return true;
    int64_t waited = ptx_global_timer() - start;
    bool stopped = ptx_load_relaxed_system(&args.fault->host_stops) != 0;
    if (waited < args.timeout_ns && !stopped) return false;
    p2p_raise(args, EPMOE_ERROR_TIMEOUT, phase, peer, epoch, 0, 0, 0, waited);
    return true;
}

/* A word of a header; false when there is none in time. */
static __device__ __forceinline__ bool p2p_wait_for_word(const epmoei_p2p_args_t &args, const uint64_t *word,
                                                         int64_t start, int32_t peer, uint32_t epoch, uint32_t *value)
{
    for (int32_t polls = 1;; polls++) {
        uint64_t seen = ptx_load_acquire_system(word);
        if ((uint32_t)(seen >> 32) == epoch) {
            *value = (uint32_t)seen;
            return true;
        }
        if (polls % kP2pPollsPerLook == 0 && p2p_gives_up(args, start, EPMOEI_P2P_HEADERS, peer, epoch)) return false;
    }
}

static __device__ __forceinline__ bool p2p_wait_for_flag(const epmoei_p2p_args_t &args, const uint32_t *flag,
                                                         int64_t start, epmoei_p2p_phase_t phase, int32_t peer,
                                                         uint32_t epoch)
{
    for (int32_t polls = 1;; polls++) {
        if ((int32_t)(ptx_load_acquire_system(flag) - epoch) >= 0) return true;
        if (polls % kP2pPollsPerLook == 0 && p2p_gives_up(args, start, phase, peer, epoch)) return false;
    }
}

#endif
