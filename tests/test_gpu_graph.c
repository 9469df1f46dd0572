/* A layer's forward in a CUDA graph: captured without a synchronisation or an allocation, and a replay computes what an
 * eager call on the same buffers computes, bit for bit, whatever has been put into them since. */
#include "tests/gpu_layer_case.h"

#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

TestSuite(gpu_graph, .timeout = 300);

#define CUDA_OK(call)                                                                                                  \
    do {                                                                                                               \
        cudaError_t error_ = (call);                                                                                   \
        cr_assert_eq(error_, cudaSuccess, "%s: %s", #call, cudaGetErrorString(error_));                                \
    } while (0)

enum { kTokens = 16, kD = 72, kF = 40, kE = 128, kMaxK = 8 };

static epmoe_layer_config_t graph_config(int32_t k, epmoe_dtype_t dtype)
{
    epmoe_layer_config_t c = EPMOE_LAYER_CONFIG_INIT;
    c.hidden = kD, c.intermediate = kF, c.num_experts = kE, c.top_k = k;
    c.shared_intermediate = 24, c.shared_gated = 1;
    c.renormalize = 1;
    c.dtype = dtype;
    c.max_tokens = 150;
    return c;
}

static cudaGraphExec_t capture(epmoe_layer_t *layer, const epmoe_forward_args_t *args)
{
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    CUDA_OK(cudaStreamBeginCapture(gpu_stream(), cudaStreamCaptureModeGlobal));
    epmoei_alloc_fail_at(1);
    epmoe_status_t status = epmoe_layer_forward_args(layer, args, gpu_stream());
    epmoei_alloc_fail_at(0);
    cudaError_t ended = cudaStreamEndCapture(gpu_stream(), &graph);
    cr_assert_eq(status, EPMOE_OK, "forward in a capture: %s", epmoe_last_error());
    cr_assert_eq(ended, cudaSuccess, "end of the capture: %s", cudaGetErrorString(ended));
    CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
    CUDA_OK(cudaGraphDestroy(graph));
    return exec;
}

/* A layer with random weights, buffers for 16 tokens, and their graph. */
typedef struct case_t {
    oracle_model_t model;
    epmoe_layer_t *layer;
    gpu_tokens_t tokens;
    epmoe_forward_args_t args;
    int32_t *tokens_dev;
    void *other_x, *other_y;
    cudaGraphExec_t exec;
    bool forced;
} case_t;

static case_t make_case(testing_rng_t *rng, int32_t k, epmoe_dtype_t dtype, bool forced)
{
    epmoe_layer_config_t config = graph_config(k, dtype);
    case_t c = {.model = gpu_model(rng, &config), .args = EPMOE_FORWARD_ARGS_INIT, .forced = forced};
    int32_t tokens = kTokens;
    c.layer = gpu_layer_with(&c.model);
    cr_assert_not_null(c.layer);
    c.tokens = gpu_tokens(rng, &config, kTokens);
    c.tokens_dev = gpu_copy_of(&tokens, sizeof tokens);
    gpu_tokens_t other = gpu_tokens(rng, &config, 1);
    c.other_x = other.x, c.other_y = other.y;
    other.x = other.y = NULL;
    gpu_tokens_free(&other);
    c.args.num_tokens = kTokens;
    c.args.num_tokens_dev = c.tokens_dev;
    c.args.x = c.tokens.x, c.args.y = c.tokens.y, c.args.residual = c.tokens.residual;
    c.args.logits = forced ? c.tokens.logits : NULL;
    c.args.logits_out = c.tokens.logits_out;
    c.args.ids_out = c.tokens.ids_out, c.args.weights_out = c.tokens.weights_out;
    c.exec = capture(c.layer, &c.args);
    return c;
}

static void free_case(case_t *c)
{
    CUDA_OK(cudaGraphExecDestroy(c->exec));
    cr_expect(gpu_tokens_free(&c->tokens));
    gpu_buffer_free(c->tokens_dev), gpu_buffer_free(c->other_x), gpu_buffer_free(c->other_y);
    epmoe_layer_destroy(c->layer);
    oracle_model_free(&c->model);
}

/* On the host, all 16 rows. */
typedef struct results_t {
    uint16_t y[kTokens * kD];
    float logits[kTokens * kE], weights[kTokens * kMaxK];
    int32_t ids[kTokens * kMaxK];
} results_t;

static void poison_outputs(const case_t *c)
{
    int32_t k = c->model.config.top_k;
    gpu_poison(c->tokens.y, kTokens * kD * 2);
    gpu_poison(c->tokens.logits_out, kTokens * kE * 4);
    gpu_poison(c->tokens.weights_out, kTokens * k * 4), gpu_poison(c->tokens.ids_out, kTokens * k * 4);
}

static void get_outputs(const case_t *c, results_t *out)
{
    int32_t k = c->model.config.top_k;
    gpu_get(out->y, c->tokens.y, sizeof out->y);
    gpu_get(out->logits, c->tokens.logits_out, sizeof out->logits);
    gpu_get(out->weights, c->tokens.weights_out, kTokens * k * 4);
    gpu_get(out->ids, c->tokens.ids_out, kTokens * k * 4);
}

static void replay(const case_t *c, results_t *out)
{
    poison_outputs(c);
    CUDA_OK(cudaGraphLaunch(c->exec, gpu_stream()));
    cr_assert(gpu_wait());
    get_outputs(c, out);
}

/* A replay, then another forward that leaves other values in the workspace, then an eager one: equal in every byte, the
 * untouched ones too. `out` gets the results. */
static void replay_equals_eager(const case_t *c, const char *what, results_t *out)
{
    int32_t k = c->model.config.top_k;
    results_t eager;
    replay(c, out);
    cr_assert_eq(epmoe_layer_forward(c->layer, c->other_x, c->other_y, 1, gpu_stream()), EPMOE_OK, "%s: %s", what,
                 epmoe_last_error());
    poison_outputs(c);
    cr_assert_eq(epmoe_layer_forward_args(c->layer, &c->args, gpu_stream()), EPMOE_OK, "%s: %s", what,
                 epmoe_last_error());
    cr_assert(gpu_wait(), "%s", what);
    get_outputs(c, &eager);
    cr_expect(gpu_same("logits", out->logits, eager.logits, kTokens * kE, 4, kE), "%s", what);
    cr_expect(gpu_same("ids", out->ids, eager.ids, kTokens * k, 4, k), "%s", what);
    cr_expect(gpu_same("weights", out->weights, eager.weights, kTokens * k, 4, k), "%s", what);
    cr_expect(gpu_same("y", out->y, eager.y, kTokens * kD, 2, kD), "%s", what);
}

/* Replaces x and the forced logits. Routing 1: experts 0..k-1 of 8; routing 2: of 120..127 with 123 far ahead, so that
 * every token goes to one of them. */
static void put_inputs(const case_t *c, testing_rng_t *rng, int32_t routing)
{
    uint16_t x[kTokens * kD];
    float logits[kTokens * kE];
    testing_fill_normal(rng, x, c->model.config.dtype, kTokens * kD, 1);
    for (int32_t i = 0; i < kTokens * kE; i++) {
        int32_t t = i / kE, e = i % kE;
        logits[i] = -4 + 0.25f * testing_normal(rng);
        if (routing == 1 && e < 8) logits[i] = 4 + (float)((e + t) % 8);
        if (routing == 2 && e >= 120) logits[i] = e == 123 ? 40 : 4 + (float)((e + t) % 8);
    }
    gpu_put(c->tokens.x, x, sizeof x);
    gpu_put(c->tokens.logits, logits, sizeof logits);
}

static void expect_ids(const case_t *c, const results_t *out, int32_t routing, const char *what)
{
    int32_t k = c->model.config.top_k, lo = routing == 1 ? 0 : 120;
    for (int32_t i = 0; c->forced && i < kTokens * k; i++) {
        cr_expect(out->ids[i] >= lo && out->ids[i] < lo + 8, "%s: token %d has expert %d", what, i / k, out->ids[i]);
        if (routing == 2 && i % k == 0) cr_expect_eq(out->ids[i], 123, "%s: token %d", what, i / k);
    }
}

Test(gpu_graph, a_replay_follows_its_inputs)
{
    GPU_TEST_NEEDS_DEVICE();
    for (int i = 0; i < 8; i++) {
        testing_rng_t rng = testing_rng(testing_seed() + (uint64_t)i);
        char what[80];
        case_t c = make_case(&rng, i % 2 ? 1 : 8, i / 4 ? EPMOE_F16 : EPMOE_BF16, i / 2 % 2);
        static results_t first, second;
        for (int32_t routing = 1; routing <= 3; routing++) {
            snprintf(what, sizeof what, "k %d, %s, forced %d, routing %d", i % 2 ? 1 : 8, i / 4 ? "fp16" : "bf16",
                     i / 2 % 2, routing);
            put_inputs(&c, &rng, routing);
            replay_equals_eager(&c, what, routing == 1 ? &first : &second);
            if (routing < 3) expect_ids(&c, routing == 1 ? &first : &second, routing, what);
            if (routing > 1)
                cr_expect(memcmp(first.y, second.y, sizeof first.y), "%s: y is that of the first inputs", what);
        }
        free_case(&c);
    }
}

Test(gpu_graph, one_graph_serves_every_token_count)
{
    GPU_TEST_NEEDS_DEVICE();
    static const int32_t counts[] = {16, 5, 0, 1, 15, 7, 16};
    for (int i = 0; i < 4; i++) {
        testing_rng_t rng = testing_rng(testing_seed() + (uint64_t)i);
        case_t c = make_case(&rng, 8, i / 2 ? EPMOE_F16 : EPMOE_BF16, i % 2);
        for (size_t j = 0; j < sizeof counts / sizeof counts[0]; j++) {
            static results_t out;
            char what[64];
            int32_t n = counts[j];
            snprintf(what, sizeof what, "case %d, %d tokens", i, n);
            put_inputs(&c, &rng, testing_range(&rng, 1, 3));
            gpu_put(c.tokens_dev, &n, sizeof n);
            replay_equals_eager(&c, what, &out);
            cr_expect(gpu_is_poison(c.tokens.y, n * kD * 2, (kTokens - n) * kD * 2), "%s: y past them", what);
            cr_expect(gpu_is_poison(c.tokens.logits_out, n * kE * 4, (kTokens - n) * kE * 4), "%s: logits past them",
                      what);
            cr_expect(gpu_is_poison(c.tokens.ids_out, n * 8 * 4, (kTokens - n) * 8 * 4), "%s: ids past them", what);
            cr_expect(gpu_is_poison(c.tokens.weights_out, n * 8 * 4, (kTokens - n) * 8 * 4), "%s: weights past them",
                      what);
            for (int32_t t = 0; t < n; t++)
                cr_expect(!gpu_is_poison(c.tokens.y, t * kD * 2, kD * 2), "%s: token %d was not computed", what, t);
        }
        free_case(&c);
    }
}

/* Rows as a graph's padding may leave them. */
static bool is_nan_row(int32_t t) { return t == 2 || t == 3 || t == 7 || t == 11 || t == 15; }

static void put_nan_rows(const case_t *c)
{
    uint16_t row[kD];
    float logits[kE];
    for (int32_t i = 0; i < kD; i++) epmoei_store(row, c->model.config.dtype, i, NAN);
    for (int32_t e = 0; e < kE; e++) logits[e] = NAN;
    for (int32_t t = 0; t < kTokens; t++) {
        if (!is_nan_row(t)) continue;
        gpu_put((char *)c->tokens.x + t * kD * 2, row, sizeof row);
        gpu_put(c->tokens.logits + t * kE, logits, sizeof logits);
    }
}

Test(gpu_graph, nan_rows_stay_among_themselves)
{
    GPU_TEST_NEEDS_DEVICE();
    for (int i = 0; i < 4; i++) {
        testing_rng_t rng = testing_rng(testing_seed() + (uint64_t)i);
        case_t c = make_case(&rng, 8, i / 2 ? EPMOE_F16 : EPMOE_BF16, i % 2);
        epmoe_dtype_t dtype = c.model.config.dtype;
        static results_t clean, out;
        put_inputs(&c, &rng, 2);
        replay_equals_eager(&c, "finite rows", &clean);
        put_nan_rows(&c);
        replay_equals_eager(&c, "NaN rows", &out);
        for (int32_t t = 0; t < kTokens; t++) {
            if (is_nan_row(t)) {
                for (int32_t j = 0; j < 8; j++) {
                    cr_expect_eq(out.ids[t * 8 + j], j, "case %d, NaN token %d: id %d", i, t, out.ids[t * 8 + j]);
                    cr_expect(out.weights[t * 8 + j] == 0, "case %d, NaN token %d: weight %g", i, t,
                              (double)out.weights[t * 8 + j]);
                }
                continue;
            }
            double expected[kD];
            for (int32_t j = 0; j < kD; j++) expected[j] = (double)epmoei_load(clean.y, dtype, t * kD + j);
            double error = testing_row_error(out.y + t * kD, dtype, expected, 1, kD);
            cr_expect(error <= 1e-2, "case %d: token %d moved by %g beside NaN rows", i, t, error);
            cr_expect_arr_eq(out.ids + t * 8, clean.ids + t * 8, 8 * sizeof out.ids[0], "case %d, token %d", i, t);
        }
        free_case(&c);
    }
}

/* What lies past the actual tokens is not even read. */
Test(gpu_graph, nan_in_the_padding_changes_nothing)
{
    GPU_TEST_NEEDS_DEVICE();
    testing_rng_t rng = testing_rng(testing_seed());
    case_t c = make_case(&rng, 8, EPMOE_BF16, false);
    static results_t clean, out;
    const int32_t n = 11;
    uint16_t nan_rows[(kTokens - 11) * kD];
    memset(nan_rows, 0xFF, sizeof nan_rows);
    put_inputs(&c, &rng, 1);
    gpu_put(c.tokens_dev, &n, sizeof n);
    replay(&c, &clean);
    gpu_put((char *)c.tokens.x + n * kD * 2, nan_rows, sizeof nan_rows);
    replay(&c, &out);
    cr_expect(gpu_same("y", out.y, clean.y, kTokens * kD, 2, kD));
    cr_expect(gpu_same("ids", out.ids, clean.ids, kTokens * 8, 4, 8));
    cr_expect(gpu_same("weights", out.weights, clean.weights, kTokens * 8, 4, 8));
    for (int32_t i = 0; i < n * kD; i++)
        cr_assert(isfinite((double)epmoei_load(out.y, EPMOE_BF16, i)), "y[%d,%d]", i / kD, i % kD);
    free_case(&c);
}

Test(gpu_graph, one_hundred_replays_give_the_same_bits)
{
    GPU_TEST_NEEDS_DEVICE();
    enum { kMany = 150, kBytes = kMany * kD * 2 };
    testing_rng_t rng = testing_rng(testing_seed());
    epmoe_layer_config_t config = graph_config(8, EPMOE_BF16);
    oracle_model_t model = gpu_model(&rng, &config);
    epmoe_layer_t *layer = gpu_layer_with(&model);
    cr_assert_not_null(layer);
    gpu_tokens_t tokens = gpu_tokens(&rng, &config, kMany);
    epmoe_forward_args_t args = EPMOE_FORWARD_ARGS_INIT;
    args.num_tokens = kMany, args.x = tokens.x, args.y = tokens.y;
    cudaGraphExec_t exec = capture(layer, &args);
    cr_assert_eq(epmoe_layer_forward_args(layer, &args, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
    void *first = gpu_get_new(tokens.y, kBytes);
    for (int32_t i = 0; i < 100; i++) {
        gpu_poison(tokens.y, kBytes);
        CUDA_OK(cudaGraphLaunch(exec, gpu_stream()));
        cr_assert(gpu_wait());
        void *y = gpu_get_new(tokens.y, kBytes);
        cr_assert(gpu_same("y", y, first, kBytes / 2, 2, kD), "replay %d", i);
        free(y);
    }
    CUDA_OK(cudaGraphExecDestroy(exec));
    free(first);
    cr_expect(gpu_tokens_free(&tokens));
    epmoe_layer_destroy(layer);
    oracle_model_free(&model);
}

/* -------------------------------------------------------------------------------------------------------- events */

/* In the order in which one rank ends them. */
static const epmoe_stage_t stages[] = {EPMOE_STAGE_ROUTER, EPMOE_STAGE_SHARED, EPMOE_STAGE_ALIGN,
                                       EPMOE_STAGE_GEMM1,  EPMOE_STAGE_GEMM2,  EPMOE_STAGE_COMBINE};

static void expect_times(cudaEvent_t *events, const char *what)
{
    cudaEvent_t before = events[EPMOE_STAGE_COUNT];
    for (size_t i = 0; i < sizeof stages / sizeof stages[0]; i++) {
        float ms = NAN;
        CUDA_OK(cudaEventElapsedTime(&ms, before, events[stages[i]]));
        cr_expect(ms > 0 && ms < 1000, "%s: stage %s took %g ms", what, epmoe_stage_string(stages[i]), (double)ms);
        before = events[stages[i]];
    }
}

Test(gpu_graph, stage_events)
{
    GPU_TEST_NEEDS_DEVICE();
    testing_rng_t rng = testing_rng(testing_seed());
    epmoe_layer_config_t config = graph_config(8, EPMOE_BF16);
    oracle_model_t model = gpu_model(&rng, &config);
    epmoe_layer_t *layer = gpu_layer_with(&model);
    cr_assert_not_null(layer);
    gpu_tokens_t tokens = gpu_tokens(&rng, &config, 150);
    cudaEvent_t events[EPMOE_STAGE_COUNT + 1];
    void *handles[EPMOE_STAGE_COUNT + 1];
    for (int32_t i = 0; i <= EPMOE_STAGE_COUNT; i++) {
        CUDA_OK(cudaEventCreate(&events[i]));
        handles[i] = events[i];
    }
    handles[EPMOE_STAGE_ACT] = handles[EPMOE_STAGE_DISPATCH] = NULL;
    epmoe_forward_args_t args = EPMOE_FORWARD_ARGS_INIT;
    args.num_tokens = 150, args.x = tokens.x, args.y = tokens.y, args.stage_events = handles;
    for (int32_t i = 0; i < 3; i++) {
        cr_assert_eq(epmoe_layer_forward_args(layer, &args, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
        cr_assert(gpu_wait());
        expect_times(events, "eager");
    }
    cudaGraphExec_t exec = capture(layer, &args);
    for (int32_t i = 0; i < 3; i++) {
        CUDA_OK(cudaGraphLaunch(exec, gpu_stream()));
        cr_assert(gpu_wait());
        expect_times(events, "in a graph");
    }
    CUDA_OK(cudaGraphExecDestroy(exec));
    for (int32_t i = 0; i <= EPMOE_STAGE_COUNT; i++) CUDA_OK(cudaEventDestroy(events[i]));
    cr_expect(gpu_tokens_free(&tokens));
    epmoe_layer_destroy(layer);
    oracle_model_free(&model);
}

/* A call that is refused during a capture leaves the stream and the layer usable. */
Test(gpu_graph, a_refused_call_in_a_capture)
{
    GPU_TEST_NEEDS_DEVICE();
    testing_rng_t rng = testing_rng(testing_seed());
    case_t c = make_case(&rng, 8, EPMOE_BF16, false);
    static results_t first, out;
    put_inputs(&c, &rng, 3);
    replay(&c, &first);
    epmoe_forward_args_t bad = c.args;
    bad.x = (char *)c.tokens.x + 2;
    cudaGraph_t graph = NULL;
    CUDA_OK(cudaStreamBeginCapture(gpu_stream(), cudaStreamCaptureModeGlobal));
    epmoe_status_t status = epmoe_layer_forward_args(c.layer, &bad, gpu_stream());
    cudaError_t ended = cudaStreamEndCapture(gpu_stream(), &graph);
    cr_expect_eq(status, EPMOE_ERROR_INVALID_ARGUMENT, "%s", epmoe_status_string(status));
    cr_expect_eq(ended, cudaSuccess, "%s", cudaGetErrorString(ended));
    if (graph) CUDA_OK(cudaGraphDestroy(graph));
    replay_equals_eager(&c, "after a refused capture", &out);
    cr_expect(gpu_same("y", out.y, first.y, kTokens * kD, 2, kD));
    free_case(&c);
}
