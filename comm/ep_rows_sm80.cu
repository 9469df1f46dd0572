/* Rows inside one rank on the device. Bound by memory bandwidth: every row is read and written once, in pieces of 16
 * bytes where the row length allows it, in the largest power of two that divides it otherwise. */
#include "comm/ep_rows.h"
#include "kernels/cuda_common.cuh"

static constexpr int kThreads = 256;
static constexpr int kElements = 8;   /* of a row per thread */
static constexpr int kRowsAtOnce = 4; /* loads of a token's rows that are under way together */
static constexpr int kPiecesAtOnce = 4;
static constexpr int64_t kMaxGridY = 65535;

/* N elements that move together. */
template <typename T, int N> struct alignas(N * sizeof(T) >= 16 ? 16 : N * sizeof(T)) chunk {
    T element[N];
};

/* A row takes blockDim.x threads; a block has blockDim.y rows. */
template <typename V>
static __global__ void __launch_bounds__(kThreads)
    gather_rows_kernel(V *__restrict__ dst, const V *__restrict__ src, const int32_t *__restrict__ index,
                       int64_t num_rows, int64_t gap_at, int64_t gap, int64_t row_pieces)
{
    int64_t row = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= num_rows) return;
    const V *from = src + index[row + (row < gap_at ? 0 : gap)] * row_pieces;
    V *to = dst + row * row_pieces;
    for (int64_t first = threadIdx.x; first < row_pieces; first += kPiecesAtOnce * blockDim.x) {
        V pieces[kPiecesAtOnce];
#pragma unroll
        for (int i = 0; i < kPiecesAtOnce; i++)
            if (first + i * blockDim.x < row_pieces) pieces[i] = from[first + i * blockDim.x];
#pragma unroll
        for (int i = 0; i < kPiecesAtOnce; i++)
            if (first + i * blockDim.x < row_pieces) to[first + i * blockDim.x] = pieces[i];
    }
}

template <typename T, int N> static __device__ __forceinline__ void add_chunk(float (&acc)[N], chunk<T, N> values)
{
#pragma unroll
    for (int c = 0; c < N; c++) acc[c] += epmoei_to_float(values.element[c]);
}

template <typename RowT, int N>
static __device__ __forceinline__ const chunk<RowT, N> *slot_chunk(const epmoei_sum_rows_t &args, int64_t slot,
                                                                   int64_t column)
{
    int64_t own = slot - args.first_own;
    bool is_own = own >= 0 && own < args.num_own;
    const RowT *rows = static_cast<const RowT *>(is_own ? args.own : args.others);
    int64_t row = is_own ? own : own < 0 ? slot : slot - args.num_own;
    return reinterpret_cast<const chunk<RowT, N> *>(rows + row * args.hidden + column);
}

/* blockIdx.x is the token, blockIdx.y and the thread its columns. */
template <typename RowT, typename T, int N>
static __global__ void __launch_bounds__(kThreads) sum_rows_kernel(epmoei_sum_rows_t args)
{
    int64_t t = blockIdx.x;
    const int32_t *slots = args.token_slots ? args.token_slots + t * args.width : nullptr;
    for (int64_t column = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * N; column < args.hidden;
         column += (int64_t)gridDim.y * blockDim.x * N) {
        float acc[N];
#pragma unroll
        for (int c = 0; c < N; c++) acc[c] = 0.0f;
        if (!slots) {
            const RowT *row = static_cast<const RowT *>(args.own) + t * args.hidden + column;
            add_chunk(acc, *reinterpret_cast<const chunk<RowT, N> *>(row));
        }
        for (int32_t first = 0; slots && first < args.width; first += kRowsAtOnce) {
            chunk<RowT, N> values[kRowsAtOnce];
            int32_t num = 0;
#pragma unroll
            for (int i = 0; i < kRowsAtOnce; i++) {
                int32_t slot = first + i < args.width ? slots[first + i] : -1;
                if (slot < 0) continue;
                values[i] = *slot_chunk<RowT, N>(args, slot, column);
                num = i + 1;
            }
#pragma unroll
            for (int i = 0; i < kRowsAtOnce; i++)
                if (i < num) add_chunk(acc, values[i]);
            if (num < kRowsAtOnce) break;
        }
        int64_t at = t * args.hidden + column;
        if (args.shared) add_chunk(acc, *reinterpret_cast<const chunk<float, N> *>(args.shared + at));
        if (args.residual)
            add_chunk(acc, *reinterpret_cast<const chunk<T, N> *>(static_cast<const T *>(args.residual) + at));
        chunk<T, N> result;
#pragma unroll
        for (int c = 0; c < N; c++) result.element[c] = epmoei_from_float<T>(acc[c]);
        *reinterpret_cast<chunk<T, N> *>(static_cast<T *>(args.y) + at) = result;
    }
}

static __global__ void store_count_kernel(int32_t *dst, int32_t value) { *dst = value; }

template <typename V> static epmoe_status_t gather(const epmoei_gather_rows_t *args, cudaStream_t stream)
{
    int64_t pieces = args->row_bytes / (int64_t)sizeof(V);
    unsigned lanes = 32;
    while (lanes < kThreads && lanes < pieces) lanes *= 2;
    dim3 block(lanes, kThreads / lanes);
    int64_t blocks = epmoei_ceil_div(args->num_rows, block.y);
    gather_rows_kernel<V><<<(unsigned)blocks, block, 0, stream>>>(static_cast<V *>(args->dst),
                                                                  static_cast<const V *>(args->src), args->index,
                                                                  args->num_rows, args->gap_at, args->gap, pieces);
    return EPMOEI_LAUNCH_CHECK("gather_rows_kernel");
}

template <typename RowT, typename T> static epmoe_status_t sum(const epmoei_sum_rows_t *args, cudaStream_t stream)
{
    bool whole = args->hidden % kElements == 0;
    int64_t pieces = whole ? args->hidden / kElements : args->hidden;
    unsigned threads = 32;
    while (threads < kThreads && threads < pieces) threads *= 2;
    dim3 grid((unsigned)args->num_tokens, (unsigned)epmoei_min64(epmoei_ceil_div(pieces, threads), kMaxGridY));
    if (whole)
        sum_rows_kernel<RowT, T, kElements><<<grid, threads, 0, stream>>>(*args);
    else
        sum_rows_kernel<RowT, T, 1><<<grid, threads, 0, stream>>>(*args);
    return EPMOEI_LAUNCH_CHECK("sum_rows_kernel");
}

extern "C" epmoe_status_t epmoei_gather_rows_sm80(const epmoei_gather_rows_t *args, epmoe_stream_t stream)
{
    if (args->num_rows == 0) return EPMOE_OK;
    if (args->row_bytes % 16 == 0) return gather<uint4>(args, stream);
    if (args->row_bytes % 8 == 0) return gather<uint2>(args, stream);
    if (args->row_bytes % 4 == 0) return gather<uint32_t>(args, stream);
    return gather<uint16_t>(args, stream);
}

extern "C" epmoe_status_t epmoei_sum_rows_sm80(const epmoei_sum_rows_t *args, epmoe_stream_t stream)
{
    if (args->num_tokens == 0) return EPMOE_OK;
    if (args->row_dtype == EPMOE_BF16 && args->dtype == EPMOE_BF16)
        return sum<__nv_bfloat16, __nv_bfloat16>(args, stream);
    if (args->row_dtype != EPMOE_F32)
        return epmoei_fail(EPMOE_ERROR_INTERNAL, "rows of %s for a sum in %s", epmoe_dtype_string(args->row_dtype),
                           epmoe_dtype_string(args->dtype));
    switch (args->dtype) {
    case EPMOE_BF16: return sum<float, __nv_bfloat16>(args, stream);
    case EPMOE_F16: return sum<float, __half>(args, stream);
    default: return sum<float, float>(args, stream);
    }
}

extern "C" epmoe_status_t epmoei_store_count_sm80(int32_t *dst, int32_t value, epmoe_stream_t stream)
{
    store_count_kernel<<<1, 1, 0, stream>>>(dst, value);
    return EPMOEI_LAUNCH_CHECK("store_count_kernel");
}
