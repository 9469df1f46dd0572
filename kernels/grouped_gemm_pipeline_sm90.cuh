/* What the roles of the wgmma grouped GEMM share: how shared memory is laid out, which tiles there are and in which
 * order a block walks them. */
#ifndef EPMOEI_GROUPED_GEMM_PIPELINE_SM90_CUH
#define EPMOEI_GROUPED_GEMM_PIPELINE_SM90_CUH

#include "kernels/deal_tiles_sm90.cuh"
#include "kernels/plain_tiles.h"

namespace
{

constexpr int kBlockW = 128; /* weight rows of a block */
constexpr int kWeightBytes = kBlockW * kBlockK * 2;
static_assert(kBlockW == EPMOEI_PLAIN_TILE_ROWS && kBlockK == EPMOEI_PLAIN_TILE_COLS, "a step of a block is a tile's");
constexpr int kFewestStages = 3, kMostStages = 8;
constexpr int kCuts = kMostStages - kFewestStages + 1;
constexpr int kNotes = 3;                /* tiles that are noted: one is stored, one is multiplied, one is looked up */
constexpr int kNarrow = 64, kWide = 256; /* most tokens of the two kernels */

struct pipeline_t {
    int32_t max_n;       /* most tokens of a tile: a multiple of 32 */
    int32_t stage_bytes; /* of all stages */
    int32_t way;         /* epilogue_way_t */
    int32_t cluster;     /* blocks that share their tokens: 1 or 2 */
    int32_t ordered;     /* experts by the width of their tiles instead of by number */
};

/* A set for each number of stages. */
struct barriers_t : pipeline_barriers_t<kCuts * kMostStages, kNotes> {
    deal_t<kMostStages> deal;
};

/* Byte offsets in shared memory: stages, staging of two warpgroups, notes of kNotes tiles, barriers, tile list. */
struct shared_layout {
    int32_t staging, notes, notes_bytes, barriers, cumulative;
    __host__ __device__ explicit shared_layout(const pipeline_t &l)
    {
        staging = l.stage_bytes;
        notes = staging + 2 * kStagingBytes;
        notes_bytes = (int32_t)sizeof(notes_t) + 3 * l.max_n * 4;
        barriers = notes + kNotes * notes_bytes;
        cumulative = barriers + (int32_t)sizeof(barriers_t);
    }
};

__device__ __forceinline__ int32_t round_width(int32_t rows)
{
    return rows <= 64 ? (rows + 7) / 8 * 8 : (rows + 15) / 16 * 16;
}

/* The width of an expert's tiles; its rows are cut evenly into as few as hold them. */
__device__ __forceinline__ int32_t tile_width(int32_t rows, int32_t row_tiles)
{
    return round_width((rows + row_tiles - 1) / row_tiles);
}

/* order[i] = the expert at place i, widest tiles first, so that blocks have tiles alike at the same time and the
 * last ones are short. Ranked by counting, which is for a few hundred experts. */
__device__ __forceinline__ void order_experts(const gemm_params_t &p, int32_t max_n, int16_t *order, int16_t *widths)
{
    for (int32_t e = (int32_t)threadIdx.x; e < p.num_experts; e += kThreads) {
        const int32_t rows = gemm_expert_offset(p, e + 1) - gemm_expert_offset(p, e);
        widths[e] = rows > 0 ? (int16_t)tile_width(rows, (rows + max_n - 1) / max_n) : (int16_t)0;
    }
    __syncthreads();
    for (int32_t e = (int32_t)threadIdx.x; e < p.num_experts; e += kThreads) {
        const int32_t own = widths[e];
        int32_t place = 0;
        for (int32_t other = 0; other < p.num_experts; other++)
            place += widths[other] > own || (widths[other] == own && other < e);
        order[place] = (int16_t)e;
    }
    __syncthreads();
}

__device__ __forceinline__ tile_t find_tile(const gemm_params_t &p, const int32_t *cumulative, const int16_t *order,
                                            int64_t index, int32_t clusters)
{
    return find_even_tile(p, cumulative, order, index, clusters, round_width);
}

/* What every role needs. */
struct block_t {
    pipeline_t line;
    char *shared;
    uint32_t base; /* of the stages */
    char *notes;
    int32_t notes_bytes;
    barriers_t *barriers;
    const int32_t *cumulative; /* row tiles of the experts at the places below */
    const int16_t *order;      /* the expert at a place, or NULL */
    int64_t tiles;
    int32_t first_tile;
    int32_t tile_step;
    int32_t clusters; /* over the weight rows */
    int32_t rank;     /* in the cluster */
    int32_t k_steps;
    int32_t *dealt; /* the word by which tiles are dealt; NULL: they are taken in turn */

    /* The number of the block's tile `count`. */
    __device__ __forceinline__ int64_t tile_number(int32_t count) const
    {
        return dealt && count > 0 ? barriers->deal.number(count) : first_tile + (int64_t)count * tile_step;
    }
    /* For the next one, in one thread. */
    __device__ __forceinline__ void ask() const
    {
        if (dealt && rank == 0) barriers->deal.ask();
    }

    __device__ __forceinline__ notes_t *notes_of(int32_t i) const { return (notes_t *)(notes + i * notes_bytes); }
    __device__ __forceinline__ int32_t *rows_of(int32_t i) const { return (int32_t *)(notes_of(i) + 1); }
    __device__ __forceinline__ float2 *scales_of(int32_t i) const { return (float2 *)(rows_of(i) + line.max_n); }
};

/* How the stages' memory is cut: into as many stages as the widest tile of an expert allows, since what is under way
 * must not become less where tiles are narrow. Experts come by that width, so that a block cuts anew a few times at
 * most. */
struct cut_t {
    int32_t stages;
    int32_t bytes; /* of a stage */
    uint32_t full; /* its barriers */
    __device__ __forceinline__ uint32_t empty() const { return full + kCuts * kMostStages * 8; }
};

__device__ __forceinline__ int32_t step_bytes(int32_t width) { return kWeightBytes + width * kBlockK * 2; }

__device__ __forceinline__ cut_t cut_for(const block_t &b, const tile_t &tile)
{
    constexpr int kSwizzleBytes = 1024;
    cut_t cut;
    cut.stages = min(kMostStages, b.line.stage_bytes / step_bytes(b.line.ordered ? tile.widest : b.line.max_n));
    cut.bytes = b.line.stage_bytes / cut.stages & -kSwizzleBytes;
    cut.full = ptx_shared_address(&b.barriers->full[(cut.stages - kFewestStages) * kMostStages]);
    return cut;
}

/* The steps of this block's tiles in order, and what the copies of a step need. */
struct walk_t {
    int32_t count; /* of tiles entered */
    tile_t tile;
    int32_t step;
    int32_t w_row;      /* of the tensor map: plain weight rows, */
    int32_t w_group;    /* or groups of 8 gate and 8 up rows */
    const char *w_tile; /* of weights in tiles the first step's, else NULL; */
    int32_t w_bytes;    /* and those of a step: a cluster's last block may have none */
    int32_t first;      /* this block's part of the tile's tokens */
    int32_t part;

    /* On the next tile that has rows; false behind the last. The whole warp. */
    __device__ __forceinline__ bool enter(const gemm_params_t &p, const block_t &b)
    {
        for (;;) {
            const int64_t index = b.tile_number(count++);
            if (index >= b.tiles) return false;
            tile = find_tile(p, b.cumulative, b.order, index, b.clusters);
            if (tile.rows == 0) {
                if (ptx_elect_one()) b.ask();
                continue;
            }
            const int32_t block = tile.cluster * b.line.cluster + b.rank;
            const int32_t half = b.line.cluster == 1 ? tile.width : (tile.width / 2 + 7) / 8 * 8;
            step = 0;
            w_row = p.gated ? 0 : block * kBlockW;
            w_group = p.gated ? block * (kBlockW / 16) : 0;
            w_bytes = max(0, min(kBlockW, p.n - block * kBlockW)) * kRowBytes;
            w_tile = p.tiled ? (const char *)p.w + ((int64_t)tile.expert * p.n + block * kBlockW) * p.k * 2 : nullptr;
            first = b.rank * half;
            part = b.rank == 0 ? half : tile.width - half;
            return true;
        }
    }
    __device__ __forceinline__ bool advance(const gemm_params_t &p, const block_t &b)
    {
        if (++step < b.k_steps) return true;
        return enter(p, b);
    }
};

} // namespace

#endif
