#include "kernels/grouped_gemm_fp8.h"

#include "tests/e4m3_oracle.h"
#include "tests/testing.h"

#include <criterion/criterion.h>

static epmoe_grouped_gemm_args_t product(int32_t n, int32_t k, epmoe_activation_t activation, epmoe_layout_t layout,
                                         int32_t group)
{
    epmoe_grouped_gemm_args_t args = EPMOE_GROUPED_GEMM_ARGS_INIT;
    args.n = n;
    args.k = k;
    args.activation = activation;
    args.layout = layout;
    args.weight.format = EPMOE_FORMAT_FP8_BLOCK;
    args.weight.group_size = group;
    args.fp8_activations = 1;
    args.x_dtype = args.y_dtype = EPMOE_BF16;
    return args;
}

Test(gemm_fp8, what_the_wgmma_kernel_takes)
{
    const struct {
        int32_t n, k;
        epmoe_activation_t activation;
        epmoe_layout_t layout;
        int32_t group;
        bool takes;
    } cases[] = {
        {28672, 4096, EPMOE_ACTIVATION_SILU, EPMOE_LAYOUT_PACKED, 0, true},
        {4096, 14336, EPMOE_ACTIVATION_NONE, EPMOE_LAYOUT_PACKED, 128, true},
        {272, 144, EPMOE_ACTIVATION_SILU, EPMOE_LAYOUT_PACKED, 0, true},      /* the last tile is not whole */
        {272, 144, EPMOE_ACTIVATION_SILU, EPMOE_LAYOUT_INTERLEAVED, 0, true}, /* nor the last block */
        {272, 144, EPMOE_ACTIVATION_SILU, EPMOE_LAYOUT_GATE_FIRST, 0, false}, /* up rows begin inside a block */
        {512, 144, EPMOE_ACTIVATION_SILU, EPMOE_LAYOUT_GATE_FIRST, 0, true},
        {272, 144, EPMOE_ACTIVATION_SILU, EPMOE_LAYOUT_GATE_FIRST, -1, true}, /* one block */
        {264, 144, EPMOE_ACTIVATION_SILU, EPMOE_LAYOUT_PACKED, 0, false},     /* 132 gates */
        {131, 144, EPMOE_ACTIVATION_NONE, EPMOE_LAYOUT_PACKED, 0, true},
        {256, 136, EPMOE_ACTIVATION_NONE, EPMOE_LAYOUT_PACKED, 0, false}, /* K */
        {256, 128, EPMOE_ACTIVATION_NONE, EPMOE_LAYOUT_PACKED, 64, false},
        {256, 512, EPMOE_ACTIVATION_NONE, EPMOE_LAYOUT_PACKED, 256, true},
        {256, 512, EPMOE_ACTIVATION_NONE, EPMOE_LAYOUT_PACKED, 192, false},
        {256, 256, EPMOE_ACTIVATION_NONE, EPMOE_LAYOUT_PACKED, 192, false}, /* a block ends inside a tile */
        {256, 128, EPMOE_ACTIVATION_NONE, EPMOE_LAYOUT_PACKED, 192, true},  /* it covers K */
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        epmoe_grouped_gemm_args_t args =
            product(cases[i].n, cases[i].k, cases[i].activation, cases[i].layout, cases[i].group);
        cr_expect_eq(epmoei_grouped_gemm_fp8_takes_sm90(&args), cases[i].takes, "case %zu", i);
        args.fp8_activations = 0;
        cr_expect_not(epmoei_grouped_gemm_fp8_takes_sm90(&args));
    }
    /* Blocks are square, or whole rows. */
    static const struct {
        int32_t group, rows;
        bool takes;
    } blocks[] = {{0, 128, true}, {128, 128, true}, {-1, -1, true}, {-1, INT32_MAX, true}, {-1, 1, true},
                  {-1, 5, true},  {128, 1, false},  {0, 64, false}, {128, -1, false}};
    for (size_t i = 0; i < sizeof blocks / sizeof blocks[0]; i++) {
        epmoe_grouped_gemm_args_t args = product(256, 512, EPMOE_ACTIVATION_NONE, EPMOE_LAYOUT_PACKED, blocks[i].group);
        args.weight.group_rows = blocks[i].rows;
        cr_expect_eq(epmoei_grouped_gemm_fp8_takes_sm90(&args), blocks[i].takes, "blocks %zu", i);
    }
}

/* 2 of 3 experts of [40,272] codes with a scale per row, 10 slots of 5 rows of x, fp32 y. */
Test(gemm_fp8, floor_by_hand)
{
    static const struct {
        epmoe_granularity_t quant;
        double x_bytes;
    } cases[] = {{0, 5 * 272 * 2},
                 {EPMOE_GRANULARITY_TENSOR, 5 * 272 + 4},
                 {EPMOE_GRANULARITY_TOKEN, 5 * (272 + 4)},
                 {EPMOE_GRANULARITY_BLOCK128, 5 * (272 + 3 * 4)}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        epmoe_grouped_gemm_args_t args = product(40, 272, EPMOE_ACTIVATION_NONE, EPMOE_LAYOUT_PACKED, -1), checked;
        args.num_experts = 3, args.max_rows = 10, args.x_row_divisor = 2;
        args.x = args.y = args.workspace = &checked, args.y_dtype = EPMOE_F32;
        args.expert_offsets = (const int32_t[]){0, 4, 4, 10};
        args.weight.data = args.weight.scales = &checked, args.weight.scales_dtype = EPMOE_F32;
        args.weight.group_rows = 1;
        if (cases[i].quant) {
            args.fp8_activations = 0, args.x_dtype = EPMOE_F8_E4M3;
            args.x_quant = cases[i].quant, args.x_scale = (const float *)&checked;
        }
        cr_assert_eq(epmoei_grouped_gemm_check(&args, &checked), EPMOE_OK, "%s", epmoe_last_error());
        const epmoei_floor_t least = epmoei_grouped_gemm_floor(&checked, 2, 10);
        cr_expect_eq(least.bytes, 2 * 40 * (272 + 4) + cases[i].x_bytes + 10 * 40 * 4, "x_quant %d: %g bytes",
                     (int)cases[i].quant, least.bytes);
        cr_expect_eq(least.flops, 2.0 * 10 * 40 * 272);
        if (cases[i].quant) cr_expect_eq(epmoei_grouped_gemm_floor(&checked, 0, 0).bytes, 0);
    }
}

Test(gemm_fp8, products_that_keep_h_quantised)
{
    epmoe_grouped_gemm_args_t up = product(512, 128, EPMOE_ACTIVATION_SILU, EPMOE_LAYOUT_PACKED, 0);
    epmoe_grouped_gemm_args_t down = product(128, 256, EPMOE_ACTIVATION_NONE, EPMOE_LAYOUT_PACKED, 0);
    cr_expect_not(epmoei_grouped_gemm_fp8_chains_sm90(&up, &down)); /* h is not sorted */
    up.y_sorted = down.x_sorted = 1;
    cr_expect(epmoei_grouped_gemm_fp8_chains_sm90(&up, &down));
    up.y_dtype = EPMOE_F32;
    cr_expect_not(epmoei_grouped_gemm_fp8_chains_sm90(&up, &down));
}

Test(gemm_fp8, tiles)
{
    /* 64 tokens while three roots above the mean fit, clusters where there are several tiles of 128. */
    const struct {
        int32_t experts;
        int64_t rows;
        int32_t tokens, cluster;
    } cases[] = {{8, 1, 64, 1},        {8, 16, 64, 1},       {8, 8 * 43, 64, 1},   {8, 8 * 45, 128, 1},
                 {256, 32768, 128, 1}, {8, 8 * 255, 128, 1}, {8, 8 * 256, 128, 2}, {1, 16384, 128, 2}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        epmoei_fp8_tile_t tile = epmoei_fp8_tile_sm90(cases[i].experts, cases[i].rows);
        cr_expect_eq(tile.tokens, cases[i].tokens, "%lld rows: %d tokens", (long long)cases[i].rows, tile.tokens);
        cr_expect_eq(tile.cluster, cases[i].cluster, "%lld rows", (long long)cases[i].rows);
    }
}

Test(gemm_fp8, quantised_rows_lie_apart_and_aligned)
{
    _Alignas(256) static char memory[1 << 12];
    epmoei_fp8_rows_t rows;
    int64_t bytes = epmoei_fp8_rows_layout(NULL, 5, 272, &rows);
    cr_assert_leq(bytes, (int64_t)sizeof memory);
    cr_expect_eq(epmoei_fp8_rows_layout(memory, 5, 272, &rows), bytes);
    cr_expect_eq(rows.stride, 8);
    cr_expect_eq((char *)rows.codes, memory);
    cr_expect_geq((char *)rows.scales - memory, 5 * 272);
    cr_expect_eq((uintptr_t)rows.scales % 16, 0);
    cr_expect_geq(bytes, (char *)rows.scales - memory + 3 * 8 * 4);
}

/* x that is codes, with scales of each granularity, against sums in double precision of the codes' values: rows by
 * index and as they lie, few and enough for BLAS, and with the reference's plain loops. */
Test(gemm_fp8, x_of_codes)
{
    enum { E = 3, N = 40, K = 272, TOKENS = 70, TOP_K = 2, SLOTS = TOKENS * TOP_K, BLOCKS = 3 };
    testing_rng_t rng = testing_rng(testing_seed());
    static uint8_t x[TOKENS * K], w[E * N * K];
    static float scales[TOKENS * BLOCKS], w_scales[E * N], y[SLOTS * N], by_ref[SLOTS * N];
    int32_t offsets[E + 1] = {0, 3, 3, SLOTS}, index[SLOTS];
    for (int32_t i = 0; i < TOKENS * K; i++) x[i] = e4m3_nearest(40.0 * (double)testing_normal(&rng));
    for (int32_t i = 0; i < E * N * K; i++) w[i] = e4m3_nearest(40.0 * (double)testing_normal(&rng));
    for (int32_t i = 0; i < TOKENS * BLOCKS; i++) scales[i] = testing_uniform(&rng, 0.001f, 0.02f);
    for (int32_t i = 0; i < E * N; i++) w_scales[i] = testing_uniform(&rng, 0.001f, 0.02f);
    for (int32_t i = 0; i < SLOTS; i++) index[i] = (int32_t)(i * 37LL % SLOTS);
    for (int32_t quant = EPMOE_GRANULARITY_TENSOR; quant <= EPMOE_GRANULARITY_BLOCK128; quant++)
        for (int32_t sorted = 0; sorted < 2; sorted++) {
            epmoe_grouped_gemm_args_t args = product(N, K, EPMOE_ACTIVATION_NONE, EPMOE_LAYOUT_GATE_FIRST, -1), checked;
            const int32_t rows = sorted ? TOKENS : SLOTS;
            offsets[E] = rows;
            args.backend = EPMOE_BACKEND_CPU;
            args.num_experts = E, args.max_rows = rows;
            args.fp8_activations = 0;
            args.expert_offsets = offsets;
            args.row_index = sorted ? NULL : index;
            args.x_row_divisor = sorted ? 1 : TOP_K;
            args.x_sorted = sorted;
            args.x_dtype = EPMOE_F8_E4M3, args.y_dtype = EPMOE_F32;
            args.x = x, args.x_quant = (epmoe_granularity_t)quant, args.x_scale = scales;
            args.weight.data = w, args.weight.scales = w_scales, args.weight.scales_dtype = EPMOE_F32;
            args.weight.group_rows = 1;
            args.y = y;
            cr_assert_eq(epmoe_grouped_gemm_workspace_size(&args, &args.workspace_bytes), EPMOE_OK, "%s",
                         epmoe_last_error());
            args.workspace = testing_buffer(args.workspace_bytes, 64);
            cr_assert_eq(epmoe_grouped_gemm(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
            args.y = by_ref;
            cr_assert_eq(epmoei_grouped_gemm_check(&args, &checked), EPMOE_OK, "%s", epmoe_last_error());
            cr_assert_eq(epmoei_grouped_gemm_ref(&checked, NULL), EPMOE_OK);
            testing_buffer_free(args.workspace);
            for (int32_t r = 0, e = 0; r < rows; r++) {
                while (r >= offsets[e + 1]) e++;
                const int32_t slot = sorted ? r : index[r], row = sorted ? r : slot / TOP_K;
                for (int32_t n = 0; n < N; n++) {
                    double sum = 0, size = 0;
                    for (int32_t k = 0; k < K; k++) {
                        const int32_t at = quant == EPMOE_GRANULARITY_TENSOR  ? 0
                                           : quant == EPMOE_GRANULARITY_TOKEN ? row
                                                                              : row * BLOCKS + k / 128;
                        const double term = e4m3_value(x[row * K + k]) * (double)scales[at] *
                                            e4m3_value(w[((int64_t)e * N + n) * K + k]) * (double)w_scales[e * N + n];
                        sum += term, size += fabs(term);
                    }
                    const float got = y[slot * N + n], ref = by_ref[slot * N + n];
                    cr_assert(fabs((double)got - sum) <= 1e-6 * size && fabs((double)ref - sum) <= 4e-6 * size,
                              "x_quant %d sorted %d row %d column %d: %g, by the reference %g, expected %g", quant,
                              sorted, r, n, (double)got, (double)ref, sum);
                }
            }
        }
}
