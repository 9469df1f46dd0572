/* Grouped GEMM by row index with the MoE epilogues; the maths stand at epmoe_grouped_gemm_args_t.
 *
 * Contract of every kernel:
 *   order       the sum over K is fp32; its order is the kernel's own, the same on every run, and with batch_invariant
 *               the same whatever the other rows are
 *   edges       any N, K >= 1 on the CPU (K a multiple of 8 on CUDA); an expert without rows is not read
 *   alignment   CPU: element; CUDA: 16 bytes
 *   aliasing    none
 *   padding     row_index >= num_slots is skipped; rows of y that no row index names are untouched
 *   one group   expert_offsets NULL (E = 1): CUDA kernels take num_rows_dev, or max_rows; the CPU's get offsets made by
 *               the entry
 *   NaN         flows through; it never spreads to another row
 */
#ifndef EPMOEI_GROUPED_GEMM_H
#define EPMOEI_GROUPED_GEMM_H

#include "kernels/kernel_table.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Checks and normalises: after it every default of `out` is filled in. */
epmoe_status_t epmoei_grouped_gemm_check(const epmoe_grouped_gemm_args_t *args, epmoe_grouped_gemm_args_t *out);

/* epmoe_grouped_gemm right after the launch that wrote x, which waited for all before it, where everything else was
 * there before that launch: what does not wait for x may begin while it still runs. dealt: a word on the device that is
 * 0 by the end of that launch, by which blocks may share out their tiles, or NULL; the call leaves anything in it. */
epmoe_status_t epmoei_grouped_gemm_chained(const epmoe_grouped_gemm_args_t *args, int32_t *dealt,
                                           epmoe_stream_t stream);

/* The row of a quantised weight at which its second half begins, as epmoei_quant_t wants it; 0 = there is none. */
int64_t epmoei_grouped_gemm_second_half(const epmoe_grouped_gemm_args_t *args);
/* The values [K] of a row of x that is codes, on the host. */
void epmoei_grouped_gemm_widen_row(const epmoe_grouped_gemm_args_t *args, int64_t row, float *to);

/* The least work: each active expert's weights once, each row once, with its scales where x is codes. */
epmoei_floor_t epmoei_grouped_gemm_floor(const epmoe_grouped_gemm_args_t *args, int32_t active_experts, int64_t rows);

epmoe_status_t epmoei_grouped_gemm_ref(const epmoe_grouped_gemm_args_t *args, epmoe_stream_t stream);
int64_t epmoei_grouped_gemm_workspace_ref(const epmoe_grouped_gemm_args_t *args);
epmoe_status_t epmoei_grouped_gemm_cpu(const epmoe_grouped_gemm_args_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_grouped_gemm_sm80(const epmoe_grouped_gemm_args_t *args, epmoe_stream_t stream);
int64_t epmoei_grouped_gemm_workspace_cpu(const epmoe_grouped_gemm_args_t *args);
epmoe_status_t epmoei_grouped_gemm_sm90(const epmoe_grouped_gemm_args_t *args, epmoe_stream_t stream);
int64_t epmoei_grouped_gemm_workspace_sm80(const epmoe_grouped_gemm_args_t *args);
int64_t epmoei_grouped_gemm_workspace_sm90(const epmoe_grouped_gemm_args_t *args);
epmoe_status_t epmoei_grouped_gemm_chained_sm90(const epmoe_grouped_gemm_args_t *args, int32_t *dealt,
                                                epmoe_stream_t stream);
/* What every CUDA tier needs beyond epmoei_grouped_gemm_check: types, K a multiple of 8, alignment. */
epmoe_status_t epmoei_grouped_gemm_check_cuda(const epmoe_grouped_gemm_args_t *args);
/* to[r] = the row of x that row r of the sorted order reads; `to` is [max_rows,K] of x_dtype, K a multiple of 8. Rows
 * of padding are left as they are. */
epmoe_status_t epmoei_sort_rows_sm80(const epmoe_grouped_gemm_args_t *args, void *to, epmoe_stream_t stream);

#ifdef __cplusplus
}
#endif

#endif
