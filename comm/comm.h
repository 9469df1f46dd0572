/* Expert parallelism inside the library: what the layer uses beyond the public calls, and what the parts of comm/
 * share. Knows callbacks, never MPI. */
#ifndef EPMOEI_COMM_H
#define EPMOEI_COMM_H

#include "base/base.h"

#define EPMOEI_MAX_RANKS  4096
#define EPMOEI_MAX_AGREED 32 /* numbers in one epmoei_comm_agree_on */

struct epmoei_record; /* what one rank says in epmoei_comm_agree_on */

struct epmoe_comm {
    epmoe_bootstrap_t bootstrap; /* size 1: all callbacks may be NULL */
    epmoe_transport_t transport; /* resolved */
    epmoe_backend_t backend;     /* resolved */
    int32_t device;
    double timeout_s;
    epmoe_status_t failed; /* first fatal failure, sticky */
    char failed_text[512];
    /* comm/ alone */
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

/* The records of epmoei_comm_agree_on. */
int64_t epmoei_comm_records_size(int32_t size);

/* Dispatch in two halves, so that the caller computes while rows travel. `local` is the caller's own status: one that
 * is not OK is sent to all ranks in place of rows, and comes back to this rank unchanged, with its message. Every begin
 * that returns OK is followed by a finish; a begin that fails has ended the dispatch on every rank. x, ids and weights
 * have been read when begin returns, but with one rank, where the result points to them. */
epmoe_status_t epmoei_dispatch_begin(epmoe_ep_t *ep, const epmoe_dispatch_args_t *args, epmoe_status_t local);
epmoe_status_t epmoei_dispatch_finish(epmoe_ep_t *ep, epmoe_dispatch_result_t *result);

/* Bytes that the last dispatch sent to other ranks, and that its combine sends. */
int64_t epmoei_ep_wire_bytes(const epmoe_ep_t *ep);

#endif
