/* Random quantised weights for tests. */
#ifndef EPMOE_QUANT_CASE_H
#define EPMOE_QUANT_CASE_H

#include "kernels/quant_formats.h"
#include "tests/testing.h"

typedef enum quant_index_t {
    QUANT_INDEX_NONE,
    QUANT_INDEX_EVEN, /* groups of equal width in any order, as act-order makes them */
    QUANT_INDEX_ANY,
} quant_index_t;

/* The arrays of a weight [E,N,K], off their alignment and guarded. Scales are bf16 in [1,2), of MXFP4 bytes near 127;
 * no code is a NaN. Of W4 an index orders the columns: i*7 + e modulo K, K not a multiple of 7; with a second half
 * (see epmoei_quant_of_weight) the up rows have an order of their own. */
typedef struct quant_case_t {
    epmoe_weight_t weight;
    void *data, *scales, *zeros;
    int32_t *g_idx;
} quant_case_t;
quant_case_t quant_case_make(testing_rng_t *rng, epmoe_format_t format, int64_t experts, int64_t n, int64_t k,
                             int32_t group, quant_index_t index, int64_t second_half);
/* The same with FP8_BLOCK's group_rows. */
quant_case_t quant_case_make_rows(testing_rng_t *rng, epmoe_format_t format, int64_t experts, int64_t n, int64_t k,
                                  int32_t group, int32_t group_rows, quant_index_t index, int64_t second_half);
/* All elements of the first half of expert e's rows are values[2 e], of the second values[2 e + 1]: powers of two, of
 * one sign in each expert. 16-bit formats too. k is 128, one group; halves that differ are multiples of 128 rows. */
quant_case_t quant_case_constant(epmoe_format_t format, int64_t experts, int64_t n, int64_t k, const float *values);
void quant_case_free(quant_case_t *made); /* ends the test if a guard was written */

#endif
