/* Calls of one op behind each other, as it stands in a graph of many: what remains of a launch when the one before it
 * still runs, and no part of the graph's own. Every call has memory of its own, so that all find their data cold. */
#ifndef EPMOE_BENCH_OP_CHAIN_H
#define EPMOE_BENCH_OP_CHAIN_H

#include "bench/op_job.h"

#define OP_CHAIN_MAX 20

typedef struct op_chain_t {
    const op_job_t *job; /* its memory is that of the first call */
    int32_t calls;
    int64_t bytes; /* of a call */
    char *copies;  /* device memory: of the other calls */
    op_args_t args[OP_CHAIN_MAX];
} op_chain_t;

/* On CUDA with graphs as many calls as some GiB hold the memory of, OP_CHAIN_MAX at most; otherwise one.
 * op_chain_destroy is legal after either. */
epmoe_status_t op_chain_create(op_chain_t *chain, const op_job_t *job);
void op_chain_destroy(op_chain_t *chain);

/* A cuda_timed_fn on a chain. */
epmoe_status_t op_chain_run(void *ctx, epmoe_stream_t stream, void *const *events);

/* Counts the outputs that the last call, which had other calls around it, left different from the first, guard bands
 * included. The job's outputs have been downloaded and not been written since. */
epmoe_status_t op_chain_compare(const op_chain_t *chain, int64_t *wrong);

#endif
