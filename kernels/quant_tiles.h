/* The device layout of W4 and MXFP4 (kernels/grouped_gemm_quant.h has it in words): from rows, and back. All on host
 * memory.
 * floor: bytes = those of the packed rows + those of the tiles. */
#ifndef EPMOEI_QUANT_TILES_H
#define EPMOEI_QUANT_TILES_H

#include "kernels/quant_pack.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    EPMOEI_TILE_ROWS = 64,
    EPMOEI_TILE_COLS = 64,
    EPMOEI_TILE_BYTES = 2048, /* of one block of codes */
};

/* One expert's matrix of a W4 or MXFP4 weight. */
typedef struct epmoei_quant_tiles_t {
    epmoe_format_t format;
    epmoe_dtype_t scales_dtype;
    int32_t group;
    bool gated;     /* gate and up rows, N/2 each */
    int64_t n;      /* rows of the weight */
    int64_t k;      /* columns */
    int64_t tiles;  /* of 64 device rows */
    int64_t blocks; /* of 64 columns */
    int64_t groups;
    int64_t data_bytes;
    int64_t scales; /* elements */
    int64_t scales_bytes;
    int64_t zeros_bytes; /* W4: if there are any */
} epmoei_quant_tiles_t;
epmoei_quant_tiles_t epmoei_quant_tiles(epmoe_format_t format, epmoe_dtype_t scales_dtype, int64_t n, int64_t k,
                                        int32_t group, bool gated);
/* Groups that the device can compute on: 16, 32, multiples of 64, or one for all k columns. */
bool epmoei_tiles_take_group(int32_t group, int64_t k);

/* Gate rows come first in the weight, as the CPU packs them. -1: the device row is padding. */
int64_t epmoei_tiles_row(const epmoei_quant_tiles_t *tiles, int64_t device_row);
int64_t epmoei_tiles_device_row(const epmoei_quant_tiles_t *tiles, int64_t row);

/* Arrays of one expert. */
typedef struct epmoei_tile_arrays_t {
    void *data;
    void *scales;
    uint8_t *zeros; /* NULL = none */
} epmoei_tile_arrays_t;

/* `packed` is a whole matrix [n,k], gate rows first (rows n, row_step 1): MXFP4 to such tiles, W4, GPTQ, AWQ or CT_W4
 * to those of W4 (no g_idx: W4's is copied as it is). Scales and zeros beyond the matrix are 0. */
void epmoei_tiles_pack(const epmoei_quant_tiles_t *tiles, const epmoei_quant_t *packed, const epmoei_tile_arrays_t *to);
/* The inverse, by element: a code as epmoei_quant_code has it, and where its scale and zero are. */
uint32_t epmoei_tiles_code(const epmoei_quant_tiles_t *tiles, const void *data, int64_t row, int64_t col);
int64_t epmoei_tiles_scale_at(const epmoei_quant_tiles_t *tiles, int64_t row, int64_t group);

/* The four bits of code (register j, half h) of an MXFP4 word: bit[0..2] of the magnitude, the lowest first, bit[3] the
 * sign. Within 16 bits:
 *     j     magnitude   sign    bits 15 and 8..6 (sign, exponent, mantissa of bf16) of register j are
 *     0     0 1 2        9      word << 6
 *     1     4 5 6       13      word << 2
 *     2     10 11 12     3      word rotated right by 4: the sign then comes from the other 16 bits
 *     3     14 7 8      15      word, but bit 6 from word >> 8
 */
void epmoei_mxfp4_bits(int j, int h, int bit[4]);

#ifdef __cplusplus
}
#endif

#endif
