#include "comm/p2p_layout.h"

#include "comm/ep_wire.h"

/* Of each rank, per peer and parity of the epoch; the same on all ranks. */
static int64_t staged_rows(const epmoe_ep_t *ep) { return EPMOEI_P2P_STAGED / ep->size; }

/* 8-byte words of a row: 4 for each 16 bytes, in whole warps, and 2 for each slot; see comm/p2p_staged.cuh. */
static int64_t staged_words(const epmoe_ep_t *ep)
{
    const bool coded = epmoei_ep_is_coded(ep);
    const int64_t x = coded ? epmoei_coded_codes_bytes(ep->config.hidden) : ep->row_bytes;
    const int64_t scales = coded ? epmoei_coded_scales_bytes(ep->config.hidden) : 0;
    return epmoei_round_up(x, 16 * 32) / 4 + epmoei_round_up(scales, 16 * 32) / 4 + 2 * ep->config.top_k;
}

int64_t epmoei_p2p_carve_window(char *base, const epmoe_ep_t *ep, int64_t capacity, epmoei_p2p_window_t *window,
                                int64_t *cleared)
{
    epmoei_arena_t arena = {base, 0};
    int64_t size = ep->size, k = ep->config.top_k;
    window->headers = epmoei_carve(&arena, 2 * size * (size + 2) * 8);
    window->rows_there = epmoei_carve(&arena, 4 * size * EPMOEI_P2P_MAX_BLOCKS);
    window->partials_ready = epmoei_carve(&arena, 4 * size);
    window->staged = epmoei_carve(&arena, 2 * size * staged_rows(ep) * staged_words(ep) * 8);
    *cleared = arena.used;
    window->ids = epmoei_carve(&arena, capacity * k * 4);
    window->weights = epmoei_carve(&arena, capacity * k * 4);
    const bool coded = epmoei_ep_is_coded(ep);
    const int64_t codes = epmoei_coded_codes_bytes(ep->config.hidden);
    window->x = epmoei_carve(&arena, capacity * (coded ? codes : ep->row_bytes));
    window->scales = epmoei_carve(&arena, coded ? capacity * epmoei_coded_scales_bytes(ep->config.hidden) : 0);
    window->y = epmoei_carve(&arena, capacity * ep->partial_bytes);
    window->capacity = capacity;
    return arena.used;
}

int64_t epmoei_p2p_carve_own(char *base, const epmoe_ep_t *ep, epmoei_p2p_args_t *args)
{
    epmoei_arena_t arena = {base, 0};
    int64_t size = ep->size, tokens = ep->config.max_tokens;
    args->width = (int32_t)epmoei_min64(ep->config.top_k, size);
    args->staged_rows = staged_rows(ep);
    args->staged_words = staged_words(ep);
    args->groups = epmoei_max64(1, epmoei_ceil_div(tokens, EPMOEI_P2P_GROUP));
    args->state = epmoei_carve(&arena, (int64_t)sizeof *args->state);
    args->num_rows = epmoei_carve(&arena, 4);
    args->windows = epmoei_carve(&arena, size * (int64_t)sizeof *args->windows);
    args->token_ranks = epmoei_carve(&arena, args->groups * EPMOEI_P2P_GROUP * 4);
    args->group_offsets = epmoei_carve(&arena, args->groups * size * 4);
    args->token_rows = epmoei_carve(&arena, tokens * args->width * 4);
    args->own_x = epmoei_carve(&arena, epmoei_ep_is_coded(ep) ? ep->max_rows * ep->row_bytes : 0);
    return arena.used;
}

int64_t epmoei_p2p_buffer_bytes(const epmoe_ep_t *ep)
{
    epmoei_p2p_window_t window;
    epmoei_p2p_args_t args;
    int64_t cleared, piece = epmoei_p2p_carve_window(NULL, ep, ep->max_rows, &window, &cleared);
    return epmoei_round_up(piece, EPMOEI_P2P_PAGE_BYTES) + epmoei_p2p_carve_own(NULL, ep, &args);
}
