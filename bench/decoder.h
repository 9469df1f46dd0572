/* --decoder: the whole decoder layer in place of the MoE layer. Without --context a case is the prefill of one sequence
 * of T tokens on each rank; with it one step of T sequences, each N tokens long with the new one, whose pasts are
 * random keys and values. */
#ifndef EPMOE_BENCH_DECODER_H
#define EPMOE_BENCH_DECODER_H

#include "bench/buffer.h"

#include "moe/decoder.h"

struct bench_t;

/* Of a run; zeroed without --decoder. */
typedef struct decoder_run_t {
    epmoe_decoder_t *decoder;
    epmoe_decoder_config_t config;
    epmoei_attention_source_t source; /* where the attention's weights come from: for the reference */
    void *source_memory;
} decoder_run_t;

/* Of one rank in one case: the sequences and their cache. */
typedef struct decoder_batch_t {
    int32_t num_seqs;
    int32_t length;     /* of every sequence, new tokens included */
    int32_t max_blocks; /* a sequence's; block i of sequence b is block i * num_seqs + b of the cache */
    buffer_t query_start, seq_lens, block_table, key_cache, value_cache;
} decoder_batch_t;

/* The preset's or the checkpoint's attention, for the cases that the options ask for; bench->config is done. */
epmoe_status_t decoder_configure(struct bench_t *bench);
/* Collective. The layer with weights; bench->layer becomes its MLP. */
epmoe_status_t decoder_make(struct bench_t *bench);
void decoder_free(decoder_run_t *run);
int64_t decoder_weight_bytes(const decoder_run_t *run); /* without the MLP's */

epmoe_status_t decoder_batch_create(decoder_batch_t *batch, const struct bench_t *bench, int32_t num_tokens);
void decoder_batch_destroy(decoder_batch_t *batch);
/* The fields that say where the batch is; of x, y and the rest only num_tokens is set. */
epmoe_decoder_forward_args_t decoder_batch_args(const decoder_batch_t *batch, int32_t num_tokens);
/* With the guard bands; what the new tokens wrote comes with it. */
epmoe_status_t decoder_batch_download(decoder_batch_t *batch);
int64_t decoder_batch_guards_changed(const decoder_batch_t *batch);

/* The least that the attention half does for `num_tokens` tokens of a rank: its weights and the cached tokens that are
 * seen are read once, the new ones are written; MLA by keys and values of heads or by latents, whichever is less
 * arithmetic. Rows in and out are the MLP's to count. */
typedef struct decoder_work_t {
    double bytes;
    double flops;
} decoder_work_t;
decoder_work_t decoder_work(const struct bench_t *bench, int32_t num_tokens);

/* decoder_reference.c: the attention half in double precision, without roundings. For the tokens of this rank with the
 * numbers tokens [count], ascending: residual [count,d], what the attention adds to, and rows [count,d], that
 * normalised: what the MLP reads. */
struct bench_case_t;
epmoe_status_t decoder_reference(const struct bench_case_t *made, const struct bench_t *bench, const int64_t *tokens,
                                 int32_t count, double *residual, double *rows);

#endif
