/* Every variant of the router op against full sorts in double precision. */
#include "tests/topk_testing.h"

#include <math.h>
#include <stdlib.h>

typedef struct candidate_t {
    double value;
    int32_t id;
} candidate_t;

static int by_value_then_id(const void *a, const void *b)
{
    const candidate_t *x = a, *y = b;
    if (x->value != y->value) return x->value < y->value ? 1 : -1;
    return x->id < y->id ? -1 : 1;
}

/* Values this close may swap in fp32. */
static bool separate(double a, double b) { return fabs(a - b) > 4e-6 * fmax(1e-3, fmax(fabs(a), fabs(b))); }

static double oracle_score(epmoe_scoring_t scoring, double logit, double top, double sum)
{
    switch (scoring) {
    case EPMOE_SCORING_SOFTMAX: return exp(logit - top) / sum;
    case EPMOE_SCORING_SIGMOID: return 1 / (1 + exp(-logit));
    case EPMOE_SCORING_SQRT_SOFTPLUS: return sqrt(log1p(exp(logit)));
    default: return logit;
    }
}

/* Checks one row against full sorts in double precision. Returns false when two values were too close to tell which
 * comes first; what can be checked then still is. */
static bool check_row(const epmoe_topk_args_t *args, const double *logits, const int32_t *ids, const float *weights)
{
    int32_t num_experts = args->num_experts, top_k = args->top_k, groups = args->n_group ? args->n_group : 1;
    int32_t kept = args->topk_group ? args->topk_group : groups, size = num_experts / groups, count = 0;
    static double score[EPMOE_MAX_EXPERTS], value[EPMOE_MAX_EXPERTS];
    static candidate_t members[EPMOE_MAX_EXPERTS], ranking[EPMOE_MAX_EXPERTS], experts[EPMOE_MAX_EXPERTS];
    double top = -INFINITY, sum = 0;
    for (int32_t e = 0; e < num_experts; e++) top = fmax(top, logits[e]);
    for (int32_t e = 0; e < num_experts; e++) sum += exp(logits[e] - top);
    bool raw = !args->selection_bias && args->scoring == EPMOE_SCORING_SOFTMAX;
    for (int32_t e = 0; e < num_experts; e++) {
        score[e] = oracle_score(args->scoring, logits[e], top, sum);
        value[e] = raw ? logits[e] : score[e] + (args->selection_bias ? (double)args->selection_bias[e] : 0);
    }
    for (int32_t g = 0; g < groups; g++) {
        for (int32_t i = 0; i < size; i++) {
            bool add = args->group_score == EPMOE_GROUP_SCORE_TOP2;
            members[i].value = raw && add ? score[g * size + i] : value[g * size + i];
            members[i].id = i;
        }
        qsort(members, (size_t)size, sizeof *members, by_value_then_id);
        bool two = args->group_score == EPMOE_GROUP_SCORE_TOP2 && size > 1;
        ranking[g] = (candidate_t){members[0].value + (two ? members[1].value : 0), g};
    }
    qsort(ranking, (size_t)groups, sizeof *ranking, by_value_then_id);
    if (kept < groups && !separate(ranking[kept - 1].value, ranking[kept].value)) return false;
    for (int32_t g = 0; g < kept; g++)
        for (int32_t i = 0; i < size; i++, count++) {
            int32_t e = ranking[g].id * size + i;
            experts[count] = (candidate_t){value[e], e};
        }
    qsort(experts, (size_t)count, sizeof *experts, by_value_then_id);
    bool sure = true;
    for (int32_t j = 0; j < top_k; j++) {
        sure = sure && (j + 1 == count || separate(experts[j].value, experts[j + 1].value));
        cr_assert(ids[j] >= 0 && ids[j] < num_experts);
        for (int32_t i = 0; i < j; i++) cr_assert_neq(ids[i], ids[j]);
        cr_assert(!separate(value[ids[j]], experts[j].value), "expert %d in place %d: %.9g, expected %.9g of expert %d",
                  ids[j], j, value[ids[j]], experts[j].value, experts[j].id);
    }
    for (int32_t j = 0; sure && j < top_k; j++) cr_assert_eq(ids[j], experts[j].id);

    double chosen = 0, best = -INFINITY, scale = args->scale != 0 ? (double)args->scale : 1;
    bool late = args->scoring == EPMOE_SCORING_TOPK_SOFTMAX;
    for (int32_t j = 0; j < top_k; j++) best = fmax(best, logits[ids[j]]);
    for (int32_t j = 0; j < top_k; j++) chosen += late ? exp(logits[ids[j]] - best) : score[ids[j]];
    for (int32_t j = 0; j < top_k; j++) {
        double part = late ? exp(logits[ids[j]] - best) : score[ids[j]];
        double expected = scale * (late || args->renormalize ? part / chosen : part);
        cr_assert(fabs((double)weights[j] - expected) <= 1e-5 * fabs(expected) + 1e-36,
                  "weight %d: %.9g, expected %.9g", j, (double)weights[j], expected);
    }
    return sure;
}

/* One random call of the given kind; adds the rows that were decided to *decided. */
static void check_random(testing_rng_t *rng, epmoe_topk_args_t kind, int32_t num_tokens, int32_t offset, int64_t pad,
                         int64_t *rows, int64_t *decided)
{
    int32_t num_experts = kind.num_experts;
    int64_t stride = num_experts + pad;
    static float bias[EPMOE_MAX_EXPERTS];
    for (int32_t e = 0; e < num_experts; e++) bias[e] = testing_normal(rng);
    char *logits = testing_buffer(epmoe_dtype_size(kind.logits_dtype) * num_tokens * stride, offset);
    for (int32_t t = 0; t < num_tokens; t++) /* columns past E stay NaN */
        testing_fill_normal(rng, logits + epmoe_dtype_size(kind.logits_dtype) * t * stride, kind.logits_dtype,
                            num_experts, 2.0f);
    call_t call = call_make(num_tokens, num_experts, kind.top_k, logits);
    int32_t *ids = call.args.ids;
    float *weights = call.args.weights;
    call.args = kind;
    call.args.num_tokens = num_tokens;
    call.args.logits = logits;
    call.args.logits_stride = pad ? stride : 0;
    if (kind.selection_bias) call.args.selection_bias = bias;
    call.args.ids = ids;
    call.args.weights = weights;
    call_run(&call);
    double *row = malloc(sizeof *row * (size_t)num_experts);
    for (int32_t t = 0; t < num_tokens; t++) {
        for (int32_t e = 0; e < num_experts; e++)
            row[e] = (double)epmoei_load(logits, kind.logits_dtype, t * stride + e);
        (*rows)++;
        *decided += check_row(&call.args, row, ids + (int64_t)t * kind.top_k, weights + (int64_t)t * kind.top_k);
    }
    free(row);
    testing_buffer_free(logits);
    call_free(&call);
}

Test(topk_oracle, every_variant_against_sorting_in_double)
{
    testing_rng_t rng = testing_rng(testing_seed());
    const float any = 0;
    int64_t rows = 0, decided = 0;
    for (int32_t variant = 0; variant < 4 * 2 * 2 * 2 * 3; variant++)
        for (int32_t shape = 0; shape < 4; shape++) {
            epmoe_topk_args_t kind = EPMOE_TOPK_ARGS_INIT;
            kind.scoring = (epmoe_scoring_t)(variant & 3);
            kind.selection_bias = variant & 4 ? &any : NULL;
            kind.renormalize = variant >> 3 & 1;
            kind.group_score = (epmoe_group_score_t)(variant >> 4 & 1);
            kind.logits_dtype = op_dtypes[variant >> 5].dtype;
            kind.scale = shape % 2 ? 2.5f : 0.0f;
            kind.n_group = testing_range(&rng, 1, 8);
            kind.topk_group = testing_range(&rng, 1, kind.n_group);
            kind.num_experts = kind.n_group * testing_range(&rng, 1, 40);
            int32_t most = kind.num_experts / kind.n_group * kind.topk_group;
            kind.top_k = testing_range(&rng, 1, most < EPMOE_MAX_TOP_K ? most : EPMOE_MAX_TOP_K);
            int32_t offset = testing_range(&rng, 0, 3) * epmoe_dtype_size(kind.logits_dtype);
            check_random(&rng, kind, testing_range(&rng, 1, 9), offset, testing_range(&rng, 0, 5), &rows, &decided);
        }
    cr_assert(decided > rows / 4, "only %lld of %lld rows were decided", (long long)decided, (long long)rows);
}

Test(topk_oracle, shapes_against_sorting_in_double)
{
    testing_rng_t rng = testing_rng(testing_seed());
    const float any = 0;
    const int32_t counts[] = {1, 2, 5, 60, 72, 160, 256, 384, 576, 1025, 4096}, tokens[] = {1, 3, 63, 127};
    int64_t rows = 0, decided = 0;
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++)
        for (int32_t t = 0; t < 4; t++) {
            epmoe_topk_args_t kind = EPMOE_TOPK_ARGS_INIT;
            kind.num_experts = counts[c];
            kind.top_k = counts[c] < 8 ? counts[c] : 8;
            kind.logits_dtype = EPMOE_F32;
            kind.scoring = t % 2 ? EPMOE_SCORING_SIGMOID : EPMOE_SCORING_SOFTMAX;
            kind.selection_bias = t == 3 ? &any : NULL;
            check_random(&rng, kind, counts[c] > 1000 ? tokens[t] % 32 : tokens[t], 4, 0, &rows, &decided);
        }
    cr_assert(decided > rows / 2, "only %lld of %lld rows were decided", (long long)decided, (long long)rows);
}
