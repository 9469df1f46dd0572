/* Layers with copies of experts over ranks equal the layer of one rank without. Started by test_mpi_placement:
 * mpi_placement SEED CASES. */
#include "base/dtype.h"
#include "comm/ep_plan.h"
#include "moe/layer.h"
#include "tests/layer_ranks.h"

#include <stdio.h>
#include <stdlib.h>

/* This rank's physical experts, out of weights that hold every expert once. */
typedef struct gathered_t {
    epmoe_layer_weights_t weights;
    void *blocks[4];
} gathered_t;

static void *gather(const epmoe_layer_t *layer, const void *from, int64_t expert_bytes)
{
    if (!from) return NULL;
    char *to = malloc((size_t)(layer->local_experts * expert_bytes) + 1);
    for (int32_t i = 0; i < layer->local_experts; i++)
        memcpy(to + i * expert_bytes,
               (const char *)from + layer->config.placement[layer->first_expert + i] * expert_bytes,
               (size_t)expert_bytes);
    return to;
}

static gathered_t gather_weights(const oracle_model_t *model, const epmoe_layer_t *layer)
{
    const int64_t d = model->config.hidden, f = model->config.intermediate;
    gathered_t gathered = {.weights = model->weights};
    epmoe_layer_weights_t *w = &gathered.weights;
    const int64_t gate_up = epmoe_dtype_size(epmoei_dtype_of_format(w->gate_up.format));
    const int64_t down = epmoe_dtype_size(epmoei_dtype_of_format(w->down.format));
    w->gate_up.data = gathered.blocks[0] = gather(layer, w->gate_up.data, 2 * f * d * gate_up);
    w->down.data = gathered.blocks[1] = gather(layer, w->down.data, d * f * down);
    w->gate_up_bias = gathered.blocks[2] = gather(layer, w->gate_up_bias, 2 * f * 4);
    w->down_bias = gathered.blocks[3] = gather(layer, w->down_bias, d * 4);
    return gathered;
}

static void random_case(ranks_t *ranks, bool sets_weights)
{
    int32_t placement[RANKS_MAX_PHYSICAL], bound = testing_range(&ranks->rng, 1, 40);
    epmoe_layer_config_t config = layer_case_config(&ranks->rng, bound, false);
    config.hidden = testing_range(&ranks->rng, 8, 200);
    if (testing_range(&ranks->rng, 0, 2) == 0) config.wire_dtype = EPMOE_F8_E4M3;
    ranks_place(ranks, &config, placement);
    ranks_pair_t pair = ranks_pair(ranks, &config, testing_next(&ranks->rng));
    oracle_model_t model = {.config = {0}};
    gathered_t gathered = {.blocks = {NULL}};
    if (!pair.layer || !pair.alone) return;
    if (sets_weights) {
        oracle_formats_t formats = layer_case_formats(&ranks->rng);
        model = oracle_model(&ranks->rng, &config, &formats);
        gathered = gather_weights(&model, pair.layer);
        ranks_check(ranks, epmoe_layer_set_weights(pair.layer, &gathered.weights) == EPMOE_OK, "%s",
                    epmoe_last_error());
        ranks_check(ranks, epmoe_layer_set_weights(pair.alone, &model.weights) == EPMOE_OK, "%s", epmoe_last_error());
    }
    memset(placement, 0xFF, sizeof placement); /* the layer has its own */
    pair.config.placement = NULL;
    for (int32_t j = 0; j < 3; j++) {
        ranks_call_t call = {.residual = testing_range(&ranks->rng, 0, 1),
                             .in_place = testing_range(&ranks->rng, 0, 1),
                             .by_num_tokens_dev = testing_range(&ranks->rng, 0, 3) == 0};
        call.tokens = testing_range(&ranks->own, 0, 3) ? testing_range(&ranks->own, 1, bound) : 0;
        float *logits = malloc((size_t)bound * (size_t)config.num_experts * 4 + 1);
        testing_fill_normal(&ranks->own, logits, EPMOE_F32, (int64_t)bound * config.num_experts, 2);
        if (j == 1) call.logits = logits;
        ranks_compare(ranks, &pair, &call);
        free(logits);
    }
    ranks_pair_free(&pair);
    for (int32_t i = 0; i < 4; i++) free(gathered.blocks[i]);
    if (sets_weights) oracle_model_free(&model);
}

static epmoe_layer_config_t plain_config(int32_t num_experts, int32_t top_k)
{
    epmoe_layer_config_t c = EPMOE_LAYER_CONFIG_INIT;
    c.hidden = 40, c.intermediate = 24, c.num_experts = num_experts, c.top_k = top_k;
    c.renormalize = 1;
    c.dtype = EPMOE_BF16;
    c.max_tokens = 20;
    return c;
}

/* All tokens want the same experts, which a plan copies to every rank: each keeps its tokens, and no row leaves it. */
static void planned(ranks_t *ranks)
{
    enum { EXPERTS = 16, TOP_K = 2, TOKENS = 20 };
    const int32_t size = ranks->program.size, physical = EXPERTS + TOP_K * (size - 1);
    int32_t placement[EXPERTS + TOP_K * 63];
    int64_t load[EXPERTS] = {0}, all[64 * EXPERTS];
    epmoe_layer_config_t config = plain_config(EXPERTS, TOP_K);
    ranks_pair_t before = ranks_pair(ranks, &config, 5);
    if (!before.layer || !before.alone || size > 64) return;
    float *logits = ranks_logits_to(TOKENS, &config, 3);
    uint16_t x[TOKENS * 40], y[TOKENS * 40];
    testing_fill_normal(&ranks->own, x, EPMOE_BF16, TOKENS * 40, 1);
    epmoe_forward_args_t args = EPMOE_FORWARD_ARGS_INIT;
    args.num_tokens = TOKENS, args.x = x, args.y = y, args.logits = logits, args.expert_load = load;
    for (int32_t i = 0; i < 3; i++)
        ranks_check(ranks, epmoe_layer_forward_args(before.layer, &args, NULL) == EPMOE_OK, "%s", epmoe_last_error());
    ranks_pair_free(&before);
    for (int32_t e = 0; e < EXPERTS; e++)
        ranks_check(ranks, load[e] == (e == 3 || e == 4 ? 3 * TOKENS : 0), "load[%d] is %lld", e, (long long)load[e]);
    epmoe_status_t status = epmoe_comm_all_gather(ranks->program.comm, load, all, sizeof load);
    ranks_check(ranks, status == EPMOE_OK, "%s", epmoe_last_error());
    for (int32_t r = 1; r < size; r++)
        for (int32_t e = 0; e < EXPERTS; e++) all[e] += all[r * EXPERTS + e];
    status = epmoe_placement_plan(all, EXPERTS, physical, size, placement);
    ranks_check(ranks, status == EPMOE_OK, "%s", epmoe_last_error());
    config.placement = placement, config.num_physical = physical;
    ranks_pair_t pair = ranks_pair(ranks, &config, 5);
    if (!pair.layer || !pair.alone) return;
    const ranks_call_t call = {.tokens = TOKENS, .logits = logits};
    ranks_compare(ranks, &pair, &call);
    if (pair.layer->ep)
        ranks_check(ranks, epmoei_ep_wire_bytes(pair.layer->ep) == 0 && epmoei_ep_num_rows(pair.layer->ep) == TOKENS,
                    "%lld bytes leave, %d rows are here", (long long)epmoei_ep_wire_bytes(pair.layer->ep),
                    epmoei_ep_num_rows(pair.layer->ep));
    ranks_pair_free(&pair);
    free(logits);
}

/* What a layer says of its size, and one rank with another placement. */
static void contract(ranks_t *ranks)
{
    enum { EXPERTS = 10, PHYSICAL = 13 };
    int32_t placement[PHYSICAL], rank = ranks->program.rank, size = ranks->program.size;
    epmoe_layer_config_t config = plain_config(EXPERTS, 3);
    epmoe_layer_t *layer = NULL;
    for (int32_t p = 0; p < PHYSICAL; p++) placement[p] = (p * 3) % EXPERTS;
    config.placement = placement, config.num_physical = PHYSICAL;
    config.comm_sms = 3 + rank;
    epmoe_layer_memory_t memory = EPMOE_LAYER_MEMORY_INIT;
    epmoe_status_t status = epmoe_layer_memory(&config, size, rank, &memory);
    ranks_check(ranks, status == EPMOE_OK, "%s", epmoe_last_error());
    ranks_check(ranks, memory.local_experts == PHYSICAL / size + (rank < PHYSICAL % size), "local experts: %d",
                memory.local_experts);
    if (size > 1) {
        if (rank == size - 1) placement[2] = 5;
        status = epmoe_layer_create(&config, ranks->program.comm, &layer);
        ranks_expect(ranks, "create", status, EPMOE_ERROR_MISMATCH, "placement[2] is 6 on rank 0 and 5 on rank");
        placement[2] = 6;
        if (rank == size - 1) placement[1] = -2;
        status = epmoe_layer_create(&config, ranks->program.comm, &layer);
        ranks_expect_failure(ranks, "create", status, size - 1, EPMOE_ERROR_INVALID_ARGUMENT,
                             "config.placement[1] is -2: expected an expert, 0..9");
        placement[1] = 3;
        ranks_check(ranks, !layer, "a layer after a failure");
    }
    /* Every allocation fails once, on one rank. */
    for (int64_t n = 1; n < 40; n++) {
        epmoei_alloc_fail_at(rank == 0 ? n : 0);
        status = epmoe_layer_create(&config, ranks->program.comm, &layer);
        epmoei_alloc_fail_at(0);
        if (status == EPMOE_OK) break;
        ranks_expect_failure(ranks, "create", status, 0, EPMOE_ERROR_OUT_OF_MEMORY, "");
    }
    if (!ranks_check(ranks, layer != NULL, "no layer")) return;
    ranks_check(ranks, layer->first_expert == memory.first_expert && layer->local_experts == memory.local_experts,
                "experts %d, %d", layer->first_expert, layer->local_experts);
    ranks_check(ranks, size == 1 || layer->ep->config.comm_sms == 3 + rank, "comm_sms of the layer's exchange");
    epmoe_layer_destroy(layer);
}

/* With one rank a row's slots are summed in their order wherever its experts are: without copies the bits are those of
 * no placement. */
static void permuted_alone(ranks_t *ranks)
{
    enum { EXPERTS = 12, TOKENS = 20 };
    static const epmoe_dtype_t dtypes[] = {EPMOE_F32, EPMOE_BF16, EPMOE_F16};
    int32_t placement[EXPERTS];
    for (int32_t p = 0; p < EXPERTS; p++) placement[p] = (p * 5 + 2) % EXPERTS;
    for (int32_t i = 0; i < 3; i++) {
        epmoe_layer_t *layers[2] = {NULL};
        epmoe_layer_config_t config = plain_config(EXPERTS, 4);
        config.dtype = dtypes[i];
        char x[TOKENS * 40 * 4], y[2][TOKENS * 40 * 4];
        testing_fill_normal(&ranks->own, x, config.dtype, TOKENS * 40, 1);
        memset(y, 0xFF, sizeof y);
        for (int32_t j = 0; j < 2; j++) {
            config.placement = j ? placement : NULL;
            epmoe_status_t status = epmoe_layer_create(&config, NULL, &layers[j]);
            if (status == EPMOE_OK) status = epmoe_layer_set_random_weights(layers[j], 9);
            if (status == EPMOE_OK) status = epmoe_layer_forward(layers[j], x, y[j], TOKENS, NULL);
            ranks_check(ranks, status == EPMOE_OK, "%s", epmoe_last_error());
            epmoe_layer_destroy(layers[j]);
        }
        ranks_check(ranks, !memcmp(y[0], y[1], sizeof y[0]), "permuted experts: other bits in %s",
                    epmoe_dtype_string(config.dtype));
    }
}

int main(int argc, char **argv)
{
    ranks_t ranks = ranks_start("mpi_placement", &argc, &argv);
    int64_t live = epmoei_alloc_live();
    for (int32_t i = 0; i < (argc > 2 ? atoi(argv[2]) : 10); i++) random_case(&ranks, i % 2);
    planned(&ranks);
    contract(&ranks);
    permuted_alone(&ranks);
    ranks_check(&ranks, epmoei_alloc_live() == live, "%lld allocations leak", (long long)(epmoei_alloc_live() - live));
    return ranks_finish(&ranks);
}
