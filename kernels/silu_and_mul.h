/* Gated activation of rows that hold gate and up side by side; the maths stand at epmoe_activation_t.
 *
 * Contract of every kernel:
 *   order       elementwise, fp32, rounded once; with quant then divided by its scale and encoded
 *   edges       any width >= 1 and any strides at least as wide as the rows; T = 0 is a no-op
 *   alignment   CPU: element; CUDA: 16 bytes at the base, which rows and up halves have only where strides and width
 *               allow
 *   aliasing    without quant y == x with equal strides; each element of y is then written after its gate was read
 *   padding     columns between the width and the stride are untouched
 *   NaN         flows through, to its own element only; silu(-inf) and gelu(-inf) are 0
 */
#ifndef EPMOEI_SILU_AND_MUL_H
#define EPMOEI_SILU_AND_MUL_H

#include "kernels/kernel_table.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Checks and normalises: after it every default of `out` is filled in. */
epmoe_status_t epmoei_silu_and_mul_check(const epmoe_silu_and_mul_args_t *args, epmoe_silu_and_mul_args_t *out);

/* What only host memory lets one check: the static scale. */
epmoe_status_t epmoei_silu_and_mul_check_values(const epmoe_silu_and_mul_args_t *args);

/* The least work: gate and up once in, y once out. */
epmoei_floor_t epmoei_silu_and_mul_floor(const epmoe_silu_and_mul_args_t *args);

epmoe_status_t epmoei_silu_and_mul_ref(const epmoe_silu_and_mul_args_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_silu_and_mul_cpu(const epmoe_silu_and_mul_args_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_silu_and_mul_sm80(const epmoe_silu_and_mul_args_t *args, epmoe_stream_t stream);
/* The part of it with quant; alignment has been checked. */
epmoe_status_t epmoei_silu_and_mul_quant_sm80(const epmoe_silu_and_mul_args_t *args, epmoe_stream_t stream);

#ifdef __cplusplus
}
#endif

#endif
