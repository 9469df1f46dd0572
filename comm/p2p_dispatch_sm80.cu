/* Dispatch through peer memory; the protocol stands in p2p.h. Bound by the links to the other ranks: a row crosses once
 * to each rank, in pieces of 16 bytes where its length allows it, several of a thread at once.
 * With few tokens every block finds all routes by itself, and one kernel does it all. With very few one block does, and
 * is bound by latency: rows leave as soon as they are loaded, staged. */
#include "comm/p2p_rows.cuh"

static constexpr int kRouteThreads = 256; /* and tokens of a block */
static constexpr int kFewTokens = kP2pThreads;
static constexpr int kFewGroups = kFewTokens / EPMOEI_P2P_GROUP;

/* --------------------------------------------------------------------------------------------------------- routes */

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

/* A warp, a token each: lane r gets how many of them go to rank r. */
static __device__ int32_t count_group(const epmoei_p2p_args_t &args, uint32_t ranks)
{
    int32_t mine = 0;
    for (int32_t r = 0; r < args.size; r++) {
        uint32_t votes = __ballot_sync(kP2pAll, ranks >> r & 1);
        if ((int32_t)(threadIdx.x % kP2pWarp) == r) mine = __popc(votes);
    }
    return mine;
}

/* A warp: counts of groups, for one rank, become offsets; returns their sum. */
template <int kAtOnce> static __device__ int32_t scan_groups(int32_t *counts, int64_t groups)
{
    const int32_t lane = threadIdx.x % kP2pWarp;
    int32_t sum = 0;
    for (int64_t first = 0; first < groups; first += kAtOnce * kP2pWarp) {
        int32_t loaded[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; i++) {
            int64_t group = first + i * kP2pWarp + lane;
            loaded[i] = group < groups ? *(volatile int32_t *)(counts + group) : 0;
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; i++) {
            int64_t group = first + i * kP2pWarp + lane;
            int32_t before = loaded[i];
            for (int32_t step = 1; step < kP2pWarp; step *= 2) {
                int32_t other = __shfl_up_sync(kP2pAll, before, step);
                if (lane >= step) before += other;
            }
            if (group < groups) counts[group] = sum + before - loaded[i];
            sum += __shfl_sync(kP2pAll, before, kP2pWarp - 1);
        }
    }
    return sum;
}

static __device__ void send_headers(const epmoei_p2p_args_t &args, const epmoei_p2p_window_t *windows, uint32_t epoch,
                                    const int32_t *counts)
{
    const int32_t words = args.size + 2;
    const int64_t at = ((int64_t)(epoch % 2) * args.size + args.rank) * words;
    const uint32_t head = (uint32_t)args.local_status | (uint32_t)args.reuse_routing << EPMOEI_P2P_REUSE_BIT |
                          (uint32_t)args.send_blocks << EPMOEI_P2P_BLOCKS_BIT;
    for (int32_t i = threadIdx.x; i < args.size * words; i += blockDim.x) {
        int32_t peer = i / words, word = i % words;
        uint32_t value = word == 0           ? head
                         : word <= args.size ? (uint32_t)counts[word - 1]
                                             : (uint32_t)args.max_rank_tokens;
        ptx_store_relaxed_system(windows[peer].headers + at + word, (uint64_t)epoch << 32 | value);
    }
}

static __global__ void __launch_bounds__(kRouteThreads) route_kernel(const __grid_constant__ epmoei_p2p_args_t args)
{
    __shared__ int32_t counts[kMaxRanks];
    __shared__ bool is_last;
    const int32_t lane = threadIdx.x % kP2pWarp, warp = threadIdx.x / kP2pWarp;
    epmoei_begin_dependent();
    if (__syncthreads_or(threadIdx.x == 0 && p2p_has_failed(args))) return;
    const int32_t num_tokens = actual_tokens(args);
    const bool counted = args.reuse_routing && args.local_status == EPMOE_OK;

    if (!counted) {
        const int64_t token = (int64_t)blockIdx.x * kRouteThreads + threadIdx.x, group = token / kP2pWarp;
        int32_t bad = 0;
        uint32_t ranks = token < num_tokens ? ranks_of(args, token, &bad) : 0;
        if (bad) epmoei_count_bad(args.error_word, bad);
        if (group * kP2pWarp < num_tokens) {
            args.token_ranks[token] = ranks;
            int32_t mine = count_group(args, ranks);
            if (lane < args.size) args.group_offsets[lane * args.groups + group] = mine;
        }
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(&args.state->route_blocks, 1u) == gridDim.x - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();

    for (int32_t r = warp; r < args.size; r += kRouteThreads / kP2pWarp) {
        int32_t sum = counted ? args.state->counts[r]
                              : scan_groups<4>(args.group_offsets + r * args.groups,
                                               ((int64_t)num_tokens + kP2pWarp - 1) / kP2pWarp);
        if (lane == 0) counts[r] = sum;
    }
    __syncthreads();
    if (threadIdx.x < args.size) args.state->counts[threadIdx.x] = counts[threadIdx.x];
    if (threadIdx.x == 0) args.state->route_blocks = 0;
    send_headers(args, args.windows, args.state->epoch + 1, counts);
}

/* ----------------------------------------------------------------------------------------------------------- plan */

/* Where routes are found: global memory, or shared memory with few tokens. */
struct routes_t {
    const uint32_t *token_ranks;
    const int32_t *group_offsets;
    int64_t groups; /* from rank to rank */
};

/* `window` is there already. */
static __device__ bool wait_for_headers(const epmoei_p2p_args_t &args, uint32_t epoch, plan_t *plan)
{
    const int32_t words = args.size + 2;
    const uint64_t *headers = plan->window[args.rank].headers + (int64_t)(epoch % 2) * args.size * words;
    const int64_t start = ptx_global_timer();
    bool there = true;
    for (int32_t i = threadIdx.x; i < args.size * words && there; i += blockDim.x) {
        int32_t source = i / words, word = i % words;
        uint32_t value = 0;
        there = p2p_wait_for_word(args, headers + i, start, source, epoch, &value);
        if (word == 0)
            plan->head[source] = value;
        else if (word > args.size)
            plan->max_rank_tokens[source] = (int32_t)value;
        else
            plan->counts[source][word - 1] = (int32_t)value;
    }
    return !__syncthreads_or(!there);
}

/* Every rank comes to the same verdict. A rank that failed comes first: what else its header says means nothing. */
static __device__ bool judge_headers(const epmoei_p2p_args_t &args, uint32_t epoch, plan_t *plan)
{
    bool good = true;
    if (threadIdx.x < kP2pWarp) {
        const int32_t r = threadIdx.x;
        const bool is_rank = r < args.size;
        const uint32_t head = plan->head[is_rank ? r : 0], status = head & ((1u << EPMOEI_P2P_REUSE_BIT) - 1);
        const int32_t reuse = head >> EPMOEI_P2P_REUSE_BIT & 1, reuse_first = plan->head[0] >> EPMOEI_P2P_REUSE_BIT & 1;
        const int32_t most = plan->max_rank_tokens[is_rank ? r : 0], most_first = plan->max_rank_tokens[0];
        int64_t rows = 0, before = 0;
        for (int32_t source = 0; source < args.size && is_rank; source++) {
            if (source == args.rank) before = rows;
            rows += plan->counts[source][r];
        }
        if (is_rank) plan->first_row[r] = (int32_t)before;
        if (r == args.rank) plan->num_rows = (int32_t)rows;
        const uint32_t failing = __ballot_sync(kP2pAll, status != 0);
        const uint32_t differs = __ballot_sync(kP2pAll, reuse != reuse_first || most != most_first);
        const uint32_t full = __ballot_sync(kP2pAll, is_rank && rows > plan->window[r].capacity);
        const uint32_t verdict = failing ? failing : differs ? differs : full;
        good = verdict == 0;
        if (!good && r == __ffs((int)verdict) - 1) {
            const int32_t field = !failing && differs && reuse == reuse_first;
            const int64_t value = failing ? status : !differs ? rows : field ? most : reuse;
            const int64_t bound = failing ? 0 : !differs ? plan->window[r].capacity : field ? most_first : reuse_first;
            p2p_raise(args,
                      failing   ? EPMOE_ERROR_PEER
                      : differs ? EPMOE_ERROR_MISMATCH
                                : EPMOE_ERROR_CAPACITY,
                      EPMOEI_P2P_HEADERS, r, epoch, value, bound, field, 0);
        }
    }
    return !__syncthreads_or(!good);
}

/* ----------------------------------------------------------------------------------------------------------- rows */

/* Lane r of the warp: the token's row at rank r, where it has one; all lanes: its ranks. */
static __device__ int32_t find_rows(const plan_t *plan, const routes_t &routes, int64_t token, uint32_t *ranks)
{
    const int32_t lane = threadIdx.x % kP2pWarp, place = (int32_t)(token % kP2pWarp);
    const uint32_t of_lane = routes.token_ranks[token - place + lane];
    *ranks = __shfl_sync(kP2pAll, of_lane, place);
    const bool is_there = *ranks >> lane & 1;
    int32_t row = is_there ? plan->first_row[lane] + routes.group_offsets[lane * routes.groups + token / kP2pWarp] : 0;
    for (uint32_t left = *ranks; left; left &= left - 1) {
        int32_t r = __ffs((int)left) - 1;
        uint32_t votes = __ballot_sync(kP2pAll, of_lane >> r & 1);
        if (lane == r) row += __popc(votes & ((1u << place) - 1));
    }
    return row;
}

/* Lane j of a warp: slot j of a token. */
struct slot_t {
    int32_t id;
    float weight;
};

static __device__ __forceinline__ slot_t load_slot(const epmoei_p2p_args_t &args, int64_t token)
{
    const int32_t lane = threadIdx.x % kP2pWarp;
    const int64_t at = token * args.top_k + lane;
    if (lane >= args.top_k) return {-1, 0.0f};
    return {args.ids[at], args.weights[at]};
}

/* What rank r gets of the slot: an id that counts from the first expert there, or -1 where it is another rank's. */
static __device__ __forceinline__ slot_t slot_at_rank(const epmoei_p2p_args_t &args, slot_t slot, int32_t r)
{
    const int32_t first = first_expert(args, r), end = first_expert(args, r + 1);
    return slot.id >= first && slot.id < end ? slot_t{slot.id - first, slot.weight} : slot_t{-1, 0.0f};
}

/* A warp: the token's rows, for combine. */
static __device__ __forceinline__ void note_rows(const epmoei_p2p_args_t &args, int64_t token, uint32_t ranks,
                                                 int32_t row)
{
    const int32_t lane = threadIdx.x % kP2pWarp;
    if (ranks >> lane & 1) args.token_rows[token * args.width + __popc(ranks & ((1u << lane) - 1))] = row;
}

/* A warp: a token's ids and weights. */
static __device__ void send_routing(const epmoei_p2p_args_t &args, const plan_t *plan, uint32_t ranks, int32_t row,
                                    slot_t slot)
{
    const int32_t lane = threadIdx.x % kP2pWarp;
    for (uint32_t left = ranks; left; left &= left - 1) {
        const int32_t r = __ffs((int)left) - 1;
        const int64_t to = (int64_t)__shfl_sync(kP2pAll, row, r) * args.top_k + lane;
        const slot_t there = slot_at_rank(args, slot, r);
        if (lane >= args.top_k) continue;
        plan->window[r].ids[to] = there.id;
        plan->window[r].weights[to] = there.weight;
    }
}

/* A warp: the same in staged words; bit r of `index` as in plain_pieces_t::stage. */
static __device__ void stage_routing(const epmoei_p2p_args_t &args, const plan_t *plan, uint32_t ranks, uint32_t index,
                                     uint32_t epoch, slot_t slot)
{
    const int32_t lane = threadIdx.x % kP2pWarp;
    if (lane >= args.top_k) return;
    for (uint32_t left = ranks; left; left &= left - 1) {
        const int32_t r = __ffs((int)left) - 1;
        const slot_t there = slot_at_rank(args, slot, r);
        uint64_t *words = staged_row(args, plan->window[r], epoch, args.rank, index >> r & 1);
        ptx_store_relaxed_system_2(words + args.staged_words - 2 * (args.top_k - lane),
                                   staged_word(epoch, (uint32_t)there.id),
                                   staged_word(epoch, __float_as_uint(there.weight)));
    }
}

/* The rows of this block, and at its end the flags that say so. `loaded` and `slot` have the first pieces of its teams'
 * first rows and their routing already. */
template <typename Pieces>
static __device__ void send_rows(const epmoei_p2p_args_t &args, const plan_t *plan, const routes_t &routes,
                                 uint32_t epoch, int32_t num_tokens, team_t team, Pieces loaded, slot_t slot)
{
    const typename Pieces::index_t pieces = Pieces::of_row(args), step = Pieces::of_team(team);
    const uint32_t teams = kP2pThreads / team.threads;
    bool is_loaded = true;
    for (uint32_t token = blockIdx.x * teams + team.index(); token < (uint32_t)num_tokens; token += gridDim.x * teams) {
        uint32_t ranks;
        int32_t row = find_rows(plan, routes, token, &ranks);
        for (typename Pieces::index_t first = 0; first < pieces; first += step) {
            if (!is_loaded) loaded.load(args, token, first, team);
            loaded.store(args, plan, ranks, row, first, team);
            is_loaded = false;
        }
        if (team.thread() < kP2pWarp) {
            note_rows(args, token, ranks, row);
            send_routing(args, plan, ranks, row, slot);
            const uint32_t next = token + gridDim.x * teams;
            if (next < (uint32_t)num_tokens) slot = load_slot(args, next);
        }
    }
    __syncthreads();
    if (threadIdx.x < args.size)
        ptx_store_release_system(plan->window[threadIdx.x].rows_there + args.rank * EPMOEI_P2P_MAX_BLOCKS + blockIdx.x,
                                 epoch);
}

/* A block: the rows that ranks have staged here. */
template <int kAtOnce>
static __device__ __forceinline__ bool take_staged(const epmoei_p2p_args_t &args, const plan_t *plan, uint32_t epoch,
                                                   int64_t start)
{
    int32_t row = 0;
    bool there = true;
    for (int32_t source = 0; source < args.size; source++) {
        const int32_t num = plan->counts[source][args.rank];
        if (source != args.rank && plan->head[source] >> EPMOEI_P2P_BLOCKS_BIT == 0)
            for (int32_t i = 0; i < num && there; i++)
                there = take_staged_row<kAtOnce>(args, plan->window[args.rank], epoch, source, i, row + i, start);
        row += num;
    }
    return there;
}

/* In a kernel that is bound by its rows, whose registers this must not take. */
static __device__ __noinline__ bool take_staged_apart(const epmoei_p2p_args_t &args, const plan_t *plan, uint32_t epoch,
                                                      int64_t start)
{
    return take_staged<1>(args, plan, epoch, start);
}

/* The last block of this rank to come to the device waits for all blocks of all ranks: its own ones are there too. */
template <bool kStages>
static __device__ void finish_send(const epmoei_p2p_args_t &args, const plan_t *plan, uint32_t epoch,
                                   int32_t num_tokens)
{
    const int64_t start = ptx_global_timer();
    const uint32_t *flags = plan->window[args.rank].rows_there;
    bool there = true;
    for (int32_t i = threadIdx.x; i < args.size * EPMOEI_P2P_MAX_BLOCKS && there; i += kP2pThreads) {
        int32_t source = i / EPMOEI_P2P_MAX_BLOCKS, block = i % EPMOEI_P2P_MAX_BLOCKS;
        if (block < (int32_t)(plan->head[source] >> EPMOEI_P2P_BLOCKS_BIT))
            there = p2p_wait_for_flag(args, flags + i, start, EPMOEI_P2P_ROWS, source, epoch);
    }
    there = there && (kStages ? take_staged<2>(args, plan, epoch, start) : take_staged_apart(args, plan, epoch, start));
    there = !__syncthreads_or(!there);
    if (threadIdx.x != 0) return;
    *args.num_rows = there ? plan->num_rows : 0;
    args.state->num_tokens = num_tokens;
    args.state->own_rows[0] = plan->first_row[args.rank];
    args.state->own_rows[1] = there ? plan->counts[args.rank][args.rank] : 0;
    args.state->send_blocks = 0;
    args.state->epoch = epoch;
}

/* The second half of dispatch, from the wait for the headers on. What takes a way to memory begins before that wait:
 * also the count of blocks, which nobody asks for before the rows are out. */
template <typename Pieces>
static __device__ void send(const epmoei_p2p_args_t &args, plan_t *plan, const routes_t &routes, uint32_t epoch,
                            int32_t num_tokens, team_t team)
{
    __shared__ bool is_last;
    Pieces loaded;
    slot_t slot = {-1, 0.0f};
    uint32_t blocks_before = 0;
    const int64_t token = (int64_t)blockIdx.x * (kP2pThreads / team.threads) + team.index();
    if (threadIdx.x == 0) blocks_before = atomicAdd(&args.state->send_blocks, 1u);
    if (token < num_tokens && team.thread() < kP2pWarp) slot = load_slot(args, token);
    if (token < num_tokens) loaded.load(args, token, 0, team);
    if (!wait_for_headers(args, epoch, plan) || !judge_headers(args, epoch, plan)) {
        if (threadIdx.x == 0) *args.num_rows = 0;
        return;
    }
    if (threadIdx.x == 0) is_last = blocks_before == gridDim.x - 1; /* for all behind the rows' barrier */
    send_rows<Pieces>(args, plan, routes, epoch, num_tokens, team, loaded, slot);
    if (is_last) finish_send<false>(args, plan, epoch, num_tokens);
}

template <typename Pieces>
static __global__ void __launch_bounds__(kP2pThreads, 2)
    send_kernel(const __grid_constant__ epmoei_p2p_args_t args, team_t team)
{
    __shared__ plan_t plan;
    epmoei_begin_dependent();
    const uint32_t epoch = args.state->epoch + 1;
    const int32_t num_tokens = actual_tokens(args);
    if (threadIdx.x < args.size) plan.window[threadIdx.x] = args.windows[threadIdx.x];
    if (__syncthreads_or(threadIdx.x == 0 && p2p_has_failed(args))) {
        if (threadIdx.x == 0) *args.num_rows = 0;
        return;
    }
    const routes_t routes = {args.token_ranks, args.group_offsets, args.groups};
    send<Pieces>(args, &plan, routes, epoch, num_tokens, team);
}

/* A thread for every token: all routes, in every block. */
template <typename Pieces>
static __global__ void __launch_bounds__(kP2pThreads, 2)
    few_kernel(const __grid_constant__ epmoei_p2p_args_t args, team_t team)
{
    __shared__ plan_t plan;
    __shared__ uint32_t token_ranks[kFewTokens];
    __shared__ int32_t group_offsets[kMaxRanks * kFewGroups], counts[kMaxRanks];
    const int32_t t = threadIdx.x, lane = t % kP2pWarp, warp = t / kP2pWarp;
    epmoei_begin_dependent();
    /* Nothing here waits for anything else: all of it is loaded at once. */
    const uint32_t epoch = args.state->epoch + 1;
    const int32_t num_tokens = actual_tokens(args);
    const bool failed = t == 0 && p2p_has_failed(args);
    int32_t bad = 0;
    uint32_t ranks = 0;
    if (t < args.num_tokens) ranks = args.reuse_routing ? args.token_ranks[t] : ranks_of(args, t, &bad);
    if (t < args.size) plan.window[t] = args.windows[t];
    if (t >= num_tokens) ranks = 0;
    token_ranks[t] = ranks;
    int32_t mine = count_group(args, ranks);
    if (lane < args.size) group_offsets[lane * kFewGroups + warp] = mine;
    if (__syncthreads_or(failed)) {
        if (t == 0) *args.num_rows = 0;
        return;
    }
    for (int32_t r = warp; r < args.size; r += kP2pThreads / kP2pWarp) {
        int32_t sum = scan_groups<1>(group_offsets + r * kFewGroups, kFewGroups);
        if (lane == 0) counts[r] = sum;
    }
    __syncthreads();
    if (blockIdx.x == 0) {
        send_headers(args, plan.window, epoch, counts);
        if (t < num_tokens) args.token_ranks[t] = ranks;
        if (bad && t < num_tokens) epmoei_count_bad(args.error_word, bad);
    }
    const routes_t routes = {token_ranks, group_offsets, kFewGroups};
    send<Pieces>(args, &plan, routes, epoch, num_tokens, team);
}

/* One block, a team for each token, whose row it has in registers as a whole. */
template <typename Pieces>
static __global__ void __launch_bounds__(kP2pThreads, 2)
    staged_kernel(const __grid_constant__ epmoei_p2p_args_t args, team_t team)
{
    constexpr int32_t kParts = sizeof(epmoei_p2p_window_t) / 16;
    static_assert(sizeof(epmoei_p2p_window_t) % 16 == 0, "copied in whole parts");
    static_assert(kMaxRanks * kParts <= kP2pThreads, "one for a thread at most");
    __shared__ plan_t plan;
    __shared__ int32_t counts[kMaxRanks];
    const int32_t t = threadIdx.x, lane = t % kP2pWarp, token = team.index();
    const bool has_slots = team.thread() < kP2pWarp;
    epmoei_begin_dependent();
    /* Nothing here waits for anything else: all of it is loaded at once. */
    if (t < args.size * kParts)
        ptx_cp_async_ca_16(ptx_shared_address(plan.window) + 16 * t,
                           reinterpret_cast<const char *>(args.windows) + 16 * t, 16);
    const uint32_t epoch = args.state->epoch + 1;
    const int32_t *tokens_at = args.reuse_routing ? &args.state->num_tokens : args.num_tokens_dev;
    const int32_t tokens_there = tokens_at ? *tokens_at : args.num_tokens;
    const bool failed = t == 0 && p2p_has_failed(args);
    const bool is_slot = lane < args.top_k, has_token = token < args.num_tokens;
    int32_t ids[kMostStaged]; /* of this lane's slot of every token */
    uint32_t ranks[kMostStaged];
#pragma unroll
    for (int i = 0; i < kMostStaged; i++) {
        ids[i] = i < args.num_tokens && is_slot ? args.ids[i * args.top_k + lane] : -1;
        ranks[i] = i < args.num_tokens && args.reuse_routing ? args.token_ranks[i] : 0;
    }
    const float weight = has_token && is_slot ? args.weights[token * args.top_k + lane] : 0.0f;
    Pieces loaded;
    if (has_token) loaded.load(args, token, 0, team);

    const int32_t num_tokens = max(0, min(tokens_there, args.num_tokens)); /* of a rank that failed 0 as well */
    const int32_t share = args.num_experts / args.size, longer = args.num_experts % args.size;
    int32_t bad = 0;
#pragma unroll
    for (int i = 0; i < kMostStaged; i++) {
        const int32_t id = ids[i];
        const bool is_expert = id >= 0 && id < args.num_experts;
        const uint32_t found = __reduce_or_sync(kP2pAll, is_expert ? 1u << owner(id, share, longer) : 0u);
        if (!args.reuse_routing) ranks[i] = found;
        if (i >= num_tokens) ranks[i] = 0;
        bad += i < num_tokens && !args.reuse_routing && !is_expert && id != -1;
    }
    const uint32_t of_token = token == 0 ? ranks[0] : token == 1 ? ranks[1] : 0;
    const uint32_t before = token == 1 ? ranks[0] : 0; /* where the other row comes first */
    const uint32_t own = of_token & 1u << args.rank;
    const slot_t slot = {token == 1 ? ids[1] : ids[0], weight};
    if (t < args.size) counts[t] = (int32_t)(ranks[0] >> t & 1) + (int32_t)(ranks[1] >> t & 1);
    if (t < num_tokens) args.token_ranks[t] = t == 0 ? ranks[0] : ranks[1];
    ptx_cp_async_wait_all();
    if (__syncthreads_or(failed)) {
        if (t == 0) *args.num_rows = 0;
        return;
    }
    send_headers(args, plan.window, epoch, counts);
    loaded.stage(args, &plan, of_token & ~own, before, epoch, team);
    if (has_slots) stage_routing(args, &plan, of_token & ~own, before, epoch, slot);
    if (t < kP2pWarp && bad) epmoei_count_bad(args.error_word, bad);

    if (!wait_for_headers(args, epoch, &plan) || !judge_headers(args, epoch, &plan)) {
        if (t == 0) *args.num_rows = 0;
        return;
    }
    const int32_t row = of_token >> lane & 1 ? plan.first_row[lane] + (int32_t)(before >> lane & 1) : 0;
    loaded.store(args, &plan, own, row, 0, team);
    if (has_slots) {
        note_rows(args, token, of_token, row);
        send_routing(args, &plan, own, row, slot);
    }
    finish_send<true>(args, &plan, epoch, num_tokens);
}

/* ----------------------------------------------------------------------------------------------------- launchers */

/* How the rows of a kernel are dealt to blocks: a team takes one at a time. */
struct shape_t {
    int32_t blocks;
    team_t team;
};

/* With few rows a whole block for one, never more threads than pieces; with many no fewer than `least`, a team of
 * which has all of a row under way. */
static shape_t shape_of(int64_t num_rows, int64_t max_blocks, int64_t pieces, int64_t least)
{
    int64_t threads = kP2pThreads;
    while (threads > least && num_rows * threads > max_blocks * kP2pThreads) threads /= 2;
    while (threads > kP2pWarp && threads / 2 >= pieces) threads /= 2;
    int64_t blocks = epmoei_ceil_div(num_rows, kP2pThreads / threads);
    return {(int32_t)epmoei_max64(1, epmoei_min64(max_blocks, blocks)), {(int32_t)threads, threads == least}};
}

template <typename Pieces> static epmoe_status_t dispatch(epmoei_p2p_args_t args, epmoe_stream_t stream)
{
    if constexpr (Pieces::kStages) {
        const team_t team = shape_of(args.num_tokens, 1, Pieces::threads_of_row(args), Pieces::least(args)).team;
        args.send_blocks = 0;
        if (args.num_tokens <= args.staged_rows && Pieces::of_row(args) <= Pieces::of_team(team))
            return epmoei_cuda_status(
                epmoei_launch_dependent(staged_kernel<Pieces>, dim3(1), dim3(kP2pThreads), 0, stream, args, team),
                "staged_kernel");
    }
    const shape_t shape = shape_of(args.num_tokens, args.max_blocks, Pieces::threads_of_row(args), Pieces::least(args));
    args.send_blocks = shape.blocks;
    const dim3 blocks((unsigned)shape.blocks), threads(kP2pThreads);
    if (args.num_tokens <= kFewTokens)
        return epmoei_cuda_status(
            epmoei_launch_dependent(few_kernel<Pieces>, blocks, threads, 0, stream, args, shape.team), "few_kernel");
    int64_t route_blocks = args.reuse_routing ? 1 : epmoei_ceil_div(args.num_tokens, kRouteThreads);
    EPMOEI_CHECK(epmoei_cuda_status(
        epmoei_launch_dependent(route_kernel, dim3((unsigned)route_blocks), dim3(kRouteThreads), 0, stream, args),
        "route_kernel"));
    return epmoei_cuda_status(
        epmoei_launch_dependent(send_kernel<Pieces>, blocks, threads, 0, stream, args, shape.team), "send_kernel");
}

template <typename T> static epmoe_status_t dispatch_coded(const epmoei_p2p_args_t *args, epmoe_stream_t stream)
{
    return args->hidden % 8 == 0 ? dispatch<coded_pieces_t<T, true>>(*args, stream)
                                 : dispatch<coded_pieces_t<T, false>>(*args, stream);
}

extern "C" epmoe_status_t epmoei_p2p_dispatch_sm80(const epmoei_p2p_args_t *args, epmoe_stream_t stream)
{
    if (args->coded && args->dtype == EPMOE_BF16) return dispatch_coded<__nv_bfloat16>(args, stream);
    if (args->coded && args->dtype == EPMOE_F16) return dispatch_coded<__half>(args, stream);
    if (args->coded) return dispatch_coded<float>(args, stream);
    if (args->row_bytes % 16 == 0) return dispatch<plain_pieces_t<uint4>>(*args, stream);
    if (args->row_bytes % 8 == 0) return dispatch<plain_pieces_t<uint2>>(*args, stream);
    if (args->row_bytes % 4 == 0) return dispatch<plain_pieces_t<uint32_t>>(*args, stream);
    return dispatch<plain_pieces_t<uint16_t>>(*args, stream);
}
