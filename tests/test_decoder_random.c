/* Decoder layers without a checkpoint: the presets' attention, random weights; and what a forward takes besides its
 * batch: logits in place of the router's, the stages' times. Values: bench/decoder_reference.c by
 * test_mpi_bench_decoder.
 */
#include "base/base.h"
#include "tests/testing.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

Test(decoder_random, every_preset_has_an_attention)
{
    for (int32_t i = 0; epmoe_preset_name(i); i++) {
        const char *name = epmoe_preset_name(i);
        epmoe_decoder_config_t config = EPMOE_DECODER_CONFIG_INIT;
        int64_t key_bytes, value_bytes;
        cr_assert_eq(epmoe_preset_decoder_config(name, &config), EPMOE_OK, "%s", epmoe_last_error());
        cr_assert_eq(config.struct_size, sizeof config);
        cr_assert_eq(epmoe_decoder_block_bytes(&config, EPMOE_BF16, &key_bytes, &value_bytes), EPMOE_OK, "%s: %s", name,
                     epmoe_last_error());
        bool mla = !strcmp(name, "deepseek-v3") || !strcmp(name, "kimi-k2");
        int64_t columns = mla ? 576 : (int64_t)config.num_kv_heads * config.head_dim;
        cr_assert_eq(key_bytes, 16 * columns * 2, "%s", name);
        cr_assert_eq(value_bytes, mla ? 0 : key_bytes, "%s", name);
        cr_assert_gt(config.rope.num_positions, 0);
        double magnitude = 0.1 * log(config.num_heads == 128 ? 40 : 32) + 1;
        if (mla) cr_assert_float_eq(config.scale, magnitude * magnitude / sqrt(192), 1e-7, "%s", name);
    }
    epmoe_decoder_config_t config = EPMOE_DECODER_CONFIG_INIT;
    cr_assert_eq(epmoe_preset_decoder_config("nosuch", &config), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert(strstr(epmoe_last_error(), "qwen3-30b-a3b"));
    cr_assert_eq(epmoe_preset_decoder_config(NULL, &config), EPMOE_ERROR_INVALID_ARGUMENT);
    config.struct_size = 0;
    cr_assert_neq(epmoe_preset_decoder_config("mixtral-8x7b", &config), EPMOE_OK);
}

enum { kHidden = 32, kExperts = 6, kTopK = 2, kTokens = 5, kBlocks = 3 };

static epmoe_decoder_t *make(int kind, uint64_t seed)
{
    epmoe_decoder_config_t config = EPMOE_DECODER_CONFIG_INIT;
    epmoe_layer_config_t mlp = EPMOE_LAYER_CONFIG_INIT;
    epmoe_decoder_t *decoder = NULL;
    mlp.hidden = kHidden, mlp.intermediate = 16, mlp.num_experts = kExperts, mlp.top_k = kTopK;
    mlp.dtype = EPMOE_F32, mlp.max_tokens = kTokens;
    config.num_heads = 4, config.num_blocks = kBlocks, config.block_size = 4;
    config.rope.num_positions = 16;
    config.in_bias = config.out_bias = config.has_sinks = 1;
    if (kind == 4) {
        config.attention = EPMOE_ATTENTION_MLA;
        config.q_latent = 12, config.kv_latent = 16, config.nope_dim = 8, config.rope_dim = 4, config.value_dim = 8;
    } else {
        config.num_kv_heads = 2, config.head_dim = 8, config.qk_norm = (epmoe_qk_norm_t)kind;
    }
    cr_assert_eq(epmoe_decoder_create(&config, &mlp, NULL, &decoder), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(epmoe_decoder_set_random_weights(decoder, seed), EPMOE_OK, "%s", epmoe_last_error());
    return decoder;
}

static const int32_t start[] = {0, kTokens}, length = kTokens, table[kBlocks] = {2, 0, 1};

static epmoe_decoder_forward_args_t args_of(const float *x, float *y)
{
    epmoe_decoder_forward_args_t args = EPMOE_DECODER_FORWARD_ARGS_INIT;
    args.num_tokens = kTokens, args.num_seqs = 1;
    args.x = x, args.y = y;
    args.query_start = start, args.seq_lens = &length, args.block_table = table, args.max_blocks = kBlocks;
    return args;
}

static void forward(epmoe_decoder_t *decoder, const epmoe_decoder_forward_args_t *args)
{
    cr_assert_eq(epmoe_decoder_forward(decoder, args, NULL), EPMOE_OK, "%s", epmoe_last_error());
}

Test(decoder_random, weights_follow_from_the_seed)
{
    testing_rng_t rng = testing_rng(testing_seed());
    enum { kBytes = kTokens * kHidden * 4 };
    float x[kTokens * kHidden], *y[3];
    testing_fill_normal(&rng, x, EPMOE_F32, kTokens * kHidden, 1);
    for (int kind = 0; kind <= 4; kind++) {
        for (int i = 0; i < 3; i++) {
            epmoe_decoder_t *decoder = make(kind, i == 2 ? 8 : 7);
            y[i] = testing_buffer(kBytes, 4);
            epmoe_decoder_forward_args_t args = args_of(x, y[i]);
            forward(decoder, &args);
            cr_assert(testing_guards_intact(y[i]));
            epmoe_decoder_destroy(decoder);
        }
        cr_assert_eq(memcmp(y[0], y[1], kBytes), 0, "kind %d", kind);
        for (int c = 0; c < kTokens * kHidden; c++)
            cr_assert(y[0][c] != y[2][c] && y[0][c] != x[c] && y[0][c] > -100 && y[0][c] < 100, "kind %d", kind);
        for (int i = 0; i < 3; i++) testing_buffer_free(y[i]);
    }
    cr_assert_eq(epmoe_decoder_set_random_weights(NULL, 1), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert_eq(epmoei_alloc_live(), 0);
}

Test(decoder_random, memory_that_runs_out_leaves_a_layer_without_weights)
{
    testing_rng_t rng = testing_rng(testing_seed());
    float x[kTokens * kHidden], y[kTokens * kHidden];
    testing_fill_normal(&rng, x, EPMOE_F32, kTokens * kHidden, 1);
    epmoe_decoder_t *decoder = make(4, 1);
    epmoe_decoder_forward_args_t args = args_of(x, y);
    int64_t live = epmoei_alloc_live();
    for (int32_t n = 1;; n++) {
        epmoei_alloc_fail_at(n);
        epmoe_status_t status = epmoe_decoder_set_random_weights(decoder, 1);
        epmoei_alloc_fail_at(0);
        if (status == EPMOE_OK) {
            cr_assert_gt(n, 2);
            break;
        }
        cr_assert_eq(status, EPMOE_ERROR_OUT_OF_MEMORY);
        cr_assert_eq(epmoe_decoder_forward(decoder, &args, NULL), EPMOE_ERROR_BAD_STATE);
    }
    cr_assert_eq(epmoei_alloc_live(), live);
    forward(decoder, &args);
    epmoe_decoder_destroy(decoder);
    cr_assert_eq(epmoei_alloc_live(), 0);
}

/* The forced logits decide; those that are written are the router's own. */
Test(decoder_random, forced_logits_and_stages)
{
    testing_rng_t rng = testing_rng(testing_seed());
    float x[kTokens * kHidden], own[kTokens * kExperts], forced[kTokens * kExperts], again[kTokens * kExperts];
    float *y = testing_buffer(sizeof x, 4), weights[kTokens * kTopK];
    int32_t ids[kTokens * kTopK];
    double us[EPMOE_STAGE_COUNT];
    for (int s = 0; s < EPMOE_STAGE_COUNT; s++) us[s] = -1;
    testing_fill_normal(&rng, x, EPMOE_F32, kTokens * kHidden, 1);
    epmoe_decoder_t *decoder = make(1, 3);
    epmoe_decoder_forward_args_t args = args_of(x, y);
    args.logits_out = own;
    forward(decoder, &args);
    for (int t = 0; t < kTokens; t++)
        for (int e = 0; e < kExperts; e++) forced[t * kExperts + e] = e == (t + 1) % kExperts ? 9 : e == t ? 5 : 0;
    args.logits = forced, args.logits_out = again, args.ids_out = ids, args.weights_out = weights, args.stage_us = us;
    args.max_rank_tokens = kTokens;
    forward(decoder, &args);
    cr_assert_eq(memcmp(own, again, sizeof own), 0);
    for (int t = 0; t < kTokens; t++) {
        cr_assert_eq(ids[t * kTopK], (t + 1) % kExperts);
        cr_assert_eq(ids[t * kTopK + 1], t);
    }
    cr_assert_gt(us[EPMOE_STAGE_ATTENTION], 0);
    for (int s = 0; s < EPMOE_STAGE_COUNT; s++) cr_assert(us[s] >= 0 && us[s] < 1e8, "%d", s);
    cr_assert_str_eq(epmoe_stage_string(EPMOE_STAGE_ATTENTION), "attention");
    epmoe_decoder_destroy(decoder);
    testing_buffer_free(y);
}

/* What only the MLP reads is judged before the attention writes its cache. */
Test(decoder_random, arguments_of_the_mlp_are_judged_first)
{
    enum { kCache = kBlocks * 4 * 2 * 8 };
    float x[kTokens * kHidden] = {0}, key[kCache], value[kCache], untouched[kCache];
    float *y = testing_buffer(sizeof x, 4);
    epmoe_decoder_config_t config = EPMOE_DECODER_CONFIG_INIT;
    epmoe_layer_config_t mlp = EPMOE_LAYER_CONFIG_INIT;
    epmoe_decoder_t *decoder = NULL;
    void *events[EPMOE_STAGE_COUNT + 1] = {0};
    mlp.hidden = kHidden, mlp.intermediate = 16, mlp.num_experts = kExperts, mlp.top_k = kTopK;
    mlp.dtype = EPMOE_F32, mlp.max_tokens = kTokens;
    config.num_heads = 4, config.num_kv_heads = 2, config.head_dim = 8, config.block_size = 4;
    config.rope.num_positions = 16;
    cr_assert_eq(epmoe_decoder_create(&config, &mlp, NULL, &decoder), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(epmoe_decoder_set_random_weights(decoder, 1), EPMOE_OK, "%s", epmoe_last_error());
    for (int i = 0; i < kCache; i++) key[i] = value[i] = untouched[i] = 777;
    epmoe_decoder_forward_args_t args = args_of(x, y);
    args.num_blocks = kBlocks, args.key_cache = key, args.value_cache = value;
    args.max_rank_tokens = 1;
    cr_assert_eq(epmoe_decoder_forward(decoder, &args, NULL), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert(strstr(epmoe_last_error(), "max_rank_tokens is 1"), "%s", epmoe_last_error());
    args.max_rank_tokens = 0, args.stage_events = events;
    cr_assert_eq(epmoe_decoder_forward(decoder, &args, NULL), EPMOE_ERROR_NOT_SUPPORTED);
    cr_assert(!memcmp(key, untouched, sizeof key) && !memcmp(value, untouched, sizeof value));
    cr_assert(testing_is_poison(y, 0, sizeof x));
    args.stage_events = NULL;
    forward(decoder, &args);
    cr_assert_neq(memcmp(key, untouched, sizeof key), 0);
    epmoe_decoder_destroy(decoder);
    testing_buffer_free(y);
}
