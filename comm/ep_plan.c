#include "comm/ep_plan.h"

#include "base/dtype.h"
#include "comm/ep_wire.h"
#include "comm/p2p_layout.h"
#include "comm/transport.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

enum { kMaxHidden = 1 << 26 }; /* sizes are products of it and of 32-bit counts */

static int32_t ranks_per_token(const epmoe_ep_config_t *config, int32_t size)
{
    return config->top_k < size ? config->top_k : size;
}

static epmoe_dtype_t partial_dtype(epmoe_dtype_t dtype, int32_t size)
{
    return dtype == EPMOE_BF16 && size > 1 ? EPMOE_BF16 : EPMOE_F32;
}

/* Of an x row as it travels. */
static int64_t wire_row_bytes(const epmoe_ep_config_t *config)
{
    if (config->wire_dtype == EPMOE_F8_E4M3) return epmoei_coded_row_bytes(config->hidden);
    return (int64_t)config->hidden * epmoe_dtype_size(config->dtype);
}

static int64_t header_bytes(int32_t size)
{
    return epmoei_round_up((int64_t)sizeof(epmoei_header_t) + 4 * (int64_t)size, 64);
}

typedef struct arenas_t {
    epmoei_arena_t host, pinned, device;
} arenas_t;

/* The only place that knows sizes: with bases NULL it counts. */
static void carve_buffers(epmoei_ep_buffers_t *b, arenas_t *arenas, const epmoe_ep_config_t *config, int32_t size,
                          int64_t max_rows, epmoe_backend_t backend, epmoe_transport_t transport)
{
    bool cuda = backend == EPMOE_BACKEND_CUDA;
    epmoei_arena_t *host = &arenas->host, *pinned = cuda ? &arenas->pinned : host;
    epmoei_arena_t *device = cuda ? &arenas->device : host;
    int64_t tokens = config->max_tokens, k = config->top_k, d = config->hidden, ranks = size;
    int64_t row = d * epmoe_dtype_size(config->dtype);
    int64_t partial_row = d * epmoe_dtype_size(partial_dtype(config->dtype, size));
    bool host_plans = size > 1 && transport != EPMOE_TRANSPORT_P2P;
    *b = (epmoei_ep_buffers_t){0};
    b->capacity = epmoei_carve(host, 8 * ranks);
    if (config->placement && !(cuda && host_plans)) b->physical_ids = epmoei_carve(device, tokens * k * 4);
    if (size > 1 && transport == EPMOE_TRANSPORT_P2P) return; /* which has its own */
    b->y = epmoei_carve(device, max_rows * partial_row);
    if (cuda) b->device_num_rows = epmoei_carve(device, 4);
    bool coded = config->wire_dtype != config->dtype;
    if (size > 1 || coded) b->x = epmoei_carve(device, max_rows * row);
    if (size == 1) return;

    int64_t slots = tokens * ranks_per_token(config, size);
    int64_t outbox = tokens * epmoei_min64(k, ranks - 1), wire = wire_row_bytes(config);
    int64_t widest = epmoei_max64(wire, partial_row);
    b->headers = epmoei_carve(host, ranks * header_bytes(size));
    b->send_offset = epmoei_carve(host, 8 * (ranks + 1));
    b->recv_offset = epmoei_carve(host, 8 * (ranks + 1));
    b->first_expert = epmoei_carve(host, 4 * (ranks + 1));
    b->owner = epmoei_carve(host, 4 * (int64_t)config->num_experts);
    b->cursor = epmoei_carve(host, 4 * ranks);
    b->slot_token = epmoei_carve(pinned, 4 * slots);
    b->token_slots = epmoei_carve(pinned, 4 * slots);
    b->sends = epmoei_carve(host, 3 * ranks * (int64_t)sizeof(epmoe_segment_t));
    b->recvs = epmoei_carve(host, 3 * ranks * (int64_t)sizeof(epmoe_segment_t));
    b->outbox = epmoei_carve(device, outbox * widest);
    b->outbox_ids = epmoei_carve(host, outbox * k * 4);
    b->outbox_weights = epmoei_carve(host, outbox * k * 4);
    if (coded) b->wire = epmoei_carve(device, max_rows * wire);
    b->ids = epmoei_carve(pinned, max_rows * k * 4);
    b->weights = epmoei_carve(pinned, max_rows * k * 4);
    b->device_slot_token = cuda ? epmoei_carve(device, 4 * slots) : b->slot_token;
    b->device_token_slots = cuda ? epmoei_carve(device, 4 * slots) : b->token_slots;
    b->device_ids = cuda ? epmoei_carve(device, max_rows * k * 4) : b->ids;
    b->device_weights = cuda ? epmoei_carve(device, max_rows * k * 4) : b->weights;
    if (!cuda) return;
    b->own_ids = epmoei_carve(pinned, tokens * k * 4);
    b->own_weights = epmoei_carve(pinned, tokens * k * 4);
    if (transport != EPMOE_TRANSPORT_MPI) return;
    b->staged_outbox = epmoei_carve(pinned, outbox * widest);
    b->staged_rows = epmoei_carve(pinned, max_rows * widest);
}

static epmoe_status_t take_config(epmoe_ep_config_t *own, const epmoe_ep_config_t *config)
{
    EPMOEI_CHECK(epmoei_copy_sized(own, sizeof *own, config, "config"));
    if (own->num_experts < 1 || own->num_experts > EPMOE_MAX_EXPERTS)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "config.num_experts is %d: expected 1..%d", own->num_experts,
                           EPMOE_MAX_EXPERTS);
    EPMOEI_CHECK(epmoei_placement_check(own->placement, own->num_experts, &own->num_physical));
    if (own->top_k < 1 || own->top_k > EPMOE_MAX_TOP_K)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "config.top_k is %d: expected 1..%d", own->top_k,
                           EPMOE_MAX_TOP_K);
    if (own->hidden < 1 || own->hidden > kMaxHidden)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "config.hidden is %d: expected 1..%d", own->hidden,
                           kMaxHidden);
    if (own->max_tokens < 0 || (int64_t)own->max_tokens * own->top_k > INT32_MAX)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                           "config.max_tokens is %d: expected >= 0, and times top_k (%d) at most %d", own->max_tokens,
                           own->top_k, INT32_MAX);
    if (!epmoei_dtype_is_float(own->dtype))
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "config.dtype is %s (%d): expected f32, bf16 or f16",
                           epmoe_dtype_string(own->dtype), (int)own->dtype);
    if (own->wire_dtype == EPMOE_DTYPE_NONE) own->wire_dtype = own->dtype;
    if (own->wire_dtype != own->dtype && own->wire_dtype != EPMOE_F8_E4M3)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "config.wire_dtype is %s (%d): expected dtype (%s) or f8_e4m3",
                           epmoe_dtype_string(own->wire_dtype), (int)own->wire_dtype, epmoe_dtype_string(own->dtype));
    if (own->comm_sms < 0)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "config.comm_sms is %d: expected 0 (all) or more",
                           own->comm_sms);
    if (own->capacity < 0 || own->capacity > INT32_MAX)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "config.capacity is %lld: expected 0 (the worst case) to %d",
                           (long long)own->capacity, INT32_MAX);
    return EPMOE_OK;
}

/* Of an object whose size and config are set. */
static void set_row_sizes(epmoe_ep_t *ep)
{
    ep->header_bytes = header_bytes(ep->size);
    ep->partial_dtype = partial_dtype(ep->config.dtype, ep->size);
    ep->row_bytes = (int64_t)ep->config.hidden * epmoe_dtype_size(ep->config.dtype);
    ep->wire_row_bytes = wire_row_bytes(&ep->config);
    ep->partial_bytes = (int64_t)ep->config.hidden * epmoe_dtype_size(ep->partial_dtype);
}

/* Host, page-locked and device memory together. Host transports are counted as on the CPU: a device has no more than
 * that; the page-locked copies that transport mpi keeps of it are left out. */
static int64_t buffer_bytes(const epmoe_ep_t *ep, epmoe_transport_t transport)
{
    bool p2p = transport == EPMOE_TRANSPORT_P2P && ep->size > 1;
    epmoei_ep_buffers_t unused;
    arenas_t arenas = {0};
    carve_buffers(&unused, &arenas, &ep->config, ep->size, ep->max_rows, p2p ? EPMOE_BACKEND_CUDA : EPMOE_BACKEND_CPU,
                  p2p ? EPMOE_TRANSPORT_P2P : EPMOE_TRANSPORT_MPI);
    int64_t tables = ep->config.placement ? epmoei_placement_bytes(ep->num_experts, ep->config.num_physical) : 0;
    return arenas.host.used + arenas.pinned.used + arenas.device.used + tables +
           (p2p ? epmoei_p2p_buffer_bytes(ep) : 0);
}

epmoe_status_t epmoe_ep_buffer_size(const epmoe_ep_config_t *config, int32_t size, int64_t max_recv_rows,
                                    int64_t *bytes)
{
    epmoe_ep_t asked = {.size = size, .max_rows = (int32_t)max_recv_rows};
    EPMOEI_CHECK(take_config(&asked.config, config));
    epmoe_transport_t transport = asked.config.transport;
    if (transport < EPMOE_TRANSPORT_AUTO || transport > EPMOE_TRANSPORT_P2P)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "config.transport is %d: expected an epmoe_transport_t",
                           (int)transport);
    int32_t most = transport == EPMOE_TRANSPORT_P2P     ? EPMOEI_P2P_MAX_RANKS
                   : transport == EPMOE_TRANSPORT_LOCAL ? 1
                                                        : EPMOEI_MAX_RANKS;
    if (size < 1 || size > most)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "size is %d: expected 1..%d over transport %s", size, most,
                           epmoe_transport_string(transport));
    if (max_recv_rows < 0 || max_recv_rows > INT32_MAX)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "max_recv_rows is %lld: expected 0..%d",
                           (long long)max_recv_rows, INT32_MAX);
    if (!bytes) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "bytes is NULL");
    asked.num_experts = asked.config.num_experts;
    asked.config.num_experts = asked.config.num_physical;
    set_row_sizes(&asked);
    int64_t result = buffer_bytes(&asked, transport);
    if (transport == EPMOE_TRANSPORT_AUTO && size <= EPMOEI_P2P_MAX_RANKS)
        result = epmoei_max64(result, buffer_bytes(&asked, EPMOE_TRANSPORT_P2P));
    *bytes = result;
    return EPMOE_OK;
}

static epmoe_status_t agree_on_config(epmoe_ep_t *ep, epmoe_status_t local)
{
    const epmoe_ep_config_t *config = &ep->config;
    const epmoei_agreed_t fields[] = {
        {NULL, config->max_tokens},
        {NULL, (double)config->capacity},
        {"num_experts", config->num_experts},
        {"top_k", config->top_k},
        {"hidden", config->hidden},
        {"dtype", config->dtype},
        {"wire_dtype", config->wire_dtype},
        {"num_physical", config->num_physical},
        {"placement (0 = NULL)", config->placement != NULL},
    };
    return epmoei_comm_agree_on(ep->comm, "dispatch config", local, fields, sizeof fields / sizeof fields[0]);
}

/* num_physical is the same on every rank already. */
static epmoe_status_t agree_on_placement(epmoe_comm_t *comm, const int32_t *placement, int32_t num_physical)
{
    char names[EPMOEI_MAX_AGREED][24];
    epmoei_agreed_t fields[EPMOEI_MAX_AGREED];
    for (int32_t first = 0; placement && first < num_physical; first += EPMOEI_MAX_AGREED) {
        int32_t count = (int32_t)epmoei_min64(EPMOEI_MAX_AGREED, num_physical - first);
        for (int32_t i = 0; i < count; i++) {
            snprintf(names[i], sizeof names[i], "placement[%d]", first + i);
            fields[i] = (epmoei_agreed_t){names[i], placement[first + i]};
        }
        EPMOEI_CHECK(epmoei_comm_agree_on(comm, "dispatch config", EPMOE_OK, fields, count));
    }
    return EPMOE_OK;
}

/* Rows that `rank` accepts, from the values that all ranks gave to agree_on_config. */
static int64_t capacity_of(const epmoe_comm_t *comm, int32_t rank)
{
    double most = 0, asked = epmoei_comm_agreed_value(comm, rank, 1);
    for (int32_t r = 0; r < comm->bootstrap.size; r++) most += epmoei_comm_agreed_value(comm, r, 0);
    if (most > INT32_MAX) most = INT32_MAX;
    return (int64_t)(asked > 0 && asked < most ? asked : most);
}

static epmoe_status_t make_buffers(epmoe_ep_t *ep)
{
    const epmoe_comm_t *comm = ep->comm;
    arenas_t arenas = {0};
    const epmoe_ep_config_t *config = &ep->config;
    ep->max_rows = (int32_t)capacity_of(comm, ep->rank);
    if (config->placement)
        EPMOEI_CHECK(epmoei_placement_create(config->placement, ep->num_experts, config->num_physical, ep->size,
                                             ep->rank, comm->backend, &ep->placement));
    carve_buffers(&ep->buffers, &arenas, &ep->config, ep->size, ep->max_rows, comm->backend, comm->transport);
    EPMOEI_CHECK(epmoei_alloc_for(&ep->memory, arenas.host.used, "dispatch buffers"));
    if (epmoei_ep_is_cuda(ep)) {
        EPMOEI_CHECK(epmoei_comm_check_device(comm));
        EPMOEI_CHECK(epmoei_event_create(&ep->event));
        EPMOEI_CHECK(epmoei_memory_alloc(comm->backend, &ep->device_memory, arenas.device.used, "dispatch buffers"));
        EPMOEI_CHECK(epmoei_pinned_alloc(&ep->pinned_memory, arenas.pinned.used, "dispatch buffers"));
    }
    arenas = (arenas_t){{ep->memory, 0}, {ep->pinned_memory, 0}, {ep->device_memory, 0}};
    carve_buffers(&ep->buffers, &arenas, &ep->config, ep->size, ep->max_rows, comm->backend, comm->transport);

    epmoei_ep_buffers_t *b = &ep->buffers;
    for (int32_t r = 0; r < ep->size; r++) b->capacity[r] = capacity_of(ep->comm, r);
    if (epmoei_ep_plans_on_device(ep)) return EPMOE_OK;
    if (ep->size > 1) memset(b->headers, 0, (size_t)(ep->size * ep->header_bytes));
    for (int32_t r = 0; r < ep->size && ep->size > 1; r++) {
        int32_t count;
        EPMOEI_CHECK(epmoe_expert_range(ep->config.num_experts, ep->size, r, &b->first_expert[r], &count));
        b->first_expert[r + 1] = b->first_expert[r] + count;
        for (int32_t e = 0; e < count; e++) b->owner[b->first_expert[r] + e] = r;
    }
    return EPMOE_OK;
}

epmoe_status_t epmoe_ep_create(epmoe_comm_t *comm, const epmoe_ep_config_t *config, epmoe_ep_t **ep)
{
    if (ep) *ep = NULL;
    if (!comm) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "comm is NULL");
    EPMOEI_CHECK(epmoei_comm_enter(comm));

    epmoe_ep_t unmade = {.comm = comm}; /* speaks for a rank without memory */
    epmoe_ep_t *object = epmoei_calloc(sizeof *object);
    epmoe_status_t status = EPMOE_OK;
    if (!object) status = epmoei_fail(EPMOE_ERROR_OUT_OF_MEMORY, "no memory for a dispatch object");
    epmoe_ep_t *made = object ? object : &unmade;
    made->comm = comm;
    made->rank = comm->bootstrap.rank;
    made->size = comm->bootstrap.size;
    if (status == EPMOE_OK) status = take_config(&made->config, config);
    if (status == EPMOE_OK && !ep) status = epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "ep is NULL");
    EPMOEI_CHECK_GOTO(agree_on_config(made, status), fail);
    made->num_experts = made->config.num_experts;
    made->config.num_experts = made->config.num_physical;
    set_row_sizes(made);
    status = make_buffers(made);
    EPMOEI_CHECK_GOTO(epmoei_comm_agree_on(comm, "dispatch buffers", status, NULL, 0), fail);
    EPMOEI_CHECK_GOTO(agree_on_placement(comm, made->config.placement, made->config.num_physical), fail);
    made->config.placement = NULL; /* the caller's array may go */
    if (epmoei_ep_plans_on_device(made)) EPMOEI_CHECK_GOTO(comm->ops->ep_create(made), fail);
    made->object = comm->num_objects++;
    *ep = made;
    return EPMOE_OK;
fail:
    epmoe_ep_destroy(object);
    return status;
}

/* Objects that were destroyed with a transfer in flight: the transport may still touch their buffers. After a failure
 * on a device also those without one: giving memory back would wait for a stream that may never end. */
static _Atomic(struct epmoe_ep *) kept;

void epmoe_ep_destroy(epmoe_ep_t *ep)
{
    if (!ep) return;
    if (ep->in_flight || (epmoei_ep_is_cuda(ep) && ep->size > 1 && ep->comm->failed != EPMOE_OK)) {
        ep->next_kept = atomic_load(&kept);
        while (!atomic_compare_exchange_weak(&kept, &ep->next_kept, ep)) {
        }
        return;
    }
    if (epmoei_ep_plans_on_device(ep)) ep->comm->ops->ep_destroy(ep);
    if (epmoei_ep_is_cuda(ep)) {
        epmoei_memory_free(EPMOE_BACKEND_CUDA, ep->device_memory);
        epmoei_pinned_free(ep->pinned_memory);
        epmoei_event_destroy(ep->event);
    }
    epmoei_placement_destroy(ep->placement);
    epmoei_free(ep->memory);
    epmoei_free(ep);
}

epmoe_dtype_t epmoe_ep_partial_dtype(const epmoe_ep_t *ep) { return ep ? ep->partial_dtype : EPMOE_DTYPE_NONE; }

int64_t epmoei_ep_wire_bytes(const epmoe_ep_t *ep) { return ep->bytes_sent; }

int32_t epmoei_ep_num_rows(const epmoe_ep_t *ep) { return ep->num_rows; }

void epmoei_ep_keep_codes(epmoe_ep_t *ep, bool keeps) { ep->keeps_codes = keeps && ep->codes.codes; }

bool epmoei_ep_keeps_codes(const epmoe_ep_t *ep) { return ep->keeps_codes; }

epmoei_coded_rows_t epmoei_ep_codes(const epmoe_ep_t *ep) { return ep->codes; }

int32_t epmoei_ep_bound_of_rows(const epmoe_ep_t *ep, int32_t max_rank_tokens)
{
    if (!max_rank_tokens) return ep->max_rows;
    return (int32_t)epmoei_min64(ep->max_rows, (int64_t)ep->size * max_rank_tokens);
}

bool epmoei_ep_counts_on_device(const epmoe_ep_t *ep) { return epmoei_ep_plans_on_device(ep); }

epmoei_trip_t epmoei_ep_trip(const epmoe_ep_t *ep, bool home)
{
    const epmoei_ep_buffers_t *b = &ep->buffers;
    bool cuda = epmoei_ep_is_cuda(ep);
    char *rows = home ? b->y : epmoei_ep_is_coded(ep) ? b->wire : b->x;
    return (epmoei_trip_t){
        .phase = home ? "combine" : "dispatch (rows)",
        .home = home,
        .row_bytes = home ? ep->partial_bytes : ep->wire_row_bytes,
        .outbox = b->outbox,
        .rows = rows,
        .host_outbox = cuda ? b->staged_outbox : b->outbox,
        .host_rows = cuda ? b->staged_rows : rows,
    };
}

epmoe_status_t epmoei_ep_exchange_begin(epmoe_ep_t *ep, const char *phase, int32_t num_sends, int32_t num_recvs)
{
    ep->in_flight = true;
    return epmoei_comm_exchange_begin(ep->comm, phase, ep->buffers.sends, num_sends, ep->buffers.recvs, num_recvs);
}

epmoe_status_t epmoei_ep_exchange_finish(epmoe_ep_t *ep, const char *phase)
{
    EPMOEI_CHECK(epmoei_comm_exchange_finish(ep->comm, phase));
    ep->in_flight = false;
    return EPMOE_OK;
}
