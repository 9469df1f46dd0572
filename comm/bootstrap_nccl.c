/* A bootstrap over a borrowed NCCL communicator, for callers who have nothing else: host data goes by way of
 * page-locked and device memory, on a stream of its own. Slower than any launcher's, and made for small data.
 * The callbacks may run while the caller captures another stream: that forbids calls that could reach into a capture,
 * which these cannot, so they say so. The communicator is left alone in every case. After a failure everything stays
 * for the life of the process: giving memory back would wait for a stream that may never end. */
#include "comm/transport.h"

#include <nccl.h>
#include <stdatomic.h>
#include <string.h>

enum { DONE = 0, TIMED_OUT = 1, FAILED = 2 };

typedef struct nccl_bootstrap_t {
    ncclComm_t comm;
    int32_t rank, size, device;
    epmoe_stream_t stream;
    epmoei_event_t event;
    char *pinned, *memory; /* `bytes` each, laid out alike */
    int64_t bytes;
    const epmoe_segment_t *recvs; /* of the exchange under way */
    int32_t num_recvs;
    int64_t recv_first, recv_bytes; /* where they arrive */
    struct nccl_bootstrap_t *next_kept;
} nccl_bootstrap_t;

static _Atomic(nccl_bootstrap_t *) kept;

/* The thread's state while a callback runs. */
typedef struct visit_t {
    int device;
    enum cudaStreamCaptureMode mode;
} visit_t;

static visit_t enter(const nccl_bootstrap_t *b)
{
    visit_t visit = {.device = b->device, .mode = cudaStreamCaptureModeRelaxed};
    cudaThreadExchangeStreamCaptureMode(&visit.mode);
    if (cudaGetDevice(&visit.device) != cudaSuccess) cudaGetLastError();
    if (visit.device != b->device) cudaSetDevice(b->device);
    return visit;
}

static int32_t leave(const nccl_bootstrap_t *b, visit_t visit, epmoe_status_t status)
{
    if (visit.device != b->device) cudaSetDevice(visit.device);
    cudaThreadExchangeStreamCaptureMode(&visit.mode);
    if (status == EPMOE_ERROR_TIMEOUT) epmoei_fail(status, "a peer did not come to NCCL");
    return status == EPMOE_OK ? DONE : status == EPMOE_ERROR_TIMEOUT ? TIMED_OUT : FAILED;
}

static epmoe_status_t make_room(nccl_bootstrap_t *b, int64_t bytes)
{
    if (bytes <= b->bytes) return EPMOE_OK;
    void *pinned = NULL, *memory = NULL;
    bytes = epmoei_round_up(bytes, 1 << 16);
    epmoe_status_t status = epmoei_pinned_alloc(&pinned, bytes, "the NCCL bootstrap");
    if (status == EPMOE_OK) status = epmoei_memory_alloc(EPMOE_BACKEND_CUDA, &memory, bytes, "the NCCL bootstrap");
    if (status != EPMOE_OK) {
        epmoei_pinned_free(pinned);
        return status;
    }
    epmoei_pinned_free(b->pinned);
    epmoei_memory_free(EPMOE_BACKEND_CUDA, b->memory);
    b->pinned = pinned;
    b->memory = memory;
    b->bytes = bytes;
    return EPMOE_OK;
}

static epmoe_status_t ask_arrived(void *ctx, bool *over)
{
    nccl_bootstrap_t *b = ctx;
    bool ready;
    EPMOEI_CHECK(epmoei_nccl_ask_ready(b->comm, &ready));
    return epmoei_event_query(b->event, over);
}

/* After NCCL's call: brings `bytes` at `first` back to the host. */
static epmoe_status_t bring_back(nccl_bootstrap_t *b, int64_t first, int64_t bytes, double timeout_s)
{
    double start = epmoei_now_seconds();
    EPMOEI_CHECK(epmoei_poll(epmoei_nccl_ask_ready, b->comm, timeout_s));
    EPMOEI_CHECK(epmoei_memory_copy(EPMOE_BACKEND_CUDA, b->pinned + first, b->memory + first, bytes, b->stream));
    EPMOEI_CHECK(epmoei_event_record(b->event, b->stream));
    return epmoei_poll(ask_arrived, b, timeout_s - (epmoei_now_seconds() - start));
}

static epmoe_status_t gather(nccl_bootstrap_t *b, const void *send, void *recv, int64_t bytes, double timeout_s)
{
    int64_t own = b->rank * bytes;
    EPMOEI_CHECK(make_room(b, b->size * bytes));
    memcpy(b->pinned + own, send, (size_t)bytes);
    EPMOEI_CHECK(epmoei_memory_copy(EPMOE_BACKEND_CUDA, b->memory + own, b->pinned + own, bytes, b->stream));
    EPMOEI_CHECK(epmoei_nccl_status(
        b->comm, ncclAllGather(b->memory + own, b->memory, (size_t)bytes, ncclInt8, b->comm, b->stream),
        "ncclAllGather"));
    EPMOEI_CHECK(bring_back(b, 0, b->size * bytes, timeout_s));
    memcpy(recv, b->pinned, (size_t)(b->size * bytes));
    return EPMOE_OK;
}

static int32_t nccl_all_gather(void *ctx, const void *send, void *recv, int64_t bytes, double timeout_s,
                               int32_t *failed_peer)
{
    (void)failed_peer;
    visit_t visit = enter(ctx);
    return leave(ctx, visit, gather(ctx, send, recv, bytes, timeout_s));
}

static int64_t total_bytes(const epmoe_segment_t *segments, int32_t num)
{
    int64_t bytes = 0;
    for (int32_t i = 0; i < num; i++) bytes += segments[i].bytes;
    return bytes;
}

/* One group; segments of a pair meet in their order. Sends lie packed from 0, receives from recv_first. */
static epmoe_status_t post(nccl_bootstrap_t *b, const epmoe_segment_t *sends, int32_t num_sends)
{
    char *at = b->memory;
    EPMOEI_CHECK(epmoei_nccl_status(b->comm, ncclGroupStart(), "ncclGroupStart"));
    ncclResult_t result = ncclSuccess;
    for (int32_t i = 0; i < num_sends && result == ncclSuccess; at += sends[i++].bytes)
        if (sends[i].bytes) result = ncclSend(at, (size_t)sends[i].bytes, ncclInt8, sends[i].peer, b->comm, b->stream);
    at = b->memory + b->recv_first;
    for (int32_t i = 0; i < b->num_recvs && result == ncclSuccess; at += b->recvs[i++].bytes)
        if (b->recvs[i].bytes)
            result = ncclRecv(at, (size_t)b->recvs[i].bytes, ncclInt8, b->recvs[i].peer, b->comm, b->stream);
    ncclResult_t ended = ncclGroupEnd(); /* in any case: groups are the thread's */
    return epmoei_nccl_status(b->comm, result == ncclSuccess ? ended : result, "ncclSend, ncclRecv");
}

static epmoe_status_t begin(nccl_bootstrap_t *b, const epmoe_segment_t *sends, int32_t num_sends,
                            const epmoe_segment_t *recvs, int32_t num_recvs)
{
    int64_t send_bytes = total_bytes(sends, num_sends);
    b->recvs = recvs;
    b->num_recvs = num_recvs;
    b->recv_bytes = total_bytes(recvs, num_recvs);
    b->recv_first = epmoei_round_up(send_bytes, EPMOEI_ALIGNMENT);
    EPMOEI_CHECK(make_room(b, b->recv_first + b->recv_bytes));
    char *at = b->pinned;
    for (int32_t i = 0; i < num_sends; at += sends[i++].bytes)
        if (sends[i].bytes) memcpy(at, sends[i].data, (size_t)sends[i].bytes);
    EPMOEI_CHECK(epmoei_memory_copy(EPMOE_BACKEND_CUDA, b->memory, b->pinned, send_bytes, b->stream));
    return post(b, sends, num_sends);
}

static int32_t nccl_exchange_begin(void *ctx, const epmoe_segment_t *sends, int32_t num_sends,
                                   const epmoe_segment_t *recvs, int32_t num_recvs)
{
    visit_t visit = enter(ctx);
    return leave(ctx, visit, begin(ctx, sends, num_sends, recvs, num_recvs));
}

static epmoe_status_t finish(nccl_bootstrap_t *b, double timeout_s)
{
    EPMOEI_CHECK(bring_back(b, b->recv_first, b->recv_bytes, timeout_s));
    const char *at = b->pinned + b->recv_first;
    for (int32_t i = 0; i < b->num_recvs; at += b->recvs[i++].bytes)
        if (b->recvs[i].bytes) memcpy(b->recvs[i].data, at, (size_t)b->recvs[i].bytes);
    return EPMOE_OK;
}

static int32_t nccl_exchange_finish(void *ctx, double timeout_s, int32_t *failed_peer)
{
    (void)failed_peer;
    visit_t visit = enter(ctx);
    return leave(ctx, visit, finish(ctx, timeout_s));
}

static void free_bootstrap(nccl_bootstrap_t *b)
{
    epmoei_memory_free(EPMOE_BACKEND_CUDA, b->memory);
    epmoei_pinned_free(b->pinned);
    epmoei_event_destroy(b->event);
    epmoei_stream_destroy(b->stream);
    epmoei_free(b);
}

static void nccl_release(void *ctx, int32_t failed)
{
    nccl_bootstrap_t *b = ctx;
    if (!failed) {
        free_bootstrap(b);
        return;
    }
    b->next_kept = atomic_load(&kept);
    while (!atomic_compare_exchange_weak(&kept, &b->next_kept, b)) {
    }
}

epmoe_status_t epmoei_bootstrap_create_nccl(struct ncclComm *comm, epmoe_bootstrap_t *bootstrap)
{
    epmoe_status_t status;
    nccl_bootstrap_t *b = epmoei_calloc(sizeof *b);
    if (!b) return epmoei_fail(EPMOE_ERROR_OUT_OF_MEMORY, "no memory for the NCCL bootstrap");
    b->comm = comm;
    EPMOEI_CHECK_GOTO(epmoei_nccl_describe(comm, &b->rank, &b->size, &b->device), fail);
    EPMOEI_CHECK_GOTO(epmoei_stream_create(&b->stream), fail);
    EPMOEI_CHECK_GOTO(epmoei_event_create(&b->event), fail);
    *bootstrap = (epmoe_bootstrap_t){
        .struct_size = sizeof *bootstrap,
        .rank = b->rank,
        .size = b->size,
        .ctx = b,
        .all_gather = nccl_all_gather,
        .exchange_begin = nccl_exchange_begin,
        .exchange_finish = nccl_exchange_finish,
        .release = nccl_release,
    };
    return EPMOE_OK;
fail:
    free_bootstrap(b);
    return status;
}
