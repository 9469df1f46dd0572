/* Expert parallelism inside the library: what the layer uses beyond the public calls. */
#ifndef EPMOEI_COMM_H
#define EPMOEI_COMM_H

#include "base/base.h"

struct epmoe_comm {
    epmoe_bootstrap_t bootstrap; /* size 1: all callbacks may be NULL */
    epmoe_transport_t transport; /* resolved */
    epmoe_backend_t backend;     /* resolved */
    int32_t device;
    double timeout_s;
    epmoe_status_t failed; /* first fatal failure, sticky */
    char failed_text[512];
};

/* One named number of a config that all ranks must share. */
typedef struct epmoei_agreed_t {
    const char *name;
    double value;
} epmoei_agreed_t;

/* Collective: every rank's local status and its list of numbers are compared. OK only if all ranks are OK and all
 * numbers agree; otherwise every rank gets an error (its own, PEER, or MISMATCH naming field, ranks and values). */
epmoe_status_t epmoei_comm_agree_on(epmoe_comm_t *comm, const char *what, epmoe_status_t local,
                                    const epmoei_agreed_t *fields, int32_t num_fields);

/* Host exchange with the communicator's timeout; a failure marks the communicator failed and names the peer. `phase` is
 * for the message. Segments to the own rank are not allowed. */
epmoe_status_t epmoei_comm_exchange_begin(epmoe_comm_t *comm, const char *phase, const epmoe_segment_t *sends,
                                          int32_t num_sends, const epmoe_segment_t *recvs, int32_t num_recvs);
epmoe_status_t epmoei_comm_exchange_finish(epmoe_comm_t *comm, const char *phase);

/* Dispatch in two halves, so that the caller computes while rows travel. `local` is the caller's own status: one that
 * is not OK is sent to all ranks in place of rows, and comes back to this rank unchanged, with its message. Every begin
 * that returns OK is followed by a finish; a begin that fails has ended the dispatch on every rank. */
epmoe_status_t epmoei_dispatch_begin(epmoe_ep_t *ep, const epmoe_dispatch_args_t *args, epmoe_status_t local);
epmoe_status_t epmoei_dispatch_finish(epmoe_ep_t *ep, epmoe_dispatch_result_t *result);

/* Bytes that the last dispatch sent to other ranks, and that combine sends. */
int64_t epmoei_ep_wire_bytes(const epmoe_ep_t *ep);

#endif
