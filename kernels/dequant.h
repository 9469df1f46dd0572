/* Weights of any format to fp32; the maths stand at epmoe_weight_t.
 *
 * Contract of every kernel:
 *   order       elementwise: one fp32 product per value
 *   edges       any N, K >= 1 (MXFP4: K a multiple of 32); short last groups and blocks
 *   alignment   CPU: none; CUDA: data and w 16 bytes, the rest 4
 *   indices     on CUDA a g_idx out of range is the caller's error: values are then wrong, and nothing else is touched
 *   aliasing    none
 *   NaN         an E4M3 NaN or a NaN scale gives NaN, there alone
 */
#ifndef EPMOEI_DEQUANT_H
#define EPMOEI_DEQUANT_H

#include "kernels/kernel_table.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Checks and normalises: after it every default of `out` is filled in. */
epmoe_status_t epmoei_dequant_check(const epmoe_dequant_args_t *args, epmoe_dequant_args_t *out);
/* What a quantised or plain weight [E,N,K] takes, its fields normalised. */
double epmoei_weight_bytes(const epmoe_weight_t *weight, int64_t num_experts, int64_t n, int64_t k);
epmoei_floor_t epmoei_dequant_floor(const epmoe_dequant_args_t *args);

epmoe_status_t epmoei_dequant_ref(const epmoe_dequant_args_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_dequant_cpu(const epmoe_dequant_args_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_dequant_sm80(const epmoe_dequant_args_t *args, epmoe_stream_t stream);

#ifdef __cplusplus
}
#endif

#endif
