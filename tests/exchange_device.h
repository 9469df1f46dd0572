/* Dispatch and combine of buffers on a device, for the programs that tests start under mpirun. What goes wrong ends
 * them (tests/exchange_ranks.h). */
#ifndef EPMOE_EXCHANGE_DEVICE_H
#define EPMOE_EXCHANGE_DEVICE_H

#include "tests/exchange_case.h"

/* All of it happens on this stream, which the program makes. */
extern epmoe_stream_t exchange_stream;

/* A new device copy (data NULL: uninitialised), and a copy of device memory; both have arrived on return. */
void *exchange_put(const void *data, int64_t bytes);
void exchange_get(void *data, const void *device, int64_t bytes);

/* Device memory between two bands that a kernel which writes past its rows would change; the second one checks. */
char *exchange_guarded(int64_t bytes);
void exchange_guarded_free(char *data, int64_t bytes);

/* What one rank has on the device for a case; all NULL without tokens. */
typedef struct exchange_device_t {
    void *x;
    int32_t *ids;
    float *weights;
    float *shared;
    void *residual;
} exchange_device_t;
exchange_device_t exchange_upload(const exchange_case_t *c, const exchange_inputs_t *from);
void exchange_device_free(exchange_device_t *inputs);
epmoe_dispatch_args_t exchange_dispatch_args(const exchange_device_t *on_device, int32_t num_tokens);

/* Checks what arrived, and puts on the device what the experts make of it. */
void exchange_device_experts(const exchange_case_t *c, int32_t rank, epmoe_ep_t *ep,
                             const epmoe_dispatch_result_t *rows);
/* One dispatch and combine, checked in full; y_out gets y. */
void exchange_device_round(const exchange_case_t *c, int32_t rank, epmoe_ep_t *ep, int32_t reuse_routing, void *y_out);

#endif
