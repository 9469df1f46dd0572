/* Dispatch and combine through peer memory; the protocol stands in p2p.h. Bound by the links to the other ranks: a row
 * crosses once on each way, in pieces of 16 bytes where its length allows it, as many at once as registers hold. */
#include "comm/p2p.h"
#include "kernels/launch_cuda.cuh"

static constexpr int kRouteThreads = 256; /* and tokens of a block */
static constexpr int kThreads = 512;
static constexpr int kWarp = 32;
static constexpr int kMaxRanks = EPMOEI_P2P_MAX_RANKS;
static constexpr int kPieces = 4;        /* of a row that a thread of send has under way */
static constexpr int kElements = 8;      /* of a row per thread and step of combine */
static constexpr int kRowsAtOnce = 4;    /* loads of a token's rows that are under way together */
static constexpr int kPollsPerLook = 16; /* polls between two looks at the clock */
static constexpr uint32_t kAll = 0xFFFFFFFFu;
static_assert(kMaxRanks <= kWarp && EPMOEI_P2P_GROUP == kWarp, "a lane for every rank, and for every token of a group");

/* N elements that move together. */
template <typename T, int N> struct alignas(N * sizeof(T) >= 16 ? 16 : N * sizeof(T)) chunk {
    T element[N];
};

/* ------------------------------------------------------------------------------------------------------- waiting */

/* The first one counts. */
static __device__ void raise_fault(const epmoei_p2p_args_t &args, epmoe_status_t status, epmoei_p2p_phase_t phase,
                                   int32_t peer, uint32_t epoch, int64_t value, int64_t bound, int64_t waited_ns)
{
    if (atomicCAS(args.failed, 0, 1) != 0) return;
    volatile epmoei_p2p_fault_t *fault = args.fault;
    fault->phase = phase;
    fault->peer = peer;
    fault->epoch = epoch;
    fault->value = value;
    fault->bound = bound;
    fault->waited_ns = waited_ns;
    __threadfence_system();
    fault->status = status;
    __threadfence_system();
}

/* One thread of a block asks, so that a fault in between does not part the block. */
static __device__ __forceinline__ bool has_failed(const epmoei_p2p_args_t &args)
{
    return *(volatile const int32_t *)args.failed != 0;
}

/* Whether a wait that began at `start` has to end; raises the fault if it is the time that is over. */
static __device__ bool gives_up(const epmoei_p2p_args_t &args, int64_t start, epmoei_p2p_phase_t phase, int32_t peer,
                                uint32_t epoch)
{
    if (has_failed(args)) return true;
    int64_t waited = ptx_global_timer() - start;
    bool stopped = ptx_load_relaxed_system(&args.fault->host_stops) != 0;
    if (waited < args.timeout_ns && !stopped) return false;
    raise_fault(args, EPMOE_ERROR_TIMEOUT, phase, peer, epoch, 0, 0, waited);
    return true;
}

/* A word of a header; false when there is none in time. */
static __device__ bool wait_for_word(const epmoei_p2p_args_t &args, const uint64_t *word, int64_t start, int32_t peer,
                                     uint32_t epoch, uint32_t *value)
{
    for (int32_t polls = 1;; polls++) {
        uint64_t seen = ptx_load_acquire_system(word);
        if ((uint32_t)(seen >> 32) == epoch) {
            *value = (uint32_t)seen;
            return true;
        }
        if (polls % kPollsPerLook == 0 && gives_up(args, start, EPMOEI_P2P_HEADERS, peer, epoch)) return false;
    }
}

static __device__ bool wait_for_flag(const epmoei_p2p_args_t &args, const uint32_t *flag, int64_t start,
                                     epmoei_p2p_phase_t phase, int32_t peer, uint32_t epoch)
{
    for (int32_t polls = 1;; polls++) {
        if ((int32_t)(ptx_load_acquire_system(flag) - epoch) >= 0) return true;
        if (polls % kPollsPerLook == 0 && gives_up(args, start, phase, peer, epoch)) return false;
    }
}

/* --------------------------------------------------------------------------------------------------------- route */

/* The first E mod R ranks own one expert more. */
static __device__ __forceinline__ int32_t first_expert(const epmoei_p2p_args_t &args, int32_t rank)
{
    int32_t longer = args.num_experts % args.size;
    return rank * (args.num_experts / args.size) + min(rank, longer);
}

static __device__ __forceinline__ int32_t owner(int32_t id, int32_t share, int32_t longer)
{
    int32_t of_longer = longer * (share + 1);
    return id < of_longer ? id / (share + 1) : longer + (id - of_longer) / share;
}

static __device__ int32_t actual_tokens(const epmoei_p2p_args_t &args)
{
    if (args.local_status != EPMOE_OK) return 0;
    if (args.reuse_routing) return args.state->num_tokens;
    return epmoei_device_tokens(args.num_tokens_dev, args.num_tokens);
}

/* The ranks of a token as bits. Adds ids that do not exist to `bad`. */
static __device__ uint32_t ranks_of(const epmoei_p2p_args_t &args, int64_t token, int32_t *bad)
{
    int32_t share = args.num_experts / args.size, longer = args.num_experts % args.size;
    const int32_t *ids = args.ids + token * args.top_k;
    uint32_t ranks = 0;
    for (int32_t j = 0; j < args.top_k; j++) {
        int32_t id = ids[j];
        if (id >= 0 && id < args.num_experts)
            ranks |= 1u << owner(id, share, longer);
        else
            *bad += id != -1;
    }
    return ranks;
}

/* One warp: counts of the groups of `rank` become offsets; returns their sum. */
static __device__ int32_t scan_groups(int32_t *counts, int64_t groups)
{
    const int32_t lane = threadIdx.x % kWarp;
    int32_t sum = 0;
    for (int64_t first = 0; first < groups; first += 4 * kWarp) {
        int32_t loaded[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int64_t group = first + i * kWarp + lane;
            loaded[i] = group < groups ? __ldcg(counts + group) : 0;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int64_t group = first + i * kWarp + lane;
            int32_t before = loaded[i];
            for (int32_t step = 1; step < kWarp; step *= 2) {
                int32_t other = __shfl_up_sync(kAll, before, step);
                if (lane >= step) before += other;
            }
            if (group < groups) counts[group] = sum + before - loaded[i];
            sum += __shfl_sync(kAll, before, kWarp - 1);
        }
    }
    return sum;
}

static __device__ void send_headers(const epmoei_p2p_args_t &args, const int32_t *counts)
{
    const int32_t words = args.size + 1;
    const uint32_t epoch = args.state->epoch + 1;
    const int64_t at = ((int64_t)(epoch % 2) * args.size + args.rank) * words;
    for (int32_t i = threadIdx.x; i < args.size * words; i += blockDim.x) {
        int32_t peer = i / words, word = i % words;
        uint32_t value = word == 0
                             ? (uint32_t)args.local_status | (uint32_t)args.reuse_routing << EPMOEI_P2P_STATUS_BITS
                             : (uint32_t)counts[word - 1];
        ptx_store_relaxed_system(args.windows[peer].headers + at + word, (uint64_t)epoch << 32 | value);
    }
}

static __global__ void __launch_bounds__(kRouteThreads) route_kernel(const __grid_constant__ epmoei_p2p_args_t args)
{
    __shared__ int32_t counts[kMaxRanks];
    __shared__ bool is_last;
    const int32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    epmoei_begin_dependent();
    if (__syncthreads_or(threadIdx.x == 0 && has_failed(args))) return;
    const int32_t num_tokens = actual_tokens(args);
    const bool counted = args.reuse_routing && args.local_status == EPMOE_OK;

    if (!counted) {
        const int64_t token = (int64_t)blockIdx.x * kRouteThreads + threadIdx.x, group = token / kWarp;
        int32_t bad = 0;
        uint32_t ranks = token < num_tokens ? ranks_of(args, token, &bad) : 0;
        if (bad) epmoei_count_bad(args.error_word, bad);
        if (group * kWarp < num_tokens) {
            args.token_ranks[token] = ranks;
            int32_t mine = 0;
            for (int32_t r = 0; r < args.size; r++) {
                uint32_t votes = __ballot_sync(kAll, ranks >> r & 1);
                if (lane == r) mine = __popc(votes);
            }
            if (lane < args.size) args.group_offsets[lane * args.groups + group] = mine;
        }
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(&args.state->route_blocks, 1u) == gridDim.x - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();

    for (int32_t r = warp; r < args.size; r += kRouteThreads / kWarp) {
        int32_t sum =
            counted ? args.state->counts[r]
                    : scan_groups(args.group_offsets + r * args.groups, ((int64_t)num_tokens + kWarp - 1) / kWarp);
        if (lane == 0) counts[r] = sum;
    }
    __syncthreads();
    if (threadIdx.x < args.size) args.state->counts[threadIdx.x] = counts[threadIdx.x];
    if (threadIdx.x == 0) args.state->route_blocks = 0;
    send_headers(args, counts);
}

/* ---------------------------------------------------------------------------------------------------------- send */

/* What a block knows once the headers are there. */
struct plan_t {
    epmoei_p2p_window_t window[kMaxRanks];
    int32_t counts[kMaxRanks][kMaxRanks]; /* rows by source and destination */
    uint32_t status[kMaxRanks];           /* word 0 of each header */
    int32_t first_row[kMaxRanks];         /* of this rank's rows at each destination */
    int32_t num_rows;                     /* that come here */
};

static __device__ bool wait_for_headers(const epmoei_p2p_args_t &args, uint32_t epoch, plan_t *plan)
{
    const int32_t words = args.size + 1;
    const uint64_t *headers = args.windows[args.rank].headers + (int64_t)(epoch % 2) * args.size * words;
    const int64_t start = ptx_global_timer();
    bool there = true;
    for (int32_t i = threadIdx.x; i < args.size * words && there; i += blockDim.x) {
        int32_t source = i / words, word = i % words;
        uint32_t value = 0;
        there = wait_for_word(args, headers + i, start, source, epoch, &value);
        if (word == 0)
            plan->status[source] = value;
        else
            plan->counts[source][word - 1] = (int32_t)value;
    }
    if (threadIdx.x < args.size) plan->window[threadIdx.x] = args.windows[threadIdx.x];
    return !__syncthreads_or(!there);
}

/* Every rank comes to the same verdict. */
static __device__ bool judge_headers(const epmoei_p2p_args_t &args, uint32_t epoch, plan_t *plan)
{
    bool good = true;
    if (threadIdx.x < kWarp) {
        const int32_t r = threadIdx.x;
        const bool is_rank = r < args.size;
        const uint32_t status = is_rank ? plan->status[r] : plan->status[0];
        int64_t rows = 0, before = 0;
        for (int32_t source = 0; source < args.size && is_rank; source++) {
            if (source == args.rank) before = rows;
            rows += plan->counts[source][r];
        }
        if (is_rank) plan->first_row[r] = (int32_t)before;
        if (r == args.rank) plan->num_rows = (int32_t)rows;
        const uint32_t failing = __ballot_sync(kAll, (status & ((1u << EPMOEI_P2P_STATUS_BITS) - 1)) != 0);
        const uint32_t differs = __ballot_sync(kAll, status != plan->status[0]);
        const uint32_t full = __ballot_sync(kAll, is_rank && rows > plan->window[r].capacity);
        const uint32_t verdict = failing ? failing : differs ? differs : full;
        good = verdict == 0;
        if (!good && r == __ffs((int)verdict) - 1)
            raise_fault(args,
                        failing   ? EPMOE_ERROR_PEER
                        : differs ? EPMOE_ERROR_MISMATCH
                                  : EPMOE_ERROR_CAPACITY,
                        EPMOEI_P2P_HEADERS, r, epoch,
                        failing   ? (int64_t)(status & ((1u << EPMOEI_P2P_STATUS_BITS) - 1))
                        : differs ? (int64_t)(status >> EPMOEI_P2P_STATUS_BITS)
                                  : rows,
                        plan->window[r].capacity, 0);
    }
    return !__syncthreads_or(!good);
}

/* Lane r of the warp: the token's row at rank r, where it has one; all lanes: its ranks. */
static __device__ int32_t find_rows(const epmoei_p2p_args_t &args, const plan_t *plan, int64_t token, uint32_t *ranks)
{
    const int32_t lane = threadIdx.x % kWarp, place = (int32_t)(token % kWarp);
    const uint32_t of_lane = args.token_ranks[token - place + lane];
    *ranks = __shfl_sync(kAll, of_lane, place);
    int32_t row = 0;
    for (uint32_t left = *ranks; left; left &= left - 1) {
        int32_t r = __ffs((int)left) - 1;
        uint32_t votes = __ballot_sync(kAll, of_lane >> r & 1);
        if (lane == r)
            row = plan->first_row[r] + args.group_offsets[r * args.groups + token / kWarp] +
                  __popc(votes & ((1u << place) - 1));
    }
    return row;
}

/* A warp: the token's rows for combine; its ids, which count from the first expert of the rank, and weights. */
static __device__ void send_routing(const epmoei_p2p_args_t &args, const plan_t *plan, int64_t token, uint32_t ranks,
                                    int32_t row)
{
    const int32_t lane = threadIdx.x % kWarp;
    if (ranks >> lane & 1) args.token_rows[token * args.width + __popc(ranks & ((1u << lane) - 1))] = row;
    const int64_t slot = token * args.top_k + lane;
    const bool is_slot = lane < args.top_k;
    const int32_t id = is_slot ? args.ids[slot] : -1;
    for (uint32_t left = ranks; left; left &= left - 1) {
        int32_t r = __ffs((int)left) - 1, first = first_expert(args, r), end = first_expert(args, r + 1);
        int64_t to = (int64_t)__shfl_sync(kAll, row, r) * args.top_k + lane;
        bool here = id >= first && id < end;
        if (!is_slot) continue;
        plan->window[r].ids[to] = here ? id - first : -1;
        plan->window[r].weights[to] = here ? args.weights[slot] : 0.0f;
    }
}

/* `team` threads copy a row to wherever it goes. */
template <typename V>
static __device__ void send_row(const epmoei_p2p_args_t &args, const plan_t *plan, int64_t token, uint32_t ranks,
                                int32_t row, int32_t team)
{
    const int64_t pieces = args.row_bytes / (int64_t)sizeof(V);
    const V *from = static_cast<const V *>(args.x) + token * pieces;
    const int32_t own = threadIdx.x % team;
    for (int64_t first = 0; first < pieces; first += kPieces * team) {
        V piece[kPieces];
#pragma unroll
        for (int i = 0; i < kPieces; i++) {
            int64_t at = first + i * team + own;
            if (at < pieces) piece[i] = from[at];
        }
        for (uint32_t left = ranks; left; left &= left - 1) {
            int32_t r = __ffs((int)left) - 1;
            int64_t to = __shfl_sync(kAll, row, r);
            V *dst = reinterpret_cast<V *>(plan->window[r].x) + to * pieces;
#pragma unroll
            for (int i = 0; i < kPieces; i++) {
                int64_t at = first + i * team + own;
                if (at < pieces) dst[at] = piece[i];
            }
        }
    }
}

/* The last block of this rank: all its rows have been stored. */
static __device__ void finish_send(const epmoei_p2p_args_t &args, const plan_t *plan, uint32_t epoch,
                                   int32_t num_tokens)
{
    const int32_t r = threadIdx.x;
    bool there = true;
    __threadfence_system();
    if (r < args.size) {
        ptx_store_release_system(plan->window[r].rows_there + args.rank, epoch);
        there =
            wait_for_flag(args, plan->window[args.rank].rows_there + r, ptx_global_timer(), EPMOEI_P2P_ROWS, r, epoch);
    }
    there = !__syncthreads_or(!there);
    if (r != 0) return;
    *args.num_rows = there ? plan->num_rows : 0;
    args.state->num_tokens = num_tokens;
    args.state->send_blocks = 0;
    args.state->epoch = epoch;
}

template <typename V>
static __global__ void __launch_bounds__(kThreads)
    send_kernel(const __grid_constant__ epmoei_p2p_args_t args, int32_t team)
{
    __shared__ plan_t plan;
    __shared__ bool is_last;
    epmoei_begin_dependent();
    const uint32_t epoch = args.state->epoch + 1;
    bool good = !__syncthreads_or(threadIdx.x == 0 && has_failed(args));
    if (good) good = wait_for_headers(args, epoch, &plan);
    if (good) good = judge_headers(args, epoch, &plan);
    if (!good) {
        if (threadIdx.x == 0) *args.num_rows = 0;
        return;
    }
    const int32_t num_tokens = actual_tokens(args);
    const int32_t teams = kThreads / team;
    for (int64_t token = (int64_t)blockIdx.x * teams + threadIdx.x / team; token < num_tokens;
         token += (int64_t)gridDim.x * teams) {
        uint32_t ranks;
        int32_t row = find_rows(args, &plan, token, &ranks);
        if (threadIdx.x % team < kWarp) send_routing(args, &plan, token, ranks, row);
        send_row<V>(args, &plan, token, ranks, row, team);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        is_last = atomicAdd(&args.state->send_blocks, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (is_last) finish_send(args, &plan, epoch, num_tokens);
}

/* ------------------------------------------------------------------------------------------------------- combine */

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

/* A thread's columns of one token. */
template <typename RowT, typename T, int N>
static __device__ void sum_columns(const epmoei_p2p_args_t &args, char *const *y, int64_t token, uint32_t ranks,
                                   int64_t column)
{
    const int32_t *rows = args.token_rows + token * args.width;
    float acc[N];
#pragma unroll
    for (int c = 0; c < N; c++) acc[c] = 0.0f;
    for (uint32_t left = ranks; left;) {
        chunk<RowT, N> values[kRowsAtOnce];
        int32_t num = 0;
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; i++) {
            if (!left) continue;
            int64_t row = *rows++;
            const RowT *from = reinterpret_cast<const RowT *>(y[__ffs((int)left) - 1]);
            load_peer<RowT, N>(&values[i], from + row * args.hidden + column);
            left &= left - 1;
            num = i + 1;
        }
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; i++)
            if (i < num) add_chunk(acc, values[i]);
    }
    int64_t at = token * args.hidden + column;
    if (args.shared) add_chunk(acc, *reinterpret_cast<const chunk<float, N> *>(args.shared + at));
    if (args.residual)
        add_chunk(acc, *reinterpret_cast<const chunk<T, N> *>(static_cast<const T *>(args.residual) + at));
    chunk<T, N> result;
#pragma unroll
    for (int c = 0; c < N; c++) result.element[c] = epmoei_from_float<T>(acc[c]);
    *reinterpret_cast<chunk<T, N> *>(static_cast<T *>(args.y) + at) = result;
}

template <typename RowT, typename T, int N>
static __global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ epmoei_p2p_args_t args, int32_t team)
{
    __shared__ char *y[kMaxRanks];
    epmoei_begin_dependent();
    if (__syncthreads_or(threadIdx.x == 0 && has_failed(args))) return;
    const int32_t r = threadIdx.x;
    const uint32_t epoch = args.state->epoch;
    bool there = true;
    if (r < args.size) {
        y[r] = args.windows[r].y;
        if (blockIdx.x == 0) {
            __threadfence_system();
            ptx_store_release_system(args.windows[r].partials_ready + args.rank, epoch);
        }
        there = wait_for_flag(args, args.windows[args.rank].partials_ready + r, ptx_global_timer(), EPMOEI_P2P_PARTIALS,
                              r, epoch);
    }
    if (__syncthreads_or(!there)) return;
    const int32_t num_tokens = min(args.sum_tokens, args.state->num_tokens), teams = kThreads / team;
    for (int64_t token = (int64_t)blockIdx.x * teams + threadIdx.x / team; token < num_tokens;
         token += (int64_t)gridDim.x * teams) {
        const uint32_t ranks = args.token_ranks[token];
        for (int64_t column = (int64_t)(threadIdx.x % team) * N; column < args.hidden; column += (int64_t)team * N)
            sum_columns<RowT, T, N>(args, y, token, ranks, column);
    }
}

/* ----------------------------------------------------------------------------------------------------- launchers */

/* Threads for a row: enough to fill the blocks with few tokens, and no more than a row has pieces. */
static int32_t team_of(int64_t num_tokens, int64_t num_blocks, int64_t pieces)
{
    int64_t team = kThreads;
    while (team > 128 && num_tokens * team > num_blocks * kThreads) team /= 2;
    while (team > kWarp && team / 2 >= pieces) team /= 2;
    return (int32_t)team;
}

static unsigned blocks_of(int64_t num_tokens, int64_t num_blocks, int32_t team)
{
    return (unsigned)epmoei_max64(1, epmoei_min64(num_blocks, epmoei_ceil_div(num_tokens, kThreads / team)));
}

extern "C" epmoe_status_t epmoei_p2p_route_sm80(const epmoei_p2p_args_t *args, epmoe_stream_t stream)
{
    int64_t blocks = epmoei_max64(1, args->reuse_routing ? 1 : epmoei_ceil_div(args->num_tokens, kRouteThreads));
    return epmoei_cuda_status(
        epmoei_launch_dependent(route_kernel, dim3((unsigned)blocks), dim3(kRouteThreads), 0, stream, *args),
        "route_kernel");
}

template <typename V> static epmoe_status_t send(const epmoei_p2p_args_t *args, epmoe_stream_t stream)
{
    int32_t team = team_of(args->num_tokens, args->num_blocks, args->row_bytes / (int64_t)sizeof(V));
    unsigned blocks = blocks_of(args->num_tokens, args->num_blocks, team);
    return epmoei_cuda_status(
        epmoei_launch_dependent(send_kernel<V>, dim3(blocks), dim3(kThreads), 0, stream, *args, team), "send_kernel");
}

extern "C" epmoe_status_t epmoei_p2p_send_sm80(const epmoei_p2p_args_t *args, epmoe_stream_t stream)
{
    if (args->row_bytes % 16 == 0) return send<uint4>(args, stream);
    if (args->row_bytes % 8 == 0) return send<uint2>(args, stream);
    if (args->row_bytes % 4 == 0) return send<uint32_t>(args, stream);
    return send<uint16_t>(args, stream);
}

template <typename RowT, typename T, int N>
static epmoe_status_t combine_in(const epmoei_p2p_args_t *args, epmoe_stream_t stream)
{
    int32_t team = team_of(args->sum_tokens, args->num_blocks, epmoei_ceil_div(args->hidden, N));
    unsigned blocks = blocks_of(args->sum_tokens, args->num_blocks, team);
    return epmoei_cuda_status(
        epmoei_launch_dependent(combine_kernel<RowT, T, N>, dim3(blocks), dim3(kThreads), 0, stream, *args, team),
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
