#include "base/device.h"

#include <string.h>

#if EPMOE_HAVE_CUDA

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>

enum { kMaxDevices = 64 };

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int32_t device_count;
static char absence[256];
static epmoei_device_info_t infos[kMaxDevices];
static volatile int32_t *error_words[kMaxDevices]; /* host addresses; the device's are the same (unified addressing) */

static void read_devices(void)
{
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess) {
        cudaGetLastError();
        snprintf(absence, sizeof absence, "%s", cudaGetErrorString(error));
        return;
    }
    if (count == 0) snprintf(absence, sizeof absence, "no CUDA device is visible");
    for (int i = 0; i < count && i < kMaxDevices; i++) {
        struct cudaDeviceProp prop;
        if (cudaGetDeviceProperties(&prop, i) != cudaSuccess) {
            cudaGetLastError();
            snprintf(absence, sizeof absence, "the properties of CUDA device %d cannot be read", i);
            device_count = 0;
            return;
        }
        epmoei_device_info_t *info = &infos[i];
        info->arch = prop.major * 10 + prop.minor;
        info->num_sms = prop.multiProcessorCount;
        info->shared_bytes_per_block = (int32_t)prop.sharedMemPerBlockOptin;
        info->l2_bytes = prop.l2CacheSize;
        info->memory_bytes = (int64_t)prop.totalGlobalMem;
        snprintf(info->name, sizeof info->name, "%.127s", prop.name);
        memcpy(info->uuid, &prop.uuid, sizeof info->uuid);
        device_count = i + 1;
    }
}

int32_t epmoei_device_count(void)
{
    pthread_once(&once, read_devices);
    return device_count;
}

const char *epmoei_device_absence(void)
{
    pthread_once(&once, read_devices);
    return absence;
}

const epmoei_device_info_t *epmoei_device_info(int32_t device)
{
    return device >= 0 && device < epmoei_device_count() ? &infos[device] : NULL;
}

const epmoei_device_info_t *epmoei_device_current(void)
{
    int device = -1;
    if (epmoei_device_count() == 0 || cudaGetDevice(&device) != cudaSuccess) return NULL;
    return epmoei_device_info(device);
}

int32_t epmoei_device_current_ordinal(void)
{
    const epmoei_device_info_t *device = epmoei_device_current();
    return device ? (int32_t)(device - infos) : -1;
}

epmoe_status_t epmoei_cuda_status(int32_t cuda_error, const char *what)
{
    if (cuda_error == cudaSuccess) return EPMOE_OK;
    cudaGetLastError();
    return epmoei_fail(cuda_error == cudaErrorMemoryAllocation ? EPMOE_ERROR_OUT_OF_MEMORY : EPMOE_ERROR_CUDA, "%s: %s",
                       what, cudaGetErrorString((cudaError_t)cuda_error));
}

epmoe_status_t epmoei_device_set(int32_t device)
{
    EPMOEI_CUDA(cudaSetDevice(device));
    return EPMOE_OK;
}

epmoe_status_t epmoei_memory_alloc(epmoe_backend_t backend, void **pointer, int64_t bytes, const char *what)
{
    if (backend != EPMOE_BACKEND_CUDA) return epmoei_alloc_for(pointer, bytes, what);
    *pointer = NULL;
    cudaError_t error =
        epmoei_alloc_should_fail() ? cudaErrorMemoryAllocation : cudaMalloc(pointer, (size_t)epmoei_max64(bytes, 1));
    if (error != cudaSuccess) {
        cudaGetLastError();
        *pointer = NULL;
        if (error != cudaErrorMemoryAllocation) return epmoei_cuda_status((int32_t)error, what);
        return epmoei_fail(EPMOE_ERROR_OUT_OF_MEMORY, "no device memory for %s: %lld bytes", what, (long long)bytes);
    }
    epmoei_alloc_count(1);
    return EPMOE_OK;
}

void epmoei_memory_free(epmoe_backend_t backend, void *pointer)
{
    if (backend != EPMOE_BACKEND_CUDA) {
        epmoei_free(pointer);
        return;
    }
    if (!pointer) return;
    epmoei_alloc_count(-1);
    if (cudaFree(pointer) != cudaSuccess) cudaGetLastError();
}

epmoe_status_t epmoei_pinned_alloc(void **pointer, int64_t bytes, const char *what)
{
    *pointer = NULL;
    if (epmoei_alloc_should_fail() || cudaHostAlloc(pointer, (size_t)epmoei_max64(bytes, 1),
                                                    cudaHostAllocPortable | cudaHostAllocMapped) != cudaSuccess) {
        cudaGetLastError();
        *pointer = NULL;
        return epmoei_fail(EPMOE_ERROR_OUT_OF_MEMORY, "no page-locked memory for %s: %lld bytes", what,
                           (long long)bytes);
    }
    epmoei_alloc_count(1);
    return EPMOE_OK;
}

void epmoei_pinned_free(void *pointer)
{
    if (!pointer) return;
    epmoei_alloc_count(-1);
    if (cudaFreeHost(pointer) != cudaSuccess) cudaGetLastError();
}

epmoe_status_t epmoei_memory_copy(epmoe_backend_t backend, void *dst, const void *src, int64_t bytes,
                                  epmoe_stream_t stream)
{
    if (bytes == 0) return EPMOE_OK;
    if (backend != EPMOE_BACKEND_CUDA) {
        memcpy(dst, src, (size_t)bytes);
        return EPMOE_OK;
    }
    EPMOEI_CUDA(cudaMemcpyAsync(dst, src, (size_t)bytes, cudaMemcpyDefault, stream));
    return EPMOE_OK;
}

epmoe_status_t epmoei_memory_set(epmoe_backend_t backend, void *dst, int32_t byte, int64_t bytes, epmoe_stream_t stream)
{
    if (bytes == 0) return EPMOE_OK;
    if (backend != EPMOE_BACKEND_CUDA) {
        memset(dst, byte, (size_t)bytes);
        return EPMOE_OK;
    }
    EPMOEI_CUDA(cudaMemsetAsync(dst, byte, (size_t)bytes, stream));
    return EPMOE_OK;
}

epmoe_status_t epmoei_stream_wait(epmoe_backend_t backend, epmoe_stream_t stream)
{
    if (backend != EPMOE_BACKEND_CUDA) return EPMOE_OK;
    EPMOEI_CUDA(cudaStreamSynchronize(stream));
    return EPMOE_OK;
}

epmoe_status_t epmoei_stream_create(epmoe_stream_t *stream)
{
    *stream = NULL;
    EPMOEI_CUDA(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking));
    return EPMOE_OK;
}

void epmoei_stream_destroy(epmoe_stream_t stream)
{
    if (stream && cudaStreamDestroy(stream) != cudaSuccess) cudaGetLastError();
}

bool epmoei_stream_is_capturing(epmoe_backend_t backend, epmoe_stream_t stream)
{
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    if (backend != EPMOE_BACKEND_CUDA) return false;
    cudaError_t error = cudaStreamIsCapturing(stream, &capture);
    if (error != cudaSuccess) cudaGetLastError();
    if (error == cudaErrorStreamCaptureImplicit) return true;
    return capture != cudaStreamCaptureStatusNone;
}

bool epmoei_memory_is_device(const void *pointer)
{
    struct cudaPointerAttributes attributes;
    if (epmoei_device_count() == 0) return false;
    if (cudaPointerGetAttributes(&attributes, pointer) != cudaSuccess) {
        cudaGetLastError();
        return false;
    }
    return attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged;
}

epmoe_status_t epmoei_event_record(void *event, epmoe_stream_t stream)
{
    unsigned flags = epmoei_stream_is_capturing(EPMOE_BACKEND_CUDA, stream) ? cudaEventRecordExternal : 0;
    EPMOEI_CUDA(cudaEventRecordWithFlags((cudaEvent_t)event, stream, flags));
    return EPMOE_OK;
}

epmoe_status_t epmoei_event_create(epmoei_event_t *event)
{
    *event = NULL;
    EPMOEI_CUDA(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
    return EPMOE_OK;
}

void epmoei_event_destroy(epmoei_event_t event)
{
    if (event && cudaEventDestroy(event) != cudaSuccess) cudaGetLastError();
}

epmoe_status_t epmoei_event_query(epmoei_event_t event, bool *passed)
{
    cudaError_t error = cudaEventQuery(event);
    *passed = error != cudaErrorNotReady;
    if (error == cudaErrorNotReady) {
        cudaGetLastError(); /* or the next launch check finds it */
        return EPMOE_OK;
    }
    return epmoei_cuda_status((int32_t)error, "cudaEventQuery");
}

static volatile int32_t *find_error_word(void)
{
    int device = -1;
    if (epmoei_device_count() == 0 || cudaGetDevice(&device) != cudaSuccess || device >= kMaxDevices) return NULL;
    pthread_mutex_lock(&mutex);
    if (!error_words[device]) {
        /* The first call may come inside a capture, which other modes let an allocation break. */
        enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
        void *word = NULL;
        bool relaxed = cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess;
        if (cudaHostAlloc(&word, sizeof(int32_t), cudaHostAllocPortable | cudaHostAllocMapped) == cudaSuccess) {
            memset(word, 0, sizeof(int32_t));
            error_words[device] = word;
        } else
            cudaGetLastError();
        if (relaxed) cudaThreadExchangeStreamCaptureMode(&mode);
    }
    pthread_mutex_unlock(&mutex);
    return error_words[device];
}

int32_t *epmoei_error_word(void) { return (int32_t *)(uintptr_t)find_error_word(); }

static _Thread_local int32_t holds;

void epmoei_error_word_hold(int32_t change) { holds += change; }

epmoe_status_t epmoei_error_word_check(void)
{
    volatile int32_t *word = find_error_word();
    if (!word || *word == 0 || holds) return EPMOE_OK;
    int32_t count = __atomic_exchange_n((int32_t *)(uintptr_t)word, 0, __ATOMIC_RELAXED);
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                       "%d ids, positions or slots of earlier calls on this device were out of range and were skipped",
                       count);
}

#else

int32_t epmoei_device_count(void) { return 0; }
const char *epmoei_device_absence(void) { return "this build has no CUDA backend"; }
const epmoei_device_info_t *epmoei_device_info(int32_t device)
{
    (void)device;
    return NULL;
}
const epmoei_device_info_t *epmoei_device_current(void) { return NULL; }
int32_t epmoei_device_current_ordinal(void) { return -1; }

static epmoe_status_t no_cuda(void) { return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "%s", epmoei_device_absence()); }

epmoe_status_t epmoei_device_set(int32_t device)
{
    (void)device;
    return no_cuda();
}

epmoe_status_t epmoei_cuda_status(int32_t cuda_error, const char *what)
{
    (void)cuda_error, (void)what;
    return no_cuda();
}

epmoe_status_t epmoei_memory_alloc(epmoe_backend_t backend, void **pointer, int64_t bytes, const char *what)
{
    (void)backend;
    return epmoei_alloc_for(pointer, bytes, what);
}

void epmoei_memory_free(epmoe_backend_t backend, void *pointer)
{
    (void)backend;
    epmoei_free(pointer);
}

epmoe_status_t epmoei_pinned_alloc(void **pointer, int64_t bytes, const char *what)
{
    return epmoei_alloc_for(pointer, bytes, what);
}

void epmoei_pinned_free(void *pointer) { epmoei_free(pointer); }

epmoe_status_t epmoei_memory_copy(epmoe_backend_t backend, void *dst, const void *src, int64_t bytes,
                                  epmoe_stream_t stream)
{
    (void)backend, (void)stream;
    if (bytes) memcpy(dst, src, (size_t)bytes);
    return EPMOE_OK;
}

epmoe_status_t epmoei_memory_set(epmoe_backend_t backend, void *dst, int32_t byte, int64_t bytes, epmoe_stream_t stream)
{
    (void)backend, (void)stream;
    if (bytes) memset(dst, byte, (size_t)bytes);
    return EPMOE_OK;
}

epmoe_status_t epmoei_stream_wait(epmoe_backend_t backend, epmoe_stream_t stream)
{
    (void)backend, (void)stream;
    return EPMOE_OK;
}

epmoe_status_t epmoei_stream_create(epmoe_stream_t *stream)
{
    *stream = NULL;
    return no_cuda();
}

void epmoei_stream_destroy(epmoe_stream_t stream) { (void)stream; }

bool epmoei_stream_is_capturing(epmoe_backend_t backend, epmoe_stream_t stream)
{
    (void)backend, (void)stream;
    return false;
}

bool epmoei_memory_is_device(const void *pointer)
{
    (void)pointer;
    return false;
}

epmoe_status_t epmoei_event_record(void *event, epmoe_stream_t stream)
{
    (void)event, (void)stream;
    return no_cuda();
}

epmoe_status_t epmoei_event_create(epmoei_event_t *event)
{
    *event = NULL;
    return no_cuda();
}

void epmoei_event_destroy(epmoei_event_t event) { (void)event; }

epmoe_status_t epmoei_event_query(epmoei_event_t event, bool *passed)
{
    (void)event;
    *passed = true;
    return no_cuda();
}

int32_t *epmoei_error_word(void) { return NULL; }
epmoe_status_t epmoei_error_word_check(void) { return EPMOE_OK; }
void epmoei_error_word_hold(int32_t change) { (void)change; }

#endif
