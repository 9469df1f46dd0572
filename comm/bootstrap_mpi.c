/* The bootstrap over MPI: the only file that sees mpi.h. It is a library of its own and uses epmoe.h alone.
 *
 * Nothing here blocks inside MPI: requests are posted, then tested until a deadline. After a failure requests may stay
 * active for ever, so everything they point to is kept for the life of the process. */
#include <epmoe/epmoe_mpi.h>

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define DEFAULT_TIMEOUT_S 30.0
#define PIECE_BYTES       ((int64_t)1 << 30) /* MPI counts are int */
#define SPIN_S            1e-3               /* polling after the last progress before naps begin */
#define NAP_NS            30000

enum { TAG_GATHER = 1, TAG_EXCHANGE = 2 };
enum { WAIT_DONE = 0, WAIT_TIMEOUT = 1, WAIT_FAILED = 2 };

/* What a request moves, beside it in an array of its own: MPI wants the requests contiguous. */
typedef struct transfer_t {
    int32_t peer;
    int32_t bytes;
    int32_t is_recv;
} transfer_t;

typedef struct mpi_bootstrap_t {
    MPI_Comm comm;
    MPI_Request duplication;
    int32_t rank, size;
    int32_t num, room; /* requests posted, and places for them */
    MPI_Request *requests;
    MPI_Status *statuses;
    int *indices;
    transfer_t *transfers;
    char *gathered; /* where peers' contributions arrive: the caller's buffer must not be written after a failure */
    int64_t gathered_bytes;
    struct mpi_bootstrap_t *next_kept;
} mpi_bootstrap_t;

static _Atomic(mpi_bootstrap_t *) kept;

static double now_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Ranks may outnumber cores: after a short spin the core is given away. */
static void back_off(double idle_seconds)
{
    if (idle_seconds < SPIN_S)
        sched_yield();
    else
        nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
}

/* MPI writes to sockets, and one whose peer has died raises SIGPIPE, which ends a process that has not provided for it.
 * Here a dead peer is an error to be returned: while MPI works the signal is held back, and what came is dropped. */
typedef struct held_t {
    sigset_t pipe, before;
} held_t;

static held_t hold_sigpipe(void)
{
    held_t held;
    sigemptyset(&held.pipe);
    sigaddset(&held.pipe, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &held.pipe, &held.before);
    return held;
}

static void release_sigpipe(const held_t *held)
{
    /* A caller who holds it back himself looks at it himself. */
    if (sigismember(&held->before, SIGPIPE)) return;
    while (sigtimedwait(&held->pipe, NULL, &(struct timespec){0}) < 0 && errno == EINTR) {
    }
    pthread_sigmask(SIG_SETMASK, &held->before, NULL);
}

static int32_t failed_call(const char *call, int code)
{
    char text[MPI_MAX_ERROR_STRING + 64], reason[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(code, reason, &length);
    snprintf(text, sizeof text, "%s: %s", call, reason);
    epmoe_set_last_error(EPMOE_ERROR_TRANSPORT, text);
    return WAIT_FAILED;
}

static int32_t no_memory(void)
{
    epmoe_set_last_error(EPMOE_ERROR_TRANSPORT, "no memory for MPI requests");
    return WAIT_FAILED;
}

static int64_t num_pieces(int64_t bytes) { return (bytes + PIECE_BYTES - 1) / PIECE_BYTES; }

/* Room for `count` requests; only between exchanges, since MPI knows requests by their place. */
static int32_t make_room(mpi_bootstrap_t *b, int64_t count)
{
    b->num = 0;
    if (count <= b->room) return 0;
    if (count > INT32_MAX / 2) return no_memory();
    free(b->requests), free(b->statuses), free(b->indices), free(b->transfers);
    size_t n = (size_t)count;
    b->requests = malloc(n * sizeof *b->requests);
    b->statuses = malloc(n * sizeof *b->statuses);
    b->indices = malloc(n * sizeof *b->indices);
    b->transfers = malloc(n * sizeof *b->transfers);
    b->room = b->requests && b->statuses && b->indices && b->transfers ? (int32_t)count : 0;
    return b->room ? 0 : no_memory();
}

static int32_t post(mpi_bootstrap_t *b, int32_t is_recv, int32_t peer, void *data, int64_t bytes, int tag)
{
    for (int64_t done = 0; done < bytes; done += PIECE_BYTES) {
        int piece = (int)(bytes - done < PIECE_BYTES ? bytes - done : PIECE_BYTES);
        char *at = (char *)data + done;
        MPI_Request *request = &b->requests[b->num];
        int code = is_recv ? MPI_Irecv(at, piece, MPI_BYTE, peer, tag, b->comm, request)
                           : MPI_Isend(at, piece, MPI_BYTE, peer, tag, b->comm, request);
        if (code != MPI_SUCCESS) return failed_call(is_recv ? "MPI_Irecv" : "MPI_Isend", code);
        b->transfers[b->num++] = (transfer_t){.peer = peer, .bytes = piece, .is_recv = is_recv};
    }
    return 0;
}

/* Names every peer with a transfer that has not finished. */
static int32_t timed_out(const mpi_bootstrap_t *b, int32_t *failed_peer)
{
    char text[256];
    int32_t named = 0;
    size_t length = 0;
    for (int32_t r = 0; r < b->size && length < sizeof text - 32; r++) {
        bool waiting = false;
        for (int32_t i = 0; i < b->num && !waiting; i++)
            waiting = b->transfers[i].peer == r && b->requests[i] != MPI_REQUEST_NULL;
        if (!waiting) continue;
        if (named++ == 0) *failed_peer = r;
        length += (size_t)snprintf(text + length, sizeof text - length, "%s%d", named > 1 ? ", " : "", r);
    }
    char message[320];
    snprintf(message, sizeof message, "no answer from rank%s %s", named > 1 ? "s" : "", text);
    epmoe_set_last_error(EPMOE_ERROR_TIMEOUT, message);
    return WAIT_TIMEOUT;
}

static int32_t check_finished(const mpi_bootstrap_t *b, int done, bool has_errors, int32_t *failed_peer)
{
    for (int i = 0; i < done; i++) {
        const transfer_t *transfer = &b->transfers[b->indices[i]];
        int bytes = 0;
        *failed_peer = transfer->peer;
        if (has_errors && b->statuses[i].MPI_ERROR != MPI_SUCCESS && b->statuses[i].MPI_ERROR != MPI_ERR_PENDING)
            return failed_call(transfer->is_recv ? "receive" : "send", b->statuses[i].MPI_ERROR);
        if (!transfer->is_recv) continue;
        MPI_Get_count(&b->statuses[i], MPI_BYTE, &bytes);
        if (bytes == transfer->bytes) continue;
        char message[160];
        snprintf(message, sizeof message, "rank %d sent %d bytes where %d were due: the ranks are in different calls",
                 transfer->peer, bytes, transfer->bytes);
        epmoe_set_last_error(EPMOE_ERROR_TRANSPORT, message);
        return WAIT_FAILED;
    }
    *failed_peer = -1;
    return WAIT_DONE;
}

static int32_t wait_all(mpi_bootstrap_t *b, double timeout_s, int32_t *failed_peer)
{
    double start = now_seconds(), progress = start;
    for (int32_t left = b->num; left > 0;) {
        int done = 0;
        int code = MPI_Testsome(b->num, b->requests, &done, b->indices, b->statuses);
        if (code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS) return failed_call("MPI_Testsome", code);
        if (done == MPI_UNDEFINED) break;
        double now = now_seconds();
        if (done > 0) {
            int32_t result = check_finished(b, done, code == MPI_ERR_IN_STATUS, failed_peer);
            if (result != WAIT_DONE) return result;
            left -= done;
            progress = now;
        } else if (now - start >= timeout_s)
            return timed_out(b, failed_peer);
        else
            back_off(now - progress);
    }
    b->num = 0;
    return WAIT_DONE;
}

static int32_t gather(mpi_bootstrap_t *b, const void *send, void *recv, int64_t bytes, double timeout_s,
                      int32_t *failed_peer)
{
    if (make_room(b, 2 * num_pieces(bytes) * (b->size - 1))) return WAIT_FAILED;
    if (b->gathered_bytes < bytes * b->size) {
        free(b->gathered);
        b->gathered = malloc((size_t)(bytes * b->size));
        b->gathered_bytes = b->gathered ? bytes * b->size : 0;
        if (!b->gathered) return no_memory();
    }
    char *own = b->gathered + b->rank * bytes;
    memcpy(own, send, (size_t)bytes);
    for (int32_t i = 1; i < b->size; i++) {
        int32_t peer = (b->rank + b->size - i) % b->size;
        if (post(b, 1, peer, b->gathered + peer * bytes, bytes, TAG_GATHER)) return WAIT_FAILED;
    }
    for (int32_t i = 1; i < b->size; i++)
        if (post(b, 0, (b->rank + i) % b->size, own, bytes, TAG_GATHER)) return WAIT_FAILED;
    int32_t result = wait_all(b, timeout_s, failed_peer);
    if (result == WAIT_DONE) memcpy(recv, b->gathered, (size_t)(bytes * b->size));
    return result;
}

static int32_t mpi_all_gather(void *ctx, const void *send, void *recv, int64_t bytes, double timeout_s,
                              int32_t *failed_peer)
{
    held_t held = hold_sigpipe();
    int32_t result = gather(ctx, send, recv, bytes, timeout_s, failed_peer);
    release_sigpipe(&held);
    return result;
}

static int32_t begin(mpi_bootstrap_t *b, const epmoe_segment_t *sends, int32_t num_sends, const epmoe_segment_t *recvs,
                     int32_t num_recvs)
{
    int64_t count = 0;
    for (int32_t i = 0; i < num_sends; i++) count += num_pieces(sends[i].bytes);
    for (int32_t i = 0; i < num_recvs; i++) count += num_pieces(recvs[i].bytes);
    if (make_room(b, count)) return WAIT_FAILED;
    for (int32_t i = 0; i < num_recvs; i++)
        if (post(b, 1, recvs[i].peer, recvs[i].data, recvs[i].bytes, TAG_EXCHANGE)) return WAIT_FAILED;
    /* From the next rank on, so that not all ranks send to the same one first. */
    int32_t first = 0;
    while (first < num_sends && sends[first].peer < b->rank) first++;
    for (int32_t i = 0; i < num_sends; i++) {
        const epmoe_segment_t *segment = &sends[(first + i) % num_sends];
        if (post(b, 0, segment->peer, segment->data, segment->bytes, TAG_EXCHANGE)) return WAIT_FAILED;
    }
    return WAIT_DONE;
}

static int32_t mpi_exchange_begin(void *ctx, const epmoe_segment_t *sends, int32_t num_sends,
                                  const epmoe_segment_t *recvs, int32_t num_recvs)
{
    held_t held = hold_sigpipe();
    int32_t result = begin(ctx, sends, num_sends, recvs, num_recvs);
    release_sigpipe(&held);
    return result;
}

static int32_t mpi_exchange_finish(void *ctx, double timeout_s, int32_t *failed_peer)
{
    held_t held = hold_sigpipe();
    int32_t result = wait_all(ctx, timeout_s, failed_peer);
    release_sigpipe(&held);
    return result;
}

static void free_bootstrap(mpi_bootstrap_t *b)
{
    free(b->requests);
    free(b->statuses);
    free(b->indices);
    free(b->transfers);
    free(b->gathered);
    free(b);
}

static void keep_bootstrap(mpi_bootstrap_t *b)
{
    b->next_kept = atomic_load(&kept);
    while (!atomic_compare_exchange_weak(&kept, &b->next_kept, b)) {
    }
}

static void mpi_release(void *ctx, int32_t failed)
{
    mpi_bootstrap_t *b = ctx;
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (failed || b->num > 0) {
        keep_bootstrap(b);
        return;
    }
    held_t held = hold_sigpipe();
    if (!finalized) MPI_Comm_free(&b->comm);
    release_sigpipe(&held);
    free_bootstrap(b);
}

/* MPI_Comm_dup would wait for ever for a rank that does not come. */
static epmoe_status_t duplicate(mpi_bootstrap_t *b, MPI_Comm comm, double timeout_s)
{
    MPI_Errhandler callers;
    MPI_Comm_get_errhandler(comm, &callers);
    MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
    double start = now_seconds();
    int done = 0, code = MPI_Comm_idup(comm, &b->comm, &b->duplication);
    while (code == MPI_SUCCESS) {
        code = MPI_Test(&b->duplication, &done, MPI_STATUS_IGNORE);
        double waited = now_seconds() - start;
        if (done || waited >= timeout_s) break;
        back_off(waited);
    }
    MPI_Comm_set_errhandler(comm, callers);
    if (callers != MPI_ERRHANDLER_NULL) MPI_Errhandler_free(&callers);
    if (code != MPI_SUCCESS) {
        failed_call("MPI_Comm_idup", code);
        return EPMOE_ERROR_TRANSPORT;
    }
    if (!done) {
        char text[192];
        snprintf(text, sizeof text,
                 "communicator: rank %d of %d gave up after %.2f s: not every rank came to duplicate the communicator, "
                 "or MPI cannot reach it",
                 b->rank, b->size, timeout_s);
        return epmoe_set_last_error(EPMOE_ERROR_TIMEOUT, text);
    }
    MPI_Comm_set_errhandler(b->comm, MPI_ERRORS_RETURN);
    return EPMOE_OK;
}

static epmoe_status_t check_mpi(MPI_Comm comm)
{
    int initialized = 0, finalized = 0, is_inter = 0;
    MPI_Initialized(&initialized);
    MPI_Finalized(&finalized);
    if (!initialized || finalized)
        return epmoe_set_last_error(EPMOE_ERROR_BAD_STATE,
                                    initialized ? "MPI has been finalized" : "MPI has not been initialised");
    if (comm == MPI_COMM_NULL) return epmoe_set_last_error(EPMOE_ERROR_INVALID_ARGUMENT, "mpi_comm is MPI_COMM_NULL");
    MPI_Comm_test_inter(comm, &is_inter);
    if (is_inter)
        return epmoe_set_last_error(EPMOE_ERROR_INVALID_ARGUMENT,
                                    "mpi_comm is an inter-communicator: expected an intra-communicator");
    return EPMOE_OK;
}

epmoe_status_t epmoe_bootstrap_create_mpi(MPI_Comm mpi_comm, double timeout_s, epmoe_bootstrap_t *bootstrap)
{
    if (!bootstrap) return epmoe_set_last_error(EPMOE_ERROR_INVALID_ARGUMENT, "bootstrap is NULL");
    if (!isfinite(timeout_s) || timeout_s < 0)
        return epmoe_set_last_error(EPMOE_ERROR_INVALID_ARGUMENT, "timeout_s: expected 0 (= 30) or more seconds");
    epmoe_status_t status = check_mpi(mpi_comm);
    if (status != EPMOE_OK) return status;
    mpi_bootstrap_t *b = calloc(1, sizeof *b);
    if (!b) return epmoe_set_last_error(EPMOE_ERROR_OUT_OF_MEMORY, "no memory for the MPI bootstrap");
    int rank = 0, size = 1;
    MPI_Comm_rank(mpi_comm, &rank);
    MPI_Comm_size(mpi_comm, &size);
    b->rank = rank;
    b->size = size;
    held_t held = hold_sigpipe();
    status = duplicate(b, mpi_comm, 0.9 * (timeout_s > 0 ? timeout_s : DEFAULT_TIMEOUT_S));
    release_sigpipe(&held);
    if (status != EPMOE_OK) {
        keep_bootstrap(b);
        return status;
    }
    *bootstrap = (epmoe_bootstrap_t){
        .struct_size = sizeof *bootstrap,
        .rank = rank,
        .size = size,
        .ctx = b,
        .all_gather = mpi_all_gather,
        .exchange_begin = mpi_exchange_begin,
        .exchange_finish = mpi_exchange_finish,
        .release = mpi_release,
    };
    return EPMOE_OK;
}

epmoe_status_t epmoe_comm_create_mpi(MPI_Comm mpi_comm, const epmoe_comm_config_t *config, epmoe_comm_t **comm)
{
    if (comm) *comm = NULL;
    /* A timeout that cannot be used is for epmoe_comm_create to refuse, on all ranks. */
    double timeout_s = 0;
    if (config && config->struct_size >= offsetof(epmoe_comm_config_t, timeout_s) + sizeof config->timeout_s &&
        isfinite(config->timeout_s) && config->timeout_s > 0)
        timeout_s = config->timeout_s;
    epmoe_bootstrap_t bootstrap;
    epmoe_status_t status = epmoe_bootstrap_create_mpi(mpi_comm, timeout_s, &bootstrap);
    return status == EPMOE_OK ? epmoe_comm_create(&bootstrap, config, comm) : status;
}
