#include "tests/safetensors_build.h"

#include <dirent.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static void *checked(void *pointer)
{
    if (!pointer) abort();
    return pointer;
}

void build_add(build_file_t *file, const char *name, const char *dtype, const int64_t *shape, int32_t num_dims,
               const void *data, int64_t bytes)
{
    file->tensors = checked(realloc(file->tensors, (size_t)(file->count + 1) * sizeof *file->tensors));
    build_tensor_t *tensor = &file->tensors[file->count++];
    *tensor = (build_tensor_t){.name = checked(strdup(name)), .num_dims = num_dims, .bytes = bytes};
    snprintf(tensor->dtype, sizeof tensor->dtype, "%s", dtype);
    for (int32_t i = 0; i < num_dims; i++) tensor->shape[i] = shape[i];
    tensor->data = checked(malloc((size_t)bytes + 1));
    if (data)
        memcpy(tensor->data, data, (size_t)bytes);
    else
        memset(tensor->data, 0, (size_t)bytes);
}

float build_value(const char *name, int64_t i)
{
    uint32_t hash = 2166136261u;
    for (; *name; name++) hash = (hash ^ (unsigned char)*name) * 16777619u;
    hash = (hash ^ (uint32_t)i) * 2654435761u;
    return (float)((int32_t)(hash >> 24) - 128) / 64.0f;
}

void build_weight(build_file_t *file, int64_t rows, int64_t cols, const char *name_format, ...)
{
    char name[256];
    va_list args;
    va_start(args, name_format);
    vsnprintf(name, sizeof name, name_format, args);
    va_end(args);
    int64_t shape[2] = {rows, cols}, count = rows * (cols ? cols : 1);
    build_add(file, name, "BF16", shape, cols ? 2 : 1, NULL, 2 * count);
    char *data = file->tensors[file->count - 1].data;
    for (int64_t i = 0; i < count; i++) epmoei_store(data, EPMOE_BF16, i, build_value(name, i));
}

build_tensor_t *build_find(const build_file_t *file, const char *name)
{
    for (int32_t i = 0; i < file->count; i++)
        if (!strcmp(file->tensors[i].name, name)) return &file->tensors[i];
    return NULL;
}

void build_remove(build_file_t *file, const char *name)
{
    build_tensor_t *tensor = checked(build_find(file, name));
    free(tensor->name);
    free(tensor->data);
    *tensor = file->tensors[--file->count];
}

void build_free(build_file_t *file)
{
    for (int32_t i = 0; i < file->count; i++) {
        free(file->tensors[i].name);
        free(file->tensors[i].data);
    }
    free(file->tensors);
    *file = (build_file_t){0};
}

char *build_bytes(const build_file_t *file, int64_t *bytes)
{
    char *header = NULL;
    size_t header_size = 0;
    FILE *out = checked(open_memstream(&header, &header_size));
    int64_t offset = 0;
    fputs("{\"__metadata__\":{\"format\":\"pt\"}", out);
    for (int32_t i = 0; i < file->count; i++) {
        const build_tensor_t *tensor = &file->tensors[i];
        fprintf(out, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", tensor->name, tensor->dtype);
        for (int32_t j = 0; j < tensor->num_dims; j++) fprintf(out, "%s%" PRId64, j ? "," : "", tensor->shape[j]);
        fprintf(out, "],\"data_offsets\":[%" PRId64 ",%" PRId64 "]}", offset, offset + tensor->bytes);
        offset += tensor->bytes;
    }
    fputc('}', out);
    fflush(out);
    while ((int64_t)ftell(out) < file->header_bytes) fputc(' ', out);
    fclose(out);
    *bytes = 8 + (int64_t)header_size + offset;
    char *all = checked(malloc((size_t)*bytes));
    for (int i = 0; i < 8; i++) all[i] = (char)(header_size >> (8 * i));
    memcpy(all + 8, header, header_size);
    char *data = all + 8 + header_size;
    for (int32_t i = 0; i < file->count; i++) {
        memcpy(data, file->tensors[i].data, (size_t)file->tensors[i].bytes);
        data += file->tensors[i].bytes;
    }
    free(header);
    return all;
}

void build_save_data(const char *path, const void *data, int64_t bytes)
{
    FILE *out = checked(fopen(path, "wb"));
    if (fwrite(data, 1, (size_t)bytes, out) != (size_t)bytes || fclose(out)) abort();
}

void build_save(const build_file_t *file, const char *dir, const char *name)
{
    char path[512];
    int64_t bytes;
    char *data = build_bytes(file, &bytes);
    snprintf(path, sizeof path, "%s/%s", dir, name);
    build_save_data(path, data, bytes);
    free(data);
}

void build_save_raw(const char *path, int64_t header_length, const char *header, int64_t data_bytes)
{
    size_t size = strlen(header);
    if (header_length == -1) header_length = (int64_t)size;
    char *all = checked(calloc(1, 8 + size + (size_t)data_bytes));
    for (int i = 0; i < 8; i++) all[i] = (char)((uint64_t)header_length >> (8 * i));
    memcpy(all + 8, header, size);
    build_save_data(path, all, 8 + (int64_t)size + data_bytes);
    free(all);
}

const char *build_make_dir(char path[256])
{
    const char *base = getenv("TMPDIR");
    snprintf(path, 256, "%.200s/epmoe-test-XXXXXX", base ? base : "/tmp");
    return checked(mkdtemp(path));
}

void build_remove_dir(const char *path)
{
    DIR *dir = checked(opendir(path));
    for (struct dirent *entry; (entry = readdir(dir));) {
        char file[1024];
        snprintf(file, sizeof file, "%s/%s", path, entry->d_name);
        if (entry->d_name[0] != '.') unlink(file);
    }
    closedir(dir);
    rmdir(path);
}

void build_save_text(const char *dir, const char *name, const char *text)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    build_save_data(path, text, (int64_t)strlen(text));
}

char *build_load_text(const char *path)
{
    FILE *in = checked(fopen(path, "rb"));
    fseek(in, 0, SEEK_END);
    long size = ftell(in);
    rewind(in);
    char *text = checked(malloc((size_t)size + 1));
    if (fread(text, 1, (size_t)size, in) != (size_t)size) abort();
    fclose(in);
    text[size] = 0;
    return text;
}
