/* Layers with quantised weights on a device: against the recorded outputs of checkpoints, against the CPU on the same
 * weights, in graphs; what is not computed as it is stored, and what is refused. */
#include "kernels/quant_formats.h"
#include "moe/layer.h"
#include "tests/e4m3_oracle.h"
#include "tests/gpu_layer_case.h"
#include "tests/quant_case.h"
#include "tests/testing_tool.h"

#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdlib.h>

TestSuite(gpu_quant, .init = testing_folder_make, .fini = testing_folder_remove, .timeout = 600);

#define GOLDEN EPMOE_TEST_DATA "/golden/"

/* ---------------------------------------------------------------------------------------------------- checkpoints */

static const char *const goldens[] = {"deepseek_v3_ct_w4",
                                      "deepseek_v3_fp8",
                                      "deepseek_v3_gptq_actorder",
                                      "deepseek_v3_gptq_asym_v1",
                                      "gpt_oss_mxfp4",
                                      "qwen3_moe_awq",
                                      "qwen3_moe_fp8",
                                      "qwen3_moe_gptq",
                                      "qwen3_moe_gptq_v2_g128"};

Test(gpu_quant, golden_checkpoints)
{
    GPU_TEST_NEEDS_DEVICE();
    /* fp16: a decoder layer on the CPU is off by 2e-3, the MLP alone by a quarter of that. */
    static const char *const settings[] = {"--dtype bf16", "--dtype fp16 --tol 4e-3"};
    for (size_t i = 0; i < sizeof goldens / sizeof goldens[0]; i++)
        for (int s = 0; s < 2; s++) {
            testing_process_t process =
                testing_tool("check '" GOLDEN "%s' --backend cuda --format json %s", goldens[i], settings[s]);
            cr_expect_eq(process.exit_code, 0, "%s %s: exit %d: %s%s", goldens[i], settings[s], process.exit_code,
                         process.output, process.errors);
            cr_expect(strstr(process.output, "layers.0.router") && strstr(process.output, "layers.0.moe"), "%s: %s",
                      goldens[i], process.output);
            cr_expect(!strstr(process.output, "\"ok\":false"), "%s %s: %s", goldens[i], settings[s], process.output);
            /* Of all of them one has orders that CUDA's layout does not hold, and says so. */
            bool widened = strstr(process.errors, "gate_up are kept as") != NULL;
            cr_expect_eq(widened, strstr(goldens[i], "actorder") != NULL, "%s: %s", goldens[i], process.errors);
            testing_process_free(&process);
        }
}

/* Activations quantised too, which the recorded ones were not. */
Test(gpu_quant, golden_checkpoints_by_fp8)
{
    GPU_TEST_NEEDS_DEVICE();
    if (strcmp(epmoe_backend_arch(EPMOE_BACKEND_CUDA), "sm90")) cr_skip_test("no kernel of this tier");
    static const char *const fp8[] = {"deepseek_v3_fp8", "qwen3_moe_fp8"};
    for (size_t i = 0; i < sizeof fp8 / sizeof fp8[0]; i++) {
        testing_process_t process = testing_tool("check '" GOLDEN "%s' --backend cuda --format json --act fp8", fp8[i]);
        cr_expect_eq(process.exit_code, 0, "%s: exit %d: %s%s", fp8[i], process.exit_code, process.output,
                     process.errors);
        testing_process_free(&process);
    }
}

#if EPMOE_HAVE_MPI
static void check_over_two_ranks(const char *golden, const char *settings)
{
    testing_process_t process = testing_run(240, "%s '" EPMOE_TEST_BIN "/moe_tool' check '" GOLDEN "%s' %s",
                                            testing_mpirun(2), golden, settings);
    cr_expect_eq(process.exit_code, 0, "%s %s: exit %d: %s%s", golden, settings, process.exit_code, process.output,
                 process.errors);
    cr_expect(strstr(process.output, "layers.0.moe"), "%s %s: %s", golden, settings, process.output);
    testing_process_free(&process);
}

Test(gpu_quant, golden_checkpoints_over_two_ranks)
{
    GPU_TEST_NEEDS_DEVICE();
    for (size_t i = 0; i < sizeof goldens / sizeof goldens[0]; i++) check_over_two_ranks(goldens[i], "");
}

/* By name, of every way to store weights one. Ranks may share the device, which NCCL does not allow. */
Test(gpu_quant, golden_checkpoints_by_transport)
{
    GPU_TEST_NEEDS_DEVICE();
    static const char *const checked[] = {"deepseek_v3_fp8", "qwen3_moe_gptq", "gpt_oss_mxfp4", "deepseek_v3_ct_w4"};
    for (size_t i = 0; i < sizeof checked / sizeof checked[0]; i++) {
        check_over_two_ranks(checked[i], "--transport p2p");
        check_over_two_ranks(checked[i], "--transport mpi");
#if EPMOE_HAVE_NCCL
        int devices = 0;
        cr_assert_eq(cudaGetDeviceCount(&devices), cudaSuccess);
        if (devices > 1) check_over_two_ranks(checked[i], "--transport nccl");
#endif
    }
}
#endif

/* ------------------------------------------------------------------------------------------------ against the CPU */

static epmoe_layer_t *cpu_layer(const epmoe_layer_config_t *config, epmoe_comm_t **comm)
{
    epmoe_layer_t *layer = gpu_layer_on_cpu(config, comm);
    cr_assert_not_null(layer);
    return layer;
}

/* Both layers, which have the same weights, on the same tokens with the device's routing. */
static void compare(epmoe_layer_t *layer, epmoe_layer_t *reference, testing_rng_t *rng, int32_t num_tokens,
                    const char *what)
{
    const epmoe_layer_config_t *config = &layer->config;
    const gpu_error_t error = gpu_layer_error(layer, reference, rng, num_tokens);
    bool bf16 = config->dtype == EPMOE_BF16;
    /* Weights widened to bf16 are rounded, and the wgmma kernel rounds code times scale to bf16. */
    epmoe_format_t format = layer->weights.formats.gate_up;
    bool rounded = bf16 && (format == EPMOE_FORMAT_W4 || format == EPMOE_FORMAT_BF16);
    /* An output may be four times its row's rms and rounded the other way, by 2^-8 to 2^-7 of it in bf16, 2^-11 to
     * 2^-10 in fp16. A code of a quantised h falls the other way where h lies between two: a step of up to an eighth of
     * it, which a single value feels, and a token or two, and many tokens together hardly (test_experts_fp8). */
    bool fp8 = config->fp8_activations == 1;
    cr_expect(error.row <= (fp8       ? 6e-2
                            : rounded ? 3e-2
                            : bf16    ? 1.6e-2
                                      : 4e-3),
              "%s, %d tokens: y is off by %g", what, num_tokens, error.row);
    cr_expect(error.all <= (fp8    ? (num_tokens < 16 ? 2e-2 : 1e-2)
                            : bf16 ? 6e-3
                                   : 1e-3),
              "%s, %d tokens: |y - cpu| / |cpu| is %g", what, num_tokens, error.all);
}

static void check_random(const char *preset, epmoe_format_t format, int32_t fp8_activations)
{
    epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
    cr_assert_eq(epmoe_preset_config(preset, &config), EPMOE_OK, "%s", epmoe_last_error());
    config.max_tokens = 40;
    config.dtype = EPMOE_BF16;
    config.weight_format = format;
    config.fp8_activations = fp8_activations;
    testing_rng_t rng = testing_rng(testing_seed());
    epmoe_comm_t *comm = NULL;
    epmoe_layer_t *layer = gpu_layer(&config), *reference = cpu_layer(&config, &comm);
    cr_assert_not_null(layer);
    cr_assert_eq(epmoe_layer_set_random_weights(layer, 7), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(epmoe_layer_set_random_weights(reference, 7), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(layer->weights.formats.gate_up, format);
    static const int32_t tokens[] = {1, 4, 5, 40};
    for (int i = 0; i < 4; i++) compare(layer, reference, &rng, tokens[i], epmoe_format_string(format));
    epmoe_layer_destroy(layer), epmoe_layer_destroy(reference);
    epmoe_comm_destroy(comm);
}

Test(gpu_quant, random_fp8)
{
    GPU_TEST_NEEDS_DEVICE();
    check_random("qwen3-30b-a3b", EPMOE_FORMAT_FP8_BLOCK, -1);
}

/* The activations too, as the CPU does when it is told to. */
Test(gpu_quant, random_fp8_by_fp8)
{
    GPU_TEST_NEEDS_DEVICE();
    if (strcmp(epmoe_backend_arch(EPMOE_BACKEND_CUDA), "sm90")) cr_skip_test("no kernel of this tier");
    check_random("qwen3-30b-a3b", EPMOE_FORMAT_FP8_BLOCK, 1);
}

Test(gpu_quant, random_w4)
{
    GPU_TEST_NEEDS_DEVICE();
    check_random("qwen3-30b-a3b", EPMOE_FORMAT_W4, 0);
}

Test(gpu_quant, random_mxfp4)
{
    GPU_TEST_NEEDS_DEVICE();
    check_random("gpt-oss-20b", EPMOE_FORMAT_MXFP4, 0);
}

/* --------------------------------------------------------------------------------------------------------- arrays */

enum { kD = 160, kF = 128, kE = 5, kK = 2, kMostTokens = 70 };

static epmoe_layer_config_t small_config(epmoe_dtype_t dtype)
{
    epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
    config.hidden = kD, config.intermediate = kF, config.num_experts = kE, config.top_k = kK;
    config.shared_intermediate = kF;
    config.dtype = dtype;
    config.max_tokens = kMostTokens;
    config.fp8_activations = -1;
    return config;
}

/* A layer's weights in one format; router random. */
typedef struct arrays_t {
    quant_case_t gate_up, down, shared_gate_up, shared_down;
    uint16_t *router;
    epmoe_layer_weights_t weights;
} arrays_t;

/* quant_case_make's scales are between 1 and 2, and make of a layer's outputs what bf16 does not hold well. */
static void tame(epmoe_weight_t *weight, int64_t experts, int64_t n, int64_t k)
{
    if (weight->format == EPMOE_FORMAT_MXFP4) {
        uint8_t *scales = (uint8_t *)(uintptr_t)weight->scales;
        for (int64_t i = 0; i < experts * n * k / 32; i++) scales[i] = (uint8_t)(121 + scales[i] % 3);
        return;
    }
    epmoe_weight_t filled = *weight;
    cr_assert_eq(epmoei_quant_check_weight(&filled, "weight", k), EPMOE_OK, "%s", epmoe_last_error());
    epmoei_quant_sizes_t sizes = epmoei_quant_sizes_rows(weight->format, n, k, filled.group_size, filled.group_rows, 0);
    float factor = weight->format != EPMOE_FORMAT_FP8_BLOCK ? 0x1p-6f : k < 1024 ? 0x1p-10f : 0x1p-13f;
    for (int64_t i = 0; i < experts * sizes.scales; i++)
        epmoei_store((void *)(uintptr_t)weight->scales, EPMOE_BF16, i,
                     factor * epmoei_load(weight->scales, EPMOE_BF16, i));
}

/* group_rows: FP8_BLOCK's. */
static arrays_t *make_arrays_of(testing_rng_t *rng, epmoe_format_t format, int32_t d, int32_t f, int32_t group,
                                int32_t group_rows, quant_index_t index)
{
    arrays_t *a = calloc(1, sizeof *a);
    /* W4 orders gate and up rows apart; the other formats' halves are rows like any. */
    const int64_t half = format == EPMOE_FORMAT_W4 ? f : 0;
    a->gate_up = quant_case_make_rows(rng, format, kE, 2 * f, d, group, group_rows, index, half);
    a->down = quant_case_make_rows(rng, format, kE, d, f, group, group_rows, index, 0);
    a->shared_gate_up = quant_case_make_rows(rng, format, 1, 2 * f, d, group, group_rows, index, half);
    a->shared_down = quant_case_make_rows(rng, format, 1, d, f, group, group_rows, index, 0);
    a->router = malloc(kE * (size_t)d * 2);
    testing_fill_normal(rng, a->router, EPMOE_BF16, (int64_t)kE * d, 0.1f);
    tame(&a->gate_up.weight, kE, 2 * f, d), tame(&a->down.weight, kE, d, f);
    tame(&a->shared_gate_up.weight, 1, 2 * f, d), tame(&a->shared_down.weight, 1, d, f);
    a->weights = (epmoe_layer_weights_t)EPMOE_LAYER_WEIGHTS_INIT;
    a->weights.router = a->router, a->weights.router_dtype = EPMOE_BF16;
    a->weights.gate_up = a->gate_up.weight, a->weights.down = a->down.weight;
    a->weights.shared_gate_up = a->shared_gate_up.weight, a->weights.shared_down = a->shared_down.weight;
    return a;
}

static arrays_t *make_arrays(testing_rng_t *rng, epmoe_format_t format, int32_t group, quant_index_t index)
{
    return make_arrays_of(rng, format, kD, kF, group, 0, index);
}

static void free_arrays(arrays_t *a)
{
    quant_case_free(&a->gate_up), quant_case_free(&a->down);
    quant_case_free(&a->shared_gate_up), quant_case_free(&a->shared_down);
    free(a->router), free(a);
}

static int32_t warnings;
static void count_warning(void *ctx, epmoe_log_level_t level, const char *message)
{
    (void)ctx;
    if (level == EPMOE_LOG_WARNING && strstr(message, "are kept as")) warnings++;
}

/* The same order of columns for gate and up rows of every expert. */
static void equal_orders(int32_t *order, int64_t experts)
{
    for (int64_t e = 0; e < experts; e++) memcpy(order + (2 * e + 1) * kD, order + 2 * e * kD, kD * 4);
}

Test(gpu_quant, arrays_of_every_format)
{
    GPU_TEST_NEEDS_DEVICE();
    static const struct {
        epmoe_format_t format, kept;
        int32_t group;
        quant_index_t index;
        bool equal; /* orders of gate and up rows */
        epmoe_dtype_t dtype;
    } cases[] = {
        {EPMOE_FORMAT_FP8_BLOCK, EPMOE_FORMAT_FP8_BLOCK, 64, QUANT_INDEX_NONE, false, EPMOE_BF16},
        /* Gate and up rows have one scale. */
        {EPMOE_FORMAT_FP8_BLOCK, EPMOE_FORMAT_F16, -1, QUANT_INDEX_NONE, false, EPMOE_F16},
        {EPMOE_FORMAT_GPTQ, EPMOE_FORMAT_W4, 32, QUANT_INDEX_NONE, false, EPMOE_BF16},
        {EPMOE_FORMAT_GPTQ, EPMOE_FORMAT_W4, 32, QUANT_INDEX_EVEN, false, EPMOE_F16},
        {EPMOE_FORMAT_GPTQ, EPMOE_FORMAT_BF16, 32, QUANT_INDEX_ANY, false, EPMOE_BF16},
        {EPMOE_FORMAT_AWQ, EPMOE_FORMAT_W4, 16, QUANT_INDEX_NONE, false, EPMOE_F16},
        {EPMOE_FORMAT_AWQ, EPMOE_FORMAT_BF16, 8, QUANT_INDEX_NONE, false, EPMOE_BF16},
        {EPMOE_FORMAT_CT_W4, EPMOE_FORMAT_W4, -1, QUANT_INDEX_NONE, false, EPMOE_BF16},
        {EPMOE_FORMAT_MXFP4, EPMOE_FORMAT_MXFP4, 0, QUANT_INDEX_NONE, false, EPMOE_F16},
        {EPMOE_FORMAT_W4, EPMOE_FORMAT_W4, 32, QUANT_INDEX_EVEN, true, EPMOE_BF16},
        {EPMOE_FORMAT_W4, EPMOE_FORMAT_F16, 32, QUANT_INDEX_EVEN, false, EPMOE_F16},
        {EPMOE_FORMAT_W4, EPMOE_FORMAT_W4, 64, QUANT_INDEX_NONE, false, EPMOE_BF16},
    };
    testing_rng_t rng = testing_rng(testing_seed());
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        arrays_t *a = make_arrays(&rng, cases[i].format, cases[i].group, cases[i].index);
        if (cases[i].equal) equal_orders(a->gate_up.g_idx, kE), equal_orders(a->shared_gate_up.g_idx, 1);
        epmoe_layer_config_t config = small_config(cases[i].dtype);
        epmoe_comm_t *comm = NULL;
        epmoe_layer_t *layer = gpu_layer(&config), *reference = cpu_layer(&config, &comm);
        cr_assert_not_null(layer);
        warnings = 0;
        epmoe_set_log(count_warning, NULL);
        epmoe_status_t status = epmoe_layer_set_weights(layer, &a->weights);
        epmoe_set_log(NULL, NULL);
        cr_assert_eq(status, EPMOE_OK, "case %zu: %s", i, epmoe_last_error());
        cr_assert_eq(epmoe_layer_set_weights(reference, &a->weights), EPMOE_OK, "%s", epmoe_last_error());
        epmoe_format_t got = layer->weights.formats.gate_up;
        cr_expect_eq(got, cases[i].kept, "case %zu: gate_up is %s", i, epmoe_format_string(got));
        cr_expect_eq(warnings > 0, !epmoei_format_is_quantised(cases[i].kept), "case %zu: %d warnings", i, warnings);
        static const int32_t tokens[] = {1, 3, 7, kMostTokens};
        char what[64];
        snprintf(what, sizeof what, "case %zu, %s", i, epmoe_format_string(cases[i].format));
        for (int t = 0; t < 4; t++) compare(layer, reference, &rng, tokens[t], what);
        epmoe_layer_destroy(layer), epmoe_layer_destroy(reference);
        epmoe_comm_destroy(comm);
        free_arrays(a);
    }
}

/* ------------------------------------------------------------------------------------------------- scales of rows */

enum { kWide = 7168, kNarrow = 784, kRowModes = 3 };
static const int32_t row_modes[kRowModes] = {-1, 1, 0}; /* fp8_activations: never, always, where it is faster */

/* A scale for each row, as compressed-tensors' "channel" has them; codes of a normal distribution, for of any bits a
 * few would be all of a sum. */
static arrays_t *arrays_of_rows(testing_rng_t *rng)
{
    enum { kDrawn = 65521 };
    static uint8_t drawn[kDrawn];
    arrays_t *a = make_arrays_of(rng, EPMOE_FORMAT_FP8_BLOCK, kWide, kNarrow, -1, 1, QUANT_INDEX_NONE);
    quant_case_t *const all[] = {&a->gate_up, &a->down, &a->shared_gate_up, &a->shared_down};
    for (int i = 0; i < kDrawn; i++) drawn[i] = e4m3_nearest(64 * (double)testing_normal(rng));
    for (int m = 0; m < 4; m++) {
        const int64_t count = (int64_t)(m < 2 ? kE : 1) * (m % 2 ? 1 : 2) * kNarrow * kWide;
        for (int64_t i = 0; i < count; i++) ((uint8_t *)all[m]->data)[i] = drawn[i % kDrawn];
    }
    return a;
}

static epmoe_layer_config_t config_of_rows(int32_t mode)
{
    epmoe_layer_config_t config = small_config(EPMOE_BF16);
    config.hidden = kWide, config.intermediate = config.shared_intermediate = kNarrow;
    config.fp8_activations = mode;
    return config;
}

static epmoe_layer_t *layer_of_rows(const arrays_t *a, int32_t mode)
{
    const epmoe_layer_config_t config = config_of_rows(mode);
    epmoe_layer_t *layer = gpu_layer(&config);
    cr_assert_not_null(layer);
    cr_assert_eq(epmoe_layer_set_weights(layer, &a->weights), EPMOE_OK, "%s", epmoe_last_error());
    const epmoei_layer_formats_t *formats = &layer->weights.formats;
    cr_assert(formats->gate_up == EPMOE_FORMAT_FP8_BLOCK && formats->down == EPMOE_FORMAT_FP8_BLOCK);
    cr_assert(formats->gate_up_pack.row_group == 1 && formats->down_pack.row_group == 1);
    return layer;
}

static bool is_sm90(void) { return !strcmp(epmoe_backend_arch(EPMOE_BACKEND_CUDA), "sm90"); }

Test(gpu_quant, fp8_scales_of_rows)
{
    GPU_TEST_NEEDS_DEVICE();
    static const int32_t tokens[] = {1, 4, 17, kMostTokens};
    testing_rng_t rng = testing_rng(testing_seed());
    arrays_t *a = arrays_of_rows(&rng);
    for (int m = 0; m < 2; m++) {
        const epmoe_layer_config_t config = config_of_rows(row_modes[m]);
        epmoe_comm_t *comm = NULL;
        if (row_modes[m] == 1 && !is_sm90()) continue;
        epmoe_layer_t *layer = layer_of_rows(a, row_modes[m]), *reference = cpu_layer(&config, &comm);
        cr_assert_eq(epmoe_layer_set_weights(reference, &a->weights), EPMOE_OK, "%s", epmoe_last_error());
        for (int t = 0; t < 4; t++)
            compare(layer, reference, &rng, tokens[t], m ? "scales of rows, by fp8" : "scales of rows");
        epmoe_layer_destroy(layer), epmoe_layer_destroy(reference);
        epmoe_comm_destroy(comm);
    }
    free_arrays(a);
}

/* y of a routing that no value of x changes. */
static uint16_t *forward_by_logits(epmoe_layer_t *layer, const gpu_tokens_t *tokens, int32_t num_tokens)
{
    const int64_t bytes = (int64_t)num_tokens * layer->config.hidden * 2;
    epmoe_forward_args_t args = EPMOE_FORWARD_ARGS_INIT;
    args.num_tokens = num_tokens, args.x = tokens->x, args.y = tokens->y, args.logits = tokens->logits;
    gpu_poison(tokens->y, bytes);
    cr_assert_eq(epmoe_layer_forward_args(layer, &args, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert(gpu_wait());
    return gpu_get_new(tokens->y, bytes);
}

/* A layer that chooses computes the bits of the one that never quantises or of the one that always does. A NaN is all
 * of its token's row and changes no bit of another. */
Test(gpu_quant, fp8_scales_of_rows_chosen_and_beside_nan)
{
    GPU_TEST_NEEDS_DEVICE();
    static const int32_t counts[] = {2, kMostTokens};
    testing_rng_t rng = testing_rng(testing_seed());
    arrays_t *a = arrays_of_rows(&rng);
    epmoe_layer_t *layers[kRowModes] = {0};
    for (int m = 0; m < kRowModes; m++)
        if (row_modes[m] != 1 || is_sm90()) layers[m] = layer_of_rows(a, row_modes[m]);
    for (int i = 0; i < 2; i++) {
        const int64_t count = counts[i], n = count * kWide, loud = count - 1;
        gpu_tokens_t tokens = gpu_tokens(&rng, &layers[0]->config, counts[i]);
        uint16_t *y[kRowModes] = {0};
        for (int m = 0; m < kRowModes; m++)
            if (layers[m]) y[m] = forward_by_logits(layers[m], &tokens, counts[i]);
        const bool quantises = epmoei_layer_quantises(layers[2], counts[i], false);
        cr_expect_eq(quantises, is_sm90() && i == 1, "%d tokens", counts[i]);
        cr_expect_eq(quantises, epmoei_layer_quantises(layers[2], counts[i], true), "%d tokens", counts[i]);
        cr_expect(gpu_same("chosen", y[2], y[quantises], n, 2, kWide), "%d tokens", counts[i]);
        if (y[1]) cr_expect(memcmp(y[0], y[1], (size_t)n * 2), "quantised x changes nothing");
        const uint16_t nan = 0x7FC0;
        gpu_put((char *)tokens.x + (loud * kWide + 77) * 2, &nan, 2);
        for (int m = 0; m < kRowModes; m++) {
            if (!layers[m]) continue;
            uint16_t *beside = forward_by_logits(layers[m], &tokens, counts[i]);
            cr_expect(gpu_same("beside a NaN", beside, y[m], n - kWide, 2, kWide), "%d tokens, fp8_activations %d",
                      counts[i], row_modes[m]);
            for (int64_t c = loud * kWide; c < n; c++)
                cr_assert(isnan(epmoei_bf16_to_f32(beside[c])), "%d tokens, fp8_activations %d: column %d is %g",
                          counts[i], row_modes[m], (int)(c % kWide), (double)epmoei_bf16_to_f32(beside[c]));
            free(beside), free(y[m]);
        }
        cr_expect(gpu_tokens_free(&tokens));
    }
    for (int m = 0; m < kRowModes; m++) epmoe_layer_destroy(layers[m]);
    free_arrays(a);
}

/* ----------------------------------------------------------------------------------------------------- promises */

Test(gpu_quant, a_graph_replays_what_an_eager_call_computes)
{
    GPU_TEST_NEEDS_DEVICE();
    static const epmoe_format_t formats[] = {EPMOE_FORMAT_FP8_BLOCK, EPMOE_FORMAT_W4, EPMOE_FORMAT_MXFP4};
    testing_rng_t rng = testing_rng(testing_seed());
    for (int i = 0; i < 6; i++) {
        int32_t num_tokens = i < 3 ? 2 : 40;
        int64_t n = (int64_t)num_tokens * kD;
        epmoe_layer_config_t config = small_config(EPMOE_BF16);
        config.weight_format = formats[i % 3];
        config.fp8_activations = 0;
        epmoe_layer_t *layer = gpu_layer(&config);
        cr_assert_not_null(layer);
        cr_assert_eq(epmoe_layer_set_random_weights(layer, 3), EPMOE_OK, "%s", epmoe_last_error());
        gpu_tokens_t tokens = gpu_tokens(&rng, &config, num_tokens);
        cudaGraph_t graph = NULL;
        cudaGraphExec_t exec = NULL;
        cr_assert_eq(cudaStreamBeginCapture(gpu_stream(), cudaStreamCaptureModeGlobal), cudaSuccess);
        epmoei_alloc_fail_at(1);
        epmoe_status_t status = epmoe_layer_forward(layer, tokens.x, tokens.y, num_tokens, gpu_stream());
        epmoei_alloc_fail_at(0);
        cr_assert_eq(cudaStreamEndCapture(gpu_stream(), &graph), cudaSuccess);
        cr_assert_eq(status, EPMOE_OK, "forward in a capture: %s", epmoe_last_error());
        cr_assert_eq(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
        for (int round = 0; round < 3; round++) {
            uint16_t *x = malloc((size_t)n * 2);
            testing_fill_normal(&rng, x, EPMOE_BF16, n, 1);
            gpu_put(tokens.x, x, n * 2);
            gpu_poison(tokens.y, n * 2);
            cr_assert_eq(cudaGraphLaunch(exec, gpu_stream()), cudaSuccess);
            cr_assert(gpu_wait());
            void *replayed = gpu_get_new(tokens.y, n * 2);
            gpu_poison(tokens.y, n * 2);
            cr_assert_eq(epmoe_layer_forward(layer, tokens.x, tokens.y, num_tokens, gpu_stream()), EPMOE_OK);
            cr_assert(gpu_wait());
            void *eager = gpu_get_new(tokens.y, n * 2);
            cr_expect(gpu_same("y", replayed, eager, n, 2, kD), "%s, %d tokens", epmoe_format_string(formats[i % 3]),
                      num_tokens);
            free(x), free(replayed), free(eager);
        }
        cudaGraphExecDestroy(exec), cudaGraphDestroy(graph);
        cr_expect(gpu_tokens_free(&tokens));
        epmoe_layer_destroy(layer);
    }
}

/* FP8 in device memory as the kernels want it: rows of gate and up in turn, their blocks one after the other. */
Test(gpu_quant, fp8_weights_are_borrowed)
{
    GPU_TEST_NEEDS_DEVICE();
    testing_rng_t rng = testing_rng(testing_seed());
    arrays_t *a = make_arrays(&rng, EPMOE_FORMAT_FP8_BLOCK, -1, QUANT_INDEX_NONE);
    epmoe_layer_config_t config = small_config(EPMOE_BF16);
    epmoe_comm_t *comm = NULL;
    epmoe_layer_t *layer = gpu_layer(&config), *reference = cpu_layer(&config, &comm);
    cr_assert_not_null(layer);
    cr_assert_eq(epmoe_layer_set_weights(reference, &a->weights), EPMOE_OK, "%s", epmoe_last_error());

    epmoe_layer_weights_t device = a->weights;
    epmoe_weight_t *const weights[] = {&device.gate_up, &device.down, &device.shared_gate_up, &device.shared_down};
    void *memory[8] = {0};
    for (int i = 0; i < 4; i++) {
        int64_t experts = i < 2 ? kE : 1, n = i % 2 ? kD : 2 * kF, k = i % 2 ? kF : kD, halves = i % 2 ? 1 : 2;
        uint8_t *rows = malloc((size_t)(experts * n * k));
        uint16_t scales[2 * kE];
        for (int64_t e = 0; e < experts; e++) {
            for (int64_t r = 0; r < n; r++)
                memcpy(rows + (e * n + (halves == 2 ? 2 * (r % kF) + r / kF : r)) * k,
                       (const uint8_t *)weights[i]->data + (e * n + r) * k, (size_t)k);
            for (int64_t h = 0; h < halves; h++)
                memcpy(scales + halves * e + h, (const uint16_t *)weights[i]->scales + e, 2);
        }
        memory[2 * i] = gpu_copy_of(rows, experts * n * k);
        memory[2 * i + 1] = gpu_copy_of(scales, 2 * halves * experts);
        weights[i]->data = memory[2 * i], weights[i]->scales = memory[2 * i + 1];
        free(rows);
    }
    device.layout = EPMOE_LAYOUT_PACKED;
    cr_assert_eq(epmoe_layer_set_weights(layer, &device), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert(layer->weights.gate_up == memory[0] && layer->weights.gate_up_arrays.scales == memory[1]);
    compare(layer, reference, &rng, 2, "borrowed");
    compare(layer, reference, &rng, kMostTokens, "borrowed");

    epmoe_layer_weights_t bad = device;
    bad.down.scales = a->weights.down.scales;
    cr_expect_eq(epmoe_layer_set_weights(layer, &bad), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_expect(strstr(epmoe_last_error(), "weights.down.scales"), "%s", epmoe_last_error());
    /* Not packed they are read by the host. */
    bad = device;
    bad.layout = EPMOE_LAYOUT_GATE_FIRST;
    cr_expect_eq(epmoe_layer_set_weights(layer, &bad), EPMOE_ERROR_NOT_SUPPORTED);
    cr_expect(strstr(epmoe_last_error(), "device memory"), "%s", epmoe_last_error());
    compare(layer, reference, &rng, 3, "after refusals");
    epmoe_layer_destroy(layer), epmoe_layer_destroy(reference);
    epmoe_comm_destroy(comm);
    for (int i = 0; i < 8; i++) gpu_buffer_free(memory[i]);
    free_arrays(a);
}

Test(gpu_quant, what_cannot_be_computed_is_refused)
{
    GPU_TEST_NEEDS_DEVICE();
    static const struct {
        epmoe_format_t format;
        int32_t group, intermediate;
        const char *word;
    } cases[] = {{EPMOE_FORMAT_W4, 24, kF, "groups"},
                 {EPMOE_FORMAT_FP8_BLOCK, 48, kF, "blocks"},
                 {EPMOE_FORMAT_FP8_BLOCK, 128, 72, "multiple of 16"},
                 {EPMOE_FORMAT_MXFP4, 0, 72, "multiples of 32"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        epmoe_layer_config_t config = small_config(EPMOE_BF16);
        config.weight_format = cases[i].format, config.weight_group = cases[i].group;
        config.intermediate = cases[i].intermediate;
        epmoe_layer_t *layer = gpu_layer(&config);
        cr_assert_not_null(layer);
        cr_expect_eq(epmoe_layer_set_random_weights(layer, 1), EPMOE_ERROR_NOT_SUPPORTED, "case %zu", i);
        cr_expect(strstr(epmoe_last_error(), cases[i].word), "case %zu: %s", i, epmoe_last_error());
        epmoe_layer_destroy(layer);
    }
    testing_rng_t rng = testing_rng(testing_seed());
    arrays_t *a = make_arrays(&rng, EPMOE_FORMAT_W4, 32, QUANT_INDEX_NONE);
    epmoe_layer_config_t config = small_config(EPMOE_BF16);
    epmoe_layer_t *layer = gpu_layer(&config);
    cr_assert_not_null(layer);
    a->weights.layout = EPMOE_LAYOUT_PACKED;
    cr_expect_eq(epmoe_layer_set_weights(layer, &a->weights), EPMOE_ERROR_NOT_SUPPORTED);
    cr_expect(strstr(epmoe_last_error(), "weights.gate_up.format is w4"), "%s", epmoe_last_error());
    epmoe_layer_destroy(layer);
    free_arrays(a);
}
