#include "bench/placement.h"

#include "bench/agree.h"

#include <string.h>

/* Adds this rank's slots of all cases. */
static epmoe_status_t count_load(const bench_t *bench, int64_t *load)
{
    const options_t *options = bench->options;
    const int32_t rank = bench->program->rank, k = bench->config.top_k;
    epmoe_status_t status = EPMOE_OK;
    int32_t *ids = NULL;
    EPMOEI_CHECK(epmoei_alloc_for((void **)&ids, (int64_t)bench->config.max_tokens * k * 4, "drawn ids"));
    for (int32_t i = 0; i < options->num_cases && status == EPMOE_OK; i++) {
        int64_t total = 0, first = 0;
        for (int32_t r = 0; r < bench->program->size; r++) {
            if (r == rank) first = total;
            total += options->num_per_rank ? options->tokens_per_rank[r] : options->tokens[i];
        }
        int32_t tokens = options->num_per_rank ? options->tokens_per_rank[rank] : options->tokens[i];
        status = routing_draw(&bench->routing, total, first, tokens, ids);
        for (int64_t s = 0; s < (int64_t)tokens * k && status == EPMOE_OK; s++) load[ids[s]]++;
    }
    epmoei_free(ids);
    return status;
}

static epmoe_status_t plan(bench_t *bench, const int64_t *load)
{
    const program_t *program = bench->program;
    epmoe_layer_config_t *config = &bench->config;
    EPMOEI_CHECK(
        epmoe_placement_plan(load, config->num_experts, config->num_physical, program->size, bench->placement));
    config->placement = bench->placement;
    return epmoei_placement_create(bench->placement, config->num_experts, config->num_physical, program->size,
                                   program->rank, EPMOE_BACKEND_CPU, &bench->placed);
}

epmoe_status_t placement_configure(bench_t *bench)
{
    epmoe_comm_t *comm = bench->program->comm;
    epmoe_layer_config_t *config = &bench->config;
    epmoe_status_t status;
    int64_t *load = NULL;
    if (!bench->options->balanced) return EPMOE_OK;
    config->num_physical = bench->options->num_physical;
    if (!config->num_physical) config->num_physical = config->num_experts + bench->program->size;
    status = epmoei_alloc_for((void **)&bench->placement, config->num_physical * 4LL, "a placement");
    if (status == EPMOE_OK) status = epmoei_alloc_for((void **)&load, config->num_experts * 8LL, "load");
    if (status == EPMOE_OK) {
        memset(load, 0, (size_t)config->num_experts * 8);
        status = count_load(bench, load);
    }
    EPMOEI_CHECK_GOTO(epmoe_comm_agree(comm, status), done);
    EPMOEI_CHECK_GOTO(bench_sum(comm, load, config->num_experts), done);
    EPMOEI_CHECK_GOTO(epmoe_comm_agree(comm, plan(bench, load)), done);
done:
    epmoei_free(load);
    return status;
}

void placement_free(bench_t *bench)
{
    epmoei_placement_destroy(bench->placed);
    epmoei_free(bench->placement);
}

epmoe_status_t placement_ids(const bench_case_t *made, const bench_t *bench, int32_t **ids)
{
    const int64_t slots = (int64_t)made->num_tokens * bench->config.top_k;
    EPMOEI_CHECK(epmoei_alloc_for((void **)ids, slots * 4, "ids of physical experts"));
    if (!bench->placed) {
        memcpy(*ids, made->ids.host, (size_t)slots * 4);
        return EPMOE_OK;
    }
    epmoei_place_ids_t place = epmoei_placement_args(bench->placed, bench->config.num_experts);
    place.num_tokens = made->num_tokens;
    place.top_k = bench->config.top_k;
    place.ids = made->ids.host;
    place.physical_ids = *ids;
    epmoei_place_ids_cpu(&place);
    return EPMOE_OK;
}
