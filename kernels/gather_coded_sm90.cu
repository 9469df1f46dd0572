/* Rows that are quantised already into the sorted order of a grouped GEMM: what kernels/quantize_rows_sm90.cu does of
 * rows that are not. Floor: bytes = 2*R*(K + 4*K/128), of which the reads of a token's k slots hit the L2 cache. */
#include "kernels/grouped_gemm_fp8.h"
#include "kernels/launch_cuda.cuh"
#include "kernels/rows_cuda.cuh"

namespace
{

constexpr int kUnit = 16;                          /* codes of a thread */
constexpr int kGroup = EPMOEI_FP8_COLUMNS / kUnit; /* threads that share a scale */
constexpr int kRowsInFlight = 4;

struct gather_t {
    epmoei_coded_rows_t from;
    epmoei_fp8_rows_t to;
    const int32_t *expert_offsets;
    const int32_t *row_index;
    int32_t num_experts;
    int32_t num_slots;
    int32_t x_row_divisor;
    int32_t k;
};

/* Other ranks may have written the rows: they are read past the first-level cache. */
__global__ void __launch_bounds__(256) gather_coded_kernel(const gather_t g)
{
    const int32_t unit = (int32_t)(blockIdx.x * blockDim.x + threadIdx.x);
    epmoei_begin_dependent();
    if (unit >= g.k / kUnit) return;
    const bool has_scale = unit % kGroup == 0;
    const int64_t end = g.expert_offsets[g.num_experts];
    for (int64_t first = g.expert_offsets[0] + (int64_t)blockIdx.y; first < end;
         first += (int64_t)kRowsInFlight * gridDim.y) {
        uint4 codes[kRowsInFlight];
        float scale[kRowsInFlight];
        bool used[kRowsInFlight];
#pragma unroll
        for (int i = 0; i < kRowsInFlight; i++) {
            const int64_t row = first + (int64_t)i * gridDim.y;
            const int32_t slot = row >= end ? -1 : g.row_index[row];
            used[i] = slot >= 0 && slot < g.num_slots;
            if (!used[i]) continue;
            const int64_t from = slot / g.x_row_divisor;
            codes[i] = __ldcg(reinterpret_cast<const uint4 *>(g.from.codes + from * g.from.codes_stride) + unit);
            if (has_scale) scale[i] = __ldcg(g.from.scales + from * g.from.scales_stride + unit / kGroup);
        }
#pragma unroll
        for (int i = 0; i < kRowsInFlight; i++) {
            const int64_t row = first + (int64_t)i * gridDim.y;
            if (!used[i]) continue;
            reinterpret_cast<uint4 *>(g.to.codes + row * g.k)[unit] = codes[i];
            if (has_scale) g.to.scales[unit / kGroup * g.to.stride + row] = scale[i];
        }
    }
}

} // namespace

extern "C" epmoe_status_t epmoei_gather_coded_rows_sm90(const epmoe_grouped_gemm_args_t *args,
                                                        const epmoei_coded_rows_t *from, const epmoei_fp8_rows_t *to,
                                                        epmoe_stream_t stream)
{
    gather_t g = {};
    g.from = *from;
    g.to = *to;
    g.expert_offsets = args->expert_offsets;
    g.row_index = args->row_index;
    g.num_experts = args->num_experts;
    g.num_slots = args->num_slots;
    g.x_row_divisor = args->x_row_divisor;
    g.k = args->k;
    epmoei_row_grid_t grid = epmoei_row_grid(args->max_rows, args->k / kUnit);
    grid.blocks.y = (unsigned)epmoei_min64(epmoei_ceil_div(args->max_rows, kRowsInFlight), 65535);
    return epmoei_cuda_status(
        (int32_t)epmoei_launch_dependent(gather_coded_kernel, grid.blocks, grid.threads, 0, stream, g), "gather_coded");
}
