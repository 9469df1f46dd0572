/* MLA as its papers have it, in double precision: keys and values of every head made from the latent, which the library
 * never does. For what no golden checkpoint has: q without a latent, biases, YaRN with mscale, NEOX pairs, odd sizes.
 * The MLP's last matrix is zeros, so that y = x + attention. */
#include "tests/safetensors_build.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { kHidden = 14, kHeads = 3, kNope = 5, kRope = 6, kValue = 7, kLatent = 10, kQLatent = 9, kTokens = 11, kMlp = 4 };
enum { kQk = kNope + kRope, kKv = kNope + kValue };

typedef struct variant_t {
    bool q_latent, bias, gptj, yarn;
} variant_t;

typedef struct model_t {
    variant_t variant;
    float input_norm[kHidden], post_norm[kHidden], q[kHeads * kQk * kHidden], q_down[kQLatent * kHidden];
    float q_down_bias[kQLatent], q_down_norm[kQLatent], q_up[kHeads * kQk * kQLatent];
    float kv_down[(kLatent + kRope) * kHidden], kv_down_bias[kLatent + kRope], kv_down_norm[kLatent];
    float kv_up[kHeads * kKv * kLatent], out[kHidden * kHeads * kValue], out_bias[kHidden];
    float mlp[kMlp * kHidden], zeros[kHidden * kMlp];
} model_t;

static void add(build_file_t *file, const char *name, const float *data, int64_t rows, int64_t cols)
{
    char full[128];
    const int64_t shape[] = {rows, cols};
    snprintf(full, sizeof full, "model.layers.0.%s", name);
    build_add(file, full, "F32", shape, cols ? 2 : 1, data, rows * (cols ? cols : 1) * 4);
}

static void fill(testing_rng_t *rng, float *data, int64_t n, float mean, float scale)
{
    for (int64_t i = 0; i < n; i++) data[i] = mean + scale * testing_normal(rng);
}

static void draw(testing_rng_t *rng, model_t *m)
{
    const float narrow = 0.5f; /* about 1 / sqrt of the widths */
    fill(rng, m->input_norm, kHidden, 1, 0.2f), fill(rng, m->post_norm, kHidden, 1, 0.2f);
    fill(rng, m->q, kHeads * kQk * kHidden, 0, narrow), fill(rng, m->q_down, kQLatent * kHidden, 0, narrow);
    fill(rng, m->q_down_bias, kQLatent, 0, 1), fill(rng, m->q_down_norm, kQLatent, 1, 0.2f);
    fill(rng, m->q_up, kHeads * kQk * kQLatent, 0, narrow);
    fill(rng, m->kv_down, (kLatent + kRope) * kHidden, 0, narrow), fill(rng, m->kv_down_bias, kLatent + kRope, 0, 1);
    fill(rng, m->kv_down_norm, kLatent, 1, 0.2f), fill(rng, m->kv_up, kHeads * kKv * kLatent, 0, narrow);
    fill(rng, m->out, kHidden * kHeads * kValue, 0, narrow), fill(rng, m->out_bias, kHidden, 0, 1);
    fill(rng, m->mlp, kMlp * kHidden, 0, narrow);
}

static void save(const model_t *m, const char *dir)
{
    build_file_t file = {0};
    add(&file, "input_layernorm.weight", m->input_norm, kHidden, 0);
    add(&file, "post_attention_layernorm.weight", m->post_norm, kHidden, 0);
    if (m->variant.q_latent) {
        add(&file, "self_attn.q_a_proj.weight", m->q_down, kQLatent, kHidden);
        add(&file, "self_attn.q_a_layernorm.weight", m->q_down_norm, kQLatent, 0);
        add(&file, "self_attn.q_b_proj.weight", m->q_up, kHeads * kQk, kQLatent);
        if (m->variant.bias) add(&file, "self_attn.q_a_proj.bias", m->q_down_bias, kQLatent, 0);
    } else {
        add(&file, "self_attn.q_proj.weight", m->q, kHeads * kQk, kHidden);
    }
    add(&file, "self_attn.kv_a_proj_with_mqa.weight", m->kv_down, kLatent + kRope, kHidden);
    add(&file, "self_attn.kv_a_layernorm.weight", m->kv_down_norm, kLatent, 0);
    add(&file, "self_attn.kv_b_proj.weight", m->kv_up, kHeads * kKv, kLatent);
    add(&file, "self_attn.o_proj.weight", m->out, kHidden, kHeads * kValue);
    if (m->variant.bias) {
        add(&file, "self_attn.kv_a_proj_with_mqa.bias", m->kv_down_bias, kLatent + kRope, 0);
        add(&file, "self_attn.o_proj.bias", m->out_bias, kHidden, 0);
    }
    add(&file, "mlp.gate_proj.weight", m->mlp, kMlp, kHidden);
    add(&file, "mlp.up_proj.weight", m->mlp, kMlp, kHidden);
    add(&file, "mlp.down_proj.weight", m->zeros, kHidden, kMlp);
    build_save(&file, dir, "model.safetensors");
    build_free(&file);
    char text[2048];
    snprintf(text, sizeof text,
             "{\"model_type\":\"deepseek_v3\",\"hidden_size\":%d,\"num_hidden_layers\":1,\"n_routed_experts\":8,"
             "\"moe_intermediate_size\":4,\"intermediate_size\":%d,\"num_experts_per_tok\":2,\"n_group\":1,"
             "\"topk_group\":1,\"rms_norm_eps\":1e-5,\"vocab_size\":8,\"max_position_embeddings\":64,"
             "\"num_attention_heads\":%d,\"q_lora_rank\":%s,\"kv_lora_rank\":%d,\"qk_nope_head_dim\":%d,"
             "\"qk_rope_head_dim\":%d,\"v_head_dim\":%d,\"attention_bias\":%s,\"rope_interleave\":%s,"
             "\"rope_theta\":100%s}",
             kHidden, kMlp, kHeads, m->variant.q_latent ? "9" : "null", kLatent, kNope, kRope, kValue,
             m->variant.bias ? "true" : "false", m->variant.gptj ? "true" : "false",
             m->variant.yarn ? ",\"rope_scaling\":{\"type\":\"yarn\",\"factor\":8,\"beta_fast\":4,\"beta_slow\":0.5,"
                               "\"mscale\":0.7,\"mscale_all_dim\":1.2,\"original_max_position_embeddings\":16}"
                             : "");
    build_save_text(dir, "config.json", text);
}

/* --------------------------------------------------------------------------------------------------------- oracle */

static void multiply(const float *w, const float *bias, int rows, int cols, const double *x, double *y)
{
    for (int r = 0; r < rows; r++) {
        y[r] = bias ? (double)bias[r] : 0;
        for (int c = 0; c < cols; c++) y[r] += (double)w[r * cols + c] * x[c];
    }
}

static void normalise(double *x, const float *w, int n, double eps)
{
    double squares = 0;
    for (int i = 0; i < n; i++) squares += x[i] * x[i];
    for (int i = 0; i < n; i++) x[i] *= (double)w[i] / sqrt(squares / n + eps);
}

/* With base 100 the pairs turn by 1, 100^(-1/3) and 100^(-2/3). YaRN: a pair turns L * f / (2 pi) times in L = 16, and
 * the pair that turns n times is 3 * ln(16 / (2 pi n)) / ln(100): n = 4: -0.29, so 0; n = 0.5: 1.06, so 2. The ramp
 * from 0 to 2 keeps pair 0, halves the way for pair 1 and stretches pair 2 by 8. */
static void rotate(double *x, int position, variant_t variant)
{
    const double stretched[] = {0, 0.5, 1};
    for (int i = 0; i < 3; i++) {
        double f = pow(100, -i / 3.0), size = 1;
        if (variant.yarn) {
            f = f * (1 - stretched[i]) + f / 8 * stretched[i];
            size = (0.1 * 0.7 * log(8) + 1) / (0.1 * 1.2 * log(8) + 1);
        }
        int a = variant.gptj ? 2 * i : i, b = variant.gptj ? 2 * i + 1 : i + 3;
        double c = size * cos(position * f), s = size * sin(position * f), old = x[a];
        x[a] = x[a] * c - x[b] * s;
        x[b] = x[b] * c + old * s;
    }
}

static void attend(const model_t *m, const float *x, double *y)
{
    static double q[kTokens][kHeads * kQk], kv[kTokens][kLatent + kRope], heads[kTokens][kHeads * kKv];
    variant_t variant = m->variant;
    double scale = 1 / sqrt(kQk), yarn = 0.1 * 1.2 * log(8) + 1;
    if (variant.yarn) scale *= yarn * yarn;
    for (int t = 0; t < kTokens; t++) {
        double row[kHidden], latent[kQLatent], o[kHeads * kValue] = {0};
        for (int i = 0; i < kHidden; i++) row[i] = (double)x[t * kHidden + i];
        normalise(row, m->input_norm, kHidden, 1e-5);
        if (variant.q_latent) {
            multiply(m->q_down, variant.bias ? m->q_down_bias : NULL, kQLatent, kHidden, row, latent);
            normalise(latent, m->q_down_norm, kQLatent, 1e-6);
            multiply(m->q_up, NULL, kHeads * kQk, kQLatent, latent, q[t]);
        } else {
            multiply(m->q, NULL, kHeads * kQk, kHidden, row, q[t]);
        }
        multiply(m->kv_down, variant.bias ? m->kv_down_bias : NULL, kLatent + kRope, kHidden, row, kv[t]);
        normalise(kv[t], m->kv_down_norm, kLatent, 1e-6);
        rotate(kv[t] + kLatent, t, variant);
        multiply(m->kv_up, NULL, kHeads * kKv, kLatent, kv[t], heads[t]);
        for (int h = 0; h < kHeads; h++) {
            double *own = q[t] + h * kQk, weights[kTokens], sum = 0;
            rotate(own + kNope, t, variant);
            for (int j = 0; j <= t; j++) {
                double score = 0;
                for (int i = 0; i < kNope; i++) score += own[i] * heads[j][h * kKv + i];
                for (int i = 0; i < kRope; i++) score += own[kNope + i] * kv[j][kLatent + i];
                sum += weights[j] = exp(scale * score);
            }
            for (int j = 0; j <= t; j++)
                for (int i = 0; i < kValue; i++) o[h * kValue + i] += weights[j] / sum * heads[j][h * kKv + kNope + i];
        }
        multiply(m->out, variant.bias ? m->out_bias : NULL, kHidden, kHeads * kValue, o, y + t * kHidden);
        for (int i = 0; i < kHidden; i++) y[t * kHidden + i] += (double)x[t * kHidden + i];
    }
}

/* ----------------------------------------------------------------------------------------------------------- test */

static void run(const char *dir, const float *x, float *y)
{
    epmoe_checkpoint_t *checkpoint = NULL;
    epmoe_decoder_t *decoder = NULL;
    epmoe_decoder_config_t config = EPMOE_DECODER_CONFIG_INIT;
    epmoe_layer_config_t mlp = EPMOE_LAYER_CONFIG_INIT;
    cr_assert_eq(epmoe_checkpoint_open(dir, &checkpoint), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(epmoe_checkpoint_decoder_config(checkpoint, 0, &config), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(epmoe_checkpoint_layer_config(checkpoint, 0, &mlp), EPMOE_OK, "%s", epmoe_last_error());
    mlp.dtype = EPMOE_F32;
    mlp.max_tokens = kTokens;
    config.num_blocks = 4;
    config.block_size = 3;
    cr_assert_eq(epmoe_decoder_create(&config, &mlp, NULL, &decoder), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(epmoe_decoder_load_checkpoint(decoder, checkpoint, 0, NULL), EPMOE_OK, "%s", epmoe_last_error());
    const int32_t blocks[] = {2, 0, 3, 1}, splits[] = {0, 7, 8, kTokens};
    for (int part = 0; part < 3; part++) {
        int32_t starts[] = {0, splits[part + 1] - splits[part]}, length = splits[part + 1];
        epmoe_decoder_forward_args_t args = EPMOE_DECODER_FORWARD_ARGS_INIT;
        args.num_tokens = starts[1];
        args.num_seqs = 1;
        args.x = x + splits[part] * kHidden;
        args.y = y + splits[part] * kHidden;
        args.query_start = starts;
        args.seq_lens = &length;
        args.block_table = blocks;
        args.max_blocks = 4;
        cr_assert_eq(epmoe_decoder_forward(decoder, &args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    }
    epmoe_decoder_destroy(decoder);
    epmoe_checkpoint_close(checkpoint);
}

Test(decoder_oracle, mla_of_all_kinds)
{
    testing_rng_t rng = testing_rng(testing_seed());
    for (int kind = 0; kind < 16; kind++) {
        static model_t m;
        char dir[256];
        m.variant = (variant_t){kind & 1, kind & 2, kind & 4, kind & 8};
        draw(&rng, &m);
        build_make_dir(dir);
        save(&m, dir);
        float x[kTokens * kHidden], *y = testing_buffer(sizeof x, 4);
        double ref[kTokens * kHidden];
        testing_fill_normal(&rng, x, EPMOE_F32, kTokens * kHidden, 1);
        attend(&m, x, ref);
        run(dir, x, y);
        double error = testing_rel_error(y, EPMOE_F32, ref, kTokens * kHidden);
        cr_assert(error < 3e-6, "q_latent %d, bias %d, gptj %d, yarn %d: rel_err is %g", m.variant.q_latent,
                  m.variant.bias, m.variant.gptj, m.variant.yarn, error);
        cr_assert(testing_guards_intact(y));
        testing_buffer_free(y);
        build_remove_dir(dir);
    }
    cr_assert_eq(epmoei_alloc_live(), 0);
}
