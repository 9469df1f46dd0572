/* What communicators and exchanges on devices promise and refuse, started by test_mpi_cuda.c under mpirun:
 *   mpi_cuda_contract calls TRANSPORT     creation, errors, streams, capture
 *   mpi_cuda_contract auto TRANSPORT N    AUTO takes TRANSPORT, with N ranks on a device
 *   mpi_cuda_contract shared              explicit nccl with shared devices
 *   mpi_cuda_contract refused TRANSPORT   AUTO takes TRANSPORT where the last rank cannot use p2p
 * Prints "ok" per rank and exits 0, or prints the error and exits 3. */
#include "base/device.h"
#include "comm/comm.h"
#include "tests/exchange_device.h"
#include "tests/exchange_ranks.h"

#include <cuda_runtime_api.h>
#include <epmoe/epmoe_mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define CUDA EPMOE_BACKEND_CUDA
/* What a device that other programs use needs to start or to end; a wait for a peer that never comes takes longer. */
#define LONG_S 15

static int32_t rank, size;

static void refused_configs(void)
{
    epmoe_comm_t *comm = (epmoe_comm_t *)&size;
    epmoe_comm_config_t config = EPMOE_COMM_CONFIG_INIT;
    config.backend = CUDA;
    config.device = -1;
    config.transport = EPMOE_TRANSPORT_MPI;
    config.device = rank == 1 ? 99 : -1;
    exchange_must_fail(epmoe_comm_create_mpi(MPI_COMM_WORLD, &config, &comm),
                       rank == 1 ? EPMOE_ERROR_INVALID_ARGUMENT : EPMOE_ERROR_PEER, "config.device is 99",
                       "a device that is not there");
    exchange_expect(!comm, "no communicator");
    config.device = -1;
    config.backend = rank == 1 ? EPMOE_BACKEND_CPU : EPMOE_BACKEND_AUTO;
    exchange_must_fail(epmoe_comm_create_mpi(MPI_COMM_WORLD, &config, &comm), EPMOE_ERROR_MISMATCH,
                       "backend is cuda on rank 0 and cpu on rank 1", "backends that differ");
}

/* A dispatch that fails on some rank, and after it one that does not. */
static void check_usable(const exchange_case_t *c, epmoe_ep_t *ep)
{
    void *y = malloc((size_t)c->tokens[rank % EXCHANGE_RANKS] * (size_t)c->hidden * 4 + 1);
    exchange_expect(y != NULL, "memory");
    exchange_device_round(c, rank, ep, 0, y);
    free(y);
}

static void bad_arguments(const exchange_case_t *c, epmoe_ep_t *ep)
{
    exchange_inputs_t inputs = exchange_inputs(c, rank);
    int32_t good = inputs.ids[3];
    if (rank == 1) inputs.ids[3] = c->num_experts;
    exchange_device_t on_device = exchange_upload(c, &inputs);
    epmoe_status_t mine = rank == 1 ? EPMOE_ERROR_INVALID_ARGUMENT : EPMOE_ERROR_PEER;
    epmoe_dispatch_args_t args = exchange_dispatch_args(&on_device, inputs.num_tokens);
    epmoe_dispatch_result_t rows = EPMOE_DISPATCH_RESULT_INIT;
    exchange_must_fail(epmoe_dispatch(ep, &args, &rows, exchange_stream), mine, "expected -1..",
                       "an id that does not exist");
    check_usable(c, ep);

    const void *x = args.x;
    if (rank == 1) {
        inputs.ids[3] = good;
        exchange_must(epmoei_memory_copy(CUDA, on_device.ids, inputs.ids, (int64_t)inputs.num_tokens * c->top_k * 4,
                                         exchange_stream));
        args.x = (const char *)x + 2;
    }
    exchange_must_fail(epmoe_dispatch(ep, &args, &rows, exchange_stream), mine, "aligned to 16 bytes",
                       "an x off its alignment");
    args.x = x;
    check_usable(c, ep);

    /* A bad argument of combine is this rank's alone: the others get its rows. */
    exchange_must(epmoe_dispatch(ep, &args, &rows, exchange_stream));
    exchange_device_experts(c, rank, ep, &rows);
    epmoe_combine_args_t combine = EPMOE_COMBINE_ARGS_INIT;
    char *y = exchange_guarded((int64_t)inputs.num_tokens * c->hidden * 4);
    combine.y = rank == 1 ? NULL : y;
    exchange_must_fail(epmoe_combine(ep, &combine, exchange_stream),
                       rank == 1 ? EPMOE_ERROR_INVALID_ARGUMENT : EPMOE_OK, NULL, "y NULL");
    exchange_guarded_free(y, (int64_t)inputs.num_tokens * c->hidden * 4);
    check_usable(c, ep);
    exchange_device_free(&on_device);
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
    exchange_must(epmoe_ep_create(comm, &config, &ep));
    exchange_inputs_t inputs = exchange_inputs(&all_to_last, rank);
    exchange_device_t on_device = exchange_upload(c, &inputs);
    epmoe_dispatch_args_t args = exchange_dispatch_args(&on_device, inputs.num_tokens);
    epmoe_dispatch_result_t rows = EPMOE_DISPATCH_RESULT_INIT;
    exchange_must_fail(epmoe_dispatch(ep, &args, &rows, exchange_stream), EPMOE_ERROR_CAPACITY, "its capacity is 3",
                       "capacity");
    epmoe_ep_destroy(ep);
    exchange_device_free(&on_device);
    exchange_inputs_free(&inputs);
}

/* During a capture dispatch and combine refuse, on all ranks, and leave stream and object as they are. */
static void capture(const exchange_case_t *c, epmoe_ep_t *ep, enum cudaStreamCaptureMode mode)
{
    exchange_inputs_t inputs = exchange_inputs(c, rank);
    exchange_device_t on_device = exchange_upload(c, &inputs);
    epmoe_dispatch_args_t args = exchange_dispatch_args(&on_device, inputs.num_tokens);
    epmoe_dispatch_result_t rows = EPMOE_DISPATCH_RESULT_INIT;
    int32_t *marker = exchange_put(NULL, 4), value = 0;
    cudaGraph_t graph = NULL;
    exchange_must(epmoei_memory_set(CUDA, marker, 0, 4, exchange_stream));
    exchange_expect(cudaStreamBeginCapture(exchange_stream, mode) == cudaSuccess, "capture begins");
    exchange_must_fail(epmoe_dispatch(ep, &args, &rows, exchange_stream), EPMOE_ERROR_NOT_SUPPORTED,
                       "stream is being captured", "dispatch in a capture");
    exchange_must(epmoei_memory_set(CUDA, marker, 1, 4, exchange_stream));
    exchange_expect(cudaStreamEndCapture(exchange_stream, &graph) == cudaSuccess && graph,
                    "the capture was left alone");
    cudaGraphExec_t executable = NULL;
    exchange_expect(cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess &&
                        cudaGraphLaunch(executable, exchange_stream) == cudaSuccess,
                    "the graph runs");
    exchange_get(&value, marker, 4);
    exchange_expect(value == 0x01010101, "the graph's work was done");
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);

    exchange_must(epmoe_dispatch(ep, &args, &rows, exchange_stream));
    exchange_device_experts(c, rank, ep, &rows);
    char *y = exchange_guarded((int64_t)inputs.num_tokens * c->hidden * epmoe_dtype_size(c->dtype));
    epmoe_combine_args_t combine = EPMOE_COMBINE_ARGS_INIT;
    combine.shared = on_device.shared;
    combine.residual = on_device.residual;
    combine.y = y;
    exchange_expect(cudaStreamBeginCapture(exchange_stream, mode) == cudaSuccess, "capture begins");
    exchange_must_fail(epmoe_combine(ep, &combine, exchange_stream), EPMOE_ERROR_NOT_SUPPORTED,
                       "stream is being captured", "combine in a capture");
    exchange_expect(cudaStreamEndCapture(exchange_stream, &graph) == cudaSuccess, "the capture was left alone");
    cudaGraphDestroy(graph);
    exchange_must(epmoe_combine(ep, &combine, exchange_stream)); /* it has not taken place before */
    void *home = malloc((size_t)inputs.num_tokens * (size_t)c->hidden * 4);
    exchange_expect(home != NULL, "memory");
    exchange_get(home, y, (int64_t)inputs.num_tokens * c->hidden * epmoe_dtype_size(c->dtype));
    exchange_expect(exchange_check_output(c, rank, &inputs, home) == 0, "y after a refused combine");
    free(home);
    exchange_guarded_free(y, (int64_t)inputs.num_tokens * c->hidden * epmoe_dtype_size(c->dtype));
    epmoei_memory_free(CUDA, marker);
    exchange_device_free(&on_device);
    exchange_inputs_free(&inputs);
}

static void other_device(epmoe_comm_t *comm, epmoe_ep_t *ep)
{
    int mine = 0, count = epmoei_device_count();
    if (count < 2) return;
    cudaGetDevice(&mine);
    exchange_must(epmoei_device_set((mine + 1) % count));
    epmoe_dispatch_args_t args = EPMOE_DISPATCH_ARGS_INIT;
    epmoe_dispatch_result_t rows = EPMOE_DISPATCH_RESULT_INIT;
    exchange_must_fail(epmoe_dispatch(ep, &args, &rows, NULL), EPMOE_ERROR_BAD_STATE, "current device",
                       "another device");
    exchange_must(epmoei_device_set(mine));
    exchange_must(epmoe_comm_agree(comm, EPMOE_OK));
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
    exchange_must(epmoe_comm_create(NULL, NULL, &comm));
    epmoe_comm_destroy(comm);
    exchange_expect(epmoei_device_current_ordinal() == config.device, "a rank of its own stays on its device");
    exchange_must(epmoe_comm_create(NULL, &config, &comm));
    exchange_expect(epmoe_comm_transport(comm) == EPMOE_TRANSPORT_LOCAL && epmoe_comm_ranks_per_device(comm) == 1,
                    "one rank");
    epmoe_ep_config_t ep_config = EPMOE_EP_CONFIG_INIT;
    ep_config.num_experts = 4, ep_config.top_k = K, ep_config.hidden = D, ep_config.max_tokens = T;
    ep_config.dtype = EPMOE_F32;
    exchange_must(epmoe_ep_create(comm, &ep_config, &ep));
    float values[T * D], home[T * D];
    int32_t ids[T * K] = {0};
    exchange_device_t on_device = {.x = exchange_put(NULL, sizeof values),
                                   .ids = exchange_put(ids, sizeof ids),
                                   .weights = exchange_put(NULL, sizeof ids),
                                   .residual = exchange_put(NULL, sizeof values)};
    float *y = exchange_put(NULL, sizeof values);
    epmoe_dispatch_args_t args = exchange_dispatch_args(&on_device, T);
    epmoe_dispatch_result_t rows = EPMOE_DISPATCH_RESULT_INIT;
    epmoe_combine_args_t combine = EPMOE_COMBINE_ARGS_INIT;
    combine.residual = on_device.residual;
    combine.y = y;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    exchange_expect(cudaStreamBeginCapture(exchange_stream, cudaStreamCaptureModeGlobal) == cudaSuccess,
                    "capture begins");
    exchange_must(epmoe_dispatch(ep, &args, &rows, exchange_stream));
    exchange_expect(rows.x == args.x && rows.ids == args.ids && rows.max_rows >= T, "one rank's rows are its own");
    exchange_must(epmoei_memory_copy(CUDA, rows.y, rows.x, sizeof values, exchange_stream));
    exchange_must(epmoe_combine(ep, &combine, exchange_stream));
    exchange_expect(cudaStreamEndCapture(exchange_stream, &graph) == cudaSuccess &&
                        cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess,
                    "one rank can be captured");
    for (int32_t round = 0; round < 3; round++) {
        int32_t num_rows = -1;
        for (int32_t i = 0; i < T * D; i++) values[i] = (float)(i * (round + 1));
        exchange_must(epmoei_memory_copy(CUDA, on_device.x, values, sizeof values, exchange_stream));
        exchange_must(epmoei_memory_copy(CUDA, on_device.residual, values, sizeof values, exchange_stream));
        exchange_expect(cudaGraphLaunch(executable, exchange_stream) == cudaSuccess, "the graph runs");
        exchange_get(home, y, sizeof values);
        exchange_get(&num_rows, rows.num_rows, 4);
        exchange_expect(num_rows == T, "rows of one rank");
        for (int32_t i = 0; i < T * D; i++) exchange_expect(home[i] == 2 * values[i], "y of one rank");
    }
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    epmoei_memory_free(CUDA, y);
    exchange_device_free(&on_device);
    epmoe_ep_destroy(ep);
    epmoe_comm_destroy(comm);
}

static void calls(epmoe_transport_t transport)
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
    epmoe_comm_t *comm = exchange_comm(CUDA, transport, 20);
    int device = -1;
    cudaGetDevice(&device);
    int devices = epmoei_device_count() < size ? epmoei_device_count() : size;
    exchange_expect(epmoe_comm_ranks_per_device(comm) == (size + devices - 1) / devices && device == rank % devices,
                    "the devices of the ranks");
    epmoe_ep_t *ep = NULL;
    epmoe_ep_config_t config = exchange_config(&c, rank);
    exchange_must(epmoe_ep_create(comm, &config, &ep));
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
    exchange_expect(epmoei_now_seconds() - start < LONG_S, "destroying waits for a peer until the timeout");
    exchange_expect(epmoei_alloc_live() == live, "memory was not given back");
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
    exchange_must_fail(epmoe_comm_create_mpi(MPI_COMM_WORLD, &config, &comm), EPMOE_ERROR_NOT_SUPPORTED,
                       "share one device", "nccl with shared devices");
    exchange_expect(!comm && epmoei_now_seconds() - start < LONG_S, "refused at once");
}

/* Instead of the runtime's and the C library's own, by the linker: what the last rank gets. */
static bool mapping_fails, host_is_another;

cudaError_t __real_cudaIpcOpenMemHandle(void **pointer, cudaIpcMemHandle_t handle, unsigned int flags);
cudaError_t __wrap_cudaIpcOpenMemHandle(void **pointer, cudaIpcMemHandle_t handle, unsigned int flags);
cudaError_t __wrap_cudaIpcOpenMemHandle(void **pointer, cudaIpcMemHandle_t handle, unsigned int flags)
{
    return mapping_fails ? cudaErrorInvalidValue : __real_cudaIpcOpenMemHandle(pointer, handle, flags);
}

int __real_gethostname(char *name, size_t bytes);
int __wrap_gethostname(char *name, size_t bytes);
int __wrap_gethostname(char *name, size_t bytes)
{
    if (!host_is_another) return __real_gethostname(name, bytes);
    snprintf(name, bytes, "another");
    return 0;
}

static void expect_refusal(const epmoe_comm_config_t *config, epmoe_status_t status, const char *words)
{
    epmoe_comm_t *comm = (epmoe_comm_t *)&size;
    double start = epmoei_now_seconds();
    exchange_must_fail(epmoe_comm_create_mpi(MPI_COMM_WORLD, config, &comm), status, words, "p2p refused");
    exchange_expect(!comm && epmoei_now_seconds() - start < LONG_S, "refused at once");
}

/* By name p2p is an error of all ranks, also of those that asked for AUTO; when all did, all take the next, which
 * works. */
static void refused(const char *transport)
{
    const exchange_case_t c = {.size = size,
                               .num_experts = 10,
                               .top_k = 3,
                               .hidden = 200,
                               .dtype = EPMOE_BF16,
                               .tokens = {9, 8, 7, 6, 5, 4, 3, 2},
                               .seed = 11};
    const bool is_it = rank == size - 1;
    int64_t live = epmoei_alloc_live();
    epmoe_comm_config_t config = EPMOE_COMM_CONFIG_INIT;
    config.backend = CUDA;
    config.timeout_s = 20;
    for (int32_t i = 0; i < 2; i++) {
        mapping_fails = is_it && i == 0;
        host_is_another = is_it && i == 1;
        config.transport = EPMOE_TRANSPORT_P2P;
        if (i == 0) {
            epmoe_status_t status = is_it ? EPMOE_ERROR_NOT_SUPPORTED : EPMOE_ERROR_PEER;
            expect_refusal(&config, status, "cannot be mapped");
            config.transport = rank == 0 ? EPMOE_TRANSPORT_P2P : EPMOE_TRANSPORT_AUTO;
            expect_refusal(&config, status, "cannot be mapped");
        } else
            expect_refusal(&config, EPMOE_ERROR_NOT_SUPPORTED, "expected one host");
        epmoe_comm_t *comm = exchange_comm(CUDA, EPMOE_TRANSPORT_AUTO, 20);
        exchange_expect(epmoe_comm_transport(comm) == exchange_transport(transport), "what AUTO takes");
        epmoe_ep_t *ep = NULL;
        epmoe_ep_config_t ep_config = exchange_config(&c, rank);
        exchange_must(epmoe_ep_create(comm, &ep_config, &ep));
        check_usable(&c, ep);
        epmoe_ep_destroy(ep);
        epmoe_comm_destroy(comm);
        exchange_expect(epmoei_alloc_live() == live, "memory was not given back");
    }
}

static void expect_auto(const char *transport, int32_t ranks_per_device)
{
    epmoe_comm_t *comm = exchange_comm(EPMOE_BACKEND_AUTO, EPMOE_TRANSPORT_AUTO, 0);
    printf("rank %d: %s, %d ranks on a device\n", rank, epmoe_transport_string(epmoe_comm_transport(comm)),
           epmoe_comm_ranks_per_device(comm));
    exchange_expect(epmoe_comm_transport(comm) == exchange_transport(transport), "what AUTO takes");
    exchange_expect(epmoe_comm_ranks_per_device(comm) == ranks_per_device, "ranks on a device");
    epmoe_comm_destroy(comm);
}

int main(int argc, char **argv)
{
    const char *mode = argc > 1 ? argv[1] : "";
    exchange_start(&argc, &argv, &rank, &size);
    /* The stream belongs to the device that the communicator will take. */
    exchange_expect(epmoei_device_count() > 0, epmoei_device_absence());
    exchange_must(epmoei_device_set(!strcmp(mode, "shared") ? 0 : rank % epmoei_device_count()));
    exchange_must(epmoei_stream_create(&exchange_stream));
    if (!strcmp(mode, "calls") && argc == 3)
        calls(exchange_transport(argv[2]));
    else if (!strcmp(mode, "auto") && argc == 4)
        expect_auto(argv[2], atoi(argv[3]));
    else if (!strcmp(mode, "shared"))
        shared();
    else if (!strcmp(mode, "refused") && argc == 3)
        refused(argv[2]);
    else
        exchange_expect(false, "arguments");
    epmoei_stream_destroy(exchange_stream);
    MPI_Finalize();
    printf("ok %d\n", rank);
    return 0;
}
