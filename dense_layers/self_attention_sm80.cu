#include "dense_layers/self_attention_cuda.h"
#include "kernels/launch_cuda.cuh"

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

/* left and right count units of T. */
template <typename T>
static __global__ void __launch_bounds__(kThreads)
    join_kernel(T *to, const T *a, int32_t left, const T *b, int32_t right, int64_t rows)
{
    epmoei_begin_dependent();
    const int32_t width = left + right;
    const int64_t step = (int64_t)gridDim.x * kThreads;
    for (int64_t i = (int64_t)blockIdx.x * kThreads + threadIdx.x; i < rows * width; i += step) {
        const int64_t row = i / width;
        const int32_t column = (int32_t)(i - row * width);
        to[i] = column < left ? a[row * left + column] : b[row * right + column - left];
    }
}

template <typename T>
static epmoe_status_t join(void *to, const void *a, int32_t left, const void *b, int32_t right, int64_t rows,
                           epmoe_stream_t stream)
{
    const int64_t kBlocksPerSm = 8;
    const epmoei_device_info_t *device = epmoei_device_current();
    const int64_t most = kBlocksPerSm * (device ? device->num_sms : 1);
    const int64_t blocks = epmoei_min64(epmoei_ceil_div(rows * (left + right), kThreads), most);
    return epmoei_cuda_status((int32_t)epmoei_launch_dependent(join_kernel<T>, dim3((unsigned)blocks), dim3(kThreads),
                                                               0, stream, (T *)to, (const T *)a, left, (const T *)b,
                                                               right, rows),
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

extern "C" epmoe_status_t epmoei_join_columns_sm80(void *to, const void *a, int32_t left, const void *b, int32_t right,
                                                   int64_t rows, epmoe_stream_t stream)
{
    if (left % 8 == 0 && right % 8 == 0) return join<uint4>(to, a, left / 8, b, right / 8, rows, stream);
    return join<uint16_t>(to, a, left, b, right, rows, stream);
}
