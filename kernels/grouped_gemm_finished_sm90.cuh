/* The fast way of the epilogue in two parts: a tile's outputs are finished in registers, packed in pairs, and go to the
 * storer part by part while the tensor cores are in the next tile. */
#ifndef EPMOEI_GROUPED_GEMM_FINISHED_SM90_CUH
#define EPMOEI_GROUPED_GEMM_FINISHED_SM90_CUH

#include "kernels/grouped_gemm_epilogue_sm90.cuh"

namespace
{

/* A tile's outputs that its warpgroup has finished and not yet given to its storer: eight registers of pairs for each
 * part. */
template <int kMaxN> struct finished_t {
    uint32_t packed[kMaxN / 4];
    int32_t next; /* part */
    int32_t parts;
};

/* Registers cannot be indexed. */
template <int kMaxN>
__device__ __forceinline__ void select_finished(uint32_t (&part)[2][4], const finished_t<kMaxN> &done)
{
    switch (done.next) {
#define PART(n)                                                                                                        \
    case n:                                                                                                            \
        if constexpr (32 * n < kMaxN) {                                                                                \
            _Pragma("unroll") for (int i = 0; i < 8; i++) part[i / 4][i % 4] = done.packed[8 * n + i];                 \
        }                                                                                                              \
        break
        PART(0);
        PART(1);
        PART(2);
        PART(3);
        PART(4);
        PART(5);
        PART(6);
    default: PART(7);
#undef PART
    }
}

/* The next part into staging, whose turn has come. */
template <int kMaxN>
__device__ __forceinline__ void give_part(const epilogue_t &e, finished_t<kMaxN> &done, ring_t &parts)
{
    const int lane = e.tid % 32, warp = e.tid / 32;
    const uint32_t staging = ptx_shared_address(e.staging) + parts.stage * kStagingPartBytes;
    uint32_t part[2][4];
    select_finished(part, done);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int offset = e.gated ? staged_offset<4>(32 * i + lane, warp)
                                   : staged_offset<8>(16 * i + lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2);
        ptx_stmatrix_x4_trans(staging + offset, part[i]);
    }
    ptx_mbarrier_arrive(ptx_shared_address(&e.barriers->full[parts.stage]));
    parts.advance(kStagingParts);
    done.next++;
}

/* Between two steps of a product: one part, if there is one and the storer has room. */
template <int kMaxN>
__device__ __forceinline__ void offer_part(const epilogue_t &e, finished_t<kMaxN> &done, ring_t &parts)
{
    if (done.next >= done.parts) return;
    const bool empty = ptx_mbarrier_try_wait(ptx_shared_address(&e.barriers->empty[parts.stage]), parts.parity ^ 1);
    /* Lanes may get different answers, and a warp stores its matrices together. */
    if (__all_sync(0xFFFFFFFFu, empty)) give_part(e, done, parts);
}

template <int kMaxN>
__device__ __forceinline__ void give_all(const epilogue_t &e, finished_t<kMaxN> &done, ring_t &parts)
{
#pragma unroll 1
    while (done.next < done.parts) {
        wait_barrier(ptx_shared_address(&e.barriers->empty[parts.stage]), parts.parity ^ 1);
        give_part(e, done, parts);
    }
}

/* 32 outputs a token. kPlainSilu: without clamp and weights. */
template <typename T, bool kPlainSilu, int kMaxN, int kRegisters>
__device__ __forceinline__ void pack_gated(const gemm_params_t &p, const epilogue_t &e, const float (&acc)[kRegisters],
                                           finished_t<kMaxN> &done)
{
    const int lane = e.tid % 32;
    const sigmoid_family_t family = sigmoid_family(p);
#pragma unroll
    for (int token = 0; token < kMaxN; token += kSelectTokens) {
        if (token >= e.num_rows) break;
#pragma unroll
        for (int b = token / 8; b < token / 8 + 4; b++) {
            const float *v = acc + 4 * b;
            if constexpr (kPlainSilu) {
                done.packed[b] = pack_pair(plain_silu(v[0] + e.bias[0], v[2] + e.bias[1]),
                                           plain_silu(v[1] + e.bias[0], v[3] + e.bias[1]), T());
            } else {
                /* x and y: in and out of the first token; z and w of the second. */
                const float4 scale = *(const float4 *)(e.scales + 8 * b + 2 * (lane % 4));
                done.packed[b] = pack_pair(
                    scale.y * sigmoid_gate(family, v[0] * scale.x + e.bias[0], v[2] * scale.x + e.bias[1]),
                    scale.w * sigmoid_gate(family, v[1] * scale.z + e.bias[0], v[3] * scale.z + e.bias[1]), T());
            }
        }
    }
    done.next = 0;
    done.parts = (e.num_rows + kPartRows<4> - 1) / kPartRows<4>;
}

/* 64 outputs a token. */
template <typename T, int kMaxN, int kRegisters>
__device__ __forceinline__ void pack_plain(const epilogue_t &e, const float (&acc)[kRegisters], finished_t<kMaxN> &done)
{
    static_assert(kPartRows<8> == kSelectTokens, "eight registers are a part");
    const int lane = e.tid % 32;
#pragma unroll
    for (int token = 0; token < kMaxN; token += kSelectTokens) {
        if (token >= e.num_rows) break;
#pragma unroll
        for (int block = 0; block < 4; block++) {
            /* y and w: the weights of two tokens. */
            const float4 scale = *(const float4 *)(e.scales + token + 8 * block + 2 * (lane % 4));
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float *v = acc + token / 2 + 4 * block + 2 * half;
                done.packed[token / 4 + block / 2 * 4 + block % 2 * 2 + half] =
                    pack_pair((v[0] + e.bias[half]) * scale.y, (v[1] + e.bias[half]) * scale.w, T());
            }
        }
    }
    done.next = 0;
    done.parts = (e.num_rows + kPartRows<8> - 1) / kPartRows<8>;
}

/* What a tile's warpgroup does with its accumulators: done gets what is to be given to the storer. */
template <typename T, bool kAny, int kMaxN, int kRegisters>
__device__ __forceinline__ void pack_tile(const gemm_params_t &p, int32_t way, const epilogue_t &e,
                                          const float (&acc)[kRegisters], finished_t<kMaxN> &done)
{
    done = {};
    switch (way) {
    case WAY_PLAIN: pack_plain<T>(e, acc, done); break;
    case WAY_GATED: pack_gated<T, false>(p, e, acc, done); break;
    case WAY_PLAIN_SILU: pack_gated<T, true>(p, e, acc, done); break;
    default:
        if constexpr (kAny) store_any(p, e, acc);
    }
}

} // namespace

#endif
