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
 * The walk itself is in kernels/experts_few_quant_cuda.cuh. */
#include "kernels/experts_few_quant_cuda.cuh"

namespace
{

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
 * within 32 neighbours; the arrays of groups hold those of slots 0..31 from 0 on, of 32..63 from 32 on, and so on.
 * Beside nine warps' stages of FP8 there is room in 99 KB for the slots that nine of a token can be, and no more. */
template <int kDown> struct down_shared_t {
    static constexpr int kMost =
        kDown == kDownWarpsOfNine ? (EPMOEI_EXPERTS_FEW_QUANT_MOST_TOKENS * kDown + 31) / 32 * 32 : kMaxSlots;
    float sums[kMost][kColumns]; /* of slot << part_bits | part: of the row's dot product, without the bias */
    float weights[kMost];
    bool used[kMost];
    int32_t experts[kMost]; /* of slots */
    int32_t group_experts[kMost];
    uint32_t group_members[kMost]; /* bit i: the i-th of the 32 neighbours */
    int32_t num_groups[kMost / 32];
    int32_t num_tokens; /* read here again, so that no register holds it meanwhile */
};

/* What a warp of `down` does at once: a part of the rows of an expert for up to kMembers slots of a group. */
struct work_t {
    int32_t expert; /* -1: no more */
    int32_t first;  /* of the 32 neighbours */
    int32_t part;
    int32_t bits[kMembers];
    int32_t vectors; /* 0: the group has no more slots */
};

/* Number `index` of the parts of groups, the `round`-th slots of it. volatile: what was found before a product is found
 * again after it, so that no register holds it meanwhile. */
template <int kDown>
__device__ __forceinline__ work_t find_work(const volatile down_shared_t<kDown> &shared, const few_params_t &p,
                                            int32_t index, int32_t round)
{
    work_t work = {};
    work.expert = -1;
    const int32_t num_slots = shared.num_tokens * p.args.top_k;
#pragma unroll 1
    for (; work.first < num_slots; work.first += 32) {
        const int32_t count = shared.num_groups[work.first / 32] << p.part_bits;
        if (index < count) break;
        index -= count;
    }
    if (work.first >= num_slots) return work;
    const int32_t group = work.first + (index >> p.part_bits);
    work.expert = shared.group_experts[group];
    work.part = index & ((1 << p.part_bits) - 1);
    uint32_t members = shared.group_members[group];
#pragma unroll 1
    for (int32_t i = 0; i < round * kMembers; i++) members &= members - 1;
    work.vectors = take_members(work.bits, members);
    return work;
}

/* Sums of one product into their places. */
template <int kDown>
__device__ __forceinline__ void leave_sums(down_shared_t<kDown> &shared, const few_params_t &p, const float (&acc)[4],
                                           int32_t first, int32_t part, const int32_t (&bits)[kMembers],
                                           int32_t vectors)
{
    const int32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int c = 0; c < 4; c++) {
        const int32_t member = lane % 4 * 2 + c % 2;
        const int32_t to = first + (member ? bits[1] : bits[0]);
        if (member < vectors) shared.sums[to << p.part_bits | part][lane / 4 + c / 2 * 8] = acc[c];
    }
}

__device__ __forceinline__ task_t down_task(const few_params_t &p, int32_t expert, int32_t part)
{
    const int32_t stages = stages_with(p.args.intermediate, 0);
    task_t task = {};
    task.expert = expert;
    task.row = (int32_t)blockIdx.x * kColumns;
    task.first_stage = min(part * p.part_stages, stages);
    task.end_stage = min(task.first_stage + p.part_stages, stages);
    return task;
}

/* What this warp has to do of `down`; false when that was nothing. Warps take parts of groups in turn. */
template <typename T, epmoe_format_t kFormat, int kGroups>
__device__ __forceinline__ bool down_parts(down_shared_t<kDownWarps> &shared, const few_params_t &p, int32_t num_tokens,
                                           uint32_t slots)
{
    const epmoe_experts_args_t &args = p.args;
    const int32_t mine = threadIdx.x % 32 / 16; /* of the vectors */
    bool waits = true;
    int32_t index = threadIdx.x / 32;
    for (int32_t first = 0; first < num_tokens * args.top_k; first += 32) {
        const int32_t count = shared.num_groups[first / 32] << p.part_bits;
        for (; index < count; index += kDownWarps) {
            const int32_t group = first + (index >> p.part_bits), part = index & ((1 << p.part_bits) - 1);
            task_t task = down_task(p, shared.group_experts[group], part);
            uint32_t members = shared.group_members[group];
            while (members) {
                int32_t bits[kMembers];
                task.vectors = take_members(bits, members);
                const int32_t bit = mine ? bits[1] : bits[0];
                task.vector =
                    mine < task.vectors ? (const uint16_t *)p.h + (int64_t)(first + bit) * args.intermediate : nullptr;
                float acc[4];
                multiply<T, kFormat, kGroups>(acc, p, task, slots, waits);
                waits = false;
                leave_sums(shared, p, acc, first, part, bits, task.vectors);
            }
        }
        index -= count;
    }
    return !waits;
}

/* Nine warps have fewer registers: what the other one holds during a product is found again after it. */
template <typename T, epmoe_format_t kFormat, int kGroups>
__device__ __forceinline__ bool down_parts(down_shared_t<kDownWarpsOfNine> &shared, const few_params_t &p, int32_t,
                                           uint32_t slots)
{
    const int32_t mine = threadIdx.x % 32 / 16, warp = threadIdx.x / 32;
    int32_t index = warp;
    for (int32_t round = 0;;) {
        work_t work = find_work(shared, p, index, round);
        if (work.expert < 0) return index != warp;
        if (work.vectors == 0) {
            index += kDownWarpsOfNine, round = 0;
            continue;
        }
        task_t task = down_task(p, work.expert, work.part);
        task.vectors = work.vectors;
        if (mine < work.vectors)
            task.vector = (const uint16_t *)p.h +
                          (int64_t)(work.first + (mine ? work.bits[1] : work.bits[0])) * p.args.intermediate;
        float acc[4];
        multiply<T, kFormat, kGroups>(acc, p, task, slots, index == warp && round == 0);
        work = find_work(shared, p, index, round++);
        leave_sums(shared, p, acc, work.first, work.part, work.bits, work.vectors);
    }
}

/* Of an SM: what its registers hold. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
template <epmoe_format_t kFormat, int kGroups, int kDown>
constexpr int kDownBlocks = kDown > kDownWarps &&kFormat == EPMOE_FORMAT_FP8_BLOCK ? 1 : 2;
#else
template <epmoe_format_t kFormat, int kGroups, int kDown>
constexpr int kDownBlocks = slot<kFormat, kGroups>::kBlocksPerSm;
#endif

/* kDown: warps of a block. */
template <typename T, epmoe_format_t kFormat, int kGroups, int kDown>
__global__ void __launch_bounds__(32 * kDown, kDownBlocks<kFormat, kGroups, kDown>) down_kernel(const few_params_t p)
{
    extern __shared__ __align__(128) char slots[];
    __shared__ down_shared_t<kDown> shared;
    const epmoe_experts_args_t &args = p.args;
    const int32_t tid = threadIdx.x;
    const int32_t num_tokens = epmoei_device_tokens(args.num_tokens_dev, args.num_tokens);
    group_slots<down_shared_t<kDown>::kMost, true>(args, shared, num_tokens * args.top_k);
    if (tid == 0) shared.num_tokens = num_tokens;
    __syncthreads();
    if (!down_parts<T, kFormat, kGroups>(shared, p, num_tokens,
                                         ptx_shared_address(slots) + tid / 32 * slot<kFormat, kGroups>::kWarpBytes))
        epmoei_begin_dependent();

    const int32_t token = tid / kColumns, row = tid % kColumns, col = (int32_t)blockIdx.x * kColumns + row;
    const bool finishes = token < shared.num_tokens && col < args.hidden;
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
    const bool nine = !gated && p.args.top_k == kDownWarpsOfNine;
    const int warps = gated ? kWarps : nine ? kDownWarpsOfNine : kDownWarps;
    const int bytes = warps * slot<kFormat, kGroups>::kWarpBytes;
    auto *kernel = gated  ? gate_up_kernel<T, kFormat, kGroups>
                   : nine ? down_kernel<T, kFormat, kGroups, kDownWarpsOfNine>
                          : down_kernel<T, kFormat, kGroups, kDownWarps>;
    EPMOEI_CHECK(epmoei_allow_shared(kernel, (size_t)bytes, "experts_few_quant"));
    const dim3 blocks = gated ? dim3((unsigned)(p.args.num_tokens * p.args.top_k),
                                     (unsigned)epmoei_ceil_div(p.args.intermediate, kColumns))
                              : dim3((unsigned)epmoei_ceil_div(p.args.hidden, kColumns));
    return epmoei_cuda_status(
        (int32_t)epmoei_launch_dependent(kernel, blocks, 32 * (unsigned)warps, (size_t)bytes, stream, p),
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
    while (args->top_k << p.part_bits < kDownWarps) p.part_bits++;
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
