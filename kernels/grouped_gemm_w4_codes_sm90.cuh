/* From 4-bit codes in a stage to operand A of wgmma in registers. W4: (code - zero) * scale, both factors exact but for
 * the scale's rounding to bf16, the product rounded to bf16.
 * MXFP4 is exact. The bits of a code are 2^-126 times its value, since only there bf16 is subnormal as E2M1 is, so that
 * what multiplies them is 2^126 times the scale: more than bf16 has for scales above 2 (codes above 128). No weight of
 * a trained model is that large, so two kinds share the work: MXFP4 multiplies once and takes tiles without such a
 * scale, MXFP4_LARGE multiplies by 2^126 and then by the scale, and takes any. */
#ifndef EPMOEI_GROUPED_GEMM_W4_CODES_SM90_CUH
#define EPMOEI_GROUPED_GEMM_W4_CODES_SM90_CUH

#include "kernels/grouped_gemm_w4_pipeline_sm90.cuh"
#include "kernels/quant_cuda.cuh"

namespace
{

/* How scales lie: W4 with a group for whole blocks of 64 columns, W4 with two groups in a block, MXFP4, which always
 * has two. */
enum kind_t { W4_LONG, W4_SHORT, MXFP4, MXFP4_LARGE };

template <kind_t kKind> constexpr bool kIsMxfp4 = kKind == MXFP4 || kKind == MXFP4_LARGE;

/* Pairs in bf16: of this thread's two rows in 64, lane/4 and 8 below. */
struct group_t {
    uint32_t scale;
    uint32_t zero; /* W4: 128 + zero */
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

/* Two scales of MXFP4 as bf16. MXFP4: 2^126 * 2^(code - 127) of codes up to 128. MXFP4_LARGE: 2^(code - 127), which is
 * subnormal of 0, and a NaN of 255. */
template <kind_t kKind> __device__ __forceinline__ uint32_t load_exponents(uint32_t from)
{
    const uint32_t codes = __byte_perm(ptx_load_shared_2(from), 0, 0x4140);
    if (kKind == MXFP4) return (codes + 0x007E007Eu) << 7;
    return __vmaxu2(codes << 7, 0x00400040u) | (codes + 0x00010001u) >> 2 & 0x00400040u;
}

/* base: bf16's 128 twice, in a register: an instruction takes one constant alone. */
template <kind_t kKind>
__device__ __forceinline__ void dequantise(uint32_t (&a)[4], uint32_t word, const group_t &g, uint32_t base)
{
    const uint32_t scale[2] = {ptx_twice<0>(g.scale), ptx_twice<1>(g.scale)};
    const uint32_t zero[2] = {ptx_twice<0>(g.zero), ptx_twice<1>(g.zero)};
    if constexpr (kIsMxfp4<kKind>)
        quant_mxfp4_bits(a, word);
    else
#pragma unroll
        for (int j = 0; j < 4; j++)
            a[j] = quant_sub2(ptx_select_or(word >> (4 * j), 0x000F000Fu, base), zero[j & 1], __nv_bfloat16());
    if constexpr (kKind == MXFP4_LARGE)
#pragma unroll
        for (int j = 0; j < 4; j++) a[j] = quant_mul2(a[j], quant_type<__nv_bfloat16>::kMxfp4Factor, __nv_bfloat16());
#pragma unroll
    for (int j = 0; j < 4; j++) a[j] = quant_mul2(a[j], scale[j & 1], __nv_bfloat16());
}

/* This thread's codes of 64 columns, and the scales that they need. */
template <kind_t kKind, typename Cut> struct codes_t {
    static constexpr int kTiles = Cut::kTiles, kSlots = Cut::kDepth * (kKind == W4_LONG ? 1 : 2);
    static constexpr int kPairs = EPMOEI_TILE_ROWS / 2; /* of a tile and group */
    uint32_t codes;                                     /* of this thread, from the beginning of a stage */
    uint32_t pair; /* its rows among all pairs of rows and groups that a stage has scales and zeros of */
    uint32_t words[kTiles][4];
    group_t groups[kTiles];
    uint32_t base;
    int32_t left; /* W4_LONG: blocks until the next group begins; else groups from this stage on */

    __device__ __forceinline__ void begin(const weights_t &w, const block_t &b, int32_t thread)
    {
        const int tid = thread % kWarpgroup, tile = (thread / kWarpgroup - 1) * kTiles;
        codes = b.line.layout.codes + tile * Cut::kDepth * EPMOEI_TILE_BYTES + 16 * tid;
        pair = tile * kSlots * kPairs + tid / 32 * 8 + tid % 32 / 4;
        base = w.base;
        left = kKind == W4_LONG ? 0 : w.groups;
    }
    __device__ __forceinline__ void load_words(uint32_t stage, int depth)
    {
#pragma unroll
        for (int t = 0; t < kTiles; t++)
            ptx_load_shared_16(words[t], stage + codes + (t * Cut::kDepth + depth) * EPMOEI_TILE_BYTES);
    }
    __device__ __forceinline__ void load_groups(const weights_t &w, const shared_layout_t &layout, uint32_t stage,
                                                int slot)
    {
        const uint32_t first = pair + slot * kPairs, pair_bytes = kIsMxfp4<kKind> ? 2 : w.pair_bytes;
        const uint32_t scale = stage + layout.scales + first * pair_bytes, step = kSlots * kPairs * pair_bytes;
        if constexpr (kIsMxfp4<kKind>) {
#pragma unroll
            for (int t = 0; t < kTiles; t++) groups[t].scale = load_exponents<kKind>(scale + t * step);
            return;
        }
        if (w.scales_dtype == EPMOE_BF16)
#pragma unroll
            for (int t = 0; t < kTiles; t++) groups[t].scale = ptx_load_shared_4(scale + t * step);
        else
#pragma unroll
            for (int t = 0; t < kTiles; t++) groups[t].scale = load_scales(w, scale + t * step);
#pragma unroll
        for (int t = 0; t < kTiles; t++) {
            const uint32_t zero = stage + layout.zeros + (first + t * kSlots * kPairs) * 2;
            groups[t].zero = __byte_perm(w.zeros ? ptx_load_shared_2(zero) : 0x0808u, 0x43, 0x4140);
        }
    }
    /* W4_LONG, before block `depth` of a stage, if it is one at all: its group, if that begins there. */
    __device__ __forceinline__ void take_group(const weights_t &w, const shared_layout_t &layout, uint32_t stage,
                                               int depth, bool really)
    {
        if (really && left == 0) {
            load_groups(w, layout, stage, w.group_blocks == 1 ? depth : 0);
            left = w.group_blocks;
        }
        left--;
    }
    /* 16 columns of a stage, in the order s = 0, 1, ... */
    __device__ __forceinline__ void make(uint32_t (&a)[kTiles][4], const weights_t &w, const shared_layout_t &layout,
                                         uint32_t stage, int s)
    {
        /* Behind the last column x is 0, and what it meets must be finite. */
        if (kKind != W4_LONG && s % 2 == 0) load_groups(w, layout, stage, min(s / 2, left - 1));
#pragma unroll
        for (int t = 0; t < kTiles; t++) dequantise<kKind>(a[t], words[t][s % 4], groups[t], base);
    }
};

} // namespace

#endif
