/* The golden checkpoints: what is read from their config.json and tensors, and the views of their tensors, which
 * reproduce the recorded router logits and MoE outputs in double precision by plain loops. */
#include "base/dtype.h"
#include "moe/checkpoint.h"
#include "tests/safetensors_build.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define TOKENS 24

static int warnings;
static void count_warning(void *ctx, epmoe_log_level_t level, const char *message)
{
    (void)ctx;
    (void)level;
    warnings++;
    fprintf(stderr, "warning: %s\n", message);
}

static epmoe_checkpoint_t *open_golden(const char *name)
{
    char dir[512];
    snprintf(dir, sizeof dir, "%s/golden/%s", EPMOE_TEST_DATA, name);
    epmoe_checkpoint_t *checkpoint = NULL;
    warnings = 0;
    epmoe_set_log(count_warning, NULL);
    epmoe_status_t status = epmoe_checkpoint_open(dir, &checkpoint);
    epmoe_set_log(NULL, NULL);
    cr_assert_eq(status, EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(warnings, 0, "%s gives %d warnings", name, warnings);
    return checkpoint;
}

/* Fields that a golden layer has; those left out are zero (routed_scale and groups: 1). */
typedef struct expected_t {
    const char *name;
    int32_t layer;
    epmoe_layer_config_t config;
} expected_t;

#define ONE_GROUP .n_group = 1, .topk_group = 1
static const expected_t expected[] = {
    {"mixtral",
     0,
     {.hidden = 64,
      .intermediate = 96,
      .num_experts = 8,
      .top_k = 2,
      .scoring = EPMOE_SCORING_SOFTMAX,
      .renormalize = 1,
      .routed_scale = 1,
      ONE_GROUP}},
    {"qwen3_moe",
     1,
     {.hidden = 64,
      .intermediate = 48,
      .num_experts = 16,
      .top_k = 4,
      .scoring = EPMOE_SCORING_SOFTMAX,
      .renormalize = 1,
      .routed_scale = 1,
      ONE_GROUP}},
    {"qwen2_moe",
     1,
     {.hidden = 64,
      .intermediate = 48,
      .num_experts = 12,
      .top_k = 3,
      .scoring = EPMOE_SCORING_SOFTMAX,
      .renormalize = 0,
      .routed_scale = 1,
      ONE_GROUP,
      .shared_intermediate = 80,
      .shared_gated = 1}},
    {"deepseek_v2",
     0,
     {.hidden = 64,
      .intermediate = 32,
      .num_experts = 16,
      .top_k = 3,
      .scoring = EPMOE_SCORING_SOFTMAX,
      .renormalize = 0,
      .routed_scale = 1.5f,
      .n_group = 4,
      .topk_group = 2,
      .group_score = EPMOE_GROUP_SCORE_MAX,
      .shared_intermediate = 64}},
    {"deepseek_v3", 0, {.hidden = 64, .shared_intermediate = 96}},
    {"deepseek_v3",
     1,
     {.hidden = 64,
      .intermediate = 32,
      .num_experts = 16,
      .top_k = 4,
      .scoring = EPMOE_SCORING_SIGMOID,
      .renormalize = 1,
      .routed_scale = 2.5f,
      .n_group = 4,
      .topk_group = 2,
      .group_score = EPMOE_GROUP_SCORE_TOP2,
      .has_selection_bias = 1,
      .shared_intermediate = 32}},
    {"glm4_moe", 0, {.hidden = 64, .shared_intermediate = 96}},
    {"glm4_moe",
     1,
     {.hidden = 64,
      .intermediate = 32,
      .num_experts = 12,
      .top_k = 3,
      .scoring = EPMOE_SCORING_SIGMOID,
      .renormalize = 1,
      .routed_scale = 1.5f,
      ONE_GROUP,
      .has_selection_bias = 1,
      .shared_intermediate = 32}},
    {"gpt_oss",
     1,
     {.hidden = 64,
      .intermediate = 64,
      .num_experts = 8,
      .top_k = 2,
      .scoring = EPMOE_SCORING_TOPK_SOFTMAX,
      .routed_scale = 1,
      ONE_GROUP,
      .router_has_bias = 1,
      .activation = EPMOE_ACTIVATION_SWIGLU_OAI,
      .alpha = 1.702f,
      .limit = 7,
      .expert_has_bias = 1}},
};

#define SAME(field)                                                                                                    \
    cr_assert_eq(got.field, want->field, "%s layer %d: " #field " is %g, not %g", expected[i].name, expected[i].layer, \
                 (double)got.field, (double)want->field)

Test(checkpoint_golden, configs)
{
    for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++) {
        epmoe_checkpoint_t *checkpoint = open_golden(expected[i].name);
        epmoe_layer_config_t got = EPMOE_LAYER_CONFIG_INIT;
        const epmoe_layer_config_t *want = &expected[i].config;
        cr_assert_eq(epmoe_checkpoint_layer_config(checkpoint, expected[i].layer, &got), EPMOE_OK, "%s",
                     epmoe_last_error());
        SAME(hidden);
        SAME(intermediate);
        SAME(num_experts);
        SAME(top_k);
        SAME(scoring);
        SAME(renormalize);
        SAME(routed_scale);
        SAME(n_group);
        SAME(topk_group);
        SAME(group_score);
        SAME(router_has_bias);
        SAME(has_selection_bias);
        SAME(weight_on_input);
        SAME(activation);
        SAME(alpha);
        SAME(limit);
        SAME(expert_has_bias);
        SAME(shared_intermediate);
        SAME(shared_gated);
        SAME(dtype);
        SAME(weight_format);
        SAME(max_tokens);
        SAME(capacity);
        cr_assert_eq(got.struct_size, sizeof got);
        epmoe_checkpoint_close(checkpoint);
        cr_assert_eq(epmoei_alloc_live(), 0);
    }
}

Test(checkpoint_golden, info)
{
    epmoe_checkpoint_t *checkpoint = open_golden("mixtral");
    epmoe_checkpoint_info_t info = EPMOE_CHECKPOINT_INFO_INIT;
    cr_assert_eq(epmoe_checkpoint_get_info(checkpoint, &info), EPMOE_OK);
    cr_assert_str_eq(info.family, "mixtral");
    cr_assert(info.num_layers == 2 && info.hidden == 64 && info.num_experts == 8 && info.num_shards == 1);
    /* The file without its header, which is 7416 bytes behind the 8 of its length. */
    char path[512];
    snprintf(path, sizeof path, "%s/golden/mixtral/model.safetensors", EPMOE_TEST_DATA);
    FILE *file = fopen(path, "rb");
    fseek(file, 0, SEEK_END);
    cr_assert_eq(info.total_bytes, ftell(file) - 7416 - 8);
    fclose(file);
    cr_assert_eq(epmoei_checkpoint_find(checkpoint, "model.norm.weight")->num_elements, 64);
    cr_assert_null(epmoei_checkpoint_find(checkpoint, "model.norm"));
    epmoe_checkpoint_close(checkpoint);
}

static double at(const epmoei_view_t *view, int64_t r, int64_t c)
{
    cr_assert(r < view->rows && c < view->cols && view->data);
    return (double)epmoei_load(view->data, view->dtype, r * view->row_stride + c * view->col_stride);
}

/* y = W x + b. */
static void multiply(const epmoei_view_t *weight, const epmoei_view_t *bias, const double *x, double *y)
{
    for (int64_t n = 0; n < weight->rows; n++) {
        y[n] = bias->data ? at(bias, 0, n) : 0;
        for (int64_t k = 0; k < weight->cols; k++) y[n] += at(weight, n, k) * x[k];
    }
}

static double sigmoid(double x) { return 1 / (1 + exp(-x)); }

/* out += scale * MLP(x). */
static void add_mlp(const epmoei_expert_source_t *source, const epmoe_layer_config_t *config, const double *x,
                    double scale, double *out)
{
    double gate[128], up[128], down[128];
    int64_t f = source->gate.rows, d = source->down.rows;
    cr_assert(f <= 128 && d <= 128);
    multiply(&source->gate, &source->gate_bias, x, gate);
    multiply(&source->up, &source->up_bias, x, up);
    for (int64_t i = 0; i < f; i++) {
        if (config->activation == EPMOE_ACTIVATION_SWIGLU_OAI) {
            double g = fmin(gate[i], 7), u = fmax(-7, fmin(up[i], 7));
            gate[i] = g * sigmoid(1.702 * g) * (u + 1);
        } else {
            gate[i] = gate[i] * sigmoid(gate[i]) * up[i];
        }
    }
    multiply(&source->down, &source->down_bias, gate, down);
    for (int64_t i = 0; i < d; i++) out[i] += scale * down[i];
}

static const epmoei_tensor_t *recorded(const epmoei_safetensors_t *file, int32_t layer, const char *name)
{
    char full[64];
    snprintf(full, sizeof full, "layers.%d.%s", layer, name);
    const epmoei_tensor_t *tensor = epmoei_safetensors_find(file, full);
    cr_assert_not_null(tensor, "%s", full);
    return tensor;
}

/* |got - recorded| / |recorded|; infinity for a NaN. */
static double rel_error(const epmoei_tensor_t *tensor, const double *got)
{
    double difference = 0, norm = 0;
    cr_assert(tensor->dtype == EPMOE_F32 && tensor->num_elements > 0);
    for (int64_t i = 0; i < tensor->num_elements; i++) {
        double want = (double)epmoei_load(tensor->data, EPMOE_F32, i);
        difference += (got[i] - want) * (got[i] - want);
        norm += want * want;
    }
    double error = sqrt(difference / norm);
    return isnan(error) ? INFINITY : error;
}

static void check_block(const epmoe_checkpoint_t *checkpoint, const epmoei_safetensors_t *golden, const char *name,
                        int32_t layer)
{
    epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
    epmoei_layer_source_t source;
    cr_assert_eq(epmoe_checkpoint_layer_config(checkpoint, layer, &config), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(epmoei_checkpoint_layer_source(checkpoint, layer, &source), EPMOE_OK, "%s", epmoe_last_error());
    int32_t d = config.hidden, k = config.top_k, num_experts = config.num_experts;
    double *out = calloc((size_t)(TOKENS * d), sizeof *out), *logits = calloc(TOKENS * 64, sizeof *logits);
    const epmoei_tensor_t *in = recorded(golden, layer, "moe.in");
    cr_assert_eq(in->num_elements, TOKENS * d);
    const void *weights = NULL, *ids = NULL;
    if (num_experts) {
        weights = recorded(golden, layer, "router.out1")->data;
        ids = recorded(golden, layer, "router.out2")->data;
    }
    for (int32_t t = 0; t < TOKENS; t++) {
        double x[128];
        for (int32_t i = 0; i < d; i++) x[i] = (double)epmoei_load(in->data, EPMOE_F32, t * d + i);
        if (num_experts) multiply(&source.router, &source.router_bias, x, logits + t * num_experts);
        for (int32_t j = 0; j < k; j++) {
            int64_t id;
            epmoei_expert_source_t expert;
            memcpy(&id, (const char *)ids + 8 * (t * k + j), 8);
            cr_assert_eq(epmoei_checkpoint_expert_source(checkpoint, layer, (int32_t)id, &expert), EPMOE_OK);
            add_mlp(&expert, &config, x, (double)epmoei_load(weights, EPMOE_F32, t * k + j), out + t * d);
        }
        if (!source.shared.gate.data) continue;
        double scale = 0;
        if (source.shared_gate.data) multiply(&source.shared_gate, &(epmoei_view_t){0}, x, &scale);
        add_mlp(&source.shared, &config, x, source.shared_gate.data ? sigmoid(scale) : 1, out + t * d);
    }
    double error = rel_error(recorded(golden, layer, "moe.out0"), out);
    cr_assert(error < 2e-6, "%s layer %d: the output is off by %g", name, layer, error);
    if (num_experts) {
        error = rel_error(recorded(golden, layer, "router.out0"), logits);
        cr_assert(error < 2e-6, "%s layer %d: the logits are off by %g", name, layer, error);
    }
    free(out);
    free(logits);
}

Test(checkpoint_golden, views_reproduce_the_recorded_blocks)
{
    static const char *const names[] = {"mixtral",     "qwen3_moe", "qwen2_moe", "deepseek_v2",
                                        "deepseek_v3", "glm4_moe",  "gpt_oss"};
    for (int i = 0; i < 7; i++) {
        char path[512];
        epmoei_safetensors_t *golden = NULL;
        epmoe_checkpoint_t *checkpoint = open_golden(names[i]);
        snprintf(path, sizeof path, "%s/golden/%s/golden.safetensors", EPMOE_TEST_DATA, names[i]);
        cr_assert_eq(epmoei_safetensors_open(path, &golden), EPMOE_OK, "%s", epmoe_last_error());
        for (int32_t layer = 0; layer < 2; layer++) check_block(checkpoint, golden, names[i], layer);
        epmoei_safetensors_close(golden);
        epmoe_checkpoint_close(checkpoint);
        cr_assert_eq(epmoei_alloc_live(), 0);
    }
}

/* gate = columns 0, 2, 4, ... of [d,2f], up = 1, 3, 5, ...; down is stored [f,d]. */
Test(checkpoint_golden, gpt_oss_strides)
{
    epmoe_checkpoint_t *checkpoint = open_golden("gpt_oss");
    epmoei_expert_source_t expert;
    const int32_t d = 64, f = 64, e = 5;
    cr_assert_eq(epmoei_checkpoint_expert_source(checkpoint, 1, e, &expert), EPMOE_OK);
    cr_assert(expert.gate.rows == f && expert.gate.cols == d && expert.gate.row_stride == 2 &&
              expert.gate.col_stride == 2 * f);
    cr_assert(expert.up.row_stride == 2 && expert.up.col_stride == 2 * f && expert.gate_bias.col_stride == 2);
    cr_assert(expert.down.rows == d && expert.down.cols == f && expert.down.row_stride == 1 &&
              expert.down.col_stride == d);
    const char *gate_up = epmoei_checkpoint_find(checkpoint, "model.layers.1.mlp.experts.gate_up_proj")->data;
    const char *down = epmoei_checkpoint_find(checkpoint, "model.layers.1.mlp.experts.down_proj")->data;
    const char *bias = epmoei_checkpoint_find(checkpoint, "model.layers.1.mlp.experts.gate_up_proj_bias")->data;
    const char *down_bias = epmoei_checkpoint_find(checkpoint, "model.layers.1.mlp.experts.down_proj_bias")->data;
    for (int32_t r = 0; r < f; r++) {
        cr_assert_eq(at(&expert.gate_bias, 0, r), (double)epmoei_load(bias, EPMOE_BF16, e * 2 * f + 2 * r));
        cr_assert_eq(at(&expert.up_bias, 0, r), (double)epmoei_load(bias, EPMOE_BF16, e * 2 * f + 2 * r + 1));
        cr_assert_eq(at(&expert.down_bias, 0, r), (double)epmoei_load(down_bias, EPMOE_BF16, e * d + r));
        for (int32_t c = 0; c < d; c++) {
            int32_t row = (e * d + c) * 2 * f;
            cr_assert_eq(at(&expert.gate, r, c), (double)epmoei_load(gate_up, EPMOE_BF16, row + 2 * r));
            cr_assert_eq(at(&expert.up, r, c), (double)epmoei_load(gate_up, EPMOE_BF16, row + 2 * r + 1));
            cr_assert_eq(at(&expert.down, r, c), (double)epmoei_load(down, EPMOE_BF16, (e * f + c) * d + r));
        }
    }
    epmoe_checkpoint_close(checkpoint);
}

Test(checkpoint_golden, selection_bias)
{
    epmoe_checkpoint_t *checkpoint = open_golden("deepseek_v3");
    epmoei_layer_source_t source;
    cr_assert_eq(epmoei_checkpoint_layer_source(checkpoint, 1, &source), EPMOE_OK);
    const epmoei_tensor_t *tensor =
        epmoei_checkpoint_find(checkpoint, "model.layers.1.mlp.gate.e_score_correction_bias");
    cr_assert(source.selection_bias.dtype == EPMOE_F32 && source.selection_bias.rows == 1 &&
              source.selection_bias.cols == 16);
    for (int i = 0; i < 16; i++)
        cr_assert_eq(at(&source.selection_bias, 0, i), (double)epmoei_load(tensor->data, EPMOE_F32, i));
    cr_assert_null(source.router_bias.data);
    cr_assert_null(source.shared_gate.data);
    /* The dense layer in front has an MLP and nothing else. */
    cr_assert_eq(epmoei_checkpoint_layer_source(checkpoint, 0, &source), EPMOE_OK);
    cr_assert(source.shared.gate.rows == 96 && source.shared.down.cols == 96);
    cr_assert(!source.router.data && !source.selection_bias.data && !source.shared.gate_bias.data);
    epmoei_expert_source_t expert;
    cr_assert_eq(epmoei_checkpoint_expert_source(checkpoint, 0, 0, &expert), EPMOE_ERROR_INVALID_ARGUMENT);
    epmoe_checkpoint_close(checkpoint);
}

/* One file with the per-expert tensors of `from` joined into the two stacked ones [E,2f,d] and [E,d,f] of newer
 * exports, below `module`. */
static void restack(build_file_t *build, const epmoei_safetensors_t *from, const char *module,
                    const char *const projections[3], int32_t num_experts, int64_t f, int64_t d, const char *to)
{
    char name[256];
    for (int64_t i = 0; i < epmoei_safetensors_count(from); i++) {
        const epmoei_tensor_t *tensor = epmoei_safetensors_at(from, i);
        if (strstr(tensor->name, ".experts.")) continue;
        const char *found = strstr(tensor->name, module);
        if (found)
            snprintf(name, sizeof name, "%.*s%s%s", (int)(found - tensor->name), tensor->name, to,
                     found + strlen(module));
        else
            snprintf(name, sizeof name, "%s", tensor->name);
        build_add(build, name, tensor->dtype_name, tensor->shape, tensor->num_dims, tensor->data, tensor->bytes);
    }
    int64_t bytes = 2 * f * d;
    char *gate_up = malloc((size_t)(num_experts * 2 * bytes)), *down = malloc((size_t)(num_experts * bytes));
    for (int32_t layer = 0; layer < 2; layer++) {
        for (int32_t e = 0; e < num_experts; e++)
            for (int p = 0; p < 3; p++) {
                snprintf(name, sizeof name, "model.layers.%d.%sexperts.%d.%s.weight", layer, module, e, projections[p]);
                const epmoei_tensor_t *tensor = epmoei_safetensors_find(from, name);
                cr_assert(tensor && tensor->bytes == bytes, "%s", name);
                memcpy(p == 2 ? down + e * bytes : gate_up + (2 * e + p) * bytes, tensor->data, (size_t)bytes);
            }
        const int64_t gate_up_shape[] = {num_experts, 2 * f, d}, down_shape[] = {num_experts, d, f};
        snprintf(name, sizeof name, "model.layers.%d.%sexperts.gate_up_proj", layer, to);
        build_add(build, name, "BF16", gate_up_shape, 3, gate_up, num_experts * 2 * bytes);
        snprintf(name, sizeof name, "model.layers.%d.%sexperts.down_proj", layer, to);
        build_add(build, name, "BF16", down_shape, 3, down, num_experts * bytes);
    }
    free(gate_up);
    free(down);
}

static void check_restacked(const char *name, const char *module, const char *const projections[3], int32_t experts,
                            int64_t f, const char *to)
{
    char dir[256], path[512];
    epmoei_safetensors_t *model = NULL, *golden = NULL;
    build_file_t build = {0};
    build_make_dir(dir);
    snprintf(path, sizeof path, "%s/golden/%s/model.safetensors", EPMOE_TEST_DATA, name);
    cr_assert_eq(epmoei_safetensors_open(path, &model), EPMOE_OK);
    snprintf(path, sizeof path, "%s/golden/%s/golden.safetensors", EPMOE_TEST_DATA, name);
    cr_assert_eq(epmoei_safetensors_open(path, &golden), EPMOE_OK);
    restack(&build, model, module, projections, experts, f, 64, to);
    build_save(&build, dir, "model.safetensors");
    snprintf(path, sizeof path, "%s/golden/%s/config.json", EPMOE_TEST_DATA, name);
    char *config = build_load_text(path);
    build_save_text(dir, "config.json", config);

    epmoe_checkpoint_t *checkpoint = NULL;
    warnings = 0;
    epmoe_set_log(count_warning, NULL);
    cr_assert_eq(epmoe_checkpoint_open(dir, &checkpoint), EPMOE_OK, "%s", epmoe_last_error());
    epmoe_set_log(NULL, NULL);
    cr_assert_eq(warnings, 0);
    for (int32_t layer = 0; layer < 2; layer++) check_block(checkpoint, golden, name, layer);
    epmoei_expert_source_t expert;
    cr_assert_eq(epmoei_checkpoint_expert_source(checkpoint, 0, 1, &expert), EPMOE_OK);
    cr_assert(expert.gate.row_stride == 64 && expert.gate.col_stride == 1 && expert.down.row_stride == f);
    epmoe_checkpoint_close(checkpoint);
    epmoei_safetensors_close(model);
    epmoei_safetensors_close(golden);
    build_free(&build);
    build_remove_dir(dir);
    free(config);
}

Test(checkpoint_golden, stacked_exports)
{
    static const char *const mixtral[] = {"w1", "w3", "w2"}, *const qwen[] = {"gate_proj", "up_proj", "down_proj"};
    check_restacked("mixtral", "block_sparse_moe.", mixtral, 8, 96, "block_sparse_moe.");
    check_restacked("mixtral", "block_sparse_moe.", mixtral, 8, 96, "mlp.");
    check_restacked("qwen2_moe", "mlp.", qwen, 12, 48, "mlp.");
    check_restacked("qwen3_moe", "mlp.", qwen, 16, 48, "mlp.");
}
