/* The CPU's small-M product: out[r*out_stride + m] = dot(w_rows[r], x_rows[m]) over k elements, fp32.
 * Reads each weight from memory once; each result's order of summation depends on k alone, so a row's bits do not
 * depend on the other rows. Weights are bf16, fp16 or fp32 as stored, or quantised codes with scales and zero points in
 * fp32; x is fp32. Compiled once per instruction set. */
#ifndef EPMOEI_GROUPED_GEMM_CPU_ROWS_H
#define EPMOEI_GROUPED_GEMM_CPU_ROWS_H

#include "base/base.h"

typedef void (*epmoei_rows_fn)(const void *const *w_rows, int32_t num_rows, const float *const *x_rows, int32_t num_x,
                               int32_t k, float *out, int64_t out_stride);

/* A row of quantised weights: w[c] = (code[c] - zero) * scale, scale and zero those of column c / group. */
typedef struct epmoei_coded_row_t {
    const void *codes;   /* at column 0 of the piece */
    const float *scales; /* of the group that column 0 lies in, and the following */
    const float *zeros;  /* W4 alone */
} epmoei_coded_row_t;

#define EPMOEI_CODED_STEP 16 /* a piece and a group are multiples of this, as are the pieces' first columns */

/* Columns [first, first + k) of the rows, x from column 0 of the piece. */
typedef void (*epmoei_coded_rows_fn)(const epmoei_coded_row_t *w_rows, int32_t num_rows, const float *const *x_rows,
                                     int32_t num_x, int32_t first, int32_t k, int32_t group, float *out,
                                     int64_t out_stride);

typedef struct epmoei_rows_table_t {
    epmoei_rows_fn bf16;
    epmoei_rows_fn f16;
    epmoei_rows_fn f32;
    epmoei_coded_rows_fn e4m3;
    epmoei_coded_rows_fn w4;   /* eight codes per word along the row */
    epmoei_coded_rows_fn e2m1; /* the same nibbles, of MXFP4 */
} epmoei_rows_table_t;

extern const epmoei_rows_table_t epmoei_rows_generic;
#if defined(__x86_64__)
extern const epmoei_rows_table_t epmoei_rows_avx2;
extern const epmoei_rows_table_t epmoei_rows_avx512;
#endif

#endif
