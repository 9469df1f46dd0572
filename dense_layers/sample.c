#include "dense_layers/sample.h"

#include "kernels/op_check.h"

#include <math.h>
#include <stdio.h>

/* A setting of all rows, or with `row` from 0 on that of one. */
static epmoe_status_t fail_setting(const char *name, int64_t row, double value, const char *expected)
{
    char at[40] = "";
    if (row >= 0) snprintf(at, sizeof at, "_rows[%lld]", (long long)row);
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s%s is %g: expected %s", name, at, value, expected);
}

static epmoe_status_t check_temperature(float temperature, int64_t row)
{
    if (temperature >= 0.0f && isfinite(temperature)) return EPMOE_OK;
    return fail_setting("temperature", row, (double)temperature, "a finite number from 0 on");
}

static epmoe_status_t check_top_k(int32_t top_k, int64_t row)
{
    return top_k >= -1 ? EPMOE_OK : fail_setting("top_k", row, top_k, "-1, 0 or a number of tokens");
}

static epmoe_status_t check_fraction(const char *name, float value, int64_t row)
{
    return value >= 0.0f && value <= 1.0f ? EPMOE_OK : fail_setting(name, row, (double)value, "0 to 1");
}

epmoe_status_t epmoei_sample_check(const epmoe_sample_args_t *args, epmoe_sample_args_t *out)
{
    EPMOEI_CHECK(epmoei_copy_sized(out, sizeof *out, args, "epmoe_sample_args_t"));
    if (out->logits_dtype == EPMOE_DTYPE_NONE) out->logits_dtype = EPMOE_F32;
    EPMOEI_CHECK(epmoei_check_range("num_rows", out->num_rows, 0, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_range("vocab_size", out->vocab_size, 1, EPMOE_MAX_VOCAB));
    EPMOEI_CHECK(epmoei_check_float_dtype("logits_dtype", out->logits_dtype));
    EPMOEI_CHECK(epmoei_check_stride("logits_stride", &out->logits_stride, out->vocab_size, out->num_rows));
    EPMOEI_CHECK(check_temperature(out->temperature, -1));
    EPMOEI_CHECK(check_top_k(out->top_k, -1));
    EPMOEI_CHECK(check_fraction("top_p", out->top_p, -1));
    EPMOEI_CHECK(check_fraction("min_p", out->min_p, -1));
    if (out->num_rows == 0) return EPMOE_OK;
    EPMOEI_CHECK(epmoei_check_pointer("logits", out->logits));
    EPMOEI_CHECK(epmoei_check_pointer("tokens", out->tokens));
    return out->temperature_rows || out->temperature > 0.0f ? epmoei_check_pointer("uniform", out->uniform) : EPMOE_OK;
}

epmoe_status_t epmoei_sample_check_data(const epmoe_sample_args_t *args)
{
    for (int64_t row = 0; row < args->num_rows; row++) {
        if (args->temperature_rows) EPMOEI_CHECK(check_temperature(args->temperature_rows[row], row));
        if (args->top_k_rows) EPMOEI_CHECK(check_top_k(args->top_k_rows[row], row));
        if (args->top_p_rows) EPMOEI_CHECK(check_fraction("top_p", args->top_p_rows[row], row));
        if (args->min_p_rows) EPMOEI_CHECK(check_fraction("min_p", args->min_p_rows[row], row));
        if (epmoei_sample_rule(args, row).temperature == 0.0f) continue;
        float uniform = args->uniform[row];
        if (!(uniform >= 0.0f && uniform <= 1.0f))
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "uniform[%lld] is %g: expected 0 to 1", (long long)row,
                               (double)uniform);
    }
    return EPMOE_OK;
}

epmoei_floor_t epmoei_sample_floor(const epmoe_sample_args_t *args)
{
    return (epmoei_floor_t){.bytes = (double)args->num_rows * args->vocab_size * epmoe_dtype_size(args->logits_dtype)};
}

epmoe_status_t epmoe_sample(const epmoe_sample_args_t *args, epmoe_stream_t stream)
{
    epmoe_sample_args_t checked;
    const epmoei_dense_table_t *table;
    EPMOEI_CHECK(epmoei_sample_check(args, &checked));
    EPMOEI_CHECK(epmoei_dense_kernels(checked.backend, &table));
    if (checked.num_rows == 0) return EPMOE_OK;
    if (!table->sample) return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "epmoe_sample has no kernel on this backend");
    return table->sample(&checked, stream);
}
