/* Router top-k, one launch (SPARSE_MIXER: two); the steps of a row stand in topk_cuda.cuh. */
#include "kernels/launch_cuda.cuh"
#include "kernels/topk_cuda.cuh"
#include "kernels/topk_mixer_cuda.cuh"

static const int kRowThreads = 128; /* of a block of rows up to 512 experts */

/* kLanes * kValues experts at most; team_floats of shared memory per row, 0 when no step needs them. */
template <int kLanes, int kValues>
static __global__ void __launch_bounds__(kRowThreads, 4) topk_rows_kernel(epmoe_topk_args_t args, int32_t team_floats)
{
    extern __shared__ __align__(16) float shared[];
    constexpr int kSlots = slots_t<kLanes, kValues>::kCount;
    int32_t lane = threadIdx.x % kLanes, team = threadIdx.x / kLanes;
    int64_t row = (int64_t)blockIdx.x * (kRowThreads / kLanes) + team;
    epmoei_begin_dependent();
    bool valid = row < epmoei_device_tokens(args.num_tokens_dev, args.num_tokens);
    if (!__any_sync(kAll, valid)) return;

    float *values = shared + team * team_floats;
    float logits[kValues], chosen[kSlots];
    uint32_t keys[kValues], best_keys[kSlots];
    int32_t ids[kSlots];
    int32_t count = valid ? max(0, min(kValues, args.num_experts - lane * kValues)) : 0;
    load_logits(args, row * args.logits_stride + lane * kValues, count, logits);
    softmax_t softmax = prepare<kLanes>(args, logits, count, lane, kLanes, values, values + kLanes * kValues, keys);
    select_best<kLanes>(keys, lane, args.top_k, ids, best_keys);
#pragma unroll
    for (int s = 0; s < kSlots; s++)
        chosen[s] =
            valid && s * kLanes + lane < args.top_k ? load_logit(args, row * args.logits_stride + ids[s]) : -INFINITY;
    weigh<kLanes>(args, row, valid, lane, softmax, ids, chosen);
}

static __global__ void __launch_bounds__(32 * kMaxWarps) topk_block_kernel(epmoe_topk_args_t args)
{
    extern __shared__ __align__(16) float shared[];
    int32_t thread = threadIdx.x;
    int64_t row = blockIdx.x;
    epmoei_begin_dependent();
    if (row >= epmoei_device_tokens(args.num_tokens_dev, args.num_tokens)) return;

    float logits[kBlockValues];
    uint32_t keys[kBlockValues];
    int32_t ids[1] = {};
    int32_t count = max(0, min(kBlockValues, args.num_experts - thread * kBlockValues));
    load_logits(args, row * args.logits_stride + thread * kBlockValues, count, logits);
    softmax_t softmax =
        prepare<0>(args, logits, count, thread, blockDim.x, shared, shared + blockDim.x * kBlockValues, keys);
    /* prepare ends behind a barrier after its last use of shared memory, unless it did not use it. */
    select_in_block(keys, args.top_k, (uint32_t *)shared, ids);
    if (thread >= 32) return;
    float chosen[1] = {thread < args.top_k ? load_logit(args, row * args.logits_stride + ids[0]) : -INFINITY};
    weigh<32>(args, row, true, thread, softmax, ids, chosen);
}

/* A warp per row. */
static __global__ void __launch_bounds__(kMixerThreads) topk_mixer_kernel(epmoe_topk_args_t args)
{
    __shared__ mixer_terms_t terms[kMixerThreads / 32];
    const int64_t row = ((int64_t)blockIdx.x * kMixerThreads + threadIdx.x) / 32;
    epmoei_begin_dependent();
    if (row >= epmoei_device_tokens(args.num_tokens_dev, args.num_tokens)) return;
    mix_row(args, row, &terms[threadIdx.x / 32],
            [&](int32_t e) { return load_logit(args, row * args.logits_stride + e); });
}

/* ------------------------------------------------------------------------------------------------------- launch */

template <int kLanes, int kValues>
static cudaError_t launch_rows(const epmoe_topk_args_t *args, int32_t tail_floats, epmoe_stream_t stream)
{
    const int32_t kRows = kRowThreads / kLanes;
    int32_t team_floats = tail_floats ? kLanes * kValues + tail_floats : 0;
    unsigned blocks = (unsigned)epmoei_ceil_div(args->num_tokens, kRows);
    size_t shared_bytes = (size_t)(kRows * team_floats) * sizeof(float);
    return epmoei_launch_dependent(topk_rows_kernel<kLanes, kValues>, blocks, kRowThreads, shared_bytes, stream, *args,
                                   team_floats);
}

static cudaError_t launch_choice(const epmoe_topk_args_t *args, epmoe_stream_t stream)
{
    bool grouped = args->topk_group < args->n_group;
    bool softmax = args->scoring == EPMOE_SCORING_SOFTMAX;
    int32_t groups = grouped ? (int32_t)epmoei_round_up(args->n_group, 4) : 0;
    int32_t sums = softmax ? kSumLanes : 0;
    int32_t tail_floats = groups > sums ? groups : sums;
    if (args->num_experts <= 8) return launch_rows<1, 8>(args, groups, stream);
    if (args->num_experts <= 32) return launch_rows<4, 8>(args, groups, stream);
    if (args->num_experts <= 64) return launch_rows<32, 2>(args, tail_floats, stream);
    if (args->num_experts <= 128) return launch_rows<32, 4>(args, tail_floats, stream);
    if (args->num_experts <= 256) return launch_rows<32, 8>(args, tail_floats, stream);
    if (args->num_experts <= 512) return launch_rows<32, 16>(args, tail_floats, stream);
    unsigned threads = (unsigned)(32 * epmoei_ceil_div(args->num_experts, 32 * kBlockValues));
    size_t shared_bytes = (threads * kBlockValues + (size_t)tail_floats) * sizeof(float);
    return epmoei_launch_dependent(topk_block_kernel, (unsigned)args->num_tokens, threads, shared_bytes, stream, *args);
}

extern "C" epmoe_status_t epmoei_topk_sm80(const epmoe_topk_args_t *args, epmoe_stream_t stream)
{
    EPMOEI_CHECK_ALIGNED(args->logits, 16);
    EPMOEI_CHECK_ALIGNED(args->selection_bias, 16);
    EPMOEI_CHECK_ALIGNED(args->ids, 4);
    EPMOEI_CHECK_ALIGNED(args->weights, 4);
    EPMOEI_CHECK_ALIGNED(args->num_tokens_dev, 4);
    epmoe_topk_args_t choice = *args;
    choice.scoring = choice_scoring(args->scoring);
    EPMOEI_CHECK(epmoei_cuda_status((int32_t)launch_choice(&choice, stream), "epmoe_topk"));
    if (args->scoring != EPMOE_SCORING_SPARSE_MIXER) return EPMOE_OK;
    const unsigned blocks = (unsigned)epmoei_ceil_div(args->num_tokens, kMixerThreads / 32);
    return epmoei_cuda_status(
        (int32_t)epmoei_launch_dependent(topk_mixer_kernel, blocks, kMixerThreads, 0, stream, *args), "epmoe_topk");
}
