#include "moe/families.h"

#include <stdio.h>
#include <string.h>

static const char *const usual_rest_of_layer[] = {
    "self_attn.",
    "input_layernorm.",
    "post_attention_layernorm.",
    "pre_feedforward_layernorm.",
    "post_feedforward_layernorm.",
    NULL,
};
static const char *const usual_outside_layers[] = {"model.embed_tokens.", "model.norm.", "model.rotary_emb.",
                                                   "lm_head.", NULL};
/* Layers for speculative decoding lie outside the others. */
static const char *const qwen3_next_rest_of_layer[] = {"self_attn.", "linear_attn.", "input_layernorm.",
                                                       "post_attention_layernorm.", NULL};
static const char *const qwen3_next_outside_layers[] = {"model.embed_tokens.", "model.norm.", "lm_head.", "mtp.", NULL};
static const char *const ernie_outside_layers[] = {"model.embed_tokens.", "model.norm.", "lm_head.", "model.mtp_",
                                                   NULL};
static const char *const llama4_outside_layers[] = {"model.embed_tokens.",
                                                    "model.norm.",
                                                    "lm_head.",
                                                    "language_model.model.embed_tokens.",
                                                    "language_model.model.norm.",
                                                    "language_model.lm_head.",
                                                    "vision_model.",
                                                    "multi_modal_projector.",
                                                    NULL};

#define PROJECTIONS(field, prefix)                                                                                     \
    .field##_gate = prefix "gate_proj", .field##_up = prefix "up_proj", .field##_down = prefix "down_proj"
#define SHARED(prefix)                                                                                                 \
    .shared = prefix, .shared_gate_proj = prefix "gate_proj", .shared_up_proj = prefix "up_proj",                      \
    .shared_down_proj = prefix "down_proj"
#define STACKED .stacked_gate_up = "experts.gate_up_proj", .stacked_down = "experts.down_proj"
#define REST    .rest_of_layer = usual_rest_of_layer, .outside_layers = usual_outside_layers

static const epmoei_tensor_names_t mixtral_names = {
    /* Exports with stacked experts may also carry the block under its newer name. */
    .modules = {"block_sparse_moe.", "mlp."},
    .router = "gate",
    .experts = "experts.",
    .expert_gate = "experts.%d.w1",
    .expert_up = "experts.%d.w3",
    .expert_down = "experts.%d.w2",
    STACKED,
    REST,
};

static const epmoei_tensor_names_t minimax_m2_names = {
    .modules = {"block_sparse_moe.", "mlp."},
    .router = "gate",
    .selection_bias = "e_score_correction_bias",
    .experts = "experts.",
    .expert_gate = "experts.%d.w1",
    .expert_up = "experts.%d.w3",
    .expert_down = "experts.%d.w2",
    STACKED,
    REST,
};

static const epmoei_tensor_names_t granite_names = {
    .modules = {"block_sparse_moe."},
    .router = "router.layer",
    .stacked_gate_up = "input_linear.weight",
    .stacked_down = "output_linear.weight",
    REST,
};

#define QWEN_MLP                                                                                                       \
    .modules = {"mlp."}, .router = "gate", .experts = "experts.", PROJECTIONS(expert, "experts.%d."), STACKED,         \
    SHARED("shared_expert."), .shared_gate = "shared_expert_gate", .dense_module = "mlp.", PROJECTIONS(dense, "")

static const epmoei_tensor_names_t qwen3_next_names = {
    QWEN_MLP,
    .rest_of_layer = qwen3_next_rest_of_layer,
    .outside_layers = qwen3_next_outside_layers,
};

static const epmoei_tensor_names_t qwen_names = {
    QWEN_MLP,
    REST,
};

static const epmoei_tensor_names_t ernie_names = {
    .modules = {"mlp."},
    .router = "gate",
    .selection_bias = "moe_statics.e_score_correction_bias",
    .experts = "experts.",
    PROJECTIONS(expert, "experts.%d."),
    STACKED,
    SHARED("shared_experts."),
    .dense_module = "mlp.",
    PROJECTIONS(dense, ""),
    .rest_of_layer = usual_rest_of_layer,
    .outside_layers = ernie_outside_layers,
};

static const epmoei_tensor_names_t deepseek_names = {
    .modules = {"mlp."},
    .router = "gate",
    .selection_bias = "gate.e_score_correction_bias",
    .experts = "experts.",
    PROJECTIONS(expert, "experts.%d."),
    STACKED,
    SHARED("shared_experts."),
    .dense_module = "mlp.",
    PROJECTIONS(dense, ""),
    REST,
};

static const epmoei_tensor_names_t gpt_oss_names = {
    .modules = {"mlp."},
    .router = "router",
    .router_bias = "router.bias",
    .experts = "experts.",
    STACKED,
    REST,
};

static const epmoei_tensor_names_t llama4_names = {
    .modules = {"feed_forward."},
    .router = "router",
    .experts = "experts.",
    STACKED,
    SHARED("shared_expert."),
    .dense_module = "feed_forward.",
    PROJECTIONS(dense, ""),
    .rest_of_layer = usual_rest_of_layer,
    .outside_layers = llama4_outside_layers,
};

#define ATTENTION_BIAS                                                                                                 \
    {                                                                                                                  \
        "attention_bias", 0                                                                                            \
    }

static const epmoei_attention_rule_t mixtral_attention = {.window = EPMOEI_WINDOW_ALL};
static const epmoei_attention_rule_t qwen2_attention = {.in_bias = {"qkv_bias", 1}, .window = EPMOEI_WINDOW_SWITCHED};
static const epmoei_attention_rule_t qwen3_attention = {
    .in_bias = ATTENTION_BIAS,
    .out_bias = ATTENTION_BIAS,
    .has_qk_norm = {NULL, 1},
    .qk_norm = EPMOE_QK_NORM_HEAD,
    .window = EPMOEI_WINDOW_SWITCHED,
};
static const epmoei_attention_rule_t glm4_attention = {
    .in_bias = ATTENTION_BIAS,
    .has_qk_norm = {"use_qk_norm", 0},
    .qk_norm = EPMOE_QK_NORM_HEAD,
    .rotary_part = 0.5,
};
static const epmoei_attention_rule_t gpt_oss_attention = {
    .in_bias = {"attention_bias", 1},
    .out_bias = {"attention_bias", 1},
    .has_sinks = true,
    .window = EPMOEI_WINDOW_BY_TYPE,
};
static const epmoei_attention_rule_t deepseek_v2_attention = {
    .kind = EPMOE_ATTENTION_MLA,
    .in_bias = ATTENTION_BIAS,
    .out_bias = ATTENTION_BIAS,
    .rope_style = EPMOE_ROPE_GPTJ,
};
static const epmoei_attention_rule_t deepseek_v3_attention = {
    .kind = EPMOE_ATTENTION_MLA,
    .in_bias = ATTENTION_BIAS,
    .out_bias = ATTENTION_BIAS,
    .gptj_key = "rope_interleave",
};

static const epmoei_attention_rule_t olmoe_attention = {
    .in_bias = ATTENTION_BIAS,
    .out_bias = ATTENTION_BIAS,
    .has_qk_norm = {NULL, 1},
    .qk_norm = EPMOE_QK_NORM_ALL_HEADS,
};
static const epmoei_attention_rule_t minimax_m2_attention = {
    .has_qk_norm = {"use_qk_norm", 1},
    .qk_norm = EPMOE_QK_NORM_ALL_HEADS,
    .window = EPMOEI_WINDOW_ALL,
    .rotary_part = 1,
};
static const epmoei_attention_rule_t dots1_attention = {
    .in_bias = ATTENTION_BIAS,
    .out_bias = ATTENTION_BIAS,
    .has_qk_norm = {NULL, 1},
    .qk_norm = EPMOE_QK_NORM_HEAD,
    .window = EPMOEI_WINDOW_UPPER,
};
static const epmoei_attention_rule_t llama4_attention = {
    .in_bias = ATTENTION_BIAS,
    .out_bias = ATTENTION_BIAS,
    .has_qk_norm = {"use_qk_norm", 1},
    .qk_norm = EPMOE_QK_NORM_HEAD_UNWEIGHTED,
    .window = EPMOEI_WINDOW_CHUNKS,
    .rope_style = EPMOE_ROPE_GPTJ,
};

#define LAYERS         .layers = "model.layers."
#define ONE_GROUP      .routed_scale = 1, .n_group = 1, .topk_group = 1
#define SOFTMAX_ROUTER .scoring = EPMOE_SCORING_SOFTMAX, .topk_method = EPMOEI_TOPK_GREEDY, ONE_GROUP
#define DEEPSEEK_COMMON                                                                                                \
    LAYERS, .names = &deepseek_names, .dense_intermediate = "intermediate_size", .num_shared = "n_shared_experts"
#define QWEN_COMMON                                                                                                    \
    LAYERS, .names = &qwen_names, .dense_intermediate = "intermediate_size",                                           \
            .shared_intermediate = "shared_expert_intermediate_size"
#define LLAMA4_COMMON                                                                                                  \
    .names = &llama4_names, .dense_intermediate = "intermediate_size_mlp", .stacked_transposed = true,                 \
    .rule = {.scoring = EPMOE_SCORING_SIGMOID, .weight_on_input = 1, ONE_GROUP}, .attention = &llama4_attention

static const epmoei_family_t families[] = {
    {.model_types = {"mixtral"},
     LAYERS,
     .names = &mixtral_names,
     .rule = {SOFTMAX_ROUTER, .renormalize = 1},
     .attention = &mixtral_attention},
    {.model_types = {"minimax_m2"},
     LAYERS,
     .names = &minimax_m2_names,
     .rule = {.scoring = EPMOE_SCORING_SIGMOID, .topk_method = EPMOEI_TOPK_NOAUX_TC, .renormalize = 1, ONE_GROUP},
     .attention = &minimax_m2_attention},
    {.model_types = {"qwen2_moe"}, QWEN_COMMON, .rule = {SOFTMAX_ROUTER}, .attention = &qwen2_attention},
    {.model_types = {"qwen3_moe"}, QWEN_COMMON, .rule = {SOFTMAX_ROUTER}, .attention = &qwen3_attention},
    {.model_types = {"olmoe"}, QWEN_COMMON, .rule = {SOFTMAX_ROUTER}, .attention = &olmoe_attention},
    {.model_types = {"deepseek_v2"},
     DEEPSEEK_COMMON,
     .rule = {.scoring = EPMOE_SCORING_SOFTMAX, .topk_method = EPMOEI_TOPK_GROUP_LIMITED, ONE_GROUP},
     .attention = &deepseek_v2_attention},
    {.model_types = {"deepseek_v3"},
     DEEPSEEK_COMMON,
     .rule = {.scoring = EPMOE_SCORING_SIGMOID,
              .topk_method = EPMOEI_TOPK_NOAUX_TC,
              .renormalize = 1,
              .routed_scale = 2.5f,
              .n_group = 8,
              .topk_group = 4},
     .attention = &deepseek_v3_attention},
    {.model_types = {"kimi_k2"},
     DEEPSEEK_COMMON,
     .rule = {.scoring = EPMOE_SCORING_SIGMOID, .topk_method = EPMOEI_TOPK_NOAUX_TC, .renormalize = 1, ONE_GROUP},
     .attention = &deepseek_v3_attention},
    {.model_types = {"glm4_moe"},
     DEEPSEEK_COMMON,
     .rule = {.scoring = EPMOE_SCORING_SIGMOID, .topk_method = EPMOEI_TOPK_NOAUX_TC, .renormalize = 1, ONE_GROUP},
     .attention = &glm4_attention},
    {.model_types = {"dots1"},
     DEEPSEEK_COMMON,
     .rule = {.scoring = EPMOE_SCORING_SIGMOID, .topk_method = EPMOEI_TOPK_NOAUX_TC, ONE_GROUP},
     .attention = &dots1_attention},
    {.model_types = {"gpt_oss"},
     LAYERS,
     .names = &gpt_oss_names,
     .stacked_transposed = true,
     .stacked_interleaved = true,
     .expert_has_bias = true,
     .rule = {.scoring = EPMOE_SCORING_TOPK_SOFTMAX,
              ONE_GROUP,
              .activation = EPMOE_ACTIVATION_SWIGLU_OAI,
              .alpha = 1.702f,
              .limit = 7},
     .attention = &gpt_oss_attention},
    {.model_types = {"llama4_text"}, LAYERS, LLAMA4_COMMON},
    {.model_types = {"llama4"},
     .config_section = "text_config",
     .layers = "language_model.model.layers.",
     LLAMA4_COMMON},
    {.model_types = {"phimoe"},
     LAYERS,
     .names = &mixtral_names,
     .rule = {.scoring = EPMOE_SCORING_SPARSE_MIXER, .topk_method = EPMOEI_TOPK_GREEDY, ONE_GROUP}},
    {.model_types = {"granitemoe"},
     LAYERS,
     .names = &granite_names,
     .rule = {.scoring = EPMOE_SCORING_TOPK_SOFTMAX, .topk_method = EPMOEI_TOPK_GREEDY, ONE_GROUP}},
    {.model_types = {"ernie4_5_moe"},
     LAYERS,
     .names = &ernie_names,
     .dense_intermediate = "intermediate_size",
     .num_shared = "moe_num_shared_experts",
     .rule = {.scoring = EPMOE_SCORING_SOFTMAX, .topk_method = EPMOEI_TOPK_NOAUX_TC, .renormalize = 1, ONE_GROUP}},
    {.model_types = {"qwen3_next"},
     LAYERS,
     .names = &qwen3_next_names,
     .dense_intermediate = "intermediate_size",
     .shared_intermediate = "shared_expert_intermediate_size",
     .rule = {SOFTMAX_ROUTER, .renormalize = 1}},
};
#define FAMILY_COUNT (sizeof families / sizeof families[0])

const epmoei_family_t *epmoei_family_find(const char *model_type)
{
    for (size_t i = 0; i < FAMILY_COUNT; i++)
        for (int32_t j = 0; j < EPMOEI_FAMILY_LIST && families[i].model_types[j]; j++)
            if (!strcmp(families[i].model_types[j], model_type)) return &families[i];
    return NULL;
}

void epmoei_family_list(char *text, size_t size)
{
    size_t used = 0;
    text[0] = 0;
    for (size_t i = 0; i < FAMILY_COUNT; i++)
        for (int32_t j = 0; j < EPMOEI_FAMILY_LIST && families[i].model_types[j]; j++) {
            if (used >= size) return;
            used += (size_t)snprintf(text + used, size - used, "%s%s", used ? ", " : "", families[i].model_types[j]);
        }
}
