/* moe_tool check: whole decoder layers over a paged cache. */
#include "tools/tool_check.h"

#include "base/device.h"
#include "base/dtype.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK_SIZE 16

/* One layer on this rank: its sequences start at position 0 and are run at once. */
typedef struct decoder_run_t {
    int32_t num_seqs;
    int32_t num_tokens; /* of all sequences */
    int32_t max_blocks; /* of one */
    epmoe_layer_config_t mlp;
    golden_values_t routing; /* what the file has of the MoE block */
    float *in;               /* [T,d] */
    float *out;              /* [T,d] */
    void *x;                 /* [T,d] of dtype */
    void *y;
    float *y_f32;
    float *logits; /* [T,E] */
    float *weights;
    int32_t *ids;
    float *selection_bias;
    bool *left_out;
    int32_t *query_start, *seq_lens, *block_table;
    void *memory;
    epmoe_backend_t backend;
    int64_t shared_bytes; /* of `memory`, from its beginning on: what the layer reads or writes */
    void *device_memory;  /* CUDA: the same in device memory */
} decoder_run_t;

static void carve(epmoei_arena_t *arena, epmoe_dtype_t dtype, decoder_run_t *run)
{
    int64_t tokens = run->num_tokens, d = run->mlp.hidden, experts = run->mlp.num_experts;
    int64_t k = experts ? run->mlp.top_k : 0, seqs = run->num_seqs;
    run->x = epmoei_carve(arena, tokens * d * epmoe_dtype_size(dtype));
    run->y = epmoei_carve(arena, tokens * d * epmoe_dtype_size(dtype));
    run->logits = epmoei_carve(arena, tokens * experts * 4);
    run->weights = epmoei_carve(arena, tokens * k * 4);
    run->ids = epmoei_carve(arena, tokens * k * 4);
    run->query_start = epmoei_carve(arena, (seqs + 1) * 4);
    run->seq_lens = epmoei_carve(arena, seqs * 4);
    run->block_table = epmoei_carve(arena, seqs * run->max_blocks * 4);
    run->shared_bytes = arena->used;
    run->y_f32 = epmoei_carve(arena, tokens * d * 4);
    run->selection_bias = epmoei_carve(arena, experts * 4);
    run->left_out = epmoei_carve(arena, tokens * (int64_t)sizeof(bool));
}

/* Where the layer finds what is at `host` in `memory`. */
static void *placed(const decoder_run_t *run, void *host)
{
    if (!run->device_memory) return host;
    return (char *)run->device_memory + ((char *)host - (char *)run->memory);
}

/* All that the layer reads or writes, to the device or back; nothing to do on the CPU. */
static epmoe_status_t move(const decoder_run_t *run, bool home)
{
    if (!run->device_memory) return EPMOE_OK;
    void *to = home ? run->memory : run->device_memory, *from = home ? run->device_memory : run->memory;
    EPMOEI_CHECK(epmoei_memory_copy(run->backend, to, from, run->shared_bytes, NULL));
    if (!home) return EPMOE_OK;
    EPMOEI_CHECK(epmoei_stream_wait(run->backend, NULL));
    return epmoei_error_word_check();
}

static void free_run(decoder_run_t *run)
{
    golden_values_free(&run->routing);
    epmoei_free(run->in);
    epmoei_free(run->out);
    epmoei_free(run->memory);
    epmoei_memory_free(run->backend, run->device_memory);
}

/* [..., T, d]: everything in front of the tokens counts sequences. */
static epmoe_status_t read_shape(const epmoei_tensor_t *in, int32_t hidden, decoder_run_t *run)
{
    int64_t rows = in->num_elements / hidden, length = in->num_dims > 1 ? in->shape[in->num_dims - 2] : 1;
    if (rows < 1 || rows > 1 << 20 || length < 1 || rows % length)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "tensor '%s' has %lld rows: expected 1 to %d", in->name,
                           (long long)rows, 1 << 20);
    run->num_tokens = (int32_t)rows;
    run->num_seqs = (int32_t)(rows / length);
    run->max_blocks = (int32_t)epmoei_ceil_div(length, BLOCK_SIZE);
    return EPMOE_OK;
}

static void fill_batch(decoder_run_t *run)
{
    int32_t length = run->num_tokens / run->num_seqs, blocks = run->num_seqs * run->max_blocks;
    for (int32_t b = 0; b < run->num_seqs; b++) {
        run->query_start[b + 1] = (b + 1) * length;
        run->seq_lens[b] = length;
    }
    /* Backwards, so that a table that was not followed would be seen. */
    for (int32_t i = 0; i < blocks; i++) run->block_table[i] = blocks - 1 - i;
}

/* What a rank does alone before the first collective call. */
static epmoe_status_t prepare(const check_t *check, const golden_layer_t *golden, epmoe_decoder_config_t *config,
                              decoder_run_t *run)
{
    EPMOEI_CHECK(epmoe_checkpoint_layer_config(check->checkpoint, golden->layer, &run->mlp));
    EPMOEI_CHECK(epmoe_checkpoint_decoder_config(check->checkpoint, golden->layer, config));
    int32_t d = run->mlp.hidden;
    EPMOEI_CHECK(golden_read_rows(golden->layer_in, -1, d, &run->in));
    EPMOEI_CHECK(read_shape(golden->layer_in, d, run));
    EPMOEI_CHECK(golden_read_rows(golden->layer_out, run->num_tokens, d, &run->out));
    if (golden->in) EPMOEI_CHECK(golden_read(golden, &run->mlp, &run->routing));
    if (golden->in && run->routing.num_tokens != run->num_tokens)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "tensor '%s' has %d rows and '%s' %d: expected as many",
                           golden->layer_in->name, run->num_tokens, golden->in->name, run->routing.num_tokens);
    epmoei_arena_t arena = {0};
    carve(&arena, check->dtype, run);
    EPMOEI_CHECK(epmoei_alloc_for(&run->memory, arena.used, "the rows of a decoder layer"));
    memset(run->memory, 0, (size_t)arena.used);
    arena = (epmoei_arena_t){run->memory, 0};
    carve(&arena, check->dtype, run);
    fill_batch(run);
    run->backend = check->backend;
    if (run->backend == EPMOE_BACKEND_CUDA)
        EPMOEI_CHECK(
            epmoei_memory_alloc(run->backend, &run->device_memory, run->shared_bytes, "the rows of a decoder layer"));
    run->mlp.dtype = check->dtype;
    run->mlp.fp8_activations = check->fp8_activations ? 1 : -1;
    if (check->fp8_wire) run->mlp.wire_dtype = EPMOE_F8_E4M3;
    run->mlp.max_tokens = run->num_tokens;
    config->block_size = BLOCK_SIZE;
    config->num_blocks = run->num_seqs * run->max_blocks;
    config->max_seqs = run->num_seqs;
    config->rope.num_positions = (int32_t)epmoei_min64(config->rope.num_positions, run->num_tokens / run->num_seqs);
    if (run->mlp.num_experts)
        return check_selection_bias(check, golden->layer, run->mlp.num_experts, run->selection_bias);
    return EPMOE_OK;
}

/* x (fp32) through the layer into y_f32. */
static epmoe_status_t forward(const check_t *check, epmoe_decoder_t *decoder, decoder_run_t *run, const float *x)
{
    int64_t values = (int64_t)run->num_tokens * run->mlp.hidden;
    epmoei_from_f32(run->x, x, check->dtype, values);
    epmoe_decoder_forward_args_t args = EPMOE_DECODER_FORWARD_ARGS_INIT;
    args.num_tokens = run->num_tokens;
    args.num_seqs = run->num_seqs;
    args.x = placed(run, run->x);
    args.y = placed(run, run->y);
    args.query_start = placed(run, run->query_start);
    args.seq_lens = placed(run, run->seq_lens);
    args.block_table = placed(run, run->block_table);
    args.max_blocks = run->max_blocks;
    args.logits_out = placed(run, run->logits);
    args.ids_out = placed(run, run->ids);
    args.weights_out = placed(run, run->weights);
    EPMOEI_CHECK(epmoe_comm_agree(check->program->comm, move(run, false)));
    EPMOEI_CHECK(epmoe_decoder_forward(decoder, &args, NULL));
    EPMOEI_CHECK(epmoe_comm_agree(check->program->comm, move(run, true)));
    epmoei_to_f32(run->y_f32, run->y, check->dtype, values);
    return EPMOE_OK;
}

/* Judges y_f32. The block's input is not the recorded one here, so of its routing only the choice counts. */
static epmoe_status_t judge(check_t *check, const char *item, decoder_run_t *run, double tolerance)
{
    golden_values_t golden = run->routing;
    check_outputs_t outputs = {run->y_f32, run->logits, run->weights, run->ids};
    check_result_t router = {.ids_equal = true}, result;
    golden.num_tokens = run->num_tokens;
    golden.out = run->out;
    if (golden.ids)
        check_router(&run->mlp, run->mlp.has_selection_bias ? run->selection_bias : NULL, &golden, &outputs, tolerance,
                     run->left_out, &router);
    check_moe(&run->mlp, &golden, &outputs, tolerance, run->left_out, router.ids_equal, &result);
    EPMOEI_CHECK(check_gather_worst(check, &result));
    check_report(check, item, tolerance, &result);
    return EPMOE_OK;
}

static epmoe_status_t load_decoder(const check_t *check, int32_t index, epmoe_decoder_t *decoder)
{
    char what[48];
    const program_weights_t loading = {check->program, what};
    snprintf(what, sizeof what, "decoder layer %d: loading weights", index);
    const epmoe_load_options_t load = program_weights_begin(&loading);
    const epmoe_status_t status = epmoe_decoder_load_checkpoint(decoder, check->checkpoint, index, &load);
    program_idle(check->program);
    return status;
}

/* The layer's recorded input, then what the chain has come to. */
static epmoe_status_t run_layer(check_t *check, const golden_layer_t *golden, epmoe_decoder_t *decoder,
                                decoder_run_t *run)
{
    char item[64];
    EPMOEI_CHECK(load_decoder(check, golden->layer, decoder));
    EPMOEI_CHECK(forward(check, decoder, run, run->in));
    snprintf(item, sizeof item, "layers.%d", golden->layer);
    if (run->out) EPMOEI_CHECK(judge(check, item, run, check->decoder_tolerance));

    /* Rows that another choice has changed would go on into all layers behind: fp32 only, and nothing in FP8. */
    if (check->dtype != EPMOE_F32 || check->fp8_activations || check->fp8_wire) return EPMOE_OK;
    if (golden->layer != check->chain_next) return EPMOE_OK;
    int64_t bytes = (int64_t)run->num_tokens * run->mlp.hidden * 4;
    if (golden->layer == 0) {
        EPMOEI_CHECK(epmoe_comm_agree(check->program->comm,
                                      epmoei_alloc_for((void **)&check->chain, bytes, "the rows of the chain")));
        check->chain_tokens = run->num_tokens;
    } else {
        if (check->chain_tokens != run->num_tokens) return EPMOE_OK;
        EPMOEI_CHECK(forward(check, decoder, run, check->chain));
        snprintf(item, sizeof item, "layers.%d.chained", golden->layer);
        if (run->out) EPMOEI_CHECK(judge(check, item, run, check->tolerance));
    }
    memcpy(check->chain, run->y_f32, (size_t)bytes);
    check->chain_next++;
    return EPMOE_OK;
}

static void note_decoders(check_t *check, const char *why)
{
    char text[320];
    snprintf(text, sizeof text, "decoder layers%s (%.256s)", check->golden.logits ? " and logits" : "", why);
    golden_note_unchecked(&check->golden, text);
}

epmoe_status_t check_decoder_layer(check_t *check, const golden_layer_t *golden)
{
    epmoe_comm_t *comm = check->program->comm;
    decoder_run_t run = {.mlp = EPMOE_LAYER_CONFIG_INIT};
    epmoe_decoder_config_t config = EPMOE_DECODER_CONFIG_INIT;
    epmoe_decoder_t *decoder = NULL;
    epmoe_status_t status = epmoe_comm_agree(comm, prepare(check, golden, &config, &run));
    if (status == EPMOE_OK) status = epmoe_decoder_create(&config, &run.mlp, comm, &decoder);
    if (status == EPMOE_OK) status = run_layer(check, golden, decoder, &run);
    epmoe_decoder_destroy(decoder);
    free_run(&run);
    /* Attention in a format that is not computed: every rank has found the same. */
    if (status != EPMOE_ERROR_NOT_SUPPORTED) return status;
    note_decoders(check, epmoe_last_error());
    check->decoders = false;
    return EPMOE_OK;
}

epmoe_status_t check_decoders_begin(check_t *check)
{
    golden_t *golden = &check->golden;
    epmoe_decoder_config_t config = EPMOE_DECODER_CONFIG_INIT;
    bool any = golden->logits != NULL;
    for (int32_t i = 0; i < golden->num_layers; i++) any |= golden->layers[i].layer_in != NULL;
    if (!any) return EPMOE_OK;
    epmoe_status_t status = epmoe_checkpoint_decoder_config(check->checkpoint, 0, &config);
    check->decoders = status == EPMOE_OK;
    if (status != EPMOE_OK && status != EPMOE_ERROR_NOT_SUPPORTED) return status;
    if (!check->decoders) note_decoders(check, epmoe_last_error());
    return EPMOE_OK;
}
