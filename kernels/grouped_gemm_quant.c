#include "kernels/grouped_gemm_quant.h"

#include "base/dtype.h"
#include "kernels/activation.h"
#include "kernels/op_check.h"
#include "kernels/quant_formats.h"
#include "kernels/quant_tiles.h"

static epmoe_status_t check_groups(const epmoe_grouped_gemm_args_t *args)
{
    const epmoe_weight_t *weight = &args->weight;
    bool fp8 = weight->format == EPMOE_FORMAT_FP8_BLOCK;
    bool taken = fp8 ? weight->group_size % EPMOEI_TILE_COLS == 0 || weight->group_size >= args->k
                     : epmoei_tiles_take_group(weight->group_size, args->k);
    if (!taken)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED,
                           "weight.group_size is %d: on CUDA it must be %sa multiple of %d "
                           "or cover all columns",
                           weight->group_size, fp8 ? "" : "16, 32, ", EPMOEI_TILE_COLS);
    int32_t step = fp8 ? 16 : 8;
    if (args->k % step == 0) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "k is %d: on CUDA it must be a multiple of %d for %s", args->k, step,
                       epmoe_format_string(weight->format));
}

static epmoe_status_t check_alignment(const epmoe_grouped_gemm_args_t *args)
{
    const struct {
        const char *name;
        const void *pointer;
    } pointers[] = {{"x", args->x},
                    {"y", args->y},
                    {"weight.data", args->weight.data},
                    {"weight.scales", args->weight.scales},
                    {"weight.zeros", args->weight.zeros},
                    {"weight.g_idx", args->weight.g_idx},
                    {"workspace", args->workspace}};
    for (size_t i = 0; i < sizeof pointers / sizeof pointers[0]; i++)
        EPMOEI_CHECK(epmoei_check_aligned(pointers[i].name, pointers[i].pointer, 16));
    return epmoei_check_aligned("x_scale", args->x_scale, 4);
}

epmoe_status_t epmoei_grouped_gemm_quant_check_cuda(const epmoe_grouped_gemm_args_t *args)
{
    epmoe_format_t format = args->weight.format;
    if (format != EPMOE_FORMAT_FP8_BLOCK && format != EPMOE_FORMAT_W4 && format != EPMOE_FORMAT_MXFP4)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED,
                           "weight.format is %s: on CUDA expected bf16, fp16, fp8_block, w4 or mxfp4",
                           epmoe_format_string(format));
    if (args->x_dtype != EPMOE_BF16 && args->x_dtype != EPMOE_F16 && !args->x_quant)
        return epmoei_fail(
            EPMOE_ERROR_NOT_SUPPORTED,
            "x_dtype is %s and weight.format %s: on CUDA x must be bf16 or f16, for fp8_block also E4M3 codes",
            epmoe_dtype_string(args->x_dtype), epmoe_format_string(format));
    if (format != EPMOE_FORMAT_FP8_BLOCK && args->weight.storage != EPMOE_STORAGE_TILES)
        return epmoei_fail(
            EPMOE_ERROR_NOT_SUPPORTED,
            "weight.storage is %d and weight.format %s: on CUDA it must be EPMOE_STORAGE_TILES (1), which "
            "epmoe_pack_tiles makes of rows",
            (int)args->weight.storage, epmoe_format_string(format));
    if (format != EPMOE_FORMAT_FP8_BLOCK && args->layout != EPMOE_LAYOUT_PACKED)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "layout is %d and weight.format %s: on CUDA it must be PACKED",
                           (int)args->layout, epmoe_format_string(format));
    EPMOEI_CHECK(check_groups(args));
    return check_alignment(args);
}

int64_t epmoei_gemm_order_x_bytes(const epmoe_grouped_gemm_args_t *args)
{
    if (!args->weight.g_idx) return 0;
    return epmoei_round_up((int64_t)args->max_rows * args->k * epmoe_dtype_size(args->x_dtype), EPMOEI_ALIGNMENT);
}
