/* Which tile a grouped GEMM takes: pure functions of the shape, so that a test can print them. */
#ifndef EPMOEI_GROUPED_GEMM_TILE_H
#define EPMOEI_GROUPED_GEMM_TILE_H

#include "base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Tile height of the sm80 tier, 16, 32 or 256 rows, for max_rows rows spread over num_experts experts. A tile twice
 * as high reads the weights half as often and computes up to twice as many rows that are not there, so the height
 * follows the mean; an expert with more rows takes several tiles, whose weights the second one finds in the L2 cache.
 * 256 is the most that a tile of the wide kernel has, which computes no more rows than there are, in steps of 16; where
 * that kernel does not fit, the narrow one takes 64 or 128. */
int32_t epmoei_grouped_gemm_tile_sm80(int32_t num_experts, int64_t max_rows);

/* Most rows of a tile of the wide kernel, 64 to 256: fewer where 256 would leave SMs without a tile. */
int32_t epmoei_grouped_gemm_rows_sm80(int32_t num_experts, int64_t max_rows, int32_t n, int32_t num_sms);

/* Tile height of the sm80 tier for quantised weights, 16, 32 or 64 rows, as the mean asks for. */
int32_t epmoei_grouped_gemm_tile_quant_sm80(int32_t num_experts, int64_t max_rows);

/* Most tokens of a tile of the sm90 tier, a multiple of 64 from 64 to 256, and no more than hold all rows. An expert
 * cut into two tiles copies its weights into shared memory twice; above 64 an SM has one block instead of two, so that
 * nothing hides the ends of tiles. Those are short where an expert's weight [n,k] is small, below 4 Mi elements: there
 * it is the mean plus three of its roots, which nearly every expert stays below when tokens choose evenly, and
 * otherwise three times the mean, which few exceed even where tokens prefer some. Within the bound a tile is as wide as
 * its expert's rows need. An expert that every token takes, as a layer's shared one does in slot k, moves the mean by
 * less than 1/k; it has all T rows and is cut into T/width tiles, neighbours that find its weights in the L2 cache.
 * Beyond a few hundred tokens that is as many as a product of its own would have; before, up to a dozen of short tiles
 * among those of E experts. */
int32_t epmoei_grouped_gemm_width_sm90(int32_t num_experts, int64_t max_rows, int32_t n, int32_t k);

/* Whether the sm90 tier deals tiles of 16-bit weights to blocks as they become free (kernels/deal_tiles_sm90.cuh),
 * where the call has a word for it: with eight whole tiles an expert or more, which keep sharing what the L2 cache
 * holds of its weights, and rows of 4096 columns or more. As measured (docs/performance/log.md). */
bool epmoei_grouped_gemm_deals_sm90(int32_t num_experts, int64_t max_rows, int32_t k);

/* The same for 4-bit weights: a multiple of 16, 16 to 256, the mean plus three of its roots, which is what nearly every
 * expert stays below when tokens choose evenly. The kernel is another one for 16, 32, 48 to 96 and more. */
int32_t epmoei_grouped_gemm_width_w4_sm90(int32_t num_experts, int64_t max_rows);

#ifdef __cplusplus
}
#endif

#endif
