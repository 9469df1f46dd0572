/* A projection by one matrix; the maths stand at epmoe_linear_args_t.
 *
 * Contract of every kernel:
 *   order       the sum over K is fp32, its order the kernel's own and the same in every call with these sizes,
 *               alignments and device; scales of TENSOR and TOKEN may be applied to it or to its terms
 *   rounding    once, to y_dtype, behind the bias
 *   quantised   x as epmoe_quantize_fp8 of the same backend has it, bit for bit
 *   edges       any T, N, K >= 1 on the CPU; T = 0 is a no-op
 *   alignment   CPU: element; CUDA: 16 bytes, x_scale 4
 *   aliasing    none
 *   NaN         of x or its scale stays in its row of y, of w or its scale in its column
 *
 * The reference is plain loops. Otherwise it is the grouped GEMM with one expert, whose many-row path on the CPU is
 * BLAS; on CUDA cuBLASLt (linear_cublas.h) multiplies plain matrices. x of TENSOR and TOKEN is quantised in front. */
#ifndef EPMOEI_LINEAR_OP_H
#define EPMOEI_LINEAR_OP_H

#include "dense_layers/dense_table.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Checks and normalises: after it every default of `out` is filled in, group_size and group_rows of -1 are INT32_MAX.
 */
epmoe_status_t epmoei_linear_check(const epmoe_linear_args_t *args, epmoe_linear_args_t *out);

/* The least work: x, w, scales and bias once in, y once out. */
epmoei_floor_t epmoei_linear_floor(const epmoe_linear_args_t *args);

/* Scales of x [T,K], 0 where there are none. */
int64_t epmoei_linear_x_scales(const epmoe_linear_args_t *args);
/* Whether the scales of x are the same over all of K. */
static inline bool epmoei_linear_scales_outside(const epmoe_linear_args_t *args)
{
    return args->x_quant == EPMOE_GRANULARITY_TENSOR || args->x_quant == EPMOE_GRANULARITY_TOKEN;
}

/* Whether x is quantised here, and not by the grouped GEMM. */
static inline bool epmoei_linear_makes_codes(const epmoe_linear_args_t *args)
{
    return epmoei_linear_scales_outside(args) && args->x_dtype != EPMOE_F8_E4M3;
}

/* What a call keeps in its workspace; NULL for what it does without. */
typedef struct epmoei_linear_space_t {
    uint8_t *codes; /* x as E4M3 [T,K] */
    float *x_scale; /* its scales */
    void *inner;    /* of the product */
    int64_t inner_bytes;
    int64_t bytes; /* of all */
} epmoei_linear_space_t;

/* base NULL: counts. `backend` is resolved. */
epmoe_status_t epmoei_linear_layout(void *base, const epmoe_linear_args_t *args, epmoe_backend_t backend,
                                    epmoei_linear_space_t *space);
/* The same in the call's workspace; INVALID_ARGUMENT when it is too small. */
epmoe_status_t epmoei_linear_place(const epmoe_linear_args_t *args, epmoe_backend_t backend,
                                   epmoei_linear_space_t *space);
/* The codes of x and their scales into the workspace. */
epmoe_status_t epmoei_linear_quantize(const epmoe_linear_args_t *args, epmoe_backend_t backend,
                                      const epmoei_linear_space_t *space, epmoe_stream_t stream);

/* The grouped GEMM with one expert, behind epmoei_linear_quantize. */
epmoe_grouped_gemm_args_t epmoei_linear_gemm_args(const epmoe_linear_args_t *args, epmoe_backend_t backend,
                                                  const epmoei_linear_space_t *space);

epmoe_status_t epmoei_linear_ref(const epmoe_linear_args_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_linear_cpu(const epmoe_linear_args_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_linear_sm80(const epmoe_linear_args_t *args, epmoe_stream_t stream);

#ifdef __cplusplus
}
#endif

#endif
