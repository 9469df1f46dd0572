#include "base/fp8.h"
#include "dense_layers/attention.h"

#include <math.h>

static float load(const epmoe_attention_args_t *args, const void *cache, int64_t i)
{
    return args->cache_dtype == EPMOE_F8_E4M3 ? epmoei_e4m3_to_f32(((const uint8_t *)cache)[i])
                                              : epmoei_load(cache, args->cache_dtype, i);
}

/* Where slot `slot` of a block holds column d of cache head `head`, counted from the block's start. */
static int64_t key_place(const epmoe_attention_args_t *args, int64_t slot, int64_t head, int64_t d)
{
    int64_t heads = args->num_kv_heads, size = args->block_size, width = args->head_dim, pack = args->key_pack;
    switch (args->layout) {
    case EPMOE_CACHE_LAYOUT_NHD: return (slot * heads + head) * width + d;
    case EPMOE_CACHE_LAYOUT_HND: return (head * size + slot) * width + d;
    default: return ((head * (width / pack) + d / pack) * size + slot) * pack + d % pack;
    }
}

static int64_t value_place(const epmoe_attention_args_t *args, int64_t slot, int64_t head, int64_t d)
{
    int64_t heads = args->num_kv_heads, size = args->block_size, width = args->value_dim;
    switch (args->layout) {
    case EPMOE_CACHE_LAYOUT_NHD: return (slot * heads + head) * width + d;
    case EPMOE_CACHE_LAYOUT_HND: return (head * size + slot) * width + d;
    default: return (head * width + d) * size + slot;
    }
}

static float key_at(const epmoe_attention_args_t *args, int64_t block, int64_t slot, int64_t head, int64_t d)
{
    float scale = args->k_scale ? *args->k_scale : 1.0f;
    return load(args, args->key_cache, block * args->key_block_stride + key_place(args, slot, head, d)) * scale;
}

static float value_at(const epmoe_attention_args_t *args, int64_t block, int64_t slot, int64_t head, int64_t d)
{
    if (!args->value_cache) return key_at(args, block, slot, head, d);
    float scale = args->v_scale ? *args->v_scale : 1.0f;
    return load(args, args->value_cache, block * args->value_block_stride + value_place(args, slot, head, d)) * scale;
}

static double score(const epmoe_attention_args_t *args, int64_t token, int64_t head, int64_t kv_head, int64_t block,
                    int64_t slot)
{
    double dot = 0;
    for (int64_t d = 0; d < args->head_dim; d++)
        dot += (double)epmoei_load(args->q, args->dtype, token * args->q_stride + head * args->head_dim + d) *
               (double)key_at(args, block, slot, kv_head, d);
    return dot * (double)args->scale;
}

/* Sums in double, so that tiers which sum in fp32 in another order are compared with something better than they are. */
static void attend(const epmoe_attention_args_t *args, int32_t seq, int32_t token, int32_t head)
{
    double out[EPMOE_MAX_HEAD_DIM] = {0}, sum = 0;
    int64_t kv_head = head / (args->num_heads / args->num_kv_heads);
    const int32_t *blocks = NULL;
    epmoei_key_range_t range = {0, 0};
    if (args->seq_lens[seq] > 0) {
        blocks = args->block_table + (int64_t)seq * args->max_blocks;
        range = epmoei_visible_keys(args, epmoei_query_position(args, seq, token));
    }

    double top = args->sinks ? (double)args->sinks[head] : -INFINITY;
    for (int32_t j = range.first; j < range.end; j++) {
        double s = score(args, token, head, kv_head, blocks[j / args->block_size], j % args->block_size);
        if (s > top) top = s;
    }
    if (range.end > 0 && args->sinks && args->sinks[head] != -INFINITY) sum = exp((double)args->sinks[head] - top);
    for (int32_t j = range.first; j < range.end; j++) {
        int64_t block = blocks[j / args->block_size], slot = j % args->block_size;
        double s = score(args, token, head, kv_head, block, slot);
        double weight = s == -INFINITY ? 0 : exp(s - top);
        sum += weight;
        for (int64_t d = 0; d < args->value_dim; d++)
            out[d] += weight * (double)value_at(args, block, slot, kv_head, d);
    }
    for (int64_t d = 0; d < args->value_dim; d++)
        epmoei_store(args->o, args->dtype, ((int64_t)token * args->num_heads + head) * args->value_dim + d,
                     sum == 0 ? 0.0f : (float)(out[d] / sum));
}

epmoe_status_t epmoei_attention_ref(const epmoe_attention_args_t *args, epmoe_stream_t stream)
{
    (void)stream;
    EPMOEI_CHECK(epmoei_attention_check_data(args));
    for (int32_t seq = 0; seq < args->num_seqs; seq++)
        for (int32_t token = args->query_start[seq]; token < args->query_start[seq + 1]; token++)
            for (int32_t head = 0; head < args->num_heads; head++) attend(args, seq, token, head);
    return EPMOE_OK;
}
