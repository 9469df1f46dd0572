#include "bench/cuda.h"

#include "bench/stats.h"

#include "base/device.h"

#if EPMOE_HAVE_CUDA

#include <cuda_runtime_api.h>

/* Read before each timed iteration. Reading leaves no dirty lines, whose way to memory would be timed; and it takes the
 * device long enough that the host has enqueued the timed work before it begins. */
#define FLUSH_BYTES  ((int64_t)256 << 20)
#define FLUSH_CACHES 4 /* but at least so many times the L2 */
#define WAKE_S       0.03
#define NUM_EVENTS   (EPMOE_STAGE_COUNT + 1)

static epmoe_status_t create_event(void **event)
{
    cudaEvent_t made;
    EPMOEI_CUDA(cudaEventCreate(&made));
    *event = made;
    return EPMOE_OK;
}

static epmoe_status_t create(cuda_t *cuda)
{
    const epmoei_device_info_t *info = epmoei_device_current();
    if (!info) return epmoei_fail(EPMOE_ERROR_CUDA, "there is no current device: %s", epmoei_device_absence());
    cuda->num_sms = info->num_sms;
    cuda->flush_bytes = epmoei_max64(FLUSH_BYTES, epmoei_round_up(FLUSH_CACHES * info->l2_bytes, 16));
    void *sums;
    EPMOEI_CHECK(epmoei_stream_create(&cuda->stream));
    EPMOEI_CHECK(create_event(&cuda->start));
    EPMOEI_CHECK(create_event(&cuda->stop));
    EPMOEI_CHECK(epmoei_memory_alloc(EPMOE_BACKEND_CUDA, &cuda->flush, cuda->flush_bytes, "the cache flush"));
    EPMOEI_CHECK(
        epmoei_memory_alloc(EPMOE_BACKEND_CUDA, &sums, 4 * (int64_t)CUDA_READ_BLOCKS(cuda->num_sms), "the sums"));
    cuda->sums = sums;
    EPMOEI_CHECK(epmoei_memory_set(EPMOE_BACKEND_CUDA, cuda->flush, 0x5A, cuda->flush_bytes, cuda->stream));
    return epmoei_stream_wait(EPMOE_BACKEND_CUDA, cuda->stream);
}

epmoe_status_t cuda_create(cuda_t *cuda)
{
    *cuda = (cuda_t){0};
    epmoe_status_t status = create(cuda);
    if (status != EPMOE_OK) cuda_destroy(cuda);
    return status;
}

void cuda_destroy(cuda_t *cuda)
{
    epmoei_memory_free(EPMOE_BACKEND_CUDA, cuda->flush);
    epmoei_memory_free(EPMOE_BACKEND_CUDA, cuda->sums);
    if (cuda->start) cudaEventDestroy(cuda->start);
    if (cuda->stop) cudaEventDestroy(cuda->stop);
    epmoei_stream_destroy(cuda->stream);
    *cuda = (cuda_t){0};
}

epmoe_status_t cuda_read(const cuda_t *cuda, const void *data, int64_t bytes)
{
    return cuda_launch_read(data, bytes, CUDA_READ_BLOCKS(cuda->num_sms), cuda->sums, cuda->stream);
}

static epmoe_status_t capture(const cuda_t *cuda, const cuda_timing_t *timing, void *const *events,
                              cudaGraphExec_t *made)
{
    cudaGraph_t graph = NULL;
    EPMOEI_CUDA(cudaStreamBeginCapture(cuda->stream, cudaStreamCaptureModeThreadLocal));
    epmoe_status_t status = timing->run(timing->ctx, cuda->stream, events);
    cudaError_t error = cudaStreamEndCapture(cuda->stream, &graph);
    if (status == EPMOE_OK) status = epmoei_cuda_status((int32_t)error, "cudaStreamEndCapture");
    if (status == EPMOE_OK)
        status = epmoei_cuda_status((int32_t)cudaGraphInstantiate(made, graph, 0), "cudaGraphInstantiate");
    if (graph) cudaGraphDestroy(graph);
    EPMOEI_CHECK(status);
    EPMOEI_CUDA(cudaGraphUpload(*made, cuda->stream));
    return epmoei_stream_wait(EPMOE_BACKEND_CUDA, cuda->stream);
}

/* A device that has idled, while results were checked, needs some milliseconds to reach its clocks. */
static epmoe_status_t wake(const cuda_t *cuda)
{
    for (double end = epmoei_now_seconds() + WAKE_S; epmoei_now_seconds() < end;) {
        for (int32_t i = 0; i < 8; i++) EPMOEI_CHECK(cuda_read(cuda, cuda->flush, cuda->flush_bytes));
        EPMOEI_CHECK(epmoei_stream_wait(EPMOE_BACKEND_CUDA, cuda->stream));
    }
    return EPMOE_OK;
}

static epmoe_status_t run_once(const cuda_t *cuda, const cuda_timing_t *timing, void *const *events,
                               cudaGraphExec_t graph, double *us)
{
    float ms;
    if (timing->flush) EPMOEI_CHECK(cuda_read(cuda, cuda->flush, cuda->flush_bytes));
    if (timing->barrier) {
        epmoe_dispatch_args_t nothing = EPMOE_DISPATCH_ARGS_INIT;
        epmoe_dispatch_result_t rows = EPMOE_DISPATCH_RESULT_INIT;
        EPMOEI_CHECK(epmoe_dispatch(timing->barrier, &nothing, &rows, cuda->stream));
    }
    EPMOEI_CUDA(cudaEventRecord(cuda->start, cuda->stream));
    if (timing->nap) {
        EPMOEI_CHECK(
            epmoei_stream_wait(EPMOE_BACKEND_CUDA, cuda->stream)); /* the clock runs, however busy the device */
        nanosleep(timing->nap, NULL);
    }
    if (graph)
        EPMOEI_CUDA(cudaGraphLaunch(graph, cuda->stream));
    else
        EPMOEI_CHECK(timing->run(timing->ctx, cuda->stream, events));
    EPMOEI_CUDA(cudaEventRecord(cuda->stop, cuda->stream));
    EPMOEI_CUDA(cudaEventSynchronize(cuda->stop));
    EPMOEI_CUDA(cudaEventElapsedTime(&ms, cuda->start, cuda->stop));
    *us = 1e3 * (double)ms;
    return EPMOE_OK;
}

/* From the events of one run; those of stages that it did not have were never recorded, or in an earlier run. */
static epmoe_status_t read_stages(void *const *events, double *us)
{
    double ends[EPMOE_STAGE_COUNT];
    for (int32_t s = 0; s < EPMOE_STAGE_COUNT; s++) {
        float ms = 0;
        cudaError_t error = cudaEventElapsedTime(&ms, events[EPMOE_STAGE_COUNT], events[s]);
        ends[s] = -1;
        if (error == cudaErrorInvalidResourceHandle) {
            cudaGetLastError(); /* never recorded */
            continue;
        }
        EPMOEI_CUDA(error);
        ends[s] = 1e3 * (double)ms;
    }
    stats_stages(ends, us);
    return EPMOE_OK;
}

static epmoe_status_t time_all(const cuda_t *cuda, const cuda_timing_t *timing, void *const *events, double *times)
{
    cudaGraphExec_t graph = NULL;
    epmoe_status_t status = wake(cuda);
    if (status == EPMOE_OK && timing->graph) status = capture(cuda, timing, events, &graph);
    for (int32_t i = -timing->warmup; i < timing->iters; i++) {
        double us;
        /* A barrier, which also tells every rank of one that failed. */
        EPMOEI_CHECK_GOTO(epmoe_comm_agree(timing->comm, status), done);
        status = run_once(cuda, timing, events, graph, &us);
        if (status != EPMOE_OK || i < 0) continue;
        if (events)
            status = read_stages(events, times + (int64_t)i * EPMOE_STAGE_COUNT);
        else
            times[i] = us;
    }
    status = epmoe_comm_agree(timing->comm, status);
done:
    if (graph) cudaGraphExecDestroy(graph);
    return status;
}

epmoe_status_t cuda_time(const cuda_t *cuda, const cuda_timing_t *timing, double *times)
{
    return time_all(cuda, timing, NULL, times);
}

epmoe_status_t cuda_time_stages(const cuda_t *cuda, const cuda_timing_t *timing, double *times)
{
    void *events[NUM_EVENTS] = {NULL};
    epmoe_status_t status = EPMOE_OK;
    for (int32_t i = 0; i < NUM_EVENTS && status == EPMOE_OK; i++) status = create_event(&events[i]);
    EPMOEI_CHECK_GOTO(epmoe_comm_agree(timing->comm, status), done);
    status = time_all(cuda, timing, events, times);
done:
    for (int32_t i = 0; i < NUM_EVENTS; i++)
        if (events[i]) cudaEventDestroy(events[i]);
    return status;
}

#else

static epmoe_status_t no_cuda(void) { return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "%s", epmoei_device_absence()); }

epmoe_status_t cuda_create(cuda_t *cuda)
{
    *cuda = (cuda_t){0};
    return no_cuda();
}

void cuda_destroy(cuda_t *cuda) { (void)cuda; }

epmoe_status_t cuda_time(const cuda_t *cuda, const cuda_timing_t *timing, double *times)
{
    (void)cuda, (void)timing, (void)times;
    return no_cuda();
}

epmoe_status_t cuda_time_stages(const cuda_t *cuda, const cuda_timing_t *timing, double *times)
{
    (void)cuda, (void)timing, (void)times;
    return no_cuda();
}

#endif
