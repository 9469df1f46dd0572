#include "tests/moe_oracle.h"

#include <math.h>
#include <stdlib.h>

static double sigmoid(double x) { return 1 / (1 + exp(-x)); }

/* Of fp32 arithmetic, relative to the sum of the absolute terms: 8 ulp. */
#define EPS 0x1p-21

/* A value, and the sum of the absolute values that it was added up from. */
typedef struct sum_t {
    double value;
    double magnitude;
} sum_t;

static void clamp(sum_t *x, double lo, double hi)
{
    if (x->value > hi || x->value < lo) *x = (sum_t){x->value > hi ? hi : lo, 0};
}

/* act(gate) * up, and how far fp32 may be off. The activations' slopes are below 1.2. */
static sum_t activate(const oracle_experts_t *e, sum_t gate, sum_t up)
{
    bool oai = e->activation == EPMOE_ACTIVATION_SWIGLU_OAI;
    double limit = e->limit > 0 ? (double)e->limit : oai ? 7 : INFINITY;
    double alpha = e->alpha > 0 ? (double)e->alpha : (double)1.702f;
    double x, activated;
    /* A value that fp32 may find on the other side of the limit moves by no more than its own error. */
    double gate_error = 1.2 * EPS * gate.magnitude, up_error = EPS * up.magnitude;
    clamp(&gate, -INFINITY, limit);
    clamp(&up, -limit, limit);
    x = gate.value;
    switch (e->activation) {
    case EPMOE_ACTIVATION_SILU: activated = x * sigmoid(x); break;
    case EPMOE_ACTIVATION_GELU: activated = x * 0.5 * erfc(-x * sqrt(0.5)); break;
    case EPMOE_ACTIVATION_GELU_TANH:
        activated = x * 0.5 * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
        break;
    case EPMOE_ACTIVATION_SWIGLU_OAI: activated = x * sigmoid(alpha * x); break;
    default: abort();
    }
    if (oai) up.value += 1;
    double error = gate_error * fabs(up.value) + (fabs(activated) + gate_error) * up_error;
    return (sum_t){activated * up.value, error + EPS * fabs(activated * up.value)};
}

static sum_t dot(const epmoe_weight_t *weight, int64_t row, const double *x, int32_t k)
{
    epmoe_dtype_t dtype = epmoei_dtype_of_format(weight->format);
    sum_t sum = {0, 0};
    for (int32_t i = 0; i < k; i++) {
        double term = (double)epmoei_load(weight->data, dtype, row * k + i) * x[i];
        sum.value += term;
        sum.magnitude += fabs(term);
    }
    return sum;
}

static void scale(sum_t *sum, double factor)
{
    sum->value *= factor;
    sum->magnitude *= fabs(factor);
}

static void add(sum_t *sum, double term)
{
    sum->value += term;
    sum->magnitude += fabs(term);
}

void oracle_slot(const oracle_experts_t *e, int64_t expert, const double *x, double weight, double weight_error,
                 double *y, double *bound)
{
    int32_t d = e->hidden, f = e->intermediate;
    bool interleaved = e->layout == EPMOE_LAYOUT_INTERLEAVED;
    epmoe_dtype_t down_dtype = epmoei_dtype_of_format(e->down.format);
    double *h = malloc((size_t)f * sizeof *h), *h_error = malloc((size_t)f * sizeof *h_error);
    for (int32_t i = 0; i < f; i++) {
        int64_t gate_row = expert * 2 * f + (interleaved ? 2 * i : i);
        int64_t up_row = expert * 2 * f + (interleaved ? 2 * i + 1 : f + i);
        sum_t gate = dot(&e->gate_up, gate_row, x, d), up = dot(&e->gate_up, up_row, x, d);
        if (e->weight_on_input) {
            scale(&gate, weight), scale(&up, weight);
            gate.magnitude += fabs(gate.value) * weight_error / (EPS * fabs(weight) + 1e-300);
            up.magnitude += fabs(up.value) * weight_error / (EPS * fabs(weight) + 1e-300);
        }
        if (e->gate_up_bias) add(&gate, (double)e->gate_up_bias[gate_row]), add(&up, (double)e->gate_up_bias[up_row]);
        sum_t out = activate(e, gate, up);
        double lo = (double)epmoei_round_to((float)(out.value - out.magnitude), e->dtype);
        double hi = (double)epmoei_round_to((float)(out.value + out.magnitude), e->dtype);
        h[i] = (double)epmoei_round_to((float)out.value, e->dtype);
        h_error[i] = fmax(hi - h[i], h[i] - lo);
    }
    for (int32_t i = 0; i < d; i++) {
        sum_t out = dot(&e->down, expert * d + i, h, f);
        double from_h = 0, factor = e->weight_on_input ? 1 : weight;
        for (int32_t j = 0; j < f; j++)
            from_h += fabs((double)epmoei_load(e->down.data, down_dtype, (expert * d + i) * f + j)) * h_error[j];
        if (e->down_bias) add(&out, (double)e->down_bias[expert * d + i]);
        y[i] += factor * out.value;
        bound[i] += fabs(factor) * (EPS * out.magnitude + from_h);
        if (!e->weight_on_input) bound[i] += weight_error * fabs(out.value);
    }
    free(h), free(h_error);
}

double oracle_error(const void *out, epmoe_dtype_t dtype, const double *y, const double *bound, int64_t n)
{
    double worst = 0;
    double half_ulp = dtype == EPMOE_F32 ? 0x1p-24 : dtype == EPMOE_F16 ? 0x1p-11 : 0x1p-8;
    double least = dtype == EPMOE_F16 ? 0x1p-25 : 0x1p-133;
    for (int64_t i = 0; i < n; i++) {
        double value = (double)epmoei_load(out, dtype, i);
        if (isnan(value) || isnan(y[i])) return INFINITY;
        double error = fabs(value - y[i]) / (bound[i] + (fabs(y[i]) + bound[i]) * half_ulp + least);
        if (!(error <= worst)) worst = error;
    }
    return worst;
}

/* NaN and -inf never win; +inf is the largest finite number. */
static double tame(double x) { return x > (double)3.402823466e38f ? 3.402823466e38 : x == x ? x : -INFINITY; }

static void scores_of(const epmoe_layer_config_t *c, const double *logits, double *scores)
{
    double top = -INFINITY, sum = 0;
    for (int32_t e = 0; e < c->num_experts; e++) top = fmax(top, tame(logits[e]));
    for (int32_t e = 0; e < c->num_experts; e++) {
        double x = tame(logits[e]);
        switch (c->scoring) {
        case EPMOE_SCORING_SOFTMAX: scores[e] = top == -INFINITY ? 0 : exp(x - top); break;
        case EPMOE_SCORING_SIGMOID: scores[e] = sigmoid(x); break;
        case EPMOE_SCORING_SQRT_SOFTPLUS: scores[e] = sqrt(fmax(x, 0) + log1p(exp(-fabs(x)))); break;
        case EPMOE_SCORING_TOPK_SOFTMAX:
        case EPMOE_SCORING_SPARSE_MIXER: scores[e] = x; break;
        }
        sum += scores[e];
    }
    if (c->scoring == EPMOE_SCORING_SOFTMAX && sum > 0)
        for (int32_t e = 0; e < c->num_experts; e++) scores[e] /= sum;
}

/* The best of [first,end) that is allowed and not taken; the lower index of equals. */
static int32_t best_of(const double *values, const bool *out, int32_t first, int32_t end)
{
    int32_t best = -1;
    for (int32_t i = first; i < end; i++)
        if (!out[i] && (best < 0 || values[i] > values[best])) best = i;
    return best;
}

static void narrow(double *gap, double a, double b)
{
    if (a - b < *gap) *gap = a - b;
}

void oracle_route(const epmoe_layer_config_t *c, const double *logits, const float *bias, int32_t *ids, double *gap)
{
    int32_t n = c->num_experts, groups = c->n_group > 0 ? c->n_group : 1, size = n / groups;
    int32_t keep = c->topk_group > 0 ? c->topk_group : groups;
    double *scores = malloc((size_t)n * sizeof *scores), *values = malloc((size_t)n * sizeof *values);
    double *group = malloc((size_t)groups * sizeof *group);
    bool *out = calloc((size_t)n, sizeof *out), *group_out = calloc((size_t)groups, sizeof *group_out);
    bool by_logit = c->scoring == EPMOE_SCORING_SOFTMAX && !bias;
    scores_of(c, logits, scores);
    *gap = INFINITY;
    for (int32_t e = 0; e < n; e++) {
        double chosen_by = by_logit ? tame(logits[e]) : scores[e] + (bias ? (double)bias[e] : 0);
        values[e] = tame(logits[e]) == -INFINITY ? -INFINITY : chosen_by;
    }
    for (int32_t g = 0; g < groups; g++) {
        const double *of = by_logit && c->group_score == EPMOE_GROUP_SCORE_TOP2 ? scores : values;
        bool *first_out = calloc((size_t)n, sizeof *first_out);
        int32_t first = best_of(of, first_out, g * size, (g + 1) * size);
        group[g] = of[first];
        first_out[first] = true;
        int32_t second = best_of(of, first_out, g * size, (g + 1) * size);
        if (c->group_score == EPMOE_GROUP_SCORE_TOP2 && second >= 0) group[g] += of[second];
        free(first_out);
    }
    double last_group = INFINITY;
    for (int32_t i = 0; i < keep; i++) {
        int32_t g = best_of(group, group_out, 0, groups);
        group_out[g] = true;
        last_group = group[g];
    }
    for (int32_t g = 0; g < groups; g++) {
        if (group_out[g]) continue;
        narrow(gap, last_group, group[g]);
        for (int32_t e = g * size; e < (g + 1) * size; e++) out[e] = true;
    }
    double last = INFINITY;
    for (int32_t j = 0; j < c->top_k; j++) {
        ids[j] = best_of(values, out, 0, n);
        out[ids[j]] = true;
        if (j > 0) narrow(gap, last, values[ids[j]]);
        last = values[ids[j]];
    }
    int32_t next = best_of(values, out, 0, n);
    if (next >= 0) narrow(gap, last, values[next]);
    free(scores), free(values), free(group), free(out), free(group_out);
}

/* 1 / sum of exp(x - m) over what is close to m and was not chosen before. */
static double mixer_weight(const epmoe_layer_config_t *c, const double *scores, const int32_t *ids, int32_t j)
{
    double m = scores[ids[j]], sum = 0, most = 2 * (c->router_jitter > 0 ? (double)c->router_jitter : 0.01);
    for (int32_t e = 0; e < c->num_experts; e++) {
        bool before = false;
        for (int32_t i = 0; i < j; i++) before = before || ids[i] == e;
        if (!before && !((m - scores[e]) / fmax(fabs(scores[e]), m) > most)) sum += exp(scores[e] - m);
    }
    return m == -INFINITY ? 0 : 1 / sum;
}

void oracle_weigh(const epmoe_layer_config_t *c, const double *logits, const int32_t *ids, double *weights)
{
    double *scores = malloc((size_t)c->num_experts * sizeof *scores);
    double scale = c->routed_scale > 0 ? (double)c->routed_scale : 1, sum = 0, top = -INFINITY;
    scores_of(c, logits, scores);
    for (int32_t j = 0; j < c->top_k; j++) top = fmax(top, scores[ids[j]]);
    for (int32_t j = 0; j < c->top_k; j++) {
        weights[j] = scores[ids[j]];
        if (c->scoring == EPMOE_SCORING_TOPK_SOFTMAX) weights[j] = exp(weights[j] - top);
        if (c->scoring == EPMOE_SCORING_SPARSE_MIXER) weights[j] = mixer_weight(c, scores, ids, j);
        sum += weights[j];
    }
    bool divide = c->renormalize || c->scoring == EPMOE_SCORING_TOPK_SOFTMAX;
    for (int32_t j = 0; j < c->top_k; j++) weights[j] *= scale / (divide ? sum : 1);
    free(scores);
}

static void *random_tensor(testing_rng_t *rng, epmoe_dtype_t dtype, int64_t n, double scale)
{
    if (n == 0) return NULL;
    void *data = malloc((size_t)(n * epmoe_dtype_size(dtype)));
    testing_fill_normal(rng, data, dtype, n, (float)scale);
    return data;
}

static epmoe_weight_t random_weight(testing_rng_t *rng, epmoe_dtype_t dtype, int64_t rows, int64_t k)
{
    epmoe_weight_t weight = EPMOE_WEIGHT_INIT;
    weight.format = epmoei_format_of_dtype(dtype);
    weight.data = random_tensor(rng, dtype, rows * k, k ? 1 / sqrt((double)k) : 0);
    return weight;
}

oracle_model_t oracle_model(testing_rng_t *rng, const epmoe_layer_config_t *c, const oracle_formats_t *formats)
{
    oracle_model_t model = {.config = *c, .weights = EPMOE_LAYER_WEIGHTS_INIT};
    epmoe_layer_weights_t *w = &model.weights;
    int64_t n = c->num_experts, d = c->hidden, f = n ? c->intermediate : 0, fs = c->shared_intermediate;
    w->router_dtype = formats->router;
    w->layout = formats->layout;
    w->router = random_tensor(rng, formats->router, n * d, 1 / sqrt((double)d));
    if (c->router_has_bias) w->router_bias = random_tensor(rng, EPMOE_F32, n, 0.3);
    if (c->has_selection_bias) w->selection_bias = random_tensor(rng, EPMOE_F32, n, 0.3);
    w->gate_up = random_weight(rng, formats->gate_up, n * 2 * f, d);
    w->down = random_weight(rng, formats->down, n * d, f);
    if (c->expert_has_bias) {
        w->gate_up_bias = random_tensor(rng, EPMOE_F32, n * 2 * f, 0.3);
        w->down_bias = random_tensor(rng, EPMOE_F32, n * d, 0.3);
    }
    w->shared_gate_up = random_weight(rng, formats->shared_gate_up, 2 * fs, d);
    w->shared_down = random_weight(rng, formats->shared_down, fs ? d : 0, fs);
    if (c->shared_gated) w->shared_gate = random_tensor(rng, formats->router, d, 1 / sqrt((double)d));
    return model;
}

void oracle_model_free(oracle_model_t *model)
{
    const epmoe_layer_weights_t *w = &model->weights;
    const void *all[] = {w->router,       w->router_bias, w->selection_bias,      w->gate_up.data,     w->down.data,
                         w->gate_up_bias, w->down_bias,   w->shared_gate_up.data, w->shared_down.data, w->shared_gate};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) free((void *)(uintptr_t)all[i]);
    *model = (oracle_model_t){.config = {0}};
}

void oracle_logits(const oracle_model_t *model, const double *x, double *logits, double *bound)
{
    const epmoe_weight_t router = {.format = epmoei_format_of_dtype(model->weights.router_dtype),
                                   .data = model->weights.router};
    for (int32_t e = 0; e < model->config.num_experts; e++) {
        sum_t logit = dot(&router, e, x, model->config.hidden);
        if (model->weights.router_bias) add(&logit, (double)model->weights.router_bias[e]);
        logits[e] = logit.value;
        bound[e] = EPS * logit.magnitude;
    }
}

void oracle_token(const oracle_model_t *model, const double *x, const int32_t *ids, const double *weights,
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
        bound[i] = EPS * fabs(y[i]);
    }
    for (int32_t j = 0; j < c->top_k && c->num_experts; j++) oracle_slot(&experts, ids[j], x, weights[j], 0, y, bound);
    if (!c->shared_intermediate) return;
    experts.intermediate = c->shared_intermediate;
    experts.weight_on_input = 0;
    experts.gate_up = w->shared_gate_up;
    experts.down = w->shared_down;
    experts.gate_up_bias = experts.down_bias = NULL;
    const epmoe_weight_t gate = {.format = epmoei_format_of_dtype(w->router_dtype), .data = w->shared_gate};
    sum_t gate_sum = c->shared_gated ? dot(&gate, 0, x, c->hidden) : (sum_t){0, 0};
    double factor = c->shared_gated ? sigmoid(gate_sum.value) : 1;
    oracle_slot(&experts, 0, x, factor, EPS * (gate_sum.magnitude / 4 + 1), y, bound);
}

void oracle_row(const void *data, epmoe_dtype_t dtype, int64_t t, int32_t d, double *row)
{
    for (int32_t i = 0; i < d; i++) row[i] = (double)epmoei_load(data, dtype, t * d + i);
}
