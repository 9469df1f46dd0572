/* The align op: hand-worked layouts, a naive oracle that scans the slots once per expert, errors. */
#include "kernels/align.h"
#include "tests/op_testing.h"

#include <stdlib.h>

typedef struct call_t {
    epmoe_align_args_t args;
    int64_t max_padded;
} call_t;

static call_t call_make(int32_t num_tokens, int32_t top_k, int32_t num_experts, int32_t block_size, const int32_t *ids)
{
    call_t call = {.args = EPMOE_ALIGN_ARGS_INIT};
    call.args.num_tokens = num_tokens;
    call.args.top_k = top_k;
    call.args.num_experts = num_experts;
    call.args.block_size = block_size;
    call.args.ids = ids;
    call.max_padded = epmoe_align_max_padded(num_tokens, top_k, num_experts, block_size);
    cr_assert(call.max_padded >= 0);
    call.args.sorted_ids = testing_buffer(4 * call.max_padded, 4);
    call.args.expert_ids = testing_buffer(4 * (call.max_padded / (block_size ? block_size : 1)), 4);
    call.args.num_post_padded = testing_buffer(4, 4);
    call.args.expert_offsets = testing_buffer(4 * ((int64_t)num_experts + 1), 4);
    return call;
}

static void call_free(call_t *call)
{
    void *buffers[] = {call->args.sorted_ids, call->args.expert_ids, call->args.num_post_padded,
                       call->args.expert_offsets};
    for (int i = 0; i < 4; i++) {
        cr_assert(testing_guards_intact(buffers[i]), "output %d", i);
        testing_buffer_free(buffers[i]);
    }
}

static bool untouched(const call_t *call)
{
    const epmoe_align_args_t *args = &call->args;
    return testing_is_poison(args->sorted_ids, 0, 4 * call->max_padded) &&
           testing_is_poison(args->expert_ids, 0, 4 * (call->max_padded / (args->block_size ? args->block_size : 1))) &&
           testing_is_poison(args->num_post_padded, 0, 4) &&
           testing_is_poison(args->expert_offsets, 0, 4 * ((int64_t)args->num_experts + 1));
}

static void call_run(call_t *call)
{
    int64_t bytes = -1;
    cr_assert_eq(epmoe_align_workspace_size(&call->args, &bytes), EPMOE_OK, "%s", epmoe_last_error());
    call->args.workspace = testing_buffer(bytes, 0);
    call->args.workspace_bytes = bytes;
    cr_assert_eq(epmoe_align_block_size(&call->args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert(testing_guards_intact(call->args.workspace));
    testing_buffer_free(call->args.workspace);
    call->args.workspace = NULL;
    call->args.workspace_bytes = 0;
}

static void expect_list(const char *name, const int32_t *got, const int32_t *expected, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        cr_assert_eq(got[i], expected[i], "%s[%lld] is %d, expected %d", name, (long long)i, got[i], expected[i]);
}

static void expect_fill(const char *name, const int32_t *got, int64_t first, int64_t end, int32_t value)
{
    for (int64_t i = first; i < end; i++)
        cr_assert_eq(got[i], value, "%s[%lld] is %d, expected %d", name, (long long)i, got[i], value);
}

/* Everything the contract says, from a scan of all slots for each expert. `actual` = tokens that count. */
static void check(const call_t *call, int32_t actual)
{
    const epmoe_align_args_t *args = &call->args;
    int32_t block = args->block_size ? args->block_size : 1, pad = args->num_tokens * args->top_k;
    int64_t at = 0;
    for (int32_t e = 0; e < args->num_experts; e++) {
        cr_assert_eq(args->expert_offsets[e], at, "offset of expert %d", e);
        if (args->expert_map && args->expert_map[e] == -1) continue;
        int64_t first = at;
        for (int32_t s = 0; s < actual * args->top_k; s++)
            if (args->ids[s] == e) {
                cr_assert_eq(args->sorted_ids[at], s, "expert %d, row %lld: %d, expected slot %d", e, (long long)at,
                             args->sorted_ids[at], s);
                at++;
            }
        for (; at % block; at++) cr_assert_eq(args->sorted_ids[at], pad);
        expect_fill("expert_ids", args->expert_ids, first / block, at / block,
                    args->expert_map ? args->expert_map[e] : e);
    }
    cr_assert_eq(args->expert_offsets[args->num_experts], at);
    cr_assert_eq(*args->num_post_padded, at);
    expect_fill("sorted_ids", args->sorted_ids, at, call->max_padded, pad);
    expect_fill("expert_ids", args->expert_ids, at / block, call->max_padded / block, -1);
}

Test(align, expert_map_leaves_out_what_is_not_local)
{
    const int32_t ids[] = {0, 4, 1, 2, 7, -1}, map[] = {-1, -1, -1, -1, 0, 1, 2, 3};
    call_t call = call_make(3, 2, 8, 2, ids);
    call.args.expert_map = map;
    cr_assert_eq(call.max_padded, 14);
    call_run(&call);
    cr_assert_eq(*call.args.num_post_padded, 4);
    expect_list("sorted_ids", call.args.sorted_ids, (const int32_t[]){1, 6, 4, 6}, 4);
    expect_list("expert_ids", call.args.expert_ids, (const int32_t[]){0, 3}, 2);
    expect_list("expert_offsets", call.args.expert_offsets, (const int32_t[]){0, 0, 0, 0, 0, 2, 2, 2, 4}, 9);
    check(&call, 3);
    call_free(&call);
}

Test(align, order_is_that_of_the_global_ids)
{
    const int32_t ids[] = {3, 0, 1, 3}, map[] = {2, 0, -1, 1};
    call_t call = call_make(2, 2, 4, 1, ids);
    call.args.expert_map = map;
    call_run(&call);
    cr_assert_eq(*call.args.num_post_padded, 4);
    expect_list("sorted_ids", call.args.sorted_ids, (const int32_t[]){1, 2, 0, 3}, 4);
    expect_list("expert_ids", call.args.expert_ids, (const int32_t[]){2, 0, 1, 1}, 4);
    call_free(&call);
}

Test(align, uneven_counts_by_hand)
{
    /* Counts 2 3 0 6 8 in blocks of 4. */
    int32_t ids[19];
    const int32_t counts[] = {2, 3, 0, 6, 8};
    for (int32_t e = 0, s = 0; e < 5; e++)
        for (int32_t i = 0; i < counts[e]; i++) ids[s++] = e;
    call_t call = call_make(19, 1, 5, 4, ids);
    cr_assert_eq(call.max_padded, 36);
    call_run(&call);
    cr_assert_eq(*call.args.num_post_padded, 24);
    const int32_t sorted[] = {0, 1, 19, 19, 2, 3, 4, 19, 5, 6, 7, 8, 9, 10, 19, 19, 11, 12, 13, 14, 15, 16, 17, 18};
    expect_list("sorted_ids", call.args.sorted_ids, sorted, 24);
    expect_fill("sorted_ids", call.args.sorted_ids, 24, 36, 19);
    expect_list("expert_ids", call.args.expert_ids, (const int32_t[]){0, 1, 3, 3, 4, 4, -1, -1, -1}, 9);
    expect_list("expert_offsets", call.args.expert_offsets, (const int32_t[]){0, 4, 8, 8, 16, 24}, 6);
    call_free(&call);
}

Test(align, one_token_per_expert)
{
    const int32_t counts[] = {5, 60, 72, 96, 160, 192, 320, 384, 576, 1000, 1024, 1025, 2048, 4096};
    int32_t ids[4096];
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
        int32_t num_experts = counts[c];
        for (int32_t e = 0; e < num_experts; e++) ids[e] = num_experts - 1 - e;
        call_t call = call_make(num_experts, 1, num_experts, 16, ids);
        call_run(&call);
        cr_assert_eq(*call.args.num_post_padded, 16 * num_experts);
        for (int32_t e = 0; e < num_experts; e++) {
            cr_assert_eq(call.args.expert_ids[e], e);
            cr_assert_eq(call.args.sorted_ids[16 * e], num_experts - 1 - e);
            expect_fill("sorted_ids", call.args.sorted_ids, 16 * e + 1, 16 * e + 16, num_experts);
        }
        call_free(&call);
    }
}

Test(align, an_expert_twice_in_a_token_counts_twice)
{
    int32_t ids[36];
    for (int32_t t = 0; t < 9; t++) memcpy(ids + 4 * t, (const int32_t[]){3, 3, 1, 0}, 16);
    call_t call = call_make(9, 4, 4, 1, ids);
    call_run(&call);
    cr_assert_eq(*call.args.num_post_padded, 36);
    expect_list("expert_offsets", call.args.expert_offsets, (const int32_t[]){0, 9, 18, 18, 36}, 5);
    expect_list("sorted_ids", call.args.sorted_ids + 18, (const int32_t[]){0, 1, 4, 5, 8, 9}, 6);
    check(&call, 9);
    call_free(&call);
}

Test(align, all_to_one_expert_and_all_unused)
{
    int32_t ids[127 * 4];
    for (int32_t value = -1; value < 2; value++) {
        for (int32_t s = 0; s < 127 * 4; s++) ids[s] = value;
        call_t call = call_make(127, 4, 2, 64, ids);
        call_run(&call);
        cr_assert_eq(*call.args.num_post_padded, value < 0 ? 0 : 512);
        check(&call, 127);
        call_free(&call);
    }
}

Test(align, random_shapes_against_a_scan_per_expert)
{
    testing_rng_t rng = testing_rng(testing_seed());
    const int32_t experts[] = {1, 5, 8, 60, 72, 160, 384, 1025}, tokens[] = {1, 3, 63, 127},
                  blocks[] = {0, 1, 3, 16, 128};
    for (int round = 0; round < 120; round++) {
        int32_t num_experts = experts[testing_range(&rng, 0, 7)], num_tokens = tokens[testing_range(&rng, 0, 3)];
        int32_t top_k = testing_range(&rng, 1, 9), block = blocks[testing_range(&rng, 0, 4)];
        int32_t unused = testing_range(&rng, 0, 2), local = 0;
        int32_t *ids = testing_buffer(4 * (int64_t)num_tokens * top_k, 4), map[1025];
        for (int32_t s = 0; s < num_tokens * top_k; s++)
            ids[s] = unused && testing_range(&rng, 0, 3) < unused ? -1 : testing_range(&rng, 0, num_experts - 1);
        for (int32_t e = 0; e < num_experts; e++) map[e] = testing_range(&rng, 0, 2) ? local++ : -1;
        call_t call = call_make(num_tokens, top_k, num_experts, block, ids);
        int32_t actual = testing_range(&rng, 0, num_tokens);
        if (round % 2) call.args.expert_map = map;
        if (round % 3 == 0) {
            call.args.num_tokens_dev = &actual;
            for (int32_t s = actual * top_k; s < num_tokens * top_k; s++) ids[s] = 0x7FFFFFFF; /* never read */
        } else
            actual = num_tokens;
        call_run(&call);
        check(&call, actual);
        /* The optional outputs do not change the others. */
        call_t less = call_make(num_tokens, top_k, num_experts, block, ids);
        void *expert_ids = less.args.expert_ids, *offsets = less.args.expert_offsets;
        less.args.expert_map = call.args.expert_map;
        less.args.num_tokens_dev = call.args.num_tokens_dev;
        less.args.expert_ids = NULL;
        less.args.expert_offsets = NULL;
        call_run(&less);
        expect_list("sorted_ids", less.args.sorted_ids, call.args.sorted_ids, call.max_padded);
        cr_assert_eq(*less.args.num_post_padded, *call.args.num_post_padded);
        less.args.expert_ids = expert_ids;
        less.args.expert_offsets = offsets;
        call_free(&call);
        call_free(&less);
        testing_buffer_free(ids);
    }
}

Test(align, no_tokens)
{
    call_t call = call_make(0, 2, 4, 8, NULL);
    cr_assert_eq(call.max_padded, 32);
    call_run(&call);
    cr_assert_eq(*call.args.num_post_padded, 0);
    expect_fill("expert_offsets", call.args.expert_offsets, 0, 5, 0);
    expect_fill("sorted_ids", call.args.sorted_ids, 0, 32, 0);
    expect_fill("expert_ids", call.args.expert_ids, 0, 4, -1);
    call_free(&call);

    epmoe_align_args_t args = EPMOE_ALIGN_ARGS_INIT;
    args.top_k = 2;
    args.num_experts = 4;
    cr_assert_eq(epmoe_align_block_size(&args, NULL), EPMOE_OK, "%s", epmoe_last_error());
    int32_t padded = 99;
    args.num_post_padded = &padded;
    cr_assert_eq(epmoe_align_block_size(&args, NULL), EPMOE_OK);
    cr_assert_eq(padded, 0);
}

Test(align, worst_case_is_counted_in_64_bits)
{
    cr_assert_eq(epmoe_align_max_padded(3, 2, 8, 2), 14);
    cr_assert_eq(epmoe_align_max_padded(3, 2, 8, 1), 6);
    cr_assert_eq(epmoe_align_max_padded(3, 2, 8, 0), 6);
    cr_assert_eq(epmoe_align_max_padded(0, 8, 256, 64), 16128);
    cr_assert_eq(epmoe_align_max_padded(INT32_MAX, 1, 1, 1), INT32_MAX);
    cr_assert_eq(epmoe_align_max_padded(INT32_MAX, 1, 1, 2), -1);
    cr_assert_eq(epmoe_align_max_padded(67108864, 32, 8, 1), -1);  /* 2^31 slots */
    cr_assert_eq(epmoe_align_max_padded(1, 1, 4096, 1 << 20), -1); /* the padding alone is 2^32 */
    cr_assert_eq(epmoe_align_max_padded(INT32_MAX, INT32_MAX, 4096, INT32_MAX), -1);
    cr_assert_eq(epmoe_align_max_padded(-1, 1, 1, 1), -1);
    cr_assert_eq(epmoe_align_max_padded(1, 0, 1, 1), -1);
    cr_assert_eq(epmoe_align_max_padded(1, 1, 0, 1), -1);
    cr_assert_eq(epmoe_align_max_padded(1, 1, 4097, 1), -1);
    cr_assert_eq(epmoe_align_max_padded(1, 1, 1, -1), -1);
}

Test(align, errors_name_the_argument_and_leave_the_outputs)
{
    const int32_t ids[] = {0, 4, 1, 2, 3, -1}, map[] = {-1, 0, 1, -1, -1};
    call_t call = call_make(3, 2, 5, 4, ids);
    call.args.expert_map = map;
#define REJECTS(needle, statement) OP_INVALID(epmoe_align_block_size, call.args, needle, untouched(&call), statement)
    REJECTS("num_tokens is -1", bad.num_tokens = -1);
    REJECTS("top_k is 0", bad.top_k = 0);
    REJECTS("num_experts is 0", bad.num_experts = 0);
    REJECTS("num_experts is 4097", bad.num_experts = 4097);
    REJECTS("block_size is -4", bad.block_size = -4);
    REJECTS("exceeds", bad.num_tokens = INT32_MAX);
    REJECTS("exceeds", bad.block_size = INT32_MAX);
    REJECTS("ids is NULL", bad.ids = NULL);
    REJECTS("sorted_ids is NULL", bad.sorted_ids = NULL);
    REJECTS("num_post_padded is NULL", bad.num_post_padded = NULL);
    REJECTS("backend is 9", bad.backend = (epmoe_backend_t)9);
    const int32_t high[] = {0, 1, 2, 3, 4, 5}, low[] = {0, 1, 2, 3, 4, -2}, wild[] = {0, 1, 2, 3, 4, INT32_MIN};
    REJECTS("ids[2,1] is 5", bad.ids = high);
    REJECTS("ids[2,1] is -2", bad.ids = low);
    REJECTS("ids[2,1] is", bad.ids = wild);
    const int32_t bad_map[] = {0, 1, 2, -2, 3};
    REJECTS("expert_map[3] is -2", bad.expert_map = bad_map);
    int32_t count = 4;
    REJECTS("num_tokens_dev", bad.num_tokens_dev = &count);
    count = -1;
    REJECTS("num_tokens_dev", bad.num_tokens_dev = &count);
#undef REJECTS
    int64_t bytes = -7;
    epmoe_align_args_t sizes = EPMOE_ALIGN_ARGS_INIT;
    sizes.top_k = 1;
    cr_assert_eq(epmoe_align_workspace_size(&sizes, &bytes), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert_eq(bytes, -7);
    sizes.num_experts = 8, sizes.num_tokens = 5; /* no pointers are needed to ask */
    cr_assert_eq(epmoe_align_workspace_size(&sizes, &bytes), EPMOE_OK);
    cr_assert(bytes >= 0);
    cr_assert_eq(epmoe_align_workspace_size(&sizes, NULL), EPMOE_ERROR_INVALID_ARGUMENT);
    call_free(&call);
}

Test(align, struct_sizes)
{
    const int32_t ids[] = {1, 0};
    call_t call = call_make(2, 1, 2, 1, ids);
    OP_STRUCT_SIZES(epmoe_align_block_size, call.args, offsetof(epmoe_align_args_t, num_tokens_dev), untouched(&call),
                    call.args.sorted_ids[0] == 1 && call.args.sorted_ids[1] == 0);
    call_free(&call);
}

Test(align, floor_counts_each_word_once)
{
    epmoe_align_args_t args = {.num_tokens = 3, .top_k = 2, .num_experts = 8, .block_size = 2};
    cr_assert_eq(epmoei_align_floor(&args).bytes, 4 * (6 + 14 + 7 + 8));
}
