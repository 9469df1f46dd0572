/* The inner part of the CPU's attention: some query rows of one cache head against a tile of keys and values in fp32,
 * by one step of the online softmax (Milakov and Gimelshein 2018). Compiled once per instruction set. */
#ifndef EPMOEI_ATTENTION_TILE_H
#define EPMOEI_ATTENTION_TILE_H

#include "kernels/kernel_table.h"

/* Rows and keys of a tile: the keys and values of a head of 128 stay in the first-level cache. */
#define EPMOEI_TILE_ROWS 16
#define EPMOEI_TILE_KEYS 32
/* Rows of the tile's arrays are padded to a multiple of this. */
#define EPMOEI_TILE_LANES 16
#define EPMOEI_TILE_WIDTH EPMOE_MAX_HEAD_DIM

typedef struct epmoei_attention_tile_t {
    int32_t num_rows;
    int32_t width;                   /* of q and keys, padded; what pads is 0 in both */
    int32_t value_width;             /* of acc, padded */
    int32_t value_stride;            /* from value to value */
    const float *values;             /* `own_values`, or `keys` */
    int32_t first[EPMOEI_TILE_ROWS]; /* the keys [first,end) that each row sees, counted as first_key is */
    int32_t end[EPMOEI_TILE_ROWS];
    float top[EPMOEI_TILE_ROWS];                     /* the largest score so far */
    float sum[EPMOEI_TILE_ROWS];                     /* of exp(score - top) */
    float q[EPMOEI_TILE_ROWS * EPMOEI_TILE_WIDTH];   /* [num_rows,width], scaled */
    float acc[EPMOEI_TILE_ROWS * EPMOEI_TILE_WIDTH]; /* [num_rows,value_width]: sum of exp(score - top) * value */
    float keys[EPMOEI_TILE_KEYS * EPMOEI_TILE_WIDTH];
    float own_values[EPMOEI_TILE_KEYS * EPMOEI_TILE_WIDTH];
} epmoei_attention_tile_t;

typedef struct epmoei_attention_isa_t {
    /* n elements of F32, BF16, F16 or F8_E4M3 to fp32. */
    void (*widen)(float *dst, const void *src, epmoe_dtype_t dtype, int32_t n);
    /* Takes in the keys first_key .. first_key + num_keys - 1. Of these, the ones that a row does not see may hold
     * anything. */
    void (*step)(epmoei_attention_tile_t *tile, int32_t first_key, int32_t num_keys);
} epmoei_attention_isa_t;

extern const epmoei_attention_isa_t epmoei_attention_generic;
#if defined(__x86_64__)
extern const epmoei_attention_isa_t epmoei_attention_avx2;
extern const epmoei_attention_isa_t epmoei_attention_avx512;
#endif
const epmoei_attention_isa_t *epmoei_attention_isa(epmoei_cpu_tier_t tier);
/* epmoei_attention_cpu on the instruction set of choice. */
epmoe_status_t epmoei_attention_cpu_isa(const epmoe_attention_args_t *args, const epmoei_attention_isa_t *isa);

#endif
