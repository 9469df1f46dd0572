#include "kernels/kernel_table.h"
#include "kernels/launch_cuda.cuh"
#include "kernels/row_sum_cuda.h"
#include "kernels/rows_cuda.cuh"
#include "kernels/sum.h"

/* Elements of one thread where everything is aligned, and slots' rows that it loads before it adds the first. Rows take
 * registers, and many threads with few rows each have more under way than few threads with many (docs/performance).
 * Where there are few threads anyhow, each waits for the memory once instead of twice. */
static const int kRun = 8;
static const int kRowsInFlight = 4;
static const int kRowsOfFew = 8;
static const int kThreadsOfFew = 1024; /* of an SM */

/* acc += weight * value, rounded twice as on the CPU, which forms no FMAs: memory bounds this kernel, and so both
 * backends give the same bits. */
template <int kCount>
__device__ __forceinline__ void add_run(float (&acc)[kCount], const float (&values)[kCount], float weight)
{
#pragma unroll
    for (int i = 0; i < kCount; i++) acc[i] = __fadd_rn(acc[i], __fmul_rn(weight, values[i]));
}

/* The row of a slot of which select says `selected`, or -1. */
__device__ __forceinline__ int64_t slot_row(const epmoei_row_sum_t &sum, int64_t slot, int32_t selected, bool counts)
{
    if (selected >= 0 && selected < sum.bound) return sum.gather ? selected : slot;
    if (selected != -1 && counts) epmoei_count_bad(sum.error_word, 1);
    return -1;
}

/* What a thread holds of a row until its turn to be added: as stored, to need few registers. */
template <typename Y, int kCount> struct held_run {
    epmoei_vec16<Y> part[kCount * (int)sizeof(Y) / 16];
};
template <typename Y> struct held_run<Y, 1> {
    Y part[1];
};

template <typename Y, typename Out, int kCount, int kInFlight>
static __global__ void __launch_bounds__(256) row_sum_kernel(epmoei_row_sum_t sum)
{
    epmoei_wait_for_predecessor();
    epmoei_allow_dependent();
    const int64_t col = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * kCount;
    if (col >= sum.hidden) return;
    const int32_t num_tokens = epmoei_device_tokens(sum.num_tokens_dev, sum.num_tokens);
    for (int64_t token = blockIdx.y; token < num_tokens; token += gridDim.y) {
        float acc[kCount] = {};
        for (int32_t first = 0; first < sum.top_k; first += kInFlight) {
            held_run<Y, kCount> held[kInFlight];
            int32_t selected[kInFlight];
            float weights[kInFlight];
            bool used[kInFlight];
            const int64_t slot = token * sum.top_k + first;
#pragma unroll
            for (int i = 0; i < kInFlight; i++)
                selected[i] = first + i >= sum.top_k ? -1 : sum.select ? sum.select[slot + i] : 0;
#pragma unroll
            for (int i = 0; i < kInFlight; i++) {
                const int64_t row = slot_row(sum, slot + i, selected[i], col == 0);
                used[i] = row >= 0;
                if (!used[i]) continue;
                weights[i] = sum.weights ? sum.weights[slot + i] : 1.0f;
                held[i] = *(const held_run<Y, kCount> *)((const Y *)sum.y + row * sum.hidden + col);
            }
#pragma unroll
            for (int i = 0; i < kInFlight; i++) {
                if (!used[i]) continue;
                float values[kCount];
                epmoei_load_run(values, (const Y *)&held[i]);
                add_run(acc, values, weights[i]);
            }
        }
        const int64_t at = token * sum.hidden + col;
        float more[kCount];
        if (sum.addend) {
            epmoei_load_run(more, sum.addend + at);
            add_run(acc, more, 1.0f);
        }
        if (sum.residual) {
            epmoei_load_run(more, (const Out *)sum.residual + at);
            add_run(acc, more, 1.0f);
        }
        epmoei_store_run((Out *)sum.out + at, acc);
    }
}

template <typename Y, typename Out, int kCount>
static epmoe_status_t launch(const epmoei_row_sum_t *sum, const char *op, epmoe_stream_t stream)
{
    epmoei_row_grid_t grid = epmoei_row_grid(sum->num_tokens, sum->hidden / kCount);
    grid.blocks.y = (unsigned)epmoei_min64(sum->num_tokens, 65535); /* a block waits for one token's rows only */
    void (*kernel)(epmoei_row_sum_t) = row_sum_kernel<Y, Out, kCount, kRowsInFlight>;
    const int64_t threads = (int64_t)sum->num_tokens * (sum->hidden / kCount);
    if (sizeof(Y) == 2 && kCount == kRun && sum->top_k > kRowsInFlight &&
        threads <= (int64_t)kThreadsOfFew * epmoei_device_current()->num_sms)
        kernel = row_sum_kernel<Y, Out, kCount, (sizeof(Y) == 2 && kCount == kRun ? kRowsOfFew : kRowsInFlight)>;
    return epmoei_cuda_status((int32_t)epmoei_launch_dependent(kernel, grid.blocks, grid.threads, 0, stream, *sum), op);
}

template <typename Y, typename Out>
static epmoe_status_t launch_width(const epmoei_row_sum_t *sum, const char *op, epmoe_stream_t stream)
{
    return sum->hidden % kRun == 0 ? launch<Y, Out, kRun>(sum, op, stream) : launch<Y, Out, 1>(sum, op, stream);
}

template <typename Y>
static epmoe_status_t launch_to(const epmoei_row_sum_t *sum, const char *op, epmoe_stream_t stream)
{
    switch (sum->out_dtype) {
    case EPMOE_BF16: return launch_width<Y, __nv_bfloat16>(sum, op, stream);
    case EPMOE_F16: return launch_width<Y, __half>(sum, op, stream);
    default: return launch_width<Y, float>(sum, op, stream);
    }
}

extern "C" epmoe_status_t epmoei_row_sum_sm80(const epmoei_row_sum_t *sum, const char *op, epmoe_stream_t stream)
{
    switch (sum->y_dtype) {
    case EPMOE_BF16: return launch_to<__nv_bfloat16>(sum, op, stream);
    case EPMOE_F16: return launch_to<__half>(sum, op, stream);
    default: return launch_to<float>(sum, op, stream);
    }
}

extern "C" epmoe_status_t epmoei_row_sum(const epmoei_row_sum_t *sum, const char *op, epmoe_stream_t stream)
{
    if (epmoei_cuda_tier() == 90 && epmoei_row_sum_fits_sm90(sum)) return epmoei_row_sum_sm90(sum, op, stream);
    return epmoei_row_sum_sm80(sum, op, stream);
}

static epmoe_status_t sum_slots(const epmoe_sum_args_t *args, int32_t bound, int32_t *error_word, epmoe_stream_t stream)
{
    EPMOEI_CHECK_ALIGNED(args->y, 16);
    EPMOEI_CHECK_ALIGNED(args->out, 16);
    EPMOEI_CHECK_ALIGNED(args->addend, 16);
    EPMOEI_CHECK_ALIGNED(args->residual, 16);
    EPMOEI_CHECK_ALIGNED(args->weights, 4);
    EPMOEI_CHECK_ALIGNED(args->ids, 4);
    EPMOEI_CHECK_ALIGNED(args->num_tokens_dev, 4);
    epmoei_row_sum_t sum = {};
    sum.y = args->y;
    sum.select = args->ids;
    sum.weights = args->weights;
    sum.addend = args->addend;
    sum.residual = args->residual;
    sum.out = args->out;
    sum.num_tokens_dev = args->num_tokens_dev;
    sum.error_word = error_word;
    sum.bound = bound;
    sum.num_tokens = args->num_tokens;
    sum.top_k = args->top_k;
    sum.hidden = args->hidden;
    sum.y_dtype = args->y_dtype;
    sum.out_dtype = args->out_dtype;
    return epmoei_row_sum(&sum, "epmoe_sum", stream);
}

extern "C" epmoe_status_t epmoei_sum_sm80(const epmoe_sum_args_t *args, epmoe_stream_t stream)
{
    return sum_slots(args, INT32_MAX, epmoei_error_word(), stream);
}

extern "C" epmoe_status_t epmoei_sum_aligned_sm80(const epmoe_sum_args_t *args, int32_t num_experts,
                                                  epmoe_stream_t stream)
{
    return sum_slots(args, num_experts, NULL, stream);
}
