/* Times the stages of a forward: by the host's clock on the CPU backend, by the caller's CUDA events on CUDA. */
#ifndef EPMOEI_STAGES_H
#define EPMOEI_STAGES_H

#include "base/base.h"

typedef struct epmoei_stages_t {
    epmoe_stream_t stream;
    void *const *events;          /* [EPMOE_STAGE_COUNT + 1] or NULL */
    double us[EPMOE_STAGE_COUNT]; /* the CPU's */
    double time;                  /* start of the running stage */
} epmoei_stages_t;

epmoe_status_t epmoei_stages_begin(epmoei_stages_t *stages, epmoe_stream_t stream, void *const *events);
/* The running stage was `stage`; the next one begins. stages NULL = nobody asks. */
epmoe_status_t epmoei_stages_end(epmoei_stages_t *stages, epmoe_stage_t stage);
/* Forgets the time since the last end. */
void epmoei_stages_skip(epmoei_stages_t *stages);

#endif
