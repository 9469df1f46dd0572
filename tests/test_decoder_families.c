/* Attention of families without a golden checkpoint, as their public definitions have it, in double precision: OLMoE
 * and MiniMax-M2 normalise all heads of q and k together, the latter rotates half of a head; dots.llm1 normalises each
 * head and may have windows from some layer on; Llama 4 rotates neighbouring columns, then normalises without a weight,
 * and has layers without positions. Also projections in GPTQ and AWQ. The MLP's last matrix is zeros, so that y = x +
 * attention. */
#include "base/dtype.h"
#include "tests/safetensors_build.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kHidden = 24, kHeads = 6, kKvHeads = 2, kHead = 8, kTokens = 13, kMlp = 4, kLayers = 4 };
enum { kQ = kHeads * kHead, kKv = kKvHeads * kHead };

typedef struct family_t {
    const char *model_type;
    const char *layers;      /* of tensor names */
    const char *mlp;         /* prefix of a dense MLP; NULL: MiniMax's MoE block */
    const char *keys;        /* of config.json */
    int32_t layer;           /* which is tested */
    int32_t rotary;          /* columns of a head that turn, */
    bool pairs;              /* neighbours, or half and half */
    bool stretched;          /* Llama 3's rule: slow pairs turn an eighth as far */
    bool all_heads, by_head; /* norms with weights */
    bool unweighted;         /* a norm behind the rotation */
    bool bias;
    int32_t window;
    enum { PLAIN, GPTQ, AWQ } quant; /* of the four projections */
} family_t;

static const family_t families[] = {
    {.model_type = "olmoe", .layers = "model.layers.", .mlp = "mlp", .keys = "", .rotary = 8, .all_heads = true},
    {.model_type = "olmoe",
     .layers = "model.layers.",
     .mlp = "mlp",
     .keys = ",\"attention_bias\":true,\"clip_qkv\":null",
     .rotary = 8,
     .all_heads = true,
     .bias = true},
    {.model_type = "minimax_m2",
     .layers = "model.layers.",
     .keys = ",\"rotary_dim\":4,\"use_qk_norm\":true,\"qk_norm_type\":\"per_layer\",\"attn_type_list\":[1,1,1,1]",
     .rotary = 4,
     .all_heads = true},
    {.model_type = "dots1", .layers = "model.layers.", .mlp = "mlp", .keys = "", .rotary = 8, .by_head = true},
    {.model_type = "dots1",
     .layers = "model.layers.",
     .mlp = "mlp",
     .keys = ",\"attention_bias\":true,\"sliding_window\":5,\"max_window_layers\":2",
     .layer = 2,
     .rotary = 8,
     .by_head = true,
     .bias = true,
     .window = 5},
    {.model_type = "dots1",
     .layers = "model.layers.",
     .mlp = "mlp",
     .keys = ",\"sliding_window\":5,\"max_window_layers\":2",
     .layer = 1,
     .rotary = 8,
     .by_head = true},
    {.model_type = "llama4_text",
     .layers = "model.layers.",
     .mlp = "feed_forward",
     .keys = ",\"use_qk_norm\":true,\"attn_temperature_tuning\":4,\"attention_chunk_size\":64,"
             "\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":1,\"high_freq_factor\":1,"
             "\"original_max_position_embeddings\":50}",
     .layer = 2,
     .rotary = 8,
     .pairs = true,
     .stretched = true,
     .unweighted = true},
    {.model_type = "llama4_text",
     .layers = "model.layers.",
     .mlp = "feed_forward",
     .keys = ",\"use_qk_norm\":true,\"attention_bias\":true",
     .layer = 3, /* every fourth has no positions */
     .bias = true},
    {.model_type = "llama4_text",
     .layers = "model.layers.",
     .mlp = "feed_forward",
     .keys = ",\"use_qk_norm\":false,\"no_rope_layers\":[0,1,1,1]",
     .layer = 3,
     .rotary = 8,
     .pairs = true},
    {.model_type = "olmoe",
     .layers = "model.layers.",
     .mlp = "mlp",
     .keys = ",\"quantization_config\":{\"quant_method\":\"gptq\",\"bits\":4,\"group_size\":8,\"desc_act\":false,"
             "\"sym\":false}",
     .rotary = 8,
     .all_heads = true,
     .quant = GPTQ},
    {.model_type = "dots1",
     .layers = "model.layers.",
     .mlp = "mlp",
     .keys = ",\"quantization_config\":{\"quant_method\":\"awq\",\"bits\":4,\"group_size\":8,\"zero_point\":true,"
             "\"version\":\"gemm\"}",
     .rotary = 8,
     .by_head = true,
     .quant = AWQ},
};

typedef struct weights_t {
    float input_norm[kHidden], post_norm[kHidden], q[kQ * kHidden], k[kKv * kHidden], v[kKv * kHidden];
    float q_bias[kQ], k_bias[kKv], v_bias[kKv], q_norm[kQ], k_norm[kKv], out[kHidden * kQ], out_bias[kHidden];
    float mlp[kMlp * kHidden], zeros[kHidden * kMlp];
} weights_t;

/* The same in every layer. */
static void add_typed(build_file_t *file, const family_t *family, const char *name, const char *dtype, int64_t size,
                      const void *data, int64_t rows, int64_t cols)
{
    char full[160];
    const int64_t shape[] = {rows, cols};
    for (int layer = 0; layer < kLayers; layer++) {
        snprintf(full, sizeof full, "%s%d.%s", family->layers, layer, name);
        build_add(file, full, dtype, shape, cols ? 2 : 1, data, rows * (cols ? cols : 1) * size);
    }
}

static void add(build_file_t *file, const family_t *family, const char *name, const float *data, int64_t rows,
                int64_t cols)
{
    add_typed(file, family, name, "F32", 4, data, rows, cols);
}

/* A projection [n,k] in groups of 8 columns: weights of random codes, zero points and scales, and its tensors. */
static void add_quantised(build_file_t *file, const family_t *family, testing_rng_t *rng, const char *name, float *w,
                          int32_t n, int32_t k)
{
    static const int32_t awq_order[] = {0, 2, 4, 6, 1, 3, 5, 7};
    enum { kWords = 1024, kGroup = 8 };
    static uint32_t words[kWords], zeros[kWords];
    static uint16_t scales[kWords];
    bool awq = family->quant == AWQ;
    memset(words, 0, sizeof words);
    memset(zeros, 0, sizeof zeros);
    for (int32_t g = 0; g < k / kGroup; g++)
        for (int32_t r = 0; r < n; r++) {
            int32_t at = 0, zero = testing_range(rng, 1, 15);
            float scale = testing_range(rng, 1, 15) * 0x1p-8f;
            while (awq && awq_order[at] != r % 8) at++;
            /* GPTQ stores zero points less one, in order. */
            zeros[g * n / 8 + r / 8] |= (uint32_t)(awq ? zero : zero - 1) << (4 * (awq ? at : r % 8));
            epmoei_store(scales, EPMOE_F16, g * n + r, scale);
            for (int32_t c = g * kGroup; c < (g + 1) * kGroup; c++) {
                uint32_t code = (uint32_t)testing_range(rng, 0, 15);
                if (awq)
                    words[c * n / 8 + r / 8] |= code << (4 * at);
                else
                    words[c / 8 * n + r] |= code << (4 * (c % 8));
                w[r * k + c] = scale * (float)((int32_t)code - zero);
            }
        }
    char full[96];
    snprintf(full, sizeof full, "%s.qweight", name);
    add_typed(file, family, full, "I32", 4, words, awq ? k : k / 8, awq ? n / 8 : n);
    snprintf(full, sizeof full, "%s.qzeros", name);
    add_typed(file, family, full, "I32", 4, zeros, k / kGroup, n / 8);
    snprintf(full, sizeof full, "%s.scales", name);
    add_typed(file, family, full, "F16", 2, scales, k / kGroup, n);
}

static void draw(testing_rng_t *rng, float *data, int64_t n, float mean, float scale)
{
    for (int64_t i = 0; i < n; i++) data[i] = mean + scale * testing_normal(rng);
}

static void fill(testing_rng_t *rng, weights_t *w)
{
    const float narrow = 0.3f;
    draw(rng, w->input_norm, kHidden, 1, 0.2f), draw(rng, w->post_norm, kHidden, 1, 0.2f);
    draw(rng, w->q, kQ * kHidden, 0, narrow), draw(rng, w->k, kKv * kHidden, 0, narrow);
    draw(rng, w->v, kKv * kHidden, 0, narrow), draw(rng, w->out, kHidden * kQ, 0, narrow);
    draw(rng, w->q_bias, kQ, 0, 1), draw(rng, w->k_bias, kKv, 0, 1), draw(rng, w->v_bias, kKv, 0, 1);
    draw(rng, w->out_bias, kHidden, 0, 1), draw(rng, w->q_norm, kQ, 1, 0.3f), draw(rng, w->k_norm, kKv, 1, 0.3f);
    draw(rng, w->mlp, kMlp * kHidden, 0, narrow);
}

static void add_mlp(build_file_t *file, const family_t *family, const weights_t *w)
{
    static const char *const dense[] = {"gate_proj", "up_proj", "down_proj"}, *const expert[] = {"w1", "w3", "w2"};
    char name[96];
    for (int e = 0; e < (family->mlp ? 1 : 2); e++)
        for (int i = 0; i < 3; i++) {
            if (family->mlp)
                snprintf(name, sizeof name, "%s.%s.weight", family->mlp, dense[i]);
            else
                snprintf(name, sizeof name, "block_sparse_moe.experts.%d.%s.weight", e, expert[i]);
            add(file, family, name, i < 2 ? w->mlp : w->zeros, i < 2 ? kMlp : kHidden, i < 2 ? kHidden : kMlp);
        }
    if (family->mlp) return;
    add(file, family, "block_sparse_moe.gate.weight", w->mlp, 2, kHidden);
    add(file, family, "block_sparse_moe.e_score_correction_bias", w->zeros, 2, 0);
}

static void add_projections(build_file_t *file, const family_t *family, testing_rng_t *rng, weights_t *w)
{
    const struct {
        const char *name;
        float *data;
        int32_t rows, cols;
    } list[] = {{"self_attn.q_proj", w->q, kQ, kHidden},
                {"self_attn.k_proj", w->k, kKv, kHidden},
                {"self_attn.v_proj", w->v, kKv, kHidden},
                {"self_attn.o_proj", w->out, kHidden, kQ}};
    for (int i = 0; i < 4; i++) {
        char name[96];
        snprintf(name, sizeof name, "%s.weight", list[i].name);
        if (family->quant == PLAIN)
            add(file, family, name, list[i].data, list[i].rows, list[i].cols);
        else
            add_quantised(file, family, rng, list[i].name, list[i].data, list[i].rows, list[i].cols);
    }
}

/* Quantised projections of `w` become what they stand for. */
static void save(const family_t *family, testing_rng_t *rng, weights_t *w, const char *dir)
{
    build_file_t file = {0};
    add(&file, family, "input_layernorm.weight", w->input_norm, kHidden, 0);
    add(&file, family, "post_attention_layernorm.weight", w->post_norm, kHidden, 0);
    add_projections(&file, family, rng, w);
    if (family->bias) {
        add(&file, family, "self_attn.q_proj.bias", w->q_bias, kQ, 0);
        add(&file, family, "self_attn.k_proj.bias", w->k_bias, kKv, 0);
        add(&file, family, "self_attn.v_proj.bias", w->v_bias, kKv, 0);
        add(&file, family, "self_attn.o_proj.bias", w->out_bias, kHidden, 0);
    }
    if (family->all_heads || family->by_head) {
        add(&file, family, "self_attn.q_norm.weight", w->q_norm, family->by_head ? kHead : kQ, 0);
        add(&file, family, "self_attn.k_norm.weight", w->k_norm, family->by_head ? kHead : kKv, 0);
    }
    add_mlp(&file, family, w);
    build_save(&file, dir, "model.safetensors");
    build_free(&file);
    char text[2048];
    snprintf(text, sizeof text,
             "{\"model_type\":\"%s\",\"hidden_size\":%d,\"num_hidden_layers\":4,\"num_experts\":2,"
             "\"num_experts_per_tok\":1,\"moe_intermediate_size\":%d,\"intermediate_size\":%d,"
             "\"intermediate_size_mlp\":%d,\"hidden_act\":\"silu\",\"rms_norm_eps\":1e-5,\"vocab_size\":8,"
             "\"max_position_embeddings\":64,\"num_attention_heads\":%d,\"num_key_value_heads\":%d,\"head_dim\":%d,"
             "\"rope_theta\":100%s}",
             family->model_type, kHidden, kMlp, kMlp, kMlp, kHeads, kKvHeads, kHead, family->keys);
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

static void normalise(double *x, const float *w, int n)
{
    double squares = 0;
    for (int i = 0; i < n; i++) squares += x[i] * x[i];
    for (int i = 0; i < n; i++) x[i] *= (w ? (double)w[i] : 1) / sqrt(squares / n + 1e-5);
}

/* With base 100 pair i of n turns by 100^(-i/n). Of four pairs the last two turn less than once in 50 tokens. */
static void rotate(double *x, int position, const family_t *family)
{
    int pairs = family->rotary / 2;
    for (int i = 0; i < pairs; i++) {
        double f = pow(100, -(double)i / pairs) / (family->stretched && i >= 2 ? 8 : 1);
        int a = family->pairs ? 2 * i : i, b = family->pairs ? 2 * i + 1 : i + pairs;
        double c = cos(position * f), s = sin(position * f), old = x[a];
        x[a] = x[a] * c - x[b] * s;
        x[b] = x[b] * c + old * s;
    }
}

static void finish(const family_t *family, double *x, int heads, const float *norm, int position)
{
    if (family->all_heads) normalise(x, norm, heads * kHead);
    for (int h = 0; h < heads; h++) {
        if (family->by_head) normalise(x + h * kHead, norm, kHead);
        rotate(x + h * kHead, position, family);
        if (family->unweighted) normalise(x + h * kHead, NULL, kHead);
    }
}

static void attend(const family_t *family, const weights_t *w, const float *x, double *y)
{
    static double q[kTokens][kQ], k[kTokens][kKv], v[kTokens][kKv];
    bool bias = family->bias;
    for (int t = 0; t < kTokens; t++) {
        double row[kHidden], o[kQ] = {0};
        for (int i = 0; i < kHidden; i++) row[i] = (double)x[t * kHidden + i];
        normalise(row, w->input_norm, kHidden);
        multiply(w->q, bias ? w->q_bias : NULL, kQ, kHidden, row, q[t]);
        multiply(w->k, bias ? w->k_bias : NULL, kKv, kHidden, row, k[t]);
        multiply(w->v, bias ? w->v_bias : NULL, kKv, kHidden, row, v[t]);
        finish(family, q[t], kHeads, w->q_norm, t);
        finish(family, k[t], kKvHeads, w->k_norm, t);
        for (int h = 0; h < kHeads; h++) {
            double weights[kTokens], sum = 0;
            int kv = h / (kHeads / kKvHeads) * kHead,
                first = family->window && t >= family->window ? t - family->window + 1 : 0;
            for (int j = first; j <= t; j++) {
                double score = 0;
                for (int i = 0; i < kHead; i++) score += q[t][h * kHead + i] * k[j][kv + i];
                sum += weights[j] = exp(score / sqrt(kHead));
            }
            for (int j = first; j <= t; j++)
                for (int i = 0; i < kHead; i++) o[h * kHead + i] += weights[j] / sum * v[j][kv + i];
        }
        multiply(w->out, bias ? w->out_bias : NULL, kHidden, kQ, o, y + t * kHidden);
        for (int i = 0; i < kHidden; i++) y[t * kHidden + i] += (double)x[t * kHidden + i];
    }
}

/* ----------------------------------------------------------------------------------------------------------- test */

static void run(const family_t *family, const char *dir, const float *x, float *y)
{
    epmoe_checkpoint_t *checkpoint = NULL;
    epmoe_decoder_t *decoder = NULL;
    epmoe_decoder_config_t config = EPMOE_DECODER_CONFIG_INIT;
    epmoe_layer_config_t mlp = EPMOE_LAYER_CONFIG_INIT;
    cr_assert_eq(epmoe_checkpoint_open(dir, &checkpoint), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(epmoe_checkpoint_decoder_config(checkpoint, family->layer, &config), EPMOE_OK, "%s",
                 epmoe_last_error());
    cr_assert_eq(epmoe_checkpoint_layer_config(checkpoint, family->layer, &mlp), EPMOE_OK, "%s", epmoe_last_error());
    mlp.dtype = EPMOE_F32;
    mlp.max_tokens = kTokens;
    config.num_blocks = 5;
    config.block_size = 3;
    cr_assert_eq(epmoe_decoder_create(&config, &mlp, NULL, &decoder), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(epmoe_decoder_load_checkpoint(decoder, checkpoint, family->layer, NULL), EPMOE_OK, "%s",
                 epmoe_last_error());
    const int32_t blocks[] = {2, 0, 4, 3, 1}, splits[] = {0, 8, 9, kTokens};
    for (int part = 0; part < 3; part++) {
        int32_t starts[] = {0, splits[part + 1] - splits[part]}, length = splits[part + 1];
        epmoe_decoder_forward_args_t args = EPMOE_DECODER_FORWARD_ARGS_INIT;
        args.num_tokens = starts[1], args.num_seqs = 1;
        args.x = x + splits[part] * kHidden, args.y = y + splits[part] * kHidden;
        args.query_start = starts, args.seq_lens = &length, args.block_table = blocks, args.max_blocks = 5;
        cr_assert_eq(epmoe_decoder_forward(decoder, &args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    }
    epmoe_decoder_destroy(decoder);
    epmoe_checkpoint_close(checkpoint);
}

Test(decoder_families, against_their_definitions)
{
    testing_rng_t rng = testing_rng(testing_seed());
    for (size_t i = 0; i < sizeof families / sizeof families[0]; i++) {
        static weights_t w;
        char dir[256];
        const family_t *family = &families[i];
        fill(&rng, &w);
        build_make_dir(dir);
        save(family, &rng, &w, dir);
        float x[kTokens * kHidden], *y = testing_buffer(sizeof x, 4);
        double ref[kTokens * kHidden];
        testing_fill_normal(&rng, x, EPMOE_F32, kTokens * kHidden, 1);
        attend(family, &w, x, ref);
        run(family, dir, x, y);
        double error = testing_rel_error(y, EPMOE_F32, ref, kTokens * kHidden);
        cr_assert(error < 3e-6, "%s%s: rel_err is %g", family->model_type, family->keys, error);
        cr_assert(testing_guards_intact(y));
        testing_buffer_free(y);
        build_remove_dir(dir);
    }
    cr_assert_eq(epmoei_alloc_live(), 0);
}
