#include "moe/layer_weights.h"

#include "base/device.h"
#include "base/dtype.h"
#include "kernels/kernel_table.h"
#include "kernels/plain_tiles.h"

/* A matrix is brought into tiles where it lies, a run of whole blocks of rows at a time by way of a copy. */
#define COPY_BYTES ((int64_t)64 << 20)

typedef struct matrix_t {
    void *data; /* [experts,rows,cols] */
    epmoe_format_t format;
    epmoei_pack_shape_t *pack;
    int32_t rows;
    int32_t cols;
    bool gated;
    int64_t experts;
} matrix_t;

static bool wants_tiles(const matrix_t *matrix)
{
    return matrix->data && (matrix->format == EPMOE_FORMAT_BF16 || matrix->format == EPMOE_FORMAT_F16) &&
           epmoei_plain_tiles_fit(matrix->rows, matrix->cols, matrix->gated);
}

/* Rows that are copied at a time: all of some experts, or some blocks of one expert. */
static int64_t rows_at_once(const matrix_t *matrix)
{
    const int64_t fit = COPY_BYTES / (2 * (int64_t)matrix->cols);
    if (fit >= matrix->rows) return epmoei_min64(fit / matrix->rows, matrix->experts) * matrix->rows;
    return epmoei_max64(fit / EPMOEI_PLAIN_TILE_ROWS, 1) * EPMOEI_PLAIN_TILE_ROWS;
}

static epmoe_status_t tile(const matrix_t *matrix, void *copy, epmoe_stream_t stream)
{
    const int64_t row_bytes = 2 * (int64_t)matrix->cols, most = rows_at_once(matrix);
    const int64_t all = matrix->experts * matrix->rows;
    for (int64_t first = 0, count; first < all; first += count) {
        /* Whole experts, or a part of one. */
        count = most < matrix->rows ? epmoei_min64(most, matrix->rows - first % matrix->rows)
                                    : epmoei_min64(most, all - first);
        char *place = (char *)matrix->data + first * row_bytes;
        const epmoei_plain_tiles_args_t args = {
            .data = copy,
            .to = place,
            .num_experts = (int32_t)epmoei_max64(count / matrix->rows, 1),
            .n = (int32_t)epmoei_min64(count, matrix->rows),
            .k = matrix->cols,
            .rows = matrix->gated ? EPMOEI_PLAIN_ROWS_IN_TURNS : EPMOEI_PLAIN_ROWS_PLAIN,
        };
        EPMOEI_CHECK(epmoei_memory_copy(EPMOE_BACKEND_CUDA, copy, place, count * row_bytes, stream));
#if EPMOE_HAVE_CUDA
        EPMOEI_CHECK(epmoei_plain_tiles_sm80(&args, stream));
#else
        (void)args;
#endif
    }
    return EPMOE_OK;
}

epmoe_status_t epmoei_layer_tile_weights(epmoe_layer_t *layer)
{
    const epmoe_layer_config_t *config = &layer->config;
    epmoei_packed_weights_t *w = &layer->weights;
    epmoei_layer_formats_t *formats = &w->formats;
    const int32_t d = config->hidden, f = config->intermediate, fs = config->shared_intermediate;
    const matrix_t matrices[] = {
        {w->gate_up, formats->gate_up, &formats->gate_up_pack, 2 * f, d, true, layer->local_experts},
        {w->down, formats->down, &formats->down_pack, d, f, false, layer->local_experts},
        {w->shared_gate_up, formats->shared_gate_up, &formats->shared_gate_up_pack, 2 * fs, d, true, 1},
        {w->shared_down, formats->shared_down, &formats->shared_down_pack, d, fs, false, 1},
    };
    enum { kMatrices = sizeof matrices / sizeof matrices[0] };
    int64_t bytes = 0;
    if (layer->backend != EPMOE_BACKEND_CUDA || epmoei_cuda_tier() != 90) return EPMOE_OK;
    for (int i = 0; i < kMatrices; i++)
        if (wants_tiles(&matrices[i]))
            bytes = epmoei_max64(bytes, 2 * (int64_t)matrices[i].cols * rows_at_once(&matrices[i]));
    if (bytes == 0) return EPMOE_OK;
    void *copy = NULL;
    epmoe_stream_t stream = NULL;
    epmoe_status_t status = epmoei_memory_alloc(EPMOE_BACKEND_CUDA, &copy, bytes, "bringing weights into tiles");
    if (status == EPMOE_OK) status = epmoei_stream_create(&stream);
    for (int i = 0; i < kMatrices && status == EPMOE_OK; i++) {
        if (!wants_tiles(&matrices[i])) continue;
        status = tile(&matrices[i], copy, stream);
        matrices[i].pack->tiles = true;
    }
    if (stream) {
        const epmoe_status_t waited = epmoei_stream_wait(EPMOE_BACKEND_CUDA, stream);
        if (status == EPMOE_OK) status = waited;
    }
    epmoei_stream_destroy(stream);
    epmoei_memory_free(EPMOE_BACKEND_CUDA, copy);
    return status;
}
