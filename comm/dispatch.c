/* Dispatch: headers tell every rank who sends how many rows to whom, then rows go to their final places. The plan is
 * the host's on both backends; what moves x rows is the transport.
 *   bytes on the wire per row: d*b (x; in FP8 d + 4*ceil(d/128)) + 4*k (local ids) + 4*k (weights) */
#include "comm/ep_rows.h"
#include "comm/ep_wire.h"
#include "comm/transport.h"

#include <stdio.h>
#include <string.h>

static epmoe_status_t check_args(const epmoe_ep_t *ep, epmoe_dispatch_args_t *own, const epmoe_dispatch_args_t *args)
{
    *own = (epmoe_dispatch_args_t)EPMOE_DISPATCH_ARGS_INIT;
    EPMOEI_CHECK(epmoei_copy_sized(own, sizeof *own, args, "args"));
    int32_t tokens = own->num_tokens;
    if (tokens < 0 || tokens > ep->config.max_tokens)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "num_tokens is %d: expected 0..%d (max_tokens)", tokens,
                           ep->config.max_tokens);
    if (own->reuse_routing != 0 && own->reuse_routing != 1)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "reuse_routing is %d: expected 0 or 1", own->reuse_routing);
    if (own->reuse_routing && !ep->routing_valid)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "reuse_routing is 1: there is no successful dispatch before");
    if (own->reuse_routing && tokens != ep->num_tokens)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "num_tokens is %d with reuse_routing: expected %d as before",
                           tokens, ep->num_tokens);
    if (tokens > 0 && (!own->x || !own->ids || !own->weights))
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s is NULL with num_tokens %d",
                           !own->x     ? "x"
                           : !own->ids ? "ids"
                                       : "weights",
                           tokens);
    if (own->max_rank_tokens < 0 || (own->max_rank_tokens && own->max_rank_tokens < tokens))
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                           "max_rank_tokens is %d: expected 0 or at least num_tokens (%d)", own->max_rank_tokens,
                           tokens);
    if (own->num_tokens_dev && !epmoei_ep_plans_on_device(ep))
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED,
                           "num_tokens_dev is given: over transport %s with %d ranks T is num_tokens alone",
                           epmoe_transport_string(ep->comm->transport), ep->size);
    EPMOEI_CHECK(epmoei_ep_check_aligned(ep, "x", own->x));
    EPMOEI_CHECK(epmoei_ep_check_aligned(ep, "ids", own->ids));
    EPMOEI_CHECK(epmoei_ep_check_aligned(ep, "expert_load", own->expert_load));
    return epmoei_ep_check_aligned(ep, "weights", own->weights);
}

/* On the device the plan is the host's too, which waits here for the stream to come to ids and weights. From here on
 * those of `own` are the host's. One rank plans nothing. */
static epmoe_status_t read_routing(epmoe_ep_t *ep, epmoe_dispatch_args_t *own, epmoe_stream_t stream)
{
    epmoei_ep_buffers_t *b = &ep->buffers;
    if (!epmoei_ep_is_cuda(ep) || ep->size == 1) return EPMOE_OK;
    EPMOEI_CHECK(epmoei_ep_wait(ep, "dispatch")); /* the call before may have been on another stream */
    int64_t bytes = 4 * (int64_t)own->num_tokens * ep->config.top_k;
    if (!own->reuse_routing) EPMOEI_CHECK(epmoei_ep_copy(ep, b->own_ids, own->ids, bytes, stream));
    EPMOEI_CHECK(epmoei_ep_copy(ep, b->own_weights, own->weights, bytes, stream));
    EPMOEI_CHECK(epmoei_ep_mark(ep, stream));
    EPMOEI_CHECK(epmoei_ep_wait(ep, "dispatch"));
    own->ids = b->own_ids;
    own->weights = b->own_weights;
    return EPMOE_OK;
}

static epmoe_status_t check_ids(const epmoe_ep_t *ep, const epmoe_dispatch_args_t *args)
{
    int32_t k = ep->config.top_k, experts = ep->num_experts;
    if (epmoei_ep_is_cuda(ep) && ep->size == 1) return EPMOE_OK; /* the kernels count what is out of range */
    if (args->reuse_routing && ep->placement) return EPMOE_OK;   /* the placed ids of the routing dispatch are used */
    for (int64_t i = 0; i < (int64_t)args->num_tokens * k; i++)
        if (args->ids[i] < -1 || args->ids[i] >= experts)
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "ids[%lld,%lld] is %d: expected -1..%d",
                               (long long)(i / k), (long long)(i % k), args->ids[i], experts - 1);
    return EPMOE_OK;
}

/* From here on the ids of `own` are physical experts. Where the host does not plan, the load is counted in the same
 * pass; otherwise count_load does it, once no rank can fail any more. */
static epmoe_status_t place_ids(epmoe_ep_t *ep, epmoe_dispatch_args_t *own, epmoe_stream_t stream)
{
    const epmoei_ep_buffers_t *b = &ep->buffers;
    const bool host_plans = ep->size > 1 && !epmoei_ep_plans_on_device(ep);
    int32_t *physical_ids = b->physical_ids ? b->physical_ids : b->own_ids;
    int64_t *load = host_plans ? NULL : own->expert_load;
    if (own->num_tokens == 0 || (!ep->placement && !load)) return EPMOE_OK;
    if (!own->reuse_routing) {
        epmoei_place_ids_t place = epmoei_placement_args(ep->placement, ep->num_experts);
        place.num_tokens = own->num_tokens;
        place.num_tokens_dev = own->num_tokens_dev;
        place.top_k = ep->config.top_k;
        place.ids = own->ids;
        place.physical_ids = ep->placement ? physical_ids : NULL;
        place.load = load;
        if (host_plans) { /* on CUDA too */
            place.copies = ep->placement->copies;
            place.physical = ep->placement->physical;
            epmoei_place_ids_cpu(&place);
        } else {
            if (epmoei_ep_is_cuda(ep)) place.error_word = epmoei_error_word();
            EPMOEI_CHECK(epmoei_place_ids(ep->comm->backend, &place, stream));
        }
    }
    if (ep->placement) own->ids = physical_ids;
    return EPMOE_OK;
}

/* `routed` has the caller's own ids. */
static epmoe_status_t count_load(const epmoe_ep_t *ep, const epmoe_dispatch_args_t *routed, epmoe_stream_t stream)
{
    if (!routed->expert_load || routed->reuse_routing || routed->num_tokens == 0) return EPMOE_OK;
    epmoei_place_ids_t count = epmoei_placement_args(NULL, ep->num_experts);
    count.num_tokens = routed->num_tokens;
    count.top_k = ep->config.top_k;
    count.ids = routed->ids;
    count.load = routed->expert_load;
    return epmoei_place_ids(ep->comm->backend, &count, stream);
}

/* `x` NULL: the transport moves it; `ids` NULL: they are known. */
static int32_t add_segments(const epmoe_ep_t *ep, epmoe_segment_t *segments, int32_t num, int32_t peer,
                            epmoei_rows_t rows, char *x, int32_t *ids, float *weights)
{
    int64_t k = ep->config.top_k, first = rows.first * k, bytes = rows.num * k * 4;
    if (rows.num == 0) return num;
    if (x)
        segments[num++] =
            (epmoe_segment_t){peer, 0, x + rows.first * ep->wire_row_bytes, rows.num * ep->wire_row_bytes};
    segments[num++] = (epmoe_segment_t){peer, 0, weights + first, bytes};
    if (ids) segments[num++] = (epmoe_segment_t){peer, 0, ids + first, bytes};
    return num;
}

static epmoe_status_t begin_rows(epmoe_ep_t *ep, const epmoe_dispatch_args_t *args, epmoe_stream_t stream)
{
    epmoei_ep_buffers_t *b = &ep->buffers;
    epmoei_trip_t trip = epmoei_ep_trip(ep, false);
    int32_t num_sends = 0, num_recvs = 0;
    bool known = args->reuse_routing;
    b->recv_offset[0] = 0;
    for (int32_t r = 0; r < ep->size; r++) {
        b->recv_offset[r + 1] = b->recv_offset[r] + epmoei_ep_header(ep, r)->counts[ep->rank];
        if (r == ep->rank) continue;
        num_recvs = add_segments(ep, b->recvs, num_recvs, r, epmoei_ep_received_rows(ep, r), trip.host_rows,
                                 known ? NULL : b->ids, b->weights);
        num_sends = add_segments(ep, b->sends, num_sends, r, epmoei_ep_outbox_rows(ep, r), trip.host_outbox,
                                 known ? NULL : b->outbox_ids, b->outbox_weights);
    }
    int64_t own = epmoei_ep_received_rows(ep, ep->rank).num, routing_bytes = (known ? 4 : 8) * ep->config.top_k;
    ep->num_rows = (int32_t)b->recv_offset[ep->size];
    ep->bytes_sent =
        (ep->num_rows - own) * ep->partial_bytes + epmoei_ep_outbox_total(ep) * (ep->wire_row_bytes + routing_bytes);
    if (ep->comm->ops->begin) EPMOEI_CHECK(ep->comm->ops->begin(ep, &trip, stream));
    EPMOEI_CHECK(epmoei_ep_exchange_begin(ep, trip.phase, num_sends, num_recvs));
    EPMOEI_CHECK(epmoei_ep_copy_own_rows(ep, args, stream));
    ep->x = b->x;
    ep->ids = b->device_ids;
    ep->weights = b->device_weights;
    return EPMOE_OK;
}

static epmoe_status_t finish_rows(epmoe_ep_t *ep, epmoe_stream_t stream)
{
    epmoei_ep_buffers_t *b = &ep->buffers;
    epmoei_trip_t trip = epmoei_ep_trip(ep, false);
    int64_t bytes = 4 * (int64_t)ep->num_rows * ep->config.top_k;
    EPMOEI_CHECK(epmoei_ep_exchange_finish(ep, trip.phase));
    if (ep->comm->ops->finish) EPMOEI_CHECK(ep->comm->ops->finish(ep, &trip, stream));
    EPMOEI_CHECK(epmoei_ep_unpack_rows(ep, stream));
    EPMOEI_CHECK(epmoei_ep_copy(ep, b->device_ids, b->ids, bytes, stream));
    EPMOEI_CHECK(epmoei_ep_copy(ep, b->device_weights, b->weights, bytes, stream));
    return epmoei_ep_mark(ep, stream);
}

static epmoe_status_t begin_local(epmoe_ep_t *ep, epmoe_dispatch_args_t *args, epmoe_stream_t stream)
{
    if (args->num_tokens > ep->max_rows)
        return epmoei_fail(EPMOE_ERROR_CAPACITY, "dispatch: rank 0 would receive %d rows, its capacity is %d",
                           args->num_tokens, ep->max_rows);
    EPMOEI_CHECK(place_ids(ep, args, stream));
    ep->num_rows = args->num_tokens;
    ep->x = args->x;
    ep->ids = args->ids;
    ep->weights = args->weights;
    if (!epmoei_ep_is_coded(ep)) return EPMOE_OK;
    ep->x = ep->buffers.x;
    const epmoei_round_rows_t round = {.dst = ep->buffers.x,
                                       .src = args->x,
                                       .dtype = ep->config.dtype,
                                       .hidden = ep->config.hidden,
                                       .num_rows = args->num_tokens};
    return epmoei_round_rows(ep->comm->backend, &round, stream);
}

static epmoe_status_t begin_remote(epmoe_ep_t *ep, const epmoe_dispatch_args_t *args, epmoe_status_t local,
                                   epmoe_stream_t stream)
{
    epmoei_header_t *header = epmoei_ep_header(ep, ep->rank);
    header->magic = EPMOEI_HEADER_MAGIC;
    header->object = ep->object;
    header->sequence = ep->comm->sequence;
    header->status = (int32_t)local;
    header->reuse_routing = args->reuse_routing;
    memset(header->text, 0, sizeof header->text);
    if (local != EPMOE_OK)
        snprintf(header->text, sizeof header->text, "%s", epmoe_last_error());
    else if (!args->reuse_routing)
        epmoei_ep_route(ep, args, header->counts);

    EPMOEI_CHECK(epmoei_headers_begin(ep));
    epmoe_status_t packed =
        local == EPMOE_OK ? epmoei_ep_pack_outbox(ep, args, stream) : EPMOE_OK; /* while headers travel */
    EPMOEI_CHECK(epmoei_headers_finish(ep, local));
    /* Peers count on these rows now. */
    if (packed == EPMOE_OK) packed = begin_rows(ep, args, stream);
    return packed == EPMOE_OK ? EPMOE_OK : epmoei_comm_fail(ep->comm, packed);
}

/* Everything is the device's. Where this rank cannot use its stream, or nobody may ever launch what it captures, the
 * call has not taken place. */
static epmoe_status_t dispatch_on_device(epmoe_ep_t *ep, const epmoe_dispatch_args_t *args, epmoe_status_t local,
                                         epmoe_stream_t stream)
{
    epmoe_dispatch_args_t own = EPMOE_DISPATCH_ARGS_INIT;
    EPMOEI_CHECK(epmoei_ep_check_stream(ep, "dispatch", stream));
    if (local == EPMOE_OK) local = check_args(ep, &own, args);
    if (local != EPMOE_OK && epmoei_stream_is_capturing(EPMOE_BACKEND_CUDA, stream)) return local;
    if (local == EPMOE_OK) local = place_ids(ep, &own, stream);
    ep->state = EPMOEI_EP_IDLE;
    ep->routing_valid = false;
    EPMOEI_CHECK(ep->comm->ops->dispatch(ep, &own, local, stream));
    ep->num_tokens = own.num_tokens;
    ep->state = EPMOEI_EP_SENDING;
    return EPMOE_OK;
}

epmoe_status_t epmoei_dispatch_begin(epmoe_ep_t *ep, const epmoe_dispatch_args_t *args, epmoe_status_t local,
                                     epmoe_stream_t stream)
{
    if (!ep) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "ep is NULL");
    if (ep->state == EPMOEI_EP_SENDING)
        return epmoei_fail(EPMOE_ERROR_BAD_STATE, "dispatch: the one before has not been finished");
    EPMOEI_CHECK(epmoei_comm_enter(ep->comm));
    if (epmoei_ep_plans_on_device(ep)) return dispatch_on_device(ep, args, local, stream);
    epmoe_dispatch_args_t own = EPMOE_DISPATCH_ARGS_INIT;
    if (local == EPMOE_OK) local = epmoei_ep_check_stream(ep, "dispatch", stream);
    if (local == EPMOE_OK) local = check_args(ep, &own, args);
    const epmoe_dispatch_args_t routed = own;
    if (local == EPMOE_OK) local = read_routing(ep, &own, stream);
    if (ep->comm->failed != EPMOE_OK) return local;
    if (local == EPMOE_OK) local = check_ids(ep, &own);
    ep->state = EPMOEI_EP_IDLE;
    ep->routing_valid = false;
    if (ep->size == 1) {
        EPMOEI_CHECK(local);
        EPMOEI_CHECK(begin_local(ep, &own, stream));
    } else {
        if (local == EPMOE_OK) local = place_ids(ep, &own, stream);
        EPMOEI_CHECK(begin_remote(ep, &own, local, stream));
        epmoe_status_t counted = count_load(ep, &routed, stream);
        if (counted != EPMOE_OK) return epmoei_comm_fail(ep->comm, counted);
    }
    ep->num_tokens = own.num_tokens;
    ep->state = EPMOEI_EP_SENDING;
    return EPMOE_OK;
}

epmoe_status_t epmoei_dispatch_finish(epmoe_ep_t *ep, epmoe_dispatch_result_t *result, epmoe_stream_t stream)
{
    if (!ep) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "ep is NULL");
    if (ep->state != EPMOEI_EP_SENDING) return epmoei_fail(EPMOE_ERROR_BAD_STATE, "dispatch: finish without a begin");
    ep->state = EPMOEI_EP_IDLE;
    const int32_t *num_rows = epmoei_ep_is_cuda(ep) ? ep->buffers.device_num_rows : &ep->num_rows;
    epmoe_status_t status = EPMOE_OK;
    bool on_device = epmoei_ep_plans_on_device(ep);
    if (ep->size > 1 && !on_device) status = finish_rows(ep, stream);
    if (status == EPMOE_OK && epmoei_ep_is_cuda(ep) && !on_device)
        status = epmoei_store_count(EPMOE_BACKEND_CUDA, ep->buffers.device_num_rows, ep->num_rows, stream);
    if (status != EPMOE_OK) return ep->size > 1 ? epmoei_comm_fail(ep->comm, status) : status;
    ep->state = EPMOEI_EP_OPEN;
    ep->routing_valid = true;
    epmoe_dispatch_result_t own = {
        .struct_size = sizeof own,
        .max_rows = ep->max_rows,
        .num_rows = num_rows,
        .x = ep->x,
        .ids = ep->ids,
        .weights = ep->weights,
        .y = ep->buffers.y,
    };
    return epmoei_return_sized(result, &own, sizeof own, "result");
}

epmoe_status_t epmoe_dispatch(epmoe_ep_t *ep, const epmoe_dispatch_args_t *args, epmoe_dispatch_result_t *result,
                              epmoe_stream_t stream)
{
    /* A result that cannot be filled must be known before rows travel. */
    epmoe_status_t local = EPMOE_OK;
    if (!result)
        local = epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "result is NULL");
    else if (result->struct_size < sizeof result->struct_size || result->struct_size > 65536)
        local =
            epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                        "result->struct_size is %zu: initialise the struct with its INIT macro", result->struct_size);
    EPMOEI_CHECK(epmoei_dispatch_begin(ep, args, local, stream));
    return epmoei_dispatch_finish(ep, result, stream);
}
