/* Transport p2p on the host: it makes and maps the windows, enqueues the kernels of p2p.h, and reports what they find.
 * Nothing is planned here and nothing is waited for, so that all of it can be captured in a graph. */
#include "base/device.h"
#include "base/dtype.h"
#include "comm/ep_wire.h"
#include "comm/p2p_layout.h"
#include "comm/p2p_window.h"
#include "comm/transport.h"

#include <stdatomic.h>
#include <string.h>

#if EPMOE_HAVE_CUDA

/* Device waits end before timeout_s, so that the error is out by then. */
#define WAIT_SHARE 0.9
/* Destroyed objects whose windows the ranks settle in one exchange. */
enum { MAX_SETTLED = 32 };

struct epmoei_p2p {
    epmoei_places_t places;
    epmoei_p2p_fault_t *fault; /* page-locked */
    void *failed;              /* device: int32_t */
    epmoei_shared_t *retired;  /* of destroyed objects: not all ranks have closed theirs yet */
    int64_t num_made;          /* pieces so far, alike on all ranks */
    struct epmoei_p2p *next_kept;
};

struct epmoei_p2p_ep {
    epmoei_shared_t *shared;
    void *memory; /* device, this rank's own */
    epmoei_p2p_args_t args;
};

/* ---------------------------------------------------------------------------------------------------------- fault */

static const char *phase_string(int32_t phase)
{
    switch (phase) {
    case EPMOEI_P2P_HEADERS: return "dispatch (headers)";
    case EPMOEI_P2P_ROWS: return "dispatch (rows)";
    default: return "combine";
    }
}

static epmoe_status_t describe(const epmoe_comm_t *comm, const epmoei_p2p_fault_t *fault, epmoe_status_t status)
{
    const char *phase = phase_string(fault->phase);
    int32_t peer = fault->peer, rank = comm->bootstrap.rank;
    switch (status) {
    case EPMOE_ERROR_TIMEOUT:
        return epmoei_fail(status,
                           "%s: rank %d of %d gave up after %.2f s (timeout_s is %g): no answer from rank %d (dispatch "
                           "number %u)",
                           phase, rank, comm->bootstrap.size, 1e-9 * (double)fault->waited_ns, comm->timeout_s, peer,
                           fault->epoch);
    case EPMOE_ERROR_CAPACITY:
        return epmoei_fail(status, "dispatch: rank %d would receive %lld rows, its capacity is %lld", peer,
                           (long long)fault->value, (long long)fault->bound);
    case EPMOE_ERROR_MISMATCH:
        return epmoei_fail(status, "dispatch: %s is %lld on rank 0 and %lld on rank %d",
                           fault->field ? "max_rank_tokens" : "reuse_routing", (long long)fault->bound,
                           (long long)fault->value, peer);
    default:
        return epmoei_fail(status, "dispatch: %s%d failed (%s)", peer == rank ? "this rank, " : "rank ", peer,
                           epmoe_status_string((epmoe_status_t)fault->value));
    }
}

/* What kernels have found so far. */
static epmoe_status_t check(epmoe_comm_t *comm)
{
    if (!comm->p2p || comm->failed != EPMOE_OK) return EPMOE_OK;
    const epmoei_p2p_fault_t *fault = comm->p2p->fault;
    int32_t status = __atomic_load_n(&fault->status, __ATOMIC_ACQUIRE);
    if (status == EPMOE_OK) return EPMOE_OK;
    return epmoei_comm_fail(comm, describe(comm, fault, (epmoe_status_t)status));
}

static void stop(epmoe_comm_t *comm)
{
    if (comm->p2p) __atomic_store_n(&comm->p2p->fault->host_stops, 1, __ATOMIC_RELAXED);
}

/* -------------------------------------------------------------------------------------------------- communicator */

/* In the order of their numbers, so that ranks with the same ones settle the same ones first. */
static void retire(struct epmoei_p2p *p2p, epmoei_shared_t *shared)
{
    epmoei_shared_t **at = &p2p->retired;
    while (*at && (*at)->number < shared->number) at = &(*at)->next;
    shared->next = *at;
    *at = shared;
}

/* Collective: pieces that every rank has retired go back to the device. */
static epmoe_status_t settle(epmoe_comm_t *comm)
{
    struct epmoei_p2p *p2p = comm->p2p;
    const int32_t rank = comm->bootstrap.rank, size = comm->bootstrap.size;
    int64_t own[MAX_SETTLED], all[EPMOEI_P2P_MAX_RANKS * MAX_SETTLED];
    int32_t num = 0;
    for (epmoei_shared_t *shared = p2p->retired; shared && num < MAX_SETTLED; shared = shared->next) {
        epmoei_shared_close(shared, rank);
        own[num++] = shared->number;
    }
    while (num < MAX_SETTLED) own[num++] = -1;
    EPMOEI_CHECK(epmoei_comm_gather(comm, "dispatch buffers (p2p settled)", own, all, (int64_t)sizeof own));
    for (int32_t i = 0; i < MAX_SETTLED && own[i] >= 0; i++) {
        bool everywhere = true;
        for (int32_t r = 0; r < size; r++) {
            bool there = false;
            for (int32_t j = 0; j < MAX_SETTLED; j++) there |= all[r * MAX_SETTLED + j] == own[i];
            everywhere &= there;
        }
        epmoei_shared_t **at = &p2p->retired;
        while ((*at)->number != own[i]) at = &(*at)->next;
        if (!everywhere) continue;
        epmoei_shared_t *shared = *at;
        *at = shared->next;
        epmoei_shared_free(shared, rank);
    }
    return EPMOE_OK;
}

/* Collective. */
static epmoe_status_t make_shared(epmoe_comm_t *comm, int64_t bytes, int64_t cleared_bytes, epmoei_shared_t **shared)
{
    EPMOEI_CHECK(epmoei_comm_enter(comm));
    EPMOEI_CHECK(settle(comm));
    EPMOEI_CHECK(epmoei_shared_create(comm, &comm->p2p->places, bytes, cleared_bytes, shared));
    (*shared)->number = comm->p2p->num_made++;
    return EPMOE_OK;
}

static epmoe_status_t make_own(struct epmoei_p2p *p2p)
{
    EPMOEI_CHECK(epmoei_pinned_alloc((void **)&p2p->fault, (int64_t)sizeof *p2p->fault, "transport p2p"));
    memset(p2p->fault, 0, sizeof *p2p->fault);
    EPMOEI_CHECK(epmoei_memory_alloc(EPMOE_BACKEND_CUDA, &p2p->failed, 4, "transport p2p"));
    EPMOEI_CHECK(epmoei_memory_set(EPMOE_BACKEND_CUDA, p2p->failed, 0, 4, NULL));
    return epmoei_stream_wait(EPMOE_BACKEND_CUDA, NULL);
}

/* Also finds out, with a piece that is not used, whether the ranks can map each other's memory. */
static epmoe_status_t create(epmoe_comm_t *comm, struct ncclComm *borrowed)
{
    (void)borrowed;
    epmoei_shared_t *probe;
    struct epmoei_p2p *p2p = epmoei_calloc((int64_t)sizeof *p2p);
    epmoe_status_t status = p2p ? make_own(p2p) : epmoei_fail(EPMOE_ERROR_OUT_OF_MEMORY, "no memory for transport p2p");
    if (p2p && p2p->fault) comm->p2p = p2p;
    if (p2p && !p2p->fault) epmoei_free(p2p);
    EPMOEI_CHECK(epmoei_comm_agree_on(comm, "communicator (p2p)", status, NULL, 0));
    EPMOEI_CHECK(epmoei_places_gather(comm, &p2p->places));
    EPMOEI_CHECK(make_shared(comm, 256, 256, &probe));
    retire(p2p, probe);
    return EPMOE_OK;
}

/* Of communicators that failed: a kernel or a peer may still touch what they have. */
static _Atomic(struct epmoei_p2p *) kept;

static void keep(struct epmoei_p2p *p2p)
{
    p2p->next_kept = atomic_load(&kept);
    while (!atomic_compare_exchange_weak(&kept, &p2p->next_kept, p2p)) {
    }
}

static void destroy(epmoe_comm_t *comm)
{
    struct epmoei_p2p *p2p = comm->p2p;
    if (!p2p) return;
    bool settled = comm->failed == EPMOE_OK;
    while (settled && p2p->retired) {
        /* Every rank has destroyed all its objects by now. */
        const epmoei_shared_t *first = p2p->retired;
        settled = epmoei_comm_enter(comm) == EPMOE_OK && settle(comm) == EPMOE_OK && p2p->retired != first;
    }
    comm->p2p = NULL;
    if (!settled) {
        keep(p2p);
        return;
    }
    epmoei_memory_free(EPMOE_BACKEND_CUDA, p2p->failed);
    epmoei_pinned_free(p2p->fault);
    epmoei_free(p2p);
}

/* -------------------------------------------------------------------------------------------------------- objects */

static epmoe_status_t fill_own(epmoe_ep_t *ep)
{
    epmoei_p2p_args_t *args = &ep->p2p->args;
    const epmoe_comm_t *comm = ep->comm;
    epmoei_p2p_window_t windows[EPMOEI_P2P_MAX_RANKS];
    int64_t unused, bytes = epmoei_p2p_carve_own(NULL, ep, args);
    EPMOEI_CHECK(epmoei_memory_alloc(EPMOE_BACKEND_CUDA, &ep->p2p->memory, bytes, "dispatch buffers (p2p)"));
    epmoei_p2p_carve_own(ep->p2p->memory, ep, args);
    for (int32_t r = 0; r < ep->size; r++)
        epmoei_p2p_carve_window(ep->p2p->shared->pieces[r], ep, ep->buffers.capacity[r], &windows[r], &unused);
    EPMOEI_CHECK(epmoei_memory_set(EPMOE_BACKEND_CUDA, ep->p2p->memory, 0, bytes, NULL));
    EPMOEI_CHECK(epmoei_memory_copy(EPMOE_BACKEND_CUDA, (void *)(uintptr_t)args->windows, windows,
                                    ep->size * (int64_t)sizeof *windows, NULL));
    EPMOEI_CHECK(epmoei_stream_wait(EPMOE_BACKEND_CUDA, NULL));

    args->failed = comm->p2p->failed;
    args->fault = comm->p2p->fault;
    args->timeout_ns = (int64_t)(WAIT_SHARE * comm->timeout_s * 1e9);
    args->rank = ep->rank;
    args->size = ep->size;
    args->num_experts = ep->config.num_experts;
    args->top_k = ep->config.top_k;
    args->hidden = ep->config.hidden;
    args->row_bytes = ep->row_bytes;
    args->coded = epmoei_ep_is_coded(ep);
    args->codes_bytes = epmoei_coded_codes_bytes(ep->config.hidden);
    args->scales_stride = epmoei_coded_scales_bytes(ep->config.hidden) / 4;
    args->dtype = ep->config.dtype;
    args->partial_dtype = ep->partial_dtype;
    args->error_word = epmoei_error_word();
    args->num_sms = epmoei_device_info(comm->device)->num_sms;
    args->max_blocks = ep->config.comm_sms ? ep->config.comm_sms : args->num_sms;
    if (args->max_blocks > args->num_sms) args->max_blocks = args->num_sms;
    if (args->max_blocks > EPMOEI_P2P_MAX_BLOCKS) args->max_blocks = EPMOEI_P2P_MAX_BLOCKS;

    const epmoei_p2p_window_t *own = &windows[ep->rank];
    if (args->coded)
        ep->codes = (epmoei_coded_rows_t){(uint8_t *)own->x, own->scales, args->codes_bytes, args->scales_stride};
    ep->num_rows = ep->max_rows;
    ep->x = args->coded ? args->own_x : own->x;
    ep->ids = own->ids;
    ep->weights = own->weights;
    ep->buffers.y = own->y;
    ep->buffers.device_num_rows = args->num_rows;
    return EPMOE_OK;
}

static void ep_destroy(epmoe_ep_t *ep)
{
    if (!ep->p2p) return;
    epmoei_memory_free(EPMOE_BACKEND_CUDA, ep->p2p->memory); /* waits for the kernels */
    if (ep->p2p->shared) retire(ep->comm->p2p, ep->p2p->shared);
    epmoei_free(ep->p2p);
    ep->p2p = NULL;
}

static epmoe_status_t ep_create(epmoe_ep_t *ep)
{
    epmoei_p2p_window_t unused;
    int64_t cleared, bytes = epmoei_p2p_carve_window(NULL, ep, ep->max_rows, &unused, &cleared);
    ep->p2p = epmoei_calloc((int64_t)sizeof *ep->p2p);
    epmoe_status_t status =
        ep->p2p ? EPMOE_OK : epmoei_fail(EPMOE_ERROR_OUT_OF_MEMORY, "no memory for a dispatch object");
    EPMOEI_CHECK(epmoei_comm_agree_on(ep->comm, "dispatch object (p2p)", status, NULL, 0));
    EPMOEI_CHECK(make_shared(ep->comm, bytes, cleared, &ep->p2p->shared));
    return epmoei_comm_agree_on(ep->comm, "dispatch object (p2p filled)", fill_own(ep), NULL, 0);
}

/* The rows of the other ranks, where they came in FP8. */
static epmoe_status_t decode(const epmoe_ep_t *ep, epmoe_stream_t stream)
{
    const epmoei_p2p_args_t *args = &ep->p2p->args;
    if (!args->coded || ep->keeps_codes) return EPMOE_OK;
    const epmoei_decode_rows_t rows = {
        .dst = args->own_x,
        .dtype = args->dtype,
        .hidden = args->hidden,
        .src = ep->codes,
        .num_rows = ep->num_rows,
        .num_rows_dev = args->num_rows,
        .gap_dev = args->state->own_rows,
    };
    return epmoei_decode_rows(EPMOE_BACKEND_CUDA, &rows, stream);
}

static epmoe_status_t dispatch(epmoe_ep_t *ep, const epmoe_dispatch_args_t *args, epmoe_status_t local,
                               epmoe_stream_t stream)
{
    epmoei_p2p_args_t own = ep->p2p->args;
    own.local_status = (int32_t)local;
    if (local == EPMOE_OK) {
        own.reuse_routing = args->reuse_routing;
        own.num_tokens = args->num_tokens;
        own.num_tokens_dev = args->num_tokens_dev;
        own.max_rank_tokens = args->max_rank_tokens;
        own.x = args->x;
        own.ids = args->ids;
        own.weights = args->weights;
    }
    own.keeps = ep->keeps_codes;
    ep->num_rows = epmoei_ep_bound_of_rows(ep, own.max_rank_tokens);
    epmoe_status_t status = epmoei_p2p_dispatch_sm80(&own, stream);
    if (status == EPMOE_OK) status = decode(ep, stream);
    if (status != EPMOE_OK) return epmoei_comm_fail(ep->comm, status);
    return local;
}

static epmoe_status_t combine(epmoe_ep_t *ep, const epmoe_combine_args_t *args, epmoe_stream_t stream)
{
    epmoei_p2p_args_t own = ep->p2p->args;
    if (args) {
        own.sum_tokens = ep->num_tokens;
        own.shared = args->shared;
        own.residual = args->residual;
        own.y = args->y;
    }
    epmoe_status_t status = epmoei_p2p_combine_sm80(&own, stream);
    return status == EPMOE_OK ? EPMOE_OK : epmoei_comm_fail(ep->comm, status);
}

const epmoei_transport_ops_t epmoei_transport_p2p = {.create = create,
                                                     .stop = stop,
                                                     .destroy = destroy,
                                                     .check = check,
                                                     .ep_create = ep_create,
                                                     .ep_destroy = ep_destroy,
                                                     .dispatch = dispatch,
                                                     .combine = combine};

#endif
