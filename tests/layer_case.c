#include "tests/layer_case.h"

#include <malloc.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static bool coin(testing_rng_t *rng) { return testing_range(rng, 0, 1); }

epmoe_layer_config_t layer_case_config(testing_rng_t *rng, int32_t max_tokens, bool allow_dense)
{
    static const epmoe_dtype_t types[] = {EPMOE_F32, EPMOE_BF16, EPMOE_F16};
    epmoe_layer_config_t c = EPMOE_LAYER_CONFIG_INIT;
    c.hidden = testing_range(rng, 1, 70);
    c.activation = (epmoe_activation_t)testing_range(rng, 0, 3);
    c.alpha = coin(rng) ? 1.3f : 0;
    c.limit = coin(rng) ? 0.9f : 0;
    c.dtype = types[testing_range(rng, 0, 2)];
    c.max_tokens = max_tokens;
    bool dense = allow_dense && testing_range(rng, 0, 9) == 0;
    if (dense || coin(rng)) {
        c.shared_intermediate = testing_range(rng, 1, 60);
        c.shared_gated = coin(rng);
    }
    if (dense) return c;
    c.intermediate = testing_range(rng, 1, 60);
    c.n_group = coin(rng) ? testing_range(rng, 2, 5) : testing_range(rng, 0, 1);
    int32_t groups = c.n_group ? c.n_group : 1;
    c.topk_group = coin(rng) ? testing_range(rng, 1, groups) : 0;
    c.num_experts = groups * testing_range(rng, 1, 40 / groups);
    int32_t candidates = c.num_experts / groups * (c.topk_group ? c.topk_group : groups);
    c.top_k = testing_range(rng, 1, candidates < 8 ? candidates : 8);
    c.scoring = (epmoe_scoring_t)testing_range(rng, 0, 3);
    c.group_score = (epmoe_group_score_t)testing_range(rng, 0, 1);
    c.renormalize = coin(rng);
    c.routed_scale = coin(rng) ? 2.5f : 0;
    c.router_has_bias = coin(rng);
    c.has_selection_bias = coin(rng);
    c.weight_on_input = testing_range(rng, 0, 3) == 0;
    c.expert_has_bias = coin(rng);
    return c;
}

oracle_formats_t layer_case_formats(testing_rng_t *rng)
{
    static const epmoe_dtype_t types[] = {EPMOE_F32, EPMOE_BF16, EPMOE_F16};
    return (oracle_formats_t){.router = types[testing_range(rng, 0, 2)],
                              .gate_up = types[testing_range(rng, 0, 2)],
                              .down = types[testing_range(rng, 0, 2)],
                              .shared_gate_up = types[testing_range(rng, 0, 2)],
                              .shared_down = types[testing_range(rng, 0, 2)],
                              .layout = (epmoe_layout_t)testing_range(rng, 0, 2)};
}

const char *layer_case_text(const epmoe_layer_config_t *c)
{
    static char text[400];
    snprintf(text, sizeof text,
             "d %d f %d E %d k %d scoring %d renorm %d scale %g groups %d/%d score %d bias %d/%d/%d on_input %d act %d "
             "alpha %g limit %g shared %d gated %d dtype %s max_tokens %d capacity %lld",
             c->hidden, c->intermediate, c->num_experts, c->top_k, (int)c->scoring, c->renormalize,
             (double)c->routed_scale, c->n_group, c->topk_group, (int)c->group_score, c->router_has_bias,
             c->has_selection_bias, c->expert_has_bias, c->weight_on_input, (int)c->activation, (double)c->alpha,
             (double)c->limit, c->shared_intermediate, c->shared_gated, epmoe_dtype_string(c->dtype), c->max_tokens,
             (long long)c->capacity);
    return text;
}

/* What a forward wrote, poisoned before. */
typedef struct outputs_t {
    float *logits, *weights;
    int32_t *ids;
} outputs_t;

/* Ids and weights of token t, from the very logits that the layer's router had. */
static bool check_routing(const oracle_model_t *model, const float *logits, const outputs_t *out, int64_t t)
{
    const epmoe_layer_config_t *c = &model->config;
    double *row = malloc((size_t)c->num_experts * sizeof *row), weights[EPMOE_MAX_TOP_K], gap;
    int32_t ids[EPMOE_MAX_TOP_K], k = c->top_k;
    const int32_t *got = out->ids + t * k;
    bool good = true;
    oracle_row(logits, EPMOE_F32, t, c->num_experts, row);
    oracle_route(c, row, model->weights.selection_bias, ids, &gap);
    for (int32_t j = 0; j < k; j++) {
        if (got[j] < 0 || got[j] >= c->num_experts) good = false;
        for (int32_t i = 0; i < j; i++) good &= got[i] != got[j];
        if (gap > 1e-5) good &= got[j] == ids[j];
    }
    if (good) oracle_weigh(c, row, got, weights);
    for (int32_t j = 0; good && j < k; j++)
        good = fabs((double)out->weights[t * k + j] - weights[j]) <= 1e-5 * fabs(weights[j]) + 1e-37;
    if (!good) fprintf(stderr, "token %lld: ids or weights are wrong (gap %g)\n", (long long)t, gap);
    free(row);
    return good;
}

static bool check_logits(const oracle_model_t *model, const double *x, const float *logits, int64_t t)
{
    int32_t n = model->config.num_experts;
    double *ref = malloc((size_t)n * sizeof *ref), *bound = malloc((size_t)n * sizeof *bound);
    oracle_logits(model, x, ref, bound);
    double error = oracle_error(logits + t * n, EPMOE_F32, ref, bound, n);
    if (!(error <= 1))
        fprintf(stderr, "token %lld: logits are off by %g times what fp32 allows\n", (long long)t, error);
    free(ref), free(bound);
    return error <= 1;
}

static bool check_token(const oracle_model_t *model, const float *forced, const outputs_t *out, const void *x,
                        const void *residual, const void *y, int64_t t)
{
    const epmoe_layer_config_t *c = &model->config;
    size_t bytes = (size_t)c->hidden * sizeof(double);
    double *row = malloc(bytes), *added = malloc(bytes), *ref = malloc(bytes), *bound = malloc(bytes);
    double weights[EPMOE_MAX_TOP_K];
    bool good = true;
    oracle_row(x, c->dtype, t, c->hidden, row);
    if (residual) oracle_row(residual, c->dtype, t, c->hidden, added);
    if (c->num_experts)
        good = check_logits(model, row, out->logits, t) && check_routing(model, forced ? forced : out->logits, out, t);
    for (int32_t j = 0; j < c->top_k; j++) weights[j] = (double)out->weights[t * c->top_k + j];
    if (good) {
        oracle_token(model, row, out->ids + t * c->top_k, weights, residual ? added : NULL, ref, bound);
        const char *at = (const char *)y + t * c->hidden * epmoe_dtype_size(c->dtype);
        double error = oracle_error(at, c->dtype, ref, bound, c->hidden);
        good = error <= 1;
        if (!good) fprintf(stderr, "token %lld: y is off by %g times what is allowed\n", (long long)t, error);
    }
    free(row), free(added), free(ref), free(bound);
    return good;
}

bool layer_case_check(epmoe_layer_t *layer, const oracle_model_t *model, const layer_forward_t *forward,
                      testing_rng_t *rng)
{
    const epmoe_layer_config_t *c = &model->config;
    int64_t bound = forward->num_tokens, n = c->num_experts, k = c->top_k;
    int64_t row_bytes = (int64_t)c->hidden * epmoe_dtype_size(c->dtype), bytes = bound * row_bytes;
    void *x = testing_buffer(bytes, 2 * epmoe_dtype_size(c->dtype)), *residual = testing_buffer(bytes, 0);
    void *first_x = malloc((size_t)bytes + 1), *first_residual = malloc((size_t)bytes + 1);
    testing_fill_normal(rng, x, c->dtype, bound * c->hidden, 1);
    testing_fill_normal(rng, residual, c->dtype, bound * c->hidden, 1);
    memcpy(first_x, x, (size_t)bytes), memcpy(first_residual, residual, (size_t)bytes);
    float *forced = testing_buffer(bound * n * 4, 0);
    testing_fill_normal(rng, forced, EPMOE_F32, bound * n, 1.5f);
    outputs_t out = {testing_buffer(bound * n * 4, 0), testing_buffer(bound * k * 4, 0),
                     testing_buffer(bound * k * 4, 0)};
    void *apart = testing_buffer(bytes, epmoe_dtype_size(c->dtype));
    void *y = forward->y == Y_IS_X ? x : forward->y == Y_IS_RESIDUAL ? residual : apart;
    bool has_residual = forward->residual || forward->y == Y_IS_RESIDUAL;

    epmoe_forward_args_t args = EPMOE_FORWARD_ARGS_INIT;
    double stage_us[EPMOE_STAGE_COUNT];
    int32_t tokens = forward->by_num_tokens_dev ? forward->tokens : forward->num_tokens;
    args.num_tokens = forward->num_tokens;
    if (forward->by_num_tokens_dev) args.num_tokens_dev = &tokens;
    args.x = x, args.y = y;
    if (has_residual) args.residual = residual;
    if (forward->forced_logits) args.logits = forced;
    args.logits_out = out.logits, args.ids_out = out.ids, args.weights_out = out.weights, args.stage_us = stage_us;
    bool good = epmoe_layer_forward_args(layer, &args, NULL) == EPMOE_OK;
    if (!good) fprintf(stderr, "forward: %s\n", epmoe_last_error());
    for (int64_t t = 0; good && t < tokens; t++)
        good = check_token(model, forward->forced_logits ? forced : NULL, &out, first_x,
                           has_residual ? first_residual : NULL, y, t);
    for (int32_t i = 0; good && i < EPMOE_STAGE_COUNT; i++) good = stage_us[i] >= 0 && stage_us[i] < 1e9;
    int64_t written = tokens * row_bytes;
    const void *before = y == x ? first_x : y == residual ? first_residual : NULL;
    bool rest = before ? !memcmp((char *)y + written, (const char *)before + written, (size_t)(bytes - written))
                       : testing_is_poison(y, written, bytes - written);
    rest &= testing_is_poison(out.logits, tokens * n * 4, (bound - tokens) * n * 4) &&
            testing_is_poison(out.ids, tokens * k * 4, (bound - tokens) * k * 4) &&
            testing_is_poison(out.weights, tokens * k * 4, (bound - tokens) * k * 4);
    rest &= y == x || !memcmp(x, first_x, (size_t)bytes);
    if (good && !rest) fprintf(stderr, "something was written that must not be\n");

    void *again = malloc((size_t)bytes + 1);
    memcpy(again, y, (size_t)bytes);
    memcpy(x, first_x, (size_t)bytes), memcpy(residual, first_residual, (size_t)bytes);
    epmoe_forward_args_t bare = args;
    bare.logits_out = bare.weights_out = NULL, bare.ids_out = NULL, bare.stage_us = NULL;
    bool same = epmoe_layer_forward_args(layer, &bare, NULL) == EPMOE_OK && !memcmp(again, y, (size_t)written);
    if (good && !same) fprintf(stderr, "without the optional outputs y is another\n");

    void *guarded[] = {x, residual, forced, out.logits, out.ids, out.weights, apart};
    for (size_t i = 0; i < sizeof guarded / sizeof guarded[0]; i++) {
        good &= testing_guards_intact(guarded[i]);
        testing_buffer_free(guarded[i]);
    }
    free(first_x), free(first_residual), free(again);
    return good && rest && same;
}

bool layer_case_is_block(void *block, int64_t bytes)
{
    int64_t huge_page = (int64_t)2 << 20, usable = block ? (int64_t)malloc_usable_size(block) : 0;
    /* glibc gives what is left of a page, or of the alignment, too. */
    int64_t most = bytes >= huge_page ? epmoei_round_up(bytes, huge_page) + huge_page : bytes;
    bool good = usable >= bytes && usable <= most + 8192;
    if (!good) fprintf(stderr, "a block has %lld bytes, said were %lld\n", (long long)usable, (long long)bytes);
    return good;
}
