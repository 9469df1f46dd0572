/* The ops that only quantise or dequantise. */
#include "tools/tool_op.h"

const op_tensor_t op_quantize_fp8_tensors[] = {
    {.name = "x", .shape = "T,d", .kind = OP_FLOAT},
    {.name = "scale_ub", .shape = "1", .kind = OP_AS_F32, .optional = true},
    {.name = "scale", .shape = "1", .kind = OP_AS_F32, .optional = true},
    {0},
};
const op_key_t op_quantize_fp8_keys[] = {
    {.name = "granularity", .kind = OP_CHOICE, .choices = "tensor,token,block128", .initial = "tensor"},
    {.name = "pow2", .kind = OP_CHOICE, .choices = "0,1", .initial = "0"},
    {0},
};

epmoe_status_t op_run_quantize_fp8(op_context_t *context)
{
    const op_value_t *x = op_tensor(context, "x");
    epmoe_quantize_fp8_args_t args = EPMOE_QUANTIZE_FP8_ARGS_INIT;
    args.backend = op_backend(context);
    args.num_tokens = op_dim(context, 'T');
    args.hidden = op_dim(context, 'd');
    args.dtype = x->dtype;
    args.granularity = (epmoe_granularity_t)(op_number(context, "granularity") + EPMOE_GRANULARITY_TENSOR);
    args.pow2 = op_number(context, "pow2");
    args.x = x->data;
    args.static_scale = op_tensor(context, "scale")->data;
    args.scale_ub = op_tensor(context, "scale_ub")->data;
    int64_t tokens = args.num_tokens, blocks = epmoei_ceil_div(args.hidden, 128);
    args.q = op_output(context, "q", EPMOE_F8_E4M3, OP_SHAPE(tokens, args.hidden));
    switch (args.granularity) {
    case EPMOE_GRANULARITY_TENSOR: args.scale = op_output(context, "scale", EPMOE_F32, OP_SHAPE(1)); break;
    case EPMOE_GRANULARITY_TOKEN: args.scale = op_output(context, "scale", EPMOE_F32, OP_SHAPE(tokens, 1)); break;
    default: args.scale = op_output(context, "scale", EPMOE_F32, OP_SHAPE(tokens, blocks)); break;
    }
    return args.q && args.scale ? epmoe_quantize_fp8(&args, NULL) : OP_NO_MEMORY;
}

const op_tensor_t op_dequant_tensors[] = {
    {.name = "weight", .alias = "w", .shape = "N,K", .kind = OP_NUMBERS, .optional = true},
    OP_QUANTISED(""),
    {0},
};
const op_key_t op_dequant_keys[] = {OP_FORMAT_KEYS, {0}};

epmoe_status_t op_run_dequant(op_context_t *context)
{
    epmoe_dequant_args_t args = EPMOE_DEQUANT_ARGS_INIT;
    args.backend = op_backend(context);
    op_projection_t projection = {.plain = "weight", .prefix = "", .rows = -1, .cols = -1};
    EPMOEI_CHECK(op_take_projection(context, &projection, &args.weight));
    args.n = (int32_t)projection.rows;
    args.k = (int32_t)projection.cols;
    args.w = op_output(context, "w", EPMOE_F32, OP_SHAPE(args.n, args.k));
    return args.w ? epmoe_dequant(&args, NULL) : OP_NO_MEMORY;
}
