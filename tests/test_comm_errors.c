/* What goes wrong on one rank: every rank hears of it in time, nobody hangs, nothing leaks, and what can go on goes on.
 * Ranks are threads. */
#include "comm/comm.h"
#include "tests/exchange_case.h"
#include "tests/thread_bootstrap.h"

#include <criterion/criterion.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#define MAX_RANKS 8

/* What every rank saw, for the test to judge: Criterion's asserts belong to the main thread. */
typedef struct scene_t {
    exchange_case_t exchange;
    epmoe_status_t status[MAX_RANKS];
    char text[MAX_RANKS][512];
    int32_t variant;
    _Atomic int32_t faults;
} scene_t;

static void note(scene_t *scene, int32_t rank, epmoe_status_t status)
{
    scene->status[rank] = status;
    snprintf(scene->text[rank], sizeof scene->text[rank], "%s", status == EPMOE_OK ? "" : epmoe_last_error());
}

static scene_t small_scene(int32_t size)
{
    return (scene_t){.exchange = {.size = size,
                                  .num_experts = 10,
                                  .top_k = 3,
                                  .hidden = 16,
                                  .dtype = EPMOE_F32,
                                  .tokens = {6, 3, 9, 5, 0, 2, 7, 4},
                                  .seed = testing_seed()}};
}

/* Runs fn on all ranks; everything must be given back, and every bootstrap released once. */
static void play(scene_t *scene, testing_rank_fn fn, int32_t failed_releases)
{
    int64_t live = epmoei_alloc_live();
    testing_ranks_t *ranks = testing_ranks_create(scene->exchange.size);
    testing_ranks_run(ranks, fn, scene);
    int32_t failed, released = testing_ranks_released(ranks, &failed);
    testing_ranks_free(ranks);
    cr_assert_eq(scene->faults, 0);
    cr_assert_eq(released, scene->exchange.size);
    cr_assert_eq(failed, failed_releases);
    if (failed_releases == 0) cr_assert_eq(epmoei_alloc_live(), live, "memory was not given back");
}

static void expect(const scene_t *scene, int32_t bad_rank, epmoe_status_t own, epmoe_status_t others,
                   const char *others_text)
{
    for (int32_t r = 0; r < scene->exchange.size; r++) {
        cr_expect_eq(scene->status[r], r == bad_rank ? own : others, "variant %d rank %d: %s: %s", scene->variant, r,
                     epmoe_status_string(scene->status[r]), scene->text[r]);
        if (r != bad_rank)
            cr_expect(strstr(scene->text[r], others_text) != NULL, "rank %d says '%s', expected '%s'", r,
                      scene->text[r], others_text);
    }
}

static bool make(scene_t *scene, epmoe_bootstrap_t bootstrap, double timeout_s, epmoe_comm_t **comm, epmoe_ep_t **ep)
{
    epmoe_comm_config_t config = EPMOE_COMM_CONFIG_INIT;
    config.timeout_s = timeout_s;
    epmoe_ep_config_t ep_config = exchange_config(&scene->exchange, bootstrap.rank);
    *ep = NULL;
    if (epmoe_comm_create(&bootstrap, &config, comm) == EPMOE_OK && epmoe_ep_create(*comm, &ep_config, ep) == EPMOE_OK)
        return true;
    fprintf(stderr, "rank %d: %s\n", bootstrap.rank, epmoe_last_error());
    scene->faults++;
    epmoe_comm_destroy(*comm);
    return false;
}

static void unmake(epmoe_comm_t *comm, epmoe_ep_t *ep)
{
    epmoe_ep_destroy(ep);
    epmoe_comm_destroy(comm);
}

enum {
    BAD_ID,
    BAD_ID_LOW,
    MANY_TOKENS,
    NEGATIVE_TOKENS,
    NULL_X,
    NULL_IDS,
    NULL_WEIGHTS,
    NULL_ARGS,
    NULL_RESULT,
    BAD_STRUCT,
    REUSE_OTHER_T,
    REUSE_2,
    CALLER_FAILED,
    NUM_VARIANTS
};

static epmoe_status_t spoiled_dispatch(int32_t variant, epmoe_ep_t *ep, epmoe_dispatch_args_t *args)
{
    epmoe_dispatch_result_t rows = EPMOE_DISPATCH_RESULT_INIT, *result = &rows;
    const epmoe_dispatch_args_t *spoiled = args;
    int32_t *ids = (int32_t *)(uintptr_t)args->ids;
    switch (variant) {
    case BAD_ID: ids[args->num_tokens * 3 - 1] = 10; break;
    case BAD_ID_LOW: ids[1] = -2; break;
    case MANY_TOKENS: args->num_tokens = 1000; break;
    case NEGATIVE_TOKENS: args->num_tokens = -1; break;
    case NULL_X: args->x = NULL; break;
    case NULL_IDS: args->ids = NULL; break;
    case NULL_WEIGHTS: args->weights = NULL; break;
    case NULL_ARGS: spoiled = NULL; break;
    case NULL_RESULT: result = NULL; break;
    case BAD_STRUCT: rows.struct_size = 0; break;
    case REUSE_OTHER_T: args->reuse_routing = 1, args->num_tokens--; break;
    case REUSE_2: args->reuse_routing = 2; break;
    case CALLER_FAILED:
        return epmoei_dispatch_begin(ep, args, epmoei_fail(EPMOE_ERROR_IO, "the caller's own trouble"), NULL);
    default: break;
    }
    return epmoe_dispatch(ep, spoiled, result, NULL);
}

static void bad_dispatch(void *ctx, epmoe_bootstrap_t bootstrap)
{
    scene_t *scene = ctx;
    epmoe_comm_t *comm;
    epmoe_ep_t *ep;
    if (!make(scene, bootstrap, 0, &comm, &ep)) return;
    scene->faults += exchange_round(&scene->exchange, bootstrap.rank, ep, 0, NULL);

    exchange_inputs_t inputs = exchange_inputs(&scene->exchange, bootstrap.rank);
    epmoe_dispatch_args_t args = EPMOE_DISPATCH_ARGS_INIT;
    epmoe_dispatch_result_t rows = EPMOE_DISPATCH_RESULT_INIT;
    args.num_tokens = inputs.num_tokens, args.x = inputs.x, args.ids = inputs.ids, args.weights = inputs.weights;
    note(scene, bootstrap.rank,
         bootstrap.rank == 1 ? spoiled_dispatch(scene->variant, ep, &args) : epmoe_dispatch(ep, &args, &rows, NULL));
    scene->faults += rows.num_rows != NULL || rows.x != NULL; /* nothing was written */
    exchange_inputs_free(&inputs);
    inputs = exchange_inputs(&scene->exchange, bootstrap.rank);

    /* A dispatch that failed leaves no rows to combine and no routing to reuse, but the object works. */
    epmoe_combine_args_t combine = EPMOE_COMBINE_ARGS_INIT;
    scene->faults += epmoe_combine(ep, &combine, NULL) != EPMOE_ERROR_BAD_STATE;
    args.num_tokens = inputs.num_tokens, args.x = inputs.x, args.ids = inputs.ids, args.weights = inputs.weights;
    args.reuse_routing = 1;
    scene->faults += epmoe_dispatch(ep, &args, &rows, NULL) != EPMOE_ERROR_INVALID_ARGUMENT;
    exchange_inputs_free(&inputs);
    scene->faults += epmoe_comm_get_async_error(comm) != EPMOE_OK;
    scene->faults += exchange_round(&scene->exchange, bootstrap.rank, ep, 0, NULL);
    unmake(comm, ep);
}

Test(comm_errors, bad_dispatch_on_one_rank)
{
    for (int32_t variant = 0; variant < NUM_VARIANTS; variant++) {
        scene_t scene = small_scene(4);
        scene.variant = variant;
        play(&scene, bad_dispatch, 0);
        epmoe_status_t own = variant == CALLER_FAILED ? EPMOE_ERROR_IO : EPMOE_ERROR_INVALID_ARGUMENT;
        expect(&scene, 1, own, EPMOE_ERROR_PEER, "rank 1 failed");
        cr_expect(strstr(scene.text[0], scene.text[1]) != NULL, "'%s' does not quote '%s'", scene.text[0],
                  scene.text[1]);
    }
}

static void overflow(void *ctx, epmoe_bootstrap_t bootstrap)
{
    scene_t *scene = ctx;
    epmoe_comm_t *comm = NULL;
    epmoe_ep_t *ep = NULL;
    epmoe_ep_config_t config = exchange_config(&scene->exchange, bootstrap.rank);
    if (bootstrap.rank == 2) config.capacity = 11; /* one row less than the twelve to come */
    if (epmoe_comm_create(&bootstrap, NULL, &comm) || epmoe_ep_create(comm, &config, &ep)) scene->faults++;
    for (int32_t i = 0; i < 2 && ep; i++) {
        /* Experts 6..8 are rank 2's: three tokens of each of the four ranks, then two. */
        float x[3 * 16] = {0}, weights[9] = {1, 1, 1, 1, 1, 1, 1, 1, 1}, y[3 * 16];
        int32_t ids[9] = {6, 7, 8, 8, 7, 6, 7, 7, 7};
        epmoe_dispatch_args_t args = EPMOE_DISPATCH_ARGS_INIT;
        epmoe_dispatch_result_t rows = EPMOE_DISPATCH_RESULT_INIT;
        args.num_tokens = 3 - i, args.x = x, args.ids = ids, args.weights = weights;
        epmoe_status_t status = epmoe_dispatch(ep, &args, &rows, NULL);
        if (i == 0) {
            note(scene, bootstrap.rank, status);
            continue;
        }
        scene->faults += status != EPMOE_OK || *rows.num_rows != (bootstrap.rank == 2 ? 8 : 0);
        scene->faults += rows.max_rows != (bootstrap.rank == 2 ? 11 : 19);
        memset(rows.y, 0, (size_t)*rows.num_rows * 16 * 4);
        epmoe_combine_args_t combine = EPMOE_COMBINE_ARGS_INIT;
        combine.y = y;
        scene->faults += epmoe_combine(ep, &combine, NULL) != EPMOE_OK;
    }
    unmake(comm, ep);
}

Test(comm_errors, too_many_rows)
{
    scene_t scene = small_scene(4);
    for (int32_t r = 0; r < 8; r++) scene.exchange.tokens[r] = 4;
    scene.exchange.num_experts = 12; /* max_tokens: 4, 5, 6, 4 = 19 rows at most */
    play(&scene, overflow, 0);
    expect(&scene, -1, EPMOE_OK, EPMOE_ERROR_CAPACITY, "rank 2 would receive 12 rows, its capacity is 11");
}

/* -------------------------------------------------------------------------------------------------------- create */

static void create_objects(void *ctx, epmoe_bootstrap_t bootstrap)
{
    scene_t *scene = ctx;
    epmoe_comm_t *comm = NULL;
    epmoe_ep_t *ep = (epmoe_ep_t *)&comm;
    if (epmoe_comm_create(&bootstrap, NULL, &comm)) scene->faults++;
    epmoe_ep_config_t config = exchange_config(&scene->exchange, bootstrap.rank);
    if (bootstrap.rank == 3) switch (scene->variant) {
        case 0: config.hidden = 17; break;
        case 1: config.num_experts = 11; break;
        case 2: config.top_k = 2; break;
        case 3: config.dtype = EPMOE_BF16; break;
        case 4: config.hidden = 0; break;
        case 5: config.num_experts = 4097; break;
        case 6: config.top_k = 33; break;
        case 7: config.dtype = EPMOE_DTYPE_NONE; break;
        case 8: config.wire_dtype = EPMOE_F8_E8M0; break;
        case 9: config.max_tokens = -1; break;
        case 10: config.max_tokens = INT32_MAX; break;
        case 11: config.capacity = -1; break;
        case 12: config.wire_dtype = EPMOE_F8_E4M3; break;
        default: config.struct_size = 0; break;
        }
    note(scene, bootstrap.rank, epmoe_ep_create(comm, &config, &ep));
    scene->faults += ep != NULL;
    config = exchange_config(&scene->exchange, bootstrap.rank);
    scene->faults += epmoe_ep_create(comm, &config, &ep) != EPMOE_OK;
    if (ep) scene->faults += exchange_round(&scene->exchange, bootstrap.rank, ep, 0, NULL);
    unmake(comm, ep);
}

Test(comm_errors, configs_differ_or_are_bad)
{
    static const char *const mismatch[] = {
        "hidden is 16 on rank 0 and 17 on rank 3",
        "num_experts is 10 on rank 0 and 11 on rank 3",
        "top_k is 3 on rank 0 and 2 on rank 3",
        "dtype is 1 on rank 0 and 2 on rank 3",
    };
    for (int32_t variant = 0; variant <= 13; variant++) {
        scene_t scene = small_scene(4);
        scene.variant = variant;
        play(&scene, create_objects, 0);
        if (variant < 4)
            expect(&scene, -1, EPMOE_OK, EPMOE_ERROR_MISMATCH, mismatch[variant]);
        else if (variant == 12)
            expect(&scene, -1, EPMOE_OK, EPMOE_ERROR_MISMATCH, "wire_dtype is");
        else
            expect(&scene, 3, EPMOE_ERROR_INVALID_ARGUMENT, EPMOE_ERROR_PEER, "rank 3 failed");
    }
}

enum {
    TIMEOUTS_DIFFER,
    LOCAL_FOR_MANY,
    NCCL_EVERYWHERE,
    P2P_ON_ONE,
    NO_EXCHANGE,
    BAD_TIMEOUT,
    BAD_TRANSPORT,
    CUDA,
    NULL_COMM,
    NUM_COMM_VARIANTS
};

static void create_comm(void *ctx, epmoe_bootstrap_t bootstrap)
{
    scene_t *scene = ctx;
    epmoe_comm_config_t config = EPMOE_COMM_CONFIG_INIT;
    bool last = bootstrap.rank == bootstrap.size - 1;
    epmoe_comm_t *comm = (epmoe_comm_t *)&config, **out = &comm;
    switch (scene->variant) {
    case TIMEOUTS_DIFFER: config.timeout_s = last ? 2.5 : 3; break;
    case LOCAL_FOR_MANY: config.transport = EPMOE_TRANSPORT_LOCAL; break;
    case NCCL_EVERYWHERE: config.transport = EPMOE_TRANSPORT_NCCL; break;
    case P2P_ON_ONE: config.transport = last ? EPMOE_TRANSPORT_P2P : EPMOE_TRANSPORT_AUTO; break;
    case NO_EXCHANGE:
        if (last) bootstrap.exchange_finish = NULL;
        break;
    case BAD_TIMEOUT: config.timeout_s = last ? -1 : 0; break;
    case BAD_TRANSPORT: config.transport = last ? (epmoe_transport_t)9 : EPMOE_TRANSPORT_MPI; break;
    case CUDA: config.backend = EPMOE_BACKEND_CUDA; break;
    case NULL_COMM:
        if (last) out = NULL;
        break;
    default: break;
    }
    note(scene, bootstrap.rank, epmoe_comm_create(&bootstrap, &config, out));
    scene->faults += out && comm != NULL;
}

Test(comm_errors, communicators_that_cannot_be)
{
    static const struct {
        epmoe_status_t last, others;
        const char *text;
    } expected[NUM_COMM_VARIANTS] = {
        [TIMEOUTS_DIFFER] = {EPMOE_ERROR_MISMATCH, EPMOE_ERROR_MISMATCH, "timeout_s is 3 on rank 0 and 2.5 on rank 2"},
        [LOCAL_FOR_MANY] = {EPMOE_ERROR_INVALID_ARGUMENT, EPMOE_ERROR_INVALID_ARGUMENT, "size is 3"},
        [NCCL_EVERYWHERE] = {EPMOE_ERROR_NOT_SUPPORTED, EPMOE_ERROR_NOT_SUPPORTED, "nccl: it needs the CUDA backend"},
        [P2P_ON_ONE] = {EPMOE_ERROR_NOT_SUPPORTED, EPMOE_ERROR_PEER, "p2p: it needs the CUDA backend"},
        [NO_EXCHANGE] = {EPMOE_ERROR_NOT_SUPPORTED, EPMOE_ERROR_NOT_SUPPORTED, "rank 2 has no exchange"},
        [BAD_TIMEOUT] = {EPMOE_ERROR_INVALID_ARGUMENT, EPMOE_ERROR_PEER, "timeout_s is -1"},
        [BAD_TRANSPORT] = {EPMOE_ERROR_INVALID_ARGUMENT, EPMOE_ERROR_PEER, "transport is 9"},
        [CUDA] = {EPMOE_ERROR_NOT_SUPPORTED, EPMOE_ERROR_NOT_SUPPORTED, "cuda"},
        [NULL_COMM] = {EPMOE_ERROR_INVALID_ARGUMENT, EPMOE_ERROR_PEER, "comm is NULL"},
    };
    for (int32_t variant = 0; variant < NUM_COMM_VARIANTS; variant++) {
        scene_t scene = small_scene(3);
        scene.variant = variant;
        play(&scene, create_comm, 0);
        expect(&scene, 2, expected[variant].last, expected[variant].others, expected[variant].text);
    }
}

Test(comm_errors, bad_bootstraps)
{
    testing_ranks_t *ranks = testing_ranks_create(2);
    epmoe_comm_t *comm = NULL;
    for (int32_t variant = 0; variant < 5; variant++) {
        epmoe_bootstrap_t bootstrap = testing_ranks_bootstrap(ranks, 0);
        switch (variant) {
        case 0: bootstrap.size = 0; break;
        case 1: bootstrap.size = 1000000; break;
        case 2: bootstrap.rank = 2; break;
        case 3: bootstrap.rank = -1; break;
        default: bootstrap.all_gather = NULL; break;
        }
        cr_assert_eq(epmoe_comm_create(&bootstrap, NULL, &comm), EPMOE_ERROR_INVALID_ARGUMENT);
        cr_assert_null(comm);
        cr_assert_eq(testing_ranks_released(ranks, NULL), variant + 1);
    }
    testing_ranks_free(ranks);
    /* One rank over a bootstrap needs no callback, and may say that its transport is MPI. */
    epmoe_bootstrap_t alone = EPMOE_BOOTSTRAP_INIT;
    alone.size = 1;
    epmoe_comm_config_t config = EPMOE_COMM_CONFIG_INIT;
    config.transport = EPMOE_TRANSPORT_MPI;
    cr_assert_eq(epmoe_comm_create(&alone, &config, &comm), EPMOE_OK);
    cr_assert_eq(epmoe_comm_transport(comm), EPMOE_TRANSPORT_MPI);
    int32_t in = 77, out = 0;
    cr_assert_eq(epmoe_comm_all_gather(comm, &in, &out, 4), EPMOE_OK);
    cr_assert_eq(out, 77);
    cr_assert_eq(epmoe_comm_agree(comm, EPMOE_OK), EPMOE_OK);
    cr_assert_eq(epmoe_comm_agree(comm, EPMOE_ERROR_IO), EPMOE_ERROR_IO);
    epmoe_comm_destroy(comm);
    epmoe_comm_destroy(NULL);
    epmoe_ep_destroy(NULL);
}

static void create_without_memory(void *ctx, epmoe_bootstrap_t bootstrap)
{
    scene_t *scene = ctx;
    epmoe_comm_t *comm = NULL;
    epmoe_ep_t *ep = NULL;
    epmoe_ep_config_t config = exchange_config(&scene->exchange, bootstrap.rank);
    epmoe_status_t status = epmoe_comm_create(&bootstrap, NULL, &comm);
    if (status == EPMOE_OK) {
        status = epmoe_ep_create(comm, &config, &ep);
        scene->faults += (status == EPMOE_OK) != (ep != NULL);
    } else
        scene->faults += comm != NULL;
    note(scene, bootstrap.rank, status);
    unmake(comm, ep);
}

/* Allocations of all ranks count together, so that every rank's every allocation comes to fail once. */
Test(comm_errors, no_memory_on_one_rank)
{
    for (int64_t n = 1;; n++) {
        scene_t scene = small_scene(3);
        epmoei_alloc_fail_at(n);
        play(&scene, create_without_memory, 0);
        epmoei_alloc_fail_at(0);
        int32_t own = 0, peers = 0;
        for (int32_t r = 0; r < 3; r++) {
            own += scene.status[r] == EPMOE_ERROR_OUT_OF_MEMORY;
            peers += scene.status[r] == EPMOE_ERROR_PEER;
        }
        if (own == 0 && peers == 0) {
            cr_assert_eq(n, 3 * 4 + 1, "%lld allocations were expected to fail", (long long)n - 1);
            return;
        }
        cr_assert(own == 1 && peers == 2, "allocation %lld: %d without memory, %d told so", (long long)n, own, peers);
    }
}

typedef struct question_t {
    int32_t asked, over_at; /* over with so many questions; 0 = never */
    epmoe_status_t status;  /* what the over_at-th question gives */
} question_t;

static epmoe_status_t ask(void *ctx, bool *over)
{
    question_t *question = ctx;
    if (++question->asked != question->over_at) return EPMOE_OK;
    *over = question->status == EPMOE_OK;
    return question->status == EPMOE_OK ? EPMOE_OK : epmoei_fail(question->status, "the answer is no");
}

/* Waiting for something asynchronous: until it is over, fails or takes too long; then the communicator is done for. */
Test(comm_errors, waits)
{
    static const struct {
        question_t question;
        epmoe_status_t status;
        const char *message;
    } cases[] = {
        {{.over_at = 1}, EPMOE_OK, ""},
        {{.over_at = 40}, EPMOE_OK, ""},
        {{.over_at = 3, .status = EPMOE_ERROR_CUDA}, EPMOE_ERROR_CUDA, "a phase: the answer is no"},
        {{.over_at = 0}, EPMOE_ERROR_TIMEOUT, "a phase: rank 0 of 1 gave up after"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        epmoe_comm_config_t config = EPMOE_COMM_CONFIG_INIT;
        epmoe_comm_t *comm = NULL;
        config.timeout_s = 0.2;
        cr_assert_eq(epmoe_comm_create(NULL, &config, &comm), EPMOE_OK, "%s", epmoe_last_error());
        cr_assert_eq(epmoei_comm_enter(comm), EPMOE_OK);
        question_t question = cases[i].question;
        double start = epmoei_now_seconds();
        cr_assert_eq(epmoei_comm_wait(comm, "a phase", "nobody came", ask, &question), cases[i].status, "case %zu: %s",
                     i, epmoe_last_error());
        double waited = epmoei_now_seconds() - start;
        if (cases[i].question.over_at) cr_assert_eq(question.asked, cases[i].question.over_at);
        if (cases[i].status == EPMOE_OK) {
            cr_assert_eq(epmoei_comm_enter(comm), EPMOE_OK);
        } else {
            cr_assert(strstr(epmoe_last_error(), cases[i].message), "%s", epmoe_last_error());
            cr_assert_eq(epmoei_comm_enter(comm), EPMOE_ERROR_BAD_STATE);
        }
        if (cases[i].status == EPMOE_ERROR_TIMEOUT) {
            cr_assert(question.asked > 1 && waited >= 0.1, "%d questions in %g s", question.asked, waited);
        }
        epmoe_comm_destroy(comm);
        cr_assert_eq(epmoei_alloc_live(), 0);
    }
}
