#include "dense_layers/linear_op.h"

#include "base/device.h"
#include "dense_layers/dense_check.h"
#include "dense_layers/linear_cublas.h"
#include "kernels/dequant.h"
#include "kernels/quant_formats.h"
#include "kernels/quantize_fp8.h"

/* ---------------------------------------------------------------------------------------------------------- checks */

static epmoe_status_t check_weight(epmoe_linear_args_t *args)
{
    epmoe_weight_t *weight = &args->weight;
    if (epmoei_format_is_quantised(weight->format))
        EPMOEI_CHECK(epmoei_quant_check_weight(weight, "weight", args->k));
    else if (epmoei_dtype_of_format(weight->format) == EPMOE_DTYPE_NONE)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "weight.format is %d: expected an epmoe_format_t",
                           (int)weight->format);
    else
        EPMOEI_CHECK(epmoei_weight_check_rows(weight, "weight"));
    if (args->x_quant == 0) return EPMOE_OK;
    if (weight->format != EPMOE_FORMAT_FP8_BLOCK)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "x_quant is %d and weight.format %s: expected fp8_block",
                           (int)args->x_quant, epmoe_format_string(weight->format));
    if (!epmoei_linear_scales_outside(args)) return EPMOE_OK;
    if (weight->group_size < args->k)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "weight.group_size is %d: with x_quant %d expected -1",
                           weight->group_size, (int)args->x_quant);
    if (weight->group_rows != 1 && weight->group_rows < args->n)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "weight.group_rows is %d: with x_quant %d expected 1 or -1",
                           weight->group_rows, (int)args->x_quant);
    if (weight->scales_dtype == EPMOE_F8_E8M0)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                           "weight.scales_dtype is F8_E8M0: with x_quant %d expected F32, BF16 or F16",
                           (int)args->x_quant);
    return EPMOE_OK;
}

/* What a workspace query needs. */
static epmoe_status_t check_shape(const epmoe_linear_args_t *args, epmoe_linear_args_t *out)
{
    EPMOEI_CHECK(epmoei_copy_sized(out, sizeof *out, args, "epmoe_linear_args_t"));
    EPMOEI_CHECK(epmoei_check_range("num_tokens", out->num_tokens, 0, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_range("n", out->n, 1, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_range("k", out->k, 1, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_volume("x", out->num_tokens, out->k, 1));
    EPMOEI_CHECK(epmoei_check_range("x_quant", (int32_t)out->x_quant, 0, EPMOE_GRANULARITY_BLOCK128));
    EPMOEI_CHECK(epmoei_check_range("reserved", out->reserved, 0, 0));
    bool codes = out->x_dtype == EPMOE_F8_E4M3;
    if (!codes) EPMOEI_CHECK(epmoei_check_float_dtype("x_dtype", out->x_dtype));
    if (codes && out->x_quant == 0)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                           "x_quant is 0 and x_dtype F8_E4M3: expected what a scale covers");
    if (out->y_dtype == EPMOE_DTYPE_NONE) out->y_dtype = codes ? EPMOE_BF16 : out->x_dtype;
    EPMOEI_CHECK(epmoei_check_float_dtype("y_dtype", out->y_dtype));
    return check_weight(out);
}

epmoe_status_t epmoei_linear_check(const epmoe_linear_args_t *args, epmoe_linear_args_t *out)
{
    EPMOEI_CHECK(check_shape(args, out));
    if (out->x_scale && out->x_dtype != EPMOE_F8_E4M3 && out->x_quant != EPMOE_GRANULARITY_TENSOR)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                           "x_scale is given: expected NULL with x_quant %d and x that is no F8_E4M3",
                           (int)out->x_quant);
    if (out->num_tokens == 0) return EPMOE_OK;
    EPMOEI_CHECK(epmoei_check_pointer("x", out->x));
    EPMOEI_CHECK(epmoei_check_pointer("y", out->y));
    if (out->x_dtype == EPMOE_F8_E4M3) EPMOEI_CHECK(epmoei_check_pointer("x_scale", out->x_scale));
    return epmoei_weight_check_pointers(&out->weight, "weight");
}

int64_t epmoei_linear_x_scales(const epmoe_linear_args_t *args)
{
    switch (args->x_quant) {
    case EPMOE_GRANULARITY_TENSOR: return 1;
    case EPMOE_GRANULARITY_TOKEN: return args->num_tokens;
    case EPMOE_GRANULARITY_BLOCK128: return args->num_tokens * epmoei_ceil_div(args->k, EPMOEI_FP8_COLUMNS);
    default: return 0;
    }
}

epmoei_floor_t epmoei_linear_floor(const epmoe_linear_args_t *args)
{
    double rows = args->num_tokens, n = args->n, k = args->k;
    double bytes = rows * (k * epmoe_dtype_size(args->x_dtype) + n * epmoe_dtype_size(args->y_dtype));
    bytes += epmoei_weight_bytes(&args->weight, 1, args->n, args->k) + (args->bias ? 4 * n : 0);
    if (args->x_scale) bytes += 4 * (double)epmoei_linear_x_scales(args);
    return (epmoei_floor_t){.bytes = bytes, .flops = 2 * rows * n * k};
}

/* ------------------------------------------------------------------------------------------------------- workspace */

epmoe_grouped_gemm_args_t epmoei_linear_gemm_args(const epmoe_linear_args_t *args, epmoe_backend_t backend,
                                                  const epmoei_linear_space_t *space)
{
    epmoe_grouped_gemm_args_t gemm = EPMOE_GROUPED_GEMM_ARGS_INIT;
    const bool made = epmoei_linear_makes_codes(args), codes = made || args->x_dtype == EPMOE_F8_E4M3;
    gemm.backend = backend;
    gemm.num_experts = 1;
    gemm.n = args->n;
    gemm.k = args->k;
    gemm.max_rows = args->num_tokens;
    gemm.x_dtype = codes ? EPMOE_F8_E4M3 : args->x_dtype;
    gemm.x = made ? space->codes : args->x;
    gemm.x_sorted = 1;
    gemm.weight = args->weight;
    gemm.layout = EPMOE_LAYOUT_PACKED;
    gemm.bias = args->bias;
    gemm.activation = EPMOE_ACTIVATION_NONE;
    gemm.y_dtype = args->y_dtype;
    gemm.y = args->y;
    gemm.workspace = space->inner;
    gemm.workspace_bytes = space->inner_bytes;
    if (codes) {
        gemm.x_quant = args->x_quant;
        gemm.x_scale = made ? space->x_scale : args->x_scale;
    } else
        gemm.fp8_activations = args->x_quant != 0;
    return gemm;
}

epmoe_status_t epmoei_linear_layout(void *base, const epmoe_linear_args_t *args, epmoe_backend_t backend,
                                    epmoei_linear_space_t *space)
{
    epmoei_arena_t arena = {base, 0};
    *space = (epmoei_linear_space_t){0};
    if (epmoei_linear_makes_codes(args)) {
        space->codes = epmoei_carve(&arena, (int64_t)args->num_tokens * args->k);
        space->x_scale = epmoei_carve(&arena, epmoei_linear_x_scales(args) * 4 + 16); /* see epmoei_fp8_rows_t */
    }
    epmoe_grouped_gemm_args_t gemm = epmoei_linear_gemm_args(args, backend, space);
    EPMOEI_CHECK(epmoe_grouped_gemm_workspace_size(&gemm, &space->inner_bytes));
    bool plain = args->weight.format == epmoei_format_of_dtype(args->x_dtype) && !args->bias;
    if (backend == EPMOE_BACKEND_CUDA && plain)
        space->inner_bytes = epmoei_max64(space->inner_bytes, epmoei_linear_cublas_workspace());
    space->inner = epmoei_carve(&arena, space->inner_bytes);
    space->bytes = arena.used;
    return EPMOE_OK;
}

epmoe_status_t epmoei_linear_place(const epmoe_linear_args_t *args, epmoe_backend_t backend,
                                   epmoei_linear_space_t *space)
{
    EPMOEI_CHECK(epmoei_linear_layout(NULL, args, backend, space));
    if (args->workspace_bytes < space->bytes)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "workspace_bytes is %lld: expected at least %lld",
                           (long long)args->workspace_bytes, (long long)space->bytes);
    if (space->bytes > 0) EPMOEI_CHECK(epmoei_check_pointer("workspace", args->workspace));
    return epmoei_linear_layout(args->workspace, args, backend, space);
}

epmoe_status_t epmoei_linear_quantize(const epmoe_linear_args_t *args, epmoe_backend_t backend,
                                      const epmoei_linear_space_t *space, epmoe_stream_t stream)
{
    epmoe_quantize_fp8_args_t quantize = EPMOE_QUANTIZE_FP8_ARGS_INIT;
    quantize.backend = backend;
    quantize.num_tokens = args->num_tokens;
    quantize.hidden = args->k;
    quantize.dtype = args->x_dtype;
    quantize.granularity = args->x_quant;
    quantize.x = args->x;
    quantize.static_scale = args->x_scale;
    quantize.q = space->codes;
    quantize.scale = space->x_scale;
    return epmoe_quantize_fp8(&quantize, stream);
}

/* ----------------------------------------------------------------------------------------------------------- entry */

epmoe_status_t epmoe_linear_workspace_size(const epmoe_linear_args_t *args, int64_t *bytes)
{
    if (!bytes) return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "bytes is NULL");
    epmoe_linear_args_t checked;
    epmoe_backend_t backend;
    epmoei_linear_space_t space = {0};
    EPMOEI_CHECK(check_shape(args, &checked));
    EPMOEI_CHECK(epmoe_backend_resolve(checked.backend, &backend));
    if (checked.num_tokens > 0) EPMOEI_CHECK(epmoei_linear_layout(NULL, &checked, backend, &space));
    *bytes = space.bytes;
    return EPMOE_OK;
}

epmoe_status_t epmoe_linear(const epmoe_linear_args_t *args, epmoe_stream_t stream)
{
    epmoe_linear_args_t checked;
    const epmoei_dense_table_t *table;
    EPMOEI_CHECK(epmoei_linear_check(args, &checked));
    EPMOEI_CHECK(epmoei_dense_kernels(checked.backend, &table));
    if (checked.num_tokens == 0) return EPMOE_OK;
    if (!table->linear) return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "epmoe_linear has no kernel on this backend");
    return table->linear(&checked, stream);
}
