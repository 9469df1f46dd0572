/* Communicators: making one out of a bootstrap, what all ranks must share, and who owns which expert. */
#include "comm/transport.h"

#include <math.h>
#include <string.h>

#define DEFAULT_TIMEOUT_S 30.0
#define MAX_TIMEOUT_S     1e6

const char *epmoe_transport_string(epmoe_transport_t transport)
{
    switch (transport) {
    case EPMOE_TRANSPORT_AUTO: return "auto";
    case EPMOE_TRANSPORT_LOCAL: return "local";
    case EPMOE_TRANSPORT_MPI: return "mpi";
    case EPMOE_TRANSPORT_NCCL: return "nccl";
    case EPMOE_TRANSPORT_P2P: return "p2p";
    }
    return "unknown";
}

epmoe_status_t epmoe_expert_range(int32_t num_experts, int32_t size, int32_t rank, int32_t *first, int32_t *count)
{
    if (num_experts < 0)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "num_experts is %d: expected >= 0", num_experts);
    if (size < 1) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "size is %d: expected >= 1", size);
    if (rank < 0 || rank >= size)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "rank is %d: expected 0..%d", rank, size - 1);
    if (!first || !count) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s is NULL", first ? "count" : "first");
    int32_t share = num_experts / size, longer = num_experts % size;
    *first = rank * share + (rank < longer ? rank : longer);
    *count = share + (rank < longer);
    return EPMOE_OK;
}

/* Without a usable rank, size and all_gather this rank cannot even tell its peers. */
static epmoe_status_t take_bootstrap(epmoe_bootstrap_t *own, const epmoe_bootstrap_t *bootstrap)
{
    if (!bootstrap) {
        *own = (epmoe_bootstrap_t){.struct_size = sizeof *own, .size = 1};
        return EPMOE_OK;
    }
    EPMOEI_CHECK(epmoei_copy_sized(own, sizeof *own, bootstrap, "bootstrap"));
    if (own->size < 1 || own->size > EPMOEI_MAX_RANKS)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "bootstrap.size is %d: expected 1..%d", own->size,
                           EPMOEI_MAX_RANKS);
    if (own->rank < 0 || own->rank >= own->size)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "bootstrap.rank is %d: expected 0..%d", own->rank,
                           own->size - 1);
    if (own->size > 1 && !own->all_gather)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "bootstrap.all_gather is NULL: needed with size %d",
                           own->size);
    return EPMOE_OK;
}

/* A borrowed communicator without a bootstrap is one itself. */
static epmoe_status_t take_borrowed(epmoe_bootstrap_t *own, const epmoe_comm_config_t *config)
{
    epmoe_backend_t backend;
    int32_t rank, size, device;
    EPMOEI_CHECK(epmoe_backend_resolve(config->backend, &backend));
    if (backend != EPMOE_BACKEND_CUDA)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "config.nccl_comm is set: it needs the CUDA backend");
    EPMOEI_CHECK(epmoei_nccl_describe(config->nccl_comm, &rank, &size, &device));
    EPMOEI_CHECK(epmoei_device_set(device));
    return epmoei_bootstrap_create_nccl(config->nccl_comm, own);
}

/* On the CPU the transport is known at once; the device's needs to know who shares one. */
static epmoe_status_t take_transport(epmoe_comm_t *comm, const epmoe_comm_config_t *config)
{
    int32_t size = comm->bootstrap.size;
    bool cuda = comm->backend == EPMOE_BACKEND_CUDA;
    comm->transport = config->transport;
    switch (config->transport) {
    case EPMOE_TRANSPORT_AUTO:
        if (!cuda) comm->transport = size == 1 ? EPMOE_TRANSPORT_LOCAL : EPMOE_TRANSPORT_MPI;
        return EPMOE_OK;
    case EPMOE_TRANSPORT_MPI: return EPMOE_OK;
    case EPMOE_TRANSPORT_LOCAL:
        if (size > 1)
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "config.transport is local: one rank only, size is %d",
                               size);
        return EPMOE_OK;
    case EPMOE_TRANSPORT_NCCL:
    case EPMOE_TRANSPORT_P2P:
        if (!cuda)
            return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "config.transport is %s: it needs the CUDA backend",
                               epmoe_transport_string(config->transport));
        if (!epmoei_transport_ops(config->transport))
            return epmoei_fail(
                EPMOE_ERROR_NOT_SUPPORTED, "config.transport is %s: %s", epmoe_transport_string(config->transport),
                config->transport == EPMOE_TRANSPORT_NCCL ? "this build has no NCCL" : "this build has no CUDA");
        return EPMOE_OK;
    default:
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "config.transport is %d: expected an epmoe_transport_t",
                           (int)config->transport);
    }
}

static epmoe_status_t take_config(epmoe_comm_t *comm, const epmoe_comm_config_t *config)
{
    if (!isfinite(config->timeout_s) || config->timeout_s < 0 || config->timeout_s > MAX_TIMEOUT_S)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                           "config.timeout_s is %g: expected 0 (= %g) or up to %g seconds", config->timeout_s,
                           DEFAULT_TIMEOUT_S, MAX_TIMEOUT_S);
    if (config->timeout_s > 0) comm->timeout_s = config->timeout_s;
    comm->device = config->device;
    EPMOEI_CHECK(epmoe_backend_resolve(config->backend, &comm->backend));
    if (config->nccl_comm && comm->backend != EPMOE_BACKEND_CUDA)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "config.nccl_comm is set: it needs the CUDA backend");
    return take_transport(comm, config);
}

/* A rank without memory for its records can still say so in one number. */
static epmoe_status_t agree_on_memory(epmoe_comm_t *comm, epmoe_status_t local)
{
    int32_t own = (int32_t)local, all[EPMOEI_MAX_RANKS];
    EPMOEI_CHECK(epmoei_comm_enter(comm));
    EPMOEI_CHECK(epmoei_comm_gather(comm, "communicator", &own, all, (int64_t)sizeof own));
    if (local != EPMOE_OK) return local;
    for (int32_t r = 0; r < comm->bootstrap.size; r++)
        if (all[r] != EPMOE_OK)
            return epmoei_fail(EPMOE_ERROR_PEER, "communicator: rank %d failed: %s", r,
                               epmoe_status_string((epmoe_status_t)all[r]));
    return EPMOE_OK;
}

static const char *backend_string(epmoe_backend_t backend)
{
    return backend == EPMOE_BACKEND_CUDA ? "cuda" : backend == EPMOE_BACKEND_CPU ? "cpu" : "auto";
}

static epmoe_status_t agree_on_config(epmoe_comm_t *comm, epmoe_status_t local)
{
    enum { BACKEND = 1, HAS_EXCHANGE = 4 };
    bool cuda = comm->backend == EPMOE_BACKEND_CUDA;
    epmoei_agreed_t fields[] = {
        {"size", comm->bootstrap.size},
        [BACKEND] = {"backend", comm->backend},
        {cuda ? NULL : "transport", comm->transport}, /* the device's is settled later */
        {"timeout_s", comm->timeout_s},
        [HAS_EXCHANGE] = {NULL, comm->bootstrap.exchange_begin && comm->bootstrap.exchange_finish},
    };
    epmoe_status_t status = epmoei_comm_agree_on(comm, "communicator", local, fields, sizeof fields / sizeof fields[0]);
    if (status == EPMOE_ERROR_MISMATCH)
        for (int32_t r = 1; r < comm->bootstrap.size; r++) {
            epmoe_backend_t first = (epmoe_backend_t)epmoei_comm_agreed_value(comm, 0, BACKEND);
            epmoe_backend_t other = (epmoe_backend_t)epmoei_comm_agreed_value(comm, r, BACKEND);
            if (first && other && first != other)
                return epmoei_fail(status, "communicator: backend is %s on rank 0 and %s on rank %d",
                                   backend_string(first), backend_string(other), r);
        }
    EPMOEI_CHECK(status);
    for (int32_t r = 0; r < comm->bootstrap.size && comm->bootstrap.size > 1; r++)
        if (epmoei_comm_agreed_value(comm, r, HAS_EXCHANGE) == 0)
            return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED,
                               "communicator: the bootstrap of rank %d has no exchange callbacks: needed for transport "
                               "%s with %d ranks",
                               r, epmoe_transport_string(comm->transport), comm->bootstrap.size);
    return EPMOE_OK;
}

static epmoe_status_t start_transport(epmoe_comm_t *comm, const epmoe_comm_config_t *config)
{
    comm->ops = epmoei_transport_ops(comm->transport);
    return comm->ops->create && comm->bootstrap.size > 1 ? comm->ops->create(comm, config->nccl_comm) : EPMOE_OK;
}

/* Collective, after p2p has failed on all ranks: whether all asked for AUTO, and nothing else is wrong than that some
 * cannot use p2p. */
static epmoe_status_t agree_to_go_on(epmoe_comm_t *comm, bool is_auto, epmoe_status_t status, bool *goes_on)
{
    const epmoei_agreed_t may = {NULL, is_auto && (status == EPMOE_ERROR_NOT_SUPPORTED || status == EPMOE_ERROR_PEER)};
    EPMOEI_CHECK(epmoei_comm_agree_on(comm, "communicator (p2p refused)", EPMOE_OK, &may, 1));
    *goes_on = true;
    for (int32_t r = 0; r < comm->bootstrap.size; r++) *goes_on &= epmoei_comm_agreed_value(comm, r, 0) != 0;
    return EPMOE_OK;
}

/* The device, the transport, and what the transport needs of all ranks. Whether memory can be mapped shows only when it
 * is tried. */
static epmoe_status_t join(epmoe_comm_t *comm, const epmoe_comm_config_t *config)
{
    epmoei_auto_facts_t facts = {0};
    bool goes_on;
    if (comm->backend == EPMOE_BACKEND_CUDA) EPMOEI_CHECK(epmoei_comm_place(comm, config, &facts));
    epmoe_status_t status = start_transport(comm, config);
    if (status == EPMOE_OK || comm->transport != EPMOE_TRANSPORT_P2P || comm->failed != EPMOE_OK) return status;
    EPMOEI_CHECK(agree_to_go_on(comm, config->transport == EPMOE_TRANSPORT_AUTO, status, &goes_on));
    if (!goes_on) return status;
    comm->ops->destroy(comm);
    facts.p2p_is_refused = true;
    comm->transport = epmoei_auto_transport(&facts);
    if (comm->bootstrap.rank == 0)
        epmoei_log(EPMOE_LOG_WARNING, "communicator: transport %s, since p2p cannot be used: %s",
                   epmoe_transport_string(comm->transport), epmoe_last_error());
    return start_transport(comm, config);
}

static void release(epmoe_comm_t *comm, bool failed)
{
    if (comm->ops && comm->ops->destroy) comm->ops->destroy(comm);
    if (comm->bootstrap.release) comm->bootstrap.release(comm->bootstrap.ctx, failed);
    epmoei_free(comm->records);
}

epmoe_status_t epmoe_comm_create(const epmoe_bootstrap_t *bootstrap, const epmoe_comm_config_t *config,
                                 epmoe_comm_t **comm)
{
    epmoe_comm_t made = {.failed = EPMOE_OK, .timeout_s = DEFAULT_TIMEOUT_S};
    epmoe_comm_t *object = NULL;
    epmoe_comm_config_t own = EPMOE_COMM_CONFIG_INIT;
    bool in_step = false; /* all ranks leave together, so that releasing may be collective */
    epmoe_status_t status, local = EPMOE_OK;
    if (comm) *comm = NULL;
    own.device = bootstrap || config ? -1 : epmoei_device_current_ordinal();
    if (config) local = epmoei_copy_sized(&own, sizeof own, config, "config");
    if (local == EPMOE_OK && own.nccl_comm && !bootstrap)
        EPMOEI_CHECK_GOTO(take_borrowed(&made.bootstrap, &own), fail);
    else
        EPMOEI_CHECK_GOTO(take_bootstrap(&made.bootstrap, bootstrap), fail);

    if (local == EPMOE_OK) local = take_config(&made, &own);
    if (local == EPMOE_OK && !comm) local = epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "comm is NULL");
    object = epmoei_alloc(sizeof *object);
    made.records = epmoei_alloc(epmoei_comm_records_size(made.bootstrap.size));
    epmoe_status_t memory = EPMOE_OK;
    if (!object || !made.records)
        memory =
            epmoei_fail(EPMOE_ERROR_OUT_OF_MEMORY, "no memory for a communicator of %d ranks", made.bootstrap.size);
    status = agree_on_memory(&made, memory);
    if (status == EPMOE_OK) status = agree_on_config(&made, local);
    if (status == EPMOE_OK) status = join(&made, &own);
    in_step = made.failed == EPMOE_OK;
    if (status != EPMOE_OK) goto fail;

    *object = made;
    *comm = object;
    return EPMOE_OK;
fail:
    release(&made, !in_step);
    epmoei_free(object);
    return status;
}

void epmoe_comm_destroy(epmoe_comm_t *comm)
{
    if (!comm) return;
    release(comm, comm->failed != EPMOE_OK);
    epmoei_free(comm);
}

int32_t epmoe_comm_rank(const epmoe_comm_t *comm) { return comm ? comm->bootstrap.rank : 0; }

int32_t epmoe_comm_size(const epmoe_comm_t *comm) { return comm ? comm->bootstrap.size : 1; }

epmoe_transport_t epmoe_comm_transport(const epmoe_comm_t *comm)
{
    return comm ? comm->transport : EPMOE_TRANSPORT_LOCAL;
}

int32_t epmoe_comm_ranks_per_device(const epmoe_comm_t *comm) { return comm ? comm->ranks_per_device : 0; }

epmoe_status_t epmoe_comm_get_async_error(const epmoe_comm_t *comm)
{
    if (!comm) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "comm is NULL");
    /* What kernels have found becomes the communicator's own here. */
    if (comm->ops && comm->ops->check) comm->ops->check((epmoe_comm_t *)(uintptr_t)comm);
    return comm->failed;
}
