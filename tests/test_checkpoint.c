/* Checkpoint folders: shards and their index, missing and contradicting tensors, families, quantised weights. */
#include "base/dtype.h"
#include "moe/checkpoint.h"
#include "tests/safetensors_build.h"

#include <criterion/criterion.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define D 4
#define F 2

static char dir[256];
static char logged[8192];
static int warnings;

static void keep_warning(void *ctx, epmoe_log_level_t level, const char *message)
{
    (void)ctx;
    (void)level;
    warnings++;
    size_t used = strlen(logged);
    snprintf(logged + used, sizeof logged - used, "%s\n", message);
}

static void set_up(void)
{
    build_make_dir(dir);
    epmoe_set_log(keep_warning, NULL);
}

static void tear_down(void)
{
    epmoe_set_log(NULL, NULL);
    build_remove_dir(dir);
    cr_assert_eq(epmoei_alloc_live(), 0, "%lld allocations are left", (long long)epmoei_alloc_live());
}

TestSuite(checkpoint, .init = set_up, .fini = tear_down);

static epmoe_checkpoint_t *expect_open(int expected_warnings)
{
    epmoe_checkpoint_t *checkpoint = NULL;
    warnings = 0;
    logged[0] = 0;
    epmoe_status_t status = epmoe_checkpoint_open(dir, &checkpoint);
    cr_assert_eq(status, EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(warnings, expected_warnings, "warnings:\n%s", logged);
    return checkpoint;
}

/* Each of `parts` (up to NULL) is in the message. */
static void expect_message(epmoe_status_t got, epmoe_status_t status, va_list parts)
{
    cr_assert_eq(got, status, "got %s: %s", epmoe_status_string(got), epmoe_last_error());
    for (const char *part; (part = va_arg(parts, const char *));)
        cr_assert(strstr(epmoe_last_error(), part), "\"%s\" is not in \"%s\"", part, epmoe_last_error());
}

static void expect_fail(epmoe_status_t status, ...)
{
    epmoe_checkpoint_t *untouched = (epmoe_checkpoint_t *)&dir, *checkpoint = untouched;
    va_list parts;
    va_start(parts, status);
    expect_message(epmoe_checkpoint_open(dir, &checkpoint), status, parts);
    va_end(parts);
    cr_assert_eq(checkpoint, untouched);
    cr_assert_eq(epmoei_alloc_live(), 0);
}

static float at(const epmoei_view_t *view, int64_t r, int64_t c)
{
    cr_assert(view->data && r < view->rows && c < view->cols);
    return epmoei_load(view->data, view->dtype, r * view->row_stride + c * view->col_stride);
}

/* The view of a tensor that build_weight wrote. */
static void check_written(const epmoei_view_t *view, int64_t rows, int64_t cols, const char *name)
{
    cr_assert(view->rows == rows && view->cols == cols, "%s is [%lld,%lld]", name, (long long)view->rows,
              (long long)view->cols);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++) cr_assert_eq(at(view, r, c), build_value(name, r * cols + c), "%s", name);
}

static void save_config(const char *model_type, int32_t layers, const char *more)
{
    char text[2048];
    snprintf(text, sizeof text,
             "{\"model_type\":\"%s\",\"hidden_size\":%d,\"num_hidden_layers\":%d,\"num_experts_per_tok\":1%s%s}",
             model_type, D, layers, *more ? "," : "", more);
    build_save_text(dir, "config.json", text);
}

/* --------------------------------------------------------------------------------------------- a toy in 3 shards */

#define MIXTRAL_CONFIG "\"num_local_experts\":2,\"intermediate_size\":2"

static void add_mixtral_layer(build_file_t *file, int32_t layer)
{
    build_weight(file, 2, D, "model.layers.%d.block_sparse_moe.gate.weight", layer);
    for (int32_t e = 0; e < 2; e++) {
        build_weight(file, F, D, "model.layers.%d.block_sparse_moe.experts.%d.w1.weight", layer, e);
        build_weight(file, D, F, "model.layers.%d.block_sparse_moe.experts.%d.w2.weight", layer, e);
        build_weight(file, F, D, "model.layers.%d.block_sparse_moe.experts.%d.w3.weight", layer, e);
    }
}

typedef struct toy_t {
    build_file_t shards[3];
    char index[4096]; /* entries of weight_map */
} toy_t;

static void add_to_index(toy_t *toy, const char *tensor, const char *shard)
{
    size_t used = strlen(toy->index);
    snprintf(toy->index + used, sizeof toy->index - used, "%s\"%s\":\"%s\"", used ? "," : "", tensor, shard);
}

static const char *const shard_names[] = {"model-1.safetensors", "model-2.safetensors", "model-3.safetensors"};

static void save_index(const toy_t *toy)
{
    char text[8192];
    snprintf(text, sizeof text, "{\"metadata\":{\"total_size\":1},\"weight_map\":{%s}}", toy->index);
    build_save_text(dir, "model.safetensors.index.json", text);
}

/* Layers 0 and 1 in the first two shards, what is around them in the third. */
static void make_toy(toy_t *toy)
{
    *toy = (toy_t){0};
    add_mixtral_layer(&toy->shards[0], 0);
    add_mixtral_layer(&toy->shards[1], 1);
    build_weight(&toy->shards[2], 3, D, "model.embed_tokens.weight");
    build_weight(&toy->shards[2], D, 0, "model.norm.weight");
    for (int s = 0; s < 3; s++)
        for (int32_t i = 0; i < toy->shards[s].count; i++)
            add_to_index(toy, toy->shards[s].tensors[i].name, shard_names[s]);
    for (int s = 0; s < 3; s++) build_save(&toy->shards[s], dir, shard_names[s]);
    save_index(toy);
    save_config("mixtral", 2, MIXTRAL_CONFIG);
}

static void free_toy(toy_t *toy)
{
    for (int s = 0; s < 3; s++) build_free(&toy->shards[s]);
}

static const char *path_of(const char *name)
{
    static char path[512];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return path;
}

Test(checkpoint, three_shards)
{
    toy_t toy;
    make_toy(&toy);
    epmoe_checkpoint_t *checkpoint = expect_open(0);
    epmoe_checkpoint_info_t info = EPMOE_CHECKPOINT_INFO_INIT;
    cr_assert_eq(epmoe_checkpoint_get_info(checkpoint, &info), EPMOE_OK);
    cr_assert_str_eq(info.family, "mixtral");
    cr_assert(info.num_layers == 2 && info.num_shards == 3 && info.num_experts == 2 && info.hidden == D);
    cr_assert_eq(info.total_bytes, 2 * (2 * (2 * D + 6 * D * F) + 4 * D));
    epmoei_layer_source_t layer;
    epmoei_expert_source_t expert;
    for (int32_t i = 0; i < 2; i++) {
        char name[128];
        cr_assert_eq(epmoei_checkpoint_layer_source(checkpoint, i, &layer), EPMOE_OK);
        snprintf(name, sizeof name, "model.layers.%d.block_sparse_moe.gate.weight", i);
        check_written(&layer.router, 2, D, name);
        cr_assert(!layer.shared.gate.data && !layer.router_bias.data && !layer.selection_bias.data);
        cr_assert_eq(epmoei_checkpoint_expert_source(checkpoint, i, 1, &expert), EPMOE_OK);
        snprintf(name, sizeof name, "model.layers.%d.block_sparse_moe.experts.1.w1.weight", i);
        check_written(&expert.gate, F, D, name);
        snprintf(name, sizeof name, "model.layers.%d.block_sparse_moe.experts.1.w3.weight", i);
        check_written(&expert.up, F, D, name);
        snprintf(name, sizeof name, "model.layers.%d.block_sparse_moe.experts.1.w2.weight", i);
        check_written(&expert.down, D, F, name);
        cr_assert(!expert.gate_bias.data && !expert.up_bias.data && !expert.down_bias.data);
    }
    cr_assert_not_null(epmoei_checkpoint_find(checkpoint, "model.norm.weight"));
    epmoe_checkpoint_close(checkpoint);
    free_toy(&toy);
}

Test(checkpoint, shard_is_missing)
{
    toy_t toy;
    make_toy(&toy);
    unlink(path_of("model-2.safetensors"));
    expect_fail(EPMOE_ERROR_IO, "model-2.safetensors", "cannot be opened", "model.layers.1.block_sparse_moe.", NULL);
    free_toy(&toy);
}

Test(checkpoint, shard_is_cut_or_too_long)
{
    toy_t toy;
    make_toy(&toy);
    int64_t bytes;
    char *data = build_bytes(&toy.shards[1], &bytes);
    data = realloc(data, (size_t)bytes + 1);
    data[bytes] = 0;
    build_save_data(path_of("model-2.safetensors"), data, bytes - 1);
    expect_fail(EPMOE_ERROR_FORMAT, "model-2.safetensors", "too short",
                "tensor model.layers.1.block_sparse_moe.experts.1.w3.weight", NULL);
    build_save_data(path_of("model-2.safetensors"), data, 300);
    expect_fail(EPMOE_ERROR_FORMAT, "model-2.safetensors", "header length", "only 292 bytes",
                "tensor model.layers.1.block_sparse_moe.", NULL);
    build_save_data(path_of("model-2.safetensors"), data, bytes + 1);
    expect_fail(EPMOE_ERROR_FORMAT, "model-2.safetensors", "1 trailing bytes", NULL);
    build_save_data(path_of("model-2.safetensors"), data, bytes);
    epmoe_checkpoint_close(expect_open(0));
    free(data);
    free_toy(&toy);
}

Test(checkpoint, index_names_a_tensor_that_its_shard_lacks)
{
    toy_t toy;
    make_toy(&toy);
    add_to_index(&toy, "lm_head.weight", "model-3.safetensors");
    save_index(&toy);
    expect_fail(EPMOE_ERROR_FORMAT, "model-3.safetensors", "lm_head.weight", "index.json", NULL);
    free_toy(&toy);
}

/* An un-indexed file with another value for an indexed tensor, also under the name of an unsharded checkpoint. */
Test(checkpoint, stray_files_are_ignored)
{
    static const char *const strays[] = {"model-4.safetensors", "model-0.safetensors", "model.safetensors"};
    toy_t toy;
    make_toy(&toy);
    const char *name = "model.layers.0.block_sparse_moe.gate.weight";
    build_file_t stray = {0};
    build_weight(&stray, 2, D, "%s", name);
    memset(stray.tensors[0].data, 0, (size_t)stray.tensors[0].bytes);
    for (int i = 0; i < 3; i++) {
        build_save(&stray, dir, strays[i]);
        epmoei_layer_source_t layer;
        epmoe_checkpoint_t *checkpoint = expect_open(0);
        cr_assert_eq(epmoei_checkpoint_layer_source(checkpoint, 0, &layer), EPMOE_OK);
        check_written(&layer.router, 2, D, name);
        epmoe_checkpoint_close(checkpoint);
    }
    build_free(&stray);
    free_toy(&toy);
}

/* A tensor of the third shard that the index has in the first. */
Test(checkpoint, the_index_decides_between_two_shards)
{
    toy_t toy;
    make_toy(&toy);
    const char *name = "model.layers.0.block_sparse_moe.gate.weight";
    build_weight(&toy.shards[2], 2, D, "%s", name);
    memset(build_find(&toy.shards[2], name)->data, 0, 4 * D);
    build_save(&toy.shards[2], dir, shard_names[2]);
    epmoei_layer_source_t layer;
    epmoe_checkpoint_t *checkpoint = expect_open(1);
    cr_assert(strstr(logged, name) && strstr(logged, "model-1.safetensors") && strstr(logged, "model-3.safetensors"));
    cr_assert_eq(epmoei_checkpoint_layer_source(checkpoint, 0, &layer), EPMOE_OK);
    check_written(&layer.router, 2, D, name);
    epmoe_checkpoint_close(checkpoint);
    free_toy(&toy);
}

Test(checkpoint, tensors_that_the_index_does_not_list)
{
    toy_t toy;
    make_toy(&toy);
    build_weight(&toy.shards[2], D, 0, "model.extra.weight");
    build_save(&toy.shards[2], dir, shard_names[2]);
    epmoe_checkpoint_t *checkpoint = expect_open(1);
    cr_assert(strstr(logged, "model.extra.weight") && strstr(logged, "model-3.safetensors"));
    cr_assert_null(epmoei_checkpoint_find(checkpoint, "model.extra.weight"));
    epmoe_checkpoint_close(checkpoint);
    build_weight(&toy.shards[2], D, 0, "model.layers.1.block_sparse_moe.bias");
    build_save(&toy.shards[2], dir, shard_names[2]);
    expect_fail(EPMOE_ERROR_FORMAT, "model.layers.1.block_sparse_moe.bias", "model-3.safetensors", "index", NULL);
    free_toy(&toy);
}

Test(checkpoint, index_that_is_no_index)
{
    static const char *const texts[] = {
        "{}",
        "{\"weight_map\":{}}",
        "{\"weight_map\":[]}",
        "{\"weight_map\":{\"a\":1}}",
        "{\"weight_map\":{\"a\":\"\"}}",
        "{\"weight_map\":{\"a\":\"../model-1.safetensors\"}}",
        "{\"weight_map\":{\"a\":\"/etc/passwd\"}}",
        "{\"weight_map\":{\"a\":\"sub/model-1.safetensors\"}}",
        "{\"weight_map\":{\"a\":\"..\"}}",
        "{\"weight_map\":{\"a\":\"x\"}",
        "{\"weight_map\":{\"a\":\"x\",\"a\":\"y\"}}",
        "",
    };
    toy_t toy;
    make_toy(&toy);
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        build_save_text(dir, "model.safetensors.index.json", texts[i]);
        expect_fail(EPMOE_ERROR_FORMAT, "model.safetensors.index.json", i >= 3 && i <= 8 ? "tensor a" : "", NULL);
    }
    free_toy(&toy);
}

Test(checkpoint, nothing_there)
{
    char wanted[300];
    expect_fail(EPMOE_ERROR_IO, "config.json", NULL);
    save_config("mixtral", 2, MIXTRAL_CONFIG);
    expect_fail(EPMOE_ERROR_IO, dir, "model.safetensors", "index.json", NULL);
    snprintf(wanted, sizeof wanted, "%s/config.json", dir);
    build_save_text(dir, "config.json", "{\"model_type\":\"mixtral\",\"model_type\":\"olmoe\"}");
    expect_fail(EPMOE_ERROR_FORMAT, wanted, "model_type", "twice", NULL);
    epmoe_checkpoint_t *checkpoint;
    cr_assert_eq(epmoe_checkpoint_open(NULL, &checkpoint), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert_eq(epmoe_checkpoint_open(dir, NULL), EPMOE_ERROR_INVALID_ARGUMENT);
    epmoe_checkpoint_close(NULL);
}

/* ------------------------------------------------------------------------------------------- tensors of one file */

#define QWEN_CONFIG  "\"num_experts\":3,\"moe_intermediate_size\":2,\"intermediate_size\":6"
#define DEEP_CONFIG  "\"n_routed_experts\":3,\"moe_intermediate_size\":2,\"intermediate_size\":6"
#define EXPERT(e, p) "model.layers.0.mlp.experts." e "." p "_proj.weight"

static void add_mlp(build_file_t *file, const char *prefix, int64_t width)
{
    build_weight(file, width, D, "%sgate_proj.weight", prefix);
    build_weight(file, width, D, "%sup_proj.weight", prefix);
    build_weight(file, D, width, "%sdown_proj.weight", prefix);
}

/* A layer of the Qwen and DeepSeek kind with 3 experts. */
static void add_moe_layer(build_file_t *file, int32_t layer)
{
    char prefix[128];
    build_weight(file, 3, D, "model.layers.%d.mlp.gate.weight", layer);
    for (int32_t e = 0; e < 3; e++) {
        snprintf(prefix, sizeof prefix, "model.layers.%d.mlp.experts.%d.", layer, e);
        add_mlp(file, prefix, F);
    }
}

static void save_model(build_file_t *file)
{
    build_save(file, dir, "model.safetensors");
    build_free(file);
}

Test(checkpoint, missing_tensors_are_named)
{
    static const char *const names[] = {EXPERT("2", "gate"), EXPERT("1", "up"), EXPERT("0", "down"),
                                        "model.layers.0.mlp.gate.weight"};
    save_config("qwen3_moe", 1, QWEN_CONFIG);
    for (int i = 0; i < 4; i++) {
        build_file_t file = {0};
        add_moe_layer(&file, 0);
        build_remove(&file, names[i]);
        save_model(&file);
        expect_fail(EPMOE_ERROR_FORMAT, dir, names[i], "is missing", NULL);
    }
    build_file_t file = {0};
    build_weight(&file, D, 0, "model.norm.weight");
    save_model(&file);
    expect_fail(EPMOE_ERROR_FORMAT, "model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate_proj.weight",
                "is missing", NULL);
    save_config("qwen3_moe", 2, QWEN_CONFIG);
    expect_fail(EPMOE_ERROR_FORMAT, "num_hidden_layers is 2", "1 tensors", NULL);
}

Test(checkpoint, surplus_tensors)
{
    static const char *const bad[] = {
        EXPERT("3", "gate"),
        EXPERT("00", "gate"),
        EXPERT("-1", "gate"),
        EXPERT("9999999999", "gate"),
        "model.layers.0.mlp.experts.1.gate_proj.bias",
        "model.layers.0.mlp.experts.1.gate_proj.weight2",
        "model.layers.0.mlp.experts.1.w1.weight",
        "model.layers.0.mlp.experts.1.gate_proj.qzeros",
        "model.layers.0.mlp.experts.1.gate_proj.qweight",
        "model.layers.0.mlp.experts.gate_proj",
        "model.layers.0.mlp.experts.down_proj",
    };
    save_config("qwen3_moe", 1, QWEN_CONFIG);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        build_file_t file = {0};
        add_moe_layer(&file, 0);
        build_weight(&file, F, D, "%s", bad[i]);
        save_model(&file);
        expect_fail(EPMOE_ERROR_FORMAT, bad[i], "model.safetensors", NULL);
    }
    /* Experts below the other name that the family's block may have. */
    build_file_t mixed = {0};
    add_mixtral_layer(&mixed, 0);
    build_weight(&mixed, F, D, "model.layers.0.mlp.experts.0.w1.weight");
    save_model(&mixed);
    save_config("mixtral", 1, MIXTRAL_CONFIG);
    expect_fail(EPMOE_ERROR_FORMAT, "model.layers.0.mlp.experts.0.w1.weight", "below the experts", NULL);
    /* A weight stored both plainly and quantised, or plainly with a scale. */
    static const char *const twice[] = {"shared_expert.up_proj.qweight", "shared_expert.up_proj.weight_scale_inv",
                                        "gate.weight_packed", "shared_expert_gate.scales"};
    save_config("qwen2_moe", 1, QWEN_CONFIG);
    for (int i = 0; i < 4; i++) {
        add_moe_layer(&mixed, 0);
        add_mlp(&mixed, "model.layers.0.mlp.shared_expert.", 6);
        build_weight(&mixed, 1, D, "model.layers.0.mlp.shared_expert_gate.weight");
        build_weight(&mixed, 1, D, "model.layers.0.mlp.%s", twice[i]);
        save_model(&mixed);
        expect_fail(EPMOE_ERROR_FORMAT, twice[i], "belongs to a quantised weight", "BF16", NULL);
    }

    /* What belongs to a decoder layer, or to the layers for speculative decoding behind the last, is no surprise;
     * anything else is a warning. */
    static const char *const good[] = {"model.layers.0.self_attn.q_proj.weight",
                                       "model.layers.0.self_attn.rotary_emb.inv_freq",
                                       "model.layers.0.input_layernorm.weight",
                                       "model.layers.0.post_attention_layernorm.weight",
                                       "model.embed_tokens.weight",
                                       "model.norm.weight",
                                       "lm_head.weight",
                                       "model.layers.1.mlp.experts.7.gate_proj.weight",
                                       "model.layers.1.eh_proj.weight"};
    static const char *const odd[] = {"model.layers.2.mlp.gate.weight",  "model.layers.0.mlp.extra.weight",
                                      "model.layers.0.extra.weight",     "model.layers.0.mlp.gate_proj.weight",
                                      "model.layers.00.mlp.gate.weight", "vision.weight"};
    save_config("qwen3_moe", 1, QWEN_CONFIG ",\"num_nextn_predict_layers\":1");
    build_file_t file = {0};
    add_moe_layer(&file, 0);
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) build_weight(&file, 1, D, "%s", good[i]);
    build_save(&file, dir, "model.safetensors");
    epmoe_checkpoint_close(expect_open(0));
    for (int i = 0; i < 6; i++) build_weight(&file, 1, D, "%s", odd[i]);
    build_save(&file, dir, "model.safetensors");
    epmoe_checkpoint_close(expect_open(6));
    for (int i = 0; i < 6; i++) cr_assert(strstr(logged, odd[i]), "%s is not in\n%s", odd[i], logged);
    for (int i = 0; i < 100; i++) build_weight(&file, 1, D, "vision.%d.weight", i);
    save_model(&file);
    epmoe_checkpoint_close(expect_open(21));
    cr_assert(strstr(logged, "86 more"), "%s", logged);
}

typedef struct contradiction_t {
    const char *config;
    const char *key; /* these are in the message */
    const char *tensor;
    const char *shape;
} contradiction_t;

Test(checkpoint, config_that_the_tensors_contradict)
{
    static const contradiction_t cases[] = {
        {"\"num_experts\":4,\"moe_intermediate_size\":2", "num_experts is 4", "mlp.gate.weight", "[3,4]"},
        {"\"num_experts\":2,\"moe_intermediate_size\":2", "num_experts is 2", "mlp.gate.weight", "[3,4]"},
        {"\"moe_num_experts\":5,\"moe_intermediate_size\":2", "moe_num_experts is 5", "mlp.gate.weight", "[3,4]"},
        {"\"num_experts\":3,\"moe_intermediate_size\":3", "moe_intermediate_size is 3", EXPERT("0", "gate"), "[2,4]"},
        {"\"num_experts\":3,\"intermediate_size\":7", "intermediate_size is 7", EXPERT("0", "gate"), "[2,4]"},
        {QWEN_CONFIG ",\"shared_expert_intermediate_size\":5", "shared_expert_intermediate_size is 5",
         "mlp.shared_expert.gate_proj.weight", "[6,4]"},
        {QWEN_CONFIG ",\"shared_expert_intermediate_size\":0", "shared_expert_intermediate_size is 0",
         "mlp.shared_expert.gate_proj.weight", "[6,4]"},
    };
    build_file_t file = {0};
    add_moe_layer(&file, 0);
    add_mlp(&file, "model.layers.0.mlp.shared_expert.", 6);
    build_weight(&file, 1, D, "model.layers.0.mlp.shared_expert_gate.weight");
    save_model(&file);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        save_config("qwen2_moe", 1, cases[i].config);
        expect_fail(EPMOE_ERROR_FORMAT, cases[i].key, cases[i].tensor, cases[i].shape, "config.json", NULL);
    }
    save_config("qwen2_moe", 1, QWEN_CONFIG ",\"shared_expert_intermediate_size\":6");
    epmoe_checkpoint_close(expect_open(0));
    save_config("qwen2_moe", 1, QWEN_CONFIG);
    epmoe_checkpoint_close(expect_open(0));

    /* hidden_size, which save_config makes 4. */
    add_moe_layer(&file, 0);
    build_remove(&file, "model.layers.0.mlp.gate.weight");
    build_weight(&file, 3, 5, "model.layers.0.mlp.gate.weight");
    save_model(&file);
    save_config("qwen3_moe", 1, QWEN_CONFIG);
    expect_fail(EPMOE_ERROR_FORMAT, "hidden_size is 4", "model.layers.0.mlp.gate.weight", "[3,5]", NULL);
    /* A weight with too few dimensions. */
    add_moe_layer(&file, 0);
    build_remove(&file, EXPERT("1", "down"));
    build_weight(&file, D * F, 0, "%s", EXPERT("1", "down"));
    save_model(&file);
    expect_fail(EPMOE_ERROR_FORMAT, EXPERT("1", "down"), "[8]", "[4,2]", NULL);
    /* The shared experts' width by their number. */
    add_moe_layer(&file, 0);
    build_weight(&file, 3, 0, "model.layers.0.mlp.gate.e_score_correction_bias");
    add_mlp(&file, "model.layers.0.mlp.shared_experts.", 6);
    save_model(&file);
    save_config("glm4_moe", 1, DEEP_CONFIG ",\"n_shared_experts\":2");
    expect_fail(EPMOE_ERROR_FORMAT, "n_shared_experts is 2", "moe_intermediate_size is 2", "[6,4]", NULL);
    save_config("glm4_moe", 1, DEEP_CONFIG ",\"n_shared_experts\":3");
    epmoe_checkpoint_close(expect_open(0));
}

/* A dense layer, a layer with a bf16 selection bias, and shared experts that config.json says nothing of. */
Test(checkpoint, dense_and_shared)
{
    build_file_t file = {0};
    add_mlp(&file, "model.layers.0.mlp.", 6);
    add_moe_layer(&file, 1);
    build_weight(&file, 3, 0, "model.layers.1.mlp.gate.e_score_correction_bias");
    add_mlp(&file, "model.layers.1.mlp.shared_experts.", 8);
    save_model(&file);
    save_config("dots1", 2, DEEP_CONFIG ",\"hidden_act\":\"gelu\"");
    epmoe_checkpoint_t *checkpoint = expect_open(0);
    epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
    epmoei_layer_source_t source;
    cr_assert_eq(epmoe_checkpoint_layer_config(checkpoint, 0, &config), EPMOE_OK);
    cr_assert(config.num_experts == 0 && config.intermediate == 0 && config.top_k == 0 && config.hidden == D);
    cr_assert(config.shared_intermediate == 6 && !config.has_selection_bias && !config.shared_gated);
    cr_assert_eq(config.activation, EPMOE_ACTIVATION_GELU);
    cr_assert_eq(epmoei_checkpoint_layer_source(checkpoint, 0, &source), EPMOE_OK);
    check_written(&source.shared.gate, 6, D, "model.layers.0.mlp.gate_proj.weight");
    check_written(&source.shared.up, 6, D, "model.layers.0.mlp.up_proj.weight");
    check_written(&source.shared.down, D, 6, "model.layers.0.mlp.down_proj.weight");
    cr_assert(!source.router.data);
    cr_assert_eq(epmoe_checkpoint_layer_config(checkpoint, 1, &config), EPMOE_OK);
    cr_assert(config.num_experts == 3 && config.shared_intermediate == 8 && config.has_selection_bias);
    cr_assert_eq(epmoei_checkpoint_layer_source(checkpoint, 1, &source), EPMOE_OK);
    check_written(&source.shared.up, 8, D, "model.layers.1.mlp.shared_experts.up_proj.weight");
    check_written(&source.selection_bias, 1, 3, "model.layers.1.mlp.gate.e_score_correction_bias");
    cr_assert_eq(source.selection_bias.dtype, EPMOE_BF16);
    epmoe_checkpoint_close(checkpoint);
    save_config("dots1", 2, "\"n_routed_experts\":3,\"moe_intermediate_size\":2,\"intermediate_size\":5");
    expect_fail(EPMOE_ERROR_FORMAT, "intermediate_size is 5", "model.layers.0.mlp.gate_proj.weight", "[6,4]", NULL);
}

/* Gate and up in one tensor, transposed, halves one behind the other: [E,d,2f] with gate first, down [E,f,d]. */
Test(checkpoint, stacked_transposed_halves)
{
    const int64_t gate_up_shape[] = {3, D, 2 * F}, down_shape[] = {3, F, D};
    const char *gate_up = "language_model.model.layers.0.feed_forward.experts.gate_up_proj";
    const char *down = "language_model.model.layers.0.feed_forward.experts.down_proj";
    build_file_t file = {0};
    build_weight(&file, 3 * D, 2 * F, "%s", gate_up);
    build_weight(&file, 3 * F, D, "%s", down);
    for (int i = 0; i < 2; i++) {
        file.tensors[i].num_dims = 3;
        memcpy(file.tensors[i].shape, i ? down_shape : gate_up_shape, sizeof down_shape);
    }
    build_weight(&file, 3, D, "language_model.model.layers.0.feed_forward.router.weight");
    add_mlp(&file, "language_model.model.layers.0.feed_forward.shared_expert.", 2);
    add_mlp(&file, "language_model.model.layers.1.feed_forward.", 6);
    build_weight(&file, 3, D, "vision_model.patch.weight");
    save_model(&file);
    build_save_text(dir, "config.json",
                    "{\"model_type\":\"llama4\",\"text_config\":{\"hidden_size\":4,\"num_hidden_layers\":2,"
                    "\"num_local_experts\":3,\"num_experts_per_tok\":1,\"intermediate_size\":2,"
                    "\"intermediate_size_mlp\":6,\"hidden_act\":\"silu\"}}");
    epmoe_checkpoint_t *checkpoint = expect_open(0);
    epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
    cr_assert_eq(epmoe_checkpoint_layer_config(checkpoint, 0, &config), EPMOE_OK);
    cr_assert(config.scoring == EPMOE_SCORING_SIGMOID && config.weight_on_input && !config.renormalize);
    cr_assert(config.num_experts == 3 && config.intermediate == 2 && config.shared_intermediate == 2);
    for (int32_t e = 0; e < 3; e++) {
        epmoei_expert_source_t expert;
        cr_assert_eq(epmoei_checkpoint_expert_source(checkpoint, 0, e, &expert), EPMOE_OK);
        cr_assert(expert.gate.rows == F && expert.gate.cols == D && expert.down.rows == D && expert.down.cols == F);
        for (int64_t r = 0; r < F; r++)
            for (int64_t c = 0; c < D; c++) {
                cr_assert_eq(at(&expert.gate, r, c), build_value(gate_up, (e * D + c) * 2 * F + r));
                cr_assert_eq(at(&expert.up, r, c), build_value(gate_up, (e * D + c) * 2 * F + F + r));
                cr_assert_eq(at(&expert.down, c, r), build_value(down, (e * F + r) * D + c));
            }
    }
    epmoe_checkpoint_close(checkpoint);
}

/* gate rows g0..g3 and up rows u0..u3 of one expert in [E,2f,d]: values 1..8 by row. */
Test(checkpoint, stacked_halves_are_gate_then_up)
{
    float rows[2][8][2];
    const int64_t shape[] = {2, 8, 2}, down_shape[] = {2, 2, 4}, router[] = {2, 2};
    for (int e = 0; e < 2; e++)
        for (int r = 0; r < 8; r++)
            for (int c = 0; c < 2; c++) rows[e][r][c] = (float)(100 * e + r + 1);
    build_file_t file = {0};
    build_add(&file, "model.layers.0.mlp.experts.gate_up_proj", "F32", shape, 3, rows, sizeof rows);
    build_add(&file, "model.layers.0.mlp.experts.down_proj", "F16", down_shape, 3, NULL, 32);
    build_add(&file, "model.layers.0.mlp.gate.weight", "F32", router, 2, NULL, 16);
    save_model(&file);
    build_save_text(dir, "config.json",
                    "{\"model_type\":\"olmoe\",\"hidden_size\":2,\"num_hidden_layers\":1,\"num_experts\":2,"
                    "\"num_experts_per_tok\":1,\"intermediate_size\":4}");
    epmoe_checkpoint_t *checkpoint = expect_open(0);
    for (int32_t e = 0; e < 2; e++) {
        epmoei_expert_source_t expert;
        cr_assert_eq(epmoei_checkpoint_expert_source(checkpoint, 0, e, &expert), EPMOE_OK);
        cr_assert(expert.gate.rows == 4 && expert.gate.dtype == EPMOE_F32 && expert.down.dtype == EPMOE_F16);
        for (int r = 0; r < 4; r++) {
            cr_assert_eq(at(&expert.gate, r, 1), (float)(100 * e + r + 1));
            cr_assert_eq(at(&expert.up, r, 1), (float)(100 * e + r + 5));
        }
    }
    epmoe_checkpoint_close(checkpoint);
    /* The same bytes as [E,d,2f]: the family decides the orientation, so the shape is wrong. */
    const int64_t transposed[] = {2, 2, 8};
    build_add(&file, "model.layers.0.mlp.experts.gate_up_proj", "F32", transposed, 3, rows, sizeof rows);
    build_add(&file, "model.layers.0.mlp.experts.down_proj", "F16", down_shape, 3, NULL, 32);
    build_add(&file, "model.layers.0.mlp.gate.weight", "F32", router, 2, NULL, 16);
    save_model(&file);
    expect_fail(EPMOE_ERROR_FORMAT, "mlp.experts.gate_up_proj", "[2,2,8]", "[2,8,2]", NULL);
}

/* ------------------------------------------------------------------------------------------------------- formats */

/* Layer 0 plain, layer 1 with the tensors of a quantised format in place of expert 1's up projection. */
static void save_quantised(const char *method, const char *const *suffixes, const char *dtype, int64_t rows,
                           int64_t cols)
{
    build_file_t file = {0};
    add_moe_layer(&file, 0);
    add_moe_layer(&file, 1);
    build_remove(&file, "model.layers.1.mlp.experts.1.up_proj.weight");
    for (int i = 0; suffixes[i]; i++) {
        char name[128];
        const int64_t shape[] = {rows, cols};
        snprintf(name, sizeof name, "model.layers.1.mlp.experts.1.up_proj%s", suffixes[i]);
        build_add(&file, name, i == 0 ? dtype : "F32", shape, 2, NULL,
                  rows * cols * (i == 0 && strstr(dtype, "8") ? 1 : 4));
    }
    save_model(&file);
    char config[256];
    snprintf(config, sizeof config, QWEN_CONFIG ",\"quantization_config\":{\"quant_method\":\"%s\"}", method);
    save_config("qwen3_moe", 2, config);
}

static void expect_refused(const char *format, const char *tensor)
{
    epmoe_checkpoint_t *checkpoint = expect_open(0);
    epmoe_checkpoint_info_t info = EPMOE_CHECKPOINT_INFO_INIT;
    cr_assert_eq(epmoe_checkpoint_get_info(checkpoint, &info), EPMOE_OK);
    cr_assert_eq(info.num_layers, 2);
    epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT, before = config;
    epmoei_layer_source_t source;
    epmoei_expert_source_t expert;
    cr_assert_eq(epmoe_checkpoint_layer_config(checkpoint, 0, &config), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(epmoei_checkpoint_expert_source(checkpoint, 0, 1, &expert), EPMOE_OK);
    config = before;
    cr_assert_eq(epmoe_checkpoint_layer_config(checkpoint, 1, &config), EPMOE_ERROR_NOT_SUPPORTED);
    cr_assert_eq(memcmp(&config, &before, sizeof config), 0);
    cr_assert(strstr(epmoe_last_error(), format), "\"%s\" is not in \"%s\"", format, epmoe_last_error());
    cr_assert(strstr(epmoe_last_error(), tensor), "\"%s\" is not in \"%s\"", tensor, epmoe_last_error());
    cr_assert_eq(epmoei_checkpoint_layer_source(checkpoint, 1, &source), EPMOE_ERROR_NOT_SUPPORTED);
    cr_assert_eq(epmoei_checkpoint_expert_source(checkpoint, 1, 0, &expert), EPMOE_ERROR_NOT_SUPPORTED);
    epmoe_checkpoint_close(checkpoint);
}

Test(checkpoint, quantised_layers_are_refused_by_name)
{
    static const char *const gptq[] = {".qweight", ".qzeros", ".scales", ".g_idx", NULL};
    static const char *const packed[] = {".weight_packed", ".weight_scale", ".weight_shape", ".weight_zero_point",
                                         NULL};
    static const char *const fp8[] = {".weight", ".weight_scale_inv", NULL}, *const bare[] = {".weight", NULL};
    save_quantised("gptq", gptq, "I32", 1, 2);
    expect_refused("format gptq", "model.layers.1.mlp.experts.1.up_proj.qweight");
    save_quantised("awq", gptq, "I32", 1, 2);
    expect_refused("format awq", "model.layers.1.mlp.experts.1.up_proj.qweight");
    save_quantised("compressed-tensors", packed, "I32", 2, 1);
    expect_refused("format ct", "model.layers.1.mlp.experts.1.up_proj.weight_packed");
    save_quantised("fp8", fp8, "F8_E4M3", F, D);
    expect_refused("format fp8_block", "model.layers.1.mlp.experts.1.up_proj.weight");
    save_quantised("none", bare, "I8", F, D);
    expect_refused("format I8", "model.layers.1.mlp.experts.1.up_proj.weight");
    save_quantised("fp8", bare, "F8_E4M3", F, D);
    expect_fail(EPMOE_ERROR_FORMAT, "model.layers.1.mlp.experts.1.up_proj.weight_scale_inv", "is missing", NULL);
}

Test(checkpoint, mxfp4_is_refused_by_name)
{
    const int64_t gate_up[] = {2, 4, 1, 16}, gate_up_scales[] = {2, 4, 1}, down[] = {2, 4, 1, 16}, pair[] = {2, 4};
    build_file_t file = {0};
    build_add(&file, "model.layers.0.mlp.experts.gate_up_proj_blocks", "U8", gate_up, 4, NULL, 128);
    build_add(&file, "model.layers.0.mlp.experts.gate_up_proj_scales", "U8", gate_up_scales, 3, NULL, 8);
    build_add(&file, "model.layers.0.mlp.experts.gate_up_proj_bias", "BF16", pair, 2, NULL, 16);
    build_add(&file, "model.layers.0.mlp.experts.down_proj_blocks", "U8", down, 4, NULL, 128);
    build_add(&file, "model.layers.0.mlp.experts.down_proj_scales", "U8", gate_up_scales, 3, NULL, 8);
    build_add(&file, "model.layers.0.mlp.experts.down_proj_bias", "BF16", pair, 2, NULL, 16);
    build_weight(&file, 2, D, "model.layers.0.mlp.router.weight");
    build_weight(&file, 2, 0, "model.layers.0.mlp.router.bias");
    save_model(&file);
    save_config("gpt_oss", 1, MIXTRAL_CONFIG ",\"quantization_config\":{\"quant_method\":\"mxfp4\"}");
    epmoe_checkpoint_t *checkpoint = expect_open(0);
    epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
    cr_assert_eq(epmoe_checkpoint_layer_config(checkpoint, 0, &config), EPMOE_ERROR_NOT_SUPPORTED);
    cr_assert(strstr(epmoe_last_error(), "mxfp4") && strstr(epmoe_last_error(), "gate_up_proj_blocks"));
    epmoe_checkpoint_close(checkpoint);
}

/* --------------------------------------------------------------------------------------------------------- calls */

Test(checkpoint, bad_arguments)
{
    toy_t toy;
    make_toy(&toy);
    epmoe_checkpoint_t *checkpoint = expect_open(0);
    epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT, unset = {0};
    epmoe_checkpoint_info_t info = EPMOE_CHECKPOINT_INFO_INIT;
    epmoei_layer_source_t layer;
    epmoei_expert_source_t expert;
    static const int32_t layers[] = {-1, 2, INT32_MAX, INT32_MIN};
    for (int i = 0; i < 4; i++) {
        cr_assert_eq(epmoe_checkpoint_layer_config(checkpoint, layers[i], &config), EPMOE_ERROR_INVALID_ARGUMENT);
        cr_assert(strstr(epmoe_last_error(), "0..1"));
        cr_assert_eq(epmoei_checkpoint_layer_source(checkpoint, layers[i], &layer), EPMOE_ERROR_INVALID_ARGUMENT);
        cr_assert_eq(epmoei_checkpoint_expert_source(checkpoint, 0, layers[i], &expert), EPMOE_ERROR_INVALID_ARGUMENT);
    }
    cr_assert_eq(epmoe_checkpoint_layer_config(NULL, 0, &config), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert_eq(epmoe_checkpoint_layer_config(checkpoint, 0, NULL), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert_eq(epmoe_checkpoint_layer_config(checkpoint, 0, &unset), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert_eq(epmoe_checkpoint_get_info(NULL, &info), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert_eq(epmoe_checkpoint_get_info(checkpoint, NULL), EPMOE_ERROR_INVALID_ARGUMENT);
    /* A caller whose struct ends after num_experts. */
    info.struct_size = offsetof(epmoe_checkpoint_info_t, num_shards);
    info.num_shards = 77;
    cr_assert_eq(epmoe_checkpoint_get_info(checkpoint, &info), EPMOE_OK);
    cr_assert(info.num_experts == 2 && info.num_shards == 77);
    epmoe_checkpoint_close(checkpoint);
    free_toy(&toy);
}

Test(checkpoint, no_memory)
{
    toy_t toy;
    make_toy(&toy);
    int64_t n = 1;
    for (;; n++) {
        epmoe_checkpoint_t *checkpoint = NULL;
        epmoei_alloc_fail_at(n);
        epmoe_status_t status = epmoe_checkpoint_open(dir, &checkpoint);
        epmoei_alloc_fail_at(0);
        if (status == EPMOE_OK) {
            epmoe_checkpoint_close(checkpoint);
            break;
        }
        cr_assert_eq(status, EPMOE_ERROR_OUT_OF_MEMORY, "%s", epmoe_last_error());
        cr_assert_eq(epmoei_alloc_live(), 0);
    }
    cr_assert_gt(n, 20);
    free_toy(&toy);
}

/* Flipped bytes anywhere in the three kinds of file of a folder: a status, never a crash. */
Test(checkpoint, mutated_folders_give_a_status)
{
    static const char *const names[] = {"config.json", "model.safetensors.index.json", "model-2.safetensors"};
    toy_t toy;
    make_toy(&toy);
    testing_rng_t rng = testing_rng(7);
    int opened = 0, refused = 0;
    for (int i = 0; i < 3; i++) {
        FILE *in = fopen(path_of(names[i]), "rb");
        char valid[8192], data[8192];
        int64_t bytes = (int64_t)fread(valid, 1, sizeof valid, in);
        fclose(in);
        for (int round = 0; round < 600; round++) {
            memcpy(data, valid, (size_t)bytes);
            for (int j = testing_range(&rng, 1, 2); j > 0; j--)
                data[testing_range(&rng, 0, (int32_t)bytes - 1)] =
                    (char)(testing_next(&rng) & 1 ? testing_range(&rng, 32, 126) : testing_range(&rng, 0, 255));
            build_save_data(path_of(names[i]), data, bytes);
            epmoe_checkpoint_t *checkpoint = NULL;
            if (epmoe_checkpoint_open(dir, &checkpoint) == EPMOE_OK) {
                epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
                cr_assert_eq(epmoe_checkpoint_layer_config(checkpoint, 0, &config), EPMOE_OK);
                epmoe_checkpoint_close(checkpoint);
                opened++;
            } else
                refused++;
        }
        build_save_data(path_of(names[i]), valid, bytes);
    }
    cr_assert(opened > 20 && refused > 200, "%d opened, %d refused", opened, refused);
    free_toy(&toy);
}
