/* Expert parallelism inside the library: what the layer uses beyond the public calls, and what the parts of comm/
 * share. Knows callbacks, never MPI. */
#ifndef EPMOEI_COMM_H
#define EPMOEI_COMM_H

#include "kernels/coded_rows.h"

#define EPMOEI_MAX_RANKS  4096
#define EPMOEI_MAX_AGREED 48 /* numbers in one epmoei_comm_agree_on */

struct epmoei_record; /* what one rank says in epmoei_comm_agree_on */
struct epmoei_nccl;   /* transport nccl's */
struct epmoei_p2p;    /* transport p2p's */
typedef struct epmoei_transport_ops epmoei_transport_ops_t;

struct epmoe_comm {
    epmoe_bootstrap_t bootstrap; /* size 1: all callbacks may be NULL */
    epmoe_transport_t transport; /* resolved */
    epmoe_backend_t backend;     /* resolved */
    int32_t device;              /* CUDA: ordinal in this process */
    int32_t ranks_per_device;    /* CUDA: the most ranks that share one device; 0 on the CPU */
    double timeout_s;
    epmoe_status_t failed; /* first fatal failure, sticky */
    char failed_text[512];
    /* comm/ alone */
    const epmoei_transport_ops_t *ops;
    struct epmoei_nccl *nccl;
    struct epmoei_p2p *p2p;
    bool exchanging;               /* between the halves of an exchange */
    double wait_left_s;            /* what the call in progress may still wait for peers */
    int64_t num_objects;           /* dispatch objects made so far: numbers them alike on all ranks */
    int64_t sequence;              /* dispatches so far, alike on all ranks */
    struct epmoei_record *records; /* [size] */
};

/* One named number of a config that all ranks must share. name NULL: only collected, see epmoei_comm_agreed_value. */
typedef struct epmoei_agreed_t {
    const char *name;
    double value;
} epmoei_agreed_t;

/* Collective: every rank's local status and its list of numbers are compared. OK only if all ranks are OK and all
 * numbers agree; otherwise every rank gets an error (its own, PEER, or MISMATCH naming field, ranks and values). A
 * status that is not OK travels with this thread's last error. At most EPMOEI_MAX_AGREED numbers. */
epmoe_status_t epmoei_comm_agree_on(epmoe_comm_t *comm, const char *what, epmoe_status_t local,
                                    const epmoei_agreed_t *fields, int32_t num_fields);
/* Number i that `rank` gave to the last successful epmoei_comm_agree_on. */
double epmoei_comm_agreed_value(const epmoe_comm_t *comm, int32_t rank, int32_t i);

/* Every collective call begins with this: BAD_STATE when the communicator has failed, or an exchange is
 * between its halves. All waits of the call together
 * end within timeout_s. */
epmoe_status_t epmoei_comm_enter(epmoe_comm_t *comm);
/* Host exchange inside an entered call; a failure marks the communicator failed and names the peer. `phase` is for the
 * message. Segments to the own rank are not allowed. Arrays and data live until finish; after a failure for ever. */
epmoe_status_t epmoei_comm_exchange_begin(epmoe_comm_t *comm, const char *phase, const epmoe_segment_t *sends,
                                          int32_t num_sends, const epmoe_segment_t *recvs, int32_t num_recvs);
epmoe_status_t epmoei_comm_exchange_finish(epmoe_comm_t *comm, const char *phase);
/* recv[i*bytes ..) = send of rank i, inside an entered call. */
epmoe_status_t epmoei_comm_gather(epmoe_comm_t *comm, const char *phase, const void *send, void *recv, int64_t bytes);
/* Marks the communicator failed with this thread's last error and returns `status`. The first failure stays. */
epmoe_status_t epmoei_comm_fail(epmoe_comm_t *comm, epmoe_status_t status);

/* Asks again and again, until *over or an error, and gives the core away in between. TIMEOUT, without a message, when
 * that takes longer than timeout_s. */
typedef epmoe_status_t (*epmoei_ask_fn)(void *ctx, bool *over);
epmoe_status_t epmoei_poll(epmoei_ask_fn ask, void *ctx, double timeout_s);
/* The same inside an entered call, as long as it may still wait. A failure marks the communicator failed; `missing`
 * says in a timeout's message what did not happen. */
epmoe_status_t epmoei_comm_wait(epmoe_comm_t *comm, const char *phase, const char *missing, epmoei_ask_fn ask,
                                void *ctx);

/* The records of epmoei_comm_agree_on. */
int64_t epmoei_comm_records_size(int32_t size);

/* What AUTO on CUDA goes by; the same on all ranks. */
typedef struct epmoei_auto_facts_t {
    int32_t size;
    int32_t ranks_per_device; /* the most */
    bool one_host;
    bool all_have_p2p, all_have_nccl; /* in their builds */
    bool nccl_is_given;               /* config.nccl_comm */
    bool p2p_is_refused;              /* some rank cannot map the memory of another */
} epmoei_auto_facts_t;
epmoe_transport_t epmoei_auto_transport(const epmoei_auto_facts_t *facts);

/* CUDA, collective: takes this rank's device and makes it current, finds out who shares one, and settles the transport
 * that the ranks asked for. */
epmoe_status_t epmoei_comm_place(epmoe_comm_t *comm, const epmoe_comm_config_t *config, epmoei_auto_facts_t *facts);
/* BAD_STATE unless the communicator's device is the calling thread's current one; OK on the CPU. */
epmoe_status_t epmoei_comm_check_device(const epmoe_comm_t *comm);

/* Dispatch in two halves, so that the caller computes while rows travel. `local` is the caller's own status: one that
 * is not OK is sent to all ranks in place of rows, and comes back to this rank unchanged, with its message. Every begin
 * that returns OK is followed by a finish; a begin that fails has ended the dispatch on every rank. x, ids and weights
 * have been read when begin returns (CUDA: when the stream has come to that point), but with one rank, where the result
 * points to them. Both halves on the same stream. */
epmoe_status_t epmoei_dispatch_begin(epmoe_ep_t *ep, const epmoe_dispatch_args_t *args, epmoe_status_t local,
                                     epmoe_stream_t stream);
epmoe_status_t epmoei_dispatch_finish(epmoe_ep_t *ep, epmoe_dispatch_result_t *result, epmoe_stream_t stream);

/* FP8 on the wire, transport p2p with several ranks: whether this rank's rows of the dispatches from here on stay
 * codes, in epmoei_ep_codes until the next one, and the result's x is not written. A no-op otherwise. Local. */
void epmoei_ep_keep_codes(epmoe_ep_t *ep, bool keeps);
bool epmoei_ep_keeps_codes(const epmoe_ep_t *ep);
epmoei_coded_rows_t epmoei_ep_codes(const epmoe_ep_t *ep);
/* What epmoei_ep_num_rows will be after a dispatch with this max_rank_tokens, where only the device counts rows. */
int32_t epmoei_ep_bound_of_rows(const epmoe_ep_t *ep, int32_t max_rank_tokens);

/* Whether only the device knows how many rows a dispatch brings, so that calls may be captured in a graph. */
bool epmoei_ep_counts_on_device(const epmoe_ep_t *ep);
/* Rows that the last dispatch brought here, known to the host; the device's copy is the result's. Where only the device
 * knows, its bound. */
int32_t epmoei_ep_num_rows(const epmoe_ep_t *ep);
/* Bytes that the last dispatch sent to other ranks, and that its combine sends; 0 where only the device knows. */
int64_t epmoei_ep_wire_bytes(const epmoe_ep_t *ep);

#endif
