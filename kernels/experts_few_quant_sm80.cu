/* The experts of very few tokens on quantised weights; the contract stands at kernels/experts_few.h. Memory bounds
 * these kernels: a warp walks the columns of 16 device rows (kernels/grouped_gemm_quant.h), 128 a stage, whose codes
 * are copied to its own part of shared memory some stages before it uses them, and multiplies them on the tensor cores
 * with the vectors of up to two slots that chose the expert. Little but the widening of the codes is left to do by a
 * stage: its place in shared memory is known when this is compiled, and where its copies come from is a step from the
 * last.
 *
 *   gate_up   a block makes 16 columns of h: two parts of 16 device rows, gate and up of 8 columns each, by four warps
 *             that share the sum over K
 *   down      a block makes 16 columns of y for all tokens: warps share the slots, and where those are few the parts of
 *             a row, and leave their sums in shared memory
 *
 * As in kernels/experts_few_sm80.cu `down` may use ids, router weights and the experts' weights at once: gate_up lets
 * it begin only once what came before gate_up has ended.
 *
 * One file: both kernels are the same walk over a part of a row, in three forms for the kinds of codes. */
#include "kernels/experts_few.h"
#include "kernels/grouped_gemm_quant_cuda.cuh"
#include "kernels/launch_cuda.cuh"

namespace
{

constexpr uint32_t kAll = 0xFFFFFFFFu;
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

/* ------------------------------------------------------------------------------------------------- device helpers */

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

/* ------------------------------------------------------------------------------------------------------- kernels */

/* Slots vary fastest over the grid. Of the slots of one expert, within 32 neighbours, the first one's blocks do the
 * work. */
template <typename T, epmoe_format_t kFormat, int kGroups>
__global__ void __launch_bounds__(kThreads, slot<kFormat, kGroups>::kBlocksPerSm) gate_up_kernel(const few_params_t p)
{
    extern __shared__ __align__(128) char shared[];
    __shared__ float sums[kWarps][16][kMembers];
    epmoei_begin_dependent();
    const epmoe_experts_args_t &args = p.args;
    const int32_t tid = threadIdx.x, lane = tid % 32, warp = tid / 32, part = warp / kSplits, split = warp % kSplits;
    const int32_t own = blockIdx.x % 32, first = (int32_t)blockIdx.x - own;
    const int32_t num_slots = epmoei_device_tokens(args.num_tokens_dev, args.num_tokens) * args.top_k;
    const int32_t id = first + lane < num_slots ? args.ids[first + lane] : -1;
    const bool bad = id < -1 || id >= args.num_experts;
    if (blockIdx.y == 0 && own == 0 && warp == 0) {
        const uint32_t bads = __ballot_sync(kAll, bad);
        if (bads && lane == 0) epmoei_count_bad(p.error_word, __popc(bads));
    }
    const int32_t expert = __shfl_sync(kAll, bad ? -1 : id, own);
    if (expert < 0) return;
    uint32_t members = __ballot_sync(kAll, id == expert);
    if (members & ((1u << own) - 1)) return;

    const int32_t stages = stages_with(args.hidden, 0), split_stages = (stages + kSplits - 1) / kSplits;
    task_t task = {};
    task.expert = expert;
    task.row = ((int32_t)blockIdx.y * kParts + part) * 16;
    task.first_stage = min(split * split_stages, stages);
    task.end_stage = min(task.first_stage + split_stages, stages);
    if (task.row / 2 >= args.intermediate) task.end_stage = task.first_stage;
    while (members) {
        int32_t bits[kMembers];
        task.vectors = take_members(bits, members);
        const int32_t mine = lane / 16, bit = mine ? bits[1] : bits[0];
        task.vector = mine < task.vectors
                          ? (const uint16_t *)args.x + (int64_t)((first + bit) / args.top_k) * args.hidden
                          : nullptr;
        float acc[4];
        multiply<T, kFormat, kGroups>(acc, p, task,
                                      ptx_shared_address(shared) + warp * slot<kFormat, kGroups>::kWarpBytes, false);
        if (lane % 4 == 0)
#pragma unroll
            for (int c = 0; c < 4; c++) sums[warp][lane / 4 + c / 2 * 8][c % 2] = acc[c];
        __syncthreads();
        const int32_t member = tid / kColumns, column = tid % kColumns;
        const int32_t col = (int32_t)blockIdx.y * kColumns + column;
        if (member < task.vectors && col < args.intermediate) {
            const int32_t from = column / 8 * kSplits, row = column % 8;
            float gate = 0.0f, up = 0.0f;
#pragma unroll
            for (int i = 0; i < kSplits; i++) {
                gate += sums[from + i][row][member];
                up += sums[from + i][row + 8][member];
            }
            const int32_t slot = first + (member ? bits[1] : bits[0]);
            if (args.weight_on_input) {
                gate *= args.weights[slot];
                up *= args.weights[slot];
            }
            if (args.gate_up_bias) {
                const float *bias = args.gate_up_bias + (int64_t)expert * 2 * args.intermediate;
                gate += bias[gemm_weight_row(p.weight.gemm, 2 * col)];
                up += bias[gemm_weight_row(p.weight.gemm, 2 * col + 1)];
            }
            ((T *)p.h)[(int64_t)slot * args.intermediate + col] =
                epmoei_from_float<T>(epmoei_activate_device(args.activation, gate, up, args.alpha, args.limit));
        }
        __syncthreads();
    }
}

/* What a block of `down` knows of the slots, and what its warps leave for the end. A group is the slots of one expert
 * within 32 neighbours; the arrays of groups hold those of slots 0..31 from 0 on, of 32..63 from 32 on, and so on. */
struct down_shared_t {
    float sums[kMaxSlots][kColumns]; /* of slot << part_bits | part: of the row's dot product, without the bias */
    float weights[kMaxSlots];
    bool used[kMaxSlots];
    int32_t experts[kMaxSlots]; /* of slots */
    int32_t group_experts[kMaxSlots];
    uint32_t group_members[kMaxSlots]; /* bit i: the i-th of the 32 neighbours */
    int32_t num_groups[kMaxSlots / 32];
};

/* A thread for each slot. */
__device__ __forceinline__ void group_slots(const few_params_t &p, down_shared_t &shared, int32_t num_slots)
{
    const epmoe_experts_args_t &args = p.args;
    const int32_t slot = threadIdx.x, lane = slot % 32;
    if (slot - lane >= kMaxSlots) return;
    int32_t id = slot < num_slots ? args.ids[slot] : -1;
    if (id >= args.num_experts) id = -1;
    const bool used = id >= 0;
    shared.used[slot] = used;
    shared.experts[slot] = id;
    shared.weights[slot] = used && !args.weight_on_input ? args.weights[slot] : 1.0f;
    const uint32_t before = (1u << lane) - 1, members = __match_any_sync(kAll, id);
    const bool leads = used && !(members & before);
    const uint32_t leaders = __ballot_sync(kAll, leads);
    if (leads) {
        const int32_t group = slot - lane + __popc(leaders & before);
        shared.group_experts[group] = id;
        shared.group_members[group] = members;
    }
    if (lane == 0) shared.num_groups[slot / 32] = __popc(leaders);
}

__device__ __forceinline__ float load_as(const void *data, epmoe_dtype_t dtype, int64_t i)
{
    if (dtype == EPMOE_BF16) return epmoei_to_float(((const __nv_bfloat16 *)data)[i]);
    if (dtype == EPMOE_F16) return epmoei_to_float(((const __half *)data)[i]);
    return ((const float *)data)[i];
}

__device__ __forceinline__ void store_as(void *data, epmoe_dtype_t dtype, int64_t i, float value)
{
    if (dtype == EPMOE_BF16)
        ((__nv_bfloat16 *)data)[i] = epmoei_from_float<__nv_bfloat16>(value);
    else if (dtype == EPMOE_F16)
        ((__half *)data)[i] = epmoei_from_float<__half>(value);
    else
        ((float *)data)[i] = value;
}

template <typename T, epmoe_format_t kFormat, int kGroups>
__global__ void __launch_bounds__(kThreads, slot<kFormat, kGroups>::kBlocksPerSm) down_kernel(const few_params_t p)
{
    extern __shared__ __align__(128) char slots[];
    __shared__ down_shared_t shared;
    const epmoe_experts_args_t &args = p.args;
    const int32_t tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const int32_t num_tokens = epmoei_device_tokens(args.num_tokens_dev, args.num_tokens);
    group_slots(p, shared, num_tokens * args.top_k);
    __syncthreads();

    const int32_t stages = stages_with(args.intermediate, 0);
    bool waits = true;
    int32_t index = warp; /* of a part of a group; warps take them in turn */
    for (int32_t first = 0; first < num_tokens * args.top_k; first += 32) {
        const int32_t count = shared.num_groups[first / 32] << p.part_bits;
        for (; index < count; index += kWarps) {
            const int32_t group = first + (index >> p.part_bits), part = index & ((1 << p.part_bits) - 1);
            task_t task = {};
            task.expert = shared.group_experts[group];
            task.row = (int32_t)blockIdx.x * kColumns;
            task.first_stage = min(part * p.part_stages, stages);
            task.end_stage = min(task.first_stage + p.part_stages, stages);
            uint32_t members = shared.group_members[group];
            while (members) {
                int32_t bits[kMembers];
                task.vectors = take_members(bits, members);
                const int32_t mine = lane / 16, bit = mine ? bits[1] : bits[0];
                task.vector =
                    mine < task.vectors ? (const uint16_t *)p.h + (int64_t)(first + bit) * args.intermediate : nullptr;
                float acc[4];
                multiply<T, kFormat, kGroups>(
                    acc, p, task, ptx_shared_address(slots) + warp * slot<kFormat, kGroups>::kWarpBytes, waits);
                waits = false;
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    const int32_t member = lane % 4 * 2 + c % 2;
                    const int32_t to = first + (member ? bits[1] : bits[0]);
                    if (member < task.vectors) shared.sums[to << p.part_bits | part][lane / 4 + c / 2 * 8] = acc[c];
                }
            }
        }
        index -= count;
    }
    if (waits) epmoei_begin_dependent();

    const int32_t token = tid / kColumns, row = tid % kColumns, col = (int32_t)blockIdx.x * kColumns + row;
    const bool finishes = token < num_tokens && col < args.hidden;
    const int64_t at = (int64_t)token * args.hidden + col;
    float addend = 0.0f, residual = 0.0f;
    if (finishes && args.addend) addend = args.addend[at];
    if (finishes && args.residual) residual = load_as(args.residual, args.y_dtype, at);
    __syncthreads();
    if (!finishes) return;
    float sum = 0.0f;
    for (int32_t slot = token * args.top_k; slot < (token + 1) * args.top_k; slot++) {
        if (!shared.used[slot]) continue;
        float value = args.down_bias ? args.down_bias[(int64_t)shared.experts[slot] * args.hidden + col] : 0.0f;
        for (int32_t part = 0; part < 1 << p.part_bits; part++) value += shared.sums[slot << p.part_bits | part][row];
        sum = fmaf(shared.weights[slot], value, sum);
    }
    store_as(args.y, args.y_dtype, at, sum + addend + residual);
}

/* -------------------------------------------------------------------------------------------------------- launch */

/* A product as the grouped GEMM would take it. */
epmoe_grouped_gemm_args_t product_args(const epmoe_experts_args_t *args, bool gated)
{
    epmoe_grouped_gemm_args_t product = EPMOE_GROUPED_GEMM_ARGS_INIT;
    product.num_experts = args->num_experts;
    product.n = gated ? 2 * args->intermediate : args->hidden;
    product.k = gated ? args->hidden : args->intermediate;
    product.x_dtype = product.y_dtype = args->dtype;
    product.weight = gated ? args->gate_up : args->down;
    product.layout = args->layout;
    product.activation = gated ? args->activation : EPMOE_ACTIVATION_NONE;
    return product;
}

template <typename T, epmoe_format_t kFormat, int kGroups>
epmoe_status_t launch(const few_params_t &p, bool gated, epmoe_stream_t stream)
{
    const int bytes = kWarps * slot<kFormat, kGroups>::kWarpBytes;
    auto *kernel = gated ? gate_up_kernel<T, kFormat, kGroups> : down_kernel<T, kFormat, kGroups>;
    EPMOEI_CHECK(epmoei_allow_shared(kernel, (size_t)bytes, "experts_few_quant"));
    const dim3 blocks = gated ? dim3((unsigned)(p.args.num_tokens * p.args.top_k),
                                     (unsigned)epmoei_ceil_div(p.args.intermediate, kColumns))
                              : dim3((unsigned)epmoei_ceil_div(p.args.hidden, kColumns));
    return epmoei_cuda_status((int32_t)epmoei_launch_dependent(kernel, blocks, kThreads, (size_t)bytes, stream, p),
                              gated ? "experts_few_quant_gate_up" : "experts_few_quant_down");
}

template <typename T> epmoe_status_t launch_format(const few_params_t &p, bool gated, epmoe_stream_t stream)
{
    const quant_params_t &w = p.weight;
    switch (gated ? p.args.gate_up.format : p.args.down.format) {
    case EPMOE_FORMAT_FP8_BLOCK: return launch<T, EPMOE_FORMAT_FP8_BLOCK, 1>(p, gated, stream);
    case EPMOE_FORMAT_MXFP4: return launch<T, EPMOE_FORMAT_MXFP4, 4>(p, gated, stream);
    default: break;
    }
    if (w.groups > 1 && w.group == kStageCols / 4) return launch<T, EPMOE_FORMAT_W4, 4>(p, gated, stream);
    if (w.groups > 1 && w.group == kStageCols / 2) return launch<T, EPMOE_FORMAT_W4, 2>(p, gated, stream);
    return launch<T, EPMOE_FORMAT_W4, 1>(p, gated, stream);
}

epmoe_status_t run(const epmoe_experts_args_t *args, const void *h, bool gated, epmoe_stream_t stream)
{
    EPMOEI_CHECK_ALIGNED(args->x, 16);
    EPMOEI_CHECK_ALIGNED(args->y, 16);
    EPMOEI_CHECK_ALIGNED(args->addend, 16);
    EPMOEI_CHECK_ALIGNED(args->residual, 16);
    EPMOEI_CHECK_ALIGNED(args->ids, 4);
    EPMOEI_CHECK_ALIGNED(args->weights, 4);
    EPMOEI_CHECK_ALIGNED(args->gate_up_bias, 4);
    EPMOEI_CHECK_ALIGNED(args->down_bias, 4);
    EPMOEI_CHECK_ALIGNED(args->num_tokens_dev, 4);
    EPMOEI_CHECK_ALIGNED(h, 16);
    few_params_t p = {};
    p.args = *args;
    for (int i = 0; i < 2; i++) {
        epmoe_grouped_gemm_args_t product = product_args(args, i == 0), checked;
        EPMOEI_CHECK(epmoei_grouped_gemm_check(&product, &checked)); /* the weight's defaults */
        epmoe_status_t status = epmoei_grouped_gemm_quant_check_cuda(&checked);
        if (status != EPMOE_OK) return epmoei_fail_context(status, i == 0 ? "gate_up" : "down");
        if (gated != (i == 0)) continue;
        p.weight = quant_params(&checked);
    }
    p.h = (void *)h;
    p.error_word = epmoei_error_word();
    /* One token's slots give every warp of `down` something to do. k alone decides, so that the order of a sum does not
     * depend on the number of tokens. */
    while (args->top_k << p.part_bits < kWarps) p.part_bits++;
    p.part_stages = (int32_t)epmoei_ceil_div(epmoei_ceil_div(args->intermediate, kStageCols), 1 << p.part_bits);
    return args->dtype == EPMOE_BF16 ? launch_format<__nv_bfloat16>(p, gated, stream)
                                     : launch_format<__half>(p, gated, stream);
}

} // namespace

extern "C" epmoe_status_t epmoei_experts_few_quant_gate_up_sm80(const epmoe_experts_args_t *args, void *h,
                                                                epmoe_stream_t stream)
{
    return run(args, h, true, stream);
}

extern "C" epmoe_status_t epmoei_experts_few_quant_down_sm80(const epmoe_experts_args_t *args, const void *h,
                                                             epmoe_stream_t stream)
{
    return run(args, h, false, stream);
}
