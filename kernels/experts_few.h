/* The experts of very few tokens on CUDA: two kernels that read the chosen experts' weights once, at the speed of
 * memory. There is no order by expert, no buffer of slot outputs and, on plain weights, no tensor core; the maths stand
 * at epmoe_experts_args_t.
 *
 * Contract:
 *   gate_up     h[t*k+j,:] = round(act(x[t] w13[e]^T + b13[e]), dtype), e = ids[t,j]
 *   down        y[t,:] = round(sum over j ascending of weights[t,j] * (h[t*k+j] w2[e]^T + b2[e]) + addend[t] +
 *               residual[t], y_dtype)
 *   order       fp32; the order within a dot product is the kernel's own, and a token's bits do not depend on the other
 *               tokens nor on their number
 *   edges       what epmoei_experts_few_can says
 *   alignment   rows of elements 16 bytes, the other arrays 4
 *   aliasing    y may be x or residual
 *   ids         -1 adds nothing and neither its weights nor its row of h are read or written; any other id outside
 *               [0,E) counts as -1 and adds, once per call, to the error word (gate_up does)
 *   count       rows at num_tokens_dev and past it are neither read nor written
 *   NaN         flows through; it never spreads to another token
 *
 * Floor: bytes = distinct experts*3*d*f*b. */
#ifndef EPMOEI_EXPERTS_FEW_H
#define EPMOEI_EXPERTS_FEW_H

#include "base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A block of `down` holds what it knows of every slot in shared memory. */
enum { EPMOEI_EXPERTS_FEW_MOST_TOKENS = 8 };
/* The same of the kernels for quantised weights. */
enum { EPMOEI_EXPERTS_FEW_QUANT_MOST_TOKENS = 4 };

/* Both are functions of sizes, dtypes and formats alone. Whether the kernels can run: T in 1..8, k in 1..32,
 * activations and weights all bf16 or all fp16, d and f multiples of 8, f at most 262140. */
bool epmoei_experts_few_can(const epmoe_experts_args_t *args);
/* The same of those for quantised weights: T in 1..4, both weights FP8_BLOCK, W4 or MXFP4 as
 * kernels/grouped_gemm_quant.h wants them, groups (of W4 also) 32 or 64, multiples of 128 or all columns, without an
 * order of columns; no fp8_activations.
 * epmoei_experts_few_gate_up_sm80 and _down_sm80 take either kind. */
bool epmoei_experts_few_quant_can(const epmoe_experts_args_t *args);
/* Whether either can, and is the faster way. */
bool epmoei_experts_few_takes(const epmoe_experts_args_t *args);

/* h [T*k,f] of dtype, aligned to 16 bytes. Arguments that epmoei_experts_few_can or _quant_can accepts, every default
 * filled in.
 * `down` follows `gate_up` on the same stream: it may begin before gate_up has ended. */
epmoe_status_t epmoei_experts_few_gate_up_sm80(const epmoe_experts_args_t *args, void *h, epmoe_stream_t stream);
epmoe_status_t epmoei_experts_few_down_sm80(const epmoe_experts_args_t *args, const void *h, epmoe_stream_t stream);

/* Of the quantised. */
epmoe_status_t epmoei_experts_few_quant_gate_up_sm80(const epmoe_experts_args_t *args, void *h, epmoe_stream_t stream);
epmoe_status_t epmoei_experts_few_quant_down_sm80(const epmoe_experts_args_t *args, const void *h,
                                                  epmoe_stream_t stream);

/* The definition, on host pointers, of plain weights; num_tokens_dev too. Bad ids are not counted. */
epmoe_status_t epmoei_experts_few_gate_up_ref(const epmoe_experts_args_t *args, void *h);
epmoe_status_t epmoei_experts_few_down_ref(const epmoe_experts_args_t *args, const void *h);

#ifdef __cplusplus
}
#endif

#endif
