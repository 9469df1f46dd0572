#include "dense_layers/attention.h"
#include "dense_layers/attention_tile.h"
#include "kernels/row_blocks.h"

#include <math.h>
#include <omp.h>

/* Multiply-adds below which starting threads costs more than it saves. */
#define MIN_PARALLEL_WORK 100000

/* How the call is cut: a unit is `queries` rows of q times `heads` query heads that share a cache head. Bits do not
 * depend on it. */
typedef struct plan_t {
    int32_t group; /* query heads per cache head */
    int32_t heads; /* of them in a unit */
    int32_t queries;
    int64_t head_parts; /* units per cache head and query block */
    int64_t units;
} plan_t;

static plan_t make_plan(const epmoe_attention_args_t *args, int32_t num_queries)
{
    plan_t plan = {.group = args->num_heads / args->num_kv_heads};
    int64_t wanted = 2 * (int64_t)omp_get_max_threads();
    plan.heads = (int32_t)epmoei_min64(plan.group, EPMOEI_TILE_ROWS);
    plan.queries = EPMOEI_TILE_ROWS / plan.heads;
    for (;;) {
        plan.head_parts = epmoei_ceil_div(plan.group, plan.heads);
        plan.units = epmoei_ceil_div(num_queries, plan.queries) * args->num_kv_heads * plan.head_parts;
        if (plan.units >= wanted || plan.queries * plan.heads == 1) return plan;
        if (plan.queries > 1)
            plan.queries = (plan.queries + 1) / 2;
        else
            plan.heads = (plan.heads + 1) / 2;
    }
}

typedef struct context_t {
    const epmoe_attention_args_t *args;
    const epmoei_attention_isa_t *isa;
    plan_t plan;
    float q_scale; /* the score's scale and the keys' */
    float o_scale; /* the values' */
} context_t;

/* ------------------------------------------------------------------------------------------------ cache to tile */

/* `count` slots from `slot` on of one block of a cache whose rows are neighbours (NHD, HND). */
static void load_rows(const context_t *context, float *dst, int32_t dst_stride, const void *cache, int64_t block_start,
                      int32_t width, int64_t head, int32_t slot, int32_t count)
{
    const epmoe_attention_args_t *args = context->args;
    bool hnd = args->layout == EPMOE_CACHE_LAYOUT_HND;
    int64_t stride = hnd ? width : (int64_t)args->num_kv_heads * width;
    int64_t start = block_start + head * (hnd ? (int64_t)args->block_size * width : width);
    for (int32_t i = 0; i < count; i++)
        context->isa->widen(dst + (int64_t)i * dst_stride,
                            epmoei_at(cache, args->cache_dtype, start + (slot + i) * stride), args->cache_dtype, width);
}

/* Keys of V1: x columns of a slot are neighbours. */
static void load_packed_keys(const context_t *context, float *dst, int32_t dst_stride, int64_t block_start,
                             int64_t head, int32_t slot, int32_t count)
{
    const epmoe_attention_args_t *args = context->args;
    int64_t start = block_start + head * args->head_dim * args->block_size;
    int32_t pack = args->key_pack;
    for (int32_t d = 0; d < args->head_dim; d += pack)
        for (int32_t i = 0; i < count; i++)
            context->isa->widen(dst + (int64_t)i * dst_stride + d,
                                epmoei_at(args->key_cache, args->cache_dtype,
                                          start + (int64_t)d * args->block_size + (int64_t)(slot + i) * pack),
                                args->cache_dtype, pack);
}

/* Values of V1: the slots of a column are neighbours. */
static void load_value_columns(const context_t *context, float *dst, int32_t dst_stride, int64_t block_start,
                               int64_t head, int32_t slot, int32_t count)
{
    const epmoe_attention_args_t *args = context->args;
    int64_t start = block_start + head * args->value_dim * args->block_size + slot;
    float column[EPMOEI_TILE_KEYS];
    for (int32_t d = 0; d < args->value_dim; d++) {
        context->isa->widen(column,
                            epmoei_at(args->value_cache, args->cache_dtype, start + (int64_t)d * args->block_size),
                            args->cache_dtype, count);
        for (int32_t i = 0; i < count; i++) dst[(int64_t)i * dst_stride + d] = column[i];
    }
}

/* Keys first..end-1 of a sequence, into the places of the tile that begins at `base`. */
static void load_tile(const context_t *context, epmoei_attention_tile_t *tile, int32_t seq, int64_t head, int32_t base,
                      int32_t first, int32_t end)
{
    const epmoe_attention_args_t *args = context->args;
    const int32_t *blocks = args->block_table + (int64_t)seq * args->max_blocks;
    bool v1 = args->layout == EPMOE_CACHE_LAYOUT_V1;
    for (int32_t j = first; j < end;) {
        int64_t block = blocks[j / args->block_size];
        int32_t slot = j % args->block_size;
        int32_t count = (int32_t)epmoei_min64(args->block_size - slot, end - j);
        float *keys = tile->keys + (int64_t)(j - base) * tile->width;
        if (v1)
            load_packed_keys(context, keys, tile->width, block * args->key_block_stride, head, slot, count);
        else
            load_rows(context, keys, tile->width, args->key_cache, block * args->key_block_stride, args->head_dim, head,
                      slot, count);
        if (args->value_cache) {
            float *values = tile->own_values + (int64_t)(j - base) * tile->value_stride;
            int64_t start = block * args->value_block_stride;
            if (v1)
                load_value_columns(context, values, tile->value_stride, start, head, slot, count);
            else
                load_rows(context, values, tile->value_stride, args->value_cache, start, args->value_dim, head, slot,
                          count);
        }
        j += count;
    }
}

/* ---------------------------------------------------------------------------------------------------------- rows */

/* Rows are (token, head) of the tokens first..end-1 of one sequence and `heads` heads from `head` on. */
typedef struct piece_t {
    int32_t seq;
    int32_t first;
    int32_t end;
    int32_t head;
    int32_t heads;
} piece_t;

static void begin_rows(const context_t *context, epmoei_attention_tile_t *tile, const piece_t *piece)
{
    const epmoe_attention_args_t *args = context->args;
    tile->num_rows = 0;
    for (int32_t token = piece->first; token < piece->end; token++) {
        epmoei_key_range_t range = epmoei_visible_keys(args, epmoei_query_position(args, piece->seq, token));
        for (int32_t h = 0; h < piece->heads; h++) {
            int32_t r = tile->num_rows++, head = piece->head + h;
            float *q = tile->q + (int64_t)r * tile->width;
            context->isa->widen(
                q, epmoei_at(args->q, args->dtype, token * args->q_stride + (int64_t)head * args->head_dim),
                args->dtype, args->head_dim);
            for (int32_t d = 0; d < args->head_dim; d++) q[d] *= context->q_scale;
            tile->first[r] = range.first;
            tile->end[r] = range.end;
            /* A sink is a first key with its own score and no value. */
            tile->top[r] = args->sinks ? args->sinks[head] : -INFINITY;
            tile->sum[r] = tile->top[r] == -INFINITY ? 0.0f : 1.0f;
        }
    }
    memset(tile->acc, 0, (size_t)tile->num_rows * (size_t)tile->value_width * sizeof *tile->acc);
}

static void *output_row(const epmoe_attention_args_t *args, int32_t token, int32_t head)
{
    return epmoei_at(args->o, args->dtype, ((int64_t)token * args->num_heads + head) * args->value_dim);
}

static void end_rows(const context_t *context, epmoei_attention_tile_t *tile, const piece_t *piece)
{
    const epmoe_attention_args_t *args = context->args;
    for (int32_t r = 0; r < tile->num_rows; r++) {
        float *acc = tile->acc + (int64_t)r * tile->value_width, sum = tile->sum[r];
        for (int32_t d = 0; d < args->value_dim; d++) acc[d] = sum == 0.0f ? 0.0f : acc[d] / sum * context->o_scale;
        epmoei_from_f32(output_row(args, piece->first + r / piece->heads, piece->head + r % piece->heads), acc,
                        args->dtype, args->value_dim);
    }
}

static void clear_rows(const epmoe_attention_args_t *args, const piece_t *piece)
{
    size_t bytes = (size_t)piece->heads * (size_t)args->value_dim * (size_t)epmoe_dtype_size(args->dtype);
    for (int32_t token = piece->first; token < piece->end; token++)
        memset(output_row(args, token, piece->head), 0, bytes);
}

static void run_piece(const context_t *context, epmoei_attention_tile_t *tile, const piece_t *piece)
{
    const epmoe_attention_args_t *args = context->args;
    if (args->seq_lens[piece->seq] == 0) {
        clear_rows(args, piece);
        return;
    }
    begin_rows(context, tile, piece);
    /* The oldest row sees the first key, the newest the last one. */
    int32_t first = tile->first[0], end = tile->end[tile->num_rows - 1];
    int32_t kv_head = piece->head / context->plan.group;
    for (int64_t base = first - first % EPMOEI_TILE_KEYS; base < end; base += EPMOEI_TILE_KEYS) {
        int32_t last = (int32_t)epmoei_min64(base + EPMOEI_TILE_KEYS, end);
        load_tile(context, tile, piece->seq, kv_head, (int32_t)base, (int32_t)epmoei_max64(base, first), last);
        context->isa->step(tile, (int32_t)base, last - (int32_t)base);
    }
    end_rows(context, tile, piece);
}

/* The sequence that holds row `token` of q; query_start is ascending. */
static int32_t find_sequence(const epmoe_attention_args_t *args, int32_t token)
{
    int32_t lo = 0, hi = args->num_seqs;
    while (hi - lo > 1) {
        int32_t mid = lo + (hi - lo) / 2;
        if (args->query_start[mid] <= token)
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}

static void run_unit(const context_t *context, epmoei_attention_tile_t *tile, int64_t unit, int32_t num_queries)
{
    const epmoe_attention_args_t *args = context->args;
    const plan_t *plan = &context->plan;
    int64_t per_block = args->num_kv_heads * plan->head_parts;
    int32_t first = (int32_t)(unit / per_block * plan->queries);
    int32_t end = (int32_t)epmoei_min64((int64_t)first + plan->queries, num_queries);
    int32_t kv_head = (int32_t)(unit % per_block / plan->head_parts);
    int32_t part = (int32_t)(unit % plan->head_parts) * plan->heads;
    piece_t piece = {.head = kv_head * plan->group + part,
                     .heads = (int32_t)epmoei_min64(plan->heads, plan->group - part)};
    for (piece.first = first; piece.first < end; piece.first = piece.end) {
        piece.seq = find_sequence(args, piece.first);
        piece.end = (int32_t)epmoei_min64(end, args->query_start[piece.seq + 1]);
        run_piece(context, tile, &piece);
    }
}

epmoe_status_t epmoei_attention_cpu_isa(const epmoe_attention_args_t *args, const epmoei_attention_isa_t *isa)
{
    EPMOEI_CHECK(epmoei_attention_check_data(args));
    int32_t num_queries = args->query_start[args->num_seqs];
    if (num_queries == 0) return EPMOE_OK;
    context_t context = {.args = args, .isa = isa, .plan = make_plan(args, num_queries)};
    float k_scale = args->k_scale ? *args->k_scale : 1.0f, v_scale = args->v_scale ? *args->v_scale : 1.0f;
    context.q_scale = args->scale * k_scale;
    context.o_scale = args->value_cache ? v_scale : k_scale;
    bool parallel = epmoei_attention_floor(args).flops >= 2.0 * MIN_PARALLEL_WORK;
#pragma omp parallel if (parallel)
    {
        epmoei_attention_tile_t tile;
        tile.width = (int32_t)epmoei_round_up(args->head_dim, EPMOEI_TILE_LANES);
        tile.value_width = (int32_t)epmoei_round_up(args->value_dim, EPMOEI_TILE_LANES);
        tile.value_stride = args->value_cache ? tile.value_width : tile.width;
        tile.values = args->value_cache ? tile.own_values : tile.keys;
        /* What pads stays 0 from here on. */
        memset(tile.q, 0, EPMOEI_TILE_ROWS * (size_t)tile.width * sizeof *tile.q);
        memset(tile.keys, 0, EPMOEI_TILE_KEYS * (size_t)tile.width * sizeof *tile.keys);
        memset(tile.own_values, 0, EPMOEI_TILE_KEYS * (size_t)tile.value_width * sizeof *tile.own_values);
#pragma omp for schedule(dynamic, 1)
        for (int64_t unit = 0; unit < context.plan.units; unit++) run_unit(&context, &tile, unit, num_queries);
    }
    return EPMOE_OK;
}

const epmoei_attention_isa_t *epmoei_attention_isa(epmoei_cpu_tier_t tier)
{
    switch (tier) {
#if defined(__x86_64__)
    case EPMOEI_CPU_AVX512: return &epmoei_attention_avx512;
    case EPMOEI_CPU_AVX2: return &epmoei_attention_avx2;
#endif
    default: return &epmoei_attention_generic;
    }
}

epmoe_status_t epmoei_attention_cpu(const epmoe_attention_args_t *args, epmoe_stream_t stream)
{
    (void)stream;
    return epmoei_attention_cpu_isa(args, epmoei_attention_isa(epmoei_cpu_tier()));
}
