#include "base/device.h"
#include "base/dtype.h"
#include "tools/tool_check.h"

#include <string.h>

/* Everything of a check runs on the default stream. */
#define STREAM NULL

static void carve_rows(epmoei_arena_t *arena, const epmoe_layer_config_t *config, int64_t count, bool has_x,
                       check_rows_t *rows)
{
    int64_t start = arena->used, row_bytes = (int64_t)config->hidden * epmoe_dtype_size(config->dtype);
    int64_t experts = config->num_experts, k = experts ? config->top_k : 0;
    rows->x = has_x ? epmoei_carve(arena, count * row_bytes) : NULL;
    rows->y = epmoei_carve(arena, count * row_bytes);
    rows->logits = epmoei_carve(arena, count * experts * 4);
    rows->weights = epmoei_carve(arena, count * k * 4);
    rows->ids = epmoei_carve(arena, count * k * 4);
    rows->bytes = arena->used - start;
}

/* `own` comes first: with the layout of `computed`, so that one copy moves all of it. */
static void carve_host(epmoei_arena_t *arena, const epmoe_layer_config_t *config, int32_t ranks, check_share_t *share)
{
    int64_t all = (int64_t)share->chunk * ranks;
    carve_rows(arena, config, share->chunk, true, &share->own);
    carve_rows(arena, config, all, false, &share->all);
    share->all_y_f32 = epmoei_carve(arena, all * config->hidden * 4);
    share->left_out = epmoei_carve(arena, all * (int64_t)sizeof(bool));
    share->selection_bias = epmoei_carve(arena, (int64_t)config->num_experts * 4);
}

epmoe_status_t check_share_make(check_share_t *share, epmoe_backend_t backend, const epmoe_layer_config_t *config,
                                int32_t ranks)
{
    epmoei_arena_t host = {0}, computed = {0};
    share->backend = backend;
    carve_host(&host, config, ranks, share);
    carve_rows(&computed, config, share->chunk, true, &share->computed);
    EPMOEI_CHECK(epmoei_alloc_for(&share->host_memory, host.used, "the rows of a layer"));
    EPMOEI_CHECK(epmoei_memory_alloc(backend, &share->computed_memory, computed.used, "this rank's rows of a layer"));
    memset(share->host_memory, 0, (size_t)host.used);
    host = (epmoei_arena_t){share->host_memory, 0};
    computed = (epmoei_arena_t){share->computed_memory, 0};
    carve_host(&host, config, ranks, share);
    carve_rows(&computed, config, share->chunk, true, &share->computed);
    return EPMOE_OK;
}

void check_share_free(check_share_t *share)
{
    epmoei_memory_free(share->backend, share->computed_memory);
    epmoei_free(share->host_memory);
    *share = (check_share_t){0};
}

epmoe_status_t check_share_send(const check_share_t *share)
{
    return epmoei_memory_copy(share->backend, share->computed_memory, share->host_memory, share->computed.bytes,
                              STREAM);
}

epmoe_status_t check_share_bring_home(const check_share_t *share)
{
    EPMOEI_CHECK(
        epmoei_memory_copy(share->backend, share->host_memory, share->computed_memory, share->computed.bytes, STREAM));
    EPMOEI_CHECK(epmoei_stream_wait(share->backend, STREAM));
    return share->backend == EPMOE_BACKEND_CUDA ? epmoei_error_word_check() : EPMOE_OK;
}

static epmoe_status_t gather(const check_share_t *share, epmoe_comm_t *comm, const void *own, void *all,
                             int64_t row_bytes)
{
    if (!row_bytes) return EPMOE_OK;
    return epmoe_comm_all_gather(comm, own, all, share->chunk * row_bytes);
}

epmoe_status_t check_share_gather(const check_share_t *share, epmoe_comm_t *comm, const epmoe_layer_config_t *config)
{
    const check_rows_t *own = &share->own, *all = &share->all;
    int64_t hidden = config->hidden, experts = config->num_experts, k = experts ? config->top_k : 0;
    EPMOEI_CHECK(gather(share, comm, own->y, all->y, hidden * epmoe_dtype_size(config->dtype)));
    EPMOEI_CHECK(gather(share, comm, own->logits, all->logits, experts * 4));
    EPMOEI_CHECK(gather(share, comm, own->weights, all->weights, k * 4));
    EPMOEI_CHECK(gather(share, comm, own->ids, all->ids, k * 4));
    epmoei_to_f32(share->all_y_f32, all->y, config->dtype, (int64_t)share->chunk * epmoe_comm_size(comm) * hidden);
    return EPMOE_OK;
}
