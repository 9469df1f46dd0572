/* Headers of a dispatch: every rank tells every other its status and how many rows it has for each rank. They travel
 * over host memory whatever the transport. */
#include "comm/ep_plan.h"

epmoe_status_t epmoei_headers_begin(epmoe_ep_t *ep)
{
    epmoei_ep_buffers_t *b = &ep->buffers;
    int32_t num = 0;
    for (int32_t r = 0; r < ep->size; r++) {
        if (r == ep->rank) continue;
        b->sends[num] = (epmoe_segment_t){r, 0, epmoei_ep_header(ep, ep->rank), ep->header_bytes};
        b->recvs[num] = (epmoe_segment_t){r, 0, epmoei_ep_header(ep, r), ep->header_bytes};
        num++;
    }
    return epmoei_ep_exchange_begin(ep, "dispatch (headers)", num, num);
}

/* Every rank sees the same headers; a failing rank keeps its own status. */
static epmoe_status_t judge_headers(epmoe_ep_t *ep, epmoe_status_t own)
{
    epmoe_comm_t *comm = ep->comm;
    const epmoei_header_t *mine = epmoei_ep_header(ep, ep->rank), *first = epmoei_ep_header(ep, 0);
    int64_t sequence = mine->sequence;
    for (int32_t r = 0; r < ep->size; r++) {
        const epmoei_header_t *other = epmoei_ep_header(ep, r);
        if (other->magic != EPMOEI_HEADER_MAGIC)
            return epmoei_comm_fail(comm, epmoei_fail(EPMOE_ERROR_MISMATCH,
                                                      "dispatch: rank %d is in a dispatch, rank %d in another call",
                                                      ep->rank, r));
        sequence = epmoei_max64(sequence, other->sequence);
    }
    comm->sequence = sequence + 1;
    if (own != EPMOE_OK) return own;
    for (int32_t r = 0; r < ep->size; r++) {
        const epmoei_header_t *other = epmoei_ep_header(ep, r);
        if (other->object != first->object || other->sequence != first->sequence)
            return epmoei_fail(EPMOE_ERROR_MISMATCH,
                               "dispatch: rank 0 is in number %lld on object %lld, rank %d in number %lld on %lld",
                               (long long)first->sequence, (long long)first->object, r, (long long)other->sequence,
                               (long long)other->object);
    }
    for (int32_t r = 0; r < ep->size; r++) {
        const epmoei_header_t *other = epmoei_ep_header(ep, r);
        if (other->status != EPMOE_OK)
            return epmoei_fail(EPMOE_ERROR_PEER, "dispatch: rank %d failed (%s): %.223s", r,
                               epmoe_status_string((epmoe_status_t)other->status), other->text);
    }
    for (int32_t r = 0; r < ep->size; r++)
        if (epmoei_ep_header(ep, r)->reuse_routing != first->reuse_routing)
            return epmoei_fail(EPMOE_ERROR_MISMATCH, "dispatch: reuse_routing is %d on rank 0 and %d on rank %d",
                               first->reuse_routing, epmoei_ep_header(ep, r)->reuse_routing, r);
    for (int32_t to = 0; to < ep->size; to++) {
        int64_t rows = 0;
        for (int32_t from = 0; from < ep->size; from++) rows += epmoei_ep_header(ep, from)->counts[to];
        if (rows > ep->buffers.capacity[to])
            return epmoei_fail(EPMOE_ERROR_CAPACITY, "dispatch: rank %d would receive %lld rows, its capacity is %lld",
                               to, (long long)rows, (long long)ep->buffers.capacity[to]);
    }
    return EPMOE_OK;
}

epmoe_status_t epmoei_headers_finish(epmoe_ep_t *ep, epmoe_status_t own)
{
    EPMOEI_CHECK(epmoei_ep_exchange_finish(ep, "dispatch (headers)"));
    return judge_headers(ep, own);
}
