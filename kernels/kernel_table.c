#include "kernels/kernel_table.h"

#include "base/device.h"
#include "kernels/align.h"
#include "kernels/dequant.h"
#include "kernels/experts_few.h"
#include "kernels/grouped_gemm.h"
#include "kernels/grouped_gemm_fp8.h"
#include "kernels/grouped_gemm_quant.h"
#include "kernels/pack_tiles.h"
#include "kernels/permute.h"
#include "kernels/quantize_fp8.h"
#include "kernels/route.h"
#include "kernels/scatter_rows.h"
#include "kernels/silu_and_mul.h"
#include "kernels/sum.h"
#include "kernels/topk.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static epmoei_kernel_table_t cpu_table;
static epmoei_cpu_tier_t cpu_tier;
static char bad_arch[64];
#if EPMOE_HAVE_CUDA
static epmoei_kernel_table_t sm80_table, sm90_table;
#endif
static int32_t cuda_tier; /* 0 = masked, 80 or 90: the highest that EPMOE_ARCH lets through */

static epmoei_cpu_tier_t best_cpu_tier(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        return EPMOEI_CPU_AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return EPMOEI_CPU_AVX2;
#endif
    return EPMOEI_CPU_GENERIC;
}

static void init_tables(void)
{
    const char *arch = getenv("EPMOE_ARCH");
    if (arch && *arch && strcmp(arch, "ref") && strcmp(arch, "cpu") && strcmp(arch, "sm80") && strcmp(arch, "sm90"))
        strncpy(bad_arch, arch, sizeof bad_arch - 1);
    cpu_tier = arch && !strcmp(arch, "ref") ? EPMOEI_CPU_REF : best_cpu_tier();

    cuda_tier = 90;
    if (arch && (!strcmp(arch, "ref") || !strcmp(arch, "cpu"))) cuda_tier = 0;
    if (arch && !strcmp(arch, "sm80")) cuda_tier = 80;

#if EPMOE_HAVE_CUDA
    sm80_table = (epmoei_kernel_table_t){
        .topk = epmoei_topk_sm80,
        .align = epmoei_align_sm80,
        .align_workspace = epmoei_align_workspace_sm80,
        .permute = epmoei_permute_sm80,
        .unpermute = epmoei_unpermute_sm80,
        .grouped_gemm = epmoei_grouped_gemm_sm80,
        .grouped_gemm_workspace = epmoei_grouped_gemm_workspace_sm80,
        .silu_and_mul = epmoei_silu_and_mul_sm80,
        .sum = epmoei_sum_sm80,
        .experts_few_gate_up = epmoei_experts_few_gate_up_sm80,
        .experts_few_down = epmoei_experts_few_down_sm80,
        .route = epmoei_route_sm80,
        .quantize_fp8 = epmoei_quantize_fp8_sm80,
        .dequant = epmoei_dequant_sm80,
        .pack_tiles = epmoei_pack_tiles_sm80,
        .grouped_gemm_fp8 = epmoei_grouped_gemm_quant_sm80,
        .grouped_gemm_fp8_workspace = epmoei_grouped_gemm_quant_workspace_sm80,
        .grouped_gemm_w4 = epmoei_grouped_gemm_quant_sm80,
        .grouped_gemm_w4_workspace = epmoei_grouped_gemm_quant_workspace_sm80,
    };
    sm90_table = sm80_table;
    sm90_table.grouped_gemm = epmoei_grouped_gemm_sm90;
    sm90_table.grouped_gemm_chained = epmoei_grouped_gemm_chained_sm90;
    sm90_table.grouped_gemm_workspace = epmoei_grouped_gemm_workspace_sm90;
    sm90_table.grouped_gemm_w4 = epmoei_grouped_gemm_w4_sm90;
    sm90_table.grouped_gemm_w4_chained = epmoei_grouped_gemm_w4_chained_sm90;
    sm90_table.grouped_gemm_w4_workspace = epmoei_grouped_gemm_w4_workspace_sm90;
    sm90_table.grouped_gemm_fp8 = epmoei_grouped_gemm_fp8_sm90;
    sm90_table.grouped_gemm_fp8_workspace = epmoei_grouped_gemm_fp8_workspace_sm90;
    sm90_table.grouped_gemm_fp8_rows = epmoei_grouped_gemm_fp8_rows_sm90;
    sm90_table.gather_coded_rows = epmoei_gather_coded_rows_sm90;
    sm90_table.scatter_rows = epmoei_scatter_rows_sm90;
#endif
    cpu_table = (epmoei_kernel_table_t){
        .topk = epmoei_topk_ref,
        .align = epmoei_align_ref,
        .align_workspace = epmoei_align_workspace_ref,
        .permute = epmoei_permute_ref,
        .unpermute = epmoei_unpermute_ref,
        .grouped_gemm = epmoei_grouped_gemm_ref,
        .grouped_gemm_workspace = epmoei_grouped_gemm_workspace_ref,
        .silu_and_mul = epmoei_silu_and_mul_ref,
        .sum = epmoei_sum_ref,
        .quantize_fp8 = epmoei_quantize_fp8_ref,
        .dequant = epmoei_dequant_ref,
        .pack_tiles = epmoei_pack_tiles_cpu,
    };
    if (cpu_tier == EPMOEI_CPU_REF) return;
    cpu_table.topk = epmoei_topk_cpu;
    cpu_table.permute = epmoei_permute_cpu;
    cpu_table.unpermute = epmoei_unpermute_cpu;
    cpu_table.grouped_gemm = epmoei_grouped_gemm_cpu;
    cpu_table.grouped_gemm_workspace = epmoei_grouped_gemm_workspace_cpu;
    cpu_table.silu_and_mul = epmoei_silu_and_mul_cpu;
    cpu_table.sum = epmoei_sum_cpu;
    cpu_table.quantize_fp8 = epmoei_quantize_fp8_cpu;
    cpu_table.dequant = epmoei_dequant_cpu;
}

epmoei_cpu_tier_t epmoei_cpu_tier(void)
{
    pthread_once(&once, init_tables);
    return cpu_tier;
}

/* The kernels start at compute capability 8.0. */
static bool has_usable_device(void)
{
    const epmoei_device_info_t *device = epmoei_device_current();
    return device && device->arch >= 80;
}

epmoe_status_t epmoe_backend_resolve(epmoe_backend_t backend, epmoe_backend_t *resolved)
{
    if (!resolved) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "resolved is NULL");
    pthread_once(&once, init_tables);
    if (bad_arch[0])
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "EPMOE_ARCH is '%s': expected ref, cpu, sm80 or sm90",
                           bad_arch);
    switch (backend) {
    case EPMOE_BACKEND_CPU: *resolved = EPMOE_BACKEND_CPU; return EPMOE_OK;
    case EPMOE_BACKEND_AUTO:
        *resolved = cuda_tier && has_usable_device() ? EPMOE_BACKEND_CUDA : EPMOE_BACKEND_CPU;
        return EPMOE_OK;
    case EPMOE_BACKEND_CUDA:
        if (!cuda_tier)
            return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "backend is cuda: EPMOE_ARCH=%s masks it",
                               getenv("EPMOE_ARCH"));
        if (epmoei_device_count() == 0)
            return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "backend is cuda: %s", epmoei_device_absence());
        if (!has_usable_device())
            return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "backend is cuda: the current device is older than sm_80");
        *resolved = EPMOE_BACKEND_CUDA;
        return EPMOE_OK;
    }
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "backend is %d: expected AUTO, CPU or CUDA", (int)backend);
}

int32_t epmoei_cuda_tier(void)
{
    pthread_once(&once, init_tables);
    const epmoei_device_info_t *device = epmoei_device_current();
    /* wgmma and TMA as compiled for sm_90a exist on 9.0 alone. */
    return device && device->arch == 90 && cuda_tier == 90 ? 90 : 80;
}

epmoe_status_t epmoei_kernels(epmoe_backend_t backend, const epmoei_kernel_table_t **table)
{
    epmoe_backend_t resolved;
    EPMOEI_CHECK(epmoe_backend_resolve(backend, &resolved));
    *table = &cpu_table;
#if EPMOE_HAVE_CUDA
    if (resolved == EPMOE_BACKEND_CUDA) {
        EPMOEI_CHECK(epmoei_error_word_check());
        *table = epmoei_cuda_tier() == 90 ? &sm90_table : &sm80_table;
    }
#endif
    return EPMOE_OK;
}

const char *epmoe_backend_arch(epmoe_backend_t backend)
{
    static const char *const names[] = {"ref", "cpu-generic", "cpu-avx2", "cpu-avx512"};
    epmoe_backend_t resolved;
    if (epmoe_backend_resolve(backend, &resolved) != EPMOE_OK) return "none";
    if (resolved == EPMOE_BACKEND_CUDA) return epmoei_cuda_tier() == 90 ? "sm90" : "sm80";
    return names[cpu_tier];
}
