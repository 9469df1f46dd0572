#include "kernels/topk.h"

#include "kernels/op_check.h"

#include <math.h>

epmoe_status_t epmoei_topk_check_sizes(const epmoe_topk_args_t *args, epmoe_topk_args_t *out)
{
    EPMOEI_CHECK(epmoei_copy_sized(out, sizeof *out, args, "epmoe_topk_args_t"));
    if (out->logits_dtype == EPMOE_DTYPE_NONE) out->logits_dtype = EPMOE_F32;
    if (out->scale == 0.0f) out->scale = 1.0f;
    if (out->n_group == 0) out->n_group = 1;
    if (out->topk_group == 0) out->topk_group = out->n_group;

    EPMOEI_CHECK(epmoei_check_range("num_tokens", out->num_tokens, 0, INT32_MAX));
    EPMOEI_CHECK(epmoei_check_range("num_experts", out->num_experts, 1, EPMOE_MAX_EXPERTS));
    EPMOEI_CHECK(epmoei_check_range("top_k", out->top_k, 1, epmoei_min64(out->num_experts, EPMOE_MAX_TOP_K)));
    EPMOEI_CHECK(epmoei_check_float_dtype("logits_dtype", out->logits_dtype));
    EPMOEI_CHECK(epmoei_check_stride("logits_stride", &out->logits_stride, out->num_experts, out->num_tokens));
    EPMOEI_CHECK(
        epmoei_check_range("scoring", (int32_t)out->scoring, EPMOE_SCORING_SOFTMAX, EPMOE_SCORING_SPARSE_MIXER));
    EPMOEI_CHECK(epmoei_check_range("renormalize", out->renormalize, 0, 1));
    if (!isfinite(out->scale))
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "scale is %g: expected a finite number", (double)out->scale);

    EPMOEI_CHECK(epmoei_check_range("n_group", out->n_group, 1, out->num_experts));
    if (out->num_experts % out->n_group)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "n_group is %d: expected a divisor of num_experts %d",
                           out->n_group, out->num_experts);
    EPMOEI_CHECK(epmoei_check_range("topk_group", out->topk_group, 1, out->n_group));
    EPMOEI_CHECK(
        epmoei_check_range("group_score", (int32_t)out->group_score, EPMOE_GROUP_SCORE_TOP2, EPMOE_GROUP_SCORE_MAX));
    int32_t candidates = out->topk_group * (out->num_experts / out->n_group);
    if (out->top_k > candidates)
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "top_k is %d: the %d kept groups have only %d experts",
                           out->top_k, out->topk_group, candidates);
    if (out->jitter == 0.0f) out->jitter = 0.01f;
    if (!(out->jitter > 0.0f && out->jitter < 1.0f))
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "jitter is %g: expected 0 to below 1", (double)out->jitter);
    if (out->scoring == EPMOE_SCORING_SPARSE_MIXER && (out->n_group > 1 || out->selection_bias))
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "scoring is SPARSE_MIXER with %s: expected none",
                           out->n_group > 1 ? "groups" : "a selection bias");
    return EPMOE_OK;
}

epmoe_status_t epmoei_topk_check(const epmoe_topk_args_t *args, epmoe_topk_args_t *out)
{
    EPMOEI_CHECK(epmoei_topk_check_sizes(args, out));
    if (out->num_tokens == 0) return EPMOE_OK;
    EPMOEI_CHECK(epmoei_check_pointer("logits", out->logits));
    EPMOEI_CHECK(epmoei_check_pointer("ids", out->ids));
    return epmoei_check_pointer("weights", out->weights);
}

epmoei_floor_t epmoei_topk_floor(const epmoe_topk_args_t *args)
{
    double per_row = (double)args->num_experts * epmoe_dtype_size(args->logits_dtype) + 8.0 * args->top_k;
    return (epmoei_floor_t){.bytes = args->num_tokens * per_row};
}

epmoe_status_t epmoe_topk(const epmoe_topk_args_t *args, epmoe_stream_t stream)
{
    epmoe_topk_args_t checked;
    const epmoei_kernel_table_t *table;
    EPMOEI_CHECK(epmoei_topk_check(args, &checked));
    EPMOEI_CHECK(epmoei_kernels(checked.backend, &table));
    if (checked.num_tokens == 0) return EPMOE_OK;
    if (!table->topk) return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "epmoe_topk has no kernel on this backend");
    return table->topk(&checked, stream);
}
