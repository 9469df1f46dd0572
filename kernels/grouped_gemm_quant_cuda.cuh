/* What the CUDA kernels on quantised weights share: parameters, where rows and scales lie. */
#ifndef EPMOEI_GROUPED_GEMM_QUANT_CUDA_CUH
#define EPMOEI_GROUPED_GEMM_QUANT_CUDA_CUH

#include "kernels/grouped_gemm_cuda.cuh"
#include "kernels/grouped_gemm_quant.h"
#include "kernels/quant_cuda.cuh"
#include "kernels/quant_tiles.h"

/* Passed by value. */
struct quant_params_t {
    gemm_params_t gemm;
    const void *scales;
    const uint8_t *zeros;
    epmoe_dtype_t scales_dtype;
    int32_t scale_bytes;
    int32_t group;       /* columns; a multiple of 64 where one is all */
    int32_t groups;      /* of a row */
    int32_t group_steps; /* of 16 columns */
    int32_t group_shift; /* step s of a block is in group s >> group_shift of the block */
    int32_t tiles;       /* W4, MXFP4: of 64 device rows */
    int32_t row_group;   /* FP8: rows of a scale */
    int32_t row_blocks;  /* FP8: scales along the rows of an expert */
    int32_t up_block;    /* FP8, packed: that of the first up row; 0 = blocks go on over the rows as they lie */
};

static inline quant_params_t quant_params(const epmoe_grouped_gemm_args_t *args)
{
    const epmoe_weight_t *weight = &args->weight;
    quant_params_t p = {};
    p.gemm = gemm_params(args);
    p.scales = weight->scales;
    p.zeros = (const uint8_t *)weight->zeros;
    p.scales_dtype = weight->scales_dtype;
    p.scale_bytes = epmoe_dtype_size(weight->scales_dtype);
    p.groups = (int32_t)epmoei_ceil_div(args->k, weight->group_size);
    p.group = p.groups == 1 ? (int32_t)epmoei_round_up(args->k, EPMOEI_TILE_COLS) : weight->group_size;
    p.group_steps = p.group / 16;
    p.group_shift = p.group == 16 ? 0 : p.group == 32 ? 1 : 2;
    p.tiles = (int32_t)epmoei_quant_tiles(weight->format, weight->scales_dtype, args->n, args->k, weight->group_size,
                                          p.gemm.gated)
                  .tiles;
    /* Of the other formats there is none. */
    p.row_group = weight->group_rows ? weight->group_rows : weight->group_size;
    p.row_blocks = (int32_t)epmoei_ceil_div(args->n, p.row_group);
    if (p.gemm.gated && args->layout == EPMOE_LAYOUT_PACKED) {
        p.up_block = (int32_t)epmoei_ceil_div(p.gemm.n_out, p.row_group);
        p.row_blocks = 2 * p.up_block;
    }
    return p;
}

/* Row of an FP8 weight in memory under device row `row`; not below n when it is padding. */
__device__ __forceinline__ int32_t quant_fp8_row(const gemm_params_t &p, int32_t row)
{
    if (!p.gated) return row;
    const int32_t output = row / 16 * 8 + row % 8, up = row >> 3 & 1;
    if (output >= p.n_out) return p.n;
    return p.interleaved ? 2 * output + up : up * p.n_out + output;
}

/* Where the scales of the weight's row `row` under device row `device_row` begin. */
__device__ __forceinline__ int64_t quant_fp8_scales(const quant_params_t &p, int32_t expert, int32_t device_row)
{
    const int32_t row = quant_fp8_row(p.gemm, device_row);
    if (row >= p.gemm.n) return 0;
    int32_t block = row / p.row_group;
    if (p.up_block) block = row / 2 / p.row_group + (row & 1 ? p.up_block : 0);
    return ((int64_t)expert * p.row_blocks + block) * p.groups;
}

__device__ __forceinline__ float quant_load_scale(const quant_params_t &p, int64_t at)
{
    if (p.scale_bytes == 4) return ((const float *)p.scales)[at];
    const uint32_t bits = p.scale_bytes == 2 ? ((const uint16_t *)p.scales)[at] : ((const uint8_t *)p.scales)[at];
    return quant_scale(bits, p.scales_dtype);
}

/* Scales of rows lane/4 and lane/4 + 8, which lie side by side in shared memory. */
__device__ __forceinline__ float2 quant_scale_pair(const quant_params_t &p, const char *scales, int pair)
{
    if (p.scale_bytes == 4) return ((const float2 *)scales)[pair];
    if (p.scale_bytes == 1) {
        const uint32_t bits = ((const uint16_t *)scales)[pair];
        return make_float2(quant_scale(bits & 255, EPMOE_F8_E8M0), quant_scale(bits >> 8, EPMOE_F8_E8M0));
    }
    const uint32_t bits = ((const uint32_t *)scales)[pair];
    return make_float2(quant_scale(bits & 0xFFFF, p.scales_dtype), quant_scale(bits >> 16, p.scales_dtype));
}

__device__ __forceinline__ uint32_t quant_word_of(const uint4 &words, int i)
{
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

#endif
