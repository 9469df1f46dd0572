/* A tile of the CPU's grouped GEMM on quantised weights, in pieces of EPMOEI_QUANT_DEPTH columns: few rows of x meet
 * the codes as they are stored, widened in registers (grouped_gemm_cpu_rows.c); otherwise the rows of w are widened to
 * fp32 in a thread's cache and multiplied as plain ones are. Where the columns of w are stored in another order, x is
 * gathered to it piece by piece. */
#ifndef EPMOEI_GROUPED_GEMM_CPU_QUANT_H
#define EPMOEI_GROUPED_GEMM_CPU_QUANT_H

#include "kernels/grouped_gemm.h"
#include "kernels/grouped_gemm_cpu_rows.h"
#include "kernels/quant_formats.h"

#define EPMOEI_QUANT_DEPTH 1024

typedef struct epmoei_quant_tile_t {
    const epmoe_grouped_gemm_args_t *args;
    const epmoei_rows_table_t *table;
    bool blas; /* many rows */
    int32_t expert;
    int32_t num_w;    /* rows of w, */
    int32_t num_gate; /* of which the first are no up rows */
    int32_t rows;
    const int64_t *w_index;     /* [num_w] */
    const float *const *x_rows; /* [rows] */
    /* Scratch: w [num_w,depth], x [rows,depth], part [num_w,rows] (not with blas), w_rows and coded [num_w], x_at
     * [rows] */
    float *w;
    float *x;
    float *part;
    const void **w_rows;
    epmoei_coded_row_t *coded;
    const float **x_at;
    float *out; /* [num_w,rows] */
} epmoei_quant_tile_t;

void epmoei_quant_tile_multiply(const epmoei_quant_tile_t *tile);

#endif
