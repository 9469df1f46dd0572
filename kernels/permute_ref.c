#include "base/dtype.h"
#include "kernels/op_check.h"
#include "kernels/permute.h"

epmoe_status_t epmoei_permute_check_indices(const epmoe_permute_args_t *args)
{
    EPMOEI_CHECK(epmoei_check_range("*num_rows", *args->num_rows, 0, args->max_rows));
    for (int32_t p = 0; p < *args->num_rows; p++)
        if (args->sorted_ids[p] < 0)
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "sorted_ids[%d] is %d: expected 0 or above", p,
                               args->sorted_ids[p]);
    return EPMOE_OK;
}

epmoe_status_t epmoei_unpermute_check_indices(const epmoe_unpermute_args_t *args)
{
    for (int32_t s = 0; s < args->num_tokens * args->top_k; s++)
        if (args->inverse[s] < -1 || args->inverse[s] >= args->max_rows)
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "inverse[%d] is %d: expected -1 to %d", s,
                               args->inverse[s], args->max_rows - 1);
    return EPMOE_OK;
}

void epmoei_permute_invert(const epmoe_permute_args_t *args)
{
    if (!args->inverse) return;
    int32_t num_slots = args->num_tokens * args->top_k;
    for (int32_t s = 0; s < num_slots; s++) args->inverse[s] = -1;
    for (int32_t p = 0; p < *args->num_rows; p++)
        if (args->sorted_ids[p] < num_slots) args->inverse[args->sorted_ids[p]] = p;
}

epmoe_status_t epmoei_permute_ref(const epmoe_permute_args_t *args, epmoe_stream_t stream)
{
    (void)stream;
    EPMOEI_CHECK(epmoei_permute_check_indices(args));
    size_t row_bytes = (size_t)args->hidden * (size_t)epmoe_dtype_size(args->dtype);
    int32_t num_slots = args->num_tokens * args->top_k;
    for (int64_t p = 0; p < *args->num_rows; p++) {
        char *y = (char *)args->y + (size_t)p * row_bytes;
        int32_t slot = args->sorted_ids[p];
        if (slot < num_slots)
            memcpy(y, (const char *)args->x + (size_t)(slot / args->top_k) * row_bytes, row_bytes);
        else
            memset(y, 0, row_bytes);
    }
    epmoei_permute_invert(args);
    return EPMOE_OK;
}

epmoe_status_t epmoei_unpermute_ref(const epmoe_unpermute_args_t *args, epmoe_stream_t stream)
{
    (void)stream;
    EPMOEI_CHECK(epmoei_unpermute_check_indices(args));
    int64_t hidden = args->hidden;
    for (int64_t t = 0; t < args->num_tokens; t++)
        for (int64_t i = 0; i < hidden; i++) {
            float acc = 0.0f;
            for (int64_t s = t * args->top_k; s < (t + 1) * args->top_k; s++) {
                if (args->inverse[s] < 0) continue;
                float weight = args->weights ? args->weights[s] : 1.0f;
                acc += weight * epmoei_load(args->y, args->dtype, args->inverse[s] * hidden + i);
            }
            epmoei_store(args->out, args->dtype, t * hidden + i, acc);
        }
    return EPMOE_OK;
}
