/* Combine through peer memory; the protocol stands in p2p.h. Bound by the links to the other ranks: every partial row
 * of this rank's tokens is loaded once from where it was made. */
#include "comm/p2p_device.cuh"

static constexpr int kTeam = 128;
static constexpr int kTeams = kP2pThreads / kTeam;
static constexpr int kElements = 8; /* of a row per thread and step */
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

/* How many loads of a thread are under way at once: columns of a row, and rows. */
template <int kColumnsAtOnce, int kRowsAtOnce> struct depth_t {
    static constexpr int kColumns = kColumnsAtOnce;
    static constexpr int kRows = kRowsAtOnce;
};

template <typename RowT, typename T, int N>
static __device__ __forceinline__ void finish_columns(const epmoei_p2p_args_t &args, int64_t at, float (&acc)[N])
{
    if (args.shared) add_chunk(acc, *reinterpret_cast<const chunk<float, N> *>(args.shared + at));
    if (args.residual)
        add_chunk(acc, *reinterpret_cast<const chunk<T, N> *>(static_cast<const T *>(args.residual) + at));
    chunk<T, N> result;
#pragma unroll
    for (int c = 0; c < N; c++) result.element[c] = epmoei_from_float<T>(acc[c]);
    *reinterpret_cast<chunk<T, N> *>(static_cast<T *>(args.y) + at) = result;
}

/* A thread's columns of one token, kTeam*N apart; all lanes of a warp come along, also those past the row. */
template <typename RowT, typename T, int N, typename Depth>
static __device__ __forceinline__ void sum_columns(const epmoei_p2p_args_t &args, char *const *y, token_t of,
                                                   int64_t token, int64_t column)
{
    constexpr int kColumns = Depth::kColumns, kRows = Depth::kRows;
    float acc[kColumns][N];
#pragma unroll
    for (int i = 0; i < kColumns * N; i++) acc[i / N][i % N] = 0.0f;
    int32_t next = 0;
    for (uint32_t left = of.ranks; left;) {
        chunk<RowT, N> values[kRows][kColumns];
        int32_t num = 0;
#pragma unroll
        for (int i = 0; i < kRows; i++) {
            if (!left) continue;
            int64_t row = __shfl_sync(kP2pAll, of.row, next++);
            const RowT *from = reinterpret_cast<const RowT *>(y[__ffs((int)left) - 1]) + row * args.hidden + column;
#pragma unroll
            for (int c = 0; c < kColumns; c++)
                if (column + c * kTeam * N < args.hidden) load_peer<RowT, N>(&values[i][c], from + c * kTeam * N);
            left &= left - 1;
            num = i + 1;
        }
#pragma unroll
        for (int i = 0; i < kRows; i++)
#pragma unroll
            for (int c = 0; c < kColumns; c++)
                if (i < num && column + c * kTeam * N < args.hidden) add_chunk(acc[c], values[i][c]);
    }
#pragma unroll
    for (int c = 0; c < kColumns; c++)
        if (column + c * kTeam * N < args.hidden)
            finish_columns<RowT, T, N>(args, token * args.hidden + column + c * kTeam * N, acc[c]);
}

/* One warp: a lane for every rank. */
static __device__ __forceinline__ void signal_ready(const epmoei_p2p_args_t &args, uint32_t epoch)
{
    if (threadIdx.x < args.size) ptx_store_release_system(args.windows[threadIdx.x].partials_ready + args.rank, epoch);
}

/* Finds a place on the device beside any other kernel of this library, whatever fills it: so a combine that does waits
 * for nothing that could wait for it. */
static __global__ void __launch_bounds__(kP2pWarp) signal_kernel(const __grid_constant__ epmoei_p2p_args_t args)
{
    epmoei_begin_dependent();
    if (!__any_sync(kP2pAll, threadIdx.x == 0 && p2p_has_failed(args))) signal_ready(args, args.state->epoch);
}

/* A job is a part of a token's row. */
template <typename RowT, typename T, int N, typename Depth>
static __global__ void __launch_bounds__(kP2pThreads, Depth::kColumns > 1 ? 1 : kBlocksPerSm)
    combine_kernel(const __grid_constant__ epmoei_p2p_args_t args, int32_t parts, bool signals)
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
        y[r] = args.windows[r].y;
        if (signals && blockIdx.x == 0) signal_ready(args, epoch);
        there = p2p_wait_for_flag(args, args.windows[args.rank].partials_ready + r, ptx_global_timer(),
                                  EPMOEI_P2P_PARTIALS, r, epoch);
    }
    if (__syncthreads_or(!there)) return;
    const int64_t width = (int64_t)Depth::kColumns * kTeam * N, of_lane = (threadIdx.x % kP2pWarp) * N;
    while (token < num_tokens) {
        const int64_t first = (job - token * parts) * width + threadIdx.x % kTeam * N;
        for (int64_t column = first; column - of_lane < args.hidden; column += parts * width)
            sum_columns<RowT, T, N, Depth>(args, y, of, token, column);
        job += (int64_t)gridDim.x * kTeams;
        token = job / parts;
        if (token < num_tokens) of = find_token(args, token);
    }
}

template <typename RowT, typename T, int N, typename Depth>
static epmoe_status_t launch(const epmoei_p2p_args_t *args, int64_t parts, int64_t most_blocks, epmoe_stream_t stream)
{
    const bool signals = Depth::kColumns == 1;
    int64_t blocks = epmoei_max64(1, epmoei_min64(most_blocks, epmoei_ceil_div(args->sum_tokens * parts, kTeams)));
    if (!signals)
        EPMOEI_CHECK(epmoei_cuda_status(
            epmoei_launch_dependent(signal_kernel, dim3(1), dim3(kP2pWarp), 0, stream, *args), "signal_kernel"));
    return epmoei_cuda_status(epmoei_launch_dependent(combine_kernel<RowT, T, N, Depth>, dim3((unsigned)blocks),
                                                      dim3(kP2pThreads), 0, stream, *args, (int32_t)parts, signals),
                              "combine_kernel");
}

/* Few tokens: all of their rows are under way at once, a piece per thread. Many: a token's rows are looked up once, and
 * each thread has as much under way as its registers hold, so that a few multiprocessors fill the links. */
template <typename RowT, typename T, int N>
static epmoe_status_t combine_in(const epmoei_p2p_args_t *args, epmoe_stream_t stream)
{
    bool limited = args->max_blocks < args->num_sms;
    int64_t parts = epmoei_ceil_div(args->hidden, kTeam * N);
    int64_t most = limited ? args->max_blocks : kBlocksPerSm * (int64_t)args->max_blocks;
    if (args->sum_tokens * parts <= most * kTeams) return launch<RowT, T, N, depth_t<1, 4>>(args, parts, most, stream);
    using deep_t = depth_t<(N > 1 ? 8 / (int)sizeof(RowT) : 1), (N > 1 ? 2 : 4)>;
    return launch<RowT, T, N, deep_t>(args, 1, args->max_blocks, stream);
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
