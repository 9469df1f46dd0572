/* Grouped GEMM of FP8_BLOCK weights by quantised activations on Hopper: epmoe_grouped_gemm with fp8_activations.
 *
 * Contract beyond kernels/grouped_gemm.h and kernels/grouped_gemm_quant.h:
 *   activations  E4M3, 128 columns per scale, with the bits of epmoe_quantize_fp8 (BLOCK128) on the rows of x; or x is
 *                codes, whose scale of a row or of everything then is that of each 128 columns
 *   order        sum over K: exact products, 128 columns in the tensor cores' accumulator, which is then multiplied by
 *                (activation scale * weight scale) and added in fp32, ascending; a weight scale that holds for all of K
 *                multiplies the sum instead; the same for a row whatever the others
 *   NaN          flows through; it never spreads to another row
 * Weights by activations that are not quantised are the sm80 tier's on every device.
 *
 * Between the two products of experts h may stay quantised: the first one then writes what quantising its rounded rows
 * would give, bit for bit, and the second reads it. */
#ifndef EPMOEI_GROUPED_GEMM_FP8_H
#define EPMOEI_GROUPED_GEMM_FP8_H

#include "kernels/coded_rows.h"
#include "kernels/grouped_gemm_quant.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows in the sorted order, quantised. The scales of 128 columns lie side by side, so that those of a tile's rows are
 * one copy. */
typedef struct epmoei_fp8_rows_t {
    uint8_t *codes; /* [rows,K] */
    float *scales;  /* [ceil(K/128),stride], or with stride 0 [rows] for all columns; aligned to 16 bytes, and up to
                     * 16 bytes behind them are read */
    int64_t stride; /* rows rounded up to 16 bytes of scales, or 0 */
    int32_t *dealt; /* a word that is 0 once the rows are written, by which the one product that reads them deals its
                     * tiles; NULL, of a reader alone: its blocks take them in turn */
} epmoei_fp8_rows_t;

/* Bytes of them; base NULL counts. */
int64_t epmoei_fp8_rows_layout(void *base, int64_t rows, int64_t k, epmoei_fp8_rows_t *out);

/* Whether the wgmma kernel computes this: fp8_activations, scales that hold for all of K or blocks that no 128 rows of
 * a tile cross, whole groups of 8 gate and 8 up rows. The weight's defaults need not be filled in. */
bool epmoei_grouped_gemm_fp8_takes_sm90(const epmoe_grouped_gemm_args_t *args);
/* Whether h may stay quantised between these two. */
bool epmoei_grouped_gemm_fp8_chains_sm90(const epmoe_grouped_gemm_args_t *gemm1,
                                         const epmoe_grouped_gemm_args_t *gemm2);

/* Which tile a call takes: a pure function of the shape. */
typedef struct epmoei_fp8_tile_t {
    int32_t tokens;  /* most of a tile: 64 or 128 */
    int32_t cluster; /* blocks that share their tokens: 1 or 2 */
} epmoei_fp8_tile_t;
epmoei_fp8_tile_t epmoei_fp8_tile_sm90(int32_t num_experts, int64_t max_rows);

/* The slots of the kernel table. */
epmoe_status_t epmoei_grouped_gemm_fp8_sm90(const epmoe_grouped_gemm_args_t *args, epmoe_stream_t stream);
int64_t epmoei_grouped_gemm_fp8_workspace_sm90(const epmoe_grouped_gemm_args_t *args);
/* The same for arguments that it takes, with x in place of args->x and y in place of args->y where not NULL. y is what
 * args->y_dtype would round to, quantised; it takes y_sorted. The launch right before wrote x, and all else is older,
 * as epmoei_grouped_gemm_chained has it. */
epmoe_status_t epmoei_grouped_gemm_fp8_rows_sm90(const epmoe_grouped_gemm_args_t *args, const epmoei_fp8_rows_t *x,
                                                 const epmoei_fp8_rows_t *y, epmoe_stream_t stream);

/* to[r] = the quantised row of x that row r of the sorted order reads; rows of padding are left as they are. */
epmoe_status_t epmoei_quantize_rows_sm90(const epmoe_grouped_gemm_args_t *args, const epmoei_fp8_rows_t *to,
                                         epmoe_stream_t stream);
/* The same of args->x that is codes; where they lie in the sorted order already, to->codes becomes args->x, which is
 * only read. Scales of rows and of everything are one for all columns. */
epmoe_status_t epmoei_sort_codes_sm90(const epmoe_grouped_gemm_args_t *args, epmoei_fp8_rows_t *to,
                                      epmoe_stream_t stream);
/* The same of rows `from`, in place of args->x, that are quantised; row_index and expert_offsets are there. K is a
 * multiple of 16. */
epmoe_status_t epmoei_gather_coded_rows_sm90(const epmoe_grouped_gemm_args_t *args, const epmoei_coded_rows_t *from,
                                             const epmoei_fp8_rows_t *to, epmoe_stream_t stream);

#ifdef __cplusplus
}
#endif

#endif
