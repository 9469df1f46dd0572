#include "moe/quant_writer.h"

#include "base/device.h"
#include "kernels/quant_tiles.h"

const char *epmoei_quant_cuda_obstacle(const epmoei_pack_shape_t *pack, int64_t cols)
{
    bool fp8 = pack->format == EPMOE_FORMAT_FP8_BLOCK;
    if (cols % (fp8 ? 16 : 8))
        return fp8 ? "its columns are not a multiple of 16" : "its columns are not a multiple of 8";
    if (fp8 && pack->group % EPMOEI_TILE_COLS && pack->group < cols)
        return "its blocks are not a multiple of 64 columns wide";
    if (!fp8 && !epmoei_tiles_take_group(pack->group, cols))
        return "its groups are not 16, 32 or a multiple of 64 columns wide";
    return NULL;
}

void epmoei_quant_writer_open(epmoei_quant_writer_t *writer, epmoe_backend_t backend, epmoe_stream_t stream)
{
    *writer = (epmoei_quant_writer_t){.backend = backend, .stream = stream};
}

static epmoe_status_t grow(void **memory, int64_t *have, int64_t bytes)
{
    if (bytes <= *have) return EPMOE_OK;
    epmoei_free(*memory);
    *memory = NULL, *have = 0;
    EPMOEI_CHECK(epmoei_alloc_for(memory, bytes, "packing a quantised matrix"));
    *have = bytes;
    return EPMOE_OK;
}

epmoe_status_t epmoei_quant_writer_begin(epmoei_quant_writer_t *writer, const epmoei_quant_matrix_t *matrix)
{
    writer->matrix = *matrix;
    writer->rows = matrix->arrays;
    writer->rows_data = matrix->data;
    if (writer->backend != EPMOE_BACKEND_CUDA) return EPMOE_OK;
    epmoei_matrix_sizes_t sizes = epmoei_matrix_sizes(EPMOE_BACKEND_CPU, matrix->pack->format, matrix->pack,
                                                      matrix->rows, matrix->cols, matrix->halves);
    for (int pass = 0; pass < 2; pass++) {
        epmoei_arena_t arena = {pass ? writer->rows_memory : NULL, 0};
        writer->rows_data = epmoei_carve(&arena, sizes.data);
        writer->rows.scales = epmoei_carve(&arena, sizes.scales);
        writer->rows.zeros = sizes.zeros ? epmoei_carve(&arena, sizes.zeros) : NULL;
        writer->rows.order = sizes.order ? epmoei_carve(&arena, sizes.order) : NULL;
        if (!pass) EPMOEI_CHECK(grow(&writer->rows_memory, &writer->rows_bytes, arena.used));
    }
    return EPMOE_OK;
}

epmoei_pack_target_t epmoei_quant_writer_target(const epmoei_quant_writer_t *writer, int half)
{
    const epmoei_quant_matrix_t *matrix = &writer->matrix;
    int64_t half_rows = matrix->halves ? matrix->rows / 2 : matrix->rows;
    /* FP8 rows go to the device as they are, where gate and up alternate. */
    bool alternate =
        writer->backend == EPMOE_BACKEND_CUDA && matrix->halves && matrix->pack->format == EPMOE_FORMAT_FP8_BLOCK;
    return (epmoei_pack_target_t){
        .shape = *matrix->pack,
        .data = writer->rows_data,
        .scales = writer->rows.scales,
        .zeros = writer->rows.zeros,
        .order = writer->rows.order ? writer->rows.order + half * matrix->cols : NULL,
        .first_row = alternate ? half : half * half_rows,
        .row_step = alternate ? 2 : 1,
        .first_block = half * epmoei_ceil_div(half_rows, epmoei_pack_row_group(matrix->pack)),
    };
}

/* The rows in hand as tiles, in the host's memory. */
static epmoe_status_t tile(epmoei_quant_writer_t *writer, const epmoei_quant_tiles_t *tiles,
                           epmoei_tile_arrays_t *arrays)
{
    const epmoei_quant_matrix_t *matrix = &writer->matrix;
    epmoe_weight_t weight =
        epmoei_layer_weight(EPMOE_BACKEND_CPU, matrix->pack->format, matrix->pack, writer->rows_data, &writer->rows);
    for (int pass = 0; pass < 2; pass++) {
        epmoei_arena_t arena = {pass ? writer->tiles_memory : NULL, 0};
        arrays->data = epmoei_carve(&arena, tiles->data_bytes);
        arrays->scales = epmoei_carve(&arena, tiles->scales_bytes);
        arrays->zeros = writer->rows.zeros ? epmoei_carve(&arena, tiles->zeros_bytes) : NULL;
        if (!pass) EPMOEI_CHECK(grow(&writer->tiles_memory, &writer->tiles_bytes, arena.used));
    }
    epmoei_quant_t rows = epmoei_quant_of_weight(&weight, matrix->rows, matrix->cols, 0, 0);
    epmoei_tiles_pack(tiles, &rows, arrays);
    return EPMOE_OK;
}

epmoe_status_t epmoei_quant_writer_end(epmoei_quant_writer_t *writer)
{
    const epmoei_quant_matrix_t *matrix = &writer->matrix;
    const epmoei_pack_shape_t *pack = matrix->pack;
    if (writer->backend != EPMOE_BACKEND_CUDA) return EPMOE_OK;
    epmoei_matrix_sizes_t sizes =
        epmoei_matrix_sizes(EPMOE_BACKEND_CUDA, pack->format, pack, matrix->rows, matrix->cols, matrix->halves);
    epmoei_tile_arrays_t from = {writer->rows_data, writer->rows.scales, writer->rows.zeros};
    if (pack->format != EPMOE_FORMAT_FP8_BLOCK) {
        epmoei_quant_tiles_t tiles = epmoei_quant_tiles(pack->format, pack->scales_dtype, matrix->rows, matrix->cols,
                                                        pack->group, matrix->halves);
        EPMOEI_CHECK(tile(writer, &tiles, &from));
    }
    const struct {
        void *to;
        const void *from;
        int64_t bytes;
    } copies[] = {{matrix->data, from.data, sizes.data},
                  {matrix->arrays.scales, from.scales, sizes.scales},
                  {matrix->arrays.zeros, from.zeros, sizes.zeros},
                  {matrix->arrays.order, writer->rows.order, sizes.order}};
    for (size_t i = 0; i < sizeof copies / sizeof copies[0]; i++)
        if (copies[i].bytes)
            EPMOEI_CHECK(
                epmoei_memory_copy(writer->backend, copies[i].to, copies[i].from, copies[i].bytes, writer->stream));
    return epmoei_stream_wait(writer->backend, writer->stream);
}

void epmoei_quant_writer_close(epmoei_quant_writer_t *writer)
{
    epmoei_free(writer->rows_memory);
    epmoei_free(writer->tiles_memory);
    *writer = (epmoei_quant_writer_t){0};
}
