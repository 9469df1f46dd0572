/* One MoE layer on one rank, with weights chosen so that the answer is known: expert e of 4 maps x to about (e+1)*x.
 *
 *     cc -std=c11 one_rank.c -o one_rank $(pkg-config --cflags --libs epmoe) -lm
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include <epmoe/epmoe.h>

#include <math.h>
#include <stdio.h>

enum { HIDDEN = 4, INTERMEDIATE = 4, EXPERTS = 4, TOP_K = 2, TOKENS = 3 };

static float router[EXPERTS][HIDDEN];
static float gate_up[EXPERTS][2 * INTERMEDIATE][HIDDEN]; /* rows 0..f-1 gate, f..2f-1 up */
static float down[EXPERTS][HIDDEN][INTERMEDIATE];

/* silu(20) is 20 to fp32 precision: with gate = 20 * (sum of x) and up = x, h = gate * x where the sum is 1. */
static void fill_weights(void)
{
    for (int e = 0; e < EXPERTS; e++) {
        for (int i = 0; i < HIDDEN; i++) {
            router[e][i] = (float)e;
            for (int j = 0; j < HIDDEN; j++) gate_up[e][i][j] = 20.0f;
            gate_up[e][INTERMEDIATE + i][i] = 1.0f;
            down[e][i][i] = (float)(e + 1) / 20.0f;
        }
    }
}

int main(void)
{
    const float x[TOKENS][HIDDEN] = {{1, 0, 0, 0}, {0, 0.5f, 0.5f, 0}, {0.1f, 0.2f, 0.3f, 0.4f}};
    float y[TOKENS][HIDDEN];
    epmoe_comm_t *comm = NULL;
    epmoe_layer_t *layer = NULL;
    int result = 1;
    fill_weights();

    /* The arrays are host memory and fp32: the CPU, whatever devices there are. */
    epmoe_comm_config_t alone = EPMOE_COMM_CONFIG_INIT;
    alone.backend = EPMOE_BACKEND_CPU;

    epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
    config.hidden = HIDDEN;
    config.intermediate = INTERMEDIATE;
    config.num_experts = EXPERTS;
    config.top_k = TOP_K;
    config.scoring = EPMOE_SCORING_TOPK_SOFTMAX;
    config.dtype = EPMOE_F32;
    config.max_tokens = TOKENS;

    epmoe_layer_weights_t weights = EPMOE_LAYER_WEIGHTS_INIT;
    const epmoe_weight_t plain = EPMOE_WEIGHT_INIT;
    weights.router_dtype = EPMOE_F32;
    weights.router = router;
    weights.gate_up = plain;
    weights.gate_up.format = EPMOE_FORMAT_F32;
    weights.gate_up.data = gate_up;
    weights.down = plain;
    weights.down.format = EPMOE_FORMAT_F32;
    weights.down.data = down;

    if (epmoe_comm_create(NULL, &alone, &comm) != EPMOE_OK) goto fail;
    if (epmoe_layer_create(&config, comm, &layer) != EPMOE_OK) goto fail;
    if (epmoe_layer_set_weights(layer, &weights) != EPMOE_OK) goto fail;
    if (epmoe_layer_forward(layer, x, y, TOKENS, NULL) != EPMOE_OK) goto fail;

    /* Every token takes experts 3 and 2 (logits 3 and 2): y = x * (4 w + 3 (1 - w)), w = 1 / (1 + exp(-1)). */
    const double factor = 3.0 + 1.0 / (1.0 + exp(-1.0));
    double worst = 0.0;
    for (int t = 0; t < TOKENS; t++) {
        printf("token %d:", t);
        for (int i = 0; i < HIDDEN; i++) {
            const double error = fabs((double)y[t][i] - factor * (double)x[t][i]);
            if (!(error <= worst)) worst = error;
            printf(" %8.5f", (double)y[t][i]);
        }
        printf("\n");
    }
    result = worst <= 1e-5 ? 0 : 1;
    printf("backend %s, largest error %.1e: %s\n", epmoe_backend_arch(EPMOE_BACKEND_CPU), worst,
           result ? "WRONG" : "ok");
    epmoe_layer_destroy(layer);
    epmoe_comm_destroy(comm);
    return result;

fail:
    fprintf(stderr, "epmoe: %s\n", epmoe_last_error());
    epmoe_layer_destroy(layer);
    epmoe_comm_destroy(comm);
    return result;
}
