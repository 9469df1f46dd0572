/* The device layout of W4 and MXFP4, walked as the tensor cores' fragments are: every value once, in its place, and
 * what the kernels' few operations make of an MXFP4 word. */
#include "kernels/quant_tiles.h"
#include "tests/quant_case.h"

#include <criterion/criterion.h>
#include <stdlib.h>

typedef struct tiled_t {
    epmoei_quant_tiles_t tiles;
    epmoei_quant_t packed;
    epmoei_tile_arrays_t arrays;
    quant_case_t made;
} tiled_t;

static tiled_t make(testing_rng_t *rng, epmoe_format_t format, int64_t n, int64_t k, int32_t group, bool gated)
{
    tiled_t t = {.made = quant_case_make(rng, format, 1, n, k, group, QUANT_INDEX_NONE, 0)};
    epmoe_weight_t weight = t.made.weight;
    cr_assert_eq(epmoei_quant_check_weight(&weight, "weight", k), EPMOE_OK);
    t.packed = epmoei_quant_of_weight(&weight, n, k, 0, 0);
    t.tiles = epmoei_quant_tiles(format, weight.scales_dtype, n, k, weight.group_size, gated);
    t.arrays = (epmoei_tile_arrays_t){testing_buffer(t.tiles.data_bytes, 1), testing_buffer(t.tiles.scales_bytes, 1),
                                      t.packed.zeros ? testing_buffer(t.tiles.zeros_bytes, 1) : NULL};
    epmoei_tiles_pack(&t.tiles, &t.packed, &t.arrays);
    cr_assert(testing_guards_intact(t.arrays.data) && testing_guards_intact(t.arrays.scales));
    if (t.arrays.zeros) cr_assert(testing_guards_intact(t.arrays.zeros));
    return t;
}

static void unmake(tiled_t *t)
{
    testing_buffer_free(t->arrays.data), testing_buffer_free(t->arrays.scales);
    if (t->arrays.zeros) testing_buffer_free(t->arrays.zeros);
    quant_case_free(&t->made);
}

/* bf16 times 2^-126 that the four shifts give for register j, both halves. */
static uint32_t mxfp4_register(uint32_t word, int j)
{
    if (j == 0) return (word << 6) & 0x81C081C0u;
    if (j == 1) return (word << 2) & 0x81C081C0u;
    if (j == 2) return (word >> 4 | word << 28) & 0x81C081C0u;
    return (word & 0x81808180u) | ((word >> 8) & 0x00400040u);
}

static float mxfp4_value(uint32_t word, int j, int h)
{
    uint32_t bits = mxfp4_register(word, j) >> (16 * h) & 0xFFFFu;
    return epmoei_bf16_to_f32((uint16_t)bits) * 0x1p126f;
}

/* Which row of the weight a device row is; -1 = none. */
static int64_t row_of(int64_t device_row, int64_t n, bool gated)
{
    if (!gated) return device_row < n ? device_row : -1;
    int64_t sixteen = device_row / 16, in = device_row - 16 * sixteen, output = 8 * sixteen + (in & 7);
    return output >= n / 2 ? -1 : in < 8 ? output : n / 2 + output;
}

/* Lane by lane, as mma's operand A is laid out. */
static void check_words(const tiled_t *t)
{
    const int64_t n = t->tiles.n, k = t->tiles.k, blocks = (k + 63) / 64;
    for (int64_t tile = 0; tile < t->tiles.tiles; tile++)
        for (int64_t block = 0; block < blocks; block++)
            for (int part = 0; part < 4; part++)
                for (int lane = 0; lane < 32; lane++)
                    for (int s = 0; s < 4; s++) {
                        uint32_t word;
                        memcpy(&word,
                               (const char *)t->arrays.data + (tile * blocks + block) * 2048 + part * 512 + lane * 16 +
                                   s * 4,
                               4);
                        for (int j = 0; j < 4; j++)
                            for (int h = 0; h < 2; h++) {
                                int64_t row =
                                    row_of(64 * tile + 16 * part + lane / 4 + (j % 2 ? 8 : 0), n, t->tiles.gated);
                                int64_t col = 64 * block + 16 * s + lane % 4 * 2 + h + (j / 2 ? 8 : 0);
                                bool there = row >= 0 && col < k;
                                uint32_t code = there ? epmoei_quant_code(&t->packed, row, col) : 0;
                                if (t->tiles.format == EPMOE_FORMAT_MXFP4)
                                    cr_assert(epmoei_f32_bits(mxfp4_value(word, j, h)) ==
                                              epmoei_f32_bits(epmoei_e2m1_to_f32((uint8_t)code)));
                                else
                                    cr_assert_eq((word >> (4 * j)) >> (16 * h) & 15, code);
                                if (there) cr_assert_eq(epmoei_tiles_code(&t->tiles, t->arrays.data, row, col), code);
                            }
                    }
}

/* The scale pair of lanes 4i..4i+3 in part s is rows i and i + 8. */
static void check_scales(const tiled_t *t)
{
    const int64_t n = t->tiles.n, groups = t->tiles.groups;
    for (int64_t tile = 0; tile < t->tiles.tiles; tile++)
        for (int64_t g = 0; g < groups; g++)
            for (int s = 0; s < 4; s++)
                for (int i = 0; i < 8; i++)
                    for (int h = 0; h < 2; h++) {
                        int64_t at = (tile * groups + g) * 64 + 16 * s + 2 * i + h;
                        int64_t row = row_of(64 * tile + 16 * s + i + 8 * h, n, t->tiles.gated);
                        int32_t zero = t->arrays.zeros ? t->arrays.zeros[at] : 0;
                        float scale = t->tiles.scales_dtype == EPMOE_F8_E8M0
                                          ? epmoei_e8m0_to_f32(((const uint8_t *)t->arrays.scales)[at])
                                          : epmoei_load(t->arrays.scales, t->tiles.scales_dtype, at);
                        if (row < 0) {
                            cr_assert(scale <= 0x1p-127f && zero == 0);
                            continue;
                        }
                        cr_assert_eq(epmoei_tiles_scale_at(&t->tiles, row, g), at);
                        cr_assert(
                            epmoei_f32_bits(scale) ==
                            epmoei_f32_bits(epmoei_quant_scale(&t->packed, epmoei_quant_scale_at(&t->packed, row, g))));
                        if (t->arrays.zeros) cr_assert_eq(zero, epmoei_quant_zero(&t->packed, row, g));
                    }
}

Test(quant_tiles, every_value_has_its_place)
{
    static const struct {
        epmoe_format_t format;
        int64_t n, k;
        int32_t group;
        bool gated;
    } cases[] = {
        {EPMOE_FORMAT_W4, 64, 64, 64, false},   {EPMOE_FORMAT_W4, 64, 64, 64, true},
        {EPMOE_FORMAT_W4, 130, 200, 128, true}, {EPMOE_FORMAT_W4, 1, 8, -1, false},
        {EPMOE_FORMAT_W4, 2, 24, 16, true},     {EPMOE_FORMAT_W4, 71, 136, 32, false},
        {EPMOE_FORMAT_MXFP4, 96, 96, 0, true},  {EPMOE_FORMAT_MXFP4, 5, 32, 0, false},
        {EPMOE_FORMAT_MXFP4, 22, 160, 0, true},
    };
    testing_rng_t rng = testing_rng(testing_seed());
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        tiled_t t = make(&rng, cases[i].format, cases[i].n, cases[i].k, cases[i].group, cases[i].gated);
        check_words(&t);
        check_scales(&t);
        unmake(&t);
    }
}

/* All 16 codes at all eight places of a word. */
Test(quant_tiles, mxfp4_bits)
{
    for (int j = 0; j < 4; j++)
        for (int h = 0; h < 2; h++)
            for (uint8_t code = 0; code < 16; code++) {
                int bit[4];
                uint32_t word = 0;
                epmoei_mxfp4_bits(j, h, bit);
                for (int b = 0; b < 4; b++) word |= (uint32_t)(code >> b & 1) << bit[b];
                cr_assert(epmoei_f32_bits(mxfp4_value(word, j, h)) == epmoei_f32_bits(epmoei_e2m1_to_f32(code)));
                for (int other = 0; other < 4; other++)
                    for (int half = 0; half < 2; half++)
                        if (other != j || half != h) cr_assert_eq(epmoei_f32_bits(mxfp4_value(word, other, half)), 0u);
            }
}

Test(quant_tiles, sizes)
{
    epmoei_quant_tiles_t tiles = epmoei_quant_tiles(EPMOE_FORMAT_W4, EPMOE_F16, 130, 200, 128, true);
    cr_assert(tiles.tiles == 3 && tiles.blocks == 4 && tiles.groups == 2); /* 65 outputs, 32 of each a tile */
    cr_assert(tiles.data_bytes == 3 * 4 * 2048 && tiles.scales == 3 * 2 * 64);
    cr_assert(tiles.scales_bytes == 2 * tiles.scales && tiles.zeros_bytes == tiles.scales);
    tiles = epmoei_quant_tiles(EPMOE_FORMAT_MXFP4, EPMOE_F8_E8M0, 65, 96, 32, false);
    cr_assert(tiles.tiles == 2 && tiles.blocks == 2 && tiles.groups == 3 && tiles.scales_bytes == 2 * 3 * 64);
    static const int32_t taken[] = {16, 32, 64, 128, 192, 200, INT32_MAX}, refused[] = {1, 8, 24, 48, 96, 100};
    for (size_t i = 0; i < sizeof taken / sizeof taken[0]; i++) cr_assert(epmoei_tiles_take_group(taken[i], 200));
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++)
        cr_assert(!epmoei_tiles_take_group(refused[i], 200), "%d", refused[i]);
}
