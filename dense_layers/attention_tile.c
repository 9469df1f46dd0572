/* Both products keep a block of accumulators in registers on the compiler's vector types: scores run over the columns
 * of a head with one vector per (row, key), values over the keys with some vectors per row. */
#include "dense_layers/attention_tile.h"

#include "base/fp8.h"
#include "kernels/activation.h"

#define PASTE2(a, b) a##b
#define PASTE(a, b)  PASTE2(a, b)
#define INLINE       static inline __attribute__((always_inline))

#if defined(__AVX512F__)
#define LANES      16
#define BLOCK_ROWS 4 /* 4 x 4 accumulators of 32 registers */
#else
#if defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#define BLOCK_ROWS 2 /* 2 x 4 accumulators of 16 registers */
#endif
#define BLOCK_KEYS 4
#define BLOCK_VECS 4

typedef float vec_f __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef float vec_4 __attribute__((vector_size(16)));

/* --------------------------------------------------------------------------------------------------------- load */

static float widen_f16(uint16_t bits)
{
    uint32_t magnitude = (bits & 0x7FFFu) << 13, sign = (uint32_t)(bits & 0x8000u) << 16;
    /* Read as a float the shifted bits are 2^-112 of the value, subnormals included; infinity and NaN keep their
     * mantissa under a full exponent. */
    uint32_t value = epmoei_f32_bits(epmoei_f32_from_bits(magnitude) * 0x1p112f);
    uint32_t special = 0u - (uint32_t)(magnitude >= 0x0F800000u);
    return epmoei_f32_from_bits(sign | (special & (magnitude | 0x7F800000u)) | (~special & value));
}

static void widen(float *restrict dst, const void *src, epmoe_dtype_t dtype, int32_t n)
{
    const uint8_t *restrict bytes = src;
    const uint16_t *restrict halves = src;
    switch (dtype) {
    case EPMOE_BF16:
        for (int32_t i = 0; i < n; i++) dst[i] = epmoei_bf16_to_f32(halves[i]);
        break;
    case EPMOE_F16:
        for (int32_t i = 0; i < n; i++) dst[i] = widen_f16(halves[i]);
        break;
    case EPMOE_F8_E4M3:
        for (int32_t i = 0; i < n; i++) dst[i] = epmoei_e4m3_to_f32(bytes[i]);
        break;
    default: memcpy(dst, src, (size_t)n * sizeof *dst);
    }
}

/* ------------------------------------------------------------------------------------------------------- scores */

#if defined(__clang__)
#define SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
typedef int32_t vec_i4 __attribute__((vector_size(16)));
#define SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, (vec_i4){i, j, k, l})
#endif

/* Four lanes: the sum of a vector's parts of four. */
INLINE vec_4 fold(vec_f v)
{
    vec_4 parts[LANES / 4];
    memcpy(parts, &v, sizeof parts);
    vec_4 sum = parts[0];
#pragma GCC unroll 4
    for (int i = 1; i < LANES / 4; i++) sum += parts[i];
    return sum;
}

/* The sums of the lanes of each of four vectors. */
INLINE vec_4 sums(vec_f a, vec_f b, vec_f c, vec_f d)
{
    vec_4 w = fold(a), x = fold(b), y = fold(c), z = fold(d);
    vec_4 wx = SHUFFLE(w, x, 0, 4, 1, 5) + SHUFFLE(w, x, 2, 6, 3, 7);
    vec_4 yz = SHUFFLE(y, z, 0, 4, 1, 5) + SHUFFLE(y, z, 2, 6, 3, 7);
    return SHUFFLE(wx, yz, 0, 1, 4, 5) + SHUFFLE(wx, yz, 2, 3, 6, 7);
}

/* kRows rows against BLOCK_KEYS keys. */
INLINE void score_block(const float *q, const float *keys, int32_t width, float *scores, const int kRows)
{
    vec_f acc[BLOCK_ROWS][BLOCK_KEYS] = {{{0}}};
    for (int32_t i = 0; i < width; i += LANES) {
        vec_f key[BLOCK_KEYS];
#pragma GCC unroll 4
        for (int k = 0; k < BLOCK_KEYS; k++) key[k] = *(const vec_f *)(keys + (int64_t)k * width + i);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; r++) {
            vec_f row = *(const vec_f *)(q + (int64_t)r * width + i);
#pragma GCC unroll 4
            for (int k = 0; k < BLOCK_KEYS; k++) acc[r][k] += row * key[k];
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r++) {
        vec_4 four = sums(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
        memcpy(scores + r * EPMOEI_TILE_KEYS, &four, sizeof four);
    }
}

/* scores [num_rows,EPMOEI_TILE_KEYS]; a block that holds no key is left out. */
static void score(const epmoei_attention_tile_t *tile, int32_t num_keys, float *scores)
{
    int32_t width = tile->width;
    for (int32_t k = 0; k < num_keys; k += BLOCK_KEYS) {
        const float *keys = tile->keys + (int64_t)k * width;
        int32_t r = 0;
        for (; r + BLOCK_ROWS <= tile->num_rows; r += BLOCK_ROWS)
            score_block(tile->q + (int64_t)r * width, keys, width, scores + r * EPMOEI_TILE_KEYS + k, BLOCK_ROWS);
        for (; r < tile->num_rows; r++)
            score_block(tile->q + (int64_t)r * width, keys, width, scores + r * EPMOEI_TILE_KEYS + k, 1);
    }
}

/* ------------------------------------------------------------------------------------------------------ softmax */

/* The places [lo,hi) of the tile that a row sees; weights[r] turn from scores into exp(score - top). What was summed
 * before counts `decay` times. */
typedef struct step_t {
    int32_t lo[EPMOEI_TILE_ROWS];
    int32_t hi[EPMOEI_TILE_ROWS];
    float decay[EPMOEI_TILE_ROWS];
    float weights[EPMOEI_TILE_ROWS * EPMOEI_TILE_KEYS];
} step_t;

static void weigh_row(epmoei_attention_tile_t *tile, step_t *step, int32_t r)
{
    float *restrict weights = step->weights + r * EPMOEI_TILE_KEYS;
    float lanes[LANES], top = tile->top[r], sum = 0.0f;
    int32_t lo = step->lo[r], hi = step->hi[r];
    for (int32_t j = 0; j < EPMOEI_TILE_KEYS; j++) weights[j] = epmoei_select(j >= lo && j < hi, weights[j], -INFINITY);

    /* A NaN is never the largest; its weight carries it. */
    for (int lane = 0; lane < LANES; lane++) lanes[lane] = -INFINITY;
    for (int32_t j = 0; j < EPMOEI_TILE_KEYS; j += LANES)
        for (int lane = 0; lane < LANES; lane++)
            lanes[lane] = epmoei_select(weights[j + lane] > lanes[lane], weights[j + lane], lanes[lane]);
    for (int lane = 0; lane < LANES; lane++) top = lanes[lane] > top ? lanes[lane] : top;

    /* With no score above -inf yet the differences would be NaN. */
    float origin = top == -INFINITY ? 0.0f : top;
    for (int32_t j = 0; j < EPMOEI_TILE_KEYS; j++) weights[j] = epmoei_exp(weights[j] - origin);
    for (int lane = 0; lane < LANES; lane++) lanes[lane] = 0.0f;
    for (int32_t j = 0; j < EPMOEI_TILE_KEYS; j += LANES)
        for (int lane = 0; lane < LANES; lane++) lanes[lane] += weights[j + lane];
    for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];

    step->decay[r] = epmoei_exp(tile->top[r] - origin);
    tile->top[r] = top;
    tile->sum[r] = tile->sum[r] * step->decay[r] + sum;
}

/* ------------------------------------------------------------------------------------------------------- values */

/* kVecs vectors of columns of kRows rows that see the same keys. */
INLINE void value_block(float *acc, int32_t acc_stride, const float *decay, const float *weights, const float *values,
                        int32_t value_stride, int32_t lo, int32_t hi, const int kRows, const int kVecs)
{
    vec_f sum[BLOCK_ROWS][BLOCK_VECS];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; v++)
            sum[r][v] = *(const vec_f *)(acc + (int64_t)r * acc_stride + v * LANES) * decay[r];
    for (int32_t j = lo; j < hi; j++) {
        vec_f value[BLOCK_VECS];
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; v++) value[v] = *(const vec_f *)(values + (int64_t)j * value_stride + v * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < kVecs; v++) sum[r][v] += weights[r * EPMOEI_TILE_KEYS + j] * value[v];
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; v++) *(vec_f *)(acc + (int64_t)r * acc_stride + v * LANES) = sum[r][v];
}

INLINE void add_rows(epmoei_attention_tile_t *tile, const step_t *step, int32_t r, const int kRows)
{
    float *acc = tile->acc + (int64_t)r * tile->value_width;
    const float *weights = step->weights + r * EPMOEI_TILE_KEYS;
    int32_t i = 0;
    for (; i + BLOCK_VECS * LANES <= tile->value_width; i += BLOCK_VECS * LANES)
        value_block(acc + i, tile->value_width, step->decay + r, weights, tile->values + i, tile->value_stride,
                    step->lo[r], step->hi[r], kRows, BLOCK_VECS);
    for (; i < tile->value_width; i += LANES)
        value_block(acc + i, tile->value_width, step->decay + r, weights, tile->values + i, tile->value_stride,
                    step->lo[r], step->hi[r], kRows, 1);
}

static void step(epmoei_attention_tile_t *tile, int32_t first_key, int32_t num_keys)
{
    step_t state;
    int32_t num_rows = tile->num_rows;
    score(tile, num_keys, state.weights);
    for (int32_t r = 0; r < num_rows; r++) {
        state.lo[r] = (int32_t)epmoei_max64((int64_t)tile->first[r] - first_key, 0);
        state.hi[r] = (int32_t)epmoei_min64((int64_t)tile->end[r] - first_key, num_keys);
        if (state.lo[r] < state.hi[r])
            weigh_row(tile, &state, r);
        else
            state.lo[r] = state.hi[r] = 0;
    }
    for (int32_t r = 0; r < num_rows;) {
        bool block = r + BLOCK_ROWS <= num_rows;
        for (int32_t i = 1; i < BLOCK_ROWS && block; i++)
            block = state.lo[r + i] == state.lo[r] && state.hi[r + i] == state.hi[r];
        int32_t rows = block ? BLOCK_ROWS : 1;
        if (state.hi[r] > state.lo[r]) {
            if (block)
                add_rows(tile, &state, r, BLOCK_ROWS);
            else
                add_rows(tile, &state, r, 1);
        }
        r += rows;
    }
}

const epmoei_attention_isa_t PASTE(epmoei_attention_, EPMOEI_ISA) = {widen, step};
