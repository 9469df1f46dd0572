/* Scales of the FP8 grouped GEMM's weights. Those of blocks multiply what the tensor cores made of 128 columns, and lie
 * beside them in the stage; those that hold for all of K multiply the sums. */
#ifndef EPMOEI_GROUPED_GEMM_FP8_SCALES_SM90_CUH
#define EPMOEI_GROUPED_GEMM_FP8_SCALES_SM90_CUH

#include "kernels/grouped_gemm_fp8_pipeline_sm90.cuh"

namespace
{

/* Where the scales of weights are: those of 128 columns follow each other. A tile has two of them a step: of its gate
 * and its up rows, or of its lower and its upper 128 rows. */
struct weight_scales_t {
    const void *data;
    epmoe_dtype_t dtype;
    int32_t of_rows; /* a scale holds for all of K */
    int32_t by_half;
    int32_t group_rows;   /* weight rows of a block of scales */
    int32_t group_steps;  /* steps of 128 columns of one */
    int32_t groups;       /* along a row */
    int32_t blocks;       /* along an expert's rows */
    int32_t up_blocks;    /* at which those of up rows begin, in an order that has gate rows first; 0 = as rows lie */
    int32_t second_first; /* gate and up: the weight row, in an order of blocks, at which the up rows begin */
};

weight_scales_t weight_scales(const epmoe_grouped_gemm_args_t *args, const gemm_params_t *p)
{
    const int32_t f = args->n / 2;
    const bool packed = p->gated && args->layout == EPMOE_LAYOUT_PACKED;
    weight_scales_t w = {};
    w.data = args->weight.scales;
    w.dtype = args->weight.scales_dtype;
    w.of_rows = args->weight.group_size >= args->k;
    w.by_half = !p->gated || args->layout == EPMOE_LAYOUT_INTERLEAVED;
    /* One larger than the matrix is as good as one of its size. */
    const int64_t most = epmoei_round_up(epmoei_max64(args->n, args->k), kTileK);
    const int32_t group = (int32_t)epmoei_min64(args->weight.group_size, most);
    w.group_rows = (int32_t)epmoei_min64(args->weight.group_rows, most);
    w.group_steps = (int32_t)epmoei_ceil_div(group, kTileK);
    w.groups = (int32_t)epmoei_ceil_div(args->k, group);
    w.up_blocks = packed ? (int32_t)epmoei_ceil_div(f, w.group_rows) : 0;
    w.blocks = packed ? 2 * w.up_blocks : (int32_t)epmoei_ceil_div(args->n, w.group_rows);
    w.second_first = w.by_half ? kHalfW : packed ? w.up_blocks * w.group_rows : f;
    return w;
}

__device__ __forceinline__ float load_scale(const weight_scales_t &w, int64_t at)
{
    switch (w.dtype) {
    case EPMOE_BF16: return __bfloat162float(((const __nv_bfloat16 *)w.data)[at]);
    case EPMOE_F16: return __half2float(((const __half *)w.data)[at]);
    case EPMOE_F8_E8M0: {
        const uint32_t code = ((const uint8_t *)w.data)[at];
        return __uint_as_float(code == 255 ? 0x7FC00000u : code ? code << 23 : 0x00400000u);
    }
    default: return ((const float *)w.data)[at];
    }
}

/* A tile's two scales of weights under each of 32 steps, those of step i with lane i. */
__device__ __forceinline__ float2 load_weight_scales(const weight_scales_t &w, const walk_t &at)
{
    if (w.of_rows) return make_float2(1.0f, 1.0f);
    const int32_t row = at.block * (w.by_half ? kTileW : kHalfW);
    /* A cluster's last block may have no rows. */
    const int32_t first = min(row / w.group_rows, w.blocks - 1);
    const int32_t second = min((row + w.second_first) / w.group_rows, w.blocks - 1);
    const int32_t group = min((at.step + (int32_t)threadIdx.x % 32) / w.group_steps, w.groups - 1);
    const int64_t from = (int64_t)at.tile.expert * w.blocks * w.groups + group;
    return make_float2(load_scale(w, from + (int64_t)first * w.groups),
                       load_scale(w, from + (int64_t)second * w.groups));
}

/* One warp: the scales of weights, which consumers would wait for, into the stages. */
__device__ __forceinline__ void produce_weight_scales(const gemm_params_t &p, const block_t &b,
                                                      const weight_scales_t &w)
{
    const uint32_t full = ptx_shared_address(b.barriers->full), empty = ptx_shared_address(b.barriers->empty);
    float2 scales = {0.0f, 0.0f};
    ring_t ring = {0, 0};
    walk_t at = {};
    for (bool more = at.enter(p, b); more; more = at.advance(p, b), ring.advance(b.line.stages)) {
        if (at.step % 32 == 0) scales = load_weight_scales(w, at);
        const float first = __shfl_sync(0xFFFFFFFFu, scales.x, at.step % 32);
        const float second = __shfl_sync(0xFFFFFFFFu, scales.y, at.step % 32);
        wait_barrier(empty + 8 * ring.stage, ring.parity ^ 1);
        if (threadIdx.x % 32 == 0) {
            *(float4 *)b.weight_scales_of(ring.stage) =
                w.by_half ? make_float4(first, first, second, second) : make_float4(first, second, first, second);
            ptx_mbarrier_arrive(full + 8 * ring.stage);
        }
    }
}

/* The scale of the tile's weight row i, in the order in which rows arrive: 8 gate rows and then their 8 up rows. */
__device__ __forceinline__ float load_row_scale(const gemm_params_t &p, const weight_scales_t &w,
                                                const fp8_epilogue_t &e, int32_t i)
{
    int32_t block;
    if (p.gated) {
        const int32_t output = min(e.col + i / 16 * 8 + i % 8, p.n_out - 1), up = i / 8 % 2;
        block =
            w.up_blocks ? up * w.up_blocks + output / w.group_rows : gemm_weight_row(p, 2 * output + up) / w.group_rows;
    } else
        block = min(e.col + i, p.n - 1) / w.group_rows;
    return load_scale(w, (int64_t)e.expert * w.blocks + block);
}

/* A warp's sums times the scales of their weight rows, which come by way of its staging. */
__device__ __forceinline__ void scale_rows(const gemm_params_t &p, const weight_scales_t &w, const fp8_epilogue_t &e,
                                           float (&acc)[128])
{
    static_assert(kTileW * 4 <= kFp8StagingBytes, "scales pass through a warp's staging");
    float *const scales = (float *)e.staging;
#pragma unroll 1
    for (int i = e.lane; i < kTileW; i += 32) scales[i] = load_row_scale(p, w, e, i);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kTileW / 8; i++) {
        const float2 scale = *(const float2 *)(scales + 8 * i + 2 * (e.lane % 4));
        acc[4 * i] *= scale.x, acc[4 * i + 1] *= scale.y;
        acc[4 * i + 2] *= scale.x, acc[4 * i + 3] *= scale.y;
    }
    __syncwarp();
}

} // namespace

#endif
