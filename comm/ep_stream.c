/* What dispatch and combine ask of a stream: whether they may work on it, marks in it, and copies. */
#include "comm/transport.h"

#include "kernels/op_check.h"

epmoe_status_t epmoei_ep_check_stream(const epmoe_ep_t *ep, const char *call, epmoe_stream_t stream)
{
    if (!epmoei_ep_is_cuda(ep)) return EPMOE_OK;
    EPMOEI_CHECK(epmoei_comm_check_device(ep->comm));
    if (ep->size == 1 || epmoei_ep_plans_on_device(ep)) return EPMOE_OK;
    if (epmoei_stream_is_capturing(EPMOE_BACKEND_CUDA, stream))
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED,
                           "%s: stream is being captured: transport %s plans on the host, with what it reads back from "
                           "the device, and no graph can replay that",
                           call, epmoe_transport_string(ep->comm->transport));
    return EPMOE_OK;
}

epmoe_status_t epmoei_ep_check_aligned(const epmoe_ep_t *ep, const char *name, const void *pointer)
{
    return epmoei_ep_is_cuda(ep) ? epmoei_check_aligned(name, pointer, 16) : EPMOE_OK;
}

epmoe_status_t epmoei_ep_mark(epmoe_ep_t *ep, epmoe_stream_t stream)
{
    return epmoei_ep_is_cuda(ep) ? epmoei_event_record(ep->event, stream) : EPMOE_OK;
}

static epmoe_status_t ask_mark(void *ctx, bool *over) { return epmoei_event_query(((epmoe_ep_t *)ctx)->event, over); }

epmoe_status_t epmoei_ep_wait(epmoe_ep_t *ep, const char *phase)
{
    if (!epmoei_ep_is_cuda(ep)) return EPMOE_OK;
    return epmoei_comm_wait(ep->comm, phase, "the work on this rank's own stream has not ended", ask_mark, ep);
}

epmoe_status_t epmoei_ep_copy(const epmoe_ep_t *ep, void *dst, const void *src, int64_t bytes, epmoe_stream_t stream)
{
    return dst == src ? EPMOE_OK : epmoei_memory_copy(ep->comm->backend, dst, src, bytes, stream);
}
