#include "dense_layers/sample.h"
#include "tests/checkcuda/check.h"

#include <math.h>

static epmoe_status_t run(const void *args, epmoe_stream_t stream) { return epmoe_sample(args, stream); }

/* The reference looks for each token of top_k and top_p through the whole row; the CPU's kernel, which makes the same
 * choices, stands in for it where that takes long. */
static epmoe_status_t reference(const void *args)
{
    enum { kMostTokens = 3000 };
    epmoe_sample_args_t checked;
    EPMOEI_CHECK(epmoei_sample_check(args, &checked));
    if (checked.num_rows == 0) return EPMOE_OK;
    return checked.vocab_size <= kMostTokens ? epmoei_sample_ref(&checked, NULL) : epmoei_sample_cpu(&checked, NULL);
}

static const check_op_t op = {"sample", sizeof(epmoe_sample_args_t), run, reference};

typedef enum logits_t { NORMAL, EQUAL, FEW_VALUES, ASCENDING, DESCENDING, SPECIAL, MOSTLY_OUT, NUM_LOGITS } logits_t;

typedef struct shape_t {
    int32_t rows, vocab, pad;
    epmoe_dtype_t dtype;
    logits_t logits;
    bool by_row; /* every row its own settings, of which some are greedy */
    float temperature, top_p, min_p;
    int32_t top_k;
} shape_t;

static float draw_logit(testing_rng_t *rng, logits_t logits, int64_t i)
{
    static const float special[] = {NAN, INFINITY, -INFINITY, -0.0f, 0.0f, 3e38f, 1e-40f};
    switch (logits) {
    case EQUAL: return 0.75f;
    case FEW_VALUES: return (float)testing_range(rng, -3, 3);
    case ASCENDING: return (float)i * 1e-3f;
    case DESCENDING: return (float)i * -1e-3f;
    case SPECIAL: return testing_range(rng, 0, 9) ? testing_normal(rng) : special[testing_range(rng, 0, 6)];
    case MOSTLY_OUT: return testing_range(rng, 0, 99) ? -INFINITY : testing_normal(rng);
    default: return 3 * testing_normal(rng);
    }
}

static void fill(testing_rng_t *rng, check_case_t *c, const shape_t *s)
{
    check_field_t *logits = check_find(c, "logits");
    float *uniform = (float *)(void *)check_find(c, "uniform")->host;
    for (int64_t r = 0; r < s->rows; r++) {
        for (int64_t i = 0; i < s->vocab; i++)
            epmoei_store(logits->host, s->dtype, r * logits->cols + i, draw_logit(rng, s->logits, i));
        uniform[r] = testing_range(rng, 0, 7) ? testing_uniform(rng, 0, 1) : (float)testing_range(rng, 0, 1);
        if (!s->by_row) continue;
        ((float *)(void *)check_find(c, "temperature_rows")->host)[r] =
            testing_range(rng, 0, 3) ? testing_uniform(rng, 0.05f, 2) : 0;
        ((float *)(void *)check_find(c, "top_p_rows")->host)[r] =
            testing_range(rng, 0, 1) ? testing_uniform(rng, 0, 1) : (float)testing_range(rng, 0, 1);
        ((float *)(void *)check_find(c, "min_p_rows")->host)[r] =
            testing_range(rng, 0, 1) ? testing_uniform(rng, 0, 0.5f) : 0;
        ((int32_t *)(void *)check_find(c, "top_k_rows")->host)[r] =
            testing_range(rng, 0, 2) ? testing_range(rng, 1, testing_range(rng, 0, 1) ? 60 : 2000) : -1;
    }
}

static void make(check_case_t *c, testing_rng_t *rng, const shape_t *s)
{
    check_case(c, &op, "B %d V %d pad %d %s logits %d by row %d temperature %g top_k %d top_p %g min_p %g", s->rows,
               s->vocab, s->pad, epmoe_dtype_string(s->dtype), (int)s->logits, s->by_row, (double)s->temperature,
               s->top_k, (double)s->top_p, (double)s->min_p);
    epmoe_sample_args_t args = EPMOE_SAMPLE_ARGS_INIT;
    args.num_rows = s->rows;
    args.vocab_size = s->vocab;
    args.logits_dtype = s->dtype;
    args.logits_stride = (int64_t)s->vocab + s->pad;
    args.temperature = s->temperature;
    args.top_k = s->top_k;
    args.top_p = s->top_p;
    args.min_p = s->min_p;
    memcpy(c->args, &args, sizeof args);
    CHECK_ADD(c, epmoe_sample_args_t, logits, CHECK_IN, s->dtype, s->rows, args.logits_stride, 16);
    CHECK_ADD(c, epmoe_sample_args_t, uniform, CHECK_IN, EPMOE_F32, 1, s->rows, 4);
    if (s->by_row) {
        CHECK_ADD(c, epmoe_sample_args_t, temperature_rows, CHECK_IN, EPMOE_F32, 1, s->rows, 4);
        CHECK_ADD(c, epmoe_sample_args_t, top_k_rows, CHECK_IN, EPMOE_I32, 1, s->rows, 4);
        CHECK_ADD(c, epmoe_sample_args_t, top_p_rows, CHECK_IN, EPMOE_F32, 1, s->rows, 4);
        CHECK_ADD(c, epmoe_sample_args_t, min_p_rows, CHECK_IN, EPMOE_F32, 1, s->rows, 4);
    }
    CHECK_ADD(c, epmoe_sample_args_t, tokens, CHECK_OUT, EPMOE_I32, s->rows, 1, 4);
    fill(rng, c, s);
}

static void run_one(testing_rng_t *rng, const shape_t *shape)
{
    check_case_t c;
    make(&c, rng, shape);
    check_run(&c);
    check_free(&c);
}

static const epmoe_dtype_t dtypes[] = {EPMOE_F32, EPMOE_BF16, EPMOE_F16};

static void check_rules(testing_rng_t *rng)
{
    check_begin("sample", "every rule, dtype, kind of logits; V 1..200003");
    static const int32_t vocabs[] = {1, 2, 63, 1024, 2999, 8193, 32000, 128256, 200003};
    static const int32_t top_ks[] = {0, 1, 50, 1024, 1025, 20000};
    int32_t i = 0;
    for (size_t v = 0; v < sizeof vocabs / sizeof *vocabs; v++)
        for (int32_t logits = 0; logits < NUM_LOGITS; logits++)
            for (int32_t k = 0; k < 6; k++, i++) {
                shape_t s = {.rows = testing_range(rng, 1, 4),
                             .vocab = vocabs[v],
                             .pad = i % 3,
                             .dtype = dtypes[i % 3],
                             .logits = (logits_t)logits,
                             .by_row = i % 5 == 0,
                             .temperature = i % 11 == 0 ? 0 : testing_uniform(rng, 0.05f, 3),
                             .top_k = top_ks[k],
                             .top_p = i % 2 ? testing_uniform(rng, 0, 1) : 0,
                             .min_p = i % 4 == 1 ? testing_uniform(rng, 0, 0.2f) : 0};
                if (i % check_step(7) || check_skips((int64_t)s.rows * s.vocab)) continue;
                run_one(rng, &s);
            }
    check_end();
}

static void refill(check_case_t *c, int32_t round, void *ctx)
{
    testing_rng_t rng = testing_rng((uint64_t)round + 71);
    fill(&rng, c, ctx);
}

static void check_calls(testing_rng_t *rng)
{
    check_begin("sample", "no rows, many rows, graphs, alignment");
    shape_t none = {.rows = 0, .vocab = 100, .dtype = EPMOE_F32, .temperature = 1};
    run_one(rng, &none);
    shape_t many = {.rows = check_small ? 10 : 700, .vocab = 5000, .dtype = EPMOE_F32, .by_row = true};
    run_one(rng, &many);
    for (int32_t i = 0; i < 3; i++) {
        shape_t s = {.rows = 9, .vocab = 2000, .dtype = dtypes[i], .by_row = true};
        check_case_t c;
        make(&c, rng, &s);
        check_misaligned(&c);
        check_graph(&c, refill, &s);
        check_free(&c);
    }
    check_end();
}

void check_sample(testing_rng_t *rng)
{
    check_rules(rng);
    check_calls(rng);
}
