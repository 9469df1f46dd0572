/* A layer over ranks when one of them fails: every rank gets an error, nobody waits, and all goes on afterwards.
 * Started by test_mpi_layer: mpi_layer_faults SEED. */
#include "tests/layer_ranks.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { kTokens = 4, kHidden = 24, kTopK = 2 };

static epmoe_layer_config_t some_config(const ranks_t *ranks)
{
    epmoe_layer_config_t c = EPMOE_LAYER_CONFIG_INIT;
    c.hidden = kHidden, c.intermediate = 12, c.num_experts = 2 * ranks->program.size + 1, c.top_k = kTopK;
    c.shared_intermediate = 8;
    c.dtype = EPMOE_F32;
    c.max_tokens = 6;
    return c;
}

static const int32_t kTooMany = 5;

typedef struct bad_call_t {
    const char *what;
    epmoe_status_t status;
    const char *word;
} bad_call_t;

static const bad_call_t kBadForwards[] = {
    {"too many tokens", EPMOE_ERROR_INVALID_ARGUMENT, "num_tokens is 7"},
    {"x NULL", EPMOE_ERROR_INVALID_ARGUMENT, "x is NULL"},
    {"y NULL", EPMOE_ERROR_INVALID_ARGUMENT, "y is NULL"},
    {"negative tokens", EPMOE_ERROR_INVALID_ARGUMENT, "num_tokens is -1"},
    {"num_tokens_dev", EPMOE_ERROR_INVALID_ARGUMENT, "*num_tokens_dev is 5"},
    {"struct_size", EPMOE_ERROR_INVALID_ARGUMENT, "struct_size is 0"},
    {"args NULL", EPMOE_ERROR_INVALID_ARGUMENT, "args is NULL"},
};

static epmoe_status_t bad_forward(epmoe_layer_t *layer, int32_t i, epmoe_forward_args_t args)
{
    switch (i) {
    case 0: args.num_tokens = 7; break;
    case 1: args.x = NULL; break;
    case 2: args.y = NULL; break;
    case 3: args.num_tokens = -1; break;
    case 4: args.num_tokens_dev = &kTooMany; break;
    case 5: args.struct_size = 0; break;
    default: return epmoe_layer_forward_args(layer, NULL, NULL);
    }
    return epmoe_layer_forward_args(layer, &args, NULL);
}

static void bad_forwards(ranks_t *ranks)
{
    epmoe_layer_config_t config = some_config(ranks);
    ranks_pair_t pair = ranks_pair(ranks, &config, 1);
    epmoe_layer_t *bare = ranks_create(ranks, &config);
    if (!pair.layer || !pair.alone || !bare) return;
    float x[kTokens * kHidden], first[kTokens * kHidden], y[kTokens * kHidden];
    testing_fill_normal(&ranks->own, x, EPMOE_F32, kTokens * kHidden, 1);
    epmoe_forward_args_t args = EPMOE_FORWARD_ARGS_INIT;
    args.num_tokens = kTokens, args.x = x, args.y = first;
    ranks_expect(ranks, "forward", epmoe_layer_forward_args(pair.layer, &args, NULL), EPMOE_OK, "");
    args.y = y;
    for (int32_t i = 0; i < (int32_t)(sizeof kBadForwards / sizeof kBadForwards[0]); i++) {
        int32_t culprit = ranks_culprit(ranks, i);
        bool bad = ranks->program.rank == culprit;
        for (int32_t j = 0; j < kTokens * kHidden; j++) y[j] = 77;
        epmoe_status_t status =
            bad ? bad_forward(pair.layer, i, args) : epmoe_layer_forward_args(pair.layer, &args, NULL);
        ranks_expect_failure(ranks, kBadForwards[i].what, status, culprit, kBadForwards[i].status,
                             kBadForwards[i].word);
        for (int32_t j = 0; j < kTokens * kHidden; j++)
            if (!ranks_check(ranks, y[j] == 77, "%s: y was written", kBadForwards[i].what)) break;
        ranks_expect(ranks, "forward after an error", epmoe_layer_forward_args(pair.layer, &args, NULL), EPMOE_OK, "");
        ranks_check(ranks, !memcmp(y, first, sizeof y), "after %s y is another", kBadForwards[i].what);
    }
    /* Weights on all ranks but one. */
    int32_t culprit = ranks_culprit(ranks, 2);
    if (ranks->program.rank != culprit)
        ranks_expect(ranks, "weights", epmoe_layer_set_random_weights(bare, 1), EPMOE_OK, "");
    ranks_expect_failure(ranks, "no weights", epmoe_layer_forward_args(bare, &args, NULL), culprit,
                         EPMOE_ERROR_BAD_STATE, "no weights");
    if (ranks->program.rank == culprit)
        ranks_expect(ranks, "weights", epmoe_layer_set_random_weights(bare, 1), EPMOE_OK, "");
    ranks_expect(ranks, "forward with weights", epmoe_layer_forward_args(bare, &args, NULL), EPMOE_OK, "");
    ranks_check(ranks, !memcmp(y, first, sizeof y), "the late weights are others");
    epmoe_layer_destroy(bare);
    ranks_pair_free(&pair);
}

/* A config that differs on one rank. */
static void different_configs(ranks_t *ranks)
{
    const struct {
        const char *field, *here, *there;
    } fields[] = {{"hidden", "24", "26"},       {"intermediate", "12", "13"}, {"scoring", "0", "1"},
                  {"routed_scale", "1", "2.5"}, {"renormalize", "0", "1"},    {"dtype", "1", "2"},
                  {"shared_gated", "0", "1"},   {"activation", "0", "2"},     {"limit", "0", "0.5"},
                  {"top_k", "2", "1"}};
    for (int32_t i = 0; i < (int32_t)(sizeof fields / sizeof fields[0]) && ranks->program.size > 1; i++) {
        epmoe_layer_config_t c = some_config(ranks);
        epmoe_layer_t *layer = (epmoe_layer_t *)&c;
        if (ranks->program.rank == ranks_culprit(ranks, i)) {
            c.hidden += 2 * (i == 0), c.intermediate += i == 1;
            c.scoring = i == 2 ? EPMOE_SCORING_SIGMOID : EPMOE_SCORING_SOFTMAX;
            c.routed_scale = i == 3 ? 2.5f : 0;
            c.renormalize = i == 4;
            c.dtype = i == 5 ? EPMOE_BF16 : EPMOE_F32;
            c.shared_gated = i == 6;
            c.activation = i == 7 ? EPMOE_ACTIVATION_GELU_TANH : EPMOE_ACTIVATION_SILU;
            c.limit = i == 8 ? 0.5f : 0;
            c.top_k -= i == 9;
        }
        char here[64], there[64];
        snprintf(here, sizeof here, " is %s on rank ", fields[i].here);
        snprintf(there, sizeof there, "%s on rank ", fields[i].there);
        epmoe_status_t status = epmoe_layer_create(&c, ranks->program.comm, &layer);
        ranks_expect(ranks, fields[i].field, status, EPMOE_ERROR_MISMATCH, fields[i].field);
        const char *text = epmoe_last_error();
        /* Rank 0 comes first in the text; it may be the one that differs. */
        if (ranks_culprit(ranks, i) == 0) {
            snprintf(here, sizeof here, " is %s on rank 0", fields[i].there);
            snprintf(there, sizeof there, " and %s on rank ", fields[i].here);
        }
        ranks_check(ranks, strstr(text, here) && strstr(text, there), "'%s' lacks '%s' or '%s'", text, here, there);
        ranks_check(ranks, !layer, "%s: a layer was made", fields[i].field);
    }
}

static void bad_creates(ranks_t *ranks)
{
    const char *words[] = {"config.hidden is 0", "config.top_k is 33", "config is NULL", "layer is NULL",
                           "config.weight_format is 99"};
    for (int32_t i = 0; i < 5; i++) {
        int32_t culprit = ranks_culprit(ranks, i);
        bool bad = ranks->program.rank == culprit;
        epmoe_layer_config_t c = some_config(ranks);
        epmoe_layer_t *layer = NULL;
        if (bad && i == 0) c.hidden = 0;
        if (bad && i == 1) c.top_k = 33;
        if (bad && i == 4) c.weight_format = (epmoe_format_t)99;
        epmoe_status_t status =
            epmoe_layer_create(bad && i == 2 ? NULL : &c, ranks->program.comm, bad && i == 3 ? NULL : &layer);
        ranks_expect_failure(ranks, words[i], status, culprit, EPMOE_ERROR_INVALID_ARGUMENT, words[i]);
        ranks_check(ranks, !layer, "%s: a layer was made", words[i]);
    }
}

/* Each allocation of one rank fails once. */
static void out_of_memory_in_create(ranks_t *ranks)
{
    for (int32_t which = 0; which < 2; which++) {
        int32_t culprit = ranks_culprit(ranks, which), failures = 0;
        int64_t live = epmoei_alloc_live();
        epmoe_layer_config_t c = some_config(ranks);
        for (int32_t n = 1;; n++) {
            epmoe_layer_t *layer = (epmoe_layer_t *)&c;
            if (ranks->program.rank == culprit) epmoei_alloc_fail_at(n);
            epmoe_status_t status = epmoe_layer_create(&c, ranks->program.comm, &layer);
            epmoei_alloc_fail_at(0);
            if (status == EPMOE_OK) {
                epmoe_layer_destroy(layer);
                break;
            }
            failures++;
            ranks_expect_failure(ranks, "out of memory", status, culprit, EPMOE_ERROR_OUT_OF_MEMORY, "no memory for");
            ranks_check(ranks, !layer, "allocation %d: a layer was made", n);
            ranks_check(ranks, epmoei_alloc_live() == live, "allocation %d leaks", n);
        }
        ranks_check(ranks, failures >= 3, "only %d allocations failed", failures);
        ranks_check(ranks, epmoei_alloc_live() == live, "destroy leaks");
    }
}

/* More rows than one rank accepts. */
static void capacity(ranks_t *ranks)
{
    epmoe_layer_config_t config = some_config(ranks);
    if (ranks->program.rank == 0) config.capacity = 5;
    ranks_pair_t pair = ranks_pair(ranks, &config, 4);
    if (!pair.layer || !pair.alone) return;
    float *to_first = ranks_logits_to(6, &config, 0);
    float *to_last = ranks_logits_to(6, &config, config.num_experts - kTopK);
    float x[6 * kHidden], y[6 * kHidden];
    testing_fill_normal(&ranks->own, x, EPMOE_F32, 6 * kHidden, 1);
    for (int32_t i = 0; i < 3; i++) {
        epmoe_forward_args_t args = EPMOE_FORWARD_ARGS_INIT;
        args.num_tokens = 6, args.x = x, args.y = y, args.logits = to_first;
        for (int32_t j = 0; j < 6 * kHidden; j++) y[j] = 77;
        ranks_expect(ranks, "capacity", epmoe_layer_forward_args(pair.layer, &args, NULL), EPMOE_ERROR_CAPACITY,
                     "capacity is");
        for (int32_t j = 0; j < 6 * kHidden; j++)
            if (!ranks_check(ranks, y[j] == 77, "capacity: y was written")) break;
        ranks_call_t fits = {.tokens = 5, .logits = to_last};
        ranks_compare(ranks, &pair, &fits);
    }
    free(to_first), free(to_last);
    ranks_pair_free(&pair);
}

int main(int argc, char **argv)
{
    ranks_t ranks = ranks_start("mpi_layer_faults", &argc, &argv);
    int64_t live = epmoei_alloc_live();
    bad_forwards(&ranks);
    different_configs(&ranks);
    bad_creates(&ranks);
    out_of_memory_in_create(&ranks);
    capacity(&ranks);
    ranks_check(&ranks, epmoei_alloc_live() == live, "%lld allocations leak", (long long)(epmoei_alloc_live() - live));
    ranks_check(&ranks, epmoe_comm_get_async_error(ranks.program.comm) == EPMOE_OK, "the communicator has failed");
    return ranks_finish(&ranks);
}
