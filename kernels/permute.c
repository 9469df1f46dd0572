#include "kernels/permute.h"

#include "kernels/op_check.h"

/* Slot ids are int32, and T*k itself is the pad value. */
static epmoe_status_t check_slots(int32_t num_tokens, int32_t top_k, int32_t hidden, int32_t max_rows)
{
    EPMOEI_CHECK(epmoei_check_range("num_tokens", num_tokens, 0, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_range("top_k", top_k, 1, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_range("hidden", hidden, 1, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_range("max_rows", max_rows, 0, INT32_MAX));
    if ((int64_t)num_tokens * top_k > INT32_MAX)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "num_tokens %d * top_k %d: expected at most %d slots",
                           num_tokens, top_k, INT32_MAX);
    return epmoei_check_volume("y", num_tokens > max_rows ? num_tokens : max_rows, hidden, 1);
}

epmoe_status_t epmoei_permute_check(const epmoe_permute_args_t *args, epmoe_permute_args_t *out)
{
    EPMOEI_CHECK(epmoei_copy_sized(out, sizeof *out, args, "epmoe_permute_args_t"));
    EPMOEI_CHECK(check_slots(out->num_tokens, out->top_k, out->hidden, out->max_rows));
    int32_t size = epmoe_dtype_size(out->dtype);
    if (size != 1 && size != 2 && size != 4)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "dtype is %d (%s): expected one of 1, 2 or 4 bytes",
                           (int)out->dtype, epmoe_dtype_string(out->dtype));
    if (out->num_tokens == 0) return EPMOE_OK;
    EPMOEI_CHECK(epmoei_check_pointer("num_rows", out->num_rows));
    if (out->max_rows == 0) return EPMOE_OK;
    EPMOEI_CHECK(epmoei_check_pointer("x", out->x));
    EPMOEI_CHECK(epmoei_check_pointer("sorted_ids", out->sorted_ids));
    return epmoei_check_pointer("y", out->y);
}

epmoe_status_t epmoei_unpermute_check(const epmoe_unpermute_args_t *args, epmoe_unpermute_args_t *out)
{
    EPMOEI_CHECK(epmoei_copy_sized(out, sizeof *out, args, "epmoe_unpermute_args_t"));
    EPMOEI_CHECK(check_slots(out->num_tokens, out->top_k, out->hidden, out->max_rows));
    EPMOEI_CHECK(epmoei_check_float_dtype("dtype", out->dtype));
    if (out->num_tokens == 0) return EPMOE_OK;
    if (out->max_rows > 0) EPMOEI_CHECK(epmoei_check_pointer("y", out->y));
    EPMOEI_CHECK(epmoei_check_pointer("inverse", out->inverse));
    return epmoei_check_pointer("out", out->out);
}

epmoei_floor_t epmoei_permute_floor(const epmoe_permute_args_t *args)
{
    double row_bytes = (double)args->hidden * epmoe_dtype_size(args->dtype);
    return (epmoei_floor_t){.bytes = (args->num_tokens + (double)args->max_rows) * row_bytes + 8.0 * args->max_rows};
}

epmoei_floor_t epmoei_unpermute_floor(const epmoe_unpermute_args_t *args)
{
    double row_bytes = (double)args->hidden * epmoe_dtype_size(args->dtype);
    double slots = (double)args->num_tokens * args->top_k;
    return (epmoei_floor_t){.bytes = (slots + args->num_tokens) * row_bytes + 8.0 * slots,
                            .flops = 2.0 * slots * args->hidden};
}

epmoe_status_t epmoe_permute(const epmoe_permute_args_t *args, epmoe_stream_t stream)
{
    epmoe_permute_args_t checked;
    const epmoei_kernel_table_t *table;
    EPMOEI_CHECK(epmoei_permute_check(args, &checked));
    EPMOEI_CHECK(epmoei_kernels(checked.backend, &table));
    if (checked.num_tokens == 0) return EPMOE_OK;
    if (!table->permute) return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "epmoe_permute has no kernel on this backend");
    return table->permute(&checked, stream);
}

epmoe_status_t epmoe_unpermute(const epmoe_unpermute_args_t *args, epmoe_stream_t stream)
{
    epmoe_unpermute_args_t checked;
    const epmoei_kernel_table_t *table;
    EPMOEI_CHECK(epmoei_unpermute_check(args, &checked));
    EPMOEI_CHECK(epmoei_kernels(checked.backend, &table));
    if (checked.num_tokens == 0) return EPMOE_OK;
    if (!table->unpermute)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "epmoe_unpermute has no kernel on this backend");
    return table->unpermute(&checked, stream);
}
