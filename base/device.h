/* CUDA devices and memory for host code, also in a build without CUDA, where there is no device. The only file of base/
 * that knows the CUDA runtime. */
#ifndef EPMOEI_DEVICE_H
#define EPMOEI_DEVICE_H

#include "base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct epmoei_device_info_t {
    int32_t arch; /* major*10 + minor */
    int32_t num_sms;
    int32_t shared_bytes_per_block; /* with opt-in */
    int64_t l2_bytes;
    int64_t memory_bytes;
    char name[128];
    unsigned char uuid[16]; /* the physical device, whatever ordinal a process sees it under */
} epmoei_device_info_t;

/* 0 when there is no device, no driver, or no CUDA in this build. Cached. */
int32_t epmoei_device_count(void);
/* Why epmoei_device_count is 0, in words. */
const char *epmoei_device_absence(void);
/* Cached; NULL for an ordinal that does not exist. */
const epmoei_device_info_t *epmoei_device_info(int32_t device);
/* The calling thread's current device; NULL when there is none. */
const epmoei_device_info_t *epmoei_device_current(void);
int32_t epmoei_device_current_ordinal(void); /* -1 when there is none */
epmoe_status_t epmoei_device_set(int32_t device);

/* Memory that `backend`'s kernels work on, not cleared; the CPU's is epmoei_alloc. Freeing device memory waits for the
 * device. */
epmoe_status_t epmoei_memory_alloc(epmoe_backend_t backend, void **pointer, int64_t bytes, const char *what);
void epmoei_memory_free(epmoe_backend_t backend, void *pointer);
/* Page-locked host memory that the device can also address. */
epmoe_status_t epmoei_pinned_alloc(void **pointer, int64_t bytes, const char *what);
void epmoei_pinned_free(void *pointer);
/* Between any two kinds of memory; only enqueued when `backend` is CUDA. */
epmoe_status_t epmoei_memory_copy(epmoe_backend_t backend, void *dst, const void *src, int64_t bytes,
                                  epmoe_stream_t stream);
epmoe_status_t epmoei_memory_set(epmoe_backend_t backend, void *dst, int32_t byte, int64_t bytes,
                                 epmoe_stream_t stream);
/* Waits; a no-op on the CPU. */
epmoe_status_t epmoei_stream_wait(epmoe_backend_t backend, epmoe_stream_t stream);

/* A stream that does not wait for the default one. */
epmoe_status_t epmoei_stream_create(epmoe_stream_t *stream);
void epmoei_stream_destroy(epmoe_stream_t stream); /* NULL is legal */
/* Whether `stream` is being captured into a graph, or cannot be used without ending another stream's capture; false on
 * the CPU. Asking does a capture no harm. */
bool epmoei_stream_is_capturing(epmoe_backend_t backend, epmoe_stream_t stream);
bool epmoei_memory_is_device(const void *pointer);
/* A cudaEvent_t recorded on `stream`, so that it can be timed also inside a captured graph. */
epmoe_status_t epmoei_event_record(void *event, epmoe_stream_t stream);
/* Marks that the host can ask about. One that was never recorded counts as passed. */
typedef struct CUevent_st *epmoei_event_t;
epmoe_status_t epmoei_event_create(epmoei_event_t *event);
void epmoei_event_destroy(epmoei_event_t event); /* NULL is legal */
epmoe_status_t epmoei_event_query(epmoei_event_t event, bool *passed);

/* A cudaError_t as a status; clears the runtime's non-sticky error. `what` is for the message. */
epmoe_status_t epmoei_cuda_status(int32_t cuda_error, const char *what);

/* Kernels count ids outside [-1,E) here: a word of mapped host memory per device, so that the host can look without
 * waiting. Device address; NULL when it could not be made. Kernels add by epmoei_count_bad. */
int32_t *epmoei_error_word(void);
/* Reports and clears what the current device's kernels have counted so far: INVALID_ARGUMENT when it is not 0. */
epmoe_status_t epmoei_error_word_check(void);
/* +1 and -1 around the inner calls of one that is made of several: while held on this thread the check says OK. */
void epmoei_error_word_hold(int32_t change);

#define EPMOEI_CUDA(expr) EPMOEI_CHECK(epmoei_cuda_status((int32_t)(expr), #expr))

#ifdef __cplusplus
}
#endif

#endif
