/* The CPU's small-M product: out[r*out_stride + m] = dot(w_rows[r], x_rows[m]) over k elements, fp32.
 * Reads each weight from memory once; each result's order of summation depends on k alone, so a row's bits do not
 * depend on the other rows. Weights are bf16, fp16 or fp32 as stored, x is fp32. Compiled once per instruction set. */
#ifndef EPMOEI_GROUPED_GEMM_CPU_ROWS_H
#define EPMOEI_GROUPED_GEMM_CPU_ROWS_H

#include "base/base.h"

typedef void (*epmoei_rows_fn)(const void *const *w_rows, int32_t num_rows, const float *const *x_rows, int32_t num_x,
                               int32_t k, float *out, int64_t out_stride);

typedef struct epmoei_rows_table_t {
    epmoei_rows_fn bf16;
    epmoei_rows_fn f16;
    epmoei_rows_fn f32;
} epmoei_rows_table_t;

extern const epmoei_rows_table_t epmoei_rows_generic;
#if defined(__x86_64__)
extern const epmoei_rows_table_t epmoei_rows_avx2;
extern const epmoei_rows_table_t epmoei_rows_avx512;
#endif

#endif
