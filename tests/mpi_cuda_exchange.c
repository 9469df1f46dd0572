/* Communication of device buffers, started by test_mpi_cuda.c under mpirun:
 *   mpi_cuda_exchange cases SEED TRANSPORT...   on the CPU and over every transport: full check, same bits
 *   mpi_cuda_exchange large TRANSPORT BYTES ROUNDS
 *   mpi_cuda_exchange borrowed SEED             a borrowed NCCL communicator, with a bootstrap and without
 *   mpi_cuda_exchange stop|kill|absent TRANSPORT S MARK   rank 1 stops, dies or leaves in the middle; timeout_s is S
 * Prints "ok" per rank and exits 0, or prints the error and exits 3. MARK is for finding left-over processes. */
#include "base/device.h"
#include "comm/comm.h"
#include "tests/exchange_device.h"
#include "tests/exchange_ranks.h"

#include <cuda_runtime_api.h>
#include <epmoe/epmoe_mpi.h>
#if EPMOE_HAVE_NCCL
#include <nccl.h>
#endif
#include <stdio.h>
#include <stdlib.h>

#define CUDA EPMOE_BACKEND_CUDA

static int32_t rank, size;

/* ---------------------------------------------------------------------------------------------------------- cases */

#define MAX_COMMS 4

/* comms[0] is the CPU's. Rounds alternate between routing and reusing it. */
static void run_case(const exchange_case_t *c, epmoe_comm_t *const *comms, int32_t num_comms, int32_t rounds)
{
    epmoe_ep_t *ep[MAX_COMMS] = {0};
    epmoe_ep_config_t config = exchange_config(c, rank);
    size_t bytes = (size_t)c->tokens[rank % EXCHANGE_RANKS] * (size_t)c->hidden * (size_t)epmoe_dtype_size(c->dtype);
    char *y = malloc(2 * bytes + 1);
    exchange_expect(y != NULL, "memory");
    for (int32_t i = 0; i < num_comms; i++) exchange_must(epmoe_ep_create(comms[i], &config, &ep[i]));
    for (int32_t round = 0; round < rounds; round++)
        for (int32_t i = 0; i < num_comms; i++) {
            if (i == 0)
                exchange_expect(exchange_round(c, rank, ep[i], round % 2, y) == 0, "the CPU's dispatch or combine");
            else
                exchange_device_round(c, rank, ep[i], round % 2, y + bytes);
            char what[160];
            snprintf(what, sizeof what, "E=%d k=%d d=%d %s round %d: y over %s has other bits than on the CPU",
                     c->num_experts, c->top_k, c->hidden, epmoe_dtype_string(c->dtype), round,
                     epmoe_transport_string(epmoe_comm_transport(comms[i])));
            exchange_expect(i == 0 || !memcmp(y, y + bytes, bytes), what);
        }
    for (int32_t i = 0; i < num_comms; i++) epmoe_ep_destroy(ep[i]);
    free(y);
}

static void random_cases(epmoe_comm_t *const *comms, int32_t num_comms, uint64_t seed)
{
    testing_rng_t rng = testing_rng(seed);
    for (int32_t i = 0; i < 12; i++) {
        exchange_case_t c = exchange_random_case(&rng, i, size);
        run_case(&c, comms, num_comms, 3);
    }
}

static void coded_cases(epmoe_comm_t *const *comms, int32_t num_comms, uint64_t seed)
{
    testing_rng_t rng = testing_rng(seed);
    for (int32_t i = 0; i < 24; i++) {
        exchange_case_t c = exchange_coded_case(&rng, i, size);
        run_case(&c, comms, num_comms, 3);
    }
    /* More than a kernel for few tokens takes. */
    for (int32_t i = 0; i < 4; i++) {
        exchange_case_t c = exchange_coded_case(&rng, i, size);
        c.dtype = EPMOE_BF16;
        for (int32_t r = 0; r < EXCHANGE_RANKS; r++) c.tokens[r] = testing_range(&rng, 500, 900);
        run_case(&c, comms, num_comms, 2);
    }
}

/* Copies of experts, for few tokens and for many. */
static void placed_cases(epmoe_comm_t *const *comms, int32_t num_comms, uint64_t seed)
{
    testing_rng_t rng = testing_rng(seed + 2);
    for (int32_t i = 0; i < 16; i++) {
        exchange_case_t c = exchange_placed_case(&rng, i, size);
        run_case(&c, comms, num_comms, 3);
    }
    for (int32_t i = 0; i < 4; i++) {
        exchange_case_t c = exchange_placed_case(&rng, i, size);
        if (c.hidden > 500) c.hidden = 8 * testing_range(&rng, 1, 60);
        for (int32_t r = 0; r < EXCHANGE_RANKS; r++) c.tokens[r] = testing_range(&rng, 500, 900);
        run_case(&c, comms, num_comms, 2);
    }
    for (int32_t i = 0; i < 2; i++) {
        exchange_case_t c = exchange_identity_case(size, i ? 2880 : 96, EPMOE_BF16, seed);
        exchange_place(&rng, &c);
        run_case(&c, comms, num_comms, 2);
    }
}

/* Identity experts give x back exactly, at widths of real models and around the sizes of vectors. */
static void identity_cases(epmoe_comm_t *const *comms, int32_t num_comms, uint64_t seed)
{
    static const int32_t widths[] = {96, 1440, 2056, 2880, 3584, 6144, 7168, 1, 4, 7, 8193};
    for (size_t i = 0; i < sizeof widths / sizeof widths[0]; i++) {
        exchange_case_t c = exchange_identity_case(size, widths[i], i % 2 ? EPMOE_F32 : EPMOE_BF16, seed);
        run_case(&c, comms, num_comms, 2);
    }
}

/* No tokens on one rank, on all ranks, and ranks that nobody sends to. */
static void empty_cases(epmoe_comm_t *const *comms, int32_t num_comms, uint64_t seed)
{
    exchange_case_t c = {.size = size,
                         .num_experts = 24,
                         .top_k = 6,
                         .hidden = 320,
                         .dtype = EPMOE_BF16,
                         .tokens = {0, 4, 4, 4, 4, 4, 4, 4},
                         .seed = seed,
                         .first_id = 0,
                         .last_id = 24 / size - 1};
    run_case(&c, comms, num_comms, 20); /* all to rank 0, which has none itself */
    memset(c.tokens, 0, sizeof c.tokens);
    run_case(&c, comms, num_comms, 20);
    c.tokens[size - 1] = 5;
    run_case(&c, comms, num_comms, 3); /* one way only */
}

/* Rows of one expert beyond fp16, for few tokens and for many; another number of tokens on every rank. */
static void large_cases(epmoe_comm_t *const *comms, int32_t num_comms, uint64_t seed)
{
    testing_rng_t rng = testing_rng(seed + 3);
    for (int32_t i = 0; i < 2; i++) {
        exchange_case_t c = exchange_large_case(size, i ? 700 : 30, seed);
        run_case(&c, comms, num_comms, 2);
    }
    for (int32_t i = 0; i < 6; i++) {
        exchange_case_t c = exchange_uneven_case(&rng, i, size);
        if (i % 2 && c.num_experts <= 60) exchange_place(&rng, &c);
        if (i % 3 == 1) c.wire = EPMOE_F8_E4M3;
        run_case(&c, comms, num_comms, 2);
    }
}

static void cases(uint64_t seed, int argc, char **transports)
{
    epmoe_comm_t *comms[MAX_COMMS] = {exchange_comm(EPMOE_BACKEND_CPU, EPMOE_TRANSPORT_AUTO, 0)};
    int32_t num = 1;
    for (; num <= argc && num < MAX_COMMS; num++)
        comms[num] = exchange_comm(CUDA, exchange_transport(transports[num - 1]), 0);
    random_cases(comms, num, seed);
    coded_cases(comms, num, seed);
    placed_cases(comms, num, seed);
    identity_cases(comms, num, seed);
    empty_cases(comms, num, seed);
    large_cases(comms, num, seed);
    for (int32_t i = 0; i < num; i++) epmoe_comm_destroy(comms[i]);
}

/* ---------------------------------------------------------------------------------------------------------- large */

/* Every rank has `bytes` for every other, all at once; in odd rounds nothing for ranks at an odd distance. */
static void large(epmoe_transport_t transport, int64_t bytes, int32_t rounds)
{
    enum { HIDDEN = 7168 };
    epmoe_comm_t *comm = exchange_comm(CUDA, transport, 60);
    int32_t tokens = (int32_t)(bytes / (HIDDEN * 2)) + 1;
    epmoe_ep_t *ep = NULL;
    epmoe_ep_config_t config = EPMOE_EP_CONFIG_INIT;
    config.num_experts = size;
    config.top_k = size;
    config.hidden = HIDDEN;
    config.dtype = EPMOE_BF16;
    config.max_tokens = tokens;
    exchange_must(epmoe_ep_create(comm, &config, &ep));
    int64_t elements = (int64_t)tokens * HIDDEN;
    uint16_t *x = malloc((size_t)elements * 2);
    int32_t *ids = malloc((size_t)tokens * (size_t)size * 4);
    float *weights = malloc((size_t)tokens * (size_t)size * 4);
    exchange_expect(x && ids && weights, "memory");
    double seconds = 0;
    for (int32_t round = 0; round < rounds; round++) {
        int32_t targets = 0;
        for (int32_t r = 0; r < size; r++) targets += round % 2 == 0 || (r + rank) % 2 == 0;
        /* Small integers are exact in bf16: the sender, the token and the round in one. */
        for (int64_t i = 0; i < elements; i++)
            x[i] = epmoei_f32_to_bf16((float)((rank * 31 + i / HIDDEN * 7 + i % HIDDEN + round) % 255));
        for (int64_t t = 0; t < tokens; t++)
            for (int32_t r = 0; r < size; r++) {
                ids[t * size + r] = round % 2 == 0 || (r + rank) % 2 == 0 ? r : -1;
                weights[t * size + r] = 1;
            }
        exchange_device_t on_device = {.x = exchange_put(x, elements * 2),
                                       .ids = exchange_put(ids, (int64_t)tokens * size * 4),
                                       .weights = exchange_put(weights, (int64_t)tokens * size * 4)};
        char *y = exchange_guarded(elements * 2);
        epmoe_dispatch_args_t args = exchange_dispatch_args(&on_device, tokens);
        epmoe_dispatch_result_t rows = EPMOE_DISPATCH_RESULT_INIT;
        double start = epmoei_now_seconds();
        exchange_must(epmoe_dispatch(ep, &args, &rows, exchange_stream));
        exchange_must(epmoei_stream_wait(CUDA, exchange_stream));
        seconds += epmoei_now_seconds() - start;
        /* Experts return x: y is x times the number of ranks it went to. */
        int32_t count = -1;
        exchange_get(&count, rows.num_rows, 4);
        exchange_must(epmoe_comm_get_async_error(comm));
        int64_t num_rows = count;
        uint16_t *received = malloc((size_t)(num_rows * HIDDEN) * 2 + 1);
        exchange_expect(received != NULL, "memory");
        exchange_get(received, rows.x, num_rows * HIDDEN * 2);
        int64_t row = 0;
        for (int32_t from = 0; from < size; from++)
            for (int64_t t = 0; t < tokens && (round % 2 == 0 || (from + rank) % 2 == 0); t++, row++)
                for (int64_t c = 0; c < HIDDEN; c++)
                    exchange_expect(received[row * HIDDEN + c] ==
                                        epmoei_f32_to_bf16((float)((from * 31 + t * 7 + c + round) % 255)),
                                    "a received row's tag");
        exchange_expect(row == num_rows, "the number of rows");
        exchange_must(epmoei_memory_copy(CUDA, rows.y, rows.x, num_rows * HIDDEN * 2, exchange_stream));
        epmoe_combine_args_t combine = EPMOE_COMBINE_ARGS_INIT;
        combine.y = y;
        exchange_must(epmoe_combine(ep, &combine, exchange_stream));
        free(received);
        uint16_t *home = malloc((size_t)elements * 2);
        exchange_expect(home != NULL, "memory");
        exchange_get(home, y, elements * 2);
        for (int64_t i = 0; i < elements; i++)
            exchange_expect(home[i] == epmoei_f32_to_bf16(epmoei_bf16_to_f32(x[i]) * (float)targets), "y");
        free(home);
        exchange_guarded_free(y, elements * 2);
        exchange_device_free(&on_device);
    }
    printf("rank %d: dispatch of %.1f MB to each of %d peers in %.2f ms\n", rank, 1e-6 * (double)elements * 2, size - 1,
           1e3 * seconds / rounds);
    free(x), free(ids), free(weights);
    epmoe_ep_destroy(ep);
    epmoe_comm_destroy(comm);
}

/* ------------------------------------------------------------------------------------------------------- borrowed */

static void borrowed(uint64_t seed)
{
#if EPMOE_HAVE_NCCL
    ncclUniqueId id = {{0}};
    ncclComm_t nccl;
    exchange_expect(cudaSetDevice(rank % epmoei_device_count()) == cudaSuccess, "cudaSetDevice");
    exchange_expect(rank != 0 || ncclGetUniqueId(&id) == ncclSuccess, "ncclGetUniqueId");
    MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
    exchange_expect(ncclCommInitRank(&nccl, size, id, rank) == ncclSuccess, "ncclCommInitRank");
    epmoe_comm_t *comms[3] = {exchange_comm(EPMOE_BACKEND_CPU, EPMOE_TRANSPORT_AUTO, 0)};
    epmoe_comm_config_t config = EPMOE_COMM_CONFIG_INIT;
    config.backend = CUDA;
    config.nccl_comm = nccl;
    exchange_must(epmoe_comm_create(NULL, &config, &comms[1]));
    exchange_must(epmoe_comm_create_mpi(MPI_COMM_WORLD, &config, &comms[2]));
    for (int32_t i = 1; i < 3; i++)
        exchange_expect(epmoe_comm_transport(comms[i]) == EPMOE_TRANSPORT_NCCL && epmoe_comm_rank(comms[i]) == rank &&
                            epmoe_comm_size(comms[i]) == size,
                        "what a borrowed communicator says of itself");
    int32_t all[64], own = 100 + rank;
    exchange_must(epmoe_comm_all_gather(comms[1], &own, all, 4));
    for (int32_t r = 0; r < size; r++) exchange_expect(all[r] == 100 + r, "all_gather over NCCL");
    random_cases(comms, 3, seed);
    empty_cases(comms, 3, seed);
    for (int32_t i = 0; i < 3; i++) epmoe_comm_destroy(comms[i]);

    /* Host data over NCCL, rows over host data: an odd pair, but the same code. */
    config.transport = EPMOE_TRANSPORT_MPI;
    comms[0] = exchange_comm(EPMOE_BACKEND_CPU, EPMOE_TRANSPORT_AUTO, 0);
    exchange_must(epmoe_comm_create(NULL, &config, &comms[1]));
    random_cases(comms, 2, seed + 1);
    epmoe_comm_destroy(comms[0]);
    epmoe_comm_destroy(comms[1]);
    exchange_expect(ncclCommDestroy(nccl) == ncclSuccess, "the borrowed communicator was left alone");
#else
    (void)seed;
    exchange_expect(0, "this build has no NCCL");
#endif
}

int main(int argc, char **argv)
{
    const char *mode = argc > 1 ? argv[1] : "";
    exchange_start(&argc, &argv, &rank, &size);
    /* The stream belongs to the device that the communicator will take. */
    exchange_expect(epmoei_device_count() > 0, epmoei_device_absence());
    exchange_must(epmoei_device_set(rank % epmoei_device_count()));
    exchange_must(epmoei_stream_create(&exchange_stream));
    if (!strcmp(mode, "cases") && argc >= 4)
        cases(strtoull(argv[2], NULL, 10), argc - 3, argv + 3);
    else if (!strcmp(mode, "large") && argc == 5)
        large(exchange_transport(argv[2]), atoll(argv[3]), atoi(argv[4]));
    else if (!strcmp(mode, "borrowed") && argc == 3)
        borrowed(strtoull(argv[2], NULL, 10));
    else if (argc == 5)
        exchange_fault(mode, CUDA, exchange_transport(argv[2]), atof(argv[3]));
    else
        exchange_expect(false, "arguments");
    epmoei_stream_destroy(exchange_stream);
    MPI_Finalize();
    printf("ok %d\n", rank);
    return 0;
}
