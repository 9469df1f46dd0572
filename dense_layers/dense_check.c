#include "dense_layers/dense_check.h"

#include <math.h>

epmoe_status_t epmoei_check_eps(float *eps)
{
    if (*eps == 0) *eps = 1e-6f;
    if (*eps > 0 && isfinite(*eps)) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "eps is %g: expected a finite number from 0", (double)*eps);
}

epmoe_status_t epmoei_check_rotary_dim(int32_t *rotary_dim, int32_t head_dim)
{
    if (*rotary_dim == 0) *rotary_dim = head_dim;
    if (*rotary_dim > 0 && *rotary_dim <= head_dim && *rotary_dim % 2 == 0) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "rotary_dim is %d: expected an even number from 2 to head_dim %d",
                       *rotary_dim, head_dim);
}

epmoe_status_t epmoei_check_index_dtype(const char *name, epmoe_dtype_t *dtype)
{
    if (*dtype == EPMOE_DTYPE_NONE) *dtype = EPMOE_I64;
    if (*dtype == EPMOE_I64 || *dtype == EPMOE_I32) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s is %d (%s): expected i64 or i32", name, (int)*dtype,
                       epmoe_dtype_string(*dtype));
}

epmoe_status_t epmoei_check_indices(const char *name, const void *data, epmoe_dtype_t dtype, int64_t count, int64_t lo,
                                    int64_t hi)
{
    for (int64_t i = 0; i < count; i++) {
        int64_t index = epmoei_index(data, dtype, i);
        if (index < lo || index > hi)
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s[%lld] is %lld: expected %lld to %lld", name,
                               (long long)i, (long long)index, (long long)lo, (long long)hi);
    }
    return EPMOE_OK;
}

epmoe_status_t epmoei_check_scale(const char *name, const float *scale)
{
    if (!scale) return EPMOE_OK;
    float value = epmoei_load(scale, EPMOE_F32, 0);
    if (value > 0 && isfinite(value)) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s is %g: expected a finite number above 0", name, (double)value);
}
