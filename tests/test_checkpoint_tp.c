/* The part of a layer that one rank of a tensor-parallel group loads: which rows and columns it is, with their scales,
 * and that the parts' outputs add up to the whole layer's. */
#include "base/fp8.h"
#include "moe/checkpoint_internal.h"
#include "moe/layer.h"
#include "tests/checkpoint_folder.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>

TestSuite(checkpoint_tp, .init = folder_set_up, .fini = folder_tear_down);

typedef struct part_t {
    epmoe_comm_t *comm;
    epmoe_layer_t *layer;
    epmoe_layer_config_t config;
} part_t;

/* Loads part tp_rank of layer 0; the status is the load's. */
static epmoe_status_t load_part(const epmoe_checkpoint_t *checkpoint, int32_t tp_rank, int32_t tp_size, part_t *part)
{
    epmoe_comm_config_t comm_config = EPMOE_COMM_CONFIG_INIT;
    epmoe_load_options_t options = EPMOE_LOAD_OPTIONS_INIT;
    *part = (part_t){.config = EPMOE_LAYER_CONFIG_INIT};
    comm_config.backend = EPMOE_BACKEND_CPU;
    cr_assert_eq(epmoe_checkpoint_layer_config(checkpoint, 0, &part->config), EPMOE_OK, "%s", epmoe_last_error());
    part->config.max_tokens = 8, part->config.dtype = EPMOE_F32;
    part->config.intermediate /= tp_size > 1 ? tp_size : 1;
    part->config.shared_intermediate /= tp_size > 1 ? tp_size : 1;
    cr_assert_eq(epmoe_comm_create(NULL, &comm_config, &part->comm), EPMOE_OK);
    cr_assert_eq(epmoe_layer_create(&part->config, part->comm, &part->layer), EPMOE_OK, "%s", epmoe_last_error());
    options.tp_rank = tp_rank, options.tp_size = tp_size;
    return epmoe_layer_load_checkpoint(part->layer, checkpoint, 0, &options);
}

static void drop(part_t *part)
{
    epmoe_layer_destroy(part->layer);
    epmoe_comm_destroy(part->comm);
}

/* config.json of a model with stacked experts: of a family that stores [E,2f,d], or of one that stores [E,d,2f]. */
static void save_config(bool transposed, int hidden, int experts, int width, const char *more)
{
    char config[700];
    snprintf(config, sizeof config,
             transposed ? "{\"model_type\":\"llama4\",\"text_config\":{\"hidden_size\":%d,\"num_hidden_layers\":1,"
                          "\"num_local_experts\":%d,\"num_experts_per_tok\":1,\"intermediate_size\":%d,"
                          "\"intermediate_size_mlp\":16,\"hidden_act\":\"silu\"}%s}"
                        : "{\"model_type\":\"olmoe\",\"hidden_size\":%d,\"num_hidden_layers\":1,\"num_experts\":%d,"
                          "\"num_experts_per_tok\":1,\"intermediate_size\":%d%s}",
             hidden, experts, width, more);
    build_save_text(folder_dir, "config.json", config);
}

static const char *prefix_of(bool transposed)
{
    return transposed ? "language_model.model.layers.0.feed_forward." : "model.layers.0.mlp.";
}

/* Router, and the shared expert of the family that has one. */
static void add_others(build_file_t *file, bool transposed, int hidden, int experts, int width)
{
    const char *prefix = prefix_of(transposed);
    build_weight(file, experts, hidden, "%s%s.weight", prefix, transposed ? "router" : "gate");
    if (!transposed) return;
    build_weight(file, width, hidden, "%sshared_expert.gate_proj.weight", prefix);
    build_weight(file, width, hidden, "%sshared_expert.up_proj.weight", prefix);
    build_weight(file, hidden, width, "%sshared_expert.down_proj.weight", prefix);
}

/* f = 4 and d = 2, fused rows g0..g3, u0..u3 of the values 1..8: of two ranks the first has g0 g1 u0 u1, the second
 * g2 g3 u2 u3, whichever way the fused matrix lies; and of down the columns that go with them. */
Test(checkpoint_tp, gate_and_up_are_cut_half_by_half)
{
    static const float expected[2][4] = {{1, 2, 5, 6}, {3, 4, 7, 8}};
    for (int transposed = 0; transposed < 2; transposed++) {
        float gate_up[2][16], down[2][8];
        for (int e = 0; e < 2; e++)
            for (int r = 0; r < 8; r++)
                for (int c = 0; c < 2; c++) {
                    gate_up[e][transposed ? c * 8 + r : r * 2 + c] = (float)(100 * e + r + 1);
                    if (r < 4) down[e][transposed ? r * 2 + c : c * 4 + r] = (float)(100 * e + 10 * c + r);
                }
        build_file_t file = {0};
        char name[128];
        snprintf(name, sizeof name, "%sexperts.gate_up_proj", prefix_of(transposed));
        build_add(&file, name, "F32", transposed ? (const int64_t[]){2, 2, 8} : (const int64_t[]){2, 8, 2}, 3, gate_up,
                  sizeof gate_up);
        snprintf(name, sizeof name, "%sexperts.down_proj", prefix_of(transposed));
        build_add(&file, name, "F32", transposed ? (const int64_t[]){2, 4, 2} : (const int64_t[]){2, 2, 4}, 3, down,
                  sizeof down);
        add_others(&file, transposed, 2, 2, 4);
        folder_save_model(&file);
        save_config(transposed, 2, 2, 4, "");
        epmoe_checkpoint_t *checkpoint = folder_open(0);
        for (int32_t rank = 0; rank < 2; rank++) {
            part_t part;
            cr_assert_eq(load_part(checkpoint, rank, 2, &part), EPMOE_OK, "%s", epmoe_last_error());
            const epmoei_packed_weights_t *weights = &part.layer->weights;
            cr_assert(weights->formats.gate_up == EPMOE_FORMAT_F32 && weights->formats.down == EPMOE_FORMAT_F32);
            for (int e = 0; e < 2; e++)
                for (int r = 0; r < 4; r++)
                    for (int c = 0; c < 2; c++) {
                        const float got = ((const float *)weights->gate_up)[(e * 4 + r) * 2 + c];
                        cr_assert_eq(got, (float)(100 * e) + expected[rank][r], "rank %d row %d is %g", rank, r,
                                     (double)got);
                        if (r < 2)
                            cr_assert_eq(((const float *)weights->down)[(e * 2 + c) * 2 + r],
                                         (float)(100 * e + 10 * c + 2 * rank + r));
                    }
            drop(&part);
        }
        epmoe_checkpoint_close(checkpoint);
    }
}

enum { kHidden = 768, kWidth = 512, kBlock = 128, kExperts = 2 };

/* Another scale for each block of 128x128, another code for each row and column modulo 7. */
static float block_scale(int64_t e, int64_t row, int64_t col)
{
    return (float)(1 + 100 * e + 10 * (row / kBlock) + col / kBlock);
}
static uint8_t code_at(int64_t row, int64_t col) { return (uint8_t)(0x30 + (row + 3 * col) % 7); }
static float value_at(int64_t e, int64_t row, int64_t col)
{
    return epmoei_e4m3_to_f32(code_at(row, col)) * block_scale(e, row, col);
}

static void add_fp8(build_file_t *file, const char *name, int64_t rows, int64_t cols, bool transposed)
{
    const int64_t high = rows / kBlock, wide = cols / kBlock;
    uint8_t *codes = malloc((size_t)(kExperts * rows * cols));
    float *scales = malloc(sizeof(float) * (size_t)(kExperts * high * wide));
    cr_assert(codes && scales);
    for (int64_t e = 0; e < kExperts; e++) {
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < cols; c++)
                codes[e * rows * cols + (transposed ? c * rows + r : r * cols + c)] = code_at(r, c);
        for (int64_t r = 0; r < high; r++)
            for (int64_t c = 0; c < wide; c++)
                scales[e * high * wide + (transposed ? c * high + r : r * wide + c)] =
                    block_scale(e, r * kBlock, c * kBlock);
    }
    const int64_t shape[] = {kExperts, transposed ? cols : rows, transposed ? rows : cols};
    const int64_t scale_shape[] = {kExperts, transposed ? wide : high, transposed ? high : wide};
    char scale_name[160];
    snprintf(scale_name, sizeof scale_name, "%s_scale_inv", name);
    build_add(file, name, "F8_E4M3", shape, 3, codes, kExperts * rows * cols);
    build_add(file, scale_name, "F32", scale_shape, 3, scales, kExperts * high * wide * 4);
    free(codes), free(scales);
}

/* One matrix of an expert as the layer keeps it, whatever the format. */
static void expect_matrix(const char *what, epmoe_format_t format, const epmoei_pack_shape_t *pack, const void *data,
                          const epmoei_pack_arrays_t *arrays, int64_t rows, int64_t cols, int64_t half, int64_t e,
                          const int64_t *first_rows, int64_t first_col)
{
    epmoe_weight_t weight = epmoei_layer_weight(EPMOE_BACKEND_CPU, format, pack, (void *)(uintptr_t)data, arrays);
    epmoei_quant_t quant = {0};
    if (format == EPMOE_FORMAT_FP8_BLOCK) quant = epmoei_quant_of_weight(&weight, rows, cols, e, half);
    for (int64_t r = 0; r < rows; r += 1 + r % 3)
        for (int64_t c = 0; c < cols; c += 1 + c % 5) {
            const int64_t row = half && r >= half ? first_rows[1] + r - half : first_rows[0] + r;
            const float got = format == EPMOE_FORMAT_FP8_BLOCK ? epmoei_quant_at(&quant, r, c)
                                                               : ((const float *)data)[(e * rows + r) * cols + c];
            const float want = value_at(e, row, first_col + c);
            cr_assert_eq(got, want, "%s [%d,%d] is %g: expected %g", what, (int)r, (int)c, (double)got, (double)want);
        }
}

/* d = 768 and f = 512 in blocks of 128: the scales go with their rows and columns, and are not transposed twice. With
 * eight ranks parts begin inside blocks, and gate and up are kept as fp32. */
Test(checkpoint_tp, scales_of_blocks_go_with_their_part)
{
    static const int32_t sizes[] = {2, 4, 8};
    for (int transposed = 0; transposed < 2; transposed++) {
        build_file_t file = {0};
        char name[128];
        snprintf(name, sizeof name, "%sexperts.gate_up_proj", prefix_of(transposed));
        add_fp8(&file, name, 2 * kWidth, kHidden, transposed);
        snprintf(name, sizeof name, "%sexperts.down_proj", prefix_of(transposed));
        add_fp8(&file, name, kHidden, kWidth, transposed);
        add_others(&file, transposed, kHidden, kExperts, kWidth);
        folder_save_model(&file);
        save_config(transposed, kHidden, kExperts, kWidth,
                    ",\"quantization_config\":{\"quant_method\":\"fp8\",\"weight_block_size\":[128,128],"
                    "\"modules_to_not_convert\":[\"shared_expert\"]}");
        epmoe_checkpoint_t *checkpoint = folder_open(0);
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
            for (int32_t rank = 0; rank < sizes[i]; rank++) {
                part_t part;
                cr_assert_eq(load_part(checkpoint, rank, sizes[i], &part), EPMOE_OK, "%s", epmoe_last_error());
                const epmoei_packed_weights_t *weights = &part.layer->weights;
                const epmoei_layer_formats_t *formats = &weights->formats;
                const int64_t f = kWidth / sizes[i], first[] = {rank * f, kWidth + rank * f}, zero[] = {0, 0};
                const bool cut = f % kBlock && rank % 2;
                cr_assert_eq(formats->gate_up, cut ? EPMOE_FORMAT_F32 : EPMOE_FORMAT_FP8_BLOCK);
                cr_assert_eq(formats->down, EPMOE_FORMAT_FP8_BLOCK);
                for (int64_t e = 0; e < kExperts; e++) {
                    expect_matrix("gate and up", formats->gate_up, &formats->gate_up_pack, weights->gate_up,
                                  &weights->gate_up_arrays, 2 * f, kHidden, f, e, first, 0);
                    expect_matrix("down", formats->down, &formats->down_pack, weights->down, &weights->down_arrays,
                                  kHidden, f, 0, e, zero, rank * f);
                }
                drop(&part);
            }
        epmoe_checkpoint_close(checkpoint);
    }
}

static void forward(const part_t *part, const float *x, int32_t tokens, float *y)
{
    cr_assert_eq(epmoe_layer_forward(part->layer, x, y, tokens, NULL), EPMOE_OK, "%s", epmoe_last_error());
}

/* Every format, with biases, shared experts and down biases: the parts' outputs add up to the whole layer's. */
Test(checkpoint_tp, the_parts_add_up)
{
    static const struct {
        const char *name;
        int32_t size;
    } cases[] = {{"mixtral", 2},          {"mixtral", 3},
                 {"qwen2_moe", 4},        {"deepseek_v2", 2},
                 {"deepseek_v3", 4},      {"glm4_moe", 2},
                 {"gpt_oss", 2},          {"gpt_oss_mxfp4", 3},
                 {"qwen3_moe_awq", 3},    {"qwen3_moe_gptq", 3},
                 {"qwen3_moe_fp8", 3},    {"qwen3_moe_gptq_v2_g128", 3},
                 {"deepseek_v3_fp8", 2},  {"deepseek_v3_gptq_asym_v1", 2},
                 {"deepseek_v3_ct_w4", 2}};
    enum { kTokens = 6 };
    testing_rng_t rng = testing_rng(testing_seed());
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char path[512];
        part_t part;
        snprintf(path, sizeof path, "%s/golden/%s", EPMOE_TEST_DATA, cases[i].name);
        epmoe_checkpoint_t *checkpoint = NULL;
        cr_assert_eq(epmoe_checkpoint_open(path, &checkpoint), EPMOE_OK, "%s", epmoe_last_error());
        cr_assert_eq(load_part(checkpoint, 0, 0, &part), EPMOE_OK, "%s", epmoe_last_error());
        const int64_t d = part.config.hidden, n = kTokens * d;
        float *x = malloc(sizeof(float) * (size_t)n), *y = malloc(sizeof(float) * (size_t)n);
        double *whole = malloc(sizeof(double) * (size_t)n), *sum = calloc((size_t)n, sizeof(double));
        cr_assert(x && y && whole && sum);
        testing_fill_normal(&rng, x, EPMOE_F32, n, 1.0f);
        forward(&part, x, kTokens, y);
        drop(&part);
        for (int64_t j = 0; j < n; j++) whole[j] = (double)y[j];
        for (int32_t rank = 0; rank < cases[i].size; rank++) {
            cr_assert_eq(load_part(checkpoint, rank, cases[i].size, &part), EPMOE_OK, "%s", epmoe_last_error());
            forward(&part, x, kTokens, y);
            drop(&part);
            for (int64_t j = 0; j < n; j++) sum[j] += (double)y[j];
        }
        for (int64_t j = 0; j < n; j++) y[j] = (float)sum[j];
        const double error = testing_row_error(y, EPMOE_F32, whole, kTokens, d);
        cr_assert(error <= 2e-5, "%s in %d: off by %g", cases[i].name, cases[i].size, error);
        epmoe_checkpoint_close(checkpoint);
        free(x), free(y), free(whole), free(sum);
    }
}

Test(checkpoint_tp, what_cannot_be_cut)
{
    static const struct {
        const char *name;
        int32_t rank, size;
        epmoe_status_t status;
        const char *text;
    } cases[] = {{"mixtral", 0, 5, EPMOE_ERROR_INVALID_ARGUMENT, "divisor of the intermediate 96"},
                 {"mixtral", 2, 2, EPMOE_ERROR_INVALID_ARGUMENT, "options.tp_rank is 2"},
                 {"mixtral", -1, 2, EPMOE_ERROR_INVALID_ARGUMENT, "options.tp_rank is -1"},
                 {"mixtral", 1, 0, EPMOE_ERROR_INVALID_ARGUMENT, "options.tp_rank is 1"},
                 {"mixtral", 0, -2, EPMOE_ERROR_INVALID_ARGUMENT, "options.tp_size is -2"},
                 {"qwen3_moe_awq", 1, 2, EPMOE_ERROR_NOT_SUPPORTED, "cuts its groups"},
                 {"qwen3_moe_awq", 0, 2, EPMOE_ERROR_NOT_SUPPORTED, "cuts its groups"}, /* another rank's */
                 {"gpt_oss_mxfp4", 0, 2, EPMOE_ERROR_NOT_SUPPORTED, "cuts its groups"},
                 {"qwen3_moe_gptq_v2_g128", 1, 96, EPMOE_ERROR_NOT_SUPPORTED, "words of eight"},
                 {"qwen3_moe_gptq_v2_g128", 0, 96, EPMOE_ERROR_NOT_SUPPORTED, "words of eight"},
                 {"deepseek_v3_gptq_actorder", 1, 2, EPMOE_ERROR_NOT_SUPPORTED, "g_idx"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char path[512];
        part_t part;
        epmoe_checkpoint_t *checkpoint = NULL;
        snprintf(path, sizeof path, "%s/golden/%s", EPMOE_TEST_DATA, cases[i].name);
        cr_assert_eq(epmoe_checkpoint_open(path, &checkpoint), EPMOE_OK, "%s", epmoe_last_error());
        cr_assert_eq(load_part(checkpoint, cases[i].rank, cases[i].size, &part), cases[i].status, "%s in %d: %s",
                     cases[i].name, cases[i].size, epmoe_last_error());
        cr_assert(strstr(epmoe_last_error(), cases[i].text), "%s", epmoe_last_error());
        cr_assert_not(part.layer->has_weights);
        drop(&part);
        epmoe_checkpoint_close(checkpoint);
    }
}
