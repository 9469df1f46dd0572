/* The epilogue of the FP8 grouped GEMM: accumulators of 64 tokens by 256 weight rows, held by one warpgroup, to rows of
 * y. Tokens are wgmma's rows here: a warp has 16 of them, a thread the columns 2 (lane%4) and + 1 of every 8 of the
 * tokens lane/4 and lane/4 + 8. Gated, every 16 columns are 8 gates and then their 8 ups, so that a thread holds both
 * halves of an output.
 *
 * A warp finishes its tokens by itself: into shared memory, a token's outputs side by side, and from there to y 16
 * bytes a lane, or as E4M3 with the scale of 128. What is not fit for wide stores goes to y from the registers. The
 * common outputs have code of their own, 16 tokens at once and without loops; the others are finished 8 tokens by 128
 * outputs at a time. */
#ifndef EPMOEI_GROUPED_GEMM_FP8_EPILOGUE_SM90_CUH
#define EPMOEI_GROUPED_GEMM_FP8_EPILOGUE_SM90_CUH

#include "kernels/fp8_cuda.cuh"
#include "kernels/grouped_gemm_epilogue_sm90.cuh"
#include "kernels/grouped_gemm_fp8.h"
#include "kernels/ptx_wgmma.cuh"

namespace
{

constexpr int kFp8StagingBytes = 2048; /* of a warp: 8 tokens by 128 outputs of 16 bits, or 16 by 128 bytes */
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
    int32_t lane;
    int32_t num_rows; /* of the 16; may be below 1 */
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
    const int lane = e.lane, chunk = lane % 16;
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
    const int lane = e.lane, token = lane / 4, part = lane % 4;
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
    const int lane = e.lane, token = lane / 4;
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

/* What follows is of FP8_QUICK: 16 tokens at a time, 128 bytes of each, a warp's staging. Without loops, since
 * registers cannot be indexed. */

/* Where 16 bytes of a token are staged: neither 8 tokens of a store nor 8 chunks of a load meet at a bank. */
__device__ __forceinline__ uint32_t staged_piece(int token, int chunk)
{
    return token * 128 + ((chunk ^ token % 8) << 4);
}

/* Where the rows go of which a lane stores a piece: those of tokens lane/8 + 4i. */
struct pieces_t {
    char *to[4]; /* NULL = nowhere */
};

/* y [rows,pitch] bytes from byte `at` of a row on. */
__device__ __forceinline__ pieces_t find_pieces(const fp8_epilogue_t &e, void *y, int64_t pitch, int32_t at)
{
    pieces_t pieces;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int token = e.lane / 8 + 4 * i;
        const int32_t row = token < e.num_rows ? e.rows[token] : -1;
        pieces.to[i] = row < 0 ? nullptr : (char *)y + row * pitch + at + e.lane % 8 * 16;
    }
    return pieces;
}

/* 128 bytes of 16 tokens to y, `offset` bytes further; left: bytes from there to the end of a row. */
__device__ __forceinline__ void store_pieces(const fp8_epilogue_t &e, const pieces_t &pieces, int32_t offset,
                                             int32_t left)
{
    __syncwarp();
    uint4 held[4];
#pragma unroll
    for (int i = 0; i < 4; i++) held[i] = *(const uint4 *)(e.staging + staged_piece(e.lane / 8 + 4 * i, e.lane % 8));
#pragma unroll
    for (int i = 0; i < 4; i++) ptx_store_16_if(pieces.to[i] + offset, held[i], pieces.to[i] && e.lane % 8 * 16 < left);
    __syncwarp();
}

/* 64 outputs of 16 bits of each token, a pair of 8 outputs for each of the thread's tokens, and from there to y. */
__device__ __forceinline__ void store_pairs(const fp8_epilogue_t &e, const uint32_t *pairs, const pieces_t &pieces,
                                            int32_t offset, int32_t left)
{
    const uint32_t staging = ptx_shared_address(e.staging);
#pragma unroll
    for (int i = 0; i < 4; i++) /* two chunks, of the lower and the upper 8 tokens each */
        ptx_stmatrix_x4(staging + staged_piece(e.lane % 16, 2 * i + e.lane / 16), pairs + 4 * i);
    store_pieces(e, pieces, offset, left);
}

/* Pairs of finished outputs: of chunk i of 8 those of tokens lane/4 and lane/4 + 8. */
template <typename T, int kChunks>
__device__ __forceinline__ void finish_silu(uint32_t (&pairs)[2 * kChunks], const float (&acc)[128])
{
#pragma unroll
    for (int i = 0; i < kChunks; i++) {
        const float *v = acc + 8 * i; /* gates of two tokens, then their ups */
        pairs[2 * i] = pack_pair(plain_silu(v[0], v[4]), plain_silu(v[1], v[5]), T());
        pairs[2 * i + 1] = pack_pair(plain_silu(v[2], v[6]), plain_silu(v[3], v[7]), T());
    }
}

/* The 128 outputs of the thread's quad for one of its tokens: their scale, and their codes to staging. */
template <typename T>
__device__ __forceinline__ float stage_codes(const fp8_epilogue_t &e, const uint32_t (&pairs)[32], int upper)
{
    using pair_t = typename pair_of<T>::type;
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const uint32_t size = pairs[2 * i + upper] & 0x7FFF7FFFu;
        const pair_t larger = __hmax2(*(const pair_t *)&most, *(const pair_t *)&size); /* drops a NaN */
        most = *(const uint32_t *)&larger;
    }
    const float2 sizes = unpack_pair(most, ptx_is_bf16<T>::value);
    float amax = fmaxf(sizes.x, sizes.y);
    amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, 1));
    amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, 2));
    const float scale = epmoei_scale_of_amax(amax);
    const epmoei_divisor_t divisor = epmoei_divisor(scale);
    const int token = e.lane / 4 + 8 * upper;
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
        const float2 lower = unpack_pair(pairs[2 * i + upper], ptx_is_bf16<T>::value);
        const float2 higher = unpack_pair(pairs[2 * i + 2 + upper], ptx_is_bf16<T>::value);
        float values[4] = {lower.x, lower.y, higher.x, higher.y};
        epmoei_divide_run<true>(values, divisor);
        uint16_t *const to = (uint16_t *)(e.staging + staged_piece(token, i / 2)) + e.lane % 4;
        to[0] = (uint16_t)epmoei_to_e4m3x2(values[0], values[1]);
        to[4] = (uint16_t)epmoei_to_e4m3x2(values[2], values[3]);
    }
    return scale;
}

template <typename T>
__device__ __forceinline__ void store_quick_gated(const gemm_params_t &p, const epmoei_fp8_rows_t &y, int32_t way,
                                                  const fp8_epilogue_t &e, const float (&acc)[128])
{
    uint32_t pairs[32];
    finish_silu<T, 16>(pairs, acc);
    if (way & FP8_QUANTISED) {
#pragma unroll
        for (int upper = 0; upper < 2; upper++) {
            const float scale = stage_codes<T>(e, pairs, upper);
            const int token = e.lane / 4 + 8 * upper;
            if (e.lane % 4 == 0 && token < e.num_rows && e.col < p.n_out && e.rows[token] >= 0)
                y.scales[e.col / kFp8Outputs * y.stride + e.rows[token]] = scale;
        }
        store_pieces(e, find_pieces(e, y.codes, p.n_out, e.col), 0, p.n_out - e.col);
        return;
    }
    const pieces_t pieces = find_pieces(e, p.y, (int64_t)p.n_out * 2, e.col * 2);
#pragma unroll
    for (int half = 0; half < 2; half++)
        store_pairs(e, pairs + 16 * half, pieces, 128 * half, (p.n_out - e.col) * 2 - 128 * half);
}

template <typename T>
__device__ __forceinline__ void store_quick_plain(const gemm_params_t &p, const fp8_epilogue_t &e,
                                                  const float (&acc)[128])
{
    float factor[2]; /* one of the two is 1 */
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int token = e.lane / 4 + 8 * i;
        const float2 scale = token < e.num_rows ? e.scales[token] : make_float2(1.0f, 1.0f);
        factor[i] = scale.x * scale.y;
    }
    const pieces_t pieces = find_pieces(e, p.y, (int64_t)p.n_out * 2, e.col * 2);
#pragma unroll
    for (int quarter = 0; quarter < 4; quarter++) {
        uint32_t pairs[16];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const float *v = acc + 32 * quarter + 2 * i;
            pairs[i] = pack_pair(v[0] * factor[i % 2], v[1] * factor[i % 2], T());
        }
        store_pairs(e, pairs, pieces, 128 * quarter, (p.n_out - e.col) * 2 - 128 * quarter);
    }
}

template <typename T>
__device__ __forceinline__ void store_quick_tile(const gemm_params_t &p, const epmoei_fp8_rows_t &y, int32_t way,
                                                 const fp8_epilogue_t &e, const float (&acc)[128])
{
    if (e.num_rows <= 0) return;
    if (p.gated)
        store_quick_gated<T>(p, y, way, e, acc);
    else
        store_quick_plain<T>(p, e, acc);
}

__device__ __forceinline__ void store_tile(const gemm_params_t &p, const epmoei_fp8_rows_t &y, int32_t way,
                                           const fp8_epilogue_t &e, const float (&acc)[128])
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
