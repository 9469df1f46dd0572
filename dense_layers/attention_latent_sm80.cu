/* MLA's attention over latents: one cache head, whose keys of up to 576 columns hold the values in their first 512.
 *
 * 64 rows of a block, tokens times query heads, against tiles of 32 keys that are read once and used as keys and as
 * values. A pair of warps has 16 rows: each scores half of the keys, and, when the two have exchanged largest scores
 * and weights, sums half of the columns. Long contexts are cut into parts as in attention_decode_sm80.cu. */
#include "dense_layers/attention_mma_cuda.cuh"

namespace
{

constexpr int kRows = EPMOEI_PREFILL_ROWS;
constexpr int kThreads = 256;
constexpr int kKeys = 32;
constexpr int kCols = 576;
constexpr int kHalfCols = 256; /* of values, of a warp */

/* Byte offsets in shared memory, behind two tiles of keys. */
template <typename T> struct latent_layout {
    static constexpr int kTileBytes = kKeys * kCols * (int)sizeof(T);
    static constexpr int kQ = 2 * kTileBytes;
    static constexpr int kWeights = kQ + kRows * kCols * 2;
    static constexpr int kTops = kWeights + kRows * kKeys * 2; /* float [2,kRows] */
    static constexpr int kFactors = kTops + 2 * kRows * 4;
    static constexpr int kKeyRows = kFactors + kRows * 4;
    static constexpr int kBytes = kKeyRows + 2 * (int)sizeof(key_rows_t<kKeys>);
};

/* The two warps of 16 rows. */
__device__ __forceinline__ void sync_pair() { ptx_barrier(1 + threadIdx.x / 32 % 4, 64); }

struct pair_t {
    char *weights; /* [kRows,kKeys] of 16 bits */
    float *tops;   /* [2,kRows] */
    int32_t half;
    int32_t first_row;
};

/* Scores of this warp's 16 keys, already in units of log2, become weights in shared memory. */
template <typename T>
__device__ __forceinline__ void weigh_half(const pair_t &pair, rows_t<kHalfCols> &rows, float (&scores)[2][4])
{
    using product_t = typename product_type<T>::type;
    const int32_t r = pair.first_row + threadIdx.x % 32 / 4;
    float decay[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float top = fmaxf(fmaxf(scores[0][2 * i], scores[0][2 * i + 1]), fmaxf(scores[1][2 * i], scores[1][2 * i + 1]));
        top = max_of_quad(top);
        if (threadIdx.x % 4 == 0) pair.tops[pair.half * kRows + r + 8 * i] = top;
    }
    sync_pair();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float top = fmaxf(rows.top[i], fmaxf(pair.tops[r + 8 * i], pair.tops[kRows + r + 8 * i]));
        const float origin = top == -INFINITY ? 0.0f : top;
        decay[i] = ptx_exp2(rows.top[i] - origin);
        rows.top[i] = top;
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const float low = ptx_exp2(scores[n][2 * i] - origin), high = ptx_exp2(scores[n][2 * i + 1] - origin);
            sum += low + high;
            const uint32_t at = chunk_offset<4>(r + 8 * i, 2 * pair.half + n) + threadIdx.x % 4 * 4;
            *(uint32_t *)(pair.weights + at) = epmoei_pack_pair(low, high, product_t());
        }
        rows.sum[i] = rows.sum[i] * decay[i] + sum;
    }
    sync_pair();
    if (!__any_sync(kAllLanes, decay[0] != 1.0f || decay[1] != 1.0f)) return;
#pragma unroll
    for (int n = 0; n < kHalfCols / 8; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) rows.out[n][j] *= decay[j / 2];
}

template <typename T>
__device__ __forceinline__ void add_values(const pair_t &pair, rows_t<kHalfCols> &rows, const char *values,
                                           int32_t first, const bounds_t &bounds, bool ragged)
{
    using product_t = typename product_type<T>::type;
    constexpr int kChunks = kCols * (int)sizeof(T) / 16, kHalfChunks = kHalfCols * (int)sizeof(T) / 16;
    const int32_t lane = threadIdx.x % 32, r = pair.first_row + lane / 4;
    if (ragged && holds_special<T, kKeys, kCols>(values)) {
#pragma unroll 1
        for (int key = 0; key < kKeys; key++) {
            const product_t low = *(const product_t *)(pair.weights + chunk_offset<4>(r, key / 8) + key % 8 * 2);
            const product_t high = *(const product_t *)(pair.weights + chunk_offset<4>(r + 8, key / 8) + key % 8 * 2);
            multiply_value_seen<T, kHalfCols, kChunks>(rows.out, epmoei_to_float(low), epmoei_to_float(high), values,
                                                       key, pair.half * kHalfChunks, first + key, bounds);
        }
        return;
    }
#pragma unroll
    for (int step = 0; step < kKeys / 16; step++) {
        uint32_t weights[4];
        const int32_t row = pair.first_row + lane % 8 + (lane >> 3 & 1) * 8;
        ptx_ldmatrix_x4(weights, ptx_shared_address(pair.weights) + chunk_offset<4>(row, 2 * step + (lane >> 4)));
        multiply_values_16<T, kHalfCols, kChunks>(rows.out, weights, ptx_shared_address(values), step,
                                                  pair.half * kHalfChunks);
    }
}

template <typename T>
__device__ __forceinline__ void store_rows(const attention_t &p, const tile_t &tile, const pair_t &pair,
                                           const rows_t<kHalfCols> &rows, int32_t head_unit, int64_t part_row)
{
    const int32_t r = pair.first_row + threadIdx.x % 32 / 4;
    float sum[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        sum[i] = sum_of_quad(rows.sum[i]);
        if (threadIdx.x % 4 == 0) pair.tops[pair.half * kRows + r + 8 * i] = sum[i];
    }
    sync_pair();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const row_t row = find_row(p, tile, head_unit, r + 8 * i);
        if (!row.live) continue;
        const float all = pair.tops[r + 8 * i] + pair.tops[kRows + r + 8 * i];
        const float factor = p.parts > 1 ? 1.0f : row_factor(p, row.head, rows.top[i], all);
        if (p.parts > 1 && pair.half == 0 && threadIdx.x % 4 == 0)
            p.part_sum[part_row + r + 8 * i] = make_float2(rows.top[i], all);
#pragma unroll
        for (int block = 0; block < kHalfCols / 8; block++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int32_t column = pair.half * kHalfCols + column_of<T>(block, j);
                if (column >= p.value_dim) continue;
                const float value = rows.out[block][2 * i + j];
                if (p.parts > 1)
                    p.part_o[(part_row + r + 8 * i) * p.value_dim + column] = value;
                else
                    out_row(p, row)[column] = (uint16_t)pack_out(p, scaled(p, value, factor), 0.0f);
            }
    }
}

template <typename T> static __global__ void __launch_bounds__(kThreads, 1) latent_kernel(attention_t p)
{
    using layout = latent_layout<T>;
    extern __shared__ __align__(128) char shared[];
    key_rows_t<kKeys> *key_rows = (key_rows_t<kKeys> *)(shared + layout::kKeyRows);
    float *factors = (float *)(shared + layout::kFactors);
    epmoei_begin_dependent();
    const int32_t head_unit = blockIdx.x % p.tiling.head_units, above = blockIdx.x / p.tiling.head_units;
    const int32_t part = above % p.parts, kv_head = head_unit / p.head_parts;
    const tile_t tile = find_tile(p, above / p.parts);
    if (tile.first >= tile.end) return;
    const parts_t parts = cut_keys(p, tile);
    if (p.parts > 1 && part >= parts.count) return;
    const char *keys = p.keys.data + kv_head * p.keys.head;
    const int32_t begin = parts.first + part * parts.keys, end = min(tile.hi, begin + parts.keys);
    const int32_t steps = (end - begin + kKeys - 1) / kKeys;

    const auto find_step = [&](int32_t step) {
        find_key_rows(p, key_rows + step % 2, tile.seq, begin + step * kKeys, tile.lo, end, head_unit == 0);
    };
    const auto read_step = [&](int32_t step) {
        if (step < steps)
            copy_key_rows<T, kKeys, kCols, kThreads>(shared + step % 2 * layout::kTileBytes, keys,
                                                     key_rows[step % 2].key, p.head_dim);
        ptx_cp_async_commit();
    };
    find_step(0);
    load_q<T, kRows, kCols, kThreads>(p, tile, head_unit, shared + layout::kQ, factors);
    __syncthreads();
    read_step(0);
    find_step(1);

    const int32_t warp = threadIdx.x / 32;
    const pair_t pair = {shared + layout::kWeights, (float *)(shared + layout::kTops), warp / 4, warp % 4 * 16};
    const int32_t r = pair.first_row + threadIdx.x % 32 / 4;
    q_rows_t<kCols> q;
    q.load(ptx_shared_address(shared + layout::kQ) + pair.first_row * kCols * 2);
    float factor[2];
    find_factors<T>(factor, p, factors, r);
    const bounds_t bounds = find_bounds(p, tile, r);
    const reach_t reach = find_reach(p, tile, pair.first_row);
    rows_t<kHalfCols> rows;
    rows.clear();
    for (int32_t step = 0; step < steps; step++) {
        const int32_t first = begin + step * kKeys;
        ptx_cp_async_wait<0>();
        __syncthreads();
        read_step(step + 1);
        if (first < reach.hi && first + kKeys > reach.lo) {
            const char *stage = shared + step % 2 * layout::kTileBytes;
            const bool masked = first < reach.full_lo || first + kKeys > reach.full_hi;
            float scores[2][4] = {};
            multiply_keys<T, 16, kCols>(scores, q, ptx_shared_address(stage) + pair.half * layout::kTileBytes / 2);
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const int32_t key = first + 16 * pair.half + 8 * n + threadIdx.x % 4 * 2 + j % 2;
                    const bool seen = !masked || (key >= bounds.lo[j / 2] && key < bounds.hi[j / 2]);
                    scores[n][j] = seen ? scores[n][j] * factor[j / 2] : -INFINITY;
                }
            weigh_half<T>(pair, rows, scores);
            add_values<T>(pair, rows, stage, first, bounds, masked && reach.ragged);
        }
        find_step(step + 2);
    }
    ptx_cp_async_wait<0>();
    const int64_t unit = (int64_t)(above / p.parts) * p.tiling.head_units + head_unit;
    store_rows<T>(p, tile, pair, rows, head_unit, (unit * p.parts + part) * kRows);
}

template <typename T> static epmoe_status_t launch(const attention_t &p, int64_t blocks, epmoe_stream_t stream)
{
    const int32_t bytes = latent_layout<T>::kBytes;
    EPMOEI_CHECK(epmoei_allow_shared(latent_kernel<T>, (size_t)bytes, "epmoe_attention"));
    return epmoei_cuda_status(
        (int32_t)epmoei_launch_dependent(latent_kernel<T>, dim3((unsigned)blocks), dim3(kThreads), bytes, stream, p),
        "epmoe_attention");
}

} // namespace

extern "C" epmoe_status_t epmoei_attention_latent_sm80(const epmoe_attention_args_t *args,
                                                       const epmoei_attention_plan_t *plan, epmoe_stream_t stream)
{
    attention_t p = attention_params(args, plan->decode_tiling);
    place_parts(p, args, *plan, kRows);
    const int64_t blocks = p.tiling.tiles * p.tiling.head_units * p.parts;
    EPMOEI_CHECK(check_blocks(blocks));
    EPMOEI_CHECK(args->cache_dtype == EPMOE_F8_E4M3 ? launch<uint8_t>(p, blocks, stream)
                 : args->dtype == EPMOE_BF16        ? launch<__nv_bfloat16>(p, blocks, stream)
                                                    : launch<__half>(p, blocks, stream));
    return p.parts > 1 ? epmoei_attention_combine_sm80(&p, kRows, stream) : EPMOE_OK;
}
