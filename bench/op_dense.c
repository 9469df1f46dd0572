/* The dense ops of a decoder layer: rms_norm, rope, qk_norm_rope, cache_write. The first three work in place, so that
 * the timed calls see what the ones before them left; the check runs once more from the beginning. */
#include "bench/heads.h"
#include "bench/op_job.h"

#include "dense_layers/cache_write.h"
#include "dense_layers/qk_norm_rope.h"
#include "dense_layers/rms_norm.h"
#include "dense_layers/rope.h"
#include "dense_layers/rope_cache_write.h"

#include <string.h>

#define NUM_POSITIONS 4096

static int64_t output_bytes(const op_output_t *output)
{
    return output->rows * output->cols * epmoe_dtype_size(output->dtype);
}

/* Random values that the library's output and the reference's begin with. */
static epmoe_status_t take_in_place(op_job_t *job, void **pointer, epmoe_dtype_t dtype, int64_t rows, int64_t cols,
                                    int32_t stream)
{
    void *initial;
    EPMOEI_CHECK(op_take_random(job, &initial, dtype, rows * cols, stream, 1));
    EPMOEI_CHECK(op_take_output(job, pointer, dtype, rows, cols));
    op_output_t *output = &job->outputs[job->num_outputs - 1];
    output->initial = initial;
    memcpy(*pointer, initial, (size_t)output_bytes(output));
    return EPMOE_OK;
}

static epmoe_status_t run_from_the_beginning(op_job_t *job)
{
    for (int32_t i = 0; i < job->num_outputs; i++) {
        op_output_t *output = &job->outputs[i];
        if (!output->initial) continue;
        memcpy(output->out->host, output->initial, (size_t)output_bytes(output));
        memcpy(output->ref, output->initial, (size_t)output_bytes(output));
        EPMOEI_CHECK(buffer_upload(output->out));
    }
    EPMOEI_CHECK(op_job_run(job));
    for (int32_t i = 0; i < job->num_outputs; i++) EPMOEI_CHECK(buffer_download(job->outputs[i].out));
    return EPMOE_OK;
}

/* ------------------------------------------------------------------------------------------------------- rms_norm */

static epmoe_status_t run_norm(const op_args_t *args, epmoe_stream_t stream)
{
    return epmoe_rms_norm(&args->norm, stream);
}

static epmoe_status_t reference_norm(op_job_t *job)
{
    epmoe_rms_norm_args_t args;
    EPMOEI_CHECK(run_from_the_beginning(job));
    EPMOEI_CHECK(epmoei_rms_norm_check(&job->args.norm, &args));
    args.y = job->outputs[0].ref;
    if (args.quant) args.scale = job->outputs[1].ref;
    if (args.residual) args.residual = job->outputs[job->num_outputs - 1].ref;
    return epmoei_rms_norm_ref(&args, NULL);
}

static const size_t norm_pointers[] = {OP_AT(norm.x), OP_AT(norm.residual), OP_AT(norm.weight),
                                       OP_AT(norm.y), OP_AT(norm.scale),    0};

static epmoe_status_t make_any_norm(op_job_t *job, bool residual, epmoe_granularity_t quant)
{
    const epmoe_layer_config_t *config = &job->bench->config;
    epmoe_rms_norm_args_t *args = &job->args.norm, checked;
    int64_t rows = job->num_tokens, d = config->hidden;
    *args = (epmoe_rms_norm_args_t)EPMOE_RMS_NORM_ARGS_INIT;
    args->backend = job->bench->backend;
    args->num_tokens = job->num_tokens;
    args->hidden = config->hidden;
    args->dtype = config->dtype;
    EPMOEI_CHECK(op_take_random(job, (void **)&args->x, config->dtype, rows * d, 0, 1));
    EPMOEI_CHECK(op_take_random(job, (void **)&args->weight, config->dtype, d, 1, 1));
    args->quant = quant;
    EPMOEI_CHECK(op_take_output(job, &args->y, quant ? EPMOE_F8_E4M3 : config->dtype, rows, d));
    if (quant) EPMOEI_CHECK(op_take_output(job, (void **)&args->scale, EPMOE_F32, rows, epmoei_ceil_div(d, 128)));
    if (residual) EPMOEI_CHECK(take_in_place(job, &args->residual, config->dtype, rows, d, 2));
    EPMOEI_CHECK(epmoei_rms_norm_check(args, &checked));
    job->floor = epmoei_rms_norm_floor(&checked);
    return EPMOE_OK;
}

/* With the residual, as between attention and experts. */
static epmoe_status_t make_norm(op_job_t *job) { return make_any_norm(job, true, 0); }
static epmoe_status_t make_norm_alone(op_job_t *job) { return make_any_norm(job, false, 0); }
static epmoe_status_t make_norm_fp8(op_job_t *job) { return make_any_norm(job, true, EPMOE_GRANULARITY_BLOCK128); }

/* ----------------------------------------------------------------------------------------------------------- rope */

/* Ascending positions and the plain table. */
static epmoe_status_t take_positions(op_job_t *job, int32_t rotary_dim, const void **positions, const float **cos_sin)
{
    epmoe_rope_table_args_t table = EPMOE_ROPE_TABLE_ARGS_INIT;
    int64_t *at;
    EPMOEI_CHECK(op_take(job, (void **)&at, (int64_t)job->num_tokens * 8));
    for (int64_t t = 0; t < job->num_tokens; t++) at[t] = t % NUM_POSITIONS;
    EPMOEI_CHECK(op_take(job, (void **)&table.cos_sin, (int64_t)NUM_POSITIONS * rotary_dim * 4));
    table.num_positions = NUM_POSITIONS;
    table.rotary_dim = rotary_dim;
    *positions = at;
    *cos_sin = table.cos_sin;
    return epmoe_rope_table(&table);
}

static epmoe_status_t run_rope(const op_args_t *args, epmoe_stream_t stream) { return epmoe_rope(&args->rope, stream); }

static epmoe_status_t reference_rope(op_job_t *job)
{
    epmoe_rope_args_t args;
    EPMOEI_CHECK(run_from_the_beginning(job));
    EPMOEI_CHECK(epmoei_rope_check(&job->args.rope, &args));
    args.q = job->outputs[0].ref;
    args.k = job->outputs[1].ref;
    return epmoei_rope_ref(&args, NULL);
}

static const size_t rope_pointers[] = {OP_AT(rope.q), OP_AT(rope.k), OP_AT(rope.positions), OP_AT(rope.cos_sin), 0};

static epmoe_status_t make_rope(op_job_t *job)
{
    heads_t heads;
    epmoe_rope_args_t *args = &job->args.rope, checked;
    EPMOEI_CHECK(heads_of_bench(job->bench, &heads));
    int64_t rows = job->num_tokens, dim = heads.head_dim;
    *args = (epmoe_rope_args_t)EPMOE_ROPE_ARGS_INIT;
    args->backend = job->bench->backend;
    args->num_tokens = job->num_tokens;
    args->num_heads = heads.heads;
    args->num_kv_heads = heads.kv_heads;
    args->head_dim = heads.head_dim;
    args->rotary_dim = heads.rotary_dim;
    args->dtype = job->bench->config.dtype;
    args->num_positions = NUM_POSITIONS;
    EPMOEI_CHECK(take_in_place(job, &args->q, args->dtype, rows, heads.heads * dim, 0));
    EPMOEI_CHECK(take_in_place(job, &args->k, args->dtype, rows, heads.kv_heads * dim, 1));
    EPMOEI_CHECK(take_positions(job, heads.rotary_dim, &args->positions, &args->cos_sin));
    EPMOEI_CHECK(epmoei_rope_check(args, &checked));
    job->floor = epmoei_rope_floor(&checked);
    return EPMOE_OK;
}

/* --------------------------------------------------------------------------------------------------- qk_norm_rope */

static epmoe_status_t run_qk(const op_args_t *args, epmoe_stream_t stream)
{
    return epmoe_qk_norm_rope(&args->qk, stream);
}

static epmoe_status_t reference_qk(op_job_t *job)
{
    epmoe_qk_norm_rope_args_t args;
    EPMOEI_CHECK(run_from_the_beginning(job));
    EPMOEI_CHECK(epmoei_qk_norm_rope_check(&job->args.qk, &args));
    args.qkv = job->outputs[0].ref;
    return epmoei_qk_norm_rope_ref(&args, NULL);
}

static const size_t qk_pointers[] = {OP_AT(qk.qkv),       OP_AT(qk.q_weight), OP_AT(qk.k_weight),
                                     OP_AT(qk.positions), OP_AT(qk.cos_sin),  0};

static epmoe_status_t make_qk(op_job_t *job)
{
    heads_t heads;
    epmoe_qk_norm_rope_args_t *args = &job->args.qk, checked;
    EPMOEI_CHECK(heads_of_bench(job->bench, &heads));
    int64_t dim = heads.head_dim, width = (heads.heads + 2 * (int64_t)heads.kv_heads) * dim;
    *args = (epmoe_qk_norm_rope_args_t)EPMOE_QK_NORM_ROPE_ARGS_INIT;
    args->backend = job->bench->backend;
    args->num_tokens = job->num_tokens;
    args->num_heads = heads.heads;
    args->num_kv_heads = heads.kv_heads;
    args->head_dim = heads.head_dim;
    args->rotary_dim = heads.rotary_dim;
    args->dtype = job->bench->config.dtype;
    args->num_positions = NUM_POSITIONS;
    EPMOEI_CHECK(take_in_place(job, &args->qkv, args->dtype, job->num_tokens, width, 0));
    EPMOEI_CHECK(op_take_random(job, (void **)&args->q_weight, args->dtype, dim, 1, 1));
    EPMOEI_CHECK(op_take_random(job, (void **)&args->k_weight, args->dtype, dim, 2, 1));
    EPMOEI_CHECK(take_positions(job, heads.rotary_dim, &args->positions, &args->cos_sin));
    EPMOEI_CHECK(epmoei_qk_norm_rope_check(args, &checked));
    job->floor = epmoei_qk_norm_rope_floor(&checked);
    return EPMOE_OK;
}

/* ---------------------------------------------------------------------------------------------------- cache_write */

static epmoe_status_t run_cache(const op_args_t *args, epmoe_stream_t stream)
{
    return epmoe_cache_write(&args->cache, stream);
}

static epmoe_status_t reference_cache(op_job_t *job)
{
    epmoe_cache_write_args_t args;
    EPMOEI_CHECK(epmoei_cache_write_check(&job->args.cache, &args));
    args.key_cache = job->outputs[0].ref;
    if (args.value) args.value_cache = job->outputs[1].ref;
    return epmoei_cache_write_ref(&args, NULL);
}

static const size_t cache_pointers[] = {OP_AT(cache.key),       OP_AT(cache.value),       OP_AT(cache.slots),
                                        OP_AT(cache.key_cache), OP_AT(cache.value_cache), 0};

/* What no token reaches is zero on both sides. */
static epmoe_status_t take_cache(op_job_t *job, void **cache, int64_t slots, int64_t cols)
{
    EPMOEI_CHECK(op_take_output(job, cache, job->bench->config.dtype, slots, cols));
    op_output_t *output = &job->outputs[job->num_outputs - 1];
    memset(*cache, 0, (size_t)output_bytes(output));
    memset(output->ref, 0, (size_t)output_bytes(output));
    return EPMOE_OK;
}

/* Blocks of 16 slots, of which the tokens fill every other one. With MLA keys alone. */
static epmoe_status_t take_cache_args(op_job_t *job, const heads_t *heads, epmoe_cache_write_args_t *args, bool fused)
{
    enum { kBlock = 16 };
    int64_t rows = job->num_tokens, cols = (int64_t)heads->kv_heads * heads->cache_dim, *slots;
    int64_t blocks = 2 * epmoei_ceil_div(rows, kBlock);
    *args = (epmoe_cache_write_args_t)EPMOE_CACHE_WRITE_ARGS_INIT;
    args->backend = job->bench->backend;
    args->num_tokens = job->num_tokens;
    args->num_kv_heads = heads->kv_heads;
    args->head_dim = heads->cache_dim;
    args->num_blocks = (int32_t)blocks;
    args->block_size = kBlock;
    args->layout = EPMOE_CACHE_LAYOUT_NHD;
    args->dtype = job->bench->config.dtype;
    if (!fused) EPMOEI_CHECK(op_take_random(job, (void **)&args->key, args->dtype, rows * cols, 2, 1));
    bool keys_alone = heads->cache_dim != heads->head_dim;
    if (!keys_alone) EPMOEI_CHECK(op_take_random(job, (void **)&args->value, args->dtype, rows * cols, 3, 1));
    EPMOEI_CHECK(op_take(job, (void **)&slots, rows * 8));
    for (int64_t t = 0; t < rows; t++) slots[t] = 2 * (t / kBlock) * kBlock + t % kBlock;
    args->slots = slots;
    EPMOEI_CHECK(take_cache(job, &args->key_cache, blocks * kBlock, cols));
    return keys_alone ? EPMOE_OK : take_cache(job, &args->value_cache, blocks * kBlock, cols);
}

static epmoe_status_t make_cache(op_job_t *job)
{
    heads_t heads;
    epmoe_cache_write_args_t *args = &job->args.cache, checked;
    EPMOEI_CHECK(heads_of_bench(job->bench, &heads));
    EPMOEI_CHECK(take_cache_args(job, &heads, args, false));
    EPMOEI_CHECK(epmoei_cache_write_check(args, &checked));
    job->floor = epmoei_cache_write_floor(&checked);
    return EPMOE_OK;
}

/* ----------------------------------------------------------------------------------------------- rope_cache_write */

static epmoe_status_t run_both(const op_args_t *args, epmoe_stream_t stream)
{
    return epmoe_rope_cache_write(&args->both.rope, &args->both.cache, stream);
}

static epmoe_status_t reference_both(op_job_t *job)
{
    epmoe_rope_args_t rope;
    epmoe_cache_write_args_t cache;
    EPMOEI_CHECK(run_from_the_beginning(job));
    EPMOEI_CHECK(epmoei_rope_cache_write_check(&job->args.both.rope, &job->args.both.cache, &rope, &cache));
    rope.q = job->outputs[0].ref;
    rope.k = job->outputs[1].ref;
    cache.key = rope.k;
    cache.key_cache = job->outputs[2].ref;
    cache.value_cache = job->outputs[3].ref;
    return epmoei_rope_cache_write_ref(&rope, &cache, NULL);
}

static const size_t both_pointers[] = {OP_AT(both.rope.q),
                                       OP_AT(both.rope.k),
                                       OP_AT(both.rope.positions),
                                       OP_AT(both.rope.cos_sin),
                                       OP_AT(both.cache.value),
                                       OP_AT(both.cache.key_cache),
                                       OP_AT(both.cache.value_cache),
                                       OP_AT(both.cache.slots),
                                       0};

static epmoe_status_t make_both(op_job_t *job)
{
    heads_t heads;
    epmoe_rope_args_t *rope = &job->args.both.rope, rotation;
    epmoe_cache_write_args_t *cache = &job->args.both.cache, write;
    EPMOEI_CHECK(heads_of_bench(job->bench, &heads));
    if (heads.cache_dim != heads.head_dim)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "op rope_cache_write: %s caches latents", job->bench->model);
    int64_t rows = job->num_tokens, dim = heads.head_dim;
    *rope = (epmoe_rope_args_t)EPMOE_ROPE_ARGS_INIT;
    rope->backend = job->bench->backend;
    rope->num_tokens = job->num_tokens;
    rope->num_heads = heads.heads;
    rope->num_kv_heads = heads.kv_heads;
    rope->head_dim = heads.head_dim;
    rope->rotary_dim = heads.rotary_dim;
    rope->dtype = job->bench->config.dtype;
    rope->num_positions = NUM_POSITIONS;
    EPMOEI_CHECK(take_in_place(job, &rope->q, rope->dtype, rows, heads.heads * dim, 0));
    EPMOEI_CHECK(take_in_place(job, &rope->k, rope->dtype, rows, heads.kv_heads * dim, 1));
    EPMOEI_CHECK(take_positions(job, heads.rotary_dim, &rope->positions, &rope->cos_sin));
    EPMOEI_CHECK(take_cache_args(job, &heads, cache, true));
    EPMOEI_CHECK(epmoei_rope_cache_write_check(rope, cache, &rotation, &write));
    job->floor = epmoei_rope_cache_write_floor(&rotation, &write);
    return EPMOE_OK;
}

const op_kind_t op_rms_norm = {"rms_norm", make_norm, norm_pointers, run_norm, reference_norm, NULL};
const op_kind_t op_norm_alone = {"rms_norm_alone", make_norm_alone, norm_pointers, run_norm, reference_norm, NULL};
const op_kind_t op_norm_fp8 = {"rms_norm_fp8", make_norm_fp8, norm_pointers, run_norm, reference_norm, NULL};
const op_kind_t op_rope = {"rope", make_rope, rope_pointers, run_rope, reference_rope, NULL};
const op_kind_t op_qk_norm_rope = {"qk_norm_rope", make_qk, qk_pointers, run_qk, reference_qk, NULL};
const op_kind_t op_rope_cache_write = {"rope_cache_write", make_both, both_pointers, run_both, reference_both, NULL};
const op_kind_t op_cache_write = {"cache_write", make_cache, cache_pointers, run_cache, reference_cache, NULL};
