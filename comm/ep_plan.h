/* One dispatch/combine pair: its buffers, and where every row goes.
 *
 * A token's row goes once to each rank that owns one of its experts. The rows that this rank sends are its slots: by
 * destination rank, tokens ascending; slots of the own rank are copied, never sent. A rank receives rows by source
 * rank, tokens ascending, each part straight into its final place. Combine sends row i back to where it came from, so
 * that the partial rows of the peers arrive in slot order. */
#ifndef EPMOEI_EP_PLAN_H
#define EPMOEI_EP_PLAN_H

#include "base/device.h"
#include "comm/comm.h"
#include "comm/placement.h"

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

/* Everything that is carved, with sizes in ep_plan.c. R = size, m = min(k, R) ranks per token at most.
 * Three kinds of memory: the host's; page-locked (P), which copies to and from the device go through; the backend's
 * (B), which rows lie in. On the CPU all are one, and a device_ array is the host's own. */
typedef struct epmoei_ep_buffers_t {
    int64_t *capacity;      /* [R] rows that each rank accepts */
    char *headers;          /* [R] of header_bytes */
    int64_t *send_offset;   /* [R+1] first slot of each destination rank */
    int64_t *recv_offset;   /* [R+1] first received row of each source rank */
    int32_t *first_expert;  /* [R+1] physical */
    int32_t *owner;         /* [P] rank that owns the physical expert */
    int32_t *cursor;        /* [R] scratch */
    int32_t *slot_token;    /* P [max_tokens*m] */
    int32_t *token_slots;   /* P [max_tokens,m] slots of a token, ranks ascending, then -1 */
    epmoe_segment_t *sends; /* [3*R] */
    epmoe_segment_t *recvs; /* [3*R] */
    char *outbox;           /* B packed rows for the peers as they travel; during combine the partial rows that come
                               home */
    int32_t *outbox_ids;    /* local ids of the packed rows */
    float *outbox_weights;  /* and weights */
    char *x;                /* B [max_rows,d] received; with one rank there only for rows in FP8 */
    char *wire;             /* B rows in FP8: [max_rows] of wire_row_bytes as they arrive */
    int32_t *ids;           /* P [max_rows,k] */
    float *weights;         /* P [max_rows,k] */
    char *y;                /* B [max_rows,d] of the partial dtype */
    int32_t *physical_ids;  /* B [max_tokens,k] with a placement; not on CUDA where the host plans, see own_ids */
    /* On the CPU those above; NULL or not used there where nothing is said. */
    int32_t *device_slot_token;
    int32_t *device_token_slots;
    int32_t *device_ids;
    float *device_weights;
    int32_t *device_num_rows; /* CUDA [1] */
    int32_t *own_ids;         /* P, CUDA [max_tokens,k] what the caller routed, as physical experts */
    float *own_weights;       /* P, CUDA [max_tokens,k] */
    char *staged_outbox;      /* P, CUDA over transport mpi: the outbox on its way */
    char *staged_rows;        /* P, CUDA over transport mpi: x or y on its way */
} epmoei_ep_buffers_t;

struct epmoe_ep {
    epmoe_comm_t *comm;
    epmoe_ep_config_t config; /* normalised; num_experts are the physical ones, which all but the caller's ids name */
    int32_t num_experts;      /* that the caller's ids name */
    epmoei_placement_t *placement; /* or NULL */
    int32_t rank, size;
    int32_t max_rows;
    int64_t object;
    int64_t header_bytes;
    int64_t row_bytes;      /* of an x row */
    int64_t wire_row_bytes; /* of an x row on the wire */
    int64_t partial_bytes;  /* of a partial row */
    epmoe_dtype_t partial_dtype;

    epmoei_ep_state_t state;
    bool routing_valid;   /* slots are those of the previous dispatch, which succeeded */
    bool in_flight;       /* a transport may still touch the buffers */
    epmoei_event_t event; /* CUDA: once it has passed, the stream is through with the page-locked memory */
    int32_t num_tokens;
    int32_t num_rows;
    int64_t bytes_sent; /* by the last dispatch and its combine */
    const void *x;      /* rows for the caller: the received ones, with one rank his own or, in FP8, rounded ones */
    const int32_t *ids;
    const float *weights;
    bool keeps_codes;          /* p2p: rows in FP8 are not decoded */
    epmoei_coded_rows_t codes; /* p2p in FP8: as they arrive */

    struct epmoei_p2p_ep *p2p; /* transport p2p's */
    void *memory;
    void *pinned_memory; /* CUDA */
    void *device_memory; /* CUDA */
    epmoei_ep_buffers_t buffers;
    struct epmoe_ep *next_kept;
};

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

/* Some rows of a buffer, one after the other. */
typedef struct epmoei_rows_t {
    int64_t first, num;
} epmoei_rows_t;

/* A peer's rows in the outbox. */
static inline epmoei_rows_t epmoei_ep_outbox_rows(const epmoe_ep_t *ep, int32_t peer)
{
    const int64_t *offset = ep->buffers.send_offset;
    return (epmoei_rows_t){epmoei_ep_outbox_row(ep, offset[peer]), offset[peer + 1] - offset[peer]};
}

/* A rank's rows among the received ones: in x and in y. */
static inline epmoei_rows_t epmoei_ep_received_rows(const epmoe_ep_t *ep, int32_t source)
{
    const int64_t *offset = ep->buffers.recv_offset;
    return (epmoei_rows_t){offset[source], offset[source + 1] - offset[source]};
}

/* Rows of the outbox altogether. */
static inline int64_t epmoei_ep_outbox_total(const epmoe_ep_t *ep)
{
    const int64_t *offset = ep->buffers.send_offset;
    return offset[ep->size] - (offset[ep->rank + 1] - offset[ep->rank]);
}

/* One way of the rows: out from the outbox to the x of other ranks, or home from y to the outbox. */
typedef struct epmoei_trip_t {
    const char *phase; /* for messages */
    bool home;
    int64_t row_bytes;
    char *outbox, *rows;           /* the backend's memory; rows is x, in FP8 `wire`, or y */
    char *host_outbox, *host_rows; /* what the host exchange moves: laid out alike; NULL when it moves no rows */
} epmoei_trip_t;
epmoei_trip_t epmoei_ep_trip(const epmoe_ep_t *ep, bool home);

/* Whether rows travel as codes (comm/ep_wire.h). */
static inline bool epmoei_ep_is_coded(const epmoe_ep_t *ep) { return ep->config.wire_dtype != ep->config.dtype; }

static inline bool epmoei_ep_is_cuda(const epmoe_ep_t *ep) { return ep->comm->backend == EPMOE_BACKEND_CUDA; }

/* Before anything is done on a stream: BAD_STATE for a wrong current device, NOT_SUPPORTED during a capture. */
epmoe_status_t epmoei_ep_check_stream(const epmoe_ep_t *ep, const char *call, epmoe_stream_t stream);
/* CUDA: INVALID_ARGUMENT for an address that is not a multiple of 16. */
epmoe_status_t epmoei_ep_check_aligned(const epmoe_ep_t *ep, const char *name, const void *pointer);
/* Sets the mark behind which page-locked memory is the host's again. A no-op on the CPU, as the next one is. */
epmoe_status_t epmoei_ep_mark(epmoe_ep_t *ep, epmoe_stream_t stream);
/* Waits for the mark. A failure marks the communicator failed. */
epmoe_status_t epmoei_ep_wait(epmoe_ep_t *ep, const char *phase);
/* Copies between the host's and the backend's version of an array; nothing where they are one. */
epmoe_status_t epmoei_ep_copy(const epmoe_ep_t *ep, void *dst, const void *src, int64_t bytes, epmoe_stream_t stream);

/* The slots of every token, and rows for every rank into `counts`. ids are in host memory. */
void epmoei_ep_route(epmoe_ep_t *ep, const epmoe_dispatch_args_t *args, int32_t *counts);
/* The slots of peers into the outbox, as they travel; those of the own rank to where received rows lie, as they arrive.
 * ids and weights of args are the host's, x is the backend's. */
epmoe_status_t epmoei_ep_pack_outbox(epmoe_ep_t *ep, const epmoe_dispatch_args_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_ep_copy_own_rows(epmoe_ep_t *ep, const epmoe_dispatch_args_t *args, epmoe_stream_t stream);
/* The rows of peers out of `wire`, once they are there; nothing where they arrive as they are. */
epmoe_status_t epmoei_ep_unpack_rows(epmoe_ep_t *ep, epmoe_stream_t stream);

/* Headers: what every rank says before rows travel. `begin` sends this rank's, which must be filled in; `finish` has
 * everybody's and the verdict, `own` being this rank's status. Every rank comes to the same verdict. */
#define EPMOEI_HEADER_MAGIC 0x31706564656f6d65u
epmoe_status_t epmoei_headers_begin(epmoe_ep_t *ep);
epmoe_status_t epmoei_headers_finish(epmoe_ep_t *ep, epmoe_status_t own);

/* An exchange whose buffers are the object's own: it is in flight until it has finished. */
epmoe_status_t epmoei_ep_exchange_begin(epmoe_ep_t *ep, const char *phase, int32_t num_sends, int32_t num_recvs);
epmoe_status_t epmoei_ep_exchange_finish(epmoe_ep_t *ep, const char *phase);

#endif
