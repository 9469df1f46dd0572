#include "kernels/cuda_common.cuh"
#include "kernels/repack.h"

namespace
{

constexpr int kTile = 32;
constexpr int kRowsPerStep = 8;

/* A 32x32 tile through shared memory: reads run along the source's unit stride, writes along the columns. The padding
 * keeps a column of the tile in 32 different banks. */
template <typename Src, typename Dst>
__global__ void __launch_bounds__(kTile *kRowsPerStep) repack_kernel(const epmoei_repack_args_t args)
{
    __shared__ float tile[kTile][kTile + 1];
    const Src *src = (const Src *)args.src.data;
    Dst *dst = (Dst *)args.dst;
    const int64_t r0 = (int64_t)blockIdx.y * kTile, c0 = (int64_t)blockIdx.x * kTile;
    const bool by_rows = args.src.row_stride < args.src.col_stride;
    for (int i = threadIdx.y; i < kTile; i += kRowsPerStep) {
        int r = by_rows ? (int)threadIdx.x : i, c = by_rows ? i : (int)threadIdx.x;
        if (r0 + r < args.src.rows && c0 + c < args.src.cols)
            tile[r][c] = epmoei_to_float(src[(r0 + r) * args.src.row_stride + (c0 + c) * args.src.col_stride]);
    }
    __syncthreads();
    for (int r = threadIdx.y; r < kTile; r += kRowsPerStep)
        if (r0 + r < args.src.rows && c0 + threadIdx.x < args.src.cols)
            dst[(args.first_row + (r0 + r) * args.row_step) * args.src.cols + c0 + threadIdx.x] =
                epmoei_from_float<Dst>(tile[r][threadIdx.x]);
}

template <typename Src, typename Dst> epmoe_status_t launch(const epmoei_repack_args_t *args, epmoe_stream_t stream)
{
    /* Grid rows are limited to 65535: more rows go in several launches. */
    const int64_t rows_per_launch = (int64_t)65535 * kTile;
    for (int64_t first = 0; first < args->src.rows; first += rows_per_launch) {
        epmoei_repack_args_t part = *args;
        part.src.rows = epmoei_min64(rows_per_launch, args->src.rows - first);
        part.src.data = (const Src *)args->src.data + first * args->src.row_stride;
        part.first_row = args->first_row + first * args->row_step;
        dim3 grid((unsigned)epmoei_ceil_div(part.src.cols, kTile), (unsigned)epmoei_ceil_div(part.src.rows, kTile));
        repack_kernel<Src, Dst><<<grid, dim3(kTile, kRowsPerStep), 0, stream>>>(part);
        EPMOEI_CHECK(EPMOEI_LAUNCH_CHECK("repack"));
    }
    return EPMOE_OK;
}

template <typename Src> epmoe_status_t launch_dst(const epmoei_repack_args_t *args, epmoe_stream_t stream)
{
    switch (args->dst_dtype) {
    case EPMOE_F32: return launch<Src, float>(args, stream);
    case EPMOE_BF16: return launch<Src, __nv_bfloat16>(args, stream);
    default: return launch<Src, __half>(args, stream);
    }
}

} // namespace

extern "C" epmoe_status_t epmoei_repack_sm80(const epmoei_repack_args_t *args, epmoe_stream_t stream)
{
    if (args->src.rows == 0 || args->src.cols == 0) return EPMOE_OK;
    switch (args->src.dtype) {
    case EPMOE_F32: return launch_dst<float>(args, stream);
    case EPMOE_BF16: return launch_dst<__nv_bfloat16>(args, stream);
    default: return launch_dst<__half>(args, stream);
    }
}
