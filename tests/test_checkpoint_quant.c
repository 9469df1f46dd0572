/* Quantised checkpoints: toys of every format that are read, and those that must not be; the golden ones in one
 * process. */
#include "moe/checkpoint_internal.h"
#include "moe/layer.h"
#include "tests/checkpoint_folder.h"
#include "tests/testing_tool.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { D = FOLDER_HIDDEN, F = FOLDER_WIDTH };

TestSuite(checkpoint_quant, .init = folder_set_up, .fini = folder_tear_down);

#define UP "model.layers.1.mlp.experts.1.up_proj"

static void add(build_file_t *file, const char *suffix, const char *dtype, int64_t dim0, int64_t dim1, const void *data)
{
    char name[128];
    const int64_t shape[] = {dim0, dim1};
    int64_t size = strstr(dtype, "8") ? 1 : strstr(dtype, "16") ? 2 : strstr(dtype, "64") ? 8 : 4;
    snprintf(name, sizeof name, UP "%s", suffix);
    build_add(file, name, dtype, shape, dim1 ? 2 : 1, data, dim0 * (dim1 ? dim1 : 1) * size);
}

/* Layer 0 plain, layer 1 with expert 1's up projection [2,4] to be added in another format. */
static build_file_t start(const char *quantization)
{
    build_file_t file = {0};
    char config[512];
    folder_add_qwen(&file, 0);
    folder_add_qwen(&file, 1);
    build_remove(&file, UP ".weight");
    snprintf(config, sizeof config, FOLDER_QWEN ",\"norm_topk_prob\":true,\"quantization_config\":{%s}", quantization);
    folder_config("qwen3_moe", 2, config);
    return file;
}

#define LIST ",\"modules_to_not_convert\":[\"gate_proj\",\"down_proj\",\"layers.0\",\"experts.0\",\"experts.2\"]"
#define GPTQ "\"quant_method\":\"gptq\",\"bits\":4,\"group_size\":2,\"desc_act\":false" LIST

static const uint32_t gptq_words[] = {0x4321, 0x8765}, gptq_zeros[] = {0x11, 0x11};
static const uint16_t gptq_scales[] = {0x3C00, 0x3C00, 0x4000, 0x4000};

static build_file_t start_gptq(const char *quantization)
{
    build_file_t file = start(quantization);
    add(&file, ".qweight", "I32", 1, 2, gptq_words);
    add(&file, ".qzeros", "I32", 2, 1, gptq_zeros);
    add(&file, ".scales", "F16", 2, 2, gptq_scales);
    return file;
}

/* The up projection as fp32 [2,4] is `expected`, and the layer's config names the format of its first expert. */
static void expect_up(epmoe_format_t format, const double *expected)
{
    epmoe_checkpoint_t *checkpoint = folder_open(0);
    epmoei_expert_source_t expert;
    cr_assert_eq(epmoei_checkpoint_expert_source(checkpoint, 1, 1, &expert), EPMOE_OK, "%s", epmoe_last_error());
    const epmoei_quant_t *quant = &expert.up_quant.quant;
    cr_assert(quant->format == format && expert.gate_quant.quant.format == EPMOE_FORMAT_NONE);
    cr_assert(expert.up.rows == F && expert.up.cols == D && expert.up.dtype == EPMOE_DTYPE_NONE);
    for (int i = 0; i < F * D; i++)
        cr_assert((double)epmoei_quant_at(quant, i / D, i % D) == expected[i], "%s [%d] is %g: expected %g",
                  epmoe_format_string(format), i, (double)epmoei_quant_at(quant, i / D, i % D), expected[i]);
    /* The other experts are plain: the layer holds them all as fp32, and the values are the dequantised ones. */
    epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
    epmoe_layer_t *layer = NULL;
    cr_assert_eq(epmoe_checkpoint_layer_config(checkpoint, 1, &config), EPMOE_OK);
    config.max_tokens = 1;
    config.dtype = EPMOE_F32;
    epmoe_comm_t *comm = NULL;
    epmoe_comm_config_t comm_config = EPMOE_COMM_CONFIG_INIT;
    comm_config.backend = EPMOE_BACKEND_CPU;
    cr_assert_eq(epmoe_comm_create(NULL, &comm_config, &comm), EPMOE_OK);
    cr_assert_eq(epmoe_layer_create(&config, comm, &layer), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(epmoe_layer_load_checkpoint(layer, checkpoint, 1, NULL), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(layer->weights.formats.gate_up, EPMOE_FORMAT_F32);
    const char *warning = strstr(folder_log, ": layer 1: quantised weights gate_up are kept as fp32: expert 1 up: ");
    cr_assert(warning && strchr(warning, '\n')[1] == 0 && !strncmp(folder_log, folder_dir, strlen(folder_dir)), "%s",
              folder_log);
    const float *gate_up = layer->weights.gate_up;
    for (int i = 0; i < F * D; i++) cr_assert((double)gate_up[(1 * 2 * F + F) * D + i] == expected[i]);
    epmoe_layer_destroy(layer);
    epmoe_comm_destroy(comm);
    epmoe_checkpoint_close(checkpoint);
}

Test(checkpoint_quant, toys_of_every_format)
{
    /* Groups of two columns with scales 1 and 2; stored zero 1 is zero 2 in v1. */
    build_file_t file = start_gptq(GPTQ);
    folder_save_model(&file);
    expect_up(EPMOE_FORMAT_GPTQ, (const double[]){-1, 0, 2, 4, 3, 4, 10, 12});
    file = start_gptq(GPTQ ",\"checkpoint_format\":\"gptq_v2\"");
    folder_save_model(&file);
    expect_up(EPMOE_FORMAT_GPTQ, (const double[]){0, 1, 4, 6, 4, 5, 12, 14});
    /* By g_idx columns 0 and 3 are group 1; and groups of unequal width are legal too. */
    const int32_t even[] = {1, 0, 0, 1}, uneven[] = {1, 0, 0, 0};
    file = start_gptq("\"quant_method\":\"gptq\",\"bits\":4,\"group_size\":2,\"desc_act\":true" LIST);
    add(&file, ".g_idx", "I32", 4, 0, even);
    folder_save_model(&file);
    expect_up(EPMOE_FORMAT_GPTQ, (const double[]){-2, 0, 1, 4, 6, 4, 5, 12});
    file = start_gptq(GPTQ);
    add(&file, ".g_idx", "I32", 4, 0, uneven);
    folder_save_model(&file);
    expect_up(EPMOE_FORMAT_GPTQ, (const double[]){-2, 0, 1, 2, 6, 4, 5, 6});

    const uint32_t awq[] = {0x00020001, 0x00040003, 0x00060005, 0x00080007}, awq_zeros[] = {0x00010000, 0x00020000};
    file = start("\"quant_method\":\"awq\",\"bits\":4,\"group_size\":2,\"version\":\"GEMM\"" LIST);
    add(&file, ".qweight", "I32", 4, 1, awq); /* nibble 0 is n = 0, nibble 4 is n = 1 */
    add(&file, ".qzeros", "I32", 2, 1, awq_zeros);
    add(&file, ".scales", "F16", 2, 2, gptq_scales);
    folder_save_model(&file);
    expect_up(EPMOE_FORMAT_AWQ, (const double[]){1, 3, 10, 14, 1, 3, 8, 12});

    const uint32_t packed[] = {0x8765, 0xCBA9};
    const uint16_t bf16[] = {0x3F80, 0x4000, 0x4080, 0x4100};
    const int64_t shape[] = {2, 4};
    file =
        start("\"quant_method\":\"compressed-tensors\",\"format\":\"pack-quantized\",\"config_groups\":{\"group_0\":{"
              "\"targets\":[\"Linear\"],\"weights\":{\"num_bits\":4,\"type\":\"int\",\"strategy\":\"group\","
              "\"group_size\":2}}},\"ignore\":[\"re:.*(gate|down)_proj$\",\"layers.0\",\"re:.*experts\\\\.[02].*\"]");
    add(&file, ".weight_packed", "I32", 2, 1, packed);
    add(&file, ".weight_scale", "BF16", 2, 2, bf16);
    add(&file, ".weight_shape", "I64", 2, 0, shape);
    folder_save_model(&file);
    expect_up(EPMOE_FORMAT_CT_W4, (const double[]){-3, -2, -2, 0, 4, 8, 24, 32});

    const uint8_t codes[] = {0x38, 0x40, 0xB8, 0x01, 0x7E, 0x00, 0x80, 0x30}, e8m0[] = {128};
    const uint16_t half[] = {0x3F00};
    file = start("\"quant_method\":\"fp8\",\"weight_block_size\":[128,128]" LIST);
    add(&file, ".weight", "F8_E4M3", 2, 4, codes);
    add(&file, ".weight_scale_inv", "BF16", 1, 1, half);
    folder_save_model(&file);
    expect_up(EPMOE_FORMAT_FP8_BLOCK, (const double[]){.5, 1, -.5, 0x1p-10, 224, 0, 0, .25});
    file = start("\"quant_method\":\"fp8\",\"weight_block_size\":[128,128]" LIST);
    add(&file, ".weight", "F8_E4M3", 2, 4, codes);
    add(&file, ".weight_scale", "F8_E8M0", 1, 1, e8m0);
    folder_save_model(&file);
    expect_up(EPMOE_FORMAT_FP8_BLOCK, (const double[]){2, 4, -2, 0x1p-8, 896, 0, 0, 1});
    /* One scale for the matrix, where no block size is said. */
    const float three[] = {3};
    file = start("\"quant_method\":\"fp8\"" LIST);
    add(&file, ".weight", "F8_E4M3", 2, 4, codes);
    add(&file, ".weight_scale", "F32", 1, 0, three);
    folder_save_model(&file);
    expect_up(EPMOE_FORMAT_FP8_BLOCK, (const double[]){3, 6, -3, 3 * 0x1p-9, 1344, 0, 0, 1.5});
}

#define FLOAT8(more)                                                                                                   \
    "\"quant_method\":\"compressed-tensors\",\"format\":\"float-quantized\",\"config_groups\":{\"group_0\":{"          \
    "\"weights\":{\"num_bits\":8,\"type\":\"float\"" more "}}},"                                                       \
    "\"ignore\":[\"re:.*(gate|down)_proj$\",\"layers.0\",\"re:.*experts\\\\.[02].*\"]"

static build_file_t start_float8(const char *quantization, const char *dtype, int64_t dim0, int64_t dim1,
                                 const void *scales)
{
    static const uint8_t codes[] = {0x38, 0x40, 0xB8, 0x01, 0x7E, 0x00, 0x80, 0x30};
    build_file_t file = start(quantization);
    add(&file, ".weight", "F8_E4M3", 2, 4, codes);
    add(&file, ".weight_scale", dtype, dim0, dim1, scales);
    return file;
}

/* compressed-tensors' FP8: the config says what a scale is of, the shapes must agree. */
Test(checkpoint_quant, float8_of_compressed_tensors)
{
    static const double by_row[] = {.5, 1, -.5, 0x1p-10, 1344, 0, 0, 1.5},
                        whole[] = {.5, 1, -.5, 0x1p-10, 224, 0, 0, .25};
    const uint16_t bf16[] = {0x3F00, 0x4040};
    const float f32[] = {.5f, 3};
    build_file_t file = start_float8(FLOAT8(",\"strategy\":\"channel\""), "BF16", 2, 1, bf16);
    folder_save_model(&file);
    expect_up(EPMOE_FORMAT_FP8_BLOCK, by_row);
    file = start_float8(FLOAT8(",\"strategy\":\"channel\""), "F32", 2, 1, f32);
    folder_save_model(&file);
    expect_up(EPMOE_FORMAT_FP8_BLOCK, by_row);
    file = start_float8(FLOAT8(",\"strategy\":\"tensor\""), "F32", 1, 0, f32);
    add(&file, ".input_scale", "F32", 1, 0, f32);
    folder_save_model(&file);
    expect_up(EPMOE_FORMAT_FP8_BLOCK, whole);
    file = start_float8(FLOAT8(",\"strategy\":\"block\",\"block_structure\":[128,128]"), "BF16", 1, 1, bf16);
    folder_save_model(&file);
    expect_up(EPMOE_FORMAT_FP8_BLOCK, whole);

    file = start_float8(FLOAT8(",\"strategy\":\"channel\""), "F32", 1, 0, f32);
    folder_save_model(&file);
    folder_expect_fail(EPMOE_ERROR_FORMAT, UP ".weight_scale", NULL);
    file = start_float8(FLOAT8(",\"strategy\":\"channel\""), "F32", 1, 2, f32);
    folder_save_model(&file);
    folder_expect_fail(EPMOE_ERROR_FORMAT, UP ".weight_scale", "[1,2]", "[2,1]", NULL);
    file = start_float8(FLOAT8(",\"strategy\":\"tensor\""), "F32", 2, 1, f32);
    folder_save_model(&file);
    folder_expect_fail(EPMOE_ERROR_FORMAT, UP ".weight_scale", "strategy is tensor", NULL);
    file = start_float8(FLOAT8(",\"strategy\":\"block\""), "F32", 1, 1, f32);
    folder_save_model(&file);
    folder_expect_fail(EPMOE_ERROR_FORMAT, "block_structure", NULL);
    /* Codes without a scale are no weight. */
    file = start_float8(FLOAT8(",\"strategy\":\"channel\""), "F32", 2, 1, f32);
    build_remove(&file, UP ".weight_scale");
    folder_save_model(&file);
    folder_expect_fail(EPMOE_ERROR_FORMAT, UP ".weight_scale", NULL);
}

#define FAILS(...) folder_save_model(&file), folder_expect_fail(EPMOE_ERROR_FORMAT, __VA_ARGS__, NULL)

Test(checkpoint_quant, malformed_files)
{
    build_file_t file = start_gptq(GPTQ);
    build_remove(&file, UP ".qzeros");
    FAILS(UP ".qzeros", "is missing");
    file = start_gptq(GPTQ);
    build_remove(&file, UP ".scales");
    FAILS(UP ".scales", "is missing");
    file = start_gptq("\"quant_method\":\"gptq\",\"bits\":4,\"group_size\":2,\"desc_act\":true");
    FAILS(UP ".g_idx", "is missing");
    file = start_gptq("\"quant_method\":\"gptq\",\"bits\":4,\"group_size\":3");
    build_remove(&file, UP ".scales");
    add(&file, ".scales", "F16", 1, 2, gptq_scales);
    FAILS(UP ".scales", "[1,2]", "expected [2,2]", "group_size is 3");
    file = start_gptq("\"quant_method\":\"gptq\",\"bits\":4,\"group_size\":4");
    FAILS(UP ".qzeros", "[2,1]", "expected [1,1]", "group_size is 4");
    file = start_gptq(GPTQ);
    add(&file, ".g_idx", "I32", 3, 0, NULL);
    FAILS(UP ".g_idx", "[3]", "expected [4]");
    file = start_gptq(GPTQ);
    add(&file, ".g_idx", "I64", 4, 0, NULL);
    FAILS(UP ".g_idx", "I64", "expected I32");
    file = start_gptq(GPTQ);
    build_remove(&file, UP ".scales");
    add(&file, ".scales", "I8", 2, 2, NULL);
    FAILS(UP ".scales", "I8", "F32, BF16, F16 or F8_E8M0");
    file = start_gptq("\"quant_method\":\"fp8\"");
    FAILS(UP ".qweight", "gptq", "quant_method is \"fp8\"");
    file = start_gptq("\"quant_method\":\"gptq\",\"group_size\":0");
    FAILS("quantization_config.group_size", "-1");
    file = start_gptq("\"quant_method\":\"gptq\",\"bits\":\"4\"");
    FAILS("quantization_config.bits", "an integer");
    file = start_gptq("\"quant_method\":\"gptq\",\"modules_to_not_convert\":\"gate\"");
    FAILS("modules_to_not_convert", "a list of strings");
    file = start("\"quant_method\":\"fp8\",\"weight_block_size\":[128,128]");
    add(&file, ".weight", "F8_E4M3", 2, 4, NULL);
    FAILS(UP ".weight_scale_inv", "is missing");
    file = start("\"quant_method\":\"fp8\",\"weight_block_size\":[128,128]");
    add(&file, ".weight", "F8_E4M3", 2, 4, NULL);
    add(&file, ".weight_scale_inv", "F32", 2, 1, NULL);
    FAILS(UP ".weight_scale_inv", "[2,1]", "expected [1,1]");
    file = start("\"quant_method\":\"fp8\",\"weight_block_size\":[128]");
    FAILS("weight_block_size", "two integers");
    file = start_gptq(GPTQ);
    add(&file, ".weight", "BF16", 2, 4, NULL);
    FAILS(UP, "belongs to a quantised weight", "BF16");
    const int64_t transposed[] = {4, 2};
    file = start("\"quant_method\":\"compressed-tensors\",\"format\":\"pack-quantized\",\"config_groups\":{\"g\":{"
                 "\"weights\":{\"num_bits\":4,\"group_size\":4}}}");
    add(&file, ".weight_packed", "I32", 2, 1, NULL);
    add(&file, ".weight_scale", "BF16", 2, 1, NULL);
    add(&file, ".weight_shape", "I64", 2, 0, transposed);
    FAILS(UP ".weight_shape", "holds [4,2]", "expected [2,4]");
    file = start_float8(FLOAT8(",\"num_bits\":4"), "F32", 1, 0, NULL);
    FAILS("twice");
    file = start_float8("\"quant_method\":\"compressed-tensors\",\"format\":\"float-quantized\",\"config_groups\":{"
                        "\"group_0\":{\"weights\":{\"num_bits\":4}}}",
                        "F32", 1, 0, NULL);
    FAILS("num_bits is not 8");
    folder_config("qwen3_moe", 2, FOLDER_QWEN ",\"quantization_config\":[4]");
    folder_expect_fail(EPMOE_ERROR_FORMAT, "quantization_config is not an object", NULL);
}

#define CT(...)                                                                                                        \
    "\"quant_method\":\"compressed-tensors\",\"format\":\"pack-quantized\",\"config_groups\":{\"group_0\":{"           \
    "\"weights\":{\"num_bits\":4,\"group_size\":2," __VA_ARGS__ "}}},\"ignore\":[\"re:.*(gate|down)_proj$\","          \
    "\"layers.0\",\"re:.*experts\\\\.[02].*\"]"

static build_file_t start_ct(const char *quantization)
{
    static const uint32_t packed[] = {0x8765, 0xCBA9};
    static const uint16_t scales[] = {0x3F80, 0x4000, 0x4080, 0x4100};
    static const int64_t shape[] = {2, 4};
    build_file_t file = start(quantization);
    add(&file, ".weight_packed", "I32", 2, 1, packed);
    add(&file, ".weight_scale", "BF16", 2, 2, scales);
    add(&file, ".weight_shape", "I64", 2, 0, shape);
    return file;
}

/* Zero points and column groups that the config speaks of are no option: without them every value would be another. */
Test(checkpoint_quant, compressed_tensors_needs_what_its_config_says)
{
    const uint32_t zeros[] = {0x31, 0x42};
    const int32_t g_idx[] = {1, 0, 0, 1};
    build_file_t file = start_ct(CT("\"symmetric\":false"));
    FAILS(UP ".weight_zero_point", "is missing");
    file = start_ct(CT("\"symmetric\":\"no\""));
    FAILS("symmetric", "a boolean");
    static const char *const ordered[] = {CT("\"actorder\":\"group\""), CT("\"actorder\":\"dynamic\""),
                                          CT("\"actorder\":true")};
    for (size_t i = 0; i < sizeof ordered / sizeof ordered[0]; i++) {
        file = start_ct(ordered[i]);
        FAILS(UP ".weight_g_idx", "is missing");
    }
    file = start_ct(CT("\"actorder\":4"));
    FAILS("actorder", "a string or a boolean");
    static const char *const plain[] = {CT("\"symmetric\":true,\"actorder\":null"), CT("\"actorder\":\"weight\""),
                                        CT("\"actorder\":\"static\""), CT("\"actorder\":false")};
    for (size_t i = 0; i < sizeof plain / sizeof plain[0]; i++) {
        file = start_ct(plain[i]);
        folder_save_model(&file);
        expect_up(EPMOE_FORMAT_CT_W4, (const double[]){-3, -2, -2, 0, 4, 8, 24, 32});
    }
    /* Zeros 1 and 2 of row 0, 3 and 4 of row 1; then columns 0 and 3 in group 1. */
    file = start_ct(CT("\"symmetric\":false"));
    add(&file, ".weight_zero_point", "I32", 1, 2, zeros);
    folder_save_model(&file);
    expect_up(EPMOE_FORMAT_CT_W4, (const double[]){4, 5, 10, 12, 24, 28, 56, 64});
    file = start_ct(CT("\"symmetric\":false,\"actorder\":\"group\""));
    add(&file, ".weight_zero_point", "I32", 1, 2, zeros);
    add(&file, ".weight_g_idx", "I32", 4, 0, g_idx);
    folder_save_model(&file);
    expect_up(EPMOE_FORMAT_CT_W4, (const double[]){6, 5, 6, 12, 40, 28, 32, 64});
}

/* One scale per row, said by its strategy alone. */
Test(checkpoint_quant, compressed_tensors_by_channel)
{
    static const uint16_t scales[] = {0x3F80, 0x4000};
    build_file_t file = start_ct(CT("\"strategy\":\"channel\""));
    build_remove(&file, UP ".weight_scale");
    add(&file, ".weight_scale", "BF16", 2, 1, scales);
    folder_save_model(&file);
    expect_up(EPMOE_FORMAT_CT_W4, (const double[]){-3, -2, -1, 0, 2, 4, 6, 8});
    file = start_ct(CT("\"strategy\":\"channel\""));
    FAILS(UP ".weight_scale", "[2,2]", "expected [2,1]", "strategy is channel");
}

/* The layer says that it is NOT_SUPPORTED, with this tensor and the reason, and leaves the config as it is. */
static void expect_unsupported(const char *tensor, const char *reason)
{
    epmoe_checkpoint_t *checkpoint = folder_open(0);
    epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
    const epmoe_layer_config_t untouched = config;
    cr_assert_eq(epmoe_checkpoint_layer_config(checkpoint, 1, &config), EPMOE_ERROR_NOT_SUPPORTED, "%s", reason);
    cr_assert(strstr(epmoe_last_error(), tensor), "\"%s\" is not in \"%s\"", tensor, epmoe_last_error());
    cr_assert(strstr(epmoe_last_error(), reason), "\"%s\" is not in \"%s\"", reason, epmoe_last_error());
    cr_assert_eq(memcmp(&config, &untouched, sizeof config), 0, "%s: the config was written", reason);
    epmoe_checkpoint_close(checkpoint);
}

Test(checkpoint_quant, schemes_that_cannot_be_read_are_named)
{
    static const struct {
        const char *quantization;
        const char *reason;
    } packed[] = {
        {CT("\"actorder\":\"best\""), "actorder is best: expected group or weight"},
        {CT("\"strategy\":\"block\""), "strategy is block: expected group or channel"},
        {CT("\"type\":\"float\""), "type is float: expected int"},
        {"\"quant_method\":\"compressed-tensors\",\"format\":\"marlin-24\",\"config_groups\":{\"g\":{\"weights\":{"
         "\"num_bits\":4,\"group_size\":2}}},\"ignore\":[\"re:.*(gate|down)_proj$\",\"layers.0\","
         "\"re:.*experts\\\\.[02].*\"]",
         "format is marlin-24: expected pack-quantized or float-quantized"},
    };
    for (size_t i = 0; i < sizeof packed / sizeof packed[0]; i++) {
        build_file_t file = start_ct(packed[i].quantization);
        folder_save_model(&file);
        expect_unsupported(UP ".weight_packed", packed[i].reason);
    }
    build_file_t file = start_float8(FLOAT8(",\"strategy\":\"token\""), "F32", 1, 0, NULL);
    folder_save_model(&file);
    expect_unsupported(UP ".weight", "strategy is token: expected tensor, channel or block");
    file = start("\"quant_method\":\"fp8\",\"weight_block_size\":[128,64]" LIST);
    add(&file, ".weight", "F8_E4M3", 2, 4, NULL);
    add(&file, ".weight_scale_inv", "F32", 1, 1, NULL);
    folder_save_model(&file);
    expect_unsupported(UP ".weight", "weight_block_size is [128,64]: expected two equal numbers");
}

/* What another program may run but this one cannot: the file opens, its layer is NOT_SUPPORTED and says why. */
Test(checkpoint_quant, what_cannot_be_read_is_named)
{
    static const struct {
        const char *quantization;
        const char *message;
    } cases[] = {
        {"\"quant_method\":\"gptq\",\"bits\":8,\"group_size\":2" LIST, "bits is 8: expected 4"},
        {"\"quant_method\":\"gptq\",\"checkpoint_format\":\"marlin\",\"group_size\":2" LIST,
         "checkpoint_format is marlin"},
        {"\"quant_method\":\"awq\",\"version\":\"gemv\",\"group_size\":2" LIST, "version is gemv: expected gemm"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        build_file_t file = start_gptq(cases[i].quantization);
        folder_save_model(&file);
        epmoe_checkpoint_t *checkpoint = folder_open(0);
        epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
        cr_assert_eq(epmoe_checkpoint_layer_config(checkpoint, 0, &config), EPMOE_OK, "%s", epmoe_last_error());
        cr_assert_eq(epmoe_checkpoint_layer_config(checkpoint, 1, &config), EPMOE_ERROR_NOT_SUPPORTED);
        cr_assert(strstr(epmoe_last_error(), cases[i].message), "%s", epmoe_last_error());
        cr_assert(strstr(epmoe_last_error(), UP ".qweight"), "%s", epmoe_last_error());
        epmoe_checkpoint_close(checkpoint);
    }
    /* A router is never quantised, and I8 is no format. */
    build_file_t file = {0};
    folder_add_qwen(&file, 0);
    folder_add_qwen(&file, 1);
    build_remove(&file, "model.layers.1.mlp.gate.weight");
    const int64_t router[] = {3, D};
    build_add(&file, "model.layers.1.mlp.gate.weight", "F8_E4M3", router, 2, NULL, 3 * D);
    folder_save_model(&file);
    folder_config("qwen3_moe", 2, FOLDER_QWEN);
    epmoe_checkpoint_t *checkpoint = folder_open(0);
    epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
    cr_assert_eq(epmoe_checkpoint_layer_config(checkpoint, 1, &config), EPMOE_ERROR_NOT_SUPPORTED);
    cr_assert(strstr(epmoe_last_error(), "mlp.gate.weight") && strstr(epmoe_last_error(), "fp8_block"));
    epmoe_checkpoint_close(checkpoint);
    file = start("\"quant_method\":\"none\"" LIST);
    add(&file, ".weight", "I8", 2, 4, NULL);
    folder_save_model(&file);
    checkpoint = folder_open(0);
    cr_assert_eq(epmoe_checkpoint_layer_config(checkpoint, 1, &config), EPMOE_ERROR_NOT_SUPPORTED);
    cr_assert(strstr(epmoe_last_error(), UP ".weight") && strstr(epmoe_last_error(), "I8"));
    epmoe_checkpoint_close(checkpoint);
}

/* Columns in a group that is not there: found when the layer loads, before anything is computed. */
Test(checkpoint_quant, group_indices_out_of_range)
{
    for (int bad = 0; bad < 2; bad++) {
        const int32_t g_idx[] = {0, 1, bad ? -1 : 2, 0};
        build_file_t file = start_gptq(GPTQ);
        add(&file, ".g_idx", "I32", 4, 0, g_idx);
        folder_save_model(&file);
        epmoe_checkpoint_t *checkpoint = folder_open(0);
        epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
        epmoe_comm_config_t comm_config = EPMOE_COMM_CONFIG_INIT;
        epmoe_layer_t *layer = NULL;
        epmoe_comm_t *comm = NULL;
        comm_config.backend = EPMOE_BACKEND_CPU;
        cr_assert_eq(epmoe_comm_create(NULL, &comm_config, &comm), EPMOE_OK);
        cr_assert_eq(epmoe_checkpoint_layer_config(checkpoint, 1, &config), EPMOE_OK);
        cr_assert_eq(epmoe_layer_create(&config, comm, &layer), EPMOE_OK);
        cr_assert_eq(epmoe_layer_load_checkpoint(layer, checkpoint, 1, NULL), EPMOE_ERROR_FORMAT);
        const char *expected = bad ? UP ".g_idx[2] is -1: expected 0..1" : UP ".g_idx[2] is 2: expected 0..1";
        cr_assert(strstr(epmoe_last_error(), expected), "%s", epmoe_last_error());
        cr_assert(!layer->has_weights);
        epmoe_layer_destroy(layer);
        epmoe_comm_destroy(comm);
        epmoe_checkpoint_close(checkpoint);
    }
}

/* The config's list and the tensors disagree: the tensors win, with one warning per layer and kind. */
Test(checkpoint_quant, lists_against_tensors)
{
    build_file_t file = start_gptq("\"quant_method\":\"gptq\",\"group_size\":2,\"modules_to_not_convert\":[\"mlp\"]");
    folder_save_model(&file);
    epmoe_checkpoint_close(folder_open(1));
    cr_assert(strstr(folder_log, UP " is not quantised, but it is"), "%s", folder_log);
    file = start_gptq("\"quant_method\":\"gptq\",\"group_size\":2,\"modules_to_not_convert\":[\"layers.0\"]");
    folder_save_model(&file);
    epmoe_checkpoint_close(folder_open(1));
    cr_assert(strstr(folder_log, "layer 1: model.layers.1.mlp.experts.0.gate_proj is not quantised, though"), "%s",
              folder_log);
    file = start_gptq("\"quant_method\":\"gptq\",\"group_size\":2");
    folder_save_model(&file);
    epmoe_checkpoint_close(folder_open(2)); /* both layers */
}

Test(checkpoint_quant, entries_of_a_list)
{
    static const struct {
        const char *entry;
        const char *name;
        bool matches;
    } cases[] = {
        {"mlp.gate", "model.layers.0.mlp.gate", true},
        {"mlp.gate", "model.layers.0.mlp.gate_proj", false},
        {"gate", "model.layers.0.mlp.gate_proj", false},
        {"mlp", "model.layers.0.mlp.experts.3.up_proj", true},
        {"layers.1", "model.layers.11.mlp.gate", false},
        {"model.layers.*.mlp.router", "model.layers.7.mlp.router", true},
        {"model.layers.*.self_attn", "model.layers.7.self_attn.q_proj", true},
        {"experts.*.up_proj", "model.layers.0.mlp.experts.12.up_proj", true},
        {"experts.*.up_proj", "model.layers.0.mlp.experts.up_proj", false},
        {"lm_head", "lm_head", true},
        {"re:.*self_attn.*", "model.layers.0.self_attn.q_proj", true},
        {"re:.*mlp.gate$", "model.layers.0.mlp.gate", true},
        {"re:.*mlp.gate$", "model.layers.0.mlp.gate_proj", false},
        {"re:mlp", "model.layers.0.mlp.gate", false}, /* from the start, as Python's match */
        {"re:model\\.layers\\.\\d+\\.mlp", "model.layers.42.mlp.gate", true},
        {"re:a|lm_head", "xlm_head", false},
        {"re:(", "(", false},
        {"", "model", false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char *entry = strdup(cases[i].entry);
        epmoei_quant_config_t config = {.left_out = &entry, .num_left_out = 1};
        cr_assert_eq(epmoei_quant_config_leaves_out(&config, cases[i].name), cases[i].matches, "\"%s\" and \"%s\"",
                     cases[i].entry, cases[i].name);
        free(entry);
    }
}

/* Two experts of gpt_oss in MXFP4: gate and up rows alternate. */
Test(checkpoint_quant, stacked_mxfp4)
{
    uint8_t blocks[2][64][1][16], scales[2][64], down[2][32][1][16], down_scales[2][32];
    for (int e = 0; e < 2; e++)
        for (int r = 0; r < 64; r++) {
            memset(blocks[e][r], r % 2 ? 0x22 : 0x11, 16); /* gate .5, up 1 */
            scales[e][r] = (uint8_t)(127 + e);
            memset(down[e][r / 2], 0x33, 16);
            down_scales[e][r / 2] = 126;
        }
    const int64_t gate_up[] = {2, 64, 1, 16}, gate_up_scales[] = {2, 64, 1}, down_shape[] = {2, 32, 1, 16},
                  down_scale[] = {2, 32, 1}, pair[] = {2, 64}, d_pair[] = {2, 32};
    for (int wrong = 0; wrong < 3; wrong++) {
        build_file_t file = {0};
        build_add(&file, "model.layers.0.mlp.experts.gate_up_proj_blocks", "U8", gate_up, 4, blocks, sizeof blocks);
        if (wrong == 0)
            build_add(&file, "model.layers.0.mlp.experts.gate_up_proj_scales", "U8", gate_up_scales, 3, scales, 128);
        if (wrong == 1)
            build_add(&file, "model.layers.0.mlp.experts.gate_up_proj_scales", "U8", (const int64_t[]){2, 1, 64}, 3,
                      scales, 128);
        build_add(&file, "model.layers.0.mlp.experts.gate_up_proj_bias", "BF16", pair, 2, NULL, 256);
        build_add(&file, "model.layers.0.mlp.experts.down_proj_blocks", "U8", down_shape, 4, down, sizeof down);
        build_add(&file, "model.layers.0.mlp.experts.down_proj_scales", "U8", down_scale, 3, down_scales, 64);
        build_add(&file, "model.layers.0.mlp.experts.down_proj_bias", "BF16", d_pair, 2, NULL, 128);
        build_weight(&file, 2, 32, "model.layers.0.mlp.router.weight");
        build_weight(&file, 2, 0, "model.layers.0.mlp.router.bias");
        folder_save_model(&file);
        build_save_text(folder_dir, "config.json",
                        "{\"model_type\":\"gpt_oss\",\"hidden_size\":32,\"num_hidden_layers\":1,"
                        "\"num_experts_per_tok\":1,\"num_local_experts\":2,\"intermediate_size\":32,"
                        "\"quantization_config\":{\"quant_method\":\"mxfp4\"}}");
        if (wrong == 1) folder_expect_fail(EPMOE_ERROR_FORMAT, "gate_up_proj_scales", "[2,1,64]", "[2,64,1]", NULL);
        if (wrong == 2) folder_expect_fail(EPMOE_ERROR_FORMAT, "gate_up_proj_scales", "is missing", NULL);
        if (wrong) continue;
        epmoe_checkpoint_t *checkpoint = folder_open(0);
        for (int32_t e = 0; e < 2; e++) {
            epmoei_expert_source_t expert;
            cr_assert_eq(epmoei_checkpoint_expert_source(checkpoint, 0, e, &expert), EPMOE_OK);
            cr_assert(expert.gate.rows == 32 && expert.up.rows == 32 && expert.down.rows == 32);
            for (int r = 0; r < 32; r++) {
                cr_assert((double)epmoei_quant_at(&expert.gate_quant.quant, r, 31) == .5 * (e + 1));
                cr_assert((double)epmoei_quant_at(&expert.up_quant.quant, r, 0) == 1 * (e + 1));
                cr_assert((double)epmoei_quant_at(&expert.down_quant.quant, r, 7) == .75);
            }
        }
        epmoe_checkpoint_close(checkpoint);
    }
}

/* The golden checkpoints by moe_tool on one rank, and what info says of them. */
Test(checkpoint_quant, golden)
{
    static const struct {
        const char *name;
        const char *format;
    } goldens[] = {
        {"deepseek_v3_ct_w4", "ct"},          {"deepseek_v3_fp8", "fp8_block"}, {"deepseek_v3_gptq_actorder", "gptq"},
        {"deepseek_v3_gptq_asym_v1", "gptq"}, {"gpt_oss_mxfp4", "mxfp4"},       {"qwen3_moe_awq", "awq"},
        {"qwen3_moe_fp8", "fp8_block"},       {"qwen3_moe_gptq", "gptq"},       {"qwen3_moe_gptq_v2_g128", "gptq"}};
    for (size_t i = 0; i < sizeof goldens / sizeof goldens[0]; i++) {
        char expected[64];
        testing_process_t process = testing_run(
            60, EPMOE_TEST_BIN "/moe_tool check '" EPMOE_TEST_DATA "/golden/%s' --backend cpu --tol 3e-6 --format json",
            goldens[i].name);
        cr_assert_eq(process.exit_code, 0, "%s: exit %d: %s", goldens[i].name, process.exit_code, process.errors);
        cr_assert(strstr(process.output, "layers.0.router") && strstr(process.output, "\"layers.0\""));
        const char *moe = strstr(process.output, "\"layers.0.moe\""), *error = moe ? strstr(moe, "\"rel_err\":") : NULL;
        cr_assert(error, "%s", process.output);
        cr_assert_leq(strtod(error + strlen("\"rel_err\":"), NULL), 2e-6, "%s: %s", goldens[i].name, moe);
        cr_assert(!strstr(process.output, "\"ok\":false") && !strstr(process.errors, "quantised"), "%s",
                  process.errors);
        testing_process_free(&process);
        process = testing_run(60, EPMOE_TEST_BIN "/moe_tool info '" EPMOE_TEST_DATA "/golden/%s' --format json",
                              goldens[i].name);
        cr_assert_eq(process.exit_code, 0, "%s", process.errors);
        snprintf(expected, sizeof expected, "\"format\":\"%s\"", goldens[i].format);
        cr_assert(strstr(process.output, expected), "%s lacks %s", process.output, expected);
        testing_process_free(&process);
    }
}
