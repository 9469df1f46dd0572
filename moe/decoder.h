/* The decoder layer: dense_layers/self_attention.h, then the MoE layer with the residual. */
#ifndef EPMOEI_DECODER_H
#define EPMOEI_DECODER_H

#include "comm/comm.h"
#include "dense_layers/self_attention.h"
#include "moe/checkpoint.h"
#include "moe/layer.h"

struct epmoe_decoder {
    epmoei_attention_shape_t shape;
    epmoe_comm_t *comm;
    epmoe_comm_t *own_comm; /* made for a caller without one */
    epmoe_layer_t *mlp;
    epmoei_attention_workspace_t workspace;
    void *workspace_memory;
    const float *cos_sin;
    float *own_cos_sin; /* in the backend's memory; NULL with a borrowed table */
    void *key_cache;    /* both NULL with the caller's cache */
    void *value_cache;
    bool has_weights;
    epmoei_attention_weights_t weights;
    void *weights_memory;
};

/* This rank's norms and attention; the old ones go. On failure the decoder has none. */
epmoe_status_t epmoei_decoder_take_source(epmoe_decoder_t *decoder, const epmoei_attention_source_t *source);
void epmoei_decoder_drop_weights(epmoe_decoder_t *decoder);

/* epmoe_decoder_set_random_weights, which calls options->progress as a load does; NULL = none. */
epmoe_status_t epmoei_decoder_random_weights(epmoe_decoder_t *decoder, uint64_t seed,
                                             const epmoe_load_options_t *options);

/* Random ones on the host, matrices of `dtype`, the rest F32. `memory` holds them, the caller's to epmoei_free. */
epmoe_status_t epmoei_random_attention(const epmoei_attention_shape_t *shape, epmoe_dtype_t dtype, uint64_t seed,
                                       epmoei_attention_source_t *source, void **memory);

#define EPMOEI_DECODER_FIELDS 32
/* What decides the values that a layer computes, by name; defaults are filled in. */
void epmoei_decoder_fields(const epmoe_decoder_config_t *config, epmoei_agreed_t out[EPMOEI_DECODER_FIELDS]);

/* Bytes of one block of either cache. */
void epmoei_decoder_block_bytes(const epmoe_decoder_config_t *config, int64_t *key_bytes, int64_t *value_bytes);

#endif
