#include "dense_layers/rms_norm.h"
#include "kernels/fp8_cuda.cuh"
#include "kernels/launch_cuda.cuh"
#include "kernels/parts_cuda.cuh"

#include <string.h>

/* A part is 16 bytes of a row, the unit of a thread: part i of a row belongs to thread i mod blockDim.x, and a thread
 * adds its squares in ascending order. Threads per row depend on the row's length and dtype alone, so that a row's sum
 * has the same bits with and without quantisation, at every T and at every alignment. */
static const int kMostThreads = 1024;
static const int kMostParts = 4; /* of a thread that keeps its share of the row in registers */
static const int kSmallBlock = 128;
static const int kGroupCols = 128; /* of one scale of BLOCK128 */

struct norm_t {
    const void *x;
    void *residual;
    const void *weight;
    void *y;
    const float *static_scale;
    float *scale;
    int64_t x_stride;
    int64_t residual_stride;
    int64_t y_stride;
    double inverse_hidden;
    float eps;
    float offset; /* added to every weight */
    int32_t num_tokens;
    int32_t hidden;
    int32_t num_parts; /* of a row, the last may be narrow */
    epmoe_dtype_t weight_dtype;
    bool weight_as_x;      /* of the same dtype */
    epmoe_dtype_t y_dtype; /* of x, or 16 bits of x in fp32; not looked at with quant */
    epmoe_granularity_t quant;
};

/* ---------------------------------------------------------------------------------------------------- parts as fp32 */

/* The largest magnitude of a part and `amax`; a NaN does not count. */
template <typename Pair> __device__ __forceinline__ float fold_pairs(const uint4 &part, float amax)
{
    Pair pairs[4];
    memcpy(pairs, &part, 16);
    Pair most = __habs2(pairs[0]);
#pragma unroll
    for (int i = 1; i < 4; i++) most = __hmax2(most, __habs2(pairs[i]));
    return fmaxf(amax, fmaxf(epmoei_to_float(most.x), epmoei_to_float(most.y)));
}
__device__ __forceinline__ float fold_amax(const uint4 &part, float amax, __nv_bfloat16)
{
    return fold_pairs<__nv_bfloat162>(part, amax);
}
__device__ __forceinline__ float fold_amax(const uint4 &part, float amax, __half)
{
    return fold_pairs<__half2>(part, amax);
}
__device__ __forceinline__ float fold_amax(const uint4 &part, float amax, float)
{
    float values[4];
    epmoei_unpack_part<float>(values, part);
#pragma unroll
    for (int i = 0; i < 4; i++) amax = fmaxf(amax, fabsf(values[i]));
    return amax;
}

/* round(a + b). */
template <typename T> __device__ __forceinline__ uint4 add_parts(const uint4 &a, const uint4 &b)
{
    float sum[epmoei_part_size<T>], more[epmoei_part_size<T>];
    epmoei_unpack_part<T>(sum, a);
    epmoei_unpack_part<T>(more, b);
#pragma unroll
    for (int i = 0; i < epmoei_part_size<T>; i++) sum[i] = __fadd_rn(sum[i], more[i]);
    return epmoei_pack_part<T>(sum);
}

/* Squares of fp32 values are exact in double, and no finite row overflows it. */
template <typename T> __device__ __forceinline__ void add_squares(double (&sums)[2], const uint4 &part)
{
    float values[epmoei_part_size<T>];
    epmoei_unpack_part<T>(values, part);
#pragma unroll
    for (int i = 0; i < epmoei_part_size<T>; i++) sums[i & 1] = fma((double)values[i], (double)values[i], sums[i & 1]);
}

/* round((s * r) * (w + offset)). */
template <typename T>
__device__ __forceinline__ uint4 normalise(const uint4 &part, const float (&weights)[epmoei_part_size<T>], float r,
                                           float offset)
{
    float values[epmoei_part_size<T>];
    epmoei_unpack_part<T>(values, part);
#pragma unroll
    for (int i = 0; i < epmoei_part_size<T>; i++)
        values[i] = __fmul_rn(__fmul_rn(values[i], r), __fadd_rn(weights[i], offset));
    return epmoei_pack_part<T>(values);
}

/* What y gets of a part: as it is, or rounded to 16 bits. */
template <typename T> __device__ __forceinline__ void store_part(const norm_t &p, int64_t at, const uint4 &part)
{
    if constexpr (sizeof(T) == 4) {
        if (p.y_dtype != EPMOE_F32) {
            float values[4];
            epmoei_unpack_part<float>(values, part);
            *(uint2 *)((uint16_t *)p.y + at) = p.y_dtype == EPMOE_BF16
                                                   ? make_uint2(epmoei_pack_pair(values[0], values[1], __nv_bfloat16()),
                                                                epmoei_pack_pair(values[2], values[3], __nv_bfloat16()))
                                                   : make_uint2(epmoei_pack_pair(values[0], values[1], __half()),
                                                                epmoei_pack_pair(values[2], values[3], __half()));
            return;
        }
    }
    *(uint4 *)((T *)p.y + at) = part;
}

/* One block asks for all weights while the kernel before this one may still run. */
__device__ __forceinline__ void prefetch_weights(const norm_t &p, int32_t weight_bytes)
{
    const int32_t kLine = 128;
    if (blockIdx.x != 0 || threadIdx.y != 0) return;
    for (int64_t at = (int64_t)threadIdx.x * kLine; at < (int64_t)p.hidden * weight_bytes; at += blockDim.x * kLine)
        ptx_prefetch_l2((const char *)p.weight + at);
}

/* ----------------------------------------------------------------------------------------------------- over the row */

/* 1 / sqrt(mean + eps) in every thread of the row. Every thread of the block calls it. */
__device__ __forceinline__ float row_rsqrt(const norm_t &p, double sum)
{
    __shared__ double sums[kMostThreads / 32];
    const int32_t warps = blockDim.x / 32, first = threadIdx.y * warps;
#pragma unroll
    for (int offset = 16; offset; offset /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset);
    if (warps > 1) {
        if (threadIdx.x % 32 == 0) sums[first + threadIdx.x / 32] = sum;
        __syncthreads();
        const int32_t lane = threadIdx.x % 32;
        sum = lane < warps ? sums[first + lane] : 0.0;
#pragma unroll
        for (int offset = 16; offset; offset /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset);
    }
    return (float)rsqrt(fma(sum, p.inverse_hidden, (double)p.eps));
}

template <int kLanes> __device__ __forceinline__ float amax_of_lanes(float amax)
{
#pragma unroll
    for (int offset = kLanes / 2; offset; offset /= 2) amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, offset));
    return amax;
}

/* The same in every thread of the row. Every thread of the block calls it. */
__device__ __forceinline__ float row_amax(float amax)
{
    __shared__ float maxima[kMostThreads / 32];
    const int32_t warps = blockDim.x / 32, first = threadIdx.y * warps;
    amax = amax_of_lanes<32>(amax);
    if (warps == 1) return amax;
    if (threadIdx.x % 32 == 0) maxima[first + threadIdx.x / 32] = amax;
    __syncthreads();
    const int32_t lane = threadIdx.x % 32;
    return amax_of_lanes<32>(lane < warps ? maxima[first + lane] : 0.0f);
}

/* The divisor of a thread's part that begins at column `col`, whose 128 columns lie in neighbouring lanes. Every lane
 * of the warp calls it. */
template <typename T>
__device__ __forceinline__ epmoei_divisor_t group_divisor(const norm_t &p, const uint4 &part, int64_t token,
                                                          int64_t col, bool valid)
{
    const float scale =
        epmoei_scale_of_amax(amax_of_lanes<kGroupCols / epmoei_part_size<T>>(fold_amax(part, 0.0f, T())));
    if (valid && col % kGroupCols == 0)
        p.scale[token * ((p.hidden + kGroupCols - 1) / kGroupCols) + col / kGroupCols] = scale;
    return epmoei_divisor(scale);
}

/* ------------------------------------------------------------------------------------- rows that fit into registers */

template <typename T, bool kBounded>
__device__ __forceinline__ void store_codes(uint8_t *codes, const uint4 &part, const epmoei_divisor_t &divisor)
{
    float values[epmoei_part_size<T>];
    epmoei_unpack_part<T>(values, part);
    epmoei_divide_run<kBounded>(values, divisor);
    epmoei_store_e4m3(codes, values);
}

template <typename T, int kParts>
__device__ __forceinline__ void store_quantised(const norm_t &p, uint4 (&parts)[kParts], int64_t token)
{
    const bool live = token < p.num_tokens;
    uint8_t *codes = (uint8_t *)p.y + token * p.y_stride;
    epmoei_divisor_t divisor;
    if (p.quant == EPMOE_GRANULARITY_TOKEN) {
        float amax = 0.0f;
#pragma unroll
        for (int i = 0; i < kParts; i++) amax = fold_amax(parts[i], amax, T());
        const float scale = epmoei_scale_of_amax(row_amax(amax));
        if (live && threadIdx.x == 0) p.scale[token] = scale;
        divisor = epmoei_divisor(scale);
    } else if (p.quant == EPMOE_GRANULARITY_TENSOR)
        divisor = epmoei_divisor(*p.static_scale);
#pragma unroll
    for (int i = 0; i < kParts; i++) {
        const int32_t part = threadIdx.x + i * blockDim.x;
        const int64_t col = (int64_t)part * epmoei_part_size<T>;
        const bool valid = live && part < p.num_parts;
        if (p.quant == EPMOE_GRANULARITY_BLOCK128) divisor = group_divisor<T>(p, parts[i], token, col, valid);
        if (!valid) continue;
        ptx_forget(parts[i]);
        if (p.quant == EPMOE_GRANULARITY_TENSOR)
            store_codes<T, false>(codes + col, parts[i], divisor);
        else
            store_codes<T, true>(codes + col, parts[i], divisor);
    }
}

/* Of a block, and blocks of an SM, so that enough loads are in flight. */
static constexpr int most_threads(int parts) { return parts == 1 ? 256 : parts == 2 ? 512 : kMostThreads; }
static constexpr int least_blocks(int parts) { return parts == 1 ? 8 : parts == 2 ? 3 : 1; }

/* threadIdx.y is the row in the block. Rows of whole parts at aligned addresses; num_parts <= kParts * blockDim.x. */
template <typename T, int kParts, bool kResidual>
static __global__ void __launch_bounds__(most_threads(kParts), least_blocks(kParts)) norm_kernel(norm_t p)
{
    const int64_t token = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    const T *x = (const T *)p.x + token * p.x_stride;
    T *residual = (T *)p.residual + token * p.residual_stride;
    uint4 parts[kParts], weights[kParts] = {};
    bool valid[kParts];
    if (p.weight_as_x) prefetch_weights(p, sizeof(T));
    epmoei_begin_dependent();
#pragma unroll
    for (int i = 0; i < kParts; i++) {
        const int32_t part = threadIdx.x + i * blockDim.x;
        valid[i] = token < p.num_tokens && part < p.num_parts;
        parts[i] = ptx_load_once_16(x + (int64_t)part * epmoei_part_size<T>, valid[i]);
    }
    if (kResidual) {
        uint4 before[kParts];
#pragma unroll
        for (int i = 0; i < kParts; i++)
            before[i] =
                ptx_load_once_16(residual + (int64_t)(threadIdx.x + i * blockDim.x) * epmoei_part_size<T>, valid[i]);
#pragma unroll
        for (int i = 0; i < kParts; i++) {
            parts[i] = add_parts<T>(parts[i], before[i]);
            if (valid[i])
                *(uint4 *)(residual + (int64_t)(threadIdx.x + i * blockDim.x) * epmoei_part_size<T>) = parts[i];
        }
    }
    if (p.weight_as_x) {
#pragma unroll
        for (int i = 0; i < kParts; i++)
            if (valid[i]) weights[i] = ((const uint4 *)p.weight)[threadIdx.x + i * blockDim.x];
    }
    double sums[2] = {};
#pragma unroll
    for (int i = 0; i < kParts; i++) {
        ptx_forget(parts[i]);
        add_squares<T>(sums, parts[i]);
    }
    const float r = row_rsqrt(p, sums[0] + sums[1]);

#pragma unroll
    for (int i = 0; i < kParts; i++) {
        float w[epmoei_part_size<T>];
        ptx_forget(parts[i]);
        ptx_forget(weights[i]);
        epmoei_unpack_part<T>(w, weights[i]);
        if (!p.weight_as_x && valid[i])
            epmoei_load_floats(w, p.weight, p.weight_dtype,
                               (int64_t)(threadIdx.x + i * blockDim.x) * epmoei_part_size<T>);
        parts[i] = normalise<T>(parts[i], w, r, p.offset);
    }
    if (p.quant != 0) {
        store_quantised<T>(p, parts, token);
        return;
    }
#pragma unroll
    for (int i = 0; i < kParts; i++)
        if (valid[i])
            store_part<T>(p, token * p.y_stride + (int64_t)(threadIdx.x + i * blockDim.x) * epmoei_part_size<T>,
                          parts[i]);
}

/* ---------------------------------------------------------------------------------- rows of any width and alignment */

/* Elements [col, col + kPart) of a row, zeros past its end. */
template <typename T> __device__ __forceinline__ uint4 gather(const T *row, int64_t col, int32_t hidden)
{
    float values[epmoei_part_size<T>];
#pragma unroll
    for (int i = 0; i < epmoei_part_size<T>; i++) values[i] = col + i < hidden ? epmoei_to_float(row[col + i]) : 0.0f;
    return epmoei_pack_part<T>(values);
}

template <typename T>
__device__ __forceinline__ uint4 gather_normalised(const norm_t &p, const T *row, int64_t col, float r)
{
    float weights[epmoei_part_size<T>];
#pragma unroll
    for (int i = 0; i < epmoei_part_size<T>; i++)
        weights[i] = col + i < p.hidden ? epmoei_load_float(p.weight, p.weight_dtype, col + i) : 0.0f;
    return normalise<T>(gather(row, col, p.hidden), weights, r, p.offset);
}

template <typename T> __device__ __forceinline__ void scatter(T *row, int64_t col, int32_t hidden, const uint4 &part)
{
    epmoei_vec16<T> vec;
    memcpy(&vec, &part, 16);
#pragma unroll
    for (int i = 0; i < epmoei_part_size<T>; i++)
        if (col + i < hidden) row[col + i] = vec.element[i];
}

/* Of a part in fp32. */
template <typename Y>
__device__ __forceinline__ void scatter_rounded(Y *row, int64_t col, int32_t hidden, const uint4 &part)
{
    float values[4];
    epmoei_unpack_part<float>(values, part);
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (col + i < hidden) row[col + i] = epmoei_from_float<Y>(values[i]);
}

template <typename T>
__device__ __forceinline__ void scatter_codes(uint8_t *row, int64_t col, int32_t hidden, const uint4 &part,
                                              const epmoei_divisor_t &divisor)
{
    float values[epmoei_part_size<T>];
    epmoei_unpack_part<T>(values, part);
    epmoei_divide_run<false>(values, divisor);
#pragma unroll
    for (int i = 0; i < epmoei_part_size<T>; i++)
        if (col + i < hidden) row[col + i] = (uint8_t)epmoei_to_e4m3(values[i]);
}

/* Element by element, and once more from memory for each pass. A thread reads again only what it alone writes. */
template <typename T> static __global__ void __launch_bounds__(kMostThreads, 1) norm_any_kernel(norm_t p)
{
    epmoei_begin_dependent();
    const int64_t token = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    const bool live = token < p.num_tokens;
    const int32_t hidden = live ? p.hidden : 0;
    const T *x = (const T *)p.x + token * p.x_stride;
    T *residual = p.residual ? (T *)p.residual + token * p.residual_stride : NULL;
    const T *summed = residual ? residual : x;
    double sums[2] = {};
    for (int64_t part = threadIdx.x; part < p.num_parts; part += blockDim.x) {
        const int64_t col = part * epmoei_part_size<T>;
        uint4 values = gather(x, col, hidden);
        if (residual) {
            values = add_parts<T>(values, gather((const T *)residual, col, hidden));
            scatter(residual, col, hidden, values);
        }
        add_squares<T>(sums, values);
    }
    const float r = row_rsqrt(p, sums[0] + sums[1]);

    epmoei_divisor_t divisor;
    if (p.quant == EPMOE_GRANULARITY_TENSOR) divisor = epmoei_divisor(*p.static_scale);
    if (p.quant == EPMOE_GRANULARITY_TOKEN) {
        float amax = 0.0f;
        for (int64_t part = threadIdx.x; part < p.num_parts && live; part += blockDim.x)
            amax = fold_amax(gather_normalised<T>(p, summed, part * epmoei_part_size<T>, r), amax, T());
        const float scale = epmoei_scale_of_amax(row_amax(amax));
        if (live && threadIdx.x == 0) p.scale[token] = scale;
        divisor = epmoei_divisor(scale);
    }
    /* Whole warps, since the lanes of a group agree on its scale. */
    for (int64_t first = 0; first < p.num_parts; first += blockDim.x) {
        const int64_t col = (first + threadIdx.x) * epmoei_part_size<T>;
        const bool valid = col < hidden;
        const uint4 values = valid ? gather_normalised<T>(p, summed, col, r) : make_uint4(0, 0, 0, 0);
        if (p.quant == EPMOE_GRANULARITY_BLOCK128) divisor = group_divisor<T>(p, values, token, col, valid);
        if (!valid) continue;
        if (p.quant != 0)
            scatter_codes<T>((uint8_t *)p.y + token * p.y_stride, col, hidden, values, divisor);
        else if (sizeof(T) == 2 || p.y_dtype == EPMOE_F32)
            scatter((T *)p.y + token * p.y_stride, col, hidden, values);
        else if (p.y_dtype == EPMOE_BF16)
            scatter_rounded((__nv_bfloat16 *)p.y + token * p.y_stride, col, hidden, values);
        else
            scatter_rounded((__half *)p.y + token * p.y_stride, col, hidden, values);
    }
}

/* -------------------------------------------------------------------------------------------------------- launchers */

template <typename T, int kParts>
static cudaError_t launch_parts(const norm_t &p, dim3 blocks, dim3 threads, epmoe_stream_t stream)
{
    return p.residual ? epmoei_launch_dependent(norm_kernel<T, kParts, true>, blocks, threads, 0, stream, p)
                      : epmoei_launch_dependent(norm_kernel<T, kParts, false>, blocks, threads, 0, stream, p);
}

template <typename T> static epmoe_status_t launch(norm_t p, epmoe_stream_t stream)
{
    p.num_parts = (int32_t)epmoei_ceil_div(p.hidden, epmoei_part_size<T>);
    const int64_t y_part = p.quant == 0 ? epmoei_part_size<T> : 16 / (int64_t)sizeof(T);
    const int32_t parts = p.num_parts <= 256 ? 1 : p.num_parts <= 1024 ? 2 : kMostParts;
    int64_t width = epmoei_round_up(epmoei_ceil_div(p.num_parts, parts), 32);
    width = epmoei_min64(width, kMostThreads);
    const int64_t height = epmoei_max64(1, kSmallBlock / width);
    const dim3 threads((unsigned)width, (unsigned)height);
    const dim3 blocks((unsigned)epmoei_ceil_div(p.num_tokens, height));
    bool whole =
        p.hidden % epmoei_part_size<T> == 0 && p.x_stride % epmoei_part_size<T> == 0 && p.y_stride % y_part == 0;
    whole = whole && (!p.residual || p.residual_stride % epmoei_part_size<T> == 0) &&
            p.num_parts <= kMostParts * kMostThreads;
    cudaError_t error;
    if (!whole)
        error = epmoei_launch_dependent(norm_any_kernel<T>, blocks, threads, 0, stream, p);
    else if (parts == 1)
        error = launch_parts<T, 1>(p, blocks, threads, stream);
    else if (parts == 2)
        error = launch_parts<T, 2>(p, blocks, threads, stream);
    else
        error = launch_parts<T, kMostParts>(p, blocks, threads, stream);
    return epmoei_cuda_status((int32_t)error, "epmoe_rms_norm");
}

extern "C" epmoe_status_t epmoei_rms_norm_sm80(const epmoe_rms_norm_args_t *args, epmoe_stream_t stream)
{
    EPMOEI_CHECK_ALIGNED(args->x, 16);
    EPMOEI_CHECK_ALIGNED(args->residual, 16);
    EPMOEI_CHECK_ALIGNED(args->weight, 16);
    EPMOEI_CHECK_ALIGNED(args->y, 16);
    EPMOEI_CHECK_ALIGNED(args->static_scale, 4);
    EPMOEI_CHECK_ALIGNED(args->scale, 4);
    norm_t p = {};
    p.x = args->x;
    p.residual = args->residual;
    p.weight = args->weight;
    p.y = args->y;
    p.static_scale = args->static_scale;
    p.scale = args->scale;
    p.x_stride = args->x_stride;
    p.residual_stride = args->residual_stride;
    p.y_stride = args->y_stride;
    p.inverse_hidden = 1.0 / args->hidden;
    p.eps = args->eps;
    p.offset = args->weight_offset ? 1.0f : 0.0f;
    p.num_tokens = args->num_tokens;
    p.hidden = args->hidden;
    p.weight_dtype = args->weight_dtype;
    p.weight_as_x = args->weight_dtype == args->dtype;
    p.quant = args->quant;
    p.y_dtype = args->y_dtype;
    switch (args->dtype) {
    case EPMOE_BF16: return launch<__nv_bfloat16>(p, stream);
    case EPMOE_F16: return launch<__half>(p, stream);
    default: return launch<float>(p, stream);
    }
}
