/* Combine over host memory: partial rows go back to where their tokens came from, and are summed there.
 *   bytes on the wire per row: d * (2 for a bf16 partial, else 4) */
#include "comm/ep_plan.h"

#include "kernels/row_blocks.h"

#include <string.h>

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

static void sum_block(const epmoe_ep_t *ep, const epmoe_combine_args_t *args, epmoei_block_t block)
{
    int32_t width = ep->config.top_k < ep->size ? ep->config.top_k : ep->size;
    const int32_t *slots = ep->size > 1 ? ep->buffers.token_slots + block.row * width : NULL;
    int64_t at = block.row * ep->config.hidden + block.first;
    float acc[EPMOEI_BLOCK_COLS];
    memset(acc, 0, (size_t)block.cols * sizeof *acc);
    if (!slots) epmoei_block_add(acc, ep->buffers.y, ep->partial_dtype, at, block.cols, 1.0f);
    for (int32_t i = 0; slots && i < width && slots[i] >= 0; i++)
        epmoei_block_add(acc, partial_row(ep, slots[i]), ep->partial_dtype, block.first, block.cols, 1.0f);
    if (args->shared) epmoei_block_add(acc, args->shared, EPMOE_F32, at, block.cols, 1.0f);
    if (args->residual) epmoei_block_add(acc, args->residual, ep->config.dtype, at, block.cols, 1.0f);
    epmoei_from_f32(epmoei_at(args->y, ep->config.dtype, at), acc, ep->config.dtype, block.cols);
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

    int64_t hidden = ep->config.hidden, num_blocks = ep->num_tokens * epmoei_blocks_per_row(hidden);
#pragma omp parallel for schedule(static) if (ep->num_tokens * hidden >= EPMOEI_MIN_PARALLEL_ELEMENTS)
    for (int64_t i = 0; i < num_blocks; i++) sum_block(ep, &own, epmoei_block(i, hidden));
    return EPMOE_OK;
}
