#include "dense_layers/rms_norm.h"

#include "dense_layers/dense_check.h"

static epmoe_status_t check_quant(const epmoe_rms_norm_args_t *args)
{
    bool dynamic = args->quant == EPMOE_GRANULARITY_TOKEN || args->quant == EPMOE_GRANULARITY_BLOCK128;
    EPMOEI_CHECK(epmoei_check_range("quant", (int32_t)args->quant, 0, EPMOE_GRANULARITY_BLOCK128));
    if (args->static_scale && args->quant != EPMOE_GRANULARITY_TENSOR)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "static_scale is given: quant is %d, expected TENSOR",
                           (int)args->quant);
    if (args->num_tokens == 0) return EPMOE_OK;
    if (args->quant == EPMOE_GRANULARITY_TENSOR) EPMOEI_CHECK(epmoei_check_pointer("static_scale", args->static_scale));
    if (dynamic) EPMOEI_CHECK(epmoei_check_pointer("scale", args->scale));
    return EPMOE_OK;
}

static epmoe_status_t check_y_dtype(epmoe_rms_norm_args_t *args)
{
    const epmoe_dtype_t usual = args->quant == 0 ? args->dtype : EPMOE_F8_E4M3;
    if (args->y_dtype == EPMOE_DTYPE_NONE) args->y_dtype = usual;
    bool narrower =
        args->quant == 0 && args->dtype == EPMOE_F32 && (args->y_dtype == EPMOE_BF16 || args->y_dtype == EPMOE_F16);
    if (args->y_dtype == usual || narrower) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "y_dtype is %d (%s): with dtype %s and quant %d expected %s%s",
                       (int)args->y_dtype, epmoe_dtype_string(args->y_dtype), epmoe_dtype_string(args->dtype),
                       (int)args->quant, epmoe_dtype_string(usual), usual == EPMOE_F32 ? ", bf16 or f16" : "");
}

static epmoe_status_t check_aliases(const epmoe_rms_norm_args_t *args)
{
    if (args->residual && (args->residual == args->x || args->residual == args->y))
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "residual == %s: expected a buffer of its own",
                           args->residual == args->x ? "x" : "y");
    if (args->y != args->x) return EPMOE_OK;
    if (args->quant != 0)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "y == x with quant %d: expected a buffer of its own",
                           (int)args->quant);
    if (args->y_dtype != args->dtype)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "y == x with y_dtype %s: expected a buffer of its own",
                           epmoe_dtype_string(args->y_dtype));
    if (args->num_tokens > 1 && args->y_stride != args->x_stride)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "y_stride is %lld: y == x, expected x_stride %lld",
                           (long long)args->y_stride, (long long)args->x_stride);
    return EPMOE_OK;
}

epmoe_status_t epmoei_rms_norm_check(const epmoe_rms_norm_args_t *args, epmoe_rms_norm_args_t *out)
{
    EPMOEI_CHECK(epmoei_copy_sized(out, sizeof *out, args, "epmoe_rms_norm_args_t"));
    EPMOEI_CHECK(epmoei_check_range("num_tokens", out->num_tokens, 0, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_range("hidden", out->hidden, 1, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_float_dtype("dtype", out->dtype));
    if (out->weight_dtype == EPMOE_DTYPE_NONE) out->weight_dtype = out->dtype;
    EPMOEI_CHECK(epmoei_check_float_dtype("weight_dtype", out->weight_dtype));
    EPMOEI_CHECK(epmoei_check_stride("x_stride", &out->x_stride, out->hidden, out->num_tokens));
    EPMOEI_CHECK(epmoei_check_stride("residual_stride", &out->residual_stride, out->hidden, out->num_tokens));
    EPMOEI_CHECK(epmoei_check_stride("y_stride", &out->y_stride, out->hidden, out->num_tokens));
    EPMOEI_CHECK(epmoei_check_eps(&out->eps));
    EPMOEI_CHECK(epmoei_check_range("weight_offset", out->weight_offset, 0, 1));
    EPMOEI_CHECK(check_quant(out));
    EPMOEI_CHECK(check_y_dtype(out));
    if (out->num_tokens == 0) return EPMOE_OK;
    EPMOEI_CHECK(epmoei_check_pointer("x", out->x));
    EPMOEI_CHECK(epmoei_check_pointer("weight", out->weight));
    EPMOEI_CHECK(epmoei_check_pointer("y", out->y));
    return check_aliases(out);
}

epmoei_floor_t epmoei_rms_norm_floor(const epmoe_rms_norm_args_t *args)
{
    double element = epmoe_dtype_size(args->dtype), rows = args->num_tokens, d = args->hidden;
    double out = epmoe_dtype_size(args->y_dtype);
    double bytes = rows * d * (element + out + (args->residual ? 2 * element : 0));
    bytes += d * epmoe_dtype_size(args->weight_dtype) + rows * 4 * (double)epmoei_rms_norm_scales(args);
    return (epmoei_floor_t){.bytes = bytes + (args->quant == EPMOE_GRANULARITY_TENSOR ? 4 : 0)};
}

epmoe_status_t epmoe_rms_norm(const epmoe_rms_norm_args_t *args, epmoe_stream_t stream)
{
    epmoe_rms_norm_args_t checked;
    const epmoei_dense_table_t *table;
    EPMOEI_CHECK(epmoei_rms_norm_check(args, &checked));
    EPMOEI_CHECK(epmoei_dense_kernels(checked.backend, &table));
    if (checked.num_tokens == 0) return EPMOE_OK;
    if (!table->rms_norm) return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "epmoe_rms_norm has no kernel on this backend");
    return table->rms_norm(&checked, stream);
}
