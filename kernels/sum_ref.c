#include "base/dtype.h"
#include "kernels/op_check.h"
#include "kernels/sum.h"

epmoe_status_t epmoei_sum_check_ids(const epmoe_sum_args_t *args, int32_t num_tokens)
{
    int64_t num_slots = (int64_t)num_tokens * args->top_k;
    for (int64_t s = 0; args->ids && s < num_slots; s++)
        if (args->ids[s] < -1)
            return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "ids[%lld,%d] is %d: expected -1 or above",
                               (long long)(s / args->top_k), (int)(s % args->top_k), args->ids[s]);
    return EPMOE_OK;
}

epmoe_status_t epmoei_sum_ref(const epmoe_sum_args_t *args, epmoe_stream_t stream)
{
    (void)stream;
    int32_t num_tokens;
    EPMOEI_CHECK(epmoei_actual_tokens(args->num_tokens_dev, args->num_tokens, &num_tokens));
    EPMOEI_CHECK(epmoei_sum_check_ids(args, num_tokens));
    int64_t hidden = args->hidden;
    for (int64_t t = 0; t < num_tokens; t++)
        for (int64_t i = 0; i < hidden; i++) {
            float acc = 0.0f;
            for (int64_t s = t * args->top_k; s < (t + 1) * args->top_k; s++) {
                if (args->ids && args->ids[s] < 0) continue;
                float weight = args->weights ? args->weights[s] : 1.0f;
                acc += weight * epmoei_load(args->y, args->y_dtype, s * hidden + i);
            }
            if (args->addend) acc += args->addend[t * hidden + i];
            if (args->residual) acc += epmoei_load(args->residual, args->out_dtype, t * hidden + i);
            epmoei_store(args->out, args->out_dtype, t * hidden + i, acc);
        }
    return EPMOE_OK;
}
