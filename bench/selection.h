/* The router's rules in double precision, from the contract alone: judges what the library chose. */
#ifndef EPMOE_BENCH_SELECTION_H
#define EPMOE_BENCH_SELECTION_H

#include "base/base.h"

/* How many of the k ids of one token the rules forbid, given its logits [E]: out of range, twice, not among the best,
 * out of order. Values closer than fp32 resolves count as equal; equal logits of a softmax router must not. */
int32_t selection_count_wrong(const epmoe_layer_config_t *config, const float *selection_bias, const float *logits,
                              const int32_t *ids);

/* Puts valid ids into the order that the rules ask for. */
void selection_sort(const epmoe_layer_config_t *config, const float *selection_bias, const float *logits, int32_t *ids);

/* The weights [k] that belong to valid ids. */
void selection_weights(const epmoe_layer_config_t *config, const float *logits, const int32_t *ids, double *weights);

#endif
