/* RMSNorm, with a residual sum before it and E4M3 behind it on demand; the maths stand at epmoe_rms_norm_args_t.
 *
 * Contract of every kernel:
 *   order       sum of squares in double, on the CPU as dense_layers/square_sum.h has it, on CUDA in an order that
 *               depends on hidden and dtype alone; (s * r) * w with r the 1 / sqrt(...) rounded to fp32
 *   rounding    s to dtype before anything else reads it; n to y_dtype, or to dtype where only its E4M3 code is stored
 *   edges       any hidden >= 1 and any strides at least as wide as the rows; T = 0 is a no-op
 *   alignment   CPU: element; CUDA: 16 bytes at the base, scales 4. There rows of whole 16 bytes, up to 64 KiB long,
 *               are read once; others element by element, once more for each pass
 *   aliasing    y == x with equal strides and types; residual apart from both
 *   padding     columns between hidden and the stride are untouched
 *   NaN         spreads over its row; a row of zeros is zeros
 */
#ifndef EPMOEI_RMS_NORM_H
#define EPMOEI_RMS_NORM_H

#include "dense_layers/dense_table.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Checks and normalises: after it every default of `out` is filled in. */
epmoe_status_t epmoei_rms_norm_check(const epmoe_rms_norm_args_t *args, epmoe_rms_norm_args_t *out);

/* The least work: x (and residual) once in, y (and residual) once out, the weights once, the scales. */
epmoei_floor_t epmoei_rms_norm_floor(const epmoe_rms_norm_args_t *args);

/* Scales in a row: 0, 1 or one for each 128 columns. */
static inline int64_t epmoei_rms_norm_scales(const epmoe_rms_norm_args_t *args)
{
    if (args->quant == EPMOE_GRANULARITY_TOKEN) return 1;
    return args->quant == EPMOE_GRANULARITY_BLOCK128 ? epmoei_ceil_div(args->hidden, 128) : 0;
}

epmoe_status_t epmoei_rms_norm_ref(const epmoe_rms_norm_args_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_rms_norm_cpu(const epmoe_rms_norm_args_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_rms_norm_sm80(const epmoe_rms_norm_args_t *args, epmoe_stream_t stream);

#ifdef __cplusplus
}
#endif

#endif
