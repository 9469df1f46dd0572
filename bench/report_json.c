#include "bench/report.h"

#include "base/device.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* JSON has neither infinity nor NaN. */
static json_t *number(double value) { return isfinite(value) ? json_real(value) : json_null(); }

/* Null where it was not measured. */
static json_t *sustained(const ceilings_t *ceilings)
{
    const double flops = ceilings->sustained_flops_per_s;
    return flops > 0 ? number(flops * 1e-12) : json_null();
}

typedef struct json_field_t {
    const char *name;
    json_t *value;
} json_field_t;

/* Prints one line and takes the values over. */
static epmoe_status_t print_json(const json_field_t *fields, size_t count, FILE *to)
{
    json_t *object = json_object();
    int failed = 0;
    for (size_t i = 0; i < count; i++) failed |= json_object_set_new(object, fields[i].name, fields[i].value);
    char *text = failed ? NULL : json_dumps(object, JSON_COMPACT | JSON_REAL_PRECISION(9));
    json_decref(object);
    if (!text) return epmoei_fail(EPMOE_ERROR_OUT_OF_MEMORY, "the result's JSON cannot be built");
    fprintf(to, "%s\n", text);
    fflush(to);
    free(text);
    return EPMOE_OK;
}

/* Null on the CPU, as json_empty_graph and json_copy_ceiling. */
static json_t *json_device(const bench_t *bench)
{
    const epmoei_device_info_t *info = bench->backend == EPMOE_BACKEND_CUDA ? epmoei_device_current() : NULL;
    return info ? json_string(info->name) : json_null();
}

static json_t *json_empty_graph(const bench_t *bench)
{
    return bench->backend == EPMOE_BACKEND_CUDA ? number(bench->ceilings.empty_graph_us) : json_null();
}

static json_t *json_copy_ceiling(const bench_t *bench)
{
    const double speed = bench->ceilings.copy_bytes_per_s;
    return speed > 0 ? number(speed * 1e-9) : json_null();
}

static json_t *json_stages(const case_result_t *result)
{
    json_t *stages = json_object();
    int failed = 0;
    for (int32_t stage = 0; stage < EPMOE_STAGE_COUNT; stage++)
        failed |=
            json_object_set_new(stages, epmoe_stage_string((epmoe_stage_t)stage), number(result->stages_us[stage]));
    if (!failed) return stages;
    json_decref(stages);
    return NULL;
}

static json_t *json_tokens(const bench_t *bench, const bench_case_t *made)
{
    if (!bench->options->num_per_rank) return json_integer(made->tokens[0]);
    json_t *tokens = json_array();
    int failed = 0;
    for (int32_t r = 0; r < bench->program->size; r++)
        failed |= json_array_append_new(tokens, json_integer(made->tokens[r]));
    if (!failed) return tokens;
    json_decref(tokens);
    return NULL;
}

epmoe_status_t report_json_case(const bench_t *bench, const bench_case_t *made, const case_result_t *result, FILE *to)
{
    const options_t *options = bench->options;
    const epmoe_layer_config_t *config = &bench->config;
    const ceilings_t *ceilings = &bench->ceilings;
    const json_field_t fields[] = {
        {"model", json_string(bench->model)},
        {"hidden", json_integer(config->hidden)},
        {"intermediate", json_integer(config->intermediate)},
        {"num_experts", json_integer(config->num_experts)},
        {"top_k", json_integer(config->top_k)},
        {"shared_intermediate", json_integer(config->shared_intermediate)},
        {"dtype", json_string(bench_dtype_name(bench))},
        {"wire", json_string(bench_wire_name(bench))},
        {"comm_sms", json_integer(config->comm_sms)},
        {"backend", json_string(bench_backend_name(bench))},
        {"arch", json_string(epmoe_backend_arch(bench->backend))},
        {"ranks", json_integer(bench->program->size)},
        {"machines", json_integer(ceilings->num_machines)},
        {"threads", json_integer(bench->program->num_threads)},
        {"ranks_share_cores", json_boolean(ceilings->shares_cores)},
        {"device", json_device(bench)},
        {"ranks_per_device", json_integer(ceilings->ranks_per_device)},
        {"graph", json_boolean(bench->graph)},
        {"transport", json_string(epmoe_transport_string(epmoe_comm_transport(bench->program->comm)))},
        {"layer", json_string(!bench->run.decoder ? "moe"
                              : options->context  ? "decode"
                                                  : "prefill")},
        {"context", options->context ? json_integer(options->context) : json_null()},
        {"routing", json_string(routing_kind_string(options->routing))},
        {"placement", json_string(options->balanced ? "balanced" : "contiguous")},
        {"num_physical", json_integer(options->balanced ? config->num_physical : config->num_experts)},
        {"seed", json_integer((json_int_t)options->seed)},
        {"tokens_per_rank", json_tokens(bench, made)},
        {"iters", json_integer(bench->iters)},
        {"warmup", json_integer(bench->warmup)},
        {"us_median", number(result->us_median)},
        {"us_min", number(result->us_min)},
        {"us_max", number(result->us_max)},
        {"stages_us", json_stages(result)},
        {"tokens_per_s", number(result->tokens_per_s)},
        {"floor_us", number(result->floor_us)},
        {"floor_fraction", number(result->floor_fraction)},
        {"tflops", number(result->tflops)},
        {"gbps", number(result->wire_gbps)},
        {"gbps_logical", number(result->logical_gbps)},
        {"wire_bytes", number(result->wire_bytes)},
        {"memory_gbps", number(result->memory_gbps)},
        {"load_max_over_mean", number(result->load_max_over_mean)},
        {"rank_load_max_over_mean", number(result->rank_load_max_over_mean)},
        {"read_ceiling_gbps", number(ceilings->read_bytes_per_s * 1e-9)},
        {"copy_ceiling_gbps", json_copy_ceiling(bench)},
        {"gemm_ceiling_tflops", number(ceilings->flops_per_s * 1e-12)},
        {"gemm_sustained_tflops", sustained(ceilings)},
        {"empty_graph_us", json_empty_graph(bench)},
        {"checked_rows", json_integer(result->checked_rows)},
        {"wrong", result->checked ? json_integer(result->wrong) : json_null()},
        {"max_rel_err", result->checked ? number(result->max_rel_err) : json_null()},
    };
    return print_json(fields, sizeof fields / sizeof fields[0], to);
}

epmoe_status_t report_json_op(const bench_t *bench, const char *op, int32_t num_tokens, const case_result_t *result)
{
    const json_field_t fields[] = {
        {"op", json_string(op)},
        {"model", json_string(bench->model)},
        {"hidden", json_integer(bench->config.hidden)},
        {"intermediate", json_integer(bench->config.intermediate)},
        {"top_k", json_integer(bench->config.top_k)},
        {"dtype", json_string(bench_dtype_name(bench))},
        {"backend", json_string(bench_backend_name(bench))},
        {"arch", json_string(epmoe_backend_arch(bench->backend))},
        {"threads", json_integer(bench->program->num_threads)},
        {"device", json_device(bench)},
        {"graph", json_boolean(bench->graph)},
        {"empty_graph_us", json_empty_graph(bench)},
        {"read_ceiling_gbps", number(bench->ceilings.read_bytes_per_s * 1e-9)},
        {"copy_ceiling_gbps", json_copy_ceiling(bench)},
        {"gemm_ceiling_tflops", number(bench->ceilings.flops_per_s * 1e-12)},
        {"gemm_sustained_tflops", sustained(&bench->ceilings)},
        {"iters", json_integer(bench->iters)},
        {"warmup", json_integer(bench->warmup)},
        {"tokens", json_integer(num_tokens)},
        {"calls", json_integer(result->calls)},
        {"us_median", number(result->us_median)},
        {"us_min", number(result->us_min)},
        {"us_max", number(result->us_max)},
        {"gbps", number(result->memory_gbps)},
        {"tflops", number(result->tflops)},
        {"floor_us", number(result->floor_us)},
        {"floor_fraction", number(result->floor_fraction)},
        {"copy_fraction", number(result->copy_fraction)},
        {"wrong", result->checked ? json_integer(result->wrong) : json_null()},
        {"max_rel_err", result->checked ? number(result->max_rel_err) : json_null()},
    };
    return print_json(fields, sizeof fields / sizeof fields[0], stdout);
}
