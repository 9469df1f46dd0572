/* Coded rows on the device: eight lanes code the 128 columns of a scale, 16 columns each, with the bits of
 * epmoe_quantize_fp8 (BLOCK128); and what a code stands for, rounded to the dtype of x. */
#ifndef EPMOEI_CODED_ROWS_CUDA_CUH
#define EPMOEI_CODED_ROWS_CUDA_CUH

#include "kernels/coded_rows.h"
#include "kernels/fp8_cuda.cuh"

static constexpr int kCodedRun = 16;                               /* columns of a lane: 16 bytes of codes */
static constexpr int kCodedLanes = EPMOEI_FP8_COLUMNS / kCodedRun; /* of a scale */

/* kCount columns as they are in memory. */
template <typename T, int kCount> struct alignas(16) coded_run_t {
    T element[kCount];
};

/* Columns [column, column + kCodedRun) of a row; 0 past its end. kAligned: hidden is a multiple of 8, and rows begin at
 * multiples of 16 bytes. */
template <bool kAligned, typename T>
static __device__ __forceinline__ void coded_load(coded_run_t<T, kCodedRun> *run, const T *row, uint32_t column,
                                                  uint32_t hidden)
{
    if constexpr (kAligned) {
        constexpr int kPart = 16 / (int)sizeof(T);
#pragma unroll
        for (int i = 0; i < kCodedRun / kPart; i++) {
            uint4 part = make_uint4(0, 0, 0, 0);
            if (column + i * kPart < hidden) part = *reinterpret_cast<const uint4 *>(row + column + i * kPart);
            reinterpret_cast<uint4 *>(run)[i] = part;
        }
    } else {
#pragma unroll
        for (int i = 0; i < kCodedRun; i++)
            run->element[i] = column + i < hidden ? row[column + i] : epmoei_from_float<T>(0.0f);
    }
}

/* The codes of this lane's columns and the scale of its eight lanes, all of which are in `lanes` and call. */
template <typename T>
static __device__ __forceinline__ float coded_encode(const coded_run_t<T, kCodedRun> &run, uint32_t lanes, uint4 *codes)
{
    float values[kCodedRun], amax = 0.0f;
#pragma unroll
    for (int i = 0; i < kCodedRun; i++) {
        values[i] = epmoei_to_float(run.element[i]);
        amax = fmaxf(amax, fabsf(values[i])); /* drops a NaN */
    }
#pragma unroll
    for (int step = 1; step < kCodedLanes; step *= 2) amax = fmaxf(amax, __shfl_xor_sync(lanes, amax, step));
    const float scale = epmoei_scale_of_amax(amax);
    epmoei_divide_run<true>(values, epmoei_divisor(scale));
    uint32_t words[kCodedRun / 4];
#pragma unroll
    for (int i = 0; i < kCodedRun / 4; i++)
        words[i] = epmoei_to_e4m3x2(values[4 * i], values[4 * i + 1]) |
                   epmoei_to_e4m3x2(values[4 * i + 2], values[4 * i + 3]) << 16;
    *codes = make_uint4(words[0], words[1], words[2], words[3]);
    return scale;
}

/* Four codes. */
template <typename T> static __device__ __forceinline__ void coded_decode_word(T *to, uint32_t word, float scale)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t halves = epmoei_e4m3x2_to_f16x2(word >> 16 * i & 0xFFFFu);
        __half2 pair;
        memcpy(&pair, &halves, 4);
        const float2 both = __half22float2(pair);
        to[2 * i] = epmoei_from_float<T>(__fmul_rn(both.x, scale));
        to[2 * i + 1] = epmoei_from_float<T>(__fmul_rn(both.y, scale));
    }
}

/* Columns [column, column + 4*kWords) of a row of x, as their codes and the scale say. */
template <bool kAligned, int kWords, typename T>
static __device__ __forceinline__ void coded_store(T *row, uint32_t column, uint32_t hidden,
                                                   const uint32_t (&words)[kWords], float scale)
{
    coded_run_t<T, 4 * kWords> run;
#pragma unroll
    for (int i = 0; i < kWords; i++) coded_decode_word(run.element + 4 * i, words[i], scale);
    if constexpr (kAligned) {
        constexpr int kPart = 16 / (int)sizeof(T);
#pragma unroll
        for (int i = 0; i < 4 * kWords / kPart; i++)
            if (column + i * kPart < hidden)
                *reinterpret_cast<uint4 *>(row + column + i * kPart) = reinterpret_cast<const uint4 *>(&run)[i];
    } else {
#pragma unroll
        for (int i = 0; i < 4 * kWords; i++)
            if (column + i < hidden) row[column + i] = run.element[i];
    }
}

#endif
