/* What `moe_tool info` says of a checkpoint's attention. */
#ifndef EPMOE_TOOLS_TOOL_INFO_H
#define EPMOE_TOOLS_TOOL_INFO_H

#include "base/base.h"

#include <jansson.h>

typedef struct info_attention_t {
    char refused[512];             /* why decoder layers do not run; "" = they do */
    epmoe_decoder_config_t config; /* of the first layer */
    int32_t num_layers;
    int32_t windowed_layers;
    int32_t window;   /* theirs */
    int64_t kv_bytes; /* per token, of all layers, in bf16 */
} info_attention_t;

epmoe_status_t info_attention_gather(const epmoe_checkpoint_t *checkpoint, info_attention_t *attention);
void info_attention_print(const info_attention_t *attention);
/* null when decoder layers do not run. */
json_t *info_attention_json(const info_attention_t *attention);

#endif
