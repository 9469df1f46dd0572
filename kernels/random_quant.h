/* Random weights in a quantised format: the code of each element is the nearest to the plain random weight of the same
 * place (random_weights.h) under a scale that is a function of row, group and key alone. So a code does not depend on
 * its neighbours, on the rank count or on the order in which they are made; and two scales, one twice the other, take
 * turns, so that a product that reads a wrong one is wrong. Zero points are 8. */
#ifndef EPMOEI_RANDOM_QUANT_H
#define EPMOEI_RANDOM_QUANT_H

#include "kernels/quant_pack.h"
#include "kernels/random_weights.h"

/* One tensor [rows,cols] of one expert. */
typedef struct epmoei_random_quant_t {
    epmoe_format_t format; /* FP8_BLOCK, W4 or MXFP4 */
    int32_t group;
    uint64_t seed;
    epmoei_random_tensor_t tensor;
    int32_t expert;
    int64_t cols;
} epmoei_random_quant_t;

/* The scale of a row's group: exact in fp16, of MXFP4 a power of two. */
float epmoei_random_quant_scale(const epmoei_random_quant_t *random, int64_t row, int64_t group);
/* Columns [first, first + count) of a row as codes, a byte each, and as the values that they stand for. */
void epmoei_random_quant_codes(const epmoei_random_quant_t *random, int64_t row, int64_t first, int64_t count,
                               uint8_t *codes);
void epmoei_random_quant_values(const epmoei_random_quant_t *random, int64_t row, int64_t first, int64_t count,
                                float *values);

/* All rows into packed memory, as epmoei_quant_pack would put a source of these values. */
void epmoei_random_quant_fill(const epmoei_random_quant_t *random, int64_t rows, const epmoei_pack_target_t *target);

#endif
