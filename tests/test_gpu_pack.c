/* A caller's own 4-bit weights on a device: packed there, computed on by the ops, against the CPU on the rows. */
#include "base/dtype.h"
#include "kernels/quant_formats.h"
#include "tests/gpu_testing.h"
#include "tests/quant_case.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>

enum { kD = 160, kF = 96, kE = 4, kK = 2, kMostTokens = 90 };

TestSuite(gpu_pack, .timeout = 300);

typedef struct device_weight_t {
    epmoe_weight_t rows;  /* in device memory */
    epmoe_weight_t tiles; /* as packed */
} device_weight_t;

static device_weight_t put(const quant_case_t *made, int32_t n, int32_t k, bool gated)
{
    epmoe_weight_t filled = made->weight;
    cr_assert_eq(epmoei_quant_check_weight(&filled, "weight", k), EPMOE_OK, "%s", epmoe_last_error());
    const epmoei_quant_sizes_t sizes = epmoei_quant_sizes(filled.format, n, k, filled.group_size, 0);
    device_weight_t device = {made->weight, EPMOE_WEIGHT_INIT};
    device.rows.data = gpu_copy_of(made->weight.data, kE * sizes.data_bytes);
    device.rows.scales = gpu_copy_of(made->weight.scales, kE * sizes.scales * epmoe_dtype_size(filled.scales_dtype));
    device.rows.zeros = made->weight.zeros ? gpu_copy_of(made->weight.zeros, kE * sizes.zeros_bytes) : NULL;
    epmoe_pack_tiles_args_t args = EPMOE_PACK_TILES_ARGS_INIT;
    epmoe_pack_tiles_size_t size = EPMOE_PACK_TILES_SIZE_INIT;
    args.backend = EPMOE_BACKEND_CUDA;
    args.num_experts = kE, args.n = n, args.k = k, args.gated = gated, args.weight = device.rows;
    cr_assert_eq(epmoe_pack_tiles_size(&args, &size), EPMOE_OK, "%s", epmoe_last_error());
    args.data = gpu_buffer(size.data_bytes, 0), args.scales = gpu_buffer(size.scales_bytes, 0);
    args.zeros = size.zeros_bytes ? gpu_buffer(size.zeros_bytes, 0) : NULL;
    cr_assert_eq(epmoe_pack_tiles(&args, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert(gpu_wait());
    cr_assert(gpu_guards_intact(args.data) && gpu_guards_intact(args.scales));
    device.tiles = size.tiles;
    device.tiles.data = args.data, device.tiles.scales = args.scales, device.tiles.zeros = args.zeros;
    return device;
}

static void drop(device_weight_t *device)
{
    const void *all[] = {device->rows.data,  device->rows.scales,  device->rows.zeros,
                         device->tiles.data, device->tiles.scales, device->tiles.zeros};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        if (all[i]) gpu_buffer_free((void *)(uintptr_t)all[i]);
}

static void run_experts(const epmoe_experts_args_t *cpu, const device_weight_t *gate_up, const device_weight_t *down)
{
    const int64_t tokens = cpu->num_tokens;
    uint16_t *y = malloc((size_t)(tokens * kD) * 2);
    double *expected = malloc((size_t)(tokens * kD) * sizeof *expected);
    epmoe_experts_args_t args = *cpu;
    cr_assert_eq(epmoe_experts_workspace_size(&args, &args.workspace_bytes), EPMOE_OK, "%s", epmoe_last_error());
    args.workspace = testing_buffer(args.workspace_bytes + 8, 0);
    args.y = y;
    cr_assert_eq(epmoe_experts(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    for (int64_t i = 0; i < tokens * kD; i++) expected[i] = (double)epmoei_load(y, EPMOE_BF16, i);
    testing_buffer_free(args.workspace);

    args = *cpu;
    args.backend = EPMOE_BACKEND_CUDA, args.layout = EPMOE_LAYOUT_PACKED;
    args.gate_up = gate_up->rows, args.down = down->rows;
    int64_t bytes;
    /* Rows look like tiles of another weight: nothing may be computed with them. */
    if (args.gate_up.format == EPMOE_FORMAT_W4 || args.gate_up.format == EPMOE_FORMAT_MXFP4) {
        cr_expect_eq(epmoe_experts_workspace_size(&args, &bytes), EPMOE_ERROR_NOT_SUPPORTED);
        cr_expect(strstr(epmoe_last_error(), "weight.storage is 0"), "%s", epmoe_last_error());
        cr_expect(strstr(epmoe_last_error(), "gate_up"), "%s", epmoe_last_error());
    }
    args.gate_up = gate_up->tiles, args.down = down->tiles;
    void *x = gpu_copy_of(cpu->x, tokens * kD * 2), *ids = gpu_copy_of(cpu->ids, tokens * kK * 4);
    void *weights = gpu_copy_of(cpu->weights, tokens * kK * 4), *out = gpu_buffer(tokens * kD * 2, 0);
    cr_assert_eq(epmoe_experts_workspace_size(&args, &args.workspace_bytes), EPMOE_OK, "%s", epmoe_last_error());
    args.x = x, args.ids = ids, args.weights = weights, args.y = out;
    args.workspace = gpu_buffer(args.workspace_bytes, 0);
    cr_assert_eq(epmoe_experts(&args, gpu_stream()), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert(gpu_wait());
    gpu_get(y, out, tokens * kD * 2);
    double error = testing_row_error(y, EPMOE_BF16, expected, tokens, kD);
    cr_expect(error <= 3e-2, "%s, %d tokens: off by %g", epmoe_format_string(cpu->gate_up.format), (int)tokens, error);
    cr_expect(gpu_guards_intact(out) && gpu_guards_intact(args.workspace));
    gpu_buffer_free(x), gpu_buffer_free(ids), gpu_buffer_free(weights), gpu_buffer_free(out);
    gpu_buffer_free(args.workspace);
    free(y), free(expected);
}

Test(gpu_pack, experts_on_a_callers_weights)
{
    GPU_TEST_NEEDS_DEVICE();
    static const struct {
        epmoe_format_t format;
        int32_t group;
    } cases[] = {{EPMOE_FORMAT_GPTQ, 32},
                 {EPMOE_FORMAT_AWQ, -1},
                 {EPMOE_FORMAT_CT_W4, 16},
                 {EPMOE_FORMAT_W4, 32},
                 {EPMOE_FORMAT_MXFP4, 0}};
    testing_rng_t rng = testing_rng(testing_seed());
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        quant_case_t gate_up =
            quant_case_make(&rng, cases[i].format, kE, 2 * kF, kD, cases[i].group, QUANT_INDEX_NONE, 0);
        quant_case_t down = quant_case_make(&rng, cases[i].format, kE, kD, kF, cases[i].group, QUANT_INDEX_NONE, 0);
        device_weight_t gate_up_device = put(&gate_up, 2 * kF, kD, true), down_device = put(&down, kD, kF, false);
        uint16_t x[kMostTokens * kD];
        int32_t ids[kMostTokens * kK];
        float weights[kMostTokens * kK];
        /* Gate and up are about one then; MXFP4's scales reach 2^8. */
        testing_fill_normal(&rng, x, EPMOE_BF16, kMostTokens * kD,
                            cases[i].format == EPMOE_FORMAT_MXFP4 ? 0x1p-12f : 0x1p-7f);
        for (int s = 0; s < kMostTokens * kK; s++) {
            ids[s] = testing_range(&rng, 0, kE - 1);
            weights[s] = testing_uniform(&rng, 0.2f, 1.0f);
        }
        epmoe_experts_args_t args = EPMOE_EXPERTS_ARGS_INIT;
        args.backend = EPMOE_BACKEND_CPU;
        args.top_k = kK, args.num_experts = kE, args.hidden = kD, args.intermediate = kF;
        args.dtype = EPMOE_BF16, args.layout = EPMOE_LAYOUT_GATE_FIRST;
        args.gate_up = gate_up.weight, args.down = down.weight;
        args.x = x, args.ids = ids, args.weights = weights;
        static const int32_t tokens[] = {1, 4, 5, kMostTokens};
        for (int t = 0; t < 4; t++) {
            args.num_tokens = tokens[t];
            run_experts(&args, &gate_up_device, &down_device);
        }
        drop(&gate_up_device), drop(&down_device);
        quant_case_free(&gate_up), quant_case_free(&down);
    }
}
