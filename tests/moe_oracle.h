/* A MoE block in double precision, written from the contract in epmoe.h: what the tests of the experts and of the layer
 * compare with. Slow and plain; it shares no arithmetic with the library but the rounding of one number.
 *
 * Beside every value goes a bound: how far fp32 arithmetic may lead away from it. It follows the sums of absolute
 * values, so that cancellation needs no tolerance of its own, and it knows where fp32 may round h to the neighbour. */
#ifndef EPMOE_MOE_ORACLE_H
#define EPMOE_MOE_ORACLE_H

#include "tests/testing.h"

/* Experts as epmoe_experts sees them. */
typedef struct oracle_experts_t {
    int32_t hidden, intermediate;
    epmoe_dtype_t dtype; /* what h is rounded to */
    epmoe_activation_t activation;
    float alpha, limit; /* 0 = the activation's default */
    epmoe_layout_t layout;
    int32_t weight_on_input;
    epmoe_weight_t gate_up, down;
    const float *gate_up_bias, *down_bias;
} oracle_experts_t;

/* y[0..d) += what one slot gives: this expert, this router weight; bound grows with it. weight_error: how far the
 * library's weight may be off. */
void oracle_slot(const oracle_experts_t *experts, int64_t expert, const double *x, double weight, double weight_error,
                 double *y, double *bound);
/* The largest |out - y| in units of what is allowed: `bound` and the rounding to dtype. At most 1 is right; infinity
 * for a NaN. */
double oracle_error(const void *out, epmoe_dtype_t dtype, const double *y, const double *bound, int64_t n);

/* Router: ids and weights of one row of logits. `gap` gets the smallest difference that decided anything: ids are only
 * comparable when it is well above fp32's rounding. */
void oracle_route(const epmoe_layer_config_t *config, const double *logits, const float *selection_bias, int32_t *ids,
                  double *gap);
/* The weights that belong to given ids. */
void oracle_weigh(const epmoe_layer_config_t *config, const double *logits, const int32_t *ids, double *weights);

/* A whole layer's weights as a caller has them. */
typedef struct oracle_model_t {
    epmoe_layer_config_t config; /* every field set */
    epmoe_layer_weights_t weights;
} oracle_model_t;

/* What the weights are stored as. */
typedef struct oracle_formats_t {
    epmoe_dtype_t router, gate_up, down, shared_gate_up, shared_down;
    epmoe_layout_t layout;
} oracle_formats_t;

/* Normal random weights of standard deviation 1/sqrt(K), biases 0.3. */
oracle_model_t oracle_model(testing_rng_t *rng, const epmoe_layer_config_t *config, const oracle_formats_t *formats);
void oracle_model_free(oracle_model_t *model);

/* logits[E] and bound[E] of one token, with the router's bias. */
void oracle_logits(const oracle_model_t *model, const double *x, double *logits, double *bound);
/* y[d] and bound[d] of one token for exactly this routing, with the shared expert and the residual (NULL = none). */
void oracle_token(const oracle_model_t *model, const double *x, const int32_t *ids, const double *weights,
                  const double *residual, double *y, double *bound);

/* Row t of a [T,d] tensor. */
void oracle_row(const void *data, epmoe_dtype_t dtype, int64_t t, int32_t d, double *row);

#endif
