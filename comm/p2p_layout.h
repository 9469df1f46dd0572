/* Sizes and places of what transport p2p takes, known without a device. Of `ep` they read size, max_rows, config and
 * the bytes of rows. */
#ifndef EPMOEI_P2P_LAYOUT_H
#define EPMOEI_P2P_LAYOUT_H

#include "comm/ep_plan.h"
#include "comm/p2p.h"

/* A piece is mapped in pages of this size: whole ones, so that peers see nothing else. */
#define EPMOEI_P2P_PAGE_BYTES ((int64_t)2 << 20)

/* Everything that peers touch, of a rank that accepts `capacity` rows; base NULL counts. Returns the bytes; *cleared
 * those before the rows. */
int64_t epmoei_p2p_carve_window(char *base, const epmoe_ep_t *ep, int64_t capacity, epmoei_p2p_window_t *window,
                                int64_t *cleared);
/* What only this rank touches, and the sizes that go with it. */
int64_t epmoei_p2p_carve_own(char *base, const epmoe_ep_t *ep, epmoei_p2p_args_t *args);
/* Device memory of both. */
int64_t epmoei_p2p_buffer_bytes(const epmoe_ep_t *ep);

#endif
