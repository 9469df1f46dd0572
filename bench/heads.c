#include "bench/heads.h"

#include <string.h>

static const heads_t k_heads[] = {
    {"mixtral-8x7b", 32, 8, 128, 128, 128},   {"mixtral-8x22b", 48, 8, 128, 128, 128},
    {"qwen3-30b-a3b", 32, 4, 128, 128, 128},  {"qwen3-235b-a22b", 64, 4, 128, 128, 128},
    {"deepseek-v3", 128, 1, 64, 64, 576},     {"kimi-k2", 64, 1, 64, 64, 576},
    {"gpt-oss-20b", 64, 8, 64, 64, 64},       {"gpt-oss-120b", 64, 8, 64, 64, 64},
    {"glm-4.5", 96, 8, 128, 64, 128},         {"olmoe-1b-7b", 16, 16, 128, 128, 128},
    {"qwen2-57b-a14b", 28, 4, 128, 128, 128}, {"llama4-scout", 40, 8, 128, 128, 128},
};

epmoe_status_t heads_of_bench(const bench_t *bench, heads_t *heads)
{
    const char *model = bench->model;
    const options_t *options = bench->options;
    if (options->heads) {
        int32_t dim = options->head_dim;
        *heads = (heads_t){model, options->heads, options->kv_heads, dim, dim, dim};
        return EPMOE_OK;
    }
    for (size_t i = 0; i < sizeof k_heads / sizeof k_heads[0]; i++) {
        if (strcmp(k_heads[i].model, model)) continue;
        *heads = k_heads[i];
        return EPMOE_OK;
    }
    return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "model '%s' has no known attention heads", model);
}
