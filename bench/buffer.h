/* Memory that a timed call works on, between guard bands, and its copy on the host. On the CPU the two are one. */
#ifndef EPMOE_BENCH_BUFFER_H
#define EPMOE_BENCH_BUFFER_H

#include "base/base.h"

typedef struct buffer_t {
    epmoe_backend_t backend;
    char *host_base; /* with the guard bands */
    char *run_base;
    void *host; /* what the bench reads and writes */
    void *run;  /* what the library gets: device memory on CUDA */
    int64_t bytes;
} buffer_t;

/* Everything is poisoned: NaN in every float type, -1 as an id. */
epmoe_status_t buffer_create(buffer_t *buffer, epmoe_backend_t backend, int64_t bytes, const char *what);
void buffer_destroy(buffer_t *buffer); /* a zeroed one is legal */

/* These wait for the device; on the CPU the copies have nothing to do. A buffer that was never made is skipped. */
epmoe_status_t buffer_upload(buffer_t *buffer);
epmoe_status_t buffer_download(buffer_t *buffer); /* with the guard bands */
/* What the library gets, without the guard bands. */
epmoe_status_t buffer_poison(buffer_t *buffer);

/* Bytes from run_base on: the guard bands too. */
int64_t buffer_span(const buffer_t *buffer);
/* How many bytes of the host's guard bands are not what they were. */
int64_t buffer_guards_changed(const buffer_t *buffer);

#endif
