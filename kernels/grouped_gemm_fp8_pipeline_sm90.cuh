/* What the roles of the FP8 grouped GEMM share: how shared memory is laid out, which tiles there are and in which order
 * a block walks them. */
#ifndef EPMOEI_GROUPED_GEMM_FP8_PIPELINE_SM90_CUH
#define EPMOEI_GROUPED_GEMM_FP8_PIPELINE_SM90_CUH

#include "kernels/deal_tiles_sm90.cuh"
#include "kernels/grouped_gemm_fp8_epilogue_sm90.cuh"
#include "kernels/grouped_gemm_tiles_sm90.cuh"
#include "kernels/quantize_fp8.h"

namespace
{

constexpr int kTileW = 256; /* weight rows of a block: four wgmma of 64, or 128 gate and their 128 up rows */
constexpr int kHalfW = 128;
constexpr int kTileK = EPMOEI_FP8_COLUMNS; /* columns under one scale */
static_assert(kTileK == kRowBytes, "a step is a row of the swizzle");
constexpr int kWeightBytes = kTileW * kTileK;
constexpr int kMostStages = 6;
constexpr int kNotes = 4; /* tiles that are looked up ahead */
/* Scales that one copy brings are whole runs of 16 bytes, at the beginning too, where a tile has a part of one. */
constexpr int kScaleRun = 4;
constexpr int kWeightScales = 4; /* of a step: for each 128 weight rows, of blocks of 8 at even and at odd places */

struct pipeline_t {
    int32_t tokens;  /* most of a tile: 64 or 128 */
    int32_t stages;  /* <= kMostStages */
    int32_t way;     /* fp8_way_t */
    int32_t cluster; /* blocks that share their tokens: 1 or 2 */
    int32_t k_steps; /* of kTileK columns */
    /* Steps of a shared tile that one warpgroup goes ahead of the other, 0 to leave it to chance. If they went together
     * both would store at once, and nothing would multiply; stages that wait for the second one cannot be filled. */
    int32_t lead;
};

struct barriers_t : pipeline_barriers_t<kMostStages, kNotes> {
    deal_t<kMostStages> deal;
};

/* Byte offsets in shared memory: stages, their scales (tokens', then weights'), staging of the warps, notes, barriers,
 * tile list. */
struct shared_layout {
    int32_t stage, scales, scales_each, staging, notes, notes_bytes, barriers, cumulative;
    __host__ __device__ explicit shared_layout(const pipeline_t &l)
    {
        stage = kWeightBytes + l.tokens * kTileK;
        scales = l.stages * stage;
        scales_each = l.tokens + kScaleRun + kWeightScales;
        staging = scales + l.stages * scales_each * 4;
        notes = staging + kConsumerWarps * kFp8StagingBytes;
        notes_bytes = (int32_t)sizeof(notes_t) + 3 * l.tokens * 4;
        barriers = notes + kNotes * notes_bytes;
        cumulative = barriers + (int32_t)sizeof(barriers_t);
    }
};

/* Over steps that are another's. */
__device__ __forceinline__ void skip_steps(ring_t &ring, int32_t steps, int32_t stages)
{
    const int32_t stage = ring.stage + steps;
    ring.parity ^= stage / stages & 1;
    ring.stage = stage % stages;
}

/* What every role needs. */
struct block_t {
    pipeline_t line;
    char *shared;
    uint32_t base; /* of the stages */
    int32_t stage_bytes;
    char *notes;
    int32_t notes_bytes;
    barriers_t *barriers;
    float *scales; /* [stages,scales_each], a tile's first at first_scale */
    int32_t scales_each;
    const int32_t *cumulative; /* row tiles of the experts below */
    int64_t tiles;
    int32_t first_tile;
    int32_t tile_step;
    int32_t *dealt;   /* of the rows; NULL: tiles are taken in turn */
    int32_t clusters; /* over the weight rows */

    __device__ __forceinline__ notes_t *notes_of(int32_t i) const { return (notes_t *)(notes + i * notes_bytes); }
    __device__ __forceinline__ int32_t *rows_of(int32_t i) const { return (int32_t *)(notes_of(i) + 1); }
    __device__ __forceinline__ float2 *scales_of(int32_t i) const { return (float2 *)(rows_of(i) + line.tokens); }
    __device__ __forceinline__ float *weight_scales_of(int32_t stage) const
    {
        return scales + (stage + 1) * scales_each - kWeightScales;
    }
    /* In the cluster. */
    __device__ __forceinline__ int32_t rank() const
    {
        return line.cluster == 1 ? 0 : (int32_t)ptx_cluster_block_rank();
    }
    __device__ __forceinline__ int32_t w_block(const tile_t &tile) const
    {
        return tile.cluster * line.cluster + rank();
    }
    /* The number of the block's tile `count`. */
    __device__ __forceinline__ int64_t tile_number(int32_t count) const
    {
        return dealt && count > 0 ? barriers->deal.number(count) : first_tile + (int64_t)count * tile_step;
    }
    /* At every step of every tile, in one thread. */
    __device__ __forceinline__ void ask_at(int32_t step) const
    {
        if (dealt && rank() == 0 && step == max(0, line.k_steps - kAskAhead)) barriers->deal.ask();
    }
};

__device__ __forceinline__ int32_t first_scale(const tile_t &tile) { return tile.row % kScaleRun; }
__device__ __forceinline__ uint32_t scale_bytes(const tile_t &tile)
{
    return (first_scale(tile) + tile.rows + kScaleRun - 1) / kScaleRun * kScaleRun * 4;
}

/* Tiles of an expert follow each other, its token tiles fastest, so that blocks that run together share weights. All
 * but an expert's last tile are whole: 64 tokens cost the same as one. A tile here is `clusters` clusters' worth of
 * weight rows; block 0 of the cluster has the first ones. */
__device__ __forceinline__ tile_t find_tile(const gemm_params_t &p, const block_t &b, int64_t index)
{
    int32_t lo = 0, hi = p.num_experts;
    while (hi - lo > 1) {
        int32_t mid = (lo + hi) / 2;
        if ((int64_t)b.cumulative[mid] * b.clusters <= index)
            lo = mid;
        else
            hi = mid;
    }
    int32_t row_tiles = b.cumulative[lo + 1] - b.cumulative[lo];
    int32_t local = (int32_t)(index - (int64_t)b.cumulative[lo] * b.clusters);
    tile_t tile;
    tile.expert = lo;
    tile.row = gemm_expert_offset(p, lo) + local % row_tiles * b.line.tokens;
    tile.rows = min(b.line.tokens, gemm_expert_offset(p, lo + 1) - tile.row);
    tile.width = tile.rows <= 64 ? (tile.rows + 7) / 8 * 8 : (tile.rows + 15) / 16 * 16;
    tile.cluster = local / row_tiles;
    tile.alone = row_tiles == 1;
    return tile;
}

/* The steps of this block's tiles in order, and what the copies of a step need. */
struct walk_t {
    int32_t count; /* of tiles entered */
    tile_t tile;
    int32_t step;
    int32_t block; /* of weight rows */
    int32_t part;  /* of the tile's tokens, the first or the last ones, that this block fetches */

    __device__ __forceinline__ bool enter(const gemm_params_t &p, const block_t &b)
    {
        const int64_t index = b.tile_number(count++);
        if (index >= b.tiles) return false;
        tile = find_tile(p, b, index);
        const int32_t half = b.line.cluster == 1 ? tile.width : (tile.width / 2 + 7) / 8 * 8;
        const int32_t rank = b.rank();
        step = 0;
        block = tile.cluster * b.line.cluster + rank;
        part = rank == 0 ? half : tile.width - half;
        return true;
    }
    __device__ __forceinline__ bool advance(const gemm_params_t &p, const block_t &b)
    {
        if (++step < b.line.k_steps) return true;
        return enter(p, b);
    }
};

} // namespace

#endif
