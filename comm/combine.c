/* Combine over host memory: partial rows go back to where their tokens came from, and are summed there.
 *   bytes on the wire per row: d * (2 for a bf16 partial, else 4) */
#include "comm/ep_plan.h"

#include "base/dtype.h"

#include <string.h>

#define CHUNK 1024 /* columns of one accumulator: stays in the first cache level */

static epmoe_status_t check_args(const epmoe_ep_t *ep, epmoe_combine_args_t *own, const epmoe_combine_args_t *args)
{
    EPMOEI_CHECK(epmoei_copy_sized(own, sizeof *own, args, "args"));
    if (ep->num_tokens > 0 && !own->y)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "y is NULL with num_tokens %d", ep->num_tokens);
    return EPMOE_OK;
}

static epmoe_status_t bring_home(epmoe_ep_t *ep)
{
    epmoei_ep_buffers_t *b = &ep->buffers;
    int32_t num_sends = 0, num_recvs = 0;
    for (int32_t r = 0; r < ep->size; r++) {
        if (r == ep->rank) continue;
        int64_t row = b->recv_offset[r], rows = b->recv_offset[r + 1] - row;
        int64_t slot = b->send_offset[r], slots = b->send_offset[r + 1] - slot;
        if (rows > 0)
            b->sends[num_sends++] = (epmoe_segment_t){r, 0, b->y + row * ep->partial_bytes, rows * ep->partial_bytes};
        if (slots > 0)
            b->recvs[num_recvs++] = (epmoe_segment_t){
                r, 0, b->outbox + epmoei_ep_outbox_row(ep, slot) * ep->partial_bytes, slots * ep->partial_bytes};
    }
    EPMOEI_CHECK(epmoei_ep_exchange_begin(ep, "combine", num_sends, num_recvs));
    return epmoei_ep_exchange_finish(ep, "combine");
}

static const char *partial_row(const epmoe_ep_t *ep, int64_t slot)
{
    const epmoei_ep_buffers_t *b = &ep->buffers;
    int64_t first = b->send_offset[ep->rank], end = b->send_offset[ep->rank + 1];
    if (slot >= first && slot < end) return b->y + (b->recv_offset[ep->rank] + slot - first) * ep->partial_bytes;
    return b->outbox + epmoei_ep_outbox_row(ep, slot) * ep->partial_bytes;
}

/* acc[c] += src[first + c] */
static void add_columns(float *restrict acc, const void *src, epmoe_dtype_t dtype, int64_t first, int64_t num)
{
    switch (dtype) {
    case EPMOE_F32:
        for (int64_t c = 0; c < num; c++) acc[c] += epmoei_load(src, EPMOE_F32, first + c);
        break;
    case EPMOE_BF16:
        for (int64_t c = 0; c < num; c++) acc[c] += epmoei_load(src, EPMOE_BF16, first + c);
        break;
    default:
        for (int64_t c = 0; c < num; c++) acc[c] += epmoei_load(src, EPMOE_F16, first + c);
        break;
    }
}

static void sum_token(const epmoe_ep_t *ep, const epmoe_combine_args_t *args, int64_t t)
{
    const char *rows[EPMOE_MAX_TOP_K];
    int32_t num_rows = 0, width = ep->config.top_k < ep->size ? ep->config.top_k : ep->size;
    int64_t d = ep->config.hidden, element = epmoe_dtype_size(ep->config.dtype);
    if (ep->size == 1)
        rows[num_rows++] = ep->buffers.y + t * ep->partial_bytes;
    else
        for (int32_t i = 0; i < width && ep->buffers.token_slots[t * width + i] >= 0; i++)
            rows[num_rows++] = partial_row(ep, ep->buffers.token_slots[t * width + i]);

    for (int64_t first = 0; first < d; first += CHUNK) {
        float acc[CHUNK];
        int64_t num = epmoei_min64(CHUNK, d - first);
        memset(acc, 0, (size_t)num * sizeof *acc);
        for (int32_t i = 0; i < num_rows; i++) add_columns(acc, rows[i], ep->partial_dtype, first, num);
        if (args->shared) add_columns(acc, args->shared, EPMOE_F32, t * d + first, num);
        if (args->residual) add_columns(acc, args->residual, ep->config.dtype, t * d + first, num);
        epmoei_from_f32((char *)args->y + (t * d + first) * element, acc, ep->config.dtype, num);
    }
}

epmoe_status_t epmoe_combine(epmoe_ep_t *ep, const epmoe_combine_args_t *args, epmoe_stream_t stream)
{
    (void)stream;
    if (!ep) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "ep is NULL");
    EPMOEI_CHECK(epmoei_comm_enter(ep->comm));
    if (ep->state != EPMOEI_EP_OPEN)
        return epmoei_fail(EPMOE_ERROR_BAD_STATE, "combine: there is no dispatch to bring home");
    ep->state = EPMOEI_EP_IDLE;
    epmoe_combine_args_t own = EPMOE_COMBINE_ARGS_INIT;
    epmoe_status_t local = check_args(ep, &own, args);
    if (ep->size > 1) EPMOEI_CHECK(bring_home(ep)); /* also with a bad argument: the peers wait for these rows */
    EPMOEI_CHECK(local);

    int64_t bytes = (int64_t)ep->num_tokens * ep->partial_bytes;
#pragma omp parallel for schedule(static) if (bytes > EPMOEI_PARALLEL_BYTES)
    for (int64_t t = 0; t < ep->num_tokens; t++) sum_token(ep, &own, t);
    return EPMOE_OK;
}
