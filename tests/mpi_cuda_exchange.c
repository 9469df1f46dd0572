/* Communication of device buffers, started by test_mpi_cuda.c under mpirun:
 *   mpi_cuda_exchange cases SEED TRANSPORT...   the same cases on the CPU and over every transport: full check, same
 * bits mpi_cuda_exchange large TRANSPORT BYTES ROUNDS mpi_cuda_exchange borrowed SEED             a borrowed NCCL
 * communicator, with a bootstrap and without mpi_cuda_exchange contract                  creation, errors, streams,
 * capture mpi_cuda_exchange auto TRANSPORT N          AUTO takes TRANSPORT, with N ranks on a device mpi_cuda_exchange
 * shared                    explicit nccl with shared devices mpi_cuda_exchange stop|kill|absent TRANSPORT S MARK rank
 * 1 stops, dies or leaves in the middle; timeout_s is S Prints "ok" per rank and exits 0, or prints the error and
 * exits 3. MARK is for finding left-over processes. */
#include "base/device.h"
#include "comm/comm.h"
#include "tests/exchange_case.h"

#include <cuda_runtime_api.h>
#include <epmoe/epmoe_mpi.h>
#if EPMOE_HAVE_NCCL
#include <nccl.h>
#endif
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <unistd.h>

#define EXIT_FAULT 3
#define GRACE_S    2
#define CUDA       EPMOE_BACKEND_CUDA

static int rank, size;
static epmoe_stream_t stream;

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
    fprintf(stderr, "rank %d: wrong: %s (last error: %s)\n", rank, what, epmoe_last_error());
    give_up();
}

/* The call failed as it must, on this rank and with these words. */
static void require_error(epmoe_status_t status, epmoe_status_t expected, const char *words, const char *what)
{
    if (status == expected && (!words || strstr(epmoe_last_error(), words))) return;
    fprintf(stderr, "rank %d: %s: %s: %s; expected %s ... %s\n", rank, what, epmoe_status_string(status),
            epmoe_last_error(), epmoe_status_string(expected), words ? words : "");
    give_up();
}

static epmoe_transport_t transport_of(const char *name)
{
    for (int32_t t = EPMOE_TRANSPORT_AUTO; t <= EPMOE_TRANSPORT_P2P; t++)
        if (!strcmp(name, epmoe_transport_string((epmoe_transport_t)t))) return (epmoe_transport_t)t;
    require_true(0, "a transport's name");
    return EPMOE_TRANSPORT_AUTO;
}

static epmoe_comm_t *create(epmoe_backend_t backend, epmoe_transport_t transport, double timeout_s)
{
    epmoe_comm_t *comm = NULL;
    epmoe_comm_config_t config = EPMOE_COMM_CONFIG_INIT;
    config.backend = backend;
    config.transport = transport;
    config.device = -1;
    config.timeout_s = timeout_s;
    require(epmoe_comm_create_mpi(MPI_COMM_WORLD, &config, &comm));
    return comm;
}

/* -------------------------------------------------------------------------------------------------- device memory */

static void *to_device(const void *data, int64_t bytes)
{
    void *copy;
    require(epmoei_memory_alloc(CUDA, &copy, bytes, "a test"));
    if (data) {
        require(epmoei_memory_copy(CUDA, copy, data, bytes, stream));
        require(epmoei_stream_wait(CUDA, stream));
    }
    return copy;
}

static void to_host(void *data, const void *device, int64_t bytes)
{
    require(epmoei_memory_copy(CUDA, data, device, bytes, stream));
    require(epmoei_stream_wait(CUDA, stream));
}

/* Between two bands of 0x5A that a kernel which writes past its rows would change. */
#define GUARD 256
static char *guarded(int64_t bytes)
{
    char *data = to_device(NULL, bytes + 2 * GUARD);
    require(epmoei_memory_set(CUDA, data, 0x5A, bytes + 2 * GUARD, stream));
    require(epmoei_memory_set(CUDA, data + GUARD, 0xFF, bytes, stream));
    return data + GUARD;
}

static void check_guards(char *data, int64_t bytes)
{
    char band[2 * GUARD];
    to_host(band, data - GUARD, GUARD);
    to_host(band + GUARD, data + bytes, GUARD);
    for (int32_t i = 0; i < 2 * GUARD; i++) require_true(band[i] == 0x5A, "something was written past y");
    epmoei_memory_free(CUDA, data - GUARD);
}

/* What one rank has on the device for a case. */
typedef struct device_inputs_t {
    void *x;
    int32_t *ids;
    float *weights;
    float *shared;
    void *residual;
} device_inputs_t;

static device_inputs_t upload(const exchange_case_t *c, const exchange_inputs_t *from)
{
    int64_t slots = (int64_t)from->num_tokens * c->top_k * 4, elements = (int64_t)from->num_tokens * c->hidden;
    int64_t bytes = elements * epmoe_dtype_size(c->dtype);
    if (from->num_tokens == 0) return (device_inputs_t){0};
    return (device_inputs_t){
        .x = to_device(from->x, bytes),
        .ids = to_device(from->ids, slots),
        .weights = to_device(from->weights, slots),
        .shared = from->shared ? to_device(from->shared, elements * 4) : NULL,
        .residual = from->residual ? to_device(from->residual, bytes) : NULL,
    };
}

static void free_device(device_inputs_t *inputs)
{
    epmoei_memory_free(CUDA, inputs->x);
    epmoei_memory_free(CUDA, inputs->ids);
    epmoei_memory_free(CUDA, inputs->weights);
    epmoei_memory_free(CUDA, inputs->shared);
    epmoei_memory_free(CUDA, inputs->residual);
}

static epmoe_dispatch_args_t dispatch_args(const device_inputs_t *on_device, int32_t num_tokens)
{
    epmoe_dispatch_args_t args = EPMOE_DISPATCH_ARGS_INIT;
    args.num_tokens = num_tokens;
    args.x = on_device->x;
    args.ids = on_device->ids;
    args.weights = on_device->weights;
    return args;
}

/* Looks at what arrived, and puts on the device what the experts make of it. */
static void run_experts(const exchange_case_t *c, epmoe_ep_t *ep, const epmoe_dispatch_result_t *rows, bool check)
{
    int32_t num_rows = -1;
    to_host(&num_rows, rows->num_rows, 4);
    require_true(num_rows == epmoei_ep_num_rows(ep) && num_rows <= rows->max_rows, "the device's count of rows");
    int64_t elements = (int64_t)num_rows * c->hidden, slots = (int64_t)num_rows * c->top_k;
    int64_t y_bytes = elements * epmoe_dtype_size(epmoe_ep_partial_dtype(ep));
    int64_t x_bytes = elements * epmoe_dtype_size(c->dtype);
    void *x = malloc((size_t)x_bytes + 1), *y = malloc((size_t)y_bytes + 1);
    int32_t *ids = malloc((size_t)slots * 4 + 1);
    float *weights = malloc((size_t)slots * 4 + 1);
    require_true(x && y && ids && weights, "memory");
    to_host(x, rows->x, x_bytes);
    to_host(ids, rows->ids, slots * 4);
    to_host(weights, rows->weights, slots * 4);
    epmoe_dispatch_result_t here = *rows;
    here.num_rows = &num_rows, here.x = x, here.ids = ids, here.weights = weights, here.y = y;
    if (check) require_true(exchange_check_rows(c, rank, &here) == 0, "the received rows");
    exchange_experts(c, rank, epmoe_ep_partial_dtype(ep), &here);
    require(epmoei_memory_copy(CUDA, rows->y, y, y_bytes, stream));
    require(epmoei_stream_wait(CUDA, stream));
    free(x), free(y), free(ids), free(weights);
}

/* One dispatch and combine on the device, checked in full; y_out gets y. */
static void round_on_device(const exchange_case_t *c, epmoe_ep_t *ep, int32_t reuse_routing, void *y_out)
{
    exchange_inputs_t inputs = exchange_inputs(c, rank);
    int64_t y_bytes = (int64_t)inputs.num_tokens * c->hidden * epmoe_dtype_size(c->dtype);
    device_inputs_t on_device = upload(c, &inputs);
    char *y = guarded(y_bytes);
    epmoe_dispatch_args_t args = dispatch_args(&on_device, inputs.num_tokens);
    args.reuse_routing = reuse_routing;
    epmoe_dispatch_result_t rows = EPMOE_DISPATCH_RESULT_INIT;
    require(epmoe_dispatch(ep, &args, &rows, stream));
    run_experts(c, ep, &rows, true);
    epmoe_combine_args_t combine = EPMOE_COMBINE_ARGS_INIT;
    combine.shared = on_device.shared;
    combine.residual = on_device.residual;
    combine.y = inputs.num_tokens ? y : NULL;
    require(epmoe_combine(ep, &combine, stream));
    to_host(y_out, y, y_bytes);
    require_true(exchange_check_output(c, rank, &inputs, y_out) == 0, "y");
    check_guards(y, y_bytes);
    free_device(&on_device);
    exchange_inputs_free(&inputs);
}

/* ---------------------------------------------------------------------------------------------------------- cases */

#define MAX_COMMS 4

/* comms[0] is the CPU's. Rounds alternate between routing and reusing it. */
static void run_case(const exchange_case_t *c, epmoe_comm_t *const *comms, int32_t num_comms, int32_t rounds)
{
    epmoe_ep_t *ep[MAX_COMMS] = {0};
    epmoe_ep_config_t config = exchange_config(c, rank);
    size_t bytes = (size_t)c->tokens[rank % 8] * (size_t)c->hidden * (size_t)epmoe_dtype_size(c->dtype);
    char *y = malloc(2 * bytes + 1);
    require_true(y != NULL, "memory");
    for (int32_t i = 0; i < num_comms; i++) require(epmoe_ep_create(comms[i], &config, &ep[i]));
    for (int32_t round = 0; round < rounds; round++)
        for (int32_t i = 0; i < num_comms; i++) {
            if (i == 0)
                require_true(exchange_round(c, rank, ep[i], round % 2, y) == 0, "the CPU's dispatch or combine");
            else
                round_on_device(c, ep[i], round % 2, y + bytes);
            char what[160];
            snprintf(what, sizeof what, "E=%d k=%d d=%d %s round %d: y over %s has other bits than on the CPU",
                     c->num_experts, c->top_k, c->hidden, epmoe_dtype_string(c->dtype), round,
                     epmoe_transport_string(epmoe_comm_transport(comms[i])));
            require_true(i == 0 || !memcmp(y, y + bytes, bytes), what);
        }
    for (int32_t i = 0; i < num_comms; i++) epmoe_ep_destroy(ep[i]);
    free(y);
}

static void random_cases(epmoe_comm_t *const *comms, int32_t num_comms, uint64_t seed)
{
    testing_rng_t rng = testing_rng(seed);
    /* 30 over 8 ranks, 128 over 6: blocks that differ; 4 and 1: ranks without an expert. */
    static const int32_t experts[] = {30, 128, 4, 1};
    static const epmoe_dtype_t dtypes[] = {EPMOE_BF16, EPMOE_F32, EPMOE_F16};
    for (int32_t i = 0; i < 12; i++) {
        exchange_case_t c = {.size = size, .num_experts = experts[i % 4], .dtype = dtypes[i % 3]};
        c.top_k = testing_range(&rng, 1, 9);
        c.hidden = i % 2 ? 8 * testing_range(&rng, 1, 300) : testing_range(&rng, 1, 2100);
        c.seed = testing_next(&rng);
        for (int32_t r = 0; r < 8; r++) c.tokens[r] = testing_range(&rng, 0, 3) ? testing_range(&rng, 1, 60) : 0;
        run_case(&c, comms, num_comms, 3);
    }
}

/* Identity experts give x back exactly, at widths of real models and around the sizes of vectors. */
static void identity_cases(epmoe_comm_t *const *comms, int32_t num_comms, uint64_t seed)
{
    static const int32_t widths[] = {96, 1440, 2056, 2880, 3584, 6144, 7168, 1, 4, 7, 8193};
    for (size_t i = 0; i < sizeof widths / sizeof widths[0]; i++) {
        const exchange_case_t c = {.size = size,
                                   .num_experts = 64,
                                   .top_k = 8,
                                   .hidden = widths[i],
                                   .dtype = i % 2 ? EPMOE_F32 : EPMOE_BF16,
                                   .tokens = {1, 0, 257, 3, 64, 0, 5, 128},
                                   .seed = seed,
                                   .identity = true,
                                   .plain = true};
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

static void cases(uint64_t seed, int argc, char **transports)
{
    epmoe_comm_t *comms[MAX_COMMS] = {create(EPMOE_BACKEND_CPU, EPMOE_TRANSPORT_AUTO, 0)};
    int32_t num = 1;
    for (; num <= argc && num < MAX_COMMS; num++) comms[num] = create(CUDA, transport_of(transports[num - 1]), 0);
    random_cases(comms, num, seed);
    identity_cases(comms, num, seed);
    empty_cases(comms, num, seed);
    for (int32_t i = 0; i < num; i++) epmoe_comm_destroy(comms[i]);
}

/* ---------------------------------------------------------------------------------------------------------- large */

/* Every rank has `bytes` for every other, all at once; in odd rounds nothing for ranks at an odd distance. */
static void large(epmoe_transport_t transport, int64_t bytes, int32_t rounds)
{
    enum { HIDDEN = 7168 };
    epmoe_comm_t *comm = create(CUDA, transport, 60);
    int32_t tokens = (int32_t)(bytes / (HIDDEN * 2)) + 1;
    epmoe_ep_t *ep = NULL;
    epmoe_ep_config_t config = EPMOE_EP_CONFIG_INIT;
    config.num_experts = size;
    config.top_k = size;
    config.hidden = HIDDEN;
    config.dtype = EPMOE_BF16;
    config.max_tokens = tokens;
    require(epmoe_ep_create(comm, &config, &ep));
    int64_t elements = (int64_t)tokens * HIDDEN;
    uint16_t *x = malloc((size_t)elements * 2);
    int32_t *ids = malloc((size_t)tokens * (size_t)size * 4);
    float *weights = malloc((size_t)tokens * (size_t)size * 4);
    require_true(x && ids && weights, "memory");
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
        device_inputs_t on_device = {.x = to_device(x, elements * 2),
                                     .ids = to_device(ids, (int64_t)tokens * size * 4),
                                     .weights = to_device(weights, (int64_t)tokens * size * 4)};
        char *y = guarded(elements * 2);
        epmoe_dispatch_args_t args = dispatch_args(&on_device, tokens);
        epmoe_dispatch_result_t rows = EPMOE_DISPATCH_RESULT_INIT;
        double start = epmoei_now_seconds();
        require(epmoe_dispatch(ep, &args, &rows, stream));
        require(epmoei_stream_wait(CUDA, stream));
        seconds += epmoei_now_seconds() - start;
        /* Experts return x: y is x times the number of ranks it went to. */
        int64_t num_rows = epmoei_ep_num_rows(ep);
        uint16_t *received = malloc((size_t)(num_rows * HIDDEN) * 2 + 1);
        require_true(received != NULL, "memory");
        to_host(received, rows.x, num_rows * HIDDEN * 2);
        int64_t row = 0;
        for (int32_t from = 0; from < size; from++)
            for (int64_t t = 0; t < tokens && (round % 2 == 0 || (from + rank) % 2 == 0); t++, row++)
                for (int64_t c = 0; c < HIDDEN; c++)
                    require_true(received[row * HIDDEN + c] ==
                                     epmoei_f32_to_bf16((float)((from * 31 + t * 7 + c + round) % 255)),
                                 "a received row's tag");
        require_true(row == num_rows, "the number of rows");
        require(epmoei_memory_copy(CUDA, rows.y, rows.x, num_rows * HIDDEN * 2, stream));
        epmoe_combine_args_t combine = EPMOE_COMBINE_ARGS_INIT;
        combine.y = y;
        require(epmoe_combine(ep, &combine, stream));
        free(received);
        uint16_t *home = malloc((size_t)elements * 2);
        require_true(home != NULL, "memory");
        to_host(home, y, elements * 2);
        for (int64_t i = 0; i < elements; i++)
            require_true(home[i] == epmoei_f32_to_bf16(epmoei_bf16_to_f32(x[i]) * (float)targets), "y");
        free(home);
        check_guards(y, elements * 2);
        free_device(&on_device);
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
    require_true(cudaSetDevice(rank % epmoei_device_count()) == cudaSuccess, "cudaSetDevice");
    require_true(rank != 0 || ncclGetUniqueId(&id) == ncclSuccess, "ncclGetUniqueId");
    MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
    require_true(ncclCommInitRank(&nccl, size, id, rank) == ncclSuccess, "ncclCommInitRank");
    epmoe_comm_t *comms[3] = {create(EPMOE_BACKEND_CPU, EPMOE_TRANSPORT_AUTO, 0)};
    epmoe_comm_config_t config = EPMOE_COMM_CONFIG_INIT;
    config.backend = CUDA;
    config.nccl_comm = nccl;
    require(epmoe_comm_create(NULL, &config, &comms[1]));
    require(epmoe_comm_create_mpi(MPI_COMM_WORLD, &config, &comms[2]));
    for (int32_t i = 1; i < 3; i++)
        require_true(epmoe_comm_transport(comms[i]) == EPMOE_TRANSPORT_NCCL && epmoe_comm_rank(comms[i]) == rank &&
                         epmoe_comm_size(comms[i]) == size,
                     "what a borrowed communicator says of itself");
    int32_t all[64], own = 100 + rank;
    require(epmoe_comm_all_gather(comms[1], &own, all, 4));
    for (int32_t r = 0; r < size; r++) require_true(all[r] == 100 + r, "all_gather over NCCL");
    random_cases(comms, 3, seed);
    empty_cases(comms, 3, seed);
    for (int32_t i = 0; i < 3; i++) epmoe_comm_destroy(comms[i]);

    /* Host data over NCCL, rows over host data: an odd pair, but the same code. */
    config.transport = EPMOE_TRANSPORT_MPI;
    comms[0] = create(EPMOE_BACKEND_CPU, EPMOE_TRANSPORT_AUTO, 0);
    require(epmoe_comm_create(NULL, &config, &comms[1]));
    random_cases(comms, 2, seed + 1);
    epmoe_comm_destroy(comms[0]);
    epmoe_comm_destroy(comms[1]);
    require_true(ncclCommDestroy(nccl) == ncclSuccess, "the borrowed communicator was left alone");
#else
    (void)seed;
    require_true(0, "this build has no NCCL");
#endif
}

/* ------------------------------------------------------------------------------------------------------- contract */

static void refused_configs(void)
{
    epmoe_comm_t *comm = (epmoe_comm_t *)&size;
    epmoe_comm_config_t config = EPMOE_COMM_CONFIG_INIT;
    config.backend = CUDA;
    config.device = -1;
    config.transport = EPMOE_TRANSPORT_P2P;
    require_error(epmoe_comm_create_mpi(MPI_COMM_WORLD, &config, &comm), EPMOE_ERROR_NOT_SUPPORTED, "p2p", "p2p");
    require_true(!comm, "no communicator");
    config.transport = EPMOE_TRANSPORT_MPI;
    config.device = rank == 1 ? 99 : -1;
    require_error(epmoe_comm_create_mpi(MPI_COMM_WORLD, &config, &comm),
                  rank == 1 ? EPMOE_ERROR_INVALID_ARGUMENT : EPMOE_ERROR_PEER, "config.device is 99",
                  "a device that is not there");
    config.device = -1;
    config.backend = rank == 1 ? EPMOE_BACKEND_CPU : EPMOE_BACKEND_AUTO;
    require_error(epmoe_comm_create_mpi(MPI_COMM_WORLD, &config, &comm), EPMOE_ERROR_MISMATCH,
                  "backend is cuda on rank 0 and cpu on rank 1", "backends that differ");
}

/* A dispatch that fails on some rank, and after it one that does not. */
static void check_usable(const exchange_case_t *c, epmoe_ep_t *ep)
{
    void *y = malloc((size_t)c->tokens[rank % 8] * (size_t)c->hidden * 4 + 1);
    require_true(y != NULL, "memory");
    round_on_device(c, ep, 0, y);
    free(y);
}

static void bad_arguments(const exchange_case_t *c, epmoe_ep_t *ep)
{
    exchange_inputs_t inputs = exchange_inputs(c, rank);
    int32_t good = inputs.ids[3];
    if (rank == 1) inputs.ids[3] = c->num_experts;
    device_inputs_t on_device = upload(c, &inputs);
    epmoe_status_t mine = rank == 1 ? EPMOE_ERROR_INVALID_ARGUMENT : EPMOE_ERROR_PEER;
    epmoe_dispatch_args_t args = dispatch_args(&on_device, inputs.num_tokens);
    epmoe_dispatch_result_t rows = EPMOE_DISPATCH_RESULT_INIT;
    require_error(epmoe_dispatch(ep, &args, &rows, stream), mine, "expected -1..", "an id that does not exist");
    check_usable(c, ep);

    const void *x = args.x;
    if (rank == 1) {
        inputs.ids[3] = good;
        require(epmoei_memory_copy(CUDA, on_device.ids, inputs.ids, (int64_t)inputs.num_tokens * c->top_k * 4, stream));
        args.x = (const char *)x + 2;
    }
    require_error(epmoe_dispatch(ep, &args, &rows, stream), mine, "aligned to 16 bytes", "an x off its alignment");
    args.x = x;
    check_usable(c, ep);

    /* A bad argument of combine is this rank's alone: the others get its rows. */
    require(epmoe_dispatch(ep, &args, &rows, stream));
    run_experts(c, ep, &rows, true);
    epmoe_combine_args_t combine = EPMOE_COMBINE_ARGS_INIT;
    char *y = guarded((int64_t)inputs.num_tokens * c->hidden * 4);
    combine.y = rank == 1 ? NULL : y;
    require_error(epmoe_combine(ep, &combine, stream), rank == 1 ? EPMOE_ERROR_INVALID_ARGUMENT : EPMOE_OK, NULL,
                  "y NULL");
    check_guards(y, (int64_t)inputs.num_tokens * c->hidden * 4);
    check_usable(c, ep);
    free_device(&on_device);
    exchange_inputs_free(&inputs);
}

static void too_small(epmoe_comm_t *comm, const exchange_case_t *c)
{
    epmoe_ep_t *ep = NULL;
    exchange_case_t all_to_last = *c;
    all_to_last.plain = true;
    all_to_last.first_id = all_to_last.last_id = c->num_experts - 1;
    epmoe_ep_config_t config = exchange_config(&all_to_last, rank);
    config.capacity = rank == size - 1 ? 3 : 0;
    require(epmoe_ep_create(comm, &config, &ep));
    exchange_inputs_t inputs = exchange_inputs(&all_to_last, rank);
    device_inputs_t on_device = upload(c, &inputs);
    epmoe_dispatch_args_t args = dispatch_args(&on_device, inputs.num_tokens);
    epmoe_dispatch_result_t rows = EPMOE_DISPATCH_RESULT_INIT;
    require_error(epmoe_dispatch(ep, &args, &rows, stream), EPMOE_ERROR_CAPACITY, "its capacity is 3", "capacity");
    epmoe_ep_destroy(ep);
    free_device(&on_device);
    exchange_inputs_free(&inputs);
}

/* During a capture dispatch and combine refuse, on all ranks, and leave stream and object as they are. */
static void capture(const exchange_case_t *c, epmoe_ep_t *ep, enum cudaStreamCaptureMode mode)
{
    exchange_inputs_t inputs = exchange_inputs(c, rank);
    device_inputs_t on_device = upload(c, &inputs);
    epmoe_dispatch_args_t args = dispatch_args(&on_device, inputs.num_tokens);
    epmoe_dispatch_result_t rows = EPMOE_DISPATCH_RESULT_INIT;
    int32_t *marker = to_device(NULL, 4), value = 0;
    cudaGraph_t graph = NULL;
    require(epmoei_memory_set(CUDA, marker, 0, 4, stream));
    require_true(cudaStreamBeginCapture(stream, mode) == cudaSuccess, "capture begins");
    require_error(epmoe_dispatch(ep, &args, &rows, stream), EPMOE_ERROR_NOT_SUPPORTED, "stream is being captured",
                  "dispatch in a capture");
    require(epmoei_memory_set(CUDA, marker, 1, 4, stream));
    require_true(cudaStreamEndCapture(stream, &graph) == cudaSuccess && graph, "the capture was left alone");
    cudaGraphExec_t executable = NULL;
    require_true(cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess &&
                     cudaGraphLaunch(executable, stream) == cudaSuccess,
                 "the graph runs");
    to_host(&value, marker, 4);
    require_true(value == 0x01010101, "the graph's work was done");
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);

    require(epmoe_dispatch(ep, &args, &rows, stream));
    run_experts(c, ep, &rows, true);
    char *y = guarded((int64_t)inputs.num_tokens * c->hidden * epmoe_dtype_size(c->dtype));
    epmoe_combine_args_t combine = EPMOE_COMBINE_ARGS_INIT;
    combine.shared = on_device.shared;
    combine.residual = on_device.residual;
    combine.y = y;
    require_true(cudaStreamBeginCapture(stream, mode) == cudaSuccess, "capture begins");
    require_error(epmoe_combine(ep, &combine, stream), EPMOE_ERROR_NOT_SUPPORTED, "stream is being captured",
                  "combine in a capture");
    require_true(cudaStreamEndCapture(stream, &graph) == cudaSuccess, "the capture was left alone");
    cudaGraphDestroy(graph);
    require(epmoe_combine(ep, &combine, stream)); /* it has not taken place before */
    void *home = malloc((size_t)inputs.num_tokens * (size_t)c->hidden * 4);
    require_true(home != NULL, "memory");
    to_host(home, y, (int64_t)inputs.num_tokens * c->hidden * epmoe_dtype_size(c->dtype));
    require_true(exchange_check_output(c, rank, &inputs, home) == 0, "y after a refused combine");
    free(home);
    check_guards(y, (int64_t)inputs.num_tokens * c->hidden * epmoe_dtype_size(c->dtype));
    epmoei_memory_free(CUDA, marker);
    free_device(&on_device);
    exchange_inputs_free(&inputs);
}

static void other_device(epmoe_comm_t *comm, epmoe_ep_t *ep)
{
    int mine = 0, count = epmoei_device_count();
    if (count < 2) return;
    cudaGetDevice(&mine);
    require(epmoei_device_set((mine + 1) % count));
    epmoe_dispatch_args_t args = EPMOE_DISPATCH_ARGS_INIT;
    epmoe_dispatch_result_t rows = EPMOE_DISPATCH_RESULT_INIT;
    require_error(epmoe_dispatch(ep, &args, &rows, NULL), EPMOE_ERROR_BAD_STATE, "current device", "another device");
    require(epmoei_device_set(mine));
    require(epmoe_comm_agree(comm, EPMOE_OK));
}

/* One rank alone plans nothing: a graph can hold it, and replays it on what the inputs are then. */
static void local(void)
{
    enum { T = 5, D = 24, K = 2 };
    epmoe_comm_t *comm = NULL;
    epmoe_ep_t *ep = NULL;
    epmoe_comm_config_t config = EPMOE_COMM_CONFIG_INIT;
    config.backend = CUDA;
    cudaGetDevice(&config.device);
    require(epmoe_comm_create(NULL, NULL, &comm));
    epmoe_comm_destroy(comm);
    require_true(epmoei_device_current_ordinal() == config.device, "a rank of its own stays on its device");
    require(epmoe_comm_create(NULL, &config, &comm));
    require_true(epmoe_comm_transport(comm) == EPMOE_TRANSPORT_LOCAL && epmoe_comm_ranks_per_device(comm) == 1,
                 "one rank");
    epmoe_ep_config_t ep_config = EPMOE_EP_CONFIG_INIT;
    ep_config.num_experts = 4, ep_config.top_k = K, ep_config.hidden = D, ep_config.max_tokens = T;
    ep_config.dtype = EPMOE_F32;
    require(epmoe_ep_create(comm, &ep_config, &ep));
    float values[T * D], home[T * D];
    int32_t ids[T * K] = {0};
    device_inputs_t on_device = {.x = to_device(NULL, sizeof values),
                                 .ids = to_device(ids, sizeof ids),
                                 .weights = to_device(NULL, sizeof ids),
                                 .residual = to_device(NULL, sizeof values)};
    float *y = to_device(NULL, sizeof values);
    epmoe_dispatch_args_t args = dispatch_args(&on_device, T);
    epmoe_dispatch_result_t rows = EPMOE_DISPATCH_RESULT_INIT;
    epmoe_combine_args_t combine = EPMOE_COMBINE_ARGS_INIT;
    combine.residual = on_device.residual;
    combine.y = y;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    require_true(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess, "capture begins");
    require(epmoe_dispatch(ep, &args, &rows, stream));
    require_true(rows.x == args.x && rows.ids == args.ids && rows.max_rows >= T, "one rank's rows are its own");
    require(epmoei_memory_copy(CUDA, rows.y, rows.x, sizeof values, stream));
    require(epmoe_combine(ep, &combine, stream));
    require_true(cudaStreamEndCapture(stream, &graph) == cudaSuccess &&
                     cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess,
                 "one rank can be captured");
    for (int32_t round = 0; round < 3; round++) {
        int32_t num_rows = -1;
        for (int32_t i = 0; i < T * D; i++) values[i] = (float)(i * (round + 1));
        require(epmoei_memory_copy(CUDA, on_device.x, values, sizeof values, stream));
        require(epmoei_memory_copy(CUDA, on_device.residual, values, sizeof values, stream));
        require_true(cudaGraphLaunch(executable, stream) == cudaSuccess, "the graph runs");
        to_host(home, y, sizeof values);
        to_host(&num_rows, rows.num_rows, 4);
        require_true(num_rows == T, "rows of one rank");
        for (int32_t i = 0; i < T * D; i++) require_true(home[i] == 2 * values[i], "y of one rank");
    }
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    epmoei_memory_free(CUDA, y);
    free_device(&on_device);
    epmoe_ep_destroy(ep);
    epmoe_comm_destroy(comm);
}

static void contract(epmoe_transport_t transport)
{
    const exchange_case_t c = {.size = size,
                               .num_experts = 10,
                               .top_k = 3,
                               .hidden = 200,
                               .dtype = EPMOE_BF16,
                               .tokens = {9, 8, 7, 6, 5, 4, 3, 2},
                               .seed = 11};
    refused_configs();
    int64_t live = epmoei_alloc_live();
    epmoe_comm_t *comm = create(CUDA, transport, 20);
    int device = -1;
    cudaGetDevice(&device);
    int devices = epmoei_device_count() < size ? epmoei_device_count() : size;
    require_true(epmoe_comm_ranks_per_device(comm) == (size + devices - 1) / devices && device == rank % devices,
                 "the devices of the ranks");
    epmoe_ep_t *ep = NULL;
    epmoe_ep_config_t config = exchange_config(&c, rank);
    require(epmoe_ep_create(comm, &config, &ep));
    check_usable(&c, ep);
    bad_arguments(&c, ep);
    too_small(comm, &c);
    capture(&c, ep, cudaStreamCaptureModeRelaxed);
    capture(&c, ep, cudaStreamCaptureModeGlobal);
    other_device(comm, ep);
    check_usable(&c, ep);
    epmoe_ep_destroy(ep);
    double start = epmoei_now_seconds();
    if (rank == 0) sleep(1);
    epmoe_comm_destroy(comm);
    require_true(epmoei_now_seconds() - start < 3, "destroying waits for a peer");
    require_true(epmoei_alloc_live() == live, "memory was not given back");
    local();
}

static void shared(void)
{
    epmoe_comm_t *comm = NULL;
    epmoe_comm_config_t config = EPMOE_COMM_CONFIG_INIT;
    config.backend = CUDA;
    config.transport = EPMOE_TRANSPORT_NCCL;
    config.device = 0;
    double start = epmoei_now_seconds();
    require_error(epmoe_comm_create_mpi(MPI_COMM_WORLD, &config, &comm), EPMOE_ERROR_NOT_SUPPORTED, "share one device",
                  "nccl with shared devices");
    require_true(!comm && epmoei_now_seconds() - start < 10, "refused at once");
}

static void expect_auto(const char *transport, int32_t ranks_per_device)
{
    epmoe_comm_t *comm = create(EPMOE_BACKEND_AUTO, EPMOE_TRANSPORT_AUTO, 0);
    printf("rank %d: %s, %d ranks on a device\n", rank, epmoe_transport_string(epmoe_comm_transport(comm)),
           epmoe_comm_ranks_per_device(comm));
    require_true(epmoe_comm_transport(comm) == transport_of(transport), "what AUTO takes");
    require_true(epmoe_comm_ranks_per_device(comm) == ranks_per_device, "ranks on a device");
    epmoe_comm_destroy(comm);
}

/* --------------------------------------------------------------------------------------------------------- faults */

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

static void fault(const char *kind, epmoe_transport_t transport, double timeout_s)
{
    /* Starting devices takes as long as it takes, and is no fault. */
    epmoe_comm_destroy(create(CUDA, transport, 0));
    epmoe_comm_t *comm = create(CUDA, transport, timeout_s);
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
    device_inputs_t on_device = upload(&c, &inputs);
    void *y = to_device(NULL, 64 * 4096 * 2);
    for (int32_t round = 0;; round++) {
        if (round == 50 && rank == 1) {
            if (!strcmp(kind, "absent")) sleep(1000);
            /* Within 20 ms, wherever it then is: computing, sending, waiting. */
            signal(SIGALRM, !strcmp(kind, "kill") ? die : stop_here);
            setitimer(ITIMER_REAL, &(struct itimerval){.it_value.tv_usec = 1 + getpid() * 7919 % 20000}, NULL);
        }
        epmoe_dispatch_args_t args = dispatch_args(&on_device, inputs.num_tokens);
        epmoe_dispatch_result_t rows = EPMOE_DISPATCH_RESULT_INIT;
        epmoe_combine_args_t combine = EPMOE_COMBINE_ARGS_INIT;
        combine.y = y;
        double start = epmoei_now_seconds();
        epmoe_status_t status = epmoe_dispatch(ep, &args, &rows, stream);
        if (status == EPMOE_OK) {
            require(epmoei_memory_set(CUDA, rows.y, 0, (int64_t)epmoei_ep_num_rows(ep) * 4096 * 2, stream));
            start = epmoei_now_seconds();
            status = epmoe_combine(ep, &combine, stream);
        }
        if (status == EPMOE_OK) continue;
        double seconds = epmoei_now_seconds() - start;
        printf("rank %d: %s after %.2f s: %s\n", rank, epmoe_status_string(status), seconds, epmoe_last_error());
        start = epmoei_now_seconds();
        int again = epmoe_dispatch(ep, &args, &rows, stream);
        epmoe_ep_destroy(ep);
        epmoe_comm_destroy(comm);
        double over = epmoei_now_seconds() - start;
        /* The device is this rank's again: nothing on the stream still waits for the peer. Only where the peer died
         * with its memory mapped here may the device have seen a fault. */
        epmoe_status_t device = epmoei_stream_wait(CUDA, stream);
        printf("rank %d: then %d, all over in %.3f s, device %s, in time %d\n", rank, again, over,
               epmoe_status_string(device),
               seconds <= timeout_s && over < 0.5 && (device == EPMOE_OK || !strcmp(kind, "kill")));
        give_up();
    }
}

int main(int argc, char **argv)
{
    const char *mode = argc > 1 ? argv[1] : "";
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    /* The test's own stream belongs to the device that the communicator will take. */
    int32_t count = epmoei_device_count();
    require_true(count > 0, epmoei_device_absence());
    require(epmoei_device_set(!strcmp(mode, "shared") ? 0 : rank % count));
    require(epmoei_stream_create(&stream));
    if (!strcmp(mode, "cases") && argc >= 4)
        cases(strtoull(argv[2], NULL, 10), argc - 3, argv + 3);
    else if (!strcmp(mode, "large") && argc == 5)
        large(transport_of(argv[2]), atoll(argv[3]), atoi(argv[4]));
    else if (!strcmp(mode, "borrowed") && argc == 3)
        borrowed(strtoull(argv[2], NULL, 10));
    else if (!strcmp(mode, "contract") && argc == 3)
        contract(transport_of(argv[2]));
    else if (!strcmp(mode, "auto") && argc == 4)
        expect_auto(argv[2], atoi(argv[3]));
    else if (!strcmp(mode, "shared"))
        shared();
    else if (argc == 5)
        fault(mode, transport_of(argv[2]), atof(argv[3]));
    else
        require_true(0, "arguments");
    epmoei_stream_destroy(stream);
    MPI_Finalize();
    printf("ok %d\n", rank);
    return 0;
}
