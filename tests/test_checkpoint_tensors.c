/* Tensors of a checkpoint: missing, surplus, contradicted by config.json; dense and shared layers. */
#include "tests/checkpoint_folder.h"

#include <criterion/criterion.h>

enum { D = FOLDER_HIDDEN, F = FOLDER_WIDTH };

TestSuite(checkpoint_tensors, .init = folder_set_up, .fini = folder_tear_down);

#define EXPERT(e, p) "model.layers.0.mlp.experts." e "." p "_proj.weight"

Test(checkpoint_tensors, missing_tensors_are_named)
{
    static const char *const names[] = {EXPERT("2", "gate"), EXPERT("1", "up"), EXPERT("0", "down"),
                                        "model.layers.0.mlp.gate.weight"};
    folder_config("qwen3_moe", 1, FOLDER_QWEN);
    for (int i = 0; i < 4; i++) {
        build_file_t file = {0};
        folder_add_qwen(&file, 0);
        build_remove(&file, names[i]);
        folder_save_model(&file);
        folder_expect_fail(EPMOE_ERROR_FORMAT, folder_dir, names[i], "is missing", NULL);
    }
    build_file_t file = {0};
    build_weight(&file, D, 0, "model.norm.weight");
    folder_save_model(&file);
    folder_expect_fail(EPMOE_ERROR_FORMAT, "model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate_proj.weight",
                       "is missing", NULL);
    folder_config("qwen3_moe", 2, FOLDER_QWEN);
    folder_expect_fail(EPMOE_ERROR_FORMAT, "num_hidden_layers is 2", "1 tensors", NULL);
}

Test(checkpoint_tensors, surplus_tensors)
{
    static const char *const bad[] = {
        EXPERT("3", "gate"),
        EXPERT("00", "gate"),
        EXPERT("-1", "gate"),
        EXPERT("9999999999", "gate"),
        "model.layers.0.mlp.experts.1.gate_proj.bias",
        "model.layers.0.mlp.experts.1.gate_proj.weight2",
        "model.layers.0.mlp.experts.1.w1.weight",
        "model.layers.0.mlp.experts.1.gate_proj.qzeros",
        "model.layers.0.mlp.experts.1.gate_proj.qweight",
        "model.layers.0.mlp.experts.gate_proj",
        "model.layers.0.mlp.experts.down_proj",
    };
    folder_config("qwen3_moe", 1, FOLDER_QWEN);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        build_file_t file = {0};
        folder_add_qwen(&file, 0);
        build_weight(&file, F, D, "%s", bad[i]);
        folder_save_model(&file);
        folder_expect_fail(EPMOE_ERROR_FORMAT, bad[i], "model.safetensors", NULL);
    }
    /* Experts below the other name that the family's block may have. */
    build_file_t mixed = {0};
    folder_add_mixtral(&mixed, 0);
    build_weight(&mixed, F, D, "model.layers.0.mlp.experts.0.w1.weight");
    folder_save_model(&mixed);
    folder_config("mixtral", 1, FOLDER_MIXTRAL);
    folder_expect_fail(EPMOE_ERROR_FORMAT, "model.layers.0.mlp.experts.0.w1.weight", "below the experts", NULL);
    /* A weight stored both plainly and quantised, or plainly with a scale. */
    static const char *const twice[] = {"shared_expert.up_proj.qweight", "shared_expert.up_proj.weight_scale_inv",
                                        "gate.weight_packed", "shared_expert_gate.scales"};
    folder_config("qwen2_moe", 1, FOLDER_QWEN);
    for (int i = 0; i < 4; i++) {
        folder_add_qwen(&mixed, 0);
        folder_add_mlp(&mixed, "model.layers.0.mlp.shared_expert.", 6);
        build_weight(&mixed, 1, D, "model.layers.0.mlp.shared_expert_gate.weight");
        build_weight(&mixed, 1, D, "model.layers.0.mlp.%s", twice[i]);
        folder_save_model(&mixed);
        folder_expect_fail(EPMOE_ERROR_FORMAT, twice[i], "belongs to a quantised weight", "BF16", NULL);
    }

    /* What belongs to a decoder layer, or to the layers for speculative decoding behind the last, is no surprise;
     * anything else is a warning. */
    static const char *const good[] = {"model.layers.0.self_attn.q_proj.weight",
                                       "model.layers.0.self_attn.rotary_emb.inv_freq",
                                       "model.layers.0.input_layernorm.weight",
                                       "model.layers.0.post_attention_layernorm.weight",
                                       "model.embed_tokens.weight",
                                       "model.norm.weight",
                                       "lm_head.weight",
                                       "model.layers.1.mlp.experts.7.gate_proj.weight",
                                       "model.layers.1.eh_proj.weight"};
    static const char *const odd[] = {"model.layers.2.mlp.gate.weight",  "model.layers.0.mlp.extra.weight",
                                      "model.layers.0.extra.weight",     "model.layers.0.mlp.gate_proj.weight",
                                      "model.layers.00.mlp.gate.weight", "vision.weight"};
    folder_config("qwen3_moe", 1, FOLDER_QWEN ",\"num_nextn_predict_layers\":1");
    build_file_t file = {0};
    folder_add_qwen(&file, 0);
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) build_weight(&file, 1, D, "%s", good[i]);
    build_save(&file, folder_dir, "model.safetensors");
    epmoe_checkpoint_close(folder_open(0));
    for (int i = 0; i < 6; i++) build_weight(&file, 1, D, "%s", odd[i]);
    build_save(&file, folder_dir, "model.safetensors");
    epmoe_checkpoint_close(folder_open(6));
    for (int i = 0; i < 6; i++) cr_assert(strstr(folder_log, odd[i]), "%s is not in\n%s", odd[i], folder_log);
    for (int i = 0; i < 100; i++) build_weight(&file, 1, D, "vision.%d.weight", i);
    folder_save_model(&file);
    epmoe_checkpoint_close(folder_open(21));
    cr_assert(strstr(folder_log, "86 more"), "%s", folder_log);
}

typedef struct contradiction_t {
    const char *config;
    const char *key; /* these are in the message */
    const char *tensor;
    const char *shape;
} contradiction_t;

Test(checkpoint_tensors, config_that_the_tensors_contradict)
{
    static const contradiction_t cases[] = {
        {"\"num_experts\":4,\"moe_intermediate_size\":2", "num_experts is 4", "mlp.gate.weight", "[3,4]"},
        {"\"num_experts\":2,\"moe_intermediate_size\":2", "num_experts is 2", "mlp.gate.weight", "[3,4]"},
        {"\"moe_num_experts\":5,\"moe_intermediate_size\":2", "moe_num_experts is 5", "mlp.gate.weight", "[3,4]"},
        {"\"num_experts\":3,\"moe_intermediate_size\":3", "moe_intermediate_size is 3", EXPERT("0", "gate"), "[2,4]"},
        {"\"num_experts\":3,\"intermediate_size\":7", "intermediate_size is 7", EXPERT("0", "gate"), "[2,4]"},
        {FOLDER_QWEN ",\"shared_expert_intermediate_size\":5", "shared_expert_intermediate_size is 5",
         "mlp.shared_expert.gate_proj.weight", "[6,4]"},
        {FOLDER_QWEN ",\"shared_expert_intermediate_size\":0", "shared_expert_intermediate_size is 0",
         "mlp.shared_expert.gate_proj.weight", "[6,4]"},
    };
    build_file_t file = {0};
    folder_add_qwen(&file, 0);
    folder_add_mlp(&file, "model.layers.0.mlp.shared_expert.", 6);
    build_weight(&file, 1, D, "model.layers.0.mlp.shared_expert_gate.weight");
    folder_save_model(&file);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        folder_config("qwen2_moe", 1, cases[i].config);
        folder_expect_fail(EPMOE_ERROR_FORMAT, cases[i].key, cases[i].tensor, cases[i].shape, "config.json", NULL);
    }
    folder_config("qwen2_moe", 1, FOLDER_QWEN ",\"shared_expert_intermediate_size\":6");
    epmoe_checkpoint_close(folder_open(0));
    folder_config("qwen2_moe", 1, FOLDER_QWEN);
    epmoe_checkpoint_close(folder_open(0));

    /* hidden_size, which save_config makes 4. */
    folder_add_qwen(&file, 0);
    build_remove(&file, "model.layers.0.mlp.gate.weight");
    build_weight(&file, 3, 5, "model.layers.0.mlp.gate.weight");
    folder_save_model(&file);
    folder_config("qwen3_moe", 1, FOLDER_QWEN);
    folder_expect_fail(EPMOE_ERROR_FORMAT, "hidden_size is 4", "model.layers.0.mlp.gate.weight", "[3,5]", NULL);
    /* A weight with too few dimensions. */
    folder_add_qwen(&file, 0);
    build_remove(&file, EXPERT("1", "down"));
    build_weight(&file, D * F, 0, "%s", EXPERT("1", "down"));
    folder_save_model(&file);
    folder_expect_fail(EPMOE_ERROR_FORMAT, EXPERT("1", "down"), "[8]", "[4,2]", NULL);
    /* The shared experts' width by their number. */
    folder_add_qwen(&file, 0);
    build_weight(&file, 3, 0, "model.layers.0.mlp.gate.e_score_correction_bias");
    folder_add_mlp(&file, "model.layers.0.mlp.shared_experts.", 6);
    folder_save_model(&file);
    folder_config("glm4_moe", 1, FOLDER_DEEPSEEK ",\"n_shared_experts\":2");
    folder_expect_fail(EPMOE_ERROR_FORMAT, "n_shared_experts is 2", "moe_intermediate_size is 2", "[6,4]", NULL);
    folder_config("glm4_moe", 1, FOLDER_DEEPSEEK ",\"n_shared_experts\":3");
    epmoe_checkpoint_close(folder_open(0));
}

/* A dense layer, a layer with a bf16 selection bias, and shared experts that config.json says nothing of. */
Test(checkpoint_tensors, dense_and_shared)
{
    build_file_t file = {0};
    folder_add_mlp(&file, "model.layers.0.mlp.", 6);
    folder_add_qwen(&file, 1);
    build_weight(&file, 3, 0, "model.layers.1.mlp.gate.e_score_correction_bias");
    folder_add_mlp(&file, "model.layers.1.mlp.shared_experts.", 8);
    folder_save_model(&file);
    folder_config("dots1", 2, FOLDER_DEEPSEEK ",\"hidden_act\":\"gelu\"");
    epmoe_checkpoint_t *checkpoint = folder_open(0);
    epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
    epmoei_layer_source_t source;
    cr_assert_eq(epmoe_checkpoint_layer_config(checkpoint, 0, &config), EPMOE_OK);
    cr_assert(config.num_experts == 0 && config.intermediate == 0 && config.top_k == 0 && config.hidden == D);
    cr_assert(config.shared_intermediate == 6 && !config.has_selection_bias && !config.shared_gated);
    cr_assert_eq(config.activation, EPMOE_ACTIVATION_GELU);
    cr_assert_eq(epmoei_checkpoint_layer_source(checkpoint, 0, &source), EPMOE_OK);
    folder_check_written(&source.shared.gate, 6, D, "model.layers.0.mlp.gate_proj.weight");
    folder_check_written(&source.shared.up, 6, D, "model.layers.0.mlp.up_proj.weight");
    folder_check_written(&source.shared.down, D, 6, "model.layers.0.mlp.down_proj.weight");
    cr_assert(!source.router.data);
    cr_assert_eq(epmoe_checkpoint_layer_config(checkpoint, 1, &config), EPMOE_OK);
    cr_assert(config.num_experts == 3 && config.shared_intermediate == 8 && config.has_selection_bias);
    cr_assert_eq(epmoei_checkpoint_layer_source(checkpoint, 1, &source), EPMOE_OK);
    folder_check_written(&source.shared.up, 8, D, "model.layers.1.mlp.shared_experts.up_proj.weight");
    folder_check_written(&source.selection_bias, 1, 3, "model.layers.1.mlp.gate.e_score_correction_bias");
    cr_assert_eq(source.selection_bias.dtype, EPMOE_BF16);
    epmoe_checkpoint_close(checkpoint);
    folder_config("dots1", 2, "\"n_routed_experts\":3,\"moe_intermediate_size\":2,\"intermediate_size\":5");
    folder_expect_fail(EPMOE_ERROR_FORMAT, "intermediate_size is 5", "model.layers.0.mlp.gate_proj.weight", "[6,4]",
                       NULL);
}
