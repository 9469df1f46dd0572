#include "bench/agree.h"
#include "bench/bench.h"
#include "bench/random.h"
#include "bench/stats.h"

#include "base/device.h"
#include "base/dtype.h"

#include <math.h>
#include <string.h>
#include <time.h>

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
            for (int64_t c = 0; c < d; c++) epmoei_store(made->x.host, bench->config.dtype, t * d + c, (float)row[c]);
        }
        epmoei_free(row);
    }
    if (failed) return epmoei_fail(EPMOE_ERROR_OUT_OF_MEMORY, "%lld bytes for an input row", (long long)d * 8);
    return buffer_upload(&made->x);
}

static int64_t output_bytes(const bench_case_t *made, const bench_t *bench)
{
    return (int64_t)made->num_tokens * bench->config.hidden * epmoe_dtype_size(bench->config.dtype);
}

static epmoe_status_t allocate(bench_case_t *made, const bench_t *bench)
{
    epmoe_backend_t backend = bench->backend;
    int64_t tokens = made->num_tokens, slots = tokens * bench->config.top_k, bytes = output_bytes(made, bench);
    int64_t logits = tokens * bench->config.num_experts, iters = bench->iters;
    EPMOEI_CHECK(buffer_create(&made->x, backend, bytes, "x"));
    EPMOEI_CHECK(buffer_create(&made->y, backend, bytes, "y"));
    EPMOEI_CHECK(buffer_create(&made->logits_out, backend, logits * 4, "logits"));
    EPMOEI_CHECK(buffer_create(&made->ids, backend, slots * 4, "ids"));
    EPMOEI_CHECK(buffer_create(&made->weights, backend, slots * 4, "weights"));
    EPMOEI_CHECK(epmoei_alloc_for(&made->y_checked, bytes, "y"));
    EPMOEI_CHECK(epmoei_alloc_for((void **)&made->times, iters * 8, "times"));
    EPMOEI_CHECK(epmoei_alloc_for((void **)&made->stage_times, iters * EPMOE_STAGE_COUNT * 8, "times"));
    memset(made->stage_times, 0, (size_t)iters * EPMOE_STAGE_COUNT * 8);
    return EPMOE_OK;
}

static epmoe_status_t force_routing(bench_case_t *made, const bench_t *bench)
{
    int64_t tokens = made->num_tokens;
    if (bench->routing.kind == ROUTING_ROUTER) return EPMOE_OK;
    EPMOEI_CHECK(epmoei_alloc_for((void **)&made->forced_ids, tokens * bench->config.top_k * 4, "forced ids"));
    EPMOEI_CHECK(buffer_create(&made->logits, bench->backend, tokens * bench->config.num_experts * 4, "forced logits"));
    EPMOEI_CHECK(
        routing_draw(&bench->routing, made->total_tokens, made->first_token, made->num_tokens, made->forced_ids));
    EPMOEI_CHECK(
        routing_logits(&bench->routing, made->first_token, made->num_tokens, made->forced_ids, made->logits.host));
    return buffer_upload(&made->logits);
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
    if (status == EPMOE_OK && bench->run.decoder) status = decoder_batch_create(&made->batch, bench, made->num_tokens);
    return epmoe_comm_agree(bench->program->comm, status);
}

void case_destroy(bench_case_t *made)
{
    epmoei_free(made->tokens);
    epmoei_free(made->forced_ids);
    buffer_destroy(&made->x);
    buffer_destroy(&made->y);
    buffer_destroy(&made->logits);
    buffer_destroy(&made->logits_out);
    buffer_destroy(&made->ids);
    buffer_destroy(&made->weights);
    decoder_batch_destroy(&made->batch);
    epmoei_free(made->y_checked);
    epmoei_free(made->times);
    epmoei_free(made->stage_times);
    *made = (bench_case_t){0};
}

int64_t case_guards_changed(const bench_case_t *made)
{
    return buffer_guards_changed(&made->x) + buffer_guards_changed(&made->y) + buffer_guards_changed(&made->logits) +
           buffer_guards_changed(&made->logits_out) + buffer_guards_changed(&made->ids) +
           buffer_guards_changed(&made->weights) + decoder_batch_guards_changed(&made->batch);
}

static epmoe_status_t summarise(bench_case_t *made, const bench_t *bench, case_result_t *result)
{
    int32_t iters = bench->iters;
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

typedef struct forward_t {
    const bench_t *bench;
    const bench_case_t *made;
    epmoe_forward_args_t args;
} forward_t;

static epmoe_status_t run_decoder(const forward_t *forward, epmoe_stream_t stream, void *const *events)
{
    const epmoe_forward_args_t *from = &forward->args;
    epmoe_decoder_forward_args_t args = decoder_batch_args(&forward->made->batch, from->num_tokens);
    args.max_rank_tokens = from->max_rank_tokens;
    args.x = from->x;
    args.y = from->y;
    args.logits = from->logits;
    args.logits_out = from->logits_out;
    args.ids_out = from->ids_out;
    args.weights_out = from->weights_out;
    args.stage_us = from->stage_us;
    args.stage_events = events;
    return epmoe_decoder_forward(forward->bench->run.decoder, &args, stream);
}

static epmoe_status_t run_forward(void *ctx, epmoe_stream_t stream, void *const *events)
{
    const forward_t *forward = ctx;
    epmoe_forward_args_t args = forward->args;
    if (forward->bench->run.decoder) return run_decoder(forward, stream, events);
    args.stage_events = events;
    return epmoe_layer_forward_args(forward->bench->layer, &args, stream);
}

/* The run that is checked: never a graph, and with the router's outputs. */
static epmoe_status_t run_checked(bench_case_t *made, const bench_t *bench, const forward_t *forward)
{
    forward_t checked = *forward;
    checked.args.logits_out = made->logits_out.run;
    checked.args.ids_out = made->ids.run;
    checked.args.weights_out = made->weights.run;
    EPMOEI_CHECK(run_forward(&checked, bench->cuda.stream, NULL));
    EPMOEI_CHECK(epmoei_stream_wait(bench->backend, bench->cuda.stream));
    buffer_t *const outputs[] = {&made->y, &made->logits_out, &made->ids, &made->weights};
    for (size_t i = 0; i < sizeof outputs / sizeof outputs[0]; i++) EPMOEI_CHECK(buffer_download(outputs[i]));
    memcpy(made->y_checked, made->y.host, (size_t)made->y.bytes);
    return buffer_poison(&made->y);
}

static epmoe_status_t time_cpu(bench_case_t *made, const bench_t *bench, forward_t *forward, const struct timespec *nap)
{
    for (int32_t i = -bench->warmup; i < bench->iters; i++) {
        double stage_us[EPMOE_STAGE_COUNT] = {0};
        forward->args.stage_us = stage_us;
        ceilings_flush(&bench->ceilings);
        EPMOEI_CHECK(epmoe_comm_agree(bench->program->comm, EPMOE_OK));
        double start = epmoei_now_seconds();
        if (nap) nanosleep(nap, NULL);
        EPMOEI_CHECK(run_forward(forward, NULL, NULL));
        double us = 1e6 * (epmoei_now_seconds() - start);
        if (i < 0) continue;
        made->times[i] = us;
        memcpy(made->stage_times + (int64_t)i * EPMOE_STAGE_COUNT, stage_us, sizeof stage_us);
    }
    return EPMOE_OK;
}

/* y of the last timed run, and the guard bands of what it read. */
static epmoe_status_t download_timed(bench_case_t *made)
{
    EPMOEI_CHECK(epmoei_error_word_check());
    EPMOEI_CHECK(buffer_download(&made->y));
    EPMOEI_CHECK(buffer_download(&made->x));
    EPMOEI_CHECK(decoder_batch_download(&made->batch));
    return buffer_download(&made->logits);
}

static epmoe_status_t time_cuda(bench_case_t *made, const bench_t *bench, forward_t *forward,
                                const struct timespec *nap)
{
    cuda_timing_t timing = {.run = run_forward,
                            .ctx = forward,
                            .graph = bench->graph,
                            .flush = true,
                            .warmup = bench->warmup,
                            .iters = bench->iters,
                            .comm = bench->program->comm,
                            .barrier = bench->barrier,
                            .nap = nap};
    EPMOEI_CHECK(cuda_time(&bench->cuda, &timing, made->times));
    epmoe_status_t status = download_timed(made);
    EPMOEI_CHECK(epmoe_comm_agree(bench->program->comm, status));
    return cuda_time_stages(&bench->cuda, &timing, made->stage_times);
}

epmoe_status_t case_run(bench_case_t *made, const bench_t *bench, case_result_t *result)
{
    const options_t *options = bench->options;
    forward_t forward = {.bench = bench, .made = made, .args = EPMOE_FORWARD_ARGS_INIT};
    forward.args.num_tokens = made->num_tokens;
    for (int32_t r = 0; r < bench->program->size; r++)
        if (made->tokens[r] > forward.args.max_rank_tokens) forward.args.max_rank_tokens = made->tokens[r];
    forward.args.x = made->x.run;
    forward.args.y = made->y.run;
    forward.args.logits = made->logits.run;
    EPMOEI_CHECK(epmoe_comm_agree(bench->program->comm, run_checked(made, bench, &forward)));

    struct timespec nap = {options->inject_sleep_ms / 1000, options->inject_sleep_ms % 1000 * 1000000L};
    const struct timespec *own_nap = options->inject_sleep_rank == bench->program->rank ? &nap : NULL;
    if (bench->backend == EPMOE_BACKEND_CUDA)
        EPMOEI_CHECK(time_cuda(made, bench, &forward, own_nap));
    else
        EPMOEI_CHECK(time_cpu(made, bench, &forward, own_nap));
    return summarise(made, bench, result);
}
