#include "kernels/quant_tiles.h"

bool epmoei_tiles_take_group(int32_t group, int64_t k)
{
    return group == 16 || group == 32 || (group > 0 && group % EPMOEI_TILE_COLS == 0) || group >= k;
}

epmoei_quant_tiles_t epmoei_quant_tiles(epmoe_format_t format, epmoe_dtype_t scales_dtype, int64_t n, int64_t k,
                                        int32_t group, bool gated)
{
    epmoei_quant_tiles_t tiles = {format, scales_dtype, group, gated, n, k, 0, 0, 0, 0, 0, 0, 0};
    tiles.tiles = gated ? epmoei_ceil_div(n / 2, EPMOEI_TILE_ROWS / 2) : epmoei_ceil_div(n, EPMOEI_TILE_ROWS);
    tiles.blocks = epmoei_ceil_div(k, EPMOEI_TILE_COLS);
    tiles.groups = epmoei_ceil_div(k, group);
    tiles.data_bytes = tiles.tiles * tiles.blocks * EPMOEI_TILE_BYTES;
    tiles.scales = tiles.tiles * tiles.groups * EPMOEI_TILE_ROWS;
    tiles.scales_bytes = tiles.scales * epmoe_dtype_size(scales_dtype);
    tiles.zeros_bytes = format == EPMOE_FORMAT_MXFP4 ? 0 : tiles.scales;
    return tiles;
}

int64_t epmoei_tiles_row(const epmoei_quant_tiles_t *tiles, int64_t device_row)
{
    if (!tiles->gated) return device_row < tiles->n ? device_row : -1;
    int64_t f = tiles->n / 2, i = device_row / 16 * 8 + device_row % 8;
    if (i >= f) return -1;
    return device_row % 16 < 8 ? i : f + i;
}

int64_t epmoei_tiles_device_row(const epmoei_quant_tiles_t *tiles, int64_t row)
{
    int64_t f = tiles->n / 2, i = row < f ? row : row - f;
    return tiles->gated ? i / 8 * 16 + i % 8 + (row < f ? 0 : 8) : row;
}

void epmoei_mxfp4_bits(int j, int h, int bit[4])
{
    static const int8_t places[4][4] = {{0, 1, 2, 9}, {4, 5, 6, 13}, {10, 11, 12, 3}, {14, 7, 8, 15}};
    for (int i = 0; i < 4; i++) bit[i] = places[j][i] + 16 * (j == 2 && i == 3 ? 1 - h : h);
}

/* Row and column, within 16 x 16, of (lane, register, half) of operand A. */
static int fragment_row(int lane, int j) { return lane / 4 + 8 * (j & 1); }
static int fragment_col(int lane, int j, int h) { return 2 * (lane % 4) + 8 * (j >> 1) + h; }

static uint32_t spread_mxfp4(uint32_t code, int j, int h)
{
    int bit[4];
    uint32_t word = 0;
    epmoei_mxfp4_bits(j, h, bit);
    for (int i = 0; i < 4; i++) word |= (code >> i & 1) << bit[i];
    return word;
}

static uint32_t collect_mxfp4(uint32_t word, int j, int h)
{
    int bit[4];
    uint32_t code = 0;
    epmoei_mxfp4_bits(j, h, bit);
    for (int i = 0; i < 4; i++) code |= (word >> bit[i] & 1) << i;
    return code;
}

/* The codes of 16 device rows x 64 columns from (first_row, first_col) on. */
static void pack_part(const epmoei_quant_tiles_t *tiles, const epmoei_quant_t *packed, int64_t first_row,
                      int64_t first_col, uint32_t *words)
{
    bool mxfp4 = tiles->format == EPMOE_FORMAT_MXFP4;
    uint8_t codes[16][EPMOEI_TILE_COLS];
    memset(codes, 0, sizeof codes);
    int64_t cols = epmoei_min64(EPMOEI_TILE_COLS, tiles->k - first_col);
    for (int r = 0; r < 16; r++) {
        int64_t row = epmoei_tiles_row(tiles, first_row + r);
        if (row < 0) continue;
        if (packed->format == EPMOE_FORMAT_GPTQ || packed->format == EPMOE_FORMAT_AWQ) {
            for (int64_t c = 0; c < cols; c++) codes[r][c] = (uint8_t)epmoei_quant_code(packed, row, first_col + c);
            continue;
        }
        /* The others have the lower column in the lower four bits of a byte. */
        int64_t row_bytes = mxfp4 ? tiles->k / 2 : epmoei_ceil_div(tiles->k, 8) * 4;
        const uint8_t *pairs = (const uint8_t *)packed->data + row * row_bytes + first_col / 2;
        for (int64_t c = 0; c < cols; c++) codes[r][c] = pairs[c / 2] >> (4 * (c & 1)) & 15;
    }
    for (int lane = 0; lane < 32; lane++)
        for (int s = 0; s < 4; s++) {
            uint32_t word = 0;
            for (int j = 0; j < 4; j++)
                for (int h = 0; h < 2; h++) {
                    uint32_t code = codes[fragment_row(lane, j)][16 * s + fragment_col(lane, j, h)];
                    word |= mxfp4 ? spread_mxfp4(code, j, h) : code << (4 * j + 16 * h);
                }
            words[lane * 4 + s] = word;
        }
}

static void pack_scales(const epmoei_quant_tiles_t *tiles, const epmoei_quant_t *packed, int64_t tile,
                        const epmoei_tile_arrays_t *to)
{
    for (int64_t g = 0; g < tiles->groups; g++)
        for (int place = 0; place < EPMOEI_TILE_ROWS; place++) {
            int in_tile = place / 16 * 16 + place % 16 / 2 + 8 * (place & 1);
            int64_t row = epmoei_tiles_row(tiles, tile * EPMOEI_TILE_ROWS + in_tile);
            int64_t at = (tile * tiles->groups + g) * EPMOEI_TILE_ROWS + place;
            if (to->zeros) to->zeros[at] = row < 0 ? 0 : (uint8_t)epmoei_quant_zero(packed, row, g);
            int64_t from = row < 0 ? 0 : epmoei_quant_scale_at(packed, row, g);
            if (tiles->scales_dtype == EPMOE_F8_E8M0)
                ((uint8_t *)to->scales)[at] = row < 0 ? 0 : ((const uint8_t *)packed->scales)[from];
            else
                epmoei_store(to->scales, tiles->scales_dtype, at, row < 0 ? 0 : epmoei_quant_scale(packed, from));
        }
}

void epmoei_tiles_pack(const epmoei_quant_tiles_t *tiles, const epmoei_quant_t *packed, const epmoei_tile_arrays_t *to)
{
#pragma omp parallel for schedule(static)
    for (int64_t tile = 0; tile < tiles->tiles; tile++) {
        for (int64_t block = 0; block < tiles->blocks; block++)
            for (int part = 0; part < 4; part++) {
                uint32_t words[128];
                pack_part(tiles, packed, tile * EPMOEI_TILE_ROWS + 16 * part, block * EPMOEI_TILE_COLS, words);
                memcpy((char *)to->data + (tile * tiles->blocks + block) * EPMOEI_TILE_BYTES + part * sizeof words,
                       words, sizeof words);
            }
        pack_scales(tiles, packed, tile, to);
    }
}

uint32_t epmoei_tiles_code(const epmoei_quant_tiles_t *tiles, const void *data, int64_t row, int64_t col)
{
    int64_t at = epmoei_tiles_device_row(tiles, row);
    int64_t block = at / EPMOEI_TILE_ROWS * tiles->blocks + col / EPMOEI_TILE_COLS;
    int part = (int)(at % EPMOEI_TILE_ROWS / 16), r = (int)(at % 16), s = (int)(col % EPMOEI_TILE_COLS / 16);
    int c = (int)(col % 16), lane = r % 8 * 4 + c % 8 / 2, j = r / 8 + c / 8 * 2, h = c & 1;
    uint32_t word;
    memcpy(&word, (const char *)data + block * EPMOEI_TILE_BYTES + part * 512 + lane * 16 + s * 4, 4);
    return tiles->format == EPMOE_FORMAT_MXFP4 ? collect_mxfp4(word, j, h) : word >> (4 * j + 16 * h) & 15;
}

int64_t epmoei_tiles_scale_at(const epmoei_quant_tiles_t *tiles, int64_t row, int64_t group)
{
    int64_t at = epmoei_tiles_device_row(tiles, row), in_tile = at % EPMOEI_TILE_ROWS;
    int64_t place = in_tile / 16 * 16 + in_tile % 8 * 2 + in_tile % 16 / 8;
    return (at / EPMOEI_TILE_ROWS * tiles->groups + group) * EPMOEI_TILE_ROWS + place;
}
