/* Ranks as threads of one process: a bootstrap over shared memory, which shows that the library's communication needs
 * no MPI, and lets a test look at all ranks at once. */
#ifndef EPMOE_THREAD_BOOTSTRAP_H
#define EPMOE_THREAD_BOOTSTRAP_H

#include "tests/testing.h"

typedef struct testing_ranks testing_ranks_t;

testing_ranks_t *testing_ranks_create(int32_t size);
void testing_ranks_free(testing_ranks_t *ranks);
/* The bootstrap of one rank; `ranks` must outlive it. */
epmoe_bootstrap_t testing_ranks_bootstrap(testing_ranks_t *ranks, int32_t rank);
/* How often `release` was called over all ranks, and how often of these with `failed`. */
int32_t testing_ranks_released(testing_ranks_t *ranks, int32_t *failed);

/* Calls fn(ctx, bootstrap of the rank) on one thread per rank and waits for all of them. */
typedef void (*testing_rank_fn)(void *ctx, epmoe_bootstrap_t bootstrap);
void testing_ranks_run(testing_ranks_t *ranks, testing_rank_fn fn, void *ctx);

#endif
