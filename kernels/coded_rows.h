/* Rows as E4M3 codes with a scale per 128 columns: what is on the wire of a dispatch in FP8.
 * Row i has its codes at codes + i*codes_stride and its scales, one per 128 columns, at scales + i*scales_stride. Both
 * begin at multiples of 16 bytes, and a row has room for whole ones: the columns past `hidden` are padding. */
#ifndef EPMOEI_CODED_ROWS_H
#define EPMOEI_CODED_ROWS_H

#include "kernels/quantize_fp8.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct epmoei_coded_rows_t {
    uint8_t *codes;
    float *scales;
    int64_t codes_stride;  /* bytes */
    int64_t scales_stride; /* floats */
} epmoei_coded_rows_t;

/* Scales of a row, and the room that codes and scales take. */
static inline int64_t epmoei_coded_blocks(int64_t hidden) { return epmoei_ceil_div(hidden, EPMOEI_FP8_COLUMNS); }
static inline int64_t epmoei_coded_codes_bytes(int64_t hidden) { return epmoei_round_up(hidden, 16); }
static inline int64_t epmoei_coded_scales_bytes(int64_t hidden)
{
    return epmoei_round_up(4 * epmoei_coded_blocks(hidden), 16);
}

/* Of a row whose scales follow its codes. */
static inline int64_t epmoei_coded_row_bytes(int64_t hidden)
{
    return epmoei_coded_codes_bytes(hidden) + epmoei_coded_scales_bytes(hidden);
}

/* Such rows, one after the other from `base` on. */
static inline epmoei_coded_rows_t epmoei_coded_rows_packed(char *base, int64_t hidden)
{
    int64_t bytes = epmoei_coded_row_bytes(hidden);
    char *scales = base + epmoei_coded_codes_bytes(hidden);
    return (epmoei_coded_rows_t){(uint8_t *)base, (float *)(void *)scales, bytes, bytes / 4};
}

#ifdef __cplusplus
}
#endif

#endif
