#include "base/base.h"

#include <stdio.h>
#include <string.h>

#define SOFTMAX_RENORM .scoring = EPMOE_SCORING_SOFTMAX, .renormalize = 1
#define SIGMOID_BIAS(scale_)                                                                                           \
    .scoring = EPMOE_SCORING_SIGMOID, .renormalize = 1, .has_selection_bias = 1, .routed_scale = (scale_)
#define GPT_OSS                                                                                                        \
    .scoring = EPMOE_SCORING_TOPK_SOFTMAX, .router_has_bias = 1, .expert_has_bias = 1,                                 \
    .activation = EPMOE_ACTIVATION_SWIGLU_OAI, .alpha = 1.702f, .limit = 7.0f

#define GQA(heads_, kv_heads_, head_dim_)                                                                              \
    .num_heads = (heads_), .num_kv_heads = (kv_heads_), .head_dim = (head_dim_), .cache_layout = EPMOE_CACHE_LAYOUT_NHD
#define ROPE(positions, base_) .num_positions = (positions), .base = (base_)
#define YARN(factor_)          .scaling = EPMOE_ROPE_SCALING_YARN, .factor = (factor_), .original_positions = 4096
/* The softmax scale is 192^-0.5 times (0.1 ln factor + 1)^2. */
#define MLA(heads_, magnitude)                                                                                         \
    .attention = EPMOE_ATTENTION_MLA, .num_heads = (heads_), .q_latent = 1536, .kv_latent = 512, .nope_dim = 128,      \
    .rope_dim = 64, .value_dim = 128, .scale = 0.0721687836f * (magnitude) * (magnitude),                              \
    .rope_style = EPMOE_ROPE_GPTJ, .cache_layout = EPMOE_CACHE_LAYOUT_NHD
#define GPT_OSS_ATTENTION                                                                                              \
    GQA(64, 8, 64), .norm_eps = 1e-5f, .in_bias = 1, .out_bias = 1, .has_sinks = 1,                                    \
                    .rope = {ROPE(131072, 150000), YARN(32), .no_truncate = 1}

static const struct {
    const char *name;
    epmoe_layer_config_t config;
    epmoe_decoder_config_t decoder;
} presets[] = {
    {"mixtral-8x7b",
     {.hidden = 4096, .intermediate = 14336, .num_experts = 8, .top_k = 2, SOFTMAX_RENORM},
     {GQA(32, 8, 128), .norm_eps = 1e-5f, .rope = {ROPE(32768, 1e6)}}},
    {"mixtral-8x22b",
     {.hidden = 6144, .intermediate = 16384, .num_experts = 8, .top_k = 2, SOFTMAX_RENORM},
     {GQA(48, 8, 128), .norm_eps = 1e-5f, .rope = {ROPE(65536, 1e6)}}},
    {"qwen3-30b-a3b",
     {.hidden = 2048, .intermediate = 768, .num_experts = 128, .top_k = 8, SOFTMAX_RENORM},
     {GQA(32, 4, 128), .qk_norm = EPMOE_QK_NORM_HEAD, .rope = {ROPE(40960, 1e6)}}},
    {"qwen3-235b-a22b",
     {.hidden = 4096, .intermediate = 1536, .num_experts = 128, .top_k = 8, SOFTMAX_RENORM},
     {GQA(64, 4, 128), .qk_norm = EPMOE_QK_NORM_HEAD, .rope = {ROPE(40960, 1e6)}}},
    {"deepseek-v3",
     {.hidden = 7168,
      .intermediate = 2048,
      .num_experts = 256,
      .top_k = 8,
      SIGMOID_BIAS(2.5f),
      .n_group = 8,
      .topk_group = 4,
      .group_score = EPMOE_GROUP_SCORE_TOP2,
      .shared_intermediate = 2048},
     {MLA(128, 1.36888795f), .rope = {ROPE(163840, 10000), YARN(40), .mscale = 1, .mscale_all_dim = 1}}},
    {"kimi-k2",
     {.hidden = 7168,
      .intermediate = 2048,
      .num_experts = 384,
      .top_k = 8,
      SIGMOID_BIAS(2.827f),
      .shared_intermediate = 2048},
     {MLA(64, 1.34657359f), .rope = {ROPE(131072, 50000), YARN(32), .beta_fast = 1, .mscale = 1, .mscale_all_dim = 1}}},
    {"gpt-oss-20b",
     {.hidden = 2880, .intermediate = 2880, .num_experts = 32, .top_k = 4, GPT_OSS},
     {GPT_OSS_ATTENTION}},
    {"gpt-oss-120b",
     {.hidden = 2880, .intermediate = 2880, .num_experts = 128, .top_k = 4, GPT_OSS},
     {GPT_OSS_ATTENTION}},
    {"glm-4.5",
     {.hidden = 5120,
      .intermediate = 1536,
      .num_experts = 160,
      .top_k = 8,
      SIGMOID_BIAS(2.5f),
      .shared_intermediate = 1536},
     {GQA(96, 8, 128), .norm_eps = 1e-5f, .in_bias = 1, .qk_norm = EPMOE_QK_NORM_HEAD,
      .rope = {ROPE(131072, 1e6), .rotary_dim = 64}}},
    {"olmoe-1b-7b",
     {.hidden = 2048, .intermediate = 1024, .num_experts = 64, .top_k = 8},
     {GQA(16, 16, 128), .norm_eps = 1e-5f, .qk_norm = EPMOE_QK_NORM_ALL_HEADS, .rope = {ROPE(4096, 10000)}}},
    {"qwen2-57b-a14b",
     {.hidden = 3584,
      .intermediate = 2560,
      .num_experts = 64,
      .top_k = 8,
      .shared_intermediate = 20480,
      .shared_gated = 1},
     {GQA(28, 4, 128), .in_bias = 1, .rope = {ROPE(32768, 1e6)}}},
    {"llama4-scout",
     {.hidden = 5120,
      .intermediate = 8192,
      .num_experts = 16,
      .top_k = 1,
      .scoring = EPMOE_SCORING_SIGMOID,
      .weight_on_input = 1,
      .shared_intermediate = 8192},
     {GQA(40, 8, 128), .norm_eps = 1e-5f, .qk_norm = EPMOE_QK_NORM_HEAD_UNWEIGHTED, .rope_style = EPMOE_ROPE_GPTJ,
      .rope = {ROPE(10485760, 500000), .scaling = EPMOE_ROPE_SCALING_LLAMA3, .factor = 16, .original_positions = 8192,
               .low_freq_factor = 1, .high_freq_factor = 1}}},
};
#define PRESET_COUNT ((int32_t)(sizeof presets / sizeof presets[0]))

const char *epmoe_preset_name(int32_t i) { return i >= 0 && i < PRESET_COUNT ? presets[i].name : NULL; }

static epmoe_status_t find(const char *name, int32_t *index)
{
    if (!name) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "name is NULL");
    for (*index = 0; *index < PRESET_COUNT; ++*index)
        if (!strcmp(presets[*index].name, name)) return EPMOE_OK;
    char known[512] = "";
    for (int32_t i = 0; i < PRESET_COUNT; i++) {
        size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "", presets[i].name);
    }
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "preset '%s' is unknown: expected one of %s", name, known);
}

epmoe_status_t epmoe_preset_config(const char *name, epmoe_layer_config_t *config)
{
    int32_t i;
    EPMOEI_CHECK(find(name, &i));
    return epmoei_return_sized(config, &presets[i].config, sizeof presets[i].config, "config");
}

epmoe_status_t epmoe_preset_decoder_config(const char *name, epmoe_decoder_config_t *config)
{
    int32_t i;
    EPMOEI_CHECK(find(name, &i));
    epmoe_decoder_config_t result = presets[i].decoder;
    result.rope.struct_size = sizeof result.rope;
    return epmoei_return_sized(config, &result, sizeof result, "config");
}
