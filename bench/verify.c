#include "bench/agree.h"
#include "bench/bench.h"
#include "bench/random.h"
#include "bench/selection.h"
#include "bench/stats.h"

#include "base/dtype.h"
#include "comm/comm.h"
#include "moe/layer.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define MAX_CHECKED   256
#define GATHERED_ROWS 16 /* partial sums of so many rows travel at a time */

/* The checked rows are in the order of their global tokens, so each rank's lie together. */
typedef struct verify_t {
    const bench_case_t *made;
    const bench_t *bench;
    reference_t reference;
    int32_t num_rows;
    int64_t tokens[MAX_CHECKED];
    int32_t own_first; /* this rank's rows */
    int32_t own_count;
    int32_t most;     /* rows of the rank with the most */
    double *x;        /* [num_rows,d]: what router and experts read */
    double *residual; /* [own_count,d] with --decoder, else NULL */
    int32_t *ids;     /* [num_rows,k] as the layer chose them, bad ones -1 */
    double *weights;
    double *partial; /* [num_rows,d]: this rank's experts */
    double *y;       /* [own_count,d]: the reference */
    int64_t wrong;
    double max_rel_err;
} verify_t;

/* All tokens, or one seeded token out of each of MAX_CHECKED equal stretches. */
static void choose_rows(verify_t *verify)
{
    const bench_case_t *made = verify->made;
    int64_t total = made->total_tokens, first = 0;
    verify->num_rows = (int32_t)epmoei_min64(total, MAX_CHECKED);
    for (int32_t i = 0; i < verify->num_rows; i++) {
        int64_t begin = total * i / verify->num_rows, end = total * (i + 1) / verify->num_rows;
        uint64_t state = random_start(verify->bench->options->seed, RANDOM_ROWS, i);
        verify->tokens[i] = begin + (int64_t)(random_next(&state) % (uint64_t)(end - begin));
    }
    for (int32_t r = 0; r < verify->bench->program->size; r++) {
        int32_t own_first = 0, count = 0;
        for (int32_t i = 0; i < verify->num_rows; i++) {
            own_first += verify->tokens[i] < first;
            count += verify->tokens[i] >= first && verify->tokens[i] < first + made->tokens[r];
        }
        if (r == verify->bench->program->rank) {
            verify->own_first = own_first;
            verify->own_count = count;
        }
        verify->most = count > verify->most ? count : verify->most;
        first += made->tokens[r];
    }
}

static epmoe_status_t allocate(verify_t *verify)
{
    int64_t rows = verify->num_rows, d = verify->bench->config.hidden, k = verify->bench->config.top_k;
    EPMOEI_CHECK(epmoei_alloc_for((void **)&verify->x, rows * d * 8, "reference rows"));
    EPMOEI_CHECK(epmoei_alloc_for((void **)&verify->ids, rows * k * 4, "reference ids"));
    EPMOEI_CHECK(epmoei_alloc_for((void **)&verify->weights, rows * k * 8, "reference weights"));
    EPMOEI_CHECK(epmoei_alloc_for((void **)&verify->partial, rows * d * 8, "reference rows"));
    EPMOEI_CHECK(epmoei_alloc_for((void **)&verify->y, verify->own_count * d * 8, "reference rows"));
    memset(verify->partial, 0, (size_t)(rows * d * 8));
    return EPMOE_OK;
}

/* Of one rank, collective: its rows of x go to all others. */
static epmoe_status_t share_rows(verify_t *verify)
{
    epmoe_status_t status;
    epmoe_comm_t *comm = verify->bench->program->comm;
    int64_t d = verify->bench->config.hidden, bytes = verify->most * d * 8, first = 0;
    int32_t size = verify->bench->program->size, at = 0;
    double *own = NULL, *all = NULL;
    status = epmoei_alloc_for((void **)&own, bytes, "reference rows");
    if (status == EPMOE_OK) status = epmoei_alloc_for((void **)&all, size * bytes, "reference rows");
    EPMOEI_CHECK_GOTO(epmoe_comm_agree(comm, status), done);
    memset(own, 0, (size_t)bytes);
    memcpy(own, verify->x + verify->own_first * d, (size_t)(verify->own_count * d * 8));
    EPMOEI_CHECK_GOTO(epmoe_comm_all_gather(comm, own, all, bytes), done);
    for (int32_t r = 0; r < size; r++) {
        int32_t begin = at;
        first += verify->made->tokens[r];
        while (at < verify->num_rows && verify->tokens[at] < first) at++;
        memcpy(verify->x + begin * d, all + r * verify->most * d, (size_t)((at - begin) * d * 8));
    }
done:
    epmoei_free(all);
    epmoei_free(own);
    return status;
}

/* The attention half for this rank's checked tokens. */
static epmoe_status_t attend(verify_t *verify)
{
    int64_t d = verify->bench->config.hidden, tokens[MAX_CHECKED];
    for (int32_t i = 0; i < verify->own_count; i++)
        tokens[i] = verify->tokens[verify->own_first + i] - verify->made->first_token;
    EPMOEI_CHECK(epmoei_alloc_for((void **)&verify->residual, verify->own_count * d * 8, "reference rows"));
    return decoder_reference(verify->made, verify->bench, tokens, verify->own_count, verify->residual,
                             verify->x + verify->own_first * d);
}

static epmoe_status_t find_rows(verify_t *verify)
{
    int64_t d = verify->bench->config.hidden;
    if (verify->bench->run.decoder) {
        EPMOEI_CHECK(epmoe_comm_agree(verify->bench->program->comm, attend(verify)));
        return share_rows(verify);
    }
#pragma omp parallel for schedule(static)
    for (int32_t i = 0; i < verify->num_rows; i++) case_input_row(verify->bench, verify->tokens[i], verify->x + i * d);
    return EPMOE_OK;
}

static void release(verify_t *verify)
{
    epmoei_free(verify->x);
    epmoei_free(verify->residual);
    epmoei_free(verify->ids);
    epmoei_free(verify->weights);
    epmoei_free(verify->partial);
    epmoei_free(verify->y);
}

/* Whether the ids that were forced are those chosen, in whatever order. */
static int32_t count_not_forced(const int32_t *forced, const int32_t *ids, int32_t k)
{
    int32_t missing = 0;
    for (int32_t i = 0; i < k; i++) {
        bool found = false;
        for (int32_t j = 0; j < k; j++) found = found || ids[j] == forced[i];
        missing += !found;
    }
    return missing;
}

/* In 16 bits the rows between x and y of a decoder layer are rounded eight times, those of the MoE layer twice, and its
 * second norm enlarges the errors of small rows. */
static double decoder_tolerance(epmoe_dtype_t dtype) { return (dtype == EPMOE_F32 ? 1 : 4) * stats_tolerance(dtype); }

/* Tensor cores add in fp32 but cut off instead of rounding, so that a long sum drifts; logits that had been rounded to
 * 16 bits would still be 20 times as far off. */
static double logits_tolerance(const bench_t *bench)
{
    if (bench->run.decoder) return decoder_tolerance(bench->config.dtype);
    return bench->backend == EPMOE_BACKEND_CUDA ? 1e-4 : stats_tolerance(EPMOE_F32);
}

/* A code of a quantised h falls the other way where h lies between two, and is then off by up to an eighth: a percent
 * of the norm, which single outputs exceed several times. In a decoder layer codes of x do so as well, from attention
 * on: single outputs are then bounded loosely, and all of them together by CODES_TOLERANCE. */
#define CODES_TOLERANCE 8e-2
static bool rounds_codes(const verify_t *verify)
{
    const epmoe_layer_t *layer = verify->bench->layer;
    return verify->reference.fp8_experts || verify->reference.fp8_shared ||
           (layer->ep && epmoei_layer_quantises(layer, INT32_MAX, false)); /* another rank's experts */
}
static double y_tolerance(const verify_t *verify, epmoe_dtype_t dtype)
{
    const epmoe_layer_t *layer = verify->bench->layer;
    if (rounds_codes(verify)) return verify->residual ? 0.4 : 6e-2;
    /* Codes of x fall the other way as well where the reference has x from an attention of its own. */
    if (verify->residual && verify->bench->config.wire_dtype == EPMOE_F8_E4M3) return 9e-2;
    if (verify->residual) return decoder_tolerance(dtype);
    const bool shares = layer->ep && dtype == EPMOE_BF16; /* ranks round their shares of a row too */
    return shares ? 1.5 * stats_tolerance(dtype) : stats_tolerance(dtype);
}

/* The router's logits, ids and weights of this rank's checked rows; leaves ids and weights for the others. */
static epmoe_status_t check_router(verify_t *verify)
{
    epmoe_status_t status;
    const bench_t *bench = verify->bench;
    const bench_case_t *made = verify->made;
    int64_t d = bench->config.hidden, k = bench->config.top_k, num_experts = bench->config.num_experts;
    double *logits = NULL, *row = NULL;
    EPMOEI_CHECK_GOTO(epmoei_alloc_for((void **)&logits, verify->own_count * num_experts * 8, "reference logits"),
                      done);
    EPMOEI_CHECK_GOTO(epmoei_alloc_for((void **)&row, num_experts * 8, "reference logits"), done);
    EPMOEI_CHECK_GOTO(reference_router(&bench->reference, verify->x + verify->own_first * d, verify->own_count, logits),
                      done);
    for (int32_t i = 0; i < verify->own_count; i++) {
        int32_t at = verify->own_first + i;
        int64_t t = verify->tokens[at] - made->first_token;
        const float *out = (const float *)made->logits_out.host + t * num_experts,
                    *used = made->forced_ids ? (const float *)made->logits.host + t * num_experts : out;
        for (int64_t e = 0; e < num_experts; e++) row[e] = (double)out[e];
        verify->wrong += stats_count_wrong(row, logits + i * num_experts, num_experts, logits_tolerance(bench), NULL);

        const int32_t *ids = (const int32_t *)made->ids.host + t * k;
        int32_t bad = selection_count_wrong(&bench->config, bench->selection_bias, used, ids);
        if (made->forced_ids) bad += count_not_forced(made->forced_ids + t * k, ids, (int32_t)k);
        verify->wrong += bad;
        bool valid = true;
        for (int64_t j = 0; j < k; j++) valid = valid && ids[j] >= 0 && ids[j] < num_experts;
        double weights[EPMOE_MAX_TOP_K] = {0}, chosen[EPMOE_MAX_TOP_K];
        if (valid) selection_weights(&bench->config, used, ids, weights);
        for (int64_t j = 0; j < k; j++) {
            chosen[j] = (double)((const float *)made->weights.host)[t * k + j];
            verify->ids[at * k + j] = valid ? ids[j] : -1;
            verify->weights[at * k + j] = weights[j];
        }
        verify->wrong += stats_count_wrong(chosen, weights, k, stats_tolerance(EPMOE_F32), NULL);
    }
done:
    epmoei_free(row);
    epmoei_free(logits);
    return status;
}

/* Every rank gets the ids and weights of all checked rows. */
static epmoe_status_t share_routing(verify_t *verify)
{
    epmoe_status_t status;
    const bench_case_t *made = verify->made;
    epmoe_comm_t *comm = verify->bench->program->comm;
    int64_t k = verify->bench->config.top_k, bytes = verify->most * k * 12, first = 0;
    int32_t size = verify->bench->program->size, at = 0;
    char *own = NULL, *all = NULL;
    status = epmoei_alloc_for((void **)&own, bytes, "routing of the checked rows");
    if (status == EPMOE_OK) status = epmoei_alloc_for((void **)&all, size * bytes, "routing of the checked rows");
    EPMOEI_CHECK_GOTO(epmoe_comm_agree(comm, status), done);
    memset(own, 0, (size_t)bytes);
    memcpy(own, verify->weights + verify->own_first * k, (size_t)(verify->own_count * k * 8));
    memcpy(own + verify->most * k * 8, verify->ids + verify->own_first * k, (size_t)(verify->own_count * k * 4));
    EPMOEI_CHECK_GOTO(epmoe_comm_all_gather(comm, own, all, bytes), done);
    for (int32_t r = 0; r < size; r++) {
        const char *from = all + r * bytes;
        int64_t begin = at;
        first += made->tokens[r];
        while (at < verify->num_rows && verify->tokens[at] < first) at++;
        memcpy(verify->weights + begin * k, from, (size_t)((at - begin) * k * 8));
        memcpy(verify->ids + begin * k, from + verify->most * k * 8, (size_t)((at - begin) * k * 4));
    }
done:
    epmoei_free(all);
    epmoei_free(own);
    return status;
}

/* Adds one expert's share to the rows that chose it. */
static epmoe_status_t add_expert(verify_t *verify, int32_t expert, double *x, double *y)
{
    int64_t d = verify->bench->config.hidden, k = verify->bench->config.top_k;
    int32_t rows[MAX_CHECKED], count = 0;
    double weights[MAX_CHECKED];
    for (int32_t i = 0; i < verify->num_rows; i++) {
        double weight = 0;
        bool chosen = false;
        for (int64_t j = 0; j < k; j++) {
            if (verify->ids[i * k + j] != expert) continue;
            chosen = true;
            weight += verify->weights[i * k + j];
        }
        if (!chosen) continue;
        rows[count] = i;
        weights[count++] = weight;
    }
    for (int32_t i = 0; i < count; i++) memcpy(x + i * d, verify->x + rows[i] * d, (size_t)d * 8);
    EPMOEI_CHECK(reference_expert(&verify->reference, expert, x, weights, count, y));
    for (int32_t i = 0; i < count; i++)
        for (int64_t c = 0; c < d; c++) verify->partial[rows[i] * d + c] += y[i * d + c];
    return EPMOE_OK;
}

static epmoe_status_t sum_experts(verify_t *verify)
{
    epmoe_status_t status;
    const bench_t *bench = verify->bench;
    const epmoe_layer_config_t *config = &bench->config;
    int64_t bytes = (int64_t)verify->num_rows * config->hidden * 8;
    int32_t first = 0, count = 0;
    double *x = NULL, *y = NULL;
    EPMOEI_CHECK_GOTO(epmoei_alloc_for((void **)&x, bytes, "reference rows"), done);
    EPMOEI_CHECK_GOTO(epmoei_alloc_for((void **)&y, bytes, "reference rows"), done);
    EPMOEI_CHECK_GOTO(
        epmoe_expert_range(config->num_experts, bench->program->size, bench->program->rank, &first, &count), done);
    for (int32_t e = first; e < first + count; e++) EPMOEI_CHECK_GOTO(add_expert(verify, e, x, y), done);
    memset(verify->y, 0, (size_t)((int64_t)verify->own_count * config->hidden * 8));
    if (config->shared_intermediate > 0)
        status = reference_expert(&verify->reference, REFERENCE_SHARED,
                                  verify->x + (int64_t)verify->own_first * config->hidden, NULL, verify->own_count,
                                  verify->y);
done:
    epmoei_free(y);
    epmoei_free(x);
    return status;
}

/* Brings all ranks' partial sums of this rank's rows home. */
static epmoe_status_t gather_partials(verify_t *verify)
{
    epmoe_status_t status;
    epmoe_comm_t *comm = verify->bench->program->comm;
    int64_t d = verify->bench->config.hidden, piece = GATHERED_ROWS * d;
    int32_t size = verify->bench->program->size;
    double *own = NULL, *all = NULL;
    status = epmoei_alloc_for((void **)&own, piece * 8, "partial sums");
    if (status == EPMOE_OK) status = epmoei_alloc_for((void **)&all, size * piece * 8, "partial sums");
    EPMOEI_CHECK_GOTO(epmoe_comm_agree(comm, status), done);
    memset(own, 0, (size_t)piece * 8);
    for (int32_t begin = 0; begin < verify->num_rows; begin += GATHERED_ROWS) {
        int32_t count = (int32_t)epmoei_min64(GATHERED_ROWS, verify->num_rows - begin);
        memcpy(own, verify->partial + begin * d, (size_t)(count * d * 8));
        EPMOEI_CHECK_GOTO(epmoe_comm_all_gather(comm, own, all, piece * 8), done);
        for (int32_t i = 0; i < count; i++) {
            int32_t at = begin + i - verify->own_first;
            if (at < 0 || at >= verify->own_count) continue;
            for (int32_t r = 0; r < size; r++)
                for (int64_t c = 0; c < d; c++) verify->y[at * d + c] += all[r * piece + i * d + c];
        }
    }
done:
    epmoei_free(all);
    epmoei_free(own);
    return status;
}

/* Elements that the timed runs made otherwise than the checked one, and NaN outside the checked rows. */
static int64_t count_other_wrong(const verify_t *verify)
{
    const bench_case_t *made = verify->made;
    epmoe_dtype_t dtype = verify->bench->config.dtype;
    int64_t d = verify->bench->config.hidden, row_bytes = d * epmoe_dtype_size(dtype), wrong = 0;
    int32_t next = verify->own_first;
    for (int64_t t = 0; t < made->num_tokens; t++) {
        const char *row = (const char *)made->y_checked + t * row_bytes,
                   *timed = (const char *)made->y.host + t * row_bytes;
        bool checked = next < verify->own_first + verify->own_count && verify->tokens[next] == made->first_token + t;
        next += checked;
        for (int64_t c = 0; c < d && !checked; c++) wrong += isnan(epmoei_load(row, dtype, c));
        if (!memcmp(row, timed, (size_t)row_bytes)) continue;
        for (int64_t i = 0; i < row_bytes; i += row_bytes / d)
            wrong += memcmp(row + i, timed + i, (size_t)(row_bytes / d)) != 0;
    }
    return wrong;
}

static epmoe_status_t check_output(verify_t *verify)
{
    const bench_t *bench = verify->bench;
    const bench_case_t *made = verify->made;
    epmoe_dtype_t dtype = bench->config.dtype;
    int64_t d = bench->config.hidden;
    double *row = NULL, tolerance = y_tolerance(verify, dtype);
    stats_squares_t squares = {0};
    EPMOEI_CHECK(epmoei_alloc_for((void **)&row, d * 8, "a row"));
    for (int32_t i = 0; i < verify->own_count; i++) {
        int64_t t = verify->tokens[verify->own_first + i] - made->first_token;
        for (int64_t c = 0; c < d; c++) row[c] = (double)epmoei_load(made->y_checked, dtype, t * d + c);
        for (int64_t c = 0; c < d && verify->residual; c++) verify->y[i * d + c] += verify->residual[i * d + c];
        verify->wrong += stats_count_wrong(row, verify->y + i * d, d, tolerance, &verify->max_rel_err);
        stats_add_row(&squares, row, verify->y + i * d, d);
    }
    if (verify->residual && rounds_codes(verify) && stats_is_far(&squares, CODES_TOLERANCE)) {
        fprintf(stderr, "%s: [rank %d] y is off by %.3g of its norm: expected at most %.3g\n", bench->program->name,
                bench->program->rank, sqrt(squares.error / squares.ref), CODES_TOLERANCE);
        verify->wrong++;
    }
    epmoei_free(row);
    verify->wrong += count_other_wrong(verify);
    if (case_guards_changed(made)) {
        fprintf(stderr, "%s: [rank %d] memory outside the tensors was written\n", bench->program->name,
                bench->program->rank);
        verify->wrong++;
    }
    return EPMOE_OK;
}

/* What the layer chose for its weights and this case. */
static void find_fp8_activations(verify_t *verify)
{
    const epmoe_layer_t *layer = verify->bench->layer;
    int32_t tokens = verify->made->num_tokens;
    verify->reference = verify->bench->reference;
    verify->reference.fp8_shared = epmoei_layer_quantises(layer, tokens, true);
    verify->reference.fp8_experts =
        epmoei_layer_quantises(layer, layer->ep ? epmoei_ep_num_rows(layer->ep) : tokens, false);
}

epmoe_status_t case_verify(const bench_case_t *made, const bench_t *bench, case_result_t *result)
{
    epmoe_status_t status;
    epmoe_comm_t *comm = bench->program->comm;
    verify_t verify = {.made = made, .bench = bench};
    find_fp8_activations(&verify);
    choose_rows(&verify);
    EPMOEI_CHECK_GOTO(epmoe_comm_agree(comm, allocate(&verify)), done);
    EPMOEI_CHECK_GOTO(find_rows(&verify), done);
    EPMOEI_CHECK_GOTO(epmoe_comm_agree(comm, check_router(&verify)), done);
    EPMOEI_CHECK_GOTO(share_routing(&verify), done);
    EPMOEI_CHECK_GOTO(epmoe_comm_agree(comm, sum_experts(&verify)), done);
    EPMOEI_CHECK_GOTO(gather_partials(&verify), done);
    EPMOEI_CHECK_GOTO(epmoe_comm_agree(comm, check_output(&verify)), done);
    EPMOEI_CHECK_GOTO(bench_sum(comm, &verify.wrong, 1), done);
    EPMOEI_CHECK_GOTO(bench_max(comm, &verify.max_rel_err, 1), done);
    result->checked = true;
    result->checked_rows = verify.num_rows;
    result->wrong = verify.wrong;
    result->max_rel_err = verify.max_rel_err;
done:
    release(&verify);
    return status;
}
