#include "kernels/plain_tiles.h"

#include "base/dtype.h"

#include <string.h>

bool epmoei_plain_tiles_fit(int32_t n, int32_t k, bool gated)
{
    return k % EPMOEI_PLAIN_TILE_COLS == 0 && (!gated || n % 16 == 0);
}

epmoe_status_t epmoei_plain_tiles_check(const epmoe_weight_t *weight, const char *name, int32_t n, int32_t k,
                                        bool gated, epmoe_layout_t layout)
{
    if (weight->storage != EPMOE_STORAGE_TILES) return EPMOE_OK;
    if (gated && layout != EPMOE_LAYOUT_PACKED)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "layout is %d and %s.storage TILES: expected PACKED (2)",
                           (int)layout, name);
    if (epmoei_plain_tiles_fit(n, k, gated)) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "%s is [%d,%d] of %s in tiles: expected columns in multiples of %d%s",
                       name, n, k, epmoe_format_string(weight->format), EPMOEI_PLAIN_TILE_COLS,
                       gated ? " and rows of gate and up in multiples of 16" : "");
}

epmoe_status_t epmoei_plain_tiles_cpu(const epmoei_plain_tiles_args_t *args)
{
    const int32_t pieces = args->k / EPMOEI_PLAIN_PIECE;
    const int64_t piece_bytes = 16, expert_bytes = (int64_t)args->n * pieces * piece_bytes;
    for (int64_t e = 0; e < args->num_experts; e++)
        for (int32_t stored = 0; stored < args->n; stored++) {
            const int64_t row = epmoei_plain_tile_row(args->rows, args->n, stored);
            const char *from = (const char *)args->data + e * expert_bytes + row * pieces * piece_bytes;
            char *to = (char *)args->to + e * expert_bytes;
            for (int32_t i = 0; i < pieces; i++)
                memcpy(to + epmoei_plain_tile_piece(args->n, args->k, stored, i) * piece_bytes, from + i * piece_bytes,
                       (size_t)piece_bytes);
        }
    return EPMOE_OK;
}
