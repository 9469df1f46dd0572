/* moe_layer_bench: see options.c for what it does and prints. */
#include "bench/agree.h"
#include "bench/bench.h"
#include "bench/exchange.h"
#include "bench/op.h"
#include "bench/placement.h"
#include "bench/plot.h"
#include "bench/report.h"

#include "base/device.h"
#include "base/dtype.h"
#include "kernels/kernel_table.h"
#include "moe/layer_weights.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* What is refused before any communicator is made. */
static int refuse(bench_t *bench)
{
    const options_t *options = bench->options;
    epmoe_status_t status = epmoe_backend_resolve(options->backend, &bench->backend);
    if (status != EPMOE_OK)
        return program_error_once(bench->program, program_exit_code(status), "--backend: %s", epmoe_last_error());
    bool cuda = bench->backend == EPMOE_BACKEND_CUDA;
    const char *format = options->weight_format ? bench_dtype_name(bench) : "";
    if (options->weight_format && options->num_ops)
        return program_error_once(bench->program, PROGRAM_NOT_SUPPORTED, "--dtype %s: --op takes bf16, fp16 or fp32",
                                  format);
    if (options->weight_format && options->checkpoint)
        return program_error_once(bench->program, PROGRAM_BAD_INPUT,
                                  "--dtype %s: a checkpoint's weights are as they are stored", format);
    if (options->graph > 0 && !cuda)
        return program_error_once(bench->program, PROGRAM_NOT_SUPPORTED,
                                  "--graph 1: the cpu backend has no graphs to replay");
    if (cuda && options->dtype == EPMOE_F32)
        return program_error_once(bench->program, PROGRAM_NOT_SUPPORTED,
                                  "--dtype fp32: the cuda backend computes in bf16 and fp16");
    if (!cuda && (options->transport == EPMOE_TRANSPORT_P2P || options->transport == EPMOE_TRANSPORT_NCCL))
        return program_error_once(bench->program, PROGRAM_NOT_SUPPORTED, "--transport %s: it needs the cuda backend",
                                  epmoe_transport_string(options->transport));
    bench->iters = options->iters > 0 ? options->iters : cuda ? 20 : 10;
    bench->warmup = options->warmup >= 0 ? options->warmup : cuda ? 5 : 3;
    return PROGRAM_OK;
}

/* Between ranks the nccl and mpi transports need the host in the middle of a forward. */
static epmoe_status_t choose_graph(bench_t *bench)
{
    epmoe_transport_t transport = epmoe_comm_transport(bench->program->comm);
    bool can = bench->backend == EPMOE_BACKEND_CUDA && (bench->program->size == 1 || transport == EPMOE_TRANSPORT_P2P);
    bench->graph = can && bench->options->graph != 0;
    if (bench->options->graph > 0 && !can)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "--graph 1: the %s transport cannot be captured with %d ranks",
                           epmoe_transport_string(transport), bench->program->size);
    return EPMOE_OK;
}

/* The checkpoint's layer to run: the one asked for, or the first that has experts. */
static epmoe_status_t choose_layer(bench_t *bench)
{
    const options_t *options = bench->options;
    epmoe_checkpoint_info_t info = EPMOE_CHECKPOINT_INFO_INIT;
    EPMOEI_CHECK(epmoe_checkpoint_get_info(bench->checkpoint, &info));
    int32_t first = options->layer >= 0 ? options->layer : 0;
    int32_t last = options->layer >= 0 ? options->layer : info.num_layers - 1;
    for (int32_t layer = first; layer <= last; layer++) {
        EPMOEI_CHECK(epmoe_checkpoint_layer_config(bench->checkpoint, layer, &bench->config));
        bench->reference.layer = layer;
        if (bench->config.num_experts > 0) return EPMOE_OK;
    }
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s: layer %d has no experts", options->checkpoint, last);
}

/* A routing that cannot be drawn is found before any weights are made. */
static epmoe_status_t check_routing(const bench_t *bench)
{
    const options_t *options = bench->options;
    for (int32_t i = 0; i < options->num_cases; i++) {
        int64_t total = 0;
        for (int32_t r = 0; r < bench->program->size; r++)
            total += options->num_per_rank ? options->tokens_per_rank[r] : options->tokens[i];
        EPMOEI_CHECK(routing_draw(&bench->routing, total, 0, 0, NULL));
    }
    return EPMOE_OK;
}

/* What --op is given in place of the model's. */
static epmoe_status_t take_shape(const options_t *options, epmoe_layer_config_t *config)
{
    if (options->hidden) config->hidden = options->hidden;
    if (options->intermediate) config->intermediate = options->intermediate;
    if (options->top_k > config->num_experts)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "--top-k is %d: expected at most %d, the model's experts",
                           options->top_k, config->num_experts);
    if (options->top_k) config->top_k = options->top_k;
    return EPMOE_OK;
}

static epmoe_status_t configure(bench_t *bench)
{
    const options_t *options = bench->options;
    if (options->checkpoint) {
        bench->model = options->checkpoint;
        EPMOEI_CHECK(epmoe_checkpoint_open(options->checkpoint, &bench->checkpoint));
        EPMOEI_CHECK(choose_layer(bench));
    } else {
        bench->model = options->model;
        EPMOEI_CHECK(epmoe_preset_config(options->model, &bench->config));
    }
    epmoe_layer_config_t *config = &bench->config;
    EPMOEI_CHECK(take_shape(options, config));
    config->dtype = options->dtype;
    if (!options->checkpoint) config->weight_format = options->weight_format;
    config->fp8_activations = options->fp8_activations;
    config->wire_dtype = options->wire_dtype;
    config->capacity = options->capacity;
    config->comm_sms = options->comm_sms;
    config->max_tokens = 1;
    for (int32_t i = 0; i < options->num_cases; i++) {
        int32_t tokens = options->num_per_rank ? options->tokens_per_rank[bench->program->rank] : options->tokens[i];
        config->max_tokens = tokens > config->max_tokens ? tokens : config->max_tokens;
    }
    bench->reference.config = config;
    bench->reference.weight_dtype = options->dtype;
    bench->reference.rounds_checkpoint = bench->backend == EPMOE_BACKEND_CUDA;
    bench->reference.seed = options->seed;
    bench->reference.checkpoint = bench->checkpoint;
    if (config->has_selection_bias) {
        EPMOEI_CHECK(
            epmoei_alloc_for((void **)&bench->selection_bias, (int64_t)config->num_experts * 4, "selection bias"));
        EPMOEI_CHECK(reference_selection_bias(&bench->reference, bench->selection_bias));
    }
    bench->routing = (routing_t){.kind = options->routing,
                                 .exponent = options->zipf_exponent,
                                 .path = options->routing_path,
                                 .seed = options->seed,
                                 .config = config,
                                 .selection_bias = bench->selection_bias};
    EPMOEI_CHECK(check_routing(bench));
    return options->decoder ? decoder_configure(bench) : EPMOE_OK;
}

/* One weight of each expert, so that every drawn one spoils its rows. */
static epmoe_status_t inject_nan(const bench_t *bench)
{
    const epmoei_packed_weights_t *weights = &bench->layer->weights;
    if (epmoei_format_is_quantised(weights->formats.down))
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "--inject-nan with weights in %s: expected plain ones",
                           epmoe_format_string(weights->formats.down));
    int64_t step = (int64_t)bench->config.hidden * bench->config.intermediate;
    epmoe_dtype_t dtype = epmoei_dtype_of_format(weights->formats.down);
    int64_t size = epmoe_dtype_size(dtype);
    float element;
    epmoei_store(&element, dtype, 0, NAN);
    for (int32_t e = 0; e < bench->layer->local_experts; e++)
        EPMOEI_CHECK(epmoei_memory_copy(bench->backend, (char *)weights->down + e * step * size, &element, size, NULL));
    return epmoei_stream_wait(bench->backend, NULL);
}

static epmoe_status_t make_layer(bench_t *bench)
{
    epmoe_comm_t *comm = bench->program->comm;
    EPMOEI_CHECK(epmoe_layer_create(&bench->config, comm, &bench->layer));
    if (bench->checkpoint) {
        const program_weights_t loading = {bench->program, "loading weights"};
        const epmoe_load_options_t load = program_weights_begin(&loading);
        return epmoe_layer_load_checkpoint(bench->layer, bench->checkpoint, bench->reference.layer, &load);
    }
    const program_weights_t making = {bench->program, "making random weights"};
    const epmoe_load_options_t options = program_weights_begin(&making);
    return epmoe_comm_agree(comm, epmoei_layer_random_weights(bench->layer, bench->options->seed, &options));
}

static epmoe_status_t make_weights(bench_t *bench)
{
    epmoe_comm_t *comm = bench->program->comm;
    epmoe_layer_memory_t memory = EPMOE_LAYER_MEMORY_INIT;
    EPMOEI_CHECK(bench->options->decoder ? decoder_make(bench) : make_layer(bench));
    program_idle(bench->program);
    if (bench->options->inject_nan) EPMOEI_CHECK(epmoe_comm_agree(comm, inject_nan(bench)));
    EPMOEI_CHECK(epmoe_comm_agree(
        comm, epmoe_layer_memory(&bench->config, bench->program->size, bench->program->rank, &memory)));
    bench->weight_bytes = memory.weight_bytes + (bench->run.decoder ? decoder_weight_bytes(&bench->run) : 0);
    return EPMOE_OK;
}

static epmoe_status_t run_case(bench_t *bench, int32_t index, int64_t *wrong)
{
    epmoe_status_t status;
    bench_case_t made;
    case_result_t result = {0};
    report_busy(bench, index, "drawing tokens");
    EPMOEI_CHECK_GOTO(case_create(&made, bench, index), done);
    report_busy(bench, index, "timing");
    EPMOEI_CHECK_GOTO(case_run(&made, bench, &result), done);
    EPMOEI_CHECK_GOTO(case_rate(&made, bench, &result), done);
    if (bench->options->check) {
        report_busy(bench, index, "checking against the reference");
        EPMOEI_CHECK_GOTO(case_verify(&made, bench, &result), done);
    }
    *wrong += result.wrong;
    program_idle(bench->program);
    EPMOEI_CHECK_GOTO(epmoe_comm_agree(bench->program->comm, report_case(bench, &made, &result)), done);
done:
    case_destroy(&made);
    return status;
}

static epmoe_status_t run_layer(bench_t *bench, int64_t *wrong)
{
    EPMOEI_CHECK(make_weights(bench));
    report_header(bench);
    for (int32_t i = 0; i < bench->options->num_cases; i++) EPMOEI_CHECK(run_case(bench, i, wrong));
    report_footer(bench, *wrong);
    return EPMOE_OK;
}

/* What the layer multiplies in. */
static epmoe_dtype_t product_dtype(const bench_t *bench)
{
    const epmoe_layer_config_t *config = &bench->config;
    bool fp8 = bench->backend == EPMOE_BACKEND_CUDA && epmoei_cuda_tier() == 90 && !bench->options->num_ops &&
               config->weight_format == EPMOE_FORMAT_FP8_BLOCK && config->fp8_activations >= 0;
    return fp8 ? EPMOE_F8_E4M3 : bench->options->dtype;
}

static epmoe_status_t make_barrier(bench_t *bench)
{
    epmoe_ep_config_t nothing = EPMOE_EP_CONFIG_INIT;
    if (bench->program->size == 1 || epmoe_comm_transport(bench->program->comm) != EPMOE_TRANSPORT_P2P) return EPMOE_OK;
    nothing.num_experts = nothing.top_k = 1;
    nothing.hidden = 8;
    nothing.dtype = EPMOE_BF16;
    return epmoe_ep_create(bench->program->comm, &nothing, &bench->barrier);
}

static epmoe_status_t run(bench_t *bench, int64_t *wrong)
{
    if (!bench->options->num_ops) return run_layer(bench, wrong);
    return options_exchange(bench->options) ? exchange_run(bench, wrong) : op_run(bench, wrong);
}

static int work(program_t *program, const options_t *options)
{
    epmoe_status_t status;
    bench_t bench = {.program = program, .options = options, .config = EPMOE_LAYER_CONFIG_INIT};
    int64_t wrong = 0;
    int code = refuse(&bench);
    if (code) return code;
    epmoe_comm_config_t comm = EPMOE_COMM_CONFIG_INIT;
    comm.transport = options->transport;
    comm.backend = options->backend;
    comm.device = -1;
    comm.timeout_s = options->timeout_s;
    status = program_connect(program, &comm);
    if (status != EPMOE_OK) return program_report(program, status);

    bool cuda = bench.backend == EPMOE_BACKEND_CUDA;
    EPMOEI_CHECK_GOTO(epmoe_comm_agree(program->comm, plot_begin(&bench)), done);
    EPMOEI_CHECK_GOTO(choose_graph(&bench), done);
    EPMOEI_CHECK_GOTO(epmoe_comm_agree(program->comm, configure(&bench)), done);
    EPMOEI_CHECK_GOTO(placement_configure(&bench), done);
    EPMOEI_CHECK_GOTO(epmoe_comm_agree(program->comm, cuda ? cuda_create(&bench.cuda) : EPMOE_OK), done);
    EPMOEI_CHECK_GOTO(ceilings_measure(&bench.ceilings, program, cuda ? &bench.cuda : NULL, product_dtype(&bench)),
                      done);
    EPMOEI_CHECK_GOTO(make_barrier(&bench), done);
    EPMOEI_CHECK_GOTO(run(&bench, &wrong), done);
done:
    program_idle(program);
    const epmoe_status_t drawn = plot_end(&bench, status == EPMOE_OK);
    if (status == EPMOE_OK) status = drawn;
    code = bench_report(program, status);
    if (!code && wrong) code = PROGRAM_FAILED;
    if (!bench.run.decoder) epmoe_layer_destroy(bench.layer);
    decoder_free(&bench.run);
    epmoe_ep_destroy(bench.barrier);
    epmoe_checkpoint_close(bench.checkpoint);
    ceilings_free(&bench.ceilings);
    cuda_destroy(&bench.cuda);
    epmoei_free(bench.selection_bias);
    placement_free(&bench);
    return program_agree_on_code(program, code);
}

int main(int argc, char **argv)
{
    static options_t options;
    program_t program;
    int code = program_start(&program, "moe_layer_bench", &argc, &argv);
    if (!code) code = options_parse(&options, &program, argc, argv);
    if (!code) {
        if (options.action == ACTION_BENCH)
            code = work(&program, &options);
        else if (program.rank == 0)
            options.action == ACTION_HELP ? options_print_help() : report_models();
    }
    return program_finish(&program, code);
}
