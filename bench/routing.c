#include "bench/routing.h"

#include "bench/random.h"
#include "bench/selection.h"

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Finite, and far below every forced logit: its softmax and sigmoid are 0 to fp32. */
#define LOW_LOGIT (-120.0f)

static int32_t group_count(const epmoe_layer_config_t *config) { return config->n_group > 1 ? config->n_group : 1; }

static int32_t groups_kept(const epmoe_layer_config_t *config)
{
    return config->topk_group > 0 ? config->topk_group : group_count(config);
}

static int32_t group_of(const epmoe_layer_config_t *config, int32_t expert)
{
    return expert / (config->num_experts / group_count(config));
}

const char *routing_kind_string(routing_kind_t kind)
{
    switch (kind) {
    case ROUTING_UNIFORM: return "uniform";
    case ROUTING_ZIPF: return "zipf";
    case ROUTING_ONE_EXPERT: return "one-expert";
    case ROUTING_FILE: return "file";
    default: return "router";
    }
}

/* The first `count` of items 0..n-1 shuffled. */
static void shuffle(uint64_t *state, int32_t *items, int32_t n, int32_t count)
{
    for (int32_t i = 0; i < n; i++) items[i] = i;
    for (int32_t i = 0; i < count; i++) {
        int32_t other = i + random_below(state, n - i), item = items[other];
        items[other] = items[i];
        items[i] = item;
    }
}

static void draw_uniform(const routing_t *routing, int64_t token, int32_t *ids)
{
    const epmoe_layer_config_t *config = routing->config;
    int32_t kept = groups_kept(config), size = config->num_experts / group_count(config);
    int32_t groups[EPMOE_MAX_EXPERTS], places[EPMOE_MAX_EXPERTS];
    uint64_t state = random_start(routing->seed, RANDOM_ROUTING, token);
    shuffle(&state, groups, group_count(config), kept);
    shuffle(&state, places, kept * size, config->top_k);
    for (int32_t j = 0; j < config->top_k; j++) ids[j] = groups[places[j] / size] * size + places[j] % size;
}

/* Sequential draws without replacement are the descending order of log(weight) + Gumbel noise. */
static void draw_zipf(const routing_t *routing, const int32_t *permutation, int64_t token, int32_t *ids)
{
    const epmoe_layer_config_t *config = routing->config;
    int32_t num_experts = config->num_experts, used_groups = 0;
    double keys[EPMOE_MAX_EXPERTS];
    bool group_used[EPMOE_MAX_EXPERTS] = {false};
    uint64_t state = random_start(routing->seed, RANDOM_ROUTING, token);
    for (int32_t i = 0; i < num_experts; i++)
        keys[permutation[i]] = -routing->exponent * log(i + 1.0) - log(-log(random_unit(&state)));
    for (int32_t j = 0; j < config->top_k; j++) {
        int32_t best = -1;
        for (int32_t e = 0; e < num_experts; e++) {
            bool open = group_used[group_of(config, e)] || used_groups < groups_kept(config);
            if (open && keys[e] > -INFINITY && (best < 0 || keys[e] > keys[best])) best = e;
        }
        ids[j] = best;
        keys[best] = -INFINITY;
        used_groups += !group_used[group_of(config, best)];
        group_used[group_of(config, best)] = true;
    }
}

/* How many groups the ids of one token lie in. */
static int32_t groups_spanned(const epmoe_layer_config_t *config, const int32_t *ids)
{
    int32_t count = 0;
    for (int32_t j = 0; j < config->top_k; j++) {
        bool seen = false;
        for (int32_t i = 0; i < j; i++) seen = seen || group_of(config, ids[i]) == group_of(config, ids[j]);
        count += !seen;
    }
    return count;
}

static epmoe_status_t parse_line(const routing_t *routing, const char *text, size_t length, int64_t line, int32_t *ids)
{
    const epmoe_layer_config_t *config = routing->config;
    epmoe_status_t status = EPMOE_ERROR_FORMAT;
    json_error_t error;
    json_t *list = json_loadb(text, length, 0, &error);
    if (!list) {
        epmoei_fail(status, "%s line %lld: not JSON: %s", routing->path, (long long)line, error.text);
        goto done;
    }
    if (!json_is_array(list) || json_array_size(list) != (size_t)config->top_k) {
        epmoei_fail(status, "%s line %lld: expected a list of %d expert ids", routing->path, (long long)line,
                    config->top_k);
        goto done;
    }
    for (int32_t j = 0; j < config->top_k; j++) {
        const json_t *item = json_array_get(list, (size_t)j);
        json_int_t id = json_is_integer(item) ? json_integer_value(item) : -1;
        if (id < 0 || id >= config->num_experts) {
            epmoei_fail(status, "%s line %lld: item %d is not an expert id in [0,%d)", routing->path, (long long)line,
                        j, config->num_experts);
            goto done;
        }
        ids[j] = (int32_t)id;
        for (int32_t i = 0; i < j; i++) {
            if (ids[i] != ids[j]) continue;
            epmoei_fail(status, "%s line %lld: expert %d stands twice", routing->path, (long long)line, ids[j]);
            goto done;
        }
    }
    if (groups_spanned(config, ids) > groups_kept(config)) {
        epmoei_fail(status, "%s line %lld: the experts lie in %d groups: the router keeps %d", routing->path,
                    (long long)line, groups_spanned(config, ids), groups_kept(config));
        goto done;
    }
    status = EPMOE_OK;
done:
    json_decref(list);
    return status;
}

/* Every rank checks every line, so that all find the same error. */
static epmoe_status_t read_file(const routing_t *routing, int64_t total_tokens, int64_t first, int32_t num_tokens,
                                int32_t *ids)
{
    epmoe_status_t status = EPMOE_OK;
    int32_t k = routing->config->top_k, other[EPMOE_MAX_TOP_K];
    int64_t lines = 0;
    char *text = NULL;
    size_t capacity = 0;
    ssize_t length;
    FILE *file = fopen(routing->path, "r");
    if (!file) return epmoei_fail(EPMOE_ERROR_IO, "%s: %s", routing->path, strerror(errno));
    while ((length = getline(&text, &capacity, file)) >= 0) {
        bool own = lines >= first && lines < first + num_tokens; /* of this rank */
        EPMOEI_CHECK_GOTO(parse_line(routing, text, (size_t)length, lines + 1, own ? ids + (lines - first) * k : other),
                          done);
        lines++;
    }
    if (ferror(file))
        status = epmoei_fail(EPMOE_ERROR_IO, "%s cannot be read", routing->path);
    else if (lines != total_tokens)
        status = epmoei_fail(EPMOE_ERROR_FORMAT, "%s has %lld lines: expected %lld, one for each token of all ranks",
                             routing->path, (long long)lines, (long long)total_tokens);
done:
    free(text);
    fclose(file);
    return status;
}

epmoe_status_t routing_draw(const routing_t *routing, int64_t total_tokens, int64_t first, int32_t num_tokens,
                            int32_t *ids)
{
    const epmoe_layer_config_t *config = routing->config;
    int32_t k = config->top_k, permutation[EPMOE_MAX_EXPERTS];
    if (routing->kind == ROUTING_ROUTER) return EPMOE_OK;
    if (routing->kind == ROUTING_FILE) return read_file(routing, total_tokens, first, num_tokens, ids);
    if (routing->kind == ROUTING_ONE_EXPERT) {
        int32_t row[EPMOE_MAX_TOP_K];
        for (int32_t j = 0; j < k; j++) row[j] = j;
        if (groups_spanned(config, row) > groups_kept(config))
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                               "routing is one-expert: experts 0..%d lie in %d groups and the router keeps %d", k - 1,
                               groups_spanned(config, row), groups_kept(config));
        for (int32_t t = 0; t < num_tokens; t++) memcpy(ids + (int64_t)t * k, row, (size_t)k * sizeof *row);
        return EPMOE_OK;
    }
    uint64_t state = random_start(routing->seed, RANDOM_PERMUTATION, 0);
    shuffle(&state, permutation, config->num_experts, config->num_experts);
#pragma omp parallel for schedule(static)
    for (int32_t t = 0; t < num_tokens; t++) {
        if (routing->kind == ROUTING_ZIPF)
            draw_zipf(routing, permutation, first + t, ids + (int64_t)t * k);
        else
            draw_uniform(routing, first + t, ids + (int64_t)t * k);
    }
    return EPMOE_OK;
}

/* A group that is judged by its two best needs a second finite value; the forced expert may be its only one. The
 * expert that the bias favours least gets it, so that it is never chosen itself. */
static void add_seconds(const routing_t *routing, const int32_t *ids, float *logits)
{
    const epmoe_layer_config_t *config = routing->config;
    int32_t size = config->num_experts / group_count(config);
    if (group_count(config) == 1 || size == 1 || config->group_score == EPMOE_GROUP_SCORE_MAX) return;
    for (int32_t j = 0; j < config->top_k; j++) {
        int32_t begin = group_of(config, ids[j]) * size, finite = 0, second = -1;
        for (int32_t e = begin; e < begin + size; e++) {
            if (logits[e] > -INFINITY)
                finite++;
            else if (second < 0 ||
                     (routing->selection_bias && routing->selection_bias[e] < routing->selection_bias[second]))
                second = e;
        }
        if (finite == 1) logits[second] = LOW_LOGIT;
    }
}

/* Whether the router chooses `ids`, in whatever order. */
static bool is_forced(const routing_t *routing, const int32_t *ids, const float *logits)
{
    int32_t sorted[EPMOE_MAX_TOP_K];
    memcpy(sorted, ids, (size_t)routing->config->top_k * sizeof *ids);
    selection_sort(routing->config, routing->selection_bias, logits, sorted);
    return selection_count_wrong(routing->config, routing->selection_bias, logits, sorted) == 0;
}

epmoe_status_t routing_logits(const routing_t *routing, int64_t first, int32_t num_tokens, const int32_t *ids,
                              float *logits)
{
    const epmoe_layer_config_t *config = routing->config;
    int32_t k = config->top_k, num_experts = config->num_experts;
    int64_t bad_token = INT64_MAX;
#pragma omp parallel for schedule(static) reduction(min : bad_token)
    for (int32_t t = 0; t < num_tokens; t++) {
        float *row = logits + (int64_t)t * num_experts;
        const int32_t *row_ids = ids + (int64_t)t * k;
        uint64_t state = random_start(routing->seed, RANDOM_LOGITS, first + t);
        for (int32_t e = 0; e < num_experts; e++) row[e] = -INFINITY;
        for (int32_t j = 0; j < k; j++) row[row_ids[j]] = (float)(2 * random_unit(&state) - 1);
        add_seconds(routing, row_ids, row);
        if (!is_forced(routing, row_ids, row) && first + t < bad_token) bad_token = first + t;
    }
    if (bad_token != INT64_MAX)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                           "routing is %s: the router's selection bias outweighs its scores, so that no logits make it "
                           "choose the experts of token %lld",
                           routing_kind_string(routing->kind), (long long)bad_token);
    return EPMOE_OK;
}
