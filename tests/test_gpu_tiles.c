/* Weights of 16 bits that a layer brings into tiles: matrices whose experts are larger than the copy by way of which
 * that is done, memory that runs out on the way, and loads that fail. Small ones are test_gpu_weights'. */
#include "kernels/plain_tiles.h"
#include "moe/layer_weights.h"
#include "tests/gpu_layer_case.h"
#include "tools/tool_check.h"

#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>

TestSuite(gpu_tiles, .timeout = 300);

static bool has_tiles(void) { return !strcmp(epmoe_backend_arch(EPMOE_BACKEND_CUDA), "sm90"); }

static epmoe_layer_config_t small_config(int32_t d, int32_t f, int32_t experts, int32_t k, int32_t shared)
{
    epmoe_layer_config_t c = EPMOE_LAYER_CONFIG_INIT;
    c.hidden = d, c.intermediate = f, c.num_experts = experts, c.top_k = k;
    c.shared_intermediate = shared;
    c.dtype = EPMOE_BF16;
    c.max_tokens = 16;
    return c;
}

/* ---------------------------------------------------------------------------------------------------- large experts */

/* The pieces of 16 bytes of one expert's tiles, as kernels/plain_tiles.h has them in its words, against the CPU's rows,
 * gate and then up: a block of 128 stored rows is steps of 64 columns, of which a row's pieces are swizzled. */
static void expect_tiles(const char *what, const char *tiles, const char *rows, int64_t n, int64_t k, bool gated)
{
    int64_t wrong = 0, first = -1;
    for (int64_t stored = 0; stored < n; stored++) {
        const int64_t block = stored / 128, in_block = stored % 128, left = n - block * 128;
        const int64_t high = left < 128 ? left : 128;
        const int64_t output = stored / 16 * 8 + stored % 8, up = stored / 8 % 2;
        const int64_t from = gated ? up * (n / 2) + output : stored;
        for (int64_t piece = 0; piece < k / 8; piece++) {
            const int64_t step = piece / 8, place = (piece % 8) ^ (stored % 8);
            const int64_t at = block * 128 * k * 2 + ((step * high + in_block) * 8 + place) * 16;
            if (!memcmp(tiles + at, rows + (from * k + piece * 8) * 2, 16)) continue;
            if (wrong++ == 0) first = stored;
        }
    }
    cr_expect_eq(wrong, 0, "%s: %lld pieces are wrong, the first in stored row %lld", what, (long long)wrong,
                 (long long)first);
}

/* A matrix [experts,rows,cols] of the device's layer against the CPU's rows. */
static void expect_matrix(const char *what, const void *device, const void *cpu, int64_t experts, int64_t rows,
                          int64_t cols, bool gated, bool tiles)
{
    const int64_t bytes = rows * cols * 2;
    for (int64_t e = 0; e < experts; e++) {
        char *got = gpu_get_new((const char *)device + e * bytes, bytes);
        const char *expected = (const char *)cpu + e * bytes;
        if (tiles)
            expect_tiles(what, got, expected, rows, cols, gated);
        else
            for (int64_t r = 0; r < rows; r++) { /* a device has gate and up rows in turns */
                const int64_t from = gated ? r % 2 * (rows / 2) + r / 2 : r;
                cr_assert(gpu_same(what, got + r * cols * 2, expected + from * cols * 2, cols, 2, cols), "row %lld",
                          (long long)r);
            }
        free(got);
    }
}

/* An expert's gate and up rows take 132 MiB, its down rows 66: of 64 MiB at a time that is three parts and two, the
 * last ones of 256 rows; those of the shared expert end in another place. */
Test(gpu_tiles, experts_of_more_than_one_part)
{
    GPU_TEST_NEEDS_DEVICE();
    enum { kD = 8192, kF = 4224, kFs = 4160, kExperts = 2, kTokens = 5 };
    size_t available = 0, total = 0;
    if (cudaMemGetInfo(&available, &total) != cudaSuccess || available < (size_t)3 << 30)
        GPU_TEST_SKIP("fewer than 3 GiB are free on the device");
    epmoe_layer_config_t config = small_config(kD, kF, kExperts, 1, kFs);
    epmoe_comm_config_t comm_config = EPMOE_COMM_CONFIG_INIT;
    epmoe_comm_t *comm = NULL;
    epmoe_layer_t *layer = gpu_layer(&config), *cpu = NULL;
    comm_config.backend = EPMOE_BACKEND_CPU;
    cr_assert_not_null(layer);
    cr_assert_eq(epmoe_comm_create(NULL, &comm_config, &comm), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(epmoe_layer_create(&config, comm, &cpu), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(epmoe_layer_set_random_weights(layer, 11), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(epmoe_layer_set_random_weights(cpu, 11), EPMOE_OK, "%s", epmoe_last_error());
    const epmoei_packed_weights_t *g = &layer->weights, *c = &cpu->weights;
    const bool tiles = has_tiles();
    cr_expect_eq(g->formats.gate_up_pack.tiles, tiles);
    cr_expect_eq(g->formats.down_pack.tiles, tiles);
    cr_expect_eq(g->formats.shared_gate_up_pack.tiles, tiles);
    cr_expect_eq(g->formats.shared_down_pack.tiles, tiles);
    expect_matrix("gate_up", g->gate_up, c->gate_up, kExperts, 2 * kF, kD, true, tiles);
    expect_matrix("down", g->down, c->down, kExperts, kD, kF, false, tiles);
    expect_matrix("shared_gate_up", g->shared_gate_up, c->shared_gate_up, 1, 2 * kFs, kD, true, tiles);
    expect_matrix("shared_down", g->shared_down, c->shared_down, 1, kD, kFs, false, tiles);

    /* And what is computed with them, by the device's choice of experts. */
    const int64_t n = (int64_t)kTokens * kD;
    testing_rng_t rng = testing_rng(testing_seed());
    gpu_tokens_t tokens = gpu_tokens(&rng, &config, kTokens);
    epmoe_forward_args_t args = EPMOE_FORWARD_ARGS_INIT;
    args.num_tokens = kTokens, args.x = tokens.x, args.y = tokens.y, args.logits_out = tokens.logits_out;
    cr_assert_eq(epmoe_layer_forward_args(layer, &args, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert(gpu_wait());
    void *x = gpu_get_new(tokens.x, n * 2), *y = gpu_get_new(tokens.y, n * 2);
    float *logits = gpu_get_new(tokens.logits_out, kTokens * kExperts * 4);
    uint16_t *cpu_y = calloc((size_t)n, sizeof *cpu_y);
    double *expected = calloc((size_t)n, sizeof *expected);
    args.x = x, args.y = cpu_y, args.logits = logits, args.logits_out = NULL;
    cr_assert_eq(epmoe_layer_forward_args(cpu, &args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    for (int64_t i = 0; i < n; i++) expected[i] = (double)epmoei_load(cpu_y, EPMOE_BF16, i);
    const double error = testing_rel_error(y, EPMOE_BF16, expected, n);
    cr_expect(error <= 6e-3, "|y - cpu| / |cpu| is %g", error);
    cr_expect(gpu_tokens_free(&tokens));
    free(x), free(y), free(logits), free(cpu_y), free(expected);
    epmoe_layer_destroy(layer), epmoe_layer_destroy(cpu);
    epmoe_comm_destroy(comm);
}

/* ---------------------------------------------------------------------------------------------------------- failures
 */

enum { kD = 128, kF = 64, kExperts = 3, kTokens = 9 };

/* y of fixed tokens; false, and y as it was, where the layer says that it has no weights. */
static bool forward(epmoe_layer_t *layer, uint16_t y[kTokens * kD])
{
    testing_rng_t rng = testing_rng(5);
    gpu_tokens_t tokens = gpu_tokens(&rng, &layer->config, kTokens);
    const epmoe_status_t status = epmoe_layer_forward(layer, tokens.x, tokens.y, kTokens, gpu_stream());
    cr_assert(status == EPMOE_OK || status == EPMOE_ERROR_BAD_STATE, "%s", epmoe_last_error());
    cr_assert(gpu_wait());
    if (status == EPMOE_OK) gpu_get(y, tokens.y, kTokens * kD * 2);
    cr_assert(gpu_tokens_free(&tokens));
    return status == EPMOE_OK;
}

static bool same_y(const uint16_t *y, const uint16_t *expected)
{
    return gpu_same("y", y, expected, kTokens * kD, 2, kD);
}

/* Whichever allocation fails, the layer computes with the weights of before or says that it has none, and takes the new
 * ones when there is memory again. */
Test(gpu_tiles, no_memory_for_new_weights)
{
    GPU_TEST_NEEDS_DEVICE();
    testing_rng_t rng = testing_rng(testing_seed());
    epmoe_layer_config_t config = small_config(kD, kF, kExperts, 2, kF);
    oracle_model_t models[2] = {gpu_model(&rng, &config), gpu_model(&rng, &config)};
    static uint16_t of[2][kTokens * kD], y[kTokens * kD];
    int64_t live = epmoei_alloc_live();
    int32_t failures = 0, of_tiles = 0;
    bool whole = false;
    for (int m = 0; m < 2; m++) {
        epmoe_layer_t *layer = gpu_layer_with(&models[m]);
        cr_assert_not_null(layer);
        cr_expect_eq(layer->weights.formats.gate_up_pack.tiles, has_tiles());
        cr_assert(forward(layer, of[m]));
        epmoe_layer_destroy(layer);
    }
    cr_assert(memcmp(of[0], of[1], sizeof of[0]));
    for (int64_t n = 1; n < 200 && !whole; n++) {
        epmoe_layer_t *layer = gpu_layer_with(&models[0]);
        cr_assert_not_null(layer);
        const int64_t with_layer = epmoei_alloc_live();
        epmoei_alloc_fail_at(n);
        const epmoe_status_t status = epmoe_layer_set_weights(layer, &models[1].weights);
        epmoei_alloc_fail_at(0);
        whole = status == EPMOE_OK;
        if (!whole) {
            cr_expect_eq(status, EPMOE_ERROR_OUT_OF_MEMORY, "allocation %lld: %s", (long long)n,
                         epmoe_status_string(status));
            failures++;
            of_tiles += strstr(epmoe_last_error(), "bringing weights into tiles") != NULL;
            cr_expect_leq(epmoei_alloc_live(), with_layer, "allocation %lld leaves something behind", (long long)n);
            if (forward(layer, y)) cr_expect(same_y(y, of[0]), "allocation %lld", (long long)n);
            cr_assert_eq(epmoe_layer_set_weights(layer, &models[1].weights), EPMOE_OK, "%s", epmoe_last_error());
        }
        cr_assert(forward(layer, y));
        cr_expect(same_y(y, of[1]), "after allocation %lld", (long long)n);
        epmoe_layer_destroy(layer);
        cr_assert_eq(epmoei_alloc_live(), live, "allocation %lld: %lld are left", (long long)n,
                     (long long)(epmoei_alloc_live() - live));
    }
    cr_expect(whole);
    cr_expect(failures >= 1 + has_tiles(), "only %d allocations", failures);
    if (has_tiles()) cr_expect_eq(of_tiles, 1, "%d of them for tiles", of_tiles);
    oracle_model_free(&models[0]), oracle_model_free(&models[1]);
}

/* A failed load takes the weights away, whatever was there before, and the next one has the first one's bits. */
Test(gpu_tiles, loads_that_fail)
{
    GPU_TEST_NEEDS_DEVICE();
    epmoe_checkpoint_t *checkpoint = NULL, *other = NULL;
    epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
    cr_assert_eq(epmoe_checkpoint_open(EPMOE_TEST_DATA "/golden/mixtral", &checkpoint), EPMOE_OK, "%s",
                 epmoe_last_error());
    cr_assert_eq(epmoe_checkpoint_open(EPMOE_TEST_DATA "/golden/qwen3_moe", &other), EPMOE_OK, "%s",
                 epmoe_last_error());
    cr_assert_eq(epmoe_checkpoint_layer_config(checkpoint, 0, &config), EPMOE_OK, "%s", epmoe_last_error());
    config.dtype = EPMOE_BF16, config.max_tokens = kTokens;
    const int64_t elements = (int64_t)kTokens * config.hidden;
    testing_rng_t rng = testing_rng(5);
    gpu_tokens_t tokens = gpu_tokens(&rng, &config, kTokens);
    epmoe_layer_t *layer = gpu_layer(&config);
    cr_assert_not_null(layer);
    int64_t loaded = 0;
    void *first = NULL;
    bool whole = false;
    int32_t failures = 0;
    for (int64_t n = 0; n < 300 && !whole; n++) { /* the first load is whole */
        epmoei_alloc_fail_at(n);
        const epmoe_status_t status = epmoe_layer_load_checkpoint(layer, checkpoint, 0, NULL);
        epmoei_alloc_fail_at(0);
        whole = n > 0 && status == EPMOE_OK;
        if (status != EPMOE_OK) {
            failures++;
            cr_expect(n > 0 && status == EPMOE_ERROR_OUT_OF_MEMORY, "allocation %lld: %s", (long long)n,
                      epmoe_last_error());
            cr_expect_eq(epmoe_layer_forward(layer, tokens.x, tokens.y, kTokens, gpu_stream()), EPMOE_ERROR_BAD_STATE);
            cr_expect_leq(epmoei_alloc_live(), loaded, "allocation %lld leaves something behind", (long long)n);
            continue;
        }
        gpu_poison(tokens.y, elements * 2);
        cr_assert_eq(epmoe_layer_forward(layer, tokens.x, tokens.y, kTokens, gpu_stream()), EPMOE_OK, "%s",
                     epmoe_last_error());
        cr_assert(gpu_wait());
        void *y = gpu_get_new(tokens.y, elements * 2);
        if (first) cr_expect(gpu_same("y", y, first, elements, 2, config.hidden), "allocation %lld", (long long)n);
        if (first)
            free(y);
        else
            first = y, loaded = epmoei_alloc_live();
    }
    cr_expect(whole && failures >= 1, "%d allocations", failures);
    cr_expect_eq(epmoe_layer_load_checkpoint(layer, other, 0, NULL), EPMOE_ERROR_MISMATCH, "%s", epmoe_last_error());
    cr_expect_eq(epmoe_layer_load_checkpoint(layer, checkpoint, 99, NULL), EPMOE_ERROR_INVALID_ARGUMENT, "%s",
                 epmoe_last_error());
    cr_expect_eq(epmoe_layer_forward(layer, tokens.x, tokens.y, kTokens, gpu_stream()), EPMOE_ERROR_BAD_STATE);
    cr_assert_eq(epmoe_layer_load_checkpoint(layer, checkpoint, 0, NULL), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(epmoe_layer_forward(layer, tokens.x, tokens.y, kTokens, gpu_stream()), EPMOE_OK, "%s",
                 epmoe_last_error());
    cr_assert(gpu_wait());
    void *y = gpu_get_new(tokens.y, elements * 2);
    cr_expect(gpu_same("y", y, first, elements, 2, config.hidden), "after loads that were refused");
    free(first), free(y);
    cr_expect(gpu_tokens_free(&tokens));
    epmoe_layer_destroy(layer);
    epmoe_checkpoint_close(checkpoint), epmoe_checkpoint_close(other);
}
