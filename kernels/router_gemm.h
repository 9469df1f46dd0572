/* The router's product in parts: logits[T,E] = x[T,d] w[E,d]^T + bias[E], fp32 and never rounded. The kernel leaves one
 * fp32 matrix per part of d; whoever reads the logits adds them, then the bias.
 *
 * Contract of the kernel:
 *   order       a function of d alone (epmoei_router_parts), so that a token's logits do not depend on T, on the other
 *               tokens, on the tile or on the device's size: a chain of k steps from 0, chains added ascending from 0
 *               to a part, parts added ascending from 0, then the bias
 *   edges       any T, any E 1..4096, d a multiple of 8
 *   alignment   x and w 16 bytes, partials 16
 *   aliasing    none
 *   padding     rows of x and partials from the actual T on are neither read nor written; columns E..row_stride of a
 *               row of partials hold anything
 *   NaN         flows through, to its own token only
 *   floor       bytes = b*(T*d + E*d) + 4*T*E, flops = 2*T*E*d
 */
#ifndef EPMOEI_ROUTER_GEMM_H
#define EPMOEI_ROUTER_GEMM_H

#include "kernels/kernel_table.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { EPMOEI_ROUTER_MAX_PARTS = 8, EPMOEI_ROUTER_MAX_CHAIN = 256 };

/* How d is cut, and how partials lie: [num_parts,T,row_stride]. */
typedef struct epmoei_router_parts_t {
    int32_t num_parts;
    int32_t chain;      /* k of a chain: 128 or 256; the last of all may be shorter */
    int32_t part;       /* k of a part: a multiple of 4 chains; the last may be shorter */
    int32_t row_stride; /* E rounded up to 16, so that rows are whole vectors */
} epmoei_router_parts_t;
epmoei_router_parts_t epmoei_router_parts(int32_t hidden, int32_t num_experts);

typedef struct epmoei_router_gemm_args_t {
    int32_t num_tokens;            /* T, of these rows */
    int32_t first_token;           /* the number of these rows' first among those that num_tokens_dev counts */
    const int32_t *num_tokens_dev; /* optional */
    int32_t num_experts;
    int32_t hidden;
    epmoe_dtype_t dtype; /* of x and w: BF16 or F16 */
    const void *x;       /* [T,d] */
    const void *weight;  /* [E,d] */
    float *partials;
    uint32_t *zeros; /* optional: num_zeros words set to 0 on the way, for the kernel that comes next */
    int32_t num_zeros;
} epmoei_router_gemm_args_t;

epmoe_status_t epmoei_router_gemm_sm80(const epmoei_router_gemm_args_t *args, epmoe_stream_t stream);

/* The logits at once, on the host: plain dot products in double, rounded once. */
void epmoei_router_gemm_ref(const epmoei_router_gemm_args_t *args, const float *bias, float *logits);

#ifdef __cplusplus
}
#endif

#endif
