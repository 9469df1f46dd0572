/* Memory that all ranks of a communicator map: each makes a piece of its own device's memory, and every other rank of
 * the host gets an address of it. Pieces need not be equally large. */
#ifndef EPMOEI_P2P_WINDOW_H
#define EPMOEI_P2P_WINDOW_H

#include "comm/comm.h"
#include "comm/p2p.h"

/* The pieces of all ranks. A piece may be given back to the device only when no rank has it mapped: all close what they
 * have mapped, tell each other, and free their own. */
typedef struct epmoei_shared_t {
    char *pieces[EPMOEI_P2P_MAX_RANKS]; /* by rank, at addresses of this process; NULL = not there */
    bool is_mapped[EPMOEI_P2P_MAX_RANKS];
    int64_t number; /* alike on all ranks */
    struct epmoei_shared_t *next;
} epmoei_shared_t;

/* Where the ranks are; settles whether they can share memory at all. */
typedef struct epmoei_places_t {
    uint64_t process; /* of this rank, unlike any other's */
    int32_t devices[EPMOEI_P2P_MAX_RANKS];
    uint64_t processes[EPMOEI_P2P_MAX_RANKS];
} epmoei_places_t;

/* Collective, inside an entered call. NOT_SUPPORTED on all ranks when they are on several hosts, or when two of them
 * are one process on one device, where the kernel of one could wait for that of the other and keep it from running. */
epmoe_status_t epmoei_places_gather(epmoe_comm_t *comm, epmoei_places_t *places);

/* Collective: `bytes` of this rank, the first `cleared_bytes` of them 0, and the pieces of all others. On failure
 * nothing is left, and every rank gets an error. */
epmoe_status_t epmoei_shared_create(epmoe_comm_t *comm, const epmoei_places_t *places, int64_t bytes,
                                    int64_t cleared_bytes, epmoei_shared_t **shared);
/* Gives up what is mapped of other ranks, once the device is through with it. */
void epmoei_shared_close(epmoei_shared_t *shared, int32_t rank);
/* Frees the own piece, which no other rank has mapped any more. */
void epmoei_shared_free(epmoei_shared_t *shared, int32_t rank);

#endif
