/* One token per row: a block per row, nothing is sorted.
 *
 * With a top_k of up to 1024 the row is read once. Tokens that may be among the k go to a list in shared memory; when
 * it fills up it is cut down to the k best, and from then on only what is better than the last of these enters. The
 * rest of the rules work on the list. Otherwise the row is read once per step: the last token that a filter leaves is
 * found by its logit's bits, from the highest down, with a histogram at each of three levels. */
#include "dense_layers/sample.h"
#include "dense_layers/token_draw_cuda.cuh"

namespace
{

constexpr int kMostListed = 1024;
constexpr int kRound = 8192; /* tokens that may enter the list between two looks at its length */
constexpr int kCapacity = kRound + 2 * kMostListed;
constexpr int kBins = 2048;

struct sample_t {
    epmoe_sample_args_t args;
    bool vector; /* rows are aligned to four elements */
};

/* A token as the filters order them: the larger number comes first. Keys ascend as logits do. */
__device__ __forceinline__ uint32_t key_of(float logit)
{
    const uint32_t bits = __float_as_uint(logit);
    return bits ^ (bits >> 31 ? 0xFFFFFFFFu : 0x80000000u);
}
__device__ __forceinline__ float logit_of(uint32_t key)
{
    return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : 0xFFFFFFFFu));
}
__device__ __forceinline__ uint64_t place_of(uint32_t key, int32_t id) { return (uint64_t)key << 32 | ~(uint32_t)id; }
__device__ __forceinline__ uint32_t key_of_place(uint64_t place) { return (uint32_t)(place >> 32); }
__device__ __forceinline__ int32_t id_of_place(uint64_t place) { return (int32_t) ~(uint32_t)place; }

constexpr uint32_t kNoKey = 0x007FFFFFu; /* of -inf, the lowest */

/* On Hopper two blocks share an SM, so that one's rows arrive while the other looks for a floor or draws. */
struct shared_t {
    union {
        struct { /* the whole row */
            draw_t draw;
            int64_t bins[kBins];
        };
        uint64_t list[kCapacity]; /* places */
    };
    int64_t weights[kMostListed]; /* of the list's places, and where they wait while it is cut */
    int64_t scratch[kWarps];      /* of the list's sums */
    int32_t counts[2][kWarps];
    int32_t length;
};
static_assert(2 * sizeof(shared_t) <= 200 << 10, "two blocks in the 227 KB that an SM of 9.0 gives to blocks");

template <typename T> struct alignas(4 * sizeof(T)) four_t {
    T element[4];
};

template <typename T> struct row_t {
    const T *logits;
    int32_t vocab;
    bool vector;
    epmoei_sample_rule_t rule;
    float uniform;

    __device__ __forceinline__ void keys_at(int32_t first, uint32_t (&keys)[4]) const
    {
        float values[4];
        load_four(values, logits, first, vocab, vector, -INFINITY);
#pragma unroll
        for (int i = 0; i < 4; i++) keys[i] = key_of(tame_logit(values[i]));
    }

    /* The same as stored, for later: what is done with it would wait for it. */
    __device__ __forceinline__ four_t<T> four_at(int32_t first) const
    {
        if (vector && first + 4 <= vocab) return *(const four_t<T> *)(logits + first);
        four_t<T> four;
#pragma unroll
        for (int i = 0; i < 4; i++)
            four.element[i] = first + i < vocab ? logits[first + i] : epmoei_from_float<T>(-INFINITY);
        return four;
    }
};

/* ---------------------------------------------------------------------------------------------------- the whole row */

/* The first place of the row. */
template <typename T> __device__ __forceinline__ uint64_t find_first(const row_t<T> &row, shared_t *shared)
{
    uint64_t first = 0;
#pragma unroll 4
    for (int32_t at = 4 * threadIdx.x; at < row.vocab; at += 4 * kThreads) {
        uint32_t keys[4];
        row.keys_at(at, keys);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint64_t place = place_of(keys[i], at + i);
            first = at + i < row.vocab && place > first ? place : first;
        }
    }
    return max_of_block(first, shared->draw.scratch);
}

/* The last place at which the numbers of the tokens from the first on reach need(sum of all of them): 1 each, or what
 * weigh(key, id) says. Each of the block's threads gets it. */
template <typename T, typename Weigh, typename Need>
__device__ __forceinline__ uint64_t find_last(const row_t<T> &row, shared_t *shared, Weigh weigh, Need need_of)
{
    const int32_t shifts[3] = {21, 10, 0}, widths[3] = {11, 11, 10};
    uint32_t prefix = 0;
    int64_t need = 0;
    for (int level = 0; level < 3; level++) {
        const uint32_t low = (1u << widths[level]) - 1, known = level == 0 ? 0u : ~0u << shifts[level - 1];
        __syncthreads();
        for (int i = threadIdx.x; i < kBins; i += kThreads) shared->bins[i] = 0;
        __syncthreads();
        for (int32_t at = 4 * threadIdx.x; at < row.vocab; at += 4 * kThreads) {
            uint32_t keys[4];
            row.keys_at(at, keys);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (at + i >= row.vocab || (keys[i] & known) != prefix) continue;
                const int64_t number = weigh(keys[i], at + i);
                if (number)
                    atomicAdd((unsigned long long *)&shared->bins[keys[i] >> shifts[level] & low],
                              (unsigned long long)number);
            }
        }
        __syncthreads();
        /* From the highest bin down: warp 0, each lane a run of bins. */
        const int32_t each = kBins / 32, lane = threadIdx.x % 32;
        int64_t own = 0;
        if (threadIdx.x < 32)
            for (int i = 0; i < each; i++) own += shared->bins[kBins - 1 - (lane * each + i)];
        if (level == 0) need = need_of(sum_of_block(threadIdx.x < 32 ? own : 0, shared->draw.scratch));
        __syncthreads(); /* the scratch has been read */
        if (threadIdx.x < 32) {
            int64_t before = sum_below(own);
            const bool here = before < need && before + own >= need;
            int32_t bin = 0;
            if (here)
                for (bin = kBins - 1 - lane * each; before + shared->bins[bin] < need; bin--)
                    before += shared->bins[bin];
            const int32_t source = __ffs((int)__ballot_sync(kAllLanes, here)) - 1;
            if (lane == source) {
                shared->draw.scratch[0] = bin;
                shared->draw.scratch[1] = need - before;
            }
        }
        __syncthreads();
        prefix |= (uint32_t)shared->draw.scratch[0] << shifts[level];
        need = shared->draw.scratch[1];
    }
    /* `need` must come from the tokens that have this very key, all of which count the same; `each` reads one. */
    const int64_t each = weigh(prefix, 0);
    const auto counts = [&](int32_t first, int64_t(&w)[4]) {
        uint32_t keys[4];
        row.keys_at(first, keys);
#pragma unroll
        for (int i = 0; i < 4; i++) w[i] = first + i < row.vocab && keys[i] == prefix;
    };
    __syncthreads();
    add_pieces(&shared->draw, row.vocab, counts);
    return place_of(prefix, find_token(&shared->draw, row.vocab, (need + each - 1) / each - 1, counts));
}

template <typename T> __device__ __forceinline__ int32_t draw_from_row(const row_t<T> &row, shared_t *shared)
{
    const uint64_t first = find_first(row, shared);
    if (key_of_place(first) == kNoKey) return -1;
    if (row.rule.temperature == 0.0f) return id_of_place(first);
    const float top = logit_of(key_of_place(first));
    uint64_t last = 0;
    if (row.rule.top_k < row.vocab)
        last = find_last(
            row, shared, [](uint32_t, int32_t) { return (int64_t)1; },
            [&](int64_t) { return (int64_t)row.rule.top_k; });
    if (row.rule.top_p < 1.0f) {
        const uint64_t of_top_k = last;
        /* Tokens of one key weigh the same, so that the first of them, which a cut never leaves out, speaks for all. */
        last = find_last(
            row, shared,
            [&](uint32_t key, int32_t id) {
                return place_of(key, id) >= of_top_k ? logit_weight(logit_of(key), top, row.rule.temperature) : 0;
            },
            [&](int64_t all) { return share_up(row.rule.top_p, all); });
    }
    const int64_t least = share_up(row.rule.min_p, (int64_t)kTokenOne);
    const auto weigh = [&](int32_t at, int64_t(&w)[4]) {
        uint32_t keys[4];
        row.keys_at(at, keys);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            w[i] = 0;
            if (at + i >= row.vocab || place_of(keys[i], at + i) < last) continue;
            w[i] = logit_weight(logit_of(keys[i]), top, row.rule.temperature);
            w[i] = w[i] >= least ? w[i] : 0;
        }
    };
    __syncthreads();
    const int64_t total = add_pieces(&shared->draw, row.vocab, weigh);
    return find_token(&shared->draw, row.vocab, draw_target(row.uniform, total), weigh);
}

/* --------------------------------------------------------------------------------------------------------- the list */

/* Over the block; rounds with `odd` 0 and 1 take turns, so that one barrier each is enough. */
__device__ __forceinline__ int32_t count_of_block(int32_t count, int32_t odd, shared_t *shared)
{
    count = __reduce_add_sync(kAllLanes, count);
    if (threadIdx.x % 32 == 0) shared->counts[odd][threadIdx.x / 32] = count;
    __syncthreads();
    count = 0;
#pragma unroll
    for (int i = 0; i < kWarps; i++) count += shared->counts[odd][i];
    return count;
}

/* The list becomes its `k` first places, in any order. Every thread of the block calls it, behind a barrier. */
__device__ __forceinline__ void cut_list(shared_t *shared, int32_t k)
{
    const int32_t length = shared->length;
    if (length <= k) return;
    /* The largest number that k places reach, bit by bit: places are distinct. */
    uint64_t last = 0;
    for (int bit = 63; bit >= 0; bit--) {
        const uint64_t trial = last | (uint64_t)1 << bit;
        int32_t count = 0;
        for (int32_t i = threadIdx.x; i < length; i += kThreads) count += shared->list[i] >= trial;
        count = count_of_block(count, bit & 1, shared);
        if (count >= k) last = trial;
        if (count == k) break; /* these are the ones */
    }
    if (threadIdx.x == 0) shared->length = 0;
    __syncthreads();
    for (int32_t i = threadIdx.x; i < length; i += kThreads)
        if (shared->list[i] >= last) shared->weights[atomicAdd(&shared->length, 1)] = (int64_t)shared->list[i];
    __syncthreads();
    for (int32_t i = threadIdx.x; i < k; i += kThreads) shared->list[i] = (uint64_t)shared->weights[i];
    __syncthreads();
}

/* A key that `k` of the block's keys reach, or as many of equal ones as it takes, found bit by bit; 0 where there are
 * not as many. keys are the thread's own, 0 for none. */
template <int kCount>
__device__ __forceinline__ uint32_t find_floor(const uint32_t (&keys)[kCount], int32_t k, shared_t *shared)
{
    uint32_t floor = 0;
    for (int bit = 31; bit >= 0; bit--) {
        const uint32_t trial = floor | 1u << bit;
        int32_t count = 0;
#pragma unroll
        for (int i = 0; i < kCount; i++) count += keys[i] >= trial;
        count = count_of_block(count, bit & 1, shared);
        if (count >= k) floor = trial;
        if (count == k) break;
    }
    return floor;
}

/* The top_k first places of the row but for those of -inf, which weigh nothing. */
template <typename T> __device__ __forceinline__ void fill_list(const row_t<T> &row, shared_t *shared)
{
    constexpr int kLoads = kRound / (4 * kThreads);
    if (threadIdx.x == 0) shared->length = 0;
    __syncthreads();
    uint32_t least = kNoKey + 1; /* keys below do not enter */
    four_t<T> fours[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; i++) fours[i] = row.four_at((i * kThreads + (int32_t)threadIdx.x) * 4);
    for (int32_t first = 0; first < row.vocab; first += kRound) {
        uint32_t keys[4 * kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) keys[4 * i + j] = key_of(tame_logit(epmoei_to_float(fours[i].element[j])));
            /* The next round's tokens are on their way while this one's are looked at. */
            fours[i] = row.four_at(min(first + kRound + (i * kThreads + (int32_t)threadIdx.x) * 4, row.vocab));
        }
        /* Almost all of the first round would enter, to be cut away at once. */
        if (first == 0) least = max(least, find_floor(keys, row.rule.top_k, shared));
#pragma unroll
        for (int i = 0; i < 4 * kLoads; i++) {
            if (keys[i] < least) continue;
            const int32_t id = first + (i / 4 * kThreads + (int32_t)threadIdx.x) * 4 + i % 4;
            shared->list[atomicAdd(&shared->length, 1)] = place_of(keys[i], id);
        }
        __syncthreads();
        const int32_t length = shared->length;
        __syncthreads();
        const bool last_round = first + kRound >= row.vocab, full = length >= row.rule.top_k;
        if (length > kCapacity - kRound || last_round) cut_list(shared, row.rule.top_k);
        /* Of equal keys those of earlier rounds come first. */
        if (first == 0 && full && least != UINT32_MAX) least++;
        if (last_round || length <= kCapacity - kRound || !full) continue;
        uint64_t last = ~(uint64_t)0;
        for (int32_t i = threadIdx.x; i < shared->length; i += kThreads)
            last = shared->list[i] < last ? shared->list[i] : last;
        least = key_of_place(~max_of_block(~last, shared->scratch)) + 1;
    }
}

__device__ __forceinline__ int32_t draw_from_list(const epmoei_sample_rule_t &rule, float uniform, shared_t *shared)
{
    const int32_t length = shared->length;
    if (length == 0) return -1;
    uint64_t first = 0;
    for (int32_t i = threadIdx.x; i < length; i += kThreads) first = max(first, shared->list[i]);
    first = max_of_block(first, shared->scratch);
    const float top = logit_of(key_of_place(first));
    int64_t all = 0;
    for (int32_t i = threadIdx.x; i < length; i += kThreads) {
        shared->weights[i] = logit_weight(logit_of(key_of_place(shared->list[i])), top, rule.temperature);
        all += shared->weights[i];
    }
    all = sum_of_block(all, shared->scratch); /* which also makes the weights visible */
    const int64_t need = rule.top_p < 1.0f ? share_up(rule.top_p, all) : all + 1;
    const int64_t least = share_up(rule.min_p, (int64_t)kTokenOne);
    /* Of a thread's tokens, kMostListed / kThreads at most. */
    int64_t total = 0, own[kMostListed / kThreads];
#pragma unroll
    for (int k = 0; k < kMostListed / kThreads; k++) {
        const int32_t at = threadIdx.x + k * kThreads;
        own[k] = 0;
        if (at >= length || shared->weights[at] < least) continue;
        int64_t before = 0;
        for (int32_t i = 0; i < length && rule.top_p < 1.0f; i++)
            before += shared->list[i] > shared->list[at] ? shared->weights[i] : 0;
        own[k] = before < need ? shared->weights[at] : 0;
        total += own[k];
    }
    total = sum_of_block(total, shared->scratch);
#pragma unroll
    for (int k = 0; k < kMostListed / kThreads; k++)
        if (threadIdx.x + k * kThreads < length) shared->weights[threadIdx.x + k * kThreads] = own[k];
    __syncthreads();
    const int64_t target = draw_target(uniform, total);
    uint64_t drawn = 0; /* the lowest id wins */
#pragma unroll
    for (int k = 0; k < kMostListed / kThreads; k++) {
        const int32_t at = threadIdx.x + k * kThreads;
        if (at >= length || own[k] == 0) continue;
        const int32_t id = id_of_place(shared->list[at]);
        int64_t running = 0;
        for (int32_t i = 0; i < length; i++) running += id_of_place(shared->list[i]) <= id ? shared->weights[i] : 0;
        if (running > target) drawn = max(drawn, (uint64_t) ~(uint32_t)id);
    }
    drawn = max_of_block(drawn, shared->scratch);
    return (int32_t) ~(uint32_t)drawn;
}

/* ------------------------------------------------------------------------------------------------------- the kernel */

__device__ __forceinline__ epmoei_sample_rule_t rule_of(const epmoe_sample_args_t &args, int64_t row)
{
    epmoei_sample_rule_t rule;
    rule.temperature = args.temperature_rows ? args.temperature_rows[row] : args.temperature;
    rule.top_k = args.top_k_rows ? args.top_k_rows[row] : args.top_k;
    rule.top_p = args.top_p_rows ? args.top_p_rows[row] : args.top_p;
    rule.min_p = args.min_p_rows ? args.min_p_rows[row] : args.min_p;
    if (rule.top_k <= 0 || rule.top_k > args.vocab_size) rule.top_k = args.vocab_size;
    if (rule.top_p == 0.0f) rule.top_p = 1.0f;
    return rule;
}

template <typename T> static __global__ void __launch_bounds__(kThreads, 2) sample_kernel(sample_t p)
{
    extern __shared__ __align__(128) char shared[];
    shared_t *block = (shared_t *)shared;
    epmoei_begin_dependent();
    const int64_t index = blockIdx.x;
    row_t<T> row;
    row.logits = (const T *)p.args.logits + index * p.args.logits_stride;
    row.vocab = p.args.vocab_size;
    row.vector = p.vector;
    row.rule = rule_of(p.args, index);
    row.uniform = row.rule.temperature == 0.0f ? 0.0f : p.args.uniform[index];
    int32_t token;
    if (row.rule.temperature != 0.0f && row.rule.top_k <= kMostListed) {
        fill_list(row, block);
        token = draw_from_list(row.rule, row.uniform, block);
    } else
        token = draw_from_row(row, block);
    if (threadIdx.x == 0) p.args.tokens[index] = token;
}

template <typename T> static epmoe_status_t launch(const epmoe_sample_args_t *args, epmoe_stream_t stream)
{
    const sample_t p = {*args, args->logits_stride % 4 == 0 || args->num_rows == 1};
    EPMOEI_CHECK(epmoei_allow_shared(sample_kernel<T>, sizeof(shared_t), "epmoe_sample"));
    return epmoei_cuda_status((int32_t)epmoei_launch_dependent(sample_kernel<T>, dim3((unsigned)args->num_rows),
                                                               dim3(kThreads), sizeof(shared_t), stream, p),
                              "epmoe_sample");
}

} // namespace

extern "C" epmoe_status_t epmoei_sample_sm80(const epmoe_sample_args_t *args, epmoe_stream_t stream)
{
    EPMOEI_CHECK_ALIGNED(args->logits, 16);
    EPMOEI_CHECK_ALIGNED(args->uniform, 4);
    EPMOEI_CHECK_ALIGNED(args->temperature_rows, 4);
    EPMOEI_CHECK_ALIGNED(args->top_k_rows, 4);
    EPMOEI_CHECK_ALIGNED(args->top_p_rows, 4);
    EPMOEI_CHECK_ALIGNED(args->min_p_rows, 4);
    EPMOEI_CHECK_ALIGNED(args->tokens, 4);
    switch (args->logits_dtype) {
    case EPMOE_BF16: return launch<__nv_bfloat16>(args, stream);
    case EPMOE_F16: return launch<__half>(args, stream);
    default: return launch<float>(args, stream);
    }
}
