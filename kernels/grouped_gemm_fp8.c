#include "kernels/grouped_gemm_fp8.h"

#include "kernels/activation.h"
#include "kernels/quantize_fp8.h"

#include <math.h>

int64_t epmoei_fp8_rows_layout(void *base, int64_t rows, int64_t k, epmoei_fp8_rows_t *out)
{
    epmoei_arena_t arena = {base, 0};
    out->stride = epmoei_round_up(rows, 4);
    out->codes = epmoei_carve(&arena, rows * k);
    out->scales = epmoei_carve(&arena, epmoei_ceil_div(k, EPMOEI_FP8_COLUMNS) * out->stride * 4);
    out->dealt = epmoei_carve(&arena, sizeof *out->dealt);
    return arena.used;
}

bool epmoei_grouped_gemm_fp8_takes_sm90(const epmoe_grouped_gemm_args_t *args)
{
    bool gated = epmoei_activation_is_gated(args->activation);
    int32_t group = args->weight.group_size, rows = args->weight.group_rows, f = args->n / 2;
    if (group == 0) group = EPMOEI_FP8_COLUMNS;
    if (group == -1) group = INT32_MAX;
    if (rows == -1) rows = INT32_MAX;
    if (!args->fp8_activations || args->weight.format != EPMOE_FORMAT_FP8_BLOCK || args->k % 16) return false;
    if (group >= args->k) return !gated || f % 8 == 0; /* scales of rows, however many have the same */
    if (group % EPMOEI_FP8_COLUMNS || (rows != 0 && rows != group)) return false;
    if (!gated) return true;
    return f % 8 == 0 && (args->layout != EPMOE_LAYOUT_GATE_FIRST || f % EPMOEI_FP8_COLUMNS == 0);
}

bool epmoei_grouped_gemm_fp8_chains_sm90(const epmoe_grouped_gemm_args_t *gemm1, const epmoe_grouped_gemm_args_t *gemm2)
{
    return epmoei_grouped_gemm_fp8_takes_sm90(gemm1) && epmoei_grouped_gemm_fp8_takes_sm90(gemm2) &&
           epmoei_activation_is_gated(gemm1->activation) && gemm1->y_sorted && gemm2->x_sorted &&
           (gemm1->y_dtype == EPMOE_BF16 || gemm1->y_dtype == EPMOE_F16);
}

epmoei_fp8_tile_t epmoei_fp8_tile_sm90(int32_t num_experts, int64_t max_rows)
{
    enum { kNarrow = 64, kWide = 128, kSharedFrom = 256 };
    double mean = (double)max_rows / num_experts;
    epmoei_fp8_tile_t tile = {mean + 3.0 * sqrt(mean) > kNarrow ? kWide : kNarrow, 1};
    if (mean >= kSharedFrom) tile.cluster = 2;
    return tile;
}
