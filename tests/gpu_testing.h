/* Device memory for tests: poisoned buffers between guard bands, and copies that wait. Every test of a device begins
 * with GPU_TEST_NEEDS_DEVICE(), so that it is skipped, and said to be, where there is none. */
#ifndef EPMOE_GPU_TESTING_H
#define EPMOE_GPU_TESTING_H

#include "base/device.h"
#include "tests/testing.h"

#include <stdio.h>

/* Criterion says nothing of a test that it skips. */
#define GPU_TEST_SKIP(...)                                                                                             \
    do {                                                                                                               \
        fprintf(stderr, "skipped: " __VA_ARGS__);                                                                      \
        fputc('\n', stderr);                                                                                           \
        cr_skip_test(__VA_ARGS__);                                                                                     \
    } while (0)
#define GPU_TEST_NEEDS_DEVICE()                                                                                        \
    do {                                                                                                               \
        if (epmoei_device_count() == 0) GPU_TEST_SKIP("no CUDA device: %s", epmoei_device_absence());                  \
    } while (0)

/* The stream of all work and all copies of a test; made by the first call. */
epmoe_stream_t gpu_stream(void);
/* Waits for the stream; false and a line on stderr when something of it failed. */
bool gpu_wait(void);

/* As testing_buffer, on the device; aligned to 256 bytes, plus offset. Ends the process when there is no memory. */
void *gpu_buffer(int64_t bytes, int32_t offset);
/* A buffer that holds a copy of data; NULL for data NULL. */
void *gpu_copy_of(const void *data, int64_t bytes);
void gpu_buffer_free(void *data);
/* False (and a line on stderr) when a guard band of the buffer changed, or a copy of it failed. */
bool gpu_guards_intact(const void *data);
/* True when [first, first+bytes) of the buffer is still poison. */
bool gpu_is_poison(const void *data, int64_t first, int64_t bytes);

/* Copies between host and device, or on the device, that have ended when they return. A failure ends the process with
 * a line on stderr: nothing after it could be believed. */
void gpu_put(void *device, const void *host, int64_t bytes);
void gpu_get(void *host, const void *device, int64_t bytes);
/* All of the buffer's bytes as malloc'ed host memory. */
void *gpu_get_new(const void *device, int64_t bytes);
/* Bytes [done, bytes) become copies of [0, done), again and again: fills gigabytes with a pattern in few copies. */
void gpu_repeat(void *device, int64_t done, int64_t bytes);
/* Poison again. */
void gpu_poison(void *device, int64_t bytes);

/* True when both blocks of host memory are equal; otherwise says on stderr where the first element of `size` bytes
 * differs, as row and column of rows of `cols`. */
bool gpu_same(const char *what, const void *got, const void *expected, int64_t elements, int32_t size, int64_t cols);

#endif
