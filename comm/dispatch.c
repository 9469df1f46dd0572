/* Dispatch over host memory: headers tell every rank who sends how many rows to whom, then rows go straight to their
 * final places.
 *   bytes on the wire per row: d*b (x) + 4*k (local ids) + 4*k (weights) */
#include "comm/ep_plan.h"

#include <stdio.h>
#include <string.h>

#define HEADER_MAGIC 0x31706564656f6d65u

static epmoe_status_t check_args(const epmoe_ep_t *ep, epmoe_dispatch_args_t *own, const epmoe_dispatch_args_t *args)
{
    *own = (epmoe_dispatch_args_t)EPMOE_DISPATCH_ARGS_INIT;
    EPMOEI_CHECK(epmoei_copy_sized(own, sizeof *own, args, "args"));
    int32_t tokens = own->num_tokens, k = ep->config.top_k, experts = ep->config.num_experts;
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
    for (int64_t i = 0; i < (int64_t)tokens * k; i++)
        if (own->ids[i] < -1 || own->ids[i] >= experts)
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "ids[%lld,%lld] is %d: expected -1..%d",
                               (long long)(i / k), (long long)(i % k), own->ids[i], experts - 1);
    return EPMOE_OK;
}

/* Slots of every token, and rows for every rank into `counts`. */
static void route(epmoe_ep_t *ep, const epmoe_dispatch_args_t *args, int32_t *counts)
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

/* Row `row` of x, ids and weights as `rank` sees token t: ids count from its first expert, -1 elsewhere. */
static void write_row(const epmoe_ep_t *ep, const epmoe_dispatch_args_t *args, int32_t rank, int64_t t, int64_t row,
                      char *x, int32_t *ids, float *weights)
{
    const epmoei_ep_buffers_t *b = &ep->buffers;
    int32_t k = ep->config.top_k, first = b->first_expert[rank], end = b->first_expert[rank + 1];
    memcpy(x + row * ep->row_bytes, (const char *)args->x + t * ep->row_bytes, (size_t)ep->row_bytes);
    for (int32_t j = 0; j < k; j++) {
        int32_t id = args->ids[t * k + j];
        bool here = id >= first && id < end;
        ids[row * k + j] = here ? id - first : -1;
        weights[row * k + j] = here ? args->weights[t * k + j] : 0;
    }
}

static void pack_outbox(const epmoe_ep_t *ep, const epmoe_dispatch_args_t *args)
{
    const epmoei_ep_buffers_t *b = &ep->buffers;
#pragma omp parallel if (b->send_offset[ep->size] * ep->row_bytes > EPMOEI_PARALLEL_BYTES)
    for (int32_t r = 0; r < ep->size; r++) {
        if (r == ep->rank) continue;
#pragma omp for schedule(static) nowait
        for (int64_t slot = b->send_offset[r]; slot < b->send_offset[r + 1]; slot++)
            write_row(ep, args, r, b->slot_token[slot], epmoei_ep_outbox_row(ep, slot), b->outbox, b->outbox_ids,
                      b->outbox_weights);
    }
}

static void copy_own_rows(const epmoe_ep_t *ep, const epmoe_dispatch_args_t *args)
{
    const epmoei_ep_buffers_t *b = &ep->buffers;
    int64_t first = b->send_offset[ep->rank], num = b->send_offset[ep->rank + 1] - first;
#pragma omp parallel for schedule(static) if (num * ep->row_bytes > EPMOEI_PARALLEL_BYTES)
    for (int64_t i = 0; i < num; i++)
        write_row(ep, args, ep->rank, b->slot_token[first + i], b->recv_offset[ep->rank] + i, b->x, b->ids, b->weights);
}

static epmoe_status_t begin_headers(epmoe_ep_t *ep)
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

/* Every rank sees the same headers and comes to the same verdict, but that a failing rank keeps its own status. */
static epmoe_status_t judge_headers(epmoe_ep_t *ep, epmoe_status_t own)
{
    epmoe_comm_t *comm = ep->comm;
    const epmoei_header_t *mine = epmoei_ep_header(ep, ep->rank), *first = epmoei_ep_header(ep, 0);
    int64_t sequence = mine->sequence;
    for (int32_t r = 0; r < ep->size; r++) {
        const epmoei_header_t *other = epmoei_ep_header(ep, r);
        if (other->magic != HEADER_MAGIC)
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

static int32_t add_segments(const epmoe_ep_t *ep, epmoe_segment_t *segments, int32_t num, int32_t peer, int64_t row,
                            int64_t rows, char *x, int32_t *ids, float *weights)
{
    int64_t k = ep->config.top_k;
    if (rows == 0) return num;
    segments[num++] = (epmoe_segment_t){peer, 0, x + row * ep->row_bytes, rows * ep->row_bytes};
    segments[num++] = (epmoe_segment_t){peer, 0, weights + row * k, rows * k * 4};
    if (ids) segments[num++] = (epmoe_segment_t){peer, 0, ids + row * k, rows * k * 4};
    return num;
}

static epmoe_status_t begin_rows(epmoe_ep_t *ep, const epmoe_dispatch_args_t *args)
{
    epmoei_ep_buffers_t *b = &ep->buffers;
    int32_t num_sends = 0, num_recvs = 0;
    b->recv_offset[0] = 0;
    for (int32_t r = 0; r < ep->size; r++) {
        int64_t rows = epmoei_ep_header(ep, r)->counts[ep->rank], slot = b->send_offset[r];
        b->recv_offset[r + 1] = b->recv_offset[r] + rows;
        if (r == ep->rank) continue;
        num_recvs = add_segments(ep, b->recvs, num_recvs, r, b->recv_offset[r], rows, b->x,
                                 args->reuse_routing ? NULL : b->ids, b->weights);
        num_sends =
            add_segments(ep, b->sends, num_sends, r, epmoei_ep_outbox_row(ep, slot), b->send_offset[r + 1] - slot,
                         b->outbox, args->reuse_routing ? NULL : b->outbox_ids, b->outbox_weights);
    }
    ep->num_rows = (int32_t)b->recv_offset[ep->size];
    ep->wire_bytes = (ep->num_rows - epmoei_ep_header(ep, ep->rank)->counts[ep->rank]) * ep->partial_bytes;
    for (int32_t i = 0; i < num_sends; i++) ep->wire_bytes += b->sends[i].bytes;
    EPMOEI_CHECK(epmoei_ep_exchange_begin(ep, "dispatch (rows)", num_sends, num_recvs));
    copy_own_rows(ep, args);
    ep->x = b->x;
    ep->ids = b->ids;
    ep->weights = b->weights;
    return EPMOE_OK;
}

static epmoe_status_t begin_local(epmoe_ep_t *ep, const epmoe_dispatch_args_t *args)
{
    if (args->num_tokens > ep->max_rows)
        return epmoei_fail(EPMOE_ERROR_CAPACITY, "dispatch: rank 0 would receive %d rows, its capacity is %d",
                           args->num_tokens, ep->max_rows);
    ep->num_rows = args->num_tokens;
    ep->x = args->x;
    ep->ids = args->ids;
    ep->weights = args->weights;
    return EPMOE_OK;
}

static epmoe_status_t begin_remote(epmoe_ep_t *ep, const epmoe_dispatch_args_t *args, epmoe_status_t local)
{
    epmoei_header_t *header = epmoei_ep_header(ep, ep->rank);
    header->magic = HEADER_MAGIC;
    header->object = ep->object;
    header->sequence = ep->comm->sequence;
    header->status = (int32_t)local;
    header->reuse_routing = args->reuse_routing;
    memset(header->text, 0, sizeof header->text);
    if (local != EPMOE_OK)
        snprintf(header->text, sizeof header->text, "%s", epmoe_last_error());
    else if (!args->reuse_routing)
        route(ep, args, header->counts);

    EPMOEI_CHECK(begin_headers(ep));
    if (local == EPMOE_OK) pack_outbox(ep, args); /* while headers travel */
    EPMOEI_CHECK(epmoei_ep_exchange_finish(ep, "dispatch (headers)"));
    EPMOEI_CHECK(judge_headers(ep, local));
    return begin_rows(ep, args);
}

epmoe_status_t epmoei_dispatch_begin(epmoe_ep_t *ep, const epmoe_dispatch_args_t *args, epmoe_status_t local)
{
    if (!ep) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "ep is NULL");
    if (ep->state == EPMOEI_EP_SENDING)
        return epmoei_fail(EPMOE_ERROR_BAD_STATE, "dispatch: the one before has not been finished");
    EPMOEI_CHECK(epmoei_comm_enter(ep->comm));
    epmoe_dispatch_args_t own = EPMOE_DISPATCH_ARGS_INIT;
    if (local == EPMOE_OK) local = check_args(ep, &own, args);
    ep->state = EPMOEI_EP_IDLE;
    ep->routing_valid = false;
    if (ep->size == 1) {
        EPMOEI_CHECK(local);
        EPMOEI_CHECK(begin_local(ep, &own));
    } else
        EPMOEI_CHECK(begin_remote(ep, &own, local));
    ep->num_tokens = own.num_tokens;
    ep->state = EPMOEI_EP_SENDING;
    return EPMOE_OK;
}

epmoe_status_t epmoei_dispatch_finish(epmoe_ep_t *ep, epmoe_dispatch_result_t *result)
{
    if (!ep) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "ep is NULL");
    if (ep->state != EPMOEI_EP_SENDING) return epmoei_fail(EPMOE_ERROR_BAD_STATE, "dispatch: finish without a begin");
    ep->state = EPMOEI_EP_IDLE;
    if (ep->size > 1) EPMOEI_CHECK(epmoei_ep_exchange_finish(ep, "dispatch (rows)"));
    ep->state = EPMOEI_EP_OPEN;
    ep->routing_valid = true;
    epmoe_dispatch_result_t own = {
        .struct_size = sizeof own,
        .max_rows = ep->max_rows,
        .num_rows = &ep->num_rows,
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
    (void)stream;
    /* A result that cannot be filled must be known before rows travel. */
    epmoe_status_t local = EPMOE_OK;
    if (!result)
        local = epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "result is NULL");
    else if (result->struct_size < sizeof result->struct_size || result->struct_size > 65536)
        local =
            epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                        "result->struct_size is %zu: initialise the struct with its INIT macro", result->struct_size);
    EPMOEI_CHECK(epmoei_dispatch_begin(ep, args, local));
    return epmoei_dispatch_finish(ep, result);
}
