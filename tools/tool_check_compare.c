#include "tools/tool_check.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* The larger, or NaN if one is. */
static double worse(double a, double b) { return isnan(a) || a > b ? a : b; }

/* Sums of one comparison. */
typedef struct distance_t {
    double difference;
    double norm;
    double max_abs;
} distance_t;

static void add_value(distance_t *distance, double out, double ref)
{
    double difference = out - ref;
    distance->difference += difference * difference;
    distance->norm += ref * ref;
    distance->max_abs = worse(distance->max_abs, fabs(difference));
}

static double relative(const distance_t *distance)
{
    double difference = sqrt(distance->difference);
    return distance->norm > 0 || isnan(distance->norm) ? difference / sqrt(distance->norm) : difference;
}

/* ------------------------------------------------------------------------------------------------------ near ties */

static int descending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x < y) - (x > y);
}

/* values[n-1] - values[n] after sorting; infinity when nothing is cut off. */
static double gap_at(double *values, int32_t count, int32_t n)
{
    qsort(values, (size_t)count, sizeof *values, descending);
    return n < count ? values[n - 1] - values[n] : INFINITY;
}

static double selection_value(const epmoe_layer_config_t *config, double logit, double bias, double log_sum)
{
    switch (config->scoring) {
    case EPMOE_SCORING_SIGMOID: return 1 / (1 + exp(-logit)) + bias;
    case EPMOE_SCORING_SQRT_SOFTPLUS: return sqrt(log1p(exp(logit))) + bias;
    default: return config->has_selection_bias ? exp(logit - log_sum) + bias : logit;
    }
}

static double group_value(const epmoe_layer_config_t *config, double *values, int32_t count)
{
    qsort(values, (size_t)count, sizeof *values, descending);
    return config->group_score == EPMOE_GROUP_SCORE_TOP2 && count > 1 ? values[0] + values[1] : values[0];
}

/* How far a row is from another choice: the distance at the cut between groups, or between experts within the groups
 * taken, whichever is smaller. */
static double selection_gap(const epmoe_layer_config_t *config, const float *logits, const float *bias)
{
    int32_t experts = config->num_experts, groups = config->n_group > 1 ? config->n_group : 1;
    int32_t taken = config->topk_group > 0 ? config->topk_group : groups, width = experts / groups;
    double *values = calloc((size_t)experts * 2 + (size_t)groups * 2, sizeof *values);
    if (!values) return INFINITY;
    double *sorted = values + experts, *scores = sorted + experts, *sorted_scores = scores + groups;
    double log_sum = 0;
    for (int32_t e = 0; e < experts; e++) log_sum += exp((double)logits[e]);
    log_sum = log(log_sum);
    for (int32_t e = 0; e < experts; e++)
        values[e] = selection_value(config, (double)logits[e], bias ? (double)bias[e] : 0, log_sum);

    double group_gap = INFINITY;
    int32_t candidates = 0;
    for (int32_t g = 0; g < groups; g++) {
        memcpy(sorted, values + (int64_t)g * width, (size_t)width * sizeof *sorted);
        scores[g] = group_value(config, sorted, width);
    }
    memcpy(sorted_scores, scores, (size_t)groups * sizeof *scores);
    group_gap = gap_at(sorted_scores, groups, taken);
    for (int32_t g = 0; g < groups; g++) {
        if (scores[g] < sorted_scores[taken - 1]) continue;
        memcpy(sorted + candidates, values + (int64_t)g * width, (size_t)width * sizeof *sorted);
        candidates += width;
    }
    double expert_gap = gap_at(sorted, candidates, config->top_k);
    free(values);
    return fmin(group_gap, expert_gap);
}

/* --------------------------------------------------------------------------------------------------------- router */

static int32_t place_of(const int32_t *ids, int32_t k, int32_t id)
{
    for (int32_t j = 0; j < k; j++)
        if (ids[j] == id) return j;
    return -1;
}

static bool same_set(const int32_t *a, const int32_t *b, int32_t k)
{
    for (int32_t j = 0; j < k; j++)
        if (place_of(b, k, a[j]) < 0 || place_of(a, k, b[j]) < 0) return false;
    return true;
}

void check_router(const epmoe_layer_config_t *config, const float *selection_bias, const golden_values_t *golden,
                  const check_outputs_t *outputs, double tolerance, bool *left_out, check_result_t *result)
{
    int32_t experts = config->num_experts, k = config->top_k;
    distance_t weights = {0}, logits = {0};
    *result = (check_result_t){.ids_equal = true};
    for (int64_t t = 0; t < golden->num_tokens; t++) {
        left_out[t] = false;
        const float *row_logits = golden->logits ? golden->logits + t * experts : NULL;
        if (row_logits)
            for (int64_t e = 0; e < experts; e++)
                add_value(&logits, (double)outputs->logits[t * experts + e], (double)row_logits[e]);
        if (!golden->ids) continue;

        const int32_t *expected = golden->ids + t * k, *got = outputs->ids + t * k;
        bool equal = same_set(expected, got, k);
        if (!equal && config->dtype != EPMOE_F32 && row_logits &&
            selection_gap(config, row_logits, selection_bias) < CHECK_NEAR_TIE) {
            left_out[t] = true;
            result->near_tie++;
            continue;
        }
        if (!equal) result->ids_equal = false;
        for (int32_t j = 0; golden->weights && j < k; j++) {
            int32_t place = place_of(got, k, expected[j]);
            add_value(&weights, place < 0 ? 0 : (double)outputs->weights[t * k + place],
                      (double)golden->weights[t * k + j]);
        }
    }
    result->rel_err = worse(relative(&weights), relative(&logits));
    result->max_abs = worse(weights.max_abs, logits.max_abs);
    result->ok = result->rel_err <= tolerance && result->ids_equal && result->near_tie < golden->num_tokens;
}

void check_moe(const epmoe_layer_config_t *config, const golden_values_t *golden, const check_outputs_t *outputs,
               double tolerance, const bool *left_out, bool ids_equal, check_result_t *result)
{
    int64_t hidden = config->hidden;
    distance_t distance = {0};
    *result = (check_result_t){.ids_equal = ids_equal};
    for (int64_t t = 0; t < golden->num_tokens; t++) {
        if (left_out[t]) {
            result->near_tie++;
            continue;
        }
        for (int64_t i = t * hidden; i < (t + 1) * hidden; i++)
            add_value(&distance, (double)outputs->y[i], (double)golden->out[i]);
    }
    result->rel_err = relative(&distance);
    result->max_abs = distance.max_abs;
    result->ok = result->rel_err <= tolerance && ids_equal && result->near_tie < golden->num_tokens;
}

epmoe_status_t check_gather_worst(const check_t *check, check_result_t *result)
{
    int32_t size = check->program->size;
    check_result_t own = *result, *all = calloc((size_t)size, sizeof *all);
    epmoe_status_t status = epmoe_comm_agree(
        check->program->comm, all ? EPMOE_OK : epmoei_fail(EPMOE_ERROR_OUT_OF_MEMORY, "no memory for the results"));
    if (status == EPMOE_OK) status = epmoe_comm_all_gather(check->program->comm, &own, all, sizeof own);
    for (int32_t r = 0; status == EPMOE_OK && r < size; r++) {
        result->rel_err = worse(all[r].rel_err, result->rel_err);
        result->max_abs = worse(all[r].max_abs, result->max_abs);
        result->ids_equal &= all[r].ids_equal;
        result->near_tie = all[r].near_tie > result->near_tie ? all[r].near_tie : result->near_tie;
        result->ok &= all[r].ok;
    }
    free(all);
    return status;
}
