/* The shared expert in a slot of the routed ones: against the CPU, where it is summed apart, and against double
 * precision; what a caller sees of the slots is the router's alone. */
#include "moe/layer_joined.h"
#include "tests/gpu_layer_case.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

TestSuite(gpu_joined, .timeout = 300);

enum { kD = 512, kF = 256, kE = 24, kK = 4, kMostTokens = 300 };

static epmoe_layer_config_t joined_config(epmoe_dtype_t dtype, epmoe_format_t format)
{
    epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
    config.hidden = kD, config.intermediate = config.shared_intermediate = kF;
    config.num_experts = kE, config.top_k = kK;
    config.scoring = EPMOE_SCORING_SIGMOID;
    config.has_selection_bias = config.renormalize = 1;
    config.routed_scale = 2.5f;
    config.dtype = dtype;
    config.weight_format = format;
    config.max_tokens = kMostTokens;
    return config;
}

static epmoe_layer_t *cpu_layer(const epmoe_layer_config_t *config, epmoe_comm_t **comm)
{
    epmoe_comm_config_t comm_config = EPMOE_COMM_CONFIG_INIT;
    epmoe_layer_t *layer = NULL;
    comm_config.backend = EPMOE_BACKEND_CPU;
    cr_assert_eq(epmoe_comm_create(NULL, &comm_config, comm), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(epmoe_layer_create(config, *comm, &layer), EPMOE_OK, "%s", epmoe_last_error());
    return layer;
}

/* The slots that a caller gets, on the host; load is what a forward counted. */
typedef struct slots_t {
    int32_t *ids, *cpu_ids;
    float *weights, *cpu_weights;
    int64_t load[kE];
} slots_t;

static void check_slots(const slots_t *slots, int32_t tokens, const char *what)
{
    int64_t load[kE] = {0};
    cr_expect(gpu_same("ids", slots->ids, slots->cpu_ids, (int64_t)tokens * kK, 4, kK), "%s", what);
    for (int64_t i = 0; i < (int64_t)tokens * kK; i++) {
        cr_assert(slots->ids[i] >= 0 && slots->ids[i] < kE, "%s: slot %lld has expert %d", what, (long long)i,
                  slots->ids[i]);
        const float weight = slots->weights[i], expected = slots->cpu_weights[i];
        cr_assert(fabsf(weight - expected) <= 1e-6f * fabsf(expected), "%s: slot %lld weighs %g, not %g", what,
                  (long long)i, (double)weight, (double)expected);
        load[slots->ids[i]]++;
    }
    cr_expect(gpu_same("expert_load", slots->load, load, kE, 8, kE), "%s", what);
}

static void check_y(const epmoe_layer_t *layer, const void *y, const void *cpu_y, int32_t tokens, const char *what)
{
    const epmoe_dtype_t dtype = layer->config.dtype;
    const int64_t n = (int64_t)tokens * kD;
    if (n == 0) return;
    double *expected = calloc((size_t)n, sizeof *expected);
    for (int64_t i = 0; i < n; i++) expected[i] = (double)epmoei_load(cpu_y, dtype, i);
    /* The bounds of test_gpu_quant, which says where they come from. */
    const bool fp8 = layer->config.fp8_activations == 1, bf16 = dtype == EPMOE_BF16;
    const bool rounded = bf16 && layer->weights.formats.gate_up == EPMOE_FORMAT_W4;
    double error = testing_row_error(y, dtype, expected, tokens, kD);
    cr_expect(error <= (fp8 ? 6e-2 : rounded ? 3e-2 : bf16 ? 1.6e-2 : 4e-3), "%s: y is off by %g", what, error);
    error = testing_rel_error(y, dtype, expected, n);
    cr_expect(error <= (fp8    ? (tokens < 16 ? 2e-2 : 1e-2)
                        : bf16 ? 6e-3
                               : 1e-3),
              "%s: |y - cpu| / |cpu| is %g", what, error);
    free(expected);
}

/* Both layers, which have the same weights, on the same tokens with the device's routing. actual: of num_tokens_dev,
 * or -1. */
static void compare(epmoe_layer_t *layer, epmoe_layer_t *reference, testing_rng_t *rng, int32_t bound, int32_t actual)
{
    const int32_t tokens = actual < 0 ? bound : actual;
    const int64_t n = (int64_t)bound * kD, num_slots = (int64_t)bound * kK;
    char what[96];
    snprintf(what, sizeof what, "%s %s fp8 %d, %d of %d tokens", epmoe_dtype_string(layer->config.dtype),
             epmoe_format_string(layer->weights.formats.gate_up), layer->config.fp8_activations, tokens, bound);
    gpu_tokens_t device = gpu_tokens(rng, &layer->config, bound);
    static const int64_t zeros[kE];
    int64_t *load = gpu_copy_of(zeros, sizeof zeros);
    int32_t *tokens_dev = gpu_copy_of(&tokens, sizeof tokens);
    epmoe_forward_args_t args = EPMOE_FORWARD_ARGS_INIT;
    args.num_tokens = bound, args.num_tokens_dev = actual < 0 ? NULL : tokens_dev;
    args.x = device.x, args.y = device.y, args.residual = device.residual;
    args.logits_out = device.logits_out, args.ids_out = device.ids_out, args.weights_out = device.weights_out;
    args.expert_load = load;
    cr_assert_eq(epmoe_layer_forward_args(layer, &args, gpu_stream()), EPMOE_OK, "%s: %s", what, epmoe_last_error());
    cr_assert(gpu_wait());

    void *x = gpu_get_new(device.x, n * 2), *residual = gpu_get_new(device.residual, n * 2);
    void *y = gpu_get_new(device.y, n * 2);
    float *logits = gpu_get_new(device.logits_out, (int64_t)bound * kE * 4);
    slots_t slots = {.ids = gpu_get_new(device.ids_out, num_slots * 4),
                     .cpu_ids = calloc((size_t)num_slots, 4),
                     .weights = gpu_get_new(device.weights_out, num_slots * 4),
                     .cpu_weights = calloc((size_t)num_slots, 4)};
    gpu_get(slots.load, load, sizeof slots.load);
    uint16_t *cpu_y = calloc((size_t)n, sizeof *cpu_y);
    epmoe_forward_args_t cpu = EPMOE_FORWARD_ARGS_INIT;
    cpu.num_tokens = tokens;
    cpu.x = x, cpu.y = cpu_y, cpu.residual = residual, cpu.logits = logits;
    cpu.ids_out = slots.cpu_ids, cpu.weights_out = slots.cpu_weights;
    cr_assert_eq(epmoe_layer_forward_args(reference, &cpu, NULL), EPMOE_OK, "%s: %s", what, epmoe_last_error());
    check_slots(&slots, tokens, what);
    check_y(layer, y, cpu_y, tokens, what);
    cr_expect(gpu_is_poison(device.y, tokens * kD * 2, (bound - tokens) * kD * 2) &&
                  gpu_is_poison(device.ids_out, tokens * kK * 4, (bound - tokens) * kK * 4) &&
                  gpu_is_poison(device.weights_out, tokens * kK * 4, (bound - tokens) * kK * 4),
              "%s: a row past the actual ones was written", what);

    cr_expect(gpu_tokens_free(&device) && gpu_guards_intact(load), "%s", what);
    gpu_buffer_free(load), gpu_buffer_free(tokens_dev);
    free(x), free(y), free(residual), free(logits), free(cpu_y);
    free(slots.ids), free(slots.cpu_ids), free(slots.weights), free(slots.cpu_weights);
}

/* In one layer, so that a call finds the workspace as another left it. */
static void check_format(int32_t max_tokens, epmoe_dtype_t dtype, epmoe_format_t format, int32_t fp8_activations)
{
    epmoe_layer_config_t config = joined_config(dtype, format);
    config.fp8_activations = fp8_activations;
    config.max_tokens = max_tokens;
    testing_rng_t rng = testing_rng(testing_seed());
    epmoe_comm_t *comm = NULL;
    epmoe_layer_t *layer = gpu_layer(&config), *reference = cpu_layer(&config, &comm);
    cr_assert_not_null(layer);
    cr_assert_eq(epmoe_layer_set_random_weights(layer, 7), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(epmoe_layer_set_random_weights(reference, 7), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert(layer->weights.joins_shared && !reference->weights.joins_shared);
    /* In 4 bits it joins up to 64 tokens and beyond 256. */
    static const int32_t tokens[] = {kMostTokens, 1, 4, 65, 5, 16, 257, 17, 256, 40, 100, 64};
    for (size_t i = 0; i < sizeof tokens / sizeof tokens[0]; i++) {
        if (tokens[i] > max_tokens) continue;
        compare(layer, reference, &rng, tokens[i], -1);
        compare(layer, reference, &rng, tokens[i], testing_range(&rng, 0, tokens[i]));
    }
    epmoe_layer_destroy(layer), epmoe_layer_destroy(reference);
    epmoe_comm_destroy(comm);
}

Test(gpu_joined, plain)
{
    GPU_TEST_NEEDS_DEVICE();
    check_format(kMostTokens, EPMOE_BF16, EPMOE_FORMAT_NONE, 0);
    check_format(kMostTokens, EPMOE_F16, EPMOE_FORMAT_NONE, 0);
}

Test(gpu_joined, fp8)
{
    GPU_TEST_NEEDS_DEVICE();
    check_format(kMostTokens, EPMOE_BF16, EPMOE_FORMAT_FP8_BLOCK, -1);
    if (!strcmp(epmoe_backend_arch(EPMOE_BACKEND_CUDA), "sm90"))
        check_format(kMostTokens, EPMOE_BF16, EPMOE_FORMAT_FP8_BLOCK, 1);
}

Test(gpu_joined, w4)
{
    GPU_TEST_NEEDS_DEVICE();
    check_format(kMostTokens, EPMOE_BF16, EPMOE_FORMAT_GPTQ, 0);
    check_format(kMostTokens, EPMOE_F16, EPMOE_FORMAT_CT_W4, 0);
}

Test(gpu_joined, mxfp4)
{
    GPU_TEST_NEEDS_DEVICE();
    check_format(kMostTokens, EPMOE_BF16, EPMOE_FORMAT_MXFP4, 0);
}

static void *forward(epmoe_layer_t *layer, gpu_tokens_t *tokens, int32_t num_tokens)
{
    gpu_poison(tokens->y, num_tokens * kD * 2);
    cr_assert_eq(epmoe_layer_forward(layer, tokens->x, tokens->y, num_tokens, gpu_stream()), EPMOE_OK, "%s",
                 epmoe_last_error());
    cr_assert(gpu_wait());
    return gpu_get_new(tokens->y, num_tokens * kD * 2);
}

/* Workspaces of layers that never run it apart, and of such as do in their largest calls. */
Test(gpu_joined, few_tokens_at_most)
{
    GPU_TEST_NEEDS_DEVICE();
    static const int32_t most[] = {4, 64, 100};
    for (size_t i = 0; i < sizeof most / sizeof most[0]; i++) {
        check_format(most[i], EPMOE_BF16, EPMOE_FORMAT_NONE, 0);
        check_format(most[i], EPMOE_BF16, EPMOE_FORMAT_FP8_BLOCK, -1);
        check_format(most[i], EPMOE_BF16, EPMOE_FORMAT_GPTQ, 0);
        check_format(most[i], EPMOE_BF16, EPMOE_FORMAT_MXFP4, 0);
    }
}

/* One layer's weights in a slot of the routed ones and by launches of their own. */
static void check_against_apart(epmoe_dtype_t dtype, epmoe_format_t format, int32_t fp8_activations)
{
    epmoe_layer_config_t config = joined_config(dtype, format);
    config.fp8_activations = fp8_activations;
    config.has_selection_bias = 0;
    testing_rng_t rng = testing_rng(testing_seed());
    epmoe_layer_t *layer = gpu_layer(&config);
    cr_assert_not_null(layer);
    cr_assert_eq(epmoe_layer_set_random_weights(layer, 5), EPMOE_OK, "%s", epmoe_last_error());
    gpu_tokens_t tokens = gpu_tokens(&rng, &config, kMostTokens);
    static const int32_t counts[] = {1, 4, 5, 16, 64, kMostTokens};
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        char what[96];
        snprintf(what, sizeof what, "%s %s fp8 %d, %d tokens, joined and apart", epmoe_dtype_string(dtype),
                 epmoe_format_string(layer->weights.formats.gate_up), fp8_activations, counts[i]);
        void *y[3];
        for (int run = 0; run < 3; run++) {
            layer->weights.joins_shared = run != 1;
            cr_assert_eq(epmoei_layer_fit_workspace(layer), EPMOE_OK, "%s", epmoe_last_error());
            cr_assert_eq(epmoei_layer_joins_tokens(&layer->weights, counts[i]), run != 1);
            y[run] = forward(layer, &tokens, counts[i]);
        }
        check_y(layer, y[0], y[1], counts[i], what);
        cr_expect(gpu_same("y", y[2], y[0], (int64_t)counts[i] * kD, 2, kD), "%s", what);
        for (int run = 0; run < 3; run++) free(y[run]);
    }
    cr_expect(gpu_tokens_free(&tokens));
    epmoe_layer_destroy(layer);
}

Test(gpu_joined, against_the_path_apart)
{
    GPU_TEST_NEEDS_DEVICE();
    check_against_apart(EPMOE_BF16, EPMOE_FORMAT_NONE, 0);
    check_against_apart(EPMOE_F16, EPMOE_FORMAT_NONE, 0);
    check_against_apart(EPMOE_BF16, EPMOE_FORMAT_FP8_BLOCK, -1);
    if (!strcmp(epmoe_backend_arch(EPMOE_BACKEND_CUDA), "sm90"))
        check_against_apart(EPMOE_BF16, EPMOE_FORMAT_FP8_BLOCK, 1);
    check_against_apart(EPMOE_BF16, EPMOE_FORMAT_GPTQ, 0);
    check_against_apart(EPMOE_F16, EPMOE_FORMAT_CT_W4, 0);
    check_against_apart(EPMOE_BF16, EPMOE_FORMAT_MXFP4, 0);
}

/* A caller's arrays, in rules that the shared expert must not feel: scale, weight on the input. */
Test(gpu_joined, against_double_precision)
{
    GPU_TEST_NEEDS_DEVICE();
    for (int i = 0; i < 8; i++) {
        testing_rng_t rng = testing_rng(testing_seed() + (uint64_t)i);
        epmoe_layer_config_t config = joined_config(i % 2 ? EPMOE_F16 : EPMOE_BF16, EPMOE_FORMAT_NONE);
        config.hidden = 72, config.intermediate = config.shared_intermediate = 40;
        config.weight_on_input = i / 2 % 2;
        config.scoring = i / 4 ? EPMOE_SCORING_SIGMOID : EPMOE_SCORING_SPARSE_MIXER;
        if (config.scoring == EPMOE_SCORING_SPARSE_MIXER) config.has_selection_bias = 0;
        oracle_model_t model = gpu_model(&rng, &config);
        epmoe_layer_t *layer = gpu_layer_with(&model);
        cr_assert_not_null(layer);
        cr_assert(layer->weights.joins_shared);
        const gpu_forward_t forwards[] = {
            {.num_tokens = 1, .tokens = 1, .forced_logits = true},
            {.num_tokens = 4, .forced_logits = true, .y = GPU_Y_IS_X},
            {.num_tokens = 5, .forced_logits = true, .residual = true, .y = GPU_Y_IS_X},
            {.num_tokens = 40, .forced_logits = true, .y = GPU_Y_IS_RESIDUAL},
            {.num_tokens = kMostTokens, .tokens = 211, .forced_logits = true, .by_num_tokens_dev = true}};
        for (size_t j = 0; j < sizeof forwards / sizeof forwards[0]; j++)
            cr_expect(gpu_layer_check(layer, &model, &forwards[j], &rng), "forward %zu: %s", j,
                      gpu_config_text(&config));
        epmoe_layer_destroy(layer);
        oracle_model_free(&model);
    }
}

/* Borrowed matrices lie where the caller has them, apart; a layer's own join again. */
Test(gpu_joined, borrowed_weights_are_apart)
{
    GPU_TEST_NEEDS_DEVICE();
    enum { kTokens = 40 };
    testing_rng_t rng = testing_rng(testing_seed());
    epmoe_layer_config_t config = joined_config(EPMOE_BF16, EPMOE_FORMAT_NONE);
    config.has_selection_bias = 0;
    epmoe_layer_t *layer = gpu_layer(&config);
    cr_assert_not_null(layer);
    gpu_tokens_t tokens = gpu_tokens(&rng, &config, kTokens);
    cr_assert_eq(epmoe_layer_set_random_weights(layer, 3), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert(layer->weights.joins_shared);
    uint16_t *first = forward(layer, &tokens, kTokens);

    const int64_t bytes = (int64_t)kE * 2 * kF * kD * 2;
    void *zeros = calloc(1, (size_t)bytes), *device = gpu_copy_of(zeros, bytes);
    epmoe_layer_weights_t weights = EPMOE_LAYER_WEIGHTS_INIT;
    weights.layout = EPMOE_LAYOUT_PACKED;
    weights.router = zeros, weights.router_dtype = EPMOE_BF16;
    weights.gate_up = weights.down = weights.shared_gate_up = weights.shared_down =
        (epmoe_weight_t){.struct_size = sizeof(epmoe_weight_t), .format = EPMOE_FORMAT_BF16, .data = device};
    cr_assert_eq(epmoe_layer_set_weights(layer, &weights), EPMOE_OK, "%s", epmoe_last_error());
    cr_expect(!layer->weights.joins_shared && layer->weights.shared_down == device);
    uint16_t *apart = forward(layer, &tokens, kTokens);
    for (int32_t i = 0; i < kTokens * kD; i++) cr_assert((apart[i] & 0x7FFF) == 0, "element %d is %x", i, apart[i]);

    cr_assert_eq(epmoe_layer_set_random_weights(layer, 3), EPMOE_OK, "%s", epmoe_last_error());
    cr_expect(layer->weights.joins_shared);
    uint16_t *again = forward(layer, &tokens, kTokens);
    cr_expect(gpu_same("y", again, first, kTokens * kD, 2, kD));
    free(first), free(apart), free(again), free(zeros);
    cr_expect(gpu_tokens_free(&tokens) && gpu_guards_intact(device));
    gpu_buffer_free(device);
    epmoe_layer_destroy(layer);
}
