/* Layers with copies of experts on a device, started by test_mpi_cuda.c under mpirun:
 *   mpi_cuda_placement SEED TRANSPORT...
 * Over each of these transports a layer with a placement is that of no placement within the tolerance of two roundings,
 * has the same bits on every run, and counts its load; where it can be captured, a replay does so too.
 *
 * Prints "ok" per rank and exits 0, or prints the error and exits 3. */
#include "base/device.h"
#include "comm/comm.h"
#include "tests/exchange_device.h"
#include "tests/exchange_ranks.h"

#include <cuda_runtime_api.h>
#include <epmoe/epmoe_mpi.h>
#include <stdio.h>
#include <stdlib.h>

#define CUDA EPMOE_BACKEND_CUDA

enum { EXPERTS = 24, TOP_K = 4, MAX_COMMS = 4 };

/* Twice that of an output of several ranks in bf16, which round their shares: both layers are off by so much. */
static const double kTolerance = 2 * 2.4e-2;

static int32_t rank, size;

static void *allocate(int64_t bytes)
{
    void *data = malloc((size_t)bytes + 1);
    exchange_expect(data != NULL, "memory");
    return data;
}

/* What every layer gets: on the device, and what must come of it. */
typedef struct tokens_t {
    int32_t num;
    int64_t bytes; /* of x and y */
    void *x;
    float *logits;
    int32_t *num_dev;
    char *y;       /* guarded */
    int32_t *ids;  /* that the router chose */
    int64_t *load; /* [E] */
} tokens_t;

static tokens_t make_tokens(testing_rng_t *rng, const epmoe_layer_config_t *config, int32_t num)
{
    tokens_t tokens = {.num = num, .bytes = 2 * (int64_t)config->max_tokens * config->hidden};
    int64_t elements = tokens.bytes / 2, logits = (int64_t)config->max_tokens * EXPERTS;
    uint16_t *x = allocate(tokens.bytes);
    float *forced = allocate(logits * 4);
    testing_fill_normal(rng, x, config->dtype, elements, 1);
    testing_fill_normal(rng, forced, EPMOE_F32, logits, 2);
    for (int64_t t = 0; t < config->max_tokens; t++) forced[t * EXPERTS + 5] += 3; /* a busy one */
    tokens.x = exchange_put(x, tokens.bytes);
    tokens.logits = exchange_put(forced, logits * 4);
    tokens.num_dev = exchange_put(&num, 4);
    tokens.y = exchange_guarded(tokens.bytes);
    tokens.ids = exchange_put(NULL, (int64_t)config->max_tokens * TOP_K * 4);
    tokens.load = exchange_put(NULL, EXPERTS * 8);
    free(x), free(forced);
    return tokens;
}

static void free_tokens(tokens_t *tokens)
{
    void *const blocks[] = {tokens->x, tokens->logits, tokens->num_dev, tokens->ids, tokens->load};
    for (size_t i = 0; i < sizeof blocks / sizeof blocks[0]; i++) epmoei_memory_free(CUDA, blocks[i]);
    exchange_guarded_free(tokens->y, tokens->bytes);
}

static epmoe_forward_args_t args_of(const tokens_t *tokens, const epmoe_layer_config_t *config, bool by_device)
{
    epmoe_forward_args_t args = EPMOE_FORWARD_ARGS_INIT;
    args.num_tokens = by_device ? config->max_tokens : tokens->num;
    args.num_tokens_dev = by_device ? tokens->num_dev : NULL;
    args.max_rank_tokens = config->max_tokens;
    args.x = tokens->x, args.y = tokens->y, args.logits = tokens->logits, args.ids_out = tokens->ids;
    args.expert_load = tokens->load;
    return args;
}

static void clear(const tokens_t *tokens)
{
    exchange_must(epmoei_memory_set(CUDA, tokens->y, 0xFF, tokens->bytes, exchange_stream));
    exchange_must(epmoei_memory_set(CUDA, tokens->load, 0, EXPERTS * 8, exchange_stream));
}

/* y of the rows that there are; what was counted is what was chosen. */
static void take(const tokens_t *tokens, epmoe_comm_t *comm, uint16_t *y)
{
    int64_t load[EXPERTS], due[EXPERTS] = {0};
    int32_t *ids = allocate((int64_t)tokens->num * TOP_K * 4);
    exchange_get(y, tokens->y, tokens->bytes);
    exchange_get(ids, tokens->ids, (int64_t)tokens->num * TOP_K * 4);
    exchange_get(load, tokens->load, EXPERTS * 8);
    exchange_must(epmoe_comm_get_async_error(comm));
    for (int32_t i = 0; i < tokens->num * TOP_K; i++) due[ids[i]]++;
    exchange_expect(!memcmp(load, due, sizeof load), "expert_load");
    free(ids);
}

static void run(epmoe_layer_t *layer, epmoe_comm_t *comm, const tokens_t *tokens, const epmoe_layer_config_t *config,
                uint16_t *y)
{
    const epmoe_forward_args_t args = args_of(tokens, config, false);
    clear(tokens);
    exchange_must(epmoe_layer_forward_args(layer, &args, exchange_stream));
    take(tokens, comm, y);
}

static void replay(epmoe_layer_t *layer, epmoe_comm_t *comm, const tokens_t *tokens, const epmoe_layer_config_t *config,
                   uint16_t *y)
{
    const epmoe_forward_args_t args = args_of(tokens, config, true);
    cudaGraph_t captured;
    cudaGraphExec_t executable;
    exchange_must(epmoei_stream_wait(CUDA, exchange_stream));
    exchange_expect(cudaStreamBeginCapture(exchange_stream, cudaStreamCaptureModeGlobal) == cudaSuccess,
                    "capture begins");
    epmoei_alloc_fail_at(1);
    exchange_must(epmoe_layer_forward_args(layer, &args, exchange_stream));
    epmoei_alloc_fail_at(0);
    exchange_expect(cudaStreamEndCapture(exchange_stream, &captured) == cudaSuccess &&
                        cudaGraphInstantiate(&executable, captured, 0) == cudaSuccess,
                    "a layer with a placement can be captured");
    for (int32_t i = 0; i < 3; i++) {
        clear(tokens);
        exchange_expect(cudaGraphLaunch(executable, exchange_stream) == cudaSuccess, "the graph runs");
        take(tokens, comm, y);
    }
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(captured);
}

static epmoe_layer_t *make_layer(epmoe_comm_t *comm, const epmoe_layer_config_t *config)
{
    epmoe_layer_t *layer = NULL;
    exchange_must(epmoe_layer_create(config, comm, &layer));
    exchange_must(epmoe_layer_set_random_weights(layer, 5));
    return layer;
}

static void same_bits(const uint16_t *y, const uint16_t *due, const tokens_t *tokens, int32_t hidden, const char *what)
{
    for (int64_t i = 0; i < (int64_t)tokens->num * hidden; i++) {
        if (y[i] == due[i]) continue;
        fprintf(stderr, "rank %d, d %d, %d tokens: y[%lld,%lld] has other bits: %s\n", rank, hidden, tokens->num,
                (long long)(i / hidden), (long long)(i % hidden), what);
        exchange_expect(false, what);
    }
}

static void check(epmoe_comm_t *const *comms, int32_t num_comms, const epmoe_layer_config_t *plain,
                  const int32_t *placement, int32_t num_physical, testing_rng_t *own)
{
    epmoe_layer_config_t placed = *plain;
    placed.placement = placement, placed.num_physical = num_physical;
    /* Far fewer and as many as there may be: other kernels. */
    for (int32_t few = 0; few < 2; few++) {
        int32_t num = few ? testing_range(own, 0, 3) : plain->max_tokens - testing_range(own, 0, plain->max_tokens / 2);
        tokens_t tokens = make_tokens(own, plain, num);
        int64_t elements = (int64_t)num * plain->hidden;
        uint16_t *due = allocate(tokens.bytes), *first = allocate(tokens.bytes), *y = allocate(tokens.bytes);
        double *ref = allocate(elements * 8);
        for (int32_t i = 0; i < num_comms; i++) {
            const bool captures = size == 1 || epmoe_comm_transport(comms[i]) == EPMOE_TRANSPORT_P2P;
            epmoe_layer_t *layers[2] = {make_layer(comms[i], plain), make_layer(comms[i], &placed)};
            run(layers[0], comms[i], &tokens, plain, due);
            run(layers[1], comms[i], &tokens, plain, y);
            for (int64_t e = 0; e < elements; e++) ref[e] = (double)epmoei_load(due, plain->dtype, e);
            double error = testing_row_error(y, plain->dtype, ref, num, plain->hidden);
            if (!(error <= kTolerance)) fprintf(stderr, "rank %d: off by %g\n", rank, error);
            exchange_expect(error <= kTolerance, "a layer with a placement is one without");
            memcpy(first, y, (size_t)tokens.bytes);
            run(layers[1], comms[i], &tokens, plain, y);
            same_bits(y, first, &tokens, plain->hidden, "another run");
            /* The captured call has another bound of T, and with it perhaps other kernels. */
            if (captures) {
                replay(layers[1], comms[i], &tokens, plain, y);
                error = testing_row_error(y, plain->dtype, ref, num, plain->hidden);
                exchange_expect(error <= kTolerance, "a replay");
                for (int64_t e = elements; e < tokens.bytes / 2; e++)
                    exchange_expect(y[e] == 0xFFFF, "a row behind the last was written");
            }
            for (int32_t j = 0; j < 2; j++) epmoe_layer_destroy(layers[j]);
        }
        free(due), free(first), free(y), free(ref);
        free_tokens(&tokens);
    }
}

static void layers(epmoe_comm_t *const *comms, int32_t num_comms, uint64_t seed)
{
    static const int32_t hidden[] = {256, 1024, 144};
    testing_rng_t rng = testing_rng(seed), own = testing_rng(seed + 1000 + (uint64_t)rank);
    for (int32_t i = 0; i < 6; i++) {
        exchange_case_t drawn = {.num_experts = EXPERTS};
        epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
        config.hidden = hidden[i % 3], config.intermediate = 128, config.num_experts = EXPERTS, config.top_k = TOP_K;
        config.renormalize = 1;
        config.shared_intermediate = i % 2 ? 64 : 0;
        config.max_tokens = i < 3 ? 600 : 40;
        if (i % 3 == 1) config.wire_dtype = EPMOE_F8_E4M3;
        config.dtype = EPMOE_BF16;
        exchange_place(&rng, &drawn);
        check(comms, num_comms, &config, drawn.placement, drawn.num_physical, &own);
    }
}

/* Where only the device sees ids: one that is no expert goes nowhere, is no load, and is counted once. */
static void bad_ids(epmoe_comm_t *comm)
{
    enum { HIDDEN = 16 };
    static const int32_t placement[] = {3, 0, 1, 2, 0, 1}, ids[] = {0, 4, -1, 3};
    static const float weights[] = {0.5f, 0.5f, 0.5f, 0.5f};
    int64_t load[4] = {0};
    epmoe_ep_t *ep = NULL;
    epmoe_ep_config_t config = EPMOE_EP_CONFIG_INIT;
    config.num_experts = 4, config.top_k = 2, config.hidden = HIDDEN, config.max_tokens = 2, config.dtype = EPMOE_BF16;
    config.placement = placement, config.num_physical = 6;
    exchange_must(epmoe_ep_create(comm, &config, &ep));
    exchange_device_t in = {.x = exchange_put(NULL, 2 * HIDDEN * 2),
                            .ids = exchange_put(ids, sizeof ids),
                            .weights = exchange_put(weights, sizeof weights)};
    char *y = exchange_guarded(2 * HIDDEN * 2);
    epmoe_dispatch_args_t args = exchange_dispatch_args(&in, 2);
    args.expert_load = exchange_put(load, sizeof load);
    epmoe_dispatch_result_t rows = EPMOE_DISPATCH_RESULT_INIT;
    exchange_must(epmoe_dispatch(ep, &args, &rows, exchange_stream));
    const int64_t y_bytes = rows.max_rows * HIDDEN * epmoe_dtype_size(epmoe_ep_partial_dtype(ep));
    exchange_must(epmoei_memory_set(CUDA, rows.y, 0, y_bytes, exchange_stream));
    epmoe_combine_args_t combine = EPMOE_COMBINE_ARGS_INIT;
    combine.y = y;
    exchange_must(epmoe_combine(ep, &combine, exchange_stream));
    exchange_get(load, args.expert_load, sizeof load);
    exchange_expect(load[0] == 1 && load[1] == 0 && load[2] == 0 && load[3] == 1, "the load of bad ids");
    exchange_must_fail(epmoei_error_word_check(), EPMOE_ERROR_INVALID_ARGUMENT, "1 ids", "a bad id");
    exchange_must(epmoei_error_word_check());
    exchange_must(epmoe_comm_get_async_error(comm));
    epmoei_memory_free(CUDA, args.expert_load);
    exchange_guarded_free(y, 2 * HIDDEN * 2);
    exchange_device_free(&in);
    epmoe_ep_destroy(ep);
}

int main(int argc, char **argv)
{
    epmoe_comm_t *comms[MAX_COMMS] = {NULL};
    int32_t num = 0;
    exchange_start(&argc, &argv, &rank, &size);
    exchange_expect(argc >= 3 && argc - 2 <= MAX_COMMS, "arguments");
    exchange_expect(epmoei_device_count() > 0, epmoei_device_absence());
    exchange_must(epmoei_device_set(rank % epmoei_device_count()));
    exchange_must(epmoei_stream_create(&exchange_stream));
    for (; num < argc - 2; num++) comms[num] = exchange_comm(CUDA, exchange_transport(argv[num + 2]), 0);
    for (int32_t i = 0; i < num; i++)
        if (size == 1 || epmoe_comm_transport(comms[i]) == EPMOE_TRANSPORT_P2P) bad_ids(comms[i]);
    layers(comms, num, strtoull(argv[1], NULL, 10));
    for (int32_t i = 0; i < num; i++) epmoe_comm_destroy(comms[i]);
    epmoei_stream_destroy(exchange_stream);
    MPI_Finalize();
    printf("ok %d\n", rank);
    return 0;
}
