/* What the layer asks of a checkpoint: views of one layer's tensors, in place in the mapped files. */
#ifndef EPMOEI_CHECKPOINT_H
#define EPMOEI_CHECKPOINT_H

#include "base/base.h"
#include "kernels/quant_formats.h"
#include "kernels/repack.h"
#include "moe/safetensors.h"

/* Where a quantised projection is stored. Its view then has the data, rows and cols, and no dtype. */
typedef struct epmoei_quant_source_t {
    epmoei_quant_t quant;           /* format NONE: the projection is plain, or absent */
    const epmoei_tensor_t *indices; /* g_idx, for messages; NULL = none, or not from a file */
} epmoei_quant_source_t;

/* One expert's (or the shared expert's) three projections as nn.Linear sees them: gate, up [f,d]; down [d,f].
 * Biases are views of one row: [1,f], [1,f], [1,d]; absent when the family has none. */
typedef struct epmoei_expert_source_t {
    epmoei_view_t gate;
    epmoei_view_t up;
    epmoei_view_t down;
    epmoei_view_t gate_bias;
    epmoei_view_t up_bias;
    epmoei_view_t down_bias;
    epmoei_quant_source_t gate_quant;
    epmoei_quant_source_t up_quant;
    epmoei_quant_source_t down_quant;
} epmoei_expert_source_t;

typedef struct epmoei_layer_source_t {
    epmoei_view_t router;          /* [E,d] */
    epmoei_view_t router_bias;     /* [1,E] or absent */
    epmoei_view_t selection_bias;  /* [1,E] or absent */
    epmoei_expert_source_t shared; /* gate.data NULL = none; of a dense layer: its MLP */
    epmoei_view_t shared_gate;     /* [1,d] or absent */
} epmoei_layer_source_t;

epmoe_status_t epmoei_checkpoint_layer_source(const epmoe_checkpoint_t *checkpoint, int32_t layer,
                                              epmoei_layer_source_t *source);
epmoe_status_t epmoei_checkpoint_expert_source(const epmoe_checkpoint_t *checkpoint, int32_t layer, int32_t expert,
                                               epmoei_expert_source_t *source);
/* Norms and attention of a decoder layer, as nn.Linear sees the projections; what the layer does not have is absent. */
typedef struct epmoei_attention_source_t {
    epmoei_view_t input_norm, post_norm;               /* [1,d] */
    epmoei_view_t q, k, v;                             /* GQA: [H*D,d], [Hk*D,d]; MLA without q_latent: q [H*(n+r),d] */
    epmoei_view_t q_bias, k_bias, v_bias;              /* one row */
    epmoei_view_t q_norm, k_norm;                      /* [1,D] */
    epmoei_view_t q_down, q_down_bias, q_down_norm;    /* MLA: [q_latent,d], one row, [1,q_latent] */
    epmoei_view_t q_up;                                /* MLA: [H*(nope+rope),q_latent] */
    epmoei_view_t kv_down, kv_down_bias, kv_down_norm; /* MLA: [kv_latent+rope,d], one row, [1,kv_latent] */
    epmoei_view_t kv_up;                               /* MLA: [H*(nope+value),kv_latent] */
    epmoei_view_t out, out_bias;                       /* [d,H*D] or [d,H*value], [1,d] */
    epmoei_view_t sinks;                               /* [1,H] */
} epmoei_attention_source_t;
/* `config` is the layer's, as epmoe_checkpoint_decoder_config gives it. Quantised projections are dequantised to F32 in
 * `memory`, the caller's to epmoei_free after the last use of `source`; NULL when there are none. */
epmoe_status_t epmoei_checkpoint_attention_source(const epmoe_checkpoint_t *checkpoint, int32_t layer,
                                                  const epmoe_decoder_config_t *config,
                                                  epmoei_attention_source_t *source, void **memory);
/* The final norm [1,d] and the head's weight [V,d]. */
epmoe_status_t epmoei_checkpoint_head_source(const epmoe_checkpoint_t *checkpoint, epmoei_view_t *norm,
                                             epmoei_view_t *weight);
/* For tools: any tensor by its full name, whichever shard holds it; NULL when there is none. */
const epmoei_tensor_t *epmoei_checkpoint_find(const epmoe_checkpoint_t *checkpoint, const char *name);

#endif
