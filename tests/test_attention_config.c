/* config.json: what a decoder layer needs of it, in both generations of its keys, by family; and what is refused, which
 * must not keep the MoE blocks of the model from running. */
#include "moe/model_config.h"
#include "tests/safetensors_build.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>

static char dir[256];
static char path[300];

static void set_up(void)
{
    build_make_dir(dir);
    snprintf(path, sizeof path, "%s/config.json", dir);
}

static void tear_down(void)
{
    build_remove_dir(dir);
    cr_assert_eq(epmoei_alloc_live(), 0);
}

TestSuite(attention_config, .init = set_up, .fini = tear_down);

#define SHAPE                                                                                                          \
    "\"hidden_size\":64,\"num_hidden_layers\":3,\"num_experts\":16,\"moe_intermediate_size\":32,"                      \
    "\"num_experts_per_tok\":4,"
#define HEADS "\"num_attention_heads\":8,\"num_key_value_heads\":2,"
#define MLA                                                                                                            \
    "\"num_attention_heads\":8,\"q_lora_rank\":null,\"kv_lora_rank\":48,\"qk_nope_head_dim\":16,"                      \
    "\"qk_rope_head_dim\":8,\"v_head_dim\":12,"
#define REST "\"rms_norm_eps\":1e-5,\"vocab_size\":100,\"max_position_embeddings\":512"
#define ROPE ",\"rope_theta\":1e6"

/* The config of a model; it opens whatever its attention is. */
static epmoei_attention_config_t read(const char *model_type, const char *keys)
{
    char text[2048];
    epmoei_model_config_t config;
    snprintf(text, sizeof text, "{\"model_type\":\"%s\",%s%s}", model_type, SHAPE, keys);
    build_save_text(dir, "config.json", text);
    cr_assert_eq(epmoei_model_config_read(path, &config), EPMOE_OK, "%s", epmoe_last_error());
    return config.attention;
}

static epmoe_decoder_config_t layer_of(const char *model_type, const char *keys, int32_t layer)
{
    epmoei_attention_config_t config = read(model_type, keys);
    epmoe_decoder_config_t decoder;
    cr_assert_eq(epmoei_attention_config_of(&config, layer, &decoder), EPMOE_OK, "%s: %s", keys, epmoe_last_error());
    return decoder;
}

static void refuses(const char *model_type, const char *keys, epmoe_status_t status, const char *what, const char *also)
{
    epmoei_attention_config_t config = read(model_type, keys);
    epmoe_decoder_config_t decoder;
    cr_assert_eq(epmoei_attention_config_of(&config, 0, &decoder), status, "%s: %s", keys, config.message);
    cr_assert(strstr(epmoe_last_error(), path), "%s", epmoe_last_error());
    cr_assert(strstr(epmoe_last_error(), what), "\"%s\" is not in \"%s\"", what, epmoe_last_error());
    cr_assert(strstr(epmoe_last_error(), also), "\"%s\" is not in \"%s\"", also, epmoe_last_error());
}

Test(attention_config, families)
{
    static const struct {
        const char *model_type;
        const char *more;
        int32_t in_bias, out_bias, qk_norm, has_sinks, rotary_dim, window;
    } rules[] = {
        {"mixtral", "", 0, 0, 0, 0, 8, 0},
        {"mixtral", ",\"sliding_window\":96", 0, 0, 0, 0, 8, 96},
        {"mixtral", ",\"sliding_window\":null", 0, 0, 0, 0, 8, 0},
        {"qwen2_moe", "", 1, 0, 0, 0, 8, 0},
        {"qwen2_moe", ",\"qkv_bias\":false,\"sliding_window\":96", 0, 0, 0, 0, 8, 0},
        {"qwen3_moe", "", 0, 0, 1, 0, 8, 0},
        {"qwen3_moe", ",\"attention_bias\":true,\"use_sliding_window\":false,\"sliding_window\":96", 1, 1, 1, 0, 8, 0},
        {"glm4_moe", "", 0, 0, 0, 0, 4, 0},
        {"glm4_moe", ",\"attention_bias\":true,\"use_qk_norm\":true,\"partial_rotary_factor\":0.25", 1, 0, 1, 0, 2, 0},
        {"olmoe", "", 0, 0, 2, 0, 8, 0},
        {"dots1", ",\"attention_bias\":true,\"sliding_window\":null", 1, 1, 1, 0, 8, 0},
        {"dots1", ",\"sliding_window\":96,\"max_window_layers\":9", 0, 0, 1, 0, 8, 0},
        {"minimax_m2", "", 0, 0, 2, 0, 8, 0},
        {"minimax_m2", ",\"use_qk_norm\":false,\"rotary_dim\":4", 0, 0, 0, 0, 4, 0},
        {"gpt_oss", ",\"sliding_window\":96,\"layer_types\":[\"full_attention\",\"full_attention\",\"full_attention\"]",
         1, 1, 0, 1, 8, 0},
        {"gpt_oss",
         ",\"attention_bias\":false,\"sliding_window\":96,"
         "\"layer_types\":[\"sliding_attention\",\"full_attention\",\"sliding_attention\"]",
         0, 0, 0, 1, 8, 96},
    };
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++) {
        char keys[1024];
        snprintf(keys, sizeof keys, "%s%s%s", HEADS REST ROPE, rules[i].more, "");
        epmoe_decoder_config_t got = layer_of(rules[i].model_type, keys, 0);
        cr_assert(got.attention == EPMOE_ATTENTION_GQA && got.num_heads == 8 && got.num_kv_heads == 2);
        cr_assert_eq(got.head_dim, 8); /* 64 / 8 */
        cr_assert_eq(got.in_bias, rules[i].in_bias, "%s%s", rules[i].model_type, rules[i].more);
        cr_assert_eq(got.out_bias, rules[i].out_bias, "%s%s", rules[i].model_type, rules[i].more);
        cr_assert_eq(got.qk_norm, rules[i].qk_norm, "%s%s", rules[i].model_type, rules[i].more);
        cr_assert_eq(got.has_sinks, rules[i].has_sinks, "%s%s", rules[i].model_type, rules[i].more);
        cr_assert_eq(got.rope.rotary_dim, rules[i].rotary_dim, "%s%s", rules[i].model_type, rules[i].more);
        cr_assert_eq(got.window, rules[i].window, "%s%s", rules[i].model_type, rules[i].more);
        cr_assert(got.rope_style == EPMOE_ROPE_NEOX && got.norm_eps == 1e-5f && got.scale == 0);
        cr_assert(got.rope.base == 1e6 && got.rope.num_positions == 512 && got.rope.scaling == 0);
        cr_assert(got.cache_layout == EPMOE_CACHE_LAYOUT_NHD && got.num_blocks == 0);
    }
    epmoe_decoder_config_t got = layer_of("qwen3_moe", HEADS REST ROPE ",\"head_dim\":20", 0);
    cr_assert(got.head_dim == 20 && got.rope.rotary_dim == 20);
    got = layer_of("mixtral", "\"num_attention_heads\":8," REST ROPE, 0);
    cr_assert_eq(got.num_kv_heads, 8);
}

Test(attention_config, windows_by_layer)
{
    const char *keys =
        HEADS REST ROPE ",\"sliding_window\":7,\"use_sliding_window\":true,"
                        "\"layer_types\":[\"sliding_attention\",\"full_attention\",\"sliding_attention\"]";
    static const int32_t windows[] = {7, 0, 7};
    for (int32_t i = 0; i < 3; i++) {
        cr_assert_eq(layer_of("gpt_oss", keys, i).window, windows[i]);
        cr_assert_eq(layer_of("qwen2_moe", keys, i).window, windows[i]);
    }
}

/* Llama 4: every fourth layer, or those listed, has no positions; what chunks or the temperature would change is out of
 * bounds. */
Test(attention_config, llama4)
{
    epmoe_decoder_config_t got = layer_of("llama4_text", HEADS REST ROPE, 2);
    cr_assert(got.no_rope == 0 && got.qk_norm == EPMOE_QK_NORM_HEAD_UNWEIGHTED && got.rope.num_positions == 512);
    cr_assert(got.rope_style == EPMOE_ROPE_GPTJ && got.window == 0);
    got = layer_of("llama4_text", HEADS REST ROPE ",\"no_rope_layer_interval\":3,\"attention_chunk_size\":100", 2);
    cr_assert(got.no_rope == 1 && got.qk_norm == EPMOE_QK_NORM_NONE && got.rope.num_positions == 100);
    got = layer_of("llama4_text", HEADS REST ROPE ",\"no_rope_layers\":[1,0,1],\"floor_scale\":64", 1);
    cr_assert(got.no_rope == 1 && got.rope.num_positions == 63);
    got = layer_of("llama4_text",
                   HEADS REST ROPE ",\"no_rope_layers\":[1,0,1],\"floor_scale\":64,\"attn_temperature_tuning\":false,"
                                   "\"layer_types\":[\"chunked_attention\",\"full_attention\",\"chunked_attention\"]",
                   0);
    cr_assert(got.no_rope == 0 && got.rope.num_positions == 512);
}

Test(attention_config, mla)
{
    epmoe_decoder_config_t got = layer_of("deepseek_v3", MLA REST ROPE, 0);
    cr_assert(got.attention == EPMOE_ATTENTION_MLA && got.num_heads == 8 && got.q_latent == 0 && got.kv_latent == 48);
    cr_assert(got.nope_dim == 16 && got.rope_dim == 8 && got.value_dim == 12 && got.rope.rotary_dim == 8);
    cr_assert(got.num_kv_heads == 0 && got.head_dim == 0 && got.in_bias == 0 && got.latent_eps == 0);
    cr_assert(got.rope_style == EPMOE_ROPE_GPTJ && fabsf(got.scale - 0.20412415f) < 1e-7f);
    got = layer_of("deepseek_v3", MLA REST ROPE ",\"rope_interleave\":false,\"attention_bias\":true", 0);
    cr_assert(got.rope_style == EPMOE_ROPE_NEOX && got.in_bias == 1 && got.out_bias == 1);
    got = layer_of("deepseek_v2", MLA REST ROPE ",\"rope_interleave\":false", 0); /* not a key of this family */
    cr_assert_eq(got.rope_style, EPMOE_ROPE_GPTJ);

    /* As DeepSeek-V3 has it: m = 0.1 * ln 40 + 1 = 1.36888795, its square 1.87385421; over sqrt(24). */
    got = layer_of("kimi_k2",
                   MLA REST ROPE ",\"rope_scaling\":{\"type\":\"yarn\",\"factor\":40,\"beta_fast\":32,\"beta_slow\":1,"
                                 "\"mscale\":1.0,\"mscale_all_dim\":1.0,\"original_max_position_embeddings\":4096}",
                   0);
    cr_assert(fabsf(got.scale - 0.38249889f) < 1e-6f, "scale is %.8g", (double)got.scale);
    cr_assert(got.rope.scaling == EPMOE_ROPE_SCALING_YARN && got.rope.factor == 40 && got.rope.mscale == 1 &&
              got.rope.mscale_all_dim == 1 && got.rope.original_positions == 4096 && got.rope.no_truncate == 0);
}

Test(attention_config, rotary_scaling)
{
    epmoe_decoder_config_t got =
        layer_of("gpt_oss",
                 HEADS REST
                 ",\"sliding_window\":4,\"layer_types\":[\"full_attention\",\"full_attention\",\"full_attention\"],"
                 "\"rope_parameters\":{\"rope_theta\":150000.0,\"rope_type\":\"yarn\",\"factor\":32,\"truncate\":false,"
                 "\"beta_fast\":16,\"beta_slow\":2,\"attention_factor\":1.25}",
                 0);
    cr_assert(got.rope.base == 150000 && got.rope.factor == 32 && got.rope.no_truncate == 1);
    cr_assert(got.rope.beta_fast == 16 && got.rope.beta_slow == 2 && got.rope.attention_factor == 1.25);
    cr_assert_eq(got.rope.original_positions, 512); /* max_position_embeddings where nothing else is said */
    got = layer_of("mixtral",
                   HEADS REST ROPE ",\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":1,"
                                   "\"high_freq_factor\":4,\"original_max_position_embeddings\":256}",
                   0);
    cr_assert(got.rope.scaling == EPMOE_ROPE_SCALING_LLAMA3 && got.rope.factor == 8 && got.rope.low_freq_factor == 1 &&
              got.rope.high_freq_factor == 4 && got.rope.original_positions == 256);
    got = layer_of("mixtral", HEADS REST ROPE ",\"rope_scaling\":{\"type\":\"linear\",\"factor\":2.5}", 0);
    cr_assert(got.rope.scaling == EPMOE_ROPE_SCALING_LINEAR && got.rope.factor == 2.5);
    got = layer_of("mixtral",
                   HEADS REST ",\"rope_scaling\":null,\"rope_parameters\":{\"rope_theta\":5e5,"
                              "\"rope_type\":\"default\"}",
                   0);
    cr_assert(got.rope.scaling == EPMOE_ROPE_SCALING_NONE && got.rope.base == 5e5);
}

#define UNKNOWN EPMOE_ERROR_NOT_SUPPORTED
#define BROKEN  EPMOE_ERROR_FORMAT

Test(attention_config, refused)
{
    refuses("minimax_m2", HEADS REST ROPE ",\"qk_norm_type\":\"per_head\"", UNKNOWN, "qk_norm_type is \"per_head\"",
            "per_layer");
    refuses("minimax_m2", HEADS REST ROPE ",\"attn_type_list\":[1,0,1]", UNKNOWN, "attn_type_list[1] is not 1",
            "softmax");
    refuses("dots1", HEADS REST ROPE ",\"sliding_window\":8", BROKEN, "max_window_layers is missing", "");
    refuses("llama4_text", HEADS REST ROPE ",\"no_rope_layers\":[1,1]", BROKEN, "no_rope_layers", "3 numbers");
    refuses("llama4_text", HEADS REST ROPE ",\"no_rope_layers\":[1,true,1]", BROKEN, "no_rope_layers[1]", "0 or 1");
    refuses("olmoe", HEADS REST ROPE ",\"clip_qkv\":8.0", UNKNOWN, "clip_qkv", "expected null");
    refuses("mixtral", HEADS REST ROPE ",\"clip_qkv\":8.0", UNKNOWN, "clip_qkv", "expected null");
    refuses("mixtral", HEADS REST ROPE ",\"partial_rotary_factor\":0.5", UNKNOWN, "partial_rotary_factor is 0.5",
            "expected 1");
    refuses("mixtral", HEADS REST ROPE ",\"rope_scaling\":{\"type\":\"dynamic\",\"factor\":2}", UNKNOWN,
            "type is \"dynamic\"", "default, linear, llama3, yarn");
    refuses("mixtral", HEADS REST ROPE ",\"rope_parameters\":{\"full_attention\":{\"rope_type\":\"default\"}}", UNKNOWN,
            "rope_parameters has an object full_attention", "all layers");
    refuses("gpt_oss", HEADS REST ROPE ",\"sliding_window\":8", UNKNOWN, "layer_types is missing", "8");
    refuses("qwen3_moe", HEADS REST ROPE ",\"sliding_window\":8,\"use_sliding_window\":true", UNKNOWN,
            "layer_types is missing", "8");
    refuses("mixtral", HEADS REST ROPE ",\"layer_types\":[\"full_attention\",\"chunked_attention\",\"full_attention\"]",
            UNKNOWN, "layer_types[1] is \"chunked_attention\"", "sliding_attention");
    refuses("glm4_moe",
            HEADS REST ROPE ",\"sliding_window\":4,"
                            "\"layer_types\":[\"full_attention\",\"sliding_attention\",\"full_attention\"]",
            UNKNOWN, "sliding_attention", "window is 0");

    refuses("mixtral", HEADS REST ROPE ",\"layer_types\":[\"full_attention\"]", BROKEN, "layer_types", "3 strings");
    refuses("mixtral", REST ROPE, BROKEN, "num_attention_heads is missing", "");
    refuses("mixtral", "\"num_attention_heads\":8,\"num_key_value_heads\":3," REST ROPE, BROKEN,
            "num_key_value_heads is 3", "divisor of 8");
    refuses("mixtral", "\"num_attention_heads\":5," REST ROPE, BROKEN, "num_attention_heads is 5", "64");
    refuses("mixtral", "\"num_attention_heads\":-1," REST ROPE, BROKEN, "num_attention_heads is -1", "1..");
    refuses("mixtral", HEADS REST, BROKEN, "rope_theta is missing", "");
    refuses("mixtral", HEADS REST ",\"rope_theta\":1", BROKEN, "rope_theta is 1", "above 1");
    refuses("mixtral", HEADS REST ROPE ",\"rope_scaling\":7", BROKEN, "rope_scaling is not an object", "");
    refuses("mixtral", HEADS REST ROPE ",\"rope_scaling\":{\"factor\":2}", BROKEN, "rope_type or type is missing", "");
    refuses("mixtral", HEADS REST ROPE ",\"rope_scaling\":{\"type\":\"yarn\"}", BROKEN, "factor is missing", "");
    refuses("mixtral", HEADS REST ROPE ",\"rope_scaling\":{\"type\":\"linear\",\"factor\":0.5}", BROKEN,
            "factor is 0.5", "at least 1");
    refuses("mixtral", HEADS REST ROPE ",\"head_dim\":9", BROKEN, "9 of a head's 9 columns rotate", "even");
    refuses("glm4_moe", HEADS REST ROPE ",\"partial_rotary_factor\":1.5", BROKEN, "partial_rotary_factor is 1.5",
            "at most 1");
    refuses("glm4_moe", HEADS REST ROPE ",\"use_qk_norm\":1", BROKEN, "use_qk_norm is not a boolean", "");
    refuses("mixtral", HEADS "\"vocab_size\":100,\"max_position_embeddings\":512" ROPE, BROKEN,
            "rms_norm_eps is missing", "");
    refuses("mixtral", HEADS "\"vocab_size\":100,\"rms_norm_eps\":1e-5" ROPE, BROKEN,
            "max_position_embeddings is missing", "");
    refuses("deepseek_v3", HEADS REST ROPE, BROKEN, "kv_lora_rank is missing", "");
    refuses("qwen3_next", HEADS REST ROPE, UNKNOWN, "the row of qwen3_next in moe/families.c has no rule for attention",
            "MoE blocks only");
    refuses("qwen3_next", HEADS "\"vocab_size\":100" ROPE, UNKNOWN,
            "the row of qwen3_next in moe/families.c has no rule for attention", "MoE blocks only");
}

/* Layers that differ from one another are kept in a table of 1024. */
Test(attention_config, too_many_layers)
{
    enum { kLayers = 1025 };
    static const struct {
        const char *model_type;
        const char *keys;
        const char *message;
    } cases[] = {
        {"mixtral", "", "layer_types has 1025 entries: expected at most 1024"},
        {"dots1", ",\"sliding_window\":8,\"max_window_layers\":4", "1025 layers with windows: expected at most 1024"},
        {"llama4_text", "", "1025 layers: expected at most 1024"},
    };
    static char text[32 * kLayers];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        epmoei_model_config_t config;
        epmoe_decoder_config_t decoder;
        int used = snprintf(text, sizeof text,
                            "{\"model_type\":\"%s\",\"hidden_size\":64,\"num_hidden_layers\":%d,\"num_experts\":16,"
                            "\"moe_intermediate_size\":32,\"num_experts_per_tok\":4," HEADS REST ROPE "%s",
                            cases[i].model_type, (int)kLayers, cases[i].keys);
        if (i == 0)
            for (int32_t layer = 0; layer < kLayers; layer++)
                used += snprintf(text + used, sizeof text - (size_t)used, "%s\"full_attention\"",
                                 layer ? "," : ",\"layer_types\":[");
        snprintf(text + used, sizeof text - (size_t)used, i == 0 ? "]}" : "}");
        build_save_text(dir, "config.json", text);
        cr_assert_eq(epmoei_model_config_read(path, &config), EPMOE_OK, "%s", epmoe_last_error());
        cr_assert_eq(epmoei_attention_config_of(&config.attention, 0, &decoder), EPMOE_ERROR_NOT_SUPPORTED);
        cr_assert(strstr(epmoe_last_error(), cases[i].message), "%s", epmoe_last_error());
    }
}

Test(attention_config, head)
{
    epmoei_attention_config_t config = read("mixtral", HEADS REST ROPE ",\"tie_word_embeddings\":true");
    cr_assert(config.head_status == EPMOE_OK && config.vocab_size.value == 100 && config.tied);
    config = read("mixtral", HEADS REST ROPE);
    cr_assert(config.head_status == EPMOE_OK && !config.tied && config.norm_eps == 1e-5f);
    config = read("mixtral", HEADS "\"rms_norm_eps\":1e-5,\"max_position_embeddings\":512" ROPE);
    cr_assert(config.head_status == EPMOE_ERROR_FORMAT && strstr(config.head_message, "vocab_size is missing"));
    cr_assert_eq(config.status, EPMOE_OK); /* the layers need no vocabulary */
}
