/* Communication over MPI, started by test_mpi_comm.c under mpirun:
 *   mpi_exchange all-to-all BYTES ROUNDS   raw exchanges, checked byte by byte
 *   mpi_exchange cases SEED                dispatch and combine, checked in full
 *   mpi_exchange contract                  creation, its errors, destruction
 *   mpi_exchange unequal                   two sides of one exchange that do not match
 *   mpi_exchange stop|kill|absent S MARK   rank 1 stops, dies or leaves in the middle; timeout_s is S
 * Prints "ok" per rank and exits 0, or prints the error and exits 3. MARK is for finding left-over processes. */
#include "comm/comm.h"
#include "tests/exchange_case.h"

#include <epmoe/epmoe_mpi.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <unistd.h>

#define EXIT_FAULT 3
#define GRACE_S    2

static int rank, size;

/* The peers of a failed rank find out by themselves: they get the time to say so before mpirun ends them. */
static void give_up(void)
{
    fflush(NULL);
    sleep(GRACE_S);
    MPI_Abort(MPI_COMM_WORLD, EXIT_FAULT);
    exit(EXIT_FAULT);
}

static void require(epmoe_status_t status)
{
    if (status == EPMOE_OK) return;
    fprintf(stderr, "rank %d: %s: %s\n", rank, epmoe_status_string(status), epmoe_last_error());
    give_up();
}

static void require_true(int condition, const char *what)
{
    if (condition) return;
    fprintf(stderr, "rank %d: wrong: %s\n", rank, what);
    give_up();
}

static epmoe_comm_t *create(double timeout_s)
{
    epmoe_comm_t *comm = NULL;
    epmoe_comm_config_t config = EPMOE_COMM_CONFIG_INIT;
    config.timeout_s = timeout_s;
    require(epmoe_comm_create_mpi(MPI_COMM_WORLD, &config, &comm));
    return comm;
}

/* ---------------------------------------------------------------------------------------------------- all-to-all */

/* Words from one rank to another in a round: every pair another length; none between unlike ranks in odd rounds. */
static int64_t pair_words(int64_t bytes, int32_t from, int32_t to, int32_t round)
{
    return round % 2 && (from + to) % 2 ? 0 : bytes / 4 + from * 3 + to;
}

/* A pair's words as three segments, one of them empty. */
static int32_t add_pair(epmoe_segment_t *segments, int32_t num, int32_t peer, int32_t *words, int64_t count)
{
    int64_t first = count / 3;
    segments[num++] = (epmoe_segment_t){peer, 0, words, first * 4};
    segments[num++] = (epmoe_segment_t){peer, 0, words + first, 0};
    segments[num++] = (epmoe_segment_t){peer, 0, words + first, (count - first) * 4};
    return num;
}

static void all_to_all(int64_t bytes, int32_t rounds)
{
    epmoe_comm_t *comm = create(60);
    int64_t most = bytes / 4 + size * 4;
    int32_t *out = malloc((size_t)(most * size * 4)), *in = malloc((size_t)(most * size * 4));
    epmoe_segment_t *sends = calloc((size_t)size * 3, sizeof *sends), *recvs = calloc((size_t)size * 3, sizeof *recvs);
    require_true(out && in && sends && recvs, "memory");
    double seconds = 0, moved = 0;
    for (int32_t round = 0; round < rounds; round++) {
        int32_t num_sends = 0, num_recvs = 0;
        for (int32_t peer = 0; peer < size; peer++) {
            if (peer == rank) continue;
            int64_t count = pair_words(bytes, rank, peer, round);
            for (int64_t i = 0; i < count; i++) out[peer * most + i] = rank * 1000 + peer + round * 1000000;
            for (int64_t i = 0; i < most; i++) in[peer * most + i] = -1;
            num_sends = add_pair(sends, num_sends, peer, out + peer * most, count);
            num_recvs = add_pair(recvs, num_recvs, peer, in + peer * most, pair_words(bytes, peer, rank, round));
            moved += (double)count * 4;
        }
        double start = epmoei_now_seconds();
        require(epmoei_comm_enter(comm));
        require(epmoei_comm_exchange_begin(comm, "all-to-all", sends, num_sends, recvs, num_recvs));
        require(epmoei_comm_exchange_finish(comm, "all-to-all"));
        seconds += epmoei_now_seconds() - start;
        for (int32_t peer = 0; peer < size; peer++) {
            int64_t count = peer == rank ? 0 : pair_words(bytes, peer, rank, round);
            for (int64_t i = 0; i < most && peer != rank; i++)
                require_true(in[peer * most + i] == (i < count ? peer * 1000 + rank + round * 1000000 : -1),
                             "a received word");
        }
    }
    printf("rank %d sent %.1f MB/s\n", rank, 1e-6 * moved / seconds);
    free(out), free(in), free(sends), free(recvs);
    epmoe_comm_destroy(comm);
}

/* --------------------------------------------------------------------------------------------------------- cases */

static void run_case(epmoe_comm_t *comm, const exchange_case_t *c, int32_t rounds)
{
    epmoe_ep_t *ep = NULL;
    epmoe_ep_config_t config = exchange_config(c, rank);
    require(epmoe_ep_create(comm, &config, &ep));
    for (int32_t i = 0; i < rounds; i++)
        require_true(exchange_round(c, rank, ep, i % 2, NULL) == 0, "a dispatch or combine");
    epmoe_ep_destroy(ep);
}

static void cases(uint64_t seed)
{
    testing_rng_t rng = testing_rng(seed);
    epmoe_comm_t *comm = create(0);
    static const int32_t experts[] = {30, 128, 4, 1};
    static const epmoe_dtype_t dtypes[] = {EPMOE_BF16, EPMOE_F32, EPMOE_F16};
    for (int32_t i = 0; i < 12; i++) {
        exchange_case_t c = {.size = size, .num_experts = experts[i % 4], .dtype = dtypes[i % 3]};
        c.top_k = testing_range(&rng, 1, 9);
        c.hidden = testing_range(&rng, 1, 2100);
        c.seed = testing_next(&rng);
        for (int32_t r = 0; r < 8; r++) c.tokens[r] = testing_range(&rng, 0, 3) ? testing_range(&rng, 1, 60) : 0;
        run_case(comm, &c, 3);
    }
    static const int32_t widths[] = {96, 1440, 2880, 7168};
    for (int32_t i = 0; i < 4; i++) {
        const exchange_case_t c = {.size = size,
                                   .num_experts = 64,
                                   .top_k = 8,
                                   .hidden = widths[i],
                                   .dtype = EPMOE_BF16,
                                   .tokens = {1, 0, 257, 3, 64, 0, 5, 128},
                                   .seed = seed,
                                   .identity = true,
                                   .plain = true};
        run_case(comm, &c, 2);
    }
    epmoe_comm_destroy(comm);
}

/* ------------------------------------------------------------------------------------------------------ contract */

static void contract(void)
{
    epmoe_comm_t *comm = (epmoe_comm_t *)&size, *second = NULL;
    epmoe_bootstrap_t bootstrap = EPMOE_BOOTSTRAP_INIT;
    require_true(epmoe_comm_create_mpi(MPI_COMM_NULL, NULL, &comm) == EPMOE_ERROR_INVALID_ARGUMENT && !comm,
                 "MPI_COMM_NULL");
    require_true(epmoe_bootstrap_create_mpi(MPI_COMM_WORLD, -1, &bootstrap) == EPMOE_ERROR_INVALID_ARGUMENT &&
                     epmoe_bootstrap_create_mpi(MPI_COMM_WORLD, 1, NULL) == EPMOE_ERROR_INVALID_ARGUMENT,
                 "bad arguments of the bootstrap");
    epmoe_comm_config_t config = EPMOE_COMM_CONFIG_INIT;
    config.timeout_s = rank == 1 ? 20 : 10;
    require_true(epmoe_comm_create_mpi(MPI_COMM_WORLD, &config, &comm) == EPMOE_ERROR_MISMATCH && !comm,
                 "timeouts that differ");
    config.timeout_s = rank == 1 ? -3 : 10;
    require_true(epmoe_comm_create_mpi(MPI_COMM_WORLD, &config, &comm) ==
                         (rank == 1 ? EPMOE_ERROR_INVALID_ARGUMENT : EPMOE_ERROR_PEER) &&
                     !comm,
                 "a bad timeout on one rank");
    config.timeout_s = 10;
    config.transport = EPMOE_TRANSPORT_NCCL;
    require_true(epmoe_comm_create_mpi(MPI_COMM_WORLD, &config, &comm) == EPMOE_ERROR_NOT_SUPPORTED && !comm, "nccl");

    /* Two communicators at once, over ranks in another order; destroying one waits for nobody. */
    MPI_Comm reversed;
    MPI_Comm_split(MPI_COMM_WORLD, 0, size - rank, &reversed);
    require(epmoe_comm_create_mpi(MPI_COMM_WORLD, NULL, &comm));
    require(epmoe_comm_create_mpi(reversed, NULL, &second));
    MPI_Comm_free(&reversed);
    require_true(epmoe_comm_transport(comm) == EPMOE_TRANSPORT_MPI && epmoe_comm_size(comm) == size &&
                     epmoe_comm_rank(comm) == rank && epmoe_comm_rank(second) == size - 1 - rank,
                 "what the communicators say of themselves");
    char own[3] = {(char)rank, 7, (char)(rank * 2)}, all[3 * 64];
    require(epmoe_comm_all_gather(second, own, all, 3));
    for (int32_t r = 0; r < size; r++)
        require_true(all[3 * r] == size - 1 - r && all[3 * r + 1] == 7 && all[3 * r + 2] == (size - 1 - r) * 2,
                     "all_gather");
    if (rank == 0) sleep(1);
    double start = epmoei_now_seconds();
    epmoe_comm_destroy(second);
    require_true(epmoei_now_seconds() - start < 0.5, "destroying waits for a peer");
    require(epmoe_comm_agree(comm, EPMOE_OK));
    epmoe_comm_destroy(comm);
}

static void unequal(void)
{
    epmoe_comm_t *comm = create(20);
    char data[4096] = {0}, more[4096];
    epmoe_segment_t send = {1 - rank, 0, data, rank == 0 ? 1000 : 2000}, recv = {1 - rank, 0, more, 1500};
    require(epmoei_comm_enter(comm));
    require(epmoei_comm_exchange_begin(comm, "unequal", &send, 1, &recv, 1));
    double start = epmoei_now_seconds();
    epmoe_status_t status = epmoei_comm_exchange_finish(comm, "unequal");
    require_true(epmoei_now_seconds() - start < 5, "a mismatch is noticed at once");
    require(status);
}

/* -------------------------------------------------------------------------------------------------------- faults */

static void stop(int signal_number)
{
    (void)signal_number;
    raise(SIGSTOP);
}

static void die(int signal_number)
{
    (void)signal_number;
    raise(SIGKILL);
}

static void fault(const char *kind, double timeout_s)
{
    epmoe_comm_t *comm = create(timeout_s);
    const exchange_case_t c = {.size = size,
                               .num_experts = 16,
                               .top_k = 4,
                               .hidden = 4096,
                               .dtype = EPMOE_BF16,
                               .tokens = {64, 64, 64, 64, 64, 64, 64, 64},
                               .seed = 5};
    epmoe_ep_t *ep = NULL;
    epmoe_ep_config_t config = exchange_config(&c, rank);
    require(epmoe_ep_create(comm, &config, &ep));
    exchange_inputs_t inputs = exchange_inputs(&c, rank);
    void *y = malloc((size_t)(64 * 4096 * 2));
    require_true(y != NULL, "memory");
    for (int32_t round = 0;; round++) {
        if (round == 50 && rank == 1) {
            if (!strcmp(kind, "absent")) sleep(1000);
            /* Within 20 ms, wherever it then is: computing, sending, waiting. */
            signal(SIGALRM, !strcmp(kind, "kill") ? die : stop);
            setitimer(ITIMER_REAL, &(struct itimerval){.it_value.tv_usec = 1 + getpid() * 7919 % 20000}, NULL);
        }
        epmoe_dispatch_args_t args = EPMOE_DISPATCH_ARGS_INIT;
        epmoe_dispatch_result_t rows = EPMOE_DISPATCH_RESULT_INIT;
        epmoe_combine_args_t combine = EPMOE_COMBINE_ARGS_INIT;
        args.num_tokens = 64, args.x = inputs.x, args.ids = inputs.ids, args.weights = inputs.weights;
        combine.y = y;
        double start = epmoei_now_seconds();
        epmoe_status_t status = epmoe_dispatch(ep, &args, &rows, NULL);
        if (status == EPMOE_OK) {
            exchange_experts(&c, rank, epmoe_ep_partial_dtype(ep), &rows);
            start = epmoei_now_seconds();
            status = epmoe_combine(ep, &combine, NULL);
        }
        if (status == EPMOE_OK) continue;
        double seconds = epmoei_now_seconds() - start;
        printf("rank %d: %s after %.2f s: %s\n", rank, epmoe_status_string(status), seconds, epmoe_last_error());
        start = epmoei_now_seconds();
        int again = epmoe_dispatch(ep, &args, &rows, NULL);
        epmoe_ep_destroy(ep);
        epmoe_comm_destroy(comm);
        printf("rank %d: then %d, all over in %.3f s, in time %d\n", rank, again, epmoei_now_seconds() - start,
               seconds <= timeout_s);
        exchange_inputs_free(&inputs);
        free(y);
        give_up();
    }
}

int main(int argc, char **argv)
{
    const char *mode = argc > 1 ? argv[1] : "";
    epmoe_comm_t *early = NULL;
    int before = epmoe_comm_create_mpi(MPI_COMM_WORLD, NULL, &early);
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    require_true(before == EPMOE_ERROR_BAD_STATE, "a call before MPI_Init");
    if (!strcmp(mode, "all-to-all") && argc == 4)
        all_to_all(atoll(argv[2]), atoi(argv[3]));
    else if (!strcmp(mode, "cases") && argc == 3)
        cases(strtoull(argv[2], NULL, 10));
    else if (!strcmp(mode, "contract"))
        contract();
    else if (!strcmp(mode, "unequal"))
        unequal();
    else if (argc == 4)
        fault(mode, atof(argv[2]));
    else
        require_true(0, "arguments");
    MPI_Finalize();
    require_true(epmoe_comm_create_mpi(MPI_COMM_WORLD, NULL, &early) == EPMOE_ERROR_BAD_STATE, "after MPI_Finalize");
    printf("ok %d\n", rank);
    return 0;
}
