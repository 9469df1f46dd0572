/* Rows of x into the sorted order of a grouped GEMM, their columns in the order in which their expert's weights store
 * them. Floor: bytes = 2*R*K*b + active experts*K*4. */
#include "kernels/grouped_gemm_quant.h"
#include "kernels/launch_cuda.cuh"

namespace
{

constexpr int kThreads = 256;

struct order_t {
    const uint16_t *x;
    uint4 *to;
    const int32_t *order; /* [E,K] */
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

/* A block walks rows; a thread gathers eight columns and stores them at once. */
__global__ void __launch_bounds__(kThreads) order_x_kernel(const order_t o)
{
    epmoei_begin_dependent();
    const int32_t begin = o.expert_offsets ? o.expert_offsets[0] : 0;
    const int32_t end =
        o.expert_offsets ? o.expert_offsets[o.num_experts] : epmoei_device_tokens(o.num_rows_dev, o.max_rows);
    for (int32_t row = begin + (int32_t)blockIdx.x; row < end; row += (int32_t)gridDim.x) {
        const int32_t slot = o.row_index ? o.row_index[row] : row;
        if (slot < 0 || slot >= o.num_slots) continue;
        int32_t expert = 0;
        for (int32_t past = o.num_experts; past - expert > 1;) {
            const int32_t middle = (expert + past) / 2;
            if (o.expert_offsets[middle] <= row)
                expert = middle;
            else
                past = middle;
        }
        const uint16_t *x = o.x + (int64_t)(o.x_sorted ? row : slot / o.x_row_divisor) * o.k;
        const int4 *order = (const int4 *)(o.order + (int64_t)expert * o.k);
        uint4 *to = o.to + (int64_t)row * (o.k / 8);
        for (int32_t i = (int32_t)threadIdx.x; i < o.k / 8; i += kThreads) {
            const int4 a = order[2 * i], b = order[2 * i + 1];
            to[i] = make_uint4(x[a.x] | (uint32_t)x[a.y] << 16, x[a.z] | (uint32_t)x[a.w] << 16,
                               x[b.x] | (uint32_t)x[b.y] << 16, x[b.z] | (uint32_t)x[b.w] << 16);
        }
    }
}

} // namespace

extern "C" epmoe_status_t epmoei_gemm_order_x_sm80(const epmoe_grouped_gemm_args_t *args, void *to,
                                                   epmoe_stream_t stream)
{
    order_t o = {};
    o.x = (const uint16_t *)args->x;
    o.to = (uint4 *)to;
    o.order = args->weight.g_idx;
    o.expert_offsets = args->expert_offsets;
    o.row_index = args->row_index;
    o.num_rows_dev = args->num_rows_dev;
    o.num_experts = args->num_experts;
    o.max_rows = args->max_rows;
    o.num_slots = args->num_slots;
    o.x_row_divisor = args->x_row_divisor;
    o.x_sorted = args->x_sorted;
    o.k = args->k;
    const unsigned blocks = (unsigned)epmoei_min64(args->max_rows, 8 * (int64_t)epmoei_device_current()->num_sms);
    return epmoei_cuda_status((int32_t)epmoei_launch_dependent(order_x_kernel, blocks, kThreads, 0, stream, o),
                              "order_x");
}
