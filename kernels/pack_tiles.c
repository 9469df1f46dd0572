#include "kernels/pack_tiles.h"

#include "kernels/dequant.h"
#include "kernels/op_check.h"

static bool is_plain(const epmoe_weight_t *weight)
{
    return weight->format == EPMOE_FORMAT_BF16 || weight->format == EPMOE_FORMAT_F16;
}

static epmoe_status_t check_rows(const epmoe_weight_t *weight)
{
    if (weight->storage == EPMOE_STORAGE_ROWS) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "weight.storage is %d: expected EPMOE_STORAGE_ROWS (0)",
                       (int)weight->storage);
}

static epmoe_status_t check_weight(epmoe_weight_t *weight, int32_t k)
{
    static const epmoe_format_t formats[] = {EPMOE_FORMAT_GPTQ, EPMOE_FORMAT_AWQ, EPMOE_FORMAT_CT_W4,
                                             EPMOE_FORMAT_MXFP4, EPMOE_FORMAT_W4};
    bool known = false;
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++) known |= weight->format == formats[i];
    if (!known)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                           "weight.format is %d (%s): expected bf16, fp16, gptq, awq, ct, mxfp4 or w4",
                           (int)weight->format, epmoe_format_string(weight->format));
    EPMOEI_CHECK(epmoei_quant_check_weight(weight, "weight", k));
    EPMOEI_CHECK(check_rows(weight));
    if (weight->g_idx && weight->format != EPMOE_FORMAT_W4)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                           "weight.g_idx is not NULL: format %s packs without one, its groups one after the other",
                           epmoe_format_string(weight->format));
    if (!epmoei_tiles_take_group(weight->group_size, k))
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED,
                           "weight.group_size is %d: expected 16, 32, a multiple of %d, or to cover all columns",
                           weight->group_size, EPMOEI_TILE_COLS);
    if (k % 8 == 0) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "k is %d: expected a multiple of 8", k);
}

epmoe_status_t epmoei_pack_tiles_check(const epmoe_pack_tiles_args_t *args, epmoe_pack_tiles_args_t *out, bool sizes)
{
    EPMOEI_CHECK(epmoei_copy_sized(out, sizeof *out, args, "epmoe_pack_tiles_args_t"));
    if (out->num_experts == 0) out->num_experts = 1;
    EPMOEI_CHECK(epmoei_check_range("num_experts", out->num_experts, 1, EPMOE_MAX_EXPERTS));
    EPMOEI_CHECK(epmoei_check_range("n", out->n, 1, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_range("k", out->k, 1, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_range("gated", out->gated, 0, 1));
    EPMOEI_CHECK(epmoei_check_volume("weight", out->num_experts, epmoei_round_up(out->n, EPMOEI_TILE_ROWS),
                                     epmoei_round_up(out->k, EPMOEI_TILE_COLS)));
    if (out->gated && out->n % 2)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "n is %d: expected an even number with gated", out->n);
    if (is_plain(&out->weight)) {
        epmoe_weight_t tiles = out->weight;
        EPMOEI_CHECK(check_rows(&tiles));
        tiles.storage = EPMOE_STORAGE_TILES;
        EPMOEI_CHECK(epmoei_plain_tiles_check(&tiles, "weight", out->n, out->k, out->gated, EPMOE_LAYOUT_PACKED));
        out->weight.zeros = NULL;
        if (sizes) return EPMOE_OK;
        EPMOEI_CHECK(epmoei_weight_check_pointers(&out->weight, "weight"));
        return epmoei_check_pointer("data", out->data);
    }
    EPMOEI_CHECK(check_weight(&out->weight, out->k));
    if (out->weight.format == EPMOE_FORMAT_MXFP4) out->weight.zeros = NULL;
    if (sizes) return EPMOE_OK;
    EPMOEI_CHECK(epmoei_weight_check_pointers(&out->weight, "weight"));
    EPMOEI_CHECK(epmoei_check_pointer("data", out->data));
    EPMOEI_CHECK(epmoei_check_pointer("scales", out->scales));
    return out->weight.zeros ? epmoei_check_pointer("zeros", out->zeros) : EPMOE_OK;
}

epmoei_quant_tiles_t epmoei_pack_tiles_layout(const epmoe_pack_tiles_args_t *args)
{
    const epmoe_weight_t *weight = &args->weight;
    epmoe_format_t format = weight->format == EPMOE_FORMAT_MXFP4 ? EPMOE_FORMAT_MXFP4 : EPMOE_FORMAT_W4;
    return epmoei_quant_tiles(format, weight->scales_dtype, args->n, args->k, weight->group_size, args->gated);
}

epmoe_status_t epmoe_pack_tiles_size(const epmoe_pack_tiles_args_t *args, epmoe_pack_tiles_size_t *size)
{
    epmoe_pack_tiles_args_t checked;
    EPMOEI_CHECK(epmoei_pack_tiles_check(args, &checked, true));
    if (is_plain(&checked.weight)) {
        epmoe_pack_tiles_size_t plain = EPMOE_PACK_TILES_SIZE_INIT;
        plain.data_bytes = (int64_t)checked.num_experts * checked.n * checked.k * 2;
        plain.tiles = (epmoe_weight_t)EPMOE_WEIGHT_INIT;
        plain.tiles.format = checked.weight.format;
        plain.tiles.storage = EPMOE_STORAGE_TILES;
        return epmoei_return_sized(size, &plain, sizeof plain, "size");
    }
    epmoei_quant_tiles_t tiles = epmoei_pack_tiles_layout(&checked);
    epmoe_pack_tiles_size_t result = EPMOE_PACK_TILES_SIZE_INIT;
    result.data_bytes = checked.num_experts * tiles.data_bytes;
    result.scales_bytes = checked.num_experts * tiles.scales_bytes;
    result.zeros_bytes = checked.weight.zeros ? checked.num_experts * tiles.zeros_bytes : 0;
    result.tiles = (epmoe_weight_t)EPMOE_WEIGHT_INIT;
    result.tiles.format = tiles.format;
    result.tiles.group_size = checked.weight.group_size;
    result.tiles.scales_dtype = checked.weight.scales_dtype;
    result.tiles.storage = EPMOE_STORAGE_TILES;
    return epmoei_return_sized(size, &result, sizeof result, "size");
}

bool epmoei_pack_tiles_plain(const epmoe_pack_tiles_args_t *args, epmoei_plain_tiles_args_t *plain)
{
    if (!is_plain(&args->weight)) return false;
    *plain = (epmoei_plain_tiles_args_t){.data = args->weight.data,
                                         .to = args->data,
                                         .num_experts = args->num_experts,
                                         .n = args->n,
                                         .k = args->k,
                                         .rows = args->gated ? EPMOEI_PLAIN_ROWS_GATE_FIRST : EPMOEI_PLAIN_ROWS_PLAIN};
    return true;
}

epmoe_status_t epmoe_pack_tiles(const epmoe_pack_tiles_args_t *args, epmoe_stream_t stream)
{
    epmoe_pack_tiles_args_t checked;
    const epmoei_kernel_table_t *table;
    EPMOEI_CHECK(epmoei_pack_tiles_check(args, &checked, false));
    EPMOEI_CHECK(epmoei_kernels(checked.backend, &table));
    if (!checked.weight.zeros) checked.zeros = NULL;
    return table->pack_tiles(&checked, stream);
}
