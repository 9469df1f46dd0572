/* Bounded waits: every callback of the bootstrap is called here, so that a timeout or a transport failure is named and
 * remembered in one place. */
#include "comm/transport.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

/* Calls give up before timeout_s, so that their error is out by then. */
#define WAIT_SHARE 0.9
/* What a wait gets when those before it in the same call left nothing. */
#define WAIT_MIN_SHARE 0.02
#define SPIN_S         1e-3 /* polling without naps */
#define NAP_NS         30000

typedef struct epmoei_record {
    int32_t status;
    int32_t num_values;
    char what[32];
    char text[240];
    double values[EPMOEI_MAX_AGREED];
} record_t;

int64_t epmoei_comm_records_size(int32_t size) { return (int64_t)size * (int64_t)sizeof(record_t); }

epmoe_status_t epmoei_comm_enter(epmoe_comm_t *comm)
{
    if (comm->ops && comm->ops->check) EPMOEI_CHECK(comm->ops->check(comm));
    if (comm->failed != EPMOE_OK)
        return epmoei_fail(EPMOE_ERROR_BAD_STATE, "the communicator has failed before (%s): %s",
                           epmoe_status_string(comm->failed), comm->failed_text);
    if (comm->exchanging)
        return epmoei_fail(EPMOE_ERROR_BAD_STATE, "the communicator is between the halves of another call");
    comm->wait_left_s = WAIT_SHARE * comm->timeout_s;
    return EPMOE_OK;
}

epmoe_status_t epmoei_comm_fail(epmoe_comm_t *comm, epmoe_status_t status)
{
    if (comm->failed == EPMOE_OK) {
        comm->failed = status;
        snprintf(comm->failed_text, sizeof comm->failed_text, "%s", epmoe_last_error());
        if (comm->ops && comm->ops->stop) comm->ops->stop(comm);
    }
    return status;
}

static epmoe_status_t gave_up(epmoe_comm_t *comm, epmoe_status_t status, const char *phase, double waited,
                              const char *text)
{
    epmoei_fail(status, "%s: rank %d of %d gave up after %.2f s (timeout_s is %g): %s", phase, comm->bootstrap.rank,
                comm->bootstrap.size, waited, comm->timeout_s, text);
    return epmoei_comm_fail(comm, status);
}

static epmoe_status_t callback_failed(epmoe_comm_t *comm, const char *phase, int32_t code, int32_t peer, double waited,
                                      bool has_text)
{
    char text[384];
    if (has_text)
        snprintf(text, sizeof text, "%s", epmoe_last_error());
    else if (peer >= 0 && peer < comm->bootstrap.size)
        snprintf(text, sizeof text, "%s rank %d", code == 1 ? "no answer from" : "failure of the exchange with", peer);
    else
        snprintf(text, sizeof text, "%s", code == 1 ? "a peer did not answer" : "the transport failed");
    return gave_up(comm, code == 1 ? EPMOE_ERROR_TIMEOUT : EPMOE_ERROR_TRANSPORT, phase, waited, text);
}

static double wait_limit(const epmoe_comm_t *comm)
{
    double least = WAIT_MIN_SHARE * comm->timeout_s;
    return comm->wait_left_s > least ? comm->wait_left_s : least;
}

epmoe_status_t epmoei_poll(epmoei_ask_fn ask, void *ctx, double timeout_s)
{
    double start = epmoei_now_seconds();
    for (;;) {
        bool over = false;
        EPMOEI_CHECK(ask(ctx, &over));
        if (over) return EPMOE_OK;
        double waited = epmoei_now_seconds() - start;
        if (waited >= timeout_s) return EPMOE_ERROR_TIMEOUT;
        /* Ranks may outnumber cores. */
        if (waited < SPIN_S)
            sched_yield();
        else
            nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
    }
}

epmoe_status_t epmoei_comm_wait(epmoe_comm_t *comm, const char *phase, const char *missing, epmoei_ask_fn ask,
                                void *ctx)
{
    double start = epmoei_now_seconds();
    epmoe_status_t status = epmoei_poll(ask, ctx, wait_limit(comm));
    double waited = epmoei_now_seconds() - start;
    comm->wait_left_s -= waited;
    if (status == EPMOE_OK) return EPMOE_OK;
    if (status == EPMOE_ERROR_TIMEOUT) return gave_up(comm, status, phase, waited, missing);
    return epmoei_comm_fail(comm, epmoei_fail_context(status, "%s", phase));
}

epmoe_status_t epmoei_comm_gather(epmoe_comm_t *comm, const char *phase, const void *send, void *recv, int64_t bytes)
{
    if (comm->bootstrap.size == 1) {
        if (bytes > 0) memmove(recv, send, (size_t)bytes);
        return EPMOE_OK;
    }
    int32_t peer = -1;
    uint64_t errors = epmoei_error_count();
    double start = epmoei_now_seconds();
    int32_t code = comm->bootstrap.all_gather(comm->bootstrap.ctx, send, recv, bytes, wait_limit(comm), &peer);
    double waited = epmoei_now_seconds() - start;
    comm->wait_left_s -= waited;
    return code ? callback_failed(comm, phase, code, peer, waited, errors != epmoei_error_count()) : EPMOE_OK;
}

epmoe_status_t epmoei_comm_exchange_begin(epmoe_comm_t *comm, const char *phase, const epmoe_segment_t *sends,
                                          int32_t num_sends, const epmoe_segment_t *recvs, int32_t num_recvs)
{
    uint64_t errors = epmoei_error_count();
    comm->exchanging = true;
    int32_t code = comm->bootstrap.exchange_begin(comm->bootstrap.ctx, sends, num_sends, recvs, num_recvs);
    return code ? callback_failed(comm, phase, 2, -1, 0, errors != epmoei_error_count()) : EPMOE_OK;
}

epmoe_status_t epmoei_comm_exchange_finish(epmoe_comm_t *comm, const char *phase)
{
    int32_t peer = -1;
    uint64_t errors = epmoei_error_count();
    double start = epmoei_now_seconds();
    comm->exchanging = false;
    int32_t code = comm->bootstrap.exchange_finish(comm->bootstrap.ctx, wait_limit(comm), &peer);
    double waited = epmoei_now_seconds() - start;
    comm->wait_left_s -= waited;
    return code ? callback_failed(comm, phase, code, peer, waited, errors != epmoei_error_count()) : EPMOE_OK;
}

epmoe_status_t epmoe_comm_all_gather(epmoe_comm_t *comm, const void *send, void *recv, int64_t bytes)
{
    if (!comm) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "comm is NULL");
    EPMOEI_CHECK(epmoei_comm_enter(comm));
    if (bytes < 0) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "bytes is %lld: expected >= 0", (long long)bytes);
    if (bytes > 0 && (!send || !recv))
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s is NULL", send ? "recv" : "send");
    if (bytes == 0) return EPMOE_OK;
    return epmoei_comm_gather(comm, "all_gather", send, recv, bytes);
}

/* A number as a config shows it: whole ones without a fraction. */
static const char *number_text(char *text, size_t size, double value)
{
    if (value >= -0x1p53 && value <= 0x1p53 && value == (double)(int64_t)value)
        snprintf(text, size, "%lld", (long long)value);
    else
        snprintf(text, size, "%.9g", value);
    return text;
}

static epmoe_status_t compare_records(const epmoe_comm_t *comm, const char *what, const epmoei_agreed_t *fields,
                                      int32_t num_fields)
{
    const record_t *first = &comm->records[0];
    for (int32_t r = 1; r < comm->bootstrap.size; r++) {
        const record_t *other = &comm->records[r];
        if (strncmp(first->what, other->what, sizeof first->what) || first->num_values != other->num_values)
            return epmoei_fail(EPMOE_ERROR_MISMATCH, "rank 0 is in '%.31s' (%d values) and rank %d in '%.31s' (%d)",
                               first->what, first->num_values, r, other->what, other->num_values);
        for (int32_t i = 0; i < num_fields; i++) {
            double a = first->values[i], b = other->values[i];
            if (!fields[i].name || a == b || (a != a && b != b)) continue;
            char a_text[32], b_text[32];
            return epmoei_fail(EPMOE_ERROR_MISMATCH, "%s: %s is %s on rank 0 and %s on rank %d", what, fields[i].name,
                               number_text(a_text, sizeof a_text, a), number_text(b_text, sizeof b_text, b), r);
        }
    }
    return EPMOE_OK;
}

epmoe_status_t epmoei_comm_agree_on(epmoe_comm_t *comm, const char *what, epmoe_status_t local,
                                    const epmoei_agreed_t *fields, int32_t num_fields)
{
    EPMOEI_CHECK(epmoei_comm_enter(comm));
    record_t own = {.status = (int32_t)local, .num_values = num_fields};
    if (num_fields < 0 || num_fields > EPMOEI_MAX_AGREED) {
        own.num_values = num_fields = 0;
        own.status = EPMOE_ERROR_INTERNAL;
        local = epmoei_fail(EPMOE_ERROR_INTERNAL, "%s: more than %d values to agree on", what, EPMOEI_MAX_AGREED);
    }
    snprintf(own.what, sizeof own.what, "%s", what);
    if (local != EPMOE_OK) snprintf(own.text, sizeof own.text, "%s", epmoe_last_error());
    for (int32_t i = 0; i < num_fields; i++) own.values[i] = fields[i].value;

    EPMOEI_CHECK(epmoei_comm_gather(comm, what, &own, comm->records, (int64_t)sizeof own));
    if (local != EPMOE_OK) return local;
    for (int32_t r = 0; r < comm->bootstrap.size; r++) {
        const record_t *other = &comm->records[r];
        if (other->status != EPMOE_OK)
            return epmoei_fail(EPMOE_ERROR_PEER, "%s: rank %d failed (%s): %.239s", what, r,
                               epmoe_status_string((epmoe_status_t)other->status), other->text);
    }
    return compare_records(comm, what, fields, num_fields);
}

double epmoei_comm_agreed_value(const epmoe_comm_t *comm, int32_t rank, int32_t i)
{
    return comm->records[rank].values[i];
}

epmoe_status_t epmoe_comm_agree(epmoe_comm_t *comm, epmoe_status_t local)
{
    if (!comm) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "comm is NULL");
    return epmoei_comm_agree_on(comm, "agree", local, NULL, 0);
}
