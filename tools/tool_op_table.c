#include "tools/tool_op.h"
#include "tools/tool_op_dense.h"

#include "base/device.h"
#include "base/dtype.h"

#define SCORINGS     "softmax,sigmoid,sqrtsoftplus,topk_softmax,sparse_mixer" /* = epmoe_scoring_t */
#define GROUP_SCORES "top2,max"                                               /* = epmoe_group_score_t */
#define ACTIVATIONS  "silu,gelu,gelu_tanh,swiglu_oai"                         /* = epmoe_activation_t */
#define BOOLEAN      "0,1"

static epmoe_status_t check_format(const op_context_t *context)
{
    if (op_number(context, "act") && op_format(context) != EPMOE_FORMAT_FP8_BLOCK)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "act is fp8: expected none, or format=fp8_block");
    return EPMOE_OK;
}

static epmoe_status_t run_topk(op_context_t *context)
{
    const op_value_t *logits = op_tensor(context, "logits");
    epmoe_topk_args_t args = EPMOE_TOPK_ARGS_INIT;
    args.backend = op_backend(context);
    args.num_tokens = op_dim(context, 'T');
    args.num_experts = op_dim(context, 'E');
    args.top_k = op_number(context, "k");
    args.logits_dtype = logits->dtype;
    args.logits = logits->data;
    args.selection_bias = op_tensor(context, "bias")->data;
    args.scoring = (epmoe_scoring_t)op_number(context, "scoring");
    args.renormalize = op_number(context, "renormalize");
    args.scale = op_real(context, "scale");
    args.n_group = op_number(context, "n_group");
    args.topk_group = op_number(context, "topk_group");
    args.group_score = (epmoe_group_score_t)op_number(context, "group_score");
    args.jitter = op_real(context, "jitter");
    /* Before memory of that size is asked for. */
    if (args.top_k > args.num_experts || args.top_k > EPMOE_MAX_TOP_K)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "k is %d: expected 1 to %d (E is %d)", args.top_k,
                           args.num_experts < EPMOE_MAX_TOP_K ? args.num_experts : EPMOE_MAX_TOP_K, args.num_experts);
    args.ids = op_output(context, "ids", EPMOE_I32, OP_SHAPE(args.num_tokens, args.top_k));
    args.weights = op_output(context, "weights", EPMOE_F32, OP_SHAPE(args.num_tokens, args.top_k));
    return args.ids && args.weights ? epmoe_topk(&args, NULL) : OP_NO_MEMORY;
}

static epmoe_status_t run_align(op_context_t *context)
{
    epmoe_align_args_t args = EPMOE_ALIGN_ARGS_INIT;
    args.backend = op_backend(context);
    args.num_tokens = op_dim(context, 'T');
    args.top_k = op_dim(context, 'k');
    args.num_experts = op_number(context, "num_experts");
    args.block_size = op_number(context, "block");
    args.ids = op_tensor(context, "ids")->data;
    args.expert_map = op_tensor(context, "expert_map")->data;
    int64_t padded = epmoe_align_max_padded(args.num_tokens, args.top_k, args.num_experts, args.block_size);
    if (padded < 0)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                           "num_experts is %d, block is %d, ids is [%d,%d]: expected 1 to %d experts and at most %d "
                           "padded rows",
                           args.num_experts, args.block_size, args.num_tokens, args.top_k, EPMOE_MAX_EXPERTS,
                           INT32_MAX);
    EPMOEI_CHECK(epmoe_align_workspace_size(&args, &args.workspace_bytes));
    args.workspace = op_scratch(context, args.workspace_bytes);
    args.sorted_ids = op_output(context, "sorted_ids", EPMOE_I32, OP_SHAPE(padded));
    args.expert_ids = op_output(context, "expert_ids", EPMOE_I32, OP_SHAPE(padded / args.block_size));
    args.num_post_padded = op_output(context, "num_post_padded", EPMOE_I32, OP_SHAPE(1));
    if (!args.workspace || !args.sorted_ids || !args.expert_ids || !args.num_post_padded) return OP_NO_MEMORY;
    return epmoe_align_block_size(&args, NULL);
}

/* expert_offsets[e] = rows before expert e. */
static epmoe_status_t sum_counts(const int32_t *counts, int32_t num_experts, int32_t rows, int32_t *offsets)
{
    int64_t sum = 0;
    offsets[0] = 0;
    for (int32_t e = 0; e < num_experts; e++) {
        if (counts[e] < 0)
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "counts[%d] is %d: expected 0 or more", e, counts[e]);
        sum += counts[e];
        if (sum > rows)
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                               "counts sum to %lld at expert %d: expected at most the %d rows of x", (long long)sum, e,
                               rows);
        offsets[e + 1] = (int32_t)sum;
    }
    return EPMOE_OK;
}

/* Rows past the last group are not the op's to write: in the file they are zeros. */
static epmoe_status_t clear_rows(const epmoe_grouped_gemm_args_t *args, int32_t first)
{
    int64_t row_bytes = (int64_t)args->n * epmoe_dtype_size(args->y_dtype);
    return epmoei_memory_set(args->backend, (char *)args->y + first * row_bytes, 0,
                             (args->max_rows - first) * row_bytes, NULL);
}

static epmoe_status_t run_grouped_gemm(op_context_t *context)
{
    const op_value_t *x = op_tensor(context, "x");
    epmoe_grouped_gemm_args_t args = EPMOE_GROUPED_GEMM_ARGS_INIT;
    args.backend = op_backend(context);
    args.num_experts = op_dim(context, 'E');
    args.k = op_dim(context, 'K');
    args.max_rows = op_dim(context, 'R');
    args.x_dtype = x->dtype;
    args.x = x->data;
    args.activation = EPMOE_ACTIVATION_NONE;
    args.y_dtype = x->dtype;
    op_projection_t projection = {
        .plain = "w", .prefix = "", .stacked = true, .experts = args.num_experts, .rows = -1, .cols = args.k};
    EPMOEI_CHECK(op_take_projection(context, &projection, &args.weight));
    args.n = (int32_t)projection.rows;
    args.fp8_activations = op_number(context, "act");
    int64_t offsets_bytes = ((int64_t)args.num_experts + 1) * 4;
    int32_t *offsets = op_host_scratch(context, offsets_bytes);
    if (!offsets) return OP_NO_MEMORY;
    EPMOEI_CHECK(sum_counts(op_tensor(context, "counts")->host, args.num_experts, args.max_rows, offsets));
    EPMOEI_CHECK(epmoe_grouped_gemm_workspace_size(&args, &args.workspace_bytes));
    int32_t *placed = op_scratch(context, offsets_bytes);
    args.y = op_output(context, "y", x->dtype, OP_SHAPE(args.max_rows, args.n));
    args.workspace = op_scratch(context, args.workspace_bytes);
    if (!placed || !args.y || !args.workspace) return OP_NO_MEMORY;
    EPMOEI_CHECK(epmoei_memory_copy(args.backend, placed, offsets, offsets_bytes, NULL));
    EPMOEI_CHECK(clear_rows(&args, offsets[args.num_experts]));
    args.expert_offsets = placed;
    return epmoe_grouped_gemm(&args, NULL);
}

/* f is a letter of b13 too, and with quantised weights no other tensor of the table has it. */
static epmoe_status_t check_bias_width(const op_context_t *context, int32_t intermediate)
{
    int32_t bias = op_dim(context, 'f');
    if (bias < 0 || bias == intermediate) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "tensor 'b13' is for f=%d: w13 has f=%d", bias, intermediate);
}

static epmoe_status_t run_experts(op_context_t *context)
{
    const op_value_t *x = op_tensor(context, "x");
    epmoe_experts_args_t args = EPMOE_EXPERTS_ARGS_INIT;
    args.backend = op_backend(context);
    args.num_tokens = op_dim(context, 'T');
    args.top_k = op_dim(context, 'k');
    args.hidden = op_dim(context, 'd');
    args.dtype = x->dtype;
    args.x = x->data;
    args.ids = op_tensor(context, "ids")->data;
    args.weights = op_tensor(context, "weights")->data;
    op_projection_t w13 = {.plain = "w13",
                           .prefix = "w13.",
                           .stacked = true,
                           .experts = op_dim(context, 'E'),
                           .rows = -1,
                           .cols = args.hidden};
    EPMOEI_CHECK(op_take_projection(context, &w13, &args.gate_up));
    if (w13.rows % 2)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "w13 has %lld rows: expected an even number",
                           (long long)w13.rows);
    args.num_experts = (int32_t)w13.experts;
    args.intermediate = (int32_t)(w13.rows / 2);
    args.layout = w13.layout;
    EPMOEI_CHECK(check_bias_width(context, args.intermediate));
    op_projection_t w2 = {.plain = "w2",
                          .prefix = "w2.",
                          .stacked = true,
                          .experts = args.num_experts,
                          .rows = args.hidden,
                          .cols = args.intermediate};
    EPMOEI_CHECK(op_take_projection(context, &w2, &args.down));
    args.fp8_activations = op_number(context, "act");
    args.gate_up_bias = op_tensor(context, "b13")->data;
    args.down_bias = op_tensor(context, "b2")->data;
    args.activation = (epmoe_activation_t)op_number(context, "activation");
    args.alpha = op_real(context, "alpha");
    args.limit = op_real(context, "limit");
    args.y = op_output(context, "y", x->dtype, OP_SHAPE(args.num_tokens, args.hidden));
    EPMOEI_CHECK(epmoe_experts_workspace_size(&args, &args.workspace_bytes));
    args.workspace = op_scratch(context, args.workspace_bytes);
    return args.y && args.workspace ? epmoe_experts(&args, NULL) : OP_NO_MEMORY;
}

static epmoe_status_t run_silu_and_mul(op_context_t *context)
{
    const op_value_t *x = op_tensor(context, "x");
    epmoe_silu_and_mul_args_t args = EPMOE_SILU_AND_MUL_ARGS_INIT;
    args.backend = op_backend(context);
    args.num_tokens = op_dim(context, 'T');
    args.width = op_dim(context, 'd');
    args.dtype = x->dtype;
    args.x = x->data;
    args.activation = (epmoe_activation_t)op_number(context, "activation");
    args.alpha = op_real(context, "alpha");
    args.limit = op_real(context, "limit");
    args.quant = (epmoe_granularity_t)op_number(context, "quant");
    EPMOEI_CHECK(op_static_scale(context, args.quant, &args.static_scale));
    args.y = op_output(context, "y", args.quant ? EPMOE_F8_E4M3 : x->dtype, OP_SHAPE(args.num_tokens, args.width));
    if (!args.y) return OP_NO_MEMORY;
    EPMOEI_CHECK(op_output_scale(context, args.quant, args.num_tokens, args.width, &args.scale));
    return epmoe_silu_and_mul(&args, NULL);
}

static epmoe_status_t run_sum(op_context_t *context)
{
    const op_value_t *y = op_tensor(context, "y");
    epmoe_sum_args_t args = EPMOE_SUM_ARGS_INIT;
    args.backend = op_backend(context);
    args.num_tokens = op_dim(context, 'T');
    args.top_k = op_dim(context, 'k');
    args.hidden = op_dim(context, 'd');
    args.y_dtype = y->dtype;
    args.y = y->data;
    args.weights = op_tensor(context, "weights")->data;
    args.out = op_output(context, "out", y->dtype, OP_SHAPE(args.num_tokens, args.hidden));
    return args.out ? epmoe_sum(&args, NULL) : OP_NO_MEMORY;
}

static const op_tensor_t topk_tensors[] = {
    {.name = "logits", .shape = "T,E", .kind = OP_FLOAT},
    {.name = "bias", .shape = "E", .kind = OP_F32, .optional = true},
    {0},
};
static const op_key_t topk_keys[] = {
    {.name = "k", .kind = OP_COUNT, .required = true},
    {.name = "scoring", .kind = OP_CHOICE, .choices = SCORINGS, .initial = "softmax"},
    {.name = "renormalize", .kind = OP_CHOICE, .choices = BOOLEAN, .initial = "0"},
    {.name = "scale", .kind = OP_REAL, .initial = "1"},
    {.name = "n_group", .kind = OP_COUNT, .initial = "1"},
    {.name = "topk_group", .kind = OP_COUNT},
    {.name = "group_score", .kind = OP_CHOICE, .choices = GROUP_SCORES, .initial = "top2"},
    {.name = "jitter", .kind = OP_POSITIVE},
    {0},
};

static const op_tensor_t align_tensors[] = {
    {.name = "ids", .shape = "T,k", .kind = OP_INDEX},
    {.name = "expert_map", .shape = "E", .kind = OP_INDEX, .optional = true},
    {0},
};
static const op_key_t align_keys[] = {
    {.name = "num_experts", .kind = OP_COUNT, .required = true, .dim = 'E'},
    {.name = "block", .kind = OP_COUNT, .initial = "1"},
    {0},
};

#define FORMAT_KEYS                                                                                                    \
    OP_FORMAT_KEYS, { .name = "act", .kind = OP_CHOICE, .choices = "none,fp8", .initial = "none" }

static const op_tensor_t grouped_gemm_tensors[] = {
    {.name = "x", .shape = "R,K", .kind = OP_FLOAT},
    {.name = "counts", .shape = "E", .kind = OP_INDEX},
    {.name = "w", .alias = "weight", .shape = "E,N,K", .kind = OP_NUMBERS, .optional = true},
    OP_QUANTISED(""),
    {0},
};
static const op_key_t grouped_gemm_keys[] = {FORMAT_KEYS, {0}};

#define ACTIVATION_KEYS                                                                                                \
    {.name = "activation", .kind = OP_CHOICE, .choices = ACTIVATIONS, .initial = "silu"},                              \
        {.name = "alpha", .kind = OP_REAL},                                                                            \
    {                                                                                                                  \
        .name = "limit", .kind = OP_POSITIVE                                                                           \
    }

static const op_tensor_t experts_tensors[] = {
    {.name = "x", .shape = "T,d", .kind = OP_FLOAT},
    {.name = "ids", .shape = "T,k", .kind = OP_INDEX},
    {.name = "weights", .shape = "T,k", .kind = OP_AS_F32},
    {.name = "w13", .alias = "w13.weight", .shape = "E,2f,d", .kind = OP_NUMBERS, .optional = true},
    {.name = "w2", .alias = "w2.weight", .shape = "E,d,f", .kind = OP_NUMBERS, .optional = true},
    {.name = "b13", .shape = "E,2f", .kind = OP_AS_F32, .optional = true},
    {.name = "b2", .shape = "E,d", .kind = OP_AS_F32, .optional = true},
    OP_QUANTISED("w13."),
    OP_QUANTISED("w2."),
    {0},
};
static const op_key_t experts_keys[] = {FORMAT_KEYS, ACTIVATION_KEYS, {0}};

static const op_tensor_t silu_and_mul_tensors[] = {
    {.name = "x", .shape = "T,2d", .kind = OP_FLOAT},
    {.name = "scale", .shape = "1", .kind = OP_F32, .optional = true},
    {0},
};
static const op_key_t silu_and_mul_keys[] = {
    ACTIVATION_KEYS,
    {.name = "quant", .kind = OP_CHOICE, .choices = OP_QUANTS, .initial = "none"},
    {0},
};

static const op_tensor_t sum_tensors[] = {
    {.name = "y", .shape = "T,k,d", .kind = OP_FLOAT},
    {.name = "weights", .shape = "T,k", .kind = OP_AS_F32, .optional = true},
    {0},
};
static const op_key_t sum_keys[] = {{0}};

const op_t tool_ops[] = {
    {.name = "topk", .outputs = "ids, weights", .run = run_topk, .tensors = topk_tensors, .keys = topk_keys},
    {.name = "align",
     .outputs = "sorted_ids, expert_ids, num_post_padded",
     .run = run_align,
     .tensors = align_tensors,
     .keys = align_keys},
    {.name = "grouped_gemm",
     .outputs = "y (zeros in the rows past the last group)",
     .run = run_grouped_gemm,
     .check = check_format,
     .tensors = grouped_gemm_tensors,
     .keys = grouped_gemm_keys},
    {.name = "experts",
     .outputs = "y",
     .run = run_experts,
     .check = check_format,
     .tensors = experts_tensors,
     .keys = experts_keys},
    {.name = "silu_and_mul",
     .outputs = "y",
     .run = run_silu_and_mul,
     .tensors = silu_and_mul_tensors,
     .keys = silu_and_mul_keys},
    {.name = "sum", .outputs = "out", .run = run_sum, .tensors = sum_tensors, .keys = sum_keys},
    {.name = "quantize_fp8",
     .outputs = "q, scale",
     .run = op_run_quantize_fp8,
     .tensors = op_quantize_fp8_tensors,
     .keys = op_quantize_fp8_keys},
    {.name = "rms_norm",
     .outputs = "y, residual?, scale?",
     .run = op_rms_norm_run,
     .tensors = op_rms_norm_tensors,
     .keys = op_rms_norm_keys},
    {.name = "rope", .outputs = "q, k", .run = op_rope_run, .tensors = op_rope_tensors, .keys = op_rope_keys},
    {.name = "qk_norm_rope",
     .outputs = "qkv",
     .run = op_qk_norm_rope_run,
     .tensors = op_qk_norm_rope_tensors,
     .keys = op_qk_norm_rope_keys},
    {.name = "cache_write",
     .outputs = "key_cache, value_cache",
     .run = op_cache_write_run,
     .tensors = op_cache_write_tensors,
     .keys = op_cache_write_keys},
    {.name = "attention",
     .outputs = "o (zeros in the rows past the last query)",
     .run = op_attention_run,
     .tensors = op_attention_tensors,
     .keys = op_attention_keys},
    {.name = "sample", .outputs = "token", .run = op_sample_run, .tensors = op_sample_tensors, .keys = op_sample_keys},
    {.name = "spec_verify",
     .outputs = "tokens, accepted",
     .run = op_spec_verify_run,
     .tensors = op_spec_verify_tensors,
     .keys = op_spec_verify_keys},
    {.name = "dequant", .outputs = "w", .run = op_run_dequant, .tensors = op_dequant_tensors, .keys = op_dequant_keys},
    {0},
};
