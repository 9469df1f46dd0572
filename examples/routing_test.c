/* A unit test of a router, as a program that ports a model would have one: the rule written down once more, as plainly
 * as it can be, and compared with epmoe_topk over random logits. The rule is DeepSeek-V3's: sigmoid scores, a bias that
 * chooses and never weighs, groups of experts of which the best stay, weights that sum to the scale.
 *
 *     cc -std=c11 routing_test.c -o routing_test $(pkg-config --cflags --libs epmoe) -lm
 *
 * On a GPU as well, where epmoe was built with CUDA:
 *
 *     cc -std=c11 -DWITH_CUDA routing_test.c -o routing_test $(pkg-config --cflags --libs epmoe) -lm \
 *        -I$CUDA_HOME/include -L$CUDA_HOME/lib64 -lcudart
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include <epmoe/epmoe.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if WITH_CUDA
#include <cuda_runtime_api.h>
#endif

enum { TOKENS = 200, EXPERTS = 64, TOP_K = 6, GROUPS = 8, TAKEN_GROUPS = 3, PER_GROUP = EXPERTS / GROUPS };
static const float scale = 2.5f;

static float logits[TOKENS][EXPERTS], bias[EXPERTS];
static int32_t ids[TOKENS][TOP_K];
static float weights[TOKENS][TOP_K];

/* The places of the `count` largest of n values, largest first; of equal ones the lower place. */
static void largest(const double *values, int n, int count, int *places)
{
    char taken[EXPERTS] = {0};
    for (int j = 0; j < count; j++) {
        int best = -1;
        for (int i = 0; i < n; i++)
            if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
        taken[best] = 1;
        places[j] = best;
    }
}

static void expected_row(const float *row, int *chosen, double *weight)
{
    double score[EXPERTS], selection[EXPERTS], group[GROUPS], sum = 0;
    int two[2], kept[TAKEN_GROUPS];
    char stays[GROUPS] = {0};
    for (int e = 0; e < EXPERTS; e++) {
        score[e] = 1 / (1 + exp(-(double)row[e]));
        selection[e] = score[e] + (double)bias[e];
    }
    for (int g = 0; g < GROUPS; g++) {
        largest(selection + g * PER_GROUP, PER_GROUP, 2, two);
        group[g] = selection[g * PER_GROUP + two[0]] + selection[g * PER_GROUP + two[1]];
    }
    largest(group, GROUPS, TAKEN_GROUPS, kept);
    for (int g = 0; g < TAKEN_GROUPS; g++) stays[kept[g]] = 1;
    for (int e = 0; e < EXPERTS; e++)
        if (!stays[e / PER_GROUP]) selection[e] = -INFINITY;
    largest(selection, EXPERTS, TOP_K, chosen);
    for (int j = 0; j < TOP_K; j++) sum += score[chosen[j]];
    for (int j = 0; j < TOP_K; j++) weight[j] = (double)scale * score[chosen[j]] / sum;
}

/* The number of tokens that are routed otherwise than by the rule. */
static int wrong_tokens(void)
{
    int wrong = 0;
    for (int t = 0; t < TOKENS; t++) {
        int chosen[TOP_K], good = 1;
        double weight[TOP_K];
        expected_row(logits[t], chosen, weight);
        for (int j = 0; j < TOP_K; j++)
            good &= ids[t][j] == chosen[j] && fabs((double)weights[t][j] - weight[j]) < 1e-5;
        wrong += !good;
    }
    return wrong;
}

static epmoe_topk_args_t rule(epmoe_backend_t backend)
{
    epmoe_topk_args_t args = EPMOE_TOPK_ARGS_INIT;
    args.backend = backend;
    args.num_tokens = TOKENS;
    args.num_experts = EXPERTS;
    args.top_k = TOP_K;
    args.scoring = EPMOE_SCORING_SIGMOID;
    args.renormalize = 1;
    args.scale = scale;
    args.n_group = GROUPS;
    args.topk_group = TAKEN_GROUPS;
    args.group_score = EPMOE_GROUP_SCORE_TOP2;
    return args;
}

static epmoe_status_t on_cpu(void)
{
    epmoe_topk_args_t args = rule(EPMOE_BACKEND_CPU);
    args.logits = logits;
    args.selection_bias = bias;
    args.ids = &ids[0][0];
    args.weights = &weights[0][0];
    return epmoe_topk(&args, NULL);
}

#if WITH_CUDA
static epmoe_status_t on_gpu(void)
{
    struct {
        float logits[TOKENS][EXPERTS], bias[EXPERTS], weights[TOKENS][TOP_K];
        int32_t ids[TOKENS][TOP_K];
    } *device = NULL;
    epmoe_topk_args_t args = rule(EPMOE_BACKEND_CUDA);
    epmoe_status_t status = EPMOE_ERROR_CUDA;
    if (cudaMalloc((void **)&device, sizeof *device) != cudaSuccess) return status;
    args.logits = device->logits;
    args.selection_bias = device->bias;
    args.ids = &device->ids[0][0];
    args.weights = &device->weights[0][0];
    if (cudaMemcpy(device->logits, logits, sizeof logits, cudaMemcpyHostToDevice) == cudaSuccess &&
        cudaMemcpy(device->bias, bias, sizeof bias, cudaMemcpyHostToDevice) == cudaSuccess) {
        status = epmoe_topk(&args, NULL); /* only enqueues; the copies below wait for it */
        if (cudaMemcpy(ids, device->ids, sizeof ids, cudaMemcpyDeviceToHost) != cudaSuccess ||
            cudaMemcpy(weights, device->weights, sizeof weights, cudaMemcpyDeviceToHost) != cudaSuccess)
            status = EPMOE_ERROR_CUDA;
    }
    cudaFree(device);
    return status;
}
#endif

static int report(const char *backend, epmoe_status_t status)
{
    const int wrong = status == EPMOE_OK ? wrong_tokens() : TOKENS;
    if (status != EPMOE_OK) fprintf(stderr, "epmoe: %s: %s\n", epmoe_status_string(status), epmoe_last_error());
    printf("%s: %d tokens, %d routed wrong: %s\n", backend, TOKENS, wrong, wrong ? "WRONG" : "ok");
    memset(ids, 0xFF, sizeof ids);
    return wrong;
}

int main(void)
{
    srand(1);
    for (int t = 0; t < TOKENS; t++)
        for (int e = 0; e < EXPERTS; e++) logits[t][e] = 4.0f * (float)rand() / (float)RAND_MAX - 2.0f;
    for (int e = 0; e < EXPERTS; e++) bias[e] = 0.2f * (float)rand() / (float)RAND_MAX - 0.1f;

    int wrong = report("cpu", on_cpu());
#if WITH_CUDA
    epmoe_backend_t backend;
    if (epmoe_backend_resolve(EPMOE_BACKEND_CUDA, &backend) == EPMOE_OK)
        wrong += report("cuda", on_gpu());
    else
        printf("cuda: skipped: %s\n", epmoe_last_error());
#endif
    return wrong ? EXIT_FAILURE : EXIT_SUCCESS;
}
