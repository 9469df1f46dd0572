/* config.json of any family. What is accepted describes a layer that can be counted, or says why not. */
#include "moe/model_config.h"
#include "tests/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    epmoei_model_config_t config;
    if (epmoei_model_config_read(fuzz_file(0, data, size), &config) == EPMOE_OK) {
        epmoe_layer_memory_t memory = EPMOE_LAYER_MEMORY_INIT;
        epmoe_layer_config_t layer = config.layer;
        fuzz_require(layer.top_k >= 1 && layer.top_k <= layer.num_experts, "top_k out of range was accepted");
        if (epmoe_layer_memory(&layer, 3, 1, &memory) == EPMOE_OK)
            fuzz_require(memory.weight_bytes > 0 && memory.workspace_bytes >= 0, "sizes overflowed");
        epmoei_model_config_free(&config);
    }
    fuzz_require(epmoei_alloc_live() == 0, "memory is left");
    return 0;
}
