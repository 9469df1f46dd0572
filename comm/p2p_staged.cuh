/* Staged rows: what few tokens are sent as. A word of 8 bytes carries 4 bytes of a row and the epoch, so that a row
 * takes one way over the links and is there when its words are: it waits for no header, and no flag follows it. The
 * receiver, who knows from the headers where it belongs, brings it there.
 *
 * A row is pieces of 16 bytes, those of x (in FP8 codes, then scales), then for each of its slots a word with the id
 * and one with the weight. A warp's 32 pieces are two runs of 512 bytes: first halves, second halves. */
#ifndef EPMOEI_P2P_STAGED_CUH
#define EPMOEI_P2P_STAGED_CUH

#include "comm/p2p_device.cuh"

static constexpr int32_t kStagedRun = 2 * kP2pWarp;       /* words of 32 halves */
static constexpr int32_t kStagedTurn = 2 * kStagedRun;    /* words of 32 pieces */
static constexpr int kMostStaged = EPMOEI_P2P_STAGED / 2; /* tokens of a rank: there are two ranks at least */

/* The row's words in `window`, the one of the rank that it goes to. */
static __device__ __forceinline__ uint64_t *staged_row(const epmoei_p2p_args_t &args, const epmoei_p2p_window_t &window,
                                                       uint32_t epoch, int32_t source, int32_t index)
{
    const int64_t row = ((int64_t)(epoch % 2) * args.size + source) * args.staged_rows + index;
    return window.staged + row * args.staged_words;
}

static __device__ __forceinline__ int32_t staged_turns(int32_t pieces) { return (pieces + kP2pWarp - 1) / kP2pWarp; }

/* The first word of a piece; its second half lies kStagedRun further. */
static __device__ __forceinline__ int32_t staged_at(int32_t piece)
{
    return piece / kP2pWarp * kStagedTurn + piece % kP2pWarp * 2;
}

static __device__ __forceinline__ uint64_t staged_word(uint32_t epoch, uint32_t value)
{
    return (uint64_t)epoch << 32 | value;
}

static __device__ __forceinline__ void stage_piece(uint64_t *words, uint32_t epoch, uint4 piece)
{
    ptx_store_relaxed_system_2(words, staged_word(epoch, piece.x), staged_word(epoch, piece.y));
    ptx_store_relaxed_system_2(words + kStagedRun, staged_word(epoch, piece.z), staged_word(epoch, piece.w));
}

/* Four words on their way from memory. */
struct staged_piece_t {
    uint64_t word[4];

    __device__ __forceinline__ void load(const uint64_t *words)
    {
        ptx_load_relaxed_system_2(words, &word[0], &word[1]);
        ptx_load_relaxed_system_2(words + kStagedRun, &word[2], &word[3]);
    }
    __device__ __forceinline__ bool is_of(uint32_t epoch) const
    {
        bool is = true;
#pragma unroll
        for (int i = 0; i < 4; i++) is &= (uint32_t)(word[i] >> 32) == epoch;
        return is;
    }
    __device__ __forceinline__ uint4 piece() const
    {
        return make_uint4((uint32_t)word[0], (uint32_t)word[1], (uint32_t)word[2], (uint32_t)word[3]);
    }
};

/* All threads of a block: one row of `source`, the `index`th, to row `row` here; a thread has kAtOnce pieces under way.
 * False when it is not there in time. */
template <int kAtOnce>
static __device__ __forceinline__ bool take_staged_row(const epmoei_p2p_args_t &args, const epmoei_p2p_window_t &own,
                                                       uint32_t epoch, int32_t source, int32_t index, int32_t row,
                                                       int64_t start)
{
    const uint64_t *words = staged_row(args, own, epoch, source, index);
    const int32_t of_x = (int32_t)((args.coded ? args.codes_bytes : args.row_bytes) / 16);
    const int32_t of_scales = args.coded ? (int32_t)(args.scales_stride / 4) : 0;
    /* Scales begin with a turn of their own. */
    const int32_t gap = staged_turns(of_x) * kP2pWarp - of_x, all = of_x + of_scales;
    uint4 *x = reinterpret_cast<uint4 *>(own.x) + (int64_t)row * of_x;
    uint4 *scales = reinterpret_cast<uint4 *>(own.scales) + (int64_t)row * of_scales;
    for (int32_t first = threadIdx.x; first < all; first += kAtOnce * kP2pThreads) {
        staged_piece_t taken[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; i++) {
            const int32_t at = first + i * kP2pThreads;
            if (at < all) taken[i].load(words + staged_at(at < of_x ? at : at + gap));
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; i++) {
            const int32_t at = first + i * kP2pThreads;
            if (at >= all) continue;
            for (int32_t polls = 1; !taken[i].is_of(epoch); polls++) {
                if (polls % kP2pPollsPerLook == 0 && p2p_gives_up(args, start, EPMOEI_P2P_ROWS, source, epoch))
                    return false;
                taken[i].load(words + staged_at(at < of_x ? at : at + gap));
            }
            *(at < of_x ? x + at : scales + (at - of_x)) = taken[i].piece();
        }
    }
    const int32_t slot = threadIdx.x - (kP2pThreads - kP2pWarp); /* the last warp has the fewest pieces */
    if (slot < 0 || slot >= args.top_k) return true;
    const uint64_t *pair = words + args.staged_words - 2 * (args.top_k - slot);
    uint64_t id, weight;
    for (int32_t polls = 1;; polls++) {
        ptx_load_relaxed_system_2(pair, &id, &weight);
        if ((uint32_t)(id >> 32) == epoch && (uint32_t)(weight >> 32) == epoch) break;
        if (polls % kP2pPollsPerLook == 0 && p2p_gives_up(args, start, EPMOEI_P2P_ROWS, source, epoch)) return false;
    }
    own.ids[(int64_t)row * args.top_k + slot] = (int32_t)(uint32_t)id;
    own.weights[(int64_t)row * args.top_k + slot] = __uint_as_float((uint32_t)weight);
    return true;
}

#endif
