#include "kernels/op_check.h"
#include "kernels/topk.h"

/* Logits below which starting threads costs more than it saves. */
#define MIN_PARALLEL_LOGITS 8192

/* One pass over the candidates by ascending id, the best k so far kept sorted: most candidates fail the first compare.
 * A candidate goes behind its equals, so that the lower id stays first. */
static void pick(const epmoe_topk_args_t *args, const epmoei_topk_row_t *row, int32_t *ids)
{
    float best[EPMOE_MAX_TOP_K];
    int32_t top_k = args->top_k, count = 0;
    int32_t size = args->num_experts / args->n_group;
    for (int32_t g = 0; g < args->n_group; g++) {
        if (!row->kept[g]) continue;
        for (int32_t e = g * size; e < (g + 1) * size; e++) {
            float value = row->values[e];
            if (count == top_k && !(value > best[top_k - 1])) continue;
            int32_t at = count < top_k ? count++ : top_k - 1;
            for (; at > 0 && value > best[at - 1]; at--) {
                best[at] = best[at - 1];
                ids[at] = ids[at - 1];
            }
            best[at] = value;
            ids[at] = e;
        }
    }
}

epmoe_status_t epmoei_topk_cpu(const epmoe_topk_args_t *args, epmoe_stream_t stream)
{
    (void)stream;
    int32_t num_tokens;
    EPMOEI_CHECK(epmoei_actual_tokens(args->num_tokens_dev, args->num_tokens, &num_tokens));
#pragma omp parallel for schedule(static) if ((int64_t)num_tokens * args->num_experts >= MIN_PARALLEL_LOGITS)
    for (int32_t token = 0; token < num_tokens; token++) {
        epmoei_topk_row_t row;
        int32_t ids[EPMOE_MAX_TOP_K];
        epmoei_topk_row_score(args, token, &row);
        epmoei_topk_row_keep_groups(args, &row);
        pick(args, &row, ids);
        memcpy(args->ids + (int64_t)token * args->top_k, ids, (size_t)args->top_k * sizeof *ids);
        epmoei_topk_row_weigh(args, &row, ids, args->weights + (int64_t)token * args->top_k);
    }
    return EPMOE_OK;
}
