/* What the kernels that write the paged cache share: where a column lies in its block, and the runs of a thread. */
#ifndef EPMOEI_CACHE_WRITE_CUDA_CUH
#define EPMOEI_CACHE_WRITE_CUDA_CUH

#include "dense_layers/cache_write.h"
#include "kernels/fp8_cuda.cuh"
#include "kernels/parts_cuda.cuh"

/* Keys or values. Column i of head h at place p of a block lies at element
 *     h * head_step + i / run * run_step + i mod run * column_step + p * place_step                    of the block. */
struct epmoei_cache_side_t {
    const void *from;
    void *cache;
    const float *scale; /* or NULL */
    int64_t stride;
    int64_t block_stride;
    int64_t head_step;
    int64_t run_step;
    int64_t place_step;
    int32_t column_step;
    int32_t run;
};

/* Elements from the start of a block's place 0 to column `column` of a head. */
__device__ __forceinline__ int64_t epmoei_cache_inside(const epmoei_cache_side_t &side, int64_t head, int32_t column)
{
    return head * side.head_step + column / side.run * side.run_step + column % side.run * (int64_t)side.column_step;
}

/* Keys and values alike, but for those of V1. */
static inline epmoei_cache_side_t epmoei_cache_side(const epmoe_cache_write_args_t *args)
{
    const int64_t d = args->head_dim, s = args->block_size;
    epmoei_cache_side_t side = {};
    side.run = args->head_dim;
    side.column_step = 1;
    side.head_step = args->layout == EPMOE_CACHE_LAYOUT_NHD ? d : d * s;
    side.place_step = args->layout == EPMOE_CACHE_LAYOUT_NHD ? d * args->num_kv_heads : d;
    return side;
}

static inline epmoei_cache_side_t epmoei_cache_key_side(const epmoe_cache_write_args_t *args)
{
    epmoei_cache_side_t side = epmoei_cache_side(args);
    side.from = args->key;
    side.cache = args->key_cache;
    side.scale = args->k_scale;
    side.stride = args->key_stride;
    side.block_stride = args->key_block_stride;
    if (args->layout != EPMOE_CACHE_LAYOUT_V1) return side;
    side.run = args->key_pack;
    side.run_step = (int64_t)args->block_size * args->key_pack;
    side.place_step = args->key_pack;
    return side;
}

static inline epmoei_cache_side_t epmoei_cache_value_side(const epmoe_cache_write_args_t *args)
{
    epmoei_cache_side_t side = epmoei_cache_side(args);
    side.from = args->value;
    side.cache = args->value_cache;
    side.scale = args->v_scale;
    side.stride = args->value_stride;
    side.block_stride = args->value_block_stride;
    if (args->layout != EPMOE_CACHE_LAYOUT_V1) return side;
    side.column_step = args->block_size;
    side.place_step = 1;
    return side;
}

/* ------------------------------------------------------------------------------------------------- runs of a thread */

/* kRun columns as read: copies go by the size of an element, codes by its type. */
template <typename T, int kRun> struct epmoei_cache_run_t {
    uint4 part;
};
template <typename T> struct epmoei_cache_run_t<T, 1> {
    T element;
};

template <typename T, int kRun>
__device__ __forceinline__ void epmoei_cache_load(epmoei_cache_run_t<T, kRun> &held, const T *from, bool valid,
                                                  bool shared_lines)
{
    if constexpr (kRun == 1)
        held.element = valid ? *from : T();
    else
        held.part = shared_lines ? ptx_load_16(from, valid) : ptx_load_stream_16(from, valid);
}

template <typename T, int kRun>
__device__ __forceinline__ void epmoei_cache_store(T *to, const epmoei_cache_run_t<T, kRun> &held, int32_t step,
                                                   const epmoei_divisor_t &)
{
    if constexpr (kRun == 1)
        *to = held.element;
    else if (step == 1)
        *(uint4 *)to = held.part;
    else {
        T elements[kRun];
        memcpy(elements, &held.part, 16);
#pragma unroll
        for (int i = 0; i < kRun; i++) to[(int64_t)i * step] = elements[i];
    }
}

template <typename T, int kRun>
__device__ __forceinline__ void epmoei_cache_store(uint8_t *to, const epmoei_cache_run_t<T, kRun> &held, int32_t step,
                                                   const epmoei_divisor_t &divisor)
{
    float values[kRun];
    if constexpr (kRun == 1)
        values[0] = epmoei_to_float(held.element);
    else
        epmoei_unpack_part<T>(values, held.part);
    epmoei_divide_run<false>(values, divisor);
    if (step == 1)
        epmoei_store_e4m3(to, values);
    else {
#pragma unroll
        for (int i = 0; i < kRun; i++) to[(int64_t)i * step] = (uint8_t)epmoei_to_e4m3(values[i]);
    }
}

#endif
