/* What the two sets of kernels for very few tokens have in common (kernels/experts_few.h): slots by expert, and
 * elements of a type that only the call knows. */
#ifndef EPMOEI_EXPERTS_FEW_CUDA_CUH
#define EPMOEI_EXPERTS_FEW_CUDA_CUH

#include "kernels/cuda_common.cuh"
#include "kernels/experts_few.h"

namespace
{

constexpr uint32_t kAll = 0xFFFFFFFFu;
/* Of a block of `down`: nine for nine slots, eight routed and the shared expert's, one of which would have a warp work
 * twice while seven wait. */
constexpr int kDownWarps = 8, kDownWarpsOfNine = 9;

/* A thread for each slot. A group is the slots of one expert within 32 neighbours; the arrays of groups hold those of
 * slots 0..31 from 0 on, of 32..63 from 32 on, and so on. Shared: a down_shared_t. */
template <int kMaxSlots, bool kExperts, typename Shared>
__device__ __forceinline__ void group_slots(const epmoe_experts_args_t &args, Shared &shared, int32_t num_slots)
{
    const int32_t slot = threadIdx.x, lane = slot % 32;
    if (slot - lane >= kMaxSlots) return;
    int32_t id = slot < num_slots ? args.ids[slot] : -1;
    if (id >= args.num_experts) id = -1;
    const bool used = id >= 0;
    shared.used[slot] = used;
    if constexpr (kExperts) shared.experts[slot] = id;
    shared.weights[slot] = used && !args.weight_on_input ? args.weights[slot] : 1.0f;
    const uint32_t before = (1u << lane) - 1, members = __match_any_sync(kAll, id);
    const bool leads = used && !(members & before);
    const uint32_t leaders = __ballot_sync(kAll, leads);
    if (leads) {
        const int32_t group = slot - lane + __popc(leaders & before);
        shared.group_experts[group] = id;
        shared.group_members[group] = members;
    }
    if (lane == 0) shared.num_groups[slot / 32] = __popc(leaders);
}

__device__ __forceinline__ float load_as(const void *data, epmoe_dtype_t dtype, int64_t i)
{
    if (dtype == EPMOE_BF16) return epmoei_to_float(((const __nv_bfloat16 *)data)[i]);
    if (dtype == EPMOE_F16) return epmoei_to_float(((const __half *)data)[i]);
    return ((const float *)data)[i];
}

__device__ __forceinline__ void store_as(void *data, epmoe_dtype_t dtype, int64_t i, float value)
{
    if (dtype == EPMOE_BF16)
        ((__nv_bfloat16 *)data)[i] = epmoei_from_float<__nv_bfloat16>(value);
    else if (dtype == EPMOE_F16)
        ((__half *)data)[i] = epmoei_from_float<__half>(value);
    else
        ((float *)data)[i] = value;
}

} // namespace

#endif
