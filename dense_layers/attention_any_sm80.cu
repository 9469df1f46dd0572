/* Attention for what the kernels on tensor cores do not take: fp32, the V1 layout, odd widths and strides. A block per
 * token and query head; all sums in fp32. Also checks the arguments' addresses and chooses between the kernels. */
#include "dense_layers/attention_mma_cuda.cuh"

namespace
{

constexpr int kThreads = 128;
constexpr int kTileKeys = 64;
constexpr int kMostColumns = (EPMOE_MAX_HEAD_DIM + kThreads - 1) / kThreads; /* of a thread */

/* Where element d of slot s of a head lies in its block: s * slot + d / pack * part + d % pack. */
struct place_t {
    const void *data;
    int64_t block;
    int64_t head;
    int64_t slot;
    int64_t part;
    int32_t pack;
};

struct any_t {
    attention_t shared;
    place_t keys;
    place_t values;
    epmoe_dtype_t cache_dtype;
};

__device__ __forceinline__ float load_cached(const any_t &p, const place_t &place, int64_t row, int32_t d)
{
    const int64_t at = row + d / place.pack * place.part + d % place.pack;
    if (p.cache_dtype == EPMOE_F8_E4M3) return cached_to_float(((const uint8_t *)place.data)[at]);
    return epmoei_load_float(place.data, p.cache_dtype, at);
}

__device__ __forceinline__ float block_max(float x, float *scratch)
{
#pragma unroll
    for (int offset = 16; offset; offset /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, offset));
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    for (int i = 0; i < kThreads / 32; i++) x = fmaxf(x, scratch[i]);
    __syncthreads();
    return x;
}

static __global__ void __launch_bounds__(kThreads) any_kernel(any_t p)
{
    __shared__ float q[EPMOE_MAX_HEAD_DIM], weights[kTileKeys], scratch[kThreads / 32];
    __shared__ int64_t key_rows[kTileKeys], value_rows[kTileKeys]; /* -1: a block that is not there */
    const attention_t &c = p.shared;
    epmoei_begin_dependent();
    const int32_t head = blockIdx.x % c.num_heads, token = blockIdx.x / c.num_heads, kv_head = head / c.group;
    const tile_t tile = find_tile(c, token);
    if (tile.first >= tile.end) return;
    const int64_t q_row = token * c.q_stride + (int64_t)head * c.head_dim;
    for (int d = threadIdx.x; d < c.head_dim; d += kThreads) q[d] = epmoei_load_float(c.q, c.dtype, q_row + d);
    const float k_scale = c.k_scale ? *c.k_scale : 1.0f;
    float out[kMostColumns] = {}, top = -INFINITY, sum = 0.0f;
    for (int32_t first = tile.lo / kTileKeys * kTileKeys; first < tile.hi; first += kTileKeys) {
        __syncthreads(); /* q is there, and the last tile's weights are not read any more */
        if (threadIdx.x < kTileKeys) {
            const int32_t key = first + threadIdx.x;
            const key_place_t at = find_key(c, tile.seq, key, key >= tile.lo && key < tile.hi, head == 0);
            const int64_t block = at.block, slot = at.slot;
            key_rows[threadIdx.x] = block < 0 ? -1 : block * p.keys.block + kv_head * p.keys.head + slot * p.keys.slot;
            value_rows[threadIdx.x] =
                block < 0 ? -1 : block * p.values.block + kv_head * p.values.head + slot * p.values.slot;
        }
        __syncthreads();
        for (int i = threadIdx.x / 32; i < kTileKeys; i += kThreads / 32) {
            float score = 0.0f;
            if (key_rows[i] >= 0)
                for (int d = threadIdx.x % 32; d < c.head_dim; d += 32)
                    score = fmaf(q[d], load_cached(p, p.keys, key_rows[i], d) * k_scale, score);
#pragma unroll
            for (int offset = 16; offset; offset /= 2) score += __shfl_xor_sync(kAllLanes, score, offset);
            const bool seen = first + i >= tile.lo && first + i < tile.hi;
            if (threadIdx.x % 32 == 0) weights[i] = seen ? score * c.scale_log2 : -INFINITY;
        }
        __syncthreads();
        const float next = fmaxf(top, block_max(threadIdx.x < kTileKeys ? weights[threadIdx.x] : -INFINITY, scratch));
        const float origin = next == -INFINITY ? 0.0f : next, decay = exp2f(top - origin);
        if (threadIdx.x < kTileKeys) weights[threadIdx.x] = exp2f(weights[threadIdx.x] - origin);
        __syncthreads();
        top = next;
        float more = 0.0f;
        for (int i = 0; i < kTileKeys; i++) more += weights[i];
        sum = sum * decay + more;
        const int32_t begin = max(tile.lo - first, 0), end = min(tile.hi - first, kTileKeys);
#pragma unroll
        for (int j = 0; j < kMostColumns; j++) {
            const int32_t d = threadIdx.x + j * kThreads;
            if (d >= c.value_dim) continue;
            out[j] *= decay;
            for (int i = begin; i < end; i++)
                if (value_rows[i] >= 0) out[j] = fmaf(weights[i], load_cached(p, p.values, value_rows[i], d), out[j]);
        }
    }
    const float factor = row_factor(c, head, top, sum);
    const int64_t o_row = ((int64_t)token * c.num_heads + head) * c.value_dim;
#pragma unroll
    for (int j = 0; j < kMostColumns; j++) {
        const int32_t d = threadIdx.x + j * kThreads;
        if (d >= c.value_dim) continue;
        const float value = scaled(c, out[j], factor);
        switch (c.dtype) {
        case EPMOE_BF16: ((__nv_bfloat16 *)c.o)[o_row + d] = epmoei_from_float<__nv_bfloat16>(value); break;
        case EPMOE_F16: ((__half *)c.o)[o_row + d] = epmoei_from_float<__half>(value); break;
        default: ((float *)c.o)[o_row + d] = value;
        }
    }
}

/* Keys of V1 are packed along the columns; its values are one column after the other. */
static place_t make_place(const epmoe_attention_args_t *args, const void *data, int64_t block, int64_t width,
                          bool is_key)
{
    const int64_t heads = args->num_kv_heads, slots = args->block_size;
    place_t place = {data, block, width * slots, width, width, (int32_t)width};
    if (args->layout == EPMOE_CACHE_LAYOUT_NHD) {
        place.head = width;
        place.slot = width * heads;
    } else if (args->layout == EPMOE_CACHE_LAYOUT_V1) {
        place.pack = is_key ? args->key_pack : 1;
        place.slot = place.pack;
        place.part = slots * place.pack;
    }
    return place;
}

} // namespace

extern "C" epmoe_status_t epmoei_attention_any_sm80(const epmoe_attention_args_t *args, epmoe_stream_t stream)
{
    epmoei_attention_tiling_t tiling = {};
    tiling.kind = EPMOEI_TILES_OF_TOKENS;
    tiling.heads = tiling.queries = 1;
    tiling.head_units = args->num_heads;
    any_t p = {};
    p.shared = attention_params(args, tiling);
    p.keys = make_place(args, args->key_cache, args->key_block_stride, args->head_dim, true);
    p.values = p.keys;
    if (args->value_cache)
        p.values = make_place(args, args->value_cache, args->value_block_stride, args->value_dim, false);
    p.cache_dtype = args->cache_dtype;
    const int64_t blocks = (int64_t)args->num_tokens * args->num_heads;
    EPMOEI_CHECK(check_blocks(blocks));
    return epmoei_cuda_status(
        (int32_t)epmoei_launch_dependent(any_kernel, dim3((unsigned)blocks), dim3(kThreads), 0, stream, p),
        "epmoe_attention");
}

extern "C" epmoe_status_t epmoei_attention_sm80(const epmoe_attention_args_t *args, epmoe_stream_t stream)
{
    EPMOEI_CHECK_ALIGNED(args->q, 16);
    EPMOEI_CHECK_ALIGNED(args->key_cache, 16);
    EPMOEI_CHECK_ALIGNED(args->value_cache, 16);
    EPMOEI_CHECK_ALIGNED(args->o, 16);
    EPMOEI_CHECK_ALIGNED(args->workspace, 16);
    EPMOEI_CHECK_ALIGNED(args->k_scale, 4);
    EPMOEI_CHECK_ALIGNED(args->v_scale, 4);
    EPMOEI_CHECK_ALIGNED(args->block_table, 4);
    EPMOEI_CHECK_ALIGNED(args->seq_lens, 4);
    EPMOEI_CHECK_ALIGNED(args->query_start, 4);
    EPMOEI_CHECK_ALIGNED(args->sinks, 4);
    if (args->num_seqs == 0) return EPMOE_OK;
    const epmoei_device_info_t *device = epmoei_device_current();
    const epmoei_attention_plan_t plan = epmoei_attention_plan(args, epmoei_cuda_tier(), device ? device->num_sms : 1,
                                                               args->workspace ? args->workspace_bytes : 0);
    if (plan.way == EPMOEI_ATTENTION_ANY) return epmoei_attention_any_sm80(args, stream);
    if (plan.way == EPMOEI_ATTENTION_LATENT) return epmoei_attention_latent_sm80(args, &plan, stream);
    if (plan.decode) EPMOEI_CHECK(epmoei_attention_decode_sm80(args, &plan, stream));
    if (!plan.prefill) return EPMOE_OK;
    return plan.prefill_sm90 ? epmoei_attention_prefill_sm90(args, &plan, stream)
                             : epmoei_attention_prefill_sm80(args, &plan, stream);
}
