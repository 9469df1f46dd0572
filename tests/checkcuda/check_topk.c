#include "kernels/topk.h"
#include "tests/checkcuda/check.h"

#include <float.h>
#include <math.h>

static epmoe_status_t run(const void *args, epmoe_stream_t stream) { return epmoe_topk(args, stream); }

static epmoe_status_t reference(const void *args)
{
    epmoe_topk_args_t checked;
    EPMOEI_CHECK(epmoei_topk_check(args, &checked));
    return checked.num_tokens ? epmoei_topk_ref(&checked, NULL) : EPMOE_OK;
}

static const check_op_t op = {"topk", sizeof(epmoe_topk_args_t), run, reference};

typedef enum fill_t { FILL_NORMAL, FILL_TIES, FILL_EDGES } fill_t;

/* Ties from few different values; edges are NaN, infinities, huge values and zeros of both signs, in some rows all of
 * them -inf or NaN. */
static void fill_logits(testing_rng_t *rng, const check_field_t *field, fill_t fill)
{
    static const float edges[] = {NAN, -INFINITY, INFINITY, -0.0f, 0.0f, 3e38f, -3e38f, 1e-40f};
    if (!field->host) return;
    check_fill_normal(rng, field->host, field->dtype, field->rows * field->cols, 2.0f);
    for (int64_t row = 0; fill != FILL_NORMAL && row < field->rows; row++) {
        int32_t kind = testing_range(rng, 0, 3);
        for (int64_t col = 0; col < field->cols; col++) {
            int64_t at = row * field->cols + col;
            if (fill == FILL_TIES)
                epmoei_store(field->host, field->dtype, at, 0.5f * (float)testing_range(rng, -3, 3));
            else if (kind == 0)
                epmoei_store(field->host, field->dtype, at, edges[testing_range(rng, 0, 1)]);
            else if (testing_range(rng, 0, 3) < kind)
                epmoei_store(field->host, field->dtype, at, edges[testing_range(rng, 0, 7)]);
        }
    }
}

static double softplus_score(const check_case_t *c, int64_t row, int32_t id)
{
    const check_field_t *logits = &c->fields[0];
    double logit = (double)epmoei_load(logits->host, logits->dtype, row * logits->cols + id);
    if (isnan(logit)) return 0;
    return sqrt(fmax(fmin(logit, FLT_MAX), 0) + log1p(exp(-fabs(logit))));
}

/* log1pf is each library's own, so that two experts whose values lie an ulp apart may change places. In such a row the
 * values must be that close, and the weights those of the ids that were chosen. */
static bool compare_softplus(check_case_t *c, const check_field_t *field)
{
    const epmoe_topk_args_t *args = (const epmoe_topk_args_t *)c->args;
    const check_field_t *ids = check_find(c, "ids"), *weights = check_find(c, "weights");
    const float *bias = args->selection_bias ? (const float *)(void *)check_find(c, "selection_bias")->host : NULL;
    const int32_t *all_got = (const int32_t *)(void *)ids->got, *all_expected = (const int32_t *)(void *)ids->expected;
    if (field != ids && field != weights) return false;
    for (int64_t row = 0; row < args->num_tokens; row++) {
        const int32_t *got = all_got + row * args->top_k, *expected = all_expected + row * args->top_k;
        bool same = !memcmp(got, expected, sizeof(int32_t) * (size_t)args->top_k);
        double sum = 0;
        for (int32_t j = 0; !same && j < args->top_k; j++) {
            if (got[j] < 0 || got[j] >= args->num_experts) return false;
            double a = softplus_score(c, row, got[j]), b = softplus_score(c, row, expected[j]);
            sum += a;
            if (bias) a += (double)bias[got[j]], b += (double)bias[expected[j]];
            if (!(fabs(a - b) <= 1e-6 * fmax(1, fabs(b)))) return false;
        }
        for (int32_t j = 0; field == weights && j < args->top_k; j++) {
            double weight = (double)epmoei_load(weights->got, EPMOE_F32, row * args->top_k + j);
            double wanted = (double)epmoei_load(weights->expected, EPMOE_F32, row * args->top_k + j);
            if (!same)
                wanted = (args->scale != 0 ? (double)args->scale : 1) * softplus_score(c, row, got[j]) /
                         (args->renormalize ? sum : 1);
            if (!(fabs(weight - wanted) <= 4e-6 * fabs(wanted))) return false;
        }
    }
    return true;
}

/* `kind` holds the scalars; stride 0 is dense. */
static void make(check_case_t *c, testing_rng_t *rng, epmoe_topk_args_t kind, bool bias, fill_t fill)
{
    static const char *const scorings[] = {"softmax", "sigmoid", "sqrt_softplus", "topk_softmax", "sparse_mixer"};
    int64_t stride = kind.logits_stride ? kind.logits_stride : kind.num_experts;
    check_case(c, &op, "T %d E %d k %d %s %s stride %lld bias %d renorm %d groups %d/%d by %d fill %d", kind.num_tokens,
               kind.num_experts, kind.top_k, epmoe_dtype_string(kind.logits_dtype), scorings[kind.scoring],
               (long long)kind.logits_stride, bias, kind.renormalize, kind.topk_group, kind.n_group,
               (int)kind.group_score, (int)fill);
    memcpy(c->args, &kind, sizeof kind);
    CHECK_ADD(c, epmoe_topk_args_t, logits, CHECK_IN, kind.logits_dtype, kind.num_tokens, stride, 16);
    fill_logits(rng, &c->fields[0], fill);
    if (bias) {
        float *values = CHECK_ADD(c, epmoe_topk_args_t, selection_bias, CHECK_IN, EPMOE_F32, 1, kind.num_experts, 16);
        for (int32_t e = 0; e < kind.num_experts; e++)
            values[e] = fill == FILL_TIES ? 0.25f * (float)testing_range(rng, -2, 2) : testing_normal(rng);
    }
    CHECK_ADD(c, epmoe_topk_args_t, ids, CHECK_OUT, EPMOE_I32, kind.num_tokens, kind.top_k, 4);
    CHECK_ADD(c, epmoe_topk_args_t, weights, CHECK_OUT, EPMOE_F32, kind.num_tokens, kind.top_k, 4);
    if (kind.scoring == EPMOE_SCORING_SQRT_SOFTPLUS) c->compare = compare_softplus;
    if (kind.scoring == EPMOE_SCORING_SPARSE_MIXER) c->compare = check_compare_bits;
}

static void run_one(testing_rng_t *rng, epmoe_topk_args_t kind, bool bias, fill_t fill)
{
    check_case_t c;
    make(&c, rng, kind, bias, fill);
    check_run(&c);
    check_free(&c);
}

static epmoe_topk_args_t kind_of(int32_t num_tokens, int32_t num_experts, int32_t top_k)
{
    epmoe_topk_args_t kind = EPMOE_TOPK_ARGS_INIT;
    kind.num_tokens = num_tokens;
    kind.num_experts = num_experts;
    kind.top_k = top_k;
    kind.logits_dtype = EPMOE_F32;
    return kind;
}

static const epmoe_dtype_t dtypes[] = {EPMOE_F32, EPMOE_BF16, EPMOE_F16};

static void check_shapes(testing_rng_t *rng)
{
    const int32_t counts[] = {1, 5, 8, 9, 32, 60, 64, 72, 128, 160, 256, 384, 512, 576, 1025, 4096};
    const int32_t tokens[] = {0, 1, 3, 63, 127, 257, 4096};
    check_begin("topk", "E 1..4096, T 0..4096");
    for (size_t e = 0; e < sizeof counts / sizeof *counts; e++)
        for (size_t t = 0; t < sizeof tokens / sizeof *tokens; t++) {
            if (tokens[t] == 4096 && counts[e] > 256 && counts[e] != 1025) continue;
            if (check_skips((int64_t)tokens[t] * counts[e])) continue;
            epmoe_topk_args_t kind = kind_of(tokens[t], counts[e], counts[e] < 8 ? counts[e] : 8);
            kind.scoring = t % 2 ? EPMOE_SCORING_SIGMOID : EPMOE_SCORING_SOFTMAX;
            kind.renormalize = (int32_t)(e % 2);
            kind.logits_dtype = dtypes[(e + t) % 3];
            run_one(rng, kind, t % 3 == 2, (fill_t)((e + t) % 3));
        }
    check_end();
}

static void check_rules(testing_rng_t *rng)
{
    check_begin("topk", "scoring, bias, renormalise, groups, dtypes");
    for (int32_t variant = 0; variant < 4 * 2 * 2 * 2 * 3 * 3; variant += check_step(17))
        for (int32_t shape = 0; shape < 3; shape++) {
            int32_t groups = testing_range(rng, 1, 9);
            epmoe_topk_args_t kind = kind_of(testing_range(rng, 1, 40), groups * testing_range(rng, 1, 80), 1);
            kind.scoring = (epmoe_scoring_t)(variant & 3);
            kind.renormalize = variant >> 3 & 1;
            kind.group_score = (epmoe_group_score_t)(variant >> 4 & 1);
            kind.logits_dtype = dtypes[variant / 32 % 3];
            kind.scale = shape ? 2.5f : 0.0f;
            kind.n_group = groups;
            kind.topk_group = testing_range(rng, 1, groups);
            int32_t most = kind.num_experts / groups * kind.topk_group;
            kind.top_k = testing_range(rng, 1, most < EPMOE_MAX_TOP_K ? most : EPMOE_MAX_TOP_K);
            if (shape == 2) kind.logits_stride = kind.num_experts + testing_range(rng, 1, 9);
            run_one(rng, kind, variant & 4, (fill_t)(variant / 96));
        }
    check_end();
}

/* Routers of public models, and groups of every size: one expert each, all in one, sizes that no vector divides. */
static void check_models(testing_rng_t *rng)
{
    static const struct {
        int32_t experts, top_k, groups, kept;
        epmoe_scoring_t scoring;
        bool bias;
        epmoe_group_score_t score;
    } models[] = {
        {256, 8, 8, 4, EPMOE_SCORING_SIGMOID, true, EPMOE_GROUP_SCORE_TOP2},
        {160, 6, 8, 3, EPMOE_SCORING_SOFTMAX, false, EPMOE_GROUP_SCORE_MAX},
        {384, 8, 1, 1, EPMOE_SCORING_SIGMOID, true, EPMOE_GROUP_SCORE_TOP2},
        {128, 8, 1, 1, EPMOE_SCORING_SOFTMAX, false, EPMOE_GROUP_SCORE_TOP2},
        {32, 4, 1, 1, EPMOE_SCORING_TOPK_SOFTMAX, false, EPMOE_GROUP_SCORE_TOP2},
        {8, 2, 1, 1, EPMOE_SCORING_SOFTMAX, false, EPMOE_GROUP_SCORE_TOP2},
        {8, 8, 8, 8, EPMOE_SCORING_SOFTMAX, false, EPMOE_GROUP_SCORE_TOP2},
        {8, 3, 4, 2, EPMOE_SCORING_SOFTMAX, false, EPMOE_GROUP_SCORE_TOP2},
        {30, 10, 10, 5, EPMOE_SCORING_SIGMOID, false, EPMOE_GROUP_SCORE_TOP2},
        {256, 32, 256, 40, EPMOE_SCORING_SOFTMAX, false, EPMOE_GROUP_SCORE_TOP2},
        {512, 32, 16, 3, EPMOE_SCORING_SOFTMAX, false, EPMOE_GROUP_SCORE_TOP2},
        {500, 32, 100, 50, EPMOE_SCORING_SIGMOID, true, EPMOE_GROUP_SCORE_MAX},
        {576, 32, 24, 5, EPMOE_SCORING_SOFTMAX, true, EPMOE_GROUP_SCORE_TOP2},
        {1025, 32, 41, 7, EPMOE_SCORING_SOFTMAX, false, EPMOE_GROUP_SCORE_TOP2},
        {4096, 32, 4096, 100, EPMOE_SCORING_SIGMOID, false, EPMOE_GROUP_SCORE_TOP2},
        {4096, 32, 64, 8, EPMOE_SCORING_SOFTMAX, false, EPMOE_GROUP_SCORE_TOP2},
    };
    check_begin("topk", "routers of models, group sizes");
    for (size_t i = 0; i < sizeof models / sizeof *models; i++)
        for (int32_t fill = FILL_NORMAL; fill <= FILL_EDGES; fill++) {
            epmoe_topk_args_t kind = kind_of(67, models[i].experts, models[i].top_k);
            kind.n_group = models[i].groups;
            kind.topk_group = models[i].kept;
            kind.scoring = models[i].scoring;
            kind.group_score = models[i].score;
            kind.renormalize = 1;
            run_one(rng, kind, models[i].bias, (fill_t)fill);
        }
    check_end();
}

/* The weights have a kernel of their own. Ties lie at jitters that make equals, neighbours or all of a row close. */
static void check_mixer(testing_rng_t *rng)
{
    static const struct {
        int32_t tokens, experts, top_k;
    } sizes[] = {{1, 1, 1},     {5, 2, 2},     {67, 16, 2},   {4096, 16, 2}, {3, 31, 31},   {66, 32, 32},
                 {65, 33, 4},   {40, 60, 32},  {130, 128, 8}, {257, 256, 8}, {33, 500, 32}, {129, 512, 6},
                 {17, 513, 32}, {9, 4096, 32}, {0, 16, 2},    {63, 1025, 1}};
    static const float jitters[] = {0.0f, 0.1f, 0.5f, 0.9f};
    check_begin("topk", "SparseMixer");
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int32_t fill = FILL_NORMAL; fill <= FILL_EDGES; fill++)
            for (size_t j = 0; j < sizeof jitters / sizeof *jitters; j++) {
                if (check_skips((int64_t)sizes[i].tokens * sizes[i].experts)) continue;
                epmoe_topk_args_t kind = kind_of(sizes[i].tokens, sizes[i].experts, sizes[i].top_k);
                kind.scoring = EPMOE_SCORING_SPARSE_MIXER;
                kind.jitter = jitters[j];
                kind.renormalize = (int32_t)(i + j) % 2;
                kind.scale = j % 2 ? 2.5f : 0.0f;
                kind.logits_dtype = dtypes[(i + j + (size_t)fill) % 3];
                if (i % 4 == 3) kind.logits_stride = kind.num_experts + 3;
                run_one(rng, kind, false, (fill_t)fill);
            }
    check_end();
}

static void refill(check_case_t *c, int32_t round, void *ctx)
{
    fill_logits(ctx, check_find(c, "logits"), FILL_NORMAL);
    *(int32_t *)(void *)check_find(c, "num_tokens_dev")->host = 20 * round;
}

static void check_calls(testing_rng_t *rng)
{
    check_begin("topk", "device token count, graphs, alignment");
    const int32_t counts[] = {8, 60, 256, 1025};
    for (size_t e = 0; e < 5; e++) {
        check_case_t c;
        epmoe_topk_args_t kind = kind_of(60, counts[e % 4], 4);
        if (e == 4) kind.scoring = EPMOE_SCORING_SPARSE_MIXER;
        make(&c, rng, kind, false, FILL_NORMAL);
        int32_t *actual = CHECK_ADD(&c, epmoe_topk_args_t, num_tokens_dev, CHECK_IN, EPMOE_I32, 1, 1, 4);
        *actual = 17;
        check_run(&c);
        check_misaligned(&c);
        check_graph(&c, refill, rng);
        check_free(&c);
    }
    check_end();
}

void check_topk(testing_rng_t *rng)
{
    check_shapes(rng);
    check_rules(rng);
    check_models(rng);
    check_mixer(rng);
    check_calls(rng);
}
