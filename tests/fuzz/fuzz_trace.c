/* A file of routing for moe_layer_bench: the first byte chooses the router's groups, the rest is the file. What is
 * accepted are k distinct experts per token that the router can choose together. */
#include "bench/routing.h"
#include "tests/fuzz/fuzz.h"

enum { kExperts = 8, kTopK = 2, kTokens = 4 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
    if (size < 1) return 0;
    config.num_experts = kExperts;
    config.top_k = kTopK;
    config.n_group = data[0] & 1 ? 4 : 1;
    config.topk_group = 1;
    const routing_t routing = {
        .kind = ROUTING_FILE, .path = fuzz_file(0, data + 1, size - 1), .seed = 1, .config = &config};
    int32_t ids[kTokens * kTopK];
    float logits[kTokens * kExperts];
    if (routing_draw(&routing, kTokens, 0, kTokens, ids) != EPMOE_OK) return 0;
    for (int32_t i = 0; i < kTokens * kTopK; i++) fuzz_require(ids[i] >= 0 && ids[i] < kExperts, "an id out of range");
    fuzz_require(routing_logits(&routing, 0, kTokens, ids, logits) == EPMOE_OK, "no logits force what was accepted");
    return 0;
}
