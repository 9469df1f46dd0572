#include "tests/exchange_case.h"

#include "tests/e4m3_oracle.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static void *allocate(int64_t bytes)
{
    void *data = malloc((size_t)bytes + 1);
    if (!data) abort();
    return data;
}

exchange_case_t exchange_random_case(testing_rng_t *rng, int32_t i, int32_t size)
{
    static const int32_t experts[] = {30, 128, 4, 1};
    static const epmoe_dtype_t dtypes[] = {EPMOE_BF16, EPMOE_F32, EPMOE_F16};
    exchange_case_t c = {.size = size, .num_experts = experts[i % 4], .dtype = dtypes[i % 3]};
    c.top_k = testing_range(rng, 1, 9);
    c.hidden = i % 2 ? 8 * testing_range(rng, 1, 300) : testing_range(rng, 1, 2100);
    c.seed = testing_next(rng);
    for (int32_t r = 0; r < EXCHANGE_RANKS; r++) c.tokens[r] = testing_range(rng, 0, 3) ? testing_range(rng, 1, 60) : 0;
    return c;
}

exchange_case_t exchange_coded_case(testing_rng_t *rng, int32_t i, int32_t size)
{
    static const int32_t widths[] = {64, 128, 200, 7168, 136, 1, 127, 4096, 2880, 129, 9000, 513};
    exchange_case_t c = exchange_random_case(rng, i, size);
    c.hidden = widths[i % 12];
    c.wire = EPMOE_F8_E4M3;
    c.dtype = (epmoe_dtype_t[]){EPMOE_BF16, EPMOE_F32, EPMOE_F16}[(i + i / 12) % 3];
    for (int32_t r = 0; r < EXCHANGE_RANKS; r++)
        if (c.hidden > 1000 && c.tokens[r] > 9) c.tokens[r] = 9;
    return c;
}

void exchange_place(testing_rng_t *rng, exchange_case_t *c)
{
    int32_t n = c->num_experts;
    if (n > EXCHANGE_MAX_PLACED) abort();
    c->num_physical = n + testing_range(rng, 0, n + 2);
    for (int32_t p = 0; p < c->num_physical; p++) c->placement[p] = p < n ? p : testing_range(rng, 0, n - 1);
    for (int32_t p = c->num_physical - 1; p > 0; p--) {
        int32_t other = testing_range(rng, 0, p), expert = c->placement[p];
        c->placement[p] = c->placement[other];
        c->placement[other] = expert;
    }
}

exchange_case_t exchange_placed_case(testing_rng_t *rng, int32_t i, int32_t size)
{
    exchange_case_t c = i % 4 == 3 ? exchange_coded_case(rng, i, size) : exchange_random_case(rng, i, size);
    if (c.num_experts > 60) c.num_experts = 60;
    exchange_place(rng, &c);
    return c;
}

exchange_case_t exchange_uneven_case(testing_rng_t *rng, int32_t i, int32_t size)
{
    exchange_case_t c = exchange_random_case(rng, i, size);
    /* 7 is odd: a permutation of 0..15. */
    for (int32_t r = 0; r < EXCHANGE_RANKS; r++) c.tokens[r] = (7 * r + i) % EXCHANGE_RANKS * 3;
    return c;
}

exchange_case_t exchange_identity_case(int32_t size, int32_t hidden, epmoe_dtype_t dtype, uint64_t seed)
{
    return (exchange_case_t){.size = size,
                             .num_experts = 64,
                             .top_k = 8,
                             .hidden = hidden,
                             .dtype = dtype,
                             .tokens = {1, 0, 257, 3, 64, 0, 5, 128, 2, 31, 0, 7, 65, 4, 129, 33},
                             .seed = seed,
                             .identity = true,
                             .plain = true};
}

exchange_case_t exchange_large_case(int32_t size, int32_t most_tokens, uint64_t seed)
{
    exchange_case_t c = {.size = size,
                         .num_experts = 16,
                         .top_k = 2,
                         .hidden = 264,
                         .dtype = EPMOE_F16,
                         .seed = seed,
                         .identity = true,
                         .large = true,
                         .plain = true};
    for (int32_t r = 0; r < EXCHANGE_RANKS; r++) c.tokens[r] = r % 4 == 1 ? 0 : most_tokens - r % 3;
    return c;
}

/* The codes are those of the op; what they mean comes from E4M3's definition. */
static void *arrive(const exchange_case_t *c, const void *x, int32_t num_tokens)
{
    int64_t blocks = (c->hidden + 127) / 128, elements = (int64_t)num_tokens * c->hidden;
    uint8_t *codes = allocate(elements);
    float *scales = allocate(num_tokens * blocks * 4);
    void *arrived = allocate(elements * epmoe_dtype_size(c->dtype));
    epmoe_quantize_fp8_args_t args = EPMOE_QUANTIZE_FP8_ARGS_INIT;
    args.backend = EPMOE_BACKEND_CPU;
    args.num_tokens = num_tokens, args.hidden = c->hidden, args.dtype = c->dtype;
    args.granularity = EPMOE_GRANULARITY_BLOCK128;
    args.x = x, args.q = codes, args.scale = scales;
    if (epmoe_quantize_fp8(&args, NULL)) abort();
    for (int64_t i = 0; i < elements; i++) {
        double scale = (double)scales[i / c->hidden * blocks + i % c->hidden / 128];
        epmoei_store(arrived, c->dtype, i, (float)(e4m3_value(codes[i]) * scale));
    }
    free(codes), free(scales);
    return arrived;
}

exchange_inputs_t exchange_inputs(const exchange_case_t *c, int32_t rank)
{
    testing_rng_t rng = testing_rng(c->seed + (uint64_t)rank * 7919);
    int32_t num_tokens = c->tokens[rank % EXCHANGE_RANKS], last_id = c->last_id ? c->last_id : c->num_experts - 1;
    int64_t elements = (int64_t)num_tokens * c->hidden, slots = (int64_t)num_tokens * c->top_k;
    int64_t size = epmoe_dtype_size(c->dtype);
    exchange_inputs_t inputs = {
        .num_tokens = num_tokens,
        .x = allocate(elements * size),
        .ids = allocate(slots * 4),
        .weights = allocate(slots * 4),
    };
    if (c->large) /* 11 bits, of which the lowest is 32 */
        for (int64_t i = 0; i < elements; i++)
            epmoei_store(inputs.x, c->dtype, i, 32 * (float)testing_range(&rng, -2047, 2047));
    else if (c->identity)
        for (int64_t i = 0; i < elements; i++) epmoei_store(inputs.x, c->dtype, i, (float)testing_range(&rng, -31, 31));
    else
        testing_fill_normal(&rng, inputs.x, c->dtype, elements, 1.0f);
    inputs.arrived = c->wire ? arrive(c, inputs.x, num_tokens) : inputs.x;
    for (int64_t i = 0; i < slots; i++) {
        bool unused = !c->plain && testing_range(&rng, 0, 5) == 0;
        inputs.ids[i] = unused ? -1 : testing_range(&rng, c->first_id, last_id);
        /* The weight of an unused slot must not be read. */
        if (c->large) {
            inputs.ids[i] = i % 2 ? c->num_experts - 1 : 0;
            inputs.weights[i] = i % 2 ? -3.5f : 4;
            continue;
        }
        inputs.weights[i] = unused ? NAN : c->identity ? 1.0f / (float)c->top_k : testing_uniform(&rng, 0.05f, 1.0f);
    }
    if (c->plain) return inputs;
    inputs.shared = allocate(elements * 4);
    inputs.residual = allocate(elements * size);
    testing_fill_normal(&rng, inputs.shared, EPMOE_F32, elements, 2.0f);
    testing_fill_normal(&rng, inputs.residual, c->dtype, elements, 2.0f);
    return inputs;
}

void exchange_inputs_free(exchange_inputs_t *inputs)
{
    if (inputs->arrived != inputs->x) free(inputs->arrived);
    free(inputs->x);
    free(inputs->ids);
    free(inputs->weights);
    free(inputs->shared);
    free(inputs->residual);
}

epmoe_ep_config_t exchange_config(const exchange_case_t *c, int32_t rank)
{
    epmoe_ep_config_t config = EPMOE_EP_CONFIG_INIT;
    config.num_experts = c->num_experts;
    config.top_k = c->top_k;
    config.hidden = c->hidden;
    config.max_tokens = c->tokens[rank % EXCHANGE_RANKS] + rank % 3;
    config.dtype = c->dtype;
    config.wire_dtype = c->wire;
    config.num_physical = c->num_physical;
    config.placement = c->num_physical ? c->placement : NULL;
    return config;
}

static int32_t physical_count(const exchange_case_t *c) { return c->num_physical ? c->num_physical : c->num_experts; }

int32_t exchange_physical(const exchange_case_t *c, int32_t rank, int64_t t, int32_t expert)
{
    int32_t all[EXCHANGE_MAX_PHYSICAL], here[EXCHANGE_MAX_PHYSICAL], num_all = 0, num_here = 0;
    if (!c->num_physical) return expert;
    for (int32_t p = 0; p < c->num_physical; p++) {
        if (c->placement[p] != expert) continue;
        all[num_all++] = p;
        if (exchange_owner(c->num_physical, c->size, p) == rank) here[num_here++] = p;
    }
    return num_here ? here[(t + rank) % num_here] : all[(t + rank) % num_all];
}

void exchange_add_load(const exchange_case_t *c, const exchange_inputs_t *inputs, int64_t *load)
{
    for (int64_t i = 0; i < (int64_t)inputs->num_tokens * c->top_k; i++)
        if (inputs->ids[i] >= 0) load[inputs->ids[i]]++;
}

/* The first physical expert of a rank. */
static int32_t first_physical(const exchange_case_t *c, int32_t rank)
{
    int32_t first = 0, count = physical_count(c);
    while (first < count && exchange_owner(count, c->size, first) < rank) first++;
    return first;
}

int32_t exchange_owner(int32_t num_experts, int32_t size, int32_t expert)
{
    int32_t rank = 0, left = num_experts;
    for (int32_t first = 0;; rank++) {
        int32_t ranks_left = size - rank, block = (left + ranks_left - 1) / ranks_left;
        if (expert < first + block) return rank;
        first += block;
        left -= block;
    }
}

static double factor(const exchange_case_t *c, int32_t expert) { return c->identity ? 1.0 : expert + 1.0; }

void exchange_experts(const exchange_case_t *c, int32_t rank, epmoe_dtype_t partial_dtype,
                      const epmoe_dispatch_result_t *rows)
{
    const int32_t first = first_physical(c, rank);
    for (int64_t i = 0; i < *rows->num_rows; i++) {
        double scale = 0;
        for (int32_t j = 0; j < c->top_k; j++) {
            int32_t id = rows->ids[i * c->top_k + j];
            int32_t expert = id < 0 ? -1 : c->num_physical ? c->placement[first + id] : first + id;
            if (id >= 0) scale += (double)rows->weights[i * c->top_k + j] * factor(c, expert);
        }
        for (int64_t e = i * c->hidden; e < (i + 1) * c->hidden; e++)
            epmoei_store(rows->y, partial_dtype, e, (float)(scale * (double)epmoei_load(rows->x, c->dtype, e)));
    }
}

/* Compares the received row with the one that must come next on `rank`, token t of `source`; says where they differ
 * first. */
static int32_t check_row(const exchange_case_t *c, int32_t rank, const exchange_inputs_t *from, int32_t source,
                         int64_t t, const epmoe_dispatch_result_t *rows, int64_t row)
{
    for (int64_t i = 0; i < c->hidden; i++) {
        float is = epmoei_load(rows->x, c->dtype, row * c->hidden + i);
        float due = epmoei_load(from->arrived, c->dtype, t * c->hidden + i);
        if (!memcmp(&is, &due, sizeof is)) continue;
        fprintf(stderr, "rank %d: x[%lld,%lld] is %.9g, expected %.9g\n", rank, (long long)row, (long long)i,
                (double)is, (double)due);
        return 1;
    }
    const int32_t first = first_physical(c, rank);
    for (int32_t j = 0; j < c->top_k; j++) {
        int32_t id = from->ids[t * c->top_k + j], is = rows->ids[row * c->top_k + j];
        if (id >= 0) id = exchange_physical(c, source, t, id);
        bool here = id >= 0 && exchange_owner(physical_count(c), c->size, id) == rank;
        float weight = rows->weights[row * c->top_k + j], due = here ? from->weights[t * c->top_k + j] : 0;
        if (is == (here ? id - first : -1) && ((c->size == 1 && !here) || weight == due)) continue;
        fprintf(stderr, "rank %d: slot [%lld,%d] has id %d and weight %.9g, expected id %d and weight %.9g\n", rank,
                (long long)row, j, is, (double)weight, here ? id - first : -1, (double)due);
        return 1;
    }
    return 0;
}

int32_t exchange_check_rows(const exchange_case_t *c, int32_t rank, const epmoe_dispatch_result_t *rows)
{
    int32_t faults = 0;
    int64_t due = 0;
    for (int32_t source = 0; source < c->size && !faults; source++) {
        exchange_inputs_t from = exchange_inputs(c, source);
        for (int64_t t = 0; t < from.num_tokens && !faults; t++) {
            bool sent = c->size == 1; /* one rank: every token is a row */
            for (int32_t j = 0; j < c->top_k; j++) {
                int32_t id = from.ids[t * c->top_k + j];
                if (id >= 0) id = exchange_physical(c, source, t, id);
                sent |= id >= 0 && exchange_owner(physical_count(c), c->size, id) == rank;
            }
            if (!sent) continue;
            if (due >= *rows->num_rows || check_row(c, rank, &from, source, t, rows, due)) {
                fprintf(stderr, "rank %d: row %lld is not token %lld of rank %d\n", rank, (long long)due, (long long)t,
                        source);
                faults++;
            }
            due++;
        }
        exchange_inputs_free(&from);
    }
    if (!faults && due != *rows->num_rows) {
        fprintf(stderr, "rank %d: %d rows arrived, %lld were due\n", rank, *rows->num_rows, (long long)due);
        faults++;
    }
    return faults;
}

/* Each partial row and the output are rounded once, to 8 (bf16) or 11 (fp16) bits; sums are fp32. The terms may cancel,
 * so that the bound is a part of their size, not of the result. */
int32_t exchange_check_output(const exchange_case_t *c, int32_t rank, const exchange_inputs_t *inputs, const void *y)
{
    const double part = c->dtype == EPMOE_F32 ? 0x1p-18 : c->dtype == EPMOE_F16 ? 0x1p-10 : 1.02 * 0x1p-7;
    for (int64_t i = 0; i < (int64_t)inputs->num_tokens * c->hidden; i++) {
        double scale = 0, scale_size = 0, x = (double)epmoei_load(inputs->arrived, c->dtype, i);
        for (int64_t j = i / c->hidden * c->top_k; j < (i / c->hidden + 1) * c->top_k; j++) {
            if (inputs->ids[j] < 0) continue;
            double term = (double)inputs->weights[j] * factor(c, inputs->ids[j]);
            scale += term;
            scale_size += fabs(term);
        }
        double shared = inputs->shared ? (double)inputs->shared[i] : 0;
        double residual = inputs->residual ? (double)epmoei_load(inputs->residual, c->dtype, i) : 0;
        double ref = scale * x + shared + residual;
        double bound = part * (scale_size * fabs(x) + fabs(shared) + fabs(residual)) + 0x1p-25;
        double error = fabs((double)epmoei_load(y, c->dtype, i) - ref);
        if (error <= (c->identity ? 0 : bound)) continue;
        fprintf(stderr, "rank %d: element %lld of y is off by %g, bound %g\n", rank, (long long)i, error, bound);
        return 1;
    }
    return 0;
}

int32_t exchange_round(const exchange_case_t *c, int32_t rank, epmoe_ep_t *ep, int32_t reuse_routing, void *y_out)
{
    int32_t faults = 0;
    exchange_inputs_t inputs = exchange_inputs(c, rank);
    int64_t y_bytes = (int64_t)inputs.num_tokens * c->hidden * epmoe_dtype_size(c->dtype);
    void *y = testing_buffer(y_bytes, 4);
    int64_t *load = testing_buffer(c->num_experts * 8, 0), *load_due = allocate(c->num_experts * 8);
    for (int32_t e = 0; e < c->num_experts; e++) load[e] = load_due[e] = 5 * e;
    if (!reuse_routing) exchange_add_load(c, &inputs, load_due);

    epmoe_dispatch_args_t dispatch = EPMOE_DISPATCH_ARGS_INIT;
    epmoe_dispatch_result_t rows = EPMOE_DISPATCH_RESULT_INIT;
    dispatch.num_tokens = inputs.num_tokens;
    dispatch.reuse_routing = reuse_routing;
    dispatch.x = inputs.num_tokens ? inputs.x : NULL;
    dispatch.ids = inputs.num_tokens ? inputs.ids : NULL;
    dispatch.weights = inputs.num_tokens ? inputs.weights : NULL;
    dispatch.expert_load = load;
    epmoe_status_t status = epmoe_dispatch(ep, &dispatch, &rows, NULL);
    if (status == EPMOE_OK) {
        faults += exchange_check_rows(c, rank, &rows);
        exchange_experts(c, rank, epmoe_ep_partial_dtype(ep), &rows);
        epmoe_combine_args_t combine = EPMOE_COMBINE_ARGS_INIT;
        combine.shared = inputs.shared;
        combine.residual = inputs.residual;
        combine.y = inputs.num_tokens ? y : NULL;
        status = epmoe_combine(ep, &combine, NULL);
    }
    if (status == EPMOE_OK) {
        faults += exchange_check_output(c, rank, &inputs, y);
        if (y_out && y_bytes) memcpy(y_out, y, (size_t)y_bytes);
    } else {
        fprintf(stderr, "rank %d: %s: %s\n", rank, epmoe_status_string(status), epmoe_last_error());
        faults++;
    }
    faults += !testing_guards_intact(y) || !testing_guards_intact(load);
    if (memcmp(load, load_due, (size_t)c->num_experts * 8)) {
        fprintf(stderr, "rank %d: expert_load is not what was chosen\n", rank);
        faults++;
    }
    testing_buffer_free(y), testing_buffer_free(load), free(load_due);
    exchange_inputs_free(&inputs);
    return faults;
}
