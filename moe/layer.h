/* The layer object. Weights and workspace are each one allocation, carved by one layout function. */
#ifndef EPMOEI_LAYER_H
#define EPMOEI_LAYER_H

#include "base/base.h"
#include "comm/placement.h"
#include "kernels/quant_pack.h"
#include "moe/checkpoint.h"
#include "moe/stages.h"

/* Where this rank's weights are. Formats are those of the source, packed where it is quantised; NONE for what the layer
 * does not have. */
typedef struct epmoei_layer_formats_t {
    epmoe_dtype_t router;
    epmoe_format_t gate_up;
    epmoe_format_t down;
    epmoe_format_t shared_gate_up;
    epmoe_format_t shared_down;
    /* Of the four, where they are quantised, and whether they are in tiles where not. */
    epmoei_pack_shape_t gate_up_pack;
    epmoei_pack_shape_t down_pack;
    epmoei_pack_shape_t shared_gate_up_pack;
    epmoei_pack_shape_t shared_down_pack;
} epmoei_layer_formats_t;

/* What a packed quantised matrix has besides its codes, as epmoe_weight_t lays it out. */
typedef struct epmoei_pack_arrays_t {
    void *scales;
    uint8_t *zeros;
    int32_t *order;
} epmoei_pack_arrays_t;

typedef struct epmoei_packed_weights_t {
    epmoei_layer_formats_t formats;
    void *router;          /* [E,d] */
    float *router_bias;    /* [E] or NULL */
    float *selection_bias; /* [E] or NULL */
    void *gate_up;         /* [El,2f,d], gate rows first; on CUDA they alternate with up rows, or are tiled */
    void *down;            /* [El,d,f] */
    float *gate_up_bias;   /* [El,2f] or NULL */
    float *down_bias;      /* [El,d] or NULL */
    /* The shared expert is number El of one more slot: its matrices lie right behind the others, in the same arrays. */
    bool joins_shared;
    void *shared_gate_up; /* [2fs,d] */
    void *shared_down;    /* [d,fs] */
    void *shared_gate;    /* [d] or NULL, of the router's dtype */
    epmoei_pack_arrays_t gate_up_arrays;
    epmoei_pack_arrays_t down_arrays;
    epmoei_pack_arrays_t shared_gate_up_arrays;
    epmoei_pack_arrays_t shared_down_arrays;
} epmoei_packed_weights_t;

/* One of the four as the ops take it on a backend. */
epmoe_weight_t epmoei_layer_weight(epmoe_backend_t backend, epmoe_format_t format, const epmoei_pack_shape_t *pack,
                                   const void *data, const epmoei_pack_arrays_t *arrays);

/* Whether the two products of these weights, f wide between them, quantise the activations of many tokens. */
int32_t epmoei_layer_fp8_activations(const epmoe_layer_config_t *config, epmoe_backend_t backend,
                                     const epmoe_weight_t *gate_up, const epmoe_weight_t *down, int32_t f);

/* Bytes of a matrix [rows,cols] of one expert, in whatever format. halves: its rows are gate and up. On CUDA W4 and
 * MXFP4 are tiled, and gate and up rows share one order of columns (kernels/grouped_gemm_quant.h). */
typedef struct epmoei_matrix_sizes_t {
    int64_t data;
    int64_t scales;
    int64_t zeros;
    int64_t order;
    int64_t total;
} epmoei_matrix_sizes_t;
epmoei_matrix_sizes_t epmoei_matrix_sizes(epmoe_backend_t backend, epmoe_format_t format,
                                          const epmoei_pack_shape_t *pack, int64_t rows, int64_t cols, bool halves);

/* The formats of a layer whose weights all are in config's weight_format. */
epmoei_layer_formats_t epmoei_layer_config_formats(const epmoe_layer_config_t *config);

/* What forward needs besides its arguments. */
typedef struct epmoei_layer_workspace_t {
    float *logits;         /* [max_tokens,E] */
    int32_t *ids;          /* [max_tokens,k] */
    float *weights;        /* [max_tokens,k] */
    int32_t *physical_ids; /* [max_tokens,k] with one rank and a placement: ids of physical experts */
    void *rounded;         /* [max_tokens,d] with one rank and FP8 on the wire: x as the experts get it */
    int32_t *joined_ids;   /* [max_tokens,k+1] where the shared expert joins the others, else NULL */
    float *joined_weights; /* [max_tokens,k+1], with joined_ids */
    float *shared;         /* [max_tokens,d]: the shared expert's output; it and the next four NULL if always joined */
    void *shared_h;        /* [max_tokens,fs] of dtype */
    float *shared_gate;    /* [max_tokens]: sigmoids */
    /* CUDA: the shared expert as the only one of a few tokens, [EPMOEI_EXPERTS_FEW_MOST_TOKENS] zeros and ones. */
    int32_t *shared_ids;
    float *shared_ones;
    void *experts_workspace;
    int64_t experts_bytes;
    void *gemm_workspace; /* of the shared expert's products, on the CPU also the router's */
    int64_t gemm_bytes;
    void *route_workspace; /* CUDA: of the router's product */
    int64_t route_bytes;
    int64_t bytes;
} epmoei_layer_workspace_t;

struct epmoe_layer {
    epmoe_layer_config_t config; /* normalised; its placement is the layer's own copy */
    int32_t *placement_copy;
    epmoei_placement_t *placement; /* with one rank, otherwise it is the ep's */
    epmoe_comm_t *comm;
    epmoe_comm_t *own_comm; /* made for a caller without one */
    epmoe_ep_t *ep;         /* NULL for a dense MLP and for one rank */
    epmoe_backend_t backend;
    int32_t first_expert;  /* physical: the first of this rank */
    int32_t local_experts; /* physical ones of this rank */
    int64_t max_rows;      /* most rows a dispatch can bring here */
    epmoei_layer_workspace_t workspace;
    void *workspace_memory;
    bool has_weights;
    epmoei_packed_weights_t weights;
    void *weights_memory;
};

/* The expert whose weights this rank's physical expert number `local` has. */
static inline int32_t epmoei_layer_expert(const epmoe_layer_t *layer, int32_t local)
{
    const int32_t physical = layer->first_expert + local;
    return layer->config.placement ? layer->config.placement[physical] : physical;
}

/* epmoe_layer_forward_args for a rank that has worked before: `local` not OK takes part without tokens, so that its
 * error reaches the other ranks instead of their waiting for it, and is returned. `args` is not read then. `begun`: the
 * stages so far; NULL = they begin here. */
epmoe_status_t epmoei_layer_forward_after(epmoe_layer_t *layer, epmoe_status_t local, const epmoei_stages_t *begun,
                                          const epmoe_forward_args_t *args, epmoe_stream_t stream);
/* What it would say of its arguments. */
epmoe_status_t epmoei_layer_check_forward(const epmoe_layer_t *layer, const epmoe_forward_args_t *args);

/* Whether this rank's experts, or the shared one, quantise the activations of so many tokens. */
bool epmoei_layer_quantises(const epmoe_layer_t *layer, int32_t tokens, bool shared);

/* Checks and fills defaults. */
epmoe_status_t epmoei_layer_config_check(const epmoe_layer_config_t *config, epmoe_layer_config_t *out);

/* Most rows that a dispatch may bring to a rank, when all ranks together may have all_tokens. */
int64_t epmoei_layer_max_rows(const epmoe_layer_config_t *config, int64_t all_tokens);
/* Of the layer's dispatch object. */
epmoe_ep_config_t epmoei_layer_ep_config(const epmoe_layer_config_t *config);

/* Carves; base NULL counts. max_rows: most rows that the experts of this rank may get in one forward. weights NULL:
 * plain ones. */
epmoe_status_t epmoei_layer_workspace_layout(char *base, const epmoe_layer_config_t *config, epmoe_backend_t backend,
                                             int32_t local_experts, int64_t max_rows,
                                             const epmoei_packed_weights_t *weights, epmoei_layer_workspace_t *out);
int64_t epmoei_layer_weights_layout(char *base, const epmoe_layer_config_t *config, epmoe_backend_t backend,
                                    int32_t local_experts, const epmoei_layer_formats_t *formats,
                                    epmoei_packed_weights_t *out);
/* Makes the workspace, or a larger one where the weights need it (quantised ones on CUDA). */
epmoe_status_t epmoei_layer_fit_workspace(epmoe_layer_t *layer);

#endif
