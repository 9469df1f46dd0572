/* The loops over K of the wgmma grouped GEMM on 4-bit weights: what a warpgroup of consumers does with the stages of a
 * tile. Registers of weights that the tensor cores still read must not be written, and ptxas sees to it only where all
 * products under way end before control flow meets that of another loop. */
#ifndef EPMOEI_GROUPED_GEMM_W4_LOOPS_SM90_CUH
#define EPMOEI_GROUPED_GEMM_W4_LOOPS_SM90_CUH

#include "kernels/grouped_gemm_w4_codes_sm90.cuh"
#include "kernels/ptx_wgmma_registers.cuh"

namespace
{

/* A consumer's place in the ring of stages. */
struct place_t {
    uint32_t base; /* address of the stage */
    uint32_t full; /* and of its barrier */
    uint32_t bits; /* bit 0: parity of the phase to wait for; the others are the caller's */

    __device__ __forceinline__ void begin(const block_t &b)
    {
        base = b.base;
        full = ptx_shared_address(b.barriers->full);
        bits = 0;
    }
    __device__ __forceinline__ uint32_t parity() const { return bits & 1; }
    __device__ __forceinline__ void advance(const block_t &b, bool really)
    {
        const uint32_t next = base + b.line.layout.stage_bytes;
        const bool wraps = next == b.base + b.line.layout.staging;
        const uint32_t first_full = ptx_shared_address(b.barriers->full);
        if (really) {
            base = wraps ? b.base : next;
            full = wraps ? first_full : full + 8;
            bits ^= wraps;
        }
    }
};

/* From the barrier of a full stage to where this thread says that its warp has read it: lane i to block i of the
 * cluster, whose copies will overwrite it. */
template <typename Cut> __device__ __forceinline__ uint32_t empty_offset(const block_t &b)
{
    if (Cut::kCluster == 1) return kEmptyFromFull;
    const uint32_t own = ptx_shared_address(b.barriers->empty), full = ptx_shared_address(b.barriers->full);
    return ptx_cluster_address(own, threadIdx.x % 32 % Cut::kCluster) - full;
}

/* acc += w x^T from block `first` of K on, for tiles of kN of many tokens. 16 columns are dequantised while the tensor
 * cores multiply those before: each has registers of its own until the product after it has begun and it is known to
 * have ended. Nothing is under way from one stage to the next: the registers that it reads would be live in every other
 * width's code too. */
template <kind_t kKind, typename Cut, int kN>
__device__ __forceinline__ void multiply_many(const weights_t &w, const block_t &b, place_t &place,
                                              float (&acc)[Cut::kTiles][Cut::kMaxN / 2], int32_t first)
{
    constexpr int kTiles = Cut::kTiles, kSteps = Cut::kDepth * kBlockK / 16;
    const uint32_t empty = empty_offset<Cut>(b);
    const shared_layout_t &layout = b.line.layout;
    uint32_t a[2][kTiles][4];
    codes_t<kKind, Cut> from;
    from.begin(w, b, ptx_thread_index(), first);
    wait_barrier(place.full, place.parity());
    from.load_words(place.base, 0);
    if (kKind == W4_LONG) {
        from.load_groups(w, layout, place.base, 0);
        from.left = w.group_blocks - 1;
    }
    from.make(a[0], w, layout, place.base, 0);
    for (int block = first + Cut::kDepth;; block += Cut::kDepth) {
        const uint32_t done = place.full + empty;
        const bool more = block < w.blocks;
        const uint32_t x = descriptor_start(place.base), x_block = b.line.max_n * kBlockK * 2 / 16;
#pragma unroll
        for (int s = 0; s < kSteps; s++) {
            uint32_t(&next)[kTiles][4] = a[(s + 1) % 2];
#pragma unroll
            for (int t = 0; t < kTiles; t++) ptx_define(a[s % 2][t]);
            ptx_wgmma_fence();
#pragma unroll
            for (int t = 0; t < kTiles; t++)
                ptx_wgmma_registers<kN>::run(acc[t], a[s % 2][t], wgmma_descriptor(x + s / 4 * x_block + s % 4 * 2));
            ptx_wgmma_commit();
            if (s > 0) ptx_wgmma_wait<1>();
            if (s == kSteps - 1) {
                /* Behind the last stage once more what is there already: a branch would cost more. */
                place.advance(b, more);
                if (kKind != W4_LONG && more) from.left -= 2 * Cut::kDepth;
                wait_barrier(place.full, place.parity());
            }
            if (s % 4 == 3) {
                const int depth = (s + 1) / 4 % Cut::kDepth;
                from.load_words(place.base, depth);
                if (kKind == W4_LONG)
                    from.take_group(w, layout, place.base, depth,
                                    depth == 0 ? more : block - Cut::kDepth + depth < w.blocks);
            }
            from.make(next, w, layout, place.base, (s + 1) % kSteps);
        }
        ptx_wgmma_wait<0>();
        __syncwarp(); /* other lanes' loads of codes and scales, for which one arrives */
        ptx_mbarrier_arrive_if(done, threadIdx.x % 32 < Cut::kCluster);
        if (!more) break;
    }
    place.advance(b, true);
}

/* Four products, 64 columns, of which x is the first descriptor. */
template <int kN, int kRegisters>
__device__ __forceinline__ void multiply_block(float (&acc)[kRegisters], uint32_t (&a)[4][4], uint32_t x)
{
#pragma unroll
    for (int s = 0; s < 4; s++) ptx_define(a[s]);
    ptx_wgmma_fence();
#pragma unroll
    for (int s = 0; s < 4; s++) ptx_wgmma_registers<kN>::run(acc, a[s], wgmma_descriptor(x + s * 2));
    ptx_wgmma_commit();
}

/* The same for few tokens. */
template <kind_t kKind, typename Cut, int kN>
__device__ __forceinline__ void multiply_few(const weights_t &w, const block_t &b, place_t &place,
                                             float (&acc)[Cut::kMaxN / 2], int32_t first)
{
    static_assert(Cut::kCluster == 1, "nobody else reads what is given back");
    const shared_layout_t &layout = b.line.layout;
    const uint32_t x_block = b.line.max_n * kBlockK * 2 / 16;
    few_codes_t<kKind, Cut> from;
    from.begin(w, b, ptx_thread_index());
    for (int block = first; block < w.blocks; block += Cut::kDepth) {
        wait_barrier(place.full, place.parity());
        const uint32_t x = descriptor_start(place.base);
        const int blocks = min(Cut::kDepth, w.blocks - block);
#pragma unroll 1
        for (int d = 0; d < blocks; d++) {
            uint32_t a[4][4];
            from.make(a, w, layout, place.base, d, block + d);
            multiply_block<kN>(acc, a, x + d * x_block);
            ptx_wgmma_wait<0>();
        }
        __syncwarp(); /* other lanes' loads of codes and scales, for which one arrives */
        ptx_mbarrier_arrive_if(place.full + kEmptyFromFull, threadIdx.x % 32 == 0);
        place.advance(b, true);
    }
}

/* acc += w x^T over the first `blocks` blocks of 64 columns, whole rounds, of weights that whole_codes_t takes. A
 * weight takes about as many instructions as the tensor cores take clocks for it, so this is the loop that matters: a
 * batch of products, of kSteps times 16 columns, begins together, and what the next one needs is made while it runs. */
template <kind_t kKind, typename Cut, int kN> struct whole_loop_t {
    static constexpr int kTiles = Cut::kTiles, kDepth = Cut::kDepth;
    static constexpr int kSteps = Cut::kMaxN > 32 ? 2 : 4; /* what registers allow */
    static constexpr int kOfBlock = 4 / kSteps, kBatches = kWholeBlocks<Cut> * kOfBlock;
    static_assert(kBatches % 2 == 0, "a round begins with the first of two sets of registers");

    const weights_t &w;
    const block_t &b;
    place_t &place;
    float (&acc)[kTiles][Cut::kMaxN / 2];
    whole_codes_t<kKind, Cut> from;
    uint32_t a[2][kSteps][kTiles][4];
    uint32_t x; /* descriptor of the stage's tokens */
    uint32_t empty;
    uint32_t done; /* the barrier of a stage that products under way may still read */

    __device__ __forceinline__ void give_back() const
    {
        __syncwarp(); /* other lanes' loads of codes and scales, for which one arrives */
        ptx_mbarrier_arrive_if(done, threadIdx.x % 32 < Cut::kCluster);
    }

    /* Batch kBatch of a round, whose words are here, and those after it: a template, since they must not become a loop.
     * Nothing is under way from one round to the next. The registers that it reads would be live in every other width's
     * code too. */
    template <int kBatch> __device__ __forceinline__ void run_batches(bool last_round)
    {
        constexpr int kBlock = kBatch / kOfBlock, kInStage = kBlock % kDepth, kStep = kBatch % kOfBlock * kSteps;
        constexpr bool kBegins = kInStage == 0 && kStep == 0;
        constexpr bool kEndsBlock = kStep + kSteps == 4, kEndsStage = kEndsBlock && kInStage == kDepth - 1;
        constexpr bool kLast = kBatch == kBatches - 1;
        uint32_t(&now)[kSteps][kTiles][4] = a[kBatch % 2];
        /* The same in all threads, which lets the compiler keep it where the instruction wants it. */
        if (kBegins) x = __shfl_sync(0xFFFFFFFFu, descriptor_start(place.base), 0);
        if (kStep == 0) from.take_groups(w, kBlock);
        from.template make<kSteps>(now, kStep);
#pragma unroll
        for (int i = 0; i < kSteps * kTiles; i++) ptx_define(now[i / kTiles][i % kTiles]);
        ptx_wgmma_fence();
        const uint32_t x_block = x + kInStage * (b.line.max_n * kBlockK * 2 / 16);
#pragma unroll
        for (int i = 0; i < kSteps * kTiles; i++)
            ptx_wgmma_registers<kN>::run(acc[i % kTiles], now[i / kTiles][i % kTiles],
                                         wgmma_descriptor(x_block + (kStep + i / kTiles) * 2));
        ptx_wgmma_commit();
        if (!kLast) ptx_wgmma_wait<1>();
        if (kBegins && kBatch > 0) give_back();
        if (kEndsStage) {
            done = place.full + empty;
            /* Behind the last stage once more what is there already: a branch would cost more. */
            place.advance(b, !kLast || !last_round);
            wait_barrier(place.full, place.parity());
        }
        if (kEndsBlock) from.load(b.line.layout, place.base, (kBlock + 1) % kWholeBlocks<Cut>);
        if constexpr (!kLast) {
            run_batches<kBatch + 1>(last_round);
        } else {
            ptx_wgmma_wait<0>();
            give_back();
        }
    }

    __device__ __forceinline__ void run(int32_t blocks)
    {
        empty = empty_offset<Cut>(b);
        from.begin(w, b, ptx_thread_index());
        wait_barrier(place.full, place.parity());
        from.load(b.line.layout, place.base, 0);
#pragma unroll 1
        for (int32_t block = 0; block < blocks; block += kWholeBlocks<Cut>)
            run_batches<0>(block + kWholeBlocks<Cut> >= blocks);
        place.advance(b, true);
    }
};

template <kind_t kKind, typename Cut, int kN>
__device__ __forceinline__ void multiply_whole(const weights_t &w, const block_t &b, place_t &place,
                                               float (&acc)[Cut::kTiles][Cut::kMaxN / 2], int32_t blocks)
{
    whole_loop_t<kKind, Cut, kN> loop = {w, b, place, acc};
    loop.run(blocks);
}

/* kKind: for what no whole stage is taken for. */
template <kind_t kKind, typename Cut, int kN>
__device__ __forceinline__ void multiply(const weights_t &w, const block_t &b, place_t &place,
                                         float (&acc)[Cut::kTiles][Cut::kMaxN / 2])
{
    int32_t first = 0;
    if constexpr (kKind != W4_SHORT) {
        first = w.whole;
        if (first > 0) {
            if (kKind == W4_LONG && w.zeros)
                multiply_whole<W4_LONG_ZEROS, Cut, kN>(w, b, place, acc, first);
            else
                multiply_whole<kKind, Cut, kN>(w, b, place, acc, first);
        }
    }
    if (first == w.blocks) return;
    constexpr kind_t kRest = kKind == MXFP4 ? MXFP4_LARGE : kKind;
    if constexpr (Cut::kFew)
        multiply_few<kRest, Cut, kN>(w, b, place, acc[0], first);
    else
        multiply_many<kRest, Cut, kN>(w, b, place, acc, first);
}

} // namespace

#endif
