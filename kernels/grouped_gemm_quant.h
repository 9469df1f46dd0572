/* Grouped GEMM on quantised weights, on CUDA: what every tier takes, and how the weights lie in device memory.
 *
 * Arguments are those of epmoe_grouped_gemm, checked and with every default filled in; the maths and the contract are
 * those of kernels/grouped_gemm.h. x is bf16 or fp16, for FP8_BLOCK on sm90 also E4M3 codes. Weights are exact: codes
 * (minus zero points) are multiplied in the type of x, where all of them are representable, and scales in fp32. But of
 * W4 the sm90 tier rounds the scale and then the weight to bf16, which is off by 0.2 % in the root mean square. The
 * formats:
 *
 * FP8_BLOCK (slots grouped_gemm_fp8*): as epmoe_weight_t has it, data E4M3 [E,N,K] row by row, K a multiple of 16,
 *   scales [E,row blocks,ceil(K/g)] of scales_dtype, g columns and r = group_rows rows per scale; g is a multiple of 64
 *   or at least K, r anything. Rows lie in any layout. PACKED and gated: rows 2i gate, 2i+1 up, scales
 *   [E,2*ceil(f/r),ceil(K/g)], the blocks of the gate rows first: row 2i has block row i/r, row 2i+1 block row
 *   ceil(f/r) + i/r. Ungated: as they are.
 *
 * W4 and MXFP4 (slots grouped_gemm_w4*): layout PACKED only, and stored in tiles (epmoe_pack_tiles): K a multiple of
 *   8, g 16, 32 or a multiple of 64 or at least K; MXFP4 32. N is padded to whole tiles of 64 device rows and K to
 *   whole blocks of 64 columns, with codes that are finite.
 *   rows    Ungated, device row p is row p. Gated, each 16 device rows are 8 gate rows and the 8 up rows of the same
 *           outputs: row 16t + j is gate row 8t + j for j < 8 and up row 8t + j - 8 otherwise, so that in the
 *           fragments of mma.sync and wgmma with weights as the operand A one thread's accumulators hold both.
 *   data    [E][tile][block][4 x 16 rows][32 lanes][4 words]. Word s of a lane are its eight codes of 16 rows and the
 *           16 columns from 64 block + 16 s on, as operand A of m16n8k16 and of wgmma m64k16 (there the warp of the
 *           warpgroup is the 16-row part) wants them: register j = 0..3, half h = 0, 1 is
 *               row lane/4 + 8 (j & 1), column 2 (lane%4) + 8 (j >> 1) + h.
 *           So 16 bytes a lane and block, 512 contiguous bytes a warp, 2 KiB a warpgroup.
 *           W4: the nibble of (j,h) are bits 4j + 16h and up, so that (word >> 4j) & 0x000F000F is register j as two
 *           integers. MXFP4: the bits are spread so that few operations make bf16 of them, see epmoei_mxfp4_bits.
 *   scales  [E][tile][G][64] of scales_dtype, G = ceil(K/g), the 64 in pairs: place 16 s + 2 i + h is device row
 *           16 s + 8 h + i of the tile (s the 16-row part, i = lane/4), so that one load gives a lane both of its rows.
 *   zeros   W4: bytes 0..15 in the order of the scales, or NULL = 8
 *   g_idx   [E,K] or NULL: stored column j multiplies column g_idx[j] of x. One order for gate and up rows
 *
 * bias [E,N], gated with PACKED: 2i gate, 2i+1 up, whatever the format.
 * workspace: epmoei_gemm_order_x_sm80's copy of x where there is an order, then what the tier needs. */
#ifndef EPMOEI_GROUPED_GEMM_QUANT_H
#define EPMOEI_GROUPED_GEMM_QUANT_H

#include "kernels/grouped_gemm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What every CUDA tier needs of a quantised weight beyond epmoei_grouped_gemm_check: types, layout, groups, K, and the
 * alignment of what pointers there are: 16 bytes, of scales too. */
epmoe_status_t epmoei_grouped_gemm_quant_check_cuda(const epmoe_grouped_gemm_args_t *args);

/* Bytes of to: [max_rows,K] of x_dtype, and 0 without g_idx. */
int64_t epmoei_gemm_order_x_bytes(const epmoe_grouped_gemm_args_t *args);
/* to[r,j] = x[row of x that row r of the sorted order reads, g_idx[expert of r, j]]; rows of padding are left as they
 * are. What follows takes x = to, x_sorted = 1, g_idx = NULL. */
epmoe_status_t epmoei_gemm_order_x_sm80(const epmoe_grouped_gemm_args_t *args, void *to, epmoe_stream_t stream);

/* All formats. */
epmoe_status_t epmoei_grouped_gemm_quant_sm80(const epmoe_grouped_gemm_args_t *args, epmoe_stream_t stream);
int64_t epmoei_grouped_gemm_quant_workspace_sm80(const epmoe_grouped_gemm_args_t *args);
/* W4 and MXFP4; x in fp16 by the sm80 kernel. */
epmoe_status_t epmoei_grouped_gemm_w4_sm90(const epmoe_grouped_gemm_args_t *args, epmoe_stream_t stream);
/* Tiles are taken in turn: `dealt` is left alone. */
epmoe_status_t epmoei_grouped_gemm_w4_chained_sm90(const epmoe_grouped_gemm_args_t *args, int32_t *dealt,
                                                   epmoe_stream_t stream);
int64_t epmoei_grouped_gemm_w4_workspace_sm90(const epmoe_grouped_gemm_args_t *args);

#ifdef __cplusplus
}
#endif

#endif
