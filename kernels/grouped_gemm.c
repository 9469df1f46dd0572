#include "kernels/grouped_gemm.h"

#include "base/dtype.h"
#include "base/fp8.h"
#include "kernels/activation.h"
#include "kernels/dequant.h"
#include "kernels/grouped_gemm_quant.h"
#include "kernels/op_check.h"
#include "kernels/quant_formats.h"
#include "kernels/quantize_fp8.h"

/* Fills in the defaults of a quantised one. */
static epmoe_status_t check_weight(epmoe_weight_t *weight, int32_t k, bool need_data)
{
    bool quantised = epmoei_format_is_quantised(weight->format);
    if (!quantised && epmoei_dtype_of_format(weight->format) == EPMOE_DTYPE_NONE)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "weight.format is %d: expected an epmoe_format_t",
                           (int)weight->format);
    if (quantised) EPMOEI_CHECK(epmoei_quant_check_weight(weight, "weight", k));
    if (!quantised) EPMOEI_CHECK(epmoei_weight_check_storage(weight, "weight"));
    return need_data ? epmoei_weight_check_pointers(weight, "weight") : EPMOE_OK;
}

static epmoe_status_t check_flag(const char *name, int32_t value)
{
    if (value == 0 || value == 1) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s is %d: expected 0 or 1", name, value);
}

/* x of codes has a scale, and no other has. */
static epmoe_status_t check_x(epmoe_grouped_gemm_args_t *args)
{
    const bool codes = args->x_dtype == EPMOE_F8_E4M3;
    if ((!codes && !epmoei_dtype_is_float(args->x_dtype)) || !epmoei_dtype_is_float(args->y_dtype))
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                           "x_dtype is %d and y_dtype is %d: expected F32, BF16 or F16, of x also F8_E4M3",
                           (int)args->x_dtype, (int)args->y_dtype);
    EPMOEI_CHECK(check_flag("fp8_activations", args->fp8_activations));
    if (args->fp8_activations && args->weight.format != EPMOE_FORMAT_FP8_BLOCK)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                           "fp8_activations is 1 and weight.format %s: expected fp8_block",
                           epmoe_format_string(args->weight.format));
    if (codes && args->weight.format != EPMOE_FORMAT_FP8_BLOCK)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "x_dtype is F8_E4M3 and weight.format %s: expected fp8_block",
                           epmoe_format_string(args->weight.format));
    const int32_t least = codes ? EPMOE_GRANULARITY_TENSOR : 0, most = codes ? EPMOE_GRANULARITY_BLOCK128 : 0;
    if ((int32_t)args->x_quant < least || (int32_t)args->x_quant > most)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "x_quant is %d and x_dtype %s: expected %d..%d",
                           (int)args->x_quant, epmoe_dtype_string(args->x_dtype), least, most);
    if (!codes && args->x_scale)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "x_scale is given and x_dtype %s: expected F8_E4M3",
                           epmoe_dtype_string(args->x_dtype));
    args->fp8_activations |= codes;
    return EPMOE_OK;
}

static epmoe_status_t check_volumes(const epmoe_grouped_gemm_args_t *args)
{
    const int64_t rows = epmoei_max64(args->max_rows, args->num_slots);
    EPMOEI_CHECK(epmoei_check_volume("weight", args->num_experts, args->n, args->k));
    EPMOEI_CHECK(epmoei_check_volume("x", rows, args->k, 1));
    return epmoei_check_volume("y", rows, args->n, 1);
}

/* Sizes and enums, what a workspace query needs; `out` is normalised. */
static epmoe_status_t check_shape(const epmoe_grouped_gemm_args_t *args, epmoe_grouped_gemm_args_t *out)
{
    EPMOEI_CHECK(epmoei_copy_sized(out, sizeof *out, args, "grouped_gemm args"));
    if (out->num_experts < 1 || out->num_experts > EPMOE_MAX_EXPERTS)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "num_experts is %d: expected 1..%d", out->num_experts,
                           EPMOE_MAX_EXPERTS);
    if (out->n < 1 || out->k < 1)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "n is %d and k is %d: expected at least 1", out->n, out->k);
    if (out->max_rows < 0 || out->num_slots < 0)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "max_rows is %d and num_slots is %d: expected at least 0",
                           out->max_rows, out->num_slots);
    if (out->num_slots == 0) out->num_slots = out->max_rows;
    if (out->x_row_divisor == 0) out->x_row_divisor = 1;
    if (out->x_row_divisor < 0)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "x_row_divisor is %d: expected at least 1",
                           out->x_row_divisor);
    if (out->num_slots % out->x_row_divisor)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "num_slots is %d: expected a multiple of x_row_divisor (%d)",
                           out->num_slots, out->x_row_divisor);
    EPMOEI_CHECK(check_volumes(out));
    EPMOEI_CHECK(check_x(out));
    if ((int)out->layout < EPMOE_LAYOUT_GATE_FIRST || out->layout > EPMOE_LAYOUT_PACKED)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "layout is %d: expected an epmoe_layout_t", (int)out->layout);
    EPMOEI_CHECK(check_flag("weight_on_input", out->weight_on_input));
    EPMOEI_CHECK(check_flag("batch_invariant", out->batch_invariant));
    EPMOEI_CHECK(check_flag("x_sorted", out->x_sorted));
    EPMOEI_CHECK(check_flag("y_sorted", out->y_sorted));
    EPMOEI_CHECK(epmoei_activation_check(out->activation, true, &out->alpha, &out->limit));
    if (epmoei_activation_is_gated(out->activation) && out->n % 2)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "n is %d: expected an even number with a gated activation",
                           out->n);
    return check_weight(&out->weight, out->k, false);
}

static epmoe_status_t check_rows(const epmoe_grouped_gemm_args_t *args)
{
    const int32_t *offsets = args->expert_offsets;
    if (offsets[0] < 0)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "expert_offsets[0] is %d: expected at least 0", offsets[0]);
    for (int32_t e = 0; e < args->num_experts; e++)
        if (offsets[e + 1] < offsets[e])
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "expert_offsets[%d] is %d after %d: expected no decrease",
                               e + 1, offsets[e + 1], offsets[e]);
    if (offsets[args->num_experts] > args->max_rows)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "expert_offsets[%d] is %d: expected at most max_rows (%d)",
                           args->num_experts, offsets[args->num_experts], args->max_rows);
    if (!args->row_index) return EPMOE_OK;
    for (int32_t r = offsets[0]; r < offsets[args->num_experts]; r++)
        if (args->row_index[r] < 0)
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "row_index[%d] is %d: expected at least 0", r,
                               args->row_index[r]);
    return EPMOE_OK;
}

epmoe_status_t epmoei_grouped_gemm_check(const epmoe_grouped_gemm_args_t *args, epmoe_grouped_gemm_args_t *out)
{
    EPMOEI_CHECK(check_shape(args, out));
    if (out->max_rows == 0) return EPMOE_OK;
    EPMOEI_CHECK(check_weight(&out->weight, out->k, true));
    const struct {
        const char *name;
        const void *pointer;
    } needed[] = {{"x", out->x}, {"y", out->y}};
    for (size_t i = 0; i < sizeof needed / sizeof needed[0]; i++)
        if (!needed[i].pointer) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s is NULL", needed[i].name);
    if (out->x_quant && !out->x_scale)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "x_scale is NULL: expected the scales of x, which is F8_E4M3");
    if (!out->expert_offsets && out->num_experts != 1)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "expert_offsets is NULL: expected offsets of %d experts",
                           out->num_experts);
    if (out->weight_on_input && !out->row_weights)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "row_weights is NULL: weight_on_input needs them");
    return EPMOE_OK;
}

/* Of x that is codes, with so many rows. */
static double x_scales(const epmoe_grouped_gemm_args_t *args, double x_rows)
{
    switch (args->x_quant) {
    case EPMOE_GRANULARITY_TENSOR: return x_rows > 0;
    case EPMOE_GRANULARITY_TOKEN: return x_rows;
    case EPMOE_GRANULARITY_BLOCK128: return x_rows * (double)epmoei_ceil_div(args->k, EPMOEI_FP8_COLUMNS);
    default: return 0;
    }
}

epmoei_floor_t epmoei_grouped_gemm_floor(const epmoe_grouped_gemm_args_t *args, int32_t active_experts, int64_t rows)
{
    double weight = (double)args->n * args->k;
    double weight_bytes = epmoei_weight_bytes(&args->weight, 1, args->n, args->k);
    double n_out = epmoei_activation_is_gated(args->activation) ? args->n / 2 : args->n;
    double x_rows = (double)rows / args->x_row_divisor;
    return (epmoei_floor_t){
        .bytes = active_experts * weight_bytes + x_rows * args->k * (double)epmoe_dtype_size(args->x_dtype) +
                 4 * x_scales(args, x_rows) + (double)rows * n_out * (double)epmoe_dtype_size(args->y_dtype),
        .flops = 2.0 * (double)rows * weight,
    };
}

/* Of the experts with rows: the others are not read. */
static epmoe_status_t check_indices(const epmoe_grouped_gemm_args_t *args)
{
    if (!epmoei_format_is_quantised(args->weight.format) || !args->weight.g_idx) return EPMOE_OK;
    int64_t half = epmoei_grouped_gemm_second_half(args);
    for (int32_t e = 0; e < args->num_experts; e++) {
        if (args->expert_offsets[e] == args->expert_offsets[e + 1]) continue;
        epmoei_quant_t quant = epmoei_quant_of_weight(&args->weight, args->n, args->k, e, half);
        for (int32_t orders = args->weight.format == EPMOE_FORMAT_W4 && half ? 2 : 1; orders > 0; orders--) {
            epmoe_status_t status = epmoei_quant_check_groups(&quant, "weight.g_idx");
            if (status != EPMOE_OK) return epmoei_fail_context(status, "expert %d", e);
            quant.g_idx = (const char *)quant.g_idx + (int64_t)args->k * 4;
        }
    }
    return EPMOE_OK;
}

int64_t epmoei_grouped_gemm_second_half(const epmoe_grouped_gemm_args_t *args)
{
    if (!epmoei_activation_is_gated(args->activation)) return 0;
    /* The orders of W4's columns are of gate and up rows, wherever they lie. */
    if (args->weight.format == EPMOE_FORMAT_W4) return args->n / 2;
    return args->layout == EPMOE_LAYOUT_PACKED ? args->n / 2 : 0;
}

typedef struct product_t {
    epmoe_status_t (*run)(const epmoe_grouped_gemm_args_t *args, epmoe_stream_t stream);
    epmoe_status_t (*chained)(const epmoe_grouped_gemm_args_t *args, int32_t *dealt,
                              epmoe_stream_t stream); /* or NULL */
    int64_t (*workspace)(const epmoe_grouped_gemm_args_t *args);
} product_t;

/* CUDA has kernels of their own for quantised weights, which check what these need beyond the shape. */
static epmoe_status_t choose(const epmoe_grouped_gemm_args_t *args, product_t *product)
{
    const epmoei_kernel_table_t *kernels;
    epmoe_backend_t backend;
    EPMOEI_CHECK(epmoei_kernels(args->backend, &kernels));
    EPMOEI_CHECK(epmoe_backend_resolve(args->backend, &backend));
    if (backend != EPMOE_BACKEND_CUDA) EPMOEI_CHECK(epmoei_weight_check_rows(&args->weight, "weight"));
    *product = (product_t){kernels->grouped_gemm, kernels->grouped_gemm_chained, kernels->grouped_gemm_workspace};
    if (backend != EPMOE_BACKEND_CUDA || !epmoei_format_is_quantised(args->weight.format)) return EPMOE_OK;
    EPMOEI_CHECK(epmoei_grouped_gemm_quant_check_cuda(args));
    if (args->weight.format == EPMOE_FORMAT_FP8_BLOCK)
        *product = (product_t){kernels->grouped_gemm_fp8, NULL, kernels->grouped_gemm_fp8_workspace};
    else
        *product =
            (product_t){kernels->grouped_gemm_w4, kernels->grouped_gemm_w4_chained, kernels->grouped_gemm_w4_workspace};
    return EPMOE_OK;
}

epmoe_status_t epmoe_grouped_gemm_workspace_size(const epmoe_grouped_gemm_args_t *args, int64_t *bytes)
{
    if (!bytes) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "bytes is NULL");
    epmoe_grouped_gemm_args_t checked;
    product_t product;
    EPMOEI_CHECK(check_shape(args, &checked));
    EPMOEI_CHECK(choose(&checked, &product));
    *bytes = checked.max_rows ? product.workspace(&checked) : 0;
    return EPMOE_OK;
}

static epmoe_status_t run(const epmoe_grouped_gemm_args_t *args, bool chained, int32_t *dealt, epmoe_stream_t stream)
{
    epmoe_grouped_gemm_args_t checked;
    product_t product;
    EPMOEI_CHECK(epmoei_grouped_gemm_check(args, &checked));
    EPMOEI_CHECK(choose(&checked, &product));
    if (checked.max_rows == 0) return EPMOE_OK;
    epmoe_backend_t backend;
    int32_t one_group[2] = {0, checked.max_rows};
    EPMOEI_CHECK(epmoe_backend_resolve(checked.backend, &backend));
    if (backend == EPMOE_BACKEND_CPU) {
        EPMOEI_CHECK(epmoei_actual_tokens(checked.num_rows_dev, checked.max_rows, &one_group[1]));
        if (!checked.expert_offsets) checked.expert_offsets = one_group;
        EPMOEI_CHECK(check_rows(&checked));
        EPMOEI_CHECK(check_indices(&checked));
    }
    return chained && product.chained ? product.chained(&checked, dealt, stream) : product.run(&checked, stream);
}

epmoe_status_t epmoe_grouped_gemm(const epmoe_grouped_gemm_args_t *args, epmoe_stream_t stream)
{
    return run(args, false, NULL, stream);
}

epmoe_status_t epmoei_grouped_gemm_chained(const epmoe_grouped_gemm_args_t *args, int32_t *dealt, epmoe_stream_t stream)
{
    return run(args, true, dealt, stream);
}

void epmoei_grouped_gemm_widen_row(const epmoe_grouped_gemm_args_t *args, int64_t row, float *to)
{
    const uint8_t *codes = (const uint8_t *)args->x + row * args->k;
    const epmoei_scale_steps_t steps = epmoei_scale_steps(args->x_quant, args->k);
    for (int64_t first = 0; first < args->k; first += EPMOEI_FP8_COLUMNS) {
        const int64_t end = epmoei_min64(first + EPMOEI_FP8_COLUMNS, args->k);
        const float scale = args->x_scale[row * steps.row + first / EPMOEI_FP8_COLUMNS * steps.block];
#pragma omp simd
        for (int64_t i = first; i < end; i++) to[i] = epmoei_e4m3_to_f32(codes[i]) * scale;
    }
}
