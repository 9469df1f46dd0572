#include "kernels/route.h"

#include "base/dtype.h"
#include "kernels/op_check.h"
#include "kernels/router_gemm.h"
#include "kernels/topk.h"

/* Groups: so few that a block adds the counts of all in a moment, so many that each is placed in a moment. */
enum { kMaxGroups = 128, kMaxGroupBits = 8192 * 32 };

epmoei_route_groups_t epmoei_route_groups(int32_t num_tokens, int32_t num_experts)
{
    epmoei_route_groups_t groups = {.shift = 5, .stride = (int32_t)epmoei_round_up(num_experts, 8) / 2};
    while (epmoei_ceil_div(num_tokens, (int64_t)1 << groups.shift) > kMaxGroups) groups.shift++;
    groups.count = (int32_t)epmoei_ceil_div(num_tokens, (int64_t)1 << groups.shift);
    return groups;
}

int64_t epmoei_route_counts_bytes(int32_t num_experts)
{
    if (num_experts > EPMOEI_ROUTE_ALIGN_EXPERTS) return 0;
    int64_t words = (int64_t)kMaxGroups * epmoei_route_groups(0, num_experts).stride;
    return epmoei_round_up(words * (int64_t)sizeof(uint32_t), EPMOEI_ALIGNMENT);
}

/* A group's bits must fit shared memory, and its counts 16 bits. */
bool epmoei_route_aligns(int32_t num_tokens, int32_t num_experts, int32_t slots)
{
    int64_t group = (int64_t)1 << epmoei_route_groups(num_tokens, num_experts).shift;
    return num_experts <= EPMOEI_ROUTE_ALIGN_EXPERTS && (int64_t)num_tokens * slots <= INT32_MAX &&
           group * num_experts <= kMaxGroupBits && group <= INT16_MAX;
}

int32_t epmoei_route_chunk(int32_t num_tokens, int32_t num_experts, int32_t hidden)
{
    const int64_t most_bytes = (int64_t)32 << 20, tile = 128; /* so that partials stay in the second-level cache */
    epmoei_router_parts_t parts = epmoei_router_parts(hidden, num_experts);
    int64_t rows = most_bytes / ((int64_t)parts.num_parts * parts.row_stride * (int64_t)sizeof(float));
    return (int32_t)epmoei_min64(num_tokens, epmoei_max64(rows / tile * tile, tile));
}

int64_t epmoei_route_workspace(int32_t num_tokens, int32_t num_experts, int32_t hidden)
{
    epmoei_router_parts_t parts = epmoei_router_parts(hidden, num_experts);
    int64_t rows = (int64_t)parts.num_parts * epmoei_route_chunk(num_tokens, num_experts, hidden);
    return epmoei_route_counts_bytes(num_experts) + rows * parts.row_stride * (int64_t)sizeof(float);
}

static epmoe_status_t check(const epmoei_route_args_t *args, epmoei_route_args_t *out)
{
    EPMOEI_CHECK(epmoei_copy_sized(out, sizeof *out, args, "epmoei_route_args_t"));
    EPMOEI_CHECK(epmoei_topk_check_sizes(&args->topk, &out->topk));
    int32_t num_tokens = out->topk.num_tokens;
    if (out->dtype != EPMOE_BF16 && out->dtype != EPMOE_F16)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "dtype is %s: expected bf16 or fp16",
                           epmoe_dtype_string(out->dtype));
    if (out->hidden < 1 || out->hidden % 8)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "hidden is %d: expected a multiple of 8", out->hidden);
    if (out->topk.logits_dtype != EPMOE_F32 || out->topk.logits_stride != out->topk.num_experts)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "topk.logits are %s at stride %lld: expected dense fp32",
                           epmoe_dtype_string(out->topk.logits_dtype), (long long)out->topk.logits_stride);
    if (out->joined_ids && out->topk.top_k >= EPMOE_MAX_TOP_K)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "topk.top_k is %d with joined_ids: expected at most %d",
                           out->topk.top_k, EPMOE_MAX_TOP_K - 1);
    if (num_tokens == 0) return EPMOE_OK;
    EPMOEI_CHECK(epmoei_check_pointer("x", out->x));
    EPMOEI_CHECK(epmoei_check_pointer("weight", out->weight));
    EPMOEI_CHECK(epmoei_check_pointer("topk.ids", out->topk.ids));
    EPMOEI_CHECK(epmoei_check_pointer("topk.weights", out->topk.weights));
    EPMOEI_CHECK(epmoei_check_pointer("workspace", out->workspace));
    if (out->joined_ids) EPMOEI_CHECK(epmoei_check_pointer("joined_weights", out->joined_weights));
    if (out->sorted_ids) {
        EPMOEI_CHECK(epmoei_check_pointer("num_post_padded", out->num_post_padded));
        EPMOEI_CHECK(epmoei_check_pointer("expert_offsets", out->expert_offsets));
    }
    int64_t needed = epmoei_route_workspace(num_tokens, out->topk.num_experts, out->hidden);
    if (out->workspace_bytes < needed)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "workspace_bytes is %lld: expected at least %lld",
                           (long long)out->workspace_bytes, (long long)needed);
    return EPMOE_OK;
}

epmoe_status_t epmoei_route(const epmoei_route_args_t *args, epmoe_stream_t stream)
{
    epmoei_route_args_t checked;
    const epmoei_kernel_table_t *table;
    EPMOEI_CHECK(check(args, &checked));
    EPMOEI_CHECK(epmoei_kernels(checked.backend, &table));
    if (!table->route) return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "routing at once has no kernel on this backend");
    return checked.topk.num_tokens ? table->route(&checked, stream) : EPMOE_OK;
}
