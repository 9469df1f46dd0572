#include "tools/tool_info.h"

#include <stdio.h>

/* A checkpoint whose attention cannot run is still worth describing. */
epmoe_status_t info_attention_gather(const epmoe_checkpoint_t *checkpoint, info_attention_t *attention)
{
    epmoe_checkpoint_info_t about = EPMOE_CHECKPOINT_INFO_INIT;
    *attention = (info_attention_t){.config = EPMOE_DECODER_CONFIG_INIT};
    EPMOEI_CHECK(epmoe_checkpoint_get_info(checkpoint, &about));
    if (epmoe_checkpoint_decoder_config(checkpoint, 0, &attention->config) != EPMOE_OK) {
        snprintf(attention->refused, sizeof attention->refused, "%s", epmoe_last_error());
        return EPMOE_OK;
    }
    attention->num_layers = about.num_layers;
    for (int32_t i = 0; i < about.num_layers; i++) {
        epmoe_decoder_config_t config = EPMOE_DECODER_CONFIG_INIT;
        int64_t key_bytes, value_bytes;
        EPMOEI_CHECK(epmoe_checkpoint_decoder_config(checkpoint, i, &config));
        config.block_size = 1;
        EPMOEI_CHECK(epmoe_decoder_block_bytes(&config, EPMOE_BF16, &key_bytes, &value_bytes));
        attention->kv_bytes += key_bytes + value_bytes;
        attention->windowed_layers += config.window > 0;
        if (config.window) attention->window = config.window;
    }
    return EPMOE_OK;
}

static const char *rope_scaling_name(epmoe_rope_scaling_t scaling)
{
    static const char *const names[] = {"none", "linear", "llama3", "yarn"};
    return names[scaling];
}

void info_attention_print(const info_attention_t *attention)
{
    const epmoe_decoder_config_t *config = &attention->config;
    if (attention->refused[0]) {
        printf("attention    not supported: %s\n", attention->refused);
        return;
    }
    if (config->attention == EPMOE_ATTENTION_MLA)
        printf("attention    mla, %d heads of %d+%d (values %d), latent %d", config->num_heads, config->nope_dim,
               config->rope_dim, config->value_dim, config->kv_latent);
    else
        printf("attention    gqa, %d heads, %d kv heads of %d%s", config->num_heads, config->num_kv_heads,
               config->head_dim, config->qk_norm ? ", q and k normalised" : "");
    if (config->has_sinks) printf(", sinks");
    if (attention->windowed_layers)
        printf(", window %d in %d of %d layers", attention->window, attention->windowed_layers, attention->num_layers);
    printf("\nrope         %d columns, base %g, scaling %s, %d positions\n", config->rope.rotary_dim, config->rope.base,
           rope_scaling_name(config->rope.scaling), config->rope.num_positions);
    printf("kv cache     %lld B per token in bf16\n", (long long)attention->kv_bytes);
}

json_t *info_attention_json(const info_attention_t *attention)
{
    const epmoe_decoder_config_t *config = &attention->config;
    bool mla = config->attention == EPMOE_ATTENTION_MLA;
    if (attention->refused[0]) return json_null();
    return json_pack("{s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:s, s:I}", "kind", mla ? "mla" : "gqa", "num_heads",
                     config->num_heads, "num_kv_heads", mla ? 1 : config->num_kv_heads, "head_dim",
                     mla ? config->nope_dim + config->rope_dim : config->head_dim, "rotary_dim",
                     config->rope.rotary_dim, "window", attention->window, "windowed_layers",
                     attention->windowed_layers, "rope_scaling", rope_scaling_name(config->rope.scaling),
                     "kv_bytes_per_token", (json_int_t)attention->kv_bytes);
}
