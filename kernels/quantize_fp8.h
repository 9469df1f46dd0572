/* Activations to E4M3 with a scale per tensor, row or 128 columns; the maths stand at epmoe_quantize_fp8_args_t.
 *
 * Contract of every kernel:
 *   order       elementwise; amax is a maximum, so that its order does not matter
 *   edges       any d >= 1; the last block of a row may be narrow
 *   alignment   CPU: element; CUDA: x and q 16 bytes, the rest 4
 *   aliasing    none
 *   padding     columns of x between d and the stride are not read
 *   NaN         0x7F in its own place; it does not count for amax
 */
#ifndef EPMOEI_QUANTIZE_FP8_H
#define EPMOEI_QUANTIZE_FP8_H

#include "kernels/kernel_table.h"

#ifdef __cplusplus
extern "C" {
#endif

#define EPMOEI_FP8_COLUMNS 128 /* of a BLOCK128 scale */

/* Where the scales of quantised rows of `columns` lie: that of columns 128 i and on of row t is at t * row + i * block.
 */
typedef struct epmoei_scale_steps_t {
    int64_t row;
    int64_t block;
} epmoei_scale_steps_t;
static inline epmoei_scale_steps_t epmoei_scale_steps(epmoe_granularity_t granularity, int64_t columns)
{
    epmoei_scale_steps_t steps = {0, 0};
    if (granularity == EPMOE_GRANULARITY_TOKEN) steps.row = 1;
    if (granularity == EPMOE_GRANULARITY_BLOCK128)
        steps.row = epmoei_ceil_div(columns, EPMOEI_FP8_COLUMNS), steps.block = 1;
    return steps;
}

/* Checks and normalises: after it every default of `out` is filled in. */
epmoe_status_t epmoei_quantize_fp8_check(const epmoe_quantize_fp8_args_t *args, epmoe_quantize_fp8_args_t *out);
epmoei_floor_t epmoei_quantize_fp8_floor(const epmoe_quantize_fp8_args_t *args);

/* The scale for this amax, as the arguments ask for. */
float epmoei_quantize_fp8_scale(const epmoe_quantize_fp8_args_t *args, float amax);

epmoe_status_t epmoei_quantize_fp8_ref(const epmoe_quantize_fp8_args_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_quantize_fp8_cpu(const epmoe_quantize_fp8_args_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_quantize_fp8_sm80(const epmoe_quantize_fp8_args_t *args, epmoe_stream_t stream);

/* What is left of a row after quantising each 128 columns and back, in place: what a product of FP8 activations sees.
 */
void epmoei_quantize_fp8_round_row(float *row, int64_t n);

#ifdef __cplusplus
}
#endif

#endif
