/* Every op of the kernel table on the device against its reference on the host. Prints a line per op and group of
 * shapes, with times; exits 1 when anything differs, 77 without a device. EPMOE_ARCH chooses the tier, EPMOE_TEST_SEED
 * the inputs; arguments choose ops by name. --small in front of them does little of everything, for compute-sanitizer.
 */
#include "tests/checkcuda/check.h"

#include <cuda_runtime_api.h>
#include <stdio.h>

static const struct {
    const char *name;
    void (*check)(testing_rng_t *rng);
} checks[] = {{"topk", check_topk},
              {"align", check_align},
              {"permute", check_permute},
              {"unpermute", check_unpermute},
              {"silu_and_mul", check_silu_and_mul},
              {"sum", check_sum},
              {"grouped_gemm", check_grouped_gemm},
              {"gemm_w4", check_gemm_w4},
              {"grouped_gemm_fp8", check_gemm_fp8},
              {"experts_few", check_experts_few},
              {"route", check_route},
              {"dequant", check_dequant},
              {"pack_tiles", check_pack_tiles},
              {"quantize_fp8", check_quantize_fp8},
              {"gemm_quant", check_gemm_quant},
              {"few_quant", check_few_quant},
              {"rms_norm", check_rms_norm},
              {"linear", check_linear},
              {"rope", check_rope},
              {"qk_norm_rope", check_qk_norm_rope},
              {"cache_write", check_cache_write},
              {"attention", check_attention},
              {"sample", check_sample},
              {"spec_verify", check_spec_verify},
              {"large", check_large}};

static bool chosen(const char *name, int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        if (!strcmp(argv[i], name)) return true;
    return argc == 1;
}

int main(int argc, char **argv)
{
    if (epmoei_device_count() == 0) {
        printf("skipped: %s\n", epmoei_device_absence());
        return 77;
    }
    const epmoei_device_info_t *device = epmoei_device_current();
    if (!device || cudaStreamCreateWithFlags(&check_stream, cudaStreamNonBlocking) != cudaSuccess) {
        printf("the device cannot be used: %s\n", cudaGetErrorString(cudaGetLastError()));
        return 1;
    }
    check_small = argc > 1 && !strcmp(argv[1], "--small");
    if (check_small) argc--, argv++;
    uint64_t seed = testing_seed();
    printf("checkcuda on %s, tier %s, EPMOE_TEST_SEED=%llu\n", device->name, epmoe_backend_arch(EPMOE_BACKEND_CUDA),
           (unsigned long long)seed);
    double start = epmoei_now_seconds();
    bool any = false;
    for (size_t i = 0; i < sizeof checks / sizeof *checks; i++) {
        if (!chosen(checks[i].name, argc, argv)) continue;
        testing_rng_t rng = testing_rng(seed + i);
        double op_start = epmoei_now_seconds();
        checks[i].check(&rng);
        printf("      %-14s %-44s %21.2f s\n", checks[i].name, "together", epmoei_now_seconds() - op_start);
        any = true;
    }
    printf("      %-14s %-44s %21.2f s\n", "all", "", epmoei_now_seconds() - start);
    cudaStreamDestroy(check_stream);
    if (!any) printf("no op of that name\n");
    return any ? check_exit_code() : 1;
}
