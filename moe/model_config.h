/* config.json in both generations of its keys, checked: here what concerns the MoE blocks, in moe/attention_config.h
 * what the rest of a decoder layer needs. */
#ifndef EPMOEI_MODEL_CONFIG_H
#define EPMOEI_MODEL_CONFIG_H

#include "moe/attention_config.h"
#include "moe/config_keys.h"
#include "moe/families.h"
#include "moe/quant_config.h"

typedef struct epmoei_model_config_t {
    const epmoei_family_t *family;
    char model_type[32];
    int32_t num_layers;
    int32_t num_nextn_layers; /* behind them, for speculative decoding: not used here */
    epmoei_config_size_t hidden;
    epmoei_config_size_t num_experts;
    epmoei_config_size_t intermediate;
    epmoei_config_size_t dense_intermediate;
    epmoei_config_size_t shared_intermediate;
    epmoei_quant_config_t quant;
    epmoe_layer_config_t layer; /* of MoE layers: all that config.json decides; the tensors decide the rest */
    epmoei_attention_config_t attention;
} epmoei_model_config_t;

/* IO, FORMAT (naming file and key), NOT_SUPPORTED (unknown family, router rule or activation). */
epmoe_status_t epmoei_model_config_read(const char *path, epmoei_model_config_t *config);
void epmoei_model_config_free(epmoei_model_config_t *config); /* a zeroed one is legal */

#endif
