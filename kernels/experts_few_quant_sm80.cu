/* The experts of very few tokens on quantised weights; the contract stands at kernels/experts_few.h. Memory bounds
 * these kernels: a warp walks the blocks of 64 columns of 16 device rows (kernels/grouped_gemm_quant.h), whose codes
 * are copied to its own part of shared memory kAhead blocks before it uses them, and multiplies them on the tensor
 * cores with the vectors of up to four tokens that chose the expert. One load of 16 bytes a lane is a block's codes
 * (FP8: two).
 *
 *   gate_up   a block makes 16 columns of h: two parts of 16 device rows, gate and up of 8 columns each, by four warps
 *             that share the sum over K
 *   down      a block makes 16 columns of y for all tokens: warps share the slots, and where those are few the parts of
 *             a row, and leave their sums in shared memory
 *
 * As in kernels/experts_few_sm80.cu `down` may use ids, router weights and the experts' weights at once: gate_up lets
 * it begin only once what came before gate_up has ended. */
#include "kernels/experts_few.h"
#include "kernels/grouped_gemm_quant_cuda.cuh"
#include "kernels/launch_cuda.cuh"

namespace
{

constexpr uint32_t kAll = 0xFFFFFFFFu;
constexpr int kWarps = 8, kThreads = kWarps * 32;
constexpr int kMembers = 4; /* vectors that a warp multiplies with */
constexpr int kParts = 2;   /* gate_up: of 16 device rows */
constexpr int kSplits = kWarps / kParts;
constexpr int kColumns = 16; /* of h or y that a block makes */
constexpr int kSteps = EPMOEI_TILE_COLS / 16;
constexpr int kMaxSlots = EPMOEI_EXPERTS_FEW_QUANT_MOST_TOKENS * EPMOE_MAX_TOP_K;
static_assert(kMaxSlots <= kThreads, "a thread of down for each slot");

struct few_params_t {
    epmoe_experts_args_t args;
    quant_params_t weight; /* gate_up or down */
    void *h;               /* [T*k,f] */
    const int32_t *order;  /* [E,K] or NULL */
    int32_t *error_word;   /* gate_up */
    int32_t part_bits;     /* down: a row has 1 << part_bits parts, each of part_blocks blocks of 64 columns */
    int32_t part_blocks;
};

/* A warp's shared memory: kAhead + 1 slots, each with what one block needs. In bytes: codes, vectors, scales and zeros
 * of W4 and MXFP4. */
template <epmoe_format_t kFormat> struct slot {
    static constexpr bool kTiled = kFormat != EPMOE_FORMAT_FP8_BLOCK;
    static constexpr int kAhead = kTiled ? 5 : 6;
    static constexpr int kCodes = kTiled ? 512 : 1024;
    static constexpr int kVectors = kMembers * EPMOEI_TILE_COLS * 2;
    static constexpr int kScales = kTiled ? EPMOEI_EXPERTS_FEW_QUANT_SCALES * 16 : 0;
    static constexpr int kZeros = kFormat == EPMOE_FORMAT_W4 ? 64 : 0;
    static constexpr int kBytes = kCodes + kVectors + kScales + kZeros;
    static constexpr int kWarpBytes = (kAhead + 1) * kBytes;
    /* Blocks of an SM: what registers and shared memory hold. A block of columns of FP8 is more bytes for as much work:
     * fewer warps will do. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
    static constexpr int kBlocksPerSm = 2;
#else
    static constexpr int kBlocksPerSm = kTiled ? 3 : 2;
#endif
};

/* ------------------------------------------------------------------------------------------------- device helpers */

/* Of a row of vectors in a slot: no two of the four rows' chunks share banks, nor their pairs of chunks. */
__device__ __forceinline__ uint32_t swizzle(int row, int chunk)
{
    return (uint32_t)(row * EPMOEI_TILE_COLS * 2 + ((chunk ^ row) << 4));
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

/* bits[m] without an index into registers. */
__device__ __forceinline__ int32_t pick(const int32_t (&bits)[kMembers], int32_t m)
{
    static_assert(kMembers == 4, "one selection more a member");
    return m == 0 ? bits[0] : m == 1 ? bits[1] : m == 2 ? bits[2] : bits[3];
}

/* What a warp multiplies: 16 device rows of one expert from a block of columns on, with some vectors. */
struct task_t {
    int32_t expert;
    int32_t row;         /* first device row */
    int32_t first_block; /* of 64 columns */
    int32_t end_block;
    int32_t vectors;        /* 1..kMembers */
    const uint16_t *vector; /* that lanes 8m..8m+7 copy: of member m; NULL = none */
};

template <typename T, epmoe_format_t kFormat> struct walk_t {
    const char *codes[2]; /* of this lane, in block 0 of the columns; FP8: of rows lane/4 and lane/4 + 8 */
    const char *scales;   /* W4, MXFP4: of the 16 rows, in group 0 */
    const char *zeros;
    const int32_t *order;
    int32_t scale_rows[2]; /* FP8: within the expert's */
    bool valid[2];
};

template <typename T, epmoe_format_t kFormat>
__device__ __forceinline__ walk_t<T, kFormat> begin_walk(const few_params_t &p, const task_t &task)
{
    const quant_params_t &w = p.weight;
    const int32_t lane = threadIdx.x % 32;
    walk_t<T, kFormat> walk = {};
    walk.order = p.order ? p.order + (int64_t)task.expert * w.gemm.k : nullptr;
    if (slot<kFormat>::kTiled) {
        const int64_t tile = (int64_t)task.expert * w.tiles + task.row / EPMOEI_TILE_ROWS;
        const int32_t part = task.row % EPMOEI_TILE_ROWS / 16;
        const int64_t blocks = (w.gemm.k + EPMOEI_TILE_COLS - 1) / EPMOEI_TILE_COLS;
        walk.codes[0] = (const char *)w.gemm.w + tile * blocks * EPMOEI_TILE_BYTES + part * 512 + lane * 16;
        walk.scales = (const char *)w.scales + (tile * w.groups * EPMOEI_TILE_ROWS + part * 16) * w.scale_bytes;
        if (w.zeros) walk.zeros = (const char *)w.zeros + tile * w.groups * EPMOEI_TILE_ROWS + part * 16;
    } else {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int32_t row = task.row + h * 8 + lane / 4, at = quant_fp8_row(w.gemm, row);
            walk.valid[h] = at < w.gemm.n;
            walk.codes[h] = (const char *)w.gemm.w +
                            (walk.valid[h] ? ((int64_t)task.expert * w.gemm.n + at) * w.gemm.k : 0) + lane % 4 * 16;
            walk.scale_rows[h] = (int32_t)quant_fp8_scales(w, 0, row);
        }
    }
    return walk;
}

/* Codes, scales and zeros of one block into a slot. */
template <typename T, epmoe_format_t kFormat>
__device__ __forceinline__ void copy_weights(const few_params_t &p, const walk_t<T, kFormat> &walk, uint32_t to,
                                             int32_t block)
{
    using Slot = slot<kFormat>;
    const quant_params_t &w = p.weight;
    const int32_t lane = threadIdx.x % 32;
    if (!Slot::kTiled) {
        const bool there = block * EPMOEI_TILE_COLS + lane % 4 * 16 < w.gemm.k;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const bool valid = there && walk.valid[h];
            ptx_cp_async_16(to + (h * 32 + lane) * 16, walk.codes[h] + (valid ? (int64_t)block * EPMOEI_TILE_COLS : 0),
                            valid ? 16 : 0);
        }
        return;
    }
    ptx_cp_async_16(to + lane * 16, walk.codes[0] + (int64_t)block * EPMOEI_TILE_BYTES, 16);
    const int32_t in_block = kSteps >> w.group_shift;
    const int32_t first = in_block > 1 ? block * in_block : block * EPMOEI_TILE_COLS / w.group;
    /* 16 rows' scales of a group are scale_bytes pieces of 16 bytes, the next group's lie 64 rows further. */
    if (lane < in_block * w.scale_bytes) {
        const int32_t group = lane / w.scale_bytes, piece = lane - group * w.scale_bytes;
        const bool valid = first + group < w.groups;
        const char *from = walk.scales + (int64_t)(first + (valid ? group : 0)) * EPMOEI_TILE_ROWS * w.scale_bytes;
        ptx_cp_async_16(to + Slot::kCodes + Slot::kVectors + lane * 16, from + piece * 16, valid ? 16 : 0);
    }
    if (Slot::kZeros && walk.zeros && lane >= 16 && lane < 16 + in_block) {
        const int32_t group = lane - 16;
        const bool valid = first + group < w.groups;
        ptx_cp_async_16(to + Slot::kCodes + Slot::kVectors + Slot::kScales + group * 16,
                        walk.zeros + (int64_t)(first + (valid ? group : 0)) * EPMOEI_TILE_ROWS, valid ? 16 : 0);
    }
}

/* A lane's eight columns of one vector, in the order of the weights' columns. */
template <typename T, epmoe_format_t kFormat>
__device__ __forceinline__ void copy_vectors(const few_params_t &p, const walk_t<T, kFormat> &walk, const task_t &task,
                                             char *slots, uint32_t to, int32_t block)
{
    const int32_t lane = threadIdx.x % 32, col = block * EPMOEI_TILE_COLS + lane % 8 * 8;
    const uint32_t at = slot<kFormat>::kCodes + swizzle(lane / 8, lane % 8);
    if (!task.vector) return;
    const bool valid = col < p.weight.gemm.k;
    if (!walk.order) {
        ptx_cp_async_ca_16(to + at, task.vector + (valid ? col : 0), valid ? 16 : 0);
        return;
    }
    uint4 piece = make_uint4(0, 0, 0, 0);
    if (valid) {
        const int4 a = *(const int4 *)(walk.order + col), b = *(const int4 *)(walk.order + col + 4);
        const uint16_t *v = task.vector;
        piece = make_uint4(v[a.x] | (uint32_t)v[a.y] << 16, v[a.z] | (uint32_t)v[a.w] << 16,
                           v[b.x] | (uint32_t)v[b.y] << 16, v[b.z] | (uint32_t)v[b.w] << 16);
    }
    *(uint4 *)(slots + at) = piece;
}

/* acc += one block; acc as m16n8k16 has it, columns 0..3 the vectors. FP8: scales of rows lane/4 and lane/4 + 8. */
template <typename T, epmoe_format_t kFormat>
__device__ __forceinline__ void multiply_block(float (&acc)[4], const few_params_t &p, const char *at, int32_t vectors,
                                               const float (&scales)[2], uint32_t (&nan)[2])
{
    using Slot = slot<kFormat>;
    const quant_params_t &w = p.weight;
    const int32_t lane = threadIdx.x % 32;
    const char *meta = at + Slot::kCodes + Slot::kVectors;
    uint32_t b[kSteps][2];
    uint4 words[2];
    words[0] = *(const uint4 *)(at + lane * 16);
    if (!Slot::kTiled) {
        /* As in the grouped GEMM a word of codes is one lane's: here columns 16 (lane%4) + 4 s to + 3 of step s. */
        words[1] = *(const uint4 *)(at + 512 + lane * 16);
        const int32_t row = lane / 4 < vectors ? lane / 4 : 0;
        const uint4 low = *(const uint4 *)(at + Slot::kCodes + swizzle(row, lane % 4 * 2));
        const uint4 high = *(const uint4 *)(at + Slot::kCodes + swizzle(row, lane % 4 * 2 + 1));
        b[0][0] = low.x, b[0][1] = low.y, b[1][0] = low.z, b[1][1] = low.w;
        b[2][0] = high.x, b[2][1] = high.y, b[3][0] = high.z, b[3][1] = high.w;
    } else {
        const int32_t row = lane % 8 < vectors ? lane % 8 : 0;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint32_t r[4];
            ptx_ldmatrix_x4(r, ptx_shared_address(at + Slot::kCodes) + swizzle(row, 4 * i + lane / 8));
            b[2 * i][0] = r[0], b[2 * i][1] = r[1], b[2 * i + 1][0] = r[2], b[2 * i + 1][1] = r[3];
        }
    }
    float part[4] = {};
    uint32_t zeros[2] = {quant_w4_zero<T>(8), quant_w4_zero<T>(8)};
    const int32_t steps = 1 << w.group_shift; /* of a group, or all four */
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
        const int32_t group = s >> w.group_shift;
        uint32_t a[4];
        if (kFormat == EPMOE_FORMAT_W4) {
            if (w.zeros && s % steps == 0) {
                const uint32_t pair = ((const uint16_t *)(meta + Slot::kScales + group * 16))[lane / 4];
                zeros[0] = quant_w4_zero<T>(pair & 255);
                zeros[1] = quant_w4_zero<T>(pair >> 8);
            }
            quant_w4_fragment<T>(a, quant_word_of(words[0], s), zeros);
        } else if (kFormat == EPMOE_FORMAT_MXFP4) {
            quant_mxfp4_fragment<T>(a, quant_word_of(words[0], s));
        } else {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const uint32_t codes = quant_word_of(words[h], s);
                uint32_t pairs[2];
                quant_e4m3_pairs<T>(pairs, __byte_perm(codes, 0, 0x3120));
                a[h] = pairs[0];
                a[h + 2] = pairs[1];
                nan[h] |= quant_e4m3_nan(codes);
            }
        }
        ptx_mma_16816(part, a, b[s][0], b[s][1], T());
        if ((s + 1) % steps && s != kSteps - 1) continue;
        const float2 scale = Slot::kTiled ? quant_scale_pair(w, meta + group * 16 * w.scale_bytes, lane / 4)
                                          : make_float2(scales[0], scales[1]);
#pragma unroll
        for (int c = 0; c < 4; c++) {
            acc[c] = fmaf(c < 2 ? scale.x : scale.y, part[c], acc[c]);
            part[c] = 0.0f;
        }
    }
}

/* acc = the task's sums. `slots` is this warp's. `waits`: what the vectors hold may still be on its way, and this is
 * the first to read them. */
template <typename T, epmoe_format_t kFormat>
__device__ __forceinline__ void multiply(float (&acc)[4], const few_params_t &p, const task_t &task, char *slots,
                                         bool waits)
{
    using Slot = slot<kFormat>;
    constexpr int kAhead = Slot::kAhead;
    const quant_params_t &w = p.weight;
    const walk_t<T, kFormat> walk = begin_walk<T, kFormat>(p, task);
    const int32_t count = task.end_block - task.first_block;
    const uint32_t base = ptx_shared_address(slots);
    __syncwarp(); /* the slots are free */
#pragma unroll
    for (int i = 0; i < kAhead; i++)
        if (i < count) copy_weights(p, walk, base + i * Slot::kBytes, task.first_block + i);
    if (waits) epmoei_begin_dependent();
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
        if (i < count)
            copy_vectors(p, walk, task, slots + i * Slot::kBytes, base + i * Slot::kBytes, task.first_block + i);
        ptx_cp_async_commit();
    }
#pragma unroll
    for (int c = 0; c < 4; c++) acc[c] = 0.0f;
    float scales[2] = {};
    uint32_t nan[2] = {};
    int32_t at = 0, to = kAhead; /* slots */
    for (int32_t i = 0; i < count; i++) {
        ptx_cp_async_wait<kAhead - 1>();
        __syncwarp();
        if (i + kAhead < count) {
            const int32_t block = task.first_block + i + kAhead;
            copy_weights(p, walk, base + (uint32_t)(to * Slot::kBytes), block);
            copy_vectors(p, walk, task, slots + to * Slot::kBytes, base + (uint32_t)(to * Slot::kBytes), block);
        }
        ptx_cp_async_commit();
        if (!Slot::kTiled) {
            const int32_t group = (task.first_block + i) * EPMOEI_TILE_COLS / w.group;
            const int64_t scales_at = (int64_t)task.expert * w.row_blocks * w.groups + group;
#pragma unroll
            for (int h = 0; h < 2; h++) scales[h] = quant_load_scale(w, scales_at + walk.scale_rows[h]);
        }
        multiply_block<T, kFormat>(acc, p, slots + at * Slot::kBytes, task.vectors, scales, nan);
        at = at == kAhead ? 0 : at + 1;
        to = to == kAhead ? 0 : to + 1;
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
template <typename T, epmoe_format_t kFormat>
__global__ void __launch_bounds__(kThreads, slot<kFormat>::kBlocksPerSm) gate_up_kernel(const few_params_t p)
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

    const int32_t blocks = (args.hidden + EPMOEI_TILE_COLS - 1) / EPMOEI_TILE_COLS;
    const int32_t split_blocks = (blocks + kSplits - 1) / kSplits;
    task_t task = {};
    task.expert = expert;
    task.row = ((int32_t)blockIdx.y * kParts + part) * 16;
    task.first_block = min(split * split_blocks, blocks);
    task.end_block = min(task.first_block + split_blocks, blocks);
    if (task.row / 2 >= args.intermediate) task.end_block = task.first_block;
    while (members) {
        int32_t bits[kMembers];
        task.vectors = take_members(bits, members);
        const int32_t mine = lane / 8;
        const int32_t bit = pick(bits, mine);
        task.vector = mine < task.vectors
                          ? (const uint16_t *)args.x + (int64_t)((first + bit) / args.top_k) * args.hidden
                          : nullptr;
        float acc[4];
        multiply<T, kFormat>(acc, p, task, shared + warp * slot<kFormat>::kWarpBytes, false);
        if (lane % 4 < kMembers / 2)
#pragma unroll
            for (int c = 0; c < 4; c++) sums[warp][lane / 4 + c / 2 * 8][lane % 4 * 2 + c % 2] = acc[c];
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
            const int32_t slot = first + pick(bits, member);
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

template <typename T, epmoe_format_t kFormat>
__global__ void __launch_bounds__(kThreads, slot<kFormat>::kBlocksPerSm) down_kernel(const few_params_t p)
{
    extern __shared__ __align__(128) char slots[];
    __shared__ down_shared_t shared;
    const epmoe_experts_args_t &args = p.args;
    const int32_t tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const int32_t num_tokens = epmoei_device_tokens(args.num_tokens_dev, args.num_tokens);
    group_slots(p, shared, num_tokens * args.top_k);
    __syncthreads();

    const int32_t blocks = (args.intermediate + EPMOEI_TILE_COLS - 1) / EPMOEI_TILE_COLS;
    bool waits = true;
    int32_t index = warp; /* of a part of a group; warps take them in turn */
    for (int32_t first = 0; first < num_tokens * args.top_k; first += 32) {
        const int32_t count = shared.num_groups[first / 32] << p.part_bits;
        for (; index < count; index += kWarps) {
            const int32_t group = first + (index >> p.part_bits), part = index & ((1 << p.part_bits) - 1);
            task_t task = {};
            task.expert = shared.group_experts[group];
            task.row = (int32_t)blockIdx.x * kColumns;
            task.first_block = min(part * p.part_blocks, blocks);
            task.end_block = min(task.first_block + p.part_blocks, blocks);
            uint32_t members = shared.group_members[group];
            while (members) {
                int32_t bits[kMembers];
                task.vectors = take_members(bits, members);
                const int32_t mine = lane / 8;
                const int32_t bit = pick(bits, mine);
                task.vector =
                    mine < task.vectors ? (const uint16_t *)p.h + (int64_t)(first + bit) * args.intermediate : nullptr;
                float acc[4];
                multiply<T, kFormat>(acc, p, task, slots + warp * slot<kFormat>::kWarpBytes, waits);
                waits = false;
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    const int32_t member = lane % 4 * 2 + c % 2;
                    const int32_t to = first + pick(bits, member);
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

template <typename T, epmoe_format_t kFormat>
epmoe_status_t launch(const few_params_t &p, bool gated, epmoe_stream_t stream)
{
    const int bytes = kWarps * slot<kFormat>::kWarpBytes;
    auto *kernel = gated ? gate_up_kernel<T, kFormat> : down_kernel<T, kFormat>;
    EPMOEI_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    const dim3 blocks = gated ? dim3((unsigned)(p.args.num_tokens * p.args.top_k),
                                     (unsigned)epmoei_ceil_div(p.args.intermediate, kColumns))
                              : dim3((unsigned)epmoei_ceil_div(p.args.hidden, kColumns));
    return epmoei_cuda_status((int32_t)epmoei_launch_dependent(kernel, blocks, kThreads, (size_t)bytes, stream, p),
                              gated ? "experts_few_quant_gate_up" : "experts_few_quant_down");
}

template <typename T> epmoe_status_t launch_format(const few_params_t &p, bool gated, epmoe_stream_t stream)
{
    switch (gated ? p.args.gate_up.format : p.args.down.format) {
    case EPMOE_FORMAT_FP8_BLOCK: return launch<T, EPMOE_FORMAT_FP8_BLOCK>(p, gated, stream);
    case EPMOE_FORMAT_MXFP4: return launch<T, EPMOE_FORMAT_MXFP4>(p, gated, stream);
    default: return launch<T, EPMOE_FORMAT_W4>(p, gated, stream);
    }
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
        p.order = checked.weight.g_idx;
    }
    p.h = (void *)h;
    p.error_word = epmoei_error_word();
    /* One token's slots give every warp of `down` something to do. k alone decides, so that the order of a sum does not
     * depend on the number of tokens. */
    while (args->top_k << p.part_bits < kWarps) p.part_bits++;
    p.part_blocks = (int32_t)epmoei_ceil_div(epmoei_ceil_div(args->intermediate, EPMOEI_TILE_COLS), 1 << p.part_bits);
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
