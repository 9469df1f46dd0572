/* Rows of x on their way out, in the registers of a team of threads that takes one token at a time: as they are, or in
 * FP8. */
#ifndef EPMOEI_P2P_ROWS_CUH
#define EPMOEI_P2P_ROWS_CUH

#include "comm/p2p_staged.cuh"
#include "kernels/coded_rows_cuda.cuh"

static constexpr int kMaxRanks = EPMOEI_P2P_MAX_RANKS;
static constexpr int kPieces = 4; /* of a row that a thread has under way */

/* What a block knows once the headers are there. */
struct plan_t {
    alignas(16) epmoei_p2p_window_t window[kMaxRanks];
    int32_t counts[kMaxRanks][kMaxRanks]; /* rows by source and destination */
    uint32_t head[kMaxRanks];             /* word 0 of each header */
    int32_t max_rank_tokens[kMaxRanks];   /* the last word */
    int32_t first_row[kMaxRanks];         /* of this rank's rows at each destination */
    int32_t num_rows;                     /* that come here */
};

struct team_t {
    int32_t threads; /* a power of 2, whole warps */
    bool is_least;   /* no team for rows of this length has fewer */

    __device__ __forceinline__ int32_t index() const { return (int32_t)threadIdx.x >> (31 - __clz(threads)); }
    __device__ __forceinline__ int32_t thread() const { return (int32_t)threadIdx.x & (threads - 1); }
};

/* Pieces lie side by side; those of a thread are a team apart. */
template <typename V> struct plain_pieces_t {
    static constexpr bool kStages = sizeof(V) == 16;
    using index_t = int64_t;
    V piece[kPieces];

    static __host__ __device__ __forceinline__ int64_t of_row(const epmoei_p2p_args_t &args)
    {
        return args.row_bytes / (int64_t)sizeof(V);
    }
    static __host__ __device__ __forceinline__ int64_t of_team(team_t team) { return kPieces * team.threads; }
    static int64_t threads_of_row(const epmoei_p2p_args_t &args) { return of_row(args); }
    static int64_t least(const epmoei_p2p_args_t &) { return 128; }

    __device__ __forceinline__ void load(const epmoei_p2p_args_t &args, int64_t token, int64_t first, team_t team)
    {
        const int64_t pieces = of_row(args);
        const V *from = static_cast<const V *>(args.x) + token * pieces;
#pragma unroll
        for (int i = 0; i < kPieces; i++) {
            int64_t at = first + i * team.threads + team.thread();
            if (at < pieces) piece[i] = from[at];
        }
    }

    /* All lanes of a warp come along; `row` of lane r is the one at rank r. */
    __device__ __forceinline__ void store(const epmoei_p2p_args_t &args, const plan_t *plan, uint32_t ranks,
                                          int32_t row, int64_t first, team_t team) const
    {
        const int64_t pieces = of_row(args);
        for (uint32_t left = ranks; left; left &= left - 1) {
            int32_t r = __ffs((int)left) - 1;
            int64_t to = __shfl_sync(kP2pAll, row, r);
            V *dst = reinterpret_cast<V *>(plan->window[r].x) + to * pieces;
#pragma unroll
            for (int i = 0; i < kPieces; i++) {
                int64_t at = first + i * team.threads + team.thread();
                if (at < pieces) dst[at] = piece[i];
            }
        }
    }

    /* A whole row, to each of `ranks`; bit r of `index` is which of this rank's rows there it is. */
    __device__ __forceinline__ void stage(const epmoei_p2p_args_t &args, const plan_t *plan, uint32_t ranks,
                                          uint32_t index, uint32_t epoch, team_t team) const
    {
        const int32_t pieces = (int32_t)of_row(args);
        for (uint32_t left = ranks; left; left &= left - 1) {
            const int32_t r = __ffs((int)left) - 1;
            uint64_t *words = staged_row(args, plan->window[r], epoch, args.rank, index >> r & 1);
#pragma unroll
            for (int i = 0; i < kPieces; i++) {
                const int32_t at = i * team.threads + team.thread();
                if (at < pieces) stage_piece(words + staged_at(at), epoch, piece[i]);
            }
        }
    }
};

/* A piece is what a warp codes at once: 512 columns, which four scales belong to. Those of a warp of the least team lie
 * side by side, so that its scales are one store of 32 bytes; larger teams spread a row over as many warps as it has
 * pieces. */
template <typename T, bool kAligned> struct coded_pieces_t {
    static constexpr int kMost = sizeof(T) == 2 && kAligned ? 2 : 1; /* of a warp at once: as registers allow */
    static constexpr int kColumns = kP2pWarp * kCodedRun;
    static constexpr int kScales = kColumns / EPMOEI_FP8_COLUMNS;
    static_assert(kMost * kScales <= kP2pWarp, "a lane for each scale");
    static constexpr bool kStages = true;
    using index_t = uint32_t;
    uint4 codes[kMost];
    float scale[kMost];

    static __host__ __device__ __forceinline__ uint32_t of_row(const epmoei_p2p_args_t &args)
    {
        return ((uint32_t)args.hidden + kColumns - 1) / kColumns;
    }
    static __host__ __device__ __forceinline__ uint32_t of_team(team_t team)
    {
        return kMost * (team.threads / kP2pWarp);
    }
    static int64_t threads_of_row(const epmoei_p2p_args_t &args) { return (int64_t)of_row(args) * kP2pWarp; }
    static int64_t least(const epmoei_p2p_args_t &args)
    {
        int64_t threads = kP2pWarp;
        while (threads < 256 && threads / kP2pWarp * kMost < of_row(args)) threads *= 2;
        return threads;
    }

    /* This lane's columns of the pieces from `first` on: at, at + apart, ... */
    struct columns_t {
        uint32_t at, apart;
    };
    static __device__ __forceinline__ columns_t columns(uint32_t first, team_t team)
    {
        const uint32_t thread = (uint32_t)team.thread(), warp = thread / kP2pWarp;
        const uint32_t piece = first + (team.is_least ? warp * kMost : warp);
        return {piece * kColumns + thread % kP2pWarp * kCodedRun,
                team.is_least ? kColumns : (uint32_t)team.threads / kP2pWarp * kColumns};
    }

    __device__ __forceinline__ void load(const epmoei_p2p_args_t &args, int64_t token, uint32_t first, team_t team)
    {
        const T *from = static_cast<const T *>(args.x) + token * args.hidden;
        const columns_t mine = columns(first, team);
        coded_run_t<T, kCodedRun> run[kMost];
#pragma unroll
        for (int i = 0; i < kMost; i++) coded_load<kAligned>(&run[i], from, mine.at + i * mine.apart, args.hidden);
#pragma unroll
        for (int i = 0; i < kMost; i++) scale[i] = coded_encode(run[i], kP2pAll, &codes[i]);
    }

    /* Lane s has scale s % kScales of piece s / kScales: its first column. */
    static __device__ __forceinline__ uint32_t column_of_scale(columns_t mine)
    {
        const int32_t lane = threadIdx.x % kP2pWarp;
        return mine.at - lane * kCodedRun + lane / kScales * mine.apart + lane % kScales * EPMOEI_FP8_COLUMNS;
    }
    __device__ __forceinline__ float scale_of_lane() const
    {
        const int32_t lane = threadIdx.x % kP2pWarp;
        float of_lane = 0.0f;
#pragma unroll
        for (int i = 0; i < kMost; i++) {
            const float one = __shfl_sync(kP2pAll, scale[i], lane % kScales * kCodedLanes);
            if (lane / kScales == i) of_lane = one;
        }
        return of_lane;
    }

    __device__ __forceinline__ void store(const epmoei_p2p_args_t &args, const plan_t *plan, uint32_t ranks,
                                          int32_t row, uint32_t first, team_t team) const
    {
        const int32_t lane = threadIdx.x % kP2pWarp;
        const columns_t mine = columns(first, team);
        const uint32_t of_scale = column_of_scale(mine);
        const bool has_scale = lane < kMost * kScales && of_scale < (uint32_t)args.hidden;
        const float of_lane = scale_of_lane();
        for (uint32_t left = ranks; left; left &= left - 1) {
            const int32_t r = __ffs((int)left) - 1;
            const int64_t to = __shfl_sync(kP2pAll, row, r);
            if (r == args.rank && !args.keeps) {
                keep(args, to, mine);
                continue;
            }
            uint8_t *dst = reinterpret_cast<uint8_t *>(plan->window[r].x) + to * args.codes_bytes;
#pragma unroll
            for (int i = 0; i < kMost; i++) {
                const uint32_t column = mine.at + i * mine.apart;
                if (column < (uint32_t)args.hidden) *reinterpret_cast<uint4 *>(dst + column) = codes[i];
            }
            if (has_scale) plan->window[r].scales[to * args.scales_stride + of_scale / EPMOEI_FP8_COLUMNS] = of_lane;
        }
    }

    /* As that of plain_pieces_t. The receiver takes whole pieces of scales too: those past the row are there, and 0. */
    __device__ __forceinline__ void stage(const epmoei_p2p_args_t &args, const plan_t *plan, uint32_t ranks,
                                          uint32_t index, uint32_t epoch, team_t team) const
    {
        const int32_t lane = threadIdx.x % kP2pWarp;
        const columns_t mine = columns(0, team);
        const uint32_t of_scale = column_of_scale(mine), block = of_scale / EPMOEI_FP8_COLUMNS;
        const bool has_scale = lane < kMost * kScales && block < (uint32_t)args.scales_stride;
        const float one = scale_of_lane(), of_lane = of_scale < (uint32_t)args.hidden ? one : 0.0f;
        const int32_t scales_at = staged_turns((int32_t)(args.codes_bytes / 16)) * kStagedTurn + staged_at(block / 4) +
                                  (int32_t)(block % 4 / 2 * kStagedRun + block % 2);
        for (uint32_t left = ranks; left; left &= left - 1) {
            const int32_t r = __ffs((int)left) - 1;
            uint64_t *words = staged_row(args, plan->window[r], epoch, args.rank, index >> r & 1);
#pragma unroll
            for (int i = 0; i < kMost; i++) {
                const uint32_t column = mine.at + i * mine.apart;
                if (column < (uint32_t)args.hidden)
                    stage_piece(words + staged_at((int32_t)column / kCodedRun), epoch, codes[i]);
            }
            if (has_scale) ptx_store_relaxed_system(words + scales_at, staged_word(epoch, __float_as_uint(of_lane)));
        }
    }

    /* The own rank's row, decoded. */
    __device__ __forceinline__ void keep(const epmoei_p2p_args_t &args, int64_t to, columns_t mine) const
    {
        T *dst = static_cast<T *>(args.own_x) + to * args.hidden;
#pragma unroll
        for (int i = 0; i < kMost; i++) {
            const uint32_t words[4] = {codes[i].x, codes[i].y, codes[i].z, codes[i].w};
            coded_store<kAligned>(dst, mine.at + i * mine.apart, args.hidden, words, scale[i]);
        }
    }
};

#endif
