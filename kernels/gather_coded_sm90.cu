/* Rows that are quantised already into the sorted order of a grouped GEMM, of the wire or the caller's: what
 * kernels/quantize_rows_sm90.cu does of rows that are not. Floor: bytes = 2*R*(K + 4*K/128), of which the reads of a
 * token's k slots hit the L2 cache; of codes that stay where they are, their scales alone. */
#include "kernels/grouped_gemm_fp8.h"
#include "kernels/launch_cuda.cuh"
#include "kernels/rows_cuda.cuh"

namespace
{

constexpr int kUnit = 16;                          /* codes of a thread */
constexpr int kGroup = EPMOEI_FP8_COLUMNS / kUnit; /* threads that share a scale */
constexpr int kRowsInFlight = 4;

struct gather_t {
    /* Row i: codes from i * codes_stride on, the scale of 128 columns j at i * steps.row + j * steps.block. */
    const uint8_t *codes;
    const float *scales;
    int64_t codes_stride;
    epmoei_scale_steps_t steps;
    epmoei_fp8_rows_t to;
    const int32_t *expert_offsets;
    const int32_t *row_index;
    const int32_t *num_rows_dev;
    int32_t num_experts;
    int32_t max_rows;
    int32_t num_slots;
    int32_t x_row_divisor;
    int32_t x_sorted;
    int32_t k;
};

/* Other ranks may have written the rows: they are read past the first-level cache. */
__global__ void __launch_bounds__(256) gather_coded_kernel(const gather_t g)
{
    const int32_t unit = (int32_t)(blockIdx.x * blockDim.x + threadIdx.x);
    epmoei_begin_dependent();
    if (unit == 0 && blockIdx.y == 0) *g.to.dealt = 0;
    if (unit >= g.k / kUnit) return;
    const bool has_scale = g.steps.block ? unit % kGroup == 0 : unit == 0;
    const int64_t begin = g.expert_offsets ? g.expert_offsets[0] : 0;
    const int64_t end =
        g.expert_offsets ? g.expert_offsets[g.num_experts] : epmoei_device_tokens(g.num_rows_dev, g.max_rows);
    for (int64_t first = begin + (int64_t)blockIdx.y; first < end; first += (int64_t)kRowsInFlight * gridDim.y) {
        uint4 codes[kRowsInFlight];
        float scale[kRowsInFlight];
        bool used[kRowsInFlight];
#pragma unroll
        for (int i = 0; i < kRowsInFlight; i++) {
            const int64_t row = first + (int64_t)i * gridDim.y;
            const int32_t slot = row >= end ? -1 : g.row_index ? g.row_index[row] : (int32_t)row;
            used[i] = slot >= 0 && slot < g.num_slots;
            if (!used[i]) continue;
            const int64_t from = g.x_sorted ? row : slot / g.x_row_divisor;
            codes[i] = __ldcg(reinterpret_cast<const uint4 *>(g.codes + from * g.codes_stride) + unit);
            if (has_scale) scale[i] = __ldcg(g.scales + from * g.steps.row + unit / kGroup * g.steps.block);
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

/* The scales alone, of rows whose codes stay where they are. */
__global__ void __launch_bounds__(256) spread_scales_kernel(const gather_t g, int32_t rows, int64_t total)
{
    epmoei_begin_dependent();
    if (blockIdx.x == 0 && threadIdx.x == 0) *g.to.dealt = 0;
    for (int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; at < total;
         at += (int64_t)gridDim.x * blockDim.x) {
        const int64_t block = at / rows, row = at % rows;
        g.to.scales[block * g.to.stride + row] = g.scales[row * g.steps.row + block * g.steps.block];
    }
}

gather_t gather(const epmoe_grouped_gemm_args_t *args, const epmoei_fp8_rows_t *to)
{
    gather_t g = {};
    g.to = *to;
    g.expert_offsets = args->expert_offsets;
    g.row_index = args->row_index;
    g.num_rows_dev = args->num_rows_dev;
    g.num_experts = args->num_experts;
    g.max_rows = args->max_rows;
    g.num_slots = args->num_slots;
    g.x_row_divisor = args->x_row_divisor;
    g.x_sorted = args->x_sorted;
    g.k = args->k;
    return g;
}

epmoe_status_t launch(const gather_t &g, epmoe_stream_t stream)
{
    epmoei_row_grid_t grid = epmoei_row_grid(g.max_rows, g.k / kUnit);
    grid.blocks.y = (unsigned)epmoei_min64(epmoei_ceil_div(g.max_rows, kRowsInFlight), 65535);
    return epmoei_cuda_status(
        (int32_t)epmoei_launch_dependent(gather_coded_kernel, grid.blocks, grid.threads, 0, stream, g), "gather_coded");
}

} // namespace

extern "C" epmoe_status_t epmoei_gather_coded_rows_sm90(const epmoe_grouped_gemm_args_t *args,
                                                        const epmoei_coded_rows_t *from, const epmoei_fp8_rows_t *to,
                                                        epmoe_stream_t stream)
{
    gather_t g = gather(args, to);
    g.codes = from->codes;
    g.scales = from->scales;
    g.codes_stride = from->codes_stride;
    g.steps.row = from->scales_stride;
    g.steps.block = 1;
    return launch(g, stream);
}

extern "C" epmoe_status_t epmoei_sort_codes_sm90(const epmoe_grouped_gemm_args_t *args, epmoei_fp8_rows_t *to,
                                                 epmoe_stream_t stream)
{
    gather_t g = gather(args, to);
    g.codes = (const uint8_t *)args->x;
    g.scales = args->x_scale;
    g.codes_stride = args->k;
    g.steps = epmoei_scale_steps(args->x_quant, args->k);
    if (g.steps.block == 0) g.to.stride = to->stride = 0;
    /* The product's tiles reach to max_rows, and so must x where it is read in place. */
    const bool in_place =
        args->x_sorted || (!args->row_index && args->x_row_divisor == 1 && args->max_rows <= args->num_slots);
    if (!in_place) return launch(g, stream);
    to->codes = (uint8_t *)const_cast<void *>(args->x);
    const int32_t rows = args->max_rows;
    const int64_t total = rows * (g.steps.block ? epmoei_coded_blocks(args->k) : 1);
    const unsigned blocks = (unsigned)epmoei_min64(epmoei_ceil_div(total, 256), 1 << 16);
    return epmoei_cuda_status(
        (int32_t)epmoei_launch_dependent(spread_scales_kernel, dim3(blocks), dim3(256), 0, stream, g, rows, total),
        "spread_scales");
}
