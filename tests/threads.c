/* Many threads at once, from the first call on: ops, layers of their own, errors, logs, and layers over ranks that are
 * threads. A program and not a Criterion test, so that ThreadSanitizer can watch it (launch/tsan.sh). */
#include "tests/thread_bootstrap.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kThreads = 4, kRanks = 3, kRounds = 20, kTokens = 5, kHidden = 24, kExperts = 7, kTopK = 3 };

static _Atomic int faults;
static _Atomic int logged;

#define EXPECT(condition)                                                                                              \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "line %d: %s: %s\n", __LINE__, #condition, epmoe_last_error());                            \
            faults++;                                                                                                  \
        }                                                                                                              \
    } while (0)

static void count_log(void *ctx, epmoe_log_level_t level, const char *message)
{
    (void)level, (void)message;
    ++*(_Atomic int *)ctx;
}

static epmoe_layer_config_t config(void)
{
    epmoe_layer_config_t config = EPMOE_LAYER_CONFIG_INIT;
    config.hidden = kHidden;
    config.intermediate = 16;
    config.num_experts = kExperts;
    config.top_k = kTopK;
    config.renormalize = 1;
    config.shared_intermediate = 8;
    config.dtype = EPMOE_F32;
    config.max_tokens = kTokens;
    return config;
}

static void fill(float *x, int32_t rank)
{
    testing_rng_t rng = testing_rng(1 + (uint64_t)rank);
    for (int32_t i = 0; i < kTokens * kHidden; i++) x[i] = testing_normal(&rng);
}

/* Every call of a bad op names its own values: the last error is the thread's. */
static void fail_once(int32_t thread, int32_t round)
{
    epmoe_topk_args_t topk = EPMOE_TOPK_ARGS_INIT;
    char text[32];
    topk.backend = EPMOE_BACKEND_CPU;
    topk.num_experts = kExperts;
    topk.top_k = 100 + thread * kRounds + round;
    snprintf(text, sizeof text, "top_k is %d", topk.top_k);
    EXPECT(epmoe_topk(&topk, NULL) == EPMOE_ERROR_INVALID_ARGUMENT);
    EXPECT(strstr(epmoe_last_error(), text));
}

/* What all threads must find, since their inputs are the same. */
static float expected[kTokens * kHidden];
static pthread_mutex_t expected_lock = PTHREAD_MUTEX_INITIALIZER;
static bool have_expected;

static void compare(const float *y)
{
    pthread_mutex_lock(&expected_lock);
    if (!have_expected) memcpy(expected, y, sizeof expected);
    have_expected = true;
    EXPECT(!memcmp(expected, y, sizeof expected));
    pthread_mutex_unlock(&expected_lock);
}

static void *work_alone(void *ctx)
{
    int32_t thread = (int32_t)(intptr_t)ctx;
    float x[kTokens * kHidden], y[kTokens * kHidden];
    epmoe_layer_config_t c = config();
    epmoe_layer_t *layer = NULL;
    fill(x, 0);
    for (int32_t round = 0; round < kRounds; round++) {
        if (round % 8 == 0) {
            epmoe_layer_destroy(layer);
            EXPECT(epmoe_layer_create(&c, NULL, &layer) == EPMOE_OK);
            EXPECT(epmoe_layer_set_random_weights(layer, 3) == EPMOE_OK);
        }
        EXPECT(epmoe_layer_forward(layer, x, y, kTokens, NULL) == EPMOE_OK);
        compare(y);
        fail_once(thread, round);
        epmoe_set_log(count_log, &logged);
    }
    epmoe_layer_destroy(layer);
    return NULL;
}

static void work_as_rank(void *ctx, epmoe_bootstrap_t bootstrap)
{
    (void)ctx;
    float x[kTokens * kHidden], y[kTokens * kHidden], first[kTokens * kHidden];
    bool have_first = false;
    epmoe_comm_t *comm = NULL;
    epmoe_layer_t *layer = NULL;
    epmoe_comm_config_t settings = EPMOE_COMM_CONFIG_INIT;
    epmoe_layer_config_t c = config();
    settings.backend = EPMOE_BACKEND_CPU;
    fill(x, bootstrap.rank);
    EXPECT(epmoe_comm_create(&bootstrap, &settings, &comm) == EPMOE_OK);
    EXPECT(epmoe_layer_create(&c, comm, &layer) == EPMOE_OK);
    EXPECT(epmoe_layer_set_random_weights(layer, 3) == EPMOE_OK);
    for (int32_t round = 0; round < kRounds; round++) {
        /* A slow rank and one without tokens change nothing for the others. */
        int32_t tokens = (round + bootstrap.rank) % 4 ? kTokens : 0;
        EXPECT(epmoe_layer_forward(layer, x, y, tokens, NULL) == EPMOE_OK);
        if (tokens && !have_first) memcpy(first, y, sizeof first);
        have_first = have_first || tokens;
        EXPECT(!tokens || !memcmp(first, y, sizeof first));
        fail_once(10 + bootstrap.rank, round);
    }
    epmoe_layer_destroy(layer);
    epmoe_comm_destroy(comm);
}

int main(void)
{
    pthread_t threads[kThreads];
    int64_t live = epmoei_alloc_live();
    for (int32_t i = 0; i < kThreads; i++)
        if (pthread_create(&threads[i], NULL, work_alone, (void *)(intptr_t)i)) abort();
    testing_ranks_t *ranks = testing_ranks_create(kRanks);
    testing_ranks_run(ranks, work_as_rank, NULL);
    testing_ranks_free(ranks);
    for (int32_t i = 0; i < kThreads; i++) pthread_join(threads[i], NULL);
    EXPECT(epmoei_alloc_live() == live);
    printf("%d threads and %d ranks: %d faults\n", kThreads, kRanks, faults);
    return faults ? EXIT_FAILURE : EXIT_SUCCESS;
}
