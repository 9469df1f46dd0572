/* What the attention kernels share: their parameters, where tiles, keys and rows lie, and how a row ends. */
#ifndef EPMOEI_ATTENTION_CUDA_CUH
#define EPMOEI_ATTENTION_CUDA_CUH

#include "dense_layers/attention_plan.h"
#include "kernels/fp8_cuda.cuh"
#include "kernels/launch_cuda.cuh"
#include "kernels/parts_cuda.cuh"

namespace
{

constexpr float kLog2e = 1.4426950408889634f;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

/* Bytes between the rows of a cache. */
struct cache_t {
    const char *data;
    int64_t block;
    int64_t slot;
    int64_t head;
};

struct attention_t {
    const void *q;
    void *o;
    cache_t keys;
    cache_t values;
    const float *k_scale; /* or NULL */
    const float *v_scale;
    const float *sinks;
    const int32_t *block_table;
    const int32_t *seq_lens;
    const int32_t *query_start;
    float *part_o;    /* [unit,part,row,value_dim] */
    float2 *part_sum; /* [unit,part,row]: largest score, sum */
    int32_t *error_word;
    int64_t q_stride;
    epmoei_attention_tiling_t tiling;
    int32_t num_tokens;
    int32_t num_seqs;
    int32_t num_heads;
    int32_t group; /* query heads of a cache head */
    int32_t head_parts;
    int32_t head_dim;
    int32_t value_dim;
    int32_t num_blocks;
    int32_t block_size;
    int32_t block_shift; /* its logarithm; -1 where it is no power of two */
    int32_t max_blocks;
    int32_t window; /* 0 = none */
    int32_t parts;
    int32_t least_queries; /* sequences with another number of queries are left to another kernel */
    int32_t most_queries;
    float scale_log2; /* of the scores, times log2(e) */
    epmoe_dtype_t dtype;
    bool alike; /* keys and values lie at the same offsets, whose sixteenths fit into 32 bits */
};

/* ----------------------------------------------------------------------------------------------------- tiles, parts */

/* `target` at the latest begins entry 0; the last of `count` entries that does. All lanes of a warp call it. */
template <typename Begin> __device__ __forceinline__ int32_t last_begun(int32_t count, int64_t target, Begin begin)
{
    int32_t lo = 0, hi = count;
    while (hi - lo > 1) {
        const int32_t step = (hi - lo + 31) / 32;
        const int64_t probe = lo + (int64_t)(threadIdx.x % 32 + 1) * step;
        const bool begun = probe < hi && begin((int32_t)probe) <= target;
        const int32_t steps = __popc(__ballot_sync(kAllLanes, begun));
        lo += steps * step;
        hi = min(hi, lo + step);
    }
    return lo;
}

/* Tokens [first,end) of a sequence and the keys [lo,hi) that some of them see. */
struct tile_t {
    int32_t seq;
    int32_t first;
    int32_t end;      /* first = end: nothing to do */
    int32_t position; /* of token t: position + t */
    int32_t lo;
    int32_t hi; /* 0 in a sequence of length 0 */
};

__device__ __forceinline__ int32_t first_key(const attention_t &p, int32_t position)
{
    return p.window > 0 && position >= p.window ? position - p.window + 1 : 0;
}

/* What a tile needs of its sequence, loaded together so that it costs one way to memory. */
struct sequence_t {
    int32_t first; /* of its tokens */
    int32_t end;
    int32_t length;
};

__device__ __forceinline__ sequence_t read_sequence(const attention_t &p, int32_t seq)
{
    return {p.query_start[seq], p.query_start[seq + 1], p.seq_lens[seq]};
}

/* All lanes of a warp call it. */
__device__ __forceinline__ tile_t find_tile(const attention_t &p, int32_t index)
{
    const int32_t *start = p.query_start;
    const int32_t queries = p.tiling.queries;
    sequence_t own;
    tile_t tile = {};
    int32_t token = index;
    if (p.tiling.kind == EPMOEI_TILES_OF_SEQUENCES) {
        tile.seq = index;
        own = read_sequence(p, index);
        token = own.first;
    } else if (p.tiling.kind == EPMOEI_TILES_OF_TOKENS) {
        /* Where sequences have one token each there is nothing to search for. */
        tile.seq = min(index, p.num_seqs - 1);
        own = read_sequence(p, tile.seq);
        if (own.first > index || own.end <= index) {
            tile.seq = last_begun(p.num_seqs, index, [&](int32_t b) { return (int64_t)start[b]; });
            own = read_sequence(p, tile.seq);
        }
    } else {
        tile.seq = last_begun(p.num_seqs, index, [&](int32_t b) { return (int64_t)start[b] / queries + b; });
        own = read_sequence(p, tile.seq);
        token = own.first + (index - own.first / queries - tile.seq) * queries;
    }
    const int32_t last = own.end, all = last - own.first, length = own.length;
    if (all < p.least_queries || all > p.most_queries) return tile;
    tile.first = min(token, last);
    tile.end = min(token + queries, last);
    tile.position = length - last;
    if (length > 0 && tile.first < tile.end) {
        tile.lo = first_key(p, tile.position + tile.first);
        tile.hi = tile.position + tile.end;
    }
    return tile;
}

/* How a tile's keys are cut: part i begins at first + i * keys, a multiple of EPMOEI_PART_KEYS. */
struct parts_t {
    int32_t first;
    int32_t keys;
    int32_t count; /* with keys in them */
};

__device__ __forceinline__ parts_t cut_keys(const attention_t &p, const tile_t &tile)
{
    parts_t parts;
    parts.first = tile.lo / EPMOEI_PART_KEYS * EPMOEI_PART_KEYS;
    const int32_t all = tile.hi - parts.first, even = (all + p.parts - 1) / p.parts;
    parts.keys = max(EPMOEI_LEAST_PART_KEYS, (even + EPMOEI_PART_KEYS - 1) / EPMOEI_PART_KEYS * EPMOEI_PART_KEYS);
    parts.count = (all + parts.keys - 1) / parts.keys;
    return parts;
}

/* Row r of a tile. */
struct row_t {
    int32_t token;
    int32_t head;
    bool live;
};

__device__ __forceinline__ row_t find_row(const attention_t &p, const tile_t &tile, int32_t head_unit, int32_t r)
{
    const int32_t query = r / p.tiling.heads;
    const int32_t in_group = head_unit % p.head_parts * p.tiling.heads + r - query * p.tiling.heads;
    row_t row;
    row.token = tile.first + query;
    row.head = head_unit / p.head_parts * p.group + in_group;
    row.live = query < p.tiling.queries && row.token < tile.end && in_group < p.group;
    return row;
}

/* The keys of the rows r and r + 8 that a thread has a share of, as accumulators of mma are held. */
struct bounds_t {
    int32_t lo[2];
    int32_t hi[2];
};

__device__ __forceinline__ bounds_t find_bounds(const attention_t &p, const tile_t &tile, int32_t r)
{
    bounds_t bounds = {};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int32_t token = tile.first + (r + 8 * i) / p.tiling.heads;
        if (tile.hi == 0 || token >= tile.end) continue;
        bounds.lo[i] = first_key(p, tile.position + token);
        bounds.hi[i] = tile.position + token + 1;
    }
    return bounds;
}

/* What the 16 rows of a warp from row `r` on see: tiles of keys that end at or below lo or begin at hi are none of
 * theirs, those between full_lo and full_hi are all rows'. */
struct reach_t {
    int32_t lo;
    int32_t hi;
    int32_t full_lo;
    int32_t full_hi;
    bool ragged; /* the tile has rows that see other keys */
};

__device__ __forceinline__ reach_t find_reach(const attention_t &p, const tile_t &tile, int32_t r)
{
    const int32_t first = tile.first + r / p.tiling.heads;
    const int32_t last = min(tile.first + (r + 15) / p.tiling.heads, tile.end - 1);
    reach_t reach = {};
    if (tile.hi == 0 || first > last) return reach;
    reach.lo = first_key(p, tile.position + first);
    reach.hi = tile.position + last + 1;
    reach.full_lo = first_key(p, tile.position + last);
    reach.full_hi = tile.position + first + 1;
    reach.ragged = tile.end - tile.first > 1;
    return reach;
}

/* Where a key of a sequence lies. */
struct key_place_t {
    int32_t block; /* -1: not there */
    int32_t slot;
};

/* Not there where not `wanted`, nor in a block outside the cache, which `counts` once. */
__device__ __forceinline__ key_place_t find_key(const attention_t &p, int32_t seq, int32_t key, bool wanted,
                                                bool counts)
{
    const uint32_t index = p.block_shift >= 0 ? (uint32_t)key >> p.block_shift : (uint32_t)key / (uint32_t)p.block_size;
    key_place_t place = {-1, key - (int32_t)index * p.block_size};
    if (!wanted) return place;
    place.block = p.block_table[(int64_t)seq * p.max_blocks + index];
    if (place.block >= 0 && place.block < p.num_blocks) return place;
    place.block = -1;
    if (counts) epmoei_count_bad(p.error_word, 1);
    return place;
}

/* ----------------------------------------------------------------------------------------------------- ends of rows */

/* What the sum of a row's weighted values is multiplied by, values' scale included. */
__device__ __forceinline__ float row_factor(const attention_t &p, int32_t head, float top, float sum)
{
    if (p.sinks) {
        const float sink = p.sinks[head] * kLog2e, most = fmaxf(top, sink);
        const float origin = most == -INFINITY ? 0.0f : most, own = ptx_exp2(top - origin);
        const float all = sum * own + ptx_exp2(sink - origin);
        return all == 0.0f ? 0.0f : own * (p.v_scale ? *p.v_scale : 1.0f) / all;
    }
    return sum == 0.0f ? 0.0f : (p.v_scale ? *p.v_scale : 1.0f) / sum;
}

/* Where nothing was weighed the sum may be 0 times what is no number. */
__device__ __forceinline__ float scaled(const attention_t &p, float value, float factor)
{
    return factor == 0.0f && !p.sinks ? 0.0f : value * factor;
}

__device__ __forceinline__ uint32_t pack_out(const attention_t &p, float low, float high)
{
    return p.dtype == EPMOE_BF16 ? epmoei_pack_pair(low, high, __nv_bfloat16()) : epmoei_pack_pair(low, high, __half());
}

__device__ __forceinline__ uint16_t *out_row(const attention_t &p, const row_t &row)
{
    return (uint16_t *)p.o + ((int64_t)row.token * p.num_heads + row.head) * p.value_dim;
}

} // namespace

/* The launchers of the kernels that a plan asks for; `args` checked, addresses aligned. */
extern "C" {
epmoe_status_t epmoei_attention_any_sm80(const epmoe_attention_args_t *args, epmoe_stream_t stream);
epmoe_status_t epmoei_attention_decode_sm80(const epmoe_attention_args_t *args, const epmoei_attention_plan_t *plan,
                                            epmoe_stream_t stream);
/* The second kernel of decode: adds up the parts of units of `unit_rows` rows. params: an attention_t. */
epmoe_status_t epmoei_attention_combine_sm80(const void *params, int32_t unit_rows, epmoe_stream_t stream);
epmoe_status_t epmoei_attention_latent_sm80(const epmoe_attention_args_t *args, const epmoei_attention_plan_t *plan,
                                            epmoe_stream_t stream);
epmoe_status_t epmoei_attention_prefill_sm80(const epmoe_attention_args_t *args, const epmoei_attention_plan_t *plan,
                                             epmoe_stream_t stream);
epmoe_status_t epmoei_attention_prefill_sm90(const epmoe_attention_args_t *args, const epmoei_attention_plan_t *plan,
                                             epmoe_stream_t stream);
}

namespace
{

inline attention_t attention_params(const epmoe_attention_args_t *args, const epmoei_attention_tiling_t &tiling)
{
    const int64_t size = epmoe_dtype_size(args->cache_dtype), heads = args->num_kv_heads, slots = args->block_size;
    const bool by_head = args->layout == EPMOE_CACHE_LAYOUT_HND;
    const int64_t key = size * args->head_dim, value = size * args->value_dim;
    attention_t p = {};
    p.q = args->q;
    p.o = args->o;
    p.keys = {(const char *)args->key_cache, args->key_block_stride * size, by_head ? key : key * heads,
              by_head ? key * slots : key};
    p.values = {(const char *)args->value_cache, args->value_block_stride * size, by_head ? value : value * heads,
                by_head ? value * slots : value};
    if (!args->value_cache) p.values = p.keys;
    p.k_scale = args->k_scale;
    p.v_scale = args->value_cache ? args->v_scale : args->k_scale;
    p.sinks = args->sinks;
    p.block_table = args->block_table;
    p.seq_lens = args->seq_lens;
    p.query_start = args->query_start;
    p.error_word = epmoei_error_word();
    p.q_stride = args->q_stride;
    p.tiling = tiling;
    p.num_tokens = args->num_tokens;
    p.num_seqs = args->num_seqs;
    p.num_heads = args->num_heads;
    p.group = args->num_heads / args->num_kv_heads;
    p.head_parts = tiling.head_units / args->num_kv_heads;
    p.head_dim = args->head_dim;
    p.value_dim = args->value_dim;
    p.num_blocks = args->num_blocks;
    p.block_size = args->block_size;
    p.block_shift = -1;
    for (int32_t shift = 0; shift < 31; shift++)
        if (args->block_size == 1 << shift) p.block_shift = shift;
    p.max_blocks = args->max_blocks;
    p.window = args->window;
    p.parts = 1;
    p.most_queries = INT32_MAX;
    p.scale_log2 = args->scale * kLog2e;
    p.dtype = args->dtype;
    p.alike = p.keys.block == p.values.block && p.keys.slot == p.values.slot && p.keys.head == p.values.head &&
              args->head_dim == args->value_dim && p.keys.block <= ((int64_t)1 << 36) / epmoei_max64(1, p.num_blocks);
    return p;
}

/* Where the parts of decode meet: sums behind the rows. */
inline void place_parts(attention_t &p, const epmoe_attention_args_t *args, const epmoei_attention_plan_t &plan,
                        int32_t rows)
{
    const int64_t all = plan.decode_tiling.tiles * plan.decode_tiling.head_units * plan.parts * rows;
    p.parts = plan.parts;
    p.part_o = (float *)args->workspace;
    p.part_sum = (float2 *)(p.part_o + all * args->value_dim);
}

/* A grid of one dimension. */
inline epmoe_status_t check_blocks(int64_t blocks)
{
    if (blocks <= INT32_MAX) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "num_tokens, num_seqs and num_heads need %lld blocks: at most %d",
                       (long long)blocks, INT32_MAX);
}

} // namespace

#endif
