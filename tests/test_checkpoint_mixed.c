/* Checkpoints whose layers are stored in different ways, and fused gate/up weights: whole layers against the same
 * values in a plain file. */
#include "base/dtype.h"
#include "moe/checkpoint_internal.h"
#include "moe/layer.h"
#include "tests/checkpoint_folder.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>

enum { D = FOLDER_HIDDEN, F = FOLDER_WIDTH, E = 3, kTokens = 5 };

TestSuite(checkpoint_mixed, .init = folder_set_up, .fini = folder_tear_down);

static const char *const projections[] = {"gate_proj", "up_proj", "down_proj"};

/* The 4-bit value, zero point and scale that the toys have somewhere: no two neighbours alike. */
static uint32_t code_of(int64_t e, int64_t p, int64_t n, int64_t k)
{
    return (uint32_t)(7 * e + 5 * p + 3 * n + k) & 15;
}
static uint32_t zero_of(int64_t n, int64_t g) { return (uint32_t)(3 + 2 * n + g) & 15; }
static float scale_of(int64_t n, int64_t g) { return 0.25f * (float)(1 + (n + 2 * g) % 3); }

/* One projection [n,k] of expert e in AWQ's tensors, groups of two columns; scales in F16, or as E8M0 all 1.0. */
static void add_awq(build_file_t *file, int32_t e, int p, bool e8m0)
{
    static const int order[8] = {0, 2, 4, 6, 1, 3, 5, 7};
    const int64_t n = p == 2 ? D : F, k = p == 2 ? F : D, groups = k / 2;
    uint32_t words[4] = {0}, zeros[2] = {0};
    uint16_t halves[8];
    uint8_t bytes[8];
    for (int64_t c = 0; c < k; c++)
        for (int i = 0; i < 8; i++)
            if (order[i] < n) words[c] |= code_of(e, p, order[i], c) << (4 * i);
    for (int64_t g = 0; g < groups; g++) {
        for (int i = 0; i < 8; i++)
            if (order[i] < n) zeros[g] |= zero_of(order[i], g) << (4 * i);
        for (int64_t r = 0; r < n; r++) {
            epmoei_store(halves, EPMOE_F16, g * n + r, scale_of(r, g));
            bytes[g * n + r] = 127;
        }
    }
    char name[128];
    snprintf(name, sizeof name, "model.layers.1.mlp.experts.%d.%s.qweight", e, projections[p]);
    build_add(file, name, "I32", (const int64_t[]){k, 1}, 2, words, k * 4);
    snprintf(name, sizeof name, "model.layers.1.mlp.experts.%d.%s.qzeros", e, projections[p]);
    build_add(file, name, "I32", (const int64_t[]){groups, 1}, 2, zeros, groups * 4);
    snprintf(name, sizeof name, "model.layers.1.mlp.experts.%d.%s.scales", e, projections[p]);
    build_add(file, name, e8m0 ? "F8_E8M0" : "F16", (const int64_t[]){groups, n}, 2, e8m0 ? (void *)bytes : halves,
              groups * n * (e8m0 ? 1 : 2));
}

/* The same values as a plain weight in F32. */
static void add_plain(build_file_t *file, int32_t e, int p, bool e8m0)
{
    const int64_t n = p == 2 ? D : F, k = p == 2 ? F : D;
    float values[D * F];
    for (int64_t r = 0; r < n; r++)
        for (int64_t c = 0; c < k; c++)
            values[r * k + c] =
                ((float)code_of(e, p, r, c) - (float)zero_of(r, c / 2)) * (e8m0 ? 1 : scale_of(r, c / 2));
    char name[128];
    snprintf(name, sizeof name, "model.layers.1.mlp.experts.%d.%s.weight", e, projections[p]);
    build_add(file, name, "F32", (const int64_t[]){n, k}, 2, values, n * k * 4);
}

/* Two layers: the first in bf16, the experts of the second in AWQ, or with the same values in F32. */
static void save_two_layers(bool awq, bool e8m0)
{
    build_file_t file = {0};
    folder_add_qwen(&file, 0);
    folder_add_qwen(&file, 1);
    for (int32_t e = 0; e < E; e++)
        for (int p = 0; p < 3; p++) {
            char name[128];
            snprintf(name, sizeof name, "model.layers.1.mlp.experts.%d.%s.weight", e, projections[p]);
            build_remove(&file, name);
            if (awq)
                add_awq(&file, e, p, e8m0);
            else
                add_plain(&file, e, p, e8m0);
        }
    folder_save_model(&file);
    folder_config("qwen3_moe", 2,
                  awq ? FOLDER_QWEN
                      ",\"norm_topk_prob\":true,\"quantization_config\":{\"quant_method\":\"awq\",\"bits\":4,"
                      "\"group_size\":2,\"version\":\"gemm\",\"modules_to_not_convert\":[\"layers.0\"]}"
                      : FOLDER_QWEN ",\"norm_topk_prob\":true");
}

/* y of one layer in bf16, or fp32, for tokens that reach every expert. */
static void run_layer(int32_t index, epmoe_dtype_t dtype, epmoe_format_t format, float *y)
{
    epmoe_checkpoint_t *checkpoint = folder_open(0);
    epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
    epmoe_comm_config_t comm_config = EPMOE_COMM_CONFIG_INIT;
    epmoe_comm_t *comm = NULL;
    epmoe_layer_t *layer = NULL;
    comm_config.backend = EPMOE_BACKEND_CPU;
    cr_assert_eq(epmoe_checkpoint_layer_config(checkpoint, index, &config), EPMOE_OK, "%s", epmoe_last_error());
    config.max_tokens = kTokens, config.dtype = dtype;
    cr_assert_eq(epmoe_comm_create(NULL, &comm_config, &comm), EPMOE_OK);
    cr_assert_eq(epmoe_layer_create(&config, comm, &layer), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(epmoe_layer_load_checkpoint(layer, checkpoint, index, NULL), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(layer->weights.formats.gate_up, format, "layer %d is %s", index,
                 epmoe_format_string(layer->weights.formats.gate_up));
    cr_assert_eq(layer->weights.formats.router, EPMOE_BF16);
    char x[kTokens * D * 4], out[kTokens * D * 4];
    for (int i = 0; i < kTokens * D; i++) epmoei_store(x, dtype, i, 0.125f * (float)(i * 5 % 17 - 8));
    cr_assert_eq(epmoe_layer_forward(layer, x, out, kTokens, NULL), EPMOE_OK, "%s", epmoe_last_error());
    for (int i = 0; i < kTokens * D; i++) y[i] = epmoei_load(out, dtype, i);
    epmoe_layer_destroy(layer);
    epmoe_comm_destroy(comm);
    epmoe_checkpoint_close(checkpoint);
}

/* What is not quantised stays as it is; F16 scales meet bf16 activations as numbers, not as bits; E8M0's 127 is 1.0. */
Test(checkpoint_mixed, one_layer_in_bf16_and_one_in_awq)
{
    static const epmoe_dtype_t dtypes[] = {EPMOE_BF16, EPMOE_F32};
    for (int e8m0 = 0; e8m0 < 2; e8m0++)
        for (int i = 0; i < 2; i++) {
            float expected[2][kTokens * D], got[2][kTokens * D], largest = 0;
            double reference[kTokens * D];
            save_two_layers(false, e8m0);
            run_layer(0, dtypes[i], EPMOE_FORMAT_BF16, expected[0]);
            run_layer(1, dtypes[i], EPMOE_FORMAT_F32, expected[1]);
            save_two_layers(true, e8m0);
            run_layer(0, dtypes[i], EPMOE_FORMAT_BF16, got[0]);
            run_layer(1, dtypes[i], EPMOE_FORMAT_W4, got[1]);
            for (int layer = 0; layer < 2; layer++) {
                for (int j = 0; j < kTokens * D; j++) {
                    reference[j] = (double)expected[layer][j];
                    if (got[layer][j] > largest) largest = got[layer][j];
                }
                double error = testing_row_error(got[layer], EPMOE_F32, reference, kTokens, D);
                cr_assert(error <= (dtypes[i] == EPMOE_BF16 ? 1.6e-2 : 1e-5), "layer %d, %s: off by %g", layer,
                          epmoe_dtype_string(dtypes[i]), error);
            }
            cr_assert(largest > 0);
        }
}

Test(checkpoint_mixed, scales_of_a_type_that_is_none)
{
    static const struct {
        const char *dtype, *word;
        int64_t size;
    } cases[] = {{"I32", "I32", 4}, {"F4_E2M1", "F4_E2M1", 1}, {"BOOL", "BOOL", 1}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        build_file_t file = {0};
        save_two_layers(true, false);
        folder_add_qwen(&file, 0);
        folder_add_qwen(&file, 1);
        for (int32_t e = 0; e < E; e++)
            for (int p = 0; p < 3; p++) {
                char name[128];
                snprintf(name, sizeof name, "model.layers.1.mlp.experts.%d.%s.weight", e, projections[p]);
                build_remove(&file, name);
                add_awq(&file, e, p, false);
            }
        build_remove(&file, "model.layers.1.mlp.experts.2.up_proj.scales");
        build_add(&file, "model.layers.1.mlp.experts.2.up_proj.scales", cases[i].dtype, (const int64_t[]){2, 2}, 2,
                  NULL, 4 * cases[i].size);
        folder_save_model(&file);
        folder_expect_fail(EPMOE_ERROR_FORMAT, "experts.2.up_proj.scales", cases[i].word, NULL);
    }
}

/* ------------------------------------------------------------------------------------------------ fused, transposed */

enum { WIDE = 768, HALF = 512, BLOCK = 128, EXPERTS = 2 };

/* The scale of a block of gate_up [2f,d]: another for each block, row block and column block told apart. */
static float fused_scale(int64_t e, int64_t row_block, int64_t col_block)
{
    return (float)(1 + 100 * e + 10 * row_block + col_block);
}

static void add_fused(build_file_t *file, const char *name, int64_t rows, int64_t cols, bool transposed)
{
    const int64_t high = rows / BLOCK, wide = cols / BLOCK;
    uint8_t *codes = malloc((size_t)(EXPERTS * rows * cols));
    float *scales = malloc(sizeof(float) * (size_t)(EXPERTS * high * wide));
    memset(codes, 0x38, (size_t)(EXPERTS * rows * cols)); /* 1.0 */
    for (int64_t e = 0; e < EXPERTS; e++)
        for (int64_t r = 0; r < high; r++)
            for (int64_t c = 0; c < wide; c++)
                scales[e * high * wide + (transposed ? c * high + r : r * wide + c)] = fused_scale(e, r, c);
    /* One code that is 2.0 where a row and a column are told apart. */
    for (int64_t e = 0; e < EXPERTS; e++) codes[e * rows * cols + (transposed ? 3 * rows + 1 : 1 * cols + 3)] = 0x40;
    const int64_t shape[] = {EXPERTS, transposed ? cols : rows, transposed ? rows : cols};
    const int64_t scale_shape[] = {EXPERTS, transposed ? wide : high, transposed ? high : wide};
    char scale_name[160];
    snprintf(scale_name, sizeof scale_name, "%s_scale_inv", name);
    build_add(file, name, "F8_E4M3", shape, 3, codes, EXPERTS * rows * cols);
    build_add(file, scale_name, "F32", scale_shape, 3, scales, EXPERTS * high * wide * 4);
    free(codes), free(scales);
}

static void expect_fused(const char *what, const epmoei_quant_t *quant, int64_t e, int64_t first_block, bool first)
{
    cr_assert_eq(quant->format, EPMOE_FORMAT_FP8_BLOCK, "%s", what);
    float row[WIDE];
    for (int64_t r = 0; r < quant->rows; r += r < 2 ? 1 : 61) {
        epmoei_quant_row(quant, r, 0, quant->cols, row);
        for (int64_t c = 0; c < quant->cols; c++) {
            float want = fused_scale(e, first_block + r / BLOCK, c / BLOCK) * (first && r == 1 && c == 3 ? 2 : 1);
            cr_assert(row[c] == want && epmoei_quant_at(quant, r, c) == want, "%s [%d,%d] is %g: expected %g", what,
                      (int)r, (int)c, (double)row[c], (double)want);
        }
    }
}

/* Gate rows are the first half of the fused rows, whichever way the matrix lies; the scales go the same way, once. */
Test(checkpoint_mixed, fused_fp8_halves)
{
    for (int transposed = 0; transposed < 2; transposed++) {
        const char *prefix = transposed ? "language_model.model.layers.0.feed_forward." : "model.layers.0.mlp.";
        build_file_t file = {0};
        char name[128];
        snprintf(name, sizeof name, "%sexperts.gate_up_proj", prefix);
        add_fused(&file, name, 2 * HALF, WIDE, transposed);
        snprintf(name, sizeof name, "%sexperts.down_proj", prefix);
        add_fused(&file, name, WIDE, HALF, transposed);
        build_weight(&file, EXPERTS, WIDE, "%s%s.weight", prefix, transposed ? "router" : "gate");
        if (transposed)
            for (int p = 0; p < 3; p++)
                build_weight(&file, p == 2 ? WIDE : HALF, p == 2 ? HALF : WIDE, "%sshared_expert.%s.weight", prefix,
                             projections[p]);
        folder_save_model(&file);
        char config[700];
        snprintf(config, sizeof config,
                 "{\"model_type\":\"olmoe\",\"hidden_size\":%d,\"num_hidden_layers\":1,\"num_experts_per_tok\":1,"
                 "\"num_experts\":%d,\"intermediate_size\":%d,\"quantization_config\":{\"quant_method\":\"fp8\","
                 "\"weight_block_size\":[128,128]}}",
                 WIDE, EXPERTS, HALF);
        if (transposed)
            snprintf(config, sizeof config,
                     "{\"model_type\":\"llama4\",\"text_config\":{\"hidden_size\":%d,\"num_hidden_layers\":1,"
                     "\"num_local_experts\":%d,\"num_experts_per_tok\":1,\"intermediate_size\":%d,"
                     "\"intermediate_size_mlp\":512,\"hidden_act\":\"silu\"},\"quantization_config\":{"
                     "\"quant_method\":\"fp8\",\"weight_block_size\":[128,128],"
                     "\"modules_to_not_convert\":[\"shared_expert\"]}}",
                     WIDE, EXPERTS, HALF);
        build_save_text(folder_dir, "config.json", config);
        epmoe_checkpoint_t *checkpoint = folder_open(0);
        for (int32_t e = 0; e < EXPERTS; e++) {
            epmoei_expert_source_t expert;
            cr_assert_eq(epmoei_checkpoint_expert_source(checkpoint, 0, e, &expert), EPMOE_OK, "%s",
                         epmoe_last_error());
            cr_assert(expert.gate.rows == HALF && expert.gate.cols == WIDE && expert.down.rows == WIDE);
            expect_fused("gate", &expert.gate_quant.quant, e, 0, true);
            expect_fused("up", &expert.up_quant.quant, e, HALF / BLOCK, false);
            expect_fused("down", &expert.down_quant.quant, e, 0, true);
        }
        /* What a layer computes on. */
        epmoe_layer_config_t layer_config = EPMOE_LAYER_CONFIG_INIT;
        epmoe_comm_config_t comm_config = EPMOE_COMM_CONFIG_INIT;
        epmoe_comm_t *comm = NULL;
        epmoe_layer_t *layer = NULL;
        comm_config.backend = EPMOE_BACKEND_CPU;
        cr_assert_eq(epmoe_checkpoint_layer_config(checkpoint, 0, &layer_config), EPMOE_OK, "%s", epmoe_last_error());
        layer_config.max_tokens = 1;
        cr_assert_eq(epmoe_comm_create(NULL, &comm_config, &comm), EPMOE_OK);
        cr_assert_eq(epmoe_layer_create(&layer_config, comm, &layer), EPMOE_OK, "%s", epmoe_last_error());
        cr_assert_eq(epmoe_layer_load_checkpoint(layer, checkpoint, 0, NULL), EPMOE_OK, "%s", epmoe_last_error());
        epmoe_weight_t gate_up =
            epmoei_layer_weight(EPMOE_BACKEND_CPU, layer->weights.formats.gate_up, &layer->weights.formats.gate_up_pack,
                                layer->weights.gate_up, &layer->weights.gate_up_arrays);
        for (int64_t e = 0; e < EXPERTS; e++) {
            const epmoei_quant_t packed = epmoei_quant_of_weight(&gate_up, 2 * HALF, WIDE, e, HALF);
            expect_fused("packed gate and up", &packed, e, 0, true);
        }
        epmoe_layer_destroy(layer);
        epmoe_comm_destroy(comm);
        epmoe_checkpoint_close(checkpoint);
    }
}
