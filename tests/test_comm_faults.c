/* Ranks that do not answer, transports that fail, calls out of order: errors in time, then BAD_STATE at once. Ranks are
 * threads. */
#include "comm/comm.h"
#include "tests/exchange_case.h"
#include "tests/thread_bootstrap.h"

#include <criterion/criterion.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#define SIZE      4
#define TIMEOUT_S 0.5

typedef struct scene_t {
    exchange_case_t exchange;
    int32_t variant;
    epmoe_status_t status[SIZE], after[SIZE];
    char text[SIZE][512], after_text[SIZE][1024];
    double seconds[SIZE], after_seconds[SIZE];
    _Atomic int32_t faults;
} scene_t;

static void play(scene_t *scene, int32_t variant, testing_rank_fn fn, int32_t failed_releases)
{
    scene->variant = variant;
    /* One draw, in which every rank has rows to exchange with rank 2: one that had none would not wait for it. */
    scene->exchange = (exchange_case_t){.size = SIZE,
                                        .num_experts = 9,
                                        .top_k = 3,
                                        .hidden = 40,
                                        .dtype = EPMOE_BF16,
                                        .tokens = {5, 8, 3, 6},
                                        .seed = 1};
    int64_t live = epmoei_alloc_live();
    testing_ranks_t *ranks = testing_ranks_create(SIZE);
    testing_ranks_run(ranks, fn, scene);
    int32_t failed, released = testing_ranks_released(ranks, &failed);
    testing_ranks_free(ranks);
    cr_assert_eq(scene->faults, 0);
    cr_assert_eq(released, SIZE);
    cr_assert_eq(failed, failed_releases);
    if (failed_releases == 0) cr_assert_eq(epmoei_alloc_live(), live, "memory was not given back");
}

static void note(scene_t *scene, int32_t rank, epmoe_status_t status)
{
    scene->status[rank] = status;
    snprintf(scene->text[rank], sizeof scene->text[rank], "%s", status == EPMOE_OK ? "" : epmoe_last_error());
}

static epmoe_status_t make(scene_t *scene, const epmoe_bootstrap_t *bootstrap, epmoe_comm_t **comm, epmoe_ep_t **ep)
{
    epmoe_comm_config_t config = EPMOE_COMM_CONFIG_INIT;
    config.timeout_s = TIMEOUT_S;
    epmoe_ep_config_t ep_config = exchange_config(&scene->exchange, bootstrap->rank);
    *ep = NULL;
    epmoe_status_t status = epmoe_comm_create(bootstrap, &config, comm);
    return status == EPMOE_OK ? epmoe_ep_create(*comm, &ep_config, ep) : status;
}

/* Dispatch, experts and combine up to `steps` of them. */
static epmoe_status_t run_steps(scene_t *scene, int32_t rank, epmoe_ep_t *ep, int32_t steps, void *y)
{
    exchange_inputs_t inputs = exchange_inputs(&scene->exchange, rank);
    epmoe_dispatch_args_t args = EPMOE_DISPATCH_ARGS_INIT;
    epmoe_dispatch_result_t rows = EPMOE_DISPATCH_RESULT_INIT;
    args.num_tokens = inputs.num_tokens, args.x = inputs.x, args.ids = inputs.ids, args.weights = inputs.weights;
    epmoe_status_t status = EPMOE_OK;
    if (steps > 0) status = epmoe_dispatch(ep, &args, &rows, NULL);
    if (status == EPMOE_OK && steps > 1) {
        exchange_experts(&scene->exchange, rank, epmoe_ep_partial_dtype(ep), &rows);
        epmoe_combine_args_t combine = EPMOE_COMBINE_ARGS_INIT;
        combine.y = y;
        status = epmoe_combine(ep, &combine, NULL);
    }
    exchange_inputs_free(&inputs);
    return status;
}

enum { ABSENT_FROM_COMM, ABSENT_FROM_EP, ABSENT_FROM_DISPATCH, ABSENT_FROM_COMBINE, ABSENT_FROM_AGREE, NUM_ABSENCES };

static void absent_rank(void *ctx, epmoe_bootstrap_t bootstrap)
{
    scene_t *scene = ctx;
    int32_t rank = bootstrap.rank, variant = scene->variant;
    bool absent = rank == 2;
    epmoe_comm_t *comm = NULL;
    epmoe_ep_t *ep = NULL;
    epmoe_comm_config_t config = EPMOE_COMM_CONFIG_INIT;
    epmoe_ep_config_t ep_config = exchange_config(&scene->exchange, rank);
    config.timeout_s = TIMEOUT_S;
    epmoe_status_t status = EPMOE_OK;
    char *y = testing_buffer(8 * 40 * 2, 0);
    if (absent && variant == ABSENT_FROM_COMM) {
        bootstrap.release(bootstrap.ctx, 0);
        testing_buffer_free(y);
        return;
    }
    double start = epmoei_now_seconds();
    if (variant == ABSENT_FROM_COMM) status = epmoe_comm_create(&bootstrap, &config, &comm);
    if (variant != ABSENT_FROM_COMM) scene->faults += epmoe_comm_create(&bootstrap, &config, &comm) != EPMOE_OK;
    if (variant >= ABSENT_FROM_DISPATCH) scene->faults += epmoe_ep_create(comm, &ep_config, &ep) != EPMOE_OK;
    if (variant == ABSENT_FROM_COMBINE) /* one round before, and this one's rows are here */
        scene->faults += run_steps(scene, rank, ep, 2, y) || run_steps(scene, rank, ep, 1, y);
    if (!absent && variant != ABSENT_FROM_COMM) {
        start = epmoei_now_seconds();
        epmoe_combine_args_t combine = EPMOE_COMBINE_ARGS_INIT;
        char *untouched = testing_buffer(8 * 40 * 2, 0);
        combine.y = untouched;
        switch (variant) {
        case ABSENT_FROM_EP: status = epmoe_ep_create(comm, &ep_config, &ep); break;
        case ABSENT_FROM_DISPATCH: status = run_steps(scene, rank, ep, 2, untouched); break;
        case ABSENT_FROM_COMBINE: status = epmoe_combine(ep, &combine, NULL); break;
        default: status = epmoe_comm_agree(comm, EPMOE_OK); break;
        }
        scene->faults += !testing_is_poison(untouched, 0, 8 * 40 * 2);
        testing_buffer_free(untouched);
    }
    scene->seconds[rank] = epmoei_now_seconds() - start;
    note(scene, rank, status);

    start = epmoei_now_seconds();
    if (!absent && comm) {
        scene->faults += epmoe_comm_get_async_error(comm) != EPMOE_ERROR_TIMEOUT;
        if (ep) scene->faults += run_steps(scene, rank, ep, 2, y) != EPMOE_ERROR_BAD_STATE;
        scene->after[rank] = epmoe_comm_agree(comm, EPMOE_OK);
        snprintf(scene->after_text[rank], sizeof scene->after_text[rank], "%s", epmoe_last_error());
    }
    epmoe_ep_destroy(ep);
    epmoe_comm_destroy(comm);
    scene->after_seconds[rank] = epmoei_now_seconds() - start;
    testing_buffer_free(y);
}

Test(comm_faults, rank_that_never_comes)
{
    static const char *const phases[] = {"communicator", "dispatch config", "dispatch (headers)", "combine", "agree"};
    for (int32_t variant = 0; variant < NUM_ABSENCES; variant++) {
        scene_t scene = {0};
        play(&scene, variant, absent_rank, SIZE - 1);
        for (int32_t r = 0; r < SIZE; r++) {
            cr_expect_lt(scene.after_seconds[r], 0.1, "rank %d took %g s after the failure", r, scene.after_seconds[r]);
            if (r == 2) continue;
            cr_expect_eq(scene.status[r], EPMOE_ERROR_TIMEOUT, "variant %d rank %d: %s", variant, r, scene.text[r]);
            cr_expect(scene.seconds[r] >= 0.8 * TIMEOUT_S && scene.seconds[r] <= TIMEOUT_S + 0.05, "rank %d: %g s", r,
                      scene.seconds[r]);
            char own[64];
            snprintf(own, sizeof own, "rank %d of %d gave up", r, SIZE);
            cr_expect(strstr(scene.text[r], phases[variant]) && strstr(scene.text[r], own) &&
                          strstr(scene.text[r], "no answer from rank 2"),
                      "rank %d says: %s", r, scene.text[r]);
            if (variant == ABSENT_FROM_COMM) continue;
            cr_expect_eq(scene.after[r], EPMOE_ERROR_BAD_STATE);
            cr_expect(strstr(scene.after_text[r], scene.text[r]), "'%s' does not say '%s'", scene.after_text[r],
                      scene.text[r]);
        }
    }
}

static int32_t broken_finish(void *ctx, double timeout_s, int32_t *failed_peer)
{
    (void)ctx, (void)timeout_s;
    *failed_peer = 1;
    return 2;
}

static int32_t broken_begin(void *ctx, const epmoe_segment_t *sends, int32_t num_sends, const epmoe_segment_t *recvs,
                            int32_t num_recvs)
{
    (void)ctx, (void)sends, (void)num_sends, (void)recvs, (void)num_recvs;
    epmoe_set_last_error(EPMOE_ERROR_TRANSPORT, "the cable is out");
    return 2;
}

static void broken_transport(void *ctx, epmoe_bootstrap_t bootstrap)
{
    scene_t *scene = ctx;
    if (scene->variant == 0)
        bootstrap.exchange_finish = broken_finish;
    else
        bootstrap.exchange_begin = broken_begin;
    epmoe_comm_t *comm = NULL;
    epmoe_ep_t *ep = NULL;
    scene->faults += make(scene, &bootstrap, &comm, &ep) != EPMOE_OK;
    note(scene, bootstrap.rank, run_steps(scene, bootstrap.rank, ep, 1, NULL));
    scene->faults += epmoe_comm_get_async_error(comm) != EPMOE_ERROR_TRANSPORT;
    scene->faults += run_steps(scene, bootstrap.rank, ep, 1, NULL) != EPMOE_ERROR_BAD_STATE;
    epmoe_ep_destroy(ep);
    epmoe_comm_destroy(comm);
}

Test(comm_faults, transport_fails)
{
    for (int32_t variant = 0; variant < 2; variant++) {
        scene_t scene = {0};
        play(&scene, variant, broken_transport, SIZE);
        for (int32_t r = 0; r < SIZE; r++) {
            cr_expect_eq(scene.status[r], EPMOE_ERROR_TRANSPORT);
            cr_expect(strstr(scene.text[r], variant ? "the cable is out" : "with rank 1"), "%s", scene.text[r]);
        }
    }
}

enum {
    TWO_OBJECTS,
    REUSE_ON_SOME,
    COMBINE_WITHOUT_Y,
    COMBINE_TWICE,
    DROPPED_DISPATCH,
    OTHER_COLLECTIVE,
    BETWEEN_HALVES,
    NUM_ORDERS
};

static void odd_order(void *ctx, epmoe_bootstrap_t bootstrap)
{
    scene_t *scene = ctx;
    int32_t rank = bootstrap.rank;
    epmoe_comm_t *comm = NULL;
    epmoe_ep_t *ep = NULL, *other = NULL;
    epmoe_ep_config_t config = exchange_config(&scene->exchange, rank);
    uint16_t y[8 * 40];
    scene->faults += make(scene, &bootstrap, &comm, &ep) != EPMOE_OK;
    scene->faults += epmoe_ep_create(comm, &config, &other) != EPMOE_OK;
    scene->faults += run_steps(scene, rank, ep, 2, y) != EPMOE_OK;
    exchange_inputs_t inputs = exchange_inputs(&scene->exchange, rank);
    epmoe_dispatch_args_t args = EPMOE_DISPATCH_ARGS_INIT;
    epmoe_dispatch_result_t rows = EPMOE_DISPATCH_RESULT_INIT;
    epmoe_combine_args_t combine = EPMOE_COMBINE_ARGS_INIT;
    args.num_tokens = inputs.num_tokens, args.x = inputs.x, args.ids = inputs.ids, args.weights = inputs.weights;
    combine.y = y;

    epmoe_status_t status = EPMOE_OK;
    switch (scene->variant) {
    case TWO_OBJECTS: status = run_steps(scene, rank, rank == 1 ? other : ep, 2, y); break;
    case REUSE_ON_SOME:
        args.reuse_routing = rank == 3;
        status = epmoe_dispatch(ep, &args, &rows, NULL);
        break;
    case COMBINE_WITHOUT_Y: status = run_steps(scene, rank, ep, 2, rank == 1 ? NULL : y); break;
    case COMBINE_TWICE: status = epmoe_combine(ep, &combine, NULL); break;
    case DROPPED_DISPATCH: status = run_steps(scene, rank, ep, 1, y); break;
    case OTHER_COLLECTIVE:
        if (rank == 0)
            status = epmoe_ep_create(comm, &config, &(epmoe_ep_t *){NULL});
        else
            status = epmoe_comm_agree(comm, EPMOE_OK);
        break;
    case BETWEEN_HALVES:
        scene->faults += epmoei_dispatch_begin(ep, &args, EPMOE_OK, NULL) != EPMOE_OK;
        status = epmoe_comm_agree(comm, EPMOE_OK);
        note(scene, rank, status);
        scene->faults += run_steps(scene, rank, other, 2, y) != EPMOE_ERROR_BAD_STATE;
        scene->faults += epmoei_dispatch_finish(other, &rows, NULL) != EPMOE_ERROR_BAD_STATE;
        scene->faults += epmoei_dispatch_finish(ep, &rows, NULL) != EPMOE_OK;
        break;
    default: break;
    }
    if (scene->variant != BETWEEN_HALVES) note(scene, rank, status);
    exchange_inputs_free(&inputs);

    scene->faults += epmoe_comm_get_async_error(comm) != EPMOE_OK;
    scene->faults += exchange_round(&scene->exchange, rank, ep, 0, NULL);
    scene->faults += exchange_round(&scene->exchange, rank, other, 0, NULL);
    epmoe_ep_destroy(ep);
    epmoe_ep_destroy(other);
    epmoe_comm_destroy(comm);
}

Test(comm_faults, calls_out_of_order)
{
    static const struct {
        epmoe_status_t common, special;
        int32_t special_rank;
        const char *text;
    } expected[NUM_ORDERS] = {
        [TWO_OBJECTS] = {EPMOE_ERROR_MISMATCH, EPMOE_ERROR_MISMATCH, -1, "rank 1 in number 1 on 1"},
        [REUSE_ON_SOME] = {EPMOE_ERROR_MISMATCH, EPMOE_ERROR_MISMATCH, -1,
                           "reuse_routing is 0 on rank 0 and 1 on rank"},
        [COMBINE_WITHOUT_Y] = {EPMOE_OK, EPMOE_ERROR_INVALID_ARGUMENT, 1, ""},
        [COMBINE_TWICE] = {EPMOE_ERROR_BAD_STATE, EPMOE_ERROR_BAD_STATE, -1, "no dispatch to bring home"},
        [DROPPED_DISPATCH] = {EPMOE_OK, EPMOE_OK, -1, ""},
        [OTHER_COLLECTIVE] = {EPMOE_ERROR_MISMATCH, EPMOE_ERROR_MISMATCH, -1, "rank 0 is in 'dispatch config'"},
        [BETWEEN_HALVES] = {EPMOE_ERROR_BAD_STATE, EPMOE_ERROR_BAD_STATE, -1, "halves of another call"},
    };
    for (int32_t variant = 0; variant < NUM_ORDERS; variant++) {
        scene_t scene = {0};
        play(&scene, variant, odd_order, 0);
        for (int32_t r = 0; r < SIZE; r++) {
            epmoe_status_t status =
                r == expected[variant].special_rank ? expected[variant].special : expected[variant].common;
            cr_expect_eq(scene.status[r], status, "variant %d rank %d: %s", variant, r, scene.text[r]);
            cr_expect(strstr(scene.text[r], expected[variant].text), "variant %d rank %d: %s", variant, r,
                      scene.text[r]);
        }
    }
}

static void agree(void *ctx, epmoe_bootstrap_t bootstrap)
{
    scene_t *scene = ctx;
    int32_t rank = bootstrap.rank, own[3] = {rank, rank * 10, rank * 100}, all[SIZE * 3] = {0};
    epmoe_comm_t *comm = NULL;
    scene->faults += epmoe_comm_create(&bootstrap, NULL, &comm) != EPMOE_OK;
    scene->faults += epmoe_comm_agree(comm, EPMOE_OK) != EPMOE_OK;
    epmoe_status_t local = EPMOE_OK;
    if (rank == 1 || rank == 3) local = epmoei_fail(EPMOE_ERROR_FORMAT, "trouble of rank %d", rank);
    note(scene, rank, epmoe_comm_agree(comm, local));
    scene->faults += epmoe_comm_all_gather(comm, own, all, sizeof own) != EPMOE_OK;
    for (int32_t r = 0; r < SIZE; r++)
        scene->faults += all[3 * r] != r || all[3 * r + 1] != r * 10 || all[3 * r + 2] != r * 100;
    scene->faults += epmoe_comm_all_gather(comm, NULL, NULL, 0) != EPMOE_OK;
    scene->faults += epmoe_comm_all_gather(comm, own, all, -1) != EPMOE_ERROR_INVALID_ARGUMENT;
    scene->faults += epmoe_comm_all_gather(comm, own, NULL, 4) != EPMOE_ERROR_INVALID_ARGUMENT;

    const epmoei_agreed_t fields[] = {{"alpha", rank == 2 ? 1.5 : 1.702}, {NULL, rank}};
    scene->faults += epmoei_comm_agree_on(comm, "layer config", EPMOE_OK, fields + 1, 1) != EPMOE_OK;
    for (int32_t r = 0; r < SIZE; r++) scene->faults += epmoei_comm_agreed_value(comm, r, 0) != r;
    scene->faults += epmoei_comm_agree_on(comm, "layer config", EPMOE_OK, fields, 2) != EPMOE_ERROR_MISMATCH;
    scene->faults += strcmp(epmoe_last_error(), "layer config: alpha is 1.702 on rank 0 and 1.5 on rank 2") != 0;
    epmoe_comm_destroy(comm);
}

Test(comm_faults, agree)
{
    scene_t scene = {0};
    play(&scene, 0, agree, 0);
    for (int32_t r = 0; r < SIZE; r++) {
        cr_expect_eq(scene.status[r], r % 2 ? EPMOE_ERROR_FORMAT : EPMOE_ERROR_PEER);
        char own[32];
        snprintf(own, sizeof own, "trouble of rank %d", r % 2 ? r : 1);
        cr_expect(strstr(scene.text[r], own), "rank %d: %s", r, scene.text[r]);
    }
    cr_expect_str_eq(scene.text[0], "agree: rank 1 failed (file content is invalid): trouble of rank 1");
}
