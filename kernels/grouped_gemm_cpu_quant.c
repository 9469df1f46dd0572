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

/* Few rows of codes that lie along a row, in groups of whole vectors, are widened in registers. */
static bool streams(const epmoei_quant_tile_t *tile, const epmoei_quant_t *quant)
{
    bool rowwise = quant->format == EPMOE_FORMAT_FP8_BLOCK || quant->format == EPMOE_FORMAT_MXFP4 ||
                   quant->format == EPMOE_FORMAT_W4 || (quant->format == EPMOE_FORMAT_CT_W4 && !quant->g_idx);
    bool even = quant->group % EPMOEI_CODED_STEP == 0 || quant->group >= quant->cols;
    return rowwise && even && !tile->blas && quant->cols % EPMOEI_CODED_STEP == 0;
}

/* The codes of a piece, and its scales and zero points as fp32. */
static void take_codes(const epmoei_quant_tile_t *tile, const epmoei_quant_t *quant, int32_t first, int32_t depth)
{
    int64_t bits = quant->format == EPMOE_FORMAT_FP8_BLOCK ? 8 : 4;
    int64_t group0 = first / quant->group, groups = (first + depth - 1) / quant->group - group0 + 1;
    bool zeros = bits == 4 && quant->format != EPMOE_FORMAT_MXFP4;
    for (int32_t w = 0; w < tile->num_w; w++) {
        int64_t row = tile->w_index[w];
        float *scale = tile->w + 2 * w * groups, *zero = scale + groups;
        for (int64_t g = 0; g < groups; g++) {
            scale[g] = epmoei_quant_scale(quant, epmoei_quant_scale_at(quant, row, group0 + g));
            if (zeros) zero[g] = (float)epmoei_quant_zero(quant, row, group0 + g);
        }
        tile->coded[w] = (epmoei_coded_row_t){(const char *)quant->data + (row * quant->cols + first) * bits / 8, scale,
                                              zeros ? zero : NULL};
    }
}

static void widen_rows(const epmoei_quant_tile_t *tile, const epmoei_quant_t *quant, int32_t first, int32_t depth)
{
    for (int32_t w = 0; w < tile->num_w; w++)
        epmoei_quant_row(quant, tile->w_index[w], first, depth, tile->w + (int64_t)w * depth);
}

static void stream(const epmoei_quant_tile_t *tile, const epmoei_quant_t *quant, int32_t w0, int32_t w1, int32_t first,
                   int32_t depth, float *to)
{
    epmoei_coded_rows_fn rows = quant->format == EPMOE_FORMAT_FP8_BLOCK ? tile->table->e4m3
                                : quant->format == EPMOE_FORMAT_MXFP4   ? tile->table->e2m1
                                                                        : tile->table->w4;
    /* One group may be said to be wider than the row is. */
    int32_t group = (int32_t)epmoei_min64(quant->group, quant->cols);
    rows(tile->coded + w0, w1 - w0, tile->x_at, tile->rows, first, depth, group, to, tile->rows);
}

/* out = or += rows [w0,w1) times x. */
static void multiply(const epmoei_quant_tile_t *tile, const epmoei_quant_t *quant, int32_t w0, int32_t w1,
                     int32_t first, int32_t depth)
{
    bool add = first > 0;
    int64_t at = (int64_t)w0 * tile->rows;
    if (w0 == w1) return;
    if (tile->blas) {
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, w1 - w0, tile->rows, depth, 1.0f,
                    tile->w + (int64_t)w0 * depth, depth, tile->x, depth, add ? 1.0f : 0.0f, tile->out + at,
                    tile->rows);
        return;
    }
    float *to = add ? tile->part : tile->out + at;
    if (streams(tile, quant)) {
        stream(tile, quant, w0, w1, first, depth, to);
    } else {
        for (int32_t w = w0; w < w1; w++) tile->w_rows[w] = tile->w + (int64_t)w * depth;
        tile->table->f32(tile->w_rows + w0, w1 - w0, tile->x_at, tile->rows, depth, to, tile->rows);
    }
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
        if (streams(tile, &quant))
            take_codes(tile, &quant, first, depth);
        else
            widen_rows(tile, &quant, first, depth);
        take_x(tile, order, first, depth);
        if (order && tile->num_gate < tile->num_w) {
            multiply(tile, &quant, 0, tile->num_gate, first, depth);
            take_x(tile, order + args->k, first, depth);
            multiply(tile, &quant, tile->num_gate, tile->num_w, first, depth);
        } else {
            multiply(tile, &quant, 0, tile->num_w, first, depth);
        }
    }
}
