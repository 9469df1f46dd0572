/* The ops around the dense ones: attention in decode and prefill, sample, spec_verify. */
#include "bench/heads.h"
#include "bench/op_job.h"
#include "bench/random.h"

#include "dense_layers/attention.h"
#include "dense_layers/sample.h"
#include "dense_layers/spec_verify.h"

#define BLOCK_SIZE     16
#define DECODE_CONTEXT 4096
#define MLA_LATENT     512
#define MLA_SCALE      0.0721687836f /* 192^-0.5: of a head before absorption */
#define VOCAB          128256
#define DRAFTS         3
/* The references are plain loops: of many rows they compute this many. */
#define REFERENCE_ROWS 8

/* Only rows first .. first+REFERENCE_ROWS-1 are compared. */
static epmoe_status_t choose_reference_rows(op_job_t *job, int32_t first)
{
    job->reference_rows = (int32_t)epmoei_min64(job->num_tokens - first, REFERENCE_ROWS);
    EPMOEI_CHECK(op_take_host(job, (void **)&job->reference_index, REFERENCE_ROWS * 4));
    for (int32_t i = 0; i < job->reference_rows; i++) job->reference_index[i] = first + i;
    return EPMOE_OK;
}

/* ------------------------------------------------------------------------------------------------------ attention */

static epmoe_status_t run_attention(const op_args_t *args, epmoe_stream_t stream)
{
    return epmoe_attention(&args->attention, stream);
}

static const size_t attention_pointers[] = {
    OP_AT(attention.q),           OP_AT(attention.key_cache), OP_AT(attention.value_cache),
    OP_AT(attention.block_table), OP_AT(attention.seq_lens),  OP_AT(attention.query_start),
    OP_AT(attention.workspace),   OP_AT(attention.o),         0};

/* The model's heads; `num_seqs` sequences of `length` tokens, whose blocks lie in the cache block by block in turn. */
static epmoe_status_t make_attention(op_job_t *job, int32_t num_seqs, int32_t length)
{
    heads_t heads;
    epmoe_attention_args_t *args = &job->args.attention;
    EPMOEI_CHECK(heads_of_bench(job->bench, &heads));
    bool mla = heads.cache_dim != heads.head_dim;
    int32_t columns = (int32_t)epmoei_ceil_div(length, BLOCK_SIZE);
    int32_t *table, *lens, *start;
    *args = (epmoe_attention_args_t)EPMOE_ATTENTION_ARGS_INIT;
    args->backend = job->bench->backend;
    args->num_tokens = job->num_tokens;
    args->num_seqs = num_seqs;
    args->num_heads = heads.heads;
    args->num_kv_heads = heads.kv_heads;
    args->head_dim = heads.cache_dim;
    args->value_dim = mla ? MLA_LATENT : heads.cache_dim;
    args->scale = mla ? MLA_SCALE : 0.0f;
    args->block_size = BLOCK_SIZE;
    args->max_blocks = columns;
    args->dtype = job->bench->config.dtype;
    args->layout = EPMOE_CACHE_LAYOUT_NHD;
    if ((int64_t)num_seqs * columns > INT32_MAX)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%d tokens need too many blocks", job->num_tokens);
    args->num_blocks = num_seqs * columns;
    int64_t slots = (int64_t)args->num_blocks * BLOCK_SIZE * heads.kv_heads;
    int64_t q_size = (int64_t)job->num_tokens * heads.heads * args->head_dim;
    EPMOEI_CHECK(op_take_random(job, (void **)&args->q, args->dtype, q_size, 0, 1));
    EPMOEI_CHECK(op_take_random(job, (void **)&args->key_cache, args->dtype, slots * args->head_dim, 1, 1));
    if (!mla)
        EPMOEI_CHECK(op_take_random(job, (void **)&args->value_cache, args->dtype, slots * args->value_dim, 2, 1));
    EPMOEI_CHECK(op_take(job, (void **)&table, (int64_t)args->num_blocks * 4));
    EPMOEI_CHECK(op_take(job, (void **)&lens, (int64_t)num_seqs * 4));
    EPMOEI_CHECK(op_take(job, (void **)&start, ((int64_t)num_seqs + 1) * 4));
    start[0] = 0;
    for (int32_t b = 0; b < num_seqs; b++) {
        lens[b] = length;
        start[b + 1] = start[b] + job->num_tokens / num_seqs;
        for (int32_t i = 0; i < columns; i++) table[(int64_t)b * columns + i] = i * num_seqs + b;
    }
    args->block_table = table;
    args->seq_lens = lens;
    args->query_start = start;
    EPMOEI_CHECK(epmoe_attention_workspace_size(args, &args->workspace_bytes));
    if (args->workspace_bytes) EPMOEI_CHECK(op_take(job, &args->workspace, args->workspace_bytes));
    return op_take_output(job, &args->o, args->dtype, job->num_tokens, (int64_t)heads.heads * args->value_dim);
}

static epmoe_status_t finish_attention(op_job_t *job)
{
    epmoe_attention_args_t checked;
    EPMOEI_CHECK(epmoei_attention_check(&job->args.attention, &checked));
    job->floor = epmoei_attention_floor(&checked);
    return EPMOE_OK;
}

/* Every token is the last of a sequence of its own. */
static epmoe_status_t make_decode(op_job_t *job)
{
    EPMOEI_CHECK(make_attention(job, job->num_tokens, DECODE_CONTEXT));
    EPMOEI_CHECK(choose_reference_rows(job, 0));
    return finish_attention(job);
}

static epmoe_status_t reference_decode(op_job_t *job)
{
    epmoe_attention_args_t args;
    EPMOEI_CHECK(epmoei_attention_check(&job->args.attention, &args));
    args.num_seqs = job->reference_rows;
    args.o = job->outputs[0].ref;
    return epmoei_attention_ref(&args, NULL);
}

/* One sequence without a past. */
static epmoe_status_t make_prefill(op_job_t *job)
{
    EPMOEI_CHECK(make_attention(job, 1, job->num_tokens));
    EPMOEI_CHECK(choose_reference_rows(job, (int32_t)epmoei_max64(0, job->num_tokens - REFERENCE_ROWS)));
    return finish_attention(job);
}

/* The last tokens, which see the most. */
static epmoe_status_t reference_prefill(op_job_t *job)
{
    epmoe_attention_args_t args;
    int64_t first = job->reference_index[0], size = epmoe_dtype_size(job->args.attention.dtype);
    const int32_t start[] = {0, job->reference_rows};
    EPMOEI_CHECK(epmoei_attention_check(&job->args.attention, &args));
    args.num_tokens = job->reference_rows;
    args.query_start = start;
    args.q = (const char *)args.q + first * args.q_stride * size;
    args.o = (char *)job->outputs[0].ref + first * job->outputs[0].cols * size;
    return epmoei_attention_ref(&args, NULL);
}

/* --------------------------------------------------------------------------------------------------------- sample */

static epmoe_status_t run_sample(const op_args_t *args, epmoe_stream_t stream)
{
    return epmoe_sample(&args->sample, stream);
}

static epmoe_status_t reference_sample(op_job_t *job)
{
    epmoe_sample_args_t args;
    EPMOEI_CHECK(epmoei_sample_check(&job->args.sample, &args));
    args.num_rows = job->reference_rows;
    args.tokens = job->outputs[0].ref;
    return epmoei_sample_ref(&args, NULL);
}

static const size_t sample_pointers[] = {OP_AT(sample.logits), OP_AT(sample.uniform), OP_AT(sample.tokens), 0};

static epmoe_status_t take_uniform(op_job_t *job, const float **uniform, int64_t count)
{
    float *numbers;
    EPMOEI_CHECK(op_take(job, (void **)&numbers, count * 4));
    uint64_t state = random_start(job->bench->options->seed, RANDOM_OP, 0);
    for (int64_t i = 0; i < count; i++) numbers[i] = (float)(random_next(&state) >> 40) * 0x1p-24f;
    *uniform = numbers;
    return EPMOE_OK;
}

/* All filters at once, at values in common use. */
static epmoe_status_t make_sample(op_job_t *job)
{
    epmoe_sample_args_t *args = &job->args.sample, checked;
    *args = (epmoe_sample_args_t)EPMOE_SAMPLE_ARGS_INIT;
    args->backend = job->bench->backend;
    args->num_rows = job->num_tokens;
    args->vocab_size = VOCAB;
    args->temperature = 0.8f;
    args->top_k = 50;
    args->top_p = 0.9f;
    args->min_p = 0.02f;
    EPMOEI_CHECK(op_take_random(job, (void **)&args->logits, EPMOE_F32, (int64_t)job->num_tokens * VOCAB, 0, 2));
    EPMOEI_CHECK(take_uniform(job, &args->uniform, job->num_tokens));
    EPMOEI_CHECK(op_take_output(job, (void **)&args->tokens, EPMOE_I32, job->num_tokens, 1));
    EPMOEI_CHECK(choose_reference_rows(job, 0));
    EPMOEI_CHECK(epmoei_sample_check(args, &checked));
    job->floor = epmoei_sample_floor(&checked);
    return EPMOE_OK;
}

/* ---------------------------------------------------------------------------------------------------- spec_verify */

static epmoe_status_t run_spec(const op_args_t *args, epmoe_stream_t stream)
{
    return epmoe_spec_verify(&args->spec, stream);
}

static epmoe_status_t reference_spec(op_job_t *job)
{
    epmoe_spec_verify_args_t args;
    EPMOEI_CHECK(epmoei_spec_verify_check(&job->args.spec, &args));
    args.tokens = job->outputs[0].ref;
    args.accepted = job->outputs[1].ref;
    return epmoei_spec_verify_ref(&args, NULL);
}

static const size_t spec_pointers[] = {OP_AT(spec.draft_ids),
                                       OP_AT(spec.draft_probs),
                                       OP_AT(spec.target_probs),
                                       OP_AT(spec.uniform),
                                       OP_AT(spec.tokens),
                                       OP_AT(spec.accepted),
                                       0};

/* `count` distributions that sum to about 1. */
static epmoe_status_t take_distributions(op_job_t *job, const float **probs, int64_t count, int32_t stream)
{
    float *data;
    EPMOEI_CHECK(op_take(job, (void **)&data, count * VOCAB * 4));
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < count; row++) {
        uint64_t state = random_start(job->bench->options->seed + (uint64_t)stream, RANDOM_OP, row);
        for (int64_t i = 0; i < VOCAB; i++) data[row * VOCAB + i] = (float)random_unit(&state) * (2.0f / VOCAB);
    }
    *probs = data;
    return EPMOE_OK;
}

static epmoe_status_t make_spec(op_job_t *job)
{
    epmoe_spec_verify_args_t *args = &job->args.spec, checked;
    int64_t rows = job->num_tokens, rejections = 0;
    int32_t *ids;
    *args = (epmoe_spec_verify_args_t)EPMOE_SPEC_VERIFY_ARGS_INIT;
    args->backend = job->bench->backend;
    args->num_rows = job->num_tokens;
    args->num_drafts = DRAFTS;
    args->vocab_size = VOCAB;
    EPMOEI_CHECK(take_distributions(job, &args->draft_probs, rows * DRAFTS, 1));
    EPMOEI_CHECK(take_distributions(job, &args->target_probs, rows * (DRAFTS + 1), 2));
    EPMOEI_CHECK(take_uniform(job, &args->uniform, rows * (DRAFTS + 1)));
    EPMOEI_CHECK(op_take(job, (void **)&ids, rows * DRAFTS * 4));
    uint64_t state = random_start(job->bench->options->seed, RANDOM_OP, 1);
    for (int64_t i = 0; i < rows * DRAFTS; i++) ids[i] = random_below(&state, VOCAB);
    args->draft_ids = ids;
    EPMOEI_CHECK(op_take_output(job, (void **)&args->tokens, EPMOE_I32, rows, DRAFTS + 1));
    EPMOEI_CHECK(op_take_output(job, (void **)&args->accepted, EPMOE_I32, rows, 1));
    EPMOEI_CHECK(epmoei_spec_verify_check(args, &checked));
    for (int64_t row = 0; row < rows; row++) {
        bool rejected;
        epmoei_spec_accept(&checked, row, &rejected);
        rejections += rejected;
    }
    job->floor = epmoei_spec_verify_floor(&checked, rejections);
    return EPMOE_OK;
}

const op_kind_t op_attention = {"attention", make_decode, attention_pointers, run_attention, reference_decode, NULL};
const op_kind_t op_prefill = {"prefill", make_prefill, attention_pointers, run_attention, reference_prefill, NULL};
const op_kind_t op_sample = {"sample", make_sample, sample_pointers, run_sample, reference_sample, NULL};
const op_kind_t op_spec_verify = {"spec_verify", make_spec, spec_pointers, run_spec, reference_spec, NULL};
