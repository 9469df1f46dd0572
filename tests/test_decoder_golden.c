/* Decoder layers of the golden checkpoints against what their reference implementations computed: a prompt at once,
 * token by token, in pieces beside another sequence, in every cache layout, and chained up to the logits. */
#include "tests/decoder_case.h"
#include "tests/testing.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <math.h>
#include <stdlib.h>

static const char *const families[] = {"mixtral", "qwen3_moe",   "qwen2_moe",  "glm4_moe",
                                       "gpt_oss", "deepseek_v2", "deepseek_v3"};
enum { kFamilies = sizeof families / sizeof families[0] };

#define FP32_TOLERANCE    3e-6
#define CHAINED_TOLERANCE 1e-5

static void forward(decoder_case_t *c, int32_t first, int32_t last, const float *x, float *y)
{
    epmoe_decoder_forward_args_t args = decoder_case_args(c, first, last, x, y);
    cr_assert_eq(epmoe_decoder_forward(c->decoder, &args, NULL), EPMOE_OK, "%s", epmoe_last_error());
}

static void expect_close(const float *y, const double *ref, int64_t n, double tolerance, const char *name,
                         int32_t layer, const char *what)
{
    double error = testing_rel_error(y, EPMOE_F32, ref, n);
    fprintf(stderr, "%s layer %d, %s: rel_err %.3g\n", name, layer, what, error);
    cr_assert(error <= tolerance, "%s layer %d, %s: rel_err is %g", name, layer, what, error);
}

Test(decoder_golden, prompt_and_steps)
{
    for (int f = 0; f < kFamilies; f++)
        for (int32_t layer = 0; layer < 2; layer++) {
            decoder_case_t c = decoder_case_open(families[f], layer);
            decoder_case_make(&c, layer, EPMOE_F32, NULL);
            int64_t n = (int64_t)kDecoderTokens * c.hidden;
            float *prompt = testing_buffer(n * 4, 4), *steps = testing_buffer(n * 4, 4);
            int64_t live = epmoei_alloc_live();
            forward(&c, 0, kDecoderTokens, c.in, prompt);
            expect_close(prompt, c.out, n, FP32_TOLERANCE, families[f], layer, "prompt");
            for (int32_t t = 0; t < kDecoderTokens; t++)
                forward(&c, t, t + 1, c.in + t * c.hidden, steps + t * c.hidden);
            expect_close(steps, c.out, n, FP32_TOLERANCE, families[f], layer, "steps");
            for (int64_t i = 0; i < n; i++) c.out[i] = (double)prompt[i];
            expect_close(steps, c.out, n, FP32_TOLERANCE, families[f], layer, "steps against prompt");
            cr_assert_eq(epmoei_alloc_live(), live);
            cr_assert(testing_guards_intact(prompt) && testing_guards_intact(steps));
            testing_buffer_free(prompt);
            testing_buffer_free(steps);
            decoder_case_close(&c);
            cr_assert_eq(epmoei_alloc_live(), 0);
        }
}

/* Attention in FP8 (the other formats: test_decoder_families), and beside quantised experts. */
Test(decoder_golden, quantised_checkpoints)
{
    static const char *const names[] = {"qwen3_moe_fp8", "deepseek_v3_fp8",   "qwen3_moe_gptq",
                                        "qwen3_moe_awq", "deepseek_v3_ct_w4", "deepseek_v3_gptq_actorder",
                                        "gpt_oss_mxfp4"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        decoder_case_t c = decoder_case_open(names[i], 0);
        decoder_case_make(&c, 0, EPMOE_F32, NULL);
        int64_t n = (int64_t)kDecoderTokens * c.hidden;
        float *prompt = testing_buffer(n * 4, 4);
        forward(&c, 0, kDecoderTokens, c.in, prompt);
        expect_close(prompt, c.out, n, FP32_TOLERANCE, names[i], 0, "prompt");
        cr_assert(testing_guards_intact(prompt));
        testing_buffer_free(prompt);
        decoder_case_close(&c);
        cr_assert_eq(epmoei_alloc_live(), 0);
    }
}

/* Sequence 1 is a padding of length 0, then the same tokens shifted by one: sequence 0 must not notice. y aliases x. */
Test(decoder_golden, two_sequences_in_place)
{
    static const epmoe_cache_layout_t layouts[] = {EPMOE_CACHE_LAYOUT_V1, EPMOE_CACHE_LAYOUT_NHD,
                                                   EPMOE_CACHE_LAYOUT_HND};
    for (int f = 0; f < kFamilies; f++)
        for (int l = 0; l < 3; l++) {
            const int32_t layer = 1, half = kDecoderTokens / 2;
            decoder_case_t c = decoder_case_open(families[f], layer);
            c.config.cache_layout = layouts[l];
            decoder_case_make(&c, layer, EPMOE_F32, NULL);
            int64_t row = c.hidden, n = kDecoderTokens * row;
            float *y = testing_buffer(n * 4, 0), *both = testing_buffer((half + 3) * row * 4, 0);
            for (int32_t part = 0; part < 2; part++) {
                int32_t starts[] = {0, half, half + 3}, lens[] = {half * (part + 1), part ? 3 : 0};
                memcpy(both, c.in + part * half * row, (size_t)(half * row) * 4);
                memcpy(both + half * row, c.in + row, (size_t)(3 * row) * 4);
                epmoe_decoder_forward_args_t args = decoder_case_args(&c, 0, half, both, both);
                args.num_tokens = half + 3;
                args.num_seqs = 2;
                args.query_start = starts;
                args.seq_lens = lens;
                cr_assert_eq(epmoe_decoder_forward(c.decoder, &args, NULL), EPMOE_OK, "%s", epmoe_last_error());
                memcpy(y + part * half * row, both, (size_t)(half * row) * 4);
                for (int64_t i = 0; i < 3 * row; i++) cr_assert(isfinite(both[half * row + i]));
            }
            cr_assert(testing_guards_intact(both));
            expect_close(y, c.out, n, FP32_TOLERANCE, families[f], layer, "two sequences");
            testing_buffer_free(y);
            testing_buffer_free(both);
            decoder_case_close(&c);
        }
}

Test(decoder_golden, sixteen_bits)
{
    static const struct {
        epmoe_dtype_t dtype;
        double tolerance;
    } types[] = {{EPMOE_BF16, 1.6e-2}, {EPMOE_F16, 2e-3}};
    for (int f = 0; f < kFamilies; f++)
        for (int i = 0; i < 2; i++) {
            decoder_case_t c = decoder_case_open(families[f], 0);
            decoder_case_make(&c, 0, types[i].dtype, NULL);
            int64_t n = (int64_t)kDecoderTokens * c.hidden;
            void *x = testing_buffer(n * 2, 2), *y = testing_buffer(n * 2, 2);
            epmoei_from_f32(x, c.in, types[i].dtype, n);
            epmoe_decoder_forward_args_t args = decoder_case_args(&c, 0, kDecoderTokens, x, y);
            cr_assert_eq(epmoe_decoder_forward(c.decoder, &args, NULL), EPMOE_OK, "%s", epmoe_last_error());
            double error = testing_rel_error(y, types[i].dtype, c.out, n);
            fprintf(stderr, "%s %s: rel_err %.3g\n", families[f], epmoe_dtype_string(types[i].dtype), error);
            cr_assert(error <= types[i].tolerance && error > 1e-5, "%s in %s: rel_err is %g", families[f],
                      epmoe_dtype_string(types[i].dtype), error);
            testing_buffer_free(x);
            testing_buffer_free(y);
            decoder_case_close(&c);
        }
}

/* From the first layer's input through all layers to the logits. */
Test(decoder_golden, chained_to_the_logits)
{
    for (int f = 0; f < kFamilies; f++) {
        decoder_case_t last = decoder_case_open(families[f], 1), first = decoder_case_open(families[f], 0);
        int64_t n = (int64_t)kDecoderTokens * first.hidden;
        float *y = testing_buffer(n * 4, 0);
        memcpy(y, first.in, (size_t)n * 4);
        decoder_case_make(&first, 0, EPMOE_F32, NULL);
        decoder_case_make(&last, 1, EPMOE_F32, NULL);
        forward(&first, 0, kDecoderTokens, y, y);
        forward(&last, 0, kDecoderTokens, y, y);
        expect_close(y, last.out, n, CHAINED_TOLERANCE, families[f], 1, "chained");

        epmoe_head_config_t config = EPMOE_HEAD_CONFIG_INIT;
        epmoe_head_t *head = NULL;
        cr_assert_eq(epmoe_checkpoint_head_config(first.checkpoint, &config), EPMOE_OK, "%s", epmoe_last_error());
        config.dtype = EPMOE_F32;
        config.max_tokens = kDecoderTokens;
        config.backend = EPMOE_BACKEND_CPU;
        cr_assert_eq(epmoe_head_create(&config, &head), EPMOE_OK, "%s", epmoe_last_error());
        int64_t count = (int64_t)kDecoderTokens * config.vocab_size;
        float *logits = testing_buffer(count * 4, 4), *want = decoder_case_recorded(&first, "logits", count);
        double *ref = malloc((size_t)count * sizeof *ref);
        for (int64_t i = 0; i < count; i++) ref[i] = (double)want[i];
        cr_assert_eq(epmoe_head_forward(head, y, logits, kDecoderTokens, NULL), EPMOE_ERROR_BAD_STATE);
        cr_assert_eq(epmoe_head_load_checkpoint(head, first.checkpoint), EPMOE_OK, "%s", epmoe_last_error());
        cr_assert_eq(epmoe_head_forward(head, y, logits, kDecoderTokens, NULL), EPMOE_OK, "%s", epmoe_last_error());
        expect_close(logits, ref, count, CHAINED_TOLERANCE, families[f], 1, "logits");
        cr_assert(testing_guards_intact(logits));
        epmoe_head_destroy(head);
        testing_buffer_free(y);
        testing_buffer_free(logits);
        free(want);
        free(ref);
        decoder_case_close(&first);
        decoder_case_close(&last);
        cr_assert_eq(epmoei_alloc_live(), 0);
    }
}
