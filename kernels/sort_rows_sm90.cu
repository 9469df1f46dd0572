/* Rows of x into the sorted order of a grouped GEMM, to[r] = x[row_index[r] / x_row_divisor], where there are many:
 * copied through shared memory in bulk, since threads can hold too little on its way. Each warp's first thread keeps a
 * ring of pieces of rows: those that come and those that leave. Floor: bytes = 2*R*K*b, of which the reads of a token's
 * k slots hit the L2 cache. */
#include "kernels/grouped_gemm.h"
#include "kernels/launch_cuda.cuh"

namespace
{

constexpr int kWarps = 4;
constexpr int kStages = 4;
constexpr int kPieceBytes = 12 * 1024;
constexpr int kSharedBytes = kWarps * kStages * kPieceBytes;
constexpr int64_t kFewestBytes = 8 << 20; /* below, the form without a ring starts sooner */

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

/* The pieces that fall to one thread. */
struct walk_t {
    int64_t index; /* over pieces of rows */
    int64_t end;
    int32_t step;
    int32_t row;
    int32_t source;

    /* On the piece at index or the next one whose row holds a slot; false behind the last. */
    __device__ __forceinline__ bool enter(const copy_t &c)
    {
        for (; index < end; index += step) {
            row = (int32_t)(index / c.pieces);
            const int32_t slot = c.row_index ? c.row_index[row] : row;
            source = slot / c.x_row_divisor;
            if (slot >= 0 && slot < c.num_slots) return true;
        }
        return false;
    }
    __device__ __forceinline__ int32_t offset(const copy_t &c) const
    {
        return (int32_t)(index % c.pieces) * c.piece_bytes;
    }
    __device__ __forceinline__ uint32_t bytes(const copy_t &c) const
    {
        return (uint32_t)min(c.piece_bytes, c.row_bytes - offset(c));
    }
};

/* Piece n is fetched into stage n % kStages once the piece that left from there has been read. */
__device__ __forceinline__ void fetch(const copy_t &c, const walk_t &from, uint32_t shared, uint32_t full)
{
    ptx_mbarrier_arrive_expect(full, from.bytes(c));
    ptx_bulk_load(shared, c.x + (int64_t)from.source * c.row_bytes + from.offset(c), from.bytes(c), full);
}

__global__ void __launch_bounds__(kWarps * 32) sort_rows_ring_kernel(const copy_t c)
{
    extern __shared__ __align__(1024) char shared[];
    __shared__ uint64_t barriers[kWarps][kStages];
    const int warp = threadIdx.x / 32;
    const bool copies = threadIdx.x % 32 == 0;
    if (copies) {
        for (int i = 0; i < kStages; i++) ptx_mbarrier_init(ptx_shared_address(&barriers[warp][i]), 1);
        ptx_fence_barrier_init();
    }
    epmoei_begin_dependent();
    if (!copies) return;
    const int32_t begin = c.expert_offsets ? c.expert_offsets[0] : 0;
    const int32_t end =
        c.expert_offsets ? c.expert_offsets[c.num_experts] : epmoei_device_tokens(c.num_rows_dev, c.max_rows);
    const uint32_t stages = ptx_shared_address(shared) + warp * kStages * kPieceBytes;
    const uint32_t full = ptx_shared_address(barriers[warp]);

    walk_t ahead = {};
    ahead.step = (int32_t)(gridDim.x * kWarps);
    ahead.index = (int64_t)begin * c.pieces + blockIdx.x * kWarps + warp;
    ahead.end = (int64_t)end * c.pieces;
    bool more = ahead.enter(c);
    walk_t at = ahead;
    int32_t fetched = 0, stored = 0;
    for (; more && fetched < kStages - 1; fetched++) {
        fetch(c, ahead, stages + fetched * kPieceBytes, full + 8 * fetched);
        ahead.index += ahead.step;
        more = ahead.enter(c);
    }
    for (; stored < fetched; stored++) {
        const int32_t stage = stored % kStages;
        while (!ptx_mbarrier_try_wait(full + 8 * stage, (uint32_t)(stored / kStages) & 1)) {
        }
        ptx_bulk_store(c.to + (int64_t)at.row * c.row_bytes + at.offset(c), stages + stage * kPieceBytes, at.bytes(c));
        ptx_bulk_commit();
        at.index += at.step;
        at.enter(c);
        if (!more) continue;
        ptx_bulk_wait_read<1>(); /* the piece before this one has left the stage that is next */
        fetch(c, ahead, stages + fetched % kStages * kPieceBytes, full + 8 * (fetched % kStages));
        fetched++;
        ahead.index += ahead.step;
        more = ahead.enter(c);
    }
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
