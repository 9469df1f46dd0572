#include "dense_layers/self_attention_cuda.h"
#include "kernels/launch_cuda.cuh"
#include "kernels/rows_cuda.cuh"

namespace
{

constexpr int kThreads = 256;

static __global__ void __launch_bounds__(kThreads) fill_batch_kernel(epmoei_paged_batch_t batch)
{
    epmoei_begin_dependent();
    const int64_t token = (int64_t)blockIdx.x * kThreads + threadIdx.x;
    if (token >= batch.num_tokens) return;
    int32_t seq = 0, end = batch.num_seqs;
    while (end - seq > 1) {
        const int32_t middle = seq + (end - seq) / 2;
        if (batch.query_start[middle] <= token)
            seq = middle;
        else
            end = middle;
    }
    const int32_t last = batch.query_start[seq + 1], length = batch.seq_lens[seq];
    int64_t position = 0, slot = -1;
    if (length != 0 && token < last) {
        position = length - (last - token);
        const int64_t index = position / batch.block_size;
        const bool exists = position >= 0 && index < batch.max_blocks;
        const int32_t block = exists ? batch.block_table[(int64_t)seq * batch.max_blocks + index] : -1;
        slot = block < 0 ? INT64_MAX : (int64_t)block * batch.block_size + position % batch.block_size;
    }
    batch.positions[token] = position;
    batch.slots[token] = slot;
}

static __global__ void __launch_bounds__(kThreads)
    head_rows_kernel(int32_t heads, int32_t rows, int32_t *offsets, int32_t *index)
{
    epmoei_begin_dependent();
    const int64_t i = (int64_t)blockIdx.x * kThreads + threadIdx.x;
    if (i <= heads) offsets[i] = (int32_t)i * rows;
    if (i >= (int64_t)heads * rows) return;
    const int32_t head = (int32_t)(i / rows);
    index[i] = ((int32_t)i - head * rows) * heads + head;
}

/* kRun columns that are aligned to 16 bytes where they are more than one. */
template <typename T, int kRun> __device__ __forceinline__ void round_run(T *to, const float *from)
{
    float values[kRun];
    epmoei_load_run(values, from);
    epmoei_store_run(to, values);
}

/* Runs of kRun columns: those of all q rows, then the rope columns of the key's. */
template <typename T, int kRun>
static __global__ void __launch_bounds__(kThreads) join_kernel(const epmoei_join_args_t args)
{
    const int32_t left = args.latent / kRun, right = args.rope / kRun, width = left + right;
    const int64_t step = (int64_t)gridDim.x * kThreads, rows = (int64_t)args.num_tokens * args.num_heads;
    const int64_t of_q = rows * width, all = of_q + (int64_t)args.num_tokens * right;
    epmoei_begin_dependent();
    for (int64_t i = (int64_t)blockIdx.x * kThreads + threadIdx.x; i < all; i += step) {
        if (i >= of_q) {
            const int64_t token = (i - of_q) / right, run = token * width + left + (i - of_q - token * right);
            round_run<T, kRun>((T *)args.key + run * kRun, args.key_rows + run * kRun);
            continue;
        }
        const int64_t row = i / width;
        const int32_t column = (int32_t)(i - row * width);
        T *to = (T *)args.q + i * kRun;
        if (column >= left)
            round_run<T, kRun>(to, args.q_rope + (row * right + column - left) * kRun);
        else if (kRun == 1)
            *to = ((const T *)args.absorbed)[row * left + column];
        else
            *(uint4 *)to = ((const uint4 *)args.absorbed)[row * left + column];
    }
}

template <typename T> static epmoe_status_t join(const epmoei_join_args_t *args, epmoe_stream_t stream)
{
    const int64_t kBlocksPerSm = 8;
    constexpr int kRun = 8;
    const bool whole = args->latent % kRun == 0 && args->rope % kRun == 0;
    const epmoei_device_info_t *device = epmoei_device_current();
    const int64_t most = kBlocksPerSm * (device ? device->num_sms : 1);
    const int64_t columns = (int64_t)args->num_heads * (args->latent + args->rope) + args->rope;
    const int64_t blocks =
        epmoei_min64(epmoei_ceil_div(args->num_tokens * columns, (whole ? kRun : 1) * kThreads), most);
    return epmoei_cuda_status((int32_t)epmoei_launch_dependent(whole ? join_kernel<T, kRun> : join_kernel<T, 1>,
                                                               dim3((unsigned)blocks), dim3(kThreads), 0, stream,
                                                               *args),
                              "joining columns");
}

} // namespace

extern "C" epmoe_status_t epmoei_paged_batch_fill_sm80(const epmoei_paged_batch_t *batch, epmoe_stream_t stream)
{
    const dim3 blocks((unsigned)epmoei_ceil_div(batch->num_tokens, kThreads));
    return epmoei_cuda_status(
        (int32_t)epmoei_launch_dependent(fill_batch_kernel, blocks, dim3(kThreads), 0, stream, *batch),
        "positions and slots");
}

extern "C" epmoe_status_t epmoei_head_rows_fill_sm80(int32_t heads, int32_t rows, int32_t *offsets, int32_t *index,
                                                     epmoe_stream_t stream)
{
    const int64_t count = epmoei_max64((int64_t)heads * rows, (int64_t)heads + 1);
    const dim3 blocks((unsigned)epmoei_ceil_div(count, kThreads));
    return epmoei_cuda_status((int32_t)epmoei_launch_dependent(head_rows_kernel, blocks, dim3(kThreads), 0, stream,
                                                               heads, rows, offsets, index),
                              "rows of heads");
}

extern "C" epmoe_status_t epmoei_join_rotated_sm80(const epmoei_join_args_t *args, epmoe_stream_t stream)
{
    return args->dtype == EPMOE_BF16 ? join<__nv_bfloat16>(args, stream) : join<__half>(args, stream);
}
