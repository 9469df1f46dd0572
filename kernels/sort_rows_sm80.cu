/* Rows of x into the sorted order of a grouped GEMM, for kernels that copy whole tiles of it: to[r] = x[row_index[r] /
 * x_row_divisor]. Floor: bytes = 2*R*K*b, of which the reads of a token's k slots hit the L2 cache. */
#include "kernels/grouped_gemm.h"
#include "kernels/launch_cuda.cuh"
#include "kernels/rows_cuda.cuh"

namespace
{

struct gather_t {
    const uint4 *x;
    uint4 *to;
    const int32_t *expert_offsets;
    const int32_t *row_index;
    const int32_t *num_rows_dev;
    int32_t num_experts;
    int32_t max_rows;
    int32_t num_slots;
    int32_t x_row_divisor;
    int32_t units; /* 16-byte pieces of a row */
};

/* Rows of which a thread loads its piece before it stores the first. */
constexpr int kRowsInFlight = 4;

__global__ void __launch_bounds__(256) sort_rows_kernel(const gather_t g)
{
    const int32_t unit = (int32_t)(blockIdx.x * blockDim.x + threadIdx.x);
    epmoei_wait_for_predecessor();
    epmoei_allow_dependent();
    if (unit >= g.units) return;
    const int32_t begin = g.expert_offsets ? g.expert_offsets[0] : 0;
    const int32_t end =
        g.expert_offsets ? g.expert_offsets[g.num_experts] : epmoei_device_tokens(g.num_rows_dev, g.max_rows);
    for (int64_t first = begin + (int64_t)blockIdx.y; first < end; first += (int64_t)kRowsInFlight * gridDim.y) {
        uint4 piece[kRowsInFlight];
        bool used[kRowsInFlight];
#pragma unroll
        for (int i = 0; i < kRowsInFlight; i++) {
            const int64_t row = first + (int64_t)i * gridDim.y;
            int32_t slot = row >= end ? -1 : g.row_index ? g.row_index[row] : (int32_t)row;
            used[i] = slot >= 0 && slot < g.num_slots;
            if (used[i]) piece[i] = g.x[(int64_t)(slot / g.x_row_divisor) * g.units + unit];
        }
#pragma unroll
        for (int i = 0; i < kRowsInFlight; i++)
            if (used[i]) g.to[(first + (int64_t)i * gridDim.y) * g.units + unit] = piece[i];
    }
}

} // namespace

extern "C" epmoe_status_t epmoei_sort_rows_sm80(const epmoe_grouped_gemm_args_t *args, void *to, epmoe_stream_t stream)
{
    gather_t g = {};
    g.x = (const uint4 *)args->x;
    g.to = (uint4 *)to;
    g.expert_offsets = args->expert_offsets;
    g.row_index = args->row_index;
    g.num_rows_dev = args->num_rows_dev;
    g.num_experts = args->num_experts;
    g.max_rows = args->max_rows;
    g.num_slots = args->num_slots;
    g.x_row_divisor = args->x_row_divisor;
    g.units = args->k / 8;
    epmoei_row_grid_t grid = epmoei_row_grid(args->max_rows, g.units);
    grid.blocks.y = (unsigned)epmoei_min64(epmoei_ceil_div(args->max_rows, kRowsInFlight), 65535);
    return epmoei_cuda_status(
        (int32_t)epmoei_launch_dependent(sort_rows_kernel, grid.blocks, grid.threads, 0, stream, g), "sort_rows");
}
