/* Tiles from rows of every format with 4-bit codes: the inverse of the layout gives the values back. Which bit lies
 * where is test_quant_tiles'. */
#include "kernels/grouped_gemm_quant.h"
#include "kernels/pack_tiles.h"
#include "tests/op_testing.h"
#include "tests/quant_case.h"

#include <stdlib.h>

typedef struct packed_t {
    quant_case_t made;
    epmoe_pack_tiles_args_t args;
    epmoe_pack_tiles_size_t size;
} packed_t;

static packed_t prepare(testing_rng_t *rng, epmoe_format_t format, int32_t experts, int32_t n, int32_t k, int32_t group,
                        bool gated)
{
    packed_t p = {.made = quant_case_make(rng, format, experts, n, k, group, QUANT_INDEX_NONE, 0),
                  .args = EPMOE_PACK_TILES_ARGS_INIT,
                  .size = EPMOE_PACK_TILES_SIZE_INIT};
    p.args.backend = EPMOE_BACKEND_CPU;
    p.args.num_experts = experts, p.args.n = n, p.args.k = k, p.args.gated = gated;
    p.args.weight = p.made.weight;
    return p;
}

static void pack(packed_t *p)
{
    cr_assert_eq(epmoe_pack_tiles_size(&p->args, &p->size), EPMOE_OK, "%s", epmoe_last_error());
    p->args.data = testing_buffer(p->size.data_bytes, 1);
    p->args.scales = testing_buffer(p->size.scales_bytes, 1);
    p->args.zeros = p->size.zeros_bytes ? testing_buffer(p->size.zeros_bytes, 1) : NULL;
    cr_assert_eq(epmoe_pack_tiles(&p->args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert(testing_guards_intact(p->args.data) && testing_guards_intact(p->args.scales));
    if (p->args.zeros) cr_assert(testing_guards_intact(p->args.zeros));
}

static void drop(packed_t *p)
{
    if (p->args.data) testing_buffer_free(p->args.data);
    if (p->args.scales) testing_buffer_free(p->args.scales);
    if (p->args.zeros) testing_buffer_free(p->args.zeros);
    quant_case_free(&p->made);
}

/* By the inverse of the layout, in the words of its definition: code minus zero, times scale. */
static float tiled_value(const packed_t *p, const epmoei_quant_tiles_t *tiles, int64_t e, int64_t row, int64_t col)
{
    const epmoe_weight_t *weight = &p->size.tiles;
    int64_t at = e * tiles->scales + epmoei_tiles_scale_at(tiles, row, col / weight->group_size);
    uint32_t code = epmoei_tiles_code(tiles, (const char *)p->args.data + e * tiles->data_bytes, row, col);
    if (weight->format == EPMOE_FORMAT_MXFP4)
        return epmoei_e2m1_to_f32((uint8_t)code) * epmoei_e8m0_to_f32(((const uint8_t *)p->args.scales)[at]);
    int32_t zero = p->args.zeros ? ((const uint8_t *)p->args.zeros)[at] : 8;
    return (float)((int32_t)code - zero) * epmoei_load(p->args.scales, weight->scales_dtype, at);
}

Test(pack_tiles, every_format_keeps_its_values)
{
    static const struct {
        epmoe_format_t format;
        int32_t experts, n, k, group;
        bool gated;
    } cases[] = {
        {EPMOE_FORMAT_GPTQ, 2, 72, 128, 32, false}, {EPMOE_FORMAT_GPTQ, 1, 40, 72, -1, true},
        {EPMOE_FORMAT_AWQ, 2, 72, 128, 64, false},  {EPMOE_FORMAT_AWQ, 1, 34, 200, 16, true},
        {EPMOE_FORMAT_CT_W4, 3, 9, 64, 32, false},  {EPMOE_FORMAT_CT_W4, 1, 130, 136, 128, true},
        {EPMOE_FORMAT_W4, 2, 65, 192, 64, false},   {EPMOE_FORMAT_W4, 2, 66, 96, 16, true},
        {EPMOE_FORMAT_MXFP4, 2, 65, 96, 0, false},  {EPMOE_FORMAT_MXFP4, 3, 34, 160, 0, true},
    };
    testing_rng_t rng = testing_rng(testing_seed());
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        for (int zeros = 0; zeros < 2; zeros++) {
            const bool optional = cases[i].format == EPMOE_FORMAT_CT_W4 || cases[i].format == EPMOE_FORMAT_W4;
            if (!zeros && !optional) continue;
            packed_t p = prepare(&rng, cases[i].format, cases[i].experts, cases[i].n, cases[i].k, cases[i].group,
                                 cases[i].gated);
            if (!zeros) p.args.weight.zeros = NULL;
            pack(&p);
            epmoe_weight_t rows = p.args.weight;
            cr_assert_eq(epmoei_quant_check_weight(&rows, "weight", cases[i].k), EPMOE_OK);
            const bool mxfp4 = cases[i].format == EPMOE_FORMAT_MXFP4;
            cr_assert_eq(p.size.tiles.format, mxfp4 ? EPMOE_FORMAT_MXFP4 : EPMOE_FORMAT_W4);
            cr_assert(p.size.tiles.storage == EPMOE_STORAGE_TILES && p.size.tiles.scales_dtype == rows.scales_dtype &&
                      p.size.tiles.group_size == rows.group_size && !p.size.tiles.data);
            const epmoei_quant_tiles_t tiles = epmoei_quant_tiles(p.size.tiles.format, rows.scales_dtype, cases[i].n,
                                                                  cases[i].k, rows.group_size, cases[i].gated);
            for (int64_t e = 0; e < cases[i].experts; e++) {
                const epmoei_quant_t source = epmoei_quant_of_weight(&rows, cases[i].n, cases[i].k, e, 0);
                for (int64_t r = 0; r < cases[i].n; r++)
                    for (int64_t c = 0; c < cases[i].k; c++) {
                        const float want = epmoei_quant_at(&source, r, c), got = tiled_value(&p, &tiles, e, r, c);
                        cr_assert(memcmp(&want, &got, sizeof want) == 0, "case %zu, expert %d [%d,%d]: %g, not %g", i,
                                  (int)e, (int)r, (int)c, (double)got, (double)want);
                    }
            }
            drop(&p);
        }
}

static epmoe_status_t query(const epmoe_pack_tiles_args_t *args, epmoe_stream_t stream)
{
    (void)stream;
    epmoe_pack_tiles_size_t size = EPMOE_PACK_TILES_SIZE_INIT;
    return epmoe_pack_tiles_size(args, &size);
}

Test(pack_tiles, wrong_arguments_are_named)
{
    enum { N = 64, K = 64 };
    testing_rng_t rng = testing_rng(testing_seed());
    packed_t p = prepare(&rng, EPMOE_FORMAT_W4, 1, N, K, 32, true);
    pack(&p);
    memset(p.args.data, 0x5A, (size_t)p.size.data_bytes);
    const uint8_t *data = p.args.data;
#define UNTOUCHED (data[0] == 0x5A && data[p.size.data_bytes - 1] == 0x5A)
    int32_t index[K] = {0};
    epmoe_status_t (*const entries[])(const epmoe_pack_tiles_args_t *, epmoe_stream_t) = {query, epmoe_pack_tiles};
    for (int i = 0; i < 2; i++) {
        OP_INVALID(entries[i], p.args, "num_experts is -1", UNTOUCHED, bad.num_experts = -1);
        OP_INVALID(entries[i], p.args, "n is 0", UNTOUCHED, bad.n = 0);
        OP_INVALID(entries[i], p.args, "k is 0", UNTOUCHED, bad.k = 0);
        OP_INVALID(entries[i], p.args, "n is 63", UNTOUCHED, bad.n = 63);
        OP_INVALID(entries[i], p.args, "gated is 2", UNTOUCHED, bad.gated = 2);
        OP_INVALID(entries[i], p.args, "weight.format is 1", UNTOUCHED, bad.weight.format = EPMOE_FORMAT_F32);
        OP_REJECTS(entries[i], p.args, EPMOE_ERROR_NOT_SUPPORTED, "[64,72]", UNTOUCHED,
                   (bad.weight.format = EPMOE_FORMAT_BF16, bad.k = 72));
        OP_REJECTS(entries[i], p.args, EPMOE_ERROR_NOT_SUPPORTED, "[40,64]", UNTOUCHED,
                   (bad.weight.format = EPMOE_FORMAT_F16, bad.n = 40));
        OP_INVALID(entries[i], p.args, "weight.storage is 1", UNTOUCHED,
                   (bad.weight.format = EPMOE_FORMAT_BF16, bad.weight.storage = EPMOE_STORAGE_TILES));
        OP_INVALID(entries[i], p.args, "weight.format is 4", UNTOUCHED, bad.weight.format = EPMOE_FORMAT_FP8_BLOCK);
        OP_INVALID(entries[i], p.args, "weight.storage is 1", UNTOUCHED, bad.weight.storage = EPMOE_STORAGE_TILES);
        OP_INVALID(entries[i], p.args, "weight.storage is 7", UNTOUCHED, bad.weight.storage = (epmoe_storage_t)7);
        OP_INVALID(entries[i], p.args, "weight.group_rows is 1", UNTOUCHED, bad.weight.group_rows = 1);
        OP_INVALID(entries[i], p.args, "weight.g_idx", UNTOUCHED,
                   (bad.weight.format = EPMOE_FORMAT_GPTQ, bad.weight.g_idx = index));
        OP_REJECTS(entries[i], p.args, EPMOE_ERROR_NOT_SUPPORTED, "weight.group_size is 24", UNTOUCHED,
                   bad.weight.group_size = 24);
        OP_REJECTS(entries[i], p.args, EPMOE_ERROR_NOT_SUPPORTED, "k is 60", UNTOUCHED,
                   (bad.k = 60, bad.weight.group_size = -1));
    }
    OP_INVALID(epmoe_pack_tiles, p.args, "weight.data is NULL", UNTOUCHED, bad.weight.data = NULL);
    OP_INVALID(epmoe_pack_tiles, p.args, "weight.scales is NULL", UNTOUCHED, bad.weight.scales = NULL);
    OP_INVALID(epmoe_pack_tiles, p.args, "data is NULL", UNTOUCHED, bad.data = NULL);
    OP_INVALID(epmoe_pack_tiles, p.args, "scales is NULL", UNTOUCHED, bad.scales = NULL);
    OP_INVALID(epmoe_pack_tiles, p.args, "zeros is NULL", UNTOUCHED, bad.zeros = NULL);
    cr_assert_eq(epmoe_pack_tiles_size(&p.args, NULL), EPMOE_ERROR_INVALID_ARGUMENT);
    OP_STRUCT_SIZES(epmoe_pack_tiles, p.args, sizeof p.args, UNTOUCHED, (memset(p.args.data, 0x5A, 1), true));
#undef UNTOUCHED
    drop(&p);
}

/* Rows are not taken for tiles, nor tiles for rows. */
Test(pack_tiles, products_tell_rows_and_tiles_apart)
{
    enum { N = 64, K = 64, ROWS = 2 };
    testing_rng_t rng = testing_rng(testing_seed());
    packed_t p = prepare(&rng, EPMOE_FORMAT_MXFP4, 1, N, K, 0, false);
    pack(&p);
    float x[ROWS * K] = {0}, y[ROWS * N], w[N * K];
    testing_fill_normal(&rng, x, EPMOE_F32, ROWS * K, 1.0f);
    memset(y, 0xA5, sizeof y), memset(w, 0xA5, sizeof w);
    epmoe_weight_t tiles = p.size.tiles;
    tiles.data = p.args.data, tiles.scales = p.args.scales, tiles.zeros = p.args.zeros;
    epmoe_grouped_gemm_args_t gemm = EPMOE_GROUPED_GEMM_ARGS_INIT;
    gemm.backend = EPMOE_BACKEND_CPU, gemm.num_experts = 1, gemm.n = N, gemm.k = K, gemm.max_rows = ROWS;
    gemm.x_dtype = gemm.y_dtype = EPMOE_F32, gemm.x = x, gemm.y = y;
    gemm.activation = EPMOE_ACTIVATION_NONE, gemm.layout = EPMOE_LAYOUT_PACKED, gemm.weight = p.args.weight;
    cr_assert_eq(epmoe_grouped_gemm_workspace_size(&gemm, &gemm.workspace_bytes), EPMOE_OK, "%s", epmoe_last_error());
    gemm.workspace = testing_buffer(gemm.workspace_bytes, 0);
    const unsigned char *bytes = (const unsigned char *)y, *values = (const unsigned char *)w;
    OP_REJECTS(epmoe_grouped_gemm, gemm, EPMOE_ERROR_NOT_SUPPORTED, "weight.storage is 1", bytes[0] == 0xA5,
               bad.weight = tiles);
    OP_INVALID(epmoe_grouped_gemm, gemm, "weight.storage is 1", bytes[0] == 0xA5,
               (bad.weight = tiles, bad.weight.format = EPMOE_FORMAT_AWQ));
    OP_INVALID(epmoe_grouped_gemm, gemm, "weight.storage is 1", bytes[0] == 0xA5,
               (bad.weight.storage = EPMOE_STORAGE_TILES, bad.weight.format = EPMOE_FORMAT_F32));
    OP_REJECTS(epmoe_grouped_gemm, gemm, EPMOE_ERROR_NOT_SUPPORTED, "weight.storage is 1", bytes[0] == 0xA5,
               (bad.weight.storage = EPMOE_STORAGE_TILES, bad.weight.format = EPMOE_FORMAT_BF16));
    cr_assert_eq(epmoe_grouped_gemm(&gemm, NULL), EPMOE_OK, "%s", epmoe_last_error());

    testing_buffer_free(gemm.workspace);
    epmoe_dequant_args_t dequant = EPMOE_DEQUANT_ARGS_INIT;
    dequant.backend = EPMOE_BACKEND_CPU, dequant.n = N, dequant.k = K, dequant.weight = p.args.weight, dequant.w = w;
    OP_REJECTS(epmoe_dequant, dequant, EPMOE_ERROR_NOT_SUPPORTED, "weight.storage is 1", values[0] == 0xA5,
               bad.weight = tiles);
    OP_INVALID(epmoe_dequant, dequant, "weight.storage is 7", values[0] == 0xA5,
               bad.weight.storage = (epmoe_storage_t)7);

    /* What CUDA looks at before it computes. */
    epmoe_grouped_gemm_args_t checked = gemm;
    checked.x_dtype = checked.y_dtype = EPMOE_BF16;
    cr_assert_eq(epmoei_quant_check_weight(&checked.weight, "weight", K), EPMOE_OK);
    checked.x = checked.y = NULL, checked.weight.data = checked.weight.scales = NULL;
    checked.weight.zeros = NULL;
    cr_assert_eq(epmoei_grouped_gemm_quant_check_cuda(&checked), EPMOE_ERROR_NOT_SUPPORTED);
    cr_assert(strstr(epmoe_last_error(), "weight.storage is 0") && strstr(epmoe_last_error(), "epmoe_pack_tiles"), "%s",
              epmoe_last_error());
    checked.weight.storage = EPMOE_STORAGE_TILES;
    cr_assert_eq(epmoei_grouped_gemm_quant_check_cuda(&checked), EPMOE_OK, "%s", epmoe_last_error());
    drop(&p);
}

/* The value everywhere in a matrix [8,8] of one format, after it became tiles. */
static void expect_all(const epmoe_weight_t *weight, float want, const char *what)
{
    testing_rng_t rng = testing_rng(1);
    packed_t p = prepare(&rng, EPMOE_FORMAT_W4, 1, 8, 8, -1, false);
    p.args.weight = *weight;
    pack(&p);
    const epmoei_quant_tiles_t tiles =
        epmoei_quant_tiles(EPMOE_FORMAT_W4, p.size.tiles.scales_dtype, 8, 8, p.size.tiles.group_size, false);
    for (int64_t r = 0; r < 8; r++)
        for (int64_t c = 0; c < 8; c++)
            cr_assert(tiled_value(&p, &tiles, 0, r, c) == want, "%s [%d,%d] is %g", what, (int)r, (int)c,
                      (double)tiled_value(&p, &tiles, 0, r, c));
    drop(&p);
}

/* Codes of 9 and scales of 0.5: stored zeros of 7 (v1) and 8 (v2) are 8, an AWQ zero of 0 stays 0. */
Test(pack_tiles, zero_points_keep_their_meaning)
{
    const uint32_t codes[8] = {0x99999999, 0x99999999, 0x99999999, 0x99999999,
                               0x99999999, 0x99999999, 0x99999999, 0x99999999};
    const uint16_t halves[8] = {0x3800, 0x3800, 0x3800, 0x3800, 0x3800, 0x3800, 0x3800, 0x3800};
    const uint32_t sevens[] = {0x77777777}, eights[] = {0x88888888}, none[] = {0}, last[] = {0xFFFFFFFF};
    epmoe_weight_t weight = EPMOE_WEIGHT_INIT;
    weight.group_size = -1, weight.scales_dtype = EPMOE_F16, weight.data = codes, weight.scales = halves;
    weight.format = EPMOE_FORMAT_GPTQ;
    weight.zero_convention = 1, weight.zeros = sevens;
    expect_all(&weight, 0.5f, "v1 with 7");
    weight.zeros = last; /* a zero of 0, less one */
    expect_all(&weight, 4.5f, "v1 with 15");
    weight.zero_convention = 2, weight.zeros = eights;
    expect_all(&weight, 0.5f, "v2 with 8");
    weight.format = EPMOE_FORMAT_AWQ, weight.zeros = none;
    expect_all(&weight, 4.5f, "awq with 0");
}

/* One row of AWQ's nibbles and one column of GPTQ's, which lie in different orders; AWQ's zeros as its codes. */
Test(pack_tiles, nibbles_of_awq_and_gptq)
{
    const uint32_t words[8] = {0x75316420, 0x75316420, 0x75316420, 0x75316420,
                               0x75316420, 0x75316420, 0x75316420, 0x75316420};
    const uint32_t columns[8] = {0x76543210, 0x76543210, 0x76543210, 0x76543210,
                                 0x76543210, 0x76543210, 0x76543210, 0x76543210};
    const uint32_t sevens[8] = {0x77777777, 0x77777777, 0x77777777, 0x77777777,
                                0x77777777, 0x77777777, 0x77777777, 0x77777777};
    const uint32_t none[] = {0};
    const float ones[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    const struct {
        epmoe_format_t format;
        const uint32_t *codes, *zeros;
    } cases[] = {
        {EPMOE_FORMAT_AWQ, words, none}, {EPMOE_FORMAT_GPTQ, columns, none}, {EPMOE_FORMAT_AWQ, sevens, words}};
    for (int i = 0; i < 3; i++) {
        testing_rng_t rng = testing_rng(1);
        packed_t p = prepare(&rng, EPMOE_FORMAT_W4, 1, 8, 8, -1, false);
        p.args.weight = (epmoe_weight_t)EPMOE_WEIGHT_INIT;
        p.args.weight.format = cases[i].format, p.args.weight.group_size = -1, p.args.weight.zero_convention = 2;
        p.args.weight.data = cases[i].codes, p.args.weight.scales = ones, p.args.weight.zeros = cases[i].zeros;
        pack(&p);
        const epmoei_quant_tiles_t tiles = epmoei_quant_tiles(EPMOE_FORMAT_W4, EPMOE_F32, 8, 8, 8, false);
        for (int r = 0; r < 8; r++)
            for (int c = 0; c < 8; c++) {
                const float want = (float)(i == 0 ? r : i == 1 ? c : 7 - r);
                cr_assert(tiled_value(&p, &tiles, 0, r, c) == want, "case %d [%d,%d] is %g, not %g", i, r, c,
                          (double)tiled_value(&p, &tiles, 0, r, c), (double)want);
            }
        drop(&p);
    }
}

/* Elements of 16 bits by the words of kernels/plain_tiles.h, worked out by hand for [160,128]: the second block has 32
 * rows. Element (row, column) of the matrix is 128 * row + column. */
Test(pack_tiles, sixteen_bits_by_hand)
{
    enum { N = 160, K = 128, F = N / 2 };
    static const struct {
        int32_t gated, row, col;
        int64_t at;
    } cases[] = {
        {0, 0, 0, 0},
        {0, 0, 9, 9},      /* piece 1 of row 0 */
        {0, 1, 0, 64 + 8}, /* piece 0 of row 1 changes places with piece 1 */
        {0, 1, 8, 64},
        {0, 13, 23, 13 * 64 + (2 ^ 5) * 8 + 7},
        {0, 0, 64, 128 * 64}, /* the second step */
        {0, 127, 127, 128 * 64 + 127 * 64 + (7 ^ 7) * 8 + 7},
        {0, 128, 0, 128 * 128}, /* the second block */
        {0, 131, 70, 128 * 128 + 32 * 64 + 3 * 64 + (0 ^ 3) * 8 + 6},
        {0, 159, 127, 128 * 128 + 32 * 64 + 31 * 64 + (7 ^ 7) * 8 + 7},
        {1, 0, 0, 0},
        {1, 3, 0, 3 * 64 + 3 * 8},                        /* gate row 3 */
        {1, F, 0, 8 * 64},                                /* up row 0: stored row 8 */
        {1, 8, 0, 16 * 64},                               /* gate row 8: stored row 16 */
        {1, F + 9, 64, 128 * 64 + 25 * 64 + (0 ^ 1) * 8}, /* up row 9: stored row 16 + 8 + 1 */
        {1, 64, 0, 128 * 128},                            /* gate row 64: stored row 128, the second block */
        {1, F + 79, 127, 128 * 128 + 32 * 64 + 31 * 64 + (7 ^ 7) * 8 + 7},
    };
    uint16_t *rows = testing_buffer(2 * N * K * 2, 0), *tiles = testing_buffer(2 * N * K * 2, 0);
    for (int32_t i = 0; i < 2 * N * K; i++) rows[i] = (uint16_t)i;
    for (int gated = 0; gated < 2; gated++) {
        epmoe_pack_tiles_args_t args = EPMOE_PACK_TILES_ARGS_INIT;
        epmoe_pack_tiles_size_t size = EPMOE_PACK_TILES_SIZE_INIT;
        args.backend = EPMOE_BACKEND_CPU, args.num_experts = 2, args.n = N, args.k = K, args.gated = gated;
        args.weight = (epmoe_weight_t)EPMOE_WEIGHT_INIT;
        args.weight.format = EPMOE_FORMAT_BF16, args.weight.data = rows, args.data = tiles;
        cr_assert_eq(epmoe_pack_tiles_size(&args, &size), EPMOE_OK, "%s", epmoe_last_error());
        cr_assert(size.data_bytes == 2 * N * K * 2 && size.scales_bytes == 0 && size.zeros_bytes == 0);
        cr_assert(size.tiles.format == EPMOE_FORMAT_BF16 && size.tiles.storage == EPMOE_STORAGE_TILES);
        memset(tiles, 0xA5, 2 * N * K * 2);
        cr_assert_eq(epmoe_pack_tiles(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
        cr_assert(testing_guards_intact(tiles));
        for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
            for (int32_t e = 0; e < 2 && cases[i].gated == gated; e++)
                cr_expect_eq(tiles[e * N * K + cases[i].at], (uint16_t)(e * N * K + cases[i].row * K + cases[i].col),
                             "case %zu, expert %d: %d", i, e, tiles[e * N * K + cases[i].at]);
        /* Every element is somewhere. */
        uint32_t *seen = calloc(2 * N * K, sizeof *seen);
        for (int32_t i = 0; i < 2 * N * K; i++) seen[tiles[i]]++;
        for (int32_t i = 0; i < 2 * N * K; i++) cr_assert_eq(seen[i], 1, "element %d", i);
        free(seen);
    }
    testing_buffer_free(rows), testing_buffer_free(tiles);
}
