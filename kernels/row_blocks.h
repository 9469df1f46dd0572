/* How the CPU kernels cut [rows,cols] into pieces of work, and the loops over one piece. A piece is a run of columns
 * of one row that stays in the first-level cache in fp32, so that few long rows keep all threads busy too. */
#ifndef EPMOEI_ROW_BLOCKS_H
#define EPMOEI_ROW_BLOCKS_H

#include "base/dtype.h"

#define EPMOEI_BLOCK_COLS 1024
/* Elements touched below which starting threads costs more than it saves. */
#define EPMOEI_MIN_PARALLEL_ELEMENTS 32768

static inline int64_t epmoei_blocks_per_row(int64_t cols) { return epmoei_ceil_div(cols, EPMOEI_BLOCK_COLS); }

typedef struct epmoei_block_t {
    int64_t row;
    int64_t first;
    int64_t cols;
} epmoei_block_t;

/* Piece `index` of rows * epmoei_blocks_per_row(cols). */
static inline epmoei_block_t epmoei_block(int64_t index, int64_t cols)
{
    int64_t per_row = epmoei_blocks_per_row(cols);
    int64_t first = index % per_row * EPMOEI_BLOCK_COLS;
    return (epmoei_block_t){index / per_row, first, epmoei_min64(EPMOEI_BLOCK_COLS, cols - first)};
}

/* The address of element i of an array of any dtype. */
static inline void *epmoei_at(const void *base, epmoe_dtype_t dtype, int64_t i)
{
    return (char *)base + i * epmoe_dtype_size(dtype);
}

/* acc[i] += weight * rows[first + i]. */
static inline void epmoei_block_add(float *acc, const void *rows, epmoe_dtype_t dtype, int64_t first, int64_t cols,
                                    float weight)
{
    float row[EPMOEI_BLOCK_COLS];
    epmoei_to_f32(row, epmoei_at(rows, dtype, first), dtype, cols);
#pragma omp simd
    for (int64_t i = 0; i < cols; i++) acc[i] += weight * row[i];
}

#endif
