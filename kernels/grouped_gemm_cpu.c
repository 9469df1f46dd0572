/* The CPU's grouped GEMM. The work is cut into tasks of one expert, one tile of its outputs and one block of its rows:
 *   few rows    weights stream once from memory as they are stored, through grouped_gemm_cpu_rows.c: bound by memory
 *   many rows   weight tiles are widened to fp32 in cache and multiplied by cblas_sgemm: bound by arithmetic
 * Quantised weights go through both in pieces of K (grouped_gemm_cpu_quant.c).
 * Every output belongs to one task, so results do not depend on the number of threads. */
#include "kernels/grouped_gemm.h"

#include "base/dtype.h"
#include "kernels/activation.h"
#include "kernels/blas_threads.h"
#include "kernels/grouped_gemm_cpu_quant.h"
#include "kernels/quantize_fp8.h"

#include <cblas.h>
#include <omp.h>

enum {
    kSmallRows = 64,                 /* rows of an expert up to which streaming wins (docs/performance) */
    kSmallTile = 32,                 /* outputs of a streaming task: 64 weight rows when gated */
    kBlasRows = 256,                 /* rows of a BLAS task */
    kBlasTile = 64,                  /* outputs of a BLAS task: 128 weight rows when gated */
    kBlasDepth = EPMOEI_QUANT_DEPTH, /* K per sgemm: keeps a thread's widened tile in its L2 cache */
};

typedef struct plan_t {
    float *x;            /* [x_rows,K] widened, or NULL when x is F32 and used as it is */
    int64_t *task_start; /* [E+1] */
    char *threads;       /* thread_bytes each */
    int64_t fixed_bytes;
    int64_t thread_bytes;
} plan_t;

typedef struct scratch_t {
    float *out;                /* [2*tile, rows]: products, weight row major */
    float *w;                  /* BLAS: [2*tile, depth] */
    float *x;                  /* BLAS: [rows, depth] */
    const float **x_rows;      /* [rows] */
    const void **w_rows;       /* [2*tile] */
    int64_t *w_index;          /* [2*tile]: rows of w; quantised weights only */
    epmoei_coded_row_t *coded; /* [2*tile]: the same */
    const float **x_at;        /* [rows]: the same */
    int32_t *slots;            /* [rows] */
    int32_t *y_rows;           /* [rows] */
} scratch_t;

static int64_t scratch_layout(char *base, const epmoe_grouped_gemm_args_t *args, scratch_t *scratch)
{
    epmoei_arena_t arena = {base, 0};
    int64_t depth = epmoei_min64(args->k, kBlasDepth);
    int64_t rows = epmoei_min64(args->max_rows, kBlasRows);
    scratch->out = epmoei_carve(&arena, (int64_t)2 * kBlasTile * rows * 4);
    scratch->w = epmoei_carve(&arena, (int64_t)2 * kBlasTile * depth * 4);
    scratch->x = epmoei_carve(&arena, rows * depth * 4);
    scratch->x_rows = epmoei_carve(&arena, rows * (int64_t)sizeof *scratch->x_rows);
    scratch->w_rows = epmoei_carve(&arena, (int64_t)2 * kBlasTile * (int64_t)sizeof *scratch->w_rows);
    scratch->w_index = epmoei_carve(&arena, (int64_t)2 * kBlasTile * (int64_t)sizeof *scratch->w_index);
    scratch->coded = epmoei_carve(&arena, (int64_t)2 * kBlasTile * (int64_t)sizeof *scratch->coded);
    scratch->x_at = epmoei_carve(&arena, rows * (int64_t)sizeof *scratch->x_at);
    scratch->slots = epmoei_carve(&arena, rows * 4);
    scratch->y_rows = epmoei_carve(&arena, rows * 4);
    return arena.used;
}

static int64_t count_x_rows(const epmoe_grouped_gemm_args_t *args)
{
    return args->x_sorted ? args->max_rows : args->num_slots / args->x_row_divisor;
}

static plan_t plan_layout(char *base, const epmoe_grouped_gemm_args_t *args)
{
    plan_t plan;
    scratch_t scratch;
    epmoei_arena_t arena = {base, 0};
    int64_t x_elements = count_x_rows(args) * args->k;
    bool as_is = args->x_dtype == EPMOE_F32 && !args->fp8_activations;
    plan.x = as_is ? NULL : epmoei_carve(&arena, x_elements * 4);
    plan.task_start = epmoei_carve(&arena, ((int64_t)args->num_experts + 1) * 8);
    plan.fixed_bytes = arena.used;
    plan.thread_bytes = scratch_layout(NULL, args, &scratch);
    plan.threads = base ? base + plan.fixed_bytes : NULL;
    return plan;
}

int64_t epmoei_grouped_gemm_workspace_cpu(const epmoe_grouped_gemm_args_t *args)
{
    plan_t plan = plan_layout(NULL, args);
    return plan.fixed_bytes + plan.thread_bytes * omp_get_max_threads();
}

static bool uses_blas(const epmoe_grouped_gemm_args_t *args, int32_t rows)
{
    return rows > kSmallRows && !args->batch_invariant;
}

static const void *weight_row(const epmoe_grouped_gemm_args_t *args, int32_t expert, int64_t row)
{
    int64_t element = ((int64_t)expert * args->n + row) * args->k;
    return (const char *)args->weight.data + element * epmoe_dtype_size(epmoei_dtype_of_format(args->weight.format));
}

/* Row of w that output i reads: its gate (or only) row, or its up row. */
static int64_t output_row(const epmoe_grouped_gemm_args_t *args, int32_t i, bool up)
{
    if (!epmoei_activation_is_gated(args->activation)) return i;
    if (args->layout == EPMOE_LAYOUT_INTERLEAVED) return (int64_t)2 * i + up;
    return up ? (int64_t)args->n / 2 + i : i;
}

static void multiply_blas(const epmoe_grouped_gemm_args_t *args, const scratch_t *scratch, int32_t num_w, int32_t rows)
{
    epmoe_dtype_t dtype = epmoei_dtype_of_format(args->weight.format);
    for (int32_t first = 0; first < args->k; first += kBlasDepth) {
        int32_t depth = (int32_t)epmoei_min64(kBlasDepth, args->k - first);
        for (int32_t w = 0; w < num_w; w++)
            epmoei_to_f32(scratch->w + (int64_t)w * depth,
                          (const char *)scratch->w_rows[w] + (int64_t)first * epmoe_dtype_size(dtype), dtype, depth);
        for (int32_t r = 0; r < rows; r++)
            memcpy(scratch->x + (int64_t)r * depth, scratch->x_rows[r] + first, (size_t)depth * 4);
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, num_w, rows, depth, 1.0f, scratch->w, depth, scratch->x,
                    depth, first ? 1.0f : 0.0f, scratch->out, rows);
    }
}

/* Bias, activation, router weight and rounding of outputs [first, first+count) of `rows` rows. */
static void finish(const epmoe_grouped_gemm_args_t *args, const scratch_t *scratch, int32_t expert, int32_t first,
                   int32_t count, int32_t rows)
{
    bool gated = epmoei_activation_is_gated(args->activation);
    int32_t n_out = gated ? args->n / 2 : args->n;
    const float *bias = args->bias ? args->bias + (int64_t)expert * args->n : NULL;
    for (int32_t r = 0; r < rows; r++) {
        int32_t slot = scratch->slots[r];
        float weight = args->row_weights ? args->row_weights[slot] : 1.0f;
        float weight_in = args->weight_on_input ? weight : 1.0f;
        float weight_out = args->weight_on_input ? 1.0f : weight;
        for (int32_t i = 0; i < count; i++) {
            float value = scratch->out[(int64_t)i * rows + r] * weight_in;
            if (bias) value += bias[output_row(args, first + i, false)];
            if (gated) {
                float up = scratch->out[(int64_t)(count + i) * rows + r] * weight_in;
                if (bias) up += bias[output_row(args, first + i, true)];
                value = epmoei_activate(args->activation, value, up, args->alpha, args->limit);
            } else if (args->activation == EPMOE_ACTIVATION_SIGMOID)
                value = epmoei_sigmoid(value);
            epmoei_store(args->y, args->y_dtype, (int64_t)scratch->y_rows[r] * n_out + first + i, value * weight_out);
        }
    }
}

static void run_task(const epmoe_grouped_gemm_args_t *args, const float *x, const epmoei_rows_table_t *table,
                     const scratch_t *scratch, int32_t expert, int64_t task)
{
    int32_t row_end = args->expert_offsets[expert + 1];
    int32_t expert_rows = row_end - args->expert_offsets[expert];
    bool gated = epmoei_activation_is_gated(args->activation);
    bool blas = uses_blas(args, expert_rows);
    int32_t n_out = gated ? args->n / 2 : args->n;
    int32_t tile = blas ? kBlasTile : kSmallTile, block = blas ? kBlasRows : kSmallRows;
    int32_t blocks = (int32_t)epmoei_ceil_div(expert_rows, block);

    int32_t row = args->expert_offsets[expert] + (int32_t)(task % blocks) * block;
    row_end = (int32_t)epmoei_min64(row_end, (int64_t)row + block);
    int32_t rows = 0;
    for (; row < row_end; row++) {
        int32_t slot = args->row_index ? args->row_index[row] : row;
        if (slot >= args->num_slots) continue;
        scratch->slots[rows] = slot;
        scratch->y_rows[rows] = args->y_sorted ? row : slot;
        scratch->x_rows[rows++] = x + (int64_t)(args->x_sorted ? row : slot / args->x_row_divisor) * args->k;
    }
    if (rows == 0) return;

    int32_t first = (int32_t)(task / blocks) * tile;
    int32_t count = (int32_t)epmoei_min64(tile, n_out - first);
    int32_t num_w = gated ? 2 * count : count;
    if (epmoei_format_is_quantised(args->weight.format)) {
        for (int32_t w = 0; w < num_w; w++) scratch->w_index[w] = output_row(args, first + w % count, w >= count);
        epmoei_quant_tile_t quant = {.args = args,
                                     .table = table,
                                     .blas = blas,
                                     .expert = expert,
                                     .num_w = num_w,
                                     .num_gate = count,
                                     .rows = rows,
                                     .w_index = scratch->w_index,
                                     .x_rows = scratch->x_rows,
                                     .w = scratch->w,
                                     .x = scratch->x,
                                     .part = scratch->out + (int64_t)num_w * rows,
                                     .w_rows = scratch->w_rows,
                                     .coded = scratch->coded,
                                     .x_at = scratch->x_at,
                                     .out = scratch->out};
        epmoei_quant_tile_multiply(&quant);
        finish(args, scratch, expert, first, count, rows);
        return;
    }
    for (int32_t w = 0; w < num_w; w++)
        scratch->w_rows[w] = weight_row(args, expert, output_row(args, first + w % count, w >= count));

    if (blas) {
        multiply_blas(args, scratch, num_w, rows);
    } else {
        epmoei_rows_fn multiply = args->weight.format == EPMOE_FORMAT_BF16  ? table->bf16
                                  : args->weight.format == EPMOE_FORMAT_F16 ? table->f16
                                                                            : table->f32;
        multiply(scratch->w_rows, num_w, scratch->x_rows, rows, args->k, scratch->out, rows);
    }
    finish(args, scratch, expert, first, count, rows);
}

static int64_t count_tasks(const epmoe_grouped_gemm_args_t *args, int64_t *task_start)
{
    int32_t n_out = epmoei_activation_is_gated(args->activation) ? args->n / 2 : args->n;
    int64_t tasks = 0;
    for (int32_t e = 0; e < args->num_experts; e++) {
        int32_t rows = args->expert_offsets[e + 1] - args->expert_offsets[e];
        bool blas = uses_blas(args, rows);
        task_start[e] = tasks;
        tasks += epmoei_ceil_div(rows, blas ? kBlasRows : kSmallRows) *
                 epmoei_ceil_div(n_out, blas ? kBlasTile : kSmallTile);
    }
    task_start[args->num_experts] = tasks;
    return tasks;
}

/* The expert whose tasks contain `task`. */
static int32_t find_expert(const int64_t *task_start, int32_t num_experts, int64_t task)
{
    int32_t lo = 0, hi = num_experts;
    while (hi - lo > 1) {
        int32_t mid = lo + (hi - lo) / 2;
        if (task_start[mid] <= task)
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}

static const epmoei_rows_table_t *rows_table(void)
{
    switch (epmoei_cpu_tier()) {
#if defined(__x86_64__)
    case EPMOEI_CPU_AVX512: return &epmoei_rows_avx512;
    case EPMOEI_CPU_AVX2: return &epmoei_rows_avx2;
#endif
    default: return &epmoei_rows_generic;
    }
}

epmoe_status_t epmoei_grouped_gemm_cpu(const epmoe_grouped_gemm_args_t *args, epmoe_stream_t stream)
{
    (void)stream;
    plan_t plan = plan_layout(args->workspace, args);
    int64_t fitting = plan.thread_bytes ? (args->workspace_bytes - plan.fixed_bytes) / plan.thread_bytes : 0;
    if (!args->workspace || fitting < 1)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "workspace is %p with workspace_bytes %lld: expected %lld",
                           args->workspace, (long long)args->workspace_bytes,
                           (long long)epmoei_grouped_gemm_workspace_cpu(args));

    int64_t tasks = count_tasks(args, plan.task_start);
    if (tasks == 0) return EPMOE_OK;
    int threads = (int)epmoei_min64(epmoei_min64(fitting, omp_get_max_threads()), tasks);
    const epmoei_rows_table_t *table = rows_table();
    const float *x = plan.x ? plan.x : args->x;
    int64_t x_rows = count_x_rows(args);

    epmoei_blas_region_begin();
#pragma omp parallel num_threads(threads)
    {
        scratch_t scratch;
        scratch_layout(plan.threads + plan.thread_bytes * omp_get_thread_num(), args, &scratch);
        if (plan.x) {
#pragma omp for schedule(static)
            for (int64_t r = 0; r < x_rows; r++) {
                if (args->x_quant) {
                    epmoei_grouped_gemm_widen_row(args, r, plan.x + r * args->k);
                    continue;
                }
                epmoei_to_f32(plan.x + r * args->k,
                              (const char *)args->x + r * args->k * epmoe_dtype_size(args->x_dtype), args->x_dtype,
                              args->k);
                if (args->fp8_activations) epmoei_quantize_fp8_round_row(plan.x + r * args->k, args->k);
            }
        }
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < tasks; task++) {
            int32_t expert = find_expert(plan.task_start, args->num_experts, task);
            run_task(args, x, table, &scratch, expert, task - plan.task_start[expert]);
        }
    }
    epmoei_blas_region_end();
    return EPMOE_OK;
}
