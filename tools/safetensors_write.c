#include "tools/safetensors_write.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* The format's own spelling of a dtype, NULL for one that it does not have. */
static const char *format_dtype(epmoe_dtype_t dtype)
{
    switch (dtype) {
    case EPMOE_F32: return "F32";
    case EPMOE_BF16: return "BF16";
    case EPMOE_F16: return "F16";
    case EPMOE_F8_E4M3: return "F8_E4M3";
    case EPMOE_F8_E8M0: return "F8_E8M0";
    case EPMOE_U8: return "U8";
    case EPMOE_I32: return "I32";
    case EPMOE_I64: return "I64";
    default: return NULL;
    }
}

static int64_t output_bytes(const safetensors_output_t *tensor)
{
    int64_t bytes = epmoe_dtype_size(tensor->dtype);
    for (int32_t i = 0; i < tensor->num_dims; i++) bytes *= tensor->shape[i];
    return bytes;
}

static json_t *header_entry(const safetensors_output_t *tensor, int64_t first)
{
    json_t *shape = json_array();
    for (int32_t i = 0; i < tensor->num_dims; i++) json_array_append_new(shape, json_integer(tensor->shape[i]));
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", format_dtype(tensor->dtype), "shape", shape, "data_offsets",
                     (json_int_t)first, (json_int_t)(first + output_bytes(tensor)));
}

/* The header's text padded with spaces to a multiple of 8 bytes, and the order of the data. Freed by the caller. */
static char *make_header(const safetensors_output_t *tensors, int32_t count, int32_t *order, size_t *length)
{
    json_t *header = json_object();
    int64_t offset = 0;
    int32_t placed = 0;
    bool ok = header != NULL;
    for (int32_t width = 8; width >= 1; width /= 2)
        for (int32_t i = 0; i < count && ok; i++) {
            if (epmoe_dtype_size(tensors[i].dtype) != width) continue;
            ok = !json_object_set_new(header, tensors[i].name, header_entry(&tensors[i], offset));
            offset += output_bytes(&tensors[i]);
            order[placed++] = i;
        }
    char *text = ok ? json_dumps(header, JSON_COMPACT) : NULL;
    json_decref(header);
    if (!text) return NULL;
    size_t used = strlen(text);
    *length = (used + 7) / 8 * 8;
    char *padded = realloc(text, *length + 1);
    if (!padded) {
        free(text);
        return NULL;
    }
    memset(padded + used, ' ', *length - used);
    return padded;
}

static bool write_all(FILE *file, const char *header, size_t length, const safetensors_output_t *tensors,
                      const int32_t *order, int32_t count)
{
    unsigned char size[8];
    for (int i = 0; i < 8; i++) size[i] = (unsigned char)((uint64_t)length >> (8 * i));
    if (fwrite(size, 1, 8, file) != 8 || fwrite(header, 1, length, file) != length) return false;
    for (int32_t i = 0; i < count; i++) {
        const safetensors_output_t *tensor = &tensors[order[i]];
        size_t bytes = (size_t)output_bytes(tensor);
        if (bytes && fwrite(tensor->data, 1, bytes, file) != bytes) return false;
    }
    return true;
}

epmoe_status_t safetensors_write(const char *path, const safetensors_output_t *tensors, int32_t count)
{
    epmoe_status_t status = EPMOE_OK;
    for (int32_t i = 0; i < count; i++)
        if (!tensors[i].name || !format_dtype(tensors[i].dtype))
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "output %d has no name, or dtype %s", i,
                               epmoe_dtype_string(tensors[i].dtype));

    size_t length = 0;
    FILE *file = NULL;
    int fd = -1;
    bool written = false;
    char *header = NULL, *temporary = NULL;
    int32_t *order = malloc((size_t)(count + 1) * sizeof *order);
    if (order) header = make_header(tensors, count, order, &length);
    if (!header || asprintf(&temporary, "%s.XXXXXX", path) < 0) {
        temporary = NULL;
        status = epmoei_fail(EPMOE_ERROR_OUT_OF_MEMORY, "no memory for the header of %s", path);
        goto end;
    }
    fd = mkstemp(temporary);
    if (fd < 0) {
        status = epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s cannot be created: %s", path, strerror(errno));
        goto end;
    }
    /* mkstemp's file is the owner's alone; this one is to be like any other. */
    mode_t mask = umask(0);
    umask(mask);
    file = fchmod(fd, 0666 & ~mask) ? NULL : fdopen(fd, "wb");
    written = file && write_all(file, header, length, tensors, order, count);
    int closed = file ? fclose(file) : close(fd);
    if (!written || closed || rename(temporary, path)) {
        status = epmoei_fail(EPMOE_ERROR_IO, "%s cannot be written: %s", path, strerror(errno));
        unlink(temporary);
    }
end:
    free(temporary);
    free(header);
    free(order);
    return status;
}
