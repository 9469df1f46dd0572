/* Where the copies of experts are. Ids that a router chose name experts; behind a placement everything works on
 * physical experts, which are copies of experts and lie on ranks in blocks, as experts do without a placement.
 *
 * Which copy a slot takes is a function of what its own rank knows (expert, token index, rank), so that nothing has to
 * be exchanged: one of the own rank's copies if there are any, which saves a row on the wire, otherwise one of all,
 * in turns. With tokens spread evenly over R ranks and n copies on n of them, a copy gets 1/R of the load from its own
 * rank and (R - n)/(R n) from the ranks without one: 1/n in all, as much as every other copy. */
#ifndef EPMOEI_PLACEMENT_H
#define EPMOEI_PLACEMENT_H

#include "base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The copies of an expert that one rank's tokens take: entries first .. first + num - 1 of a list. */
typedef struct epmoei_copies_t {
    int32_t first, num; /* num >= 1 */
} epmoei_copies_t;

/* For every used slot: adds 1 to the load of its expert, and writes one of its copies. Unused ones stay -1.
 * An id that is no expert counts as -1; where copies are written, CUDA adds it to error_word. */
typedef struct epmoei_place_ids_t {
    int32_t num_tokens, top_k, num_experts;
    int32_t rank;                  /* whose tokens these are */
    const int32_t *num_tokens_dev; /* CUDA, or NULL: the actual number */
    const int32_t *ids;            /* [T,k] */
    const epmoei_copies_t *copies; /* [E] */
    const int32_t *physical;       /* the list */
    int32_t *physical_ids; /* out [T,k], may be ids; NULL: only the load is wanted, the two above are not read */
    int64_t *load;         /* [E] or NULL */
    int32_t *error_word;   /* or NULL */
} epmoei_place_ids_t;
void epmoei_place_ids_cpu(const epmoei_place_ids_t *args);
/* Enqueues, nothing else: can be captured. */
epmoe_status_t epmoei_place_ids_sm80(const epmoei_place_ids_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_place_ids(epmoe_backend_t backend, const epmoei_place_ids_t *args, epmoe_stream_t stream);

/* A placement as one rank uses it. */
typedef struct epmoei_placement_t {
    epmoe_backend_t backend;
    int32_t rank;
    int32_t num_experts, num_physical;
    epmoei_copies_t *copies; /* host [E] */
    int32_t *physical;       /* host [P], by expert, ascending */
    /* The backend's; on the CPU those above. */
    epmoei_copies_t *device_copies;
    int32_t *device_physical;
    void *memory, *device_memory;
} epmoei_placement_t;

/* Checks a config's fields placement and num_physical; a num_physical of 0 becomes its default. */
epmoe_status_t epmoei_placement_check(const int32_t *placement, int32_t num_experts, int32_t *num_physical);
/* From fields that epmoei_placement_check has passed; placement is copied. Local. */
epmoe_status_t epmoei_placement_create(const int32_t *placement, int32_t num_experts, int32_t num_physical,
                                       int32_t size, int32_t rank, epmoe_backend_t backend, epmoei_placement_t **out);
void epmoei_placement_destroy(epmoei_placement_t *placement); /* NULL is legal */
/* What it takes of the backend's memory. */
int64_t epmoei_placement_bytes(int32_t num_experts, int32_t num_physical);

/* How to place and count ids with it, in the backend's memory; NULL: only count. */
epmoei_place_ids_t epmoei_placement_args(const epmoei_placement_t *placement, int32_t num_experts);

#ifdef __cplusplus
}
#endif

#endif
