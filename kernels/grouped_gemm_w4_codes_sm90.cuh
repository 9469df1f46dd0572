/* From 4-bit codes in a stage to operand A of wgmma in registers. W4: (code - zero) * scale, both factors exact but for
 * the scale's rounding to bf16, the product rounded to bf16, whichever of the ways below makes it.
 * MXFP4 is exact. The bits of a code are 2^-126 times its value, since only there bf16 is subnormal as E2M1 is, so that
 * what multiplies them is 2^126 times the scale: more than bf16 has for scales above 2 (codes above 128). Scales of
 * trained models are smaller; where one is not, MXFP4_LARGE multiplies by 2^126 and then by the scale, and takes any.
 * W4 of small scales, which is what weights have, takes the same road: the eight lowest bits of bf16 alone are 2^-133
 * times the integer that they hold. So codes in the four lowest bits or in the next four need no base that would have
 * to be taken away again, one shift serves both pairs, and without zero points, where 8 scales are exact in bf16, one
 * operation makes the weight: code * scale - 8 * scale. */
#ifndef EPMOEI_GROUPED_GEMM_W4_CODES_SM90_CUH
#define EPMOEI_GROUPED_GEMM_W4_CODES_SM90_CUH

#include "kernels/grouped_gemm_w4_pipeline_sm90.cuh"
#include "kernels/quant_cuda.cuh"

namespace
{

/* How scales lie: W4 with a group for whole blocks of 64 columns, W4 with two groups in a block, MXFP4, which always
 * has two. _ZEROS and _LARGE are of loops over K, not of a kernel. */
enum kind_t { W4_LONG, W4_SHORT, MXFP4, W4_LONG_ZEROS, MXFP4_LARGE };

template <kind_t kKind> constexpr bool kIsMxfp4 = kKind == MXFP4 || kKind == MXFP4_LARGE;
template <kind_t kKind> constexpr bool kIsLong = kKind == W4_LONG || kKind == W4_LONG_ZEROS;
template <kind_t kKind> constexpr bool kHasZeros = kKind == W4_LONG_ZEROS;

/* Pairs in bf16: of this thread's two rows in 64, lane/4 and 8 below. */
struct group_t {
    uint32_t scale;
    uint32_t zero; /* W4: 128 + zero */
};

/* Pairs of scales of W4 as bf16, `step` bytes apart. */
template <int kCount>
__device__ __forceinline__ void load_scales(uint32_t (&pairs)[kCount], const weights_t &w, uint32_t from, uint32_t step)
{
    if (w.scales_dtype == EPMOE_F16 || w.scales_dtype == EPMOE_BF16)
#pragma unroll
        for (int i = 0; i < kCount; i++) pairs[i] = ptx_load_shared_4(from + i * step);
    if (w.scales_dtype == EPMOE_BF16) return;
#pragma unroll
    for (int i = 0; i < kCount; i++) {
        float scale[2];
        if (w.scales_dtype == EPMOE_F16) {
            scale[0] = quant_scale(pairs[i] & 0xFFFF, EPMOE_F16), scale[1] = quant_scale(pairs[i] >> 16, EPMOE_F16);
        } else if (w.scales_dtype == EPMOE_F32) {
            uint32_t bits[2];
            ptx_load_shared_8(bits, from + i * step);
            scale[0] = __uint_as_float(bits[0]), scale[1] = __uint_as_float(bits[1]);
        } else {
            const uint32_t bits = ptx_load_shared_2(from + i * step);
            scale[0] = quant_scale(bits & 0xFF, EPMOE_F8_E8M0), scale[1] = quant_scale(bits >> 8, EPMOE_F8_E8M0);
        }
        pairs[i] = pack_pair(scale[0], scale[1], __nv_bfloat16());
    }
}

/* Two scale codes of MXFP4, in the lower bytes, as bf16. MXFP4: 2^126 * 2^(code - 127) of codes up to 128. MXFP4_LARGE:
 * 2^(code - 127), which is subnormal of 0, and a NaN of 255. */
template <kind_t kKind> __device__ __forceinline__ uint32_t spread_exponents(uint32_t bytes)
{
    const uint32_t codes = __byte_perm(bytes, 0, 0x4140);
    if (kKind == MXFP4) return (codes + 0x007E007Eu) << 7;
    return __vmaxu2(codes << 7, 0x00400040u) | (codes + 0x00010001u) >> 2 & 0x00400040u;
}

/* Two zeros of W4, in the lower bytes, as 128 + zero. */
__device__ __forceinline__ uint32_t spread_zeros(uint32_t bytes) { return __byte_perm(bytes, 0x43, 0x4140); }

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

/* Codes of the first row are in the four lowest bits, those of the second in the next four: 2^-133 and 2^-129 times
 * their value. Not 0 where a scale is 2^-5, in the second row 2^-1, or more, and what makes up for that not finite. */
__device__ __forceinline__ uint32_t is_large(uint32_t scale)
{
    constexpr uint32_t kToSign = 0x41004300u; /* from the bits of the two bounds */
    return ((scale & 0x7FFF7FFFu) + kToSign) & 0x80008000u;
}

/* scale becomes the scale times 2^133 and 2^129, and zero -8 scale, or with kZeros the zeros as codes lie. */
template <bool kZeros> __device__ __forceinline__ void make_small(group_t &g)
{
    constexpr uint32_t kTwoTo126 = 0x7E807E80u, kTwoTo7And3 = 0x41004300u, kMinus8 = 0xC100C100u;
    g.zero = kZeros ? (g.zero & 0xFu) | (g.zero & 0x000F0000u) << 4 : quant_mul2(g.scale, kMinus8, __nv_bfloat16());
    g.scale = quant_mul2(quant_mul2(g.scale, kTwoTo126, __nv_bfloat16()), kTwoTo7And3, __nv_bfloat16());
}

/* With a group that make_small has made. */
template <bool kZeros>
__device__ __forceinline__ void dequantise_small(uint32_t (&a)[4], uint32_t word, const group_t &g)
{
    const uint32_t factor[2] = {ptx_twice<0>(g.scale), ptx_twice<1>(g.scale)};
    const uint32_t offset[2] = {ptx_twice<0>(g.zero), ptx_twice<1>(g.zero)};
    const uint32_t upper = word >> 8;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const uint32_t code = (j < 2 ? word : upper) & (j & 1 ? 0x00F000F0u : 0x000F000Fu);
        if (kZeros)
            a[j] = quant_mul2(quant_sub2(code, offset[j & 1], __nv_bfloat16()), factor[j & 1], __nv_bfloat16());
        else
            a[j] = quant_fma2(code, factor[j & 1], offset[j & 1], __nv_bfloat16());
    }
}

/* Where this thread's codes, and the scales and zeros that they need, are in a stage. */
template <kind_t kKind, typename Cut> struct places_t {
    static constexpr int kSlots = Cut::kDepth * (kIsLong<kKind> ? 1 : 2); /* of groups, in a tile of a stage */
    static constexpr int kPairs = EPMOEI_TILE_ROWS / 2;                   /* of a tile and group */
    uint32_t codes;                                                       /* from the beginning of a stage */
    uint32_t pair; /* its rows among all pairs of rows and groups that a stage has scales and zeros of */

    __device__ __forceinline__ void begin(const block_t &b, int32_t thread)
    {
        const int tid = thread % kWarpgroup, tile = (thread / kWarpgroup - 1) * Cut::kTiles;
        codes = b.line.layout.codes + tile * Cut::kDepth * EPMOEI_TILE_BYTES + 16 * tid;
        pair = tile * kSlots * kPairs + tid / 32 * 8 + tid % 32 / 4;
    }
    /* Of tile t of this warpgroup. */
    __device__ __forceinline__ void load_words(uint32_t (&words)[4], uint32_t stage, int t, int depth) const
    {
        ptx_load_shared_16(words, stage + codes + (t * Cut::kDepth + depth) * EPMOEI_TILE_BYTES);
    }
    __device__ __forceinline__ uint32_t place(int t, int slot) const { return pair + (t * kSlots + slot) * kPairs; }
    /* kCount groups from `slot` on. */
    template <int kCount>
    __device__ __forceinline__ void load_groups(group_t (&groups)[kCount], const weights_t &w,
                                                const shared_layout_t &layout, uint32_t stage, int t, int slot) const
    {
        const uint32_t place = this->place(t, slot);
        uint32_t scales[kCount];
        if constexpr (kIsMxfp4<kKind>) {
#pragma unroll
            for (int i = 0; i < kCount; i++)
                groups[i].scale =
                    spread_exponents<kKind>(ptx_load_shared_2(stage + layout.scales + (place + i * kPairs) * 2));
            return;
        }
        load_scales(scales, w, stage + layout.scales + place * w.pair_bytes, kPairs * w.pair_bytes);
#pragma unroll
        for (int i = 0; i < kCount; i++) {
            const uint32_t bytes =
                w.zeros ? ptx_load_shared_2(stage + layout.zeros + (place + i * kPairs) * 2) : 0x0808u;
            groups[i].scale = scales[i];
            groups[i].zero = spread_zeros(bytes);
        }
    }
    __device__ __forceinline__ void load_group(group_t &group, const weights_t &w, const shared_layout_t &layout,
                                               uint32_t stage, int t, int slot) const
    {
        group_t one[1];
        load_groups(one, w, layout, stage, t, slot);
        group = one[0];
    }
};

/* The loop of many tokens: this thread's codes of 64 columns. */
template <kind_t kKind, typename Cut> struct codes_t {
    static constexpr int kTiles = Cut::kTiles;
    places_t<kKind, Cut> places;
    uint32_t words[kTiles][4];
    group_t groups[kTiles];
    uint32_t base;
    int32_t left; /* W4_LONG: blocks until the next group begins; else groups from this stage on */

    /* From block `first` on, which begins a stage and, W4_LONG, a group. */
    __device__ __forceinline__ void begin(const weights_t &w, const block_t &b, int32_t thread, int32_t first)
    {
        places.begin(b, thread);
        base = w.base;
        left = kKind == W4_LONG ? 0 : w.groups - 2 * first;
    }
    __device__ __forceinline__ void load_words(uint32_t stage, int depth)
    {
#pragma unroll
        for (int t = 0; t < kTiles; t++) places.load_words(words[t], stage, t, depth);
    }
    __device__ __forceinline__ void load_groups(const weights_t &w, const shared_layout_t &layout, uint32_t stage,
                                                int slot)
    {
#pragma unroll
        for (int t = 0; t < kTiles; t++) places.load_group(groups[t], w, layout, stage, t, slot);
    }
    /* W4_LONG, before block `depth` of a stage, if it is one at all: its group, if that begins there. */
    __device__ __forceinline__ void take_group(const weights_t &w, const shared_layout_t &layout, uint32_t stage,
                                               int depth, bool really)
    {
        static_assert(Cut::kDepth <= 2, "a longer stage may have the beginning of a longer group anywhere");
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

/* Blocks of 64 columns that a round of the next loop takes: whole stages and whole groups of W4. */
template <typename Cut> constexpr int kWholeBlocks = Cut::kDepth < 2 ? 2 : Cut::kDepth;

/* The loop over stages that are full, of W4 with groups of 128 columns and scales of 16 bits, and of MXFP4: the words
 * of the next block and the scales of the next group are loaded while the tensor cores run, also across stages. */
template <kind_t kKind, typename Cut> struct whole_codes_t {
    static constexpr int kTiles = Cut::kTiles;
    static constexpr bool kMx = kIsMxfp4<kKind>;
    static constexpr int kGroups = kMx ? 2 : 1; /* that begin with a block, if any do */
    places_t<kKind, Cut> places;
    uint32_t words[kTiles][4];
    uint32_t scales[kTiles][kGroups]; /* as loaded */
    uint32_t zeros[kTiles];
    group_t groups[kTiles][kGroups]; /* of the block that is made */
    uint32_t base;
    bool large; /* whether one of them is too large for the short way, in this warp */

    __device__ __forceinline__ static bool begins_group(int block) { return kMx || block % 2 == 0; }
    __device__ __forceinline__ void begin(const weights_t &w, const block_t &b, int32_t thread)
    {
        places.begin(b, thread);
        base = w.base;
    }
    /* Block `block` of a round. */
    __device__ __forceinline__ void load(const shared_layout_t &layout, uint32_t stage, int block)
    {
        const int depth = block % Cut::kDepth;
#pragma unroll
        for (int t = 0; t < kTiles; t++) {
            places.load_words(words[t], stage, t, depth);
            if (!begins_group(block)) continue;
            const uint32_t place = places.place(t, kMx ? 2 * depth : depth / 2);
#pragma unroll
            for (int i = 0; i < kGroups; i++)
                scales[t][i] = kMx ? ptx_load_shared_2(stage + layout.scales + (place + i * places.kPairs) * 2)
                                   : ptx_load_shared_4(stage + layout.scales + place * 4);
            if (kHasZeros<kKind>) zeros[t] = ptx_load_shared_2(stage + layout.zeros + place * 2);
        }
    }
    /* Before block `block` of a round is made. */
    __device__ __forceinline__ void take_groups(const weights_t &w, int block)
    {
        if (!begins_group(block)) return;
        uint32_t too_large = 0;
#pragma unroll
        for (int t = 0; t < kTiles; t++) {
            if (kMx) {
#pragma unroll
                for (int i = 0; i < kGroups; i++) {
                    too_large |= scales[t][i] & 0x8080u; /* 2 and more */
                    groups[t][i].scale = spread_exponents<MXFP4>(scales[t][i]);
                }
                continue;
            }
            if (w.scales_dtype == EPMOE_F16)
                scales[t][0] = pack_pair(quant_scale(scales[t][0] & 0xFFFF, EPMOE_F16),
                                         quant_scale(scales[t][0] >> 16, EPMOE_F16), __nv_bfloat16());
            too_large |= is_large(scales[t][0]);
            groups[t][0].scale = scales[t][0];
            groups[t][0].zero = kHasZeros<kKind> ? spread_zeros(zeros[t]) : 0;
            make_small<kHasZeros<kKind>>(groups[t][0]);
        }
        large = __any_sync(0xFFFFFFFFu, too_large != 0);
    }
    /* kSteps times 16 columns, from the 16 of number `first` on, of the block whose words are here. */
    template <int kSteps> __device__ __forceinline__ void make(uint32_t (&a)[kSteps][kTiles][4], int first) const
    {
        if (large) {
#pragma unroll
            for (int i = 0; i < kSteps * kTiles; i++) {
                const int t = i % kTiles, s = first + i / kTiles;
                group_t group;
                group.scale = kMx ? spread_exponents<MXFP4_LARGE>(scales[t][s / 2 % kGroups]) : scales[t][0];
                group.zero = kMx ? 0 : spread_zeros(kHasZeros<kKind> ? zeros[t] : 0x0808u);
                dequantise<kMx ? MXFP4_LARGE : kKind>(a[i / kTiles][t], words[t][s], group, base);
            }
        } else {
#pragma unroll
            for (int i = 0; i < kSteps * kTiles; i++) {
                const int t = i % kTiles, s = first + i / kTiles;
                if constexpr (kMx)
                    dequantise<MXFP4>(a[i / kTiles][t], words[t][s], groups[t][s / 2 % kGroups], base);
                else
                    dequantise_small<kHasZeros<kKind>>(a[i / kTiles][t], words[t][s], groups[t][0]);
            }
        }
    }
};

/* What is left for few tokens, of one tile a warpgroup: any stage, block by block. */
template <kind_t kKind, typename Cut> struct few_codes_t {
    static_assert(Cut::kTiles == 1, "one tile's groups");
    places_t<kKind, Cut> places;
    uint32_t words[4];
    group_t group;
    uint32_t base;
    int32_t left; /* W4_LONG: blocks until the next group begins */
    int32_t slot; /* W4_LONG: of the next group that begins in this stage */

    __device__ __forceinline__ void begin(const weights_t &w, const block_t &b, int32_t thread)
    {
        places.begin(b, thread);
        base = w.base;
        left = 0;
    }
    /* Block `depth` of a stage, `block` of all. */
    __device__ __forceinline__ void make(uint32_t (&a)[4][4], const weights_t &w, const shared_layout_t &layout,
                                         uint32_t stage, int depth, int block)
    {
        places.load_words(words, stage, 0, depth);
        if (kIsLong<kKind>) {
            if (depth == 0) slot = 0;
            if (left == 0) {
                places.load_group(group, w, layout, stage, 0, slot++);
                left = w.group_blocks;
            }
            left--;
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            /* Behind the last column x is 0, and what it meets must be finite: the first group of a block is. */
            if (!kIsLong<kKind>)
                places.load_group(group, w, layout, stage, 0,
                                  min(2 * depth + half, w.groups - 1 - 2 * (block - depth)));
            dequantise<kKind>(a[2 * half], words[2 * half], group, base);
            dequantise<kKind>(a[2 * half + 1], words[2 * half + 1], group, base);
        }
    }
};

} // namespace

#endif
