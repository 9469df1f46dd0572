/* The decoder layer's contract: what is refused and leaves everything as it was, whose cache it is, ranks that share
 * the experts, and that nothing leaks when memory runs out. Values: test_decoder_golden. */
#include "tests/decoder_case.h"
#include "tests/safetensors_build.h"
#include "tests/testing.h"
#include "tests/thread_bootstrap.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define EXPECT_STATUS(call, status, needle)                                                                            \
    do {                                                                                                               \
        epmoe_status_t got_ = (call);                                                                                  \
        cr_assert_eq(got_, status, "%s: %s (%s)", needle, epmoe_status_string(got_), epmoe_last_error());              \
        cr_assert(strstr(epmoe_last_error(), needle), "\"%s\" is not in \"%s\"", needle, epmoe_last_error());          \
    } while (0)

static void refuses(const decoder_case_t *c, const epmoe_decoder_config_t *config, const char *needle)
{
    epmoe_decoder_t *decoder = (epmoe_decoder_t *)(uintptr_t)c;
    EXPECT_STATUS(epmoe_decoder_create(config, &c->mlp, NULL, &decoder), EPMOE_ERROR_INVALID_ARGUMENT, needle);
    cr_assert_null(decoder);
}

#define REFUSES(c, change, needle)                                                                                     \
    do {                                                                                                               \
        epmoe_decoder_config_t bad = (c).config;                                                                       \
        change;                                                                                                        \
        refuses(&(c), &bad, needle);                                                                                   \
    } while (0)

Test(decoder, wrong_configs)
{
    decoder_case_t c = decoder_case_open("qwen3_moe", 0), m = decoder_case_open("deepseek_v3", 1);
    int64_t live = epmoei_alloc_live();
    REFUSES(c, bad.struct_size = 0, "struct_size");
    REFUSES(c, bad.attention = (epmoe_attention_kind_t)2, "attention is 2");
    REFUSES(c, bad.num_heads = 0, "num_heads is 0");
    REFUSES(c, bad.num_kv_heads = 3, "num_kv_heads is 3");
    REFUSES(c, bad.num_kv_heads = 8, "num_kv_heads is 8");
    REFUSES(c, bad.head_dim = 577, "head_dim is 577");
    REFUSES(c, bad.kv_latent = 16, "kv_latent is 16: expected 0 with GQA");
    REFUSES(c, bad.qk_norm = 4, "qk_norm is 4");
    REFUSES(c, bad.window = -1, "window is -1");
    REFUSES(c, bad.norm_eps = -1, "norm_eps is -1");
    REFUSES(c, bad.scale = -1, "scale is -1");
    REFUSES(c, bad.rope.rotary_dim = 18, "rope.rotary_dim is 18");
    REFUSES(c, bad.rope.rotary_dim = 7, "rope.rotary_dim is 7");
    REFUSES(c, bad.rope.num_positions = 0, "rope.num_positions is 0");
    REFUSES(c, bad.rope.factor = 0.5, "factor is 0.5");
    REFUSES(c, bad.cache_dtype = EPMOE_F16, "cache_dtype is f16: expected dtype bf16 or f8_e4m3");
    REFUSES(c, bad.block_size = -1, "block_size is -1");
    REFUSES(c, bad.num_blocks = -1, "num_blocks is -1");
    REFUSES(c, bad.cache_layout = EPMOE_CACHE_LAYOUT_V1; bad.key_pack = 5, "key_pack is 5");
    REFUSES(c, bad.max_seqs = -1, "max_seqs is -1");
    REFUSES(c, bad.num_heads = bad.num_kv_heads = 64; bad.head_dim = 512; bad.block_size = 1 << 20;
            bad.num_blocks = INT32_MAX, "the key cache is [32768,1048576,2147483647]");
    REFUSES(m, bad.kv_latent = 0, "kv_latent is 0");
    REFUSES(m, bad.kv_latent = 570, "rope_dim is 8: expected 2 to 6");
    REFUSES(m, bad.head_dim = 16, "head_dim is 16: expected 0 with MLA");
    REFUSES(m, bad.qk_norm = 1, "qk_norm is 1: expected 0 with MLA");
    REFUSES(m, bad.nope_dim = 0, "nope_dim is 0");

    epmoe_decoder_t *decoder;
    EXPECT_STATUS(epmoe_decoder_create(NULL, &c.mlp, NULL, &decoder), EPMOE_ERROR_INVALID_ARGUMENT, "NULL");
    EXPECT_STATUS(epmoe_decoder_create(&c.config, NULL, NULL, &decoder), EPMOE_ERROR_INVALID_ARGUMENT, "NULL");
    EXPECT_STATUS(epmoe_decoder_create(&c.config, &c.mlp, NULL, NULL), EPMOE_ERROR_INVALID_ARGUMENT, "decoder is NULL");
    EXPECT_STATUS(epmoe_checkpoint_decoder_config(c.checkpoint, 2, &c.config), EPMOE_ERROR_INVALID_ARGUMENT,
                  "layer is 2: expected 0..1");
    epmoe_decoder_destroy(NULL);
    epmoe_head_destroy(NULL);
    cr_assert_eq(epmoei_alloc_live(), live);
    decoder_case_close(&c);
    decoder_case_close(&m);
}

Test(decoder, another_models_checkpoint)
{
    decoder_case_t c = decoder_case_open("qwen3_moe", 0), g = decoder_case_open("gpt_oss", 0);
    decoder_case_make(&c, 0, EPMOE_F32, NULL);
    EXPECT_STATUS(epmoe_decoder_load_checkpoint(c.decoder, g.checkpoint, 0, NULL), EPMOE_ERROR_MISMATCH, "in_bias");
    float *y = malloc((size_t)(kDecoderTokens * c.hidden) * 4);
    epmoe_decoder_forward_args_t args = decoder_case_args(&c, 0, 2, c.in, y);
    EXPECT_STATUS(epmoe_decoder_forward(c.decoder, &args, NULL), EPMOE_ERROR_BAD_STATE, "no weights");
    EXPECT_STATUS(epmoe_decoder_load_checkpoint(c.decoder, NULL, 0, NULL), EPMOE_ERROR_INVALID_ARGUMENT, "NULL");
    EXPECT_STATUS(epmoe_decoder_load_checkpoint(c.decoder, c.checkpoint, 7, NULL), EPMOE_ERROR_INVALID_ARGUMENT,
                  "layer is 7");
    cr_assert_eq(epmoe_decoder_load_checkpoint(c.decoder, c.checkpoint, 0, NULL), EPMOE_OK);
    cr_assert_eq(epmoe_decoder_forward(c.decoder, &args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    /* A window of one layer is not that of another. */
    decoder_case_make(&g, 0, EPMOE_F32, NULL);
    EXPECT_STATUS(epmoe_decoder_load_checkpoint(g.decoder, g.checkpoint, 1, NULL), EPMOE_ERROR_MISMATCH,
                  "window is 8 and the checkpoint's is 0");
    /* The same attention in a model of another width. */
    decoder_case_t wide = decoder_case_open("qwen3_moe", 0);
    wide.mlp.hidden *= 2;
    wide.mlp.dtype = EPMOE_F32;
    wide.mlp.max_tokens = 1;
    cr_assert_eq(epmoe_decoder_create(&wide.config, &wide.mlp, NULL, &wide.decoder), EPMOE_OK, "%s",
                 epmoe_last_error());
    char widths[80];
    snprintf(widths, sizeof widths, "hidden is %d and the checkpoint's is %d", 2 * wide.hidden, wide.hidden);
    EXPECT_STATUS(epmoe_decoder_load_checkpoint(wide.decoder, wide.checkpoint, 0, NULL), EPMOE_ERROR_MISMATCH, widths);
    decoder_case_close(&wide);
    free(y);
    decoder_case_close(&c);
    decoder_case_close(&g);
}

/* The caller's cache of c: the layer has none. */
static void make_without_cache(decoder_case_t *c, int32_t layer, epmoe_dtype_t dtype)
{
    c->mlp.dtype = dtype;
    c->mlp.max_tokens = kDecoderTokens;
    c->config.block_size = kDecoderBlock;
    c->config.num_blocks = 0;
    cr_assert_eq(epmoe_decoder_create(&c->config, &c->mlp, NULL, &c->decoder), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(epmoe_decoder_load_checkpoint(c->decoder, c->checkpoint, layer, NULL), EPMOE_OK);
}

enum { kBlocks = kDecoderSeqs * kDecoderMaxBlocks };

Test(decoder, wrong_arguments_change_nothing)
{
    decoder_case_t c = decoder_case_open("mixtral", 0);
    make_without_cache(&c, 0, EPMOE_F32);
    int64_t key_bytes, value_bytes, row = c.hidden;
    cr_assert_eq(epmoe_decoder_block_bytes(&c.config, EPMOE_F32, &key_bytes, &value_bytes), EPMOE_OK);
    cr_assert(key_bytes == kDecoderBlock * 2 * 16 * 4 && value_bytes == key_bytes);
    EXPECT_STATUS(epmoe_decoder_block_bytes(&c.config, EPMOE_F32, NULL, &value_bytes), EPMOE_ERROR_INVALID_ARGUMENT,
                  "key_bytes is NULL");
    EXPECT_STATUS(epmoe_decoder_block_bytes(&c.config, EPMOE_F32, &key_bytes, NULL), EPMOE_ERROR_INVALID_ARGUMENT,
                  "value_bytes is NULL");
    cr_assert(key_bytes == kDecoderBlock * 2 * 16 * 4 && value_bytes == key_bytes);
    void *keys = testing_buffer(kBlocks * key_bytes, 0), *values = testing_buffer(kBlocks * value_bytes, 0);
    float *y = testing_buffer(kDecoderTokens * row * 4, 4);
    epmoe_decoder_forward_args_t good = decoder_case_args(&c, 0, 6, c.in, y);
    good.num_blocks = kBlocks;
    good.key_cache = keys;
    good.value_cache = values;
    static const int32_t from_one[] = {1, 6}, short_of[] = {0, 5}, falling[] = {0, 7, 6}, two[] = {6, 6};
    static const int32_t len_5[] = {5}, len_33[] = {33}, negative[] = {-6};
    int32_t outside[kDecoderMaxBlocks];
    memcpy(outside, c.block_table, sizeof outside);
    outside[1] = kBlocks;
#define BAD(change, needle)                                                                                            \
    do {                                                                                                               \
        epmoe_decoder_forward_args_t args = good;                                                                      \
        change;                                                                                                        \
        EXPECT_STATUS(epmoe_decoder_forward(c.decoder, &args, NULL), EPMOE_ERROR_INVALID_ARGUMENT, needle);            \
        cr_assert(testing_is_poison(y, 0, kDecoderTokens *row * 4) &&                                                  \
                  testing_is_poison(keys, 0, kBlocks * key_bytes));                                                    \
    } while (0)
    BAD(args.struct_size = 0, "struct_size");
    BAD(args.num_tokens = kDecoderTokens + 1, "num_tokens is 25");
    BAD(args.num_tokens = -1, "num_tokens is -1");
    BAD(args.num_seqs = 0, "num_seqs is 0");
    BAD(args.num_seqs = kDecoderTokens + 1, "num_seqs is 25");
    BAD(args.x = NULL, "x is NULL");
    BAD(args.y = NULL, "y is NULL");
    BAD(args.key_cache = NULL, "key_cache is NULL");
    BAD(args.value_cache = NULL, "value_cache is NULL");
    BAD(args.query_start = NULL, "query_start is NULL");
    BAD(args.seq_lens = NULL, "seq_lens is NULL");
    BAD(args.block_table = NULL, "block_table is NULL");
    BAD(args.max_blocks = 0, "max_blocks is 0");
    BAD(args.max_blocks = 1, "seq_lens[0] is 6");
    BAD(args.num_blocks = 0, "num_blocks is 0");
    BAD(args.query_start = from_one, "query_start[0] is 1");
    BAD(args.query_start = short_of, "query_start[1] is 5: expected num_tokens 6");
    BAD(args.query_start = falling; args.num_seqs = 2; args.seq_lens = two, "query_start[2] is 6");
    BAD(args.seq_lens = len_5, "seq_lens[0] is 5");
    BAD(args.seq_lens = len_33, "seq_lens[0] is 33");
    BAD(args.seq_lens = negative, "seq_lens[0] is -6");
    BAD(args.block_table = outside, "block_table[0,1] is 16: expected 0 to 15");
    EXPECT_STATUS(epmoe_decoder_forward(NULL, &good, NULL), EPMOE_ERROR_INVALID_ARGUMENT, "decoder is NULL");
    EXPECT_STATUS(epmoe_decoder_forward(c.decoder, NULL, NULL), EPMOE_ERROR_INVALID_ARGUMENT, "NULL");

    epmoe_decoder_forward_args_t none = EPMOE_DECODER_FORWARD_ARGS_INIT;
    cr_assert_eq(epmoe_decoder_forward(c.decoder, &none, NULL), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(epmoe_decoder_forward(c.decoder, &good, NULL), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert(testing_rel_error(y, EPMOE_F32, c.out, 6 * row) < 3e-6);
    cr_assert(testing_is_poison(y, 6 * row * 4, (kDecoderTokens - 6) * row * 4));
    /* Six tokens in the first two blocks of the table; everything else of the cache is as it was. */
    for (int32_t block = 0; block < kBlocks; block++) {
        int32_t place = block == c.block_table[0] ? 0 : block == c.block_table[1] ? 1 : 2;
        int64_t used = place == 0 ? key_bytes : place == 1 ? key_bytes / 2 : 0;
        cr_assert(testing_is_poison(keys, block * key_bytes + used, key_bytes - used), "block %d", block);
        cr_assert(testing_is_poison(values, block * value_bytes + used, value_bytes - used), "block %d", block);
        if (used) cr_assert(!testing_is_poison(keys, block * key_bytes + used - 4, 4));
    }
    cr_assert(testing_guards_intact(y) && testing_guards_intact(keys) && testing_guards_intact(values));
    testing_buffer_free(y);
    testing_buffer_free(keys);
    testing_buffer_free(values);
    decoder_case_close(&c);
}

/* A step of one token over twelve cached ones: each entry of the table that it reads is checked before it writes. */
static void step_over_history(const char *name, int32_t layer, int32_t num_unread)
{
    decoder_case_t c = decoder_case_open(name, layer);
    make_without_cache(&c, layer, EPMOE_F32);
    int64_t key_bytes, value_bytes, y_bytes = (int64_t)kDecoderTokens * c.hidden * 4;
    cr_assert_eq(epmoe_decoder_block_bytes(&c.config, EPMOE_F32, &key_bytes, &value_bytes), EPMOE_OK);
    key_bytes *= kBlocks;
    value_bytes *= kBlocks;
    char *keys = testing_buffer(key_bytes, 0), *values = value_bytes ? testing_buffer(value_bytes, 0) : NULL;
    char *old_keys = malloc((size_t)key_bytes), *old_values = malloc((size_t)value_bytes + 1);
    float *y = testing_buffer(y_bytes, 0), *prompt_y = malloc((size_t)y_bytes);
    epmoe_decoder_forward_args_t args = decoder_case_args(&c, 0, 12, c.in, prompt_y);
    args.num_blocks = kBlocks;
    args.key_cache = keys;
    args.value_cache = values;
    cr_assert_eq(epmoe_decoder_forward(c.decoder, &args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    memcpy(old_keys, keys, (size_t)key_bytes);
    if (values) memcpy(old_values, values, (size_t)value_bytes);

    epmoe_decoder_forward_args_t step = decoder_case_args(&c, 12, 13, c.in + 12 * c.hidden, y);
    step.num_blocks = kBlocks;
    step.key_cache = keys;
    step.value_cache = values;
    for (int32_t i = 3; i >= num_unread; i--) {
        char needle[64];
        int32_t right = c.block_table[i];
        c.block_table[i] = i == 1 ? -1 : kBlocks;
        snprintf(needle, sizeof needle, "block_table[0,%d] is %d", i, c.block_table[i]);
        EXPECT_STATUS(epmoe_decoder_forward(c.decoder, &step, NULL), EPMOE_ERROR_INVALID_ARGUMENT, needle);
        cr_assert(!memcmp(keys, old_keys, (size_t)key_bytes), "%s: keys changed", needle);
        cr_assert(!values || !memcmp(values, old_values, (size_t)value_bytes), "%s: values changed", needle);
        cr_assert(testing_is_poison(y, 0, y_bytes), "%s", needle);
        c.block_table[i] = right;
    }
    /* A block that the window has left behind may have been given to another sequence. */
    for (int32_t i = 0; i < num_unread; i++) c.block_table[i] = -1;
    cr_assert_eq(epmoe_decoder_forward(c.decoder, &step, NULL), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert(memcmp(keys, old_keys, (size_t)key_bytes) && !testing_is_poison(y, 0, c.hidden * 4));
    testing_buffer_free(y);
    testing_buffer_free(keys);
    if (values) testing_buffer_free(values);
    free(old_keys);
    free(old_values);
    free(prompt_y);
    decoder_case_close(&c);
}

Test(decoder, wrong_history_changes_nothing)
{
    step_over_history("mixtral", 1, 0);
    step_over_history("deepseek_v3", 1, 0);
    step_over_history("gpt_oss", 0, 1); /* a window of 8: positions 5 to 12 */
}

/* E4M3 in the cache: off by what 3 bits of mantissa take away, and no more. */
Test(decoder, fp8_cache)
{
    static const char *const names[] = {"qwen2_moe", "deepseek_v3"};
    for (int i = 0; i < 2; i++) {
        decoder_case_t c = decoder_case_open(names[i], 1);
        c.config.cache_dtype = EPMOE_F8_E4M3;
        decoder_case_make(&c, 1, EPMOE_F32, NULL);
        float *y = malloc((size_t)(kDecoderTokens * c.hidden) * 4), scale = 0.03125f;
        epmoe_decoder_forward_args_t args = decoder_case_args(&c, 0, kDecoderTokens, c.in, y);
        args.k_scale = args.v_scale = &scale;
        cr_assert_eq(epmoe_decoder_forward(c.decoder, &args, NULL), EPMOE_OK, "%s", epmoe_last_error());
        double error = testing_rel_error(y, EPMOE_F32, c.out, kDecoderTokens * c.hidden);
        cr_assert(error > 1e-4 && error < 5e-2, "%s: rel_err is %g", names[i], error);
        free(y);
        decoder_case_close(&c);
    }
}

/* A borrowed table of positions, shared by layers. */
Test(decoder, borrowed_table)
{
    decoder_case_t c = decoder_case_open("glm4_moe", 1);
    float *table = malloc((size_t)(kDecoderTokens * c.config.rope.rotary_dim) * 4);
    c.config.rope.num_positions = kDecoderTokens;
    c.config.rope.cos_sin = table;
    cr_assert_eq(epmoe_rope_table(&c.config.rope), EPMOE_OK, "%s", epmoe_last_error());
    decoder_case_make(&c, 1, EPMOE_F32, NULL);
    float *y = malloc((size_t)(kDecoderTokens * c.hidden) * 4);
    epmoe_decoder_forward_args_t args = decoder_case_args(&c, 0, kDecoderTokens, c.in, y);
    cr_assert_eq(epmoe_decoder_forward(c.decoder, &args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert(testing_rel_error(y, EPMOE_F32, c.out, kDecoderTokens * c.hidden) < 3e-6);
    /* One position more than the table has. */
    static const int32_t starts[] = {0, 1}, lens[] = {kDecoderTokens + 1};
    args.num_tokens = 1;
    args.query_start = starts;
    args.seq_lens = lens;
    EXPECT_STATUS(epmoe_decoder_forward(c.decoder, &args, NULL), EPMOE_ERROR_INVALID_ARGUMENT, "seq_lens[0] is 25");
    free(y);
    decoder_case_close(&c);
    free(table);
}

/* Every allocation of create and load fails once: an error, nothing left behind, and the next try works. */
Test(decoder, out_of_memory)
{
    decoder_case_t c = decoder_case_open("deepseek_v3", 1);
    c.mlp.dtype = EPMOE_F32;
    c.mlp.max_tokens = 4;
    c.config.num_blocks = 2;
    int64_t live = epmoei_alloc_live(), n = 0;
    for (bool done = false; !done; n++) {
        cr_assert(n < 200);
        epmoe_decoder_t *decoder = NULL;
        epmoei_alloc_fail_at(n + 1);
        epmoe_status_t status = epmoe_decoder_create(&c.config, &c.mlp, NULL, &decoder);
        cr_assert_eq(decoder == NULL, status != EPMOE_OK);
        if (decoder) status = epmoe_decoder_load_checkpoint(decoder, c.checkpoint, 1, NULL);
        epmoei_alloc_fail_at(0);
        cr_assert(status == EPMOE_OK || status == EPMOE_ERROR_OUT_OF_MEMORY, "%s", epmoe_last_error());
        done = status == EPMOE_OK;
        epmoe_decoder_destroy(decoder);
        cr_assert_eq(epmoei_alloc_live(), live, "allocation %lld", (long long)n);
    }
    cr_assert(n > 6, "only %lld allocations", (long long)n);
    decoder_case_close(&c);
}

/* The golden checkpoint again, its config.json saying that embedding and head are one. */
static epmoe_checkpoint_t *open_tied(const char *dir)
{
    char path[512], text[4096];
    epmoe_checkpoint_t *checkpoint = NULL;
    snprintf(path, sizeof path, "%s/golden/mixtral/config.json", EPMOE_TEST_DATA);
    FILE *file = fopen(path, "r");
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    char *flag = strstr(text, "\"tie_word_embeddings\": false");
    cr_assert_not_null(flag);
    memcpy(flag, "\"tie_word_embeddings\":  true", strlen("\"tie_word_embeddings\": false"));
    build_save_text(dir, "config.json", text);
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    cr_assert_eq(symlink(EPMOE_TEST_DATA "/golden/mixtral/model.safetensors", path), 0);
    cr_assert_eq(epmoe_checkpoint_open(dir, &checkpoint), EPMOE_OK, "%s", epmoe_last_error());
    return checkpoint;
}

Test(decoder, tied_head)
{
    enum { kTokens = 3 };
    char dir[256];
    build_make_dir(dir);
    epmoe_checkpoint_t *checkpoint = open_tied(dir);
    epmoe_head_config_t config = EPMOE_HEAD_CONFIG_INIT;
    epmoe_head_t *head = NULL;
    cr_assert_eq(epmoe_checkpoint_head_config(checkpoint, &config), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert(config.hidden == 64 && config.vocab_size == 96 && config.norm_eps == 1e-5f);
    config.dtype = EPMOE_F32;
    config.max_tokens = kTokens;
    config.backend = EPMOE_BACKEND_CPU;
    config.vocab_size++;
    cr_assert_eq(epmoe_head_create(&config, &head), EPMOE_OK, "%s", epmoe_last_error());
    EXPECT_STATUS(epmoe_head_load_checkpoint(head, checkpoint), EPMOE_ERROR_MISMATCH, "97");
    epmoe_head_destroy(head);
    config.vocab_size = 0;
    EXPECT_STATUS(epmoe_head_create(&config, &head), EPMOE_ERROR_INVALID_ARGUMENT, "vocab_size is 0");
    cr_assert_null(head);
    config.vocab_size = 96;
    for (int wrong = 0; wrong < 2; wrong++) {
        config.norm_eps = wrong ? NAN : 1;
        EXPECT_STATUS(epmoe_head_create(&config, &head), EPMOE_ERROR_INVALID_ARGUMENT,
                      wrong ? "norm_eps is nan" : "norm_eps is 1: expected 0 to 1");
        cr_assert_null(head);
    }
    config.norm_eps = 1e-5f;
    cr_assert_eq(epmoe_head_create(&config, &head), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(epmoe_head_load_checkpoint(head, checkpoint), EPMOE_OK, "%s", epmoe_last_error());

    const epmoei_tensor_t *norm = epmoei_checkpoint_find(checkpoint, "model.norm.weight"),
                          *table = epmoei_checkpoint_find(checkpoint, "model.embed_tokens.weight");
    float x[kTokens * 64], *logits = testing_buffer(kTokens * 96 * 4, 0);
    double ref[kTokens * 96];
    testing_rng_t rng = testing_rng(testing_seed());
    testing_fill_normal(&rng, x, EPMOE_F32, kTokens * 64, 1);
    for (int32_t t = 0; t < kTokens; t++) {
        double squares = 0;
        for (int32_t i = 0; i < 64; i++) squares += (double)x[t * 64 + i] * (double)x[t * 64 + i];
        double r = 1 / sqrt(squares / 64 + 1e-5);
        for (int32_t v = 0; v < 96; v++) {
            ref[t * 96 + v] = 0;
            for (int32_t i = 0; i < 64; i++)
                ref[t * 96 + v] += (double)x[t * 64 + i] * r * (double)epmoei_load(norm->data, norm->dtype, i) *
                                   (double)epmoei_load(table->data, table->dtype, v * 64 + i);
        }
    }
    EXPECT_STATUS(epmoe_head_forward(head, x, logits, kTokens + 1, NULL), EPMOE_ERROR_INVALID_ARGUMENT,
                  "num_tokens is 4");
    EXPECT_STATUS(epmoe_head_forward(head, NULL, logits, kTokens, NULL), EPMOE_ERROR_INVALID_ARGUMENT, "x is NULL");
    cr_assert(testing_is_poison(logits, 0, kTokens * 96 * 4));
    cr_assert_eq(epmoe_head_forward(head, NULL, NULL, 0, NULL), EPMOE_OK);
    cr_assert_eq(epmoe_head_forward(head, x, logits, kTokens, NULL), EPMOE_OK, "%s", epmoe_last_error());
    double error = testing_rel_error(logits, EPMOE_F32, ref, kTokens * 96);
    cr_assert(error < 1e-6, "rel_err is %g", error);
    cr_assert(testing_guards_intact(logits));
    testing_buffer_free(logits);
    epmoe_head_destroy(head);
    epmoe_checkpoint_close(checkpoint);
    build_remove_dir(dir);
}

/* ---------------------------------------------------------------------------------------------------------- ranks */

enum { kRanks = 3 };

/* Rank r runs the first 24, 11 and 0 tokens; then rank 1 makes a mistake; then all go on. */
static void rank_main(void *ctx, epmoe_bootstrap_t bootstrap)
{
    static const int32_t counts[kRanks] = {kDecoderTokens, 11, 0};
    const char *name = ctx;
    epmoe_comm_config_t config = EPMOE_COMM_CONFIG_INIT;
    config.backend = EPMOE_BACKEND_CPU;
    config.timeout_s = 20;
    epmoe_comm_t *comm = NULL;
    int32_t rank = bootstrap.rank, query_start[2] = {0, counts[rank]}, seq_len = counts[rank];
    cr_assert_eq(epmoe_comm_create(&bootstrap, &config, &comm), EPMOE_OK, "%s", epmoe_last_error());
    decoder_case_t c = decoder_case_open(name, 1);
    decoder_case_make(&c, 1, EPMOE_F32, comm);
    float *y = testing_buffer((int64_t)kDecoderTokens * c.hidden * 4, 0);
    epmoe_decoder_forward_args_t args = EPMOE_DECODER_FORWARD_ARGS_INIT;
    args.num_tokens = counts[rank];
    args.num_seqs = 1;
    args.x = c.in;
    args.y = y;
    args.query_start = query_start;
    args.seq_lens = &seq_len;
    args.block_table = c.block_table;
    args.max_blocks = kDecoderMaxBlocks;
    for (int32_t call = 0; call < 3; call++) {
        epmoe_decoder_forward_args_t own = args;
        if (call == 1 && rank == 1) own.max_blocks = 1;
        epmoe_status_t status = epmoe_decoder_forward(c.decoder, &own, NULL), expected = EPMOE_OK;
        if (call == 1) expected = rank == 1 ? EPMOE_ERROR_INVALID_ARGUMENT : EPMOE_ERROR_PEER;
        cr_assert_eq(status, expected, "rank %d, call %d: %s", rank, call, epmoe_last_error());
        if (status != EPMOE_OK) {
            cr_assert(strstr(epmoe_last_error(), "seq_lens[0] is 11"), "%s", epmoe_last_error());
            continue;
        }
        double error = counts[rank] ? testing_rel_error(y, EPMOE_F32, c.out, (int64_t)counts[rank] * c.hidden) : 0;
        cr_assert(error < 3e-6, "rank %d: rel_err is %g", rank, error);
    }
    testing_buffer_free(y);
    decoder_case_close(&c);
    epmoe_comm_destroy(comm);
}

/* Field `i` differs on rank 1: MISMATCH on both names it. */
static const char *change_field(epmoe_decoder_config_t *config, int32_t i)
{
    switch (i) {
    case 0: return config->cache_dtype = EPMOE_F8_E4M3, "cache_dtype";
    case 1: return config->cache_layout = EPMOE_CACHE_LAYOUT_HND, "cache_layout";
    case 2: return config->key_pack = 2, "key_pack";
    case 3: return config->block_size = 32, "block_size";
    case 4: return config->rope.original_positions = 77, "rope.original_positions";
    case 5: return config->rope.low_freq_factor = 2, "rope.low_freq_factor";
    case 6: return config->rope.high_freq_factor = 5, "rope.high_freq_factor";
    case 7: return config->rope.beta_fast = 31, "rope.beta_fast";
    case 8: return config->rope.beta_slow = 2, "rope.beta_slow";
    case 9: return config->rope.attention_factor = 1.5, "rope.attention_factor";
    case 10: return config->rope.mscale = 0.5, "rope.mscale";
    case 11: return config->rope.mscale_all_dim = 0.5, "rope.mscale_all_dim";
    case 12: return config->rope.no_truncate = 1, "rope.no_truncate";
    case 13: return config->rope.num_positions -= 1, "rope.num_positions";
    case 14: return config->window = 3, "window";
    default: return NULL;
    }
}

static void disagree_main(void *ctx, epmoe_bootstrap_t bootstrap)
{
    (void)ctx;
    epmoe_comm_config_t comm_config = EPMOE_COMM_CONFIG_INIT;
    comm_config.backend = EPMOE_BACKEND_CPU;
    comm_config.timeout_s = 20;
    epmoe_comm_t *comm = NULL;
    cr_assert_eq(epmoe_comm_create(&bootstrap, &comm_config, &comm), EPMOE_OK, "%s", epmoe_last_error());
    decoder_case_t c = decoder_case_open("mixtral", 1);
    for (int32_t i = 0;; i++) {
        epmoe_decoder_config_t config = c.config;
        const char *name = change_field(&config, i);
        if (!name) break;
        epmoe_decoder_t *decoder = (epmoe_decoder_t *)(uintptr_t)&c;
        EXPECT_STATUS(epmoe_decoder_create(bootstrap.rank == 1 ? &config : &c.config, &c.mlp, comm, &decoder),
                      EPMOE_ERROR_MISMATCH, name);
        cr_assert_null(decoder);
    }
    /* What may differ. */
    if (bootstrap.rank == 1) {
        c.config.num_blocks = 5;
        c.config.max_seqs = 3;
        c.mlp.max_tokens = 11;
    }
    cr_assert_eq(epmoe_decoder_create(&c.config, &c.mlp, comm, &c.decoder), EPMOE_OK, "%s", epmoe_last_error());
    decoder_case_close(&c);
    epmoe_comm_destroy(comm);
}

Test(decoder, ranks_disagree)
{
    testing_ranks_t *ranks = testing_ranks_create(2);
    testing_ranks_run(ranks, disagree_main, NULL);
    testing_ranks_free(ranks);
    cr_assert_eq(epmoei_alloc_live(), 0);
}

Test(decoder, ranks_share_the_experts)
{
    static const char *const names[] = {"mixtral", "deepseek_v3"};
    for (int i = 0; i < 2; i++) {
        testing_ranks_t *ranks = testing_ranks_create(kRanks);
        testing_ranks_run(ranks, rank_main, (void *)(uintptr_t)names[i]);
        testing_ranks_free(ranks);
    }
    cr_assert_eq(epmoei_alloc_live(), 0);
}
