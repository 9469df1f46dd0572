/* Rows in FP8 on a device: the CPU's bits; and a layer of one rank that gives its experts such rows. */
#include "tests/gpu_layer_case.h"
#include "tests/wire_case.h"

#include <criterion/criterion.h>
#include <cuda_runtime_api.h>

TestSuite(gpu_wire, .timeout = 300);

static const epmoe_dtype_t dtypes[] = {EPMOE_BF16, EPMOE_F16, EPMOE_F32};

static void expect_rows(const wire_case_t *c, const char *what, const void *device, const void *host)
{
    int64_t elements = (int64_t)c->rows * c->hidden, size = epmoe_dtype_size(c->dtype);
    void *got = gpu_get_new(device, elements * size);
    cr_assert(gpu_guards_intact(device), "%s wrote past its rows", what);
    for (int64_t i = 0; i < elements; i++)
        cr_assert(wire_same(got, host, c->dtype, i), "%s: [%lld,%lld] of %s, d %d", what, (long long)(i / c->hidden),
                  (long long)(i % c->hidden), epmoe_dtype_string(c->dtype), c->hidden);
    free(got);
}

static void check(const wire_case_t *c, bool by_device)
{
    int64_t d = c->hidden, size = epmoe_dtype_size(c->dtype), bytes = c->rows * d * size;
    int64_t wire_bytes = c->rows * epmoei_coded_row_bytes(d);
    void *x = gpu_copy_of(c->x, c->sources * d * size), *index = gpu_copy_of(c->index, c->rows * 4);
    char *wire = testing_buffer(wire_bytes, 0), *rows = testing_buffer(bytes, 0);
    char *wire_dev = gpu_buffer(wire_bytes, 0), *rows_dev = gpu_buffer(bytes, 0);
    const int32_t counts[3] = {c->rows, c->gap_at, c->gap};
    int32_t *counts_dev = gpu_copy_of(counts, sizeof counts);

    epmoei_encode_rows_t encode = {.src = c->x, .dtype = c->dtype, .hidden = c->hidden, .index = c->index};
    encode.dst = epmoei_coded_rows_packed(wire, d);
    encode.num_rows = c->rows - c->gap, encode.gap_at = c->gap_at, encode.gap = c->gap;
    epmoei_encode_rows_t encode_dev = encode;
    encode_dev.dst = epmoei_coded_rows_packed(wire_dev, d), encode_dev.src = x, encode_dev.index = index;
    cr_assert_eq(epmoei_encode_rows_cpu(&encode), EPMOE_OK);
    cr_assert_eq(epmoei_encode_rows(EPMOE_BACKEND_CUDA, &encode_dev, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
    char *got = gpu_get_new(wire_dev, wire_bytes);
    cr_assert(gpu_guards_intact(wire_dev));
    cr_assert(gpu_same("codes and scales", got, wire, wire_bytes, 1, epmoei_coded_row_bytes(d)), "%s, d %d",
              epmoe_dtype_string(c->dtype), c->hidden);
    free(got);

    /* Rows of the gap too, which are to be skipped. */
    encode.num_rows = encode_dev.num_rows = c->rows, encode.gap = encode_dev.gap = 0;
    cr_assert_eq(epmoei_encode_rows_cpu(&encode), EPMOE_OK);
    cr_assert_eq(epmoei_encode_rows(EPMOE_BACKEND_CUDA, &encode_dev, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
    epmoei_decode_rows_t decode = {.dst = rows, .dtype = c->dtype, .hidden = c->hidden, .src = encode.dst};
    decode.num_rows = c->rows, decode.gap_at = c->gap_at, decode.gap = c->gap;
    epmoei_decode_rows_t decode_dev = decode;
    decode_dev.dst = rows_dev, decode_dev.src = encode_dev.dst;
    if (by_device) {
        decode_dev.num_rows = c->rows + 50, decode_dev.gap_at = decode_dev.gap = 0;
        decode_dev.num_rows_dev = counts_dev, decode_dev.gap_dev = counts_dev + 1;
    }
    cr_assert_eq(epmoei_decode_rows_cpu(&decode), EPMOE_OK);
    cr_assert_eq(epmoei_decode_rows(EPMOE_BACKEND_CUDA, &decode_dev, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
    expect_rows(c, "decode", rows_dev, rows);

    epmoei_round_rows_t round = {
        .dst = rows, .src = c->x, .dtype = c->dtype, .hidden = c->hidden, .index = c->index, .num_rows = c->rows};
    epmoei_round_rows_t round_dev = round;
    round_dev.dst = rows_dev, round_dev.src = x, round_dev.index = index;
    if (by_device) round_dev.num_rows = c->rows + 50, round_dev.num_rows_dev = counts_dev;
    cr_assert_eq(epmoei_round_rows_cpu(&round), EPMOE_OK);
    cr_assert_eq(epmoei_round_rows(EPMOE_BACKEND_CUDA, &round_dev, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
    expect_rows(c, "round", rows_dev, rows);
    gpu_buffer_free(x), gpu_buffer_free(index), gpu_buffer_free(wire_dev), gpu_buffer_free(rows_dev);
    gpu_buffer_free(counts_dev);
    testing_buffer_free(wire), testing_buffer_free(rows);
}

Test(gpu_wire, gives_the_bits_of_the_cpu)
{
    GPU_TEST_NEEDS_DEVICE();
    testing_rng_t rng = testing_rng(testing_seed());
    for (int32_t round = 0; round < 4; round++)
        for (int32_t w = 0; w < WIRE_WIDTHS; w++)
            for (int32_t t = 0; t < 3; t++) {
                wire_case_t c = wire_case(&rng, wire_widths[w], dtypes[t]);
                check(&c, round % 2);
                wire_case_free(&c);
            }
}

/* ---------------------------------------------------------------------------------------------------------- layer */

static epmoe_layer_t *make_layer(const epmoe_layer_config_t *config, epmoe_dtype_t wire)
{
    epmoe_layer_config_t own = *config;
    own.wire_dtype = wire;
    epmoe_layer_t *layer = gpu_layer(&own);
    cr_assert_not_null(layer);
    cr_assert_eq(epmoe_layer_set_random_weights(layer, 11), EPMOE_OK, "%s", epmoe_last_error());
    return layer;
}

/* In a graph, whose bound is above the number of tokens. */
static void replay(epmoe_layer_t *layer, const epmoe_forward_args_t *args)
{
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    cr_assert_eq(cudaStreamBeginCapture(gpu_stream(), cudaStreamCaptureModeGlobal), cudaSuccess);
    epmoei_alloc_fail_at(1);
    epmoe_status_t status = epmoe_layer_forward_args(layer, args, gpu_stream());
    epmoei_alloc_fail_at(0);
    cr_assert_eq(cudaStreamEndCapture(gpu_stream(), &graph), cudaSuccess);
    cr_assert_eq(status, EPMOE_OK, "forward in a capture: %s", epmoe_last_error());
    cr_assert_eq(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
    cr_assert_eq(cudaGraphLaunch(exec, gpu_stream()), cudaSuccess);
    cr_assert(gpu_wait());
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
}

/* The layer on x is the plain one on what is left of x, bit for bit. Logits are given: the router takes x as it is. */
static void check_layer(testing_rng_t *rng, const epmoe_layer_config_t *config, int32_t num_tokens)
{
    int64_t elements = (int64_t)num_tokens * config->hidden, bytes = 2 * elements;
    epmoe_layer_t *coded = make_layer(config, EPMOE_F8_E4M3), *plain = make_layer(config, EPMOE_DTYPE_NONE);
    gpu_tokens_t tokens = gpu_tokens(rng, config, num_tokens);
    uint16_t *x = gpu_get_new(tokens.x, bytes), *rounded = malloc((size_t)bytes);
    const epmoei_round_rows_t round = {
        .dst = rounded, .src = x, .dtype = config->dtype, .hidden = config->hidden, .num_rows = num_tokens};
    int32_t *tokens_dev = gpu_copy_of(&num_tokens, 4);
    epmoe_forward_args_t args = EPMOE_FORWARD_ARGS_INIT;
    cr_assert_eq(epmoei_round_rows_cpu(&round), EPMOE_OK);
    args.num_tokens = num_tokens, args.x = tokens.x, args.y = tokens.y, args.residual = tokens.residual;
    args.logits = tokens.logits;
    cr_assert_eq(epmoe_layer_forward_args(coded, &args, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert(gpu_wait());
    void *y = gpu_get_new(tokens.y, bytes);
    gpu_poison(tokens.y, bytes);
    args.num_tokens_dev = tokens_dev;
    replay(coded, &args);
    void *again = gpu_get_new(tokens.y, bytes);
    args.num_tokens_dev = NULL;
    gpu_poison(tokens.y, bytes);
    gpu_put(tokens.x, rounded, bytes);
    cr_assert_eq(epmoe_layer_forward_args(plain, &args, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert(gpu_wait());
    void *due = gpu_get_new(tokens.y, bytes);
    cr_expect(gpu_same("y", y, due, elements, 2, config->hidden), "%d tokens, %s", num_tokens, gpu_config_text(config));
    cr_expect(gpu_same("a replay's y", again, due, elements, 2, config->hidden), "%d tokens, %s", num_tokens,
              gpu_config_text(config));
    free(x), free(rounded), free(y), free(again), free(due);
    gpu_buffer_free(tokens_dev);
    cr_expect(gpu_tokens_free(&tokens));
    epmoe_layer_destroy(coded), epmoe_layer_destroy(plain);
}

Test(gpu_wire, a_layer_of_one_rank_is_the_plain_one_on_rounded_x)
{
    GPU_TEST_NEEDS_DEVICE();
    static const int32_t tokens[] = {1, 7, 40, 300};
    static const int32_t hidden[] = {64, 128, 200, 1024};
    testing_rng_t rng = testing_rng(testing_seed());
    for (int32_t i = 0; i < 16; i++) {
        epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
        config.hidden = hidden[i % 4], config.intermediate = 128, config.num_experts = 16, config.top_k = 4;
        config.dtype = i % 3 ? EPMOE_BF16 : EPMOE_F16;
        if (i % 2) config.weight_format = EPMOE_FORMAT_FP8_BLOCK, config.hidden = 256;
        config.max_tokens = tokens[i / 4];
        check_layer(&rng, &config, tokens[i / 4]);
    }
}
