#include "tests/checkcuda/check.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

/* Bytes of guard band that travel to the device on either side of the data; testing_buffer's are at least as long. */
enum { kGuard = 1024, kRepeats = 20, kFewRepeats = 3, kSmallBytes = 1 << 20, kMaxReports = 5, kFillPeriod = 262139 };

epmoe_stream_t check_stream;
bool check_small;

static const char *group_entry, *group_name;
static int32_t group_cases, group_failures, total_failures;
static double group_start;

void check_begin(const char *entry, const char *group)
{
    group_entry = entry, group_name = group;
    group_cases = group_failures = 0;
    group_start = epmoei_now_seconds();
}

void check_end(void)
{
    printf("%-4s  %-14s %-44s %5d cases  %6.2f s\n", group_failures ? "FAIL" : "ok", group_entry, group_name,
           group_cases, epmoei_now_seconds() - group_start);
    fflush(stdout);
    total_failures += group_failures;
}

void check_fail(const check_case_t *c, const char *format, ...)
{
    if (group_failures++ >= kMaxReports) return;
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    printf("      %s, %s%s%s: %s\n", group_entry, group_name, c ? ", " : "", c ? c->label : "", text);
}

int check_exit_code(void) { return total_failures ? 1 : 0; }

void check_case(check_case_t *c, const check_op_t *op, const char *label_format, ...)
{
    memset(c, 0, sizeof *c);
    c->op = op;
    c->tolerance = 4e-6;
    memcpy(c->args, &op->args_size, sizeof op->args_size);
    va_list args;
    va_start(args, label_format);
    vsnprintf(c->label, sizeof c->label, label_format, args);
    va_end(args);
    group_cases++;
}

static char *device_alloc(int64_t bytes)
{
    void *data;
    if (epmoei_memory_alloc(EPMOE_BACKEND_CUDA, &data, bytes, "a check") != EPMOE_OK) {
        printf("%s\n", epmoe_last_error());
        exit(1);
    }
    return data;
}

void *check_add(check_case_t *c, const char *name, size_t offset, check_kind_t kind, epmoe_dtype_t dtype, int64_t rows,
                int64_t cols, int32_t alignment)
{
    if (c->num_fields == CHECK_MAX_FIELDS) {
        printf("more than CHECK_MAX_FIELDS fields\n");
        exit(1);
    }
    check_field_t *field = &c->fields[c->num_fields++];
    *field = (check_field_t){.name = name,
                             .offset = offset,
                             .kind = kind,
                             .dtype = dtype,
                             .rows = rows,
                             .cols = cols,
                             .alignment = alignment,
                             .bytes = rows * cols * epmoe_dtype_size(dtype)};
    if (field->bytes == 0) return NULL;
    field->host = testing_buffer(field->bytes, 0);
    if (kind == CHECK_OUT || kind == CHECK_INOUT) {
        field->expected = testing_buffer(field->bytes, 0);
        field->got = testing_buffer(field->bytes, 0);
    }
    field->device = device_alloc(field->bytes + 2 * kGuard) + kGuard;
    return field->host;
}

check_field_t *check_find(check_case_t *c, const char *name)
{
    for (int32_t i = 0; i < c->num_fields; i++)
        if (!strcmp(c->fields[i].name, name)) return &c->fields[i];
    printf("no field %s\n", name);
    exit(1);
}

void check_free(check_case_t *c)
{
    for (int32_t i = 0; i < c->num_fields; i++) {
        check_field_t *field = &c->fields[i];
        if (!field->host) continue;
        testing_buffer_free(field->host);
        testing_buffer_free(field->expected);
        testing_buffer_free(field->got);
        epmoei_memory_free(EPMOE_BACKEND_CUDA, field->device - kGuard);
    }
    c->num_fields = 0;
}

void check_fill_normal(testing_rng_t *rng, void *data, epmoe_dtype_t dtype, int64_t n, float scale)
{
    int64_t size = epmoe_dtype_size(dtype), drawn = epmoei_min64(n, kFillPeriod);
    testing_fill_normal(rng, data, dtype, drawn, scale);
    for (int64_t at = drawn; at < n; at += drawn)
        memcpy((char *)data + at * size, data, (size_t)(epmoei_min64(drawn, n - at) * size));
}

static void set_pointer(check_case_t *c, const check_field_t *field, void *pointer)
{
    memcpy(c->args + field->offset, &pointer, sizeof pointer);
    if (field->kind == CHECK_INOUT && c->alias_offset) memcpy(c->args + c->alias_offset, &pointer, sizeof pointer);
}

static void set_backend(check_case_t *c, epmoe_backend_t backend)
{
    memcpy(c->args + sizeof(size_t), &backend, sizeof backend);
}

static bool is_output(const check_field_t *field) { return field->kind == CHECK_OUT || field->kind == CHECK_INOUT; }

bool check_expect(check_case_t *c)
{
    for (int32_t i = 0; i < c->num_fields; i++) {
        check_field_t *field = &c->fields[i];
        if (is_output(field) && field->host) memcpy(field->expected, field->host, (size_t)field->bytes);
        set_pointer(c, field, is_output(field) ? field->expected : field->kind == CHECK_IN ? field->host : NULL);
    }
    set_backend(c, EPMOE_BACKEND_CPU);
    epmoe_status_t status = c->op->reference(c->args);
    if (status != EPMOE_OK) check_fail(c, "the reference gave status %d: %s", (int)status, epmoe_last_error());
    return status == EPMOE_OK;
}

static void must(epmoe_status_t status)
{
    if (status == EPMOE_OK) return;
    printf("%s\n", epmoe_last_error());
    exit(1);
}

/* The whole image: guard, data, guard. */
void check_send(check_field_t *field, const char *data)
{
    field->sent = data;
    must(epmoei_memory_copy(EPMOE_BACKEND_CUDA, field->device - kGuard, data - kGuard, field->bytes + 2 * kGuard,
                            check_stream));
}

static void upload_outputs(check_case_t *c)
{
    for (int32_t i = 0; i < c->num_fields; i++)
        if (is_output(&c->fields[i]) && c->fields[i].host) check_send(&c->fields[i], c->fields[i].host);
}

void check_upload(check_case_t *c)
{
    for (int32_t i = 0; i < c->num_fields; i++)
        if (c->fields[i].host) check_send(&c->fields[i], c->fields[i].host);
    must(epmoei_stream_wait(EPMOE_BACKEND_CUDA, check_stream));
}

epmoe_status_t check_launch(check_case_t *c)
{
    for (int32_t i = 0; i < c->num_fields; i++) set_pointer(c, &c->fields[i], c->fields[i].device);
    set_backend(c, EPMOE_BACKEND_CUDA);
    return c->op->run(c->args, check_stream);
}

static bool guards_poisoned(const char *data, int64_t bytes)
{
    return testing_is_poison(data, -kGuard, kGuard) && testing_is_poison(data, bytes, kGuard);
}

/* One field with its guards. */
static bool fetch(check_case_t *c, const check_field_t *field, char *image)
{
    must(epmoei_memory_copy(EPMOE_BACKEND_CUDA, image - kGuard, field->device - kGuard, field->bytes + 2 * kGuard,
                            check_stream));
    must(epmoei_stream_wait(EPMOE_BACKEND_CUDA, check_stream));
    if (guards_poisoned(image, field->bytes)) return true;
    check_fail(c, "a guard band of %s was written", field->name);
    return false;
}

static bool download_outputs(check_case_t *c)
{
    epmoe_status_t status = epmoei_stream_wait(EPMOE_BACKEND_CUDA, check_stream);
    if (status != EPMOE_OK) {
        check_fail(c, "%s", epmoe_last_error());
        exit(1); /* the device is unusable after a fault */
    }
    bool ok = true;
    for (int32_t i = 0; i < c->num_fields; i++)
        if (is_output(&c->fields[i]) && c->fields[i].host) ok = fetch(c, &c->fields[i], c->fields[i].got) && ok;
    return ok;
}

static bool inputs_unchanged(check_case_t *c)
{
    bool ok = true;
    for (int32_t i = 0; i < c->num_fields; i++) {
        const check_field_t *field = &c->fields[i];
        if (!field->host || is_output(field)) continue;
        char *memory = malloc((size_t)field->bytes + 2 * kGuard), *image = memory + kGuard;
        if (!memory) abort();
        ok = fetch(c, field, image) && ok;
        if (field->kind == CHECK_IN && memcmp(image, field->sent, (size_t)field->bytes)) {
            check_fail(c, "the input %s was written", field->name);
            ok = false;
        }
        free(memory);
    }
    return ok;
}

bool check_download(check_case_t *c)
{
    bool outputs = download_outputs(c), inputs = inputs_unchanged(c);
    return outputs && inputs;
}

/* One ulp of a 16-bit result, whose rounding may fall the other way. */
static double dtype_tolerance(epmoe_dtype_t dtype)
{
    return dtype == EPMOE_BF16 ? 0x1p-7 : dtype == EPMOE_F16 ? 0x1p-10 : 0;
}

static double expected_rms(const check_field_t *field, int64_t first, int64_t count)
{
    double squares = 0;
    int64_t finite = 0;
    for (int64_t i = first; i < first + count; i++) {
        double value = (double)epmoei_load(field->expected, field->dtype, i);
        if (isfinite(value)) squares += value * value, finite++;
    }
    return finite ? sqrt(squares / (double)finite) : 0;
}

static bool compare_floats(check_case_t *c, const check_field_t *field)
{
    enum { kFewCols = 16 };
    double tolerance = c->tolerance + dtype_tolerance(field->dtype);
    /* Terms may cancel in all of a short row, whose rms then says nothing of their size. */
    double all_rms = field->cols < kFewCols ? expected_rms(field, 0, field->rows * field->cols) : 0;
    for (int64_t row = 0; row < field->rows; row++) {
        double rms = fmax(all_rms, expected_rms(field, row * field->cols, field->cols));
        for (int64_t col = 0; col < field->cols; col++) {
            int64_t at = row * field->cols + col;
            double expected = (double)epmoei_load(field->expected, field->dtype, at);
            double got = (double)epmoei_load(field->got, field->dtype, at);
            bool ok = isnan(expected)   ? isnan(got)
                      : isinf(expected) ? got == expected
                                        : fabs(got - expected) <= tolerance * (fabs(expected) + rms);
            if (ok) continue;
            check_fail(c, "%s[%lld,%lld] is %.9g, expected %.9g (row rms %.3g, tolerance %.3g)", field->name,
                       (long long)row, (long long)col, got, expected, rms, tolerance);
            return false;
        }
    }
    return true;
}

static bool compare_bytes(check_case_t *c, const check_field_t *field)
{
    int64_t size = epmoe_dtype_size(field->dtype);
    for (int64_t i = 0; i < field->rows * field->cols; i++) {
        if (!memcmp(field->got + i * size, field->expected + i * size, (size_t)size)) continue;
        int32_t got = 0, expected = 0;
        memcpy(&got, field->got + i * size, (size_t)epmoei_min64(size, 4));
        memcpy(&expected, field->expected + i * size, (size_t)epmoei_min64(size, 4));
        check_fail(c, "%s[%lld,%lld] is %d, expected %d", field->name, (long long)(i / field->cols),
                   (long long)(i % field->cols), got, expected);
        return false;
    }
    return true;
}

bool check_compare_bits(check_case_t *c, const check_field_t *field)
{
    int64_t size = epmoe_dtype_size(field->dtype);
    for (int64_t i = 0; i < field->rows * field->cols; i++) {
        if (!memcmp(field->got + i * size, field->expected + i * size, (size_t)size)) continue;
        double expected = 0, got = 0;
        if (epmoei_dtype_is_float(field->dtype)) {
            expected = (double)epmoei_load(field->expected, field->dtype, i);
            got = (double)epmoei_load(field->got, field->dtype, i);
            if (isnan(expected) && isnan(got)) continue;
        } else {
            expected = (unsigned char)field->expected[i * size];
            got = (unsigned char)field->got[i * size];
        }
        check_fail(c, "%s[%lld,%lld] is %.9g, expected the bits of %.9g", field->name, (long long)(i / field->cols),
                   (long long)(i % field->cols), got, expected);
        break;
    }
    return true;
}

bool check_outputs(check_case_t *c)
{
    bool ok = true;
    for (int32_t i = 0; i < c->num_fields; i++) {
        check_field_t *field = &c->fields[i];
        if (!is_output(field) || !field->host) continue;
        if (!memcmp(field->got, field->expected, (size_t)field->bytes)) continue;
        if (c->compare && c->compare(c, field)) continue;
        ok = (epmoei_dtype_is_float(field->dtype) ? compare_floats(c, field) : compare_bytes(c, field)) && ok;
    }
    return ok;
}

static bool launch_ok(check_case_t *c)
{
    epmoe_status_t status = check_launch(c);
    if (status != EPMOE_OK) check_fail(c, "status %d: %s", (int)status, epmoe_last_error());
    return status == EPMOE_OK;
}

bool check_run(check_case_t *c)
{
    if (!check_expect(c)) return false;
    check_upload(c);
    if (!launch_ok(c) || !check_download(c) || !check_outputs(c)) return false;

    /* expected becomes what the first run gave. */
    int64_t bytes = 0;
    for (int32_t i = 0; i < c->num_fields; i++)
        if (is_output(&c->fields[i]) && c->fields[i].host) {
            memcpy(c->fields[i].expected, c->fields[i].got, (size_t)c->fields[i].bytes);
            bytes += c->fields[i].bytes;
        }
    int32_t runs = check_small ? 2 : bytes <= kSmallBytes ? kRepeats : kFewRepeats;
    for (int32_t repeat = 1; repeat < runs; repeat++) {
        upload_outputs(c);
        if (!launch_ok(c)) return false;
        if (!(repeat + 1 < runs ? download_outputs(c) : check_download(c))) return false;
        for (int32_t i = 0; i < c->num_fields; i++) {
            check_field_t *field = &c->fields[i];
            if (!is_output(field) || !field->host) continue;
            if (!memcmp(field->got, field->expected, (size_t)field->bytes)) continue;
            check_fail(c, "%s differs in repeat %d", field->name, repeat);
            return false;
        }
    }
    return true;
}
