#include "moe/safetensors.h"
#include "moe/json_file.h"
#include "moe/tensor_index.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define LENGTH_BYTES     8
#define MAX_HEADER_BYTES 100000000

struct epmoei_safetensors {
    char *path;
    char *mapping; /* the whole file */
    int64_t file_bytes;
    const char *data;
    int64_t data_bytes;
    epmoei_tensor_t *tensors;
    int64_t count;
    char *names;
    epmoei_tensor_index_t by_name;
};

/* Every type of the format. Those without an epmoe dtype can be carried and measured, not computed with. */
static const struct {
    const char *name;
    int32_t bits;
    epmoe_dtype_t dtype;
} dtype_table[] = {
    {"F32", 32, EPMOE_F32},
    {"BF16", 16, EPMOE_BF16},
    {"F16", 16, EPMOE_F16},
    {"F8_E4M3", 8, EPMOE_F8_E4M3},
    {"F8_E8M0", 8, EPMOE_F8_E8M0},
    {"U8", 8, EPMOE_U8},
    {"I32", 32, EPMOE_I32},
    {"I64", 64, EPMOE_I64},
    {"BOOL", 8, EPMOE_DTYPE_NONE},
    {"I8", 8, EPMOE_DTYPE_NONE},
    {"I16", 16, EPMOE_DTYPE_NONE},
    {"U16", 16, EPMOE_DTYPE_NONE},
    {"U32", 32, EPMOE_DTYPE_NONE},
    {"U64", 64, EPMOE_DTYPE_NONE},
    {"F64", 64, EPMOE_DTYPE_NONE},
    {"C64", 64, EPMOE_DTYPE_NONE},
    {"F8_E5M2", 8, EPMOE_DTYPE_NONE},
    {"F8_E4M3FNUZ", 8, EPMOE_DTYPE_NONE},
    {"F8_E5M2FNUZ", 8, EPMOE_DTYPE_NONE},
    {"F6_E2M3", 6, EPMOE_DTYPE_NONE},
    {"F6_E3M2", 6, EPMOE_DTYPE_NONE},
    {"F4", 4, EPMOE_DTYPE_NONE},
};

/* Names come from the file and may be of any length: messages carry so much of them. */
#define NAME "%.256s"

static epmoe_status_t check_metadata(const char *path, json_t *metadata)
{
    if (!json_is_object(metadata)) return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: __metadata__ is not an object", path);
    const char *key;
    json_t *value;
    json_object_foreach(metadata, key, value)
    {
        if (!json_is_string(value))
            return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: __metadata__: the value of " NAME " is not a string", path,
                               key);
    }
    return EPMOE_OK;
}

static epmoe_status_t read_dtype(const json_t *entry, epmoei_tensor_t *tensor, int32_t *bits)
{
    const char *text = json_string_value(json_object_get(entry, "dtype"));
    if (!text)
        return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: tensor " NAME ": dtype is not a string", tensor->path,
                           tensor->name);
    for (size_t i = 0; i < sizeof dtype_table / sizeof dtype_table[0]; i++) {
        if (strcmp(text, dtype_table[i].name)) continue;
        tensor->dtype = dtype_table[i].dtype;
        tensor->dtype_name = dtype_table[i].name;
        *bits = dtype_table[i].bits;
        return EPMOE_OK;
    }
    return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: tensor " NAME ": dtype %.64s is not known to the format", tensor->path,
                       tensor->name, text);
}

/* Fills shape, num_elements and bytes. The product of the dimensions that are not zero must fit too, so that no
 * product of some of them can overflow later. */
static epmoe_status_t read_shape(const json_t *entry, int32_t bits, epmoei_tensor_t *tensor)
{
    const json_t *shape = json_object_get(entry, "shape");
    if (!json_is_array(shape))
        return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: tensor " NAME ": shape is not an array", tensor->path,
                           tensor->name);
    if (json_array_size(shape) > EPMOEI_MAX_DIMS)
        return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: tensor " NAME ": shape has %zu dimensions: expected at most %d",
                           tensor->path, tensor->name, json_array_size(shape), EPMOEI_MAX_DIMS);
    tensor->num_dims = (int32_t)json_array_size(shape);
    bool empty = false;
    int64_t product = 1;
    for (int32_t i = 0; i < tensor->num_dims; i++) {
        const json_t *dim = json_array_get(shape, (size_t)i);
        if (!json_is_integer(dim) || json_integer_value(dim) < 0)
            return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: tensor " NAME ": shape[%d] is not a non-negative integer",
                               tensor->path, tensor->name, i);
        tensor->shape[i] = (int64_t)json_integer_value(dim);
        if (tensor->shape[i] == 0)
            empty = true;
        else if (__builtin_mul_overflow(product, tensor->shape[i], &product))
            product = INT64_MAX;
    }
    int64_t total_bits;
    if (__builtin_mul_overflow(product, (int64_t)bits, &total_bits)) {
        char text[EPMOEI_SHAPE_TEXT];
        return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: tensor " NAME ": the size of shape %s overflows", tensor->path,
                           tensor->name, epmoei_shape_text(text, tensor->num_dims, tensor->shape));
    }
    if (!empty && total_bits % 8)
        return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: tensor " NAME ": %lld elements of %s are not whole bytes",
                           tensor->path, tensor->name, (long long)product, tensor->dtype_name);
    tensor->num_elements = empty ? 0 : product;
    tensor->bytes = empty ? 0 : total_bits / 8;
    return EPMOE_OK;
}

static epmoe_status_t read_offsets(const epmoei_safetensors_t *file, const json_t *entry, epmoei_tensor_t *tensor)
{
    const json_t *offsets = json_object_get(entry, "data_offsets");
    const json_t *first = json_array_get(offsets, 0), *last = json_array_get(offsets, 1);
    if (!json_is_array(offsets) || json_array_size(offsets) != 2 || !json_is_integer(first) || !json_is_integer(last))
        return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: tensor " NAME ": data_offsets is not an array of two integers",
                           tensor->path, tensor->name);
    long long begin = json_integer_value(first), end = json_integer_value(last);
    if (begin < 0 || end < begin)
        return epmoei_fail(EPMOE_ERROR_FORMAT,
                           "%s: tensor " NAME ": data_offsets are [%lld,%lld]: expected 0 <= "
                           "begin <= end",
                           tensor->path, tensor->name, begin, end);
    if (end - begin != tensor->bytes) {
        char text[EPMOEI_SHAPE_TEXT];
        return epmoei_fail(EPMOE_ERROR_FORMAT,
                           "%s: tensor " NAME ": data_offsets [%lld,%lld] hold %lld bytes, but %s %s takes %lld",
                           tensor->path, tensor->name, begin, end, end - begin, tensor->dtype_name,
                           epmoei_shape_text(text, tensor->num_dims, tensor->shape), (long long)tensor->bytes);
    }
    if (end > file->data_bytes)
        return epmoei_fail(EPMOE_ERROR_FORMAT,
                           "%s: tensor " NAME ": its data ends at byte %lld, but the file is too short: it holds %lld "
                           "bytes of data",
                           tensor->path, tensor->name, end, (long long)file->data_bytes);
    tensor->data = file->data + begin;
    return EPMOE_OK;
}

static int by_place(const void *a, const void *b)
{
    const epmoei_tensor_t *x = *(const epmoei_tensor_t *const *)a, *y = *(const epmoei_tensor_t *const *)b;
    if (x->data != y->data) return (const char *)x->data < (const char *)y->data ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

/* The tensors must cover the data exactly. Leaves by_name in the order of the data. */
static epmoe_status_t check_coverage(epmoei_safetensors_t *file)
{
    const epmoei_tensor_t **order = file->by_name.tensors;
    if (file->count > 1) qsort(order, (size_t)file->count, sizeof *order, by_place);
    int64_t covered = 0;
    for (int64_t i = 0; i < file->count; i++) {
        int64_t begin = (const char *)order[i]->data - file->data;
        if (begin < covered)
            return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: tensor " NAME " overlaps tensor " NAME, file->path,
                               order[i]->name, order[i - 1]->name);
        if (begin > covered)
            return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: a hole of %lld bytes in front of tensor " NAME, file->path,
                               (long long)(begin - covered), order[i]->name);
        covered = begin + order[i]->bytes;
    }
    if (covered < file->data_bytes)
        return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: %lld trailing bytes behind the last tensor%s" NAME, file->path,
                           (long long)(file->data_bytes - covered), file->count ? " " : "",
                           file->count ? order[file->count - 1]->name : "");
    return EPMOE_OK;
}

static epmoe_status_t read_tensors(epmoei_safetensors_t *file, json_t *header)
{
    const char *key;
    json_t *entry;
    int64_t name_bytes = 0, count = 0;
    json_object_foreach(header, key, entry)
    {
        if (!strcmp(key, "__metadata__")) {
            EPMOEI_CHECK(check_metadata(file->path, entry));
            continue;
        }
        if (!json_is_object(entry))
            return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: tensor " NAME ": its entry is not an object", file->path, key);
        name_bytes += (int64_t)strlen(key) + 1;
        count++;
    }
    EPMOEI_CHECK(epmoei_alloc_for((void **)&file->names, name_bytes, file->path));
    EPMOEI_CHECK(epmoei_alloc_for((void **)&file->tensors, count * (int64_t)sizeof *file->tensors, file->path));
    EPMOEI_CHECK(
        epmoei_alloc_for((void **)&file->by_name.tensors, count * (int64_t)sizeof *file->by_name.tensors, file->path));
    char *name = file->names;
    json_object_foreach(header, key, entry)
    {
        if (!strcmp(key, "__metadata__")) continue;
        epmoei_tensor_t *tensor = &file->tensors[file->count];
        size_t length = strlen(key) + 1;
        memcpy(name, key, length);
        *tensor = (epmoei_tensor_t){.name = name, .path = file->path};
        name += length;
        int32_t bits = 0;
        EPMOEI_CHECK(read_dtype(entry, tensor, &bits));
        EPMOEI_CHECK(read_shape(entry, bits, tensor));
        EPMOEI_CHECK(read_offsets(file, entry, tensor));
        file->by_name.tensors[file->count++] = tensor;
    }
    EPMOEI_CHECK(check_coverage(file));
    file->by_name.count = file->count;
    epmoei_tensor_index_sort(&file->by_name);
    return EPMOE_OK;
}

/* The header's text is read, not mapped, so that a bad disk is a status and not a signal. */
static epmoe_status_t read_header(int fd, const char *path, int64_t file_bytes, json_t **header, int64_t *header_bytes)
{
    unsigned char prefix[LENGTH_BYTES];
    if (file_bytes < LENGTH_BYTES)
        return epmoei_fail(EPMOE_ERROR_FORMAT,
                           "%s: the file has %lld bytes: expected at least the %d of the header "
                           "length",
                           path, (long long)file_bytes, LENGTH_BYTES);
    EPMOEI_CHECK(epmoei_file_read(fd, path, 0, prefix, LENGTH_BYTES));
    uint64_t length = 0;
    for (int i = LENGTH_BYTES - 1; i >= 0; i--) length = length << 8 | prefix[i];
    if (length > (uint64_t)(file_bytes - LENGTH_BYTES))
        return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: the header length is %llu, but only %lld bytes follow", path,
                           (unsigned long long)length, (long long)(file_bytes - LENGTH_BYTES));
    if (length > MAX_HEADER_BYTES)
        return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: the header length is %llu: expected at most %d", path,
                           (unsigned long long)length, MAX_HEADER_BYTES);
    *header_bytes = (int64_t)length;
    char *text = NULL;
    epmoe_status_t status = EPMOE_OK;
    EPMOEI_CHECK(epmoei_alloc_for((void **)&text, *header_bytes, path));
    EPMOEI_CHECK_GOTO(epmoei_file_read(fd, path, LENGTH_BYTES, text, *header_bytes), done);
    if (length == 0 || text[0] != '{') {
        status = epmoei_fail(EPMOE_ERROR_FORMAT, "%s: the header does not begin with {", path);
        goto done;
    }
    EPMOEI_CHECK_GOTO(epmoei_json_parse(text, *header_bytes, path, header), done);
done:
    epmoei_free(text);
    return status;
}

epmoe_status_t epmoei_safetensors_open(const char *path, epmoei_safetensors_t **result)
{
    epmoe_status_t status = EPMOE_OK;
    epmoei_safetensors_t *file = NULL;
    json_t *header = NULL;
    int fd = -1;
    int64_t file_bytes = 0, header_bytes = 0;
    EPMOEI_CHECK_GOTO(epmoei_file_open(path, &fd, &file_bytes), fail);
    EPMOEI_CHECK_GOTO(read_header(fd, path, file_bytes, &header, &header_bytes), fail);

    EPMOEI_CHECK_GOTO(epmoei_alloc_for((void **)&file, sizeof *file, path), fail);
    memset(file, 0, sizeof *file);
    EPMOEI_CHECK_GOTO(epmoei_alloc_for((void **)&file->path, (int64_t)strlen(path) + 1, path), fail);
    strcpy(file->path, path);
    void *mapping = mmap(NULL, (size_t)file_bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    if (mapping == MAP_FAILED) {
        status = epmoei_fail(errno == ENOMEM ? EPMOE_ERROR_OUT_OF_MEMORY : EPMOE_ERROR_IO,
                             "%s: %lld bytes cannot be mapped: %s", path, (long long)file_bytes, strerror(errno));
        goto fail;
    }
    file->mapping = mapping;
    file->file_bytes = file_bytes;
    file->data = file->mapping + LENGTH_BYTES + header_bytes;
    file->data_bytes = file_bytes - LENGTH_BYTES - header_bytes;
    EPMOEI_CHECK_GOTO(read_tensors(file, header), fail);
    json_decref(header);
    close(fd);
    *result = file;
    return EPMOE_OK;

fail:
    json_decref(header);
    if (fd >= 0) close(fd);
    epmoei_safetensors_close(file);
    return status;
}

void epmoei_safetensors_close(epmoei_safetensors_t *file)
{
    if (!file) return;
    if (file->mapping) munmap(file->mapping, (size_t)file->file_bytes);
    epmoei_free(file->by_name.tensors);
    epmoei_free(file->tensors);
    epmoei_free(file->names);
    epmoei_free(file->path);
    epmoei_free(file);
}

int64_t epmoei_safetensors_count(const epmoei_safetensors_t *file) { return file->count; }

const epmoei_tensor_t *epmoei_safetensors_at(const epmoei_safetensors_t *file, int64_t i) { return &file->tensors[i]; }

const epmoei_tensor_t *epmoei_safetensors_find(const epmoei_safetensors_t *file, const char *name)
{
    return epmoei_tensor_index_find(&file->by_name, name);
}

const char *epmoei_safetensors_path(const epmoei_safetensors_t *file) { return file->path; }
