/* Tiles of a persistent grouped GEMM by number, dealt to clusters as they become free. A cluster that took every
 * tile_step-th one would drift from its neighbours, by as much as tiles differ, and two tiles of one expert that run at
 * different times fetch its weights from memory twice.
 *
 * A cluster's first tile is its own number. For each later one a producer asks, some steps before it needs it; a warp
 * of the cluster's first block takes the next number from a word in global memory, which was 0 when the kernel began,
 * and leaves it in every block of the cluster, where whoever walks the tiles waits for it. */
#ifndef EPMOEI_DEAL_TILES_SM90_CUH
#define EPMOEI_DEAL_TILES_SM90_CUH

#include "kernels/grouped_gemm_tiles_sm90.cuh"

namespace
{

/* Steps before the end of a tile at which the next one is asked for: early enough for a trip to memory, and late enough
 * that tiles begin in the order of their numbers. */
constexpr int kAskAhead = 8;

/* In shared memory. Numbers fit 32 bits: a whole tile has 64 x 128 outputs or more, and 2^31 of them no memory. A
 * producer that loads its tile number i has seen a step of tile i - kMostStages released by the consumers of every
 * block of the cluster, even if a tile has but one step; they did so behind the copies and the notes of that tile, so
 * that everybody who walks the tiles has read its number: kMostStages + 2 places are more than enough. That rests on
 * every tile having rows: rows cut evenly into as few tiles as hold them leave none empty. */
template <int kMostStages> struct deal_t {
    static constexpr int kPlaces = kMostStages + 2;
    uint64_t dealt[kPlaces];
    uint64_t asked;
    int32_t numbers[kPlaces];

    __device__ __forceinline__ void init()
    {
        for (int i = 0; i < kPlaces; i++) ptx_mbarrier_init(ptx_shared_address(&dealt[i]), 1);
        ptx_mbarrier_init(ptx_shared_address(&asked), 1);
    }

    /* The block's tile number `count`, which is not its first. */
    __device__ __forceinline__ int32_t number(int32_t count) const
    {
        const int32_t place = (count - 1) % kPlaces;
        const uint32_t barrier = ptx_shared_address(&dealt[place]);
        while (!ptx_mbarrier_try_wait_cluster(barrier, (count - 1) / kPlaces % 2)) {
        }
        return *(const volatile int32_t *)&numbers[place];
    }

    __device__ __forceinline__ void ask() { ptx_mbarrier_arrive(ptx_shared_address(&asked)); }

    /* In one thread of the cluster's first block, for every count from 1 on: what the others get as number(count),
     * which is `tiles` when there are no more. `first`: the tile that word 0 stands for. */
    __device__ __forceinline__ int64_t deal(int32_t count, int32_t *word, int64_t first, int64_t tiles, int32_t cluster)
    {
        const int32_t place = (count - 1) % kPlaces;
        while (!ptx_mbarrier_try_wait(ptx_shared_address(&asked), (count - 1) % 2)) {
        }
        const int64_t next = min(first + atomicAdd(word, 1), tiles);
        for (int32_t block = 0; block < cluster; block++)
            ptx_store_and_arrive_at(ptx_shared_address(&numbers[place]), (uint32_t)next,
                                    ptx_shared_address(&dealt[place]), block);
        return next;
    }
};

} // namespace

#endif
