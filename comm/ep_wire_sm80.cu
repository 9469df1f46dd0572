/* Rows in FP8 inside one rank on the device. Bound by memory bandwidth: rows are read and written once, those of
 * several rows under way at once. */
#include "comm/ep_wire.h"
#include "kernels/coded_rows_cuda.cuh"
#include "kernels/launch_cuda.cuh"
#include "kernels/rows_cuda.cuh"

static constexpr int kMostThreads = 256; /* of epmoei_row_grid */
static constexpr int kDecodedRun = 8;    /* columns of a thread: 16 bytes of a 16-bit x */
static constexpr int kDecodedRows = 4;   /* of a thread at once */

/* kRounds: to x instead of codes. */
template <typename T, bool kAligned, bool kRounds>
static __global__ void __launch_bounds__(kMostThreads)
    code_rows_kernel(const epmoei_encode_rows_t args, T *rounded, const int32_t *num_rows_dev)
{
    const int32_t run = (int32_t)(blockIdx.x * blockDim.x + threadIdx.x);
    const uint32_t column = (uint32_t)run * kCodedRun;
    const int64_t blocks = (args.hidden + EPMOEI_FP8_COLUMNS - 1) / EPMOEI_FP8_COLUMNS;
    const uint32_t lanes = 0xFFu << (threadIdx.x & 24);
    epmoei_begin_dependent();
    if (run >= blocks * kCodedLanes) return; /* whole scales */
    int64_t num_rows = args.num_rows;
    if (num_rows_dev) num_rows = epmoei_device_tokens(num_rows_dev, (int32_t)num_rows);
    for (int64_t i = blockIdx.y; i < num_rows; i += gridDim.y) {
        const int64_t row = args.index ? args.index[i + (i < args.gap_at ? 0 : args.gap)] : i;
        coded_run_t<T, kCodedRun> loaded;
        uint4 codes;
        coded_load<kAligned>(&loaded, static_cast<const T *>(args.src) + row * args.hidden, column, args.hidden);
        const float scale = coded_encode(loaded, lanes, &codes);
        if constexpr (kRounds) {
            const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
            coded_store<kAligned>(rounded + i * args.hidden, column, args.hidden, words, scale);
        } else {
            float *scales = args.dst.scales + i * args.dst.scales_stride;
            if (column < (uint32_t)args.hidden)
                *reinterpret_cast<uint4 *>(args.dst.codes + i * args.dst.codes_stride + column) = codes;
            if (run % kCodedLanes == 0) scales[run / kCodedLanes] = scale;
            if (run < (blocks + 3) / 4 * 4 - blocks) scales[blocks + run] = 0.0f;
        }
    }
}

/* What peers have written is read past the first-level cache. */
template <typename T, bool kAligned>
static __global__ void __launch_bounds__(kMostThreads) decode_rows_kernel(const epmoei_decode_rows_t args)
{
    const uint32_t column = (blockIdx.x * blockDim.x + threadIdx.x) * kDecodedRun;
    epmoei_begin_dependent();
    if (column >= (uint32_t)args.hidden) return;
    int64_t num_rows = args.num_rows, gap_at = args.gap_at, gap = args.gap;
    if (args.num_rows_dev) num_rows = epmoei_device_tokens(args.num_rows_dev, (int32_t)num_rows);
    if (args.gap_dev) gap_at = args.gap_dev[0], gap = args.gap_dev[1];
    num_rows -= gap;
    for (int64_t first = blockIdx.y; first < num_rows; first += (int64_t)kDecodedRows * gridDim.y) {
        uint2 codes[kDecodedRows];
        float scale[kDecodedRows];
#pragma unroll
        for (int i = 0; i < kDecodedRows; i++) {
            int64_t row = first + (int64_t)i * gridDim.y;
            if (row >= num_rows) continue;
            if (row >= gap_at) row += gap;
            codes[i] = __ldcg(reinterpret_cast<const uint2 *>(args.src.codes + row * args.src.codes_stride + column));
            scale[i] = __ldcg(args.src.scales + row * args.src.scales_stride + column / EPMOEI_FP8_COLUMNS);
        }
#pragma unroll
        for (int i = 0; i < kDecodedRows; i++) {
            int64_t row = first + (int64_t)i * gridDim.y;
            if (row >= num_rows) continue;
            if (row >= gap_at) row += gap;
            const uint32_t words[2] = {codes[i].x, codes[i].y};
            coded_store<kAligned>(static_cast<T *>(args.dst) + row * args.hidden, column, args.hidden, words, scale[i]);
        }
    }
}

template <typename T, bool kRounds>
static epmoe_status_t code_rows(const epmoei_encode_rows_t *args, void *rounded, const int32_t *num_rows_dev,
                                epmoe_stream_t stream)
{
    const epmoei_row_grid_t grid = epmoei_row_grid(args->num_rows, epmoei_coded_blocks(args->hidden) * kCodedLanes);
    auto *kernel = args->hidden % 8 == 0 ? code_rows_kernel<T, true, kRounds> : code_rows_kernel<T, false, kRounds>;
    return epmoei_cuda_status(epmoei_launch_dependent(kernel, grid.blocks, grid.threads, 0, stream, *args,
                                                      static_cast<T *>(rounded), num_rows_dev),
                              "code_rows_kernel");
}

template <typename T> static epmoe_status_t decode_rows(const epmoei_decode_rows_t *args, epmoe_stream_t stream)
{
    epmoei_row_grid_t grid = epmoei_row_grid(args->num_rows, epmoei_ceil_div(args->hidden, kDecodedRun));
    auto *kernel = args->hidden % 8 == 0 ? decode_rows_kernel<T, true> : decode_rows_kernel<T, false>;
    return epmoei_cuda_status(epmoei_launch_dependent(kernel, grid.blocks, grid.threads, 0, stream, *args),
                              "decode_rows_kernel");
}

extern "C" epmoe_status_t epmoei_encode_rows_sm80(const epmoei_encode_rows_t *args, epmoe_stream_t stream)
{
    if (args->num_rows == 0) return EPMOE_OK;
    switch (args->dtype) {
    case EPMOE_BF16: return code_rows<__nv_bfloat16, false>(args, nullptr, nullptr, stream);
    case EPMOE_F16: return code_rows<__half, false>(args, nullptr, nullptr, stream);
    default: return code_rows<float, false>(args, nullptr, nullptr, stream);
    }
}

extern "C" epmoe_status_t epmoei_round_rows_sm80(const epmoei_round_rows_t *args, epmoe_stream_t stream)
{
    epmoei_encode_rows_t from = {};
    if (args->num_rows == 0) return EPMOE_OK;
    from.src = args->src;
    from.hidden = args->hidden;
    from.index = args->index;
    from.num_rows = args->num_rows;
    switch (args->dtype) {
    case EPMOE_BF16: return code_rows<__nv_bfloat16, true>(&from, args->dst, args->num_rows_dev, stream);
    case EPMOE_F16: return code_rows<__half, true>(&from, args->dst, args->num_rows_dev, stream);
    default: return code_rows<float, true>(&from, args->dst, args->num_rows_dev, stream);
    }
}

extern "C" epmoe_status_t epmoei_decode_rows_sm80(const epmoei_decode_rows_t *args, epmoe_stream_t stream)
{
    if (args->num_rows == 0) return EPMOE_OK;
    switch (args->dtype) {
    case EPMOE_BF16: return decode_rows<__nv_bfloat16>(args, stream);
    case EPMOE_F16: return decode_rows<__half>(args, stream);
    default: return decode_rows<float>(args, stream);
    }
}
