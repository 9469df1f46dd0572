/* What `moe_tool info` says of a checkpoint's attention, and how it adds up what a rank takes. */
#ifndef EPMOE_TOOLS_TOOL_INFO_H
#define EPMOE_TOOLS_TOOL_INFO_H

#include "base/base.h"

#include <jansson.h>

typedef struct info_attention_t {
    char refused[512];             /* why decoder layers do not run; "" = they do */
    epmoe_decoder_config_t config; /* of the first layer */
    int32_t num_layers;
    int32_t windowed_layers;
    int32_t window;   /* theirs */
    int64_t kv_bytes; /* per token, of all layers, in bf16 */
} info_attention_t;

epmoe_status_t info_attention_gather(const epmoe_checkpoint_t *checkpoint, info_attention_t *attention);
void info_attention_print(const info_attention_t *attention);
/* null when decoder layers do not run. */
json_t *info_attention_json(const info_attention_t *attention);

/* The same on every rank: what is not spread over the ranks. Weights and activations in bf16. */
typedef struct info_plan_t {
    int64_t kv_tokens; /* cached on each rank */
    int64_t memory;    /* of each rank, 0 = not given */
    int64_t attention; /* norms and projections of all layers */
    int64_t workspace; /* of all layers' attention */
    int64_t rope_table;
    int64_t head;
    int64_t kv_per_token; /* of all layers */
} info_plan_t;

/* What one rank holds of all layers, in bytes. */
typedef struct info_rank_t {
    int32_t first_expert;
    int32_t local_experts;
    int64_t experts; /* weights of MoE blocks and dense MLPs */
    int64_t dense;   /* attention, rope table, head */
    int64_t workspace;
    int64_t comm;
    int64_t kv;
    int64_t total;
    int64_t left; /* of the memory; negative when it does not fit */
} info_rank_t;

/* kv_tokens and memory are the caller's. */
epmoe_status_t info_plan_gather(const epmoe_checkpoint_t *checkpoint, const info_attention_t *attention,
                                int32_t max_tokens, info_plan_t *plan);
/* Adds the plan to a rank's MoE blocks, and sums up. */
void info_sum_rank(const info_plan_t *plan, info_rank_t *rank);
void info_plan_print_header(const info_plan_t *plan);
void info_plan_print_rank(const info_plan_t *plan, int32_t number, const info_rank_t *rank);
json_t *info_plan_json_rank(const info_plan_t *plan, int32_t number, const info_rank_t *rank);

/* Which tiles the CUDA kernels take for the products of a MoE layer's max_tokens, on a rank with so many experts: from
 * the functions that choose them, wherever this runs. */
void info_tiles_print(const epmoe_layer_config_t *config, int32_t local_experts);
json_t *info_tiles_json(const epmoe_layer_config_t *config, int32_t local_experts);

#endif
