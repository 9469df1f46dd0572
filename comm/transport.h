/* How rows get from rank to rank. The plan (who sends how many rows to whom) is made before and is the same for all
 * transports; headers, ids and weights always travel over the bootstrap's exchange of host memory.
 *   mpi    rows too: the CPU's from where they lie, the device's by way of page-locked host memory
 *   nccl   rows from device memory to device memory
 *   p2p    rows and all the rest by kernels, which also plan: comm/p2p.h
 */
#ifndef EPMOEI_TRANSPORT_H
#define EPMOEI_TRANSPORT_H

#include "comm/ep_plan.h"

/* All but `stop` and `destroy` are collective and run inside an entered call. NULL: nothing to do.
 * A failure of begin or finish has marked the communicator failed. */
struct epmoei_transport_ops {
    /* Once the ranks agree on the transport. `borrowed` as in epmoe_comm_config_t. */
    epmoe_status_t (*create)(epmoe_comm_t *comm, struct ncclComm *borrowed);
    /* Rows set out, the exchange that the trip's host memory is for comes after it. */
    epmoe_status_t (*begin)(epmoe_ep_t *ep, const epmoei_trip_t *trip, epmoe_stream_t stream);
    /* After that exchange. When it returns, no peer is needed any more: what is left to do is the stream's. */
    epmoe_status_t (*finish)(epmoe_ep_t *ep, const epmoei_trip_t *trip, epmoe_stream_t stream);
    /* The communicator has failed: whatever waits for a peer on the device must end. Sets no error. */
    void (*stop)(epmoe_comm_t *comm);
    void (*destroy)(epmoe_comm_t *comm);
    /* What kernels have found since: a failure has marked the communicator failed. Local. */
    epmoe_status_t (*check)(epmoe_comm_t *comm);
    /* A transport that plans on the device has these in place of begin and finish. Collective: what it needs besides
     * the buffers of ep_plan.c, on which all ranks agree; ep_destroy, which is local, is also called after a failure.
     */
    epmoe_status_t (*ep_create)(epmoe_ep_t *ep);
    void (*ep_destroy)(epmoe_ep_t *ep);
    /* Enqueue all of it; arguments have been checked. A `local` that is not OK is told to the ranks, and returned. */
    epmoe_status_t (*dispatch)(epmoe_ep_t *ep, const epmoe_dispatch_args_t *args, epmoe_status_t local,
                               epmoe_stream_t stream);
    /* args NULL: this rank sums nothing, its rows go to the others. */
    epmoe_status_t (*combine)(epmoe_ep_t *ep, const epmoe_combine_args_t *args, epmoe_stream_t stream);
};

/* Whether the host knows neither where rows go nor how many there are. */
static inline bool epmoei_ep_plans_on_device(const epmoe_ep_t *ep)
{
    return ep->size > 1 && ep->comm->ops->dispatch != NULL;
}

extern const epmoei_transport_ops_t epmoei_transport_mpi;
#if EPMOE_HAVE_NCCL
extern const epmoei_transport_ops_t epmoei_transport_nccl;
#endif
#if EPMOE_HAVE_CUDA
extern const epmoei_transport_ops_t epmoei_transport_p2p;
#endif
/* NULL when this build does not have it. */
const epmoei_transport_ops_t *epmoei_transport_ops(epmoe_transport_t transport);

/* A borrowed communicator: what it says of itself, and a bootstrap whose callbacks move host data through it. Without
 * NCCL in the build NOT_SUPPORTED. */
epmoe_status_t epmoei_nccl_describe(struct ncclComm *comm, int32_t *rank, int32_t *size, int32_t *device);
epmoe_status_t epmoei_bootstrap_create_nccl(struct ncclComm *comm, epmoe_bootstrap_t *bootstrap);

/* Shared by the files that know NCCL. A ncclResult_t as a status; ncclInProgress is OK. */
epmoe_status_t epmoei_nccl_status(struct ncclComm *comm, int32_t nccl_result, const char *what);
/* An epmoei_ask_fn on a communicator: over when no call on it is in progress. */
epmoe_status_t epmoei_nccl_ask_ready(void *comm, bool *over);

#endif
