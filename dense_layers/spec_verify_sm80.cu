/* Verification of drafted tokens: a block per row. */
#include "dense_layers/spec_verify.h"
#include "dense_layers/token_draw_cuda.cuh"

namespace
{

struct verify_t {
    const int32_t *draft_ids;
    const float *draft_probs; /* or NULL */
    const float *target_probs;
    const float *uniform;
    int32_t *tokens;
    int32_t *accepted;
    int32_t *error_word;
    int32_t drafts;
    int32_t vocab;
};

/* The drafts that stand; `rejected`: the next one was turned down. One warp, 32 drafts at a time; an id behind the
 * first negative one is not used. */
__device__ __forceinline__ int32_t accept(const verify_t &p, int64_t row, bool &rejected)
{
    const int32_t lane = threadIdx.x % 32;
    rejected = false;
    for (int32_t first = 0; first < p.drafts; first += 32) {
        const int32_t g = first + lane;
        const int32_t id = g < p.drafts ? p.draft_ids[row * p.drafts + g] : -1;
        const uint32_t ends = __ballot_sync(kAllLanes, id < 0 || id >= p.vocab);
        const int32_t end = ends ? __ffs((int)ends) - 1 : 32; /* lanes below have a draft */
        bool turned_down = false;
        if (lane < end) {
            const double q = p.draft_probs ? (double)p.draft_probs[(row * p.drafts + g) * p.vocab + id] : 1.0;
            const double target = (double)p.target_probs[(row * (p.drafts + 1) + g) * p.vocab + id];
            turned_down = !(__dmul_rn((double)p.uniform[row * (p.drafts + 1) + g], q) < target);
        }
        const uint32_t downs = __ballot_sync(kAllLanes, turned_down);
        if (downs) {
            rejected = true;
            return first + __ffs((int)downs) - 1;
        }
        if (lane == end && g < p.drafts && id != -1) epmoei_count_bad(p.error_word, 1);
        if (end < 32) return first + end;
    }
    return p.drafts;
}

static __global__ void __launch_bounds__(kThreads, 2) verify_kernel(verify_t p)
{
    __shared__ draw_t draw;
    __shared__ int32_t shared_accepted, shared_rejected;
    epmoei_begin_dependent();
    const int64_t row = blockIdx.x;
    if (threadIdx.x < 32) {
        bool rejected;
        const int32_t accepted = accept(p, row, rejected);
        if (threadIdx.x == 0) shared_accepted = accepted, shared_rejected = rejected;
    }
    __syncthreads();
    const int32_t accepted = shared_accepted;
    const float *target = p.target_probs + (row * (p.drafts + 1) + accepted) * p.vocab;
    const float *taken = NULL;
    int32_t certain = -1;
    if (shared_rejected) {
        if (p.draft_probs)
            taken = p.draft_probs + (row * p.drafts + accepted) * p.vocab;
        else
            certain = p.draft_ids[row * p.drafts + accepted];
    }
    const bool vector = p.vocab % 4 == 0;
    const auto weigh = [&](int32_t first, int64_t(&w)[4]) {
        float own[4], less[4] = {};
        load_four(own, target, first, p.vocab, vector, 0.0f);
        if (taken) load_four(less, taken, first, p.vocab, vector, 0.0f);
#pragma unroll
        for (int i = 0; i < 4; i++) w[i] = first + i == certain ? 0 : probability_weight(own[i], less[i]);
    };
    int64_t total = add_pieces(&draw, p.vocab, weigh);
    if (total == 0 && (taken || certain >= 0)) {
        taken = NULL;
        certain = -1;
        total = add_pieces(&draw, p.vocab, weigh);
    }
    int32_t token = -1;
    if (total > 0)
        token = find_token(&draw, p.vocab, draw_target(p.uniform[row * (p.drafts + 1) + p.drafts], total), weigh);
    int32_t *tokens = p.tokens + row * (p.drafts + 1);
    for (int32_t g = threadIdx.x; g <= p.drafts; g += kThreads)
        tokens[g] = g < accepted ? p.draft_ids[row * p.drafts + g] : g == accepted ? token : -1;
    if (threadIdx.x == 0) p.accepted[row] = accepted;
}

} // namespace

extern "C" epmoe_status_t epmoei_spec_verify_sm80(const epmoe_spec_verify_args_t *args, epmoe_stream_t stream)
{
    EPMOEI_CHECK_ALIGNED(args->draft_ids, 4);
    EPMOEI_CHECK_ALIGNED(args->draft_probs, 16);
    EPMOEI_CHECK_ALIGNED(args->target_probs, 16);
    EPMOEI_CHECK_ALIGNED(args->uniform, 4);
    EPMOEI_CHECK_ALIGNED(args->tokens, 4);
    EPMOEI_CHECK_ALIGNED(args->accepted, 4);
    const verify_t p = {args->draft_ids, args->draft_probs,   args->target_probs, args->uniform,   args->tokens,
                        args->accepted,  epmoei_error_word(), args->num_drafts,   args->vocab_size};
    return epmoei_cuda_status(
        (int32_t)epmoei_launch_dependent(verify_kernel, dim3((unsigned)args->num_rows), dim3(kThreads), 0, stream, p),
        "epmoe_spec_verify");
}
