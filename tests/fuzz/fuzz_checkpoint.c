/* A whole checkpoint: config.json up to the first NUL byte, model.safetensors behind it. What opens is described,
 * loaded and run, if it is small. */
#include "tests/fuzz/fuzz.h"

#include <omp.h>
#include <stdlib.h>
#include <string.h>

enum { kTokens = 3, kMostLayers = 4, kMostHidden = 512, kMostWidth = 512, kMostExperts = 32 };

static void run_layer(const epmoe_checkpoint_t *checkpoint, int32_t index)
{
    epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
    epmoe_layer_t *layer = NULL;
    epmoe_decoder_config_t decoder = EPMOE_DECODER_CONFIG_INIT;
    (void)epmoe_checkpoint_decoder_config(checkpoint, index, &decoder);
    if (epmoe_checkpoint_layer_config(checkpoint, index, &config) != EPMOE_OK) return;
    if (config.hidden > kMostHidden || config.intermediate > kMostWidth || config.num_experts > kMostExperts ||
        config.shared_intermediate > kMostWidth)
        return;
    config.dtype = EPMOE_F32;
    config.max_tokens = kTokens;
    if (epmoe_layer_create(&config, NULL, &layer) != EPMOE_OK) return;
    if (epmoe_layer_load_checkpoint(layer, checkpoint, index, NULL) == EPMOE_OK) {
        float *x = calloc(2 * kTokens * kMostHidden, sizeof *x);
        fuzz_require(x != NULL, "no memory for tokens");
        for (int32_t i = 0; i < kTokens * config.hidden; i++) x[i] = (float)(i % 7) - 3;
        fuzz_require(epmoe_layer_forward(layer, x, x + (int64_t)kTokens * kMostHidden, kTokens, NULL) == EPMOE_OK,
                     "a loaded layer does not run");
        free(x);
    }
    epmoe_layer_destroy(layer);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static bool made;
    epmoe_checkpoint_t *checkpoint = NULL;
    const uint8_t *end = size ? memchr(data, 0, size) : NULL;
    if (!end) return 0;
    const char *config = fuzz_file(0, data, (size_t)(end - data));
    const char *model = fuzz_file(1, end + 1, size - (size_t)(end - data) - 1);
    if (!made) {
        omp_set_num_threads(1);
        fuzz_link(config, "config.json");
        fuzz_link(model, "model.safetensors");
        made = true;
    }
    if (epmoe_checkpoint_open(fuzz_folder(), &checkpoint) == EPMOE_OK) {
        epmoe_checkpoint_info_t info = EPMOE_CHECKPOINT_INFO_INIT;
        fuzz_require(epmoe_checkpoint_get_info(checkpoint, &info) == EPMOE_OK, "no info of an open checkpoint");
        for (int32_t i = 0; i < info.num_layers && i < kMostLayers; i++) run_layer(checkpoint, i);
        epmoe_checkpoint_close(checkpoint);
    }
    fuzz_require(epmoei_alloc_live() == 0, "memory is left");
    return 0;
}
