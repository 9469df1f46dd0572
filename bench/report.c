#include "bench/report.h"

#include "base/device.h"

#include <math.h>
#include <stdio.h>

void report_models(void)
{
    static const char *const scorings[] = {"softmax", "sigmoid", "sqrt-softplus", "topk-softmax", "sparse-mixer"};
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
    if (ceilings->copy_bytes_per_s > 0) printf("copy %.2f GB/s, ", ceilings->copy_bytes_per_s * 1e-9);
    if (bench->backend != EPMOE_BACKEND_CUDA)
        printf("fp32 GEMM %.1f GFLOP/s", ceilings->flops_per_s * 1e-9);
    else if (isfinite(ceilings->flops_per_s))
        printf("%s GEMM %.1f TFLOP/s (%.1f sustained)", epmoe_dtype_string(bench->options->dtype),
               ceilings->flops_per_s * 1e-12, ceilings->sustained_flops_per_s * 1e-12);
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

static void print_attention(const bench_t *bench)
{
    const epmoe_decoder_config_t *config = &bench->run.decoder->shape.config;
    printf("attention  %d heads, ", config->num_heads);
    if (config->attention == EPMOE_ATTENTION_MLA)
        printf("MLA with a latent of %d and %d rotated columns", config->kv_latent, config->rope_dim);
    else
        printf("%d in the cache, of %d columns", config->num_kv_heads, config->head_dim);
    if (config->window) printf(", window %d", config->window);
    if (bench->options->context)
        printf("; one step of T sequences of %d tokens each\n", bench->options->context);
    else
        printf("; prefill of one sequence of T tokens\n");
}

static void print_head(const bench_t *bench)
{
    const program_t *program = bench->program;
    const epmoe_layer_config_t *config = &bench->config;
    const ceilings_t *ceilings = &bench->ceilings;
    int32_t version = epmoe_version(), size = program->size;
    printf("epmoe %d.%d.%d, one %s layer\n", version / 10000, version / 100 % 100, version % 100,
           bench->run.decoder ? "decoder" : "MoE");
    printf("model      %s: hidden %d, intermediate %d, %d experts, top %d", bench->model, config->hidden,
           config->intermediate, config->num_experts, config->top_k);
    if (config->shared_intermediate) printf(", shared expert of %d", config->shared_intermediate);
    printf(", %s%s\n", bench_dtype_name(bench), bench->options->wire_dtype ? ", x to the experts in fp8" : "");
    if (bench->run.decoder) print_attention(bench);
    printf("ranks      %d on %d machine%s, %d thread%s in rank 0, backend %s (%s), transport %s\n", size,
           ceilings->num_machines, ceilings->num_machines == 1 ? "" : "s", program->num_threads,
           program->num_threads == 1 ? "" : "s", bench_backend_name(bench), epmoe_backend_arch(bench->backend),
           epmoe_transport_string(epmoe_comm_transport(program->comm)));
    print_device(bench);
    if (bench->checkpoint)
        printf("weights    layer %d of the checkpoint", bench->reference.layer);
    else
        printf("weights    random, seed %llu", (unsigned long long)bench->options->seed);
    printf(", %.1f MB in rank 0\n", (double)bench->weight_bytes * 1e-6);
    print_routing(bench);
    if (bench->placement)
        printf("placement  balanced: %d experts on all ranks, copies included\n", bench->config.num_physical);
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

/* The attention comes last. */
static int32_t num_stages(const bench_t *bench)
{
    return bench->run.decoder ? EPMOE_STAGE_COUNT : EPMOE_STAGE_ATTENTION;
}

void report_header(const bench_t *bench)
{
    if (bench->program->rank) return;
    if (!bench->options->json) print_head(bench);
    report_warnings(bench);
    if (bench->options->json) return;
    printf("\n%10s %10s %10s %10s", "tokens", "us median", "min", "max");
    for (int32_t stage = 0; stage < num_stages(bench); stage++)
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
    for (int32_t stage = 0; stage < num_stages(bench); stage++) printf(" %9.1f", result->stages_us[stage]);
    printf(" %10.0f %8.4f %9.3f %9.3f %8.2f %8.2f %10.1f %8.3f %6s %9s\n", result->tokens_per_s, result->tflops,
           result->wire_gbps, result->logical_gbps, result->load_max_over_mean, result->rank_load_max_over_mean,
           result->floor_us, result->floor_fraction, wrong, error);
    fflush(stdout);
}

epmoe_status_t report_case(const bench_t *bench, const bench_case_t *made, const case_result_t *result)
{
    if (bench->program->rank) return EPMOE_OK;
    if (bench->plot) EPMOEI_CHECK(report_json_case(bench, made, result, bench->plot));
    if (bench->options->json) return report_json_case(bench, made, result, stdout);
    print_case(bench, made, result);
    return EPMOE_OK;
}

void report_op_header(const bench_t *bench)
{
    const epmoe_layer_config_t *config = &bench->config;
    if (bench->program->rank) return;
    report_warnings(bench);
    if (bench->options->json) return;
    printf("epmoe ops at the shape of %s: hidden %d, intermediate %d, %d experts, top %d, %s\n", bench->model,
           config->hidden, config->intermediate, config->num_experts, config->top_k, bench_dtype_name(bench));
    print_device(bench);
    printf("backend    %s (%s), %d threads\n", bench_backend_name(bench), epmoe_backend_arch(bench->backend),
           bench->program->num_threads);
    print_ceilings(bench);
    if (options_exchange(bench->options)) { /* it has a table of its own */
        printf("\n");
        return;
    }
    printf("timing     us of a call, %d warm-up and %d timed iterations, caches flushed before each%s\n\n",
           bench->warmup, bench->iters,
           bench->graph ? ", replay of a graph of that many calls, each on memory of its own" : "");
    printf("%-16s %7s %8s %6s %10s %10s %10s %9s %8s %10s %8s %8s %6s %9s\n", "op", "hidden", "tokens", "calls",
           "us median", "min", "max", "GB/s", "TFLOP/s", "floor us", "of floor", "of copy", "wrong", "max err");
}

epmoe_status_t report_op(const bench_t *bench, const char *op, int32_t num_tokens, const case_result_t *result)
{
    if (bench->options->json) return report_json_op(bench, op, num_tokens, result);
    char wrong[32], error[32], copy[32] = "-";
    check_texts(result, wrong, error);
    if (isfinite(result->copy_fraction)) snprintf(copy, sizeof copy, "%.3f", result->copy_fraction);
    printf("%-16s %7d %8d %6d %10.2f %10.2f %10.2f %9.3f %8.4f %10.2f %8.3f %8s %6s %9s\n", op, bench->config.hidden,
           num_tokens, result->calls, result->us_median, result->us_min, result->us_max, result->memory_gbps,
           result->tflops, result->floor_us, result->floor_fraction, copy, wrong, error);
    fflush(stdout);
    return EPMOE_OK;
}

void report_footer(const bench_t *bench, int64_t wrong)
{
    const options_t *options = bench->options;
    if (bench->program->rank || options->json) return;
    int32_t cases = options->num_cases * (options->num_ops ? options->num_ops : 1);
    if (!options->check)
        printf("\nDONE: %d case%s, not checked\n", cases, cases == 1 ? "" : "s");
    else
        printf("\n%s: %d case%s, %lld wrong value%s\n", wrong ? "FAIL" : "PASS", cases, cases == 1 ? "" : "s",
               (long long)wrong, wrong == 1 ? "" : "s");
}

void report_busy(const bench_t *bench, int32_t index, const char *what)
{
    program_busy(bench->program, "case %d of %d: %s ...", index + 1, bench->options->num_cases, what);
}
