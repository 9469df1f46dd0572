#include "tests/exchange_device.h"

#include "base/device.h"
#include "comm/ep_plan.h"
#include "tests/exchange_ranks.h"

#include <stdlib.h>

#define CUDA  EPMOE_BACKEND_CUDA
#define GUARD 256

epmoe_stream_t exchange_stream;

void *exchange_put(const void *data, int64_t bytes)
{
    void *copy;
    exchange_must(epmoei_memory_alloc(CUDA, &copy, bytes, "a test"));
    if (data) {
        exchange_must(epmoei_memory_copy(CUDA, copy, data, bytes, exchange_stream));
        exchange_must(epmoei_stream_wait(CUDA, exchange_stream));
    }
    return copy;
}

void exchange_get(void *data, const void *device, int64_t bytes)
{
    exchange_must(epmoei_memory_copy(CUDA, data, device, bytes, exchange_stream));
    exchange_must(epmoei_stream_wait(CUDA, exchange_stream));
}

char *exchange_guarded(int64_t bytes)
{
    char *data = exchange_put(NULL, bytes + 2 * GUARD);
    exchange_must(epmoei_memory_set(CUDA, data, 0x5A, bytes + 2 * GUARD, exchange_stream));
    exchange_must(epmoei_memory_set(CUDA, data + GUARD, 0xFF, bytes, exchange_stream));
    return data + GUARD;
}

void exchange_guarded_free(char *data, int64_t bytes)
{
    char band[2 * GUARD];
    exchange_get(band, data - GUARD, GUARD);
    exchange_get(band + GUARD, data + bytes, GUARD);
    for (int32_t i = 0; i < 2 * GUARD; i++) exchange_expect(band[i] == 0x5A, "something was written past y");
    epmoei_memory_free(CUDA, data - GUARD);
}

exchange_device_t exchange_upload(const exchange_case_t *c, const exchange_inputs_t *from)
{
    int64_t slots = (int64_t)from->num_tokens * c->top_k * 4, elements = (int64_t)from->num_tokens * c->hidden;
    int64_t bytes = elements * epmoe_dtype_size(c->dtype);
    if (from->num_tokens == 0) return (exchange_device_t){0};
    return (exchange_device_t){
        .x = exchange_put(from->x, bytes),
        .ids = exchange_put(from->ids, slots),
        .weights = exchange_put(from->weights, slots),
        .shared = from->shared ? exchange_put(from->shared, elements * 4) : NULL,
        .residual = from->residual ? exchange_put(from->residual, bytes) : NULL,
    };
}

void exchange_device_free(exchange_device_t *inputs)
{
    epmoei_memory_free(CUDA, inputs->x);
    epmoei_memory_free(CUDA, inputs->ids);
    epmoei_memory_free(CUDA, inputs->weights);
    epmoei_memory_free(CUDA, inputs->shared);
    epmoei_memory_free(CUDA, inputs->residual);
}

epmoe_dispatch_args_t exchange_dispatch_args(const exchange_device_t *on_device, int32_t num_tokens)
{
    epmoe_dispatch_args_t args = EPMOE_DISPATCH_ARGS_INIT;
    args.num_tokens = num_tokens;
    args.x = on_device->x;
    args.ids = on_device->ids;
    args.weights = on_device->weights;
    return args;
}

void exchange_device_experts(const exchange_case_t *c, int32_t rank, epmoe_ep_t *ep,
                             const epmoe_dispatch_result_t *rows)
{
    int32_t num_rows = -1;
    exchange_get(&num_rows, rows->num_rows, 4);
    exchange_must(epmoe_comm_get_async_error(ep->comm));
    int32_t known = epmoei_ep_num_rows(ep);
    exchange_expect(num_rows <= rows->max_rows && num_rows >= 0 &&
                        (epmoei_ep_counts_on_device(ep) ? num_rows <= known : num_rows == known),
                    "the device's count of rows");
    int64_t elements = (int64_t)num_rows * c->hidden, slots = (int64_t)num_rows * c->top_k;
    int64_t y_bytes = elements * epmoe_dtype_size(epmoe_ep_partial_dtype(ep));
    int64_t x_bytes = elements * epmoe_dtype_size(c->dtype);
    void *x = malloc((size_t)x_bytes + 1), *y = malloc((size_t)y_bytes + 1);
    int32_t *ids = malloc((size_t)slots * 4 + 1);
    float *weights = malloc((size_t)slots * 4 + 1);
    exchange_expect(x && y && ids && weights, "memory");
    exchange_get(x, rows->x, x_bytes);
    exchange_get(ids, rows->ids, slots * 4);
    exchange_get(weights, rows->weights, slots * 4);
    epmoe_dispatch_result_t here = *rows;
    here.num_rows = &num_rows, here.x = x, here.ids = ids, here.weights = weights, here.y = y;
    exchange_expect(exchange_check_rows(c, rank, &here) == 0, "the received rows");
    exchange_experts(c, rank, epmoe_ep_partial_dtype(ep), &here);
    exchange_must(epmoei_memory_copy(CUDA, rows->y, y, y_bytes, exchange_stream));
    exchange_must(epmoei_stream_wait(CUDA, exchange_stream));
    free(x), free(y), free(ids), free(weights);
}

void exchange_device_round(const exchange_case_t *c, int32_t rank, epmoe_ep_t *ep, int32_t reuse_routing, void *y_out)
{
    exchange_inputs_t inputs = exchange_inputs(c, rank);
    int64_t y_bytes = (int64_t)inputs.num_tokens * c->hidden * epmoe_dtype_size(c->dtype);
    exchange_device_t on_device = exchange_upload(c, &inputs);
    char *y = exchange_guarded(y_bytes);
    epmoe_dispatch_args_t args = exchange_dispatch_args(&on_device, inputs.num_tokens);
    args.reuse_routing = reuse_routing;
    int64_t *load = calloc((size_t)c->num_experts + 1, 8), *load_due = calloc((size_t)c->num_experts + 1, 8);
    exchange_expect(load && load_due, "memory");
    for (int32_t e = 0; e < c->num_experts; e++) load[e] = load_due[e] = 5 * e;
    load[c->num_experts] = load_due[c->num_experts] = -77; /* behind it */
    args.expert_load = exchange_put(load, (c->num_experts + 1) * 8LL);
    if (!reuse_routing) exchange_add_load(c, &inputs, load_due);
    epmoe_dispatch_result_t rows = EPMOE_DISPATCH_RESULT_INIT;
    exchange_must(epmoe_dispatch(ep, &args, &rows, exchange_stream));
    exchange_device_experts(c, rank, ep, &rows);
    epmoe_combine_args_t combine = EPMOE_COMBINE_ARGS_INIT;
    combine.shared = on_device.shared;
    combine.residual = on_device.residual;
    combine.y = inputs.num_tokens ? y : NULL;
    exchange_must(epmoe_combine(ep, &combine, exchange_stream));
    exchange_get(y_out, y, y_bytes);
    exchange_must(epmoe_comm_get_async_error(ep->comm));
    exchange_expect(exchange_check_output(c, rank, &inputs, y_out) == 0, "y");
    exchange_get(load, args.expert_load, (c->num_experts + 1) * 8LL);
    exchange_expect(!memcmp(load, load_due, ((size_t)c->num_experts + 1) * 8), "expert_load");
    epmoei_memory_free(CUDA, args.expert_load);
    free(load), free(load_due);
    exchange_guarded_free(y, y_bytes);
    exchange_device_free(&on_device);
    exchange_inputs_free(&inputs);
}
