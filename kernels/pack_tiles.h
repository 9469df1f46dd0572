/* Rows of weights to the tiles that CUDA kernels compute on; layout and inverse stand at kernels/quant_tiles.h for
 * 4-bit codes, and at kernels/plain_tiles.h for 16 bits.
 *
 * Contract of every kernel:
 *   order       none: a copy; the bytes of every kernel are the same
 *   edges       of 4-bit codes N is padded to whole tiles and K to whole blocks, with codes, scales and zeros of 0; of
 *               16 bits nothing is padded
 *   alignment   CPU: none; CUDA: the outputs 16 bytes, the weight's arrays 4
 *   aliasing    none
 */
#ifndef EPMOEI_PACK_TILES_H
#define EPMOEI_PACK_TILES_H

#include "kernels/kernel_table.h"
#include "kernels/plain_tiles.h"
#include "kernels/quant_tiles.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Checks and normalises: after it every default of `out` is filled in. `sizes`: a query, which reads no pointers. */
epmoe_status_t epmoei_pack_tiles_check(const epmoe_pack_tiles_args_t *args, epmoe_pack_tiles_args_t *out, bool sizes);
/* One expert's tiles, from checked arguments. */
epmoei_quant_tiles_t epmoei_pack_tiles_layout(const epmoe_pack_tiles_args_t *args);
/* False for 4-bit codes. */
bool epmoei_pack_tiles_plain(const epmoe_pack_tiles_args_t *args, epmoei_plain_tiles_args_t *plain);

epmoe_status_t epmoei_pack_tiles_cpu(const epmoe_pack_tiles_args_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_pack_tiles_sm80(const epmoe_pack_tiles_args_t *args, epmoe_stream_t stream);

#ifdef __cplusplus
}
#endif

#endif
