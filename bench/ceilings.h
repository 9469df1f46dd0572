/* What this machine can do, measured at the start of the run by all ranks at once: the memory's read bandwidth and the
 * speed of a dense fp32 GEMM (the CPU's peak for every dtype, as the library computes in fp32 there). */
#ifndef EPMOE_BENCH_CEILINGS_H
#define EPMOE_BENCH_CEILINGS_H

#include "tools/program.h"

typedef struct ceilings_t {
    double read_bytes_per_s; /* of each rank while all read */
    double flops_per_s;
    int32_t num_machines;
    int32_t *machine;     /* [size]: the lowest rank on the same machine */
    bool shares_cores;    /* somewhere a machine's ranks have more threads than cores */
    int32_t most_threads; /* of the ranks of the fullest machine, and its cores */
    int32_t cores;
    int64_t flush_bytes; /* this rank's part of the last-level cache */
    int64_t buffer_bytes;
    uint64_t *buffer;
} ceilings_t;

/* Collective: all ranks succeed or all get an error. ceilings_free is legal after either. */
epmoe_status_t ceilings_measure(ceilings_t *ceilings, const program_t *program);
void ceilings_free(ceilings_t *ceilings);

/* Reads as much as the last-level cache holds, so that what the next timed call needs comes from memory. */
void ceilings_flush(const ceilings_t *ceilings);

#endif
