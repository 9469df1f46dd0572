#include "dense_layers/spec_verify.h"
#include "tests/checkcuda/check.h"

#include <math.h>

static epmoe_status_t run(const void *args, epmoe_stream_t stream) { return epmoe_spec_verify(args, stream); }

static epmoe_status_t reference(const void *args)
{
    epmoe_spec_verify_args_t checked;
    EPMOEI_CHECK(epmoei_spec_verify_check(args, &checked));
    return checked.num_rows ? epmoei_spec_verify_ref(&checked, NULL) : EPMOE_OK;
}

static const check_op_t op = {"spec_verify", sizeof(epmoe_spec_verify_args_t), run, reference};

typedef enum probs_t { SPREAD, ZEROS, SPECIAL, SURE_DRAFTS, NUM_PROBS } probs_t;

typedef struct shape_t {
    int32_t rows, drafts, vocab;
    bool certain;    /* no draft_probs */
    int32_t ends_in; /* one in so many ids is -1; 0 = none */
    probs_t probs;
} shape_t;

static float draw_prob(testing_rng_t *rng, probs_t probs, bool draft)
{
    static const float special[] = {NAN, INFINITY, -0.5f, 2.0f, 1e-30f, 0.0f};
    if (probs == ZEROS && !draft) return 0;
    if (probs == SPECIAL && testing_range(rng, 0, 9) == 0) return special[testing_range(rng, 0, 5)];
    if (probs == SURE_DRAFTS && draft) return 1;
    return testing_uniform(rng, 0, draft ? 0.7f : 1);
}

static void fill(testing_rng_t *rng, check_case_t *c, const shape_t *s)
{
    int32_t *ids = (int32_t *)(void *)check_find(c, "draft_ids")->host;
    float *uniform = (float *)(void *)check_find(c, "uniform")->host;
    float *target = (float *)(void *)check_find(c, "target_probs")->host;
    float *draft = s->certain ? NULL : (float *)(void *)check_find(c, "draft_probs")->host;
    int64_t drafts = (int64_t)s->rows * s->drafts;
    for (int64_t i = 0; i < drafts; i++) {
        ids[i] = testing_range(rng, 0, s->vocab - 1);
        if (s->ends_in && testing_range(rng, 1, s->ends_in) == 1) ids[i] = -1;
    }
    for (int64_t i = 0; i < drafts * s->vocab && draft; i++) draft[i] = draw_prob(rng, s->probs, true);
    for (int64_t i = 0; i < (drafts + s->rows) * s->vocab; i++) target[i] = draw_prob(rng, s->probs, false);
    for (int64_t i = 0; i < drafts + s->rows; i++) uniform[i] = testing_uniform(rng, 0, i % 3 ? 0.3f : 1);
}

static void make(check_case_t *c, testing_rng_t *rng, const shape_t *s)
{
    check_case(c, &op, "B %d G %d V %d certain %d ends in %d probs %d", s->rows, s->drafts, s->vocab, s->certain,
               s->ends_in, (int)s->probs);
    epmoe_spec_verify_args_t args = EPMOE_SPEC_VERIFY_ARGS_INIT;
    args.num_rows = s->rows;
    args.num_drafts = s->drafts;
    args.vocab_size = s->vocab;
    memcpy(c->args, &args, sizeof args);
    int64_t drafts = (int64_t)s->rows * s->drafts;
    CHECK_ADD(c, epmoe_spec_verify_args_t, draft_ids, CHECK_IN, EPMOE_I32, s->rows, s->drafts, 4);
    if (!s->certain) CHECK_ADD(c, epmoe_spec_verify_args_t, draft_probs, CHECK_IN, EPMOE_F32, drafts, s->vocab, 16);
    CHECK_ADD(c, epmoe_spec_verify_args_t, target_probs, CHECK_IN, EPMOE_F32, drafts + s->rows, s->vocab, 16);
    CHECK_ADD(c, epmoe_spec_verify_args_t, uniform, CHECK_IN, EPMOE_F32, s->rows, s->drafts + 1, 4);
    CHECK_ADD(c, epmoe_spec_verify_args_t, tokens, CHECK_OUT, EPMOE_I32, s->rows, s->drafts + 1, 4);
    CHECK_ADD(c, epmoe_spec_verify_args_t, accepted, CHECK_OUT, EPMOE_I32, s->rows, 1, 4);
    if (s->rows) fill(rng, c, s);
}

static void run_one(testing_rng_t *rng, const shape_t *shape)
{
    check_case_t c;
    make(&c, rng, shape);
    check_run(&c);
    check_free(&c);
}

static void check_shapes(testing_rng_t *rng)
{
    check_begin("spec_verify", "G 0..70, V 1..128256");
    static const int32_t kinds[][2] = {{0, 1000}, {1, 1},   {3, 4097}, {5, 2},
                                       {7, 1024}, {70, 37}, {33, 64},  {2, 128256}};
    int32_t i = 0;
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
        for (int32_t probs = 0; probs < NUM_PROBS; probs++)
            for (int32_t certain = 0; certain < 2; certain++, i++) {
                shape_t s = {.rows = kinds[k][1] > 100000 ? 2 : testing_range(rng, 1, 12),
                             .drafts = kinds[k][0],
                             .vocab = kinds[k][1],
                             .certain = certain,
                             .ends_in = i % 3 ? 0 : 4,
                             .probs = (probs_t)probs};
                if (check_skips((int64_t)s.rows * (s.drafts + 1) * s.vocab)) continue;
                run_one(rng, &s);
            }
    check_end();
}

static void refill(check_case_t *c, int32_t round, void *ctx)
{
    testing_rng_t rng = testing_rng((uint64_t)round + 29);
    fill(&rng, c, ctx);
}

static void check_bad_drafts(check_case_t *c, const shape_t *s)
{
    check_field_t *ids = check_find(c, "draft_ids");
    int32_t *good = (int32_t *)(void *)ids->host, count = 0;
    char *data = testing_buffer(ids->bytes, 0);
    int32_t *bad = (int32_t *)(void *)data;
    /* At the first place, which no rejection hides; what stands behind it is not looked at. */
    memcpy(bad, good, (size_t)ids->bytes);
    for (int64_t row = 0; row < s->rows; row += 2, count++) {
        good[row * s->drafts] = -1;
        bad[row * s->drafts] = row % 4 ? s->vocab : -2;
    }
    check_bad_ids(c, "draft_ids", data, count);
    testing_buffer_free(data);
}

static void check_calls(testing_rng_t *rng)
{
    check_begin("spec_verify", "no rows, graphs, alignment, bad ids");
    shape_t none = {.rows = 0, .drafts = 2, .vocab = 100};
    run_one(rng, &none);
    for (int32_t i = 0; i < 2; i++) {
        shape_t s = {.rows = 11, .drafts = 4, .vocab = 700 + i, .certain = i, .ends_in = 5};
        check_case_t c;
        make(&c, rng, &s);
        check_misaligned(&c);
        check_graph(&c, refill, &s);
        check_bad_drafts(&c, &s);
        check_free(&c);
    }
    check_end();
}

void check_spec_verify(testing_rng_t *rng)
{
    check_shapes(rng);
    check_calls(rng);
}
