/* config.json: the part of it that concerns the MoE blocks, in both generations of its keys, checked. */
#ifndef EPMOEI_MODEL_CONFIG_H
#define EPMOEI_MODEL_CONFIG_H

#include "moe/families.h"
#include "moe/quant_config.h"

/* A size that tensors must agree with, and how to say where it is from: "hidden_size is 64". value < 0 = not there. */
typedef struct epmoei_config_size_t {
    int64_t value;
    char text[128];
} epmoei_config_size_t;

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
} epmoei_model_config_t;

/* IO, FORMAT (naming file and key), NOT_SUPPORTED (unknown family, router rule or activation). */
epmoe_status_t epmoei_model_config_read(const char *path, epmoei_model_config_t *config);
void epmoei_model_config_free(epmoei_model_config_t *config); /* a zeroed one is legal */

#endif
