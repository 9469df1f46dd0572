#include "kernels/experts_few.h"

#include "base/dtype.h"

/* Beyond these the grouped GEMM, which reads an expert's weights once for all its tokens, is as fast. */
enum { kFewTokens = 4 };
/* gate_up has a row of blocks for every four columns of h. */
enum { kMostIntermediate = 4 * 65535, kMostQuantIntermediate = 16 * 65535 };

bool epmoei_experts_few_can(const epmoe_experts_args_t *args)
{
    epmoe_format_t format = epmoei_format_of_dtype(args->dtype);
    return (args->dtype == EPMOE_BF16 || args->dtype == EPMOE_F16) && args->gate_up.format == format &&
           args->down.format == format && args->num_tokens >= 1 && args->num_tokens <= EPMOEI_EXPERTS_FEW_MOST_TOKENS &&
           args->top_k >= 1 && args->top_k <= EPMOE_MAX_TOP_K && args->hidden >= 8 && args->hidden % 8 == 0 &&
           args->intermediate >= 8 && args->intermediate % 8 == 0 && args->intermediate <= kMostIntermediate;
}

/* A stage of the kernels is 128 columns: groups are parts of it, or it is of them. group_size as a caller gives it. */
static bool takes_weight(const epmoe_weight_t *weight, epmoe_layout_t layout, int64_t k)
{
    enum { kStage = 128 };
    int64_t group = weight->group_size == 0 ? kStage : weight->group_size < 0 ? k : weight->group_size;
    bool whole = group % kStage == 0 || group >= k;
    if (weight->format == EPMOE_FORMAT_FP8_BLOCK) return whole;
    if (layout != EPMOE_LAYOUT_PACKED) return false;
    if (weight->format == EPMOE_FORMAT_MXFP4) return true;
    /* In another order of columns they are taken by the grouped GEMM, which permutes the tokens. */
    return weight->format == EPMOE_FORMAT_W4 && !weight->g_idx && (whole || group == kStage / 2 || group == kStage / 4);
}

bool epmoei_experts_few_quant_can(const epmoe_experts_args_t *args)
{
    return (args->dtype == EPMOE_BF16 || args->dtype == EPMOE_F16) && !args->fp8_activations && args->num_tokens >= 1 &&
           args->num_tokens <= EPMOEI_EXPERTS_FEW_QUANT_MOST_TOKENS && args->top_k >= 1 &&
           args->top_k <= EPMOE_MAX_TOP_K && args->hidden >= 8 && args->hidden % 8 == 0 && args->intermediate >= 8 &&
           args->intermediate % 8 == 0 && args->intermediate <= kMostQuantIntermediate &&
           takes_weight(&args->gate_up, args->layout, args->hidden) &&
           takes_weight(&args->down, args->layout, args->intermediate);
}

bool epmoei_experts_few_takes(const epmoe_experts_args_t *args)
{
    return (epmoei_experts_few_can(args) && args->num_tokens <= kFewTokens) || epmoei_experts_few_quant_can(args);
}
