/* Which kernel runs an op on a backend: the reference first, then each tier that this machine has overwrites the
 * entries it implements. EPMOE_ARCH=ref|cpu|sm80|sm90 masks the tiers above it (on the CPU backend sm80 and sm90 mean
 * cpu), so that every tier can be tested on a better machine. */
#ifndef EPMOEI_KERNEL_TABLE_H
#define EPMOEI_KERNEL_TABLE_H

#include "base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

struct epmoei_route_args_t;
struct epmoei_fp8_rows_t;
struct epmoei_coded_rows_t;
struct epmoei_scatter_rows_args_t;

/* Kernels get arguments that the op's public entry has checked and normalised: every default is filled in, T > 0
 * (align: T >= 0), and every pointer that the op needs is there. A NULL entry means NOT_SUPPORTED on that backend. */
typedef struct epmoei_kernel_table_t {
    epmoe_status_t (*topk)(const epmoe_topk_args_t *args, epmoe_stream_t stream);
    epmoe_status_t (*align)(const epmoe_align_args_t *args, epmoe_stream_t stream);
    epmoe_status_t (*permute)(const epmoe_permute_args_t *args, epmoe_stream_t stream);
    epmoe_status_t (*unpermute)(const epmoe_unpermute_args_t *args, epmoe_stream_t stream);
    epmoe_status_t (*grouped_gemm)(const epmoe_grouped_gemm_args_t *args, epmoe_stream_t stream);
    /* For epmoei_grouped_gemm_chained; NULL where grouped_gemm serves. */
    epmoe_status_t (*grouped_gemm_chained)(const epmoe_grouped_gemm_args_t *args, int32_t *dealt,
                                           epmoe_stream_t stream);
    int64_t (*grouped_gemm_workspace)(const epmoe_grouped_gemm_args_t *args);
    int64_t (*align_workspace)(const epmoe_align_args_t *args);
    epmoe_status_t (*silu_and_mul)(const epmoe_silu_and_mul_args_t *args, epmoe_stream_t stream);
    epmoe_status_t (*sum)(const epmoe_sum_args_t *args, epmoe_stream_t stream);
    /* CUDA alone, for what epmoei_experts_few_can or _quant_can accepts; `down` right after `gate_up`. */
    epmoe_status_t (*experts_few_gate_up)(const epmoe_experts_args_t *args, void *h, epmoe_stream_t stream);
    epmoe_status_t (*experts_few_down)(const epmoe_experts_args_t *args, const void *h, epmoe_stream_t stream);
    epmoe_status_t (*route)(const struct epmoei_route_args_t *args, epmoe_stream_t stream); /* CUDA alone */
    /* CUDA alone: grouped_gemm of FP8_BLOCK weights, and of W4 and MXFP4 (kernels/grouped_gemm_quant.h); each tier
     * overwrites the formats that it has a kernel for. On the CPU grouped_gemm takes every format. */
    epmoe_status_t (*grouped_gemm_fp8)(const epmoe_grouped_gemm_args_t *args, epmoe_stream_t stream);
    int64_t (*grouped_gemm_fp8_workspace)(const epmoe_grouped_gemm_args_t *args);
    /* Hopper alone: the same of rows that are quantised already, and to such, and what brings rows that arrived in FP8
     * into the sorted order (kernels/grouped_gemm_fp8.h). */
    epmoe_status_t (*grouped_gemm_fp8_rows)(const epmoe_grouped_gemm_args_t *args, const struct epmoei_fp8_rows_t *x,
                                            const struct epmoei_fp8_rows_t *y, epmoe_stream_t stream);
    epmoe_status_t (*gather_coded_rows)(const epmoe_grouped_gemm_args_t *args, const struct epmoei_coded_rows_t *from,
                                        const struct epmoei_fp8_rows_t *to, epmoe_stream_t stream);
    /* Hopper alone: tokens to the places of their slots, for products that want their rows in the sorted order
     * (kernels/scatter_rows.h). */
    epmoe_status_t (*scatter_rows)(const struct epmoei_scatter_rows_args_t *args, epmoe_stream_t stream);
    epmoe_status_t (*grouped_gemm_w4)(const epmoe_grouped_gemm_args_t *args, epmoe_stream_t stream);
    epmoe_status_t (*grouped_gemm_w4_chained)(const epmoe_grouped_gemm_args_t *args, int32_t *dealt,
                                              epmoe_stream_t stream);
    int64_t (*grouped_gemm_w4_workspace)(const epmoe_grouped_gemm_args_t *args);
    epmoe_status_t (*quantize_fp8)(const epmoe_quantize_fp8_args_t *args, epmoe_stream_t stream);
    epmoe_status_t (*dequant)(const epmoe_dequant_args_t *args, epmoe_stream_t stream);
    epmoe_status_t (*pack_tiles)(const epmoe_pack_tiles_args_t *args, epmoe_stream_t stream);
} epmoei_kernel_table_t;

/* `backend` as the caller gave it; NOT_SUPPORTED (with the reason) when it cannot run here. */
epmoe_status_t epmoei_kernels(epmoe_backend_t backend, const epmoei_kernel_table_t **table);

/* What EPMOE_ARCH and the machine allow on the CPU backend, best last. */
typedef enum epmoei_cpu_tier_t {
    EPMOEI_CPU_REF = 0,
    EPMOEI_CPU_GENERIC = 1,
    EPMOEI_CPU_AVX2 = 2,
    EPMOEI_CPU_AVX512 = 3,
} epmoei_cpu_tier_t;
epmoei_cpu_tier_t epmoei_cpu_tier(void);
/* 80 or 90: the tier whose kernels run on the current device. A launcher of the sm80 tier asks it whether an sm90
 * kernel takes over. */
int32_t epmoei_cuda_tier(void);

/* A byte and flop count of one call; time >= max(bytes / bandwidth, flops / peak). */
typedef struct epmoei_floor_t {
    double bytes;
    double flops;
} epmoei_floor_t;

#ifdef __cplusplus
}
#endif

#endif
