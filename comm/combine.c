/* Combine: partial rows go back to where their tokens came from, and are summed there.
 *   bytes on the wire per row: d * (2 for a bf16 partial, else 4) */
#include "comm/ep_rows.h"
#include "comm/transport.h"

static epmoe_status_t check_args(const epmoe_ep_t *ep, epmoe_combine_args_t *own, const epmoe_combine_args_t *args)
{
    EPMOEI_CHECK(epmoei_copy_sized(own, sizeof *own, args, "args"));
    if (ep->num_tokens > 0 && !own->y)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "y is NULL with num_tokens %d", ep->num_tokens);
    EPMOEI_CHECK(epmoei_ep_check_aligned(ep, "shared", own->shared));
    EPMOEI_CHECK(epmoei_ep_check_aligned(ep, "residual", own->residual));
    return epmoei_ep_check_aligned(ep, "y", own->y);
}

static int32_t add_segment(epmoe_segment_t *segments, int32_t num, int32_t peer, epmoei_rows_t rows, char *data,
                           int64_t row_bytes)
{
    if (rows.num == 0) return num;
    segments[num] = (epmoe_segment_t){peer, 0, data + rows.first * row_bytes, rows.num * row_bytes};
    return num + 1;
}

static epmoe_status_t bring_home(epmoe_ep_t *ep, epmoe_stream_t stream)
{
    epmoei_ep_buffers_t *b = &ep->buffers;
    epmoei_trip_t trip = epmoei_ep_trip(ep, true);
    if (ep->comm->ops->begin) EPMOEI_CHECK(ep->comm->ops->begin(ep, &trip, stream));
    if (trip.host_rows) {
        int32_t num_sends = 0, num_recvs = 0;
        for (int32_t r = 0; r < ep->size; r++) {
            if (r == ep->rank) continue;
            num_sends =
                add_segment(b->sends, num_sends, r, epmoei_ep_received_rows(ep, r), trip.host_rows, trip.row_bytes);
            num_recvs =
                add_segment(b->recvs, num_recvs, r, epmoei_ep_outbox_rows(ep, r), trip.host_outbox, trip.row_bytes);
        }
        EPMOEI_CHECK(epmoei_ep_exchange_begin(ep, trip.phase, num_sends, num_recvs));
        EPMOEI_CHECK(epmoei_ep_exchange_finish(ep, trip.phase));
    }
    if (ep->comm->ops->finish) EPMOEI_CHECK(ep->comm->ops->finish(ep, &trip, stream));
    return epmoei_ep_mark(ep, stream);
}

epmoe_status_t epmoe_combine(epmoe_ep_t *ep, const epmoe_combine_args_t *args, epmoe_stream_t stream)
{
    if (!ep) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "ep is NULL");
    EPMOEI_CHECK(epmoei_comm_enter(ep->comm));
    if (ep->state != EPMOEI_EP_OPEN)
        return epmoei_fail(EPMOE_ERROR_BAD_STATE, "combine: there is no dispatch to bring home");
    /* On a stream that cannot be used no row moves: the call has not taken place, and may still. */
    EPMOEI_CHECK(epmoei_ep_check_stream(ep, "combine", stream));
    ep->state = EPMOEI_EP_IDLE;
    epmoe_combine_args_t own = EPMOE_COMBINE_ARGS_INIT;
    epmoe_status_t local = check_args(ep, &own, args);
    if (epmoei_ep_plans_on_device(ep)) {
        EPMOEI_CHECK(ep->comm->ops->combine(ep, local == EPMOE_OK ? &own : NULL, stream));
        return local;
    }
    if (ep->size > 1) { /* also with a bad argument: the peers wait for these rows */
        epmoe_status_t moved = bring_home(ep, stream);
        if (moved != EPMOE_OK) return epmoei_comm_fail(ep->comm, moved);
    }
    EPMOEI_CHECK(local);

    const epmoei_ep_buffers_t *b = &ep->buffers;
    epmoei_sum_rows_t sum = {
        .num_tokens = ep->num_tokens,
        .hidden = ep->config.hidden,
        .row_dtype = ep->partial_dtype,
        .dtype = ep->config.dtype,
        .own = b->y,
        .shared = own.shared,
        .residual = own.residual,
        .y = own.y,
    };
    if (ep->size > 1) {
        epmoei_rows_t rows = epmoei_ep_received_rows(ep, ep->rank);
        sum.width = ep->config.top_k < ep->size ? ep->config.top_k : ep->size;
        sum.token_slots = b->device_token_slots;
        sum.first_own = b->send_offset[ep->rank];
        sum.num_own = rows.num;
        sum.own = b->y + rows.first * ep->partial_bytes;
        sum.others = b->outbox;
    }
    return epmoei_sum_rows(ep->comm->backend, &sum, stream);
}
