#include "kernels/op_check.h"

epmoe_status_t epmoei_check_range(const char *name, int64_t value, int64_t lo, int64_t hi)
{
    if (value >= lo && value <= hi) return EPMOE_OK;
    if (hi == INT32_MAX)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s is %lld: expected at least %lld", name, (long long)value,
                           (long long)lo);
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s is %lld: expected %lld to %lld", name, (long long)value,
                       (long long)lo, (long long)hi);
}

epmoe_status_t epmoei_check_pointer(const char *name, const void *pointer)
{
    if (pointer) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s is NULL: expected a buffer", name);
}

epmoe_status_t epmoei_check_aligned(const char *name, const void *pointer, int32_t bytes)
{
    if ((uintptr_t)pointer % (uintptr_t)bytes == 0) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s is %p: expected an address aligned to %d bytes", name, pointer,
                       bytes);
}

epmoe_status_t epmoei_check_float_dtype(const char *name, epmoe_dtype_t dtype)
{
    if (epmoei_dtype_is_float(dtype)) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s is %d (%s): expected f32, bf16 or f16", name, (int)dtype,
                       epmoe_dtype_string(dtype));
}

epmoe_status_t epmoei_check_volume(const char *name, int64_t rows, int64_t cols, int64_t depth)
{
    int64_t volume;
    if (!__builtin_mul_overflow(rows, cols, &volume) && !__builtin_mul_overflow(volume, depth, &volume) &&
        volume <= INT64_MAX / 8)
        return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s is [%lld,%lld,%lld]: its size overflows 64 bits", name,
                       (long long)rows, (long long)cols, (long long)depth);
}

epmoe_status_t epmoei_check_stride(const char *name, int64_t *stride, int64_t least, int32_t rows)
{
    if (*stride == 0) *stride = least;
    if (*stride < least)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s is %lld: expected 0 or at least the row width %lld", name,
                           (long long)*stride, (long long)least);
    if (*stride > INT64_MAX / 8 / (rows > 0 ? rows : 1))
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "%s is %lld: the offset of row %d overflows 64 bits", name,
                           (long long)*stride, rows);
    return EPMOE_OK;
}

epmoe_status_t epmoei_actual_tokens(const int32_t *num_tokens_dev, int32_t num_tokens, int32_t *actual)
{
    *actual = num_tokens_dev ? *num_tokens_dev : num_tokens;
    return epmoei_check_range("*num_tokens_dev", *actual, 0, num_tokens);
}
