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
/* For tools: any tensor by its full name, whichever shard holds it; NULL when there is none. */
const epmoei_tensor_t *epmoei_checkpoint_find(const epmoe_checkpoint_t *checkpoint, const char *name);

#endif
