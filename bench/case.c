#include "bench/agree.h"
#include "bench/bench.h"
#include "bench/random.h"
#include "bench/stats.h"

#include "base/dtype.h"

#include <math.h>
#include <string.h>
#include <time.h>

#define POISON 0xFF /* NaN in every float type, -1 as an id */

void case_input_row(const bench_t *bench, int64_t token, double *row)
{
    uint64_t state = random_start(bench->options->seed, RANDOM_INPUT, token);
    int32_t d = bench->config.hidden;
    for (int32_t c = 0; c < d; c += 2) {
        /* Box and Muller 1958. */
        double radius = sqrt(-2 * log(random_unit(&state))), angle = 2 * M_PI * random_unit(&state);
        row[c] = (double)epmoei_round_to((float)(radius * cos(angle)), bench->config.dtype);
        if (c + 1 < d) row[c + 1] = (double)epmoei_round_to((float)(radius * sin(angle)), bench->config.dtype);
    }
}

static epmoe_status_t fill_input(bench_case_t *made, const bench_t *bench)
{
    int64_t d = bench->config.hidden;
    bool failed = false;
#pragma omp parallel reduction(|| : failed)
    {
        double *row = epmoei_alloc(d * 8);
        failed = !row;
#pragma omp for schedule(static)
        for (int32_t t = 0; t < made->num_tokens; t++) {
            if (!row) continue;
            case_input_row(bench, made->first_token + t, row);
            for (int64_t c = 0; c < d; c++) epmoei_store(made->x, bench->config.dtype, t * d + c, (float)row[c]);
        }
        epmoei_free(row);
    }
    return failed ? epmoei_fail(EPMOE_ERROR_OUT_OF_MEMORY, "%lld bytes for an input row", (long long)d * 8) : EPMOE_OK;
}

static int64_t output_bytes(const bench_case_t *made, const bench_t *bench)
{
    return (int64_t)made->num_tokens * bench->config.hidden * epmoe_dtype_size(bench->config.dtype);
}

static epmoe_status_t allocate(bench_case_t *made, const bench_t *bench)
{
    int64_t tokens = made->num_tokens, slots = tokens * bench->config.top_k, bytes = output_bytes(made, bench);
    int64_t logits = tokens * bench->config.num_experts, iters = bench->options->iters;
    EPMOEI_CHECK(epmoei_alloc_for(&made->x, bytes, "x"));
    EPMOEI_CHECK(epmoei_alloc_for((void **)&made->y_guarded, bytes + 2 * BENCH_GUARD_BYTES, "y"));
    made->y = made->y_guarded + BENCH_GUARD_BYTES;
    EPMOEI_CHECK(epmoei_alloc_for(&made->y_checked, bytes, "y"));
    EPMOEI_CHECK(epmoei_alloc_for((void **)&made->logits_out, logits * 4, "logits"));
    EPMOEI_CHECK(epmoei_alloc_for((void **)&made->ids, slots * 4, "ids"));
    EPMOEI_CHECK(epmoei_alloc_for((void **)&made->weights, slots * 4, "weights"));
    EPMOEI_CHECK(epmoei_alloc_for((void **)&made->times, iters * 8, "times"));
    EPMOEI_CHECK(epmoei_alloc_for((void **)&made->stage_times, iters * EPMOE_STAGE_COUNT * 8, "times"));
    memset(made->y_guarded, POISON, (size_t)(bytes + 2 * BENCH_GUARD_BYTES));
    memset(made->logits_out, POISON, (size_t)logits * 4);
    memset(made->ids, POISON, (size_t)slots * 4);
    memset(made->weights, POISON, (size_t)slots * 4);
    return EPMOE_OK;
}

static epmoe_status_t force_routing(bench_case_t *made, const bench_t *bench)
{
    int64_t tokens = made->num_tokens;
    if (bench->routing.kind == ROUTING_ROUTER) return EPMOE_OK;
    EPMOEI_CHECK(epmoei_alloc_for((void **)&made->forced_ids, tokens * bench->config.top_k * 4, "forced ids"));
    EPMOEI_CHECK(epmoei_alloc_for((void **)&made->logits, tokens * bench->config.num_experts * 4, "forced logits"));
    EPMOEI_CHECK(
        routing_draw(&bench->routing, made->total_tokens, made->first_token, made->num_tokens, made->forced_ids));
    return routing_logits(&bench->routing, made->first_token, made->num_tokens, made->forced_ids, made->logits);
}

epmoe_status_t case_create(bench_case_t *made, const bench_t *bench, int32_t index)
{
    const options_t *options = bench->options;
    *made = (bench_case_t){0};
    epmoe_status_t status = epmoei_alloc_for((void **)&made->tokens, (int64_t)bench->program->size * 4, "tokens");
    if (status == EPMOE_OK) {
        for (int32_t r = 0; r < bench->program->size; r++) {
            made->tokens[r] = options->num_per_rank ? options->tokens_per_rank[r] : options->tokens[index];
            if (r < bench->program->rank) made->first_token += made->tokens[r];
            made->total_tokens += made->tokens[r];
        }
        made->num_tokens = made->tokens[bench->program->rank];
        status = allocate(made, bench);
    }
    if (status == EPMOE_OK) status = fill_input(made, bench);
    if (status == EPMOE_OK) status = force_routing(made, bench);
    return epmoe_comm_agree(bench->program->comm, status);
}

void case_destroy(bench_case_t *made)
{
    epmoei_free(made->tokens);
    epmoei_free(made->x);
    epmoei_free(made->y_guarded);
    epmoei_free(made->y_checked);
    epmoei_free(made->forced_ids);
    epmoei_free(made->logits);
    epmoei_free(made->logits_out);
    epmoei_free(made->ids);
    epmoei_free(made->weights);
    epmoei_free(made->times);
    epmoei_free(made->stage_times);
    *made = (bench_case_t){0};
}

int64_t case_guards_changed(const bench_case_t *made, const bench_t *bench)
{
    const unsigned char *before = (const unsigned char *)made->y_guarded;
    const unsigned char *after = (const unsigned char *)made->y + output_bytes(made, bench);
    int64_t changed = 0;
    for (int32_t i = 0; i < BENCH_GUARD_BYTES; i++) changed += (before[i] != POISON) + (after[i] != POISON);
    return changed;
}

static epmoe_status_t summarise(bench_case_t *made, const bench_t *bench, case_result_t *result)
{
    int32_t iters = bench->options->iters;
    EPMOEI_CHECK(bench_max(bench->program->comm, made->times, iters));
    EPMOEI_CHECK(bench_max(bench->program->comm, made->stage_times, (int64_t)iters * EPMOE_STAGE_COUNT));
    double *column = NULL;
    epmoe_status_t status = epmoei_alloc_for((void **)&column, (int64_t)iters * 8, "times");
    EPMOEI_CHECK_GOTO(epmoe_comm_agree(bench->program->comm, status), done);
    for (int32_t stage = 0; stage < EPMOE_STAGE_COUNT; stage++) {
        for (int32_t i = 0; i < iters; i++) column[i] = made->stage_times[(int64_t)i * EPMOE_STAGE_COUNT + stage];
        result->stages_us[stage] = stats_median(column, iters);
    }
    result->us_median = stats_median(made->times, iters);
    result->us_min = made->times[0];
    result->us_max = made->times[iters - 1];
done:
    epmoei_free(column);
    return status;
}

epmoe_status_t case_run(bench_case_t *made, const bench_t *bench, case_result_t *result)
{
    const options_t *options = bench->options;
    epmoe_forward_args_t args = EPMOE_FORWARD_ARGS_INIT;
    args.num_tokens = made->num_tokens;
    args.x = made->x;
    args.y = made->y;
    args.logits = made->logits;
    epmoe_forward_args_t checked = args;
    checked.logits_out = made->logits_out;
    checked.ids_out = made->ids;
    checked.weights_out = made->weights;
    EPMOEI_CHECK(epmoe_layer_forward_args(bench->layer, &checked, NULL));
    memcpy(made->y_checked, made->y, (size_t)output_bytes(made, bench));

    bool sleeps = options->inject_sleep_rank == bench->program->rank;
    struct timespec nap = {options->inject_sleep_ms / 1000, options->inject_sleep_ms % 1000 * 1000000L};
    for (int32_t i = -options->warmup; i < options->iters; i++) {
        double stage_us[EPMOE_STAGE_COUNT] = {0};
        args.stage_us = stage_us;
        ceilings_flush(&bench->ceilings);
        EPMOEI_CHECK(epmoe_comm_agree(bench->program->comm, EPMOE_OK));
        double start = epmoei_now_seconds();
        if (sleeps) nanosleep(&nap, NULL);
        EPMOEI_CHECK(epmoe_layer_forward_args(bench->layer, &args, NULL));
        double us = 1e6 * (epmoei_now_seconds() - start);
        if (i < 0) continue;
        made->times[i] = us;
        memcpy(made->stage_times + (int64_t)i * EPMOE_STAGE_COUNT, stage_us, sizeof stage_us);
    }
    return summarise(made, bench, result);
}
