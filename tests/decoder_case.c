#include "tests/decoder_case.h"

#include "tests/testing.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>

float *decoder_case_recorded(const decoder_case_t *c, const char *name, int64_t elements)
{
    const epmoei_tensor_t *tensor = epmoei_safetensors_find(c->golden, name);
    cr_assert_not_null(tensor, "no tensor %s", name);
    cr_assert_eq(tensor->num_elements, elements, "%s has %lld elements", name, (long long)tensor->num_elements);
    float *values = malloc((size_t)elements * sizeof *values);
    epmoei_to_f32(values, tensor->data, tensor->dtype, elements);
    return values;
}

decoder_case_t decoder_case_open(const char *name, int32_t layer)
{
    decoder_case_t c = {.config = EPMOE_DECODER_CONFIG_INIT, .mlp = EPMOE_LAYER_CONFIG_INIT};
    char path[512], tensor[64];
    snprintf(path, sizeof path, "%s/golden/%s", EPMOE_TEST_DATA, name);
    cr_assert_eq(epmoe_checkpoint_open(path, &c.checkpoint), EPMOE_OK, "%s", epmoe_last_error());
    snprintf(path, sizeof path, "%s/golden/%s/golden.safetensors", EPMOE_TEST_DATA, name);
    cr_assert_eq(epmoei_safetensors_open(path, &c.golden), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(epmoe_checkpoint_layer_config(c.checkpoint, layer, &c.mlp), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(epmoe_checkpoint_decoder_config(c.checkpoint, layer, &c.config), EPMOE_OK, "%s", epmoe_last_error());
    c.hidden = c.mlp.hidden;
    snprintf(tensor, sizeof tensor, "layers.%d.in", layer);
    c.in = decoder_case_recorded(&c, tensor, kDecoderTokens * c.hidden);
    snprintf(tensor, sizeof tensor, "layers.%d.out0", layer);
    float *out = decoder_case_recorded(&c, tensor, kDecoderTokens * c.hidden);
    c.out = malloc((size_t)(kDecoderTokens * c.hidden) * sizeof *c.out);
    for (int32_t i = 0; i < kDecoderTokens * c.hidden; i++) c.out[i] = (double)out[i];
    free(out);
    /* A permutation of the blocks: 5 and 16 have no common divisor. */
    for (int32_t i = 0; i < kDecoderSeqs * kDecoderMaxBlocks; i++)
        c.block_table[i] = (5 * i + 3) % (kDecoderSeqs * kDecoderMaxBlocks);
    return c;
}

void decoder_case_make(decoder_case_t *c, int32_t layer, epmoe_dtype_t dtype, epmoe_comm_t *comm)
{
    c->mlp.dtype = dtype;
    c->mlp.max_tokens = kDecoderSeqs * kDecoderTokens;
    c->config.block_size = kDecoderBlock;
    c->config.num_blocks = kDecoderSeqs * kDecoderMaxBlocks;
    cr_assert_eq(epmoe_decoder_create(&c->config, &c->mlp, comm, &c->decoder), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(epmoe_decoder_load_checkpoint(c->decoder, c->checkpoint, layer, NULL), EPMOE_OK, "%s",
                 epmoe_last_error());
}

void decoder_case_close(decoder_case_t *c)
{
    epmoe_decoder_destroy(c->decoder);
    epmoe_checkpoint_close(c->checkpoint);
    epmoei_safetensors_close(c->golden);
    free(c->in);
    free(c->out);
}

epmoe_decoder_forward_args_t decoder_case_args(decoder_case_t *c, int32_t first, int32_t last, const void *x, void *y)
{
    static int32_t query_start[2], seq_len;
    epmoe_decoder_forward_args_t args = EPMOE_DECODER_FORWARD_ARGS_INIT;
    query_start[1] = last - first;
    seq_len = last;
    args.num_tokens = last - first;
    args.num_seqs = 1;
    args.x = x;
    args.y = y;
    args.query_start = query_start;
    args.seq_lens = &seq_len;
    args.block_table = c->block_table;
    args.max_blocks = kDecoderMaxBlocks;
    return args;
}
