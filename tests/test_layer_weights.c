/* Weights of a layer: copies, borrowed matrices, replacements, the random generator; what memory it all takes. */
#include "moe/layer_weights.h"
#include "kernels/random_weights.h"
#include "comm/ep_plan.h"
#include "tests/layer_case.h"

#include <criterion/criterion.h>
#include <malloc.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { kD = 26, kF = 18, kE = 7, kK = 3, kFs = 10, kTokens = 12 };

static epmoe_layer_config_t full_config(void)
{
    epmoe_layer_config_t c = EPMOE_LAYER_CONFIG_INIT;
    c.hidden = kD, c.intermediate = kF, c.num_experts = kE, c.top_k = kK;
    c.router_has_bias = c.has_selection_bias = c.expert_has_bias = 1;
    c.shared_intermediate = kFs, c.shared_gated = 1;
    c.dtype = EPMOE_F32;
    c.max_tokens = kTokens;
    return c;
}

static const oracle_formats_t kMixed = {EPMOE_F32, EPMOE_BF16, EPMOE_F32,
                                        EPMOE_F16, EPMOE_BF16, EPMOE_LAYOUT_GATE_FIRST};

static epmoe_layer_t *create(const epmoe_layer_config_t *config)
{
    epmoe_layer_t *layer = NULL;
    cr_assert_eq(epmoe_layer_create(config, NULL, &layer), EPMOE_OK, "%s", epmoe_last_error());
    return layer;
}

/* y of one forward over fixed tokens. */
static void forward(epmoe_layer_t *layer, float y[kTokens * kD])
{
    testing_rng_t rng = testing_rng(5);
    float x[kTokens * kD];
    testing_fill_normal(&rng, x, EPMOE_F32, kTokens * kD, 1);
    cr_assert_eq(epmoe_layer_forward(layer, x, y, kTokens, NULL), EPMOE_OK, "%s", epmoe_last_error());
}

static void overwrite(const void *data, int64_t bytes) { memset((void *)(uintptr_t)data, 0x3E, (size_t)bytes); }

/* The rows of a gate-first [experts,2f,d] (d = 1: a bias) interleaved. */
static void *interleave(const void *data, int64_t experts, int64_t f, int64_t row_bytes)
{
    char *to = malloc((size_t)(experts * 2 * f * row_bytes));
    for (int64_t e = 0; e < experts; e++)
        for (int64_t i = 0; i < 2 * f; i++) {
            int64_t target = i < f ? 2 * i : 2 * (i - f) + 1;
            memcpy(to + (e * 2 * f + target) * row_bytes, (const char *)data + (e * 2 * f + i) * row_bytes,
                   (size_t)row_bytes);
        }
    return to;
}

Test(layer_weights, every_layout_gives_the_same_bits)
{
    testing_rng_t rng = testing_rng(testing_seed());
    epmoe_layer_config_t config = full_config();
    oracle_model_t model = oracle_model(&rng, &config, &kMixed);
    epmoe_layer_t *layer = create(&config);
    float first[kTokens * kD], y[kTokens * kD];
    cr_assert_eq(epmoe_layer_set_weights(layer, &model.weights), EPMOE_OK, "%s", epmoe_last_error());
    forward(layer, first);

    epmoe_layer_weights_t weights = model.weights;
    weights.layout = EPMOE_LAYOUT_PACKED;
    cr_assert_eq(epmoe_layer_set_weights(layer, &weights), EPMOE_OK, "%s", epmoe_last_error());
    forward(layer, y);
    cr_assert_arr_eq(y, first, sizeof y, "packed");

    weights.layout = EPMOE_LAYOUT_INTERLEAVED;
    weights.gate_up.data = interleave(model.weights.gate_up.data, kE, kF, kD * 2);
    weights.gate_up_bias = interleave(model.weights.gate_up_bias, kE, kF, 4);
    weights.shared_gate_up.data = interleave(model.weights.shared_gate_up.data, 1, kFs, kD * 2);
    cr_assert_eq(epmoe_layer_set_weights(layer, &weights), EPMOE_OK, "%s", epmoe_last_error());
    free((void *)(uintptr_t)weights.gate_up.data), free((void *)(uintptr_t)weights.gate_up_bias);
    free((void *)(uintptr_t)weights.shared_gate_up.data);
    forward(layer, y);
    cr_assert_arr_eq(y, first, sizeof y, "interleaved");
    epmoe_layer_destroy(layer);
    oracle_model_free(&model);
}

/* Arrays at addresses that are no multiple of anything but the element. */
Test(layer_weights, unaligned_arrays)
{
    testing_rng_t rng = testing_rng(testing_seed());
    epmoe_layer_config_t config = full_config();
    oracle_model_t model = oracle_model(&rng, &config, &kMixed);
    epmoe_layer_t *layer = create(&config);
    float first[kTokens * kD], y[kTokens * kD];
    cr_assert_eq(epmoe_layer_set_weights(layer, &model.weights), EPMOE_OK);
    forward(layer, first);
    epmoe_layer_weights_t weights = model.weights;
    char *gate_up = testing_buffer(kE * 2 * kF * kD * 2, 2), *router = testing_buffer(kE * kD * 4, 4);
    memcpy(gate_up, weights.gate_up.data, kE * 2 * kF * kD * 2);
    memcpy(router, weights.router, kE * kD * 4);
    weights.gate_up.data = gate_up, weights.router = router;
    for (int32_t packed = 0; packed < 2; packed++) {
        weights.layout = packed ? EPMOE_LAYOUT_PACKED : EPMOE_LAYOUT_GATE_FIRST;
        cr_assert_eq(epmoe_layer_set_weights(layer, &weights), EPMOE_OK);
        forward(layer, y);
        cr_assert_arr_eq(y, first, sizeof y);
    }
    epmoe_layer_destroy(layer);
    testing_buffer_free(gate_up), testing_buffer_free(router);
    oracle_model_free(&model);
}

/* GATE_FIRST copies everything; PACKED borrows the four matrices and copies the rest. */
Test(layer_weights, copies_and_borrowed_matrices)
{
    testing_rng_t rng = testing_rng(testing_seed());
    epmoe_layer_config_t config = full_config();
    float first[kTokens * kD], y[kTokens * kD];
    for (int32_t packed = 0; packed < 2; packed++) {
        oracle_model_t model = oracle_model(&rng, &config, &kMixed);
        epmoe_layer_weights_t *w = &model.weights;
        w->layout = packed ? EPMOE_LAYOUT_PACKED : EPMOE_LAYOUT_GATE_FIRST;
        epmoe_layer_t *layer = create(&config);
        cr_assert_eq(epmoe_layer_set_weights(layer, w), EPMOE_OK, "%s", epmoe_last_error());
        forward(layer, first);
        cr_assert_eq(layer->weights.gate_up == w->gate_up.data, packed);
        cr_assert_eq(layer->weights.down == w->down.data, packed);
        cr_assert_eq(layer->weights.shared_gate_up == w->shared_gate_up.data, packed);
        cr_assert_eq(layer->weights.shared_down == w->shared_down.data, packed);

        overwrite(w->router, kE * kD * 4), overwrite(w->router_bias, kE * 4), overwrite(w->selection_bias, kE * 4);
        overwrite(w->gate_up_bias, kE * 2 * kF * 4), overwrite(w->down_bias, kE * kD * 4);
        overwrite(w->shared_gate, kD * 4);
        forward(layer, y);
        cr_assert_arr_eq(y, first, sizeof y, "layout %d", (int)w->layout);
        const struct {
            const void *data;
            int64_t bytes;
        } matrices[] = {{w->gate_up.data, kE * 2 * kF * kD * 2},
                        {w->down.data, kE * kD * kF * 4},
                        {w->shared_gate_up.data, 2 * kFs * kD * 2},
                        {w->shared_down.data, kD * kFs * 2}};
        for (size_t i = 0; i < sizeof matrices / sizeof matrices[0]; i++) {
            memcpy(first, y, sizeof y);
            overwrite(matrices[i].data, matrices[i].bytes);
            forward(layer, y);
            cr_assert_eq(memcmp(y, first, sizeof y) != 0, packed, "matrix %zu", i);
        }
        epmoe_layer_destroy(layer);
        oracle_model_free(&model);
    }
}

Test(layer_weights, bad_weights_leave_the_old_ones)
{
    testing_rng_t rng = testing_rng(testing_seed());
    epmoe_layer_config_t config = full_config();
    oracle_model_t model = oracle_model(&rng, &config, &kMixed);
    epmoe_layer_t *layer = create(&config);
    float first[kTokens * kD], y[kTokens * kD];
    cr_assert_eq(epmoe_layer_set_weights(layer, &model.weights), EPMOE_OK);
    forward(layer, first);
#define REFUSED(change, expected_status, word)                                                                         \
    do {                                                                                                               \
        epmoe_layer_weights_t w = model.weights;                                                                       \
        change;                                                                                                        \
        epmoe_set_last_error(EPMOE_OK, "");                                                                            \
        epmoe_status_t status = epmoe_layer_set_weights(layer, &w);                                                    \
        cr_expect_eq(status, expected_status, "%s gave %s", #change, epmoe_status_string(status));                     \
        cr_expect(strstr(epmoe_last_error(), word), "%s: '%s' lacks '%s'", #change, epmoe_last_error(), word);         \
        forward(layer, y);                                                                                             \
        cr_expect_arr_eq(y, first, sizeof y, #change);                                                                 \
    } while (0)
    REFUSED(w.router = NULL, EPMOE_ERROR_INVALID_ARGUMENT, "router is missing");
    REFUSED(w.router_bias = NULL, EPMOE_ERROR_INVALID_ARGUMENT, "router bias is missing");
    REFUSED(w.selection_bias = NULL, EPMOE_ERROR_INVALID_ARGUMENT, "selection bias is missing");
    REFUSED(w.gate_up.data = NULL, EPMOE_ERROR_INVALID_ARGUMENT, "expert 0 gate is missing");
    REFUSED(w.down.data = NULL, EPMOE_ERROR_INVALID_ARGUMENT, "expert 0 down is missing");
    REFUSED(w.gate_up_bias = NULL, EPMOE_ERROR_INVALID_ARGUMENT, "gate bias is missing");
    REFUSED(w.down_bias = NULL, EPMOE_ERROR_INVALID_ARGUMENT, "down bias is missing");
    REFUSED(w.shared_gate_up.data = NULL, EPMOE_ERROR_INVALID_ARGUMENT, "shared expert gate is missing");
    REFUSED(w.shared_down.data = NULL, EPMOE_ERROR_INVALID_ARGUMENT, "shared expert down is missing");
    REFUSED(w.shared_gate = NULL, EPMOE_ERROR_INVALID_ARGUMENT, "shared expert gate is missing");
    REFUSED(w.router_dtype = EPMOE_DTYPE_NONE, EPMOE_ERROR_INVALID_ARGUMENT, "router_dtype is 0");
    REFUSED(w.router_dtype = EPMOE_I32, EPMOE_ERROR_INVALID_ARGUMENT, "router_dtype is 7");
    REFUSED(w.layout = (epmoe_layout_t)3, EPMOE_ERROR_INVALID_ARGUMENT, "layout is 3");
    REFUSED(w.gate_up.format = EPMOE_FORMAT_NONE, EPMOE_ERROR_INVALID_ARGUMENT, "gate_up.format is 0");
    REFUSED(w.down.format = EPMOE_FORMAT_FP8_BLOCK, EPMOE_ERROR_INVALID_ARGUMENT, "weights.down.scales is NULL");
    REFUSED(w.shared_gate_up.format = EPMOE_FORMAT_AWQ, EPMOE_ERROR_INVALID_ARGUMENT, "shared_gate_up.scales");
    REFUSED(w.shared_down.format = (epmoe_format_t)50, EPMOE_ERROR_INVALID_ARGUMENT, "shared_down.format is 50");
    REFUSED(w.gate_up.storage = EPMOE_STORAGE_TILES, EPMOE_ERROR_NOT_SUPPORTED, "weights.gate_up.storage is 1");
    REFUSED(w.shared_down.storage = (epmoe_storage_t)7, EPMOE_ERROR_INVALID_ARGUMENT,
            "weights.shared_down.storage is 7");
    REFUSED(w.struct_size = 3, EPMOE_ERROR_INVALID_ARGUMENT, "struct_size is 3");
#undef REFUSED
    cr_expect_eq(epmoe_layer_set_weights(layer, NULL), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_expect_eq(epmoe_layer_set_weights(NULL, &model.weights), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_expect_eq(epmoe_layer_set_random_weights(NULL, 1), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_expect_eq(epmoe_layer_load_checkpoint(NULL, NULL, 0, NULL), EPMOE_ERROR_INVALID_ARGUMENT);
    forward(layer, y);
    cr_assert_arr_eq(y, first, sizeof y);
    epmoe_layer_destroy(layer);
    oracle_model_free(&model);
}

/* A failed load takes the weights away, whatever was there before. */
Test(layer_weights, none_are_left_after_a_failed_load)
{
    epmoe_layer_config_t config = full_config();
    epmoe_layer_t *layer = create(&config);
    float x[kD] = {0}, y[kD];
    cr_assert_eq(epmoe_layer_set_random_weights(layer, 1), EPMOE_OK);
    cr_assert_eq(epmoe_layer_load_checkpoint(layer, NULL, 0, NULL), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert(strstr(epmoe_last_error(), "checkpoint is NULL"), "%s", epmoe_last_error());
    cr_assert_eq(epmoe_layer_forward(layer, x, y, 1, NULL), EPMOE_ERROR_BAD_STATE);
    cr_assert_eq(epmoe_layer_set_random_weights(layer, 1), EPMOE_OK);
    cr_assert_eq(epmoe_layer_forward(layer, x, y, 1, NULL), EPMOE_OK);
    epmoe_layer_destroy(layer);
}

/* MXFP4 has a scale for every 32 columns. */
Test(layer_weights, random_weights_in_a_format_that_does_not_fit)
{
    static const struct {
        int32_t hidden, intermediate, shared;
    } wrong[] = {{72, 64, 32}, {64, 40, 32}, {64, 64, 16}};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
        config.hidden = wrong[i].hidden, config.intermediate = wrong[i].intermediate;
        config.shared_intermediate = wrong[i].shared;
        config.num_experts = 4, config.top_k = 2, config.max_tokens = 1, config.dtype = EPMOE_F32;
        config.weight_format = EPMOE_FORMAT_MXFP4;
        epmoe_layer_t *layer = create(&config);
        char expected[128];
        snprintf(expected, sizeof expected, "mxfp4 with hidden %d, intermediate %d, shared_intermediate %d",
                 wrong[i].hidden, wrong[i].intermediate, wrong[i].shared);
        cr_assert_eq(epmoe_layer_set_random_weights(layer, 1), EPMOE_ERROR_NOT_SUPPORTED);
        cr_assert(strstr(epmoe_last_error(), expected), "%s", epmoe_last_error());
        cr_assert(strstr(epmoe_last_error(), "multiples of 32"), "%s", epmoe_last_error());
        cr_assert(!layer->has_weights);
        epmoe_layer_destroy(layer);
    }
}

/* Each element is a function of (seed, tensor, global expert, element) alone: filled piece by piece, in any order, by a
 * rank that owns this expert or by any other. */
Test(layer_weights, random_weights_are_those_of_the_generator)
{
    testing_rng_t rng = testing_rng(testing_seed());
    const epmoe_format_t formats[] = {EPMOE_FORMAT_F32, EPMOE_FORMAT_BF16, EPMOE_FORMAT_F16};
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++) {
        epmoe_layer_config_t config = full_config();
        config.weight_format = formats[i];
        epmoe_dtype_t type = epmoei_dtype_of_format(formats[i]);
        epmoe_layer_t *layer = create(&config);
        const uint64_t seed = testing_next(&rng);
        cr_assert_eq(epmoe_layer_set_random_weights(layer, seed), EPMOE_OK, "%s", epmoe_last_error());
        const epmoei_packed_weights_t *w = &layer->weights;
        const struct {
            const void *data;
            epmoe_dtype_t dtype;
            epmoei_random_tensor_t tensor;
            int64_t n, stride; /* elements per expert; from expert to expert, 0 = no expert's */
            double deviation;
        } tensors[] = {
            {w->router, type, EPMOEI_RANDOM_ROUTER, kE * kD, 0, 1 / sqrt(kD)},
            {w->router_bias, EPMOE_F32, EPMOEI_RANDOM_ROUTER_BIAS, kE, 0, 0.1},
            {w->selection_bias, EPMOE_F32, EPMOEI_RANDOM_SELECTION_BIAS, kE, 0, 0.02},
            {w->gate_up, type, EPMOEI_RANDOM_GATE, kF * kD, 2 * kF * kD, 1 / sqrt(kD)},
            {(char *)w->gate_up + kF * kD * epmoe_dtype_size(type), type, EPMOEI_RANDOM_UP, kF * kD, 2 * kF * kD,
             1 / sqrt(kD)},
            {w->down, type, EPMOEI_RANDOM_DOWN, kD * kF, kD * kF, 1 / sqrt(kF)},
            {w->gate_up_bias, EPMOE_F32, EPMOEI_RANDOM_GATE_BIAS, kF, 2 * kF, 0.1},
            {w->gate_up_bias + kF, EPMOE_F32, EPMOEI_RANDOM_UP_BIAS, kF, 2 * kF, 0.1},
            {w->down_bias, EPMOE_F32, EPMOEI_RANDOM_DOWN_BIAS, kD, kD, 0.1},
            {w->shared_gate_up, type, EPMOEI_RANDOM_SHARED_GATE_PROJ, kFs * kD, 0, 1 / sqrt(kD)},
            {(char *)w->shared_gate_up + kFs * kD * epmoe_dtype_size(type), type, EPMOEI_RANDOM_SHARED_UP, kFs * kD, 0,
             1 / sqrt(kD)},
            {w->shared_down, type, EPMOEI_RANDOM_SHARED_DOWN, kD * kFs, 0, 1 / sqrt(kFs)},
            {w->shared_gate, type, EPMOEI_RANDOM_SHARED_GATE, kD, 0, 1 / sqrt(kD)},
        };
        for (size_t t = 0; t < sizeof tensors / sizeof tensors[0]; t++) {
            int64_t size = epmoe_dtype_size(tensors[t].dtype), n = tensors[t].n;
            char *expected = malloc((size_t)(n * size));
            for (int32_t e = 0; e < (tensors[t].stride ? kE : 1); e++) {
                for (int64_t first = 0; first < n;) {
                    int64_t count = epmoei_min64(n - first, testing_range(&rng, 1, 100));
                    epmoei_random_fill(expected + first * size, tensors[t].dtype, seed, tensors[t].tensor, e, first,
                                       count, (float)tensors[t].deviation);
                    first += count;
                }
                cr_assert_arr_eq((const char *)tensors[t].data + e * tensors[t].stride * size, expected,
                                 (size_t)(n * size), "tensor %zu of expert %d", t, e);
            }
            free(expected);
        }
        epmoe_layer_destroy(layer);
    }
}

static double correlation(const float *a, const float *b, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += (double)a[i] * (double)b[i];
    return sum / (double)n;
}

/* Mean 0, deviation 1, no correlation between neighbours, rows, experts, tensors or seeds: within 6 standard errors. */
Test(layer_weights, the_generator_is_bell_shaped)
{
    enum { kN = 1 << 18 };
    float *a = malloc((kN + 4096) * 4), *b = malloc(kN * 4);
    uint64_t seed = testing_seed();
    const double error = 6 / sqrt(kN);
    epmoei_random_fill(a, EPMOE_F32, seed, EPMOEI_RANDOM_GATE, 3, 0, kN + 4096, 1);
    double mean = 0, fourth = 0, most = 0;
    for (int32_t i = 0; i < kN; i++) {
        mean += (double)a[i] / kN;
        fourth += pow((double)a[i], 4) / kN;
        most = fmax(most, fabs((double)a[i]));
    }
    cr_assert(fabs(mean) < error, "mean %g", mean);
    cr_assert(fabs(correlation(a, a, kN) - 1) < 1.5 * error, "variance %g", correlation(a, a, kN));
    /* Four uniforms: kurtosis 3 - 6/5/4 = 2.7, no value beyond sqrt(12). */
    cr_assert(fabs(fourth - 2.7) < 10 * error, "kurtosis %g", fourth);
    cr_assert(most > 3 && most < 3.4642, "largest %g", most);
    const int32_t lags[] = {1, 2, 7, 8, 64, 768, 4096};
    for (size_t i = 0; i < sizeof lags / sizeof lags[0]; i++)
        cr_assert(fabs(correlation(a, a + lags[i], kN)) < error, "lag %d: %g", lags[i],
                  correlation(a, a + lags[i], kN));
    const struct {
        uint64_t seed;
        epmoei_random_tensor_t tensor;
        int32_t expert;
    } others[] = {{seed + 1, EPMOEI_RANDOM_GATE, 3}, {seed, EPMOEI_RANDOM_UP, 3}, {seed, EPMOEI_RANDOM_GATE, 4}};
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        epmoei_random_fill(b, EPMOE_F32, others[i].seed, others[i].tensor, others[i].expert, 0, kN, 1);
        cr_assert(fabs(correlation(a, b, kN)) < error, "other %zu: %g", i, correlation(a, b, kN));
    }
    /* Rounded once, and the same on both sides of element 2^32. */
    uint16_t half[64];
    epmoei_random_fill(half, EPMOE_BF16, seed, EPMOEI_RANDOM_GATE, 3, 0, 64, 0.25f);
    for (int32_t i = 0; i < 64; i++) cr_assert_eq(half[i], epmoei_f32_to_bf16(0.25f * a[i]));
    int64_t border = (int64_t)1 << 32;
    epmoei_random_fill(a, EPMOE_F32, seed, EPMOEI_RANDOM_GATE, 3, border - 8, 16, 1);
    for (int32_t i = 0; i < 16; i++) {
        epmoei_random_fill(b, EPMOE_F32, seed, EPMOEI_RANDOM_GATE, 3, border - 8 + i, 1, 1);
        cr_assert_eq(a[i], b[0]);
    }
    epmoei_random_fill(b, EPMOE_F32, seed, EPMOEI_RANDOM_GATE, 3, 0, 8, 1);
    cr_assert(memcmp(a + 8, b, 8 * 4), "element 2^32 is element 0");
    free(a), free(b);
}

typedef struct watched_t {
    int64_t done[kE];
    int64_t total;
    int32_t calls;
    int32_t cancel_at; /* -1 = never */
} watched_t;

static int32_t watch(void *ctx, int64_t done_bytes, int64_t total_bytes)
{
    watched_t *watched = ctx;
    cr_assert_lt(watched->calls, kE);
    watched->done[watched->calls] = done_bytes;
    watched->total = total_bytes;
    return watched->calls++ == watched->cancel_at;
}

/* Random weights that are watched are those that are not; a cancelled call leaves none. */
Test(layer_weights, random_weights_that_are_watched)
{
    epmoe_layer_config_t config = full_config();
    epmoe_load_options_t options = EPMOE_LOAD_OPTIONS_INIT;
    watched_t watched = {.cancel_at = -1};
    options.progress = watch, options.progress_ctx = &watched;
    epmoe_layer_t *layer = create(&config), *plain = create(&config);
    cr_assert_eq(epmoei_layer_random_weights(layer, 5, &options), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(epmoe_layer_set_random_weights(plain, 5), EPMOE_OK, "%s", epmoe_last_error());
    const int64_t expert_bytes = 3 * kF * kD * 4;
    cr_expect_eq(watched.calls, kE);
    cr_expect_eq(watched.total, kE * expert_bytes);
    for (int32_t e = 0; e < watched.calls; e++) cr_expect_eq(watched.done[e], (e + 1) * expert_bytes);
    cr_expect(!memcmp(layer->weights.gate_up, plain->weights.gate_up, (size_t)(kE * 2 * kF * kD * 4)));
    cr_expect(!memcmp(layer->weights.down, plain->weights.down, (size_t)(kE * kF * kD * 4)));
    watched = (watched_t){.cancel_at = 2};
    cr_expect_eq(epmoei_layer_random_weights(layer, 5, &options), EPMOE_ERROR_BAD_STATE);
    cr_expect(watched.calls == 3 && !layer->has_weights, "%d calls", watched.calls);
    epmoe_layer_destroy(layer), epmoe_layer_destroy(plain);
}

/* What epmoe_layer_memory says is what is allocated. */
Test(layer_weights, memory)
{
    for (int i = 0; i < 60; i++) {
        testing_rng_t rng = testing_rng(testing_seed() + (uint64_t)i);
        epmoe_layer_config_t config = layer_case_config(&rng, testing_range(&rng, 1, 300), true);
        config.weight_format = (epmoe_format_t)testing_range(&rng, 0, 3);
        if (config.num_experts) config.capacity = testing_range(&rng, 0, 2) * 150;
        epmoe_layer_memory_t memory = EPMOE_LAYER_MEMORY_INIT;
        cr_assert_eq(epmoe_layer_memory(&config, 1, 0, &memory), EPMOE_OK, "%s", epmoe_last_error());
        epmoe_layer_t *layer = create(&config);
        cr_assert_eq(epmoe_layer_set_random_weights(layer, 1), EPMOE_OK);
        cr_assert_eq(memory.first_expert, 0);
        cr_assert_eq(memory.local_experts, config.num_experts);
        const struct {
            const char *name;
            void *block;
            int64_t bytes;
        } blocks[] = {{"weights", layer->weights_memory, memory.weight_bytes},
                      {"workspace", layer->workspace_memory, memory.workspace_bytes},
                      {"dispatch", layer->ep ? layer->ep->memory : NULL, memory.comm_bytes}};
        for (size_t b = 0; b < sizeof blocks / sizeof blocks[0]; b++)
            cr_assert(layer_case_is_block(blocks[b].block, blocks[b].bytes), "%s; %s", blocks[b].name,
                      layer_case_text(&config));
        epmoe_layer_destroy(layer);
    }
    /* Of borrowed matrices a layer has no copy; its workspace is the same. */
    testing_rng_t rng = testing_rng(testing_seed());
    epmoe_layer_config_t lent = full_config();
    epmoe_layer_memory_t most = EPMOE_LAYER_MEMORY_INIT;
    oracle_model_t model = oracle_model(&rng, &lent, &kMixed);
    epmoe_layer_t *borrower = create(&lent);
    model.weights.layout = EPMOE_LAYOUT_PACKED;
    cr_assert_eq(epmoe_layer_memory(&lent, 1, 0, &most), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(epmoe_layer_set_weights(borrower, &model.weights), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq((const void *)borrower->weights.gate_up, model.weights.gate_up.data);
    cr_expect_leq((int64_t)malloc_usable_size(borrower->weights_memory), most.weight_bytes);
    cr_expect(layer_case_is_block(borrower->workspace_memory, most.workspace_bytes));
    epmoe_layer_destroy(borrower);
    oracle_model_free(&model);
    /* Experts spread: the first E mod R ranks own one more. */
    epmoe_layer_config_t config = full_config();
    int32_t next = 0;
    for (int32_t rank = 0; rank < 5; rank++) {
        epmoe_layer_memory_t memory = EPMOE_LAYER_MEMORY_INIT;
        cr_assert_eq(epmoe_layer_memory(&config, 5, rank, &memory), EPMOE_OK);
        cr_assert_eq(memory.first_expert, next);
        cr_assert_eq(memory.local_experts, rank < 2 ? 2 : 1);
        next += memory.local_experts;
        int64_t experts = memory.local_experts * (int64_t)(3 * kF * kD + 2 * kF + kD) * 4;
        cr_assert_geq(memory.weight_bytes, experts);
        cr_assert_leq(memory.weight_bytes, experts + (kE * (kD + 2) + 3 * kFs * kD + kD) * 4 + 10 * 256);
    }
    epmoe_layer_memory_t memory = EPMOE_LAYER_MEMORY_INIT;
    cr_expect_eq(epmoe_layer_memory(&config, 5, 5, &memory), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_expect_eq(epmoe_layer_memory(&config, 0, 0, &memory), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_expect_eq(epmoe_layer_memory(&config, 1, 0, NULL), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_expect_eq(epmoe_layer_memory(NULL, 1, 0, &memory), EPMOE_ERROR_INVALID_ARGUMENT);
    memory.struct_size = 0;
    cr_expect_eq(epmoe_layer_memory(&config, 1, 0, &memory), EPMOE_ERROR_INVALID_ARGUMENT);
}
