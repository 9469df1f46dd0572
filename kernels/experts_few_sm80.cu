/* Memory bounds these kernels, so that all they do is keep enough of the weights on their way: a warp walks two rows of
 * weights at a time, 16 bytes a lane and load, kUnroll loads a row before it uses the first. Slots of the same expert
 * share what is read of it: one warp multiplies the rows with two vectors at a time.
 *
 *   gate_up   a warp makes one column of h: its two rows are gate and up
 *   down      a block makes two columns of y for all tokens: its two rows are the columns', of every expert in turn;
 *             warps share the slots, and where those are few the parts of a row, and leave their sums in shared memory
 *
 * Both are launched to begin while the kernel before them runs. gate_up lets `down` begin only once it knows that what
 * came before itself has ended; therefore `down` may use ids, router weights and the experts' weights at once, and has
 * its first loads on their way while gate_up ends. */
#include "kernels/activation_cuda.cuh"
#include "kernels/experts_few_cuda.cuh"
#include "kernels/launch_cuda.cuh"
#include "kernels/plain_tiles.h"

namespace
{

constexpr int kChunk = 8; /* elements of 16 bytes */
constexpr int kRows = 2;  /* of weights that a warp walks together */
/* Chunks of a row that a lane has on their way; with more accumulators there are registers for fewer. */
template <int kMembers> constexpr int kUnroll = kMembers > 1 ? 2 : 4;
constexpr int kGateUpWarps = 4;  /* columns of h of a block */
constexpr int kGateUpBlocks = 7; /* of an SM: what its registers hold */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
template <int kWarps> constexpr int kDownBlocks = kWarps > kDownWarps ? 2 : 3;
#else
template <int kWarps> constexpr int kDownBlocks = 3;
#endif
constexpr int kMaxSlots = EPMOEI_EXPERTS_FEW_MOST_TOKENS * EPMOE_MAX_TOP_K;
static_assert(kMaxSlots <= 32 * kDownWarps, "a thread of down for each slot");

struct few_params_t {
    epmoe_experts_args_t args;
    void *h;             /* [T*k,f] */
    int32_t *error_word; /* gate_up */
    int32_t part_bits;   /* down: a row has 1 << part_bits parts, each of part_chunks chunks */
    int32_t part_chunks;
};

/* ------------------------------------------------------------------------------------------------- device helpers */

template <typename T> __device__ __forceinline__ float2 unpack(uint32_t pair);
template <> __device__ __forceinline__ float2 unpack<__nv_bfloat16>(uint32_t pair)
{
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u));
}
template <> __device__ __forceinline__ float2 unpack<__half>(uint32_t pair)
{
    return __half22float2(__halves2half2(__ushort_as_half((unsigned short)(pair & 0xFFFFu)),
                                         __ushort_as_half((unsigned short)(pair >> 16))));
}

/* The next chunks of this lane: of the two rows of weights, and of the vectors that they are multiplied with. */
template <int kMembers> struct operands_t {
    const uint4 *rows[kRows];
    int32_t stride; /* chunks from one of a lane's chunks of weights to its next one */
    const uint4 *vectors;
    int32_t vector[kMembers]; /* from `vectors` on */
};

template <int kMembers> struct round_t {
    uint4 weights[kUnroll<kMembers>][kRows];
};

__device__ __forceinline__ uint32_t word(const uint4 &chunk, int i)
{
    return i == 0 ? chunk.x : i == 1 ? chunk.y : i == 2 ? chunk.z : chunk.w;
}

/* Every 32nd chunk of each row; zeros from `left` chunks on. */
template <int kMembers>
__device__ __forceinline__ void load_round(round_t<kMembers> &round, const operands_t<kMembers> &operands, int32_t left)
{
#pragma unroll
    for (int u = 0; u < kUnroll<kMembers>; u++)
#pragma unroll
        for (int r = 0; r < kRows; r++)
            round.weights[u][r] = ptx_load_stream_16(operands.rows[r] + u * operands.stride, u * 32 < left);
}

/* Where chunk `chunk` of row `row` of a weight [n,k] lies, and those 32 further. stored: the row in tiles. */
template <int kMembers>
__device__ __forceinline__ const uint4 *find_chunk(operands_t<kMembers> &operands, const epmoe_weight_t &weight,
                                                   int32_t expert, int32_t n, int32_t k, int32_t row, int32_t stored,
                                                   int32_t chunk)
{
    const uint4 *const data = (const uint4 *)weight.data + (int64_t)expert * n * (k / kChunk);
    operands.stride = 32;
    if (weight.storage == EPMOE_STORAGE_ROWS) return data + (int64_t)row * (k / kChunk) + chunk;
    operands.stride *= epmoei_plain_tile_rows(n, stored);
    return data + epmoei_plain_tile_piece(n, k, stored, chunk);
}

/* acc += this chunk of weights times those of the vectors. */
template <typename T, int kMembers>
__device__ __forceinline__ void multiply_add(float (&acc)[kRows][kMembers], const uint4 (&weights)[kRows],
                                             const uint4 (&values)[kMembers])
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 w[kRows];
#pragma unroll
        for (int r = 0; r < kRows; r++) w[r] = unpack<T>(word(weights[r], i));
#pragma unroll
        for (int m = 0; m < kMembers; m++) {
            float2 v = unpack<T>(word(values[m], i));
#pragma unroll
            for (int r = 0; r < kRows; r++) acc[r][m] = fmaf(w[r].y, v.y, fmaf(w[r].x, v.x, acc[r][m]));
        }
    }
}

/* This lane's share of the products, `left` chunks from its first one to the end. The first round is loaded. */
template <typename T, int kMembers>
__device__ __forceinline__ void multiply(float (&acc)[kRows][kMembers], round_t<kMembers> &round,
                                         operands_t<kMembers> operands, int32_t left)
{
    constexpr int kSteps = kUnroll<kMembers>;
    while (true) {
        uint4 values[kSteps][kMembers];
#pragma unroll
        for (int u = 0; u < kSteps; u++)
#pragma unroll
            for (int m = 0; m < kMembers; m++)
                values[u][m] = ptx_load_16(operands.vectors + operands.vector[m] + u * 32, u * 32 < left);
#pragma unroll
        for (int u = 0; u < kSteps; u++) multiply_add<T>(acc, round.weights[u], values[u]);
        left -= 32 * kSteps;
        if (left <= 0) break;
        operands.vectors += 32 * kSteps;
#pragma unroll
        for (int r = 0; r < kRows; r++) operands.rows[r] += kSteps * operands.stride;
        load_round(round, operands, left);
    }
}

/* Sums over the warp; lane m * kRows + r gets that of acc[r][m]. */
template <int kMembers> __device__ __forceinline__ float sum_lanes(const float (&acc)[kRows][kMembers])
{
    const int32_t lane = threadIdx.x % 32;
    float own = 0.0f;
#pragma unroll
    for (int m = 0; m < kMembers; m++)
#pragma unroll
        for (int r = 0; r < kRows; r++) {
            float sum = acc[r][m];
#pragma unroll
            for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAll, sum, step);
            if (lane == m * kRows + r) own = sum;
        }
    return own;
}

/* Takes up to kMembers of the bits out of `members`, which has one. Fewer repeat the last one, which then gets the same
 * result twice. */
template <int kMembers> __device__ __forceinline__ void take_members(int32_t (&bits)[kMembers], uint32_t &members)
{
#pragma unroll
    for (int m = 0; m < kMembers; m++) {
        bits[m] = members ? __ffs((int)members) - 1 : bits[m ? m - 1 : 0];
        members &= members - 1;
    }
}

/* bits[lane / kRows]: the member whose sum sum_lanes gives this lane. */
template <int kMembers> __device__ __forceinline__ int32_t lane_member(const int32_t (&bits)[kMembers])
{
    int32_t bit = bits[0];
#pragma unroll
    for (int m = 1; m < kMembers; m++)
        if (threadIdx.x % 32 / kRows == m) bit = bits[m];
    return bit;
}

/* One column of h for slots of one expert. lane_token: of slot first + lane. */
template <typename T, int kMembers>
__device__ __forceinline__ void gate_up_column(const few_params_t &p, int32_t expert, int32_t col, int32_t first,
                                               int32_t lane_token, uint32_t &members)
{
    const epmoe_experts_args_t &args = p.args;
    const int32_t lane = threadIdx.x % 32, chunks = args.hidden / kChunk;
    const bool interleaved = args.layout != EPMOE_LAYOUT_GATE_FIRST;
    const int32_t row = interleaved ? 2 * col : col, n = 2 * args.intermediate;
    const int32_t up = interleaved ? 1 : args.intermediate; /* rows from gate to up */

    int32_t bits[kMembers];
    take_members(bits, members);
    operands_t<kMembers> operands;
#pragma unroll
    for (int r = 0; r < kRows; r++)
        operands.rows[r] = find_chunk(operands, args.gate_up, expert, n, args.hidden, row + r * up,
                                      epmoei_plain_tile_gated_row(col, r), lane);
    operands.vectors = (const uint4 *)args.x + lane;
#pragma unroll
    for (int m = 0; m < kMembers; m++) operands.vector[m] = __shfl_sync(kAll, lane_token, bits[m]) * chunks;
    round_t<kMembers> round;
    load_round(round, operands, chunks - lane);

    /* What the end needs is on its way, too. */
    const int32_t slot = first + lane_member(bits);
    const float weight = args.weight_on_input ? args.weights[slot] : 1.0f;
    const float bias = args.gate_up_bias ? args.gate_up_bias[(int64_t)expert * n + row + (lane & 1 ? up : 0)] : 0.0f;

    float acc[kRows][kMembers] = {};
    multiply<T>(acc, round, operands, chunks - lane);
    float own = sum_lanes(acc) * weight + bias;
    float other = __shfl_down_sync(kAll, own, 1);
    if (lane >= kMembers * kRows || lane % kRows) return;
    float value = epmoei_activate_device(args.activation, own, other, args.alpha, args.limit);
    ((T *)p.h)[(int64_t)slot * args.intermediate + col] = epmoei_from_float<T>(value);
}

/* What a block of `down` knows of the slots, and what its warps leave for the end. A group is the slots of one expert
 * within 32 neighbours; the arrays of groups hold those of slots 0..31 from 0 on, of 32..63 from 32 on, and so on. */
struct down_shared_t {
    float sums[kMaxSlots][kRows]; /* of slot << part_bits | part: of the row's dot product, with the bias in part 0 */
    float weights[kMaxSlots];
    bool used[kMaxSlots];
    int32_t group_experts[kMaxSlots];
    uint32_t group_members[kMaxSlots]; /* bit i: the i-th of the 32 neighbours */
    int32_t num_groups[kMaxSlots / 32];
    int32_t num_tokens; /* read here again, so that no register holds it meanwhile */
};

/* One part of the block's two rows of one expert, for slots of this expert. */
template <typename T, int kMembers>
__device__ __forceinline__ void down_part(const few_params_t &p, down_shared_t &shared, int32_t expert, int32_t part,
                                          int32_t first, uint32_t &members, bool &waited)
{
    const epmoe_experts_args_t &args = p.args;
    const int32_t lane = threadIdx.x % 32, chunks = args.intermediate / kChunk;
    const int32_t begin = part * p.part_chunks + lane, left = min((part + 1) * p.part_chunks, chunks) - begin;
    const int32_t row = (int32_t)blockIdx.x * kRows;

    int32_t bits[kMembers];
    take_members(bits, members);
    operands_t<kMembers> operands;
#pragma unroll
    for (int r = 0; r < kRows; r++)
        operands.rows[r] =
            find_chunk(operands, args.down, expert, args.hidden, args.intermediate, row + r, row + r, begin);
    operands.vectors = (const uint4 *)p.h + (int64_t)first * chunks + begin;
#pragma unroll
    for (int m = 0; m < kMembers; m++) operands.vector[m] = bits[m] * chunks;
    round_t<kMembers> round;
    load_round(round, operands, left);
    const float bias =
        args.down_bias && part == 0 ? args.down_bias[(int64_t)expert * args.hidden + row + (lane & 1)] : 0.0f;
    if (!waited) {
        epmoei_begin_dependent();
        waited = true;
    }

    float acc[kRows][kMembers] = {};
    multiply<T>(acc, round, operands, left);
    float own = sum_lanes(acc) + bias;
    const int32_t slot = first + lane_member(bits);
    if (lane < kMembers * kRows) shared.sums[slot << p.part_bits | part][lane % kRows] = own;
}

/* ------------------------------------------------------------------------------------------------------- kernels */

/* Slots vary fastest over the grid, so that what is read together lies together. Of the slots of one expert, within 32
 * neighbours, the first one's blocks do the work. */
template <typename T>
__global__ void __launch_bounds__(kGateUpWarps * 32, kGateUpBlocks) gate_up_kernel(const few_params_t p)
{
    epmoei_begin_dependent();
    const epmoe_experts_args_t &args = p.args;
    const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int32_t own = blockIdx.x % 32, first = (int32_t)blockIdx.x - own;
    const int32_t num_slots = epmoei_device_tokens(args.num_tokens_dev, args.num_tokens) * args.top_k;
    int32_t id = first + lane < num_slots ? args.ids[first + lane] : -1;
    const bool bad = id < -1 || id >= args.num_experts;
    if (blockIdx.y == 0 && own == 0 && warp == 0) {
        uint32_t bads = __ballot_sync(kAll, bad);
        if (bads && lane == 0) epmoei_count_bad(p.error_word, __popc(bads));
    }
    const int32_t expert = __shfl_sync(kAll, bad ? -1 : id, own);
    if (expert < 0) return;
    uint32_t members = __ballot_sync(kAll, id == expert);
    if (members & ((1u << own) - 1)) return;
    const int32_t col = (int32_t)blockIdx.y * kGateUpWarps + warp, token = (first + lane) / args.top_k;
    if (__popc(members) == 1)
        gate_up_column<T, 1>(p, expert, col, first, token, members);
    else
        while (members) gate_up_column<T, 2>(p, expert, col, first, token, members);
}

template <typename T, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, kDownBlocks<kWarps>) down_kernel(const few_params_t p)
{
    __shared__ down_shared_t shared;
    const epmoe_experts_args_t &args = p.args;
    const int32_t tid = threadIdx.x;
    const int32_t num_tokens = epmoei_device_tokens(args.num_tokens_dev, args.num_tokens);
    group_slots<kMaxSlots, false>(args, shared, num_tokens * args.top_k);
    if (tid == 0) shared.num_tokens = num_tokens;
    __syncthreads();

    bool waited = false;
    int32_t index = tid / 32; /* of a part of a group; warps take them in turn */
    for (int32_t first = 0; first < *(const volatile int32_t *)&shared.num_tokens * args.top_k; first += 32) {
        const int32_t count = shared.num_groups[first / 32] << p.part_bits;
        for (; index < count; index += kWarps) {
            const int32_t group = first + (index >> p.part_bits), part = index & ((1 << p.part_bits) - 1);
            const int32_t expert = shared.group_experts[group];
            uint32_t members = shared.group_members[group];
            if (__popc(members) == 1)
                down_part<T, 1>(p, shared, expert, part, first, members, waited);
            else
                while (members) down_part<T, 2>(p, shared, expert, part, first, members, waited);
        }
        index -= count;
    }
    if (!waited) epmoei_begin_dependent();

    const int32_t token = tid / kRows, row = tid % kRows;
    const bool finishes = token < shared.num_tokens;
    const int64_t at = (int64_t)token * args.hidden + blockIdx.x * kRows + row;
    float addend = 0.0f, residual = 0.0f;
    if (finishes && args.addend) addend = args.addend[at];
    if (finishes && args.residual) residual = load_as(args.residual, args.y_dtype, at);
    __syncthreads();
    if (!finishes) return;
    float sum = 0.0f;
    for (int32_t slot = token * args.top_k; slot < (token + 1) * args.top_k; slot++) {
        if (!shared.used[slot]) continue;
        float value = 0.0f;
        for (int32_t part = 0; part < 1 << p.part_bits; part++) value += shared.sums[slot << p.part_bits | part][row];
        sum = fmaf(shared.weights[slot], value, sum);
    }
    store_as(args.y, args.y_dtype, at, sum + addend + residual);
}

/* -------------------------------------------------------------------------------------------------------- launch */

epmoe_status_t check_aligned(const epmoe_experts_args_t *args)
{
    EPMOEI_CHECK_ALIGNED(args->x, 16);
    EPMOEI_CHECK_ALIGNED(args->gate_up.data, 16);
    EPMOEI_CHECK_ALIGNED(args->down.data, 16);
    EPMOEI_CHECK_ALIGNED(args->y, 16);
    EPMOEI_CHECK_ALIGNED(args->addend, 16);
    EPMOEI_CHECK_ALIGNED(args->residual, 16);
    EPMOEI_CHECK_ALIGNED(args->ids, 4);
    EPMOEI_CHECK_ALIGNED(args->weights, 4);
    EPMOEI_CHECK_ALIGNED(args->gate_up_bias, 4);
    EPMOEI_CHECK_ALIGNED(args->down_bias, 4);
    EPMOEI_CHECK_ALIGNED(args->num_tokens_dev, 4);
    return EPMOE_OK;
}

few_params_t few_params(const epmoe_experts_args_t *args, const void *h)
{
    few_params_t p = {};
    p.args = *args;
    p.h = (void *)h;
    p.error_word = epmoei_error_word();
    /* One token's slots give every warp of `down` something to do. k alone decides, so that the order of a sum does not
     * depend on the number of tokens. */
    while (args->top_k << p.part_bits < kDownWarps) p.part_bits++;
    /* 128 bytes: no two warps share a cache line. */
    p.part_chunks = (int32_t)epmoei_round_up(epmoei_ceil_div(args->intermediate / kChunk, 1 << p.part_bits), 8);
    return p;
}

template <typename T> epmoe_status_t launch_down(const few_params_t &p, epmoe_stream_t stream)
{
    const bool nine = p.args.top_k == kDownWarpsOfNine;
    auto *kernel = nine ? down_kernel<T, kDownWarpsOfNine> : down_kernel<T, kDownWarps>;
    const unsigned threads = 32 * (nine ? kDownWarpsOfNine : kDownWarps);
    return epmoei_cuda_status(
        (int32_t)epmoei_launch_dependent(kernel, (unsigned)(p.args.hidden / kRows), threads, 0, stream, p),
        "experts_few_down");
}

} // namespace

extern "C" epmoe_status_t epmoei_experts_few_gate_up_sm80(const epmoe_experts_args_t *args, void *h,
                                                          epmoe_stream_t stream)
{
    if (epmoei_experts_few_quant_can(args)) return epmoei_experts_few_quant_gate_up_sm80(args, h, stream);
    EPMOEI_CHECK(check_aligned(args));
    EPMOEI_CHECK_ALIGNED(h, 16);
    few_params_t p = few_params(args, h);
    dim3 blocks((unsigned)(args->num_tokens * args->top_k), (unsigned)(args->intermediate / kGateUpWarps));
    auto *kernel = args->dtype == EPMOE_BF16 ? gate_up_kernel<__nv_bfloat16> : gate_up_kernel<__half>;
    return epmoei_cuda_status((int32_t)epmoei_launch_dependent(kernel, blocks, kGateUpWarps * 32, 0, stream, p),
                              "experts_few_gate_up");
}

extern "C" epmoe_status_t epmoei_experts_few_down_sm80(const epmoe_experts_args_t *args, const void *h,
                                                       epmoe_stream_t stream)
{
    if (epmoei_experts_few_quant_can(args)) return epmoei_experts_few_quant_down_sm80(args, h, stream);
    EPMOEI_CHECK(check_aligned(args));
    EPMOEI_CHECK_ALIGNED(h, 16);
    few_params_t p = few_params(args, h);
    return args->dtype == EPMOE_BF16 ? launch_down<__nv_bfloat16>(p, stream) : launch_down<__half>(p, stream);
}
