#include "base/base.h"

#include <stdio.h>
#include <string.h>

#define SOFTMAX_RENORM .scoring = EPMOE_SCORING_SOFTMAX, .renormalize = 1
#define SIGMOID_BIAS(scale_)                                                                                           \
    .scoring = EPMOE_SCORING_SIGMOID, .renormalize = 1, .has_selection_bias = 1, .routed_scale = (scale_)
#define GPT_OSS                                                                                                        \
    .scoring = EPMOE_SCORING_TOPK_SOFTMAX, .router_has_bias = 1, .expert_has_bias = 1,                                 \
    .activation = EPMOE_ACTIVATION_SWIGLU_OAI, .alpha = 1.702f, .limit = 7.0f

static const struct {
    const char *name;
    epmoe_layer_config_t config;
} presets[] = {
    {"mixtral-8x7b", {.hidden = 4096, .intermediate = 14336, .num_experts = 8, .top_k = 2, SOFTMAX_RENORM}},
    {"mixtral-8x22b", {.hidden = 6144, .intermediate = 16384, .num_experts = 8, .top_k = 2, SOFTMAX_RENORM}},
    {"qwen3-30b-a3b", {.hidden = 2048, .intermediate = 768, .num_experts = 128, .top_k = 8, SOFTMAX_RENORM}},
    {"qwen3-235b-a22b", {.hidden = 4096, .intermediate = 1536, .num_experts = 128, .top_k = 8, SOFTMAX_RENORM}},
    {"deepseek-v3",
     {.hidden = 7168,
      .intermediate = 2048,
      .num_experts = 256,
      .top_k = 8,
      SIGMOID_BIAS(2.5f),
      .n_group = 8,
      .topk_group = 4,
      .group_score = EPMOE_GROUP_SCORE_TOP2,
      .shared_intermediate = 2048}},
    {"kimi-k2",
     {.hidden = 7168,
      .intermediate = 2048,
      .num_experts = 384,
      .top_k = 8,
      SIGMOID_BIAS(2.827f),
      .shared_intermediate = 2048}},
    {"gpt-oss-20b", {.hidden = 2880, .intermediate = 2880, .num_experts = 32, .top_k = 4, GPT_OSS}},
    {"gpt-oss-120b", {.hidden = 2880, .intermediate = 2880, .num_experts = 128, .top_k = 4, GPT_OSS}},
    {"glm-4.5",
     {.hidden = 5120,
      .intermediate = 1536,
      .num_experts = 160,
      .top_k = 8,
      SIGMOID_BIAS(2.5f),
      .shared_intermediate = 1536}},
    {"olmoe-1b-7b", {.hidden = 2048, .intermediate = 1024, .num_experts = 64, .top_k = 8}},
    {"qwen2-57b-a14b",
     {.hidden = 3584,
      .intermediate = 2560,
      .num_experts = 64,
      .top_k = 8,
      .shared_intermediate = 20480,
      .shared_gated = 1}},
    {"llama4-scout",
     {.hidden = 5120,
      .intermediate = 8192,
      .num_experts = 16,
      .top_k = 1,
      .scoring = EPMOE_SCORING_SIGMOID,
      .weight_on_input = 1,
      .shared_intermediate = 8192}},
};
#define PRESET_COUNT ((int32_t)(sizeof presets / sizeof presets[0]))

const char *epmoe_preset_name(int32_t i) { return i >= 0 && i < PRESET_COUNT ? presets[i].name : NULL; }

epmoe_status_t epmoe_preset_config(const char *name, epmoe_layer_config_t *config)
{
    if (!name) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "name is NULL");
    for (int32_t i = 0; i < PRESET_COUNT; i++)
        if (!strcmp(presets[i].name, name))
            return epmoei_return_sized(config, &presets[i].config, sizeof presets[i].config, "config");
    char known[512] = "";
    for (int32_t i = 0; i < PRESET_COUNT; i++) {
        size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "", presets[i].name);
    }
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "preset '%s' is unknown: expected one of %s", name, known);
}
