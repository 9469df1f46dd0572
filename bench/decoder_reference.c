#include "bench/decoder.h"

#include "bench/bench.h"

#include "base/dtype.h"
#include "kernels/blas_threads.h"

#include <cblas.h>
#include <math.h>
#include <string.h>

#define CHUNK 1024 /* rows of the hidden state that are held at a time */

/* A head of the cache has `columns` key columns and `values` value columns: with MLA the latent and the rotated
 * columns, and the latent again. */
typedef struct work_t {
    const bench_case_t *made;
    const bench_t *bench;
    const epmoe_decoder_config_t *config;
    bool mla;
    int64_t heads, kv_heads, columns, values;
    float *cos_sin;
    double *key;   /* [n,kv_heads*columns]: of a prefill the tokens from the first on, of a step the checked ones */
    double *value; /* [n,kv_heads*values]; with MLA not read */
    double *q;     /* [count,heads*columns] */
    double *o;     /* [count,heads*values] */
} work_t;

static double at(const epmoei_view_t *view, int64_t c)
{
    return (double)epmoei_load(view->data, view->dtype, c * view->col_stride);
}

/* Rows [rows,n] that lie `stride` apart, in place; weight absent = 1. */
static void normalise(double *x, int64_t rows, int64_t n, int64_t stride, const epmoei_view_t *weight, double eps)
{
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        double squares = 0, *row = x + r * stride;
        for (int64_t c = 0; c < n; c++) squares += row[c] * row[c];
        double scale = 1 / sqrt(squares / (double)n + eps);
        for (int64_t c = 0; c < n; c++) row[c] *= scale * (weight->data ? at(weight, c) : 1);
    }
}

static void rotate(const work_t *work, double *head, int64_t position)
{
    int32_t n = work->config->rope.rotary_dim, half = n / 2;
    bool pairs = work->config->rope_style == EPMOE_ROPE_GPTJ;
    const float *table = work->cos_sin + position * n;
    for (int32_t i = 0; i < half; i++) {
        double *a = head + (pairs ? 2 * i : i), *b = head + (pairs ? 2 * i + 1 : i + half);
        double c = (double)table[i], s = (double)table[half + i], x = *a, y = *b;
        *a = x * c - y * s;
        *b = y * c + x * s;
    }
}

static int64_t position_of(const work_t *work, int64_t token)
{
    return work->bench->options->context ? work->made->batch.length - 1 : token;
}

/* The normalised rows that the projections read. */
static void input_rows(const work_t *work, const int64_t *tokens, int64_t count, double *rows)
{
    int64_t d = work->bench->config.hidden;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < count; i++) case_input_row(work->bench, work->made->first_token + tokens[i], rows + i * d);
    normalise(rows, count, d, d, &work->bench->run.source.input_norm, (double)work->config->norm_eps);
}

static epmoe_status_t multiply(const work_t *work, const epmoei_view_t *weight, const epmoei_view_t *bias,
                               const double *x, int64_t rows, double *y)
{
    return reference_multiply(&work->bench->reference, weight, bias, x, (int32_t)rows, y);
}

/* Heads [rows,heads,columns] of q or k. */
static void finish_heads(const work_t *work, const int64_t *tokens, int64_t count, int64_t heads,
                         const epmoei_view_t *norm, double *x)
{
    int64_t columns = work->config->head_dim, width = heads * columns;
    double eps = (double)work->config->norm_eps;
    if (work->config->qk_norm == EPMOE_QK_NORM_ALL_HEADS)
        normalise(x, count, width, width, norm, eps);
    else if (work->config->qk_norm != EPMOE_QK_NORM_NONE)
        normalise(x, count * heads, columns, columns, norm, eps);
    for (int64_t i = 0; i < count && !work->config->no_rope; i++)
        for (int64_t h = 0; h < heads; h++) rotate(work, x + i * width + h * columns, position_of(work, tokens[i]));
}

/* New keys and values of `count` tokens. */
static epmoe_status_t make_keys(const work_t *work, const int64_t *tokens, int64_t count, const double *rows,
                                double *key, double *value)
{
    const epmoei_attention_source_t *source = &work->bench->run.source;
    if (!work->mla) {
        EPMOEI_CHECK(multiply(work, &source->k, &source->k_bias, rows, count, key));
        EPMOEI_CHECK(multiply(work, &source->v, &source->v_bias, rows, count, value));
        finish_heads(work, tokens, count, work->kv_heads, &source->k_norm, key);
        return EPMOE_OK;
    }
    EPMOEI_CHECK(multiply(work, &source->kv_down, &source->kv_down_bias, rows, count, key));
    normalise(key, count, work->values, work->columns, &source->kv_down_norm, (double)work->config->latent_eps);
    for (int64_t i = 0; i < count; i++)
        rotate(work, key + i * work->columns + work->values, position_of(work, tokens[i]));
    return EPMOE_OK;
}

/* kv_b's rows of all heads as doubles, rounded as the backend stores them: [H*(nope+value),latent]. */
static epmoe_status_t read_kv_up(const work_t *work, double **matrix)
{
    const epmoei_view_t *view = &work->bench->run.source.kv_up;
    const reference_t *reference = &work->bench->reference;
    epmoe_dtype_t dtype = reference->rounds_checkpoint ? reference->weight_dtype : EPMOE_DTYPE_NONE;
    EPMOEI_CHECK(epmoei_alloc_for((void **)matrix, view->rows * view->cols * 8, "reference weights"));
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < view->rows; r++)
        for (int64_t c = 0; c < view->cols; c++)
            (*matrix)[r * view->cols + c] = (double)epmoei_round_to(
                epmoei_load(view->data, view->dtype, r * view->row_stride + c * view->col_stride), dtype);
    return EPMOE_OK;
}

static epmoe_status_t make_queries(const work_t *work, const int64_t *tokens, int64_t count, const double *rows)
{
    epmoe_status_t status;
    const epmoei_attention_source_t *source = &work->bench->run.source;
    if (!work->mla) {
        EPMOEI_CHECK(multiply(work, &source->q, &source->q_bias, rows, count, work->q));
        finish_heads(work, tokens, count, work->heads, &source->q_norm, work->q);
        return EPMOE_OK;
    }
    const epmoe_decoder_config_t *config = work->config;
    int64_t nope = config->nope_dim, rope = config->rope_dim, value = config->value_dim, latent = config->kv_latent;
    int64_t width = work->heads * (nope + rope), q_latent = config->q_latent;
    double *down = NULL, *q = NULL, *kv_up = NULL;
    EPMOEI_CHECK_GOTO(epmoei_alloc_for((void **)&down, count * q_latent * 8, "reference rows"), done);
    EPMOEI_CHECK_GOTO(epmoei_alloc_for((void **)&q, count * width * 8, "reference rows"), done);
    EPMOEI_CHECK_GOTO(read_kv_up(work, &kv_up), done);
    if (q_latent) {
        EPMOEI_CHECK_GOTO(multiply(work, &source->q_down, &source->q_down_bias, rows, count, down), done);
        normalise(down, count, q_latent, q_latent, &source->q_down_norm, (double)config->latent_eps);
        EPMOEI_CHECK_GOTO(multiply(work, &source->q_up, NULL, down, count, q), done);
    } else {
        EPMOEI_CHECK_GOTO(multiply(work, &source->q, NULL, rows, count, q), done);
    }
    for (int64_t h = 0; h < work->heads; h++) /* q . (w_key_up c) = (w_key_up^T q) . c */
        cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)count, (int)latent, (int)nope, 1,
                    q + h * (nope + rope), (int)width, kv_up + h * (nope + value) * latent, (int)latent, 0,
                    work->q + h * work->columns, (int)(work->heads * work->columns));
    for (int64_t i = 0; i < count; i++)
        for (int64_t h = 0; h < work->heads; h++) {
            double *to = work->q + (i * work->heads + h) * work->columns + latent;
            memcpy(to, q + i * width + h * (nope + rope) + nope, (size_t)rope * 8);
            rotate(work, to, position_of(work, tokens[i]));
        }
done:
    epmoei_free(kv_up);
    epmoei_free(q);
    epmoei_free(down);
    return status;
}

/* Row `slot` of a cache, one head's columns. The layout is NHD. */
static void read_cached(const work_t *work, const buffer_t *cache, int64_t seq, int64_t token, int64_t head,
                        int64_t columns, double *row)
{
    const decoder_batch_t *batch = &work->made->batch;
    int64_t size = work->config->block_size;
    int64_t slot = (token / size * batch->num_seqs + seq) * size + token % size;
    int64_t first = (slot * work->kv_heads + head) * columns;
    for (int64_t c = 0; c < columns; c++)
        row[c] = (double)epmoei_load(cache->host, work->config->cache_dtype, first + c);
}

/* Scores [g,n] become weights. */
static void soften(const work_t *work, double *scores, int64_t g, int64_t n, int64_t first_head)
{
    const epmoei_view_t *sinks = &work->bench->run.source.sinks;
    for (int64_t h = 0; h < g; h++) {
        double *row = scores + h * n, sink = work->config->has_sinks ? at(sinks, first_head + h) : -INFINITY;
        double largest = sink, sum = 0;
        for (int64_t j = 0; j < n; j++) largest = row[j] > largest ? row[j] : largest;
        for (int64_t j = 0; j < n; j++) sum += row[j] = exp(row[j] - largest);
        sum += exp(sink - largest);
        for (int64_t j = 0; j < n; j++) row[j] /= sum;
    }
}

/* The query heads of one cache head of one checked token. */
static epmoe_status_t attend(const work_t *work, int64_t index, int64_t token, int64_t head)
{
    const bench_case_t *made = work->made;
    int64_t position = position_of(work, token), group = work->heads / work->kv_heads;
    int64_t window = work->config->window, first = window && position >= window ? position - window + 1 : 0;
    int64_t n = position - first + 1, columns = work->columns, values = work->values;
    int64_t key_width = work->kv_heads * columns, value_width = work->kv_heads * values;
    const double *key = work->key + first * key_width + head * columns,
                 *value = work->value + first * value_width + head * values;
    if (work->mla) value = key, value_width = key_width;
    double *own = NULL, *scores = epmoei_alloc(group * n * 8);
    if (!scores) return EPMOE_ERROR_OUT_OF_MEMORY;
    if (work->bench->options->context) {
        own = epmoei_alloc(n * (columns + values) * 8);
        if (!own) {
            epmoei_free(scores);
            return EPMOE_ERROR_OUT_OF_MEMORY;
        }
        double *keys = own, *cached = own + n * columns;
        for (int64_t j = 0; j < n - 1; j++) {
            read_cached(work, &made->batch.key_cache, token, first + j, head, columns, keys + j * columns);
            if (!work->mla)
                read_cached(work, &made->batch.value_cache, token, first + j, head, values, cached + j * values);
        }
        memcpy(keys + (n - 1) * columns, work->key + index * key_width + head * columns, (size_t)columns * 8);
        if (!work->mla)
            memcpy(cached + (n - 1) * values, work->value + index * value_width + head * values, (size_t)values * 8);
        key = keys, key_width = columns;
        value = work->mla ? keys : cached, value_width = work->mla ? columns : values;
    }
    cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)group, (int)n, (int)columns, (double)work->config->scale,
                work->q + (index * work->heads + head * group) * columns, (int)columns, key, (int)key_width, 0, scores,
                (int)n);
    soften(work, scores, group, n, head * group);
    cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)group, (int)values, (int)n, 1, scores, (int)n, value,
                (int)value_width, 0, work->o + (index * work->heads + head * group) * values, (int)values);
    epmoei_free(own);
    epmoei_free(scores);
    return EPMOE_OK;
}

static epmoe_status_t attend_all(const work_t *work, const int64_t *tokens, int64_t count)
{
    bool failed = false;
    epmoei_blas_region_begin();
#pragma omp parallel for schedule(dynamic) collapse(2) reduction(|| : failed)
    for (int64_t i = 0; i < count; i++)
        for (int64_t h = 0; h < work->kv_heads; h++) failed = attend(work, i, tokens[i], h) != EPMOE_OK || failed;
    epmoei_blas_region_end();
    return failed ? epmoei_fail(EPMOE_ERROR_OUT_OF_MEMORY, "no memory for reference scores") : EPMOE_OK;
}

/* residual = x + out; rows = that, normalised. */
static epmoe_status_t finish_rows(const work_t *work, const int64_t *tokens, int64_t count, double *residual,
                                  double *rows)
{
    epmoe_status_t status;
    const epmoei_attention_source_t *source = &work->bench->run.source;
    const epmoe_decoder_config_t *config = work->config;
    int64_t d = work->bench->config.hidden, value = config->value_dim, latent = config->kv_latent;
    double *heads = work->o, *made = NULL, *kv_up = NULL;
    if (work->mla) {
        EPMOEI_CHECK_GOTO(epmoei_alloc_for((void **)&made, count * work->heads * value * 8, "reference rows"), done);
        EPMOEI_CHECK_GOTO(read_kv_up(work, &kv_up), done);
        for (int64_t h = 0; h < work->heads; h++)
            cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)count, (int)value, (int)latent, 1,
                        work->o + h * latent, (int)(work->heads * latent),
                        kv_up + (h * (config->nope_dim + value) + config->nope_dim) * latent, (int)latent, 0,
                        made + h * value, (int)(work->heads * value));
        heads = made;
    }
    EPMOEI_CHECK_GOTO(multiply(work, &source->out, &source->out_bias, heads, count, residual), done);
    for (int64_t i = 0; i < count; i++) {
        case_input_row(work->bench, work->made->first_token + tokens[i], rows + i * d);
        for (int64_t c = 0; c < d; c++) residual[i * d + c] += rows[i * d + c];
    }
    memcpy(rows, residual, (size_t)(count * d * 8));
    normalise(rows, count, d, d, &source->post_norm, (double)config->norm_eps);
done:
    epmoei_free(kv_up);
    epmoei_free(made);
    return status;
}

/* All keys and values that a checked token may see and that are not in the cache, and the queries. */
static epmoe_status_t project(const work_t *work, const int64_t *tokens, int64_t count, int64_t num_keys,
                              double *scratch)
{
    int64_t key_width = work->kv_heads * work->columns, value_width = work->kv_heads * work->values, all[CHUNK];
    bool step = work->bench->options->context > 0;
    for (int64_t first = 0; first < num_keys; first += CHUNK) {
        int64_t n = epmoei_min64(CHUNK, num_keys - first);
        for (int64_t i = 0; i < n; i++) all[i] = step ? tokens[first + i] : first + i;
        input_rows(work, all, n, scratch);
        EPMOEI_CHECK(
            make_keys(work, all, n, scratch, work->key + first * key_width, work->value + first * value_width));
    }
    input_rows(work, tokens, count, scratch);
    return make_queries(work, tokens, count, scratch);
}

epmoe_status_t decoder_reference(const bench_case_t *made, const bench_t *bench, const int64_t *tokens, int32_t count,
                                 double *residual, double *rows)
{
    epmoe_status_t status;
    const epmoe_decoder_config_t *config = &bench->run.decoder->shape.config;
    bool mla = config->attention == EPMOE_ATTENTION_MLA;
    if (count == 0) return EPMOE_OK;
    work_t work = {.made = made,
                   .bench = bench,
                   .config = config,
                   .mla = mla,
                   .heads = config->num_heads,
                   .kv_heads = mla ? 1 : config->num_kv_heads,
                   .columns = mla ? config->kv_latent + config->rope_dim : config->head_dim,
                   .values = mla ? config->kv_latent : config->head_dim};
    int64_t num_keys = bench->options->context ? count : tokens[count - 1] + 1, d = bench->config.hidden;
    double *scratch = NULL;
    epmoe_rope_table_args_t table = config->rope;
    EPMOEI_CHECK_GOTO(
        epmoei_alloc_for((void **)&work.cos_sin, (int64_t)table.num_positions * table.rotary_dim * 4, "a table"), done);
    EPMOEI_CHECK_GOTO(epmoei_alloc_for((void **)&work.key, num_keys * work.kv_heads * work.columns * 8, "keys"), done);
    work.value = work.key;
    if (!mla)
        EPMOEI_CHECK_GOTO(epmoei_alloc_for((void **)&work.value, num_keys * work.kv_heads * work.values * 8, "values"),
                          done);
    EPMOEI_CHECK_GOTO(epmoei_alloc_for((void **)&work.q, count * work.heads * work.columns * 8, "queries"), done);
    EPMOEI_CHECK_GOTO(epmoei_alloc_for((void **)&work.o, count * work.heads * work.values * 8, "heads"), done);
    EPMOEI_CHECK_GOTO(epmoei_alloc_for((void **)&scratch, epmoei_max64(CHUNK, count) * d * 8, "rows"), done);
    table.cos_sin = work.cos_sin; /* whose angles have tests of their own */
    EPMOEI_CHECK_GOTO(epmoe_rope_table(&table), done);
    EPMOEI_CHECK_GOTO(project(&work, tokens, count, num_keys, scratch), done);
    EPMOEI_CHECK_GOTO(attend_all(&work, tokens, count), done);
    status = finish_rows(&work, tokens, count, residual, rows);
done:
    epmoei_free(scratch);
    epmoei_free(work.o);
    epmoei_free(work.q);
    if (work.value != work.key) epmoei_free(work.value);
    epmoei_free(work.key);
    epmoei_free(work.cos_sin);
    return status;
}
