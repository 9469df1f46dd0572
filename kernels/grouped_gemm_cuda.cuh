/* What the grouped GEMM kernels of both tiers share: parameters, the device-side tile list, the epilogue's maths. */
#ifndef EPMOEI_GROUPED_GEMM_CUDA_CUH
#define EPMOEI_GROUPED_GEMM_CUDA_CUH

#include "kernels/activation_cuda.cuh"
#include "kernels/cuda_common.cuh"
#include "kernels/grouped_gemm.h"
#include "kernels/quant_formats.h"

/* Passed by value. Sizes as in epmoe_grouped_gemm_args_t. */
struct gemm_params_t {
    const void *x;
    const void *w;
    void *y;
    const int32_t *expert_offsets;
    const int32_t *row_index;
    const float *bias;
    const float *row_weights;
    int32_t num_experts;
    int32_t n;
    int32_t k;
    int32_t n_out;
    int32_t num_slots;
    int32_t x_row_divisor;
    int32_t x_sorted;
    int32_t y_sorted;
    int32_t *dealt;  /* a word that is 0 once the kernel before this one has ended, by which tiles are dealt; NULL: in
                      * turn */
    int32_t chained; /* the kernel before this one wrote x, and everything else is older than that kernel */
    int32_t weight_on_input;
    int32_t interleaved;
    int32_t tiled; /* w as kernels/plain_tiles.h has it */
    int32_t gated;
    int32_t max_rows;
    const int32_t *num_rows_dev;
    epmoe_activation_t activation;
    epmoe_dtype_t y_dtype;
    float alpha;
    float limit;
};

static inline gemm_params_t gemm_params(const epmoe_grouped_gemm_args_t *args)
{
    gemm_params_t p = {};
    p.x = args->x;
    p.w = args->weight.data;
    p.y = args->y;
    p.expert_offsets = args->expert_offsets;
    p.row_index = args->row_index;
    p.bias = args->bias;
    p.row_weights = args->row_weights;
    p.num_experts = args->num_experts;
    p.n = args->n;
    p.k = args->k;
    p.gated = args->activation < EPMOE_ACTIVATION_NONE;
    p.n_out = p.gated ? args->n / 2 : args->n;
    p.num_slots = args->num_slots;
    p.max_rows = args->max_rows;
    p.num_rows_dev = args->num_rows_dev;
    p.x_row_divisor = args->x_row_divisor;
    p.x_sorted = args->x_sorted;
    p.y_sorted = args->y_sorted;
    p.weight_on_input = args->weight_on_input;
    /* Ungated, the rows of w are the outputs, in order. */
    p.interleaved = !p.gated || args->layout != EPMOE_LAYOUT_GATE_FIRST;
    p.tiled = !epmoei_format_is_quantised(args->weight.format) && args->weight.storage == EPMOE_STORAGE_TILES;
    p.activation = args->activation;
    p.y_dtype = args->y_dtype;
    p.alpha = args->alpha;
    p.limit = args->limit;
    return p;
}

/* Row of w under column `col` of the product as the kernel computes it: gate and up always side by side. */
__device__ __forceinline__ int32_t gemm_weight_row(const gemm_params_t &p, int32_t col)
{
    return p.interleaved ? col : (col & 1) * p.n_out + (col >> 1);
}

/* First row of expert e in the sorted order; e = E gives the end. */
__device__ __forceinline__ int32_t gemm_expert_offset(const gemm_params_t &p, int32_t e)
{
    if (p.expert_offsets) return p.expert_offsets[e];
    return e == 0 ? 0 : epmoei_device_tokens(p.num_rows_dev, p.max_rows);
}

/* The largest number of row tiles that max_rows rows of num_experts experts can make. */
static inline int64_t gemm_max_row_tiles(const epmoe_grouped_gemm_args_t *args, int32_t block_m)
{
    int64_t partial = epmoei_min64(args->num_experts, args->max_rows);
    return epmoei_min64(args->max_rows, args->max_rows / block_m + partial);
}

/* cumulative[i] = row tiles of the experts at places below i, in shared memory [E+1]; returns the total. The expert at
 * place i is order[i], or i. All threads of the block. */
template <int kThreads>
__device__ int32_t gemm_count_tiles(const gemm_params_t &p, int32_t block_m, int32_t *cumulative, int32_t *warp_sums,
                                    const int16_t *order = nullptr)
{
    constexpr int kWarps = kThreads / 32;
    int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int32_t base = 0;
    if (threadIdx.x == 0) cumulative[0] = 0;
    for (int32_t first = 0; first < p.num_experts; first += kThreads) {
        int32_t e = first + (int32_t)threadIdx.x;
        int32_t tiles = 0;
        if (e < p.num_experts) {
            const int32_t expert = order ? order[e] : e;
            int32_t rows = gemm_expert_offset(p, expert + 1) - gemm_expert_offset(p, expert);
            tiles = rows > 0 ? (rows + block_m - 1) / block_m : 0;
        }
        int32_t sum = tiles;
        for (int32_t step = 1; step < 32; step *= 2) {
            int32_t other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
            if (lane >= step) sum += other;
        }
        if (lane == 31) warp_sums[warp] = sum;
        __syncthreads();
        int32_t before = 0, all = 0;
        for (int32_t i = 0; i < kWarps; i++) {
            if (i < warp) before += warp_sums[i];
            all += warp_sums[i];
        }
        if (e < p.num_experts) cumulative[e + 1] = base + before + sum;
        base += all;
        __syncthreads();
    }
    return base;
}

struct gemm_tile_t {
    int32_t expert;
    int32_t row;  /* first row, in the sorted order */
    int32_t rows; /* 1..block_m */
    int32_t col;  /* first column of the product */
};

/* Whose tile it is. */
__device__ __forceinline__ int32_t gemm_find_expert(const gemm_params_t &p, const int32_t *cumulative, int64_t tile,
                                                    int32_t col_tiles)
{
    int32_t lo = 0, hi = p.num_experts;
    while (hi - lo > 1) {
        int32_t mid = (lo + hi) / 2;
        if ((int64_t)cumulative[mid] * col_tiles <= tile)
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}

/* Tiles of an expert follow each other, its row tiles fastest, so that blocks that run together share weights. */
__device__ __forceinline__ gemm_tile_t gemm_find_tile(const gemm_params_t &p, const int32_t *cumulative, int64_t tile,
                                                      int32_t col_tiles, int32_t block_m, int32_t block_n)
{
    const int32_t lo = gemm_find_expert(p, cumulative, tile, col_tiles);
    int32_t row_tiles = cumulative[lo + 1] - cumulative[lo];
    int32_t local = (int32_t)(tile - (int64_t)cumulative[lo] * col_tiles);
    gemm_tile_t t;
    t.expert = lo;
    t.row = gemm_expert_offset(p, lo) + local % row_tiles * block_m;
    t.rows = min(block_m, gemm_expert_offset(p, lo + 1) - t.row);
    t.col = local / row_tiles * block_n;
    return t;
}

/* Of each row of a tile: its slot, -1 = none, and the row of x that it reads. */
template <int kRows, int kThreads>
__device__ __forceinline__ void gemm_find_rows(const gemm_params_t &p, const gemm_tile_t &tile, int32_t *slots,
                                               int32_t *x_rows)
{
    for (int i = threadIdx.x; i < kRows; i += kThreads) {
        int32_t slot = -1;
        if (i < tile.rows) {
            slot = p.row_index ? p.row_index[tile.row + i] : tile.row + i;
            if (slot < 0 || slot >= p.num_slots) slot = -1;
        }
        slots[i] = slot;
        x_rows[i] = slot < 0 ? 0 : p.x_sorted ? tile.row + i : slot / p.x_row_divisor;
    }
}

/* One output from the accumulators of its column(s): weight, bias, activation. `col` is the even column of a pair when
 * gated. */
__device__ __forceinline__ float gemm_finish(const gemm_params_t &p, const float *bias, float weight, int32_t col,
                                             float a, float b)
{
    if (p.weight_on_input) {
        a *= weight;
        b *= weight;
    }
    float value = a;
    if (bias) value += bias[gemm_weight_row(p, col)];
    if (p.gated) {
        float up = b;
        if (bias) up += bias[gemm_weight_row(p, col + 1)];
        value = epmoei_activate_device(p.activation, value, up, p.alpha, p.limit);
    } else if (p.activation == EPMOE_ACTIVATION_SIGMOID)
        value = epmoei_sigmoid_device(value);
    return p.weight_on_input ? value : value * weight;
}

/* kCount outputs from `col` on, of one row, to y. */
template <int kCount>
__device__ __forceinline__ void gemm_store(const gemm_params_t &p, int64_t element, const float (&value)[kCount])
{
    if (p.y_dtype == EPMOE_F32) {
        float *y = (float *)p.y + element;
        if constexpr (kCount % 4 == 0)
#pragma unroll
            for (int i = 0; i < kCount; i += 4)
                *(float4 *)(y + i) = make_float4(value[i], value[i + 1], value[i + 2], value[i + 3]);
        else if constexpr (kCount == 2)
            *(float2 *)y = make_float2(value[0], value[1]);
        else
            y[0] = value[0];
        return;
    }
    uint16_t bits[kCount];
#pragma unroll
    for (int i = 0; i < kCount; i++)
        bits[i] = p.y_dtype == EPMOE_BF16 ? __bfloat16_as_ushort(__float2bfloat16_rn(value[i]))
                                          : __half_as_ushort(__float2half_rn(value[i]));
    uint16_t *y = (uint16_t *)p.y + element;
    if constexpr (kCount == 8)
        *(uint4 *)y = make_uint4(bits[0] | (uint32_t)bits[1] << 16, bits[2] | (uint32_t)bits[3] << 16,
                                 bits[4] | (uint32_t)bits[5] << 16, bits[6] | (uint32_t)bits[7] << 16);
    else if constexpr (kCount == 4)
        *(uint2 *)y = make_uint2(bits[0] | (uint32_t)bits[1] << 16, bits[2] | (uint32_t)bits[3] << 16);
    else if constexpr (kCount == 2)
        *(uint32_t *)y = bits[0] | (uint32_t)bits[1] << 16;
    else
        y[0] = bits[0];
}

/* Up to kCount neighbouring outputs of one row: one wide store where the row allows it. output(i) gives the values. */
template <int kCount, typename Output>
__device__ __forceinline__ void gemm_store_run(const gemm_params_t &p, int64_t element, int32_t count, Output output)
{
    if (count >= kCount && p.n_out % kCount == 0) {
        float value[kCount];
#pragma unroll
        for (int i = 0; i < kCount; i++) value[i] = output(i);
        gemm_store<kCount>(p, element, value);
        return;
    }
#pragma unroll 1
    for (int i = 0; i < min(count, kCount); i++) {
        float value[1] = {output(i)};
        gemm_store<1>(p, element + i, value);
    }
}

/* The product of a tile, fp32 [rows, block_n] in shared memory, through the epilogue to the rows of y of its `slots`.
 * Eight outputs a thread and step where rows of y allow 16-byte stores, one otherwise. */
template <int kThreads>
__device__ __forceinline__ void gemm_store_tile(const gemm_params_t &p, const gemm_tile_t &tile, const float *staging,
                                                int32_t staging_row, int32_t block_n, const int32_t *slots)
{
    const bool gated = p.gated;
    const float *bias = p.bias ? p.bias + (int64_t)tile.expert * p.n : nullptr;
    const int32_t first = gated ? tile.col / 2 : tile.col;
    const int32_t count = min(gated ? block_n / 2 : block_n, p.n_out - first);
    const int32_t step = p.n_out % 8 == 0 ? 8 : 1;
    const int32_t steps = count / step;
    for (int32_t i = threadIdx.x; i < tile.rows * steps; i += kThreads) {
        int32_t row = i / steps, at = i % steps * step;
        int32_t slot = slots[row];
        if (slot < 0) continue;
        const float *from = staging + row * staging_row + (gated ? 2 * at : at);
        float weight = p.row_weights ? p.row_weights[slot] : 1.0f;
        int64_t element = (int64_t)(p.y_sorted ? tile.row + row : slot) * p.n_out + first + at;
        auto output = [&](int32_t j) {
            int32_t col = gated ? tile.col + 2 * (at + j) : tile.col + at + j;
            return gemm_finish(p, bias, weight, col, from[gated ? 2 * j : j], gated ? from[2 * j + 1] : 0.0f);
        };
        if (step == 8) {
            float value[8];
#pragma unroll
            for (int j = 0; j < 8; j++) value[j] = output(j);
            gemm_store<8>(p, element, value);
        } else {
            float value[1] = {output(0)};
            gemm_store<1>(p, element, value);
        }
    }
}

#endif
