/* kernels/scatter_rows.h: a thread has 16 bytes of some tokens, or the 16 columns of a token that make 16 bytes of
 * codes, and stores them to each of the tokens' places, which it looks up while they are on their way. */
#include "kernels/fp8_cuda.cuh"
#include "kernels/launch_cuda.cuh"
#include "kernels/rows_cuda.cuh"
#include "kernels/scatter_rows.h"

namespace
{

constexpr int kTokensInFlight = 4;
constexpr int kCodes = 16;                          /* of a thread */
constexpr int kGroup = EPMOEI_FP8_COLUMNS / kCodes; /* threads that share a scale */

struct scatter_t {
    const uint4 *x;
    const int32_t *places;
    const int32_t *num_tokens_dev;
    int32_t num_tokens;
    int32_t top_k;
    int32_t units; /* 16-byte pieces of a row of x */
    int32_t *dealt;
    uint4 *rows;
    epmoei_fp8_rows_t quantised;
};

__global__ void __launch_bounds__(256) scatter_rows_kernel(const scatter_t s)
{
    const int32_t unit = (int32_t)(blockIdx.x * blockDim.x + threadIdx.x), first = blockIdx.y * kTokensInFlight;
    epmoei_begin_dependent();
    if (unit < 2 && blockIdx.y == 0 && s.dealt) s.dealt[unit] = 0;
    if (unit >= s.units) return;
    uint4 piece[kTokensInFlight];
#pragma unroll
    for (int i = 0; i < kTokensInFlight; i++)
        if (first + i < s.num_tokens) piece[i] = s.x[(int64_t)(first + i) * s.units + unit];
    const int32_t tokens = epmoei_device_tokens(s.num_tokens_dev, s.num_tokens);
#pragma unroll
    for (int i = 0; i < kTokensInFlight; i++) {
        if (first + i >= tokens) break;
        const int32_t *places = s.places + (int64_t)(first + i) * s.top_k;
#pragma unroll 4
        for (int j = 0; j < s.top_k; j++) s.rows[(int64_t)places[j] * s.units + unit] = piece[i];
    }
}

/* The codes of a thread's 16 columns, whose values begin with the 8 of `low`, and the scale of its group. */
template <typename T>
__device__ __forceinline__ uint4 quantise(const uint4 &low, const uint4 &high, uint32_t lanes, float *scale)
{
    const T *const elements[2] = {(const T *)&low, (const T *)&high};
    float values[kCodes], amax = 0.0f;
#pragma unroll
    for (int i = 0; i < kCodes; i++) {
        values[i] = epmoei_to_float(elements[i / 8][i % 8]);
        amax = fmaxf(amax, fabsf(values[i])); /* drops a NaN */
    }
#pragma unroll
    for (int step = 1; step < kGroup; step *= 2) amax = fmaxf(amax, __shfl_xor_sync(lanes, amax, step));
    *scale = epmoei_scale_of_amax(amax);
    epmoei_divide_run<true>(values, epmoei_divisor(*scale));
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        words[i] = epmoei_to_e4m3x2(values[4 * i], values[4 * i + 1]) |
                   epmoei_to_e4m3x2(values[4 * i + 2], values[4 * i + 3]) << 16;
    return make_uint4(words[0], words[1], words[2], words[3]);
}

template <typename T> __global__ void __launch_bounds__(256) scatter_quantised_kernel(const scatter_t s)
{
    constexpr int kTokens = kTokensInFlight / 2;
    const int32_t unit = (int32_t)(blockIdx.x * blockDim.x + threadIdx.x), first = blockIdx.y * kTokens;
    const uint32_t lanes = 0xFFu << (threadIdx.x & 24);
    epmoei_begin_dependent();
    if (unit == 0 && blockIdx.y == 0) *s.quantised.dealt = 0;
    if (unit >= (s.units + 15) / 16 * kGroup) return; /* whole groups */
    uint4 piece[kTokens][2];
#pragma unroll
    for (int i = 0; i < kTokens; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            piece[i][half] = make_uint4(0, 0, 0, 0);
            if (2 * unit + half < s.units && first + i < s.num_tokens)
                piece[i][half] = s.x[(int64_t)(first + i) * s.units + 2 * unit + half];
        }
    const int32_t tokens = epmoei_device_tokens(s.num_tokens_dev, s.num_tokens);
    const int64_t pitch = (int64_t)s.units * 8;
#pragma unroll
    for (int i = 0; i < kTokens; i++) {
        if (first + i >= tokens) break;
        const int32_t *places = s.places + (int64_t)(first + i) * s.top_k;
        float scale;
        const uint4 codes = quantise<T>(piece[i][0], piece[i][1], lanes, &scale);
#pragma unroll 4
        for (int j = 0; j < s.top_k; j++) {
            const int64_t row = places[j];
            uint8_t *const to = s.quantised.codes + row * pitch + unit * kCodes;
            if (2 * unit + 1 < s.units && pitch % kCodes == 0) {
                *(uint4 *)to = codes;
            } else { /* K is a multiple of 8 alone */
                if (2 * unit < s.units) *(uint2 *)to = make_uint2(codes.x, codes.y);
                if (2 * unit + 1 < s.units) *(uint2 *)(to + 8) = make_uint2(codes.z, codes.w);
            }
            if (unit % kGroup == 0) s.quantised.scales[unit / kGroup * s.quantised.stride + row] = scale;
        }
    }
}

/* A thread for every unit of a row, in blocks that no more than a few threads leave idle. */
epmoei_row_grid_t grid_of(int64_t tokens, int64_t tokens_each, int64_t units)
{
    epmoei_row_grid_t grid = epmoei_row_grid(tokens, units);
    grid.blocks.y = (unsigned)epmoei_ceil_div(tokens, tokens_each);
    return grid;
}

} // namespace

extern "C" epmoe_status_t epmoei_scatter_rows_sm90(const epmoei_scatter_rows_args_t *args, epmoe_stream_t stream)
{
    scatter_t s = {};
    s.x = (const uint4 *)args->x;
    s.places = args->places;
    s.dealt = args->dealt;
    s.num_tokens_dev = args->num_tokens_dev;
    s.num_tokens = args->num_tokens;
    s.top_k = args->top_k;
    s.units = args->columns / 8;
    s.rows = (uint4 *)args->rows;
    s.quantised = args->quantised;
    cudaError_t error;
    if (args->rows) {
        const epmoei_row_grid_t grid = grid_of(args->num_tokens, kTokensInFlight, s.units);
        error = epmoei_launch_dependent(scatter_rows_kernel, grid.blocks, grid.threads, 0, stream, s);
    } else {
        const epmoei_row_grid_t grid =
            grid_of(args->num_tokens, kTokensInFlight / 2, epmoei_ceil_div(args->columns, 128) * kGroup);
        error = args->dtype == EPMOE_BF16 ? epmoei_launch_dependent(scatter_quantised_kernel<__nv_bfloat16>,
                                                                    grid.blocks, grid.threads, 0, stream, s)
                                          : epmoei_launch_dependent(scatter_quantised_kernel<__half>, grid.blocks,
                                                                    grid.threads, 0, stream, s);
    }
    return epmoei_cuda_status((int32_t)error, "scatter_rows");
}
