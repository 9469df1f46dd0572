/* Checkpoint folders: shards and their index, files that are missing or broken, arguments and memory. */
#include "tests/checkpoint_folder.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { D = FOLDER_HIDDEN, F = FOLDER_WIDTH };

TestSuite(checkpoint, .init = folder_set_up, .fini = folder_tear_down);

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
    build_save_text(folder_dir, "model.safetensors.index.json", text);
}

/* Layers 0 and 1 in the first two shards, what is around them in the third. */
static void make_toy(toy_t *toy)
{
    *toy = (toy_t){0};
    folder_add_mixtral(&toy->shards[0], 0);
    folder_add_mixtral(&toy->shards[1], 1);
    build_weight(&toy->shards[2], 3, D, "model.embed_tokens.weight");
    build_weight(&toy->shards[2], D, 0, "model.norm.weight");
    for (int s = 0; s < 3; s++)
        for (int32_t i = 0; i < toy->shards[s].count; i++)
            add_to_index(toy, toy->shards[s].tensors[i].name, shard_names[s]);
    for (int s = 0; s < 3; s++) build_save(&toy->shards[s], folder_dir, shard_names[s]);
    save_index(toy);
    folder_config("mixtral", 2, FOLDER_MIXTRAL);
}

static void free_toy(toy_t *toy)
{
    for (int s = 0; s < 3; s++) build_free(&toy->shards[s]);
}

Test(checkpoint, three_shards)
{
    toy_t toy;
    make_toy(&toy);
    epmoe_checkpoint_t *checkpoint = folder_open(0);
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
        folder_check_written(&layer.router, 2, D, name);
        cr_assert(!layer.shared.gate.data && !layer.router_bias.data && !layer.selection_bias.data);
        cr_assert_eq(epmoei_checkpoint_expert_source(checkpoint, i, 1, &expert), EPMOE_OK);
        snprintf(name, sizeof name, "model.layers.%d.block_sparse_moe.experts.1.w1.weight", i);
        folder_check_written(&expert.gate, F, D, name);
        snprintf(name, sizeof name, "model.layers.%d.block_sparse_moe.experts.1.w3.weight", i);
        folder_check_written(&expert.up, F, D, name);
        snprintf(name, sizeof name, "model.layers.%d.block_sparse_moe.experts.1.w2.weight", i);
        folder_check_written(&expert.down, D, F, name);
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
    unlink(folder_path("model-2.safetensors"));
    folder_expect_fail(EPMOE_ERROR_IO, "model-2.safetensors", "cannot be opened", "model.layers.1.block_sparse_moe.",
                       NULL);
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
    build_save_data(folder_path("model-2.safetensors"), data, bytes - 1);
    folder_expect_fail(EPMOE_ERROR_FORMAT, "model-2.safetensors", "too short",
                       "tensor model.layers.1.block_sparse_moe.experts.1.w3.weight", NULL);
    build_save_data(folder_path("model-2.safetensors"), data, 300);
    folder_expect_fail(EPMOE_ERROR_FORMAT, "model-2.safetensors", "header length", "only 292 bytes",
                       "tensor model.layers.1.block_sparse_moe.", NULL);
    build_save_data(folder_path("model-2.safetensors"), data, bytes + 1);
    folder_expect_fail(EPMOE_ERROR_FORMAT, "model-2.safetensors", "1 trailing bytes", NULL);
    build_save_data(folder_path("model-2.safetensors"), data, bytes);
    epmoe_checkpoint_close(folder_open(0));
    free(data);
    free_toy(&toy);
}

Test(checkpoint, index_names_a_tensor_that_its_shard_lacks)
{
    toy_t toy;
    make_toy(&toy);
    add_to_index(&toy, "lm_head.weight", "model-3.safetensors");
    save_index(&toy);
    folder_expect_fail(EPMOE_ERROR_FORMAT, "model-3.safetensors", "lm_head.weight", "index.json", NULL);
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
        build_save(&stray, folder_dir, strays[i]);
        epmoei_layer_source_t layer;
        epmoe_checkpoint_t *checkpoint = folder_open(0);
        cr_assert_eq(epmoei_checkpoint_layer_source(checkpoint, 0, &layer), EPMOE_OK);
        folder_check_written(&layer.router, 2, D, name);
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
    build_save(&toy.shards[2], folder_dir, shard_names[2]);
    epmoei_layer_source_t layer;
    epmoe_checkpoint_t *checkpoint = folder_open(1);
    cr_assert(strstr(folder_log, name) && strstr(folder_log, "model-1.safetensors") &&
              strstr(folder_log, "model-3.safetensors"));
    cr_assert_eq(epmoei_checkpoint_layer_source(checkpoint, 0, &layer), EPMOE_OK);
    folder_check_written(&layer.router, 2, D, name);
    epmoe_checkpoint_close(checkpoint);
    free_toy(&toy);
}

Test(checkpoint, tensors_that_the_index_does_not_list)
{
    toy_t toy;
    make_toy(&toy);
    build_weight(&toy.shards[2], D, 0, "model.extra.weight");
    build_save(&toy.shards[2], folder_dir, shard_names[2]);
    epmoe_checkpoint_t *checkpoint = folder_open(1);
    cr_assert(strstr(folder_log, "model.extra.weight") && strstr(folder_log, "model-3.safetensors"));
    cr_assert_null(epmoei_checkpoint_find(checkpoint, "model.extra.weight"));
    epmoe_checkpoint_close(checkpoint);
    build_weight(&toy.shards[2], D, 0, "model.layers.1.block_sparse_moe.bias");
    build_save(&toy.shards[2], folder_dir, shard_names[2]);
    folder_expect_fail(EPMOE_ERROR_FORMAT, "model.layers.1.block_sparse_moe.bias", "model-3.safetensors", "index",
                       NULL);
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
        build_save_text(folder_dir, "model.safetensors.index.json", texts[i]);
        folder_expect_fail(EPMOE_ERROR_FORMAT, "model.safetensors.index.json", i >= 3 && i <= 8 ? "tensor a" : "",
                           NULL);
    }
    free_toy(&toy);
}

Test(checkpoint, nothing_there)
{
    char wanted[300];
    folder_expect_fail(EPMOE_ERROR_IO, "config.json", NULL);
    folder_config("mixtral", 2, FOLDER_MIXTRAL);
    folder_expect_fail(EPMOE_ERROR_IO, folder_dir, "model.safetensors", "index.json", NULL);
    snprintf(wanted, sizeof wanted, "%s/config.json", folder_dir);
    build_save_text(folder_dir, "config.json", "{\"model_type\":\"mixtral\",\"model_type\":\"olmoe\"}");
    folder_expect_fail(EPMOE_ERROR_FORMAT, wanted, "model_type", "twice", NULL);
    epmoe_checkpoint_t *checkpoint;
    cr_assert_eq(epmoe_checkpoint_open(NULL, &checkpoint), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert_eq(epmoe_checkpoint_open(folder_dir, NULL), EPMOE_ERROR_INVALID_ARGUMENT);
    epmoe_checkpoint_close(NULL);
}

Test(checkpoint, bad_arguments)
{
    toy_t toy;
    make_toy(&toy);
    epmoe_checkpoint_t *checkpoint = folder_open(0);
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
        epmoe_status_t status = epmoe_checkpoint_open(folder_dir, &checkpoint);
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
        FILE *in = fopen(folder_path(names[i]), "rb");
        char valid[8192], data[8192];
        int64_t bytes = (int64_t)fread(valid, 1, sizeof valid, in);
        fclose(in);
        for (int round = 0; round < 600; round++) {
            memcpy(data, valid, (size_t)bytes);
            for (int j = testing_range(&rng, 1, 2); j > 0; j--)
                data[testing_range(&rng, 0, (int32_t)bytes - 1)] =
                    (char)(testing_next(&rng) & 1 ? testing_range(&rng, 32, 126) : testing_range(&rng, 0, 255));
            build_save_data(folder_path(names[i]), data, bytes);
            epmoe_checkpoint_t *checkpoint = NULL;
            if (epmoe_checkpoint_open(folder_dir, &checkpoint) == EPMOE_OK) {
                epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
                cr_assert_eq(epmoe_checkpoint_layer_config(checkpoint, 0, &config), EPMOE_OK);
                epmoe_checkpoint_close(checkpoint);
                opened++;
            } else
                refused++;
        }
        build_save_data(folder_path(names[i]), valid, bytes);
    }
    cr_assert(opened > 20 && refused > 200, "%d opened, %d refused", opened, refused);
    free_toy(&toy);
}
