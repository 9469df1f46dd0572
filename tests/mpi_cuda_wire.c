/* Layers with FP8 on the wire, started by test_mpi_cuda.c under mpirun:
 *   mpi_cuda_wire SEED TRANSPORT...   over each of these the layer on x is the plain one, over the same ranks, on what
 *                                     is left of x, bit for bit: with products that take the codes as they are, and
 *                                     others
 *
 * Prints "ok" per rank and exits 0, or prints the error and exits 3. */
#include "base/device.h"
#include "comm/ep_wire.h"
#include "kernels/kernel_table.h"
#include "tests/exchange_device.h"
#include "tests/exchange_ranks.h"

#include <epmoe/epmoe_mpi.h>
#include <stdio.h>
#include <stdlib.h>

#define CUDA EPMOE_BACKEND_CUDA

enum { MOST_TOKENS = 300 };

static int32_t rank, size;

static void *allocate(int64_t bytes)
{
    void *data = malloc((size_t)bytes + 1);
    exchange_expect(data != NULL, "memory");
    return data;
}

static epmoe_layer_t *make_layer(epmoe_comm_t *comm, const epmoe_layer_config_t *config, epmoe_dtype_t wire)
{
    epmoe_layer_t *layer = NULL;
    epmoe_layer_config_t own = *config;
    own.wire_dtype = wire;
    exchange_must(epmoe_layer_create(&own, comm, &layer));
    exchange_must(epmoe_layer_set_random_weights(layer, 5));
    return layer;
}

/* y of these rows. */
static uint16_t *forward(epmoe_layer_t *layer, const epmoe_forward_args_t *from, const void *x, int64_t bytes)
{
    epmoe_forward_args_t args = *from;
    void *x_dev = exchange_put(x, bytes);
    char *y_dev = exchange_guarded(bytes);
    uint16_t *y = allocate(bytes);
    args.x = args.num_tokens ? x_dev : NULL, args.y = args.num_tokens ? y_dev : NULL;
    exchange_must(epmoe_layer_forward_args(layer, &args, exchange_stream));
    exchange_get(y, y_dev, bytes);
    exchange_guarded_free(y_dev, bytes);
    epmoei_memory_free(CUDA, x_dev);
    return y;
}

/* Ranks have other numbers of tokens; the bound of all ranks' is given or is that of the layer. */
static void check(epmoe_comm_t *comm, const epmoe_layer_config_t *config, testing_rng_t *rng, int32_t most)
{
    epmoe_layer_t *coded = make_layer(comm, config, EPMOE_F8_E4M3), *plain = make_layer(comm, config, EPMOE_DTYPE_NONE);
    for (int32_t round = 0; round < 3; round++) {
        int32_t tokens = (rank + round) % 3 == 2 ? 0 : testing_range(rng, 1, most);
        int64_t elements = (int64_t)tokens * config->hidden, bytes = 2 * elements,
                logits = config->num_experts * tokens;
        uint16_t *x = allocate(bytes), *rounded = allocate(bytes);
        float *forced = allocate(logits * 4);
        testing_fill_normal(rng, x, config->dtype, elements, 1);
        testing_fill_normal(rng, forced, EPMOE_F32, logits, 2);
        const epmoei_round_rows_t round_rows = {
            .dst = rounded, .src = x, .dtype = config->dtype, .hidden = config->hidden, .num_rows = tokens};
        exchange_must(epmoei_round_rows_cpu(&round_rows));
        epmoe_forward_args_t args = EPMOE_FORWARD_ARGS_INIT;
        args.num_tokens = tokens, args.max_rank_tokens = round ? most : 0;
        void *forced_dev = exchange_put(forced, logits * 4), *residual = exchange_put(x, bytes);
        args.logits = forced_dev, args.residual = tokens ? residual : NULL;
        uint16_t *y = forward(coded, &args, x, bytes), *due = forward(plain, &args, rounded, bytes);
        for (int64_t i = 0; i < elements; i++) {
            if (y[i] == due[i]) continue;
            fprintf(stderr, "rank %d, %s, d %d, activations %d, %d of at most %d tokens: y[%lld,%lld] is %g, not %g\n",
                    rank, epmoe_transport_string(epmoe_comm_transport(comm)), config->hidden, config->fp8_activations,
                    tokens, most, (long long)(i / config->hidden), (long long)(i % config->hidden),
                    (double)epmoei_load(y, config->dtype, i), (double)epmoei_load(due, config->dtype, i));
            exchange_expect(false, "a layer with FP8 on the wire");
        }
        exchange_must(epmoe_comm_get_async_error(comm));
        epmoei_memory_free(CUDA, forced_dev);
        epmoei_memory_free(CUDA, residual);
        free(x), free(rounded), free(forced), free(y), free(due);
    }
    epmoe_layer_destroy(coded);
    epmoe_layer_destroy(plain);
}

static void layers(epmoe_comm_t *comm, uint64_t seed)
{
    static const int32_t hidden[] = {256, 1024, 144, 7168};
    static const int32_t tokens[] = {2, 40, MOST_TOKENS};
    testing_rng_t rng = testing_rng(seed + (uint64_t)rank);
    for (int32_t i = 0; i < 12; i++) {
        epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
        config.hidden = hidden[i % 4], config.intermediate = 128, config.num_experts = 10, config.top_k = 3;
        config.dtype = i % 5 == 4 ? EPMOE_F16 : EPMOE_BF16;
        config.max_tokens = tokens[i / 4];
        check(comm, &config, &rng, tokens[i / 4]);
        config.weight_format = EPMOE_FORMAT_FP8_BLOCK;
        for (int32_t act = -1; act <= 1; act++) {
            if (act == 1 && epmoei_cuda_tier() != 90) continue;
            config.fp8_activations = act;
            check(comm, &config, &rng, tokens[i / 4]);
        }
    }
}

int main(int argc, char **argv)
{
    exchange_start(&argc, &argv, &rank, &size);
    exchange_expect(argc >= 3, "arguments");
    exchange_expect(epmoei_device_count() > 0, epmoei_device_absence());
    exchange_must(epmoei_device_set(rank % epmoei_device_count()));
    exchange_must(epmoei_stream_create(&exchange_stream));
    for (int32_t i = 2; i < argc; i++) {
        epmoe_comm_t *comm = exchange_comm(CUDA, exchange_transport(argv[i]), 0);
        layers(comm, strtoull(argv[1], NULL, 10));
        epmoe_comm_destroy(comm);
    }
    epmoei_stream_destroy(exchange_stream);
    MPI_Finalize();
    printf("ok %d\n", rank);
    return 0;
}
