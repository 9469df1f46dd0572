#include "bench/agree.h"
#include "bench/placement.h"

#include "base/dtype.h"
#include "moe/layer.h"

#include <string.h>

/* What every rank knows of every rank after one exchange: slots [size,P] by physical expert, rows [size,size] by
 * destination. */
typedef struct traffic_t {
    int64_t *own;
    int64_t *all;
    int64_t stride;
} traffic_t;

/* ids [T,k] name physical experts. */
static void count_own(const bench_case_t *made, const bench_t *bench, const int32_t *ids, int64_t *slots, int64_t *rows)
{
    int32_t size = bench->program->size, k = bench->config.top_k, num_physical = placement_num_physical(bench);
    for (int32_t r = 0; r < size; r++) {
        int32_t first = 0, count = 0;
        epmoe_expert_range(num_physical, size, r, &first, &count);
        for (int32_t t = 0; t < made->num_tokens; t++) {
            int32_t here = 0;
            for (int32_t j = 0; j < k; j++) {
                int32_t id = ids[(int64_t)t * k + j];
                if (id < first || id >= first + count) continue;
                slots[id]++;
                here++;
            }
            rows[r] += here > 0;
        }
    }
}

/* The sizes of elements as the layer stores them: those that it reads, scales included. */
typedef struct sizes_t {
    double router, gate_up, down, shared_gate_up, shared_down;
} sizes_t;

static double element_bytes(epmoe_backend_t backend, epmoe_format_t format, const epmoei_pack_shape_t *pack,
                            int64_t rows, int64_t cols, bool halves)
{
    double elements = (double)rows * (double)cols;
    return elements > 0 ? (double)epmoei_matrix_sizes(backend, format, pack, rows, cols, halves).total / elements : 0;
}

static sizes_t stored_sizes(const bench_t *bench)
{
    const epmoei_layer_formats_t *formats = &bench->layer->weights.formats;
    const epmoe_layer_config_t *config = &bench->layer->config;
    int64_t d = config->hidden, f = config->intermediate, fs = config->shared_intermediate;
    return (sizes_t){
        .router = epmoe_dtype_size(formats->router),
        .gate_up = element_bytes(bench->backend, formats->gate_up, &formats->gate_up_pack, 2 * f, d, true),
        .down = element_bytes(bench->backend, formats->down, &formats->down_pack, d, f, false),
        .shared_gate_up =
            element_bytes(bench->backend, formats->shared_gate_up, &formats->shared_gate_up_pack, 2 * fs, d, true),
        .shared_down = element_bytes(bench->backend, formats->shared_down, &formats->shared_down_pack, d, fs, false),
    };
}

typedef struct work_t {
    double bytes;
    double flops;
} work_t;

/* The least that rank r does, beside the attention of a decoder layer: its drawn experts' weights, router and shared
 * expert once; its own and its received rows in and out, h out and in; the arithmetic of its slots and of its own
 * tokens. */
static work_t work_of(const bench_case_t *made, const bench_t *bench, const traffic_t *traffic, int32_t r,
                      int64_t *rank_slots)
{
    const epmoe_layer_config_t *config = &bench->config;
    const sizes_t sizes = stored_sizes(bench);
    int32_t size = bench->program->size, num_experts = config->num_experts, first = 0, count = 0;
    int32_t num_physical = placement_num_physical(bench);
    double d = config->hidden, f = config->intermediate, fs = config->shared_intermediate, tokens = made->tokens[r];
    double act = epmoe_dtype_size(config->dtype), rows = tokens, active = 0, slots = 0;
    epmoe_expert_range(num_physical, size, r, &first, &count);
    for (int32_t source = 0; source < size; source++)
        if (source != r) rows += (double)traffic->all[source * traffic->stride + num_physical + r];
    *rank_slots = 0;
    for (int32_t e = first; e < first + count; e++) {
        int64_t of_expert = 0;
        for (int32_t source = 0; source < size; source++) of_expert += traffic->all[source * traffic->stride + e];
        active += of_expert > 0;
        *rank_slots += of_expert;
    }
    slots = (double)*rank_slots;
    work_t work = {
        .bytes = active * (d * f * (2 * sizes.gate_up + sizes.down) + (config->expert_has_bias ? 4 * (2 * f + d) : 0)) +
                 2 * rows * d * act + 2 * slots * f * act,
        .flops = 6 * slots * d * f};
    if (tokens > 0) {
        work.bytes += num_experts * d * sizes.router + d * fs * (2 * sizes.shared_gate_up + sizes.shared_down);
        work.flops += 2 * tokens * num_experts * d + 6 * tokens * d * fs;
    }
    if (bench->run.decoder) {
        const decoder_work_t attention = decoder_work(bench, made->tokens[r]);
        work.bytes += attention.bytes;
        work.flops += attention.flops;
    }
    return work;
}

/* The ranks of a machine share its memory, and its cores when they have more threads than these; so the floor is that
 * of a machine's sum over the sum of its ceilings. Cores of one's own are not lent to other ranks. On CUDA the same
 * holds of a device. */
static double floor_seconds(const bench_t *bench, const work_t *work)
{
    const ceilings_t *ceilings = &bench->ceilings;
    int32_t size = bench->program->size;
    bool lends = ceilings->shares_cores || ceilings->ranks_per_device > 1;
    double floor = 0;
    for (int32_t domain = 0; domain < size; domain++) {
        double bytes = 0, flops = 0, ranks = 0;
        for (int32_t r = 0; r < size; r++) {
            if (ceilings->domain[r] != domain) continue;
            bytes += work[r].bytes;
            flops += work[r].flops;
            ranks++;
            double alone = lends ? 0 : work[r].flops / ceilings->flops_per_s;
            floor = alone > floor ? alone : floor;
        }
        if (ranks == 0) continue;
        double memory = bytes / (ranks * ceilings->read_bytes_per_s);
        double compute = flops / (ranks * ceilings->flops_per_s);
        floor = memory > floor ? memory : floor;
        floor = compute > floor ? compute : floor;
    }
    return floor;
}

/* The bytes that rank r sends in dispatch and combine; with `own` also what stays with it. */
static double sent_bytes(const bench_t *bench, const traffic_t *traffic, int32_t r, bool own)
{
    const epmoe_layer_config_t *config = &bench->config;
    int32_t size = bench->program->size, num_physical = placement_num_physical(bench);
    double partial = config->dtype == EPMOE_BF16 && size > 1 ? 2 : 4, bytes = 0;
    double row = bench_wire_row(config) + 8.0 * config->top_k;
    for (int32_t peer = 0; peer < size; peer++) {
        if (peer == r && !own) continue;
        bytes += row * (double)traffic->all[r * traffic->stride + num_physical + peer];
        bytes += partial * config->hidden * (double)traffic->all[peer * traffic->stride + num_physical + r];
    }
    return bytes;
}

static void fill_result(const bench_case_t *made, const bench_t *bench, const traffic_t *traffic, work_t *work,
                        case_result_t *result)
{
    int32_t size = bench->program->size, num_physical = placement_num_physical(bench);
    double bytes = 0, flops = 0, wire = 0, logical = 0;
    int64_t slots = 0, most_slots = 0, most_of_rank = 0;
    for (int32_t r = 0; r < size; r++) {
        int64_t rank_slots;
        work[r] = work_of(made, bench, traffic, r, &rank_slots);
        bytes += work[r].bytes;
        flops += work[r].flops;
        slots += rank_slots;
        most_of_rank = epmoei_max64(most_of_rank, rank_slots);
        double away = sent_bytes(bench, traffic, r, false), with_own = sent_bytes(bench, traffic, r, true);
        wire = away > wire ? away : wire;
        logical = with_own > logical ? with_own : logical;
    }
    for (int32_t e = 0; e < num_physical; e++) {
        int64_t of_expert = 0;
        for (int32_t r = 0; r < size; r++) of_expert += traffic->all[r * traffic->stride + e];
        most_slots = epmoei_max64(most_slots, of_expert);
    }
    double seconds = result->us_median * 1e-6;
    double exchange = 1e-6 * (result->stages_us[EPMOE_STAGE_DISPATCH] + result->stages_us[EPMOE_STAGE_COMBINE]);
    result->floor_us = 1e6 * floor_seconds(bench, work);
    result->floor_fraction = seconds > 0 ? result->floor_us / result->us_median : 0;
    result->tokens_per_s = seconds > 0 ? (double)made->total_tokens / seconds : 0;
    result->tflops = seconds > 0 ? flops / seconds * 1e-12 : 0;
    result->memory_gbps = seconds > 0 ? bytes / seconds * 1e-9 : 0;
    result->wire_bytes = wire;
    result->wire_gbps = exchange > 0 ? wire / exchange * 1e-9 : 0;
    result->logical_gbps = exchange > 0 ? logical / exchange * 1e-9 : 0;
    result->load_max_over_mean = slots ? (double)most_slots * num_physical / (double)slots : 1;
    result->rank_load_max_over_mean = slots ? (double)most_of_rank * size / (double)slots : 1;
}

epmoe_status_t case_rate(const bench_case_t *made, const bench_t *bench, case_result_t *result)
{
    epmoe_status_t status;
    int32_t size = bench->program->size;
    int32_t num_physical = placement_num_physical(bench), *ids = NULL;
    traffic_t traffic = {.stride = (int64_t)num_physical + size};
    work_t *work = NULL;
    status = epmoei_alloc_for((void **)&traffic.own, traffic.stride * 8, "traffic");
    if (status == EPMOE_OK) status = epmoei_alloc_for((void **)&traffic.all, size * traffic.stride * 8, "traffic");
    if (status == EPMOE_OK) status = epmoei_alloc_for((void **)&work, size * (int64_t)sizeof *work, "traffic");
    if (status == EPMOE_OK) status = placement_ids(made, bench, &ids);
    EPMOEI_CHECK_GOTO(epmoe_comm_agree(bench->program->comm, status), done);
    memset(traffic.own, 0, (size_t)traffic.stride * 8);
    count_own(made, bench, ids, traffic.own, traffic.own + num_physical);
    EPMOEI_CHECK_GOTO(epmoe_comm_all_gather(bench->program->comm, traffic.own, traffic.all, traffic.stride * 8), done);
    fill_result(made, bench, &traffic, work, result);
done:
    epmoei_free(ids);
    epmoei_free(work);
    epmoei_free(traffic.all);
    epmoei_free(traffic.own);
    return status;
}
