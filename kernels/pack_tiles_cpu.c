#include "kernels/pack_tiles.h"

epmoe_status_t epmoei_pack_tiles_cpu(const epmoe_pack_tiles_args_t *args, epmoe_stream_t stream)
{
    (void)stream;
    epmoei_plain_tiles_args_t plain;
    if (epmoei_pack_tiles_plain(args, &plain)) return epmoei_plain_tiles_cpu(&plain);
    epmoei_quant_tiles_t tiles = epmoei_pack_tiles_layout(args);
    for (int64_t e = 0; e < args->num_experts; e++) {
        epmoei_quant_t rows = epmoei_quant_of_weight(&args->weight, args->n, args->k, e, 0);
        epmoei_tile_arrays_t to = {
            .data = (char *)args->data + e * tiles.data_bytes,
            .scales = (char *)args->scales + e * tiles.scales_bytes,
            .zeros = args->zeros ? (uint8_t *)args->zeros + e * tiles.zeros_bytes : NULL,
        };
        epmoei_tiles_pack(&tiles, &rows, &to);
    }
    return EPMOE_OK;
}
