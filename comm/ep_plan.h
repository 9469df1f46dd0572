/* One dispatch/combine pair: its buffers, and where every row goes.
 *
 * A token's row goes once to each rank that owns one of its experts. The rows that this rank sends are its slots: by
 * destination rank, tokens ascending; slots of the own rank are copied, never sent. A rank receives rows by source
 * rank, tokens ascending, each part straight into its final place. Combine sends row i back to where it came from, so
 * that the partial rows of the peers arrive in slot order. */
#ifndef EPMOEI_EP_PLAN_H
#define EPMOEI_EP_PLAN_H

#include "comm/comm.h"

/* What every rank tells every other before rows travel. `text` is the error's, for a status that is not OK. */
typedef struct epmoei_header_t {
    uint64_t magic;
    int64_t object;   /* which dispatch object of the communicator */
    int64_t sequence; /* dispatches on the communicator before this one */
    int32_t status;
    int32_t reuse_routing;
    char text[224];
    int32_t counts[]; /* [size]: rows for each rank */
} epmoei_header_t;

typedef enum epmoei_ep_state_t {
    EPMOEI_EP_IDLE = 0,
    EPMOEI_EP_SENDING = 1, /* between the halves of dispatch */
    EPMOEI_EP_OPEN = 2,    /* rows are here, combine is due */
} epmoei_ep_state_t;

/* Everything that is carved, with sizes in ep_plan.c. R = size, m = min(k, R) ranks per token at most. */
typedef struct epmoei_ep_buffers_t {
    int64_t *capacity;      /* [R] rows that each rank accepts */
    char *headers;          /* [R] of header_bytes */
    int64_t *send_offset;   /* [R+1] first slot of each destination rank */
    int64_t *recv_offset;   /* [R+1] first received row of each source rank */
    int32_t *first_expert;  /* [R+1] */
    int32_t *owner;         /* [E] rank that owns the expert */
    int32_t *cursor;        /* [R] scratch */
    int32_t *slot_token;    /* [max_tokens*m] */
    int32_t *token_slots;   /* [max_tokens,m] slots of a token, ranks ascending, then -1 */
    epmoe_segment_t *sends; /* [3*R] */
    epmoe_segment_t *recvs; /* [3*R] */
    char *outbox;           /* packed x rows for the peers; during combine the partial rows that come home */
    int32_t *outbox_ids;    /* local ids of the packed rows */
    float *outbox_weights;  /* */
    char *x;                /* [max_rows,d] received */
    int32_t *ids;           /* [max_rows,k] */
    float *weights;         /* [max_rows,k] */
    char *y;                /* [max_rows,d] of the partial dtype */
} epmoei_ep_buffers_t;

struct epmoe_ep {
    epmoe_comm_t *comm;
    epmoe_ep_config_t config; /* normalised */
    int32_t rank, size;
    int32_t max_rows;
    int64_t object;
    int64_t header_bytes;
    int64_t row_bytes;     /* of an x row on the wire */
    int64_t partial_bytes; /* of a partial row */
    epmoe_dtype_t partial_dtype;

    epmoei_ep_state_t state;
    bool routing_valid; /* slots are those of the previous dispatch, which succeeded */
    bool in_flight;     /* a transport may still touch the buffers */
    int32_t num_tokens;
    int32_t num_rows;
    int64_t wire_bytes; /* of the last dispatch and its combine */
    const void *x;      /* rows for the caller: the received ones, with one rank his own */
    const int32_t *ids;
    const float *weights;

    void *memory;
    epmoei_ep_buffers_t buffers;
    struct epmoe_ep *next_kept;
};

#define EPMOEI_PARALLEL_BYTES 65536 /* below this, moving rows on several threads costs more than it brings */

static inline epmoei_header_t *epmoei_ep_header(const epmoe_ep_t *ep, int32_t rank)
{
    return (epmoei_header_t *)(void *)(ep->buffers.headers + rank * ep->header_bytes);
}

/* Slots of peers before `slot`: the outbox leaves out the own rank's. */
static inline int64_t epmoei_ep_outbox_row(const epmoe_ep_t *ep, int64_t slot)
{
    const int64_t *offset = ep->buffers.send_offset;
    return slot < offset[ep->rank + 1] ? slot : slot - (offset[ep->rank + 1] - offset[ep->rank]);
}

/* An exchange whose buffers are the object's own: it is in flight until it has finished. */
epmoe_status_t epmoei_ep_exchange_begin(epmoe_ep_t *ep, const char *phase, int32_t num_sends, int32_t num_recvs);
epmoe_status_t epmoei_ep_exchange_finish(epmoe_ep_t *ep, const char *phase);

#endif
