#include "kernels/dequant.h"

#include "kernels/op_check.h"
#include "kernels/quant_formats.h"

epmoe_status_t epmoei_dequant_check(const epmoe_dequant_args_t *args, epmoe_dequant_args_t *out)
{
    EPMOEI_CHECK(epmoei_copy_sized(out, sizeof *out, args, "epmoe_dequant_args_t"));
    if (out->num_experts == 0) out->num_experts = 1;
    EPMOEI_CHECK(epmoei_check_range("num_experts", out->num_experts, 1, EPMOE_MAX_EXPERTS));
    EPMOEI_CHECK(epmoei_check_range("n", out->n, 1, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_range("k", out->k, 1, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_volume("weight", out->num_experts, out->n, out->k));
    EPMOEI_CHECK(epmoei_weight_check_rows(&out->weight, "weight"));
    if (epmoei_format_is_quantised(out->weight.format))
        EPMOEI_CHECK(epmoei_quant_check_weight(&out->weight, "weight", out->k));
    else if (epmoei_dtype_of_format(out->weight.format) == EPMOE_DTYPE_NONE)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "weight.format is %d: expected an epmoe_format_t",
                           (int)out->weight.format);
    EPMOEI_CHECK(epmoei_check_pointer("w", out->w));
    return epmoei_weight_check_pointers(&out->weight, "weight");
}

double epmoei_weight_bytes(const epmoe_weight_t *weight, int64_t num_experts, int64_t n, int64_t k)
{
    if (!epmoei_format_is_quantised(weight->format))
        return (double)num_experts * (double)n * (double)k * epmoe_dtype_size(epmoei_dtype_of_format(weight->format));
    epmoei_quant_sizes_t sizes =
        epmoei_quant_sizes_rows(weight->format, n, k, weight->group_size, weight->group_rows, 0);
    return (double)num_experts *
           ((double)sizes.data_bytes + (double)sizes.scales * epmoe_dtype_size(weight->scales_dtype) +
            (weight->zeros ? (double)sizes.zeros_bytes : 0) + (weight->g_idx ? 4.0 * (double)k : 0));
}

epmoei_floor_t epmoei_dequant_floor(const epmoe_dequant_args_t *args)
{
    return (epmoei_floor_t){.bytes = epmoei_weight_bytes(&args->weight, args->num_experts, args->n, args->k) +
                                     4.0 * args->num_experts * args->n * args->k};
}

static epmoe_status_t check_indices(const epmoe_dequant_args_t *args)
{
    if (!epmoei_format_is_quantised(args->weight.format) || !args->weight.g_idx) return EPMOE_OK;
    for (int32_t e = 0; e < args->num_experts; e++) {
        epmoei_quant_t quant = epmoei_quant_of_weight(&args->weight, args->n, args->k, e, 0);
        epmoe_status_t status = epmoei_quant_check_groups(&quant, "weight.g_idx");
        if (status != EPMOE_OK) return epmoei_fail_context(status, "expert %d", e);
    }
    return EPMOE_OK;
}

epmoe_status_t epmoe_dequant(const epmoe_dequant_args_t *args, epmoe_stream_t stream)
{
    epmoe_dequant_args_t checked;
    const epmoei_kernel_table_t *table;
    EPMOEI_CHECK(epmoei_dequant_check(args, &checked));
    EPMOEI_CHECK(epmoei_kernels(checked.backend, &table));
    if (!table->dequant) return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "epmoe_dequant has no kernel on this backend");
    epmoe_backend_t backend;
    EPMOEI_CHECK(epmoe_backend_resolve(checked.backend, &backend));
    if (backend == EPMOE_BACKEND_CPU) EPMOEI_CHECK(check_indices(&checked));
    return table->dequant(&checked, stream);
}
