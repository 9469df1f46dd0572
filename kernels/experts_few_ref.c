#include "base/dtype.h"
#include "kernels/activation.h"
#include "kernels/experts_few.h"
#include "kernels/op_check.h"

static bool is_expert(const epmoe_experts_args_t *args, int32_t id) { return id >= 0 && id < args->num_experts; }

static float dot(const void *w, int64_t w_row, const void *v, int64_t v_row, int32_t k, epmoe_dtype_t dtype)
{
    float sum = 0.0f;
    for (int32_t i = 0; i < k; i++) sum += epmoei_load(w, dtype, w_row * k + i) * epmoei_load(v, dtype, v_row * k + i);
    return sum;
}

/* One row of the gate/up weights against one token, up to the bias. */
static float projection(const epmoe_experts_args_t *args, int64_t row, int64_t token, float weight)
{
    float value = dot(args->gate_up.data, row, args->x, token, args->hidden, args->dtype);
    if (args->weight_on_input) value *= weight;
    return args->gate_up_bias ? value + args->gate_up_bias[row] : value;
}

epmoe_status_t epmoei_experts_few_gate_up_ref(const epmoe_experts_args_t *args, void *h)
{
    int32_t num_tokens;
    EPMOEI_CHECK(epmoei_actual_tokens(args->num_tokens_dev, args->num_tokens, &num_tokens));
    bool interleaved = args->layout != EPMOE_LAYOUT_GATE_FIRST;
    int64_t f = args->intermediate;
    for (int64_t slot = 0; slot < (int64_t)num_tokens * args->top_k; slot++) {
        if (!is_expert(args, args->ids[slot])) continue;
        int64_t token = slot / args->top_k, first = args->ids[slot] * 2 * f;
        for (int64_t i = 0; i < f; i++) {
            float gate = projection(args, first + (interleaved ? 2 * i : i), token, args->weights[slot]);
            float up = projection(args, first + (interleaved ? 2 * i + 1 : f + i), token, args->weights[slot]);
            float value = epmoei_activate(args->activation, gate, up, args->alpha, args->limit);
            epmoei_store(h, args->dtype, slot * f + i, value);
        }
    }
    return EPMOE_OK;
}

epmoe_status_t epmoei_experts_few_down_ref(const epmoe_experts_args_t *args, const void *h)
{
    int32_t num_tokens;
    EPMOEI_CHECK(epmoei_actual_tokens(args->num_tokens_dev, args->num_tokens, &num_tokens));
    int64_t d = args->hidden;
    for (int64_t token = 0; token < num_tokens; token++)
        for (int64_t i = 0; i < d; i++) {
            float sum = 0.0f;
            for (int64_t slot = token * args->top_k; slot < (token + 1) * args->top_k; slot++) {
                if (!is_expert(args, args->ids[slot])) continue;
                int64_t row = args->ids[slot] * d + i;
                float value = dot(args->down.data, row, h, slot, args->intermediate, args->dtype);
                if (args->down_bias) value += args->down_bias[row];
                sum += args->weight_on_input ? value : args->weights[slot] * value;
            }
            if (args->addend) sum += args->addend[token * d + i];
            if (args->residual) sum += epmoei_load(args->residual, args->y_dtype, token * d + i);
            epmoei_store(args->y, args->y_dtype, token * d + i, sum);
        }
    return EPMOE_OK;
}
