#include "bench/selection.h"

#include <float.h>
#include <math.h>
#include <string.h>

/* fp32 scores and sums of a few of them agree with exact ones to this, relative to 1 + |value|. */
#define VALUE_EPSILON 1e-6

static double clean_logit(float logit)
{
    if (isnan(logit)) return -INFINITY;
    return logit > FLT_MAX ? (double)FLT_MAX : (double)logit;
}

static int32_t num_groups(const epmoe_layer_config_t *config) { return config->n_group > 1 ? config->n_group : 1; }

static int32_t num_groups_kept(const epmoe_layer_config_t *config)
{
    return config->topk_group > 0 ? config->topk_group : num_groups(config);
}

static void scores_of(const epmoe_layer_config_t *config, const float *logits, double *scores)
{
    int32_t num_experts = config->num_experts;
    double top = -INFINITY, sum = 0;
    for (int32_t e = 0; e < num_experts; e++) {
        double logit = clean_logit(logits[e]);
        top = logit > top ? logit : top;
        switch (config->scoring) {
        case EPMOE_SCORING_SIGMOID: scores[e] = 1.0 / (1.0 + exp(-logit)); break;
        case EPMOE_SCORING_SQRT_SOFTPLUS: scores[e] = sqrt(logit > 40 ? logit : log1p(exp(logit))); break;
        default: scores[e] = logit; break;
        }
    }
    if (config->scoring != EPMOE_SCORING_SOFTMAX) return;
    for (int32_t e = 0; e < num_experts; e++) sum += scores[e] = top == -INFINITY ? 0 : exp(scores[e] - top);
    for (int32_t e = 0; e < num_experts && sum > 0; e++) scores[e] /= sum;
}

/* Selection values; true when they are logits, which are exact. */
static bool values_of(const epmoe_layer_config_t *config, const float *selection_bias, const float *logits,
                      double *values)
{
    bool by_logit = config->scoring == EPMOE_SCORING_TOPK_SOFTMAX || config->scoring == EPMOE_SCORING_SPARSE_MIXER ||
                    (config->scoring == EPMOE_SCORING_SOFTMAX && !selection_bias);
    if (!by_logit) scores_of(config, logits, values);
    for (int32_t e = 0; e < config->num_experts; e++) {
        double logit = clean_logit(logits[e]);
        if (by_logit) values[e] = logit;
        if (selection_bias) values[e] += (double)selection_bias[e];
        if (logit == -INFINITY) values[e] = -INFINITY;
    }
    return by_logit && !selection_bias;
}

static double group_score(const epmoe_layer_config_t *config, const double *values, int32_t size)
{
    double best = -INFINITY, second = -INFINITY;
    for (int32_t e = 0; e < size; e++) {
        if (values[e] > best) {
            second = best;
            best = values[e];
        } else if (values[e] > second) {
            second = values[e];
        }
    }
    return config->group_score == EPMOE_GROUP_SCORE_MAX || size == 1 ? best : best + second;
}

/* What groups are judged by: the selection values, but scores where two logits would have to be added. */
static void group_values_of(const epmoe_layer_config_t *config, const float *selection_bias, const float *logits,
                            const double *values, double *group_values)
{
    if (config->scoring != EPMOE_SCORING_SOFTMAX || selection_bias || config->group_score == EPMOE_GROUP_SCORE_MAX) {
        memcpy(group_values, values, (size_t)config->num_experts * sizeof *values);
        return;
    }
    scores_of(config, logits, group_values);
    for (int32_t e = 0; e < config->num_experts; e++)
        if (values[e] == -INFINITY) group_values[e] = -INFINITY;
}

/* Puts experts of groups that cannot be taken at -inf. A group is sure to be taken when fewer than topk_group others
 * score as much, and cannot be when topk_group others score clearly more; what lies between is given the benefit. */
static void drop_groups(const epmoe_layer_config_t *config, const double *group_values, double *values, bool *sure)
{
    int32_t groups = num_groups(config), kept = num_groups_kept(config), size = config->num_experts / groups;
    double scores[EPMOE_MAX_EXPERTS];
    for (int32_t g = 0; g < groups; g++) scores[g] = group_score(config, group_values + (int64_t)g * size, size);
    for (int32_t g = 0; g < groups; g++) {
        int32_t above = 0, as_much = 0;
        double margin = isfinite(scores[g]) ? 2 * VALUE_EPSILON * (1 + fabs(scores[g])) : 0;
        for (int32_t i = 0; i < groups; i++) {
            if (i == g) continue;
            above += scores[i] > scores[g] + margin;
            as_much += scores[i] >= scores[g] - margin;
        }
        sure[g] = as_much < kept;
        if (above >= kept)
            for (int32_t e = 0; e < size; e++) values[(int64_t)g * size + e] = -INFINITY;
    }
}

int32_t selection_count_wrong(const epmoe_layer_config_t *config, const float *selection_bias, const float *logits,
                              const int32_t *ids)
{
    int32_t k = config->top_k, wrong = 0, size = config->num_experts / num_groups(config);
    double values[EPMOE_MAX_EXPERTS], group_values[EPMOE_MAX_EXPERTS];
    bool sure[EPMOE_MAX_EXPERTS], chosen[EPMOE_MAX_EXPERTS] = {false};
    bool exact = values_of(config, selection_bias, logits, values);
    group_values_of(config, selection_bias, logits, values, group_values);
    drop_groups(config, group_values, values, sure);

    double last = INFINITY;
    int32_t last_id = -1;
    for (int32_t j = 0; j < k; j++) {
        if (ids[j] < 0 || ids[j] >= config->num_experts || chosen[ids[j]]) {
            wrong++;
            continue;
        }
        chosen[ids[j]] = true;
        double value = values[ids[j]], margin = exact || !isfinite(value) ? 0 : VALUE_EPSILON * (1 + fabs(value));
        bool ordered = value <= last + margin && !(exact && value == last && ids[j] < last_id);
        wrong += !ordered;
        last = value;
        last_id = ids[j];
    }
    if (wrong) return wrong;
    double margin = exact || !isfinite(last) ? 0 : VALUE_EPSILON * (1 + fabs(last));
    for (int32_t e = 0; e < config->num_experts; e++) {
        if (chosen[e] || !sure[e / size]) continue;
        bool better = values[e] > last + margin || (exact && values[e] == last && e < last_id);
        wrong += better && wrong < k;
    }
    return wrong;
}

void selection_sort(const epmoe_layer_config_t *config, const float *selection_bias, const float *logits, int32_t *ids)
{
    double values[EPMOE_MAX_EXPERTS];
    values_of(config, selection_bias, logits, values);
    for (int32_t j = 1; j < config->top_k; j++) {
        int32_t id = ids[j], i = j;
        while (i > 0 && (values[ids[i - 1]] < values[id] || (values[ids[i - 1]] == values[id] && ids[i - 1] > id))) {
            ids[i] = ids[i - 1];
            i--;
        }
        ids[i] = id;
    }
}

/* The softmax of choice j among the logits close to it that were not chosen before. */
static double mixed_score(const epmoe_layer_config_t *config, const double *logits, const int32_t *ids, int32_t j)
{
    double top = logits[ids[j]], sum = 0, jitter = config->router_jitter != 0 ? (double)config->router_jitter : 0.01;
    if (top == -INFINITY) return 0;
    for (int32_t e = 0; e < config->num_experts; e++) {
        bool before = false;
        for (int32_t i = 0; i < j; i++) before = before || ids[i] == e;
        double size = fmax(fabs(logits[e]), top);
        bool close = size == 0 || (top - logits[e]) / size <= 2 * jitter;
        if (!before && close) sum += exp(logits[e] - top);
    }
    return 1 / sum;
}

void selection_weights(const epmoe_layer_config_t *config, const float *logits, const int32_t *ids, double *weights)
{
    double scores[EPMOE_MAX_EXPERTS], scale = config->routed_scale != 0.0f ? (double)config->routed_scale : 1.0;
    double sum = 0, top = -INFINITY;
    bool after = config->scoring == EPMOE_SCORING_TOPK_SOFTMAX;
    scores_of(config, logits, scores);
    for (int32_t j = 0; j < config->top_k; j++) top = scores[ids[j]] > top ? scores[ids[j]] : top;
    for (int32_t j = 0; j < config->top_k; j++) {
        double score = scores[ids[j]];
        if (after) score = top == -INFINITY ? 0 : exp(score - top);
        if (config->scoring == EPMOE_SCORING_SPARSE_MIXER) score = mixed_score(config, scores, ids, j);
        sum += weights[j] = score;
    }
    bool divide = config->renormalize || after;
    for (int32_t j = 0; j < config->top_k; j++) {
        if (divide) weights[j] = sum < 0x1p-126 ? 0 : weights[j] / sum;
        weights[j] *= scale;
    }
}
