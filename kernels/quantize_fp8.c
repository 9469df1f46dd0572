#include "kernels/quantize_fp8.h"

#include "base/fp8.h"
#include "kernels/op_check.h"

#include <math.h>

static epmoe_status_t check_positive(const char *name, const float *value)
{
    if (!value || (*value > 0.0f && isfinite(*value))) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "*%s is %g: expected a finite number above 0", name,
                       (double)*value);
}

static epmoe_status_t check_static(const epmoe_quantize_fp8_args_t *args)
{
    if (args->granularity != EPMOE_GRANULARITY_TENSOR)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "granularity is %d: a static_scale is one of the whole tensor",
                           (int)args->granularity);
    if (args->pow2 || args->scale_ub)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s is given: a static_scale is used as it is",
                           args->pow2 ? "pow2" : "scale_ub");
    return EPMOE_OK;
}

epmoe_status_t epmoei_quantize_fp8_check(const epmoe_quantize_fp8_args_t *args, epmoe_quantize_fp8_args_t *out)
{
    EPMOEI_CHECK(epmoei_copy_sized(out, sizeof *out, args, "epmoe_quantize_fp8_args_t"));
    EPMOEI_CHECK(epmoei_check_range("num_tokens", out->num_tokens, 0, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_range("hidden", out->hidden, 1, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_float_dtype("dtype", out->dtype));
    EPMOEI_CHECK(
        epmoei_check_range("granularity", out->granularity, EPMOE_GRANULARITY_TENSOR, EPMOE_GRANULARITY_BLOCK128));
    EPMOEI_CHECK(epmoei_check_range("pow2", out->pow2, 0, 1));
    EPMOEI_CHECK(epmoei_check_stride("x_stride", &out->x_stride, out->hidden, out->num_tokens));
    if (out->static_scale) EPMOEI_CHECK(check_static(out));
    if (out->num_tokens == 0) return EPMOE_OK;
    EPMOEI_CHECK(epmoei_check_pointer("x", out->x));
    EPMOEI_CHECK(epmoei_check_pointer("q", out->q));
    return epmoei_check_pointer("scale", out->scale);
}

epmoei_floor_t epmoei_quantize_fp8_floor(const epmoe_quantize_fp8_args_t *args)
{
    double elements = (double)args->num_tokens * args->hidden, size = epmoe_dtype_size(args->dtype);
    double scales = args->granularity == EPMOE_GRANULARITY_TENSOR ? 1
                    : args->granularity == EPMOE_GRANULARITY_TOKEN
                        ? args->num_tokens
                        : (double)args->num_tokens * (double)epmoei_ceil_div(args->hidden, EPMOEI_FP8_COLUMNS);
    bool twice = args->granularity == EPMOE_GRANULARITY_TENSOR && !args->static_scale;
    return (epmoei_floor_t){.bytes = elements * ((twice ? 2 : 1) * size + 1) + 4 * scales};
}

float epmoei_quantize_fp8_scale(const epmoe_quantize_fp8_args_t *args, float amax)
{
    if (args->static_scale) return *args->static_scale;
    if (args->scale_ub && amax > *args->scale_ub) amax = *args->scale_ub;
    if (!args->pow2) return epmoei_e4m3_scale(amax);
    /* The quotient of a float and 448 is a power of two in double precision only where it is one. */
    double exact = (double)(amax < 0x1.fffffep127f ? amax : 0x1.fffffep127f) / 448;
    int exponent;
    double mantissa = frexp(exact > 0x1p-126 ? exact : 0x1p-126, &exponent);
    return ldexpf(1.0f, mantissa == 0.5 ? exponent - 1 : exponent);
}

void epmoei_quantize_fp8_round_row(float *row, int64_t n)
{
    for (int64_t first = 0; first < n; first += EPMOEI_FP8_COLUMNS) {
        int64_t count = epmoei_min64(EPMOEI_FP8_COLUMNS, n - first);
        float amax = 0;
        for (int64_t i = 0; i < count; i++) amax = epmoei_amax(amax, row[first + i]);
        float scale = epmoei_e4m3_scale(amax);
        for (int64_t i = 0; i < count; i++)
            row[first + i] = epmoei_e4m3_to_f32(epmoei_f32_to_e4m3(row[first + i] / scale)) * scale;
    }
}

epmoe_status_t epmoe_quantize_fp8(const epmoe_quantize_fp8_args_t *args, epmoe_stream_t stream)
{
    epmoe_quantize_fp8_args_t checked;
    const epmoei_kernel_table_t *table;
    EPMOEI_CHECK(epmoei_quantize_fp8_check(args, &checked));
    EPMOEI_CHECK(epmoei_kernels(checked.backend, &table));
    if (!table->quantize_fp8)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "epmoe_quantize_fp8 has no kernel on this backend");
    if (checked.num_tokens == 0) return EPMOE_OK;
    epmoe_backend_t backend;
    EPMOEI_CHECK(epmoe_backend_resolve(checked.backend, &backend));
    if (backend == EPMOE_BACKEND_CPU) {
        EPMOEI_CHECK(check_positive("static_scale", checked.static_scale));
        EPMOEI_CHECK(check_positive("scale_ub", checked.scale_ub));
    }
    return table->quantize_fp8(&checked, stream);
}
