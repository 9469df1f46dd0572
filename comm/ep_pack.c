/* Where the rows of this rank's tokens go, and packing them for the way: x in the backend's memory, ids and weights in
 * the host's. */
#include "comm/ep_plan.h"
#include "comm/ep_rows.h"
#include "comm/ep_wire.h"

#include <string.h>

#define PARALLEL_SLOTS 16384 /* below this, several threads cost more than they bring */

void epmoei_ep_route(epmoe_ep_t *ep, const epmoe_dispatch_args_t *args, int32_t *counts)
{
    epmoei_ep_buffers_t *b = &ep->buffers;
    int32_t k = ep->config.top_k, width = k < ep->size ? k : ep->size;
    for (int32_t r = 0; r < ep->size; r++) counts[r] = 0;

    /* The token's ranks, each once and ascending. */
    for (int64_t t = 0; t < args->num_tokens; t++) {
        int32_t *ranks = b->token_slots + t * width, num = 0;
        for (int32_t j = 0; j < k; j++) {
            int32_t id = args->ids[t * k + j];
            if (id < 0) continue;
            int32_t rank = b->owner[id], at = num;
            while (at > 0 && ranks[at - 1] > rank) at--;
            if (at > 0 && ranks[at - 1] == rank) continue;
            memmove(ranks + at + 1, ranks + at, (size_t)(num - at) * sizeof *ranks);
            ranks[at] = rank;
            num++;
            counts[rank]++;
        }
        for (int32_t i = num; i < width; i++) ranks[i] = -1;
    }
    b->send_offset[0] = 0;
    for (int32_t r = 0; r < ep->size; r++) {
        b->cursor[r] = (int32_t)b->send_offset[r];
        b->send_offset[r + 1] = b->send_offset[r] + counts[r];
    }
    for (int64_t t = 0; t < args->num_tokens; t++)
        for (int64_t i = t * width; i < (t + 1) * width && b->token_slots[i] >= 0; i++) {
            int32_t slot = b->cursor[b->token_slots[i]]++;
            b->slot_token[slot] = (int32_t)t;
            b->token_slots[i] = slot;
        }
}

/* Ids and weights of token t as `rank` sees them, into row `row`: ids count from its first expert, -1 elsewhere. */
static void write_routing(const epmoe_ep_t *ep, const epmoe_dispatch_args_t *args, int32_t rank, int64_t t, int64_t row,
                          int32_t *ids, float *weights)
{
    const epmoei_ep_buffers_t *b = &ep->buffers;
    int32_t k = ep->config.top_k, first = b->first_expert[rank], end = b->first_expert[rank + 1];
    for (int32_t j = 0; j < k; j++) {
        int32_t id = args->ids[t * k + j];
        bool here = id >= first && id < end;
        ids[row * k + j] = here ? id - first : -1;
        weights[row * k + j] = here ? args->weights[t * k + j] : 0;
    }
}

static epmoe_status_t pack_rows(epmoe_ep_t *ep, const void *x, epmoe_stream_t stream)
{
    const epmoei_ep_buffers_t *b = &ep->buffers;
    int64_t num_rows = epmoei_ep_outbox_total(ep), gap_at = b->send_offset[ep->rank];
    int64_t gap = b->send_offset[ep->rank + 1] - gap_at;
    if (epmoei_ep_is_coded(ep)) {
        const epmoei_encode_rows_t encode = {
            .dst = epmoei_coded_rows_packed(b->outbox, ep->config.hidden),
            .src = x,
            .dtype = ep->config.dtype,
            .hidden = ep->config.hidden,
            .index = b->device_slot_token,
            .num_rows = num_rows,
            .gap_at = gap_at,
            .gap = gap,
        };
        return epmoei_encode_rows(ep->comm->backend, &encode, stream);
    }
    const epmoei_gather_rows_t gather = {
        .dst = b->outbox,
        .src = x,
        .index = b->device_slot_token,
        .num_rows = num_rows,
        .gap_at = gap_at,
        .gap = gap,
        .row_bytes = ep->row_bytes,
    };
    return epmoei_gather_rows(ep->comm->backend, &gather, stream);
}

epmoe_status_t epmoei_ep_pack_outbox(epmoe_ep_t *ep, const epmoe_dispatch_args_t *args, epmoe_stream_t stream)
{
    const epmoei_ep_buffers_t *b = &ep->buffers;
    int64_t width = ep->config.top_k < ep->size ? ep->config.top_k : ep->size;
    if (!args->reuse_routing) {
        EPMOEI_CHECK(epmoei_ep_copy(ep, b->device_slot_token, b->slot_token, 4 * b->send_offset[ep->size], stream));
        EPMOEI_CHECK(epmoei_ep_copy(ep, b->device_token_slots, b->token_slots, 4 * width * args->num_tokens, stream));
    }
    EPMOEI_CHECK(pack_rows(ep, args->x, stream));
    EPMOEI_CHECK(epmoei_ep_mark(ep, stream));
#pragma omp parallel if (epmoei_ep_outbox_total(ep) * ep->config.top_k > PARALLEL_SLOTS)
    for (int32_t r = 0; r < ep->size; r++) {
        if (r == ep->rank) continue;
#pragma omp for schedule(static) nowait
        for (int64_t slot = b->send_offset[r]; slot < b->send_offset[r + 1]; slot++)
            write_routing(ep, args, r, b->slot_token[slot], epmoei_ep_outbox_row(ep, slot), b->outbox_ids,
                          b->outbox_weights);
    }
    return EPMOE_OK;
}

static epmoe_status_t place_own_rows(epmoe_ep_t *ep, const void *x, epmoe_stream_t stream)
{
    const epmoei_ep_buffers_t *b = &ep->buffers;
    epmoei_rows_t own = epmoei_ep_received_rows(ep, ep->rank);
    const int32_t *index = b->device_slot_token + b->send_offset[ep->rank];
    char *dst = b->x + own.first * ep->row_bytes;
    if (epmoei_ep_is_coded(ep)) {
        const epmoei_round_rows_t round = {.dst = dst,
                                           .src = x,
                                           .dtype = ep->config.dtype,
                                           .hidden = ep->config.hidden,
                                           .index = index,
                                           .num_rows = own.num};
        return epmoei_round_rows(ep->comm->backend, &round, stream);
    }
    const epmoei_gather_rows_t gather = {
        .dst = dst, .src = x, .index = index, .num_rows = own.num, .row_bytes = ep->row_bytes};
    return epmoei_gather_rows(ep->comm->backend, &gather, stream);
}

epmoe_status_t epmoei_ep_copy_own_rows(epmoe_ep_t *ep, const epmoe_dispatch_args_t *args, epmoe_stream_t stream)
{
    const epmoei_ep_buffers_t *b = &ep->buffers;
    int64_t first = b->send_offset[ep->rank];
    epmoei_rows_t own = epmoei_ep_received_rows(ep, ep->rank);
    EPMOEI_CHECK(place_own_rows(ep, args->x, stream));
#pragma omp parallel for schedule(static) if (own.num * ep->config.top_k > PARALLEL_SLOTS)
    for (int64_t i = 0; i < own.num; i++)
        write_routing(ep, args, ep->rank, b->slot_token[first + i], own.first + i, b->ids, b->weights);
    return EPMOE_OK;
}

epmoe_status_t epmoei_ep_unpack_rows(epmoe_ep_t *ep, epmoe_stream_t stream)
{
    const epmoei_ep_buffers_t *b = &ep->buffers;
    epmoei_rows_t own = epmoei_ep_received_rows(ep, ep->rank);
    if (!epmoei_ep_is_coded(ep)) return EPMOE_OK;
    const epmoei_decode_rows_t decode = {
        .dst = b->x,
        .dtype = ep->config.dtype,
        .hidden = ep->config.hidden,
        .src = epmoei_coded_rows_packed(b->wire, ep->config.hidden),
        .num_rows = ep->num_rows,
        .gap_at = own.first,
        .gap = own.num,
    };
    return epmoei_decode_rows(ep->comm->backend, &decode, stream);
}
