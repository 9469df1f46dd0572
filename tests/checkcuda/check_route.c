/* Routing at once: the router's product against double precision and against itself at other sizes, choice and order
 * against the reference ops. */
#include "base/dtype.h"
#include "kernels/align.h"
#include "kernels/op_check.h"
#include "kernels/route.h"
#include "kernels/router_gemm.h"
#include "kernels/topk.h"
#include "tests/checkcuda/check.h"

#include <math.h>
#include <stdlib.h>

static epmoe_status_t run(const void *args, epmoe_stream_t stream) { return epmoei_route(args, stream); }

static epmoe_status_t reference_align(const epmoei_route_args_t *args, int32_t *num_tokens)
{
    epmoe_align_args_t align = EPMOE_ALIGN_ARGS_INIT, checked;
    align.num_tokens = args->topk.num_tokens;
    align.num_tokens_dev = num_tokens;
    align.top_k = args->topk.top_k + (args->joined_ids != NULL);
    align.num_experts = args->topk.num_experts + (args->joined_ids != NULL);
    align.block_size = 1;
    align.ids = args->joined_ids ? args->joined_ids : args->topk.ids;
    align.sorted_ids = args->sorted_ids;
    align.num_post_padded = args->num_post_padded;
    align.expert_offsets = args->expert_offsets;
    EPMOEI_CHECK(epmoei_align_check(&align, &checked));
    EPMOEI_CHECK(epmoei_align_ref(&checked, NULL));
    for (int32_t place = 0; args->places && place < *num_tokens * align.top_k; place++)
        args->places[args->sorted_ids[place]] = place;
    return EPMOE_OK;
}

static void reference_joined(const epmoei_route_args_t *args, int32_t num_tokens)
{
    const int32_t top_k = args->topk.top_k;
    for (int64_t t = 0; args->joined_ids && t < num_tokens; t++)
        for (int32_t j = 0; j <= top_k; j++) {
            args->joined_ids[t * (top_k + 1) + j] = j < top_k ? args->topk.ids[t * top_k + j] : args->topk.num_experts;
            args->joined_weights[t * (top_k + 1) + j] = j < top_k ? args->topk.weights[t * top_k + j] : 1.0f;
        }
}

static void reference_logits(const epmoei_route_args_t *args, int32_t num_tokens, float *logits)
{
    int64_t row_bytes = (int64_t)args->hidden * epmoe_dtype_size(args->dtype);
#pragma omp parallel for schedule(dynamic)
    for (int64_t t = 0; t < num_tokens; t++) {
        epmoei_router_gemm_args_t gemm = {.num_tokens = 1,
                                          .num_experts = args->topk.num_experts,
                                          .hidden = args->hidden,
                                          .dtype = args->dtype,
                                          .x = (const char *)args->x + t * row_bytes,
                                          .weight = args->weight};
        epmoei_router_gemm_ref(&gemm, args->bias, logits + t * args->topk.num_experts);
    }
}

static epmoe_status_t reference(const void *raw)
{
    const epmoei_route_args_t *args = raw;
    int32_t actual, num_tokens = args->topk.num_tokens, num_experts = args->topk.num_experts;
    if (num_tokens == 0) return EPMOE_OK;
    EPMOEI_CHECK(epmoei_actual_tokens(args->topk.num_tokens_dev, num_tokens, &actual));
    float *own = malloc((size_t)num_tokens * (size_t)num_experts * sizeof *own);
    reference_logits(args, actual, own);
    if (args->logits) memcpy(args->logits, own, (size_t)actual * (size_t)num_experts * sizeof *own);

    epmoe_topk_args_t topk = args->topk, checked;
    if (!topk.logits) topk.logits = own;
    epmoe_status_t status = epmoei_topk_check(&topk, &checked);
    if (status == EPMOE_OK) status = epmoei_topk_ref(&checked, NULL);
    if (status == EPMOE_OK) reference_joined(args, actual);
    if (status == EPMOE_OK && args->sorted_ids &&
        epmoei_route_aligns(num_tokens, num_experts, topk.top_k + (args->joined_ids != NULL)))
        status = reference_align(args, &actual);
    free(own);
    return status;
}

static const check_op_t op = {"route", sizeof(epmoei_route_args_t), run, reference};

/* What x, w and the logits that replace the router's are made of. */
typedef enum fill_t {
    FILL_NORMAL,
    FILL_EXACT, /* few small values, whose sums are exact in any order, and full of ties */
    FILL_ONE,   /* exact, and every token has the same favourites */
    FILL_EDGES, /* NaN, infinities and huge values in some rows */
} fill_t;

typedef struct shape_t {
    int32_t tokens, experts, top_k, hidden;
    epmoe_dtype_t dtype;
    epmoe_scoring_t scoring;
    int32_t groups, kept;
    bool bias, selection_bias, forced, logits, align;
    fill_t fill;
    bool counted; /* by num_tokens_dev */
    bool joined;  /* one more slot, of the shared expert */
} shape_t;

static void fill_matrix(testing_rng_t *rng, void *data, epmoe_dtype_t dtype, int64_t rows, int64_t cols, fill_t fill,
                        float scale)
{
    if (!data) return;
    if (fill == FILL_NORMAL) {
        check_fill_normal(rng, data, dtype, rows * cols, scale);
        return;
    }
    for (int64_t i = 0; i < rows * cols; i++)
        epmoei_store(data, dtype, i, testing_range(rng, 0, 7) ? 0.0f : 0.5f * (float)testing_range(rng, -2, 2));
    if (fill != FILL_EDGES) return;
    for (int64_t row = 0; row < rows; row++) {
        static const float edges[] = {NAN, INFINITY, -INFINITY};
        if (testing_range(rng, 0, 3) == 0)
            epmoei_store(data, dtype, row * cols + testing_range(rng, 0, (int32_t)cols - 1),
                         edges[testing_range(rng, 0, 2)]);
    }
}

static void fill_forced(testing_rng_t *rng, float *logits, int32_t rows, int32_t cols, fill_t fill)
{
    static const float edges[] = {NAN, -INFINITY, INFINITY, -0.0f, 0.0f, 3e38f, -3e38f, 1e-40f};
    for (int32_t row = 0; logits && row < rows; row++) {
        int32_t kind = testing_range(rng, 0, 3);
        for (int32_t col = 0; col < cols; col++) {
            float *logit = &logits[(int64_t)row * cols + col];
            *logit = fill == FILL_NORMAL ? testing_normal(rng) : 0.5f * (float)testing_range(rng, -3, 3);
            if (fill == FILL_ONE) *logit = (float)(cols - col);
            if (fill != FILL_EDGES) continue;
            if (kind == 0)
                *logit = edges[testing_range(rng, 0, 1)];
            else if (testing_range(rng, 0, 3) < kind)
                *logit = edges[testing_range(rng, 0, 7)];
        }
    }
}

static void fill_inputs(testing_rng_t *rng, check_case_t *c, const shape_t *s)
{
    check_field_t *x = check_find(c, "x");
    fill_matrix(rng, x->host, s->dtype, s->tokens, s->hidden, s->fill, 1.0f);
    if (s->forced)
        fill_forced(rng, (float *)(void *)check_find(c, "topk.logits")->host, s->tokens, s->experts, s->fill);
    if (s->counted && s->tokens)
        *(int32_t *)(void *)check_find(c, "topk.num_tokens_dev")->host = testing_range(rng, 0, s->tokens);
}

static void make(check_case_t *c, testing_rng_t *rng, const shape_t *s)
{
    static const char *const scorings[] = {"softmax", "sigmoid", "sqrt_softplus", "topk_softmax", "sparse_mixer"};
    check_case(c, &op,
               "T %d E %d k %d d %d %s %s groups %d/%d bias %d %d forced %d logits %d align %d fill %d counted %d "
               "joined %d",
               s->tokens, s->experts, s->top_k, s->hidden, epmoe_dtype_string(s->dtype), scorings[s->scoring], s->kept,
               s->groups, s->bias, s->selection_bias, s->forced, s->logits, s->align, (int)s->fill, s->counted,
               s->joined);
    if (s->fill == FILL_NORMAL) c->tolerance = 4e-6 + 0x1p-21 * sqrt((double)s->hidden);
    epmoei_route_args_t args = {.struct_size = sizeof args};
    args.hidden = s->hidden;
    args.dtype = s->dtype;
    args.topk = (epmoe_topk_args_t)EPMOE_TOPK_ARGS_INIT;
    args.topk.num_tokens = s->tokens;
    args.topk.num_experts = s->experts;
    args.topk.top_k = s->top_k;
    args.topk.scoring = s->scoring;
    args.topk.renormalize = s->top_k % 2;
    args.topk.n_group = s->groups;
    args.topk.topk_group = s->kept;
    args.topk.jitter = s->scoring == EPMOE_SCORING_SPARSE_MIXER ? 0.3f : 0.0f;
    args.workspace_bytes = epmoei_route_workspace(s->tokens, s->experts, s->hidden);
    memcpy(c->args, &args, sizeof args);

    CHECK_ADD(c, epmoei_route_args_t, x, CHECK_IN, s->dtype, s->tokens, s->hidden, 16);
    void *w = CHECK_ADD(c, epmoei_route_args_t, weight, CHECK_IN, s->dtype, s->experts, s->hidden, 16);
    fill_matrix(rng, w, s->dtype, s->experts, s->hidden, s->fill == FILL_NORMAL ? FILL_NORMAL : FILL_EXACT,
                1.0f / sqrtf((float)s->hidden));
    if (s->bias) {
        float *bias = CHECK_ADD(c, epmoei_route_args_t, bias, CHECK_IN, EPMOE_F32, 1, s->experts, 16);
        for (int32_t e = 0; e < s->experts; e++)
            bias[e] = s->fill == FILL_ONE ? (float)(64 * (e % s->experts < s->top_k)) : 0.25f * (float)(e % 5);
    }
    if (s->selection_bias) {
        float *bias = CHECK_ADD(c, epmoei_route_args_t, topk.selection_bias, CHECK_IN, EPMOE_F32, 1, s->experts, 16);
        for (int32_t e = 0; e < s->experts; e++) bias[e] = 0.125f * (float)testing_range(rng, -3, 3);
    }
    if (s->forced) CHECK_ADD(c, epmoei_route_args_t, topk.logits, CHECK_IN, EPMOE_F32, s->tokens, s->experts, 16);
    if (s->logits) CHECK_ADD(c, epmoei_route_args_t, logits, CHECK_OUT, EPMOE_F32, s->tokens, s->experts, 16);
    CHECK_ADD(c, epmoei_route_args_t, topk.ids, CHECK_OUT, EPMOE_I32, s->tokens, s->top_k, 4);
    CHECK_ADD(c, epmoei_route_args_t, topk.weights, CHECK_OUT, EPMOE_F32, s->tokens, s->top_k, 4);
    if (s->counted) CHECK_ADD(c, epmoei_route_args_t, topk.num_tokens_dev, CHECK_IN, EPMOE_I32, 1, 1, 4);
    const int32_t slots = s->top_k + s->joined;
    if (s->joined) {
        CHECK_ADD(c, epmoei_route_args_t, joined_ids, CHECK_OUT, EPMOE_I32, s->tokens, slots, 4);
        CHECK_ADD(c, epmoei_route_args_t, joined_weights, CHECK_OUT, EPMOE_F32, s->tokens, slots, 4);
    }
    if (s->align) {
        CHECK_ADD(c, epmoei_route_args_t, sorted_ids, CHECK_OUT, EPMOE_I32, 1, (int64_t)s->tokens * slots, 4);
        CHECK_ADD(c, epmoei_route_args_t, num_post_padded, CHECK_OUT, EPMOE_I32, 1, 1, 4);
        CHECK_ADD(c, epmoei_route_args_t, expert_offsets, CHECK_OUT, EPMOE_I32, 1, s->experts + 1 + s->joined, 4);
        if (s->logits)
            CHECK_ADD(c, epmoei_route_args_t, places, CHECK_OUT, EPMOE_I32, 1, (int64_t)s->tokens * slots, 4);
    }
    CHECK_ADD(c, epmoei_route_args_t, workspace, CHECK_SCRATCH, EPMOE_U8, 1, args.workspace_bytes, EPMOEI_ALIGNMENT);
    fill_inputs(rng, c, s);
}

static void run_one(testing_rng_t *rng, const shape_t *shape)
{
    check_case_t c;
    make(&c, rng, shape);
    check_run(&c);
    check_free(&c);
}

static const epmoe_dtype_t dtypes[] = {EPMOE_BF16, EPMOE_F16};
static const epmoe_scoring_t scorings[] = {EPMOE_SCORING_SOFTMAX, EPMOE_SCORING_SIGMOID, EPMOE_SCORING_TOPK_SOFTMAX};

/* Bell-shaped values, the choice by other logits, so that it does not hang on the last bit of a sum. */
static void check_product(testing_rng_t *rng)
{
    const int32_t hiddens[] = {8, 72, 136, 2048, 2880, 7168, 16448};
    const int32_t experts[] = {1, 5, 60, 128, 256, 384, 1025, 4096}, tokens[] = {0, 1, 3, 17, 63, 127, 257, 1024};
    const double most = 1.2e8;
    check_begin("route", "product: d 8..16448, E 1..4096, T 0..1024");
    for (size_t d = 0; d < sizeof hiddens / sizeof *hiddens; d++)
        for (size_t e = 0; e < sizeof experts / sizeof *experts; e++)
            for (size_t t = 0; t < sizeof tokens / sizeof *tokens; t++) {
                if ((double)hiddens[d] * experts[e] * tokens[t] > most) continue;
                if (hiddens[d] == 16448 && tokens[t] != 3 && tokens[t] != 127) continue;
                if (check_skips((int64_t)hiddens[d] * (experts[e] + tokens[t]) + tokens[t] * experts[e])) continue;
                shape_t shape = {.tokens = tokens[t],
                                 .experts = experts[e],
                                 .top_k = 1,
                                 .hidden = hiddens[d],
                                 .dtype = dtypes[(d + e + t) % 2],
                                 .bias = (e + t) % 2,
                                 .forced = true,
                                 .logits = true};
                run_one(rng, &shape);
            }
    check_end();
}

/* NaN and infinity stay in their token. */
static void check_product_edges(testing_rng_t *rng)
{
    const int32_t tokens[] = {5, 40, 200};
    check_begin("route", "product: NaN and infinity in x");
    for (size_t t = 0; t < sizeof tokens / sizeof *tokens; t++)
        for (int32_t i = 0; i < 2; i++) {
            shape_t shape = {.tokens = tokens[t],
                             .experts = 70,
                             .top_k = 3,
                             .hidden = 600,
                             .dtype = dtypes[i],
                             .logits = true,
                             .align = true,
                             .fill = FILL_EDGES};
            run_one(rng, &shape);
        }
    check_end();
}

/* The logits of a run of `big`'s rows from `first` on, by a call of their own. */
static void check_rows_alone(testing_rng_t *rng, check_case_t *big, const shape_t *whole, int32_t first, int32_t tokens)
{
    shape_t shape = *whole;
    shape.tokens = tokens;
    check_case_t c;
    make(&c, rng, &shape);
    const int64_t row = (int64_t)shape.hidden * 2;
    memcpy(check_find(&c, "x")->host, check_find(big, "x")->host + first * row, (size_t)(tokens * row));
    memcpy(check_find(&c, "weight")->host, check_find(big, "weight")->host, (size_t)(shape.experts * row));
    check_upload(&c);
    if (check_launch(&c) != EPMOE_OK) check_fail(&c, "%s", epmoe_last_error());
    if (check_download(&c)) {
        const check_field_t *some = check_find(&c, "logits"), *all = check_find(big, "logits");
        if (memcmp(some->got, all->got + (int64_t)first * shape.experts * 4, (size_t)some->bytes))
            check_fail(&c, "logits differ from those of the same tokens among %d", whole->tokens);
    }
    check_free(&c);
}

static void check_batch_invariance(testing_rng_t *rng)
{
    static const struct {
        int32_t tokens, experts, hidden;
    } wholes[] = {{4096, 128, 2048}, {1024, 256, 7168}, {700, 60, 2880},
                  {4096, 8, 4096},   {300, 5, 136},     {1024, 384, 7168}};
    const int32_t tokens[] = {1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 127, 129, 256, 300};
    check_begin("route", "product: a token's logits at any T");
    for (size_t i = 0; i < sizeof wholes / sizeof *wholes; i++) {
        if (check_skips((int64_t)wholes[i].tokens * wholes[i].hidden)) continue;
        shape_t whole = {.tokens = wholes[i].tokens,
                         .experts = wholes[i].experts,
                         .top_k = 1,
                         .hidden = wholes[i].hidden,
                         .dtype = dtypes[i % 2],
                         .logits = true};
        check_case_t big;
        make(&big, rng, &whole);
        check_upload(&big);
        if (check_launch(&big) != EPMOE_OK) check_fail(&big, "%s", epmoe_last_error());
        if (check_download(&big))
            for (size_t t = 0; t < sizeof tokens / sizeof *tokens; t++)
                check_rows_alone(rng, &big, &whole, testing_range(rng, 0, whole.tokens - tokens[t]), tokens[t]);
        check_free(&big);
    }
    check_end();
}

/* Sizes where the form changes: one block, a block per group of tokens, groups of more words, no align; each without
 * and with the shared expert's slot. */
static void check_sizes(testing_rng_t *rng)
{
    static const struct {
        int32_t tokens, experts, top_k;
    } sizes[] = {{1, 1, 1},      {1, 8, 2},      {1, 128, 8},    {7, 128, 8},    {8, 128, 8},    {9, 128, 8},
                 {8, 512, 8},    {31, 32, 4},    {32, 32, 4},    {33, 32, 32},   {64, 32, 4},    {65, 20, 4},
                 {63, 60, 4},    {256, 8, 2},    {256, 128, 8},  {256, 256, 8},  {257, 384, 8},  {133, 384, 6},
                 {128, 64, 6},   {129, 64, 6},   {192, 384, 8},  {193, 384, 8},  {512, 512, 8},  {513, 512, 8},
                 {256, 512, 32}, {257, 512, 32}, {1024, 128, 8}, {1025, 128, 8}, {1024, 256, 8}, {672, 384, 8},
                 {673, 384, 8},  {8192, 32, 1},  {8193, 32, 1},  {2048, 100, 4}, {40, 513, 8},   {9, 4096, 32},
                 {3000, 128, 8}, {16, 256, 8},   {17, 128, 8},   {16, 512, 32},  {4096, 128, 8}, {4097, 20, 3},
                 {8200, 8, 2},   {20000, 40, 6}};
    check_begin("route", "choice and order: forms and their limits");
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int32_t fill = FILL_EXACT; fill <= FILL_ONE; fill++)
            for (int32_t variant = 0; variant < 4; variant++) {
                const int32_t j = variant % 2;
                shape_t shape = {.tokens = sizes[i].tokens,
                                 .experts = sizes[i].experts,
                                 .top_k = sizes[i].top_k,
                                 .hidden = 72,
                                 .dtype = dtypes[i % 2],
                                 .scoring = scorings[(i + (size_t)j) % 3],
                                 .bias = fill == FILL_ONE || i % 2,
                                 .logits = j,
                                 .align = true,
                                 .fill = (fill_t)fill,
                                 .counted = j,
                                 .joined = variant / 2};
                if (shape.joined && shape.top_k == EPMOE_MAX_TOP_K) continue;
                if (!check_skips((int64_t)shape.tokens * shape.experts)) run_one(rng, &shape);
            }
    check_end();
}

static void check_rules(testing_rng_t *rng)
{
    static const struct {
        int32_t experts, top_k, groups, kept;
    } routers[] = {{8, 2, 1, 1},   {32, 4, 4, 2},      {24, 5, 6, 2},   {64, 6, 1, 1},
                   {128, 8, 1, 1}, {160, 6, 8, 3},     {256, 8, 8, 4},  {256, 32, 64, 9},
                   {384, 8, 1, 1}, {500, 32, 100, 50}, {576, 8, 24, 5}, {1025, 32, 41, 7}};
    const int32_t tokens[] = {3, 21, 150};
    check_begin("route", "choice and order: rules, groups, ties, NaN");
    for (size_t i = 0; i < sizeof routers / sizeof *routers; i++)
        for (int32_t variant = (int32_t)i % check_step(11); variant < 4 * 2 * 2 * 3; variant += check_step(11)) {
            bool forced = variant / 8 % 2;
            shape_t shape = {.tokens = tokens[variant / 16],
                             .experts = routers[i].experts,
                             .top_k = routers[i].top_k,
                             .hidden = 40,
                             .dtype = dtypes[variant % 2],
                             .scoring = (epmoe_scoring_t)(variant % 4),
                             .groups = routers[i].groups,
                             .kept = routers[i].kept,
                             .bias = variant % 3 == 0,
                             .selection_bias = variant / 4 % 2,
                             .forced = forced,
                             .logits = variant % 5 < 2,
                             .align = variant % 7,
                             .joined = routers[i].top_k < EPMOE_MAX_TOP_K && variant % 3 == 1,
                             .fill = forced ? (i + (size_t)variant) % 2 ? FILL_EDGES : FILL_EXACT : FILL_EXACT};
            /* log1pf is each library's own: only equal logits may give equal values. */
            if (shape.scoring == EPMOE_SCORING_SQRT_SOFTPLUS) {
                shape.selection_bias = false;
                shape.groups = shape.kept = 1;
                shape.fill = FILL_EXACT;
            }
            run_one(rng, &shape);
        }
    check_end();
}

/* SparseMixer's weights are made by one more kernel, from the same logits; also of chunks, and in front of the order.
 */
static void check_mixer(testing_rng_t *rng)
{
    static const struct {
        int32_t tokens, experts, top_k;
    } sizes[] = {{1, 16, 2},   {7, 16, 2},   {16, 32, 32}, {33, 60, 4},
                 {257, 16, 2}, {64, 256, 8}, {9, 600, 32}, {5000, 16, 2}};
    check_begin("route", "SparseMixer");
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int32_t variant = 0; variant < 8; variant++) {
            shape_t shape = {.tokens = sizes[i].tokens,
                             .experts = sizes[i].experts,
                             .top_k = sizes[i].top_k,
                             .hidden = 72,
                             .dtype = dtypes[variant % 2],
                             .scoring = EPMOE_SCORING_SPARSE_MIXER,
                             .bias = variant / 4 % 2,
                             .forced = variant / 2 % 2,
                             .logits = variant % 3 == 0,
                             .align = variant != 5,
                             .joined = sizes[i].top_k < EPMOE_MAX_TOP_K && variant % 3 == 1,
                             .fill = variant == 2   ? FILL_EDGES
                                     : variant == 7 ? FILL_ONE
                                                    : FILL_EXACT,
                             .counted = variant % 2};
            if (!check_skips((int64_t)shape.tokens * shape.experts)) run_one(rng, &shape);
        }
    check_end();
}

typedef struct refill_t {
    testing_rng_t *rng;
    const shape_t *shape;
} refill_t;

static void refill(check_case_t *c, int32_t round, void *ctx)
{
    const refill_t *how = ctx;
    (void)round;
    fill_inputs(how->rng, c, how->shape);
}

static void check_calls(testing_rng_t *rng)
{
    const shape_t shapes[] = {
        {.tokens = 5, .experts = 128, .top_k = 8, .hidden = 264, .logits = true, .align = true},
        {.tokens = 200, .experts = 60, .top_k = 4, .hidden = 72, .forced = true, .align = true},
        {.tokens = 1100, .experts = 256, .top_k = 8, .hidden = 72, .align = true},
        {.tokens = 6, .experts = 256, .top_k = 8, .hidden = 264, .logits = true, .align = true, .joined = true},
        {.tokens = 1100, .experts = 256, .top_k = 8, .hidden = 72, .logits = true, .align = true, .joined = true},
        {.tokens = 90, .experts = 700, .top_k = 8, .hidden = 72, .logits = true, .bias = true, .selection_bias = true},
        {.tokens = 3000, .experts = 4096, .top_k = 2, .hidden = 8, .logits = true}, /* two chunks */
        {.tokens = 3000, .experts = 4096, .top_k = 2, .hidden = 8, .logits = true, .joined = true},
        {.tokens = 3000, .experts = 4096, .top_k = 2, .hidden = 8, .scoring = EPMOE_SCORING_SPARSE_MIXER},
        {.tokens = 3000,
         .experts = 4096,
         .top_k = 2,
         .hidden = 8,
         .scoring = EPMOE_SCORING_SPARSE_MIXER,
         .joined = true},
        {.tokens = 40, .experts = 16, .top_k = 2, .hidden = 72, .scoring = EPMOE_SCORING_SPARSE_MIXER, .align = true},
    };
    check_begin("route", "device token count, graphs, alignment, chunks");
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        if (check_skips((int64_t)shapes[i].tokens * shapes[i].experts / 4)) continue;
        shape_t shape = shapes[i];
        shape.dtype = dtypes[i % 2];
        shape.fill = FILL_EXACT;
        shape.counted = true;
        check_case_t c;
        make(&c, rng, &shape);
        check_run(&c);
        check_misaligned(&c);
        refill_t how = {rng, &shape};
        check_graph(&c, refill, &how);
        check_free(&c);
    }
    check_end();
}

void check_route(testing_rng_t *rng)
{
    check_product(rng);
    check_product_edges(rng);
    check_batch_invariance(rng);
    check_sizes(rng);
    check_rules(rng);
    check_mixer(rng);
    check_calls(rng);
}
