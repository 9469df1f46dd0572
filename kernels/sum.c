#include "kernels/sum.h"

#include "kernels/op_check.h"

epmoe_status_t epmoei_sum_check(const epmoe_sum_args_t *args, epmoe_sum_args_t *out)
{
    EPMOEI_CHECK(epmoei_copy_sized(out, sizeof *out, args, "epmoe_sum_args_t"));
    if (out->out_dtype == EPMOE_DTYPE_NONE) out->out_dtype = out->y_dtype;
    EPMOEI_CHECK(epmoei_check_range("num_tokens", out->num_tokens, 0, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_range("top_k", out->top_k, 1, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_range("hidden", out->hidden, 1, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_float_dtype("y_dtype", out->y_dtype));
    EPMOEI_CHECK(epmoei_check_float_dtype("out_dtype", out->out_dtype));
    EPMOEI_CHECK(epmoei_check_volume("y", out->num_tokens, out->top_k, out->hidden));
    if (out->num_tokens == 0) return EPMOE_OK;
    EPMOEI_CHECK(epmoei_check_pointer("y", out->y));
    return epmoei_check_pointer("out", out->out);
}

epmoei_floor_t epmoei_sum_floor(const epmoe_sum_args_t *args)
{
    double slots = (double)args->num_tokens * args->top_k, out = (double)args->num_tokens * args->hidden;
    return (epmoei_floor_t){.bytes = slots * args->hidden * epmoe_dtype_size(args->y_dtype) +
                                     out * epmoe_dtype_size(args->out_dtype) * (args->residual ? 2 : 1) +
                                     out * (args->addend ? 4 : 0),
                            .flops = 2.0 * slots * args->hidden};
}

epmoe_status_t epmoe_sum(const epmoe_sum_args_t *args, epmoe_stream_t stream)
{
    epmoe_sum_args_t checked;
    const epmoei_kernel_table_t *table;
    EPMOEI_CHECK(epmoei_sum_check(args, &checked));
    EPMOEI_CHECK(epmoei_kernels(checked.backend, &table));
    if (checked.num_tokens == 0) return EPMOE_OK;
    if (!table->sum) return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "epmoe_sum has no kernel on this backend");
    return table->sum(&checked, stream);
}

epmoe_status_t epmoei_sum_aligned(const epmoe_sum_args_t *args, int32_t num_experts, epmoe_stream_t stream)
{
#if EPMOE_HAVE_CUDA
    epmoe_backend_t backend;
    EPMOEI_CHECK(epmoe_backend_resolve(args->backend, &backend));
    if (backend == EPMOE_BACKEND_CUDA) {
        epmoe_sum_args_t checked;
        EPMOEI_CHECK(epmoei_sum_check(args, &checked));
        return checked.num_tokens ? epmoei_sum_aligned_sm80(&checked, num_experts, stream) : EPMOE_OK;
    }
#endif
    (void)num_experts; /* a host align fails on any other id */
    return epmoe_sum(args, stream);
}
