/* Rows over NCCL: one group of sends and receives, from the outbox to their final places and back.
 * The communicator never blocks the host: creation, calls and the work on the stream are polled against the deadline. A
 * borrowed one is as its owner made it. */
#include "comm/transport.h"

#include <nccl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>

/* What the end of a failed communicator may add to a call that has waited for its peers already. */
#define STOP_SHARE 0.05

struct epmoei_nccl {
    ncclComm_t comm; /* NULL once it has been given up */
    bool borrowed;
};

epmoe_status_t epmoei_nccl_status(struct ncclComm *comm, int32_t nccl_result, const char *what)
{
    ncclResult_t result = (ncclResult_t)nccl_result;
    if (result == ncclSuccess || result == ncclInProgress) return EPMOE_OK;
    const char *detail = ncclGetLastError(comm);
    return epmoei_fail(EPMOE_ERROR_TRANSPORT, "%s: %s%s%s", what, ncclGetErrorString(result),
                       detail && *detail ? ": " : "", detail ? detail : "");
}

epmoe_status_t epmoei_nccl_ask_ready(void *comm, bool *over)
{
    ncclResult_t state = ncclSuccess, result = ncclCommGetAsyncError(comm, &state);
    if (result != ncclSuccess) state = result;
    *over = state != ncclInProgress;
    return epmoei_nccl_status(comm, state, "NCCL");
}

epmoe_status_t epmoei_nccl_describe(struct ncclComm *comm, int32_t *rank, int32_t *size, int32_t *device)
{
    int values[3] = {0, 0, 0};
    EPMOEI_CHECK(epmoei_nccl_status(comm, ncclCommUserRank(comm, &values[0]), "ncclCommUserRank"));
    EPMOEI_CHECK(epmoei_nccl_status(comm, ncclCommCount(comm, &values[1]), "ncclCommCount"));
    EPMOEI_CHECK(epmoei_nccl_status(comm, ncclCommCuDevice(comm, &values[2]), "ncclCommCuDevice"));
    *rank = values[0];
    *size = values[1];
    *device = values[2];
    return EPMOE_OK;
}

/* ---------------------------------------------------------------------------------------------------------- end */

/* NCCL may wait for the other ranks of the node here: the caller does so on a thread of its own, and no longer than he
 * can. */
typedef struct ending_t {
    ncclComm_t comm;
    int32_t device;
    bool by_force;
    _Atomic int32_t holders; /* the thread and whoever waits for it; the last one frees */
} ending_t;

static void let_go(ending_t *ending)
{
    if (atomic_fetch_sub(&ending->holders, 1) == 1) epmoei_free(ending);
}

static void *end_communicator(void *arg)
{
    ending_t *ending = arg;
    if (epmoei_device_set(ending->device) == EPMOE_OK) {
        if (ending->by_force)
            ncclCommAbort(ending->comm);
        else
            ncclCommDestroy(ending->comm);
    }
    let_go(ending);
    return NULL;
}

static epmoe_status_t ask_ended(void *ctx, bool *over)
{
    *over = atomic_load(&((ending_t *)ctx)->holders) == 1;
    return EPMOE_OK;
}

/* Without memory or a thread for it the communicator is left to the end of the process. */
static void give_up_communicator(epmoe_comm_t *comm, bool by_force, double wait_s)
{
    struct epmoei_nccl *nccl = comm->nccl;
    if (!nccl || !nccl->comm || nccl->borrowed) return;
    ending_t *ending = epmoei_calloc(sizeof *ending);
    pthread_t thread;
    if (!ending) return;
    *ending = (ending_t){.comm = nccl->comm, .device = comm->device, .by_force = by_force};
    atomic_init(&ending->holders, 2);
    nccl->comm = NULL;
    if (pthread_create(&thread, NULL, end_communicator, ending)) {
        epmoei_free(ending);
        return;
    }
    pthread_detach(thread);
    (void)epmoei_poll(ask_ended, ending, wait_s);
    let_go(ending);
}

static void stop(epmoe_comm_t *comm) { give_up_communicator(comm, true, STOP_SHARE * comm->timeout_s); }

static void destroy(epmoe_comm_t *comm)
{
    give_up_communicator(comm, comm->failed != EPMOE_OK, comm->timeout_s);
    epmoei_free(comm->nccl);
    comm->nccl = NULL;
}

/* ------------------------------------------------------------------------------------------------------- create */

/* Rank 0 names the communicator, all_gather tells the others. */
static epmoe_status_t share_id(epmoe_comm_t *comm, ncclUniqueId *ids, epmoe_status_t local)
{
    ncclUniqueId own = {{0}};
    if (local == EPMOE_OK && comm->bootstrap.rank == 0)
        local = epmoei_nccl_status(NULL, ncclGetUniqueId(&own), "ncclGetUniqueId");
    EPMOEI_CHECK(epmoei_comm_agree_on(comm, "communicator (nccl)", local, NULL, 0));
    return epmoei_comm_gather(comm, "communicator (nccl)", &own, ids, (int64_t)sizeof own);
}

static epmoe_status_t join(epmoe_comm_t *comm, const ncclUniqueId *id)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclResult_t result =
        ncclCommInitRankConfig(&comm->nccl->comm, comm->bootstrap.size, *id, comm->bootstrap.rank, &config);
    epmoe_status_t status = epmoei_nccl_status(comm->nccl->comm, result, "ncclCommInitRankConfig");
    /* The others are on their way into NCCL, where nothing but the deadline tells them. */
    if (status != EPMOE_OK) return epmoei_comm_fail(comm, status);
    EPMOEI_CHECK(epmoei_comm_wait(comm, "communicator (nccl)", "not every rank came to NCCL's initialisation",
                                  epmoei_nccl_ask_ready, comm->nccl->comm));
    return epmoei_comm_agree_on(comm, "communicator (nccl ready)", EPMOE_OK, NULL, 0);
}

static epmoe_status_t create(epmoe_comm_t *comm, struct ncclComm *borrowed)
{
    epmoe_status_t status = EPMOE_OK;
    ncclUniqueId *ids = epmoei_alloc(comm->bootstrap.size * (int64_t)sizeof *ids);
    comm->nccl = epmoei_calloc(sizeof *comm->nccl);
    if (!ids || !comm->nccl) status = epmoei_fail(EPMOE_ERROR_OUT_OF_MEMORY, "no memory for transport nccl");
    if (borrowed) {
        if (status == EPMOE_OK) *comm->nccl = (struct epmoei_nccl){.comm = borrowed, .borrowed = true};
        status = epmoei_comm_agree_on(comm, "communicator (nccl)", status, NULL, 0);
    } else {
        status = share_id(comm, ids, status);
        if (status == EPMOE_OK) status = join(comm, &ids[0]);
    }
    epmoei_free(ids);
    return status;
}

/* --------------------------------------------------------------------------------------------------------- rows */

static epmoe_status_t post(epmoe_ep_t *ep, const epmoei_trip_t *trip, int32_t peer, epmoe_stream_t stream)
{
    ncclComm_t comm = ep->comm->nccl->comm;
    epmoei_rows_t out = epmoei_ep_outbox_rows(ep, peer), in = epmoei_ep_received_rows(ep, peer);
    char *outbox = trip->outbox + out.first * trip->row_bytes, *rows = trip->rows + in.first * trip->row_bytes;
    size_t outbox_bytes = (size_t)(out.num * trip->row_bytes), rows_bytes = (size_t)(in.num * trip->row_bytes);
    char *from = trip->home ? rows : outbox, *to = trip->home ? outbox : rows;
    size_t from_bytes = trip->home ? rows_bytes : outbox_bytes, to_bytes = trip->home ? outbox_bytes : rows_bytes;
    if (from_bytes)
        EPMOEI_CHECK(epmoei_nccl_status(comm, ncclSend(from, from_bytes, ncclInt8, peer, comm, stream), "ncclSend"));
    if (to_bytes)
        EPMOEI_CHECK(epmoei_nccl_status(comm, ncclRecv(to, to_bytes, ncclInt8, peer, comm, stream), "ncclRecv"));
    return EPMOE_OK;
}

/* The stream may be used again when the group has been launched, which the first time sets up connections. */
static epmoe_status_t begin(epmoe_ep_t *ep, const epmoei_trip_t *trip, epmoe_stream_t stream)
{
    ncclComm_t comm = ep->comm->nccl->comm;
    epmoe_status_t status = epmoei_nccl_status(comm, ncclGroupStart(), "ncclGroupStart");
    if (status != EPMOE_OK) return epmoei_comm_fail(ep->comm, status);
    for (int32_t i = 1; i < ep->size && status == EPMOE_OK; i++)
        status = post(ep, trip, (ep->rank + i) % ep->size, stream);
    ncclResult_t ended = ncclGroupEnd(); /* in any case: groups are the thread's */
    if (status == EPMOE_OK) status = epmoei_nccl_status(comm, ended, "ncclGroupEnd");
    if (status != EPMOE_OK) return epmoei_comm_fail(ep->comm, status);
    EPMOEI_CHECK(epmoei_comm_wait(ep->comm, trip->phase, "NCCL has not set up its connections to all peers",
                                  epmoei_nccl_ask_ready, comm));
    return epmoei_ep_mark(ep, stream);
}

static epmoe_status_t ask_arrived(void *ctx, bool *over)
{
    epmoe_ep_t *ep = ctx;
    bool ready;
    EPMOEI_CHECK(epmoei_nccl_ask_ready(ep->comm->nccl->comm, &ready));
    return epmoei_event_query(ep->event, over);
}

/* NCCL does not say for whom it waits: the peers that it may be. */
static void name_peers(const epmoe_ep_t *ep, char *text, size_t bytes)
{
    int32_t named = 0;
    size_t length = (size_t)snprintf(text, bytes, "no answer from rank");
    for (int32_t r = 0; r < ep->size && length < bytes - 24; r++) {
        if (r == ep->rank || epmoei_ep_outbox_rows(ep, r).num + epmoei_ep_received_rows(ep, r).num == 0) continue;
        length += (size_t)snprintf(text + length, bytes - length, named++ ? " or %d" : " %d", r);
    }
}

static epmoe_status_t finish(epmoe_ep_t *ep, const epmoei_trip_t *trip, epmoe_stream_t stream)
{
    char missing[128];
    (void)stream;
    name_peers(ep, missing, sizeof missing);
    return epmoei_comm_wait(ep->comm, trip->phase, missing, ask_arrived, ep);
}

const epmoei_transport_ops_t epmoei_transport_nccl = {
    .create = create, .begin = begin, .finish = finish, .stop = stop, .destroy = destroy};
