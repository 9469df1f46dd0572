#include "comm/placement.h"

#include "base/device.h"

#include <string.h>

epmoe_status_t epmoei_placement_check(const int32_t *placement, int32_t num_experts, int32_t *num_physical)
{
    bool present[EPMOE_MAX_EXPERTS] = {false};
    if (!placement) {
        if (*num_physical != 0 && *num_physical != num_experts)
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                               "config.num_physical is %d without a placement: expected 0 or num_experts (%d)",
                               *num_physical, num_experts);
        *num_physical = num_experts;
        return EPMOE_OK;
    }
    if (*num_physical == 0) *num_physical = num_experts;
    if (*num_physical < num_experts || *num_physical > EPMOE_MAX_EXPERTS)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "config.num_physical is %d: expected %d (num_experts)..%d",
                           *num_physical, num_experts, EPMOE_MAX_EXPERTS);
    for (int32_t p = 0; p < *num_physical; p++) {
        if (placement[p] < 0 || placement[p] >= num_experts)
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "config.placement[%d] is %d: expected an expert, 0..%d", p,
                               placement[p], num_experts - 1);
        present[placement[p]] = true;
    }
    for (int32_t e = 0; e < num_experts; e++)
        if (!present[e])
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                               "config.placement has 0 copies of expert %d: expected at least one of each of the %d", e,
                               num_experts);
    return EPMOE_OK;
}

static int64_t carve(char *base, int32_t num_experts, int32_t num_physical, epmoei_copies_t **copies,
                     int32_t **physical)
{
    epmoei_arena_t arena = {base, 0};
    *copies = epmoei_carve(&arena, num_experts * (int64_t)sizeof **copies);
    *physical = epmoei_carve(&arena, num_physical * 4LL);
    return arena.used;
}

int64_t epmoei_placement_bytes(int32_t num_experts, int32_t num_physical)
{
    epmoei_copies_t *copies;
    int32_t *physical;
    return carve(NULL, num_experts, num_physical, &copies, &physical);
}

/* The copies of each expert one after the other; since a rank's are a block, so are its copies of one expert. */
static void fill(epmoei_placement_t *made, const int32_t *placement, int32_t first, int32_t count)
{
    int32_t next = 0;
    for (int32_t e = 0; e < made->num_experts; e++) made->copies[e] = (epmoei_copies_t){0, 0};
    for (int32_t p = 0; p < made->num_physical; p++) made->copies[placement[p]].num++;
    for (int32_t e = 0; e < made->num_experts; e++) {
        made->copies[e].first = next;
        next += made->copies[e].num;
        made->copies[e].num = 0;
    }
    for (int32_t p = 0; p < made->num_physical; p++) {
        epmoei_copies_t *copies = &made->copies[placement[p]];
        made->physical[copies->first + copies->num++] = p;
    }
    for (int32_t e = 0; e < made->num_experts; e++) {
        const epmoei_copies_t all = made->copies[e];
        int32_t before = 0, own = 0;
        for (int32_t i = all.first; i < all.first + all.num; i++) {
            before += made->physical[i] < first;
            own += made->physical[i] >= first && made->physical[i] < first + count;
        }
        if (own) made->copies[e] = (epmoei_copies_t){all.first + before, own};
    }
}

epmoe_status_t epmoei_placement_create(const int32_t *placement, int32_t num_experts, int32_t num_physical,
                                       int32_t size, int32_t rank, epmoe_backend_t backend, epmoei_placement_t **out)
{
    epmoe_status_t status;
    int32_t first, count;
    epmoei_placement_t *made = epmoei_calloc((int64_t)sizeof *made);
    int64_t bytes = epmoei_placement_bytes(num_experts, num_physical);
    if (!made) return epmoei_fail(EPMOE_ERROR_OUT_OF_MEMORY, "no memory for a placement");
    *made = (epmoei_placement_t){
        .backend = backend, .rank = rank, .num_experts = num_experts, .num_physical = num_physical};
    EPMOEI_CHECK_GOTO(epmoe_expert_range(num_physical, size, rank, &first, &count), fail);
    EPMOEI_CHECK_GOTO(epmoei_alloc_for(&made->memory, bytes, "a placement"), fail);
    carve(made->memory, num_experts, num_physical, &made->copies, &made->physical);
    fill(made, placement, first, count);
    made->device_copies = made->copies;
    made->device_physical = made->physical;
    if (backend == EPMOE_BACKEND_CUDA) {
        EPMOEI_CHECK_GOTO(epmoei_memory_alloc(backend, &made->device_memory, bytes, "a placement"), fail);
        carve(made->device_memory, num_experts, num_physical, &made->device_copies, &made->device_physical);
        EPMOEI_CHECK_GOTO(epmoei_memory_copy(backend, made->device_memory, made->memory, bytes, NULL), fail);
        EPMOEI_CHECK_GOTO(epmoei_stream_wait(backend, NULL), fail);
    }
    *out = made;
    return EPMOE_OK;
fail:
    epmoei_placement_destroy(made);
    return status;
}

void epmoei_placement_destroy(epmoei_placement_t *placement)
{
    if (!placement) return;
    if (placement->device_memory) epmoei_memory_free(placement->backend, placement->device_memory);
    epmoei_free(placement->memory);
    epmoei_free(placement);
}

epmoei_place_ids_t epmoei_placement_args(const epmoei_placement_t *placement, int32_t num_experts)
{
    if (!placement) return (epmoei_place_ids_t){.num_experts = num_experts};
    return (epmoei_place_ids_t){.num_experts = placement->num_experts,
                                .rank = placement->rank,
                                .copies = placement->device_copies,
                                .physical = placement->device_physical};
}

void epmoei_place_ids_cpu(const epmoei_place_ids_t *args)
{
    const int64_t k = args->top_k;
    for (int64_t slot = 0; slot < args->num_tokens * k; slot++) {
        int32_t id = args->ids[slot];
        const bool is_expert = id >= 0 && id < args->num_experts;
        if (is_expert && args->load) args->load[id]++;
        if (!args->physical_ids) continue;
        args->physical_ids[slot] = -1;
        if (!is_expert) continue;
        const epmoei_copies_t copies = args->copies[id];
        const uint32_t turn = ((uint32_t)(slot / k) + (uint32_t)args->rank) % (uint32_t)copies.num;
        args->physical_ids[slot] = args->physical[copies.first + (int32_t)turn];
    }
}

epmoe_status_t epmoei_place_ids(epmoe_backend_t backend, const epmoei_place_ids_t *args, epmoe_stream_t stream)
{
#if EPMOE_HAVE_CUDA
    if (backend == EPMOE_BACKEND_CUDA) return epmoei_place_ids_sm80(args, stream);
#endif
    (void)backend, (void)stream;
    epmoei_place_ids_cpu(args);
    return EPMOE_OK;
}
