/* What every folder may use: status with a message, logging, memory, time. Depends on nothing of epmoe but epmoe.h. */
#ifndef EPMOEI_BASE_H
#define EPMOEI_BASE_H

#include <epmoe/epmoe.h>

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define EPMOEI_PRINTF(format_index, first_arg) __attribute__((format(printf, format_index, first_arg)))
#else
#define EPMOEI_PRINTF(format_index, first_arg)
#endif

#define EPMOEI_CHECK(expr)                                                                                             \
    do {                                                                                                               \
        epmoe_status_t check_status_ = (expr);                                                                         \
        if (check_status_ != EPMOE_OK) return check_status_;                                                           \
    } while (0)

/* Needs `epmoe_status_t status` in scope. */
#define EPMOEI_CHECK_GOTO(expr, label)                                                                                 \
    do {                                                                                                               \
        status = (expr);                                                                                               \
        if (status != EPMOE_OK) goto label;                                                                            \
    } while (0)

/* Sets this thread's last error and returns `status`, so that `return epmoei_fail(...)` is the way to fail. */
epmoe_status_t epmoei_fail(epmoe_status_t status, const char *format, ...) EPMOEI_PRINTF(2, 3);
/* Puts "context: " in front of this thread's last error and returns `status` unchanged. */
epmoe_status_t epmoei_fail_context(epmoe_status_t status, const char *format, ...) EPMOEI_PRINTF(2, 3);

/* How often this thread's last error was set: a change says that a callback left a text. */
uint64_t epmoei_error_count(void);

void epmoei_log(epmoe_log_level_t level, const char *format, ...) EPMOEI_PRINTF(2, 3);

/* Copies a caller's sized struct into the library's own version of it: fields that the caller's version lacks become
 * zero; a longer one is accepted if its tail is zero. `name` is for the message. */
epmoe_status_t epmoei_copy_sized(void *dst, size_t dst_size, const void *src, const char *name);
/* The other way: fills a caller's result struct up to its struct_size, which is kept. */
epmoe_status_t epmoei_return_sized(void *dst, const void *src, size_t src_size, const char *name);

#define EPMOEI_ALIGNMENT 256 /* of every buffer the library allocates or carves */

/* Aligned memory, not cleared; NULL when there is none. bytes 0 gives a valid pointer. Every allocation of the library
 * goes through these two, so that tests can make the n-th one fail. */
void *epmoei_alloc(int64_t bytes);
void epmoei_free(void *pointer);
/* Cleared. */
void *epmoei_calloc(int64_t bytes);
/* Tests: the n-th allocation from now (1 = the next) fails, once; 0 = never. */
void epmoei_alloc_fail_at(int64_t n);
/* Allocations that have not been freed. */
int64_t epmoei_alloc_live(void);
/* As epmoei_alloc, with the failure as a status that names what it was for. */
epmoe_status_t epmoei_alloc_for(void **pointer, int64_t bytes, const char *what);

/* One layout function carves all buffers of an object: with base NULL it only counts, so that sizes stand in one
 * place. Offsets are multiples of EPMOEI_ALIGNMENT. */
typedef struct epmoei_arena_t {
    char *base;
    int64_t used;
} epmoei_arena_t;
void *epmoei_carve(epmoei_arena_t *arena, int64_t bytes);

double epmoei_now_seconds(void); /* monotonic */

static inline int64_t epmoei_min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t epmoei_max64(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t epmoei_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t epmoei_round_up(int64_t a, int64_t b) { return epmoei_ceil_div(a, b) * b; }

#ifdef __cplusplus
}
#endif

#endif
