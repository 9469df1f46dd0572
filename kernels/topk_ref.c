#include "kernels/activation.h"
#include "kernels/op_check.h"
#include "kernels/row_max.h"
#include "kernels/topk.h"

#include <float.h>

/* NaN counts as -inf, +inf as the largest finite number. */
static inline float tame(float x) { return x > FLT_MAX ? FLT_MAX : x >= -FLT_MAX ? x : -INFINITY; }

#define SUM_LANES 8

/* Lane e mod 8 adds its scores by ascending e, then the lanes are added by ascending lane. */
static float sum_scores(const float *scores, int32_t num_experts)
{
    float lanes[SUM_LANES] = {0};
    int32_t whole = num_experts - num_experts % SUM_LANES;
    for (int32_t first = 0; first < whole; first += SUM_LANES)
#pragma omp simd
        for (int32_t lane = 0; lane < SUM_LANES; lane++) lanes[lane] += scores[first + lane];
    for (int32_t e = whole; e < num_experts; e++) lanes[e - whole] += scores[e];
    float sum = 0.0f;
    for (int32_t lane = 0; lane < SUM_LANES; lane++) sum += lanes[lane];
    return sum;
}

static void score_softmax(epmoei_topk_row_t *row, int32_t num_experts)
{
    const float *logits = row->logits;
    float *scores = row->scores;
    float top = epmoei_row_max(logits, num_experts);
    if (top == -INFINITY) {
        for (int32_t e = 0; e < num_experts; e++) scores[e] = 0.0f;
        return;
    }
#pragma omp simd
    for (int32_t e = 0; e < num_experts; e++) scores[e] = epmoei_exp(logits[e] - top);
    float sum = sum_scores(scores, num_experts);
#pragma omp simd
    for (int32_t e = 0; e < num_experts; e++) scores[e] /= sum;
}

void epmoei_topk_row_score(const epmoe_topk_args_t *args, int64_t token, epmoei_topk_row_t *row)
{
    int32_t num_experts = args->num_experts;
    const float *bias = args->selection_bias;
    float *logits = row->logits, *scores = row->scores, *values = row->values;

    int64_t offset = token * args->logits_stride * epmoe_dtype_size(args->logits_dtype);
    epmoei_to_f32(logits, (const char *)args->logits + offset, args->logits_dtype, num_experts);
#pragma omp simd
    for (int32_t e = 0; e < num_experts; e++) logits[e] = tame(logits[e]);

    switch (args->scoring) {
    case EPMOE_SCORING_SOFTMAX: score_softmax(row, num_experts); break;
    case EPMOE_SCORING_SIGMOID:
#pragma omp simd
        for (int32_t e = 0; e < num_experts; e++) scores[e] = epmoei_sigmoid(logits[e]);
        break;
    case EPMOE_SCORING_SQRT_SOFTPLUS:
        /* ln(1 + e^x) = max(x, 0) + ln(1 + e^-|x|), which does not overflow. */
        for (int32_t e = 0; e < num_experts; e++)
            scores[e] = sqrtf((logits[e] > 0.0f ? logits[e] : 0.0f) + log1pf(epmoei_exp(-fabsf(logits[e]))));
        break;
    case EPMOE_SCORING_TOPK_SOFTMAX:
    case EPMOE_SCORING_SPARSE_MIXER: memcpy(scores, logits, (size_t)num_experts * sizeof *scores); break;
    }

    if (!bias && args->scoring == EPMOE_SCORING_SOFTMAX) {
        memcpy(values, logits, (size_t)num_experts * sizeof *values);
        return;
    }
#pragma omp simd
    for (int32_t e = 0; e < num_experts; e++) values[e] = epmoei_select(logits[e] == -INFINITY, -INFINITY, scores[e]);
    if (!bias) return;
#pragma omp simd
    for (int32_t e = 0; e < num_experts; e++) values[e] = tame(values[e] + tame(bias[e]));
}

/* What a group of experts [first, first+size) scores. */
static float group_score(const epmoe_topk_args_t *args, const epmoei_topk_row_t *row, int32_t first, int32_t size)
{
    bool top2 = args->group_score == EPMOE_GROUP_SCORE_TOP2;
    bool by_score = top2 && args->scoring == EPMOE_SCORING_SOFTMAX && !args->selection_bias;
    float best = -INFINITY, second = -INFINITY;
    for (int32_t e = first; e < first + size; e++) {
        float value = by_score && row->logits[e] != -INFINITY ? row->scores[e] : row->values[e];
        if (value > best) {
            second = best;
            best = value;
        } else if (value > second)
            second = value;
    }
    return top2 && size > 1 ? best + second : best;
}

void epmoei_topk_row_keep_groups(const epmoe_topk_args_t *args, epmoei_topk_row_t *row)
{
    int32_t groups = args->n_group, size = args->num_experts / groups;
    if (args->topk_group == groups) {
        for (int32_t g = 0; g < groups; g++) row->kept[g] = true;
        return;
    }
    float scores[EPMOE_MAX_EXPERTS];
    for (int32_t g = 0; g < groups; g++) {
        scores[g] = group_score(args, row, g * size, size);
        row->kept[g] = false;
    }
    for (int32_t i = 0; i < args->topk_group; i++) {
        int32_t best = -1;
        for (int32_t g = 0; g < groups; g++)
            if (!row->kept[g] && (best < 0 || scores[g] > scores[best])) best = g;
        row->kept[best] = true;
    }
}

/* k times the best candidate that is left; the first of equals is the lower id. */
static void pick(const epmoe_topk_args_t *args, const epmoei_topk_row_t *row, int32_t *ids)
{
    bool taken[EPMOE_MAX_EXPERTS] = {false};
    int32_t size = args->num_experts / args->n_group;
    for (int32_t j = 0; j < args->top_k; j++) {
        int32_t best = -1;
        for (int32_t e = 0; e < args->num_experts; e++)
            if (row->kept[e / size] && !taken[e] && (best < 0 || row->values[e] > row->values[best])) best = e;
        taken[best] = true;
        ids[j] = best;
    }
}

/* The softmax of each choice among what is close to it and was not chosen before. */
static void mix_sparsely(const epmoe_topk_args_t *args, const epmoei_topk_row_t *row, const int32_t *ids,
                         float *weights)
{
    float left[EPMOE_MAX_EXPERTS];
    memcpy(left, row->logits, (size_t)args->num_experts * sizeof *left);
    for (int32_t j = 0; j < args->top_k; j++) {
        float top = left[ids[j]], sum = 0.0f;
        if (top == -INFINITY) {
            weights[j] = 0.0f;
            continue;
        }
        for (int32_t e = 0; e < args->num_experts; e++) {
            float logit = left[e], size = fabsf(logit) > top ? fabsf(logit) : top;
            /* 0 / 0 is close. */
            bool far_off = (top - logit) / size > 2.0f * args->jitter;
            if (logit != -INFINITY && !far_off) sum += epmoei_exp(logit - top);
        }
        weights[j] = 1.0f / sum;
        left[ids[j]] = -INFINITY;
    }
}

void epmoei_topk_row_weigh(const epmoe_topk_args_t *args, const epmoei_topk_row_t *row, const int32_t *ids,
                           float *weights)
{
    int32_t top_k = args->top_k;
    bool divide = args->renormalize;
    if (args->scoring == EPMOE_SCORING_TOPK_SOFTMAX) {
        float top = -INFINITY;
        for (int32_t j = 0; j < top_k; j++) top = row->logits[ids[j]] > top ? row->logits[ids[j]] : top;
        for (int32_t j = 0; j < top_k; j++)
            weights[j] = top == -INFINITY ? 0.0f : epmoei_exp(row->logits[ids[j]] - top);
        divide = true;
    } else if (args->scoring == EPMOE_SCORING_SPARSE_MIXER)
        mix_sparsely(args, row, ids, weights);
    else
        for (int32_t j = 0; j < top_k; j++) weights[j] = row->scores[ids[j]];

    float sum = 0.0f;
    for (int32_t j = 0; j < top_k; j++) sum += weights[j];
    for (int32_t j = 0; j < top_k; j++) {
        float share = !divide ? weights[j] : sum < FLT_MIN ? 0.0f : weights[j] / sum;
        weights[j] = epmoei_clamp(share * args->scale, -FLT_MAX, FLT_MAX);
    }
}

epmoe_status_t epmoei_topk_ref(const epmoe_topk_args_t *args, epmoe_stream_t stream)
{
    (void)stream;
    int32_t num_tokens;
    EPMOEI_CHECK(epmoei_actual_tokens(args->num_tokens_dev, args->num_tokens, &num_tokens));
    for (int64_t token = 0; token < num_tokens; token++) {
        epmoei_topk_row_t row;
        int32_t *ids = args->ids + token * args->top_k;
        epmoei_topk_row_score(args, token, &row);
        epmoei_topk_row_keep_groups(args, &row);
        pick(args, &row, ids);
        epmoei_topk_row_weigh(args, &row, ids, args->weights + token * args->top_k);
    }
    return EPMOE_OK;
}
