#include "kernels/router_gemm.h"

#include "base/dtype.h"

void epmoei_router_gemm_ref(const epmoei_router_gemm_args_t *args, const float *bias, float *logits)
{
    int64_t d = args->hidden, num_experts = args->num_experts;
    for (int64_t t = 0; t < args->num_tokens; t++)
        for (int64_t e = 0; e < num_experts; e++) {
            double sum = 0;
            for (int64_t k = 0; k < d; k++)
                sum += (double)epmoei_load(args->x, args->dtype, t * d + k) *
                       (double)epmoei_load(args->weight, args->dtype, e * d + k);
            logits[t * num_experts + e] = (float)(sum + (bias ? (double)bias[e] : 0));
        }
}
