/* Families of which no golden file is recorded: a checkpoint with their names and layouts, loaded and run, against ids,
 * weights and outputs worked by hand from their public definitions.
 *
 * Hidden is 2 and the router's row e is (logit[e], 0), so that token (1, 0) has these logits. Expert e has gate (20,
 * 0), up (e + 1, 0) and down (1/20, 0): its output for this token is (e + 1, 0), since silu(20) is 20 to fp32, so that
 * y[0] = sum of weight * (id + 1). */
#include "tests/checkpoint_folder.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>

enum { kHidden = 2, kExperts = 4, kTopK = 2 };

TestSuite(families, .init = folder_set_up, .fini = folder_tear_down);

static void add(build_file_t *file, const char *name, const float *data, int64_t rows, int64_t cols)
{
    build_add(file, name, "F32", (const int64_t[]){rows, cols}, 2, data, rows * cols * 4);
}

static void add_router(build_file_t *file, const char *name, const float logits[kExperts])
{
    float rows[kExperts * kHidden] = {0};
    for (int32_t e = 0; e < kExperts; e++) rows[e * kHidden] = logits[e];
    add(file, name, rows, kExperts, kHidden);
}

/* An MLP whose output for the token is (value, 0); `prefix` names its place, the others its projections. */
static void add_mlp(build_file_t *file, const char *prefix, const char *gate, const char *up, const char *down,
                    float value)
{
    const float gate_rows[] = {20, 0}, up_rows[] = {value, 0}, down_rows[] = {1 / 20.0f, 0};
    char name[192];
    snprintf(name, sizeof name, "%s%s.weight", prefix, gate);
    add(file, name, gate_rows, 1, kHidden);
    snprintf(name, sizeof name, "%s%s.weight", prefix, up);
    add(file, name, up_rows, 1, kHidden);
    snprintf(name, sizeof name, "%s%s.weight", prefix, down);
    add(file, name, down_rows, kHidden, 1);
}

static void add_experts(build_file_t *file, const char *module, const char *gate, const char *up, const char *down)
{
    for (int32_t e = 0; e < kExperts; e++) {
        char prefix[128];
        snprintf(prefix, sizeof prefix, "model.layers.0.%s.experts.%d.", module, e);
        add_mlp(file, prefix, gate, up, down, (float)(e + 1));
    }
}

/* config.json around what differs. */
static void save(build_file_t *file, const char *model_type, const char *more)
{
    char text[1024];
    snprintf(text, sizeof text,
             "{\"model_type\":\"%s\",\"hidden_size\":2,\"num_hidden_layers\":1,\"hidden_act\":\"silu\",%s}", model_type,
             more);
    build_save_text(folder_dir, "config.json", text);
    folder_save_model(file);
}

typedef struct expected_t {
    int32_t ids[kTopK];
    double weights[kTopK];
    double added;  /* by the shared expert */
    bool on_input; /* the weight multiplies the expert's input, and with it both gate and up */
} expected_t;

static void expect(const expected_t *expected)
{
    epmoe_checkpoint_t *checkpoint = folder_open(0);
    epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
    epmoe_comm_config_t alone = EPMOE_COMM_CONFIG_INIT;
    epmoe_comm_t *comm;
    epmoe_layer_t *layer;
    const float x[kHidden] = {1, 0};
    float y[kHidden], weights[kTopK];
    int32_t ids[kTopK];
    epmoe_forward_args_t args = EPMOE_FORWARD_ARGS_INIT;
    alone.backend = EPMOE_BACKEND_CPU;
    cr_assert_eq(epmoe_checkpoint_layer_config(checkpoint, 0, &config), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(config.top_k, kTopK);
    config.dtype = EPMOE_F32;
    config.max_tokens = 1;
    cr_assert_eq(epmoe_comm_create(NULL, &alone, &comm), EPMOE_OK);
    cr_assert_eq(epmoe_layer_create(&config, comm, &layer), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(epmoe_layer_load_checkpoint(layer, checkpoint, 0, NULL), EPMOE_OK, "%s", epmoe_last_error());
    args.num_tokens = 1;
    args.x = x;
    args.y = y;
    args.ids_out = ids;
    args.weights_out = weights;
    cr_assert_eq(epmoe_layer_forward_args(layer, &args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    double sum = expected->added;
    for (int32_t j = 0; j < kTopK; j++) {
        cr_expect_eq(ids[j], expected->ids[j], "id %d is %d", j, ids[j]);
        cr_expect(fabs((double)weights[j] - expected->weights[j]) < 1e-5, "weight %d is %.7f: expected %.7f", j,
                  (double)weights[j], expected->weights[j]);
        double weight = expected->weights[j] * (expected->on_input ? expected->weights[j] : 1);
        sum += weight * (expected->ids[j] + 1);
    }
    cr_expect(fabs((double)y[0] - sum) < 1e-4, "y is %.7f: expected %.7f", (double)y[0], sum);
    cr_expect(y[1] == 0);
    epmoe_layer_destroy(layer);
    epmoe_comm_destroy(comm);
    epmoe_checkpoint_close(checkpoint);
}

/* SparseMixer with the jitter of config.json, 0.1: of logits 4, 3.5, 3.3, 1 the first choice competes with 3.5 and 3.3
 * (1 / (1 + e^-0.5 + e^-0.7)), the second with 3.3 (1 / (1 + e^-0.2)). */
Test(families, phimoe)
{
    build_file_t file = {0};
    add_router(&file, "model.layers.0.block_sparse_moe.gate.weight", (const float[]){3.3f, 4, 1, 3.5f});
    add_experts(&file, "block_sparse_moe", "w1", "w3", "w2");
    save(&file, "phimoe",
         "\"num_local_experts\":4,\"num_experts_per_tok\":2,\"intermediate_size\":1,\"router_jitter_noise\":0.1");
    expect(&(expected_t){{1, 3}, {0.475485, 0.549834}, 0, false});
}

/* Without the key jitter is 0.01: nothing else is close. */
Test(families, phimoe_default_jitter)
{
    build_file_t file = {0};
    add_router(&file, "model.layers.0.block_sparse_moe.gate.weight", (const float[]){3.3f, 4, 1, 3.5f});
    add_experts(&file, "block_sparse_moe", "w1", "w3", "w2");
    save(&file, "phimoe", "\"num_local_experts\":4,\"num_experts_per_tok\":2,\"intermediate_size\":1");
    expect(&(expected_t){{1, 3}, {1, 1}, 0, false});
}

/* Softmax over the two chosen logits, ln 3 and 0: 3/4 and 1/4. All experts in one tensor [E,2f,d], gate first. */
Test(families, granitemoe)
{
    build_file_t file = {0};
    float input[kExperts][2][kHidden] = {{{0}}}, output[kExperts][kHidden] = {{0}};
    for (int32_t e = 0; e < kExperts; e++) {
        input[e][0][0] = 20;
        input[e][1][0] = (float)(e + 1);
        output[e][0] = 1 / 20.0f;
    }
    add_router(&file, "model.layers.0.block_sparse_moe.router.layer.weight", (const float[]){-1, 0, 1.0986123f, -2});
    build_add(&file, "model.layers.0.block_sparse_moe.input_linear.weight", "F32", (const int64_t[]){4, 2, 2}, 3, input,
              sizeof input);
    build_add(&file, "model.layers.0.block_sparse_moe.output_linear.weight", "F32", (const int64_t[]){4, 2, 1}, 3,
              output, sizeof output);
    build_weight(&file, 2, 0, "model.layers.0.input_layernorm.weight");
    save(&file, "granitemoe", "\"num_local_experts\":4,\"num_experts_per_tok\":2,\"intermediate_size\":1");
    expect(&(expected_t){{2, 1}, {0.75, 0.25}, 0, false});
}

/* Something below the stacked tensors' names is no tensor of the family. */
Test(families, granitemoe_with_a_stray_expert_tensor)
{
    build_file_t file = {0};
    add_router(&file, "model.layers.0.block_sparse_moe.router.layer.weight", (const float[]){0, 0, 0, 0});
    build_add(&file, "model.layers.0.block_sparse_moe.input_linear.weight", "F32", (const int64_t[]){4, 2, 2}, 3, NULL,
              64);
    build_add(&file, "model.layers.0.block_sparse_moe.output_linear.weight", "F32", (const int64_t[]){4, 2, 1}, 3, NULL,
              32);
    build_add(&file, "model.layers.0.block_sparse_moe.input_linear.weight_scale", "F32", (const int64_t[]){4}, 1, NULL,
              16);
    save(&file, "granitemoe", "\"num_local_experts\":4,\"num_experts_per_tok\":2,\"intermediate_size\":1");
    folder_expect_fail(EPMOE_ERROR_FORMAT, "input_linear.weight_scale", "quantised", NULL);
}

/* Softmax of ln(1 2 3 4) = 0.1 0.2 0.3 0.4; the bias 0.25 of expert 0 chooses it besides 3, and weighs nothing:
 * 0.4 and 0.1 divided by their sum. Two shared experts side by side, of 5 and 6. */
Test(families, ernie4_5_moe)
{
    build_file_t file = {0};
    const float bias[kExperts] = {0.25f, 0, 0, 0};
    const float gate[2][2] = {{20, 0}, {20, 0}}, up[2][2] = {{5, 0}, {6, 0}},
                down[2][2] = {{1 / 20.0f, 1 / 20.0f}, {0}};
    add_router(&file, "model.layers.0.mlp.gate.weight", (const float[]){0, 0.6931472f, 1.0986123f, 1.3862944f});
    add(&file, "model.layers.0.mlp.moe_statics.e_score_correction_bias", bias, 1, kExperts);
    add_experts(&file, "mlp", "gate_proj", "up_proj", "down_proj");
    add(&file, "model.layers.0.mlp.shared_experts.gate_proj.weight", gate[0], 2, 2);
    add(&file, "model.layers.0.mlp.shared_experts.up_proj.weight", up[0], 2, 2);
    add(&file, "model.layers.0.mlp.shared_experts.down_proj.weight", down[0], 2, 2);
    build_weight(&file, 2, 0, "model.mtp_emb_norm.0.weight");
    save(&file, "ernie4_5_moe",
         "\"moe_num_experts\":4,\"moe_k\":2,\"moe_intermediate_size\":1,\"intermediate_size\":6,"
         "\"moe_num_shared_experts\":2,\"moe_norm_min\":1e-12");
    expect(&(expected_t){{3, 0}, {0.8, 0.2}, 11, false});
}

/* Softmax renormalised over the two chosen: 4/7 and 3/7. The shared expert, 5, times sigmoid(ln 3) = 3/4. The layer's
 * attention is a linear one, and layers for speculative decoding lie under mtp. */
Test(families, qwen3_next)
{
    build_file_t file = {0};
    const float shared_gate[] = {1.0986123f, 0};
    add_router(&file, "model.layers.0.mlp.gate.weight", (const float[]){0, 0.6931472f, 1.0986123f, 1.3862944f});
    add_experts(&file, "mlp", "gate_proj", "up_proj", "down_proj");
    add_mlp(&file, "model.layers.0.mlp.shared_expert.", "gate_proj", "up_proj", "down_proj", 5);
    add(&file, "model.layers.0.mlp.shared_expert_gate.weight", shared_gate, 1, kHidden);
    build_weight(&file, 2, 2, "model.layers.0.linear_attn.in_proj_qkvz.weight");
    build_weight(&file, 2, 2, "mtp.layers.0.mlp.gate.weight");
    save(&file, "qwen3_next",
         "\"num_experts\":4,\"num_experts_per_tok\":2,\"moe_intermediate_size\":1,\"intermediate_size\":6,"
         "\"shared_expert_intermediate_size\":1");
    expect(&(expected_t){{3, 2}, {4 / 7.0, 3 / 7.0}, 3.75, false});
}

/* Softmax over all, not renormalised: 0.4 and 0.3. */
Test(families, olmoe)
{
    build_file_t file = {0};
    add_router(&file, "model.layers.0.mlp.gate.weight", (const float[]){0, 0.6931472f, 1.0986123f, 1.3862944f});
    add_experts(&file, "mlp", "gate_proj", "up_proj", "down_proj");
    save(&file, "olmoe",
         "\"num_experts\":4,\"num_experts_per_tok\":2,\"intermediate_size\":1,\"norm_topk_prob\":false");
    expect(&(expected_t){{3, 2}, {0.4, 0.3}, 0, false});
}

/* sigmoid(ln(1 2 3 4)) = 1/2 2/3 3/4 4/5; the bias 0.5 of expert 0 puts it first, 1.0: 1/2 and 4/5 by their sum. */
Test(families, minimax_m2)
{
    build_file_t file = {0};
    const float bias[kExperts] = {0.5f, 0, 0, 0};
    add_router(&file, "model.layers.0.block_sparse_moe.gate.weight",
               (const float[]){0, 0.6931472f, 1.0986123f, 1.3862944f});
    build_add(&file, "model.layers.0.block_sparse_moe.e_score_correction_bias", "F32", (const int64_t[]){4}, 1, bias,
              16);
    add_experts(&file, "block_sparse_moe", "w1", "w3", "w2");
    save(&file, "minimax_m2",
         "\"num_local_experts\":4,\"num_experts_per_tok\":2,\"intermediate_size\":1,\"scoring_func\":\"sigmoid\","
         "\"use_routing_bias\":true");
    expect(&(expected_t){{0, 3}, {0.5 / 1.3, 0.8 / 1.3}, 0, false});
}

/* The same scores, renormalised and times 2.5; the shared expert is not scaled. */
Test(families, dots1)
{
    build_file_t file = {0};
    const float bias[kExperts] = {0};
    add_router(&file, "model.layers.0.mlp.gate.weight", (const float[]){0, 0.6931472f, 1.0986123f, 1.3862944f});
    build_add(&file, "model.layers.0.mlp.gate.e_score_correction_bias", "F32", (const int64_t[]){4}, 1, bias, 16);
    add_experts(&file, "mlp", "gate_proj", "up_proj", "down_proj");
    add_mlp(&file, "model.layers.0.mlp.shared_experts.", "gate_proj", "up_proj", "down_proj", 5);
    save(&file, "dots1",
         "\"n_routed_experts\":4,\"num_experts_per_tok\":2,\"moe_intermediate_size\":1,\"intermediate_size\":6,"
         "\"n_shared_experts\":1,\"n_group\":1,\"topk_group\":1,\"norm_topk_prob\":true,\"routed_scaling_factor\":2.5,"
         "\"scoring_func\":\"noaux_tc\"");
    expect(&(expected_t){{3, 2}, {2.5 * 0.8 / 1.55, 2.5 * 0.75 / 1.55}, 5, false});
}

/* sigmoid(ln 3) and sigmoid(ln 4) multiply what goes into the expert: silu(20 w) (e + 1) w / 20 = w^2 (e + 1). Stacked
 * and transposed: [E,d,2f] and [E,f,d]. */
Test(families, llama4)
{
    build_file_t file = {0};
    float gate_up[kExperts][kHidden][2] = {{{0}}}, down[kExperts][kHidden] = {{0}};
    for (int32_t e = 0; e < kExperts; e++) {
        gate_up[e][0][0] = 20;
        gate_up[e][0][1] = (float)(e + 1);
        down[e][0] = 1 / 20.0f;
    }
    add_router(&file, "model.layers.0.feed_forward.router.weight", (const float[]){1.3862944f, 0, 1.0986123f, -1});
    build_add(&file, "model.layers.0.feed_forward.experts.gate_up_proj", "F32", (const int64_t[]){4, 2, 2}, 3, gate_up,
              sizeof gate_up);
    build_add(&file, "model.layers.0.feed_forward.experts.down_proj", "F32", (const int64_t[]){4, 1, 2}, 3, down,
              sizeof down);
    add_mlp(&file, "model.layers.0.feed_forward.shared_expert.", "gate_proj", "up_proj", "down_proj", 5);
    save(&file, "llama4_text",
         "\"num_local_experts\":4,\"num_experts_per_tok\":2,\"intermediate_size\":1,\"intermediate_size_mlp\":6");
    expect(&(expected_t){{0, 2}, {0.8, 0.75}, 5, true});
}
