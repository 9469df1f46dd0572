/* Placements of experts: planning them, refusing bad ones, and the copies that tokens take. */
#include "comm/placement.h"

#include "tests/testing.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>

/* ------------------------------------------------------------------------------------------------------------ plan */

static void expect_plan(const int64_t *load, int32_t experts, int32_t physical, int32_t size, const int32_t *due)
{
    int32_t *placement = testing_buffer(physical * 4, 0);
    epmoe_status_t status = epmoe_placement_plan(load, experts, physical, size, placement);
    cr_assert_eq(status, EPMOE_OK, "%s", epmoe_last_error());
    for (int32_t p = 0; p < physical; p++)
        cr_expect_eq(placement[p], due[p], "%d experts, %d physical on %d ranks: [%d] is %d, expected %d", experts,
                     physical, size, p, placement[p], due[p]);
    cr_expect(testing_guards_intact(placement));
    testing_buffer_free(placement);
}

Test(placement, plan_spreads_the_busy)
{
    /* 9 to rank 0, 8 to 1, 2 to 1 (10), 1 to 0 (10). */
    const int64_t load[] = {9, 8, 1, 2};
    expect_plan(load, 4, 4, 2, (const int32_t[]){0, 2, 1, 3});
}

Test(placement, plan_copies_the_busiest)
{
    /* Copies: 12 becomes 6 + 6, then 6 (a copy) and 6 (expert 1) are equal: fewer copies first, 3 + 3.
     * Shares 6, 6 (0), 4 (2), 3, 3 (1), 2 (3): 0 to both ranks; 2 to rank 0 (10); 1 to 1 (9), the other 1 to 0, which
     * has none yet (13) and is full; 3 to 1 (11). */
    const int64_t load[] = {12, 6, 4, 2};
    expect_plan(load, 4, 6, 2, (const int32_t[]){0, 1, 2, 0, 1, 3});
    /* Ranks of unequal size: 5 on 2 are 3 and 2. 12 becomes 6 + 6. 0 to both; 1 to 0 (12, of 2); 2 to 1 (10), full; 3
     * to 0. */
    expect_plan(load, 4, 5, 2, (const int32_t[]){0, 1, 3, 0, 2});
}

/* No more copies than ranks, as long as others have fewer; then all get more in turns. */
Test(placement, plan_bounds_copies)
{
    const int64_t load[] = {1000, 1, 1};
    expect_plan(load, 3, 5, 2, (const int32_t[]){0, 1, 2, 0, 1});
    expect_plan(load, 3, 6, 2, (const int32_t[]){0, 1, 2, 0, 1, 2});
    expect_plan(load, 3, 4, 1, (const int32_t[]){0, 0, 1, 2});
}

Test(placement, plan_without_load)
{
    const int64_t none[6] = {0};
    expect_plan(none, 6, 6, 3, (const int32_t[]){0, 1, 2, 3, 4, 5});
    expect_plan(none, 2, 4, 2, (const int32_t[]){0, 1, 0, 1});
}

/* Heaviest first would give 3 + 2 + 2 to a rank; the blocks are 6 and 6. */
Test(placement, plan_keeps_blocks_that_are_better)
{
    const int64_t load[] = {2, 2, 2, 3, 3};
    expect_plan(load, 5, 5, 2, (const int32_t[]){0, 1, 2, 3, 4});
    /* And those that are as good: 4, 3, 2, 1 would go to ranks 0, 1, 1, 0. */
    const int64_t even[] = {4, 1, 3, 2};
    expect_plan(even, 4, 4, 2, (const int32_t[]){0, 1, 2, 3});
}

Test(placement, plan_with_more_ranks_than_experts)
{
    /* 10 on three ranks, 4 on one. */
    const int64_t load[] = {10, 4};
    expect_plan(load, 2, 4, 4, (const int32_t[]){1, 0, 0, 0});
    expect_plan(load, 2, 2, 4, (const int32_t[]){0, 1});
}

/* Load of the busiest rank, were copies to share evenly. */
static double busiest(const int64_t *load, int32_t experts, const int32_t *placement, int32_t physical, int32_t size)
{
    double most = 0;
    int32_t *copies = calloc((size_t)experts, 4);
    for (int32_t p = 0; p < physical; p++) copies[placement[p]]++;
    for (int32_t r = 0, p = 0; r < size; r++) {
        double sum = 0;
        int32_t end = p + physical / size + (r < physical % size);
        for (; p < end; p++) sum += (double)load[placement[p]] / copies[placement[p]];
        most = sum > most ? sum : most;
    }
    free(copies);
    return most;
}

Test(placement, plans_of_random_loads)
{
    testing_rng_t rng = testing_rng(testing_seed());
    for (int32_t i = 0; i < 400; i++) {
        int32_t experts = testing_range(&rng, 1, i % 4 ? 40 : 300), size = testing_range(&rng, 1, 12);
        int32_t physical = experts + (i % 3 ? testing_range(&rng, 0, 2 * experts) : 0);
        int64_t *load = malloc((size_t)experts * 8);
        int32_t *block = malloc((size_t)experts * 4), *copies = calloc((size_t)experts, 4), *again;
        int32_t *placement = testing_buffer(physical * 4, 0);
        again = testing_buffer(physical * 4, 0);
        for (int32_t e = 0; e < experts; e++) {
            load[e] = testing_range(&rng, 0, i % 5 ? 1000 : 2);
            if (testing_range(&rng, 0, 9) == 0) load[e] *= 100000000000;
            block[e] = e;
        }
        cr_assert_eq(epmoe_placement_plan(load, experts, physical, size, placement), EPMOE_OK);
        cr_assert_eq(epmoe_placement_plan(load, experts, physical, size, again), EPMOE_OK);
        cr_assert(!memcmp(placement, again, (size_t)physical * 4), "another plan for the same load");
        for (int32_t p = 0; p < physical; p++) {
            cr_assert(placement[p] >= 0 && placement[p] < experts);
            copies[placement[p]]++;
        }
        int32_t same = physical;
        cr_assert_eq(epmoei_placement_check(placement, experts, &same), EPMOE_OK, "%s", epmoe_last_error());
        double planned = busiest(load, experts, placement, physical, size);
        double contiguous = busiest(load, experts, block, experts, size);
        cr_assert_leq(planned, contiguous * (1 + 1e-12), "%d experts, %d physical on %d ranks: %g, contiguous %g",
                      experts, physical, size, planned, contiguous);
        cr_assert(testing_guards_intact(placement));
        testing_buffer_free(placement), testing_buffer_free(again);
        free(load), free(block), free(copies);
    }
}

/* Copies and packing each do what they are for: near the mean where copies are many. */
Test(placement, plans_of_skewed_loads_are_balanced)
{
    enum { EXPERTS = 128, PHYSICAL = 160, RANKS = 8 };
    int64_t load[EXPERTS], total = 0;
    int32_t placement[PHYSICAL], block[EXPERTS];
    for (int32_t e = 0; e < EXPERTS; e++) {
        load[e] = 1000000 / (e + 1); /* Zipf, the busy ones together */
        total += load[e];
        block[e] = e;
    }
    cr_assert_eq(epmoe_placement_plan(load, EXPERTS, PHYSICAL, RANKS, placement), EPMOE_OK);
    double mean = (double)total / RANKS;
    cr_expect_gt(busiest(load, EXPERTS, block, EXPERTS, RANKS), 4 * mean);
    cr_expect_lt(busiest(load, EXPERTS, placement, PHYSICAL, RANKS), 1.05 * mean);
}

static void refuse(epmoe_status_t status, const char *words)
{
    cr_expect_eq(status, EPMOE_ERROR_INVALID_ARGUMENT, "%s", words);
    cr_expect(strstr(epmoe_last_error(), words), "'%s' lacks '%s'", epmoe_last_error(), words);
}

Test(placement, plan_refuses)
{
    int64_t load[4] = {1, 2, 3, -4};
    int32_t placement[4] = {7, 7, 7, 7};
    refuse(epmoe_placement_plan(load, 4, 4, 2, placement), "load[3] is -4: expected >= 0");
    refuse(epmoe_placement_plan(load, 0, 4, 2, placement), "num_experts is 0: expected 1..4096");
    refuse(epmoe_placement_plan(load, 3, 2, 2, placement), "num_physical is 2: expected 3 (num_experts)..4096");
    refuse(epmoe_placement_plan(load, 3, 4097, 2, placement), "num_physical is 4097: expected 3 (num_experts)..4096");
    refuse(epmoe_placement_plan(load, 3, 4, 0, placement), "size is 0: expected 1..");
    refuse(epmoe_placement_plan(NULL, 3, 4, 1, placement), "load is NULL");
    refuse(epmoe_placement_plan(load, 3, 4, 1, NULL), "placement is NULL");
    for (int32_t i = 0; i < 4; i++) cr_expect_eq(placement[i], 7);
}

/* Every allocation that can fail does, once. */
Test(placement, plan_without_memory)
{
    const int64_t load[] = {9, 8, 1, 2};
    int32_t placement[4] = {7, 7, 7, 7};
    int64_t live = epmoei_alloc_live();
    epmoei_alloc_fail_at(1);
    cr_expect_eq(epmoe_placement_plan(load, 4, 4, 2, placement), EPMOE_ERROR_OUT_OF_MEMORY);
    cr_expect_eq(placement[0], 7);
    cr_expect_eq(epmoe_placement_plan(load, 4, 4, 2, placement), EPMOE_OK);
    cr_expect_eq(epmoei_alloc_live(), live);
}

/* ----------------------------------------------------------------------------------------------------------- check */

Test(placement, what_is_no_placement)
{
    epmoe_comm_t *comm = NULL;
    epmoe_ep_t *ep = NULL;
    epmoe_layer_t *layer = NULL;
    cr_assert_eq(epmoe_comm_create(NULL, NULL, &comm), EPMOE_OK);
    const struct {
        int32_t placement[6];
        bool given;
        int32_t num_physical;
        const char *words;
    } cases[] = {
        {{0, 1, 2, 3}, true, 3, "config.num_physical is 3: expected 4 (num_experts)..4096"},
        {{0, 1, 2, 3}, true, 4097, "config.num_physical is 4097: expected 4 (num_experts)..4096"},
        {{0, 1, 2, 4}, true, 4, "config.placement[3] is 4: expected an expert, 0..3"},
        {{0, -1, 2, 3}, true, 0, "config.placement[1] is -1: expected an expert, 0..3"},
        {{0, 1, 3, 3, 0, 1}, true, 6, "config.placement has 0 copies of expert 2: expected at least one of each"},
        {{0}, false, 6, "config.num_physical is 6 without a placement: expected 0 or num_experts (4)"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        epmoe_ep_config_t config = EPMOE_EP_CONFIG_INIT;
        epmoe_layer_config_t of_layer = EPMOE_LAYER_CONFIG_INIT;
        epmoe_layer_memory_t memory = EPMOE_LAYER_MEMORY_INIT;
        int64_t bytes;
        config.num_experts = of_layer.num_experts = 4;
        config.top_k = of_layer.top_k = 2;
        config.hidden = of_layer.hidden = of_layer.intermediate = 8;
        config.dtype = of_layer.dtype = EPMOE_F32;
        config.placement = of_layer.placement = cases[i].given ? cases[i].placement : NULL;
        config.num_physical = of_layer.num_physical = cases[i].num_physical;
        refuse(epmoe_ep_create(comm, &config, &ep), cases[i].words);
        refuse(epmoe_ep_buffer_size(&config, 2, 10, &bytes), cases[i].words);
        refuse(epmoe_layer_create(&of_layer, NULL, &layer), cases[i].words);
        refuse(epmoe_layer_memory(&of_layer, 2, 0, &memory), cases[i].words);
        cr_expect(!ep && !layer);
    }
    epmoe_comm_destroy(comm);
}

/* ---------------------------------------------------------------------------------------------------------- copies */

/* Physical experts 0, 1, 2 on rank 0, then two each on 1 and 2. */
static const int32_t kPlacement[] = {2, 0, 0, 1, 2, 2, 0};

static void expect_places(int32_t rank, const int32_t *due)
{
    enum { TOKENS = 4, TOP_K = 3 };
    const int32_t ids[TOKENS * TOP_K] = {0, 1, 2, 2, -1, 0, 0, 7, 2, 2, 1, 0};
    int32_t *physical = testing_buffer(sizeof ids, 0);
    int64_t load[3] = {100, 0, 5};
    epmoei_placement_t *placement = NULL;
    cr_assert_eq(epmoei_placement_create(kPlacement, 3, 7, 3, rank, EPMOE_BACKEND_CPU, &placement), EPMOE_OK);
    epmoei_place_ids_t args = epmoei_placement_args(placement, 3);
    args.num_tokens = TOKENS, args.top_k = TOP_K, args.ids = ids, args.physical_ids = physical, args.load = load;
    cr_assert_eq(epmoei_place_ids(EPMOE_BACKEND_CPU, &args, NULL), EPMOE_OK);
    for (int32_t i = 0; i < TOKENS * TOP_K; i++)
        cr_expect_eq(physical[i], due[i], "rank %d, slot %d: %d, expected %d", rank, i, physical[i], due[i]);
    cr_expect(load[0] == 104 && load[1] == 2 && load[2] == 9, "load %d %d %d", (int)load[0], (int)load[1],
              (int)load[2]);
    cr_expect(testing_guards_intact(physical));
    testing_buffer_free(physical);
    epmoei_placement_destroy(placement);
}

Test(placement, own_copies_first_otherwise_in_turns)
{
    /* Rank 0: expert 0 is here twice (1, 2), by token; 1 on rank 1 alone; 2 is here. */
    expect_places(0, (const int32_t[]){1, 3, 0, 0, -1, 2, 1, -1, 0, 0, 3, 2});
    /* Rank 1: 0 is elsewhere, 1, 2, 6 in turns by token + 1; 1 and 2 are here. */
    expect_places(1, (const int32_t[]){2, 3, 4, 4, -1, 6, 1, -1, 4, 4, 3, 2});
    /* Rank 2: 0 and 2 are here. */
    expect_places(2, (const int32_t[]){6, 3, 5, 5, -1, 6, 6, -1, 5, 5, 3, 6});
}

/* Tokens spread evenly over ranks load the copies evenly. */
Test(placement, copies_share_evenly)
{
    enum { RANKS = 4, TOKENS = 60 };
    static const int32_t placement[] = {0, 1, 0, 2, 1, 2, 0, 3}; /* 0 on ranks 0, 1 and 3 */
    int32_t ids[TOKENS] = {0}, physical[TOKENS], got[8] = {0};
    for (int32_t rank = 0; rank < RANKS; rank++) {
        epmoei_placement_t *made = NULL;
        cr_assert_eq(epmoei_placement_create(placement, 4, 8, RANKS, rank, EPMOE_BACKEND_CPU, &made), EPMOE_OK);
        epmoei_place_ids_t args = epmoei_placement_args(made, 4);
        args.num_tokens = TOKENS, args.top_k = 1, args.ids = ids, args.physical_ids = physical;
        epmoei_place_ids_cpu(&args);
        for (int32_t t = 0; t < TOKENS; t++) got[physical[t]]++;
        epmoei_placement_destroy(made);
    }
    cr_expect(got[0] == 80 && got[2] == 80 && got[6] == 80, "%d %d %d", got[0], got[2], got[6]);
}
