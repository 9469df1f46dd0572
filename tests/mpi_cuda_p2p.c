/* Transport p2p, beyond what all transports have in common (mpi_cuda_exchange), started by test_mpi_cuda.c under
 * mpirun:
 *   mpi_cuda_p2p rounds SEED N      N exchanges on one object, the numbers of tokens change, from rank to rank too, and
 *                                   with them how rows travel; every tenth has the CPU's
 *                                   bits; rounds-fp8: with FP8 on the wire
 *   mpi_cuda_p2p graph SEED N       N replays of a graph with two dispatches in flight, one of them with copies of
 *                                   experts, other routing and T each time;
 *                                   graph-fp8: one of them with FP8 on the wire; graph-few, graph-few-fp8: replays
 *                                   for very few tokens; graphs, graphs-fp8: replays of four graphs of different
 *                                   sizes. Eager calls for any number in between
 *   mpi_cuda_p2p errors             what one rank does wrong, and too many rows, reach all; errors-few: with very few
 *                                   tokens
 *   mpi_cuda_p2p calls              what is an error of one rank alone, and what is none
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

static int32_t rank, size;

static epmoe_comm_t *p2p_comm(double timeout_s) { return exchange_comm(CUDA, EPMOE_TRANSPORT_P2P, timeout_s); }

static void *allocate(int64_t bytes)
{
    void *data = malloc((size_t)bytes + 1);
    exchange_expect(data != NULL, "memory");
    return data;
}

/* --------------------------------------------------------------------------------------------------------- rounds */

enum { MAX_T = 70 };

/* An object of the case's shape for up to MAX_T tokens on every rank. */
static epmoe_ep_t *object_for(epmoe_comm_t *comm, const exchange_case_t *c)
{
    epmoe_ep_t *ep = NULL;
    epmoe_ep_config_t config = exchange_config(c, rank);
    config.max_tokens = MAX_T;
    exchange_must(epmoe_ep_create(comm, &config, &ep));
    return ep;
}

static void draw_tokens(exchange_case_t *c, testing_rng_t *rng)
{
    static const int32_t most[] = {0, 2, 2, MAX_T, MAX_T, MAX_T};
    for (int32_t r = 0; r < EXCHANGE_RANKS; r++) c->tokens[r] = testing_range(rng, 0, most[testing_range(rng, 0, 5)]);
    c->seed = testing_next(rng);
}

static void rounds(uint64_t seed, int32_t num, epmoe_dtype_t wire)
{
    testing_rng_t rng = testing_rng(seed);
    epmoe_comm_t *comms[2] = {exchange_comm(EPMOE_BACKEND_CPU, EPMOE_TRANSPORT_AUTO, 0), p2p_comm(0)};
    exchange_case_t c = {.size = size, .num_experts = 30, .top_k = 5, .hidden = 136, .dtype = EPMOE_BF16, .wire = wire};
    epmoe_ep_t *ep[2] = {object_for(comms[0], &c), object_for(comms[1], &c)};
    char *y = allocate(2 * MAX_T * 136 * 2);
    for (int32_t round = 0; round < num; round++) {
        char what[64];
        snprintf(what, sizeof what, "round %d of transport p2p", round);
        draw_tokens(&c, &rng);
        exchange_device_round(&c, rank, ep[1], 0, y);
        if (round % 10) continue;
        exchange_expect(exchange_round(&c, rank, ep[0], 0, y + MAX_T * 136 * 2) == 0, what);
        exchange_expect(!memcmp(y, y + MAX_T * 136 * 2, (size_t)c.tokens[rank % EXCHANGE_RANKS] * 136 * 2), what);
    }
    for (int32_t i = 0; i < 2; i++) {
        epmoe_ep_destroy(ep[i]);
        epmoe_comm_destroy(comms[i]);
    }
    free(y);
}

/* ---------------------------------------------------------------------------------------------------------- graph */

/* Buffers of one of the two dispatches, for MAX_T tokens. */
typedef struct layer_t {
    exchange_case_t c;
    epmoe_ep_t *ep;
    exchange_device_t in;
    epmoe_dispatch_result_t rows;
    char *y;       /* guarded */
    int64_t *load; /* device [E]: of all dispatches so far */
    int64_t load_due[EXCHANGE_MAX_PHYSICAL];
} layer_t;

static const int64_t kRow = 264 * 2;

/* rng: with a placement that it draws. */
static layer_t make_layer(epmoe_comm_t *comm, int32_t num_experts, int32_t top_k, epmoe_dtype_t wire,
                          testing_rng_t *rng)
{
    layer_t layer = {.rows = EPMOE_DISPATCH_RESULT_INIT};
    layer.c = exchange_identity_case(size, 264, EPMOE_BF16, 0);
    layer.c.num_experts = num_experts;
    layer.c.top_k = top_k;
    layer.c.wire = wire;
    if (rng) exchange_place(rng, &layer.c);
    layer.load = exchange_put(layer.load_due, num_experts * 8LL);
    layer.ep = object_for(comm, &layer.c);
    layer.in = (exchange_device_t){.x = exchange_put(NULL, MAX_T * kRow),
                                   .ids = exchange_put(NULL, MAX_T * top_k * 4),
                                   .weights = exchange_put(NULL, MAX_T * top_k * 4)};
    layer.y = exchange_guarded(MAX_T * kRow);
    return layer;
}

static void free_layer(layer_t *layer)
{
    epmoe_ep_destroy(layer->ep);
    exchange_device_free(&layer->in);
    epmoei_memory_free(CUDA, layer->load);
    exchange_guarded_free(layer->y, MAX_T * kRow);
}

/* For so many calls. */
static void put_inputs(layer_t *layer, int32_t calls)
{
    exchange_inputs_t inputs = exchange_inputs(&layer->c, rank);
    int64_t slots = (int64_t)inputs.num_tokens * layer->c.top_k * 4;
    for (int32_t i = 0; i < calls; i++) exchange_add_load(&layer->c, &inputs, layer->load_due);
    exchange_must(epmoei_memory_copy(CUDA, layer->in.x, inputs.x, inputs.num_tokens * kRow, exchange_stream));
    exchange_must(epmoei_memory_copy(CUDA, layer->in.ids, inputs.ids, slots, exchange_stream));
    exchange_must(epmoei_memory_copy(CUDA, layer->in.weights, inputs.weights, slots, exchange_stream));
    exchange_must(epmoei_memory_set(CUDA, layer->y, 0xFF, MAX_T * kRow, exchange_stream));
    exchange_must(epmoei_stream_wait(CUDA, exchange_stream));
    exchange_inputs_free(&inputs);
}

/* Experts return x: y of a token is x times the number of its ranks. */
static void enqueue_dispatch(layer_t *layer, const int32_t *tokens_dev, int32_t num_tokens, int32_t max_rank_tokens)
{
    epmoe_dispatch_args_t args = exchange_dispatch_args(&layer->in, num_tokens);
    args.num_tokens_dev = tokens_dev;
    args.max_rank_tokens = max_rank_tokens;
    args.expert_load = layer->load;
    exchange_must(epmoe_dispatch(layer->ep, &args, &layer->rows, exchange_stream));
    exchange_must(epmoei_memory_copy(CUDA, layer->rows.y, layer->rows.x, layer->rows.max_rows * kRow, exchange_stream));
}

static void enqueue_combine(layer_t *layer)
{
    epmoe_combine_args_t args = EPMOE_COMBINE_ARGS_INIT;
    args.y = layer->y;
    exchange_must(epmoe_combine(layer->ep, &args, exchange_stream));
}

static void check_layer(const layer_t *layer, const char *what)
{
    const exchange_case_t *c = &layer->c;
    exchange_inputs_t inputs = exchange_inputs(c, rank);
    int32_t num_rows = -1, k = c->top_k, num_physical = c->num_physical ? c->num_physical : c->num_experts;
    int64_t load[EXCHANGE_MAX_PHYSICAL];
    exchange_get(load, layer->load, c->num_experts * 8LL);
    exchange_expect(!memcmp(load, layer->load_due, (size_t)c->num_experts * 8), "expert_load");
    exchange_get(&num_rows, layer->rows.num_rows, 4);
    exchange_expect(num_rows >= 0 && num_rows <= layer->rows.max_rows, what);
    void *x = allocate(num_rows * kRow);
    int32_t *ids = allocate((int64_t)num_rows * k * 4);
    float *weights = allocate((int64_t)num_rows * k * 4);
    uint16_t *y = allocate(MAX_T * kRow);
    exchange_get(x, layer->rows.x, num_rows * kRow);
    exchange_get(ids, layer->rows.ids, (int64_t)num_rows * k * 4);
    exchange_get(weights, layer->rows.weights, (int64_t)num_rows * k * 4);
    exchange_get(y, layer->y, MAX_T * kRow);
    epmoe_dispatch_result_t here = layer->rows;
    here.num_rows = &num_rows, here.x = x, here.ids = ids, here.weights = weights;
    exchange_expect(exchange_check_rows(c, rank, &here) == 0, what);
    for (int64_t t = 0; t < MAX_T; t++) {
        uint32_t ranks = 0;
        for (int32_t j = 0; j < k && t < inputs.num_tokens; j++)
            ranks |= 1u << exchange_owner(num_physical, size, exchange_physical(c, rank, t, inputs.ids[t * k + j]));
        for (int64_t i = t * 264; i < (t + 1) * 264; i++) {
            float due = t < inputs.num_tokens
                            ? (float)__builtin_popcount(ranks) * epmoei_load(inputs.arrived, EPMOE_BF16, i)
                            : 0;
            if (y[i] == (t < inputs.num_tokens ? epmoei_f32_to_bf16(due) : 0xFFFF)) continue;
            fprintf(stderr, "rank %d: y[%lld,%lld] is %g, expected %g (%d tokens)\n", rank, (long long)t,
                    (long long)(i % 264), (double)epmoei_bf16_to_f32(y[i]), (double)due, inputs.num_tokens);
            exchange_expect(false, what);
        }
    }
    free(x), free(ids), free(weights), free(y);
    exchange_inputs_free(&inputs);
}

/* Both dispatches in flight at once. */
static void enqueue_layers(layer_t layers[2], const int32_t *tokens_dev, int32_t num_tokens, int32_t max_rank_tokens)
{
    for (int32_t i = 0; i < 2; i++) enqueue_dispatch(&layers[i], tokens_dev, num_tokens, max_rank_tokens);
    for (int32_t i = 1; i >= 0; i--) enqueue_combine(&layers[i]);
}

typedef struct graph_t {
    int32_t most_tokens; /* of a rank */
    cudaGraphExec_t executable;
    epmoe_dispatch_result_t rows[2]; /* of the layers */
} graph_t;

static graph_t capture(layer_t layers[2], const int32_t *tokens_dev, int32_t most_tokens)
{
    graph_t graph = {.most_tokens = most_tokens};
    cudaGraph_t captured;
    exchange_expect(cudaStreamBeginCapture(exchange_stream, cudaStreamCaptureModeGlobal) == cudaSuccess,
                    "capture begins");
    epmoei_alloc_fail_at(1);
    enqueue_layers(layers, tokens_dev, most_tokens, most_tokens);
    epmoei_alloc_fail_at(0);
    exchange_expect(cudaStreamEndCapture(exchange_stream, &captured) == cudaSuccess &&
                        cudaGraphInstantiate(&graph.executable, captured, 0) == cudaSuccess,
                    "dispatch and combine can be captured");
    for (int32_t i = 0; i < 2; i++) graph.rows[i] = layers[i].rows;
    cudaGraphDestroy(captured);
    return graph;
}

enum { MAX_GRAPHS = 4, MAX_CALLS = 4 };

/* Calls that are enqueued one behind the other, the same on every rank. */
typedef struct calls_t {
    int32_t num;
    int32_t graph[MAX_CALLS]; /* -1 = eager */
    int32_t most_tokens;      /* that all of them take */
} calls_t;

static calls_t draw_calls(testing_rng_t *rng, int32_t round, const graph_t *graphs, int32_t num_graphs)
{
    calls_t calls = {.num = round % 3 == 2 ? MAX_CALLS : 1, .most_tokens = MAX_T};
    for (int32_t i = 0; i < calls.num; i++) {
        calls.graph[i] = testing_range(rng, 0, 4) ? testing_range(rng, 0, num_graphs - 1) : -1;
        int32_t most = calls.graph[i] < 0 ? MAX_T : graphs[calls.graph[i]].most_tokens;
        if (most < calls.most_tokens) calls.most_tokens = most;
    }
    return calls;
}

/* The device counts dispatches of either kind. */
static void run_calls(const calls_t *calls, const graph_t *graphs, layer_t layers[2], int32_t num_tokens)
{
    for (int32_t i = 0; i < calls->num; i++) {
        const graph_t *graph = &graphs[calls->graph[i] < 0 ? 0 : calls->graph[i]];
        if (calls->graph[i] < 0)
            enqueue_layers(layers, NULL, num_tokens, MAX_T);
        else
            exchange_expect(cudaGraphLaunch(graph->executable, exchange_stream) == cudaSuccess, "the graph runs");
        for (int32_t l = 0; l < 2 && calls->graph[i] >= 0; l++) layers[l].rows = graph->rows[l];
    }
}

/* The rows of the second dispatch travel as `wire`. A graph for each of the most tokens, replayed and mixed with eager
 * calls of any number in an order that is drawn; every third time several without a wait between them. */
static void graph(uint64_t seed, int32_t num, epmoe_dtype_t wire, const int32_t *most_tokens, int32_t num_graphs)
{
    testing_rng_t rng = testing_rng(seed);
    epmoe_comm_t *comm = p2p_comm(0);
    layer_t layers[2] = {make_layer(comm, 24, 4, EPMOE_DTYPE_NONE, &rng),
                         make_layer(comm, 1 + size / 2, 2, wire, NULL)};
    int32_t *tokens_dev = exchange_put(NULL, 4);
    graph_t graphs[MAX_GRAPHS];
    for (int32_t i = 0; i < num_graphs; i++) graphs[i] = capture(layers, tokens_dev, most_tokens[i]);
    for (int32_t round = 0; round < num; round++) {
        const calls_t calls = draw_calls(&rng, round, graphs, num_graphs);
        draw_tokens(&layers[0].c, &rng);
        for (int32_t r = 0; r < EXCHANGE_RANKS; r++) layers[0].c.tokens[r] %= calls.most_tokens + 1;
        memcpy(layers[1].c.tokens, layers[0].c.tokens, sizeof layers[1].c.tokens);
        layers[1].c.seed = testing_next(&rng);
        int32_t num_tokens = layers[0].c.tokens[rank % EXCHANGE_RANKS];
        exchange_must(epmoei_memory_copy(CUDA, tokens_dev, &num_tokens, 4, exchange_stream));
        for (int32_t i = 0; i < 2; i++) put_inputs(&layers[i], calls.num);
        run_calls(&calls, graphs, layers, num_tokens);
        exchange_must(epmoei_stream_wait(CUDA, exchange_stream));
        exchange_must(epmoe_comm_get_async_error(comm));
        for (int32_t i = 0; i < 2; i++) {
            char what[96];
            snprintf(what, sizeof what, "round %d, %d calls, the last of graph %d (-1 = eager), dispatch %d", round,
                     calls.num, calls.graph[calls.num - 1], i);
            check_layer(&layers[i], what);
        }
    }
    for (int32_t i = 0; i < num_graphs; i++) cudaGraphExecDestroy(graphs[i].executable);
    epmoei_memory_free(CUDA, tokens_dev);
    for (int32_t i = 0; i < 2; i++) free_layer(&layers[i]);
    epmoe_comm_destroy(comm);
}

/* --------------------------------------------------------------------------------------------------------- errors */

static exchange_case_t small_case(void)
{
    return (exchange_case_t){.size = size,
                             .num_experts = 10,
                             .top_k = 3,
                             .hidden = 200,
                             .dtype = EPMOE_BF16,
                             .tokens = {9, 8, 7, 6, 5, 4, 3, 2},
                             .seed = 11};
}

/* A good exchange, then one with the fault, of which every rank hears once the device has come to it, and which leaves
 * nothing that waits. */
static void error(exchange_case_t c, int32_t capacity, const char *kind, epmoe_status_t mine, epmoe_status_t others,
                  const char *words)
{
    epmoe_comm_t *comm = p2p_comm(20);
    if (!strcmp(kind, "capacity")) c.plain = true, c.first_id = c.last_id = c.num_experts - 1;
    epmoe_ep_config_t config = exchange_config(&c, rank);
    if (!strcmp(kind, "capacity") && rank == exchange_owner(c.num_experts, size, c.last_id)) config.capacity = capacity;
    epmoe_ep_t *ep = NULL;
    exchange_must(epmoe_ep_create(comm, &config, &ep));
    exchange_inputs_t inputs = exchange_inputs(&c, rank);
    exchange_device_t on_device = exchange_upload(&c, &inputs);
    epmoe_dispatch_args_t args = exchange_dispatch_args(&on_device, inputs.num_tokens);
    epmoe_dispatch_result_t rows = EPMOE_DISPATCH_RESULT_INIT;
    if (strcmp(kind, "capacity")) {
        void *y = allocate((int64_t)inputs.num_tokens * c.hidden * 2);
        exchange_device_round(&c, rank, ep, 0, y);
        free(y);
    }
    bool culprit = rank == 1 && strcmp(kind, "capacity");
    if (culprit && !strcmp(kind, "aligned")) args.x = (const char *)args.x + 2;
    if (culprit && !strcmp(kind, "tokens")) args.num_tokens = config.max_tokens + 1;
    if (culprit && !strcmp(kind, "null")) args.ids = NULL;
    if (culprit && !strcmp(kind, "reuse")) args.reuse_routing = 1;
    if (!strcmp(kind, "promise")) args.max_rank_tokens = rank == 1 ? 9 : 10;
    bool at_once = culprit && strcmp(kind, "reuse") && strcmp(kind, "promise");
    double start = epmoei_now_seconds();
    epmoe_status_t status = epmoe_dispatch(ep, &args, &rows, exchange_stream);
    exchange_must_fail(status, at_once ? mine : EPMOE_OK, at_once ? words : NULL, kind);
    exchange_must(epmoei_stream_wait(CUDA, exchange_stream));
    char *y = exchange_guarded((int64_t)inputs.num_tokens * c.hidden * 2), *home;
    if (status == EPMOE_OK) {
        int32_t num_rows = -1;
        exchange_get(&num_rows, rows.num_rows, 4);
        exchange_expect(num_rows == 0, "no rows arrive in a dispatch that fails");
    }
    exchange_must_fail(epmoe_comm_get_async_error(comm), others, NULL, kind);
    epmoe_combine_args_t combine = EPMOE_COMBINE_ARGS_INIT;
    combine.y = y;
    exchange_must_fail(epmoe_combine(ep, &combine, exchange_stream), EPMOE_ERROR_BAD_STATE,
                       at_once ? "this rank" : words, "a call after the fault");
    exchange_expect(epmoei_now_seconds() - start < 10, "an error that all know of is there at once");
    home = allocate((int64_t)inputs.num_tokens * c.hidden * 2);
    exchange_get(home, y, (int64_t)inputs.num_tokens * c.hidden * 2);
    for (int64_t i = 0; i < (int64_t)inputs.num_tokens * c.hidden * 2; i++)
        exchange_expect(home[i] == (char)0xFF, "y was written");
    free(home);
    exchange_guarded_free(y, (int64_t)inputs.num_tokens * c.hidden * 2);
    exchange_device_free(&on_device);
    exchange_inputs_free(&inputs);
    epmoe_ep_destroy(ep);
    epmoe_comm_destroy(comm);
}

/* With few: so few tokens that most ranks stage their rows. */
static void errors(bool few)
{
    static const int32_t few_tokens[8] = {2, 1, 2, 1, 2, 1, 2, 1};
    exchange_case_t c = small_case();
    const int32_t capacity = few ? 2 : 3;
    if (few) memcpy(c.tokens, few_tokens, sizeof few_tokens);
    epmoe_status_t bad = EPMOE_ERROR_INVALID_ARGUMENT, peer = EPMOE_ERROR_PEER;
    error(c, capacity, "aligned", bad, peer, rank == 1 ? "aligned to 16 bytes" : "rank 1 failed");
    error(c, capacity, "tokens", bad, peer, rank == 1 ? "max_tokens" : "rank 1 failed");
    error(c, capacity, "null", bad, peer, rank == 1 ? "ids is NULL" : "rank 1 failed");
    error(c, capacity, "reuse", EPMOE_ERROR_MISMATCH, EPMOE_ERROR_MISMATCH,
          "reuse_routing is 0 on rank 0 and 1 on rank 1");
    error(c, capacity, "promise", EPMOE_ERROR_MISMATCH, EPMOE_ERROR_MISMATCH,
          "max_rank_tokens is 10 on rank 0 and 9 on rank 1");
    error(c, capacity, "capacity", EPMOE_ERROR_CAPACITY, EPMOE_ERROR_CAPACITY,
          few ? "its capacity is 2" : "its capacity is 3");
}

/* ---------------------------------------------------------------------------------------------------------- calls */

static void check_usable(const exchange_case_t *c, epmoe_ep_t *ep)
{
    void *y = allocate((int64_t)c->tokens[rank % EXCHANGE_RANKS] * c->hidden * 4);
    exchange_device_round(c, rank, ep, 0, y);
    free(y);
}

static void alone(const exchange_case_t *c, epmoe_ep_t *ep)
{
    exchange_inputs_t inputs = exchange_inputs(c, rank);
    exchange_device_t on_device = exchange_upload(c, &inputs);
    int64_t y_bytes = (int64_t)inputs.num_tokens * c->hidden * 2;
    epmoe_dispatch_args_t args = exchange_dispatch_args(&on_device, inputs.num_tokens);
    epmoe_dispatch_result_t rows = EPMOE_DISPATCH_RESULT_INIT;
    exchange_must(epmoe_dispatch(ep, &args, &rows, exchange_stream));
    exchange_device_experts(c, rank, ep, &rows);
    epmoe_combine_args_t combine = EPMOE_COMBINE_ARGS_INIT;
    char *y = exchange_guarded(y_bytes), *home = allocate(y_bytes);
    combine.shared = on_device.shared;
    combine.residual = on_device.residual;
    combine.y = rank == 1 ? NULL : y;
    exchange_must_fail(epmoe_combine(ep, &combine, exchange_stream),
                       rank == 1 ? EPMOE_ERROR_INVALID_ARGUMENT : EPMOE_OK, NULL, "y NULL");
    exchange_must_fail(epmoe_combine(ep, &combine, exchange_stream), EPMOE_ERROR_BAD_STATE, "no dispatch",
                       "a combine without a dispatch");
    exchange_get(home, y, y_bytes);
    exchange_expect(rank == 1 || exchange_check_output(c, rank, &inputs, home) == 0, "y of the others");
    check_usable(c, ep);

    /* An id that does not exist counts as unused, and is reported by what looks next. */
    exchange_inputs_t without = exchange_inputs(c, rank);
    if (rank == 1) {
        without.ids[3] = -1;
        inputs.ids[3] = c->num_experts;
        exchange_must(epmoei_memory_copy(CUDA, on_device.ids, inputs.ids, (int64_t)inputs.num_tokens * c->top_k * 4,
                                         exchange_stream));
    }
    exchange_must(epmoe_dispatch(ep, &args, &rows, exchange_stream));
    exchange_must(epmoei_memory_set(CUDA, rows.y, 0, (int64_t)rows.max_rows * c->hidden * 2, exchange_stream));
    combine.shared = NULL;
    combine.y = y;
    exchange_must(epmoe_combine(ep, &combine, exchange_stream));
    exchange_get(home, y, y_bytes);
    exchange_expect(!memcmp(home, inputs.residual, (size_t)y_bytes), "y of experts that return 0 is the residual");
    exchange_must_fail(epmoei_error_word_check(), rank == 1 ? EPMOE_ERROR_INVALID_ARGUMENT : EPMOE_OK,
                       rank == 1 ? "1 ids" : NULL, "an id that does not exist");
    check_usable(c, ep);

    /* Dropped, if all ranks do so. */
    if (rank == 1)
        exchange_must(epmoei_memory_copy(CUDA, on_device.ids, without.ids, (int64_t)inputs.num_tokens * c->top_k * 4,
                                         exchange_stream));
    for (int32_t i = 0; i < 5; i++) exchange_must(epmoe_dispatch(ep, &args, &rows, exchange_stream));
    check_usable(c, ep);
    free(home);
    exchange_guarded_free(y, y_bytes);
    exchange_device_free(&on_device);
    exchange_inputs_free(&inputs);
    exchange_inputs_free(&without);
}

static void calls(void)
{
    exchange_case_t c = small_case();
    int64_t live = epmoei_alloc_live();
    epmoe_comm_t *comm = p2p_comm(20);
    exchange_expect(epmoe_comm_transport(comm) == EPMOE_TRANSPORT_P2P, "the transport");
    epmoe_ep_t *ep = NULL;
    epmoe_ep_config_t config = exchange_config(&c, rank);
    config.top_k = rank == 1 ? 4 : 3;
    exchange_must_fail(epmoe_ep_create(comm, &config, &ep), EPMOE_ERROR_MISMATCH,
                       "top_k is 3 on rank 0 and 4 on rank 1", "configs that differ");
    config.top_k = 3;
    config.comm_sms = 1 + rank % 2;
    exchange_must(epmoe_ep_create(comm, &config, &ep));
    check_usable(&c, ep);
    alone(&c, ep);
    /* Objects come and go, in another order on every rank. */
    epmoe_ep_t *many[6];
    for (int32_t round = 0; round < 3; round++) {
        for (int32_t i = 0; i < 6; i++) exchange_must(epmoe_ep_create(comm, &config, &many[i]));
        for (int32_t i = 0; i < 6; i++) check_usable(&c, many[i]);
        for (int32_t i = 0; i < 6; i++) epmoe_ep_destroy(many[(i + rank) % 6]);
    }
    check_usable(&c, ep);
    epmoe_ep_destroy(ep);
    double start = epmoei_now_seconds();
    if (rank == 0) sleep(1);
    epmoe_comm_destroy(comm);
    exchange_expect(epmoei_now_seconds() - start < 5, "destroying waits for a peer no longer than it takes");
    exchange_expect(epmoei_alloc_live() == live, "memory was not given back");
}

int main(int argc, char **argv)
{
    const char *mode = argc > 1 ? argv[1] : "";
    exchange_start(&argc, &argv, &rank, &size);
    /* All tokens; so few that rows are staged; between; one. */
    const int32_t sizes[MAX_GRAPHS] = {MAX_T, 4 / size, 17, 1};
    /* The stream belongs to the device that the communicator will take. */
    exchange_expect(epmoei_device_count() > 0, epmoei_device_absence());
    exchange_must(epmoei_device_set(rank % epmoei_device_count()));
    exchange_must(epmoei_stream_create(&exchange_stream));
    if (!strcmp(mode, "rounds") && argc == 4)
        rounds(strtoull(argv[2], NULL, 10), atoi(argv[3]), EPMOE_DTYPE_NONE);
    else if (!strcmp(mode, "rounds-fp8") && argc == 4)
        rounds(strtoull(argv[2], NULL, 10), atoi(argv[3]), EPMOE_F8_E4M3);
    else if (!strcmp(mode, "graph") && argc == 4)
        graph(strtoull(argv[2], NULL, 10), atoi(argv[3]), EPMOE_DTYPE_NONE, sizes, 1);
    else if (!strcmp(mode, "graph-fp8") && argc == 4)
        graph(strtoull(argv[2], NULL, 10), atoi(argv[3]), EPMOE_F8_E4M3, sizes, 1);
    else if (!strcmp(mode, "graph-few") && argc == 4)
        graph(strtoull(argv[2], NULL, 10), atoi(argv[3]), EPMOE_DTYPE_NONE, &sizes[1], 1);
    else if (!strcmp(mode, "graph-few-fp8") && argc == 4)
        graph(strtoull(argv[2], NULL, 10), atoi(argv[3]), EPMOE_F8_E4M3, &sizes[1], 1);
    else if (!strcmp(mode, "graphs") && argc == 4)
        graph(strtoull(argv[2], NULL, 10), atoi(argv[3]), EPMOE_DTYPE_NONE, sizes, MAX_GRAPHS);
    else if (!strcmp(mode, "graphs-fp8") && argc == 4)
        graph(strtoull(argv[2], NULL, 10), atoi(argv[3]), EPMOE_F8_E4M3, sizes, MAX_GRAPHS);
    else if (!strcmp(mode, "errors") && argc == 2)
        errors(false);
    else if (!strcmp(mode, "errors-few") && argc == 2)
        errors(true);
    else if (!strcmp(mode, "calls") && argc == 2)
        calls();
    else
        exchange_expect(false, "arguments");
    epmoei_stream_destroy(exchange_stream);
    MPI_Finalize();
    printf("ok %d\n", rank);
    return 0;
}
