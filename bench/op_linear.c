/* The projection to q, k and v of the model, or as many columns as these heads have: plain, and with an E4M3 weight and
 * x quantised by the call: x per token and the weight per row, or both in blocks of 128 columns. */
#include "bench/heads.h"
#include "bench/op_job.h"

#include "base/dtype.h"
#include "base/fp8.h"
#include "dense_layers/linear_op.h"
#include "kernels/random_weights.h"

/* The reference is plain loops: of a large product it computes the first rows. */
#define REFERENCE_PRODUCTS 4e8
#define REFERENCE_ROWS     64

static epmoe_status_t run_linear(const op_args_t *args, epmoe_stream_t stream)
{
    return epmoe_linear(&args->linear, stream);
}

static epmoe_status_t reference_linear(op_job_t *job)
{
    epmoe_linear_args_t args;
    EPMOEI_CHECK(epmoei_linear_check(&job->args.linear, &args));
    args.num_tokens = job->reference_rows;
    args.y = job->outputs[0].ref;
    return epmoei_linear_ref(&args, NULL);
}

static const size_t linear_pointers[] = {OP_AT(linear.x), OP_AT(linear.weight.data), OP_AT(linear.weight.scales),
                                         OP_AT(linear.y), OP_AT(linear.workspace),   0};

/* Codes are those of random values, which scales bring to the size of a plain weight's. */
static epmoe_status_t take_codes(op_job_t *job, epmoe_linear_args_t *args)
{
    enum { kPiece = 1 << 12 };
    const bool blocks = args->x_quant == EPMOE_GRANULARITY_BLOCK128;
    int64_t count = (int64_t)args->n * args->k, num_scales = args->n;
    if (blocks) num_scales = epmoei_ceil_div(args->n, 128) * epmoei_ceil_div(args->k, 128);
    float scale = epmoei_random_scale(EPMOEI_RANDOM_GATE, args->k), *scales;
    uint8_t *codes;
    EPMOEI_CHECK(op_take(job, (void **)&codes, count));
    EPMOEI_CHECK(op_take(job, (void **)&scales, num_scales * 4));
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < count; first += kPiece) {
        float values[kPiece];
        int64_t n = epmoei_min64(kPiece, count - first);
        epmoei_random_fill(values, EPMOE_F32, job->bench->options->seed, EPMOEI_RANDOM_ROUTER, 1, first, n, 1);
        for (int64_t i = 0; i < n; i++) codes[first + i] = epmoei_f32_to_e4m3(values[i]);
    }
    for (int64_t i = 0; i < num_scales; i++) scales[i] = scale * (i % 2 ? 1.0f : 0.75f);
    args->weight.format = EPMOE_FORMAT_FP8_BLOCK;
    if (!blocks) {
        args->weight.group_size = -1;
        args->weight.group_rows = 1;
    }
    args->weight.data = codes;
    args->weight.scales = scales;
    return EPMOE_OK;
}

/* x_quant 0: plain. */
static epmoe_status_t make_any(op_job_t *job, epmoe_granularity_t x_quant)
{
    heads_t heads;
    const epmoe_layer_config_t *config = &job->bench->config;
    epmoe_linear_args_t *args = &job->args.linear, checked;
    EPMOEI_CHECK(heads_of_bench(job->bench, &heads));
    *args = (epmoe_linear_args_t)EPMOE_LINEAR_ARGS_INIT;
    args->backend = job->bench->backend;
    args->num_tokens = job->num_tokens;
    args->n = (int32_t)(((int64_t)heads.heads + 2 * (int64_t)heads.kv_heads) * heads.head_dim);
    args->k = config->hidden;
    args->x_dtype = args->y_dtype = config->dtype;
    args->weight = (epmoe_weight_t)EPMOE_WEIGHT_INIT;
    int64_t rows = job->num_tokens, n = args->n, k = args->k;
    EPMOEI_CHECK(op_take_random(job, (void **)&args->x, config->dtype, rows * k, 0, 1));
    args->x_quant = x_quant;
    if (x_quant) {
        EPMOEI_CHECK(take_codes(job, args));
    } else {
        args->weight.format = epmoei_format_of_dtype(config->dtype);
        EPMOEI_CHECK(op_take_random(job, (void **)&args->weight.data, config->dtype, n * k, 1,
                                    epmoei_random_scale(EPMOEI_RANDOM_GATE, k)));
    }
    EPMOEI_CHECK(op_take_output(job, &args->y, args->y_dtype, rows, n));
    EPMOEI_CHECK(epmoe_linear_workspace_size(args, &args->workspace_bytes));
    if (args->workspace_bytes) EPMOEI_CHECK(op_take(job, &args->workspace, args->workspace_bytes));
    double affordable = REFERENCE_PRODUCTS / ((double)n * (double)k);
    int64_t most = affordable < 1 ? 1 : epmoei_min64(REFERENCE_ROWS, (int64_t)affordable);
    job->reference_rows = (int32_t)epmoei_min64(rows, most);
    EPMOEI_CHECK(op_take_host(job, (void **)&job->reference_index, REFERENCE_ROWS * 4));
    for (int32_t i = 0; i < job->reference_rows; i++) job->reference_index[i] = i;
    EPMOEI_CHECK(epmoei_linear_check(args, &checked));
    job->floor = epmoei_linear_floor(&checked);
    return EPMOE_OK;
}

static epmoe_status_t make_linear(op_job_t *job) { return make_any(job, (epmoe_granularity_t)0); }
static epmoe_status_t make_linear_fp8(op_job_t *job) { return make_any(job, EPMOE_GRANULARITY_TOKEN); }
static epmoe_status_t make_linear_fp8_blocks(op_job_t *job) { return make_any(job, EPMOE_GRANULARITY_BLOCK128); }

const op_kind_t op_linear = {"linear", make_linear, linear_pointers, run_linear, reference_linear, NULL};
const op_kind_t op_linear_fp8 = {"linear_fp8", make_linear_fp8, linear_pointers, run_linear, reference_linear, NULL};
const op_kind_t op_linear_fp8_blocks = {"linear_fp8_blocks", make_linear_fp8_blocks, linear_pointers,
                                        run_linear,          reference_linear,       NULL};
