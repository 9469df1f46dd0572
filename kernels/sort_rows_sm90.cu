/* Rows of x into the sorted order of a grouped GEMM, to[r] = x[row_index[r] / x_row_divisor], where there are many:
 * copied through shared memory in bulk, since threads can hold too little on its way. Floor: bytes = 2*R*K*b, of which
 * the reads of a token's k slots hit the L2 cache. */
#include "kernels/grouped_gemm.h"
#include "kernels/launch_cuda.cuh"

namespace
{

constexpr int kWarps = 4;
constexpr int kStages = 4;
constexpr int kPieceBytes = 12 * 1024;
constexpr int kSharedBytes = kWarps * kStages * kPieceBytes;
constexpr int64_t kFewestBytes = 64 << 20; /* below, the form without a ring starts sooner */

struct copy_t {
    const char *x;
    char *to;
    const int32_t *expert_offsets;
    const int32_t *row_index;
    const int32_t *num_rows_dev;
    int32_t num_experts;
    int32_t max_rows;
    int32_t num_slots;
    int32_t x_row_divisor;
    int32_t row_bytes;
    int32_t piece_bytes;
    int32_t pieces; /* of a row */
};

/* A piece of a row on its way. */
struct piece_t {
    const char *from;
    char *to;
    uint32_t bytes; /* 0: its row holds no slot, or it is behind the last */
};

__device__ __forceinline__ piece_t find_piece(const copy_t &c, int64_t index, int64_t end)
{
    piece_t piece = {};
    if (index >= end) return piece;
    const int32_t row = (int32_t)(index / c.pieces), offset = (int32_t)(index % c.pieces) * c.piece_bytes;
    const int32_t slot = c.row_index ? c.row_index[row] : row;
    if (slot < 0 || slot >= c.num_slots) return piece;
    piece.from = c.x + (int64_t)(slot / c.x_row_divisor) * c.row_bytes + offset;
    piece.to = c.to + (int64_t)row * c.row_bytes + offset;
    piece.bytes = (uint32_t)min(c.piece_bytes, c.row_bytes - offset);
    return piece;
}

/* One thread's pieces, the nth in stage n % kStages: up to kStages - 1 of them come while the ones before leave. */
struct ring_t {
    uint32_t stages;
    uint32_t full;
    char *to[kStages];
    uint32_t bytes[kStages];

    __device__ __forceinline__ void store(int32_t n) const
    {
        const int32_t stage = n % kStages;
        while (!ptx_mbarrier_try_wait(full + 8 * stage, (uint32_t)(n / kStages) & 1)) {
        }
#pragma unroll
        for (int i = 0; i < kStages; i++)
            if (i == stage) ptx_bulk_store(to[i], stages + i * kPieceBytes, bytes[i]);
        ptx_bulk_commit();
    }
    __device__ __forceinline__ void fetch(int32_t n, const piece_t &piece)
    {
        if (n >= kStages - 1) store(n - (kStages - 1));
        ptx_bulk_wait_read<1>(); /* piece n - kStages has left the stage */
        const int32_t stage = n % kStages;
#pragma unroll
        for (int i = 0; i < kStages; i++)
            if (i == stage) to[i] = piece.to, bytes[i] = piece.bytes;
        ptx_mbarrier_arrive_expect(full + 8 * stage, piece.bytes);
        ptx_bulk_load(stages + stage * kPieceBytes, piece.from, piece.bytes, full + 8 * stage);
    }
};

/* A warp takes 32 pieces at a time: its lanes look them up, the next ones ahead, and its first lane moves them. */
__global__ void __launch_bounds__(kWarps * 32) sort_rows_ring_kernel(const copy_t c)
{
    extern __shared__ __align__(1024) char shared[];
    __shared__ uint64_t barriers[kWarps][kStages];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) {
        for (int i = 0; i < kStages; i++) ptx_mbarrier_init(ptx_shared_address(&barriers[warp][i]), 1);
        ptx_fence_barrier_init();
    }
    epmoei_begin_dependent();
    const int64_t begin = (int64_t)(c.expert_offsets ? c.expert_offsets[0] : 0) * c.pieces;
    const int64_t end = (int64_t)(c.expert_offsets ? c.expert_offsets[c.num_experts]
                                                   : epmoei_device_tokens(c.num_rows_dev, c.max_rows)) *
                        c.pieces;
    const int64_t step = (int64_t)gridDim.x * kWarps * 32;
    ring_t ring = {};
    ring.stages = ptx_shared_address(shared) + warp * kStages * kPieceBytes;
    ring.full = ptx_shared_address(barriers[warp]);

    int32_t count = 0;
    int64_t index = begin + ((int64_t)warp * gridDim.x + blockIdx.x) * 32 + lane;
    piece_t next = find_piece(c, index, end);
    for (int64_t first = index - lane; first < end; first += step, index += step) {
        const piece_t own = next;
        next = find_piece(c, index + step, end);
        for (uint32_t left = __ballot_sync(0xFFFFFFFFu, own.bytes > 0); left; left &= left - 1, count++) {
            const int i = __ffs((int)left) - 1;
            piece_t piece;
            piece.from = (const char *)__shfl_sync(0xFFFFFFFFu, (unsigned long long)own.from, i);
            piece.to = (char *)__shfl_sync(0xFFFFFFFFu, (unsigned long long)own.to, i);
            piece.bytes = __shfl_sync(0xFFFFFFFFu, own.bytes, i);
            if (lane == 0) ring.fetch(count, piece);
        }
    }
    if (lane != 0) return;
    for (int32_t n = max(0, count - (kStages - 1)); n < count; n++) ring.store(n);
    ptx_bulk_wait<0>();
}

} // namespace

extern "C" epmoe_status_t epmoei_sort_rows_sm90(const epmoe_grouped_gemm_args_t *args, void *to, epmoe_stream_t stream)
{
    if ((int64_t)args->max_rows * args->k * 2 < kFewestBytes) return epmoei_sort_rows_sm80(args, to, stream);
    copy_t c = {};
    c.x = (const char *)args->x;
    c.to = (char *)to;
    c.expert_offsets = args->expert_offsets;
    c.row_index = args->row_index;
    c.num_rows_dev = args->num_rows_dev;
    c.num_experts = args->num_experts;
    c.max_rows = args->max_rows;
    c.num_slots = args->num_slots;
    c.x_row_divisor = args->x_row_divisor;
    c.row_bytes = args->k * 2;
    c.pieces = (int32_t)epmoei_ceil_div(c.row_bytes, kPieceBytes);
    c.piece_bytes = (int32_t)epmoei_round_up(epmoei_ceil_div(c.row_bytes, c.pieces), 128);
    const int32_t sms = epmoei_device_current()->num_sms;
    EPMOEI_CUDA(cudaFuncSetAttribute(sort_rows_ring_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    return epmoei_cuda_status((int32_t)epmoei_launch_dependent(sort_rows_ring_kernel, dim3((unsigned)sms),
                                                               dim3(kWarps * 32), kSharedBytes, stream, c),
                              "sort_rows_sm90");
}
