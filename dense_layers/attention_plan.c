#include "dense_layers/attention_plan.h"

/* Blocks of the decode kernel that an SM holds at once: what its shared memory and registers allow. */
static int32_t blocks_per_sm(epmoei_attention_way_t way, int32_t columns, int32_t cached_bytes)
{
    if (way == EPMOEI_ATTENTION_LATENT || columns * cached_bytes > 256) return 1;
    return columns > 64 ? 2 : 3;
}

static epmoei_attention_tiling_t make_tiling(const epmoe_attention_args_t *args, int32_t rows)
{
    int32_t group = args->num_heads / args->num_kv_heads;
    epmoei_attention_tiling_t tiling = {.kind = EPMOEI_TILES_OF_QUERIES, .heads = group < rows ? group : rows};
    tiling.queries = rows / tiling.heads;
    tiling.head_units = args->num_kv_heads * (int32_t)epmoei_ceil_div(group, tiling.heads);
    tiling.tiles = args->num_tokens / tiling.queries + (int64_t)args->num_seqs;
    return tiling;
}

static bool rows_fit(const epmoe_attention_args_t *args)
{
    int32_t size = epmoe_dtype_size(args->cache_dtype), step = 16 / size;
    if (args->dtype == EPMOE_F32 || args->layout == EPMOE_CACHE_LAYOUT_V1) return false;
    if (args->head_dim % 8 || args->value_dim % 8 || args->head_dim % step || args->value_dim % step) return false;
    return args->q_stride % 8 == 0 && args->key_block_stride % step == 0 && args->value_block_stride % step == 0;
}

static epmoei_attention_way_t choose_way(const epmoe_attention_args_t *args)
{
    int32_t widest = args->head_dim > args->value_dim ? args->head_dim : args->value_dim;
    if (!rows_fit(args)) return EPMOEI_ATTENTION_ANY;
    if (widest <= 256) return EPMOEI_ATTENTION_ROWS;
    bool latent = !args->value_cache && args->head_dim <= 576 && args->value_dim <= 512;
    return latent ? EPMOEI_ATTENTION_LATENT : EPMOEI_ATTENTION_ANY;
}

/* Waves of blocks times the length of one, in keys: a block begins and ends with the work of about 180, in which the
 * memory idles since all blocks do so at once, and the second kernel takes that of 130. A quarter of a wave more, since
 * sequences differ in length. */
static int32_t choose_parts(int64_t units, int64_t slots, int64_t keys, int64_t most)
{
    double best = 0;
    int32_t parts = 1;
    for (int64_t p = 1; p <= most; p++) {
        double part = (double)epmoei_round_up(epmoei_ceil_div(keys, p), EPMOEI_PART_KEYS);
        double cost = ((double)epmoei_ceil_div(units * p, slots) + 0.25) * (part + 180) + (p > 1 ? 130 : 0);
        if (p > 1 && cost >= best) continue;
        best = cost;
        parts = (int32_t)p;
    }
    return parts;
}

static const int32_t most_parts = 64, most_waves = 6;

static int64_t part_bytes(int32_t rows, int32_t value_dim)
{
    return (int64_t)rows * (value_dim + 2) * (int64_t)sizeof(float);
}

int64_t epmoei_attention_most_workspace(int32_t value_dim, int32_t num_sms)
{
    /* Of the kernels over rows with most blocks on an SM, and of that over latents. */
    int64_t rows = part_bytes(EPMOEI_DECODE_ROWS, value_dim) * 3, latent = part_bytes(EPMOEI_PREFILL_ROWS, value_dim);
    return most_waves * num_sms * epmoei_max64(rows, latent);
}

static void plan_decode(epmoei_attention_plan_t *plan, const epmoe_attention_args_t *args, int32_t num_sms,
                        int64_t workspace_bytes)
{
    epmoei_attention_tiling_t *tiling = &plan->decode_tiling;
    int32_t tile_rows = plan->way == EPMOEI_ATTENTION_LATENT ? EPMOEI_PREFILL_ROWS : EPMOEI_DECODE_ROWS;
    if (plan->prefill) {
        tiling->kind = EPMOEI_TILES_OF_SEQUENCES;
        tiling->tiles = args->num_seqs;
    } else if (args->num_tokens <= args->num_seqs) {
        /* Mostly one each: no tile is left over. */
        tiling->kind = EPMOEI_TILES_OF_TOKENS;
        tiling->tiles = args->num_tokens;
        tiling->queries = 1;
    }
    int64_t units = tiling->tiles * tiling->head_units;
    int64_t slots = (int64_t)num_sms * blocks_per_sm(plan->way, plan->columns, epmoe_dtype_size(args->cache_dtype));
    int64_t keys = (int64_t)args->max_blocks * args->block_size;
    if (args->window) keys = epmoei_min64(keys, (int64_t)args->window + tiling->queries);
    /* Rounded down, so that the workspace has a bound. */
    int64_t most = epmoei_min64(epmoei_ceil_div(keys, EPMOEI_LEAST_PART_KEYS), most_waves * slots / units);
    int64_t bytes = units * part_bytes(tile_rows, args->value_dim);
    most = epmoei_min64(epmoei_min64(most, most_parts), workspace_bytes / bytes);
    plan->parts = choose_parts(units, slots, keys, epmoei_max64(most, 1));
    if (plan->parts > 1) plan->workspace_bytes = plan->parts * bytes;
}

epmoei_attention_plan_t epmoei_attention_plan(const epmoe_attention_args_t *args, int32_t tier, int32_t num_sms,
                                              int64_t workspace_bytes)
{
    epmoei_attention_plan_t plan = {.way = choose_way(args), .parts = 1};
    int32_t widest = args->head_dim > args->value_dim ? args->head_dim : args->value_dim;
    if (plan.way == EPMOEI_ATTENTION_ANY || args->num_tokens == 0 || args->num_seqs == 0) return plan;
    bool latent = plan.way == EPMOEI_ATTENTION_LATENT;
    plan.columns = latent ? 576 : widest <= 64 ? 64 : widest <= 128 ? 128 : 256;
    plan.decode_tiling = make_tiling(args, latent ? EPMOEI_PREFILL_ROWS : EPMOEI_DECODE_ROWS);
    plan.few_queries = plan.decode_tiling.queries;
    /* On average a sequence's queries fit into a tile; otherwise some sequences' may. */
    bool few = args->num_tokens <= (int64_t)args->num_seqs * plan.few_queries;
    plan.prefill = !latent && !few;
    plan.decode = !plan.prefill || args->num_seqs > 1;
    if (plan.decode) plan_decode(&plan, args, num_sms, workspace_bytes);
    if (!plan.prefill) return plan;
    plan.prefill_sm90 = tier == 90 && args->cache_dtype == args->dtype && args->scale > 0 &&
                        args->head_dim == args->value_dim && (args->head_dim == 64 || args->head_dim == 128);
    plan.prefill_tiling = make_tiling(args, plan.prefill_sm90 ? EPMOEI_PREFILL_SM90_ROWS : EPMOEI_PREFILL_ROWS);
    return plan;
}
