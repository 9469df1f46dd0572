/* Communication over MPI, started by test_mpi_comm.c under mpirun:
 *   mpi_exchange all-to-all BYTES ROUNDS   raw exchanges, checked byte by byte
 *   mpi_exchange cases SEED                dispatch and combine, checked in full; uneven SEED: only a few, with another
 *                                          number of tokens on every rank
 *   mpi_exchange contract                  creation, its errors, destruction
 *   mpi_exchange unequal                   two sides of one exchange that do not match
 *   mpi_exchange stop|kill|absent S MARK   rank 1 stops, dies or leaves in the middle; timeout_s is S
 *   mpi_exchange healthy S MARK            no rank does: the fault comes from outside
 * Prints "ok" per rank and exits 0, or prints the error and exits 3. MARK is for finding left-over processes. */
#include "comm/comm.h"
#include "tests/exchange_ranks.h"

#include <epmoe/epmoe_mpi.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static int32_t rank, size;

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
    epmoe_comm_t *comm = exchange_comm(EPMOE_BACKEND_CPU, EPMOE_TRANSPORT_AUTO, 60);
    int64_t most = bytes / 4 + size * 4;
    int32_t *out = malloc((size_t)(most * size * 4)), *in = malloc((size_t)(most * size * 4));
    epmoe_segment_t *sends = calloc((size_t)size * 3, sizeof *sends), *recvs = calloc((size_t)size * 3, sizeof *recvs);
    exchange_expect(out && in && sends && recvs, "memory");
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
        exchange_must(epmoei_comm_enter(comm));
        exchange_must(epmoei_comm_exchange_begin(comm, "all-to-all", sends, num_sends, recvs, num_recvs));
        exchange_must(epmoei_comm_exchange_finish(comm, "all-to-all"));
        seconds += epmoei_now_seconds() - start;
        for (int32_t peer = 0; peer < size; peer++) {
            int64_t count = peer == rank ? 0 : pair_words(bytes, peer, rank, round);
            for (int64_t i = 0; i < most && peer != rank; i++)
                exchange_expect(in[peer * most + i] == (i < count ? peer * 1000 + rank + round * 1000000 : -1),
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
    exchange_must(epmoe_ep_create(comm, &config, &ep));
    for (int32_t i = 0; i < rounds; i++)
        exchange_expect(exchange_round(c, rank, ep, i % 2, NULL) == 0, "a dispatch or combine");
    epmoe_ep_destroy(ep);
}

/* With one expert per token nothing is summed: y over all ranks has the bits of this rank alone, wherever a token's
 * expert lives. */
static void coded_alone(epmoe_comm_t *comm, testing_rng_t *rng, int32_t i)
{
    epmoe_comm_t *local = NULL;
    epmoe_ep_t *ep[2] = {NULL};
    exchange_case_t c = exchange_coded_case(rng, i, size);
    c.top_k = 1;
    c.plain = c.dtype == EPMOE_BF16; /* whose partial rows are rounded before anything is added */
    exchange_case_t alone = c;
    alone.size = 1;
    alone.seed += (uint64_t)rank * 7919;
    alone.tokens[0] = c.tokens[rank % EXCHANGE_RANKS];
    size_t bytes = (size_t)alone.tokens[0] * (size_t)c.hidden * (size_t)epmoe_dtype_size(c.dtype);
    char *y = malloc(2 * bytes + 1);
    exchange_expect(y != NULL, "memory");
    epmoe_ep_config_t config[2] = {exchange_config(&c, rank), exchange_config(&alone, 0)};
    exchange_must(epmoe_comm_create(NULL, NULL, &local));
    exchange_must(epmoe_ep_create(comm, &config[0], &ep[0]));
    exchange_must(epmoe_ep_create(local, &config[1], &ep[1]));
    exchange_expect(exchange_round(&c, rank, ep[0], 0, y) == 0, "a dispatch or combine in FP8");
    exchange_expect(exchange_round(&alone, 0, ep[1], 0, y + bytes) == 0, "a dispatch or combine in FP8, alone");
    exchange_expect(!memcmp(y, y + bytes, bytes), "y is the same as alone");
    for (int32_t r = 0; r < 2; r++) epmoe_ep_destroy(ep[r]);
    epmoe_comm_destroy(local);
    free(y);
}

static void cases(uint64_t seed)
{
    testing_rng_t rng = testing_rng(seed);
    epmoe_comm_t *comm = exchange_comm(EPMOE_BACKEND_CPU, EPMOE_TRANSPORT_AUTO, 0);
    for (int32_t i = 0; i < 12; i++) {
        exchange_case_t c = exchange_random_case(&rng, i, size);
        run_case(comm, &c, 3);
    }
    for (int32_t i = 0; i < 24; i++) {
        exchange_case_t c = exchange_coded_case(&rng, i, size);
        run_case(comm, &c, 2);
        coded_alone(comm, &rng, i);
    }
    for (int32_t i = 0; i < 16; i++) {
        exchange_case_t c = exchange_placed_case(&rng, i, size);
        run_case(comm, &c, 3);
    }
    static const int32_t widths[] = {96, 1440, 2880, 7168};
    for (int32_t i = 0; i < 4; i++) {
        exchange_case_t c = exchange_identity_case(size, widths[i], EPMOE_BF16, seed);
        if (i % 2) exchange_place(&rng, &c);
        run_case(comm, &c, 2);
    }
    exchange_case_t large = exchange_large_case(size, 30, seed);
    run_case(comm, &large, 2);
    epmoe_comm_destroy(comm);
}

static void uneven(uint64_t seed)
{
    testing_rng_t rng = testing_rng(seed);
    epmoe_comm_t *comm = exchange_comm(EPMOE_BACKEND_CPU, EPMOE_TRANSPORT_AUTO, 0);
    for (int32_t i = 0; i < 6; i++) {
        exchange_case_t c = exchange_uneven_case(&rng, i, size);
        if (i % 2 && c.num_experts <= 60) exchange_place(&rng, &c);
        if (i % 3 == 1) c.wire = EPMOE_F8_E4M3;
        run_case(comm, &c, 3);
    }
    epmoe_comm_destroy(comm);
}

/* ------------------------------------------------------------------------------------------------------ contract */

/* MPI's own function, between: as if every peer's socket were broken. */
static bool pipes_break;

int MPI_Isend(const void *data, int count, MPI_Datatype type, int peer, int tag, MPI_Comm comm, MPI_Request *request)
{
    if (pipes_break) raise(SIGPIPE);
    return PMPI_Isend(data, count, type, peer, tag, comm, request);
}

static bool pipe_is_pending(void)
{
    sigset_t pending;
    sigpending(&pending);
    return sigismember(&pending, SIGPIPE);
}

/* A SIGPIPE of MPI's does not end the process, which has not provided for one; a caller who holds it back still finds
 * it. */
static void broken_pipes(epmoe_comm_t *comm)
{
    sigset_t pipe, mask;
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    pipes_break = true;
    exchange_must(epmoe_comm_agree(comm, EPMOE_OK));
    pthread_sigmask(SIG_BLOCK, NULL, &mask);
    exchange_expect(!sigismember(&mask, SIGPIPE) && !pipe_is_pending(), "the signal mask is as it was");
    pthread_sigmask(SIG_BLOCK, &pipe, NULL);
    exchange_must(epmoe_comm_agree(comm, EPMOE_OK));
    pipes_break = false;
    exchange_expect(size == 1 || pipe_is_pending(), "the caller's own SIGPIPE");
    int taken = 0;
    if (pipe_is_pending()) sigwait(&pipe, &taken);
    pthread_sigmask(SIG_UNBLOCK, &pipe, NULL);
}

/* One rank's placement is another, or none. */
static void placements(epmoe_comm_t *comm)
{
    enum { EXPERTS = 50, PHYSICAL = 60, LAST = PHYSICAL - 1 };
    int32_t placement[PHYSICAL], culprit = size - 1;
    const bool is_it = rank == culprit;
    char words[64];
    epmoe_ep_t *ep = NULL;
    epmoe_ep_config_t config = EPMOE_EP_CONFIG_INIT;
    config.num_experts = EXPERTS, config.top_k = 2, config.hidden = 8, config.max_tokens = 4, config.dtype = EPMOE_F32;
    config.placement = placement, config.num_physical = PHYSICAL;
    for (int32_t p = 0; p < PHYSICAL; p++) placement[p] = p % EXPERTS;

    if (is_it) placement[LAST] = 3;
    snprintf(words, sizeof words, "placement[59] is 9 on rank 0 and 3 on rank %d", culprit);
    exchange_must_fail(epmoe_ep_create(comm, &config, &ep), EPMOE_ERROR_MISMATCH, words, "an element that differs");
    if (is_it) placement[LAST] = EXPERTS;
    exchange_must_fail(epmoe_ep_create(comm, &config, &ep), is_it ? EPMOE_ERROR_INVALID_ARGUMENT : EPMOE_ERROR_PEER,
                       "config.placement[59] is 50: expected an expert, 0..49", "an id out of range");
    placement[LAST] = 9;
    if (is_it) placement[20] = 21;
    exchange_must_fail(epmoe_ep_create(comm, &config, &ep), is_it ? EPMOE_ERROR_INVALID_ARGUMENT : EPMOE_ERROR_PEER,
                       "config.placement has 0 copies of expert 20", "an expert left out");
    placement[20] = 20;
    if (is_it) config.num_physical = LAST;
    snprintf(words, sizeof words, "num_physical is 60 on rank 0 and 59 on rank %d", culprit);
    exchange_must_fail(epmoe_ep_create(comm, &config, &ep), EPMOE_ERROR_MISMATCH, words, "another number");
    config.num_physical = EXPERTS;
    if (is_it) config.placement = NULL;
    snprintf(words, sizeof words, "placement (0 = NULL) is 1 on rank 0 and 0 on rank %d", culprit);
    exchange_must_fail(epmoe_ep_create(comm, &config, &ep), EPMOE_ERROR_MISMATCH, words, "no placement on one rank");
    exchange_expect(ep == NULL, "an object after a failure");

    /* The caller's array is read by create alone. */
    config.placement = placement, config.num_physical = PHYSICAL;
    exchange_must(epmoe_ep_create(comm, &config, &ep));
    memset(placement, 0xFF, sizeof placement);
    float x[8] = {1}, weights[2] = {0.5f, 0.25f}, y[8];
    int32_t ids[2] = {EXPERTS - 1, EXPERTS};
    int64_t load[EXPERTS] = {0};
    epmoe_dispatch_args_t args = EPMOE_DISPATCH_ARGS_INIT;
    epmoe_dispatch_result_t rows = EPMOE_DISPATCH_RESULT_INIT;
    args.num_tokens = 1, args.x = x, args.ids = ids, args.weights = weights, args.expert_load = load;
    exchange_must_fail(epmoe_dispatch(ep, &args, &rows, NULL), EPMOE_ERROR_INVALID_ARGUMENT,
                       "ids[0,1] is 50: expected -1..49", "a physical expert's id");
    if (!is_it) ids[1] = -1;
    exchange_must_fail(epmoe_dispatch(ep, &args, &rows, NULL), is_it ? EPMOE_ERROR_INVALID_ARGUMENT : EPMOE_ERROR_PEER,
                       "ids[0,1]", "a bad id on one rank");
    for (int32_t e = 0; e < EXPERTS; e++) exchange_expect(load[e] == 0, "a load after a failure");
    ids[1] = -1;
    exchange_must(epmoe_dispatch(ep, &args, &rows, NULL));
    memset(rows.y, 0, (size_t)*rows.num_rows * sizeof x);
    epmoe_combine_args_t combine = EPMOE_COMBINE_ARGS_INIT;
    combine.y = y;
    exchange_must(epmoe_combine(ep, &combine, NULL));
    for (int32_t e = 0; e < EXPERTS; e++) exchange_expect(load[e] == (e == EXPERTS - 1), "a load");
    epmoe_ep_destroy(ep);
}

static void contract(void)
{
    epmoe_comm_t *comm = (epmoe_comm_t *)&size, *second = NULL;
    epmoe_bootstrap_t bootstrap = EPMOE_BOOTSTRAP_INIT;
    exchange_expect(epmoe_comm_create_mpi(MPI_COMM_NULL, NULL, &comm) == EPMOE_ERROR_INVALID_ARGUMENT && !comm,
                    "MPI_COMM_NULL");
    exchange_expect(epmoe_bootstrap_create_mpi(MPI_COMM_WORLD, -1, &bootstrap) == EPMOE_ERROR_INVALID_ARGUMENT &&
                        epmoe_bootstrap_create_mpi(MPI_COMM_WORLD, 1, NULL) == EPMOE_ERROR_INVALID_ARGUMENT,
                    "bad arguments of the bootstrap");
    epmoe_comm_config_t config = EPMOE_COMM_CONFIG_INIT;
    config.timeout_s = rank == 1 ? 20 : 10;
    exchange_expect(epmoe_comm_create_mpi(MPI_COMM_WORLD, &config, &comm) == EPMOE_ERROR_MISMATCH && !comm,
                    "timeouts that differ");
    config.timeout_s = rank == 1 ? -3 : 10;
    exchange_expect(epmoe_comm_create_mpi(MPI_COMM_WORLD, &config, &comm) ==
                            (rank == 1 ? EPMOE_ERROR_INVALID_ARGUMENT : EPMOE_ERROR_PEER) &&
                        !comm,
                    "a bad timeout on one rank");
    config.timeout_s = 10;
    config.transport = EPMOE_TRANSPORT_NCCL;
    exchange_expect(epmoe_comm_create_mpi(MPI_COMM_WORLD, &config, &comm) == EPMOE_ERROR_NOT_SUPPORTED && !comm,
                    "nccl");

    /* Two communicators at once, over ranks in another order; destroying one waits for nobody. */
    MPI_Comm reversed;
    MPI_Comm_split(MPI_COMM_WORLD, 0, size - rank, &reversed);
    exchange_must(epmoe_comm_create_mpi(MPI_COMM_WORLD, NULL, &comm));
    exchange_must(epmoe_comm_create_mpi(reversed, NULL, &second));
    MPI_Comm_free(&reversed);
    exchange_expect(epmoe_comm_transport(comm) == EPMOE_TRANSPORT_MPI && epmoe_comm_size(comm) == size &&
                        epmoe_comm_rank(comm) == rank && epmoe_comm_rank(second) == size - 1 - rank,
                    "what the communicators say of themselves");
    char own[3] = {(char)rank, 7, (char)(rank * 2)}, all[3 * 64];
    exchange_must(epmoe_comm_all_gather(second, own, all, 3));
    for (int32_t r = 0; r < size; r++)
        exchange_expect(all[3 * r] == size - 1 - r && all[3 * r + 1] == 7 && all[3 * r + 2] == (size - 1 - r) * 2,
                        "all_gather");
    if (rank == 0) sleep(1);
    double start = epmoei_now_seconds();
    epmoe_comm_destroy(second);
    exchange_expect(epmoei_now_seconds() - start < 0.5, "destroying waits for a peer");
    exchange_must(epmoe_comm_agree(comm, EPMOE_OK));
    placements(comm);
    broken_pipes(comm);
    epmoe_comm_destroy(comm);
}

static void unequal(void)
{
    epmoe_comm_t *comm = exchange_comm(EPMOE_BACKEND_CPU, EPMOE_TRANSPORT_AUTO, 20);
    char data[4096] = {0}, more[4096];
    epmoe_segment_t send = {1 - rank, 0, data, rank == 0 ? 1000 : 2000}, recv = {1 - rank, 0, more, 1500};
    exchange_must(epmoei_comm_enter(comm));
    exchange_must(epmoei_comm_exchange_begin(comm, "unequal", &send, 1, &recv, 1));
    double start = epmoei_now_seconds();
    epmoe_status_t status = epmoei_comm_exchange_finish(comm, "unequal");
    exchange_expect(epmoei_now_seconds() - start < 5, "a mismatch is noticed at once");
    exchange_must(status);
}

int main(int argc, char **argv)
{
    const char *mode = argc > 1 ? argv[1] : "";
    epmoe_comm_t *early = NULL;
    int before = epmoe_comm_create_mpi(MPI_COMM_WORLD, NULL, &early);
    exchange_start(&argc, &argv, &rank, &size);
    exchange_expect(before == EPMOE_ERROR_BAD_STATE, "a call before MPI_Init");
    if (!strcmp(mode, "all-to-all") && argc == 4)
        all_to_all(atoll(argv[2]), atoi(argv[3]));
    else if (!strcmp(mode, "cases") && argc == 3)
        cases(strtoull(argv[2], NULL, 10));
    else if (!strcmp(mode, "uneven") && argc == 3)
        uneven(strtoull(argv[2], NULL, 10));
    else if (!strcmp(mode, "contract"))
        contract();
    else if (!strcmp(mode, "unequal"))
        unequal();
    else if (argc == 4)
        exchange_fault(mode, EPMOE_BACKEND_CPU, EPMOE_TRANSPORT_AUTO, atof(argv[2]));
    else
        exchange_expect(false, "arguments");
    MPI_Finalize();
    exchange_expect(epmoe_comm_create_mpi(MPI_COMM_WORLD, NULL, &early) == EPMOE_ERROR_BAD_STATE, "after MPI_Finalize");
    printf("ok %d\n", rank);
    return 0;
}
