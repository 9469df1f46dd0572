/* What the roles of the wgmma grouped GEMM on 4-bit weights share: how a kernel is cut, how shared memory is laid out,
 * which tiles there are and in which order a block walks them. */
#ifndef EPMOEI_GROUPED_GEMM_W4_PIPELINE_SM90_CUH
#define EPMOEI_GROUPED_GEMM_W4_PIPELINE_SM90_CUH

#include "kernels/grouped_gemm_tiles_sm90.cuh"
#include "kernels/quant_tiles.h"

namespace
{

constexpr int kMostStages = 16;
static_assert(kBlockK == EPMOEI_TILE_COLS, "x comes in the blocks of the codes");

/* kGroups: warpgroups that consume. kTiles: of 64 weight rows, for each of them. kMaxN: most tokens. kDepth: blocks of
 * 64 columns in a stage. kFew: which loop over K. kCluster: blocks that share their tokens, 1 or 2. kBlocks: that share
 * an SM. kStep: widths are multiples of it. kRegisters: of a consumer's thread, and of a producer's; all together no
 * more than the block starts with, as no others come free. */
struct pair_t {
    static constexpr int kGroups = 2, kTiles = 1, kMaxN = 16, kDepth = 4, kCluster = 1, kStep = 8, kBlocks = 2;
    static constexpr int kRegisters = 96, kProducerRegisters = 48;
    static constexpr bool kFew = true;
};
struct narrow_t {
    static constexpr int kGroups = 4, kTiles = 1, kMaxN = 32, kDepth = 4, kCluster = 1, kStep = 8, kBlocks = 1;
    static constexpr int kRegisters = 104, kProducerRegisters = 56;
    static constexpr bool kFew = true;
};
struct middle_t {
    static constexpr int kGroups = 1, kTiles = 2, kMaxN = 96, kDepth = 2, kCluster = 1, kStep = 16, kBlocks = 2;
    static constexpr int kRegisters = 208, kProducerRegisters = 48;
    static constexpr bool kFew = false;
};
struct wide_t {
    static constexpr int kGroups = 2, kTiles = 1, kMaxN = 256, kDepth = 1, kCluster = 2, kStep = 16, kBlocks = 1;
    static constexpr int kRegisters = 224, kProducerRegisters = 56;
    static constexpr bool kFew = false;
};
constexpr int kMostGroups = 4;
/* Of a block: a warpgroup beside the consumers. */
template <typename Cut> constexpr int kCutThreads = (1 + Cut::kGroups) * kWarpgroup;
/* Tiles of 64 weight rows in a block. */
template <typename Cut> constexpr int kCutTiles = Cut::kGroups *Cut::kTiles;

/* The weights of a call, laid out as kernels/grouped_gemm_quant.h says. */
struct weights_t {
    const char *data;
    const char *scales;
    const char *zeros; /* W4; NULL = 8 */
    int32_t tiles;     /* of 64 rows, of an expert */
    int32_t blocks;    /* of 64 columns */
    int32_t groups;
    int32_t group_blocks; /* blocks of a group; 0 when a block has two groups */
    int32_t whole;        /* blocks that whole_codes_t takes, in whole rounds */
    int32_t scales_bytes; /* of 64 rows and one group */
    int32_t pair_bytes;   /* of the scales of two rows */
    epmoe_dtype_t scales_dtype;
    uint32_t base; /* 128 twice as bf16, which the compiler would not keep in a register if it knew */
};

/* Byte offsets, made on the host so that they are constants to the kernel. */
struct shared_layout_t {
    /* A stage: tokens [kDepth][max_n], codes [tile][kDepth], scales and zeros [tile][group] of the groups that begin in
     * it. */
    int32_t codes;
    int32_t scales;
    int32_t zeros;
    int32_t stage_bytes;
    /* Shared memory: stages, staging of each warpgroup, notes of two tiles, barriers, tile list. */
    int32_t staging;
    int32_t notes;
    int32_t notes_bytes;
    int32_t barriers;
    int32_t cumulative;
};

struct pipeline_t {
    int32_t max_n;  /* most tokens of a tile: a multiple of 16 */
    int32_t noted;  /* tokens that a tile's notes have room for: the epilogue reads 32 at a time */
    int32_t stages; /* <= kMostStages */
    int32_t way;    /* epilogue_way_t */
    shared_layout_t layout;
};

struct barriers_t {
    uint64_t full[kMostStages];
    uint64_t empty[kMostStages];
    uint64_t notes_full[2];
    uint64_t notes_empty[2];
    staging_barriers_t staging[kMostGroups];
    int32_t warp_sums[(1 + kMostGroups) * kWarpgroup / 32];
};
/* From a barrier of full stages to that of the same stage when empty: one address serves for both. */
constexpr uint32_t kEmptyFromFull = offsetof(barriers_t, empty) - offsetof(barriers_t, full);
constexpr uint32_t kNotesEmptyFromFull = offsetof(barriers_t, notes_empty) - offsetof(barriers_t, notes_full);

template <typename Cut> shared_layout_t shared_layout(const pipeline_t *l, const weights_t *w)
{
    const int32_t tiles = kCutTiles<Cut>, groups = tiles * Cut::kDepth * (w->group_blocks ? 1 : 2);
    shared_layout_t layout;
    layout.codes = Cut::kDepth * l->max_n * kBlockK * 2;
    layout.scales = layout.codes + tiles * Cut::kDepth * EPMOEI_TILE_BYTES;
    layout.zeros = layout.scales + groups * w->scales_bytes;
    /* The swizzle counts from multiples of 1024. */
    layout.stage_bytes = (int32_t)epmoei_round_up(layout.zeros + (w->zeros ? groups * EPMOEI_TILE_ROWS : 0), 1024);
    layout.staging = l->stages * layout.stage_bytes;
    layout.notes = layout.staging + Cut::kGroups * kStagingBytes;
    layout.notes_bytes = (int32_t)sizeof(notes_t) + 3 * l->noted * 4;
    layout.barriers = layout.notes + 2 * layout.notes_bytes;
    layout.cumulative = layout.barriers + (int32_t)sizeof(barriers_t);
    return layout;
}

template <typename Cut> __device__ __forceinline__ int32_t round_width(int32_t rows)
{
    return (rows + Cut::kStep - 1) / Cut::kStep * Cut::kStep;
}

/* What every role needs. */
struct block_t {
    const pipeline_t &line;
    char *shared;
    uint32_t base; /* of the stages */
    barriers_t *barriers;
    const int32_t *cumulative;
    int64_t tiles;
    int64_t first_tile;
    int64_t tile_step;
    int32_t clusters; /* over the weight rows */
    int32_t rank;     /* in the cluster */

    __device__ __forceinline__ notes_t *notes_of(int32_t i) const
    {
        return (notes_t *)(shared + line.layout.notes + i * line.layout.notes_bytes);
    }
    __device__ __forceinline__ int32_t *rows_of(int32_t i) const { return (int32_t *)(notes_of(i) + 1); }
    __device__ __forceinline__ float2 *scales_of(int32_t i) const { return (float2 *)(rows_of(i) + line.noted); }
    /* The first 64 weight rows of this block in a tile, counted in such tiles of 64. */
    template <typename Cut> __device__ __forceinline__ int32_t first_w_tile(const tile_t &tile) const
    {
        return (tile.cluster * Cut::kCluster + rank) * kCutTiles<Cut>;
    }
};

template <typename Cut>
__device__ __forceinline__ tile_t find_tile(const gemm_params_t &p, const block_t &b, int64_t index)
{
    return find_even_tile(p, b.cumulative, nullptr, index, b.clusters, round_width<Cut>);
}

/* The stages of this block's tiles in order, and what their copies need. kLong: groups are of whole blocks. */
template <typename Cut, bool kLong> struct walk_t {
    int64_t index;
    tile_t tile;
    int32_t block;   /* first one of 64 columns, */
    int32_t blocks;  /* of this stage */
    int32_t group;   /* first one that begins in this stage, */
    int32_t groups;  /* and how many do */
    int64_t w_tile;  /* of all experts' tiles of 64 rows */
    int32_t w_tiles; /* of this block; 0 when its rows are all behind the last */
    int32_t first;   /* this block's part of the tile's tokens */
    int32_t part;

    __device__ __forceinline__ void take(const weights_t &w)
    {
        blocks = min(Cut::kDepth, w.blocks - block);
        if (!kLong) {
            group = 2 * block;
            groups = min(2 * blocks, w.groups - group);
            return;
        }
        group += groups;
        groups = 0;
#pragma unroll
        for (int d = 0; d < Cut::kDepth; d++)
            if (d < blocks && (group + groups) * w.group_blocks == block + d) groups++;
    }
    /* On the tile at index or the next one that has rows; false behind the last. */
    __device__ __forceinline__ bool enter(const gemm_params_t &p, const weights_t &w, const block_t &b)
    {
        for (; index < b.tiles; index += b.tile_step) {
            tile = find_tile<Cut>(p, b, index);
            if (tile.rows == 0) continue;
            const int32_t first_tile = b.first_w_tile<Cut>(tile);
            const int32_t half = Cut::kCluster == 1 ? tile.width : (tile.width / 2 + 7) / 8 * 8;
            block = group = groups = 0;
            w_tile = (int64_t)tile.expert * w.tiles + first_tile;
            w_tiles = max(0, min(kCutTiles<Cut>, w.tiles - first_tile));
            first = b.rank * half;
            part = b.rank == 0 ? half : tile.width - half;
            take(w);
            return true;
        }
        return false;
    }
    __device__ __forceinline__ bool advance(const gemm_params_t &p, const weights_t &w, const block_t &b)
    {
        block += Cut::kDepth;
        if (block < w.blocks) {
            take(w);
            return true;
        }
        index += b.tile_step;
        return enter(p, w, b);
    }
};

} // namespace

#endif
