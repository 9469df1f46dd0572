/* The weighted sum of rows where there are many: bulk copies keep far more of y on its way than threads can hold in
 * registers. A block walks pieces of a token, some columns of its k rows, through a ring of stages: a lane of the
 * producer warp copies its slot's row, the consumers add the rows of a stage in the order of the slots, rounded as in
 * sum_sm80.cu. Floor: bytes = (k + 1) * T * d * b. */
#include "kernels/launch_cuda.cuh"
#include "kernels/row_sum_cuda.h"
#include "kernels/rows_cuda.cuh"

namespace
{

constexpr int kRun = 8; /* elements of 16 bytes */
constexpr int kConsumers = 256;
constexpr int kThreads = kConsumers + 32;
constexpr int kMostSlots = 32; /* a lane each */
constexpr int kStageBytes = 32 * 1024;
constexpr int kStages = 6;
constexpr int64_t kFewestBytes = 8 << 20; /* of y: below, the form without a ring starts sooner */

struct notes_t {
    float weights[kMostSlots];
    uint32_t used; /* bit j: slot j of the token counts */
    uint32_t padding[3];
};

struct ring_shared_t {
    notes_t notes[kStages];
    uint64_t full[kStages];
    uint64_t empty[kStages];
};

constexpr int kSharedBytes = kStages * kStageBytes + (int)sizeof(ring_shared_t);

struct place_t {
    int32_t stage;
    uint32_t parity;
    __device__ __forceinline__ void advance()
    {
        if (++stage == kStages) stage = 0, parity ^= 1;
    }
};

__device__ __forceinline__ void wait(uint64_t *barrier, uint32_t parity)
{
    while (!ptx_mbarrier_try_wait(ptx_shared_address(barrier), parity)) {
    }
}

/* What a lane needs of its slot: the row, or -1, and its weight. */
struct slot_t {
    int32_t selected;
    float weight;
};

__device__ __forceinline__ slot_t load_slot(const epmoei_row_sum_t &sum, int64_t piece, int64_t pieces,
                                            int32_t per_token)
{
    const int lane = threadIdx.x % 32;
    slot_t slot = {-1, 1.0f};
    if (piece >= pieces || lane >= sum.top_k) return slot;
    const int64_t at = piece / per_token * sum.top_k + lane;
    slot.selected = sum.select ? sum.select[at] : 0;
    if (sum.weights) slot.weight = sum.weights[at];
    return slot;
}

/* One warp. */
template <typename Y>
__device__ __forceinline__ void produce(const epmoei_row_sum_t &sum, char *stages, ring_shared_t *ring, int32_t cols,
                                        int64_t pieces, int32_t per_token)
{
    const int lane = threadIdx.x % 32;
    place_t at = {0, 0};
    slot_t next = load_slot(sum, blockIdx.x, pieces, per_token);
    for (int64_t piece = blockIdx.x; piece < pieces; piece += gridDim.x, at.advance()) {
        const slot_t slot = next;
        next = load_slot(sum, piece + gridDim.x, pieces, per_token);
        const int64_t token = piece / per_token;
        const int32_t col = (int32_t)(piece % per_token) * cols, count = min(cols, sum.hidden - col);
        const bool used = slot.selected >= 0 && slot.selected < sum.bound;
        if (!used && slot.selected != -1 && col == 0) epmoei_count_bad(sum.error_word, 1);
        const uint32_t mask = __ballot_sync(0xFFFFFFFFu, used);

        wait(&ring->empty[at.stage], at.parity ^ 1);
        notes_t *notes = &ring->notes[at.stage];
        notes->weights[lane] = slot.weight;
        if (lane == 0) notes->used = mask;
        __syncwarp();
        const uint32_t full = ptx_shared_address(&ring->full[at.stage]);
        const uint32_t bytes = (uint32_t)count * (uint32_t)sizeof(Y);
        if (lane == 0) ptx_mbarrier_arrive_expect(full, (uint32_t)__popc(mask) * bytes);
        __syncwarp();
        if (!used) continue;
        const int64_t row = sum.gather ? slot.selected : token * sum.top_k + lane;
        ptx_bulk_load(ptx_shared_address(stages) + at.stage * kStageBytes + lane * cols * (int32_t)sizeof(Y),
                      (const Y *)sum.y + row * sum.hidden + col, bytes, full);
    }
}

template <typename Y>
__device__ __forceinline__ void add(const epmoei_row_sum_t &sum, const char *stages, ring_shared_t *ring, int32_t cols,
                                    int64_t pieces, int32_t per_token)
{
    place_t at = {0, 0};
    for (int64_t piece = blockIdx.x; piece < pieces; piece += gridDim.x, at.advance()) {
        const int64_t token = piece / per_token;
        const int32_t first = (int32_t)(piece % per_token) * cols, count = min(cols, sum.hidden - first);
        const notes_t *notes = &ring->notes[at.stage];
        wait(&ring->full[at.stage], at.parity);
        const uint32_t used = notes->used;
        for (int32_t col = (int32_t)threadIdx.x * kRun; col < count; col += kConsumers * kRun) {
            const Y *held = (const Y *)(stages + at.stage * kStageBytes) + col;
            const int64_t out = token * sum.hidden + first + col;
            float acc[kRun] = {}, values[kRun];
            for (int32_t j = 0; j < sum.top_k; j++) {
                if (!(used >> j & 1)) continue;
                const float weight = notes->weights[j];
                epmoei_load_run(values, held + j * cols);
#pragma unroll
                for (int i = 0; i < kRun; i++) acc[i] = __fadd_rn(acc[i], __fmul_rn(weight, values[i]));
            }
            if (sum.addend) {
                epmoei_load_run(values, sum.addend + out);
#pragma unroll
                for (int i = 0; i < kRun; i++) acc[i] = __fadd_rn(acc[i], values[i]);
            }
            if (sum.residual) {
                epmoei_load_run(values, (const Y *)sum.residual + out);
#pragma unroll
                for (int i = 0; i < kRun; i++) acc[i] = __fadd_rn(acc[i], values[i]);
            }
            epmoei_store_run((Y *)sum.out + out, acc);
        }
        ptx_mbarrier_arrive(ptx_shared_address(&ring->empty[at.stage]));
    }
}

template <typename Y>
__global__ void __launch_bounds__(kThreads, 1)
    row_sum_ring_kernel(const epmoei_row_sum_t sum, const int32_t cols, const int32_t per_token)
{
    extern __shared__ __align__(1024) char stages[];
    ring_shared_t *ring = (ring_shared_t *)(stages + kStages * kStageBytes);
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; i++) {
            ptx_mbarrier_init(ptx_shared_address(&ring->full[i]), 1);
            ptx_mbarrier_init(ptx_shared_address(&ring->empty[i]), kConsumers);
        }
        ptx_fence_barrier_init();
    }
    epmoei_begin_dependent();
    __syncthreads();
    const int64_t pieces = (int64_t)epmoei_device_tokens(sum.num_tokens_dev, sum.num_tokens) * per_token;
    if (threadIdx.x >= kConsumers)
        produce<Y>(sum, stages, ring, cols, pieces, per_token);
    else
        add<Y>(sum, stages, ring, cols, pieces, per_token);
}

template <typename Y> epmoe_status_t launch(const epmoei_row_sum_t *sum, const char *op, epmoe_stream_t stream)
{
    /* Columns of a piece: what fits a stage, in pieces alike. */
    const int32_t most = kStageBytes / (int32_t)sizeof(Y) / sum->top_k / kRun * kRun;
    const int32_t per_token = (int32_t)epmoei_ceil_div(sum->hidden, most);
    const int32_t cols = (int32_t)epmoei_ceil_div(epmoei_ceil_div(sum->hidden, per_token), kRun) * kRun;
    const int64_t blocks = epmoei_min64((int64_t)sum->num_tokens * per_token, epmoei_device_current()->num_sms);
    EPMOEI_CHECK(epmoei_allow_shared(row_sum_ring_kernel<Y>, kSharedBytes, op));
    return epmoei_cuda_status((int32_t)epmoei_launch_dependent(row_sum_ring_kernel<Y>, dim3((unsigned)blocks),
                                                               dim3(kThreads), kSharedBytes, stream, *sum, cols,
                                                               per_token),
                              op);
}

} // namespace

extern "C" bool epmoei_row_sum_fits_sm90(const epmoei_row_sum_t *sum)
{
    return epmoe_dtype_size(sum->y_dtype) == 2 && sum->out_dtype == sum->y_dtype && sum->hidden % kRun == 0 &&
           sum->top_k <= kMostSlots && (int64_t)sum->num_tokens * sum->top_k * sum->hidden * 2 >= kFewestBytes;
}

extern "C" epmoe_status_t epmoei_row_sum_sm90(const epmoei_row_sum_t *sum, const char *op, epmoe_stream_t stream)
{
    return sum->y_dtype == EPMOE_BF16 ? launch<__nv_bfloat16>(sum, op, stream) : launch<__half>(sum, op, stream);
}
