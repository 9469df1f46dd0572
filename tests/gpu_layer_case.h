/* Layers on a device for tests: a model in formats that the device computes on, and one forward checked against double
 * precision, or against a layer on the CPU. */
#ifndef EPMOE_GPU_LAYER_CASE_H
#define EPMOE_GPU_LAYER_CASE_H

#include "tests/gpu_testing.h"
#include "tests/moe_oracle.h"

/* Every weight of the model in the config's dtype. */
oracle_model_t gpu_model(testing_rng_t *rng, const epmoe_layer_config_t *config);
/* A layer on the CUDA backend, without weights, or with the model's; NULL after a line on stderr. */
epmoe_layer_t *gpu_layer(const epmoe_layer_config_t *config);
epmoe_layer_t *gpu_layer_with(const oracle_model_t *model);
/* A random config of every rule that a layer may have, of small sizes that are multiples of 8. */
epmoe_layer_config_t gpu_random_config(testing_rng_t *rng, int32_t max_tokens);
/* One line that says what the config is. */
const char *gpu_config_text(const epmoe_layer_config_t *config);

/* Device buffers of forward's arguments; what a layer does not have is NULL. */
typedef struct gpu_tokens_t {
    void *x, *y, *residual;
    float *logits, *logits_out, *weights_out;
    int32_t *ids_out;
} gpu_tokens_t;
/* x, residual and logits random, the rest poison. */
gpu_tokens_t gpu_tokens(testing_rng_t *rng, const epmoe_layer_config_t *config, int32_t num_tokens);
/* Frees; false when a guard band changed. */
bool gpu_tokens_free(gpu_tokens_t *tokens);

typedef struct gpu_forward_t {
    int32_t num_tokens; /* the bound; the actual number is `tokens` with by_num_tokens_dev */
    int32_t tokens;
    bool forced_logits, residual, by_num_tokens_dev;
    enum { GPU_Y_APART, GPU_Y_IS_X, GPU_Y_IS_RESIDUAL } y;
} gpu_forward_t;

/* Runs the layer, which holds the model's weights, on random tokens, and compares the router's logits, ids and weights
 * and y with the oracle, what must not be written with poison, and the same call without the optional outputs with the
 * first, bit by bit. False after saying on stderr what is wrong and where. */
bool gpu_layer_check(epmoe_layer_t *layer, const oracle_model_t *model, const gpu_forward_t *forward,
                     testing_rng_t *rng);

/* A layer on the CPU, without weights, and its communicator, to be destroyed after it. NULL after a line on stderr. */
epmoe_layer_t *gpu_layer_on_cpu(const epmoe_layer_config_t *config, epmoe_comm_t **comm);
/* How far y is from that of a layer on the CPU with the same weights, for random tokens with the device's routing. */
typedef struct gpu_error_t {
    double row; /* testing_row_error */
    double all; /* testing_rel_error */
} gpu_error_t;
/* INFINITY after a line on stderr when a call failed or a token went to other experts. */
gpu_error_t gpu_layer_error(epmoe_layer_t *layer, epmoe_layer_t *on_cpu, testing_rng_t *rng, int32_t num_tokens);

#endif
