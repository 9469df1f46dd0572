/* A checkpoint's parts, shared by the files that make it: checkpoint.c (folder, shards, index), checkpoint_layer.c
 * (a layer's tensors), checkpoint_reader.c (one tensor as a view), checkpoint_quant.c (a quantised projection),
 * checkpoint_names.c (tensors that nobody asked for).
 */
#ifndef EPMOEI_CHECKPOINT_INTERNAL_H
#define EPMOEI_CHECKPOINT_INTERNAL_H

#include "moe/checkpoint.h"
#include "moe/model_config.h"
#include "moe/tensor_index.h"

#define EPMOEI_NAME_BYTES 256 /* of the names made from a family's row */

/* Where a layer keeps its MLP, read from its tensors. */
typedef struct epmoei_layer_place_t {
    bool dense;
    bool stacked;       /* all experts in one tensor */
    const char *module; /* of the family's names */
    /* The first weight that this version cannot compute with, and its format; NULL when there is none. */
    const epmoei_tensor_t *refused;
    const char *refused_format;
    epmoe_format_t format;       /* of the first expert's gate; of a dense layer, of its MLP's */
    int32_t shared_intermediate; /* 0 = no shared expert; f of a dense layer */
} epmoei_layer_place_t;

struct epmoe_checkpoint {
    char *dir;
    epmoei_model_config_t config;
    epmoei_safetensors_t **shards;
    int32_t num_shards;
    epmoei_tensor_index_t index; /* every tensor of the checkpoint */
    int64_t total_bytes;
    epmoei_layer_place_t *layers; /* [num_layers] */
};

/* The text of a name: "<layers>I.<module>" + `pattern` with %d replaced by `expert` + `suffix`. */
const char *epmoei_checkpoint_name(char name[EPMOEI_NAME_BYTES], const epmoe_checkpoint_t *checkpoint, int32_t layer,
                                   const char *module, const char *pattern, int32_t expert, const char *suffix);

/* The quantised formats' tensors of one projection, without the projection's name; NULL at the end. */
extern const char *const epmoei_quantised_suffixes[];
extern const char *const epmoei_quantised_stacked_suffixes[];

/* Disagreements between the config's list of modules that are not quantised and the tensors, which win. */
typedef struct epmoei_list_notes_t {
    char quantised[EPMOEI_NAME_BYTES]; /* the first module that is listed and quantised all the same, "" = none */
    char plain[EPMOEI_NAME_BYTES];     /* the first that is neither listed nor quantised */
} epmoei_list_notes_t;

/* One layer being read. A weight that this version cannot compute with is not an error of the file: it leaves its view
 * absent and is noted here, the first of them. */
typedef struct epmoei_reader_t {
    const epmoe_checkpoint_t *checkpoint;
    const epmoei_tensor_names_t *names;
    int32_t layer;
    const char *module;
    const epmoei_tensor_t *refused;
    const char *refused_format;
    epmoei_list_notes_t *notes; /* filled in unless NULL */
} epmoei_reader_t;

/* Names below the reader's module: `pattern` with %d replaced by `expert`, then `suffix`. */
const epmoei_tensor_t *epmoei_reader_find(const epmoei_reader_t *reader, const char *pattern, int32_t expert,
                                          const char *suffix);
bool epmoei_reader_has_prefix(const epmoei_reader_t *reader, const char *prefix);
/* Whether a projection, or a stacked gate/up weight, is there in any format. */
bool epmoei_reader_has_projection(const epmoei_reader_t *reader, const char *pattern);
bool epmoei_reader_has_stacked(const epmoei_reader_t *reader);
/* The FORMAT error for a tensor that is not there. */
epmoe_status_t epmoei_reader_missing(const epmoei_reader_t *reader, const char *pattern, int32_t expert,
                                     const char *suffix);
/* A tensor of one dimension as a view of one row. */
epmoe_status_t epmoei_reader_row(epmoei_reader_t *reader, const char *pattern, const epmoei_config_size_t *cols,
                                 epmoei_view_t *view);
/* A projection [rows,cols]; rows with value < 0 accept any. `quant` NULL: it must be plain. */
epmoe_status_t epmoei_reader_projection(epmoei_reader_t *reader, const char *pattern, int32_t expert,
                                        const epmoei_config_size_t *rows, const epmoei_config_size_t *cols,
                                        epmoei_view_t *view, epmoei_quant_source_t *quant);
/* The quantised format whose tensors the projection has; NONE when it has none. *tensor is the one that says so. */
epmoe_format_t epmoei_reader_quantised(const epmoei_reader_t *reader, const char *pattern, int32_t expert,
                                       const epmoei_tensor_t **tensor);
/* Reads it; a config that this version cannot read leaves the view absent and is noted. */
epmoe_status_t epmoei_reader_quant_projection(epmoei_reader_t *reader, const char *pattern, int32_t expert,
                                              const epmoei_config_size_t *rows, const epmoei_config_size_t *cols,
                                              epmoe_format_t format, epmoei_view_t *view, epmoei_quant_source_t *quant);
/* One projection of all experts in MXFP4's or FP8's tensors, of which the caller takes rows and an expert. */
epmoe_status_t epmoei_reader_quant_stacked(epmoei_reader_t *reader, const char *pattern, int64_t rows, int64_t cols,
                                           const char *reason, int32_t expert, bool *found, epmoei_quant_t *quant);
/* What the lists of the config say of a module that turned out to be quantised or plain. */
void epmoei_reader_note(const epmoei_reader_t *reader, const char *pattern, int32_t expert, bool quantised);
/* The shared error for a tensor of another shape; expected[i] < 0 = any, `reason` says where the others are from. */
epmoe_status_t epmoei_reader_check_shape(const epmoei_tensor_t *tensor, int32_t num_dims, const int64_t *expected,
                                         const char *reason);
void epmoei_reader_refuse(epmoei_reader_t *reader, const epmoei_tensor_t *tensor, const char *format);
/* One expert of stacked weights and biases. */
epmoe_status_t epmoei_reader_stacked_expert(epmoei_reader_t *reader, int32_t expert, epmoei_expert_source_t *source);

/* Finds where the layer keeps its MLP and checks every tensor of it. */
epmoe_status_t epmoei_checkpoint_check_layer(epmoe_checkpoint_t *checkpoint, int32_t layer);

/* Whether a name is that of a part of a layer's MLP. */
bool epmoei_checkpoint_is_mlp_tensor(const epmoe_checkpoint_t *checkpoint, const char *name);
/* FORMAT for a tensor below the experts that no expert has; a warning for any other that the family does not know. */
epmoe_status_t epmoei_checkpoint_check_names(const epmoe_checkpoint_t *checkpoint);

#endif
