#include "tests/thread_bootstrap.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

typedef struct rank_t {
    struct testing_ranks *ranks;
    int32_t rank;
    /* all_gather: contributions of the last two rounds, since a fast rank may be one ahead */
    int64_t gather_round;
    void *gathered[2];
    int64_t gathered_bytes[2];
    /* exchange */
    int64_t round; /* exchanges begun */
    const epmoe_segment_t *sends, *recvs;
    int32_t num_sends, num_recvs;
    int64_t *taken; /* [size] the round of this rank's that rank r has copied */
} rank_t;

struct testing_ranks {
    int32_t size;
    int32_t released, released_failed;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    rank_t *all;
};

testing_ranks_t *testing_ranks_create(int32_t size)
{
    testing_ranks_t *ranks = calloc(1, sizeof *ranks);
    if (!ranks) abort();
    ranks->size = size;
    pthread_mutex_init(&ranks->lock, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&ranks->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    ranks->all = calloc((size_t)size, sizeof *ranks->all);
    if (!ranks->all) abort();
    for (int32_t r = 0; r < size; r++) {
        ranks->all[r] = (rank_t){.ranks = ranks, .rank = r, .taken = calloc((size_t)size, sizeof(int64_t))};
        if (!ranks->all[r].taken) abort();
    }
    return ranks;
}

void testing_ranks_free(testing_ranks_t *ranks)
{
    for (int32_t r = 0; r < ranks->size; r++) {
        free(ranks->all[r].taken);
        free(ranks->all[r].gathered[0]);
        free(ranks->all[r].gathered[1]);
    }
    pthread_cond_destroy(&ranks->changed);
    pthread_mutex_destroy(&ranks->lock);
    free(ranks->all);
    free(ranks);
}

int32_t testing_ranks_released(testing_ranks_t *ranks, int32_t *failed)
{
    if (failed) *failed = ranks->released_failed;
    return ranks->released;
}

static struct timespec deadline_in(double seconds)
{
    struct timespec deadline;
    clock_gettime(CLOCK_MONOTONIC, &deadline);
    int64_t ns = deadline.tv_nsec + (int64_t)(seconds * 1e9);
    deadline.tv_sec += ns / 1000000000;
    deadline.tv_nsec = ns % 1000000000;
    return deadline;
}

/* Waits under the lock until *value reaches `target`; false when the deadline passes first. */
static bool wait_for(testing_ranks_t *ranks, const int64_t *value, int64_t target, const struct timespec *deadline)
{
    while (*value < target)
        if (pthread_cond_timedwait(&ranks->changed, &ranks->lock, deadline)) return *value >= target;
    return true;
}

static int32_t all_gather(void *ctx, const void *send, void *recv, int64_t bytes, double timeout_s,
                          int32_t *failed_peer)
{
    rank_t *own = ctx;
    testing_ranks_t *ranks = own->ranks;
    struct timespec deadline = deadline_in(timeout_s);
    int32_t result = 0;
    pthread_mutex_lock(&ranks->lock);
    int64_t round = ++own->gather_round;
    int32_t place = (int32_t)(round & 1);
    free(own->gathered[place]);
    own->gathered[place] = malloc((size_t)bytes + 1);
    if (!own->gathered[place]) abort();
    memcpy(own->gathered[place], send, (size_t)bytes);
    own->gathered_bytes[place] = bytes;
    pthread_cond_broadcast(&ranks->changed);
    for (int32_t r = 0; r < ranks->size && !result; r++) {
        if (!wait_for(ranks, &ranks->all[r].gather_round, round, &deadline))
            result = 1;
        else if (ranks->all[r].gathered_bytes[place] != bytes)
            result = 2;
        if (result)
            *failed_peer = r;
        else
            memcpy((char *)recv + r * bytes, ranks->all[r].gathered[place], (size_t)bytes);
    }
    pthread_mutex_unlock(&ranks->lock);
    return result;
}

static int32_t exchange_begin(void *ctx, const epmoe_segment_t *sends, int32_t num_sends, const epmoe_segment_t *recvs,
                              int32_t num_recvs)
{
    rank_t *own = ctx;
    pthread_mutex_lock(&own->ranks->lock);
    own->sends = sends;
    own->num_sends = num_sends;
    own->recvs = recvs;
    own->num_recvs = num_recvs;
    own->round++;
    pthread_cond_broadcast(&own->ranks->changed);
    pthread_mutex_unlock(&own->ranks->lock);
    return 0;
}

/* Everything from one peer, in order; false when the two sides do not match. */
static bool take_from(rank_t *own, rank_t *peer)
{
    int32_t at = 0;
    for (int32_t i = 0; i < own->num_recvs; i++) {
        if (own->recvs[i].peer != peer->rank) continue;
        while (at < peer->num_sends && peer->sends[at].peer != own->rank) at++;
        if (at == peer->num_sends || peer->sends[at].bytes != own->recvs[i].bytes) return false;
        if (own->recvs[i].bytes) memcpy(own->recvs[i].data, peer->sends[at].data, (size_t)own->recvs[i].bytes);
        at++;
    }
    while (at < peer->num_sends && peer->sends[at].peer != own->rank) at++;
    return at == peer->num_sends;
}

/* Takes what is there. The first peer that has not sent, or not taken, everything; -1 when all is done; -2 when two
 * sides do not match. */
static int32_t advance(rank_t *own, int32_t *failed_peer)
{
    int32_t missing = -1;
    for (int32_t i = 0; i < own->num_recvs; i++) {
        rank_t *peer = &own->ranks->all[own->recvs[i].peer];
        if (peer->taken[own->rank] == own->round) continue;
        if (peer->round < own->round) {
            if (missing < 0) missing = peer->rank;
            continue;
        }
        *failed_peer = peer->rank;
        if (!take_from(own, peer)) return -2;
        peer->taken[own->rank] = own->round;
        pthread_cond_broadcast(&own->ranks->changed);
    }
    for (int32_t i = 0; i < own->num_sends && missing < 0; i++)
        if (own->taken[own->sends[i].peer] < own->round) missing = own->sends[i].peer;
    *failed_peer = missing;
    return missing;
}

static int32_t exchange_finish(void *ctx, double timeout_s, int32_t *failed_peer)
{
    rank_t *own = ctx;
    struct timespec deadline = deadline_in(timeout_s);
    pthread_mutex_lock(&own->ranks->lock);
    int32_t missing = advance(own, failed_peer);
    for (int late = 0; missing >= 0 && !late;) {
        late = pthread_cond_timedwait(&own->ranks->changed, &own->ranks->lock, &deadline);
        missing = advance(own, failed_peer);
    }
    pthread_mutex_unlock(&own->ranks->lock);
    return missing == -1 ? 0 : missing == -2 ? 2 : 1;
}

static void release(void *ctx, int32_t failed)
{
    rank_t *own = ctx;
    pthread_mutex_lock(&own->ranks->lock);
    own->ranks->released++;
    own->ranks->released_failed += failed != 0;
    pthread_mutex_unlock(&own->ranks->lock);
}

epmoe_bootstrap_t testing_ranks_bootstrap(testing_ranks_t *ranks, int32_t rank)
{
    return (epmoe_bootstrap_t){
        .struct_size = sizeof(epmoe_bootstrap_t),
        .rank = rank,
        .size = ranks->size,
        .ctx = &ranks->all[rank],
        .all_gather = all_gather,
        .exchange_begin = exchange_begin,
        .exchange_finish = exchange_finish,
        .release = release,
    };
}

typedef struct call_t {
    testing_ranks_t *ranks;
    int32_t rank;
    testing_rank_fn fn;
    void *ctx;
} call_t;

static void *call(void *argument)
{
    call_t *own = argument;
    own->fn(own->ctx, testing_ranks_bootstrap(own->ranks, own->rank));
    return NULL;
}

void testing_ranks_run(testing_ranks_t *ranks, testing_rank_fn fn, void *ctx)
{
    pthread_t *threads = calloc((size_t)ranks->size, sizeof *threads);
    call_t *calls = calloc((size_t)ranks->size, sizeof *calls);
    if (!threads || !calls) abort();
    for (int32_t r = 0; r < ranks->size; r++) {
        calls[r] = (call_t){ranks, r, fn, ctx};
        if (pthread_create(&threads[r], NULL, call, &calls[r])) abort();
    }
    for (int32_t r = 0; r < ranks->size; r++) pthread_join(threads[r], NULL);
    free(threads);
    free(calls);
}
