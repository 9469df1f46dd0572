#include "bench/report.h"

#include "base/device.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

void report_models(void)
{
    static const char *const scorings[] = {"softmax", "sigmoid", "sqrt-softplus", "topk-softmax"};
    printf("%-16s %7s %12s %8s %6s %7s  %s\n", "model", "hidden", "intermediate", "experts", "top-k", "shared",
           "router");
    for (int32_t i = 0; epmoe_preset_name(i); i++) {
        epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
        if (epmoe_preset_config(epmoe_preset_name(i), &config) != EPMOE_OK) continue;
        printf("%-16s %7d %12d %8d %6d %7d  %s%s%s%s", epmoe_preset_name(i), config.hidden, config.intermediate,
               config.num_experts, config.top_k, config.shared_intermediate, scorings[config.scoring],
               config.weight_on_input ? " on the input" : "", config.renormalize ? ", renormalized" : "",
               config.has_selection_bias ? ", selection bias" : "");
        if (config.n_group > 1) printf(", %d of %d groups", config.topk_group, config.n_group);
        printf("\n");
    }
}

static const char *backend_name(const bench_t *bench) { return bench->backend == EPMOE_BACKEND_CUDA ? "cuda" : "cpu"; }

/* As --dtype spells it. */
static const char *dtype_name(const bench_t *bench)
{
    epmoe_dtype_t dtype = bench->config.dtype;
    return dtype == EPMOE_F32 ? "fp32" : dtype == EPMOE_F16 ? "fp16" : "bf16";
}

static void warn(const bench_t *bench, const char *text)
{
    if (bench->options->json)
        fprintf(stderr, "%s: warning: %s\n", bench->program->name, text);
    else
        printf("warning    %s\n", text);
}

static void print_routing(const bench_t *bench)
{
    const options_t *options = bench->options;
    printf("routing    %s", routing_kind_string(options->routing));
    if (options->routing == ROUTING_ZIPF) printf(" with exponent %g", options->zipf_exponent);
    if (options->routing == ROUTING_FILE) printf(" %s", options->routing_path);
    printf("%s\n", options->routing == ROUTING_ROUTER ? "'s own logits" : ", forced through the logits");
}

/* "memory read 4550.00 GB/s, bf16 GEMM 788.0 TFLOP/s". */
static void print_speeds(const bench_t *bench)
{
    const ceilings_t *ceilings = &bench->ceilings;
    printf("memory read %.2f GB/s, ", ceilings->read_bytes_per_s * 1e-9);
    if (bench->backend != EPMOE_BACKEND_CUDA)
        printf("fp32 GEMM %.1f GFLOP/s", ceilings->flops_per_s * 1e-9);
    else if (isfinite(ceilings->flops_per_s))
        printf("%s GEMM %.1f TFLOP/s", dtype_name(bench), ceilings->flops_per_s * 1e-12);
    else
        printf("GEMM unknown (built without cuBLASLt)");
}

static void print_device(const bench_t *bench)
{
    const epmoei_device_info_t *info = epmoei_device_current();
    int32_t most = bench->ceilings.ranks_per_device;
    if (bench->backend != EPMOE_BACKEND_CUDA || !info) return;
    printf("device     %s, %d SMs, %.0f MB of L2, %.1f GB; %d rank%s per device\n", info->name, info->num_sms,
           (double)info->l2_bytes * 1e-6, (double)info->memory_bytes * 1e-9, most, most == 1 ? "" : "s");
}

static void print_ceilings(const bench_t *bench)
{
    printf("ceilings   ");
    print_speeds(bench);
    printf(" for each rank while all run; empty graph ");
    if (bench->backend == EPMOE_BACKEND_CUDA)
        printf("%.2f us\n", bench->ceilings.empty_graph_us);
    else
        printf("n/a\n");
}

static void print_head(const bench_t *bench)
{
    const program_t *program = bench->program;
    const epmoe_layer_config_t *config = &bench->config;
    const ceilings_t *ceilings = &bench->ceilings;
    int32_t version = epmoe_version(), size = program->size;
    printf("epmoe %d.%d.%d, one MoE layer\n", version / 10000, version / 100 % 100, version % 100);
    printf("model      %s: hidden %d, intermediate %d, %d experts, top %d", bench->model, config->hidden,
           config->intermediate, config->num_experts, config->top_k);
    if (config->shared_intermediate) printf(", shared expert of %d", config->shared_intermediate);
    printf(", %s\n", dtype_name(bench));
    printf("ranks      %d on %d machine%s, %d thread%s in rank 0, backend %s (%s), transport %s\n", size,
           ceilings->num_machines, ceilings->num_machines == 1 ? "" : "s", program->num_threads,
           program->num_threads == 1 ? "" : "s", backend_name(bench), epmoe_backend_arch(bench->backend),
           epmoe_transport_string(epmoe_comm_transport(program->comm)));
    print_device(bench);
    if (bench->checkpoint)
        printf("weights    layer %d of the checkpoint", bench->reference.layer);
    else
        printf("weights    random, seed %llu", (unsigned long long)bench->options->seed);
    printf(", %.1f MB in rank 0\n", (double)bench->weight_bytes * 1e-6);
    print_routing(bench);
    print_ceilings(bench);
    printf("timing     us of the slowest rank, %d warm-up and %d timed iterations, caches flushed before each",
           bench->warmup, bench->iters);
    if (bench->backend == EPMOE_BACKEND_CUDA) printf(", %s", bench->graph ? "replay of a graph" : "without a graph");
    printf("\n");
}

static void report_warnings(const bench_t *bench)
{
    const ceilings_t *ceilings = &bench->ceilings;
    char text[256];
    if (ceilings->shares_cores) {
        snprintf(text, sizeof text, "ranks share cores (%d threads on %d cores): times mean little",
                 ceilings->most_threads, ceilings->cores);
        warn(bench, text);
    }
    if (ceilings->ranks_per_device > 1) {
        snprintf(text, sizeof text, "ranks share devices (up to %d on one): times mean nothing",
                 ceilings->ranks_per_device);
        warn(bench, text);
    }
    if (bench->warmup == 0) warn(bench, "no warm-up: the first iterations may include one-time costs");
}

void report_header(const bench_t *bench)
{
    if (bench->program->rank) return;
    if (!bench->options->json) print_head(bench);
    report_warnings(bench);
    if (bench->options->json) return;
    printf("\n%10s %10s %10s %10s", "tokens", "us median", "min", "max");
    for (int32_t stage = 0; stage < EPMOE_STAGE_COUNT; stage++)
        printf(" %9s", epmoe_stage_string((epmoe_stage_t)stage));
    printf(" %10s %8s %9s %9s %8s %8s %10s %8s %6s %9s\n", "tokens/s", "TFLOP/s", "wire GB/s", "logical", "load exp",
           "load rk", "floor us", "of floor", "wrong", "max err");
    fflush(stdout);
}

/* "16", or "0|5|1..." where the ranks differ. */
static void tokens_text(const bench_t *bench, const bench_case_t *made, char *text, size_t bytes)
{
    if (!bench->options->num_per_rank) {
        snprintf(text, bytes, "%d", made->tokens[0]);
        return;
    }
    size_t used = 0;
    for (int32_t r = 0; r < bench->program->size && used < bytes; r++)
        used += (size_t)snprintf(text + used, bytes - used, "%s%d", r ? "|" : "", made->tokens[r]);
}

static void check_texts(const case_result_t *result, char wrong[32], char error[32])
{
    snprintf(wrong, 32, result->checked ? "%lld" : "-", (long long)result->wrong);
    snprintf(error, 32, result->checked ? "%.2e" : "-", result->max_rel_err);
}

static void print_case(const bench_t *bench, const bench_case_t *made, const case_result_t *result)
{
    char tokens[64], wrong[32], error[32];
    tokens_text(bench, made, tokens, sizeof tokens);
    check_texts(result, wrong, error);
    printf("%10s %10.1f %10.1f %10.1f", tokens, result->us_median, result->us_min, result->us_max);
    for (int32_t stage = 0; stage < EPMOE_STAGE_COUNT; stage++) printf(" %9.1f", result->stages_us[stage]);
    printf(" %10.0f %8.4f %9.3f %9.3f %8.2f %8.2f %10.1f %8.3f %6s %9s\n", result->tokens_per_s, result->tflops,
           result->wire_gbps, result->logical_gbps, result->load_max_over_mean, result->rank_load_max_over_mean,
           result->floor_us, result->floor_fraction, wrong, error);
    fflush(stdout);
}

/* JSON has no infinity. */
static json_t *number(double value) { return isfinite(value) ? json_real(value) : json_null(); }

typedef struct json_field_t {
    const char *name;
    json_t *value;
} json_field_t;

/* Prints one line and takes the values over. */
static epmoe_status_t print_json(const json_field_t *fields, size_t count)
{
    json_t *object = json_object();
    int failed = 0;
    for (size_t i = 0; i < count; i++) failed |= json_object_set_new(object, fields[i].name, fields[i].value);
    char *text = failed ? NULL : json_dumps(object, JSON_COMPACT | JSON_REAL_PRECISION(9));
    json_decref(object);
    if (!text) return epmoei_fail(EPMOE_ERROR_OUT_OF_MEMORY, "the result's JSON cannot be built");
    puts(text);
    fflush(stdout);
    free(text);
    return EPMOE_OK;
}

/* Null on the CPU, as json_empty_graph. */
static json_t *json_device(const bench_t *bench)
{
    const epmoei_device_info_t *info = epmoei_device_current();
    return bench->backend == EPMOE_BACKEND_CUDA && info ? json_string(info->name) : json_null();
}

static json_t *json_empty_graph(const bench_t *bench)
{
    return bench->backend == EPMOE_BACKEND_CUDA ? number(bench->ceilings.empty_graph_us) : json_null();
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

static epmoe_status_t print_case_json(const bench_t *bench, const bench_case_t *made, const case_result_t *result)
{
    const options_t *options = bench->options;
    const ceilings_t *ceilings = &bench->ceilings;
    const json_field_t fields[] = {
        {"model", json_string(bench->model)},
        {"dtype", json_string(dtype_name(bench))},
        {"backend", json_string(backend_name(bench))},
        {"arch", json_string(epmoe_backend_arch(bench->backend))},
        {"ranks", json_integer(bench->program->size)},
        {"machines", json_integer(ceilings->num_machines)},
        {"threads", json_integer(bench->program->num_threads)},
        {"ranks_share_cores", json_boolean(ceilings->shares_cores)},
        {"device", json_device(bench)},
        {"ranks_per_device", json_integer(ceilings->ranks_per_device)},
        {"graph", json_boolean(bench->graph)},
        {"transport", json_string(epmoe_transport_string(epmoe_comm_transport(bench->program->comm)))},
        {"routing", json_string(routing_kind_string(options->routing))},
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
        {"gemm_ceiling_tflops", number(ceilings->flops_per_s * 1e-12)},
        {"empty_graph_us", json_empty_graph(bench)},
        {"checked_rows", json_integer(result->checked_rows)},
        {"wrong", result->checked ? json_integer(result->wrong) : json_null()},
        {"max_rel_err", result->checked ? number(result->max_rel_err) : json_null()},
    };
    return print_json(fields, sizeof fields / sizeof fields[0]);
}

epmoe_status_t report_case(const bench_t *bench, const bench_case_t *made, const case_result_t *result)
{
    if (bench->program->rank) return EPMOE_OK;
    if (bench->options->json) return print_case_json(bench, made, result);
    print_case(bench, made, result);
    return EPMOE_OK;
}

void report_op_header(const bench_t *bench)
{
    const epmoe_layer_config_t *config = &bench->config;
    report_warnings(bench);
    if (bench->options->json) return;
    printf("epmoe op %s at the shape of %s: hidden %d, intermediate %d, %d experts, top %d, %s\n", bench->options->op,
           bench->model, config->hidden, config->intermediate, config->num_experts, config->top_k, dtype_name(bench));
    print_device(bench);
    printf("backend    %s (%s), %d threads\n", backend_name(bench), epmoe_backend_arch(bench->backend),
           bench->program->num_threads);
    print_ceilings(bench);
    printf("\n");
    printf("%10s %10s %10s %10s %9s %8s %10s %8s %6s %9s\n", "tokens", "us median", "min", "max", "GB/s", "TFLOP/s",
           "floor us", "of floor", "wrong", "max err");
}

epmoe_status_t report_op(const bench_t *bench, int32_t num_tokens, const case_result_t *result)
{
    if (bench->options->json) {
        const json_field_t fields[] = {
            {"op", json_string(bench->options->op)},
            {"model", json_string(bench->model)},
            {"dtype", json_string(dtype_name(bench))},
            {"backend", json_string(backend_name(bench))},
            {"arch", json_string(epmoe_backend_arch(bench->backend))},
            {"threads", json_integer(bench->program->num_threads)},
            {"device", json_device(bench)},
            {"graph", json_boolean(bench->graph)},
            {"empty_graph_us", json_empty_graph(bench)},
            {"read_ceiling_gbps", number(bench->ceilings.read_bytes_per_s * 1e-9)},
            {"gemm_ceiling_tflops", number(bench->ceilings.flops_per_s * 1e-12)},
            {"iters", json_integer(bench->iters)},
            {"warmup", json_integer(bench->warmup)},
            {"tokens", json_integer(num_tokens)},
            {"us_median", number(result->us_median)},
            {"us_min", number(result->us_min)},
            {"us_max", number(result->us_max)},
            {"gbps", number(result->memory_gbps)},
            {"tflops", number(result->tflops)},
            {"floor_us", number(result->floor_us)},
            {"floor_fraction", number(result->floor_fraction)},
            {"wrong", result->checked ? json_integer(result->wrong) : json_null()},
            {"max_rel_err", result->checked ? number(result->max_rel_err) : json_null()},
        };
        return print_json(fields, sizeof fields / sizeof fields[0]);
    }
    char wrong[32], error[32];
    check_texts(result, wrong, error);
    printf("%10d %10.1f %10.1f %10.1f %9.3f %8.4f %10.1f %8.3f %6s %9s\n", num_tokens, result->us_median,
           result->us_min, result->us_max, result->memory_gbps, result->tflops, result->floor_us,
           result->floor_fraction, wrong, error);
    fflush(stdout);
    return EPMOE_OK;
}

void report_footer(const bench_t *bench, int64_t wrong)
{
    const options_t *options = bench->options;
    if (bench->program->rank || options->json) return;
    if (!options->check)
        printf("\nDONE: %d case%s, not checked\n", options->num_cases, options->num_cases == 1 ? "" : "s");
    else
        printf("\n%s: %d case%s, %lld wrong value%s\n", wrong ? "FAIL" : "PASS", options->num_cases,
               options->num_cases == 1 ? "" : "s", (long long)wrong, wrong == 1 ? "" : "s");
}

static bool shows_progress(const bench_t *bench) { return bench->program->rank == 0 && isatty(STDERR_FILENO); }

void report_busy(const bench_t *bench, const char *what)
{
    if (shows_progress(bench)) fprintf(stderr, "\r\033[K%s ...", what);
}

int32_t report_progress(void *ctx, int64_t done_bytes, int64_t total_bytes)
{
    const bench_t *bench = ctx;
    if (shows_progress(bench))
        fprintf(stderr, "\r\033[Kloading weights: %.0f of %.0f MB", (double)done_bytes * 1e-6,
                (double)total_bytes * 1e-6);
    return 0;
}

void report_idle(const bench_t *bench)
{
    if (shows_progress(bench)) fprintf(stderr, "\r\033[K");
}
