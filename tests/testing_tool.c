#include "tests/testing_tool.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static char folder[64];

static void must(bool condition, const char *what, const char *name)
{
    if (condition) return;
    fprintf(stderr, "%s: %s (%s)\n", name, what, epmoe_last_error());
    abort();
}

void testing_folder_make(void)
{
    strcpy(folder, "/tmp/epmoe_test_XXXXXX");
    must(mkdtemp(folder) != NULL, "cannot be made", folder);
}

void testing_folder_remove(void)
{
    testing_process_t process = testing_run(60, "rm -rf '%s'", folder);
    testing_process_free(&process);
}

const char *testing_path(const char *name)
{
    static char paths[4][256];
    static int next;
    next = (next + 1) % 4;
    snprintf(paths[next], sizeof paths[next], "%s/%s", folder, name);
    return paths[next];
}

static const char *tensors_path(const char *name)
{
    char file[128];
    snprintf(file, sizeof file, "%s.safetensors", name);
    return testing_path(file);
}

void testing_write(const char *name, const safetensors_output_t *tensors, int32_t count)
{
    must(safetensors_write(tensors_path(name), tensors, count) == EPMOE_OK, "cannot be written", name);
}

void testing_shift(const char *name, int32_t bytes)
{
    const char *path = tensors_path(name);
    FILE *file = fopen(path, "rb");
    must(file != NULL, "cannot be opened", path);
    fseek(file, 0, SEEK_END);
    size_t size = (size_t)ftell(file);
    rewind(file);
    unsigned char *content = malloc(size);
    must(content && fread(content, 1, size, file) == size, "cannot be read", path);
    fclose(file);

    uint64_t length = 0;
    for (int i = 0; i < 8; i++) length |= (uint64_t)content[i] << (8 * i);
    uint64_t longer = length + (uint64_t)bytes;
    file = fopen(path, "wb");
    must(file != NULL, "cannot be opened", path);
    for (int i = 0; i < 8; i++) fputc((int)(longer >> (8 * i) & 0xFF), file);
    fwrite(content + 8, 1, length, file);
    for (int32_t i = 0; i < bytes; i++) fputc(' ', file);
    fwrite(content + 8 + length, 1, size - 8 - length, file);
    must(fclose(file) == 0, "cannot be written", path);
    free(content);
}

bool testing_exists(const char *name) { return access(testing_path(name), F_OK) == 0; }

testing_process_t testing_tool(const char *format, ...)
{
    char arguments[4096];
    va_list args;
    va_start(args, format);
    vsnprintf(arguments, sizeof arguments, format, args);
    va_end(args);
    return testing_run(120, "cd '%s' && exec '%s/moe_tool' %s", folder, EPMOE_TEST_BIN, arguments);
}

void *testing_read(const char *name, const char *tensor, epmoe_dtype_t dtype, int64_t elements)
{
    epmoei_safetensors_t *file;
    must(epmoei_safetensors_open(tensors_path(name), &file) == EPMOE_OK, "cannot be opened", name);
    const epmoei_tensor_t *found = epmoei_safetensors_find(file, tensor);
    must(found && found->dtype == dtype && found->num_elements == elements, "has no such tensor of this size", tensor);
    void *copy = malloc((size_t)found->bytes + 1);
    must(copy != NULL, "no memory", tensor);
    memcpy(copy, found->data, (size_t)found->bytes);
    epmoei_safetensors_close(file);
    return copy;
}
