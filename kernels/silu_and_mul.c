#include "kernels/silu_and_mul.h"

#include "kernels/activation.h"
#include "kernels/op_check.h"

#include <math.h>

static epmoe_status_t check_quant(const epmoe_silu_and_mul_args_t *args)
{
    bool tensor = args->quant == EPMOE_GRANULARITY_TENSOR;
    EPMOEI_CHECK(epmoei_check_range("quant", (int32_t)args->quant, 0, EPMOE_GRANULARITY_BLOCK128));
    if (args->static_scale && !tensor)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "static_scale is given with quant %d: expected TENSOR (%d)",
                           (int)args->quant, (int)EPMOE_GRANULARITY_TENSOR);
    if (args->quant == 0 || args->num_tokens == 0) return EPMOE_OK;
    if (args->y == args->x)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "y is x: expected a buffer of its own with quant");
    return tensor ? epmoei_check_pointer("static_scale", args->static_scale)
                  : epmoei_check_pointer("scale", args->scale);
}

epmoe_status_t epmoei_silu_and_mul_check(const epmoe_silu_and_mul_args_t *args, epmoe_silu_and_mul_args_t *out)
{
    EPMOEI_CHECK(epmoei_copy_sized(out, sizeof *out, args, "epmoe_silu_and_mul_args_t"));
    EPMOEI_CHECK(epmoei_check_range("num_tokens", out->num_tokens, 0, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_range("width", out->width, 1, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_float_dtype("dtype", out->dtype));
    EPMOEI_CHECK(epmoei_check_stride("x_stride", &out->x_stride, 2 * (int64_t)out->width, out->num_tokens));
    EPMOEI_CHECK(epmoei_check_stride("y_stride", &out->y_stride, out->width, out->num_tokens));
    EPMOEI_CHECK(epmoei_activation_check(out->activation, false, &out->alpha, &out->limit));
    EPMOEI_CHECK(check_quant(out));
    if (out->num_tokens == 0) return EPMOE_OK;
    EPMOEI_CHECK(epmoei_check_pointer("x", out->x));
    EPMOEI_CHECK(epmoei_check_pointer("y", out->y));
    if (out->y == out->x && out->num_tokens > 1 && out->y_stride != out->x_stride)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "y_stride is %lld: y == x, expected x_stride %lld",
                           (long long)out->y_stride, (long long)out->x_stride);
    return EPMOE_OK;
}

epmoei_floor_t epmoei_silu_and_mul_floor(const epmoe_silu_and_mul_args_t *args)
{
    int64_t tokens = args->num_tokens, size = epmoe_dtype_size(args->dtype);
    double scales = args->quant == EPMOE_GRANULARITY_BLOCK128 ? (double)(tokens * epmoei_ceil_div(args->width, 128))
                    : args->quant == EPMOE_GRANULARITY_TOKEN  ? (double)tokens
                                                              : 0;
    return (epmoei_floor_t){.bytes = (double)tokens * args->width * (double)(2 * size + (args->quant ? 1 : size)) +
                                     4 * scales};
}

epmoe_status_t epmoe_silu_and_mul(const epmoe_silu_and_mul_args_t *args, epmoe_stream_t stream)
{
    epmoe_silu_and_mul_args_t checked;
    const epmoei_kernel_table_t *table;
    EPMOEI_CHECK(epmoei_silu_and_mul_check(args, &checked));
    EPMOEI_CHECK(epmoei_kernels(checked.backend, &table));
    if (checked.num_tokens == 0) return EPMOE_OK;
    if (!table->silu_and_mul)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "epmoe_silu_and_mul has no kernel on this backend");
    return table->silu_and_mul(&checked, stream);
}

epmoe_status_t epmoei_silu_and_mul_check_values(const epmoe_silu_and_mul_args_t *args)
{
    const float *scale = args->static_scale;
    if (!scale || (*scale > 0.0f && isfinite(*scale))) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "*static_scale is %g: expected a finite number above 0",
                       (double)*scale);
}
