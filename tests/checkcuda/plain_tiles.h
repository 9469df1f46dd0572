/* Weights of a check in tiles (kernels/plain_tiles.h) for one call on the device. */
#ifndef EPMOE_CHECKCUDA_PLAIN_TILES_H
#define EPMOE_CHECKCUDA_PLAIN_TILES_H

#include <epmoe/epmoe.h>
#include <stdbool.h>

/* weight [experts,n,k] in rows on the device, those of gate and up in turns, becomes tiles in memory of their own; NULL
 * data stays. */
epmoe_status_t check_make_tiles(epmoe_weight_t *weight, int32_t experts, int32_t n, int32_t k, bool gated,
                                epmoe_stream_t stream);
/* Waits for the stream. */
epmoe_status_t check_drop_tiles(epmoe_weight_t *weight, epmoe_stream_t stream);

#endif
