#include "base/base.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char last_error[1024];
static _Thread_local uint64_t error_count;
static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER; /* of the two below */
static epmoe_log_fn log_fn;
static void *log_ctx;

const char *epmoe_status_string(epmoe_status_t status)
{
    switch (status) {
#define STATUS_CASE(name, value, text)                                                                                 \
    case EPMOE_##name: return text;
        EPMOE_STATUS_MAP(STATUS_CASE)
#undef STATUS_CASE
    case EPMOE_STATUS_FORCE_INT32: break;
    }
    return "unknown status";
}

const char *epmoe_last_error(void) { return last_error; }

epmoe_status_t epmoe_set_last_error(epmoe_status_t status, const char *message)
{
    return epmoei_fail(status, "%s", message ? message : "");
}

uint64_t epmoei_error_count(void) { return error_count; }

int32_t epmoe_version(void) { return EPMOE_VERSION_MAJOR * 10000 + EPMOE_VERSION_MINOR * 100 + EPMOE_VERSION_PATCH; }

void epmoe_set_log(epmoe_log_fn fn, void *ctx)
{
    pthread_mutex_lock(&log_lock);
    log_fn = fn;
    log_ctx = ctx;
    pthread_mutex_unlock(&log_lock);
}

epmoe_status_t epmoei_fail(epmoe_status_t status, const char *format, ...)
{
    /* Through a buffer: an argument may be the last error itself. */
    char text[sizeof last_error];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    memcpy(last_error, text, sizeof text);
    error_count++;
    return status;
}

epmoe_status_t epmoei_fail_context(epmoe_status_t status, const char *format, ...)
{
    char context[256];
    va_list args;
    va_start(args, format);
    vsnprintf(context, sizeof context, format, args);
    va_end(args);
    return epmoei_fail(status, "%s: %s", context, last_error);
}

void epmoei_log(epmoe_log_level_t level, const char *format, ...)
{
    pthread_mutex_lock(&log_lock);
    epmoe_log_fn fn = log_fn;
    void *ctx = log_ctx;
    pthread_mutex_unlock(&log_lock);
    if (!fn) return;
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fn(ctx, level, text); /* without the lock: it may set another one */
}

epmoe_status_t epmoei_copy_sized(void *dst, size_t dst_size, const void *src, const char *name)
{
    if (!src) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s is NULL", name);
    size_t src_size;
    memcpy(&src_size, src, sizeof src_size);
    if (src_size < sizeof src_size || src_size > 65536)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                           "%s.struct_size is %zu: initialise the struct with its INIT macro", name, src_size);
    for (size_t i = dst_size; i < src_size; i++)
        if (((const unsigned char *)src)[i])
            return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED,
                               "%s has a field (byte %zu of %zu) that this version (%d) does not know", name, i,
                               src_size, epmoe_version());
    memset(dst, 0, dst_size);
    memcpy(dst, src, src_size < dst_size ? src_size : dst_size);
    memcpy(dst, &dst_size, sizeof dst_size);
    return EPMOE_OK;
}

epmoe_status_t epmoei_return_sized(void *dst, const void *src, size_t src_size, const char *name)
{
    if (!dst) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s is NULL", name);
    size_t dst_size;
    memcpy(&dst_size, dst, sizeof dst_size);
    if (dst_size < sizeof dst_size || dst_size > 65536)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                           "%s->struct_size is %zu: initialise the struct with its INIT macro", name, dst_size);
    memset((char *)dst + sizeof dst_size, 0, dst_size - sizeof dst_size);
    memcpy((char *)dst + sizeof dst_size, (const char *)src + sizeof dst_size,
           (src_size < dst_size ? src_size : dst_size) - sizeof dst_size);
    return EPMOE_OK;
}
