#include "kernels/experts_few.h"

#include "base/dtype.h"
#include "kernels/plain_tiles.h"

/* Beyond these the grouped GEMM, which reads an expert's weights once for all its tokens, is as fast. */
enum { kFewTokens = 4 };
/* gate_up has a row of blocks for every four columns of h. */
enum { kMostIntermediate = 4 * 65535, kMostQuantIntermediate = 16 * 65535 };

/* Others are refused where the grouped GEMM checks them. */
static bool takes_plain(const epmoe_weight_t *weight, const epmoe_experts_args_t *args, int32_t n, int32_t k,
                        bool gated)
{
    if (weight->format != epmoei_format_of_dtype(args->dtype)) return false;
    if (weight->storage == EPMOE_STORAGE_ROWS) return true;
    return args->layout == EPMOE_LAYOUT_PACKED && epmoei_plain_tiles_fit(n, k, gated);
}

bool epmoei_experts_few_can(const epmoe_experts_args_t *args)
{
    return (args->dtype == EPMOE_BF16 || args->dtype == EPMOE_F16) && args->num_tokens >= 1 &&
           args->num_tokens <= EPMOEI_EXPERTS_FEW_MOST_TOKENS && args->top_k >= 1 && args->top_k <= EPMOE_MAX_TOP_K &&
           args->hidden >= 8 && args->hidden % 8 == 0 && args->intermediate >= 8 && args->intermediate % 8 == 0 &&
           args->intermediate <= kMostIntermediate &&
           takes_plain(&args->gate_up, args, 2 * args->intermediate, args->hidden, true) &&
           takes_plain(&args->down, args, args->hidden, args->intermediate, false);
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
