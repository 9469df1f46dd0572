#include "tools/tool_check.h"

#include "base/dtype.h"
#include "moe/checkpoint.h"
#include "tools/tool_util.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TRANSPORTS "auto,p2p,nccl,mpi"
static const epmoe_transport_t transports[] = {EPMOE_TRANSPORT_AUTO, EPMOE_TRANSPORT_P2P, EPMOE_TRANSPORT_NCCL,
                                               EPMOE_TRANSPORT_MPI};

static const tool_option_t options[] = {
    {"golden", "FILE", "recorded inputs and outputs (default DIR/golden.safetensors)"},
    {"layer", "N", "this layer only"},
    {"backend", TOOL_BACKENDS, "default auto"},
    {"dtype", "fp32,fp16,bf16", "of activations (default fp32 on the CPU, bf16 on a GPU)"},
    {"act", "none,fp8", "of experts in FP8: whether activations are quantised too (default none)"},
    {"wire", "dtype,fp8", "whether rows go to the experts quantised (default dtype: they do not)"},
    {"tol", "X",
     "largest rel_err (default 1e-5 in fp32, 2e-3 in fp16, 1e-2 in bf16; decoder layers 3e-6, 3e-3, 2e-2; --act fp8 "
     "and --wire fp8 8e-2)"},
    {"transport", TRANSPORTS, "between ranks (default auto)"},
    {"timeout", "S", "longest wait for another rank in seconds (default 30)"},
    {"format", TOOL_FORMATS, "default table"},
    {0},
};
static const char usage[] = "check DIR [--golden FILE] [--dtype D] [--tol X] ...";

/* The recorded outputs are of activations that were not quantised, neither in products nor on the wire. */
static const double fp8_tolerance = 8e-2;

/* As in --dtype. A decoder layer rounds to 16 bits at more places than its MoE block; in fp32 what adds up is the
 * chain. */
static const struct {
    epmoe_dtype_t dtype;
    double tolerance;
    double decoder_tolerance;
} dtypes[] = {{EPMOE_F32, 1e-5, 3e-6}, {EPMOE_F16, 2e-3, 3e-3}, {EPMOE_BF16, 1e-2, 2e-2}};

static int take(void *ctx, const char *option, const char *value)
{
    check_t *check = ctx;
    const program_t *program = check->program;
    if (!option) {
        if (check->dir)
            return program_error_once(program, PROGRAM_BAD_INPUT, "argument '%s' is unknown: usage: moe_tool %s", value,
                                      usage);
        check->dir = value;
        return PROGRAM_OK;
    }
    if (!strcmp(option, "golden")) {
        check->golden_path = value;
        return PROGRAM_OK;
    }
    if (!strcmp(option, "layer")) return tool_take_number(program, option, 0, INT32_MAX, value, &check->layer);
    if (!strcmp(option, "backend"))
        return tool_take_choice(program, option, TOOL_BACKENDS, value, &check->wanted_backend);
    if (!strcmp(option, "dtype"))
        return tool_take_choice(program, option, "fp32,fp16,bf16", value, &check->dtype_index);
    if (!strcmp(option, "act")) return tool_take_choice(program, option, "none,fp8", value, &check->fp8_activations);
    if (!strcmp(option, "wire")) return tool_take_choice(program, option, "dtype,fp8", value, &check->fp8_wire);
    if (!strcmp(option, "transport"))
        return tool_take_choice(program, option, TRANSPORTS, value, &check->transport_index);
    if (!strcmp(option, "timeout")) return tool_take_positive(program, option, value, &check->timeout_s);
    if (!strcmp(option, "format")) return tool_take_choice(program, option, TOOL_FORMATS, value, &check->format);
    return tool_take_positive(program, option, value, &check->tolerance);
}

/* --------------------------------------------------------------------------------------------------------- report */

static json_t *json_number(double value) { return isfinite(value) ? json_real(value) : json_null(); }

static void print_json(const char *item, const check_result_t *result)
{
    json_t *line = json_pack("{s:s, s:o, s:o, s:b, s:b}", "item", item, "rel_err", json_number(result->rel_err),
                             "max_abs", json_number(result->max_abs), "ids_equal", result->ids_equal, "ok", result->ok);
    if (result->near_tie) json_object_set_new(line, "near_tie", json_integer(result->near_tie));
    char *text = json_dumps(line, JSON_COMPACT | JSON_REAL_PRECISION(6));
    if (text) puts(text);
    free(text);
    json_decref(line);
}

void check_report(check_t *check, const char *item, double tolerance, const check_result_t *result)
{
    char ties[64] = "";
    if (!result->ok) {
        check->code = PROGRAM_FAILED;
        program_error_once(check->program, PROGRAM_FAILED, "%s differs: rel_err %.3g (tolerance %.3g), max_abs %.3g%s",
                           item, result->rel_err, tolerance, result->max_abs,
                           result->ids_equal ? "" : ", other experts are chosen");
    }
    if (check->program->rank) return;
    if (check->format == TOOL_FORMAT_JSON) {
        print_json(item, result);
        return;
    }
    if (!check->header_printed) printf("%-20s %10s %10s  %-9s %s\n", "item", "rel_err", "max_abs", "ids_equal", "ok");
    check->header_printed = true;
    if (result->near_tie) snprintf(ties, sizeof ties, "  (%d near ties left out)", result->near_tie);
    printf("%-20s %10.3g %10.3g  %-9s %s%s\n", item, result->rel_err, result->max_abs, result->ids_equal ? "yes" : "no",
           result->ok ? "yes" : "NO", ties);
}

static void report_part(check_t *check, int32_t layer, const char *part, const check_result_t *result)
{
    char item[64];
    snprintf(item, sizeof item, "layers.%d.%s", layer, part);
    check_report(check, item, check->tolerance, result);
}

/* ------------------------------------------------------------------------------------------------------- one layer */

epmoe_status_t check_selection_bias(const check_t *check, int32_t layer, int32_t num_experts, float *selection_bias)
{
    epmoei_layer_source_t source;
    EPMOEI_CHECK(epmoei_checkpoint_layer_source(check->checkpoint, layer, &source));
    const epmoei_view_t *bias = &source.selection_bias;
    for (int64_t e = 0; e < num_experts; e++)
        selection_bias[e] = bias->data ? epmoei_load(bias->data, bias->dtype, e * bias->col_stride) : 0;
    return EPMOE_OK;
}

/* What a rank does alone before the first collective call of a layer. */
static epmoe_status_t prepare(check_t *check, const golden_layer_t *layer, epmoe_layer_config_t *config,
                              golden_values_t *values, check_share_t *share)
{
    program_t *program = check->program;
    EPMOEI_CHECK(epmoe_checkpoint_layer_config(check->checkpoint, layer->layer, config));
    EPMOEI_CHECK(golden_read(layer, config, values));
    config->dtype = check->dtype;
    share->chunk = (int32_t)epmoei_ceil_div(values->num_tokens, program->size);
    int64_t first = epmoei_min64((int64_t)share->chunk * program->rank, values->num_tokens);
    share->count = (int32_t)epmoei_min64(share->chunk, values->num_tokens - first);
    config->max_tokens = share->count > 0 ? share->count : 1;

    EPMOEI_CHECK(check_share_make(share, check->backend, config, program->size));
    epmoei_from_f32(share->own.x, values->in + first * config->hidden, config->dtype,
                    (int64_t)share->count * config->hidden);
    EPMOEI_CHECK(check_share_send(share));

    return check_selection_bias(check, layer->layer, config->num_experts, share->selection_bias);
}

static epmoe_status_t load_layer(const check_t *check, int32_t index, epmoe_layer_t *layer)
{
    char what[48];
    const program_weights_t loading = {check->program, what};
    snprintf(what, sizeof what, "layer %d: loading weights", index);
    const epmoe_load_options_t load = program_weights_begin(&loading);
    const epmoe_status_t status = epmoe_layer_load_checkpoint(layer, check->checkpoint, index, &load);
    program_idle(check->program);
    return status;
}

static epmoe_status_t run_layer(check_t *check, epmoe_layer_t *layer, const golden_layer_t *golden,
                                const epmoe_layer_config_t *config, check_share_t *share)
{
    epmoe_comm_t *comm = check->program->comm;
    EPMOEI_CHECK(load_layer(check, golden->layer, layer));
    const check_rows_t *computed = &share->computed;
    epmoe_forward_args_t args = EPMOE_FORWARD_ARGS_INIT;
    args.num_tokens = share->count;
    args.x = computed->x;
    args.y = computed->y;
    if (config->num_experts) {
        args.logits_out = computed->logits;
        args.ids_out = computed->ids;
        args.weights_out = computed->weights;
    }
    EPMOEI_CHECK(epmoe_layer_forward_args(layer, &args, NULL));
    EPMOEI_CHECK(epmoe_comm_agree(comm, check_share_bring_home(share)));
    return check_share_gather(share, comm, config);
}

/* Every rank has all outputs and judges them alike; rank 0 reports. */
static void judge(check_t *check, int32_t layer, const epmoe_layer_config_t *config, const golden_values_t *values,
                  const check_share_t *share)
{
    check_outputs_t outputs = {share->all_y_f32, share->all.logits, share->all.weights, share->all.ids};
    check_result_t router = {.ids_equal = true}, moe;
    if (values->logits || values->ids) {
        check_router(config, config->has_selection_bias ? share->selection_bias : NULL, values, &outputs,
                     check->tolerance, share->left_out, &router);
        report_part(check, layer, "router", &router);
    }
    if (values->out) {
        check_moe(config, values, &outputs, check->tolerance, share->left_out, router.ids_equal, &moe);
        report_part(check, layer, "moe", &moe);
    }
}

static epmoe_status_t check_layer(check_t *check, const golden_layer_t *golden)
{
    epmoe_comm_t *comm = check->program->comm;
    epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
    golden_values_t values = {0};
    check_share_t share = {0};
    epmoe_layer_t *layer = NULL;
    epmoe_status_t status = epmoe_comm_agree(comm, prepare(check, golden, &config, &values, &share));
    config.fp8_activations = check->fp8_activations ? 1 : -1;
    if (check->fp8_wire) config.wire_dtype = EPMOE_F8_E4M3;
    if (status == EPMOE_OK) status = epmoe_layer_create(&config, comm, &layer);
    if (status == EPMOE_OK) status = run_layer(check, layer, golden, &config, &share);
    if (status == EPMOE_OK) judge(check, golden->layer, &config, &values, &share);
    epmoe_layer_destroy(layer);
    golden_values_free(&values);
    check_share_free(&share);
    return status;
}

/* ------------------------------------------------------------------------------------------------------------ all */

static epmoe_status_t open_files(check_t *check)
{
    char path[4096];
    if (!check->golden_path && snprintf(path, sizeof path, "%s/golden.safetensors", check->dir) >= (int)sizeof path)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "DIR is too long: expected less than %zu bytes", sizeof path);
    EPMOEI_CHECK(epmoe_checkpoint_open(check->dir, &check->checkpoint));
    return golden_open(check->golden_path ? check->golden_path : path, (int32_t)check->layer, &check->golden);
}

static epmoe_status_t check_all(check_t *check)
{
    program_t *program = check->program;
    epmoe_comm_config_t config = EPMOE_COMM_CONFIG_INIT;
    config.backend = check->backend;
    config.transport = transports[check->transport_index];
    config.device = -1;
    config.timeout_s = check->timeout_s;
    EPMOEI_CHECK(program_connect(program, &config));
    EPMOEI_CHECK(epmoe_comm_agree(program->comm, open_files(check)));
    EPMOEI_CHECK(epmoe_comm_agree(program->comm, check_decoders_begin(check)));
    for (int32_t i = 0; i < check->golden.num_layers; i++) {
        const golden_layer_t *layer = &check->golden.layers[i];
        if (layer->in) EPMOEI_CHECK(check_layer(check, layer));
        if (check->decoders && layer->layer_in) EPMOEI_CHECK(check_decoder_layer(check, layer));
    }
    if (check->decoders && check->golden.logits) EPMOEI_CHECK(check_logits(check));
    if (check->golden.unchecked[0])
        program_error_once(program, PROGRAM_OK, "not checked by this version: %s", check->golden.unchecked);
    return EPMOE_OK;
}

int tool_check(program_t *program, int argc, char **argv)
{
    check_t check = {.program = program, .layer = -1, .dtype_index = -1};
    int code = tool_parse(program, argc, argv, options, take, &check);
    if (code == TOOL_HELP) {
        tool_print_help(program, usage, options);
        return PROGRAM_OK;
    }
    if (code) return code;
    if (!check.dir) return program_error_once(program, PROGRAM_BAD_INPUT, "DIR is missing: usage: moe_tool %s", usage);

    epmoe_status_t status = epmoe_backend_resolve((epmoe_backend_t)check.wanted_backend, &check.backend);
    if (status != EPMOE_OK) return program_error_once(program, program_exit_code(status), "%s", epmoe_last_error());
    bool cuda = check.backend == EPMOE_BACKEND_CUDA;
    if (check.dtype_index < 0) check.dtype_index = cuda ? 2 : 0;
    check.dtype = dtypes[check.dtype_index].dtype;
    if (cuda && check.dtype == EPMOE_F32)
        return program_error_once(program, PROGRAM_NOT_SUPPORTED,
                                  "--dtype is fp32: on CUDA expected fp16 or bf16, or --backend cpu");
    check.decoder_tolerance = check.tolerance;
    if (!(check.tolerance > 0)) {
        check.tolerance = dtypes[check.dtype_index].tolerance;
        check.decoder_tolerance = dtypes[check.dtype_index].decoder_tolerance;
        if (check.fp8_activations || check.fp8_wire) check.tolerance = check.decoder_tolerance = fp8_tolerance;
    }

    status = check_all(&check);
    code = program_report(program, status);
    code = program_agree_on_code(program, code ? code : check.code);
    epmoei_free(check.chain);
    golden_close(&check.golden);
    epmoe_checkpoint_close(check.checkpoint);
    return code;
}
