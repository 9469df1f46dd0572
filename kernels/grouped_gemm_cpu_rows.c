/* Register-blocked dot products on the compiler's vector types. A block is kRows weight rows by kX rows of x: one
 * accumulator vector each, kept in registers over the whole of k. Widening a bf16 vector costs as much as a
 * multiply-add, so more x rows per block amortise it; one x row takes many weight rows to cover the add's latency. */
#include "kernels/grouped_gemm_cpu_rows.h"

#include "base/dtype.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define PASTE2(a, b) a##b
#define PASTE(a, b)  PASTE2(a, b)
#define INLINE       static inline __attribute__((always_inline))

#if defined(__AVX512F__)
#define LANES     16
#define WIDE_X    8 /* 3 x 8 accumulators of 32 registers */
#define WIDE_ROWS 3
#elif defined(__AVX2__)
#define LANES     8
#define WIDE_X    4 /* 3 x 4 accumulators of 16 registers */
#define WIDE_ROWS 3
#else
#define LANES     4
#define WIDE_X    4
#define WIDE_ROWS 2
#endif

typedef float vec_f __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t vec_u __attribute__((vector_size(LANES * 4)));
typedef uint16_t vec_h __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

typedef enum weight_type_t { WEIGHT_BF16, WEIGHT_F16, WEIGHT_F32 } weight_type_t;

/* LANES 16-bit patterns as integers. The two intrinsics are one instruction each, where the portable form costs gcc a
 * split and a join. */
INLINE vec_u load_bits(const uint16_t *p)
{
#if defined(__AVX512F__)
    return (vec_u)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p));
#elif defined(__AVX2__)
    return (vec_u)_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p));
#else
    return __builtin_convertvector(*(const vec_h *)p, vec_u);
#endif
}

INLINE vec_f widen_f16(vec_u bits)
{
    vec_u magnitude = (bits & 0x7FFF) << 13;
    vec_u sign = (bits & 0x8000) << 16;
    /* Read as a float the shifted bits are 2^-112 of the value, subnormals included; infinity and NaN keep their
     * mantissa under a full exponent. */
    vec_u value = (vec_u)((vec_f)magnitude * 0x1p112f);
    vec_u special = (vec_u)(magnitude >= 0x0F800000u);
    return (vec_f)(sign | (special & (magnitude | 0x7F800000u)) | (~special & value));
}

INLINE vec_f load_weights(const void *row, int32_t k, weight_type_t type)
{
    if (type == WEIGHT_F32) return *(const vec_f *)((const float *)row + k);
    vec_u bits = load_bits((const uint16_t *)row + k);
    return type == WEIGHT_F16 ? widen_f16(bits) : (vec_f)(bits << 16);
}

/* The last k % LANES elements, in order. */
static __attribute__((noinline)) float tail_dot(const void *w_row, const float *x_row, int32_t first, int32_t k,
                                                weight_type_t type)
{
    static const epmoe_dtype_t dtypes[] = {EPMOE_BF16, EPMOE_F16, EPMOE_F32};
    float sum = 0.0f;
    for (int32_t i = first; i < k; i++) sum += epmoei_load(w_row, dtypes[type], i) * x_row[i];
    return sum;
}

static __attribute__((noinline)) float sum_lanes(const vec_f *v)
{
    float lanes[LANES];
    memcpy(lanes, v, sizeof lanes);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
}

INLINE void block(const void *const *w_rows, const float *const *x_rows, int32_t k, float *out, int64_t out_stride,
                  weight_type_t type, const int kRows, const int kX)
{
    vec_f acc[8][8] = {{{0}}};
    int32_t whole = k - k % LANES;
    for (int32_t i = 0; i < whole; i += LANES) {
        vec_f x[8];
#pragma GCC unroll 8
        for (int m = 0; m < kX; m++) x[m] = *(const vec_f *)(x_rows[m] + i);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; r++) {
            vec_f w = load_weights(w_rows[r], i, type);
#pragma GCC unroll 8
            for (int m = 0; m < kX; m++) acc[r][m] += w * x[m];
        }
    }
    for (int r = 0; r < kRows; r++)
        for (int m = 0; m < kX; m++) {
            float sum = sum_lanes(&acc[r][m]);
            out[r * out_stride + m] = whole < k ? sum + tail_dot(w_rows[r], x_rows[m], whole, k, type) : sum;
        }
}

/* All weight rows against kX rows of x, kRows at a time. */
INLINE void strip(const void *const *w_rows, int32_t num_rows, const float *const *x_rows, int32_t k, float *out,
                  int64_t out_stride, weight_type_t type, const int kRows, const int kX)
{
    int32_t r = 0;
    for (; r + kRows <= num_rows; r += kRows)
        block(w_rows + r, x_rows, k, out + r * out_stride, out_stride, type, kRows, kX);
    for (; r < num_rows; r++) block(w_rows + r, x_rows, k, out + r * out_stride, out_stride, type, 1, kX);
}

/* Weight rows are taken in groups that stay in the L2 cache while every strip of x passes over them. */
#define GROUP_BYTES (256 * 1024)

INLINE void rows(const void *const *w_rows, int32_t num_rows, const float *const *x_rows, int32_t num_x, int32_t k,
                 float *out, int64_t out_stride, weight_type_t type)
{
    int32_t group = (int32_t)(GROUP_BYTES / ((int64_t)k * (type == WEIGHT_F32 ? 4 : 2)));
    group = group / 24 * 24; /* a multiple of every kRows below */
    if (group < 24) group = 24;
    for (int32_t first = 0; first < num_rows; first += group) {
        int32_t count = num_rows - first < group ? num_rows - first : group;
        const void *const *w = w_rows + first;
        float *to = out + first * out_stride;
        int32_t m = 0;
        for (; m + WIDE_X <= num_x; m += WIDE_X)
            strip(w, count, x_rows + m, k, to + m, out_stride, type, WIDE_ROWS, WIDE_X);
        if (WIDE_X > 4 && m + 4 <= num_x) {
            strip(w, count, x_rows + m, k, to + m, out_stride, type, 4, 4);
            m += 4;
        }
        if (m + 2 <= num_x) {
            strip(w, count, x_rows + m, k, to + m, out_stride, type, 4, 2);
            m += 2;
        }
        if (m < num_x) strip(w, count, x_rows + m, k, to + m, out_stride, type, 8, 1);
    }
}

static void rows_bf16(const void *const *w_rows, int32_t num_rows, const float *const *x_rows, int32_t num_x, int32_t k,
                      float *out, int64_t out_stride)
{
    rows(w_rows, num_rows, x_rows, num_x, k, out, out_stride, WEIGHT_BF16);
}

static void rows_f16(const void *const *w_rows, int32_t num_rows, const float *const *x_rows, int32_t num_x, int32_t k,
                     float *out, int64_t out_stride)
{
    rows(w_rows, num_rows, x_rows, num_x, k, out, out_stride, WEIGHT_F16);
}

static void rows_f32(const void *const *w_rows, int32_t num_rows, const float *const *x_rows, int32_t num_x, int32_t k,
                     float *out, int64_t out_stride)
{
    rows(w_rows, num_rows, x_rows, num_x, k, out, out_stride, WEIGHT_F32);
}

/* -------------------------------------------------------------------------------------------------- quantised rows */

typedef uint8_t vec_b __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef int32_t vec_i __attribute__((vector_size(LANES * 4)));

typedef enum code_type_t { CODE_E4M3, CODE_W4, CODE_E2M1 } code_type_t;

INLINE vec_f widen_e4m3(const uint8_t *codes)
{
#if defined(__AVX512F__)
    vec_u code = (vec_u)_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)codes));
#elif defined(__AVX2__)
    vec_u code = (vec_u)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)codes));
#else
    vec_u code = __builtin_convertvector(*(const vec_b *)codes, vec_u);
#endif
    vec_u magnitude = code & 0x7F;
    /* Read as a float the shifted bits are 2^-120 of the value, subnormals included. */
    vec_u value = (vec_u)((vec_f)(magnitude << 20) * 0x1p120f);
    vec_u nan = (vec_u)(magnitude == 0x7F) & 0x7FC00000u;
    return (vec_f)(value | nan | (code & 0x80) << 24);
}

/* The LANES nibbles from nibble i of a row on, i a multiple of LANES. */
INLINE vec_u load_nibbles(const void *row, int32_t i)
{
    const char *at = (const char *)row + i / 2;
#if defined(__AVX512F__)
    const __m512i word = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m512i shift = _mm512_set_epi32(28, 24, 20, 16, 12, 8, 4, 0, 28, 24, 20, 16, 12, 8, 4, 0);
    __m512i words = _mm512_permutexvar_epi32(word, _mm512_castsi128_si512(_mm_loadl_epi64((const void *)at)));
    return (vec_u)_mm512_and_si512(_mm512_srlv_epi32(words, shift), _mm512_set1_epi32(15));
#elif defined(__AVX2__)
    const __m256i shift = _mm256_set_epi32(28, 24, 20, 16, 12, 8, 4, 0);
    int32_t word;
    memcpy(&word, at, sizeof word);
    return (vec_u)_mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(word), shift), _mm256_set1_epi32(15));
#else
    uint16_t half;
    memcpy(&half, at, sizeof half);
    return (vec_u){half & 15u, half >> 4 & 15u, half >> 8 & 15u, half >> 12 & 15u};
#endif
}

INLINE vec_f widen_e2m1(vec_u nibbles)
{
#if defined(__AVX512F__)
    const __m512 values = _mm512_set_ps(-6, -4, -3, -2, -1.5f, -1, -.5f, -0.0f, 6, 4, 3, 2, 1.5f, 1, .5f, 0);
    return (vec_f)_mm512_permutexvar_ps((__m512i)nibbles, values);
#elif defined(__AVX2__)
    const __m256 values = _mm256_set_ps(6, 4, 3, 2, 1.5f, 1, .5f, 0);
    vec_u value = (vec_u)_mm256_permutevar8x32_ps(values, (__m256i)nibbles);
    return (vec_f)(value | (nibbles & 8) << 28);
#else
    static const float values[8] = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
    vec_f value;
    for (int i = 0; i < LANES; i++) value[i] = values[nibbles[i] & 7];
    return (vec_f)((vec_u)value | (nibbles & 8) << 28);
#endif
}

INLINE vec_f widen_code(const void *codes, int32_t i, float zero, code_type_t type)
{
    if (type == CODE_E4M3) return widen_e4m3((const uint8_t *)codes + i);
    vec_u nibbles = load_nibbles(codes, i);
    if (type == CODE_E2M1) return widen_e2m1(nibbles);
    return __builtin_convertvector((vec_i)nibbles, vec_f) - zero;
}

/* Registers hold one sum per weight row and x row, and each group's scale and zero point. A weight is rounded as the
 * definition of its format rounds it, before it is multiplied by x. */
INLINE void coded_block(const epmoei_coded_row_t *w_rows, const float *const *x_rows, int32_t first, int32_t k,
                        int32_t group, float *out, int64_t out_stride, code_type_t type, const int kRows, const int kX)
{
    vec_f acc[4][8] = {{{0}}};
    int32_t phase = first % group;
    for (int32_t i = 0, g = 0; i < k; g++) {
        int32_t end = (g + 1) * group - phase;
        float scale[4], zero[4];
        for (int r = 0; r < kRows; r++) {
            scale[r] = w_rows[r].scales[g];
            zero[r] = type == CODE_W4 ? w_rows[r].zeros[g] : 0.0f;
        }
        if (end > k) end = k;
        for (; i < end; i += LANES) {
            vec_f x[8];
#pragma GCC unroll 8
            for (int m = 0; m < kX; m++) x[m] = *(const vec_f *)(x_rows[m] + i);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; r++) {
                vec_f w = widen_code(w_rows[r].codes, i, zero[r], type) * scale[r];
#pragma GCC unroll 8
                for (int m = 0; m < kX; m++) acc[r][m] += w * x[m];
            }
        }
    }
    for (int r = 0; r < kRows; r++)
        for (int m = 0; m < kX; m++) out[r * out_stride + m] = sum_lanes(&acc[r][m]);
}

INLINE void coded_strip(const epmoei_coded_row_t *w_rows, int32_t num_rows, const float *const *x_rows, int32_t first,
                        int32_t k, int32_t group, float *out, int64_t out_stride, code_type_t type, const int kRows,
                        const int kX)
{
    int32_t r = 0;
    for (; r + kRows <= num_rows; r += kRows)
        coded_block(w_rows + r, x_rows, first, k, group, out + r * out_stride, out_stride, type, kRows, kX);
    for (; r < num_rows; r++)
        coded_block(w_rows + r, x_rows, first, k, group, out + r * out_stride, out_stride, type, 1, kX);
}

/* A tile of a piece is small enough to stay in cache while every strip of x passes over it. */
INLINE void coded_rows(const epmoei_coded_row_t *w_rows, int32_t num_rows, const float *const *x_rows, int32_t num_x,
                       int32_t first, int32_t k, int32_t group, float *out, int64_t out_stride, code_type_t type)
{
    int32_t m = 0;
    for (; LANES == 16 && m + 8 <= num_x; m += 8)
        coded_strip(w_rows, num_rows, x_rows + m, first, k, group, out + m, out_stride, type, 2, 8);
    for (; m + 4 <= num_x; m += 4)
        coded_strip(w_rows, num_rows, x_rows + m, first, k, group, out + m, out_stride, type, LANES == 16 ? 4 : 2, 4);
    for (; m + 2 <= num_x; m += 2)
        coded_strip(w_rows, num_rows, x_rows + m, first, k, group, out + m, out_stride, type, LANES == 16 ? 4 : 2, 2);
    if (m < num_x) coded_strip(w_rows, num_rows, x_rows + m, first, k, group, out + m, out_stride, type, 4, 1);
}

static void rows_e4m3(const epmoei_coded_row_t *w_rows, int32_t num_rows, const float *const *x_rows, int32_t num_x,
                      int32_t first, int32_t k, int32_t group, float *out, int64_t out_stride)
{
    coded_rows(w_rows, num_rows, x_rows, num_x, first, k, group, out, out_stride, CODE_E4M3);
}

static void rows_w4(const epmoei_coded_row_t *w_rows, int32_t num_rows, const float *const *x_rows, int32_t num_x,
                    int32_t first, int32_t k, int32_t group, float *out, int64_t out_stride)
{
    coded_rows(w_rows, num_rows, x_rows, num_x, first, k, group, out, out_stride, CODE_W4);
}

static void rows_e2m1(const epmoei_coded_row_t *w_rows, int32_t num_rows, const float *const *x_rows, int32_t num_x,
                      int32_t first, int32_t k, int32_t group, float *out, int64_t out_stride)
{
    coded_rows(w_rows, num_rows, x_rows, num_x, first, k, group, out, out_stride, CODE_E2M1);
}

const epmoei_rows_table_t PASTE(epmoei_rows_, EPMOEI_ISA) = {rows_bf16, rows_f16, rows_f32,
                                                             rows_e4m3, rows_w4,  rows_e2m1};
