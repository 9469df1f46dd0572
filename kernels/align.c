#include "kernels/align.h"

#include "kernels/op_check.h"

int64_t epmoe_align_max_padded(int32_t num_tokens, int32_t top_k, int32_t num_experts, int32_t block_size)
{
    if (block_size == 0) block_size = 1;
    if (num_tokens < 0 || top_k < 1 || num_experts < 1 || num_experts > EPMOE_MAX_EXPERTS || block_size < 1) return -1;
    int64_t worst = (int64_t)num_tokens * top_k + (int64_t)num_experts * (block_size - 1);
    int64_t padded = epmoei_round_up(worst, block_size);
    return padded <= INT32_MAX ? padded : -1;
}

/* The part that needs no pointers. */
static epmoe_status_t check_sizes(const epmoe_align_args_t *args, epmoe_align_args_t *out)
{
    EPMOEI_CHECK(epmoei_copy_sized(out, sizeof *out, args, "epmoe_align_args_t"));
    if (out->block_size == 0) out->block_size = 1;
    EPMOEI_CHECK(epmoei_check_range("num_tokens", out->num_tokens, 0, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_range("top_k", out->top_k, 1, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_range("num_experts", out->num_experts, 1, EPMOE_MAX_EXPERTS));
    EPMOEI_CHECK(epmoei_check_range("block_size", out->block_size, 1, INT32_MAX));
    if (epmoe_align_max_padded(out->num_tokens, out->top_k, out->num_experts, out->block_size) < 0)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT,
                           "num_tokens %d * top_k %d with %d experts padded to block_size %d: the worst case exceeds "
                           "%d slots",
                           out->num_tokens, out->top_k, out->num_experts, out->block_size, INT32_MAX);
    return EPMOE_OK;
}

epmoe_status_t epmoei_align_check(const epmoe_align_args_t *args, epmoe_align_args_t *out)
{
    EPMOEI_CHECK(check_sizes(args, out));
    if (out->num_tokens == 0) return EPMOE_OK;
    EPMOEI_CHECK(epmoei_check_pointer("ids", out->ids));
    EPMOEI_CHECK(epmoei_check_pointer("sorted_ids", out->sorted_ids));
    return epmoei_check_pointer("num_post_padded", out->num_post_padded);
}

epmoei_floor_t epmoei_align_floor(const epmoe_align_args_t *args)
{
    int64_t padded = epmoe_align_max_padded(args->num_tokens, args->top_k, args->num_experts, args->block_size);
    double words = (double)args->num_tokens * args->top_k + (double)padded + (double)(padded / args->block_size) +
                   args->num_experts;
    return (epmoei_floor_t){.bytes = 4.0 * words};
}

epmoe_status_t epmoe_align_workspace_size(const epmoe_align_args_t *args, int64_t *bytes)
{
    epmoe_align_args_t checked;
    const epmoei_kernel_table_t *table;
    EPMOEI_CHECK(epmoei_check_pointer("bytes", bytes));
    EPMOEI_CHECK(check_sizes(args, &checked));
    EPMOEI_CHECK(epmoei_kernels(checked.backend, &table));
    if (!table->align_workspace)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "epmoe_align_block_size has no kernel on this backend");
    *bytes = table->align_workspace(&checked);
    return EPMOE_OK;
}

epmoe_status_t epmoe_align_block_size(const epmoe_align_args_t *args, epmoe_stream_t stream)
{
    epmoe_align_args_t checked;
    const epmoei_kernel_table_t *table;
    EPMOEI_CHECK(epmoei_align_check(args, &checked));
    EPMOEI_CHECK(epmoei_kernels(checked.backend, &table));
    if (!table->align)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "epmoe_align_block_size has no kernel on this backend");
    int64_t needed = table->align_workspace(&checked);
    if (checked.num_tokens > 0 && needed > 0) {
        EPMOEI_CHECK(epmoei_check_pointer("workspace", checked.workspace));
        if (checked.workspace_bytes < needed)
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "workspace_bytes is %lld: expected at least %lld",
                               (long long)checked.workspace_bytes, (long long)needed);
    }
    return table->align(&checked, stream);
}
