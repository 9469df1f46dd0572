/* Dispatch and combine over ranks that are threads: every row arrives where it must, in order, and comes home. */
#include "comm/comm.h"
#include "tests/exchange_case.h"
#include "tests/thread_bootstrap.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct run_t {
    exchange_case_t exchange;
    int32_t rounds; /* each with the routing of the first one reused in between */
    void *y[8];     /* optional: rank r's output of the last round */
    _Atomic int32_t faults;
} run_t;

static void run_rank(void *ctx, epmoe_bootstrap_t bootstrap)
{
    run_t *run = ctx;
    const exchange_case_t *c = &run->exchange;
    epmoe_comm_t *comm = NULL;
    epmoe_ep_t *ep = NULL;
    epmoe_ep_config_t config = exchange_config(c, bootstrap.rank);
    if (epmoe_comm_create(&bootstrap, NULL, &comm) || epmoe_ep_create(comm, &config, &ep)) {
        fprintf(stderr, "rank %d: %s\n", bootstrap.rank, epmoe_last_error());
        run->faults++;
        epmoe_comm_destroy(comm);
        return;
    }
    for (int32_t i = 0; i < run->rounds; i++)
        run->faults += exchange_round(c, bootstrap.rank, ep, i % 2, bootstrap.rank < 8 ? run->y[bootstrap.rank] : NULL);
    epmoe_ep_destroy(ep);
    epmoe_comm_destroy(comm);
}

static void run_case(run_t *run)
{
    int64_t live = epmoei_alloc_live();
    testing_ranks_t *ranks = testing_ranks_create(run->exchange.size);
    testing_ranks_run(ranks, run_rank, run);
    int32_t failed, released = testing_ranks_released(ranks, &failed);
    testing_ranks_free(ranks);
    const exchange_case_t *c = &run->exchange;
    cr_assert_eq(run->faults, 0, "R=%d E=%d k=%d d=%d %s: %d faults", c->size, c->num_experts, c->top_k, c->hidden,
                 epmoe_dtype_string(c->dtype), run->faults);
    cr_assert_eq(released, c->size);
    cr_assert_eq(failed, 0);
    cr_assert_eq(epmoei_alloc_live(), live, "memory was not given back");
}

Test(comm, every_expert_has_one_owner)
{
    for (int32_t size = 1; size <= 9; size++)
        for (int32_t experts = 0; experts <= 130; experts++) {
            int32_t next = 0;
            for (int32_t rank = 0; rank < size; rank++) {
                int32_t first = -1, count = -1;
                cr_assert_eq(epmoe_expert_range(experts, size, rank, &first, &count), EPMOE_OK);
                cr_assert_eq(first, next);
                cr_assert(count == experts / size + (rank < experts % size ? 1 : 0));
                for (int32_t e = first; e < first + count; e++) cr_assert_eq(exchange_owner(experts, size, e), rank);
                next = first + count;
            }
            cr_assert_eq(next, experts);
        }
    int32_t first = 7, count = 7;
    cr_assert_eq(epmoe_expert_range(8, 0, 0, &first, &count), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert_eq(epmoe_expert_range(8, 2, 2, &first, &count), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert_eq(epmoe_expert_range(8, 2, -1, &first, &count), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert_eq(epmoe_expert_range(-1, 2, 0, &first, &count), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert_eq(epmoe_expert_range(8, 2, 0, NULL, &count), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert(first == 7 && count == 7);
}

Test(comm, random_cases)
{
    testing_rng_t rng = testing_rng(testing_seed());
    static const int32_t sizes[] = {1, 2, 3, 5, 8};
    static const epmoe_dtype_t dtypes[] = {EPMOE_F32, EPMOE_BF16, EPMOE_F16};
    for (int32_t i = 0; i < 45; i++) {
        run_t run = {.rounds = 3};
        exchange_case_t *c = &run.exchange;
        c->size = sizes[i % 5];
        c->dtype = dtypes[i / 5 % 3];
        c->num_experts = testing_range(&rng, 1, i % 4 == 0 ? 6 : 64); /* also fewer than ranks */
        c->top_k = testing_range(&rng, 1, 10);                        /* also more than experts */
        c->hidden = testing_range(&rng, 1, 300);
        c->seed = testing_next(&rng);
        for (int32_t r = 0; r < 8; r++) c->tokens[r] = testing_range(&rng, 0, 3) ? testing_range(&rng, 1, 40) : 0;
        run_case(&run);
    }
}

Test(comm, uneven_experts)
{
    static const int32_t shapes[][2] = {{30, 8}, {128, 6}, {4, 8}, {1, 8}, {4096, 3}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        run_t run = {.rounds = 2,
                     .exchange = {.size = shapes[i][1],
                                  .num_experts = shapes[i][0],
                                  .top_k = 4,
                                  .hidden = 24,
                                  .dtype = EPMOE_F32,
                                  .tokens = {17, 3, 0, 40, 9, 1, 30, 12},
                                  .seed = testing_seed()}};
        run_case(&run);
    }
}

/* Weights that sum to 1 over experts that return x give x back, bit for bit, whatever the row's width. */
Test(comm, identity_is_exact_at_model_widths)
{
    static const int32_t widths[] = {96, 1440, 2056, 2880, 3584, 6144, 7168};
    for (size_t i = 0; i < sizeof widths / sizeof widths[0]; i++) {
        run_t run = {.rounds = 1,
                     .exchange = {.size = 8,
                                  .num_experts = 64,
                                  .top_k = 8,
                                  .hidden = widths[i],
                                  .dtype = EPMOE_BF16,
                                  .tokens = {1, 0, 257, 3, 64, 0, 5, 128},
                                  .seed = testing_seed(),
                                  .identity = true,
                                  .plain = true}};
        run_case(&run);
    }
}

/* Partial rows beyond fp16's largest that cancel at home. */
Test(comm, fp16_rows_do_not_overflow_on_their_way)
{
    static const int32_t sizes[] = {1, 2, 3, 8};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        run_t run = {.rounds = 2, .exchange = exchange_large_case(sizes[i], 20, testing_seed())};
        run_case(&run);
    }
}

/* A rank without tokens takes part; a rank that no token is sent to gets its own tokens back; nobody has any. */
Test(comm, empty_ranks)
{
    const exchange_case_t cases[] = {
        {.size = 4, .num_experts = 24, .top_k = 6, .hidden = 32, .tokens = {0, 4, 4, 4}, .last_id = 5, .plain = true},
        {.size = 4, .num_experts = 24, .top_k = 6, .hidden = 32, .tokens = {5, 4, 6, 4}, .first_id = 18, .last_id = 23},
        {.size = 4, .num_experts = 24, .top_k = 6, .hidden = 32},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        run_t run = {.exchange = cases[i], .rounds = 100};
        run.exchange.dtype = EPMOE_BF16;
        run.exchange.seed = testing_seed();
        double start = epmoei_now_seconds();
        run_case(&run);
        cr_assert_lt(epmoei_now_seconds() - start, 20.0);
    }
}

Test(comm, same_bits_on_every_run)
{
    void *y[2][8];
    for (int32_t i = 0; i < 2; i++) {
        run_t run = {.rounds = 2 - i, /* the second run of the first case reuses its routing */
                     .exchange = {.size = 5,
                                  .num_experts = 20,
                                  .top_k = 6,
                                  .hidden = 515,
                                  .dtype = EPMOE_BF16,
                                  .tokens = {30, 8, 0, 61, 15},
                                  .seed = testing_seed()}};
        for (int32_t r = 0; r < 8; r++) run.y[r] = y[i][r] = testing_buffer(61 * 515 * 2, 0);
        run_case(&run);
    }
    for (int32_t r = 0; r < 8; r++) {
        cr_assert_eq(memcmp(y[0][r], y[1][r], 61 * 515 * 2), 0, "rank %d", r);
        testing_buffer_free(y[0][r]);
        testing_buffer_free(y[1][r]);
    }
}

typedef struct twice_t {
    _Atomic int32_t faults;
} twice_t;

/* ids [3,3,1,0], weights [.25,.25,.3,.2], expert e = (e+1)x: (1 + 1 + .6 + .2) x = 2.8 x */
static void same_expert_twice(void *ctx, epmoe_bootstrap_t bootstrap)
{
    twice_t *twice = ctx;
    enum { T = 9, D = 5 };
    exchange_case_t c = {.size = bootstrap.size,
                         .num_experts = 4,
                         .top_k = 4,
                         .hidden = D,
                         .dtype = EPMOE_F32,
                         .tokens = {T, T, T, T, T, T, T, T}};
    float x[T * D], y[T * D], weights[T * 4];
    int32_t ids[T * 4];
    for (int32_t i = 0; i < T * D; i++) x[i] = (float)(i + 1 + bootstrap.rank), y[i] = NAN;
    for (int32_t i = 0; i < T * 4; i++) {
        ids[i] = (const int32_t[]){3, 3, 1, 0}[i % 4];
        weights[i] = (const float[]){0.25f, 0.25f, 0.3f, 0.2f}[i % 4];
    }
    epmoe_comm_t *comm = NULL;
    epmoe_ep_t *ep = NULL;
    epmoe_ep_config_t config = exchange_config(&c, bootstrap.rank);
    epmoe_dispatch_args_t dispatch = EPMOE_DISPATCH_ARGS_INIT;
    epmoe_dispatch_result_t rows = EPMOE_DISPATCH_RESULT_INIT;
    epmoe_combine_args_t combine = EPMOE_COMBINE_ARGS_INIT;
    dispatch.num_tokens = T, dispatch.x = x, dispatch.ids = ids, dispatch.weights = weights;
    combine.y = y;
    if (epmoe_comm_create(&bootstrap, NULL, &comm) || epmoe_ep_create(comm, &config, &ep) ||
        epmoe_dispatch(ep, &dispatch, &rows, NULL))
        twice->faults++;
    else {
        exchange_experts(&c, bootstrap.rank, EPMOE_F32, &rows);
        twice->faults += epmoe_combine(ep, &combine, NULL) != EPMOE_OK;
        for (int32_t i = 0; i < T * D; i++)
            twice->faults += !(fabs((double)y[i] - 2.8 * (double)x[i]) <= 1e-5 * (double)x[i]);
    }
    epmoe_ep_destroy(ep);
    epmoe_comm_destroy(comm);
}

Test(comm, same_expert_twice)
{
    for (int32_t size = 1; size <= 5; size++) {
        twice_t twice = {0};
        testing_ranks_t *ranks = testing_ranks_create(size);
        testing_ranks_run(ranks, same_expert_twice, &twice);
        testing_ranks_free(ranks);
        cr_assert_eq(twice.faults, 0, "R=%d", size);
    }
}

/* One rank needs no bootstrap and copies nothing: what it "receives" is the caller's own. */
Test(comm, one_rank_hands_the_tokens_through)
{
    int64_t live = epmoei_alloc_live();
    epmoe_comm_t *comm = NULL;
    epmoe_ep_t *ep = NULL;
    cr_assert_eq(epmoe_comm_create(NULL, NULL, &comm), EPMOE_OK);
    cr_assert_eq(epmoe_comm_rank(comm), 0);
    cr_assert_eq(epmoe_comm_size(comm), 1);
    cr_assert_eq(epmoe_comm_transport(comm), EPMOE_TRANSPORT_LOCAL);
    epmoe_ep_config_t config = EPMOE_EP_CONFIG_INIT;
    config.num_experts = 3, config.top_k = 2, config.hidden = 2, config.max_tokens = 4, config.dtype = EPMOE_BF16;
    cr_assert_eq(epmoe_ep_create(comm, &config, &ep), EPMOE_OK);
    cr_assert_eq(epmoe_ep_partial_dtype(ep), EPMOE_F32);

    const uint16_t x[4] = {0x3F80, 0x4000, 0x4040, 0x4080};
    const int32_t ids[4] = {2, -1, -1, -1};
    const float weights[4] = {1, 2, 3, 4};
    uint16_t y[4] = {0x3F80, 0x3F80, 0x4000, 0x4000}; /* 1 1 2 2, as residual */
    const float shared[4] = {0.5f, 0, 0, 1};
    epmoe_dispatch_args_t dispatch = EPMOE_DISPATCH_ARGS_INIT;
    epmoe_dispatch_result_t rows = EPMOE_DISPATCH_RESULT_INIT;
    dispatch.num_tokens = 2, dispatch.x = x, dispatch.ids = ids, dispatch.weights = weights;
    cr_assert_eq(epmoe_dispatch(ep, &dispatch, &rows, NULL), EPMOE_OK);
    cr_assert_eq(*rows.num_rows, 2);
    cr_assert_eq(rows.max_rows, 4);
    cr_assert(rows.x == x && rows.ids == ids && rows.weights == weights);
    memcpy(rows.y, (const float[]){10, 20, 0, 0}, 16);
    epmoe_combine_args_t combine = EPMOE_COMBINE_ARGS_INIT;
    combine.shared = shared, combine.residual = y, combine.y = y;
    cr_assert_eq(epmoe_combine(ep, &combine, NULL), EPMOE_OK);
    const float expected[4] = {11.5f, 21, 2, 3};
    for (int32_t i = 0; i < 4; i++) cr_assert_eq(epmoei_load(y, EPMOE_BF16, i), expected[i]);
    cr_assert_eq(epmoei_ep_wire_bytes(ep), 0);
    epmoe_ep_destroy(ep);
    epmoe_comm_destroy(comm);
    cr_assert_eq(epmoei_alloc_live(), live);
}

/* More tokens than the capacity, and halves of a dispatch out of order; then all goes on. */
Test(comm, one_rank_out_of_order)
{
    int64_t live = epmoei_alloc_live();
    epmoe_comm_t *comm = NULL;
    epmoe_ep_t *ep = NULL;
    cr_assert_eq(epmoe_comm_create(NULL, NULL, &comm), EPMOE_OK);
    epmoe_ep_config_t config = EPMOE_EP_CONFIG_INIT;
    config.num_experts = 3, config.top_k = 1, config.hidden = 2, config.max_tokens = 4, config.dtype = EPMOE_F32;
    config.capacity = 2;
    cr_assert_eq(epmoe_ep_create(comm, &config, &ep), EPMOE_OK);
    const float x[6] = {1, 2, 3, 4, 5, 6}, weights[3] = {1, 1, 1};
    const int32_t ids[3] = {0, 1, 2};
    epmoe_dispatch_args_t args = EPMOE_DISPATCH_ARGS_INIT;
    epmoe_dispatch_result_t rows = EPMOE_DISPATCH_RESULT_INIT;
    const epmoe_dispatch_result_t untouched = rows;
    args.num_tokens = 3, args.x = x, args.ids = ids, args.weights = weights;
    cr_assert_eq(epmoe_dispatch(ep, &args, &rows, NULL), EPMOE_ERROR_CAPACITY);
    cr_assert(strstr(epmoe_last_error(), "rank 0 would receive 3 rows, its capacity is 2"), "%s", epmoe_last_error());
    cr_assert_eq(epmoei_dispatch_finish(ep, &rows, NULL), EPMOE_ERROR_BAD_STATE);
    cr_assert(strstr(epmoe_last_error(), "finish without a begin"), "%s", epmoe_last_error());
    cr_assert_eq(memcmp(&rows, &untouched, sizeof rows), 0);
    args.num_tokens = 2;
    cr_assert_eq(epmoei_dispatch_begin(ep, &args, EPMOE_OK, NULL), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert_eq(epmoei_dispatch_begin(ep, &args, EPMOE_OK, NULL), EPMOE_ERROR_BAD_STATE);
    cr_assert(strstr(epmoe_last_error(), "the one before has not been finished"), "%s", epmoe_last_error());
    cr_assert_eq(epmoei_dispatch_finish(ep, &rows, NULL), EPMOE_OK, "%s", epmoe_last_error());
    cr_assert(*rows.num_rows == 2 && rows.max_rows == 2 && rows.x == x);
    epmoe_ep_destroy(ep);
    epmoe_comm_destroy(comm);
    cr_assert_eq(epmoei_alloc_live(), live);
}

/* Each of two ranks sends its tokens to the other: x, ids and weights, and the partial rows of the other's; with the
 * same routing no ids. */
static void reuse_rank(void *ctx, epmoe_bootstrap_t bootstrap)
{
    enum { T = 3, D = 4, K = 2 };
    _Atomic int32_t *faults = ctx;
    const int32_t rank = bootstrap.rank;
    epmoe_comm_t *comm = NULL;
    epmoe_ep_t *ep = NULL;
    epmoe_ep_config_t config = EPMOE_EP_CONFIG_INIT;
    config.num_experts = 4, config.top_k = K, config.hidden = D, config.max_tokens = T, config.dtype = EPMOE_F32;
    if (epmoe_comm_create(&bootstrap, NULL, &comm) || epmoe_ep_create(comm, &config, &ep)) (*faults)++;
    for (int32_t round = 0; ep && round < 3; round++) {
        float x[T * D] = {0}, weights[T * K], y[T * D];
        int32_t ids[T * K];
        for (int32_t i = 0; i < T * K; i++) ids[i] = 2 - 2 * rank + i % 2, weights[i] = (float)(100 * round + i);
        epmoe_dispatch_args_t args = EPMOE_DISPATCH_ARGS_INIT;
        epmoe_dispatch_result_t rows = EPMOE_DISPATCH_RESULT_INIT;
        epmoe_combine_args_t combine = EPMOE_COMBINE_ARGS_INIT;
        args.num_tokens = T, args.x = x, args.ids = ids, args.weights = weights, args.reuse_routing = round == 1;
        if (epmoe_dispatch(ep, &args, &rows, NULL)) (*faults)++;
        int64_t due = T * (4 * D + 4 * K + (round == 1 ? 0 : 4 * K)) + T * 4 * D;
        if (epmoei_ep_wire_bytes(ep) != due || *rows.num_rows != T) (*faults)++;
        for (int32_t i = 0; i < *rows.num_rows * K; i++)
            if (rows.ids[i] != i % 2 || rows.weights[i] != (float)(100 * round + i)) (*faults)++;
        memset(rows.y, 0, sizeof y);
        combine.y = y;
        if (epmoe_combine(ep, &combine, NULL)) (*faults)++;
    }
    epmoe_ep_destroy(ep);
    epmoe_comm_destroy(comm);
}

Test(comm, routing_that_is_reused_sends_no_ids)
{
    _Atomic int32_t faults = 0;
    testing_ranks_t *ranks = testing_ranks_create(2);
    testing_ranks_run(ranks, reuse_rank, &faults);
    testing_ranks_free(ranks);
    cr_assert_eq(faults, 0);
}

static int64_t pieces(const int64_t *sizes, size_t num)
{
    int64_t sum = 0;
    for (size_t i = 0; i < num; i++) sum += (sizes[i] + 255) / 256 * 256;
    return sum;
}
#define PIECES(...) pieces((const int64_t[]){__VA_ARGS__}, sizeof((const int64_t[]){__VA_ARGS__}) / 8)

static int64_t bytes_over(epmoe_ep_config_t config, epmoe_transport_t transport, int32_t size, int64_t rows)
{
    int64_t bytes = -1;
    config.transport = transport;
    cr_assert_eq(epmoe_ep_buffer_size(&config, size, rows, &bytes), EPMOE_OK, "%s", epmoe_last_error());
    return bytes;
}

/* Worked by hand: 4096 tokens of d 7168 on each of 8 ranks, k 8, all of which may come to one. */
Test(comm, buffer_size_of_each_transport)
{
    enum { R = 8, T = 4096, K = 8, D = 7168, ROWS = R * T, PAGE = 2 << 20 };
    const epmoe_transport_t mpi = EPMOE_TRANSPORT_MPI, p2p = EPMOE_TRANSPORT_P2P, any = EPMOE_TRANSPORT_AUTO;
    epmoe_ep_config_t config = EPMOE_EP_CONFIG_INIT;
    config.num_experts = 256, config.top_k = K, config.hidden = D, config.max_tokens = T, config.dtype = EPMOE_BF16;

    /* What peers touch: two headers of 10 words from each rank, flags of 256 blocks, flags; rows of ids, weights, x and
     * y. 4096 / 8 tokens are never staged. */
    int64_t flags = PIECES(2 * R * 10 * 8, R * 256 * 4, R * 4);
    int64_t window = flags + PIECES(ROWS * K * 4LL, ROWS * K * 4LL, ROWS * D * 2LL, ROWS * D * 2LL);
    /* What they do not: the state (fits 256 bytes), a count, 8 windows of 80 bytes, tables of 128 groups of 32 tokens;
     * the capacities of the ranks on the host. */
    int64_t own = PIECES(256, 4, R * 80, T * 4, T / 32 * R * 4, T * R * 4, R * 8);
    int64_t expected = (window + PAGE - 1) / PAGE * PAGE + own, bytes = bytes_over(config, p2p, R, ROWS);
    cr_assert_eq(bytes, expected, "%lld, not %lld", (long long)bytes, (long long)expected);
    cr_assert(bytes > 0.87 * (1 << 30) && bytes < 0.88 * (1 << 30), "%lld", (long long)bytes);

    /* The others keep rows for 7 peers besides x and y, ids and weights of both, and small tables. */
    int64_t rows = PIECES(ROWS * D * 2LL, ROWS * D * 2LL, ROWS * K * 4LL, ROWS * K * 4LL);
    int64_t outbox = PIECES(T * 7 * D * 2LL, T * 7 * K * 4LL, T * 7 * K * 4LL), slots = PIECES(T * R * 4, T * R * 4);
    bytes = bytes_over(config, mpi, R, ROWS);
    cr_assert(bytes > rows + outbox + slots && bytes < rows + outbox + slots + 16384, "%lld", (long long)bytes);
    cr_assert(bytes > 1.26 * (1 << 30) && bytes < 1.27 * (1 << 30), "%lld", (long long)bytes);
    cr_assert_eq(bytes_over(config, EPMOE_TRANSPORT_NCCL, R, ROWS), bytes);
    cr_assert_eq(bytes_over(config, any, R, ROWS), bytes);

    /* In FP8: codes and 56 scales in place of x, and x of its own behind them. */
    config.wire_dtype = EPMOE_F8_E4M3;
    window += PIECES(ROWS * D * 1LL, ROWS * 56 * 4LL) - PIECES(ROWS * D * 2LL);
    expected = (window + PAGE - 1) / PAGE * PAGE + own + PIECES(ROWS * D * 2LL);
    bytes = bytes_over(config, p2p, R, ROWS);
    cr_assert_eq(bytes, expected, "%lld, not %lld", (long long)bytes, (long long)expected);
    config.wire_dtype = EPMOE_DTYPE_NONE;

    /* Smallest: two ranks may stage two rows for each, of (16 * 32 bytes of x) / 4 and 2 per slot in 8-byte words. With
     * its page p2p takes more than the others, which is what AUTO says. */
    config.top_k = 2, config.hidden = 8, config.max_tokens = 1, config.num_experts = 4;
    window = PIECES(2 * 2 * 4 * 8, 2 * 256 * 4, 2 * 4, 2 * 2 * 2 * (128 + 4) * 8, 2 * 2 * 4, 2 * 2 * 4, 2 * 16, 2 * 16);
    cr_assert_lt(window, PAGE);
    own = PIECES(256, 4, 2 * 80, 32 * 4, 2 * 4, 2 * 4, 2 * 8);
    bytes = bytes_over(config, p2p, 2, 2);
    cr_assert_eq(bytes, PAGE + own, "%lld, not %lld", (long long)bytes, (long long)(PAGE + own));
    cr_assert_eq(bytes_over(config, any, 2, 2), bytes);
    cr_assert_lt(bytes_over(config, mpi, 2, 2), bytes);
    cr_assert_eq(bytes_over(config, p2p, 1, 1), bytes_over(config, mpi, 1, 1));
}

Test(comm, auto_takes_the_first_that_all_can_use)
{
    const epmoe_transport_t local = EPMOE_TRANSPORT_LOCAL, p2p = EPMOE_TRANSPORT_P2P, nccl = EPMOE_TRANSPORT_NCCL;
    const epmoe_transport_t mpi = EPMOE_TRANSPORT_MPI;
    const struct {
        int32_t size, on_a_device;
        bool one_host, p2p, nccl, given, refused;
        epmoe_transport_t expected;
    } cases[] = {
        {1, 1, true, true, true, false, false, local},  {1, 1, true, true, true, true, false, local},
        {2, 1, true, true, true, false, false, p2p},    {2, 1, true, true, false, false, false, p2p},
        {32, 1, true, true, true, false, false, p2p},   {33, 1, true, true, true, false, false, nccl},
        {33, 1, true, true, false, false, false, mpi},  {16, 1, false, true, true, false, false, nccl},
        {16, 1, false, true, false, false, false, mpi}, {2, 1, true, false, true, false, false, nccl},
        {2, 1, true, false, false, false, false, mpi},  {2, 1, true, true, true, false, true, nccl},
        {2, 1, true, true, false, false, true, mpi},    {2, 1, true, true, true, true, false, nccl},
        {2, 2, true, true, true, false, false, mpi},    {8, 4, true, true, false, false, false, mpi},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const epmoei_auto_facts_t facts = {.size = cases[i].size,
                                           .ranks_per_device = cases[i].on_a_device,
                                           .one_host = cases[i].one_host,
                                           .all_have_p2p = cases[i].p2p,
                                           .all_have_nccl = cases[i].nccl,
                                           .nccl_is_given = cases[i].given,
                                           .p2p_is_refused = cases[i].refused};
        cr_expect_eq(epmoei_auto_transport(&facts), cases[i].expected, "case %zu: %s", i,
                     epmoe_transport_string(epmoei_auto_transport(&facts)));
    }
}

/* Hand-worked: y 3 rows of 10 f32 = 120 bytes and one capacity of 8 bytes, each rounded up to 256. */
Test(comm, buffer_size)
{
    epmoe_ep_config_t config = EPMOE_EP_CONFIG_INIT;
    config.num_experts = 8, config.top_k = 2, config.hidden = 10, config.max_tokens = 3, config.dtype = EPMOE_BF16;
    int64_t bytes = -1, more = -1;
    cr_assert_eq(epmoe_ep_buffer_size(&config, 1, 3, &bytes), EPMOE_OK);
    cr_assert_eq(bytes, 512);
    config.transport = EPMOE_TRANSPORT_MPI;
    cr_assert_eq(epmoe_ep_buffer_size(&config, 4, 1000, &bytes), EPMOE_OK);
    cr_assert_eq(epmoe_ep_buffer_size(&config, 4, 2000, &more), EPMOE_OK);
    /* A received row takes x, ids, weights and a bf16 partial row: 20 + 8 + 8 + 20 bytes. */
    cr_assert_leq(llabs(more - bytes - 56000), 4 * 256);
    /* In FP8 also 16 bytes of codes and 16 of scales; with one rank x alone. */
    config.wire_dtype = EPMOE_F8_E4M3;
    cr_assert_eq(epmoe_ep_buffer_size(&config, 4, 1000, &bytes), EPMOE_OK);
    cr_assert_eq(epmoe_ep_buffer_size(&config, 4, 2000, &more), EPMOE_OK);
    cr_assert_leq(llabs(more - bytes - 88000), 5 * 256);
    config.transport = EPMOE_TRANSPORT_AUTO;
    cr_assert_eq(epmoe_ep_buffer_size(&config, 1, 3, &bytes), EPMOE_OK);
    cr_assert_eq(bytes, 768);
    bytes = 5;
    config.transport = EPMOE_TRANSPORT_P2P;
    cr_assert_eq(epmoe_ep_buffer_size(&config, 33, 3, &bytes), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert(strstr(epmoe_last_error(), "size is 33: expected 1..32 over transport p2p"), "%s", epmoe_last_error());
    config.transport = EPMOE_TRANSPORT_LOCAL;
    cr_assert_eq(epmoe_ep_buffer_size(&config, 2, 3, &bytes), EPMOE_ERROR_INVALID_ARGUMENT);
    config.transport = (epmoe_transport_t)5;
    cr_assert_eq(epmoe_ep_buffer_size(&config, 2, 3, &bytes), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert(strstr(epmoe_last_error(), "config.transport is 5"), "%s", epmoe_last_error());
    config.transport = EPMOE_TRANSPORT_AUTO;
    cr_assert_eq(epmoe_ep_buffer_size(&config, 0, 3, &bytes), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert_eq(epmoe_ep_buffer_size(&config, 2, -1, &bytes), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert(strstr(epmoe_last_error(), "max_recv_rows is -1"), "%s", epmoe_last_error());
    cr_assert_eq(epmoe_ep_buffer_size(&config, 2, (int64_t)INT32_MAX + 1, &bytes), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert(strstr(epmoe_last_error(), "max_recv_rows is 2147483648"), "%s", epmoe_last_error());
    cr_assert_eq(epmoe_ep_buffer_size(&config, 2, 3, NULL), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert(strstr(epmoe_last_error(), "bytes is NULL"), "%s", epmoe_last_error());
    config.comm_sms = -1;
    cr_assert_eq(epmoe_ep_buffer_size(&config, 2, 3, &bytes), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert(strstr(epmoe_last_error(), "config.comm_sms is -1"), "%s", epmoe_last_error());
    config.comm_sms = 0;
    config.wire_dtype = EPMOE_F16;
    cr_assert_eq(epmoe_ep_buffer_size(&config, 2, 3, &bytes), EPMOE_ERROR_INVALID_ARGUMENT);
    cr_assert(strstr(epmoe_last_error(), "wire_dtype is f16"), "%s", epmoe_last_error());
    cr_assert_eq(bytes, 5);
}
