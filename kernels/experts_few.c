#include "kernels/experts_few.h"

#include "base/dtype.h"

/* Beyond these the grouped GEMM, which reads an expert's weights once for all its tokens, is as fast. */
enum { kFewTokens = 4 };
/* gate_up has a row of blocks for every four columns of h. */
enum { kMostIntermediate = 4 * 65535 };

bool epmoei_experts_few_can(const epmoe_experts_args_t *args)
{
    epmoe_format_t format = epmoei_format_of_dtype(args->dtype);
    return (args->dtype == EPMOE_BF16 || args->dtype == EPMOE_F16) && args->gate_up.format == format &&
           args->down.format == format && args->num_tokens >= 1 && args->num_tokens <= EPMOEI_EXPERTS_FEW_MOST_TOKENS &&
           args->top_k >= 1 && args->top_k <= EPMOE_MAX_TOP_K && args->hidden >= 8 && args->hidden % 8 == 0 &&
           args->intermediate >= 8 && args->intermediate % 8 == 0 && args->intermediate <= kMostIntermediate;
}

bool epmoei_experts_few_takes(const epmoe_experts_args_t *args)
{
    return epmoei_experts_few_can(args) && args->num_tokens <= kFewTokens;
}
