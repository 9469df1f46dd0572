/* Weights of 16 bits in tiles (EPMOE_STORAGE_TILES), which the sm90 tier streams faster than rows: what a block of its
 * grouped GEMM fetches in a step lies in one piece, where 64 columns of 128 rows are 128 pieces of memory.
 *
 * Stored rows: with gate and up rows each 16 are the 8 gate rows and then the 8 up rows of the same outputs, otherwise
 * they are the rows. An expert is blocks of 128 stored rows, the last one of what is left; a block of R rows is
 * [K/64,R,64], and of the 64 columns of a row piece i of 8 lies at place i ^ (stored row % 8), as the 128-byte swizzle
 * of shared memory has it. K is a multiple of 64. Nothing is padded: the bytes are those of the rows. */
#ifndef EPMOEI_PLAIN_TILES_H
#define EPMOEI_PLAIN_TILES_H

#include "base/base.h"

#ifdef __CUDACC__
#define EPMOEI_PLAIN_TILES_FN static __host__ __device__ __forceinline__
#else
#define EPMOEI_PLAIN_TILES_FN static inline
#endif

enum {
    EPMOEI_PLAIN_TILE_ROWS = 128,
    EPMOEI_PLAIN_TILE_COLS = 64,
    EPMOEI_PLAIN_PIECE = 8, /* elements of 16 bytes */
};

/* Stored rows of the block that has `stored`, of n. */
EPMOEI_PLAIN_TILES_FN int32_t epmoei_plain_tile_rows(int32_t n, int32_t stored)
{
    const int32_t left = n - stored / EPMOEI_PLAIN_TILE_ROWS * EPMOEI_PLAIN_TILE_ROWS;
    return left < EPMOEI_PLAIN_TILE_ROWS ? left : EPMOEI_PLAIN_TILE_ROWS;
}

/* Where piece `piece` of a stored row lies, in pieces from the expert's first. */
EPMOEI_PLAIN_TILES_FN int64_t epmoei_plain_tile_piece(int32_t n, int32_t k, int32_t stored, int32_t piece)
{
    enum { kPieces = EPMOEI_PLAIN_TILE_COLS / EPMOEI_PLAIN_PIECE };
    const int32_t row = stored % EPMOEI_PLAIN_TILE_ROWS;
    const int64_t block = (int64_t)(stored - row) * (k / EPMOEI_PLAIN_PIECE);
    const int64_t step = (int64_t)(piece / kPieces) * epmoei_plain_tile_rows(n, stored);
    return block + (step + row) * kPieces + (piece % kPieces ^ row % 8);
}

/* The stored row of gate (up 0) or up row `output`. */
EPMOEI_PLAIN_TILES_FN int32_t epmoei_plain_tile_gated_row(int32_t output, int32_t up)
{
    return output / 8 * 16 + up * 8 + output % 8;
}

/* Rows of what is to be packed. */
typedef enum epmoei_plain_rows_t {
    EPMOEI_PLAIN_ROWS_PLAIN,      /* as they are */
    EPMOEI_PLAIN_ROWS_GATE_FIRST, /* n/2 gate and then n/2 up rows */
    EPMOEI_PLAIN_ROWS_IN_TURNS,   /* rows 2i gate, 2i+1 up */
} epmoei_plain_rows_t;

/* The row of `rows` that is stored row `stored`. */
EPMOEI_PLAIN_TILES_FN int32_t epmoei_plain_tile_row(epmoei_plain_rows_t rows, int32_t n, int32_t stored)
{
    const int32_t output = stored / 16 * 8 + stored % 8, up = stored % 16 / 8;
    if (rows == EPMOEI_PLAIN_ROWS_PLAIN) return stored;
    return rows == EPMOEI_PLAIN_ROWS_IN_TURNS ? 2 * output + up : up * (n / 2) + output;
}

#ifdef __cplusplus
extern "C" {
#endif

/* What a product needs of a weight [E,n,k] whose storage is TILES; nothing of other storages. */
epmoe_status_t epmoei_plain_tiles_check(const epmoe_weight_t *weight, const char *name, int32_t n, int32_t k,
                                        bool gated, epmoe_layout_t layout);
/* Whether [n,k] can be in tiles. */
bool epmoei_plain_tiles_fit(int32_t n, int32_t k, bool gated);

/* data [experts,n,k] of 16 bits to tiles `to`; they must not overlap. */
typedef struct epmoei_plain_tiles_args_t {
    const void *data;
    void *to;
    int32_t num_experts;
    int32_t n;
    int32_t k;
    epmoei_plain_rows_t rows;
} epmoei_plain_tiles_args_t;
epmoe_status_t epmoei_plain_tiles_cpu(const epmoei_plain_tiles_args_t *args);
/* Addresses aligned to 16 bytes. */
epmoe_status_t epmoei_plain_tiles_sm80(const epmoei_plain_tiles_args_t *args, epmoe_stream_t stream);

#ifdef __cplusplus
}
#endif

#endif
