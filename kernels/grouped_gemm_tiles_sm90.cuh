/* What the wgmma grouped GEMMs have in common, whatever their weights are: tiles, what is noted of them, barriers, how
 * operands lie in memory and in shared memory. */
#ifndef EPMOEI_GROUPED_GEMM_TILES_SM90_CUH
#define EPMOEI_GROUPED_GEMM_TILES_SM90_CUH

#include "kernels/grouped_gemm_epilogue_sm90.cuh"
#include "kernels/tensor_map_sm90.cuh"

namespace
{

constexpr int kRowBytes = 128; /* one row of the swizzle: the columns of a box */
constexpr int kBlockK = 64;    /* as many of 16 bits */
constexpr int kThreads = 3 * kWarpgroup;
constexpr int kConsumerWarps = 8;

/* Maps of the same rows of x with boxes of 8, 16, ... 128 tokens, so that a step's tokens are one copy: one thread
 * starts them all, and what it takes for each bounds narrow tiles. */
constexpr int kXMaps = 16;
struct x_maps_t {
    CUtensorMap map[kXMaps];
};

/* Which tokens a tile covers, and the width of wgmma that holds them. */
struct tile_t {
    int32_t expert;
    int32_t row;     /* first row, in the sorted order */
    int32_t rows;    /* 0 = nothing to do */
    int32_t width;   /* rows rounded up to a width that is compiled */
    int32_t cluster; /* which of the clusters over the weight rows */
    int32_t widest;  /* of the expert's tiles, where rows are cut evenly */
    int32_t alone;   /* the expert's only one: nobody else reads these weights */
};

/* What the scout hands to the consumers; the arrays of max_n follow. */
struct notes_t {
    tile_t tile;        /* width 0: no more tiles */
    int32_t padding[1]; /* the scales behind it are read 16 bytes at a time */
};
static_assert(sizeof(notes_t) % 16 == 0, "alignment of what follows");

/* kNotes: tiles that are looked up ahead. */
template <int kMostStages, int kNotes> struct pipeline_barriers_t {
    uint64_t full[kMostStages];
    uint64_t empty[kMostStages];
    uint64_t notes_full[kNotes];
    uint64_t notes_empty[kNotes];
    staging_barriers_t staging[2]; /* of kernels with storers */
    int32_t warp_sums[kThreads / 32];
};

/* Tiles of an expert follow each other, its token tiles fastest, so that blocks that run together share weights; its
 * rows are cut evenly into as few as hold them, round_width(rows) wide. A tile here is `clusters` clusters' worth of
 * weight rows; block 0 of the cluster has the first ones. order: the expert at a place of `cumulative`; NULL = that
 * place. */
template <typename Round>
__device__ __forceinline__ tile_t find_even_tile(const gemm_params_t &p, const int32_t *cumulative,
                                                 const int16_t *order, int64_t index, int32_t clusters,
                                                 Round round_width)
{
    const int32_t place = gemm_find_expert(p, cumulative, index, clusters);
    int32_t row_tiles = cumulative[place + 1] - cumulative[place];
    int32_t local = (int32_t)(index - (int64_t)cumulative[place] * clusters);
    tile_t tile;
    tile.expert = order ? order[place] : place;
    int32_t first = gemm_expert_offset(p, tile.expert), rows = gemm_expert_offset(p, tile.expert + 1) - first;
    int32_t each = round_width((rows + row_tiles - 1) / row_tiles);
    tile.row = first + local % row_tiles * each;
    tile.rows = max(0, min(each, first + rows - tile.row));
    tile.widest = each;
    tile.width = round_width(tile.rows);
    tile.cluster = local / row_tiles;
    tile.alone = row_tiles == 1;
    return tile;
}

/* What a scout's warp notes of the tokens of a tile, in notes `stage`: where their outputs go, and what weighs them
 * before and after the activation. */
template <typename Block>
__device__ __forceinline__ void note_tokens(const gemm_params_t &p, const Block &b, int32_t stage, const tile_t &tile,
                                            int lane)
{
    for (int i = lane; i < tile.width; i += 32) {
        int32_t row = tile.row + i, slot = -1;
        if (i < tile.rows) slot = p.row_index ? p.row_index[row] : row;
        if (slot >= p.num_slots) slot = -1;
        b.rows_of(stage)[i] = slot < 0 ? -1 : p.y_sorted ? row : slot;
        const float weight = p.row_weights && slot >= 0 ? p.row_weights[slot] : 1.0f;
        b.scales_of(stage)[i] = p.weight_on_input ? make_float2(weight, 1.0f) : make_float2(1.0f, weight);
    }
}

/* The descriptor of a K-major operand in the 128-byte swizzle: rows of 128 bytes, groups of 8 rows 1024 bytes apart.
 * The lower half for an address in shared memory, which is below 2^18; 16 bytes further is 1 more. */
__device__ __forceinline__ uint32_t descriptor_start(uint32_t shared) { return shared >> 4 | 1 << 16; }
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t start)
{
    return (uint64_t)(1 << 30 | 1024 >> 4) << 32 | start;
}

/* x [rows,k] of elements of `bytes` bytes, for copies of at most `tokens`. */
inline epmoe_status_t encode_rows(x_maps_t *maps, epmoe_dtype_t dtype, int32_t bytes, const void *x, int64_t rows,
                                  int32_t k, int32_t tokens)
{
    const cuuint64_t dims[2] = {(cuuint64_t)k, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)k * bytes};
    for (int i = 0; 8 * i < tokens; i++) {
        const cuuint32_t box[2] = {(cuuint32_t)(kRowBytes / bytes), (cuuint32_t)(8 * (i + 1))};
        EPMOEI_CHECK(tensor_map_encode(&maps->map[i], dtype, x, 2, dims, strides, box));
    }
    return EPMOE_OK;
}

/* Weights [E,N,K] as columns, rows of a group of 8, gate and up, groups, experts; plain: columns, rows, 1, 1, experts.
 * A box has box_rows rows. */
inline epmoe_status_t encode_weights(CUtensorMap *map, const epmoe_grouped_gemm_args_t *args, const gemm_params_t *p,
                                     epmoe_dtype_t dtype, int32_t bytes, cuuint32_t box_rows)
{
    const cuuint64_t row = (cuuint64_t)args->k * bytes, n = (cuuint64_t)args->n, f = n / 2;
    cuuint64_t dims[5] = {(cuuint64_t)args->k, n, 1, 1, (cuuint64_t)args->num_experts};
    cuuint64_t strides[4] = {row, n * row, n * row, n * row};
    cuuint32_t box[5] = {(cuuint32_t)(kRowBytes / bytes), box_rows, 1, 1, 1};
    if (p->gated) {
        dims[1] = 8, dims[2] = 2, dims[3] = f / 8;
        strides[0] = p->interleaved ? 2 * row : row;
        strides[1] = p->interleaved ? row : f * row;
        strides[2] = p->interleaved ? 16 * row : 8 * row;
        box[1] = 8, box[2] = 2, box[3] = box_rows / 16;
    }
    return tensor_map_encode(map, dtype, args->weight.data, 5, dims, strides, box);
}

} // namespace

#endif
