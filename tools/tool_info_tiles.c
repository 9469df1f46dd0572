#include "kernels/grouped_gemm_fp8.h"
#include "kernels/grouped_gemm_tile.h"
#include "tools/tool_info.h"

#include <stdio.h>

/* The shape of a rank's products, of which the first one is shown: where tokens choose evenly a rank gets as many rows
 * as it sends. */
static void shape_of(const epmoe_layer_config_t *config, int32_t local_experts, int64_t *rows, int32_t *experts)
{
    *rows = (int64_t)config->max_tokens * config->top_k;
    *experts = local_experts > 0 ? local_experts : 1;
}

void info_tiles_print(const epmoe_layer_config_t *config, int32_t local_experts)
{
    int64_t rows;
    int32_t experts;
    shape_of(config, local_experts, &rows, &experts);
    epmoei_fp8_tile_t fp8 = epmoei_fp8_tile_sm90(experts, rows);
    int32_t quant = epmoei_grouped_gemm_tile_quant_sm80(experts, rows);
    printf(
        "cuda tiles   of %lld rows for %d experts, at most: sm80 bf16 %d, fp8 and w4 %d; sm90 bf16 %d, w4 %d, fp8 by "
        "fp8 %d%s\n",
        (long long)rows, experts, epmoei_grouped_gemm_tile_sm80(experts, rows), quant,
        epmoei_grouped_gemm_width_sm90(experts, rows, 2 * config->intermediate, config->hidden),
        epmoei_grouped_gemm_width_w4_sm90(experts, rows), fp8.tokens, fp8.cluster > 1 ? " in pairs" : "");
}

json_t *info_tiles_json(const epmoe_layer_config_t *config, int32_t local_experts)
{
    int64_t rows;
    int32_t experts;
    shape_of(config, local_experts, &rows, &experts);
    epmoei_fp8_tile_t fp8 = epmoei_fp8_tile_sm90(experts, rows);
    int32_t quant = epmoei_grouped_gemm_tile_quant_sm80(experts, rows);
    return json_pack("{s:I, s:i, s:{s:i, s:i, s:i}, s:{s:i, s:i, s:i, s:i}}", "rows", (json_int_t)rows, "experts",
                     experts, "sm80", "bf16", epmoei_grouped_gemm_tile_sm80(experts, rows), "fp8", quant, "w4", quant,
                     "sm90", "bf16",
                     epmoei_grouped_gemm_width_sm90(experts, rows, 2 * config->intermediate, config->hidden), "w4",
                     epmoei_grouped_gemm_width_w4_sm90(experts, rows), "fp8", fp8.tokens, "fp8_cluster", fp8.cluster);
}
