/* How the tensors of a checkpoint are stored: stacked, transposed, quantised. */
#include "tests/checkpoint_folder.h"

#include <criterion/criterion.h>
#include <stdio.h>

enum { D = FOLDER_HIDDEN, F = FOLDER_WIDTH };

TestSuite(checkpoint_formats, .init = folder_set_up, .fini = folder_tear_down);

/* Gate and up in one tensor, transposed, halves one behind the other: [E,d,2f] with gate first, down [E,f,d]. */
Test(checkpoint_formats, stacked_transposed_halves)
{
    const int64_t gate_up_shape[] = {3, D, 2 * F}, down_shape[] = {3, F, D};
    const char *gate_up = "language_model.model.layers.0.feed_forward.experts.gate_up_proj";
    const char *down = "language_model.model.layers.0.feed_forward.experts.down_proj";
    build_file_t file = {0};
    build_weight(&file, 3 * D, 2 * F, "%s", gate_up);
    build_weight(&file, 3 * F, D, "%s", down);
    for (int i = 0; i < 2; i++) {
        file.tensors[i].num_dims = 3;
        memcpy(file.tensors[i].shape, i ? down_shape : gate_up_shape, sizeof down_shape);
    }
    build_weight(&file, 3, D, "language_model.model.layers.0.feed_forward.router.weight");
    folder_add_mlp(&file, "language_model.model.layers.0.feed_forward.shared_expert.", 2);
    folder_add_mlp(&file, "language_model.model.layers.1.feed_forward.", 6);
    build_weight(&file, 3, D, "vision_model.patch.weight");
    folder_save_model(&file);
    build_save_text(folder_dir, "config.json",
                    "{\"model_type\":\"llama4\",\"text_config\":{\"hidden_size\":4,\"num_hidden_layers\":2,"
                    "\"num_local_experts\":3,\"num_experts_per_tok\":1,\"intermediate_size\":2,"
                    "\"intermediate_size_mlp\":6,\"hidden_act\":\"silu\"}}");
    epmoe_checkpoint_t *checkpoint = folder_open(0);
    epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
    cr_assert_eq(epmoe_checkpoint_layer_config(checkpoint, 0, &config), EPMOE_OK);
    cr_assert(config.scoring == EPMOE_SCORING_SIGMOID && config.weight_on_input && !config.renormalize);
    cr_assert(config.num_experts == 3 && config.intermediate == 2 && config.shared_intermediate == 2);
    for (int32_t e = 0; e < 3; e++) {
        epmoei_expert_source_t expert;
        cr_assert_eq(epmoei_checkpoint_expert_source(checkpoint, 0, e, &expert), EPMOE_OK);
        cr_assert(expert.gate.rows == F && expert.gate.cols == D && expert.down.rows == D && expert.down.cols == F);
        for (int64_t r = 0; r < F; r++)
            for (int64_t c = 0; c < D; c++) {
                cr_assert_eq(folder_at(&expert.gate, r, c), build_value(gate_up, (e * D + c) * 2 * F + r));
                cr_assert_eq(folder_at(&expert.up, r, c), build_value(gate_up, (e * D + c) * 2 * F + F + r));
                cr_assert_eq(folder_at(&expert.down, c, r), build_value(down, (e * F + r) * D + c));
            }
    }
    epmoe_checkpoint_close(checkpoint);
}

/* gate rows g0..g3 and up rows u0..u3 of one expert in [E,2f,d]: values 1..8 by row. */
Test(checkpoint_formats, stacked_halves_are_gate_then_up)
{
    float rows[2][8][2];
    const int64_t shape[] = {2, 8, 2}, down_shape[] = {2, 2, 4}, router[] = {2, 2};
    for (int e = 0; e < 2; e++)
        for (int r = 0; r < 8; r++)
            for (int c = 0; c < 2; c++) rows[e][r][c] = (float)(100 * e + r + 1);
    build_file_t file = {0};
    build_add(&file, "model.layers.0.mlp.experts.gate_up_proj", "F32", shape, 3, rows, sizeof rows);
    build_add(&file, "model.layers.0.mlp.experts.down_proj", "F16", down_shape, 3, NULL, 32);
    build_add(&file, "model.layers.0.mlp.gate.weight", "F32", router, 2, NULL, 16);
    folder_save_model(&file);
    build_save_text(folder_dir, "config.json",
                    "{\"model_type\":\"olmoe\",\"hidden_size\":2,\"num_hidden_layers\":1,\"num_experts\":2,"
                    "\"num_experts_per_tok\":1,\"intermediate_size\":4}");
    epmoe_checkpoint_t *checkpoint = folder_open(0);
    for (int32_t e = 0; e < 2; e++) {
        epmoei_expert_source_t expert;
        cr_assert_eq(epmoei_checkpoint_expert_source(checkpoint, 0, e, &expert), EPMOE_OK);
        cr_assert(expert.gate.rows == 4 && expert.gate.dtype == EPMOE_F32 && expert.down.dtype == EPMOE_F16);
        for (int r = 0; r < 4; r++) {
            cr_assert_eq(folder_at(&expert.gate, r, 1), (float)(100 * e + r + 1));
            cr_assert_eq(folder_at(&expert.up, r, 1), (float)(100 * e + r + 5));
        }
    }
    epmoe_checkpoint_close(checkpoint);
    /* The same bytes as [E,d,2f]: the family decides the orientation, so the shape is wrong. */
    const int64_t transposed[] = {2, 2, 8};
    build_add(&file, "model.layers.0.mlp.experts.gate_up_proj", "F32", transposed, 3, rows, sizeof rows);
    build_add(&file, "model.layers.0.mlp.experts.down_proj", "F16", down_shape, 3, NULL, 32);
    build_add(&file, "model.layers.0.mlp.gate.weight", "F32", router, 2, NULL, 16);
    folder_save_model(&file);
    folder_expect_fail(EPMOE_ERROR_FORMAT, "mlp.experts.gate_up_proj", "[2,2,8]", "[2,8,2]", NULL);
}
