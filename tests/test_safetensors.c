#include "base/dtype.h"
#include "moe/safetensors.h"
#include "tests/safetensors_build.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static char dir[256];
static char path[300];

static void make_dir(void)
{
    build_make_dir(dir);
    snprintf(path, sizeof path, "%s/a.safetensors", dir);
}

static void remove_dir(void)
{
    build_remove_dir(dir);
    cr_assert_eq(epmoei_alloc_live(), 0, "%lld allocations are left", (long long)epmoei_alloc_live());
}

TestSuite(safetensors, .init = make_dir, .fini = remove_dir);

static void expect_fail(epmoe_status_t status, const char *what, const char *also)
{
    epmoei_safetensors_t *untouched = (epmoei_safetensors_t *)&dir, *file = untouched;
    epmoe_status_t got = epmoei_safetensors_open(path, &file);
    const char *message = epmoe_last_error();
    cr_assert_eq(got, status, "%s: got %s (%s)", what, epmoe_status_string(got), message);
    cr_assert_eq(file, untouched, "%s: the result was written", what);
    cr_assert(strstr(message, path), "%s: no file in \"%s\"", what, message);
    cr_assert(strstr(message, what), "\"%s\" is not in \"%s\"", what, message);
    cr_assert(strstr(message, also), "\"%s\" is not in \"%s\"", also, message);
}

static epmoei_safetensors_t *expect_open(void)
{
    epmoei_safetensors_t *file = NULL;
    epmoe_status_t status = epmoei_safetensors_open(path, &file);
    cr_assert_eq(status, EPMOE_OK, "%s", epmoe_last_error());
    return file;
}

Test(safetensors, reads_what_was_written)
{
    build_file_t build = {0};
    const float floats[] = {1.5f, -2.0f, 3.25f, 0.0f, 1e30f, -0.5f};
    const int64_t shape[] = {2, 3}, empty[] = {4, 0, 7}, scalar[] = {0};
    build_add(&build, "z.floats", "F32", shape, 2, floats, sizeof floats);
    build_add(&build, "empty", "BF16", empty, 3, NULL, 0);
    build_add(&build, "scalar", "I64", scalar, 0, "\1\0\0\0\0\0\0\0", 8);
    build_add(&build, "bools", "BOOL", shape, 2, "\1\0\1\0\1\1", 6);
    build_add(&build, "doubles", "F64", shape, 2, NULL, 48);
    build_add(&build, "e5m2", "F8_E5M2", shape, 2, NULL, 6);
    build_add(&build, "scale", "F8_E8M0", shape, 2, NULL, 6);
    build_add(&build, "nibbles", "F4", shape, 2, NULL, 3);
    build_save(&build, dir, "a.safetensors");
    build_free(&build);
    epmoei_safetensors_t *file = expect_open();
    cr_assert_eq(epmoei_safetensors_count(file), 8);
    cr_assert_str_eq(epmoei_safetensors_path(file), path);
    cr_assert_str_eq(epmoei_safetensors_at(file, 0)->name, "z.floats");
    cr_assert_str_eq(epmoei_safetensors_at(file, 7)->name, "nibbles");
    cr_assert_null(epmoei_safetensors_find(file, "floats"));
    cr_assert_null(epmoei_safetensors_find(file, "zz"));
    cr_assert_null(epmoei_safetensors_find(file, "__metadata__"));

    const epmoei_tensor_t *tensor = epmoei_safetensors_find(file, "z.floats");
    cr_assert_eq(tensor, epmoei_safetensors_at(file, 0));
    cr_assert(tensor->dtype == EPMOE_F32 && !strcmp(tensor->dtype_name, "F32") && !strcmp(tensor->path, path));
    cr_assert(tensor->num_dims == 2 && tensor->shape[0] == 2 && tensor->shape[1] == 3);
    cr_assert(tensor->num_elements == 6 && tensor->bytes == 24);
    cr_assert_eq(memcmp(tensor->data, floats, sizeof floats), 0);
    tensor = epmoei_safetensors_find(file, "empty");
    cr_assert(tensor->num_dims == 3 && tensor->num_elements == 0 && tensor->bytes == 0 && tensor->shape[2] == 7);
    tensor = epmoei_safetensors_find(file, "scalar");
    cr_assert(tensor->num_dims == 0 && tensor->num_elements == 1 && tensor->dtype == EPMOE_I64);
    tensor = epmoei_safetensors_find(file, "bools");
    cr_assert(tensor->dtype == EPMOE_DTYPE_NONE && !strcmp(tensor->dtype_name, "BOOL") && tensor->bytes == 6);
    cr_assert_eq(memcmp(tensor->data, "\1\0\1\0\1\1", 6), 0);
    cr_assert_eq(epmoei_safetensors_find(file, "doubles")->dtype, EPMOE_DTYPE_NONE);
    cr_assert_eq(epmoei_safetensors_find(file, "e5m2")->bytes, 6);
    cr_assert_eq(epmoei_safetensors_find(file, "scale")->dtype, EPMOE_F8_E8M0);
    cr_assert_eq(epmoei_safetensors_find(file, "nibbles")->bytes, 3);
    epmoei_safetensors_close(file);
    epmoei_safetensors_close(NULL);
}

Test(safetensors, no_data_at_all)
{
    build_save_raw(path, -1, "{}", 0);
    epmoei_safetensors_t *file = expect_open();
    cr_assert_eq(epmoei_safetensors_count(file), 0);
    cr_assert_null(epmoei_safetensors_find(file, ""));
    epmoei_safetensors_close(file);
    build_save_raw(path, -1, "{\"a\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}}  ", 0);
    file = expect_open();
    cr_assert_eq(epmoei_safetensors_find(file, "a")->num_elements, 0);
    epmoei_safetensors_close(file);
}

/* The order of the header need not be that of the data. */
Test(safetensors, data_in_another_order)
{
    build_save_raw(path, -1,
                   "{\"a\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[5,8]},"
                   "\"none\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[5,5]},"
                   "\"b\":{\"dtype\":\"U8\",\"shape\":[5],\"data_offsets\":[0,5],\"extra\":1}}",
                   8);
    epmoei_safetensors_t *file = expect_open();
    const char *a = epmoei_safetensors_find(file, "a")->data, *b = epmoei_safetensors_find(file, "b")->data;
    cr_assert_eq(a - b, 5);
    cr_assert_str_eq(epmoei_safetensors_at(file, 0)->name, "a");
    epmoei_safetensors_close(file);
}

#define ENTRY(dtype, shape, offsets) "{\"dtype\":" dtype ",\"shape\":" shape ",\"data_offsets\":" offsets "}"

typedef struct reject_t {
    const char *header;
    int64_t data_bytes;
    const char *what; /* these two are in the message */
    const char *also;
} reject_t;

Test(safetensors, rejects)
{
    static const reject_t rejects[] = {
        {"", 0, "does not begin with {", ""},
        {" {}", 0, "does not begin with {", ""},
        {"[]", 0, "does not begin with {", ""},
        {"{", 0, "invalid JSON", "line 1"},
        {"{}x", 0, "invalid JSON", ""},
        {"{\"a\":1}", 0, "is not an object", "tensor a"},
        {"{\"a\\u0000b\":{}}", 0, "invalid JSON", ""},
        {"{\"\xff\":{}}", 0, "invalid JSON", ""},
        {"{\"__metadata__\":[]}", 0, "__metadata__ is not an object", ""},
        {"{\"__metadata__\":{\"count\":1}}", 0, "is not a string", "count"},
        {"{\"a.weight\":{}}", 0, "dtype is not a string", "a.weight"},
        {"{\"a\":" ENTRY("5", "[1]", "[0,4]") "}", 4, "dtype is not a string", "tensor a"},
        {"{\"a\":" ENTRY("\"F33\"", "[1]", "[0,4]") "}", 4, "dtype F33 is not known", "tensor a"},
        {"{\"a\":" ENTRY("\"f32\"", "[1]", "[0,4]") "}", 4, "dtype f32 is not known", "tensor a"},
        {"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, "shape is not an array", "tensor a"},
        {"{\"a\":" ENTRY("\"F32\"", "3", "[0,4]") "}", 4, "shape is not an array", "tensor a"},
        {"{\"a\":" ENTRY("\"F32\"", "[1.0]", "[0,4]") "}", 4, "shape[0] is not", "tensor a"},
        {"{\"a\":" ENTRY("\"F32\"", "[1,-1]", "[0,4]") "}", 4, "shape[1] is not", "tensor a"},
        {"{\"a\":" ENTRY("\"F32\"", "[\"1\"]", "[0,4]") "}", 4, "shape[0] is not", "tensor a"},
        {"{\"a\":" ENTRY("\"U8\"", "[1,1,1,1,1,1,1,1,1]", "[0,1]") "}", 1, "9 dimensions", "tensor a"},
        {"{\"a\":" ENTRY("\"U8\"", "[4294967296,4294967296]", "[0,0]") "}", 0, "overflows", "tensor a"},
        {"{\"a\":" ENTRY("\"F32\"", "[2305843009213693952]", "[0,0]") "}", 0, "overflows", "[2305843009213693952]"},
        {"{\"a\":" ENTRY("\"U8\"", "[4294967296,0,4294967296]", "[0,0]") "}", 0, "overflows", "tensor a"},
        {"{\"a\":" ENTRY("\"U8\"", "[99999999999999999999]", "[0,0]") "}", 0, "invalid JSON", ""},
        {"{\"a\":" ENTRY("\"F4\"", "[3]", "[0,1]") "}", 1, "not whole bytes", "tensor a"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "data_offsets is not", "tensor a"},
        {"{\"a\":" ENTRY("\"F32\"", "[1]", "[0]") "}", 4, "data_offsets is not", "tensor a"},
        {"{\"a\":" ENTRY("\"F32\"", "[1]", "[0,4,8]") "}", 4, "data_offsets is not", "tensor a"},
        {"{\"a\":" ENTRY("\"F32\"", "[1]", "[0,4.0]") "}", 4, "data_offsets is not", "tensor a"},
        {"{\"a\":" ENTRY("\"F32\"", "[1]", "[-4,0]") "}", 4, "[-4,0]", "tensor a"},
        {"{\"a\":" ENTRY("\"F32\"", "[1]", "[4,0]") "}", 4, "[4,0]", "tensor a"},
        {"{\"a\":" ENTRY("\"F32\"", "[2]", "[0,4]") "}", 4, "F32 [2] takes 8", "tensor a"},
        {"{\"a\":" ENTRY("\"F32\"", "[0]", "[0,4]") "}", 4, "F32 [0] takes 0", "tensor a"},
        {"{\"a\":" ENTRY("\"F32\"", "[1]", "[9223372036854775800,9223372036854775804]") "}", 4, "too short",
         "tensor a"},
        {"{\"a\":" ENTRY("\"F32\"", "[2]", "[0,8]") "}", 7, "too short", "tensor a"},
        {"{\"a\":" ENTRY("\"F32\"", "[1]", "[4,8]") "}", 8, "hole of 4 bytes", "tensor a"},
        {"{\"a\":" ENTRY("\"U8\"", "[2]", "[0,2]") ",\"b\":" ENTRY("\"U8\"", "[2]", "[3,5]") "}", 5, "hole of 1 bytes",
         "tensor b"},
        {"{\"a\":" ENTRY("\"U8\"", "[4]", "[0,4]") ",\"b\":" ENTRY("\"U8\"", "[4]", "[2,6]") "}", 6, "overlaps",
         "tensor a"},
        {"{\"a\":" ENTRY("\"U8\"", "[4]", "[0,4]") ",\"b\":" ENTRY("\"U8\"", "[4]", "[0,4]") "}", 4, "overlaps",
         "tensor b"},
        {"{\"a\":" ENTRY("\"U8\"", "[4]", "[0,4]") ",\"none\":" ENTRY("\"U8\"", "[0]", "[2,2]") "}", 4, "overlaps",
         "tensor none"},
        {"{\"a\":" ENTRY("\"U8\"", "[4]", "[0,4]") "}", 5, "1 trailing bytes", "a"},
        {"{}", 3, "3 trailing bytes", ""},
    };
    for (size_t i = 0; i < sizeof rejects / sizeof rejects[0]; i++) {
        build_save_raw(path, -1, rejects[i].header, rejects[i].data_bytes);
        expect_fail(EPMOE_ERROR_FORMAT, rejects[i].what, rejects[i].also);
    }
}

Test(safetensors, duplicate_names_are_named)
{
    static const char *const names[] = {"a", "model.layers.0.mlp.experts.117.gate_proj.weight", "with \\\"quotes\\\\"};
    for (int i = 0; i < 3; i++) {
        char header[1024];
        snprintf(header, sizeof header,
                 "{\"first\":" ENTRY("\"U8\"", "[0]", "[0,0]") ",\"%s\":" ENTRY(
                     "\"U8\"", "[1]", "[0,1]") ",\"%s\":" ENTRY("\"U8\"", "[1]", "[1,2]") "}",
                 names[i], names[i]);
        build_save_raw(path, -1, header, 2);
        expect_fail(EPMOE_ERROR_FORMAT, names[i], "twice");
    }
}

Test(safetensors, lying_header_lengths)
{
    build_save_data(path, "\1\0\0\0\0\0\0", 7);
    expect_fail(EPMOE_ERROR_FORMAT, "has 7 bytes", "header length");
    build_save_data(path, "", 0);
    expect_fail(EPMOE_ERROR_FORMAT, "has 0 bytes", "");
    build_save_raw(path, 3, "{}", 0);
    expect_fail(EPMOE_ERROR_FORMAT, "header length is 3", "only 2 bytes");
    build_save_raw(path, INT64_MIN, "{}", 0);
    expect_fail(EPMOE_ERROR_FORMAT, "header length is 9223372036854775808", "only 2 bytes");
    build_save_raw(path, INT64_MAX, "{}", 0);
    expect_fail(EPMOE_ERROR_FORMAT, "header length is 9223372036854775807", "only 2 bytes");
    /* A sparse file is long enough for any header. */
    build_save_raw(path, 100000001, "{}", 0);
    cr_assert_eq(truncate(path, 200000000), 0);
    expect_fail(EPMOE_ERROR_FORMAT, "header length is 100000001", "at most 100000000");
}

Test(safetensors, files_that_cannot_be_read)
{
    snprintf(path, sizeof path, "%s/none.safetensors", dir);
    expect_fail(EPMOE_ERROR_IO, "cannot be opened", "No such file");
    snprintf(path, sizeof path, "%s", dir);
    expect_fail(EPMOE_ERROR_IO, "is not a regular file", "");
    snprintf(path, sizeof path, "%s/fifo", dir);
    cr_assert_eq(mkfifo(path, 0600), 0);
    expect_fail(EPMOE_ERROR_IO, "is not a regular file", "");
}

/* Data that begins at byte 14063, and the tensors behind an odd number of bytes. */
Test(safetensors, nothing_is_aligned)
{
    build_file_t build = {.header_bytes = 14055};
    const unsigned char codes[3] = {0x38, 0x7E, 0xFF};
    const float scale[4] = {0.5f, 1.0f / 3.0f, -7.0f, 448.0f};
    const int64_t three[] = {3}, four[] = {4};
    build_add(&build, "codes", "F8_E4M3", three, 1, codes, 3);
    build_add(&build, "scale", "F32", four, 1, scale, 16);
    build_weight(&build, 8, 8, "w");
    build_save(&build, dir, "a.safetensors");
    build_free(&build);
    epmoei_safetensors_t *file = expect_open();
    const epmoei_tensor_t *tensor = epmoei_safetensors_find(file, "codes");
    cr_assert_eq(((uintptr_t)tensor->data - 14063) % 4096, 0);
    cr_assert_eq(memcmp(tensor->data, codes, 3), 0);
    tensor = epmoei_safetensors_find(file, "scale");
    for (int i = 0; i < 4; i++) cr_assert_eq(epmoei_load(tensor->data, EPMOE_F32, i), scale[i]);
    tensor = epmoei_safetensors_find(file, "w");
    cr_assert_neq((uintptr_t)tensor->data % 4, 0);
    for (int i = 0; i < 64; i++) cr_assert_eq(epmoei_load(tensor->data, EPMOE_BF16, i), build_value("w", i));
    epmoei_safetensors_close(file);
}

/* Opens the file; where that succeeds every byte that a tensor claims must be there. */
static epmoe_status_t open_and_touch(void)
{
    epmoei_safetensors_t *file = NULL;
    epmoe_status_t status = epmoei_safetensors_open(path, &file);
    if (status != EPMOE_OK) {
        cr_assert(strstr(epmoe_last_error(), path));
        return status;
    }
    volatile unsigned char sum = 0;
    for (int64_t i = 0; i < epmoei_safetensors_count(file); i++) {
        const epmoei_tensor_t *tensor = epmoei_safetensors_at(file, i);
        cr_assert_eq(epmoei_safetensors_find(file, tensor->name), tensor);
        for (int64_t j = 0; j < tensor->bytes; j++)
            sum = (unsigned char)(sum + ((const unsigned char *)tensor->data)[j]);
    }
    epmoei_safetensors_close(file);
    return EPMOE_OK;
}

static char *small_file(int64_t *bytes)
{
    build_file_t build = {0};
    const int64_t empty[] = {0, 3};
    build_weight(&build, 4, 2, "model.layers.0.mlp.gate.weight");
    build_weight(&build, 3, 0, "bias");
    build_add(&build, "none", "F32", empty, 2, NULL, 0);
    char *data = build_bytes(&build, bytes);
    build_free(&build);
    return data;
}

Test(safetensors, every_truncation_is_an_error)
{
    int64_t bytes;
    char *data = small_file(&bytes);
    for (int64_t i = 0; i < bytes; i++) {
        build_save_data(path, data, i);
        cr_assert_eq(open_and_touch(), EPMOE_ERROR_FORMAT, "cut at %lld", (long long)i);
    }
    build_save_data(path, data, bytes);
    cr_assert_eq(open_and_touch(), EPMOE_OK);
    free(data);
}

Test(safetensors, mutated_files_give_a_status)
{
    static const char pieces[] = "{}[]\",:0123456789-.eE\\u \0\xff";
    int64_t bytes;
    char *valid = small_file(&bytes), *data = malloc((size_t)bytes);
    testing_rng_t rng = testing_rng(20260730);
    int opened = 0, refused = 0;
    for (int round = 0; round < 6000; round++) {
        memcpy(data, valid, (size_t)bytes);
        int changes = testing_range(&rng, 1, 3);
        for (int i = 0; i < changes; i++) {
            int64_t at = testing_range(&rng, 0, (int32_t)bytes - 1);
            if (testing_next(&rng) & 1)
                data[at] = pieces[testing_next(&rng) % (sizeof pieces - 1)];
            else
                data[at] ^= (char)(1 << (testing_next(&rng) & 7));
        }
        build_save_data(path, data, bytes);
        if (open_and_touch() == EPMOE_OK)
            opened++;
        else
            refused++;
    }
    cr_assert(opened > 100 && refused > 1000, "%d opened, %d refused", opened, refused);
    free(valid);
    free(data);
}

/* Nesting as deep as the file is long. */
Test(safetensors, deep_nesting)
{
    const int64_t depth = 1000000;
    char *header = malloc((size_t)depth + 16);
    memcpy(header, "{\"a\":", 5);
    memset(header + 5, '[', (size_t)depth);
    header[5 + depth] = 0;
    build_save_raw(path, -1, header, 0);
    expect_fail(EPMOE_ERROR_FORMAT, "invalid JSON", "");
    free(header);
}

Test(safetensors, no_memory)
{
    int64_t bytes;
    char *data = small_file(&bytes);
    build_save_data(path, data, bytes);
    free(data);
    int64_t failed = 0;
    for (int64_t n = 1;; n++) {
        epmoei_safetensors_t *file = NULL;
        epmoei_alloc_fail_at(n);
        epmoe_status_t status = epmoei_safetensors_open(path, &file);
        epmoei_alloc_fail_at(0);
        if (status == EPMOE_OK) {
            epmoei_safetensors_close(file);
            break;
        }
        cr_assert_eq(status, EPMOE_ERROR_OUT_OF_MEMORY, "%s", epmoe_last_error());
        cr_assert_eq(epmoei_alloc_live(), 0);
        failed++;
    }
    cr_assert_geq(failed, 5);
}
