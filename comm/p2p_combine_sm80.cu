/* Combine through peer memory; the protocol stands in p2p.h. Bound by the links to the other ranks: every partial row
 * of this rank's tokens is loaded once from where it was made. */
#include "comm/p2p_device.cuh"

static constexpr int kTeam = 128;
static constexpr int kTeams = kP2pThreads / kTeam;
static constexpr int kElements = 8;   /* of a row per thread and step */
static constexpr int kRowsAtOnce = 4; /* loads of a token's rows that are under way together */
static constexpr int kBlocksPerSm = 2;

/* N elements that move together. */
template <typename T, int N> struct alignas(N * sizeof(T) >= 16 ? 16 : N * sizeof(T)) chunk {
    T element[N];
};

/* Not by way of the first-level cache: a peer writes there. */
template <typename T, int N> static __device__ __forceinline__ void load_peer(chunk<T, N> *to, const T *from)
{
    if constexpr (sizeof(chunk<T, N>) % 16 == 0) {
#pragma unroll
        for (int i = 0; i < (int)sizeof(chunk<T, N>) / 16; i++)
            reinterpret_cast<uint4 *>(to)[i] = __ldcg(reinterpret_cast<const uint4 *>(from) + i);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) to->element[i] = from[i];
    }
}

template <typename T, int N> static __device__ __forceinline__ void add_chunk(float (&acc)[N], chunk<T, N> values)
{
#pragma unroll
    for (int c = 0; c < N; c++) acc[c] += epmoei_to_float(values.element[c]);
}

/* Where the rows of a token are. */
struct token_t {
    uint32_t ranks;
    int32_t row; /* lane i: at the i-th of these ranks */
};

static __device__ __forceinline__ token_t find_token(const epmoei_p2p_args_t &args, int64_t token)
{
    const int32_t lane = threadIdx.x % kP2pWarp;
    return {args.token_ranks[token], lane < args.width ? args.token_rows[token * args.width + lane] : 0};
}

/* A thread's columns of one token; all lanes of a warp come along, also those past the row. */
template <typename RowT, typename T, int N>
static __device__ void sum_columns(const epmoei_p2p_args_t &args, char *const *y, token_t of, int64_t token,
                                   int64_t column)
{
    const bool is_there = column < args.hidden;
    float acc[N];
#pragma unroll
    for (int c = 0; c < N; c++) acc[c] = 0.0f;
    int32_t next = 0;
    for (uint32_t left = of.ranks; left;) {
        chunk<RowT, N> values[kRowsAtOnce];
        int32_t num = 0;
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; i++) {
            if (!left) continue;
            int64_t row = __shfl_sync(kP2pAll, of.row, next++);
            const RowT *from = reinterpret_cast<const RowT *>(y[__ffs((int)left) - 1]);
            if (is_there) load_peer<RowT, N>(&values[i], from + row * args.hidden + column);
            left &= left - 1;
            num = i + 1;
        }
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; i++)
            if (i < num && is_there) add_chunk(acc, values[i]);
    }
    if (!is_there) return;
    int64_t at = token * args.hidden + column;
    if (args.shared) add_chunk(acc, *reinterpret_cast<const chunk<float, N> *>(args.shared + at));
    if (args.residual)
        add_chunk(acc, *reinterpret_cast<const chunk<T, N> *>(static_cast<const T *>(args.residual) + at));
    chunk<T, N> result;
#pragma unroll
    for (int c = 0; c < N; c++) result.element[c] = epmoei_from_float<T>(acc[c]);
    *reinterpret_cast<chunk<T, N> *>(static_cast<T *>(args.y) + at) = result;
}

/* A job is a part of a token's row. */
template <typename RowT, typename T, int N>
static __global__ void __launch_bounds__(kP2pThreads, kBlocksPerSm)
    combine_kernel(const __grid_constant__ epmoei_p2p_args_t args, int32_t parts)
{
    __shared__ char *y[EPMOEI_P2P_MAX_RANKS];
    const int32_t r = threadIdx.x;
    epmoei_begin_dependent();
    const uint32_t epoch = args.state->epoch;
    const int32_t num_tokens = min(args.sum_tokens, args.state->num_tokens);
    int64_t job = (int64_t)blockIdx.x * kTeams + threadIdx.x / kTeam, token = job / parts;
    token_t of = {0, 0};
    if (token < args.sum_tokens) of = find_token(args, token);
    if (__syncthreads_or(r == 0 && p2p_has_failed(args))) return;
    bool there = true;
    if (r < args.size) {
        const epmoei_p2p_window_t *window = args.windows + r;
        if (blockIdx.x == 0) ptx_store_release_system(window->partials_ready + args.rank, epoch);
        y[r] = window->y;
        there = p2p_wait_for_flag(args, args.windows[args.rank].partials_ready + r, ptx_global_timer(),
                                  EPMOEI_P2P_PARTIALS, r, epoch);
    }
    if (__syncthreads_or(!there)) return;
    while (token < num_tokens) {
        const int64_t first = ((job - token * parts) * kTeam + threadIdx.x % kTeam) * N;
        const int64_t step = (int64_t)parts * kTeam * N, of_lane = (threadIdx.x % kP2pWarp) * N;
        for (int64_t column = first; column - of_lane < args.hidden; column += step)
            sum_columns<RowT, T, N>(args, y, of, token, column);
        job += (int64_t)gridDim.x * kTeams;
        token = job / parts;
        if (token < num_tokens) of = find_token(args, token);
    }
}

template <typename RowT, typename T, int N>
static epmoe_status_t combine_in(const epmoei_p2p_args_t *args, epmoe_stream_t stream)
{
    /* Few tokens: everything is under way at once. Many: a token's rows are looked up once. */
    int64_t parts = epmoei_ceil_div(args->hidden, kTeam * N), teams = kBlocksPerSm * kTeams * (int64_t)args->max_blocks;
    if (args->sum_tokens * parts > 2 * teams) parts = 1;
    int64_t most = args->max_blocks < args->num_sms ? args->max_blocks : kBlocksPerSm * (int64_t)args->num_sms;
    int64_t blocks = epmoei_max64(1, epmoei_min64(most, epmoei_ceil_div(args->sum_tokens * parts, kTeams)));
    return epmoei_cuda_status(epmoei_launch_dependent(combine_kernel<RowT, T, N>, dim3((unsigned)blocks),
                                                      dim3(kP2pThreads), 0, stream, *args, (int32_t)parts),
                              "combine_kernel");
}

template <typename RowT, typename T> static epmoe_status_t combine(const epmoei_p2p_args_t *args, epmoe_stream_t stream)
{
    return args->hidden % kElements == 0 ? combine_in<RowT, T, kElements>(args, stream)
                                         : combine_in<RowT, T, 1>(args, stream);
}

extern "C" epmoe_status_t epmoei_p2p_combine_sm80(const epmoei_p2p_args_t *args, epmoe_stream_t stream)
{
    if (args->partial_dtype == EPMOE_BF16) return combine<__nv_bfloat16, __nv_bfloat16>(args, stream);
    if (args->dtype == EPMOE_F16) return combine<float, __half>(args, stream);
    return combine<float, float>(args, stream);
}
