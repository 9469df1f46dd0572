/* Random quantised weights in the layout that CUDA kernels take, and their values, found by the layout's definition and
 * not by what packs it. */
#ifndef EPMOE_QUANT_WEIGHT_H
#define EPMOE_QUANT_WEIGHT_H

#include "tests/checkcuda/check.h"

typedef struct quant_weight_t {
    epmoe_format_t format;
    epmoe_dtype_t scales_dtype;
    int32_t experts, n, k, group;
    bool gated, order;
    bool zeros;            /* W4: zero points; MXFP4: notes of the tiles with a scale above 2 */
    epmoe_layout_t layout; /* FP8_BLOCK: of its rows; the others are PACKED */
    int32_t group_rows;    /* FP8_BLOCK */
    const uint8_t *codes;  /* MXFP4: what scales are drawn from; NULL = some below 1 */
    int32_t num_codes;
} quant_weight_t;

/* Adds the arrays of `weight` to the case as fields whose pointers stand at `offset` (of an epmoe_weight_t) in its
 * args. names: of data, scales, zeros and g_idx. */
void quant_weight_add(check_case_t *c, testing_rng_t *rng, size_t offset, const char *const names[4],
                      const quant_weight_t *weight);
/* An epmoe_weight_t without pointers. */
epmoe_weight_t quant_weight_fields(const quant_weight_t *weight);
/* The values [E,N,K] of host arrays in fp32, gate rows and then up rows when gated, malloc'ed. */
float *quant_weight_values(const epmoe_weight_t *arrays, const quant_weight_t *weight);
/* A bias in the order of the weight's rows, in that of quant_weight_values; malloc'ed, NULL for NULL. */
float *quant_weight_bias(const float *bias, const quant_weight_t *weight);
/* What the tier's kernel adds to an output's error, relative to its row, by rounding code times scale to the type of x:
 * about 2^-9 of each product. Single outputs exceed their mean error several times, gated ones more than that; how the
 * kernel rounds is checked closely by check_gemm_w4. */
double quant_weight_rounding(epmoe_format_t format, epmoe_dtype_t x_dtype);

#endif
