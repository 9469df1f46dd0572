/* Devices of the ranks: which one each takes, who shares one, and the transport that follows from it. */
#include "base/device.h"
#include "comm/p2p.h"
#include "comm/transport.h"

#include <string.h>
#include <unistd.h>

const epmoei_transport_ops_t *epmoei_transport_ops(epmoe_transport_t transport)
{
    switch (transport) {
#if EPMOE_HAVE_NCCL
    case EPMOE_TRANSPORT_NCCL: return &epmoei_transport_nccl;
#endif
#if EPMOE_HAVE_CUDA
    case EPMOE_TRANSPORT_P2P: return &epmoei_transport_p2p;
#endif
    case EPMOE_TRANSPORT_LOCAL:
    case EPMOE_TRANSPORT_MPI: return &epmoei_transport_mpi;
    default: return NULL;
    }
}

#if !EPMOE_HAVE_NCCL
static epmoe_status_t no_nccl(void)
{
    return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "config.nccl_comm is set: this build has no NCCL");
}

epmoe_status_t epmoei_nccl_describe(struct ncclComm *comm, int32_t *rank, int32_t *size, int32_t *device)
{
    (void)comm, (void)rank, (void)size, (void)device;
    return no_nccl();
}

epmoe_status_t epmoei_bootstrap_create_nccl(struct ncclComm *comm, epmoe_bootstrap_t *bootstrap)
{
    (void)comm, (void)bootstrap;
    return no_nccl();
}
#endif

/* Names and addresses travel as numbers among those that ranks agree on: 4 bytes fit a double without loss. */
static double word(const void *bytes)
{
    uint32_t value;
    memcpy(&value, bytes, sizeof value);
    return value;
}

enum { NUMBER_WORDS = 2 };
#define HASH_OF_NOTHING 0xCBF29CE484222325u

static uint64_t hash(uint64_t seed, const void *data, size_t bytes) /* FNV-1a */
{
    uint64_t value = seed;
    for (size_t i = 0; i < bytes; i++) value = (value ^ ((const unsigned char *)data)[i]) * 0x100000001B3u;
    return value;
}

static uint64_t hash_of_host(void)
{
    char host[256] = "";
    gethostname(host, sizeof host - 1);
    return hash(HASH_OF_NOTHING, host, strlen(host));
}

/* How many lower ranks stand where this one does: the same host, the same devices in the same order. A launcher that
 * shows every rank a device of its own makes this 0 for all. */
static epmoe_status_t find_local_rank(epmoe_comm_t *comm, int32_t *local_rank)
{
    enum { NUM = 2 * NUMBER_WORDS };
    uint64_t place[2] = {hash_of_host(), HASH_OF_NOTHING};
    for (int32_t i = 0; i < epmoei_device_count(); i++)
        place[1] = hash(place[1], epmoei_device_info(i)->uuid, sizeof epmoei_device_info(i)->uuid);
    epmoei_agreed_t fields[NUM];
    for (int32_t i = 0; i < NUM; i++) fields[i] = (epmoei_agreed_t){NULL, word((const char *)place + 4 * i)};
    EPMOEI_CHECK(epmoei_comm_agree_on(comm, "communicator (hosts)", EPMOE_OK, fields, NUM));
    *local_rank = 0;
    for (int32_t r = 0; r < comm->bootstrap.rank; r++) {
        bool same = true;
        for (int32_t i = 0; i < NUM; i++) same &= epmoei_comm_agreed_value(comm, r, i) == fields[i].value;
        *local_rank += same;
    }
    return EPMOE_OK;
}

static epmoe_status_t take_device(epmoe_comm_t *comm, const epmoe_comm_config_t *config, int32_t local_rank)
{
    int32_t count = epmoei_device_count(), rank = 0, size = 0;
    if (config->nccl_comm) {
        EPMOEI_CHECK(epmoei_nccl_describe(config->nccl_comm, &rank, &size, &comm->device));
        if (rank != comm->bootstrap.rank || size != comm->bootstrap.size)
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                               "config.nccl_comm is rank %d of %d: expected rank %d of %d as in the bootstrap", rank,
                               size, comm->bootstrap.rank, comm->bootstrap.size);
    } else if (config->device < -1 || config->device >= count)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "config.device is %d: expected -1..%d (%d visible)",
                           config->device, count - 1, count);
    else
        comm->device = config->device == -1 ? local_rank % count : config->device;
    return epmoei_device_set(comm->device);
}

typedef struct sharing_t {
    int32_t first, second; /* two ranks on one device, of those on the fullest */
} sharing_t;

enum { UUID_WORDS = 4, HOST = UUID_WORDS, HAS_P2P = HOST + NUMBER_WORDS, HAS_NCCL, NCCL_IS_GIVEN, NUM_DEVICE_FIELDS };

/* Whether two ranks gave the same values to fields [first, first + count). */
static bool same_values(const epmoe_comm_t *comm, int32_t a, int32_t b, int32_t first, int32_t count)
{
    for (int32_t i = first; i < first + count; i++)
        if (epmoei_comm_agreed_value(comm, a, i) != epmoei_comm_agreed_value(comm, b, i)) return false;
    return true;
}

/* Compares the physical devices: an ordinal says nothing where every rank sees its own as 0. */
static epmoe_status_t compare_devices(epmoe_comm_t *comm, const epmoe_comm_config_t *config, epmoe_status_t local,
                                      epmoei_auto_facts_t *facts, sharing_t *sharing)
{
    const epmoei_device_info_t *info = local == EPMOE_OK ? epmoei_device_info(comm->device) : NULL;
    const uint64_t host = hash_of_host();
    epmoei_agreed_t fields[NUM_DEVICE_FIELDS] = {
        [HAS_P2P] = {NULL, epmoei_transport_ops(EPMOE_TRANSPORT_P2P) != NULL},
        [HAS_NCCL] = {NULL, epmoei_transport_ops(EPMOE_TRANSPORT_NCCL) != NULL},
        [NCCL_IS_GIVEN] = {"nccl_comm given", config->nccl_comm != NULL},
    };
    for (int32_t i = 0; i < UUID_WORDS && info; i++) fields[i].value = word(info->uuid + 4 * i);
    for (int32_t i = 0; i < NUMBER_WORDS; i++) fields[HOST + i].value = word((const char *)&host + 4 * i);
    EPMOEI_CHECK(epmoei_comm_agree_on(comm, "communicator (devices)", local, fields, NUM_DEVICE_FIELDS));
    *sharing = (sharing_t){0, 0};
    *facts = (epmoei_auto_facts_t){.size = comm->bootstrap.size,
                                   .one_host = true,
                                   .all_have_p2p = true,
                                   .all_have_nccl = true,
                                   .nccl_is_given = config->nccl_comm != NULL};
    for (int32_t a = 0; a < comm->bootstrap.size; a++) {
        int32_t ranks = 0, last = a;
        for (int32_t b = 0; b < comm->bootstrap.size; b++)
            if (same_values(comm, a, b, 0, UUID_WORDS)) ranks++, last = b;
        if (ranks > facts->ranks_per_device) facts->ranks_per_device = ranks, *sharing = (sharing_t){a, last};
        facts->one_host &= same_values(comm, 0, a, HOST, NUMBER_WORDS);
        facts->all_have_p2p &= epmoei_comm_agreed_value(comm, a, HAS_P2P) != 0;
        facts->all_have_nccl &= epmoei_comm_agreed_value(comm, a, HAS_NCCL) != 0;
    }
    comm->ranks_per_device = facts->ranks_per_device;
    return EPMOE_OK;
}

epmoe_transport_t epmoei_auto_transport(const epmoei_auto_facts_t *facts)
{
    if (facts->size == 1) return EPMOE_TRANSPORT_LOCAL;
    /* Kernels that wait for each other take turns on a device, some milliseconds each. */
    if (facts->ranks_per_device > 1) return EPMOE_TRANSPORT_MPI;
    if (facts->nccl_is_given) return EPMOE_TRANSPORT_NCCL;
    if (facts->all_have_p2p && facts->one_host && facts->size <= EPMOEI_P2P_MAX_RANKS && !facts->p2p_is_refused)
        return EPMOE_TRANSPORT_P2P;
    return facts->all_have_nccl ? EPMOE_TRANSPORT_NCCL : EPMOE_TRANSPORT_MPI;
}

static epmoe_status_t settle_transport(epmoe_comm_t *comm, const epmoei_auto_facts_t *facts, const sharing_t *sharing)
{
    bool shared = facts->ranks_per_device > 1;
    switch (comm->transport) {
    case EPMOE_TRANSPORT_AUTO:
        comm->transport = epmoei_auto_transport(facts);
        if (shared && comm->bootstrap.rank == 0)
            epmoei_log(
                EPMOE_LOG_WARNING,
                "communicator: up to %d ranks share one device (ranks %d and %d do): transport mpi by way of host "
                "memory, times mean nothing",
                facts->ranks_per_device, sharing->first, sharing->second);
        return EPMOE_OK;
    case EPMOE_TRANSPORT_P2P:
        if (shared && comm->bootstrap.rank == 0)
            epmoei_log(
                EPMOE_LOG_INFO,
                "communicator: up to %d ranks share one device (ranks %d and %d do) over p2p: their kernels take "
                "turns, times mean nothing",
                facts->ranks_per_device, sharing->first, sharing->second);
        return EPMOE_OK;
    case EPMOE_TRANSPORT_NCCL:
        if (!shared) return EPMOE_OK;
        return epmoei_fail(
            EPMOE_ERROR_NOT_SUPPORTED,
            "config.transport is nccl: ranks %d and %d share one device (%d ranks on it), and NCCL wants "
            "a device for every rank; use mpi or auto, or fewer ranks",
            sharing->first, sharing->second, facts->ranks_per_device);
    default: return EPMOE_OK;
    }
}

epmoe_status_t epmoei_comm_place(epmoe_comm_t *comm, const epmoe_comm_config_t *config, epmoei_auto_facts_t *facts)
{
    int32_t local_rank;
    sharing_t sharing;
    EPMOEI_CHECK(find_local_rank(comm, &local_rank));
    EPMOEI_CHECK(compare_devices(comm, config, take_device(comm, config, local_rank), facts, &sharing));
    epmoe_status_t local = settle_transport(comm, facts, &sharing);
    const epmoei_agreed_t transport = {"transport", comm->transport};
    epmoe_status_t status = epmoei_comm_agree_on(comm, "communicator", local, &transport, 1);
    for (int32_t r = 1; r < comm->bootstrap.size && status == EPMOE_ERROR_MISMATCH; r++) {
        epmoe_transport_t first = (epmoe_transport_t)epmoei_comm_agreed_value(comm, 0, 0);
        epmoe_transport_t other = (epmoe_transport_t)epmoei_comm_agreed_value(comm, r, 0);
        if (first != other)
            return epmoei_fail(status, "communicator: transport is %s on rank 0 and %s on rank %d",
                               epmoe_transport_string(first), epmoe_transport_string(other), r);
    }
    return status;
}

epmoe_status_t epmoei_comm_check_device(const epmoe_comm_t *comm)
{
    if (comm->backend != EPMOE_BACKEND_CUDA || epmoei_device_current_ordinal() == comm->device) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_BAD_STATE, "the thread's current device is %d: expected %d, the communicator's",
                       epmoei_device_current_ordinal(), comm->device);
}
