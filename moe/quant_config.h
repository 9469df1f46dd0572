/* quantization_config of config.json: how the tensors of quantised weights read, and which modules are left out. */
#ifndef EPMOEI_QUANT_CONFIG_H
#define EPMOEI_QUANT_CONFIG_H

#include "base/base.h"

#include <jansson.h>

typedef struct epmoei_quant_config_t {
    char method[32];         /* quant_method; "" without quantization_config, "unknown" without the key */
    int32_t group;           /* columns per scale, -1 = one group */
    char group_text[64];     /* where it is from: "group_size is 64" */
    int32_t block;           /* FP8: rows and columns per scale; 0 = not said */
    bool float8;             /* compressed-tensors: weights are FP8, */
    bool per_row;            /* of which each row has its scale; neither this nor a block: one scale */
    int32_t zero_convention; /* GPTQ: 1, or 2 for checkpoint_format gptq_v2 */
    bool needs_g_idx;        /* GPTQ: desc_act; compressed-tensors: actorder "group" */
    bool needs_zeros;        /* compressed-tensors: symmetric is false */
    char refusal[192];       /* what this version cannot read, "" = nothing */
    char **left_out;         /* modules that are not quantised: owned */
    int32_t num_left_out;
} epmoei_quant_config_t;

/* `object` is quantization_config, NULL = there is none. FORMAT names file and key. */
epmoe_status_t epmoei_quant_config_read(const json_t *object, const char *path, epmoei_quant_config_t *config);
void epmoei_quant_config_free(epmoei_quant_config_t *config); /* a zeroed one is legal */

/* Whether the lists leave out the module of this name ("model.layers.0.mlp.experts.3.up_proj"). An entry matches whole
 * dotted components wherever they are, "*" in one is a glob; "re:" a regular expression from the name's start. */
bool epmoei_quant_config_leaves_out(const epmoei_quant_config_t *config, const char *name);

#endif
