#include "kernels/launch_cuda.cuh"
#include "kernels/row_sum_cuda.h"
#include "kernels/rows_cuda.cuh"
#include "kernels/sum.h"

/* Elements of one thread where everything is aligned, and slots' rows that it loads before it adds the first: of one
 * token, or of several that have few slots. */
static const int kRun = 8;
static const int kRowsInFlight = 8;

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

/* Which of a token's slots [first, first + kSlots) are used, as select says; -1 where there is none. */
template <int kTokens, int kSlots>
__device__ __forceinline__ void read_selected(const epmoei_row_sum_t &sum, int32_t num_tokens, int64_t token,
                                              int32_t first, int32_t (&selected)[kTokens][kSlots])
{
#pragma unroll
    for (int t = 0; t < kTokens; t++)
#pragma unroll
        for (int i = 0; i < kSlots; i++) {
            const bool exists = token + t < num_tokens && first + i < sum.top_k;
            selected[t][i] = !exists ? -1 : sum.select ? sum.select[(token + t) * sum.top_k + first + i] : 0;
        }
}

template <typename Out, int kCount>
__device__ __forceinline__ void finish_token(const epmoei_row_sum_t &sum, int64_t at, float (&acc)[kCount])
{
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

/* A thread takes kTokens tokens at a time, kSlots slots of each at once. */
template <typename Y, typename Out, int kCount, int kTokens>
static __global__ void __launch_bounds__(256) row_sum_kernel(epmoei_row_sum_t sum)
{
    constexpr int kSlots = kRowsInFlight / kTokens;
    epmoei_wait_for_predecessor();
    epmoei_allow_dependent();
    int64_t col = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * kCount;
    if (col >= sum.hidden) return;
    const int32_t num_tokens = epmoei_device_tokens(sum.num_tokens_dev, sum.num_tokens);
    /* Read ahead, since the rows wait for them. */
    int32_t next[kTokens][kSlots];
    read_selected(sum, num_tokens, (int64_t)blockIdx.y * kTokens, 0, next);
    for (int64_t token = (int64_t)blockIdx.y * kTokens; token < num_tokens; token += (int64_t)gridDim.y * kTokens) {
        float acc[kTokens][kCount] = {};
        for (int32_t first = 0; first < sum.top_k; first += kSlots) {
            held_run<Y, kCount> held[kTokens][kSlots];
            float weights[kTokens][kSlots];
            bool used[kTokens][kSlots];
            if (first > 0) read_selected(sum, num_tokens, token, first, next);
#pragma unroll
            for (int t = 0; t < kTokens; t++)
#pragma unroll
                for (int i = 0; i < kSlots; i++) {
                    const int64_t slot = (token + t) * sum.top_k + first + i;
                    const int64_t row = slot_row(sum, slot, next[t][i], col == 0);
                    used[t][i] = row >= 0;
                    if (!used[t][i]) continue;
                    weights[t][i] = sum.weights ? sum.weights[slot] : 1.0f;
                    held[t][i] = *(const held_run<Y, kCount> *)((const Y *)sum.y + row * sum.hidden + col);
                }
            if (first + kSlots >= sum.top_k)
                read_selected(sum, num_tokens, token + (int64_t)gridDim.y * kTokens, 0, next);
#pragma unroll
            for (int t = 0; t < kTokens; t++)
#pragma unroll
                for (int i = 0; i < kSlots; i++) {
                    if (!used[t][i]) continue;
                    float values[kCount];
                    epmoei_load_run(values, (const Y *)&held[t][i]);
                    add_run(acc[t], values, weights[t][i]);
                }
        }
#pragma unroll
        for (int t = 0; t < kTokens; t++)
            if (token + t < num_tokens) finish_token<Out>(sum, (token + t) * sum.hidden + col, acc[t]);
    }
}

template <typename Y, typename Out, int kCount>
static epmoe_status_t launch(const epmoei_row_sum_t *sum, const char *op, epmoe_stream_t stream)
{
    void (*kernel)(epmoei_row_sum_t) = row_sum_kernel<Y, Out, kCount, 1>;
    int32_t tokens = 1;
    /* One element at a time is for odd widths alone: the form with the least code is enough. */
    if constexpr (kCount > 1) {
        if (sum->top_k <= 2)
            kernel = row_sum_kernel<Y, Out, kCount, 4>, tokens = 4;
        else if (sum->top_k <= 4)
            kernel = row_sum_kernel<Y, Out, kCount, 2>, tokens = 2;
    }
    const epmoei_device_info_t *device = epmoei_device_current();
    epmoei_row_grid_t grid = epmoei_row_grid(epmoei_ceil_div(sum->num_tokens, tokens), sum->hidden / kCount);
    /* Blocks that are all on the device at once read ahead over many tokens. */
    const int64_t resident = epmoei_max64(1, (int64_t)device->num_sms * 4 / grid.blocks.x);
    grid.blocks.y = (unsigned)epmoei_min64(grid.blocks.y, resident);
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
    return epmoei_row_sum_sm80(&sum, "epmoe_sum", stream);
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
