/* Rows of x into the sorted order of a grouped GEMM, quantised on the way: codes and scales of x[row_index[r] /
 * x_row_divisor], or of x[r] when x is sorted. The bits are those of epmoe_quantize_fp8, BLOCK128.
 * Floor: bytes = R*K*(b + 1) + 4*R*K/128, of which the reads of a token's k slots hit the L2 cache. */
#include "kernels/fp8_cuda.cuh"
#include "kernels/grouped_gemm_fp8.h"
#include "kernels/launch_cuda.cuh"
#include "kernels/rows_cuda.cuh"

namespace
{

constexpr int kUnit = 8;            /* elements of a thread: 16 bytes of x */
constexpr int kGroup = 128 / kUnit; /* threads that share a scale */
constexpr int kRowsInFlight = 4;

struct quantize_t {
    const void *x;
    uint8_t *codes;
    float *scales;
    int32_t *dealt;
    const int32_t *expert_offsets;
    const int32_t *row_index;
    const int32_t *num_rows_dev;
    int64_t stride;
    int32_t num_experts;
    int32_t max_rows;
    int32_t num_slots;
    int32_t x_row_divisor;
    int32_t x_sorted;
    int32_t k;
};

template <typename T>
__device__ __forceinline__ void quantize_unit(const quantize_t &q, int64_t row, int32_t unit, const uint4 &piece)
{
    const T *element = (const T *)&piece;
    const uint32_t lanes = 0xFFFFu << (threadIdx.x & 16);
    float values[kUnit], amax = 0.0f;
#pragma unroll
    for (int i = 0; i < kUnit; i++) {
        values[i] = epmoei_to_float(element[i]);
        amax = fmaxf(amax, fabsf(values[i])); /* drops a NaN */
    }
#pragma unroll
    for (int step = 1; step < kGroup; step *= 2) amax = fmaxf(amax, __shfl_xor_sync(lanes, amax, step));
    const float scale = epmoei_scale_of_amax(amax);
    epmoei_divide_run<true>(values, epmoei_divisor(scale));
    if (unit * kUnit < q.k) epmoei_store_e4m3(q.codes + row * q.k + unit * kUnit, values);
    if (unit % kGroup == 0) q.scales[unit / kGroup * q.stride + row] = scale;
}

template <typename T> __global__ void __launch_bounds__(256) quantize_rows_kernel(const quantize_t q)
{
    const int32_t unit = (int32_t)(blockIdx.x * blockDim.x + threadIdx.x);
    epmoei_wait_for_predecessor();
    epmoei_allow_dependent();
    if (unit == 0 && blockIdx.y == 0) *q.dealt = 0;
    if (unit >= (q.k + 127) / 128 * kGroup) return; /* whole groups */
    const int32_t units = q.k / kUnit;
    const int32_t begin = q.expert_offsets ? q.expert_offsets[0] : 0;
    const int32_t end =
        q.expert_offsets ? q.expert_offsets[q.num_experts] : epmoei_device_tokens(q.num_rows_dev, q.max_rows);
    for (int64_t first = begin + (int64_t)blockIdx.y; first < end; first += (int64_t)kRowsInFlight * gridDim.y) {
        uint4 piece[kRowsInFlight];
        bool used[kRowsInFlight];
#pragma unroll
        for (int i = 0; i < kRowsInFlight; i++) {
            const int64_t row = first + (int64_t)i * gridDim.y;
            int32_t slot = row >= end ? -1 : q.row_index ? q.row_index[row] : (int32_t)row;
            used[i] = slot >= 0 && slot < q.num_slots;
            const int64_t from = q.x_sorted ? row : slot / q.x_row_divisor;
            piece[i] = make_uint4(0, 0, 0, 0);
            if (used[i] && unit < units) piece[i] = ((const uint4 *)q.x)[from * units + unit];
        }
#pragma unroll
        for (int i = 0; i < kRowsInFlight; i++)
            if (used[i]) quantize_unit<T>(q, first + (int64_t)i * gridDim.y, unit, piece[i]);
    }
}

} // namespace

extern "C" epmoe_status_t epmoei_quantize_rows_sm90(const epmoe_grouped_gemm_args_t *args, const epmoei_fp8_rows_t *to,
                                                    epmoe_stream_t stream)
{
    quantize_t q = {};
    q.x = args->x;
    q.codes = to->codes;
    q.scales = to->scales;
    q.stride = to->stride;
    q.dealt = to->dealt;
    q.expert_offsets = args->expert_offsets;
    q.row_index = args->row_index;
    q.num_rows_dev = args->num_rows_dev;
    q.num_experts = args->num_experts;
    q.max_rows = args->max_rows;
    q.num_slots = args->num_slots;
    q.x_row_divisor = args->x_row_divisor;
    q.x_sorted = args->x_sorted;
    q.k = args->k;
    epmoei_row_grid_t grid = epmoei_row_grid(args->max_rows, epmoei_ceil_div(args->k, 128) * kGroup);
    grid.blocks.y = (unsigned)epmoei_min64(epmoei_ceil_div(args->max_rows, kRowsInFlight), 65535);
    return epmoei_cuda_status(
        (int32_t)(args->x_dtype == EPMOE_BF16
                      ? epmoei_launch_dependent(quantize_rows_kernel<__nv_bfloat16>, grid.blocks, grid.threads, 0,
                                                stream, q)
                      : epmoei_launch_dependent(quantize_rows_kernel<__half>, grid.blocks, grid.threads, 0, stream, q)),
        "quantize_rows");
}
