#include "bench/decoder.h"

#include "bench/bench.h"
#include "bench/report.h"

#include "kernels/random_weights.h"

static bool decodes(const bench_t *bench) { return bench->options->context > 0; }

epmoe_status_t decoder_configure(bench_t *bench)
{
    epmoe_decoder_config_t *config = &bench->run.config;
    *config = (epmoe_decoder_config_t)EPMOE_DECODER_CONFIG_INIT;
    if (bench->checkpoint)
        EPMOEI_CHECK(epmoe_checkpoint_decoder_config(bench->checkpoint, bench->reference.layer, config));
    else
        EPMOEI_CHECK(epmoe_preset_decoder_config(bench->model, config));
    /* The longest sequence of any rank, since ranks agree on it. */
    const options_t *options = bench->options;
    const int32_t *lengths = options->num_per_rank ? options->tokens_per_rank : options->tokens;
    int32_t count = options->num_per_rank ? options->num_per_rank : options->num_cases;
    int64_t longest = epmoei_max64(options->context, 1);
    for (int32_t i = 0; i < count && !decodes(bench); i++) longest = epmoei_max64(longest, lengths[i]);
    config->rope.num_positions = (int32_t)longest;
    config->max_seqs = decodes(bench) ? bench->config.max_tokens : 1;
    return EPMOE_OK;
}

static epmoe_status_t find_source(bench_t *bench)
{
    decoder_run_t *run = &bench->run;
    if (bench->checkpoint)
        return epmoei_checkpoint_attention_source(bench->checkpoint, bench->reference.layer, &run->config, &run->source,
                                                  &run->source_memory);
    return epmoei_random_attention(&run->decoder->shape, bench->config.dtype, bench->options->seed, &run->source,
                                   &run->source_memory);
}

epmoe_status_t decoder_make(bench_t *bench)
{
    decoder_run_t *run = &bench->run;
    epmoe_comm_t *comm = bench->program->comm;
    EPMOEI_CHECK(epmoe_decoder_create(&run->config, &bench->config, comm, &run->decoder));
    bench->layer = run->decoder->mlp;
    if (bench->checkpoint) {
        const program_weights_t loading = {bench->program, "loading weights"};
        const epmoe_load_options_t load = program_weights_begin(&loading);
        EPMOEI_CHECK(epmoe_decoder_load_checkpoint(run->decoder, bench->checkpoint, bench->reference.layer, &load));
    } else {
        const program_weights_t making = {bench->program, "making random weights"};
        const epmoe_load_options_t options = program_weights_begin(&making);
        EPMOEI_CHECK(
            epmoe_comm_agree(comm, epmoei_decoder_random_weights(run->decoder, bench->options->seed, &options)));
    }
    if (!bench->options->check) return EPMOE_OK;
    return epmoe_comm_agree(comm, find_source(bench));
}

void decoder_free(decoder_run_t *run)
{
    epmoe_decoder_destroy(run->decoder);
    epmoei_free(run->source_memory);
    *run = (decoder_run_t){0};
}

int64_t decoder_weight_bytes(const decoder_run_t *run)
{
    epmoei_attention_weights_t layout;
    return epmoei_attention_weights_layout(NULL, &run->decoder->shape, run->decoder->weights.out.format, &layout);
}

/* ---------------------------------------------------------------------------------------------------------- batch */

static epmoe_status_t make_cache(buffer_t *cache, const bench_t *bench, int64_t bytes, int32_t number)
{
    enum { kPiece = 1 << 16 };
    epmoe_dtype_t dtype = bench->run.decoder->shape.config.cache_dtype;
    int64_t size = epmoe_dtype_size(dtype), count = bytes / size;
    EPMOEI_CHECK(buffer_create(cache, bench->backend, bytes, "the KV cache"));
    char *data = cache->host;
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < count; first += kPiece)
        epmoei_random_fill(data + first * size, dtype, ~bench->options->seed, EPMOEI_RANDOM_ATTENTION, number, first,
                           epmoei_min64(kPiece, count - first), 1);
    return buffer_upload(cache);
}

static epmoe_status_t make_tables(decoder_batch_t *batch, const bench_t *bench, int32_t num_tokens)
{
    int64_t seqs = batch->num_seqs;
    EPMOEI_CHECK(buffer_create(&batch->query_start, bench->backend, (seqs + 1) * 4, "query_start"));
    EPMOEI_CHECK(buffer_create(&batch->seq_lens, bench->backend, seqs * 4, "seq_lens"));
    EPMOEI_CHECK(buffer_create(&batch->block_table, bench->backend, seqs * batch->max_blocks * 4, "block_table"));
    int32_t *start = batch->query_start.host, *lengths = batch->seq_lens.host, *table = batch->block_table.host;
    start[0] = 0;
    for (int32_t b = 0; b < batch->num_seqs; b++) {
        start[b + 1] = start[b] + num_tokens / batch->num_seqs;
        lengths[b] = batch->length;
        for (int32_t i = 0; i < batch->max_blocks; i++)
            table[(int64_t)b * batch->max_blocks + i] = i * batch->num_seqs + b;
    }
    EPMOEI_CHECK(buffer_upload(&batch->query_start));
    EPMOEI_CHECK(buffer_upload(&batch->seq_lens));
    return buffer_upload(&batch->block_table);
}

epmoe_status_t decoder_batch_create(decoder_batch_t *batch, const bench_t *bench, int32_t num_tokens)
{
    const epmoe_decoder_config_t *config = &bench->run.decoder->shape.config;
    *batch = (decoder_batch_t){0};
    if (num_tokens == 0) return EPMOE_OK;
    batch->num_seqs = decodes(bench) ? num_tokens : 1;
    batch->length = decodes(bench) ? bench->options->context : num_tokens;
    batch->max_blocks = (int32_t)epmoei_ceil_div(batch->length, config->block_size);
    int64_t blocks = (int64_t)batch->num_seqs * batch->max_blocks, key_bytes, value_bytes;
    if (blocks > INT32_MAX)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%d sequences of %d tokens need too many blocks",
                           batch->num_seqs, batch->length);
    EPMOEI_CHECK(make_tables(batch, bench, num_tokens));
    epmoei_decoder_block_bytes(config, &key_bytes, &value_bytes);
    EPMOEI_CHECK(make_cache(&batch->key_cache, bench, blocks * key_bytes, 0));
    return value_bytes ? make_cache(&batch->value_cache, bench, blocks * value_bytes, 1) : EPMOE_OK;
}

void decoder_batch_destroy(decoder_batch_t *batch)
{
    buffer_destroy(&batch->query_start);
    buffer_destroy(&batch->seq_lens);
    buffer_destroy(&batch->block_table);
    buffer_destroy(&batch->key_cache);
    buffer_destroy(&batch->value_cache);
    *batch = (decoder_batch_t){0};
}

epmoe_decoder_forward_args_t decoder_batch_args(const decoder_batch_t *batch, int32_t num_tokens)
{
    epmoe_decoder_forward_args_t args = EPMOE_DECODER_FORWARD_ARGS_INIT;
    args.num_tokens = num_tokens;
    args.num_seqs = batch->num_seqs;
    args.query_start = batch->query_start.run;
    args.seq_lens = batch->seq_lens.run;
    args.block_table = batch->block_table.run;
    args.max_blocks = batch->max_blocks;
    args.num_blocks = batch->num_seqs * batch->max_blocks;
    args.key_cache = batch->key_cache.run;
    args.value_cache = batch->value_cache.run;
    return args;
}

epmoe_status_t decoder_batch_download(decoder_batch_t *batch)
{
    buffer_t *const all[] = {&batch->query_start, &batch->seq_lens, &batch->block_table, &batch->key_cache,
                             &batch->value_cache};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) EPMOEI_CHECK(buffer_download(all[i]));
    return EPMOE_OK;
}

int64_t decoder_batch_guards_changed(const decoder_batch_t *batch)
{
    return buffer_guards_changed(&batch->query_start) + buffer_guards_changed(&batch->seq_lens) +
           buffer_guards_changed(&batch->block_table) + buffer_guards_changed(&batch->key_cache) +
           buffer_guards_changed(&batch->value_cache);
}

/* ---------------------------------------------------------------------------------------------------------- floor */

static double elements(const epmoei_linear_t *linear)
{
    return (double)linear->heads * (double)linear->n * (double)linear->k;
}

decoder_work_t decoder_work(const bench_t *bench, int32_t num_tokens)
{
    const epmoe_decoder_t *decoder = bench->run.decoder;
    const epmoe_decoder_config_t *config = &decoder->shape.config;
    const epmoei_attention_weights_t *w = &decoder->weights;
    if (num_tokens == 0) return (decoder_work_t){0, 0};
    bool mla = config->attention == EPMOE_ATTENTION_MLA;
    double heads = config->num_heads, tokens = num_tokens;
    int64_t seqs = decodes(bench) ? num_tokens : 1, length = decodes(bench) ? bench->options->context : num_tokens;
    int64_t first = length - num_tokens / seqs, window = config->window ? config->window : length;
    double seen = (double)(length - epmoei_max64(0, first + 1 - window)) * (double)seqs, pairs = 0;
    for (int64_t p = first; p < length; p++) pairs += (double)epmoei_min64(p + 1, window) * (double)seqs;

    double per_head = elements(&w->key_up) + elements(&w->value_up);
    double shared = elements(&w->out) + elements(&w->qkv) + elements(&w->q_down) + elements(&w->q_nope) +
                    elements(&w->q_rope) + elements(&w->kv_down);
    int64_t key_bytes, value_bytes;
    epmoei_decoder_block_bytes(config, &key_bytes, &value_bytes);
    double row_bytes = (double)(key_bytes + value_bytes) / config->block_size;
    double columns = mla ? config->nope_dim + config->rope_dim + config->value_dim : 2 * config->head_dim;
    double least = tokens * shared + (mla ? seen : 0) * per_head + pairs * heads * columns;
    if (mla) {
        double latents = 2.0 * config->kv_latent + config->rope_dim;
        double absorbed = tokens * (shared + per_head) + pairs * heads * latents;
        least = absorbed < least ? absorbed : least;
    }
    return (decoder_work_t){.bytes = (double)decoder_weight_bytes(&bench->run) + (seen + tokens) * row_bytes,
                            .flops = 2 * least};
}
