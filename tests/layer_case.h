/* Layers for tests: random configs of every router rule, and one checked forward. */
#ifndef EPMOE_LAYER_CASE_H
#define EPMOE_LAYER_CASE_H

#include "tests/moe_oracle.h"

/* Every rule and shape that a layer may have, small; a dense MLP now and then if that is allowed. */
epmoe_layer_config_t layer_case_config(testing_rng_t *rng, int32_t max_tokens, bool allow_dense);
oracle_formats_t layer_case_formats(testing_rng_t *rng);
/* One line that says what the config is. */
const char *layer_case_text(const epmoe_layer_config_t *config);

typedef struct layer_forward_t {
    int32_t num_tokens; /* the bound; tokens of it with num_tokens_dev */
    int32_t tokens;
    bool forced_logits, residual, by_num_tokens_dev;
    enum { Y_APART, Y_IS_X, Y_IS_RESIDUAL } y;
} layer_forward_t;

/* Runs `layer`, which holds the model's weights, on random tokens, and compares the router's logits, ids and weights
 * and y with the oracle, what must not be written with poison, and the same call without the optional outputs with the
 * first, bit by bit. False after saying on stderr what is wrong. */
bool layer_case_check(epmoe_layer_t *layer, const oracle_model_t *model, const layer_forward_t *forward,
                      testing_rng_t *rng);

/* Whether a block of the library's is one of `bytes`, as far as the allocator tells: it rounds up, large blocks to huge
 * pages. NULL counts as 0 bytes. Says on stderr what is not. */
bool layer_case_is_block(void *block, int64_t bytes);

#endif
