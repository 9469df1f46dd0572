/* Attention of few new tokens over long contexts: what counts is to read the cache once, at full speed.
 *
 * A block takes the query heads of one cache head, up to 16 rows with several tokens, over one part of the context. Its
 * warps share nothing while they run: each walks its own keys, 16 at a time, through a ring of its own in shared
 * memory, with a softmax of its own, and at the end the four results meet in the order of the warps. Where a context is
 * cut into parts a second kernel adds them up in ascending order. */
#include "dense_layers/attention_mma_cuda.cuh"

namespace
{

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kRows = EPMOEI_DECODE_ROWS;
constexpr int kStepKeys = 16; /* of a warp */

/* Byte offsets in shared memory. The results of the warps take the place of the rings. */
template <typename T, int kCols> struct decode_layout {
    static constexpr int kRowBytes = kCols * (int)sizeof(T);
    static constexpr int kStages = kRowBytes <= 128 ? 4 : kRowBytes <= 256 ? 3 : 2;
    static constexpr int kBlocksPerSm = kCols <= 64        ? 3
                                        : kRowBytes <= 256 ? 2
                                                           : 1; /* as epmoei_attention_plan has it */
    static constexpr int kTileBytes = kStepKeys * kRowBytes;
    static constexpr int kRingBytes = kStages * 2 * kTileBytes;
    static constexpr int kQ = kWarps * kRingBytes;
    static constexpr int kFactors = kQ + kRows * kCols * 2;
    static constexpr int kSums = kFactors + kRows * 4; /* float2 [kWarps,kRows] */
    static constexpr int kBytes = kSums + kWarps * kRows * 8;
    static_assert(kWarps * kRingBytes >= kWarps * kRows * kCols * 4, "the results fit over the rings");
};

/* The keys [first,end) of a part, of which a warp takes steps warp, warp + kWarps, ... */
struct reader_t {
    const attention_t &p;
    cache_t keys;
    cache_t values;
    int32_t seq;
    int32_t lo; /* keys below are not seen by any row */
    int32_t first;
    int32_t end;
    bool counts;
    key_place_t next; /* of this lane, for the step that is read next */

    __device__ __forceinline__ int32_t first_of(int32_t step) const
    {
        return first + (step * kWarps + (int32_t)threadIdx.x / 32) * kStepKeys;
    }
    /* Early, so that the answer is there when the step is read. */
    __device__ __forceinline__ void look_up(int32_t step)
    {
        const int32_t lane = threadIdx.x % 32, key = first_of(step) + lane % kStepKeys;
        next = find_key(p, seq, key, key >= lo && key < end, counts && lane < kStepKeys);
    }

    template <typename T, int kCols>
    __device__ __forceinline__ void copy_rows(char *shared, const cache_t &cache, int64_t from, uint32_t valid,
                                              int32_t columns) const
    {
        constexpr int kChunks = kCols * (int)sizeof(T) / 16;
        const int32_t lane = threadIdx.x % 32, used = columns * (int)sizeof(T) / 16;
#pragma unroll
        for (int i = 0; i < kStepKeys * kChunks / 32; i++) {
            const int32_t row = (i * 32 + lane) / kChunks, chunk = lane % kChunks + i * 32 % kChunks;
            const int64_t at = __shfl_sync(kAllLanes, from, row);
            const bool reads = valid >> row & 1 && chunk < used;
            ptx_cp_async_16(ptx_shared_address(shared) + chunk_offset<kChunks>(row, chunk),
                            cache.data + (reads ? at + chunk * 16 : 0), reads ? 16 : 0);
        }
    }

    /* The same where all keys are there and all columns are used, of keys and values at once. */
    template <typename T, int kCols> __device__ __forceinline__ void copy_all(char *shared, uint32_t from) const
    {
        constexpr int kChunks = kCols * (int)sizeof(T) / 16;
        const int32_t lane = threadIdx.x % 32, chunk = lane % kChunks;
        const uint32_t to = ptx_shared_address(shared);
        const char *own_keys = keys.data + chunk * 16, *own_values = values.data + chunk * 16;
#pragma unroll
        for (int i = 0; i < kStepKeys * kChunks / 32; i++) {
            const int32_t row = (i * 32 + lane) / kChunks;
            const uint64_t at = (uint64_t)__shfl_sync(kAllLanes, from, row) * 16;
            const uint32_t place = to + chunk_offset<kChunks>(row, chunk + i * 32 % kChunks);
            ptx_cp_async_16(place, own_keys + at + i * 32 % kChunks * 16, 16);
            ptx_cp_async_16(place + decode_layout<T, kCols>::kTileBytes, own_values + at + i * 32 % kChunks * 16, 16);
        }
    }

    /* One group of copies; zeros for keys that are not there. */
    template <typename T, int kCols> __device__ __forceinline__ void read(int32_t step, char *shared)
    {
        using layout = decode_layout<T, kCols>;
        if (first_of(step) < end) {
            const uint32_t valid = __ballot_sync(kAllLanes, next.block >= 0);
            const int64_t block = next.block, slot = next.slot;
            if (p.alike && p.head_dim == kCols && valid == kAllLanes)
                copy_all<T, kCols>(shared, (uint32_t)next.block * (uint32_t)(keys.block / 16) +
                                               (uint32_t)next.slot * (uint32_t)(keys.slot / 16));
            else {
                copy_rows<T, kCols>(shared, keys, block * keys.block + slot * keys.slot, valid, p.head_dim);
                copy_rows<T, kCols>(shared + layout::kTileBytes, values, block * values.block + slot * values.slot,
                                    valid, p.value_dim);
            }
            look_up(step + 1);
        }
        ptx_cp_async_commit();
    }
};

/* The warps' rows to shared memory. */
template <typename T, int kCols>
__device__ __forceinline__ void leave_rows(const rows_t<kCols> &rows, float *out, float2 *sums)
{
    const int32_t warp = threadIdx.x / 32, r = threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float *row = out + (warp * kRows + r + 8 * i) * kCols;
#pragma unroll
        for (int block = 0; block < kCols / 8; block++)
#pragma unroll
            for (int j = 0; j < 2; j++) row[column_of<T>(block, j)] = rows.out[block][2 * i + j];
        const float sum = sum_of_quad(rows.sum[i]);
        if (threadIdx.x % 4 == 0) sums[warp * kRows + r + 8 * i] = make_float2(rows.top[i], sum);
    }
}

/* Four columns of the sum over `count` results, each relative to its own largest score. */
struct joint_t {
    float top;
    float sum;
};

template <typename Sum> __device__ __forceinline__ joint_t join_sums(int32_t count, Sum sum_at)
{
    joint_t joint = {-INFINITY, 0.0f};
    for (int i = 0; i < count; i++) joint.top = fmaxf(joint.top, sum_at(i).x);
    const float origin = joint.top == -INFINITY ? 0.0f : joint.top;
    for (int i = 0; i < count; i++) joint.sum += sum_at(i).y * ptx_exp2(sum_at(i).x - origin);
    return joint;
}

template <typename Sum, typename Part>
__device__ __forceinline__ float4 join_columns(int32_t count, float top, Sum sum_at, Part part_at)
{
    const float origin = top == -INFINITY ? 0.0f : top;
    float4 out = {};
#pragma unroll 4
    for (int i = 0; i < count; i++) {
        const float share = ptx_exp2(sum_at(i).x - origin);
        const float4 part = part_at(i);
        out.x += part.x * share;
        out.y += part.y * share;
        out.z += part.z * share;
        out.w += part.w * share;
    }
    return out;
}

__device__ __forceinline__ void store_columns(const attention_t &p, const row_t &row, int32_t column, const float4 &out,
                                              float factor)
{
    *(uint2 *)(out_row(p, row) + column) = make_uint2(pack_out(p, scaled(p, out.x, factor), scaled(p, out.y, factor)),
                                                      pack_out(p, scaled(p, out.z, factor), scaled(p, out.w, factor)));
}

template <typename T, int kCols>
static __global__ void __launch_bounds__(kThreads, (decode_layout<T, kCols>::kBlocksPerSm)) decode_kernel(attention_t p)
{
    using layout = decode_layout<T, kCols>;
    extern __shared__ __align__(128) char shared[];
    epmoei_begin_dependent();
    const int32_t head_unit = blockIdx.x % p.tiling.head_units, above = blockIdx.x / p.tiling.head_units;
    const int32_t part = above % p.parts;
    const tile_t tile = find_tile(p, above / p.parts);
    if (tile.first >= tile.end) return;
    const parts_t parts = cut_keys(p, tile);
    if (p.parts > 1 && part >= parts.count) return;

    const int32_t kv_head = head_unit / p.head_parts;
    reader_t reader = {p, p.keys, p.values, tile.seq, tile.lo, parts.first + part * parts.keys};
    reader.end = min(tile.hi, reader.first + parts.keys);
    reader.counts = head_unit == 0;
    reader.keys.data += kv_head * p.keys.head;
    reader.values.data += kv_head * p.values.head;
    char *ring = shared + threadIdx.x / 32 * layout::kRingBytes;
    reader.look_up(0);
#pragma unroll
    for (int step = 0; step < layout::kStages - 1; step++)
        reader.read<T, kCols>(step, ring + step * 2 * layout::kTileBytes);

    float *factors = (float *)(shared + layout::kFactors);
    load_q<T, kRows, kCols, kThreads>(p, tile, head_unit, shared + layout::kQ, factors);
    __syncthreads();
    q_rows_t<kCols> q;
    q.load(ptx_shared_address(shared + layout::kQ));
    const int32_t r = threadIdx.x % 32 / 4;
    float factor[2];
    find_factors<T>(factor, p, factors, r);
    const bounds_t bounds = find_bounds(p, tile, r);
    const int32_t last_lo = tile.hi > 0 ? first_key(p, tile.position + tile.end - 1) : 0;
    const int32_t first_hi = tile.position + tile.first + 1;
    const bool ragged = tile.end - tile.first > 1;

    rows_t<kCols> rows;
    rows.clear();
    int32_t stage = 0, ahead = layout::kStages - 1;
    for (int step = 0; reader.first_of(step) < reader.end; step++) {
        const int32_t first = reader.first_of(step);
        ptx_cp_async_wait<layout::kStages - 2>();
        __syncwarp(); /* the copies of all lanes are there, and nobody reads the stage that comes next any more */
        reader.read<T, kCols>(step + layout::kStages - 1, ring + ahead * 2 * layout::kTileBytes);
        const char *keys = ring + stage * 2 * layout::kTileBytes;
        const bool masked = first < last_lo || first + kStepKeys > first_hi;
        attend<T, kStepKeys, kCols>(rows, q, keys, keys + layout::kTileBytes, factor, first, bounds, masked, ragged);
        stage = stage + 1 == layout::kStages ? 0 : stage + 1;
        ahead = ahead + 1 == layout::kStages ? 0 : ahead + 1;
    }
    ptx_cp_async_wait<0>();
    __syncthreads();
    float *out = (float *)shared;
    float2 *sums = (float2 *)(shared + layout::kSums);
    leave_rows<T, kCols>(rows, out, sums);
    __syncthreads();

    const int64_t unit = (int64_t)(above / p.parts) * p.tiling.head_units + head_unit;
    const int64_t part_row = (unit * p.parts + part) * kRows;
    const int32_t live_rows = (tile.end - tile.first) * p.tiling.heads;
    for (int i = threadIdx.x; i < live_rows * (kCols / 4); i += kThreads) {
        const int32_t row_index = i / (kCols / 4), column = i % (kCols / 4) * 4;
        const row_t row = find_row(p, tile, head_unit, row_index);
        if (!row.live || column >= p.value_dim) continue;
        const auto sum_at = [&](int32_t w) { return sums[w * kRows + row_index]; };
        const auto part_at = [&](int32_t w) { return *(float4 *)(out + (w * kRows + row_index) * kCols + column); };
        const joint_t joint = join_sums(kWarps, sum_at);
        const float4 columns = join_columns(kWarps, joint.top, sum_at, part_at);
        if (p.parts == 1) {
            store_columns(p, row, column, columns, row_factor(p, row.head, joint.top, joint.sum));
            continue;
        }
        *(float4 *)(p.part_o + (part_row + row_index) * p.value_dim + column) = columns;
        if (column == 0) p.part_sum[part_row + row_index] = make_float2(joint.top, joint.sum);
    }
}

/* A block per unit of heads and tile, a warp per row: the parts in ascending order. */
static __global__ void __launch_bounds__(kThreads) combine_kernel(attention_t p, int32_t unit_rows)
{
    epmoei_begin_dependent();
    const int32_t head_unit = blockIdx.x % p.tiling.head_units, lane = threadIdx.x % 32;
    const tile_t tile = find_tile(p, blockIdx.x / p.tiling.head_units);
    if (tile.first >= tile.end) return;
    const int32_t count = tile.hi > 0 ? cut_keys(p, tile).count : 0;
    const int32_t live_rows = (tile.end - tile.first) * p.tiling.heads;
    for (int r = threadIdx.x / 32; r < live_rows; r += kWarps) {
        const row_t row = find_row(p, tile, head_unit, r);
        if (!row.live) continue;
        const int64_t first = (int64_t)blockIdx.x * p.parts * unit_rows + r;
        const auto sum_at = [&](int32_t i) { return p.part_sum[first + (int64_t)i * unit_rows]; };
        const joint_t joint = join_sums(count, sum_at);
        const float factor = row_factor(p, row.head, joint.top, joint.sum);
        for (int column = 4 * lane; column < p.value_dim; column += 4 * 32) {
            const auto part_at = [&](int32_t i) {
                return *(const float4 *)(p.part_o + (first + (int64_t)i * unit_rows) * p.value_dim + column);
            };
            store_columns(p, row, column, join_columns(count, joint.top, sum_at, part_at), factor);
        }
    }
}

template <typename T, int kCols>
static epmoe_status_t launch(const attention_t &p, int64_t blocks, epmoe_stream_t stream)
{
    const int32_t bytes = decode_layout<T, kCols>::kBytes;
    EPMOEI_CHECK(epmoei_allow_shared(decode_kernel<T, kCols>, (size_t)bytes, "epmoe_attention"));
    return epmoei_cuda_status((int32_t)epmoei_launch_dependent(decode_kernel<T, kCols>, dim3((unsigned)blocks),
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

extern "C" epmoe_status_t epmoei_attention_combine_sm80(const void *params, int32_t unit_rows, epmoe_stream_t stream)
{
    const attention_t &p = *(const attention_t *)params;
    const int64_t units = p.tiling.tiles * p.tiling.head_units;
    return epmoei_cuda_status((int32_t)epmoei_launch_dependent(combine_kernel, dim3((unsigned)units), dim3(kThreads), 0,
                                                               stream, p, unit_rows),
                              "epmoe_attention");
}

extern "C" epmoe_status_t epmoei_attention_decode_sm80(const epmoe_attention_args_t *args,
                                                       const epmoei_attention_plan_t *plan, epmoe_stream_t stream)
{
    attention_t p = attention_params(args, plan->decode_tiling);
    place_parts(p, args, *plan, kRows);
    if (plan->prefill) p.most_queries = plan->few_queries;
    const int64_t blocks = p.tiling.tiles * p.tiling.head_units * p.parts;
    EPMOEI_CHECK(check_blocks(blocks));
    epmoe_status_t status;
    if (args->cache_dtype == EPMOE_F8_E4M3)
        status = launch_columns<uint8_t>(p, plan->columns, blocks, stream);
    else if (args->dtype == EPMOE_BF16)
        status = launch_columns<__nv_bfloat16>(p, plan->columns, blocks, stream);
    else
        status = launch_columns<__half>(p, plan->columns, blocks, stream);
    EPMOEI_CHECK(status);
    return p.parts > 1 ? epmoei_attention_combine_sm80(&p, kRows, stream) : EPMOE_OK;
}
