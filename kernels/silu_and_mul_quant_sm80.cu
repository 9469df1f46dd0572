#include "kernels/fp8_cuda.cuh"
#include "kernels/launch_cuda.cuh"
#include "kernels/parts_cuda.cuh"
#include "kernels/silu_and_mul_cuda.cuh"

namespace
{

constexpr int kRun = EPMOEI_SILU_RUN;
constexpr int kGroup = 128;             /* columns of a BLOCK128 scale */
constexpr int kShare = 16;              /* of a thread */
constexpr int kLanes = kGroup / kShare; /* threads of a group */
constexpr int kThreads = 256;
constexpr int kHeld =
    4; /* runs of a thread that keeps its share of a row: up to 8192 columns; the rest is made twice */

/* Rounded to T: what the op without quant would have stored. */
template <typename T, int kCount>
__device__ __forceinline__ void rounded_run(float (&y)[kCount], const epmoe_silu_and_mul_args_t &args, int64_t row,
                                            int64_t col)
{
    epmoei_silu_run<T>(y, args, row, col);
#pragma unroll
    for (int i = 0; i < kCount; i++) y[i] = epmoei_to_float(epmoei_from_float<T>(y[i]));
}

/* fmaxf drops a NaN. */
template <int kCount> __device__ __forceinline__ float fold_amax(float amax, const float (&y)[kCount])
{
#pragma unroll
    for (int i = 0; i < kCount; i++) amax = fmaxf(amax, fabsf(y[i]));
    return amax;
}

template <bool kBounded, int kCount>
__device__ __forceinline__ void store_codes(const epmoe_silu_and_mul_args_t &args, int64_t row, int64_t col,
                                            float (&y)[kCount], const epmoei_divisor_t &divisor)
{
    epmoei_divide_run<kBounded>(y, divisor);
    epmoei_store_e4m3((uint8_t *)args.y + row * args.y_stride + col, y);
}

/* ------------------------------------------------------------------------------------------------------- kernels */

/* Gates or ups of kCount outputs as they are stored: whole 16 bytes, or one. */
template <typename T, int kCount> struct stored_t {
    uint4 parts[kCount / epmoei_part_size<T>];
    __device__ __forceinline__ void clear()
    {
#pragma unroll
        for (int p = 0; p < kCount / epmoei_part_size<T>; p++) parts[p] = make_uint4(0, 0, 0, 0);
    }
    __device__ __forceinline__ void load(const T *x)
    {
#pragma unroll
        for (int p = 0; p < kCount / epmoei_part_size<T>; p++) parts[p] = ((const uint4 *)x)[p];
    }
    __device__ __forceinline__ void widen(float (&to)[kCount]) const
    {
#pragma unroll
        for (int p = 0; p < kCount / epmoei_part_size<T>; p++) {
            float part[epmoei_part_size<T>];
            epmoei_unpack_part<T>(part, parts[p]);
#pragma unroll
            for (int i = 0; i < epmoei_part_size<T>; i++) to[p * epmoei_part_size<T> + i] = part[i];
        }
    }
};
template <typename T> struct stored_t<T, 1> {
    T element;
    __device__ __forceinline__ void clear() { element = epmoei_from_float<T>(0.0f); }
    __device__ __forceinline__ void load(const T *x) { element = *x; }
    __device__ __forceinline__ void widen(float (&to)[1]) const { to[0] = epmoei_to_float(element); }
};

/* A group of a row, and the step to the thread's next one. */
struct group_walk_t {
    int64_t row;
    int32_t group;
    int32_t groups;
    int64_t row_step;
    int32_t group_step;
    __device__ __forceinline__ group_walk_t(int64_t first, int64_t step, int32_t all)
        : row(first / all), group((int32_t)(first % all)), groups(all), row_step(step / all),
          group_step((int32_t)(step % all))
    {
    }
    __device__ __forceinline__ void advance()
    {
        row += row_step;
        group += group_step;
        if (group >= groups) group -= groups, row++;
    }
};

/* kLanes threads a group of 128 columns; with a static scale nobody has to agree on one. What a thread needs of the
 * next group is on its way while it makes codes of this one. */
template <typename T, int kCount, bool kFixed>
__global__ void __launch_bounds__(kThreads) silu_groups_kernel(const epmoe_silu_and_mul_args_t args)
{
    constexpr int kRounds = kShare / kCount;
    const int32_t lane = threadIdx.x % kLanes;
    const int32_t groups = (args.width + kGroup - 1) / kGroup;
    const int64_t step = (int64_t)gridDim.x * (kThreads / kLanes);
    group_walk_t at((int64_t)blockIdx.x * (kThreads / kLanes) + threadIdx.x / kLanes, step, groups);
    epmoei_begin_dependent();
    epmoei_divisor_t divisor = epmoei_divisor(kFixed ? *args.static_scale : 1.0f);
    stored_t<T, kCount> gates[kRounds], ups[kRounds];
    const auto load = [&]() {
        const T *x = (const T *)args.x + at.row * args.x_stride;
#pragma unroll
        for (int r = 0; r < kRounds; r++) {
            const int32_t col = at.group * kGroup + (r * kLanes + lane) * kCount;
            if (at.row < args.num_tokens && col < args.width) {
                gates[r].load(x + col);
                ups[r].load(x + args.width + col);
            } else {
                gates[r].clear();
                ups[r].clear();
            }
        }
    };
    load();
    /* The threads of a group take part in its shuffles, and no others. */
    const uint32_t lanes = ((1u << kLanes) - 1) << (threadIdx.x % 32 / kLanes * kLanes);
    while (at.row < args.num_tokens) {
        const int64_t row = at.row;
        const int32_t group = at.group;
        float y[kRounds][kCount], amax = 0.0f;
#pragma unroll
        for (int r = 0; r < kRounds; r++) {
            float up[kCount];
            gates[r].widen(y[r]);
            ups[r].widen(up);
            epmoei_activate_pairs<T>(y[r], up, args);
#pragma unroll
            for (int i = 0; i < kCount; i++) y[r][i] = epmoei_to_float(epmoei_from_float<T>(y[r][i]));
            amax = fold_amax(amax, y[r]);
        }
        at.advance();
        load();
        if (!kFixed) {
#pragma unroll
            for (int i = kLanes / 2; i > 0; i /= 2) amax = fmaxf(amax, __shfl_xor_sync(lanes, amax, i));
            const float scale = epmoei_scale_of_amax(amax);
            if (lane == 0) args.scale[row * groups + group] = scale;
            divisor = epmoei_divisor(scale);
        }
#pragma unroll
        for (int r = 0; r < kRounds; r++) {
            const int32_t col = group * kGroup + (r * kLanes + lane) * kCount;
            if (col < args.width) store_codes<!kFixed>(args, row, col, y[r], divisor);
        }
    }
}

/* What a thread keeps: kRun rounded elements, in as few registers as they need. */
template <typename T> struct held_t {
    uint4 parts[kRun / epmoei_part_size<T>];
};
template <typename T> __device__ __forceinline__ void hold(held_t<T> &held, const float (&y)[kRun])
{
#pragma unroll
    for (int p = 0; p < kRun / epmoei_part_size<T>; p++) {
        float part[epmoei_part_size<T>];
#pragma unroll
        for (int i = 0; i < epmoei_part_size<T>; i++) part[i] = y[p * epmoei_part_size<T> + i];
        held.parts[p] = epmoei_pack_part<T>(part);
    }
}
template <typename T> __device__ __forceinline__ void unhold(float (&y)[kRun], const held_t<T> &held)
{
#pragma unroll
    for (int p = 0; p < kRun / epmoei_part_size<T>; p++) {
        float part[epmoei_part_size<T>];
        epmoei_unpack_part<T>(part, held.parts[p]);
#pragma unroll
        for (int i = 0; i < epmoei_part_size<T>; i++) y[p * epmoei_part_size<T> + i] = part[i];
    }
}

/* A block a row. */
template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads) silu_rows_kernel(const epmoe_silu_and_mul_args_t args)
{
    constexpr int kKept = kCount == kRun ? kHeld : 0;
    const int64_t stride = (int64_t)kThreads * kCount, beyond = kKept * stride;
    epmoei_begin_dependent();
    for (int64_t row = blockIdx.x; row < args.num_tokens; row += gridDim.x) {
        const int64_t own = (int64_t)threadIdx.x * kCount;
        held_t<T> held[kHeld];
        float y[kCount], amax = 0.0f;
        if constexpr (kKept > 0) {
#pragma unroll
            for (int i = 0; i < kKept; i++) {
                if (own + i * stride >= args.width) continue;
                rounded_run<T>(y, args, row, own + i * stride);
                hold<T>(held[i], y);
                amax = fold_amax(amax, y);
            }
        }
        for (int64_t col = own + beyond; col < args.width; col += stride) {
            rounded_run<T>(y, args, row, col);
            amax = fold_amax(amax, y);
        }
        const float scale = epmoei_scale_of_amax(epmoei_block_max<kThreads>(amax));
        const epmoei_divisor_t divisor = epmoei_divisor(scale);
        if (threadIdx.x == 0) args.scale[row] = scale;
        if constexpr (kKept > 0) {
#pragma unroll
            for (int i = 0; i < kKept; i++) {
                if (own + i * stride >= args.width) continue;
                unhold<T>(y, held[i]);
                store_codes<true>(args, row, own + i * stride, y, divisor);
            }
        }
        for (int64_t col = own + beyond; col < args.width; col += stride) {
            rounded_run<T>(y, args, row, col);
            store_codes<true>(args, row, col, y, divisor);
        }
    }
}

/* -------------------------------------------------------------------------------------------------------- launch */

template <typename T, int kCount> epmoe_status_t launch(const epmoe_silu_and_mul_args_t *args, epmoe_stream_t stream)
{
    const int64_t most_blocks = 16 * (int64_t)epmoei_device_current()->num_sms;
    const bool rows = args->quant == EPMOE_GRANULARITY_TOKEN, fixed = args->quant == EPMOE_GRANULARITY_TENSOR;
    const auto kernel = rows    ? silu_rows_kernel<T, kCount>
                        : fixed ? silu_groups_kernel<T, kCount, true>
                                : silu_groups_kernel<T, kCount, false>;
    const int64_t groups = args->num_tokens * epmoei_ceil_div(args->width, kGroup);
    const int64_t work = rows ? args->num_tokens : epmoei_ceil_div(groups, kThreads / kLanes);
    return epmoei_cuda_status(
        (int32_t)epmoei_launch_dependent(kernel, (unsigned)epmoei_min64(work, most_blocks), kThreads, 0, stream, *args),
        "epmoe_silu_and_mul");
}

template <typename T> epmoe_status_t launch_aligned(const epmoe_silu_and_mul_args_t *args, epmoe_stream_t stream)
{
    const bool aligned =
        args->width % kRun == 0 && args->x_stride % (16 / (int64_t)sizeof(T)) == 0 && args->y_stride % kRun == 0;
    return aligned ? launch<T, kRun>(args, stream) : launch<T, 1>(args, stream);
}

} // namespace

extern "C" epmoe_status_t epmoei_silu_and_mul_quant_sm80(const epmoe_silu_and_mul_args_t *args, epmoe_stream_t stream)
{
    switch (args->dtype) {
    case EPMOE_BF16: return launch_aligned<__nv_bfloat16>(args, stream);
    case EPMOE_F16: return launch_aligned<__half>(args, stream);
    default: return launch_aligned<float>(args, stream);
    }
}
