/* model.safetensors.index.json of a folder whose shards, by two names, are a small mixtral checkpoint. */
#include "tests/fuzz/fuzz.h"

static void make_folder(void)
{
    fuzz_link(EPMOE_TEST_DATA "/golden/mixtral/config.json", "config.json");
    fuzz_link(EPMOE_TEST_DATA "/golden/mixtral/model.safetensors", "a.safetensors");
    fuzz_link(EPMOE_TEST_DATA "/golden/mixtral/golden.safetensors", "b.safetensors");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static bool made;
    epmoe_checkpoint_t *checkpoint = NULL;
    const char *index = fuzz_file(0, data, size);
    if (!made) {
        make_folder();
        fuzz_link(index, "model.safetensors.index.json");
        made = true;
    }
    if (epmoe_checkpoint_open(fuzz_folder(), &checkpoint) == EPMOE_OK) {
        epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
        fuzz_require(epmoe_checkpoint_layer_config(checkpoint, 0, &config) == EPMOE_OK, "layer 0 is not there");
        epmoe_checkpoint_close(checkpoint);
    }
    fuzz_require(epmoei_alloc_live() == 0, "memory is left");
    return 0;
}
