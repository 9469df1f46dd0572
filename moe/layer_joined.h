/* The shared expert as one more of the routed ones: where it is that, and what it adds to them. */
#ifndef EPMOEI_LAYER_JOINED_H
#define EPMOEI_LAYER_JOINED_H

#include "moe/layer.h"

/* Whether the shared expert of weights that the layer owns runs as one more of the routed experts, which every token
 * takes in slot k with weight 1, in their launches. So it does on CUDA with one rank where it is as wide as they are,
 * has no gate and their formats, neither a placement nor a wire dtype nor biases make the routed ones differ from it,
 * and k+1 slots and E+1 experts are what the kernels hold. Elsewhere it has launches of its own. */
bool epmoei_layer_joins_shared(const epmoe_layer_config_t *config, epmoe_backend_t backend, int32_t local_experts,
                               const epmoei_layer_formats_t *formats);
/* Whether it does so in a call of so many tokens: always, but for 4-bit weights and 65 to 256 tokens. Tiles are as wide
 * as the routed experts need, which is little there, and the shared expert's weights would be brought to bf16 once for
 * each of its many; from 512 tokens on that is no more. */
bool epmoei_layer_joins_tokens(const epmoei_packed_weights_t *weights, int32_t num_tokens);
/* Whether it does so in every call of at most so many. */
bool epmoei_layer_joins_always(const epmoei_packed_weights_t *weights, int32_t max_tokens);

/* Its matrices, of weights that joins_shared: right behind those of the local experts, in arrays that have room. */
void epmoei_layer_join_weights(const epmoe_layer_config_t *config, epmoe_backend_t backend, int32_t local_experts,
                               epmoei_packed_weights_t *weights);
/* Its slot and expert, for a call that epmoei_layer_joins_tokens: the args are those of the routed experts before. */
void epmoei_layer_join_experts(const epmoe_layer_t *layer, epmoe_experts_args_t *experts);

#endif
