#include "dense_layers/spec_verify.h"

#include "kernels/op_check.h"

epmoe_status_t epmoei_spec_verify_check(const epmoe_spec_verify_args_t *args, epmoe_spec_verify_args_t *out)
{
    EPMOEI_CHECK(epmoei_copy_sized(out, sizeof *out, args, "epmoe_spec_verify_args_t"));
    EPMOEI_CHECK(epmoei_check_range("num_rows", out->num_rows, 0, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_range("num_drafts", out->num_drafts, 0, INT32_MAX - 1));
    EPMOEI_CHECK(epmoei_check_range("vocab_size", out->vocab_size, 1, EPMOE_MAX_VOCAB));
    EPMOEI_CHECK(epmoei_check_volume("target_probs", out->num_rows, (int64_t)out->num_drafts + 1, out->vocab_size));
    if (out->num_rows == 0) return EPMOE_OK;
    if (out->num_drafts > 0) EPMOEI_CHECK(epmoei_check_pointer("draft_ids", out->draft_ids));
    EPMOEI_CHECK(epmoei_check_pointer("target_probs", out->target_probs));
    EPMOEI_CHECK(epmoei_check_pointer("uniform", out->uniform));
    EPMOEI_CHECK(epmoei_check_pointer("tokens", out->tokens));
    return epmoei_check_pointer("accepted", out->accepted);
}

epmoe_status_t epmoei_spec_verify_check_data(const epmoe_spec_verify_args_t *args)
{
    int64_t drafts = args->num_drafts;
    for (int64_t row = 0; row < args->num_rows; row++) {
        for (int64_t g = 0; g < drafts; g++) {
            int32_t id = args->draft_ids[row * drafts + g];
            if (id == -1) break;
            if (id < 0 || id >= args->vocab_size)
                return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "draft_ids[%lld,%lld] is %d: expected -1 to %d",
                                   (long long)row, (long long)g, id, args->vocab_size - 1);
        }
        for (int64_t g = 0; g <= drafts; g++) {
            float uniform = args->uniform[row * (drafts + 1) + g];
            if (!(uniform >= 0.0f && uniform <= 1.0f))
                return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "uniform[%lld,%lld] is %g: expected 0 to 1",
                                   (long long)row, (long long)g, (double)uniform);
        }
    }
    return EPMOE_OK;
}

epmoei_floor_t epmoei_spec_verify_floor(const epmoe_spec_verify_args_t *args, int64_t num_rejected)
{
    double rows = args->num_rows, draws = rows + (args->draft_probs ? (double)num_rejected : 0.0);
    return (epmoei_floor_t){.bytes = 4.0 * draws * args->vocab_size + 20.0 * rows * (args->num_drafts + 1.0)};
}

epmoe_status_t epmoe_spec_verify(const epmoe_spec_verify_args_t *args, epmoe_stream_t stream)
{
    epmoe_spec_verify_args_t checked;
    const epmoei_dense_table_t *table;
    EPMOEI_CHECK(epmoei_spec_verify_check(args, &checked));
    EPMOEI_CHECK(epmoei_dense_kernels(checked.backend, &table));
    if (checked.num_rows == 0) return EPMOE_OK;
    if (!table->spec_verify)
        return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "epmoe_spec_verify has no kernel on this backend");
    return table->spec_verify(&checked, stream);
}
