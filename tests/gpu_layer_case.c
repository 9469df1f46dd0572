#include "tests/gpu_layer_case.h"

#include "moe/layer.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

/* Tensor cores and fast exponentials: what the oracle allows fp32, times this. */
#define SLACK 4
/* The oracle's own unit, see moe_oracle.c. */
#define EPS 0x1p-21

static bool coin(testing_rng_t *rng) { return testing_range(rng, 0, 1); }

oracle_model_t gpu_model(testing_rng_t *rng, const epmoe_layer_config_t *config)
{
    epmoe_dtype_t t = config->dtype;
    const oracle_formats_t formats = {t, t, t, t, t, EPMOE_LAYOUT_GATE_FIRST};
    return oracle_model(rng, config, &formats);
}

epmoe_layer_t *gpu_layer(const epmoe_layer_config_t *config)
{
    epmoe_layer_t *layer = NULL;
    if (epmoe_layer_create(config, NULL, &layer) == EPMOE_OK) return layer;
    fprintf(stderr, "%s: %s\n", gpu_config_text(config), epmoe_last_error());
    return NULL;
}

epmoe_layer_t *gpu_layer_with(const oracle_model_t *model)
{
    epmoe_layer_t *layer = gpu_layer(&model->config);
    if (!layer || epmoe_layer_set_weights(layer, &model->weights) == EPMOE_OK) return layer;
    fprintf(stderr, "%s: set_weights: %s\n", gpu_config_text(&model->config), epmoe_last_error());
    epmoe_layer_destroy(layer);
    return NULL;
}

epmoe_layer_config_t gpu_random_config(testing_rng_t *rng, int32_t max_tokens)
{
    epmoe_layer_config_t c = EPMOE_LAYER_CONFIG_INIT;
    c.hidden = 8 * testing_range(rng, 1, 20);
    c.activation = (epmoe_activation_t)testing_range(rng, 0, 3);
    c.alpha = coin(rng) ? 1.3f : 0;
    c.limit = coin(rng) ? 0.9f : 0;
    c.dtype = coin(rng) ? EPMOE_BF16 : EPMOE_F16;
    c.max_tokens = max_tokens;
    bool dense = testing_range(rng, 0, 9) == 0;
    if (dense || coin(rng)) {
        c.shared_intermediate = 8 * testing_range(rng, 1, 12);
        c.shared_gated = coin(rng);
    }
    if (dense) return c;
    c.intermediate = 8 * testing_range(rng, 1, 12);
    if (c.shared_intermediate && coin(rng)) c.shared_intermediate = c.intermediate;
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

const char *gpu_config_text(const epmoe_layer_config_t *c)
{
    static char text[400];
    snprintf(text, sizeof text,
             "d %d f %d E %d k %d scoring %d renorm %d scale %g groups %d/%d score %d bias %d/%d/%d on_input %d act %d "
             "alpha %g limit %g shared %d gated %d dtype %s max_tokens %d",
             c->hidden, c->intermediate, c->num_experts, c->top_k, (int)c->scoring, c->renormalize,
             (double)c->routed_scale, c->n_group, c->topk_group, (int)c->group_score, c->router_has_bias,
             c->has_selection_bias, c->expert_has_bias, c->weight_on_input, (int)c->activation, (double)c->alpha,
             (double)c->limit, c->shared_intermediate, c->shared_gated, epmoe_dtype_string(c->dtype), c->max_tokens);
    return text;
}

/* -------------------------------------------------------------------------------------------------------- tokens */

static void *random_on_device(testing_rng_t *rng, epmoe_dtype_t dtype, int64_t n, float scale)
{
    int64_t bytes = n * epmoe_dtype_size(dtype);
    void *host = malloc((size_t)bytes + 1);
    testing_fill_normal(rng, host, dtype, n, scale);
    void *device = gpu_copy_of(host, bytes);
    free(host);
    return device;
}

gpu_tokens_t gpu_tokens(testing_rng_t *rng, const epmoe_layer_config_t *c, int32_t num_tokens)
{
    int64_t rows = num_tokens, n = rows * c->hidden;
    gpu_tokens_t tokens = {.x = random_on_device(rng, c->dtype, n, 1),
                           .residual = random_on_device(rng, c->dtype, n, 1),
                           .y = gpu_buffer(n * epmoe_dtype_size(c->dtype), 0)};
    if (!c->num_experts) return tokens;
    tokens.logits = random_on_device(rng, EPMOE_F32, rows * c->num_experts, 1.5f);
    tokens.logits_out = gpu_buffer(rows * c->num_experts * 4, 0);
    tokens.weights_out = gpu_buffer(rows * c->top_k * 4, 0);
    tokens.ids_out = gpu_buffer(rows * c->top_k * 4, 0);
    return tokens;
}

bool gpu_tokens_free(gpu_tokens_t *tokens)
{
    void *all[] = {tokens->x,          tokens->y,           tokens->residual, tokens->logits,
                   tokens->logits_out, tokens->weights_out, tokens->ids_out};
    bool intact = true;
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        if (!all[i]) continue;
        intact &= gpu_guards_intact(all[i]);
        gpu_buffer_free(all[i]);
    }
    *tokens = (gpu_tokens_t){0};
    return intact;
}

/* --------------------------------------------------------------------------------------------------------- checks */

/* Tokens are checked by all cores in silence; then the first one that is wrong is checked again, aloud. */
static bool quiet;

static void complain(const char *format, ...) EPMOEI_PRINTF(1, 2);
static void complain(const char *format, ...)
{
    va_list args;
    if (quiet) return;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
}

/* What came back, on the host; x and residual as they were before. */
typedef struct outputs_t {
    const float *logits, *weights;
    const int32_t *ids;
    const float *router_logits; /* those that chose: forced, or the router's own */
    const void *x, *residual, *y;
} outputs_t;

static bool check_logits(const oracle_model_t *model, const double *x, const float *logits, int64_t t)
{
    int32_t n = model->config.num_experts;
    double *ref = malloc((size_t)n * sizeof *ref), *bound = malloc((size_t)n * sizeof *bound);
    oracle_logits(model, x, ref, bound);
    bool good = true;
    for (int32_t e = 0; e < n && good; e++) {
        bound[e] *= SLACK;
        double error = oracle_error(logits + t * n + e, EPMOE_F32, ref + e, bound + e, 1);
        good = error <= 1;
        if (!good)
            complain("token %lld, logit %d is %.9g: expected %.9g (%.3g times what is allowed)\n", (long long)t, e,
                     (double)logits[t * n + e], ref[e], error);
    }
    free(ref), free(bound);
    return good;
}

static void print_routing(const char *what, const int32_t *ids, const double *weights, int32_t k)
{
    complain("  %s:", what);
    for (int32_t j = 0; j < k; j++) complain(" %d (%.7g)", ids[j], weights[j]);
    complain("\n");
}

/* Ids and weights of token t, from the very logits that the layer's top-k had. */
static bool check_routing(const oracle_model_t *model, const outputs_t *out, int64_t t)
{
    const epmoe_layer_config_t *c = &model->config;
    double *row = malloc((size_t)c->num_experts * sizeof *row), weights[EPMOE_MAX_TOP_K] = {0}, gap;
    double got_weights[EPMOE_MAX_TOP_K];
    int32_t ids[EPMOE_MAX_TOP_K], k = c->top_k;
    const int32_t *got = out->ids + t * k;
    bool good = true;
    oracle_row(out->router_logits, EPMOE_F32, t, c->num_experts, row);
    oracle_route(c, row, model->weights.selection_bias, ids, &gap);
    for (int32_t j = 0; j < k; j++) {
        got_weights[j] = (double)out->weights[t * k + j];
        if (got[j] < 0 || got[j] >= c->num_experts) good = false;
        for (int32_t i = 0; i < j; i++) good &= got[i] != got[j];
        if (gap > 1e-5) good &= got[j] == ids[j];
    }
    if (good) oracle_weigh(c, row, got, weights);
    for (int32_t j = 0; good && j < k; j++) good = fabs(got_weights[j] - weights[j]) <= 1e-5 * fabs(weights[j]) + 1e-37;
    if (!good) {
        complain("token %lld: the routing is wrong (gap %g)\n", (long long)t, gap);
        print_routing("got", got, got_weights, k);
        print_routing("expected", ids, weights, k);
    }
    free(row);
    return good;
}

/* y[d] += one slot, with the bound of what the device may do to it: bf16 layers round its weighted row to bf16. */
static void add_slot(const oracle_experts_t *experts, int32_t expert, const double *x, double weight,
                     double weight_error, bool rounded, double *y, double *bound)
{
    int32_t d = experts->hidden;
    double *slot = calloc((size_t)d, sizeof *slot), *slot_bound = calloc((size_t)d, sizeof *slot_bound);
    oracle_slot(experts, expert, x, weight, weight_error, slot, slot_bound);
    for (int32_t i = 0; i < d; i++) {
        y[i] += slot[i];
        bound[i] += SLACK * (slot_bound[i] + EPS * fabs(slot[i]));
        if (rounded) bound[i] += (fabs(slot[i]) + slot_bound[i]) * 0x1p-8;
    }
    free(slot), free(slot_bound);
}

static void reference_token(const oracle_model_t *model, const double *x, const int32_t *ids, const float *weights,
                            const double *residual, double *y, double *bound)
{
    const epmoe_layer_config_t *c = &model->config;
    const epmoe_layer_weights_t *w = &model->weights;
    oracle_experts_t experts = {.hidden = c->hidden,
                                .intermediate = c->intermediate,
                                .dtype = c->dtype,
                                .activation = c->activation,
                                .alpha = c->alpha,
                                .limit = c->limit,
                                .layout = w->layout,
                                .weight_on_input = c->weight_on_input,
                                .gate_up = w->gate_up,
                                .down = w->down,
                                .gate_up_bias = w->gate_up_bias,
                                .down_bias = w->down_bias};
    for (int32_t i = 0; i < c->hidden; i++) {
        y[i] = residual ? residual[i] : 0;
        bound[i] = SLACK * EPS * fabs(y[i]);
    }
    for (int32_t j = 0; j < c->top_k && c->num_experts; j++)
        add_slot(&experts, ids[j], x, (double)weights[j], 0, c->dtype == EPMOE_BF16, y, bound);
    if (!c->shared_intermediate) return;
    experts.intermediate = c->shared_intermediate;
    experts.weight_on_input = 0;
    experts.gate_up = w->shared_gate_up;
    experts.down = w->shared_down;
    experts.gate_up_bias = experts.down_bias = NULL;
    double gate = 0, magnitude = 0;
    for (int32_t i = 0; i < c->hidden && c->shared_gated; i++) {
        double term = (double)epmoei_load(w->shared_gate, w->router_dtype, i) * x[i];
        gate += term, magnitude += fabs(term);
    }
    double factor = c->shared_gated ? 1 / (1 + exp(-gate)) : 1;
    /* As one more of the routed experts its rows may be rounded as theirs are. */
    const bool may_join = !c->shared_gated && c->shared_intermediate == c->intermediate && c->dtype == EPMOE_BF16;
    add_slot(&experts, 0, x, factor, EPS * (magnitude / 4 + 1), may_join, y, bound);
}

static bool check_token(const oracle_model_t *model, const outputs_t *out, int64_t t)
{
    const epmoe_layer_config_t *c = &model->config;
    int32_t d = c->hidden;
    size_t bytes = (size_t)d * sizeof(double);
    double *row = malloc(bytes), *added = malloc(bytes), *ref = malloc(bytes), *bound = malloc(bytes);
    oracle_row(out->x, c->dtype, t, d, row);
    if (out->residual) oracle_row(out->residual, c->dtype, t, d, added);
    bool good = !c->num_experts || (check_logits(model, row, out->logits, t) && check_routing(model, out, t));
    if (good) {
        reference_token(model, row, out->ids + t * c->top_k, out->weights + t * c->top_k, out->residual ? added : NULL,
                        ref, bound);
        for (int32_t i = 0; i < d && good; i++) {
            const char *at = (const char *)out->y + (t * d + i) * epmoe_dtype_size(c->dtype);
            double error = oracle_error(at, c->dtype, ref + i, bound + i, 1);
            good = error <= 1;
            if (!good)
                complain("y[%lld,%d] is %.9g: expected %.9g (%.3g times what is allowed)\n", (long long)t, i,
                         (double)epmoei_load(at, c->dtype, 0), ref[i], error);
        }
    }
    free(row), free(added), free(ref), free(bound);
    return good;
}

static bool check_tokens(const oracle_model_t *model, const outputs_t *out, int64_t count)
{
    int64_t first = count;
    quiet = true;
#pragma omp parallel for schedule(dynamic, 1) reduction(min : first)
    for (int64_t t = 0; t < count; t++)
        if (!check_token(model, out, t) && t < first) first = t;
    quiet = false;
    return first == count || check_token(model, out, first);
}

static bool untouched(const char *what, const void *device, int64_t first_row, int64_t rows, int64_t row_bytes)
{
    if (!device || gpu_is_poison(device, first_row * row_bytes, (rows - first_row) * row_bytes)) return true;
    fprintf(stderr, "%s: a row past the actual %lld tokens was written\n", what, (long long)first_row);
    return false;
}

static bool run(epmoe_layer_t *layer, const epmoe_forward_args_t *args)
{
    if (epmoe_layer_forward_args(layer, args, gpu_stream()) == EPMOE_OK) return gpu_wait();
    fprintf(stderr, "forward: %s\n", epmoe_last_error());
    return false;
}

bool gpu_layer_check(epmoe_layer_t *layer, const oracle_model_t *model, const gpu_forward_t *forward,
                     testing_rng_t *rng)
{
    const epmoe_layer_config_t *c = &model->config;
    if (!layer) return false;
    int64_t bound = forward->num_tokens, n = c->num_experts, k = n ? c->top_k : 0;
    int64_t row_bytes = (int64_t)c->hidden * epmoe_dtype_size(c->dtype), bytes = bound * row_bytes;
    gpu_tokens_t device = gpu_tokens(rng, c, forward->num_tokens);
    void *first_x = gpu_get_new(device.x, bytes), *first_residual = gpu_get_new(device.residual, bytes);
    float *forced = device.logits ? gpu_get_new(device.logits, bound * n * 4) : NULL;
    int32_t tokens = forward->by_num_tokens_dev ? forward->tokens : forward->num_tokens;
    int32_t *tokens_dev = gpu_copy_of(&tokens, sizeof tokens);

    void *y = forward->y == GPU_Y_IS_X ? device.x : forward->y == GPU_Y_IS_RESIDUAL ? device.residual : device.y;
    bool has_residual = forward->residual || forward->y == GPU_Y_IS_RESIDUAL;
    epmoe_forward_args_t args = EPMOE_FORWARD_ARGS_INIT;
    args.num_tokens = forward->num_tokens;
    args.num_tokens_dev = forward->by_num_tokens_dev ? tokens_dev : NULL;
    args.x = device.x, args.y = y;
    args.residual = has_residual ? device.residual : NULL;
    args.logits = forward->forced_logits ? device.logits : NULL;
    args.logits_out = device.logits_out, args.ids_out = device.ids_out, args.weights_out = device.weights_out;
    bool good = run(layer, &args);

    void *got_y = gpu_get_new(y, bytes), *got_x = gpu_get_new(device.x, bytes);
    float *logits = n ? gpu_get_new(device.logits_out, bound * n * 4) : NULL;
    float *weights = n ? gpu_get_new(device.weights_out, bound * k * 4) : NULL;
    int32_t *ids = n ? gpu_get_new(device.ids_out, bound * k * 4) : NULL;
    const outputs_t out = {.logits = logits,
                           .weights = weights,
                           .ids = ids,
                           .router_logits = args.logits ? forced : logits,
                           .x = first_x,
                           .residual = has_residual ? first_residual : NULL,
                           .y = got_y};
    good = good && check_tokens(model, &out, tokens);

    const char *before = y == device.x ? first_x : y == device.residual ? first_residual : NULL;
    int64_t written = tokens * row_bytes;
    if (before)
        good &= gpu_same("rows of y past the actual tokens", (char *)got_y + written, before + written, bytes - written,
                         1, row_bytes);
    else
        good &= untouched("y", device.y, tokens, bound, row_bytes);
    good &= untouched("logits_out", device.logits_out, tokens, bound, n * 4);
    good &= untouched("ids_out", device.ids_out, tokens, bound, k * 4);
    good &= untouched("weights_out", device.weights_out, tokens, bound, k * 4);
    if (y != device.x) good &= gpu_same("x", got_x, first_x, bytes, 1, row_bytes);

    gpu_put(device.x, first_x, bytes), gpu_put(device.residual, first_residual, bytes);
    args.logits_out = args.weights_out = NULL, args.ids_out = NULL;
    void *again = run(layer, &args) ? gpu_get_new(y, bytes) : NULL;
    good &= again && gpu_same("y without the optional outputs", again, got_y, tokens * c->hidden,
                              epmoe_dtype_size(c->dtype), c->hidden);
    gpu_buffer_free(tokens_dev);
    free(first_x), free(first_residual), free(forced), free(got_y), free(got_x), free(logits), free(weights), free(ids);
    free(again);
    if (!gpu_tokens_free(&device)) good = false;
    static const char *const places[] = {"apart", "x", "the residual"};
    if (!good)
        fprintf(stderr, "  T %d of %d, forced logits %d, residual %d, y is %s; %s\n", tokens, forward->num_tokens,
                forward->forced_logits, has_residual, places[forward->y], gpu_config_text(c));
    return good;
}

/* ---------------------------------------------------------------------------------------------- against the CPU */

epmoe_layer_t *gpu_layer_on_cpu(const epmoe_layer_config_t *config, epmoe_comm_t **comm)
{
    epmoe_comm_config_t comm_config = EPMOE_COMM_CONFIG_INIT;
    epmoe_layer_t *layer = NULL;
    comm_config.backend = EPMOE_BACKEND_CPU;
    if (epmoe_comm_create(NULL, &comm_config, comm) == EPMOE_OK &&
        epmoe_layer_create(config, *comm, &layer) == EPMOE_OK)
        return layer;
    fprintf(stderr, "on the CPU: %s: %s\n", gpu_config_text(config), epmoe_last_error());
    return NULL;
}

gpu_error_t gpu_layer_error(epmoe_layer_t *layer, epmoe_layer_t *on_cpu, testing_rng_t *rng, int32_t num_tokens)
{
    const epmoe_layer_config_t *c = &layer->config;
    const int64_t n = (int64_t)num_tokens * c->hidden, slots = (int64_t)num_tokens * c->top_k;
    gpu_error_t error = {INFINITY, INFINITY};
    gpu_tokens_t tokens = gpu_tokens(rng, c, num_tokens);
    epmoe_forward_args_t args = EPMOE_FORWARD_ARGS_INIT;
    args.num_tokens = num_tokens;
    args.x = tokens.x, args.y = tokens.y, args.residual = tokens.residual;
    args.logits_out = tokens.logits_out, args.ids_out = tokens.ids_out;
    const bool ran = run(layer, &args);
    void *x = gpu_get_new(tokens.x, n * 2), *y = gpu_get_new(tokens.y, n * 2);
    void *residual = gpu_get_new(tokens.residual, n * 2);
    float *logits = gpu_get_new(tokens.logits_out, (int64_t)num_tokens * c->num_experts * 4);
    int32_t *ids = gpu_get_new(tokens.ids_out, slots * 4), *cpu_ids = calloc((size_t)slots, sizeof *cpu_ids);
    uint16_t *cpu_y = calloc((size_t)n, sizeof *cpu_y);
    double *expected = calloc((size_t)n, sizeof *expected);
    args.x = x, args.y = cpu_y, args.residual = residual, args.logits = logits;
    args.logits_out = NULL, args.ids_out = cpu_ids;
    if (ran && epmoe_layer_forward_args(on_cpu, &args, NULL) != EPMOE_OK)
        fprintf(stderr, "forward on the CPU: %s\n", epmoe_last_error());
    else if (ran && gpu_same("ids", ids, cpu_ids, slots, 4, c->top_k)) {
        for (int64_t i = 0; i < n; i++) expected[i] = (double)epmoei_load(cpu_y, c->dtype, i);
        error.row = testing_row_error(y, c->dtype, expected, num_tokens, c->hidden);
        error.all = testing_rel_error(y, c->dtype, expected, n);
    }
    if (!gpu_tokens_free(&tokens)) error.row = error.all = INFINITY;
    free(x), free(y), free(residual), free(logits), free(ids), free(cpu_y), free(cpu_ids), free(expected);
    return error;
}
