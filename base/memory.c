#include "base/base.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define HUGE_PAGE_BYTES ((int64_t)2 << 20)

static int64_t fail_at;
static int64_t live;

void epmoei_alloc_fail_at(int64_t n) { __atomic_store_n(&fail_at, n, __ATOMIC_SEQ_CST); }

int64_t epmoei_alloc_live(void) { return __atomic_load_n(&live, __ATOMIC_SEQ_CST); }

bool epmoei_alloc_should_fail(void)
{
    return __atomic_load_n(&fail_at, __ATOMIC_SEQ_CST) > 0 && __atomic_sub_fetch(&fail_at, 1, __ATOMIC_SEQ_CST) == 0;
}

void epmoei_alloc_count(int32_t change) { __atomic_add_fetch(&live, change, __ATOMIC_SEQ_CST); }

void *epmoei_alloc(int64_t bytes)
{
    if (bytes < 0 || bytes > INT64_MAX - HUGE_PAGE_BYTES) return NULL;
    if (epmoei_alloc_should_fail()) return NULL;
    /* Weights are read at memory speed, which address translation by small pages would halve. */
    bool huge = bytes >= HUGE_PAGE_BYTES;
    int64_t alignment = huge ? HUGE_PAGE_BYTES : EPMOEI_ALIGNMENT;
    size_t size = (size_t)epmoei_round_up(epmoei_max64(bytes, 1), alignment);
    void *pointer = aligned_alloc((size_t)alignment, size);
    if (pointer && huge) madvise(pointer, size, MADV_HUGEPAGE); /* a wish: without it the memory is only slower */
    if (pointer) epmoei_alloc_count(1);
    return pointer;
}

void *epmoei_calloc(int64_t bytes)
{
    void *pointer = epmoei_alloc(bytes);
    if (pointer) memset(pointer, 0, (size_t)bytes);
    return pointer;
}

void epmoei_free(void *pointer)
{
    if (!pointer) return;
    epmoei_alloc_count(-1);
    free(pointer);
}

epmoe_status_t epmoei_alloc_for(void **pointer, int64_t bytes, const char *what)
{
    *pointer = epmoei_alloc(bytes);
    if (*pointer) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_OUT_OF_MEMORY, "no memory for %s: %lld bytes", what, (long long)bytes);
}

void *epmoei_carve(epmoei_arena_t *arena, int64_t bytes)
{
    void *pointer = arena->base ? arena->base + arena->used : NULL;
    arena->used += epmoei_round_up(bytes, EPMOEI_ALIGNMENT);
    return pointer;
}

double epmoei_now_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}
