/* Experts to physical ones, and their load: a pass over the ids, bound by its launch. Loads are counted in shared
 * memory first, so that many slots of one expert do not queue for one word of global memory. */
#include "comm/placement.h"
#include "kernels/launch_cuda.cuh"

static constexpr int kThreads = 256;
static constexpr int kSlotsOfThread = 8;
static_assert(EPMOE_MAX_EXPERTS * 4 <= 48 << 10, "a count for every expert fits");

static __device__ __forceinline__ int32_t place(const epmoei_place_ids_t &args, int64_t slot, int32_t id)
{
    const epmoei_copies_t copies = args.copies[id];
    if (copies.num == 1) return args.physical[copies.first];
    const uint32_t turn = ((uint32_t)(slot / args.top_k) + (uint32_t)args.rank) % (uint32_t)copies.num;
    return args.physical[copies.first + (int32_t)turn];
}

static __global__ void __launch_bounds__(kThreads) place_ids_kernel(const __grid_constant__ epmoei_place_ids_t args)
{
    extern __shared__ int32_t counts[]; /* [E], with a load */
    if (args.load)
        for (int32_t e = threadIdx.x; e < args.num_experts; e += kThreads) counts[e] = 0;
    epmoei_begin_dependent();
    __syncthreads();
    const int64_t slots = (int64_t)epmoei_device_tokens(args.num_tokens_dev, args.num_tokens) * args.top_k;
    const int64_t first = (int64_t)blockIdx.x * kThreads * kSlotsOfThread + threadIdx.x;
    int32_t ids[kSlotsOfThread], bad = 0;
#pragma unroll
    for (int i = 0; i < kSlotsOfThread; i++) {
        const int64_t slot = first + i * kThreads;
        ids[i] = slot < slots ? args.ids[slot] : -1;
    }
#pragma unroll
    for (int i = 0; i < kSlotsOfThread; i++) {
        const int64_t slot = first + i * kThreads;
        const bool is_expert = ids[i] >= 0 && ids[i] < args.num_experts;
        bad += !is_expert && ids[i] != -1;
        if (args.load && is_expert) atomicAdd(&counts[ids[i]], 1);
        if (args.physical_ids && slot < slots) args.physical_ids[slot] = is_expert ? place(args, slot, ids[i]) : -1;
    }
    if (bad && args.physical_ids) epmoei_count_bad(args.error_word, bad);
    if (!args.load) return;
    __syncthreads();
    for (int32_t e = threadIdx.x; e < args.num_experts; e += kThreads)
        if (counts[e]) atomicAdd((unsigned long long *)args.load + e, (unsigned long long)counts[e]);
}

extern "C" epmoe_status_t epmoei_place_ids_sm80(const epmoei_place_ids_t *args, epmoe_stream_t stream)
{
    const int64_t slots = (int64_t)args->num_tokens * args->top_k;
    if (slots == 0) return EPMOE_OK;
    const unsigned blocks = (unsigned)epmoei_ceil_div(slots, kThreads * kSlotsOfThread);
    const size_t shared_bytes = args->load ? (size_t)args->num_experts * 4 : 0;
    return epmoei_cuda_status(
        epmoei_launch_dependent(place_ids_kernel, dim3(blocks), dim3(kThreads), shared_bytes, stream, *args),
        "place_ids_kernel");
}
