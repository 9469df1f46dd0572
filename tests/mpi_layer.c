/* The layer over ranks equals the layer of one rank. Started by test_mpi_layer: mpi_layer SEED CASES. */
#include "comm/ep_plan.h"
#include "moe/layer.h"
#include "tests/e4m3_oracle.h"
#include "tests/layer_ranks.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static int32_t own_of(const ranks_t *ranks, const int32_t *values) { return values[ranks->program.rank]; }

/* Token counts and their bounds, another on every rank; every fourth time none anywhere. */
static ranks_call_t draw_call(ranks_t *ranks, const epmoe_layer_config_t *config)
{
    ranks_call_t call = {.residual = testing_range(&ranks->rng, 0, 1),
                         .in_place = testing_range(&ranks->rng, 0, 1),
                         .by_num_tokens_dev = testing_range(&ranks->rng, 0, 3) == 0};
    bool none = testing_range(&ranks->rng, 0, 7) == 0;
    call.tokens = none || testing_range(&ranks->own, 0, 3) == 0 ? 0 : testing_range(&ranks->own, 1, config->max_tokens);
    return call;
}

/* This rank's part of weights that hold all experts. */
static epmoe_layer_weights_t slice(const oracle_model_t *model, const epmoe_layer_t *layer)
{
    const epmoe_layer_config_t *c = &model->config;
    epmoe_layer_weights_t w = model->weights;
    int64_t d = c->hidden, f = c->intermediate, first = layer->first_expert;
    if (!c->num_experts) return w;
    w.gate_up.data =
        (const char *)w.gate_up.data + first * 2 * f * d * epmoe_dtype_size(epmoei_dtype_of_format(w.gate_up.format));
    w.down.data = (const char *)w.down.data + first * d * f * epmoe_dtype_size(epmoei_dtype_of_format(w.down.format));
    if (w.gate_up_bias) w.gate_up_bias += first * 2 * f;
    if (w.down_bias) w.down_bias += first * d;
    return w;
}

/* What epmoe_layer_memory says for this rank, where every rank has the same max_tokens. */
static void check_memory(ranks_t *ranks, const ranks_pair_t *pair)
{
    epmoe_layer_memory_t memory = EPMOE_LAYER_MEMORY_INIT;
    const epmoe_layer_t *layer = pair->layer;
    epmoe_layer_config_t config = pair->config;
    config.transport = epmoe_comm_transport(ranks->program.comm);
    epmoe_status_t status = epmoe_layer_memory(&config, ranks->program.size, ranks->program.rank, &memory);
    ranks_check(ranks, status == EPMOE_OK, "%s", epmoe_last_error());
    ranks_check(ranks, memory.first_expert == layer->first_expert && memory.local_experts == layer->local_experts,
                "memory: experts");
    int64_t said[] = {memory.weight_bytes, memory.workspace_bytes, memory.comm_bytes};
    void *blocks[] = {layer->weights_memory, layer->workspace_memory, layer->ep ? layer->ep->memory : NULL};
    for (int32_t i = 0; i < 3; i++)
        ranks_check(ranks, layer_case_is_block(blocks[i], said[i]), "memory %d (%s)", i,
                    layer_case_text(&pair->config));
}

static void random_cases(ranks_t *ranks, int32_t count)
{
    ranks_pair_t before = {.layer = NULL};
    for (int32_t i = 0; i < count; i++) {
        bool same_bound = testing_range(&ranks->rng, 0, 1);
        int32_t bound = testing_range(&ranks->rng, 1, 40);
        if (!same_bound) bound = testing_range(&ranks->own, 1, 40);
        epmoe_layer_config_t config = layer_case_config(&ranks->rng, bound, true);
        config.hidden = testing_range(&ranks->rng, 8, 200);
        if (testing_range(&ranks->rng, 0, 2) == 0) config.wire_dtype = EPMOE_F8_E4M3;
        /* More than can come changes nothing. */
        if (config.num_experts && testing_range(&ranks->rng, 0, 1))
            config.capacity = 3 * bound * ranks->program.size + 40 * ranks->program.size;
        uint64_t seed = testing_next(&ranks->rng);
        ranks_pair_t pair = ranks_pair(ranks, &config, seed);
        if (!pair.layer || !pair.alone) return;
        if (same_bound) check_memory(ranks, &pair);
        oracle_model_t model = {.config = {0}};
        if (i % 2) {
            oracle_formats_t formats = layer_case_formats(&ranks->rng);
            model = oracle_model(&ranks->rng, &config, &formats);
            epmoe_layer_weights_t own = slice(&model, pair.layer);
            ranks_check(ranks, epmoe_layer_set_weights(pair.layer, &own) == EPMOE_OK, "%s", epmoe_last_error());
            ranks_check(ranks, epmoe_layer_set_weights(pair.alone, &model.weights) == EPMOE_OK, "%s",
                        epmoe_last_error());
        }
        for (int32_t j = 0; j < 2; j++) {
            ranks_call_t call = draw_call(ranks, &config);
            float *logits = malloc((size_t)bound * (size_t)config.num_experts * 4 + 1);
            testing_fill_normal(&ranks->own, logits, EPMOE_F32, (int64_t)bound * config.num_experts, 2);
            if (testing_range(&ranks->rng, 0, 2) == 0) call.logits = logits;
            ranks_compare(ranks, &pair, &call);
            free(logits);
            /* Two layers on one communicator, one after the other. */
            if (before.layer) {
                call = draw_call(ranks, &before.config);
                ranks_compare(ranks, &before, &call);
            }
        }
        ranks_pair_free(&before);
        before = pair;
        if (model.weights.layout == EPMOE_LAYOUT_PACKED && i % 2) ranks_pair_free(&before); /* borrows from the model */
        oracle_model_free(&model);
    }
    ranks_pair_free(&before);
}

static epmoe_layer_config_t plain_config(int32_t num_experts, int32_t top_k, int32_t hidden, int32_t max_tokens)
{
    epmoe_layer_config_t c = EPMOE_LAYER_CONFIG_INIT;
    c.hidden = hidden, c.intermediate = 16, c.num_experts = num_experts, c.top_k = top_k;
    c.renormalize = 1;
    c.dtype = EPMOE_BF16;
    c.max_tokens = max_tokens;
    return c;
}

/* A rank without tokens, a rank that nobody's tokens go to, and no tokens at all: over and over. */
static void empty_ranks(ranks_t *ranks)
{
    int32_t rank = ranks->program.rank, size = ranks->program.size;
    epmoe_layer_config_t config = plain_config(6 * size, 6, 24, 4);
    ranks_pair_t pair = ranks_pair(ranks, &config, 3);
    if (!pair.layer || !pair.alone) return;
    float *to_first = ranks_logits_to(4, &config, 0), *to_last = ranks_logits_to(4, &config, 6 * (size - 1));
    for (int32_t i = 0; i < 100; i++) {
        ranks_call_t a = {.tokens = rank == 0 && size > 1 ? 0 : 4, .logits = to_first};
        ranks_compare(ranks, &pair, &a);
        const epmoe_ep_t *ep = pair.layer->ep;
        if (ep) {
            /* One row per token, with all of its experts. */
            int32_t rows = rank == 0 ? 4 * (size - 1) : 0, here = 0;
            for (int64_t s = 0; s < (int64_t)ep->num_rows * 6; s++) here += ep->ids[s] >= 0;
            ranks_check(ranks, ep->num_rows == rows && here == rows * 6, "received %d rows, %d slots", ep->num_rows,
                        here);
        }
        ranks_call_t b = {.tokens = rank == size - 1 ? 3 : 2, .logits = i % 2 ? to_first : to_last};
        ranks_compare(ranks, &pair, &b);
        ranks_call_t c = {.tokens = 0};
        ranks_compare(ranks, &pair, &c);
    }
    free(to_first), free(to_last);
    ranks_pair_free(&pair);
}

/* Expert counts that the ranks do not divide, and fewer experts than ranks. */
static void uneven_experts(ranks_t *ranks)
{
    const int32_t counts[] = {30, 128, 4, 1, 5};
    int32_t size = ranks->program.size;
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        int32_t n = counts[i], next = 0;
        epmoe_layer_config_t config = plain_config(n, n < 4 ? n : 4, 40, 20);
        ranks_pair_t pair = ranks_pair(ranks, &config, 8);
        if (!pair.layer || !pair.alone) return;
        int32_t own[2] = {pair.layer->first_expert, pair.layer->local_experts}, *all = malloc((size_t)size * 8);
        epmoe_status_t status = epmoe_comm_all_gather(ranks->program.comm, own, all, sizeof own);
        ranks_check(ranks, status == EPMOE_OK, "%s", epmoe_last_error());
        for (int32_t r = 0; r < size; r++) {
            ranks_check(ranks, all[2 * r] == next && all[2 * r + 1] == n / size + (r < n % size),
                        "%d experts: rank %d has %d from %d", n, r, all[2 * r + 1], all[2 * r]);
            next += all[2 * r + 1];
        }
        ranks_check(ranks, next == n, "%d of %d experts are owned", next, n);
        ranks_call_t call = {.tokens = testing_range(&ranks->own, 0, 20)};
        ranks_compare(ranks, &pair, &call);
        free(all);
        ranks_pair_free(&pair);
    }
}

/* Widths of public models, most no multiple of a block, with very different token counts. */
static void hidden_sizes(ranks_t *ranks)
{
    const int32_t hidden[] = {96, 1440, 2056, 2880, 3584, 6144, 7168};
    const int32_t tokens[] = {1, 0, 257, 3, 64, 0, 5, 128};
    for (size_t i = 0; i < sizeof hidden / sizeof hidden[0]; i++) {
        ranks_call_t call = {.tokens = own_of(ranks, tokens)};
        epmoe_layer_config_t config = plain_config(16, 4, hidden[i], call.tokens ? call.tokens : 1);
        ranks_pair_t pair = ranks_pair(ranks, &config, 17);
        ranks_compare(ranks, &pair, &call);
        ranks_pair_free(&pair);
    }
}

/* What FP8 on the wire leaves of x [tokens,d]: the op's codes, and what E4M3's definition says of them. */
static void round_tokens(const epmoe_layer_config_t *c, const void *x, void *rounded, int32_t tokens)
{
    int64_t d = c->hidden, blocks = (d + 127) / 128;
    uint8_t *codes = malloc((size_t)(tokens * d) + 1);
    float *scales = malloc((size_t)(tokens * blocks) * 4 + 1);
    epmoe_quantize_fp8_args_t args = EPMOE_QUANTIZE_FP8_ARGS_INIT;
    args.num_tokens = tokens, args.hidden = c->hidden, args.dtype = c->dtype, args.x = x;
    args.granularity = EPMOE_GRANULARITY_BLOCK128, args.q = codes, args.scale = scales;
    if (epmoe_quantize_fp8(&args, NULL)) abort();
    for (int64_t i = 0; i < tokens * d; i++)
        epmoei_store(rounded, c->dtype, i,
                     (float)(e4m3_value(codes[i]) * (double)scales[i / d * blocks + i % d / 128]));
    free(codes), free(scales);
}

static void forward(ranks_t *ranks, epmoe_layer_t *layer, const epmoe_forward_args_t *from, const void *x, void *y)
{
    epmoe_forward_args_t args = *from;
    args.x = x, args.y = y;
    ranks_check(ranks, epmoe_layer_forward_args(layer, &args, NULL) == EPMOE_OK, "%s", epmoe_last_error());
}

/* FP8 on the wire, over all ranks and alone, is the plain layer on rounded x, bit for bit, and not far from the plain
 * one on x: codes of three bits are off by 2.6 % in the mean, of which gate times up makes 3.7. Logits are given: the
 * router takes x as it is. */
static void coded_case(ranks_t *ranks, epmoe_layer_config_t config)
{
    int32_t tokens = testing_range(&ranks->own, 0, 3) ? testing_range(&ranks->own, 1, config.max_tokens) : 0;
    int64_t elements = (int64_t)tokens * config.hidden, bytes = elements * epmoe_dtype_size(config.dtype);
    epmoe_layer_config_t coded = config;
    coded.wire_dtype = EPMOE_F8_E4M3;
    ranks_pair_t plain_pair = ranks_pair(ranks, &config, 23), coded_pair = ranks_pair(ranks, &coded, 23);
    if (!plain_pair.alone || !coded_pair.alone) return;
    void *x = malloc((size_t)bytes + 1), *rounded = malloc((size_t)bytes + 1), *y = malloc((size_t)bytes + 1);
    void *due = malloc((size_t)bytes + 1), *residual = malloc((size_t)bytes + 1);
    float *logits = malloc((size_t)tokens * (size_t)config.num_experts * 4 + 1);
    double *exact = malloc((size_t)elements * 8 + 1);
    testing_fill_normal(&ranks->own, x, config.dtype, elements, 1);
    testing_fill_normal(&ranks->own, residual, config.dtype, elements, 0.01f);
    testing_fill_normal(&ranks->own, logits, EPMOE_F32, (int64_t)tokens * config.num_experts, 2);
    round_tokens(&config, x, rounded, tokens);
    epmoe_forward_args_t args = EPMOE_FORWARD_ARGS_INIT;
    args.num_tokens = tokens, args.logits = logits, args.residual = tokens ? residual : NULL;
    for (int32_t alone = 0; alone < 2; alone++) {
        epmoe_layer_t *plain = alone ? plain_pair.alone : plain_pair.layer;
        forward(ranks, alone ? coded_pair.alone : coded_pair.layer, &args, x, y);
        forward(ranks, plain, &args, rounded, due);
        ranks_check(ranks, !memcmp(y, due, (size_t)bytes), "FP8 on the wire: other bits than of rounded x, %d (%s)",
                    alone, layer_case_text(&config));
        forward(ranks, plain, &args, x, due);
        for (int64_t i = 0; i < elements; i++) exact[i] = (double)epmoei_load(due, config.dtype, i);
        double error = testing_rel_error(y, config.dtype, exact, elements);
        /* One token of a narrow h says little about the mean. */
        bool narrow = config.intermediate < 100;
        ranks_check(ranks, !tokens || (error > 1e-3 && error <= (narrow ? 0.15 : 8e-2)),
                    "FP8 on the wire: off by %g (%s)", error, layer_case_text(&config));
    }
    for (int64_t i = 0; i < elements; i++) exact[i] = (double)epmoei_load(x, config.dtype, i);
    double error = testing_rel_error(rounded, config.dtype, exact, elements);
    ranks_check(ranks, error <= 4e-2, "rounded x is off by %g (%s)", error, layer_case_text(&config));
    free(x), free(rounded), free(y), free(due), free(residual), free(logits), free(exact);
    ranks_pair_free(&plain_pair);
    ranks_pair_free(&coded_pair);
}

static void coded_cases(ranks_t *ranks)
{
    static const int32_t hidden[] = {64, 128, 200, 7168};
    static const epmoe_dtype_t dtypes[] = {EPMOE_BF16, EPMOE_F16, EPMOE_F32};
    for (int32_t i = 0; i < 12; i++) {
        epmoe_layer_config_t config = plain_config(16, 4, hidden[i % 4], 6);
        config.dtype = dtypes[i / 4];
        if (config.hidden < 1000) config.intermediate = 256;
        coded_case(ranks, config);
    }
}

/* fp16 rows of +-131072, twice the largest fp16, that their weights bring back: alone, and from both ends of the ranks.
 * h is silu(bias) * 32 = 32, down 128 times 32. */
static void fp16_rows(ranks_t *ranks)
{
    enum { kD = 2, kF = 128, kE = 4 };
    float router[kE * kD] = {0}, gate_up[kE * 2 * kF * kD] = {0}, bias[kE * 2 * kF], zero[kE * kD] = {0};
    float down[kE * kD * kF];
    int32_t first, count;
    epmoe_expert_range(kE, ranks->program.size, ranks->program.rank, &first, &count);
    for (int32_t e = 0; e < kE; e++)
        for (int32_t i = 0; i < kF; i++) {
            bias[e * 2 * kF + i] = 1.27846454276107f; /* silu of it is 1 */
            bias[e * 2 * kF + kF + i] = 32;
            for (int32_t n = 0; n < kD; n++) down[(e * kD + n) * kF + i] = e == kE - 1 ? -32 : 32;
        }
    for (int32_t k = 1; k <= 2; k++) {
        epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
        config.hidden = kD, config.intermediate = kF, config.num_experts = kE, config.top_k = k;
        config.expert_has_bias = 1;
        config.dtype = EPMOE_F16;
        config.max_tokens = 1;
        epmoe_layer_t *layer = ranks_create(ranks, &config);
        if (!layer) return;
        epmoe_layer_weights_t w = EPMOE_LAYER_WEIGHTS_INIT;
        w.router_dtype = EPMOE_F32, w.router = router;
        w.gate_up.format = w.down.format = EPMOE_FORMAT_F32;
        w.gate_up.data = gate_up, w.down.data = down + first * kD * kF;
        w.gate_up_bias = bias, w.down_bias = zero;
        ranks_check(ranks, epmoe_layer_set_weights(layer, &w) == EPMOE_OK, "%s", epmoe_last_error());
        /* Probability 1/4 of the first; 1/2 of the first and of the last. */
        const float logits[2][kE] = {{0, 0, 0, 0}, {0, -INFINITY, -INFINITY, 0}};
        uint16_t x[kD] = {0}, y[kD];
        epmoe_forward_args_t args = EPMOE_FORWARD_ARGS_INIT;
        args.num_tokens = 1, args.x = x, args.y = y, args.logits = logits[k - 1];
        ranks_check(ranks, epmoe_layer_forward_args(layer, &args, NULL) == EPMOE_OK, "%s", epmoe_last_error());
        for (int32_t i = 0; i < kD; i++) {
            float value = epmoei_f16_to_f32(y[i]), right = k == 1 ? 32768.0f : 0.0f;
            ranks_check(ranks, value == right, "fp16: %g, expected %g", (double)value, (double)right);
        }
        epmoe_layer_destroy(layer);
    }
}

/* The same expert twice in one token, here and on another rank: dispatch, epmoe_experts, combine.
 * .25*4x + .25*4x + .3*2x + .2*1x = 2.8x. */
static void repeated_experts(ranks_t *ranks)
{
    enum { kD = 6, kE = 4, kK = 4, kT = 9 };
    int32_t ids[kT * kK], first, count;
    float weights[kT * kK], x[kT * kD], y[kT * kD], gate_up[kE * 2 * kD * kD] = {0}, bias[kE * 2 * kD] = {0};
    float down[kE * kD * kD] = {0};
    epmoe_expert_range(kE, ranks->program.size, ranks->program.rank, &first, &count);
    for (int32_t e = 0; e < count; e++)
        for (int32_t i = 0; i < kD; i++) {
            bias[e * 2 * kD + i] = 1.27846454276107f; /* silu of it is 1 */
            gate_up[((e * 2 + 1) * kD + i) * kD + i] = 1;
            down[(e * kD + i) * kD + i] = (float)(first + e + 1);
        }
    for (int32_t i = 0; i < kT * kK; i++) {
        ids[i] = (int32_t[]){3, 3, 1, 0}[i % kK];
        weights[i] = (float[]){.25f, .25f, .3f, .2f}[i % kK];
    }
    testing_fill_normal(&ranks->own, x, EPMOE_F32, kT * kD, 1);
    epmoe_ep_config_t config = EPMOE_EP_CONFIG_INIT;
    config.num_experts = kE, config.top_k = kK, config.hidden = kD, config.max_tokens = kT, config.dtype = EPMOE_F32;
    epmoe_ep_t *ep;
    if (!ranks_check(ranks, epmoe_ep_create(ranks->program.comm, &config, &ep) == EPMOE_OK, "%s", epmoe_last_error()))
        return;
    epmoe_dispatch_args_t dispatch = EPMOE_DISPATCH_ARGS_INIT;
    epmoe_dispatch_result_t rows = EPMOE_DISPATCH_RESULT_INIT;
    dispatch.num_tokens = kT, dispatch.x = x, dispatch.ids = ids, dispatch.weights = weights;
    epmoe_status_t status = epmoe_dispatch(ep, &dispatch, &rows, NULL);
    ranks_check(ranks, status == EPMOE_OK, "%s", epmoe_last_error());
    if (count) {
        epmoe_experts_args_t experts = EPMOE_EXPERTS_ARGS_INIT;
        experts.num_tokens = *rows.num_rows, experts.top_k = kK, experts.num_experts = count;
        experts.hidden = experts.intermediate = kD;
        experts.dtype = EPMOE_F32;
        experts.x = rows.x, experts.ids = rows.ids, experts.weights = rows.weights, experts.y = rows.y;
        experts.gate_up.format = experts.down.format = EPMOE_FORMAT_F32;
        experts.gate_up.data = gate_up, experts.down.data = down, experts.gate_up_bias = bias;
        status = epmoe_experts_workspace_size(&experts, &experts.workspace_bytes);
        experts.workspace = malloc((size_t)experts.workspace_bytes + 1);
        if (status == EPMOE_OK) status = epmoe_experts(&experts, NULL);
        ranks_check(ranks, status == EPMOE_OK, "%s", epmoe_last_error());
        free(experts.workspace);
    }
    epmoe_combine_args_t combine = EPMOE_COMBINE_ARGS_INIT;
    combine.y = y;
    status = epmoe_combine(ep, &combine, NULL);
    ranks_check(ranks, status == EPMOE_OK, "%s", epmoe_last_error());
    for (int32_t i = 0; i < kT * kD; i++)
        ranks_check(ranks, fabs((double)y[i] - 2.8 * (double)x[i]) <= 1e-5 * fabs((double)x[i]), "%g of %g",
                    (double)y[i], (double)x[i]);
    epmoe_ep_destroy(ep);
}

int main(int argc, char **argv)
{
    ranks_t ranks = ranks_start("mpi_layer", &argc, &argv);
    int64_t live = epmoei_alloc_live();
    random_cases(&ranks, argc > 2 ? atoi(argv[2]) : 10);
    empty_ranks(&ranks);
    uneven_experts(&ranks);
    if (ranks.program.size <= 8) hidden_sizes(&ranks);
    coded_cases(&ranks);
    fp16_rows(&ranks);
    repeated_experts(&ranks);
    ranks_check(&ranks, epmoei_alloc_live() == live, "%lld allocations leak", (long long)(epmoei_alloc_live() - live));
    return ranks_finish(&ranks);
}
