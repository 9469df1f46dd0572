/* Times of one way are those of a chain of exchanges, divided by its length: every one waits for what all ranks sent in
 * the one before, so that ranks start together but for the first, and nothing of the launch is left out. A chain of
 * dispatches alone gives the way out; what combine adds to it in a chain of pairs is the way home. Where the transport
 * can be captured the chain is a graph. */
#include "bench/exchange.h"

#include "bench/agree.h"
#include "bench/random.h"
#include "bench/report.h"
#include "bench/stats.h"

#include "base/device.h"
#include "base/dtype.h"
#include "comm/comm.h"

#include <stdio.h>
#include <string.h>

enum { MAX_TRANSPORTS = 3, CHAIN = 20, CHAIN_OF_HOST_MEMORY = 2 };

typedef struct measured_t {
    double us[2]; /* out and home; their sum is the period of a pair */
    int64_t wrong;
} measured_t;

typedef struct exchange_t {
    const bench_t *bench;
    epmoe_comm_t *comms[MAX_TRANSPORTS]; /* the first is the program's */
    int32_t num_comms;
    int32_t num_tokens;
    buffer_t x, ids, weights, y;
    void *first_y;              /* of the first transport */
    double wire[2], logical[2]; /* bytes out and home, of the busiest rank */
    measured_t measured[MAX_TRANSPORTS];
} exchange_t;

typedef struct chain_t {
    exchange_t *exchange;
    epmoe_ep_t *ep;
    int32_t length;
    bool pairs;
} chain_t;

static epmoe_status_t one(const chain_t *chain, epmoe_dispatch_result_t *rows, epmoe_stream_t stream)
{
    const exchange_t *exchange = chain->exchange;
    epmoe_dispatch_args_t args = EPMOE_DISPATCH_ARGS_INIT;
    args.num_tokens = exchange->num_tokens;
    args.x = exchange->x.run;
    args.ids = exchange->ids.run;
    args.weights = exchange->weights.run;
    return epmoe_dispatch(chain->ep, &args, rows, stream);
}

static epmoe_status_t home(const chain_t *chain, epmoe_stream_t stream)
{
    epmoe_combine_args_t args = EPMOE_COMBINE_ARGS_INIT;
    args.y = chain->exchange->y.run;
    return epmoe_combine(chain->ep, &args, stream);
}

static epmoe_status_t run_chain(void *ctx, epmoe_stream_t stream, void *const *events)
{
    const chain_t *chain = ctx;
    (void)events;
    for (int32_t i = 0; i < chain->length; i++) {
        epmoe_dispatch_result_t rows = EPMOE_DISPATCH_RESULT_INIT;
        EPMOEI_CHECK(one(chain, &rows, stream));
        if (chain->pairs) EPMOEI_CHECK(home(chain, stream));
    }
    return EPMOE_OK;
}

/* Exchanges of a chain over this transport: the host's memory has no device to keep busy. */
static int32_t chain_length(epmoe_comm_t *comm)
{
    return epmoe_comm_transport(comm) == EPMOE_TRANSPORT_MPI ? CHAIN_OF_HOST_MEMORY : CHAIN;
}

/* times [iters] in us, of this rank, each behind a barrier and with cold caches. */
static epmoe_status_t time_host(chain_t *chain, epmoe_comm_t *comm, int32_t iters, double *times)
{
    const bench_t *bench = chain->exchange->bench;
    for (int32_t i = -bench->warmup; i < iters; i++) {
        ceilings_flush(&bench->ceilings);
        EPMOEI_CHECK(epmoe_comm_agree(comm, EPMOE_OK));
        double start = epmoei_now_seconds();
        EPMOEI_CHECK(run_chain(chain, NULL, NULL));
        if (i >= 0) times[i] = 1e6 * (epmoei_now_seconds() - start);
    }
    return EPMOE_OK;
}

/* us of one exchange: the slowest rank's median. */
static epmoe_status_t time_chain(chain_t *chain, epmoe_comm_t *comm, bool pairs, double *us)
{
    const bench_t *bench = chain->exchange->bench;
    bool cuda = bench->backend == EPMOE_BACKEND_CUDA;
    bool slow = cuda && epmoe_comm_transport(comm) == EPMOE_TRANSPORT_MPI;
    int32_t iters = slow && bench->iters > 3 ? 3 : bench->iters;
    double *times = NULL;
    epmoe_status_t status = epmoei_alloc_for((void **)&times, (int64_t)iters * 8, "times");
    EPMOEI_CHECK_GOTO(epmoe_comm_agree(comm, status), done);
    chain->pairs = pairs;
    chain->length = chain_length(comm);
    cuda_timing_t timing = {.run = run_chain,
                            .ctx = chain,
                            .graph = epmoei_ep_counts_on_device(chain->ep) && bench->options->graph != 0,
                            .flush = true,
                            .warmup = slow ? 1 : bench->warmup,
                            .iters = iters,
                            .comm = comm,
                            .barrier = bench->barrier};
    EPMOEI_CHECK_GOTO(cuda ? cuda_time(&bench->cuda, &timing, times) : time_host(chain, comm, iters, times), done);
    EPMOEI_CHECK_GOTO(bench_max(comm, times, iters), done);
    *us = stats_median(times, iters) / chain->length;
done:
    epmoei_free(times);
    return status;
}

/* Whether rank r has an expert of token t. */
static bool goes_to(const exchange_t *exchange, int64_t t, int32_t r)
{
    const epmoe_layer_config_t *config = &exchange->bench->config;
    const int32_t *ids = (const int32_t *)exchange->ids.host + t * config->top_k;
    int32_t first = 0, count = 0;
    epmoe_expert_range(config->num_experts, exchange->bench->program->size, r, &first, &count);
    for (int32_t j = 0; j < config->top_k; j++)
        if (ids[j] >= first && ids[j] < first + count) return true;
    return false;
}

/* Elements of y that are not what comes back when every rank with an expert of its token returns x: the sum, which is
 * exact, since x has few bits, rounded once; zeros where nothing is returned. */
static int64_t count_wrong(const exchange_t *exchange, bool returned)
{
    const epmoe_layer_config_t *config = &exchange->bench->config;
    int64_t wrong = 0, size = epmoe_dtype_size(config->dtype);
    for (int64_t t = 0; t < exchange->num_tokens; t++) {
        int32_t ranks = 0;
        for (int32_t r = 0; r < exchange->bench->program->size && returned; r++) ranks += goes_to(exchange, t, r);
        for (int64_t i = t * config->hidden; i < (t + 1) * config->hidden; i++) {
            float x, y;
            epmoei_to_f32(&x, (const char *)exchange->x.host + i * size, config->dtype, 1);
            epmoei_to_f32(&y, (const char *)exchange->y.host + i * size, config->dtype, 1);
            wrong += !(y == epmoei_round_to((float)ranks * x, config->dtype));
        }
    }
    return wrong;
}

/* Experts that return x where rows of y are like rows of x, and nothing otherwise. */
static epmoe_status_t run_checked(const chain_t *chain, bool first, int64_t *wrong)
{
    exchange_t *exchange = chain->exchange;
    const epmoe_layer_config_t *config = &exchange->bench->config;
    epmoe_backend_t backend = exchange->bench->backend;
    epmoe_stream_t stream = exchange->bench->cuda.stream;
    epmoe_dispatch_result_t rows = EPMOE_DISPATCH_RESULT_INIT;
    epmoe_dtype_t dtype = epmoe_ep_partial_dtype(chain->ep);
    EPMOEI_CHECK(one(chain, &rows, stream));
    int64_t bytes = (int64_t)rows.max_rows * config->hidden * epmoe_dtype_size(dtype);
    EPMOEI_CHECK(dtype == config->dtype ? epmoei_memory_copy(backend, rows.y, rows.x, bytes, stream)
                                        : epmoei_memory_set(backend, rows.y, 0, bytes, stream));
    EPMOEI_CHECK(home(chain, stream));
    EPMOEI_CHECK(epmoei_stream_wait(backend, stream));
    EPMOEI_CHECK(buffer_download(&exchange->y));
    const char *y = exchange->y.host, *first_y = exchange->first_y;
    if (first) memcpy(exchange->first_y, y, (size_t)exchange->y.bytes);
    for (int64_t i = 0; i < exchange->y.bytes; i++) *wrong += y[i] != first_y[i];
    /* Rows that travelled as FP8 are compared between transports alone. */
    if (first && !config->wire_dtype) *wrong = count_wrong(exchange, dtype == config->dtype);
    return EPMOE_OK;
}

/* How many times as fast as `base` a time is; `none` where a difference of two times came out as nothing. */
static void speedup_text(char text[32], double base, double us, const char *none)
{
    if (base > 0 && us > 0)
        snprintf(text, 32, "%.3f", base / us);
    else
        snprintf(text, 32, "%s", none);
}

static void print(const exchange_t *exchange, int32_t i_comm, const measured_t *base, const char *base_name)
{
    const bench_t *bench = exchange->bench;
    epmoe_comm_t *comm = exchange->comms[i_comm];
    const char *transport = epmoe_transport_string(epmoe_comm_transport(comm));
    const double *us = exchange->measured[i_comm].us, pair = us[0] + us[1];
    const int64_t wrong = exchange->measured[i_comm].wrong;
    const char *none = bench->options->json ? "null" : "-";
    char faster[3][32];
    for (int32_t i = 0; i < 2; i++) speedup_text(faster[i], base->us[i], us[i], none);
    speedup_text(faster[2], base->us[0] + base->us[1], pair, none);
    double rate[2], logical[2];
    for (int32_t i = 0; i < 2; i++) {
        rate[i] = us[i] > 0 ? exchange->wire[i] / us[i] * 1e-3 : 0;
        logical[i] = us[i] > 0 ? exchange->logical[i] / us[i] * 1e-3 : 0;
    }
    if (bench->program->rank) return;
    if (bench->options->json)
        printf("{\"op\": \"exchange\", \"model\": \"%s\", \"dtype\": \"%s\", \"wire\": \"%s\", \"ranks\": %d, "
               "\"ranks_per_device\": %d, "
               "\"transport\": \"%s\", \"comm_sms\": %d, \"tokens_per_rank\": %d, \"dispatch_us\": %.3f, "
               "\"combine_us\": %.3f, \"pair_us\": %.3f, \"base\": \"%s\", \"dispatch_speedup\": %s, "
               "\"combine_speedup\": %s, \"pair_speedup\": %s, \"dispatch_wire_bytes\": %.0f, \"combine_wire_bytes\": "
               "%.0f, "
               "\"dispatch_gbps\": %.3f, \"combine_gbps\": %.3f, \"dispatch_gbps_logical\": %.3f, "
               "\"combine_gbps_logical\": %.3f, \"wrong\": %lld}\n",
               bench->model, bench_dtype_name(bench), bench_wire_name(bench), bench->program->size,
               epmoe_comm_ranks_per_device(comm), transport, bench->options->comm_sms, exchange->num_tokens, us[0],
               us[1], pair, base_name, faster[0], faster[1], faster[2], exchange->wire[0], exchange->wire[1], rate[0],
               rate[1], logical[0], logical[1], (long long)wrong);
    else
        printf("%9s %8d %11.2f %11.2f %11.2f %7s %7s %7s %10.3f %10.3f %9.1f %9.1f %9.1f %9.1f %6lld\n", transport,
               exchange->num_tokens, us[0], us[1], pair, faster[0], faster[1], faster[2], exchange->wire[0] * 1e-6,
               exchange->wire[1] * 1e-6, rate[0], rate[1], logical[0], logical[1], (long long)wrong);
    fflush(stdout);
}

static epmoe_status_t run_transport(exchange_t *exchange, epmoe_comm_t *comm, measured_t *measured)
{
    const bench_t *bench = exchange->bench;
    const epmoe_layer_config_t *config = &bench->config;
    double *us = measured->us;
    chain_t chain = {.exchange = exchange};
    epmoe_ep_config_t ep = EPMOE_EP_CONFIG_INIT;
    epmoe_status_t status;
    ep.num_experts = config->num_experts;
    ep.top_k = config->top_k;
    ep.hidden = config->hidden;
    ep.max_tokens = exchange->num_tokens;
    ep.dtype = config->dtype;
    ep.wire_dtype = config->wire_dtype;
    ep.comm_sms = bench->options->comm_sms;
    EPMOEI_CHECK(epmoe_ep_create(comm, &ep, &chain.ep));
    /* The others are compared with the first. */
    EPMOEI_CHECK_GOTO(epmoe_comm_agree(comm, run_checked(&chain, comm == exchange->comms[0], &measured->wrong)), done);
    EPMOEI_CHECK_GOTO(bench_sum(comm, &measured->wrong, 1), done);
    EPMOEI_CHECK_GOTO(time_chain(&chain, comm, false, &us[0]), done);
    EPMOEI_CHECK_GOTO(time_chain(&chain, comm, true, &us[1]), done);
    us[1] -= us[0];
done:
    epmoe_ep_destroy(chain.ep);
    return status;
}

/* Rows that this rank sends and gets, and their bytes on the busiest rank. */
static epmoe_status_t count_bytes(exchange_t *exchange)
{
    const bench_t *bench = exchange->bench;
    const epmoe_layer_config_t *config = &bench->config;
    int32_t k = config->top_k;
    double away = 0, all = 0;
    for (int32_t r = 0; r < bench->program->size; r++)
        for (int64_t t = 0; t < exchange->num_tokens; t++) {
            bool there = goes_to(exchange, t, r);
            all += there;
            away += there && r != bench->program->rank;
        }
    double row = bench_wire_row(config), partial = (config->dtype == EPMOE_BF16 ? 2.0 : 4.0) * config->hidden;
    double bytes[4] = {away * (row + 8 * k), away * partial, all * (row + 8 * k), all * partial};
    EPMOEI_CHECK(bench_max(bench->program->comm, bytes, 4));
    memcpy(exchange->wire, bytes, sizeof exchange->wire);
    memcpy(exchange->logical, bytes + 2, sizeof exchange->logical);
    return EPMOE_OK;
}

static epmoe_status_t fill_inputs(exchange_t *exchange)
{
    const bench_t *bench = exchange->bench;
    const epmoe_layer_config_t *config = &bench->config;
    int64_t tokens = exchange->num_tokens, slots = tokens * config->top_k;
    int64_t bytes = tokens * config->hidden * epmoe_dtype_size(config->dtype);
    int32_t rank = bench->program->rank, size = bench->program->size;
    EPMOEI_CHECK(buffer_create(&exchange->x, bench->backend, bytes, "x"));
    EPMOEI_CHECK(buffer_create(&exchange->y, bench->backend, bytes, "y"));
    EPMOEI_CHECK(buffer_create(&exchange->ids, bench->backend, slots * 4, "ids"));
    EPMOEI_CHECK(buffer_create(&exchange->weights, bench->backend, slots * 4, "weights"));
    EPMOEI_CHECK(epmoei_alloc_for(&exchange->first_y, bytes, "y"));
    memset(exchange->first_y, 0, (size_t)bytes);
    uint64_t state = random_start(bench->options->seed, RANDOM_INPUT, rank);
    for (int64_t i = 0; i < tokens * config->hidden; i++) {
        /* Bits of finite numbers near 1, in either 16-bit type. */
        state = state * 6364136223846793005u + 1442695040888963407u;
        uint16_t bits = (uint16_t)(0x3C00 | (state >> 40 & 0x83FF));
        if (config->dtype == EPMOE_F32)
            epmoei_to_f32((float *)exchange->x.host + i, &bits, EPMOE_F16, 1);
        else
            ((uint16_t *)exchange->x.host)[i] = bits;
    }
    for (int64_t i = 0; i < slots; i++) ((float *)exchange->weights.host)[i] = 1;
    EPMOEI_CHECK(routing_draw(&bench->routing, tokens * size, tokens * rank, exchange->num_tokens, exchange->ids.host));
    EPMOEI_CHECK(buffer_upload(&exchange->x));
    EPMOEI_CHECK(buffer_upload(&exchange->ids));
    return buffer_upload(&exchange->weights);
}

static epmoe_status_t run_case(exchange_t *exchange, int64_t *wrong)
{
    epmoe_status_t status;
    double pairs[MAX_TRANSPORTS];
    epmoe_transport_t transports[MAX_TRANSPORTS];
    memset(exchange->measured, 0, sizeof exchange->measured);
    EPMOEI_CHECK_GOTO(epmoe_comm_agree(exchange->bench->program->comm, fill_inputs(exchange)), done);
    EPMOEI_CHECK_GOTO(count_bytes(exchange), done);
    for (int32_t i = 0; i < exchange->num_comms; i++) {
        EPMOEI_CHECK_GOTO(run_transport(exchange, exchange->comms[i], &exchange->measured[i]), done);
        *wrong += exchange->measured[i].wrong;
        transports[i] = epmoe_comm_transport(exchange->comms[i]);
        pairs[i] = exchange->measured[i].us[0] + exchange->measured[i].us[1];
    }
    int32_t base = stats_base(transports, pairs, exchange->num_comms);
    for (int32_t i = 0; i < exchange->num_comms; i++)
        print(exchange, i, &exchange->measured[base], epmoe_transport_string(transports[base]));
done:
    buffer_destroy(&exchange->x);
    buffer_destroy(&exchange->y);
    buffer_destroy(&exchange->ids);
    buffer_destroy(&exchange->weights);
    epmoei_free(exchange->first_y);
    exchange->first_y = NULL;
    return status;
}

/* The transports of these ranks besides the one asked for; those that they cannot use are left out on all ranks. */
static epmoe_status_t connect_others(exchange_t *exchange)
{
    static const epmoe_transport_t others[] = {EPMOE_TRANSPORT_NCCL, EPMOE_TRANSPORT_MPI};
    const bench_t *bench = exchange->bench;
    exchange->comms[exchange->num_comms++] = bench->program->comm;
    if (bench->backend != EPMOE_BACKEND_CUDA) return EPMOE_OK;
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        if (epmoe_comm_transport(bench->program->comm) == others[i]) continue;
        epmoe_comm_config_t config = EPMOE_COMM_CONFIG_INIT;
        epmoe_comm_t *comm = NULL;
        config.transport = others[i];
        config.backend = EPMOE_BACKEND_CUDA;
        config.timeout_s = bench->options->timeout_s;
        epmoe_status_t status = program_connect_another(bench->program, &config, &comm);
        if (status == EPMOE_OK)
            exchange->comms[exchange->num_comms++] = comm;
        else if (status != EPMOE_ERROR_NOT_SUPPORTED && status != EPMOE_ERROR_PEER)
            return status;
    }
    return EPMOE_OK;
}

static void print_head(const bench_t *bench, epmoe_comm_t *comm)
{
    report_op_header(bench);
    if (bench->program->rank || bench->options->json) return;
    printf("%d ranks; us of one exchange of %d in a chain, the slowest rank's median; x in the caches%s\n",
           bench->program->size, chain_length(comm), bench->options->wire_dtype ? ", on the wire in FP8" : "");
    printf("times as fast as nccl, or where it is not there as the slowest: out, home, both\n");
    printf("%9s %8s %11s %11s %11s %7s %7s %7s %10s %10s %9s %9s %9s %9s %6s\n", "transport", "tokens", "dispatch us",
           "combine us", "pair us", "x out", "x home", "x pair", "MB out", "MB home", "GB/s out", "GB/s home",
           "logical", "logical", "wrong");
}

epmoe_status_t exchange_run(const bench_t *bench, int64_t *wrong)
{
    epmoe_status_t status;
    exchange_t exchange = {.bench = bench};
    EPMOEI_CHECK_GOTO(connect_others(&exchange), done);
    print_head(bench, exchange.comms[0]);
    for (int32_t i = 0; i < bench->options->num_cases; i++) {
        exchange.num_tokens = bench->options->tokens[i];
        EPMOEI_CHECK_GOTO(run_case(&exchange, wrong), done);
    }
    report_footer(bench, *wrong);
done:
    for (int32_t i = 1; i < exchange.num_comms; i++) epmoe_comm_destroy(exchange.comms[i]);
    return status;
}
