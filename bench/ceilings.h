/* What this machine can do, measured at the start of the run by all ranks at once: the memory's bandwidth, read and, on
 * CUDA, copied, and the speed of a dense GEMM. On the CPU that is an fp32 one, the peak for every dtype as the library
 * computes in fp32 there; on CUDA cuBLASLt's of the dtype, which may be F8_E4M3. */
#ifndef EPMOE_BENCH_CEILINGS_H
#define EPMOE_BENCH_CEILINGS_H

#include "bench/cuda.h"

typedef struct ceilings_t {
    double read_bytes_per_s;      /* of each rank while all read */
    double copy_bytes_per_s;      /* CUDA: read and written together; 0 on the CPU */
    double flops_per_s;           /* infinite where there is nothing to measure it with */
    double sustained_flops_per_s; /* the same product after half a second of it; 0 = not measured, as on the CPU */
    double empty_graph_us;        /* CUDA: a graph of one empty kernel, timed as the cases are */
    int32_t num_machines;
    int32_t *domain;      /* [size]: the lowest rank with the same memory: that of a machine, or of a device */
    bool shares_cores;    /* CPU: somewhere a machine's ranks have more threads than cores */
    int32_t most_threads; /* of the ranks of the fullest machine, and its cores */
    int32_t cores;
    int32_t ranks_per_device; /* CUDA: of the fullest device; 0 on the CPU */
    int64_t flush_bytes;      /* CPU: this rank's part of the last-level cache */
    int64_t buffer_bytes;
    uint64_t *buffer;
} ceilings_t;

/* cuda NULL: of the CPU. Collective: all ranks succeed or all get an error. ceilings_free is legal after either. */
epmoe_status_t ceilings_measure(ceilings_t *ceilings, const program_t *program, const cuda_t *cuda,
                                epmoe_dtype_t dtype);
void ceilings_free(ceilings_t *ceilings);

/* Reads as much as the last-level cache holds, so that what the next timed call needs comes from memory. CPU only. */
void ceilings_flush(const ceilings_t *ceilings);

/* ceilings_cuda.c: the first five fields. */
epmoe_status_t ceilings_measure_cuda(ceilings_t *ceilings, const program_t *program, const cuda_t *cuda,
                                     epmoe_dtype_t dtype);

#endif
