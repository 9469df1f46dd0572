/* Weights in rows, as epmoe_weight_t has them, read element by element on the device. */
#ifndef EPMOEI_QUANT_ROWS_CUDA_CUH
#define EPMOEI_QUANT_ROWS_CUDA_CUH

#include "kernels/quant_cuda.cuh"
#include "kernels/quant_formats.h"

/* A weight [E,N,K] in rows of any format, as epmoe_weight_t has it; passed by value. */
struct quant_rows_t {
    epmoe_format_t format;
    epmoe_dtype_t scales_dtype;
    int32_t group;
    int32_t row_group; /* FP8_BLOCK: rows per scale */
    int32_t zero_convention;
    int32_t n;
    int32_t k;
    int32_t groups;
    int64_t rows; /* E*N */
    int64_t scales_per_expert;
    const void *data;
    const void *scales;
    const uint8_t *zeros;
    const int32_t *g_idx;
};

/* Its fields filled in, and its arrays there. */
static inline quant_rows_t quant_rows(const epmoe_weight_t *weight, int64_t experts, int32_t n, int32_t k)
{
    quant_rows_t d = {};
    d.format = weight->format;
    d.n = n;
    d.k = k;
    d.rows = experts * n;
    d.data = weight->data;
    if (!epmoei_format_is_quantised(weight->format)) return d;
    const epmoei_quant_sizes_t sizes =
        epmoei_quant_sizes_rows(weight->format, n, k, weight->group_size, weight->group_rows, 0);
    d.scales_dtype = weight->scales_dtype;
    d.group = weight->group_size;
    d.row_group = weight->group_rows;
    d.zero_convention = weight->zero_convention;
    d.groups = (int32_t)sizes.groups;
    d.scales_per_expert = sizes.scales;
    d.scales = weight->scales;
    d.zeros = (const uint8_t *)weight->zeros;
    d.g_idx = weight->g_idx;
    return d;
}

__device__ __forceinline__ float quant_rows_scale(const quant_rows_t &d, int64_t i)
{
    switch (d.scales_dtype) {
    case EPMOE_F32: return ((const float *)d.scales)[i];
    case EPMOE_F8_E8M0: return quant_scale(((const uint8_t *)d.scales)[i], d.scales_dtype);
    default: return quant_scale(((const uint16_t *)d.scales)[i], d.scales_dtype);
    }
}

/* epmoei_quant_scale_at, without a second half. */
__device__ __forceinline__ int64_t quant_rows_scale_at(const quant_rows_t &d, int64_t expert, int32_t row,
                                                       int32_t group)
{
    int64_t at = expert * d.scales_per_expert;
    switch (d.format) {
    case EPMOE_FORMAT_FP8_BLOCK: return at + (int64_t)(row / d.row_group) * d.groups + group;
    case EPMOE_FORMAT_GPTQ:
    case EPMOE_FORMAT_AWQ: return at + (int64_t)group * d.n + row;
    default: return at + (int64_t)row * d.groups + group;
    }
}

/* AWQ's order 0 2 4 6 1 3 5 7: where row i of each eight is. */
__device__ __forceinline__ int32_t quant_awq_shift(int32_t row) { return 4 * ((row & 7) / 2 + (row & 1) * 4); }

/* epmoei_quant_zero; 8 where the format has none. */
__device__ __forceinline__ int32_t quant_rows_zero(const quant_rows_t &d, int64_t expert, int32_t row, int32_t group)
{
    if (!d.zeros) return 8;
    const uint32_t *words = (const uint32_t *)d.zeros;
    const int32_t row_words = (d.n + 7) / 8;
    const int64_t word = expert * d.groups * row_words + (int64_t)group * row_words + row / 8;
    switch (d.format) {
    case EPMOE_FORMAT_GPTQ: {
        int32_t stored = (int32_t)(words[word] >> (4 * (row & 7)) & 15);
        return d.zero_convention == 1 ? (stored + 1) & 15 : stored;
    }
    case EPMOE_FORMAT_AWQ: return (int32_t)(words[word] >> quant_awq_shift(row) & 15);
    case EPMOE_FORMAT_CT_W4:
        return (int32_t)(words[expert * d.groups * row_words + (int64_t)(row / 8) * d.groups + group] >>
                             (4 * (row & 7)) &
                         15);
    default: return d.zeros[(expert * d.n + row) * d.groups + group];
    }
}

/* epmoei_quant_code; not of FP8_BLOCK. */
__device__ __forceinline__ uint32_t quant_rows_code(const quant_rows_t &d, int64_t expert, int32_t row, int32_t col)
{
    const uint32_t *words = (const uint32_t *)d.data;
    const int64_t row_words = (d.n + 7) / 8, col_words = (d.k + 7) / 8;
    switch (d.format) {
    case EPMOE_FORMAT_GPTQ: return words[(expert * col_words + col / 8) * d.n + row] >> (4 * (col & 7)) & 15;
    case EPMOE_FORMAT_AWQ: return words[(expert * d.k + col) * row_words + row / 8] >> quant_awq_shift(row) & 15;
    case EPMOE_FORMAT_MXFP4:
        return (uint32_t)((const uint8_t *)d.data)[((expert * d.n + row) * d.k + col) / 2] >> (4 * (col & 1)) & 15;
    default: return words[(expert * d.n + row) * col_words + col / 8] >> (4 * (col & 7)) & 15;
    }
}

#endif
