/* The ops on quantised values: activations to FP8 with a scale per 128 columns, and FP8 weights back to fp32. */
#include "bench/op_job.h"

#include "base/dtype.h"
#include "bench/random.h"
#include "kernels/dequant.h"
#include "kernels/quant_formats.h"
#include "kernels/quantize_fp8.h"
#include "kernels/random_quant.h"

static epmoe_status_t run_quantize(const op_args_t *args, epmoe_stream_t stream)
{
    return epmoe_quantize_fp8(&args->quantize, stream);
}

static epmoe_status_t reference_quantize(op_job_t *job)
{
    epmoe_quantize_fp8_args_t args;
    EPMOEI_CHECK(epmoei_quantize_fp8_check(&job->args.quantize, &args));
    args.q = job->outputs[0].ref;
    args.scale = job->outputs[1].ref;
    return epmoei_quantize_fp8_ref(&args, NULL);
}

static const size_t quantize_pointers[] = {OP_AT(quantize.x), OP_AT(quantize.q), OP_AT(quantize.scale), 0};

static epmoe_status_t make_quantize(op_job_t *job)
{
    const epmoe_layer_config_t *config = &job->bench->config;
    epmoe_quantize_fp8_args_t *args = &job->args.quantize;
    int64_t tokens = job->num_tokens, d = config->hidden;
    if (d % 4)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "op quantize_fp8: hidden is %lld: expected a multiple of 4",
                           (long long)d);
    *args = (epmoe_quantize_fp8_args_t)EPMOE_QUANTIZE_FP8_ARGS_INIT;
    args->backend = job->bench->backend;
    args->num_tokens = job->num_tokens;
    args->hidden = config->hidden;
    args->dtype = config->dtype;
    args->granularity = EPMOE_GRANULARITY_BLOCK128;
    EPMOEI_CHECK(op_take_random(job, (void **)&args->x, config->dtype, tokens * d, 0, 1));
    /* Four codes as one word, bit by bit. */
    EPMOEI_CHECK(op_take_output(job, &args->q, EPMOE_I32, tokens, d / 4));
    EPMOEI_CHECK(op_take_output(job, (void **)&args->scale, EPMOE_F32, tokens, epmoei_ceil_div(d, EPMOEI_FP8_COLUMNS)));
    epmoe_quantize_fp8_args_t checked;
    EPMOEI_CHECK(epmoei_quantize_fp8_check(args, &checked));
    job->floor = epmoei_quantize_fp8_floor(&checked);
    return EPMOE_OK;
}

static epmoe_status_t run_dequant(const op_args_t *args, epmoe_stream_t stream)
{
    return epmoe_dequant(&args->dequant, stream);
}

static epmoe_status_t reference_dequant(op_job_t *job)
{
    epmoe_dequant_args_t args;
    EPMOEI_CHECK(epmoei_dequant_check(&job->args.dequant, &args));
    args.w = job->outputs[0].ref;
    return epmoei_dequant_ref(&args, NULL);
}

static const size_t dequant_pointers[] = {OP_AT(dequant.weight.data), OP_AT(dequant.weight.scales), OP_AT(dequant.w),
                                          0};

/* The down weights of as many experts as there are tokens, at most eight. */
static epmoe_status_t make_dequant(op_job_t *job)
{
    const epmoe_layer_config_t *config = &job->bench->config;
    epmoe_dequant_args_t *args = &job->args.dequant;
    void *data, *scales;
    *args = (epmoe_dequant_args_t)EPMOE_DEQUANT_ARGS_INIT;
    args->backend = job->bench->backend;
    args->num_experts = (int32_t)epmoei_min64(job->num_tokens, 8);
    args->n = config->hidden;
    args->k = config->intermediate;
    args->weight = (epmoe_weight_t)EPMOE_WEIGHT_INIT;
    args->weight.format = EPMOE_FORMAT_FP8_BLOCK;
    int64_t experts = args->num_experts, n = args->n, k = args->k;
    EPMOEI_CHECK(epmoei_quant_check_weight(&args->weight, "weight", k));
    const int32_t group = args->weight.group_size;
    const epmoei_quant_sizes_t sizes = epmoei_quant_sizes(EPMOE_FORMAT_FP8_BLOCK, n, k, group, 0);
    EPMOEI_CHECK(op_take(job, &data, experts * sizes.data_bytes));
    EPMOEI_CHECK(op_take(job, &scales, experts * sizes.scales * (int64_t)sizeof(float)));
    for (int64_t e = 0; e < experts; e++) {
        const epmoei_random_quant_t random = {EPMOE_FORMAT_FP8_BLOCK, group,      job->bench->options->seed + RANDOM_OP,
                                              EPMOEI_RANDOM_DOWN,     (int32_t)e, k};
        const epmoei_pack_target_t target = {
            .shape = {.format = EPMOE_FORMAT_FP8_BLOCK, .group = group, .scales_dtype = EPMOE_F32},
            .data = (char *)data + e * sizes.data_bytes,
            .scales = (float *)scales + e * sizes.scales,
            .row_step = 1,
        };
        epmoei_random_quant_fill(&random, n, &target);
    }
    args->weight.data = data;
    args->weight.scales = scales;
    EPMOEI_CHECK(op_take_output(job, (void **)&args->w, EPMOE_F32, experts * n, k));
    epmoe_dequant_args_t checked;
    EPMOEI_CHECK(epmoei_dequant_check(args, &checked));
    job->floor = epmoei_dequant_floor(&checked);
    return EPMOE_OK;
}

const op_kind_t op_quantize_fp8 = {"quantize_fp8", make_quantize,      quantize_pointers,
                                   run_quantize,   reference_quantize, NULL};
const op_kind_t op_dequant = {"dequant", make_dequant, dequant_pointers, run_dequant, reference_dequant, NULL};
