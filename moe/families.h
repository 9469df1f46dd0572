/* What the loader knows about each model family, as data. A new family is a row of the table in families.c: where its
 * tensors are, how stacked experts lie in memory, and how its router works. Nothing else in the loader names one. */
#ifndef EPMOEI_FAMILIES_H
#define EPMOEI_FAMILIES_H

#include "base/base.h"

#define EPMOEI_FAMILY_LIST 4 /* most entries of a list below, NULL where it ends */

/* Names of one layer's tensors. All are below "<layers>I.<module>", I = layer. Those of projections lack their last
 * part (".weight" or that of a quantised format). %d stands for the expert. NULL: the family has no such tensor. */
typedef struct epmoei_tensor_names_t {
    const char *modules[EPMOEI_FAMILY_LIST]; /* of the MoE block: the first that the layer has */
    const char *router;                      /* projection [E,d] */
    const char *router_bias;                 /* [E], in full */
    const char *selection_bias;              /* [E], in full */
    const char *experts; /* everything below it is an expert's; NULL: only the stacked tensors are */
    /* One tensor per expert and projection. */
    const char *expert_gate, *expert_up, *expert_down;
    /* All experts in one tensor; names in full, biases with "_bias" behind. */
    const char *stacked_gate_up, *stacked_down;
    const char *shared; /* prefix of the shared expert's projections, */
    const char *shared_gate_proj, *shared_up_proj, *shared_down_proj;
    const char *shared_gate;  /* projection [1,d]: the shared expert's output times sigmoid(x . it) */
    const char *dense_module; /* of layers without experts; the projections are named as the three below */
    const char *dense_gate, *dense_up, *dense_down;
    /* Other tensors that belong to the model: below a layer, and outside the layers (full names). Both are prefixes. */
    const char *const *rest_of_layer;
    const char *const *outside_layers;
} epmoei_tensor_names_t;

/* How topk_method of config.json reads. */
typedef enum epmoei_topk_method_t {
    EPMOEI_TOPK_GREEDY = 0,        /* no groups, no selection bias */
    EPMOEI_TOPK_GROUP_LIMITED = 1, /* group score = the best of the group; no selection bias */
    EPMOEI_TOPK_NOAUX_TC = 2,      /* selection bias; group score = sum of the two best biased scores */
} epmoei_topk_method_t;

/* What holds where config.json is silent, and what it never says. */
typedef struct epmoei_family_rule_t {
    epmoe_scoring_t scoring;
    epmoei_topk_method_t topk_method;
    int32_t renormalize;
    float routed_scale;
    int32_t n_group;
    int32_t topk_group;
    int32_t weight_on_input;
    /* SWIGLU_OAI is the family's own and hidden_act says nothing about it; otherwise hidden_act decides. */
    epmoe_activation_t activation;
    float alpha;
    float limit;
} epmoei_family_rule_t;

/* A property that config.json decides by `key` (NULL = it never does); `initial` where it is silent. */
typedef struct epmoei_flag_rule_t {
    const char *key;
    int32_t initial;
} epmoei_flag_rule_t;

/* Which layers see only the last sliding_window tokens. */
typedef enum epmoei_window_rule_t {
    EPMOEI_WINDOW_NEVER = 0,
    EPMOEI_WINDOW_ALL = 1,      /* every layer, when sliding_window is there and not 0 */
    EPMOEI_WINDOW_SWITCHED = 2, /* those of layer_types, when use_sliding_window is true */
    EPMOEI_WINDOW_BY_TYPE = 3,  /* those of layer_types, which has to be there */
    EPMOEI_WINDOW_UPPER = 4,    /* those of layer_types, without it those from max_window_layers on */
    /* Layers attend to chunks of attention_chunk_size tokens, or have no positions (no_rope_layers) but a temperature
     * that begins to change at floor_scale - 1: what does not matter to sequences that end before both. */
    EPMOEI_WINDOW_CHUNKS = 5,
} epmoei_window_rule_t;

/* The attention of a decoder layer: what config.json does not say. */
typedef struct epmoei_attention_rule_t {
    epmoe_attention_kind_t kind;
    epmoei_flag_rule_t in_bias, out_bias; /* as in epmoe_decoder_config_t */
    epmoei_flag_rule_t has_qk_norm;       /* whether there is one, */
    epmoe_qk_norm_t qk_norm;              /* and which */
    bool has_sinks;
    epmoei_window_rule_t window;
    epmoe_rope_style_t rope_style;
    const char *gptj_key; /* true by default: pairs are neighbours, otherwise rope_style */
    double rotary_part; /* of a head where partial_rotary_factor is not there; 0 = all of it, whatever the file says */
} epmoei_attention_rule_t;

typedef struct epmoei_family_t {
    const char *model_types[EPMOEI_FAMILY_LIST]; /* of config.json */
    const char *config_section;                  /* the object of config.json with the keys; NULL = the file's own */
    const char *layers;                          /* in front of the layer's number */
    const char *dense_intermediate;              /* config key of f of layers without experts */
    const char *shared_intermediate;             /* config key of f of the shared expert, */
    const char *num_shared;                      /* or of the number of experts' f that it is wide */
    const epmoei_tensor_names_t *names;
    /* Stacked experts: false [E,2f,d] and [E,d,f], as nn.Linear; true [E,d,2f] and [E,f,d]. */
    bool stacked_transposed;
    /* 2f: gate and up alternate, gate first; otherwise all of gate, then all of up. */
    bool stacked_interleaved;
    bool expert_has_bias;
    epmoei_family_rule_t rule;
    const epmoei_attention_rule_t *attention; /* NULL: MoE blocks only */
} epmoei_family_t;

/* NULL when there is no row for it. */
const epmoei_family_t *epmoei_family_find(const char *model_type);
/* All model types, comma-separated, cut off at `size`. */
void epmoei_family_list(char *text, size_t size);

#endif
