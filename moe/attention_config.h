/* config.json: what a decoder layer and the head need besides the MoE block. A model whose attention is unknown still
 * has MoE blocks that run, so a failure is kept here for those who ask for more. */
#ifndef EPMOEI_ATTENTION_CONFIG_H
#define EPMOEI_ATTENTION_CONFIG_H

#include "moe/config_keys.h"
#include "moe/families.h"

#define EPMOEI_MAX_TYPED_LAYERS 1024 /* entries of layer_types */

typedef struct epmoei_attention_config_t {
    epmoe_status_t status; /* OK, or why decoder layers cannot run, with `message` */
    char message[512];
    epmoe_decoder_config_t decoder; /* of every layer; but window, which is that of sliding layers */
    bool any_full;                  /* some layer has no window: */
    bool full[EPMOEI_MAX_TYPED_LAYERS];
    bool any_unrotated; /* some layer does not rotate: */
    bool unrotated[EPMOEI_MAX_TYPED_LAYERS];
    epmoe_status_t head_status; /* the same of the head */
    char head_message[512];
    epmoei_config_size_t vocab_size;
    float norm_eps;
    bool tied; /* the embedding is the head's weight */
} epmoei_attention_config_t;

void epmoei_attention_config_read(epmoei_config_section_t section, const epmoei_family_t *family, int32_t num_layers,
                                  int32_t hidden, epmoei_attention_config_t *config);

/* The decoder config of one layer, or the failure that was kept. */
epmoe_status_t epmoei_attention_config_of(const epmoei_attention_config_t *config, int32_t layer,
                                          epmoe_decoder_config_t *decoder);

#endif
