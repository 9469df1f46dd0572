/* A layer on a device whose new weights do not come: memory that runs out while they are set, copied, brought into
 * tiles or loaded, and checkpoints that are refused. */
#include "moe/checkpoint.h"
#include "moe/layer.h"
#include "tests/gpu_layer_case.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>

TestSuite(gpu_failures, .timeout = 300);

static bool has_tiles(void) { return !strcmp(epmoe_backend_arch(EPMOE_BACKEND_CUDA), "sm90"); }

/* Sizes that become tiles. */
enum { kD = 128, kF = 64, kExperts = 3, kTokens = 9 };

static epmoe_layer_config_t tiled_config(void)
{
    epmoe_layer_config_t c = EPMOE_LAYER_CONFIG_INIT;
    c.hidden = kD, c.intermediate = kF, c.num_experts = kExperts, c.top_k = 2;
    c.shared_intermediate = kF;
    c.dtype = EPMOE_BF16;
    c.max_tokens = kTokens;
    return c;
}

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
Test(gpu_failures, no_memory_for_new_weights)
{
    GPU_TEST_NEEDS_DEVICE();
    testing_rng_t rng = testing_rng(testing_seed());
    epmoe_layer_config_t config = tiled_config();
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
Test(gpu_failures, loads_that_fail)
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
