/* What the stored values of the quantised weight formats mean, in one place: kernels, repack, checkpoints and ops read
 * weights through this file. The tensors of each format stand at epmoe_weight_t.
 *   FP8_BLOCK  w = e4m3(code) * scale of its block, row_group rows by group columns
 *   GPTQ, CT   w = scale * (code - zero), group of column c = g_idx[c], or c / group without g_idx
 *   AWQ        the same, group = c / group
 *   W4         the same on columns that may be stored in another order (epmoe_weight_t, g_idx)
 *   MXFP4      w = e2m1(code) * 2^(scale - 127), 32 columns per scale
 * Every value is one fp32 product of exact factors: rounded once where the scale is F32, exact with scales of 16 or 8
 * bits. The last group of a row may be short. Addresses need no alignment: a mapped file gives none. */
#ifndef EPMOEI_QUANT_FORMATS_H
#define EPMOEI_QUANT_FORMATS_H

#include "base/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

#define EPMOEI_MXFP4_GROUP 32

/* 2^(code - 127), a NaN for 255. */
float epmoei_e8m0_to_f32(uint8_t code);
/* 0 .5 1 1.5 2 3 4 6, bit 3 the sign; only the low four bits count. */
float epmoei_e2m1_to_f32(uint8_t code);
/* Where AWQ keeps row r of each 8: the nibble of its word. */
extern const uint8_t epmoei_awq_nibble[8];

bool epmoei_format_is_quantised(epmoe_format_t format);
/* F32, BF16, F16 or F8_E8M0. */
bool epmoei_is_scales_dtype(epmoe_dtype_t dtype);

/* One projection [rows,cols] as some format stores it. Its row r is row first_row + r * row_step of the stored matrix,
 * so that gate and up of a stacked weight are two of these. */
typedef struct epmoei_quant_t {
    epmoe_format_t format;
    epmoe_dtype_t scales_dtype; /* F8_E8M0 for MXFP4 */
    int32_t group;              /* columns per scale, at least 1 */
    int32_t row_group;          /* FP8_BLOCK: rows per scale; 0 = group */
    int32_t zero_convention;    /* GPTQ: 1 = stored is zero - 1 (mod 16), 2 = stored is zero */
    int64_t rows;
    int64_t cols;
    int64_t stored_rows;
    int64_t first_row;
    int64_t row_step;
    int64_t stored_cols; /* columns of the stored matrix, where only some of them are taken; 0 = cols */
    bool transposed;     /* FP8_BLOCK: codes and scales lie as those of [cols,stored_rows]; without a second half */
    int64_t second_half; /* FP8_BLOCK: the stored row at which blocks begin anew; 0 = they do not */
    const void *data;
    const void *scales;
    const void *zeros; /* NULL = 8 (CT and W4) */
    const void *g_idx; /* int32: see epmoe_weight_t; NULL = none */
} epmoei_quant_t;

/* Sizes of the arrays of a stored matrix [rows,cols]. */
typedef struct epmoei_quant_sizes_t {
    int64_t groups; /* scales along a row */
    int64_t data_bytes;
    int64_t scales; /* elements */
    int64_t zeros_bytes;
} epmoei_quant_sizes_t;
epmoei_quant_sizes_t epmoei_quant_sizes(epmoe_format_t format, int64_t rows, int64_t cols, int32_t group,
                                        int64_t second_half);
/* The same with row_group as above. */
epmoei_quant_sizes_t epmoei_quant_sizes_rows(epmoe_format_t format, int64_t rows, int64_t cols, int32_t group,
                                             int32_t row_group, int64_t second_half);
/* Rows per scale of FP8_BLOCK. */
static inline int32_t epmoei_quant_row_group(const epmoei_quant_t *quant)
{
    return quant->row_group ? quant->row_group : quant->group;
}

static inline int64_t epmoei_quant_stored_cols(const epmoei_quant_t *quant)
{
    return quant->stored_cols ? quant->stored_cols : quant->cols;
}

/* Each reduces the matrix, in place, to rows or columns [first, first + count). NULL, or why its columns cannot be cut
 * there: then it is unchanged. */
void epmoei_quant_take_rows(epmoei_quant_t *quant, int64_t first, int64_t count);
const char *epmoei_quant_take_cols(epmoei_quant_t *quant, int64_t first, int64_t count);

/* Whole matrix `expert` of a weight [E,rows,cols], whose defaults are filled in. second_half as above. */
epmoei_quant_t epmoei_quant_of_weight(const epmoe_weight_t *weight, int64_t rows, int64_t cols, int64_t expert,
                                      int64_t second_half);
/* Whether the format has such a storage at all. */
epmoe_status_t epmoei_weight_check_storage(const epmoe_weight_t *weight, const char *name);
/* Only rows are computed on by what asks; the message names `name`.storage. */
epmoe_status_t epmoei_weight_check_rows(const epmoe_weight_t *weight, const char *name);
/* Checks the fields of a quantised weight and fills in their defaults; `name` is for messages. */
epmoe_status_t epmoei_quant_check_weight(epmoe_weight_t *weight, const char *name, int64_t cols);

/* Whether the arrays that the format needs are there. */
epmoe_status_t epmoei_weight_check_pointers(const epmoe_weight_t *weight, const char *name);

/* Scale number i. */
float epmoei_quant_scale(const epmoei_quant_t *quant, int64_t i);
/* The 4-bit code of a stored row and column; not of FP8_BLOCK. */
uint32_t epmoei_quant_code(const epmoei_quant_t *quant, int64_t stored_row, int64_t col);
/* Real zero point, 0..15, of a stored row and group: of the formats that have them. */
int32_t epmoei_quant_zero(const epmoei_quant_t *quant, int64_t stored_row, int64_t group);
/* Where the scale of a stored row and group is; FP8_BLOCK: of the block that the row lies in. */
int64_t epmoei_quant_scale_at(const epmoei_quant_t *quant, int64_t stored_row, int64_t group);
/* g_idx[col] or W4's order. */
int32_t epmoei_quant_index(const epmoei_quant_t *quant, int64_t i);

/* One weight. W4: of a stored column. */
float epmoei_quant_at(const epmoei_quant_t *quant, int64_t row, int64_t col);
/* Columns [first, first + count) of a row: the same values. */
void epmoei_quant_row(const epmoei_quant_t *quant, int64_t row, int64_t first, int64_t count, float *out);

/* Every g_idx in [0,groups), W4: a permutation of [0,cols). INVALID_ARGUMENT names the first that is not. */
epmoe_status_t epmoei_quant_check_groups(const epmoei_quant_t *quant, const char *name);

#ifdef __cplusplus
}
#endif

#endif
