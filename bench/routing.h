/* Forced routing: which experts each token goes to, and router logits that make the router choose exactly these.
 *
 * Everything is a function of (seed, global token index): ranks draw their own tokens, and the draw of a token does not
 * depend on how many ranks there are.
 *   uniform     k distinct experts. With expert groups the router can only choose within topk_group of them, so the
 *               groups are drawn first, then the experts within these.
 *   zipf        k distinct experts drawn one after the other with probability proportional to (i+1)^-S, i the expert's
 *               place in a seeded permutation. With groups: once topk_group groups have been drawn from, only their
 *               experts are drawn.
 *   one-expert  experts 0..k-1 for every token.
 *   file        a JSON list of k ids per line, one line per token, the tokens of rank 0 first. */
#ifndef EPMOE_BENCH_ROUTING_H
#define EPMOE_BENCH_ROUTING_H

#include "base/base.h"

typedef enum routing_kind_t {
    ROUTING_DEFAULT = 0, /* UNIFORM for a model, ROUTER for a checkpoint */
    ROUTING_UNIFORM = 1,
    ROUTING_ZIPF = 2,
    ROUTING_ONE_EXPERT = 3,
    ROUTING_FILE = 4,
    ROUTING_ROUTER = 5, /* not forced: the layer's own logits */
} routing_kind_t;

typedef struct routing_t {
    routing_kind_t kind;
    double exponent;  /* zipf's S */
    const char *path; /* file */
    uint64_t seed;
    const epmoe_layer_config_t *config;
    const float *selection_bias; /* [E], NULL for none */
} routing_t;

/* ids [num_tokens,k] of the global tokens first .. first+num_tokens of total_tokens; each row's ids are distinct and
 * such that the router can choose them together. Local; the same error on every rank. num_tokens 0 (ids may be NULL)
 * only looks for errors. */
epmoe_status_t routing_draw(const routing_t *routing, int64_t total_tokens, int64_t first, int32_t num_tokens,
                            int32_t *ids);

/* logits [num_tokens,E] for which the router chooses `ids`, with scores that differ from slot to slot: the forced ones
 * lie in [-1,1], all others at -inf. INVALID_ARGUMENT where a selection bias is so large that no logits do that. */
epmoe_status_t routing_logits(const routing_t *routing, int64_t first, int32_t num_tokens, const int32_t *ids,
                              float *logits);

const char *routing_kind_string(routing_kind_t kind);

#endif
