#include "kernels/experts_few.h"

#include "base/dtype.h"
#include "kernels/quant_tiles.h"

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

/* group_size as a caller gives it. */
static bool takes_weight(const epmoe_weight_t *weight, epmoe_layout_t layout, int64_t n, int64_t k)
{
    int64_t group = weight->group_size == 0 ? 128 : weight->group_size < 0 ? k : weight->group_size;
    int64_t scale_bytes = weight->scales_dtype ? epmoe_dtype_size(weight->scales_dtype) : 4;
    /* Places of an expert's scales are 32 bits wide. */
    if (weight->format == EPMOE_FORMAT_FP8_BLOCK)
        return (epmoei_ceil_div(n, group) + 1) * epmoei_ceil_div(k, group) <= INT32_MAX;
    if (layout != EPMOE_LAYOUT_PACKED) return false;
    if (weight->format == EPMOE_FORMAT_MXFP4) return true;
    return weight->format == EPMOE_FORMAT_W4 &&
           (group >= k ? 1 : epmoei_ceil_div(EPMOEI_TILE_COLS, group)) * scale_bytes <= EPMOEI_EXPERTS_FEW_QUANT_SCALES;
}

bool epmoei_experts_few_quant_can(const epmoe_experts_args_t *args)
{
    return (args->dtype == EPMOE_BF16 || args->dtype == EPMOE_F16) && !args->fp8_activations && args->num_tokens >= 1 &&
           args->num_tokens <= EPMOEI_EXPERTS_FEW_QUANT_MOST_TOKENS && args->top_k >= 1 &&
           args->top_k <= EPMOE_MAX_TOP_K && args->hidden >= 8 && args->hidden % 8 == 0 && args->intermediate >= 8 &&
           args->intermediate % 8 == 0 && args->intermediate <= kMostQuantIntermediate &&
           takes_weight(&args->gate_up, args->layout, 2 * (int64_t)args->intermediate, args->hidden) &&
           takes_weight(&args->down, args->layout, args->hidden, args->intermediate);
}

bool epmoei_experts_few_takes(const epmoe_experts_args_t *args)
{
    return (epmoei_experts_few_can(args) && args->num_tokens <= kFewTokens) || epmoei_experts_few_quant_can(args);
}
