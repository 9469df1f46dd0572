#include "tests/gpu_testing.h"

#include <stdlib.h>

enum { kGuardBytes = 4096, kMaxBuffers = 256 };

static struct {
    char *data;
    void *start;
    int64_t bytes;
} buffers[kMaxBuffers];

static void must(epmoe_status_t status, const char *what)
{
    if (status == EPMOE_OK) return;
    fprintf(stderr, "%s: %s: %s\n", what, epmoe_status_string(status), epmoe_last_error());
    abort();
}

epmoe_stream_t gpu_stream(void)
{
    static epmoe_stream_t stream;
    if (!stream) must(epmoei_stream_create(&stream), "stream");
    return stream;
}

bool gpu_wait(void)
{
    epmoe_status_t status = epmoei_stream_wait(EPMOE_BACKEND_CUDA, gpu_stream());
    if (status != EPMOE_OK) fprintf(stderr, "the stream failed: %s\n", epmoe_last_error());
    return status == EPMOE_OK;
}

static void copy(void *dst, const void *src, int64_t bytes, const char *what)
{
    must(epmoei_memory_copy(EPMOE_BACKEND_CUDA, dst, src, bytes, gpu_stream()), what);
    must(epmoei_stream_wait(EPMOE_BACKEND_CUDA, gpu_stream()), what);
}

void gpu_put(void *device, const void *host, int64_t bytes) { copy(device, host, bytes, "copy to the device"); }
void gpu_get(void *host, const void *device, int64_t bytes) { copy(host, device, bytes, "copy from the device"); }

void *gpu_get_new(const void *device, int64_t bytes)
{
    void *host = malloc((size_t)bytes + 1);
    if (!host) abort();
    gpu_get(host, device, bytes);
    return host;
}

void gpu_repeat(void *device, int64_t done, int64_t bytes)
{
    for (; done < bytes; done *= 2)
        must(epmoei_memory_copy(EPMOE_BACKEND_CUDA, (char *)device + done, device, epmoei_min64(done, bytes - done),
                                gpu_stream()),
             "copy on the device");
    must(epmoei_stream_wait(EPMOE_BACKEND_CUDA, gpu_stream()), "copy on the device");
}

/* Poison of testing.h: byte i counted from the data's start. */
static unsigned char poison_at(int64_t i) { return (i & 3) == 0 || (i & 3) == 2 ? 0xFF : 0x7F; }

static int find(const void *data)
{
    for (int i = 0; i < kMaxBuffers; i++)
        if (buffers[i].start && buffers[i].data == data) return i;
    fprintf(stderr, "%p is no buffer\n", data);
    abort();
}

/* [first, first+bytes) counted from data. */
static void fill_poison(char *data, int64_t first, int64_t bytes)
{
    enum { kPiece = 1 << 20 };
    int64_t piece = epmoei_min64(bytes, kPiece);
    unsigned char *host = malloc((size_t)piece + 1);
    if (!host) abort();
    for (int64_t i = 0; i < piece; i++) host[i] = poison_at(first + i);
    if (piece > 0) gpu_put(data + first, host, piece);
    free(host);
    if (bytes > piece) gpu_repeat(data + first, piece, bytes); /* a piece is a multiple of the pattern */
}

void *gpu_buffer(int64_t bytes, int32_t offset)
{
    int at = 0;
    while (at < kMaxBuffers && buffers[at].start) at++;
    if (at == kMaxBuffers) abort();
    must(epmoei_memory_alloc(EPMOE_BACKEND_CUDA, &buffers[at].start, bytes + offset + 2 * kGuardBytes, "a test buffer"),
         "device memory");
    buffers[at].data = (char *)buffers[at].start + kGuardBytes + offset;
    buffers[at].bytes = bytes;
    fill_poison(buffers[at].data, -kGuardBytes, bytes + 2 * kGuardBytes);
    return buffers[at].data;
}

void *gpu_copy_of(const void *data, int64_t bytes)
{
    if (!data) return NULL;
    void *device = gpu_buffer(bytes, 0);
    gpu_put(device, data, bytes);
    return device;
}

void gpu_buffer_free(void *data)
{
    if (!data) return;
    int at = find(data);
    epmoei_memory_free(EPMOE_BACKEND_CUDA, buffers[at].start);
    buffers[at].start = NULL;
}

void gpu_poison(void *device, int64_t bytes) { fill_poison(device, 0, bytes); }

static bool poison_between(const char *data, int64_t first, int64_t bytes)
{
    enum { kPiece = 1 << 22 };
    unsigned char *host = malloc((size_t)epmoei_min64(bytes, kPiece) + 1);
    bool intact = true;
    if (!host) abort();
    for (int64_t done = 0; done < bytes && intact; done += kPiece) {
        int64_t piece = epmoei_min64(kPiece, bytes - done);
        gpu_get(host, data + first + done, piece);
        for (int64_t i = 0; i < piece && intact; i++) intact = host[i] == poison_at(first + done + i);
    }
    free(host);
    return intact;
}

bool gpu_is_poison(const void *data, int64_t first, int64_t bytes) { return poison_between(data, first, bytes); }

bool gpu_guards_intact(const void *data)
{
    int at = find(data);
    bool before = poison_between(data, -kGuardBytes, kGuardBytes);
    bool after = poison_between(data, buffers[at].bytes, kGuardBytes);
    if (!before || !after)
        fprintf(stderr, "the guard band %s a device buffer of %lld bytes changed\n", before ? "after" : "before",
                (long long)buffers[at].bytes);
    return before && after;
}

bool gpu_same(const char *what, const void *got, const void *expected, int64_t elements, int32_t size, int64_t cols)
{
    if (!memcmp(got, expected, (size_t)(elements * size))) return true;
    int64_t first = 0, count = 0;
    for (int64_t i = elements - 1; i >= 0; i--)
        if (memcmp((const char *)got + i * size, (const char *)expected + i * size, (size_t)size)) first = i, count++;
    const unsigned char *g = (const unsigned char *)got + first * size,
                        *e = (const unsigned char *)expected + first * size;
    fprintf(stderr, "%s: %lld of %lld elements differ, first at row %lld column %lld: got 0x", what, (long long)count,
            (long long)elements, (long long)(first / cols), (long long)(first % cols));
    for (int32_t i = size - 1; i >= 0; i--) fprintf(stderr, "%02x", g[i]);
    fprintf(stderr, ", expected 0x");
    for (int32_t i = size - 1; i >= 0; i--) fprintf(stderr, "%02x", e[i]);
    fprintf(stderr, "\n");
    return false;
}
