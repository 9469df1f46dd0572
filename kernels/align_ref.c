#include "kernels/align.h"
#include "kernels/op_check.h"

/* The counters of 4096 experts fit on the stack. */
int64_t epmoei_align_workspace_ref(const epmoe_align_args_t *args)
{
    (void)args;
    return 0;
}

static void fill(int32_t *values, int64_t first, int64_t end, int32_t value)
{
    for (int64_t i = first; i < end; i++) values[i] = value;
}

static bool is_local(const epmoe_align_args_t *args, int32_t expert)
{
    return expert >= 0 && (!args->expert_map || args->expert_map[expert] >= 0);
}

/* counts[e] = slots of expert e that take part. Writes no output, so that a bad id leaves them alone. */
static epmoe_status_t count_slots(const epmoe_align_args_t *args, int64_t num_slots, int32_t *counts)
{
    for (int32_t e = 0; args->expert_map && e < args->num_experts; e++)
        if (args->expert_map[e] < -1)
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "expert_map[%d] is %d: expected -1 or a local expert", e,
                               args->expert_map[e]);
    for (int64_t s = 0; s < num_slots; s++) {
        int32_t expert = args->ids[s];
        if (expert < -1 || expert >= args->num_experts)
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "ids[%lld,%d] is %d: expected -1 to %d",
                               (long long)(s / args->top_k), (int)(s % args->top_k), expert, args->num_experts - 1);
        if (is_local(args, expert)) counts[expert]++;
    }
    return EPMOE_OK;
}

epmoe_status_t epmoei_align_ref(const epmoe_align_args_t *args, epmoe_stream_t stream)
{
    (void)stream;
    int32_t num_experts = args->num_experts, block_size = args->block_size, num_tokens;
    int32_t counts[EPMOE_MAX_EXPERTS] = {0}, next[EPMOE_MAX_EXPERTS];
    int32_t pad = args->num_tokens * args->top_k;
    int64_t worst = epmoe_align_max_padded(args->num_tokens, args->top_k, num_experts, block_size);
    EPMOEI_CHECK(epmoei_actual_tokens(args->num_tokens_dev, args->num_tokens, &num_tokens));
    int64_t num_slots = (int64_t)num_tokens * args->top_k;
    EPMOEI_CHECK(count_slots(args, num_slots, counts));

    int32_t total = 0;
    for (int32_t e = 0; e < num_experts; e++) {
        int32_t end = total + (int32_t)epmoei_round_up(counts[e], block_size);
        next[e] = total;
        if (args->expert_offsets) args->expert_offsets[e] = total;
        if (args->expert_ids)
            fill(args->expert_ids, total / block_size, end / block_size, args->expert_map ? args->expert_map[e] : e);
        if (args->sorted_ids) fill(args->sorted_ids, total + counts[e], end, pad);
        total = end;
    }
    if (args->expert_offsets) args->expert_offsets[num_experts] = total;
    if (args->expert_ids) fill(args->expert_ids, total / block_size, worst / block_size, -1);
    if (args->sorted_ids) fill(args->sorted_ids, total, worst, pad);
    if (args->num_post_padded) *args->num_post_padded = total;

    for (int64_t s = 0; s < num_slots; s++)
        if (is_local(args, args->ids[s])) args->sorted_ids[next[args->ids[s]]++] = (int32_t)s;
    return EPMOE_OK;
}
