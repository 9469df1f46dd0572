#include "bench/buffer.h"

#include "base/device.h"

#include <string.h>

#define GUARD_BYTES 4096
#define POISON      0xFF

epmoe_status_t buffer_create(buffer_t *buffer, epmoe_backend_t backend, int64_t bytes, const char *what)
{
    *buffer = (buffer_t){.backend = backend, .bytes = bytes};
    EPMOEI_CHECK(epmoei_alloc_for((void **)&buffer->host_base, bytes + 2 * GUARD_BYTES, what));
    buffer->run_base = buffer->host_base;
    buffer->host = buffer->run = buffer->host_base + GUARD_BYTES;
    memset(buffer->host_base, POISON, (size_t)(bytes + 2 * GUARD_BYTES));
    if (backend != EPMOE_BACKEND_CUDA) return EPMOE_OK;

    void *base;
    EPMOEI_CHECK(epmoei_memory_alloc(backend, &base, bytes + 2 * GUARD_BYTES, what));
    buffer->run_base = base;
    buffer->run = buffer->run_base + GUARD_BYTES;
    EPMOEI_CHECK(epmoei_memory_set(backend, base, POISON, bytes + 2 * GUARD_BYTES, NULL));
    return epmoei_stream_wait(backend, NULL);
}

void buffer_destroy(buffer_t *buffer)
{
    if (buffer->run_base != buffer->host_base) epmoei_memory_free(buffer->backend, buffer->run_base);
    epmoei_free(buffer->host_base);
    *buffer = (buffer_t){0};
}

epmoe_status_t buffer_upload(buffer_t *buffer)
{
    if (buffer->run == buffer->host) return EPMOE_OK;
    EPMOEI_CHECK(epmoei_memory_copy(buffer->backend, buffer->run, buffer->host, buffer->bytes, NULL));
    return epmoei_stream_wait(buffer->backend, NULL);
}

epmoe_status_t buffer_download(buffer_t *buffer)
{
    if (buffer->run == buffer->host) return EPMOE_OK;
    EPMOEI_CHECK(epmoei_memory_copy(buffer->backend, buffer->host_base, buffer->run_base, buffer_span(buffer), NULL));
    return epmoei_stream_wait(buffer->backend, NULL);
}

epmoe_status_t buffer_poison(buffer_t *buffer)
{
    if (!buffer->run) return EPMOE_OK;
    EPMOEI_CHECK(epmoei_memory_set(buffer->backend, buffer->run, POISON, buffer->bytes, NULL));
    return epmoei_stream_wait(buffer->backend, NULL);
}

int64_t buffer_span(const buffer_t *buffer) { return buffer->bytes + 2 * GUARD_BYTES; }

int64_t buffer_guards_changed(const buffer_t *buffer)
{
    if (!buffer->host_base) return 0;
    const unsigned char *before = (const unsigned char *)buffer->host_base;
    const unsigned char *after = (const unsigned char *)buffer->host + buffer->bytes;
    int64_t changed = 0;
    for (int32_t i = 0; i < GUARD_BYTES; i++) changed += (before[i] != POISON) + (after[i] != POISON);
    return changed;
}
