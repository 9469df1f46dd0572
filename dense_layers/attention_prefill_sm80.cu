/* Attention of many new tokens: 64 rows of a block, tokens times the query heads of one cache head, against tiles of
 * keys and values that its four warps share and of which the next is on its way while one is worked on. */
#include "dense_layers/attention_mma_cuda.cuh"

namespace
{

constexpr int kRows = EPMOEI_PREFILL_ROWS;
constexpr int kThreads = kRows * 2; /* a warp has 16 rows */

/* Byte offsets in shared memory, behind the two stages of keys and values. */
template <typename T, int kCols> struct prefill_layout {
    static constexpr int kKeys = kCols <= 128 ? 64 : 32;
    static constexpr int kTileBytes = kKeys * kCols * (int)sizeof(T);
    static constexpr int kQ = 4 * kTileBytes;
    static constexpr int kFactors = kQ + kRows * kCols * 2;
    static constexpr int kKeyRows = kFactors + kRows * 4;
    static constexpr int kBytes = kKeyRows + 2 * (int)sizeof(key_rows_t<kKeys>);
};

template <typename T, int kCols>
__device__ __forceinline__ void store_rows(const attention_t &p, const tile_t &tile, int32_t head_unit,
                                           const rows_t<kCols> &rows, int32_t first_row)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const row_t row = find_row(p, tile, head_unit, first_row + threadIdx.x % 32 / 4 + 8 * i);
        const float sum = sum_of_quad(rows.sum[i]);
        if (!row.live) continue;
        const float factor = row_factor(p, row.head, rows.top[i], sum);
        uint16_t *to = out_row(p, row);
#pragma unroll
        for (int block = 0; block < kCols / 8; block++) {
            const float low = scaled(p, rows.out[block][2 * i], factor);
            const float high = scaled(p, rows.out[block][2 * i + 1], factor);
            const int32_t column = column_of<T>(block, 0);
            if (column >= p.value_dim) continue;
            if constexpr (sizeof(T) == 2)
                *(uint32_t *)(to + column) = pack_out(p, low, high);
            else if (block % 2 == 0) {
                const float next = scaled(p, rows.out[block + 1][2 * i], factor);
                const float last = scaled(p, rows.out[block + 1][2 * i + 1], factor);
                *(uint2 *)(to + column) = make_uint2(pack_out(p, low, next), pack_out(p, high, last));
            }
        }
    }
}

template <typename T, int kCols> static __global__ void __launch_bounds__(kThreads, 2) prefill_kernel(attention_t p)
{
    using layout = prefill_layout<T, kCols>;
    constexpr int kKeys = layout::kKeys;
    extern __shared__ __align__(128) char shared[];
    key_rows_t<kKeys> *key_rows = (key_rows_t<kKeys> *)(shared + layout::kKeyRows);
    float *factors = (float *)(shared + layout::kFactors);
    epmoei_begin_dependent();
    const int32_t head_unit = blockIdx.x % p.tiling.head_units, kv_head = head_unit / p.head_parts;
    /* The tiles that see most come first. */
    const tile_t tile = find_tile(p, (int32_t)p.tiling.tiles - 1 - (int32_t)(blockIdx.x / p.tiling.head_units));
    if (tile.first >= tile.end) return;
    const char *keys = p.keys.data + kv_head * p.keys.head, *values = p.values.data + kv_head * p.values.head;
    const bool counts = head_unit == 0;
    const int32_t begin = tile.lo / kKeys * kKeys, steps = (tile.hi - begin + kKeys - 1) / kKeys;

    const auto find_step = [&](int32_t step) {
        find_key_rows(p, key_rows + step % 2, tile.seq, begin + step * kKeys, tile.lo, tile.hi, counts);
    };
    const auto read_step = [&](int32_t step) {
        char *stage = shared + step % 2 * 2 * layout::kTileBytes;
        if (step < steps) {
            copy_key_rows<T, kKeys, kCols, kThreads>(stage, keys, key_rows[step % 2].key, p.head_dim);
            copy_key_rows<T, kKeys, kCols, kThreads>(stage + layout::kTileBytes, values, key_rows[step % 2].value,
                                                     p.value_dim);
        }
        ptx_cp_async_commit();
    };
    find_step(0);
    load_q<T, kRows, kCols, kThreads>(p, tile, head_unit, shared + layout::kQ, factors);
    __syncthreads();
    read_step(0);
    find_step(1);

    const int32_t first_row = threadIdx.x / 32 * 16, r = first_row + threadIdx.x % 32 / 4;
    q_rows_t<kCols> q;
    q.load(ptx_shared_address(shared + layout::kQ) + first_row * kCols * 2);
    float factor[2];
    find_factors<T>(factor, p, factors, r);
    const bounds_t bounds = find_bounds(p, tile, r);
    const reach_t reach = find_reach(p, tile, first_row);
    rows_t<kCols> rows;
    rows.clear();
    for (int32_t step = 0; step < steps; step++) {
        const int32_t first = begin + step * kKeys;
        ptx_cp_async_wait<0>();
        __syncthreads();
        read_step(step + 1);
        if (first < reach.hi && first + kKeys > reach.lo) {
            const char *stage = shared + step % 2 * 2 * layout::kTileBytes;
            const bool masked = first < reach.full_lo || first + kKeys > reach.full_hi;
            attend<T, kKeys, kCols>(rows, q, stage, stage + layout::kTileBytes, factor, first, bounds, masked,
                                    reach.ragged);
        }
        find_step(step + 2);
    }
    ptx_cp_async_wait<0>();
    store_rows<T, kCols>(p, tile, head_unit, rows, first_row);
}

template <typename T, int kCols>
static epmoe_status_t launch(const attention_t &p, int64_t blocks, epmoe_stream_t stream)
{
    const int32_t bytes = prefill_layout<T, kCols>::kBytes;
    EPMOEI_CHECK(epmoei_allow_shared(prefill_kernel<T, kCols>, (size_t)bytes, "epmoe_attention"));
    return epmoei_cuda_status((int32_t)epmoei_launch_dependent(prefill_kernel<T, kCols>, dim3((unsigned)blocks),
                                                               dim3(kThreads), bytes, stream, p),
                              "epmoe_attention");
}

template <typename T>
static epmoe_status_t launch_columns(const attention_t &p, int32_t columns, int64_t blocks, epmoe_stream_t stream)
{
    switch (columns) {
    case 64: return launch<T, 64>(p, blocks, stream);
    case 128: return launch<T, 128>(p, blocks, stream);
    default: return launch<T, 256>(p, blocks, stream);
    }
}

} // namespace

extern "C" epmoe_status_t epmoei_attention_prefill_sm80(const epmoe_attention_args_t *args,
                                                        const epmoei_attention_plan_t *plan, epmoe_stream_t stream)
{
    attention_t p = attention_params(args, plan->prefill_tiling);
    if (plan->decode) p.least_queries = plan->few_queries + 1;
    const int64_t blocks = p.tiling.tiles * p.tiling.head_units;
    EPMOEI_CHECK(check_blocks(blocks));
    if (args->cache_dtype == EPMOE_F8_E4M3) return launch_columns<uint8_t>(p, plan->columns, blocks, stream);
    if (args->dtype == EPMOE_BF16) return launch_columns<__nv_bfloat16>(p, plan->columns, blocks, stream);
    return launch_columns<__half>(p, plan->columns, blocks, stream);
}
