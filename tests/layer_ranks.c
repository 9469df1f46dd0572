#include "tests/layer_ranks.h"

#include "moe/layer.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#define TIMEOUT_S 20

ranks_t ranks_start(const char *name, int *argc, char ***argv)
{
    ranks_t ranks = {.seed = 0};
    int code = program_start(&ranks.program, name, argc, argv);
    if (code) exit(program_finish(&ranks.program, code));
    epmoe_comm_config_t config = EPMOE_COMM_CONFIG_INIT;
    config.timeout_s = TIMEOUT_S;
    epmoe_status_t status = program_connect(&ranks.program, &config);
    if (status != EPMOE_OK) exit(program_finish(&ranks.program, program_report(&ranks.program, status)));
    ranks.seed = *argc > 1 ? strtoull((*argv)[1], NULL, 10) : 1;
    ranks.rng = testing_rng(ranks.seed);
    ranks.own = testing_rng(ranks.seed * 1000 + (uint64_t)ranks.program.rank + 1);
    return ranks;
}

int ranks_finish(ranks_t *ranks)
{
    int code = program_agree_on_code(&ranks->program, ranks->failures ? PROGRAM_FAILED : PROGRAM_OK);
    if (ranks->program.rank == 0) printf("seed %llu checks %d\n", (unsigned long long)ranks->seed, ranks->checks);
    return program_finish(&ranks->program, code);
}

bool ranks_check(ranks_t *ranks, bool good, const char *format, ...)
{
    ranks->checks++;
    if (good) return true;
    if (ranks->failures++ > 20) return false;
    char text[1200];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    program_error(&ranks->program, PROGRAM_FAILED, "%s", text);
    return false;
}

void ranks_expect(ranks_t *ranks, const char *what, epmoe_status_t status, epmoe_status_t expected, const char *word)
{
    const char *text = status == EPMOE_OK ? "" : epmoe_last_error();
    ranks_check(ranks, status == expected && strstr(text, word), "%s: status '%s', expected '%s' with '%s': %s", what,
                epmoe_status_string(status), epmoe_status_string(expected), word, text);
}

void ranks_expect_failure(ranks_t *ranks, const char *what, epmoe_status_t status, int32_t culprit,
                          epmoe_status_t expected, const char *word)
{
    char name[32];
    snprintf(name, sizeof name, "rank %d", culprit);
    if (ranks->program.rank == culprit) {
        ranks_expect(ranks, what, status, expected, word);
        return;
    }
    ranks_expect(ranks, what, status, EPMOE_ERROR_PEER, word);
    ranks_check(ranks, strstr(epmoe_last_error(), name), "%s: '%s' lacks '%s'", what, epmoe_last_error(), name);
}

void ranks_place(ranks_t *ranks, epmoe_layer_config_t *config, int32_t placement[RANKS_MAX_PHYSICAL])
{
    int32_t n = config->num_experts;
    config->num_physical = n + testing_range(&ranks->rng, 0, n);
    config->placement = placement;
    for (int32_t p = 0; p < config->num_physical; p++) placement[p] = p < n ? p : testing_range(&ranks->rng, 0, n - 1);
    for (int32_t p = config->num_physical - 1; p > 0; p--) {
        int32_t other = testing_range(&ranks->rng, 0, p), expert = placement[p];
        placement[p] = placement[other];
        placement[other] = expert;
    }
}

/* Of `ids`, in place of what the layers added. */
static bool is_load_of(const int64_t *load, const int32_t *ids, int64_t slots, int32_t num_experts)
{
    int64_t *due = calloc((size_t)num_experts + 1, 8);
    for (int64_t s = 0; s < slots; s++) due[ids[s]]++;
    bool same = !memcmp(load, due, (size_t)num_experts * 8) && testing_guards_intact(load);
    free(due);
    return same;
}

epmoe_layer_t *ranks_create(ranks_t *ranks, const epmoe_layer_config_t *config)
{
    epmoe_layer_t *layer = NULL;
    epmoe_status_t status = epmoe_layer_create(config, ranks->program.comm, &layer);
    ranks_check(ranks, status == EPMOE_OK, "create: %s (%s)", epmoe_last_error(), layer_case_text(config));
    return layer;
}

epmoe_layer_t *ranks_create_alone(ranks_t *ranks, const epmoe_layer_config_t *config)
{
    epmoe_layer_config_t own = *config;
    epmoe_layer_t *layer = NULL;
    own.capacity = 0;
    own.placement = NULL;
    own.num_physical = 0;
    epmoe_status_t status = epmoe_layer_create(&own, NULL, &layer);
    ranks_check(ranks, status == EPMOE_OK, "create alone: %s (%s)", epmoe_last_error(), layer_case_text(config));
    return layer;
}

ranks_pair_t ranks_pair(ranks_t *ranks, const epmoe_layer_config_t *config, uint64_t seed)
{
    ranks_pair_t pair = {*config, ranks_create(ranks, config), ranks_create_alone(ranks, config)};
    if (!pair.layer || !pair.alone) return pair;
    ranks_check(ranks, epmoe_layer_set_random_weights(pair.layer, seed) == EPMOE_OK, "%s", epmoe_last_error());
    ranks_check(ranks, epmoe_layer_set_random_weights(pair.alone, seed) == EPMOE_OK, "%s", epmoe_last_error());
    return pair;
}

void ranks_pair_free(ranks_pair_t *pair)
{
    epmoe_layer_destroy(pair->layer);
    epmoe_layer_destroy(pair->alone);
    pair->layer = pair->alone = NULL;
}

/* "Wrong" as docs/design.md has it; fp16 partial rows travel as fp32, so that one rounding is left. */
static double tolerance(epmoe_dtype_t dtype) { return dtype == EPMOE_F32 ? 1e-5 : dtype == EPMOE_F16 ? 2e-3 : 1.6e-2; }

void ranks_compare(ranks_t *ranks, const ranks_pair_t *pair, const ranks_call_t *call)
{
    const epmoe_layer_config_t *c = &pair->config;
    if (!pair->layer || !pair->alone) return;
    int64_t elements = (int64_t)call->tokens * c->hidden, bytes = elements * epmoe_dtype_size(c->dtype);
    int64_t k = c->top_k, slots = call->tokens * k;
    void *x = testing_buffer(bytes, 0), *residual = testing_buffer(bytes, 0), *y = testing_buffer(bytes, 0);
    void *first = malloc((size_t)bytes + 1), *other = malloc((size_t)bytes + 1);
    int32_t *ids = testing_buffer(slots * 4, 0), *alone_ids = testing_buffer(slots * 4, 0);
    float *weights = testing_buffer(slots * 4, 0), *alone_weights = testing_buffer(slots * 4, 0);
    double *ref = malloc((size_t)elements * sizeof *ref + 1);
    int64_t *load = testing_buffer(c->num_experts * 8, 0), *alone_load = testing_buffer(c->num_experts * 8, 0);
    memset(load, 0, (size_t)c->num_experts * 8);
    memset(alone_load, 0, (size_t)c->num_experts * 8);
    testing_fill_normal(&ranks->own, x, c->dtype, elements, 1);
    testing_fill_normal(&ranks->own, residual, c->dtype, elements, 1);

    epmoe_forward_args_t args = EPMOE_FORWARD_ARGS_INIT;
    args.num_tokens = call->by_num_tokens_dev ? c->max_tokens : call->tokens;
    args.num_tokens_dev = call->by_num_tokens_dev ? &call->tokens : NULL;
    args.x = call->tokens ? x : NULL, args.y = call->tokens ? other : NULL;
    args.residual = call->residual && call->tokens ? residual : NULL;
    args.logits = call->logits;
    args.ids_out = alone_ids, args.weights_out = alone_weights, args.expert_load = alone_load;
    epmoe_status_t status = epmoe_layer_forward_args(pair->alone, &args, NULL);
    ranks_check(ranks, status == EPMOE_OK, "alone: %s", epmoe_last_error());
    for (int64_t i = 0; i < elements; i++) ref[i] = (double)epmoei_load(other, c->dtype, i);

    args.y = call->tokens ? y : NULL, args.ids_out = ids, args.weights_out = weights, args.expert_load = load;
    status = epmoe_layer_forward_args(pair->layer, &args, NULL);
    ranks_check(ranks, status == EPMOE_OK, "%s (%s)", epmoe_last_error(), layer_case_text(c));
    double error = testing_row_error(y, c->dtype, ref, call->tokens, c->hidden);
    ranks_check(ranks, error <= tolerance(c->dtype), "%d tokens: off by %g (%s)", call->tokens, error,
                layer_case_text(c));
    ranks_check(ranks, !memcmp(ids, alone_ids, (size_t)slots * 4), "ids differ (%s)", layer_case_text(c));
    ranks_check(ranks, !memcmp(weights, alone_weights, (size_t)slots * 4), "weights differ (%s)", layer_case_text(c));
    ranks_check(ranks, testing_guards_intact(y) && testing_guards_intact(ids), "guard (%s)", layer_case_text(c));

    if (c->num_experts)
        ranks_check(ranks,
                    is_load_of(load, ids, slots, c->num_experts) && is_load_of(alone_load, ids, slots, c->num_experts),
                    "expert_load (%s)", layer_case_text(c));
    args.expert_load = NULL;
    memcpy(first, y, (size_t)bytes);
    if (call->in_place && call->tokens) args.y = call->residual ? residual : x;
    status = epmoe_layer_forward_args(pair->layer, &args, NULL);
    ranks_check(ranks, status == EPMOE_OK && (!bytes || !memcmp(args.y, first, (size_t)bytes)),
                "the second run is another (%s)", layer_case_text(c));
    void *buffers[] = {x, residual, y, ids, alone_ids, weights, alone_weights, load, alone_load};
    for (size_t i = 0; i < sizeof buffers / sizeof buffers[0]; i++) testing_buffer_free(buffers[i]);
    free(first), free(other), free(ref);
}

float *ranks_logits_to(int32_t tokens, const epmoe_layer_config_t *config, int32_t first)
{
    int32_t n = config->num_experts;
    float *logits = malloc((size_t)tokens * (size_t)n * 4 + 1);
    for (int64_t i = 0; i < (int64_t)tokens * n; i++) {
        int32_t e = (int32_t)(i % n);
        logits[i] = e >= first && e < first + config->top_k ? 3 - 0.25f * (float)(e - first) : -30;
    }
    return logits;
}
