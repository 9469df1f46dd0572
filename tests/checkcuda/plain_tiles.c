#include "tests/checkcuda/plain_tiles.h"

#include "base/device.h"
#include "kernels/plain_tiles.h"

epmoe_status_t check_make_tiles(epmoe_weight_t *weight, int32_t experts, int32_t n, int32_t k, bool gated,
                                epmoe_stream_t stream)
{
    void *tiles = NULL;
    if (!weight->data) return EPMOE_OK;
    EPMOEI_CHECK(epmoei_memory_alloc(EPMOE_BACKEND_CUDA, &tiles, (int64_t)experts * n * k * 2, "tiles"));
    const epmoei_plain_tiles_args_t args = {
        weight->data, tiles, experts, n, k, gated ? EPMOEI_PLAIN_ROWS_IN_TURNS : EPMOEI_PLAIN_ROWS_PLAIN};
    weight->data = tiles;
    weight->storage = EPMOE_STORAGE_TILES;
    return epmoei_plain_tiles_sm80(&args, stream);
}

epmoe_status_t check_drop_tiles(epmoe_weight_t *weight, epmoe_stream_t stream)
{
    const epmoe_status_t status = epmoei_stream_wait(EPMOE_BACKEND_CUDA, stream);
    if (weight->storage == EPMOE_STORAGE_TILES) epmoei_memory_free(EPMOE_BACKEND_CUDA, (void *)(uintptr_t)weight->data);
    return status;
}
