#include "tests/exchange_ranks.h"

#include "base/device.h"
#include "comm/comm.h"
#include "tests/exchange_device.h"

#include <epmoe/epmoe_mpi.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <unistd.h>

#define EXIT_FAULT 3
#define GRACE_S    2

static int32_t own_rank, num_ranks;

void exchange_start(int *argc, char ***argv, int32_t *rank, int32_t *size)
{
    MPI_Init(argc, argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &own_rank);
    MPI_Comm_size(MPI_COMM_WORLD, &num_ranks);
    *rank = own_rank;
    *size = num_ranks;
}

/* The peers of a failed rank find out by themselves: they get the time to say so before mpirun ends them. */
static void give_up(void)
{
    fflush(NULL);
    sleep(GRACE_S);
    MPI_Abort(MPI_COMM_WORLD, EXIT_FAULT);
    exit(EXIT_FAULT);
}

void exchange_must(epmoe_status_t status)
{
    if (status == EPMOE_OK) return;
    fprintf(stderr, "rank %d: %s: %s\n", own_rank, epmoe_status_string(status), epmoe_last_error());
    give_up();
}

void exchange_expect(bool condition, const char *what)
{
    if (condition) return;
    fprintf(stderr, "rank %d: wrong: %s (last error: %s)\n", own_rank, what, epmoe_last_error());
    give_up();
}

void exchange_must_fail(epmoe_status_t status, epmoe_status_t expected, const char *words, const char *what)
{
    if (status == expected && (!words || strstr(epmoe_last_error(), words))) return;
    fprintf(stderr, "rank %d: %s: %s: %s; expected %s ... %s\n", own_rank, what, epmoe_status_string(status),
            epmoe_last_error(), epmoe_status_string(expected), words ? words : "");
    give_up();
}

epmoe_transport_t exchange_transport(const char *name)
{
    for (int32_t t = EPMOE_TRANSPORT_AUTO; t <= EPMOE_TRANSPORT_P2P; t++)
        if (!strcmp(name, epmoe_transport_string((epmoe_transport_t)t))) return (epmoe_transport_t)t;
    exchange_expect(false, "a transport's name");
    return EPMOE_TRANSPORT_AUTO;
}

epmoe_comm_t *exchange_comm(epmoe_backend_t backend, epmoe_transport_t transport, double timeout_s)
{
    epmoe_comm_t *comm = NULL;
    epmoe_comm_config_t config = EPMOE_COMM_CONFIG_INIT;
    config.backend = backend;
    config.transport = transport;
    config.timeout_s = timeout_s;
    exchange_must(epmoe_comm_create_mpi(MPI_COMM_WORLD, &config, &comm));
    return comm;
}

static void stop_here(int signal_number)
{
    (void)signal_number;
    raise(SIGSTOP);
}

static void die(int signal_number)
{
    (void)signal_number;
    raise(SIGKILL);
}

static void fail_soon(const char *kind)
{
    if (!strcmp(kind, "healthy")) return;
    if (!strcmp(kind, "absent")) sleep(1000);
    /* Within 20 ms, wherever it then is: computing, sending, waiting. */
    signal(SIGALRM, !strcmp(kind, "kill") ? die : stop_here);
    setitimer(ITIMER_REAL, &(struct itimerval){.it_value.tv_usec = 1 + getpid() * 7919 % 20000}, NULL);
}

void exchange_fault(const char *kind, epmoe_backend_t backend, epmoe_transport_t transport, double timeout_s)
{
    enum { HIDDEN = 4096, TOKENS = 64 };
    bool cuda = backend == EPMOE_BACKEND_CUDA;
    /* Starting devices takes as long as it takes, and is no fault. */
    if (cuda) epmoe_comm_destroy(exchange_comm(backend, transport, 0));
    epmoe_comm_t *comm = exchange_comm(backend, transport, timeout_s);
    const exchange_case_t c = {.size = num_ranks,
                               .num_experts = 16,
                               .top_k = 4,
                               .hidden = HIDDEN,
                               .dtype = EPMOE_BF16,
                               .tokens = {TOKENS, TOKENS, TOKENS, TOKENS, TOKENS, TOKENS, TOKENS, TOKENS},
                               .seed = 5};
    epmoe_ep_t *ep = NULL;
    epmoe_ep_config_t config = exchange_config(&c, own_rank);
    exchange_must(epmoe_ep_create(comm, &config, &ep));
    exchange_inputs_t inputs = exchange_inputs(&c, own_rank);
    exchange_device_t memory = {.x = inputs.x, .ids = inputs.ids, .weights = inputs.weights};
    if (cuda) memory = exchange_upload(&c, &inputs);
    epmoe_combine_args_t combine = EPMOE_COMBINE_ARGS_INIT;
    exchange_must(epmoei_memory_alloc(backend, &combine.y, TOKENS * HIDDEN * 2, "y"));
    for (int32_t round = 0;; round++) {
        if (round == 50 && own_rank == 1) fail_soon(kind);
        epmoe_dispatch_args_t args = exchange_dispatch_args(&memory, inputs.num_tokens);
        epmoe_dispatch_result_t rows = EPMOE_DISPATCH_RESULT_INIT;
        double start = epmoei_now_seconds();
        epmoe_status_t status = epmoe_dispatch(ep, &args, &rows, exchange_stream);
        if (status == EPMOE_OK) {
            int64_t bytes = (int64_t)epmoei_ep_num_rows(ep) * HIDDEN * 2;
            status = epmoei_memory_set(backend, rows.y, 0, bytes, exchange_stream);
        }
        if (status == EPMOE_OK) {
            if (!epmoei_ep_counts_on_device(ep)) start = epmoei_now_seconds();
            status = epmoe_combine(ep, &combine, exchange_stream);
        }
        /* Where calls only enqueue, the device finds out who is missing. */
        if (status == EPMOE_OK && epmoei_ep_counts_on_device(ep)) {
            status = epmoei_stream_wait(backend, exchange_stream);
            epmoe_status_t found = epmoe_comm_get_async_error(comm);
            if (found != EPMOE_OK) status = found;
        }
        if (status == EPMOE_OK) continue;
        double seconds = epmoei_now_seconds() - start;
        printf("rank %d: %s after %.2f s: %s\n", own_rank, epmoe_status_string(status), seconds, epmoe_last_error());
        start = epmoei_now_seconds();
        int again = epmoe_dispatch(ep, &args, &rows, exchange_stream);
        epmoe_ep_destroy(ep);
        epmoe_comm_destroy(comm);
        double over = epmoei_now_seconds() - start;
        /* The device is this rank's again: nothing on the stream still waits for the peer. Only where the peer died
         * with its memory mapped here may the device have seen a fault. */
        epmoe_status_t device = epmoei_stream_wait(backend, exchange_stream);
        printf("rank %d: then %d, all over in %.3f s, device %s, in time %d\n", own_rank, again, over,
               epmoe_status_string(device),
               seconds <= timeout_s && over < 0.5 && (device == EPMOE_OK || !strcmp(kind, "kill")));
        give_up();
    }
}
