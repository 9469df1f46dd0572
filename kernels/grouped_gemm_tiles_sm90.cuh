/* What the wgmma grouped GEMMs have in common, whatever their weights are: tiles, what is noted of them, barriers. */
#ifndef EPMOEI_GROUPED_GEMM_TILES_SM90_CUH
#define EPMOEI_GROUPED_GEMM_TILES_SM90_CUH

#include "kernels/grouped_gemm_epilogue_sm90.cuh"

#include <cuda.h>

namespace
{

constexpr int kBlockK = 64; /* 128 bytes: one row of the swizzle */
constexpr int kThreads = 3 * kWarpgroup;
constexpr int kConsumerWarps = 8;

/* Maps of the same rows of x with boxes of 8, 16, ... 256 tokens: any multiple of 8 is a few copies. */
constexpr int kXMaps = 6;
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
};

/* What the scout hands to the consumers; the arrays of max_n follow. */
struct notes_t {
    tile_t tile;   /* width 0: no more tiles */
    int32_t large; /* MXFP4: some scale of the block's weight rows may be larger than 2 */
    int32_t padding[2];
};

template <int kMostStages> struct pipeline_barriers_t {
    uint64_t full[kMostStages];
    uint64_t empty[kMostStages];
    uint64_t notes_full[2];
    uint64_t notes_empty[2];
    staging_barriers_t staging[2];
    int32_t warp_sums[kThreads / 32];
};

} // namespace

#endif
