/* The epilogue of the FP8 grouped GEMM: accumulators of 64 tokens by 256 weight rows, held by one warpgroup, to rows of
 * y. Tokens are wgmma's rows here: a warp has 16 of them, a thread the columns 2 (lane%4) and + 1 of every 8 of the
 * tokens lane/4 and lane/4 + 8. Gated, every 16 columns are 8 gates and then their 8 ups, so that a thread holds both
 * halves of an output.
 *
 * A warp finishes 8 tokens by 128 outputs at a time, by itself: into shared memory, a token's outputs side by side,
 * and from there to y 16 bytes a lane, or through one more pass to E4M3 with the scale of the 128. What is not fit for
 * wide stores goes to y from the registers. The common outputs have code of their own: nothing multiplies while a
 * shared tile is stored. */
#ifndef EPMOEI_GROUPED_GEMM_FP8_EPILOGUE_SM90_CUH
#define EPMOEI_GROUPED_GEMM_FP8_EPILOGUE_SM90_CUH

#include "kernels/fp8_cuda.cuh"
#include "kernels/grouped_gemm_epilogue_sm90.cuh"
#include "kernels/grouped_gemm_fp8.h"
#include "kernels/ptx_wgmma.cuh"

namespace
{

constexpr int kFp8StagingBytes = 2048; /* of a warp: 8 tokens by 128 outputs of 16 bits */
constexpr int kFp8Outputs = 128;       /* that share a scale */

/* How outputs come about, and where they go. */
enum fp8_way_t {
    FP8_FAMILY = 0, /* gated by a sigmoid */
    FP8_GATED = 1,
    FP8_PLAIN = 2,
    FP8_WAYS = 3, /* mask */
    FP8_STAGED = 4,
    FP8_QUANTISED = 8,
    FP8_QUICK = 16, /* staged, without biases: silu without clamp and weights, or plain without activation */
};

inline int32_t fp8_way(const epmoe_grouped_gemm_args_t *args, bool quantised)
{
    const bool gated = args->activation < EPMOE_ACTIVATION_NONE;
    const bool plain_silu = args->activation == EPMOE_ACTIVATION_SILU && !(args->limit > 0.0f) && !args->row_weights;
    int32_t way = FP8_PLAIN;
    if (gated) way = args->activation == EPMOE_ACTIVATION_GELU ? FP8_GATED : FP8_FAMILY;
    if (quantised) way |= FP8_QUANTISED;
    if (!quantised && (args->y_dtype == EPMOE_F32 || (gated ? args->n / 2 : args->n) % 8)) return way;
    if (!args->bias && (plain_silu || args->activation == EPMOE_ACTIVATION_NONE)) way |= FP8_QUICK;
    return way | FP8_STAGED;
}

/* A tile as a consumer warp sees it. */
struct fp8_epilogue_t {
    char *staging;        /* [kFp8StagingBytes], this warp's */
    const int32_t *rows;  /* rows of y of the warp's 16 tokens, or -1 */
    const float2 *scales; /* what multiplies the tokens' products, and their outputs */
    int32_t num_rows;     /* of the 16; may be below 1 */
    int32_t expert;
    int32_t col; /* first output of the tile */
};

/* Eight accumulators: of four blocks of columns, 32 `part` and on, the pair of token lane/4 + 8 `upper`. Registers
 * cannot be indexed, and unrolled the epilogue would be more code than the instruction cache holds. */
__device__ __forceinline__ void select_part(float (&part)[8], const float (&acc)[128], int index, bool upper)
{
    switch (2 * index + (upper ? 1 : 0)) {
#define PART(n)                                                                                                        \
    case n:                                                                                                            \
        _Pragma("unroll") for (int i = 0; i < 8; i++) part[i] = acc[16 * (n / 2) + 4 * (i / 2) + 2 * (n % 2) + i % 2]; \
        break
        PART(0);
        PART(1);
        PART(2);
        PART(3);
        PART(4);
        PART(5);
        PART(6);
        PART(7);
        PART(8);
        PART(9);
        PART(10);
        PART(11);
        PART(12);
        PART(13);
        PART(14);
    default: PART(15);
#undef PART
    }
}

/* The biases of outputs col and col + 1: of their gates and ups, or of themselves. */
__device__ __forceinline__ float4 load_biases(const gemm_params_t &p, const float *bias, int32_t col)
{
    float4 b = {0.0f, 0.0f, 0.0f, 0.0f};
    if (!bias) return b;
    if (p.gated) {
        if (col < p.n_out) b.x = bias[gemm_weight_row(p, 2 * col)], b.z = bias[gemm_weight_row(p, 2 * col + 1)];
        if (col + 1 < p.n_out) b.y = bias[gemm_weight_row(p, 2 * col + 2)], b.w = bias[gemm_weight_row(p, 2 * col + 3)];
    } else {
        if (col < p.n_out) b.x = bias[col];
        if (col + 1 < p.n_out) b.y = bias[col + 1];
    }
    return b;
}

__device__ __forceinline__ float finish_gated(const gemm_params_t &p, int32_t way, const sigmoid_family_t &family,
                                              float2 scale, float gate, float up)
{
    if (way == FP8_FAMILY) return scale.y * sigmoid_gate(family, gate, up);
    return scale.y * epmoei_activate_device(p.activation, gate, up, p.alpha, p.limit);
}

__device__ __forceinline__ float2 unpack_pair(uint32_t pair, bool bf16)
{
    return bf16 ? __bfloat1622float2(*(__nv_bfloat162 *)&pair) : __half22float2(*(__half2 *)&pair);
}

/* Where chunk `chunk` of 8 outputs of one of 8 tokens is staged: no two lanes of a store meet at a bank. */
__device__ __forceinline__ int staged_chunk(int token, int chunk) { return (token * 256 | token << 4) ^ chunk << 4; }

/* Outputs [col, col + 128) of up to 8 tokens from shared memory to y. */
__device__ __forceinline__ void store_staged_rows(const gemm_params_t &p, const fp8_epilogue_t &e, int first,
                                                  int32_t col)
{
    const int lane = threadIdx.x % 32, chunk = lane % 16;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int token = 2 * i + lane / 16;
        const int32_t row = first + token < e.num_rows ? e.rows[first + token] : -1;
        if (row < 0 || col + 8 * chunk >= p.n_out) continue;
        *(uint4 *)((char *)p.y + ((int64_t)row * p.n_out + col + 8 * chunk) * 2) =
            *(const uint4 *)(e.staging + staged_chunk(token, chunk));
    }
}

/* The same quantised; amax is that of this lane's token, lane/4. */
__device__ __forceinline__ void store_quantised_rows(const gemm_params_t &p, const epmoei_fp8_rows_t &y,
                                                     const fp8_epilogue_t &e, int first, int32_t col, float amax)
{
    const int lane = threadIdx.x % 32, token = lane / 4, part = lane % 4;
    const bool bf16 = p.y_dtype == EPMOE_BF16;
    amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, 1));
    amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, 2));
    const int32_t row = first + token < e.num_rows ? e.rows[first + token] : -1;
    if (row < 0 || col >= p.n_out) return;
    const float scale = epmoei_scale_of_amax(amax);
    const epmoei_divisor_t divisor = epmoei_divisor(scale);
#pragma unroll 1
    for (int i = 0; i < 2; i++) {
        const int32_t at = col + 32 * part + 16 * i;
        if (at >= p.n_out) break;
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int chunk = 4 * part + 2 * i + j;
            const uint4 pairs = *(const uint4 *)(e.staging + staged_chunk(token, chunk));
            const uint32_t pair[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
            float values[8];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float2 both = unpack_pair(pair[k], bf16);
                values[2 * k] = both.x, values[2 * k + 1] = both.y;
            }
            epmoei_divide_run<true>(values, divisor);
#pragma unroll
            for (int k = 0; k < 2; k++)
                words[2 * j + k] = epmoei_to_e4m3x2(values[4 * k], values[4 * k + 1]) |
                                   epmoei_to_e4m3x2(values[4 * k + 2], values[4 * k + 3]) << 16;
        }
        *(uint4 *)(y.codes + (int64_t)row * p.n_out + at) = make_uint4(words[0], words[1], words[2], words[3]);
    }
    if (part == 0) y.scales[col / kFp8Outputs * y.stride + row] = scale;
}

__device__ __forceinline__ void store_staged(const gemm_params_t &p, const epmoei_fp8_rows_t &y, int32_t way,
                                             const fp8_epilogue_t &e, int first, int32_t col, float amax)
{
    __syncwarp();
    if (way & FP8_QUANTISED)
        store_quantised_rows(p, y, e, first, col, amax);
    else
        store_staged_rows(p, e, first, col);
    __syncwarp();
}

/* Two outputs of one token, col even. */
__device__ __forceinline__ void store_pair(const gemm_params_t &p, int32_t row, int32_t col, float a, float b)
{
    if (row < 0 || col >= p.n_out) return;
    gemm_store_run<2>(p, (int64_t)row * p.n_out + col, p.n_out - col, [&](int i) { return i ? b : a; });
}

/* Outputs [col, col + 128) of tokens first + 0..7, whose accumulators are parts [part, part + num_parts). */
__device__ __forceinline__ void store_rows(const gemm_params_t &p, const epmoei_fp8_rows_t &y, int32_t way,
                                           const fp8_epilogue_t &e, const float (&acc)[128], int first, int32_t col,
                                           int part, int num_parts)
{
    const int lane = threadIdx.x % 32, token = lane / 4;
    const bool bf16 = p.y_dtype == EPMOE_BF16, inside = first + token < e.num_rows;
    const int32_t row = inside ? e.rows[first + token] : -1;
    const float2 scale = inside ? e.scales[first + token] : make_float2(1.0f, 1.0f);
    const float *bias = p.bias ? p.bias + (int64_t)e.expert * p.n : nullptr;
    const sigmoid_family_t family = sigmoid_family(p);
    const int pairs = p.gated ? 2 : 4; /* of outputs, of a part */
    float amax = 0.0f;
#pragma unroll 1
    for (int i = 0; i < num_parts; i++) {
        float v[8];
        select_part(v, acc, part + i, first > 0);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (j >= pairs) break;
            const int chunk = pairs * i + j; /* of 8 outputs */
            const int32_t at = col + 8 * chunk + 2 * (lane % 4);
            const float4 b = load_biases(p, bias, at);
            float2 out;
            if (p.gated) {
                const int g = j < 2 ? 4 * j : 0;
                out.x = finish_gated(p, way & FP8_WAYS, family, scale, v[g] * scale.x + b.x, v[g + 2] * scale.x + b.z);
                out.y =
                    finish_gated(p, way & FP8_WAYS, family, scale, v[g + 1] * scale.x + b.y, v[g + 3] * scale.x + b.w);
            } else {
                out = make_float2(v[2 * j] * scale.x + b.x, v[2 * j + 1] * scale.x + b.y);
                if (p.activation == EPMOE_ACTIVATION_SIGMOID)
                    out = make_float2(epmoei_sigmoid_device(out.x), epmoei_sigmoid_device(out.y));
                out.x *= scale.y, out.y *= scale.y;
            }
            if (!(way & FP8_STAGED)) {
                store_pair(p, row, at, out.x, out.y);
                continue;
            }
            const uint32_t packed = bf16 ? pack_pair(out.x, out.y, __nv_bfloat16()) : pack_pair(out.x, out.y, __half());
            *(uint32_t *)(e.staging + staged_chunk(token, chunk) + 4 * (lane % 4)) = packed;
            if (way & FP8_QUANTISED) {
                const float2 rounded = unpack_pair(packed, bf16);
                amax = fmaxf(amax, fmaxf(fabsf(rounded.x), fabsf(rounded.y))); /* drops a NaN */
            }
        }
    }
    if (way & FP8_STAGED) store_staged(p, y, way, e, first, col, amax);
}

template <typename T> struct pair_of;
template <> struct pair_of<__nv_bfloat16> {
    using type = __nv_bfloat162;
};
template <> struct pair_of<__half> {
    using type = __half2;
};

/* A tile of FP8_QUICK. One round finishes 8 tokens by 128 outputs, with the names of registers that its first
 * accumulators have; the others are moved there, which is less than choosing each. */
template <typename T>
__device__ __forceinline__ void store_quick_tile(const gemm_params_t &p, const epmoei_fp8_rows_t &y, int32_t way,
                                                 const fp8_epilogue_t &e, float (&acc)[128])
{
    using pair_t = typename pair_of<T>::type;
    const int lane = threadIdx.x % 32, token = lane / 4, rounds = p.gated ? 2 : 4;
    char *const to = e.staging + 4 * (lane % 4);
#pragma unroll 1
    for (int round = 0; round < rounds; round++) {
        const int first = round % 2 * 8;
        if (first < e.num_rows) {
            uint32_t most = 0;
            if (p.gated) {
#pragma unroll
                for (int chunk = 0; chunk < 16; chunk++) {
                    const float *v = acc + 8 * chunk; /* gates of two tokens, then their ups */
                    const uint32_t packed = pack_pair(plain_silu(v[0], v[4]), plain_silu(v[1], v[5]), T());
                    *(uint32_t *)(to + staged_chunk(token, chunk)) = packed;
                    const uint32_t size = packed & 0x7FFF7FFFu;
                    const pair_t larger = __hmax2(*(const pair_t *)&most, *(const pair_t *)&size); /* drops a NaN */
                    most = *(const uint32_t *)&larger;
                }
            } else {
                const float2 scale = first + token < e.num_rows ? e.scales[first + token] : make_float2(1.0f, 1.0f);
                const float factor = scale.x * scale.y; /* one of them is 1 */
#pragma unroll
                for (int chunk = 0; chunk < 16; chunk++)
                    *(uint32_t *)(to + staged_chunk(token, chunk)) =
                        pack_pair(acc[4 * chunk] * factor, acc[4 * chunk + 1] * factor, T());
            }
            const float2 sizes = unpack_pair(most, ptx_is_bf16<T>::value);
            store_staged(p, y, way, e, first, e.col + round / 2 * kFp8Outputs, fmaxf(sizes.x, sizes.y));
        }
        if (round == 1) { /* plain alone goes on: both tokens of the upper 128 outputs */
#pragma unroll
            for (int i = 0; i < 64; i++) acc[i] = acc[64 + i];
            continue;
        }
#pragma unroll
        for (int i = 0; i < 32; i++)
            if (i < 16 || p.gated) acc[4 * i] = acc[4 * i + 2], acc[4 * i + 1] = acc[4 * i + 3];
    }
}

__device__ __forceinline__ void store_tile(const gemm_params_t &p, const epmoei_fp8_rows_t &y, int32_t way,
                                           const fp8_epilogue_t &e, float (&acc)[128])
{
    if (way & FP8_QUICK) {
        if (p.y_dtype == EPMOE_BF16)
            store_quick_tile<__nv_bfloat16>(p, y, way, e, acc);
        else
            store_quick_tile<__half>(p, y, way, e, acc);
        return;
    }
    const int chunks = p.gated ? 1 : 2; /* of 128 outputs */
#pragma unroll 1
    for (int i = 0; i < 2 * chunks; i++) {
        const int first = i / chunks * 8, chunk = i % chunks;
        if (first >= e.num_rows) break;
        store_rows(p, y, way, e, acc, first, e.col + chunk * kFp8Outputs, 4 * chunk, 8 / chunks);
    }
}

} // namespace

#endif
