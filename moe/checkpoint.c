#include "moe/checkpoint_internal.h"
#include "moe/json_file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* One entry of the index: weight_map[tensor] = shard. The strings belong to the JSON. */
typedef struct mapping_t {
    const char *shard;
    const char *tensor;
} mapping_t;

static int by_shard_then_tensor(const void *a, const void *b)
{
    const mapping_t *x = a, *y = b;
    int order = strcmp(x->shard, y->shard);
    return order ? order : strcmp(x->tensor, y->tensor);
}

/* "<dir>/<name>", the caller's to free. */
static epmoe_status_t join_path(const char *dir, const char *name, char **path)
{
    size_t size = strlen(dir) + strlen(name) + 2;
    EPMOEI_CHECK(epmoei_alloc_for((void **)path, (int64_t)size, name));
    snprintf(*path, size, "%s/%s", dir, name);
    return EPMOE_OK;
}

static void add_tensor(epmoe_checkpoint_t *checkpoint, const epmoei_tensor_t *tensor)
{
    checkpoint->index.tensors[checkpoint->index.count++] = tensor;
    checkpoint->total_bytes += tensor->bytes;
}

static epmoe_status_t make_index(epmoe_checkpoint_t *checkpoint, int64_t num_shards, int64_t num_tensors)
{
    EPMOEI_CHECK(epmoei_alloc_for((void **)&checkpoint->shards, num_shards * (int64_t)sizeof *checkpoint->shards,
                                  checkpoint->dir));
    return epmoei_alloc_for((void **)&checkpoint->index.tensors,
                            num_tensors * (int64_t)sizeof *checkpoint->index.tensors, checkpoint->dir);
}

static epmoe_status_t open_single(epmoe_checkpoint_t *checkpoint, const char *path)
{
    epmoei_safetensors_t *file = NULL;
    EPMOEI_CHECK(epmoei_safetensors_open(path, &file));
    epmoe_status_t status = make_index(checkpoint, 1, epmoei_safetensors_count(file));
    if (status != EPMOE_OK) {
        epmoei_safetensors_close(file);
        return status;
    }
    checkpoint->shards[checkpoint->num_shards++] = file;
    for (int64_t i = 0; i < epmoei_safetensors_count(file); i++) add_tensor(checkpoint, epmoei_safetensors_at(file, i));
    return EPMOE_OK;
}

/* A shard is a plain file name: nothing in an index may lead out of the folder. */
static bool is_file_name(const char *text) { return *text && !strchr(text, '/') && !strstr(text, ".."); }

/* The tensors of a shard that the index does not list there. Where the index lists them elsewhere that place counts;
 * one that it does not list at all is passed over with a warning, unless it is part of a layer's MLP. */
static epmoe_status_t check_unlisted(const epmoe_checkpoint_t *checkpoint, const json_t *map, const char *index_path,
                                     const char *shard, const epmoei_safetensors_t *file)
{
    for (int64_t i = 0; i < epmoei_safetensors_count(file); i++) {
        const epmoei_tensor_t *tensor = epmoei_safetensors_at(file, i);
        const char *listed = json_string_value(json_object_get(map, tensor->name));
        if (listed && !strcmp(listed, shard)) continue;
        if (listed)
            epmoei_log(EPMOE_LOG_WARNING, "%s: tensor %.256s is also in %s; the index lists it in %s, which is read",
                       index_path, tensor->name, shard, listed);
        else if (epmoei_checkpoint_is_mlp_tensor(checkpoint, tensor->name))
            return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: tensor %.256s is in %s, but the index does not list it",
                               index_path, tensor->name, shard);
        else
            epmoei_log(EPMOE_LOG_WARNING, "%s: tensor %.256s is in %s; the index does not list it and it is not read",
                       index_path, tensor->name, shard);
    }
    return EPMOE_OK;
}

/* Opens the shard of maps[0..count) and takes these tensors from it. */
static epmoe_status_t open_shard(epmoe_checkpoint_t *checkpoint, const json_t *map, const char *index_path,
                                 const mapping_t *maps, int64_t count)
{
    char *path = NULL;
    epmoei_safetensors_t *file = NULL;
    EPMOEI_CHECK(join_path(checkpoint->dir, maps[0].shard, &path));
    epmoe_status_t status = epmoei_safetensors_open(path, &file);
    epmoei_free(path);
    if (status != EPMOE_OK)
        return epmoei_fail(status, "%s (the index lists tensor %.256s in it)", epmoe_last_error(), maps[0].tensor);
    checkpoint->shards[checkpoint->num_shards++] = file;
    for (int64_t i = 0; i < count; i++) {
        const epmoei_tensor_t *tensor = epmoei_safetensors_find(file, maps[i].tensor);
        if (!tensor)
            return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: tensor %.256s is missing, though %s lists it there",
                               epmoei_safetensors_path(file), maps[i].tensor, index_path);
        add_tensor(checkpoint, tensor);
    }
    return epmoei_safetensors_count(file) == count ? EPMOE_OK
                                                   : check_unlisted(checkpoint, map, index_path, maps[0].shard, file);
}

static epmoe_status_t open_sharded(epmoe_checkpoint_t *checkpoint, const char *index_path)
{
    epmoe_status_t status = EPMOE_OK;
    json_t *root = NULL;
    mapping_t *maps = NULL;
    EPMOEI_CHECK(epmoei_json_read(index_path, &root));
    json_t *map = json_object_get(root, "weight_map"), *value;
    const char *tensor;
    int64_t count = 0, num_shards = 0;
    if (!json_is_object(map) || json_object_size(map) == 0) {
        status = epmoei_fail(EPMOE_ERROR_FORMAT, "%s: weight_map is not an object with entries", index_path);
        goto done;
    }
    EPMOEI_CHECK_GOTO(
        epmoei_alloc_for((void **)&maps, (int64_t)json_object_size(map) * (int64_t)sizeof *maps, index_path), done);
    json_object_foreach(map, tensor, value)
    {
        const char *shard = json_string_value(value);
        if (!shard || !is_file_name(shard)) {
            status = epmoei_fail(EPMOE_ERROR_FORMAT,
                                 "%s: weight_map: tensor %.256s: \"%.256s\" is not the name of a "
                                 "file in this folder",
                                 index_path, tensor, shard ? shard : "(no string)");
            goto done;
        }
        maps[count++] = (mapping_t){shard, tensor};
    }
    qsort(maps, (size_t)count, sizeof *maps, by_shard_then_tensor);
    for (int64_t i = 0; i < count; i++) num_shards += i == 0 || strcmp(maps[i].shard, maps[i - 1].shard);
    EPMOEI_CHECK_GOTO(make_index(checkpoint, num_shards, count), done);
    for (int64_t first = 0, last; first < count; first = last) {
        for (last = first + 1; last < count && !strcmp(maps[last].shard, maps[first].shard);) last++;
        EPMOEI_CHECK_GOTO(open_shard(checkpoint, map, index_path, maps + first, last - first), done);
    }
done:
    epmoei_free(maps);
    json_decref(root);
    return status;
}

/* With both there the index counts: it says which files belong to the checkpoint. */
static epmoe_status_t open_files(epmoe_checkpoint_t *checkpoint)
{
    char *index_path = NULL, *single_path = NULL;
    epmoe_status_t status = EPMOE_OK;
    EPMOEI_CHECK_GOTO(join_path(checkpoint->dir, "model.safetensors.index.json", &index_path), done);
    EPMOEI_CHECK_GOTO(join_path(checkpoint->dir, "model.safetensors", &single_path), done);
    if (access(index_path, F_OK) == 0)
        EPMOEI_CHECK_GOTO(open_sharded(checkpoint, index_path), done);
    else if (access(single_path, F_OK) == 0)
        EPMOEI_CHECK_GOTO(open_single(checkpoint, single_path), done);
    else
        status = epmoei_fail(EPMOE_ERROR_IO, "%s: holds neither model.safetensors nor model.safetensors.index.json",
                             checkpoint->dir);
    epmoei_tensor_index_sort(&checkpoint->index);
done:
    epmoei_free(index_path);
    epmoei_free(single_path);
    return status;
}

static epmoe_status_t check_layers(epmoe_checkpoint_t *checkpoint)
{
    int32_t num_layers = checkpoint->config.num_layers;
    /* Every layer has a tensor, so this bounds the allocation by what the files hold. */
    if (num_layers > checkpoint->index.count)
        return epmoei_fail(EPMOE_ERROR_FORMAT,
                           "%s: in config.json num_hidden_layers is %d, but there are only %lld "
                           "tensors",
                           checkpoint->dir, num_layers, (long long)checkpoint->index.count);
    int64_t bytes = num_layers * (int64_t)sizeof *checkpoint->layers;
    EPMOEI_CHECK(epmoei_alloc_for((void **)&checkpoint->layers, bytes, checkpoint->dir));
    memset(checkpoint->layers, 0, (size_t)bytes);
    for (int32_t i = 0; i < num_layers; i++) EPMOEI_CHECK(epmoei_checkpoint_check_layer(checkpoint, i));
    return epmoei_checkpoint_check_names(checkpoint);
}

epmoe_status_t epmoe_checkpoint_open(const char *dir, epmoe_checkpoint_t **result)
{
    if (!dir) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "dir is NULL");
    if (!result) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "checkpoint is NULL");
    epmoe_status_t status = EPMOE_OK;
    epmoe_checkpoint_t *checkpoint = NULL;
    char *config_path = NULL;
    EPMOEI_CHECK_GOTO(epmoei_alloc_for((void **)&checkpoint, sizeof *checkpoint, dir), fail);
    memset(checkpoint, 0, sizeof *checkpoint);
    EPMOEI_CHECK_GOTO(epmoei_alloc_for((void **)&checkpoint->dir, (int64_t)strlen(dir) + 1, dir), fail);
    strcpy(checkpoint->dir, dir);
    EPMOEI_CHECK_GOTO(join_path(dir, "config.json", &config_path), fail);
    EPMOEI_CHECK_GOTO(epmoei_model_config_read(config_path, &checkpoint->config), fail);
    EPMOEI_CHECK_GOTO(open_files(checkpoint), fail);
    EPMOEI_CHECK_GOTO(check_layers(checkpoint), fail);
    epmoei_free(config_path);
    *result = checkpoint;
    return EPMOE_OK;

fail:
    epmoei_free(config_path);
    epmoe_checkpoint_close(checkpoint);
    return status;
}

void epmoe_checkpoint_close(epmoe_checkpoint_t *checkpoint)
{
    if (!checkpoint) return;
    for (int32_t i = 0; i < checkpoint->num_shards; i++) epmoei_safetensors_close(checkpoint->shards[i]);
    epmoei_free(checkpoint->shards);
    epmoei_free(checkpoint->index.tensors);
    epmoei_free(checkpoint->layers);
    epmoei_free(checkpoint->dir);
    epmoei_model_config_free(&checkpoint->config);
    epmoei_free(checkpoint);
}

epmoe_status_t epmoe_checkpoint_get_info(const epmoe_checkpoint_t *checkpoint, epmoe_checkpoint_info_t *info)
{
    if (!checkpoint) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "checkpoint is NULL");
    epmoe_checkpoint_info_t result = {.struct_size = sizeof result,
                                      .num_layers = checkpoint->config.num_layers,
                                      .hidden = checkpoint->config.layer.hidden,
                                      .num_experts = checkpoint->config.layer.num_experts,
                                      .num_shards = checkpoint->num_shards,
                                      .total_bytes = checkpoint->total_bytes};
    memcpy(result.family, checkpoint->config.model_type, sizeof result.family);
    return epmoei_return_sized(info, &result, sizeof result, "info");
}

const epmoei_tensor_t *epmoei_checkpoint_find(const epmoe_checkpoint_t *checkpoint, const char *name)
{
    return epmoei_tensor_index_find(&checkpoint->index, name);
}
