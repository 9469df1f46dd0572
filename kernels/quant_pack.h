/* Repack of quantised weights from where a checkpoint has them into what kernels compute on: a row's columns side by
 * side, its scales too. FP8_BLOCK and MXFP4 keep their codes; GPTQ, AWQ and CT_W4 become W4. Values are preserved bit
 * for bit: dequantising what was packed gives what dequantising the source gives.
 * GPTQ's act-order (g_idx) becomes an order of the columns in which groups are neighbours; the product permutes x.
 * floor: bytes = those of the source + those of the packed rows. */
#ifndef EPMOEI_QUANT_PACK_H
#define EPMOEI_QUANT_PACK_H

#include "kernels/quant_formats.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What the packed matrices of one projection have in common over all experts. */
typedef struct epmoei_pack_shape_t {
    epmoe_format_t format; /* FP8_BLOCK, MXFP4 or W4; NONE: this source can only be dequantised */
    int32_t group;
    epmoe_dtype_t scales_dtype;
    bool zeros;
    bool order;
    int32_t row_group; /* FP8_BLOCK: rows per scale; 0 = group */
    bool tiles;        /* 16 bits, where format is NONE: as kernels/plain_tiles.h has it */
} epmoei_pack_shape_t;

/* How a source packs. NONE for a g_idx whose groups are not all `group` columns wide (but for the last), and for blocks
 * of FP8 that rows of the source cut. g_idx must be in range. */
epmoei_pack_shape_t epmoei_pack_shape(const epmoei_quant_t *source);
/* Rows per scale of FP8_BLOCK. */
static inline int32_t epmoei_pack_row_group(const epmoei_pack_shape_t *shape)
{
    return shape->row_group ? shape->row_group : shape->group;
}
/* The shape that holds both, exactly; format NONE when there is none. */
epmoei_pack_shape_t epmoei_pack_merge(const epmoei_pack_shape_t *a, const epmoei_pack_shape_t *b);

/* One packed matrix [rows,cols] and what goes where. */
typedef struct epmoei_pack_target_t {
    epmoei_pack_shape_t shape;
    void *data;
    void *scales;
    uint8_t *zeros;    /* NULL without shape.zeros */
    int32_t *order;    /* [cols] of these rows; NULL without shape.order */
    int64_t first_row; /* row r of the source becomes row first_row + r * row_step */
    int64_t row_step;
    int64_t first_block; /* FP8_BLOCK: the block row in which the source's first rows are */
} epmoei_pack_target_t;

/* source->cols is the target's; the target's shape is epmoei_pack_shape's or merged from it. */
void epmoei_quant_pack(const epmoei_quant_t *source, const epmoei_pack_target_t *target);

#ifdef __cplusplus
}
#endif

#endif
