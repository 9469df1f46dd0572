#include "kernels/grouped_gemm_cpu_quant.h"

#include <cblas.h>

/* Columns [first, first + depth) of x as the stored columns of w want them; `order` NULL = as they are. */
static void take_x(const epmoei_quant_tile_t *tile, const int32_t *order, int32_t first, int32_t depth)
{
    for (int32_t r = 0; r < tile->rows; r++) {
        const float *from = tile->x_rows[r];
        float *to = tile->x + (int64_t)r * depth;
        tile->x_at[r] = order || tile->blas ? to : from + first;
        if (order)
            for (int32_t i = 0; i < depth; i++) to[i] = from[order[first + i]];
        else if (tile->blas)
            memcpy(to, from + first, (size_t)depth * 4);
    }
}

/* out = or += widened rows [w0,w1) times x. */
static void multiply(const epmoei_quant_tile_t *tile, int32_t w0, int32_t w1, int32_t depth, bool add)
{
    int64_t at = (int64_t)w0 * tile->rows;
    if (w0 == w1) return;
    if (tile->blas) {
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, w1 - w0, tile->rows, depth, 1.0f,
                    tile->w + (int64_t)w0 * depth, depth, tile->x, depth, add ? 1.0f : 0.0f, tile->out + at,
                    tile->rows);
        return;
    }
    float *to = add ? tile->part : tile->out + at;
    for (int32_t w = w0; w < w1; w++) tile->w_rows[w] = tile->w + (int64_t)w * depth;
    tile->table->f32(tile->w_rows + w0, w1 - w0, tile->x_at, tile->rows, depth, to, tile->rows);
    if (!add) return;
    for (int64_t i = 0; i < (int64_t)(w1 - w0) * tile->rows; i++) tile->out[at + i] += to[i];
}

void epmoei_quant_tile_multiply(const epmoei_quant_tile_t *tile)
{
    const epmoe_grouped_gemm_args_t *args = tile->args;
    int64_t half = epmoei_grouped_gemm_second_half(args);
    epmoei_quant_t quant = epmoei_quant_of_weight(&args->weight, args->n, args->k, tile->expert, half);
    const int32_t *order = quant.format == EPMOE_FORMAT_W4 ? quant.g_idx : NULL;
    for (int32_t first = 0; first < args->k; first += EPMOEI_QUANT_DEPTH) {
        int32_t depth = (int32_t)epmoei_min64(EPMOEI_QUANT_DEPTH, args->k - first);
        for (int32_t w = 0; w < tile->num_w; w++)
            epmoei_quant_row(&quant, tile->w_index[w], first, depth, tile->w + (int64_t)w * depth);
        take_x(tile, order, first, depth);
        if (order && tile->num_gate < tile->num_w) {
            multiply(tile, 0, tile->num_gate, depth, first > 0);
            take_x(tile, order + args->k, first, depth);
            multiply(tile, tile->num_gate, tile->num_w, depth, first > 0);
        } else {
            multiply(tile, 0, tile->num_w, depth, first > 0);
        }
    }
}
