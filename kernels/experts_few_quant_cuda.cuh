/* What the kernels of kernels/experts_few_quant_sm80.cu share: the walk of a warp over the columns of 16 device rows of
 * one expert, in three forms for the kinds of codes. */
#ifndef EPMOEI_EXPERTS_FEW_QUANT_CUDA_CUH
#define EPMOEI_EXPERTS_FEW_QUANT_CUDA_CUH

#include "kernels/experts_few_cuda.cuh"
#include "kernels/grouped_gemm_quant_cuda.cuh"
#include "kernels/launch_cuda.cuh"

namespace
{

constexpr int kWarps = 8, kThreads = kWarps * 32;
constexpr int kMembers = 2; /* vectors that a warp multiplies with */
constexpr int kParts = 2;   /* gate_up: of 16 device rows */
constexpr int kSplits = kWarps / kParts;
constexpr int kColumns = 16; /* of h or y that a block makes */
constexpr int kHalves = 2;   /* of a stage, 64 columns each */
constexpr int kStageCols = kHalves * EPMOEI_TILE_COLS;
constexpr int kSteps = EPMOEI_TILE_COLS / 16; /* of half a stage */
constexpr int kMaxSlots = EPMOEI_EXPERTS_FEW_QUANT_MOST_TOKENS * EPMOE_MAX_TOP_K;
static_assert(kMaxSlots <= kThreads, "a thread of down for each slot");
static_assert(kMembers * kStageCols * 2 == 32 * 16, "a lane copies one piece of the vectors");

struct few_params_t {
    epmoe_experts_args_t args;
    quant_params_t weight; /* gate_up or down */
    void *h;               /* [T*k,f] */
    int32_t *error_word;   /* gate_up */
    int32_t part_bits;     /* down: a row has 1 << part_bits parts, each of part_stages stages */
    int32_t part_stages;
};

/* A warp's shared memory: kSlots stages. In bytes: codes, vectors, scales and zeros of W4 and MXFP4. kGroups: of a
 * stage, whose scales each have a row of their own; 1 where groups are whole stages. */
template <epmoe_format_t kFormat, int kGroups> struct slot {
    static constexpr bool kTiled = kFormat != EPMOE_FORMAT_FP8_BLOCK;
    static constexpr int kSlots = 4;
    static constexpr int kCodes = kTiled ? 1024 : 2048;
    static constexpr int kVectors = kMembers * kStageCols * 2;
    static constexpr int kScales = !kTiled ? 0 : kFormat == EPMOE_FORMAT_MXFP4 ? kGroups * 16 : kGroups * 64;
    static constexpr int kZeros = kFormat == EPMOE_FORMAT_W4 ? kGroups * 16 : 0;
    static constexpr int kBytes = kCodes + kVectors + kScales + kZeros;
    static constexpr int kWarpBytes = kSlots * kBytes;
    /* Blocks of an SM: what registers hold. A stage of FP8 is more bytes for as much work: fewer warps will do. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
    static constexpr int kBlocksPerSm = 2;
#else
    static constexpr int kBlocksPerSm = kTiled && kGroups == 1 ? 3 : 2;
#endif
};

/* Of the vectors in a slot: neither of the two rows' chunks of 16 bytes shares banks with the other's. */
__device__ __forceinline__ uint32_t swizzle(int row, int chunk)
{
    return (uint32_t)(row * kStageCols * 2 + ((chunk ^ row) << 4));
}

/* Removes up to kMembers of `members` and leaves their bits' numbers; returns how many. */
__device__ __forceinline__ int32_t take_members(int32_t (&bits)[kMembers], uint32_t &members)
{
    int32_t count = 0;
#pragma unroll
    for (int m = 0; m < kMembers; m++) {
        bits[m] = members ? __ffs((int)members) - 1 : bits[0];
        if (members) count++;
        members &= members - 1;
    }
    return count;
}

/* What a warp multiplies: 16 device rows of one expert in some stages, with one or two vectors. */
struct task_t {
    int32_t expert;
    int32_t row; /* first device row */
    int32_t first_stage;
    int32_t end_stage;
    int32_t vectors;        /* 1..kMembers */
    const uint16_t *vector; /* that lanes 16m..16m+15 copy: of member m; NULL = none */
};

/* Where a lane's next copies come from. Of what ends: the stage from which on zeros take its place. */
struct walk_t {
    const char *codes[2]; /* FP8: of rows lane/4 and lane/4 + 8 */
    int32_t ends[2];      /* W4, MXFP4: [1] of the second half; FP8: of the halves, less those of rows that are none */
    const char *vector;   /* NULL = none */
    int32_t vector_end;
    /* W4, MXFP4: of the lanes that copy 16 bytes of scales or of zeros. */
    const char *meta;
    uint32_t meta_to; /* within a slot */
    bool has_meta;
    int32_t meta_end;
    int32_t meta_step;    /* bytes, */
    int32_t meta_stages;  /* after so many stages */
    int32_t meta_left;    /* until then */
    int64_t scales_at[2]; /* FP8: of the group after the one in hand */
    bool rows[2];         /* FP8 */
};

/* The stages of k columns that a piece of them from `first` on is in. */
__device__ __forceinline__ int32_t stages_with(int32_t k, int32_t first)
{
    return (k - first + kStageCols - 1) / kStageCols;
}

template <epmoe_format_t kFormat, int kGroups>
__device__ __forceinline__ walk_t begin_walk(const few_params_t &p, const task_t &task)
{
    using Slot = slot<kFormat, kGroups>;
    const quant_params_t &w = p.weight;
    const int32_t lane = threadIdx.x % 32, first = task.first_stage, k = w.gemm.k;
    walk_t walk = {};
    walk.vector = (const char *)task.vector;
    if (walk.vector) walk.vector += (first * kStageCols + lane % 16 * 8) * 2;
    walk.vector_end = stages_with(k, lane % 16 * 8);
    walk.meta_stages = w.groups == 1 ? INT32_MAX : kGroups > 1 ? 1 : w.group / kStageCols;
    walk.meta_left = walk.meta_stages - first % walk.meta_stages;
    const int32_t group = first / walk.meta_stages;
    if (!Slot::kTiled) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int32_t row = task.row + h * 8 + lane / 4, at = quant_fp8_row(w.gemm, row);
            walk.rows[h] = at < w.gemm.n;
            walk.codes[h] = (const char *)w.gemm.w;
            if (walk.rows[h]) walk.codes[h] += ((int64_t)task.expert * w.gemm.n + at) * k;
            walk.codes[h] += lane % 4 * 16 + (int64_t)first * kStageCols;
            walk.ends[h] = stages_with(k, h * EPMOEI_TILE_COLS + lane % 4 * 16);
            walk.scales_at[h] = quant_fp8_scales(w, task.expert, row) + group;
        }
        return walk;
    }
    const int64_t tile = (int64_t)task.expert * w.tiles + task.row / EPMOEI_TILE_ROWS;
    const int32_t part = task.row % EPMOEI_TILE_ROWS / 16;
    const int64_t blocks = (k + EPMOEI_TILE_COLS - 1) / EPMOEI_TILE_COLS;
    walk.codes[0] =
        (const char *)w.gemm.w + (tile * blocks + first * kHalves) * EPMOEI_TILE_BYTES + part * 512 + lane * 16;
    walk.ends[1] = stages_with(k, EPMOEI_TILE_COLS);
    /* 16 rows' scales of a group are scale_bytes pieces of 16 bytes, their zeros one; the next group's lie 64 rows
     * further. */
    const bool zeros = lane >= 16;
    const int32_t bytes = zeros ? 1 : w.scale_bytes, piece = lane % 16 % bytes, own = lane % 16 / bytes;
    walk.has_meta = own < kGroups && (!zeros || (Slot::kZeros && w.zeros));
    walk.meta_to = Slot::kCodes + Slot::kVectors + (zeros ? Slot::kScales : 0) + lane % 16 * 16;
    walk.meta_step = kGroups * EPMOEI_TILE_ROWS * bytes;
    walk.meta_end = kGroups > 1 ? (w.groups - own + kGroups - 1) / kGroups : INT32_MAX;
    walk.meta = (zeros ? (const char *)w.zeros : (const char *)w.scales) +
                ((tile * w.groups + (int64_t)group * kGroups + own) * EPMOEI_TILE_ROWS + part * 16) * bytes +
                piece * 16;
    return walk;
}

/* Codes, scales and zeros of the next stage, which is number `stage`, into the slot at `to`. */
template <epmoe_format_t kFormat, int kGroups>
__device__ __forceinline__ void copy_weights(walk_t &walk, uint32_t to, int32_t stage)
{
    const int32_t lane = threadIdx.x % 32;
    if (!slot<kFormat, kGroups>::kTiled) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int half = 0; half < kHalves; half++)
                ptx_cp_async_16(to + half * 1024 + h * 512 + lane * 16, walk.codes[h] + half * EPMOEI_TILE_COLS,
                                walk.rows[h] && stage < walk.ends[half] ? 16 : 0);
            walk.codes[h] += kStageCols;
        }
        return;
    }
    ptx_cp_async_16(to + lane * 16, walk.codes[0], 16);
    ptx_cp_async_16(to + 512 + lane * 16, walk.codes[0] + EPMOEI_TILE_BYTES, stage < walk.ends[1] ? 16 : 0);
    walk.codes[0] += kHalves * EPMOEI_TILE_BYTES;
    if (walk.has_meta) ptx_cp_async_16(to + walk.meta_to, walk.meta, stage < walk.meta_end ? 16 : 0);
    if (kGroups > 1) {
        walk.meta += walk.meta_step;
    } else if (--walk.meta_left == 0) {
        walk.meta += walk.meta_step;
        walk.meta_left = walk.meta_stages;
    }
}

/* A lane's eight columns of one vector. */
template <epmoe_format_t kFormat, int kGroups>
__device__ __forceinline__ void copy_vectors(walk_t &walk, uint32_t to, int32_t stage)
{
    const int32_t lane = threadIdx.x % 32;
    if (!walk.vector) return;
    ptx_cp_async_ca_16(to + slot<kFormat, kGroups>::kCodes + swizzle(lane / 16, lane % 16), walk.vector,
                       stage < walk.vector_end ? 16 : 0);
    walk.vector += kStageCols * 2;
}

/* Scales of rows lane/4 and lane/4 + 8 from 16 rows' in shared memory. */
template <epmoe_format_t kFormat>
__device__ __forceinline__ float2 load_scales(const quant_params_t &w, uint32_t scales)
{
    const uint32_t pair = threadIdx.x % 32 / 4;
    if (kFormat != EPMOE_FORMAT_MXFP4 && w.scale_bytes == 2) {
        const uint32_t bits = ptx_load_shared_4(scales + pair * 4);
        if (w.scales_dtype == EPMOE_BF16)
            return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xFFFF0000u));
        return __half22float2(*(const __half2 *)&bits);
    }
    if (kFormat != EPMOE_FORMAT_MXFP4 && w.scale_bytes == 4) {
        return make_float2(__uint_as_float(ptx_load_shared_4(scales + pair * 8)),
                           __uint_as_float(ptx_load_shared_4(scales + pair * 8 + 4)));
    }
    const uint32_t bits = ptx_load_shared_2(scales + pair * 2);
    return make_float2(quant_scale(bits & 255, EPMOE_F8_E8M0), quant_scale(bits >> 8, EPMOE_F8_E8M0));
}

/* What a lane reads of any slot: where in it. */
struct places_t {
    uint32_t codes;
    uint32_t vectors[2]; /* of the first half's first 16 bytes; FP8: of both 16 bytes of a quarter */
};

template <epmoe_format_t kFormat, int kGroups>
__device__ __forceinline__ places_t find_places(uint32_t base, int32_t vectors)
{
    using Slot = slot<kFormat, kGroups>;
    const int32_t lane = threadIdx.x % 32;
    /* Columns of operand B that are nobody's repeat the first vector. */
    const int32_t column = Slot::kTiled ? lane % 8 : lane / 4, row = column < vectors ? column : 0;
    places_t places;
    places.codes = base + lane * 16;
    if (Slot::kTiled)
        places.vectors[0] = places.vectors[1] = base + Slot::kCodes + swizzle(row, lane / 8);
    else
        for (int i = 0; i < 2; i++) places.vectors[i] = base + Slot::kCodes + swizzle(row, lane % 4 * 2 + i);
    return places;
}

/* acc += one stage, in the slot `at` bytes behind the first; acc as m16n8k16 has it, columns 0 and 1 the vectors. FP8:
 * scales of rows lane/4 and lane/4 + 8. */
template <typename T, epmoe_format_t kFormat, int kGroups>
__device__ __forceinline__ void multiply_stage(float (&acc)[4], const quant_params_t &w, const places_t &places,
                                               uint32_t base, uint32_t at, const float (&scales)[2], uint32_t (&nan)[2])
{
    using Slot = slot<kFormat, kGroups>;
    constexpr int kGroupSteps = kHalves * kSteps / kGroups;
    const uint32_t meta = base + at + Slot::kCodes + Slot::kVectors;
    float part[4] = {};
    uint32_t zeros[2] = {quant_w4_zero<T>(8), quant_w4_zero<T>(8)};
#pragma unroll
    for (int half = 0; half < kHalves; half++) {
        uint32_t b[kSteps][2];
        uint32_t words[2][4];
        if (Slot::kTiled) {
            ptx_load_shared_16(words[0], places.codes + at + half * 512);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint32_t r[4];
                ptx_ldmatrix_x4(r, places.vectors[0] + at + half * 128 + i * 64);
                b[2 * i][0] = r[0], b[2 * i][1] = r[1], b[2 * i + 1][0] = r[2], b[2 * i + 1][1] = r[3];
            }
        } else {
            /* As in the grouped GEMM a word of codes is one lane's: here columns 16 (lane%4) + 4 s to + 3 of step s. */
#pragma unroll
            for (int h = 0; h < 2; h++) ptx_load_shared_16(words[h], places.codes + at + half * 1024 + h * 512);
            uint32_t x[2][4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                ptx_load_shared_16(x[i], places.vectors[i] + at + half * 128);
                b[2 * i][0] = x[i][0], b[2 * i][1] = x[i][1], b[2 * i + 1][0] = x[i][2], b[2 * i + 1][1] = x[i][3];
            }
        }
#pragma unroll
        for (int s = 0; s < kSteps; s++) {
            const int step = half * kSteps + s, group = step / kGroupSteps;
            uint32_t a[4];
            if (kFormat == EPMOE_FORMAT_W4) {
                if (w.zeros && step % kGroupSteps == 0) {
                    const uint32_t pair =
                        ptx_load_shared_2(meta + Slot::kScales + group * 16 + threadIdx.x % 32 / 4 * 2);
                    zeros[0] = quant_w4_zero<T>(pair & 255);
                    zeros[1] = quant_w4_zero<T>(pair >> 8);
                }
                quant_w4_fragment<T>(a, words[0][s], zeros);
            } else if (kFormat == EPMOE_FORMAT_MXFP4) {
                quant_mxfp4_fragment<T>(a, words[0][s]);
            } else {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const uint32_t codes = words[h][s];
                    uint32_t pairs[2];
                    quant_e4m3_pairs<T>(pairs, __byte_perm(codes, 0, 0x3120));
                    a[h] = pairs[0];
                    a[h + 2] = pairs[1];
                    nan[h] |= quant_e4m3_nan(codes);
                }
            }
            ptx_mma_16816(part, a, b[s][0], b[s][1], T());
            if ((step + 1) % kGroupSteps) continue;
            const float2 scale = Slot::kTiled ? load_scales<kFormat>(w, meta + group * 16 * w.scale_bytes)
                                              : make_float2(scales[0], scales[1]);
#pragma unroll
            for (int c = 0; c < 4; c++) {
                acc[c] = fmaf(c < 2 ? scale.x : scale.y, part[c], acc[c]);
                part[c] = 0.0f;
            }
        }
    }
}

/* acc = the task's sums. `base` is this warp's shared memory. `waits`: what the vectors hold may still be on its way,
 * and this is the first to read them. */
template <typename T, epmoe_format_t kFormat, int kGroups>
__device__ __forceinline__ void multiply(float (&acc)[4], const few_params_t &p, const task_t &task, uint32_t base,
                                         bool waits)
{
    using Slot = slot<kFormat, kGroups>;
    constexpr int kSlots = Slot::kSlots;
    const quant_params_t &w = p.weight;
    walk_t walk = begin_walk<kFormat, kGroups>(p, task);
    __syncwarp(); /* the slots are free */
#pragma unroll
    for (int i = 0; i < kSlots - 1; i++)
        if (task.first_stage + i < task.end_stage)
            copy_weights<kFormat, kGroups>(walk, base + i * Slot::kBytes, task.first_stage + i);
    if (waits) epmoei_begin_dependent();
#pragma unroll
    for (int i = 0; i < kSlots - 1; i++) {
        if (task.first_stage + i < task.end_stage)
            copy_vectors<kFormat, kGroups>(walk, base + i * Slot::kBytes, task.first_stage + i);
        ptx_cp_async_commit();
    }
#pragma unroll
    for (int c = 0; c < 4; c++) acc[c] = 0.0f;
    float scales[2] = {}, next_scales[2] = {};
    uint32_t nan[2] = {};
    int32_t left = walk.meta_left; /* FP8: stages until the next group */
    if (!Slot::kTiled)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            scales[h] = quant_load_scale(w, walk.scales_at[h]++);
            if (task.end_stage - task.first_stage > left) next_scales[h] = quant_load_scale(w, walk.scales_at[h]);
        }
    const places_t places = find_places<kFormat, kGroups>(base, task.vectors);
    for (int32_t stage = task.first_stage; stage < task.end_stage;) {
#pragma unroll
        for (int s = 0; s < kSlots; s++) {
            if (stage >= task.end_stage) break;
            ptx_cp_async_wait<kSlots - 2>();
            __syncwarp();
            if (stage + kSlots - 1 < task.end_stage) {
                const uint32_t to = base + (s + kSlots - 1) % kSlots * Slot::kBytes;
                copy_weights<kFormat, kGroups>(walk, to, stage + kSlots - 1);
                copy_vectors<kFormat, kGroups>(walk, to, stage + kSlots - 1);
            }
            ptx_cp_async_commit();
            multiply_stage<T, kFormat, kGroups>(acc, w, places, base, s * Slot::kBytes, scales, nan);
            stage++;
            if (Slot::kTiled || --left > 0) continue;
            left = walk.meta_stages;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                scales[h] = next_scales[h];
                walk.scales_at[h]++;
                if (task.end_stage - stage > left) next_scales[h] = quant_load_scale(w, walk.scales_at[h]);
            }
        }
    }
    ptx_cp_async_wait<0>();
    if (!Slot::kTiled)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            nan[h] |= __shfl_xor_sync(kAll, nan[h], 1);
            nan[h] |= __shfl_xor_sync(kAll, nan[h], 2);
            if (nan[h]) acc[2 * h] = acc[2 * h + 1] = __uint_as_float(0x7FC00000u);
        }
}

} // namespace

#endif
