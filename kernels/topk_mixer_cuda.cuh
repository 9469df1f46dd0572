/* SPARSE_MIXER's weights. Its ids are those of TOPK_SOFTMAX: the kernels that choose take it for that, and a kernel of
 * its own follows them, so that the other scorings have nothing of it to carry. The CPU's arithmetic, operation for
 * operation, as in topk_cuda.cuh. */
#ifndef EPMOEI_TOPK_MIXER_CUDA_CUH
#define EPMOEI_TOPK_MIXER_CUDA_CUH

#include "kernels/topk_cuda.cuh"

static const int kMixerThreads = 128; /* of a block of rows */

/* A warp's scratch: the terms of each choice's sum, 32 experts at a time; rows apart by one bank. */
struct mixer_terms_t {
    float of[EPMOE_MAX_TOP_K][33];
};

/* What a scoring means to the kernels that choose. */
static inline epmoe_scoring_t choice_scoring(epmoe_scoring_t scoring)
{
    return scoring == EPMOE_SCORING_SPARSE_MIXER ? EPMOE_SCORING_TOPK_SOFTMAX : scoring;
}

/* 0 / 0 is close. */
__device__ __forceinline__ bool is_far_off(float logit, float top, float jitter)
{
    const float size = fabsf(logit) > top ? fabsf(logit) : top;
    return __fdiv_rn(__fsub_rn(top, logit), size) > __fmul_rn(2.0f, jitter);
}

/* A warp's row, whose ids are chosen; logit_at(e) is the logit of an expert, tamed. */
template <typename LogitAt>
__device__ __forceinline__ void mix_row(const epmoe_topk_args_t &args, int64_t row, mixer_terms_t *terms,
                                        LogitAt logit_at)
{
    const int32_t lane = threadIdx.x % 32, top_k = args.top_k;
    const int32_t id = lane < top_k ? args.ids[row * top_k + lane] : -1;
    const float top = id >= 0 ? logit_at(id) : -INFINITY;
    float sum = 0.0f;
    for (int32_t first = 0; first < args.num_experts; first += 32) {
        const int32_t e = first + lane;
        const float logit = e < args.num_experts ? logit_at(e) : -INFINITY;
        bool left = true; /* not chosen before */
        for (int32_t j = 0; j < top_k; j++) {
            const float top_j = __shfl_sync(kAll, top, j);
            const int32_t id_j = __shfl_sync(kAll, id, j);
            const bool counts =
                left && logit != -INFINITY && top_j != -INFINITY && !is_far_off(logit, top_j, args.jitter);
            terms->of[j][lane] = counts ? exp_as_cpu(__fsub_rn(logit, top_j)) : 0.0f;
            if (id_j == e) left = false;
        }
        __syncwarp();
        if (lane < top_k)
#pragma unroll
            for (int i = 0; i < 32; i++) sum = __fadd_rn(sum, terms->of[lane][i]);
        __syncwarp();
    }
    const float weight = top == -INFINITY ? 0.0f : __fdiv_rn(1.0f, sum);
    float total = 0.0f;
    for (int32_t j = 0; j < top_k; j++) total = __fadd_rn(total, __shfl_sync(kAll, weight, j));
    if (lane >= top_k) return;
    const float share = !args.renormalize ? weight : total < FLT_MIN ? 0.0f : __fdiv_rn(weight, total);
    args.weights[row * top_k + lane] = fmaxf(fminf(__fmul_rn(share, args.scale), FLT_MAX), -FLT_MAX);
}

#endif
