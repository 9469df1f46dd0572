/* kernels/plain_tiles.h: a thread moves 16 bytes. Floor: bytes = 4*E*N*K. */
#include "kernels/cuda_common.cuh"
#include "kernels/plain_tiles.h"

namespace
{

constexpr int kThreads = 256;

/* Neighbours have neighbouring pieces of the tiles, which lie in runs of eight of a row. */
__global__ void __launch_bounds__(kThreads) plain_tiles_kernel(const epmoei_plain_tiles_args_t args)
{
    constexpr int kPieces = EPMOEI_PLAIN_TILE_COLS / EPMOEI_PLAIN_PIECE;
    const int32_t pieces = args.k / EPMOEI_PLAIN_PIECE;
    const int64_t all = (int64_t)args.n * pieces, expert = blockIdx.y;
    const uint4 *from = (const uint4 *)args.data + expert * all;
    uint4 *to = (uint4 *)args.to + expert * all;
    const int32_t steps = args.k / EPMOEI_PLAIN_TILE_COLS;
    for (int64_t i = (int64_t)blockIdx.x * kThreads + threadIdx.x; i < all; i += (int64_t)gridDim.x * kThreads) {
        const int32_t block = (int32_t)(i / ((int64_t)EPMOEI_PLAIN_TILE_ROWS * pieces));
        const int32_t first = block * EPMOEI_PLAIN_TILE_ROWS, rows = epmoei_plain_tile_rows(args.n, first);
        const int64_t in_block = i - (int64_t)first * pieces;
        const int32_t step = (int32_t)(in_block / (rows * kPieces)) % steps;
        const int32_t in_step = (int32_t)(in_block % (rows * kPieces));
        const int32_t stored = first + in_step / kPieces, piece = step * kPieces + in_step % kPieces;
        to[epmoei_plain_tile_piece(args.n, args.k, stored, piece)] =
            from[(int64_t)epmoei_plain_tile_row(args.rows, args.n, stored) * pieces + piece];
    }
}

} // namespace

extern "C" epmoe_status_t epmoei_plain_tiles_sm80(const epmoei_plain_tiles_args_t *args, epmoe_stream_t stream)
{
    const int64_t pieces = (int64_t)args->n * (args->k / EPMOEI_PLAIN_PIECE), most = 65535;
    const unsigned blocks = (unsigned)epmoei_min64(epmoei_ceil_div(pieces, kThreads), most);
    plain_tiles_kernel<<<dim3(blocks, (unsigned)args->num_experts), kThreads, 0, stream>>>(*args);
    return EPMOEI_LAUNCH_CHECK("epmoe_pack_tiles");
}
