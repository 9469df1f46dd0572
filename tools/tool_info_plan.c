#include "tools/tool_info.h"

#include "base/dtype.h"
#include "dense_layers/self_attention.h"

#include <stdio.h>

/* Norms, projections and buffers of all decoder layers: every rank has its own copy of them. */
static epmoe_status_t count_attention(const epmoe_checkpoint_t *checkpoint, const epmoe_checkpoint_info_t *about,
                                      int32_t max_tokens, info_plan_t *plan)
{
    epmoe_backend_t backend;
    EPMOEI_CHECK(epmoe_backend_resolve(EPMOE_BACKEND_AUTO, &backend));
    for (int32_t i = 0; i < about->num_layers; i++) {
        epmoe_decoder_config_t config = EPMOE_DECODER_CONFIG_INIT;
        epmoei_attention_shape_t shape;
        epmoei_attention_weights_t weights;
        epmoei_attention_workspace_t workspace;
        EPMOEI_CHECK(epmoe_checkpoint_decoder_config(checkpoint, i, &config));
        EPMOEI_CHECK(epmoei_attention_shape_check(&config, about->hidden, max_tokens, EPMOE_BF16, backend, &shape));
        plan->attention += epmoei_attention_weights_layout(NULL, &shape, EPMOE_FORMAT_BF16, &weights);
        EPMOEI_CHECK(epmoei_attention_workspace_layout(NULL, &shape, &workspace));
        plan->workspace += workspace.bytes;
        /* Layers that rotate alike may share a table. */
        int64_t table = (int64_t)shape.config.rope.num_positions * shape.config.rope.rotary_dim * 4;
        plan->rope_table = epmoei_max64(plan->rope_table, table);
    }
    return EPMOE_OK;
}

epmoe_status_t info_plan_gather(const epmoe_checkpoint_t *checkpoint, const info_attention_t *attention,
                                int32_t max_tokens, info_plan_t *plan)
{
    epmoe_checkpoint_info_t about = EPMOE_CHECKPOINT_INFO_INIT;
    epmoe_head_config_t head = EPMOE_HEAD_CONFIG_INIT;
    EPMOEI_CHECK(epmoe_checkpoint_get_info(checkpoint, &about));
    if (!attention->refused[0]) EPMOEI_CHECK(count_attention(checkpoint, &about, max_tokens, plan));
    plan->kv_per_token = attention->kv_bytes;
    /* A checkpoint without a head, or of layers alone, has none to count. */
    if (epmoe_checkpoint_head_config(checkpoint, &head) == EPMOE_OK)
        plan->head = epmoei_round_up((int64_t)head.hidden * 4, EPMOEI_ALIGNMENT) +
                     epmoei_round_up((int64_t)head.vocab_size * head.hidden * 2, EPMOEI_ALIGNMENT);
    return EPMOE_OK;
}

void info_sum_rank(const info_plan_t *plan, info_rank_t *rank)
{
    rank->dense = plan->attention + plan->rope_table + plan->head;
    rank->workspace += plan->workspace;
    rank->kv = plan->kv_tokens * plan->kv_per_token;
    rank->total = rank->experts + rank->dense + rank->workspace + rank->comm + rank->kv;
    rank->left = plan->memory - rank->total;
}

void info_plan_print_header(const info_plan_t *plan)
{
    printf("\n%5s %14s %16s %14s %14s %14s %16s %16s", "rank", "experts", "MoE and MLPs", "attention", "workspace",
           "exchange", "kv cache", "total B");
    printf(plan->memory ? " %16s %14s\n" : "\n", "left B", "more tokens");
}

void info_plan_print_rank(const info_plan_t *plan, int32_t number, const info_rank_t *rank)
{
    char experts[32] = "none";
    if (rank->local_experts)
        snprintf(experts, sizeof experts, "%d-%d", rank->first_expert, rank->first_expert + rank->local_experts - 1);
    printf("%5d %14s %16lld %14lld %14lld %14lld %16lld %16lld", number, experts, (long long)rank->experts,
           (long long)rank->dense, (long long)rank->workspace, (long long)rank->comm, (long long)rank->kv,
           (long long)rank->total);
    if (plan->memory)
        printf(" %16lld %14lld", (long long)rank->left,
               plan->kv_per_token && rank->left > 0 ? (long long)(rank->left / plan->kv_per_token) : 0);
    printf("\n");
}

json_t *info_plan_json_rank(const info_plan_t *plan, int32_t number, const info_rank_t *rank)
{
    json_t *object =
        json_pack("{s:i, s:i, s:i, s:I, s:I, s:I, s:I, s:I, s:I}", "rank", number, "first_expert", rank->first_expert,
                  "local_experts", rank->local_experts, "weight_bytes", (json_int_t)rank->experts, "dense_bytes",
                  (json_int_t)rank->dense, "workspace_bytes", (json_int_t)rank->workspace, "comm_bytes",
                  (json_int_t)rank->comm, "kv_bytes", (json_int_t)rank->kv, "total_bytes", (json_int_t)rank->total);
    if (plan->memory) json_object_set_new(object, "left_bytes", json_integer((json_int_t)rank->left));
    return object;
}
