/* Checkpoints on a device whose layers are stored in different ways, or fused: each layer against the CPU's, which
 * reads the same folder and is tested against plain files by test_checkpoint_mixed. */
#include "moe/layer.h"
#include "tests/checkpoint_folder.h"
#include "tests/gpu_layer_case.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>

TestSuite(gpu_checkpoint, .init = folder_set_up, .fini = folder_tear_down, .timeout = 300);

enum { kD = 256, kF = 128, kE = 3, kGroup = 32, kTokens = 40 };

static const char *const projections[] = {"gate_proj", "up_proj", "down_proj"};

/* [rows,cols] of BF16, normal. */
static void add_bf16(build_file_t *file, testing_rng_t *rng, const char *name, int64_t rows, int64_t cols, float size)
{
    uint16_t *values = malloc((size_t)(rows * cols) * 2);
    testing_fill_normal(rng, values, EPMOE_BF16, rows * cols, size);
    build_add(file, name, "BF16", (const int64_t[]){rows, cols}, 2, values, rows * cols * 2);
    free(values);
}

/* One projection [n,k] in AWQ's tensors with any codes and zero points, and scales in F16. */
static void add_awq(build_file_t *file, testing_rng_t *rng, const char *prefix, int64_t n, int64_t k)
{
    const int64_t groups = k / kGroup, words = k * n / 8, zero_words = groups * n / 8;
    uint32_t *codes = malloc((size_t)words * 4), *zeros = malloc((size_t)zero_words * 4);
    uint16_t *scales = malloc((size_t)(groups * n) * 2);
    char name[160];
    for (int64_t i = 0; i < words; i++) codes[i] = (uint32_t)testing_next(rng);
    for (int64_t i = 0; i < zero_words; i++) zeros[i] = (uint32_t)testing_next(rng);
    for (int64_t i = 0; i < groups * n; i++) epmoei_store(scales, EPMOE_F16, i, testing_uniform(rng, 0.005f, 0.02f));
    snprintf(name, sizeof name, "%s.qweight", prefix);
    build_add(file, name, "I32", (const int64_t[]){k, n / 8}, 2, codes, words * 4);
    snprintf(name, sizeof name, "%s.qzeros", prefix);
    build_add(file, name, "I32", (const int64_t[]){groups, n / 8}, 2, zeros, zero_words * 4);
    snprintf(name, sizeof name, "%s.scales", prefix);
    build_add(file, name, "F16", (const int64_t[]){groups, n}, 2, scales, groups * n * 2);
    free(codes), free(zeros), free(scales);
}

/* [E,rows,cols] of E4M3 with a scale per 128 by 128, no two neighbours alike; transposed: both the other way round. */
static void add_fused(build_file_t *file, testing_rng_t *rng, const char *name, int64_t rows, int64_t cols,
                      bool transposed)
{
    const int64_t high = rows / 128, wide = cols / 128, count = kE * rows * cols;
    uint8_t *codes = malloc((size_t)count);
    float *scales = malloc(sizeof(float) * (size_t)(kE * high * wide));
    char scale_name[176];
    for (int64_t i = 0; i < count; i++) codes[i] = (uint8_t)((testing_next(rng) & 0x8F) | 0x30); /* 0.5 to 1.9 */
    for (int64_t i = 0; i < kE * high * wide; i++) scales[i] = 0.02f * (float)(1 + i % 5);
    const int64_t shape[] = {kE, transposed ? cols : rows, transposed ? rows : cols};
    const int64_t scale_shape[] = {kE, transposed ? wide : high, transposed ? high : wide};
    snprintf(scale_name, sizeof scale_name, "%s_scale_inv", name);
    build_add(file, name, "F8_E4M3", shape, 3, codes, count);
    build_add(file, scale_name, "F32", scale_shape, 3, scales, kE * high * wide * 4);
    free(codes), free(scales);
}

/* A layer of the checkpoint in the folder, on both backends; kept: how the device stores its experts. */
static void check_layer(int32_t index, epmoe_dtype_t dtype, epmoe_format_t kept, int32_t fp8_activations)
{
    epmoe_checkpoint_t *checkpoint = folder_open(0);
    epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
    epmoe_comm_t *comm = NULL;
    testing_rng_t rng = testing_rng(testing_seed() + (uint64_t)index);
    cr_assert_eq(epmoe_checkpoint_layer_config(checkpoint, index, &config), EPMOE_OK, "%s", epmoe_last_error());
    config.max_tokens = kTokens, config.dtype = dtype, config.fp8_activations = fp8_activations;
    epmoe_layer_t *layer = gpu_layer(&config), *on_cpu = gpu_layer_on_cpu(&config, &comm);
    cr_assert(layer && on_cpu);
    cr_assert_eq(epmoe_layer_load_checkpoint(layer, checkpoint, index, NULL), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(epmoe_layer_load_checkpoint(on_cpu, checkpoint, index, NULL), EPMOE_OK, "%s", epmoe_last_error());
    cr_expect_eq(layer->weights.formats.gate_up, kept, "layer %d is %s", index,
                 epmoe_format_string(layer->weights.formats.gate_up));
    for (int i = 0; i < 2; i++) {
        /* As test_gpu_quant has them; 4-bit weights become code times scale, rounded to bf16. */
        const bool bf16 = dtype == EPMOE_BF16;
        const gpu_error_t error = gpu_layer_error(layer, on_cpu, &rng, i ? 2 : kTokens);
        cr_expect(error.row <= (bf16 ? 3e-2 : 4e-3) && error.all <= (bf16 ? 6e-3 : 1e-3),
                  "layer %d in %s, %d tokens: y is off by %g, |y - cpu| / |cpu| is %g", index,
                  epmoe_dtype_string(dtype), i ? 2 : kTokens, error.row, error.all);
    }
    epmoe_layer_destroy(layer), epmoe_layer_destroy(on_cpu);
    epmoe_comm_destroy(comm);
    epmoe_checkpoint_close(checkpoint);
}

/* The layer that is not quantised stays as it is; scales in F16 meet activations in bf16 as numbers, not as bits. */
Test(gpu_checkpoint, one_layer_in_bf16_and_one_in_awq)
{
    GPU_TEST_NEEDS_DEVICE();
    testing_rng_t rng = testing_rng(testing_seed());
    build_file_t file = {0};
    char name[128];
    for (int32_t l = 0; l < 2; l++) {
        snprintf(name, sizeof name, "model.layers.%d.mlp.gate.weight", l);
        add_bf16(&file, &rng, name, kE, kD, 0.1f);
        for (int32_t e = 0; e < kE; e++)
            for (int p = 0; p < 3; p++) {
                const int64_t n = p == 2 ? kD : kF, k = p == 2 ? kF : kD;
                snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%d.%s%s", l, e, projections[p],
                         l ? "" : ".weight");
                if (l)
                    add_awq(&file, &rng, name, n, k);
                else
                    add_bf16(&file, &rng, name, n, k, 0.08f);
            }
    }
    folder_save_model(&file);
    build_save_text(folder_dir, "config.json",
                    "{\"model_type\":\"qwen3_moe\",\"hidden_size\":256,\"num_hidden_layers\":2,\"num_experts\":3,"
                    "\"num_experts_per_tok\":2,\"moe_intermediate_size\":128,\"intermediate_size\":256,"
                    "\"norm_topk_prob\":true,\"hidden_act\":\"silu\",\"quantization_config\":{\"quant_method\":\"awq\","
                    "\"bits\":4,\"group_size\":32,\"version\":\"gemm\",\"modules_to_not_convert\":[\"layers.0\"]}}");
    check_layer(0, EPMOE_BF16, EPMOE_FORMAT_BF16, 0);
    check_layer(1, EPMOE_BF16, EPMOE_FORMAT_W4, 0);
    check_layer(1, EPMOE_F16, EPMOE_FORMAT_W4, 0);
}

/* Gate rows are the first half of the fused rows, whichever way the matrix lies, and the scales go with them. */
Test(gpu_checkpoint, fused_fp8_halves)
{
    GPU_TEST_NEEDS_DEVICE();
    for (int transposed = 0; transposed < 2; transposed++) {
        const char *prefix = transposed ? "language_model.model.layers.0.feed_forward." : "model.layers.0.mlp.";
        testing_rng_t rng = testing_rng(testing_seed() + (uint64_t)transposed);
        build_file_t file = {0};
        char name[160];
        snprintf(name, sizeof name, "%sexperts.gate_up_proj", prefix);
        add_fused(&file, &rng, name, 2 * kF, kD, transposed);
        snprintf(name, sizeof name, "%sexperts.down_proj", prefix);
        add_fused(&file, &rng, name, kD, kF, transposed);
        snprintf(name, sizeof name, "%s%s.weight", prefix, transposed ? "router" : "gate");
        add_bf16(&file, &rng, name, kE, kD, 0.1f);
        for (int p = 0; p < 3 && transposed; p++) {
            snprintf(name, sizeof name, "%sshared_expert.%s.weight", prefix, projections[p]);
            add_bf16(&file, &rng, name, p == 2 ? kD : kF, p == 2 ? kF : kD, 0.08f);
        }
        folder_save_model(&file);
        build_save_text(folder_dir, "config.json",
                        transposed
                            ? "{\"model_type\":\"llama4\",\"text_config\":{\"hidden_size\":256,\"num_hidden_layers\":1,"
                              "\"num_local_experts\":3,\"num_experts_per_tok\":1,\"intermediate_size\":128,"
                              "\"intermediate_size_mlp\":512,\"hidden_act\":\"silu\"},\"quantization_config\":{"
                              "\"quant_method\":\"fp8\",\"weight_block_size\":[128,128],"
                              "\"modules_to_not_convert\":[\"shared_expert\"]}}"
                            : "{\"model_type\":\"olmoe\",\"hidden_size\":256,\"num_hidden_layers\":1,"
                              "\"num_experts_per_tok\":2,\"num_experts\":3,\"intermediate_size\":128,"
                              "\"quantization_config\":{\"quant_method\":\"fp8\",\"weight_block_size\":[128,128]}}");
        check_layer(0, EPMOE_BF16, EPMOE_FORMAT_FP8_BLOCK, -1);
        check_layer(0, EPMOE_F16, EPMOE_FORMAT_FP8_BLOCK, -1);
    }
}
