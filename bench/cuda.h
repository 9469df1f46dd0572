/* Timing on a CUDA device: what is timed goes to a stream of the bench's own, eagerly or as the replay of a graph,
 * between two events and after the L2 cache was filled with other data. The files of the bench that know the CUDA
 * runtime are cuda.c and ceilings_cuda.c; a build without CUDA gets stand-ins that say NOT_SUPPORTED. */
#ifndef EPMOE_BENCH_CUDA_H
#define EPMOE_BENCH_CUDA_H

#include "tools/program.h"

#include <time.h>

typedef struct cuda_t {
    epmoe_stream_t stream;
    void *start; /* cudaEvent_t */
    void *stop;
    void *flush;
    int64_t flush_bytes;
    int32_t num_sms;
    uint32_t *sums; /* where the reading kernel leaves its sums */
} cuda_t;

/* On the calling thread's current device. cuda_destroy is legal after either. */
epmoe_status_t cuda_create(cuda_t *cuda);
void cuda_destroy(cuda_t *cuda);

/* What is timed: enqueues itself on `stream` and does not wait, unless it is run eagerly. `events`, where it is not
 * NULL, is recorded as epmoe_forward_args_t.stage_events asks. */
typedef epmoe_status_t (*cuda_timed_fn)(void *ctx, epmoe_stream_t stream, void *const *events);

typedef struct cuda_timing_t {
    cuda_timed_fn run;
    void *ctx;
    bool graph; /* captured once and replayed */
    bool flush;
    int32_t warmup;
    int32_t iters;
    epmoe_comm_t *comm;         /* its ranks start each iteration together */
    epmoe_ep_t *barrier;        /* over p2p, for no tokens: so do their devices; NULL = only the hosts */
    const struct timespec *nap; /* slept between the first event and `run`; NULL = not */
} cuda_timing_t;

/* times [iters] in us, of this rank. Collective over the ranks of comm. */
epmoe_status_t cuda_time(const cuda_t *cuda, const cuda_timing_t *timing, double *times);
/* times [iters,EPMOE_STAGE_COUNT] in us: of each stage from the end of the one before it; 0 for stages that did not
 * run. A pass of its own, since events between kernels cost time. */
epmoe_status_t cuda_time_stages(const cuda_t *cuda, const cuda_timing_t *timing, double *times);

/* Reads data [bytes, a multiple of 16] once. */
epmoe_status_t cuda_read(const cuda_t *cuda, const void *data, int64_t bytes);

/* The kernels of cuda_sm80.cu. sums [CUDA_READ_BLOCKS(num_sms)]. */
#define CUDA_READ_BLOCKS(num_sms) (4 * (num_sms))
#ifdef __cplusplus
extern "C" {
#endif
epmoe_status_t cuda_launch_read(const void *data, int64_t bytes, int32_t num_blocks, uint32_t *sums,
                                epmoe_stream_t stream);
/* bytes a multiple of 16, dst and src aligned to 16 bytes, without overlap. */
epmoe_status_t cuda_launch_copy(void *dst, const void *src, int64_t bytes, int32_t num_blocks, epmoe_stream_t stream);
epmoe_status_t cuda_launch_empty(epmoe_stream_t stream);
#ifdef __cplusplus
}
#endif

#endif
