/* From 4-bit codes in a stage to operand A of wgmma in registers. W4: (code - zero) * scale, both factors exact but for
 * the scale's rounding to bf16, the product rounded to bf16. MXFP4 is exact as long as its scales are at most 2; larger
 * ones (codes above 128) give infinities and, of zeros, NaN. */
#ifndef EPMOEI_GROUPED_GEMM_W4_CODES_SM90_CUH
#define EPMOEI_GROUPED_GEMM_W4_CODES_SM90_CUH

#include "kernels/grouped_gemm_w4_pipeline_sm90.cuh"
#include "kernels/quant_cuda.cuh"

namespace
{

/* How scales lie: W4 with a group for whole blocks of 64 columns, W4 with two groups in a block, MXFP4, which always
 * has two. */
enum kind_t { W4_LONG, W4_SHORT, MXFP4 };

/* Of this thread's two rows in 64, lane/4 and 8 below, as pairs of the same bf16 twice. */
struct group_t {
    uint32_t scale[2];
    uint32_t zero[2]; /* W4: 128 + zero */
};

/* Two scales of W4, of any type but bf16, as bf16. */
__device__ __forceinline__ uint32_t load_scales(const weights_t &w, uint32_t from)
{
    float scale[2];
    if (w.scales_dtype == EPMOE_F32) {
        uint32_t bits[2];
        ptx_load_shared_8(bits, from);
        scale[0] = __uint_as_float(bits[0]), scale[1] = __uint_as_float(bits[1]);
    } else {
        const bool half = w.scales_dtype == EPMOE_F16;
        const uint32_t bits = half ? ptx_load_shared_4(from) : ptx_load_shared_2(from);
        scale[0] = quant_scale(half ? bits & 0xFFFF : bits & 0xFF, w.scales_dtype);
        scale[1] = quant_scale(half ? bits >> 16 : bits >> 8, w.scales_dtype);
    }
    return pack_pair(scale[0], scale[1], __nv_bfloat16());
}

/* Two scales of MXFP4 as bf16's 2^126 * 2^(code - 127), for quant_mxfp4_bits; infinity for what is larger than bf16
 * has. */
__device__ __forceinline__ uint32_t load_exponents(uint32_t from)
{
    const uint32_t codes = __byte_perm(ptx_load_shared_2(from), 0, 0x4140);
    return __vminu2(codes + 0x007E007Eu, 0x00FF00FFu) << 7;
}

/* base: bf16's 128 twice, in a register: an instruction takes one constant alone. */
template <kind_t kKind>
__device__ __forceinline__ void dequantise(uint32_t (&a)[4], uint32_t word, const group_t &g, uint32_t base)
{
    if constexpr (kKind == MXFP4)
        quant_mxfp4_bits(a, word);
    else
#pragma unroll
        for (int j = 0; j < 4; j++)
            a[j] = quant_sub2(ptx_select_or(word >> (4 * j), 0x000F000Fu, base), g.zero[j & 1], __nv_bfloat16());
#pragma unroll
    for (int j = 0; j < 4; j++) a[j] = quant_mul2(a[j], g.scale[j & 1], __nv_bfloat16());
}

/* This thread's codes of 64 columns, and the scales that they need. */
template <kind_t kKind, typename Cut> struct codes_t {
    static constexpr int kTiles = Cut::kTiles, kSlots = Cut::kDepth * (kKind == W4_LONG ? 1 : 2);
    uint32_t codes, scales, zeros; /* of this thread, from the beginning of a stage */
    uint32_t words[kTiles][4];
    group_t groups[kTiles];
    uint32_t base;
    int32_t left; /* W4_LONG: blocks until the next group begins; else groups from this stage on */

    __device__ __forceinline__ void begin(const weights_t &w, const block_t &b, int32_t thread)
    {
        const int tid = thread % kWarpgroup, pair = tid / 32 * 8 + tid % 32 / 4;
        const int tile = (thread / kWarpgroup - 1) * kTiles;
        codes = b.line.layout.codes + tile * Cut::kDepth * EPMOEI_TILE_BYTES + 16 * tid;
        scales = b.line.layout.scales + tile * kSlots * w.scales_bytes + pair * (w.scales_bytes / 32);
        zeros = b.line.layout.zeros + tile * kSlots * EPMOEI_TILE_ROWS + pair * 2;
        base = w.base;
        left = kKind == W4_LONG ? 0 : w.groups;
    }
    __device__ __forceinline__ void load_words(uint32_t stage, int depth)
    {
#pragma unroll
        for (int t = 0; t < kTiles; t++)
            ptx_load_shared_16(words[t], stage + codes + (t * Cut::kDepth + depth) * EPMOEI_TILE_BYTES);
    }
    __device__ __forceinline__ void load_groups(const weights_t &w, uint32_t stage, int slot)
    {
        const uint32_t scale = stage + scales + slot * w.scales_bytes, step = kSlots * w.scales_bytes;
        uint32_t both[kTiles];
        if (kKind == MXFP4)
#pragma unroll
            for (int t = 0; t < kTiles; t++) both[t] = load_exponents(scale + t * step);
        else if (w.scales_dtype == EPMOE_BF16)
#pragma unroll
            for (int t = 0; t < kTiles; t++) both[t] = ptx_load_shared_4(scale + t * step);
        else
#pragma unroll
            for (int t = 0; t < kTiles; t++) both[t] = load_scales(w, scale + t * step);
#pragma unroll
        for (int t = 0; t < kTiles; t++) {
            groups[t].scale[0] = __byte_perm(both[t], 0, 0x1010);
            groups[t].scale[1] = __byte_perm(both[t], 0, 0x3232);
            if (kKind == MXFP4) continue;
            const uint32_t zero = stage + zeros + (t * kSlots + slot) * EPMOEI_TILE_ROWS;
            const uint32_t pair = w.zeros ? ptx_load_shared_2(zero) : 0x0808u;
            groups[t].zero[0] = __byte_perm(pair, 0x43, 0x4040);
            groups[t].zero[1] = __byte_perm(pair, 0x43, 0x4141);
        }
    }
    /* W4_LONG, before block `depth` of a stage, if it is one at all: its group, if that begins there. */
    __device__ __forceinline__ void take_group(const weights_t &w, uint32_t stage, int depth, bool really)
    {
        if (really && left == 0) {
            load_groups(w, stage, w.group_blocks == 1 ? depth : 0);
            left = w.group_blocks;
        }
        left--;
    }
    /* 16 columns of a stage, in the order s = 0, 1, ... */
    __device__ __forceinline__ void make(uint32_t (&a)[kTiles][4], const weights_t &w, uint32_t stage, int s)
    {
        /* Behind the last column x is 0, and what it meets must be finite. */
        if (kKind != W4_LONG && s % 2 == 0) load_groups(w, stage, min(s / 2, left - 1));
#pragma unroll
        for (int t = 0; t < kTiles; t++) dequantise<kKind>(a[t], words[t][s % 4], groups[t], base);
    }
};

} // namespace

#endif
