/* What the checks of FP8 weights by quantised activations share. */
#ifndef EPMOE_CHECK_FP8_H
#define EPMOE_CHECK_FP8_H

#include "tests/checkcuda/check.h"

/* Codes of normal values, and scales of which neighbours differ much. */
void check_fp8_weight(testing_rng_t *rng, uint8_t *codes, int64_t count, void *scales, epmoe_dtype_t dtype,
                      int64_t num_scales, int32_t k);
/* Scales of a matrix; group_rows 0: as many as group_size; packed: of gate and up rows, each beginning with a block of
 * its own. */
int64_t check_fp8_scales(int32_t group_size, int32_t group_rows, int64_t rows, int64_t cols, bool packed);
/* Whether |got - expected| <= most * |expected| over all of a field; reports by itself and returns true. */
bool check_fp8_norms(check_case_t *c, const check_field_t *field, double most);
/* Part of check_gemm_fp8. */
void check_experts_fp8(testing_rng_t *rng);

#endif
