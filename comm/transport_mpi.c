/* Rows over the bootstrap's exchange of host memory. On the CPU it moves them from where they lie to where they go; the
 * device's rows pass through page-locked memory that is laid out like the outbox and like x. */
#include "comm/transport.h"

/* Copies the rows that travel, which on the side of x and y are all but the own rank's. */
static epmoe_status_t copy_rows(const epmoe_ep_t *ep, char *dst, const char *src, bool is_outbox, int64_t row_bytes,
                                epmoe_stream_t stream)
{
    if (is_outbox) return epmoei_ep_copy(ep, dst, src, epmoei_ep_outbox_total(ep) * row_bytes, stream);
    epmoei_rows_t own = epmoei_ep_received_rows(ep, ep->rank);
    int64_t end = own.first + own.num, after = end * row_bytes;
    EPMOEI_CHECK(epmoei_ep_copy(ep, dst, src, own.first * row_bytes, stream));
    return epmoei_ep_copy(ep, dst + after, src + after, (ep->num_rows - end) * row_bytes, stream);
}

static epmoe_status_t begin(epmoe_ep_t *ep, const epmoei_trip_t *trip, epmoe_stream_t stream)
{
    if (!epmoei_ep_is_cuda(ep)) return EPMOE_OK;
    EPMOEI_CHECK(trip->home ? copy_rows(ep, trip->host_rows, trip->rows, false, trip->row_bytes, stream)
                            : copy_rows(ep, trip->host_outbox, trip->outbox, true, trip->row_bytes, stream));
    EPMOEI_CHECK(epmoei_ep_mark(ep, stream));
    return epmoei_ep_wait(ep, trip->phase);
}

static epmoe_status_t finish(epmoe_ep_t *ep, const epmoei_trip_t *trip, epmoe_stream_t stream)
{
    if (!epmoei_ep_is_cuda(ep)) return EPMOE_OK;
    return trip->home ? copy_rows(ep, trip->outbox, trip->host_outbox, true, trip->row_bytes, stream)
                      : copy_rows(ep, trip->rows, trip->host_rows, false, trip->row_bytes, stream);
}

const epmoei_transport_ops_t epmoei_transport_mpi = {.begin = begin, .finish = finish};
