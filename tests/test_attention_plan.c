/* How a device cuts attention calls: which kernels take which call, that every query has a tile, and that workspaces
 * stay within their bounds. */
#include "dense_layers/attention_plan.h"
#include "tests/testing.h"

#include <criterion/criterion.h>

static char memory[16];

/* Normalised. */
static epmoe_attention_args_t shape(int32_t tokens, int32_t seqs, int32_t heads, int32_t kv_heads, int32_t dim,
                                    int32_t context)
{
    epmoe_attention_args_t args = EPMOE_ATTENTION_ARGS_INIT, checked;
    args.num_tokens = tokens;
    args.num_seqs = seqs;
    args.num_heads = heads;
    args.num_kv_heads = kv_heads;
    args.head_dim = dim;
    args.num_blocks = 100;
    args.block_size = 16;
    args.max_blocks = (int32_t)epmoei_ceil_div(context, 16);
    args.dtype = EPMOE_BF16;
    args.layout = EPMOE_CACHE_LAYOUT_NHD;
    args.q = args.key_cache = args.value_cache = args.o = memory;
    args.block_table = args.seq_lens = args.query_start = (const int32_t *)(const void *)memory;
    cr_assert_eq(epmoei_attention_check(&args, &checked), EPMOE_OK, "%s", epmoe_last_error());
    return checked;
}

static epmoei_attention_plan_t plan_of(const epmoe_attention_args_t *args)
{
    return epmoei_attention_plan(args, 90, 132, INT64_MAX);
}

Test(attention_plan, which_kernels)
{
    epmoe_attention_args_t args = shape(64, 64, 32, 8, 128, 4096);
    epmoei_attention_plan_t plan = plan_of(&args);
    cr_assert(plan.way == EPMOEI_ATTENTION_ROWS && plan.decode && !plan.prefill);
    cr_assert(plan.decode_tiling.kind == EPMOEI_TILES_OF_TOKENS && plan.decode_tiling.tiles == 64);
    cr_assert(plan.decode_tiling.heads == 4 && plan.decode_tiling.head_units == 8);

    args = shape(8192, 1, 32, 8, 128, 8192);
    plan = plan_of(&args);
    cr_assert(!plan.decode && plan.prefill && plan.prefill_sm90);
    cr_assert(plan.prefill_tiling.heads == 4 && plan.prefill_tiling.queries == 32);
    plan = epmoei_attention_plan(&args, 80, 132, INT64_MAX);
    cr_assert(plan.prefill && !plan.prefill_sm90 && plan.prefill_tiling.queries == 16);

    /* Prompts beside single tokens. */
    args = shape(2100, 64, 32, 8, 80, 8192);
    plan = plan_of(&args);
    cr_assert(plan.decode && plan.prefill && !plan.prefill_sm90 && plan.few_queries == 4);
    cr_assert(plan.decode_tiling.kind == EPMOEI_TILES_OF_SEQUENCES && plan.decode_tiling.tiles == 64);

    /* Drafted tokens: several per sequence, in one tile. */
    args = shape(192, 64, 32, 8, 128, 4096);
    plan = plan_of(&args);
    cr_assert(plan.decode && !plan.prefill && plan.decode_tiling.kind == EPMOEI_TILES_OF_QUERIES);

    args = shape(4, 4, 128, 1, 576, 4096);
    args.value_cache = NULL;
    args.value_dim = 512;
    plan = plan_of(&args);
    cr_assert(plan.way == EPMOEI_ATTENTION_LATENT && plan.decode_tiling.head_units == 2);
    args.head_dim = args.value_dim = 320;
    args.value_cache = memory;
    cr_assert_eq(plan_of(&args).way, EPMOEI_ATTENTION_ANY);
}

Test(attention_plan, what_only_the_kernel_for_any_takes)
{
    epmoe_attention_args_t args = shape(5, 5, 8, 8, 64, 100);
    cr_assert_eq(plan_of(&args).way, EPMOEI_ATTENTION_ROWS);
#define ANY(change)                                                                                                    \
    do {                                                                                                               \
        epmoe_attention_args_t other = args;                                                                           \
        change;                                                                                                        \
        cr_assert_eq(plan_of(&other).way, EPMOEI_ATTENTION_ANY, #change);                                              \
    } while (0)
    ANY(other.dtype = other.cache_dtype = EPMOE_F32);
    ANY(other.layout = EPMOE_CACHE_LAYOUT_V1);
    ANY(other.head_dim = 60);
    ANY(other.value_dim = 4);
    ANY(other.q_stride += 4);
    ANY(other.key_block_stride += 1);
    ANY(other.cache_dtype = EPMOE_F8_E4M3; other.head_dim = other.value_dim = 72);
}

/* As the kernel finds them: sequence b has the tiles from query_start[b] / queries + b on. */
Test(attention_plan, every_query_has_a_tile)
{
    testing_rng_t rng = testing_rng(testing_seed());
    for (int round = 0; round < 300; round++) {
        int32_t start[20] = {0}, seqs = testing_range(&rng, 1, 19);
        for (int32_t b = 0; b < seqs; b++) start[b + 1] = start[b] + testing_range(&rng, 0, round % 2 ? 3 : 40);
        if (start[seqs] == 0) continue;
        epmoe_attention_args_t args = shape(start[seqs], seqs, testing_range(&rng, 1, 20), 1, 64, 1000);
        epmoei_attention_plan_t plan = plan_of(&args);
        const epmoei_attention_tiling_t *tilings[] = {&plan.decode_tiling, &plan.prefill_tiling};
        for (int i = 0; i < 2; i++) {
            const epmoei_attention_tiling_t *tiling = tilings[i];
            if (!(i ? plan.prefill : plan.decode) || tiling->kind != EPMOEI_TILES_OF_QUERIES) continue;
            for (int32_t b = 0; b < seqs; b++) {
                int64_t first = start[b] / tiling->queries + b, next = start[b + 1] / tiling->queries + b + 1;
                int64_t needed = epmoei_ceil_div(start[b + 1] - start[b], tiling->queries);
                cr_assert(next - first >= needed && next <= tiling->tiles, "round %d sequence %d", round, b);
            }
        }
    }
}

Test(attention_plan, workspaces)
{
    testing_rng_t rng = testing_rng(testing_seed());
    int32_t cut = 0;
    for (int round = 0; round < 2000; round++) {
        int32_t kv_heads = testing_range(&rng, 1, 16), seqs = 1 << testing_range(&rng, 0, 9);
        int32_t tokens = seqs * (round % 3 ? 1 : testing_range(&rng, 1, 6));
        epmoe_attention_args_t args = shape(tokens, seqs, kv_heads * testing_range(&rng, 1, 20), kv_heads,
                                            8 * testing_range(&rng, 1, 32), 1 << testing_range(&rng, 4, 17));
        int32_t sms = testing_range(&rng, 1, 200);
        epmoei_attention_plan_t plan = epmoei_attention_plan(&args, 90, sms, INT64_MAX);
        cr_assert_geq(plan.parts, 1);
        cr_assert_eq(plan.workspace_bytes > 0, plan.parts > 1);
        cr_assert_leq(plan.workspace_bytes, epmoei_attention_most_workspace(args.value_dim, sms));
        if (plan.parts == 1) continue;
        cut++;
        epmoei_attention_plan_t again = epmoei_attention_plan(&args, 90, sms, plan.workspace_bytes);
        cr_assert_eq(again.parts, plan.parts);
        again = epmoei_attention_plan(&args, 90, sms, plan.workspace_bytes - 1);
        cr_assert_lt(again.parts, plan.parts);
        cr_assert_leq(again.workspace_bytes, plan.workspace_bytes - 1);
        cr_assert_eq(epmoei_attention_plan(&args, 90, sms, 0).parts, 1);
    }
    cr_assert_gt(cut, 200);
}
