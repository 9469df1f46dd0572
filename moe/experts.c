#include "moe/experts.h"

#include "base/device.h"
#include "base/dtype.h"
#include "kernels/activation.h"
#include "kernels/experts_few.h"
#include "kernels/grouped_gemm_fp8.h"
#include "kernels/op_check.h"
#include "kernels/quant_formats.h"
#include "kernels/scatter_rows.h"
#include "kernels/sum.h"

#include <string.h>

/* On the CPU tokens go through the experts in chunks, so that the intermediates of a long prefill stay bounded. */
#define CHUNK_BYTES ((int64_t)256 << 20)
enum { kMinChunkTokens = 64 };

typedef struct plan_t {
    int32_t chunk_tokens;
    int32_t *sorted_ids; /* [chunk*k] */
    int32_t *num_post_padded;
    int32_t *expert_offsets; /* [E+1] */
    int32_t *places;         /* [chunk*k], or NULL: nothing is scattered */
    int32_t *dealt;          /* [2], with places: the words by which the two products may deal their tiles */
    void *h;                 /* [chunk*k, f] of dtype */
    bool h_quantised;        /* h_rows in place of h */
    epmoei_fp8_rows_t h_rows;
    void *slots; /* [chunk*k, d] of slot_dtype: weighted expert outputs */
    epmoe_dtype_t slot_dtype;
    void *align_workspace;
    int64_t align_bytes;
    void *gemm_workspace; /* last, so that it can take what is left of a workspace */
    int64_t gemm_bytes;
    int64_t bytes_before_gemm;
    int64_t bytes;
} plan_t;

static int32_t chunk_tokens(const epmoe_experts_args_t *args, bool cuda)
{
    if (cuda) return args->num_tokens; /* one pass: the host does not know how many rows there are */
    int64_t token_bytes = (int64_t)args->top_k * ((int64_t)args->intermediate * epmoe_dtype_size(args->dtype) +
                                                  (int64_t)args->hidden * (int64_t)sizeof(float));
    int64_t tokens = epmoei_max64(CHUNK_BYTES / token_bytes, kMinChunkTokens);
    return (int32_t)epmoei_min64(tokens, args->num_tokens);
}

static epmoe_align_args_t align_args(const epmoe_experts_args_t *args, const plan_t *plan, int32_t first,
                                     int32_t tokens)
{
    epmoe_align_args_t align = EPMOE_ALIGN_ARGS_INIT;
    align.backend = args->backend;
    align.num_tokens = tokens;
    align.top_k = args->top_k;
    align.num_experts = args->num_experts;
    align.block_size = 1;
    align.num_tokens_dev = args->num_tokens_dev;
    align.ids = args->ids ? args->ids + (int64_t)first * args->top_k : NULL;
    align.sorted_ids = plan->sorted_ids;
    align.num_post_padded = plan->num_post_padded;
    align.expert_offsets = plan->expert_offsets;
    align.workspace = plan->align_workspace;
    align.workspace_bytes = plan->align_bytes;
    return align;
}

static epmoe_grouped_gemm_args_t gemm_args(const epmoe_experts_args_t *args, const plan_t *plan, int32_t first,
                                           int32_t tokens)
{
    epmoe_grouped_gemm_args_t gemm = EPMOE_GROUPED_GEMM_ARGS_INIT;
    gemm.backend = args->backend;
    gemm.num_experts = args->num_experts;
    gemm.max_rows = tokens * args->top_k;
    gemm.num_slots = gemm.max_rows;
    gemm.expert_offsets = plan->expert_offsets;
    gemm.row_index = plan->sorted_ids;
    gemm.row_weights = args->weights ? args->weights + (int64_t)first * args->top_k : NULL;
    gemm.fp8_activations = args->fp8_activations;
    gemm.workspace = plan->gemm_workspace;
    gemm.workspace_bytes = plan->gemm_bytes;
    return gemm;
}

static epmoe_grouped_gemm_args_t gemm1_args(const epmoe_experts_args_t *args, const plan_t *plan, int32_t first,
                                            int32_t tokens)
{
    epmoe_grouped_gemm_args_t gemm = gemm_args(args, plan, first, tokens);
    gemm.n = 2 * args->intermediate;
    gemm.k = args->hidden;
    gemm.x_row_divisor = args->top_k;
    gemm.x_dtype = args->dtype;
    gemm.x = args->x ? (const char *)args->x + (int64_t)first * args->hidden * epmoe_dtype_size(args->dtype) : NULL;
    gemm.weight = args->gate_up;
    gemm.layout = args->layout;
    gemm.bias = args->gate_up_bias;
    gemm.activation = args->activation;
    gemm.alpha = args->alpha;
    gemm.limit = args->limit;
    gemm.weight_on_input = args->weight_on_input;
    if (!args->weight_on_input) gemm.row_weights = NULL;
    gemm.y_dtype = args->dtype;
    gemm.y = plan->h;
    gemm.y_sorted = 1;
    return gemm;
}

static epmoe_grouped_gemm_args_t gemm2_args(const epmoe_experts_args_t *args, const plan_t *plan, int32_t first,
                                            int32_t tokens)
{
    epmoe_grouped_gemm_args_t gemm = gemm_args(args, plan, first, tokens);
    gemm.n = args->hidden;
    gemm.k = args->intermediate;
    gemm.x_dtype = args->dtype;
    gemm.x = plan->h;
    gemm.x_sorted = 1;
    gemm.weight = args->down;
    gemm.layout = args->layout;
    gemm.bias = args->down_bias;
    gemm.activation = EPMOE_ACTIVATION_NONE;
    if (args->weight_on_input) gemm.row_weights = NULL;
    gemm.y_dtype = plan->slot_dtype;
    gemm.y = plan->slots;
    return gemm;
}

/* Whether the first product wants its rows in the sorted order: one that brings them there itself asks for their room.
 * Columns in an order of their own it moves at the same time. */
static bool wants_sorted(const epmoe_grouped_gemm_args_t *gemm1, int64_t gemm1_bytes, const plan_t *plan)
{
    const int64_t row_bytes = (int64_t)gemm1->k * epmoe_dtype_size(gemm1->x_dtype);
    return plan->h_quantised ||
           (gemm1_bytes >= gemm1->max_rows * row_bytes && !gemm1->fp8_activations && !gemm1->weight.g_idx);
}

/* The one place where the workspace is laid out; base NULL counts. */
static epmoe_status_t plan_layout(char *base, const epmoe_experts_args_t *args, plan_t *plan)
{
    epmoe_backend_t backend;
    EPMOEI_CHECK(epmoe_backend_resolve(args->backend, &backend));
    bool cuda = backend == EPMOE_BACKEND_CUDA;
    memset(plan, 0, sizeof *plan);
    plan->chunk_tokens = chunk_tokens(args, cuda);
    /* A weighted row may be rounded to bf16, where it halves the traffic; an fp16 row could overflow before the other
     * slots bring it back. */
    plan->slot_dtype = cuda && args->dtype == EPMOE_BF16 ? EPMOE_BF16 : EPMOE_F32;
    epmoe_align_args_t align = align_args(args, plan, 0, plan->chunk_tokens);
    epmoe_grouped_gemm_args_t gemm1 = gemm1_args(args, plan, 0, plan->chunk_tokens);
    epmoe_grouped_gemm_args_t gemm2 = gemm2_args(args, plan, 0, plan->chunk_tokens);
    const epmoei_kernel_table_t *kernels;
    EPMOEI_CHECK(epmoei_kernels(args->backend, &kernels));
    plan->h_quantised = kernels->grouped_gemm_fp8_rows && epmoei_grouped_gemm_fp8_chains_sm90(&gemm1, &gemm2);
    int64_t gemm1_bytes, gemm2_bytes;
    EPMOEI_CHECK(epmoe_align_workspace_size(&align, &plan->align_bytes));
    epmoe_status_t status = epmoe_grouped_gemm_workspace_size(&gemm1, &gemm1_bytes);
    if (status != EPMOE_OK) return epmoei_fail_context(status, "gate_up");
    status = epmoe_grouped_gemm_workspace_size(&gemm2, &gemm2_bytes);
    if (status != EPMOE_OK) return epmoei_fail_context(status, "down");
    plan->gemm_bytes = plan->h_quantised ? gemm1_bytes : epmoei_max64(gemm1_bytes, gemm2_bytes);

    epmoei_arena_t arena = {base, 0};
    int64_t slots = (int64_t)plan->chunk_tokens * args->top_k;
    plan->sorted_ids = epmoei_carve(&arena, slots * 4);
    plan->num_post_padded = epmoei_carve(&arena, 4);
    plan->expert_offsets = epmoei_carve(&arena, ((int64_t)args->num_experts + 1) * 4);
    if (kernels->scatter_rows && plan->chunk_tokens <= EPMOEI_SCATTER_MOST_TOKENS &&
        wants_sorted(&gemm1, gemm1_bytes, plan))
        plan->places = epmoei_carve(&arena, slots * 4), plan->dealt = epmoei_carve(&arena, 2 * 4);
    int64_t h_bytes = plan->h_quantised ? epmoei_fp8_rows_layout(NULL, slots, args->intermediate, &plan->h_rows)
                                        : slots * args->intermediate * epmoe_dtype_size(args->dtype);
    plan->h = epmoei_carve(&arena, h_bytes);
    if (plan->h_quantised) epmoei_fp8_rows_layout(plan->h, slots, args->intermediate, &plan->h_rows);
    plan->slots = epmoei_carve(&arena, slots * args->hidden * epmoe_dtype_size(plan->slot_dtype));
    plan->align_workspace = epmoei_carve(&arena, plan->align_bytes);
    plan->bytes_before_gemm = arena.used;
    plan->gemm_workspace = epmoei_carve(&arena, plan->gemm_bytes);
    plan->bytes = arena.used;
    return EPMOE_OK;
}

epmoe_status_t epmoei_experts_check_shape(const epmoe_experts_args_t *args, epmoe_experts_args_t *out)
{
    EPMOEI_CHECK(epmoei_copy_sized(out, sizeof *out, args, "experts args"));
    if (out->num_tokens < 0)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "num_tokens is %d: expected at least 0", out->num_tokens);
    if (out->top_k < 1 || out->top_k > EPMOE_MAX_TOP_K)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "top_k is %d: expected 1..%d", out->top_k, EPMOE_MAX_TOP_K);
    if (out->hidden < 1 || out->intermediate < 1 || out->intermediate > INT32_MAX / 2)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "hidden is %d and intermediate is %d: expected at least 1",
                           out->hidden, out->intermediate);
    if (out->y_dtype == EPMOE_DTYPE_NONE) out->y_dtype = out->dtype;
    if (!epmoei_dtype_is_float(out->dtype) || !epmoei_dtype_is_float(out->y_dtype))
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "dtype is %d and y_dtype is %d: expected F32, BF16 or F16",
                           (int)out->dtype, (int)out->y_dtype);
    if (out->weight_on_input != 0 && out->weight_on_input != 1)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "weight_on_input is %d: expected 0 or 1",
                           out->weight_on_input);
    /* The rest is checked by the ops when the plan asks them for their workspaces. */
    return epmoei_activation_check(out->activation, false, &out->alpha, &out->limit);
}

static epmoe_status_t check_pointers(const epmoe_experts_args_t *args)
{
    const struct {
        const char *name;
        const void *pointer;
    } needed[] = {
        {"x", args->x},
        {"ids", args->ids},
        {"weights", args->weights},
        {"y", args->y},
    };
    for (size_t i = 0; i < sizeof needed / sizeof needed[0]; i++)
        if (!needed[i].pointer) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s is NULL", needed[i].name);
    EPMOEI_CHECK(epmoei_weight_check_pointers(&args->gate_up, "gate_up"));
    EPMOEI_CHECK(epmoei_weight_check_pointers(&args->down, "down"));
    if (args->y == args->x && epmoe_dtype_size(args->y_dtype) != epmoe_dtype_size(args->dtype))
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                           "y aliases x with y_dtype %s and dtype %s: expected equal sizes",
                           epmoe_dtype_string(args->y_dtype), epmoe_dtype_string(args->dtype));
    return EPMOE_OK;
}

/* On the CPU before anything is written; CUDA kernels read the count themselves, treat bad ids as unused and count
 * them. */
static epmoe_status_t check_host_values(epmoe_experts_args_t *args)
{
    epmoe_backend_t backend;
    EPMOEI_CHECK(epmoe_backend_resolve(args->backend, &backend));
    if (backend != EPMOE_BACKEND_CPU) return EPMOE_OK;
    EPMOEI_CHECK(epmoei_actual_tokens(args->num_tokens_dev, args->num_tokens, &args->num_tokens));
    args->num_tokens_dev = NULL;
    int64_t slots = (int64_t)args->num_tokens * args->top_k;
    for (int64_t s = 0; s < slots; s++)
        if (args->ids[s] < -1 || args->ids[s] >= args->num_experts)
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "ids[%lld,%lld] is %d: expected -1..%d",
                               (long long)(s / args->top_k), (long long)(s % args->top_k), args->ids[s],
                               args->num_experts - 1);
    return EPMOE_OK;
}

static epmoe_status_t check_workspace(const epmoe_experts_args_t *args, int64_t bytes)
{
    if (args->workspace && args->workspace_bytes >= bytes) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "workspace is %p with workspace_bytes %lld: expected %lld",
                       args->workspace, (long long)args->workspace_bytes, (long long)bytes);
}

/* x by its slots' places, quantised where `quantised` is given, else in place of args->x. */
static epmoe_status_t scatter(epmoe_grouped_gemm_args_t *args, const int32_t *num_tokens_dev, const plan_t *plan,
                              const epmoei_kernel_table_t *kernels, const epmoei_fp8_rows_t *quantised,
                              epmoe_stream_t stream)
{
    epmoei_scatter_rows_args_t rows = {0};
    rows.num_tokens = args->num_slots / args->x_row_divisor;
    rows.num_tokens_dev = num_tokens_dev;
    rows.top_k = args->x_row_divisor;
    rows.columns = args->k;
    rows.dtype = args->x_dtype;
    rows.x = args->x;
    rows.places = plan->places;
    rows.dealt = plan->dealt;
    if (quantised)
        rows.quantised = *quantised;
    else
        rows.rows = args->workspace;
    EPMOEI_CHECK(kernels->scatter_rows(&rows, stream));
    if (quantised) return EPMOE_OK;
    args->x = args->workspace;
    args->x_sorted = 1;
    args->x_row_divisor = 1;
    return EPMOE_OK;
}

/* `codes` in place of x, or NULL; `placed`: plan->places are there. */
static epmoe_status_t run_gemm1(epmoe_grouped_gemm_args_t *args, const int32_t *num_tokens_dev,
                                const epmoei_coded_rows_t *codes, bool placed, const plan_t *plan,
                                const epmoei_kernel_table_t *kernels, epmoe_stream_t stream)
{
    if (!plan->h_quantised) {
        if (!placed) return epmoe_grouped_gemm(args, stream);
        EPMOEI_CHECK(scatter(args, num_tokens_dev, plan, kernels, NULL, stream));
        return epmoei_grouped_gemm_chained(args, plan->dealt, stream);
    }
    epmoe_grouped_gemm_args_t checked;
    epmoei_fp8_rows_t x;
    EPMOEI_CHECK(epmoei_grouped_gemm_check(args, &checked));
    EPMOEI_CHECK(epmoei_grouped_gemm_quant_check_cuda(&checked));
    if (!codes && !placed) return kernels->grouped_gemm_fp8_rows(&checked, NULL, &plan->h_rows, stream);
    epmoei_fp8_rows_layout(checked.workspace, checked.max_rows, checked.k, &x);
    EPMOEI_CHECK(codes ? kernels->gather_coded_rows(&checked, codes, &x, stream)
                       : scatter(&checked, num_tokens_dev, plan, kernels, &x, stream));
    return kernels->grouped_gemm_fp8_rows(&checked, &x, &plan->h_rows, stream);
}

/* `placed`: as it was for run_gemm1, before this. */
static epmoe_status_t run_gemm2(const epmoe_grouped_gemm_args_t *args, bool placed, const plan_t *plan,
                                const epmoei_kernel_table_t *kernels, epmoe_stream_t stream)
{
    if (!plan->h_quantised) return epmoei_grouped_gemm_chained(args, placed ? plan->dealt + 1 : NULL, stream);
    epmoe_grouped_gemm_args_t checked;
    EPMOEI_CHECK(epmoei_grouped_gemm_check(args, &checked));
    EPMOEI_CHECK(epmoei_grouped_gemm_quant_check_cuda(&checked));
    return kernels->grouped_gemm_fp8_rows(&checked, &plan->h_rows, NULL, stream);
}

static epmoe_status_t run_chunks(const epmoe_experts_args_t *args, const epmoei_coded_rows_t *codes, const plan_t *plan,
                                 bool aligned, const epmoei_kernel_table_t *kernels, epmoe_stream_t stream,
                                 epmoei_stages_t *stages)
{
    const bool placed = aligned && plan->places;
    for (int32_t first = 0; first < args->num_tokens; first += plan->chunk_tokens) {
        int32_t tokens = (int32_t)epmoei_min64(plan->chunk_tokens, args->num_tokens - first);
        epmoe_align_args_t align = align_args(args, plan, first, tokens);
        if (!aligned) EPMOEI_CHECK(epmoe_align_block_size(&align, stream));
        EPMOEI_CHECK(epmoei_stages_end(stages, EPMOE_STAGE_ALIGN));

        epmoe_grouped_gemm_args_t gemm1 = gemm1_args(args, plan, first, tokens);
        EPMOEI_CHECK(run_gemm1(&gemm1, args->num_tokens_dev, codes, placed, plan, kernels, stream));
        EPMOEI_CHECK(epmoei_stages_end(stages, EPMOE_STAGE_GEMM1));

        epmoe_grouped_gemm_args_t gemm2 = gemm2_args(args, plan, first, tokens);
        EPMOEI_CHECK(run_gemm2(&gemm2, placed, plan, kernels, stream));
        EPMOEI_CHECK(epmoei_stages_end(stages, EPMOE_STAGE_GEMM2));

        epmoe_sum_args_t sum = EPMOE_SUM_ARGS_INIT;
        sum.backend = args->backend;
        sum.num_tokens = tokens;
        sum.top_k = args->top_k;
        sum.hidden = args->hidden;
        sum.y_dtype = plan->slot_dtype;
        sum.out_dtype = args->y_dtype;
        sum.y = plan->slots;
        sum.num_tokens_dev = args->num_tokens_dev;
        sum.ids = args->ids + (int64_t)first * args->top_k;
        int64_t at = (int64_t)first * args->hidden;
        sum.addend = args->addend ? args->addend + at : NULL;
        sum.residual = args->residual ? (const char *)args->residual + at * epmoe_dtype_size(args->y_dtype) : NULL;
        sum.out = (char *)args->y + at * epmoe_dtype_size(args->y_dtype);
        EPMOEI_CHECK(epmoei_sum_aligned(&sum, args->num_experts, stream));
        EPMOEI_CHECK(epmoei_stages_end(stages, EPMOE_STAGE_COMBINE));
    }
    return EPMOE_OK;
}

/* Nothing is sorted, and the second product sums. */
static epmoe_status_t run_few(const epmoe_experts_args_t *args, const plan_t *plan,
                              const epmoei_kernel_table_t *kernels, epmoe_stream_t stream, epmoei_stages_t *stages)
{
    EPMOEI_CHECK(epmoei_stages_end(stages, EPMOE_STAGE_ALIGN));
    EPMOEI_CHECK(kernels->experts_few_gate_up(args, plan->h, stream));
    EPMOEI_CHECK(epmoei_stages_end(stages, EPMOE_STAGE_GEMM1));
    EPMOEI_CHECK(kernels->experts_few_down(args, plan->h, stream));
    EPMOEI_CHECK(epmoei_stages_end(stages, EPMOE_STAGE_GEMM2));
    return epmoei_stages_end(stages, EPMOE_STAGE_COMBINE);
}

static epmoe_status_t run(const epmoe_experts_args_t *args, const epmoei_coded_rows_t *codes, const plan_t *plan,
                          bool aligned, epmoe_stream_t stream, epmoei_stages_t *stages)
{
    const epmoei_kernel_table_t *kernels;
    EPMOEI_CHECK(epmoei_kernels(args->backend, &kernels));
    return kernels->experts_few_gate_up && epmoei_experts_few_takes(args)
               ? run_few(args, plan, kernels, stream, stages)
               : run_chunks(args, codes, plan, aligned, kernels, stream, stages);
}

epmoe_status_t epmoei_experts_order(const epmoe_experts_args_t *args, epmoei_experts_order_t *order)
{
    plan_t plan;
    EPMOEI_CHECK(plan_layout(args->workspace, args, &plan));
    EPMOEI_CHECK(check_workspace(args, plan.bytes_before_gemm));
    *order = (epmoei_experts_order_t){plan.sorted_ids, plan.num_post_padded, plan.expert_offsets, plan.places};
    return EPMOE_OK;
}

static epmoe_status_t run_held(const epmoe_experts_args_t *args, const epmoei_coded_rows_t *codes, bool aligned,
                               epmoe_stream_t stream, epmoei_stages_t *stages)
{
    if (args->num_tokens == 0) return EPMOE_OK;
    plan_t plan;
    EPMOEI_CHECK(plan_layout(args->workspace, args, &plan));
    EPMOEI_CHECK(check_workspace(args, plan.bytes_before_gemm));
    /* The GEMM takes as many threads as it finds room for: since the workspace was made there may be more. */
    plan.gemm_bytes = args->workspace_bytes - plan.bytes_before_gemm;
    /* What this call finds is for the next one, and must not end this one half way, whenever the device gets there. */
    epmoei_error_word_hold(1);
    epmoe_status_t status = run(args, codes, &plan, aligned, stream, stages);
    epmoei_error_word_hold(-1);
    return status;
}

epmoe_status_t epmoei_experts_run(const epmoe_experts_args_t *args, bool aligned, epmoe_stream_t stream,
                                  epmoei_stages_t *stages)
{
    return run_held(args, NULL, aligned, stream, stages);
}

bool epmoei_experts_take_codes(const epmoe_experts_args_t *args)
{
    plan_t plan;
    const epmoei_kernel_table_t *kernels;
    if (!args->fp8_activations || epmoei_kernels(args->backend, &kernels) != EPMOE_OK) return false;
    if (!kernels->gather_coded_rows || epmoei_experts_few_takes(args)) return false;
    return plan_layout(NULL, args, &plan) == EPMOE_OK && plan.h_quantised;
}

epmoe_status_t epmoei_experts_run_codes(const epmoe_experts_args_t *args, const epmoei_coded_rows_t *x,
                                        epmoe_stream_t stream, epmoei_stages_t *stages)
{
    return run_held(args, x, false, stream, stages);
}

epmoe_status_t epmoe_experts_workspace_size(const epmoe_experts_args_t *args, int64_t *bytes)
{
    if (!bytes) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "bytes is NULL");
    epmoe_experts_args_t checked;
    plan_t plan;
    EPMOEI_CHECK(epmoei_experts_check_shape(args, &checked));
    EPMOEI_CHECK(plan_layout(NULL, &checked, &plan));
    *bytes = checked.num_tokens ? plan.bytes : 0;
    return EPMOE_OK;
}

epmoe_status_t epmoe_experts(const epmoe_experts_args_t *args, epmoe_stream_t stream)
{
    epmoe_experts_args_t checked;
    plan_t plan;
    EPMOEI_CHECK(epmoei_experts_check_shape(args, &checked));
    EPMOEI_CHECK(plan_layout(NULL, &checked, &plan));
    if (checked.num_tokens == 0) return EPMOE_OK;
    EPMOEI_CHECK(check_pointers(&checked));
    EPMOEI_CHECK(check_host_values(&checked));
    EPMOEI_CHECK(check_workspace(&checked, plan.bytes));
    return epmoei_experts_run(&checked, false, stream, NULL);
}
