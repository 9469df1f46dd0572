#include "comm/p2p_window.h"

#include "base/device.h"
#include "comm/p2p_layout.h"

#if EPMOE_HAVE_CUDA

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static uint64_t process_number;

/* Process ids repeat between containers. */
static void draw_process_number(void)
{
    if (getrandom(&process_number, sizeof process_number, 0) != (ssize_t)sizeof process_number)
        process_number = (uint64_t)getpid() << 32 ^ (uint64_t)(epmoei_now_seconds() * 1e9);
}

typedef struct place_t {
    uint64_t process;
    int32_t device; /* ordinal, compared within a process only */
    char host[64];
} place_t;

epmoe_status_t epmoei_places_gather(epmoe_comm_t *comm, epmoei_places_t *places)
{
    int32_t size = comm->bootstrap.size;
    place_t own = {.device = comm->device}, all[EPMOEI_P2P_MAX_RANKS];
    pthread_once(&once, draw_process_number);
    own.process = process_number;
    gethostname(own.host, sizeof own.host - 1);
    if (size > EPMOEI_P2P_MAX_RANKS)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "config.transport is p2p: at most %d ranks, size is %d",
                           EPMOEI_P2P_MAX_RANKS, size);
    EPMOEI_CHECK(epmoei_comm_gather(comm, "communicator (p2p)", &own, all, (int64_t)sizeof own));
    *places = (epmoei_places_t){.process = own.process};
    for (int32_t r = 0; r < size; r++) {
        places->processes[r] = all[r].process;
        places->devices[r] = all[r].device;
        if (strncmp(all[r].host, all[0].host, sizeof all[r].host))
            return epmoei_fail(
                EPMOE_ERROR_NOT_SUPPORTED,
                "config.transport is p2p: rank 0 is on host %.63s and rank %d on %.63s; expected one host", all[0].host,
                r, all[r].host);
        for (int32_t q = 0; q < r; q++)
            if (all[q].process == all[r].process && all[q].device == all[r].device)
                return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED,
                                   "config.transport is p2p: ranks %d and %d are one process on device %d: expected a "
                                   "process or a device for every rank",
                                   q, r, all[r].device);
    }
    return EPMOE_OK;
}

typedef struct offer_t {
    cudaIpcMemHandle_t handle;
    void *address; /* for ranks of the same process */
} offer_t;

/* An error that says what this rank, its device or its container is not able to do. */
static epmoe_status_t cannot(cudaError_t error, const char *what, const char *call)
{
    if (error == cudaSuccess) return EPMOE_OK;
    cudaGetLastError();
    return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "transport p2p: %s: %s: %s", what, call, cudaGetErrorString(error));
}

static epmoe_status_t make_piece(void **piece, int64_t bytes, int64_t cleared_bytes, offer_t *offer)
{
    EPMOEI_CHECK(epmoei_memory_alloc(EPMOE_BACKEND_CUDA, piece,
                                     epmoei_round_up(epmoei_max64(bytes, 1), EPMOEI_P2P_PAGE_BYTES),
                                     "dispatch buffers (p2p)"));
    EPMOEI_CHECK(epmoei_memory_set(EPMOE_BACKEND_CUDA, *piece, 0, cleared_bytes, NULL));
    EPMOEI_CHECK(epmoei_stream_wait(EPMOE_BACKEND_CUDA, NULL));
    offer->address = *piece;
    return cannot(cudaIpcGetMemHandle(&offer->handle, *piece), "this rank's device memory cannot be given to others",
                  "cudaIpcGetMemHandle");
}

static epmoe_status_t allow_peer(int32_t device)
{
    cudaError_t error = cudaDeviceEnablePeerAccess(device, 0);
    if (error != cudaErrorPeerAccessAlreadyEnabled)
        return cannot(error, "a device of this process cannot reach another", "cudaDeviceEnablePeerAccess");
    cudaGetLastError();
    return EPMOE_OK;
}

static epmoe_status_t map_pieces(epmoe_comm_t *comm, const epmoei_places_t *places, const offer_t *offers,
                                 epmoei_shared_t *shared)
{
    for (int32_t r = 0; r < comm->bootstrap.size; r++) {
        if (r == comm->bootstrap.rank) continue;
        if (places->processes[r] == places->process) {
            EPMOEI_CHECK(allow_peer(places->devices[r]));
            shared->pieces[r] = offers[r].address;
            continue;
        }
        void *piece = NULL;
        cudaError_t error = cudaIpcOpenMemHandle(&piece, offers[r].handle, cudaIpcMemLazyEnablePeerAccess);
        if (error != cudaSuccess) {
            cudaGetLastError();
            return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED,
                               "transport p2p: the device memory of rank %d cannot be mapped on rank %d: "
                               "cudaIpcOpenMemHandle: %s",
                               r, comm->bootstrap.rank, cudaGetErrorString(error));
        }
        shared->pieces[r] = piece;
        shared->is_mapped[r] = true;
    }
    return EPMOE_OK;
}

void epmoei_shared_close(epmoei_shared_t *shared, int32_t rank)
{
    bool waited = false;
    for (int32_t r = 0; r < EPMOEI_P2P_MAX_RANKS; r++) {
        if (r == rank) continue;
        if (shared->is_mapped[r]) {
            if (!waited && cudaDeviceSynchronize() != cudaSuccess) cudaGetLastError();
            waited = true;
            if (cudaIpcCloseMemHandle(shared->pieces[r]) != cudaSuccess) cudaGetLastError();
        }
        shared->is_mapped[r] = false;
        shared->pieces[r] = NULL;
    }
}

void epmoei_shared_free(epmoei_shared_t *shared, int32_t rank)
{
    epmoei_memory_free(EPMOE_BACKEND_CUDA, shared->pieces[rank]);
    epmoei_free(shared);
}

epmoe_status_t epmoei_shared_create(epmoe_comm_t *comm, const epmoei_places_t *places, int64_t bytes,
                                    int64_t cleared_bytes, epmoei_shared_t **shared)
{
    const int32_t rank = comm->bootstrap.rank;
    offer_t own, offers[EPMOEI_P2P_MAX_RANKS];
    memset(&own, 0, sizeof own);
    *shared = NULL;
    epmoei_shared_t *made = epmoei_calloc((int64_t)sizeof *made);
    void *piece = NULL;
    epmoe_status_t status =
        made ? make_piece(&piece, bytes, cleared_bytes, &own)
             : epmoei_fail(EPMOE_ERROR_OUT_OF_MEMORY, "no memory for a list of %d pieces", comm->bootstrap.size);
    if (made) made->pieces[rank] = piece;
    EPMOEI_CHECK_GOTO(epmoei_comm_agree_on(comm, "dispatch buffers (p2p)", status, NULL, 0), free_own);
    EPMOEI_CHECK_GOTO(epmoei_comm_gather(comm, "dispatch buffers (p2p)", &own, offers, (int64_t)sizeof own), keep);
    status = map_pieces(comm, places, offers, made);
    EPMOEI_CHECK_GOTO(epmoei_comm_agree_on(comm, "dispatch buffers (p2p mapped)", status, NULL, 0), unmap);
    *shared = made;
    return EPMOE_OK;

unmap:
    epmoei_shared_close(made, rank);
    /* The others may have this one mapped until all have closed. */
    if (epmoei_comm_agree_on(comm, "dispatch buffers (p2p closed)", EPMOE_OK, NULL, 0) != EPMOE_OK) goto keep;
free_own:
    if (made) epmoei_shared_free(made, rank);
    return status;
keep:
    epmoei_free(made); /* the piece itself stays: a peer may still have it mapped */
    return status;
}

#endif
